"""In-network reduction: sums of codecs whose payload elements add up.

thc and omnireduce take the maximum of all ranks' norms and encode with it; their payload elements
are then summed as they are, without decoding (DynamiQ, section 5.1, after THC and OmniReduce). NCCL
sums them itself; over other transports each rank sums a share.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import arrays
from ..arrays import ArrayInfo
from ..buffer import Buffer
from ..codec import decode
from ..homomorphic import sketch
from . import tensors
from .calls import Call
from .group import TOPOLOGIES
from .multihop import MultiHop, side_by_side

_NOTE = " (the sum of all ranks)"
_TOPOLOGY = TOPOLOGIES.index("cells")


class CellSums(MultiHop):
    """A ``MultiHop`` that also sums in-network, for codecs whose statistics have a maximum."""

    def _all_reduce_by_cells(self, call: Call, flat: Any, result: Any, info: ArrayInfo) -> None:
        """The sum of all ranks' `flat`, shape (n,), to `result`; `info` is what travels."""
        self._compare_shape(call, flat, info, _TOPOLOGY)
        terms = tensors.cast(flat, info.dtype)
        (buffer,) = self._encode_alike(call, [terms], info)
        cells, size = _cells(buffer), self._size
        with call.stage("exchange"), np.errstate(all="ignore"):
            if self._adds_cells(cells):
                self._transport.all_reduce(cells, "sum")
            else:
                whole = _padded(cells, size)
                own = self._sum_of_shares(call, whole)
                self._transport.all_gather(tensors.as_bytes(whole), tensors.as_bytes(own))
                self._check_gathered(call, own, whole)
                tensors.put(cells, whole[: cells.shape[0]])
        share = -(-cells.shape[0] // size) * cells.itemsize
        self._account_cells(call, 2, terms.nbytes / size, share)
        self._decode_cells(call, buffer, result)

    def _reduce_scatter_by_cells(self, call: Call, x: Any, total: Any, info: ArrayInfo) -> None:
        """This rank's share of the sum of all ranks' `x`, shape (ranks * n,), to `total`, (n,)."""
        self._compare_shape(call, x, info, _TOPOLOGY)
        buffers = self._encode_alike(call, list(x.reshape(self._size, -1)), info)
        own = _cells(buffers[self._rank])
        cells = side_by_side([_cells(buffer) for buffer in buffers], x)
        with call.stage("exchange"), np.errstate(all="ignore"):
            if self._adds_cells(cells):
                self._transport.reduce_scatter(own, cells)
            else:
                tensors.put(own, self._sum_of_shares(call, cells))
        self._account_cells(call, 1, total.shape[0] * info.dtype.itemsize, own.nbytes)
        self._decode_cells(call, buffers[self._rank], total)

    def _encode_alike(self, call: Call, xs: Sequence[Any], info: ArrayInfo) -> list[Buffer]:
        """Buffers of `xs`, encoded by the maximum of all ranks' statistics."""
        codec = self._codec
        with call.stage("statistics"), np.errstate(all="ignore"):
            found = [codec.measure(x) for x in xs]
        stats = self._reduced(call, found, xs[0], "max", info)
        with call.stage("encode"), np.errstate(all="ignore"):
            return [
                codec.encode(x, stats=s, key=self._key(call), checksum=False)
                for x, s in zip(xs, stats, strict=True)
            ]

    def _adds_cells(self, cells: Any) -> bool:
        """True if the network adds up such payload elements itself."""
        if self._digests:
            # Partial sums of a network cannot be compared.
            return False
        return tensors.is_cuda(cells) and cells.dtype in self._plain_dtypes

    def _sum_of_shares(self, call: Call, cells: Any) -> Any:
        """This rank's share of the sum of all payloads, added up here in the order of ranks."""
        came = tensors.empty(cells.shape, tensors.dtype_of(cells), cells)
        self._transport.all_to_all(tensors.as_bytes(came), tensors.as_bytes(cells))
        equal = [cells.shape[0] // self._size] * self._size
        self._check_swapped(call, cells, equal, came, equal)
        first, *others = came.reshape(self._size, -1)
        for term in others:
            tensors.add(first, term)
        return first

    def _account_cells(self, call: Call, times: int, raw: float, wire: int) -> None:
        """A share of `raw` and of `wire` bytes went to every other rank, so many times."""
        call.raw_bytes += int(times * (self._size - 1) * raw)
        call.wire_bytes += times * (self._size - 1) * wire

    def _decode_cells(self, call: Call, buffer: Buffer, result: Any) -> None:
        call.exchanged = True
        out = result
        if tensors.dtype_of(result) != buffer.plan.dtype:
            out = tensors.empty((buffer.plan.nelem,), buffer.plan.dtype, result)
        memory: Any = buffer._memory
        if memory is not None:
            memory.report_to(self._words_of(out)[:1])
        with call.stage("decode", _NOTE):
            if not self._decode_here(buffer, out, 0, buffer.plan.nelem):
                decode(buffer, out=out)
        self._decoded(call, buffer, _NOTE)
        if out is not result:
            tensors.put(result, out)
        self._judge(call)


def _cells(buffer: Buffer) -> Any:
    """The payload of a buffer as networks add it: of thc in words of 4 elements; none carries."""
    cells = sketch(buffer)
    if tensors.is_torch(cells):
        torch = sys.modules["torch"]
        return cells if cells.is_floating_point() else cells.view(torch.int32)
    return cells if arrays.describe(cells).dtype.is_float else cells.view(np.int32)


def _padded(cells: Any, ranks: int) -> Any:
    """`cells` with zeros behind them, in memory of their own, a multiple of `ranks` long."""
    n = cells.shape[0]
    padded = tensors.empty((-(-n // ranks) * ranks,), tensors.dtype_of(cells), cells)
    tensors.put(padded[:n], cells)
    tensors.fill(padded[n:], 0)
    return padded
