# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment,misc"
"""dynamiq's grids on a GPU: the codes of numbers, and the tables that find them. specs/dynamiq.md.

Of a number a logarithm says about where it is among the values of a grid, or among the bounds
between them; a look at the table there says which it is.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from .common.columns_triton import from_columns
from .common.huffman_tables_triton import put_pair, table_memory
from .common.minifloat_triton import as_bits, as_float, by_ptx
from .common.philox_triton import philox4
from .dynamiq import CODE_STREAM, MAX_WIDTH, MIN_WIDTH, ROUNDINGS, TABLES, grid_of

Floats = npt.NDArray[np.float32]

_CODES = tl.constexpr(CODE_STREAM)
_CORRELATED, _, _NEAREST = (tl.constexpr(i) for i in range(len(ROUNDINGS)))
#: What brings a float to an integer in its lowest bits, and the bits of 0 there.
TO_INTEGER, INTEGER = tl.constexpr(12582912.0), tl.constexpr(0x4B400000)
#: Where `tables_of` has pairs, bounds and shapes behind its values.
PAIRS, BOUNDS, SHAPES = (tl.constexpr(n) for n in (512, 1536, 2064))


@triton.jit
def tables_near(table, width, half, F: tl.constexpr, L: tl.constexpr):
    """Where number -INTEGER would be of what `codes_of` looks up of a grid, for slots of `width`;
    `half` is half the number of its codes.

    With PTX that is in shared memory, as every element looks twice, and an address there takes one
    instruction. To be called once by a kernel.
    """
    NEAREST: tl.constexpr = F.rounding == _NEAREST
    table += BOUNDS if NEAREST else PAIRS
    # Of pairs, which are two words, code 0 has number 2 * half.
    zeroth = (2 * half + width) if NEAREST else 4 * half
    if L.ptx:
        PAIRED: tl.constexpr = ((SHAPES - BOUNDS) if NEAREST else (BOUNDS - PAIRS)) // 2
        near = table_memory("2112" if NEAREST else "4096", True)
        # Of bounds there are fewer: the last are written again.
        i = tl.minimum(tl.arange(0, 512), PAIRED - 1)
        pair = tl.load(table.to(tl.pointer_type(tl.int64)) + i)
        put_pair(near + 8 * i, pair.to(tl.int32), (pair >> 32).to(tl.int32))
        tl.debug_barrier()
        # 4 or 8 times INTEGER, without what does not fit. Not a constant: it would be added to
        # every address.
        return near - (0x2D000000 if NEAREST else 0x5A000000) + 4 * zeroth
    else:
        return table + zeroth - (1 if NEAREST else 2) * tl.full([], INTEGER, tl.int64)


@triton.jit
def _near(size, v, shape, start, NEAREST: tl.constexpr, PTX: tl.constexpr):
    """INTEGER plus a number near the code of the last value that is not above `v`, or of the bound
    that is next: of values it is less than 0.5 off, before it is rounded down. `start` is that of
    the first that is not negative.
    """
    if PTX:
        # Fused, but not as compilers would: no other operation may be.
        ASM: tl.constexpr = (
            "{ .reg .f32 a; .reg .b32 b; fma.rn.f32 a, $1, $4, $3; lg2.approx.ftz.f32 a, a; "
            "mov.b32 b, a; lop3.b32 b, b, $2, 0x80000000, 0x78; mov.b32 a, b; fma."
            + ("rn" if NEAREST else "rm")
            + ".f32 $0, a, $5, $6; }"
        )
        return by_ptx(ASM, "=r,r,r,r,r,r,r", (size, v, shape[0], shape[1], shape[2], start)).to(
            tl.int32, bitcast=True
        )
    else:
        about = tl.log2(shape[0] + size * shape[1]) * shape[2]
        signed = as_float(as_bits(about) ^ (as_bits(v) & -0x80000000))
        if NEAREST:
            return as_bits(signed + start)
        else:
            return as_bits(tl.floor(signed) + start)


@triton.jit
def _scaled(x, inverse, PTX: tl.constexpr):
    """|x| * inverse, at most 1; with PTX of NaN 0."""
    if PTX:
        return as_float(
            by_ptx(
                "{ .reg .f32 a; abs.f32 a, $1; mul.rn.sat.f32 $0, a, $2; }", "=r,r,r", (x, inverse)
            )
        )
    else:
        return tl.minimum(tl.abs(x) * inverse, 1.0)


@triton.jit
def _below(x, y):
    """-1 where x < y, else 0, of numbers: the sign of a difference is exact."""
    return as_bits(x - y) >> 31


@triton.jit
def _nearest(code, v, table, PTX: tl.constexpr):
    """The number of the value that `v` is rounded to: that of the bound next to it, or one less."""
    if PTX:
        # Not pure: it may not be done before the tables are there.
        return tl.inline_asm_elementwise(
            "{ .reg .f32 a; .reg .b32 b; mad.lo.u32 b, $1, 4, $3; ld.shared.f32 a, [b]; "
            "sub.rn.f32 a, $2, a; mov.b32 b, a; shr.s32 b, b, 31; add.u32 $0, $1, b; }",
            "=r,r,r,r",
            (code, v, table),
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        return code + _below(v, tl.load(table + code))


@triton.jit
def _below_and_part(code, v, table, PTX: tl.constexpr):
    """(the number of the last value not above `v`, which is `code` or one less, how far `v` is on
    the way to the next).
    """
    if PTX:
        # Not pure: it may not be done before the tables are there.
        return tl.inline_asm_elementwise(
            "{ .reg .f32 a, d; .reg .b32 b, c; mad.lo.u32 b, $2, 8, $4; ld.shared.f32 a, [b]; "
            "sub.rn.f32 a, $3, a; mov.b32 b, a; shr.s32 b, b, 31; add.u32 c, $2, b; "
            "mad.lo.u32 b, c, 8, $4; ld.shared.v2.f32 {a, d}, [b]; sub.rn.f32 a, $3, a; "
            "mul.rn.f32 $1, a, d; mov.b32 $0, c; }",
            "=&r,=&r,r,r,r",
            (code, v, table),
            dtype=(tl.int32, tl.float32),
            is_pure=False,
            pack=1,
        )
    else:
        pairs = table.to(tl.pointer_type(tl.int64))
        code += _below(v, tl.load((pairs + code).to(tl.pointer_type(tl.float32))))
        pair = tl.load(pairs + code)
        return code, (v - as_float(pair.to(tl.int32))) * as_float((pair >> 32).to(tl.int32))


@triton.jit
def _half(word, HIGH: tl.constexpr, PTX: tl.constexpr):
    """128 + half / 2^16, bits of the float, of the lower or the upper half of words."""
    if PTX:
        if HIGH:
            return by_ptx("prmt.b32 $0, $1, 0x4300, 0x5432;", "=r,r", (word,))
        else:
            return by_ptx("prmt.b32 $0, $1, 0x4300, 0x5410;", "=r,r", (word,))
    else:
        return (word >> 16 if HIGH else word & 0xFFFF) | 0x43000000


@triton.jit
def _drawn(eighth, e, draw, EVEN: tl.constexpr, PTX: tl.constexpr):
    """What 8 elements from number 8 * `eighth` on draw, (half + 0.5) / 2^16; shape [SLOTS, 8].

    Or, if not EVEN, those from so much further on as the number `e` is behind a multiple of 8.
    """
    words = philox4(draw[0], draw[1], draw[2], _CODES, eighth)
    if not EVEN:
        words = words + philox4(draw[0], draw[1], draw[2], _CODES, eighth + 1)
        for k in tl.static_range(2):
            shifted = ()
            for i in tl.static_range(len(words) - (2 >> k)):
                far = (e & (4 >> k)) != 0
                shifted = shifted + (tl.where(far, words[i + (2 >> k)], words[i]),)
            words = shifted
        shifted = ()
        for i in tl.static_range(4):
            odd = (words[i] >> 16) | (words[i + 1] << 16)
            shifted = shifted + (tl.where((e & 1) != 0, odd, words[i]),)
        words = shifted
    own = ()
    for i in tl.static_range(4):
        own = own + (_half(words[i], False, PTX), _half(words[i], True, PTX))
    # Less what makes it (half + 0.5) / 2^16: both are exact.
    bits = from_columns(own, 8, 3)
    return bits.to(tl.float32, bitcast=True) - (128.0 - 2.0**-17)


@triton.jit
def stratum_of(half, strata, ring_rank):
    """Numbers of the strata that rows of slots draw from, of halves in 0 to 2^16 - 1, uint32."""
    strata = strata.to(tl.uint32)
    # Twice the number, and whether it is counted from the end; their sum is modulo `strata`.
    twice = (half * strata >> 16) + (ring_rank.to(tl.uint32) & 0xFFFFFFFE)
    twice = tl.minimum(twice, twice - strata)
    from_end = ((twice ^ ring_rank.to(tl.uint32)) & 1) != 0
    at = (twice >> 1).to(tl.int32)
    return tl.where(from_end, strata.to(tl.int32) - 1 - at, at).to(tl.float32)


@triton.jit
def codes_of(
    v,
    inverse,
    eighth,
    stratum,
    strata,
    t,
    draw,
    table,
    start,
    shape,
    F: tl.constexpr,
    L: tl.constexpr,
):
    """Codes of a row of slots, a byte each of words of shape [SLOTS, 2], all of them more by one
    number, which carries; what slots have in common has the shape [SLOTS, 1]: `inverse`, `stratum`,
    the number of that, `table`, of `tables_near`, `start`, TO_INTEGER plus the code of the first
    value that is not negative, and `shape`, what `tables_of` says of the width.
    """
    SLOTS: tl.constexpr = L.rows
    NEAREST: tl.constexpr = F.rounding == _NEAREST
    size = _scaled(v, inverse, L.ptx)
    v = as_float(as_bits(size) | (as_bits(v) & -0x80000000))
    if F.zeros:
        v = v + 0.0  # there are no negative zeros
    code = _near(size, v, shape, start, NEAREST, L.ptx)
    if NEAREST:
        code = _nearest(code, v, table, L.ptx)
    else:
        code, part = _below_and_part(code, v, table, L.ptx)
        if F.rounding == _CORRELATED:
            part = part * strata - stratum
        code -= _below(_drawn(eighth, t.first, draw, L.aligned, L.ptx), part)
    code = code.to(tl.uint32, bitcast=True)
    placed = tl.reshape(code, [SLOTS, 2, 4]) << (8 * tl.arange(0, 4))[None, None, :]
    return tl.sum(placed, 2)


@functools.cache
def tables_of(grid: str, device: torch.device) -> torch.Tensor:
    """What kernels know of a grid, float32, on `device`.

    Of codes number 2^width + code the values; pairs of value and inverse step; at 2^width + width +
    code the least number that is nearer to it than to the code below. Then, 8 numbers for each
    width, what `codes_of` takes the logarithm of and multiplies that with: for places among values
    and, 4 behind, for places among bounds.

    Made once: the first use of a grid on a device may not be in a captured graph.
    """
    pairs, bounds, shapes = (n.value for n in (PAIRS, BOUNDS, SHAPES))
    table = np.zeros(2 * TABLES, np.float32)
    for width in range(MIN_WIDTH, MAX_WIDTH + 1):
        codes = slice(1 << width, 2 << width)
        values, inverse = grid_of(grid, width)
        table[codes] = values
        table[pairs:bounds].reshape(-1, 2)[codes] = np.stack([values, inverse], 1)
        first = bounds + (1 << width) + width
        table[first : first + (1 << width) + 1] = -np.inf, *_bounds(values, inverse), np.inf
        half = values[1 << width - 1 :].astype(np.float64)
        # Values are about (growth^i - 1) * c + h[0]; of even steps with a growth close to 1.
        steps = np.diff(half)
        growth = max((steps[-1] / steps[0]) ** (1 / max(steps.size - 1, 1)), 1 + 2.0**-15)
        scale = (growth ** (half.size - 1) - 1) / (half[-1] - half[0])
        shape = np.array([1 - half[0] * scale, scale])
        table[shapes + 8 * width :][:3] = *shape, 1 / math.log2(growth)
        table[shapes + 8 * width + 4 :][:3] = *(shape * growth**0.5), 1 / math.log2(growth)
    with torch.inference_mode(False):
        return torch.from_numpy(table).to(device)


def _bounds(values: Floats, inverse: Floats) -> Floats:
    """The least float32 of every step but the first that is rounded up to it, to nearest."""
    below, step = values[:-1], inverse[:-1]
    # Bits of floats that are not negative have their order; no step has numbers of both signs but
    # that around 0 of the balanced grid, whose bound is the least number above 0.
    low, high = _order(below), _order(values[1:])
    while (high - low > 1).any():
        middle = (low + high) // 2
        up = (_number(middle) - below) * step > np.float32(0.5)
        low, high = np.where(up, low, middle), np.where(up, middle, high)
    return _number(high)


def _order(x: Floats) -> npt.NDArray[np.int64]:
    bits = x.view(np.int32).astype(np.int64)
    return np.where(bits < 0, -(bits & (1 << 31) - 1), bits)


def _number(order: npt.NDArray[np.int64]) -> Floats:
    bits = np.where(order < 0, -order | 1 << 31, order)
    return bits.astype(np.uint32).view(np.float32)
