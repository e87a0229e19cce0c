# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment,misc"
"""lhc on a GPU: peeling in bitmaps, sums of estimates without atomics. specs/lhc.md.

Which elements meet in a cell follows from the shape alone, so a table lists for each block of the
sketch the blocks of elements in it, in the order in which the page adds them up: cells gather. A
word holds the bits of 32 elements, and a block of elements reaches a block of cells by rotating its
256 bits, the bytes of one sector. A round is two launches over bitmaps:

1. `_alone_kernel`: of each block of cells, which have just one element left: two bits that
   saturate.
2. `_peel_kernel`: of each block of elements, which have such a cell, and the first of their three.

Rounds beyond the last launch, and all rounds of small chunks, are made by `_finish_kernel`, one
program for each chunk. A round whose predecessor peeled nothing returns at once. So nothing waits
for the host, nothing is atomic but flags, and the order of programs does not matter.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
import triton
import triton.language as tl

from ..formats.dtypes import DType
from .common.base import Key, Plan
from .common.frame_triton import (
    CHUNK,
    CHUNK_PAYLOAD,
    frame_of,
    report,
    store_element,
    touched,
    weigh,
)
from .common.launch_triton import PTX, Variant, kernel, options
from .common.minifloat import INFINITY, NAN
from .common.minifloat_triton import aligned_for, elements_at, narrow, widen
from .lhc import (
    BLOCK,
    FINISHED,
    HASHES,
    LANES,
    LEFT,
    ROUNDS,
    STATE,
    Lhc,
    mapping_of,
    workspace,
)

#: Bits of a bitmap's word, words of a block.
_WORD = tl.constexpr(32)
_BLOCK_WORDS = tl.constexpr(BLOCK // 32)
_BLOCK, _HASHES = tl.constexpr(BLOCK), tl.constexpr(HASHES)
_STATE, _LEFT, _FINISHED = tl.constexpr(STATE), tl.constexpr(LEFT), tl.constexpr(FINISHED)
_MAGNITUDE = tl.constexpr((1 << 31) - 1)
_INFINITY, _NAN = tl.constexpr(INFINITY), tl.constexpr(NAN)
#: A program's share of words of a bitmap, in kernels that look at elements or cells.
_WORDS = tl.constexpr(128)
#: A program's share of the words of a static part when they are summed.
_SUMMED = tl.constexpr(4096)
#: A program's share of the words of a bitmap when they are counted.
_COUNTED = tl.constexpr(2048)
#: Where `_index_kernel` takes the index from.
_ELEMENTS, _STATS, _BUFFER = (tl.constexpr(i) for i in range(3))

#: Rows that a program takes in a round, and in `_finish_kernel` at once.
ROUND_BLOCKS = 64
FINISH_BLOCKS = 128
#: Chunks of so many blocks at most are peeled by `_finish_kernel` alone.
SMALL_BLOCKS = 1024

_OPTIONS = options(num_warps=4)
_WIDE_OPTIONS = options(num_warps=8)

# Of an element two bits say what became of it, in planes `a` and `b`: own cell by hash 0 (both), 1
# (a), 2 (b), or none. It is `left` until then; those that stay left are estimated.
# The table has for each block of elements and hash `block of cells << 9 | offset << 1 | sign`, then
# where the list of each block of cells starts and the last ends, then those lists:
# `block of elements << 11 | hash << 9 | offset << 1 | sign`.


@triton.jit
def _chunk_at(chunk, nelem, chunk_nelem):
    """First element of a chunk, and how many it has."""
    first = chunk * chunk_nelem
    return first, tl.maximum(tl.minimum(chunk_nelem, nelem - first), 0)


@triton.jit
def _planes(work_ptr, chunk, chunks, blocks, sketch_blocks):
    """Bitmaps of a chunk: left, a, b, and that of its cells."""
    words = work_ptr.to(tl.pointer_type(tl.uint32))
    left = words + chunk * blocks * _BLOCK_WORDS
    plane = chunks * blocks * _BLOCK_WORDS
    cells = words + 3 * plane + chunk * sketch_blocks * _BLOCK_WORDS
    return left, left + plane, left + 2 * plane, cells


@triton.jit
def _state_at(state_ptr, chunk):
    return state_ptr.to(tl.pointer_type(tl.int64)) + chunk * _STATE


@triton.jit
def _rotated(low, high, by):
    """Bits behind bit `by` % 32 of words and those that follow them; shapes [n, 32] and [n]."""
    shift = (by & 31).to(tl.uint32)[:, None]
    return (low >> shift) | ((high << 1) << (31 - shift))


@triton.jit
def _at(block, by):
    """Where words of blocks are whose bit 0 is bit `by` of the block, and those behind them."""
    word = tl.arange(0, _BLOCK_WORDS)[None, :] + (by >> 5)[:, None]
    base = block[:, None] * _BLOCK_WORDS
    return base + (word & (_BLOCK_WORDS - 1)), base + ((word + 1) & (_BLOCK_WORDS - 1))


@triton.jit
def _rotated_blocks(bitmap, block, by, use):
    """Words of blocks of a bitmap: bit i is bit (i + `by`) % 256 of the block; 0 if not `use`."""
    at, behind = _at(block, by)
    low = tl.load(bitmap + at, mask=use[:, None], other=0)
    high = tl.load(bitmap + behind, mask=use[:, None], other=0)
    return _rotated(low, high, by)


@triton.jit
def _list_at(table, block, blocks, sketch_blocks):
    """(pointer to the lists, first and last + 1 of the entries of blocks of cells)."""
    starts = table + _HASHES * blocks
    here = block < sketch_blocks
    first = tl.load(starts + block, mask=here, other=0)
    end = tl.load(starts + block + 1, mask=here, other=0)
    return starts + sketch_blocks + 1, first, end


@triton.jit
def _find_alone(table, left, cells, block, blocks, sketch_blocks, BLOCKS: tl.constexpr):
    """Set in `cells` which of the cells of blocks `block` have one element that is left."""
    lists, at, end = _list_at(table, block, blocks, sketch_blocks)
    longest = tl.max(end - at, 0)
    once = tl.zeros([BLOCKS, _BLOCK_WORDS], tl.uint32)
    twice = tl.zeros([BLOCKS, _BLOCK_WORDS], tl.uint32)
    k = longest * 0
    while k < longest:
        use = at + k < end
        entry = tl.load(lists + at + k, mask=use, other=0)
        bits = _rotated_blocks(left, entry >> 11, -(entry >> 1) & (_BLOCK - 1), use)
        twice |= once & bits
        once |= bits
        k += 1
    where = block[:, None] * _BLOCK_WORDS + tl.arange(0, _BLOCK_WORDS)[None, :]
    tl.store(cells + where, once ^ twice, mask=(block < sketch_blocks)[:, None])


@triton.jit
def _peel(table, left, a, b, cells, block, blocks):
    """Peel of blocks `block` who has a cell alone; 1 if some has."""
    here = block < blocks
    where = block[:, None] * _BLOCK_WORDS + tl.arange(0, _BLOCK_WORDS)[None, :]
    there = here[:, None]
    stay = tl.load(left + where, mask=there, other=0)
    first = tl.load(table + _HASHES * block, mask=here, other=0)
    second = tl.load(table + _HASHES * block + 1, mask=here, other=0)
    third = tl.load(table + _HASHES * block + 2, mask=here, other=0)
    by_0 = stay & _rotated_blocks(cells, first >> 9, (first >> 1) & (_BLOCK - 1), here)
    stay ^= by_0
    by_1 = stay & _rotated_blocks(cells, second >> 9, (second >> 1) & (_BLOCK - 1), here)
    stay ^= by_1
    by_2 = stay & _rotated_blocks(cells, third >> 9, (third >> 1) & (_BLOCK - 1), here)
    stay ^= by_2
    in_a = by_0 | by_1
    in_b = by_0 | by_2
    gone = in_a | in_b
    tl.store(left + where, stay, mask=there & (gone != 0))
    old = tl.load(a + where, mask=in_a != 0, other=0)
    tl.store(a + where, old | in_a, mask=in_a != 0)
    old = tl.load(b + where, mask=in_b != 0, other=0)
    tl.store(b + where, old | in_b, mask=in_b != 0)
    return tl.max(tl.max((gone != 0).to(tl.int32), 1), 0)


@triton.jit
def _going(state, round_index):
    """Whether the round before round `round_index` peeled any; True for the first."""
    before = tl.load(state + tl.maximum(round_index - 1, 0))
    return (round_index == 0) | (before != 0)


@kernel
def _alone_kernel(
    table_ptr,
    work_ptr,
    state_ptr,
    first_chunk: tl.int64,
    chunks: tl.int64,
    blocks: tl.int64,
    sketch_blocks: tl.int64,
    tiles: tl.int64,
    round_index: tl.int32,
    BLOCKS: tl.constexpr,
):
    """The first half of round `round_index`, for some blocks of cells of a chunk."""
    chunk = first_chunk + tl.program_id(0).to(tl.int64) // tiles
    block = tl.program_id(0).to(tl.int64) % tiles * BLOCKS + tl.arange(0, BLOCKS)
    if _going(_state_at(state_ptr, chunk), round_index):
        left, _, _, cells = _planes(work_ptr, chunk, chunks, blocks, sketch_blocks)
        table = table_ptr.to(tl.pointer_type(tl.int64))
        _find_alone(table, left, cells, block, blocks, sketch_blocks, BLOCKS)


@kernel
def _peel_kernel(
    table_ptr,
    work_ptr,
    state_ptr,
    first_chunk: tl.int64,
    chunks: tl.int64,
    blocks: tl.int64,
    sketch_blocks: tl.int64,
    tiles: tl.int64,
    round_index: tl.int32,
    BLOCKS: tl.constexpr,
):
    """The second half of round `round_index`, for some blocks of elements of a chunk."""
    chunk = first_chunk + tl.program_id(0).to(tl.int64) // tiles
    block = tl.program_id(0).to(tl.int64) % tiles * BLOCKS + tl.arange(0, BLOCKS)
    state = _state_at(state_ptr, chunk)
    if _going(state, round_index):
        left, a, b, cells = _planes(work_ptr, chunk, chunks, blocks, sketch_blocks)
        table = table_ptr.to(tl.pointer_type(tl.int64))
        if _peel(table, left, a, b, cells, block, blocks) != 0:
            tl.store(state + round_index, 1)


@kernel
def _finish_kernel(
    table_ptr,
    work_ptr,
    state_ptr,
    first_chunk: tl.int64,
    chunks: tl.int64,
    blocks: tl.int64,
    sketch_blocks: tl.int64,
    round_index: tl.int32,
    BLOCKS: tl.constexpr,
):
    """All rounds of a chunk from round `round_index` on."""
    chunk = first_chunk + tl.program_id(0).to(tl.int64)
    left, a, b, cells = _planes(work_ptr, chunk, chunks, blocks, sketch_blocks)
    table = table_ptr.to(tl.pointer_type(tl.int64))
    going = _going(_state_at(state_ptr, chunk), round_index).to(tl.int32)
    rounds = going * 0
    while going != 0:
        at = blocks * 0
        while at < sketch_blocks:
            _find_alone(
                table, left, cells, at + tl.arange(0, BLOCKS), blocks, sketch_blocks, BLOCKS
            )
            at += BLOCKS
        tl.debug_barrier()
        going = going * 0
        at = blocks * 0
        while at < blocks:
            going |= _peel(table, left, a, b, cells, at + tl.arange(0, BLOCKS), blocks)
            at += BLOCKS
        rounds += going
        tl.debug_barrier()
    tl.store(_state_at(state_ptr, chunk) + _FINISHED, rounds.to(tl.int64))


@triton.jit
def _bits_set(word):
    """How many bits of each word, uint32, are set."""
    word -= (word >> 1) & 0x55555555
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    return (word * 0x01010101) >> 24


@kernel
def _count_kernel(
    work_ptr,
    state_ptr,
    counts_ptr,
    chunks: tl.int64,
    blocks: tl.int64,
    sketch_blocks: tl.int64,
    tiles: tl.int64,
):
    """Add up what became of some words of a chunk's elements: see `peeling`."""
    chunk = tl.program_id(0).to(tl.int64) // tiles
    tile = tl.program_id(0).to(tl.int64) % tiles
    word = tile * _COUNTED + tl.arange(0, _COUNTED)
    inside = word < blocks * _BLOCK_WORDS
    left, a, b, _ = _planes(work_ptr, chunk, chunks, blocks, sketch_blocks)
    stay = tl.load(left + word, mask=inside, other=0)
    gone = tl.load(a + word, mask=inside, other=0) | tl.load(b + word, mask=inside, other=0)
    peeled = tl.sum(_bits_set(gone).to(tl.int64), 0)
    tl.atomic_add(counts_ptr, peeled + tl.sum(_bits_set(stay).to(tl.int64), 0), sem="relaxed")
    tl.atomic_add(counts_ptr + 1, peeled, sem="relaxed")
    if tile == 0:
        entry = tl.arange(0, _STATE)
        is_round = (entry < _LEFT) | (entry == _FINISHED)
        rounds = tl.load(_state_at(state_ptr, chunk) + entry, mask=is_round, other=0)
        tl.atomic_max(counts_ptr + 2, tl.sum(rounds, 0), sem="relaxed")


@triton.jit
def _words_of(tile, n):
    """Numbers of a tile's words, and which of their bits are of the `n` elements of the chunk."""
    word = tile * _WORDS + tl.arange(0, _WORDS)
    valid = tl.minimum(tl.maximum(n - word * _WORD, 0), _WORD)
    mask = (((valid * 0 + 1) << valid) - 1).to(tl.uint32)
    return word, mask


@triton.jit
def _elements(word):
    """Numbers of the elements of words, shape [words, 32]."""
    return word[:, None] * _WORD + tl.arange(0, _WORD)[None, :]


@triton.jit
def _spread(bits):
    """Whether the bits of words are set, shape [words, 32]."""
    return ((bits[:, None] >> tl.arange(0, _WORD).to(tl.uint32)[None, :]) & 1) != 0


@triton.jit
def _not_zero(v, ITEM: tl.constexpr):
    """Whether element bits are neither 0 nor -0."""
    return (v.to(tl.uint32) << (33 - 8 * ITEM)) != 0


@kernel
def _index_kernel(
    x_ptr,
    given_ptr,
    index_ptr,
    work_ptr,
    first_chunk: tl.int64,
    chunks: tl.int64,
    nelem: tl.int64,
    chunk_nelem: tl.int64,
    blocks: tl.int64,
    tiles: tl.int64,
    static_at: tl.int64,
    static_stride: tl.int64,
    index_at: tl.int64,
    FROM: tl.constexpr,
    WORK: tl.constexpr,
    ITEM: tl.constexpr,
):
    """The index of some words of a chunk, from elements or a tensor's index, or as it is there.

    With WORK all that is in the index is left, and nothing is peeled.
    """
    chunk = first_chunk + tl.program_id(0).to(tl.int64) // tiles
    first, n = _chunk_at(chunk, nelem, chunk_nelem)
    word, mask = _words_of(tl.program_id(0).to(tl.int64) % tiles, n)
    inside = word < blocks * _BLOCK_WORDS
    static_ptr = index_ptr + (static_at + chunk * static_stride + index_at) * 128
    index = static_ptr.to(tl.pointer_type(tl.uint32)) + word
    if FROM == _BUFFER:
        bits = tl.load(index, mask=inside, other=0) & mask
    else:
        if FROM == _ELEMENTS:
            i = _elements(word)
            v = tl.load(elements_at(x_ptr, ITEM) + first + i, mask=i < n, other=0)
            placed = _not_zero(v, ITEM).to(tl.int32) << tl.arange(0, _WORD)[None, :]
            bits = tl.sum(placed, 1).to(tl.uint32, bitcast=True)
        else:
            bit = first + word * _WORD
            byte = bit >> 3
            nbytes = (nelem + 7) >> 3
            found = tl.zeros([_WORDS], tl.uint64)
            for k in tl.static_range(5):
                part = tl.load(given_ptr + byte + k, mask=byte + k < nbytes, other=0)
                found |= part.to(tl.uint64) << (8 * k)
            bits = (found >> (bit & 7).to(tl.uint64)).to(tl.uint32) & mask
        tl.store(index, bits, mask=inside)
    if WORK:
        left, a, b, _ = _planes(work_ptr, chunk, chunks, blocks, blocks)
        tl.store(left + word, bits, mask=inside)
        tl.store(a + word, bits * 0, mask=inside)
        tl.store(b + word, bits * 0, mask=inside)


@triton.jit
def _places(table, word, a, b, inside):
    """What the table has of the own cells of elements; those of hash 0 for the others."""
    at = table + word // _BLOCK_WORDS * _HASHES
    first = tl.load(at, mask=inside, other=0)[:, None]
    second = tl.load(at + 1, mask=inside, other=0)[:, None]
    third = tl.load(at + 2, mask=inside, other=0)[:, None]
    in_a = _spread(a & (a ^ b))
    in_b = _spread(b & (a ^ b))
    return tl.where(in_a, second, tl.where(in_b, third, first)), first, second, third


@triton.jit
def _cell(place, i):
    """The numbers of the cells of elements `i` in places of the table."""
    return (place >> 9) * _BLOCK + ((i + (place >> 1)) & (_BLOCK - 1))


@kernel
def _scatter_kernel(
    x_ptr,
    out_ptr,
    table_ptr,
    work_ptr,
    state_ptr,
    chunks: tl.int64,
    nelem: tl.int64,
    chunk_nelem: tl.int64,
    blocks: tl.int64,
    sketch_blocks: tl.int64,
    tiles: tl.int64,
    head: tl.int32,
    static_at: tl.int64,
    static_stride: tl.int64,
    EXP: tl.constexpr,
    ITEM: tl.constexpr,
    CELL_EXP: tl.constexpr,
    CELL_ITEM: tl.constexpr,
    ALIGNED: tl.constexpr,
    PTX: tl.constexpr,
):
    """Store elements in their own cells, a tile of them. All cells are zero.

    Says in the state if a chunk has elements to estimate, and in its record if one is not zero and
    not in the index.
    """
    chunk = tl.program_id(0).to(tl.int64) // tiles
    tile = tl.program_id(0).to(tl.int64) % tiles
    first, n = _chunk_at(chunk, nelem, chunk_nelem)
    if ALIGNED:
        # Made here: a hint on what a function gives is lost.
        first = tl.multiple_of(chunk * chunk_nelem, 16)
    word, _ = _words_of(tile, n)
    inside = word < blocks * _BLOCK_WORDS
    left, a, b, _ = _planes(work_ptr, chunk, chunks, blocks, sketch_blocks)
    stay = tl.load(left + word, mask=inside, other=0)
    in_a = tl.load(a + word, mask=inside, other=0)
    in_b = tl.load(b + word, mask=inside, other=0)
    i = _elements(word)
    x = elements_at(x_ptr, ITEM) + first
    if (tile + 1) * (_WORDS * _WORD) <= n:
        v = tl.load(x + i)
    else:
        v = tl.load(x + i, mask=i < n, other=0)
    peeled = _spread(in_a | in_b)
    table = table_ptr.to(tl.pointer_type(tl.int64))
    place, _, _, _ = _places(table, word, in_a, in_b, inside)
    if EXP == CELL_EXP and ITEM == CELL_ITEM:
        cell = v.to(tl.uint32)
    else:
        value = widen(v, EXP, ITEM).to(tl.float32, bitcast=True)
        cell = narrow(value, CELL_EXP, CELL_ITEM, PTX)
    static_ptr = out_ptr + (static_at + chunk * static_stride) * 128
    store_element(static_ptr, _cell(place, i), cell, peeled, CELL_EXP, CELL_ITEM, 0)
    if tl.max((stay != 0).to(tl.int32), 0) != 0:
        tl.store(_state_at(state_ptr, chunk) + _LEFT, 1)
    record = out_ptr.to(tl.pointer_type(tl.int64)) + head + chunk * 4
    missing = (_not_zero(v, ITEM) & (_spread(in_a | in_b | stay) == 0)).to(tl.int32)
    if tl.max(tl.max(missing, 1), 0) != 0:
        tl.atomic_or(record + 2, chunk * 0 + 2, sem="relaxed")


@kernel
def _estimate_kernel(
    x_ptr,
    out_ptr,
    table_ptr,
    work_ptr,
    state_ptr,
    chunks: tl.int64,
    nelem: tl.int64,
    chunk_nelem: tl.int64,
    blocks: tl.int64,
    sketch_blocks: tl.int64,
    static_at: tl.int64,
    static_stride: tl.int64,
    EXP: tl.constexpr,
    ITEM: tl.constexpr,
    CELL_EXP: tl.constexpr,
    CELL_ITEM: tl.constexpr,
    PTX: tl.constexpr,
):
    """Add up a block of cells from the elements that stay left, in the order of its list."""
    chunk = tl.program_id(0).to(tl.int64) // sketch_blocks
    block = tl.program_id(0).to(tl.int64) % sketch_blocks
    if tl.load(_state_at(state_ptr, chunk) + _LEFT) != 0:
        first, _ = _chunk_at(chunk, nelem, chunk_nelem)
        left, _, _, _ = _planes(work_ptr, chunk, chunks, blocks, sketch_blocks)
        table = table_ptr.to(tl.pointer_type(tl.int64))
        lists, at, end = _list_at(table, block, blocks, sketch_blocks)
        x = elements_at(x_ptr, ITEM) + first
        cell = tl.arange(0, _BLOCK)
        total = tl.zeros([_BLOCK], tl.float32)
        some = tl.zeros([_BLOCK], tl.int32)
        while at < end:
            entry = tl.load(lists + at)
            at_x = (cell - (entry >> 1).to(tl.int32)) & (_BLOCK - 1)
            bits = tl.load(left + (entry >> 11) * _BLOCK_WORDS + (at_x >> 5))
            on = ((bits >> (at_x & 31).to(tl.uint32)) & 1) != 0
            v = tl.load(x + (entry >> 11) * _BLOCK + at_x, mask=on, other=0)
            v = widen(v, EXP, ITEM) ^ ((entry & 1) << 31).to(tl.int32)
            total = tl.where(on, total + v.to(tl.float32, bitcast=True), total)
            some |= on.to(tl.int32)
            at += 1
        found = narrow(total, CELL_EXP, CELL_ITEM, PTX)
        static_ptr = out_ptr + (static_at + chunk * static_stride) * 128
        store_element(static_ptr, block * _BLOCK + cell, found, some != 0, CELL_EXP, CELL_ITEM, 0)


@kernel
def _sum_kernel(
    data_ptr,
    sums_ptr,
    first_chunk: tl.int64,
    tiles: tl.int64,
    head: tl.int32,
    static_at: tl.int64,
    static_stride: tl.int64,
    WRITE: tl.constexpr,
):
    """Checksum terms of some words of a chunk's static part, added in `sums_ptr`.

    With WRITE `data_ptr` is being encoded, and its record gets them, or no checksum if the index
    lacks an element.
    """
    chunk = first_chunk + tl.program_id(0).to(tl.int64) // tiles
    tile = tl.program_id(0).to(tl.int64) % tiles
    static_ptr = data_ptr + (static_at + chunk * static_stride) * 128
    at = tile * _SUMMED + tl.arange(0, _SUMMED)
    words = static_ptr.to(tl.pointer_type(tl.uint32))
    total = tl.sum(weigh(tl.load(words + at, mask=at < static_stride * 32, other=0), at), 0)
    if WRITE:
        record = data_ptr.to(tl.pointer_type(tl.int64)) + head + chunk * 4
        if (tl.load(record + 2) & 2) == 0:
            tl.atomic_add(record, total.to(tl.int64, bitcast=True), sem="relaxed")
        elif tile == 0:
            tl.store(record, chunk * 0)
    else:
        tl.atomic_add(sums_ptr + chunk, total.to(tl.int64, bitcast=True), sem="relaxed")


@triton.jit
def _used_at(left, a, b, where, number, use):
    """Words of the elements that have their cells by hash `number`: own, or estimated."""
    mask = use[:, None]
    stay = tl.load(left + where, mask=mask, other=0)
    in_a = tl.load(a + where, mask=mask, other=0)
    in_b = tl.load(b + where, mask=mask, other=0)
    both = in_a & in_b
    one = (number == 1)[:, None]
    two = (number == 2)[:, None]
    return stay | tl.where(one, in_a ^ both, tl.where(two, in_b ^ both, both))


@kernel
def _used_kernel(
    table_ptr,
    work_ptr,
    first_chunk: tl.int64,
    chunks: tl.int64,
    blocks: tl.int64,
    sketch_blocks: tl.int64,
    tiles: tl.int64,
    BLOCKS: tl.constexpr,
):
    """Set in the bitmap of some blocks of cells which are own cells or those of estimates."""
    chunk = first_chunk + tl.program_id(0).to(tl.int64) // tiles
    block = tl.program_id(0).to(tl.int64) % tiles * BLOCKS + tl.arange(0, BLOCKS)
    left, a, b, cells = _planes(work_ptr, chunk, chunks, blocks, sketch_blocks)
    table = table_ptr.to(tl.pointer_type(tl.int64))
    lists, at, end = _list_at(table, block, blocks, sketch_blocks)
    longest = tl.max(end - at, 0)
    used = tl.zeros([BLOCKS, _BLOCK_WORDS], tl.uint32)
    k = longest * 0
    while k < longest:
        use = at + k < end
        entry = tl.load(lists + at + k, mask=use, other=0)
        by = -(entry >> 1) & (_BLOCK - 1)
        where, behind = _at(entry >> 11, by)
        number = (entry >> 9) & 3
        low = _used_at(left, a, b, where, number, use)
        used |= _rotated(low, _used_at(left, a, b, behind, number, use), by)
        k += 1
    where = block[:, None] * _BLOCK_WORDS + tl.arange(0, _BLOCK_WORDS)[None, :]
    tl.store(cells + where, used, mask=(block < sketch_blocks)[:, None])


@kernel
def _cells_kernel(
    src_ptr,
    work_ptr,
    status_ptr,
    first_chunk: tl.int64,
    chunks: tl.int64,
    blocks: tl.int64,
    sketch_blocks: tl.int64,
    nelem: tl.int64,
    chunk_nelem: tl.int64,
    tiles: tl.int64,
    static_at: tl.int64,
    static_stride: tl.int64,
    index_at: tl.int64,
    ITEM: tl.constexpr,
):
    """Report a cell that is not zero and not used, of some words of the bitmap of cells.

    Once, also the bits behind those of the last element in the index.
    """
    chunk = first_chunk + tl.program_id(0).to(tl.int64) // tiles
    tile = tl.program_id(0).to(tl.int64) % tiles
    word = tile * _WORDS + tl.arange(0, _WORDS)
    inside = word < sketch_blocks * _BLOCK_WORDS
    _, _, _, cells = _planes(work_ptr, chunk, chunks, blocks, sketch_blocks)
    used = tl.load(cells + word, mask=inside, other=0)
    static_ptr = src_ptr + (static_at + chunk * static_stride) * 128
    payload = elements_at(static_ptr, ITEM)
    v = tl.load(payload + _elements(word), mask=inside[:, None], other=0)
    wrong = tl.max(tl.max(((v != 0) & (_spread(used) == 0)).to(tl.int32), 1), 0)
    _, n = _chunk_at(chunk, nelem, chunk_nelem)
    if (tile == 0) & (n % 8 != 0):
        last = tl.load(static_ptr + index_at * 128 + n // 8).to(tl.int32)
        wrong |= last >> (n % 8).to(tl.int32)
    if wrong != 0:
        report(status_ptr, CHUNK + (chunk << 8) + CHUNK_PAYLOAD)


@triton.jit
def _ordered(bits):
    """Integers in the order of floats of these bits, -0 below 0; and back."""
    return bits ^ ((bits >> 31) & _MAGNITUDE)


@triton.jit
def _signed_cell(payload, place, i, on, EXP: tl.constexpr, ITEM: tl.constexpr):
    """float32 bits of cells of elements `i`, with the signs of their places."""
    v = tl.load(payload + _cell(place, i), mask=on, other=0)
    return widen(v, EXP, ITEM) ^ ((place & 1) << 31).to(tl.int32)


@triton.jit
def _median(x, y, z):
    """The middle one of three float32 bits, int32; a NaN if one is."""
    nan = tl.maximum(tl.maximum(x & _MAGNITUDE, y & _MAGNITUDE), z & _MAGNITUDE) > _INFINITY
    x, y, z = _ordered(x), _ordered(y), _ordered(z)
    middle = tl.maximum(tl.minimum(x, y), tl.minimum(tl.maximum(x, y), z))
    return tl.where(nan, _NAN, _ordered(middle))


@kernel
def _decode_kernel(
    src_ptr,
    out_ptr,
    table_ptr,
    work_ptr,
    start: tl.int64,
    stop: tl.int64,
    first_chunk: tl.int64,
    chunks: tl.int64,
    nelem: tl.int64,
    chunk_nelem: tl.int64,
    blocks: tl.int64,
    sketch_blocks: tl.int64,
    tiles: tl.int64,
    static_at: tl.int64,
    static_stride: tl.int64,
    EXP: tl.constexpr,
    ITEM: tl.constexpr,
    CELL_EXP: tl.constexpr,
    CELL_ITEM: tl.constexpr,
    ALIGNED: tl.constexpr,
    ADD: tl.constexpr,
    PTX: tl.constexpr,
):
    """Elements `start` to `stop` of the tensor as far as they lie in one tile of one chunk."""
    chunk = first_chunk + tl.program_id(0).to(tl.int64) // tiles
    tile = tl.program_id(0).to(tl.int64) % tiles
    first, n = _chunk_at(chunk, nelem, chunk_nelem)
    to = first - start
    if ALIGNED:
        to = tl.multiple_of(to, 16)
    lo = tl.maximum(start - first, 0)
    hi = tl.minimum(stop - first, n)
    begin = tile * (_WORDS * _WORD)
    end = begin + _WORDS * _WORD
    if (begin < hi) & (end > lo):
        word, _ = _words_of(tile, n)
        inside = word < blocks * _BLOCK_WORDS
        left, a, b, _ = _planes(work_ptr, chunk, chunks, blocks, sketch_blocks)
        stay = tl.load(left + word, mask=inside, other=0)
        in_a = tl.load(a + word, mask=inside, other=0)
        in_b = tl.load(b + word, mask=inside, other=0)
        i = _elements(word)
        table = table_ptr.to(tl.pointer_type(tl.int64))
        place, first_place, second, third = _places(table, word, in_a, in_b, inside)
        static_ptr = src_ptr + (static_at + chunk * static_stride) * 128
        payload = elements_at(static_ptr, CELL_ITEM)
        v = tl.load(payload + _cell(place, i), mask=_spread(in_a | in_b), other=0)
        if EXP == CELL_EXP and ITEM == CELL_ITEM:
            bits = v.to(tl.uint32)
        else:
            value = widen(v, CELL_EXP, CELL_ITEM).to(tl.float32, bitcast=True)
            bits = narrow(value, EXP, ITEM, PTX)
        if tl.max((stay != 0).to(tl.int32), 0) != 0:
            on = _spread(stay)
            x = _signed_cell(payload, first_place, i, on, CELL_EXP, CELL_ITEM)
            y = _signed_cell(payload, second, i, on, CELL_EXP, CELL_ITEM)
            z = _signed_cell(payload, third, i, on, CELL_EXP, CELL_ITEM)
            value = _median(x, y, z).to(tl.float32, bitcast=True)
            bits = tl.where(on, narrow(value, EXP, ITEM, PTX), bits)
        if (begin >= lo) & (end <= hi):
            store_element(out_ptr, to + i, bits, None, EXP, ITEM, ADD)
        else:
            store_element(out_ptr, to + i, bits, (i >= lo) & (i < hi), EXP, ITEM, ADD)


@functools.lru_cache(maxsize=64)
def _table(mapping: str, blocks: int, sketch_blocks: int, device: torch.device) -> torch.Tensor:
    """What meets in which cell (see above), int64, on `device`; about 48 bytes a block.

    Made once: the first use of a shape on a device may not be in a captured graph.
    """
    m = mapping_of(Lhc(mapping=mapping), blocks * BLOCK, sketch_blocks * BLOCK // LANES)
    low = m.offsets << 1 | m.signs.astype(np.int64) >> 31
    lists = (np.arange(blocks)[:, None] << 11) + (np.arange(HASHES) << 9) + low
    order = np.argsort(m.blocks.reshape(-1), kind="stable")
    ends = np.cumsum(np.bincount(m.blocks.reshape(-1), minlength=sketch_blocks))
    parts = (m.blocks << 9 | low).reshape(-1), [0], ends, lists.reshape(-1)[order]
    with torch.inference_mode(False):
        return torch.from_numpy(np.concatenate(parts).astype(np.int64)).to(device)


class _Launches:
    """What a plan's kernels take, put together once."""

    def __init__(self, plan: Plan) -> None:
        if not isinstance(plan.codec, Lhc):
            raise TypeError(f"the plan's codec is {plan.codec.name}; allowed: lhc")
        spec = self.spec = plan.codec
        self.sizes = plan.nelem, plan.chunk_nelem
        # Those of whole rows.
        self.blocks = -(-plan.chunk_nelem // LANES) * (LANES // BLOCK)
        self.sketch_blocks = spec.rows(plan.chunk_nelem) * (LANES // BLOCK)
        self.both = self.blocks, self.sketch_blocks
        self.head = plan.header.nbytes // 8
        # In units of 128 bytes, so that kernels know the alignment.
        self.static = plan.static_offset // 128, plan.static_stride // 128
        self.index = plan.layout.sections[0].nbytes // 128
        self.tiles = max(1, _tiles(self.blocks))
        self.cell = spec.cell_dtype(plan.dtype)
        self.work = workspace(spec, plan.chunk_nelem, plan.chunks)

    def split(self, scratch: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The parts of the workspace."""
        ends = np.cumsum(self.work).tolist()
        return tuple(scratch[end - n : end] for end, n in zip(ends, self.work, strict=True))

    def table(self, device: torch.device) -> torch.Tensor:
        """See `_table`."""
        return _table(self.spec.mapping, self.blocks, self.sketch_blocks, device)


def _launches(plan: Plan) -> _Launches:
    found = plan.__dict__.get("_lhc_launches")
    if found is None:
        found = plan.__dict__["_lhc_launches"] = _Launches(plan)
    return found


def _tiles(blocks: int) -> int:
    """Programs that take `_WORDS` words each of so many blocks of bits."""
    return -(-blocks * BLOCK // (32 * int(_WORDS.value)))


@functools.cache
def _index_variant(source: int, work: bool, item: int) -> Variant:
    return Variant(_index_kernel, _OPTIONS, FROM=source, WORK=work, ITEM=item)


@functools.cache
def _round_variants(blocks: int, finish_blocks: int) -> tuple[Variant, ...]:
    """Both halves of a round, and all rounds from one on."""
    halves = [Variant(k, _OPTIONS, BLOCKS=blocks) for k in (_alone_kernel, _peel_kernel)]
    return (*halves, Variant(_finish_kernel, _WIDE_OPTIONS, BLOCKS=finish_blocks))


@functools.cache
def _count_variant() -> Variant:
    return Variant(_count_kernel, _OPTIONS)


def _types(dtype: DType, cell: DType) -> dict[str, int | bool]:
    return {
        "EXP": dtype.exponent,
        "ITEM": dtype.itemsize,
        "CELL_EXP": cell.exponent,
        "CELL_ITEM": cell.itemsize,
        "PTX": PTX,
    }


@functools.cache
def _scatter_variant(dtype: DType, cell: DType, aligned: bool) -> Variant:
    return Variant(_scatter_kernel, _WIDE_OPTIONS, **_with(_types(dtype, cell), ALIGNED=aligned))


@functools.cache
def _estimate_variant(dtype: DType, cell: DType) -> Variant:
    return Variant(_estimate_kernel, _OPTIONS, **_types(dtype, cell))


@functools.cache
def _decode_variant(dtype: DType, cell: DType, aligned: bool, add: int) -> Variant:
    return Variant(
        _decode_kernel, _WIDE_OPTIONS, **_with(_types(dtype, cell), ALIGNED=aligned, ADD=add)
    )


def _with(types: dict[str, int | bool], **more: int | bool) -> dict[str, int | bool]:
    """`types` and more, PTX last as kernels have it."""
    return {k: v for k, v in types.items() if k != "PTX"} | more | {"PTX": types["PTX"]}


@functools.cache
def _sum_variant(write: bool) -> Variant:
    return Variant(_sum_kernel, _WIDE_OPTIONS, WRITE=write)


@functools.cache
def _used_variant(blocks: int) -> Variant:
    return Variant(_used_kernel, _OPTIONS, BLOCKS=blocks)


@functools.cache
def _cells_variant(item: int) -> Variant:
    return Variant(_cells_kernel, _OPTIONS, ITEM=item)


def measure(spec: Lhc, dtype: DType, x: torch.Tensor) -> torch.Tensor:
    """The index of `x`, uint8, shape (ceil(elements / 8),), on its device."""
    n = x.numel()
    blocks = -(-n // BLOCK)
    index = torch.empty(blocks * BLOCK // 8, dtype=torch.uint8, device=x.device)
    if n:
        numbers = 0, 1, n, n, blocks, _tiles(blocks), 0, 0, 0
        _index_variant(int(_ELEMENTS.value), False, dtype.itemsize).launch(
            _tiles(blocks), (x, x, index, x), *numbers
        )
    return index[: -(-n // 8)]


def _peel_chunks(plan: Plan, table, planes, state, first: int, end: int) -> None:
    """Peel what is left in chunks `first` to `end`."""
    g = _launches(plan)
    state.zero_()
    alone, peel, finish = _round_variants(ROUND_BLOCKS, FINISH_BLOCKS)
    where = first, plan.chunks, *g.both
    rounds = 0 if g.blocks <= SMALL_BLOCKS else ROUNDS
    for round_index in range(rounds):
        for half, blocks in ((alone, g.sketch_blocks), (peel, g.blocks)):
            tiles = -(-blocks // ROUND_BLOCKS)
            half.launch((end - first) * tiles, (table, planes, state), *where, tiles, round_index)
    finish.launch(end - first, (table, planes, state), *where, rounds)


def encode(plan: Plan, x, out, scratch, stats=None, key: Key | None = None) -> None:
    """Encode the elements of `x` into `out`; see `tightwire.gpu` for the contract.

    Chunks with an element that is not zero and not in `stats` are marked as overflowed.
    """
    g = _launches(plan)
    nbytes = -(-plan.nelem // 8)
    if stats is not None and stats.numel() != nbytes:
        raise ValueError(f"stats have {stats.numel()} bytes; allowed: {nbytes}")
    _, state, planes = g.split(scratch)
    table = g.table(out.device)
    # Cells that no element has are zero.
    frame_of(plan).begin(out, out[plan.static_offset : plan.dynamic_offset])
    source = int((_ELEMENTS if stats is None else _STATS).value)
    _index_variant(source, True, plan.dtype.itemsize).launch(
        g.tiles * plan.chunks,
        (x, out if stats is None else stats, out, planes),
        0,
        plan.chunks,
        *g.sizes,
        g.blocks,
        g.tiles,
        *g.static,
        g.index,
    )
    _peel_chunks(plan, table, planes, state, 0, plan.chunks)
    where = plan.chunks, *g.sizes, *g.both
    _scatter_variant(plan.dtype, g.cell, aligned_for(plan, x)).launch(
        g.tiles * plan.chunks,
        (x, out, table, planes, state),
        *where,
        g.tiles,
        g.head,
        *g.static,
    )
    _estimate_variant(plan.dtype, g.cell).launch(
        g.sketch_blocks * plan.chunks, (x, out, table, planes, state), *where, *g.static
    )
    if plan.checksum:
        _sum(plan, out, out, 0, plan.chunks, True)


def peeling(plan: Plan, scratch: torch.Tensor) -> torch.Tensor:
    """What `encode` of `plan` has found, which left it in `scratch`: int64, shape (3,).

    Elements in the index, those of them that are peeled, and rounds of the slowest chunk.
    """
    g = _launches(plan)
    _, state, planes = g.split(scratch)
    counts = torch.zeros(3, dtype=torch.int64, device=scratch.device)
    tiles = max(1, -(-g.blocks * (BLOCK // 32) // int(_COUNTED.value)))
    _count_variant().launch(
        tiles * plan.chunks, (planes, state, counts), plan.chunks, *g.both, tiles
    )
    return counts


def _sum(plan: Plan, data, sums, first: int, end: int, write: bool) -> None:
    g = _launches(plan)
    tiles = -(-plan.static_stride // (4 * int(_SUMMED.value)))
    numbers = first, tiles, g.head, *g.static
    _sum_variant(write).launch(tiles * (end - first), (data, sums), *numbers)


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
    peeled: bool = False,
) -> None:
    """Decode elements `start` to `stop` into `out`; see `tightwire.gpu` for the contract.

    If `peeled`, `scratch` has what `encode` of this plan has left there, of the same index.
    """
    g = _launches(plan)
    stop = plan.nelem if stop is None else stop
    sums, state, planes = g.split(scratch)
    summed = check and plan.checksum and (start < stop or not plan.nelem)
    first, end, _, _ = touched(plan, start, stop)
    if summed:
        sums.zero_()
        _sum(plan, src, sums, first, end, False)
    if start < stop:
        table = g.table(src.device)
        where = first, plan.chunks
        if not peeled:
            _index_variant(int(_BUFFER.value), True, plan.dtype.itemsize).launch(
                g.tiles * (end - first),
                (src, src, src, planes),
                *where,
                *g.sizes,
                g.blocks,
                g.tiles,
                *g.static,
                g.index,
            )
            _peel_chunks(plan, table, planes, state, first, end)
        tiles = -(-g.sketch_blocks // ROUND_BLOCKS)
        _used_variant(ROUND_BLOCKS).launch(
            tiles * (end - first), (table, planes), *where, *g.both, tiles
        )
        tiles = _tiles(g.sketch_blocks)
        _cells_variant(g.cell.itemsize).launch(
            tiles * (end - first),
            (src, planes, status),
            *where,
            *g.both,
            *g.sizes,
            tiles,
            *g.static,
            g.index,
        )
        if store:
            adding = out.element_size() if add else 0
            even = aligned_for(plan, out, start)
            _decode_variant(plan.dtype, g.cell, even, adding).launch(
                g.tiles * (end - first),
                (src, out, table, planes),
                start,
                stop,
                *where,
                *g.sizes,
                *g.both,
                g.tiles,
                *g.static,
            )
    frame_of(plan).check(
        src, sums, status, start, stop, whole=check, summed=summed, planned=planned
    )
