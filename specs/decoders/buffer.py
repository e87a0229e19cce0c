"""buffer.md: header, records, checksum, and the order of the checks."""

import importlib
import struct
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from . import raw
from .common import DTYPES, Header, Section, align, ceil_div, check, u16, u32

# buffer.md, "Header"

CHECKSUM, ASSEMBLED = 1, 2
KINDS = {1: "payload", 2: "tiles", 3: "index", 4: "scales"}
KINDS |= {64: "escapes", 65: "tail", 67: "changes"}


def codec_modules() -> dict[int, ModuleType]:
    """The modules of this folder that have an ID, by it."""
    stems = [path.stem for path in Path(__file__).parent.glob("[!_]*.py")]
    modules = [importlib.import_module(f".{stem}", __package__) for stem in stems]
    return {module.ID: module for module in modules if hasattr(module, "ID")}


CODECS = codec_modules()


def crc_entry(n: int) -> int:
    """What one byte does to a CRC32C."""
    for _ in range(8):
        n = n >> 1 ^ (0x82F63B78 if n & 1 else 0)
    return n


CRC_TABLE = [crc_entry(n) for n in range(256)]


def crc32c(data: bytes) -> int:
    """CRC32C (Castagnoli)."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ CRC_TABLE[(crc ^ byte) & 255]
    return crc ^ 0xFFFFFFFF


# buffer.md, "Result records" and "Raw fallback"

RAW, OVERFLOW = 1, 2


class Record(NamedTuple):
    """The result record of a chunk."""

    checksum: int
    dynamic: int
    flags: int
    ordinal: int
    info: int


def raw_dynamic(header: Header, nelem: int) -> int:
    """Dynamic bytes of a chunk of this many elements stored raw."""
    return max(0, nelem * header.dtype.nbytes - header.static_stride)


# buffer.md, "Checksum"


def weighted_sum(data: bytes, first: int) -> int:
    """Sum of the words, the first of which has number `first`, each times its k."""
    words = struct.unpack(f"<{ceil_div(len(data), 4)}I", data + bytes(-len(data) % 4))
    return sum(
        ((0x3C6EF372 * i + 1) & 0xFFFFFFFF) * word for i, word in enumerate(words, first) if word
    )


def chunk_checksum(h: Header, nelem: int, record: Record, static: bytes, dynamic: bytes) -> int:
    """The checksum that the record of a chunk must give."""
    identity = h.codec + (h.version << 16) + (h.dtype_id << 24)
    total = weighted_sum(static, 0) + weighted_sum(dynamic, h.static_stride // 4)
    total += 0xA0761D6478BD642F
    total += 0xD6E8FEB86659FD93 * identity
    total += 0x9E3779B97F4A7C15 * nelem
    total += 0xC2B2AE3D27D4EB4F * record.dynamic
    total += 0x165667B19E3779F9 * (record.flags + (record.ordinal << 32))
    total += 0xE7037ED1A0B428DB * record.info
    return total & 0xFFFFFFFFFFFFFFFF


# buffer.md, "Reading"


def read_header(data: bytes, max_nbytes: int) -> Header:
    """Steps 1 to 10."""
    check(len(data) >= 4, "truncated", "no magic")  # 1
    check(data[:4] == b"\x9eTWB", "bad_magic", f"the bytes start with {data[:4].hex(' ')}")
    check(len(data) >= 32, "truncated", "no header")

    check(data[4] == 1, "unsupported_version", f"format {data[4]}.{data[5]}")  # 2

    nbytes = u32(data, 8)  # 3
    check(nbytes <= 2**20, "header_too_large", f"{nbytes} bytes")
    check(nbytes >= 32 and nbytes % 8 == 0, "bad_header", f"{nbytes} bytes of header")
    check(len(data) >= nbytes, "truncated", "the header ends early")

    crc = crc32c(data[:28] + data[32:nbytes])  # 4
    check(crc == u32(data, 28), "checksum_mismatch", f"CRC32C of the header is {crc:08x}")

    required = u16(data, 16)  # 5
    check(required & ~(CHECKSUM | ASSEMBLED) == 0, "unknown_feature", f"bits {required:#x}")
    codec = u16(data, 6)
    check(codec in CODECS, "unknown_codec", f"codec {codec}")

    version, dtype_id, ndim, nsections = data[12:16]  # 6
    chunks, stride = u32(data, 20), 128 * u32(data, 24)
    check(dtype_id in DTYPES, "bad_header", f"unknown dtype {dtype_id}")
    check(ndim <= 32, "bad_header", f"{ndim} dimensions")
    check(1 <= chunks <= 65536, "bad_header", f"{chunks} chunks")
    params_at = 32 + 8 * ndim + 8 * nsections
    check(params_at <= nbytes, "bad_header", "no room for shape and section table")

    dtype = DTYPES[dtype_id]  # 7
    shape = struct.unpack_from(f"<{ndim}Q", data, 32)
    nonzero, nelem = dtype.nbytes, 1
    for dim in shape:
        nonzero *= dim or 1
        nelem *= dim
    check(nonzero < 2**63, "limit_exceeded", f"shape {shape}")

    table = []  # 8
    for i in range(nsections):
        kind, dynamic, zero, size = struct.unpack_from("<BBHI", data, 32 + 8 * ndim + 8 * i)
        check(kind in KINDS, "bad_header", f"unknown section kind {kind}")
        check(dynamic <= 1, "bad_header", f"dynamic byte {dynamic}")
        check(zero == 0, "bad_header", "nonzero reserved field in the section table")
        table.append(Section(kind, dynamic, size))

    check(version == 1, "unsupported_version", f"version {version} of codec {codec}")  # 9
    chunk_nelem = ceil_div(nelem, chunks)
    reader = CODECS[codec]
    params = reader.parameters(data[params_at:nbytes], dtype)
    expected = reader.sections(params, dtype, chunk_nelem)
    check(table == expected, "bad_header", "section table")
    slot = 128 * sum(s.size for s in table if s.dynamic)
    check(stride <= slot, "bad_header", f"slots of {stride} bytes, at most {slot}")

    h = Header(  # 10
        nbytes, codec, version, dtype_id, required, chunks, stride, shape, nelem, table, params
    )
    check(nelem * dtype.nbytes <= max_nbytes, "limit_exceeded", f"{nelem * dtype.nbytes} bytes")
    check(len(data) >= h.static_end, "truncated", "records or static parts end early")
    return h


def read_records(data: bytes, h: Header) -> list[Record]:
    """Steps 11 to 14."""
    places = range(h.nbytes, h.nbytes + 32 * h.chunks, 32)
    records = [Record(*struct.unpack_from("<QQIIQ", data, place)) for place in places]

    for r in records:  # 11
        check(r.flags & ~(RAW | OVERFLOW) == 0, "bad_record", f"flags {r.flags:#x}")
    for r in records:
        check(not r.flags & OVERFLOW, "dynamic_overflow", f"{r.dynamic} bytes needed")
    for i, r in enumerate(records):
        check(bool(h.features & CHECKSUM) or r.checksum == 0, "bad_record", "a checksum")
        check(r.info == 0, "bad_record", f"info {r.info}")
        check(bool(h.features & ASSEMBLED) or r.ordinal == i, "bad_record", f"ordinal {r.ordinal}")

    for i, r in enumerate(records):  # 12
        stored_raw = r.flags & RAW
        bound = raw_dynamic(h, h.share(i)) if h.has_fallback else 0
        check(not stored_raw or h.has_fallback, "bad_record", "raw flag without fallback")
        check(r.dynamic <= bound, "bad_record", f"{r.dynamic} dynamic bytes, at most {bound}")
        check(not stored_raw or r.dynamic == bound, "bad_record", "dynamic bytes of a raw chunk")
        check(not h.stride or r.dynamic <= h.stride, "bad_record", "more than the slot")

    slots = [h.stride or align(r.dynamic) for r in records]  # 13
    end = h.static_end + sum(slots)
    check(len(data) >= end, "truncated", "dynamic parts end early")
    check(len(data) == end, "trailing_bytes", f"{len(data) - end} bytes")

    padding = data[h.nbytes + 32 * h.chunks : h.records_end]  # 14
    check(not any(padding), "reserved_not_zero", "behind the records")
    return records


def static_padding(static: bytes, used: list[tuple[int, int]]) -> bytes:
    """The bytes of a static part that are not in use."""
    ends, starts = [0, *(end for _, end in used)], [*(at for at, _ in used), len(static)]
    return b"".join(static[lo:hi] for lo, hi in zip(ends, starts, strict=True))


def decode(
    data: bytes, max_nbytes: int = 64 << 30, base: bytes | None = None
) -> tuple[str, tuple[int, ...], bytes]:
    """Decode a buffer to its dtype's name, its shape and the tensor's bytes in C order.

    `base` is the bytes of the base, for codecs that need one.
    """
    h = read_header(data, max_nbytes)
    records = read_records(data, h)
    out, place, first = bytearray(), h.static_end, 0
    later = []
    for i, r in enumerate(records):  # 15
        nelem = h.share(i)
        start = h.records_end + i * h.static_stride
        static = data[start : start + h.static_stride]
        dynamic = data[place : place + r.dynamic]
        place += h.stride or align(r.dynamic)

        if h.features & CHECKSUM:
            expected = chunk_checksum(h, nelem, r, static, dynamic)
            check(r.checksum == expected, "checksum_mismatch", f"chunk {i}")
        reader = raw if r.flags & RAW else CODECS[h.codec]
        padding = static_padding(static, reader.used(h, nelem))
        check(not any(padding), "reserved_not_zero", f"static part of chunk {i}")
        if not h.stride:
            padding = data[place - align(r.dynamic) + r.dynamic : place]
            check(not any(padding), "reserved_not_zero", f"behind dynamic part of chunk {i}")

        if not hasattr(CODECS[h.codec], "NEEDS_BASE"):
            out += reader.decode(h, nelem, static, dynamic)
            continue
        if base is None:
            raise ValueError("this buffer needs a base")
        share = base[first * h.dtype.nbytes : (first + nelem) * h.dtype.nbytes]
        first += nelem
        given = (share,) if reader is not raw else ()
        if given:
            reader.check_base(h, static, *given)
        later.append((reader, (h, nelem, static, dynamic, *given)))
    for reader, arguments in later:
        out += reader.decode(*arguments)
    return h.dtype.name, h.shape, bytes(out)
