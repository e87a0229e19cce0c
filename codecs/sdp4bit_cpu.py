# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""sdp4bit on the CPU with Numba: the bytes of codecs/sdp4bit.py.

Work goes tile by tile, of as many elements as the largest group has. To be rotated, sixteen runs
are laid side by side (hadamard_cpu). Without fastmath LLVM fuses nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .common.arrays_cpu import as_read_only, read_only, view_as, with_scratch
from .common.base import Bits, Chunk, ChunkDecoded, ChunkResult, CodecSpec, Key
from .common.compile_cache import cached, part
from .common.hadamard_cpu import LANES as RUNS
from .common.hadamard_cpu import rotate_by
from .common.minifloat import INFINITY, NAN, largest_number
from .common.minifloat_cpu import LANES, add, add_to, kind_of, narrow, widen
from .common.philox import key_numbers
from .common.philox_cpu import fill_words
from .common.threads import run, spans
from .sdp4bit import (
    FLOOR,
    NAN_SCALE,
    PROBLEM,
    RUN,
    RUN_FACTOR,
    SCALE_BITS,
    SHORT_BACK,
    SHORT_FACTOR,
    Sdp4bit,
    static_views,
    tail_is_zero,
    word_index,
)

U1, U4, U8, I1, F4 = np.uint8, np.uint32, np.uint64, np.int8, np.float32
_TILE = 4096
#: Elements that are decoded, added and encoded while they are in cache.
_PIECE = 8 * _TILE
_ABS, _INFINITY, _NAN, _NAN_SCALE = U4(0x7FFFFFFF), U4(INFINITY), U4(NAN), U4(NAN_SCALE)
_SCALE_LOW, _SCALE_HIGH = U4(SCALE_BITS[0]), U4(SCALE_BITS[1])
_FLOOR, _RUN_FACTOR = F4(FLOOR), F4(RUN_FACTOR)
_SHORT_FACTOR, _SHORT_BACK = F4(SHORT_FACTOR), F4(SHORT_BACK)
#: Added to a float32 of up to 2^22, it leaves the nearest integer in the lowest bits.
_ANCHOR = F4(1.5 * 2**23)


_rotate = rotate_by(RUN)


@part(nogil=True)
def _rotate_tile(t, n, before, factor, side):
    """Rotate the n values `t` of a tile, multiplied by `before`; those of a short run by `factor`.

    `side` is float32 scratch for `RUNS` runs, and for one that is short; the length of `t` is a
    multiple of that of `RUNS`.
    """
    whole = n // RUN * RUN
    runs, short = side[: RUN * RUNS], side[RUN * RUNS :]
    for i in range(n - whole):
        short[i] = t[whole + i] * factor
    for at in range(0, whole, RUN * RUNS):
        part = t[at : at + RUN * RUNS]
        for lane in range(RUNS):
            for i in range(RUN):
                runs[i * RUNS + lane] = part[lane * RUN + i] * before
        _rotate(runs)
        for lane in range(RUNS):
            for i in range(RUN):
                part[lane * RUN + i] = runs[i * RUNS + lane]
    for i in range(n - whole):
        t[whole + i] = short[i]


@part(nogil=True)
def _encode_group(t, words, codes, two, lost, largest, random):
    """The scale word of a group of values `t`, and their codes as bytes; `two` is scratch."""
    n = t.size
    if lost:
        for i in range(n):
            codes[i] = U1(0)
        return _NAN_SCALE
    u, bits = view_as(t, np.uint32), view_as(two, np.uint32)
    top = U4(0)
    for i in range(n):
        magnitude = U4(u[i] & _ABS)
        top = magnitude if magnitude > top else top
    bits[0] = top
    if two[0] < _FLOOR:
        two[0] = largest
    r = F4(largest / two[0])
    two[1] = F4(two[0] / largest)
    if random:
        offset = F4(largest + F4(1))
        back = U4(offset)
        for i in range(n):
            v = F4(t[i] * r)
            v = v if v < largest else largest
            v = v if v > -largest else F4(-largest)
            steps = U4(F4(F4(v + offset) * F4(65536)))
            codes[i] = U1(U4(U4(steps + U4(words[i] >> U4(16))) >> U4(16)) - back)
    else:
        for i in range(n):
            v = F4(t[i] * r)
            v = v if v < largest else largest
            v = v if v > -largest else F4(-largest)
            t[i] = F4(v + _ANCHOR)
        for i in range(n):
            codes[i] = U1(u[i])
    return bits[1]


@cached(nogil=True, error_model="numpy")
def _encode_tiles(
    space,
    x,
    kind,
    payload,
    scales,
    bits,
    group,
    rotates,
    random,
    seed,
    step,
    rank,
    start,
    first,
    last,
):
    """Encode tiles `first` to `last` of a chunk; its random words start at index `start`."""
    largest = F4((1 << (bits - 1)) - 1)
    t = view_as(space[: 4 * _TILE], np.float32)
    words = view_as(space[4 * _TILE : 8 * _TILE], np.uint32)
    padded = view_as(space[8 * _TILE : 12 * _TILE], x.dtype)
    codes, lost = space[12 * _TILE : 13 * _TILE], space[13 * _TILE : 14 * _TILE]
    rest = space[14 * _TILE :]
    floats, two = view_as(rest[: 4 * LANES], np.float32), view_as(rest[4 * LANES :], np.float32)
    side = two[2:]
    u = view_as(t, np.uint32)
    for tile in range(first, last):
        at = tile * _TILE
        n = x.size - at
        if n < _TILE:
            for i in range(_TILE):
                padded[i] = x[at + i] if i < n else 0
            source = read_only(padded)
        else:
            n = _TILE
            source = x[at : at + _TILE]
        for i in range(0, n, LANES):
            widen(source[i : i + LANES], kind, u[i : i + LANES], floats)
        count = (n + group - 1) // group
        for g in range(count):
            lo, hi = g * group, (g + 1) * group
            part = u[lo : hi if hi < n else n]
            top = U4(0)
            for i in range(part.size):
                magnitude = U4(part[i] & _ABS)
                top = magnitude if magnitude > top else top
            lost[g] = U1(top >= _INFINITY)
            if lost[g] != U1(0):
                for i in range(part.size):
                    part[i] = U4(0)
        if rotates:
            _rotate_tile(t, n, _RUN_FACTOR, _SHORT_FACTOR, side)
        if random:
            fill_words(words[:n], seed, step, rank, U8(0), U8(start + at))
        for g in range(count):
            lo, hi = g * group, (g + 1) * group
            hi = hi if hi < n else n
            scales[at // group + g] = _encode_group(
                t[lo:hi], words[lo:hi], codes[lo:hi], two, lost[g] != U1(0), largest, random
            )
        if bits == 8:
            target = payload[at : at + n]
            for i in range(n):
                target[i] = codes[i]
        else:
            if n % 2:
                codes[n] = U1(0)
            target = payload[at // 2 : at // 2 + (n + 1) // 2]
            for i in range(target.size):
                target[i] = U1(U1(codes[2 * i] & U1(15)) | U1(codes[2 * i + 1] << U1(4)))


@part(nogil=True)
def _values(payload, bits, at, n, t):
    """Codes number `at`, which is even, to `at + n` as float32; the least of them."""
    least = I1(0)
    if bits == 8:
        source = payload[at : at + n]
        for i in range(n):
            code = I1(source[i])
            least = code if code < least else least
            t[i] = F4(code)
        return least
    source = payload[at // 2 : at // 2 + n // 2]
    for i in range(source.size):
        low, high = I1(I1(U1(source[i] << U1(4))) >> I1(4)), I1(I1(source[i]) >> I1(4))
        less = low if low < high else high
        least = less if less < least else least
        t[2 * i] = F4(low)
        t[2 * i + 1] = F4(high)
    if n % 2:
        low = I1(I1(U1(payload[(at + n) // 2] << U1(4))) >> I1(4))
        least = low if low < least else least
        t[n - 1] = F4(low)
    return least


@cached(nogil=True, error_model="numpy")
def _decode_tiles(
    space, payload, scales, nelem, bits, group, back, top, kind, out, start, first, last
):
    """Elements of tiles `first` to `last` as far as they are in [start, start + out.size).

    Gives whether a scale or a code of a group that holds some of them is wrong.
    """
    largest = I1((1 << (bits - 1)) - 1)
    t = view_as(space[: 4 * _TILE], np.float32)
    room = view_as(space[4 * _TILE : 8 * _TILE], out.dtype)
    scale, rest = view_as(space[8 * _TILE : 8 * _TILE + 4], np.float32), space[8 * _TILE + 4 :]
    side = view_as(rest, np.float32)
    u, word = view_as(t, np.uint32), view_as(scale, np.uint32)
    for i in range(_TILE):
        t[i] = F4(0)
    wrong = False
    for tile in range(first, last):
        at = tile * _TILE
        begin = start - at if start > at else 0
        lo = begin // group * group
        hi = nelem - at if nelem - at < _TILE else _TILE
        stop = start + out.size - at
        stop = stop if stop < hi else hi
        groups = (stop + group - 1) // group
        hi = groups * group if groups * group < hi else hi
        for g in range(lo // group, (hi + group - 1) // group):
            part = t[g * group : (g + 1) * group if (g + 1) * group < hi else hi]
            least = _values(payload, bits, at + g * group, part.size, part)
            found = scales[at // group + g]
            good = _SCALE_LOW <= found <= _SCALE_HIGH
            wrong |= least < -largest or not (good or found == _NAN_SCALE)
            if found == _NAN_SCALE:
                nonzero = U4(0)
                bits_of = view_as(part, np.uint32)
                for i in range(part.size):
                    nonzero |= bits_of[i]
                wrong |= nonzero != U4(0)
        if back:
            base = lo // (RUN * RUNS) * (RUN * RUNS)
            _rotate_tile(t[base:], hi - base, F4(1), _SHORT_BACK, side)
        for g in range(lo // group, (hi + group - 1) // group):
            part = t[g * group : (g + 1) * group if (g + 1) * group < hi else hi]
            word[0] = scales[at // group + g]
            if word[0] == _NAN_SCALE:
                nan = view_as(part, np.uint32)
                for i in range(part.size):
                    nan[i] = _NAN
                continue
            s = scale[0] if _SCALE_LOW <= word[0] <= _SCALE_HIGH else F4(0)
            for i in range(part.size):
                y = F4(part[i] * s)
                y = y if y < top else top
                part[i] = y if y > -top else F4(-top)
        for i in range(lo // LANES * LANES, hi, LANES):
            narrow(u[i : i + LANES], kind, room[i : i + LANES])
        source = room[begin:stop]
        target = out[at + begin - start : at + stop - start]
        for i in range(source.size):
            target[i] = source[i]
    return wrong


_SIDE_NBYTES = 4 * (RUN * RUNS + RUN)
_encode_with = with_scratch(_encode_tiles, 14 * _TILE + 4 * LANES + 8 + _SIDE_NBYTES)
_decode_with = with_scratch(_decode_tiles, 8 * _TILE + 4 + _SIDE_NBYTES)


def encode_chunk(
    spec: Sdp4bit,
    chunk: Chunk,
    bits: Bits,
    *,
    stats: npt.NDArray[Any] | None = None,
    key: Key | None = None,
    threads: int = 1,
) -> ChunkResult:
    """See `sdp4bit.encode_chunk`."""
    fixed, numbers = _encode_arguments(spec, chunk, key)
    cuts = spans(-(-bits.size // _TILE), bits.nbytes, threads)
    x = as_read_only(bits)
    run(_encode_with, [(x, *fixed, *numbers, *cut) for cut in cuts])
    return ChunkResult(0)


def _encode_arguments(
    spec: Sdp4bit, chunk: Chunk, key: Key | None
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Arguments of `_encode_with` between elements and tiles: what is fixed, and random words."""
    random = spec.rounding == "stochastic"
    numbers = key_numbers(key) if random else (0, 0, 0)
    fixed = (kind_of(chunk.dtype), *static_views(spec, chunk), spec.bits, spec.group, spec.rotates)
    return fixed, (random, *map(U8, numbers), word_index(spec, chunk))


def decode_chunk(
    spec: Sdp4bit, chunk: Chunk, out: Bits, start: int = 0, *, threads: int = 1
) -> ChunkDecoded:
    """See `sdp4bit.decode_chunk`."""
    stop = start + out.size
    first, last = start // _TILE, -(-stop // _TILE)
    fixed = _decode_arguments(spec, chunk)
    wrong = stop == chunk.nelem and not tail_is_zero(spec, chunk)
    if out.size:
        cuts = spans(last - first, out.nbytes, threads)
        calls = [(*fixed, out, start, first + lo, first + hi) for lo, hi in cuts]
        wrong |= any(run(_decode_with, calls))
    return ChunkDecoded(PROBLEM if wrong else None)


def _decode_arguments(spec: Sdp4bit, chunk: Chunk) -> tuple[Any, ...]:
    payload, scales = static_views(spec, chunk)
    top = F4(largest_number(chunk.dtype))
    fixed = (spec.bits, spec.group, spec.rotates_back, top, kind_of(chunk.dtype))
    return as_read_only(payload), as_read_only(scales), chunk.nelem, *fixed


def decode_add_chunk(
    spec: Sdp4bit, chunk: Chunk, acc: npt.NDArray[np.float32], *, threads: int = 1
) -> ChunkDecoded:
    """Add the elements of a chunk to `acc`, of as many. Wrong tiles and what follows are left."""
    if not tail_is_zero(spec, chunk):
        return ChunkDecoded(PROBLEM)
    cuts = spans(-(-chunk.nelem // _PIECE), acc.nbytes, threads)
    wrong = any(run(_add_pieces, [(spec, chunk, acc, *cut) for cut in cuts]))
    return ChunkDecoded(PROBLEM if wrong else None)


def _add_pieces(spec: Sdp4bit, chunk: Chunk, acc: Bits, first: int, last: int) -> bool:
    fixed, room = _decode_arguments(spec, chunk), np.empty(_PIECE, chunk.dtype.bits)
    for at in range(first * _PIECE, last * _PIECE, _PIECE):
        part = room[: max(chunk.nelem - at, 0)]
        if _decode_with(*fixed, part, at, at // _TILE, -(-(at + part.size) // _TILE)):
            return True
        add_to(acc[at : at + part.size], part, kind_of(chunk.dtype))
    return False


def decode_add_encode_chunk(
    spec: Sdp4bit,
    source_spec: CodecSpec,
    source: Chunk,
    bits: Bits,
    chunk: Chunk,
    *,
    key: Key | None = None,
    threads: int = 1,
) -> ChunkDecoded:
    """Encode the sum of the elements of `source` and `bits`, of as many, into `chunk`."""
    assert isinstance(source_spec, Sdp4bit)
    if not tail_is_zero(source_spec, source):
        return ChunkDecoded(PROBLEM)
    arguments = _encode_arguments(spec, chunk, key)
    cuts = spans(-(-chunk.nelem // _PIECE), bits.nbytes, threads)
    calls = [(source_spec, source, bits, chunk, arguments, *cut) for cut in cuts]
    return ChunkDecoded(PROBLEM if any(run(_add_encode_pieces, calls)) else None)


def _add_encode_pieces(
    source_spec: Sdp4bit,
    source: Chunk,
    bits: Bits,
    chunk: Chunk,
    arguments: tuple[tuple[Any, ...], tuple[Any, ...]],
    first: int,
    last: int,
) -> bool:
    fixed, room = _decode_arguments(source_spec, source), np.empty(_PIECE, chunk.dtype.bits)
    (kind, payload, scales, width, *rest), (*random, start) = arguments
    group = rest[0]
    for at in range(first * _PIECE, last * _PIECE, _PIECE):
        part = room[: max(chunk.nelem - at, 0)]
        tiles = -(-part.size // _TILE)
        if _decode_with(*fixed, part, at, at // _TILE, at // _TILE + tiles):
            return True
        add(part, bits[at : at + part.size], kind)
        x = as_read_only(part)
        here = kind, payload[at * width // 8 :], scales[at // group :], width, *rest
        _encode_with(x, *here, *random, start + at, 0, tiles)
    return False
