# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment,misc"
"""delta on a GPU: tiles of planes, by kernels of their own. specs/delta.md.

These tiles are few, and what the other kernels do with a tile needs the registers that they have.
So a launch behind that which measures tiles finds those that take less as planes, and one behind
that which writes tiles writes them. To decode, a launch behind that which decodes the others flips
the bits that differ, one plane after the other. Programs of all other tiles exit at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import delta
from .common.frame_triton import CHUNK_PAYLOAD, LATE, report
from .delta_decode_triton import BITS, find_places, ones_of, pick, words_of
from .delta_encode_triton import OF_PLANES, clear_words, mark_bits, put
from .delta_scan_triton import GROUPS, LIST, STATE
from .delta_words_triton import (
    LOG_TILE,
    PIECE,
    TILE,
    elements_at,
    get_bits,
    low_bits,
    terms_of,
)

_HEAD, _EIGHTHS = tl.constexpr(delta.PLANES_HEAD), tl.constexpr(delta.BITMAP_EIGHTHS)
#: Elements whose gaps are found at a time. Memory for as many uint16 numbers is at GROUPS: what
#: other tiles have there is found anew before it is used.
_AT_ONCE = tl.constexpr(512)
#: Elements of which ones are counted at a time.
_ROWS = tl.constexpr(128)
#: In work memory of a tile of planes: ones of each plane, and bits of its quotients.
_ONES, _QUOTIENTS = LIST, tl.constexpr(LIST.value + 32)


@triton.jit
def _lists(ones, m):
    """(listed flags, low bits of gaps, whether it is a bitmap) of planes with so many ones."""
    listed = tl.minimum(ones, m - ones)
    return listed, low_bits(ones * 0 + m, listed), 8 * listed > _EIGHTHS * m


@triton.jit
def _differing(base, x, i, m):
    """The bits in which elements `i` differ, uint32; 0 behind the tile's `m` elements."""
    v = tl.load(base + i, mask=i < m, other=0).to(tl.uint32)
    return v ^ tl.load(x + i, mask=i < m, other=0).to(tl.uint32)


@triton.jit
def _count_ones(base, x, m, WIDTH: tl.constexpr):
    """How many elements differ in each bit."""
    bit = tl.arange(0, WIDTH)[None, :].to(tl.uint32)
    found = tl.zeros([_ROWS, WIDTH], tl.int32)
    for at in range(0, m, _ROWS):
        differing = _differing(base, x, at + tl.arange(0, _ROWS), m)
        found += ((differing[:, None] >> bit) & 1).to(tl.int32)
    return tl.sum(found, 0)


@triton.jit
def _gaps(base, x, numbers, at, k, flip, ahead, m):
    """Gaps of the listed flags of plane `k` among the elements from `at` on.

    `flip` is 1 where zeros are listed, `ahead` the element behind the last one listed. Gives the
    gaps, one behind the other, how many there are, and what `ahead` is behind them.
    """
    q = tl.arange(0, _AT_ONCE)
    i = at + q
    one = ((_differing(base, x, i, m) >> k.to(tl.uint32)) & 1).to(tl.int32) ^ flip
    one = tl.where(i < m, one, 0)
    tl.debug_barrier()
    tl.store(numbers + tl.cumsum(one, 0) - one, i.to(tl.uint16), mask=one != 0)
    tl.debug_barrier()
    n = tl.sum(one, 0)
    here = tl.load(numbers + q, mask=q < n, other=0).to(tl.int32)
    before = tl.load(numbers + q - 1, mask=(q > 0) & (q < n), other=0).to(tl.int32) + 1
    gap = tl.where(q < n, here - tl.where(q > 0, before, ahead), 0)
    return gap, n, tl.maximum(ahead, tl.max(tl.where(q < n, here + 1, 0), 0))


@triton.jit
def size_one(x_ptr, from_ptr, t, L: tl.constexpr):
    """Find what a tile takes as planes, if they may take less, and if they do, note it."""
    WIDTH: tl.constexpr = 8 * L.item
    info, m = t.info, t.m
    if m > 0:
        words, changes = tl.load(info), tl.load(info + 7)
        # Planes that take as much as a plain tile come before it.
        most = words + tl.load(info + 1)
        # With up to half of the elements changed no plane has more ones than there are changes, so
        # that no gap has fewer low bits than if all of them were in one plane.
        least = 2 + WIDTH + LOG_TILE
        flips = tl.where(2 * changes <= m, tl.load(info + STATE + 8), 0)
        least += flips * (low_bits(m, changes) + 1)
        if (changes > 0) & ((least + 31) // 32 < most):
            base, x = elements_at(from_ptr, t.first, L), elements_at(x_ptr, t.first, L)
            lane = tl.arange(0, WIDTH)
            ones = _count_ones(base, x, m, WIDTH)
            listed, low, bitmap = _lists(ones, m)
            nbits = 2 + WIDTH + LOG_TILE * tl.sum((ones > 0).to(tl.int32), 0)
            nbits += tl.sum(tl.where(bitmap, m, listed * low), 0)
            coded = tl.where(bitmap, 0, listed)
            # No quotient takes less than a bit.
            if (nbits + tl.sum(coded, 0) + 31) // 32 < most:
                numbers = (info + GROUPS).to(tl.pointer_type(tl.uint16))
                quotients = lane * 0
                for plane in range(WIDTH):
                    k = m * 0 + plane
                    if pick(coded, k, WIDTH) > 0:
                        flip = (pick(listed, k, WIDTH) != pick(ones, k, WIDTH)).to(tl.int32)
                        own, total, ahead = pick(low, k, WIDTH), m * 0, m * 0
                        for at in range(0, m, _AT_ONCE):
                            gap, n, ahead = _gaps(base, x, numbers, at, k, flip, ahead, m)
                            total += tl.sum(gap >> own, 0) + n
                        quotients = tl.where(lane == k, total, quotients)
                words = (nbits + tl.sum(quotients, 0) + 31) // 32
                if words < most:
                    tl.store(info, words)
                    tl.store(info + 1, m * 0 + OF_PLANES)
                    tl.store(info + _ONES + lane, ones)
                    tl.store(info + _QUOTIENTS + lane, quotients)


@triton.jit
def write_planes_one(x_ptr, from_ptr, t, p, L: tl.constexpr):
    """Write a tile that is to be planes, where its chunk shrinks."""
    nbytes = tl.load(t.sums + 3) * 4
    shrinks = nbytes <= tl.maximum(t.n * L.item - p.stride, 0)
    if (t.m > 0) & shrinks & (nbytes <= p.most):
        if tl.load(t.info + 1) == OF_PLANES:
            before = tl.load(t.info + STATE + 3)
            words = p.dynamic_ptr.to(tl.pointer_type(tl.int32))
            words += before.to(tl.uint32, bitcast=True).to(tl.int64)
            base, x = elements_at(from_ptr, t.first, L), elements_at(x_ptr, t.first, L)
            _write(base, x, t.m, t.info, words, tl.load(t.info), 8 * L.item)


@triton.jit
def _write(base, x, m, info, words, count, WIDTH: tl.constexpr):
    """A tile of planes, by what `size_one` has found of it."""
    clear_words(words, count)
    tl.debug_barrier()
    lane = tl.arange(0, WIDTH)
    ones = tl.load(info + _ONES + lane)
    listed, low, bitmap = _lists(ones, m)
    there = (ones > 0).to(tl.int32)
    planes = tl.sum(there.to(tl.uint32) << lane.to(tl.uint32), 0)
    put(words, lane * 0, (lane * 0 + _HEAD).to(tl.uint32), lane * 0 + 2, lane == 0)
    put(words, lane * 0 + 2, (lane * 0).to(tl.uint32) + planes, lane * 0 + WIDTH, lane == 0)
    to = 2 + WIDTH + LOG_TILE * (tl.cumsum(there, 0) - there)
    put(words, to, (ones - 1).to(tl.uint32), lane * 0 + LOG_TILE, there != 0)
    body = tl.where(bitmap, m, listed * low + tl.load(info + _QUOTIENTS + lane))
    starts = 2 + WIDTH + LOG_TILE * tl.sum(there, 0) + tl.cumsum(body, 0) - body
    numbers = (info + GROUPS).to(tl.pointer_type(tl.uint16))
    for plane in range(WIDTH):
        k = m * 0 + plane
        own, count = pick(low, k, WIDTH), pick(listed, k, WIDTH)
        low_at = pick(starts, k, WIDTH)
        if 8 * count > _EIGHTHS * m:
            bit = tl.arange(0, 32)[None, :]
            for at in range(0, m, 2048):
                i = at + tl.arange(0, 64) * 32
                one = (_differing(base, x, i[:, None] + bit, m) >> k.to(tl.uint32)) & 1
                word = tl.sum(one << bit.to(tl.uint32), 1)
                put(words, low_at + i, word, i * 0 + 32, i < m)
        elif count > 0:
            flip = (count != pick(ones, k, WIDTH)).to(tl.int32)
            gap_at, ahead = low_at + count * own, m * 0
            q = tl.arange(0, _AT_ONCE)
            for at in range(0, m, _AT_ONCE):
                gap, n, ahead = _gaps(base, x, numbers, at, k, flip, ahead, m)
                each = q * 0 + own
                put(words, low_at + q * own, gap.to(tl.uint32), each, (q < n) & (each > 0))
                codes = tl.where(q < n, (gap >> own) + 1, 0)
                mark_bits(words, gap_at + tl.cumsum(codes, 0) - 1, q < n)
                low_at += n * own
                gap_at += tl.sum(codes, 0)


@triton.jit
def flip_one(t, p, from_ptr, out_ptr, to, lo, hi, status_ptr, L: tl.constexpr):
    """Flip what differs in a tile of planes, if nothing has been found wrong so far.

    Arguments and `Launch` are those of `change_one`, which runs before: with `Launch.store` it has
    copied the base's elements.
    """
    if (t.m > 0) & (tl.load(status_ptr) == 0):
        if p.raw == 0:
            words, count, _ = words_of(p, t, L)
            if (tl.load(words, mask=count > 0, other=0) & _HEAD) == _HEAD:
                base, out = elements_at(from_ptr, t.first, L), elements_at(out_ptr, to, L)
                terms, bad = _flip(base, out, words, count, t.m, t.begin, t.info, lo, hi, L)
                if not L.known:
                    if bad:
                        report(status_ptr, LATE + (t.chunk << 8) + CHUNK_PAYLOAD)
                    else:
                        total = terms.to(tl.int64, bitcast=True)
                        tl.atomic_add(t.sums + 2, total, sem="relaxed")


@triton.jit
def _flip(base, out, words, count, m, begin, info, lo, hi, L: tl.constexpr):
    """Read planes, and flip bits of elements `lo` to `hi` at `out`; (terms of changes, bad)."""
    WIDTH: tl.constexpr = 8 * L.item
    lane, bits, end = tl.arange(0, WIDTH), info + BITS, count * 32
    planes = get_bits(words, count, m * 0 + 2, m * 0 + WIDTH)
    there = ((planes >> lane.to(tl.uint32)) & 1).to(tl.int32)
    at = 2 + WIDTH + LOG_TILE * (tl.cumsum(there, 0) - there)
    ones = get_bits(words, count, at, lane * 0 + LOG_TILE).to(tl.int32, bitcast=True) + 1
    ones = tl.where(there != 0, ones, 0)
    most = tl.max(ones, 0)
    bad = (most == 0) | (most > m)
    listed, low, _ = _lists(tl.minimum(ones, m), m)
    at = m * 0 + 2 + WIDTH + LOG_TILE * tl.sum(there, 0)
    terms = tl.zeros([], tl.uint64)
    for plane in range(WIDTH):
        k = m * 0 + plane
        own, many = pick(ones, k, WIDTH), pick(listed, k, WIDTH)
        if (own > 0) & (bad == 0):
            # The plane before has been read.
            tl.debug_barrier()
            flip = m * 0
            if 8 * many > _EIGHTHS * m:
                bad = _copy_bitmap(words, count, at, m, bits) != own
                at += m
            else:
                clear_words(bits, m * 0 + TILE // 32)
                tl.debug_barrier()
                n = pick(low, k, WIDTH)
                at, bad = find_places(words, count, at + many * n, end, at, n, many, m, m * 0, bits)
                flip = tl.where(own != many, flip - 1, flip)
            tl.debug_barrier()
            if bad == 0:
                terms += _flip_plane(base, out, bits, k, flip, m, begin, lo, hi, L)
    # Less than a word is left, and zeros.
    bad = bad | (at > end) | (end - at >= 32)
    rest = get_bits(words, count, at, tl.maximum(tl.minimum(end - at, 32), 0))
    return terms, bad | (rest != 0)


@triton.jit
def _copy_bitmap(words, count, at, m, bits):
    """Copy `m` flags, from bit `at` of words on, to `bits`; how many are set."""
    found = tl.zeros([PIECE], tl.int32)
    for first in range(0, m, 32 * PIECE):
        i = first + tl.arange(0, PIECE) * 32
        word = get_bits(words, count, at + i, tl.maximum(tl.minimum(m - i, 32), 0))
        tl.store(bits + (i >> 5), word.to(tl.int32, bitcast=True), mask=i < m)
        found += ones_of(word)
    return tl.sum(found, 0)


@triton.jit
def _flip_plane(base, out, bits, k, flip, m, begin, lo, hi, L: tl.constexpr):
    """Flip bit `k` of the elements with a flag in `bits`, each of which `flip` is applied to.

    Gives the terms of the digest of new elements without those of old ones. Of these only the bit
    counts, so that it does not matter whether others have been flipped before.
    """
    terms = tl.zeros([_AT_ONCE], tl.uint64)
    for at in range(0, m, _AT_ONCE):
        i = at + tl.arange(0, _AT_ONCE)
        word = tl.load(bits + (i >> 5), mask=i < m, other=0) ^ flip
        use = (((word >> (i & 31)) & 1) != 0) & (i < m)
        bit = (i * 0 + 1).to(tl.uint32) << k.to(tl.uint32)
        if not L.known:
            v = tl.load(base + i, mask=use, other=0).to(tl.uint32)
            more = terms_of(v ^ bit, begin + i, L.item) - terms_of(v, begin + i, L.item)
            terms += tl.where(use, more, 0)
        if L.store:
            use = use & (i >= lo) & (i < hi)
            y = tl.load(out + i, mask=use, other=0).to(tl.uint32) ^ bit
            tl.store(out + i, y.to(out.dtype.element_ty), mask=use)
    return tl.sum(terms, 0)
