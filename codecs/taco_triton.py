# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment,misc"
"""taco on a GPU: one kernel each way, a tile of 4096 elements per program. specs/taco.md.

Every addition is spelled out, in the page's order.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import triton
import triton.language as tl

from .common.base import Plan
from .common.blocks_triton import fours, fp8_word
from .common.columns_triton import from_columns, to_columns
from .common.driver_triton import Driver, Tiling, functions, many_functions
from .common.frame_triton import CHUNK, CHUNK_PAYLOAD, store_element, weigh
from .common.hadamard_triton import butterflies, spread, transpose
from .common.minifloat import INFINITY
from .common.philox_triton import NO_KEY, philox4
from .common.runs_triton import element_words, lanes, narrow_pair, report_any
from .common.tiles_triton import Format, count_before, no_scale
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

#: Elements of a tile, one program's share.
_TILE = 4096
#: Warps of a tile; and where values do not change hands or are added to others, which is what takes
#: the time.
_WARPS, _WIDE_WARPS = 4, 8
#: Registers of encoding, of decoding and of encoding sums: what whole tiles take by themselves.
_REGISTERS = (72, 64, 96)

_ASH = tl.constexpr(TRANSFORMS.index("ash"))
_HADAMARD = tl.constexpr(TRANSFORMS.index("hadamard"))
_NONE = tl.constexpr(TRANSFORMS.index("none"))
_NO_KEY = tl.constexpr(NO_KEY)
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
_INFINITY = tl.constexpr(INFINITY)


@dataclass(frozen=True)
class Rows(Format):
    """What the kernels know of a codec.

    Attributes:
        mantissa, bias, largest: Of a code; see `taco.Format`.
        log_low, log_high: A block is 2^log_high rows, runs of 2^log_low elements.
        norm: 1 / sqrt(block), or 1.
        transform: Number of the transform.
        turned: Values change hands in a rotation.
        dual: A block has two scales.
    """

    mantissa: int
    bias: int
    largest: float
    log_low: int
    log_high: int
    norm: float
    transform: int
    turned: bool
    dual: bool


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
def _code_word(q, drawn, MAN: tl.constexpr, BIAS: tl.constexpr, CVT: tl.constexpr):
    """Codes of four `q` in 32 bits, the first lowest; rounded to nearest or by words `drawn`."""
    RANDOM: tl.constexpr = len(drawn) > 0
    r = drawn if RANDOM else (0, 0, 0, 0)
    if CVT and not RANDOM and MAN != 0:
        return fp8_word(q[0], q[1], q[2], q[3], MAN)
    else:
        word = _code(q[0], r[0], MAN, BIAS, RANDOM)
        for k in tl.static_range(1, 4):
            word |= _code(q[k], r[k], MAN, BIAS, RANDOM) << (8 * k)
        return word


@triton.jit
def _transpose_bytes(a, b, c, d, PTX: tl.constexpr):
    """Words of the bytes 0, 1, 2, 3 of `a` to `d`."""
    if PTX:
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
    if CVT and MAN != 0:
        return fours(word, MAN, False)
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
def _within(word, low, high):
    return (word >= low) & (word <= high)


@triton.jit
def _pack(v, t, s, draw, stats_ptr, F: tl.constexpr, L: tl.constexpr, MASKED: tl.constexpr):
    """Encode a tile's rows, zeros behind the end."""
    MAN: tl.constexpr = F.mantissa
    LOG_LOW: tl.constexpr = F.log_low
    LOG_HIGH: tl.constexpr = F.log_high
    TRANSFORM: tl.constexpr = F.transform
    LOW: tl.constexpr = 1 << LOG_LOW
    HIGH: tl.constexpr = 1 << LOG_HIGH
    BLOCK: tl.constexpr = HIGH * LOW
    ROWS: tl.constexpr = L.rows
    BLOCKS: tl.constexpr = ROWS >> LOG_HIGH
    TILE: tl.constexpr = ROWS << LOG_LOW
    WORDS: tl.constexpr = 1 + F.dual
    RANDOM: tl.constexpr = L.random != _NO_KEY
    left = count_before(t.n, t.tile * TILE, TILE)
    total = tl.zeros([], tl.uint64)
    # After the exchange a thread holds what lies LOW apart: `lines` of HIGH values, LOW to a block.
    TURNED: tl.constexpr = F.turned
    COUNT: tl.constexpr = HIGH if TURNED else LOW
    LINES: tl.constexpr = LOW if TURNED else HIGH
    if TRANSFORM == _NONE:
        alpha = tl.full([ROWS], 1.0, tl.float32)
        y = v
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
        y = butterflies(scaled, LOW, LOG_LOW)
        if TURNED:
            y = butterflies(transpose(y, BLOCKS, LOG_LOW, 0, LOG_HIGH), HIGH, LOG_HIGH)
        # Of a block that holds a NaN or an infinity all are; of others none, specs/taco.md.
        peak = tl.abs(y[0])
        for i in tl.static_range(1, COUNT):
            peak = tl.maximum(peak, tl.abs(y[i]))
        top = peak.to(tl.uint32, bitcast=True)
    top = tl.max(tl.reshape(top, [BLOCKS, LINES]).to(tl.int32, bitcast=True), 1)
    top = spread(top, BLOCKS, LINES)
    lost = top >= _INFINITY
    z = top.to(tl.float32, bitcast=True) * F.norm
    z = tl.where(z > _FLOOR, z, _FLOOR)
    scale = tl.div_rn(z, tl.full([BLOCKS * LINES], F.largest, tl.float32))
    r = tl.div_rn(tl.full([BLOCKS * LINES], F.norm, tl.float32), scale)
    kept = tl.where(lost, 0, 0xFFFFFFFF).to(tl.uint32)
    q = ()
    for i in tl.static_range(COUNT):
        x = y[i] * r
        if RANDOM:
            x = tl.where(x < F.largest, x, F.largest)
            x = tl.where(x > -F.largest, x, -F.largest)
        q = q + (x,)
    first = t.tile * (TILE // 4)
    codes_ptr = t.static_ptr.to(tl.pointer_type(tl.uint32)) + first
    stop = left
    if TRANSFORM != _NONE:
        stop = (left + BLOCK - 1) // BLOCK * BLOCK
    PACKED: tl.constexpr = TURNED and not RANDOM
    STEP: tl.constexpr = BLOCK // 16 if PACKED else 1
    words = ()
    if PACKED:
        # Four codes of a word are a quarter of a block apart until words, not bytes, change hands.
        FOURS: tl.constexpr = HIGH // 4
        for k in tl.static_range(FOURS):
            four = (q[k], q[k + FOURS], q[k + 2 * FOURS], q[k + 3 * FOURS])
            words = words + (_code_word(four, (), MAN, F.bias, L.cvt) & kept,)
        words = transpose(words, BLOCKS, LOG_HIGH - 2, LOG_LOW - 2, 2)
        words = _transpose_bytes(words[0], words[1], words[2], words[3], L.ptx)
        w = lanes(TILE // 16)
        w = w // STEP * (4 * STEP) + w % STEP
    else:
        if TURNED:
            q = transpose(q, BLOCKS, LOG_HIGH, 0, LOG_LOW)
            kept = tl.max(tl.reshape(kept.to(tl.int32, bitcast=True), [BLOCKS, LINES]), 1)
            kept = spread(kept.to(tl.uint32, bitcast=True), BLOCKS, HIGH)
        w = tl.arange(0, ROWS) * (LOW // 4)
        for k in tl.static_range(LOW // 4):
            drawn = ()
            if RANDOM:
                group = t.chunk * t.at * 32 + first + (w + k)
                drawn = philox4(draw[0], draw[1], draw[2], 0, group)
            four = (q[4 * k], q[4 * k + 1], q[4 * k + 2], q[4 * k + 3])
            words = words + (_code_word(four, drawn, MAN, F.bias, L.cvt) & kept,)
    COUNT_WORDS: tl.constexpr = len(words)
    if MASKED:
        # What lies behind the end is not stored, and not weighed either.
        used = ()
        for k in tl.static_range(COUNT_WORDS):
            used = used + (tl.where((w + k * STEP) * 4 < stop, words[k], 0),)
        words = used
    if PACKED:
        for k in tl.static_range(COUNT_WORDS):
            to = w + k * STEP
            tl.store(codes_ptr + to, words[k], mask=(to * 4 < stop) if MASKED else None)
    else:
        for k in tl.static_range(0, COUNT_WORDS, 4):
            four = from_columns((words[k], words[k + 1], words[k + 2], words[k + 3]), 4, 2)
            to = (w + k)[:, None] + tl.arange(0, 4)[None, :]
            tl.store(codes_ptr + to, four, mask=(to * 4 < stop) if MASKED else None)
    if L.sums:
        terms = weigh(words[0], first + w)
        for k in tl.static_range(1, COUNT_WORDS):
            terms += weigh(words[k], first + w + k * STEP)
        total += tl.sum(terms, 0)
    # Lines of a block, or its rows, have the same scales: the first one's are stored.
    scales_ptr = (t.static_ptr + t.at * 128).to(tl.pointer_type(tl.uint32))
    line = tl.arange(0, BLOCKS * LINES)
    block = t.tile * BLOCKS + line // LINES
    here = line % LINES == 0
    if MASKED:
        here = here & (line // LINES * BLOCK < left)
    if LINES != HIGH:
        alpha = spread(tl.max(tl.reshape(alpha, [BLOCKS, HIGH]), 1), BLOCKS, LINES)
    where = t.at * 32 + block * WORDS
    if WORDS == 2:
        a = tl.where(lost, _NAN_SCALE, alpha.to(tl.uint32, bitcast=True))
        b = tl.where(lost, _NAN_SCALE, scale.to(tl.uint32, bitcast=True))
        tl.store(scales_ptr + block * 2, a, mask=here)
        tl.store(scales_ptr + block * 2 + 1, b, mask=here)
        if L.sums:
            terms = weigh(a, where) + weigh(b, where + 1)
            total += tl.sum(tl.where(here, terms, 0), 0)
    else:
        m = tl.div_rn(scale, alpha)
        b = tl.where(lost, _NAN_SCALE, m.to(tl.uint32, bitcast=True))
        tl.store(scales_ptr + block, b, mask=here)
        if L.sums:
            total += tl.sum(tl.where(here, weigh(b, where), 0), 0)
    return total


@triton.jit
def _unpack_lines(
    t, lo, hi, STORE: tl.constexpr, F: tl.constexpr, L: tl.constexpr, MASKED: tl.constexpr
):
    """(STORE) float32 values of a tile, NaN where lost, as columns of lines, or of rows where
    nothing is exchanged; for each line whether its block is lost, and whether it is wrong and holds
    some of the elements `lo` to `hi` of the chunk; and checksum terms.
    """
    MAN: tl.constexpr = F.mantissa
    LOG_LOW: tl.constexpr = F.log_low
    LOG_HIGH: tl.constexpr = F.log_high
    TRANSFORM: tl.constexpr = F.transform
    LOW: tl.constexpr = 1 << LOG_LOW
    HIGH: tl.constexpr = 1 << LOG_HIGH
    BLOCK: tl.constexpr = HIGH * LOW
    ROWS: tl.constexpr = L.rows
    BLOCKS: tl.constexpr = ROWS >> LOG_HIGH
    TILE: tl.constexpr = ROWS << LOG_LOW
    WORDS: tl.constexpr = 1 + F.dual
    TURNED: tl.constexpr = F.turned
    LINES: tl.constexpr = LOW if TURNED else HIGH
    begin = t.tile * TILE
    left = count_before(t.n, begin, TILE)
    first = t.tile * (TILE // 4)
    codes_ptr = t.static_ptr.to(tl.pointer_type(tl.uint32)) + first
    used = (left + BLOCK - 1) // BLOCK * BLOCK
    w = tl.arange(0, ROWS) * (LOW // 4)
    words = ()
    for k in tl.static_range(0, LOW // 4, 4):
        i = (w + k)[:, None] + tl.arange(0, 4)[None, :]
        if MASKED:
            four = tl.load(codes_ptr + i, mask=i * 4 < used, other=0)
        else:
            four = tl.load(codes_ptr + i)
        words = words + to_columns(four, ROWS, 4, 2)
    total = tl.zeros([], tl.uint64)
    if L.sums:
        terms = weigh(words[0], first + w)
        for k in tl.static_range(1, LOW // 4):
            terms += weigh(words[k], first + w + k)
        total += tl.sum(terms, 0)
    bad = w.to(tl.uint32) * 0
    found = bad
    for k in tl.static_range(LOW // 4):
        if (TRANSFORM == _NONE) and MASKED:
            # Behind the codes of elements is padding, which is checked with the rest of it.
            seen = _first_bytes(words[k], left - (w + k) * 4)
        else:
            seen = words[k]
        bad |= _bad_codes(seen, MAN)
        found |= seen
    bad = (bad != 0).to(tl.int32)
    found = (found != 0).to(tl.int32)
    if LINES != HIGH:
        bad = spread(tl.max(tl.reshape(bad, [BLOCKS, HIGH]), 1), BLOCKS, LINES)
        found = spread(tl.max(tl.reshape(found, [BLOCKS, HIGH]), 1), BLOCKS, LINES)
    scales_ptr = (t.static_ptr + t.at * 128).to(tl.pointer_type(tl.uint32))
    line = tl.arange(0, BLOCKS * LINES)
    edge = line // LINES * BLOCK
    block = t.tile * BLOCKS + line // LINES
    if MASKED:
        here = edge < left
        wanted = here & (edge < count_before(hi, begin, TILE))
        wanted = wanted & (edge + BLOCK > count_before(lo, begin, TILE))
    else:
        here = line >= 0
        wanted = here
    own = here & (line % LINES == 0)
    where = t.at * 32 + block * WORDS
    if WORDS == 2:
        a = tl.load(scales_ptr + block * 2, mask=here, other=_ONE)
        m = tl.load(scales_ptr + block * 2 + 1, mask=here, other=_ONE)
        if L.sums:
            terms = weigh(a, where) + weigh(m, where + 1)
            total += tl.sum(tl.where(own, terms, 0), 0)
        lost = m == _NAN_SCALE
        good = _within(a, _ALPHA_LOW, _ALPHA_HIGH) & _within(m, _SCALE_LOW, _SCALE_HIGH)
        half_lost = lost & (a != _NAN_SCALE)
        a = tl.where(good, a, _ONE).to(tl.float32, bitcast=True)
        m = tl.where(good, m, _ONE).to(tl.float32, bitcast=True)
        m = tl.div_rn(m, a).to(tl.uint32, bitcast=True)
        good = (good & _within(m, _MERGED_LOW, _MERGED_HIGH)) | (lost & (half_lost == 0))
    else:
        m = tl.load(scales_ptr + block, mask=here, other=_ONE)
        if L.sums:
            total += tl.sum(tl.where(own, weigh(m, where), 0), 0)
        lost = m == _NAN_SCALE
        good = _within(m, _MERGED_LOW, _MERGED_HIGH) | lost
    m = tl.where(_within(m, _MERGED_LOW, _MERGED_HIGH), m, _ONE).to(tl.float32, bitcast=True)
    wrong = wanted & ((good == 0) | (tl.where(lost, found, bad) != 0))
    y = ()
    if STORE:
        v = ()
        for k in tl.static_range(LOW // 4):
            v = v + _values(words[k], MAN, L.cvt)
        if TRANSFORM != _NONE:
            v = butterflies(v, LOW, LOG_LOW)
            if TURNED:
                v = butterflies(transpose(v, BLOCKS, LOG_LOW, 0, LOG_HIGH), HIGH, LOG_HIGH)
        nan = tl.full([], _NAN_SCALE, tl.uint32).to(tl.float32, bitcast=True)
        c = tl.where(lost, nan, m * F.norm)
        for k in tl.static_range(len(v)):
            y = y + (v[k] * c,)
    return y, lost, wrong, total


@triton.jit
def _unpack(t, lo, hi, F: tl.constexpr, L: tl.constexpr, MASKED: tl.constexpr):
    """Values of a tile's rows, NaN where lost; see `_unpack_lines`."""
    y, _, wrong, total = _unpack_lines(t, lo, hi, True, F, L, MASKED)
    if F.turned:
        y = transpose(y, L.rows >> F.log_high, F.log_high, 0, F.log_low)
    return y, wrong, total


@triton.jit
def _transpose_halves(a, b, PTX: tl.constexpr):
    """Words of the lower and of the upper halves of `a` and `b`."""
    if PTX:
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
def _in_order(y, lost, F: tl.constexpr, L: tl.constexpr):
    """What `_unpack_lines` gives, as element bits in the order of memory.

    Returns words, four and four of which lie side by side, 16 bytes; and for each four the number
    of the first element.
    """
    EXP: tl.constexpr = L.exponent
    LOG_LOW: tl.constexpr = F.log_low
    LOG_HIGH: tl.constexpr = F.log_high
    LOW: tl.constexpr = 1 << LOG_LOW
    ROWS: tl.constexpr = L.rows
    BLOCKS: tl.constexpr = ROWS >> LOG_HIGH
    TILE: tl.constexpr = ROWS << LOG_LOW
    words = element_words(y, lost, EXP, 4, L.cvt) if L.item == 4 else ()
    places = ()
    if not F.turned:
        if L.item == 2:
            words = element_words(y, lost, EXP, 2, L.cvt)
        for k in tl.static_range(0, LOW, 16 // L.item):
            places = places + (tl.arange(0, ROWS) * LOW + k,)
    elif L.item == 4:
        words = transpose(words, BLOCKS, LOG_HIGH, LOG_LOW - 2, 2)
        places = (tl.arange(0, TILE // 4) * 4,)
    else:
        # Pairs that are half a block apart change hands, eight neighbours to a thread.
        HALF: tl.constexpr = 1 << (LOG_HIGH - 1)
        pairs = ()
        for k in tl.static_range(HALF):
            pairs = pairs + (narrow_pair(y[k], y[k + HALF], lost, EXP, L.cvt),)
        pairs = transpose(pairs, BLOCKS, LOG_HIGH - 1, LOG_LOW - 3, 3)
        upper = ()
        for k in tl.static_range(0, 8, 2):
            low, high = _transpose_halves(pairs[k], pairs[k + 1], L.ptx)
            words = words + (low,)
            upper = upper + (high,)
        words = words + upper
        STEP: tl.constexpr = 1 << (LOG_LOW + LOG_HIGH - 4)
        p = tl.arange(0, TILE // 16)
        place = p // STEP * (16 * STEP) + p % STEP * 8
        places = (place, place + 8 * STEP)
    return words, places


@triton.jit
def _store_four(out_ptr, words, place, to, lo, hi, L: tl.constexpr, MASKED: tl.constexpr):
    """Store or add the elements of four words, the first of them number `place` of the tile.

    Element `i` goes to `to + i`; MASKED: if it is in [lo, hi).
    """
    if (MASKED == 0) and (L.x_item == 0):
        i = (place * L.item // 4)[:, None] + tl.arange(0, 4)[None, :]
        out = (out_ptr + to * L.item).to(tl.pointer_type(tl.uint32))
        tl.store(out + i, from_columns(words, 4, 2))
    else:
        bits = words
        if L.item == 2:
            bits = ()
            for k in tl.static_range(4):
                bits = bits + (words[k] & 0xFFFF, words[k] >> 16)
        LOG: tl.constexpr = 3 if (L.item == 2) and (L.x_item != 4) else 2
        for k in tl.static_range(0, len(bits), 1 << LOG):
            part = ()
            for j in tl.static_range(1 << LOG):
                part = part + (bits[k + j],)
            i = (place + k)[:, None] + tl.arange(0, 1 << LOG)[None, :]
            use = None
            if MASKED:
                use = (i >= lo) & (i < hi)
            b = from_columns(part, 1 << LOG, LOG)
            store_element(out_ptr, to + i, b, use, L.exponent, L.item, L.x_item)


@triton.jit
def _decode_tile(
    t,
    plain,
    status_ptr,
    out_ptr,
    to,
    lo,
    hi,
    F: tl.constexpr,
    L: tl.constexpr,
    UNPACK: tl.constexpr,
    MASKED: tl.constexpr,
):
    """As `tiles_triton.unpack_tile`: elements change hands once they are rounded, which is less."""
    y, lost, wrong, total = _unpack_lines(t, lo, hi, L.store, F, L, MASKED)
    report_any(status_ptr, CHUNK + (t.chunk << 8) + CHUNK_PAYLOAD, wrong)
    if L.store:
        TILE: tl.constexpr = L.rows << F.log_low
        words, places = _in_order(y, lost, F, L)
        begin = t.tile * TILE
        to += begin
        lo, hi = count_before(lo, begin, TILE), count_before(hi, begin, TILE)
        for k in tl.static_range(len(places)):
            four = (words[4 * k], words[4 * k + 1], words[4 * k + 2], words[4 * k + 3])
            _store_four(out_ptr, four, places[k], to, lo, hi, L, MASKED)
    return total


@functools.cache
def _driver(spec: Taco) -> Driver:
    f = FORMAT_OF[spec.format]
    low = 5 if spec.block == 32 else 4
    high = spec.block.bit_length() - 1 - low
    form = Rows(
        run=1 << low,
        limited=True,
        pairs=False,
        checked=True,
        mantissa=f.mantissa,
        bias=f.bias,
        largest=float(f.largest),
        log_low=low,
        log_high=high,
        norm=norm(spec),
        transform=TRANSFORMS.index(spec.transform),
        turned=spec.transform != "none" and high > 0,
        dual=spec.scales == "dual",
    )
    wide = Tiling(_TILE >> low, _WIDE_WARPS)
    tilings = wide, wide, wide
    if spec.transform != "none":
        a, b, c = (Tiling(_TILE >> low, _WARPS, registers=most) for most in _REGISTERS)
        tilings = a, b, c
    return Driver(_pack, _unpack, no_scale, form, tilings, _decode_tile, wide)


def driver_of(plan: Plan) -> Driver:
    """The kernels of a plan."""
    return _driver(plan.codec)


encode, decode_add_encode, decode = functions(driver_of)
encode_many, decode_many, sum, encode_sum = many_functions(driver_of)
