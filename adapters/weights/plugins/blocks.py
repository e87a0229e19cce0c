"""Blocks of a cache: small tensors in host memory, encoded and decoded where they lie.

What caches of engines have in common. A block is bytes of a known shape and dtype; its encoding is
one buffer, of a size that is known beforehand where the cache asks for that.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from .... import engine
from ....arguments import number
from ....arrays import as_dtype
from ....codec import Codec, as_lossless
from ....codecs.common.base import Bytes, Plan
from ....codecs.common.threads import cpu_count
from ....formats.errors import FormatError
from ....formats.header import ALIGN, Header
from ....planning import integer
from ....single_calls import end_of, is_aligned, is_quick, read_quick, write_quick

#: Plans that are kept: a cache has blocks of few shapes.
_PLANS = 64


class Blocks:
    """Encodes and decodes blocks, without loss.

    Args:
        codec: A lossless codec or its name.
        ratio: Bytes that an encoded block takes, as a part of its own: all blocks of a shape then
            take equally many. Where the codec cannot save as much, as of integers, that is what
            any data fits in. None: each block takes what it needs.
        threads: Most threads for one block. None: every processor.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If the codec is lossy or needs a base, or ``ratio`` is not above 0.
    """

    def __init__(
        self, codec: str | Codec = "zipccl", *, ratio: float | None = None, threads: int | None = 1
    ) -> None:
        self.codec = as_lossless(codec)
        self.ratio = number("ratio", ratio)
        if self.ratio is not None and self.ratio <= 0:
            raise ValueError(f"ratio is {ratio}; allowed: more than 0, or None")
        self.threads = cpu_count() if threads is None else integer("threads", threads, least=1)
        self._plan = functools.lru_cache(_PLANS)(self._new_plan)

    def plan(self, shape: tuple[int, ...], dtype: Any) -> Plan:
        """The plan of blocks.

        Args:
            shape: Shape of a block.
            dtype: Its dtype, as ``Codec.plan`` takes it.

        Returns:
            The plan. Encoded blocks have at most ``nbytes`` bytes, and with a ratio exactly as
            many.

        Raises:
            TypeError: If the dtype is none that buffers have.
        """
        return self._plan(tuple(shape), as_dtype(dtype).name)

    def _new_plan(self, shape: tuple[int, ...], dtype: str) -> Plan:
        plan = self.codec.plan(shape, dtype)
        if self.ratio is None:
            return plan
        goal = int(self.ratio * plan.nelem * plan.dtype.itemsize) // ALIGN * ALIGN
        capacity = goal - plan.dynamic_offset
        if not 0 < capacity < plan.dynamic_stride:
            return plan
        return self.codec.plan(shape, dtype, dynamic_capacity=capacity)

    def encode(self, plan: Plan, block: Any, out: Any) -> int:
        """Encode a block.

        Args:
            plan: The plan of its shape and dtype, by ``plan``.
            block: Its bytes, an object with the buffer protocol.
            out: Memory of at least ``plan.nbytes`` bytes, writable, apart from the block.

        Returns:
            How many bytes of ``out`` were written.

        Raises:
            ValueError: If the block does not fit in what the ratio gives it, or memory has a wrong
                size.
        """
        bits = _memory("block", block, plan.nelem * plan.dtype.itemsize).view(plan.dtype.bits)
        target = _memory("out", out, plan.nbytes)
        if self.ratio is None:
            return engine.encode_packed(plan, bits, target, self.threads)
        if is_quick(plan, self.threads, None) and write_quick(plan, bits, target):
            end = end_of(plan, target)
        else:
            engine.encode_into(plan, bits, target, threads=self.threads)
            try:
                parsed = engine.parse_as(plan, target)
            except FormatError:
                taken = f"{plan.nbytes} bytes, which ratio={self.ratio} leaves it"
                problem = f"a block of {bits.nbytes} bytes does not fit in {taken}"
                raise ValueError(problem) from None
            end = parsed.dynamic_at[0] + parsed.records[0].dynamic_nbytes
        # What was there before is nobody's business.
        target[end:] = 0
        return plan.nbytes

    def decode(self, plan: Plan, data: Any, out: Any) -> int:
        """Decode a block.

        Args:
            plan: The plan of its shape and dtype, by ``plan``.
            data: An encoded block, of any codec and ratio, and perhaps bytes behind it.
            out: Memory of the block, writable.

        Returns:
            How many bytes of ``data`` the block takes.

        Raises:
            FormatError: If ``data`` is damaged, or a block of another shape or dtype. What ``out``
                holds is undefined then.
            ValueError: If ``out`` has a wrong size.
        """
        bits = _memory("out", out, plan.nelem * plan.dtype.itemsize).view(plan.dtype.bits)
        buffer = _memory("data", data)
        usual, usually = plan, buffer[: plan.nbytes]
        if self.ratio is None:
            usual, usually = engine.packed_plan(plan), buffer
        quick = is_quick(plan, self.threads, None) and is_aligned(buffer)
        if quick and read_quick(usual, usually, bits):
            return usually.size
        # Another codec, another ratio, bytes behind it, or damage.
        nbytes = Header.peek(buffer).nbytes
        parsed = engine.parse(buffer if nbytes is None else buffer[:nbytes], bits.nbytes)
        found, needed = parsed.plan, f"{plan.dtype.name}{list(plan.shape)}"
        if (found.dtype, found.shape) != (plan.dtype, plan.shape):
            other = f"{found.dtype.name}{list(found.shape)}"
            raise FormatError("bad_header", f"a block of {other}; wanted: {needed}")
        engine.decode_range(parsed, bits, 0, threads=self.threads)
        return parsed.nbytes


def _memory(name: str, value: Any, nbytes: int | None = None) -> Bytes:
    """The bytes of an object with the buffer protocol, the first `nbytes` if that is given."""
    found: Bytes = np.frombuffer(value, np.uint8)
    if nbytes is not None and found.size < nbytes:
        raise ValueError(f"{name} has {found.size} bytes; needed: {nbytes}")
    return found[:nbytes]
