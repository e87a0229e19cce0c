"""Floating-point numbers: from bits, to bits, and in single precision."""

import math
import struct

from .common import Dtype


def float_bits(value: float, dtype: Dtype) -> int:
    """The bits of the nearest value of a dtype, ties to even; NaN is quiet and positive."""
    bias = (1 << dtype.exponent - 1) - 1
    infinity = ((1 << dtype.exponent) - 1) << dtype.mantissa
    if math.isnan(value):
        return infinity + (1 << dtype.mantissa - 1)
    magnitude = infinity
    if math.isfinite(value):
        exponent = max(math.frexp(value)[1] - 1, 1 - bias) if value else 1 - bias
        steps = round(math.ldexp(abs(value), dtype.mantissa - exponent))
        magnitude = min(((exponent + bias - 1) << dtype.mantissa) + steps, infinity)
    sign = math.copysign(1.0, value) < 0
    return magnitude + (sign << 8 * dtype.nbytes - 1)


def stored(value: float, dtype: Dtype) -> bytes:
    """The bytes of the nearest value of a dtype."""
    return float_bits(value, dtype).to_bytes(dtype.nbytes, "little")


def limited(value: float, dtype: Dtype) -> bytes:
    """As `stored`, of a number that is limited to the finite values of the dtype before."""
    largest = math.ldexp(2 - 2.0**-dtype.mantissa, (1 << dtype.exponent - 1) - 1)
    return stored(max(-largest, min(largest, value)), dtype)


# The pages, "Arithmetic": one float64 operation on float32 numbers, then f32().


def f32(x: float) -> float:
    """Round to single precision."""
    try:
        return float(struct.unpack("<f", struct.pack("<f", x))[0])
    except OverflowError:
        return math.copysign(math.inf, x)


def float_of_bits(bits: int) -> float:
    """The float32 of these bits."""
    return float(struct.unpack("<f", bits.to_bytes(4, "little"))[0])


def rotate(v: list[float]) -> None:
    """The Walsh-Hadamard transform of a block in place."""
    h = 1
    while h < len(v):
        for i in range(len(v)):
            if i // h % 2 == 0:
                v[i], v[i + h] = f32(v[i] + v[i + h]), f32(v[i] - v[i + h])
        h *= 2
