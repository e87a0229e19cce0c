"""Two-shot sums: a reduce-scatter, and in an all-reduce an all-gather of the sums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...arrays import ArrayInfo
from ...buffer import Buffer
from ...formats.dtypes import DType
from . import tensors
from .calls import Call
from .chunk_views import DESCRIPTOR_NBYTES, ChunkViews
from .coding import CHUNKS, Span
from .compressed import Compressed
from .native import Native
from .pipelined import spans_of
from .steps import Steps
from .sums import Sum, SumAlgorithm, divided


class TwoShot(SumAlgorithm):
    """Sums of which every rank adds up a share; shares are encoded, or travel as they are."""

    allowed = True
    max_ranks = None
    in_place = True
    tells_decoded = True
    scatter_name = "all-to-all and sum"

    def __init__(self, steps: Steps, compressed: Compressed, native: Native) -> None:
        self._steps = steps
        self._session = steps.session
        self._memory = steps.memory
        self._coding = steps.coding
        self._compressed = compressed
        self._native = native
        self._codec = steps.session.codec
        self._size = steps.session.size

    def sums(self, sent: DType, nelem: int) -> bool:
        """All of them."""
        return True

    def share(self, nelem: int) -> int:
        """An equal share; what is left over is not encoded."""
        return nelem // self._size

    def all_reduce(self, call: Call, flat: Any, result: Any, what: Sum) -> None:
        """The sum of all ranks' `flat`, shape (n,), to `result`, which may overlap it."""
        if what.native and self._native.all_reduce(call, flat, result, what):
            return
        size, op, sent, info = self._size, what.op, what.sent, what.info
        each, rest = divmod(flat.shape[0], size)
        if not what.native and sent == what.wide and not self._codec.lossless:
            # The terms of such sums are as wide as the sums, which might overflow.
            flat, op = divided(flat, op, size), "sum"
        # What equal shares leave over, less than an element for each rank, is a raw buffer.
        main = size * each
        total = tensors.empty((each,), what.wide, result)
        left = tensors.empty((rest,), what.wide, result)
        encoded = None
        if what.native:
            self._native.reduce_scatter(call, flat[:main], total, what)
        else:
            once = op == "sum"
            encoded = self._scatter(call, flat[:main], total, what, last=False, encode=once)
        if rest:
            self._sum_rest(call, tensors.cast(flat[main:], sent), left, what.travelling)
        total, left = divided(total, op, size), divided(left, op, size)
        # What has been encoded already says `total` no longer.
        rounded = total if encoded is not None else tensors.cast(total, sent)
        gathered = result[:main]
        if sent != info.dtype:
            gathered = tensors.empty((main,), sent, result)
        if what.native:
            self._native.all_gather(call, rounded, gathered, what.travelling)
        else:
            # In memory of its own: headers stay as they are from call to call.
            self._compressed.all_gather(
                call,
                rounded,
                gathered,
                what.travelling,
                what.choice,
                memory="gathered",
                encoded=encoded,
            )
        if sent != info.dtype:
            tensors.put(result[:main], gathered)
        tensors.put(result[main:], tensors.cast(left, sent))

    def reduce_scatter(self, call: Call, x: Any, total: Any, what: Sum) -> None:
        """This rank's share of the sum of all ranks' `x`, of ranks * n elements, to `total`, (n,).

        `total` may overlap `x`.
        """
        if what.native:
            self._native.reduce_scatter(call, x, total, what)
        else:
            self._scatter(call, x, total, what, last=True)

    def _scatter(
        self, call: Call, x: Any, total: Any, what: Sum, *, last: bool, encode: bool = False
    ) -> ChunkViews | None:
        """A reduce-scatter of what is encoded; `last` says that nothing is exchanged after it.

        With `encode` the sum, as it travels, may be returned encoded, if that is one pass; `total`
        is then incomplete.
        """
        n, sent, info, decoded = total.shape[0], what.sent, what.travelling, what.decoded
        flat = tensors.cast(x, sent).reshape(-1)
        spans = spans_of(n, what.choice.pieces)
        if len(spans) == 1:
            whole = self._memory.plan(sent, flat.shape[0], self._size)
            # decode_add adds a whole buffer, so that there is one for each rank. On a GPU one is
            # received, as static parts that lie side by side take one call.
            plans = [self._memory.plan(sent, n)] * self._size
            if whole.dynamic_stride and self._coding.adds_here(whole, total):
                plans = [whole]
            digests = [call.digest(info, info.shape)] * self._size
            send = self._coding.encode(call, [flat], [whole])
            if decoded is not None:
                self._coding.decode_sent(call, send, decoded)
            receive = self._memory.receive("receive", plans, flat)
            began = self._steps.begin_swap(call, send, receive, digests, digests)
            buffers = self._steps.end_swap(call, began)
            call.exchanged = last
            # Where sums keep them, in one pass the last rank's statistics would be the sum's.
            keeps = self._codec.lossless or self._codec.spec.sums_keep_stats
            if encode and n and self._codec._fuses(total, sent) and not keeps:
                return self._add_and_encode(call, buffers, total)
            self._add(call, buffers, total)
            return None

        def put(buffers: list[Buffer], span: Span) -> None:
            self._add(call, buffers, total[span[0] : span[1]])

        self._compressed.all_to_all_pieces(
            call, flat, info, spans, put, whole=False, last=last, decoded=decoded
        )
        return None

    def _add_and_encode(self, call: Call, buffers: Sequence[Buffer], total: Any) -> ChunkViews:
        """The sum of the buffers of all ranks, encoded; `total` holds all terms except the last."""
        *before, last = buffers
        local = total
        if len(before) == 1 and tensors.is_cuda(total):
            # A single term is narrow: less to write, and to read again.
            local = tensors.empty((last.plan.nelem,), last.plan.dtype, total)
            self._coding.decode(call, before[0], local, 0)
        else:
            self._add(call, before, total)
        note = f" (from rank {self._size - 1})"
        with call.stage("decode", note), np.errstate(all="ignore"):
            shares = self._memory.chunks(
                "send", [self._memory.plan(last.plan.dtype, last.plan.nelem)], total
            )
            self._memory.hold("send", shares)
            memory, key = shares.data[0], self._coding.key(call)
            self._coding.sum_into(last, local, memory, key)
        self._coding.decoded(call, last, note, self._size - 1)
        return shares

    def _add(self, call: Call, buffers: Sequence[Buffer], total: Any) -> None:
        """Sum the buffers of all ranks, or the chunks of one, to `total`."""
        tensors.clear(total)
        if buffers and buffers[0].plan.chunks > 1:
            (buffer,) = buffers
            with call.stage("decode", CHUNKS):
                self._coding.add_chunks(buffer, total)
            self._coding.decoded(call, buffer, CHUNKS)
            return
        for source, buffer in enumerate(buffers):
            note = f" (from rank {source})"
            with call.stage("decode", note):
                self._coding.add_into(buffer, total)
            self._coding.decoded(call, buffer, note, source)

    def _sum_rest(self, call: Call, x: Any, total: Any, info: ArrayInfo) -> None:
        """Sum all ranks' few elements `x` to `total`; they travel as they are, with checksums."""
        n, size = x.shape[0], self._size
        plan, whole = (self._memory.plan(info.dtype, k * n, k, raw=True) for k in (1, size))
        with call.stage("rest"):
            send = self._memory.chunks("rest", [plan], x)
            self._coding.encode_into(x, plan, send.data[0], None, raw=True)
            digest = call.digest(info, info.shape, -1)
            send.write_descriptors([digest], 0)
            receive = self._memory.receive("rests", [whole], x)
            self._session.transport.all_to_all_v(receive.parcels, send.parcels * size)
        self._steps.comparisons.compare_late(call, receive, [digest] * size)
        (buffer,) = receive.buffers(self._memory.status_words(receive.memory))
        call.raw_bytes += (size - 1) * send.raw_nbytes
        call.wire_bytes += (size - 1) * (DESCRIPTOR_NBYTES + send.static_nbytes)
        received = tensors.empty((size * n,), info.dtype, x)
        self._coding.decode(call, buffer, received, None)
        tensors.clear(total)
        for values in received.reshape(size, n):
            tensors.add(total, values)
