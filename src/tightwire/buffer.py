"""The encoded form of one tensor, as encode() hands it out."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .arrays import Target, bytes_view, describe, from_bits, host_array, is_bytes, on_gpu
from .codecs.base import Bytes, Plan
from .engine import DEFAULT_MAX_NBYTES, Parsed, check_limit, check_plan, parse
from .formats.dtypes import BY_NAME
from .formats.header import OVERFLOW, RECORD, Header, align
from .planning import device_engine, make_plan

if TYPE_CHECKING:
    from .device import Memory

_UINT8 = BY_NAME["uint8"]


class Buffer:
    """One compressed tensor: header, result records, static parts, dynamic slots.

    Decoding needs nothing but the bytes. A fresh buffer has slack in its dynamic slots: bytes that
    encoding has not written. `packed()`, `bytes(buf)` and `np.asarray(buf)` copy the buffer without
    its slack, and pickle and `copy` do as well: they make a buffer on the host, of the same plan,
    that decodes to the same library if that is installed. From Python 3.12 on a Buffer is also
    bytes-like: `sock.sendall(buf)`, `file.write(buf)` and `memoryview(buf)` see those packed bytes,
    read-only. A buffer given to encode() as `out` is overwritten: only the one that encode()
    returns describes what it then holds.

    Of a tensor on a GPU the buffer stays there, and encode() and decode() wait for nothing. Damage
    that decode() meets is remembered, and raised as FormatError by `check()` and by what else
    brings something to the host: `nbytes`, `overflowed`, `dynamic()`, `packed()`, `bytes()`,
    `np.asarray()`, `len()`, pickle. Read the buffer on the stream that encoded and decoded it, or
    order the streams before.
    """

    __slots__ = ("_host", "_memory", "_shown", "_target", "plan")

    def __init__(
        self, plan: Plan, host: Bytes | None, target: Target, memory: Memory | None = None
    ) -> None:
        self.plan = plan
        self._host = host
        self._target = target
        self._memory = memory
        self._shown: Any = None

    @classmethod
    def wrap(cls, plan: Plan, array: Any, *, assembled: bool = False) -> Buffer:
        """A buffer of `plan` in bytes that are already there, or will be when it is decoded.

        Nothing is read and nothing is copied: a collective can decode what it received without
        waiting for it. `array` is bytes-like or a contiguous uint8 array of any library, on the
        host or a GPU (there 16-byte aligned), of `plan.nbytes` bytes or more; of those the buffer
        has the first. Decoding raises FormatError, on a GPU by `check()`, if they are no buffer of
        this plan. Raises TypeError or ValueError for any other `array`.

        An `assembled` buffer has chunks of several encoders (specs/buffer.md). In GPU memory only
        decoding takes it: header and ordinals are the plan's, and not compared.
        """
        if on_gpu(array):
            engine = device_engine()
            if isinstance(engine, str):
                raise ValueError(f"a buffer in GPU memory needs {engine}: pip install {engine}")
            wrapped: Buffer = engine.wrap(plan, array, assembled)
            return wrapped
        host = bytes_view(array)
        if not is_bytes(array) and not np.may_share_memory(host, host_array(array)):
            raise ValueError("array must be contiguous: its bytes are not copied")
        if host.size < plan.nbytes:
            raise ValueError(f"array has {host.size} bytes; the plan needs {plan.nbytes}")
        target = Target() if is_bytes(array) else Target(describe(array).library)
        return cls(plan, host[: plan.nbytes], target)

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
        """The whole buffer with its slack: uint8, shape (plan.nbytes,), in the input's library.

        Do not publish `array`: its slack is uninitialized. Dynamic slots keep, behind the bytes
        that are used, what that memory held before, which may be anything of this process. What
        leaves the process is `packed()` or `bytes(buf)`. `__dlpack__` exports `array`.

        The buffer's own memory, where that is in reach of the library. A JAX array has to be
        dropped before the buffer is encoded into anew: JAX takes it for immutable.
        """
        if self._memory is not None:
            return self._memory.array(self._target, 0, self.plan.nbytes)
        if self._target == Target():
            return self._host
        if self._shown is None:
            host = self._bytes
            self._shown = from_bits(host, _UINT8, host.shape, self._target)
        return self._shown

    @property
    def sizes(self) -> Any:
        """Dynamic bytes of every chunk, shape (chunks,).

        On the host uint64 in NumPy. Of a buffer in GPU memory int64 in the input's library, a view
        (JAX: a copy) that stays on the device and waits for nothing.
        """
        if self._memory is not None:
            return self._memory.sizes(self._target, self.plan)
        return self._records["dynamic_nbytes"]

    @property
    def nbytes(self) -> int:
        """Exact size of the packed form, in bytes."""
        stride = self.plan.dynamic_stride
        sizes: npt.NDArray[np.uint64] = self._records["dynamic_nbytes"]
        return self.plan.dynamic_offset + sum(align(min(n, stride)) for n in sizes.tolist())

    @property
    def overflowed(self) -> bool:
        """True if a fixed-rate buffer (`dynamic_capacity=`) could not hold its data."""
        return bool((self._records["flags"] & OVERFLOW).any())

    @property
    def _bytes(self) -> Bytes:
        if self._host is None:
            raise AssertionError("a buffer is in host memory or in device memory")
        return self._host

    @property
    def _records(self) -> npt.NDArray[Any]:
        start = self.plan.header.nbytes
        stop = start + RECORD.itemsize * self.plan.chunks
        if self._memory is None:
            return self._bytes[start:stop].view(RECORD)
        return self._memory.read(self._target, start, stop).view(RECORD)

    def static(self, i: int) -> Any:
        """Static part of chunk `i`: uint8, shape (plan.static_stride,), a view of `array`."""
        return self._part(self.plan.static_range(self._chunk(i)))

    def dynamic(self, i: int) -> Any:
        """Used dynamic bytes of chunk `i`: uint8, a view of `array`."""
        start = self.plan.dynamic_offset + self._chunk(i) * self.plan.dynamic_stride
        used = int(self._records["dynamic_nbytes"][i])
        return self._part(slice(start, start + min(used, self.plan.dynamic_stride)))

    def _part(self, where: slice) -> Any:
        if self._memory is not None:
            return self._memory.array(self._target, where.start, where.stop)
        return self.array[where]

    def _chunk(self, i: int) -> int:
        if not 0 <= i < self.plan.chunks:
            raise IndexError(f"chunk {i}; allowed: 0 to {self.plan.chunks - 1}")
        return i

    def check(self) -> None:
        """Raise FormatError if a decode() of this buffer on a GPU found damage.

        Buffers that share memory by `out` share what was found. Waits for the device. What is
        raised is forgotten: the next call is silent. A captured graph
        in which the buffer was first decoded remembers its last replay only; decode once
        before the capture to have them all remembered. A buffer on the host never has anything.
        """
        if self._memory is not None:
            self._memory.check(self._target)

    def zero_slack(self) -> None:
        """Zero what encoding has not written of the dynamic slots of a buffer on the host.

        For a buffer that is to leave the process with its slots.
        """
        plan = self.plan
        for i, used in enumerate(self._records["dynamic_nbytes"].tolist()):
            start = plan.dynamic_offset + i * plan.dynamic_stride
            first = start + used if used <= plan.dynamic_stride else start
            self._bytes[first : start + plan.dynamic_stride] = 0

    def parsed(self) -> Parsed:
        """The buffer on the host, after the checks that any foreign buffer gets.

        From a GPU it comes packed.
        """
        if self._memory is not None:
            return parse(self._memory.packed_on_host(self._target, self.plan), max_nbytes=1 << 63)
        parsed = parse(self._bytes, max_nbytes=1 << 63)
        check_plan(parsed, self.plan)
        return parsed

    def packed(self) -> Any:
        """The canonical bytes without slack: uint8, shape (nbytes,), in the input's library.

        Raises FormatError("dynamic_overflow") if the buffer overflowed.
        """
        if self._memory is not None:
            return self._memory.packed(self._target, self.plan)
        packed = self.parsed().pack()
        if self._target == Target():
            return packed
        return from_bits(packed, _UINT8, packed.shape, self._target)

    def _packed_on_host(self) -> Bytes:
        if self._memory is not None:
            return self._memory.packed_on_host(self._target, self.plan)
        return self.parsed().pack()

    def __bytes__(self) -> bytes:
        return self._packed_on_host().tobytes()

    def __buffer__(self, flags: int) -> memoryview:
        """The packed bytes, read-only: Python asks from 3.12 on."""
        return self._packed_on_host().data.toreadonly()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        """The packed bytes on the host, as uint8 if no other `dtype` is asked for.

        They are always a copy: raises ValueError for `copy` False.
        """
        if copy is False:
            raise ValueError("the packed bytes of a Buffer are a copy. Allowed: copy=None or True")
        return self._packed_on_host().astype(np.uint8 if dtype is None else dtype, copy=False)

    def __reduce__(self) -> tuple[Callable[..., Buffer], tuple[bytes, int, str]]:
        # A device means nothing elsewhere; memory that encoding has not written is nobody's.
        return _restored, (bytes(self), self.plan.dynamic_stride, self._target.library)

    def __len__(self) -> int:
        return self.nbytes

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.array.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()

    def __repr__(self) -> str:
        plan = self.plan
        what = f"tightwire.Buffer {plan.codec.name} {plan.dtype.name}{list(plan.shape)}"
        if self._memory is not None:
            # A look at it must neither wait for the device nor raise.
            return f"<{what} in {plan.nbytes} bytes on {self._memory.data.device}>"
        return f"<{what} {self.nbytes} bytes>"


def parsed_source(src: Any, max_nbytes: int | None) -> Parsed:
    """A Buffer, bytes-like object or uint8 array after the checks of `engine.parse`.

    `max_nbytes` None is no limit for a Buffer, and the default for bytes. What readers of files
    have parsed comes back as it is.
    """
    if isinstance(src, Parsed):
        return src
    if isinstance(src, Buffer):
        if max_nbytes is not None:
            check_limit(src.plan, max_nbytes)
        return src.parsed()
    return parse(bytes_view(src), DEFAULT_MAX_NBYTES if max_nbytes is None else max_nbytes)


def _restored(data: bytes, dynamic_stride: int, library: str) -> Buffer:
    """The host Buffer whose packed bytes are `data`, with slots of `dynamic_stride` bytes.

    It decodes to `library`, or to NumPy where that is not installed.
    """
    parsed = parse(np.frombuffer(data, np.uint8), max_nbytes=1 << 63)
    packed = parsed.plan
    plan = make_plan(
        packed.codec, packed.dtype, packed.shape, packed.chunks, dynamic_stride, packed.checksum
    )
    host = np.zeros(plan.nbytes, np.uint8)
    host[: plan.dynamic_offset] = parsed.data[: plan.dynamic_offset]
    header = replace(parsed.header, dynamic_stride=plan.dynamic_stride).pack()
    host[: len(header)] = np.frombuffer(header, np.uint8)
    for i in range(plan.chunks):
        used = parsed.chunk(i).dynamic
        start = plan.dynamic_offset + i * plan.dynamic_stride
        host[start : start + used.size] = used
    installed = importlib.util.find_spec(library) is not None
    return Buffer(plan, host, Target(library if installed else "numpy"))
