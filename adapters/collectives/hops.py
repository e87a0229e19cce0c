"""Sums that grow from hop to hop: reduce-scatter and all-reduce by ring and by butterfly.

After DynamiQ, sections 2.1, 3.4 and 4 and appendix B. Each rank has a share of the sum in the end.
A share's first rank encodes its own term, every next one decodes the sum so far, adds its term and
encodes, and the last one has the sum; so each rank encodes each share once. In an all-reduce the
last one encodes too, and its buffer is what all ranks decode.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ... import arrays
from ...arrays import ArrayInfo
from ...buffer import Buffer
from ...codecs.common.base import Key, Plan
from ...formats.dtypes import DType
from ...inspection import verify
from . import tensors
from .calls import Call, rounding_key
from .chunk_views import DESCRIPTOR_NBYTES, ChunkViews
from .coding import Span
from .pipelined import Pipeline, Serial, spans_of
from .session import TOPOLOGIES, Topology
from .statistics import Statistics
from .steps import Steps
from .sums import Sum, SumAlgorithm, divided

#: How errors say that a sum came from its last rank.
GATHERED = " (gather, chunk i is rank i's)"


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


class _Received(NamedTuple):
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
    received: _Received | None = None


@dataclass(frozen=True)
class _Piece:
    """The parts of all shares, as long as `plan` says."""

    number: int
    plan: Plan
    parts: list[_Part]
    #: Any array of their library and device.
    like: Any


class HopSums(SumAlgorithm):
    """Sums hop by hop, for codecs whose buffers have no dynamic part."""

    max_ranks = None
    in_place = False
    tells_decoded = False
    scatter_name = None

    def __init__(self, steps: Steps, statistics: Statistics) -> None:
        self._steps = steps
        self._session = steps.session
        self._memory = steps.memory
        self._coding = steps.coding
        self._comparisons = steps.comparisons
        self._statistics = statistics
        self._codec = steps.session.codec
        self._transport = steps.session.transport
        self._rank, self._size = steps.session.rank, steps.session.size
        in_network = self._codec.spec.sums_in_network
        self.allowed = steps.session.fixed and not (self._codec.homomorphic or in_network)

    def sums(self, sent: DType, nelem: int) -> bool:
        """All of them."""
        return True

    def share(self, nelem: int) -> int:
        """An equal share; the last one is filled up."""
        return -(-nelem // self._size)

    def all_reduce(self, call: Call, flat: Any, result: Any, what: Sum) -> None:
        """The sum of all ranks' `flat`, shape (n,), to `result`.

        `result` may overlap `flat` if there is a single piece.
        """
        flat = divided(flat, what.op, self._size)
        info, topology = what.travelling, what.topology
        self._comparisons.compare_shape(call, flat, info, TOPOLOGIES.index(topology))
        n, sent = flat.shape[0], info.dtype
        each = -(-n // self._size)
        terms, gathered = tensors.cast(flat, sent), result
        if n < each * self._size:
            terms = tensors.empty((each * self._size,), sent, flat)
            tensors.put(terms[:n], flat)
            tensors.fill(terms[n:], 0)
        if terms.shape[0] != n or arrays.describe(result).dtype != sent:
            gathered = tensors.empty(terms.shape, sent, flat)
        spans = spans_of(each, what.choice.pieces)

        def put(buffer: Buffer, k: int) -> None:
            if len(spans) == 1:
                self._coding.decode(call, buffer, gathered, None, note=GATHERED)
            else:
                self._coding.decode_rows(call, buffer, gathered, spans[k], GATHERED)

        stats = self._reduce_and_gather(call, terms, info, topology, spans, put)
        self._count_overflows(gathered.reshape(self._size, -1)[self._rank], spans, stats)
        if gathered is not result:
            tensors.put(result, gathered[:n])

    def _reduce_and_gather(
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

        def finish(piece: _Piece) -> ChunkViews | None:
            return self._encode_parts(call, pieces, piece, [self._rank])

        def deliver(pipeline: Pipeline | Serial, piece: _Piece, send: ChunkViews) -> None:
            k = piece.number
            began = self._steps.begin_gather(call, send, digest(-1 - k), f"gathered {k}", GATHERED)
            buffer = self._steps.end_gather(call, began)
            call.exchanged = k == len(pieces) - 1
            pipeline.decode(functools.partial(put, buffer, k))

        self._by_hops(call, pieces, topology, digest, finish, deliver)
        return [piece.parts[self._rank].stats for piece in pieces]

    def reduce_scatter(self, call: Call, x: Any, total: Any, what: Sum) -> None:
        """This rank's share of the sum of all ranks' `x`, shape (ranks * n,), to `total`, (n,).

        `total` is as wide as sums are made, and does not overlap `x`. This rank's own term is added
        as it is, and so is the sum: only received sums were encoded.
        """
        info, topology = what.travelling, what.topology
        self._comparisons.compare_shape(call, x, info, TOPOLOGIES.index(topology))
        flat = tensors.cast(x, info.dtype).reshape(-1)
        spans = spans_of(total.shape[0], what.choice.pieces)
        pieces = self._pieces(call, flat, info, spans)
        digest = functools.partial(call.digest, info, (TOPOLOGIES.index(topology), *info.shape))

        def finish(piece: _Piece) -> None:
            part, (a, b) = piece.parts[self._rank], spans[piece.number]
            here = total[a:b]
            if part.own is None:
                tensors.clear(here)
            else:
                tensors.put(here, part.own)
            if part.received is not None:
                self._add_received(call, part.received, here)

        self._by_hops(call, pieces, topology, digest, finish, None)
        self._count_overflows(total, spans, [p.parts[self._rank].stats for p in pieces])

    def _count_overflows(self, share: Any, spans: Sequence[Span], stats: Sequence[Any]) -> None:
        """Have scales follow how much of this rank's share of a sum they could not hold."""
        found = [(share[a:b], s) for (a, b), s in zip(spans, stats, strict=True) if s is not None]
        if self._session.scaling is not None and found:
            sums, scales = zip(*found, strict=True)
            self._session.scaling.count(sums, scales)

    def _pieces(
        self, call: Call, flat: Any, info: ArrayInfo, spans: Sequence[Span]
    ) -> list[_Piece]:
        """The pieces of `flat`, with statistics that all ranks have agreed on."""
        rows = flat.reshape(self._size, -1)
        own = [[row[a:b] for row in rows] for a, b in spans]
        plans = [self._memory.plan(info.dtype, b - a) for a, b in spans]
        stats = iter(
            self._statistics.agreed(call, flat, [x for xs in own for x in xs], plans, info)
        )
        return [
            _Piece(k, plan, [_Part(x, self._stats_of(plan, next(stats))) for x in xs], flat)
            for k, (plan, xs) in enumerate(zip(plans, own, strict=True))
        ]

    def _stats_of(self, plan: Plan, stats: Any) -> Any:
        """`stats`, None for a piece that is too small to be coded."""
        return stats if plan.codec == self._codec.spec else None

    def _by_hops(
        self,
        call: Call,
        pieces: Sequence[_Piece],
        topology: Topology,
        digest: Callable[[int], int],
        finish: Callable[[_Piece], Any],
        deliver: Callable[[Pipeline | Serial, _Piece, Any], None] | None,
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

        with Pipeline(pieces[0].like) if count > 1 else Serial() as pipeline:
            ready = pipeline.encode(functools.partial(make, 0))
            for at in range(last + 1):
                h, k = divmod(at, count)
                call.exchanged = deliver is None and h == len(steps)
                made = ready()
                if at < last:
                    # Of several pieces what this one needs has come a step ago or before.
                    ready = pipeline.encode(functools.partial(make, at + 1), behind=True)
                if h == len(steps):
                    if deliver is not None:
                        deliver(pipeline, pieces[k], made)
                else:
                    self._hop(call, steps[h], h, pieces[k], made, digest(at + 1))
        self._statistics.judge(call)

    def _hop(
        self,
        call: Call,
        hop: Hop,
        number: int,
        piece: _Piece,
        send: ChunkViews | None,
        digest: int,
    ) -> None:
        """Move what is encoded in `send`, and have the parts of `piece` know what has come."""
        outs: list[list[Any]] = [[] for _ in range(self._size)]
        xs: list[list[Any]] = [[] for _ in range(self._size)]
        if send is not None and hop.to is not None:
            send.write_descriptors([digest] * len(hop.out), 0)
            xs[hop.to] = [array for parcel in send.parcels for array in parcel]
            call.raw_bytes += send.raw_nbytes
            call.wire_bytes += DESCRIPTOR_NBYTES * len(hop.out) + send.static_nbytes
        if hop.source is None:
            with call.stage("exchange", f" (hop {number})"):
                self._transport.all_to_all_v(outs, xs)
            return
        note = f" (hop {number}, from rank {hop.source})"
        receive = self._memory.receive(
            f"receive {piece.number}", [piece.plan] * len(hop.into), piece.like
        )
        outs[hop.source] = [array for parcel in receive.parcels for array in parcel]
        with call.stage("exchange", note):
            self._transport.all_to_all_v(outs, xs)
        self._comparisons.compare_late(call, receive, [digest] * len(hop.into), hop.source, note)
        if not piece.plan.nelem:
            # Descriptors alone have come.
            return
        buffers = receive.buffers(self._memory.status_words(receive.memory))
        for word, (c, data) in enumerate(zip(hop.into, receive.data, strict=True)):
            piece.parts[c].received = _Received(buffers[word], data, word, note)

    def _encode_parts(
        self, call: Call, pieces: Sequence[_Piece], piece: _Piece, shares: Sequence[int]
    ) -> ChunkViews | None:
        """What this rank knows of these shares, encoded; None if there are none."""
        if not shares:
            return None
        name, plan = f"send {piece.number}", piece.plan
        send = self._memory.chunks(name, [plan] * len(shares), piece.like)
        self._memory.hold(name, send)
        for c, data in zip(shares, send.data, strict=True):
            # All ranks encode a share once: what they draw by differs in the rank alone, so that
            # correlated rounding finds the others.
            number = c * len(pieces) + piece.number
            key = rounding_key(self._session.seed, call.sequence, number, self._rank, self._size)
            self._encode_part(call, plan, piece.parts[c], data, key)
        return send

    def _encode_part(self, call: Call, plan: Plan, part: _Part, data: Any, key: Key) -> None:
        """Encode the sum of the rank's own part and the received one to `data`, and forget them."""
        codec, own, received, stats = self._codec, part.own, part.received, part.stats
        # What has no elements is encoded at each hop: nothing of it is received.
        if plan.nelem:
            part.own = part.received = None
        if received is None:
            with call.stage("encode"), np.errstate(all="ignore"):
                self._coding.encode_into(own, plan, data, key, stats)
        elif own is None:
            self._check_received(call, received)
            tensors.put(data, received.data)
        else:
            # In one pass the received buffer says what statistics it has: they are the same.
            stats = None if codec._fuses(own, plan.dtype) else stats
            with call.stage("sum", received.note), np.errstate(all="ignore"):
                self._coding.sum_into(received.buffer, own, data, key, stats)
            self._coding.decoded(call, received.buffer, received.note, received.word)

    def _check_received(self, call: Call, received: _Received) -> None:
        """Raise for damage of what is handed on as it is; on a GPU with the call's verdict."""
        with call.stage("sum", received.note):
            if not tensors.is_cuda(received.data):
                verify(received.buffer)
                return
            plan = received.buffer.plan
            values = tensors.empty((plan.nelem,), plan.dtype, received.data)
            self._coding.decode_into(received.buffer, values, "add")
        self._coding.decoded(call, received.buffer, received.note, received.word)

    def _add_to_own(self, call: Call, piece: _Piece, part: _Part) -> None:
        """Add the received sum to the rank's own part, as another one follows."""
        received, part.received = part.received, None
        if received is None:
            return
        if not part.summed:
            wide = tensors.sum_dtype(piece.plan.dtype)
            total = tensors.empty((piece.plan.nelem,), wide, piece.like)
            tensors.put(total, part.own)
            part.own, part.summed = total, True
        self._add_received(call, received, part.own)

    def _add_received(self, call: Call, received: _Received, total: Any) -> None:
        with call.stage("sum", received.note):
            # Not in the memory that pieces are decoded in at the same time.
            self._coding.add_into(received.buffer, total, "add")
        self._coding.decoded(call, received.buffer, received.note, received.word)
