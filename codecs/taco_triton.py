# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment,misc"
"""taco on a GPU: one kernel each way, a tile of 4096 elements per program. specs/taco.md.

Every addition is spelled out, in the page's order.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from ..formats.checksum import identity_term
from ..formats.dtypes import DType
from .base import CodecSpec, Key, Plan
from .columns_triton import to_columns, to_rows
from .device import (
    CHUNK,
    CHUNK_PADDING,
    CHUNK_PAYLOAD,
    CHUNK_SUM,
    CUDA,
    FLAGS,
    HEADER_WORDS,
    INTERPRETED,
    OVERFLOWED,
    RECORD,
    Variant,
    accumulator,
    add_header,
    add_to,
    check_header,
    clear,
    float_of,
    header_word,
    header_words,
    kernel,
    match_header,
    options,
    padding_of,
    record_term,
    report,
    round_bfloat16,
    touched,
    weigh,
)
from .hadamard_triton import LOW, rotate, spread
from .philox_triton import KEY_ON_DEVICE, NO_KEY, key_arguments, philox4
from .taco import (
    ALPHA_BITS,
    ALPHA_MAX,
    ALPHA_MIN,
    EPSILON,
    FLOOR,
    FORMAT_OF,
    HADAMARD_ALPHA,
    LOST,
    MERGED_BITS,
    SCALE_BITS,
    TAU,
    TRANSFORMS,
    Taco,
    norm,
)

_TILE = tl.constexpr(4096)
_WARPS = 4

_ASH = tl.constexpr(TRANSFORMS.index("ash"))
_HADAMARD = tl.constexpr(TRANSFORMS.index("hadamard"))
_NONE = tl.constexpr(TRANSFORMS.index("none"))
_NO_KEY = tl.constexpr(NO_KEY)
_KEY_ON_DEVICE = tl.constexpr(KEY_ON_DEVICE)
_TAU = tl.constexpr(TAU)
_EPSILON = tl.constexpr(EPSILON)
_ALPHA_MIN, _ALPHA_MAX = tl.constexpr(ALPHA_MIN), tl.constexpr(ALPHA_MAX)
_HADAMARD_ALPHA = tl.constexpr(HADAMARD_ALPHA)
_FLOOR = tl.constexpr(FLOOR)
_LOST = tl.constexpr(LOST)
_ALPHA_LOW, _ALPHA_HIGH = (tl.constexpr(b) for b in ALPHA_BITS)
_SCALE_LOW, _SCALE_HIGH = (tl.constexpr(b) for b in SCALE_BITS)
_MERGED_LOW, _MERGED_HIGH = (tl.constexpr(b) for b in MERGED_BITS)
_ONE = tl.constexpr(0x3F800000)


@triton.jit
def _tree_sum(parts, N: tl.constexpr, LOG: tl.constexpr):
    for k in tl.static_range(LOG):
        found = ()
        for i in tl.static_range(N >> (k + 1)):
            found = found + (parts[2 * i] + parts[2 * i + 1],)
        parts = found
    return parts[0]


@triton.jit
def _alpha_of(low, ROWS: tl.constexpr, LOG_HIGH: tl.constexpr):
    """Rescaling factors of ROWS blocks given as columns of 16."""
    HIGH: tl.constexpr = 1 << LOG_HIGH
    squares = ()
    for i in tl.static_range(LOW):
        squares = squares + (low[i] * low[i],)
    total = _tree_sum(squares, LOW, 4)
    for k in tl.static_range(LOG_HIGH):
        total = tl.sum(tl.reshape(total, [ROWS * (HIGH >> (k + 1)), 2]), 1)
    sigma = tl.sqrt_rn(total * (1.0 / (HIGH * LOW)) + _EPSILON)
    alpha = tl.div_rn(tl.full([ROWS], _TAU, tl.float32), sigma)
    alpha = tl.where(alpha > _ALPHA_MIN, alpha, _ALPHA_MIN)
    return tl.where(alpha < _ALPHA_MAX, alpha, _ALPHA_MAX)


@triton.jit
def _code(v, word, MAN: tl.constexpr, BIAS: tl.constexpr, RANDOM: tl.constexpr, CVT: tl.constexpr):
    """Codes of `v` in 32 bits, rounded to nearest or by the random words `word`."""
    if MAN == 0:
        if RANDOM:
            steps = ((v + 128.0) * 65536.0).to(tl.uint32)
            return (((steps + (word >> 16)) >> 16) - 128) & 0xFF
        else:
            return (v + 12582912.0).to(tl.uint32, bitcast=True) & 0xFF
    elif CVT and not RANDOM:
        if MAN == 3:
            return v.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.uint32)
        else:
            return v.to(tl.float8e5).to(tl.uint8, bitcast=True).to(tl.uint32)
    else:
        bits = v.to(tl.uint32, bitcast=True)
        sign = (bits >> 24) & 0x80
        m = bits & 0x7FFFFFFF
        SHIFT: tl.constexpr = 23 - MAN
        LEAST: tl.constexpr = (128 - BIAS) << 23
        BASE: tl.constexpr = (127 - BIAS) << MAN
        if RANDOM:
            small = (tl.abs(v) + 1.0 / (1 << (BIAS - 1))).to(tl.uint32, bitcast=True)
            p = tl.where(m < LEAST, small, m)
            q = tl.where(m < LEAST, BASE + (1 << MAN), BASE).to(tl.uint32)
            return (((p + (word >> (9 + MAN))) >> SHIFT) - q) | sign
        else:
            # Added to this power of two, small numbers end in their code.
            ANCHOR: tl.constexpr = (151 - BIAS - MAN) << 23
            anchor = (m * 0 + ANCHOR).to(tl.float32, bitcast=True)
            small = (tl.abs(v) + anchor).to(tl.uint32, bitcast=True) - ANCHOR
            normal = ((m + ((1 << (SHIFT - 1)) - 1) + ((m >> SHIFT) & 1)) >> SHIFT) - BASE
            return tl.where(m < LEAST, small, normal) | sign


@triton.jit
def _value(byte, MAN: tl.constexpr):
    """float32 values of codes in 32 bits; e4m3 by float16, whose exponents are 8 lower."""
    if MAN == 0:
        return ((byte << 24).to(tl.int32, bitcast=True) >> 24).to(tl.float32)
    elif MAN == 3:
        half = ((byte & 0x80) << 8) | ((byte & 0x7F) << 7)
        return half.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    else:
        return (byte << 8).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _bad_codes(word, MAN: tl.constexpr):
    """Nonzero where one of four codes is one that no encoder writes."""
    if MAN == 0:
        t = word ^ 0x80808080
        return ((((t & 0x7F7F7F7F) + 0x7F7F7F7F) | t) & 0x80808080) ^ 0x80808080
    elif MAN == 3:
        return ((word & 0x7F7F7F7F) + 0x01010101) & 0x80808080
    else:
        return ((word & 0x7F7F7F7F) + 0x04040404) & 0x80808080


@triton.jit
def _elements(x_ptr, ITEM: tl.constexpr):
    if ITEM == 2:
        return x_ptr.to(tl.pointer_type(tl.uint16))
    else:
        return x_ptr.to(tl.pointer_type(tl.uint32))


@triton.jit
def _within(word, low, high):
    return (word >= low) & (word <= high)


@triton.jit
def _encode_tile(
    e,
    static_ptr,
    key_ptr,
    chunk,
    at,
    n,
    payload,
    seed,
    step,
    rank,
    MODE: tl.constexpr,
    EXP: tl.constexpr,
    ITEM: tl.constexpr,
    MAN: tl.constexpr,
    BIAS: tl.constexpr,
    LARGEST: tl.constexpr,
    LOG_HIGH: tl.constexpr,
    NORM: tl.constexpr,
    TRANSFORM: tl.constexpr,
    DUAL: tl.constexpr,
    RANDOM: tl.constexpr,
    SUMS: tl.constexpr,
    CVT: tl.constexpr,
):
    """Encode element bits `e`, shape [TILE / 16, 16], from element `at` of a chunk of `n` elements.

    Returns the keyed sum of what is stored, 0 without SUMS.
    """
    HIGH: tl.constexpr = 1 << LOG_HIGH
    BLOCK: tl.constexpr = HIGH * LOW
    ROWS: tl.constexpr = _TILE // BLOCK
    WORDS: tl.constexpr = 1 + DUAL
    left = n - at
    scales_ptr = (static_ptr + payload * 128).to(tl.pointer_type(tl.uint32))
    total = tl.zeros([], tl.uint64)
    # NaN and infinity are 0 until the end.
    MANTISSA: tl.constexpr = 8 * ITEM - 1 - EXP
    TOP: tl.constexpr = ((1 << EXP) - 1) << MANTISSA
    wild = (e & TOP) == TOP
    e = tl.where(wild, 0, e)
    lost = tl.max(tl.reshape(wild.to(tl.int32), [ROWS, BLOCK]), 1) != 0
    v = float_of(e, EXP, ITEM)
    if TRANSFORM == _NONE:
        alpha = tl.full([ROWS], 1.0, tl.float32)
        t = tl.reshape(v, [ROWS, BLOCK])
    else:
        low = to_rows(tl.permute(v, [1, 0]), ROWS * HIGH, LOW, 4)
        if TRANSFORM == _ASH:
            alpha = _alpha_of(low, ROWS, LOG_HIGH)
        else:
            alpha = tl.full([ROWS], _HADAMARD_ALPHA, tl.float32)
        factor = spread(alpha, ROWS, HIGH)
        scaled = ()
        for j in tl.static_range(LOW):
            scaled = scaled + (low[j] * factor,)
        t = rotate(scaled, ROWS, LOG_HIGH)
    largest = tl.max(tl.abs(t), 1)
    z = largest * NORM
    z = tl.where(z > _FLOOR, z, _FLOOR)
    s = tl.div_rn(z, tl.full([ROWS], LARGEST, tl.float32))
    r = tl.div_rn(tl.full([ROWS], NORM, tl.float32), s)
    q = t * r[:, None]
    q = tl.where(q < LARGEST, q, LARGEST)
    q = tl.where(q > -LARGEST, q, -LARGEST)
    # Codes of lost blocks are 0: of the values, since Triton 3.6 adds up words in the layout that
    # a mask of words has, where lanes hold the same words, with the wrong exchanges.
    q = tl.where(lost[:, None], 0.0, q)
    q02, q13 = tl.split(tl.reshape(q, [_TILE // 4, 2, 2]))
    q0, q2 = tl.split(q02)
    q1, q3 = tl.split(q13)
    w = tl.arange(0, _TILE // 4)
    if RANDOM == _NO_KEY:
        r0, r1, r2, r3 = w, w, w, w
    else:
        if RANDOM == _KEY_ON_DEVICE:
            seed = tl.load(key_ptr).to(tl.uint64, bitcast=True)
            step = tl.load(key_ptr + 1).to(tl.uint64, bitcast=True)
        group = (chunk.to(tl.int64) * payload * 128 + at) // 4 + w
        r0, r1, r2, r3 = philox4(seed, step, rank, 0, group)
    DRAWN: tl.constexpr = RANDOM != _NO_KEY
    word = _code(q0, r0, MAN, BIAS, DRAWN, CVT) | (_code(q1, r1, MAN, BIAS, DRAWN, CVT) << 8)
    word |= _code(q2, r2, MAN, BIAS, DRAWN, CVT) << 16
    word |= _code(q3, r3, MAN, BIAS, DRAWN, CVT) << 24
    codes_ptr = static_ptr.to(tl.pointer_type(tl.uint32)) + at // 4
    row = tl.arange(0, ROWS)
    block = (at // BLOCK) + row
    if MODE == 0:
        tl.store(codes_ptr + w, word)
        here = row >= 0
    else:
        stop = left
        if TRANSFORM != _NONE:
            stop = (left + BLOCK - 1) // BLOCK * BLOCK
        tl.store(codes_ptr + w, word, mask=w * 4 < stop)
        here = row * BLOCK < left
        # What lies behind the end is not stored, and not weighed either.
        word = tl.where(w * 4 < stop, word, 0)
    if SUMS:
        total += tl.sum(weigh(word, at // 4 + w), 0)
    where = payload * 32 + block * WORDS
    if DUAL:
        a = tl.where(lost, _LOST, alpha.to(tl.uint32, bitcast=True))
        b = tl.where(lost, _LOST, s.to(tl.uint32, bitcast=True))
        tl.store(scales_ptr + block * 2, a, mask=here)
        tl.store(scales_ptr + block * 2 + 1, b, mask=here)
        if SUMS:
            a, b = tl.where(here, a, 0), tl.where(here, b, 0)
            total += tl.sum(weigh(a, where) + weigh(b, where + 1), 0)
    else:
        m = tl.div_rn(s, alpha)
        b = tl.where(lost, _LOST, m.to(tl.uint32, bitcast=True))
        tl.store(scales_ptr + block, b, mask=here)
        if SUMS:
            total += tl.sum(weigh(tl.where(here, b, 0), where), 0)
    return total


@triton.jit
def _finish_chunk(
    static_ptr,
    record,
    chunk,
    n,
    payload,
    static_stride,
    BLOCK: tl.constexpr,
    TRANSFORM: tl.constexpr,
    DUAL: tl.constexpr,
):
    """Clear a chunk's padding and write its record; the record's terms of the checksum."""
    blocks = (n + BLOCK - 1) // BLOCK
    used = blocks * BLOCK
    if TRANSFORM == _NONE:
        used = (n + 3) // 4 * 4
    clear(static_ptr, used, payload * 128, chunk * 0, chunk * 0 + 1)
    scales_end = payload * 128 + blocks * (4 + 4 * DUAL)
    clear(static_ptr, scales_end, static_stride * 128, chunk * 0, chunk * 0 + 1)
    tl.store(record + 2, chunk.to(tl.int64) << 32)
    return record_term(n, n * 0, chunk * 0, chunk)


@kernel
def _encode_kernel(
    x_ptr,
    out_ptr,
    key_ptr,
    src_ptr,
    sums_ptr,
    status_ptr,
    h0: tl.uint64,
    h1: tl.uint64,
    h2: tl.uint64,
    h3: tl.uint64,
    h4: tl.uint64,
    h5: tl.uint64,
    h6: tl.uint64,
    h7: tl.uint64,
    h8: tl.uint64,
    h9: tl.uint64,
    h10: tl.uint64,
    h11: tl.uint64,
    identity: tl.uint64,
    nelem: tl.int64,
    chunk_nelem: tl.int64,
    tiles: tl.int32,
    head: tl.int32,
    static_at: tl.int64,
    static_stride: tl.int64,
    payload: tl.int64,
    seed: tl.uint64,
    step: tl.uint64,
    rank: tl.uint64,
    MODE: tl.constexpr,
    EXP: tl.constexpr,
    ITEM: tl.constexpr,
    MAN: tl.constexpr,
    BIAS: tl.constexpr,
    LARGEST: tl.constexpr,
    LOG_HIGH: tl.constexpr,
    NORM: tl.constexpr,
    TRANSFORM: tl.constexpr,
    DUAL: tl.constexpr,
    RANDOM: tl.constexpr,
    SUMS: tl.constexpr,
    CVT: tl.constexpr,
    FUSED: tl.constexpr,
    X_ITEM: tl.constexpr,
):
    """Encode a tile. Header and records were cleared before.

    FUSED: what is encoded is the sum of the elements and of those that `src_ptr`, a buffer of the
    same plan, decodes to: added in float32 and rounded to the plan's dtype. The elements at `x_ptr`
    have X_ITEM bytes: ITEM, or where they are added 4, float32.

    MODE 0: whole tiles whose elements are aligned; 1: the tile at the end of a chunk, which may be
    empty, with what else a chunk has; 2: both, and elements may lie anywhere.
    """
    HIGH: tl.constexpr = 1 << LOG_HIGH
    BLOCK: tl.constexpr = HIGH * LOW
    pid = tl.program_id(0)
    if MODE == 1:
        chunk = pid
    else:
        chunk = pid // tiles
    first = chunk.to(tl.int64) * chunk_nelem
    n = tl.maximum(tl.minimum(chunk_nelem, nelem - first), 0)
    if MODE == 1:
        tile = (n // _TILE).to(tl.int32)
    else:
        tile = pid % tiles
    ends = tile == n // _TILE
    at = tile.to(tl.int64) * _TILE
    left = n - at
    static_ptr = out_ptr + (static_at + chunk.to(tl.int64) * static_stride) * 128
    total = tl.zeros([], tl.uint64)
    if (left > 0) & ((MODE != 0) | (left >= _TILE)):
        i = tl.arange(0, _TILE // LOW)[:, None] * LOW + tl.arange(0, LOW)[None, :]
        if MODE == 0:
            x = _elements(x_ptr, X_ITEM) + tl.multiple_of(first + at, 16)
            e = tl.load(x + i).to(tl.uint32)
        else:
            x = _elements(x_ptr, X_ITEM) + (first + at)
            e = tl.load(x + i, mask=i < left, other=0).to(tl.uint32)
        if FUSED:
            b, wrong, weighed = _decode_tile(
                src_ptr + (static_at + chunk.to(tl.int64) * static_stride) * 128,
                at,
                left,
                payload,
                at * 0,
                left,
                MODE,
                EXP,
                ITEM,
                MAN,
                LOG_HIGH,
                NORM,
                TRANSFORM,
                DUAL,
                True,
                SUMS,
            )
            if wrong != 0:
                report(status_ptr, CHUNK + (chunk.to(tl.int64) << 8) + CHUNK_PAYLOAD)
            if SUMS:
                tl.atomic_add(sums_ptr + chunk, weighed.to(tl.int64, bitcast=True), sem="relaxed")
            b = tl.reshape(b, [_TILE // LOW, LOW]).to(tl.uint32)
            if X_ITEM == 4:
                y = float_of(b, EXP, ITEM) + e.to(tl.float32, bitcast=True)
            else:
                y = float_of(b, EXP, ITEM) + float_of(e, EXP, ITEM)
            if ITEM == 4:
                e = y.to(tl.uint32, bitcast=True)
            elif EXP == 8:
                e = round_bfloat16(y).to(tl.uint32)
            else:
                e = y.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32)
            if MODE != 0:
                # A block that was filled up decodes to zeros and errors behind its end.
                e = tl.where(i < left, e, 0)
        total += _encode_tile(
            e,
            static_ptr,
            key_ptr,
            chunk,
            at,
            n,
            payload,
            seed,
            step,
            rank,
            MODE,
            EXP,
            ITEM,
            MAN,
            BIAS,
            LARGEST,
            LOG_HIGH,
            NORM,
            TRANSFORM,
            DUAL,
            RANDOM,
            SUMS,
            CVT,
        )
    record = out_ptr.to(tl.pointer_type(tl.int64)) + head + chunk.to(tl.int64) * 4
    if MODE != 0:
        if ends:
            total += identity + _finish_chunk(
                static_ptr, record, chunk, n, payload, static_stride, BLOCK, TRANSFORM, DUAL
            )
            if chunk == 0:
                k = tl.arange(0, 16)
                h = header_word(k, h0, h1, h2, h3, h4, h5, h6, h7, h8, h9, h10, h11)
                words = out_ptr.to(tl.pointer_type(tl.uint64))
                tl.store(words + k, h, mask=k < tl.minimum(head, 12))
    if SUMS:
        tl.atomic_add(record, total.to(tl.int64, bitcast=True), sem="relaxed")


@triton.jit
def _decode_tile(
    static_ptr,
    at,
    left,
    payload,
    start,
    stop,
    MODE: tl.constexpr,
    EXP: tl.constexpr,
    ITEM: tl.constexpr,
    MAN: tl.constexpr,
    LOG_HIGH: tl.constexpr,
    NORM: tl.constexpr,
    TRANSFORM: tl.constexpr,
    DUAL: tl.constexpr,
    STORE: tl.constexpr,
    SUMS: tl.constexpr,
):
    """Decode the tile at element `at`, of whose elements `left` are in the chunk.

    Returns element bits (STORE), shape [blocks, block], whether a scale or a code of the blocks
    that hold elements `start` to `stop` of the tile is wrong, and the keyed sum (SUMS).
    """
    HIGH: tl.constexpr = 1 << LOG_HIGH
    BLOCK: tl.constexpr = HIGH * LOW
    ROWS: tl.constexpr = _TILE // BLOCK
    WORDS: tl.constexpr = 1 + DUAL
    scales_ptr = (static_ptr + payload * 128).to(tl.pointer_type(tl.uint32))
    codes_ptr = static_ptr.to(tl.pointer_type(tl.uint32)) + at // 4
    w = tl.arange(0, _TILE // 4)
    row = tl.arange(0, ROWS)
    block = at // BLOCK + row
    if MODE == 0:
        word = tl.load(codes_ptr + w)
        here = row >= 0
        wanted = here
    else:
        used = (left + BLOCK - 1) // BLOCK * BLOCK
        word = tl.load(codes_ptr + w, mask=w * 4 < used, other=0)
        here = row * BLOCK < left
        wanted = here & (row * BLOCK < stop) & (row * BLOCK + BLOCK > start)
    where = payload * 32 + block * WORDS
    total = tl.zeros([], tl.uint64)
    if SUMS:
        total += tl.sum(weigh(word, at // 4 + w), 0)
    good = here
    if DUAL:
        a = tl.load(scales_ptr + block * 2, mask=here, other=_ONE)
        m = tl.load(scales_ptr + block * 2 + 1, mask=here, other=_ONE)
        if SUMS:
            terms = weigh(a, where) + weigh(m, where + 1)
            total += tl.sum(tl.where(here, terms, 0), 0)
        lost = m == _LOST
        good = _within(a, _ALPHA_LOW, _ALPHA_HIGH) & _within(m, _SCALE_LOW, _SCALE_HIGH)
        half_lost = lost & (a != _LOST)
        a = tl.where(good, a, _ONE).to(tl.float32, bitcast=True)
        m = tl.where(good, m, _ONE).to(tl.float32, bitcast=True)
        m = tl.div_rn(m, a).to(tl.uint32, bitcast=True)
        good = (good & _within(m, _MERGED_LOW, _MERGED_HIGH)) | (lost & (half_lost == 0))
    else:
        m = tl.load(scales_ptr + block, mask=here, other=_ONE)
        if SUMS:
            total += tl.sum(tl.where(here, weigh(m, where), 0), 0)
        lost = m == _LOST
        good = _within(m, _MERGED_LOW, _MERGED_HIGH) | lost
    m = tl.where(_within(m, _MERGED_LOW, _MERGED_HIGH), m, _ONE).to(tl.float32, bitcast=True)
    c = m * NORM
    seen = word
    if (TRANSFORM == _NONE) and (MODE != 0):
        # Behind the codes of elements is padding, which is checked with the rest of it.
        keep = tl.minimum(tl.maximum(left - w.to(tl.int64) * 4, 0), 4).to(tl.uint32) * 8
        seen = tl.where(keep < 32, word & ((1 << (keep & 31)) - 1), word)
    bad = tl.where(spread(lost, ROWS, BLOCK // 4), seen, _bad_codes(seen, MAN))
    bad = tl.where(spread(wanted, ROWS, BLOCK // 4), bad, 0)
    wrong = tl.max((bad != 0).to(tl.int32), 0) | tl.max((wanted & (good == 0)).to(tl.int32), 0)
    b = row
    if STORE:
        v0 = _value(word & 0xFF, MAN)
        v1 = _value((word >> 8) & 0xFF, MAN)
        v2 = _value((word >> 16) & 0xFF, MAN)
        v3 = _value(word >> 24, MAN)
        v = tl.join(tl.join(v0, v2), tl.join(v1, v3))
        if TRANSFORM == _NONE:
            y = tl.reshape(v, [ROWS, BLOCK])
        else:
            v = tl.reshape(v, [_TILE // LOW, LOW])
            y = rotate(to_columns(v, ROWS * HIGH, LOW, 4), ROWS, LOG_HIGH)
        y = y * c[:, None]
        if EXP == 5:
            y = tl.where(y < 65504.0, y, 65504.0)
            y = tl.where(y > -65504.0, y, -65504.0)
            b = y.to(tl.float16).to(tl.uint16, bitcast=True)
            b = tl.where(lost[:, None], 0x7E00, b)
        else:
            TOP: tl.constexpr = 0x7F7F0000 if ITEM == 2 else 0x7F7FFFFF
            top = tl.full([], TOP, tl.uint32).to(tl.float32, bitcast=True)
            y = tl.where(y < top, y, top)
            y = tl.where(y > -top, y, -top)
            if ITEM == 2:
                b = tl.where(lost[:, None], 0x7FC0, round_bfloat16(y))
            else:
                b = tl.where(lost[:, None], _LOST, y.to(tl.uint32, bitcast=True))
    return b, wrong, total


@kernel
def _decode_kernel(
    src_ptr,
    out_ptr,
    sums_ptr,
    status_ptr,
    start: tl.int64,
    stop: tl.int64,
    first_tile: tl.int64,
    first_chunk: tl.int32,
    chunks: tl.int32,
    nelem: tl.int64,
    chunk_nelem: tl.int64,
    tiles: tl.int32,
    static_at: tl.int64,
    static_stride: tl.int64,
    payload: tl.int64,
    MODE: tl.constexpr,
    EXP: tl.constexpr,
    ITEM: tl.constexpr,
    MAN: tl.constexpr,
    LOG_HIGH: tl.constexpr,
    NORM: tl.constexpr,
    TRANSFORM: tl.constexpr,
    DUAL: tl.constexpr,
    STORE: tl.constexpr,
    ADD: tl.constexpr,
    SUMS: tl.constexpr,
):
    """Decode a tile's elements from `start` to `stop` of the tensor to the start of `out_ptr`.

    MODE 0: whole tiles inside of that range, aligned where they go; 1: the others, which are the
    last tile of each of `chunks` chunks and those of `start` and `stop`; 2: all tiles, anywhere.
    """
    HIGH: tl.constexpr = 1 << LOG_HIGH
    BLOCK: tl.constexpr = HIGH * LOW
    ROWS: tl.constexpr = _TILE // BLOCK
    pid = tl.program_id(0)
    if MODE == 1:
        pick = tl.where(pid == chunks, start, stop - 1)
        chunk = tl.where(pid < chunks, first_chunk + pid, pick // chunk_nelem).to(tl.int32)
    else:
        chunk = ((first_tile + pid) // tiles).to(tl.int32)
    first = chunk.to(tl.int64) * chunk_nelem
    n = tl.maximum(tl.minimum(chunk_nelem, nelem - first), 0)
    if MODE == 1:
        tile = tl.where(pid < chunks, n // _TILE, (pick - first) // _TILE)
    else:
        tile = (first_tile + pid) % tiles
    at = tile.to(tl.int64) * _TILE
    left = n - at
    inside = (left >= _TILE) & (first + at >= start) & (first + at + _TILE <= stop)
    if MODE == 0:
        mine = inside
    elif MODE == 1:
        again = (pid > chunks) & (chunk == start // chunk_nelem)
        again = again & (tile == (start - first) // _TILE)
        mine = (left > 0) & (inside == 0) & ((pid < chunks) | ((left >= _TILE) & (again == 0)))
        mine = mine & (first + at < stop) & (first + tl.minimum(at + _TILE, n) > start)
    else:
        mine = (left > 0) & (first + at < stop) & (first + tl.minimum(at + _TILE, n) > start)
    if mine:
        static_ptr = src_ptr + (static_at + chunk.to(tl.int64) * static_stride) * 128
        b, wrong, total = _decode_tile(
            static_ptr,
            at,
            left,
            payload,
            start - first - at,
            stop - first - at,
            MODE,
            EXP,
            ITEM,
            MAN,
            LOG_HIGH,
            NORM,
            TRANSFORM,
            DUAL,
            STORE,
            SUMS,
        )
        if wrong != 0:
            report(status_ptr, CHUNK + (chunk.to(tl.int64) << 8) + CHUNK_PAYLOAD)
        if SUMS:
            tl.atomic_add(sums_ptr + chunk, total.to(tl.int64, bitcast=True), sem="relaxed")
        if STORE:
            i = tl.arange(0, ROWS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
            to = first + at - start
            if MODE == 0:
                use = None
                to = tl.multiple_of(to, 16)
            else:
                use = (i < left) & (i + to >= 0) & (i + to < stop - start)
            if ADD == 0:
                kind = tl.uint16 if ITEM == 2 else tl.uint32
                tl.store(_elements(out_ptr, ITEM) + to + i, b.to(kind), mask=use)
            else:
                value = float_of(b.to(tl.uint32), EXP, ITEM)
                add_to(accumulator(out_ptr, EXP, ADD) + to + i, value, use, EXP, ADD)


@kernel
def _check_kernel(
    src_ptr,
    sums_ptr,
    status_ptr,
    h0: tl.uint64,
    h1: tl.uint64,
    h2: tl.uint64,
    h3: tl.uint64,
    h4: tl.uint64,
    h5: tl.uint64,
    h6: tl.uint64,
    h7: tl.uint64,
    h8: tl.uint64,
    h9: tl.uint64,
    h10: tl.uint64,
    h11: tl.uint64,
    first_chunk: tl.int32,
    first_whole: tl.int32,
    end_whole: tl.int32,
    planned: tl.int32,
    identity: tl.uint64,
    nelem: tl.int64,
    chunk_nelem: tl.int64,
    chunks: tl.int32,
    head: tl.int32,
    static_at: tl.int64,
    static_stride: tl.int64,
    payload: tl.int64,
    summed: tl.int32,
    BLOCK: tl.constexpr,
    WORDS: tl.constexpr,
    ROTATED: tl.constexpr,
    SUMS: tl.constexpr,
):
    """A chunk's record; if it was decoded whole its padding and checksum; once, the header."""
    chunk = first_chunk + tl.program_id(0)
    first = chunk.to(tl.int64) * chunk_nelem
    n = tl.maximum(tl.minimum(chunk_nelem, nelem - first), 0)
    record = src_ptr.to(tl.pointer_type(tl.int64)) + head + chunk.to(tl.int64) * 4
    both = tl.load(record + 2)
    where = chunk.to(tl.int64) << 8
    if (planned != 0) & (chunk == first_chunk):
        check_header(
            src_ptr,
            status_ptr,
            head,
            chunks,
            static_at,
            h0,
            h1,
            h2,
            h3,
            h4,
            h5,
            h6,
            h7,
            h8,
            h9,
            h10,
            h11,
        )
    if (both & 0xFFFFFFFC) != 0:
        report(status_ptr, FLAGS + where)
    if (both & 2) != 0:
        report(status_ptr, OVERFLOWED + where)
    odd = (both & 1) | tl.load(record + 1) | tl.load(record + 3)
    if planned != 0:
        odd |= ((both >> 32) & 0xFFFFFFFF) ^ chunk
    if summed == 0:
        odd |= tl.load(record)
    if odd != 0:
        report(status_ptr, RECORD + where)
    if (chunk >= first_whole) & (chunk < end_whole):
        static_ptr = src_ptr + (static_at + chunk.to(tl.int64) * static_stride) * 128
        blocks = (n + BLOCK - 1) // BLOCK
        used = blocks * BLOCK if ROTATED else n
        # What the decoder has weighed: the codes of whole blocks.
        weighed, behind_codes = padding_of(static_ptr, used, payload * 128)
        scales_end = payload * 128 + blocks * WORDS * 4
        total, behind_scales = padding_of(static_ptr, scales_end, static_stride * 128)
        if (behind_codes | behind_scales) != 0:
            report(status_ptr, CHUNK + where + CHUNK_PADDING)
        if SUMS:
            decoded, _ = padding_of(static_ptr, used, blocks * BLOCK)
            total += weighed - decoded
            total += tl.load(sums_ptr + chunk).to(tl.uint64, bitcast=True) + identity
            total += record_term(n, n * 0, both & 0xFFFFFFFF, both >> 32)
            if total != tl.load(record).to(tl.uint64, bitcast=True):
                report(status_ptr, CHUNK + where + CHUNK_SUM)


def supports(dtype: DType) -> bool:
    """True for the dtypes that taco takes."""
    return dtype.name in Taco.dtypes


def measure(spec: CodecSpec, dtype: DType, x: torch.Tensor) -> torch.Tensor | None:
    """None: taco needs no statistics."""
    return None


@functools.cache
def _converts(device: torch.device) -> bool:
    """True if the device rounds to FP8 by itself."""
    if not CUDA or INTERPRETED or device.type != "cuda":
        return False
    return bool(torch.cuda.get_device_capability(device) >= (8, 9))


@functools.cache
def _shared(spec: Taco, dtype: DType) -> dict[str, int | float]:
    """Constants of both kernels."""
    return {
        "EXP": dtype.exponent,
        "ITEM": dtype.itemsize,
        "MAN": FORMAT_OF[spec.format].mantissa,
        "LOG_HIGH": spec.block.bit_length() - 5,
        "NORM": norm(spec),
        "TRANSFORM": TRANSFORMS.index(spec.transform),
        "DUAL": int(spec.scales == "dual"),
    }


@functools.cache
def _encode_variant(
    spec: Taco,
    dtype: DType,
    mode: int,
    random: int,
    sums: bool,
    cvt: bool,
    fused: bool,
    item: int,
) -> Variant:
    f = FORMAT_OF[spec.format]
    own = {"BIAS": f.bias, "LARGEST": float(f.largest), "RANDOM": random}
    meta = {"MODE": mode} | _shared(spec, dtype) | own
    meta |= {"SUMS": sums, "CVT": cvt, "FUSED": fused, "X_ITEM": item}
    return Variant(_encode_kernel, options(_WARPS), **meta)


@functools.cache
def _decode_variant(
    spec: Taco, dtype: DType, mode: int, store: bool, add: int, sums: bool
) -> Variant:
    meta = {"MODE": mode} | _shared(spec, dtype)
    return Variant(_decode_kernel, options(_WARPS), **meta, STORE=store, ADD=add, SUMS=sums)


@functools.cache
def _check_variant(spec: Taco, sums: bool) -> Variant:
    return Variant(
        _check_kernel,
        options(1),
        BLOCK=spec.block,
        WORDS=spec.scale_nbytes // 4,
        ROTATED=spec.transform != "none",
        SUMS=sums,
    )


class _Launches:
    """Arguments of a plan's kernels, put together once."""

    def __init__(self, plan: Plan) -> None:
        if not isinstance(plan.codec, Taco):
            raise TypeError(f"the plan's codec is {plan.codec.name}; allowed: taco")
        self.spec = plan.codec
        self.header = header_words(plan)
        self.first_words = self.header[:HEADER_WORDS]
        self.identity = identity_term(plan.codec.id, plan.codec.version, plan.dtype.id, 0)
        self.sizes = plan.nelem, plan.chunk_nelem
        self.head = plan.header.nbytes // 8
        # In units of 128 bytes, so that kernels know the alignment.
        self.static = plan.static_offset // 128, plan.static_stride // 128
        self.payload = plan.layout.sections[0].nbytes // 128
        self.whole = plan.chunk_nelem // _TILE.value
        self.tiles = -(-plan.chunk_nelem // _TILE.value)
        self.aligned = plan.chunks == 1 or plan.chunk_nelem * plan.dtype.itemsize % 16 == 0


def _launches(plan: Plan) -> _Launches:
    found = plan.__dict__.get("_taco_launches")
    if found is None:
        found = plan.__dict__["_taco_launches"] = _Launches(plan)
    return found


def encode(plan: Plan, x, out, scratch, stats=None, key: Key | None = None) -> None:
    """Encode the elements of `x` into `out`; see `tightwire.device` for the contract."""
    _encode(plan, x, out, key, None, (out, out, out))


def decode_add_encode(
    plan: Plan,
    source_plan: Plan,
    src,
    x,
    out,
    scratch,
    status,
    *,
    stats=None,
    key: Key | None = None,
    planned: bool = True,
) -> None:
    """Encode what `src`, a planned buffer of `plan`, decodes to plus `x` into `out`, in one pass.

    `x` has the plan's dtype or float32. Sums are in float32, rounded to the plan's. See
    `tightwire.device` for the contract.
    """
    if plan.checksum:
        scratch[: 8 * plan.chunks].zero_()
    _encode(plan, x, out, key, src, (src, scratch, status))
    _check(plan, src, scratch, status, (0, plan.chunks, 0, plan.chunks), planned, plan.checksum)


def _encode(plan: Plan, x, out, key, src, sources) -> None:
    g = _launches(plan)
    random, on_device, numbers = NO_KEY, None, (0, 0, 0)
    if g.spec.rounding == "stochastic":
        random, on_device, numbers = key_arguments(key, out.device)
    out[: plan.static_offset].zero_()
    words = out if on_device is None else on_device
    aligned = g.aligned and x.data_ptr() % 16 == 0
    modes = [(2, g.whole + 1, (g.whole + 1) * plan.chunks)]
    if aligned:
        modes = [(0, g.whole, g.whole * plan.chunks), (1, 1, plan.chunks)]
    cvt = _converts(out.device)
    for mode, tiles, programs in modes:
        if programs:
            variant = _encode_variant(
                g.spec,
                plan.dtype,
                mode,
                random,
                plan.checksum,
                cvt,
                src is not None,
                x.element_size(),
            )
            variant.launch(
                programs,
                (x, out, words, *sources),
                *g.first_words,
                g.identity,
                *g.sizes,
                tiles,
                g.head,
                *g.static,
                g.payload,
                *numbers,
            )
    add_header(plan, out, g.header)


def decode(
    plan: Plan,
    src,
    out,
    scratch,
    status,
    *,
    start: int = 0,
    stop: int | None = None,
    check: bool = True,
    dynamic_starts=None,
    store: bool = True,
    add: bool = False,
    planned: bool = True,
) -> None:
    """Decode elements `start` to `stop` into `out`; see `tightwire.device` for the contract."""
    g = _launches(plan)
    stop = plan.nelem if stop is None else stop
    sums = check and plan.checksum and (start < stop or not plan.nelem)
    if sums:
        scratch[: 8 * plan.chunks].zero_()
    if out is None:
        out = src
    first, end, first_whole, end_whole = touched(plan, start, stop)
    if start < stop:
        size, tile = plan.chunk_nelem, _TILE.value
        aligned = g.aligned and start * plan.dtype.itemsize % 16 == 0 and out.data_ptr() % 16 == 0
        last = stop - 1
        modes = []
        for mode, tiles in ((0, g.whole), (1, 1)) if aligned else ((2, g.tiles),):
            lo = start // size * tiles + min(start % size // tile, tiles)
            hi = last // size * tiles + min(last % size // tile + 1, tiles)
            modes.append((mode, tiles, lo, end - first + 2 if mode == 1 else hi - lo))
        adding = out.element_size() if add else 0
        for mode, tiles, lo, programs in modes:
            if programs > 0:
                variant = _decode_variant(g.spec, plan.dtype, mode, store, adding, sums)
                variant.launch(
                    programs,
                    (src, out, scratch, status),
                    start,
                    stop,
                    lo,
                    first,
                    end - first,
                    *g.sizes,
                    tiles,
                    *g.static,
                    g.payload,
                )
    if not check:
        end_whole = first_whole
    _check(plan, src, scratch, status, (first, end, first_whole, end_whole), planned, sums)


def _check(plan: Plan, src, scratch, status, chunks, planned: bool, sums: bool) -> None:
    """Check chunks `first` to `end`, of which some are decoded whole; see `touched`."""
    g = _launches(plan)
    first, end, first_whole, end_whole = chunks
    _check_variant(g.spec, sums).launch(
        end - first,
        (src, scratch, status),
        *g.first_words,
        first,
        first_whole,
        end_whole,
        int(planned),
        g.identity,
        *g.sizes,
        plan.chunks,
        g.head,
        *g.static,
        g.payload,
        int(plan.checksum),
    )
    if planned:
        match_header(plan, src, status, g.header)
