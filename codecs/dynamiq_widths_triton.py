# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment,attr-defined,misc"
"""Widths of dynamiq on a GPU, and what follows from them. specs/dynamiq.md, "Widths".

Where a super-group's codes are in the payload follows from the widths of all of its chunk. Small
kernels over super-groups find that out before elements are coded or decoded, without the host:

1. `_histogram_kernel`, once for each digit: what the steps up cost by the next digit of their
   gains' bits, summed in integers. The bound B is read off these sums digit by digit. Digits are
   short: what `tl.histogram` costs grows with its bins.
2. `_ties_kernel`: B, and of every block of super-groups what the steps that gain just B cost.
3. `_widths_kernel`: a block adds up the ties of the blocks before it and knows its widths; it
   counts each. A decoder's `_index_kernel` counts those in the index instead.
4. `_places_kernel`: a block adds up what the blocks before it, and all, have of each width.

Nothing depends on the order in which programs run. What they leave are the grid's tables, and of a
chunk, as its *work*, WORK_HEAD numbers, int64, and of every super-group its first row and width as
`row << 4 | width`.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
import triton
import triton.language as tl

from .common.base import Plan
from .common.driver_triton import Reads
from .common.fill_triton import zero
from .common.frame_triton import CHUNK, CHUNK_PAYLOAD, place_of, report, weigh_bytes
from .common.launch_triton import Variant, kernel, options, program
from .common.minifloat_triton import as_bits
from .common.plans_triton import Launches
from .common.tiles_triton import work_at
from .dynamiq import (
    ANY_STEPS,
    BLOCK,
    BUDGET_STEPS,
    DIGITS,
    FLOOR,
    MAX_WIDTH,
    MIN_WIDTH,
    POW2_STEPS,
    STATE,
    TABLES,
    WIDTHS,
    WORK_HEAD,
    workspace,
)

#: Numbers of a chunk's work: rows in use, the most that there may be, where the index starts in
#: units of 128 bytes, and the strata and the rank in the ring of who encodes.
USED, UNITS, INDEX_AT, STRATA, RING_RANK = (tl.constexpr(i) for i in range(5))
PLACES = tl.constexpr(WORK_HEAD)
LEAST_WIDTH, MOST_WIDTH = tl.constexpr(MIN_WIDTH), tl.constexpr(MAX_WIDTH)

_LARGEST = tl.constexpr(float(np.finfo(np.float32).max))
_FLOOR = tl.constexpr(FLOOR)
_BUDGET_STEPS = tl.constexpr(BUDGET_STEPS)
_ANY, _POW2, _FIXED = (tl.constexpr(i) for i in range(len(WIDTHS)))
_ANY_FACTORS = tl.constexpr(tuple(float(np.float32(gain)) for _, _, gain in ANY_STEPS))
_POW2_FACTORS = tl.constexpr(tuple(float(np.float32(gain)) for _, _, gain in POW2_STEPS))

_TABLES = tl.constexpr(TABLES)
_BLOCK, _STATE = tl.constexpr(BLOCK), tl.constexpr(STATE)
#: Where the state of a chunk has, behind the sums by digit, of every number of digits the bound so
#: far and what is left.
_BOUND = tl.constexpr(sum(1 << bits for bits in DIGITS))
#: Numbers of a block: the cost of its ties, then how many super-groups have widths 2 to 8.
_COUNTS = tl.constexpr(8)
_BLOCK_OPTIONS = options(num_warps=16)
_PLACES_OPTIONS = options(num_warps=8)


@triton.jit
def _block_at(member, first_number, chunks, nelem, chunk_nelem, blocks, budget, SIZE: tl.constexpr):
    """Of this program's block of super-groups: (number of its chunk among those of all buffers,
    the chunk, the block, the chunk's first element, its super-groups and units, the block's
    super-groups).
    """
    pid = program(member).to(tl.int64)
    number, block = first_number + pid // blocks, pid % blocks
    chunk = number % chunks
    first = chunk * chunk_nelem
    n = tl.maximum(tl.minimum(chunk_nelem, nelem - first), 0)
    groups = (n + SIZE - 1) // SIZE
    units = tl.minimum(groups * budget // (_BUDGET_STEPS * SIZE), MOST_WIDTH * groups)
    return number, chunk, block, first, groups, units, block * _BLOCK + tl.arange(0, _BLOCK)


@triton.jit
def _work(work_ptr, number, chunk_nelem, SIZE: tl.constexpr):
    """The work of chunk `number`."""
    return work_ptr + work_at(number, chunk_nelem, _TABLES, PLACES, SIZE)


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
    return as_bits(f * (_POW2_FACTORS[k] if HOW == _POW2 else _ANY_FACTORS[k]))


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
    chunks: tl.int64,
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
    member=None,
):
    """Sums of what the steps of a block cost, by digit LEVEL of their gains.

    Of steps whose digits before are those of the bound. No sum counts those of digit 0. The BINS
    sums are at AT of the state, those of the digit before at BEFORE_AT.
    """
    where = _block_at(member, 0, chunks, nelem, chunk_nelem, blocks, budget, SIZE)
    _, chunk, block, first, groups, units, j = where
    state = state_ptr.to(tl.pointer_type(tl.int64)) + chunk * _STATE
    f = _energies(energies_ptr, j, groups, first, nelem, SIZE)
    left = units - LEAST_WIDTH * groups
    bound, left = _bound(state, left, LEVEL, BEFORE_AT, BEFORE_BINS, SHIFT + BINS.bit_length() - 1)
    if LEVEL > 0:
        if block == 0:
            _keep_bound(state, bound, left, LEVEL)
    costs = tl.zeros([BINS], tl.int32)
    one = as_bits(f) * 0
    for k in tl.static_range(2 if HOW == _POW2 else 6):
        gain = _gain(f, k, HOW)
        digit = (gain >> SHIFT) & (BINS - 1)
        if LEVEL > 0:
            digit = tl.where((gain ^ bound.to(tl.int32)) < (BINS << SHIFT), digit, 0)
        if LEVEL > 0 and HOW == _ANY:
            # Gains of a super-group are a factor of 4 and more apart, and those that share the
            # first digit, of 7 bits with the sign, less: of one step at most is the digit not 0.
            one |= digit
        else:
            costs += tl.histogram(digit, BINS) * ((2 + 2 * k) if HOW == _POW2 else 1)
    if LEVEL > 0 and HOW == _ANY:
        costs += tl.histogram(one, BINS)
    i = tl.arange(0, BINS)
    use = (i > 0) & (costs > 0)
    tl.atomic_add(state + AT + i, costs.to(tl.int64), mask=use, sem="relaxed")


@triton.jit
def _tie_costs(f, bound, HOW: tl.constexpr):
    """What the steps cost that gain just the bound: at most one of a super-group."""
    costs = as_bits(f) * 0
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
    chunks: tl.int64,
    blocks: tl.int64,
    budget: tl.int64,
    SIZE: tl.constexpr,
    HOW: tl.constexpr,
    LEVELS: tl.constexpr,
    AT: tl.constexpr,
    BINS: tl.constexpr,
    member=None,
):
    """What a block's ties cost; of a chunk's first block, the bound and what ties may cost.

    The sums by the last of LEVELS digits are BINS at AT of the state.
    """
    where = _block_at(member, 0, chunks, nelem, chunk_nelem, blocks, budget, SIZE)
    _, chunk, block, first, groups, units, j = where
    state = state_ptr.to(tl.pointer_type(tl.int64)) + chunk * _STATE
    bound, left = _bound(state, units - LEAST_WIDTH * groups, LEVELS, AT, BINS, 0)
    f = _energies(energies_ptr, j, groups, first, nelem, SIZE)
    ties = tl.sum(_tie_costs(f, bound, HOW), 0)
    tl.store(counts_ptr + (chunk * blocks + block) * _COUNTS, ties.to(tl.int64))
    if block == 0:
        _keep_bound(state, bound, left, 0)


@triton.jit
def _fields(widths):
    """A one in a field of 16 bits, int64: of widths 2 to 5, and of 6 to 8. Sums are counts."""
    one = (widths * 0 + 1).to(tl.int64)
    low = (widths >= LEAST_WIDTH) & (widths < 6)
    low = tl.where(low, one << (16 * tl.maximum(widths - LEAST_WIDTH, 0)).to(tl.int64), 0)
    high = tl.where(widths >= 6, one << (16 * tl.maximum(widths - 6, 0)).to(tl.int64), 0)
    return low, high


@triton.jit
def _field(low, high, w: tl.constexpr):
    """Of sums of `_fields` that of width `w`."""
    if w < 6:
        return (low >> (16 * (w - LEAST_WIDTH))) & 0xFFFF
    else:
        return (high >> (16 * (w - 6))) & 0xFFFF


@triton.jit
def _store_widths(widths, j, groups, places, counts):
    """Leave widths of a block, int32, in `places`, and how often it has each in `counts`."""
    tl.store(places + j, widths.to(tl.int64), mask=j < groups)
    low, high = _fields(tl.where(j < groups, widths, 0))
    low = tl.sum(low, 0)
    high = tl.sum(high, 0)
    for w in tl.static_range(LEAST_WIDTH, MOST_WIDTH + 1):
        tl.store(counts + w - 1, _field(low, high, w))


@kernel
def _widths_kernel(
    energies_ptr,
    state_ptr,
    counts_ptr,
    work_ptr,
    nelem: tl.int64,
    chunk_nelem: tl.int64,
    chunks: tl.int64,
    blocks: tl.int64,
    budget: tl.int64,
    SIZE: tl.constexpr,
    HOW: tl.constexpr,
    member=None,
):
    """Widths of a block."""
    where = _block_at(member, 0, chunks, nelem, chunk_nelem, blocks, budget, SIZE)
    _, chunk, block, first, groups, units, j = where
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
        widths = tl.where(tl.cumsum(ties, 0) <= left, ties, 0) + LEAST_WIDTH
        for k in tl.static_range(2 if HOW == _POW2 else 6):
            cost = (2 + 2 * k) if HOW == _POW2 else 1
            widths += tl.where(_gain(f, k, HOW) > bound, cost, 0)
    places = _work(work_ptr, chunk, chunk_nelem, SIZE) + PLACES
    _store_widths(widths, j, groups, places, counts + block * _COUNTS)


@triton.jit
def _source_of(src_ptr, sums_ptr, status_ptr, buffer, MANY: tl.constexpr):
    """(bytes, checksum terms, status word) of a buffer; see `Reads`."""
    if MANY:
        return place_of(src_ptr.to(tl.pointer_type(tl.int64)), buffer)
    else:
        return src_ptr, sums_ptr, status_ptr


@kernel
def _index_kernel(
    src_ptr,
    sums_ptr,
    status_ptr,
    counts_ptr,
    work_ptr,
    nelem: tl.int64,
    chunk_nelem: tl.int64,
    chunks: tl.int64,
    blocks: tl.int64,
    budget: tl.int64,
    first_number: tl.int64,
    static_at: tl.int64,
    static_stride: tl.int64,
    index_at: tl.int64,
    SIZE: tl.constexpr,
    HOW: tl.constexpr,
    SUMS: tl.constexpr,
    MANY: tl.constexpr,
    member=None,
):
    """Widths of a block of a chunk's index, and whether an encoder chooses such ones.

    MANY: at `src_ptr` is the table of buffers.
    """
    where = _block_at(member, first_number, chunks, nelem, chunk_nelem, blocks, budget, SIZE)
    number, chunk, block, _, groups, units, j = where
    # fmt: off
    src_ptr, sums_ptr, status_ptr = _source_of(
        src_ptr, sums_ptr, status_ptr, number // chunks - 1, MANY
    )
    # fmt: on
    static_ptr = src_ptr + (static_at + chunk * static_stride) * 128
    at = index_at * 128 + j // 2
    pair = tl.load(static_ptr + at, mask=j // 2 < (groups + 1) // 2, other=0).to(tl.int32)
    widths = tl.where(j % 2 == 0, pair & 15, pair >> 4)
    if HOW == _FIXED:
        good = widths == units // tl.maximum(groups, 1)
    elif HOW == _POW2:
        good = (widths == 2) | (widths == 4) | (widths == 8)
    else:
        good = (widths >= LEAST_WIDTH) & (widths <= MOST_WIDTH)
    good = tl.where(j < groups, good, widths == 0)
    if tl.min(good.to(tl.int32), 0) == 0:
        report(status_ptr, CHUNK + (chunk << 8) + CHUNK_PAYLOAD)
    if SUMS:
        terms = tl.sum(tl.where(j % 2 == 0, weigh_bytes(pair, at), 0), 0)
        tl.atomic_add(sums_ptr + chunk, terms.to(tl.int64, bitcast=True), sem="relaxed")
    widths = tl.minimum(tl.maximum(widths, LEAST_WIDTH), MOST_WIDTH)
    places = _work(work_ptr, number, chunk_nelem, SIZE) + PLACES
    _store_widths(widths, j, groups, places, counts_ptr + (number * blocks + block) * _COUNTS)


@kernel
def _places_kernel(
    src_ptr,
    status_ptr,
    counts_ptr,
    tables_ptr,
    work_ptr,
    nelem: tl.int64,
    chunk_nelem: tl.int64,
    chunks: tl.int64,
    blocks: tl.int64,
    budget: tl.int64,
    first_number: tl.int64,
    index_at: tl.int64,
    strata: tl.int64,
    ring_rank: tl.int64,
    SIZE: tl.constexpr,
    READ: tl.constexpr,
    MANY: tl.constexpr,
    member=None,
):
    """Rows of a block's super-groups, by the widths of all; with a chunk's first block the chunk's
    numbers, and once the tables.

    READ: the widths come from an index and may be too many.
    """
    where = _block_at(member, first_number, chunks, nelem, chunk_nelem, blocks, budget, SIZE)
    number, chunk, block, _, groups, units, j = where
    counts = counts_ptr + number * blocks * _COUNTS
    slot = tl.arange(0, _COUNTS)[None, :]
    i = tl.arange(0, 128)[:, None]
    before = tl.zeros([128, _COUNTS], tl.int64)
    total = tl.zeros([128, _COUNTS], tl.int64)
    at = block * 0
    while at < blocks:
        found = tl.load(counts + (at + i) * _COUNTS + slot, mask=at + i < blocks, other=0)
        total += found
        before += tl.where(at + i < block, found, 0)
        at += 128
    before = tl.sum(before, 0)
    total = tl.sum(total, 0)
    slot = tl.arange(0, _COUNTS)
    work = _work(work_ptr, number, chunk_nelem, SIZE)
    places = work + PLACES
    widths = tl.load(places + j, mask=j < groups, other=0)
    rows = widths * 0
    ones_low, ones_high = _fields(widths.to(tl.int32))
    low = tl.cumsum(ones_low, 0) - ones_low
    high = tl.cumsum(ones_high, 0) - ones_high
    base = block * 0
    for w in tl.static_range(LEAST_WIDTH, MOST_WIDTH + 1):
        start = base + w * tl.sum(tl.where(slot == w - 1, before, 0), 0)
        rows = tl.where(widths == w, start + w * _field(low, high, w), rows)
        base += w * tl.sum(tl.where(slot == w - 1, total, 0), 0)
    tl.store(places + j, (rows << 4) | widths, mask=j < groups)
    if program(member) == 0:
        word = tl.arange(0, 2048)
        here = word < _TABLES
        pair = tl.load(tables_ptr.to(tl.pointer_type(tl.int64)) + word, mask=here, other=0)
        tl.store(work_ptr + word, pair, mask=here)
    if block == 0:
        tl.store(work + USED, tl.minimum(base, units))
        tl.store(work + UNITS, units)
        tl.store(work + INDEX_AT, index_at)
        tl.store(work + STRATA, strata)
        tl.store(work + RING_RANK, ring_rank)
        if READ:
            source = _source_of(src_ptr, status_ptr, status_ptr, number // chunks - 1, MANY)
            if base > units:
                report(source[2], CHUNK + (chunk << 8) + CHUNK_PAYLOAD)


class Widths(Launches):
    """What a plan's kernels take."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        spec = self.spec
        self.stats = spec.super_groups(plan.nelem)
        self.blocks = max(1, -(-spec.super_groups(plan.chunk_nelem) // BLOCK))
        self.chunks = plan.chunks
        self.numbers = plan.nelem, plan.chunk_nelem, plan.chunks, self.blocks, spec.budget
        payload, scales, _ = (s.nbytes // 128 for s in plan.layout.sections)
        self.index_at = payload + scales
        self.how = WIDTHS.index(spec.widths)
        self.chunk_nelem = plan.chunk_nelem
        self.parts = workspace(spec, plan.chunk_nelem, plan.chunks)

    def parts_of(
        self, scratch: torch.Tensor | None, buffers: int, device: torch.device
    ) -> tuple[torch.Tensor, ...]:
        """The parts of the workspace, see `workspace`; or of a new one where several are read."""
        parts = self.parts
        if scratch is None:
            parts = workspace(self.spec, self.chunk_nelem, self.chunks, buffers)
            scratch = torch.empty(sum(parts), dtype=torch.uint8, device=device)
        split: tuple[torch.Tensor, ...] = scratch[: sum(parts)].split(parts)
        return split

    def choose(self, energies, state, counts, work, tables, shares: tuple[int, int]) -> None:
        """Leave in `work` what follows from the widths that `energies` ask for; `shares` are the
        strata and the rank in the ring.
        """
        programs = self.blocks * self.chunks
        *histograms, ties, widths = _width_variants(self.spec.super_group, self.how)
        if self.spec.widths != "fixed":
            zero(state)
            for histogram in histograms:
                histogram.launch(programs, (energies, state), *self.numbers)
            ties.launch(programs, (energies, state, counts), *self.numbers)
        widths.launch(programs, (energies, state, counts, work), *self.numbers)
        self._place((work, work, counts, tables, work), programs, 0, shares, (False, False))

    def read(self, reads: Reads, first, counts, work, tables, shares: tuple[int, int]) -> None:
        """Leave in `work`, from chunk number `first` on, what follows from the widths in the
        indices of `reads`.
        """
        size, many, first = self.spec.super_group, reads.number > 0, first + reads.first
        programs = self.blocks * (reads.end - reads.first) * max(1, reads.number)
        _index_variant(size, self.how, reads.summed, many).launch(
            programs,
            (reads.data, reads.sums, reads.status, counts, work),
            *self.numbers,
            first,
            *self.static,
            self.index_at,
        )
        tensors = reads.data, reads.status, counts, tables, work
        self._place(tensors, programs, first, shares, (True, many))

    def _place(self, tensors, programs: int, first: int, shares, how: tuple[bool, bool]) -> None:
        numbers = *self.numbers, first, self.index_at, *shares
        _places_variant(self.spec.super_group, *how).launch(programs, tensors, *numbers)


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
def _index_variant(size: int, how: int, sums: bool, many: bool) -> Variant:
    return Variant(_index_kernel, _BLOCK_OPTIONS, SIZE=size, HOW=how, SUMS=sums, MANY=many)


@functools.cache
def _places_variant(size: int, read: bool, many: bool) -> Variant:
    return Variant(_places_kernel, _PLACES_OPTIONS, SIZE=size, READ=read, MANY=many)
