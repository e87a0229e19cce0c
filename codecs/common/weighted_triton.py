# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment,misc"
"""Weighted sums of rows of a table, and their gradients, each in one pass.

Sums are made in float32, in order, and rounded once.
"""

from __future__ import annotations

import functools

import torch
import triton.language as tl

from .launch_triton import Variant, kernel, options

#: Dtypes of rows.
DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
#: Elements that a program has at once.
_BLOCK = 2048


@kernel
def _sum_kernel(
    out_ptr,
    rows_ptr,
    weights_ptr,
    starts_ptr,
    units: tl.int32,
    top_k: tl.int32,
    KIND: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
    WEIGHTED: tl.constexpr,
):
    """A block of a sum of rows of `units * UNIT` elements. `starts_ptr`: numbers of its rows."""
    width = units * UNIT
    blocks = (width + BLOCK - 1) // BLOCK
    pid = tl.program_id(0)
    number = (pid // blocks).to(tl.int64)
    at = (pid % blocks) * BLOCK + tl.arange(0, BLOCK)
    mask = at < width
    to_ptr = out_ptr.to(tl.pointer_type(KIND))
    from_ptr = rows_ptr.to(tl.pointer_type(KIND))
    factors_ptr = weights_ptr.to(tl.pointer_type(KIND)) + number * top_k
    numbers_ptr = starts_ptr + number * top_k
    total = tl.zeros([BLOCK], tl.float32)
    for k in range(top_k):
        row = tl.load(numbers_ptr + k)
        values = tl.load(from_ptr + row * width + at, mask=mask, other=0.0).to(tl.float32)
        if WEIGHTED:
            values *= tl.load(factors_ptr + k).to(tl.float32)
        total += values
    tl.store(to_ptr + number * width + at, total.to(KIND), mask=mask)


@kernel
def _back_kernel(
    out_ptr,
    factors_ptr,
    gradient_ptr,
    rows_ptr,
    weights_ptr,
    starts_ptr,
    units: tl.int32,
    KIND: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
    top_k: tl.constexpr,
):
    """The gradient of a row, and of the weight of it: `out_ptr` and `factors_ptr`."""
    width = units * UNIT
    pid = tl.program_id(0).to(tl.int64)
    row = tl.load(starts_ptr + pid)
    factor = tl.load(weights_ptr.to(tl.pointer_type(KIND)) + pid).to(tl.float32)
    to_ptr = out_ptr.to(tl.pointer_type(KIND)) + row * width
    from_ptr = rows_ptr.to(tl.pointer_type(KIND)) + row * width
    source_ptr = gradient_ptr.to(tl.pointer_type(KIND)) + pid // top_k * width
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, width, BLOCK):
        at = first + tl.arange(0, BLOCK)
        mask = at < width
        gradient = tl.load(source_ptr + at, mask=mask, other=0.0).to(tl.float32)
        total += gradient * tl.load(from_ptr + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(to_ptr + at, (factor * gradient).to(KIND), mask=mask)
    tl.store(factors_ptr.to(tl.pointer_type(KIND)) + pid, tl.sum(total, 0).to(KIND))


def weighted_sum(
    rows: torch.Tensor, weights: torch.Tensor | None, places: torch.Tensor, top_k: int = 1
) -> torch.Tensor:
    """Add up rows by their weights.

    Args:
        rows: The table, contiguous, shape (n, width), of a dtype of `DTYPES`.
        weights: Contiguous, of its dtype, shape (sums, top_k). None: each is 1.
        places: Numbers of the rows of each sum: int64, contiguous, shape (sums * top_k,).
        top_k: Rows of each sum, if there are no weights.

    Returns:
        The sums, shape (sums, width).
    """
    top_k = top_k if weights is None else weights.shape[1]
    count, width = places.shape[0] // top_k, rows.shape[1]
    out = rows.new_empty(count, width)
    programs = count * -(-width // _BLOCK)
    if programs:
        factors = rows if weights is None else weights
        tensors = (*map(_bytes, (out, rows, factors)), places)
        unit = _unit(width)
        variant = _variant(_sum_kernel, rows.dtype, unit, WEIGHTED=weights is not None)
        variant.launch(programs, tensors, width // unit, top_k)
    return out


def weighted_sum_back(
    gradient: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor, places: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of `rows`, each of which is in one sum, and of `weights`.

    Args:
        gradient: That of the sums, contiguous.
        rows: As `weighted_sum` got them.
        weights: The same.
        places: The same.

    Returns:
        Those two, of the dtype of `rows`.
    """
    out, factors = torch.empty_like(rows), torch.empty_like(weights)
    if weights.numel():
        tensors = (*map(_bytes, (out, factors, gradient, rows, weights)), places)
        width = rows.shape[1]
        variant = _variant(_back_kernel, rows.dtype, _unit(width), top_k=weights.shape[1])
        variant.launch(weights.numel(), tensors, width // _unit(width))
    return out, factors


def _unit(width: int) -> int:
    """What rows begin at multiples of, in elements: by 16 they are loaded several at once."""
    return 1 if width % 16 else 16


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1).view(torch.uint8)


@functools.cache
def _variant(fn, dtype: torch.dtype, unit: int, **more: int) -> Variant:
    return Variant(fn, options(8), KIND=DTYPES[dtype], UNIT=unit, BLOCK=_BLOCK, **more)
