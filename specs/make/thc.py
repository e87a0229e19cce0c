"""thc.md."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

import tightwire as tw
from tightwire import homomorphic
from tightwire.codecs.thc import NORMS
from tightwire.formats.dtypes import BY_NAME

from . import common, data


def rising(seed: int, dtype: str, n: int, block: int) -> data.Array:
    """Values whose scale grows from block to block."""
    x = data.bell(seed, "float64", n) * (1 + np.arange(n) // block)
    return data.narrowed(x, dtype)


def norm_near_a_tie() -> data.Array:
    """Blocks whose root mean square is rounded up only if their sums are added as the page says.

    Nearly all is in the first block: 3443599^2 + 23687400^2 = 23936401^2, which has 25 bits and is
    halfway between two float32. Each of the others is below half a step of the first block's sum;
    blocks 1 and 3 together are above.
    """
    x = np.zeros((5, 1024), np.float32)
    x[0, :512], x[0, 512:] = 3 * 3443599 / 2.0**24, 3 * 23687400 / 2.0**24
    step = np.spacing(512 * 9 * (23936401 / 2.0**24) ** 2)
    x[1:, 0] = np.sqrt(step * np.array([0.45, 0.1, 0.3, 0.1]))
    return x.reshape(-1)[:4608]


def valid() -> common.Vectors:
    """Vectors of codec thc."""
    coded = common.coder("thc", "bits", "norm")
    one = np.zeros(1024, np.float32)
    one[0] = 1.0
    yield coded("example", one)
    for i, dtype in enumerate(data.LOSSY_DTYPES):
        yield coded("block", data.bell(190 + i, dtype, 1250 + i), norm=NORMS[i % 2])
        x = data.specials(dtype, 1200)
        data.bits_of(x)[1024:] = data.bits_of(data.with_zeros(193 + i, dtype, 176))
        yield coded("specials", x)
    yield coded("scaled", data.scaled_super_groups(196, "float32", 1111))
    tiny = np.ldexp(data.bell(197, "float32", 1100), -80 - np.arange(1100) // 1024 * 12)
    yield coded("tiny", tiny.astype(np.float32))
    yield coded("tiny_tensor", tiny[:650].astype(np.float32), norm="tensor", bits=16)
    huge = np.full(1100, np.finfo(np.float32).max)
    huge[::2] *= -1
    yield coded("huge", huge, bits=16)
    yield coded("lost_tensor", data.specials("float32", 500), norm="tensor")
    yield coded("zeros", np.zeros((2, 700), BY_NAME["bfloat16"].numpy))
    yield coded("3_chunks", data.bell(198, "bfloat16", 3901), chunks=3)
    yield coded("no_checksum", data.bell(199, "float16", 900), checksum=False)
    ranks = [data.bell(200 + i, "float32", 1100) for i in range(8)]
    yield common.summed("8", tw.codec("thc"), ranks)
    codec = tw.codec("thc", bits=16, norm="tensor")
    yield common.summed("9", codec, [*ranks, -ranks[3]])
    yield common.summed(
        "2_chunks",
        tw.codec("thc"),
        [data.bell(208 + i, "bfloat16", 2701) for i in range(2)],
        chunks=2,
    )
    yield from rules()


def rules() -> common.Vectors:
    """thc.md: whose norm a block of a chunk takes; chunks may be sums of unlike ranks."""
    codec = tw.codec("thc")
    yield common.lossy(
        "float32_short_blocks", rising(231, "float32", 1300, 1024), codec, key=common.KEY, chunks=3
    )
    x = rising(232, "bfloat16", 1400, 1024)
    parts = common.Parts.of(codec.encode(x, key=common.KEY, chunks=2, backend="ref"))
    keys = [common.KEY._replace(seed=1 << 63 | 5, step=9, rank=rank) for rank in range(2)]
    stats = np.float32(2) * codec.measure(x)
    two = [codec.encode(x, key=k, stats=stats, chunks=2, backend="ref") for k in keys]
    parts.static[1] = common.Parts.of(homomorphic.add(*two)).static[1]
    yield common.decoded("thc/bfloat16_unlike_chunks_sum", parts.join())

    # Chunk 3 has elements of block 1 alone, and the norm of block 2 for that of its neighbour.
    x = data.bell(290, "float32", 2103)
    x[2090] = np.nan
    yield common.lossy("float32_lost_neighbour", x, codec, key=common.KEY, chunks=5)
    codec = tw.codec("thc", norm="tensor")
    yield common.lossy("float32_order_of_norms", norm_near_a_tie(), codec, key=common.KEY)
    yield common.lossy("float16_30_blocks", data.bell(291, "float16", 30000), codec, key=common.KEY)


def make_parts(**params: Any) -> common.Parts:
    """Two blocks, the second of which is lost.

    Of 8-bit cells 2048 bytes, the count at 2048, seed and norms at 2176 and 2192.
    """
    x = data.bell(221, "float32", 1250)
    x[-1] = np.inf
    codec = tw.codec("thc", **params)
    return common.Parts.of(codec.encode(x, key=common.KEY, backend="ref"))


def invalid() -> common.Invalid:
    """Step 9 of "Reading" for thc, and thc.md, "Checks"."""
    patched = functools.partial(common.with_bytes, make_parts, 0)
    wrong = {
        "bits_12": (0, b"\x0c"),
        "other_bits": (0, b"\x10"),
        "norm_2": (1, b"\2"),
        "parameters_reserved": (2, b"\1"),
        "parameters_end": (7, b"\1"),
    }
    wide = {"bits": 16, "norm": "tensor"}
    bad = {
        "no_ranks": patched(2048, b"\0"),
        "9_ranks": patched(2048, b"\x09"),
        "2185_ranks": patched(4096, b"\x89\x08", **wide),
        "cell_31": patched(1023, b"\x1f"),
        "cell_of_lost_block": patched(2047, b"\1"),
        "cell_of_lost_tensor": patched(4095, b"\1", **wide),
        "norm_infinite": patched(2192, b"\0\0\x80\x7f"),
        "norm_other_nan": patched(2196, b"\1\0\xc0\x7f"),
        "norm_negative": patched(2192 + 3, b"\xbf"),
        "norm_minus_zero": patched(2192, b"\0\0\0\x80"),
        "norm_too_small": patched(2192, b"\xff\xff\x7f\x12"),
        "cells_of_a_zero_norm": patched(2192, bytes(4)),
    }
    padding = {
        "padding_behind_the_count": patched(2049, b"\1"),
        "padding_of_seed": patched(2176 + 12, b"\1"),
        "padding_of_norms": patched(2200, b"\1"),
    }
    return common.named(
        "thc",
        common.headers(make_parts, wrong, small=300),
        common.refused("bad_payload", bad),
        common.refused("reserved_not_zero", padding),
    )
