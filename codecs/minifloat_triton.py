# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Triton forms of codecs/minifloat.py: codes of blocks as a tensor (blocks, words, codes per word).

Integers, but for one float addition that rounds: its operands and its sum are normal, so that it
has one result everywhere. What only few tiles need stands behind a branch of the whole program.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from ..formats.checksum import identity_term
from .base import Plan
from .device import (
    CHUNK,
    CHUNK_PADDING,
    CHUNK_PAYLOAD,
    CHUNK_SUM,
    FLAGS,
    HEADER_WORDS,
    OVERFLOWED,
    RECORD,
    Variant,
    check_header,
    float_of,
    header_words,
    kernel,
    match_header,
    options,
    padding_of,
    record_term,
    report,
    touched,
    weigh,
)
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
def elements_at(ptr, ITEM: tl.constexpr):
    """A pointer to bytes as one to element bits of ITEM bytes."""
    return ptr.to(tl.pointer_type(tl.uint16 if ITEM == 2 else tl.uint32))


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
def narrow(value, EXP: tl.constexpr, ITEM: tl.constexpr):
    """Element bits, uint32, nearest to float32 values; every NaN is the quiet, positive one."""
    bits = value.to(tl.int32, bitcast=True)
    magnitudes = bits & 0x7FFFFFFF
    nan = magnitudes > _INFINITY
    if ITEM == 4:
        found = tl.where(nan, _NAN, bits)
    elif EXP == 8:
        wide = bits.to(tl.uint32, bitcast=True)
        rounded = (wide + 0x7FFF + ((wide >> 16) & 1)) >> 16
        found = tl.where(nan, 0x7FC0, rounded.to(tl.int32))
    else:
        low = round_part(tl.minimum(magnitudes, 150 << 23), 10, 113 << 23)
        found = tl.minimum(low, 0x7C00) | ((bits >> 16) & 0x8000)
        found = tl.where(nan, 0x7E00, found)
    return found.to(tl.uint32, bitcast=True)


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
    start: tl.int64,
    stop: tl.int64,
    first_chunk: tl.int32,
    first_whole: tl.int32,
    end_whole: tl.int32,
    identity: tl.uint64,
    nelem: tl.int64,
    chunk_nelem: tl.int64,
    chunks: tl.int32,
    head: tl.int32,
    static_at: tl.int64,
    static_stride: tl.int64,
    scales_at: tl.int64,
    planned: tl.int32,
    summed: tl.int32,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    HEAD: tl.constexpr,
    SUMS: tl.constexpr,
):
    """A chunk's record and last code; if it was decoded whole its padding and checksum.

    Before the scales lie HEAD bytes: a float32, which must be positive and finite, and zeros.
    """
    chunk = first_chunk + tl.program_id(0)
    first = chunk.to(tl.int64) * chunk_nelem
    n = tl.maximum(tl.minimum(chunk_nelem, nelem - first), 0)
    record = src_ptr.to(tl.pointer_type(tl.int64)) + head + chunk.to(tl.int64) * 4
    both = tl.load(record + 2)
    where = chunk.to(tl.int64) << 8
    # fmt: off
    if (planned != 0) & (chunk == first_chunk):
        check_header(
            src_ptr, status_ptr, head, chunks, static_at,
            h0, h1, h2, h3, h4, h5, h6, h7, h8, h9, h10, h11,
        )
    # fmt: on
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
    static_ptr = src_ptr + (static_at + chunk.to(tl.int64) * static_stride) * 128
    used = (n * BITS + 7) // 8
    if BITS < 8:
        if (n > 0) & (first + n > start) & (first + n <= stop):
            behind = tl.load(static_ptr + used - 1).to(tl.int32) >> (((n * BITS - 1) & 7) + 1)
            if behind != 0:
                report(status_ptr, CHUNK + where + CHUNK_PAYLOAD)
    scales_ptr = static_ptr + scales_at * 128
    if HEAD > 0:
        g = tl.load(scales_ptr.to(tl.pointer_type(tl.int32)))
        if (g <= 0) | (g >= _INFINITY):
            report(status_ptr, CHUNK + where + CHUNK_PAYLOAD)
    if (chunk >= first_whole) & (chunk < end_whole):
        # The words of codes are summed already, with what pads the last of them.
        words_end = (n * BITS + 31) // 32 * 4
        _, last = padding_of(static_ptr, used, words_end)
        total, padding = padding_of(static_ptr, words_end, scales_at * 128)
        scales_end = scales_at * 128 + HEAD + (n + BLOCK - 1) // BLOCK
        more, behind_scales = padding_of(static_ptr, scales_end, static_stride * 128)
        padding |= last | behind_scales
        if HEAD > 0:
            head_at = scales_at * 128
            first_word, _ = padding_of(static_ptr, head_at, head_at + 4)
            behind, inside = padding_of(static_ptr, head_at + 4, head_at + HEAD)
            more += first_word + behind
            padding |= inside
        if padding != 0:
            report(status_ptr, CHUNK + where + CHUNK_PADDING)
        if SUMS:
            total += more + tl.load(sums_ptr + chunk).to(tl.uint64, bitcast=True) + identity
            total += record_term(n, n * 0, both & 0xFFFFFFFF, both >> 32)
            if total != tl.load(record).to(tl.uint64, bitcast=True):
                report(status_ptr, CHUNK + where + CHUNK_SUM)


def aligned_for(plan: Plan, tensor: torch.Tensor, start: int = 0) -> bool:
    """Whether every chunk's elements start at a multiple of 16 bytes of `tensor`."""
    even = plan.chunks == 1 or plan.chunk_nelem % 16 == 0
    return even and start % 16 == 0 and tensor.data_ptr() % 16 == 0


@functools.cache
def _check_variant(bits: int, block: int, head: int, sums: bool) -> Variant:
    return Variant(_check_kernel, options(1), BITS=bits, BLOCK=block, HEAD=head, SUMS=sums)


def check_chunks(
    plan: Plan, src, scratch, status, start, stop, check, sums, planned, bits, block, head=0
) -> None:
    """Check the chunks that elements `start` to `stop` lie in, after they were decoded.

    `bits` are those of a code, `head` the bytes before the scales of blocks of `block` elements.
    """
    first, end, first_whole, end_whole = touched(plan, start, stop)
    if not check:
        end_whole = first_whole
    header = header_words(plan)
    _check_variant(bits, block, head, sums).launch(
        end - first,
        (src, scratch, status),
        *header[:HEADER_WORDS],
        start,
        stop,
        first,
        first_whole,
        end_whole,
        identity_term(plan.codec.id, plan.codec.version, plan.dtype.id, 0),
        plan.nelem,
        plan.chunk_nelem,
        plan.chunks,
        plan.header.nbytes // 8,
        plan.static_offset // 128,
        plan.static_stride // 128,
        plan.layout.sections[0].nbytes // 128,
        int(planned),
        int(plan.checksum),
    )
    if planned:
        match_header(plan, src, status, header)
