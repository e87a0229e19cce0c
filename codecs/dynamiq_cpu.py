# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""dynamiq on the CPU with Numba: the bytes of codecs/dynamiq.py, one super-group after another."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from .common.arrays_cpu import as_read_only, view_as, with_scratch
from .common.base import Chunk
from .common.compile_cache import cached, part
from .common.driver_cpu import Decoder, Encoder, Given, decode_by, encode_by
from .common.minifloat import INFINITY, NAN, largest_number
from .common.minifloat_cpu import LANES, kind_of, narrow, widen
from .common.philox_cpu import fill_words
from .dynamiq import (
    CENTER_LIMIT,
    CODE_STREAM,
    FLOOR,
    INDEX_PROBLEM,
    MAX_SCALE_WORD,
    MAX_WIDTH,
    MIN_WIDTH,
    NAN_SCALE,
    PAYLOAD_PROBLEM,
    SCALE_STREAM,
    SCALES,
    SHARED_STREAM,
    SUPER_GROUPS,
    Dynamiq,
    Views,
    bad_words,
    choose_widths,
    chunk_energies,
    first_rows,
    grid_of,
    rounding_of,
    static_views,
    store_widths,
    widths_of,
)

U1, U2, U4, U8 = np.uint8, np.uint16, np.uint32, np.uint64
F4, I4, I8 = np.float32, np.int32, np.int64
_UP, _STOCHASTIC, _WIDE = range(len(SCALES))
_FLOOR, _CENTER_LIMIT = F4(FLOOR), F4(CENTER_LIMIT)
_MAGNITUDE, _INFINITY, _NAN = U4(0x7FFFFFFF), U4(INFINITY), U4(NAN)
_NAN_SCALE, _MAX_SCALE_WORD = U2(NAN_SCALE), U4(MAX_SCALE_WORD)
_CODES, _SHARED, _SCALES = U8(CODE_STREAM), U8(SHARED_STREAM), U8(SCALE_STREAM)
#: Elements of a super-group at most.
_LONGEST = max(SUPER_GROUPS)


@cache
def _tables(grid: str) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Values and inverse steps of the codes of every width, shape (9, 256)."""
    values = np.zeros((MAX_WIDTH + 1, 256), np.float32)
    inverse = np.zeros_like(values)
    for width in range(MIN_WIDTH, MAX_WIDTH + 1):
        values[width, : 1 << width], inverse[width, : 1 << width] = grid_of(grid, width)
    return values, inverse


@part(nogil=True)
def _center(v, size, count, sums, one):
    """Take its mean off a super-group of `count` elements; the word of the mean."""
    half = size // 2
    for i in range(half):
        sums[i] = v[i] + v[i + half]
    while half > 1:
        half //= 2
        for i in range(half):
            sums[i] += sums[i + half]
    mean = F4(sums[0] / F4(count))
    for i in range(count):
        if v[i] >= _CENTER_LIMIT or v[i] <= -_CENTER_LIMIT:
            mean = F4(0)
    if mean < _FLOOR and mean > -_FLOOR:
        mean = F4(0)
    bits = view_as(one, np.uint32)
    one[0] = mean
    word = U4(U4(bits[0] + U4(U4(0x7FFF) + U4(U4(bits[0] >> U4(16)) & U4(1)))) >> U4(16))
    bits[0] = U4(word << U4(16))
    for i in range(count):
        v[i] -= one[0]
    return U2(word)


@part(nogil=True)
def _word_up(x, one):
    """Scale word of a largest magnitude; `one` becomes its value."""
    bits = view_as(one, np.uint32)
    one[0] = x
    word = U4(U4(bits[0] + U4(0xFFFF)) >> U4(16)) if x >= _FLOOR else U4(0)
    word = word if word < _MAX_SCALE_WORD else _MAX_SCALE_WORD
    bits[0] = U4(word << U4(16))
    return U2(word)


@part(nogil=True, error_model="numpy")
def _inverse(x):
    return F4(F4(1) / x) if x > F4(0) else F4(0)


@part(nogil=True, error_model="numpy")
def _set_scales(v, sizes, words, fractions, drawn, one, inverse):
    """Scales of a super-group of values `v`, and the inverses by group."""
    size, group, how = sizes
    groups = size // group
    largest = F4(0)
    for k in range(groups):
        top = F4(0)
        for i in range(k * group, (k + 1) * group):
            magnitude = v[i] if v[i] > F4(0) else F4(-v[i])
            top = magnitude if magnitude > top else top
        inverse[k] = top
        largest = top if top > largest else largest
    if how == _WIDE:
        for k in range(groups):
            words[k] = _word_up(inverse[k], one)
            inverse[k] = _inverse(one[0])
        return
    words[0] = _word_up(largest, one)
    step = F4(one[0] / F4(255))
    finer = _inverse(step)
    for k in range(groups):
        top = inverse[k]
        quotient = F4(top * finer)
        if how == _UP:
            fraction = np.ceil(quotient)
            fraction = fraction if fraction < F4(255) else F4(255)
            fractions[k] = U1(fraction)
            inverse[k] = _inverse(F4(fraction * step))
        else:
            quotient = quotient if quotient < F4(255) else F4(255)
            steps = U4(F4(quotient * F4(65536)))
            fractions[k] = U1(U4(steps + U4(drawn[k] >> U4(16))) >> U4(16))
            inverse[k] = _inverse(top) if step > F4(0) and top >= _FLOOR else F4(0)


@part(nogil=True)
def _set_places(shared, strata, ring_rank, place):
    """Numbers of the strata of a super-group's elements; `shared` are halves of their columns."""
    columns = place.size // 64
    for k in range(8):
        for c in range(columns):
            found = U4(U8(U8(shared[8 * c + k]) * U8(strata)) >> U8(16))
            number = U4(U4(ring_rank // 2) + U4(found >> U4(1))) % U4(strata // 2)
            number = U4(U4(strata - 1) - number) if (found ^ U4(ring_rank)) & U4(1) else number
            at = 8 * (k * columns + c)
            for i in range(at, at + 8):
                place[i] = F4(number)


@part(nogil=True, error_model="numpy")
def _set_codes(v, values, steps, width, strata, own, at, place, code, below):
    """Codes of a super-group of values from -1 to 1; `at` is where its random halves start."""
    n = code.size
    for i in range(n):
        below[i] = 0
    half = I4(1 << (width - 1))
    while half > 0:
        for i in range(n):
            above = I4(below[i] + half)
            below[i] = above if values[above] <= v[i] else below[i]
        half = I4(half >> 1)
    if strata == 0:
        for i in range(n):
            part = F4(F4(v[i] - values[below[i]]) * steps[below[i]])
            code[i] = U1(below[i] + (1 if part > F4(0.5) else 0))
    elif strata == 1:
        for i in range(n):
            part = F4(F4(v[i] - values[below[i]]) * steps[below[i]])
            drawn = F4(F4(F4(own[at + i]) + F4(0.5)) * F4(2.0**-16))
            code[i] = U1(below[i] + (1 if part > drawn else 0))
    else:
        for i in range(n):
            part = F4(F4(v[i] - values[below[i]]) * steps[below[i]])
            drawn = F4(F4(F4(own[at + i]) + F4(0.5)) * F4(2.0**-16))
            up = F4(F4(part * F4(strata)) - place[i]) > drawn
            code[i] = U1(below[i] + (1 if up else 0))


@cached(nogil=True, error_model="numpy")
def _encode_span(
    space,
    kind,
    sizes,
    centered,
    views,
    widths,
    rows,
    tables,
    rounding,
    starts,
    x,
    start,
):
    """Encode `x`, elements `start` and on of a chunk.

    `starts` are the numbers, for random words, of the chunk's first element, group, super-group.
    """
    size, group, how = sizes
    planes, scale_words, means, fractions = views
    strata, ring_rank, seed, step, rank = rounding
    groups, columns = size // group, size // 8
    words = view_as(space[: 4 * _LONGEST], np.uint32)[: size if size > LANES else LANES]
    sums = view_as(space[4 * _LONGEST : 8 * _LONGEST], np.float32)
    inverse = view_as(space[8 * _LONGEST : 12 * _LONGEST], np.float32)
    place = view_as(space[12 * _LONGEST : 16 * _LONGEST], np.float32)[:size]
    below = view_as(space[16 * _LONGEST : 20 * _LONGEST], np.int32)
    drawn = view_as(space[20 * _LONGEST : 24 * _LONGEST], np.uint32)[: groups + 8]
    own_words = view_as(space[24 * _LONGEST : 28 * _LONGEST], np.uint32)[: size // 2 + 8]
    shared_words = view_as(space[28 * _LONGEST : 29 * _LONGEST], np.uint32)[: size // 16]
    code = space[29 * _LONGEST : 29 * _LONGEST + size]
    rest = space[30 * _LONGEST :]
    floats = view_as(rest[: 4 * LANES], np.float32)
    padded = view_as(rest[4 * LANES : 8 * LANES], x.dtype)
    one = view_as(rest[8 * LANES :], np.float32)
    v = view_as(words, np.float32)
    own, shared = view_as(own_words, np.uint16), view_as(shared_words, np.uint16)
    # What is not drawn is not used, but is the same each time.
    for i in range(drawn.size):
        drawn[i] = U4(0)
    for i in range(own_words.size):
        own_words[i] = U4(0)
    for i in range(shared_words.size):
        shared_words[i] = U4(0)
    for at in range(0, x.size, size):
        j = (start + at) // size
        count = size if size < x.size - at else x.size - at
        for i in range(0, size, LANES):
            for c in range(LANES):
                padded[c] = x[at + i + c] if i + c < count else 0
            widen(padded, kind, words[i : i + LANES], floats)
        top = U4(0)
        for i in range(size):
            magnitude = U4(words[i] & _MAGNITUDE)
            top = magnitude if magnitude > top else top
        lost = top >= _INFINITY
        if lost:
            for i in range(words.size):
                words[i] = U4(0)
        mean = U2(0)
        if centered:
            mean = _center(v, size, count, sums, one)
            means[j] = mean
        number = starts[1] + j * groups
        base = number // 4 * 4
        if how == _STOCHASTIC:
            fill_words(drawn, seed, step, rank, _SCALES, U8(base))
        _set_scales(v, sizes, scale_words[j], fractions[j], drawn[number - base :], one, inverse)
        if lost:
            for k in range(scale_words.shape[1]):
                scale_words[j, k] = _NAN_SCALE
        for k in range(groups):
            for i in range(k * group, (k + 1) * group):
                scaled = F4(v[i] * inverse[k])
                scaled = scaled if scaled > F4(-1) else F4(-1)
                v[i] = scaled if scaled < F4(1) else F4(1)
        number = starts[0] + j * size
        base = number // 8 * 4
        if strata > 0:
            fill_words(own_words, seed, step, rank, _CODES, U8(base))
        if strata > 1:
            shared_base = (starts[2] + j) * (size // 16)
            fill_words(shared_words, seed, step, U8(0), _SHARED, U8(shared_base))
            _set_places(shared, strata, ring_rank, place)
        width = widths[j]
        values, steps = tables[0][width], tables[1][width]
        behind = number - 2 * base
        _set_codes(v, values, steps, width, strata, own, behind, place, code, below)
        for k in range(groups):
            if inverse[k] == F4(0):
                for i in range(k * group, (k + 1) * group):
                    code[i] = U1(0)
        for p in range(width):
            plane = planes[rows[j] + p]
            for c in range(columns):
                plane[c] = U1(U1(code[c] >> U1(p)) & U1(1))
            for k in range(1, 8):
                bits = code[k * columns : (k + 1) * columns]
                for c in range(columns):
                    plane[c] |= U1(U1(U1(bits[c] >> U1(p)) & U1(1)) << U1(k))


@cached(nogil=True, error_model="numpy")
def _decode_span(
    space, views, widths, rows, values, sizes, centered, kind, limit, nelem, out, start
):
    """Decode elements `start` and on to `out`."""
    size, group, how = sizes
    planes, scale_words, means, fractions = views
    groups, columns = size // group, size // 8
    v = view_as(space[: 4 * _LONGEST], np.float32)[: size if size > LANES else LANES]
    narrowed = view_as(space[4 * _LONGEST : 8 * _LONGEST], out.dtype)
    code = space[8 * _LONGEST : 8 * _LONGEST + size]
    one = view_as(space[9 * _LONGEST :], np.float32)
    words, bits = view_as(v, np.uint32), view_as(one, np.uint32)
    for i in range(v.size):
        v[i] = F4(0)
    for j in range(start // size, (start + out.size + size - 1) // size):
        width = widths[j]
        table = values[width]
        for i in range(size):
            code[i] = U1(0)
        for p in range(width):
            plane = planes[rows[j] + p]
            for k in range(8):
                here = code[k * columns : (k + 1) * columns]
                for c in range(columns):
                    here[c] |= U1(U1(U1(plane[c] >> U1(k)) & U1(1)) << U1(p))
        mean = F4(0)
        if centered:
            bits[0] = U4(U4(means[j]) << U4(16))
            mean = one[0]
        bits[0] = U4(U4(scale_words[j, 0]) << U4(16))
        step = F4(one[0] / F4(255))
        for k in range(groups):
            if how == _WIDE:
                bits[0] = U4(U4(scale_words[j, k]) << U4(16))
                scale = one[0]
            else:
                scale = F4(F4(fractions[j, k]) * step)
            for i in range(k * group, (k + 1) * group):
                y = F4(F4(table[code[i]] * scale) + mean)
                y = y if y < limit else limit
                v[i] = y if y > -limit else F4(-limit)
        if scale_words[j, 0] == _NAN_SCALE:
            for i in range(words.size):
                words[i] = _NAN
        for i in range(0, size, LANES):
            narrow(words[i : i + LANES], kind, narrowed[i : i + LANES])
        at = j * size
        lo = at if at > start else start
        hi = at + size if at + size < nelem else nelem
        hi = hi if hi < start + out.size else start + out.size
        for i in range(lo, hi):
            out[i - start] = narrowed[i - at]


_encode_with = with_scratch(_encode_span, 30 * _LONGEST + 8 * LANES + 4)
_decode_with = with_scratch(_decode_span, 9 * _LONGEST + 4)


def _views(v: Views) -> tuple[Any, ...]:
    return v.planes, v.words, v.means, v.fractions


def _sizes(spec: Dynamiq) -> tuple[int, int, int]:
    return spec.super_group, spec.group, SCALES.index(spec.scales)


def encoder(spec: Dynamiq, chunk: Chunk, given: Given) -> Encoder:
    """What encodes a chunk. Without stats it has the widths of `kept`."""
    rounding, v = rounding_of(spec, given.key), static_views(spec, chunk)
    widths = None
    if given.kept is not None and given.stats is None:
        widths = widths_of(spec, given.kept)
    if widths is None:
        energies = chunk_energies(spec, chunk, given.stats)
        widths = choose_widths(spec, energies, spec.units(chunk.nelem))
    store_widths(v, widths)
    numbers = map(U8, rounding.numbers or (0, 0, 0))
    strata = rounding.strata if rounding.random else 0
    starts = chunk.first, chunk.first // spec.group, chunk.first // spec.super_group
    encode = partial(
        _encode_with,
        kind_of(chunk.dtype),
        _sizes(spec),
        spec.center,
        _views(v),
        widths,
        first_rows(widths),
        _tables(spec.grid),
        (strata, rounding.ring_rank, *numbers),
        starts,
    )
    return Encoder(lambda start, stop: encode, spec.super_group)


def decoder(spec: Dynamiq, chunk: Chunk, start: int, stop: int, summed: bool = False) -> Decoder:
    """What decodes elements `start` to `stop` of a chunk."""
    v = static_views(spec, chunk._replace(static=as_read_only(chunk.static)))
    widths, problem = widths_of(spec, chunk), None
    if widths is None:
        problem, widths = INDEX_PROBLEM, np.zeros(0, np.int64)
    else:
        here = slice(start // spec.super_group, -(-stop // spec.super_group))
        wrong = stop == chunk.nelem and bool(v.planes[widths.sum() :].any())
        problem = PAYLOAD_PROBLEM if wrong or bad_words(spec, v, here) else None
    decode = partial(
        _decode_with,
        _views(v),
        widths,
        first_rows(widths),
        _tables(spec.grid)[0],
        _sizes(spec),
        spec.center,
        kind_of(chunk.dtype),
        F4(largest_number(chunk.dtype)),
        chunk.nelem,
    )
    return Decoder(decode, spec.super_group, problem=problem)


encode_chunk = encode_by(encoder)
decode_chunk = decode_by(decoder)
