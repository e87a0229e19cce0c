"""tahquant.md."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

import tightwire as tw
from tightwire.formats.dtypes import BY_NAME

from . import common, data


def activations(seed: int, dtype: str, shape: tuple[int, ...]) -> data.Array:
    """Tokens of unlike entropy, with an outlier here and there."""
    nelem = math.prod(shape)
    powers = np.abs(data.bell(seed, "float32", nelem)).reshape(shape)
    x = data.bell(seed + 1, "float32", nelem).reshape(shape)
    tokens = np.arange(nelem // shape[-1]).reshape(shape[:-1])
    for k in range(1, 4):
        x[tokens % 4 >= k] *= powers[tokens % 4 >= k]
    x.reshape(-1)[data.random_words(seed, nelem) % 150 == 0] *= 20
    return x.astype(BY_NAME[dtype].numpy)


def valid() -> common.Vectors:
    """Vectors of codec tahquant: buffer, decoded tensor, encoded tensor."""
    coded = common.coder("tahquant", "direction", "hidden")
    ramp = np.resize(np.arange(16, dtype=np.float32), (1, 1024))
    yield coded("ramp", ramp.astype(BY_NAME["bfloat16"].numpy))
    for i, dtype in enumerate(data.LOSSY_DTYPES):
        x = activations(120 + i, dtype, (12, 128))
        yield coded("tokens", x)
        yield coded("backward", x, direction="backward")
        yield coded("short_tiles", activations(130 + i, dtype, (3, 7, 100)))
        yield coded("specials", data.specials(dtype, 1500).reshape(15, 100))
        yield coded("random_bits", data.random_bits(140, dtype, (11, 192)), hidden=64)
        yield coded("zeros", data.with_zeros(141, dtype, 1200).reshape(10, 120))
    x = activations(142, "bfloat16", (2000,))
    yield coded("one_token", x)
    yield coded("short_last_token", x, hidden=190)
    yield coded("3_chunks", x.reshape(20, 100), chunks=3)
    yield coded("4_chunks_of_tokens", x, hidden=100, chunks=4)
    yield coded("backward_3_chunks", x.reshape(50, 40), chunks=3, direction="backward")
    yield coded("no_checksum", x.reshape(10, 200), checksum=False)
    wide = activations(143, "float32", (12, 100))
    for name, power in (("huge", 13), ("small", -18), ("lost", 40), ("subnormal", -140)):
        yield coded(name, np.ldexp(wide, power - np.arange(100) // 25).astype(np.float32))
    yield coded("equal_tokens", np.tile(wide[0], (12, 1)))
    yield from rules()


def rules() -> common.Vectors:
    """tahquant.md: how lg rounds; the least value of a tile is never -0."""
    x = data.bell(928, "float32", 320).reshape(20, 16)
    yield common.lossy("float32_close_entropies", x, tw.codec("tahquant"))
    x = data.bell(290, "float16", 640).reshape(5, 128)
    x[0], x[1, ::2], x[1, 1::2] = -0.0, 0.0, -0.0
    x[2:4] = np.abs(x[2:4])
    x[2:, ::3] = -0.0
    yield common.lossy("float16_minus_zeros", x, tw.codec("tahquant"))
    backward = tw.codec("tahquant", direction="backward")
    yield common.lossy("float16_backward_minus_zeros", x, backward)


def make_parts(**params: Any) -> common.Parts:
    """Two chunks of 7 tokens of 144 elements, 3 tiles each, the last one short; one is narrow.

    In a chunk of 21 tiles, words lie at 768, pivots at 852 to 873, the index is at 896.
    """
    x = activations(144, "bfloat16", (14, 144))
    return common.Parts.of(tw.codec("tahquant", **params).encode(x, chunks=2, backend="ref"))


def invalid() -> common.Invalid:
    """Step 9 of "Reading" for tahquant, and tahquant.md, "Checks"."""
    index = make_parts().static[0][896]
    free = (index ^ 0x7F) & -(index ^ 0x7F)

    patched = functools.partial(common.with_bytes, make_parts)
    wrong = {
        "direction_2": (0, b"\2"),
        "other_direction": (0, b"\1"),
        "parameters_reserved": (1, b"\1"),
        "parameters_end": (7, b"\1"),
        "hidden_0": (8, bytes(8)),
        "hidden_2_63": (8, (1 << 63).to_bytes(8, "little")),
        "hidden_1": (8, (1).to_bytes(8, "little")),
        "hidden_64": (8, (64).to_bytes(8, "little")),
    }
    bad = {
        "no_narrow_token": patched(0, 896, b"\0"),
        "two_narrow_tokens": patched(0, 896, bytes([index | free])),
        "narrow_token_behind_the_last": patched(1, 896, b"\x80"),
        "least_infinite": patched(0, 768, b"\0\x7c\0\x3c"),
        "least_nan": patched(0, 772, b"\0\x7e\0\x3c"),
        "least_minus_infinity": patched(1, 768 + 80, b"\0\xfc\0\x3c"),
        "step_infinite": patched(0, 768, b"\0\0\0\x7c"),
        "step_negative": patched(1, 780, b"\0\0\0\x80"),
        "step_lost": patched(0, 768, b"\0\0\0\x7e"),
        "backward_step_nan": patched(0, 896, b"\0\0\1\x7c", direction="backward"),
        "pivot_1": patched(0, 852, b"\1"),
        "pivot_64": patched(0, 860, b"\x40"),
        "pivot_192": patched(1, 872, b"\xc0"),
    }
    padding = {
        "padding_of_payload": patched(0, 8 * (4 * 21 - 3), b"\1"),
        "padding_of_scales": patched(1, 873, b"\x80"),
        "padding_of_index": patched(1, 897, b"\1"),
    }
    return common.named(
        "tahquant",
        common.headers(make_parts, wrong, grown=1),
        common.refused("bad_payload", bad),
        common.refused("reserved_not_zero", padding),
    )
