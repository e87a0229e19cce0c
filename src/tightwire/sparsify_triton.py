# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment,misc"
"""The entries of largest magnitude of rows of tensors on a GPU, without a wait for the host.

Radix selection: a histogram of the magnitudes' first eight bits says which of them the least one
that stays begins with, and so on for the next ones. Of float32 one entry of 64 is looked at before:
it gives two bounds, and all of a row is read just once to list what lies between them, mostly some
hundredth; what follows takes the list if the one that is looked for is in it, else the row.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .codecs.common.launch_triton import PTX, Variant, kernel, options
from .codecs.common.minifloat import INFINITY
from .codecs.common.minifloat_triton import elements_at, narrow, widen
from .formats.dtypes import DType

#: Entries that a program takes at once, and how often, in kernels that count; those that a program
#: of `_cut_kernel` takes; of how many one is looked at first.
_TILE = tl.constexpr(4096)
_STEPS = tl.constexpr(8)
_CUT = tl.constexpr(2048)
_STRIDE = tl.constexpr(64)
_MAGNITUDE = tl.constexpr((1 << 31) - 1)
_INFINITY = tl.constexpr(INFINITY)
#: The guess has so many bits less than a magnitude; the list has what begins with it or differs
#: by so many from it.
_GUESSED = tl.constexpr(15)
_AROUND = tl.constexpr(2)
#: Where a row's state (int64) has, behind histograms, the guess, what is above and in the list,
#: the least magnitude that stays, how many stay that are equal to it, and are.
GUESS, ABOVE, COUNT, BOUND, LEFT, TIES = (6 * 256 + i for i in (0, 2, 3, 4, 5, 6))
_GUESS, _ABOVE, _COUNT = tl.constexpr(GUESS), tl.constexpr(ABOVE), tl.constexpr(COUNT)
_BOUND, _LEFT, _TIES = tl.constexpr(BOUND), tl.constexpr(LEFT), tl.constexpr(TIES)
STATE = 6 * 256 + 8
_STATE = tl.constexpr(STATE)
#: More than there can be.
_MANY = tl.constexpr(1 << 62)
#: `_cut_kernel` leaves beside nothing, what does not stay, or what rounding loses of finite
#: numbers.
NOTHING, OTHERS, ROUNDING = range(3)
_NOTHING, _OTHERS = tl.constexpr(NOTHING), tl.constexpr(OTHERS)

#: Rows of fewer entries are not sampled.
SAMPLED = 1 << 18
#: The list holds one of so many entries.
LISTED = 16

_OPTIONS = options(num_warps=8)


class Digit(NamedTuple):
    """Some bits of magnitudes: where their histogram is, the lowest one, how many values."""

    at: int
    shift: int
    bins: int


_SAMPLE_DIGITS = Digit(0, 23, 256), Digit(256, 15, 256)
_DIGITS = {
    4: (Digit(512, 23, 256), Digit(768, 15, 256), Digit(1024, 7, 256), Digit(1280, 0, 128)),
    2: (Digit(512, 7, 256), Digit(768, 0, 128)),
}


@triton.jit
def _state_at(state_ptr, row):
    return state_ptr.to(tl.pointer_type(tl.int64)) + row * _STATE


@triton.jit
def _magnitude(v, ITEM: tl.constexpr):
    """Magnitude bits, int32, of element bits."""
    return v.to(tl.int32, bitcast=True) & _MAGNITUDE if ITEM == 4 else v.to(tl.int32) & 0x7FFF


@triton.jit
def _entries(start, n, SIZE: tl.constexpr, ALIGNED: tl.constexpr):
    """Numbers of entries from `start` on, int32 to save registers, and which are below `n`."""
    i = tl.arange(0, SIZE)
    here = tl.minimum(n - start, SIZE).to(tl.int32)
    if ALIGNED:
        here = tl.multiple_of(here, 16)
    return i, i < here


@triton.jit
def _row_at(row, m, ALIGNED: tl.constexpr):
    """Where a row of `m` entries begins. ALIGNED: these are a multiple of 16."""
    first = row * m
    if ALIGNED:
        first = tl.multiple_of(first, 16)
    return first


@triton.jit
def _all_of(state, keep, capacity):
    """Whether the list is of no use: it lacks the magnitude that is looked for, or is too long."""
    above = tl.load(state + _ABOVE)
    count = tl.load(state + _COUNT)
    return (above >= keep) | (above + count < keep) | (count > capacity)


@kernel
def _digit_kernel(
    x_ptr,
    list_ptr,
    state_ptr,
    m: tl.int64,
    keep: tl.int64,
    capacity: tl.int64,
    tiles: tl.int64,
    AT: tl.constexpr,
    OUT: tl.constexpr,
    SHIFT: tl.constexpr,
    BINS: tl.constexpr,
    FIRST: tl.constexpr,
    SAMPLE: tl.constexpr,
    ITEM: tl.constexpr,
):
    """Histogram of a digit, of the magnitudes that begin with those found before; not of digit 0.

    Of a row's sample, its list, or all of it.
    """
    row = tl.program_id(0).to(tl.int64) // tiles
    start = tl.program_id(0).to(tl.int64) % tiles * (_TILE * _STEPS)
    state = _state_at(state_ptr, row)
    x = elements_at(x_ptr, ITEM) + row * m
    found = list_ptr.to(tl.pointer_type(tl.int32)) + row * capacity
    bound = tl.load(state + OUT).to(tl.int32)
    every = _all_of(state, keep, capacity)
    if SAMPLE:
        n = m // _STRIDE
    else:
        n = tl.where(every, m, tl.load(state + _COUNT))
    stop = tl.minimum(start + _TILE * _STEPS, n)
    counts = tl.zeros([BINS], tl.int32)
    while start < stop:
        i, inside = _entries(start, n, _TILE, False)
        if SAMPLE:
            # Not at equal distances, which rows and columns of weights have, too.
            at = i * _STRIDE + ((i * 40503 >> 6) & (_STRIDE - 1))
            v = tl.load(x + start * _STRIDE + at, mask=inside, other=0)
            magnitude = _magnitude(v, ITEM)
        else:
            if every:
                magnitude = _magnitude(tl.load(x + start + i, mask=inside, other=0), ITEM)
            else:
                magnitude = tl.load(found + start + i, mask=inside, other=0)
        digit = tl.where(inside, (magnitude >> SHIFT) & (BINS - 1), 0)
        if not FIRST:
            digit = tl.where((magnitude ^ bound) < (BINS << SHIFT), digit, 0)
        counts += tl.histogram(digit, BINS)
        start += _TILE
    i = tl.arange(0, BINS)
    use = (i > 0) & (counts > 0)
    tl.atomic_add(state + AT + i, counts.to(tl.int64), mask=use, sem="relaxed")


@kernel
def _pick_kernel(
    state_ptr,
    keep: tl.int64,
    capacity: tl.int64,
    AT: tl.constexpr,
    OUT: tl.constexpr,
    SHIFT: tl.constexpr,
    BINS: tl.constexpr,
    FIRST: tl.constexpr,
    SAMPLE: tl.constexpr,
):
    """Read a row's digit off its histogram, and how many are left to take that begin with it."""
    state = _state_at(state_ptr, tl.program_id(0).to(tl.int64))
    i = tl.arange(0, BINS)
    counts = tl.load(state + AT + i)
    if FIRST:
        left = keep
        bound = keep * 0
        if not SAMPLE:
            left = keep - tl.where(_all_of(state, keep, capacity), 0, tl.load(state + _ABOVE))
    else:
        bound = tl.load(state + OUT)
        left = tl.load(state + OUT + 1)
    above = tl.sum(counts, 0) - tl.cumsum(counts, 0)
    digit = tl.sum((above >= left).to(tl.int64), 0)
    left -= tl.sum(tl.where(i == digit, above, 0), 0)
    tl.store(state + OUT, bound | (digit << SHIFT))
    tl.store(state + OUT + 1, left)
    if SHIFT == 0:
        ties = tl.sum(tl.where(i == digit, counts, 0), 0)
        tl.store(state + _TIES, tl.where(digit > 0, ties, _MANY))


@kernel
def _list_kernel(
    x_ptr,
    list_ptr,
    state_ptr,
    m: tl.int64,
    capacity: tl.int64,
    tiles: tl.int64,
    ALIGNED: tl.constexpr,
):
    """List magnitudes of float32 near the guess, and count those above them."""
    row = tl.program_id(0).to(tl.int64) // tiles
    start = tl.program_id(0).to(tl.int64) % tiles * (_TILE * _STEPS)
    state = _state_at(state_ptr, row)
    x = elements_at(x_ptr, 4) + _row_at(row, m, ALIGNED)
    found = list_ptr.to(tl.pointer_type(tl.int32)) + row * capacity
    guess = tl.load(state + _GUESS)
    least = (guess - (_AROUND << _GUESSED)).to(tl.int32)
    # Infinity and NaN, if it is near them.
    most = tl.minimum(guess + ((_AROUND + 1) << _GUESSED), _MAGNITUDE).to(tl.int32)
    stop = tl.minimum(start + _TILE * _STEPS, m)
    above = tl.zeros([_TILE], tl.int32)
    while start < stop:
        i, inside = _entries(start, m, _TILE, ALIGNED)
        magnitude = _magnitude(tl.load(x + start + i, mask=inside, other=0), 4)
        above += (magnitude >= most).to(tl.int32)
        near = (inside & (magnitude >= least) & (magnitude < most)).to(tl.int32)
        count = tl.sum(near, 0).to(tl.int64)
        at = tl.atomic_add(state + _COUNT, count, sem="relaxed")
        behind = tl.cumsum(near, 0) - 1
        free = tl.maximum(tl.minimum(capacity - at, _TILE), 0).to(tl.int32)
        tl.store(found + at + behind, magnitude, mask=(near != 0) & (behind < free))
        start += _TILE
    tl.atomic_add(state + _ABOVE, tl.sum(above, 0).to(tl.int64), sem="relaxed")


@kernel
def _ties_kernel(x_ptr, state_ptr, counts_ptr, m: tl.int64, tiles: tl.int64, ITEM: tl.constexpr):
    """How many entries of a tile equal the least that stay, where not all of them do."""
    row = tl.program_id(0).to(tl.int64) // tiles
    start = tl.program_id(0).to(tl.int64) % tiles * _CUT
    i, inside = _entries(start, m, _CUT, False)
    state = _state_at(state_ptr, row)
    if tl.load(state + _TIES) != tl.load(state + _LEFT):
        v = tl.load(elements_at(x_ptr, ITEM) + row * m + start + i, mask=inside, other=0)
        ties = inside & (_magnitude(v, ITEM) == tl.load(state + _BOUND).to(tl.int32))
        tl.store(counts_ptr + tl.program_id(0), tl.sum(ties.to(tl.int32), 0).to(tl.int64))


@kernel
def _cut_kernel(
    x_ptr,
    sent_ptr,
    rest_ptr,
    state_ptr,
    counts_ptr,
    sums_ptr,
    m: tl.int64,
    tiles: tl.int64,
    REST: tl.constexpr,
    EXP: tl.constexpr,
    ITEM: tl.constexpr,
    CELL_EXP: tl.constexpr,
    CELL_ITEM: tl.constexpr,
    ALIGNED: tl.constexpr,
    PTX: tl.constexpr,
):
    """Cut a tile in two. `counts_ptr` has the ties up to the end of each tile of a row.

    `sums_ptr` gets how many stay that are not zero. Of float32, what stays is rounded to the dtype
    of the cells.
    """
    row = tl.program_id(0).to(tl.int64) // tiles
    start = tl.program_id(0).to(tl.int64) % tiles * _CUT
    i, inside = _entries(start, m, _CUT, ALIGNED)
    state = _state_at(state_ptr, row)
    first = _row_at(row, m, ALIGNED) + start
    v = tl.load(elements_at(x_ptr, ITEM) + first + i, mask=inside, other=0)
    magnitude = _magnitude(v, ITEM)
    bound = tl.load(state + _BOUND).to(tl.int32)
    left = tl.load(state + _LEFT)
    equal = inside & (magnitude == bound)
    if tl.load(state + _TIES) != left:
        ties = tl.cumsum(equal.to(tl.int32), 0)
        before = tl.load(counts_ptr + tl.program_id(0)) - tl.sum(equal.to(tl.int32), 0)
        more = tl.maximum(tl.minimum(left - before, _CUT), 0).to(tl.int32)
        equal = equal & (ties <= more)
    stays = (magnitude > bound) | equal
    sent = tl.where(stays, v, 0)
    if CELL_ITEM != ITEM:
        value = sent.to(tl.float32, bitcast=True)
        sent = widen(narrow(value, CELL_EXP, CELL_ITEM, PTX), CELL_EXP, CELL_ITEM)
        sent = sent.to(tl.uint32, bitcast=True)
    tl.store(elements_at(sent_ptr, ITEM) + first + i, sent, mask=inside)
    if REST != _NOTHING:
        if REST == _OTHERS:
            rest = tl.where(stays, 0, v)
        else:
            finite = tl.where(magnitude < _INFINITY, v, 0)
            lost = finite.to(tl.float32, bitcast=True) - sent.to(tl.float32, bitcast=True)
            rest = lost.to(tl.uint32, bitcast=True)
            rest = tl.where(_magnitude(rest, ITEM) < _INFINITY, rest, 0)
        tl.store(elements_at(rest_ptr, ITEM) + first + i, rest, mask=inside)
    kept = inside & (_magnitude(sent, ITEM) != 0)
    tl.store(sums_ptr + tl.program_id(0), tl.sum(kept.to(tl.int32), 0).to(tl.int64))


@functools.cache
def _digit_variants(digit: Digit, out: int, first: bool, sample: bool, item: int):
    values = {"AT": digit.at, "OUT": out, "SHIFT": digit.shift, "BINS": digit.bins}
    values |= {"FIRST": first, "SAMPLE": sample}
    return Variant(_digit_kernel, _OPTIONS, **values, ITEM=item), Variant(
        _pick_kernel, options(num_warps=4), **values
    )


@functools.cache
def _list_variant(aligned: bool) -> Variant:
    return Variant(_list_kernel, _OPTIONS, ALIGNED=aligned)


@functools.cache
def _cut_variants(dtype: DType, cell: DType, rest: int, aligned: bool) -> tuple[Variant, Variant]:
    types = {"EXP": dtype.exponent, "ITEM": dtype.itemsize}
    types |= {"CELL_EXP": cell.exponent, "CELL_ITEM": cell.itemsize}
    cut = Variant(_cut_kernel, _OPTIONS, REST=rest, **types, ALIGNED=aligned, PTX=PTX)
    return Variant(_ties_kernel, _OPTIONS, ITEM=dtype.itemsize), cut


def supports(dtype: DType) -> bool:
    """True for the dtypes that `cut` takes."""
    return dtype.name in ("float32", "bfloat16", "float16")


def on(device: torch.device) -> AbstractContextManager[object]:
    """Makes a GPU current."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def cut(
    x: torch.Tensor,
    keep: int,
    dtype: DType,
    *,
    cell: DType | None = None,
    rest: torch.Tensor | None = None,
    what: int = NOTHING,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What stays of rows, shape (rows, m), contiguous and of `dtype`; and how many are not zero.

    Of each row the `keep` entries of largest magnitude stay, among equal ones the first; of float32
    they are rounded to the dtype `cell`. `rest`, of the shape of `x` or `x` itself, gets the OTHERS
    or the ROUNDING, by `what` (of float32: x - what stays, 0 for NaN and infinities). The second
    result is int64, shape (rows,). Queued on the current stream of the current device, which is
    that of `x`.
    """
    rows, m = x.shape
    sent = torch.empty_like(x)
    state = torch.zeros((rows, STATE), dtype=torch.int64, device=x.device)
    if 0 < keep < m:
        _find(x, keep, dtype, state)
    else:
        # Above all magnitudes, or below.
        state[:, BOUND] = -1 if keep else int(_MAGNITUDE.value)
        state[:, TIES] = 0 if keep else 1
    tiles = -(-m // int(_CUT.value))
    counts, kept = torch.zeros((2, rows, tiles), dtype=torch.int64, device=x.device)
    if rows * tiles:
        count, cutting = _cut_variants(dtype, cell or dtype, what, m % 16 == 0)
        count.launch(rows * tiles, (x, state, counts), m, tiles)
        other = x if rest is None else rest
        pointers = x, sent, other, state, counts.cumsum(1), kept
        cutting.launch(rows * tiles, pointers, m, tiles)
    return sent, kept.sum(1)


def _find(x: torch.Tensor, keep: int, dtype: DType, state: torch.Tensor) -> None:
    """Put the least magnitude that stays in the state of each row."""
    rows, m = x.shape
    span = int(_TILE.value) * int(_STEPS.value)
    tiles, capacity, found = -(-m // span), -1, state
    if dtype.itemsize == 4 and m >= SAMPLED:
        capacity = m // LISTED
        found = torch.empty((rows, capacity), dtype=torch.int32, device=x.device)
        sample = m // int(_STRIDE.value)
        parts = -(-sample // span)
        for i, digit in enumerate(_SAMPLE_DIGITS):
            count, pick = _digit_variants(digit, GUESS, i == 0, True, 4)
            count.launch(rows * parts, (x, found, state), m, keep, capacity, parts)
            pick.launch(rows, (state,), max(1, keep * sample // m), capacity)
        _list_variant(m % 16 == 0).launch(rows * tiles, (x, found, state), m, capacity, tiles)
    for i, digit in enumerate(_DIGITS[dtype.itemsize]):
        count, pick = _digit_variants(digit, BOUND, i == 0, False, dtype.itemsize)
        count.launch(rows * tiles, (x, found, state), m, keep, capacity, tiles)
        pick.launch(rows, (state,), keep, capacity)
