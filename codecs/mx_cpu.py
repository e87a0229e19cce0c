# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""mx on the CPU with Numba: the bytes of codecs/mx.py."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from .common.arrays_cpu import as_read_only, read_only, view_as, with_scratch
from .common.base import Bits, Chunk, ChunkDecoded, ChunkResult, CodecSpec, Key
from .common.compile_cache import cached, part
from .common.minifloat import INFINITY, NAN, narrow, tail_is_zero
from .common.minifloat_cpu import (
    I4,
    I8,
    LANES,
    LEAST,
    MOST,
    U4,
    add,
    add_floats,
    add_to,
    decode_codes_by,
    decode_extreme_by,
    first_special,
    kind_of,
    largest_magnitudes_by,
    pack_by,
    round_codes_by,
    round_small_by,
    split,
    unpack_by,
    value_table,
    widen_by,
)
from .common.threads import run, spans
from .mx import (
    BLOCK,
    MAX_SCALE,
    NAN_SCALE,
    TAIL_PROBLEM,
    Mx,
    agreed_scales,
    static_views,
)

_INFINITY = np.uint32(INFINITY)
_SIGN, _MAGNITUDE = U4(1 << 31), U4((1 << 31) - 1)
_TILE_BLOCKS = LANES // BLOCK
#: Elements that are decoded, added and encoded while they are in cache.
_PIECE = 1 << 15
_largest_magnitudes = largest_magnitudes_by(BLOCK)


@part(nogil=True)
def _scale(top, emax, max_fraction, ceil):
    """Scale byte of a block whose largest magnitude is `top`."""
    if top >= _INFINITY:
        return NAN_SCALE if top > _INFINITY else NAN_SCALE - emax
    part = split(top)
    scale = I8(part >> 23) - emax
    if ceil and (part & 0x7FFFFF) > max_fraction:
        scale += 1
    scale = scale if scale > 0 else I8(0)
    return scale if scale < MAX_SCALE else I8(MAX_SCALE)


@part(nogil=True, rare=True)
def _saturate(words, scale, emax):
    """Make magnitudes that have the largest code 2^(scale - 127 + emax + 1), which has it too."""
    most = U4((scale + emax + 1) << 23)
    for i in range(words.size):
        word = words[i]
        part = U4(word & _MAGNITUDE)
        words[i] = U4(U4(word & _SIGN) | (part if part < most else most))


@cache
def _encoder(kind, bits, mantissa, bias, largest, emax, max_fraction, integer):
    widen, pack = widen_by(kind), pack_by(bits)
    round_codes = round_codes_by(mantissa, bias, largest, bits, integer)
    round_small = round_small_by(mantissa, bias, largest, bits, integer)
    nbytes = LANES * bits // 8

    @cached(nogil=True)
    def encode_tiles(space, x, payload, scales, ceil, given, first, last):
        """`given`: scales that were agreed on, or none."""
        words = view_as(space[: 4 * LANES], np.uint32)
        floats = view_as(space[4 * LANES : 8 * LANES], np.float32)
        offsets = view_as(space[8 * LANES : 12 * LANES], np.int32)
        found = view_as(space[12 * LANES : 16 * LANES], np.int32)
        padded = view_as(space[16 * LANES : 20 * LANES], x.dtype)
        codes, packed = space[20 * LANES : 21 * LANES], space[21 * LANES : 22 * LANES]
        lanes = view_as(space[22 * LANES : 23 * LANES], np.uint32)
        tops = view_as(space[23 * LANES :], np.uint32)
        for tile in range(first, last):
            at = tile * LANES
            count = x.size - at
            whole = count >= LANES
            if whole:
                count = LANES
                source = x[at : at + LANES]
            else:
                for i in range(LANES):
                    padded[i] = x[at + i] if i < count else 0
                source = padded
            widen(source, words, floats)
            _largest_magnitudes(words, lanes, tops)
            for b in range((count + BLOCK - 1) // BLOCK):
                kept = I8(given[tile * _TILE_BLOCKS + b]) if given.size else I8(0)
                if given.size and (tops[b] < _INFINITY or kept == NAN_SCALE):
                    scale = kept
                    if I8(tops[b]) > (scale + emax + 1) << 23:
                        _saturate(words[b * BLOCK : (b + 1) * BLOCK], scale, emax)
                else:
                    scale = _scale(tops[b], emax, max_fraction, ceil)
                scales[tile * _TILE_BLOCKS + b] = scale
                tops[b] = scale
                offset = I4((scale - 127) << 23)
                for i in range(BLOCK):
                    offsets[b * BLOCK + i] = offset
            round_codes(words, offsets, found, codes)
            for b in range((count + BLOCK - 1) // BLOCK):
                scale = I8(tops[b])
                if scale == NAN_SCALE:
                    for i in range(b * BLOCK, (b + 1) * BLOCK):
                        codes[i] = 0
                elif scale <= bias + mantissa + 8:
                    lo, hi = b * BLOCK, (b + 1) * BLOCK
                    round_small(words[lo:hi], scale, codes[lo:hi])
            pack(codes, payload[tile * nbytes : (tile + 1) * nbytes] if whole else packed)
            if not whole:
                for i in range((count * bits + 7) // 8):
                    payload[tile * nbytes + i] = packed[i]

    return with_scratch(encode_tiles, 23 * LANES + 4 * _TILE_BLOCKS)


@cache
def _decoder(kind, bits, infinity, nan):
    unpack = unpack_by(bits)
    decode_codes = decode_codes_by(bits, infinity, nan, kind)
    decode_extreme = decode_extreme_by(bits, infinity, nan, kind)
    nbytes = LANES * bits // 8

    @cached(nogil=True)
    def decode_tiles(space, payload, scales, nelem, table, quiet, out, start, first, last):
        offsets = view_as(space[: 4 * LANES], np.int32)
        parts = view_as(space[4 * LANES : 8 * LANES], np.int32)
        padded = view_as(space[8 * LANES : 12 * LANES], out.dtype)
        codes, source = space[12 * LANES : 13 * LANES], space[13 * LANES :]
        for tile in range(first, last):
            at = tile * LANES
            lo, hi = max(at, start), min(at + LANES, start + out.size)
            packed = read_only(source)
            if at + LANES <= nelem:
                packed = payload[tile * nbytes : (tile + 1) * nbytes]
            else:
                used = ((nelem - at) * bits + 7) // 8
                for i in range(LANES):
                    source[i] = payload[tile * nbytes + i] if i < used else 0
            unpack(packed, codes)
            blocks = min(_TILE_BLOCKS, scales.size - tile * _TILE_BLOCKS)
            for b in range(blocks):
                offset = I4((I8(scales[tile * _TILE_BLOCKS + b]) - 127) << 23)
                for i in range(BLOCK):
                    offsets[b * BLOCK + i] = offset
            target = padded
            if hi - lo == LANES:
                target = out[at - start : at - start + LANES]
            decode_codes(codes, offsets, table, parts, target)
            for b in range(blocks):
                scale = I8(scales[tile * _TILE_BLOCKS + b])
                if scale == NAN_SCALE:
                    for i in range(b * BLOCK, (b + 1) * BLOCK):
                        target[i] = quiet
                elif kind != 1:  # noqa: SIM102 - only so is the branch gone before it is compiled
                    if not LEAST <= scale <= MOST:
                        cut = slice(b * BLOCK, (b + 1) * BLOCK)
                        decode_extreme(codes[cut], scale, table, target[cut])
            if hi - lo < LANES:
                for i in range(lo, hi):
                    out[i - start] = padded[i - at]

    return with_scratch(decode_tiles, 14 * LANES)


def _element(spec: Mx) -> tuple[Any, ...]:
    e = spec.format
    return e.bits, e.mantissa, e.bias, e.largest, e.emax, e.max_fraction, e.is_integer


def _ceil(spec: Mx) -> bool:
    return spec.scale_rule != "floor"


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
    fixed = (as_read_only(bits), payload, scales, _ceil(spec), as_read_only(given))
    cuts = spans(-(-bits.size // LANES), bits.nbytes, threads)
    run(_encoder(kind_of(chunk.dtype), *_element(spec)), [(*fixed, *cut) for cut in cuts])
    return ChunkResult(0)


def decode_chunk(
    spec: Mx, chunk: Chunk, out: Bits, start: int = 0, *, threads: int = 1
) -> ChunkDecoded:
    """See `mx.decode_chunk`."""
    first, last = start // LANES, -(-(start + out.size) // LANES)
    cuts = spans(last - first, out.nbytes, threads)
    decode_tiles, *fixed = _decode_arguments(spec, chunk)
    if out.size:
        run(decode_tiles, [(*fixed, out, start, first + lo, first + hi) for lo, hi in cuts])
    if start + out.size == chunk.nelem and not _tail_is_zero(spec, chunk):
        return ChunkDecoded(TAIL_PROBLEM)
    return ChunkDecoded()


def _decode_arguments(spec: Mx, chunk: Chunk) -> tuple[Any, ...]:
    e = spec.format
    payload, scales = (as_read_only(view) for view in static_views(chunk))
    quiet = narrow(np.array([NAN], np.uint32), chunk.dtype)[0]
    decode_tiles = _decoder(kind_of(chunk.dtype), e.bits, *first_special(e))
    return decode_tiles, payload, scales, chunk.nelem, value_table(e), quiet


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
    decode_tiles, *fixed = _decode_arguments(spec, chunk)
    room = np.empty(_PIECE, chunk.dtype.bits)
    for at in range(first * _PIECE, last * _PIECE, _PIECE):
        part = room[: max(chunk.nelem - at, 0)]
        decode_tiles(*fixed, part, at, at // LANES, -(-(at + part.size) // LANES))
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
    decode_tiles, *fixed = _decode_arguments(spec, source)
    room = np.empty(_PIECE, chunk.dtype.bits)
    kind = kind_of(chunk.dtype)
    encode_tiles = _encoder(kind, *_element(spec))
    payload, scales = static_views(chunk)
    kept = as_read_only(static_views(source)[1] if spec.agrees else _NONE_GIVEN)
    for at in range(first * _PIECE, last * _PIECE, _PIECE):
        part = room[: max(chunk.nelem - at, 0)]
        tiles = -(-part.size // LANES)
        decode_tiles(*fixed, part, at, at // LANES, at // LANES + tiles)
        if bits.dtype == part.dtype:
            add(part, bits[at : at + part.size], kind)
        else:
            add_floats(part, bits[at : at + part.size].view(np.float32), kind)
        packed = payload[at * spec.format.bits // 8 :]
        here = scales[at // BLOCK :]
        given = kept[at // BLOCK :]
        encode_tiles(as_read_only(part), packed, here, _ceil(spec), given, 0, tiles)
