"""raw.md."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from tightwire.formats.dtypes import DTYPES
from tightwire.formats.header import ALIGN, ASSEMBLED, CHECKSUM

from .common import Invalid, Parts, Vector, changed, encoded, lossless, named, refused, sectioned
from .data import random_bits


def valid() -> Iterator[Vector]:
    """Vectors of codec raw."""
    yield lossless("uint8_3", np.array([1, 2, 3], np.uint8), "raw")
    for d in DTYPES:
        yield lossless(f"{d.name}_3x5", random_bits(d.id, d.name, (3, 5)), "raw")
        yield lossless(f"{d.name}_empty", random_bits(0, d.name, (0,)), "raw")
    yield lossless("float32_scalar", random_bits(40, "float32", ()), "raw")
    yield lossless("complex128_scalar", random_bits(41, "complex128", ()), "raw")
    yield lossless("float16_3x0x2", random_bits(0, "float16", (3, 0, 2)), "raw")
    yield lossless("int64_empty_chunks", random_bits(0, "int64", (0,)), "raw", chunks=3)
    for n in (127, 128, 129):
        yield lossless(f"uint8_{n}", random_bits(n, "uint8", (n,)), "raw")
    yield lossless("int8_32_dims", random_bits(42, "int8", (2, *(1,) * 31)), "raw")
    yield lossless("uint16_3_chunks", random_bits(43, "uint16", (10, 100)), "raw", chunks=3)
    yield lossless("complex64_4_chunks", random_bits(44, "complex64", (77,)), "raw", chunks=4)
    yield lossless("uint8_empty_last_chunks", random_bits(45, "uint8", (9,)), "raw", chunks=7)
    yield lossless("float32_no_checksum", random_bits(46, "float32", (50,)), "raw", checksum=False)

    x = random_bits(47, "uint8", (300,))
    parts = Parts.of(encoded(x, "raw", chunks=3))
    parts.records["ordinal"] = [2, 0, 5]
    parts.header = replace(parts.header, required=CHECKSUM | ASSEMBLED)
    yield "raw/uint8_assembled", parts.join(), x.tobytes()
    parts = Parts.of(encoded(x, "raw"))
    parts.header = replace(parts.header, minor=7, optional=0x8001)
    yield "raw/uint8_newer_minor", parts.join(), x.tobytes()


def raw_parts() -> Parts:
    """Two chunks of 100 bytes: 384 bytes, records at 48, static parts at 128 and 256."""
    return Parts.of(encoded(random_bits(60, "uint8", (200,)), "raw", chunks=2))


def spare_chunks() -> Parts:
    """Five elements in four chunks; the last one is empty."""
    return Parts.of(encoded(random_bits(68, "uint8", (5,)), "raw", chunks=4))


def invalid() -> Invalid:
    """Step 9 of "Reading" for raw."""
    found = {
        "parameters": changed(raw_parts(), params=bytes(8)),
        "no_section": changed(raw_parts(), sections=()),
        "two_sections": sectioned(raw_parts(), 0, 0),
        "section_kind": sectioned(raw_parts(), 0, kind=2),
        "section_size": sectioned(raw_parts(), 0, nbytes=256),
        "section_dynamic": sectioned(raw_parts(), 0, dynamic=True),
        "dynamic_stride": changed(raw_parts(), dynamic_stride=ALIGN),
    }
    version = changed(raw_parts(), codec_version=2), "unsupported_version"
    return named("raw", refused("bad_header", found), {"version_2": version})
