"""nvfp4.md."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

import tightwire as tw
from tightwire.codecs.common import minifloat
from tightwire.formats.dtypes import BY_NAME
from tightwire.formats.header import RAW

from .common import (
    Invalid,
    LossyVector,
    Parts,
    Vector,
    changed,
    decoded,
    edited,
    lossy,
    named,
    put,
    record,
    refused,
    sectioned,
    with_bytes,
)
from .data import Array, bell, scaled_blocks


def blocks_of(largest: float, *blocks: tuple[float, ...]) -> Array:
    """float32, shape (272,): the tensor's largest value, then blocks of 16 that start as given."""
    x = np.zeros((17, 16), np.float32)
    x[0, 0] = largest
    for row, block in zip(x[1:], blocks, strict=False):
        row[: len(block)] = block
    return x.reshape(-1)


#: Largest value of the tensor and of a block, and an element there, for which one way alone to
#: compute scale or code gives another code than specs/nvfp4.md does.
ORDERS = {
    "g_by_6": (1224, "0x1.271248p+3", "0x0p+0"),
    "ag_times_c": (362, "0x1.eb4922p+6", "0x0p+0"),
    "ag_by_6": (1338, "0x1.c5f6dap+1", "0x0p+0"),
    "a_by_6": (1415, "0x1.229492p+8", "0x0p+0"),
    "x_by_quotient": (698, "0x1.8edb6ep+8", "0x1.8edb6cp+5"),
    "g_by_s": (1269, "0x1.2696dap+6", "0x1.eafb6ep+4"),
}


def rules() -> Iterator[LossyVector | Vector]:
    """Vectors that catch one wrong reading each."""
    codec = tw.codec("nvfp4")
    ties = (0.53125, 0.59375, 8.5, 9.5, 272, 304, 336, 368, 400, 2**-10, 3 * 2**-10)
    x = blocks_of(2688, *((6.0 * tie,) for tie in ties))
    yield lossy("float32_scale_ties", x, codec)
    codes = (6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5)
    x = blocks_of(2688, codes, tuple(-v for v in codes))
    yield lossy("float32_code_ties", x, codec)
    for name, (largest, a, v) in ORDERS.items():
        block = float.fromhex(a), float.fromhex(v)
        yield lossy(f"float32_{name}", blocks_of(largest, block), codec)
    parts = Parts.of(codec.encode(bell(100, "float32", 600), chunks=2, backend="ref"))
    put(parts, 1, parts.header.sections[0].nbytes, struct.pack("<f", 3.0))
    yield decoded("nvfp4/float32_two_scales", parts.join())


def valid() -> Iterator[LossyVector | Vector]:
    """Vectors of codec nvfp4."""
    codec = tw.codec("nvfp4")
    x = np.zeros(257, np.float32)
    x[:2] = 1.0, -3.0
    yield lossy("float32_example", x, codec)
    for i, dtype in enumerate(("bfloat16", "float16", "float32")):
        yield lossy(f"{dtype}_{400 + i}", bell(90 + i, dtype, 400 + i), codec)
        yield lossy(f"{dtype}_scaled", scaled_blocks(93 + i, dtype, 501), codec)
        small = np.ldexp(bell(96, "float32", 300), -14 if dtype == "float16" else -125)
        yield lossy(f"{dtype}_small", small.astype(BY_NAME[dtype].numpy), codec)
    yield lossy("bfloat16_zeros", np.zeros(300, BY_NAME["bfloat16"].numpy), codec)
    yield lossy("float32_5_chunks", bell(97, "float32", 1601), codec, chunks=5)
    yield lossy("float32_66_chunks", bell(101, "float32", 65 * 65), codec, chunks=66)
    yield lossy("float16_no_checksum", bell(98, "float16", 500), codec, checksum=False)
    stats = np.array([np.float32(1.0).view(np.int32)])
    parts = Parts.of(codec.encode(bell(99, "float16", 16 * 256), stats=stats, backend="ref"))
    codes = np.resize(np.arange(16, dtype=np.uint8), 16 * 256)
    put(parts, 0, 0, minifloat.pack(codes, minifloat.BY_NAME["e2m1"]).tobytes())
    put(parts, 0, parts.header.sections[0].nbytes + 16, bytes(range(256)))
    yield decoded("nvfp4/float16_all_codes", parts.join())
    yield from rules()


def make_parts() -> Parts:
    """Two chunks of 501 and 500 elements: 251 and 250 bytes of codes, scales at 256."""
    return Parts.of(tw.codec("nvfp4").encode(bell(86, "float16", 1001), chunks=2, backend="ref"))


def invalid() -> Invalid:
    """What is wrong in nvfp4 buffers only."""
    sections = make_parts().header.sections
    bad_header = {
        "parameters": changed(make_parts(), params=bytes(8)),
        "of_float64": changed(make_parts(), dtype=BY_NAME["float64"]),
        "sections_swapped": sectioned(make_parts(), 1, 0),
        "gains_nothing": changed(make_parts(), shape=(200,)),
        "scales_too_large": changed(
            make_parts(), sections=(sections[0], replace(sections[1], nbytes=256))
        ),
    }
    edits: dict[str, tuple[int, int, bytes, str]] = {
        "padding_of_payload": (1, 250, b"\1", "reserved_not_zero"),
        "padding_behind_tensor_scale": (0, 256 + 15, b"\1", "reserved_not_zero"),
        "padding_of_scales": (0, 256 + 16 + 32, b"\1", "reserved_not_zero"),
        "tensor_scale_0": (0, 256, bytes(4), "bad_payload"),
        "tensor_scale_negative": (1, 259, b"\xc4", "bad_payload"),
        "tensor_scale_infinite": (1, 256, struct.pack("<f", math.inf), "bad_payload"),
        "tensor_scale_nan": (0, 256, struct.pack("<f", math.nan), "bad_payload"),
        "tail": (0, 250, b"\x1f", "bad_payload"),
    }
    vectors = refused("bad_header", bad_header)
    for name, (chunk, at, new, reason) in edits.items():
        vectors[name] = with_bytes(make_parts, chunk, at, new), reason
    raw_flag = edited(make_parts, lambda p: record(p, 1, "flags", RAW))
    vectors |= {
        "version_2": (changed(make_parts(), codec_version=2), "unsupported_version"),
        "raw_flag": (raw_flag, "bad_record"),
    }
    return named("nvfp4", vectors)
