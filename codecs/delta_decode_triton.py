# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment,misc"
"""delta on a GPU: what changed in a tile, by a program that has it to itself. specs/delta.md.

Elements are handled 32 at a time, a group, of which the kernel that reads the base has counted the
classes. Codes of gaps set bits in the order of classes. Of each group the bits are gathered, class
by class, and those of the few groups in which something changed are brought into the order of
elements. Changed elements are then listed, and what is coded of them is read for them alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .common.dynamic_triton import claims, items, load_raw
from .common.frame_triton import CHUNK_PAYLOAD, LATE, report
from .delta import MAX_QUOTIENT, PLANES_HEAD
from .delta_words_triton import (
    DIGESTS,
    FAR,
    LOG_TILE,
    PIECE,
    TILE,
    elements_at,
    exponents_of,
    get_bits,
    log16,
    low_bits,
    low_of,
    ordered,
    terms_of,
    unordered,
)

#: Elements of a group, and bits of a class in its counts.
GROUP, COUNT = tl.constexpr(32), tl.constexpr(6)
#: In work memory of a tile: a bit of each element in the order of classes, later the list; then of
#: each group its counts, later which of its elements have changed.
BITS = tl.constexpr(64)
MASKS = tl.constexpr(64 + int(TILE.value) // 32)
#: Behind the list: places of quotients.
_PLACES = tl.constexpr(896)
#: What is known of a tile, by its first word: as the base, values as they are, changes that are all
#: listed, or more than that, of a chunk that is raw.
SAME, PLAIN, LISTED, MANY, RAW = (tl.constexpr(n) for n in range(5))
#: Changes that are decoded at a time.
_PART = tl.constexpr(128)
_MOST_QUOTIENT, _PLANES_HEAD = tl.constexpr(MAX_QUOTIENT), tl.constexpr(PLANES_HEAD)


@triton.jit
def list_of(info, L: tl.constexpr):
    """(elements of a tile's list, uint16, and their values)."""
    bits = info + BITS
    return bits.to(tl.pointer_type(tl.uint16)), items(bits + L.listed // 2, L.item)


class Part(NamedTuple):
    """A chunk of a buffer; a class, as programs pass it on as one.

    Attributes:
        static_ptr, dynamic_ptr: Its static and dynamic part.
        stride, nbytes: Bytes of both.
        raw: Whether they are raw.
    """

    static_ptr: Any
    dynamic_ptr: Any
    stride: Any
    nbytes: Any
    raw: Any


@triton.jit
def part_of(src_ptr, starts_ptr, t, g, slot, L: tl.constexpr):
    """The chunk of a tile."""
    head, static_at, static_stride, dynamic_at, dynamic_stride = g
    record_ptr = src_ptr.to(tl.pointer_type(tl.int64)) + head + t.chunk * 4
    stride = static_stride * 128
    nbytes, raw = claims(record_ptr, t.n, stride, slot, L.item)
    static_ptr = src_ptr + (static_at + t.chunk * static_stride) * 128
    dynamic_ptr = src_ptr + (dynamic_at + t.chunk * dynamic_stride) * 128
    if L.packed:
        dynamic_ptr = src_ptr + tl.load(starts_ptr + t.chunk)
    return Part(static_ptr, dynamic_ptr, stride, nbytes, raw)


@triton.jit
def words_of(p, t, L: tl.constexpr):
    """(words of a tile of a chunk that is not raw, how many, whether they cannot be).

    No tile has more than it would have plain.
    """
    offsets = (p.static_ptr + DIGESTS).to(tl.pointer_type(tl.uint32)) + t.tile
    more = t.begin + TILE < t.n
    at = tl.load(offsets, mask=t.begin < t.n, other=0).to(tl.int64)
    behind = tl.load(offsets + 1, mask=more, other=0).to(tl.int64)
    behind = tl.where(more, behind, p.nbytes // 4)
    bad = (at > behind) | (behind > p.nbytes // 4) | ((t.tile == 0) & (at != 0))
    bad = bad | (p.nbytes % 4 != 0) | (behind - at > 1 + (t.m * L.item + 3) // 4)
    words = p.dynamic_ptr.to(tl.pointer_type(tl.uint32)) + tl.where(bad, 0, at)
    return words, tl.where(bad, 0, behind - at).to(tl.int32), bad


@triton.jit
def ones_of(x):
    """How many bits are set in each word, int32."""
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32, bitcast=True)


@triton.jit
def _number_of(one):
    """Which bit is set in words with one bit, int32."""
    return ((one.to(tl.float32).to(tl.int32, bitcast=True) >> 23) & 255) - 127


@triton.jit
def pick(v, k, LANES: tl.constexpr):
    """Number `k` of a vector."""
    return tl.sum(tl.where(tl.arange(0, LANES) == k, v, 0), 0)


@triton.jit
def _gamma(words, count, at):
    """(number, where it ends, whether it is bad): Elias' gamma code from bit `at` on."""
    ahead = get_bits(words, count, at, at * 0 + 16).to(tl.int32, bitcast=True)
    below = log16(ahead & (0 - ahead)) - 1
    bad = ahead == 0
    below = tl.maximum(below, 0)
    rest = get_bits(words, count, at + below + 1, below).to(tl.int32, bitcast=True)
    return (at * 0 + 1 << below) | rest, at + 2 * below + 1, bad


@triton.jit
def _exception(words, count, at, number, exceptions, WIDTH: tl.constexpr):
    """Which change exception `number` is of; behind the last one none that there is."""
    here = at + number * (LOG_TILE + WIDTH)
    found = get_bits(words, count, here, number * 0 + LOG_TILE).to(tl.int32, bitcast=True)
    return tl.where(number < exceptions, found, FAR)


@triton.jit
def _bit(words, i, inside):
    """Bits number `i` of words, int32; 0 where they are not inside."""
    word = tl.load(words + (i >> 5), mask=inside, other=0)
    return ((word >> (i & 31).to(tl.uint32)) & 1).to(tl.int32, bitcast=True)


@triton.jit
def _behind_ones(words, count, at, wanted):
    """The bit behind set bit number `wanted` of those from bit `at` on; one behind the words' end
    and a word if it is not there.
    """
    found, word = at * 0, at >> 5
    # The word of that bit, and how many are before it there.
    which, rest = at >> 5, at * 0
    while (found < wanted) & (word < count):
        i = word + tl.arange(0, 64)
        x = tl.load(words + i, mask=i < count, other=0)
        x = tl.where(i == at >> 5, (x >> (at & 31).to(tl.uint32)) << (at & 31).to(tl.uint32), x)
        n = ones_of(x)
        after = found + tl.cumsum(n, 0)
        here = (after >= wanted) & (after - n < wanted)
        which = tl.max(tl.where(here, i, which), 0)
        rest = tl.max(tl.where(here, wanted - (after - n), rest), 0)
        found += tl.sum(n, 0)
        word += 64
    b = which * 32 + tl.arange(0, 32)
    one = _bit(words, b, (b >= at) & (b < count * 32))
    last = tl.max(tl.where((one != 0) & (tl.cumsum(one, 0) == rest), b, -1), 0)
    to = tl.where(wanted > 0, last + 1, at)
    return tl.where(found >= wanted, to, count * 32 + 32)


@triton.jit
def find_places(words, count, at, end, low_at, low, listed, size, begin, bits):
    """Set the bits, from number `begin` on, of the listed elements of a class of `size`.

    Gives where the unary codes from bit `at` on end, and whether a gap goes beyond the end or a
    code is not there.
    """
    found, passed = at * 0, at * 0
    start, bad = at, at < 0
    final, field = count - 1, (at * 0 + 1 << low) - 1
    while (found < listed) & (at < end):
        i = at + tl.arange(0, PIECE)
        one = _bit(words, i, i < end)
        rank = found + tl.cumsum(one, 0)
        use = (one != 0) & (rank <= listed)
        k = tl.maximum(rank - 1, 0)
        # A tile whose low bits go beyond its end is bad, whatever these are.
        n = low_at + k * low
        lower = tl.load(words + tl.minimum(n >> 5, final))
        upper = tl.load(words + tl.minimum((n >> 5) + 1, final))
        part = _funnel(lower, upper, n & 31).to(tl.int32, bitcast=True) & field
        part = tl.where(use, part, 0)
        # What quotients and low bits come to, and the elements before. A gap that goes beyond the
        # end by far goes beyond it.
        zeros = tl.minimum(i - start - k, TILE)
        to = (zeros << low) + passed + tl.cumsum(part, 0) + k
        odd = use & (to >= size)
        bad = bad | (tl.max(odd.to(tl.int32), 0) > 0)
        n = begin + to
        mark = (i * 0 + 1) << (n & 31)
        tl.atomic_or(bits + (n >> 5), mark, mask=use & (to < size), sem="relaxed")
        passed = tl.minimum(passed + tl.sum(part, 0), TILE)
        last = tl.max(tl.where(use, i, -1), 0)
        found += tl.sum(one, 0)
        at = tl.where(found >= listed, last + 1, at + PIECE)
    return at, bad | (found < listed)


@triton.jit
def load_words(base, k, m, L: tl.constexpr, FULL: tl.constexpr):
    """Words number `k` of a tile's elements, uint32; behind its `m` elements are zeros."""
    if FULL and L.aligned:
        v = tl.load(base.to(tl.pointer_type(tl.uint32)) + k)
    else:
        PER: tl.constexpr = 4 // L.item
        v = tl.zeros(k.shape, tl.uint32)
        for h in tl.static_range(PER):
            i = k * PER + h
            v |= tl.load(base + i, mask=i < m, other=0).to(tl.uint32) << (8 * L.item * h)
    return v


@triton.jit
def fields_of(word, center, L: tl.constexpr):
    """Words with what `shift_of` tells classes from: of each element, in place, the exponent, plus
    one where the center is even. Above it was the sign, and the limits are at even numbers now.
    """
    ONES: tl.constexpr = (0xFFFFFFFF // ((1 << 8 * L.item) - 1)) << L.mantissa
    return (word & (ONES * ((1 << L.exponent) - 1))) + (center + 1 & 1).to(tl.uint32) * ONES


@triton.jit
def shift_of(fields, h, center, L: tl.constexpr):
    """Where element `h` of words is counted in the counts of a group, by its class."""
    half = (fields >> (8 * L.item * h + L.mantissa + 1)) & ((1 << L.exponent) - 1)
    shift = ((center >> 1) + 1) * COUNT - half.to(tl.int32, bitcast=True) * COUNT
    return tl.minimum(tl.maximum(shift, 0), COUNT * (L.classes - 1))


@triton.jit
def _wide(counts):
    """Counts of all classes of groups but the first, 16 bits each, int64."""
    one, two = (counts >> COUNT) & 63, (counts >> 2 * COUNT) & 63
    three, four = (counts >> 3 * COUNT) & 63, (counts >> 4 * COUNT) & 63
    low, high = one | (two << 16), three | (four << 16)
    return low.to(tl.int64) | (high.to(tl.int64) << 32)


@triton.jit
def _class_sizes(masks, groups, m, L: tl.constexpr):
    """How many elements of a tile each class has."""
    c = tl.arange(0, L.lanes)
    if L.classes == 1:
        sizes = tl.where(c == 0, m, 0)
    else:
        total = tl.zeros([PIECE], tl.int64)
        for at in range(0, groups, PIECE):
            i = at + tl.arange(0, PIECE)
            total += _wide(tl.load(masks + i, mask=i < groups, other=0))
        shift = 16 * tl.minimum(tl.maximum(c - 1, 0), 3)
        others = ((tl.sum(total, 0) >> shift.to(tl.int64)) & 0xFFFF).to(tl.int32)
        sizes = tl.where((c > 0) & (c < L.classes), others, 0)
        sizes = tl.where(c == 0, m - tl.sum(sizes, 0), sizes)
    return sizes


@triton.jit
def _gather(bits, masks, groups, m, starts, lists, L: tl.constexpr):
    """Of each group, instead of its counts, which elements have changed, in the order of classes.

    `bits` has the listed ones of all classes, each from its start on; `lists` tells of which it is
    the changed ones that are listed.
    """
    CLASSES: tl.constexpr = L.classes
    if L.classes == 1:
        flip = (pick(lists, 0, L.lanes) - 1).to(tl.uint32, bitcast=True)
        for at in range(0, groups, PIECE):
            g = at + tl.arange(0, PIECE)
            x = tl.load(bits + g, mask=g < groups, other=0).to(tl.uint32, bitcast=True) ^ flip
            spare = tl.minimum(tl.maximum(g * GROUP + GROUP - m, 0), GROUP - 1).to(tl.uint32)
            x = (x << spare) >> spare
            tl.store(masks + g, x.to(tl.int32, bitcast=True), mask=g < groups)
    else:
        flips = ()
        # Of each class but the first the bit of its next element.
        next_bits, others = (m * 0).to(tl.int64), m * 0
        for j in tl.static_range(CLASSES):
            flips = flips + ((pick(lists, j, L.lanes) - 1).to(tl.uint32, bitcast=True),)
            if j > 0:
                start = pick(starts, j, L.lanes)
                next_bits |= start.to(tl.int64) << 16 * (j - 1)
                others += start
        for at in range(0, groups, PIECE):
            g = at + tl.arange(0, PIECE)
            counts = tl.load(masks + g, mask=g < groups, other=0)
            wide = _wide(counts)
            begins = next_bits + tl.cumsum(wide, 0) - wide
            first = g * GROUP + others
            for j in tl.static_range(1, CLASSES):
                first -= ((begins >> 16 * (j - 1)) & 0xFFFF).to(tl.int32)
            found = tl.zeros([PIECE], tl.uint32)
            for j in tl.static_range(CLASSES):
                bit = first
                if j > 0:
                    bit = ((begins >> 16 * (j - 1)) & 0xFFFF).to(tl.int32)
                low = tl.load(bits + (bit >> 5)).to(tl.uint32, bitcast=True)
                high = tl.load(bits + (bit >> 5) + 1).to(tl.uint32, bitcast=True)
                here = _funnel(low, high, bit & 31) ^ flips[j]
                # What has been found moves down, as many bits of this class as it has here follow.
                found = _funnel(found, here, (counts >> COUNT * j) & 63)
            behind = tl.minimum(tl.maximum(g * GROUP + GROUP - m, 0), GROUP - 1)
            found = (found >> behind.to(tl.uint32)).to(tl.int32, bitcast=True)
            tl.store(masks + g, found, mask=g < groups)
            next_bits += tl.sum(wide, 0)


@triton.jit
def _group_words(base, g, m, L: tl.constexpr, FULL: tl.constexpr):
    """The words of 32 groups, four of each at a time."""
    WORDS: tl.constexpr = 8 * L.item
    found = ()
    for q in tl.static_range(WORDS // 4):
        k = g[:, None] * WORDS + (q * 4 + tl.arange(0, 4)[None, :])
        found = found + (load_words(base, k, m, L, FULL),)
    return found


@triton.jit
def _order(base, bits, masks, groups, m, center, L: tl.constexpr):
    """Bring the bits of groups into the order of elements, and list the first changed elements."""
    WORDS: tl.constexpr = 8 * L.item
    PER: tl.constexpr = 4 // L.item
    # Behind the list.
    active = (bits + 512).to(tl.pointer_type(tl.uint16))
    many = m * 0
    for at in range(0, groups, PIECE):
        g = at + tl.arange(0, PIECE)
        some = (tl.load(masks + g, mask=g < groups, other=0) != 0).to(tl.int32)
        to = many + tl.cumsum(some, 0) - some
        tl.store(active + to, g.to(tl.uint16), mask=some != 0)
        many += tl.sum(some, 0)
    tl.debug_barrier()
    done = m * 0
    for at in range(0, many, 32):
        r = at + tl.arange(0, 32)
        g = tl.load(active + r, mask=r < many, other=0).to(tl.int32)
        flags = tl.load(masks + g, mask=r < many, other=0).to(tl.uint32, bitcast=True)
        if m == TILE:
            fours = _group_words(base, g, m, L, True)
        else:
            fours = _group_words(base, g, m, L, False)
        words = ()
        for q in tl.static_range(WORDS // 4):
            even, odd = tl.split(tl.reshape(fields_of(fours[q], center, L), [32, 2, 2]))
            a, c = tl.split(even)
            b, d = tl.split(odd)
            words = words + (a, b, c, d)
        # Zeros behind the end are in the last class of the group that there is, behind all others.
        counts = tl.zeros([32], tl.int32)
        for w in tl.static_range(WORDS):
            for h in tl.static_range(PER):
                shift = shift_of(words[w], h, center, L)
                counts += (shift * 0 + 1) << shift
        # Where each class starts in the flags: sums of counts come to 32 at most.
        state = (counts * 0x1041041) << COUNT
        mask = tl.zeros([32], tl.uint32)
        for w in tl.static_range(WORDS):
            for h in tl.static_range(PER):
                shift = shift_of(words[w], h, center, L)
                flag = flags >> ((state >> shift) & 31).to(tl.uint32)
                mask = (mask >> 1) | (flag << 31)
                state += (shift * 0 + 1) << shift
        # Elements behind the end have no flags.
        behind = tl.minimum(tl.maximum(g * GROUP + GROUP - m, 0), GROUP - 1).to(tl.uint32)
        mask = (mask << behind) >> behind
        mask = tl.where(r < many, mask, 0)
        tl.store(masks + g, mask.to(tl.int32, bitcast=True), mask=r < many)
        n = ones_of(mask)
        _list_ones(mask, g * GROUP, done + tl.cumsum(n, 0) - n, tl.max(n, 0), bits, L)
        done += tl.sum(n, 0)


@triton.jit
def _funnel(low, high, n):
    """32 bits from bit `n`, at most 32, of two words on, uint32."""
    both = low.to(tl.uint64) | (high.to(tl.uint64) << 32)
    return (both >> n.to(tl.uint64)).to(tl.uint32)


@triton.jit
def _list_ones(x, first, k, most, bits, L: tl.constexpr):
    """List the numbers, from `first` on, of bits that are set, at most `most` of each word."""
    numbers, _ = list_of(bits - BITS, L)
    for _ in range(most):
        one = x & (0 - x)
        number = (first + _number_of(one)).to(tl.uint16)
        tl.store(numbers + k, number, mask=(x != 0) & (k >= 0) & (k < L.listed))
        x ^= one
        k += 1


@triton.jit
def _list_changes(info, m, start, L: tl.constexpr):
    """List changed elements of a tile from the one of rank `start` on."""
    groups = (m + GROUP - 1) // GROUP
    tl.debug_barrier()
    done = start * 0
    for at in range(0, groups, PIECE):
        g = at + tl.arange(0, PIECE)
        x = tl.load(info + MASKS + g, mask=g < groups, other=0).to(tl.uint32, bitcast=True)
        n = ones_of(x)
        total = tl.sum(n, 0)
        most = tl.max(n, 0)
        if (done + total <= start) | (done >= start + L.listed):
            most = 0
        k = done - start + tl.cumsum(n, 0) - n
        _list_ones(x, g * GROUP, k, most, info + BITS, L)
        done += total
    tl.debug_barrier()


@triton.jit(noinline=True)
def _find(base, words, count, m, info, L: tl.constexpr):
    """Find which elements of a coded tile have changed, at MASKS.

    Gives whether the tile is bad, changes, scale, exceptions, where signs start, and what is behind
    the gaps.
    """
    LANES: tl.constexpr = L.lanes
    c = tl.arange(0, LANES)
    end = count * 32
    bits, masks = info + BITS, info + MASKS
    groups = (m + GROUP - 1) // GROUP
    tl.store(bits + tl.arange(0, TILE // 32), tl.zeros([TILE // 32], tl.int32))
    head = m * 0 + 1
    center, scale, exceptions = m * 0, m * 0, m * 0
    if not L.overwrite:
        center = get_bits(words, count, head, m * 0 + L.exponent).to(tl.int32, bitcast=True)
        head += L.exponent
        scale = get_bits(words, count, head, m * 0 + L.scale_bits).to(tl.int32, bitcast=True)
        head += L.scale_bits
    changes = tl.zeros([LANES], tl.int32)
    bad = m < 0
    CODED: tl.constexpr = 1 if L.overwrite else L.classes
    for which in range(CODED):
        value, head, odd = _gamma(words, count, head)
        changes = tl.where(c == which, value - 1, changes)
        bad = bad | odd
    if not L.overwrite:
        value, head, odd = _gamma(words, count, head)
        exceptions = value - 1
        bad = bad | odd
    sizes = _class_sizes(masks, groups, m, L)
    total = tl.sum(changes, 0)
    bad = bad | (tl.max((changes > sizes).to(tl.int32), 0) > 0) | (total == 0)
    bad = bad | (exceptions > total)
    lists = (2 * changes <= sizes).to(tl.int32)
    listed = tl.minimum(changes, sizes - changes)
    low = low_bits(sizes, listed)
    starts = tl.cumsum(sizes, 0) - sizes
    fields = listed * low
    low_at = head + tl.cumsum(fields, 0) - fields
    sign_at = head + tl.sum(fields, 0)
    gap_at = sign_at
    if not L.overwrite:
        gap_at += total
    if bad == 0:
        tl.debug_barrier()
        for j in range(CODED):
            # fmt: off
            gap_at, wrong = find_places(
                words, count, gap_at, end, pick(low_at, j, LANES), pick(low, j, LANES),
                pick(listed, j, LANES), pick(sizes, j, LANES), pick(starts, j, LANES), bits,
            )
            # fmt: on
            bad = bad | wrong
        tl.debug_barrier()
        if bad == 0:
            _gather(bits, masks, groups, m, starts, lists, L)
            tl.debug_barrier()
            if L.classes > 1:
                _order(base, bits, masks, groups, m, center, L)
                tl.debug_barrier()
    return bad, total, scale, exceptions, sign_at, gap_at


@triton.jit(noinline=True)
def _find_ends(base, words, count, m, info, total, scale, exceptions, gap_at, L: tl.constexpr):
    """(whether the tile does not end where it should, where values start, where exceptions do)."""
    WIDTH: tl.constexpr = 8 * L.item
    SIZE: tl.constexpr = L.listed
    numbers, _ = list_of(info, L)
    end = count * 32
    value_at, exception_at = gap_at, gap_at
    if L.overwrite:
        exception_at += total * WIDTH
        last = exception_at
    else:
        hots, low_total = tl.zeros([_PART], tl.int32), tl.zeros([_PART], tl.int32)
        for first in range(0, total, SIZE):
            if (first > 0) | (L.classes == 1):
                _list_changes(info, m, first, L)
            for at in range(0, tl.minimum(total - first, SIZE), _PART):
                k = at + tl.arange(0, _PART)
                use = first + k < total
                i = tl.load(numbers + k, mask=use, other=0).to(tl.int32)
                v = tl.load(base + i, mask=use, other=0).to(tl.uint32)
                hot, n = low_of(exponents_of(v, L), scale, WIDTH)
                hots += tl.where(use, hot, 0)
                low_total += tl.where(use, n, 0)
        value_at = _behind_ones(words, count, gap_at, tl.sum(hots, 0))
        exception_at = value_at + tl.sum(low_total, 0)
        last = exception_at + exceptions * (LOG_TILE + WIDTH)
    # Less than a word is left, and zeros.
    bad = (last > end) | (end - last >= 32)
    rest = get_bits(words, count, last, tl.maximum(tl.minimum(end - last, 32), 0))
    return bad | (rest != 0), value_at, exception_at


@triton.jit(noinline=True)
def _change(base, out, words, count, m, begin, info, known, lo, hi, L: tl.constexpr):
    """New values of the changed elements of a tile; (their terms without the old ones', bad).

    With `Launch.store` those of elements `lo` to `hi` are stored at `out`, which points to the
    tile's first element; else they are kept in the list, if it has all of them.
    """
    WIDTH: tl.constexpr = 8 * L.item
    SIZE: tl.constexpr = L.listed
    total, scale, exceptions, sign_at, quotient_at, value_at, exception_at = known
    numbers, values = list_of(info, L)
    places = info + BITS + _PLACES
    end = count * 32
    bad = m < 0
    terms = tl.zeros([_PART], tl.uint64)
    number, earlier = m * 0, m * 0 - 1
    for first in range(0, total, SIZE):
        if (total > SIZE) | L.overwrite:
            _list_changes(info, m, first, L)
        for at in range(0, tl.minimum(total - first, SIZE), _PART):
            here = at + tl.arange(0, _PART)
            k = first + here
            use = k < total
            i = tl.load(numbers + here, mask=use, other=0).to(tl.int32)
            v = tl.load(base + i, mask=use, other=0).to(tl.uint32)
            changed = use.to(tl.int32)
            if L.overwrite:
                y = get_bits(words, count, value_at + k * WIDTH, changed * WIDTH)
            else:
                e = exponents_of(v, L)
                hot, n = low_of(e, scale, WIDTH)
                hot, n = hot * changed, n * changed
                hots = tl.sum(hot, 0)
                size = tl.zeros([_PART], tl.uint32)
                if hots > 0:
                    h = tl.cumsum(hot, 0) - hot
                    # Places of this piece's codes, each behind the one before.
                    tl.debug_barrier()
                    seen, window = m * 0, quotient_at
                    while (seen < hots) & (window < end):
                        j = window + tl.arange(0, _PART)
                        one = _bit(words, j, j < end)
                        rank = seen + tl.cumsum(one, 0) - 1
                        tl.store(places + rank, j, mask=(one != 0) & (rank < hots))
                        seen += tl.sum(one, 0)
                        window += _PART
                    tl.debug_barrier()
                    to = tl.load(places + h, mask=hot != 0, other=0)
                    ahead = tl.load(places + h - 1, mask=(hot != 0) & (h > 0), other=0)
                    ahead = tl.where(h > 0, ahead, quotient_at - 1)
                    quotient = tl.where(hot != 0, to - ahead - 1, 0)
                    quotient_at = tl.max(tl.where(hot != 0, to, 0), 0) + 1
                    most = tl.minimum((hot * 0 + 1 << tl.minimum(WIDTH - n, 4)) - 1, _MOST_QUOTIENT)
                    bad = bad | (tl.max(((quotient > most) & (hot != 0)).to(tl.int32), 0) > 0)
                    quotient = tl.minimum(quotient, most)
                    part = get_bits(words, count, value_at + tl.cumsum(n, 0) - n, n)
                    value_at += tl.sum(n, 0)
                    wide = (quotient.to(tl.uint64) << n.to(tl.uint64)) | part.to(tl.uint64)
                    size = (wide & ((1 << WIDTH) - 1)).to(tl.uint32)
                behind = first + at + _PART
                ahead_of = _exception(words, count, exception_at, number, exceptions, WIDTH)
                while (number < exceptions) & (ahead_of < behind):
                    bad = bad | (ahead_of <= earlier)
                    where = exception_at + number * (LOG_TILE + WIDTH) + LOG_TILE
                    given = get_bits(words, count, where, m * 0 + WIDTH)
                    size = tl.where(use & (k == ahead_of), given, size)
                    earlier = ahead_of
                    number += 1
                    ahead_of = _exception(words, count, exception_at, number, exceptions, WIDTH)
                old = ordered(v, L)
                negative = _bit(words, sign_at + k, use) != 0
                left = tl.where(negative, old, ((1 << WIDTH) - 1) - old)
                bad = bad | (tl.max((use & (size >= left)).to(tl.int32), 0) > 0)
                new = tl.where(negative, old - size - 1, old + size + 1)
                y = unordered(new & ((1 << WIDTH) - 1), L)
            if L.store:
                mask = use & (i >= lo) & (i < hi)
                tl.store(out + i, y.to(out.dtype.element_ty), mask=mask)
            elif total <= SIZE:
                tl.store(values + here, y.to(values.dtype.element_ty), mask=use)
            if not L.known:
                more = terms_of(y, begin + i, L.item) - terms_of(v, begin + i, L.item)
                terms += tl.where(use, more, 0)
    # The last exception is of a change that there is.
    return tl.sum(terms, 0), bad | (number < exceptions) | (earlier >= total)


@triton.jit
def _plain_terms(base, source, m, begin, ITEM: tl.constexpr):
    """Terms of elements without those of the base's."""
    terms = tl.zeros([PIECE], tl.uint64)
    for at in range(0, m, PIECE):
        i = at + tl.arange(0, PIECE)
        v = tl.load(base + i, mask=i < m, other=0).to(tl.uint32)
        y = tl.load(source + i, mask=i < m, other=0).to(tl.uint32)
        more = terms_of(y, begin + i, ITEM) - terms_of(v, begin + i, ITEM)
        terms += tl.where(i < m, more, 0)
    return tl.sum(terms, 0)


@triton.jit
def copy(source, out, m, lo, hi, L: tl.constexpr, ALIGNED: tl.constexpr):
    """Copy elements `lo` to `hi` of a tile of `m`; ALIGNED: to and from multiples of 16 bytes."""
    if ALIGNED and (hi - lo == TILE):
        to, words = out.to(tl.pointer_type(tl.uint32)), source.to(tl.pointer_type(tl.uint32))
        for at in range(0, TILE * L.item // 4, 1024):
            i = at + tl.arange(0, 1024)
            tl.store(to + i, tl.load(words + i))
    else:
        for at in range(0, m, 512):
            i = at + tl.arange(0, 512)
            use = (i >= lo) & (i < hi)
            tl.store(out + i, tl.load(source + i, mask=use, other=0), mask=use)


@triton.jit
def _check_plain(base, words, count, m, begin, ITEM: tl.constexpr):
    """(terms of a tile that is stored as it is without those of the base's, whether it is bad)."""
    used = m * ITEM % 4
    bad = (tl.load(words) != 1) | (count != 1 + (m * ITEM + 3) // 4)
    terms = tl.zeros([], tl.uint64)
    if bad == 0:
        last = tl.load(words + count - 1)
        bad = (used != 0) & ((last >> (8 * used).to(tl.uint32)) != 0)
        terms = _plain_terms(base, items(words + 1, ITEM), m, begin, ITEM)
    return terms, bad


@triton.jit
def _decode(base, out, words, count, m, begin, info, lo, hi, L: tl.constexpr):
    """Decode a coded tile, see `change_one`; (terms of changes, what is known, bad)."""
    bad, total, scale, exceptions, sign_at, gap_at = _find(base, words, count, m, info, L)
    terms = tl.zeros([], tl.uint64)
    if bad == 0:
        # fmt: off
        bad, value_at, exception_at = _find_ends(
            base, words, count, m, info, total, scale, exceptions, gap_at, L
        )
        # fmt: on
        known = (total, scale, exceptions, sign_at, gap_at, value_at, exception_at)
        if bad == 0:
            terms, bad = _change(base, out, words, count, m, begin, info, known, lo, hi, L)
        if not L.store:
            for j in tl.static_range(7):
                tl.store(info + 1 + j, known[j])
    return terms, tl.where(total > L.listed, MANY, LISTED), bad


@triton.jit
def change_one(t, p, from_ptr, out_ptr, to, lo, hi, status_ptr, L: tl.constexpr):
    """Find what changed in a tile, if nothing has been found wrong so far, and sum up what that
    adds to the digest of the base.

    With `Launch.store` elements `lo` to `hi` of it are written to those of `out_ptr` from number
    `to` on. Else what is known of the tile is kept in its work memory; with `Launch.known` too that
    was done before, and only changes that the list could not keep are written, over the base.
    """
    info, begin, m = t.info, t.begin, t.m
    if (m > 0) & (tl.load(status_ptr) == 0):
        base, out = elements_at(from_ptr, t.first, L), elements_at(out_ptr, to, L)
        if p.raw:
            if not L.store:
                tl.store(info, m * 0 + RAW)
            elif not L.known:
                # fmt: off
                load_raw(
                    p.static_ptr, p.dynamic_ptr, p.stride, p.nbytes, t.n, begin, m, out, lo, hi,
                    L.item, True,
                )
                # fmt: on
        else:
            words, count, bad = words_of(p, t, L)
            if L.known:
                if tl.load(info) == MANY:
                    known = ()
                    for j in tl.static_range(1, 8):
                        known = known + (tl.load(info + j),)
                    _change(base, out, words, count, m, begin, info, known, lo, hi, L)
            else:
                terms = tl.zeros([], tl.uint64)
                kind = m * 0 + SAME
                word = tl.load(words, mask=count > 0, other=0)
                if L.adaptive:
                    # Here a tile of planes is as the base: `flip_one` goes on with it.
                    count = tl.where((word & _PLANES_HEAD) == _PLANES_HEAD, 0, count)
                plain = ((word & 1) != 0) & (count > 0)
                if plain:
                    kind = m * 0 + PLAIN
                    terms, bad = _check_plain(base, words, count, m, begin, L.item)
                    if L.store:
                        hi = tl.where(bad, lo, hi)
                        copy(items(words + 1, L.item), out, m, lo, hi, L, False)
                else:
                    if L.store and not L.over:
                        copy(base, out, m, lo, hi, L, L.aligned)
                        tl.debug_barrier()
                    if count > 0:
                        # fmt: off
                        terms, kind, bad = _decode(
                            base, out, words, count, m, begin, info, lo, hi, L
                        )
                        # fmt: on
                if not L.store:
                    tl.store(info, kind)
                if bad:
                    report(status_ptr, LATE + (t.chunk << 8) + CHUNK_PAYLOAD)
                elif count > 0:
                    tl.atomic_add(t.sums + 2, terms.to(tl.int64, bitcast=True), sem="relaxed")
