# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""mx on a GPU: one read of the elements and one write of codes and scales, a tile per program."""

from __future__ import annotations

import functools

import torch

from ..formats.dtypes import DType
from .base import CodecSpec, Plan
from .minifloat import WIDENED
from .minifloat_triton import Blocks, add_and_encode_blocks, decode_blocks, encode_blocks
from .mx import BLOCK


def supports(dtype: DType) -> bool:
    """True for the dtypes that mx takes."""
    return dtype.name in WIDENED


def measure(spec: CodecSpec, dtype: DType, x: torch.Tensor) -> torch.Tensor | None:
    """None: mx needs no statistics."""
    return None


@functools.cache
def _blocks(spec) -> Blocks:
    return Blocks(spec.format, BLOCK, ceil=spec.scale_rule == "ceil")


def encode(plan: Plan, x, out, scratch, stats=None, key=None) -> None:
    """Encode the elements of `x` into `out`; see `tightwire.device` for the contract."""
    encode_blocks(_blocks(plan.codec), plan, x, out, None)


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

    `x` has the plan's dtype or float32. Sums are in float32, rounded to the plan's. See
    `tightwire.device` for the contract.
    """
    blocks = _blocks(plan.codec)
    add_and_encode_blocks(blocks, plan, src, x, out, scratch, status, None, planned)


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
    """Decode elements `start` to `stop` into `out`; see `tightwire.device` for the contract."""
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
