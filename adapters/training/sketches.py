"""Sums over ranks by index and sketch: algorithm 1 of TAGC (EuroMLSys '25, section 3).

A step of a layer: every rank sets the entries of least magnitude of each rank's share to zero, all
agree on the index of the others, and each share's sketch is sent to its owner, which adds sketches
up and peels the sum. `tagc` makes training hooks of it.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from ...codec import Codec, codec
from ...formats.dtypes import BY_NAME
from ...homomorphic import SAFE_LOAD, Diagnosis, Sketched, agreed_index, index_to_reduce, sketch
from ...sparsify import check_theta, kept, sparsify_rows
from ..collectives import running, tensors
from ..collectives.calls import Call, TraceRecord
from ..collectives.communicator import Communicator
from ..collectives.tensors import PendingHostCopy, is_cuda
from .error_feedback import ErrorFeedback
from .hooks import scatter
from .layers import Rule

#: Bytes before every message: a digest of the call, a checksum of what follows.
DESCRIPTOR_NBYTES = 16
#: What can be wrong with a message.
_DAMAGED, _OTHER = 1, 2
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
                mine = np.array([_digest(text), len(text)])
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
        after which every later call is refused.
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
        shapes = [(name, tuple(x.shape), str(x.dtype)) for name, x in layers]
        wire = _Wire(self.comm, call, f"{call.sequence}, {self._settings()}, {shapes}")
        error: str | None = None
        running.begin(call)
        try:
            return self._sums(call, wire, layers, everywhere)
        except BaseException as caught:
            error = self._broken = str(caught)
            raise
        finally:
            running.end(call)
            self.raw_bytes += call.raw_bytes
            self.wire_bytes += call.wire_bytes
            self._trace.append(TraceRecord(*call.record(error)))

    def trace(self) -> list[TraceRecord]:
        """The last calls, oldest first; what went uncompressed is in the communicator's trace."""
        return list(self._trace)

    def _sums(
        self, call: Call, wire: _Wire, layers: Sequence[tuple[str, Any]], everywhere: bool
    ) -> list[Any]:
        tagc = self.tagc
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
        with call.stage("index"):
            # The device has enough to do. Ranks with other settings do not come to the sketches.
            kept = wire.settle(early)
        sums = iter(self._by_sketch(call, wire, sent, everywhere) if sent else ())
        with call.stage("decode"):
            facts = [torch.as_tensor(e.counts, device=e.layer.x.device) for e in encoded]
            late = wire.verdict(torch.cat([*facts, torch.stack([e.layer.lost for e in encoded])]))
            numbers = wire.settle(late)
            for _, part in sent:
                part.check()
        results = [
            next(sums) if e.sent is not None else self._uncompressed(e.layer, everywhere)
            for e in encoded
        ]
        lost = numbers[3 * len(encoded) :]
        for i, e in enumerate(encoded):
            self._report(e, kept[i], lost[i], numbers[3 * i : 3 * i + 3])
        if tagc.accumulate:
            for layer, _ in sent:
                e = layer.residual if layer.scale == 1 else layer.residual.div_(layer.scale)
                self.state.residuals.replace(layer.parts, e.view(-1))
        shares = sum(layer.x[0].nbytes for layer, _ in sent)
        call.raw_bytes = (self.comm.world_size - 1) * shares * (2 if everywhere else 1)
        return results

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

    def _agree(self, call: Call, wire: _Wire, layers: Sequence[_Layer]) -> list[Any]:
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

    def _report(self, encoded: _Encoded, kept: int, lost: int, counts: Sequence[int]) -> None:
        layer, sent, ratio, first, _ = encoded
        diagnosis = (sent or first).diagnosis(counts)
        asked = diagnosis if sent is first else first.diagnosis(first.counts().tolist())
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
            ratio=ratio,
            reason="; ".join(reasons),
        )

    def _by_sketch(
        self, call: Call, wire: _Wire, parts: Sequence[tuple[_Layer, Sketched]], everywhere: bool
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


class _Verdict(NamedTuple):
    """The stages of some messages, and of each what is wrong with those from each rank."""

    stages: list[str]
    arriving: PendingHostCopy


class _Wire:
    """Messages of a call, each after its descriptor: uint8, (rows, DESCRIPTOR_NBYTES + n)."""

    def __init__(self, comm: Communicator, call: Call, facts: str) -> None:
        """All ranks must have the same `facts`."""
        self._transport, self._call = comm.transport, call
        self._facts, self._digest = facts, _digest(facts)
        #: Stages of messages, and on the device what is wrong with those from each rank.
        self._verdicts: list[tuple[str, Any]] = []

    def message(self, rows: int, nbytes: int, like: Any) -> Any:
        """Memory for a message of `nbytes`, a multiple of 8, to each of so many ranks."""
        return like.new_empty((rows, DESCRIPTOR_NBYTES + nbytes), dtype=torch.uint8)

    def all_to_all(self, stage: str, sent: Any) -> Any:
        """Row j of `sent` to rank j; row i is rank i's, without descriptor: shape (ranks, n)."""
        with self._call.stage(stage):
            self._seal(sent)
            received = torch.empty_like(sent)
            self._transport.all_to_all(received.view(-1), sent.view(-1))
            self._call.wire_bytes += sent[0].numel() * (len(sent) - 1)
            return self._opened(stage, received)

    def all_gather(self, stage: str, sent: Any) -> Any:
        """The only row of all ranks' `sent`, without descriptors, shape (ranks, n)."""
        with self._call.stage(stage):
            self._seal(sent)
            received = sent.new_empty((self._transport.world_size, sent.shape[1]))
            self._transport.all_gather(received.view(-1), sent.view(-1))
            self._call.wire_bytes += sent.numel() * (len(received) - 1)
            return self._opened(stage, received)

    def verdict(self, numbers: Any = None) -> _Verdict:
        """What is wrong with the messages since the last one, and `numbers`, int64.

        They are copied to the host after what is queued on the device now.
        """
        verdicts, self._verdicts = self._verdicts, []
        pieces = [wrong for _, wrong in verdicts] + ([] if numbers is None else [numbers])
        return _Verdict([stage for stage, _ in verdicts], PendingHostCopy(torch.cat(pieces)))

    def settle(self, verdict: _Verdict) -> list[int]:
        """Wait for a verdict and raise what it says; gives the numbers.

        Raises CollectiveError that names the rank.
        """
        found: list[int] = verdict.arriving.wait(self._transport.timeout).tolist()
        ranks = self._transport.world_size
        for i, stage in enumerate(verdict.stages):
            wrong = found[i * ranks : (i + 1) * ranks]
            if _OTHER in wrong:
                rank = wrong.index(_OTHER)
                detail = f"rank {rank} has other settings or layers, or is at another step"
                detail = f"{detail} than here: {self._facts}"
                raise self._call.failure(stage, detail)
            if _DAMAGED in wrong:
                rank = wrong.index(_DAMAGED)
                raise self._call.failure(stage, f"data from rank {rank} are damaged")
        return found[len(verdict.stages) * ranks :]

    def _seal(self, sent: Any) -> None:
        words = sent.view(torch.int64)
        words[:, 0] = self._digest
        words[:, 1] = _checksum(words[:, 2:])

    def _opened(self, stage: str, received: Any) -> Any:
        words = received.view(torch.int64)
        damaged = words[:, 1] != _checksum(words[:, 2:])
        wrong = torch.where(words[:, 0] == self._digest, damaged * _DAMAGED, _OTHER)
        self._verdicts.append((stage, wrong))
        if not is_cuda(received):
            self.settle(self.verdict())
        return received[:, DESCRIPTOR_NBYTES:]


def _digest(text: str) -> int:
    found = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(found, "little", signed=True)


def _checksum(words: Any) -> Any:
    """The sum modulo 2^64 of int64 words times odd numbers, by row.

    No flipped bit escapes it, nor do two different words that change places, unless the distance of
    their places times their difference is a multiple of 2^63.
    """
    return (words * torch.arange(1, 2 * words.shape[1] + 1, 2, device=words.device)).sum(1)


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


def _estimated(counts: Any) -> bool:
    """Whether some are, by `Sketched.counts`. Waits for a device."""
    occupied, peeled, _ = counts.tolist()
    return bool(occupied > peeled)


def _bytes(x: Any) -> Any:
    return x.view(torch.uint8)
