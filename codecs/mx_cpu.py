# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""mx on the CPU with Numba: the bytes of codecs/mx.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from ..numba_cache import cached
from .base import Bits, Chunk, ChunkDecoded, ChunkResult, CodecSpec, Key
from .minifloat import INFINITY, NAN, narrow, tail_is_zero
from .minifloat_cpu import (
    LANES,
    LEAST,
    MOST,
    U4,
    add,
    add_floats,
    add_to,
    decode_codes,
    decode_extreme,
    first_special,
    kind_of,
    largest_magnitudes_by,
    pack,
    round_codes,
    round_small,
    split,
    unpack,
    value_table,
    widen,
)
from .mx import (
    BLOCK,
    MAX_SCALE,
    NAN_SCALE,
    TAIL_PROBLEM,
    Mx,
    agreed_scales,
    static_views,
)
from .threads import run, spans

_INFINITY = np.uint32(INFINITY)
_SIGN, _MAGNITUDE = U4(1 << 31), U4((1 << 31) - 1)


_TILE_BLOCKS = LANES // BLOCK
#: Elements that are decoded, added and encoded while they are in cache.
_PIECE = 1 << 15
_largest_magnitudes = largest_magnitudes_by(BLOCK)


@njit(nogil=True)
def _scale(top, emax, max_fraction, ceil):
    """Scale byte of a block whose largest magnitude is `top`."""
    if top >= _INFINITY:
        return NAN_SCALE if top > _INFINITY else NAN_SCALE - emax
    part = split(top)
    scale = (part >> 23) - emax
    if ceil and (part & 0x7FFFFF) > max_fraction:
        scale += 1
    return min(max(scale, 0), MAX_SCALE)


@njit(nogil=True)
def _saturate(words, scale, emax):
    """Make magnitudes that have the largest code 2^(scale - 127 + emax + 1), which has it too."""
    most = U4((scale + emax + 1) << 23)
    for i in range(words.size):
        word = words[i]
        words[i] = U4(U4(word & _SIGN) | min(U4(word & _MAGNITUDE), most))


@cached(nogil=True)
def _encode_tiles(x, kind, payload, scales, element, ceil, given, first, last):
    """`given`: scales that were agreed on, or none."""
    bits, mantissa, bias, largest, emax, max_fraction, integer = element
    words, tops = np.empty(LANES, np.uint32), np.empty(_TILE_BLOCKS, np.uint32)
    floats, lanes = np.empty(LANES, np.float32), np.empty(BLOCK // 2, np.uint32)
    offsets, found = np.empty(LANES, np.int32), np.empty(LANES, np.int32)
    codes, packed = np.empty(LANES, np.uint8), np.empty(LANES, np.uint8)
    padded = np.zeros(LANES, x.dtype)
    nbytes = LANES * bits // 8
    for tile in range(first, last):
        at = tile * LANES
        count = min(LANES, x.size - at)
        if count == LANES:
            widen(x[at : at + LANES], kind, words, floats)
        else:
            padded[:count] = x[at:]
            widen(padded, kind, words, floats)
        _largest_magnitudes(words, lanes, tops)
        for b in range((count + BLOCK - 1) // BLOCK):
            kept = np.int64(given[tile * _TILE_BLOCKS + b]) if given.size else np.int64(0)
            if given.size and (tops[b] < _INFINITY or kept == NAN_SCALE):
                scale = kept
                if np.int64(tops[b]) > (scale + emax + 1) << 23:
                    _saturate(words[b * BLOCK : (b + 1) * BLOCK], scale, emax)
            else:
                scale = _scale(tops[b], emax, max_fraction, ceil)
            scales[tile * _TILE_BLOCKS + b] = scale
            tops[b] = scale
            offset = np.int32((scale - 127) << 23)
            for i in range(BLOCK):
                offsets[b * BLOCK + i] = offset
        round_codes(words, offsets, mantissa, bias, largest, bits, integer, found, codes)
        for b in range((count + BLOCK - 1) // BLOCK):
            scale = np.int64(tops[b])
            cut = slice(b * BLOCK, (b + 1) * BLOCK)
            if scale == NAN_SCALE:
                codes[cut] = 0
            elif scale <= bias + mantissa + 8:
                round_small(words[cut], scale, mantissa, bias, largest, bits, integer, codes[cut])
        if count == LANES:
            pack(codes, bits, payload[tile * nbytes : (tile + 1) * nbytes])
        else:
            pack(codes, bits, packed)
            used = (count * bits + 7) // 8
            payload[tile * nbytes : tile * nbytes + used] = packed[:used]


@cached(nogil=True)
def _decode_tiles(payload, scales, nelem, element, table, kind, quiet, out, start, first, last):
    bits, infinity, nan = element
    codes, source = np.empty(LANES, np.uint8), np.zeros(LANES, np.uint8)
    offsets, parts = np.empty(LANES, np.int32), np.empty(LANES, np.int32)
    room = np.empty(LANES, out.dtype)
    nbytes = LANES * bits // 8
    for tile in range(first, last):
        at = tile * LANES
        lo, hi = max(at, start), min(at + LANES, start + out.size)
        if at + LANES <= nelem:
            unpack(payload[tile * nbytes : (tile + 1) * nbytes], bits, codes)
        else:
            used = ((nelem - at) * bits + 7) // 8
            source[:] = 0
            source[:used] = payload[tile * nbytes : tile * nbytes + used]
            unpack(source, bits, codes)
        blocks = min(_TILE_BLOCKS, scales.size - tile * _TILE_BLOCKS)
        here = scales[tile * _TILE_BLOCKS : tile * _TILE_BLOCKS + blocks]
        for b in range(blocks):
            offset = np.int32((np.int64(here[b]) - 127) << 23)
            for i in range(BLOCK):
                offsets[b * BLOCK + i] = offset
        target = room
        if hi - lo == LANES:
            target = out[at - start : at - start + LANES]
        decode_codes(codes, offsets, table, bits, infinity, nan, kind, parts, target)
        for b in range(blocks):
            scale = np.int64(here[b])
            cut = slice(b * BLOCK, (b + 1) * BLOCK)
            if scale == NAN_SCALE:
                target[cut] = quiet
            elif kind != 1 and not LEAST <= scale <= MOST:
                decode_extreme(codes[cut], scale, table, bits, infinity, nan, kind, target[cut])
        if hi - lo < LANES:
            out[lo - start : hi - start] = room[lo - at : hi - at]


def _element(spec: Mx) -> tuple[Any, ...]:
    e = spec.format
    return e.bits, e.mantissa, e.bias, e.largest, e.emax, e.max_fraction, e.is_integer


def _ceil(spec: Mx) -> bool:
    return spec.scale_rule != "floor"


#: See mx.py.
ADDS_FLOAT32 = True
_NONE_GIVEN = np.empty(0, np.uint8)


def encode_chunk(
    spec: Mx,
    chunk: Chunk,
    bits: Bits,
    *,
    stats: npt.NDArray[Any] | None = None,
    key: Key | None = None,
    threads: int = 1,
) -> ChunkResult:
    """See `mx.encode_chunk`."""
    payload, scales = static_views(chunk)
    given = _NONE_GIVEN if stats is None else agreed_scales(chunk, stats)
    kind = kind_of(chunk.dtype)
    fixed = (bits, kind, payload, scales, _element(spec), _ceil(spec), given)
    cuts = spans(-(-bits.size // LANES), bits.nbytes, threads)
    run(_encode_tiles, [(*fixed, *cut) for cut in cuts])
    return ChunkResult(0)


def decode_chunk(
    spec: Mx, chunk: Chunk, out: Bits, start: int = 0, *, threads: int = 1
) -> ChunkDecoded:
    """See `mx.decode_chunk`."""
    first, last = start // LANES, -(-(start + out.size) // LANES)
    cuts = spans(last - first, out.nbytes, threads)
    fixed = _decode_arguments(spec, chunk)
    if out.size:
        run(_decode_tiles, [(*fixed, out, start, first + lo, first + hi) for lo, hi in cuts])
    if start + out.size == chunk.nelem and not _tail_is_zero(spec, chunk):
        return ChunkDecoded(TAIL_PROBLEM)
    return ChunkDecoded()


def _decode_arguments(spec: Mx, chunk: Chunk) -> tuple[Any, ...]:
    e = spec.format
    payload, scales = static_views(chunk)
    quiet = narrow(np.array([NAN], np.uint32), chunk.dtype)[0]
    element = (e.bits, *first_special(e))
    return payload, scales, chunk.nelem, element, value_table(e), kind_of(chunk.dtype), quiet


def _tail_is_zero(spec: Mx, chunk: Chunk) -> bool:
    return tail_is_zero(static_views(chunk)[0], spec.format, chunk.nelem)


def decode_add_chunk(
    spec: Mx, chunk: Chunk, acc: npt.NDArray[np.float32], *, threads: int = 1
) -> ChunkDecoded:
    """Add a chunk's elements to `acc` (float32, 1-D), which is left alone if there is a problem."""
    if not _tail_is_zero(spec, chunk):
        return ChunkDecoded(TAIL_PROBLEM)
    cuts = spans(-(-chunk.nelem // _PIECE), acc.nbytes, threads)
    run(_add_pieces, [(spec, chunk, acc, *cut) for cut in cuts])
    return ChunkDecoded()


def _add_pieces(spec: Mx, chunk: Chunk, acc: Bits, first: int, last: int) -> None:
    fixed, room = _decode_arguments(spec, chunk), np.empty(_PIECE, chunk.dtype.bits)
    for at in range(first * _PIECE, last * _PIECE, _PIECE):
        part = room[: max(chunk.nelem - at, 0)]
        _decode_tiles(*fixed, part, at, at // LANES, -(-(at + part.size) // LANES))
        add_to(acc[at : at + part.size], part, kind_of(chunk.dtype))


def decode_add_encode_chunk(
    spec: Mx,
    source_spec: CodecSpec,
    source: Chunk,
    bits: Bits,
    chunk: Chunk,
    *,
    key: Key | None = None,
    threads: int = 1,
) -> ChunkDecoded:
    """See `mx.decode_add_encode_chunk`."""
    if not _tail_is_zero(spec, source):
        return ChunkDecoded(TAIL_PROBLEM)
    cuts = spans(-(-chunk.nelem // _PIECE), bits.nbytes, threads)
    run(_add_encode_pieces, [(spec, source, bits, chunk, *cut) for cut in cuts])
    return ChunkDecoded()


def _add_encode_pieces(
    spec: Mx, source: Chunk, bits: Bits, chunk: Chunk, first: int, last: int
) -> None:
    fixed, room = _decode_arguments(spec, source), np.empty(_PIECE, chunk.dtype.bits)
    kind = kind_of(chunk.dtype)
    payload, scales = static_views(chunk)
    kept = static_views(source)[1] if spec.agrees else _NONE_GIVEN
    for at in range(first * _PIECE, last * _PIECE, _PIECE):
        part = room[: max(chunk.nelem - at, 0)]
        tiles = -(-part.size // LANES)
        _decode_tiles(*fixed, part, at, at // LANES, at // LANES + tiles)
        if bits.dtype == part.dtype:
            add(part, bits[at : at + part.size], kind)
        else:
            add_floats(part, bits[at : at + part.size].view(np.float32), kind)
        packed = payload[at * spec.format.bits // 8 :]
        here = scales[at // BLOCK :]
        given = kept[at // BLOCK :]
        _encode_tiles(part, kind, packed, here, _element(spec), _ceil(spec), given, 0, tiles)
