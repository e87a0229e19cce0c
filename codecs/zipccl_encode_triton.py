# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment,misc"
"""Encoding of zipccl on a GPU: windows, blocks and escapes of tiles, and groups of them."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .common.frame_triton import clear, key_of, record_term, weigh, weigh_bytes, weigh_from
from .common.launch_triton import options
from .common.runs_triton import transpose_bits
from .zipccl import TILE
from .zipccl_words_triton import (
    ANY_TILE,
    HIGH,
    LANES,
    LOW7,
    ONES,
    WIDTH,
    columns_of,
    exponents,
    heads,
    items,
    lanes,
    load4,
    load4_aligned,
    popc,
    real_of,
    rest,
    terms_of,
    terms_of_pairs,
    weigh_items,
)

_TILE = tl.constexpr(TILE)


@triton.jit
def _highest_bit(word):
    """The number of the highest bit that is set; something below 0 if there is none."""
    # Without the bits behind set ones no rounding comes to the next power of two.
    value = (word & ~(word >> 1)).to(tl.float32)
    return (value.to(tl.int32, bitcast=True) >> 23) - 127


@triton.jit
def _better(best, entry, coded, base, gain):
    """The window so far, or this one if it codes more."""
    coded += tl.maximum(gain, 0)
    entry = tl.where(coded > best, base | tl.where(gain > 0, 32768, 0), entry)
    return tl.maximum(best, coded), entry


@triton.jit
def _sample_window(x_ptr, start, L: tl.constexpr):
    """Index entry of a whole tile that starts at element `start`, aligned to four elements."""
    k = lanes()
    span = k // 4
    at = span * 32 + (span % 8) * 4 + k % 4
    if L.item == 1:
        a = tl.load(x_ptr.to(tl.pointer_type(tl.uint32)) + start // 4 + at)
        b = a
    elif L.item == 2:
        words = tl.load(x_ptr.to(tl.pointer_type(tl.uint64)) + start // 4 + at)
        a = words.to(tl.uint32)
        b = (words >> 32).to(tl.uint32)
    else:
        x64 = x_ptr.to(tl.pointer_type(tl.uint64)) + start // 2 + 2 * at
        left = tl.load(x64)
        right = tl.load(x64 + 1)
        v0, v2 = left.to(tl.uint32), right.to(tl.uint32)
        a, b, _ = heads(v0, (left >> 32).to(tl.uint32), v2, (right >> 32).to(tl.uint32), 4)
    e = exponents(a, b, L)
    s0 = (e & 255).to(tl.int32)
    s1 = ((e >> 8) & 255).to(tl.int32)
    s2 = ((e >> 16) & 255).to(tl.int32)
    s3 = (e >> 24).to(tl.int32)
    samples = (s0, s1, s2, s3)
    if L.exponent < 8:
        # Which of the 32 exponents there are. The largest word has the highest bit of all.
        one = tl.full([LANES], 1, tl.uint32)
        there = (one << s0.to(tl.uint32)) | (one << s1.to(tl.uint32))
        there |= (one << s2.to(tl.uint32)) | (one << s3.to(tl.uint32))
        top = _highest_bit(tl.max(there, 0))
        zeros = tl.sum(popc(~(e + LOW7) & HIGH, L.ptx).to(tl.int32), 0)
    else:
        top = tl.max(tl.maximum(tl.maximum(s0, s1), tl.maximum(s2, s3)), 0)
        zeros = (s0 == 0).to(tl.int32) + (s1 == 0).to(tl.int32)
        zeros = tl.sum(zeros + (s2 == 0).to(tl.int32) + (s3 == 0).to(tl.int32), 0)
    best = top * 0 - 1
    entry = top * 0
    steps = top * 0
    while steps < 16:
        base = tl.maximum(top - 6, 0)
        # Three counts of at most 512 in one word: coded, equal to the base, below the top.
        c = tl.zeros([LANES], tl.int32)
        h = tl.zeros([LANES], tl.int32)
        if L.exponent < 8:
            # Four at once: bit 7 of a byte is clear where its exponent counts.
            d = (e + ((32 - base) * ONES).to(tl.uint32)) & 0x1F1F1F1F
            c += popc(~(d + 0x79797979) & HIGH, L.ptx).to(tl.int32)
            c += popc(~(d + LOW7) & HIGH, L.ptx).to(tl.int32) << 10
            above = e + ((128 - top) * ONES).to(tl.uint32)
            c += popc(~above & HIGH, L.ptx).to(tl.int32) << 20
            below = there & ((top.to(tl.uint32) * 0 + 1 << top.to(tl.uint32)) - 1)
        else:
            for q in tl.static_range(4):
                v = samples[q]
                d = v - base
                under = v < top
                c += ((d >= 0) & (d < 7)).to(tl.int32) + ((d == 0).to(tl.int32) << 10)
                c += under.to(tl.int32) << 20
                h = tl.maximum(h, tl.where(under, v, 0))
        total = tl.sum(c, 0)
        gain = tl.where(base > 0, zeros - ((total >> 10) & 1023), 0)
        best, entry = _better(best, entry, total & 1023, base, gain)
        steps = tl.where((total >> 20) <= best, 16, steps + 1)
        if L.exponent < 8:
            top = _highest_bit(tl.max(below, 0))
        else:
            top = tl.max(h, 0)
    return entry


@triton.jit
def _histogram_window(x_ptr, start, valid, L: tl.constexpr):
    """Index entry of any tile of `valid` elements, at any address."""
    x = items(x_ptr, L.item) + start
    BINS: tl.constexpr = 1 << L.exponent
    bins = tl.arange(0, BINS)
    h = tl.zeros([BINS], tl.int32)
    left_out = valid * 0
    for row in range(0, 8):
        i = row * WIDTH + tl.arange(0, WIDTH)
        use = (i < valid) & (tl.where(valid < _TILE, 0, ((i >> 4) ^ (i >> 7)) & 7) == 0)
        v = tl.load(x + i, mask=use, other=0).to(tl.int32)
        h += tl.histogram((v >> L.mantissa) & (BINS - 1), BINS)
        left_out += tl.sum((use == 0).to(tl.int32), 0)
    h -= tl.where(bins == 0, left_out, 0)
    zeros = tl.sum(tl.where(bins == 0, h, 0), 0)
    top = tl.max(tl.where(h > 0, bins, 0), 0)
    best = top * 0 - 1
    entry = top * 0
    steps = top * 0
    while steps < 16:
        base = tl.maximum(top - 6, 0)
        coded = tl.sum(tl.where((bins >= base) & (bins < base + 7), h, 0), 0)
        at_base = tl.sum(tl.where(bins == base, h, 0), 0)
        gain = tl.where(base > 0, zeros - at_base, 0)
        best, entry = _better(best, entry, coded, base, gain)
        below = tl.sum(tl.where(bins < top, h, 0), 0)
        steps = tl.where(below <= best, 16, steps + 1)
        top = tl.max(tl.where((bins < top) & (h > 0), bins, 0), 0)
    return entry


@triton.jit
def choose_window(x_ptr, start, valid, FULL: tl.constexpr, L: tl.constexpr):
    """Index entry of a tile; FULL: of one that is whole and aligned."""
    if FULL:
        return _sample_window(x_ptr, start, L)
    else:
        return _histogram_window(x_ptr, start, valid, L)


@triton.jit
def load_rows(x_ptr, start, valid, FULL: tl.constexpr, L: tl.constexpr):
    """The rows of a tile as `heads` gives them, and how many elements of each lane are real."""
    lane = lanes()
    cols = columns_of(valid)
    rows = ()
    for r in tl.static_range(8):
        if FULL:
            a, b, low = load4_aligned(x_ptr, start + r * WIDTH, L.item)
            ok = lane
        else:
            i = r * cols + 4 * lane
            ok = real_of(i, cols, valid)
            v0, v1, v2, v3 = load4(x_ptr, start + i, ok, L.item)
            a, b, low = heads(v0, v1, v2, v3, L.item)
        rows = rows + ((a, b, low, ok),)
    return rows


@triton.jit
def _escaped(e, b4, base, ZERO: tl.constexpr, L: tl.constexpr):
    """Which of four exponents are escapes, by bit 7 of each byte, and their codes, 3 bits and more.

    ZERO: code `base` stands for 0.
    """
    b7 = b4 & LOW7
    if L.exponent < 8:
        # Differences modulo 32 in the lower bits: below the base they are above 6 too.
        d = (e + ((32 - base) * ONES)) & 0x1F1F1F1F
        escaped = d + 0x79797979
        above = d + LOW7
    else:
        d = ((e | HIGH) - b7) ^ ((e ^ ~b4) & HIGH)
        escaped = ((d & LOW7) + 0x79797979) | d
        above = ((d & LOW7) + LOW7) | d
    if ZERO:
        nonzero = ((e & LOW7) + LOW7) | e
        escaped = (escaped | ~above) & nonzero
        all_ones = ((nonzero >> 7) & ONES) * 255
        e = (e & all_ones) | (b4 & ~all_ones)
    return escaped, e


@triton.jit
def _planes_of(es, xs, b4, base, ZERO: tl.constexpr, L: tl.constexpr):
    """(Escapes' bits, planes of codes, and if they are `turned` of extra bits) of a tile's rows."""
    f = tl.zeros([LANES], tl.uint32)
    if L.turned:
        # Bit 6, the highest of the exponent, says which are escapes.
        MAN: tl.constexpr = L.mantissa
        CODE: tl.constexpr = (7 << MAN) * ONES
        OTHERS: tl.constexpr = (255 - (7 << MAN)) * ONES
        rows = ()
        for r in tl.static_range(8):
            escaped, code = _escaped(es[r], b4, base, ZERO, L)
            x = xs[r]
            if ZERO:
                x = (x & OTHERS) | ((code << MAN) & CODE)
            rows = rows + ((x & 0xBFBFBFBF) | ((escaped >> 1) & 0x40404040),)
        turned = transpose_bits(rows, 3)
        f = turned[6]
        planes = (turned[MAN], turned[MAN + 1], turned[MAN + 2])
        for k in tl.static_range(MAN):
            planes = planes + (turned[k],)
        planes = planes + (turned[7],)
    else:
        p0 = f
        p1 = f
        p2 = f
        for r in tl.static_range(8):
            escaped, code = _escaped(es[r], b4, base, ZERO, L)
            f |= ((escaped >> 7) & ONES) << r
            p0 |= (code & ONES) << r
            p1 |= ((code >> 1) & ONES) << r
            p2 |= ((code >> 2) & ONES) << r
        planes = (p0, p1, p2)
    return f, planes


@triton.jit
def _picked(rows, number):
    """Row `number` % 8 of eight."""
    odd, pair, half = (number & 1) != 0, (number & 2) != 0, (number & 4) != 0
    low = tl.where(pair, tl.where(odd, rows[3], rows[2]), tl.where(odd, rows[1], rows[0]))
    high = tl.where(pair, tl.where(odd, rows[7], rows[6]), tl.where(odd, rows[5], rows[4]))
    return tl.where(half, high, low)


@triton.jit
def encode_tile(rows, valid, block_ptr, slot_ptr, entry, word, FULL: tl.constexpr, L: tl.constexpr):
    """Write one tile's block, and its escapes to its slot: (escapes, checksum terms).

    `word` is the block's position in the static part in words. FULL: 4096 elements, aligned.
    """
    ITEM: tl.constexpr = L.item
    EXTRA: tl.constexpr = (1 + L.mantissa) % 8
    lane = lanes()
    zero_mode = entry >= 32768
    base = (entry & 32767).to(tl.uint32)
    b4 = base * ONES
    if FULL:
        W: tl.constexpr = WIDTH
        inside = None
    else:
        W = columns_of(valid)
        inside = 4 * lane < W
    row_words = W // 4
    block32 = block_ptr.to(tl.pointer_type(tl.uint32))
    block64 = block_ptr.to(tl.pointer_type(tl.uint64))
    BYTES: tl.constexpr = 4 if ITEM == 4 else 0
    at = BYTES * W
    total = tl.zeros([LANES], tl.uint64)
    key = key_of(word + lane)
    key2 = key_of(word + 2 * lane)
    es = ()
    xs = ()
    for r in tl.static_range(8):
        a, b, low, ok = rows[r]
        if not FULL:
            real = tl.where(ok > 0, 0xFF, 0) | tl.where(ok > 1, 0xFF00, 0)
            real = (real | tl.where(ok > 2, 0xFF0000, 0)).to(tl.uint32)
            real |= tl.where(ok > 3, 0xFF, 0).to(tl.uint32) << 24
            if L.turned:
                a |= (((base + 6) << L.mantissa) * ONES) & ~real
        e = exponents(a, b, L)
        s, x = rest(a, b, L)
        if L.turned:
            x = a
        if not FULL:
            # Padding elements have exponent base + 6; their other bits were loaded as zeros.
            e = (e & real) | (((base + 6) * ONES) & ~real)
        k = r * row_words + lane
        if ITEM == 4:
            tl.store(block64 + k, low, mask=inside)
            if L.sums:
                total += terms_of_pairs(low, key2, 2 * r * row_words, inside)
        if ITEM >= 2:
            tl.store(block32 + at + k, s, mask=inside)
            if L.sums:
                total += terms_of(s, key, at + r * row_words, inside)
        es = es + (e,)
        xs = xs + (x,)
    if ITEM >= 2:
        at += 2 * W
    if zero_mode:
        f, planes = _planes_of(es, xs, b4, base, True, L)
    else:
        f, planes = _planes_of(es, xs, b4, base, False, L)
    if not FULL:
        f = tl.where(inside, f, 0)
    n = popc(f, L.ptx).to(tl.int32)
    count = tl.sum(n, 0)
    free = (base + 7) & 7
    for k in tl.static_range(3 + EXTRA):
        if k < 3:
            plane = (planes[k] & ~f) | (f & (0 - ((free >> k) & 1)))
        elif L.turned:
            plane = planes[k]
        else:
            plane = tl.zeros([LANES], tl.uint32)
            for r in tl.static_range(8):
                plane |= ((xs[r] >> (k - 3)) & ONES) << r
        i = at + k * row_words + lane
        tl.store(block32 + i, plane, mask=inside)
        if L.sums:
            total += terms_of(plane, key, at + k * row_words, inside)
    if count <= L.slot:
        pos = tl.cumsum(n, 0) - n
        left = tl.max(n, 0)
        while left > 0:
            bit = popc((f & (0 - f)) - 1, L.ptx)
            value = _picked(es, bit)
            tl.store(slot_ptr + pos, (value >> (bit & 24)).to(tl.uint8), mask=f != 0)
            pos += 1
            f = f & (f - 1)
            left -= 1
    return count, tl.sum(total, 0)


@triton.jit
def list_escapes(x_ptr, start, valid, entry, dynamic_ptr, at, capacity, word, L: tl.constexpr):
    """List the escapes of a tile that has too many for a slot; returns their checksum terms.

    A lane is one column here: neighbouring lanes then write to neighbouring places. Escapes are
    told from the elements alone, so that a tile costs one trip to memory.
    """
    column = tl.max_contiguous(tl.arange(0, WIDTH), 1)
    cols = columns_of(valid)
    x = items(x_ptr, L.item) + start
    zero_mode = (entry >> 15).to(tl.uint32)
    lowest = (entry & 32767).to(tl.uint32) + zero_mode
    # All loads before the stores, which they could not pass.
    es = ()
    for row in tl.static_range(8):
        i = row * cols + column
        v = tl.load(x + i, mask=(column < cols) & (i < valid), other=0).to(tl.uint32)
        es = es + ((v >> L.mantissa) & ((1 << L.exponent) - 1),)
    f = tl.zeros([WIDTH], tl.uint32)
    for row in tl.static_range(8):
        i = row * cols + column
        escaped = (es[row] - lowest > 6 - zero_mode) & ((es[row] != 0) | (zero_mode == 0))
        f |= (escaped & (column < cols) & (i < valid)).to(tl.uint32) << row
    n = popc(f, L.ptx).to(tl.int32)
    pos = tl.cumsum(n, 0) - n
    left = tl.minimum(tl.maximum(capacity - at, 0), 1 << 30).to(tl.int32)
    total = tl.zeros([WIDTH], tl.uint64)
    key = key_of(word + (at >> 2))
    low = (at & 3).to(tl.int32)
    for row in tl.static_range(8):
        on = ((f >> row) & 1) != 0
        tl.store(dynamic_ptr + at + pos, es[row].to(tl.uint8), mask=on & (pos < left))
        if L.sums:
            # Positions count from a word's start, so that they fit 32 bits.
            term = weigh_from(es[row], key, low + pos)
            total += tl.where(on, term, 0)
        pos += on.to(tl.int32)
    return tl.sum(total, 0)


class Work(NamedTuple):
    """The workspace of a chunk that is encoded.

    Attributes:
        sums_ptr: Of each group of tiles checksum terms, int64.
        totals_ptr: Of each group escapes, int32.
        counts_ptr: Of each tile escapes, uint16.
        slots_ptr: Of each tile a slot of escapes.
    """

    sums_ptr: Any
    totals_ptr: Any
    counts_ptr: Any
    slots_ptr: Any


@triton.jit
def work_at(sums_ptr, totals_ptr, counts_ptr, slots_ptr, group, tile, SLOT: tl.constexpr):
    """The `Work` of a chunk whose groups and tiles have numbers from `group` and `tile` on."""
    return Work(
        sums_ptr.to(tl.pointer_type(tl.int64)) + group,
        totals_ptr.to(tl.pointer_type(tl.int32)) + group,
        counts_ptr.to(tl.pointer_type(tl.uint16)) + tile,
        slots_ptr + tile * SLOT,
    )


@triton.jit
def encode_one(x_ptr, first, p, work, tile, shift, stats_ptr, FULL: tl.constexpr, L: tl.constexpr):
    """One tile of a chunk: its block, window, escape count and escapes.

    The chunk starts at element `first`. FULL: a whole tile at an aligned address.
    """
    tiles = (p.n + _TILE - 1) // _TILE
    start = first + tile.to(tl.int64) * _TILE
    block_ptr = p.static_ptr + tile.to(tl.int64) * L.block
    valid = tl.minimum(p.n - tile.to(tl.int64) * _TILE, _TILE).to(tl.int32)
    # Loads first: no later load may pass a store, and the window is found while they travel.
    rows = load_rows(x_ptr, start, valid, FULL, L)
    if L.window == 1:
        entry = tl.load(stats_ptr).to(tl.int32)
        entry = tl.minimum(tl.maximum(entry, 0), (1 << L.exponent) - 7)
    elif L.window == 2:
        entry = p.fixed
    else:
        entry = choose_window(x_ptr, start, valid, FULL, L)
    slot_ptr = work.slots_ptr + tile.to(tl.int64) * L.slot
    word = tile * (L.block // 4)
    count, total = encode_tile(rows, valid, block_ptr, slot_ptr, entry, word, FULL, L)
    entry_at = (p.index_at + 4 * tiles) // 2 + tile
    tl.store(p.static_ptr.to(tl.pointer_type(tl.uint16)) + entry_at, entry.to(tl.uint16))
    group = tile >> shift
    tl.atomic_add(work.totals_ptr + group, count, sem="relaxed")
    tl.store(work.counts_ptr + tile, count.to(tl.uint16))
    if L.sums:
        total += weigh_bytes(entry, entry_at * 2)
        tl.atomic_add(work.sums_ptr + group, total.to(tl.int64, bitcast=True), sem="relaxed")


@triton.jit
def _close_up(x_ptr, first, p, work, lo, hi, tiles, before, L: tl.constexpr):
    """Escapes of tiles `lo` to `hi` to their places, `before` in front of them, and their offsets.

    Returns checksum terms.
    """
    total = tl.zeros([], tl.uint64)
    dynamic_word = p.stride // 4
    offsets = (p.static_ptr + p.index_at).to(tl.pointer_type(tl.uint32))
    entries = (p.static_ptr + p.index_at + 4 * tiles.to(tl.int64)).to(tl.pointer_type(tl.uint16))
    for t0 in range(lo, hi, 32):
        t = t0 + tl.arange(0, 32)
        n_escapes = tl.load(work.counts_ptr + t, mask=t < hi, other=0).to(tl.int32)
        ahead = tl.cumsum(n_escapes, 0) - n_escapes
        offset = (before + ahead).to(tl.uint32)
        tl.store(offsets + t, offset, mask=t < hi)
        if L.sums:
            terms = weigh(offset, p.index_at // 4 + t)
            total += tl.sum(tl.where(t < hi, terms, 0), 0)
        most = tl.max(n_escapes, 0)
        slot_ptr = work.slots_ptr + (before * 0 + t0) * L.slot
        target_ptr = p.dynamic_ptr + before
        # At most 32 tiles of escapes lie ahead: what matters of the capacity fits 32 bits.
        left = tl.minimum(tl.maximum(p.slot_nbytes - before, 0), 1 << 30).to(tl.int32)
        row = tl.arange(0, 32)[:, None] * L.slot
        in_slot = tl.where(n_escapes <= L.slot, n_escapes, 0)[:, None]
        key = key_of(dynamic_word + (before >> 2))
        low = (before & 3).to(tl.int32)
        for k in range(0, tl.minimum(most, L.slot), 64):
            b = k + tl.arange(0, 64)[None, :]
            e = tl.load(slot_ptr + (row + b), mask=b < in_slot, other=0)
            at = ahead[:, None] + b
            tl.store(target_ptr + at, e, mask=(b < in_slot) & (at < left))
            if L.sums:
                of_escapes = weigh_from(e, key, low + at)
                total += tl.sum(tl.where(b < in_slot, of_escapes, 0))
        if most > L.slot:
            for q in range(0, 32):
                here = tl.arange(0, 32) == q
                if tl.sum(tl.where(here, n_escapes, 0), 0) > L.slot:
                    tile = p.n * 0 + (t0 + q)
                    start, valid = first + tile * _TILE, tl.minimum(p.n - tile * _TILE, _TILE)
                    entry = tl.load(entries + tile).to(tl.int32)
                    at_escape = before + tl.sum(tl.where(here, ahead, 0), 0)
                    # fmt: off
                    total += list_escapes(
                        x_ptr, start, valid.to(tl.int32), entry, p.dynamic_ptr, at_escape,
                        p.slot_nbytes, dynamic_word, L,
                    )
                    # fmt: on
        before += tl.sum(n_escapes, 0)
    return total


@triton.jit
def _store_raw(x_ptr, first, p, lo, hi, L: tl.constexpr):
    """Store tiles `lo` to `hi` of a chunk as they are; returns checksum terms."""
    x = items(x_ptr, L.item) + first
    s = items(p.static_ptr, L.item)
    y = items(p.dynamic_ptr, L.item)
    at = lo.to(tl.int64) * _TILE
    stop = tl.minimum(hi.to(tl.int64) * _TILE, p.n)
    cut = p.stride // L.item
    AT_ONCE: tl.constexpr = 1024 if L.sums else 2048
    total = tl.zeros([], tl.uint64)
    while at < stop:
        i = at + tl.max_contiguous(tl.arange(0, AT_ONCE), 1)
        v = tl.load(x + i, mask=i < stop, other=0)
        tl.store(s + i, v, mask=(i < stop) & (i < cut))
        tl.store(y + (i - cut), v, mask=(i < stop) & (i >= cut))
        if L.sums:
            total += tl.sum(tl.where(i < stop, weigh_items(v, i, L.item), 0), 0)
        at += AT_ONCE
    return total


@triton.jit
def finish_one(x_ptr, first, p, work, group, groups, shift, L: tl.constexpr):
    """One group of tiles: escapes to their place, offsets, record; or the chunk's raw bytes.

    The frame has written the record of an empty chunk, and cleared what tiles and index leave free.
    """
    tiles = ((p.n + _TILE - 1) // _TILE).to(tl.int32)
    of_all = tl.zeros([512], tl.int32)
    of_earlier = tl.zeros([512], tl.int32)
    for g in range(0, groups, 512):
        i = g + tl.arange(0, 512)
        t = tl.load(work.totals_ptr + i, mask=i < groups, other=0)
        of_all += t
        of_earlier += tl.where(i < group, t, 0)
    escapes = tl.sum(of_all.to(tl.int64), 0)
    before = tl.sum(of_earlier.to(tl.int64), 0)
    raw_nbytes = p.n * L.item
    raw_dynamic = tl.maximum(raw_nbytes - p.stride, 0)
    shrinks = escapes <= raw_dynamic
    dynamic_nbytes = tl.minimum(escapes, raw_dynamic)
    fits = dynamic_nbytes <= p.slot_nbytes
    total = tl.zeros([], tl.uint64)
    if L.sums:
        total += tl.load(work.sums_ptr + group).to(tl.uint64, bitcast=True)
    lo = group << shift
    hi = tl.minimum(lo + (1 << shift), tiles)
    if shrinks:
        total += _close_up(x_ptr, first, p, work, lo, hi, tiles, before, L)
    else:
        total = total * 0
        if fits:
            total = _store_raw(x_ptr, first, p, lo, hi, L)
            clear(p.static_ptr, raw_nbytes, p.stride, group, groups)
    flags = tl.where(fits, tl.where(shrinks, 0, 1), 2)
    if group == 0:
        tl.store(p.record_ptr + 1, dynamic_nbytes)
        tl.store(p.record_ptr + 2, flags.to(tl.int64) | (p.chunk.to(tl.int64) << 32))
        total += record_term(p.n * 0, dynamic_nbytes, flags, p.chunk * 0)
        if not fits:
            tl.store(p.record_ptr, p.n * 0)
    if L.sums:
        if fits:
            tl.atomic_add(p.record_ptr, total.to(tl.int64, bitcast=True), sem="relaxed")


# Whole tiles of up to 16-bit elements: one warp per tile, so no barriers, and 12 to 16 tiles in
# flight on each multiprocessor, for which registers are limited. Wider elements need more warps to
# stay in registers. benchmarks/results/gpu.md has the measurements.
# Many warps for the second: tiles full of escapes are listed one after the other.
FINISH = options(8, maxnreg=64)


def encode_options(itemsize: int, mode: int, sums: bool) -> dict[str, int | bool]:
    """Launch options of the first encode kernel."""
    if mode:
        return ANY_TILE
    if itemsize == 4:
        return options(4 if sums else 2)
    return options(1, maxnreg=168) if sums else options(1)


def window_of(spec: Any, given: bool) -> int:
    """`Launch.window` of encoding with statistics, or without if they are not `given`."""
    return 2 if isinstance(spec.window, int) else int(given)
