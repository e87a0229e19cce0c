# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment,misc"
"""The index of lhc and its peeling on a GPU, in bitmaps. specs/lhc.md.

Which elements meet in a cell follows from the shape alone, so a table lists for each block of the
sketch the blocks of elements in it, in the order in which the page adds them up: cells gather. A
word holds the bits of 32 elements, and a block of elements reaches a block of cells by rotating its
256 bits, the bytes of one sector. A round is two launches over bitmaps:

1. `_alone_kernel`, of each block of cells: which have just one element left, by two bits that
   saturate. A cell is alone in one round at most, as its element is peeled in it. So the bitmap
   `cells` grows, and five others have the number of the round, bit by bit.
2. `_peel_kernel`, of each block of elements: those that have a cell in `cells` are left no more.

Who is peeled in a round is not written down in it, as that would move more bytes than the round:
an element's own cell is the first of its three that were alone earliest, which `_own_kernel` finds
once, behind the last round. In these kernels a thread has a whole block in eight words: rotating
them there takes a sixth of the instructions of rotating them by loads of words.

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
from .common.base import Plan
from .common.launch_triton import INTERPRETED, PTX, kernel, program
from .common.minifloat_triton import aligned_for, elements_at
from .common.plans_triton import Launches, variant_of
from .lhc import (
    BLOCK,
    FINISHED,
    HASHES,
    LANES,
    LEFT,
    NUMBER_BITS,
    ROUNDS,
    STATE,
    Lhc,
    mapping_of,
    workspace,
)
from .lhc_blocks_triton import (
    any_set,
    below,
    block_at,
    common,
    inverse,
    loaded_at,
    rotate,
    rotated_at,
    store_block,
    union,
)

#: Bits of a bitmap's word, words of a block.
WORD = tl.constexpr(32)
BLOCK_WORDS = tl.constexpr(BLOCK // 32)
_BLOCK, _HASHES = tl.constexpr(BLOCK), tl.constexpr(HASHES)
_STATE, _LEFT, _FINISHED = tl.constexpr(STATE), tl.constexpr(LEFT), tl.constexpr(FINISHED)
#: A program's share of words of a bitmap, in kernels that look at elements or cells.
WORDS = tl.constexpr(128)
#: A program's share of the words of a bitmap when they are counted.
_COUNTED = tl.constexpr(2048)
#: Where `_index_kernel` takes the index from.
OF_ELEMENTS, OF_STATS, OF_BUFFER = (tl.constexpr(i) for i in range(3))

_NUMBER_BITS = tl.constexpr(NUMBER_BITS)

#: Blocks that a program takes at once: of elements, a block a thread; in `_used_kernel`; in
#: `_finish_kernel`.
PEEL_BLOCKS = 256
ROUND_BLOCKS = 64
FINISH_BLOCKS = 128
#: Blocks of cells that a program takes at once, and threads for each, which share its list. The
#: interpreter reduces element by element, which takes it long.
ALONE = {"BLOCKS": 64, "THREADS": 1} if INTERPRETED else {"BLOCKS": 16, "THREADS": 8}
#: Programs of a launch that mostly has nothing to do: 8 for each of 132 multiprocessors.
PROGRAMS = 1056
#: Up to so many blocks entries of rounds have 4 bytes.
_SHORT_BLOCKS = 1 << 23
#: Chunks of so many blocks at most are peeled by `_finish_kernel` alone.
SMALL_BLOCKS = 1024

# Of an element two bits say what became of it, in planes `a` and `b`: own cell by hash 0 (both), 1
# (a), 2 (b), or none. It is `left` until then; those that stay left are estimated. Until
# `_own_kernel` has run, `a` has the index.
# The table has for each block of elements and hash `block of cells << 9 | offset << 1 | sign`, then
# where the list of each block of cells starts and the last ends, then those lists:
# `block of elements << 11 | hash << 9 | offset << 1 | sign`. The rounds need neither hash nor sign,
# and read every entry twice a round: theirs are `block << 8 | offset`, of 4 bytes where they fit.


@triton.jit
def chunk_at(chunk, nelem, chunk_nelem):
    """First element of a chunk, and how many it has."""
    first = chunk * chunk_nelem
    return first, tl.maximum(tl.minimum(chunk_nelem, nelem - first), 0)


@triton.jit
def program_of(member, first_chunk, tiles):
    """The chunk of a program, and its number there."""
    pid = program(member).to(tl.int64)
    return first_chunk + pid // tiles, pid % tiles


@triton.jit
def planes_of(work_ptr, chunk, chunks, blocks, sketch_blocks):
    """Bitmaps of a chunk: left, a, b, and that of its cells."""
    words = work_ptr.to(tl.pointer_type(tl.uint32))
    left = words + chunk * blocks * BLOCK_WORDS
    plane = chunks * blocks * BLOCK_WORDS
    cells = words + 3 * plane + chunk * sketch_blocks * BLOCK_WORDS
    return left, left + plane, left + 2 * plane, cells


@triton.jit
def _numbers_of(cells, chunks, sketch_blocks):
    """The first bitmap of round numbers of a chunk whose cells have bitmap `cells`, and how far
    apart they are.
    """
    plane = chunks * sketch_blocks * BLOCK_WORDS
    return cells + plane, plane


@triton.jit
def state_at(state_ptr, chunk):
    """What a chunk's peeling leaves: int64 words."""
    return state_ptr.to(tl.pointer_type(tl.int64)) + chunk * _STATE


@triton.jit
def rotated(low, high, by):
    """Bits behind bit `by` % 32 of words and those that follow them; shapes [n, 32] and [n]."""
    shift = (by & 31).to(tl.uint32)[:, None]
    return (low >> shift) | ((high << 1) << (31 - shift))


@triton.jit
def places_at(block, by):
    """Where words of blocks are whose bit 0 is bit `by` of the block, and those behind them."""
    word = tl.arange(0, BLOCK_WORDS)[None, :] + (by >> 5)[:, None]
    base = block[:, None] * BLOCK_WORDS
    return base + (word & (BLOCK_WORDS - 1)), base + ((word + 1) & (BLOCK_WORDS - 1))


@triton.jit
def _rotated_blocks(bitmap, block, by, use):
    """Words of blocks of a bitmap: bit i is bit (i + `by`) % 256 of the block; 0 if not `use`."""
    at, behind = places_at(block, by)
    low = tl.load(bitmap + at, mask=use[:, None], other=0)
    high = tl.load(bitmap + behind, mask=use[:, None], other=0)
    return rotated(low, high, by)


@triton.jit
def list_at(table, block, blocks, sketch_blocks):
    """(pointer to the lists, first and last + 1 of the entries of blocks of cells)."""
    starts = table + _HASHES * blocks
    here = block < sketch_blocks
    first = tl.load(starts + block, mask=here, other=0)
    end = tl.load(starts + block + 1, mask=here, other=0)
    return starts + sketch_blocks + 1, first, end


@triton.jit
def _find_alone(table, left, cells, block, blocks, sketch_blocks, BLOCKS: tl.constexpr):
    """Set in `cells` which of the cells of blocks `block` have one element that is left."""
    lists, at, end = list_at(table, block, blocks, sketch_blocks)
    longest = tl.max(end - at, 0)
    once = tl.zeros([BLOCKS, BLOCK_WORDS], tl.uint32)
    twice = tl.zeros([BLOCKS, BLOCK_WORDS], tl.uint32)
    k = longest * 0
    while k < longest:
        use = at + k < end
        entry = tl.load(lists + at + k, mask=use, other=0)
        bits = _rotated_blocks(left, entry >> 11, -(entry >> 1) & (_BLOCK - 1), use)
        twice |= once & bits
        once |= bits
        k += 1
    where = block[:, None] * BLOCK_WORDS + tl.arange(0, BLOCK_WORDS)[None, :]
    tl.store(cells + where, once ^ twice, mask=(block < sketch_blocks)[:, None])


@triton.jit
def _peel(table, left, a, b, cells, block, blocks):
    """Peel of blocks `block` who has a cell alone; 1 if some has."""
    here = block < blocks
    where = block[:, None] * BLOCK_WORDS + tl.arange(0, BLOCK_WORDS)[None, :]
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


@triton.jit
def _entries_at(entries_ptr, ENTRY: tl.constexpr):
    """A pointer to entries of ENTRY bytes: see `_tables`."""
    return entries_ptr.to(tl.pointer_type(tl.int32 if ENTRY == 4 else tl.int64))


@triton.jit
def _entries_of(entries_ptr, block, here, ENTRY: tl.constexpr):
    """The entries of blocks of elements, by hash."""
    at = _entries_at(entries_ptr, ENTRY) + _HASHES * block
    first = tl.load(at, mask=here, other=0)
    second = tl.load(at + 1, mask=here, other=0)
    return first, second, tl.load(at + 2, mask=here, other=0)


@triton.jit
def _joined(once, twice, once_2, twice_2):
    """Of two shares of a list, which cells are in it: once or more, twice or more."""
    return once | once_2, twice | twice_2 | (once & once_2)


@triton.jit
def _alone_in(once, twice):
    """Which cells of a word are just once in all shares of the list."""
    found, more = tl.reduce((once, twice), 1, _joined)
    return found & ~more


@kernel
def _alone_kernel(
    entries_ptr,
    work_ptr,
    state_ptr,
    first_chunk: tl.int64,
    chunks: tl.int64,
    blocks: tl.int64,
    sketch_blocks: tl.int64,
    tiles: tl.int64,
    round_index: tl.int32,
    BLOCKS: tl.constexpr,
    THREADS: tl.constexpr,
    ENTRY: tl.constexpr,
    PTX: tl.constexpr,
    member=None,
):
    """The first half of a round: which cells have one element that is left, and the round of those.

    Numbers of rounds begin as all ones.
    """
    chunk, tile = program_of(member, first_chunk, tiles)
    block = tile * BLOCKS + tl.arange(0, BLOCKS)
    # Under way while the state is.
    lists, at, end = list_at(_entries_at(entries_ptr, ENTRY), block, blocks, sketch_blocks)
    if _going(state_at(state_ptr, chunk), round_index):
        left, _, _, cells = planes_of(work_ptr, chunk, chunks, blocks, sketch_blocks)
        numbers, plane = _numbers_of(cells, chunks, sketch_blocks)
        longest = tl.max(end - at, 0).to(tl.int32)
        entry_ptr = lists + (at[:, None] + tl.arange(0, THREADS)[None, :])
        number_left = (end - at)[:, None] - tl.arange(0, THREADS)[None, :]
        zero = tl.zeros([BLOCKS, THREADS], tl.uint32)
        once = zero, zero, zero, zero, zero, zero, zero, zero
        twice = zero, zero, zero, zero, zero, zero, zero, zero
        for k in range(0, longest, 2 * THREADS):
            use, use_2 = k < number_left, k + THREADS < number_left
            entry = tl.load(entry_ptr + k, mask=use, other=0)
            entry_2 = tl.load(entry_ptr + k + THREADS, mask=use_2, other=0)
            by, by_2 = -entry & (_BLOCK - 1), -entry_2 & (_BLOCK - 1)
            x = loaded_at(left, entry >> 8, by, use, PTX)
            y = loaded_at(left, entry_2 >> 8, by_2, use_2, PTX)
            x, y = rotate(x, by, PTX), rotate(y, by_2, PTX)
            twice = union(twice, union(common(once, x), common(union(once, x), y)))
            once = union(once, union(x, y))
        alone = (
            _alone_in(once[0], twice[0]),
            _alone_in(once[1], twice[1]),
            _alone_in(once[2], twice[2]),
            _alone_in(once[3], twice[3]),
            _alone_in(once[4], twice[4]),
            _alone_in(once[5], twice[5]),
            _alone_in(once[6], twice[6]),
            _alone_in(once[7], twice[7]),
        )
        here = block < sketch_blocks
        to = block * BLOCK_WORDS
        if round_index == 0:
            store_block(cells + to, alone, here, PTX)
        else:
            store_block(cells + to, union(block_at(cells + to, here, PTX), alone), here, PTX)
        others = inverse(alone)
        for bit in tl.static_range(_NUMBER_BITS):
            number = numbers + bit * plane + to
            if round_index == 0:
                store_block(number, others, here, PTX)
            elif ((round_index >> bit) & 1) == 0:
                store_block(number, common(block_at(number, here, PTX), others), here, PTX)


@kernel
def _peel_kernel(
    entries_ptr,
    work_ptr,
    state_ptr,
    first_chunk: tl.int64,
    chunks: tl.int64,
    blocks: tl.int64,
    sketch_blocks: tl.int64,
    tiles: tl.int64,
    round_index: tl.int32,
    BLOCKS: tl.constexpr,
    ENTRY: tl.constexpr,
    PTX: tl.constexpr,
    member=None,
):
    """The second half: peel elements that have a cell alone, and say in the state if some had."""
    chunk, tile = program_of(member, first_chunk, tiles)
    state = state_at(state_ptr, chunk)
    if _going(state, round_index):
        left, _, _, cells = planes_of(work_ptr, chunk, chunks, blocks, sketch_blocks)
        block = tile * BLOCKS + tl.arange(0, BLOCKS)
        here = block < blocks
        to = block * BLOCK_WORDS
        first, second, third = _entries_of(entries_ptr, block, here, ENTRY)
        stay = block_at(left + to, here, PTX)
        use = any_set(stay)
        x = loaded_at(cells, first >> 8, first & (_BLOCK - 1), use, PTX)
        y = loaded_at(cells, second >> 8, second & (_BLOCK - 1), use, PTX)
        z = loaded_at(cells, third >> 8, third & (_BLOCK - 1), use, PTX)
        alone = rotate(x, first & (_BLOCK - 1), PTX)
        alone = union(alone, rotate(y, second & (_BLOCK - 1), PTX))
        alone = union(alone, rotate(z, third & (_BLOCK - 1), PTX))
        peels = any_set(common(stay, alone))
        store_block(left + to, common(stay, inverse(alone)), peels, PTX)
        if tl.max(peels.to(tl.int32), 0) != 0:
            tl.store(state + round_index, 1)


@kernel
def _own_kernel(
    entries_ptr,
    work_ptr,
    first_chunk: tl.int64,
    chunks: tl.int64,
    blocks: tl.int64,
    sketch_blocks: tl.int64,
    tiles: tl.int64,
    BLOCKS: tl.constexpr,
    ENTRY: tl.constexpr,
    PTX: tl.constexpr,
    member=None,
):
    """Planes `a` and `b` of some blocks: of peeled elements the first cell that was alone earliest.

    A cell that was alone later, or never, has a higher number.
    """
    chunk, tile = program_of(member, first_chunk, tiles)
    left, a, b, cells = planes_of(work_ptr, chunk, chunks, blocks, sketch_blocks)
    number, plane = _numbers_of(cells, chunks, sketch_blocks)
    block = tile * BLOCKS + tl.arange(0, BLOCKS)
    here = block < blocks
    to = block * BLOCK_WORDS
    peeled = common(block_at(a + to, here, PTX), inverse(block_at(left + to, here, PTX)))
    use = any_set(peeled)
    first, second, third = _entries_of(entries_ptr, block, here, ENTRY)
    zero = tl.zeros([BLOCKS], tl.uint32)
    none = zero, zero, zero, zero, zero, zero, zero, zero
    second_first, third_first, third_second = none, none, none
    for _bit in tl.static_range(_NUMBER_BITS):
        x = rotated_at(number, first >> 8, first & (_BLOCK - 1), use, PTX)
        y = rotated_at(number, second >> 8, second & (_BLOCK - 1), use, PTX)
        z = rotated_at(number, third >> 8, third & (_BLOCK - 1), use, PTX)
        second_first = below(y, x, second_first)
        third_first = below(z, x, third_first)
        third_second = below(z, y, third_second)
        number += plane
    by_0 = common(peeled, inverse(union(second_first, third_first)))
    by_1 = common(peeled, common(second_first, inverse(third_second)))
    store_block(a + to, union(by_0, by_1), here, PTX)
    store_block(b + to, common(peeled, inverse(by_1)), here, PTX)


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
    member=None,
):
    """All rounds of a chunk from round `round_index` on."""
    chunk = first_chunk + program(member).to(tl.int64)
    left, a, b, cells = planes_of(work_ptr, chunk, chunks, blocks, sketch_blocks)
    table = table_ptr.to(tl.pointer_type(tl.int64))
    going = _going(state_at(state_ptr, chunk), round_index).to(tl.int32)
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
    tl.store(state_at(state_ptr, chunk) + _FINISHED, rounds.to(tl.int64))


@triton.jit
def bits_set(word):
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
    chunk, tile = program_of(None, 0, tiles)
    word = tile * _COUNTED + tl.arange(0, _COUNTED)
    inside = word < blocks * BLOCK_WORDS
    left, a, b, _ = planes_of(work_ptr, chunk, chunks, blocks, sketch_blocks)
    stay = tl.load(left + word, mask=inside, other=0)
    gone = tl.load(a + word, mask=inside, other=0) | tl.load(b + word, mask=inside, other=0)
    peeled = tl.sum(bits_set(gone).to(tl.int64), 0)
    tl.atomic_add(counts_ptr, peeled + tl.sum(bits_set(stay).to(tl.int64), 0), sem="relaxed")
    tl.atomic_add(counts_ptr + 1, peeled, sem="relaxed")
    if tile == 0:
        entry = tl.arange(0, _STATE)
        is_round = (entry < _LEFT) | (entry == _FINISHED)
        rounds = tl.load(state_at(state_ptr, chunk) + entry, mask=is_round, other=0)
        tl.atomic_max(counts_ptr + 2, tl.sum(rounds, 0), sem="relaxed")


@triton.jit
def words_of(tile, n):
    """Numbers of a tile's words, and which of their bits are of the `n` elements of the chunk."""
    word = tile * WORDS + tl.arange(0, WORDS)
    valid = tl.minimum(tl.maximum(n - word * WORD, 0), WORD)
    mask = (((valid * 0 + 1) << valid) - 1).to(tl.uint32)
    return word, mask


@triton.jit
def elements_of(word):
    """Numbers of the elements of words, shape [words, 32]."""
    return word[:, None] * WORD + tl.arange(0, WORD)[None, :]


@triton.jit
def spread(bits):
    """Whether the bits of words are set, shape [words, 32]."""
    return ((bits[:, None] >> tl.arange(0, WORD).to(tl.uint32)[None, :]) & 1) != 0


@triton.jit
def not_zero(v, ITEM: tl.constexpr):
    """Whether element bits are neither 0 nor -0."""
    return (v.to(tl.uint32) << (33 - 8 * ITEM)) != 0


@triton.jit
def index_of(x_ptr, first, word, tile, n, ITEM: tl.constexpr, ALIGNED: tl.constexpr):
    """The index of a tile of a chunk: words. ALIGNED: `first` is at a multiple of 16 bytes."""
    if ALIGNED:
        if (tile + 1) * (WORDS * WORD) <= n:
            bits = _index_of_whole(x_ptr, first, tile, ITEM)
        else:
            bits = _index_of_some(x_ptr, first, word, n, ITEM)
    else:
        bits = _index_of_some(x_ptr, first, word, n, ITEM)
    return bits


@triton.jit
def _index_of_some(x_ptr, first, word, n, ITEM: tl.constexpr):
    i = elements_of(word)
    v = tl.load(elements_at(x_ptr, ITEM) + first + i, mask=i < n, other=0)
    placed = not_zero(v, ITEM).to(tl.int32) << tl.arange(0, WORD)[None, :]
    return tl.sum(placed, 1).to(tl.uint32, bitcast=True)


@triton.jit
def _index_of_whole(x_ptr, first, tile, ITEM: tl.constexpr):
    # The compiler sees that addresses are multiples of 16 bytes; a hint on `first` is lost here.
    x = x_ptr.to(tl.pointer_type(tl.uint32))
    row = tl.arange(0, WORDS)[:, None]
    if ITEM == 2:
        # Two elements in a word: bit 15 of each is set if it is not zero.
        column = tl.arange(0, WORD // 2)[None, :]
        words = x + first // 8 * 4 + tile * (WORDS * WORD // 2)
        v = tl.load(words + (row * (WORD // 2) + column)) & 0x7FFF7FFF
        v = ((v + 0x7FFF7FFF) >> 15) & 0x00010001
        placed = ((v | (v >> 15)) & 3) << (2 * column).to(tl.uint32)
    else:
        column = tl.arange(0, WORD)[None, :]
        words = x + first // 4 * 4 + tile * (WORDS * WORD)
        v = tl.load(words + (row * WORD + column))
        placed = not_zero(v, ITEM).to(tl.uint32) << column.to(tl.uint32)
    return tl.sum(placed.to(tl.int32, bitcast=True), 1).to(tl.uint32, bitcast=True)


@kernel
def _index_kernel(
    x_ptr,
    given_ptr,
    index_ptr,
    work_ptr,
    state_ptr,
    first_chunk: tl.int64,
    chunks: tl.int64,
    nelem: tl.int64,
    chunk_nelem: tl.int64,
    blocks: tl.int64,
    tiles: tl.int64,
    static_at: tl.int64,
    static_stride: tl.int64,
    index_at: tl.int64,
    kept: tl.int32,
    FROM: tl.constexpr,
    WORK: tl.constexpr,
    ITEM: tl.constexpr,
    ALIGNED: tl.constexpr,
    member=None,
):
    """The index of some words of a chunk, from elements or a tensor's index, or as it is there.

    With WORK all that is in the index is left, and the chunk's state is 0. Plane `a` has the index
    if `kept`, for `_own_kernel`; else nothing is peeled in `a` and `b`.
    """
    chunk, tile = program_of(member, first_chunk, tiles)
    first, n = chunk_at(chunk, nelem, chunk_nelem)
    word, mask = words_of(tile, n)
    inside = word < blocks * BLOCK_WORDS
    static_ptr = index_ptr + (static_at + chunk * static_stride + index_at) * 128
    index = static_ptr.to(tl.pointer_type(tl.uint32)) + word
    if FROM == OF_BUFFER:
        bits = tl.load(index, mask=inside, other=0) & mask
    else:
        if FROM == OF_ELEMENTS:
            bits = index_of(x_ptr, first, word, tile, n, ITEM, ALIGNED)
        else:
            bit = first + word * WORD
            byte = bit >> 3
            nbytes = (nelem + 7) >> 3
            found = tl.zeros([WORDS], tl.uint64)
            for k in tl.static_range(5):
                part = tl.load(given_ptr + byte + k, mask=byte + k < nbytes, other=0)
                found |= part.to(tl.uint64) << (8 * k)
            bits = (found >> (bit & 7).to(tl.uint64)).to(tl.uint32) & mask
        tl.store(index, bits, mask=inside)
    if WORK:
        left, a, b, _ = planes_of(work_ptr, chunk, chunks, blocks, blocks)
        tl.store(left + word, bits, mask=inside)
        tl.store(a + word, tl.where(kept != 0, bits, bits * 0), mask=inside)
        tl.store(b + word, bits * 0, mask=inside & (word * 0 + kept == 0))
        if tile == 0:
            entry = tl.arange(0, _STATE)
            tl.store(state_at(state_ptr, chunk) + entry, (entry * 0).to(tl.int64))


@functools.lru_cache(maxsize=64)
def _tables(
    mapping: str, blocks: int, sketch_blocks: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """What meets in which cell (see above), int64, on `device`; about 48 bytes a block. And the
    same for rounds, in half of that.

    Made once: the first use of a shape on a device may not be in a captured graph.
    """
    m = mapping_of(Lhc(mapping=mapping), blocks * BLOCK, sketch_blocks * BLOCK // LANES)
    low = m.offsets << 1 | m.signs.astype(np.int64) >> 31
    number = np.arange(blocks)[:, None]
    order = np.argsort(m.blocks.reshape(-1), kind="stable")
    ends = np.cumsum(np.bincount(m.blocks.reshape(-1), minlength=sketch_blocks))

    def joined(entries, listed, kind) -> torch.Tensor:
        parts = entries.reshape(-1), [0], ends, listed.reshape(-1)[order]
        return torch.from_numpy(np.concatenate(parts).astype(kind)).to(device)

    lists = (number << 11) + (np.arange(HASHES) << 9) + low
    kind = np.int32 if blocks <= _SHORT_BLOCKS else np.int64
    with torch.inference_mode(False):
        table = joined(m.blocks << 9 | low, lists, np.int64)
        return table, joined(m.blocks << 8 | m.offsets, number << 8 | m.offsets, kind)


class Shape(Launches):
    """What a plan's kernels take; `blocks` are those of the rows of a chunk and of its sketch."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        # Those of whole rows.
        self.blocks = -(-plan.chunk_nelem // LANES) * (LANES // BLOCK)
        self.sketch_blocks = self.spec.rows(plan.chunk_nelem) * (LANES // BLOCK)
        self.both = self.blocks, self.sketch_blocks
        self.tiles = max(1, tiles_of(self.blocks))
        self.cell = self.spec.cell_dtype(plan.dtype)
        self.parts = workspace(self.spec, plan.chunk_nelem, plan.chunks)

    def table(self, device: torch.device) -> torch.Tensor:
        """See `_tables`."""
        return _tables(self.spec.mapping, *self.both, device)[0]

    def entries(self, device: torch.device) -> torch.Tensor:
        """See `_tables`: what rounds take."""
        return _tables(self.spec.mapping, *self.both, device)[1]


def tiles_of(blocks: int) -> int:
    """Programs that take `WORDS` words each of so many blocks of bits."""
    return -(-blocks * BLOCK // (32 * int(WORDS.value)))


def read_index(plan: Plan, source: int, tensors, first: int, end: int) -> None:
    """The index of chunks `first` to `end`, planes in which nothing is peeled, and their state."""
    g = Shape.of(plan)
    aligned = source == int(OF_ELEMENTS.value) and aligned_for(plan, tensors[0])
    item = plan.dtype.itemsize
    variant = variant_of(_index_kernel, FROM=source, WORK=True, ITEM=item, ALIGNED=aligned)
    where = first, plan.chunks, *g.sizes, g.blocks, g.tiles, *g.static, g.second
    kept = int(g.blocks > SMALL_BLOCKS)
    variant.launch(g.tiles * (end - first), tensors, *where, kept)


def peel_chunks(plan: Plan, table, planes, state, first: int, end: int) -> None:
    """Peel what is left in chunks `first` to `end`."""
    g, number = Shape.of(plan), end - first
    tensors, where = (table, planes, state), (first, plan.chunks, *g.both)
    rounds = 0 if g.blocks <= SMALL_BLOCKS else ROUNDS
    if rounds:
        entries = g.entries(planes.device)
        known = {"ENTRY": entries.itemsize, "PTX": PTX and planes.data_ptr() % 16 == 0}
        halves = (
            (variant_of(_alone_kernel, **ALONE, **known), -(-g.sketch_blocks // ALONE["BLOCKS"])),
            (variant_of(_peel_kernel, BLOCKS=PEEL_BLOCKS, **known), -(-g.blocks // PEEL_BLOCKS)),
        )
        for round_index in range(rounds):
            for half, tiles in halves:
                half.launch(number * tiles, (entries, *tensors[1:]), *where, tiles, round_index)
        own, tiles = variant_of(_own_kernel, BLOCKS=PEEL_BLOCKS, **known), halves[1][1]
        own.launch(number * tiles, (entries, planes), *where, tiles)
    finish = variant_of(_finish_kernel, 8, BLOCKS=FINISH_BLOCKS)
    finish.launch(number, tensors, *where, rounds)


def peeling(plan: Plan, scratch: torch.Tensor) -> torch.Tensor:
    """What `encode` of `plan` has found, which left it in `scratch`: int64, shape (3,).

    Elements in the index, those of them that are peeled, and rounds of the slowest chunk.
    """
    g = Shape.of(plan)
    _, state, planes = g.split(scratch)
    counts = torch.zeros(3, dtype=torch.int64, device=scratch.device)
    tiles = max(1, -(-g.blocks * (BLOCK // 32) // int(_COUNTED.value)))
    where = plan.chunks, *g.both, tiles
    variant_of(_count_kernel).launch(tiles * plan.chunks, (planes, state, counts), *where)
    return counts


def measure(spec: Lhc, dtype: DType, x: torch.Tensor) -> torch.Tensor:
    """The index of `x`, uint8, shape (ceil(elements / 8),), on its device."""
    n = x.numel()
    blocks = -(-n // BLOCK)
    index = torch.empty(blocks * BLOCK // 8, dtype=torch.uint8, device=x.device)
    if n:
        numbers = 0, 1, n, n, blocks, tiles_of(blocks), 0, 0, 0, 0
        source = int(OF_ELEMENTS.value)
        values = {"FROM": source, "WORK": False, "ITEM": dtype.itemsize}
        variant = variant_of(_index_kernel, **values, ALIGNED=x.data_ptr() % 16 == 0)
        variant.launch(tiles_of(blocks), (x, x, index, x, x), *numbers)
    return index[: -(-n // 8)]
