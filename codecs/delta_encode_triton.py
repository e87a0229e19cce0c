# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment,misc"
"""delta on a GPU: what a tile takes, and how it is written. specs/delta.md.

A program finds the changed elements of a tile (`delta_scan_triton`), goes over their list, a piece
at a time, and writes the tile's words to its work memory. A few programs then add up how many there
are, and a last launch moves them. Tiles whose words are too many are not written before that.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from . import delta
from .common.dynamic_triton import items, store_raw, write_record
from .common.frame_triton import clear
from .delta_decode_triton import ones_of
from .delta_scan_triton import (
    COUNTS,
    MOST_COUNTS,
    MOST_GROUPS,
    MOST_LISTED,
    PIECE,
    SECTION,
    SLOT,
    SLOT_WORDS,
    SORTED,
    STATE,
    fill_list,
    listed,
    note_needed,
    scan_tile,
    sizes_of,
)
from .delta_words_triton import (
    DIGESTS,
    FAR,
    FIELD,
    LOG_TILE,
    MASK,
    TILE,
    WORDS,
    class_of,
    elements_at,
    exponents_of,
    length_of,
    log16,
    low_bits,
    low_of,
    ordered,
    terms_of,
)

_SAMPLED, _MAX_QUOTIENT = tl.constexpr(delta.SAMPLED), tl.constexpr(delta.MAX_QUOTIENT)
_X0, _X1, _X2, _X3 = (tl.constexpr(excess) for excess in delta.EXCESS)
#: How a tile is stored, in its work memory: plain, or as planes, else 0.
OF_PLAIN, OF_PLANES = tl.constexpr(1), tl.constexpr(2)
#: Scales that are weighed at a time.
_SCALES = tl.constexpr(64)


@triton.jit
def _shifted(v, n):
    """`v >> n` of uint32 numbers, n up to 32."""
    return (v.to(tl.uint64) >> n.to(tl.uint64)).to(tl.uint32)


@triton.jit
def put(words, at, value, n, use):
    """Set the low `n` bits of values, uint32, from bit `at` on where there are zeros."""
    kept = value.to(tl.uint64) & ((value.to(tl.uint64) * 0 + 1 << n.to(tl.uint64)) - 1)
    wide = kept << (at & 31).to(tl.uint64)
    low = (wide & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True)
    high = (wide >> 32).to(tl.uint32).to(tl.int32, bitcast=True)
    tl.atomic_or(words + (at >> 5), low, mask=use & (low != 0), sem="relaxed")
    tl.atomic_or(words + (at >> 5) + 1, high, mask=use & (high != 0), sem="relaxed")


@triton.jit
def _change(v, y, scale, L: tl.constexpr):
    """Of changes from `v` to `y`: (negative, size, hot, low bits, quotient, exception)."""
    WIDTH: tl.constexpr = 8 * L.item
    e = exponents_of(v, L)
    old, new = ordered(v, L), ordered(y, L)
    negative = new < old
    size = tl.where(negative, old - new, new - old) - 1
    hot, low = low_of(e, scale, WIDTH)
    quotient = _shifted(size, low)
    exception = tl.where(hot != 0, quotient > _MAX_QUOTIENT, size > 0)
    quotient = tl.where(exception, 0, quotient).to(tl.int32, bitcast=True)
    return negative, size, hot, low, quotient, exception


@triton.jit(noinline=True)
def _scale(info, least, top, larges, L: tl.constexpr):
    """See `delta.scale_of`: from what `_tally` has counted, the least exponent of a change, the
    largest one of large changes with its bit length, and how many those are.
    """
    WIDTH: tl.constexpr = 8 * L.item
    MOST: tl.constexpr = (1 << L.exponent) - 1 + WIDTH
    counts, above = info + COUNTS, info + COUNTS + MOST_COUNTS
    last = tl.maximum(tl.where(larges > 0, tl.minimum(top + 1, MOST), 0), least)
    lane = tl.arange(0, _SCALES)
    # What is below the scale: changes, then steps; and of such that are WIDTH + 1 less; in halves.
    below, steps = (least * 0).to(tl.int64), (least * 0).to(tl.int64)
    ahead = tl.load(above + least + lane, mask=(lane < 4) & (least + lane < MOST_COUNTS), other=0)
    passed = tl.sum(ahead, 0).to(tl.int64) << 32
    best = (least * 0).to(tl.int64) + (1 << 62)
    for at in range(least, last + 1, _SCALES):
        s = at + lane
        both = tl.load(counts + s, mask=s < MOST_COUNTS, other=0)
        far = s - WIDTH - 1
        earlier = tl.load(counts + far, mask=(far >= 0) & (far < MOST_COUNTS), other=0)
        changed = (both & 0xFFFF).to(tl.int64) | ((earlier & 0xFFFF).to(tl.int64) << 32)
        upto = below + tl.cumsum(changed, 0)
        stepped = steps + tl.cumsum(upto, 0) - upto
        cost = 2 * ((stepped & 0xFFFFFFFF) - (stepped >> 32))
        below += tl.sum(changed, 0)
        steps += tl.sum(upto, 0)
        ahead = tl.load(above + s + 4, mask=s + 4 < MOST_COUNTS, other=0)
        large = ((both >> 16) & 0xFFFF).to(tl.int64) | (ahead.to(tl.int64) << 32)
        before = passed + tl.cumsum(large, 0) - large
        passed += tl.sum(large, 0)
        beyond = 2 * larges - (before & 0xFFFFFFFF) - (before >> 32)
        cost += 2 * (LOG_TILE + WIDTH) * beyond
        cost += _X0 * tl.load(above + s, mask=s < MOST_COUNTS, other=0)
        cost += _X1 * tl.load(above + s + 1, mask=s + 1 < MOST_COUNTS, other=0)
        cost += _X2 * tl.load(above + s + 2, mask=s + 2 < MOST_COUNTS, other=0)
        cost += _X3 * tl.load(above + s + 3, mask=s + 3 < MOST_COUNTS, other=0)
        cost = tl.where(s <= last, cost, FAR)
        best = tl.minimum(best, tl.min((cost << 16) | s, 0))
    return (best & 0xFFFF).to(tl.int32)


@triton.jit
def _center(base, n, L: tl.constexpr):
    """See `delta.center_of`; `base` points to the tile's elements."""
    found = n * 0
    if L.classes > 1:
        i = tl.arange(0, TILE // _SAMPLED) * _SAMPLED
        e = exponents_of(tl.load(base + i, mask=i < n, other=0).to(tl.uint32), L)
        count = tl.sum((e != 0).to(tl.int32), 0)
        found = tl.sum(e, 0) // tl.maximum(count, 1)
    return found


@triton.jit
def _of_class(lanes, c):
    """For each element the value of its class, of 8 lanes."""
    same = tl.arange(0, 8)[:, None] == c[None, :]
    return tl.sum(tl.where(same, lanes[:, None], 0), 0)


@triton.jit
def _by_class(values, c):
    """Values, shape [8, n], each in the lane of its class."""
    return tl.where(tl.arange(0, 8)[:, None] == c[None, :], values[None, :], 0)


@triton.jit
def _counts(use, c):
    """How many of those used are of each class, 8 lanes."""
    lane = tl.arange(0, 8)
    total = tl.sum(use.to(tl.int64) << (c * FIELD).to(tl.int64), 0)
    counts = (total >> (tl.minimum(lane, 4) * FIELD).to(tl.int64)) & MASK
    return tl.where(lane < 5, counts, 0).to(tl.int32)


@triton.jit
def _tally(base, x, info, n, begin, center, changes, digest, flips, reach, L: tl.constexpr):
    """Count the changes of a list of `n`: by class, for the scale, and for the result's digest; in
    the form adaptive, the bits that they flip.
    """
    least, top, larges = reach
    terms = tl.zeros([PIECE], tl.uint64)
    for at in range(0, n, PIECE):
        place, _, v, y, changed = listed(base, x, info, at, n, L)
        e = exponents_of(v, L)
        changes += _counts(changed, class_of(e, center, L))
        terms += terms_of(y, begin + place, L.item) - terms_of(v, begin + place, L.item)
        if L.adaptive:
            flips += tl.sum(ones_of(v ^ y), 0)
        if not L.overwrite:
            _, size, _, _, _, _ = _change(v, y, e * 0, L)
            length = tl.where(changed, length_of(size), 0)
            large = length > 0
            counts = info + COUNTS
            tl.atomic_add(counts + e, tl.where(large, 65537, 1), mask=changed, sem="relaxed")
            reached = counts + MOST_COUNTS + e + length
            tl.atomic_add(reached, e * 0 + 1, mask=large, sem="relaxed")
            least = tl.minimum(least, tl.min(tl.where(changed, e, FAR), 0))
            top = tl.maximum(top, tl.max(tl.where(large, e + length, 0), 0))
            larges += tl.sum(large.to(tl.int32), 0)
    return changes, digest + tl.sum(terms, 0), flips, (least, top, larges)


@triton.jit
def _gaps(base, x, info, at, n, center, lists, ahead, L: tl.constexpr):
    """A piece of a list: changes, and gaps of what is listed of each class, class by class.

    `ahead` is of each class the number behind that of the last one listed. Gives (base, new,
    changed), then by gap (class, whether there is one, gap), then how many there are of each class,
    where in the piece those start, and what `ahead` is behind the piece.
    """
    _, rank, v, y, changed = listed(base, x, info, at, n, L)
    q, lane = tl.arange(0, PIECE), tl.arange(0, 8)
    c = class_of(exponents_of(v, L), center, L)
    use = (at + q < n) & (changed == (((lists >> c) & 1) != 0))
    marks = use.to(tl.int64) << (c * FIELD).to(tl.int64)
    total = tl.sum(marks, 0)
    starts = (total << FIELD) + (total << 2 * FIELD) + (total << 3 * FIELD) + (total << 4 * FIELD)
    shift = (c * FIELD).to(tl.int64)
    to = ((starts + tl.cumsum(marks, 0) - marks) >> shift) & MASK
    tl.debug_barrier()
    tl.store(info + SORTED + to.to(tl.int32), rank, mask=use)
    tl.debug_barrier()
    shift = (tl.minimum(lane, 4) * FIELD).to(tl.int64)
    counts = tl.where(lane < 5, (total >> shift) & MASK, 0).to(tl.int32)
    begins = ((starts >> shift) & MASK).to(tl.int32)
    c, first = q * 0, q == 0
    OTHERS: tl.constexpr = L.classes - 1
    for k in tl.static_range(OTHERS):
        start = ((starts >> ((k + 1) * FIELD)) & MASK).to(tl.int32)
        c += (q >= start).to(tl.int32)
        first = first | (q == start)
    there = q < tl.sum(counts, 0)
    rank = tl.load(info + SORTED + q, mask=there, other=0)
    before = tl.load(info + SORTED + q - 1, mask=there & (q > 0), other=0)
    gap = rank - tl.where(first, _of_class(ahead, c), before + 1)
    last = tl.load(info + SORTED + begins + counts - 1, mask=counts > 0, other=0)
    ahead = tl.where(counts > 0, last + 1, ahead)
    return v, y, changed, c, there, tl.where(there, gap, 0), counts, begins, ahead


@triton.jit
def _weigh_list(base, x, info, n, center, scale, lists, low, state, L: tl.constexpr):
    """Add up what a list of `n` takes."""
    ahead, gap_bits, exceptions, quotients, low_total = state
    for at in range(0, n, PIECE):
        v, y, changed, c, there, gap, _, _, ahead = _gaps(
            base, x, info, at, n, center, lists, ahead, L
        )
        codes = tl.where(there, (gap >> ((low >> (c * 4)) & 15)) + 1, 0)
        gap_bits += tl.sum(_by_class(codes, c), 1)
        if not L.overwrite:
            _, _, hot, bits, quotient, exception = _change(v, y, scale, L)
            exceptions += tl.sum((changed & exception).to(tl.int32), 0)
            quotients += tl.sum(tl.where(changed, hot + quotient, 0), 0)
            low_total += tl.sum(tl.where(changed, bits, 0), 0)
    return ahead, gap_bits, exceptions, quotients, low_total


@triton.jit
def scan_one(x_ptr, from_ptr, t, L: tl.constexpr):
    """Compare a tile with the base: where something has changed, and the base's digest."""
    base, x = elements_at(from_ptr, t.first, L), elements_at(x_ptr, t.first, L)
    center = _center(base, t.m, L)
    groups, counts, of_base = scan_tile(base, x, t.info, t.m, t.begin, center, L)
    # A result has the digest of its base, but for what has changed.
    total = of_base.to(tl.int64, bitcast=True)
    tl.atomic_add(t.sums + 1 + tl.arange(0, 2), total, sem="relaxed")
    tl.store(t.info + 2, center)
    tl.store(t.info + STATE + 4, groups)
    tl.store((t.info + STATE + 6).to(tl.pointer_type(tl.int64)), counts)


@triton.jit
def measure_one(x_ptr, from_ptr, t, L: tl.constexpr):
    """What a tile takes, its words if they are not many, and its share of the result's digest.

    Known of a tile: words, how it is stored, center, scale, exceptions, bits of quotients, low
    bits, changes; then of each class size, changes, and bits of quotients of gaps; whether elements
    are listed section by section, how many there are else, which classes are listed wholly; in the
    form adaptive, bits that the changes flip.
    """
    WIDTH: tl.constexpr = 8 * L.item
    info, begin, m = t.info, t.begin, t.m
    base, x = elements_at(from_ptr, t.first, L), elements_at(x_ptr, t.first, L)
    center, groups = tl.load(info + 2), tl.load(info + STATE + 4)
    c = tl.arange(0, 8)
    sizes = sizes_of(tl.load((info + STATE + 6).to(tl.pointer_type(tl.int64))), m, L)
    need, entries = m * 0, m * 0
    dense = (groups > MOST_GROUPS).to(tl.int32)
    changes, digest = tl.zeros([8], tl.int32), tl.zeros([], tl.uint64)
    flips, reach = m * 0, (m * 0 + FAR, m * 0, m * 0)
    # A loop of two steps, because listing takes long to compile: noted groups, then all there is.
    for step in range(2):
        sections = tl.where(dense != 0, (m + SECTION - 1) // SECTION, 1)
        if step == 0:
            sections = ((dense == 0) & (groups > 0)).to(tl.int32)
        for section in range(sections):
            window, n = m * 0, m * 0 + 1
            while window < n:
                n = entries
                tl.debug_barrier()
                if (dense != 0) | (step == 0) | (entries > MOST_LISTED):
                    n = fill_list(base, x, info, groups, section, dense, m, center, need, window, L)
                if step == 0:
                    entries, n = n, m * 0
                else:
                    many = tl.minimum(n - window, MOST_LISTED)
                    changes, digest, flips, reach = _tally(
                        base, x, info, many, begin, center, changes, digest, flips, reach, L
                    )
                window += MOST_LISTED
        if step == 0:
            clear_words(info + COUNTS, 2 * MOST_COUNTS)
    tl.atomic_add(t.sums + 2, digest.to(tl.int64, bitcast=True), sem="relaxed")
    total = tl.sum(changes, 0)
    words, plain = m * 0, m * 0
    scale, exceptions, quotients, low_total = m * 0, m * 0, m * 0, m * 0
    gap_bits = tl.zeros([8], tl.int32)
    if total > 0:
        if not L.overwrite:
            tl.debug_barrier()
            least, top, larges = reach
            scale = _scale(info, least, top, larges, L)
        many = tl.minimum(changes, sizes - changes)
        lists, low, lows = _lists(changes, sizes)
        need = tl.sum(tl.where((2 * changes > sizes) & (many > 0), 1 << c, 0), 0)
        if need != 0:
            kept = m * 0 + MOST_GROUPS + 1
            if L.aligned and L.classes > 1:
                if (dense == 0) & (m == TILE):
                    kept = note_needed(base, x, info, m, center, need, L)
            groups = kept
            dense = dense | (kept > MOST_GROUPS).to(tl.int32)
        sections = tl.where(dense != 0, (m + SECTION - 1) // SECTION, 1)
        state = c * 0, gap_bits, exceptions, quotients, low_total
        for section in range(sections):
            window, n = m * 0, m * 0 + 1
            while window < n:
                n = entries
                tl.debug_barrier()
                if (dense != 0) | (need != 0) | (entries > MOST_LISTED):
                    n = fill_list(base, x, info, groups, section, dense, m, center, need, window, L)
                upto = tl.minimum(n - window, MOST_LISTED)
                state = _weigh_list(base, x, info, upto, center, scale, lists, lows, state, L)
                window += MOST_LISTED
        _, gap_bits, exceptions, quotients, low_total = state
        nbits = m * 0 + 1
        gammas = tl.where(c < L.classes, 2 * log16(changes + 1) - 1, 0)
        if L.overwrite:
            nbits += total * WIDTH
        else:
            nbits += L.exponent + L.scale_bits + total + quotients + low_total
            nbits += 2 * log16(exceptions + 1) - 1 + exceptions * (LOG_TILE + WIDTH)
        nbits += tl.sum(gammas + many * low + gap_bits, 0)
        words = (nbits + 31) // 32
        of_plain = 1 + (m * L.item + 3) // 4
        plain = (words > of_plain).to(tl.int32)
        words = tl.minimum(words, of_plain)
    tl.store(info, words)
    tl.store(info + 1, plain)
    tl.store(info + 3, scale)
    tl.store(info + 4, exceptions)
    tl.store(info + 5, quotients)
    tl.store(info + 6, low_total)
    tl.store(info + 7, total)
    tl.store(info + 8 + c, sizes)
    tl.store(info + 16 + c, changes)
    tl.store(info + 24 + c, gap_bits)
    tl.store(info + STATE, dense)
    tl.store(info + STATE + 1, entries)
    tl.store(info + STATE + 2, need)
    tl.store(info + STATE + 5, groups)
    tl.store(info + STATE + 8, flips)
    if (words > 0) & (words <= SLOT_WORDS) & (plain == 0):
        tl.debug_barrier()
        _write_tile(base, x, m, info, info + SLOT, words, L)


@triton.jit
def _lists(changes, sizes):
    """(Bits of classes whose changes are listed, low bits of gaps, and those in 4 bits each)."""
    c = tl.arange(0, 8)
    lists = tl.sum(tl.where(2 * changes <= sizes, 1 << c, 0), 0)
    low = low_bits(sizes, tl.minimum(changes, sizes - changes))
    return lists, low, tl.sum(tl.where(c < 5, low << (c * 4), 0), 0)


@triton.jit
def _write_plain(x, m, words, count, ITEM: tl.constexpr):
    """A tile whose elements are stored as they are."""
    tl.store(words, m * 0 + 1)
    tl.store(words + count - 1, m * 0, mask=count > 1)
    tl.debug_barrier()
    target = items(words + 1, ITEM)
    for at in range(0, m, 512):
        i = at + tl.arange(0, 512)
        tl.store(target + i, tl.load(x + i, mask=i < m, other=0), mask=i < m)


@triton.jit
def clear_words(words, count):
    """Make so many words 0."""
    for at in range(0, count, 512):
        i = at + tl.arange(0, 512)
        tl.store(words + i, tl.zeros([512], tl.int32), mask=i < count)


@triton.jit(noinline=True)
def _write_tile(base, x, m, info, words, count, L: tl.constexpr):
    """A coded tile, by what `measure_one` has found of it."""
    c = tl.arange(0, 8)
    clear_words(words, count)
    tl.debug_barrier()
    center, scale, exceptions = tl.load(info + 2), tl.load(info + 3), tl.load(info + 4)
    sizes, changes = tl.load(info + 8 + c), tl.load(info + 16 + c)
    gap_bits = tl.load(info + 24 + c)
    total = tl.load(info + 7)
    dense, entries = tl.load(info + STATE), tl.load(info + STATE + 1)
    need, groups = tl.load(info + STATE + 2), tl.load(info + STATE + 5)
    lists, low, lows = _lists(changes, sizes)
    one = c == 0
    head = m * 0 + 1
    if not L.overwrite:
        zero = c * 0
        put(words, zero + head, (zero + center).to(tl.uint32), zero + L.exponent, one)
        head += L.exponent
        put(words, zero + head, (zero + scale).to(tl.uint32), zero + L.scale_bits, one)
        head += L.scale_bits
    coded = c < L.classes
    below = log16(changes + 1) - 1
    lengths = tl.where(coded, 2 * below + 1, 0)
    gamma_at = head + tl.cumsum(lengths, 0) - lengths
    ones = (c * 0 + 1).to(tl.uint32)
    put(words, gamma_at + below, ones, c * 0 + 1, coded)
    put(words, gamma_at + below + 1, (changes + 1).to(tl.uint32), below, coded & (below > 0))
    head += tl.sum(lengths, 0)
    if not L.overwrite:
        more = log16(c * 0 + exceptions + 1) - 1
        put(words, head + more, ones, c * 0 + 1, one)
        put(words, head + more + 1, (c * 0 + exceptions + 1).to(tl.uint32), more, one & (more > 0))
        head += 2 * tl.max(more, 0) + 1
    fields = tl.minimum(changes, sizes - changes) * low
    low_at = head + tl.cumsum(fields, 0) - fields
    head += tl.sum(fields, 0)
    sign_at = head
    if not L.overwrite:
        head += total
    gap_at = head + tl.cumsum(gap_bits, 0) - gap_bits
    head += tl.sum(gap_bits, 0)
    quotient_at = head
    value_at = head
    exception_at = head
    if not L.overwrite:
        value_at = head + tl.load(info + 5)
        exception_at = value_at + tl.load(info + 6)
    done, number = m * 0, m * 0
    sections = tl.where(dense != 0, (m + SECTION - 1) // SECTION, 1)
    places = low_at, gap_at, sign_at, quotient_at, value_at, exception_at
    state = c * 0, done, number
    for section in range(sections):
        window, n = m * 0, m * 0 + 1
        while window < n:
            n = entries
            tl.debug_barrier()
            if (dense != 0) | (need != 0) | (entries > MOST_LISTED):
                n = fill_list(base, x, info, groups, section, dense, m, center, need, window, L)
            upto = tl.minimum(n - window, MOST_LISTED)
            places, state = _write_list(
                base, x, info, upto, words, center, scale, lists, low, lows, places, state, L
            )
            window += MOST_LISTED


@triton.jit
def _write_list(
    base, x, info, n, words, center, scale, lists, low, lows, places, state, L: tl.constexpr
):
    """Write what a list of `n` says; `places` are where its parts go to."""
    WIDTH: tl.constexpr = 8 * L.item
    low_at, gap_at, sign_at, quotient_at, value_at, exception_at = places
    ahead, done, number = state
    q = tl.arange(0, PIECE)
    for at in range(0, n, PIECE):
        v, y, changed, c, there, gap, counts, begins, ahead = _gaps(
            base, x, info, at, n, center, lists, ahead, L
        )
        own = (lows >> (c * 4)) & 15
        to = _of_class(low_at - begins * low, c) + q * own
        put(words, to, gap.to(tl.uint32), own, there & (own > 0))
        low_at += counts * low
        codes = tl.where(there, (gap >> own) + 1, 0)
        sums = tl.sum(_by_class(codes, c), 1)
        to = _of_class(gap_at - tl.cumsum(sums, 0) + sums, c) + tl.cumsum(codes, 0) - 1
        mark_bits(words, to, there)
        gap_at += sums
        mark = changed.to(tl.int32)
        if L.overwrite:
            k = done + tl.cumsum(mark, 0) - mark
            put(words, value_at + k * WIDTH, y, mark * WIDTH, changed)
            done += tl.sum(mark, 0)
        else:
            negative, size, hot, bits, quotient, exception = _change(v, y, scale, L)
            code, bits = tl.where(changed, hot + quotient, 0), tl.where(changed, bits, 0)
            odd = (changed & exception).to(tl.int32)
            # Each of the four numbers has 16 bits for its sum.
            all_four = mark.to(tl.int64) | (odd.to(tl.int64) << 16)
            all_four |= (code.to(tl.int64) << 32) | (bits.to(tl.int64) << 48)
            upto, total = tl.cumsum(all_four, 0), tl.sum(all_four, 0)
            k = done + _quarter(upto, 0) - mark
            mark_bits(words, sign_at + k, changed & negative)
            mark_bits(words, quotient_at + _quarter(upto, 2) - 1, changed & (hot != 0))
            to = value_at + _quarter(upto, 3) - bits
            put(words, to, tl.where(exception, 0, size), bits, bits > 0)
            if _quarter(total, 1) > 0:
                to = exception_at + (number + _quarter(upto, 1) - odd) * (LOG_TILE + WIDTH)
                put(words, to, k.to(tl.uint32), odd * LOG_TILE, odd != 0)
                put(words, to + LOG_TILE, size, odd * WIDTH, odd != 0)
            done += _quarter(total, 0)
            number += _quarter(total, 1)
            quotient_at += _quarter(total, 2)
            value_at += _quarter(total, 3)
    places = low_at, gap_at, sign_at, quotient_at, value_at, exception_at
    return places, (ahead, done, number)


@triton.jit
def _quarter(sums, k):
    """Number `k` of sums of 16 bits each."""
    return ((sums >> (16 * k)) & 0xFFFF).to(tl.int32)


@triton.jit
def mark_bits(words, at, use):
    """Set single bits."""
    one = (at * 0 + 1) << (at & 31)
    tl.atomic_or(words + (at >> 5), one, mask=use, sem="relaxed")


@triton.jit
def place_one(infos, sums, tiles):
    """Where the tiles of a chunk start, and how many words they have; `infos`: their memory."""
    used = tl.zeros([], tl.int64)
    for at in range(0, tiles, 2048):
        i = at + tl.arange(0, 2048)
        info = infos + i.to(tl.int64) * WORDS
        size = tl.load(info, mask=i < tiles, other=0).to(tl.int64)
        before = used + tl.cumsum(size, 0) - size
        tl.store(info + STATE + 3, before.to(tl.int32), mask=i < tiles)
        used += tl.sum(size, 0)
    tl.store(sums + 3, used)


class Target(NamedTuple):
    """Where a chunk is written to; a class, as programs pass it on as one.

    Attributes:
        static_ptr, dynamic_ptr: Its static and dynamic part.
        record_ptr: Its record, words of 64 bits.
        stride, most: Bytes of the static part, and at most of the dynamic one.
    """

    static_ptr: Any
    dynamic_ptr: Any
    record_ptr: Any
    stride: Any
    most: Any


@triton.jit
def pack_one(x_ptr, from_ptr, t, p, L: tl.constexpr):
    """Write a tile and its offset, or its share of the raw bytes; once, record and digests."""
    nbytes = tl.load(t.sums + 3) * 4
    raw_dynamic = tl.maximum(t.n * L.item - p.stride, 0)
    shrinks = nbytes <= raw_dynamic
    dynamic_nbytes = tl.minimum(nbytes, raw_dynamic)
    fits = dynamic_nbytes <= p.most
    if t.tile == 0:
        write_record(p.record_ptr, t.chunk, dynamic_nbytes, fits, shrinks, L.sums)
        if shrinks:
            digests = p.static_ptr.to(tl.pointer_type(tl.int64))
            tl.store(digests, tl.load(t.sums + 1))
            tl.store(digests + 1, tl.load(t.sums + 2))
    if t.m > 0:
        before = tl.load(t.info + STATE + 3)
        if shrinks:
            offsets = (p.static_ptr + DIGESTS).to(tl.pointer_type(tl.int32))
            tl.store(offsets + t.tile, before)
        if fits:
            x = elements_at(x_ptr, t.first, L)
            if shrinks:
                count = tl.load(t.info)
                words = p.dynamic_ptr.to(tl.pointer_type(tl.int32))
                words += before.to(tl.uint32, bitcast=True).to(tl.int64)
                kind = tl.load(t.info + 1)
                if (count > 0) & (kind != OF_PLANES):
                    if kind == OF_PLAIN:
                        _write_plain(x, t.m, words, count, L.item)
                    elif count <= SLOT_WORDS:
                        for at in range(0, count, 256):
                            i = at + tl.arange(0, 256)
                            word = tl.load(t.info + SLOT + i, mask=i < count, other=0)
                            tl.store(words + i, word, mask=i < count)
                    else:
                        base = elements_at(from_ptr, t.first, L)
                        _write_tile(base, x, t.m, t.info, words, count, L)
            else:
                store_raw(x, t.begin, t.m, p.static_ptr, p.stride, p.dynamic_ptr, L.item)
                tiles = ((t.n + TILE - 1) // TILE).to(tl.int32)
                clear(p.static_ptr, t.n * L.item, p.stride, t.tile, tiles)
