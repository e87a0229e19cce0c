# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment,attr-defined,misc"
"""mx on a GPU: one read of the elements and one write of codes and scales. specs/mx.md."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from ..formats.dtypes import DType
from .common.base import Plan
from .common.blocks_triton import (
    EXCHANGING,
    SLOT,
    SUMMING,
    TILINGS,
    block_tops,
    blocks_of,
    load_slots,
    pack_slots,
    read_slots,
    slot_tops,
    slot_values,
)
from .common.driver_triton import Driver, functions, many_functions
from .common.minifloat import INFINITY, NAN
from .common.minifloat_triton import as_bits, as_float
from .common.runs_triton import lanes
from .common.tiles_triton import OF_SOURCE, OF_STATS, no_scale
from .mx import BLOCK, Mx

_INFINITY, _NAN = tl.constexpr(INFINITY), tl.constexpr(NAN)
_HALF_LEAST = tl.constexpr(1 << 22)  # 2^-127
_OF_SOURCE = tl.constexpr(OF_SOURCE)


@triton.jit
def _power(scales):
    """2^(scale - 127), NaN for 255."""
    powers = tl.maximum(scales << 23, _HALF_LEAST)
    return as_float(tl.where(scales == 255, _NAN, powers))


@triton.jit
def _power_scales(tops, F: tl.constexpr, CEIL: tl.constexpr):
    """(scale bytes, int32; what to multiply by) from blocks' largest magnitudes.

    See `mx.block_scales`.
    """
    parts = tops
    if F.emax == 0:
        # Of other types, scales of such blocks are cut to 0 with any exponent.
        below = as_bits(tops.to(tl.float32)) - (149 << 23)
        parts = tl.where(tops < 1 << 23, below, tops)
    scales = (parts >> 23) - F.emax
    if CEIL:
        scales += ((parts & 0x7FFFFF) > F.max_fraction).to(tl.int32)
    scales = tl.minimum(tl.maximum(scales, 0), 254)
    scales = tl.where(tops > (_INFINITY - 1 if F.emax == 0 else _INFINITY), 255, scales)
    return scales, as_float(tl.maximum((254 - scales) << 23, _HALF_LEAST))


@triton.jit
def _given_scales(stats_ptr, t, s, F: tl.constexpr, L: tl.constexpr, MASKED: tl.constexpr):
    """Scale bytes, int32, that blocks of slots are to have; see `mx.agreed_scales`."""
    slot = t.tile * L.rows + lanes(L.rows)
    at = slot // (F.block // SLOT)
    use = None
    if MASKED:
        use = slot * SLOT < t.n
    if L.given == _OF_SOURCE:
        scales = tl.load(s.static_ptr + s.at * 128 + F.head + at, mask=use)
    else:
        at += t.first // F.block
        bytes_ptr = stats_ptr.to(tl.pointer_type(tl.uint8))
        scales = tl.load(bytes_ptr + at, mask=use)
        if t.first % F.block != 0:
            after = tl.minimum(at + 1, (t.nelem - 1) // F.block)
            scales = tl.maximum(scales, tl.load(bytes_ptr + after, mask=use))
    return scales.to(tl.int32)


@triton.jit
def _kept_scales(tops, given, F: tl.constexpr):
    """As `_power_scales`, of scale bytes `given`; blocks with NaN or infinities have their own."""
    special = tl.where(tops > _INFINITY, 255, 255 - F.emax)
    scales = tl.where((tops < _INFINITY) | (given == 255), given, special)
    return scales, as_float(tl.maximum((254 - scales) << 23, _HALF_LEAST))


@triton.jit
def _pack(v, t, s, draw, stats_ptr, F: tl.constexpr, L: tl.constexpr, MASKED: tl.constexpr):
    """Encode a tile's slots."""
    tops = slot_tops(v, F, L)
    if L.given > 0:
        scales, factor = _kept_scales(tops, _given_scales(stats_ptr, t, s, F, L, MASKED), F)
    else:
        scales, factor = _power_scales(tops, F, F.ceil)
    return pack_slots(v, t, scales, factor, scales == 255, F, L, MASKED)


@triton.jit
def _unpack(t, lo, hi, F: tl.constexpr, L: tl.constexpr, MASKED: tl.constexpr):
    """Values of a tile's slots. No code is wrong."""
    low, high, scales, terms = load_slots(t, F, L, MASKED)
    return slot_values(low, high, _power(scales), F, L, MASKED), t.tile, terms


@triton.jit
def _write_scales(v, t, s, draw, stats_ptr, F: tl.constexpr, L: tl.constexpr, MASKED: tl.constexpr):
    """Scale bytes of a tile's blocks by the rule "ceil", to `stats_ptr`."""
    scales, _ = _power_scales(block_tops(v, F, L), F, True)
    BLOCKS: tl.constexpr = L.rows * SLOT // F.block
    at = t.tile * BLOCKS + tl.arange(0, BLOCKS)
    scales_ptr = stats_ptr.to(tl.pointer_type(tl.uint8))
    tl.store(scales_ptr + at, scales.to(tl.uint8), mask=at * F.block < t.n)
    return tl.zeros([], tl.uint64)


@functools.cache
def _driver(spec: Mx, measures: bool = False) -> Driver:
    form = blocks_of(spec.format, BLOCK, ceil=spec.scale_rule != "floor")
    return Driver(
        _write_scales if measures else _pack,
        _unpack,
        no_scale,
        form,
        TILINGS,
        load=read_slots,
        summing=SUMMING,
        exchanging=EXCHANGING,
    )


def measure(spec: Mx, dtype: DType, x: torch.Tensor) -> torch.Tensor | None:
    """Scale bytes of the blocks of `x`, uint8, shape (blocks,); None where none are agreed on."""
    if not spec.agrees:
        return None
    scales = torch.empty(-(-x.numel() // BLOCK), dtype=torch.uint8, device=x.device)
    _driver(spec, measures=True).measure(dtype, x, scales)
    return scales


def _given(plan: Plan, stats, source: bool) -> int:
    blocks = -(-plan.nelem // BLOCK)
    if stats is not None and stats.numel() != blocks:
        shape = tuple(stats.shape)
        raise ValueError(f"stats have shape {shape}; allowed: ({blocks},) for {plan.shape}")
    if not plan.codec.agrees:
        return 0
    return OF_STATS if stats is not None else OF_SOURCE if source else 0


def driver_of(plan: Plan) -> Driver:
    """The kernels of a plan."""
    return _driver(plan.codec)


encode, decode_add_encode, decode = functions(driver_of, _given)
encode_many, decode_many, sum, encode_sum = many_functions(driver_of, _given)
