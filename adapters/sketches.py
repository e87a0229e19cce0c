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
from torch.nn import functional as F

from .. import arrays
from ..codec import Codec, codec, decode
from ..codecs.base import Bytes
from ..homomorphic import (
    SAFE_LOAD,
    Diagnosis,
    agreed_index,
    diagnose,
    index_to_reduce,
    sketch,
)
from ..sparsify import sparsify
from .calls import Call, TraceRecord
from .collectives import Communicator
from .error_feedback import ErrorFeedback
from .hooks import scatter
from .layers import Rule

#: Bytes before every message: a digest of the call, a checksum of what follows.
CARD_NBYTES = 16
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
    """A layer on its way: `x` as it came, with the residual, and what is left of that to send."""

    name: str
    x: Any
    corrected: Any
    sparse: Any

    @property
    def nelem(self) -> int:
        return int(self.x.numel())


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
        with call.stage("sparsify"):
            found = [self._sparsified(name, x) for name, x in layers]
        indexes = self._agree(call, wire, found)
        chosen = []
        for i, (layer, index) in enumerate(zip(found, indexes, strict=True)):
            lost = 0
            if self.tagc.index == "1bit":
                found[i], lost = _within(layer, index)
            chosen.append(self._choose(found[i], index, lost))
        sketched = [i for i, ratio in enumerate(chosen) if ratio is not None]
        sums: dict[int, Any] = {}
        if sketched:
            parts = [(found[i], indexes[i], chosen[i]) for i in sketched]
            sums.update(zip(sketched, self._by_sketch(call, wire, parts, everywhere), strict=True))
        for i in sorted(set(range(len(found))).difference(sketched)):
            sums[i] = self._uncompressed(found[i], everywhere)
        if self.tagc.accumulate:
            for i in sketched:
                layer = found[i]
                parts_of = [(layer.name, layer.nelem)]
                self.state.residuals.keep(parts_of, layer.corrected, layer.sparse)
        shares = sum(found[i].x[0].nbytes for i in sketched)
        call.raw_bytes = (self.comm.world_size - 1) * shares * (2 if everywhere else 1)
        return [sums[i] for i in range(len(found))]

    def _settings(self) -> str:
        """What all ranks must have in common; without the rule, whose result is compared."""
        tagc = self.tagc
        same = tagc.ratio, self._theta, tagc.index, tagc.sketch, tagc.mapping, tagc.fallback
        return f"{same} {tagc.accumulate}"

    def _sparsified(self, name: str, x: Any) -> _Layer:
        flat = x.reshape(-1)
        if self.tagc.accumulate:
            corrected = self.state.residuals.corrected(flat, [(name, x.numel())])
        else:
            corrected = flat.float()
        rows = corrected.view(x.shape)
        sparse = torch.stack([sparsify(row, self._theta)[0] for row in rows]).view(-1)
        cells = self.tagc.codec(x.dtype).spec.sketch  # type: ignore[attr-defined]
        # Rounded here, so that the residual takes what that loses.
        return _Layer(name, x, corrected, sparse.to(getattr(torch, cells)).float())

    def _agree(self, call: Call, wire: _Wire, layers: Sequence[_Layer]) -> list[Bytes]:
        """The index of all ranks: each combines a share of it, and all gather the shares.

        So every network can do it, NCCL too, in the bytes of an all-reduce around a ring.
        """
        ranks, mode = self.comm.world_size, self.tagc.index
        with call.stage("index"):
            mine = [
                arrays.host_array(self.tagc.codec(la.x.dtype).measure(la.sparse)) for la in layers
            ]
            sizes = [index.size for index in mine]
            reduced, op = index_to_reduce(np.concatenate(mine), mode, ranks)
            padded = np.pad(reduced, (0, -reduced.size % (8 * ranks))).reshape(ranks, -1)
        came = wire.all_to_all("index", torch.from_numpy(padded).to(layers[0].x.device))
        with call.stage("index"):
            shares = arrays.host_array(came)
            combine = np.bitwise_or if op == "bitwise_or" else np.add
            share = torch.from_numpy(combine.reduce(shares, axis=0, dtype=np.uint8))
        whole = arrays.host_array(wire.all_gather("index", share.to(came.device))).reshape(-1)
        with call.stage("index"):
            index = agreed_index(whole[: reduced.size], mode)
            parts = np.split(index, np.cumsum(sizes)[:-1])
            for part, layer in zip(parts, layers, strict=True):
                # Carries of a sum get behind the last element.
                part[-1] &= 0xFF >> -layer.nelem % 8
        return parts

    def _choose(self, layer: _Layer, index: Bytes, lost: int) -> float | None:
        """The ratio to take, or None; every rank chooses the same from the same index."""
        tagc = self.tagc
        asked = first = self._diagnosis(layer, index, tagc.ratio)
        ratio: float | None = tagc.ratio
        if first.estimated and tagc.fallback is not None:
            ratio = None
            for lower in sorted(tagc.fallback, reverse=True):
                if not tagc.pays(layer.x.shape[1], layer.x.dtype, lower):
                    continue
                found = self._diagnosis(layer, index, lower)
                if not found.estimated:
                    asked, ratio = found, lower
                    break
        reason = first.advice or ""
        if lost:
            reason = f"'1bit' lost {lost} of this rank's values; {reason}"
        self.state.note(
            layer.name,
            warn=bool(first.estimated) and tagc.fallback is None,
            nelem=layer.nelem,
            theta=self._theta,
            kept=int(torch.count_nonzero(layer.sparse)) + lost,
            lost=lost,
            diagnosis=asked,
            ratio=ratio,
            reason=reason.removesuffix("; "),
        )
        return ratio

    def _diagnosis(self, layer: _Layer, index: Bytes, ratio: float) -> Diagnosis:
        chosen = self.tagc.codec(layer.x.dtype, ratio)
        return diagnose(chosen, index, (layer.nelem,), "float32", chunks=self.comm.world_size)

    def _by_sketch(
        self,
        call: Call,
        wire: _Wire,
        parts: Sequence[tuple[_Layer, Bytes, float | None]],
        everywhere: bool,
    ) -> list[Any]:
        ranks, me = self.comm.world_size, self.comm.rank
        with call.stage("encode"):
            buffers = [
                self.tagc.codec(layer.x.dtype, ratio).encode(
                    layer.sparse, stats=index, chunks=ranks, checksum=False
                )
                for layer, index, ratio in parts
            ]
            rows = [torch.cat([_bytes(sketch(b, r)) for b in buffers]) for r in range(ranks)]
        came = wire.all_to_all("sketch", torch.stack(rows))
        with call.stage("add"):
            at = 0
            for buffer in buffers:
                own = sketch(buffer, me)
                end = at + own.numel() * own.element_size()
                terms = came[:, at:end].contiguous().view(own.dtype)
                total = torch.full(own.shape, -0.0, dtype=torch.float32, device=own.device)
                for term in terms:
                    total += term
                own.copy_(total)
                at = end
        if everywhere:
            mine = torch.cat([_bytes(sketch(b, me)) for b in buffers])
            gathered, at = wire.all_gather("sketch", mine), 0
            for buffer in buffers:
                end = at + _bytes(sketch(buffer, me)).numel()
                for r in range(ranks):
                    _bytes(sketch(buffer, r)).copy_(gathered[r, at:end])
                at = end
        sums = []
        with call.stage("decode"):
            for buffer, (layer, _, _) in zip(buffers, parts, strict=True):
                # The array and not the buffer, so that a GPU's verdict is raised at once.
                if everywhere:
                    sums.append(decode(buffer.array).view(layer.x.shape))
                else:
                    m = layer.x.shape[1]
                    sums.append(decode(buffer.array, start=me * m, stop=(me + 1) * m))
        return sums

    def _uncompressed(self, layer: _Layer, everywhere: bool) -> Any:
        comm = self.comm
        total = layer.x.new_empty(layer.x.shape[1], dtype=torch.float32)
        residuals = self.state.residuals if self.tagc.accumulate else None
        scatter(comm, layer.x.view(-1), total, residuals, [(layer.name, layer.nelem)])
        return comm.all_gather(total).view(layer.x.shape) if everywhere else total


class _Wire:
    """The messages of a call, each with a card before it."""

    def __init__(self, comm: Communicator, call: Call, digest: int) -> None:
        self._transport, self._call, self._digest = comm.transport, call, digest

    def all_to_all(self, stage: str, rows: Any) -> Any:
        """Row j of `rows`, uint8, shape (ranks, n), to rank j; row i comes from rank i."""
        with self._call.stage(stage):
            sent = self._packed(rows)
            came = torch.empty_like(sent)
            self._transport.all_to_all(came.view(-1), sent.view(-1))
            self._call.wire_bytes += sent[0].numel() * (len(sent) - 1)
            return self._opened(stage, came, rows.shape[1])

    def all_gather(self, stage: str, row: Any) -> Any:
        """The `row`, uint8, shape (n,), of all ranks: shape (ranks, n)."""
        with self._call.stage(stage):
            sent, ranks = self._packed(row[None]), self._transport.world_size
            came = sent.new_empty((ranks, sent.shape[1]))
            self._transport.all_gather(came.view(-1), sent.view(-1))
            self._call.wire_bytes += sent.numel() * (ranks - 1)
            return self._opened(stage, came, row.numel())

    def _packed(self, rows: Any) -> Any:
        padded = F.pad(rows, (CARD_NBYTES, -rows.shape[1] % 8))
        words = padded.view(torch.int64)
        words[:, 0] = self._digest
        words[:, 1] = _checksum(words[:, 2:])
        return padded

    def _opened(self, stage: str, came: Any, nbytes: int) -> Any:
        words = came.view(torch.int64)
        other = (words[:, 0] != self._digest).tolist()
        damaged = (words[:, 1] != _checksum(words[:, 2:])).tolist()
        for rank, differs in enumerate(other):
            if differs:
                detail = f"rank {rank} has other settings or layers, or is at another step"
                raise self._call.failure(stage, detail)
        for rank, wrong in enumerate(damaged):
            if wrong:
                raise self._call.failure(stage, f"what came from rank {rank} is damaged")
        return came[:, CARD_NBYTES : CARD_NBYTES + nbytes]


def _digest(text: str) -> int:
    found = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(found, "little", signed=True)


def _checksum(words: Any) -> Any:
    """The sum modulo 2^64 of int64 words times odd numbers, by row: no flipped bit escapes it."""
    factors = torch.arange(1, 2 * words.shape[1] + 1, 2, device=words.device)
    return (words * factors).sum(1)


def _within(layer: _Layer, index: Bytes) -> tuple[_Layer, int]:
    """The layer without entries that are not in the index, and how many these were."""
    bits = np.unpackbits(index, count=layer.nelem, bitorder="little").view(bool)
    there = torch.from_numpy(bits).to(layer.x.device)
    lost = int(torch.count_nonzero(layer.sparse[~there]))
    return layer._replace(sparse=torch.where(there, layer.sparse, 0)), lost


def _bytes(x: Any) -> Any:
    return x.view(torch.uint8)
