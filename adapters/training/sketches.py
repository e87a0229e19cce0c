"""Sums over ranks by index and sketch: algorithm 1 of TAGC (EuroMLSys '25, section 3).

A step of a layer: every rank sets the entries of least magnitude of each rank's share to zero, all
agree on the index of the others, and each share's sketch is sent to its owner, which adds sketches
up and peels the sum. `tagc` makes training hooks of it.
"""

from __future__ import annotations

import json
import warnings
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from ...codec import Codec, codec
from ...codecs.common.base import Plan
from ...formats.dtypes import BY_NAME
from ...homomorphic import (
    SAFE_LOAD,
    Diagnosis,
    Sketched,
    agreed_index,
    diagnosis_of,
    index_to_reduce,
    sketch,
)
from ...sparsify import check_theta, kept, sparsify_rows
from ..collectives import running, tensors
from ..collectives.calls import Call, TraceRecord
from ..collectives.communicator import Communicator
from .error_feedback import ErrorFeedback
from .hooks import scatter
from .layers import Rule
from .sketch_messages import DESCRIPTOR_NBYTES, Verdict, Wire, digest

_DTYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}
#: With "1bit" a rank warns if the index lacks more than this share of what it kept.
MUCH_LOST = 0.1


@dataclass(frozen=True)
class Tagc:
    """Settings of sums by index and sketch, equal on all ranks.

    Source: TAGC (EuroMLSys 2025), section 3, algorithm 1 and table 1.

    Args:
        ratio: Ratio of the codec lhc: how many times fewer buckets than elements a sketch has.
        theta: Share of the entries of each rank's share of a layer that are set to zero, at least.
            None: ``1 - 0.75 / (ratio * ranks)``, with which peeling ends even if no two ranks keep
            the same entries. (Table 1, for two ranks: 0.8 for ratio 2, 0.9 for 4, 0.9875 for 10.)
        index: How ranks agree on the index. ``"or"``: 2 bits of traffic per element. ``"4bit"``:
            the same result with 8 bits. ``"1bit"``, as in the paper: a sum of bits, with 2 bits and
            a loss, which ``Report.lost`` counts. Where ranks keep the same entry, bits carry, and
            what they kept is not sent. Entries that several ranks want in every step never arrive;
            a warning says when that is more than a tenth. If NaN or infinity is lost, NaN arrives
            elsewhere. Prefer ``"or"``, which costs the same.
        sketch: Dtype of the buckets, as in lhc; ``"same"`` is that of the gradients. Buckets of
            float16 hold a sum divided by a power of two that is at least the number of ranks, so
            that a finite mean arrives; entries below 2^-14 times that power lose bits to the
            residual.
        mapping: Mapping of the codec lhc.
        accumulate: Whether what a rank zeroed, lost by the index or rounded is added to its next
            gradient. Every rank then keeps a float32 for each element of these layers, unsharded.
            The rounding of sums to buckets of 16 bits, and errors of estimated values, are not
            kept.
        fallback: Lower ratios, tried in falling order if some values would be estimated; if they
            would be with each of them, the layer is sent uncompressed. None: values are estimated,
            with a warning.
        layers: Called with the name and shape of a parameter: whether it is sent by sketch.

    Raises:
        TypeError: If a value has a wrong type.
        ValueError: If a value is not allowed.
    """

    ratio: float = 10
    theta: float | None = None
    index: str = "or"
    sketch: str = "same"
    mapping: str = "rotated"
    accumulate: bool = True
    fallback: Sequence[float] | None = None
    layers: Callable[[str, Sequence[int]], bool] = field(default_factory=Rule)

    def __post_init__(self) -> None:
        """Raise TypeError or ValueError for what is not allowed."""
        self._check_ratio(self.ratio)
        # Settings that mean the same are the same.
        object.__setattr__(self, "ratio", float(self.ratio))
        if self.fallback is not None:
            if isinstance(self.fallback, str) or not isinstance(self.fallback, Sequence):
                raise TypeError(f"fallback is {self.fallback!r}; allowed: a tuple of ratios, None")
            for ratio in self.fallback:
                self._check_ratio(ratio)
                if ratio >= self.ratio:
                    raise ValueError(
                        f"fallback has {ratio:g}; allowed: ratios below {self.ratio:g}"
                    )
            object.__setattr__(self, "fallback", tuple(float(r) for r in self.fallback))
        if self.theta is not None:
            check_theta(self.theta, ", or None")
            object.__setattr__(self, "theta", float(self.theta))
        index_to_reduce(np.empty(0, np.uint8), self.index, 1)
        if not isinstance(self.accumulate, bool):
            raise TypeError(f"accumulate is {self.accumulate!r}; allowed: True or False")
        if not callable(self.layers):
            raise TypeError(
                f"layers is {self.layers!r}; allowed: a Rule() or another function of a "
                "parameter's name and shape"
            )

    def _check_ratio(self, ratio: float) -> None:
        codec("lhc", ratio=ratio, sketch=self.sketch, mapping=self.mapping)

    def share_zeroed(self, ranks: int) -> float:
        """The ``theta`` for a number of ranks.

        Args:
            ranks: Number of ranks.
        """
        if self.theta is not None:
            return self.theta
        return max(0.0, 1 - SAFE_LOAD / (self.ratio * ranks))

    def codec(self, dtype: torch.dtype, ratio: float | None = None) -> Codec:
        """The codec of gradients, which are encoded as float32.

        Args:
            dtype: Dtype of the gradients.
            ratio: Another ratio than that of the settings.
        """
        added = _DTYPES[dtype] if self.sketch == "same" else self.sketch
        return codec("lhc", ratio=ratio or self.ratio, sketch=added, mapping=self.mapping)

    def pays(
        self, nelem: int, dtype: torch.dtype, ratio: float | None = None, ranks: int = 1
    ) -> bool:
        """Whether shares of a layer are sent by sketch; see ``obstacle``.

        Args:
            nelem: Number of elements of a rank's share.
            dtype: Dtype of the gradients.
            ratio: Another ratio than that of the settings.
            ranks: Number of ranks.
        """
        return not self.obstacle(nelem, dtype, ratio, ranks)

    def unfit(self, nelem: int, dtype: torch.dtype, ranks: int = 1) -> str:
        """Why shares of a layer have no sketch.

        Args:
            nelem: Number of elements of a rank's share.
            dtype: Dtype of the gradients.
            ranks: Number of ranks.

        Returns:
            The reason; ``""`` if they have one.
        """
        if dtype not in _DTYPES:
            return f"{dtype} has no sketch; allowed: {', '.join(map(str, _DTYPES))}"
        theta = self.share_zeroed(ranks)
        if kept(theta, nelem):
            return ""
        what = f"theta {theta:.6g} keeps none of a rank's {nelem} elements"
        return f"{what}; take a lower theta or ratio"

    def obstacle(
        self, nelem: int, dtype: torch.dtype, ratio: float | None = None, ranks: int = 1
    ) -> str:
        """Why shares of a layer are not sent by sketch: no sketch, or no fewer bytes.

        Args:
            nelem: Number of elements of a rank's share.
            dtype: Dtype of the gradients.
            ratio: Another ratio than that of the settings.
            ranks: Number of ranks.

        Returns:
            The reason; ``""`` if they are.
        """
        if unfit := self.unfit(nelem, dtype, ranks):
            return unfit
        plan = self.codec(dtype, ratio).plan((nelem,), "float32")
        index = -(-nelem // 8) * (8 if self.index == "4bit" else 2)
        sketched = plan.layout.sections[0].nbytes
        if plan.codec.name != "lhc" or sketched + index >= nelem * dtype.itemsize:
            return f"{nelem} elements a rank of {dtype} take no fewer bytes by sketch"
        return ""


class Report(NamedTuple):
    """The outcome of one layer in one step, over all ranks where nothing else is said.

    Attributes:
        name: Name of the layer.
        step: Number of earlier calls for this layer.
        nelem: Number of elements, with the padding of FSDP.
        theta: Share of the entries that were set to zero.
        kept: Entries that this rank kept.
        lost: Those of them that the agreed index lacks (``"1bit"``), which do not arrive; if one of
            them is not finite, a NaN arrives instead.
        diagnosis: How the index peels at the ratio that was used, or for an uncompressed layer at
            the one of the settings.
        ratio: Ratio of the codec; None if the layer was sent uncompressed.
        reason: Why it is not the ratio of the settings, or what to change; else ``""``.
    """

    name: str
    #: Calls for this layer before.
    step: int
    #: Elements, with those that FSDP pads with.
    nelem: int
    theta: float
    #: Entries that this rank kept, and those of them that the agreed index lacks ("1bit"), which
    #: do not arrive; if one of them is not finite, a NaN arrives instead.
    kept: int
    lost: int
    #: The index at the ratio that was taken, or for an uncompressed layer at the one asked for.
    diagnosis: Diagnosis | None
    #: None: the layer went uncompressed.
    ratio: float | None
    #: Why it is not the ratio that was asked for, or what to change; else empty.
    reason: str

    @property
    def density(self) -> float:
        """Share of the elements that are in the index."""
        return self.diagnosis.density if self.diagnosis else 1.0

    @property
    def peeled(self) -> float:
        """Share of the elements in the index that arrive exactly."""
        if self.diagnosis is None or self.ratio is None or not self.diagnosis.occupied:
            return 1.0
        return self.diagnosis.peeled / self.diagnosis.occupied

    @property
    def estimated(self) -> float:
        """Share of the elements in the index that are estimates."""
        return 1 - self.peeled


class State:
    """The state of one rank of a training run: residuals by layer, and reports of the last steps.

    Args:
        history: Number of reports that are kept.
    """

    def __init__(self, history: int = 1000) -> None:
        self.residuals = ErrorFeedback()
        self.reports: deque[Report] = deque(maxlen=history)
        self._steps: Counter[str] = Counter()
        self._warned: set[str] = set()

    def note(self, name: str, **facts: Any) -> None:
        """Add a report.

        Args:
            name: Name of the layer.
            **facts: The other fields of ``Report``.
        """
        self.reports.append(Report(name, self._steps[name], **facts))
        self._steps[name] += 1

    def warn(self, key: str, text: str) -> None:
        """Warn, once per key.

        Args:
            key: The key.
            text: The warning.
        """
        if key not in self._warned:
            self._warned.add(key)
            warnings.warn(text, RuntimeWarning, stacklevel=2)


class _Layer(NamedTuple):
    """A layer in a call: `x` as it was passed, and what is to be sent of it and its residual.

    Numbers are int64 tensors on its device, shape ().
    """

    name: str
    x: Any
    #: What nothing has been taken from yet, where the index may lack some of what was; else None.
    corrected: Any
    #: float32, rounded to the dtype of the sketch, shape of `x`.
    sparse: Any
    #: What is left, for the next step: float32, shape of `x`; None if nobody keeps it.
    residual: Any
    kept: Any
    lost: Any
    #: What `corrected`, `sparse` and `residual` are multiples of.
    scale: float

    @property
    def nelem(self) -> int:
        return int(self.x.numel())

    @property
    def parts(self) -> list[tuple[str, int]]:
        return [(self.name, self.nelem)]


class _Encoded(NamedTuple):
    """What becomes of a layer, the same on all ranks: `sent` is None if it goes uncompressed."""

    layer: _Layer
    sent: Sketched | None
    ratio: float | None
    #: At the ratio asked for.
    first: Sketched
    #: What `Sketched.counts` says of the ratio that is taken, or of that asked for.
    counts: Any


class _Told(NamedTuple):
    """What a report needs of a layer besides numbers; it holds no memory of the layer."""

    name: str
    nelem: int
    ratio: float | None
    #: Of what `counts` are about.
    plan: Plan
    #: At the ratio asked for, if that is another one.
    asked: Diagnosis | None


class _Late(NamedTuple):
    """A call whose sums are queued: what is still to be waited for, and told."""

    call: Call
    wire: Wire
    #: With the number of entries that this rank kept, of each layer.
    early: Verdict
    #: These numbers, if they have been waited for.
    kept: list[int] | None
    #: With the counts of each layer, what the index lacks of each, and what decoding has found.
    verdict: Verdict
    told: list[_Told]


class Sketches:
    """Sums over the ranks of a communicator, which has the other layers to itself.

    Layers that go uncompressed, or that `Tagc.layers` does not name, go by its codec. All ranks
    make the same calls; not for use by several threads at once. `raw_bytes` and `wire_bytes` went
    to other ranks, uncompressed and in fact, in sketches and what belongs to them.
    """

    def __init__(self, comm: Communicator, tagc: Tagc, state: State) -> None:
        """Raises ValueError if the index mode does not allow so many ranks.

        And for `accumulate` with a `fallback` and a communicator that does not sum two-shot: what
        it loses of a rank's tensor is then not known.
        """
        index_to_reduce(np.empty(0, np.uint8), tagc.index, comm.world_size)
        if tagc.accumulate and tagc.fallback is not None and comm.topology != "two-shot":
            raise ValueError(
                f"accumulate and fallback are set, topology is {comm.topology!r}; allowed with "
                "them: 'two-shot'"
            )
        self.comm, self.tagc, self.state = comm, tagc, state
        self.raw_bytes = 0
        self.wire_bytes = 0
        self._theta = tagc.share_zeroed(comm.world_size)
        self._obstacles: dict[tuple[int, torch.dtype], str] = {}
        self._calls = 0
        self._broken: str | None = None
        self._trace: deque[TraceRecord] = deque(maxlen=1000)
        self._agreed: set[tuple[tuple[str, ...], tuple[str, ...]]] = set()
        #: Whether sums may be left for `settle`, which somebody calls before they are used.
        self.defers = False
        self._late: deque[_Late] = deque()
        #: Layers, by name, shape and dtype, for which all ranks have come to the sketches before.
        self._met: set[tuple[tuple[str, tuple[int, ...], str], ...]] = set()

    def obstacle(self, nelem: int, dtype: torch.dtype) -> str:
        """That of the settings for these ranks, kept at hand."""
        key = nelem, dtype
        if key not in self._obstacles:
            self._obstacles[key] = self.tagc.obstacle(*key, ranks=self.comm.world_size)
        return self._obstacles[key]

    def agree(self, unit: Sequence[str], chosen: Sequence[str]) -> None:
        """Compare what is `chosen` of the parameters of `unit`, once, before their first `sums`.

        Raises CollectiveError, which says how they differ, where ranks have other settings or
        choose other layers.
        """
        key = tuple(unit), tuple(chosen)
        if key in self._agreed:
            return
        call = Call(self.comm.rank, "sketches", self._calls, "sketch")
        if self._broken is not None:
            raise call.failure("start", f"an earlier call has failed: {self._broken}")
        try:
            with call.stage("agree"):
                facts = self._settings() | {"parameters": list(unit), "layers": list(chosen)}
                text = json.dumps(facts)
                # Of a length that all know; texts only where ranks differ, which all of them see.
                mine = np.array([digest(text), len(text)])
                found = self.comm.session.gather_plain(mine.view(np.uint8)).view(np.int64)
                others = np.flatnonzero(found[:, 0] != mine[0]).tolist()
                if others:
                    padded = np.frombuffer(text.ljust(found[:, 1].max()).encode(), np.uint8)
                    rows = self.comm.session.gather_plain(padded.copy())
                    theirs = json.loads(rows[others[0]].tobytes())
                    differ = _differences(facts, theirs, others[0])
        except BaseException as caught:
            # What this rank has not read is still to come, to whoever reads next.
            self._broken = self.comm.session.broken = str(caught)
            raise
        if others:
            where = f"{unit[0]} to {unit[-1]}" if unit else "no parameters"
            detail = f"ranks {others} have other settings or choose other layers of {where}"
            raise call.failure("agree", f"{detail}: {differ}")
        self._agreed.add(key)

    def sums(self, layers: Sequence[tuple[str, Any]], everywhere: bool = False) -> list[Any]:
        """The sums of layers, float32, for their owners or for all.

        A layer is a name and a contiguous tensor of shape (ranks, m), without `obstacle`; row r
        belongs to rank r. The result has shape (m,), this rank's row, or with `everywhere` (ranks,
        m). A value that is peeled is the sum, in float32 in the order of ranks, of what ranks kept
        and rounded to the dtype of the buckets, rounded once to that (float16: divided before, and
        multiplied in float32 after it; see `Tagc`). Where no rank has kept anything it is zero. NaN
        and infinities arrive; with "1bit", if the index lacks one that a rank kept, the result is
        NaN wherever the index has an entry, and it has one at least.

        Raises ValueError for a layer of which nothing would be kept, or of another dtype;
        CollectiveError for other layers or settings on other ranks, damaged data and lost ranks,
        after which every later call is refused. With `defers` and no `fallback` the host does not
        wait for the device, except in the first call for the same layers: `settle` raises later
        what is wrong, and reports.
        """
        if not layers:
            return []
        for name, x in layers:
            if unfit := self.tagc.unfit(x.shape[1], x.dtype, self.comm.world_size):
                raise ValueError(f"{name}: {unfit}")
        call = Call(self.comm.rank, "sketches", self._calls, "sketch", self.comm.name)
        self._calls += 1
        if self._broken is not None:
            raise call.failure("start", f"an earlier call has failed: {self._broken}")
        call.algorithm = f"{'all-reduce' if everywhere else 'reduce-scatter'} of sketches, lhc"
        call.reason = f"the rule names {len(layers)} layers"
        call.traced = self.comm.session.traced
        shapes = [(name, tuple(x.shape), str(x.dtype)) for name, x in layers]
        wire = Wire(self.comm, call, f"{call.sequence}, {self._settings()}, {shapes}")
        key = tuple(shapes)
        late: _Late | None = None
        error: str | None = None
        running.begin(call)
        try:
            results, late = self._sums(call, wire, layers, everywhere, met=key in self._met)
        except BaseException as caught:
            error = self._broken = str(caught)
            raise
        finally:
            running.end(call)
            self.raw_bytes += call.raw_bytes
            self.wire_bytes += call.wire_bytes
            if late is None:
                self._trace.append(TraceRecord(*call.record(error)))
        self._met.add(key)
        if late is not None:
            self._late.append(late)
        return results

    def settle(self) -> None:
        """Report on the sums that were left for later, and raise what is wrong. Waits for them.

        Raises:
            CollectiveError: For other layers or settings on other ranks, damaged data and lost
                ranks. Residuals are those of the failed step then.
        """
        while self._late:
            late = self._late.popleft()
            error: str | None = None
            try:
                with running.noted(late.call):
                    self._settle(late)
            except BaseException as caught:
                error = self._broken = str(caught)
                # Of later sums nothing more can be known.
                self._late.clear()
                raise
            finally:
                self._trace.append(TraceRecord(*late.call.record(error)))

    def _settle(self, late: _Late) -> None:
        call, told = late.call, late.told
        with call.stage("index"):
            kept = late.wire.settle(late.early) if late.kept is None else late.kept
        with call.stage("decode"):
            numbers = late.wire.settle(late.verdict)
            _check(numbers[4 * len(told) :])
        for i, layer in enumerate(told):
            lost = numbers[3 * len(told) + i]
            self._report(layer, kept[i], lost, numbers[3 * i : 3 * i + 3])

    def trace(self) -> list[TraceRecord]:
        """The last calls, oldest first; what went uncompressed is in the communicator's trace."""
        return list(self._trace)

    def _sums(
        self, call: Call, wire: Wire, layers: Sequence[tuple[str, Any]], everywhere: bool, met: bool
    ) -> tuple[list[Any], _Late | None]:
        """The sums, and what is left of them for `settle`; `met`: these layers were summed before.

        In the first call the host waits for the index, as ranks with other layers do not come to
        the sketches.
        """
        tagc = self.tagc
        defers = self.defers and tagc.fallback is None
        with call.stage("sparsify"):
            found = [self._sparsified(name, x) for name, x in layers]
        indexes = self._agree(call, wire, found)
        early = wire.verdict(torch.stack([la.kept for la in found]))
        with call.stage("encode"):
            if tagc.index == "1bit":
                for index in indexes:
                    # Which can say that what is lost is not finite.
                    index[:1] |= (index == 0).all().to(torch.uint8)
                found = [_within(la, index) for la, index in zip(found, indexes, strict=True)]
            encoded = [self._encoded(la, index) for la, index in zip(found, indexes, strict=True)]
        sent = [(e.layer, e.sent) for e in encoded if e.sent is not None]
        kept: list[int] | None = None
        if not (defers and met):
            with call.stage("index"):
                # The device has enough to do. Ranks with other layers do not come to the sketches.
                kept = wire.settle(early)
        statuses = found[0].kept.new_zeros(len(sent))
        for i, (_, part) in enumerate(sent):
            part.report_to(statuses[i : i + 1])
        sums = iter(self._by_sketch(call, wire, sent, everywhere) if sent else ())
        with call.stage("decode"):
            facts = [torch.as_tensor(e.counts, device=e.layer.x.device) for e in encoded]
            lost = torch.stack([e.layer.lost for e in encoded])
            verdict = wire.verdict(torch.cat([*facts, lost, statuses]))
        late = _Late(call, wire, early, kept, verdict, [_told(e) for e in encoded])
        if not defers:
            self._settle(late)
        results = [
            next(sums) if e.sent is not None else self._uncompressed(e.layer, everywhere)
            for e in encoded
        ]
        if tagc.accumulate:
            for layer, _ in sent:
                e = layer.residual if layer.scale == 1 else layer.residual.div_(layer.scale)
                self.state.residuals.replace(layer.parts, e.view(-1))
        shares = sum(layer.x[0].nbytes for layer, _ in sent)
        call.raw_bytes = (self.comm.world_size - 1) * shares * (2 if everywhere else 1)
        return results, late if defers else None

    def _settings(self) -> dict[str, Any]:
        """What all ranks must have in common; without the rule, whose result is compared."""
        names = "ratio", "index", "sketch", "mapping", "accumulate"
        lower = None if self.tagc.fallback is None else list(self.tagc.fallback)
        same = {name: getattr(self.tagc, name) for name in names}
        return same | {"theta": self._theta, "fallback": lower}

    def _sparsified(self, name: str, x: Any) -> _Layer:
        flat, accumulate = x.reshape(-1), self.tagc.accumulate
        if accumulate:
            self.state.residuals.belongs([name], self.comm.rank, self.comm.world_size)
            rows = self.state.residuals.corrected(flat, [(name, x.numel())]).view(x.shape)
        else:
            rows = flat.float().view(x.shape)
        added = BY_NAME[self.tagc.codec(x.dtype).spec.sketch]  # type: ignore[attr-defined]
        scale = 1.0
        if added.name == "float16" and self.comm.world_size > 1:
            # Exact but for the smallest; the owner's sum is not above the largest term.
            scale = 2.0 ** -(self.comm.world_size - 1).bit_length()
            rows = rows * scale
        corrected = rows if accumulate and self.tagc.index == "1bit" else None
        residual = None
        if accumulate:
            residual = rows if corrected is None else torch.empty_like(rows)
        # Rounded here, so that the residual takes what that loses.
        sparse, count = sparsify_rows(rows, self._theta, added, residual)
        return _Layer(name, x, corrected, sparse, residual, count, torch.zeros_like(count), scale)

    def _agree(self, call: Call, wire: Wire, layers: Sequence[_Layer]) -> list[Any]:
        """The index of all ranks: each combines a share of it, and all gather the shares.

        So every network can do it, NCCL too, in the bytes of an all-reduce around a ring.
        """
        ranks, mode = self.comm.world_size, self.tagc.index
        with call.stage("index"):
            mine = [
                torch.as_tensor(self.tagc.codec(la.x.dtype).measure(la.sparse.view(-1)))
                for la in layers
            ]
            reduced, op = index_to_reduce(torch.cat(mine), mode, ranks)
            share = -(-reduced.numel() // (8 * ranks)) * 8
            sent = wire.message(ranks, share, reduced)
            for r, row in enumerate(sent):
                part = reduced[r * share : (r + 1) * share]
                row[DESCRIPTOR_NBYTES : DESCRIPTOR_NBYTES + part.numel()] = part
                row[DESCRIPTOR_NBYTES + part.numel() :] = 0
        received = wire.all_to_all("index", sent)
        with call.stage("index"):
            combine = torch.bitwise_or if op == "bitwise_or" else torch.add
            own = wire.message(1, share, reduced)
            for row in received[1:]:
                combine(received[0], row, out=received[0])
            own[0, DESCRIPTOR_NBYTES:] = received[0]
        whole = wire.all_gather("index", own).reshape(-1)
        with call.stage("index"):
            index = agreed_index(whole[: reduced.numel()], mode)
            parts = index.split([part.numel() for part in mine])
            for part, layer in zip(parts, layers, strict=True):
                # Carries of a sum get behind the last element.
                part[-1:] &= 0xFF >> -layer.nelem % 8
        return list(parts)

    def _encoded(self, layer: _Layer, index: Any) -> _Encoded:
        """The layer at the ratio asked for, or at a lower one; every rank chooses the same."""
        tagc = self.tagc
        first = self._sketched(layer, index, tagc.ratio)
        counts = first.counts()
        if tagc.fallback is None or not _estimated(counts):
            return _Encoded(layer, first, tagc.ratio, first, counts)
        for lower in sorted(tagc.fallback, reverse=True):
            if tagc.pays(layer.x.shape[1], layer.x.dtype, lower, self.comm.world_size):
                sent = self._sketched(layer, index, lower)
                found = sent.counts()
                if not _estimated(found):
                    return _Encoded(layer, sent, lower, first, found)
        return _Encoded(layer, None, None, first, counts)

    def _sketched(self, layer: _Layer, index: Any, ratio: float) -> Sketched:
        chosen = self.tagc.codec(layer.x.dtype, ratio)
        return Sketched(chosen, layer.sparse.view(-1), index, chunks=self.comm.world_size)

    def _report(self, layer: _Told, kept: int, lost: int, counts: Sequence[int]) -> None:
        diagnosis = diagnosis_of(layer.plan, counts)
        asked = layer.asked or diagnosis
        reasons = [asked.advice] if asked.advice else []
        if lost:
            reasons.insert(0, f"'1bit' lost {lost} of this rank's values")
        if asked.estimated and self.tagc.fallback is None:
            self.state.warn(layer.name, f"{layer.name}: {'; '.join(reasons)}")
        if lost > MUCH_LOST * kept:
            self.state.warn(
                "1bit",
                f"{layer.name}: index '1bit' lost {lost} of the {kept} values that this rank kept; "
                "entries that ranks share never arrive with it; take index='or', or '4bit'",
            )
        self.state.note(
            layer.name,
            nelem=layer.nelem,
            theta=self._theta,
            kept=kept,
            lost=lost,
            diagnosis=diagnosis,
            ratio=layer.ratio,
            reason="; ".join(reasons),
        )

    def _by_sketch(
        self, call: Call, wire: Wire, parts: Sequence[tuple[_Layer, Sketched]], everywhere: bool
    ) -> list[Any]:
        ranks, me = self.comm.world_size, self.comm.rank
        with call.stage("encode"):
            # Of each layer the sketch of every chunk, for its owner.
            sketches = [[sketch(s.buffer, r) for r in range(ranks)] for _, s in parts]
            ends = np.cumsum(
                [DESCRIPTOR_NBYTES, *(_bytes(of[me]).numel() for of in sketches)]
            ).tolist()
            sent = wire.message(ranks, ends[-1] - DESCRIPTOR_NBYTES, _bytes(sketches[0][me]))
            for of, at, end in zip(sketches, ends, ends[1:], strict=False):
                for row, part in zip(sent, of, strict=True):
                    row[at:end] = _bytes(part)
        received = wire.all_to_all("sketch", sent)
        with call.stage("add"):
            for of, at, end in zip(sketches, ends, ends[1:], strict=False):
                own = of[me]
                terms = [
                    row[at - DESCRIPTOR_NBYTES : end - DESCRIPTOR_NBYTES].view(own.dtype)
                    for row in received
                ]
                total = own.copy_(terms[0]) if own.dtype == torch.float32 else terms[0].float()
                for term in terms[1:]:
                    tensors.add(total, term)
                own.copy_(total)
        if everywhere:
            with call.stage("sketch"):
                mine = wire.message(1, ends[-1] - DESCRIPTOR_NBYTES, sent)
                for of, at, end in zip(sketches, ends, ends[1:], strict=False):
                    mine[0, at:end] = _bytes(of[me])
            gathered = wire.all_gather("sketch", mine)
            with call.stage("sketch"):
                for of, at, end in zip(sketches, ends, ends[1:], strict=False):
                    for row, part in zip(gathered, of, strict=True):
                        _bytes(part).copy_(row[at - DESCRIPTOR_NBYTES : end - DESCRIPTOR_NBYTES])
        with call.stage("decode"):
            return [self._decoded(layer, sent, everywhere) for layer, sent in parts]

    def _decoded(self, layer: _Layer, sent: Sketched, everywhere: bool) -> Any:
        m = layer.x.shape[1]
        start = 0 if everywhere else self.comm.rank * m
        found = sent.decode(start, layer.nelem if everywhere else start + m)
        if layer.scale != 1:
            found.div_(layer.scale)
        return found.view(layer.x.shape) if everywhere else found

    def _uncompressed(self, layer: _Layer, everywhere: bool) -> Any:
        comm = self.comm
        total = layer.x.new_empty(layer.x.shape[1], dtype=torch.float32)
        residuals = self.state.residuals if self.tagc.accumulate else None
        scatter(comm, layer.x.view(-1), total, residuals, layer.parts)
        return comm.all_gather(total).view(layer.x.shape) if everywhere else total


def _differences(here: dict[str, Any], theirs: dict[str, Any], rank: int) -> str:
    """In which facts a rank differs from this one; of names those that one of the two lacks."""
    found = []
    for name, mine in here.items():
        other = theirs[name]
        if mine == other:
            continue
        if name in ("parameters", "layers") and set(mine) != set(other):
            mine, other = ([x for x in a if x not in b] for a, b in ((mine, other), (other, mine)))
        found.append(f"{name}: {other!r} on rank {rank}, {mine!r} here")
    return "; ".join(found)


def _within(layer: _Layer, index: Any) -> _Layer:
    """The layer without entries that are not in the index; they stay with the residual.

    If one of them is not finite, the layer is NaN at all that are.
    """
    places = torch.arange(8, dtype=torch.uint8, device=index.device)
    bits = (index[:, None] >> places & 1).view(-1)[: layer.nelem].bool().view(layer.x.shape)
    if layer.residual is not None:
        corrected = layer.corrected.nan_to_num(0.0, 0.0, 0.0)
        torch.where(bits, layer.residual, corrected, out=layer.residual)
    lost = torch.where(bits, 0, layer.sparse)
    sent = torch.where(lost.isfinite().all(), layer.sparse, torch.nan)
    sparse = torch.where(bits, sent, 0)
    return layer._replace(sparse=sparse, lost=torch.count_nonzero(lost))


def _told(encoded: _Encoded) -> _Told:
    layer, sent, ratio, first, _ = encoded
    asked = None if sent is first else first.diagnosis(first.counts().tolist())
    return _Told(layer.name, layer.nelem, ratio, (sent or first).plan, asked)


def _check(statuses: Sequence[int]) -> None:
    """Raise what decoding on a GPU has found."""
    if any(statuses):
        from ...codecs.common.frame_triton import problem

        for error in map(problem, statuses):
            if error is not None:
                raise error


def _estimated(counts: Any) -> bool:
    """Whether some are, by `Sketched.counts`. Waits for a device."""
    occupied, peeled, _ = counts.tolist()
    return bool(occupied > peeled)


def _bytes(x: Any) -> Any:
    return x.view(torch.uint8)
