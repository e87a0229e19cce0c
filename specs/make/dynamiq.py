"""dynamiq.md."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

import tightwire as tw
from tightwire.formats.dtypes import BY_NAME

from . import common, data

PARAMS: dict[str, dict[str, Any]] = {
    "5": {},
    "pow2": {"widths": "pow2", "grid": "signed"},
    "paper": {"widths": "pow2", "grid": "signed", "scales": "stochastic"},
    "fixed_uniform": {"widths": "fixed", "grid": "uniform", "rounding": "stochastic"},
    "wide": {"scales": "wide", "group": 32, "rounding": "nearest"},
    "8": {"bits": 8, "super_group": 512, "group": 8},
    "3": {"bits": 3, "super_group": 128, "grid": "signed"},
    "center": {"bits": 4.0625, "center": True, "super_group": 1024, "group": 64},
    "wide_center": {"scales": "wide", "center": True, "group": 64, "widths": "fixed"},
}


def permuted(seed: int, x: data.Array) -> data.Array:
    """The elements of `x` in another order."""
    return x[np.argsort(data.random_words(seed, x.size), kind="stable")]


def valid() -> common.Vectors:
    """Vectors of codec dynamiq: buffer, decoded tensor, encoded tensor."""

    def coded(
        name: str, x: data.Array, params: dict[str, Any], **options: Any
    ) -> common.LossyVector:
        codec = tw.codec("dynamiq", **params)
        return common.lossy(f"{x.dtype.name}_{name}", x, codec, key=common.KEY, **options)

    turns = np.resize(np.array([1.0, -1.0], np.float32), 512).astype(BY_NAME["bfloat16"].numpy)
    params = {"widths": "fixed", "grid": "signed", "rounding": "nearest"}
    yield coded("512_fixed", turns, params)
    for i, (name, params) in enumerate(PARAMS.items()):
        yield coded(
            name, data.scaled_super_groups(150 + i, data.LOSSY_DTYPES[i % 3], 3500 + i), params
        )
    small = {"super_group": 128, "group": 16}
    for i, dtype in enumerate(data.LOSSY_DTYPES):
        yield coded("specials", data.specials(dtype, 1500), small)
        # Some are infinite, and their super-groups lost.
        with np.errstate(over="ignore"):
            blocks = data.scaled_blocks(160 + i, dtype, 1701)
        yield coded("scaled", blocks, small)
        yield coded("random_bits", data.random_bits(163, dtype, (3, 511)), small)
        yield coded("zeros", data.with_zeros(164, dtype, 900), {"grid": "signed"})
        yield coded("flat", data.bell(165 + i, dtype, 2000), {})
    huge = np.ldexp(data.bell(168, "float32", 2000), 125).astype(np.float32)
    yield coded("huge", huge, {"center": True})
    yield coded("huge_wide", huge, {"scales": "wide", "group": 32})
    tiny = np.ldexp(data.bell(169, "float32", 4000), -80 - np.arange(4000) // 128).astype(
        np.float32
    )
    for scales in ("up", "stochastic", "wide"):
        yield coded(f"tiny_{scales}", tiny, {"scales": scales, "group": 64, "center": True})
    yield coded("offset", data.bell(170, "float32", 2100) + np.float32(40), {"center": True})
    x = data.scaled_super_groups(171, "bfloat16", 4001)
    yield coded("3_chunks", x, {}, chunks=3)
    yield coded("3_chunks_paper", x, PARAMS["paper"], chunks=3)
    yield coded("4_chunks_aligned", x[:2048].reshape(4, 512), {}, chunks=4)
    yield coded("no_checksum", x, {}, checksum=False)
    key = common.KEY._replace(world=8)
    yield common.lossy("bfloat16_of_8_ranks", x, tw.codec("dynamiq"), key=key, chunks=3)
    yield from rules()


def rules() -> common.Vectors:
    """dynamiq.md: strata of odd worlds, orders of sums, the last step up, lost super-groups."""

    def coded(
        name: str, x: data.Array, world: int = 1, chunks: int = 1, **params: Any
    ) -> common.LossyVector:
        codec, key = tw.codec("dynamiq", **params), common.KEY._replace(world=world)
        return common.lossy(f"{x.dtype.name}_{name}", x, codec, key=key, chunks=chunks)

    for i, world in enumerate((3, 5)):
        x = data.scaled_super_groups(235 + i, data.LOSSY_DTYPES[i], 700)
        yield coded(f"of_{world}_ranks", x, world)
    small: dict[str, Any] = {"super_group": 128, "rounding": "nearest"}
    values = data.bell(400, "float32", 128)
    x = np.concatenate([permuted(401 + i, values) for i in range(6)])
    yield coded("order_of_energies", x, **small)
    values = np.concatenate([values[:64], -values[:64]])
    x = np.concatenate([permuted(270 + i, values) for i in range(4)])[:-56]
    yield coded("order_of_means", x, center=True, **small)

    # Energies 255 and 7680: to 4 bits the one gains as much as the other to 8, for half the units.
    x = np.zeros((8, 128), BY_NAME["bfloat16"].numpy)
    x[[0, 2, 3, 4], :3], x[[0, 2, 3, 4], 3:66] = 1, 2
    x[1, :30] = 16
    yield coded("step_that_does_not_fit", x.reshape(-1), bits=3.5, widths="pow2", **small)
    for i, grid in enumerate(("balanced", "signed", "uniform")):
        yield all_codes(grid, data.LOSSY_DTYPES[i], 280 + 4 * i, center=i == 1)

    # Chunks of 258 elements, two super-groups, but for the last one, of 255.
    x = data.scaled_super_groups(292, "float32", 1287)
    yield coded("short_chunk", x, chunks=5, rounding="nearest")
    x = data.scaled_super_groups(294, "float32", 1501) + np.float32(3)
    x = x.astype(BY_NAME["bfloat16"].numpy)
    yield coded("3_chunks_center", x, chunks=3, **(small | {"center": True}))
    # A magnitude of 2^110 or none: the mean is 0 of the first two super-groups alone.
    x = np.resize(np.ldexp(np.float32(1), [110, 109]), 384).astype(np.float32)
    x[256:] /= 2
    params: dict[str, Any] = {"widths": "pow2", "grid": "uniform", "scales": "wide"}
    yield coded("center_limit", x, super_group=128, center=True, **params)


def all_codes(grid: str, dtype: str, seed: int, **params: Any) -> common.Vector:
    """Random codes of every width; super-group 5 is lost, whatever else it has."""
    n, size = 7, 128
    codec = tw.codec("dynamiq", bits=8, super_group=size, grid=grid, rounding="nearest", **params)
    spec: Any = codec.spec
    x = np.ones(n * size, BY_NAME[dtype].numpy)
    parts = common.Parts.of(codec.encode(x, backend="ref"))
    payload, scales, _ = (s.nbytes for s in parts.header.sections)
    widths = [2 + 3 * j % 7 for j in range(n)]
    codes = data.random_bits(seed, "uint8", (sum(widths) * size // 8,)).tobytes()
    common.put(parts, 0, 0, codes.ljust(payload, b"\0"))
    pairs = zip(widths[0::2], [*widths[1::2], 0], strict=True)
    common.put(parts, 0, payload + scales, bytes(low | high << 4 for low, high in pairs))
    words = (data.random_words(seed + 1, n) % (8 << 7) + (122 << 7)).astype("<u2")
    words[3], words[5] = 0, 0x7FC0
    means = (data.random_words(seed + 2, n) % (4 << 7) + (122 << 7)).astype("<u2")
    fractions = data.random_bits(seed + 3, "uint8", (n * size // spec.group,))
    kept = [words, means, fractions] if spec.center else [words, fractions]
    common.put(parts, 0, payload, b"".join(part.tobytes() for part in kept))
    return common.decoded(f"dynamiq/{dtype}_{grid}_all_codes", parts.join())


def make_parts(**params: Any) -> common.Parts:
    """Two chunks of 1501 and 1500 elements, 6 super-groups each; number 2 of chunk 0 is lost.

    Payload has 832 bytes in use of 896, scales 108 at 896, the index 3 at 1024.
    """
    x = data.scaled_super_groups(172, "bfloat16", 3001)
    data.bits_of(x)[600] = 0x7F80
    codec = tw.codec("dynamiq", **params)
    return common.Parts.of(codec.encode(x, chunks=2, key=common.KEY, backend="ref"))


def invalid() -> common.Invalid:
    """Step 9 of "Reading" for dynamiq, and dynamiq.md, "Checks"."""
    patched = functools.partial(common.with_bytes, make_parts)
    wrong = {
        "budget_47": (0, b"\x2f"),
        "budget_129": (0, b"\x81"),
        "other_budget": (0, b"\x60"),
        "group_4": (1, b"\2"),
        "group_128": (1, b"\7"),
        "super_group_64": (2, b"\6"),
        "super_group_2_255": (2, b"\xff"),
        "widths_3": (3, b"\3"),
        "grid_3": (4, b"\3"),
        "scales_3": (5, b"\3"),
        "rounding_3": (6, b"\3"),
        "center_2": (7, b"\2"),
        "budget_too_small": (0, b"\x30\3"),
    }
    fixed, pow2, wide = {"widths": "fixed"}, {"widths": "pow2"}, {"scales": "wide", "group": 64}
    bad = {
        "width_0": patched(0, 1024, b"\x20"),
        "width_1": patched(0, 1024, b"\x21"),
        "width_9": patched(1, 1026, b"\x92"),
        "widths_above_the_budget": patched(0, 1024, b"\x88\x88\x88"),
        "width_5_pow2": patched(0, 1024, b"\x25\x22\x22", **pow2),
        "width_2_fixed": patched(0, 1024, b"\x24\x44\x44", **fixed),
        "rows_without_a_use": patched(0, 1024, b"\x22\x22\x22"),
        "row_behind_fixed": patched(0, 6 * 4 * 32, b"\1", **fixed),
        "scale_infinite": patched(0, 896, b"\x80\x7f"),
        "scale_other_nan": patched(0, 900, b"\xc1\x7f"),
        "scale_negative": patched(1, 898, b"\x80\xbf"),
        "scale_minus_zero": patched(1, 898, b"\0\x80"),
        "scale_too_small": patched(1, 906, b"\x7f\x0d"),
        "mean_infinite": patched(0, 896 + 12, b"\x80\x7f", center=True),
        "mean_nan": patched(0, 896 + 16, b"\xc0\xff", center=True),
        "part_of_wide_lost": patched(0, 896, b"\xc0\x7f", **wide),
    }
    padding = {
        "padding_of_payload": patched(0, 26 * 32, b"\1"),
        "padding_of_scales": patched(1, 896 + 108, b"\x80"),
        "padding_of_index": patched(1, 1024 + 3, b"\1"),
    }
    return common.named(
        "dynamiq",
        common.headers(make_parts, wrong, grown=1),
        common.refused("bad_payload", bad),
        common.refused("reserved_not_zero", padding),
    )
