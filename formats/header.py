"""The planned header and the per-chunk result records (specs/buffer.md)."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .codec_ids import NAMES_BY_ID
from .dtypes import BY_ID, DType
from .errors import FormatError, integer

MAGIC = b"\x9eTWB"
MAJOR, MINOR = 1, 0
ALIGN = 128
MAX_HEADER = 1 << 20
MAX_RANK = 32
MAX_CHUNKS = 1 << 16
MAX_NBYTES = (1 << 63) - 1
#: What bytes of unknown origin may ask for where the caller does not say.
DEFAULT_MAX_NBYTES = 64 << 30

#: Required feature bits. A reader refuses a buffer with a required bit that it does not know.
CHECKSUM = 1
ASSEMBLED = 2
KNOWN_FEATURES = CHECKSUM | ASSEMBLED

#: Record flags.
RAW = 1
OVERFLOW = 2

_FIXED = struct.Struct("<4sBBHIBBBBHHIII")
_SECTION = struct.Struct("<BBHI")
_CRC_AT = 28

#: One result record per chunk, written by whoever encodes the chunk.
RECORD = np.dtype(
    [
        ("checksum", "<u8"),
        ("dynamic_nbytes", "<u8"),
        ("flags", "<u4"),
        ("ordinal", "<u4"),
        ("info", "<u8"),
    ]
)


def align(nbytes: int) -> int:
    """`nbytes` rounded up to the format's alignment of 128."""
    return -(-nbytes // ALIGN) * ALIGN


@dataclass(frozen=True)
class Section:
    """An entry of the section table: one part of every chunk (specs/buffer.md, "Sections").

    Attributes:
        kind: Number of the kind of contents.
        nbytes: Size in bytes, a multiple of 128; the bound of the size if ``dynamic``.
        dynamic: Whether the size depends on the data.
    """

    kind: int
    nbytes: int
    dynamic: bool = False

    @property
    def name(self) -> str:
        """The name that the spec pages use for this kind."""
        return SECTION_NAMES[self.kind]


#: Section kinds. A kind once published keeps its meaning.
SECTION_NAMES = {
    1: "payload",
    2: "tiles",
    3: "index",
    4: "scales",
    64: "escapes",
    65: "tail",
    67: "changes",
}
SECTION_KINDS = {name: kind for kind, name in SECTION_NAMES.items()}


class Peek(NamedTuple):
    """What the first bytes of a buffer say about its size, as ``Header.peek`` returns it.

    Attributes:
        nbytes: Size of the whole buffer, or None if more bytes are needed to know it.
        needed: How many bytes of the buffer to read before asking again.
    """

    #: Size of the whole buffer in bytes, None while more of it has to be seen.
    nbytes: int | None
    #: How many first bytes say more; never more than the buffer has.
    needed: int


@dataclass(frozen=True)
class Header:
    """The planned header of a buffer (specs/buffer.md, "Header").

    Attributes:
        codec: Name of the codec.
        codec_id: Its number in the format.
        codec_version: Version of its layout.
        dtype: Element type of the tensor.
        shape: Shape of the tensor.
        chunks: Number of chunks.
        sections: The section table, the same for every chunk.
        params: Packed parameters of the codec; the page of the codec has their layout.
        dynamic_stride: Bytes of each chunk's dynamic slot.
        required: Feature bits that a reader must know.
        optional: Feature bits that a reader may ignore.
        minor: Minor version of the format.
    """

    codec: str
    codec_id: int
    codec_version: int
    dtype: DType
    shape: tuple[int, ...]
    chunks: int
    sections: tuple[Section, ...]
    params: bytes
    dynamic_stride: int = 0
    required: int = CHECKSUM
    optional: int = 0
    minor: int = MINOR

    @property
    def nelem(self) -> int:
        """Number of elements of the tensor."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the header itself; the result records start there."""
        return _FIXED.size + 8 * (len(self.shape) + len(self.sections)) + len(self.params)

    @staticmethod
    def peek(data: Any, *, max_nbytes: int = DEFAULT_MAX_NBYTES) -> Peek:
        """Find how long the buffer is that starts with these bytes.

        As long as ``nbytes`` of the result is None, read up to ``needed`` bytes and ask again;
        after four times at most the size is known. Only the header is checked: ``nbytes`` is what
        header and records claim, and ``decode`` checks the rest. ``tightwire.read_buffers`` reads a
        stream this way.

        Args:
            data: The first bytes, bytes-like; may be empty.
            max_nbytes: Most bytes that the buffer may have.

        Returns:
            The size, or how many bytes are needed to know it.

        Raises:
            FormatError: If ``data`` is not the start of a buffer; with the reason
                ``"limit_exceeded"`` if the buffer, or what is needed, is larger than
                ``max_nbytes``.
        """
        limit = integer("max_nbytes", max_nbytes, least=0)
        view = memoryview(data).cast("B")
        found = _peek(view)
        if max(found.needed, found.nbytes or 0) > limit:
            claimed = found.needed if found.nbytes is None else found.nbytes
            raise FormatError("limit_exceeded", f"{claimed} bytes, max_nbytes is {limit}")
        return found

    def pack(self) -> bytes:
        """The bytes of the header, with their CRC32C."""
        fixed = _FIXED.pack(
            MAGIC,
            MAJOR,
            self.minor,
            self.codec_id,
            self.nbytes,
            self.codec_version,
            self.dtype.id,
            len(self.shape),
            len(self.sections),
            self.required,
            self.optional,
            self.chunks,
            self.dynamic_stride // ALIGN,
            0,
        )
        table = b"".join(
            _SECTION.pack(s.kind, s.dynamic, 0, s.nbytes // ALIGN) for s in self.sections
        )
        data = fixed + struct.pack(f"<{len(self.shape)}Q", *self.shape) + table + self.params
        return data[:_CRC_AT] + header_crc(data).to_bytes(4, "little") + data[_CRC_AT + 4 :]


def header_crc(data: bytes) -> int:
    """CRC32C of a header's bytes without its CRC field."""
    # Imported at first use: importing the library needs NumPy alone.
    import google_crc32c

    return int(google_crc32c.extend(google_crc32c.value(data[:_CRC_AT]), data[_CRC_AT + 4 :]))


def _peek(src: memoryview) -> Peek:
    """`Header.peek` without a limit."""
    if len(src) < _FIXED.size:
        start = bytes(src[:4])
        if not MAGIC.startswith(start):
            raise FormatError("bad_magic", f"starts with {start!r}, not {MAGIC!r}")
        return Peek(None, _FIXED.size)
    header_nbytes = _fixed_fields(src)[4]
    if len(src) < header_nbytes:
        return Peek(None, header_nbytes)
    header = parse_header(src)
    records_end = header_nbytes + RECORD.itemsize * header.chunks
    static = sum(s.nbytes for s in header.sections if not s.dynamic)
    dynamic_at = align(records_end) + header.chunks * static
    if header.dynamic_stride:
        return Peek(dynamic_at + header.chunks * header.dynamic_stride, header_nbytes)
    if len(src) < records_end:
        return Peek(None, records_end)
    records = np.frombuffer(src[header_nbytes:records_end], RECORD)
    sizes: list[int] = records["dynamic_nbytes"].tolist()
    return Peek(dynamic_at + sum(map(align, sizes)), records_end)


def _hint(src: memoryview) -> str:
    """What to do with bytes that start as a safetensors file does: length of the JSON, then it."""
    if bytes(src[8:9]) == b"{" and int.from_bytes(bytes(src[:8]), "little") < 1 << 32:
        return ". This looks like a file or a message of dumps: load_file or loads reads it"
    return ""


def _fixed_fields(src: memoryview) -> tuple[Any, ...]:
    """The fields of fixed size, checked as far as they say where the header ends."""
    if len(src) < 4:
        raise FormatError("truncated", f"{len(src)} bytes, a header has at least {_FIXED.size}")
    if bytes(src[:4]) != MAGIC:
        raise FormatError("bad_magic", f"starts with {bytes(src[:4])!r}, not {MAGIC!r}{_hint(src)}")
    if len(src) < _FIXED.size:
        raise FormatError("truncated", f"{len(src)} bytes, a header has at least {_FIXED.size}")
    fields = _FIXED.unpack(src[: _FIXED.size])
    major, minor, header_nbytes = fields[1], fields[2], fields[4]
    if major != MAJOR:
        raise FormatError("unsupported_version", f"format {major}.{minor}, this reads {MAJOR}.x")
    if header_nbytes > MAX_HEADER:
        raise FormatError("header_too_large", f"{header_nbytes} bytes, at most {MAX_HEADER}")
    if header_nbytes < _FIXED.size or header_nbytes % 8:
        raise FormatError("bad_header", f"header of {header_nbytes} bytes")
    return fields


def parse_header(src: memoryview) -> Header:
    """Read and check the header at the start of `src` (uint8); codec parameters stay bytes.

    The order of the checks is that of specs/buffer.md, "Reading". Raises FormatError.
    """
    (
        _,
        _,
        minor,
        codec_id,
        header_nbytes,
        codec_version,
        dtype_id,
        ndim,
        n_sections,
        required,
        optional,
        chunks,
        stride_blocks,
        crc,
    ) = _fixed_fields(src)
    if len(src) < header_nbytes:
        raise FormatError("truncated", f"{len(src)} bytes, the header has {header_nbytes}")
    data = bytes(src[:header_nbytes])
    if header_crc(data) != crc:
        raise FormatError("checksum_mismatch", "the header's CRC32C does not match")
    if required & ~KNOWN_FEATURES:
        raise FormatError("unknown_feature", f"required bits {required & ~KNOWN_FEATURES:#x}")
    if codec_id not in NAMES_BY_ID:
        raise FormatError("unknown_codec", f"codec id {codec_id}")
    if dtype_id not in BY_ID:
        raise FormatError("bad_header", f"dtype id {dtype_id}")
    if ndim > MAX_RANK:
        raise FormatError("bad_header", f"{ndim} dimensions, at most {MAX_RANK}")
    if not 1 <= chunks <= MAX_CHUNKS:
        raise FormatError("bad_header", f"{chunks} chunks, from 1 to {MAX_CHUNKS}")
    table_at = _FIXED.size + 8 * ndim
    params_at = table_at + 8 * n_sections
    if params_at > header_nbytes:
        raise FormatError(
            "bad_header",
            f"{header_nbytes} bytes are too few for {ndim} dimensions, {n_sections} sections",
        )
    shape = struct.unpack(f"<{ndim}Q", data[_FIXED.size : table_at])
    dtype = BY_ID[dtype_id]
    if math.prod(d for d in shape if d) * dtype.itemsize > MAX_NBYTES:
        raise FormatError("limit_exceeded", f"shape {shape} has more than 2**63 - 1 bytes")
    sections = []
    for at in range(table_at, params_at, 8):
        kind, dynamic, reserved, blocks = _SECTION.unpack(data[at : at + 8])
        if dynamic > 1 or reserved or kind not in SECTION_NAMES:
            raise FormatError("bad_header", f"section entry {data[at : at + 8].hex()}")
        sections.append(Section(kind, blocks * ALIGN, bool(dynamic)))
    return Header(
        codec=NAMES_BY_ID[codec_id],
        codec_id=codec_id,
        codec_version=codec_version,
        dtype=dtype,
        shape=shape,
        chunks=chunks,
        sections=tuple(sections),
        params=data[params_at:],
        dynamic_stride=stride_blocks * ALIGN,
        required=required,
        optional=optional,
        minor=minor,
    )
