"""omnireduce.md."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

import tightwire as tw
from tightwire.formats.dtypes import BY_NAME

from . import common, data


def valid() -> common.Vectors:
    """Vectors of codec omnireduce."""
    coded = common.coder("omnireduce", "bits", "block", "values")
    example = np.zeros(513, np.float32)
    example[[0, 300, 512]] = 1, -2, 1
    yield coded("example", example, bits=11)
    for i, dtype in enumerate(data.LOSSY_DTYPES):
        for values in sorted(set(data.LOSSY_DTYPES) - {dtype}):
            params: dict[str, Any] = {"bits": 4 + i, "block": 64, "values": values}
            yield coded(f"in_{values}", data.scaled_super_groups(210 + i, dtype, 601 + i), **params)
        yield coded("specials", data.specials(dtype, 900), block=64, values=dtype)
    x = np.ldexp(data.bell(213, "float32", 900), -70 - np.arange(900) // 64 * 5)
    yield coded("tiny", x.astype(np.float32), block=64, values="float32", bits=20)
    yield coded("zeros", data.with_zeros(214, "bfloat16", 1050) * 0)
    yield coded("few", np.concatenate([data.bell(215, "float32", 300), np.zeros(900, np.float32)]))
    yield coded("equal", np.ones((21, 51), BY_NAME["float16"].numpy), bits=3.0625, block=64)
    yield coded("3_chunks", data.scaled_super_groups(216, "float32", 1501), chunks=3, block=64)
    yield coded("no_checksum", data.bell(217, "bfloat16", 1537), block=256, bits=1, checksum=False)
    ranks = [data.scaled_super_groups(218 + i, "float32", 1100) for i in range(3)]
    yield common.summed("3", tw.codec("omnireduce", block=64), ranks)
    yield from rules()


def rules() -> common.Vectors:
    """omnireduce.md: whose norm a block of a chunk takes; zeros keep their signs."""
    codec = tw.codec("omnireduce", block=64)
    x = data.bell(233, "bfloat16", 600)
    x[448:512] *= x.dtype.type(100)
    yield common.lossy("bfloat16_short_blocks", x, codec, chunks=3)
    x = data.bell(234, "float32", 200)
    x[::3], x[1::5] = -0.0, -(2.0**-149)
    yield common.lossy("float32_minus_zeros", x, codec)


def make_parts(**params: Any) -> common.Parts:
    """Two chunks of 12 blocks, the last one of 46 elements, with 6 slots each.

    Cells to 768, the index to 770. Chunk 0 keeps blocks 3 and 11, chunk 1 block 0, whose elements
    lie in the same block of the tensor as the last of chunk 0, and which is all zeros.
    """
    x = np.zeros(1500, np.float32)
    x[[200, 749]] = 1, 2
    codec = tw.codec("omnireduce", block=64, **params)
    return common.Parts.of(codec.encode(x, chunks=2, backend="ref"))


def invalid() -> common.Invalid:
    """Step 9 of "Reading" for omnireduce, and omnireduce.md, "Checks"."""
    patched = functools.partial(common.with_bytes, make_parts)
    wrong = {
        "budget_0": (0, b"\0"),
        "budget_513": (0, b"\1\2"),
        "other_budget": (0, b"\x40"),
        "block_32": (2, b"\5"),
        "block_8192": (2, b"\x0d"),
        "values_3": (3, b"\3"),
        "parameters_reserved": (4, b"\1"),
    }
    bad = {
        "cell_behind_the_end": patched(0, 2 * (64 + 46), b"\1"),
        "cell_of_no_block": patched(1, 2 * 64, b"\1"),
        "minus_zero_of_no_block": patched(1, 767, b"\x80"),
        "index_behind_the_end": patched(1, 769, b"\x10"),
        "7_blocks": patched(1, 768, b"\x7f"),
    }
    padding = {"padding_of_index": patched(0, 770, b"\1")}
    return common.named(
        "omnireduce",
        common.headers(make_parts, wrong, small=20),
        common.refused("bad_payload", bad),
        common.refused("reserved_not_zero", padding),
    )
