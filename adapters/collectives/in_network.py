"""In-network reduction: sums of codecs whose payload elements add up.

Ranks agree on the maximum of their norms and encode with it; payload elements are then summed as
they are, without decoding (DynamiQ, section 5.1, after THC and OmniReduce). NCCL sums them itself;
over other transports each rank sums a share.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from ... import arrays
from ...arrays import ArrayInfo
from ...buffer import Buffer
from ...formats.dtypes import DType
from ...homomorphic import sketch
from . import tensors
from .calls import Call
from .session import TOPOLOGIES
from .statistics import Statistics, side_by_side
from .steps import Steps
from .sums import Sum, SumAlgorithm, divided

_NOTE = " (the sum of all ranks)"
_TOPOLOGY = TOPOLOGIES.index("in-network")


class InNetworkSums(SumAlgorithm):
    """Sums of payload elements, for codecs whose ranks agree on the largest statistics."""

    in_place = False
    tells_decoded = False
    scatter_name = None

    def __init__(self, steps: Steps, statistics: Statistics) -> None:
        self._session = steps.session
        self._memory = steps.memory
        self._coding = steps.coding
        self._comparisons = steps.comparisons
        self._digest_checks = steps.digest_checks
        self._statistics = statistics
        self._codec = steps.session.codec
        self._transport = steps.session.transport
        self._rank, self._size = steps.session.rank, steps.session.size
        self.allowed = self._codec.spec.sums_in_network
        self.max_ranks = self._codec.spec.max_ranks

    def sums(self, sent: DType, nelem: int) -> bool:
        """Those that are coded: raw elements do not add up."""
        return self._memory.plan(sent, nelem).codec == self._codec.spec

    def share(self, nelem: int) -> int:
        """All of them."""
        return nelem

    def all_reduce(self, call: Call, flat: Any, result: Any, what: Sum) -> None:
        """The sum of all ranks' `flat`, shape (n,), to `result`, which may overlap it."""
        flat, info = divided(flat, what.op, self._size), what.travelling
        self._comparisons.compare_shape(call, flat, info, _TOPOLOGY)
        terms = tensors.cast(flat, info.dtype)
        (buffer,) = self._encode_alike(call, [terms], info)
        elements, size = _elements(buffer), self._size
        with call.stage("exchange"), np.errstate(all="ignore"):
            if self._network_adds(elements):
                self._transport.all_reduce(elements, "sum")
            else:
                whole = _padded(elements, size)
                own = self._sum_of_shares(call, whole)
                self._transport.all_gather(tensors.as_bytes(whole), tensors.as_bytes(own))
                self._digest_checks.check_gathered(call, own, whole)
                tensors.put(elements, whole[: elements.shape[0]])
        share = -(-elements.shape[0] // size) * elements.itemsize
        self._account(call, 2, terms.nbytes / size, share)
        self._decode(call, buffer, result)

    def reduce_scatter(self, call: Call, x: Any, total: Any, what: Sum) -> None:
        """This rank's share of the sum of all ranks' `x`, shape (ranks * n,), to `total`, (n,)."""
        info = what.travelling
        x = tensors.cast(x, info.dtype).reshape(-1)
        self._comparisons.compare_shape(call, x, info, _TOPOLOGY)
        buffers = self._encode_alike(call, list(x.reshape(self._size, -1)), info)
        own = _elements(buffers[self._rank])
        elements = side_by_side([_elements(buffer) for buffer in buffers], x)
        with call.stage("exchange"), np.errstate(all="ignore"):
            if self._network_adds(elements):
                self._transport.reduce_scatter(own, elements)
            else:
                tensors.put(own, self._sum_of_shares(call, elements))
        self._account(call, 1, total.shape[0] * info.dtype.itemsize, own.nbytes)
        self._decode(call, buffers[self._rank], total)

    def _encode_alike(self, call: Call, xs: Sequence[Any], info: ArrayInfo) -> list[Buffer]:
        """Buffers of `xs`, encoded by the maximum of all ranks' statistics."""
        codec = self._codec
        with call.stage("statistics"), np.errstate(all="ignore"):
            found = [codec.measure(x) for x in xs]
        stats = self._statistics.reduced(call, found, xs[0], "max", info)
        with call.stage("encode"), np.errstate(all="ignore"):
            return [
                codec.encode(x, stats=s, key=self._coding.key(call), checksum=False)
                for x, s in zip(xs, stats, strict=True)
            ]

    def _network_adds(self, elements: Any) -> bool:
        """True if the network adds up such payload elements itself."""
        if self._session.digests:
            # Partial sums of a network cannot be compared.
            return False
        return tensors.is_cuda(elements) and elements.dtype in self._session.plain_dtypes

    def _sum_of_shares(self, call: Call, elements: Any) -> Any:
        """This rank's share of the sum of all payloads, added up here in the order of ranks."""
        received = tensors.empty(elements.shape, tensors.dtype_of(elements), elements)
        self._transport.all_to_all(tensors.as_bytes(received), tensors.as_bytes(elements))
        equal = [elements.shape[0] // self._size] * self._size
        self._digest_checks.check_swapped(call, elements, equal, received, equal)
        first, *others = received.reshape(self._size, -1)
        for term in others:
            tensors.add(first, term)
        return first

    def _account(self, call: Call, times: int, raw: float, wire: int) -> None:
        """A share of `raw` and of `wire` bytes went to every other rank, so many times."""
        call.raw_bytes += int(times * (self._size - 1) * raw)
        call.wire_bytes += times * (self._size - 1) * wire

    def _decode(self, call: Call, buffer: Buffer, result: Any) -> None:
        call.exchanged = True
        out = result
        if tensors.dtype_of(result) != buffer.plan.dtype:
            out = tensors.empty((buffer.plan.nelem,), buffer.plan.dtype, result)
        memory: Any = buffer._memory
        if memory is not None:
            memory.report_to(self._memory.status_words(out)[:1])
        with call.stage("decode", _NOTE):
            self._coding.decode_into(buffer, out)
        self._coding.decoded(call, buffer, _NOTE)
        if out is not result:
            tensors.put(result, out)
        self._statistics.judge(call)


def _elements(buffer: Buffer) -> Any:
    """The payload of a buffer as networks add it: integers in words of 4 bytes, as none carries."""
    elements = sketch(buffer)
    if tensors.is_torch(elements):
        torch = sys.modules["torch"]
        return elements if elements.is_floating_point() else elements.view(torch.int32)
    return elements if arrays.describe(elements).dtype.is_float else elements.view(np.int32)


def _padded(elements: Any, ranks: int) -> Any:
    """`elements` with zeros behind them, in memory of their own, a multiple of `ranks` long."""
    n = elements.shape[0]
    padded = tensors.empty((-(-n // ranks) * ranks,), tensors.dtype_of(elements), elements)
    tensors.put(padded[:n], elements)
    tensors.fill(padded[n:], 0)
    return padded
