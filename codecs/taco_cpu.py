# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""taco on the CPU with Numba: the bytes of codecs/taco.py.

Sixteen blocks go side by side, value i of all of them next to each other, so that every addition of
the page is one of whole vectors and none changes its order. Without fastmath LLVM fuses nothing.
"""

from __future__ import annotations

import math
from functools import cache, partial
from typing import Any

import numpy as np

from ..formats.checksum import MASK64
from ..formats.dtypes import DType
from .common.arrays_cpu import as_read_only, read_only, view_as, with_scratch
from .common.base import Bits, Chunk, ChunkResult
from .common.checksum_cpu import sum_part, words_sum
from .common.compile_cache import cached, part
from .common.driver_cpu import (
    Decoder,
    Encoder,
    Given,
    by_tiles,
    decode_by,
    encode_by,
)
from .common.hadamard_cpu import LANES, rotate_by
from .common.philox import key_numbers
from .common.philox_cpu import fill_words
from .taco import (
    ALPHA_BITS,
    ALPHA_MAX,
    ALPHA_MIN,
    EPSILON,
    FLOOR,
    FORMAT_OF,
    HADAMARD_ALPHA,
    MERGED_BITS,
    NAN_SCALE,
    SCALE_BITS,
    TAU,
    TRANSFORMS,
    Taco,
    norm,
    static_views,
    values_of,
)

U1, U2, U4, U8 = np.uint8, np.uint16, np.uint32, np.uint64
F4 = np.float32
_ASH, _HADAMARD, _NONE = range(3)
_TAU, _EPSILON, _FLOOR = F4(TAU), F4(EPSILON), F4(FLOOR)
_ALPHA_MIN, _ALPHA_MAX, _HADAMARD_ALPHA = F4(ALPHA_MIN), F4(ALPHA_MAX), F4(HADAMARD_ALPHA)
_NAN_SCALE = U4(NAN_SCALE)
_ABS = U4(0x7FFFFFFF)
_TO_F16 = F4(2.0**112)
_INT8_ANCHOR = F4(1.5 * 2**23)


@cache
def _load_by(nbytes, half):
    @part(nogil=True, error_model="numpy")
    def load(x, u, v, lost, size, top):
        """Values of up to 16 blocks in `x` to `v`, whose bits are `u`; lanes without one are 0."""
        one = x.dtype.type
        for lane in range(LANES):
            first = lane * size
            n = x.size - first
            n = (n if n < size else size) if n > 0 else 0
            block = x[first : first + n]
            found = one(0)
            for i in range(n):
                part = one(block[i] & top)
                found = part if part > found else found
            lost[lane] = n > 0 and found == top
            if lost[lane]:
                n = 0
            if half:
                for i in range(n):
                    h = U4(block[i])
                    u[i * LANES + lane] = U4(U4(h & U4(0x8000)) << U4(16)) | U4(
                        U4(h & U4(0x7FFF)) << U4(13)
                    )
            elif nbytes == 4:
                for i in range(n):
                    u[i * LANES + lane] = U4(block[i])
            else:
                for i in range(n):
                    u[i * LANES + lane] = U4(U4(block[i]) << U4(16))
            for i in range(n, size):
                u[i * LANES + lane] = U4(0)
        if half:
            for i in range(size * LANES):
                v[i] *= _TO_F16

    return load


@part(nogil=True)
def _largest(u, m):
    """Bits of the largest magnitude of each of 16 blocks to the start of `m`, as long as `u`."""
    n = u.size // 2
    for j in range(n):
        a, b = U4(u[j] & _ABS), U4(u[n + j] & _ABS)
        m[j] = a if a > b else b
    while n > LANES:
        n //= 2
        low, high = m[:n], m[n : 2 * n]
        for j in range(n):
            a, b = low[j], high[j]
            low[j] = a if a > b else b


@part(nogil=True, error_model="numpy")
def _scale(v, by, limit):
    """Multiply the values of each of 16 blocks by its factor; none gets beyond `limit`."""
    for i in range(v.size // LANES):
        for lane in range(LANES):
            y = F4(v[i * LANES + lane] * by[lane])
            y = y if y < limit else limit
            v[i * LANES + lane] = y if y > -limit else F4(-limit)


@part(nogil=True, error_model="numpy")
def _alphas(v, q, alpha, size):
    """The rescaling factors of 16 blocks; `q` has half the size of `v`."""
    for i in range(size // 2):
        for lane in range(LANES):
            a = v[2 * i * LANES + lane]
            b = v[(2 * i + 1) * LANES + lane]
            q[i * LANES + lane] = a * a + b * b
    n = size // 4
    while n > 0:
        for i in range(n):
            for lane in range(LANES):
                q[i * LANES + lane] = q[2 * i * LANES + lane] + q[(2 * i + 1) * LANES + lane]
        n //= 2
    for lane in range(LANES):
        sigma = F4(math.sqrt(F4(q[lane] * F4(F4(1) / F4(size)) + _EPSILON)))
        found = F4(_TAU / sigma)
        found = found if found > _ALPHA_MIN else _ALPHA_MIN
        alpha[lane] = found if found < _ALPHA_MAX else _ALPHA_MAX


@part(nogil=True, error_model="numpy")
def _narrow(u, gu, code, n, shift, base, least, anchor):
    """Magnitudes `u` (float32 bits) rounded to fewer mantissa bits; small ones by `gu`."""
    half = U4((U4(1) << U4(shift - U4(1))) - U4(1))
    for i in range(n):
        m = U4(u[i] & _ABS)
        normal = U4(U4(U4(m + half) + U4(U4(m >> shift) & U4(1))) >> shift) - base
        code[i] = U4(gu[i] - anchor) if m < least else U4(normal)


@cache
def _round_nearest_by(mantissa, bias):
    anchor = F4(2.0 ** (24 - bias - mantissa)) if mantissa else _INT8_ANCHOR
    least = U4((128 - bias) << 23)
    anchor_bits = U4(127 + 24 - bias - mantissa << 23)
    base = U4(127 - bias << mantissa)
    shift = U4(23 - mantissa)

    @part(nogil=True, error_model="numpy")
    def round_nearest(v, u, g, gu, code):
        n = v.size
        if mantissa == 0:
            for i in range(n):
                g[i] = v[i] + anchor
            for i in range(n):
                code[i] = gu[i]
        else:
            for i in range(n):
                g[i] = abs(v[i]) + anchor
            _narrow(u, gu, code, n, shift, base, least, anchor_bits)
            for i in range(n):
                code[i] |= U4(U4(u[i] >> U4(24)) & U4(0x80))

    return round_nearest


@cache
def _round_stochastic_by(mantissa, bias):
    least = F4(2.0 ** (1 - bias))
    shift = U4(23 - mantissa)
    base = U4(127 - bias << mantissa)
    step = U4(1 << mantissa)

    @part(nogil=True, error_model="numpy")
    def round_stochastic(v, u, g, gu, code, words):
        n = v.size
        if mantissa == 0:
            for i in range(n):
                steps = U4(F4(F4(v[i] + F4(128)) * F4(65536)))
                whole = U4(U4(steps + U4(words[i] >> U4(16))) >> U4(16))
                code[i] = U4(whole - U4(128))
        else:
            for i in range(n):
                a = abs(v[i])
                g[i] = F4(a + least) if a < least else a
                code[i] = U4(base + step) if a < least else base
            for i in range(n):
                up = U4(words[i] >> U4(U4(32) - shift))
                rounded = U4(U4(U4(gu[i] + up) >> shift) - code[i])
                code[i] = U4(rounded | U4(U4(u[i] >> U4(24)) & U4(0x80)))

    return round_stochastic


@cache
def _encoder(nbytes, half, transform, mantissa, bias, random, size):
    load = _load_by(nbytes, half)
    rotate = rotate_by(size)
    round_nearest = _round_nearest_by(mantissa, bias)
    round_stochastic = _round_stochastic_by(mantissa, bias)
    n = size * LANES

    @cached(nogil=True, error_model="numpy")
    def encode_span(space, codes, scales, top, largest, k, seed, step, rank, first_word, x, start):
        """Encode `x`, elements `start` and on, whole blocks; the keyed sum of their codes.

        `largest` is that of the format; `first_word` the index of the chunk's first random word.
        """
        v = view_as(space[: 4 * n], np.float32)
        g = view_as(space[4 * n : 8 * n], np.float32)
        code = view_as(space[8 * n : 12 * n], np.uint32)
        u, gu = view_as(v, np.uint32), view_as(g, np.uint32)
        rest = space[12 * n :]
        if random:
            words = view_as(space[12 * n : 16 * n], np.uint32)
            row = view_as(space[16 * n : 16 * n + 4 * size], np.uint32)
            rest = space[16 * n + 4 * size :]
        alpha = view_as(rest[: 4 * LANES], np.float32)
        s = view_as(rest[4 * LANES : 8 * LANES], np.float32)
        r = view_as(rest[8 * LANES : 12 * LANES], np.float32)
        merged = view_as(rest[12 * LANES : 16 * LANES], np.float32)
        lost = rest[16 * LANES :]
        first = start // size
        last = first + (x.size + size - 1) // size
        for b in range(first, last, LANES):
            end = b + LANES
            end = end if end < last else last
            lo, hi = b * size - start, end * size - start
            hi = hi if hi < x.size else x.size
            load(x[lo:hi], u, v, lost, size, top)
            if transform == _ASH:
                _alphas(v, g, alpha, size)
            else:
                for lane in range(LANES):
                    alpha[lane] = _HADAMARD_ALPHA if transform == _HADAMARD else F4(1)
            for i in range(size):
                for lane in range(LANES):
                    v[i * LANES + lane] *= alpha[lane]
            if transform != _NONE:
                rotate(v)
            _largest(u, gu)
            for lane in range(LANES):
                z = F4(g[lane] * k)
                z = z if z > _FLOOR else _FLOOR
                s[lane] = z / largest
                r[lane] = k / s[lane]
                merged[lane] = s[lane] / alpha[lane]
            _scale(v, r, largest)
            if random:
                for lane in range(end - b):
                    fill_words(row, seed, step, rank, U8(0), U8(first_word + (b + lane) * size))
                    for i in range(size):
                        words[i * LANES + lane] = row[i]
                round_stochastic(v, u, g, gu, code, words)
            else:
                round_nearest(v, u, g, gu, code)
            for lane in range(end - b):
                at = (b + lane) * size
                block = codes[at : at + size]
                for i in range(block.size):
                    block[i] = U1(code[i * LANES + lane])
                here = scales[b + lane]
                if lost[lane]:
                    for i in range(here.size):
                        here[i] = _NAN_SCALE
                elif here.size == 2:
                    here[0] = view_as(alpha, np.uint32)[lane]
                    here[1] = view_as(s, np.uint32)[lane]
                else:
                    here[0] = view_as(merged, np.uint32)[lane]
        lo = first * size
        return sum_part(U8(0), read_only(codes[lo : last * size]), lo // 4)

    space_nbytes = 16 * n + 4 * size if random else 12 * n
    return with_scratch(encode_span, space_nbytes + 17 * LANES)


@part(nogil=True, error_model="numpy")
def _merged_scale(words, alpha, found):
    """(bits of the merged scale, 0 good, 1 lost or 2 wrong) of one block.

    `alpha` and `found` have memory for one float32.
    """
    bits = view_as(found, np.uint32)
    bits[0] = words[words.size - 1]
    if bits[0] == _NAN_SCALE:
        return 1 if words[0] == _NAN_SCALE else 2
    if words.size == 2:
        view_as(alpha, np.uint32)[0] = words[0]
        if words[0] < ALPHA_BITS[0] or words[0] > ALPHA_BITS[1]:
            return 2
        if bits[0] < SCALE_BITS[0] or bits[0] > SCALE_BITS[1]:
            return 2
        found[0] = found[0] / alpha[0]
    return 0 if MERGED_BITS[0] <= bits[0] <= MERGED_BITS[1] else 2


@cache
def _codes_fit_by(mantissa, bad):
    bad = U1(bad)

    @part(nogil=True)
    def codes_fit(codes, lost):
        """False if a code is one that no encoder writes there."""
        most = U1(0)
        if lost:
            for i in range(codes.size):
                most |= codes[i]
            return most == U1(0)
        if mantissa == 0:
            for i in range(codes.size):
                most |= U1(codes[i] == bad)
            return most == U1(0)
        for i in range(codes.size):
            code = U1(codes[i] & U1(127))
            most = code if code > most else most
        return most < bad

    return codes_fit


@cache
def _decoder(nbytes, exponent, dtype_mantissa, transform, mantissa, bad, size):
    codes_fit = _codes_fit_by(mantissa, bad)
    rotate = rotate_by(size)
    n = size * LANES
    nan = U4(((1 << (exponent + 1)) - 1) << (dtype_mantissa - 1))

    @cached(nogil=True, error_model="numpy")
    def decode_span(space, codes, scales, table, top, k, x, start):
        """Decode elements `start` and on, whole blocks; whether something is wrong, and a sum.

        `top` are the bits of the dtype's largest finite number, as a float32.
        """
        v = view_as(space[: 4 * n], np.float32)
        g = view_as(space[4 * n : 8 * n], np.float32)
        code = view_as(space[8 * n : 12 * n], np.uint32)
        u, gu = view_as(v, np.uint32), view_as(g, np.uint32)
        c = view_as(space[12 * n : 12 * n + 4 * LANES], np.float32)
        state = space[12 * n + 4 * LANES : 12 * n + 5 * LANES]
        numbers = view_as(space[12 * n + 5 * LANES :], np.float32)
        alpha, merged = numbers[:1], numbers[1:]
        wrong = False
        first = start // size
        last = first + (x.size + size - 1) // size
        for b in range(first, last, LANES):
            end = b + LANES
            end = end if end < last else last
            for i in range(n):
                v[i] = F4(0)
            for lane in range(LANES):
                c[lane] = F4(0)
                state[lane] = 0
                if b + lane >= end:
                    continue
                state[lane] = _merged_scale(scales[b + lane], alpha, merged)
                at = (b + lane) * size
                block = codes[at : at + size]
                fits = codes_fit(block, state[lane] == 1)
                wrong |= state[lane] == 2 or not fits
                if state[lane] == 0:
                    c[lane] = merged[0] * k
                    for i in range(block.size):
                        v[i * LANES + lane] = table[block[i]]
            if transform != _NONE:
                rotate(v)
            _scale(v, c, top)
            if nbytes == 4:
                for i in range(n):
                    code[i] = u[i]
            elif exponent == 8:
                for i in range(n):
                    up = U4(U4(0x7FFF) + U4(U4(u[i] >> U4(16)) & U4(1)))
                    code[i] = U4(U4(u[i] + up) >> U4(16))
            else:
                for i in range(n):
                    g[i] = abs(v[i]) + F4(0.5)
                _narrow(u, gu, code, n, U4(13), U4(112 << 10), U4(113 << 23), U4(0x3F000000))
                for i in range(n):
                    code[i] |= U4(U4(u[i] >> U4(16)) & U4(0x8000))
            for lane in range(end - b):
                lo, hi = (b + lane) * size - start, (b + lane + 1) * size - start
                block = x[lo : hi if hi < x.size else x.size]
                if state[lane] == 1:
                    for i in range(block.size):
                        block[i] = nan
                else:
                    for i in range(block.size):
                        block[i] = code[i * LANES + lane]
        lo = first * size
        return wrong, sum_part(U8(0), codes[lo : last * size], lo // 4)

    return with_scratch(decode_span, 12 * n + 5 * LANES + 8)


def _dtype_args(dtype: DType) -> tuple[np.float32, np.integer[Any]]:
    """The largest finite number, and the bits of an exponent field of ones."""
    ones = ((1 << dtype.exponent) - 1) << dtype.mantissa
    return F4(np.array(ones - 1, dtype.bits).view(dtype.numpy)), dtype.bits.type(ones)


def encoder(spec: Taco, chunk: Chunk, given: Given) -> Encoder:
    """What encodes a chunk."""
    random = spec.rounding == "stochastic"
    numbers = key_numbers(given.key) if random else (0, 0, 0)
    f = FORMAT_OF[spec.format]
    codes, scales = static_views(spec, chunk)
    used = spec.payload_nbytes(chunk.nelem)
    encode_span = _encoder(
        chunk.dtype.itemsize,
        chunk.dtype.name == "float16",
        TRANSFORMS.index(spec.transform),
        f.mantissa,
        f.bias,
        random,
        spec.block,
    )
    encode = partial(
        encode_span,
        codes[:used],
        scales,
        _dtype_args(chunk.dtype)[1],
        F4(f.largest),
        F4(norm(spec)),
        *map(U8, numbers),
        chunk.number * chunk.sections[0].nbytes,
    )

    def finish(sums: list[Any]) -> ChunkResult:
        return ChunkResult(0, sum(map(int, sums), _sum_behind(chunk, used)) & MASK64)

    return Encoder(lambda start, stop: encode, LANES * spec.block, finish)


def decoder(spec: Taco, chunk: Chunk, start: int, stop: int, summed: bool = False) -> Decoder:
    """What decodes elements `start` to `stop` of a chunk."""
    f, size = FORMAT_OF[spec.format], spec.block
    codes, scales = static_views(spec, chunk._replace(static=as_read_only(chunk.static)))
    used = spec.payload_nbytes(chunk.nelem)
    decode_span = _decoder(
        chunk.dtype.itemsize,
        chunk.dtype.exponent,
        chunk.dtype.mantissa,
        TRANSFORMS.index(spec.transform),
        f.mantissa,
        f.bad,
        size,
    )
    args = values_of(spec.format), _dtype_args(chunk.dtype)[0], F4(norm(spec))
    sums: list[int] = []

    def decode(out: Bits, at: int) -> bool:
        wrong, total = decode_span(codes[:used], scales, *args, out, at)
        sums.append(int(total))
        return bool(wrong)

    def words_sum() -> int:
        return sum(sums, _sum_behind(chunk, used)) & MASK64

    return Decoder(
        by_tiles(decode, size, chunk.nelem),
        LANES * size,
        (None, "a scale or a code of a block"),
        words_sum=words_sum if summed else None,
    )


def _sum_behind(chunk: Chunk, used: int) -> int:
    """Keyed sum of what follows the chunk's codes; a word may hold both."""
    tail = chunk.static[used // 4 * 4 :].copy()
    tail[: used % 4] = 0
    return words_sum(tail, used // 4)


encode_chunk = encode_by(encoder)
decode_chunk = decode_by(decoder)
