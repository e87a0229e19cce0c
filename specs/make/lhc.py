"""lhc.md."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

import tightwire as tw
from tightwire.formats.dtypes import BY_NAME

from . import common, data


def sparse(seed: int, dtype: str, n: int, one_in: int) -> data.Array:
    """One element in so many, on average, is not zero; some are special."""
    x = np.zeros(n, BY_NAME[dtype].numpy)
    words = data.random_words(seed, n)
    chosen = words % one_in == 0
    x[chosen] = data.bell(seed + 1, dtype, n)[chosen]
    odd = chosen & (words // one_in % 50 == 0)
    data.bits_of(x)[odd] = data.bits_of(data.random_bits(seed + 2, dtype, (n,)))[odd]
    return x


def valid() -> common.Vectors:
    """Vectors of codec lhc: buffer, decoded tensor, encoded tensor."""
    coded = common.coder("lhc", "ratio", "sketch", "mapping")
    example = np.zeros(2048, np.float32)
    example[[0, 1023, 1029]] = 1.5, -2, 3
    yield coded("example", example, ratio=2)
    for i, dtype in enumerate(data.LOSSY_DTYPES):
        x = sparse(150 + 10 * i, dtype, 8 * 1024, 6)
        yield coded("peeled", x)
        yield coded("estimated", sparse(153 + 10 * i, dtype, 6 * 1024, 3), ratio=3)
        yield coded("published", x[: 5 * 1024], mapping="published", ratio=2.5)
    x = sparse(180, "float32", 9999, 7)
    for cells in ("bfloat16", "float16"):
        yield coded(f"in_{cells}", x, sketch=cells)
    yield coded("dense_in_float16", x[x != 0].repeat(3), sketch="float16", ratio=1.5)
    narrow = sparse(183, "bfloat16", 10000, 12)
    yield coded("in_float32", narrow, sketch="float32", ratio=5)
    yield coded("3_chunks", x, chunks=3, ratio=2)
    yield coded("tail", x[: 4 * 1024 + 1])
    yield coded("zeros", np.zeros((3, 1024), np.float32))
    yield coded("no_checksum", narrow.reshape(100, 100), checksum=False)
    yield from rules()


def rules() -> common.Vectors:
    """lhc.md: sums; an element of the index may be -0 on a rank."""
    xs = []
    for i in range(4):
        chosen = data.random_words(300 + 2 * i, 2000) % 40 == 0
        xs.append(np.where(chosen, data.bell(301 + 2 * i, "float16", 2000), np.float16(0)))
    xs[0][xs[1] != 0] = -0.0
    yield common.summed("4", tw.codec("lhc", ratio=2), xs)


def make_parts(nelem: int = 3 * 1024 + 3, **params: Any) -> common.Parts:
    """A chunk of 4 rows and a sketch of one row: cells to 4096, index to 4481, padding to 4608."""
    x = np.zeros(nelem, np.float32)
    x[:5] = 1, 2, 3, 4, 5
    return common.Parts.of(tw.codec("lhc", **params).encode(x, backend="ref"))


def invalid() -> common.Invalid:
    """Step 9 of "Reading" for lhc, and lhc.md, "Checks"."""
    patched = functools.partial(common.with_bytes, make_parts, 0)
    wrong = {
        "ratio_1": (0, (1000).to_bytes(4, "little")),
        "ratio_1001": (0, (1000001).to_bytes(4, "little")),
        "other_ratio": (0, (2000).to_bytes(4, "little")),
        "cells_4": (4, b"\4"),
        "other_cells": (4, b"\2"),
        "mapping_2": (5, b"\2"),
        "parameters_reserved": (6, b"\1"),
        "parameters_end": (7, b"\1"),
    }
    # The five cells are 222 to 226, their elements' first.
    bad = {
        "cell_of_nobody": patched(4 * 221, b"\1"),
        "minus_zero_of_nobody": patched(4 * 227 + 3, b"\x80"),
        "second_cell": patched(4 * 813, b"\0\0\x80\x3f"),
        "element_missing_in_index": patched(4096, b"\x1e"),
        "index_behind_the_end": patched(4096 + 384, b"\x08"),
    }
    padding = {"padding_of_index": patched(4096 + 385, b"\1")}
    return common.named(
        "lhc",
        common.headers(make_parts, wrong, small=1024),
        common.refused("bad_payload", bad),
        common.refused("reserved_not_zero", padding),
    )
