# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""thc on the CPU with Numba: the bytes of codecs/thc.py.

Work goes by tiles of sixteen blocks, which are laid side by side to be rotated (hadamard_cpu).
Without fastmath LLVM fuses nothing.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from .common.arrays_cpu import as_read_only, read_only, view_as, with_scratch
from .common.base import Chunk, ChunkResult
from .common.compile_cache import cached
from .common.driver_cpu import Decoder, Encoder, Given, decode_by, encode_by
from .common.hadamard_cpu import LANES as SIDE
from .common.hadamard_cpu import rotate_by
from .common.minifloat import INFINITY, NAN, largest_number
from .common.minifloat_cpu import LANES, kind_of, narrow, widen
from .common.philox import key_numbers
from .common.philox_cpu import fill_words
from .thc import (
    BELOW,
    BLOCK,
    GAPS,
    LEVEL_STREAM,
    MIDDLE,
    NAN_NORM,
    NORM_BITS,
    PAYLOAD_PROBLEM,
    RANKS_PROBLEM,
    ROTATE_FACTOR,
    SIGN_STREAM,
    STEPS,
    TOP,
    Thc,
    check_finite,
    norms_are_right,
    prepare,
    seed_of,
    static_views,
    word_index,
)

U1, U4, U8, F4 = np.uint8, np.uint32, np.uint64, np.float32
_TILE = SIDE * BLOCK
_ABS, _INFINITY, _NAN, _NAN_NORM = U4(0x7FFFFFFF), U4(INFINITY), U4(NAN), U4(NAN_NORM)
_LOW, _HIGH = U4(NORM_BITS[0]), U4(NORM_BITS[1])
_FACTOR, _STEPS, _MIDDLE, _TOP = F4(ROTATE_FACTOR), F4(STEPS), F4(MIDDLE), F4(TOP)
_BELOW, _GAPS = BELOW, GAPS.astype(np.uint32)


_rotate = rotate_by(BLOCK)


@cached(nogil=True, error_model="numpy")
def _encode_tiles(space, kind, cells, norms, seed, step, rank, first_word, x, start):
    """Encode `x`, elements `start` and on; whether all elements to be coded are finite.

    The random words of the chunk's levels start at index `first_word`.
    """
    t = view_as(space[: 4 * _TILE], np.float32)
    side = view_as(space[4 * _TILE : 8 * _TILE], np.float32)
    padded = view_as(space[8 * _TILE : 12 * _TILE], x.dtype)
    rest = space[12 * _TILE :]
    words = view_as(rest[: 4 * BLOCK], np.uint32)
    floats = view_as(rest[4 * BLOCK : 5 * BLOCK], np.float32)
    signs = view_as(rest[5 * BLOCK : 5 * BLOCK + BLOCK // 8], np.uint32)
    norm = view_as(rest[6 * BLOCK :], np.float32)
    u, norm_word = view_as(t, np.uint32), view_as(norm, np.uint32)
    for i in range(_TILE):
        side[i] = F4(0)
    finite = True
    for at in range(0, x.size, _TILE):
        tile = (start + at) // _TILE
        n = x.size - at
        if n < _TILE:
            for i in range(n):
                padded[i] = x[at + i]
            for i in range(n, _TILE):
                padded[i] = 0
            source = read_only(padded)
        else:
            n = _TILE
            source = x[at : at + _TILE]
        blocks = (n + BLOCK - 1) // BLOCK
        for i in range(0, blocks * BLOCK, LANES):
            widen(source[i : i + LANES], kind, u[i : i + LANES], floats)
        for lane in range(blocks):
            b = tile * SIDE + lane
            word = norms[b] if norms.size > 1 else norms[0]
            coded = word != U4(0) and word != _NAN_NORM
            part = u[lane * BLOCK : (lane + 1) * BLOCK]
            top = U4(0)
            for i in range(BLOCK):
                magnitude = U4(part[i] & _ABS)
                top = magnitude if magnitude > top else top
            if not coded:
                for i in range(BLOCK):
                    part[i] = U4(0)
            elif top >= _INFINITY:
                finite = False
            each = U8(BLOCK // 32)
            fill_words(signs, seed, step, U8(0), U8(SIGN_STREAM), U8(b) * each)
            values = t[lane * BLOCK : (lane + 1) * BLOCK]
            for i in range(BLOCK):
                sign = U4(U4(signs[i // 32] >> U4(i % 32)) << U4(31))
                part[i] = U4(part[i] ^ sign)
            for i in range(BLOCK):
                side[i * SIDE + lane] = values[i] * _FACTOR
        _rotate(side)
        for lane in range(blocks):
            b = tile * SIDE + lane
            norm_word[0] = norms[b] if norms.size > 1 else norms[0]
            target = cells[b]
            if norm_word[0] == U4(0) or norm_word[0] == _NAN_NORM:
                for i in range(BLOCK):
                    target[i] = 0
                continue
            r = F4(_STEPS / norm[0])
            fill_words(words, seed, step, rank, U8(LEVEL_STREAM), U8(first_word + b * BLOCK))
            for i in range(BLOCK):
                v = F4(F4(side[i * SIDE + lane] * r) + _MIDDLE)
                v = v if v < _TOP else _TOP
                v = v if v > F4(0) else F4(0)
                steps = U4(F4(v * F4(65536)))
                whole = U4(steps >> U4(16))
                below, gap = _BELOW[whole], _GAPS[whole]
                above = U4(steps - U4(below << U4(16))) > U4(U4(words[i] >> U4(16)) * gap)
                target[i] = U4(below + gap) if above else below
    return finite


@cached(nogil=True, error_model="numpy")
def _decode_tiles(space, cells, norms, ranks, seed, step, top, kind, out, start):
    """Decode elements `start` and on to `out`.

    Gives whether a cell of a block that holds some of them is wrong.
    """
    t = view_as(space[: 4 * _TILE], np.float32)
    side = view_as(space[4 * _TILE : 8 * _TILE], np.float32)
    narrowed = view_as(space[8 * _TILE : 12 * _TILE], out.dtype)
    rest = space[12 * _TILE :]
    signs, scale = view_as(rest[: BLOCK // 8], np.uint32), view_as(rest[BLOCK:], np.float32)
    u, word = view_as(t, np.uint32), view_as(scale, np.uint32)
    for i in range(_TILE):
        side[i] = F4(0)
    zero, most, wrong = MIDDLE * ranks, TOP * ranks, False
    for tile in range(start // _TILE, (start + out.size + _TILE - 1) // _TILE):
        at = tile * _TILE
        lo, hi = start - at, start + out.size - at
        lo = lo if lo > 0 else 0
        hi = hi if hi < _TILE else _TILE
        lanes = range(lo // BLOCK, (hi + BLOCK - 1) // BLOCK)
        for lane in lanes:
            b = tile * SIDE + lane
            word[0] = norms[b] if norms.size > 1 else norms[0]
            good = _LOW <= word[0] <= _HIGH
            largest = 0
            source = cells[b]
            for i in range(BLOCK):
                cell = int(source[i])
                largest = cell if cell > largest else largest
                side[i * SIDE + lane] = F4(cell - zero)
            wrong |= largest > (most if good else 0)
        _rotate(side)
        for lane in lanes:
            b = tile * SIDE + lane
            word[0] = norms[b] if norms.size > 1 else norms[0]
            part = t[lane * BLOCK : (lane + 1) * BLOCK]
            bits = u[lane * BLOCK : (lane + 1) * BLOCK]
            if not _LOW <= word[0] <= _HIGH:
                filler = _NAN if word[0] == _NAN_NORM else U4(0)
                for i in range(BLOCK):
                    bits[i] = filler
                continue
            s = F4(scale[0] / _STEPS)
            each = U8(BLOCK // 32)
            fill_words(signs, seed, step, U8(0), U8(SIGN_STREAM), U8(b) * each)
            for i in range(BLOCK):
                part[i] = side[i * SIDE + lane]
            for i in range(BLOCK):
                bits[i] = U4(bits[i] ^ U4(U4(signs[i // 32] >> U4(i % 32)) << U4(31)))
            for i in range(BLOCK):
                y = F4(part[i] * s)
                y = y if y < top else top
                part[i] = y if y > -top else F4(-top)
        for i in range(lo // BLOCK * BLOCK, hi, LANES):
            narrow(u[i : i + LANES], kind, narrowed[i : i + LANES])
        target = out[at + lo - start : at + hi - start]
        for i in range(target.size):
            target[i] = narrowed[lo + i]
    return wrong


#: Of both: three arrays of a tile, and what is smaller.
_SCRATCH_NBYTES = 12 * _TILE + 6 * BLOCK + 4
_encode_with = with_scratch(_encode_tiles, _SCRATCH_NBYTES)
_decode_with = with_scratch(_decode_tiles, _SCRATCH_NBYTES)


def encoder(spec: Thc, chunk: Chunk, given: Given) -> Encoder:
    """What encodes a chunk."""
    numbers, views = key_numbers(given.key), prepare(spec, chunk, given.stats, given.key)
    fixed = (kind_of(chunk.dtype), views.cells, views.norms, *map(U8, numbers))
    encode = partial(_encode_with, *fixed, word_index(spec, chunk))
    return Encoder(lambda start, stop: encode, _TILE, _finish)


def _finish(finite: list[bool]) -> ChunkResult:
    check_finite(all(finite))
    return ChunkResult(0)


def decoder(spec: Thc, chunk: Chunk, start: int, stop: int, summed: bool = False) -> Decoder:
    """What decodes elements `start` to `stop` of a chunk."""
    views = static_views(spec, chunk)
    ranks, problem = int(views.ranks[0]), None
    if not 1 <= ranks <= spec.max_ranks:
        problem = RANKS_PROBLEM
    elif not norms_are_right(views):
        problem = PAYLOAD_PROBLEM
    cells, norms = as_read_only(views.cells), as_read_only(views.norms)
    numbers, top = seed_of(views), F4(largest_number(chunk.dtype))
    fixed = (cells, norms, ranks, U8(numbers.seed), U8(numbers.step), top, kind_of(chunk.dtype))
    return Decoder(partial(_decode_with, *fixed), _TILE, (None, PAYLOAD_PROBLEM), problem)


encode_chunk = encode_by(encoder)
decode_chunk = decode_by(decoder)
