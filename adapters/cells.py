"""Sums of codecs whose buffers add up: the network reduces statistics, then cells.

thc and omnireduce take the maximum of all ranks' norms, encode with it, and their cells are summed
as they are: nothing is decoded on the way (DynamiQ, section 5.1, after THC and OmniReduce).
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
from .multihop import MultiHop
from .transport import all_reduce_by_gather

_NOTE = " (the sum of all ranks)"
_TOPOLOGY = TOPOLOGIES.index("cells")
#: What every network adds up.
_SUMMED = ("int32", "float32")


class CellSums(MultiHop):
    """A `MultiHop` that sums cells too, of codecs whose statistics have a maximum."""

    def _all_reduce_by_cells(self, call: Call, flat: Any, result: Any, info: ArrayInfo) -> None:
        """The sum of all ranks' `flat`, shape (n,), to `result`; `info` is what travels."""
        self._compare_shape(call, flat, info, _TOPOLOGY)
        terms = tensors.cast(flat, info.dtype)
        (buffer,) = self._encode_alike(call, [terms], info)
        cells = _cells(buffer)
        with call.stage("exchange"), np.errstate(all="ignore"):
            self._sum_cells(cells)
        self._account_cells(call, 2, terms, cells)
        self._decode_cells(call, buffer, result)

    def _reduce_scatter_by_cells(self, call: Call, x: Any, total: Any, info: ArrayInfo) -> None:
        """This rank's share of the sum of all ranks' `x`, shape (ranks * n,), to `total`, (n,)."""
        self._compare_shape(call, x, info, _TOPOLOGY)
        rows = x.reshape(self._size, -1)
        buffers = self._encode_alike(call, list(rows), info)
        cells = _stacked([_cells(buffer) for buffer in buffers])
        own = _cells(buffers[self._rank])
        with call.stage("exchange"), np.errstate(all="ignore"):
            if tensors.is_cuda(cells):
                self._transport.reduce_scatter(own, cells)
            else:
                # Not every network of hosts scatters sums.
                self._sum_cells(cells)
                tensors.put(own, cells.reshape(self._size, -1)[self._rank])
        self._account_cells(call, 1 if tensors.is_cuda(cells) else 2, x, cells)
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

    def _sum_cells(self, cells: Any) -> None:
        if tensors.is_cuda(cells) or tensors.dtype_of(cells).name in _SUMMED:
            self._transport.all_reduce(cells, "sum")
        else:
            all_reduce_by_gather(self._transport, cells, "sum")

    def _account_cells(self, call: Call, times: int, x: Any, cells: Any) -> None:
        """Bytes that a sum in `times` steps sends, each of them all but a rank's own share."""
        for_others = self._size - 1
        call.raw_bytes += times * for_others * x.nbytes // self._size
        call.wire_bytes += times * for_others * cells.nbytes // self._size

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
        if call.verdict is not None:
            call.verdict()


def _cells(buffer: Buffer) -> Any:
    """The cells of a buffer, as networks add them: those of thc in words of 4, none carries."""
    cells = sketch(buffer)
    if tensors.is_torch(cells):
        torch = sys.modules["torch"]
        return cells if cells.is_floating_point() else cells.view(torch.int32)
    return cells if arrays.describe(cells).dtype.is_float else cells.view(np.int32)


def _stacked(parts: Sequence[Any]) -> Any:
    """Arrays of one length, one behind the other."""
    if tensors.is_torch(parts[0]):
        return sys.modules["torch"].cat(list(parts))
    return np.concatenate(parts)
