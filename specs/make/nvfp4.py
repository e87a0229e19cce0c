"""nvfp4.md."""

from __future__ import annotations

import math
import struct
from dataclasses import replace

import numpy as np

import tightwire as tw
from tightwire.codecs.common import minifloat
from tightwire.formats.dtypes import BY_NAME
from tightwire.formats.header import RAW

from . import common, data


def blocks_of(largest: float, *blocks: tuple[float, ...]) -> data.Array:
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


def rules() -> common.Vectors:
    """Vectors that catch one wrong reading each."""
    codec = tw.codec("nvfp4")
    ties = (0.53125, 0.59375, 8.5, 9.5, 272, 304, 336, 368, 400, 2**-10, 3 * 2**-10)
    x = blocks_of(2688, *((6.0 * tie,) for tie in ties))
    yield common.lossy("float32_scale_ties", x, codec)
    codes = (6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5)
    x = blocks_of(2688, codes, tuple(-v for v in codes))
    yield common.lossy("float32_code_ties", x, codec)
    for name, (largest, a, v) in ORDERS.items():
        block = float.fromhex(a), float.fromhex(v)
        yield common.lossy(f"float32_{name}", blocks_of(largest, block), codec)
    parts = common.Parts.of(codec.encode(data.bell(100, "float32", 600), chunks=2, backend="ref"))
    common.put(parts, 1, parts.header.sections[0].nbytes, struct.pack("<f", 3.0))
    yield common.decoded("nvfp4/float32_two_scales", parts.join())


def valid() -> common.Vectors:
    """Vectors of codec nvfp4."""
    codec = tw.codec("nvfp4")
    x = np.zeros(257, np.float32)
    x[:2] = 1.0, -3.0
    yield common.lossy("float32_example", x, codec)
    for i, dtype in enumerate(("bfloat16", "float16", "float32")):
        yield common.lossy(f"{dtype}_{400 + i}", data.bell(90 + i, dtype, 400 + i), codec)
        yield common.lossy(f"{dtype}_scaled", data.scaled_blocks(93 + i, dtype, 501), codec)
        small = np.ldexp(data.bell(96, "float32", 300), -14 if dtype == "float16" else -125)
        yield common.lossy(f"{dtype}_small", small.astype(BY_NAME[dtype].numpy), codec)
    yield common.lossy("bfloat16_zeros", np.zeros(300, BY_NAME["bfloat16"].numpy), codec)
    yield common.lossy("float32_5_chunks", data.bell(97, "float32", 1601), codec, chunks=5)
    yield common.lossy("float32_66_chunks", data.bell(101, "float32", 65 * 65), codec, chunks=66)
    yield common.lossy("float16_no_checksum", data.bell(98, "float16", 500), codec, checksum=False)
    stats = np.array([np.float32(1.0).view(np.int32)])
    parts = common.Parts.of(
        codec.encode(data.bell(99, "float16", 16 * 256), stats=stats, backend="ref")
    )
    codes = np.resize(np.arange(16, dtype=np.uint8), 16 * 256)
    common.put(parts, 0, 0, minifloat.pack(codes, minifloat.BY_NAME["e2m1"]).tobytes())
    common.put(parts, 0, parts.header.sections[0].nbytes + 16, bytes(range(256)))
    yield common.decoded("nvfp4/float16_all_codes", parts.join())
    yield from rules()


def make_parts() -> common.Parts:
    """Two chunks of 501 and 500 elements: 251 and 250 bytes of codes, scales at 256."""
    return common.Parts.of(
        tw.codec("nvfp4").encode(data.bell(86, "float16", 1001), chunks=2, backend="ref")
    )


def invalid() -> common.Invalid:
    """What is wrong in nvfp4 buffers only."""
    sections = make_parts().header.sections
    bad_header = {
        "of_float64": common.changed(make_parts(), dtype=BY_NAME["float64"]),
        "sections_swapped": common.sectioned(make_parts(), 1, 0),
        "gains_nothing": common.changed(make_parts(), shape=(200,)),
        "scales_too_large": common.changed(
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
    vectors = common.with_params(make_parts, {}) | common.refused("bad_header", bad_header)
    for name, (chunk, at, new, reason) in edits.items():
        vectors[name] = common.with_bytes(make_parts, chunk, at, new), reason
    raw_flag = common.edited(make_parts, lambda p: common.record(p, 1, "flags", RAW))
    vectors |= {
        "version_2": (common.changed(make_parts(), codec_version=2), "unsupported_version"),
        "raw_flag": (raw_flag, "bad_record"),
    }
    return common.named("nvfp4", vectors)
