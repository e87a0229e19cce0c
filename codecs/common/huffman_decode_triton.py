# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment,misc"
"""Blocks of codecs/common/huffman.py decoded on a GPU: a program takes TILES tiles, a lane a run.

These tiles have a table in common, which lies in shared memory once for all of them, so that all
lanes of a large tensor fit on the device. Every look-up waits for the one before: the rest of a
step is as short as can be. No step waits for memory: PTX copies the words of codes to a ring of
each lane in shared memory long before they are needed. Lanes keep what they have decoded in words
until there are enough for accesses of memory side by side, for which words then change lanes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import huffman
from .huffman_tables_triton import IS_ESCAPE, SORTED, TAKES_AT, look_up
from .huffman_triton import CONSTANT, NARROW, RUN, RUNS, STORED, WIDE
from .minifloat_triton import by_ptx, funnel

#: Tiles of a program, and their runs.
TILES = tl.constexpr(8)
LANES = tl.constexpr(TILES.value * RUNS.value)
#: Words of a plane that lanes decode between accesses of memory, and where runs are not whole.
WORDS, EDGE_WORDS = tl.constexpr(8), tl.constexpr(2)
_CODES = tl.constexpr(1 << huffman.LIMIT)
#: Bytes of a lane's ring, four parts of 16 bytes, and where rings are: behind the table.
_RING, _RINGS_AT = tl.constexpr(64), tl.constexpr(4 * (_CODES.value + SORTED.value))
#: Bytes of shared memory.
DECODING = tl.constexpr(str(_RINGS_AT.value + _RING.value * LANES.value))
#: `_copy_part` in PTX: $1 the ring, $2 the codes, $3 the part, $4 the last word.
_COPY_PART = tl.constexpr(
    f"""{{
    .reg .b32 at;
    .reg .b64 from;
    .reg .pred here;
    shl.b32 at, $3, 2;
    setp.le.s32 here, at, $4;
    shl.b32 at, $3, 4;
    and.b32 at, at, {_RING.value - 16};
    add.u32 at, at, $1;
    mul.wide.s32 from, $3, 16;
    add.s64 from, from, $2;
    @here cp.async.cg.shared.global [at], [from], 16;
    mov.u32 $0, $3;
    }}"""
)
#: `_next_unit` in PTX, in one piece: how long Triton compiles a kernel grows by the square of its
#: operations. $0 to $4: the value, and of the state two words, the next, and the bit; $5 to $8: the
#: state before; $9 the ring, $10 the table, $11 whether the lane is live.
_NEXT_UNIT = tl.constexpr(
    f"""{{
    .reg .b32 window, entry, raw, takes, differ, at;
    .reg .pred escaped, cross;
    shf.r.wrap.b32 window, $5, $6, $8;
    and.b32 at, window, {(_CODES.value - 1) * 4};
    add.u32 at, at, $10;
    ld.shared.b32 entry, [at];
    shf.r.wrap.b32 raw, window, 0, entry;
    and.b32 at, entry, {IS_ESCAPE.value};
    setp.ne.u32 escaped, at, 0;
    selp.b32 $0, raw, entry, escaped;
    shr.u32 takes, entry, {TAKES_AT.value};
    mul.lo.u32 takes, takes, $11;
    add.u32 $4, $8, takes;
    xor.b32 differ, $4, $8;
    setp.gt.u32 cross, differ, 31;
    selp.b32 $1, $6, $5, cross;
    selp.b32 $2, $7, $6, cross;
    shr.u32 at, $4, 3;
    and.b32 at, at, {_RING.value - 4};
    or.b32 at, at, $9;
    mov.b32 $3, $7;
    @cross ld.shared.b32 $3, [at];
    }}"""
)
_NEXT_LIVE_UNIT = tl.constexpr(_NEXT_UNIT.value.replace("mul.lo.u32 takes, takes, $11;", ""))


@triton.jit
def of_tiles(v):
    """What lanes have, [TILES, RUNS]."""
    return tl.reshape(v, [TILES, RUNS])


@triton.jit
def one_of_tile(v):
    """What all lanes of a tile have, [TILES]."""
    return tl.max(of_tiles(v), 1)


@triton.jit
def of_lanes(v):
    """What tiles have, [TILES], for each lane."""
    return tl.reshape(tl.broadcast_to(v[:, None], [TILES, RUNS]), [LANES])


@triton.jit
def any_of_tile(found):
    """Whether a lane of the tile has found something."""
    return of_lanes(tl.max(of_tiles(found.to(tl.int32)), 1)) > 0


@triton.jit
def any_between(data, start, end, use):
    """Whether one of less than 8 bytes `start` to `end` of a tile's data is not zero."""
    i = start + tl.arange(0, LANES) % RUNS
    return any_of_tile(tl.load(data + i, mask=use & (i < end), other=0) != 0)


@triton.jit
def open_block(data, at, stop, m, use):
    """Read the heads of blocks at bytes `at` of tiles' data, which end by `stop`, where `use`.

    (mode, value, first bit of the lane's run and that behind it; end of the block; whether it is
    wrong.) All are the same for all lanes of a tile but for the bits.
    """
    run = tl.arange(0, LANES) % RUNS
    runs = (m + (RUN - 1)) // RUN
    there = use & (at + 4 <= stop)
    head = tl.load((data + at).to(tl.pointer_type(tl.uint32)), mask=there, other=4)
    head = head.to(tl.int32, bitcast=True)
    mode, value, base = head & 255, (head >> 8) & 255, (head >> 16) & 0xFFFF
    bad = (mode > WIDE) | ((value != 0) & (mode != CONSTANT)) | ((base != 0) & (mode != NARROW))
    coded = (mode >= NARROW) & (bad == 0)
    width = tl.where(mode == NARROW, 1, 2)
    used = runs * width
    listed = tl.where(coded, (used + 3) // 4 * 4, 0)
    fits = coded & (at + 4 + listed <= stop)
    mine = fits & (run < runs)
    sizes_ptr = data + (at + 4)
    sizes = tl.load(sizes_ptr + run * width, mask=mine, other=0).to(tl.int32)
    upper = tl.load(sizes_ptr + (run * 2 + 1), mask=mine & (mode == WIDE), other=0).to(tl.int32)
    sizes = tl.where(mine, sizes + (upper << 8) + base, 0)
    gap = tl.load(sizes_ptr + (used + run), mask=fits & (used + run < listed), other=0) != 0
    ends = tl.reshape(tl.cumsum(of_tiles(sizes), 1), [LANES])
    bits = of_lanes(tl.sum(of_tiles(sizes), 1))
    nbytes = tl.where(coded, listed + (bits + 31) // 32 * 4, 0)
    nbytes = tl.where(mode == STORED, (m + 3) // 4 * 4, nbytes)
    end = at + 4 + nbytes
    bad = bad | (there == 0) | (coded & (fits == 0)) | (end > stop)
    # Zeros behind the last run, or the last byte that is stored.
    odd = coded & (bits % 32 != 0) & (bad == 0)
    last = tl.load((data + (end - 4)).to(tl.pointer_type(tl.uint32)), mask=odd, other=0)
    gap = gap | (odd & ((last >> (bits % 32).to(tl.uint32)) != 0))
    stored = (mode == STORED) & (bad == 0)
    bad = bad | any_of_tile(gap) | any_between(data, at + 4 + m, end, stored)
    begin = 8 * (at + 4 + listed)
    return mode, value, begin + ends - sizes, begin + ends, end, bad


@triton.jit
def _entry_at(table, window, PTX: tl.constexpr):
    """The entry of 12 bits, which start at bit 2 of `window`, uint32."""
    if PTX:
        return tl.inline_asm_elementwise(
            "ld.shared.b32 $0, [$1];",
            "=r,r",
            (table + (window & ((_CODES - 1) * 4)).to(tl.int32, bitcast=True),),
            dtype=tl.uint32,
            is_pure=False,
            pack=1,
        )
    else:
        at = (window >> 2) & (_CODES - 1)
        return look_up(table, at.to(tl.int32), PTX).to(tl.uint32, bitcast=True)


@triton.jit
def _copy_part(ring, source, part, last):
    """Begin to copy the part number `part` of 16 bytes of a lane's codes to its ring, if it starts
    by word number `last`.
    """
    tl.inline_asm_elementwise(
        _COPY_PART,
        "=r,r,l,r,r",
        (ring, source.to(tl.int64), part, last),
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _wait_parts(ring, PENDING: tl.constexpr):
    """Wait for what was copied but for the latest PENDING times of waiting."""
    tl.inline_asm_elementwise(
        "cp.async.commit_group; cp.async.wait_group " + PENDING + "; mov.u32 $0, $1;",
        "=r,r",
        (ring,),
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _next_part(s, ring, words, last, PTX: tl.constexpr):
    """Copy one more part to the ring, if one is free; the state."""
    if PTX:
        low, high, more, n, part = s
        # The part of the next word is read from, the three behind it are there or on their way.
        free = part < (n >> 7) + 4
        _copy_part(ring, words, part, tl.where(free, last, -1))
        _wait_parts(ring, "2")
        s = low, high, more, n, part + free.to(tl.int32)
    return s


@triton.jit
def _next_unit(s, ring, words, last, live, table, EDGE: tl.constexpr, PTX: tl.constexpr):
    """A unit's value in the low bits of a word, and the state behind it: see `open_runs`."""
    low, high, more, n, part = s
    if PTX:
        value, low, high, more, after = tl.inline_asm_elementwise(
            _NEXT_UNIT if EDGE else _NEXT_LIVE_UNIT,
            "=&r,=&r,=&r,=&r,=&r,r,r,r,r,r,r,r",
            (low, high, more, n, ring, table, live.to(tl.int32)),
            dtype=(tl.uint32, tl.uint32, tl.uint32, tl.uint32, tl.int32),
            is_pure=False,
            pack=1,
        )
    else:
        window = funnel(low, high, n, PTX)
        entry = _entry_at(table, window, PTX)
        raw = funnel(window, window * 0, entry, PTX)
        value = tl.where((entry & IS_ESCAPE) != 0, raw, entry)
        takes = (entry >> TAKES_AT).to(tl.int32)
        after = n + (tl.where(live, takes, 0) if EDGE else takes)
        # A code and 2 bytes are at most 28 bits.
        cross = (after ^ n).to(tl.uint32, bitcast=True) > 31
        low, high = tl.where(cross, high, low), tl.where(cross, more, high)
        more = tl.load(words + (after >> 5), mask=cross & (after >> 5 <= last), other=more)
    return value, (low, high, more, after, part)


@triton.jit
def _word_at(words, n, last, use, PTX: tl.constexpr):
    """32 bits from bit `n` on, uint32. Words behind number `last` are taken for it."""
    low = tl.load(words + tl.minimum(n >> 5, last), mask=use, other=0)
    high = tl.load(words + tl.minimum((n >> 5) + 1, last), mask=use, other=0)
    return funnel(low, high, n, PTX)


@triton.jit
def _next_eight(n, words, last, live, table, table_ptr, PTX: tl.constexpr):
    """(lower and upper 4 bytes of a unit of 8, the bit behind it)."""
    zero = tl.load(table_ptr).to(tl.uint32)
    differs = tl.load(table_ptr + 1).to(tl.uint32) ^ zero
    zero = zero * 0x01010101
    entry = _entry_at(table, _word_at(words, n, last, live, PTX) << 2, PTX)
    escaped = live & ((entry & IS_ESCAPE) != 0)
    n += tl.where(live, (entry >> TAKES_AT).to(tl.int32), 0)
    # Four bits to a byte each.
    low, high = entry & 15, (entry >> 4) & 15
    low = (low | (low << 7) | (low << 14) | (low << 21)) & 0x01010101
    high = (high | (high << 7) | (high << 14) | (high << 21)) & 0x01010101
    low = tl.where(escaped, _word_at(words, n, last, escaped, PTX), zero ^ (low * differs))
    high = tl.where(escaped, _word_at(words, n + 32, last, escaped, PTX), zero ^ (high * differs))
    return low, high, n + tl.where(escaped, 64, 0)


@triton.jit
def open_runs(data, bit, size, use, memory, UNIT: tl.constexpr, PTX: tl.constexpr):
    """(state of `next_words` at bits `bit` of tiles' data; lanes' rings; words and number of the
    last one as it takes them).

    The state is two words and the one behind them, a bit of the latter, and the next part to copy.
    That bit is as far behind the start of its word as the place two bits before the next unit is
    behind the start of the first: entries have 4 bytes. With units of 8 bytes only the number of
    the bit counts: it is that of the next unit's first bit in all.
    """
    ring = memory + _RINGS_AT + tl.arange(0, LANES) * _RING
    if UNIT == 8:
        last = tl.where(use, size // 4 - 1, -1)
        low = bit.to(tl.uint32)
        return (low, low, low, bit, bit), ring, data.to(tl.pointer_type(tl.uint32)), last
    else:
        if PTX:
            # Parts are where 16 bytes are in memory. Data have 8 bytes and more on both sides: the
            # index, and zeros at the end.
            odd = (data.to(tl.int64) & 8).to(tl.int32)
            data, bit, size = data - odd, bit + odd * 8, size + odd
        last = tl.where(use, size // 4 - 1, -1)
        words = data.to(tl.pointer_type(tl.uint32))
        # Something is before a run: a block starts with its head.
        n = bit - 2
        at = n >> 5
        low = tl.load(words + tl.minimum(at, last), mask=use, other=0)
        high = tl.load(words + tl.minimum(at + 1, last), mask=use, other=0)
        more = tl.load(words + tl.minimum(at + 2, last), mask=use, other=0)
        n += 64
        part = n >> 7
        if PTX:
            for _ in tl.static_range(4):
                _copy_part(ring, words, part, last)
                part += 1
            _wait_parts(ring, "0")
        return (low, high, more, n, part), ring, words, last


@triton.jit
def close_runs(ring, PTX: tl.constexpr):
    """Wait until nothing more is copied to rings."""
    if PTX:
        _wait_parts(ring, "0")


@triton.jit
def interleaved(a, b, PTX: tl.constexpr):
    """Bytes 0, 1 of words by turns, and bytes 2, 3."""
    if PTX:
        low = by_ptx("prmt.b32 $0, $1, $2, 0x5140;", "=r,r,r", (a, b))
        high = by_ptx("prmt.b32 $0, $1, $2, 0x7362;", "=r,r,r", (a, b))
    else:
        low = (a & 255) | ((a & 0xFF00) << 8) | ((b & 255) << 8) | ((b & 0xFF00) << 16)
        a, b = a >> 16, b >> 16
        high = (a & 255) | ((a & 0xFF00) << 8) | ((b & 255) << 8) | ((b & 0xFF00) << 16)
    return low, high


@triton.jit
def _rows_of(found, COUNT: tl.constexpr, FIRST: tl.constexpr, EVERY: tl.constexpr):
    """COUNT of the words of lanes, from number FIRST on, side by side."""
    if COUNT == 1:
        return found[FIRST]
    else:
        return tl.join(
            _rows_of(found, COUNT // 2, FIRST, EVERY * 2),
            _rows_of(found, COUNT // 2, FIRST + EVERY, EVERY * 2),
        )


@triton.jit
def next_words(
    s, ring, words, last, begin, count, use, table, table_ptr,
    W: tl.constexpr, UNIT: tl.constexpr, EDGE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """The next W words of runs of `count` bytes, from byte `begin` on, [TILES, RUNS, W], zeros
    where not in `use`; the state.

    Runs end where a multiple of 1024 does unless EDGE.
    """
    found = ()
    units = (count - begin + (UNIT - 1)) // UNIT
    if UNIT == 8:
        low, high, more, n, part = s
        for j in tl.static_range(W // 2):
            live = use & (j < units)
            a, b, n = _next_eight(n, words, last, live, table, table_ptr, PTX)
            found = found + (a, b)
        s = low, high, more, n, part
    else:
        PER: tl.constexpr = 4 // UNIT
        for w in tl.static_range(W):
            # Four units take less than a part.
            if w * PER % 4 == 0:
                s = _next_part(s, ring, words, last, PTX)
            a, s = _next_unit(s, ring, words, last, w * PER < units, table, EDGE, PTX)
            b, s = _next_unit(s, ring, words, last, w * PER + 1 < units, table, EDGE, PTX)
            if UNIT == 1:
                c, s = _next_unit(s, ring, words, last, w * PER + 2 < units, table, EDGE, PTX)
                d, s = _next_unit(s, ring, words, last, w * PER + 3 < units, table, EDGE, PTX)
                a, _ = interleaved(a, b, PTX)
                b, _ = interleaved(c, d, PTX)
            found = found + ((a & 0xFFFF) | (b << 16),)
    rows = tl.reshape(_rows_of(found, W, 0, 1), [LANES, W])
    rows &= tl.where(use, 0xFFFFFFFF, 0).to(tl.uint32)[:, None]
    return tl.reshape(rows, [TILES, RUNS, W]), s
