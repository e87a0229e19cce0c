"""The encoded form of one tensor, as ``encode`` returns it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .arrays import Target, bytes_view, describe, from_bits, host_array, is_bytes, on_gpu
from .codecs.common.base import Bytes, Plan
from .engine import DEFAULT_MAX_NBYTES, Parsed, check_limit, parse, parse_as
from .formats.dtypes import BY_NAME
from .formats.header import OVERFLOW, RECORD, Header, align
from .planning import device_engine, make_plan

if TYPE_CHECKING:
    from .gpu_memory import Memory

_UINT8 = BY_NAME["uint8"]


class Buffer:
    """One compressed tensor: header, result records, static parts and dynamic slots.

    ``encode`` makes buffers, and ``Buffer.wrap`` makes one of received bytes. Decoding needs
    nothing else than the bytes.

    A buffer that ``encode`` returns has *slack* in its dynamic slots: bytes that encoding has not
    written. ``packed()``, ``bytes(buf)``, ``np.asarray(buf)``, pickle and ``copy`` give the buffer
    without its slack. From Python 3.12 on a ``Buffer`` is also bytes-like: ``sock.sendall(buf)``,
    ``file.write(buf)`` and ``memoryview(buf)`` read those packed bytes. Pickle and ``copy`` make a
    buffer on the host with the same plan, which decodes to the same library if that is installed.

    A buffer that was passed to ``encode`` as ``out`` is overwritten. Only the one that ``encode``
    returns describes what it then holds.

    The buffer of a tensor on a GPU stays there, and neither ``encode`` nor ``decode`` waits for the
    device. Damage that ``decode`` meets is kept, and raised as ``FormatError`` by ``check()`` and
    by all that copies something to the host: ``nbytes``, ``overflowed``, ``dynamic()``,
    ``packed()``, ``bytes()``, ``np.asarray()``, ``len()`` and pickle. Read a buffer on the stream
    that encoded or decoded it, or order the streams before.

    Args:
        plan: Its plan.
        host: Its bytes in host memory, uint8, or None.
        target: Library and device of the tensor.
        memory: Its memory on a GPU, or None.

    Raises:
        FormatError: By the members named above, if decoding on a GPU found damage.
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
        """Make a buffer of bytes that are already there, or will be when it is decoded.

        Nothing is read or copied: a collective can decode what it received without waiting for it.
        Decoding raises ``FormatError``, on a GPU by ``check()``, if the bytes are not a buffer of
        this plan.

        Args:
            plan: The plan that the encoder used.
            array: Bytes-like or a contiguous uint8 array of any library, on the host or a GPU
                (there aligned to 16 bytes), of at least ``plan.nbytes`` bytes; the first of them
                are used.
            assembled: Whether the chunks are of several encoders (specs/buffer.md). In GPU memory
                such a buffer can only be decoded; header and ordinals are those of the plan.

        Returns:
            The buffer, a view of ``array``.

        Raises:
            TypeError: If ``array`` is neither bytes-like nor a uint8 array.
            ValueError: If ``array`` is too small, not contiguous or not aligned.
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
        """What is known before the data: codec, dtype, shape, chunks and section table."""
        return self.plan.header

    @property
    def target(self) -> Target:
        """Library and device of the tensor that was encoded."""
        return self._target

    @property
    def array(self) -> Any:
        """The whole buffer with its slack: uint8, shape ``(plan.nbytes,)``, in the input's library.

        This is the buffer's own memory where the library can reach it, and what ``__dlpack__``
        exports. Drop a JAX array before the buffer is encoded into again: JAX assumes that arrays
        never change.

        Note:
            Do not publish ``array``: its slack is uninitialised, and may hold anything that this
            process had in memory. Send ``packed()`` or ``bytes(buf)``.
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
        """Used dynamic bytes of every chunk, shape ``(chunks,)``.

        On the host uint64, a NumPy array. Of a buffer in GPU memory int64 in the input's library, a
        view (JAX: a copy) that stays on the device; nothing waits.
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
        """True if a fixed-rate buffer (``dynamic_capacity=``) was too small for its data."""
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
        """The static part of a chunk.

        Args:
            i: Number of the chunk.

        Returns:
            uint8, shape ``(plan.static_stride,)``, a view of ``array``.

        Raises:
            IndexError: If there is no such chunk.
        """
        return self._part(self.plan.static_range(self._chunk(i)))

    def dynamic(self, i: int) -> Any:
        """The used bytes of a chunk's dynamic slot.

        Args:
            i: Number of the chunk.

        Returns:
            uint8, shape ``(sizes[i],)``, a view of ``array``.

        Raises:
            IndexError: If there is no such chunk.
            FormatError: If decoding on a GPU found damage.
        """
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
        """Raise what decoding this buffer on a GPU has found, and wait for the device.

        Buffers that share memory by ``out`` share what was found. An error is raised once: the next
        call is silent. A captured graph in which the buffer was decoded for the first time keeps
        the result of its last replay only; decode once before the capture to keep all. A buffer on
        the host raises nothing here, as ``decode`` has raised it.

        Raises:
            FormatError: If the buffer is damaged.
        """
        if self._memory is not None:
            self._memory.check(self._target)

    def zero_slack(self) -> None:
        """Zero the slack of a buffer on the host, so that ``array`` can be sent as it is."""
        plan = self.plan
        for i, used in enumerate(self._records["dynamic_nbytes"].tolist()):
            start = plan.dynamic_offset + i * plan.dynamic_stride
            first = start + used if used <= plan.dynamic_stride else start
            self._bytes[first : start + plan.dynamic_stride] = 0

    def parsed(self) -> Parsed:
        """The buffer on the host, its header and records checked; from a GPU its packed form.

        Raises:
            FormatError: If the buffer is damaged.
        """
        if self._memory is not None:
            return parse(self._memory.packed_on_host(self._target, self.plan), max_nbytes=1 << 63)
        return parse_as(self.plan, self._bytes)

    def packed(self) -> Any:
        """Copy the canonical bytes, without slack.

        Returns:
            uint8, shape ``(nbytes,)``, in the input's library and on its device.

        Raises:
            FormatError: With the reason ``"dynamic_overflow"`` if the buffer overflowed.
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
    """A Buffer, bytes-like object or uint8 array after the checks of ``engine.parse``.

    ``max_nbytes`` None sets no limit for a Buffer, and the default limit for bytes. A parsed buffer
    is returned unchanged.
    """
    if isinstance(src, Parsed):
        return src
    if isinstance(src, Buffer):
        if max_nbytes is not None:
            check_limit(src.plan, max_nbytes)
        return src.parsed()
    data = bytes_view(src, "bytes, a Buffer or a uint8 array")
    return parse(data, DEFAULT_MAX_NBYTES if max_nbytes is None else max_nbytes)


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
