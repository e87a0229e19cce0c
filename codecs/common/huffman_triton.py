# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment,misc"
"""Blocks of codecs/common/huffman.py on a GPU: a program takes a tile, a lane a run.

Elements are read and written 16 of each lane at a time, so that memory is accessed in whole sectors
whatever runs the lanes have. One warp to a program: what lanes exchange needs no barrier.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import huffman
from .huffman_tables_triton import BITS_AT, ESCAPED, look_up
from .minifloat_triton import by_ptx

RUN, RUNS, TILE = (tl.constexpr(n) for n in (huffman.RUN, huffman.RUNS, huffman.TILE))
#: Elements that a lane reads or writes at a time.
AT_ONCE = tl.constexpr(16)
STORED, CONSTANT, NARROW, WIDE = (
    tl.constexpr(n) for n in (huffman.STORED, huffman.CONSTANT, huffman.NARROW, huffman.WIDE)
)
_CODES = tl.constexpr(1 << huffman.LIMIT)
_ESCAPE = tl.constexpr(huffman.ESCAPE)


@triton.jit
def padded(n, K: tl.constexpr):
    """`n` rounded up to a multiple of K."""
    return (n + (K - 1)) // K * K


@triton.jit
def block_of(at):
    """Numbers of the elements from number `at` of each run on, [RUNS, AT_ONCE]."""
    return tl.arange(0, RUNS)[:, None] * RUN + (at + tl.arange(0, AT_ONCE)[None, :])


@triton.jit
def _bytes_of(a, b, c, d):
    """The bytes of four words of each lane, uint8, [RUNS, AT_ONCE]."""
    words = tl.join(tl.join(a, c), tl.join(b, d))
    b0, b1 = (words & 255).to(tl.uint8), ((words >> 8) & 255).to(tl.uint8)
    b2, b3 = ((words >> 16) & 255).to(tl.uint8), ((words >> 24) & 255).to(tl.uint8)
    return tl.reshape(tl.join(tl.join(b0, b2), tl.join(b1, b3)), [RUNS, AT_ONCE])


@triton.jit
def open_block(data_ptr, at, stop, m):
    """Read a block's head at byte `at`, which ends by `stop`.

    (mode, value, first bits of runs and those behind; end of the block; whether it is wrong.)
    """
    run = tl.arange(0, RUNS)
    runs = (m + RUN - 1) // RUN
    there = at + 4 <= stop
    head = tl.load((data_ptr + at).to(tl.pointer_type(tl.uint32)), mask=there, other=4)
    head = head.to(tl.int32, bitcast=True)
    mode, value, base = head & 255, (head >> 8) & 255, (head >> 16) & 0xFFFF
    bad = (mode > WIDE) | ((value != 0) & (mode != CONSTANT)) | ((base != 0) & (mode != NARROW))
    coded = (mode >= NARROW) & (bad == 0)
    width = tl.where(mode == NARROW, 1, 2)
    used = runs * width
    listed = tl.where(coded, (used + 3) // 4 * 4, 0)
    fits = coded & (at + 4 + listed <= stop)
    mine = run < tl.where(fits, runs, 0)
    sizes_ptr = data_ptr + at + 4
    sizes = tl.load(sizes_ptr + run * width, mask=mine, other=0).to(tl.int32)
    wide = run < tl.where(fits & (mode == WIDE), runs, 0)
    upper = tl.load(sizes_ptr + run * 2 + 1, mask=wide, other=0).to(tl.int32)
    sizes = tl.where(mine, sizes + (upper << 8) + base, 0)
    gap = tl.load(sizes_ptr + used + run, mask=used + run < tl.where(fits, listed, 0), other=0)
    ends = tl.cumsum(sizes, 0)
    bits = tl.sum(sizes, 0)
    nbytes = tl.where(coded, listed + (bits + 31) // 32 * 4, 0)
    nbytes = tl.where(mode == STORED, (m + 3) // 4 * 4, nbytes)
    end = at + 4 + nbytes
    bad = bad | (there == 0) | (coded & (fits == 0)) | (end > stop)
    bad = bad | (tl.max(gap.to(tl.int32), 0) > 0)
    # Zeros behind the last run, or the last byte that is stored.
    odd = coded & (bits % 32 != 0) & (bad == 0)
    last_ptr = (data_ptr + end - 4).to(tl.pointer_type(tl.uint32))
    last = tl.load(last_ptr, mask=tl.where(odd, 1, 0) > 0, other=0)
    bad = bad | (odd & ((last >> (bits % 32).to(tl.uint32)) != 0))
    j = tl.arange(0, 4)
    stored = m + j < tl.where((mode == STORED) & (bad == 0), nbytes, 0)
    extra = tl.load(data_ptr + at + 4 + m + j, mask=stored, other=0)
    bad = bad | (tl.max(extra.to(tl.int32), 0) > 0)
    begin = 8 * (at + 4 + listed)
    return mode, value, begin + ends - sizes, begin + ends, end, bad


@triton.jit
def _funnel(low, high, n, PTX: tl.constexpr):
    """32 bits from bit `n` & 31 of two words on, uint32."""
    if PTX:
        return by_ptx("shf.r.wrap.b32 $0, $1, $2, $3;", "=r,r,r,r", (low, high, n))
    else:
        both = low.to(tl.uint64) | (high.to(tl.uint64) << 32)
        return ((both >> (n & 31).to(tl.uint64)) & 0xFFFFFFFF).to(tl.uint32)


@triton.jit
def _next_unit(s, words, last, live, table, UNIT: tl.constexpr, PTX: tl.constexpr):
    """A unit's value, and the state behind it: two words and the one behind them, the bit in the
    first, the number of the word that is loaded next.
    """
    low, high, more, n, ahead = s
    window = _funnel(low, high, n, PTX)
    entry = look_up(table, (window & (_CODES - 1)).to(tl.int32), PTX)
    length = entry >> BITS_AT
    # A code and 2 bytes are at most 28 bits.
    raw = window >> ((length - 8 * UNIT) & 31).to(tl.uint32)
    value = tl.where((entry & ESCAPED) != 0, raw, entry.to(tl.uint32))
    after = n + tl.where(live, length, 0)
    cross = ((n ^ after) & 32) != 0
    low, high = tl.where(cross, high, low), tl.where(cross, more, high)
    more = tl.load(words + ahead, mask=cross & (ahead <= last), other=more)
    return value & ((1 << (8 * UNIT)) - 1), (low, high, more, after, ahead + cross.to(tl.int32))


@triton.jit
def _word_at(words, n, last, use, PTX: tl.constexpr):
    """32 bits from bit `n` on, uint32. Words behind number `last` are taken for it."""
    low = tl.load(words + tl.minimum(n >> 5, last), mask=use, other=0)
    high = tl.load(words + tl.minimum((n >> 5) + 1, last), mask=use, other=0)
    return _funnel(low, high, n, PTX)


@triton.jit
def _next_eight(n, words, last, live, table, zero, differs, PTX: tl.constexpr):
    """(lower and upper 4 bytes of a unit of 8, the bit behind it)."""
    entry = look_up(table, (_word_at(words, n, last, live, PTX) & (_CODES - 1)).to(tl.int32), PTX)
    escaped = live & ((entry & ESCAPED) != 0)
    n += tl.where(live, entry >> BITS_AT, 0)
    symbol = entry.to(tl.uint32)
    # Four bits to a byte each.
    low, high = symbol & 15, (symbol >> 4) & 15
    low = (low | (low << 7) | (low << 14) | (low << 21)) & 0x01010101
    high = (high | (high << 7) | (high << 14) | (high << 21)) & 0x01010101
    low = tl.where(escaped, _word_at(words, n, last, escaped, PTX), zero ^ (low * differs))
    high = tl.where(escaped, _word_at(words, n + 32, last, escaped, PTX), zero ^ (high * differs))
    return low, high, n + tl.where(escaped, 64, 0)


@triton.jit
def open_runs(words, bit, last, live, UNIT: tl.constexpr):
    """The state of `next_bytes` at bits `bit` of `words`."""
    first = bit >> 5
    low = tl.load(words + tl.minimum(first, last), mask=live, other=0)
    high = tl.load(words + tl.minimum(first + 1, last), mask=live, other=0)
    more = tl.load(words + tl.minimum(first + 2, last), mask=live, other=0)
    return low, high, more, bit if UNIT == 8 else bit & 31, first + 3


@triton.jit
def next_bytes(
    s, words, last, units, begin, table, table_ptr, UNIT: tl.constexpr, PTX: tl.constexpr
):
    """The bytes of units number `begin` and on of runs, uint8, [RUNS, AT_ONCE]; and the state.

    With units of 8 bytes the state's fourth part, the bit, counts from the start of `words`.
    """
    found = ()
    if UNIT == 8:
        low, high, more, n, ahead = s
        zero = tl.load(table_ptr).to(tl.uint32)
        differs = tl.load(table_ptr + 1).to(tl.uint32) ^ zero
        zero = zero * 0x01010101
        for j in tl.static_range(2):
            live = begin + j < units
            a, b, n = _next_eight(n, words, last, live, table, zero, differs, PTX)
            found = found + (a, b)
        s = low, high, more, n, ahead
    else:
        PER: tl.constexpr = 4 // UNIT
        for w in tl.static_range(4):
            word, s = _next_unit(s, words, last, begin + w * PER < units, table, UNIT, PTX)
            for j in tl.static_range(1, PER):
                live = begin + w * PER + j < units
                value, s = _next_unit(s, words, last, live, table, UNIT, PTX)
                word |= value << (j * 8 * UNIT)
            found = found + (word,)
    return _bytes_of(found[0], found[1], found[2], found[3]), s
