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
from .huffman_tables_triton import BITS_AT, ENTRIES, ESCAPED, byte_of, look_up

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
def _of_runs(m):
    """Elements of the runs of a tile of `m`."""
    return tl.minimum(tl.maximum(m - tl.arange(0, RUNS) * RUN, 0), RUN)


@triton.jit
def _columns(v):
    """What lanes have, of 2, 4, 8 or 16 columns, one by one."""
    N: tl.constexpr = v.shape[1]
    even, odd = tl.split(tl.reshape(v, [RUNS, N // 2, 2]))
    if N == 2:
        return tl.reshape(even, [RUNS]), tl.reshape(odd, [RUNS])
    else:
        a, b = _columns(even), _columns(odd)
        found = ()
        for j in tl.static_range(N // 2):
            found = found + (a[j], b[j])
        return found


@triton.jit
def _bytes_of(a, b, c, d):
    """The bytes of four words of each lane, uint8, [RUNS, AT_ONCE]."""
    words = tl.join(tl.join(a, c), tl.join(b, d))
    b0, b1 = (words & 255).to(tl.uint8), ((words >> 8) & 255).to(tl.uint8)
    b2, b3 = ((words >> 16) & 255).to(tl.uint8), ((words >> 24) & 255).to(tl.uint8)
    return tl.reshape(tl.join(tl.join(b0, b2), tl.join(b1, b3)), [RUNS, AT_ONCE])


@triton.jit
def _words_of(bytes):
    """Inverse of `_bytes_of`, of int32: words, int32, [RUNS, 4]."""
    even, odd = tl.split(tl.reshape(bytes, [RUNS, AT_ONCE // 2, 2]))
    a, c = tl.split(tl.reshape(even, [RUNS, AT_ONCE // 4, 2]))
    b, d = tl.split(tl.reshape(odd, [RUNS, AT_ONCE // 4, 2]))
    return a | (b << 8) | (c << 16) | (d << 24)


# Encoding


@triton.jit
def load_block(x, i, m, full):
    """Elements `i` of `m`, the last one behind them; all are there if `full`."""
    if full:
        v = tl.load(x + i)
    else:
        v = tl.load(x + tl.minimum(i, m - 1))
    return v


@triton.jit
def _entries_of(bytes, table, UNIT: tl.constexpr, PTX: tl.constexpr):
    """The entries of units of the bytes of lanes, [RUNS, AT_ONCE // UNIT]."""
    if UNIT == 1:
        return look_up(table, bytes, PTX)
    else:
        c = look_up(table, ENTRIES + bytes, PTX)
        # Where a byte has no class the symbol is beyond those of units.
        if UNIT == 2:
            first, second = tl.split(tl.reshape(c, [RUNS, AT_ONCE // 2, 2]))
            symbol = first + (second << 4)
        else:
            c = c << (tl.arange(0, AT_ONCE) % 8)[None, :]
            symbol = tl.sum(tl.reshape(c, [RUNS, AT_ONCE // 8, 8]), 2)
        return look_up(table, tl.minimum(symbol, _ESCAPE), PTX)


@triton.jit
def measure_block(
    x, m, full, table, k, UNIT: tl.constexpr, ITEM: tl.constexpr, ROTATED: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """(sizes of runs in bits, head of the block of plane `k` of a tile, its bytes)."""
    first = byte_of(tl.load(x), k, ITEM, ROTATED)
    UNITS: tl.constexpr = AT_ONCE // UNIT
    units = (_of_runs(m) + (UNIT - 1)) // UNIT
    sizes = tl.zeros([RUNS, UNITS], tl.int32)
    missing = tl.zeros([RUNS, UNITS], tl.int32)
    other = tl.zeros([RUNS, AT_ONCE], tl.int32)
    for at in range(0, tl.minimum(m, RUN), AT_ONCE):
        i = block_of(at)
        # Behind the end of a run are bytes of the next, or its own last one.
        bytes = byte_of(load_block(x, i, m, full), k, ITEM, ROTATED)
        other |= bytes ^ first
        entry = _entries_of(bytes, table, UNIT, PTX)
        live = (at // UNIT + tl.arange(0, UNITS))[None, :] < units[:, None]
        length = (entry >> BITS_AT) & 15
        escaped = (entry & ESCAPED) != 0
        sizes += tl.where(live, length + tl.where(escaped, 8 * UNIT, 0), 0)
        missing |= (live & escaped & (length == 0)).to(tl.int32)
    sizes = tl.sum(sizes, 1)
    runs = (m + (RUN - 1)) // RUN
    mine = tl.arange(0, RUNS) < runs
    most = tl.max(tl.where(mine, sizes, 0), 0)
    least = tl.min(tl.where(mine, sizes, 1 << 30), 0)
    narrow = most - least < 256
    listed = padded(runs * tl.where(narrow, 1, 2), 4)
    nbytes = listed + (tl.sum(sizes, 0) + 31) // 32 * 4
    stored = padded(m, 4)
    is_stored = (nbytes >= stored) | (tl.max(tl.max(missing, 1), 0) > 0)
    head = tl.where(narrow, NARROW | (least << 16), WIDE)
    head = tl.where(is_stored, STORED, head)
    nbytes = tl.where(is_stored, stored, nbytes)
    is_constant = tl.max(tl.max(other, 1), 0) == 0
    head = tl.where(is_constant, CONSTANT | (first << 8), head)
    return sizes, head, tl.where(is_constant, 0, nbytes) + 4


@triton.jit
def _append(word, n, start, at, head, bits, length, out):
    """Append up to 31 bits to those of lanes, `n` & 31 of a word; (word, n, at, head).

    A word that a run shares with the one before is not stored, but kept as its `head`.
    """
    word |= bits << (n & 31)
    after = n + length
    full = ((n ^ after) & 32) != 0
    own = (n >= 32) | (start == 0)
    tl.store(out + at, word.to(tl.int32, bitcast=True), mask=full & own)
    head = tl.where(full & (own == 0), word, head)
    word = tl.where(full, (bits >> 1) >> (31 - (n & 31)), word)
    return word, after, at + full.to(tl.int32), head


@triton.jit
def write_block(
    x, m, full, table, sizes, head_word, nbytes, out_ptr, k,
    UNIT: tl.constexpr, ITEM: tl.constexpr, ROTATED: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Write the block that `measure_block` found."""
    tl.store(out_ptr.to(tl.pointer_type(tl.int32)), head_word)
    mode = head_word & 255
    if mode == STORED:
        write_plane(x, m, full, nbytes - 4, out_ptr + 4, k, ITEM, ROTATED)
    if mode >= NARROW:
        run = tl.arange(0, RUNS)
        runs = (m + (RUN - 1)) // RUN
        narrow = mode == NARROW
        listed = padded(runs * tl.where(narrow, 1, 2), 4)
        size = tl.where(run < runs, sizes - tl.where(narrow, (head_word >> 16) & 0xFFFF, 0), 0)
        if narrow:
            tl.store(out_ptr + 4 + run, size.to(tl.uint8), mask=run < listed)
        else:
            pairs = (out_ptr + 4).to(tl.pointer_type(tl.uint16))
            tl.store(pairs + run, size.to(tl.uint16), mask=2 * run < listed)
        out = (out_ptr + 4 + listed).to(tl.pointer_type(tl.int32))
        start = tl.cumsum(sizes, 0) - sizes
        at = start >> 5
        start = start & 31
        n = start
        word = tl.zeros([RUNS], tl.uint32)
        head = tl.zeros([RUNS], tl.uint32)
        units = (_of_runs(m) + (UNIT - 1)) // UNIT
        UNITS: tl.constexpr = AT_ONCE // UNIT
        PER: tl.constexpr = 4 // UNIT if UNIT < 8 else 1
        for begin in range(0, tl.minimum(m, RUN), AT_ONCE):
            bytes = byte_of(load_block(x, block_of(begin), m, full), k, ITEM, ROTATED)
            entries = _columns(_entries_of(bytes, table, UNIT, PTX))
            raws = _columns(_words_of(bytes))
            for j in tl.static_range(UNITS):
                live = begin // UNIT + j < units
                entry = tl.where(live, entries[j], 0)
                length = entry >> BITS_AT
                escaped = (entry & ESCAPED) != 0
                bits = (entry & (_CODES - 1)).to(tl.uint32)
                if UNIT < 8:
                    raw = (raws[j // PER] >> (j % PER * 8 * UNIT)) & ((1 << (8 * UNIT)) - 1)
                    bits |= tl.where(escaped, raw, 0).to(tl.uint32) << length
                    length += tl.where(escaped, 8 * UNIT, 0)
                    word, n, at, head = _append(word, n, start, at, head, bits, length, out)
                else:
                    word, n, at, head = _append(word, n, start, at, head, bits, length, out)
                    for half in tl.static_range(4):
                        raw = (raws[2 * j + half // 2] >> (half % 2 * 16)) & 0xFFFF
                        bits = tl.where(escaped, raw, 0).to(tl.uint32)
                        length = tl.where(escaped, 16, 0)
                        word, n, at, head = _append(word, n, start, at, head, bits, length, out)
        # A run ends in a word that the next one may share. Only the last run can be so short that
        # it ends in the word in which it starts.
        own = (n >= 32) | (start == 0)
        head = tl.where(own, head, word)
        following = tl.gather(head, (run + 1) % RUNS, 0)
        word |= tl.where((run + 1 < runs) & ((n & 31) != 0), following, 0)
        last = (run < runs) & own & ((n & 31) != 0)
        tl.store(out + at, word.to(tl.int32, bitcast=True), mask=last)


@triton.jit
def write_plane(x, m, full, nbytes, out_ptr, k, ITEM: tl.constexpr, ROTATED: tl.constexpr):
    """Write byte `k` of the elements of a tile, and zeros up to `nbytes`."""
    for at in range(0, tl.minimum(nbytes, RUN), AT_ONCE):
        i = block_of(at)
        if full:
            byte = byte_of(tl.load(x + i), k, ITEM, ROTATED)
            tl.store(out_ptr + i, byte.to(tl.uint8))
        else:
            byte = byte_of(tl.load(x + i, mask=i < m, other=0), k, ITEM, ROTATED)
            tl.store(out_ptr + i, byte.to(tl.uint8), mask=i < nbytes)
