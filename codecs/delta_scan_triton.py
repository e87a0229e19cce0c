# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment,misc"
"""delta on a GPU: which elements of a tile have changed, and their numbers in their classes.

Every element is looked at once, as cheaply as can be: groups in which something has changed are
noted, with how many elements of each class are before them. From these come the changed elements,
a few in a hundred, and all else is done for those alone. Of a tile with more of them than there is
memory for, the elements are found again, section by section, whenever they are needed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .delta_words_triton import (
    FIELD,
    LOG_TILE,
    MASK,
    TILE,
    WORDS,
    class_of,
    exponents_of,
    keys_of,
    log16,
)

#: Elements of a group, and groups and elements of a section.
GROUP, ROWS, SECTION = tl.constexpr(16), tl.constexpr(128), tl.constexpr(2048)
#: Groups whose elements are listed at a time, and elements of a list that are looked at at a time.
_AT_ONCE, PIECE = tl.constexpr(32), tl.constexpr(128)
#: Where parts of a tile's work memory start, in words: counts of classes before each section; what
#: is known of the list; all groups of a section; the list; of elements of up to 2 bytes, those of
#: base and tensor; groups that have any of the list's elements. The memory of a section's groups
#: then has numbers in the order of classes, and a tile's words.
TABLE, STATE, GROUPS, LIST, PAIRS, KEPT = (tl.constexpr(n) for n in (32, 64, 80, 960, 1536, 2112))
MOST_LISTED = tl.constexpr(KEPT.value - PAIRS.value)
MOST_GROUPS = tl.constexpr((WORDS.value - KEPT.value) // 2)
SORTED = GROUPS
SLOT = tl.constexpr(GROUPS.value + 2 * ROWS.value)
SLOT_WORDS = tl.constexpr(LIST.value - SLOT.value)
#: Before the words, changes and large ones are counted there: words of both, by exponents, and of
#: large ones, by what their sizes reach.
COUNTS, MOST_COUNTS = SLOT, tl.constexpr(288)
#: Bits of a class in counts of a group, and of all of a tile.
_SMALL, _SMALL_MASK = tl.constexpr(6), tl.constexpr(63)
_LARGE, _LARGE_MASK = tl.constexpr(16), tl.constexpr(0xFFFF)
_BELOW = tl.constexpr((1 << 48) - 1)
#: A group behind a tile's last one.
_NOWHERE = tl.constexpr((TILE.value // GROUP.value) << 48)


@triton.jit
def _refield(counts, FROM: tl.constexpr, MOST: tl.constexpr, TO: tl.constexpr, L: tl.constexpr):
    """Counts of classes 1 on, in fields of FROM bits up to MOST, in such of TO bits; int64."""
    wide = counts.to(tl.int64)
    found = wide * 0
    OTHERS: tl.constexpr = L.classes - 1
    for c in tl.static_range(OTHERS):
        found |= ((wide >> (FROM * c)) & MOST) << (TO * c)
    return found


@triton.jit
def _total_of(counts, BITS: tl.constexpr, MOST: tl.constexpr, L: tl.constexpr):
    """The sum of the fields of classes 1 on, int32."""
    found = counts * 0
    OTHERS: tl.constexpr = L.classes - 1
    for c in tl.static_range(OTHERS):
        found += (counts >> (BITS * c)) & MOST
    return found.to(tl.int32)


@triton.jit
def sizes_of(counts, m, L: tl.constexpr):
    """Elements of each class of a tile of `m`, 8 lanes."""
    c = tl.arange(0, 8)
    shift = tl.minimum(tl.maximum(c - 1, 0), 3) * _LARGE
    others = ((counts >> shift.to(tl.int64)) & _LARGE_MASK).to(tl.int32)
    others = tl.where((c > 0) & (c < L.classes), others, 0)
    return tl.where(c == 0, m - tl.sum(others, 0), others)


@triton.jit
def _words_at(ptr, word, m, ITEM: tl.constexpr, WHOLE: tl.constexpr):
    """32-bit words of the elements at `ptr`; behind `m` elements are zeros."""
    if WHOLE:
        return tl.load(ptr.to(tl.pointer_type(tl.uint32)) + word)
    else:
        found = (word * 0).to(tl.uint32)
        for h in tl.static_range(4 // ITEM):
            i = word * (4 // ITEM) + h
            v = tl.load(ptr + i, mask=i < m, other=0).to(tl.uint32)
            found |= v << (8 * ITEM * h)
        return found


@triton.jit
def _scan_section(
    base,
    x,
    info,
    section,
    m,
    word,
    center,
    groups,
    counts,
    digest,
    need,
    L: tl.constexpr,
    WHOLE: tl.constexpr,
    AGAIN: tl.constexpr,
):
    """Note the groups of a section that have changes; (groups, counts of classes, digest) with it.

    `word` is the number of the tile's first word in its chunk. WHOLE: all of the section is there,
    and at a multiple of 4 bytes. AGAIN: note, at KEPT, groups with elements of classes in `need`,
    too; the digest is known.
    """
    WIDE: tl.constexpr = GROUP * L.item // 4
    PER: tl.constexpr = 4 // L.item
    row = tl.arange(0, ROWS)
    ones = tl.zeros([ROWS, 4], tl.int32)
    differs = tl.zeros([ROWS, 4], tl.uint32)
    # Words of 16 bytes at a time: as many as a thread loads at once.
    for part in tl.static_range(WIDE // 4):
        number = (row * WIDE + section * (SECTION // PER) + 4 * part)[:, None]
        number += tl.arange(0, 4)[None, :]
        v = _words_at(base, number, m, L.item, WHOLE)
        y = _words_at(x, number, m, L.item, WHOLE)
        if not AGAIN:
            digest += v.to(tl.uint64) * keys_of(word + number.to(tl.uint32)).to(tl.uint64)
        differs |= v ^ y
        if L.classes > 1:
            for h in tl.static_range(PER):
                e = exponents_of(v >> (8 * L.item * h), L)
                c = class_of(e, center, L)
                if AGAIN:
                    differs |= ((need >> c) & 1).to(tl.uint32)
                one = (number * 0 + 1) << (c * _SMALL)
                if not WHOLE:
                    one = tl.where(number * PER + h < m, one, 0)
                ones += one
    differs = tl.max(differs, 1)
    own = (differs != 0).to(tl.int64) << 48
    if L.classes > 1:
        own += _refield(tl.sum(ones, 1) >> _SMALL, _SMALL, _SMALL_MASK, FIELD, L)
    before = tl.cumsum(own, 0) - own
    total = tl.sum(own, 0)
    k = groups + (before >> 48).to(tl.int32)
    entry = (before & _BELOW) | ((row + section * ROWS).to(tl.int64) << 48)
    noted = (info + KEPT).to(tl.pointer_type(tl.int64))
    tl.store(noted + k, entry, mask=(differs != 0) & (k < MOST_GROUPS))
    table = (info + TABLE).to(tl.pointer_type(tl.int64))
    tl.store(table + section, counts)
    groups += (total >> 48).to(tl.int32)
    return groups, counts + _refield(total & _BELOW, FIELD, MASK, _LARGE, L), digest


@triton.jit
def scan_tile(base, x, info, m, begin, center, L: tl.constexpr):
    """(groups with changes, counts of classes, the base's share of the digest) of a tile."""
    word = (begin // 4 * L.item).to(tl.uint32)
    groups, counts = m * 0, (m * 0).to(tl.int64)
    digest = tl.zeros([ROWS, 4], tl.uint64)
    whole = m // SECTION
    if not L.aligned:
        whole = m * 0
    for section in range(0, whole):
        groups, counts, digest = _scan_section(
            base, x, info, section, m, word, center, groups, counts, digest, m * 0, L, True, False
        )
    for section in range(whole, (m + SECTION - 1) // SECTION):
        groups, counts, digest = _scan_section(
            base, x, info, section, m, word, center, groups, counts, digest, m * 0, L, False, False
        )
    return groups, counts, tl.sum(tl.sum(digest, 1), 0)


@triton.jit(noinline=True)
def note_needed(base, x, info, m, center, need, L: tl.constexpr):
    """Note the groups of a whole tile that have changes, or elements of classes in `need`; how many
    there are.
    """
    groups, counts = m * 0, (m * 0).to(tl.int64)
    none = tl.zeros([ROWS, 4], tl.uint64)
    tl.debug_barrier()
    for section in range(0, TILE // SECTION):
        groups, counts, _ = _scan_section(
            base, x, info, section, m, m * 0, center, groups, counts, none, need, L, True, True
        )
    tl.debug_barrier()
    return groups


@triton.jit
def _pair_at(base, x, start, m, ITEM: tl.constexpr):
    """(places, base, tensor) of 16 bytes of elements from each of `start` on.

    Where a tile has whole groups, they are loaded at once.
    """
    i = start[:, None] + tl.arange(0, 16 // ITEM)[None, :]
    if m % GROUP == 0:
        there = (start < m)[:, None]
        v, y = tl.load(base + i, mask=there, other=0), tl.load(x + i, mask=there, other=0)
    else:
        v, y = tl.load(base + i, mask=i < m, other=0), tl.load(x + i, mask=i < m, other=0)
    return i, v.to(tl.uint32), y.to(tl.uint32)


@triton.jit
def _note_all(base, x, info, section, m, center, L: tl.constexpr):
    """Note all groups of a section."""
    PART: tl.constexpr = 16 // L.item
    r = tl.arange(0, _AT_ONCE)
    noted = (info + GROUPS).to(tl.pointer_type(tl.int64))
    counts = (m * 0).to(tl.int64)
    for at in range(0, ROWS, _AT_ONCE):
        group = r + at + section * ROWS
        own = group.to(tl.int64) * 0
        if L.classes > 1:
            ones = tl.zeros([_AT_ONCE], tl.int32)
            for part in tl.static_range(GROUP // PART):
                i, v, _ = _pair_at(base, x, group * GROUP + part * PART, m, L.item)
                c = class_of(exponents_of(v, L), center, L)
                ones += tl.sum(tl.where(i < m, (i * 0 + 1) << (c * _SMALL), 0), 1)
            own = _refield(ones >> _SMALL, _SMALL, _SMALL_MASK, FIELD, L)
        before = counts + tl.cumsum(own, 0) - own
        tl.store(noted + at + r, before | (group.to(tl.int64) << 48))
        counts += tl.sum(own, 0)


@triton.jit
def _expand(base, x, info, slot, group, m, center, need, found, window, L: tl.constexpr):
    """List the elements of groups, noted in `slot`, that have changed, and those of classes in
    `need`: places and slots.

    The list gets elements from number `window` on, as many as there is memory for. Gives what
    `found` is behind the groups.
    """
    PART: tl.constexpr = 16 // L.item
    j = tl.arange(0, PART)[None, :]
    bits = group * 0
    for part in tl.static_range(GROUP // PART):
        i, v, y = _pair_at(base, x, group * GROUP + part * PART, m, L.item)
        marks = tl.sum((v != y).to(tl.int32) << (part * PART + j), 1)
        if need != 0:
            c = class_of(exponents_of(v, L), center, L)
            more = (((need >> c) & 1) != 0) & (i < m)
            marks |= tl.sum(more.to(tl.int32) << (part * PART + j), 1)
        bits |= marks
    # Numbers of ones, in halves, quarters and so on.
    count = bits - ((bits >> 1) & 0x5555)
    count = (count & 0x3333) + ((count >> 2) & 0x3333)
    count = (count + (count >> 4)) & 0x0F0F
    count = (count + (count >> 8)) & 31
    k = found - window + tl.cumsum(count, 0) - count
    for _ in range(tl.max(count, 0)):
        # The lowest one of each group.
        one = bits & (0 - bits)
        entry = (group * GROUP + log16(one) - 1) | (slot << LOG_TILE)
        tl.store(info + LIST + k, entry, mask=(bits != 0) & (k >= 0) & (k < MOST_LISTED))
        bits ^= one
        k += 1
    return found + tl.sum(count, 0)


@triton.jit
def _number(base, x, info, noted, at, many, m, center, L: tl.constexpr):
    """Put into the list the numbers of elements among those of their class, instead of slots."""
    PART: tl.constexpr = 16 // L.item
    i = at + tl.arange(0, _AT_ONCE)
    use = i < many
    entry = tl.load(info + LIST + i, mask=use, other=0)
    place = entry & (TILE - 1)
    fields = tl.load(noted + (entry >> LOG_TILE), mask=use, other=0)
    table = tl.load(
        (info + TABLE).to(tl.pointer_type(tl.int64)) + place // SECTION, mask=use, other=0
    )
    others = _total_of(fields, FIELD, MASK, L) + _total_of(table, _LARGE, _LARGE_MASK, L)
    start = place & (TILE - GROUP)
    rank = start - others
    if (L.classes > 1) | (L.item <= 2):
        v = tl.load(base + place, mask=use, other=0).to(tl.uint32)
    if L.item <= 2:
        y = tl.load(x + place, mask=use, other=0).to(tl.uint32)
        tl.store(info + PAIRS + i, (v | (y << 16)).to(tl.int32, bitcast=True), mask=use)
    if L.classes == 1:
        rank += place - start
    else:
        c = class_of(exponents_of(v, L), center, L)
        which = tl.maximum(c - 1, 0)
        before = ((fields >> (which * FIELD).to(tl.int64)) & MASK).to(tl.int32)
        before += ((table >> (which * _LARGE).to(tl.int64)) & _LARGE_MASK).to(tl.int32)
        rank = tl.where(c > 0, before, rank)
        # Those of the group that are before it, by the exponents that a class has.
        least = tl.where(c < L.classes - 1, center + 1 - 2 * c, 0)
        most = tl.where(c > 0, center + 2 - 2 * c, 1 << L.exponent)
        for part in tl.static_range(GROUP // PART):
            j, v, _ = _pair_at(base, base, start + part * PART, m, L.item)
            e = exponents_of(v, L)
            same = (e >= least[:, None]) & (e <= most[:, None]) & (j < place[:, None])
            rank += tl.sum(same.to(tl.int32), 1)
    tl.store(info + LIST + i, place | (rank << LOG_TILE), mask=use)


@triton.jit(noinline=True)
def fill_list(base, x, info, groups, section, dense, m, center, need, window, L: tl.constexpr):
    """The list of a tile, from the groups noted, or if `dense` of a section; how many there are.

    Of each element the list has its place, and its number among those of its class.
    """
    r = tl.arange(0, _AT_ONCE)
    start = tl.where(dense != 0, GROUPS, KEPT)
    noted = (info + start).to(tl.pointer_type(tl.int64))
    tl.debug_barrier()
    if dense != 0:
        _note_all(base, x, info, section, m, center, L)
        groups = m * 0 + ROWS
        tl.debug_barrier()
    found = m * 0
    for at in range(0, groups, _AT_ONCE):
        # Of an entry that is not there no element is inside.
        entry = tl.load(noted + at + r, mask=at + r < groups, other=_NOWHERE)
        group = (entry >> 48).to(tl.int32)
        found = _expand(base, x, info, at + r, group, m, center, need, found, window, L)
    tl.debug_barrier()
    many = tl.minimum(found - window, MOST_LISTED)
    for at in range(0, many, _AT_ONCE):
        _number(base, x, info, noted, at, many, m, center, L)
    tl.debug_barrier()
    return found


@triton.jit
def listed(base, x, info, at, n, L: tl.constexpr):
    """A piece of a list of `n`: (places, numbers in classes, base, new, whether it has changed)."""
    i = at + tl.arange(0, PIECE)
    use = i < n
    entry = tl.load(info + LIST + i, mask=use, other=0)
    place = entry & (TILE - 1)
    if L.item <= 2:
        pair = tl.load(info + PAIRS + i, mask=use, other=0).to(tl.uint32, bitcast=True)
        v, y = pair & 0xFFFF, pair >> 16
    else:
        v = tl.load(base + place, mask=use, other=0).to(tl.uint32)
        y = tl.load(x + place, mask=use, other=0).to(tl.uint32)
    return place, entry >> LOG_TILE, v, y, v != y
