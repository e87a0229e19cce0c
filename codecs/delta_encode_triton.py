# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment,misc"
"""delta on a GPU: what a tile takes, and how it is written, piece by piece. specs/delta.md."""

from __future__ import annotations

import triton
import triton.language as tl

from . import delta
from .common.dynamic_triton import chunk_at, items, store_raw, write_record
from .common.frame_triton import clear
from .common.launch_triton import kernel
from .delta_words_triton import (
    COUNTS,
    DIGESTS,
    FAR,
    LOG_TILE,
    PIECE,
    SUMS,
    TILE,
    WORDS,
    exponents_of,
    info_at,
    length_of,
    log16,
    low_bits,
    low_of,
    members_of,
    ordered,
    terms_of,
    tile_at,
)

_SAMPLED, _MAX_QUOTIENT = tl.constexpr(delta.SAMPLED), tl.constexpr(delta.MAX_QUOTIENT)
_X0, _X1, _X2, _X3 = (tl.constexpr(excess) for excess in delta.EXCESS)
#: Scales, at most, and what their costs are told from.
BINS = tl.constexpr(512)


@triton.jit
def _shifted(v, n):
    """`v >> n` of uint32 numbers, n up to 32."""
    return (v.to(tl.uint64) >> n.to(tl.uint64)).to(tl.uint32)


@triton.jit
def _put(words, at, value, n, use):
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


@triton.jit
def _scale(counts, least, L: tl.constexpr):
    """See `delta.scale_of`. At `counts` are three times as many numbers as there are bins: changes
    and large changes by exponent, and large ones by exponent and bit length; they are used up.
    """
    WIDTH: tl.constexpr = 8 * L.item
    MOST: tl.constexpr = (1 << L.exponent) - 1 + WIDTH
    s = tl.arange(0, BINS)
    changes = tl.load(counts + s)
    large = tl.load(counts + BINS + s)
    above = tl.load(counts + 2 * BINS + s)
    larges = tl.sum(large, 0)
    top = tl.max(tl.where(above > 0, s, -1), 0)
    last = tl.maximum(tl.where(larges > 0, tl.minimum(top + 1, MOST), 0), least)
    below = tl.cumsum(changes, 0)
    steps = tl.cumsum(below, 0) - below
    not_below = larges - tl.cumsum(large, 0) + large
    behind = larges - tl.cumsum(above, 0) + above
    tl.debug_barrier()
    tl.store(counts + s, steps)
    tl.store(counts + BINS + s, behind)
    tl.debug_barrier()
    far = s - WIDTH - 1
    cost = 2 * (steps - tl.load(counts + far, mask=far >= 0, other=0))
    over = tl.load(counts + BINS + s + 4, mask=s + 4 < BINS, other=0)
    cost += 2 * (LOG_TILE + WIDTH) * (not_below + over)
    cost += _X0 * above
    cost += _X1 * tl.load(counts + 2 * BINS + s + 1, mask=s + 1 < BINS, other=0)
    cost += _X2 * tl.load(counts + 2 * BINS + s + 2, mask=s + 2 < BINS, other=0)
    cost += _X3 * tl.load(counts + 2 * BINS + s + 3, mask=s + 3 < BINS, other=0)
    cost = tl.where((s >= least) & (s <= last), cost, FAR)
    best = tl.min(cost, 0)
    return tl.min(tl.where(cost == best, s, BINS), 0)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


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


@kernel
def measure_kernel(
    x_ptr,
    from_ptr,
    scratch_ptr,
    nelem: tl.int64,
    chunk_nelem: tl.int64,
    tiles: tl.int32,
    sums_words: tl.int64,
    L: tl.constexpr,
):
    """Compare a tile with the base: digests, and what it takes, which is kept for `pack_kernel`.

    Known of a tile: words, whether it is plain, center, scale, exceptions, bits of quotients, low
    bits, changes; then of each class size, changes, and bits of quotients of gaps.
    """
    LANES: tl.constexpr = L.lanes
    WIDTH: tl.constexpr = 8 * L.item
    chunk, tile, first, begin, m = tile_at(nelem, chunk_nelem, tiles)
    info = info_at(scratch_ptr, sums_words, chunk, tile, tiles)
    base, x = items(from_ptr, L.item) + first, items(x_ptr, L.item) + first
    counts = info + COUNTS
    for at in range(0, 3 * BINS, BINS):
        tl.store(counts + at + tl.arange(0, BINS), tl.zeros([BINS], tl.int32))
    tl.debug_barrier()
    center = _center(base, m, L)
    c = tl.arange(0, LANES)
    sizes, changes = tl.zeros([LANES], tl.int32), tl.zeros([LANES], tl.int32)
    of_base, of_result = tl.zeros([PIECE], tl.uint64), tl.zeros([PIECE], tl.uint64)
    least = m * 0 + BINS
    for at in range(0, m, PIECE):
        i = at + tl.arange(0, PIECE)
        inside = i < m
        v = tl.load(base + i, mask=inside, other=0).to(tl.uint32)
        y = tl.load(x + i, mask=inside, other=0).to(tl.uint32)
        of_base += tl.where(inside, terms_of(v, begin + i, L.item), 0)
        of_result += tl.where(inside, terms_of(y, begin + i, L.item), 0)
        changed = (v != y) & inside
        e = exponents_of(v, L)
        members = members_of(e, center, inside, L)
        if L.overwrite:
            members = inside.to(tl.int32)[None, :] + tl.zeros([LANES, PIECE], tl.int32)
            members = tl.where(c[:, None] == 0, members, 0)
        sizes += tl.sum(members, 1)
        changes += tl.sum(tl.where(changed[None, :], members, 0), 1)
        if not L.overwrite:
            _, size, _, _, _, _ = _change(v, y, e * 0, L)
            length = tl.where(changed, length_of(size), 0)
            large = length > 0
            one = e * 0 + 1
            tl.atomic_add(counts + e, one, mask=changed, sem="relaxed")
            tl.atomic_add(counts + BINS + e, one, mask=large, sem="relaxed")
            tl.atomic_add(counts + 2 * BINS + e + length, one, mask=large, sem="relaxed")
            least = tl.minimum(least, tl.min(tl.where(changed, e, BINS), 0))
    sums = scratch_ptr.to(tl.pointer_type(tl.int64)) + chunk * SUMS
    old, new = tl.sum(of_base, 0), tl.sum(of_result, 0)
    tl.atomic_add(sums + 1, old.to(tl.int64, bitcast=True), sem="relaxed")
    tl.atomic_add(sums + 2, new.to(tl.int64, bitcast=True), sem="relaxed")
    total = tl.sum(changes, 0)
    words, plain = m * 0, m * 0
    scale, exceptions, quotients, low_total = m * 0, m * 0, m * 0, m * 0
    gap_bits = tl.zeros([LANES], tl.int32)
    if total > 0:
        tl.debug_barrier()
        if not L.overwrite:
            scale = _scale(counts, least, L)
        listed = tl.minimum(changes, sizes - changes)
        lists = 2 * changes <= sizes
        low = low_bits(sizes, listed)
        before = tl.zeros([LANES], tl.int32)
        last = tl.zeros([LANES], tl.int32)
        for at in range(0, m, PIECE):
            gaps, is_listed, before, last = _gaps_of(base, x, at, m, center, lists, before, last, L)
            gap_bits += tl.sum(tl.where(is_listed, (gaps >> low[:, None]) + 1, 0), 1)
            if not L.overwrite:
                i = at + tl.arange(0, PIECE)
                v = tl.load(base + i, mask=i < m, other=0).to(tl.uint32)
                y = tl.load(x + i, mask=i < m, other=0).to(tl.uint32)
                _, _, hot, bits, quotient, exception = _change(v, y, scale, L)
                changed = v != y
                exceptions += tl.sum((changed & exception).to(tl.int32), 0)
                quotients += tl.sum(tl.where(changed, hot + quotient, 0), 0)
                low_total += tl.sum(tl.where(changed, bits, 0), 0)
        nbits = m * 0 + 1
        gammas = tl.where(c < L.classes, 2 * log16(changes + 1) - 1, 0)
        if L.overwrite:
            gammas = tl.where(c == 0, gammas, 0)
            nbits += total * WIDTH
        else:
            nbits += L.exponent + L.scale_bits + total + quotients + low_total
            nbits += 2 * log16(exceptions + 1) - 1 + exceptions * (LOG_TILE + WIDTH)
        nbits += tl.sum(gammas + listed * low + gap_bits, 0)
        words = (nbits + 31) // 32
        of_plain = 1 + (m * L.item + 3) // 4
        plain = (words > of_plain).to(tl.int32)
        words = tl.minimum(words, of_plain)
    tl.store(info, words)
    tl.store(info + 1, plain)
    tl.store(info + 2, center)
    tl.store(info + 3, scale)
    tl.store(info + 4, exceptions)
    tl.store(info + 5, quotients)
    tl.store(info + 6, low_total)
    tl.store(info + 7, total)
    tl.store(info + 8 + c, sizes)
    tl.store(info + 16 + c, changes)
    tl.store(info + 24 + c, gap_bits)


@triton.jit
def _listed_at(base, x, i, m, center, lists, L: tl.constexpr):
    """(members, those that are listed) of elements `i`, shape [lanes, piece]."""
    LANES: tl.constexpr = L.lanes
    inside = (i >= 0) & (i < m)
    v = tl.load(base + i, mask=inside, other=0).to(tl.uint32)
    y = tl.load(x + i, mask=inside, other=0).to(tl.uint32)
    members = members_of(exponents_of(v, L), center, inside, L)
    if L.overwrite:
        members = tl.where(tl.arange(0, LANES)[:, None] == 0, inside.to(tl.int32)[None, :], 0)
    changed = (v != y).to(tl.int32)
    listed = (members != 0) & (changed[None, :] == lists.to(tl.int32)[:, None])
    return members, listed


@triton.jit
def _gaps_of(base, x, at, m, center, lists, before, last, L: tl.constexpr):
    """Gaps of a piece's elements and whether they are listed, shape [lanes, piece].

    Of each class `before` is the number of elements that are not listed before the piece, and
    `last` that number at the last listed one; what they are behind the piece is given too.
    """
    i = at + tl.arange(0, PIECE)
    members, listed = _listed_at(base, x, i, m, center, lists, L)
    _, earlier = _listed_at(base, x, i - 1, m, center, lists, L)
    others = tl.where(listed, 0, members)
    here = before[:, None] + tl.cumsum(others, 1) - others
    # Number at the last listed element before each.
    seen = tl.associative_scan(tl.where(earlier, here, -1), 1, _larger)
    seen = tl.maximum(seen, last[:, None])
    gaps = here - seen
    after = tl.maximum(last, tl.max(tl.where(listed, here, -1), 1))
    return gaps, listed, before + tl.sum(others, 1), after


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
def _clear_words(words, count):
    for at in range(0, count, 512):
        i = at + tl.arange(0, 512)
        tl.store(words + i, tl.zeros([512], tl.int32), mask=i < count)


@triton.jit
def _write_tile(base, x, m, info, words, count, L: tl.constexpr):
    """A coded tile, by what `measure_kernel` has found."""
    LANES: tl.constexpr = L.lanes
    WIDTH: tl.constexpr = 8 * L.item
    c = tl.arange(0, LANES)
    _clear_words(words, count)
    tl.debug_barrier()
    center, scale, exceptions = tl.load(info + 2), tl.load(info + 3), tl.load(info + 4)
    sizes, changes = tl.load(info + 8 + c), tl.load(info + 16 + c)
    gap_bits = tl.load(info + 24 + c)
    total = tl.load(info + 7)
    listed = tl.minimum(changes, sizes - changes)
    lists = 2 * changes <= sizes
    low = low_bits(sizes, listed)
    one = c == 0
    head = m * 0 + 1
    if not L.overwrite:
        zero = c * 0
        _put(words, zero + head, (zero + center).to(tl.uint32), zero + L.exponent, one)
        head += L.exponent
        _put(words, zero + head, (zero + scale).to(tl.uint32), zero + L.scale_bits, one)
        head += L.scale_bits
    coded = (c < L.classes) & (one | (not L.overwrite))
    below = log16(changes + 1) - 1
    lengths = tl.where(coded, 2 * below + 1, 0)
    gamma_at = head + tl.cumsum(lengths, 0) - lengths
    ones = (c * 0 + 1).to(tl.uint32)
    _put(words, gamma_at + below, ones, c * 0 + 1, coded)
    _put(words, gamma_at + below + 1, (changes + 1).to(tl.uint32), below, coded & (below > 0))
    head += tl.sum(lengths, 0)
    if not L.overwrite:
        more = log16(c * 0 + exceptions + 1) - 1
        _put(words, head + more, ones, c * 0 + 1, one)
        _put(words, head + more + 1, (c * 0 + exceptions + 1).to(tl.uint32), more, one & (more > 0))
        head += 2 * tl.max(more, 0) + 1
    fields = listed * low
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
    before, last = tl.zeros([LANES], tl.int32), tl.zeros([LANES], tl.int32)
    done, number = m * 0, m * 0
    for start in range(0, m, PIECE):
        i = start + tl.arange(0, PIECE)
        gaps, is_listed, before, last = _gaps_of(base, x, start, m, center, lists, before, last, L)
        marks = is_listed.to(tl.int32)
        own = low[:, None]
        to_low = low_at[:, None] + (tl.cumsum(marks, 1) - marks) * own
        wide = tl.zeros([LANES, PIECE], tl.int32) + own
        _put(words, to_low, gaps.to(tl.uint32), wide, is_listed & (wide > 0))
        low_at += tl.sum(marks, 1) * low
        codes = tl.where(is_listed, (gaps >> own) + 1, 0)
        to_gap = gap_at[:, None] + tl.cumsum(codes, 1) - 1
        _put(words, to_gap, marks.to(tl.uint32), marks, is_listed)
        gap_at += tl.sum(codes, 1)
        v = tl.load(base + i, mask=i < m, other=0).to(tl.uint32)
        y = tl.load(x + i, mask=i < m, other=0).to(tl.uint32)
        changed = v != y
        mark = changed.to(tl.int32)
        k = done + tl.cumsum(mark, 0) - mark
        if L.overwrite:
            _put(words, value_at + k * WIDTH, y, mark * WIDTH, changed)
        else:
            negative, size, hot, bits, quotient, exception = _change(v, y, scale, L)
            _put(words, sign_at + k, negative.to(tl.uint32), mark, changed)
            code = tl.where(changed, hot + quotient, 0)
            at = quotient_at + tl.cumsum(code, 0) - 1
            _put(words, at, mark.to(tl.uint32), mark, changed & (hot != 0))
            quotient_at += tl.sum(code, 0)
            bits = tl.where(changed, bits, 0)
            at = value_at + tl.cumsum(bits, 0) - bits
            _put(words, at, tl.where(exception, 0, size), bits, bits > 0)
            value_at += tl.sum(bits, 0)
            odd = (changed & exception).to(tl.int32)
            at = exception_at + (number + tl.cumsum(odd, 0) - odd) * (LOG_TILE + WIDTH)
            _put(words, at, k.to(tl.uint32), odd * LOG_TILE, odd != 0)
            _put(words, at + LOG_TILE, size, odd * WIDTH, odd != 0)
            number += tl.sum(odd, 0)
        done += tl.sum(mark, 0)


@kernel
def pack_kernel(
    x_ptr,
    from_ptr,
    out_ptr,
    scratch_ptr,
    nelem: tl.int64,
    chunk_nelem: tl.int64,
    tiles: tl.int32,
    sums_words: tl.int64,
    head: tl.int32,
    static_at: tl.int64,
    static_stride: tl.int64,
    dynamic_at: tl.int64,
    dynamic_stride: tl.int64,
    L: tl.constexpr,
):
    """Write a tile and its offset, or its share of the raw bytes; once, record and digests."""
    chunk, tile, first, begin, m = tile_at(nelem, chunk_nelem, tiles)
    g = (head, static_at, static_stride, dynamic_at, dynamic_stride)
    _, n, static_ptr, dynamic_ptr, record_ptr = chunk_at(out_ptr, chunk, nelem, chunk_nelem, g)
    all_words, earlier = tl.zeros([512], tl.int64), tl.zeros([512], tl.int64)
    all_info = info_at(scratch_ptr, sums_words, chunk, tile * 0, tiles)
    for at in range(0, tiles, 512):
        i = at + tl.arange(0, 512)
        size = tl.load(all_info + i * WORDS, mask=i < tiles, other=0).to(tl.int64)
        all_words += size
        earlier += tl.where(i < tile, size, 0)
    before = tl.sum(earlier, 0)
    nbytes = tl.sum(all_words, 0) * 4
    stride = static_stride * 128
    raw_dynamic = tl.maximum(n * L.item - stride, 0)
    shrinks = nbytes <= raw_dynamic
    dynamic_nbytes = tl.minimum(nbytes, raw_dynamic)
    fits = dynamic_nbytes <= dynamic_stride * 128
    sums = scratch_ptr.to(tl.pointer_type(tl.int64)) + chunk * SUMS
    if tile == 0:
        write_record(record_ptr, chunk, dynamic_nbytes, fits, shrinks, L.sums)
        if shrinks:
            digests = static_ptr.to(tl.pointer_type(tl.int64))
            tl.store(digests, tl.load(sums + 1))
            tl.store(digests + 1, tl.load(sums + 2))
    if m > 0:
        if shrinks:
            offsets = (static_ptr + DIGESTS).to(tl.pointer_type(tl.uint32))
            tl.store(offsets + tile, before.to(tl.uint32))
        if fits:
            if shrinks:
                info = info_at(scratch_ptr, sums_words, chunk, tile, tiles)
                count = tl.load(info)
                words = dynamic_ptr.to(tl.pointer_type(tl.int32)) + before
                base = items(from_ptr, L.item) + first
                x = items(x_ptr, L.item) + first
                if count > 0:
                    if tl.load(info + 1) != 0:
                        _write_plain(x, m, words, count, L.item)
                    else:
                        _write_tile(base, x, m, info, words, count, L)
            else:
                x = items(x_ptr, L.item) + first
                store_raw(x, begin, m, static_ptr, stride, dynamic_ptr, L.item)
                clear(static_ptr, n * L.item, stride, tile, tiles)
