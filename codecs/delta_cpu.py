# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment"
"""delta on the CPU with Numba: the bytes of codecs/delta.py.

Decoding stands here, encoding in delta_encode_cpu.py, and what both use in delta_bits_cpu.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..formats.checksum import MASK64
from . import delta as reference
from .common.arrays_cpu import as_read_only, read_only, view_as
from .common.base import Bits, Bytes, Chunk, ChunkDecoded
from .common.compile_cache import cached, part
from .common.memory_cpu import item, load8, store8
from .common.threads import run, spans
from .delta import (
    FORMS,
    LOG_TILE,
    MAX_QUOTIENT,
    OFFSETS_PROBLEM,
    PLANES_HEAD,
    RESULT_PROBLEM,
    TILE,
    Delta,
    Ints,
    Prepared,
    ends_of,
    fits,
    index_of,
)
from .delta_bits_cpu import (
    BLOCK,
    BLOCKS,
    DENSE,
    I8,
    ONE,
    STARTS,
    U8,
    WORDS,
    ZERO,
    add_digest,
    copy,
    ctz,
    deposit,
    digest_gain,
    digests_of,
    gap_low_bits,
    get,
    get_short,
    kind_numbers,
    list_positions,
    low_mask,
    next_one,
    one_class,
    order_masks,
    ordered_bits,
    popcount,
    read_ranks,
    set_hot,
    set_limits,
    sort_classes,
    space_for,
    unordered_bits,
)
from .delta_encode_cpu import encode_chunk
from .delta_planes_cpu import read_planes

__all__ = ["base_fits", "decode_chunk", "digest_of", "encode_chunk", "prepare"]

_PROBLEMS = (
    None,
    "a tile ends early, or goes on behind its end",
    "the first word of a plain tile",
    "more changes than elements, or none",
    "a gap goes beyond the end",
    "a change is too large",
    "exceptions that are not in order, or go beyond the dtype",
    "a change goes beyond the dtype",
    "no planes, or one with another number of ones",
)
_ENDS, _PLAIN, _COUNTS, _GAP, _LARGE, _EXCEPTIONS, _RANGE, _PLANES = range(1, 9)
#: Of what `read_planes` gives.
_OF_PLANES = np.array([0, _ENDS, _GAP, _PLANES])
_OVERWRITE, _ADAPTIVE = FORMS["overwrite"], FORMS["adaptive"]
#: The reference has to look.
_UNSURE = -1
#: What decoding is for: to fill `out`; to check, and keep changes; to write what has been checked.
_FILL, _CHECK, _WRITE = range(3)
#: Of changes that are kept: a gap that goes on, a difference that takes more than a byte, and more
#: bytes than a change takes.
_FAR, _WIDE, _KEPT_NBYTES = 255, 128, TILE // 255 + 11


@part(apart=True, nogil=True)
def _get_gamma(words, at, end):
    """A number and where the next code is; 0 if it is too large, or not there."""
    one = next_one(words, at, end)
    below = one - at
    if one >= end or below > LOG_TILE:
        return 0, at
    return I8(ONE << U8(below) | get(words, one + 1, below)), one + 1 + below


@part(nogil=True)
def _load(words, source, lo, hi):
    """Bytes `lo` to `hi` of `source` as words of 64 bits, with zeros behind them."""
    for i in range(hi - lo >> 3, (hi - lo >> 3) + 4):
        words[i] = 0
    copy(words, 0, source, lo, hi - lo)


@part(nogil=True)
def _place(blocks, flip, members, before, space):
    """Set the flags of a class, `space.ranks` with `flip` applied, among those of all elements."""
    changed, ranks = space.changed, space.ranks
    for k in range(blocks):
        w, shift = U8(before[k]) >> U8(6), U8(before[k]) & U8(63)
        bits = ranks[w] >> shift | ranks[w + ONE] << ONE << (U8(63) - shift)
        changed[k] |= deposit(bits ^ flip, members[k])


@part(nogil=True)
def _find_changes(at, end, n_classes, n, space):
    """Read quotients of gaps, low bits of which start at `space.places[0]`, and flags.

    What has changed is in `space.changed`. Returns where quotients end; -1 early, -2 a bad gap.
    """
    blocks = (n + BLOCK - 1) // BLOCK
    for i in range(blocks):
        space.changed[i] = 0
    low_at = space.places[0]
    for c in range(n_classes):
        listed, size = space.listed[c], space.sizes[c]
        members = space.classes[c * BLOCKS : (c + 1) * BLOCKS]
        before = space.before[c * STARTS : (c + 1) * STARTS]
        if space.counts[c]:
            at = read_ranks(at, end, low_at, listed, size, space)
            if at < 0:
                return at
            low_at += listed * gap_low_bits(size, listed)
            flip = ZERO - U8(listed != space.counts[c])
            _place(blocks, flip, members, before, space)
    return at


@part(nogil=True, error_model="numpy")
def _start_places(at, end, n_classes, n, space):
    """Check the counts of a tile; where its low bits start is kept. Where they end, or -1, -3."""
    total, bits = 0, 0
    for c in range(n_classes):
        count, size = space.counts[c], space.sizes[c]
        if count > size:
            return -3
        space.listed[c] = count if 2 * count <= size else size - count
        bits += space.listed[c] * gap_low_bits(size, space.listed[c])
        total += count
    if total == 0:
        return -3
    space.places[0] = at
    space.places[1] = total
    return at + bits if at + bits <= end else -1


@part(nogil=True)
def _changes_of_new(x, new, n, nbits, kind, space, purpose):
    """Read a tile in the form overwrite: numbers of what has changed, new bits to `new`."""
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
        return _GAP if to == -2 else -to
    m = space.places[1]
    if to + m * kind[0] > nbits or nbits - to - m * kind[0] >= 32:
        return _ENDS
    list_positions(space.changed, n, m, space.positions)
    _begin(x, new, m, purpose)
    for j in range(m):
        new[I8(item(space.positions, j))] = get(words, to, kind[0])
        to += kind[0]
    return 0 if get(words, to, nbits - to) == ZERO else _ENDS


@part(nogil=True)
def _read_quotients(at, end, count, space):
    """Quotients of `count` sizes, from `at` on. Returns where they end; -1 early, -2 too large."""
    words, quotients = space.words, space.quotients
    w = at >> 6
    bits = words[w] & (~ZERO << U8(at & 63))
    j, seen = 0, 0
    while j < count:
        stop = j + I8(popcount(bits))
        stop = stop if stop < count else count
        while j < stop:
            one = (w << 6) + I8(ctz(bits))
            bits &= bits - ONE
            quotient = one - at
            at = one + 1
            seen |= quotient
            quotients[U8(j)] = quotient
            j += 1
        w += 1
        if j < count and w << 6 >= end:
            return -1
        bits = words[w]
    return -2 if seen > MAX_QUOTIENT else at


@part(nogil=True)
def _changed_by(v, less, size, width, masks):
    """An element changed by its size and 1, and something if it is outside of the dtype."""
    flip = ZERO - less
    old = ordered_bits(v, width, masks)
    new = old + (size ^ flip) + (ONE - less)
    if width < 64:
        outside = new >> U8(width)
    else:
        # How far it is to the end of the range: `old`, or to the largest.
        outside = U8(size >= (old ^ ~flip))
    return unordered_bits(new, width, masks), outside


@part(nogil=True)
def _begin(old, new, m, purpose):
    """Copy the elements of a tile of which `m` change, where all the new tile is needed."""
    if purpose == _FILL or (purpose == _CHECK and m * DENSE > old.size):
        copy(new, 0, old, 0, old.size * old.itemsize)


@part(nogil=True)
def _changes_of_differences(x, new, n, nbits, kind, space, purpose):
    """Read a tile in the form difference: numbers of what has changed, new bits to `new`."""
    words, n_classes, width = space.words, kind[4], I8(8 * x.itemsize)
    data = view_as(words, np.uint8)
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
        sort_classes(x, n, kind, space)
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
        return _ENDS if to == -1 else _GAP

    positions, quotients, hot = space.positions, space.quotients, space.hot
    list_positions(space.changed, n, m, positions)
    set_hot(scale, width, kind, hot)
    mantissa, exponents = U8(kind[2]), U8((1 << kind[1]) - 1)
    many = I8(0)
    for j in range(m):
        e = U8(item(x, I8(item(positions, j)))) >> mantissa & exponents
        many += I8(e < U8(scale))
    low_at = _read_quotients(to, nbits, many, space)
    if low_at < 0:
        return _ENDS if low_at == -1 else _LARGE
    _begin(x, new, m, purpose)
    masks = order_masks(kind)
    h, bad = 0, ZERO
    for first in range(0, m, 32):
        signs = get_short(data, signs_at + first, low_mask(32))
        for j in range(first, m if m - first < 32 else first + 32):
            i = I8(item(positions, j))
            v = U8(item(x, i))
            found = U8(hot[v >> mantissa & exponents])
            is_hot, low = found >> U8(7), found & U8(127)
            quotient = U8(item(quotients, h)) & (ZERO - is_hot)
            h += I8(is_hot)
            if width < 64:
                size = quotient << low | get_short(data, low_at, (ONE << low) - ONE)
            else:
                # No quotient has more than four bits.
                bad |= quotient >> (U8(64) - low if low else U8(63))
                size = quotient << (low & U8(63)) | get(words, low_at, low)
            low_at += I8(low)
            bits, outside = _changed_by(v, signs & ONE, size, width, masks)
            bad |= outside
            new[U8(i)] = bits
            signs >>= ONE
    stop = low_at + exceptions * (LOG_TILE + width)
    if stop > nbits or nbits - stop >= 32:
        return _ENDS
    if bad:
        # Of an exception the size that counts comes next.
        return I8(_UNSURE if exceptions else _RANGE)
    if exceptions and not _read_exceptions(x, new, low_at, stop, signs_at, kind, space):
        return _EXCEPTIONS
    return 0 if get(words, stop, nbits - stop) == ZERO else _ENDS


@part(rare=True, nogil=True)
def _read_exceptions(x, new, at, stop, signs_at, kind, space):
    """Read exceptions, new bits of which go to `new`; whether they are as they should be."""
    words, masks, last = space.words, order_masks(kind), -1
    while at < stop:
        j = I8(get(words, at, I8(LOG_TILE)))
        if j <= last or j >= space.places[1]:
            return False
        last = j
        size = get(words, at + LOG_TILE, kind[0])
        less = get(words, signs_at + j, I8(1))
        i = I8(space.positions[j])
        new[i], outside = _changed_by(U8(x[i]), less, size, I8(8 * x.itemsize), masks)
        if outside:
            return False
        at += LOG_TILE + kind[0]
    return True


@part(rare=True, nogil=True)
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


@part(nogil=True)
def _keep(old, new, space, kept, to):
    """Append the changes of a tile to the bytes `kept`; where they end, or -1 if they do not fit.

    Of each the gap before it, `_FAR` for so many elements and more to come, and the difference of
    its bits, or `_WIDE` and its new bits.
    """
    last = -1
    shift = I8(64 - 8 * old.itemsize)
    for j in range(space.places[1]):
        if to + _KEPT_NBYTES > kept.size:
            return -1
        i = I8(item(space.positions, j))
        gap = i - last - 1
        last = i
        while gap >= _FAR:
            kept[U8(to)] = _FAR
            gap -= _FAR
            to += 1
        bits = U8(item(new, i))
        more = I8((bits - U8(item(old, i))) << U8(shift)) >> shift
        kept[U8(to)] = gap
        if -_WIDE < more < _WIDE:
            kept[U8(to + 1)] = more & 255
            to += 2
        else:
            kept[U8(to + 1)] = _WIDE
            store8(kept, to + 2, bits)
            to += 10
    return to


@part(nogil=True)
def _write_kept(out, at, m, kept, used):
    """Write the changes that `_keep` has kept over the elements of a tile."""
    i = at - 1
    for _ in range(m):
        gap = I8(item(kept, used))
        while gap == _FAR:
            i += _FAR
            used += 1
            gap = I8(item(kept, used))
        i += gap + 1
        more = I8(item(kept, used + 1))
        if more == _WIDE:
            out[U8(i)] = load8(kept, used + 2)
            used += 10
        else:
            out[U8(i)] = U8(out[U8(i)]) + U8(more - ((more & _WIDE) << 1))
            used += 2


@part(nogil=True)
def _read_tile(old, new, kind, form, space, source, lo, hi, purpose):
    """Read a tile that has words: what is wrong with it, 0 if nothing, and if it is all new.

    It has no more words than a plain one, which `ends_of` has checked. New bits go to `new`, and
    where all the new tile is needed the other elements as well.
    """
    n, itemsize = old.size, old.itemsize
    planes = form == _ADAPTIVE and source[lo] & PLANES_HEAD == PLANES_HEAD
    if source[lo] & 1 and not planes:
        problem = I8(_read_plain(source, lo, hi, n, itemsize))
        if problem == 0:
            copy(new, 0, source, lo + 4, n * itemsize)
        return problem, True
    _load(space.words, source, lo, hi)
    nbits = 8 * (hi - lo)
    if planes:
        copy(new, 0, old, 0, n * itemsize)
        return I8(_OF_PLANES[read_planes(new, n, nbits, space)]), True
    if form == _OVERWRITE:
        return I8(_changes_of_new(old, new, n, nbits, kind, space, purpose)), False
    return I8(_changes_of_differences(old, new, n, nbits, kind, space, purpose)), False


@cached(nogil=True)
def _decode_tiles(x, start, kind, form, space, source, ends, purpose, out, kept, places):
    """Decode the tiles of the base's elements `x`, the first of which has number `start`.

    Words are bytes `ends` of `source`. Results go to `out`, which to write is the memory of `x`. To
    check, changes go to the bytes `kept` as long as they fit, and `places` gets for each tile where
    they are, or -1, and how many. Returns a problem; the digest of the base, unless `out` is filled
    in another form than overwrite; and what that of the result has more.
    """
    before, after = ZERO, ZERO
    used = I8(0)
    for tile in range(ends.size - 1):
        at = I8(tile) * TILE
        n = x.size - at if x.size - at < TILE else I8(TILE)
        first_byte = (start + at) * x.itemsize
        lo, hi = I8(ends[tile]), I8(ends[tile + 1])
        old, new = x[at : at + n], space.tile[:n]
        m = I8(0)
        if purpose == _FILL:
            new = out[at : at + n]
        if lo < hi:
            if purpose == _WRITE and places[2 * tile] >= 0:
                m = places[2 * tile + 1]
                _write_kept(out, at, m, kept, places[2 * tile])
                continue
            problem, plain = _read_tile(old, new, kind, form, space, source, lo, hi, purpose)
            if problem:
                return problem, before, after
            m = n if plain else space.places[1]
            if purpose == _CHECK:
                end = -1 if plain else _keep(old, new, space, kept, used)
                places[2 * tile], places[2 * tile + 1] = used if end >= 0 else -1, m
                used = end if end >= 0 else used
            if purpose == _WRITE:
                if plain:
                    copy(out, at, new, 0, n * x.itemsize)
                else:
                    for j in range(m):
                        i = I8(item(space.positions, j))
                        out[U8(at + i)] = new[i]
        else:
            _begin(old, new, m, purpose)
        if purpose == _WRITE:
            continue
        if m * DENSE > n:
            of_old, of_new = digests_of(old, read_only(new), first_byte, space.last_words)
            before += of_old
            after += of_new - of_old
            continue
        if form == _OVERWRITE or purpose == _CHECK:
            before = add_digest(before, old, first_byte, space.last_words)
        for j in range(m):
            i = I8(item(space.positions, j))
            gain = digest_gain(U8(item(old, i)), U8(item(new, i)), start + at + i, x.itemsize)
            after += gain
    return 0, before, after


@cached(nogil=True)
def _digest_of(x, first_byte, block):
    return add_digest(ZERO, x, I8(first_byte), block)


def digest_of(data: Bits, first_word: int = 0) -> int:
    """See `delta.digest_of`; `data` may be elements of any size."""
    return int(_digest_of(as_read_only(data), 4 * first_word, np.empty(WORDS, np.uint32))) & MASK64


class _Span(NamedTuple):
    """What `_decode_tiles` has found."""

    problem: int
    before: int
    after: int


class _Kept(NamedTuple):
    """Changes that have been checked; where they are, and how many, of each tile."""

    data: Bytes
    places: Ints


_NOTHING = _Kept(np.empty(0, np.uint8), np.empty(0, np.int64))


def _decode_span(
    spec: Delta,
    chunk: Chunk,
    base: Bits,
    ends: Any,
    first: int,
    purpose: int,
    out: Bits,
    kept: _Kept = _NOTHING,
) -> _Span:
    """Decode the tiles from number `first` on whose words are at `ends` of the chunk.

    `base` has the elements of these tiles, and so has `out`.
    """
    found = _decode_tiles(
        as_read_only(base),
        first * TILE,
        kind_numbers(chunk.dtype),
        FORMS[spec.form],
        space_for(chunk.dtype),
        as_read_only(chunk.dynamic),
        ends,
        purpose,
        out,
        *kept,
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
        (spec, chunk, *_of_tiles(a, b, base, ends), a, _FILL, out[a * TILE : b * TILE])
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
        problem = _decode_span(spec, chunk, source, here, number, _FILL, bits).problem
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

    def check(a: int, b: int) -> tuple[_Span, _Kept]:
        old, ends_here = _of_tiles(a, b, base, ends)
        # Changes that take up to a tenth of the base are kept.
        kept = _Kept(np.empty(old.nbytes // 10, np.uint8), np.empty(2 * (b - a), np.int64))
        nowhere = np.empty(0, base.dtype)
        return _decode_span(spec, chunk, old, ends_here, a, _CHECK, nowhere, kept), kept

    parts = run(check, cuts)
    found = [span for span, _ in parts]
    problem = next((f.problem for f in found if f.problem), 0)
    if problem < 0:
        return reference.prepare(spec, chunk, base)
    if problem:
        # Not all of the base has been read.
        is_base = base_fits(spec, chunk, base, threads)
        return Prepared(is_base, _PROBLEMS[problem], lambda out: None)
    before = sum(f.before for f in found) & MASK64
    told = _result_problem(chunk, before + sum(f.after for f in found))

    def write(out: Bits) -> None:
        calls = [
            (spec, chunk, *_of_tiles(a, b, out, ends), a, _WRITE, out[a * TILE : b * TILE], kept)
            for (a, b), (_, kept) in zip(cuts, parts, strict=True)
        ]
        run(_decode_span, calls)

    return Prepared(fits(spec, chunk, before), told, write)


def _of_tiles(a: int, b: int, base: Bits, ends: Any) -> tuple[Bits, Any]:
    """The elements of tiles `a` to `b`, and where their words are."""
    return base[a * TILE : b * TILE], ends[a : b + 1]
