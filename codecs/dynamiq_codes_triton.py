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
from .common.minifloat_triton import as_bits, as_float, by_ptx
from .common.philox_triton import philox4
from .dynamiq import CODE_STREAM, MAX_WIDTH, MIN_WIDTH, ROUNDINGS, TABLES, grid_of

Floats = npt.NDArray[np.float32]

_CODES = tl.constexpr(CODE_STREAM)
_CORRELATED, _, _NEAREST = (tl.constexpr(i) for i in range(len(ROUNDINGS)))
#: What brings a float to an integer in its lowest bits, and the bits of 0 there.
_TO_INTEGER, INTEGER = tl.constexpr(12582912.0), tl.constexpr(0x4B400000)
#: Where `tables_of` has pairs, bounds and shapes behind its values.
PAIRS, BOUNDS, SHAPES = (tl.constexpr(n) for n in (512, 1536, 2064))


@triton.jit
def _log2(x, factor, ahead, PTX: tl.constexpr):
    """About log2(x) * factor + ahead, of numbers near 1."""
    if PTX:
        # Fused, but not as compilers would: no other operation may be.
        return as_float(
            by_ptx(
                "{ .reg .f32 a; lg2.approx.ftz.f32 a, $1; fma.rz.f32 $0, a, $2, $3; }",
                "=r,r,r,r",
                (x, factor, ahead),
            )
        )
    else:
        return tl.log2(x) * factor + ahead


@triton.jit
def _floor(x, PTX: tl.constexpr):
    """Of `x` + _TO_INTEGER what is next below it."""
    if PTX:
        return as_float(by_ptx("add.rm.f32 $0, $1, 0f4B400000;", "=r,r", (x,)))
    else:
        return tl.floor(x) + _TO_INTEGER


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
def _drawn(eighth, e, draw, EVEN: tl.constexpr):
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
        own = own + (words[i] & 0xFFFF, words[i] >> 16)
    # 128 + half / 2^16, less what makes it (half + 0.5) / 2^16: both are exact.
    bits = from_columns(own, 8, 3) | 0x43000000
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
    shape,
    F: tl.constexpr,
    L: tl.constexpr,
):
    """Codes of a row of slots, a byte each of words of shape [SLOTS, 2], all of them more by one
    number, which carries; what slots have in common has the shape [SLOTS, 1]: `inverse`, `stratum`,
    the number of that, `table`, which starts before what it has of code 0 by as much, and `shape`,
    what `tables_of` says of the width.
    """
    SLOTS: tl.constexpr = L.rows
    size = _scaled(v, inverse, L.ptx)
    sign = as_bits(v) & -0x80000000
    v = as_float(as_bits(size) | sign) + 0.0  # there are no negative zeros
    # Among values half a step ahead.
    AHEAD: tl.constexpr = 0.0 if F.rounding == _NEAREST else 0.5
    about = _log2(shape[0] + size * shape[1], shape[2], AHEAD, L.ptx)
    signed = as_float(as_bits(about) ^ (as_bits(v) & -0x80000000))
    if F.rounding == _NEAREST:
        # The bound between codes next to it, or the one above that.
        code = as_bits(signed + _TO_INTEGER)
        code += _below(v, tl.load(table + code))
    else:
        # Less than 0.5 off the number of the last value not above v: of negative ones the estimate
        # counts from -1 down.
        code = as_bits(_floor(signed, L.ptx))
        pairs = table.to(tl.pointer_type(tl.int64))
        code += _below(v, tl.load((pairs + code).to(tl.pointer_type(tl.float32))))
        pair = tl.load(pairs + code)
        part = (v - as_float(pair.to(tl.int32))) * as_float((pair >> 32).to(tl.int32))
        if F.rounding == _CORRELATED:
            part = part * strata.to(tl.float32) - stratum
        code -= _below(_drawn(eighth, t.first, draw, L.aligned), part)
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
