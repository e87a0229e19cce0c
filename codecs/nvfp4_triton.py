# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment,attr-defined,misc"
"""nvfp4 on a GPU: a pass for the tensor's largest magnitude unless it is given, then as mx."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from ..formats.dtypes import DType
from .common.base import CodecSpec, Plan
from .common.blocks_triton import (
    SLOT,
    TILINGS,
    blocks_of,
    fours,
    load_slots,
    pack_slots,
    read_slots,
    slot_tops,
    slot_values,
)
from .common.driver_triton import Driver, Source, Tiling, functions, many_functions
from .common.frame_triton import weigh
from .common.minifloat import (
    E4M3_E2M1_RANGE,
    INFINITY,
    NAN,
    NO_RECIPROCAL,
    SIXTH,
)
from .common.minifloat_triton import MAGNITUDE, as_bits, as_float, by_ptx, halves, round_magnitude
from .nvfp4 import BLOCK, ELEMENT, NAN_SCALE, SCALES_HEAD

_INFINITY, _NAN = tl.constexpr(INFINITY), tl.constexpr(NAN)
_FLT_MAX = tl.constexpr(float.fromhex("0x1.fffffep127"))
_RANGE, _SIXTH = tl.constexpr(float(E4M3_E2M1_RANGE)), tl.constexpr(float(SIXTH))
_NO_RECIPROCAL = tl.constexpr(float(NO_RECIPROCAL))
_NAN_SCALE = tl.constexpr(NAN_SCALE)
#: Tensor scales with which no quotient of `_quotient` is too small or too large.
_LEAST_SCALE, _MOST_SCALE = tl.constexpr(2.0**-60), tl.constexpr(2.0**60)


@triton.jit
def _step(scales, g):
    """Values of e4m3 scales over `g`; those of NaN are NaN."""
    magnitudes = scales & 127
    values = as_float(magnitudes << 20) * (2.0**120)
    bits = tl.where(magnitudes == 127, _NAN, as_bits(values) | ((scales & 128) << 24))
    return tl.div_rn(as_float(bits), values * 0.0 + g)


@triton.jit
def _float_scales(tops, g):
    """(scale codes, e4m3, int32; what to multiply by) from blocks' largest magnitudes, nvfp4."""
    special = tops >= _INFINITY
    wanted = as_float(tl.where(special, 0, tops)) * (g * _SIXTH)
    scales = round_magnitude(wanted, 3, 7, 448.0) >> 20
    steps = _step(scales, g)
    none = steps <= _NO_RECIPROCAL
    factors = tl.div_rn(steps * 0.0 + 1.0, tl.where(none, 1.0, steps))
    return tl.where(special, _NAN_SCALE, scales), tl.where(none, _FLT_MAX, factors)


@triton.jit
def _is_usual(g):
    return (g >= _LEAST_SCALE) & (g <= _MOST_SCALE)


@triton.jit
def _quotient(a, g, inverse):
    """`a` / `g` to nearest even for numbers that are no more than 2^60 from 1, or zero; `inverse`
    is 1 / `g` (Markstein, Computation of elementary functions on the IBM RISC System/6000, 1990).
    """
    return as_float(
        by_ptx(
            "{ .reg .f32 q, r; mul.rn.f32 q, $1, $3; neg.f32 r, $1; fma.rn.f32 r, q, $2, r; "
            "neg.f32 r, r; fma.rn.f32 $0, r, $3, q; }",
            "=r,r,r,r",
            (a, g, inverse),
        )
    )


@triton.jit
def _reciprocal(a):
    """1 / `a` to nearest even where both are normal numbers; NaN for 0. The steps by which
    rcp.rn.f32 is compiled, without its branch for other numbers.
    """
    return as_float(
        by_ptx(
            "{ .reg .f32 r, e; rcp.approx.ftz.f32 r, $1; neg.f32 e, $1; "
            "fma.rn.f32 e, e, r, 0f3F800000; fma.rn.f32 $0, r, e, r; }",
            "=r,r",
            (a,),
        )
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
def _tensor_scale(static_ptr, scales_at):
    """The float32 before a chunk's scales.

    A damaged one is reported by `_unpack`; what is decoded with it has no meaning.
    """
    g = tl.load((static_ptr + scales_at * 128).to(tl.pointer_type(tl.float32)))
    return tl.where(g > 0, g, 1.0)


@triton.jit
def _chosen_scale(stats_ptr):
    """g, by which the largest magnitude becomes 448 * 6, from its bits."""
    largest = tl.minimum(tl.maximum(tl.load(stats_ptr), 0), _INFINITY - 1).to(tl.int32)
    divisor = as_float(tl.where(largest == 0, 0x3F800000, largest))
    g = tl.minimum(tl.div_rn(divisor * 0 + _RANGE, divisor), _FLT_MAX)
    return tl.where(largest == 0, 1.0, g)


@triton.jit
def _top_finite(a, top, EXP: tl.constexpr):
    """The larger of `top` and, element by element, the magnitudes of `a` plus a step of infinity's
    exponent, which is negative if they are not finite.
    """
    return by_ptx(
        "{ .reg .b32 t, step; and.b32 t, $1, 0x7FFF7FFF; mov.b32 step, "
        + ("0x00800080" if EXP == 8 else "0x04000400")
        + "; add.s16x2 t, t, step; max.s16x2 $0, t, $2; }",
        "=r,r,r",
        (a, top),
    )


@triton.jit
def _finite_top_of_pairs(words, EXP: tl.constexpr):
    """As `_finite_top`, of columns of words of two elements."""
    STEP: tl.constexpr = 0x0080 if EXP == 8 else 0x0400
    top = words[0] * 0 + STEP * 0x10001
    for j in tl.static_range(SLOT // 2):
        top = _top_finite(words[j], top, EXP)
    low, high = halves(top - STEP * 0x10001, EXP)
    return tl.max(tl.maximum(as_bits(low), as_bits(high)), 0)


@triton.jit
def _finite_top(v):
    """The largest finite magnitude of 8 columns, as float32 bits."""
    top = as_bits(v[0]) * 0
    for j in tl.static_range(SLOT):
        magnitude = as_bits(v[j]) & MAGNITUDE
        top = tl.maximum(top, tl.where(magnitude < _INFINITY, magnitude, 0))
    return tl.max(top, 0)


@triton.jit
def _scale(stats_ptr, static_ptr, at, F: tl.constexpr, CHOOSE: tl.constexpr):
    """The tensor's scale, from its largest magnitude or of a buffer."""
    if CHOOSE:
        g = _chosen_scale(stats_ptr)
    else:
        g = _tensor_scale(static_ptr, at)
    return g, _is_usual(g)


@triton.jit
def _source_scale(stats_ptr, static_ptr, at, F: tl.constexpr, CHOOSE: tl.constexpr):
    """As `_scale`, where none is chosen yet."""
    if CHOOSE:
        return 1.0, True
    else:
        g = _tensor_scale(static_ptr, at)
        return g, _is_usual(g)


@triton.jit
def _pack(v, t, s, draw, stats_ptr, F: tl.constexpr, L: tl.constexpr, MASKED: tl.constexpr):
    """Encode a tile's slots; the first tile writes the tensor's scale."""
    tops = slot_tops(v, F, L)
    if len(v) == SLOT:
        scales, factor = _float_scales(tops, t.scale)
    else:
        scales, steps = _nearest_e4m3(as_float(tops) * (t.scale * _SIXTH))
        scales = tl.where(tops >= _INFINITY, _NAN_SCALE, scales)
        # Of a scale of 0 the reciprocal is NaN, which the minimum drops.
        step = _quotient(steps, t.scale, _reciprocal(t.scale))
        factor = tl.minimum(_reciprocal(step), _FLT_MAX)
    total = pack_slots(v, t, scales, factor, tops >= _INFINITY, F, L, MASKED)
    g = t.scale.to(tl.uint32, bitcast=True)
    first = t.tile == 0
    tl.store(t.static_ptr.to(tl.pointer_type(tl.uint32)) + t.at * 32, g, mask=first)
    return total + tl.where(first, weigh(g, t.at * 32), 0)


@triton.jit
def _unpack(t, lo, hi, F: tl.constexpr, L: tl.constexpr, MASKED: tl.constexpr):
    """Values of a tile's slots. A tensor's scale that is not positive and finite is wrong."""
    low, high, scales, terms = load_slots(t, F, L, MASKED)
    g = tl.load((t.static_ptr + t.at * 128).to(tl.pointer_type(tl.int32)))
    wrong = (g <= 0) | (g >= _INFINITY)
    FAST: tl.constexpr = L.cvt and (L.item == 2) and (MASKED == 0)
    if FAST:
        steps = fours(scales.to(tl.uint32, bitcast=True), 3, False)[0]
        factor = _quotient(steps, t.scale, _reciprocal(t.scale)) * 64.0
    else:
        factor = _step(scales, t.scale)
    return slot_values(low, high, factor, F, L, MASKED), wrong, terms


@triton.jit
def _find_largest(v, t, s, draw, stats_ptr, F: tl.constexpr, L: tl.constexpr, MASKED: tl.constexpr):
    """The largest finite magnitude of a tile, as float32 bits, into `stats_ptr`."""
    if len(v) == SLOT:
        top = _finite_top(v)
    else:
        top = _finite_top_of_pairs(v, L.exponent)
    tl.atomic_max(stats_ptr, top.to(tl.int64), sem="relaxed")
    return tl.zeros([], tl.uint64)


_FORM = blocks_of(ELEMENT, BLOCK, SCALES_HEAD)


class Scaled(Driver):
    """The driver for chunks that share a scale, which follows from the largest magnitude of all."""

    def encode(
        self,
        plan: Plan,
        x: torch.Tensor,
        out: torch.Tensor,
        *,
        stats: torch.Tensor | None = None,
        source: Source | None = None,
        **options: Any,
    ) -> None:
        """See `Driver.encode`. Without `stats` a pass before finds them."""
        if stats is None:
            stats = torch.zeros(1, dtype=torch.int64, device=x.device)
            added = () if source is None else (plan, source.data)
            _MEASURE.measure(plan.dtype, x, stats, *added)
        super().encode(plan, x, out, stats=stats.to(torch.int64), source=source, **options)

    def encode_many(
        self,
        *batch: Any,
        stats: Sequence[torch.Tensor] | torch.Tensor | None = None,
        **options: Any,
    ) -> None:
        """See `Driver.encode_many`."""
        if not isinstance(stats, torch.Tensor):
            stats = [s.to(torch.int64) for s in stats or ()]
        super().encode_many(*batch, stats=stats, **options)

    def sum(self, *terms: Any, stats: torch.Tensor | None = None, **options: Any) -> None:
        """See `Driver.sum`."""
        words = None if stats is None else stats.to(torch.int64)
        super().sum(*terms, stats=words, **options)


#: Of sums of several buffers: registers for all that is loaded of some of them.
_SUMMING = Tiling(256, 4, registers=128, together=2)
_DRIVER = Scaled(_pack, _unpack, _scale, _FORM, TILINGS, load=read_slots, summing=_SUMMING)
_MEASURE = Driver(_find_largest, _unpack, _source_scale, _FORM, TILINGS)


def measure(spec: CodecSpec, dtype: DType, x: torch.Tensor) -> torch.Tensor | None:
    """As `Nvfp4.measure`, int64, shape (1,), on the device of `x`."""
    stats = torch.zeros(1, dtype=torch.int64, device=x.device)
    _MEASURE.measure(dtype, x, stats)
    return stats


def measure_many(spec: CodecSpec, dtype: DType, xs: Sequence[torch.Tensor]) -> torch.Tensor:
    """As `measure`, of every tensor: int64, shape (tensors, 1)."""
    stats = torch.zeros((len(xs), 1), dtype=torch.int64, device=xs[0].device)
    _MEASURE.measure_many(dtype, xs, stats)
    return stats


def driver_of(plan: Plan) -> Driver:
    """The kernels of a plan."""
    return _DRIVER


def measuring_of(plan: Plan) -> Driver:
    """The kernels that find `stats`: an int64, which starts at 0."""
    return _MEASURE


encode, decode_add_encode, decode = functions(driver_of)
encode_many, decode_many, sum, encode_sum = many_functions(driver_of)
