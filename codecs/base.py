"""What a codec is to the library: a frozen value that plans, and modules that encode and decode.

A codec module `codecs/x.py` defines one subclass of `CodecSpec` and its NumPy reference; fast
backends live in `x_cpu.py` and `x_triton.py`. Everything here works on flat arrays of element bits
and on byte arrays: array libraries, headers and checks of the whole buffer are the core's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from ..formats.checksum import identity_term as checksum_identity
from ..formats.dtypes import DType
from ..formats.header import CHECKSUM, RECORD, Header, Section, align

Bits = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
ReduceOp = Literal["sum", "max", "or"]


class Key(NamedTuple):
    """Seed of counter-based randomness: the same key gives the same bytes on every backend.

    Values are integers, or one-element device arrays so that a captured graph draws afresh.
    """

    seed: Any
    step: Any = 0
    rank: int = 0
    world: int = 1


class Layout(NamedTuple):
    """Sections of one chunk. `dynamic_bound` is the most dynamic bytes that its data can need."""

    sections: tuple[Section, ...]
    dynamic_bound: int = 0


class Chunk(NamedTuple):
    """Where one chunk lies: its elements' type and number, its planned sections and its bytes.

    `dynamic` is the whole slot when encoding and exactly the used bytes when decoding. `number`
    counts chunks, `first` is its first flat element in the tensor of `shape`: what randomness by
    element, statistics per chunk and formats along a row go by. `info` is the record's field.
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
    """What encoding one chunk found out.

    `dynamic_nbytes` may exceed the room given: then the dynamic part is incomplete. `words_sum` is
    the keyed sum over static and dynamic part if the backend had it at hand, else None.
    """

    dynamic_nbytes: int
    words_sum: int | None = None
    info: int = 0


class ChunkDecoded(NamedTuple):
    """`problem` says what is wrong with the payload, None if nothing is; `words_sum` as above."""

    problem: str | None = None
    words_sum: int | None = None


def check_choice(name: str, value: object, allowed: tuple[str | int, ...]) -> None:
    """Raise TypeError if the parameter is of another type than those allowed, ValueError if it is
    none of them.
    """
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
    """Base of all codecs. Subclasses are frozen dataclasses whose fields are the parameters."""

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
    #: Encoding measures nothing where it is given no statistics.
    needs_stats: ClassVar[bool] = True
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
        """The codec that plans tensors of `shape`: itself, unless a parameter comes from there."""
        return self

    def layout(self, dtype: DType, nelem: int) -> Layout:
        """Sections of a chunk of `nelem` elements; depends on nothing else."""
        raise NotImplementedError

    def max_chunk_nelem(self, dtype: DType) -> int:
        """Most elements in one chunk."""
        return (1 << 63) - 1

    def accepts(self, dtype: DType, nelem: int) -> bool:
        """False where a chunk of `nelem` elements is better stored by the raw codec."""
        return dtype.name in self.dtypes

    def pack_params(self) -> bytes:
        """Parameters for the header, a multiple of 8 bytes."""
        return b""

    @classmethod
    def unpack_params(cls, data: bytes) -> CodecSpec:
        """The codec that `pack_params` described; FormatError("bad_header") if it is none."""
        raise NotImplementedError

    def measure(self, bits: Bits, dtype: DType) -> npt.NDArray[Any] | None:
        """Statistics that encode() takes as `stats`, or None if the codec needs none."""
        return None

    def scratch_nbytes(self, dtype: DType, nelem: int, chunks: int) -> int:
        """Workspace of a device backend for `chunks` chunks of `nelem` elements."""
        return 0

    def fuses(self, source: CodecSpec) -> bool:
        """Whether `decode_add_encode` may take a buffer of `source` in one pass."""
        return source == self

    def cell_dtype(self, dtype: DType) -> DType:
        """Of a homomorphic codec: the dtype in which payload sections of `dtype` add up."""
        raise NotImplementedError

    def check_sum(self, cells: Bits) -> None:
        """Raise ValueError if the cells of a chunk, summed, are of more ranks than they hold."""

    def check_stats(self, stats: npt.NDArray[Any], dtype: DType) -> None:
        """Raise ValueError for `stats` that encode() cannot use."""
        raise ValueError(f"{self.name} takes no stats")

    @property
    def max_ranks(self) -> int | None:
        """Of a homomorphic codec: the most ranks whose cells add up, None if any number do."""
        return None

    @property
    def stats_nelem(self) -> int | None:
        """Elements in a row that each of the statistics is of; None if they are of the tensor."""
        return None

    def remark(self, stats: npt.NDArray[Any]) -> str | None:
        """What a collective's trace should say of `stats` that ranks agreed on, if anything."""
        return None


@dataclass(frozen=True)
class Plan:
    """Every size and offset of a buffer, known before any data is seen. Sizes are in bytes.

    `dynamic_stride` is the room of one chunk's dynamic slot. A buffer is header, result records
    (32 bytes per chunk), `chunks` static parts of `static_stride` bytes, `chunks` dynamic slots.
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
        """Elements of the tensor."""
        return math.prod(self.shape)

    @cached_property
    def chunk_nelem(self) -> int:
        """Elements of a whole chunk; the last chunks may have fewer, or none."""
        return -(-self.nelem // self.chunks)

    def chunk_range(self, i: int) -> tuple[int, int]:
        """First and past-the-last flat element of chunk `i`."""
        start = min(i * self.chunk_nelem, self.nelem)
        return start, min(start + self.chunk_nelem, self.nelem)

    @cached_property
    def filled_chunks(self) -> int:
        """Chunks that have elements; those behind them have none."""
        return -(-self.nelem // self.chunk_nelem) if self.nelem else 0

    def raw_dynamic(self, i: int) -> int:
        """Dynamic bytes of chunk `i` if it is stored raw: what its static part cannot hold."""
        lo, hi = self.chunk_range(i)
        return max(0, (hi - lo) * self.dtype.itemsize - self.static_stride)

    def static_range(self, i: int) -> slice:
        """Where in the buffer the static part of chunk `i` lies."""
        start = self.static_offset + i * self.static_stride
        return slice(start, start + self.static_stride)

    def chunk(self, i: int, data: Bytes, dynamic: Bytes, info: int = 0) -> Chunk:
        """Chunk `i` of the buffer `data`, with the given dynamic part."""
        lo, hi = self.chunk_range(i)
        static = data[self.static_range(i)]
        return Chunk(
            self.dtype, hi - lo, self.layout.sections, static, dynamic, i, lo, self.shape, info
        )

    @cached_property
    def header(self) -> Header:
        """The planned header, for dynamic slots of `dynamic_stride` bytes."""
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
        """Where the first chunk's static part starts."""
        return align(self.header.nbytes + RECORD.itemsize * self.chunks)

    @cached_property
    def static_stride(self) -> int:
        """Bytes of one chunk's static part: the same for all chunks."""
        return sum(s.nbytes for s in self.layout.sections if not s.dynamic)

    @cached_property
    def dynamic_offset(self) -> int:
        """Where the dynamic slots start."""
        return self.static_offset + self.chunks * self.static_stride

    @cached_property
    def nbytes(self) -> int:
        """Bytes to allocate; no encoded buffer of this plan is longer."""
        return self.dynamic_offset + self.chunks * self.dynamic_stride

    @cached_property
    def scratch_nbytes(self) -> int:
        """Workspace of a device backend for one call of encode or decode."""
        return self.codec.scratch_nbytes(self.dtype, self.chunk_nelem, self.chunks)

    def fuses(self, source: Plan) -> bool:
        """Whether a buffer of `source` may be decoded, added to and encoded by this plan at once.

        Their codecs may differ as far as `CodecSpec.fuses` allows, and nothing else.
        """
        if source == self:
            return True
        alike = self.codec.fuses(source.codec)
        return alike and replace(source, codec=self.codec, layout=self.layout) == self

    def identity_term(self, i: int) -> int:
        """Checksum contribution of what is planned about chunk `i`."""
        lo, hi = self.chunk_range(i)
        return checksum_identity(self.codec.id, self.codec.version, self.dtype.id, hi - lo)
