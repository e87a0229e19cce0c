"""Sums that grow from hop to hop: reduce-scatter and all-reduce by ring and by butterfly.

After DynamiQ, sections 2.1, 3.4 and 4 and appendix B. Each rank has a share of the sum in the end.
A share's first rank encodes its own term, every next one decodes the sum so far, adds its term and
encodes, and the last one has the sum; so each rank encodes each share once. In an all-reduce the
last one encodes too, and its buffer is what all ranks decode.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .. import arrays
from ..arrays import ArrayInfo
from ..buffer import Buffer
from ..codec import decode
from ..codecs.common.base import Key, Plan
from ..codecs.dynamiq import SAMPLED
from ..formats.dtypes import BY_NAME
from ..inspection import verify
from . import tensors
from .calls import Call, rounding_key
from .group import TOPOLOGIES, Group, Topology
from .lanes import Inline, Lanes
from .shares import CARD_NBYTES, Shares
from .transport import Op

_INT64 = BY_NAME["int64"]
#: How errors say that a sum came from its last rank.
GATHERED = " (gather, chunk i is rank i's)"
_OTHER_SUMS = "have other sums of statistics"
Span = tuple[int, int]


class Hop(NamedTuple):
    """What one rank does in one step: shares go to a rank, others come from one, or nothing."""

    to: int | None = None
    out: tuple[int, ...] = ()
    source: int | None = None
    into: tuple[int, ...] = ()


def hops(topology: Topology, rank: int, size: int) -> list[Hop]:
    """The steps of rank `rank` by which share r of a sum comes to rank r, as many on all ranks.

    "ring": share r starts at rank r + 1 and goes once around. "butterfly": of 2^k ranks, those
    whose numbers differ in one bit swap halves of what they have, the highest bit first (appendix
    B). Of others, let 2^k be the largest below: each rank from there on gives all shares to the
    rank 2^k below it first, which has that rank's share in the end and gives it back.
    """
    if topology == "ring":
        after, before = (rank + 1) % size, (rank - 1) % size
        return [
            Hop(after, ((rank - 1 - h) % size,), before, ((rank - 2 - h) % size,))
            for h in range(size - 1)
        ]
    core = 1 << size.bit_length() - 1
    extra, held = size - core, tuple(range(size))
    giver, taker = rank >= core, rank < extra
    found = []
    if extra:
        comes = Hop(source=rank + core, into=held) if taker else Hop()
        found.append(Hop(rank - core, held) if giver else comes)
    bit = core // 2
    while bit:
        kept = tuple(c for c in held if c % core & bit == rank & bit)
        given = tuple(c for c in held if c % core & bit != rank & bit)
        found.append(Hop() if giver else Hop(rank ^ bit, given, rank ^ bit, kept))
        held, bit = kept, bit // 2
    if extra:
        goes = Hop(rank + core, (rank + core,)) if taker else Hop()
        found.append(Hop(source=rank - core, into=(rank,)) if giver else goes)
    return found


class _Came(NamedTuple):
    """A received partial sum, and how errors name its sender."""

    buffer: Buffer
    data: Any
    word: int
    note: str


@dataclass
class _Part:
    """What a rank has of one piece of one share: its own part, and the last received sum."""

    #: None when it is in what was sent.
    own: Any
    stats: Any
    #: `own` is float32, and no longer what was given.
    summed: bool = False
    came: _Came | None = None


@dataclass(frozen=True)
class _Piece:
    """The parts of all shares, as long as `plan` says."""

    number: int
    plan: Plan
    parts: list[_Part]
    #: Any array of their library and device.
    like: Any


class MultiHop(Group):
    """A ``Group`` that sums hop by hop, for codecs whose buffers have no dynamic part."""

    def _all_reduce_by_hops(
        self,
        call: Call,
        flat: Any,
        info: ArrayInfo,
        topology: Topology,
        spans: Sequence[Span],
        put: Callable[[Buffer, int], None],
    ) -> list[Any]:
        """Have `put(buffer, k)` called with piece k of the sum: chunk r is span k of share r.

        `flat`, shape (ranks * n,), is what travels, a share behind the other; `spans` are those of
        the n elements of a share that pieces have. Gives the statistics of this rank's pieces.
        """
        pieces = self._pieces(call, flat, info, spans)
        digest = functools.partial(call.digest, info, (TOPOLOGIES.index(topology), *info.shape))

        def finish(piece: _Piece) -> Shares | None:
            return self._encode_parts(call, pieces, piece, [self._rank])

        def deliver(lanes: Lanes | Inline, piece: _Piece, send: Shares) -> None:
            k = piece.number
            began = self._begin_gather(call, send, digest(-1 - k), f"gathered {k}", GATHERED)
            buffer = self._end_gather(call, began)
            call.exchanged = k == len(pieces) - 1
            lanes.decode(functools.partial(put, buffer, k))

        self._by_hops(call, pieces, topology, digest, finish, deliver)
        return [piece.parts[self._rank].stats for piece in pieces]

    def _reduce_scatter_by_hops(
        self,
        call: Call,
        flat: Any,
        total: Any,
        info: ArrayInfo,
        topology: Topology,
        spans: Sequence[Span],
    ) -> None:
        """This rank's share of the sum, shape (n,), to `total`, as wide as sums are made.

        Its own term is added as it is, and so is the sum: only received sums were encoded.
        """
        pieces = self._pieces(call, flat, info, spans)
        digest = functools.partial(call.digest, info, (TOPOLOGIES.index(topology), *info.shape))

        def finish(piece: _Piece) -> None:
            part, (a, b) = piece.parts[self._rank], spans[piece.number]
            here = total[a:b]
            if part.own is None:
                tensors.clear(here)
            else:
                tensors.put(here, part.own)
            if part.came is not None:
                self._add_came(call, part.came, here)

        self._by_hops(call, pieces, topology, digest, finish, None)
        self._count_overflows(total, spans, [p.parts[self._rank].stats for p in pieces])

    def _count_overflows(self, share: Any, spans: Sequence[Span], stats: Sequence[Any]) -> None:
        """Have scales follow how much of this rank's share of a sum they could not hold."""
        found = [(share[a:b], s) for (a, b), s in zip(spans, stats, strict=True) if s is not None]
        if self._scaling is not None and found:
            sums, scales = zip(*found, strict=True)
            self._scaling.count(sums, scales)

    def _pieces(
        self, call: Call, flat: Any, info: ArrayInfo, spans: Sequence[Span]
    ) -> list[_Piece]:
        """The pieces of `flat`, with statistics that all ranks have agreed on."""
        rows = flat.reshape(self._size, -1)
        own = [[row[a:b] for row in rows] for a, b in spans]
        plans = [self._plan(info.dtype, b - a) for a, b in spans]
        stats = iter(self._agreed(call, flat, [x for xs in own for x in xs], plans, info))
        return [
            _Piece(k, plan, [_Part(x, self._stats_of(plan, next(stats))) for x in xs], flat)
            for k, (plan, xs) in enumerate(zip(plans, own, strict=True))
        ]

    def _stats_of(self, plan: Plan, stats: Any) -> Any:
        """`stats`, None for a piece that is too small to be coded."""
        return stats if plan.codec == self._codec.spec else None

    def _agreed(
        self, call: Call, flat: Any, xs: Sequence[Any], plans: Sequence[Plan], info: ArrayInfo
    ) -> list[Any]:
        """Statistics of each of `xs`, parts of `flat`, of all ranks; None if nobody needs any.

        Raises CollectiveError, on all ranks, if one of them has got others; on a GPU, where nobody
        waits for that, `_by_hops` does. nvfp4's largest magnitudes are not agreed on: those of
        terms say nothing of sums, which every hop measures for itself.
        """
        codec, spec, scaling = self._codec, self._codec.spec, self._scaling
        if not spec.sums_keep_stats or all(plan.codec != spec for plan in plans):
            return [None] * len(xs)
        op: Op = "sum" if spec.reduce_op == "sum" else "max"
        each = spec.stats_nelem
        # One after the other, the parts have those of the whole.
        at_once = each and len(plans) == 1 and plans[0].nelem % each == 0
        with call.stage("statistics"), np.errstate(all="ignore"):
            found = [codec.measure(x) for x in ([flat] if at_once else xs)]
        if scaling is None:
            stats = self._reduced(call, found, flat, op, info)
        else:
            with call.stage("statistics"):
                overflowed, own = scaling.beside(found[0])
            joined = self._joined(call, [*found, overflowed], flat, op, info, own)
            with call.stage("statistics"):
                scaling.widen(joined[:-1], joined[-1:])
            stats = _split(joined[:-1], found)
        return list(stats[0].reshape(len(xs), -1)) if at_once else stats

    def _reduced(
        self, call: Call, parts: Sequence[Any], like: Any, op: Op, info: ArrayInfo
    ) -> list[Any]:
        """Statistics `parts` of all ranks reduced, on the device of `like`, and compared.

        If there is a single part, it may be overwritten.
        """
        return _split(self._joined(call, parts, like, op, info), parts)

    def _joined(
        self,
        call: Call,
        parts: Sequence[Any],
        like: Any,
        op: Op,
        info: ArrayInfo,
        own: Any = None,
    ) -> Any:
        """As `_reduced`, one behind the other. `own`, of their dtype, is only compared."""
        with call.stage("statistics"), np.errstate(all="ignore"):
            joined = side_by_side(parts, like)
            self._transport.all_reduce(joined, op)
            if op == "sum":
                _limit(joined)
            compared = joined if own is None else side_by_side([joined, own], like)
        call.wire_bytes += 2 * (self._size - 1) * joined.nbytes // self._size
        if tensors.is_cuda(compared):
            self._summarize(call, compared, info)
        else:
            host = np.ascontiguousarray(arrays.host_array(compared))
            digests = [call.digest_of(host.tobytes(), info)] * self._size
            # First, so that no rank waits for one whose sums are none.
            self._compare(call, like, digests, digests, "statistics", _OTHER_SUMS)
            self._remark(call, host, info)
        return joined

    def _summarize(self, call: Call, stats: Any, info: ArrayInfo) -> None:
        """Leave in `call.verdict` what compares `stats` of all ranks, which are on a GPU."""
        with call.stage("statistics"):
            own = device_summary(stats)
            words = tensors.empty((self._size,), _INT64, stats)
            self._transport.all_gather(tensors.as_bytes(words), tensors.as_bytes(own[:1]))
            all_words = sys.modules["torch"].cat([words, own])
            spare = self._summaries.pop() if self._summaries else None
            arriving = tensors.OnTheWay(all_words, spare)
        call.wire_bytes += 8 * (self._size - 1)

        def verdict() -> None:
            with call.stage("statistics"):
                came = arriving.wait(self._transport.timeout)
            theirs, (mine, *bounds), sample = np.split(came, [self._size, self._size + 3])
            strange = [rank for rank, word in enumerate(theirs.tolist()) if word != mine]
            known = sample.astype(np.uint8)
            if stats.dtype.is_floating_point:
                least, most = np.array(bounds, np.int32).view(np.float32)
                # Of strange ones all may be said.
                good = least >= 0 and most < np.inf
                known = sample.astype(np.int32).view(np.float32)
                known = known if good else arrays.host_array(stats)
            self._summaries.append(arriving)
            self._remark(call, known, info)
            if strange:
                raise call.failure("statistics", f"ranks {strange} {_OTHER_SUMS}")

        call.verdict = verdict

    def _remark(self, call: Call, stats: npt.NDArray[Any], info: ArrayInfo) -> None:
        """Have the trace say what there is to say of `stats`; raises if no codec takes them."""
        spec = self._codec.spec
        try:
            spec.check_stats(stats, info.dtype)
        except ValueError as error:
            raise call.failure("statistics", str(error)) from error
        remark = spec.remark(stats)
        if remark:
            call.reason += f"; {remark}"

    def _by_hops(
        self,
        call: Call,
        pieces: Sequence[_Piece],
        topology: Topology,
        digest: Callable[[int], int],
        finish: Callable[[_Piece], Any],
        deliver: Callable[[Lanes | Inline, _Piece, Any], None] | None,
    ) -> None:
        """All hops of all pieces, then of each what `finish` makes and `deliver` puts on the wire.

        A piece is encoded while the one before is on the wire. `deliver` None: nothing is left to
        exchange then.
        """
        steps, count = hops(topology, self._rank, self._size), len(pieces)
        last = (len(steps) + 1) * count - 1
        if count > 1:
            call.algorithm += f", {count} pieces"

        def make(at: int) -> Any:
            h, k = divmod(at, count)
            if h == len(steps):
                return finish(pieces[k])
            send = self._encode_parts(call, pieces, pieces[k], steps[h].out)
            for c in steps[h].into:
                self._add_to_own(call, pieces[k], pieces[k].parts[c])
            return send

        with Lanes(pieces[0].like) if count > 1 else Inline() as lanes:
            ready = lanes.encode(functools.partial(make, 0))
            for at in range(last + 1):
                h, k = divmod(at, count)
                call.exchanged = deliver is None and h == len(steps)
                made = ready()
                if at < last:
                    # Of several pieces what this one needs has come a step ago or before.
                    ready = lanes.encode(functools.partial(make, at + 1), behind=True)
                if h == len(steps):
                    if deliver is not None:
                        deliver(lanes, pieces[k], made)
                else:
                    self._hop(call, steps[h], h, pieces[k], made, digest(at + 1))
        self._judge(call)

    def _judge(self, call: Call) -> None:
        """Raise if ranks turn out to have other statistics: on all of them, and none goes on."""
        if call.verdict is not None:
            exchanged, call.exchanged = call.exchanged, False
            call.verdict()
            call.exchanged = exchanged

    def _hop(
        self,
        call: Call,
        hop: Hop,
        number: int,
        piece: _Piece,
        send: Shares | None,
        digest: int,
    ) -> None:
        """Move what is encoded in `send`, and have the parts of `piece` know what has come."""
        outs: list[list[Any]] = [[] for _ in range(self._size)]
        xs: list[list[Any]] = [[] for _ in range(self._size)]
        if send is not None and hop.to is not None:
            send.write_cards([digest] * len(hop.out), 0)
            xs[hop.to] = [array for parcel in send.parcels for array in parcel]
            call.raw_bytes += send.raw_nbytes
            call.wire_bytes += CARD_NBYTES * len(hop.out) + send.static_nbytes
        if hop.source is None:
            with call.stage("exchange", f" (hop {number})"):
                self._transport.all_to_all_v(outs, xs)
            return
        note = f" (hop {number}, from rank {hop.source})"
        receive = self._receive(f"receive {piece.number}", [piece.plan] * len(hop.into), piece.like)
        outs[hop.source] = [array for parcel in receive.parcels for array in parcel]
        with call.stage("exchange", note):
            self._transport.all_to_all_v(outs, xs)
        self._compare_late(call, receive, [digest] * len(hop.into), hop.source, note)
        buffers = receive.buffers(self._words_of(receive.memory))
        for word, (c, data) in enumerate(zip(hop.into, receive.data, strict=True)):
            piece.parts[c].came = _Came(buffers[word], data, word, note)

    # Parts.

    def _encode_parts(
        self, call: Call, pieces: Sequence[_Piece], piece: _Piece, shares: Sequence[int]
    ) -> Shares | None:
        """What this rank knows of these shares, encoded; None if there are none."""
        if not shares:
            return None
        name, plan = f"send {piece.number}", piece.plan
        send = self._shares(name, [plan] * len(shares), piece.like)
        self._take(name, send)
        for c, data in zip(shares, send.data, strict=True):
            # All ranks encode a share once: what they draw by differs in the rank alone, so that
            # correlated rounding finds the others.
            number = c * len(pieces) + piece.number
            key = rounding_key(self._seed, call.sequence, number, self._rank, self._size)
            self._encode_part(call, plan, piece.parts[c], data, key)
        return send

    def _encode_part(self, call: Call, plan: Plan, part: _Part, data: Any, key: Key) -> None:
        """Encode the sum of the rank's own part and the received one to `data`, and forget them."""
        codec, own, came, stats = self._codec, part.own, part.came, part.stats
        part.own = part.came = None
        if came is None:
            with call.stage("encode"), np.errstate(all="ignore"):
                if not self._encode_here(own, plan, data, key, stats):
                    codec.encode(own, stats=stats, key=key, out=data, checksum=self._checksum)
        elif own is None:
            self._check_came(call, came)
            tensors.put(data, came.data)
        else:
            # In one pass what came says which widths there are; they follow from the same numbers.
            stats = None if codec._fuses(own, plan.dtype) else stats
            with call.stage("sum", came.note), np.errstate(all="ignore"):
                if not self._sum_here(came.buffer, own, data, key, stats):
                    codec.decode_add_encode(
                        came.buffer, own, stats=stats, key=key, out=data, checksum=self._checksum
                    )
            self._decoded(call, came.buffer, came.note, came.word)

    def _check_came(self, call: Call, came: _Came) -> None:
        """Raise for damage of what is handed on as it is; on a GPU with the call's verdict."""
        with call.stage("sum", came.note):
            if not tensors.is_cuda(came.data):
                verify(came.buffer)
                return
            plan = came.buffer.plan
            values = tensors.empty((plan.nelem,), plan.dtype, came.data)
            if not self._decode_here(came.buffer, values, 0, plan.nelem, name="add"):
                decode(came.buffer, out=values)
        self._decoded(call, came.buffer, came.note, came.word)

    def _add_to_own(self, call: Call, piece: _Piece, part: _Part) -> None:
        """Add the received sum to the rank's own part, as another one follows."""
        came, part.came = part.came, None
        if came is None:
            return
        if not part.summed:
            wide = tensors.sum_dtype(piece.plan.dtype)
            total = tensors.empty((piece.plan.nelem,), wide, piece.like)
            tensors.put(total, part.own)
            part.own, part.summed = total, True
        self._add_came(call, came, part.own)

    def _add_came(self, call: Call, came: _Came, total: Any) -> None:
        plan = came.buffer.plan
        with call.stage("sum", came.note), np.errstate(all="ignore"):
            # Not in the memory that pieces are decoded in beside this.
            if not self._adds_here(plan, total) or not self._decode_here(
                came.buffer, total, 0, plan.nelem, add=True, name="add"
            ):
                self._codec.decode_add(came.buffer, total)
        self._decoded(call, came.buffer, came.note, came.word)


def _split(joined: Any, parts: Sequence[Any]) -> list[Any]:
    """What lies in `joined` in the place of each of `parts`."""
    stops = np.cumsum([part.shape[0] for part in parts]).tolist()
    return [joined[stop - part.shape[0] : stop] for part, stop in zip(parts, stops, strict=True)]


def side_by_side(parts: Sequence[Any], like: Any) -> Any:
    """Arrays of shape (n,) one behind the other, on the device of `like`."""
    if len(parts) == 1 and tensors.is_cuda(parts[0]):
        return parts[0]
    if tensors.is_torch(parts[0]):
        return sys.modules["torch"].cat(list(parts))
    host = np.concatenate(parts)
    return tensors.on_device(host, tensors.device_of(like)) if tensors.is_cuda(like) else host


def device_summary(stats: Any) -> Any:
    """The sum modulo 2^64 of `stats`, float32 as words or uint8, times odd numbers, the least and
    the largest, and at most SAMPLED of them, evenly spaced; int64, on their device.

    Nothing waits for it.
    """
    torch = sys.modules["torch"]
    n = stats.shape[0]
    words = stats.view(torch.int32) if stats.dtype.is_floating_point else stats
    total = (words * torch.arange(1, 2 * n + 1, 2, device=stats.device)).sum()
    bounds = torch.stack(stats.aminmax())
    bounds = bounds.view(torch.int32) if stats.dtype.is_floating_point else bounds
    return torch.cat([total.view(1), bounds, words[:: -(-n // SAMPLED)]])


def _limit(x: Any) -> None:
    """Make sums that are too large the largest finite number."""
    if tensors.is_torch(x):
        largest = sys.modules["torch"].finfo(x.dtype).max
        tensors.change(lambda v: v.clamp_(max=largest), x)
    else:
        tensors.change(lambda v: np.minimum(v, np.finfo(v.dtype).max, out=v), x)
