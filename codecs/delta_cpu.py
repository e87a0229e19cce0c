# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""delta on the CPU with Numba: the bytes of codecs/delta.py.

Decoding stands here, encoding in delta_encode_cpu.py, and what both use in delta_bits_cpu.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..formats.checksum import MASK64
from . import delta as reference
from .common.arrays_cpu import as_read_only, view_as
from .common.base import Bits, Chunk, ChunkDecoded
from .common.compile_cache import cached, part
from .common.threads import run, spans
from .delta import (
    LOG_TILE,
    MAX_QUOTIENT,
    OFFSETS_PROBLEM,
    RESULT_PROBLEM,
    TILE,
    Delta,
    Prepared,
    ends_of,
    fits,
    index_of,
)
from .delta_bits_cpu import (
    BLOCK,
    BLOCKS,
    I8,
    ROW,
    STARTS,
    U2,
    U8,
    add_digest,
    digest_gain,
    exponent_of,
    gap_low_bits,
    get,
    kind_numbers,
    list_positions,
    low_mask,
    next_one,
    not_above,
    one_class,
    ordered_bits,
    popcount,
    set_limits,
    size_low_bits,
    sort_classes,
    space_for,
    unordered_bits,
)
from .delta_encode_cpu import encode_chunk

__all__ = ["base_fits", "decode_chunk", "digest_of", "encode_chunk", "prepare"]

_PROBLEMS = (
    None,
    "a tile ends early, or goes on behind its end",
    "the first word of a plain tile",
    "more changes than elements, or none",
    "a gap goes beyond the end",
    "a change is too large",
    "exceptions that are not in order",
    "a change goes beyond the dtype",
)
_ENDS, _PLAIN, _COUNTS, _GAP, _LARGE, _EXCEPTIONS, _RANGE = range(1, 8)
#: Number of the set bit of a byte before which k are set: at 8 * byte + k.
_IN_BYTE = np.array(
    [
        ([i for i in range(8) if byte >> i & 1] + 8 * [0])[k]
        for byte in range(256)
        for k in range(8)
    ],
    np.uint8,
)


@part(nogil=True)
def _select(word, k):
    """Number of the set bit of `word` before which `k` are set; there is one.

    Source: Vigna, Broadword implementation of rank/select queries, 2008.
    """
    ones = U8(0x0101010101010101)
    s = word - (word >> U8(1) & U8(0x5555555555555555))
    s = (s & U8(0x3333333333333333)) + (s >> U8(2) & U8(0x3333333333333333))
    # Set bits up to and with each byte.
    s = (s + (s >> U8(4)) & U8(0x0F0F0F0F0F0F0F0F)) * ones
    high = U8(0x8080808080808080)
    at = U8(8) * popcount((k * ones | high) - s & high)
    k -= s << U8(8) >> at & U8(255)
    return I8(at) + I8(_IN_BYTE[I8(U8(8) * (word >> at & U8(255)) + k)])


@part(nogil=True)
def _get_gamma(words, at, end):
    """A number and where the next code is; 0 if it is too large, or not there."""
    one = next_one(words, at, end)
    below = one - at
    if one >= end or below > LOG_TILE:
        return I8(0), at
    return I8(U8(1) << U8(below) | get(words, one + 1, below)), one + 1 + below


@part(nogil=True)
def _load(words, source, lo, hi):
    """Bytes `lo` to `hi` of `source` as words of 64 bits, with zeros behind them."""
    nbytes = hi - lo
    whole = nbytes >> 3
    halves = view_as(source[lo:hi], np.uint32)
    for i in range(whole):
        words[i] = U8(halves[2 * i]) | U8(halves[2 * i + 1]) << U8(32)
    for i in range(4):
        words[whole + i] = 0
    if nbytes & 7:
        words[whole] = U8(halves[2 * whole])


@part(nogil=True)
def _find_changes(at, end, n_classes, n, space):
    """Read quotients of gaps, low bits of which start at `space.places[0]`, and flags.

    What has changed is in `space.changed`. Returns where quotients end; -1 early, -2 a bad gap.
    """
    changed, words = space.changed, space.words
    blocks = -(-n // BLOCK)
    for i in range(blocks):
        changed[i] = 0
    low_at = space.places[0]
    for c in range(n_classes):
        listed, size = space.listed[c], space.sizes[c]
        low = gap_low_bits(size, listed)
        members = space.classes[c * BLOCKS : (c + 1) * BLOCKS]
        before = space.before[c * STARTS : (c + 1) * STARTS]
        rank, k = I8(-1), I8(0)
        for _ in range(listed):
            one = next_one(words, at, end)
            if one >= end:
                return I8(-1)
            quotient = one - at
            at = one + 1
            if quotient > TILE:
                return I8(-2)
            rank += 1 + (quotient << low | I8(get(words, low_at, low)))
            low_at += low
            if rank >= size:
                return I8(-2)
            passed = I8(ROW)
            while passed == ROW:
                passed = not_above(before, k + 1, U2(rank))
                k += passed
            changed[k] |= U8(1) << U8(_select(members[k], U8(rank - I8(before[k]))))
        if listed != space.counts[c]:
            for i in range(blocks):
                changed[i] ^= members[i]
    return at


@part(nogil=True, error_model="numpy")
def _start_places(at, end, n_classes, n, space):
    """Check the counts of a tile; where its low bits start is kept. Where they end, or -1, -3."""
    total, bits = I8(0), I8(0)
    for c in range(n_classes):
        count, size = space.counts[c], space.sizes[c]
        if count > size:
            return I8(-3)
        space.listed[c] = count if 2 * count <= size else size - count
        bits += space.listed[c] * gap_low_bits(size, space.listed[c])
        total += count
    if total == 0:
        return I8(-3)
    space.places[0] = at
    space.places[1] = total
    return at + bits if at + bits <= end else I8(-1)


@part(nogil=True)
def _changes_of_new(x, at, n, nbits, kind, space, values):
    """Read a tile in the form overwrite: numbers and new bits of what has changed."""
    words = space.words
    count, to = _get_gamma(words, I8(1), nbits)
    if count == 0:
        return _COUNTS
    one_class(n, space)
    space.counts[0] = count - 1
    to = _start_places(to, nbits, I8(1), n, space)
    if to >= 0:
        to = _find_changes(to, nbits, I8(1), n, space)
    if to < 0:
        return -to
    m = space.places[1]
    if to + m * kind[0] > nbits or nbits - to - m * kind[0] >= 32:
        return _ENDS
    list_positions(space.changed, n, space.positions)
    for j in range(m):
        values[j] = get(words, to, kind[0])
        to += kind[0]
    return 0 if get(words, to, nbits - to) == U8(0) else _ENDS


@part(nogil=True)
def _changes_of_differences(x, at, n, nbits, kind, space, values):
    """Read a tile in the form difference: numbers and new bits of what has changed."""
    words, n_classes, width = space.words, kind[4], kind[0]
    to = I8(1)
    center = I8(get(words, to, kind[1]))
    to += kind[1]
    scale = I8(get(words, to, kind[3]))
    to += kind[3]
    for c in range(n_classes):
        count, to = _get_gamma(words, to, nbits)
        if count == 0:
            return _COUNTS
        space.counts[c] = count - 1
    exceptions, to = _get_gamma(words, to, nbits)
    if exceptions == 0:
        return _COUNTS
    exceptions -= 1
    if to > nbits:
        return _ENDS
    if n_classes > 1:
        set_limits(center, kind, space.limits)
        sort_classes(x, at, n, kind, space)
    else:
        one_class(n, space)
    signs_at = _start_places(to, nbits, n_classes, n, space)
    if signs_at < 0:
        return -signs_at
    m = space.places[1]
    if signs_at + m > nbits:
        return _ENDS
    to = _find_changes(signs_at + m, nbits, n_classes, n, space)
    if to < 0:
        return -to

    low_bits, hot = I8(0), I8(0)
    exponents, positions = space.exponents, space.positions
    list_positions(space.changed, n, positions)
    for j in range(m):
        e = exponent_of(x[at + I8(positions[j])], kind)
        exponents[j] = e
        hot += I8(e < scale)
        low_bits += size_low_bits(e, scale, width) * I8(e < scale)
    low_at = to
    for _ in range(hot):
        low_at = next_one(words, low_at, nbits) + 1
        if low_at > nbits:
            return _ENDS
    exception_at = low_at + low_bits
    stop = exception_at + exceptions * (LOG_TILE + width)
    if stop > nbits or nbits - stop >= 32:
        return _ENDS
    following = I8(get(words, exception_at, I8(LOG_TILE))) if exceptions else I8(TILE)
    largest = low_mask(width)
    for j in range(m):
        size = U8(0)
        e = I8(exponents[j])
        if e < scale:
            low = size_low_bits(e, scale, width)
            one = next_one(words, to, nbits)
            quotient = one - to
            to = one + 1
            if quotient > MAX_QUOTIENT or (
                quotient and (low >= width or U8(quotient) > largest >> U8(low))
            ):
                return _LARGE
            size = U8(quotient) << U8(low) if low < 64 else U8(0)
            size |= get(words, low_at, low)
            low_at += low
        if j == following:
            size = get(words, exception_at + LOG_TILE, width)
            exception_at += LOG_TILE + width
            exceptions -= 1
            following = I8(get(words, exception_at, I8(LOG_TILE))) if exceptions else I8(TILE)
            if exceptions and following <= j:
                return _EXCEPTIONS
        less = words[(signs_at + j) >> 6] >> U8((signs_at + j) & 63) & U8(1)
        old = ordered_bits(U8(x[at + I8(positions[j])]), kind)
        # How far it is to the end of the range: `old`, or to `largest`.
        flip = U8(0) - less
        if size >= (old ^ largest ^ (flip & largest)):
            return _RANGE
        values[j] = unordered_bits(old + (size ^ flip) + (U8(1) - less), kind)
    if exceptions:
        return _EXCEPTIONS
    return 0 if get(words, stop, nbits - stop) == U8(0) else _ENDS


@part(nogil=True)
def _read_plain(source, lo, hi, n, itemsize):
    """What is wrong with a plain tile, 0 if nothing."""
    nbytes = n * itemsize
    if hi - lo != 4 * (1 + -(-nbytes // 4)):
        return _ENDS
    if source[lo] != 1 or source[lo + 1] or source[lo + 2] or source[lo + 3]:
        return _PLAIN
    for i in range(lo + 4 + nbytes, hi):
        if source[i]:
            return _ENDS
    return 0


@cached(nogil=True)
def _decode_tiles(x, start, kind, overwrite, space, source, ends, out, written, listed, values):
    """Decode the tiles of the base's elements `x`, the first of which has number `start`.

    Words are bytes `ends` of `source`. If `written`, results go to `out`. Otherwise numbers of
    changes go to `listed`, new bits to `values`, as long as they fit. Returns a problem (-1: the
    reference has to look); the digest of the base, unless `written` in the form difference; what
    that of the result has more; and how many changes there are, or more than fit.
    """
    before, after = U8(0), U8(0)
    total = I8(0)
    for tile in range(ends.size - 1):
        at = I8(tile) * TILE
        n = x.size - at if x.size - at < TILE else I8(TILE)
        if overwrite or not written:
            before = add_digest(before, x[at : at + n], (start + at) * x.itemsize)
        lo, hi = I8(ends[tile]), I8(ends[tile + 1])
        if written:
            for j in range(n):
                out[at + j] = x[at + j]
        if lo == hi:
            continue
        if source[lo] & 1:
            problem = _read_plain(source, lo, hi, n, x.itemsize)
            if problem:
                return problem, before, after, total
            data = view_as(space.words, x.dtype)
            raw = view_as(space.words, np.uint8)
            for j in range(n * x.itemsize):
                raw[j] = source[lo + 4 + j]
            for j in range(n):
                after += digest_gain(U8(x[at + j]), U8(data[j]), start + at + j, x.itemsize)
            if written:
                for j in range(n):
                    out[at + j] = data[j]
            # Not listed: they would be more than fit.
            total += values.size + 1
            continue
        if hi - lo > 8 * (space.words.size - 6):
            return -1, before, after, total
        _load(space.words, source, lo, hi)
        if overwrite:
            problem = _changes_of_new(x, at, n, 8 * (hi - lo), kind, space, space.changes)
        else:
            problem = _changes_of_differences(x, at, n, 8 * (hi - lo), kind, space, space.changes)
        if problem:
            return problem, before, after, total
        m = space.places[1]
        if written:
            for j in range(m):
                i = at + I8(space.positions[j])
                v = space.changes[j]
                after += digest_gain(U8(x[i]), v, start + i, x.itemsize)
                out[i] = v
        else:
            fit = total + m <= values.size
            for j in range(m):
                i = at + I8(space.positions[j])
                v = space.changes[j]
                after += digest_gain(U8(x[i]), v, start + i, x.itemsize)
                if fit:
                    listed[total + j] = start + i
                    values[total + j] = v
        total += m
    return 0, before, after, total


@cached(nogil=True)
def _digest_of(x, first_byte):
    return add_digest(U8(0), x, I8(first_byte))


def digest_of(data: Bits, first_word: int = 0) -> int:
    """See `delta.digest_of`; `data` may be elements of any size."""
    return int(_digest_of(as_read_only(data), 4 * first_word)) & MASK64


@cached(nogil=True)
def _write_listed(out, listed, values):
    """Write the changes that `_decode_tiles` has listed."""
    for j in range(values.size):
        out[I8(listed[j])] = values[j]


class _Span(NamedTuple):
    """What `_decode_tiles` has found."""

    problem: int
    before: int
    after: int
    total: int


def _decode_span(
    spec: Delta,
    chunk: Chunk,
    base: Bits,
    ends: Any,
    out: Bits | None,
    first: int,
    listed: Any = None,
) -> _Span:
    """Decode the tiles from number `first` on whose words are at `ends` of the chunk.

    `base` has the elements of these tiles, and so has `out`; or `listed` is memory for changes.
    """
    numbers, values = listed or (np.empty(0, np.uint32), np.empty(0, chunk.dtype.bits))
    found = _decode_tiles(
        as_read_only(base),
        first * TILE,
        kind_numbers(chunk.dtype),
        spec.form == "overwrite",
        space_for(chunk.dtype),
        as_read_only(chunk.dynamic),
        ends,
        values if out is None else out,
        out is not None,
        numbers,
        values,
    )
    return _Span(*map(int, found))


def base_fits(spec: Delta, chunk: Chunk, base: Bits, threads: int = 1) -> bool:
    """Whether the chunk can be decoded against this base (1-D, the chunk's elements)."""
    cuts = spans(-(-base.size // TILE), base.nbytes, threads)
    calls = [(base[lo * TILE : hi * TILE], lo * TILE * base.itemsize // 4) for lo, hi in cuts]
    return fits(spec, chunk, sum(run(digest_of, calls)) & MASK64)


def decode_chunk(
    spec: Delta,
    chunk: Chunk,
    out: Bits,
    start: int = 0,
    *,
    base: Bits,
    threads: int = 1,
) -> ChunkDecoded:
    """Decode elements `start` to `start + out.size` of the chunk into `out` (1-D).

    `base` has all of the chunk's elements, and fits. It may be the memory of `out`.
    """
    stop = start + out.size
    ends = ends_of(chunk, start, stop)
    if ends is None:
        return ChunkDecoded(OFFSETS_PROBLEM)
    if out.size < chunk.nelem:
        return _decode_part(spec, chunk, out, start, base, ends)
    if not out.size:
        return ChunkDecoded(_result_problem(chunk, 0))
    cuts = spans(ends.size - 1, out.nbytes, threads)
    calls = [
        (spec, chunk, base[a * TILE : b * TILE], ends[a : b + 1], out[a * TILE : b * TILE], a)
        for a, b in cuts
    ]
    found = run(_decode_span, calls)
    problem = next((f.problem for f in found if f.problem), 0)
    if problem < 0:
        return reference.decode_chunk(spec, chunk, out, start, base=base)
    if problem:
        return ChunkDecoded(_PROBLEMS[problem])
    before = int(index_of(chunk).digests[0])
    if spec.form == "overwrite":
        before = sum(f.before for f in found)
    return ChunkDecoded(_result_problem(chunk, before + sum(f.after for f in found)))


def _decode_part(
    spec: Delta, chunk: Chunk, out: Bits, start: int, base: Bits, ends: Any
) -> ChunkDecoded:
    """As `decode_chunk`, of some elements."""
    stop = start + out.size
    for number in range(start // TILE, -(-stop // TILE)):
        at = number * TILE
        here = ends[number - start // TILE :][:2]
        source = base[at : at + TILE]
        bits = np.empty(source.size, source.dtype)
        problem = _decode_span(spec, chunk, source, here, bits, number).problem
        if problem < 0:
            return reference.decode_chunk(spec, chunk, out, start, base=base)
        if problem:
            return ChunkDecoded(_PROBLEMS[problem])
        lo, hi = max(start, at), min(stop, at + TILE)
        out[lo - start : hi - start] = bits[lo - at : hi - at]
    return ChunkDecoded()


def _result_problem(chunk: Chunk, digest: int) -> str | None:
    wrong = digest & MASK64 != int(index_of(chunk).digests[1])
    return RESULT_PROBLEM if wrong else None


def prepare(spec: Delta, chunk: Chunk, base: Bits, threads: int = 1) -> Prepared:
    """See `Prepared`; one pass over the base, another over what has changed."""
    ends = ends_of(chunk, 0, chunk.nelem)
    if ends is None or not chunk.nelem:
        return reference.prepare(spec, chunk, base)
    cuts = spans(ends.size - 1, base.nbytes, threads)

    def check(a: int, b: int) -> tuple[_Span, Any, Any]:
        part_of_base = base[a * TILE : b * TILE]
        # Changes that take up to a tenth of the base are kept.
        most = part_of_base.nbytes // (10 * (4 + base.itemsize))
        listed = np.empty(most, np.uint32), np.empty(most, base.dtype)
        found = _decode_span(spec, chunk, part_of_base, ends[a : b + 1], None, a, listed)
        return found, listed[0][: found.total], listed[1][: found.total]

    parts = run(check, cuts)
    found = [span for span, _, _ in parts]
    problem = next((f.problem for f in found if f.problem), 0)
    if problem < 0:
        return reference.prepare(spec, chunk, base)
    if problem:
        # Not all of the base has been read.
        is_base = base_fits(spec, chunk, base, threads)
        return Prepared(is_base, _PROBLEMS[problem], lambda out: None)
    before = sum(f.before for f in found) & MASK64
    told = _result_problem(chunk, before + sum(f.after for f in found))
    kept = all(f.total <= numbers.size for f, numbers, _ in parts)

    def write(out: Bits) -> None:
        if kept:
            run(_write_listed, [(out, numbers, values) for _, numbers, values in parts])
        else:
            decode_chunk(spec, chunk, out, base=base, threads=threads)

    return Prepared(fits(spec, chunk, before), told, write)
