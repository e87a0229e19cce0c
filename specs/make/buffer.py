"""buffer.md: invalid buffers of codecs raw and zipccl, for what is the same for all codecs."""

from __future__ import annotations

import struct
from dataclasses import replace

import numpy as np

from tightwire.codecs import zipccl
from tightwire.codecs.common.base import Chunk
from tightwire.formats.header import ALIGN, ASSEMBLED, CHECKSUM, OVERFLOW, RAW, Section, header_crc

from . import common, data
from .raw import raw_parts, spare_chunks
from .zipccl import random_chunks, slotted, zipccl_parts


def repaired(data: bytes) -> bytes:
    """`data` with the CRC32C of its header made right; H must be within it."""
    header = data[: int.from_bytes(data[8:12], "little")]
    return common.poked(data, 28, struct.pack("<I", header_crc(header)))


def assembled() -> bytes:
    """As `raw_parts`, put together from chunks with other numbers."""
    parts = raw_parts()
    parts.records["ordinal"] = [1, 0]
    return common.changed(parts, required=CHECKSUM | ASSEMBLED)


def unsummed() -> common.Parts:
    """As `zipccl_parts`, without checksums."""
    return common.Parts.of(
        common.encoded(data.bell(61, "bfloat16", 2500), "zipccl", chunks=2, checksum=False)
    )


def header_vectors() -> common.Invalid:
    """Steps 1 to 9 of "Reading", as far as they are the same for all codecs."""
    raw = raw_parts().join()
    sections = raw_parts().header.sections
    h = struct.Struct("<I").pack
    return {
        "empty": (b"", "truncated"),
        "magic_cut": (raw[:3], "truncated"),
        "magic": (common.poked(raw, 0, b"\x9eTWC"), "bad_magic"),
        "magic_short": (b"\x9fTWB", "bad_magic"),
        "fixed_header_cut": (raw[:31], "truncated"),
        "chunks_65537": (repaired(common.poked(raw, 20, h(65537))), "bad_header"),
        "major_0": (repaired(common.poked(raw, 4, b"\0")), "unsupported_version"),
        "major_2": (repaired(common.poked(raw, 4, b"\2")), "unsupported_version"),
        "header_nbytes_too_large": (common.poked(raw, 8, h((1 << 20) + 8)), "header_too_large"),
        "header_nbytes_24": (repaired(common.poked(raw, 8, h(24))), "bad_header"),
        "header_nbytes_52": (repaired(common.poked(raw, 8, h(52))), "bad_header"),
        "header_cut": (raw[:40], "truncated"),
        "header_crc": (common.poked(raw, 18, b"\1"), "checksum_mismatch"),
        "header_crc_of_table": (common.poked(raw, 40, b"\2"), "checksum_mismatch"),
        "required_bit_4": (common.changed(raw_parts(), required=CHECKSUM | 4), "unknown_feature"),
        "required_bit_32768": (
            common.changed(raw_parts(), required=CHECKSUM | 32768),
            "unknown_feature",
        ),
        "codec_0": (common.changed(raw_parts(), codec_id=0), "unknown_codec"),
        "codec_65535": (common.changed(raw_parts(), codec_id=65535), "unknown_codec"),
        "dtype_0": (repaired(common.poked(raw, 13, b"\0")), "bad_header"),
        "dtype_10": (repaired(common.poked(raw, 13, b"\x0a")), "bad_header"),
        "ndim_33": (common.changed(raw_parts(), shape=(200, *(1,) * 32)), "bad_header"),
        "chunks_0": (repaired(common.poked(raw, 20, h(0))), "bad_header"),
        "no_room_for_shape": (repaired(common.poked(raw, 14, b"\x20")), "bad_header"),
        "no_room_for_table": (repaired(common.poked(raw, 15, b"\2")), "bad_header"),
        "size_2_63": (common.changed(raw_parts(), shape=(1 << 31, 1 << 32)), "limit_exceeded"),
        "size_2_64": (common.changed(raw_parts(), shape=(1 << 32, 1 << 32)), "limit_exceeded"),
        "size_2_63_beside_0": (
            common.changed(
                raw_parts(), shape=(0, 1 << 62, 2), sections=(replace(sections[0], nbytes=0),)
            ),
            "limit_exceeded",
        ),
        "section_kind_7": (repaired(common.poked(raw, 40, b"\7")), "bad_header"),
        "section_dynamic_2": (repaired(common.poked(raw, 41, b"\2")), "bad_header"),
        "section_reserved": (repaired(common.poked(raw, 43, b"\1")), "bad_header"),
    }


def own_bound(parts: common.Parts) -> None:
    """Store the last chunk coded, with as many escapes as only a whole chunk may have."""
    common.grow(parts, 2, 2)
    common.record(parts, 2, "flags", 0)


def too_many_escapes(parts: common.Parts) -> None:
    """Code the last chunk although it has more escapes than its bound, which is 580."""
    x = data.bell(69, "bfloat16", 1250)
    data.bits_of(x)[:600] = 1 << 7
    h = parts.header
    static, dynamic = np.zeros(1920, np.uint8), np.zeros(1250, np.uint8)
    chunk = Chunk(h.dtype, x.size, h.sections, static, dynamic)
    used = zipccl.encode_chunk(zipccl.Zipccl(), chunk, data.bits_of(x)).dynamic_nbytes
    parts.static[1], parts.dynamic[1] = bytearray(static), bytearray(dynamic[:used])


def record_vectors() -> common.Invalid:
    """Steps 10 to 14 of "Reading"."""
    raw = raw_parts().join()
    coded = zipccl_parts().join()
    x = data.bell(61, "bfloat16", 2500)
    fixed = slotted(common.encoded(x, "zipccl", chunks=2, dynamic_capacity=128))
    data.bits_of(x)[1250:] = data.random_bits(65, "uint16", (1250,))
    overflow = slotted(common.encoded(x, "zipccl", chunks=2, dynamic_capacity=128))

    def fixed_rate(parts: common.Parts) -> None:
        parts.header = replace(parts.header, dynamic_stride=128)
        common.grow(parts, 1, 129)

    return {
        "records_cut": (raw[:100], "truncated"),
        "static_cut": (raw[:-1], "truncated"),
        "flags_4": (
            common.edited(zipccl_parts, lambda p: common.record(p, 1, "flags", 4)),
            "bad_record",
        ),
        "overflow": (overflow, "dynamic_overflow"),
        "overflow_raw": (
            common.edited(raw_parts, lambda p: common.record(p, 0, "flags", OVERFLOW)),
            "dynamic_overflow",
        ),
        "checksum_where_none": (common.poked(unsummed().join(), 72 + 32, b"\1"), "bad_record"),
        "info": (
            common.edited(zipccl_parts, lambda p: common.record(p, 1, "info", 1 << 63)),
            "bad_record",
        ),
        "ordinal": (
            common.edited(zipccl_parts, lambda p: common.record(p, 1, "ordinal", 0)),
            "bad_record",
        ),
        "raw_flag_of_raw": (
            common.edited(raw_parts, lambda p: common.record(p, 0, "flags", RAW)),
            "bad_record",
        ),
        "dynamic_of_raw": (common.edited(raw_parts, lambda p: common.grow(p, 1, 1)), "bad_record"),
        "dynamic_above_bound": (common.edited(zipccl_parts, too_many_escapes), "bad_record"),
        "dynamic_2_64": (common.poked(coded, 72 + 8, b"\xff" * 8), "bad_record"),
        "dynamic_above_own_bound": (common.edited(random_chunks, own_bound), "bad_record"),
        "raw_chunk_too_short": (
            common.edited(random_chunks, lambda p: common.grow(p, 1, 1)),
            "bad_record",
        ),
        "raw_chunk_too_long": (
            common.edited(random_chunks, lambda p: common.grow(p, 2, 2)),
            "bad_record",
        ),
        "dynamic_above_slot": (common.edited(zipccl_parts, fixed_rate), "bad_record"),
        "dynamic_cut": (coded[:-1], "truncated"),
        "dynamic_missing": (coded[:-256], "truncated"),
        "slots_cut": (fixed[:-1], "truncated"),
        "trailing_byte": (coded + b"\0", "trailing_bytes"),
        "trailing_block": (raw + bytes(128), "trailing_bytes"),
        "trailing_slot": (fixed + bytes(128), "trailing_bytes"),
        "behind_records": (common.poked(raw, 112, b"\1"), "reserved_not_zero"),
        "before_static": (common.poked(coded, 255, b"\x80"), "reserved_not_zero"),
    }


def payload_vectors() -> common.Invalid:
    """Step 15 of "Reading", as far as it is the same for all codecs."""
    raw, coded = raw_parts().join(), zipccl_parts().join()
    dynamic_at = 256 + 2 * 1920
    mismatched = {
        "checksum_of_static": common.poked(raw, 256, bytes([raw[256] ^ 16])),
        "checksum_of_dynamic": common.poked(coded, dynamic_at, bytes([coded[dynamic_at] ^ 1])),
        "checksum_of_padding": common.poked(raw, 383, b"\1"),
        "checksum_field": common.poked(raw, 48 + 32, bytes([raw[80] ^ 1])),
        "checksum_of_swapped_words": raw[:128] + raw[132:136] + raw[128:132] + raw[136:],
        "checksum_of_ordinal": common.poked(assembled(), 48 + 20, b"\7"),
    }
    nonzero = {
        "padding_of_raw": common.edited(raw_parts, lambda p: common.put(p, 0, 100, b"\1")),
        "padding_of_empty_chunk": common.edited(spare_chunks, lambda p: common.put(p, 3, 0, b"\1")),
    }
    return common.refused("checksum_mismatch", mismatched) | common.refused(
        "reserved_not_zero", nonzero
    )


def order_vectors() -> common.Invalid:
    """Two things wrong at once: the earlier check gives the reason."""

    def flags_and_overflow(parts: common.Parts) -> None:
        parts.records["flags"] = [OVERFLOW, 4]

    def info_and_overflow(parts: common.Parts) -> None:
        parts.records["info"] = [1, 0]
        parts.records["flags"] = [0, OVERFLOW]

    def padding_and_payload(parts: common.Parts) -> None:
        common.put(parts, 1, 1760, b"\1")
        common.put(parts, 1, 1250, b"\x80")

    coded = zipccl_parts().join()
    behind_escapes = common.poked(coded, len(coded) - 1, b"\1")
    first_static = zipccl_parts()
    common.put(first_static, 0, 1250, b"\x80")
    return {
        "order_size_and_section": (
            common.changed(raw_parts(), shape=(1 << 63,), sections=(Section(7, ALIGN),)),
            "limit_exceeded",
        ),
        "order_section_and_version": (
            common.changed(raw_parts(), codec_version=2, sections=(Section(7, ALIGN),)),
            "bad_header",
        ),
        "order_version_and_parameters": (
            common.changed(zipccl_parts(), codec_version=2, params=b""),
            "unsupported_version",
        ),
        "order_flags_and_overflow": (common.edited(zipccl_parts, flags_and_overflow), "bad_record"),
        "order_info_and_overflow": (
            common.edited(zipccl_parts, info_and_overflow),
            "dynamic_overflow",
        ),
        "order_trailing_and_reserved": (common.poked(coded, 255, b"\1") + b"\0", "trailing_bytes"),
        "order_reserved_and_checksum": (
            common.poked(common.poked(coded, 255, b"\1"), 256, bytes([coded[256] ^ 1])),
            "reserved_not_zero",
        ),
        "order_checksum_and_padding": (
            common.poked(behind_escapes, 256 + 1920, bytes([coded[256 + 1920] ^ 1])),
            "checksum_mismatch",
        ),
        "order_padding_and_payload": (
            common.edited(zipccl_parts, padding_and_payload),
            "reserved_not_zero",
        ),
        "order_payload_and_next_checksum": (
            common.poked(first_static.join(), 256 + 1920, bytes([coded[256 + 1920] ^ 1])),
            "bad_payload",
        ),
    }


def valid() -> common.Vectors:
    """None: those of the codecs have every kind of header."""
    yield from ()


def invalid() -> common.Invalid:
    """Invalid buffers that are no codec's own."""
    return header_vectors() | record_vectors() | payload_vectors() | order_vectors()
