# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""nvfp4 on the CPU with Numba: the bytes of codecs/nvfp4.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..numba_cache import cached
from .base import Bits, Chunk, ChunkDecoded, ChunkResult, Key
from .minifloat import INFINITY, tail_is_zero, values_of
from .minifloat_cpu import (
    LANES,
    add_to,
    kind_of,
    largest_magnitudes_by,
    narrow,
    pack,
    round_code,
    round_codes,
    unpack,
    widen,
)
from .nvfp4 import (
    BLOCK,
    ELEMENT,
    FLT_MAX,
    NAN_SCALE,
    NO_RECIPROCAL,
    SCALE,
    SCALE_PROBLEM,
    SIXTH,
    TAIL_PROBLEM,
    Nvfp4,
    is_tensor_scale,
    static_views,
    tensor_scale,
)
from .threads import run, spans

_BLOCKS = LANES // BLOCK
_NBYTES = LANES // 2
#: Elements that are decoded and added while they are in cache.
_PIECE = 1 << 15
_INFINITY = np.uint32(INFINITY)
_M, _LOWEST = np.int32(SCALE.mantissa), np.int32((128 - SCALE.bias) << 23)
_SIX, _ONE = np.float32(6), np.float32(1)
_LARGEST_SCALE = np.float32(448)
_ELEMENT = (ELEMENT.mantissa, ELEMENT.bias, ELEMENT.largest, ELEMENT.bits, False)
_largest_magnitudes = largest_magnitudes_by(BLOCK)


@cached(nogil=True, error_model="numpy")
def _encode_tiles(x, kind, payload, g, scales, values, first, last):
    words, tops = np.empty(LANES, np.uint32), np.empty(_BLOCKS, np.uint32)
    floats, lanes = np.empty(LANES, np.float32), np.empty(BLOCK // 2, np.uint32)
    offsets, found = np.zeros(LANES, np.int32), np.empty(LANES, np.int32)
    codes, packed = np.empty(LANES, np.uint8), np.empty(_NBYTES, np.uint8)
    padded = np.zeros(LANES, x.dtype)
    wanted, factors = np.empty(1, np.float32), np.ones(LANES, np.float32)
    factor = np.float32(g * SIXTH)
    for tile in range(first, last):
        at = tile * LANES
        count = min(LANES, x.size - at)
        if count == LANES:
            widen(x[at : at + LANES], kind, words, floats)
        else:
            padded[:count] = x[at:]
            widen(padded, kind, words, floats)
        _largest_magnitudes(words, lanes, tops)
        values_here = words.view(np.float32)
        magnitudes = tops.view(np.float32)
        for b in range((count + BLOCK - 1) // BLOCK):
            cut = slice(b * BLOCK, (b + 1) * BLOCK)
            if tops[b] >= _INFINITY:
                scales[tile * _BLOCKS + b] = NAN_SCALE
                words[cut] = 0
                continue
            # Stats may be far below the data; `round_code` takes no such magnitudes.
            wanted[0] = min(np.float32(magnitudes[b] * factor), _LARGEST_SCALE)
            code = round_code(wanted.view(np.int32)[0], _M, _LOWEST)
            scales[tile * _BLOCKS + b] = code
            step = np.float32(values[code] / g)
            r = FLT_MAX if step <= NO_RECIPROCAL else np.float32(_ONE / step)
            for i in range(BLOCK):
                factors[b * BLOCK + i] = r
        for i in range(LANES):
            floats[i] = np.float32(values_here[i] * factors[i])
        for i in range(LANES):
            v = floats[i]
            v = _SIX if v > _SIX else v
            floats[i] = -_SIX if v < -_SIX else v
        round_codes(floats.view(np.uint32), offsets, *_ELEMENT, found, codes)
        if count == LANES:
            pack(codes, 4, payload[tile * _NBYTES : (tile + 1) * _NBYTES])
        else:
            pack(codes, 4, packed)
            used = (count + 1) // 2
            payload[tile * _NBYTES : tile * _NBYTES + used] = packed[:used]


@cached(nogil=True, error_model="numpy")
def _decode_tiles(payload, g, scales, nelem, elements, values, kind, out, start, first, last):
    codes, source = np.empty(LANES, np.uint8), np.zeros(_NBYTES, np.uint8)
    floats, steps = np.empty(LANES, np.float32), np.zeros(LANES, np.float32)
    room = np.empty(LANES, out.dtype)
    for tile in range(first, last):
        at = tile * LANES
        lo, hi = max(at, start), min(at + LANES, start + out.size)
        if at + LANES <= nelem:
            unpack(payload[tile * _NBYTES : (tile + 1) * _NBYTES], 4, codes)
        else:
            used = (nelem - at + 1) // 2
            source[:] = 0
            source[:used] = payload[tile * _NBYTES : tile * _NBYTES + used]
            unpack(source, 4, codes)
        for b in range(min(_BLOCKS, scales.size - tile * _BLOCKS)):
            step = np.float32(values[scales[tile * _BLOCKS + b]] / g)
            for i in range(BLOCK):
                steps[b * BLOCK + i] = step
        for i in range(LANES):
            floats[i] = elements[codes[i]]
        for i in range(LANES):
            floats[i] = np.float32(floats[i] * steps[i])
        target = room
        if hi - lo == LANES:
            target = out[at - start : at - start + LANES]
        narrow(floats.view(np.uint32), kind, target)
        if hi - lo < LANES:
            out[lo - start : hi - start] = room[lo - at : hi - at]


def decode_add_chunk(
    spec: Nvfp4, chunk: Chunk, acc: npt.NDArray[np.float32], *, threads: int = 1
) -> ChunkDecoded:
    """Add a chunk's elements to `acc` (float32, 1-D), which is left alone if there is a problem."""
    problem = _problem(chunk)
    if problem is None:
        cuts = spans(-(-chunk.nelem // _PIECE), acc.nbytes, threads)
        run(_add_pieces, [(chunk, acc, *cut) for cut in cuts])
    return ChunkDecoded(problem)


def _add_pieces(chunk: Chunk, acc: Bits, first: int, last: int) -> None:
    fixed, room = _decode_arguments(chunk), np.empty(_PIECE, chunk.dtype.bits)
    for at in range(first * _PIECE, last * _PIECE, _PIECE):
        part = room[: max(chunk.nelem - at, 0)]
        _decode_tiles(*fixed, part, at, at // LANES, -(-(at + part.size) // LANES))
        add_to(acc[at : at + part.size], part, kind_of(chunk.dtype))


def _decode_arguments(chunk: Chunk) -> tuple[Any, ...]:
    payload, g, scales = static_views(chunk)
    tables = values_of(ELEMENT).astype(np.float32), values_of(SCALE).astype(np.float32)
    return payload, g[0], scales, chunk.nelem, *tables, kind_of(chunk.dtype)


def _problem(chunk: Chunk) -> str | None:
    payload, g, _ = static_views(chunk)
    if not is_tensor_scale(g):
        return SCALE_PROBLEM
    return None if tail_is_zero(payload, ELEMENT, chunk.nelem) else TAIL_PROBLEM


def encode_chunk(
    spec: Nvfp4,
    chunk: Chunk,
    bits: Bits,
    *,
    stats: npt.NDArray[Any] | None = None,
    key: Key | None = None,
    threads: int = 1,
) -> ChunkResult:
    """See `nvfp4.encode_chunk`."""
    if stats is None:
        stats = spec.measure(bits, chunk.dtype)
    assert stats is not None
    payload, g, scales = static_views(chunk)
    g[0] = tensor_scale(int(stats[0]))
    values = values_of(SCALE).astype(np.float32)
    fixed = (bits, kind_of(chunk.dtype), payload, g[0], scales, values)
    cuts = spans(-(-bits.size // LANES), bits.nbytes, threads)
    run(_encode_tiles, [(*fixed, *cut) for cut in cuts])
    return ChunkResult(0)


def decode_chunk(
    spec: Nvfp4, chunk: Chunk, out: Bits, start: int = 0, *, threads: int = 1
) -> ChunkDecoded:
    """See `nvfp4.decode_chunk`."""
    payload, g, _ = static_views(chunk)
    if not is_tensor_scale(g):
        return ChunkDecoded(SCALE_PROBLEM)
    if out.size:
        fixed = _decode_arguments(chunk)
        first, last = start // LANES, -(-(start + out.size) // LANES)
        cuts = spans(last - first, out.nbytes, threads)
        run(_decode_tiles, [(*fixed, out, start, first + lo, first + hi) for lo, hi in cuts])
    if start + out.size == chunk.nelem and not tail_is_zero(payload, ELEMENT, chunk.nelem):
        return ChunkDecoded(TAIL_PROBLEM)
    return ChunkDecoded()
