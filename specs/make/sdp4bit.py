"""sdp4bit.md."""

from __future__ import annotations

import functools
import math
import struct
from dataclasses import replace
from typing import Any

import numpy as np

import tightwire as tw
from tightwire.codecs.common.philox import key_numbers
from tightwire.codecs.common.philox import random_words as philox_words
from tightwire.formats.dtypes import BY_NAME
from tightwire.formats.header import ALIGN, RAW

from . import common, data

PARAMS: dict[str, dict[str, Any]] = {
    "4": {},
    "8": {"bits": 8},
    "weights": {"group": 2048, "rotate": "none"},
    "8_encode": {"bits": 8, "rotate": "encode"},
    "4_decode": {"group": 32, "rotate": "decode"},
    "8_none": {"bits": 8, "group": 4096, "rotate": "none"},
    "4_stochastic": {"rounding": "stochastic"},
    "8_stochastic": {"bits": 8, "group": 64, "rounding": "stochastic", "rotate": "none"},
}


def valid() -> common.Vectors:
    """Vectors of codec sdp4bit."""

    def coded(
        name: str, x: data.Array, params: dict[str, Any], **options: Any
    ) -> common.LossyVector:
        return common.lossy(name, x, tw.codec("sdp4bit", **params), key=common.KEY, **options)

    x = np.zeros(257, BY_NAME["bfloat16"].numpy)
    x[:2] = 1.0, -3.5
    yield coded("bfloat16_257_none", x, {"rotate": "none"})
    for i, (name, params) in enumerate(PARAMS.items()):
        dtype = data.LOSSY_DTYPES[i % 3]
        n = 901 if params.get("group", 0) < 2048 else 4201
        yield coded(f"{dtype}_{name}", data.bell(110 + i, dtype, n + i), params)
    for i, dtype in enumerate(data.LOSSY_DTYPES):
        yield coded(f"{dtype}_specials", data.specials(dtype, 1500), {"group": 32, "bits": 8})
        yield coded(f"{dtype}_scaled", data.scaled_blocks(120 + i, dtype, 1001), {"group": 32})
        yield coded(
            f"{dtype}_random_bits", data.random_bits(123, dtype, (3, 511)), {"rotate": "none"}
        )
        huge = np.full(1000, float(np.finfo(np.float16).max), np.float32)
        if dtype != "float16":
            huge = np.ldexp(huge, 111)
        huge[1::3] *= -1
        yield coded(f"{dtype}_huge", huge.astype(BY_NAME[dtype].numpy), {"bits": 8})
    tiny = np.ldexp(data.bell(124, "float32", 2000), -80 - np.arange(2000) // 64).astype(np.float32)
    yield coded("float32_tiny", tiny, {"group": 64})
    yield coded("float32_tiny_none", tiny, {"group": 64, "bits": 8, "rotate": "none"})
    for n in (0, 1, 31, 32, 33):
        yield coded(f"bfloat16_{n}_encode", data.bell(n, "bfloat16", n), {"rotate": "encode"})
    yield coded(
        "float16_scalar_decode", data.bell(125, "float16", 1).reshape(()), {"rotate": "decode"}
    )
    x = data.bell(126, "bfloat16", 3001)
    for name in ("4", "8_encode", "4_stochastic"):
        yield coded(f"bfloat16_3_chunks_{name}", x, PARAMS[name], chunks=3)
    yield coded("bfloat16_no_checksum", x, {}, checksum=False)
    for bits in (8, 4):
        yield all_codes(bits)
    yield from rules()


def all_codes(bits: int) -> common.Vector:
    """Every code but that of no encoder, in groups with the least, the largest and other scales."""
    n = 32 * 15
    parts = make_parts(n, 1, bits=bits, group=32)
    codes = np.resize(np.arange(1, 1 << bits, dtype=np.uint8) ^ (1 << bits - 1), n)
    if bits == 4:
        codes = codes[0::2] | codes[1::2] << 4
    common.put(parts, 0, 0, codes.tobytes())
    scales = np.resize(np.array([-107, 126, -20, 0, 110], np.float32), 15)
    common.put(parts, 0, parts.header.sections[0].nbytes, np.exp2(scales).astype("<f4").tobytes())
    return common.decoded(f"sdp4bit/float32_{bits}_all_codes", parts.join())


def halfway(bits: int) -> data.Array:
    """float32 whose codes one addition, v + D, and two, v + Q + 1, round differently.

    Of 8 bits each lies next to the middle of two of the numbers that v + 128 can be; of 4 bits
    below one of them, by a little more than half the distance. The word that rank 3 draws for it
    makes the smallest difference count.
    """
    n, largest = 320, (1 << bits - 1) - 1
    words = philox_words(key_numbers(common.KEY), 0, n)
    steps = 65535 - (words >> np.uint32(16)).astype(np.int64)
    x: data.Array
    if bits == 8:
        x = steps * 2.0**-16 + 2.0**-17 + np.where(steps % 2 == 0, 1, -1) * 2.0**-24
    else:
        x = (steps + 1) * 2.0**-16 - 2.0**-21 - 2.0**-24
    x[(x < 0.5) | (np.arange(n) % 32 == 0)] = largest
    return x.astype(np.float32)


def rules() -> common.Vectors:
    """sdp4bit.md: v + D is one addition; a decoded value may round to -0."""
    for bits in (8, 4):
        codec = tw.codec("sdp4bit", bits=bits, group=32, rotate="none", rounding="stochastic")
        yield common.lossy(f"float32_{bits}_one_addition", halfway(bits), codec, key=common.KEY)
    codec = tw.codec("sdp4bit", bits=8, group=32, rotate="none")
    yield common.lossy("float32_product_with_r", data.bell(3894, "float32", 320), codec)
    small = np.ldexp(data.bell(230, "float32", 320), -24).astype(np.float16)
    yield common.lossy("float16_minus_zeros", small, tw.codec("sdp4bit", bits=8))


def make_parts(n: int = 2001, chunks: int = 2, **params: Any) -> common.Parts:
    """Usually chunks of 1001 and 1000 elements, whose group 2 is lost, with scales at 512."""
    x = data.bell(127, "float32", n)
    x[300:1000:1001] = math.inf
    codec = tw.codec("sdp4bit", **params)
    return common.Parts.of(codec.encode(x, chunks=chunks, backend="ref"))


def invalid() -> common.Invalid:
    """Step 9 of "Reading" for sdp4bit, and sdp4bit.md, "Checks"; group 2 of chunk 0 is lost."""
    params = make_parts().header.params
    sections = make_parts().header.sections
    wrong = {
        "bits_5": (0, b"\5"),
        "group_16": (1, b"\4"),
        "group_8192": (1, b"\15"),
        "group_2_255": (1, b"\xff"),
        "rotate_4": (2, b"\4"),
        "rounding_2": (3, b"\2"),
        "parameters_reserved": (4, b"\1"),
        "parameters_end": (7, b"\1"),
        "other_bits": (0, b"\x08"),
    }
    encode = make_parts(33, 1, rotate="encode")
    vectors: common.Invalid = common.with_params(make_parts, wrong) | {
        "version_2": (common.changed(make_parts(), codec_version=2), "unsupported_version"),
        "of_float64": (common.changed(make_parts(), dtype=BY_NAME["float64"]), "bad_header"),
        "encode_of_float64": (common.changed(encode, dtype=BY_NAME["float64"]), "bad_header"),
        "sections_swapped": (common.sectioned(make_parts(), 1, 0), "bad_header"),
        "one_section": (common.sectioned(make_parts(), 0), "bad_header"),
        "payload_too_large": (
            common.changed(
                make_parts(),
                sections=(replace(sections[0], nbytes=sections[0].nbytes + ALIGN), sections[1]),
            ),
            "bad_header",
        ),
        "gains_nothing": (common.changed(encode, params=params), "bad_header"),
        "raw_flag": (
            common.edited(make_parts, lambda p: common.record(p, 1, "flags", RAW)),
            "bad_record",
        ),
        "dynamic": (common.edited(make_parts, lambda p: common.grow(p, 1, 1)), "bad_record"),
        "info": (common.edited(make_parts, lambda p: common.record(p, 0, "info", 1)), "bad_record"),
    }
    patched = functools.partial(common.with_bytes, make_parts)
    word = struct.Struct("<f").pack
    vectors |= {
        name: (patched(chunk, 512 + at, new), "bad_payload")
        for name, chunk, at, new in (
            ("scale_zero", 0, 0, bytes(4)),
            ("scale_negative", 1, 4, word(-1.0)),
            ("scale_infinite", 1, 28, word(math.inf)),
            ("scale_other_nan", 0, 8, b"\1\0\xc0\x7f"),
            ("scale_too_small", 0, 28, word(2.0**-108)),
            ("scale_too_large", 0, 4, word(2.0**127)),
        )
    }
    vectors |= {
        "minus_8_low": (patched(0, 7, b"\x18"), "bad_payload"),
        "minus_8_high": (patched(1, 499, b"\x81"), "bad_payload"),
        "minus_128": (patched(1, 999, b"\x80", bits=8), "bad_payload"),
        "code_of_lost_group": (patched(0, 150, b"\x10"), "bad_payload"),
        "tail": (patched(0, 500, b"\x11"), "bad_payload"),
        "padding_of_payload": (patched(1, 500, b"\1"), "reserved_not_zero"),
        "padding_of_scales": (patched(0, 512 + 32, b"\1"), "reserved_not_zero"),
    }
    return common.named("sdp4bit", vectors)
