# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment,misc"
"""Where rows of experts come from and go to, found on the device of what all ranks have told.

See rows_triton for memory and places, order_triton for what a rank tells. No number that another
rank has told is taken for an address: all are brought into the range of what was prepared.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .launch_triton import Variant, kernel, options
from .order_triton import DTYPES, rounded
from .rows_triton import Memory, half_of

#: Elements of a table of rows or copies and bins of experts; the most of the former.
_CELLS, _BLOCK = 1 << 13, 512
#: Ranks whose counts are loaded together.
_RANKS = tl.constexpr(8)
#: Bits of what is wrong on a rank.
RANGE, WEIGHTS, CAPACITY = 1, 2, 4
#: Copies of a program that fetches dot products.
_DOTS = 256


@triton.jit
def _words_of(sources_ptr, counts_ptr, r, ranks, half):
    """Where the words of ranks `r` are, int64; of numbers that are too large, some rank's."""
    address = tl.load(sources_ptr + tl.minimum(r, ranks - 1))
    turn = tl.load(counts_ptr) & 1
    return (address + turn * half).to(tl.pointer_type(tl.int64))


@triton.jit
def _counts(words_ptr, e, used, most):
    """(copies before each expert's, and each expert's)."""
    first = tl.minimum(tl.maximum(tl.load(words_ptr + e, mask=used, other=0), 0), most)
    end = tl.minimum(tl.maximum(tl.load(words_ptr + e + 1, mask=used, other=0), first), most)
    return first.to(tl.int32), (end - first).to(tl.int32)


@triton.jit
def _rows_of(
    source_ptr,
    factors_ptr,
    ends_ptr,
    sources_ptr,
    counts_ptr,
    pid,
    half,
    index_at,
    weights_at,
    rank,
    ranks,
    most,
    capacity,
    top_k,
    each,
    EACH: tl.constexpr,
    SIZE: tl.constexpr,
    KIND: tl.constexpr,
):
    """Places and factors of SIZE rows that this rank gets; the first program tells their ends."""
    e = tl.arange(0, EACH)
    total = tl.zeros([EACH], tl.int32)
    for first in range(0, ranks, _RANKS):
        r = first + tl.arange(0, _RANKS)
        words_ptr = _words_of(sources_ptr, counts_ptr, r, ranks, half)
        used = (r < ranks)[:, None] & (e < each)[None, :]
        _, n = _counts(words_ptr[:, None] + rank * each, e[None, :], used, most)
        total += tl.sum(n, 0)
    upto = tl.cumsum(total, 0)
    if pid == 0:
        ends = tl.minimum(upto.to(tl.int64), capacity).to(tl.int32)
        tl.store(ends_ptr.to(tl.pointer_type(tl.int32)) + e, ends, mask=e < each)
    place = upto - total
    i = pid * SIZE + tl.arange(0, SIZE)
    found = tl.zeros([SIZE], tl.int64) - 1
    factors = tl.zeros([SIZE], tl.float32).to(KIND)
    last = tl.max(upto, 0)
    if pid * SIZE < last:
        for r in range(0, ranks):
            base_ptr = half_of(sources_ptr, counts_ptr, r, half, 0)
            words_ptr = base_ptr.to(tl.pointer_type(tl.int64)) + rank * each
            begin, n = _counts(words_ptr, e, e < each, most)
            inside = (i[:, None] >= place[None, :]) & (i[:, None] < (place + n)[None, :])
            inside = inside & (e < each)[None, :]
            here = tl.sum(inside.to(tl.int32), 1) > 0
            at = tl.sum(tl.where(inside, (begin - place)[None, :] + i[:, None], 0), 1)
            at = tl.minimum(tl.maximum(at, 0).to(tl.int64), most - 1)
            index_ptr = (base_ptr + index_at).to(tl.pointer_type(tl.int64))
            copy = tl.load(index_ptr + at, mask=here, other=0)
            copy = tl.minimum(tl.maximum(copy, 0), most - 1)
            told_ptr = (base_ptr + weights_at).to(tl.pointer_type(KIND))
            factor = tl.load(told_ptr + copy, mask=here, other=0.0)
            source = (tl.zeros([SIZE], tl.int64) + r) << 32
            found = tl.where(here, source | (copy // top_k), found)
            factors = tl.where(here, factor, factors)
            place += n
    tl.store(source_ptr + i, found, mask=i < capacity)
    tl.store(factors_ptr.to(tl.pointer_type(KIND)) + i, factors, mask=i < capacity)


@triton.jit
def _copies_of(
    targets_ptr,
    choices_ptr,
    sources_ptr,
    counts_ptr,
    status_ptr,
    pid,
    half,
    index_at,
    rank,
    ranks,
    copies,
    most,
    capacity,
    experts,
    each,
    BINS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Places of the results of SIZE copies of this rank; the first program tells what is wrong."""
    e = tl.arange(0, BINS)
    total = tl.zeros([BINS], tl.int32)
    before = tl.zeros([BINS], tl.int32)
    own = tl.zeros([BINS], tl.int32)
    for first in range(0, ranks, _RANKS):
        r = first + tl.arange(0, _RANKS)
        words_ptr = _words_of(sources_ptr, counts_ptr, r, ranks, half)
        used = (r < ranks)[:, None] & (e < experts)[None, :]
        begin, n = _counts(words_ptr[:, None], e[None, :], used, most)
        total += tl.sum(n, 0)
        before += tl.sum(tl.where((r < rank)[:, None], n, 0), 0)
        own += tl.sum(tl.where((r == rank)[:, None], begin, 0), 0)
    start = tl.zeros([BINS], tl.int32)
    for first in range(0, ranks, _RANKS):
        r = first + tl.arange(0, _RANKS)
        mine = (e[None, :] // each == r[:, None]) & (e < experts)[None, :]
        earlier = tl.sum(tl.where(e[None, :] < r[:, None] * each, total[None, :], 0), 1)
        start += tl.sum(tl.where(mine, earlier[:, None], 0), 0)
        if pid == 0:
            words_ptr = _words_of(sources_ptr, counts_ptr, r, ranks, half)
            least, end = tl.load(words_ptr), tl.load(words_ptr + experts)
            every, weight = tl.load(words_ptr + experts + 1), tl.load(words_ptr + experts + 2)
            fault = ((least != 0) | (end != every)).to(tl.int64)
            fault += 2 * (weight != 0).to(tl.int64)
            there = tl.sum(tl.where(mine, total[None, :], 0), 1).to(tl.int64)
            fault += 4 * (there > capacity).to(tl.int64)
            known = tl.load(status_ptr + r, mask=r < ranks, other=0)
            tl.store(status_ptr + r, known | fault, mask=r < ranks)
    # What is added to the place of a copy among this rank's.
    shift = tl.cumsum(total, 0) - total - start + before - own
    i = pid * SIZE + tl.arange(0, SIZE)
    choice = tl.load(choices_ptr.to(tl.pointer_type(tl.int64)) + i, mask=i < copies, other=-1)
    fine = (choice >= 0) & (choice < experts)
    base_ptr = half_of(sources_ptr, counts_ptr, rank, half, 0) + index_at
    inverse_ptr = base_ptr.to(tl.pointer_type(tl.int64)) + 2 * copies
    row = tl.load(inverse_ptr + i, mask=fine, other=0)
    row += tl.sum(tl.where(choice[:, None] == e[None, :], shift[None, :], 0), 1)
    fine = fine & (row >= 0) & (row < capacity)
    place = tl.where(fine, ((choice // each) << 32) | row, -1)
    tl.store(targets_ptr.to(tl.pointer_type(tl.int64)) + i, place, mask=i < copies)


@kernel
def layout_kernel(
    starts_ptr,
    targets_ptr,
    factors_ptr,
    ends_ptr,
    choices_ptr,
    sources_ptr,
    counts_ptr,
    status_ptr,
    half: tl.int64,
    index_at: tl.int64,
    weights_at: tl.int64,
    rank: tl.int32,
    ranks: tl.int32,
    copies: tl.int64,
    most: tl.int64,
    capacity: tl.int64,
    top_k: tl.int32,
    experts: tl.int32,
    each: tl.int32,
    BINS: tl.constexpr,
    EACH: tl.constexpr,
    CELLS: tl.constexpr,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
):
    """The first programs find a block of `capacity` rows each, the others one of `copies` copies.

    Experts of a rank are `each`, ranks have told of `most` copies at most.
    """
    pid = tl.program_id(0)
    ROWS: tl.constexpr = CELLS // EACH if CELLS // EACH < BLOCK else BLOCK
    COPIES: tl.constexpr = CELLS // BINS if CELLS // BINS < BLOCK else BLOCK
    blocks = ((capacity + ROWS - 1) // ROWS).to(tl.int32)
    # fmt: off
    if pid < blocks:
        _rows_of(
            starts_ptr, factors_ptr, ends_ptr, sources_ptr, counts_ptr, pid, half, index_at,
            weights_at, rank, ranks, most, capacity, top_k, each, EACH, ROWS, KIND,
        )
    else:
        _copies_of(
            targets_ptr, choices_ptr, sources_ptr, counts_ptr, status_ptr, pid - blocks, half,
            index_at, rank, ranks, copies, most, capacity, experts, each, BINS, COPIES,
        )
    # fmt: on


@kernel
def dots_kernel(
    out_ptr,
    starts_ptr,
    sources_ptr,
    counts_ptr,
    half: tl.int64,
    dots_at: tl.int64,
    copies: tl.int64,
    tiles: tl.int32,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gradients of the weights of copies: dot products of tiles, added up where the results are."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(starts_ptr + i, mask=i < copies, other=-1)
    here = place >= 0
    base = tl.load(sources_ptr + (place >> 32), mask=here, other=0)
    base += (tl.load(counts_ptr) & 1) * half + dots_at
    dots_ptr = base.to(tl.pointer_type(tl.float32)) + (place & 0xFFFFFFFF) * tiles
    total = tl.zeros([BLOCK], tl.float32)
    for k in range(0, tiles):
        total += tl.load(dots_ptr + k, mask=here, other=0.0)
    tl.store(out_ptr.to(tl.pointer_type(KIND)) + i, rounded(total, KIND), mask=i < copies)


class Sizes(NamedTuple):
    """What was prepared.

    Attributes:
        ranks: How many there are.
        experts: Those of all ranks.
        most: Copies of a rank, at most.
        top_k: Copies of a token.
        capacity: Rows that a rank gets, at most.
        index_at: Where copies by expert are in a half, in bytes; words are at 0.
        weights_at: Where weights are.
        dtype: Of these.
    """

    ranks: int
    experts: int
    most: int
    top_k: int
    capacity: int
    index_at: int
    weights_at: int
    dtype: torch.dtype


class Found(NamedTuple):
    """Where rows come from and go to, on the device.

    Attributes:
        sources: The place of the token of each row of the capacity, int64.
        factors: Its weight.
        targets: The place of each copy's result, int64.
        ends: Ends of the rows of each local expert, int32.
    """

    sources: torch.Tensor
    factors: torch.Tensor
    targets: torch.Tensor
    ends: torch.Tensor


def find(choices: torch.Tensor, memory: Memory, sizes: Sizes, report: torch.Tensor) -> Found:
    """Find them, behind the barrier, in a launch.

    Args:
        choices: Experts of this rank's copies, int64, contiguous.
        memory: What ranks have written.
        sizes: What was prepared.
        report: What is wrong on each rank: bits are added, int64, shape (ranks,).

    Returns:
        What was found.
    """
    each, copies = sizes.experts // sizes.ranks, choices.numel()
    words = choices.new_empty(sizes.capacity + copies)
    sources, targets = words[: sizes.capacity], words[sizes.capacity :]
    factors = torch.empty(sizes.capacity, dtype=sizes.dtype, device=choices.device)
    ends = torch.empty(each, dtype=torch.int32, device=choices.device)
    bins, own = triton.next_power_of_2(sizes.experts), triton.next_power_of_2(each)
    cells = max(_CELLS, bins)
    programs = -(-sizes.capacity // min(_BLOCK, cells // own))
    programs += max(1, -(-copies // min(_BLOCK, cells // bins)))
    tensors = sources, targets, factors.view(torch.uint8), ends, choices
    _layout(bins, own, cells, sizes.dtype).launch(
        programs,
        (*tensors, memory.sources, memory.turn, report),
        memory.half,
        sizes.index_at,
        sizes.weights_at,
        memory.rank,
        sizes.ranks,
        copies,
        sizes.most,
        sizes.capacity,
        sizes.top_k,
        sizes.experts,
        each,
    )
    return Found(sources, factors, targets, ends)


def fetch_dots(targets: torch.Tensor, memory: Memory, tiles: int, dtype: torch.dtype):
    """Gradients of the weights of copies whose results are at `targets`; `tiles` of a row."""
    out = torch.empty(targets.shape, dtype=dtype, device=targets.device)
    if targets.numel():
        variant = _dots(dtype)
        tensors = out.view(-1).view(torch.uint8), targets, memory.sources, memory.turn
        numbers = memory.half, memory.dots_at, targets.numel(), tiles
        variant.launch(-(-targets.numel() // _DOTS), tensors, *numbers)
    return out


@functools.cache
def _layout(bins: int, each: int, cells: int, dtype: torch.dtype) -> Variant:
    values = {"BINS": bins, "EACH": each, "CELLS": cells, "BLOCK": _BLOCK}
    return Variant(layout_kernel, options(8), **values, KIND=DTYPES[dtype])


@functools.cache
def _dots(dtype: torch.dtype) -> Variant:
    return Variant(dots_kernel, options(4), KIND=DTYPES[dtype], BLOCK=_DOTS)
