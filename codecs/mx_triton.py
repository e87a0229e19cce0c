# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""mx on a GPU: one read of the elements and one write of codes and scales, a tile per program."""

from __future__ import annotations

import functools

import torch

from ..formats.dtypes import DType
from .common.base import Plan
from .common.minifloat import WIDENED
from .common.minifloat_triton import (
    Blocks,
    add_and_encode_blocks,
    decode_blocks,
    encode_blocks,
    measure_scales,
)
from .mx import BLOCK


def supports(dtype: DType) -> bool:
    """True for the dtypes that mx takes."""
    return dtype.name in WIDENED


def measure(spec, dtype: DType, x: torch.Tensor) -> torch.Tensor | None:
    """Scale bytes of the blocks of `x`, uint8, shape (blocks,); None where none are agreed on."""
    if not spec.agrees:
        return None
    found = torch.empty(-(-x.numel() // BLOCK), dtype=torch.uint8, device=x.device)
    measure_scales(_blocks(spec), dtype, x, found)
    return found


@functools.cache
def _blocks(spec) -> Blocks:
    return Blocks(spec.format, BLOCK, ceil=spec.scale_rule != "floor", given=spec.agrees)


def encode(plan: Plan, x, out, scratch, stats=None, key=None) -> None:
    """Encode the elements of `x` into `out`; see `tightwire.gpu` for the contract."""
    encode_blocks(_blocks(plan.codec), plan, x, out, _checked(plan, stats))


def _checked(plan: Plan, stats):
    blocks = -(-plan.nelem // BLOCK)
    if stats is not None and stats.numel() != blocks:
        found = tuple(stats.shape)
        raise ValueError(f"stats have shape {found}; allowed: ({blocks},) for {plan.shape}")
    return stats


def decode_add_encode(
    plan: Plan,
    source_plan: Plan,
    src,
    x,
    out,
    scratch,
    status,
    *,
    stats=None,
    key=None,
    planned: bool = True,
) -> None:
    """Encode into `out` the elements `x` plus those of `src`, a buffer of `plan`, in one pass.

    Where scales are agreed on they stay, or are those of `stats`. `x` has the plan's dtype or
    float32. Sums are in float32, rounded to the plan's. See `tightwire.gpu` for the contract.
    """
    blocks, stats = _blocks(plan.codec), _checked(plan, stats)
    add_and_encode_blocks(blocks, plan, src, x, out, scratch, status, stats, planned)


def decode(
    plan: Plan,
    src,
    out,
    scratch,
    status,
    *,
    start: int = 0,
    stop: int | None = None,
    check: bool = True,
    dynamic_starts=None,
    store: bool = True,
    add: bool = False,
    planned: bool = True,
) -> None:
    """Decode elements `start` to `stop` into `out`; see `tightwire.gpu` for the contract."""
    decode_blocks(
        _blocks(plan.codec),
        plan,
        src,
        out,
        scratch,
        status,
        start,
        stop,
        check,
        store,
        add,
        planned,
    )
