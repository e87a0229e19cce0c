# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment,attr-defined,misc"
"""Blocks of small floats with a scale each, on a GPU: what mx and nvfp4 share.

A thread holds a slot of 8 neighbouring elements: it makes one piece of packed codes of them, and no
value changes hands but the largest magnitude of a block. Where the device converts small floats by
itself, whole tiles of dtypes of 16 bits stay words of two elements as far as they can.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from .driver_triton import Tiling
from .frame_triton import key_of, weigh, weigh_bytes
from .minifloat import INFINITY, NAN, Element, values_of
from .minifloat_triton import MAGNITUDE, as_bits, as_float, by_ptx, halves, round_magnitude
from .runs_triton import lanes
from .tiles_triton import Format

#: Elements that a thread holds side by side.
SLOT = tl.constexpr(8)
_SIGN = tl.constexpr(-(1 << 31))
_INFINITY = tl.constexpr(INFINITY)
_NAN = tl.constexpr(NAN)
_HALF_LEAST = tl.constexpr(1 << 22)  # 2^-127

#: Launch parameters of encoding, decoding and encoding sums.
TILINGS = (Tiling(1024, 8), Tiling(512, 4), Tiling(256, 4))
#: Of sums of several buffers: registers for all that is loaded of some of them.
SUMMING = Tiling(256, 4, registers=112, together=4)
#: Of a sum over GPUs, of which each tile waits for others.
EXCHANGING = Tiling(512, 4, registers=128)


@dataclass(frozen=True)
class Blocks(Format):
    """What the kernels know of a codec.

    Attributes:
        bits, mantissa, bias, infinity, nan, integer, limit: Of an element; see `Element`, and the
            largest value that has a code.
        emax, max_fraction: See `mx.block_scales`.
        block: Elements of a block.
        head: Bytes before the scales of a chunk. nvfp4's scales are e4m3 over a float32 there;
            without a head, scales are powers of two.
        ceil: Scales are rounded up.
    """

    bits: int
    mantissa: int
    bias: int
    infinity: int
    nan: int
    integer: bool
    limit: float
    emax: int
    max_fraction: int
    block: int
    head: int
    ceil: bool


def blocks_of(e: Element, block: int, head: int = 0, ceil: bool = False) -> Blocks:
    """The format of blocks of an element type."""
    return Blocks(
        run=int(SLOT.value),
        limited=False,
        pairs=e.bits != 6 and not e.is_integer,
        checked=head > 0,
        bits=e.bits,
        mantissa=e.mantissa,
        bias=e.bias,
        infinity=e.infinity,
        nan=e.nan,
        integer=e.is_integer,
        limit=float(values_of(e)[e.largest]),
        emax=e.emax,
        max_fraction=e.max_fraction,
        block=block,
        head=head,
        ceil=ceil,
    )


@triton.jit
def _round_element(x, keep, factor, F: tl.constexpr):
    """Code in the top F.bits bits, uint32, of float32 bits `x` & `keep` times `factor`."""
    if F.integer:
        value = as_float(x & keep) * factor
        value = tl.minimum(tl.maximum(value, -F.limit), F.limit)
        # The lowest 8 bits of the sum are 64 times the value.
        code = as_bits(value + 196608.0) << 24
    else:
        code = round_magnitude(as_float(x & keep & MAGNITUDE) * factor, F.mantissa, F.bias, F.limit)
        code = (code << (9 + F.mantissa - F.bits)) | (x & keep & _SIGN)
    return code.to(tl.uint32, bitcast=True)


@triton.jit
def _pack_codes(q, BITS: tl.constexpr):
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
def _unpack_codes(low, high, BITS: tl.constexpr):
    """Inverse of `_pack_codes`; below the code, bits are arbitrary."""
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
def _element_value(q, factor, F: tl.constexpr):
    """float32 values of codes in the top F.bits bits, times `factor`."""
    if F.integer:
        return (q.to(tl.int32, bitcast=True) >> 24).to(tl.float32) * 0.015625 * factor
    else:
        MASK: tl.constexpr = ((1 << (F.bits - 1)) - 1) << (23 - F.mantissa)
        code = (q >> (9 + F.mantissa - F.bits)).to(tl.int32, bitcast=True) & MASK
        value = as_float(code) * (2.0 ** (127 - F.bias))
        if F.infinity < 256:
            value = tl.where(code >= F.infinity << (23 - F.mantissa), float("inf"), value)
        bits = as_bits(value * factor) ^ (q.to(tl.int32, bitcast=True) & _SIGN)
        if F.nan < 256:
            bits = tl.where(code >= F.nan << (23 - F.mantissa), _NAN, bits)
        return as_float(bits)


@triton.jit
def _top_pair(a, b, EXP: tl.constexpr):
    """Larger magnitudes of words' elements, with any sign; NaN where one is."""
    return by_ptx(
        "max.NaN.xorsign.abs." + ("bf16x2" if EXP == 8 else "f16x2") + " $0, $1, $2;",
        "=r,r,r",
        (a, b),
    )


@triton.jit
def fours(word, M: tl.constexpr, SCALED: tl.constexpr):
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
def _code_values(low, high, F: tl.constexpr, SCALED: tl.constexpr):
    """float32 values of eight codes; not SCALED, those of e2m1 are 2^-6 times as large."""
    if F.bits == 4:
        # With two zeros behind the mantissa e2m1 is e4m3, but for what their biases differ by.
        even = ((low << 2) & 0x1C1C1C1C) | ((low << 4) & 0x80808080)
        odd = ((low >> 2) & 0x1C1C1C1C) | (low & 0x80808080)
        a, b = fours(even, 3, SCALED), fours(odd, 3, SCALED)
        return (a[0], b[0], a[1], b[1], a[2], b[2], a[3], b[3])
    else:
        return fours(low, F.mantissa, False) + fours(high, F.mantissa, False)


@triton.jit
def _top_of_pairs(words, EXP: tl.constexpr):
    """The largest magnitudes of slots, as float32 bits, int32; NaN where one is."""
    top = _top_pair(_top_pair(words[0], words[1], EXP), _top_pair(words[2], words[3], EXP), EXP)
    low, high = halves(top & 0x7FFF7FFF, EXP)
    return tl.maximum(as_bits(low), as_bits(high))


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


@triton.jit
def _e2m1_word(y, words):
    """Codes of eight values without sign, with the signs of the elements of four words.

    The code is the value 2 y up to y = 2, from there to 4 half as steep, then a quarter. What y
    adds to it in each of the three parts is added to a float32 whose last place is 1: one rounding,
    in the only part that is not full or empty. Four codes lie side by side in such a number.
    """
    return by_ptx(
        _E2M1_ASM,
        "=&r,r,r,r,r,r,r,r,r,r,r,r,r",
        (y[0], y[1], y[2], y[3], y[4], y[5], y[6], y[7], words[0], words[1], words[2], words[3]),
    )


@triton.jit
def fp8_word(a, b, c, d, M: tl.constexpr):
    """Codes of four values, e4m3 or e5m2, to nearest even and saturating."""
    PAIR: tl.constexpr = "cvt.rn.satfinite.e4m3x2.f32" if M == 3 else "cvt.rn.satfinite.e5m2x2.f32"
    return by_ptx(
        "{ .reg .b16 low, high; "
        + PAIR
        + " low, $2, $1; "
        + PAIR
        + " high, $4, $3; mov.b32 $0, {low, high}; }",
        "=r,r,r,r,r",
        (a, b, c, d),
    )


@triton.jit
def _per_slot(x, L: tl.constexpr, LANES: tl.constexpr):
    """A value of each block for each of its slots."""
    BLOCKS: tl.constexpr = L.rows // LANES
    return tl.reshape(tl.broadcast_to(x[:, None], [BLOCKS, LANES]), [L.rows])


@triton.jit
def block_tops(v, F: tl.constexpr, L: tl.constexpr):
    """The largest magnitudes of blocks, float32 bits, int32, of columns of values or of words of
    two; more than infinity where one is NaN.
    """
    if len(v) == SLOT:
        top = as_bits(v[0]) & MAGNITUDE
        for j in tl.static_range(1, SLOT):
            top = tl.maximum(top, as_bits(v[j]) & MAGNITUDE)
    else:
        top = _top_of_pairs(v, L.exponent)
    LANES: tl.constexpr = F.block // SLOT
    return tl.max(tl.reshape(top, [L.rows // LANES, LANES]), 1)


@triton.jit
def slot_tops(v, F: tl.constexpr, L: tl.constexpr):
    """As `block_tops`, for each slot of a block."""
    return _per_slot(block_tops(v, F, L), L, F.block // SLOT)


@triton.jit
def pack_slots(v, t, scales, factor, lost, F: tl.constexpr, L: tl.constexpr, MASKED: tl.constexpr):
    """Store codes and scales of a tile; gives the checksum terms.

    `scales`: bytes, int32; `factor`: what values are multiplied by; `lost`: codes are 0.
    """
    if len(v) == SLOT:
        keep = tl.where(lost, 0, -1)
        q = ()
        for j in tl.static_range(SLOT):
            q = q + (_round_element(as_bits(v[j]), keep, factor, F),)
        low, high = _pack_codes(q, F.bits)
    else:
        values = ()
        for j in tl.static_range(SLOT // 2):
            a, b = halves(v[j], L.exponent)
            values = values + (a * factor, b * factor)
        if F.bits == 4:
            low = _e2m1_word(values, v)
            high = low
        else:
            low = fp8_word(values[0], values[1], values[2], values[3], F.mantissa)
            high = fp8_word(values[4], values[5], values[6], values[7], F.mantissa)
            high = tl.where(lost, 0, high)
        low = tl.where(lost, 0, low)
    lane = lanes(L.rows)
    first = t.tile * L.rows
    payload = t.static_ptr + first * F.bits
    use = None
    if MASKED:
        use = (first + lane) * SLOT < t.n
    if F.bits == 6:
        terms = low.to(tl.uint64) * 0
        for k in tl.static_range(3):
            half = (high if k == 2 else low >> (16 * k)).to(tl.uint16)
            tl.store(payload.to(tl.pointer_type(tl.uint16)) + lane * 3 + k, half, mask=use)
            terms += weigh_bytes(half, (first + lane) * 6 + 2 * k)
    elif F.bits == 8:
        both = low.to(tl.uint64) | (high.to(tl.uint64) << 32)
        tl.store(payload.to(tl.pointer_type(tl.uint64)) + lane, both, mask=use)
        terms = weigh(low, (first + lane) * 2) + weigh(high, (first + lane) * 2 + 1)
    else:
        tl.store(payload.to(tl.pointer_type(tl.uint32)) + lane, low, mask=use)
        terms = weigh(low, first + lane)
    # The first slot of a block writes its scale.
    LANES: tl.constexpr = F.block // SLOT
    own = lane % LANES == 0
    if MASKED:
        own = own & use
    at = t.at * 128 + F.head + first // LANES
    tl.store(t.static_ptr + at + lane // LANES, scales.to(tl.uint8), mask=own)
    terms += tl.where(own, weigh_bytes(scales, at + lane // LANES), 0)
    return tl.sum(terms, 0)


@triton.jit
def read_slots(t, F: tl.constexpr, L: tl.constexpr, MASKED: tl.constexpr):
    """(low and high words of the codes of slots; scale bytes)."""
    lane = lanes(L.rows)
    first = t.tile * L.rows
    payload = t.static_ptr + first * F.bits
    slot = first + lane
    words = (t.n * F.bits + 31) // 32
    if F.bits == 6:
        low = lane.to(tl.uint32) * 0
        high = low
        for k in tl.static_range(3):
            use = None
            if MASKED:
                use = slot * 3 + k < words * 2
            half = tl.load(payload.to(tl.pointer_type(tl.uint16)) + lane * 3 + k, mask=use)
            if MASKED:
                half = tl.where(use, half, 0)
            if k == 2:
                high = half.to(tl.uint32)
            else:
                low |= half.to(tl.uint32) << (16 * k)
    elif F.bits == 8:
        if MASKED:
            # fmt: off
            both = tl.load(
                payload.to(tl.pointer_type(tl.uint64)) + lane, mask=slot * 2 < words, other=0
            )
            # fmt: on
            both = tl.where(slot * 2 + 1 < words, both, both & 0xFFFFFFFF)
        else:
            both = tl.load(payload.to(tl.pointer_type(tl.uint64)) + lane)
        low, high = both.to(tl.uint32), (both >> 32).to(tl.uint32)
    else:
        if MASKED:
            low = tl.load(payload.to(tl.pointer_type(tl.uint32)) + lane, mask=slot < words, other=0)
        else:
            low = tl.load(payload.to(tl.pointer_type(tl.uint32)) + lane)
        high = low
    scales_ptr = t.static_ptr + t.at * 128 + F.head + first // (F.block // SLOT)
    at = lane // (F.block // SLOT)
    if MASKED:
        scales = tl.load(scales_ptr + at, mask=slot * SLOT < t.n, other=0)
    else:
        scales = tl.load(scales_ptr + at)
    return low, high, scales


@triton.jit
def load_slots(t, F: tl.constexpr, L: tl.constexpr, MASKED: tl.constexpr):
    """(low and high words of the codes of slots; scale bytes, int32; checksum terms of each)."""
    if L.loaded:
        low, high, scales = t.loaded
    else:
        low, high, scales = read_slots(t, F, L, MASKED)
    lane = lanes(L.rows)
    first = t.tile * L.rows
    slot = first + lane
    if F.bits == 6:
        terms = weigh_bytes(low & 0xFFFF, slot * 6) + weigh_bytes(low >> 16, slot * 6 + 2)
        terms += weigh_bytes(high, slot * 6 + 4)
    else:
        terms = weigh(low, slot * (F.bits // 4))
        if F.bits == 8:
            terms += weigh(high, slot * 2 + 1)
    LANES: tl.constexpr = F.block // SLOT
    at = t.at * 128 + F.head + first // LANES
    at += lane // LANES
    # The first slot of a block weighs its scale.
    key = tl.where(lane % LANES == 0, key_of(at >> 2), 0)
    shifted = scales.to(tl.uint32) << ((at & 3).to(tl.uint32) * 8)
    terms += shifted.to(tl.uint64) * key.to(tl.uint64)
    return low, high, scales.to(tl.int32), terms


@triton.jit
def slot_values(low, high, factor, F: tl.constexpr, L: tl.constexpr, MASKED: tl.constexpr):
    """float32 columns of the values of codes, times `factor`.

    The device's values of codes of four bits are 2^-6 times as large where there is a head: the
    factor makes up for it.
    """
    values = ()
    FAST: tl.constexpr = L.cvt and (L.item == 2) and F.pairs and (MASKED == 0)
    if FAST:
        numbers = _code_values(low, high, F, F.head == 0)
        for j in tl.static_range(SLOT):
            values = values + (numbers[j] * factor,)
    else:
        q = _unpack_codes(low, high, F.bits)
        for j in tl.static_range(SLOT):
            values = values + (_element_value(q[j], factor, F),)
    return values
