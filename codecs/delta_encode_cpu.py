# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Encoding of delta on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..formats.checksum import MASK64
from .common.arrays_cpu import as_read_only, view_as
from .common.base import Bits, Chunk, ChunkResult, Key
from .common.compile_cache import cached, part
from .common.threads import run, spans
from .delta import (
    EXCESS,
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
    CLASSES,
    I8,
    SCALES,
    STARTS,
    U8,
    add_digest,
    bit_length,
    differ,
    digest_gain,
    exponent_of,
    gap_low_bits,
    kind_numbers,
    list_positions,
    low_mask,
    one_class,
    order_masks,
    ordered_bits,
    popcount,
    put,
    set_limits,
    sort_classes,
    space_for,
)


@part(nogil=True)
def _gamma_bits(value):
    return 2 * bit_length(U8(value)) - 1


@part(nogil=True)
def _put_gamma(words, at, value):
    below = bit_length(U8(value)) - 1
    at = put(words, at + below, U8(1), I8(1))
    return put(words, at, U8(value) & low_mask(below), below)


@part(nogil=True, error_model="numpy")
def _center(x, at, n, kind):
    total = count = I8(0)
    for i in range(at, at + n, SAMPLED):
        e = exponent_of(x[i], kind)
        total += e
        count += I8(e > 0)
    return total // count if count else I8(0)


@part(nogil=True)
def _scale(exponents, lengths, m, kind, hist):
    """The scale of `m` changes; see delta.scale_of. `hist` is zeros, before and after."""
    changes, large, above = hist[:SCALES], hist[SCALES : 2 * SCALES], hist[2 * SCALES :]
    width = kind[0]
    least, highest, top, larges = I8(SCALES), I8(0), I8(0), I8(0)
    for j in range(m):
        e, b = I8(exponents[j]), I8(lengths[j])
        is_large = I8(b > 0)
        changes[e] += 1
        large[e] += is_large
        above[e + b] += is_large
        larges += is_large
        least = e if e < least else least
        highest = e if e > highest else highest
        top = e + b if e + b > top else top
    last = least
    if larges:
        most = (1 << kind[1]) - 1 + width
        while above[top] == 0:
            top -= 1
        last = top + 1 if top + 1 < most else most
        last = last if last > least else least
    exception = 2 * (LOG_TILE + width)
    # Costs at `scale`: of positions; of large changes at and above it; of those far above.
    within, cost = I8(0), I8(0)
    not_below, far = larges, larges
    for d in range(len(EXCESS)):
        far -= I8(above[least + d])
    best, found = I8(-1), least
    for scale in range(least, last + 1):
        total = cost + exception * (not_below + far)
        total += EXCESS[0] * I8(above[scale]) + EXCESS[1] * I8(above[scale + 1])
        total += EXCESS[2] * I8(above[scale + 2]) + EXCESS[3] * I8(above[scale + 3])
        if best < 0 or total < best:
            best, found = total, I8(scale)
        # A change costs a bit more for each step from its exponent on, up to `width` + 1.
        within += I8(changes[scale])
        if scale - width - 1 >= least:
            within -= I8(changes[scale - width - 1])
        cost += 2 * within
        not_below -= I8(large[scale])
        far -= I8(above[scale + len(EXCESS)])
    for i in range(least, highest + 1):
        changes[i] = 0
        large[i] = 0
    for i in range(least, top + 1):
        above[i] = 0
    return found


@part(nogil=True)
def _list_gaps(n, m, n_classes, space):
    """The gaps of each class from c * TILE on, of the smaller part of its elements.

    Of `m` changes positions and exponents are there. Gives `space` how many each class has.
    """
    counts, listed, gaps, last = space.counts, space.listed, space.gaps, space.last
    limits = space.limits
    for k in range(CLASSES):
        counts[k] = 0
        last[k] = -1
    for j in range(m):
        i, e = I8(space.positions[j]), I8(space.exponents[j])
        c = I8(0)
        if n_classes > 1:
            c = I8(e < limits[0]) + I8(e < limits[1]) + I8(e < limits[2]) + I8(e < limits[3])
        block = i >> 6
        under = (U8(1) << U8(i & 63)) - U8(1)
        rank = I8(space.before[c * STARTS + block])
        rank += I8(popcount(space.classes[c * BLOCKS + block] & under))
        gaps[c * TILE + counts[c]] = rank - last[c] - 1
        last[c] = rank
        counts[c] += 1
    for k in range(n_classes):
        listed[k] = counts[k]
        if 2 * counts[k] > space.sizes[k]:
            listed[k] = _list_unchanged(n, k, space)


@part(nogil=True)
def _list_unchanged(n, c, space):
    """The gaps of a class between elements that have not changed; how many there are."""
    at, last = c * TILE, I8(-1)
    for k in range(-(-n // BLOCK)):
        word, before = space.classes[c * BLOCKS + k], I8(space.before[c * STARTS + k])
        bits = word & ~space.changed[k]
        while bits:
            rank = before + I8(popcount(word & ((bits & (U8(0) - bits)) - U8(1))))
            space.gaps[at] = rank - last - 1
            last = rank
            at += 1
            bits &= bits - U8(1)
    return at - c * TILE


@part(nogil=True)
def _gap_bits(n_classes, space):
    """Bits of all gaps."""
    total = I8(0)
    for c in range(n_classes):
        low = gap_low_bits(space.sizes[c], space.listed[c])
        for j in range(c * TILE, c * TILE + space.listed[c]):
            total += I8(space.gaps[j]) >> low
        total += (1 + low) * space.listed[c]
    return total


@part(nogil=True)
def _put_low(at, n_classes, space):
    words = space.words
    for c in range(n_classes):
        low = gap_low_bits(space.sizes[c], space.listed[c])
        mask = low_mask(low)
        for j in range(c * TILE, c * TILE + space.listed[c]):
            at = put(words, at, U8(space.gaps[j]) & mask, low)
    return at


@part(nogil=True)
def _put_quotients(at, n_classes, space):
    words = space.words
    for c in range(n_classes):
        low = gap_low_bits(space.sizes[c], space.listed[c])
        for j in range(c * TILE, c * TILE + space.listed[c]):
            at += I8(space.gaps[j]) >> low
            words[at >> 6] |= U8(1) << U8(at & 63)
            at += 1
    return at


@part(nogil=True)
def _compare(base, x, at, n, block, changed):
    """Bits of the elements of a tile that have changed; how many there are."""
    found = U8(0)
    blocks = n // BLOCK
    for k in range(blocks):
        bits = differ(base, x, at + k * BLOCK)
        changed[k] = bits
        found += popcount(bits)
    if blocks * BLOCK < n:
        bits = U8(0)
        for i in range(n - blocks * BLOCK):
            j = at + blocks * BLOCK + i
            bits |= U8(base[j] != x[j]) << U8(i)
        changed[blocks] = bits
        found += popcount(bits)
    return I8(found)


@part(nogil=True)
def _write_plain(x, at, n, out, used):
    """A plain tile to the bytes `out` from `used` on, if it fits; where it ends."""
    itemsize = x.itemsize
    end = used + 4 * (1 + -(-n * itemsize // 4))
    if end <= out.size:
        out[used] = 1
        for i in range(1, 4):
            out[used + i] = 0
        data = view_as(x[at : at + n], np.uint8)
        for i in range(data.size):
            out[used + 4 + i] = data[i]
        for i in range(used + 4 + data.size, end):
            out[i] = 0
    return end


@part(nogil=True)
def _flush(words, nbits, out, used):
    """The words of a tile to the bytes `out` from `used` on, if they fit; where they end."""
    end = used + 4 * (-(-nbits // 32))
    if end <= out.size:
        data = view_as(words, np.uint8)
        for i in range(end - used):
            out[used + i] = data[i]
    return end


@part(nogil=True)
def _clear(words, nbits):
    for i in range((nbits >> 6) + 2):
        words[i] = 0


@part(nogil=True)
def _encode_new(x, at, n, m, kind, space, out, used):
    one_class(n, space)
    for j in range(m):
        space.exponents[j] = 0
    _list_gaps(n, m, I8(1), space)
    nbits = 1 + _gamma_bits(m + 1) + m * kind[0] + _gap_bits(I8(1), space)
    if -(-nbits // 32) > 1 + -(-n * x.itemsize // 4):
        return _write_plain(x, at, n, out, used)
    words = space.words
    _clear(words, nbits)
    to = _put_gamma(words, I8(1), m + 1)
    to = _put_quotients(_put_low(to, I8(1), space), I8(1), space)
    for j in range(m):
        to = put(words, to, U8(x[at + I8(space.positions[j])]), kind[0])
    return _flush(words, nbits, out, used)


@part(nogil=True)
def _split_change(e, size, scale, width):
    """Whether a change is hot, its low bits, its quotient, and whether it is an exception."""
    hot = I8(e < scale)
    low = scale - 1 - e
    low = (low if low < width else width) * hot
    quotient = size >> U8(low) if low < 64 else U8(0)
    return hot, low, quotient, quotient > U8(MAX_QUOTIENT * hot)


@part(nogil=True)
def _encode_differences(base, x, at, n, m, kind, space, out, used):
    n_classes, width = kind[4], kind[0]
    exponents, lengths, changes = space.exponents, space.lengths, space.changes
    negative = space.negative
    masks = order_masks(kind)
    for k in range((m + 63) >> 6):
        negative[k] = 0
    for j in range(m):
        i = at + I8(space.positions[j])
        old, new = ordered_bits(U8(base[i]), I8(8 * x.itemsize), masks), ordered_bits(U8(x[i]), I8(8 * x.itemsize), masks)
        less = U8(new < old)
        size = (new - old - (U8(1) - less)) ^ (U8(0) - less)
        negative[j >> 6] |= less << U8(j & 63)
        exponents[j] = exponent_of(base[i], kind)
        lengths[j] = bit_length(size)
        changes[j] = size
    center = _center(base, at, n, kind)
    scale = _scale(exponents, lengths, m, kind, space.hist)
    if n_classes > 1:
        set_limits(center, kind, space.limits)
        sort_classes(base, at, n, kind, space)
    else:
        one_class(n, space)
    _list_gaps(n, m, n_classes, space)

    exceptions, low_bits, quotients = I8(0), I8(0), I8(0)
    for j in range(m):
        hot, low, quotient, is_exception = _split_change(I8(exponents[j]), changes[j], scale, width)
        low_bits += low
        exceptions += I8(is_exception)
        quotients += hot + (I8(0) if is_exception else I8(quotient))
    nbits = 1 + kind[1] + kind[3] + m + _gap_bits(n_classes, space)
    for c in range(n_classes):
        nbits += _gamma_bits(space.counts[c] + 1)
    nbits += _gamma_bits(exceptions + 1) + quotients
    low_at = nbits
    exception_at = nbits + low_bits
    nbits = exception_at + exceptions * (LOG_TILE + width)
    if -(-nbits // 32) > 1 + -(-n * x.itemsize // 4):
        return _write_plain(x, at, n, out, used)

    words = space.words
    _clear(words, nbits)
    to = put(words, I8(1), U8(center), kind[1])
    to = put(words, to, U8(scale), kind[3])
    for c in range(n_classes):
        to = _put_gamma(words, to, space.counts[c] + 1)
    to = _put_gamma(words, to, exceptions + 1)
    to = _put_low(to, n_classes, space)
    for j in range(0, m, 64):
        to = put(words, to, negative[j >> 6], m - j if m - j < 64 else I8(64))
    to = _put_quotients(to, n_classes, space)
    for j in range(m):
        size = changes[j]
        hot, low, quotient, is_exception = _split_change(I8(exponents[j]), size, scale, width)
        if is_exception:
            exception_at = put(words, exception_at, U8(j), I8(LOG_TILE))
            exception_at = put(words, exception_at, size, width)
            quotient, size = U8(0), U8(0)
        to += I8(quotient)
        words[to >> 6] |= U8(hot) << U8(to & 63)
        to += hot
        low_at = put(words, low_at, size & low_mask(low), low)
    return _flush(words, nbits, out, used)


@cached(nogil=True)
def _encode_tiles(base, x, start, kind, overwrite, space, out, ends):
    """Encode the tiles of elements of which the first has the number `start` in the chunk.

    `ends` gets where the words of each end in `out`, in bytes. Returns what the digests of base and
    result gain.
    """
    used = I8(0)
    before, after = U8(0), U8(0)
    for tile in range(ends.size):
        at = I8(tile) * TILE
        n = x.size - at if x.size - at < TILE else I8(TILE)
        m = _compare(base, x, at, n, space.block, space.changed)
        before = add_digest(before, base[at : at + n], (start + at) * x.itemsize, space.last_words)
        if m:
            list_positions(space.changed, n, m, space.positions)
            for j in range(m):
                i = at + I8(space.positions[j])
                after += digest_gain(U8(base[i]), U8(x[i]), start + i, x.itemsize)
            if overwrite:
                used = _encode_new(x, at, n, m, kind, space, out, used)
            else:
                used = _encode_differences(base, x, at, n, m, kind, space, out, used)
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
            spec.form == "overwrite",
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
