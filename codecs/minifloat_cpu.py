# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Numba forms of codecs/minifloat.py, for tiles of `LANES` elements.

Loops have that constant length and every operand is cast: that is the form LLVM vectorises. Where a
code is rounded, a float addition does it: values and sums are normal there, so the sum is the
same in every mode of the processor that rounds to nearest.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numba import njit, types
from numba.extending import intrinsic

from ..formats.dtypes import DType
from ..numba_cache import cached
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
def _float_of(typingctx, x):
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
    """First codes, without sign, of infinity and NaN, uint8; 255 where there are none."""
    return U1(min(element.infinity, element.nan, 255)), U1(min(element.nan, 255))


def kind_of(dtype: DType) -> int:
    """How `widen` and `decode_codes` know a dtype."""
    return {"bfloat16": 0, "float16": 1, "float32": 2}[dtype.name]


@cached(nogil=True)
def widen(x, kind, words, floats):
    """float32 bits of the elements `x` to `words`; `floats` is float32 scratch, all of a length."""
    if kind == 0:
        for i in range(LANES):
            words[i] = U4(U4(x[i]) << U4(16))
    elif kind == 1:
        for i in range(LANES):
            floats[i] = np.float32(U4(x[i]) & U4(0x7FFF)) * np.float32(2.0**-24)
        tiny = floats.view(np.uint32)
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


@njit(nogil=True)
def split(magnitude):
    """Magnitude bits of one float32 as `minifloat.split` has them, in one word."""
    below = I4(_bits_of(np.float32(magnitude)) - I4(149 << 23))
    return below if magnitude < _HIDDEN else I4(magnitude)


def largest_magnitudes_by(block):
    """A function that puts the largest magnitude of each `block` words, as bits, into `tops`."""
    half, quarter = block // 2, block // 4

    @cached(nogil=True)
    def largest_magnitudes(words, lanes, tops):
        for b in range(LANES // block):
            low = words[b * block : b * block + half]
            high = words[b * block + half : (b + 1) * block]
            for i in range(half):
                lanes[i] = max(U4(low[i] & _MAGNITUDE), U4(high[i] & _MAGNITUDE))
            for i in range(quarter):
                lanes[i] = max(lanes[i], lanes[i + quarter])
            top = lanes[0]
            for i in range(1, quarter):
                top = max(top, lanes[i])
            tops[b] = top

    return largest_magnitudes


@njit(nogil=True)
def round_code(part, mantissa, lowest):
    """Code of the magnitude whose float32 bits are `part`, of a format with unlimited exponents.

    `lowest` are the float32 bits of its smallest normal value.
    """
    part = max(part, _TINY)
    binade = max(I4(part & _EXPONENT), lowest)
    step = I4(binade + I4(I4(I4(23) - mantissa) << I4(23)))
    steps = I4(_bits_of(np.float32(_float_of(part) + _float_of(step))) - step)
    return I4(steps + I4(I4(binade - lowest) >> I4(I4(23) - mantissa)))


def _round_by(mantissa):
    m = I4(mantissa)

    @njit(nogil=True)
    def round_tile(words, offsets, lowest, top, found):
        for i in range(LANES):
            part = I4(words[i] & _MAGNITUDE)
            code = min(round_code(I4(part - offsets[i]), m, lowest), top)
            found[i] = top if part == I4(INFINITY) else code

    return round_tile


# A shift by a variable amount is done in 64-bit lanes, so each width of mantissa gets its own loop.
_round1, _round2, _round3, _round6 = (_round_by(m) for m in (1, 2, 3, 6))


@cached(nogil=True)
def round_codes(words, offsets, mantissa, bias, largest, bits, integer, found, codes):
    """Codes of `words` to `codes`; see `minifloat.round_codes`.

    `offsets` are (scale - 127) << 23, int32. Subnormal words have code 0; `round_small` does better
    where the scale is so small that it matters. `found` is int32 scratch.
    """
    lowest = I4((128 - bias) << 23)
    top = I4(largest)
    if mantissa == 1:
        _round1(words, offsets, lowest, top, found)
    elif mantissa == 2:
        _round2(words, offsets, lowest, top, found)
    elif mantissa == 3:
        _round3(words, offsets, lowest, top, found)
    else:
        _round6(words, offsets, lowest, top, found)
    if integer:
        for i in range(LANES):
            codes[i] = U1(I4(-found[i]) if words[i] >= _SIGN else found[i])
    elif bits == 8:
        for i in range(LANES):
            codes[i] = U1(U4(found[i]) | U4(U4(words[i] & _SIGN) >> U4(24)))
    elif bits == 6:
        for i in range(LANES):
            codes[i] = U1(U4(found[i]) | U4(U4(words[i] & _SIGN) >> U4(26)))
    else:
        for i in range(LANES):
            codes[i] = U1(U4(found[i]) | U4(U4(words[i] & _SIGN) >> U4(28)))


@cached(nogil=True)
def round_small(words, scale, mantissa, bias, largest, bits, integer, codes):
    """As `round_codes`, of words of one scale, all of them finite."""
    for i in range(words.size):
        part = I4(split(U4(words[i] & _MAGNITUDE)) - I4((scale - 127) << 23))
        code = I8(min(round_code(part, I4(mantissa), I4((128 - bias) << 23)), I4(largest)))
        if words[i] >= _SIGN:
            code = -code if integer else code | 1 << (bits - 1)
        codes[i] = U1(code)


@cached(nogil=True)
def pack(codes, bits, target):
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


@cached(nogil=True)
def unpack(source, bits, codes):
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


@cached(nogil=True)
def narrow(words, kind, out):
    """Elements nearest to float32 bits; see `minifloat.narrow`."""
    if kind == 2:
        for i in range(LANES):
            w = words[i]
            out[i] = U4(NAN) if U4(w & _MAGNITUDE) > U4(INFINITY) else w
    elif kind == 1:
        for i in range(LANES):
            w = words[i]
            part = I4(w & _MAGNITUDE)
            found = U2(min(round_code(min(part, _TALL), I4(10), I4(113 << 23)), I4(0x7C00)))
            found = U2(found | U2(U4(w >> U4(16)) & U4(0x8000)))
            out[i] = U2(0x7E00) if part > I4(INFINITY) else found
    else:
        for i in range(LANES):
            w = words[i]
            found = U2(U4(w + U4(U4(0x7FFF) + U4(U4(w >> U4(16)) & U4(1)))) >> U4(16))
            out[i] = U2(0x7FC0) if U4(w & _MAGNITUDE) > U4(INFINITY) else found


@cached(nogil=True)
def decode_codes(codes, offsets, table, bits, infinity, nan, kind, parts, out):
    """Elements of codes; `offsets` are (scale - 127) << 23, int32, `parts` int32 scratch.

    `infinity` and `nan` are the first codes of such values, uint8, 255 where there are none.
    bfloat16 and float32 are right for scales from LEAST to MOST, see `decode_extreme`.
    """
    sign_bit = U1(1 << (bits - 1))
    mask = U1(sign_bit - U1(1))
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
            offset = max(min(offsets[i], I4(60 << 23)), I4(-(120 << 23)))
            wide = round_code(I4(parts[i] + offset), I4(10), I4(113 << 23))
            low = U2(min(wide, I4(0x7C00)))
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


@cached(nogil=True)
def add(a, b, kind):
    """Replace the elements `a` by a + b, summed in float32 and rounded to their dtype."""
    u, v = np.empty(LANES, np.uint32), np.empty(LANES, np.uint32)
    floats, padded = np.empty(LANES, np.float32), np.zeros(LANES, a.dtype)
    for at in range(0, a.size, LANES):
        count = min(LANES, a.size - at)
        # One by one, as only one of them may be read-only.
        padded[:count] = a[at : at + count]
        widen(padded, kind, u, floats)
        padded[:count] = b[at : at + count]
        widen(padded, kind, v, floats)
        x, y = u.view(np.float32), v.view(np.float32)
        for i in range(LANES):
            floats[i] = np.float32(x[i] + y[i])
        narrow(floats.view(np.uint32), kind, padded)
        a[at : at + count] = padded[:count]


@cached(nogil=True)
def add_floats(a, b, kind):
    """Replace the elements `a` by a + b, of float32 values `b`, rounded to their dtype."""
    words, floats = np.empty(LANES, np.uint32), np.empty(LANES, np.float32)
    padded = np.zeros(LANES, a.dtype)
    for at in range(0, a.size, LANES):
        count = min(LANES, a.size - at)
        padded[:count] = a[at : at + count]
        widen(padded, kind, words, floats)
        x = words.view(np.float32)
        for i in range(count):
            floats[i] = np.float32(x[i] + b[at + i])
        narrow(floats.view(np.uint32), kind, padded)
        a[at : at + count] = padded[:count]


@cached(nogil=True)
def add_to(acc, a, kind):
    """Add the elements `a` to the float32 values `acc`."""
    words, floats = np.empty(LANES, np.uint32), np.empty(LANES, np.float32)
    padded = np.zeros(LANES, a.dtype)
    for at in range(0, a.size, LANES):
        count = min(LANES, a.size - at)
        padded[:count] = a[at : at + count]
        widen(padded, kind, words, floats)
        x = words.view(np.float32)
        for i in range(count):
            acc[at + i] += x[i]


#: Scales at which no value is subnormal or infinite in bfloat16 or float32.
LEAST, MOST = 17, 237


@cached(nogil=True)
def decode_extreme(codes, scale, table, bits, infinity, nan, kind, out):
    """As `decode_codes`, of codes of one scale, whatever it is, as bfloat16 or float32."""
    m = 23 if kind == 2 else 7
    mask = (1 << (bits - 1)) - 1
    for i in range(codes.size):
        part = I8(table[codes[i]])
        above = min(I8(part >> 23) + scale - 128, 255)
        shift = min(23 - m - min(above, 0), 25)
        w = I8(part & 0x7FFFFF) | 0x800000
        if shift > 0:
            w = (w + (1 << (shift - 1)) - 1 + ((w >> shift) & 1)) >> shift
        found = min(w + (max(above, 0) << m), 255 << m)
        if part == I8(_ZERO):
            found = 0
        if (codes[i] & mask) >= infinity:
            found = 255 << m
        if codes[i] > mask:
            found |= 256 << m
        if (codes[i] & mask) >= nan:
            found = (511 << m) >> 1
        out[i] = found
