# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""sdp4bit on the CPU with Numba: the bytes of codecs/sdp4bit.py.

Work goes tile by tile, of as many elements as the largest group has. To be rotated, sixteen runs
are laid side by side (hadamard_cpu). Without fastmath LLVM fuses nothing.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from .common.arrays_cpu import as_read_only, read_only, view_as, with_scratch
from .common.base import Chunk
from .common.compile_cache import cached, part
from .common.driver_cpu import Decoder, Encoder, Given, decode_by, encode_by
from .common.hadamard_cpu import LANES as RUNS
from .common.hadamard_cpu import rotate_by
from .common.minifloat import INFINITY, NAN, largest_number
from .common.minifloat_cpu import LANES, kind_of, narrow, widen
from .common.philox import key_numbers
from .common.philox_cpu import fill_words
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
    word_index,
)

U1, U4, U8, I1, F4 = np.uint8, np.uint32, np.uint64, np.int8, np.float32
_TILE = 4096
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
    first_word,
    x,
    start,
):
    """Encode `x`, elements `start` and on of a chunk; `first_word` is that of its first element."""
    largest = F4((1 << (bits - 1)) - 1)
    t = view_as(space[: 4 * _TILE], np.float32)
    words = view_as(space[4 * _TILE : 8 * _TILE], np.uint32)
    padded = view_as(space[8 * _TILE : 12 * _TILE], x.dtype)
    codes, lost = space[12 * _TILE : 13 * _TILE], space[13 * _TILE : 14 * _TILE]
    rest = space[14 * _TILE :]
    floats, two = view_as(rest[: 4 * LANES], np.float32), view_as(rest[4 * LANES :], np.float32)
    side = two[2:]
    u = view_as(t, np.uint32)
    for behind in range(0, x.size, _TILE):
        at = start + behind
        n = x.size - behind
        if n < _TILE:
            for i in range(_TILE):
                padded[i] = x[behind + i] if i < n else 0
            source = read_only(padded)
        else:
            n = _TILE
            source = x[behind : behind + _TILE]
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
            fill_words(words[:n], seed, step, rank, U8(0), U8(first_word + at))
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
def _decode_tiles(space, payload, scales, nelem, bits, group, back, top, kind, out, start):
    """Decode elements `start` and on to `out`.

    Gives whether a scale or a code of a group that holds some of them is wrong.
    """
    largest = I1((1 << (bits - 1)) - 1)
    t = view_as(space[: 4 * _TILE], np.float32)
    narrowed = view_as(space[4 * _TILE : 8 * _TILE], out.dtype)
    scale, rest = view_as(space[8 * _TILE : 8 * _TILE + 4], np.float32), space[8 * _TILE + 4 :]
    side = view_as(rest, np.float32)
    u, word = view_as(t, np.uint32), view_as(scale, np.uint32)
    for i in range(_TILE):
        t[i] = F4(0)
    wrong = False
    for tile in range(start // _TILE, (start + out.size + _TILE - 1) // _TILE):
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
            narrow(u[i : i + LANES], kind, narrowed[i : i + LANES])
        source = narrowed[begin:stop]
        target = out[at + begin - start : at + stop - start]
        for i in range(source.size):
            target[i] = source[i]
    return wrong


_SIDE_NBYTES = 4 * (RUN * RUNS + RUN)
_encode_with = with_scratch(_encode_tiles, 14 * _TILE + 4 * LANES + 8 + _SIDE_NBYTES)
_decode_with = with_scratch(_decode_tiles, 8 * _TILE + 4 + _SIDE_NBYTES)


def encoder(spec: Sdp4bit, chunk: Chunk, given: Given) -> Encoder:
    """What encodes a chunk."""
    random = spec.rounding == "stochastic"
    numbers = key_numbers(given.key) if random else (0, 0, 0)
    fixed = (kind_of(chunk.dtype), *static_views(spec, chunk), spec.bits, spec.group, spec.rotates)
    encode = partial(_encode_with, *fixed, random, *map(U8, numbers), word_index(spec, chunk))
    return Encoder(lambda start, stop: encode, _TILE)


def decoder(spec: Sdp4bit, chunk: Chunk, start: int, stop: int, summed: bool = False) -> Decoder:
    """What decodes elements `start` to `stop` of a chunk."""
    payload, scales = (as_read_only(view) for view in static_views(spec, chunk))
    top = F4(largest_number(chunk.dtype))
    fixed = (spec.bits, spec.group, spec.rotates_back, top, kind_of(chunk.dtype))
    decode = partial(_decode_with, payload, scales, chunk.nelem, *fixed)
    return Decoder(decode, _TILE, (None, PROBLEM))


encode_chunk = encode_by(encoder)
decode_chunk = decode_by(decoder)
