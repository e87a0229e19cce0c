"""Data that encoders get: raw words of PCG64 and exact float64 arithmetic.

No NumPy release may change either.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from tightwire.formats.dtypes import BY_NAME

Array = npt.NDArray[Any]


#: What lossy codecs take.
LOSSY_DTYPES = ("bfloat16", "float16", "float32")


def random_words(seed: int, n: int) -> npt.NDArray[np.uint64]:
    """`n` random 64-bit words."""
    return np.asarray(np.random.PCG64(seed).random_raw(n), np.uint64)


def random_bits(seed: int, dtype: str, shape: tuple[int, ...]) -> Array:
    """An array whose bits are random; bool is 0 or 1."""
    d = BY_NAME[dtype]
    nbytes = math.prod(shape) * d.itemsize
    data = random_words(seed, -(-nbytes // 8)).view(np.uint8)[:nbytes]
    x: Array = (data & 1 if dtype == "bool" else data).view(d.numpy)
    return x.reshape(shape)


def bell(seed: int, dtype: str, n: int) -> Array:
    """`n` values that are spread nearly as a normal distribution, standard deviation about 1.8."""
    words = random_words(seed, 2 * n).astype("<u8")
    shape = words[:n].view("<u2").reshape(n, 4).sum(axis=1, dtype=np.int64) - 131070
    values: Array = shape / 32768 * (1 + words[n:] / 2.0**64)
    return values if dtype == "float64" else narrowed(values, dtype)


def narrowed(x: Array, dtype: str) -> Array:
    """The values rounded to float32, then to the dtype."""
    single: Array = x.astype(np.float32)
    return single.astype(BY_NAME[dtype].numpy)


def bits_of(x: Array) -> Array:
    """The elements as unsigned integers, a view."""
    return x.view(f"<u{x.itemsize}")


def specials(dtype: str, n: int) -> Array:
    """Values with both zeros, subnormals, infinities, NaN payloads and extremes in between."""
    d = BY_NAME[dtype]
    one, top = 1 << d.mantissa, ((1 << d.exponent) - 1) << d.mantissa
    magnitudes = [0, 1, one - 1, one, one | 1, top - 1, top, top | 1, top | one >> 1, top | one - 1]
    sign = 1 << 8 * d.itemsize - 1
    x = bell(7, dtype, n)
    patterns = np.array([m | s for m in magnitudes for s in (0, sign)], bits_of(x).dtype)
    bits_of(x)[::37] = np.resize(patterns, -(-n // 37))
    return x


def with_zeros(seed: int, dtype: str, n: int) -> Array:
    """Values of which about five in eight are exact zeros, some of them negative."""
    x = bell(seed, dtype, n)
    words = random_words(seed + 1, n)
    bits_of(x)[words % 8 < 5] = 0
    bits_of(x)[words % 64 == 7] = 1 << 8 * x.itemsize - 1
    return x


def scaled_blocks(seed: int, dtype: str, n: int) -> Array:
    """Blocks of 32 at scales over the dtype's range; the first ones are special."""
    d = BY_NAME[dtype]
    low, high = (-24, 15) if dtype == "float16" else (-140, 127)
    exponents = low + np.arange(n) // 32 * 37 % (high - low)
    x = narrowed(np.ldexp(bell(seed, "float64", n), exponents), dtype)
    bits, sign = bits_of(x), 1 << 8 * d.itemsize - 1
    infinity = ((1 << d.exponent) - 1) << d.mantissa
    bits[32:64] = 0
    bits[40] = sign
    bits[70] = infinity | 1
    bits[100] = sign | infinity
    bits[128:160] = np.arange(32) * 3 + (np.arange(32) % 2) * sign
    bits[160:192] = infinity - 1 - np.arange(32)
    bits[192:224] = sign | (bits_of(np.ones(1, d.numpy)) + (np.arange(32) << d.mantissa - 5))
    return x


def scaled_super_groups(seed: int, dtype: str, n: int) -> Array:
    """Values whose scale is another one at every 128 elements, some of which are zeros."""
    powers = random_words(seed + 1, -(-n // 128)).astype("<i8") % 9
    x = np.ldexp(bell(seed, "float64", n), np.repeat(powers - 6, 128)[:n])
    x[np.arange(n) // 128 % 7 == 3] = 0
    return narrowed(x, dtype)
