"""Data that all tests share."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tightwire.formats.dtypes import BY_NAME, DType

FLOATS = [d.name for d in BY_NAME.values() if d.is_float]
PATTERNS = ("normal", "zero", "one_hot", "special", "random", "mixed_zeros", "scales")


def make_bits(pattern: str, dtype: DType, n: int, seed: int = 0) -> npt.NDArray[Any]:
    """Element bits, shape (n,), of a named pattern; every pattern is deterministic."""
    rng = np.random.default_rng([seed, n, dtype.id])
    if pattern == "random" or not dtype.is_float:
        data = rng.integers(0, 256, n * dtype.itemsize, dtype=np.uint8)
        if dtype.name == "bool":
            data &= 1
        return data.view(dtype.bits)
    values = np.zeros(n)
    if pattern == "one_hot":
        values[n // 2 : n // 2 + 1] = 1.0
    elif pattern != "zero":
        values = rng.standard_normal(n) * (16.0 if dtype.itemsize == 1 else 0.02)
    if pattern == "mixed_zeros":
        values[rng.random(n) < 0.65] = 0.0
    if pattern == "scales":
        values *= 2.0 ** (np.arange(n) // 700 % 5 - 2)
    bits: npt.NDArray[Any] = values.astype(dtype.numpy).view(dtype.bits)
    if pattern == "special":
        top = (1 << dtype.exponent) - 1 << dtype.mantissa
        sign = 1 << 8 * dtype.itemsize - 1
        chosen = np.array([0, sign, 1, sign | 1, top, sign | top, top | 1, sign | top | 1, top - 1])
        at = np.flatnonzero(rng.random(n) < 0.2)
        bits[at] = chosen[rng.integers(0, chosen.size, at.size)].astype(dtype.bits)
    return bits
