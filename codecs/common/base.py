"""The interface of codecs: a frozen value that plans, and modules that encode and decode.

A codec module `codecs/x.py` defines one subclass of `CodecSpec` and its NumPy reference; fast
backends are in `x_cpu.py` and `x_triton.py`. Everything here works on flat arrays of element bits
and on byte arrays. Array libraries, headers and checks of the whole buffer belong to the core.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from ...formats.checksum import identity_term as checksum_identity
from ...formats.dtypes import DType
from ...formats.header import CHECKSUM, RECORD, Header, Section, align

Bits = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
ReduceOp = Literal["sum", "max", "or"]


class Key(NamedTuple):
    """Seed of counter-based randomness (specs/philox.md; Salmon et al., SC 2011, section 3.3).

    The same key gives the same bytes on every backend.

    Attributes:
        seed: An integer from 0 to 2^64 - 1, or an array with one integer on the device of the
            tensor, so that each replay of a captured CUDA graph draws other numbers.
        step: An integer or such an array, counted up from call to call.
        rank: Number of the rank that encodes.
        world: Number of ranks, for rounding that is correlated between ranks.

    Example:
        >>> import numpy as np
        >>> import tightwire as tw
        >>> x = np.linspace(-1, 1, 4096, dtype=np.float32)
        >>> buf = tw.encode(x, "dynamiq", key=tw.Key(seed=1, step=7))
    """

    seed: Any
    step: Any = 0
    rank: int = 0
    world: int = 1


class Layout(NamedTuple):
    """The sections of one chunk.

    Attributes:
        sections: The section table.
        dynamic_bound: The most dynamic bytes that any data can need.
    """

    sections: tuple[Section, ...]
    dynamic_bound: int = 0


class Gap(NamedTuple):
    """A range of a chunk's static part that must be zero: bytes `start` to `stop`.

    A device backend's decoder weighs for the checksum what is before `weighed`; the frame weighs
    the rest. `weighed` is less than `start` where the frame weighs used bytes as well.
    """

    start: int
    weighed: int
    stop: int


class Tail(NamedTuple):
    """Bits behind a chunk's last code that must be zero: those of `mask` in the byte at `at`."""

    at: int = 0
    mask: int = 0


def tail_of(bits: int, nelem: int) -> Tail:
    """What is behind `nelem` codes of `bits` bits, the first of which starts at byte 0."""
    at, used = divmod(bits * nelem, 8)
    return Tail(at, 0xFF & -(1 << used)) if used else Tail()


class Chunk(NamedTuple):
    """One chunk in memory: the type and number of its elements, its planned sections and its bytes.

    Attributes:
        dtype: Element type.
        nelem: Number of elements.
        sections: The section table.
        static: Static part, uint8.
        dynamic: The whole dynamic slot when encoding, exactly the used bytes when decoding; uint8.
        number: Number of the chunk in the tensor.
        first: Flat index of its first element in the tensor.
        shape: Shape of the tensor.
        info: A number that the codec keeps in the chunk's record.
    """

    dtype: DType
    nelem: int
    sections: tuple[Section, ...]
    static: Bytes
    dynamic: Bytes
    number: int = 0
    first: int = 0
    shape: tuple[int, ...] = ()
    info: int = 0


class ChunkResult(NamedTuple):
    """The result of encoding one chunk.

    Attributes:
        dynamic_nbytes: Dynamic bytes that the data need. If they exceed the slot, the dynamic part
            is incomplete.
        words_sum: Checksum over static and dynamic part if the backend has computed it, else None.
        info: A number to keep in the chunk's record.
    """

    dynamic_nbytes: int
    words_sum: int | None = None
    info: int = 0


class ChunkDecoded(NamedTuple):
    """The result of decoding one chunk.

    Attributes:
        problem: What is wrong with the payload, or None.
        words_sum: Checksum over static and dynamic part if the backend has computed it, else None.
    """

    problem: str | None = None
    words_sum: int | None = None


def check_choice(name: str, value: object, allowed: tuple[str | int, ...]) -> None:
    """Raise TypeError if a parameter has another type than those allowed, or ValueError."""
    kind = type(allowed[0])
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        error: type[Exception] = TypeError
    elif value not in allowed:
        error = ValueError
    else:
        return
    listed = ", ".join(map(repr, allowed))
    raise error(f"{name} is {value!r}; allowed: {kind.__name__}, one of {listed}")


def plain_number(value: Any) -> Any:
    """Python's number of one of NumPy, anything else as it is: ranks compare parameters as text."""
    return value.item() if isinstance(value, (np.integer, np.floating)) else value


@dataclass(frozen=True)
class CodecSpec:
    """Base class of all codecs. Subclasses are frozen dataclasses whose fields are the parameters.

    Class attributes say what a codec is: ``name``, ``id`` and ``version`` in the format;
    ``lossless``; ``homomorphic`` (payload elements of two buffers may be added); ``reduce_op`` (how
    ranks combine statistics: ``"sum"``, ``"max"``, ``"or"`` or None); ``dtypes``, the names of
    those that it codes; ``max_world``, the most ranks that a key may count; ``uses_info`` (it keeps
    a number in each record); ``sums_keep_stats`` (``decode_add_encode`` keeps the statistics of its
    source); ``needs_stats`` (``encode`` measures when no statistics are passed);
    ``measures_in_encode`` (on a GPU that takes no call of its own); ``adds_float32``
    (``decode_add_encode`` takes float32 with narrower buffers); ``raw_fallback`` (chunks that do
    not shrink are stored raw); ``caution``, what sums lose besides the codec's error, for
    traces.
    """

    name: ClassVar[str]
    id: ClassVar[int]
    version: ClassVar[int] = 1
    lossless: ClassVar[bool] = True
    homomorphic: ClassVar[bool] = False
    reduce_op: ClassVar[ReduceOp | None] = None
    dtypes: ClassVar[tuple[str, ...]]
    #: The largest world of a key, None where its numbers have no other limit.
    max_world: ClassVar[int | None] = None
    #: The codec writes the record's info field; elsewhere it is zero and checked.
    uses_info: ClassVar[bool] = False
    #: Statistics of all ranks, reduced, hold for partial sums too: `decode_add_encode` keeps what
    #: the buffer has of them.
    sums_keep_stats: ClassVar[bool] = False
    #: Encoding measures the tensor when no statistics are passed.
    needs_stats: ClassVar[bool] = True
    #: On a GPU `encode` measures what it is given no statistics of, in its own pass.
    measures_in_encode: ClassVar[bool] = False
    #: `decode_add_encode` takes float32 with narrower buffers, whatever is added.
    adds_float32: ClassVar[bool] = False
    #: A chunk whose coded form is longer than its raw bytes is stored raw.
    raw_fallback: ClassVar[bool] = False
    #: What sums lose besides the codec's error, as traces say it; "" if nothing.
    caution: ClassVar[str] = ""

    @property
    def round_trips(self) -> bool:
        """False if what decodes is another tensor than what was encoded, by these parameters."""
        return True

    @property
    def draws(self) -> bool:
        """Whether encoding needs a key."""
        return False

    def bind(self, shape: tuple[int, ...]) -> CodecSpec:
        """The codec that plans tensors of a shape.

        Args:
            shape: Shape of the tensor.

        Returns:
            Itself, unless a parameter is taken from the shape.
        """
        return self

    def layout(self, dtype: DType, nelem: int) -> Layout:
        """The sections of a chunk, which depend on nothing else than the arguments.

        Args:
            dtype: Element type.
            nelem: Number of elements.

        Returns:
            The sections.

        Raises:
            NotImplementedError: In this base class.
        """
        raise NotImplementedError

    def static_used(
        self, dtype: DType, nelem: int, sections: tuple[Section, ...]
    ) -> tuple[tuple[int, int], ...]:
        """Byte ranges of a chunk's static part that carry data; the rest is zero padding.

        Args:
            dtype: Element type.
            nelem: Number of the chunk's own elements.
            sections: The section table.

        Returns:
            (start, stop) of each range, in their order; the first starts at 0.

        Raises:
            NotImplementedError: In this base class.
        """
        raise NotImplementedError

    @property
    def weighed_unit(self) -> int:
        """Bytes of a unit in which a device backend's decoder weighs the first used range."""
        return 4

    @property
    def weighs_gaps(self) -> bool:
        """Whether a device backend's decoder weighs all of a static part, and the frame nothing."""
        return False

    @property
    def weighed_by_frame(self) -> tuple[int, ...]:
        """Numbers of the used ranges that a device backend's decoder does not weigh."""
        return ()

    def gaps(self, dtype: DType, nelem: int, sections: tuple[Section, ...]) -> tuple[Gap, ...]:
        """What is behind each used range of a chunk's static part, for device backends.

        Args:
            dtype: Element type.
            nelem: Number of the chunk's own elements.
            sections: The section table.

        Returns:
            A gap, which may be empty, for each used range.
        """
        used = self.static_used(dtype, nelem, sections)
        stops = [
            *(start for start, _ in used[1:]),
            sum(s.nbytes for s in sections if not s.dynamic),
        ]
        gaps = []
        for i, ((start, end), stop) in enumerate(zip(used, stops, strict=True)):
            weighed = start if i in self.weighed_by_frame else end
            if i == 0:
                weighed = min(-(-end // self.weighed_unit) * self.weighed_unit, stop)
            if self.weighs_gaps:
                weighed = stop
            gaps.append(Gap(end, weighed, stop))
        return tuple(gaps)

    def tail(self, nelem: int) -> Tail:
        """The bits behind a chunk's last code, where it ends within a byte.

        Args:
            nelem: Number of the chunk's own elements.

        Returns:
            The byte and the bits; by default none.
        """
        return Tail()

    def max_chunk_nelem(self, dtype: DType) -> int:
        """The most elements in one chunk.

        Args:
            dtype: Element type.

        Raises:
            NotImplementedError: In this base class.
        """
        return (1 << 63) - 1

    def accepts(self, dtype: DType, nelem: int) -> bool:
        """Whether this codec is to store a chunk; otherwise the raw codec does.

        Args:
            dtype: Element type.
            nelem: Number of elements.

        Returns:
            False where the codec does not take the dtype or saves nothing.

        Raises:
            ValueError: If the parameters do not allow the dtype.
        """
        return dtype.name in self.dtypes

    def pack_params(self) -> bytes:
        """The parameters as they are in the header: a multiple of 8 bytes."""
        return b""

    @classmethod
    def unpack_params(cls, data: bytes) -> CodecSpec:
        """The inverse of ``pack_params``.

        Args:
            data: The bytes of the header.

        Returns:
            The codec.

        Raises:
            FormatError: With the reason ``"bad_header"`` if the bytes are not valid parameters.
        """
        raise NotImplementedError

    def measure(self, bits: Bits, dtype: DType) -> npt.NDArray[Any] | None:
        """Compute the statistics that encoding takes as ``stats``.

        Args:
            bits: Element bits of the tensor, unsigned integers, flat.
            dtype: Element type.

        Returns:
            The statistics, or None if the codec needs none.
        """
        return None

    def scratch_nbytes(self, dtype: DType, nelem: int, chunks: int) -> int:
        """Bytes of work memory of a device backend: by default one sum for each chunk.

        Args:
            dtype: Element type.
            nelem: Number of elements of a whole chunk.
            chunks: Number of chunks.
        """
        return align(8 * chunks)

    def fuses(self, source: CodecSpec) -> bool:
        """Whether ``decode_add_encode`` may take a buffer of another codec in one pass.

        Args:
            source: The codec of that buffer.
        """
        return source == self

    def cell_dtype(self, dtype: DType) -> DType:
        """The dtype in which payload elements of a homomorphic codec add up.

        Args:
            dtype: Element type of the tensor.

        Raises:
            NotImplementedError: If the codec is not homomorphic.
        """
        raise NotImplementedError

    def check_sum(self, cells: Bits) -> None:
        """Check that summed payload elements are not of more ranks than they can hold.

        Args:
            cells: The payload elements of a chunk, as unsigned integers.

        Raises:
            ValueError: If they are of more ranks.
        """

    def check_stats(self, stats: npt.NDArray[Any], dtype: DType) -> None:
        """Check statistics that are passed to ``encode``.

        Args:
            stats: The statistics.
            dtype: Element type of the tensor.

        Raises:
            ValueError: If ``encode`` cannot use them.
        """
        raise ValueError(f"{self.name} takes no stats")

    @property
    def max_ranks(self) -> int | None:
        """The most ranks whose payload elements add up in a homomorphic codec; None: any number."""
        return None

    @property
    def stats_nelem(self) -> int | None:
        """Number of consecutive elements of one statistic; None if it is of the whole tensor."""
        return None

    def remark(self, stats: npt.NDArray[Any]) -> str | None:
        """A remark on agreed statistics for the trace of a collective.

        Args:
            stats: The statistics that ranks agreed on.

        Returns:
            The remark, or None.
        """
        return None


@dataclass(frozen=True)
class Plan:
    """Every size and offset of a buffer, known before any data is seen. Sizes are in bytes.

    A buffer is header, result records (32 bytes per chunk), ``chunks`` static parts of
    ``static_stride`` bytes, and ``chunks`` dynamic slots of ``dynamic_stride`` bytes
    (specs/buffer.md, "Layout").

    Attributes:
        codec: The codec that encodes: raw where the requested one would save nothing.
        dtype: Element type.
        shape: Shape of the tensor.
        chunks: Number of chunks.
        layout: The sections of a chunk.
        dynamic_stride: Bytes of a chunk's dynamic slot.
        checksum: Whether the buffer has checksums.
    """

    codec: CodecSpec
    dtype: DType
    shape: tuple[int, ...]
    chunks: int
    layout: Layout
    dynamic_stride: int
    checksum: bool = True

    def __getstate__(self) -> dict[str, Any]:
        # What was derived may not exist where the plan is sent.
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @cached_property
    def nelem(self) -> int:
        """Number of elements of the tensor."""
        return math.prod(self.shape)

    @cached_property
    def chunk_nelem(self) -> int:
        """Number of elements of a whole chunk; the last chunks may have fewer, or none."""
        return -(-self.nelem // self.chunks)

    def chunk_range(self, i: int) -> tuple[int, int]:
        """First and past-the-last flat element of a chunk.

        Args:
            i: Number of the chunk.
        """
        start = min(i * self.chunk_nelem, self.nelem)
        return start, min(start + self.chunk_nelem, self.nelem)

    @cached_property
    def filled_chunks(self) -> int:
        """Number of chunks that have elements; those after them have none."""
        return -(-self.nelem // self.chunk_nelem) if self.nelem else 0

    def raw_dynamic(self, i: int) -> int:
        """Dynamic bytes of a chunk that is stored raw: what its static part cannot hold.

        Args:
            i: Number of the chunk.
        """
        lo, hi = self.chunk_range(i)
        return max(0, (hi - lo) * self.dtype.itemsize - self.static_stride)

    def static_range(self, i: int) -> slice:
        """The bytes of a chunk's static part in the buffer.

        Args:
            i: Number of the chunk.
        """
        start = self.static_offset + i * self.static_stride
        return slice(start, start + self.static_stride)

    def chunk(self, i: int, data: Bytes, dynamic: Bytes, info: int = 0) -> Chunk:
        """A chunk of a buffer.

        Args:
            i: Number of the chunk.
            data: The bytes of the buffer, uint8.
            dynamic: The chunk's dynamic part, uint8.
            info: The number in its record.
        """
        lo, hi = self.chunk_range(i)
        static = data[self.static_range(i)]
        return Chunk(
            self.dtype, hi - lo, self.layout.sections, static, dynamic, i, lo, self.shape, info
        )

    @cached_property
    def header(self) -> Header:
        """The planned header, for dynamic slots of ``dynamic_stride`` bytes."""
        return Header(
            codec=self.codec.name,
            codec_id=self.codec.id,
            codec_version=self.codec.version,
            dtype=self.dtype,
            shape=self.shape,
            chunks=self.chunks,
            sections=self.layout.sections,
            params=self.codec.pack_params(),
            dynamic_stride=self.dynamic_stride,
            required=CHECKSUM if self.checksum else 0,
        )

    @cached_property
    def header_bytes(self) -> Bytes:
        """The packed header, uint8, read-only."""
        return np.frombuffer(self.header.pack(), np.uint8)

    @cached_property
    def static_offset(self) -> int:
        """Offset of the first chunk's static part."""
        return align(self.header.nbytes + RECORD.itemsize * self.chunks)

    @cached_property
    def static_stride(self) -> int:
        """Bytes of one chunk's static part: the same for all chunks."""
        return sum(s.nbytes for s in self.layout.sections if not s.dynamic)

    @cached_property
    def dynamic_offset(self) -> int:
        """Offset of the dynamic slots."""
        return self.static_offset + self.chunks * self.static_stride

    @cached_property
    def nbytes(self) -> int:
        """Bytes to allocate; no encoded buffer of this plan is longer."""
        return self.dynamic_offset + self.chunks * self.dynamic_stride

    @cached_property
    def scratch_nbytes(self) -> int:
        """Bytes of work memory of a device backend for one call of ``encode`` or ``decode``."""
        return self.codec.scratch_nbytes(self.dtype, self.chunk_nelem, self.chunks)

    def fuses(self, source: Plan) -> bool:
        """Whether ``decode_add_encode`` may take a buffer of another plan in one pass.

        The codecs may differ as far as ``CodecSpec.fuses`` allows; nothing else may.

        Args:
            source: The plan of that buffer.
        """
        if source == self:
            return True
        alike = self.codec.fuses(source.codec)
        return alike and replace(source, codec=self.codec, layout=self.layout) == self

    def identity_term(self, i: int) -> int:
        """Checksum contribution of what is planned about a chunk.

        Args:
            i: Number of the chunk.
        """
        lo, hi = self.chunk_range(i)
        return checksum_identity(self.codec.id, self.codec.version, self.dtype.id, hi - lo)
