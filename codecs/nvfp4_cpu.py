# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""nvfp4 on the CPU with Numba: the bytes of codecs/nvfp4.py."""

from __future__ import annotations

from functools import cache, partial

import numpy as np

from .common.arrays_cpu import as_read_only, read_only, view_as, with_scratch
from .common.base import Chunk
from .common.compile_cache import cached
from .common.driver_cpu import Decoder, Encoder, Given, decode_by, encode_by
from .common.minifloat import FLT_MAX, INFINITY, NO_RECIPROCAL, SIXTH, values_of
from .common.minifloat_cpu import (
    LANES,
    kind_of,
    largest_magnitudes_by,
    load_last,
    narrow_by,
    pack_by,
    round_code,
    round_codes_by,
    unpack_by,
    widen_by,
)
from .nvfp4 import (
    BLOCK,
    ELEMENT,
    NAN_SCALE,
    SCALE,
    SCALE_PROBLEM,
    Nvfp4,
    is_tensor_scale,
    static_views,
    tensor_scale,
)

_BLOCKS = LANES // BLOCK
_NBYTES = LANES // 2
_INFINITY = np.uint32(INFINITY)
_M, _LOWEST = np.int32(SCALE.mantissa), np.int32((128 - SCALE.bias) << 23)
_SIX, _ONE = np.float32(6), np.float32(1)
_LARGEST_SCALE = np.float32(448)
_largest_magnitudes = largest_magnitudes_by(BLOCK)
_round_codes = round_codes_by(ELEMENT.mantissa, ELEMENT.bias, ELEMENT.largest, ELEMENT.bits, False)
_pack, _unpack = pack_by(ELEMENT.bits), unpack_by(ELEMENT.bits)


@cache
def _encoder(kind):
    widen = widen_by(kind)

    @cached(nogil=True, error_model="numpy")
    def encode_tiles(space, payload, g, scales, values, x, start):
        """Encode `x`, elements `start` and on."""
        words = view_as(space[: 4 * LANES], np.uint32)
        floats = view_as(space[4 * LANES : 8 * LANES], np.float32)
        offsets = view_as(space[8 * LANES : 12 * LANES], np.int32)
        factors = view_as(space[12 * LANES : 16 * LANES], np.float32)
        # What is needed before the codes are rounded, and then.
        lanes = view_as(space[16 * LANES : 17 * LANES], np.uint32)
        padded = view_as(space[16 * LANES : 20 * LANES], x.dtype)
        found = view_as(space[16 * LANES : 20 * LANES], np.int32)
        codes = space[20 * LANES : 21 * LANES]
        packed = space[21 * LANES : 21 * LANES + _NBYTES]
        rest = space[21 * LANES + _NBYTES :]
        tops = view_as(rest[: 4 * _BLOCKS], np.uint32)
        wanted = view_as(rest[4 * _BLOCKS :], np.float32)
        wanted_bits = view_as(wanted, np.int32)
        values_here, magnitudes = view_as(words, np.float32), view_as(tops, np.float32)
        factor = np.float32(g * SIXTH)
        for i in range(LANES):
            offsets[i] = 0
            factors[i] = _ONE
        for at in range(0, x.size, LANES):
            tile = (start + at) // LANES
            count = x.size - at
            whole = count >= LANES
            if whole:
                count = LANES
                source = x[at : at + LANES]
            else:
                load_last(x, at, padded)
                source = read_only(padded)
            widen(source, words, floats)
            _largest_magnitudes(words, lanes, tops)
            for b in range((count + BLOCK - 1) // BLOCK):
                if tops[b] >= _INFINITY:
                    scales[tile * _BLOCKS + b] = NAN_SCALE
                    for i in range(b * BLOCK, (b + 1) * BLOCK):
                        words[i] = 0
                    continue
                # Stats may be far below the data; `round_code` takes no such magnitudes.
                scale = np.float32(magnitudes[b] * factor)
                wanted[0] = scale if scale < _LARGEST_SCALE else _LARGEST_SCALE
                code = round_code(wanted_bits[0], _M, _LOWEST)
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
            _round_codes(view_as(floats, np.uint32), offsets, found, codes)
            _pack(codes, payload[tile * _NBYTES : (tile + 1) * _NBYTES] if whole else packed)
            if not whole:
                for i in range((count + 1) // 2):
                    payload[tile * _NBYTES + i] = packed[i]

    return with_scratch(encode_tiles, 22 * LANES)


@cache
def _decoder(kind):
    narrow = narrow_by(kind)

    @cached(nogil=True, error_model="numpy")
    def decode_tiles(space, payload, g, scales, nelem, elements, values, out, start):
        floats = view_as(space[: 4 * LANES], np.float32)
        steps = view_as(space[4 * LANES : 8 * LANES], np.float32)
        padded = view_as(space[8 * LANES : 12 * LANES], out.dtype)
        codes, source = space[12 * LANES : 13 * LANES], space[13 * LANES : 13 * LANES + _NBYTES]
        for i in range(LANES):
            steps[i] = np.float32(0)
        for tile in range(start // LANES, (start + out.size + LANES - 1) // LANES):
            at = tile * LANES
            lo, hi = at, at + LANES
            lo = lo if lo > start else start
            hi = hi if hi < start + out.size else start + out.size
            packed = read_only(source)
            if at + LANES <= nelem:
                packed = payload[tile * _NBYTES : (tile + 1) * _NBYTES]
            else:
                used = (nelem - at + 1) // 2
                for i in range(_NBYTES):
                    source[i] = payload[tile * _NBYTES + i] if i < used else 0
            _unpack(packed, codes)
            blocks = scales.size - tile * _BLOCKS
            for b in range(blocks if blocks < _BLOCKS else _BLOCKS):
                step = np.float32(values[scales[tile * _BLOCKS + b]] / g)
                for i in range(BLOCK):
                    steps[b * BLOCK + i] = step
            for i in range(LANES):
                floats[i] = elements[codes[i]]
            for i in range(LANES):
                floats[i] = np.float32(floats[i] * steps[i])
            target = padded
            if hi - lo == LANES:
                target = out[at - start : at - start + LANES]
            narrow(view_as(floats, np.uint32), target)
            if hi - lo < LANES:
                for i in range(lo, hi):
                    out[i - start] = padded[i - at]

    return with_scratch(decode_tiles, 14 * LANES)


def encoder(spec: Nvfp4, chunk: Chunk, given: Given) -> Encoder | None:
    """What encodes a chunk, whose elements are measured where there are no stats."""
    stats = given.stats
    if stats is None:
        if given.bits is None:
            return None
        stats = spec.measure(given.bits, chunk.dtype)
        assert stats is not None
    payload, g, scales = static_views(chunk)
    g[0] = tensor_scale(int(stats[0]))
    values = values_of(SCALE).astype(np.float32)
    encode = partial(_encoder(kind_of(chunk.dtype)), payload, g[0], scales, values)
    return Encoder(lambda start, stop: encode, LANES)


def decoder(spec: Nvfp4, chunk: Chunk, start: int, stop: int, summed: bool = False) -> Decoder:
    """What decodes elements `start` to `stop` of a chunk."""
    payload, g, scales = (as_read_only(view) for view in static_views(chunk))
    tables = values_of(ELEMENT).astype(np.float32), values_of(SCALE).astype(np.float32)
    decode = partial(_decoder(kind_of(chunk.dtype)), payload, g[0], scales, chunk.nelem, *tables)
    return Decoder(decode, LANES, problem=None if is_tensor_scale(g) else SCALE_PROBLEM)


encode_chunk = encode_by(encoder)
decode_chunk = decode_by(decoder)
