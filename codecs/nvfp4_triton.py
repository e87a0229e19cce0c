# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""nvfp4 on a GPU: a pass for the tensor's largest magnitude unless it is given, then as mx."""

from __future__ import annotations

import torch

from ..formats.dtypes import DType
from .common.base import CodecSpec, Plan
from .common.minifloat import WIDENED
from .common.minifloat_triton import (
    Blocks,
    add_and_encode_blocks,
    decode_blocks,
    encode_blocks,
    measure_elements,
    measure_sums,
)
from .nvfp4 import BLOCK, ELEMENT, SCALES_HEAD

_BLOCKS = Blocks(ELEMENT, BLOCK, SCALES_HEAD)


def supports(dtype: DType) -> bool:
    """True for the dtypes that nvfp4 takes."""
    return dtype.name in WIDENED


def measure(spec: CodecSpec, dtype: DType, x: torch.Tensor) -> torch.Tensor | None:
    """As `Nvfp4.measure`, int64, shape (1,), on the device of `x`."""
    return measure_elements(_BLOCKS, dtype, x)


def encode(plan: Plan, x, out, scratch, stats=None, key=None) -> None:
    """Encode the elements of `x` into `out`; see `tightwire.gpu` for the contract."""
    if stats is None:
        stats = measure_elements(_BLOCKS, plan.dtype, x)
    encode_blocks(_BLOCKS, plan, x, out, stats.to(torch.int64))


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
    """Encode into `out` the elements `x` plus those of `src`, a buffer of `plan`.

    `x` has the plan's dtype or float32; sums are in float32, rounded to the plan's. Without `stats`
    a pass before finds their largest magnitude: `src` and `x` are read, and nothing but that is
    written. See `tightwire.gpu` for the contract.
    """
    if stats is None:
        stats = measure_sums(_BLOCKS, plan, src, x)
    stats = stats.to(torch.int64)
    add_and_encode_blocks(_BLOCKS, plan, src, x, out, scratch, status, stats, planned)


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
    decode_blocks(_BLOCKS, plan, src, out, scratch, status, start, stop, check, store, add, planned)
