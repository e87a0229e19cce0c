"""The interface of codecs: a frozen value that plans, and modules that encode and decode.

A codec module `codecs/x.py` defines one subclass of `CodecSpec` and its NumPy reference; fast
backends are in `x_cpu.py` and `x_triton.py`. Everything here works on flat arrays of element bits
and on byte arrays. Array libraries, headers and checks of the whole buffer belong to the core.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from ...formats.checksum import identity_term as checksum_identity
from ...formats.dtypes import BY_NAME, DType
from ...formats.errors import FormatError
from ...formats.header import CHECKSUM, RECORD, Header, Section, align
from .params import declared, params_nbytes
from .sections import Array, places_of, sections_of, used_of

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


class ScaleBytes(NamedTuple):
    """How the scale bytes that ranks agree on bound the elements of their blocks.

    Attributes:
        block: Elements of a block; the last block may have fewer.
        largest: Largest scale byte of a block of numbers.
        special: Least scale byte of blocks with NaN or infinities.
        bounds: By scale byte the largest magnitude that a block holds, float32, shape ``(256,)``;
            NaN from ``special`` on.
    """

    block: int
    largest: int
    special: int
    bounds: npt.NDArray[np.float32]


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


def tail_problem(spec: CodecSpec, chunk: Chunk) -> str | None:
    """What is wrong with the bits behind a chunk's last code, None if they are zero."""
    tail = _tail(spec, chunk.nelem)
    wrong = tail.mask and int(chunk.static[tail.at]) & tail.mask
    return "bits behind the last code" if wrong else None


@functools.lru_cache(maxsize=4096)
def _tail(spec: CodecSpec, nelem: int) -> Tail:
    return spec.tail(nelem)


@functools.lru_cache(maxsize=4096)
def _places(
    spec: CodecSpec, dtype: DType, nelem: int, sections: tuple[Section, ...]
) -> tuple[tuple[int, int], ...]:
    return places_of(spec.arrays(dtype, nelem), sections)


def check_vector(stats: npt.NDArray[Any], dtype: npt.DTypeLike, what: str) -> None:
    """Raise ValueError unless statistics are an array of one dimension of `dtype`; `what` of."""
    if stats.ndim != 1 or stats.dtype != dtype:
        found = f"{stats.dtype} of shape {stats.shape}"
        raise ValueError(f"stats are {found}; allowed: {np.dtype(dtype)}, {what}")


@dataclass(frozen=True)
class CodecSpec:
    """Base class of all codecs. Subclasses are frozen dataclasses whose fields are the parameters.

    A codec declares its parameters with ``choice``, ``integer`` and ``fraction`` of
    ``codecs.common.params``, and its static sections by ``arrays``. Their bytes in the header, the
    sizes of sections, the bytes in use and where raw is smaller follow from that.

    Class attributes say what a codec is.
    """

    #: Name, id and version in the format.
    name: ClassVar[str]
    id: ClassVar[int]
    version: ClassVar[int] = 1
    lossless: ClassVar[bool] = True
    #: Payload elements of two buffers may be added.
    homomorphic: ClassVar[bool] = False
    #: How ranks combine statistics.
    reduce_op: ClassVar[ReduceOp | None] = None
    #: Names of the dtypes that it codes.
    dtypes: ClassVar[tuple[str, ...]]
    #: The most elements in one chunk: a section has less than 2^39 bytes.
    max_nelem: ClassVar[int] = (1 << 39) - 128
    #: Parameter bytes, by offset, that are not of a parameter and not 0.
    fixed_params: ClassVar[Mapping[int, int]] = {}
    #: The largest world of a key, None where its numbers have no other limit.
    max_world: ClassVar[int | None] = None
    #: The codec writes the record's info field; elsewhere it is zero and checked.
    uses_info: ClassVar[bool] = False
    #: Statistics of all ranks, reduced, hold for partial sums too: `decode_add_encode` keeps what
    #: the first buffer has of them, and the reference's `encode_chunk` takes that chunk as `kept`.
    sums_keep_stats: ClassVar[bool] = False
    #: Encoding measures the tensor when no statistics are passed.
    needs_stats: ClassVar[bool] = True
    #: On a GPU `encode` measures what it is given no statistics of, in its own pass.
    measures_in_encode: ClassVar[bool] = False
    #: `decode_add_encode` takes float32 with narrower buffers, whatever is added.
    adds_float32: ClassVar[bool] = False
    #: Encoding and decoding need a reference tensor of the same shape and dtype.
    needs_base: ClassVar[bool] = False
    #: A chunk whose coded form is longer than its raw bytes is stored raw.
    raw_fallback: ClassVar[bool] = False
    #: `remark` looks at no more statistics than these, evenly spaced.
    remark_nelem: ClassVar[int] = 1 << 12
    #: What sums lose besides the codec's error, as traces say it; "" if nothing.
    caution: ClassVar[str] = ""
    #: What ruins tensors of which most elements are not zero, and what to do instead, as errors say
    #: it; "" if nothing.
    ruins_dense: ClassVar[str] = ""
    #: Bytes of a unit in which a device backend's decoder weighs the first used range.
    weighed_unit: ClassVar[int] = 4
    #: A device backend's decoder weighs all of a static part, and the frame nothing.
    weighs_gaps: ClassVar[bool] = False
    #: Numbers of the used ranges that a device backend's decoder does not weigh.
    weighed_by_frame: ClassVar[tuple[int, ...]] = ()

    def __post_init__(self) -> None:
        """Raise TypeError or ValueError for a parameter that is not allowed."""
        for name, param in declared(type(self)).items():
            object.__setattr__(self, name, param.checked(name, getattr(self, name)))

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

    def arrays(self, dtype: DType, nelem: int) -> tuple[Array, ...]:
        """The arrays in the static sections of a chunk: "Layout" of the codec's page.

        Args:
            dtype: Element type.
            nelem: Number of the chunk's own elements.

        Returns:
            The arrays, those of a section one behind the other.

        Raises:
            NotImplementedError: In this base class.
        """
        raise NotImplementedError

    def layout(self, dtype: DType, nelem: int) -> Layout:
        """The sections of a chunk, which depend on nothing else than the arguments.

        Args:
            dtype: Element type.
            nelem: Number of elements of a whole chunk.

        Returns:
            The sections, by default those of ``arrays`` and no dynamic one.
        """
        return Layout(sections_of(self.arrays(dtype, nelem)))

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
        """
        return used_of(self.arrays(dtype, nelem), sections)

    def static_arrays(self, chunk: Chunk) -> tuple[Bytes, ...]:
        """The bytes of each of ``arrays`` in a chunk's static part, views of it.

        Args:
            chunk: The chunk.
        """
        places = _places(self, chunk.dtype, chunk.nelem, chunk.sections)
        return tuple(chunk.static[start:stop] for start, stop in places)

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
            The byte and the bits.
        """
        # Codes that are shorter than a byte have as many bits for every dtype.
        codes = self.arrays(BY_NAME[self.dtypes[0]], nelem)[0]
        at, used = divmod(codes.bits * codes.items, 8)
        return Tail(at, 0xFF & -(1 << used)) if used else Tail()

    def max_chunk_nelem(self, dtype: DType) -> int:
        """The most elements in one chunk.

        Args:
            dtype: Element type.
        """
        return self.max_nelem

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
        if dtype.name not in self.dtypes:
            return False
        static = sum(s.nbytes for s in self.layout(dtype, nelem).sections if not s.dynamic)
        return static < align(nelem * dtype.itemsize)

    def pack_params(self) -> bytes:
        """The parameters as they are in the header: a multiple of 8 bytes."""
        data = bytearray(params_nbytes(type(self)))
        for at, fixed in self.fixed_params.items():
            data[at] = fixed
        for name, param in declared(type(self)).items():
            stored = param.number(getattr(self, name)).to_bytes(param.nbytes, "little")
            data[param.at : param.at + param.nbytes] = stored
        return bytes(data)

    @classmethod
    def unpack_params(cls, data: bytes) -> Self:
        """The inverse of ``pack_params``.

        Args:
            data: The bytes of the header.

        Returns:
            The codec.

        Raises:
            FormatError: With the reason ``"bad_header"`` if the bytes are not valid parameters.
        """
        nbytes = params_nbytes(cls)
        if len(data) != nbytes:
            found = f"{cls.name} has {nbytes} parameter bytes, found {len(data)}"
            raise FormatError("bad_header", found)
        try:
            spec = cls(
                **{
                    name: p.value(int.from_bytes(data[p.at : p.at + p.nbytes], "little"))
                    for name, p in declared(cls).items()
                }
            )
        except ValueError:
            spec = None
        if spec is None or spec.pack_params() != data:
            raise FormatError("bad_header", f"{cls.name} parameters {data.hex()}")
        return spec

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
    def sums_in_network(self) -> bool:
        """Whether payload elements of ranks add up that agreed on the largest statistics."""
        return self.homomorphic and self.reduce_op == "max"

    @property
    def scale_bytes(self) -> ScaleBytes | None:
        """What the statistics say of magnitudes where they are scale bytes that sums may widen.

        None in all other codecs.
        """
        return None

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

    @property
    def needs_base(self) -> bool:
        """Whether encoding and decoding need a reference tensor; never of what is stored raw."""
        return self.codec.needs_base

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
    def places(self) -> dict[int, Any]:
        """What the core has derived about the first chunks, by number, empty at first."""
        return {}

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
    def head_bytes(self) -> Bytes:
        """What is before the first chunk, with zeros in place of records: uint8, read-only."""
        head = np.zeros(self.static_offset, np.uint8)
        head[: self.header.nbytes] = self.header_bytes
        head.flags.writeable = False
        return head

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

        The codecs may differ as far as ``CodecSpec.fuses`` allows, and the sizes of dynamic slots,
        which a packed buffer does not have. Nothing else may.

        Args:
            source: The plan of that buffer.
        """
        if source == self:
            return True
        if not self.codec.fuses(source.codec):
            return False
        stride = self.dynamic_stride
        return self == replace(source, codec=self.codec, layout=self.layout, dynamic_stride=stride)

    def identity_term(self, i: int) -> int:
        """Checksum contribution of what is planned about a chunk.

        Args:
            i: Number of the chunk.
        """
        lo, hi = self.chunk_range(i)
        return checksum_identity(self.codec.id, self.codec.version, self.dtype.id, hi - lo)
