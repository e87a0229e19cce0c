"""Small floats of block formats: rounding, decoding and packing of element codes, in NumPy.

The element types of the OCP Microscaling Formats (MX) specification v1.0, section 5.3. Everything
works on the bits of float32 values as integers; specs/mx.md, "Elements", says what comes out.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...formats.dtypes import DType
from .base import Bits, Bytes

Words = npt.NDArray[np.uint32]

#: Dtypes whose values float32 holds exactly.
WIDENED = ("float16", "bfloat16", "float32")
INFINITY = 0x7F800000
NAN = 0x7FC00000


class Element(NamedTuple):
    """An element type: code `c` without its sign stands for m(c) * 2^(e(c) - bias - mantissa).

    e(c) is the exponent field, 1 if that is 0, and m(c) the mantissa with its hidden bit.
    `largest` is the code of the largest finite value. In int8, sign and code are two's complement.
    """

    name: str
    bits: int
    mantissa: int
    bias: int
    largest: int
    #: First code that is infinity, and first that is NaN; 256 where there is none.
    infinity: int = 256
    nan: int = 256

    @property
    def emax(self) -> int:
        """Exponent of the largest value."""
        return (self.largest >> self.mantissa) - self.bias

    @property
    def max_fraction(self) -> int:
        """Mantissa of the largest value as 23 bits."""
        return (self.largest & ((1 << self.mantissa) - 1)) << (23 - self.mantissa)

    @property
    def sign(self) -> int:
        """The sign bit."""
        return 1 << (self.bits - 1)

    @property
    def is_integer(self) -> bool:
        """True for int8."""
        return self.name == "int8"


#: In the order of their numbers in specs/mx.md.
ELEMENTS = (
    Element("e4m3", 8, 3, 7, 0x7E, nan=0x7F),
    Element("e5m2", 8, 2, 15, 0x7B, infinity=0x7C, nan=0x7D),
    Element("e3m2", 6, 2, 3, 31),
    Element("e2m3", 6, 3, 1, 31),
    Element("e2m1", 4, 1, 1, 7),
    Element("int8", 8, 6, 1, 127),
)
BY_NAME = {e.name: e for e in ELEMENTS}

FLT_MAX = np.float32(np.finfo(np.float32).max)
#: 2^-128: what is not above it has no reciprocal in float32.
NO_RECIPROCAL = np.float32(2.0**-128)
#: The largest E4M3 scale times the largest E2M1 element, and the reciprocal of the latter.
E4M3_E2M1_RANGE = np.float32(448 * 6)
SIXTH = np.float32(1 / 6)


def payload_nbytes(element: Element, nelem: int) -> int:
    """Bytes of `nelem` packed codes."""
    return -(-nelem * element.bits // 8)


def widen(bits: Bits, dtype: DType) -> Words:
    """float32 bits of elements of one of the `WIDENED` dtypes."""
    if dtype.name == "bfloat16":
        return bits.astype(np.uint32) << np.uint32(16)
    if dtype.name == "float16":
        return bits.view(np.float16).astype(np.float32).view(np.uint32)
    return bits


def narrow(words: Words, dtype: DType) -> Bits:
    """Bits of float32 values rounded to nearest even; every NaN is the quiet, positive one."""
    nan = (words & 0x7FFFFFFF) > INFINITY
    words = np.where(nan, np.uint32(NAN), words)
    if dtype.name == "bfloat16":
        low = np.uint32(0x7FFF) + (words >> np.uint32(16) & np.uint32(1))
        rounded = np.where(nan, words, words + low)
        return (rounded >> np.uint32(16)).astype(np.uint16)
    if dtype.name == "float16":
        with np.errstate(over="ignore"):
            return words.view(np.float32).astype(np.float16).view(np.uint16)
    return words


def largest_number(dtype: DType) -> float:
    """The largest finite number of a dtype."""
    return float(2.0 ** ((1 << dtype.exponent - 1) - 1) * (2 - 2.0**-dtype.mantissa))


def narrow_clipped(y: npt.NDArray[np.float32], dtype: DType) -> Bits:
    """`y` limited to the finite range of `dtype` and rounded to it, as bits."""
    top = dtype.bits.type((((1 << dtype.exponent) - 1) << dtype.mantissa) - 1)
    if dtype.name == "float32":
        return np.clip(y, -top.view(np.float32), top.view(np.float32)).view(np.uint32)
    if dtype.name == "float16":
        return np.clip(y, np.float32(-65504), np.float32(65504)).astype(np.float16).view(np.uint16)
    largest = np.uint32(int(top) << 16).view(np.float32)
    b = np.clip(y, -largest, largest).view(np.uint32)
    rounded = (b + np.uint32(0x7FFF) + (b >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return rounded.astype(np.uint16)


def split(magnitudes: Words) -> tuple[npt.NDArray[np.int32], Words]:
    """Exponent fields as if there were no smallest one, and mantissas, 23 bits, without sign."""
    subnormal = magnitudes.astype(np.float32).view(np.int32) - np.int32(149 << 23)
    normal = magnitudes.view(np.int32)
    both = np.where(magnitudes < np.uint32(1 << 23), subnormal, normal)
    return both >> 23, (both & 0x7FFFFF).view(np.uint32)


def round_codes(words: Words, scales: npt.NDArray[np.int32] | int, element: Element) -> Bytes:
    """Codes of values divided by 2^(scale - 127), to nearest even, saturating; signs kept.

    `scales` broadcasts with `words`, the bits of float32 values none of which is a NaN.
    """
    magnitudes = words & np.uint32(0x7FFFFFFF)
    exponents, fractions = split(magnitudes)
    above = exponents - np.asarray(scales, np.int32) + np.int32(element.bias - 1)
    shift = np.minimum(23 - element.mantissa - np.minimum(above, 0), 25).astype(np.uint32)
    significands = fractions | np.uint32(1 << 23)
    one = np.uint32(1)
    half = (one << (shift - one)) - one + (significands >> shift & one)
    codes = (significands + half >> shift).astype(np.int64)
    codes += np.maximum(above, 0).astype(np.int64) << element.mantissa
    codes = np.minimum(codes, element.largest)
    codes = np.where(magnitudes == INFINITY, element.largest, codes)
    negative = words >> np.uint32(31) != 0
    if element.is_integer:
        codes = np.where(negative, -codes, codes)
    else:
        codes |= np.where(negative, element.sign, 0)
    return (codes & 0xFF).astype(np.uint8)


def values_of(element: Element) -> npt.NDArray[np.float64]:
    """The value of every code, float64, shape (2^bits,), infinities and NaN included."""
    codes = np.arange(1 << element.bits)
    negative = codes >= element.sign
    if element.is_integer:
        return np.where(negative, codes - 256, codes) / 64.0
    codes = codes & (element.sign - 1)
    fields, fractions = codes >> element.mantissa, codes & ((1 << element.mantissa) - 1)
    fractions = fractions | np.where(fields > 0, 1 << element.mantissa, 0)
    values = np.ldexp(
        fractions.astype(np.float64), np.maximum(fields, 1) - element.bias - element.mantissa
    )
    values[codes >= element.infinity] = np.inf
    values[codes >= element.nan] = np.nan
    signed: npt.NDArray[np.float64] = np.copysign(values, np.where(negative, -1.0, 1.0))
    return signed


def pack(codes: Bytes, element: Element) -> Bytes:
    """Codes as a little-endian bit stream, padded with zeros to whole bytes."""
    if element.bits == 8:
        return codes
    group = 8 // np.gcd(element.bits, 8)
    padded = np.zeros(-(-codes.size // group) * group, np.uint32)
    padded[: codes.size] = codes
    shifts = np.arange(group, dtype=np.uint32) * np.uint32(element.bits)
    words = np.bitwise_or.reduce(padded.reshape(-1, group) << shifts, axis=1).astype("<u4")
    nbytes = group * element.bits // 8
    streams = words.view(np.uint8).reshape(-1, 4)[:, :nbytes]
    stream: Bytes = streams.reshape(-1)[: payload_nbytes(element, codes.size)]
    return stream


def unpack(payload: Bytes, element: Element, start: int, stop: int) -> Bytes:
    """Codes number `start` to `stop` of a packed stream."""
    if element.bits == 8:
        codes: Bytes = payload[start:stop]
        return codes
    at = np.arange(start, stop, dtype=np.int64) * element.bits
    low = payload[at >> 3].astype(np.uint32)
    high = payload[np.minimum((at >> 3) + 1, payload.size - 1)].astype(np.uint32)
    both = (low | high << np.uint32(8)) >> (at & 7).astype(np.uint32)
    found: Bytes = (both & np.uint32((1 << element.bits) - 1)).astype(np.uint8)
    return found
