# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment,attr-defined,misc"
"""The GPU kernels of mx and nvfp4, which share all but the rule for scales.

A thread holds whole slots of 8 neighbouring elements: it loads them 16 bytes at a time, makes one
piece of packed codes of them, and no value changes hands but the largest magnitude of a block.
Rounding is float arithmetic that is exact but for the one step that rounds: the same everywhere.

Where the device converts small floats by itself (CVT), whole tiles of dtypes of 16 bits stay words
of two elements as far as they can (PAIRS).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ...formats.checksum import identity_term
from ...formats.dtypes import DType
from .base import Plan
from .columns_triton import from_columns, to_columns
from .frame_triton import (
    CHUNK,
    CHUNK_PADDING,
    CHUNK_PAYLOAD,
    CHUNK_SUM,
    FLAGS,
    HEADER_WORDS,
    OVERFLOWED,
    RECORD,
    add_header,
    check_header,
    clear,
    float_of,
    header_word,
    header_words,
    match_header,
    padding_of,
    record_term,
    report,
    store_element,
    touched,
    weigh,
    weigh_bytes,
)
from .launch_triton import PTX, Variant, kernel, options
from .minifloat import (
    BY_NAME,
    E4M3_E2M1_RANGE,
    INFINITY,
    NAN,
    NO_RECIPROCAL,
    SIXTH,
    Element,
    values_of,
)

#: Elements that a thread holds side by side.
_SLOT = tl.constexpr(8)
_MAGNITUDE = tl.constexpr((1 << 31) - 1)
_SIGN = tl.constexpr(-(1 << 31))
_BINADE = tl.constexpr(INFINITY)
_INFINITY = tl.constexpr(INFINITY)
_NAN = tl.constexpr(NAN)
_HALF_LEAST = tl.constexpr(1 << 22)  # 2^-127
_FLT_MAX = tl.constexpr(float.fromhex("0x1.fffffep127"))
_RANGE, _SIXTH = tl.constexpr(float(E4M3_E2M1_RANGE)), tl.constexpr(float(SIXTH))
_NO_RECIPROCAL = tl.constexpr(float(NO_RECIPROCAL))
_NAN_SCALE = tl.constexpr(BY_NAME["e4m3"].nan)
#: Where scales come from that are not chosen.
_OF_STATS, _OF_SOURCE = tl.constexpr(1), tl.constexpr(2)
#: Tensor scales with which no quotient of `_quotient` is too small or too large.
_LEAST_SCALE, _MOST_SCALE = tl.constexpr(2.0**-60), tl.constexpr(2.0**60)


def _e2m1_asm() -> str:
    """PTX of `_e2m1_word`: $1 to $8 are values, $9 to $12 words of elements."""
    one = 0x4B400000  # 1.5 * 2^23, to which codes are added
    fifteen = 0xCD340000  # -15 times that
    lines = [".reg .f32 y, a, b, c, low, high;", ".reg .b32 p, q;"]
    for half, first in (("low", 1), ("high", 5)):
        for k in range(first + 3, first - 1, -1):
            start = f"0f{one:08X}"
            if k < first + 3:
                lines.append(f"fma.rn.f32 {half}, {half}, 0f41800000, 0f{fifteen:08X};")
                start = half
            lines += [
                f"abs.f32 y, ${k};",
                "mul.rn.sat.f32 a, y, 0f3F000000;",
                "fma.rn.sat.f32 b, y, 0f3F000000, 0fBF800000;",
                "fma.rn.sat.f32 c, y, 0f3F000000, 0fC0000000;",
                f"fma.rn.f32 {half}, a, 0f40800000, {start};",
                f"fma.rn.f32 {half}, b, 0f40000000, {half};",
                f"add.rn.f32 {half}, {half}, c;",
            ]
    lines += [
        "prmt.b32 $0, low, high, 0x5410;",
        "prmt.b32 p, $9, $10, 0x7351;",
        "prmt.b32 q, $11, $12, 0x7351;",
        # Signs of even and of odd elements.
        "{ .reg .b32 even, odd;",
        "prmt.b32 even, p, q, 0x5410;",
        "prmt.b32 odd, p, q, 0x7632;",
        "shr.b32 even, even, 4;",
        "and.b32 even, even, 0x08080808;",
        "or.b32 $0, $0, even;",
        "and.b32 odd, odd, 0x80808080;",
        "or.b32 $0, $0, odd; }",
    ]
    return "{ " + " ".join(lines) + " }"


_E2M1_ASM = tl.constexpr(_e2m1_asm())


class Tiling(NamedTuple):
    """Slots that a program takes, and its warps."""

    slots: int
    warps: int


#: Launch parameters; where they are changed, `encode_variant` and the like forget their caches.
ENCODE = Tiling(1024, 8)
DECODE = Tiling(512, 4)
DECODE_ADD = Tiling(512, 4)
DECODE_ADD_ENCODE = Tiling(256, 4)


class Blocks(NamedTuple):
    """What kernels know of a codec: its elements, the size of its blocks, its rule for scales.

    Before the scales of a chunk lie `head` bytes. With nvfp4's 16 of them, scales are e4m3 over a
    float32; without, powers of two, "ceil" or not, or `given`: of stats, or of a sum's source.
    """

    element: Element
    block: int
    head: int = 0
    ceil: bool = False
    given: bool = False


@triton.jit
def elements_at(ptr, ITEM: tl.constexpr):
    """A pointer to bytes as one to element bits of ITEM bytes."""
    return ptr.to(tl.pointer_type(tl.uint16 if ITEM == 2 else tl.uint32))


@triton.jit
def widen(v, EXP: tl.constexpr, ITEM: tl.constexpr):
    """float32 bits, int32, of element bits."""
    return float_of(v.to(tl.uint32), EXP, ITEM).to(tl.int32, bitcast=True)


@triton.jit
def _float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _bits(value):
    return value.to(tl.int32, bitcast=True)


@triton.jit
def _lanes(SLOTS: tl.constexpr):
    """Numbers of a tile's slots. The hint keeps slots in one thread each, in every tensor."""
    return tl.max_contiguous(tl.arange(0, SLOTS), 1)


@triton.jit
def _round_magnitude(value, M: tl.constexpr, BIAS: tl.constexpr, LIMIT: tl.constexpr):
    """Code without sign of floats that are not negative, to nearest even, as the bits above the
    lowest 23 - M of an integer. LIMIT: the largest value that has a code.
    """
    value = tl.minimum(value, LIMIT)
    binade = tl.maximum(_bits(value) & _BINADE, (128 - BIAS) << 23)
    # In the binade of `anchor`, neighbouring floats are a step of the code apart.
    anchor = _float(binade) * (1 << (23 - M))
    rounded = (value + anchor) - anchor
    # Its least normal value becomes float32's, its subnormal ones likewise.
    return _bits(rounded * (2.0 ** (BIAS - 127)))


@triton.jit
def _round_element(
    x,
    keep,
    factor,
    BITS: tl.constexpr,
    M: tl.constexpr,
    BIAS: tl.constexpr,
    LIMIT: tl.constexpr,
    INTEGER: tl.constexpr,
):
    """Code in the top BITS bits, uint32, of float32 bits `x` & `keep` times `factor`."""
    if INTEGER:
        value = _float(x & keep) * factor
        value = tl.minimum(tl.maximum(value, -LIMIT), LIMIT)
        # The lowest 8 bits of the sum are 64 times the value.
        code = _bits(value + 196608.0) << 24
    else:
        code = _round_magnitude(_float(x & keep & _MAGNITUDE) * factor, M, BIAS, LIMIT)
        code = (code << (9 + M - BITS)) | (x & keep & _SIGN)
    return code.to(tl.uint32, bitcast=True)


@triton.jit
def _pack(q, BITS: tl.constexpr):
    """Eight codes, from the top bits of `q`, as (low, high) words; high is 0 for 4 bits."""
    SHIFT: tl.constexpr = 32 - BITS
    if BITS == 6:
        low = q[4] >> SHIFT
        for j in tl.static_range(3, -1, -1):
            low = (low << BITS) | (q[j] >> SHIFT)
        fifth = q[5] >> SHIFT
        low |= fifth << 30
        high = (fifth >> 2) | ((q[6] >> SHIFT) << 4) | ((q[7] >> SHIFT) << 10)
    else:
        COUNT: tl.constexpr = 32 // BITS
        low = q[COUNT - 1] >> SHIFT
        for j in tl.static_range(COUNT - 2, -1, -1):
            low = (low << BITS) | (q[j] >> SHIFT)
        high = low * 0
        if BITS == 8:
            high = q[7] >> SHIFT
            for j in tl.static_range(6, 3, -1):
                high = (high << BITS) | (q[j] >> SHIFT)
    return low, high


@triton.jit
def _unpack(low, high, BITS: tl.constexpr):
    """Inverse of `_pack`; below the code, bits are arbitrary."""
    q = ()
    for j in tl.static_range(8):
        if BITS == 6 and j == 5:
            q = q + (((low >> 30) << 26) | (high << 28),)
        elif BITS == 6 and j > 5:
            q = q + (high << (22 if j == 6 else 16),)
        elif BITS == 8 and j > 3:
            q = q + (high << (24 - 8 * (j - 4)),)
        else:
            q = q + (low << (32 - BITS - BITS * j),)
    return q


@triton.jit
def _element_value(
    q,
    factor,
    BITS: tl.constexpr,
    M: tl.constexpr,
    BIAS: tl.constexpr,
    INF: tl.constexpr,
    NAN: tl.constexpr,
    INTEGER: tl.constexpr,
):
    """float32 values of codes in the top BITS bits, times `factor`."""
    if INTEGER:
        return (q.to(tl.int32, bitcast=True) >> 24).to(tl.float32) * 0.015625 * factor
    else:
        MASK: tl.constexpr = ((1 << (BITS - 1)) - 1) << (23 - M)
        code = (q >> (9 + M - BITS)).to(tl.int32, bitcast=True) & MASK
        value = _float(code) * (2.0 ** (127 - BIAS))
        if INF < 256:
            value = tl.where(code >= INF << (23 - M), float("inf"), value)
        bits = _bits(value * factor) ^ (q.to(tl.int32, bitcast=True) & _SIGN)
        if NAN < 256:
            bits = tl.where(code >= NAN << (23 - M), _NAN, bits)
        return _float(bits)


@triton.jit
def narrow(value, EXP: tl.constexpr, ITEM: tl.constexpr, PTX: tl.constexpr):
    """Element bits, uint32, nearest to float32 values; every NaN is the quiet, positive one."""
    return tl.where(value != value, nan_bits(EXP, ITEM), narrow_number(value, EXP, ITEM, PTX))


@triton.jit
def nan_bits(EXP: tl.constexpr, ITEM: tl.constexpr):
    """Bits of the quiet, positive NaN of a dtype."""
    return tl.full([], _NAN if ITEM == 4 else (0x7FC0 if EXP == 8 else 0x7E00), tl.uint32)


@triton.jit
def narrow_number(value, EXP: tl.constexpr, ITEM: tl.constexpr, PTX: tl.constexpr):
    """As `narrow`, of values that are not NaN."""
    bits = _bits(value)
    if ITEM == 4:
        found = bits.to(tl.uint32, bitcast=True)
    elif EXP == 8:
        if PTX:
            found = value.to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.uint32)
        else:
            wide = bits.to(tl.uint32, bitcast=True)
            found = (wide + 0x7FFF + ((wide >> 16) & 1)) >> 16
    else:
        if PTX:
            found = value.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32)
        else:
            # 2^16, the end of the binade after the largest, becomes infinity.
            code = _round_magnitude(_float(bits & _MAGNITUDE), 10, 15, 65536.0) >> 13
            found = (code | ((bits >> 16) & 0x8000)).to(tl.uint32, bitcast=True)
    return found


@triton.jit
def _power(scales):
    """2^(scale - 127), NaN for 255."""
    powers = tl.maximum(scales << 23, _HALF_LEAST)
    return _float(tl.where(scales == 255, _NAN, powers))


@triton.jit
def _step(scales, g):
    """Values of e4m3 scales over `g`; those of NaN are NaN."""
    magnitudes = scales & 127
    values = _float(magnitudes << 20) * (2.0**120)
    bits = tl.where(magnitudes == 127, _NAN, _bits(values) | ((scales & 128) << 24))
    return tl.div_rn(_float(bits), values * 0.0 + g)


@triton.jit
def _power_scales(tops, EMAX: tl.constexpr, MAX_FRACTION: tl.constexpr, CEIL: tl.constexpr):
    """(scale bytes, int32; what to multiply by) from blocks' largest magnitudes.

    See `mx.block_scales`.
    """
    parts = tops
    if EMAX == 0:
        # Of other types, scales of such blocks are cut to 0 with any exponent.
        below = _bits(tops.to(tl.float32)) - (149 << 23)
        parts = tl.where(tops < 1 << 23, below, tops)
    scales = (parts >> 23) - EMAX
    if CEIL:
        scales += ((parts & 0x7FFFFF) > MAX_FRACTION).to(tl.int32)
    scales = tl.minimum(tl.maximum(scales, 0), 254)
    scales = tl.where(tops > (_INFINITY - 1 if EMAX == 0 else _INFINITY), 255, scales)
    return scales, _float(tl.maximum((254 - scales) << 23, _HALF_LEAST))


@triton.jit
def _given_scales(
    stats_ptr,
    source_ptr,
    first,
    nelem,
    slot,
    n,
    BLOCK: tl.constexpr,
    GIVEN: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Scale bytes, int32, that blocks of slots are to have; see `mx.agreed_scales`."""
    at = slot // (BLOCK // _SLOT)
    use = None
    if MASKED:
        use = slot * _SLOT < n
    if GIVEN == _OF_SOURCE:
        scales = tl.load(source_ptr + at, mask=use)
    elif GIVEN == _OF_STATS:
        at += first // BLOCK
        bytes_ptr = stats_ptr.to(tl.pointer_type(tl.uint8))
        scales = tl.load(bytes_ptr + at, mask=use)
        if first % BLOCK != 0:
            after = tl.minimum(at + 1, (nelem - 1) // BLOCK)
            scales = tl.maximum(scales, tl.load(bytes_ptr + after, mask=use))
    else:
        scales = slot
    return scales.to(tl.int32)


@triton.jit
def _kept_scales(tops, given, EMAX: tl.constexpr):
    """As `_power_scales`, of scale bytes `given`; blocks with NaN or infinities have their own."""
    special = tl.where(tops > _INFINITY, 255, 255 - EMAX)
    scales = tl.where((tops < _INFINITY) | (given == 255), given, special)
    return scales, _float(tl.maximum((254 - scales) << 23, _HALF_LEAST))


@triton.jit
def _float_scales(tops, g):
    """(scale codes, e4m3, int32; what to multiply by) from blocks' largest magnitudes, nvfp4."""
    special = tops >= _INFINITY
    wanted = _float(tl.where(special, 0, tops)) * (g * _SIXTH)
    scales = _round_magnitude(wanted, 3, 7, 448.0) >> 20
    steps = _step(scales, g)
    none = steps <= _NO_RECIPROCAL
    factors = tl.div_rn(steps * 0.0 + 1.0, tl.where(none, 1.0, steps))
    return tl.where(special, _NAN_SCALE, scales), tl.where(none, _FLT_MAX, factors)


@triton.jit
def _is_usual(g):
    return (g >= _LEAST_SCALE) & (g <= _MOST_SCALE)


@triton.jit
def halves(word, EXP: tl.constexpr):
    """float32 values of the lower and of the upper element of a word."""
    if EXP == 8:
        return _float(word << 16), _float(word & 0xFFFF0000)
    else:
        low = word.to(tl.uint16).to(tl.float16, bitcast=True)
        high = (word >> 16).to(tl.uint16).to(tl.float16, bitcast=True)
        return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def _pair(a, b, EXP: tl.constexpr):
    """A word of two float32 values, `a` lower, to nearest even; a NaN becomes any NaN."""
    return tl.inline_asm_elementwise(
        "cvt.rn." + ("bf16x2" if EXP == 8 else "f16x2") + ".f32 $0, $2, $1;",
        "=r,r,r",
        [a, b],
        dtype=tl.uint32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _quiet(word, EXP: tl.constexpr):
    """A word with every NaN that `_pair` made, which is positive, as the quiet one."""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 nan; mov.b32 nan, "
        + ("0x7FC07FC0" if EXP == 8 else "0x7E007E00")
        + "; min.s16x2 $0, $1, nan; }",
        "=r,r",
        [word],
        dtype=tl.uint32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def add_pair(a, b, EXP: tl.constexpr):
    """Sums of words' elements. Rounded from the exact sum they are what a rounding to float32 in
    between gives, as it has at least twice the bits and two more (Figueroa, When is double rounding
    innocuous?, 1995); a NaN becomes any NaN.
    """
    return tl.inline_asm_elementwise(
        "add.rn." + ("bf16x2" if EXP == 8 else "f16x2") + " $0, $1, $2;",
        "=r,r,r",
        [a, b],
        dtype=tl.uint32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _top_pair(a, b, EXP: tl.constexpr):
    """Larger magnitudes of words' elements, with any sign; NaN where one is."""
    return tl.inline_asm_elementwise(
        "max.NaN.xorsign.abs." + ("bf16x2" if EXP == 8 else "f16x2") + " $0, $1, $2;",
        "=r,r,r",
        [a, b],
        dtype=tl.uint32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _top_finite(a, top, EXP: tl.constexpr):
    """The larger of `top` and, element by element, the magnitudes of `a` plus a step of infinity's
    exponent, which is negative if they are not finite.
    """
    return tl.inline_asm_elementwise(
        "{ .reg .b32 t, step; and.b32 t, $1, 0x7FFF7FFF; mov.b32 step, "
        + ("0x00800080" if EXP == 8 else "0x04000400")
        + "; add.s16x2 t, t, step; max.s16x2 $0, t, $2; }",
        "=r,r,r",
        [a, top],
        dtype=tl.uint32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _load_pairs(x, tile, SLOTS: tl.constexpr):
    """The elements of a tile's slots as 4 columns of words of two."""
    i = _lanes(SLOTS)[:, None] * 4 + tl.arange(0, 4)[None, :]
    v = tl.load(x.to(tl.pointer_type(tl.uint32)) + tile.to(tl.int64) * (SLOTS * 4) + i)
    return to_columns(v, SLOTS, 4, 2)


@triton.jit
def _fours(word, M: tl.constexpr, SCALED: tl.constexpr):
    """float32 values of the four codes of a word, e4m3 or e5m2; if SCALED, 2^6 times as large."""
    HALVES: tl.constexpr = (
        ("cvt.rn.f16x2.e4m3x2 two, code; " if M == 3 else "cvt.rn.f16x2.e5m2x2 two, code; ")
        + ("mul.rn.f16x2 two, two, scale; " if SCALED else "")
        + "mov.b32 {a, b}, two; "
    )
    return tl.inline_asm_elementwise(
        "{ .reg .b16 code, a, b; .reg .b32 two, scale; mov.b32 scale, 0x54005400; "
        "mov.b32 {code, _}, $4; "
        + HALVES
        + "cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; mov.b32 {_, code}, $4; "
        + HALVES
        + "cvt.f32.f16 $2, a; cvt.f32.f16 $3, b; }",
        "=&r,=&r,=&r,=&r,r",
        [word],
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def _code_values(low, high, BITS: tl.constexpr, M: tl.constexpr, SCALED: tl.constexpr):
    """float32 values of eight codes; not SCALED, those of e2m1 are 2^-6 times as large."""
    if BITS == 4:
        # With two zeros behind the mantissa e2m1 is e4m3, but for what their biases differ by.
        even = ((low << 2) & 0x1C1C1C1C) | ((low << 4) & 0x80808080)
        odd = ((low >> 2) & 0x1C1C1C1C) | (low & 0x80808080)
        a, b = _fours(even, 3, SCALED), _fours(odd, 3, SCALED)
        return (a[0], b[0], a[1], b[1], a[2], b[2], a[3], b[3])
    else:
        return _fours(low, M, False) + _fours(high, M, False)


@triton.jit
def _quotient(a, g, inverse):
    """`a` / `g` to nearest even for numbers that are no more than 2^60 from 1, or zero; `inverse`
    is 1 / `g` (Markstein, Computation of elementary functions on the IBM RISC System/6000, 1990).
    """
    return tl.inline_asm_elementwise(
        "{ .reg .f32 q, r; mul.rn.f32 q, $1, $3; neg.f32 r, $1; fma.rn.f32 r, q, $2, r; "
        "neg.f32 r, r; fma.rn.f32 $0, r, $3, q; }",
        "=r,r,r,r",
        [a, g, inverse],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _reciprocal(a):
    """1 / `a` to nearest even where both are normal numbers; NaN for 0. The steps by which
    rcp.rn.f32 is compiled, without its branch for other numbers.
    """
    return tl.inline_asm_elementwise(
        "{ .reg .f32 r, e; rcp.approx.ftz.f32 r, $1; neg.f32 e, $1; "
        "fma.rn.f32 e, e, r, 0f3F800000; fma.rn.f32 $0, r, e, r; }",
        "=r,r",
        [a],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _decode_pairs(
    static_ptr,
    scales_at,
    g,
    tile,
    BITS: tl.constexpr,
    M: tl.constexpr,
    BLOCK: tl.constexpr,
    HEAD: tl.constexpr,
    EXP: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """(the elements of a whole tile's slots, 4 columns of words of two; checksum terms).

    `g`: as `_is_usual`. A NaN is any.
    """
    LANES: tl.constexpr = BLOCK // _SLOT
    lane = _lanes(SLOTS)
    first = tile.to(tl.int64) * SLOTS
    low, high = _load_words(static_ptr + first * BITS, lane, BITS)
    if BITS == 8:
        terms = weigh(low, (first + lane) * 2) + weigh(high, (first + lane) * 2 + 1)
    else:
        terms = weigh(low, first + lane)
    scales_ptr = static_ptr + scales_at + first // LANES
    scales = tl.load(scales_ptr + lane // LANES).to(tl.int32)
    at = scales_at + first // LANES + lane // LANES
    terms += tl.where(lane % LANES == 0, weigh_bytes(scales, at), 0)
    if HEAD > 0:
        steps = _fours(scales.to(tl.uint32, bitcast=True), 3, False)[0]
        factor = _quotient(steps, g, _reciprocal(g)) * 64.0
    else:
        factor = _power(scales)
    values = _code_values(low, high, BITS, M, HEAD == 0)
    words = ()
    for j in tl.static_range(0, _SLOT, 2):
        words = words + (_pair(values[j] * factor, values[j + 1] * factor, EXP),)
    return words, tl.sum(terms, 0)


@triton.jit
def _load_words(payload, lane, BITS: tl.constexpr):
    """(low, high) words of slots of codes of 4 or 8 bits."""
    if BITS == 8:
        both = tl.load(payload.to(tl.pointer_type(tl.uint64)) + lane)
        low, high = both.to(tl.uint32), (both >> 32).to(tl.uint32)
    else:
        low = tl.load(payload.to(tl.pointer_type(tl.uint32)) + lane)
        high = low
    return low, high


@triton.jit
def _sum_pairs(
    x,
    source_ptr,
    scales_at,
    h,
    tile,
    BITS: tl.constexpr,
    M: tl.constexpr,
    BLOCK: tl.constexpr,
    HEAD: tl.constexpr,
    EXP: tl.constexpr,
    SLOTS: tl.constexpr,
    ADD: tl.constexpr,
):
    """As `_sums` of a whole tile, but words of two elements, 4 columns."""
    words = _load_pairs(x, tile, SLOTS)
    added = tl.zeros([], tl.uint64)
    if ADD > 0:
        decoded, added = _decode_pairs(
            source_ptr, scales_at, h, tile, BITS, M, BLOCK, HEAD, EXP, SLOTS
        )
        sums = ()
        for j in tl.static_range(_SLOT // 2):
            sums = sums + (add_pair(decoded[j], words[j], EXP),)
        words = sums
    return words, added


@triton.jit
def _top_of_pairs(words, EXP: tl.constexpr):
    """The largest magnitudes of slots, as float32 bits, int32; NaN where one is."""
    top = _top_pair(_top_pair(words[0], words[1], EXP), _top_pair(words[2], words[3], EXP), EXP)
    low, high = halves(top & 0x7FFF7FFF, EXP)
    return tl.maximum(_bits(low), _bits(high))


@triton.jit
def _finite_top_of_pairs(words, EXP: tl.constexpr):
    """As `_finite_top`."""
    STEP: tl.constexpr = 0x0080 if EXP == 8 else 0x0400
    top = words[0] * 0 + STEP * 0x10001
    for j in tl.static_range(_SLOT // 2):
        top = _top_finite(words[j], top, EXP)
    low, high = halves(top - STEP * 0x10001, EXP)
    return tl.max(tl.maximum(_bits(low), _bits(high)), 0)


@triton.jit
def _e2m1_word(y, words):
    """Codes of eight values without sign, with the signs of the elements of four words.

    The code is the value 2 y up to y = 2, from there to 4 half as steep, then a quarter. What y
    adds to it in each of the three parts is added to a float32 whose last place is 1: one rounding,
    in the only part that is not full or empty. Four codes lie side by side in such a number.
    """
    return tl.inline_asm_elementwise(
        _E2M1_ASM,
        "=&r,r,r,r,r,r,r,r,r,r,r,r,r",
        [y[0], y[1], y[2], y[3], y[4], y[5], y[6], y[7], words[0], words[1], words[2], words[3]],
        dtype=tl.uint32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _nearest_e4m3(value):
    """(code, int32; its value) nearest to floats, ties to even, saturating."""
    return tl.inline_asm_elementwise(
        "{ .reg .b16 code, half, _h; .reg .b32 two; "
        "cvt.rn.satfinite.e4m3x2.f32 code, 0f00000000, $2; cvt.u32.u16 $0, code; "
        "cvt.rn.f16x2.e4m3x2 two, code; mov.b32 {half, _h}, two; cvt.f32.f16 $1, half; }",
        "=&r,=&r,r",
        [value],
        dtype=(tl.int32, tl.float32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def _fp8_word(a, b, c, d, M: tl.constexpr):
    """Codes of four values, e4m3 or e5m2, to nearest even and saturating."""
    PAIR: tl.constexpr = "cvt.rn.satfinite.e4m3x2.f32" if M == 3 else "cvt.rn.satfinite.e5m2x2.f32"
    return tl.inline_asm_elementwise(
        "{ .reg .b16 low, high; "
        + PAIR
        + " low, $2, $1; "
        + PAIR
        + " high, $4, $3; mov.b32 $0, {low, high}; }",
        "=r,r,r,r,r",
        [a, b, c, d],
        dtype=tl.uint32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _encode_pairs(
    words,
    static_ptr,
    scales_at,
    g,
    given,
    tile,
    BITS: tl.constexpr,
    M: tl.constexpr,
    EMAX: tl.constexpr,
    MAX_FRACTION: tl.constexpr,
    CEIL: tl.constexpr,
    BLOCK: tl.constexpr,
    HEAD: tl.constexpr,
    GIVEN: tl.constexpr,
    EXP: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """As `_encode_tile`, of a whole tile of words of two elements; `g`: as `_is_usual`."""
    LANES: tl.constexpr = BLOCK // _SLOT
    top = _top_of_pairs(words, EXP)
    top = tl.max(tl.reshape(top, [SLOTS // LANES, LANES]), 1)
    top = _spread(top, SLOTS // LANES, LANES)
    if HEAD > 0:
        lost = top >= _INFINITY
        scales, steps = _nearest_e4m3(_float(top) * (g * _SIXTH))
        scales = tl.where(lost, _NAN_SCALE, scales)
        # Of a scale of 0 the reciprocal is NaN, which the minimum drops.
        factor = tl.minimum(_reciprocal(_quotient(steps, g, _reciprocal(g))), _FLT_MAX)
    else:
        if GIVEN > 0:
            scales, factor = _kept_scales(top, given, EMAX)
        else:
            scales, factor = _power_scales(top, EMAX, MAX_FRACTION, CEIL)
        lost = scales == 255
    values = ()
    for j in tl.static_range(_SLOT // 2):
        a, b = halves(words[j], EXP)
        values = values + (a * factor, b * factor)
    if BITS == 4:
        low = _e2m1_word(values, words)
        high = low
    else:
        low = _fp8_word(values[0], values[1], values[2], values[3], M)
        high = tl.where(lost, 0, _fp8_word(values[4], values[5], values[6], values[7], M))
    low = tl.where(lost, 0, low)
    lane = _lanes(SLOTS)
    first = tile.to(tl.int64) * SLOTS
    payload = static_ptr + first * BITS
    if BITS == 8:
        both = low.to(tl.uint64) | (high.to(tl.uint64) << 32)
        tl.store(payload.to(tl.pointer_type(tl.uint64)) + lane, both)
        terms = weigh(low, (first + lane) * 2) + weigh(high, (first + lane) * 2 + 1)
    else:
        tl.store(payload.to(tl.pointer_type(tl.uint32)) + lane, low)
        terms = weigh(low, first + lane)
    # The first slot of a block writes its scale.
    own = lane % LANES == 0
    at = scales_at + first // LANES
    tl.store(static_ptr + at + lane // LANES, scales.to(tl.uint8), mask=own)
    terms += tl.where(own, weigh_bytes(scales, at + lane // LANES), 0)
    return tl.sum(terms, 0)


@triton.jit
def _store_pairs(words, out, tile, SLOTS: tl.constexpr):
    """Inverse of `_load_pairs`."""
    i = _lanes(SLOTS)[:, None] * 4 + tl.arange(0, 4)[None, :]
    to = out.to(tl.pointer_type(tl.uint32)) + tile.to(tl.int64) * (SLOTS * 4)
    tl.store(to + i, from_columns(words, 4, 2))


@triton.jit
def _load_elements(
    x,
    slot,
    n,
    SLOTS: tl.constexpr,
    EXP: tl.constexpr,
    ITEM: tl.constexpr,
    MASKED: tl.constexpr,
):
    """float32 bits, int32, of the elements of slots, as 8 columns; 0 behind element `n`."""
    COLUMNS: tl.constexpr = 16 // ITEM
    LOG: tl.constexpr = 3 if COLUMNS == 8 else 2
    columns = ()
    for part in tl.static_range(_SLOT // COLUMNS):
        i = slot[:, None] * _SLOT + part * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        if MASKED:
            v = tl.load(x + i, mask=i < n, other=0)
        else:
            v = tl.load(x + i)
        columns = columns + to_columns(v, SLOTS, COLUMNS, LOG)
    wide = ()
    for j in tl.static_range(_SLOT):
        wide = wide + (widen(columns[j], EXP, ITEM),)
    return wide


@triton.jit
def _load_codes(payload, slot, n, BITS: tl.constexpr, MASKED: tl.constexpr):
    """(low words, high words, checksum terms) of slots of the static part at `payload`."""
    words = (n * BITS + 31) // 32
    if BITS == 6:
        low = slot.to(tl.uint32) * 0
        high = low
        terms = low.to(tl.uint64)
        for k in tl.static_range(3):
            at = slot * 3 + k
            if MASKED:
                half = tl.load(
                    payload.to(tl.pointer_type(tl.uint16)) + at, mask=at < words * 2, other=0
                )
            else:
                half = tl.load(payload.to(tl.pointer_type(tl.uint16)) + at)
            terms += weigh_bytes(half, at * 2)
            if k == 2:
                high = half.to(tl.uint32)
            else:
                low |= half.to(tl.uint32) << (16 * k)
    elif BITS == 8:
        if MASKED:
            both = tl.load(
                payload.to(tl.pointer_type(tl.uint64)) + slot, mask=slot * 2 < words, other=0
            )
            both = tl.where(slot * 2 + 1 < words, both, both & 0xFFFFFFFF)
        else:
            both = tl.load(payload.to(tl.pointer_type(tl.uint64)) + slot)
        low, high = both.to(tl.uint32), (both >> 32).to(tl.uint32)
        terms = weigh(low, slot * 2) + weigh(high, slot * 2 + 1)
    else:
        if MASKED:
            low = tl.load(payload.to(tl.pointer_type(tl.uint32)) + slot, mask=slot < words, other=0)
        else:
            low = tl.load(payload.to(tl.pointer_type(tl.uint32)) + slot)
        high = low
        terms = weigh(low, slot)
    return low, high, tl.sum(terms, 0)


@triton.jit
def _store_codes(payload, low, high, slot, n, BITS: tl.constexpr, MASKED: tl.constexpr):
    """Inverse of `_load_codes`; gives the checksum terms."""
    use = None
    if MASKED:
        use = slot * _SLOT < n
    if BITS == 6:
        terms = low.to(tl.uint64) * 0
        for k in tl.static_range(3):
            half = (high if k == 2 else low >> (16 * k)).to(tl.uint16)
            tl.store(payload.to(tl.pointer_type(tl.uint16)) + slot * 3 + k, half, mask=use)
            terms += weigh_bytes(half, slot * 6 + 2 * k)
    elif BITS == 8:
        both = low.to(tl.uint64) | (high.to(tl.uint64) << 32)
        tl.store(payload.to(tl.pointer_type(tl.uint64)) + slot, both, mask=use)
        terms = weigh(low, slot * 2) + weigh(high, slot * 2 + 1)
    else:
        tl.store(payload.to(tl.pointer_type(tl.uint32)) + slot, low, mask=use)
        terms = weigh(low, slot)
    return tl.sum(terms, 0)


@triton.jit
def _top(wide):
    """The largest magnitudes of slots, float32 bits in 8 columns."""
    top = wide[0] & _MAGNITUDE
    for j in tl.static_range(1, _SLOT):
        top = tl.maximum(top, wide[j] & _MAGNITUDE)
    return top


@triton.jit
def _spread(x, BLOCKS: tl.constexpr, LANES: tl.constexpr):
    """A value of each block for each of its slots."""
    return tl.reshape(tl.broadcast_to(x[:, None], [BLOCKS, LANES]), [BLOCKS * LANES])


@triton.jit
def _decode_slots(
    static_ptr,
    scales_at,
    g,
    slot,
    n,
    BITS: tl.constexpr,
    M: tl.constexpr,
    BIAS: tl.constexpr,
    INF: tl.constexpr,
    NAN: tl.constexpr,
    INTEGER: tl.constexpr,
    BLOCK: tl.constexpr,
    HEAD: tl.constexpr,
    MASKED: tl.constexpr,
):
    """(float32 values of slots, 8 columns; checksum terms)."""
    low, high, total = _load_codes(static_ptr, slot, n, BITS, MASKED)
    LANES: tl.constexpr = BLOCK // _SLOT
    at = slot // LANES
    scales_ptr = static_ptr + scales_at
    if MASKED:
        scales = tl.load(scales_ptr + at, mask=slot * _SLOT < n, other=0).to(tl.int32)
    else:
        scales = tl.load(scales_ptr + at).to(tl.int32)
    terms = tl.where(slot % LANES == 0, weigh_bytes(scales, scales_at + at), 0)
    if HEAD > 0:
        factor = _step(scales, g)
    else:
        factor = _power(scales)
    q = _unpack(low, high, BITS)
    values = ()
    for j in tl.static_range(_SLOT):
        values = values + (_element_value(q[j], factor, BITS, M, BIAS, INF, NAN, INTEGER),)
    return values, total + tl.sum(terms, 0)


@triton.jit
def _tensor_scale(static_ptr, scales_at):
    """The float32 before a chunk's scales.

    A damaged one is reported by the check; what is decoded with it has no meaning.
    """
    g = tl.load((static_ptr + scales_at * 128).to(tl.pointer_type(tl.float32)))
    return tl.where(g > 0, g, 1.0)


@triton.jit
def _chosen_scale(stats_ptr):
    """g, by which the largest magnitude becomes 448 * 6, from its bits."""
    largest = tl.minimum(tl.maximum(tl.load(stats_ptr), 0), _INFINITY - 1).to(tl.int32)
    divisor = _float(tl.where(largest == 0, 0x3F800000, largest))
    g = tl.minimum(tl.div_rn(divisor * 0 + _RANGE, divisor), _FLT_MAX)
    return tl.where(largest == 0, 1.0, g)


@triton.jit
def _sums(
    x,
    source_ptr,
    scales_at,
    h,
    slot,
    n,
    BITS: tl.constexpr,
    M: tl.constexpr,
    BIAS: tl.constexpr,
    INF: tl.constexpr,
    NAN: tl.constexpr,
    INTEGER: tl.constexpr,
    BLOCK: tl.constexpr,
    HEAD: tl.constexpr,
    EXP: tl.constexpr,
    ITEM: tl.constexpr,
    SLOTS: tl.constexpr,
    ADD: tl.constexpr,
    PTX: tl.constexpr,
    MASKED: tl.constexpr,
):
    """(float32 bits of elements, 8 columns; checksum terms of what was added).

    With ADD, what the static part at `source_ptr` decodes to is added, in float32, and the sum
    rounded to the plan's type; elements at `x` have ADD bytes then.
    """
    # fmt: off
    wide = _load_elements(x, slot, n, SLOTS, EXP, ADD if ADD > 0 else ITEM, MASKED)
    added = tl.zeros([], tl.uint64)
    if ADD > 0:
        values, added = _decode_slots(
            source_ptr, scales_at, h, slot, n, BITS, M, BIAS, INF, NAN, INTEGER, BLOCK, HEAD,
            MASKED,
        )
        totals = ()
        for j in tl.static_range(_SLOT):
            # What was decoded is rounded to the plan's type first, as decoding does.
            value = _float(widen(narrow(values[j], EXP, ITEM, PTX), EXP, ITEM))
            total = narrow(value + _float(wide[j]), EXP, ITEM, PTX)
            total = widen(total, EXP, ITEM)
            if MASKED:
                total = tl.where(slot * _SLOT + j < n, total, 0)
            totals = totals + (total,)
        wide = totals
    # fmt: on
    return wide, added


@triton.jit
def _encode_tile(
    wide,
    static_ptr,
    scales_at,
    g,
    given,
    slot,
    n,
    BITS: tl.constexpr,
    M: tl.constexpr,
    BIAS: tl.constexpr,
    LIMIT: tl.constexpr,
    INTEGER: tl.constexpr,
    EMAX: tl.constexpr,
    MAX_FRACTION: tl.constexpr,
    CEIL: tl.constexpr,
    BLOCK: tl.constexpr,
    HEAD: tl.constexpr,
    GIVEN: tl.constexpr,
    SLOTS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Encode slots, float32 bits in 8 columns; gives the checksum terms."""
    LANES: tl.constexpr = BLOCK // _SLOT
    top = tl.max(tl.reshape(_top(wide), [SLOTS // LANES, LANES]), 1)
    top = _spread(top, SLOTS // LANES, LANES)
    if HEAD > 0:
        scales, factor = _float_scales(top, g)
        keep = tl.where(scales == _NAN_SCALE, 0, -1)
    else:
        if GIVEN > 0:
            scales, factor = _kept_scales(top, given, EMAX)
        else:
            scales, factor = _power_scales(top, EMAX, MAX_FRACTION, CEIL)
        keep = tl.where(scales == 255, 0, -1)
    q = ()
    for j in tl.static_range(_SLOT):
        q = q + (_round_element(wide[j], keep, factor, BITS, M, BIAS, LIMIT, INTEGER),)
    low, high = _pack(q, BITS)
    total = _store_codes(static_ptr, low, high, slot, n, BITS, MASKED)
    # The first slot of a block writes its scale.
    at = slot // LANES
    own = slot % LANES == 0
    if MASKED:
        own = own & (slot * _SLOT < n)
    tl.store(static_ptr + scales_at + at, scales.to(tl.uint8), mask=own)
    return total + tl.sum(tl.where(own, weigh_bytes(scales, scales_at + at), 0), 0)


@kernel
def _encode_kernel(
    x_ptr,
    out_ptr,
    src_ptr,
    sums_ptr,
    stats_ptr,
    h0: tl.uint64,
    h1: tl.uint64,
    h2: tl.uint64,
    h3: tl.uint64,
    h4: tl.uint64,
    h5: tl.uint64,
    h6: tl.uint64,
    h7: tl.uint64,
    h8: tl.uint64,
    h9: tl.uint64,
    h10: tl.uint64,
    h11: tl.uint64,
    identity: tl.uint64,
    nelem: tl.int64,
    chunk_nelem: tl.int64,
    tiles: tl.int32,
    head: tl.int32,
    static_at: tl.int64,
    static_stride: tl.int64,
    scales_at: tl.int64,
    BITS: tl.constexpr,
    M: tl.constexpr,
    BIAS: tl.constexpr,
    INF: tl.constexpr,
    NAN: tl.constexpr,
    INTEGER: tl.constexpr,
    BLOCK: tl.constexpr,
    HEAD: tl.constexpr,
    EXP: tl.constexpr,
    ITEM: tl.constexpr,
    SLOTS: tl.constexpr,
    PTX: tl.constexpr,
    CVT: tl.constexpr,
    PAIRS: tl.constexpr,
    LIMIT: tl.constexpr,
    EMAX: tl.constexpr,
    MAX_FRACTION: tl.constexpr,
    CEIL: tl.constexpr,
    GIVEN: tl.constexpr,
    ALIGNED: tl.constexpr,
    ADD: tl.constexpr,
    SUMS: tl.constexpr,
):
    """Encode one tile of one chunk. Header and records were cleared before.

    With ADD the elements of the buffer at `src_ptr`, of the same plan, are added before; those at
    `x_ptr` have ADD bytes, the plan's ITEM or float32's 4. With HEAD the tensor's largest magnitude
    is at `stats_ptr`; there, or in the source, are the scales that are GIVEN.
    """
    pid = tl.program_id(0)
    chunk = pid // tiles
    tile = pid % tiles
    first = chunk.to(tl.int64) * chunk_nelem
    if ALIGNED:
        first = tl.multiple_of(first, 16)
    n = tl.maximum(tl.minimum(chunk_nelem, nelem - first), 0)
    static_ptr = out_ptr + (static_at + chunk.to(tl.int64) * static_stride) * 128
    source_ptr = src_ptr + (static_at + chunk.to(tl.int64) * static_stride) * 128
    x = elements_at(x_ptr, ADD if ADD > 0 else ITEM) + first
    codes_at = scales_at * 128 + HEAD
    slot = tile.to(tl.int64) * SLOTS + _lanes(SLOTS)
    g = 1.0
    h = 1.0
    if HEAD > 0:
        g = _chosen_scale(stats_ptr)
        if ADD > 0:
            h = _tensor_scale(source_ptr, scales_at)
    PAIRED: tl.constexpr = CVT and PAIRS
    plain = (tile.to(tl.int64) + 1) * (SLOTS * _SLOT) <= n
    if PAIRED and HEAD > 0:
        plain = plain & _is_usual(g) & _is_usual(h)
    # fmt: off
    if plain:
        given = _given_scales(
            stats_ptr, source_ptr + codes_at, first, nelem, slot, n, BLOCK, GIVEN, False,
        )
        if PAIRED:
            words, added = _sum_pairs(
                x, source_ptr, codes_at, h, tile, BITS, M, BLOCK, HEAD, EXP, SLOTS, ADD,
            )
            total = _encode_pairs(
                words, static_ptr, codes_at, g, given, tile, BITS, M, EMAX, MAX_FRACTION, CEIL,
                BLOCK, HEAD, GIVEN, EXP, SLOTS,
            )
        else:
            wide, added = _sums(
                x, source_ptr, codes_at, h, slot, n, BITS, M, BIAS, INF, NAN, INTEGER, BLOCK, HEAD,
                EXP, ITEM, SLOTS, ADD, PTX, False,
            )
            total = _encode_tile(
                wide, static_ptr, codes_at, g, given, slot, n, BITS, M, BIAS, LIMIT, INTEGER, EMAX,
                MAX_FRACTION, CEIL, BLOCK, HEAD, GIVEN, SLOTS, False,
            )
    else:
        wide, added = _sums(
            x, source_ptr, codes_at, h, slot, n, BITS, M, BIAS, INF, NAN, INTEGER, BLOCK, HEAD,
            EXP, ITEM, SLOTS, ADD, PTX, True,
        )
        given = _given_scales(
            stats_ptr, source_ptr + codes_at, first, nelem, slot, n, BLOCK, GIVEN, True,
        )
        total = _encode_tile(
            wide, static_ptr, codes_at, g, given, slot, n, BITS, M, BIAS, LIMIT, INTEGER, EMAX,
            MAX_FRACTION, CEIL, BLOCK, HEAD, GIVEN, SLOTS, True,
        )
    # fmt: on
    record = out_ptr.to(tl.pointer_type(tl.int64)) + head + chunk.to(tl.int64) * 4
    if tile == tiles - 1:
        # The codes of 8 elements, which were stored whole, are BITS bytes.
        clear(static_ptr, (n + 7) // 8 * BITS, scales_at * 128, tile * 0, tile * 0 + 1)
        if HEAD > 0:
            j = tl.arange(0, 4)
            g_bits = tl.where(j == 0, g.to(tl.uint32, bitcast=True), tl.zeros([4], tl.uint32))
            at = scales_at * 32 + j
            tl.store(static_ptr.to(tl.pointer_type(tl.uint32)) + at, g_bits)
            total += tl.sum(weigh(g_bits, at), 0)
        scales_end = codes_at + (n + BLOCK - 1) // BLOCK
        clear(static_ptr, scales_end, static_stride * 128, tile * 0, tile * 0 + 1)
        tl.store(record + 2, chunk.to(tl.int64) << 32)
        total += identity + record_term(n, n * 0, chunk * 0, chunk)
        if chunk == 0:
            k = tl.arange(0, 16)
            w = header_word(k, h0, h1, h2, h3, h4, h5, h6, h7, h8, h9, h10, h11)
            tl.store(out_ptr.to(tl.pointer_type(tl.uint64)) + k, w, mask=k < tl.minimum(head, 12))
    if SUMS:
        tl.atomic_add(record, total.to(tl.int64, bitcast=True), sem="relaxed")
        if ADD > 0:
            tl.atomic_add(sums_ptr + chunk, added.to(tl.int64, bitcast=True), sem="relaxed")


@kernel
def _measure_kernel(
    x_ptr,
    src_ptr,
    stats_ptr,
    nelem: tl.int64,
    chunk_nelem: tl.int64,
    tiles: tl.int32,
    static_at: tl.int64,
    static_stride: tl.int64,
    scales_at: tl.int64,
    BITS: tl.constexpr,
    M: tl.constexpr,
    BIAS: tl.constexpr,
    INF: tl.constexpr,
    NAN: tl.constexpr,
    INTEGER: tl.constexpr,
    BLOCK: tl.constexpr,
    HEAD: tl.constexpr,
    EXP: tl.constexpr,
    ITEM: tl.constexpr,
    SLOTS: tl.constexpr,
    PTX: tl.constexpr,
    CVT: tl.constexpr,
    PAIRS: tl.constexpr,
    ALIGNED: tl.constexpr,
    ADD: tl.constexpr,
):
    """The largest finite magnitude of one tile, as float32 bits, into `stats_ptr`.

    With ADD of sums, as `_encode_kernel` makes them. Else the tensor is a single chunk.
    """
    pid = tl.program_id(0)
    chunk = pid // tiles
    tile = pid % tiles
    first = chunk.to(tl.int64) * chunk_nelem
    if ALIGNED:
        first = tl.multiple_of(first, 16)
    n = tl.maximum(tl.minimum(chunk_nelem, nelem - first), 0)
    source_ptr = src_ptr + (static_at + chunk.to(tl.int64) * static_stride) * 128
    x = elements_at(x_ptr, ADD if ADD > 0 else ITEM) + first
    codes_at = scales_at * 128 + HEAD
    slot = tile.to(tl.int64) * SLOTS + _lanes(SLOTS)
    h = 1.0
    if ADD > 0:
        h = _tensor_scale(source_ptr, scales_at)
    PAIRED: tl.constexpr = CVT and PAIRS
    plain = (tile.to(tl.int64) + 1) * (SLOTS * _SLOT) <= n
    if PAIRED and HEAD > 0:
        plain = plain & _is_usual(h)
    # fmt: off
    if plain:
        if PAIRED:
            words, _ = _sum_pairs(
                x, source_ptr, codes_at, h, tile, BITS, M, BLOCK, HEAD, EXP, SLOTS, ADD,
            )
            top = _finite_top_of_pairs(words, EXP)
        else:
            wide, _ = _sums(
                x, source_ptr, codes_at, h, slot, n, BITS, M, BIAS, INF, NAN, INTEGER, BLOCK, HEAD,
                EXP, ITEM, SLOTS, ADD, PTX, False,
            )
            top = _finite_top(wide)
    else:
        wide, _ = _sums(
            x, source_ptr, codes_at, h, slot, n, BITS, M, BIAS, INF, NAN, INTEGER, BLOCK, HEAD,
            EXP, ITEM, SLOTS, ADD, PTX, True,
        )
        top = _finite_top(wide)
    # fmt: on
    tl.atomic_max(stats_ptr, top.to(tl.int64), sem="relaxed")


@kernel
def _scales_kernel(
    x_ptr,
    scales_ptr,
    nelem: tl.int64,
    EMAX: tl.constexpr,
    MAX_FRACTION: tl.constexpr,
    BLOCK: tl.constexpr,
    EXP: tl.constexpr,
    ITEM: tl.constexpr,
    SLOTS: tl.constexpr,
    PAIRED: tl.constexpr,
):
    """Scale bytes of the blocks of one tile by the rule "ceil"."""
    tile = tl.program_id(0)
    x = elements_at(x_ptr, ITEM)
    slot = tile.to(tl.int64) * SLOTS + _lanes(SLOTS)
    if (tile.to(tl.int64) + 1) * (SLOTS * _SLOT) <= nelem:
        if PAIRED:
            top = _top_of_pairs(_load_pairs(x, tile, SLOTS), EXP)
        else:
            top = _top(_load_elements(x, slot, nelem, SLOTS, EXP, ITEM, False))
    else:
        top = _top(_load_elements(x, slot, nelem, SLOTS, EXP, ITEM, True))
    LANES: tl.constexpr = BLOCK // _SLOT
    top = tl.max(tl.reshape(top, [SLOTS // LANES, LANES]), 1)
    scales, _ = _power_scales(top, EMAX, MAX_FRACTION, True)
    at = tile.to(tl.int64) * (SLOTS // LANES) + tl.arange(0, SLOTS // LANES)
    tl.store(scales_ptr + at, scales.to(tl.uint8), mask=at * BLOCK < nelem)


@triton.jit
def _finite_top(wide):
    """The largest finite magnitude of 8 columns of float32 bits."""
    top = wide[0] * 0
    for j in tl.static_range(_SLOT):
        magnitude = wide[j] & _MAGNITUDE
        top = tl.maximum(top, tl.where(magnitude < _INFINITY, magnitude, 0))
    return tl.max(top, 0)


@triton.jit
def _decode_tile(
    static_ptr,
    scales_at,
    g,
    out_ptr,
    at,
    lo,
    hi,
    slot,
    n,
    BITS: tl.constexpr,
    M: tl.constexpr,
    BIAS: tl.constexpr,
    INF: tl.constexpr,
    NAN: tl.constexpr,
    INTEGER: tl.constexpr,
    BLOCK: tl.constexpr,
    HEAD: tl.constexpr,
    EXP: tl.constexpr,
    ITEM: tl.constexpr,
    ADD: tl.constexpr,
    STORE: tl.constexpr,
    PTX: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Decode slots; gives the checksum terms.

    Element i of the chunk goes to `at + i` if it is in [lo, hi).
    """
    # fmt: off
    values, total = _decode_slots(
        static_ptr, scales_at, g, slot, n, BITS, M, BIAS, INF, NAN, INTEGER, BLOCK, HEAD, MASKED,
    )
    # fmt: on
    if STORE:
        # 16 bytes of what is stored, or added to, at once.
        COLUMNS: tl.constexpr = 16 // (ADD if ADD > 0 else ITEM)
        LOG: tl.constexpr = 3 if COLUMNS == 8 else 2
        for part in tl.static_range(_SLOT // COLUMNS):
            columns = ()
            for j in tl.static_range(COLUMNS):
                bits = narrow(values[part * COLUMNS + j], EXP, ITEM, PTX)
                columns = columns + ((bits if ITEM == 4 else bits.to(tl.uint16)),)
            bits = from_columns(columns, COLUMNS, LOG).to(tl.uint32)
            i = slot[:, None] * _SLOT + part * COLUMNS + tl.arange(0, COLUMNS)[None, :]
            if MASKED:
                store_element(out_ptr, at + i, bits, (i >= lo) & (i < hi), EXP, ITEM, ADD)
            else:
                store_element(out_ptr, at + i, bits, None, EXP, ITEM, ADD)
    return total


@kernel
def _decode_kernel(
    src_ptr,
    out_ptr,
    sums_ptr,
    start: tl.int64,
    stop: tl.int64,
    first_chunk: tl.int32,
    nelem: tl.int64,
    chunk_nelem: tl.int64,
    tiles: tl.int32,
    static_at: tl.int64,
    static_stride: tl.int64,
    scales_at: tl.int64,
    BITS: tl.constexpr,
    M: tl.constexpr,
    BIAS: tl.constexpr,
    INF: tl.constexpr,
    NAN: tl.constexpr,
    INTEGER: tl.constexpr,
    BLOCK: tl.constexpr,
    HEAD: tl.constexpr,
    EXP: tl.constexpr,
    ITEM: tl.constexpr,
    SLOTS: tl.constexpr,
    PTX: tl.constexpr,
    CVT: tl.constexpr,
    PAIRS: tl.constexpr,
    ALIGNED: tl.constexpr,
    ADD: tl.constexpr,
    STORE: tl.constexpr,
    SUMS: tl.constexpr,
):
    """Elements `start` to `stop` of the tensor as far as they lie in one tile of one chunk."""
    pid = tl.program_id(0)
    chunk = first_chunk + pid // tiles
    tile = pid % tiles
    first = chunk.to(tl.int64) * chunk_nelem
    n = tl.maximum(tl.minimum(chunk_nelem, nelem - first), 0)
    static_ptr = src_ptr + (static_at + chunk.to(tl.int64) * static_stride) * 128
    codes_at = scales_at * 128 + HEAD
    slot = tile.to(tl.int64) * SLOTS + _lanes(SLOTS)
    g = 1.0
    if HEAD > 0:
        g = _tensor_scale(static_ptr, scales_at)
    at = first - start
    if ALIGNED:
        at = tl.multiple_of(at, 16)
    lo = tl.maximum(start - first, 0)
    hi = tl.minimum(stop - first, n)
    begin = tile.to(tl.int64) * (SLOTS * _SLOT)
    PAIRED: tl.constexpr = CVT and PAIRS
    plain = (begin >= lo) & (begin + SLOTS * _SLOT <= hi)
    if PAIRED and HEAD > 0:
        plain = plain & _is_usual(g)
    # fmt: off
    if plain:
        if PAIRED:
            words, total = _decode_pairs(
                static_ptr, codes_at, g, tile, BITS, M, BLOCK, HEAD, EXP, SLOTS,
            )
            if STORE:
                quiet = ()
                for j in tl.static_range(_SLOT // 2):
                    quiet = quiet + (_quiet(words[j], EXP),)
                _store_pairs(quiet, elements_at(out_ptr, ITEM) + at, tile, SLOTS)
        else:
            total = _decode_tile(
                static_ptr, codes_at, g, out_ptr, at, lo, hi, slot, n, BITS, M, BIAS, INF, NAN,
                INTEGER, BLOCK, HEAD, EXP, ITEM, ADD, STORE, PTX, False,
            )
    else:
        total = _decode_tile(
            static_ptr, codes_at, g, out_ptr, at, lo, hi, slot, n, BITS, M, BIAS, INF, NAN,
            INTEGER, BLOCK, HEAD, EXP, ITEM, ADD, STORE, PTX, True,
        )
    # fmt: on
    if SUMS:
        tl.atomic_add(sums_ptr + chunk, total.to(tl.int64, bitcast=True), sem="relaxed")


@kernel
def _check_kernel(
    src_ptr,
    sums_ptr,
    status_ptr,
    h0: tl.uint64,
    h1: tl.uint64,
    h2: tl.uint64,
    h3: tl.uint64,
    h4: tl.uint64,
    h5: tl.uint64,
    h6: tl.uint64,
    h7: tl.uint64,
    h8: tl.uint64,
    h9: tl.uint64,
    h10: tl.uint64,
    h11: tl.uint64,
    start: tl.int64,
    stop: tl.int64,
    first_chunk: tl.int32,
    first_whole: tl.int32,
    end_whole: tl.int32,
    identity: tl.uint64,
    nelem: tl.int64,
    chunk_nelem: tl.int64,
    chunks: tl.int32,
    head: tl.int32,
    static_at: tl.int64,
    static_stride: tl.int64,
    scales_at: tl.int64,
    planned: tl.int32,
    summed: tl.int32,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    HEAD: tl.constexpr,
    SCALE: tl.constexpr,
    SUMS: tl.constexpr,
):
    """A chunk's record and last code; if it was decoded whole its padding and checksum.

    Before the scales lie HEAD bytes: a float32, which must be positive and finite, and zeros.
    """
    chunk = first_chunk + tl.program_id(0)
    first = chunk.to(tl.int64) * chunk_nelem
    n = tl.maximum(tl.minimum(chunk_nelem, nelem - first), 0)
    record = src_ptr.to(tl.pointer_type(tl.int64)) + head + chunk.to(tl.int64) * 4
    both = tl.load(record + 2)
    where = chunk.to(tl.int64) << 8
    # fmt: off
    if (planned != 0) & (chunk == first_chunk):
        check_header(
            src_ptr, status_ptr, head, chunks, static_at,
            h0, h1, h2, h3, h4, h5, h6, h7, h8, h9, h10, h11,
        )
    # fmt: on
    if (both & 0xFFFFFFFC) != 0:
        report(status_ptr, FLAGS + where)
    if (both & 2) != 0:
        report(status_ptr, OVERFLOWED + where)
    odd = (both & 1) | tl.load(record + 1) | tl.load(record + 3)
    if planned != 0:
        odd |= ((both >> 32) & 0xFFFFFFFF) ^ chunk
    if summed == 0:
        odd |= tl.load(record)
    if odd != 0:
        report(status_ptr, RECORD + where)
    static_ptr = src_ptr + (static_at + chunk.to(tl.int64) * static_stride) * 128
    used = (n * BITS + 7) // 8
    if BITS < 8:
        if (n > 0) & (first + n > start) & (first + n <= stop):
            behind = tl.load(static_ptr + used - 1).to(tl.int32) >> (((n * BITS - 1) & 7) + 1)
            if behind != 0:
                report(status_ptr, CHUNK + where + CHUNK_PAYLOAD)
    scales_ptr = static_ptr + scales_at * 128
    if HEAD > 0:
        g = tl.load(scales_ptr.to(tl.pointer_type(tl.int32)))
        if (g <= 0) | (g >= _INFINITY):
            report(status_ptr, CHUNK + where + CHUNK_PAYLOAD)
    if (chunk >= first_whole) & (chunk < end_whole):
        # The words of codes are summed already, with what pads the last of them.
        words_end = (n * BITS + 31) // 32 * 4
        _, last = padding_of(static_ptr, used, words_end)
        total, padding = padding_of(static_ptr, words_end, scales_at * 128)
        scales_end = scales_at * 128 + HEAD + (n + BLOCK - 1) // BLOCK * SCALE
        more, behind_scales = padding_of(static_ptr, scales_end, static_stride * 128)
        padding |= last | behind_scales
        if HEAD > 0:
            head_at = scales_at * 128
            first_word, _ = padding_of(static_ptr, head_at, head_at + 4)
            behind, inside = padding_of(static_ptr, head_at + 4, head_at + HEAD)
            more += first_word + behind
            padding |= inside
        if padding != 0:
            report(status_ptr, CHUNK + where + CHUNK_PADDING)
        if SUMS:
            total += more + tl.load(sums_ptr + chunk).to(tl.uint64, bitcast=True) + identity
            total += record_term(n, n * 0, both & 0xFFFFFFFF, both >> 32)
            if total != tl.load(record).to(tl.uint64, bitcast=True):
                report(status_ptr, CHUNK + where + CHUNK_SUM)


def aligned_for(plan: Plan, tensor: torch.Tensor, start: int = 0) -> bool:
    """Whether every chunk's elements start at a multiple of 16 bytes of `tensor`."""
    even = plan.chunks == 1 or plan.chunk_nelem % 16 == 0
    return even and start % 16 == 0 and tensor.data_ptr() % 16 == 0


@functools.cache
def converts(device: torch.device) -> bool:
    """True if the device converts small floats by itself and has the packed integers of sm_90."""
    if not PTX or device.type != "cuda":
        return False
    return bool(torch.cuda.get_device_capability(device) >= (9, 0))


def _constants(
    blocks: Blocks, dtype: DType, tiling: Tiling, cvt: bool, pairs: bool
) -> dict[str, float]:
    """What all kernels know, as constexprs.

    `pairs`: words of two elements of 16 bits may be read and written.
    """
    e = blocks.element
    pairs = pairs and dtype.itemsize == 2 and e.bits != 6 and not e.is_integer
    return {
        "BITS": e.bits,
        "M": e.mantissa,
        "BIAS": e.bias,
        "INF": e.infinity,
        "NAN": e.nan,
        "INTEGER": e.is_integer,
        "BLOCK": blocks.block,
        "HEAD": blocks.head,
        "EXP": dtype.exponent,
        "ITEM": dtype.itemsize,
        "SLOTS": tiling.slots,
        "PTX": PTX,
        "CVT": cvt,
        "PAIRS": pairs,
    }


@functools.cache
def encode_variant(
    blocks: Blocks,
    dtype: DType,
    tiling: Tiling,
    aligned: bool,
    add: int,
    sums: bool,
    cvt: bool,
    given: int = 0,
) -> Variant:
    """The kernel that encodes elements, or their sums with a buffer if they have `add` bytes.

    Scales are chosen or `given`, by stats (1) or the buffer (2).
    """
    e = blocks.element
    chosen = _constants(blocks, dtype, tiling, cvt, aligned and add != 4) | {
        "LIMIT": float(values_of(e)[e.largest]),
        "EMAX": e.emax,
        "MAX_FRACTION": e.max_fraction,
        "CEIL": blocks.ceil,
    }
    chosen |= {"GIVEN": given, "ALIGNED": aligned, "ADD": add, "SUMS": sums}
    return Variant(_encode_kernel, options(tiling.warps), **chosen)


@functools.cache
def measure_variant(
    blocks: Blocks, dtype: DType, tiling: Tiling, aligned: bool, add: int, cvt: bool
) -> Variant:
    """The kernel that finds the largest magnitude of elements, or of sums as `encode_variant`'s."""
    chosen = _constants(blocks, dtype, tiling, cvt, aligned and add != 4)
    chosen |= {"ALIGNED": aligned, "ADD": add}
    return Variant(_measure_kernel, options(tiling.warps), **chosen)


@functools.cache
def decode_variant(
    blocks: Blocks,
    dtype: DType,
    tiling: Tiling,
    aligned: bool,
    add: int,
    store: bool,
    sums: bool,
    cvt: bool,
) -> Variant:
    """The kernel that decodes; `add`: bytes of an accumulator's elements, or 0."""
    chosen = _constants(blocks, dtype, tiling, cvt, aligned and not add)
    chosen |= {"ALIGNED": aligned, "ADD": add}
    return Variant(_decode_kernel, options(tiling.warps), **chosen, STORE=store, SUMS=sums)


@functools.cache
def _check_variant(bits: int, block: int, head: int, scale: int, sums: bool) -> Variant:
    sizes = {"BITS": bits, "BLOCK": block, "HEAD": head, "SCALE": scale}
    return Variant(_check_kernel, options(1), **sizes, SUMS=sums)


@functools.cache
def scales_variant(blocks: Blocks, dtype: DType, tiling: Tiling, pairs: bool) -> Variant:
    """The kernel that finds scale bytes; `pairs`: by words of two elements."""
    e = blocks.element
    chosen = {
        "EMAX": e.emax,
        "MAX_FRACTION": e.max_fraction,
        "BLOCK": blocks.block,
        "EXP": dtype.exponent,
        "ITEM": dtype.itemsize,
        "SLOTS": tiling.slots,
        "PAIRED": pairs,
    }
    return Variant(_scales_kernel, options(tiling.warps), **chosen)


def _tiles(plan: Plan, tiling: Tiling) -> int:
    return max(1, -(-plan.chunk_nelem // (tiling.slots * int(_SLOT.value))))


def _geometry(plan: Plan) -> tuple[int, int, int]:
    """Where static parts and scales are, in units of 128 bytes, so that kernels know alignments."""
    stride, payload = plan.static_stride, plan.layout.sections[0].nbytes
    return plan.static_offset // 128, stride // 128, payload // 128


def measure_elements(blocks: Blocks, dtype: DType, x) -> torch.Tensor:
    """The largest finite magnitude of `x` as float32 bits, int64, shape (1,), on its device."""
    stats = torch.zeros(1, dtype=torch.int64, device=x.device)
    n = x.numel()
    if n:
        aligned = x.data_ptr() % 16 == 0
        variant = measure_variant(blocks, dtype, ENCODE, aligned, 0, converts(x.device))
        tiles = -(-n // (ENCODE.slots * int(_SLOT.value)))
        variant.launch(tiles, (x, x, stats), n, n, tiles, 0, 0, 0)
    return stats


def measure_sums(blocks: Blocks, plan: Plan, src, x) -> torch.Tensor:
    """As `measure_elements`, of what `src`, a buffer of `plan`, decodes to plus `x`."""
    stats = torch.zeros(1, dtype=torch.int64, device=x.device)
    tiles = _tiles(plan, DECODE_ADD_ENCODE)
    aligned = aligned_for(plan, x)
    measure_variant(
        blocks, plan.dtype, DECODE_ADD_ENCODE, aligned, x.element_size(), converts(x.device)
    ).launch(
        tiles * plan.chunks,
        (x, src, stats),
        plan.nelem,
        plan.chunk_nelem,
        tiles,
        *_geometry(plan),
    )
    return stats


def measure_scales(blocks: Blocks, dtype: DType, x, found: torch.Tensor) -> None:
    """The scale bytes of the blocks of `x` to `found`, uint8, shape (blocks,), on its device."""
    n = x.numel()
    pairs = dtype.itemsize == 2 and x.data_ptr() % 16 == 0 and converts(x.device)
    if n:
        tiles = -(-n // (ENCODE.slots * int(_SLOT.value)))
        scales_variant(blocks, dtype, ENCODE, pairs).launch(tiles, (x, found), n)


def encode_blocks(blocks: Blocks, plan: Plan, x, out, stats, src=None, scratch=None) -> None:
    """Encode `x` into `out`, or its sum with `src`, a buffer of `plan`; float32 `x` may be added.

    `stats`, int64, shape (1,), matters where there is a tensor scale. Where scales are given they
    are those, uint8, shape (blocks,), or of `src` if there are none, or chosen. The checksum terms
    of `src` are left in `scratch`.
    """
    add = 0 if src is None else x.element_size()
    tiling = DECODE_ADD_ENCODE if add else ENCODE
    tiles = _tiles(plan, tiling)
    out[: plan.static_offset].zero_()
    header = header_words(plan)
    aligned = aligned_for(plan, x)
    given = 0
    if blocks.given:
        given = 1 if stats is not None else 2 if add else 0
    cvt = converts(out.device)
    encode_variant(blocks, plan.dtype, tiling, aligned, add, plan.checksum, cvt, given).launch(
        tiles * plan.chunks,
        (x, out, src if add else out, scratch if add else out, out if stats is None else stats),
        *header[:HEADER_WORDS],
        identity_term(plan.codec.id, plan.codec.version, plan.dtype.id, 0),
        plan.nelem,
        plan.chunk_nelem,
        tiles,
        plan.header.nbytes // 8,
        *_geometry(plan),
    )
    add_header(plan, out, header)


def add_and_encode_blocks(
    blocks: Blocks, plan: Plan, src, x, out, scratch, status, stats, planned: bool
) -> None:
    """Encode into `out` the elements `x` plus those of `src`, a buffer of the same plan.

    `scratch` and `status` are those of `decode_blocks`: what is wrong with `src` is left in
    `status`.
    """
    if plan.checksum:
        scratch[: 8 * plan.chunks].zero_()
    encode_blocks(blocks, plan, x, out, stats, src, scratch)
    _check(blocks, plan, src, scratch, status, 0, plan.nelem, True, plan.checksum, planned)


def decode_blocks(
    blocks: Blocks,
    plan: Plan,
    src,
    out,
    scratch,
    status,
    start: int,
    stop: int | None,
    check: bool,
    store: bool,
    add: bool,
    planned: bool,
) -> None:
    """Decode elements `start` to `stop`; see `tightwire.gpu` for the contract of `decode`."""
    stop = plan.nelem if stop is None else stop
    tiling = DECODE_ADD if add else DECODE
    tiles = _tiles(plan, tiling)
    sums = check and plan.checksum and (start < stop or not plan.nelem)
    if sums:
        scratch[: 8 * plan.chunks].zero_()
    if out is None:
        out = src
    first, end, _, _ = touched(plan, start, stop)
    if start < stop and (store or sums):
        adding = out.element_size() if add else 0
        even = aligned_for(plan, out, start)
        cvt = converts(src.device)
        decode_variant(blocks, plan.dtype, tiling, even, adding, store, sums, cvt).launch(
            tiles * (end - first),
            (src, out, scratch),
            start,
            stop,
            first,
            plan.nelem,
            plan.chunk_nelem,
            tiles,
            *_geometry(plan),
        )
    _check(blocks, plan, src, scratch, status, start, stop, check, sums, planned)


def _check(
    blocks: Blocks, plan: Plan, src, scratch, status, start, stop, check, sums, planned
) -> None:
    checks = (start, stop, check, sums, planned, blocks.element.bits, blocks.block, blocks.head)
    check_chunks(plan, src, scratch, status, *checks)


def check_chunks(
    plan: Plan,
    src,
    scratch,
    status,
    start,
    stop,
    check,
    sums,
    planned,
    bits,
    block,
    head=0,
    scale=1,
) -> None:
    """Check the chunks that elements `start` to `stop` lie in, after they were decoded.

    `bits` are those of a code, `head` the bytes before the scales of blocks of `block` elements,
    which have `scale` bytes each.
    """
    first, end, first_whole, end_whole = touched(plan, start, stop)
    if not check:
        end_whole = first_whole
    header = header_words(plan)
    _check_variant(bits, block, head, scale, sums).launch(
        end - first,
        (src, scratch, status),
        *header[:HEADER_WORDS],
        start,
        stop,
        first,
        first_whole,
        end_whole,
        identity_term(plan.codec.id, plan.codec.version, plan.dtype.id, 0),
        plan.nelem,
        plan.chunk_nelem,
        plan.chunks,
        plan.header.nbytes // 8,
        *_geometry(plan),
        int(planned),
        int(plan.checksum),
    )
    if planned:
        match_header(plan, src, status, header)
