# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment,misc"
"""One window for a whole tensor, found on a GPU. specs/zipccl.md, "One window for the tensor"."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from ..formats.dtypes import DType
from .common.launch_triton import Variant, kernel, options
from .zipccl import SIGMA_FACTOR, Zipccl, fields_of

_SIGMA_F = tl.constexpr(SIGMA_FACTOR)


def measure(spec: Zipccl, dtype: DType, x: torch.Tensor) -> torch.Tensor | None:
    """The window's base, int64, shape (1,), on the device of `x`; None where encode needs none.

    Counts elements by their top bits (sign, exponent and up to 7 of the mantissa), which is all
    that "histogram" and "sigma" look at.
    """
    if spec.window not in ("histogram", "sigma"):
        return None
    f = fields_of(dtype)
    shift = max(f.mantissa - 7, 0)
    counts = torch.zeros(1 << (8 * dtype.itemsize - shift), dtype=torch.int64, device=x.device)
    sums = torch.empty((3, 1 << f.exponent), dtype=torch.int64, device=x.device)
    base = torch.empty(1, dtype=torch.int64, device=x.device)
    n = x.numel() * x.element_size() // dtype.itemsize
    count, add_up, choose = _measure_variants(dtype, spec.window == "sigma")
    count.launch(-(-n // 4096), (x, counts), n)
    add_up.launch(1 << f.exponent, (counts, sums))
    choose.launch(1, (sums, base))
    return base


@functools.cache
def _measure_variants(dtype: DType, sigma: bool) -> tuple[Variant, Variant, Variant]:
    f = fields_of(dtype)
    meta = {"EXP": f.exponent, "MAN": f.mantissa}
    shift = max(f.mantissa - 7, 0)
    return (
        Variant(_count_kernel, options(4), ITEM=dtype.itemsize, SHIFT=shift),
        Variant(_sum_kernel, options(1), **meta),
        Variant(_base_kernel, options(1), **meta, SIGMA=sigma),
    )


@kernel
def _count_kernel(x_ptr, counts_ptr, n: tl.int64, ITEM: tl.constexpr, SHIFT: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * 4096 + tl.arange(0, 4096)
    if ITEM == 1:
        x = x_ptr
    elif ITEM == 2:
        x = x_ptr.to(tl.pointer_type(tl.uint16))
    else:
        x = x_ptr.to(tl.pointer_type(tl.uint32))
    v = tl.load(x + i, mask=i < n, other=0).to(tl.uint32) >> SHIFT
    one = tl.full([4096], 1, tl.int64)
    tl.atomic_add(counts_ptr + v.to(tl.int32), one, mask=i < n, sem="relaxed")


@kernel
def _sum_kernel(counts_ptr, sums_ptr, EXP: tl.constexpr, MAN: tl.constexpr):
    """Of one exponent field: elements, sum of signed significands, sum of their squares."""
    e = tl.program_id(0)
    KEPT: tl.constexpr = MAN if MAN < 7 else 7
    k = tl.arange(0, 1 << KEPT)
    at = (e << KEPT) + k
    above = tl.load(counts_ptr + at)
    below = tl.load(counts_ptr + (1 << (EXP + KEPT)) + at)
    hidden = tl.where(e > 0, 1 << KEPT, 0)
    q = ((hidden | k) << (7 - KEPT)).to(tl.int64)
    tl.store(sums_ptr + e, tl.sum(above + below, 0))
    tl.store(sums_ptr + (1 << EXP) + e, tl.sum((above - below) * q, 0))
    tl.store(sums_ptr + (2 << EXP) + e, tl.sum((above + below) * q * q, 0))


@kernel
def _base_kernel(sums_ptr, base_ptr, EXP: tl.constexpr, MAN: tl.constexpr, SIGMA: tl.constexpr):
    """The base of a window for the tensor; specs/zipccl.md, "One window for the tensor"."""
    BINS: tl.constexpr = 1 << EXP
    e = tl.arange(0, BINS)
    if SIGMA:
        # Exponent 0 counts with exponent 1; the last one is left out.
        squares = tl.load(sums_ptr + 2 * BINS + e, mask=e < BINS - 1, other=0)
        used = tl.where(squares > 0, tl.maximum(e, 1), 0)
        largest = tl.max(used, 0)
        n = tl.sum(tl.load(sums_ptr + e, mask=e < BINS - 1, other=0), 0)
        s1 = tl.full([], 0.0, tl.float64)
        s2 = tl.full([], 0.0, tl.float64)
        k = largest
        while k > 0:
            a = tl.load(sums_ptr + BINS + k)
            b = tl.load(sums_ptr + 2 * BINS + k)
            if k == 1:
                a += tl.load(sums_ptr + BINS)
                b += tl.load(sums_ptr + 2 * BINS)
            s1 += a.to(tl.float64) * _power_of_two(k - largest)
            s2 += b.to(tl.float64) * _power_of_two(2 * (k - largest))
            k -= 1
        mean = s1 / n.to(tl.float64)
        variance = s2 / n.to(tl.float64) - mean * mean
        # sqrt(variance) * F as 2^power times a number in [1/2, 1).
        root = tl.sqrt(tl.maximum(variance, 0.0)) * _SIGMA_F
        power = ((root.to(tl.int64, bitcast=True) >> 52) & 2047).to(tl.int32) - 1022
        base = tl.where(variance > 0.0, largest - 8 + power, largest - 6)
        base = tl.where(largest > 0, tl.minimum(tl.maximum(base, 0), BINS - 7), 0)
    else:
        held = tl.zeros([BINS], tl.int64)
        for k in tl.static_range(7):
            held += tl.load(sums_ptr + e + k, mask=e + k < BINS, other=0)
        held = tl.where(e <= BINS - 7, held, -1)
        base = tl.min(tl.where(held == tl.max(held, 0), e, BINS), 0)
    tl.store(base_ptr, base.to(tl.int64))


@triton.jit
def _power_of_two(k):
    return ((k + 1023).to(tl.int64) << 52).to(tl.float64, bitcast=True)
