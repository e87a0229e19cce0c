"""raw.md."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tightwire.formats.dtypes import DTYPES
from tightwire.formats.header import ALIGN, ASSEMBLED, CHECKSUM

from . import common, data


def valid() -> common.Vectors:
    """Vectors of codec raw."""
    yield common.lossless("uint8_3", np.array([1, 2, 3], np.uint8), "raw")
    for d in DTYPES:
        yield common.lossless(f"{d.name}_3x5", data.random_bits(d.id, d.name, (3, 5)), "raw")
        yield common.lossless(f"{d.name}_empty", data.random_bits(0, d.name, (0,)), "raw")
    yield common.lossless("float32_scalar", data.random_bits(40, "float32", ()), "raw")
    yield common.lossless("complex128_scalar", data.random_bits(41, "complex128", ()), "raw")
    yield common.lossless("float16_3x0x2", data.random_bits(0, "float16", (3, 0, 2)), "raw")
    yield common.lossless("int64_empty_chunks", data.random_bits(0, "int64", (0,)), "raw", chunks=3)
    for n in (127, 128, 129):
        yield common.lossless(f"uint8_{n}", data.random_bits(n, "uint8", (n,)), "raw")
    yield common.lossless("int8_32_dims", data.random_bits(42, "int8", (2, *(1,) * 31)), "raw")
    yield common.lossless(
        "uint16_3_chunks", data.random_bits(43, "uint16", (10, 100)), "raw", chunks=3
    )
    yield common.lossless(
        "complex64_4_chunks", data.random_bits(44, "complex64", (77,)), "raw", chunks=4
    )
    yield common.lossless(
        "uint8_empty_last_chunks", data.random_bits(45, "uint8", (9,)), "raw", chunks=7
    )
    yield common.lossless(
        "float32_no_checksum", data.random_bits(46, "float32", (50,)), "raw", checksum=False
    )

    x = data.random_bits(47, "uint8", (300,))
    parts = common.Parts.of(common.encoded(x, "raw", chunks=3))
    parts.records["ordinal"] = [2, 0, 5]
    parts.header = replace(parts.header, required=CHECKSUM | ASSEMBLED)
    yield "raw/uint8_assembled", parts.join(), x.tobytes()
    parts = common.Parts.of(common.encoded(x, "raw"))
    parts.header = replace(parts.header, minor=7, optional=0x8001)
    yield "raw/uint8_newer_minor", parts.join(), x.tobytes()


def raw_parts() -> common.Parts:
    """Two chunks of 100 bytes: 384 bytes, records at 48, static parts at 128 and 256."""
    return common.Parts.of(common.encoded(data.random_bits(60, "uint8", (200,)), "raw", chunks=2))


def spare_chunks() -> common.Parts:
    """Five elements in four chunks; the last one is empty."""
    return common.Parts.of(common.encoded(data.random_bits(68, "uint8", (5,)), "raw", chunks=4))


def invalid() -> common.Invalid:
    """Step 9 of "Reading" for raw."""
    found = {
        "parameters": common.changed(raw_parts(), params=bytes(8)),
        "no_section": common.changed(raw_parts(), sections=()),
        "two_sections": common.sectioned(raw_parts(), 0, 0),
        "section_kind": common.sectioned(raw_parts(), 0, kind=2),
        "section_size": common.sectioned(raw_parts(), 0, nbytes=256),
        "section_dynamic": common.sectioned(raw_parts(), 0, dynamic=True),
        "dynamic_stride": common.changed(raw_parts(), dynamic_stride=ALIGN),
    }
    version = common.changed(raw_parts(), codec_version=2), "unsupported_version"
    return common.named("raw", common.refused("bad_header", found), {"version_2": version})
