"""The encoded form of one tensor, as encode() hands it out."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .arrays import Target, bytes_view, from_bits
from .codecs.base import Bytes, Plan
from .engine import Parsed, parse
from .formats.dtypes import BY_NAME
from .formats.header import OVERFLOW, RECORD, Header, align

_UINT8 = BY_NAME["uint8"]


class Buffer:
    """One compressed tensor: header, result records, static parts, dynamic slots.

    A fresh buffer has slack in its dynamic slots, which holds whatever that memory held before:
    hand `packed()` or `bytes()`, which have none, to strangers, not `array`. Decoding needs nothing
    but the bytes. A buffer given to encode() as `out` is overwritten: only the one
    that encode() returns describes what it then holds.
    """

    __slots__ = ("_array", "_host", "_target", "plan")

    def __init__(self, plan: Plan, host: Bytes, target: Target) -> None:
        self.plan = plan
        self._host = host
        self._target = target
        self._array: Any = None

    @property
    def header(self) -> Header:
        """What is known before the data: codec, dtype, shape, chunks, section table."""
        return self.plan.header

    @property
    def target(self) -> Target:
        """Library and device of the tensor that was encoded."""
        return self._target

    @property
    def array(self) -> Any:
        """The whole buffer with its slack: uint8, shape (plan.nbytes,), in the input's library."""
        if self._target == Target():
            return self._host
        if self._array is None:
            self._array = from_bits(self._host, _UINT8, self._host.shape, self._target)
        return self._array

    @property
    def sizes(self) -> npt.NDArray[np.uint64]:
        """Dynamic bytes of every chunk, shape (chunks,)."""
        return self._records["dynamic_nbytes"]

    @property
    def nbytes(self) -> int:
        """Exact size of the packed form, in bytes."""
        stride = self.plan.dynamic_stride
        return self.plan.dynamic_offset + sum(align(min(n, stride)) for n in self.sizes.tolist())

    @property
    def overflowed(self) -> bool:
        """True if a fixed-rate buffer (`dynamic_capacity=`) could not hold its data."""
        return bool((self._records["flags"] & OVERFLOW).any())

    @property
    def _records(self) -> npt.NDArray[Any]:
        start = self.plan.header.nbytes
        return self._host[start : start + RECORD.itemsize * self.plan.chunks].view(RECORD)

    def static(self, i: int) -> Any:
        """Static part of chunk `i`: uint8, shape (plan.static_stride,), a view of `array`."""
        return self.array[self.plan.static_range(self._chunk(i))]

    def dynamic(self, i: int) -> Any:
        """Used dynamic bytes of chunk `i`: uint8, a view of `array`."""
        start = self.plan.dynamic_offset + self._chunk(i) * self.plan.dynamic_stride
        return self.array[start : start + min(int(self.sizes[i]), self.plan.dynamic_stride)]

    def _chunk(self, i: int) -> int:
        if not 0 <= i < self.plan.chunks:
            raise IndexError(f"chunk {i}; allowed: 0 to {self.plan.chunks - 1}")
        return i

    def parsed(self) -> Parsed:
        """The buffer after the checks that any foreign buffer gets."""
        return parse(self._host, max_nbytes=1 << 63)

    def packed(self) -> Any:
        """The canonical bytes without slack: uint8, shape (nbytes,), in the input's library.

        Raises FormatError("dynamic_overflow") if the buffer overflowed.
        """
        packed = self.parsed().pack()
        if self._target == Target():
            return packed
        return from_bits(packed, _UINT8, packed.shape, self._target)

    def __bytes__(self) -> bytes:
        return self.parsed().pack().tobytes()

    def __len__(self) -> int:
        return self.nbytes

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.array.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()

    def __repr__(self) -> str:
        plan = self.plan
        shape = list(plan.shape)
        return f"<tightwire.Buffer {plan.codec.name} {plan.dtype.name}{shape} {self.nbytes} bytes>"


def parsed_source(src: Any, max_nbytes: int) -> Parsed:
    """A Buffer, bytes-like object or uint8 array after the checks of `engine.parse`."""
    if isinstance(src, Buffer):
        return src.parsed()
    return parse(bytes_view(src), max_nbytes)
