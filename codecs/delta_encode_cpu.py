# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment"
"""Encoding of delta on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..formats.checksum import MASK64
from .common.arrays_cpu import as_read_only, view_as
from .common.base import Bits, Chunk, ChunkResult, Key
from .common.compile_cache import cached, part
from .common.memory_cpu import item
from .common.threads import run, spans
from .delta import (
    EXCESS,
    FORMS,
    LOG_TILE,
    MAX_QUOTIENT,
    SAMPLED,
    TILE,
    Delta,
    index_of,
)
from .delta_bits_cpu import (
    BLOCK,
    BLOCKS,
    DENSE,
    I8,
    ONE,
    SCALES,
    STARTS,
    U4,
    U8,
    ZERO,
    add_digest,
    append,
    bit_length,
    copy,
    differ,
    digest_gain,
    digests_of,
    end_words,
    exponent_of,
    extract,
    held_at,
    kind_numbers,
    list_positions,
    low_mask,
    one_class,
    order_masks,
    ordered_bits,
    popcount,
    put,
    put_low,
    put_quotients,
    put_short,
    set_hot,
    set_limits,
    sort_classes,
    space_for,
)
from .delta_planes_cpu import encode_planes, least_of_planes

_OVERWRITE, _ADAPTIVE = FORMS["overwrite"], FORMS["adaptive"]


@part(apart=True, nogil=True)
def _put_gamma(words, at, value):
    below = bit_length(U8(value)) - 1
    code = (U8(value) & low_mask(below)) << ONE | ONE
    return put(words, at, code << U8(below), 2 * below + 1)


@part(nogil=True, error_model="numpy")
def _center(x, kind):
    total = count = 0
    for i in range(0, x.size, SAMPLED):
        e = exponent_of(x[i], kind)
        total += e
        count += I8(e > 0)
    return total // count if count else 0


@part(nogil=True)
def _scale(kind, hist):
    """The scale of the changes that `hist` counts; see delta.scale_of. It is zeros afterwards.

    Large changes of an exponent are counted in the upper half.
    """
    changes, above = hist[:SCALES], hist[SCALES:]
    width = kind[0]
    least, highest = 0, I8((1 << kind[1]) - 1)
    top = highest + width
    while changes[least] == 0:
        least += 1
    while changes[highest] == 0:
        highest -= 1
    larges = 0
    for e in range(least, highest + 1):
        larges += I8(changes[e] >> U4(16))
    last = least
    if larges:
        most = (1 << kind[1]) - 1 + width
        while above[top] == 0:
            top -= 1
        last = top + 1 if top + 1 < most else most
        last = last if last > least else least
    exception = 2 * (LOG_TILE + width)
    # Costs at `scale`: of positions; of large changes at and above it; of those far above.
    within, cost = 0, 0
    not_below, far = larges, larges
    for d in range(len(EXCESS)):
        far -= I8(above[least + d])
    best, found = -1, least
    for scale in range(least, last + 1):
        total = cost + exception * (not_below + far)
        total += EXCESS[0] * I8(above[scale]) + EXCESS[1] * I8(above[scale + 1])
        total += EXCESS[2] * I8(above[scale + 2]) + EXCESS[3] * I8(above[scale + 3])
        if best < 0 or total < best:
            best, found = total, I8(scale)
        # A change costs a bit more for each step from its exponent on, up to `width` + 1.
        within += I8(changes[scale] & U4(0xFFFF))
        if scale - width - 1 >= least:
            within -= I8(changes[scale - width - 1] & U4(0xFFFF))
        cost += 2 * within
        not_below -= I8(changes[scale] >> U4(16))
        far -= I8(above[scale + len(EXCESS)])
    for i in range(least, highest + 1):
        changes[i] = 0
    for i in range(least, top + 1):
        above[i] = 0
    return found


@part(nogil=True)
def _rank(n, c, space):
    """Set the flags of changes among the elements of a class, and count them."""
    members = space.classes[c * BLOCKS : (c + 1) * BLOCKS]
    before = space.before[c * STARTS : (c + 1) * STARTS]
    ranks, changed = space.ranks, space.changed
    here, count = ZERO, ZERO
    for k in range((n + BLOCK - 1) // BLOCK):
        bits = extract(changed[k], members[k])
        count += popcount(bits)
        at, to = U8(before[k]), U8(before[k + 1])
        shift = at & U8(63)
        here |= bits << shift
        ranks[at >> U8(6)] = here
        here = bits >> ONE >> (U8(63) - shift) if at >> U8(6) != to >> U8(6) else here
    ranks[U8(space.sizes[c]) >> U8(6)] = here
    space.counts[c] = I8(count)


@part(nogil=True)
def _list_classes(n, n_classes, space):
    """List what has changed, or has not, of the elements of each class."""
    at, flags = I8(0), space.ranks
    for c in range(n_classes):
        _rank(n, c, space)
        count, size = space.counts[c], space.sizes[c]
        if 2 * count > size:
            for i in range((size >> 6) + 1):
                flags[i] = ~flags[i]
            flags[size >> 6] &= low_mask(size & 63)
            count = size - count
        list_positions(flags, size, count, space.list[at:])
        space.listed[c] = count
        at += count


@part(nogil=True)
def _compare(base, x, changed):
    """Bits of the elements of a tile that have changed; how many there are."""
    found, n = ZERO, x.size
    blocks = n // BLOCK
    for k in range(blocks):
        bits = differ(base, x, k * BLOCK)
        changed[k] = bits
        found += popcount(bits)
    if blocks * BLOCK < n:
        bits = ZERO
        for i in range(blocks * BLOCK, n):
            bits |= U8(base[i] != x[i]) << U8(i & 63)
        changed[blocks] = bits
        found += popcount(bits)
    return I8(found)


@part(rare=True, nogil=True)
def _write_plain(x, out, used):
    """A plain tile to the bytes `out` from `used` on, if it fits; where it ends."""
    end = used + 4 * (1 + -(-x.size * x.itemsize // 4))
    if end <= out.size:
        out[used] = 1
        for i in range(1, 4):
            out[used + i] = 0
        for i in range(end - 4, end):
            out[i] = 0
        copy(out, used + 4, x, 0, x.size * x.itemsize)
    return end


@part(nogil=True)
def _flush(words, nbits, out, used):
    """The words of a tile to the bytes `out` from `used` on, if they fit; where they end."""
    end = used + 4 * (-(-nbits // 32))
    if end <= out.size:
        copy(out, used, words, 0, end - used)
    return end


@part(nogil=True)
def _encode_new(x, m, kind, space, out, used):
    """A tile in the form overwrite to the bytes `out` from `used` on, if it fits; where it ends."""
    n, words, width = x.size, space.words, I8(8 * x.itemsize)
    one_class(n, space)
    _list_classes(n, I8(1), space)
    words[0] = 0
    to = _put_gamma(words, I8(1), m + 1)
    to = put_quotients(words, put_low(words, to, I8(1), space), I8(1), space)
    if -(-(to + m * width) // 32) > 1 + -(-n * x.itemsize // 4):
        return _write_plain(x, out, used)
    data = view_as(words, np.uint8)
    held = held_at(words, to)
    for j in range(m):
        v = U8(item(x, I8(item(space.positions, j))))
        if width < 64:
            held = put_short(data, to, v, width, held)
        else:
            put(words, to, v, width)
        to += width
    if width < 64:
        end_words(words, to)
    return _flush(words, to, out, used)


@part(nogil=True)
def _measure(base, x, m, kind, space):
    """Sizes, signs and exponents of changes, and how many there are of each size.

    Returns how many bits they flip, and which.
    """
    width, masks = I8(8 * x.itemsize), order_masks(kind)
    mantissa, exponents = U8(kind[2]), U8((1 << kind[1]) - 1)
    changes, above = space.hist[:SCALES], space.hist[SCALES:]
    flips, flipped = ZERO, ZERO
    for first in range(0, m, 64):
        signs = ZERO
        for j in range(first, m if m - first < 64 else first + 64):
            i = I8(item(space.positions, j))
            v, y = U8(item(base, i)), U8(item(x, i))
            flips += popcount(v ^ y)
            flipped |= v ^ y
            old, new = ordered_bits(v, width, masks), ordered_bits(y, width, masks)
            less = U8(new < old)
            size = (new - old - (ONE - less)) ^ (ZERO - less)
            signs |= less << U8(j - first)
            e = v >> mantissa & exponents
            is_large = U4(size != ZERO)
            changes[e] += U4(1) + (is_large << U4(16))
            above[e + U8(bit_length(size))] += is_large
            space.changes[U8(j)] = size
            space.exponents[U8(j)] = e
        space.negative[first >> 6] = signs
    return I8(flips), flipped


@part(nogil=True)
def _split(m, width, space):
    """Write quotients and low bits of sizes to memory of their own.

    Returns how many bits each takes, and how many exceptions there are.
    """
    unary, lows, hot = space.unary, space.lows, space.hot
    data = view_as(lows, np.uint8)
    lows[0] = 0
    exceptions, to, low_at = I8(0), I8(0), I8(0)
    block, here, held = 0, ZERO, ZERO
    for j in range(m):
        size = U8(item(space.changes, j))
        found = U8(hot[U8(item(space.exponents, j))])
        is_hot, low = found >> U8(7), found & U8(127)
        quotient = size >> low if width < 64 or low < U8(64) else ZERO
        if quotient > U8(MAX_QUOTIENT) * is_hot:
            space.exceptions[exceptions] = j
            exceptions += 1
            quotient, size = ZERO, ZERO
        to += I8(quotient)
        here = (here if to >> 6 == block else ZERO) | is_hot << U8(to & 63)
        block = to >> 6
        unary[U8(block)] = here
        to += I8(is_hot)
        if width < 64:
            held = put_short(data, low_at, size & ((ONE << low) - ONE), I8(low), held)
        else:
            put(lows, low_at, size & low_mask(low), I8(low))
        low_at += I8(low)
    return to, low_at, exceptions


@part(nogil=True)
def _encode_differences(base, x, m, kind, form, space, out, used):
    """As `_encode_new`, in the form difference, or adaptive."""
    n, n_classes, width = x.size, kind[4], I8(8 * x.itemsize)
    words = space.words
    flips, flipped = _measure(base, x, m, kind, space)
    center = _center(base, kind)
    scale = _scale(kind, space.hist)
    set_hot(scale, width, kind, space.hot)
    unary_bits, low_bits, exceptions = _split(m, width, space)
    if n_classes > 1:
        set_limits(center, kind, space.limits)
        sort_classes(base, n, kind, space)
    else:
        one_class(n, space)
    _list_classes(n, n_classes, space)

    words[0] = 0
    to = put(words, I8(1), U8(center), kind[1])
    to = put(words, to, U8(scale), kind[3])
    for c in range(n_classes):
        to = _put_gamma(words, to, space.counts[c] + 1)
    to = _put_gamma(words, to, exceptions + 1)
    to = put_low(words, to, n_classes, space)
    to = append(words, to, space.negative, m)
    to = put_quotients(words, to, n_classes, space)
    to = append(words, to, space.unary, unary_bits)
    to = append(words, to, space.lows, low_bits)
    for k in range(exceptions):
        j = I8(space.exceptions[k])
        to = put(words, to, U8(j), I8(LOG_TILE))
        to = put(words, to, U8(space.changes[j]), width)
    count, of_plain = -(-to // 32), 1 + -(-n * x.itemsize // 4)
    if form == _ADAPTIVE:
        most = count - 1 if count <= of_plain else of_plain
        if least_of_planes(n, m, width, flips, flipped) <= 32 * most:
            nbits = encode_planes(base, x, flipped, space, 32 * most)
            if nbits >= 0:
                return _flush(space.planes, nbits, out, used)
    if count > of_plain:
        return _write_plain(x, out, used)
    return _flush(words, to, out, used)


@cached(nogil=True)
def _encode_tiles(base, x, start, kind, form, space, out, ends):
    """Encode the tiles of elements of which the first has the number `start` in the chunk.

    `ends` gets where the words of each end in `out`, in bytes. Returns what the digests of base and
    result gain.
    """
    used = I8(0)
    before, after = ZERO, ZERO
    for tile in range(ends.size):
        at = I8(tile) * TILE
        n = x.size - at if x.size - at < TILE else I8(TILE)
        old, new = base[at : at + n], x[at : at + n]
        first_byte = (start + at) * x.itemsize
        m = _compare(old, new, space.changed)
        if m * DENSE > n:
            of_old, of_new = digests_of(old, new, first_byte, space.last_words)
            before += of_old
            after += of_new - of_old
        else:
            before = add_digest(before, old, first_byte, space.last_words)
        if m:
            list_positions(space.changed, n, m, space.positions)
            if m * DENSE <= n:
                for j in range(m):
                    i = I8(item(space.positions, j))
                    gain = digest_gain(U8(old[i]), U8(new[i]), start + at + i, x.itemsize)
                    after += gain
            if form == _OVERWRITE:
                used = _encode_new(new, m, kind, space, out, used)
            else:
                used = _encode_differences(old, new, m, kind, form, space, out, used)
        ends[tile] = used
    return before, before + after


def encode_chunk(
    spec: Delta,
    chunk: Chunk,
    bits: Bits,
    *,
    base: Bits,
    stats: Any = None,
    key: Key | None = None,
    threads: int = 1,
) -> ChunkResult:
    """Encode the chunk's elements `bits` (1-D), given those of the base, into its parts."""
    index = index_of(chunk)
    base, bits = as_read_only(base), as_read_only(bits)
    cuts = spans(index.offsets.size, 2 * bits.nbytes, threads)

    def encode(first: int, last: int) -> tuple[Any, Any, Any, Any]:
        x = bits[first * TILE : last * TILE]
        # No tile is longer than a plain one; a single span writes where its words stay.
        words = x.nbytes + 8 * (last - first)
        out = chunk.dynamic if len(cuts) == 1 else np.empty(words, np.uint8)
        ends = np.empty(last - first, np.int64)
        sums = _encode_tiles(
            base[first * TILE : last * TILE],
            x,
            first * TILE,
            kind_numbers(chunk.dtype),
            FORMS[spec.form],
            space_for(chunk.dtype),
            out,
            ends,
        )
        return out, ends, *sums

    used = digest = result = 0
    for (first, last), (out, ends, before, after) in zip(cuts, run(encode, cuts), strict=True):
        if last > first:
            index.offsets[first] = used // 4
            index.offsets[first + 1 : last] = (used + ends[:-1]) // 4
            if len(cuts) > 1:
                slot = chunk.dynamic[used : used + int(ends[-1])]
                slot[:] = out[: slot.size]
            used += int(ends[-1])
        digest, result = digest + int(before), result + int(after)
    index.digests[:] = digest & MASK64, result & MASK64
    return ChunkResult(used)
