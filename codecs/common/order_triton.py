# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment,misc"
"""Copies of rows in the order of their experts, and how many each expert gets, in two launches."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .frame_triton import round_bfloat16
from .launch_triton import Variant, kernel, options

#: Dtypes of weights.
DTYPES = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}
#: Most experts: their numbers of copies, and three more, are one tensor of a program.
MOST_EXPERTS = 509
#: Copies that a program counts at the same time, times bins of experts; the most of these copies.
_CELLS, _BLOCK = 1 << 13, 512
#: Most programs, of whose counts each reads all, so many at a time.
_PROGRAMS, _ROWS = 64, 8


@triton.jit
def _bins(choices, experts):
    """One more than the number of an expert; 0 and `experts` + 1 are of numbers out of range."""
    return (tl.minimum(tl.maximum(choices, -1), experts) + 1).to(tl.int32)


@triton.jit
def rounded(value, TO: tl.constexpr):
    """Floats as those of dtype TO, to nearest even."""
    if value.dtype == TO:
        return value
    elif tl.bfloat16 == TO:
        # Triton's interpreter would cut bits off.
        return round_bfloat16(value.to(tl.float32)).to(tl.bfloat16, bitcast=True)
    else:
        return value.to(TO)


@kernel
def _count_kernel(
    totals_ptr,
    choices_ptr,
    weights_ptr,
    copies: tl.int64,
    each: tl.int64,
    experts: tl.int32,
    KIND: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Count `each` copies by bin. Of bin `experts` + 2 are weights that are not finite."""
    totals_ptr = totals_ptr.to(tl.pointer_type(tl.int32))
    choices_ptr = choices_ptr.to(tl.pointer_type(tl.int64))
    pid = tl.program_id(0).to(tl.int64)
    bins = tl.arange(0, BINS)
    total = tl.zeros([BINS], tl.int32)
    bad = tl.zeros([BLOCK], tl.int32)
    factors_ptr = weights_ptr.to(tl.pointer_type(KIND))
    for first in range(pid * each, tl.minimum((pid + 1) * each, copies), BLOCK):
        at = first + tl.arange(0, BLOCK)
        mask = at < copies
        found = _bins(tl.load(choices_ptr + at, mask=mask, other=0), experts)
        total += tl.sum(((found[:, None] == bins[None, :]) & mask[:, None]).to(tl.int32), 0)
        factors = tl.load(factors_ptr + at, mask=mask, other=0.0)
        if tl.float64 != KIND:
            factors = factors.to(tl.float32)
        bad += ((factors != factors) | (tl.abs(factors) == float("inf"))).to(tl.int32)
    total = tl.where(bins == experts + 2, tl.sum(bad, 0), total)
    tl.store(totals_ptr + pid * BINS + bins, total)


@kernel
def _place_kernel(
    orders_ptr,
    words_ptr,
    totals_ptr,
    choices_ptr,
    weights_ptr,
    told_ptr,
    counts_ptr,
    copies: tl.int64,
    each: tl.int64,
    experts: tl.int32,
    top_k: tl.int32,
    half: tl.int64,
    FROM: tl.constexpr,
    TO: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Put `each` copies in their places; the first program writes what ranks tell each other.

    `orders_ptr`: the index, the rows, and the inverse, one behind the other. Unless TO is None all
    results are in memory of two halves of `half` bytes, of which `counts_ptr` says which one is
    written (rows_triton), and weights of dtype FROM are told as TO, at `told_ptr`.
    """
    if TO is not None:
        shift = ((tl.load(counts_ptr) + 1) & 1) * half
        orders_ptr += shift
        words_ptr += shift
        told_ptr += shift
    index_ptr = orders_ptr.to(tl.pointer_type(tl.int64))
    words_ptr = words_ptr.to(tl.pointer_type(tl.int64))
    totals_ptr = totals_ptr.to(tl.pointer_type(tl.int32))
    choices_ptr = choices_ptr.to(tl.pointer_type(tl.int64))
    pid, programs = tl.program_id(0), tl.num_programs(0)
    bins = tl.arange(0, BINS)
    total = tl.zeros([BINS], tl.int32)
    before = tl.zeros([BINS], tl.int32)
    for first in range(0, programs, ROWS):
        row = first + tl.arange(0, ROWS)
        from_ptr = totals_ptr + row[:, None] * BINS + bins[None, :]
        counts = tl.load(from_ptr, mask=row[:, None] < programs, other=0)
        total += tl.sum(counts, 0)
        before += tl.sum(tl.where(row[:, None] < pid, counts, 0), 0)
    bad = tl.sum(tl.where(bins == experts + 2, total, 0), 0)
    total = tl.where(bins < experts + 2, total, 0)
    begin = tl.cumsum(total, 0) - total
    place = begin + before
    start = pid.to(tl.int64) * each
    for first in range(start, tl.minimum(start + each, copies), BLOCK):
        at = first + tl.arange(0, BLOCK)
        mask = at < copies
        found = _bins(tl.load(choices_ptr + at, mask=mask, other=0), experts)
        ours = (found[:, None] == bins[None, :]) & mask[:, None]
        ones = ours.to(tl.int32)
        upto = tl.cumsum(ones, 0)
        to = tl.sum(tl.where(ours, place[None, :] + upto - 1, 0), 1)
        place += tl.sum(ones, 0)
        tl.store(index_ptr + to, at, mask=mask)
        tl.store(index_ptr + copies + to, at // top_k, mask=mask)
        tl.store(index_ptr + 2 * copies + at, to.to(tl.int64), mask=mask)
        if TO is not None:
            factors = tl.load(weights_ptr.to(tl.pointer_type(FROM)) + at, mask=mask, other=0.0)
            tl.store(told_ptr.to(tl.pointer_type(TO)) + at, rounded(factors, TO), mask=mask)
    if pid == 0:
        own = (bins >= 1) & (bins <= experts + 1)
        tl.store(words_ptr + bins - 1, begin.to(tl.int64), mask=own)
        tl.store(words_ptr + experts + 1, copies)
        # 0 and NaN, as float64.
        tl.store(words_ptr + experts + 2, tl.where(bad > 0, 0x7FF8000000000000, 0).to(tl.int64))


class Ordered(NamedTuple):
    """Copies by expert; those of one in their own order.

    Attributes:
        index: Numbers of copies, int64, shape (copies,).
        rows: Of which row each of these is.
        inverse: The place of each copy.
        words: int64, shape (2, experts + 3), of which the second row is not written: how many
            copies are for experts before number 0, 1, and so on to `experts`, how many there are,
            and 0 as float64, or NaN if a weight is NaN or infinite.
    """

    index: torch.Tensor
    rows: torch.Tensor
    inverse: torch.Tensor
    words: torch.Tensor


def takes(choices: torch.Tensor, weights: torch.Tensor, experts: int) -> bool:
    """Whether ``ordered`` can take these."""
    return choices.numel() > 0 and weights.dtype in DTYPES and experts <= MOST_EXPERTS


def ordered(choices: torch.Tensor, weights: torch.Tensor, experts: int) -> Ordered:
    """Order the copies of rows by their experts.

    Args:
        choices: The expert of each copy, int64, shape (rows, top_k). What is out of range comes
            first or last, in its own order.
        weights: The same shape, of a dtype of ``DTYPES``.
        experts: How many there are, at most ``MOST_EXPERTS``.

    Returns:
        The order.
    """
    choices, weights = choices.contiguous(), weights.contiguous()
    orders = choices.new_empty((3, choices.numel()))
    words = choices.new_empty((2, experts + 3))
    _order(choices, weights, experts, (orders, words))
    index, rows, inverse = orders.unbind(0)
    return Ordered(index, rows, inverse, words)


class Told(NamedTuple):
    """Where `tell` writes, in memory of two halves; see rows_triton.

    Attributes:
        words: `Ordered.words`, its first row, uint8, in the first half.
        orders: The index, the rows and the inverse, one behind the other.
        weights: Weights, of `dtype`.
        turn: int64, shape (1,): odd if the first half is written, even if the second one is.
        half: Bytes of a half.
        dtype: A dtype of ``DTYPES``.
    """

    words: torch.Tensor
    orders: torch.Tensor
    weights: torch.Tensor
    turn: torch.Tensor
    half: int
    dtype: torch.dtype


def tell(choices: torch.Tensor, weights: torch.Tensor, experts: int, told: Told) -> None:
    """As ``ordered``, into memory that other ranks read, with the weights. There may be no rows."""
    choices, weights = choices.contiguous(), weights.contiguous()
    _order(choices, weights, experts, (told.orders, told.words), told)


def _order(
    choices: torch.Tensor,
    weights: torch.Tensor,
    experts: int,
    results: tuple[torch.Tensor, torch.Tensor],
    told: Told | None = None,
) -> None:
    copies, bins = choices.numel(), triton.next_power_of_2(experts + 3)
    block = min(_BLOCK, _CELLS // bins)
    programs = max(1, min(_PROGRAMS, -(-copies // block)))
    each = max(1, -(-copies // (programs * block))) * block
    programs = max(1, -(-copies // each))
    counts = choices.new_empty((programs, bins), dtype=torch.int32)
    factors = weights.view(-1).view(torch.uint8)
    _count(weights.dtype, bins, block).launch(
        programs, (counts, choices, factors), copies, each, experts
    )
    more = (choices, choices, choices) if told is None else (factors, told.weights, told.turn)
    numbers = copies, each, experts, choices.shape[1], 0 if told is None else told.half
    dtypes = (None, None) if told is None else (weights.dtype, told.dtype)
    _place(bins, block, *dtypes).launch(programs, (*results, counts, choices, *more), *numbers)


@functools.cache
def _count(dtype: torch.dtype, bins: int, block: int) -> Variant:
    return Variant(_count_kernel, options(8), KIND=DTYPES[dtype], BINS=bins, BLOCK=block)


@functools.cache
def _place(
    bins: int, block: int, source: torch.dtype | None, target: torch.dtype | None
) -> Variant:
    kinds = {"FROM": source and DTYPES[source], "TO": target and DTYPES[target]}
    return Variant(_place_kernel, options(8), **kinds, BINS=bins, BLOCK=block, ROWS=_ROWS)
