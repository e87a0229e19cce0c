"""Sums over ranks by index and sketch: algorithm 1 of TAGC (EuroMLSys '25, section 3).

A step of a layer: every rank zeroes the entries of least magnitude of each rank's share, all agree
on the index of the others, each share's sketch goes to its owner, and is added up and peeled there.
`tagc` makes training hooks of it.
"""

from __future__ import annotations

import hashlib
import warnings
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from ..codec import Codec, codec
from ..formats.dtypes import BY_NAME
from ..homomorphic import (
    SAFE_LOAD,
    Diagnosis,
    Sketched,
    agreed_index,
    index_to_reduce,
    sketch,
)
from ..sparsify import sparsify_rows
from .calls import Call, TraceRecord
from .collectives import Communicator
from .error_feedback import ErrorFeedback
from .hooks import scatter
from .layers import Rule
from .tensors import OnTheWay, is_cuda

#: Bytes before every message: a digest of the call, a checksum of what follows.
CARD_NBYTES = 16
#: What can be wrong with a message.
_DAMAGED, _OTHER = 1, 2
_DTYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}


@dataclass(frozen=True)
class Tagc:
    """What ranks agree on; all of them the same.

    `ratio`, `sketch` and `mapping` are those of the codec lhc; "same" cells are of the gradients'
    dtype. At least the share `theta` of the entries of each rank's share of a layer is zeroed; None
    is 1 - 0.75 / (ratio * ranks), so that peeling ends even if no two ranks keep the same entries.
    (TAGC, table 1, which is for two ranks: 0.8 for 2x, 0.9 for 4x, 0.9875 for 10x.)

    `index` is how ranks agree on the index: "or", 2 bits of traffic for an element, "4bit", the
    same result with 8 bits, or "1bit", the paper's, with 2 bits and a loss, which `Report.lost`
    counts. With `accumulate`, what was zeroed, lost or rounded goes with the next step's gradient:
    every rank keeps a float32 number for each element of these layers, unsharded.

    `fallback` are lower ratios, tried in falling order if some values would be estimated; if they
    would be with each of them, the layer goes uncompressed. None: they are estimated, with a
    warning. `layers(name, shape)` says whether a parameter goes by sketch.
    """

    ratio: float = 10
    theta: float | None = None
    index: str = "or"
    sketch: str = "same"
    mapping: str = "rotated"
    accumulate: bool = True
    fallback: tuple[float, ...] | None = None
    layers: Callable[[str, Sequence[int]], bool] = field(default_factory=Rule)

    def __post_init__(self) -> None:
        """Raise TypeError or ValueError for what is not allowed."""
        for ratio in (self.ratio, *(self.fallback or ())):
            codec("lhc", ratio=ratio, sketch=self.sketch, mapping=self.mapping)
            if ratio > self.ratio:
                raise ValueError(f"fallback has {ratio:g}; allowed: ratios below {self.ratio:g}")
        if self.theta is not None and not 0 <= self.theta <= 1:
            raise ValueError(f"theta is {self.theta!r}; allowed: 0 to 1, or None")
        index_to_reduce(np.empty(0, np.uint8), self.index, 1)

    def share_zeroed(self, ranks: int) -> float:
        """The `theta` for so many ranks."""
        if self.theta is not None:
            return self.theta
        return max(0.0, 1 - SAFE_LOAD / (self.ratio * ranks))

    def codec(self, dtype: torch.dtype, ratio: float | None = None) -> Codec:
        """The codec of gradients of `dtype`, which are encoded as float32."""
        cells = _DTYPES[dtype] if self.sketch == "same" else self.sketch
        return codec("lhc", ratio=ratio or self.ratio, sketch=cells, mapping=self.mapping)

    def pays(self, nelem: int, dtype: torch.dtype, ratio: float | None = None) -> bool:
        """True if a share of `nelem` elements takes fewer bytes than uncompressed."""
        if dtype not in _DTYPES or not nelem:
            return False
        plan = self.codec(dtype, ratio).plan((nelem,), "float32")
        if plan.codec.name != "lhc":
            return False
        index = -(-nelem // 8) * (8 if self.index == "4bit" else 2)
        return bool(plan.layout.sections[0].nbytes + index < nelem * dtype.itemsize)


class Report(NamedTuple):
    """What became of a layer in one step, of all ranks where nothing else is said."""

    name: str
    #: Calls for this layer before.
    step: int
    #: Elements, with those that FSDP pads with.
    nelem: int
    theta: float
    #: Entries that this rank kept, and those of them that the agreed index lacks ("1bit").
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
    """What one rank keeps of a training run: residuals by layer, and reports of the last steps."""

    def __init__(self, history: int = 1000) -> None:
        self.residuals = ErrorFeedback()
        self.reports: deque[Report] = deque(maxlen=history)
        self._steps: Counter[str] = Counter()
        self._warned: set[str] = set()

    def note(self, name: str, warn: bool = False, **facts: Any) -> None:
        """Add a report; warn if that was not done for this layer before."""
        report = Report(name, self._steps[name], **facts)
        self._steps[name] += 1
        self.reports.append(report)
        if warn and name not in self._warned:
            self._warned.add(name)
            warnings.warn(f"{name}: {report.reason}", RuntimeWarning, stacklevel=2)


class _Layer(NamedTuple):
    """A layer on its way: `x` as it came, and of that with the residual what is to be sent.

    Numbers are int64 tensors on its device, shape ().
    """

    name: str
    x: Any
    #: What nothing has been taken from yet, where the index may lack some of what was; else None.
    corrected: Any
    #: float32, rounded to the cells' dtype, shape of `x`.
    sparse: Any
    #: What is left, for the next step: float32, shape of `x`; None if nobody keeps it.
    residual: Any
    kept: Any
    lost: Any

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
        """Raises ValueError if the index mode does not carry so many ranks.

        And for `accumulate` with a fall-back to a communicator that sums by hops: nobody knows then
        what it loses of a rank's tensor.
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
        self._calls = 0
        self._broken: str | None = None
        self._trace: deque[TraceRecord] = deque(maxlen=1000)
        self._agreed: set[tuple[str, ...]] = set()

    def agree(self, unit: Sequence[str], chosen: Sequence[str]) -> None:
        """Compare what is `chosen` of the parameters of `unit`, once, before their first `sums`.

        Raises CollectiveError where ranks have other settings or choose other layers.
        """
        key = tuple(unit)
        if key in self._agreed:
            return
        call = Call(self.comm.rank, "sketches", self._calls, "sketch")
        with call.stage("agree"):
            mine = np.array([_digest(f"{self._settings()} {key} {list(chosen)}")])
            found = self.comm._gather_plain(mine.view(np.uint8)).view(np.int64)[:, 0]
            others = np.flatnonzero(found != mine).tolist()
        if others:
            where = f"{key[0]} to {key[-1]}"
            detail = f"ranks {others} have other settings or choose other layers of {where}"
            raise call.failure("agree", detail)
        self._agreed.add(key)

    def sums(self, layers: Sequence[tuple[str, Any]], everywhere: bool = False) -> list[Any]:
        """The sums of layers, float32, for their owners or for all.

        A layer is a name and a contiguous tensor of shape (ranks, m), of a dtype for which
        `Tagc.pays`; row r is rank r's to own. The result has shape (m,), this rank's row, or with
        `everywhere` (ranks, m). A value that is peeled is the sum, in float32 in the order of
        ranks, of what ranks kept and rounded to the cells' dtype, rounded once to that: NaN and
        infinities arrive, and zeros where no rank has kept anything.

        Raises CollectiveError: for other layers or settings elsewhere, damage on the way, a rank
        that is gone; every later call is refused then.
        """
        if not layers:
            return []
        call = Call(self.comm.rank, "sketches", self._calls, "sketch")
        self._calls += 1
        if self._broken is not None:
            raise call.failure("start", f"an earlier call has failed: {self._broken}")
        call.algorithm = f"{'all-reduce' if everywhere else 'reduce-scatter'} of sketches, lhc"
        call.reason = f"the rule names {len(layers)} layers"
        shapes = [(name, tuple(x.shape), str(x.dtype)) for name, x in layers]
        wire = _Wire(self.comm, call, _digest(f"{call.sequence} {self._settings()} {shapes}"))
        error: str | None = None
        try:
            return self._sums(call, wire, layers, everywhere)
        except BaseException as caught:
            error = self._broken = str(caught)
            raise
        finally:
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
                self.state.residuals.replace(layer.parts, layer.residual.view(-1))
        shares = sum(layer.x[0].nbytes for layer, _ in sent)
        call.raw_bytes = (self.comm.world_size - 1) * shares * (2 if everywhere else 1)
        return results

    def _settings(self) -> str:
        """What all ranks must have in common; without the rule, whose result is compared."""
        tagc = self.tagc
        same = tagc.ratio, self._theta, tagc.index, tagc.sketch, tagc.mapping, tagc.fallback
        return f"{same} {tagc.accumulate}"

    def _sparsified(self, name: str, x: Any) -> _Layer:
        flat, accumulate = x.reshape(-1), self.tagc.accumulate
        if accumulate:
            rows = self.state.residuals.corrected(flat, [(name, x.numel())]).view(x.shape)
        else:
            rows = flat.float().view(x.shape)
        cells = BY_NAME[self.tagc.codec(x.dtype).spec.sketch]  # type: ignore[attr-defined]
        corrected = rows if accumulate and self.tagc.index == "1bit" else None
        residual = None
        if accumulate:
            residual = rows if corrected is None else torch.empty_like(rows)
        # Rounded here, so that the residual takes what that loses.
        sparse, kept = sparsify_rows(rows, self._theta, cells, residual)
        return _Layer(name, x, corrected, sparse, residual, kept, torch.zeros_like(kept))

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
                row[CARD_NBYTES : CARD_NBYTES + part.numel()] = part
                row[CARD_NBYTES + part.numel() :] = 0
        came = wire.all_to_all("index", sent)
        with call.stage("index"):
            combine = torch.bitwise_or if op == "bitwise_or" else torch.add
            own = wire.message(1, share, reduced)
            for row in came[1:]:
                combine(came[0], row, out=came[0])
            own[0, CARD_NBYTES:] = came[0]
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
            if tagc.pays(layer.x.shape[1], layer.x.dtype, lower):
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
        reason = asked.advice or ""
        if lost:
            reason = f"'1bit' lost {lost} of this rank's values; {reason}"
        self.state.note(
            layer.name,
            warn=bool(asked.estimated) and self.tagc.fallback is None,
            nelem=layer.nelem,
            theta=self._theta,
            kept=kept,
            lost=lost,
            diagnosis=diagnosis,
            ratio=ratio,
            reason=reason.removesuffix("; "),
        )

    def _by_sketch(
        self, call: Call, wire: _Wire, parts: Sequence[tuple[_Layer, Sketched]], everywhere: bool
    ) -> list[Any]:
        ranks, me = self.comm.world_size, self.comm.rank
        with call.stage("encode"):
            # Of each layer the cells of every chunk, for its owner.
            cells = [[sketch(s.buffer, r) for r in range(ranks)] for _, s in parts]
            ends = np.cumsum([CARD_NBYTES, *(_bytes(of[me]).numel() for of in cells)]).tolist()
            sent = wire.message(ranks, ends[-1] - CARD_NBYTES, _bytes(cells[0][me]))
            for of, at, end in zip(cells, ends, ends[1:], strict=False):
                for row, part in zip(sent, of, strict=True):
                    row[at:end] = _bytes(part)
        came = wire.all_to_all("sketch", sent)
        with call.stage("add"):
            for of, at, end in zip(cells, ends, ends[1:], strict=False):
                own = of[me]
                terms = [row[at - CARD_NBYTES : end - CARD_NBYTES].view(own.dtype) for row in came]
                total = own.copy_(terms[0]) if own.dtype == torch.float32 else terms[0].float()
                for term in terms[1:]:
                    total += term
                own.copy_(total)
        if everywhere:
            with call.stage("sketch"):
                mine = wire.message(1, ends[-1] - CARD_NBYTES, sent)
                for of, at, end in zip(cells, ends, ends[1:], strict=False):
                    mine[0, at:end] = _bytes(of[me])
            gathered = wire.all_gather("sketch", mine)
            with call.stage("sketch"):
                for of, at, end in zip(cells, ends, ends[1:], strict=False):
                    for row, part in zip(gathered, of, strict=True):
                        _bytes(part).copy_(row[at - CARD_NBYTES : end - CARD_NBYTES])
        with call.stage("decode"):
            return [self._decoded(layer, sent, everywhere) for layer, sent in parts]

    def _decoded(self, layer: _Layer, sent: Sketched, everywhere: bool) -> Any:
        if everywhere:
            return sent.decode(0, layer.nelem).view(layer.x.shape)
        m = layer.x.shape[1]
        return sent.decode(self.comm.rank * m, (self.comm.rank + 1) * m)

    def _uncompressed(self, layer: _Layer, everywhere: bool) -> Any:
        comm = self.comm
        total = layer.x.new_empty(layer.x.shape[1], dtype=torch.float32)
        residuals = self.state.residuals if self.tagc.accumulate else None
        scatter(comm, layer.x.view(-1), total, residuals, layer.parts)
        return comm.all_gather(total).view(layer.x.shape) if everywhere else total


class _Verdict(NamedTuple):
    """The stages of some messages, and of each what is wrong with those from each rank."""

    stages: list[str]
    arriving: OnTheWay


class _Wire:
    """The messages of a call, each with a card before it: uint8, shape (rows, CARD_NBYTES + n)."""

    def __init__(self, comm: Communicator, call: Call, digest: int) -> None:
        self._transport, self._call, self._digest = comm.transport, call, digest
        #: Stages of messages, and on the device what is wrong with those from each rank.
        self._verdicts: list[tuple[str, Any]] = []

    def message(self, rows: int, nbytes: int, like: Any) -> Any:
        """Room for a message of `nbytes` to each of so many ranks, a multiple of 8."""
        return like.new_empty((rows, CARD_NBYTES + nbytes), dtype=torch.uint8)

    def all_to_all(self, stage: str, sent: Any) -> Any:
        """Row j of `sent` to rank j; row i comes from rank i: without cards, shape (ranks, n)."""
        with self._call.stage(stage):
            self._seal(sent)
            came = torch.empty_like(sent)
            self._transport.all_to_all(came.view(-1), sent.view(-1))
            self._call.wire_bytes += sent[0].numel() * (len(sent) - 1)
            return self._opened(stage, came)

    def all_gather(self, stage: str, sent: Any) -> Any:
        """The only row of all ranks' `sent`, without cards, shape (ranks, n)."""
        with self._call.stage(stage):
            self._seal(sent)
            came = sent.new_empty((self._transport.world_size, sent.shape[1]))
            self._transport.all_gather(came.view(-1), sent.view(-1))
            self._call.wire_bytes += sent.numel() * (len(came) - 1)
            return self._opened(stage, came)

    def verdict(self, numbers: Any = None) -> _Verdict:
        """What is wrong with the messages since the last one, and `numbers`, int64, on their way.

        To the host, behind what is queued on the device now.
        """
        verdicts, self._verdicts = self._verdicts, []
        pieces = [wrong for _, wrong in verdicts] + ([] if numbers is None else [numbers])
        return _Verdict([stage for stage, _ in verdicts], OnTheWay(torch.cat(pieces)))

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
                raise self._call.failure(stage, detail)
            if _DAMAGED in wrong:
                rank = wrong.index(_DAMAGED)
                raise self._call.failure(stage, f"what came from rank {rank} is damaged")
        return found[len(verdict.stages) * ranks :]

    def _seal(self, sent: Any) -> None:
        words = sent.view(torch.int64)
        words[:, 0] = self._digest
        words[:, 1] = _checksum(words[:, 2:])

    def _opened(self, stage: str, came: Any) -> Any:
        words = came.view(torch.int64)
        damaged = words[:, 1] != _checksum(words[:, 2:])
        wrong = torch.where(words[:, 0] == self._digest, damaged * _DAMAGED, _OTHER)
        self._verdicts.append((stage, wrong))
        if not is_cuda(came):
            self.settle(self.verdict())
        return came[:, CARD_NBYTES:]


def _digest(text: str) -> int:
    found = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(found, "little", signed=True)


def _checksum(words: Any) -> Any:
    """The sum modulo 2^64 of int64 words, by row: no flipped bit escapes it, no swapped kilobytes.

    Of runs of 1024, which are numbered, and of the words behind the last one.
    """
    whole = words.shape[1] // 1024 * 1024
    sums = words[:, :whole].unflatten(1, (-1, 1024)).sum(2) if whole else words[:, :0]
    sums = torch.cat([sums, words[:, whole:]], 1)
    return (sums * torch.arange(1, 2 * sums.shape[1] + 1, 2, device=words.device)).sum(1)


def _within(layer: _Layer, index: Any) -> _Layer:
    """The layer without entries that are not in the index; they stay with the residual."""
    places = torch.arange(8, dtype=torch.uint8, device=index.device)
    bits = (index[:, None] >> places & 1).view(-1)[: layer.nelem].bool().view(layer.x.shape)
    if layer.residual is not None:
        corrected = layer.corrected.nan_to_num(0.0, 0.0, 0.0)
        torch.where(bits, layer.residual, corrected, out=layer.residual)
    lost = torch.count_nonzero(torch.where(bits, 0, layer.sparse))
    return layer._replace(sparse=torch.where(bits, layer.sparse, 0), lost=lost)


def _estimated(counts: Any) -> bool:
    """Whether some are, by `Sketched.counts`. Waits for a device."""
    occupied, peeled, _ = counts.tolist()
    return bool(occupied > peeled)


def _bytes(x: Any) -> Any:
    return x.view(torch.uint8)
