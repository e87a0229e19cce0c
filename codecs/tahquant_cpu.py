# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""tahquant on the CPU with Numba: the bytes of codecs/tahquant.py.

Loops have constant lengths and integer operands where that lets LLVM vectorise them; without
fastmath it fuses nothing and keeps the order of additions.
"""

from __future__ import annotations

import numpy as np

from .common.arrays_cpu import as_read_only, view_as, with_scratch
from .common.base import Bits, Chunk
from .common.compile_cache import cached, part
from .common.driver_cpu import Decoder, Encoder, Given, decode_by, encode_by
from .common.minifloat import NAN
from .common.minifloat_cpu import LANES, kind_of, narrow, round_code, widen
from .common.threads import run, spans
from .tahquant import (
    ANCHOR,
    INDEX_PROBLEM,
    LOG,
    NAN_WORD,
    PIVOT,
    TILE_PROBLEM,
    TOO_LARGE,
    Tahquant,
    bad_tiles,
    index_of,
    slots_of,
    static_views,
    tile_range,
)

U1, U4, U8, I4, I8, F4 = np.uint8, np.uint32, np.uint64, np.int32, np.int64, np.float32
_MAGNITUDE = U4(0x7FFFFFFF)
_LOG_A, _LOG_B, _LOG_C = (U4(c) for c in LOG)
_TOO_LARGE, _NAN_WORD, _NAN = U4(TOO_LARGE), U4(NAN_WORD), U4(NAN)
_ANCHOR, _FROM_HALF = F4(ANCHOR), F4(2.0**112)
_INFINITE = U4(0x7C00)
#: Every eighth bit, the diagonal of 8 bytes, and what gathers the former in the top byte.
_ONES, _DIAGONAL = U8(0x0101010101010101), U8(0x8040201008040201)
_GATHER, _CARRY = U8(0x0102040810204080), U8(0x7F7F7F7F7F7F7F7F)
#: 2^23, beyond float16, as its float32 bits.
_TALL = I4(150 << 23)


@part(nogil=True)
def _log2(u):
    """See `tahquant._log2`; of the bits of a float32."""
    f = U4(U4(u >> U4(7)) & U4(0xFFFF))
    h = U4(_LOG_B - U4(U4(_LOG_C * f) >> U4(16)))
    h = U4(_LOG_A - U4(U4(h * f) >> U4(16)))
    p = U4(U4(f * U4(U4(65536) - f)) >> U4(16))
    e = U4(U4(U4(u >> U4(23)) - U4(127)) << U4(16))
    return U4(U4(U4(e + f) + U4(U4(p * h) >> U4(16))) >> U4(4))


@cached(nogil=True)
def _entropies(space, x, kind, hidden, out, first, last):
    """Entropies of tokens `first` to `last`; see `tahquant._entropy`."""
    words = view_as(space[: 4 * LANES], np.uint32)
    q = view_as(space[4 * LANES : 8 * LANES], np.uint32)
    floats = view_as(space[8 * LANES : 12 * LANES], np.float32)
    padded = view_as(space[12 * LANES : 16 * LANES], x.dtype)
    one = view_as(space[16 * LANES :], np.float32)
    bits, one_bits = view_as(floats, np.uint32), view_as(one, np.uint32)
    for token in range(first, last):
        row = x[token * hidden : (token + 1) * hidden]
        top = U4(0)
        total, weighted = I8(0), I8(0)
        for measured in range(2):
            highest = U4(top >> U4(23))
            highest = highest if highest > U4(1) else U4(1)
            for at in range(0, hidden, LANES):
                count = hidden - at
                for i in range(LANES):
                    padded[i] = row[at + i] if i < count else 0
                widen(padded, kind, words, floats)
                if measured == 0:
                    for i in range(LANES):
                        magnitude = U4(words[i] & _MAGNITUDE)
                        top = magnitude if magnitude > top else top
                    continue
                for i in range(LANES):
                    u = U4(words[i] & _MAGNITUDE)
                    field = U4(u >> U4(23))
                    w = U4(0) if field == U4(255) else U4(u & U4(0x7FFFFF))
                    w = U4(w | U4(U4(1 << 23) if field > U4(0) else U4(0)))
                    shift = U4(highest - (field if field > U4(1) else U4(1)))
                    shift = shift if shift < U4(31) else U4(31)
                    q[i] = U4(U4(w >> U4(8)) >> shift)
                for i in range(LANES):
                    floats[i] = F4(q[i])
                for i in range(LANES):
                    total += I8(q[i])
                    weighted += I8(U4(q[i] * _log2(bits[i])))
        entropy = I8(0)
        if total > 0:
            one[0] = F4(total)
            entropy = I8(_log2(one_bits[0])) - weighted // total
            entropy = entropy if entropy > I8(0) else I8(0)
        out[token] = entropy


@part(nogil=True)
def _rotate(v):
    """The transform of 64 values in place."""
    h = 1
    while h < 64:
        for i in range(0, 64, 2 * h):
            for j in range(i, i + h):
                a = v[j]
                b = v[j + h]
                v[j] = a + b
                v[j + h] = a - b
        h *= 2
    for i in range(64):
        v[i] *= F4(0.125)


@part(nogil=True)
def _half(u):
    """Bits of the float16 nearest to a float32, given and returned as bits."""
    part = I4(u & _MAGNITUDE)
    found = round_code(part if part < _TALL else _TALL, I4(10), I4(113 << 23))
    found = found if found < I4(0x7C00) else I4(0x7C00)
    return U4(U4(found) | U4(U4(u >> U4(16)) & U4(0x8000)))


@part(nogil=True)
def _of_half(half, value, bits):
    """`value`, one float32 whose bits are `bits`, becomes that of a finite float16."""
    bits[0] = U4(U4(half & U4(0x7FFF)) << U4(13))
    value[0] *= _FROM_HALF
    bits[0] |= U4(U4(half & U4(0x8000)) << U4(16))
    return value[0]


@part(nogil=True)
def _pivot(v, magnitudes, both, pair):
    """Pivot byte of 64 values `v`, which are rotated if there is one.

    `both` is float32 scratch for two values, whose bits are `pair`.
    """
    top = U4(0)
    for i in range(64):
        top = magnitudes[i] if magnitudes[i] > top else top
    at = 0
    while magnitudes[at] != top:
        at += 1
    magnitudes[at] = U4(0)
    second = U4(0)
    for i in range(64):
        second = magnitudes[i] if magnitudes[i] > second else second
    pair[0], pair[1] = top, second
    if top == U4(0) or both[0] < F4(2) * both[1]:
        return U1(0)
    v[0], v[at] = v[at], v[0]
    _rotate(v)
    return U1(PIVOT + at)


@cached(nogil=True, error_model="numpy")
def _encode_tiles(
    space, x, kind, sizes, narrow_token, slots, planes, wide, scales, pivots, first, last
):
    """Encode tiles `first` to `last`; `sizes` is (hidden, tile, tiles of a token, forward)."""
    hidden, tile, token_tiles, forward = sizes
    words = view_as(space[: 4 * LANES], np.uint32)
    floats = view_as(space[4 * LANES : 8 * LANES], np.float32)
    padded = view_as(space[8 * LANES : 12 * LANES], x.dtype)
    # Tiles have no more elements than there are lanes.
    magnitudes = view_as(space[12 * LANES : 16 * LANES], np.uint32)
    g = view_as(space[16 * LANES : 20 * LANES], np.float32)
    codes, one = space[20 * LANES : 21 * LANES], view_as(space[21 * LANES :], np.float32)
    eights, gu = view_as(codes, np.uint64), view_as(g, np.uint32)
    values, bits = view_as(words, np.float32), view_as(one, np.uint32)
    per = LANES // tile
    for group in range(first, last, per):
        end = group + per if group + per < last else last
        for i in range(LANES):
            padded[i] = 0
        for t in range(group, end):
            within = t % token_tiles * tile
            at = t // token_tiles * hidden + within
            count = tile if tile < hidden - within else hidden - within
            count = count if count < x.size - at else x.size - at
            here = (t - group) * tile
            for i in range(count):
                padded[here + i] = x[at + i]
        widen(padded, kind, words, floats)
        for t in range(group, end):
            token = t // token_tiles
            u = words[(t - group) * tile : (t - group + 1) * tile]
            v = values[(t - group) * tile : (t - group + 1) * tile]
            top = U4(0)
            for i in range(tile):
                magnitudes[i] = U4(u[i] & _MAGNITUDE)
            for i in range(tile):
                top = magnitudes[i] if magnitudes[i] > top else top
            lost = bool(top >= _TOO_LARGE)
            if lost:
                for i in range(tile):
                    v[i] = F4(0)
                    magnitudes[i] = U4(0)
            pivot = U1(0)
            if forward:
                pivot = _pivot(v, magnitudes, one, bits)
            # Floats in the order of integers, whose extremes LLVM finds with vectors.
            low, high = I4(0x7FFFFFFF), I4(-0x80000000)
            for i in range(tile):
                order = I4(u[i])
                order = I4(order ^ I4(I4(order >> I4(31)) & I4(0x7FFFFFFF)))
                low = order if order < low else low
                high = order if order > high else high
            bits[0] = U4(I4(low ^ I4(I4(low >> I4(31)) & I4(0x7FFFFFFF))))
            one[0] += F4(0)
            least = _half(bits[0])
            if U4(least & U4(0x7FFF)) == _INFINITE:
                lost = True
                least = U4(0)
            m = _of_half(least, one, bits)
            bits[0] = U4(I4(high ^ I4(I4(high >> I4(31)) & I4(0x7FFFFFFF))))
            span = F4(one[0] - m)
            narrow_here = narrow_token[token]
            most = F4(7) if narrow_here else F4(15) if forward else F4(63)
            one[0] = F4((span if span > F4(0) else F4(0)) / most)
            step = _half(bits[0])
            if step == _INFINITE:
                lost = True
                step = U4(0)
            s = _of_half(step, one, bits)
            r = F4(F4(1) / s) if s > F4(0) else F4(0)
            for i in range(tile):
                c = F4(F4(v[i] - m) * r)
                c = c if c > F4(0) else F4(0)
                c = c if c < most else most
                g[i] = c + _ANCHOR
            for i in range(tile):
                codes[i] = U1(0) if lost else U1(gu[i])
            scales[t] = _NAN_WORD if lost else U4(least | U4(step << U4(16)))
            if forward:
                pivots[t] = U1(0) if lost else pivot
            for w in range(tile // 8):
                for p in range(planes.shape[0]):
                    planes[p, t, w] = _bits(eights[w], U8(p))
                if forward and not narrow_here:
                    wide[t - slots[token], w] = _bits(eights[w], U8(3))


@part(nogil=True)
def _bits(codes, p):
    """Bit `p` of 8 codes in one word, as a byte."""
    return U1(U8(U8(U8(codes >> p) & _ONES) * _GATHER) >> U8(56))


@part(nogil=True)
def _spread(byte):
    """Inverse of `_bits`: 8 codes that are 0 or 1."""
    bits = U8(U8(U8(byte) * _ONES) & _DIAGONAL)
    return U8(U8(U8(bits + _CARRY) >> U8(7)) & _ONES)


@cached(nogil=True)
def _decode_tiles(
    space,
    planes,
    wide,
    scales,
    pivots,
    narrow_token,
    slots,
    sizes,
    kind,
    nelem,
    out,
    start,
    first,
    last,
):
    """Decode tiles `first` to `last` to `out`, elements `start` on; bad ones to anything."""
    hidden, tile, token_tiles, forward = sizes
    values = view_as(space[: 4 * LANES], np.float32)
    narrowed = view_as(space[4 * LANES : 8 * LANES], out.dtype)
    codes, one = space[8 * LANES : 9 * LANES], view_as(space[9 * LANES :], np.float32)
    eights, words = view_as(codes, np.uint64), view_as(values, np.uint32)
    bits = view_as(one, np.uint32)
    for i in range(LANES):
        values[i] = F4(0)
    limit = F4(65504) if kind == 1 else F4(np.inf)
    per = LANES // tile
    for group in range(first, last, per):
        end = group + per if group + per < last else last
        for t in range(group, end):
            token, here = t // token_tiles, (t - group) * tile
            v = values[here : here + tile]
            if scales[t] == _NAN_WORD:
                for i in range(tile):
                    words[here + i] = _NAN
                continue
            m = _of_half(U4(scales[t] & U4(0xFFFF)), one, bits)
            s = _of_half(U4(scales[t] >> U4(16)), one, bits)
            for w in range(tile // 8):
                found = U8(0)
                for p in range(planes.shape[0]):
                    found |= U8(_spread(planes[p, t, w]) << U8(p))
                if forward and not narrow_token[token]:
                    found |= U8(_spread(wide[t - slots[token], w]) << U8(3))
                eights[w] = found
            for i in range(tile):
                v[i] = m + F4(F4(codes[i]) * s)
            if forward and pivots[t] != 0:
                _rotate(v)
                at = pivots[t] & 63
                v[0], v[at] = v[at], v[0]
            for i in range(tile):
                y = v[i]
                y = y if y < limit else limit
                v[i] = y if y > -limit else F4(-limit)
        narrow(words, kind, narrowed)
        for t in range(group, end):
            within = t % token_tiles * tile
            at = t // token_tiles * hidden + within
            lo = at if at > start else start
            hi = at + (tile if tile < hidden - within else hidden - within)
            hi = hi if hi < nelem else nelem
            hi = hi if hi < start + out.size else start + out.size
            here = (t - group) * tile - at
            for i in range(lo, hi):
                out[i - start] = narrowed[here + i]


_entropies_with = with_scratch(_entropies, 16 * LANES + 4)
_encode_with = with_scratch(_encode_tiles, 21 * LANES + 8)
_decode_with = with_scratch(_decode_tiles, 9 * LANES + 4)


def _nothing(out: Bits, start: int) -> None:
    pass


def encoder(spec: Tahquant, chunk: Chunk, given: Given) -> Encoder | None:
    """What encodes a chunk: which tokens are narrow has to be known before one is encoded."""
    bits = given.bits
    if bits is None:
        return None
    kind, v = kind_of(chunk.dtype), static_views(spec, chunk)
    narrow_token = np.zeros(-(-bits.size // spec.hidden), bool)
    count, whole = spec.narrow_tokens(bits.size), bits.size // spec.hidden
    x = as_read_only(bits)
    if count:
        entropies = np.empty(whole, np.int64)
        cuts = spans(whole, bits.nbytes, given.threads)
        run(_entropies_with, [(x, kind, spec.hidden, entropies, *cut) for cut in cuts])
        narrow_token[np.argsort(entropies, kind="stable")[:count]] = True
    if spec.forward:
        v.narrow[:] = np.packbits(narrow_token, bitorder="little")
    fixed = (x, kind, _sizes(spec), narrow_token, slots_of(spec, narrow_token))
    views = (v.planes, v.wide, v.words, v.pivots)

    def encode(part: Bits, at: int) -> None:
        # Tiles are found in all elements.
        _encode_with(*fixed, *views, *tile_range(spec, at, at + part.size))

    tile = spec.tile if spec.hidden % spec.tile == 0 else spec.hidden
    return Encoder(lambda start, stop: encode, tile)


def decoder(spec: Tahquant, chunk: Chunk, start: int, stop: int, summed: bool = False) -> Decoder:
    """What decodes elements `start` to `stop` of a chunk."""
    v = static_views(spec, chunk._replace(static=as_read_only(chunk.static)))
    narrow_token, problem = index_of(spec, chunk), None
    if narrow_token is None:
        return Decoder(_nothing, problem=INDEX_PROBLEM)
    first, last = tile_range(spec, start, stop)
    if bad_tiles(v.words[first:last], v.pivots[first:last] if spec.forward else None):
        problem = TILE_PROBLEM
    views = (v.planes, v.wide, v.words, v.pivots)
    fixed = (narrow_token, slots_of(spec, narrow_token), _sizes(spec), kind_of(chunk.dtype))

    def decode(out: Bits, at: int) -> None:
        _decode_with(*views, *fixed, chunk.nelem, out, at, *tile_range(spec, at, at + out.size))

    return Decoder(decode, spec.tile, problem=problem)


def _sizes(spec: Tahquant) -> tuple[int, int, int, bool]:
    return spec.hidden, spec.tile, spec.token_tiles, spec.forward


encode_chunk = encode_by(encoder)
decode_chunk = decode_by(decoder)
