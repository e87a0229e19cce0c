"""Gathers and swaps of encoded data, whole or in pieces that overlap, and broadcasts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ...arrays import ArrayInfo
from ...buffer import Buffer
from .calls import Call
from .chunk_views import ChunkViews, pieces
from .coding import Span
from .cost import Choice
from .pipelined import in_pieces, spans_of
from .steps import PendingExchange, Steps


class Compressed:
    """The encoded form of collectives that add nothing up."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._session = steps.session
        self._memory = steps.memory
        self._coding = steps.coding
        self._comparisons = steps.comparisons
        self._transport = steps.session.transport
        self._rank, self._size = steps.session.rank, steps.session.size

    def all_gather(
        self,
        call: Call,
        x: Any,
        out: Any,
        info: ArrayInfo,
        choice: Choice,
        last: bool = True,
        memory: str = "receive",
        encoded: ChunkViews | None = None,
    ) -> None:
        """An all-gather of `x`, shape (n,), to `out`, shape (ranks * n,); `encoded` is `x` then."""
        n = x.shape[0]
        spans = spans_of(n, choice.pieces)
        if len(spans) == 1:
            send = encoded or self._coding.encode(call, [x], [self._memory.plan(info.dtype, n)])
            began = self._steps.begin_gather(call, send, call.digest(info, info.shape), memory)
            buffer = self._steps.end_gather(call, began)
            call.exchanged = last
            self._coding.decode(call, buffer, out, None)
            return

        def encode(k: int) -> ChunkViews:
            a, b = spans[k]
            return self._coding.encode(
                call, [x[a:b]], [self._memory.plan(info.dtype, b - a)], f"send {k}"
            )

        def begin(k: int, send: ChunkViews) -> PendingExchange:
            return self._steps.begin_gather(
                call, send, call.digest(info, info.shape, k), f"{memory} {k}"
            )

        def end(k: int, began: PendingExchange) -> Callable[[], None]:
            buffer = self._steps.end_gather(call, began)
            return lambda: self._coding.decode_rows(call, buffer, out, spans[k])

        in_pieces(call, x, len(spans), encode, begin, end, last)

    def all_to_all(
        self,
        call: Call,
        flat: Any,
        result: Any,
        info: ArrayInfo,
        choice: Choice,
        digests: Sequence[int],
    ) -> None:
        """An all-to-all of equal shares, elements of shape (ranks * n,)."""
        n = flat.shape[0] // self._size
        spans = spans_of(n, choice.pieces)
        if len(spans) == 1:
            plan = self._memory.plan(info.dtype, flat.shape[0], self._size)
            send = self._coding.encode(call, [flat], [plan])
            receive = self._memory.receive("receive", [plan], flat)
            began = self._steps.begin_swap(call, send, receive, digests, digests)
            (buffer,) = self._steps.end_swap(call, began)
            call.exchanged = True
            self._coding.decode(call, buffer, result, None)
            return

        def put(buffers: list[Buffer], span: Span) -> None:
            self._coding.decode_rows(call, buffers[0], result, span)

        self.all_to_all_pieces(call, flat, info, spans, put, whole=True)

    def all_to_all_parts(
        self,
        call: Call,
        parts: Sequence[Any],
        outs: Sequence[Any],
        info: ArrayInfo,
        there: Sequence[int],
        here: Sequence[int],
    ) -> None:
        """An all-to-all of unequal shares: `parts[j]`, 1-D, to rank j, `outs[i]` from rank i.

        `there` are digests of the shares that go, `here` of those that come. One batch encodes all
        shares, and one decodes them.
        """
        # The chunks of a buffer are equal, so every share is a buffer of its own.
        sent = [self._memory.plan(info.dtype, part.shape[0]) for part in parts]
        received = [self._memory.plan(info.dtype, out.shape[0]) for out in outs]
        send = self._coding.encode_many(call, parts, sent)
        receive = self._memory.receive("receive", received, parts[0])
        if self._session.fixed or not self._session.sizes_first:
            self._comparisons.compare(call, parts[0], there, here)
        began = self._steps.begin_swap(call, send, receive, there, here)
        buffers = self._steps.end_swap(call, began)
        call.exchanged = True
        self._coding.decode_many(call, buffers, outs)

    def all_to_all_pieces(
        self,
        call: Call,
        flat: Any,
        info: ArrayInfo,
        spans: Sequence[Span],
        put: Callable[[list[Buffer], Span], None],
        *,
        whole: bool,
        last: bool = True,
        decoded: Any = None,
    ) -> None:
        """An all-to-all of pieces `spans` of every share of `flat`; `put` takes what was received.

        That is one buffer if it is to come `whole`, else one from every rank. `decoded` is that of
        ``Sum``.
        """
        rows = flat.reshape(self._size, -1)

        def encode(k: int) -> ChunkViews:
            a, b = spans[k]
            # A copy of the piece costs less than an encoding for each of its rows.
            piece = rows[:, a:b].reshape(-1)
            plan = self._memory.plan(info.dtype, piece.shape[0], self._size)
            send = self._coding.encode(call, [piece], [plan], f"send {k}")
            if decoded is not None:
                self._coding.decode_sent(call, send, decoded.reshape(self._size, -1)[:, a:b])
            return send

        def begin(k: int, send: ChunkViews) -> PendingExchange:
            a, b = spans[k]
            plans = send.plans if whole else [self._memory.plan(info.dtype, b - a)] * self._size
            receive = self._memory.receive(f"receive {k}", plans, flat)
            digests = [call.digest(info, info.shape, k)] * self._size
            return self._steps.begin_swap(call, send, receive, digests, digests)

        def end(k: int, began: PendingExchange) -> Callable[[], None]:
            buffers = self._steps.end_swap(call, began)
            return lambda: put(buffers, spans[k])

        in_pieces(call, flat, len(spans), encode, begin, end, last)

    def broadcast(self, call: Call, values: Any, into: Any, info: ArrayInfo, root: int) -> None:
        """Scatter the chunks of `values` of rank `root`, and gather them to `into`."""
        plan = self._memory.plan(info.dtype, values.shape[0], self._size)
        digests = [call.digest(info, (root, *info.shape))] * self._size
        whole = self._memory.receive("receive", [plan], values)
        self._comparisons.compare_new(call, values, digests, digests)
        is_root = self._rank == root
        parts: list[list[Any]] = [[]] * self._size
        if is_root:
            send = self._coding.encode(call, [values], [plan])
            whole.descriptors[...] = send.write_descriptors(digests, 0)
            parts = [[whole.descriptor_bytes]] * self._size
        sizes = [0] * self._size
        if not self._session.fixed:
            with call.stage("sizes"):
                self._steps.scatter(call, root, parts, [whole.descriptor_bytes])
                descriptors = self._comparisons.compared(
                    call, whole.arriving(whole.descriptors), digests, root
                )
                sizes = self._steps.sizes(call, descriptors, whole, root)
        descriptors_too = [whole.descriptor_bytes] if self._session.fixed else []
        if is_root:
            own = send.shares[root]
            dynamic = pieces(send, sizes)
            parts = [
                [*descriptors_too, s.static, *d] for s, d in zip(send.shares, dynamic, strict=True)
            ]
            call.raw_bytes += send.raw_nbytes - own.raw_nbytes
        else:
            # Not in its place in `whole`: an all-gather must not overlap itself.
            nbytes = plan.static_stride + sizes[self._rank]
            memory = self._memory.scratch("share", nbytes, values)[:nbytes]
            own = whole.shares[self._rank]._replace(
                static=memory[: plan.static_stride], slot=memory[plan.static_stride :]
            )
        with call.stage("scatter"):
            into_pieces = [*descriptors_too, own.static, own.slot[: sizes[self._rank]]]
            self._steps.scatter(call, root, parts, into_pieces)
        if self._session.fixed:
            self._comparisons.compare_late(call, whole, digests, root)
        with call.stage("static"):
            self._transport.all_gather(whole.statics, own.static)
        if self._session.fixed:
            buffer = whole.buffers(self._memory.status_words(whole.memory))[0]
        else:
            buffer = self._steps.gather_dynamic(call, own, whole, sizes)
        others = self._size - 1
        call.raw_bytes += others * own.raw_nbytes
        call.wire_bytes += others * (int(own.static.shape[0]) + sizes[self._rank])
        call.exchanged = True
        # All ranks are to have the same bits, those of a lossy codec too.
        if not is_root or not self._session.codec.lossless:
            self._coding.decode(call, buffer, into, root)
