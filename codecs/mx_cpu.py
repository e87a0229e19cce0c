# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""mx on the CPU with Numba: the bytes of codecs/mx.py."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np

from .common.arrays_cpu import as_read_only, read_only, view_as, with_scratch
from .common.base import Bits, Bytes, Chunk, Plan
from .common.checksum_cpu import words_sum
from .common.compile_cache import cached, part
from .common.driver_cpu import Decoder, Encoder, Given, decode_by, encode_by
from .common.minifloat import INFINITY, NAN, narrow
from .common.minifloat_cpu import (
    I4,
    I8,
    LANES,
    LEAST,
    MOST,
    U4,
    decode_codes_by,
    decode_extreme_by,
    first_special,
    kind_of,
    largest_magnitudes_by,
    load_last,
    pack_by,
    round_codes_by,
    round_small_by,
    split,
    unpack_by,
    value_table,
    widen_by,
)
from .mx import (
    BLOCK,
    MAX_SCALE,
    NAN_SCALE,
    Mx,
    agreed_scales,
    static_views,
)

_INFINITY = np.uint32(INFINITY)
_SIGN, _MAGNITUDE = U4(1 << 31), U4((1 << 31) - 1)
_TILE_BLOCKS = LANES // BLOCK
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
    def encode_tiles(space, payload, scales, ceil, given, x, start):
        """Encode `x`, elements `start` and on; `given`: scales that were agreed on, or none."""
        words = view_as(space[: 4 * LANES], np.uint32)
        floats = view_as(space[4 * LANES : 8 * LANES], np.float32)
        offsets = view_as(space[8 * LANES : 12 * LANES], np.int32)
        found = view_as(space[12 * LANES : 16 * LANES], np.int32)
        padded = view_as(space[16 * LANES : 20 * LANES], x.dtype)
        codes, packed = space[20 * LANES : 21 * LANES], space[21 * LANES : 22 * LANES]
        lanes = view_as(space[22 * LANES : 23 * LANES], np.uint32)
        tops = view_as(space[23 * LANES :], np.uint32)
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
    def decode_tiles(space, payload, scales, nelem, table, quiet, out, start):
        offsets = view_as(space[: 4 * LANES], np.int32)
        parts = view_as(space[4 * LANES : 8 * LANES], np.int32)
        padded = view_as(space[8 * LANES : 12 * LANES], out.dtype)
        codes, source = space[12 * LANES : 13 * LANES], space[13 * LANES :]
        for tile in range(start // LANES, (start + out.size + LANES - 1) // LANES):
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


def encoder(spec: Mx, chunk: Chunk, given: Given) -> Encoder:
    """What encodes a chunk. Where scales are agreed on and not given, it has those of `kept`."""
    payload, scales = static_views(chunk)
    agreed = _NONE_GIVEN
    if given.stats is not None:
        agreed = agreed_scales(chunk, given.stats)
    elif given.kept is not None and spec.agrees:
        agreed = static_views(given.kept)[1]
    encode_tiles = _encoder(kind_of(chunk.dtype), *_element(spec))
    encode = partial(encode_tiles, payload, scales, _ceil(spec), as_read_only(agreed))
    return Encoder(lambda start, stop: encode, LANES)


def decoder(spec: Mx, chunk: Chunk, start: int, stop: int, summed: bool = False) -> Decoder:
    """What decodes elements `start` to `stop` of a chunk."""
    e = spec.format
    payload, scales = (as_read_only(view) for view in static_views(chunk))
    quiet = narrow(np.array([NAN], np.uint32), chunk.dtype)[0]
    decode_tiles = _decoder(kind_of(chunk.dtype), e.bits, *first_special(e))
    decode = partial(decode_tiles, payload, scales, chunk.nelem, value_table(e), quiet)
    return Decoder(decode, LANES)


def _places(plan: Plan) -> tuple[slice, slice, slice]:
    """Where payload, scale bytes and both are in buffers of a plan with one chunk."""
    start, end = plan.static_offset, plan.dynamic_offset
    at = start + plan.layout.sections[0].nbytes
    return slice(start, at), slice(at, at - -plan.nelem // BLOCK), slice(start, end)


def buffer_encoder(plan: Plan) -> Callable[..., tuple[int, int | None]]:
    """See `zipccl_cpu.buffer_encoder`."""
    spec: Any = plan.codec
    payload, scales, static = _places(plan)
    encode_tiles, ceil = _encoder(kind_of(plan.dtype), *_element(spec)), _ceil(spec)
    none_given = as_read_only(_NONE_GIVEN)

    def encode(out: Bytes, bits: Bits, stats: Any, key: Any) -> tuple[int, int | None]:
        given = none_given
        if stats is not None:
            given = as_read_only(agreed_scales(plan.chunk(0, out, out[:0]), stats))
        encode_tiles(out[payload], out[scales], ceil, given, as_read_only(bits), 0)
        return 0, words_sum(out[static]) if plan.checksum else None

    return encode


def buffer_decoder(plan: Plan, gaps: Bits) -> Callable[[Bytes, Bits, int], int | None] | None:
    """See `zipccl_cpu.buffer_decoder`."""
    spec: Any = plan.codec
    if plan.chunks != 1 or not plan.nelem:
        return None
    e, nelem = spec.format, plan.nelem
    payload, scales, static = _places(plan)
    quiet = narrow(np.array([NAN], np.uint32), plan.dtype)[0]
    decode_tiles = _decoder(kind_of(plan.dtype), e.bits, *first_special(e))
    table, zeros = value_table(e), [slice(*gap) for gap in gaps.tolist()]
    tail = spec.tail(nelem)

    def decode(data: Bytes, out: Bits, dynamic_nbytes: int) -> int | None:
        data = as_read_only(data)
        codes = data[payload]
        if dynamic_nbytes or codes[tail.at] & tail.mask:
            return None
        if any(data[gap].tobytes().strip(b"\0") for gap in zeros):
            return None
        decode_tiles(codes, data[scales], nelem, table, quiet, out, 0)
        return words_sum(data[static])

    return decode


encode_chunk = encode_by(encoder)
decode_chunk = decode_by(decoder)
