# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment,attr-defined,misc"
"""dynamiq on a GPU: one pass over the elements each way. specs/dynamiq.md.

A thread holds slots of 8 neighbouring columns, with all 8 rows of them: codes become planes, and
planes codes, by exchanging bits between its own registers. An encoder goes through the rows twice,
for scales and for codes: it reads them again. A program has a tile of SLOTS slots, which are whole
super-groups. Where a super-group's codes are in the payload follows from the widths
of all of its chunk; small kernels over super-groups find that out before, without the host, and
leave row and width of each in the workspace as `row << 4 | width`:

1. `_histogram_kernel`, once for each digit: what the steps up cost by the next digit of their
   gains' bits, summed in integers. The bound B is read off these sums digit by digit. Digits are
   short: what `tl.histogram` costs grows with its bins.
2. `_ties_kernel`: B, and of every block of super-groups what the steps that gain just B cost.
3. `_widths_kernel`: a block adds up the ties of the blocks before it and knows its widths; it
   counts each. A decoder's `_index_kernel` counts those in the index instead.
4. `_places_kernel`: a block adds up what the blocks before it, and all, have of each width.

Nothing depends on the order in which programs run. Energies are a pass over the tensor of their
own: no element can be coded before all are known. With given stats, and in `decode_add_encode`,
whose sums have the widths of the source if no stats are given, there is no such pass.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from ..formats.dtypes import DType
from .common.base import Key, Plan
from .common.columns_triton import from_columns
from .common.frame_triton import (
    CHUNK,
    CHUNK_PAYLOAD,
    clear,
    float_of,
    frame_of,
    report,
    round_bfloat16,
    store_element,
    touched,
    weigh,
    weigh_bytes,
)
from .common.hadamard_triton import spread
from .common.launch_triton import PTX, Variant, kernel, options
from .common.minifloat import INFINITY, largest_number
from .common.minifloat_triton import (
    aligned_for,
    elements_at,
    nan_bits,
    narrow,
    narrow_number,
    widen,
)
from .common.philox_triton import KEY_ON_DEVICE, NO_KEY, key_arguments, philox4
from .dynamiq import (
    ANY_STEPS,
    BLOCK,
    BUDGET_STEPS,
    CENTER_LIMIT,
    CODE_STREAM,
    DIGITS,
    FLOOR,
    FLOOR_WORD,
    MAX_SCALE_WORD,
    MAX_WIDTH,
    MIN_WIDTH,
    NAN_SCALE,
    POW2_STEPS,
    ROUNDINGS,
    SCALE_STREAM,
    SCALES,
    SHARED_STREAM,
    STATE,
    WIDTHS,
    Dynamiq,
    grid_of,
    shares_of,
    workspace,
)

Floats = npt.NDArray[np.float32]

#: Neighbouring columns of a slot.
_SLOT = tl.constexpr(8)
_MAGNITUDE = tl.constexpr((1 << 31) - 1)
_INFINITY = tl.constexpr(INFINITY)
_LARGEST = tl.constexpr(float(np.finfo(np.float32).max))
_FLOOR = tl.constexpr(FLOOR)
_CENTER_LIMIT = tl.constexpr(int(np.float32(CENTER_LIMIT).view(np.int32)))
_NAN_SCALE, _FLOOR_WORD = tl.constexpr(NAN_SCALE), tl.constexpr(FLOOR_WORD)
_MAX_SCALE_WORD = tl.constexpr(MAX_SCALE_WORD)
_MIN_WIDTH, _MAX_WIDTH = tl.constexpr(MIN_WIDTH), tl.constexpr(MAX_WIDTH)
_BUDGET_STEPS = tl.constexpr(BUDGET_STEPS)
_CODES, _SHARED = tl.constexpr(CODE_STREAM), tl.constexpr(SHARED_STREAM)
_DRAWN_SCALES = tl.constexpr(SCALE_STREAM)
_KEY_ON_DEVICE = tl.constexpr(KEY_ON_DEVICE)
_STOCHASTIC, _WIDE = (tl.constexpr(SCALES.index(name)) for name in ("stochastic", "wide"))
_CORRELATED, _RANDOM, _NEAREST = (tl.constexpr(i) for i in range(len(ROUNDINGS)))
_ANY, _POW2, _FIXED = (tl.constexpr(i) for i in range(len(WIDTHS)))
_ANY_FACTORS = [tl.constexpr(float(np.float32(gain))) for _, _, gain in ANY_STEPS]
_TO_3, _TO_4, _TO_5, _TO_6, _TO_7, _TO_8 = _ANY_FACTORS
_POW2_TO_4, _POW2_TO_8 = (tl.constexpr(float(np.float32(gain))) for _, _, gain in POW2_STEPS)

#: What brings a float to an integer in its lowest bits, and the bits of 0 there.
_TO_INTEGER, _INTEGER = tl.constexpr(12582912.0), tl.constexpr(0x4B400000)

_BLOCK, _STATE = tl.constexpr(BLOCK), tl.constexpr(STATE)
#: Where the state of a chunk has, behind the sums by digit, the rows in use, and then, of every
#: number of digits, the bound so far and what is left.
_ROWS = tl.constexpr(sum(1 << bits for bits in DIGITS))
_BOUND = tl.constexpr(_ROWS + 1)
#: Numbers of a block: the cost of its ties, then how many super-groups have widths 2 to 8.
_COUNTS = tl.constexpr(8)
#: Where `_tables` has pairs, bounds and shapes behind its values.
_PAIRS, _BOUNDS, _SHAPES = (tl.constexpr(n) for n in (512, 1536, 2064))
_BLOCK_OPTIONS = options(num_warps=16)
_PLACES_OPTIONS = options(num_warps=8)


class Launch(NamedTuple):
    """Launch parameters: slots that a program takes, which hold whole super-groups of any size, its
    warps, the most registers of a thread (None: the compiler's choice), and the rows that an
    encoder codes at once, 2, 4 or 8: fewer have less code, which it goes through again.
    """

    slots: int
    warps: int
    registers: int | None = None
    rows: int = 2


#: Where they are changed, `_encode_variant` and the like forget their caches.
MEASURE = Launch(128, 4)
ENCODE = Launch(64, 2)
DECODE = Launch(64, 2)
DECODE_ADD_ENCODE = Launch(128, 4, 168)


@triton.jit
def _float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _bits(value):
    return value.to(tl.int32, bitcast=True)


@triton.jit
def _log2(x, factor, ahead, PTX: tl.constexpr):
    """About log2(x) * factor + ahead, of numbers near 1."""
    if PTX:
        # Fused, but not as compilers would: no other operation may be.
        return tl.inline_asm_elementwise(
            "{ .reg .f32 a; lg2.approx.ftz.f32 a, $1; fma.rz.f32 $0, a, $2, $3; }",
            "=r,r,r,r",
            [x, factor, ahead],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        return tl.log2(x) * factor + ahead


@triton.jit
def _floor(x, PTX: tl.constexpr):
    """Of `x` + _TO_INTEGER what is next below it."""
    if PTX:
        return tl.inline_asm_elementwise(
            "add.rm.f32 $0, $1, 0f4B400000;", "=r,r", [x], tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.floor(x) + _TO_INTEGER


@triton.jit
def _scaled(x, inverse, PTX: tl.constexpr):
    """|x| * inverse, at most 1; with PTX of NaN 0."""
    if PTX:
        return tl.inline_asm_elementwise(
            "{ .reg .f32 a; abs.f32 a, $1; mul.rn.sat.f32 $0, a, $2; }",
            "=r,r,r",
            [x, inverse],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        return tl.minimum(tl.abs(x) * inverse, 1.0)


@triton.jit
def _inverse(x, PTX: tl.constexpr):
    """1 / x, or 0 of 0."""
    if PTX:
        # With fewer operations than a division.
        found = tl.inline_asm_elementwise(
            "rcp.rn.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        one = tl.full(x.shape, 1.0, tl.float32)
        found = tl.div_rn(one, tl.where(x > 0, x, 1.0))
    return tl.where(x > 0, found, 0.0)


@triton.jit
def _below(x, y):
    """-1 where x < y, else 0, of numbers: the sign of a difference is exact."""
    return _bits(x - y) >> 31


@triton.jit
def _of_word(word):
    """Values of bfloat16 bits."""
    return _float(word.to(tl.int32) << 16)


@triton.jit
def _word_up(x):
    """Bits of the least bfloat16 not below `x`, at most the largest finite one, int32."""
    words = (_bits(x).to(tl.uint32, bitcast=True) + 0xFFFF) >> 16
    words = tl.minimum(words.to(tl.int32), _MAX_SCALE_WORD)
    return tl.where(x < _FLOOR, 0, words)


@triton.jit
def _chunk_at(chunk, nelem, chunk_nelem):
    """First element of a chunk, and how many it has."""
    first = chunk.to(tl.int64) * chunk_nelem
    return first, tl.maximum(tl.minimum(chunk_nelem, nelem - first), 0)


@triton.jit
def _units(n, budget, SIZE: tl.constexpr):
    """Super-groups of a chunk of `n` elements, and rows of its payload."""
    groups = (n + SIZE - 1) // SIZE
    return groups, tl.minimum(groups * budget // (_BUDGET_STEPS * SIZE), _MAX_WIDTH * groups)


# Widths: a program has a block of super-groups of a chunk.


@triton.jit
def _block_at(pid, blocks, nelem, chunk_nelem, budget, SIZE: tl.constexpr):
    """(chunk, block, first element, super-groups of the chunk, its units, those of the block)."""
    chunk = (pid // blocks).to(tl.int64)
    block = (pid % blocks).to(tl.int64)
    first, n = _chunk_at(chunk, nelem, chunk_nelem)
    groups, units = _units(n, budget, SIZE)
    return chunk, block, first, groups, units, block * _BLOCK + tl.arange(0, _BLOCK)


@triton.jit
def _energies(energies_ptr, j, groups, first, nelem, SIZE: tl.constexpr):
    """Energies of super-groups `j` of the chunk that starts with element `first`; 0 behind it.

    Those that come from the device may be any floats.
    """
    energies = energies_ptr.to(tl.pointer_type(tl.float32))
    at = first // SIZE + j
    f = tl.load(energies + at, mask=j < groups, other=0)
    last = tl.where(first % SIZE != 0, (nelem + SIZE - 1) // SIZE - 1, 0)
    f = tl.maximum(f, tl.load(energies + at + 1, mask=(j < groups) & (at < last), other=0))
    return tl.where(f >= _FLOOR, tl.minimum(f, _LARGEST), 0.0)


@triton.jit
def _gain(f, k: tl.constexpr, HOW: tl.constexpr):
    """Bits of what step `k` gains, int32: they have the order of the floats."""
    if HOW == _POW2:
        return _bits(f * (_POW2_TO_4 if k == 0 else _POW2_TO_8))
    elif k == 0:
        return _bits(f * _TO_3)
    elif k == 1:
        return _bits(f * _TO_4)
    elif k == 2:
        return _bits(f * _TO_5)
    elif k == 3:
        return _bits(f * _TO_6)
    elif k == 4:
        return _bits(f * _TO_7)
    else:
        return _bits(f * _TO_8)


@triton.jit
def _bound(
    state, left, LEVEL: tl.constexpr, AT: tl.constexpr, BINS: tl.constexpr, SHIFT: tl.constexpr
):
    """The first LEVEL digits of the bound's bits, the others 0, and what is left of `left`.

    The last of them is the least digit such that what costs more than `left` has none above it; its
    sums are at AT, the bound by the digits before it is in `state`.
    """
    bound = left * 0
    if LEVEL > 1:
        bound = tl.load(state + _BOUND + 2 * (LEVEL - 1))
        left = tl.load(state + _BOUND + 2 * (LEVEL - 1) + 1)
    if LEVEL > 0:
        i = tl.arange(0, BINS)
        costs = tl.load(state + AT + i)
        above = tl.sum(costs, 0) - tl.cumsum(costs, 0)
        digit = tl.sum((above > left).to(tl.int64), 0)
        left -= tl.sum(tl.where(i == digit, above, 0), 0)
        bound |= digit << SHIFT
    return bound, left


@triton.jit
def _keep_bound(state, bound, left, LEVEL: tl.constexpr):
    tl.store(state + _BOUND + 2 * LEVEL, bound)
    tl.store(state + _BOUND + 2 * LEVEL + 1, left)


@kernel
def _histogram_kernel(
    energies_ptr,
    state_ptr,
    nelem: tl.int64,
    chunk_nelem: tl.int64,
    blocks: tl.int64,
    budget: tl.int64,
    SIZE: tl.constexpr,
    HOW: tl.constexpr,
    LEVEL: tl.constexpr,
    AT: tl.constexpr,
    BINS: tl.constexpr,
    SHIFT: tl.constexpr,
    BEFORE_AT: tl.constexpr,
    BEFORE_BINS: tl.constexpr,
):
    """Sums of what the steps of a block cost, by digit LEVEL of their gains.

    Of steps whose digits before are those of the bound. No sum counts those of digit 0. The BINS
    sums are at AT of the state, those of the digit before at BEFORE_AT.
    """
    where = _block_at(tl.program_id(0), blocks, nelem, chunk_nelem, budget, SIZE)
    chunk, block, first, groups, units, j = where
    state = state_ptr.to(tl.pointer_type(tl.int64)) + chunk * _STATE
    f = _energies(energies_ptr, j, groups, first, nelem, SIZE)
    left = units - _MIN_WIDTH * groups
    bound, left = _bound(state, left, LEVEL, BEFORE_AT, BEFORE_BINS, SHIFT + BINS.bit_length() - 1)
    if LEVEL > 0:
        if block == 0:
            _keep_bound(state, bound, left, LEVEL)
    costs = tl.zeros([BINS], tl.int32)
    for k in tl.static_range(2 if HOW == _POW2 else 6):
        gain = _gain(f, k, HOW)
        digit = (gain >> SHIFT) & (BINS - 1)
        if LEVEL > 0:
            digit = tl.where((gain ^ bound.to(tl.int32)) < (BINS << SHIFT), digit, 0)
        costs += tl.histogram(digit, BINS) * ((2 + 2 * k) if HOW == _POW2 else 1)
    i = tl.arange(0, BINS)
    use = (i > 0) & (costs > 0)
    tl.atomic_add(state + AT + i, costs.to(tl.int64), mask=use, sem="relaxed")


@triton.jit
def _tie_costs(f, bound, HOW: tl.constexpr):
    """What the steps cost that gain just the bound: at most one of a super-group."""
    costs = _bits(f) * 0
    bound = tl.where(bound > 0, bound, -1)
    for k in tl.static_range(2 if HOW == _POW2 else 6):
        costs += tl.where(_gain(f, k, HOW) == bound, (2 + 2 * k) if HOW == _POW2 else 1, 0)
    return costs


@kernel
def _ties_kernel(
    energies_ptr,
    state_ptr,
    counts_ptr,
    nelem: tl.int64,
    chunk_nelem: tl.int64,
    blocks: tl.int64,
    budget: tl.int64,
    SIZE: tl.constexpr,
    HOW: tl.constexpr,
    LEVELS: tl.constexpr,
    AT: tl.constexpr,
    BINS: tl.constexpr,
):
    """What a block's ties cost; of a chunk's first block, the bound and what ties may cost.

    The sums by the last of LEVELS digits are BINS at AT of the state.
    """
    where = _block_at(tl.program_id(0), blocks, nelem, chunk_nelem, budget, SIZE)
    chunk, block, first, groups, units, j = where
    state = state_ptr.to(tl.pointer_type(tl.int64)) + chunk * _STATE
    bound, left = _bound(state, units - _MIN_WIDTH * groups, LEVELS, AT, BINS, 0)
    f = _energies(energies_ptr, j, groups, first, nelem, SIZE)
    ties = tl.sum(_tie_costs(f, bound, HOW), 0)
    tl.store(counts_ptr + (chunk * blocks + block) * _COUNTS, ties.to(tl.int64))
    if block == 0:
        _keep_bound(state, bound, left, 0)


@triton.jit
def _fields(widths):
    """A one in a field of 16 bits, int64: of widths 2 to 5, and of 6 to 8. Sums are counts."""
    one = (widths * 0 + 1).to(tl.int64)
    low = (widths >= _MIN_WIDTH) & (widths < 6)
    low = tl.where(low, one << (16 * tl.maximum(widths - _MIN_WIDTH, 0)).to(tl.int64), 0)
    high = tl.where(widths >= 6, one << (16 * tl.maximum(widths - 6, 0)).to(tl.int64), 0)
    return low, high


@triton.jit
def _field(low, high, w: tl.constexpr):
    """Of sums of `_fields` that of width `w`."""
    if w < 6:
        return (low >> (16 * (w - _MIN_WIDTH))) & 0xFFFF
    else:
        return (high >> (16 * (w - 6))) & 0xFFFF


@triton.jit
def _store_widths(widths, j, groups, places, counts):
    """Leave widths of a block, int32, in `places`, and how often it has each in `counts`."""
    tl.store(places + j, widths.to(tl.int64), mask=j < groups)
    low, high = _fields(tl.where(j < groups, widths, 0))
    low = tl.sum(low, 0)
    high = tl.sum(high, 0)
    for w in tl.static_range(_MIN_WIDTH, _MAX_WIDTH + 1):
        tl.store(counts + w - 1, _field(low, high, w))


@kernel
def _widths_kernel(
    energies_ptr,
    state_ptr,
    counts_ptr,
    places_ptr,
    nelem: tl.int64,
    chunk_nelem: tl.int64,
    blocks: tl.int64,
    budget: tl.int64,
    group_stride: tl.int64,
    SIZE: tl.constexpr,
    HOW: tl.constexpr,
):
    """Widths of a block. `group_stride`: super-groups of a whole chunk."""
    where = _block_at(tl.program_id(0), blocks, nelem, chunk_nelem, budget, SIZE)
    chunk, block, first, groups, units, j = where
    counts = counts_ptr + chunk * blocks * _COUNTS
    if HOW == _FIXED:
        widths = (j * 0 + units // tl.maximum(groups, 1)).to(tl.int32)
    else:
        state = state_ptr.to(tl.pointer_type(tl.int64)) + chunk * _STATE
        bound = tl.load(state + _BOUND)
        left = tl.load(state + _BOUND + 1)
        f = _energies(energies_ptr, j, groups, first, nelem, SIZE)
        i = tl.arange(0, 256)
        at = block * 0
        while at < block:
            before = tl.load(counts + (at + i) * _COUNTS, mask=at + i < block, other=0)
            left -= tl.sum(before, 0)
            at += 256
        ties = _tie_costs(f, bound, HOW)
        widths = tl.where(tl.cumsum(ties, 0) <= left, ties, 0) + _MIN_WIDTH
        for k in tl.static_range(2 if HOW == _POW2 else 6):
            cost = (2 + 2 * k) if HOW == _POW2 else 1
            widths += tl.where(_gain(f, k, HOW) > bound, cost, 0)
    places = places_ptr.to(tl.pointer_type(tl.int64)) + chunk * group_stride
    _store_widths(widths, j, groups, places, counts + block * _COUNTS)


@kernel
def _index_kernel(
    src_ptr,
    sums_ptr,
    status_ptr,
    counts_ptr,
    places_ptr,
    first_chunk: tl.int64,
    nelem: tl.int64,
    chunk_nelem: tl.int64,
    blocks: tl.int64,
    budget: tl.int64,
    group_stride: tl.int64,
    static_at: tl.int64,
    static_stride: tl.int64,
    index_at: tl.int64,
    SIZE: tl.constexpr,
    HOW: tl.constexpr,
    SUMS: tl.constexpr,
):
    """Widths of a block of a chunk's index, and whether an encoder chooses such ones."""
    pid = tl.program_id(0).to(tl.int64) + first_chunk * blocks
    where = _block_at(pid, blocks, nelem, chunk_nelem, budget, SIZE)
    chunk, block, _, groups, units, j = where
    static_ptr = src_ptr + (static_at + chunk * static_stride) * 128
    at = index_at * 128 + j // 2
    pair = tl.load(static_ptr + at, mask=j // 2 < (groups + 1) // 2, other=0).to(tl.int32)
    widths = tl.where(j % 2 == 0, pair & 15, pair >> 4)
    if HOW == _FIXED:
        good = widths == units // tl.maximum(groups, 1)
    elif HOW == _POW2:
        good = (widths == 2) | (widths == 4) | (widths == 8)
    else:
        good = (widths >= _MIN_WIDTH) & (widths <= _MAX_WIDTH)
    good = tl.where(j < groups, good, widths == 0)
    if tl.min(good.to(tl.int32), 0) == 0:
        report(status_ptr, CHUNK + (chunk << 8) + CHUNK_PAYLOAD)
    if SUMS:
        terms = tl.sum(tl.where(j % 2 == 0, weigh_bytes(pair, at), 0), 0)
        tl.atomic_add(sums_ptr + chunk, terms.to(tl.int64, bitcast=True), sem="relaxed")
    widths = tl.minimum(tl.maximum(widths, _MIN_WIDTH), _MAX_WIDTH)
    places = places_ptr.to(tl.pointer_type(tl.int64)) + chunk * group_stride
    _store_widths(widths, j, groups, places, counts_ptr + (chunk * blocks + block) * _COUNTS)


@kernel
def _places_kernel(
    counts_ptr,
    places_ptr,
    state_ptr,
    status_ptr,
    first_chunk: tl.int64,
    nelem: tl.int64,
    chunk_nelem: tl.int64,
    blocks: tl.int64,
    budget: tl.int64,
    group_stride: tl.int64,
    SIZE: tl.constexpr,
    READ: tl.constexpr,
):
    """Rows of a block's super-groups, by the widths of all; of the first of a chunk, rows in use.

    READ: the widths come from an index and may be too many.
    """
    pid = tl.program_id(0).to(tl.int64) + first_chunk * blocks
    where = _block_at(pid, blocks, nelem, chunk_nelem, budget, SIZE)
    chunk, block, _, groups, units, j = where
    counts = counts_ptr + chunk * blocks * _COUNTS
    slot = tl.arange(0, _COUNTS)[None, :]
    i = tl.arange(0, 128)[:, None]
    before = tl.zeros([128, _COUNTS], tl.int64)
    total = tl.zeros([128, _COUNTS], tl.int64)
    at = block * 0
    while at < blocks:
        number = tl.load(counts + (at + i) * _COUNTS + slot, mask=at + i < blocks, other=0)
        total += number
        before += tl.where(at + i < block, number, 0)
        at += 128
    before = tl.sum(before, 0)
    total = tl.sum(total, 0)
    slot = tl.arange(0, _COUNTS)
    places = places_ptr.to(tl.pointer_type(tl.int64)) + chunk * group_stride
    widths = tl.load(places + j, mask=j < groups, other=0)
    rows = widths * 0
    ones_low, ones_high = _fields(widths.to(tl.int32))
    low = tl.cumsum(ones_low, 0) - ones_low
    high = tl.cumsum(ones_high, 0) - ones_high
    base = block * 0
    for w in tl.static_range(_MIN_WIDTH, _MAX_WIDTH + 1):
        start = base + w * tl.sum(tl.where(slot == w - 1, before, 0), 0)
        rows = tl.where(widths == w, start + w * _field(low, high, w), rows)
        base += w * tl.sum(tl.where(slot == w - 1, total, 0), 0)
    tl.store(places + j, (rows << 4) | widths, mask=j < groups)
    if block == 0:
        state = state_ptr.to(tl.pointer_type(tl.int64)) + chunk * _STATE
        tl.store(state + _ROWS, tl.minimum(base, units))
        if READ:
            if base > units:
                report(status_ptr, CHUNK + (chunk << 8) + CHUNK_PAYLOAD)


# Elements: a program has a tile of slots. Columns of a row of a super-group are SIZE / 8, its
# slots LANES; elements are tensors of a row of all slots, of shape [SLOTS, 8]. What groups and
# super-groups have, each of their slots has: tensors of shape [SLOTS], in which nothing moves.


@triton.jit
def _rows_of(
    x,
    base,
    n,
    COLUMNS: tl.constexpr,
    EXP: tl.constexpr,
    ITEM: tl.constexpr,
    ROWS: tl.constexpr,
    MASKED: tl.constexpr,
):
    rows = ()
    for k in tl.static_range(ROWS):
        i = base[:, None] + (k * COLUMNS + tl.arange(0, _SLOT))[None, :]
        if MASKED:
            v = tl.load(x + i, mask=i < n, other=0)
        else:
            v = tl.load(x + i)
        rows = rows + (widen(v, EXP, ITEM),)
    return rows


@triton.jit
def _load_rows(
    x,
    base,
    n,
    whole,
    COLUMNS: tl.constexpr,
    EXP: tl.constexpr,
    ITEM: tl.constexpr,
    ROWS: tl.constexpr,
):
    """float32 bits, int32, of ROWS rows of slots that start with elements `base`; 0 behind `n`."""
    if whole:
        rows = _rows_of(x, base, n, COLUMNS, EXP, ITEM, ROWS, False)
    else:
        rows = _rows_of(x, base, n, COLUMNS, EXP, ITEM, ROWS, True)
    return rows


@triton.jit
def _tree_sum(rows, GROUPS: tl.constexpr, LOG_COLUMNS: tl.constexpr):
    """Sums of super-groups, in the page's order; shape [GROUPS]."""
    a = (rows[0] + rows[4]) + (rows[2] + rows[6])
    b = (rows[1] + rows[5]) + (rows[3] + rows[7])
    t = a + b
    for k in tl.static_range(LOG_COLUMNS):
        t = tl.sum(tl.reshape(t, [GROUPS, 2, (1 << LOG_COLUMNS) >> (k + 1)]), 1)
    return tl.reshape(t, [GROUPS])


@triton.jit
def _top(x, SLOTS: tl.constexpr, N: tl.constexpr):
    """The largest of each N neighbours of `x`, shape [SLOTS], for each of them."""
    if N > 1:
        x = spread(tl.max(tl.reshape(x, [SLOTS // N, N]), 1), SLOTS // N, N)
    return x


@triton.jit
def _tops(rows, ROWS: tl.constexpr):
    """The largest magnitude of a slot's values in ROWS rows, and NaN of any; shape [SLOTS, 8]."""
    top = tl.abs(rows[0])
    for k in tl.static_range(1, ROWS):
        top = tl.maximum(top, tl.abs(rows[k]), propagate_nan=tl.PropagateNan.ALL)
    return top


@triton.jit
def _finite(rows, lost, ROWS: tl.constexpr):
    """Values of float32 bits, those of lost slots 0."""
    v = ()
    for k in tl.static_range(ROWS):
        v = v + (_float(tl.where(lost[:, None], 0, rows[k])),)
    return v


@triton.jit
def _about(v, mean, base, n, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    """ROWS rows of values about the means of their slots; what is behind `n` stays 0."""
    about = ()
    for k in tl.static_range(ROWS):
        i = base[:, None] + (k * COLUMNS + tl.arange(0, _SLOT))[None, :]
        about = about + (tl.where(i < n, v[k] - mean[:, None], 0.0),)
    return about


@triton.jit
def _means(v, top, group, n, SIZE: tl.constexpr, LOG_COLUMNS: tl.constexpr, SLOTS: tl.constexpr):
    """Words of the means of super-groups with the largest magnitudes `top`, for their slots."""
    LANES: tl.constexpr = SIZE // 64
    total = spread(_tree_sum(v, SLOTS // LANES, LOG_COLUMNS), SLOTS // LANES, LANES)
    count = tl.minimum(tl.maximum(n - group * SIZE, 1), SIZE).to(tl.float32)
    mean = tl.div_rn(total, count)
    none = (top >= _CENTER_LIMIT) | (tl.abs(mean) < _FLOOR)
    return round_bfloat16(tl.where(none, 0.0, mean)).to(tl.int32)


@triton.jit
def _values(
    rows,
    base,
    group,
    n,
    SIZE: tl.constexpr,
    LOG_COLUMNS: tl.constexpr,
    SLOTS: tl.constexpr,
    CENTER: tl.constexpr,
):
    """(float32 values about their means, those of lost super-groups 0; of slots the largest
    magnitude of their super-group, whether it is lost, the word of its mean) of rows of float32
    bits; `group` are the numbers of the super-groups of slots.
    """
    LANES: tl.constexpr = SIZE // 64
    raw = ()
    for k in tl.static_range(8):
        raw = raw + (_float(rows[k]),)
    top = tl.max(_bits(_tops(raw, 8)) & _MAGNITUDE, 1)
    top = _top(top, SLOTS, LANES)
    lost = top >= _INFINITY
    v = _finite(rows, lost, 8)
    words = top * 0
    most = _float(tl.where(lost, 0, top))
    if CENTER:
        words = _means(v, top, group, n, SIZE, LOG_COLUMNS, SLOTS)
        v = _about(v, _of_word(words), base, n, SIZE // 8, 8)
        most = _top(tl.max(_tops(v, 8), 1), SLOTS, LANES)
    return v, most, lost, words


@triton.jit
def _slots(tile, SIZE: tl.constexpr, SLOTS: tl.constexpr):
    """Of a tile's slots the numbers of their super-groups, int64, and their numbers in those."""
    LANES: tl.constexpr = SIZE // 64
    slot = tl.arange(0, SLOTS)
    return tile * (SLOTS // LANES) + slot // LANES, slot % LANES


@kernel
def _measure_kernel(
    x_ptr,
    energies_ptr,
    nelem: tl.int64,
    SIZE: tl.constexpr,
    LOG_COLUMNS: tl.constexpr,
    CENTER: tl.constexpr,
    EXP: tl.constexpr,
    ITEM: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Energies of a tile of a tensor's super-groups."""
    GROUPS: tl.constexpr = SLOTS * 64 // SIZE
    tile = tl.program_id(0).to(tl.int64)
    base = _bases(tile, SIZE, SLOTS)
    whole = (tile + 1) * (SLOTS * 64) <= nelem
    rows = _load_rows(elements_at(x_ptr, ITEM), base, nelem, whole, SIZE // 8, EXP, ITEM, 8)
    group, _ = _slots(tile, SIZE, SLOTS)
    v, _, _, _ = _values(rows, base, group, nelem, SIZE, LOG_COLUMNS, SLOTS, CENTER)
    squares = ()
    for k in tl.static_range(8):
        squares = squares + (v[k] * v[k],)
    found = tl.minimum(_tree_sum(squares, GROUPS, LOG_COLUMNS), _LARGEST)
    energies = energies_ptr.to(tl.pointer_type(tl.float32))
    group = tile * GROUPS + tl.arange(0, GROUPS)
    tl.store(energies + group, found, mask=group * SIZE < nelem)


@triton.jit
def _bases(tile, SIZE: tl.constexpr, SLOTS: tl.constexpr):
    """Numbers of the first elements of a tile's slots."""
    LANES: tl.constexpr = SIZE // 64
    slot = tl.arange(0, SLOTS)
    return tile * (SLOTS * 64) + slot // LANES * SIZE + slot % LANES * _SLOT


@triton.jit
def _words(eighth, e, seed, step, rank, EVEN: tl.constexpr):
    """The 4 words with the random halves of 8 elements each, from number 8 * `eighth` on.

    Or, if not EVEN, from so much further on as the number `e` is behind a multiple of 8.
    """
    w0, w1, w2, w3 = philox4(seed, step, rank, _CODES, eighth)
    if not EVEN:
        w4, w5, w6, w7 = philox4(seed, step, rank, _CODES, eighth + 1)
        two = (e & 4) != 0
        w0 = tl.where(two, w2, w0)
        w1 = tl.where(two, w3, w1)
        w2 = tl.where(two, w4, w2)
        w3 = tl.where(two, w5, w3)
        w4 = tl.where(two, w6, w4)
        w5 = tl.where(two, w7, w5)
        one = (e & 2) != 0
        w0 = tl.where(one, w1, w0)
        w1 = tl.where(one, w2, w1)
        w2 = tl.where(one, w3, w2)
        w3 = tl.where(one, w4, w3)
        w4 = tl.where(one, w5, w4)
        odd = (e & 1) != 0
        w0 = tl.where(odd, (w0 >> 16) | (w1 << 16), w0)
        w1 = tl.where(odd, (w1 >> 16) | (w2 << 16), w1)
        w2 = tl.where(odd, (w2 >> 16) | (w3 << 16), w2)
        w3 = tl.where(odd, (w3 >> 16) | (w4 << 16), w3)
    return w0, w1, w2, w3


@triton.jit
def _drawn(eighth, e, seed, step, rank, EVEN: tl.constexpr):
    """What elements of `_words` draw, (half + 0.5) / 2^16; shape [SLOTS, 8]."""
    w0, w1, w2, w3 = _words(eighth, e, seed, step, rank, EVEN)
    low = (w0 & 0xFFFF, w0 >> 16, w1 & 0xFFFF, w1 >> 16)
    own = from_columns(low + (w2 & 0xFFFF, w2 >> 16, w3 & 0xFFFF, w3 >> 16), 8, 3)
    # 128 + half / 2^16, less what makes it (half + 0.5) / 2^16: both are exact.
    return (own | 0x43000000).to(tl.float32, bitcast=True) - (128.0 - 2.0**-17)


@triton.jit
def _stratum(half, strata, ring_rank):
    """Numbers of the strata that rows of slots draw from, of halves in 0 to 2^16 - 1, uint32."""
    strata = strata.to(tl.uint32)
    # Twice the number, and whether it is counted from the end; their sum is modulo `strata`.
    twice = (half * strata >> 16) + (ring_rank.to(tl.uint32) & 0xFFFFFFFE)
    twice = tl.minimum(twice, twice - strata)
    from_end = ((twice ^ ring_rank.to(tl.uint32)) & 1) != 0
    at = (twice >> 1).to(tl.int32)
    return tl.where(from_end, strata.to(tl.int32) - 1 - at, at).to(tl.float32)


@triton.jit
def _exchanged(words, STEP: tl.constexpr, MASK: tl.constexpr, N: tl.constexpr):
    """Of N words k and k + STEP trade bits: those of MASK of the second for those STEP above."""
    found = ()
    for k in tl.static_range(N):
        if k & STEP == 0:
            changed = ((words[k] >> STEP) ^ words[k + STEP]) & MASK
            found = found + (words[k] ^ (changed << STEP),)
        else:
            changed = ((words[k - STEP] >> STEP) ^ words[k]) & MASK
            found = found + (words[k] ^ changed,)
    return found


@triton.jit
def _transposed(words, N: tl.constexpr):
    """N words whose bits trade places with the words, N bits by N bits."""
    if N > 4:
        words = _exchanged(words, 4, 0x0F0F0F0F, N)
    if N > 2:
        words = _exchanged(words, 2, 0x33333333, N)
    return _exchanged(words, 1, 0x55555555, N)


@triton.jit
def _rotated(x, left, PTX: tl.constexpr):
    """Words whose bits are `left`, 0 to 31, places further up, the highest at the low end."""
    if PTX:
        # Of two shifts the compiler makes no rotation where it does not know `left`.
        return tl.inline_asm_elementwise(
            "shf.l.wrap.b32 $0, $1, $1, $2;", "=r,r,r", [x, left], tl.uint32, is_pure=True, pack=1
        )
    else:
        return (x << left) | (x >> ((32 - left) & 31))


@triton.jit
def _with_rows(planes, words, k, N: tl.constexpr, PTX: tl.constexpr):
    """Planes with the bits of N rows of codes from row `k` on, a code in each byte of `words`."""
    words = _transposed(words, N)
    k += tl.full([], 0, tl.int32)
    mask = tl.full([], ((1 << N) - 1) * 0x01010101, tl.uint32) << k.to(tl.uint32)
    found = ()
    for p in tl.static_range(8):
        # To their place in bytes; what comes from others is masked.
        rotated = _rotated(words[p % N], (k - p // N * N).to(tl.uint32) & 31, PTX)
        found = found + (planes[p] | (rotated & mask),)
    return found


@triton.jit
def _codes(
    v,
    inverse,
    eighth,
    e,
    table,
    offset,
    slope,
    factor,
    seed,
    step,
    rank,
    strata,
    stratum,
    SLOTS: tl.constexpr,
    ROUNDING: tl.constexpr,
    EVEN: tl.constexpr,
    PTX: tl.constexpr,
):
    """Codes of a row of slots, a byte each of words of shape [SLOTS, 2], all of them more by one
    number, which carries; what slots have in common has the shape [SLOTS, 1]: `inverse`, `table`,
    which starts before what it has of code 0 by as much, what `_tables` says of the width, and
    `stratum`, its number.
    """
    size = _scaled(v, inverse, PTX)
    sign = _bits(v) & -0x80000000
    v = _float(_bits(size) | sign) + 0.0  # there are no negative zeros
    # Among values half a step ahead.
    ahead: tl.constexpr = 0.0 if ROUNDING == _NEAREST else 0.5
    about = _log2(offset + size * slope, factor, ahead, PTX)
    signed = _float(_bits(about) ^ (_bits(v) & -0x80000000))
    if ROUNDING == _NEAREST:
        # The bound between codes next to it, or the one above that.
        code = _bits(signed + _TO_INTEGER)
        code += _below(v, tl.load(table + code))
    else:
        # Less than 0.5 off the number of the last value not above v: of negative ones the estimate
        # counts from -1 down.
        code = _bits(_floor(signed, PTX))
        pairs = table.to(tl.pointer_type(tl.int64))
        code += _below(v, tl.load((pairs + code).to(tl.pointer_type(tl.float32))))
        pair = tl.load(pairs + code)
        part = (v - _float(pair.to(tl.int32))) * _float((pair >> 32).to(tl.int32))
        if ROUNDING == _CORRELATED:
            part = part * strata.to(tl.float32) - stratum
        code -= _below(_drawn(eighth, e, seed, step, rank, EVEN), part)
    code = code.to(tl.uint32, bitcast=True)
    placed = tl.reshape(code, [SLOTS, 2, 4]) << (8 * tl.arange(0, 4))[None, None, :]
    return tl.sum(placed, 2)


@triton.jit
def _sections(
    groups,
    scales_at,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    SCALES: tl.constexpr,
    CENTER: tl.constexpr,
):
    """Where in a static part the means, and behind them the scales of one byte, start."""
    means = scales_at * 128 + groups * (2 * (SIZE // GROUP) if SCALES == _WIDE else 2)
    return means, means + groups * (2 if CENTER else 0)


@triton.jit
def _store_word(static_ptr, at, words, use):
    """Store words of 2 bytes at byte `at`; gives their checksum terms."""
    tl.store((static_ptr + at).to(tl.pointer_type(tl.uint16)), words.to(tl.uint16), mask=use)
    return tl.where(use, weigh_bytes(words, at), 0)


@triton.jit
def _load_word(static_ptr, at, use):
    return tl.load((static_ptr + at).to(tl.pointer_type(tl.uint16)), mask=use, other=0).to(tl.int32)


@triton.jit
def _encode_tile(
    x,
    sums,
    static_ptr,
    places_ptr,
    table_ptr,
    tile,
    first,
    n,
    scales_at,
    index_at,
    budget,
    seed,
    step,
    rank,
    strata,
    ring_rank,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    LOG_COLUMNS: tl.constexpr,
    SCALES: tl.constexpr,
    CENTER: tl.constexpr,
    ROUNDING: tl.constexpr,
    EVEN: tl.constexpr,
    EXP: tl.constexpr,
    ITEM: tl.constexpr,
    ADD: tl.constexpr,
    SLOTS: tl.constexpr,
    STEP: tl.constexpr,
    PTX: tl.constexpr,
):
    """Encode the rows of a tile of the elements at `x`, or with ADD those of `sums`, float32 bits;
    gives the checksum terms. A pass for what super-groups have, one for the codes.
    """
    LANES: tl.constexpr = SIZE // 64
    COLUMNS: tl.constexpr = SIZE // 8
    # Of a group a row has SHARE slots; it has ROWS rows. STEP of them are coded at once.
    SHARE: tl.constexpr = (GROUP if GROUP < COLUMNS else COLUMNS) // 8
    ROWS: tl.constexpr = 1 if GROUP <= COLUMNS else GROUP // COLUMNS
    N: tl.constexpr = ROWS if ROWS > STEP else STEP
    group, lane = _slots(tile, SIZE, SLOTS)
    base = _bases(tile, SIZE, SLOTS)
    groups, units = _units(n, budget, SIZE)
    here = group < groups
    place = tl.load(places_ptr + group, mask=here, other=0)
    width = (place & 15).to(tl.int32)
    means_at, bytes_at = _sections(groups, scales_at, SIZE, GROUP, SCALES, CENTER)
    whole = (tile + 1) * (SLOTS * 64) <= n
    if ADD == 0:
        every = _load_rows(x, base, n, whole, COLUMNS, EXP, ITEM, 8)
    else:
        every = sums
    _, most, lost, means = _values(every, base, group, n, SIZE, LOG_COLUMNS, SLOTS, CENTER)
    terms = tl.zeros([SLOTS], tl.uint64)
    ones = here & (lane == 0)
    if CENTER:
        terms += _store_word(static_ptr, means_at + group * 2, means, ones)
    unit = most * 0.0
    finer = unit
    if SCALES != _WIDE:
        words = _word_up(most)
        unit = tl.div_rn(_of_word(words), unit + 255.0)
        finer = _inverse(unit, PTX)
        words = tl.where(lost, _NAN_SCALE, words)
        terms += _store_word(static_ptr, scales_at * 128 + group * 2, words, ones)
    part = group * (SIZE // GROUP) + lane // SHARE
    firsts = here & (lane % SHARE == 0)
    slot_width = tl.maximum(width, _MIN_WIDTH)[:, None]
    half = (slot_width * 0 + 1) << (slot_width - 1)
    shape = table_ptr.to(tl.pointer_type(tl.float32)) + _SHAPES + 8 * slot_width
    shape += 4 if ROUNDING == _NEAREST else 0
    offset = tl.load(shape)
    slope = tl.load(shape + 1)
    factor = tl.load(shape + 2)
    # What `_codes` counts from: there is the value of code number `half`, or the bound below it.
    table = table_ptr.to(tl.pointer_type(tl.float32))
    if ROUNDING == _NEAREST:
        table += _BOUNDS + slot_width + 3 * half - _INTEGER
    else:
        table += _PAIRS + 6 * half - 2 * tl.full([], _INTEGER, tl.int64)
    less = (half - _INTEGER).to(tl.uint32, bitcast=True) * 0x01010101
    zero = tl.zeros([SLOTS, 2], tl.uint32)
    planes = (zero, zero, zero, zero, zero, zero, zero, zero)
    eighths = (first >> 3) + (base >> 3)
    shared = ()
    if ROUNDING == _CORRELATED:
        # Halves of two rows each, for all 8 neighbours of a row.
        number = (first // SIZE + group) * LANES + lane
        shared = philox4(seed, step, seed * 0, _SHARED, number)
    # Of `sums`, which move on, such that no compiler knows how often: it would write out all rows.
    for k in range(0, 8 if ADD == 0 else tl.where(n > 0, 8, 0), N):
        if ADD == 0:
            rows = _load_rows(x, base + k * COLUMNS, n, whole, COLUMNS, EXP, ITEM, N)
        else:
            rows = sums[0:N]
            sums = sums[N:8] + rows
        if PTX:
            # Of lost super-groups `_scaled` makes zeros.
            v = ()
            for r in tl.static_range(N):
                v = v + (_float(rows[r]),)
        else:
            v = _finite(rows, lost, N)
        if CENTER:
            v = _about(v, _of_word(means), base + k * COLUMNS, n, COLUMNS, N)
        codes = ()
        for r in tl.static_range(N // ROWS):
            top = tl.max(_tops(v[r * ROWS : r * ROWS + ROWS], ROWS), 1)
            top = tl.where(lost, 0.0, _top(top, SLOTS, SHARE))
            number = part + (k // ROWS + r) * (LANES // SHARE)
            if SCALES == _WIDE:
                fraction = _word_up(top)
                inverse = _inverse(_of_word(fraction), PTX)
                at = scales_at * 128 + number * 2
                fraction = tl.where(lost, _NAN_SCALE, fraction)
                terms += _store_word(static_ptr, at, fraction, firsts)
            else:
                quotient = tl.minimum(top * finer, 255.0)
                if SCALES == _STOCHASTIC:
                    steps = (quotient * 65536.0).to(tl.uint32)
                    word = first // GROUP + number
                    w0, w1, w2, w3 = philox4(seed, step, rank, _DRAWN_SCALES, word >> 2)
                    low = tl.where((word & 1) != 0, w1, w0)
                    high = tl.where((word & 1) != 0, w3, w2)
                    drawn = tl.where((word & 2) != 0, high, low)
                    fraction = ((steps + (drawn >> 16)) >> 16).to(tl.int32)
                    some = (unit > 0.0) & (top >= _FLOOR)
                    inverse = _inverse(tl.where(some, top, 0.0), PTX)
                else:
                    # Rounded up by hand: `tl.ceil` takes subnormal numbers for 0 on NVIDIA's.
                    fraction = quotient.to(tl.int32)
                    fraction += (quotient > fraction.to(tl.float32)).to(tl.int32)
                    inverse = _inverse(fraction.to(tl.float32) * unit, PTX)
                at = bytes_at + number
                tl.store(static_ptr + at, fraction.to(tl.uint8), mask=firsts)
                terms += tl.where(firsts, weigh_bytes(fraction, at), 0)
            # fmt: off
            for s in tl.static_range(ROWS):
                eighth = eighths + (k + r * ROWS + s) * (COLUMNS // 8)
                stratum = inverse
                if ROUNDING == _CORRELATED:
                    one = shared[(r * ROWS + s) // 2] >> (16 if (r * ROWS + s) % 2 else 0)
                    stratum = _stratum(one & 0xFFFF, strata, ring_rank)
                row = less + _codes(
                    v[r * ROWS + s], inverse[:, None], eighth, first, table, offset, slope, factor,
                    seed, step, rank, strata, stratum[:, None], SLOTS, ROUNDING, EVEN, PTX,
                )
                codes = codes + (tl.where(inverse[:, None] > 0.0, row, 0),)
            # fmt: on
        if ROUNDING == _CORRELATED:
            shared = shared[N // 2 : 4] + shared[0 : N // 2]
        planes = _with_rows(planes, codes, k, N, PTX)
    payload = static_ptr.to(tl.pointer_type(tl.uint32))
    row = place >> 4
    # Of a sum whose source has an index that is wrong there may be too many planes.
    most_planes = tl.minimum(width, units - row).to(tl.int32)[:, None]
    at = (row * (COLUMNS // 4) + lane * 2)[:, None] + tl.arange(0, 2)[None, :]
    plane_terms = tl.zeros([SLOTS, 2], tl.uint64)
    for p in tl.static_range(_MAX_WIDTH):
        use = p < most_planes
        where = at + p * (COLUMNS // 4)
        tl.store(payload + where, planes[p], mask=use)
        plane_terms += tl.where(use, weigh(planes[p], where), 0)
    terms += tl.sum(plane_terms, 1)
    # A byte for two super-groups.
    after = tl.load(places_ptr + group + 1, mask=group + 1 < groups, other=0)
    pair = width | ((after & 15).to(tl.int32) << 4)
    at = index_at * 128 + group // 2
    use = ones & (group % 2 == 0)
    tl.store(static_ptr + at, pair.to(tl.uint8), mask=use)
    terms += tl.where(use, weigh_bytes(pair, at), 0)
    return tl.sum(terms, 0)


@triton.jit
def _decode_tile(
    static_ptr,
    places_ptr,
    table_ptr,
    tile,
    n,
    lo,
    hi,
    scales_at,
    budget,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    SCALES: tl.constexpr,
    CENTER: tl.constexpr,
    EXP: tl.constexpr,
    ITEM: tl.constexpr,
    SLOTS: tl.constexpr,
    TOP: tl.constexpr,
    PTX: tl.constexpr,
):
    """(element bits, uint32, of a tile's rows; whether a scale or a mean is wrong; checksum terms).

    Wrong counts in super-groups with some of the elements `lo` to `hi` only.
    """
    LANES: tl.constexpr = SIZE // 64
    COLUMNS: tl.constexpr = SIZE // 8
    SHARE: tl.constexpr = (GROUP if GROUP < COLUMNS else COLUMNS) // 8
    ROWS: tl.constexpr = 1 if GROUP <= COLUMNS else GROUP // COLUMNS
    group, lane = _slots(tile, SIZE, SLOTS)
    groups, units = _units(n, budget, SIZE)
    here = group < groups
    wanted = here & (group * SIZE < hi) & (group * SIZE + SIZE > lo)
    place = tl.load(places_ptr + group, mask=here, other=0)
    means_at, bytes_at = _sections(groups, scales_at, SIZE, GROUP, SCALES, CENTER)
    payload = static_ptr.to(tl.pointer_type(tl.uint32))
    row = place >> 4
    width = (place & 15).to(tl.int32)[:, None]
    # An index that is wrong may have too many planes.
    most = tl.minimum(place & 15, units - row).to(tl.int32)[:, None]
    at = (row * (COLUMNS // 4) + lane * 2)[:, None] + tl.arange(0, 2)[None, :]
    words = ()
    plane_terms = tl.zeros([SLOTS, 2], tl.uint64)
    for p in tl.static_range(_MAX_WIDTH):
        where = at + p * (COLUMNS // 4)
        word = tl.load(payload + where, mask=p < most, other=0)
        plane_terms += weigh(word, where)
        words = words + (word,)
    terms = tl.sum(plane_terms, 1)
    words = _transposed(words, 8)
    ones = here & (lane == 0)
    part = group * (SIZE // GROUP) + lane // SHARE
    firsts = here & (lane % SHARE == 0)
    scales = ()
    if SCALES == _WIDE:
        lost_in = lane * 0
        bad_in = lane * 0
        for r in tl.static_range(8 // ROWS):
            at = scales_at * 128 + (part + r * (LANES // SHARE)) * 2
            word = _load_word(static_ptr, at, here)
            terms += tl.where(firsts, weigh_bytes(word, at), 0)
            lost_in += (word == _NAN_SCALE).to(tl.int32)
            finite = (word == 0) | ((word >= _FLOOR_WORD) & (word <= _MAX_SCALE_WORD))
            bad_in += 1 - finite.to(tl.int32)
            scales = scales + (_of_word(tl.where(finite, word, 0)),)
        # A slot for slot of a group, and NaN of any but all: neither finite nor lost.
        bad = _top(bad_in, SLOTS, LANES) > 0
        lost = _top(lost_in, SLOTS, LANES) > 0
        bad &= _top(8 // ROWS - lost_in, SLOTS, LANES) > 0
    else:
        at = scales_at * 128 + group * 2
        word = _load_word(static_ptr, at, here)
        terms += tl.where(ones, weigh_bytes(word, at), 0)
        lost = word == _NAN_SCALE
        finite = (word == 0) | ((word >= _FLOOR_WORD) & (word <= _MAX_SCALE_WORD))
        bad = (finite | lost) == 0
        unit = _of_word(tl.where(finite, word, 0))
        unit = tl.div_rn(unit, unit * 0.0 + 255.0)
        for r in tl.static_range(8 // ROWS):
            at = bytes_at + part + r * (LANES // SHARE)
            fraction = tl.load(static_ptr + at, mask=here, other=0)
            terms += tl.where(firsts, weigh_bytes(fraction, at), 0)
            scales = scales + (fraction.to(tl.float32) * unit,)
    mean = tl.zeros([SLOTS], tl.float32)
    if CENTER:
        at = means_at + group * 2
        word = _load_word(static_ptr, at, here)
        terms += tl.where(ones, weigh_bytes(word, at), 0)
        finite = (word & 0x7F80) != 0x7F80
        bad |= finite == 0
        mean = _of_word(tl.where(finite, word, 0))
    table = table_ptr.to(tl.pointer_type(tl.float32)) + ((width * 0 + 1) << width)
    rows = ()
    for k in tl.static_range(8):
        code = words[k][:, :, None] >> (8 * tl.arange(0, 4))[None, None, :]
        code = tl.reshape(code & 0xFF, [SLOTS, _SLOT]).to(tl.int32)
        y = tl.load(table + code) * scales[k // ROWS][:, None]
        y = y + mean[:, None]
        y = narrow_number(tl.maximum(tl.minimum(y, TOP), -TOP), EXP, ITEM, PTX)
        rows = rows + (tl.where(lost[:, None], nan_bits(EXP, ITEM), y),)
    return rows, tl.max((bad & wanted).to(tl.int32), 0), tl.sum(terms, 0)


@triton.jit
def _behind(static_ptr, start, stop, part, parts):
    """(checksum terms, OR) of this program's share of bytes `start` to `stop`."""
    total = tl.zeros([128], tl.uint64)
    any_set = tl.zeros([128], tl.int32)
    at = start + part * 128
    while at < stop:
        i = at + tl.arange(0, 128)
        v = tl.load(static_ptr + i, mask=i < stop, other=0)
        total += weigh_bytes(v, i)
        any_set |= v.to(tl.int32)
        at += parts.to(tl.int64) * 128
    return tl.sum(total, 0), tl.max(any_set, 0)


@kernel
def _encode_kernel(
    x_ptr,
    out_ptr,
    places_ptr,
    state_ptr,
    table_ptr,
    key_ptr,
    src_ptr,
    source_places_ptr,
    source_state_ptr,
    sums_ptr,
    status_ptr,
    nelem: tl.int64,
    chunk_nelem: tl.int64,
    tiles: tl.int64,
    budget: tl.int64,
    group_stride: tl.int64,
    head: tl.int32,
    static_at: tl.int64,
    static_stride: tl.int64,
    scales_at: tl.int64,
    index_at: tl.int64,
    strata: tl.int32,
    ring_rank: tl.int32,
    seed: tl.uint64,
    step: tl.uint64,
    rank: tl.uint64,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    LOG_COLUMNS: tl.constexpr,
    SCALES: tl.constexpr,
    CENTER: tl.constexpr,
    ROUNDING: tl.constexpr,
    RANDOM: tl.constexpr,
    EVEN: tl.constexpr,
    EXP: tl.constexpr,
    ITEM: tl.constexpr,
    ALIGNED: tl.constexpr,
    ADD: tl.constexpr,
    TOP: tl.constexpr,
    SLOTS: tl.constexpr,
    STEP: tl.constexpr,
    PTX: tl.constexpr,
    SUMS: tl.constexpr,
):
    """Encode one tile of one chunk. Places were found before.

    With ADD the elements of the buffer at `src_ptr`, of the same plan, are added before: in
    float32, and rounded to the plan's dtype. Those at `x_ptr` have ADD bytes then.
    """
    pid = tl.program_id(0)
    chunk = (pid // tiles).to(tl.int64)
    tile = (pid % tiles).to(tl.int64)
    first, n = _chunk_at(chunk, nelem, chunk_nelem)
    if ALIGNED:
        # Made here: a hint on what a function gives is lost.
        first = tl.multiple_of(chunk * chunk_nelem, 16)
    static_ptr = out_ptr + (static_at + chunk * static_stride) * 128
    places = places_ptr.to(tl.pointer_type(tl.int64)) + chunk * group_stride
    X_ITEM: tl.constexpr = ADD if ADD > 0 else ITEM
    x = elements_at(x_ptr, X_ITEM) + first
    summed = ()
    if ADD > 0:
        base = _bases(tile, SIZE, SLOTS)
        whole = (tile + 1) * (SLOTS * 64) <= n
        rows = _load_rows(x, base, n, whole, SIZE // 8, EXP, X_ITEM, 8)
        source_ptr = src_ptr + (static_at + chunk * static_stride) * 128
        source_places = source_places_ptr.to(tl.pointer_type(tl.int64)) + chunk * group_stride
        used = tl.load(source_state_ptr.to(tl.pointer_type(tl.int64)) + chunk * _STATE + _ROWS)
        _, units = _units(n, budget, SIZE)
        added, behind = _behind(source_ptr, used * (SIZE // 8), units * (SIZE // 8), tile, tiles)
        # fmt: off
        y, wrong, terms = _decode_tile(
            source_ptr, source_places, table_ptr, tile, n, n * 0, n, scales_at, budget, SIZE,
            GROUP, SCALES, CENTER, EXP, ITEM, SLOTS, TOP, PTX,
        )
        # fmt: on
        if (wrong | behind) != 0:
            report(status_ptr, CHUNK + (chunk << 8) + CHUNK_PAYLOAD)
        if SUMS:
            added += terms
            tl.atomic_add(sums_ptr + chunk, added.to(tl.int64, bitcast=True), sem="relaxed")
        for k in tl.static_range(8):
            value = float_of(y[k], EXP, ITEM) + _float(rows[k])
            value = narrow(value, EXP, ITEM, PTX)
            at = base[:, None] + (k * (SIZE // 8) + tl.arange(0, _SLOT))[None, :]
            summed = summed + (tl.where(at < n, widen(value, EXP, ITEM), 0),)
    if RANDOM == _KEY_ON_DEVICE:
        seed = tl.load(key_ptr).to(tl.uint64, bitcast=True)
        step = tl.load(key_ptr + 1).to(tl.uint64, bitcast=True)
    # fmt: off
    total = _encode_tile(
        x, summed, static_ptr, places, table_ptr, tile, first, n, scales_at, index_at, budget,
        seed, step, rank, strata, ring_rank, SIZE, GROUP, LOG_COLUMNS, SCALES, CENTER, ROUNDING,
        EVEN, EXP, ITEM, ADD, SLOTS, STEP, PTX,
    )
    # fmt: on
    used = tl.load(state_ptr.to(tl.pointer_type(tl.int64)) + chunk * _STATE + _ROWS)
    _, units = _units(n, budget, SIZE)
    clear(static_ptr, used * (SIZE // 8), units * (SIZE // 8), tile, tiles)
    record = out_ptr.to(tl.pointer_type(tl.int64)) + head + chunk * 4
    if SUMS:
        tl.atomic_add(record, total.to(tl.int64, bitcast=True), sem="relaxed")


@kernel
def _decode_kernel(
    src_ptr,
    out_ptr,
    places_ptr,
    state_ptr,
    table_ptr,
    sums_ptr,
    status_ptr,
    start: tl.int64,
    stop: tl.int64,
    first_chunk: tl.int64,
    nelem: tl.int64,
    chunk_nelem: tl.int64,
    tiles: tl.int64,
    budget: tl.int64,
    group_stride: tl.int64,
    static_at: tl.int64,
    static_stride: tl.int64,
    scales_at: tl.int64,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    SCALES: tl.constexpr,
    CENTER: tl.constexpr,
    EXP: tl.constexpr,
    ITEM: tl.constexpr,
    ALIGNED: tl.constexpr,
    ADD: tl.constexpr,
    STORE: tl.constexpr,
    TOP: tl.constexpr,
    SLOTS: tl.constexpr,
    PTX: tl.constexpr,
    SUMS: tl.constexpr,
):
    """Elements `start` to `stop` of the tensor as far as they lie in one tile of one chunk.

    Rows behind the last plane are looked at with a chunk's last element.
    """
    pid = tl.program_id(0)
    chunk = (first_chunk + pid // tiles).to(tl.int64)
    tile = (pid % tiles).to(tl.int64)
    first, n = _chunk_at(chunk, nelem, chunk_nelem)
    static_ptr = src_ptr + (static_at + chunk * static_stride) * 128
    places = places_ptr.to(tl.pointer_type(tl.int64)) + chunk * group_stride
    to = first - start
    if ALIGNED:
        to = tl.multiple_of(to, 16)
    lo = tl.maximum(start - first, 0)
    hi = tl.minimum(stop - first, n)
    begin = tile * (SLOTS * 64)
    total = tl.zeros([], tl.uint64)
    behind = tl.zeros([], tl.int32)
    if hi == n:
        used = tl.load(state_ptr.to(tl.pointer_type(tl.int64)) + chunk * _STATE + _ROWS)
        _, units = _units(n, budget, SIZE)
        total, behind = _behind(static_ptr, used * (SIZE // 8), units * (SIZE // 8), tile, tiles)
    if (begin < hi) & (begin + SLOTS * 64 > lo):
        # fmt: off
        y, wrong, terms = _decode_tile(
            static_ptr, places, table_ptr, tile, n, lo, hi, scales_at, budget, SIZE, GROUP, SCALES,
            CENTER, EXP, ITEM, SLOTS, TOP, PTX,
        )
        # fmt: on
        behind |= wrong
        total += terms
        if STORE:
            base = _bases(tile, SIZE, SLOTS)
            inside = (begin >= lo) & (begin + SLOTS * 64 <= hi)
            if inside:
                _store_rows(out_ptr, to, y, base, lo, hi, SIZE // 8, EXP, ITEM, ADD, False)
            else:
                _store_rows(out_ptr, to, y, base, lo, hi, SIZE // 8, EXP, ITEM, ADD, True)
    if behind != 0:
        report(status_ptr, CHUNK + (chunk << 8) + CHUNK_PAYLOAD)
    if SUMS:
        tl.atomic_add(sums_ptr + chunk, total.to(tl.int64, bitcast=True), sem="relaxed")


@triton.jit
def _store_rows(
    out_ptr,
    to,
    y,
    base,
    lo,
    hi,
    COLUMNS: tl.constexpr,
    EXP: tl.constexpr,
    ITEM: tl.constexpr,
    ADD: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Store rows of element bits, or add them; element i to `to + i` if in [lo, hi)."""
    for k in tl.static_range(8):
        i = base[:, None] + (k * COLUMNS + tl.arange(0, _SLOT))[None, :]
        if MASKED:
            store_element(out_ptr, to + i, y[k], (i >= lo) & (i < hi), EXP, ITEM, ADD)
        else:
            store_element(out_ptr, to + i, y[k], None, EXP, ITEM, ADD)


@functools.cache
def _tables(grid: str, device: torch.device) -> torch.Tensor:
    """What kernels know of a grid, float32, on `device`.

    Of codes number 2^width + code the values; pairs of value and inverse step; at 2^width + width +
    code the least number that is nearer to it than to the code below. Then, 8 numbers for each
    width, what `_codes` takes the logarithm of and multiplies that with: for places among values
    and, 4 behind, for places among bounds.

    Made once: the first use of a grid on a device may not be in a captured graph.
    """
    pairs, bounds, shapes = (n.value for n in (_PAIRS, _BOUNDS, _SHAPES))
    table = np.zeros(shapes + 8 * (MAX_WIDTH + 1), np.float32)
    for width in range(MIN_WIDTH, MAX_WIDTH + 1):
        codes = slice(1 << width, 2 << width)
        values, inverse = grid_of(grid, width)
        table[codes] = values
        table[pairs:bounds].reshape(-1, 2)[codes] = np.stack([values, inverse], 1)
        first = bounds + (1 << width) + width
        table[first : first + (1 << width) + 1] = -np.inf, *_bounds(values, inverse), np.inf
        half = values[1 << width - 1 :].astype(np.float64)
        # Values are about (growth^i - 1) * c + h[0]; of even steps with a growth close to 1.
        steps = np.diff(half)
        growth = max((steps[-1] / steps[0]) ** (1 / max(steps.size - 1, 1)), 1 + 2.0**-15)
        scale = (growth ** (half.size - 1) - 1) / (half[-1] - half[0])
        shape = np.array([1 - half[0] * scale, scale])
        table[shapes + 8 * width :][:3] = *shape, 1 / math.log2(growth)
        table[shapes + 8 * width + 4 :][:3] = *(shape * growth**0.5), 1 / math.log2(growth)
    with torch.inference_mode(False):
        return torch.from_numpy(table).to(device)


def _bounds(values: Floats, inverse: Floats) -> Floats:
    """The least float32 of every step but the first that is rounded up to it, to nearest."""
    below, step = values[:-1], inverse[:-1]
    # Bits of floats that are not negative have their order; no step has numbers of both signs but
    # that around 0 of the balanced grid, whose bound is the least number above 0.
    low, high = _order(below), _order(values[1:])
    while (high - low > 1).any():
        middle = (low + high) // 2
        up = (_number(middle) - below) * step > np.float32(0.5)
        low, high = np.where(up, low, middle), np.where(up, middle, high)
    return _number(high)


def _order(x: Floats) -> npt.NDArray[np.int64]:
    bits = x.view(np.int32).astype(np.int64)
    return np.where(bits < 0, -(bits & (1 << 31) - 1), bits)


def _number(order: npt.NDArray[np.int64]) -> Floats:
    bits = np.where(order < 0, -order | 1 << 31, order)
    return bits.astype(np.uint32).view(np.float32)


class _Launches:
    """What a plan's kernels take, put together once."""

    def __init__(self, plan: Plan) -> None:
        if not isinstance(plan.codec, Dynamiq):
            raise TypeError(f"the plan's codec is {plan.codec.name}; allowed: dynamiq")
        spec = self.spec = plan.codec
        self.sizes = plan.nelem, plan.chunk_nelem
        self.groups = spec.super_groups(plan.chunk_nelem)
        self.stats = spec.super_groups(plan.nelem)
        self.blocks = max(1, -(-self.groups // BLOCK))
        self.budget = spec.budget
        self.head = plan.header.nbytes // 8
        payload, scales, _ = (s.nbytes // 128 for s in plan.layout.sections)
        # In units of 128 bytes, so that kernels know the alignment.
        self.static = plan.static_offset // 128, plan.static_stride // 128
        self.scales, self.index = payload, payload + scales
        self.how = WIDTHS.index(spec.widths)
        self.work = workspace(spec, plan.chunk_nelem, plan.chunks)

    def split(self, scratch: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The parts of the workspace."""
        ends = np.cumsum(self.work).tolist()
        return tuple(scratch[end - n : end] for end, n in zip(ends, self.work, strict=True))

    def tiles(self, tiling: Launch) -> int:
        """Programs of a chunk."""
        return max(1, -(-self.sizes[1] // (64 * tiling.slots)))


def _launches(plan: Plan) -> _Launches:
    found = plan.__dict__.get("_dynamiq_launches")
    if found is None:
        found = plan.__dict__["_dynamiq_launches"] = _Launches(plan)
    return found


def _grouping(spec: Dynamiq) -> dict[str, int]:
    return {
        "SIZE": spec.super_group,
        "GROUP": spec.group,
        "SCALES": SCALES.index(spec.scales),
        "CENTER": spec.center,
    }


@functools.cache
def _measure_variant(spec: Dynamiq, dtype: DType, tiling: Launch) -> Variant:
    return Variant(
        _measure_kernel,
        options(tiling.warps, tiling.registers),
        SIZE=spec.super_group,
        LOG_COLUMNS=spec.super_group.bit_length() - 4,
        CENTER=spec.center,
        EXP=dtype.exponent,
        ITEM=dtype.itemsize,
        SLOTS=tiling.slots,
    )


@functools.cache
def _width_variants(size: int, how: int) -> tuple[Variant, ...]:
    """The histograms by digit, the ties, the widths."""
    values = {"SIZE": size, "HOW": how}
    variants = []
    at, before = 0, (0, 1)
    for level, bits in enumerate(DIGITS):
        sums = at, 1 << bits
        variants.append(
            Variant(
                _histogram_kernel,
                _BLOCK_OPTIONS,
                **values,
                LEVEL=level,
                AT=sums[0],
                BINS=sums[1],
                SHIFT=sum(DIGITS[level + 1 :]),
                BEFORE_AT=before[0],
                BEFORE_BINS=before[1],
            )
        )
        at, before = at + sums[1], sums
    last = {"LEVELS": len(DIGITS), "AT": before[0], "BINS": before[1]}
    ties = Variant(_ties_kernel, _BLOCK_OPTIONS, **values, **last)
    return (*variants, ties, Variant(_widths_kernel, _BLOCK_OPTIONS, **values))


@functools.cache
def _index_variant(size: int, how: int, sums: bool) -> Variant:
    return Variant(_index_kernel, _BLOCK_OPTIONS, SIZE=size, HOW=how, SUMS=sums)


@functools.cache
def _places_variant(size: int, read: bool) -> Variant:
    return Variant(_places_kernel, _PLACES_OPTIONS, SIZE=size, READ=read)


@functools.cache
def _encode_variant(
    spec: Dynamiq,
    dtype: DType,
    tiling: Launch,
    rounding: int,
    random: int,
    even: bool,
    aligned: bool,
    add: int,
    sums: bool,
) -> Variant:
    grouping = _grouping(spec)
    return Variant(
        _encode_kernel,
        options(tiling.warps, tiling.registers),
        **grouping,
        LOG_COLUMNS=spec.super_group.bit_length() - 4,
        ROUNDING=rounding,
        RANDOM=random,
        EVEN=even,
        EXP=dtype.exponent,
        ITEM=dtype.itemsize,
        ALIGNED=aligned,
        ADD=add,
        TOP=largest_number(dtype),
        SLOTS=tiling.slots,
        STEP=tiling.rows,
        PTX=PTX,
        SUMS=sums,
    )


@functools.cache
def _decode_variant(
    spec: Dynamiq, dtype: DType, tiling: Launch, aligned: bool, add: int, store: bool, sums: bool
) -> Variant:
    return Variant(
        _decode_kernel,
        options(tiling.warps, tiling.registers),
        **_grouping(spec),
        EXP=dtype.exponent,
        ITEM=dtype.itemsize,
        ALIGNED=aligned,
        ADD=add,
        STORE=store,
        TOP=largest_number(dtype),
        SLOTS=tiling.slots,
        PTX=PTX,
        SUMS=sums,
    )


def measure(spec: Dynamiq, dtype: DType, x: torch.Tensor) -> torch.Tensor:
    """Energies of the super-groups of `x`, float32, shape (super-groups,), on its device."""
    energies = torch.empty(spec.super_groups(x.numel()), dtype=torch.float32, device=x.device)
    _measure(spec, dtype, x, energies)
    return energies


def _measure(spec: Dynamiq, dtype: DType, x, energies) -> None:
    if x.numel():
        tiles = -(-x.numel() // (64 * MEASURE.slots))
        _measure_variant(spec, dtype, MEASURE).launch(tiles, (x, energies), x.numel())


def _choose(plan: Plan, energies, state, counts, places) -> None:
    """Leave in `places` where super-groups are that get their widths by `energies`."""
    g = _launches(plan)
    programs = g.blocks * plan.chunks
    *histograms, ties, widths = _width_variants(g.spec.super_group, g.how)
    numbers = *g.sizes, g.blocks, g.budget
    if g.spec.widths != "fixed":
        state.zero_()
        for histogram in histograms:
            histogram.launch(programs, (energies, state), *numbers)
        ties.launch(programs, (energies, state, counts), *numbers)
    widths.launch(programs, (energies, state, counts, places), *numbers, g.groups)
    _places_variant(g.spec.super_group, False).launch(
        programs, (counts, places, state, counts), 0, *numbers, g.groups
    )


def _read(plan: Plan, src, sums, status, state, counts, places, first, end, summed) -> None:
    """Leave in `places` where the super-groups of chunks `first` to `end` of `src` are."""
    g = _launches(plan)
    programs = g.blocks * (end - first)
    numbers = first, *g.sizes, g.blocks, g.budget, g.groups
    _index_variant(g.spec.super_group, g.how, summed).launch(
        programs, (src, sums, status, counts, places), *numbers, *g.static, g.index
    )
    _places_variant(g.spec.super_group, True).launch(
        programs, (counts, places, state, status), *numbers
    )


def encode(plan: Plan, x, out, scratch, stats=None, key: Key | None = None) -> None:
    """Encode the elements of `x` into `out`; see `tightwire.gpu` for the contract."""
    g = _launches(plan)
    shares = shares_of(g.spec, key)
    _, energies, state, counts, places, _, _ = g.split(scratch)
    if stats is None and g.spec.widths != "fixed":
        _measure(g.spec, plan.dtype, x, energies)
    _choose(plan, _checked(g, stats, energies), state, counts, places)
    sources = out, places, state, out, out
    _encode(plan, x, out, key, shares, places, state, sources, 0)


def _checked(g: _Launches, stats, energies):
    if stats is None:
        return energies
    if stats.numel() != g.stats:
        raise ValueError(f"stats have shape {tuple(stats.shape)}; allowed: ({g.stats},)")
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
    key: Key | None = None,
    planned: bool = True,
) -> None:
    """Encode what `src`, a buffer of `plan`, decodes to plus `x` into `out`, in one pass.

    `x` has the plan's dtype or float32. Sums are in float32, rounded to the plan's. Widths are
    those of `src`, or with `stats` those that the stats ask for. See `tightwire.gpu` for the
    contract.
    """
    g = _launches(plan)
    shares = shares_of(g.spec, key)
    sums, energies, state, counts, places, source_state, source_places = g.split(scratch)
    if plan.checksum:
        sums.zero_()
    work = source_state, counts, source_places
    _read(plan, src, sums, status, *work, 0, plan.chunks, plan.checksum)
    if stats is None:
        places, state = source_places, source_state
    else:
        _choose(plan, _checked(g, stats, energies), state, counts, places)
    sources = src, source_places, source_state, sums, status
    _encode(plan, x, out, key, shares, places, state, sources, x.element_size())
    frame_of(plan).check(
        src, sums, status, 0, plan.nelem, whole=True, summed=plan.checksum, planned=planned
    )


def _encode(plan: Plan, x, out, key, shares, places, state, sources, add: int) -> None:
    g = _launches(plan)
    random, on_device, numbers = NO_KEY, None, (0, 0, 0)
    if g.spec.draws:
        random, on_device, numbers = key_arguments(key, out.device)
    rounding, strata, ring_rank = shares
    tiling = DECODE_ADD_ENCODE if add else ENCODE
    tiles = g.tiles(tiling)
    even = plan.chunks == 1 or plan.chunk_nelem % 8 == 0 or rounding == int(_NEAREST.value)
    frame_of(plan).begin(out)
    # fmt: off
    _encode_variant(
        g.spec, plan.dtype, tiling, rounding, random, even, aligned_for(plan, x), add,
        plan.checksum,
    ).launch(
        tiles * plan.chunks,
        (
            x, out, places, state, _tables(g.spec.grid, out.device),
            out if on_device is None else on_device, *sources,
        ),
        *g.sizes, tiles, g.budget, g.groups, g.head, *g.static,
        g.scales, g.index, strata, ring_rank, *numbers,
    )
    # fmt: on


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
    g = _launches(plan)
    stop = plan.nelem if stop is None else stop
    tiling = DECODE
    tiles = g.tiles(tiling)
    summed = check and plan.checksum and (start < stop or not plan.nelem)
    sums, _, _, counts, _, state, places = g.split(scratch)
    if summed:
        sums.zero_()
    if out is None:
        out = src
    first, end, _, _ = touched(plan, start, stop)
    if start < stop:
        _read(plan, src, sums, status, state, counts, places, first, end, summed)
        adding = out.element_size() if add else 0
        even = aligned_for(plan, out, start)
        _decode_variant(g.spec, plan.dtype, tiling, even, adding, store, summed).launch(
            tiles * (end - first),
            (src, out, places, state, _tables(g.spec.grid, src.device), sums, status),
            start,
            stop,
            first,
            *g.sizes,
            tiles,
            g.budget,
            g.groups,
            *g.static,
            g.scales,
        )
    frame_of(plan).check(
        src, sums, status, start, stop, whole=check, summed=summed, planned=planned
    )
