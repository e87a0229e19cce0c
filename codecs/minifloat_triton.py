# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Triton forms of codecs/minifloat.py: codes of blocks as a tensor (blocks, words, codes per word).

Integers, but for one float addition that rounds: its operands and its sum are normal, so that it
has one result everywhere. What only few tiles need stands behind a branch of the whole program.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .device import float_of, weigh
from .minifloat import INFINITY, NAN, Element

_MAGNITUDE = tl.constexpr((1 << 31) - 1)
_HIDDEN = tl.constexpr(1 << 23)
_FRACTION = tl.constexpr((1 << 23) - 1)
_INFINITY = tl.constexpr(INFINITY)
_NAN = tl.constexpr(NAN)
#: 2^-63, which rounds to zero in every format.
_TINY = tl.constexpr(64 << 23)


def element_constants(element: Element) -> dict[str, int | bool]:
    """What kernels know of an element type, as constexprs."""
    return {
        "BITS": element.bits,
        "M": element.mantissa,
        "BIAS": element.bias,
        "TOP": element.largest,
        "INF": element.infinity,
        "NAN": element.nan,
        "INTEGER": element.is_integer,
    }


@triton.jit
def widen(v, EXP: tl.constexpr, ITEM: tl.constexpr):
    """float32 bits, int32, of element bits."""
    return float_of(v.to(tl.uint32), EXP, ITEM).to(tl.int32, bitcast=True)


@triton.jit
def split(magnitude):
    """Magnitude bits as `minifloat.split` has them, in one word."""
    below = magnitude.to(tl.float32).to(tl.int32, bitcast=True) - (149 << 23)
    return tl.where(magnitude < _HIDDEN, below, magnitude)


@triton.jit
def round_part(part, M: tl.constexpr, LOWEST: tl.constexpr):
    """Code of a magnitude, of a format with unlimited exponents; LOWEST: its least normal one."""
    part = tl.maximum(part, _TINY)
    binade = tl.maximum(part & _INFINITY, LOWEST)
    step = binade + ((23 - M) << 23)
    total = part.to(tl.float32, bitcast=True) + step.to(tl.float32, bitcast=True)
    return total.to(tl.int32, bitcast=True) - step + ((binade - LOWEST) >> (23 - M))


@triton.jit
def round_codes(
    words,
    scales,
    BITS: tl.constexpr,
    M: tl.constexpr,
    BIAS: tl.constexpr,
    TOP: tl.constexpr,
    INTEGER: tl.constexpr,
):
    """Codes, int32, of float32 bits at scale bytes; see `minifloat.round_codes`.

    `scales` broadcasts with `words`. Blocks with scale 255 have codes 0.
    """
    magnitudes = words & _MAGNITUDE
    parts = magnitudes
    if tl.min(tl.ravel(scales), 0) <= BIAS + M + 8:
        # Zero is cut to an exponent from which no scale makes the difference overflow.
        parts = tl.maximum(split(magnitudes), -(64 << 23))
    codes = tl.minimum(round_part(parts - ((scales - 127) << 23), M, (128 - BIAS) << 23), TOP)
    # Infinity and NaN make such scales, and finite values the largest of them as well.
    if tl.max(tl.ravel(scales), 0) >= 240:
        codes = tl.where(magnitudes == _INFINITY, TOP, codes)
        codes = tl.where(scales == 255, 0, codes)
        words = tl.where(scales == 255, 0, words)
    if INTEGER:
        return tl.where(words < 0, -codes, codes) & 255
    else:
        return codes | ((words >> (32 - BITS)) & (1 << (BITS - 1)))


@triton.jit
def decode_bits(
    codes,
    scales,
    BITS: tl.constexpr,
    M: tl.constexpr,
    BIAS: tl.constexpr,
    INF: tl.constexpr,
    NAN: tl.constexpr,
    INTEGER: tl.constexpr,
    EXP: tl.constexpr,
    ITEM: tl.constexpr,
):
    """Element bits, int32, of codes (int32) at scale bytes."""
    negative = codes >= (1 << (BITS - 1))
    if INTEGER:
        magnitudes = tl.where(negative, 256 - codes, codes)
        parts = magnitudes.to(tl.float32).to(tl.int32, bitcast=True) - (6 << 23)
    else:
        magnitudes = codes & ((1 << (BITS - 1)) - 1)
        below = magnitudes.to(tl.float32).to(tl.int32, bitcast=True) + ((1 - BIAS - M) * (1 << 23))
        above = (magnitudes << (23 - M)) + ((127 - BIAS) << 23)
        parts = tl.where(magnitudes < (1 << M), below, above)
    if ITEM == 2 and EXP == 5:
        offsets = tl.minimum(tl.maximum(scales - 127, -120), 60) << 23
        bits = tl.minimum(round_part(parts + offsets, 10, 113 << 23), 0x7C00)
        # The part of a zero is far below the others only in the range of the offset.
        bits = tl.where(magnitudes == 0, 0, bits)
    else:
        bits = tl.where(magnitudes == 0, 0, parts + ((scales - 127) << 23))
        if ITEM == 2:
            bits = bits >> 16
        least = tl.min(tl.ravel(scales), 0)
        most = tl.max(tl.ravel(scales), 0)
        if (least < 17) | (most > 237):
            bits = tl.where(magnitudes == 0, 0, _extreme(parts, scales, 7 if ITEM == 2 else 23))
    infinity = 0x7C00 if EXP == 5 else (0x7F80 if ITEM == 2 else _INFINITY)
    quiet = 0x7E00 if EXP == 5 else (0x7FC0 if ITEM == 2 else _NAN)
    if INF < 256:
        bits = tl.where(magnitudes >= INF, infinity, bits)
    bits = bits | (negative.to(tl.int32) << (8 * ITEM - 1))
    if NAN < 256:
        bits = tl.where(magnitudes >= NAN, quiet, bits)
    return tl.where(scales == 255, quiet, bits)


@triton.jit
def _extreme(parts, scales, M: tl.constexpr):
    """Values that may be subnormal or infinite, as bfloat16 (M = 7) or float32 (23)."""
    above = tl.minimum((parts >> 23) + scales - 128, 255)
    shift = tl.minimum(23 - M - tl.minimum(above, 0), 25)
    w = (parts & _FRACTION) | _HIDDEN
    half = ((1 << shift) >> 1) - 1 + ((w >> shift) & 1)
    half = tl.where(shift > 0, half, 0)
    # In float32 base and significand stay below 2^32 as 254 << 23 is what the base is cut to.
    base = tl.minimum(tl.maximum(above, 0), 254) << M
    bits = base + ((w + half) >> shift)
    return tl.where(above >= 254, 255 << M, tl.minimum(bits, 255 << M))


@triton.jit
def pack(codes, BLOCKS: tl.constexpr, BITS: tl.constexpr, k: tl.constexpr):
    """Word `k` of the codes (int32, shape (BLOCKS, n, codes)), uint32, shape (BLOCKS, n).

    A word holds 32 / BITS codes; 16 codes of 6 bits have three words, of which `k` counts.
    """
    if BITS == 6:
        shift = 6 * tl.arange(0, 16)[None, None, :] - 32 * k
        placed = tl.where(shift < 0, codes >> tl.maximum(-shift, 0), codes << tl.maximum(shift, 0))
        placed = tl.where((shift > -6) & (shift < 32), placed, 0)
    else:
        placed = codes << (BITS * tl.arange(0, 32 // BITS)[None, None, :])
    return tl.sum(placed, 2).to(tl.uint32, bitcast=True)


@triton.jit
def unpack(
    payload,
    block,
    words,
    BLOCKS: tl.constexpr,
    GROUPS: tl.constexpr,
    BITS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """(codes, int32, shape (BLOCKS, GROUPS, codes); checksum terms) of blocks from `block` on.

    `payload` points to the first word of a payload of `words` words, at the start of a static part.
    """
    rows = block + tl.arange(0, BLOCKS)[:, None].to(tl.int64)
    groups = tl.arange(0, GROUPS)[None, :]
    if BITS == 6:
        at = rows * 6 + groups * 3
        i = tl.arange(0, 16)[None, None, :]
        a, t = _word(payload, at, words, MASKED)
        b, u = _word(payload, at + 1, words, MASKED)
        c, v = _word(payload, at + 2, words, MASKED)
        terms = t + u + v
        shift = 6 * i
        low = tl.where(
            shift < 32, a[:, :, None], tl.where(shift < 64, b[:, :, None], c[:, :, None])
        )
        next_ = tl.where(shift < 32, b[:, :, None], c[:, :, None])
        both = low.to(tl.uint64) | (next_.to(tl.uint64) << 32)
        codes = (both >> (shift & 31).to(tl.uint64)).to(tl.int32) & 63
        return codes, terms
    else:
        at = rows * GROUPS + groups
        word, terms = _word(payload, at, words, MASKED)
        shift = (BITS * tl.arange(0, 32 // BITS)[None, None, :]).to(tl.uint32)
        codes = (word[:, :, None] >> shift).to(tl.int32) & ((1 << BITS) - 1)
        return codes, terms


@triton.jit
def _word(payload, at, words, MASKED: tl.constexpr):
    """Words at positions `at`, and their checksum terms."""
    if MASKED:
        word = tl.load(payload + at, mask=at < words, other=0)
    else:
        word = tl.load(payload + at)
    return word, tl.sum(tl.sum(weigh(word, at), 1), 0)


@triton.jit
def store_words(
    payload,
    codes,
    block,
    words,
    BLOCKS: tl.constexpr,
    GROUPS: tl.constexpr,
    BITS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Store packed codes, as `unpack` loads them; gives their checksum terms."""
    rows = block + tl.arange(0, BLOCKS)[:, None].to(tl.int64)
    groups = tl.arange(0, GROUPS)[None, :]
    total = tl.zeros([], tl.uint64)
    for k in tl.static_range(3 if BITS == 6 else 1):
        word = pack(codes, BLOCKS, BITS, k)
        at = rows * (3 * GROUPS if BITS == 6 else GROUPS)
        at = at + groups * (3 if BITS == 6 else 1) + k
        if MASKED:
            tl.store(payload + at, word, mask=at < words)
        else:
            tl.store(payload + at, word)
        total += tl.sum(tl.sum(weigh(word, at), 1), 0)
    return total
