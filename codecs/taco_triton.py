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

from ..formats.dtypes import DType
from .common.base import Key, Plan
from .common.columns_triton import from_columns, to_columns
from .common.frame_triton import (
    CHUNK,
    CHUNK_PAYLOAD,
    accumulator,
    add_to,
    float_of,
    frame_of,
    touched,
    weigh,
)
from .common.hadamard_triton import butterflies, spread, transpose
from .common.launch_triton import CUDA, INTERPRETED, Variant, kernel, options
from .common.philox_triton import KEY_ON_DEVICE, NO_KEY, key_arguments, philox4
from .common.runs_triton import limited, narrow_pair, report_any, rounded_pair
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
)

#: Elements of a tile, one program's share, and its warps.
_TILE = 4096
#: Warps of a tile; and where values do not change hands or are added to others, which is what takes
#: the time.
_WARPS, _WIDE_WARPS = 4, 8

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
_NAN_SCALE = tl.constexpr(NAN_SCALE)
_ALPHA_LOW, _ALPHA_HIGH = (tl.constexpr(b) for b in ALPHA_BITS)
_SCALE_LOW, _SCALE_HIGH = (tl.constexpr(b) for b in SCALE_BITS)
_MERGED_LOW, _MERGED_HIGH = (tl.constexpr(b) for b in MERGED_BITS)
_ONE = tl.constexpr(0x3F800000)
_INFINITY = tl.constexpr(0x7F800000)


@triton.jit
def _alpha_of(v, ROWS: tl.constexpr, LOG_LOW: tl.constexpr, LOG_HIGH: tl.constexpr):
    """Rescaling factors of blocks, one for each of their rows; `v`: the columns of ROWS rows.

    Every row gets the sum of its block, so that factors lie where rows do.
    """
    parts = ()
    for i in tl.static_range(1 << LOG_LOW):
        parts = parts + (v[i] * v[i],)
    for k in tl.static_range(LOG_LOW):
        sums = ()
        for i in tl.static_range(1 << (LOG_LOW - k - 1)):
            sums = sums + (parts[2 * i] + parts[2 * i + 1],)
        parts = sums
    total = parts[0]
    for k in tl.static_range(LOG_HIGH):
        both = tl.sum(tl.reshape(total, [ROWS >> (k + 1), 2, 1 << k]), 1)
        both = tl.broadcast_to(both[:, None, :], [ROWS >> (k + 1), 2, 1 << k])
        total = tl.reshape(both, [ROWS])
    sigma = tl.sqrt_rn(total * (1.0 / (1 << (LOG_LOW + LOG_HIGH))) + _EPSILON)
    alpha = tl.div_rn(tl.full([ROWS], _TAU, tl.float32), sigma)
    alpha = tl.where(alpha > _ALPHA_MIN, alpha, _ALPHA_MIN)
    return tl.where(alpha < _ALPHA_MAX, alpha, _ALPHA_MAX)


@triton.jit
def _code(v, word, MAN: tl.constexpr, BIAS: tl.constexpr, RANDOM: tl.constexpr):
    """Codes of `v` in 32 bits, rounded to nearest or by the random words `word`."""
    if MAN == 0:
        if RANDOM:
            steps = ((v + 128.0) * 65536.0).to(tl.uint32)
            return (((steps + (word >> 16)) >> 16) - 128) & 0xFF
        else:
            return (v + 12582912.0).to(tl.uint32, bitcast=True) & 0xFF
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
def _code_word(q0, q1, q2, q3, drawn, MAN: tl.constexpr, BIAS: tl.constexpr, CVT: tl.constexpr):
    """Four codes in 32 bits, the first lowest; rounded to nearest or by four words `drawn`."""
    RANDOM: tl.constexpr = len(drawn) > 0
    r = drawn if RANDOM else (0, 0, 0, 0)
    if CVT and not RANDOM and MAN != 0:
        PAIR: tl.constexpr = (
            "cvt.rn.satfinite.e4m3x2.f32" if MAN == 3 else "cvt.rn.satfinite.e5m2x2.f32"
        )
        return tl.inline_asm_elementwise(
            "{ .reg .b16 low, high; "
            + PAIR
            + " low, $2, $1; "
            + PAIR
            + " high, $4, $3; mov.b32 $0, {low, high}; }",
            "=r,r,r,r,r",
            [q0, q1, q2, q3],
            dtype=tl.uint32,
            is_pure=True,
            pack=1,
        )
    else:
        word = _code(q0, r[0], MAN, BIAS, RANDOM) | (_code(q1, r[1], MAN, BIAS, RANDOM) << 8)
        word |= _code(q2, r[2], MAN, BIAS, RANDOM) << 16
        return word | (_code(q3, r[3], MAN, BIAS, RANDOM) << 24)


@triton.jit
def _transpose_bytes(a, b, c, d, CVT: tl.constexpr):
    """Words of the bytes 0, 1, 2, 3 of `a` to `d`."""
    if CVT:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 ab, cd, AB, CD; "
            "prmt.b32 ab, $4, $5, 0x5140; prmt.b32 cd, $6, $7, 0x5140; "
            "prmt.b32 AB, $4, $5, 0x7362; prmt.b32 CD, $6, $7, 0x7362; "
            "prmt.b32 $0, ab, cd, 0x5410; prmt.b32 $1, ab, cd, 0x7632; "
            "prmt.b32 $2, AB, CD, 0x5410; prmt.b32 $3, AB, CD, 0x7632; }",
            "=&r,=&r,=&r,=&r,r,r,r,r",
            [a, b, c, d],
            dtype=(tl.uint32, tl.uint32, tl.uint32, tl.uint32),
            is_pure=True,
            pack=1,
        )
    else:
        words = ()
        for i in tl.static_range(4):
            low = ((a >> (8 * i)) & 0xFF) | (((b >> (8 * i)) & 0xFF) << 8)
            high = ((c >> (8 * i)) & 0xFF) | (((d >> (8 * i)) & 0xFF) << 8)
            words = words + (low | (high << 16),)
        return words


@triton.jit
def _values(word, MAN: tl.constexpr, CVT: tl.constexpr):
    """float32 values of the four codes of a word; e4m3 by float16, whose exponents are 8 lower."""
    if CVT and MAN == 3:
        return tl.inline_asm_elementwise(
            """{ .reg .b16 low, high, a, b; .reg .b32 two;
            mov.b32 {low, high}, $4;
            cvt.rn.f16x2.e4m3x2 two, low; mov.b32 {a, b}, two;
            cvt.f32.f16 $0, a; cvt.f32.f16 $1, b;
            cvt.rn.f16x2.e4m3x2 two, high; mov.b32 {a, b}, two;
            cvt.f32.f16 $2, a; cvt.f32.f16 $3, b; }""",
            "=&r,=&r,=&r,=&r,r",
            [word],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    else:
        values = ()
        for i in tl.static_range(4):
            byte = (word >> (8 * i)) & 0xFF
            if MAN == 0:
                v = ((byte << 24).to(tl.int32, bitcast=True) >> 24).to(tl.float32)
            elif MAN == 3:
                half = ((byte & 0x80) << 8) | ((byte & 0x7F) << 7)
                v = half.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
            else:
                v = (byte << 8).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
            values = values + (v,)
        return values


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
def _first_bytes(word, count):
    """The first `count` bytes of a word, any number; the others are 0."""
    keep = tl.minimum(tl.maximum(count, 0), 4).to(tl.uint32) * 8
    return tl.where(keep < 32, word & ((1 << (keep & 31)) - 1), word)


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
def _load_rows(
    x_ptr,
    at,
    left,
    TILE: tl.constexpr,
    MODE: tl.constexpr,
    ITEM: tl.constexpr,
    LOG_LOW: tl.constexpr,
):
    """Bits, uint32, of the elements from `at` on, as columns of rows; 0 from `left` elements on.

    A thread loads all of a row, 16 bytes at a time: nothing changes hands.
    """
    ROWS: tl.constexpr = TILE >> LOG_LOW
    bits = ()
    if MODE == 0:
        first = at >> 1 if ITEM == 2 else at
        x = _elements(x_ptr, 4) + tl.multiple_of(first, 4)
        for k in tl.static_range(0, ITEM << LOG_LOW, 16):
            i = tl.arange(0, ROWS)[:, None] * ((ITEM << LOG_LOW) // 4) + k // 4
            words = to_columns(tl.load(x + i + tl.arange(0, 4)[None, :]), ROWS, 4, 2)
            for j in tl.static_range(4):
                if ITEM == 2:
                    bits = bits + (words[j] & 0xFFFF, words[j] >> 16)
                else:
                    bits = bits + (words[j],)
    else:
        for k in tl.static_range(1 << LOG_LOW):
            i = tl.arange(0, ROWS) * (1 << LOG_LOW) + k
            e = tl.load(_elements(x_ptr, ITEM) + at + i, mask=i < left, other=0)
            bits = bits + (e.to(tl.uint32),)
    return bits


@triton.jit
def _encode_tile(
    v,
    static_ptr,
    key_ptr,
    chunk,
    at,
    n,
    payload,
    seed,
    step,
    rank,
    TILE: tl.constexpr,
    MODE: tl.constexpr,
    MAN: tl.constexpr,
    BIAS: tl.constexpr,
    LARGEST: tl.constexpr,
    LOG_LOW: tl.constexpr,
    LOG_HIGH: tl.constexpr,
    NORM: tl.constexpr,
    TRANSFORM: tl.constexpr,
    DUAL: tl.constexpr,
    RANDOM: tl.constexpr,
    SUMS: tl.constexpr,
    CVT: tl.constexpr,
):
    """Encode values `v`, columns of a tile's rows, from element `at` of a chunk of `n` elements.

    Returns the keyed sum of what is stored, 0 without SUMS.
    """
    LOW: tl.constexpr = 1 << LOG_LOW
    HIGH: tl.constexpr = 1 << LOG_HIGH
    BLOCK: tl.constexpr = HIGH * LOW
    BLOCKS: tl.constexpr = TILE // BLOCK
    ROWS: tl.constexpr = TILE // LOW
    WORDS: tl.constexpr = 1 + DUAL
    left = n - at
    total = tl.zeros([], tl.uint64)
    # After the exchange a thread holds what lies LOW apart: `lines` of HIGH values, LOW to a block.
    TURNED: tl.constexpr = (TRANSFORM != _NONE) and (HIGH > 1)
    COUNT: tl.constexpr = HIGH if TURNED else LOW
    LINES: tl.constexpr = LOW if TURNED else HIGH
    if TRANSFORM == _NONE:
        alpha = tl.full([ROWS], 1.0, tl.float32)
        t = v
        top = v[0].to(tl.uint32, bitcast=True) & 0x7FFFFFFF
        for i in tl.static_range(1, LOW):
            top = tl.maximum(top, v[i].to(tl.uint32, bitcast=True) & 0x7FFFFFFF)
    else:
        if TRANSFORM == _ASH:
            alpha = _alpha_of(v, ROWS, LOG_LOW, LOG_HIGH)
        else:
            alpha = tl.full([ROWS], _HADAMARD_ALPHA, tl.float32)
        scaled = ()
        for i in tl.static_range(LOW):
            scaled = scaled + (v[i] * alpha,)
        t = butterflies(scaled, LOW, LOG_LOW)
        if TURNED:
            t = butterflies(transpose(t, BLOCKS, LOG_LOW, 0, LOG_HIGH), HIGH, LOG_HIGH)
        # Of a block that holds a NaN or an infinity all are; of others none, specs/taco.md.
        peak = tl.abs(t[0])
        for i in tl.static_range(1, COUNT):
            peak = tl.maximum(peak, tl.abs(t[i]))
        top = peak.to(tl.uint32, bitcast=True)
    top = tl.max(tl.reshape(top, [BLOCKS, LINES]).to(tl.int32, bitcast=True), 1)
    top = spread(top, BLOCKS, LINES)
    lost = top >= _INFINITY
    z = top.to(tl.float32, bitcast=True) * NORM
    z = tl.where(z > _FLOOR, z, _FLOOR)
    s = tl.div_rn(z, tl.full([BLOCKS * LINES], LARGEST, tl.float32))
    r = tl.div_rn(tl.full([BLOCKS * LINES], NORM, tl.float32), s)
    kept = tl.where(lost, 0, 0xFFFFFFFF).to(tl.uint32)
    q = ()
    for i in tl.static_range(COUNT):
        y = t[i] * r
        if RANDOM != _NO_KEY:
            y = tl.where(y < LARGEST, y, LARGEST)
            y = tl.where(y > -LARGEST, y, -LARGEST)
        q = q + (y,)
    codes_ptr = static_ptr.to(tl.pointer_type(tl.uint32)) + at // 4
    stop = left
    if TRANSFORM != _NONE:
        stop = (left + BLOCK - 1) // BLOCK * BLOCK
    PACKED: tl.constexpr = TURNED and (RANDOM == _NO_KEY)
    STEP: tl.constexpr = BLOCK // 16 if PACKED else 1
    if PACKED:
        # Four codes of a word are a quarter of a block apart until words, not bytes, change hands.
        FOURS: tl.constexpr = HIGH // 4
        words = ()
        for k in tl.static_range(FOURS):
            word = _code_word(
                q[k], q[k + FOURS], q[k + 2 * FOURS], q[k + 3 * FOURS], (), MAN, BIAS, CVT
            )
            words = words + (word & kept,)
        words = transpose(words, BLOCKS, LOG_HIGH - 2, LOG_LOW - 2, 2)
        words = _transpose_bytes(words[0], words[1], words[2], words[3], CVT)
        # The hint keeps one word to a thread, as they come out of the exchange.
        p = tl.max_contiguous(tl.arange(0, TILE // 16), 1)
        w = p // STEP * (4 * STEP) + p % STEP
    else:
        if TURNED:
            q = transpose(q, BLOCKS, LOG_HIGH, 0, LOG_LOW)
            kept = tl.max(tl.reshape(kept.to(tl.int32, bitcast=True), [BLOCKS, LINES]), 1)
            kept = spread(kept.to(tl.uint32, bitcast=True), BLOCKS, HIGH)
        w = tl.arange(0, ROWS) * (LOW // 4)
        if RANDOM == _KEY_ON_DEVICE:
            seed = tl.load(key_ptr).to(tl.uint64, bitcast=True)
            step = tl.load(key_ptr + 1).to(tl.uint64, bitcast=True)
        words = ()
        for k in tl.static_range(LOW // 4):
            drawn = ()
            if RANDOM != _NO_KEY:
                group = (chunk.to(tl.int64) * payload * 128 + at) // 4 + (w + k)
                drawn = philox4(seed, step, rank, 0, group)
            word = _code_word(
                q[4 * k], q[4 * k + 1], q[4 * k + 2], q[4 * k + 3], drawn, MAN, BIAS, CVT
            )
            words = words + (word & kept,)
    COUNT_WORDS: tl.constexpr = len(words)
    if MODE != 0:
        # What lies behind the end is not stored, and not weighed either.
        used = ()
        for k in tl.static_range(COUNT_WORDS):
            used = used + (tl.where((w + k * STEP) * 4 < stop, words[k], 0),)
        words = used
    if PACKED:
        for k in tl.static_range(COUNT_WORDS):
            to = w + k * STEP
            if MODE == 0:
                tl.store(codes_ptr + to, words[k])
            else:
                tl.store(codes_ptr + to, words[k], mask=to * 4 < stop)
    else:
        for k in tl.static_range(0, COUNT_WORDS, 4):
            four = from_columns((words[k], words[k + 1], words[k + 2], words[k + 3]), 4, 2)
            to = (w + k)[:, None] + tl.arange(0, 4)[None, :]
            if MODE == 0:
                tl.store(codes_ptr + to, four)
            else:
                tl.store(codes_ptr + to, four, mask=to * 4 < stop)
    if SUMS:
        terms = weigh(words[0], at // 4 + w)
        for k in tl.static_range(1, COUNT_WORDS):
            terms += weigh(words[k], at // 4 + w + k * STEP)
        total += tl.sum(terms, 0)
    # Lines of a block, or its rows, have the same scales: the first one's are stored.
    scales_ptr = (static_ptr + payload * 128).to(tl.pointer_type(tl.uint32))
    line = tl.arange(0, BLOCKS * LINES)
    block = at // BLOCK + line // LINES
    here = line % LINES == 0
    if MODE != 0:
        here = here & (line // LINES * BLOCK < left)
    if LINES != HIGH:
        alpha = spread(tl.max(tl.reshape(alpha, [BLOCKS, HIGH]), 1), BLOCKS, LINES)
    where = payload * 32 + block * WORDS
    if DUAL:
        a = tl.where(lost, _NAN_SCALE, alpha.to(tl.uint32, bitcast=True))
        b = tl.where(lost, _NAN_SCALE, s.to(tl.uint32, bitcast=True))
        tl.store(scales_ptr + block * 2, a, mask=here)
        tl.store(scales_ptr + block * 2 + 1, b, mask=here)
        if SUMS:
            terms = weigh(a, where) + weigh(b, where + 1)
            total += tl.sum(tl.where(here, terms, 0), 0)
    else:
        m = tl.div_rn(s, alpha)
        b = tl.where(lost, _NAN_SCALE, m.to(tl.uint32, bitcast=True))
        tl.store(scales_ptr + block, b, mask=here)
        if SUMS:
            total += tl.sum(tl.where(here, weigh(b, where), 0), 0)
    return total


@kernel
def _encode_kernel(
    x_ptr,
    out_ptr,
    key_ptr,
    src_ptr,
    sums_ptr,
    status_ptr,
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
    TILE: tl.constexpr,
    MODE: tl.constexpr,
    EXP: tl.constexpr,
    ITEM: tl.constexpr,
    MAN: tl.constexpr,
    BIAS: tl.constexpr,
    LARGEST: tl.constexpr,
    LOG_LOW: tl.constexpr,
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
    """Encode a tile.

    FUSED: what is encoded is the sum of the elements and of those that `src_ptr`, a buffer of the
    same plan, decodes to: added in float32 and rounded to the plan's dtype. The elements at `x_ptr`
    have X_ITEM bytes: ITEM, or where they are added 4, float32.

    MODE 0: whole tiles whose elements are aligned; 1: the tile at the end of a chunk, which may be
    empty; 2: both, and elements may lie anywhere.
    """
    pid = tl.program_id(0)
    if MODE == 1:
        chunk = pid
    else:
        chunk = (pid.to(tl.uint32) // tiles.to(tl.uint32)).to(tl.int32)
    first = chunk.to(tl.int64) * chunk_nelem
    n = tl.maximum(tl.minimum(chunk_nelem, nelem - first), 0)
    if MODE == 1:
        tile = (n // TILE).to(tl.int32)
    else:
        tile = pid - chunk * tiles
    at = tile.to(tl.int64) * TILE
    left = n - at
    static_ptr = out_ptr + (static_at + chunk.to(tl.int64) * static_stride) * 128
    total = tl.zeros([], tl.uint64)
    origin = first + at
    if MODE == 0:
        origin = tl.multiple_of(origin, 16)
        mine = origin + TILE <= nelem
    else:
        mine = left > 0
    if mine:
        bits = _load_rows(x_ptr, origin, left, TILE, MODE, X_ITEM, LOG_LOW)
        v = ()
        for k in tl.static_range(1 << LOG_LOW):
            if X_ITEM == ITEM:
                v = v + (float_of(bits[k], EXP, ITEM),)
            else:
                v = v + (bits[k].to(tl.float32, bitcast=True),)
        if FUSED:
            y, _, wrong, weighed = _decode_tile(
                src_ptr + (static_at + chunk.to(tl.int64) * static_stride) * 128,
                at,
                left,
                payload,
                at * 0,
                left,
                TILE,
                MODE,
                MAN,
                LOG_LOW,
                LOG_HIGH,
                NORM,
                TRANSFORM,
                DUAL,
                True,
                SUMS,
                CVT,
            )
            report_any(status_ptr, CHUNK + (chunk.to(tl.int64) << 8) + CHUNK_PAYLOAD, wrong)
            if SUMS:
                tl.atomic_add(sums_ptr + chunk, weighed.to(tl.int64, bitcast=True), sem="relaxed")
            v = _sum_rows(y, v, left, TILE, MODE, EXP, ITEM, LOG_LOW, LOG_HIGH, TRANSFORM, CVT)
        total += _encode_tile(
            v,
            static_ptr,
            key_ptr,
            chunk,
            at,
            n,
            payload,
            seed,
            step,
            rank,
            TILE,
            MODE,
            MAN,
            BIAS,
            LARGEST,
            LOG_LOW,
            LOG_HIGH,
            NORM,
            TRANSFORM,
            DUAL,
            RANDOM,
            SUMS,
            CVT,
        )
    record = out_ptr.to(tl.pointer_type(tl.int64)) + head + chunk.to(tl.int64) * 4
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
    TILE: tl.constexpr,
    MODE: tl.constexpr,
    MAN: tl.constexpr,
    LOG_LOW: tl.constexpr,
    LOG_HIGH: tl.constexpr,
    NORM: tl.constexpr,
    TRANSFORM: tl.constexpr,
    DUAL: tl.constexpr,
    STORE: tl.constexpr,
    SUMS: tl.constexpr,
    CVT: tl.constexpr,
):
    """Decode the tile at element `at`, of whose elements `left` are in the chunk.

    Returns (STORE) float32 values, NaN where lost, as columns of lines, or of rows where nothing is
    exchanged; for each line whether its block is lost, and whether it is wrong and holds some of
    the elements `start` to `stop` of the tile; and the keyed sum (SUMS).
    """
    LOW: tl.constexpr = 1 << LOG_LOW
    HIGH: tl.constexpr = 1 << LOG_HIGH
    BLOCK: tl.constexpr = HIGH * LOW
    BLOCKS: tl.constexpr = TILE // BLOCK
    ROWS: tl.constexpr = TILE // LOW
    WORDS: tl.constexpr = 1 + DUAL
    TURNED: tl.constexpr = (TRANSFORM != _NONE) and (HIGH > 1)
    LINES: tl.constexpr = LOW if TURNED else HIGH
    codes_ptr = static_ptr.to(tl.pointer_type(tl.uint32)) + at // 4
    used = (left + BLOCK - 1) // BLOCK * BLOCK
    w = tl.arange(0, ROWS) * (LOW // 4)
    words = ()
    for k in tl.static_range(0, LOW // 4, 4):
        i = (w + k)[:, None] + tl.arange(0, 4)[None, :]
        if MODE == 0:
            four = tl.load(codes_ptr + i)
        else:
            four = tl.load(codes_ptr + i, mask=i * 4 < used, other=0)
        words = words + to_columns(four, ROWS, 4, 2)
    total = tl.zeros([], tl.uint64)
    if SUMS:
        terms = weigh(words[0], at // 4 + w)
        for k in tl.static_range(1, LOW // 4):
            terms += weigh(words[k], at // 4 + w + k)
        total += tl.sum(terms, 0)
    bad = w.to(tl.uint32) * 0
    found = bad
    for k in tl.static_range(LOW // 4):
        if (TRANSFORM == _NONE) and (MODE != 0):
            # Behind the codes of elements is padding, which is checked with the rest of it.
            seen = _first_bytes(words[k], left - (w + k).to(tl.int64) * 4)
        else:
            seen = words[k]
        bad |= _bad_codes(seen, MAN)
        found |= seen
    bad = (bad != 0).to(tl.int32)
    found = (found != 0).to(tl.int32)
    if LINES != HIGH:
        bad = spread(tl.max(tl.reshape(bad, [BLOCKS, HIGH]), 1), BLOCKS, LINES)
        found = spread(tl.max(tl.reshape(found, [BLOCKS, HIGH]), 1), BLOCKS, LINES)
    scales_ptr = (static_ptr + payload * 128).to(tl.pointer_type(tl.uint32))
    line = tl.arange(0, BLOCKS * LINES)
    edge = line // LINES * BLOCK
    block = at // BLOCK + line // LINES
    if MODE == 0:
        here = line >= 0
        wanted = here
    else:
        here = edge < left
        wanted = here & (edge < stop) & (edge + BLOCK > start)
    first = here & (line % LINES == 0)
    where = payload * 32 + block * WORDS
    if DUAL:
        a = tl.load(scales_ptr + block * 2, mask=here, other=_ONE)
        m = tl.load(scales_ptr + block * 2 + 1, mask=here, other=_ONE)
        if SUMS:
            terms = weigh(a, where) + weigh(m, where + 1)
            total += tl.sum(tl.where(first, terms, 0), 0)
        lost = m == _NAN_SCALE
        good = _within(a, _ALPHA_LOW, _ALPHA_HIGH) & _within(m, _SCALE_LOW, _SCALE_HIGH)
        half_lost = lost & (a != _NAN_SCALE)
        a = tl.where(good, a, _ONE).to(tl.float32, bitcast=True)
        m = tl.where(good, m, _ONE).to(tl.float32, bitcast=True)
        m = tl.div_rn(m, a).to(tl.uint32, bitcast=True)
        good = (good & _within(m, _MERGED_LOW, _MERGED_HIGH)) | (lost & (half_lost == 0))
    else:
        m = tl.load(scales_ptr + block, mask=here, other=_ONE)
        if SUMS:
            total += tl.sum(tl.where(first, weigh(m, where), 0), 0)
        lost = m == _NAN_SCALE
        good = _within(m, _MERGED_LOW, _MERGED_HIGH) | lost
    m = tl.where(_within(m, _MERGED_LOW, _MERGED_HIGH), m, _ONE).to(tl.float32, bitcast=True)
    wrong = wanted & ((good == 0) | (tl.where(lost, found, bad) != 0))
    y = ()
    if STORE:
        t = ()
        for k in tl.static_range(LOW // 4):
            t = t + _values(words[k], MAN, CVT)
        if TRANSFORM != _NONE:
            t = butterflies(t, LOW, LOG_LOW)
            if TURNED:
                t = butterflies(transpose(t, BLOCKS, LOG_LOW, 0, LOG_HIGH), HIGH, LOG_HIGH)
        nan = tl.full([], _NAN_SCALE, tl.uint32).to(tl.float32, bitcast=True)
        c = tl.where(lost, nan, m * NORM)
        for k in tl.static_range(len(t)):
            y = y + (t[k] * c,)
    return y, lost, wrong, total


@triton.jit
def _transpose_halves(a, b, CVT: tl.constexpr):
    """Words of the lower and of the upper halves of `a` and `b`."""
    if CVT:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $2, $3, 0x5410; prmt.b32 $1, $2, $3, 0x7632;",
            "=&r,=&r,r,r",
            [a, b],
            dtype=(tl.uint32, tl.uint32),
            is_pure=True,
            pack=1,
        )
    else:
        return (a & 0xFFFF) | (b << 16), (a >> 16) | (b & 0xFFFF0000)


@triton.jit
def _in_order(
    y,
    lost,
    TILE: tl.constexpr,
    EXP: tl.constexpr,
    ITEM: tl.constexpr,
    LOG_LOW: tl.constexpr,
    LOG_HIGH: tl.constexpr,
    TRANSFORM: tl.constexpr,
    CVT: tl.constexpr,
):
    """What `_decode_tile` gives, as element bits in the order of memory.

    Returns words, four and four of which lie side by side, 16 bytes; and for each four the number
    of the first element.
    """
    LOW: tl.constexpr = 1 << LOG_LOW
    HIGH: tl.constexpr = 1 << LOG_HIGH
    BLOCKS: tl.constexpr = TILE >> (LOG_LOW + LOG_HIGH)
    TURNED: tl.constexpr = (TRANSFORM != _NONE) and (HIGH > 1)
    COUNT: tl.constexpr = len(y)
    words = ()
    places = ()
    if ITEM == 4:
        for k in tl.static_range(COUNT):
            bits = limited(y[k], EXP, ITEM).to(tl.uint32, bitcast=True)
            words = words + (tl.where(lost, _NAN_SCALE, bits),)
        if TURNED:
            words = transpose(words, BLOCKS, LOG_HIGH, LOG_LOW - 2, 2)
            places = (tl.arange(0, TILE // 4) * 4,)
        else:
            for k in tl.static_range(0, COUNT, 4):
                places = places + (tl.arange(0, TILE // LOW) * LOW + k,)
    elif TURNED:
        # Pairs that are half a block apart change hands, eight neighbours to a thread.
        pairs = ()
        for k in tl.static_range(HIGH // 2):
            pairs = pairs + (narrow_pair(y[k], y[k + HIGH // 2], lost, EXP, CVT),)
        pairs = transpose(pairs, BLOCKS, LOG_HIGH - 1, LOG_LOW - 3, 3)
        upper = ()
        for k in tl.static_range(0, 8, 2):
            low, high = _transpose_halves(pairs[k], pairs[k + 1], CVT)
            words = words + (low,)
            upper = upper + (high,)
        words = words + upper
        STEP: tl.constexpr = LOW * HIGH // 16
        p = tl.arange(0, TILE // 16)
        place = p // STEP * (16 * STEP) + p % STEP * 8
        places = (place, place + 8 * STEP)
    else:
        for k in tl.static_range(0, COUNT, 2):
            words = words + (narrow_pair(y[k], y[k + 1], lost, EXP, CVT),)
        for k in tl.static_range(0, COUNT, 8):
            places = places + (tl.arange(0, TILE // LOW) * LOW + k,)
    return words, places


@triton.jit
def _sum_rows(
    y,
    v,
    left,
    TILE: tl.constexpr,
    MODE: tl.constexpr,
    EXP: tl.constexpr,
    ITEM: tl.constexpr,
    LOG_LOW: tl.constexpr,
    LOG_HIGH: tl.constexpr,
    TRANSFORM: tl.constexpr,
    CVT: tl.constexpr,
):
    """Columns of rows: what `_decode_tile` gives and `v`, added and rounded to the dtype."""
    LOW: tl.constexpr = 1 << LOG_LOW
    terms = ()
    for k in tl.static_range(0, len(y), 2):
        terms = terms + rounded_pair(y[k], y[k + 1], EXP, ITEM, True, CVT)
    if (TRANSFORM != _NONE) and (LOG_HIGH > 0):
        terms = transpose(terms, TILE >> (LOG_LOW + LOG_HIGH), LOG_HIGH, 0, LOG_LOW)
    sums = ()
    for k in tl.static_range(0, LOW, 2):
        sums = sums + rounded_pair(terms[k] + v[k], terms[k + 1] + v[k + 1], EXP, ITEM, False, CVT)
    if MODE != 0:
        # A block that was filled up decodes to zeros and errors behind its end.
        kept = ()
        for k in tl.static_range(LOW):
            i = tl.arange(0, TILE // LOW) * LOW + k
            kept = kept + (tl.where(i < left, sums[k], 0.0),)
        sums = kept
    return sums


@triton.jit
def _store_four(
    out_ptr,
    words,
    place,
    to,
    left,
    count,
    MODE: tl.constexpr,
    EXP: tl.constexpr,
    ITEM: tl.constexpr,
    ADD: tl.constexpr,
):
    """Store or add the elements of four words, the first of them number `place` of the tile.

    Element `i` goes to `to + i`, if that is one of `count` and `i` below `left`.
    """
    if (MODE == 0) and (ADD == 0):
        i = (place * ITEM // 4)[:, None] + tl.arange(0, 4)[None, :]
        four = from_columns(words, 4, 2)
        tl.store(_elements(out_ptr, 4) + tl.multiple_of(to >> 1 if ITEM == 2 else to, 4) + i, four)
    else:
        bits = words
        if ITEM == 2:
            bits = ()
            for k in tl.static_range(4):
                bits = bits + (words[k] & 0xFFFF, words[k] >> 16)
        LOG: tl.constexpr = 3 if (ITEM == 2) and (ADD != 4) else 2
        for k in tl.static_range(0, len(bits), 1 << LOG):
            part = ()
            for j in tl.static_range(1 << LOG):
                part = part + (bits[k + j],)
            b = from_columns(part, 1 << LOG, LOG)
            i = (place + k)[:, None] + tl.arange(0, 1 << LOG)[None, :]
            use = None
            if MODE != 0:
                use = (i < left) & (i + to >= 0) & (i + to < count)
            if ADD == 0:
                kind = tl.uint16 if ITEM == 2 else tl.uint32
                tl.store(_elements(out_ptr, ITEM) + to + i, b.to(kind), mask=use)
            else:
                value = float_of(b, EXP, ITEM)
                add_to(accumulator(out_ptr, EXP, ADD) + to + i, value, use, EXP, ADD)


@kernel
def _decode_kernel(
    src_ptr,
    out_ptr,
    sums_ptr,
    status_ptr,
    start: tl.int64,
    stop: tl.int64,
    first_tile: tl.int32,
    first_chunk: tl.int32,
    chunks: tl.int32,
    nelem: tl.int64,
    chunk_nelem: tl.int64,
    tiles: tl.int32,
    static_at: tl.int64,
    static_stride: tl.int64,
    payload: tl.int64,
    TILE: tl.constexpr,
    MODE: tl.constexpr,
    EXP: tl.constexpr,
    ITEM: tl.constexpr,
    MAN: tl.constexpr,
    LOG_LOW: tl.constexpr,
    LOG_HIGH: tl.constexpr,
    NORM: tl.constexpr,
    TRANSFORM: tl.constexpr,
    DUAL: tl.constexpr,
    STORE: tl.constexpr,
    ADD: tl.constexpr,
    SUMS: tl.constexpr,
    CVT: tl.constexpr,
):
    """Decode a tile's elements from `start` to `stop` of the tensor to the start of `out_ptr`.

    MODE 0: whole tiles inside of that range, aligned where they go; 1: the others, which are the
    last tile of each of `chunks` chunks and those of `start` and `stop`; 2: all tiles, anywhere.
    """
    pid = tl.program_id(0)
    if MODE == 1:
        pick = tl.where(pid == chunks, start, stop - 1)
        chunk = tl.where(pid < chunks, first_chunk + pid, pick // chunk_nelem).to(tl.int32)
    else:
        ahead = (first_tile + pid).to(tl.uint32) // tiles.to(tl.uint32)
        chunk = first_chunk + ahead.to(tl.int32)
    first = chunk.to(tl.int64) * chunk_nelem
    n = tl.maximum(tl.minimum(chunk_nelem, nelem - first), 0)
    if MODE == 1:
        tile = tl.where(pid < chunks, n // TILE, (pick - first) // TILE)
    else:
        tile = first_tile + pid - ahead.to(tl.int32) * tiles
    at = tile.to(tl.int64) * TILE
    left = n - at
    inside = (first + at >= start) & (first + at + TILE <= stop)
    if MODE != 0:
        inside = inside & (left >= TILE)
    if MODE == 0:
        mine = inside
    elif MODE == 1:
        again = (pid > chunks) & (chunk == start // chunk_nelem)
        again = again & (tile == (start - first) // TILE)
        mine = (left > 0) & (inside == 0) & ((pid < chunks) | ((left >= TILE) & (again == 0)))
        mine = mine & (first + at < stop) & (first + tl.minimum(at + TILE, n) > start)
    else:
        mine = (left > 0) & (first + at < stop) & (first + tl.minimum(at + TILE, n) > start)
    if mine:
        static_ptr = src_ptr + (static_at + chunk.to(tl.int64) * static_stride) * 128
        y, lost, wrong, total = _decode_tile(
            static_ptr,
            at,
            left,
            payload,
            start - first - at,
            stop - first - at,
            TILE,
            MODE,
            MAN,
            LOG_LOW,
            LOG_HIGH,
            NORM,
            TRANSFORM,
            DUAL,
            STORE,
            SUMS,
            CVT,
        )
        report_any(status_ptr, CHUNK + (chunk.to(tl.int64) << 8) + CHUNK_PAYLOAD, wrong)
        if SUMS:
            tl.atomic_add(sums_ptr + chunk, total.to(tl.int64, bitcast=True), sem="relaxed")
        if STORE:
            words, places = _in_order(y, lost, TILE, EXP, ITEM, LOG_LOW, LOG_HIGH, TRANSFORM, CVT)
            to = first + at - start
            if MODE == 0:
                to = tl.multiple_of(to, 16)
            for k in tl.static_range(len(places)):
                four = (words[4 * k], words[4 * k + 1], words[4 * k + 2], words[4 * k + 3])
                _store_four(out_ptr, four, places[k], to, left, stop - start, MODE, EXP, ITEM, ADD)


@functools.cache
def _converts(device: torch.device) -> bool:
    """True if the device rounds to FP8 by itself."""
    if not CUDA or INTERPRETED or device.type != "cuda":
        return False
    return bool(torch.cuda.get_device_capability(device) >= (8, 9))


@functools.cache
def _shared(spec: Taco, dtype: DType) -> dict[str, int | float]:
    """Constants of both kernels."""
    low = 5 if spec.block == 32 else 4
    return {
        "TILE": _TILE,
        "EXP": dtype.exponent,
        "ITEM": dtype.itemsize,
        "MAN": FORMAT_OF[spec.format].mantissa,
        "LOG_LOW": low,
        "LOG_HIGH": spec.block.bit_length() - 1 - low,
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
    warps = _WIDE_WARPS if spec.transform == "none" else _WARPS
    return Variant(_encode_kernel, options(warps), **meta)


@functools.cache
def _decode_variant(
    spec: Taco, dtype: DType, mode: int, store: bool, add: int, sums: bool, cvt: bool
) -> Variant:
    meta = {"MODE": mode} | _shared(spec, dtype)
    meta |= {"STORE": store, "ADD": add, "SUMS": sums, "CVT": cvt}
    warps = _WIDE_WARPS if add or spec.transform == "none" else _WARPS
    return Variant(_decode_kernel, options(warps), **meta)


class _Launches:
    """Arguments of a plan's kernels, put together once."""

    def __init__(self, plan: Plan) -> None:
        if not isinstance(plan.codec, Taco):
            raise TypeError(f"the plan's codec is {plan.codec.name}; allowed: taco")
        self.spec = plan.codec
        self.sizes = plan.nelem, plan.chunk_nelem
        self.head = plan.header.nbytes // 8
        # In units of 128 bytes, so that kernels know the alignment.
        self.static = plan.static_offset // 128, plan.static_stride // 128
        self.payload = plan.layout.sections[0].nbytes // 128
        self.whole = plan.chunk_nelem // _TILE
        self.tiles = -(-plan.chunk_nelem // _TILE)
        self.aligned = plan.chunks == 1 or plan.chunk_nelem * plan.dtype.itemsize % 16 == 0


def _launches(plan: Plan) -> _Launches:
    found = plan.__dict__.get("_taco_launches")
    if found is None:
        found = plan.__dict__["_taco_launches"] = _Launches(plan)
    return found


def encode(plan: Plan, x, out, scratch, stats=None, key: Key | None = None) -> None:
    """Encode the elements of `x` into `out`; see `tightwire.gpu` for the contract."""
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
    `tightwire.gpu` for the contract.
    """
    if plan.checksum:
        scratch[: 8 * plan.chunks].zero_()
    _encode(plan, x, out, key, src, (src, scratch, status))
    frame_of(plan).check(
        src, scratch, status, 0, plan.nelem, whole=True, summed=plan.checksum, planned=planned
    )


def _encode(plan: Plan, x, out, key, src, sources) -> None:
    g = _launches(plan)
    random, on_device, numbers = NO_KEY, None, (0, 0, 0)
    if g.spec.rounding == "stochastic":
        random, on_device, numbers = key_arguments(key, out.device)
    frame_of(plan).begin(out)
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
                *g.sizes,
                tiles,
                g.head,
                *g.static,
                g.payload,
                *numbers,
            )


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
    """Decode elements `start` to `stop` into `out`; see `tightwire.gpu` for the contract."""
    g = _launches(plan)
    stop = plan.nelem if stop is None else stop
    sums = check and plan.checksum and (start < stop or not plan.nelem)
    if sums:
        scratch[: 8 * plan.chunks].zero_()
    if out is None:
        out = src
    first, end, _, _ = touched(plan, start, stop)
    if start < stop:
        size, tile = plan.chunk_nelem, _TILE
        aligned = g.aligned and start * plan.dtype.itemsize % 16 == 0 and out.data_ptr() % 16 == 0
        last = stop - 1
        modes = []
        for mode, tiles in ((0, g.whole), (1, 1)) if aligned else ((2, g.tiles),):
            lo = start // size * tiles + min(start % size // tile, tiles)
            hi = last // size * tiles + min(last % size // tile + 1, tiles)
            programs = end - first + 2 if mode == 1 else hi - lo
            modes.append((mode, tiles, lo - first * tiles, programs))
        adding = out.element_size() if add else 0
        for mode, tiles, lo, programs in modes:
            if programs > 0:
                # fmt: off
                variant = _decode_variant(
                    g.spec, plan.dtype, mode, store, adding, sums, _converts(src.device)
                )
                # fmt: on
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
    frame_of(plan).check(
        src, scratch, status, start, stop, whole=check, summed=sums, planned=planned
    )
