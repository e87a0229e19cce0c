# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Numba forms of codecs/common/minifloat.py, for tiles of `LANES` elements.

Loops have that constant length and every operand is cast: that is the form LLVM vectorises. Where a
code is rounded, a float addition does it: values and sums are normal there, so the sum is the
same in every mode of the processor that rounds to nearest.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numba import types
from numba.extending import intrinsic

from ...formats.dtypes import DType
from .arrays_cpu import view_as
from .compile_cache import part
from .minifloat import INFINITY, NAN, Element, values_of

U1, U2, U4 = np.uint8, np.uint16, np.uint32
I4, I8 = np.int32, np.int64
_SIGN, _MAGNITUDE, _HIDDEN = U4(1 << 31), U4((1 << 31) - 1), U4(1 << 23)
_EXPONENT = I4(INFINITY)
#: Of codes that are zero: a float32 exponent below that of every other value.
_ZERO = I4(-(100 << 23))
#: 2^-63, which rounds to zero in every format, as its float32 bits.
_TINY = I4(64 << 23)
#: 2^23, beyond float16, as its float32 bits.
_TALL = I4(150 << 23)
#: Elements of the tiles that these functions take.
LANES = 256


@intrinsic
def _bits_of(typingctx, x):
    """The bits of a float32 as int32."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], context.get_value_type(types.int32))

    return types.int32(types.float32), codegen


@intrinsic
def float_of(typingctx, x):
    """The float32 with these bits, an int32."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], context.get_value_type(types.float32))

    return types.float32(types.int32), codegen


@cache
def value_table(element: Element):
    """Code to float32 bits of its magnitude, int32, shape (256,), for `decode_codes`."""
    values = np.abs(values_of(element)).astype(np.float32)
    table = values.view(np.int32).copy()
    table[values == 0] = _ZERO
    return np.resize(table, 256)


def first_special(element: Element):
    """First codes, without sign, of infinity and NaN; 255 where there are none."""
    return min(element.infinity, element.nan, 255), min(element.nan, 255)


def kind_of(dtype: DType) -> int:
    """How `widen` and `decode_codes` know a dtype."""
    return {"bfloat16": 0, "float16": 1, "float32": 2}[dtype.name]


# Factories take the numbers that decide what a loop does: a branch on one is decided before
# anything is compiled, and the code not taken costs nothing.


@cache
def widen_by(kind):
    """A function that widens elements of a dtype; see `kind_of`."""

    @part(nogil=True)
    def widen(x, words, floats):
        """float32 bits of the elements `x` to `words`; `floats` is float32 scratch."""
        if kind == 0:
            for i in range(LANES):
                words[i] = U4(U4(x[i]) << U4(16))
        elif kind == 1:
            for i in range(LANES):
                floats[i] = np.float32(U4(x[i]) & U4(0x7FFF)) * np.float32(2.0**-24)
            tiny = view_as(floats, np.uint32)
            for i in range(LANES):
                v = U4(x[i])
                h = U4(v & U4(0x7FFF))
                wide = U4(U4(h << U4(13)) + U4(112 << 23))
                wide = U4(wide + U4(112 << 23)) if h >= U4(0x7C00) else wide
                wide = tiny[i] if h < U4(0x400) else wide
                words[i] = U4(U4(U4(v & U4(0x8000)) << U4(16)) | wide)
        else:
            for i in range(LANES):
                words[i] = U4(x[i])

    return widen


_widen0, _widen1, _widen2 = widen_by(0), widen_by(1), widen_by(2)


@part(nogil=True)
def widen(x, kind, words, floats):
    """As a function of `widen_by`, for any dtype."""
    if kind == 0:
        _widen0(x, words, floats)
    elif kind == 1:
        _widen1(x, words, floats)
    else:
        _widen2(x, words, floats)


@part(nogil=True)
def split(magnitude):
    """Magnitude bits of one float32 as `minifloat.split` has them, in one word."""
    below = I4(_bits_of(np.float32(magnitude)) - I4(149 << 23))
    return below if magnitude < _HIDDEN else I4(magnitude)


def largest_magnitudes_by(block):
    """A function that puts the largest magnitude of each `block` words, as bits, into `tops`."""
    half, quarter = block // 2, block // 4

    @part(nogil=True)
    def largest_magnitudes(words, lanes, tops):
        for b in range(LANES // block):
            low = words[b * block : b * block + half]
            high = words[b * block + half : (b + 1) * block]
            for i in range(half):
                v, w = U4(low[i] & _MAGNITUDE), U4(high[i] & _MAGNITUDE)
                lanes[i] = v if v > w else w
            for i in range(quarter):
                v, w = lanes[i], lanes[i + quarter]
                lanes[i] = v if v > w else w
            top = lanes[0]
            for i in range(1, quarter):
                v = lanes[i]
                top = v if v > top else top
            tops[b] = top

    return largest_magnitudes


@part(nogil=True)
def round_code(part, mantissa, lowest):
    """Code of the magnitude whose float32 bits are `part`, of a format with unlimited exponents.

    `lowest` are the float32 bits of its smallest normal value.
    """
    part = part if part > _TINY else _TINY
    binade = I4(part & _EXPONENT)
    binade = binade if binade > lowest else lowest
    step = I4(binade + I4(I4(I4(23) - mantissa) << I4(23)))
    steps = I4(_bits_of(np.float32(float_of(part) + float_of(step))) - step)
    return I4(steps + I4(I4(binade - lowest) >> I4(I4(23) - mantissa)))


@cache
def round_codes_by(mantissa, bias, largest, bits, integer):
    """A function that rounds to the codes of a format."""
    m, lowest, top = I4(mantissa), I4((128 - bias) << 23), I4(largest)

    @part(nogil=True)
    def round_codes(words, offsets, found, codes):
        """Codes of `words` to `codes`; see `minifloat.round_codes`.

        `offsets` are (scale - 127) << 23, int32. Subnormal words have code 0; `round_small` does
        better where the scale is so small that it matters. `found` is int32 scratch.
        """
        for i in range(LANES):
            part = I4(words[i] & _MAGNITUDE)
            code = round_code(I4(part - offsets[i]), m, lowest)
            code = code if code < top else top
            found[i] = top if part == I4(INFINITY) else code
        if integer:
            for i in range(LANES):
                codes[i] = U1(I4(-found[i]) if words[i] >= _SIGN else found[i])
        else:
            for i in range(LANES):
                codes[i] = U1(U4(found[i]) | U4(U4(words[i] & _SIGN) >> U4(32 - bits)))

    return round_codes


@cache
def round_small_by(mantissa, bias, largest, bits, integer):
    """A function that rounds to the codes of a format at very small scales."""
    m, lowest, top, sign = I4(mantissa), I4((128 - bias) << 23), I4(largest), 1 << (bits - 1)

    @part(nogil=True, rare=True)
    def round_small(words, scale, codes):
        """As `round_codes`, of words of one scale, all of them finite."""
        for i in range(words.size):
            part = I4(split(U4(words[i] & _MAGNITUDE)) - I4((scale - 127) << 23))
            code = round_code(part, m, lowest)
            code = I8(code if code < top else top)
            if words[i] >= _SIGN:
                code = -code if integer else code | sign
            codes[i] = U1(code)

    return round_small


@cache
def pack_by(bits):
    """A function that packs codes of so many bits."""

    @part(nogil=True)
    def pack(codes, target):
        """Codes of a whole block to the bytes `target`."""
        if bits == 8:
            for i in range(LANES):
                target[i] = codes[i]
        elif bits == 4:
            for i in range(LANES // 2):
                target[i] = U1(codes[2 * i] | U1(codes[2 * i + 1] << U1(4)))
        else:
            for i in range(LANES // 4):
                a, b, c, d = codes[4 * i], codes[4 * i + 1], codes[4 * i + 2], codes[4 * i + 3]
                target[3 * i] = U1(a | U1(b << U1(6)))
                target[3 * i + 1] = U1(U1(b >> U1(2)) | U1(c << U1(4)))
                target[3 * i + 2] = U1(U1(c >> U1(4)) | U1(d << U1(2)))

    return pack


@cache
def unpack_by(bits):
    """A function that unpacks codes of so many bits."""

    @part(nogil=True)
    def unpack(source, codes):
        """Inverse of `pack`."""
        if bits == 8:
            for i in range(LANES):
                codes[i] = source[i]
        elif bits == 4:
            for i in range(LANES // 2):
                codes[2 * i] = U1(source[i] & U1(15))
                codes[2 * i + 1] = U1(source[i] >> U1(4))
        else:
            for i in range(LANES // 4):
                a, b, c = source[3 * i], source[3 * i + 1], source[3 * i + 2]
                codes[4 * i] = U1(a & U1(63))
                codes[4 * i + 1] = U1(U1(U1(a >> U1(6)) | U1(b << U1(2))) & U1(63))
                codes[4 * i + 2] = U1(U1(U1(b >> U1(4)) | U1(c << U1(4))) & U1(63))
                codes[4 * i + 3] = U1(c >> U1(2))

    return unpack


@cache
def narrow_by(kind):
    """A function that rounds to elements of a dtype; see `kind_of`."""

    @part(nogil=True)
    def narrow(words, out):
        """Elements nearest to float32 bits; see `minifloat.narrow`."""
        if kind == 2:
            for i in range(LANES):
                w = words[i]
                out[i] = U4(NAN) if U4(w & _MAGNITUDE) > U4(INFINITY) else w
        elif kind == 1:
            for i in range(LANES):
                w = words[i]
                part = I4(w & _MAGNITUDE)
                wide = round_code(part if part < _TALL else _TALL, I4(10), I4(113 << 23))
                found = U2(wide if wide < I4(0x7C00) else I4(0x7C00))
                found = U2(found | U2(U4(w >> U4(16)) & U4(0x8000)))
                out[i] = U2(0x7E00) if part > I4(INFINITY) else found
        else:
            for i in range(LANES):
                w = words[i]
                found = U2(U4(w + U4(U4(0x7FFF) + U4(U4(w >> U4(16)) & U4(1)))) >> U4(16))
                out[i] = U2(0x7FC0) if U4(w & _MAGNITUDE) > U4(INFINITY) else found

    return narrow


_narrow0, _narrow1, _narrow2 = narrow_by(0), narrow_by(1), narrow_by(2)


@part(nogil=True)
def narrow(words, kind, out):
    """As a function of `narrow_by`, for any dtype."""
    if kind == 0:
        _narrow0(words, out)
    elif kind == 1:
        _narrow1(words, out)
    else:
        _narrow2(words, out)


@cache
def decode_codes_by(bits, infinity, nan, kind):
    """A function that decodes codes of a format to elements of a dtype."""
    sign_bit, mask = U1(1 << (bits - 1)), U1((1 << (bits - 1)) - 1)
    infinity, nan = U1(infinity), U1(nan)

    @part(nogil=True)
    def decode_codes(codes, offsets, table, parts, out):
        """Elements of codes; `offsets` are (scale - 127) << 23, int32, `parts` int32 scratch.

        `infinity` and `nan` are the first codes of such values, 255 where there are none. bfloat16
        and float32 are right for scales from LEAST to MOST, see `decode_extreme`.
        """
        for i in range(LANES):
            parts[i] = table[codes[i]]
        if kind == 2:
            for i in range(LANES):
                code, part = codes[i], parts[i]
                found = U4(0) if part == _ZERO else U4(part + offsets[i])
                found = U4(INFINITY) if U1(code & mask) >= infinity else found
                found = U4(found | _SIGN) if U1(code & sign_bit) != U1(0) else found
                out[i] = U4(NAN) if U1(code & mask) >= nan else found
        elif kind == 1:
            for i in range(LANES):
                code = codes[i]
                offset = offsets[i]
                offset = offset if offset < I4(60 << 23) else I4(60 << 23)
                offset = offset if offset > I4(-(120 << 23)) else I4(-(120 << 23))
                wide = round_code(I4(parts[i] + offset), I4(10), I4(113 << 23))
                low = U2(wide if wide < I4(0x7C00) else I4(0x7C00))
                low = U2(0x7C00) if U1(code & mask) >= infinity else low
                low = U2(low | U2(0x8000)) if U1(code & sign_bit) != U1(0) else low
                out[i] = U2(0x7E00) if U1(code & mask) >= nan else low
        else:
            for i in range(LANES):
                code, part = codes[i], parts[i]
                low = U2(0) if part == _ZERO else U2(U4(part + offsets[i]) >> U4(16))
                low = U2(0x7F80) if U1(code & mask) >= infinity else low
                low = U2(low | U2(0x8000)) if U1(code & sign_bit) != U1(0) else low
                out[i] = U2(0x7FC0) if U1(code & mask) >= nan else low

    return decode_codes


@part(nogil=True, rare=True)
def load_last(x, at, padded):
    """The last elements of `x`, from `at` on, and zeros behind them, to `padded`."""
    count = x.size - at
    for i in range(LANES):
        padded[i] = x[at + i] if i < count else 0


@part(nogil=True, rare=True)
def store_last(padded, x, at):
    """Inverse of `load_last`."""
    for i in range(x.size - at):
        x[at + i] = padded[i]


#: Scales at which no value is subnormal or infinite in bfloat16 or float32.
LEAST, MOST = 17, 237


@cache
def decode_extreme_by(bits, infinity, nan, kind):
    """A function that decodes codes at very small and very large scales."""
    m, mask = 23 if kind == 2 else 7, (1 << (bits - 1)) - 1
    infinity, nan = int(infinity), int(nan)

    @part(nogil=True, rare=True)
    def decode_extreme(codes, scale, table, out):
        """As `decode_codes`, of codes of one scale, whatever it is, as bfloat16 or float32."""
        for i in range(codes.size):
            part = I8(table[codes[i]])
            above = I8(part >> 23) + scale - 128
            above = above if above < 255 else 255
            below = above if above < 0 else 0
            shift = 23 - m - below
            shift = shift if shift < 25 else 25
            w = I8(part & 0x7FFFFF) | 0x800000
            if shift > 0:
                w = (w + (1 << (shift - 1)) - 1 + ((w >> shift) & 1)) >> shift
            found = w + ((above - below) << m)
            found = found if found < 255 << m else 255 << m
            if part == I8(_ZERO):
                found = 0
            if (codes[i] & mask) >= infinity:
                found = 255 << m
            if codes[i] > mask:
                found |= 256 << m
            if (codes[i] & mask) >= nan:
                found = (511 << m) >> 1
            out[i] = found

    return decode_extreme
