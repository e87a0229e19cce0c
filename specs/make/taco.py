"""taco.md."""

from __future__ import annotations

import functools
import math
import struct
from dataclasses import replace
from typing import Any

import numpy as np

import tightwire as tw
from tightwire.formats.dtypes import BY_NAME

from . import common, data

PARAMS: dict[str, dict[str, Any]] = {
    "e4m3": {},
    "e5m2": {"format": "e5m2"},
    "int8": {"format": "int8"},
    "hadamard": {"transform": "hadamard", "block": 128},
    "hadamard_int8": {"transform": "hadamard", "format": "int8", "scales": "merged"},
    "none_e5m2": {"transform": "none", "format": "e5m2", "block": 64},
    "none_int8": {"transform": "none", "format": "int8", "block": 32},
    "merged": {"scales": "merged", "block": 512},
    "block_32": {"block": 32},
    "stochastic": {"rounding": "stochastic"},
    "stochastic_e5m2": {"rounding": "stochastic", "format": "e5m2", "transform": "none"},
    "stochastic_int8": {"rounding": "stochastic", "format": "int8", "block": 64},
}


def valid() -> common.Vectors:
    """Vectors of codec taco."""

    def coded(
        name: str, x: data.Array, params: dict[str, Any], **options: Any
    ) -> common.LossyVector:
        return common.lossy(name, x, tw.codec("taco", **params), key=common.KEY, **options)

    ones = np.ones(384, np.float32).astype(BY_NAME["bfloat16"].numpy)
    example = {"transform": "none", "scales": "merged", "block": 128}
    yield coded("bfloat16_384_none", ones, params=example)
    for i, (name, params) in enumerate(PARAMS.items()):
        dtype = data.LOSSY_DTYPES[i % 3]
        yield coded(f"{dtype}_{name}", data.bell(80 + i, dtype, 900), params=params)
    for dtype in data.LOSSY_DTYPES:
        yield coded(f"{dtype}_specials", data.specials(dtype, 1500), params={"block": 32})
        yield coded(
            f"{dtype}_zeros", data.with_zeros(100, dtype, 700), params={"transform": "none"}
        )
        yield coded(
            f"{dtype}_random_bits", data.random_bits(101, dtype, (3, 511)), params={"block": 32}
        )
    huge = np.ldexp(data.bell(102, "float32", 700), 125).astype(np.float32)
    for name in ("e4m3", "int8", "hadamard", "none_int8"):
        yield coded(f"float32_huge_{name}", huge, params=PARAMS[name])
    tiny = np.ldexp(data.bell(103, "float32", 700), -30 - np.arange(700) // 64 * 4).astype(
        np.float32
    )
    for name in ("e4m3", "int8", "hadamard_int8", "none_e5m2"):
        yield coded(f"float32_tiny_{name}", tiny, params=PARAMS[name])
    for n in (511, 512, 513):
        yield coded(f"bfloat16_{n}", data.bell(n, "bfloat16", n), params={"block": 128})
    x = data.bell(104, "bfloat16", 2000)
    yield coded("bfloat16_3_chunks", x.reshape(4, 500), {}, chunks=3)
    yield coded("float16_7_chunks_none", data.bell(105, "float16", 2450), params=example, chunks=7)
    yield coded("bfloat16_3_chunks_stochastic", x, PARAMS["stochastic"], chunks=3)
    yield coded("bfloat16_no_checksum", x, {}, checksum=False)
    yield from rules()


def rules() -> common.Vectors:
    """taco.md: r = K / s, and the merged scale is s / alpha."""
    codec = tw.codec("taco", block=32, scales="merged", format="int8")
    yield common.lossy("float32_order_of_quotients", data.bell(815, "float32", 320), codec)


#: Where the scales of `make_parts` begin.
SCALES = 1024


def make_parts(**params: Any) -> common.Parts:
    """Two chunks of 1000 elements: 4 blocks, whose scales lie at 1024 to 1056 (merged: 1040)."""
    x = data.bell(106, "bfloat16", 2000)
    data.bits_of(x)[1256:1512] = 0x7F80
    return common.Parts.of(
        tw.codec("taco", **params).encode(x, chunks=2, key=common.KEY, backend="ref")
    )


def invalid() -> common.Invalid:
    """Step 9 of "Reading" for taco, and taco.md, "Checks"; block 1 of chunk 1 is lost."""
    patched = functools.partial(common.with_bytes, make_parts)
    wrong = {
        "format_3": (0, b"\3"),
        "block_16": (1, b"\4"),
        "block_1024": (1, b"\12"),
        "block_2_255": (1, b"\xff"),
        "transform_3": (2, b"\3"),
        "scales_2": (3, b"\2"),
        "rounding_2": (4, b"\2"),
        "parameters_reserved": (5, b"\1"),
        "parameters_end": (7, b"\1"),
    }
    payload, scales = make_parts().header.sections
    sections = {
        "three_sections": common.sectioned(make_parts(), 0, 1, 1),
        "scales_of_kind_2": common.changed(
            make_parts(), sections=(payload, replace(scales, kind=2))
        ),
        "scales_dynamic": common.changed(
            make_parts(), sections=(payload, replace(scales, dynamic=True))
        ),
    }
    for name in ("float8_e4m3fn", "int16"):
        sections[f"of_{name}"] = common.changed(make_parts(), dtype=BY_NAME[name])

    word = struct.Struct("<f").pack
    merged: dict[str, Any] = {"scales": "merged"}
    bad_scales = {
        "alpha_zero": patched(0, SCALES, bytes(4)),
        "alpha_negative": patched(0, SCALES + 8, word(-1.0)),
        "alpha_infinite": patched(1, SCALES, word(math.inf)),
        "alpha_too_small": patched(0, SCALES + 24, word(2.0**-11)),
        "alpha_too_large": patched(1, SCALES + 24, word(2.0**11)),
        "alpha_lost": patched(0, SCALES, b"\0\0\xc0\x7f"),
        "s_zero": patched(0, SCALES + 4, bytes(4)),
        "s_negative": patched(0, SCALES + 12, word(-1.0)),
        "s_lost": patched(0, SCALES + 4, b"\0\0\xc0\x7f"),
        "s_other_nan": patched(1, SCALES + 4, b"\1\0\xc0\x7f"),
        "s_too_small": patched(0, SCALES + 28, word(2.0**-87)),
        "s_too_large": patched(0, SCALES + 28, word(2.0**127)),
        "quotient_too_large": patched(0, SCALES, word(2.0**-10) + word(2.0**120)),
        "alpha_of_lost_block": patched(1, SCALES + 8, word(1.0)),
        "merged_zero": patched(0, SCALES + 4, bytes(4), **merged),
        "merged_infinite": patched(0, SCALES + 4, word(math.inf), **merged),
        "merged_negative": patched(1, SCALES, word(-1.0), **merged),
        "merged_too_small": patched(1, SCALES + 12, word(2.0**-97), **merged),
    }
    bad_codes = {
        "nan_e4m3": patched(0, 0, b"\x7f"),
        "negative_nan_e4m3": patched(1, 1023, b"\xff"),
        "infinity_e5m2": patched(0, 255, b"\x7c", format="e5m2"),
        "nan_e5m2": patched(1, 768, b"\xff", format="e5m2"),
        "minus_128": patched(0, 256, b"\x80", format="int8"),
        "code_of_lost_block": patched(1, 300, b"\x01"),
        "nan_code_none": patched(1, 999, b"\x7f", transform="none"),
    }
    padding = {
        "padding_none": patched(0, 1000, b"\x01", transform="none"),
        "padding_behind_scales": patched(0, SCALES + 32, b"\1"),
        "padding_of_merged": patched(1, SCALES + 16, b"\1", **merged),
    }
    return common.named(
        "taco",
        common.headers(make_parts, wrong, grown=1),
        common.refused("bad_header", sections),
        common.refused("bad_payload", bad_scales | bad_codes),
        common.refused("reserved_not_zero", padding),
    )
