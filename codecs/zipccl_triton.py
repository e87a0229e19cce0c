# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment,misc"
"""zipccl on a GPU: one program per tile, one pass over the tensor each way. specs/zipccl.md.

Encoding is two kernels. The first reads every tile once, chooses its window, writes its block and
lists its escapes in a scratch slot; the second, small, knows all counts, so it closes the escapes
up, writes the index and the records, and stores raw the chunks that did not shrink. Decoding is one
kernel, and a small one behind it where checksums are verified.

A lane holds four neighbouring columns: exponents, codes and plane bits of four elements share one
32-bit word, a byte each, and arithmetic works on all four at once.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from ..formats.dtypes import DType
from .common.base import Plan
from .common.frame_triton import (
    CHUNK,
    CHUNK_PAYLOAD,
    accumulator,
    add_to,
    check_header,
    check_record,
    check_whole,
    chunk_kind,
    clear,
    float_of,
    frame_of,
    gaps_of,
    key_ahead,
    key_of,
    padding_of,
    record_term,
    report,
    static_of,
    store_element,
    touched,
    weigh,
    weigh_bytes,
    weigh_from,
)
from .common.launch_triton import PTX, Variant, kernel, options
from .zipccl import (
    COLUMNS,
    SIGMA_FACTOR,
    TILE,
    Zipccl,
    fields_of,
    scratch_layout,
    tile_count,
)

_ONES = tl.constexpr(0x01010101)
_LOW7 = tl.constexpr(0x7F7F7F7F)
_HIGH = tl.constexpr(0x80808080)
_LANES = tl.constexpr(COLUMNS // 4)
_COLUMNS = tl.constexpr(COLUMNS)
_TILE = tl.constexpr(TILE)
SIGMA_F = tl.constexpr(SIGMA_FACTOR)


@triton.jit
def _popc(x, PTX: tl.constexpr):
    if PTX:
        return tl.inline_asm_elementwise(
            "popc.b32 $0, $1;", "=r,r", [x], dtype=tl.uint32, is_pure=True, pack=1
        )
    else:
        x = x - ((x >> 1) & 0x55555555)
        x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
        x = (x + (x >> 4)) & 0x0F0F0F0F
        return (x * _ONES) >> 24


@triton.jit
def _even(a, b, PTX: tl.constexpr):
    """Bytes 0 and 2 of a, then of b."""
    if PTX:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x6420;", "=r,r,r", [a, b], dtype=tl.uint32, is_pure=True, pack=1
        )
    else:
        low = (a & 0xFF) | ((a >> 8) & 0xFF00)
        return low | ((b & 0xFF) << 16) | ((b << 8) & 0xFF000000)


@triton.jit
def _odd(a, b, PTX: tl.constexpr):
    """Bytes 1 and 3 of a, then of b."""
    if PTX:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x7531;", "=r,r,r", [a, b], dtype=tl.uint32, is_pure=True, pack=1
        )
    else:
        return _even(a >> 8, b >> 8, PTX)


@triton.jit
def _zip_low(a, b, PTX: tl.constexpr):
    """Bytes a0 b0 a1 b1."""
    if PTX:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x5140;", "=r,r,r", [a, b], dtype=tl.uint32, is_pure=True, pack=1
        )
    else:
        return (a & 0xFF) | ((b & 0xFF) << 8) | ((a & 0xFF00) << 8) | ((b & 0xFF00) << 16)


@triton.jit
def _zip_high(a, b, PTX: tl.constexpr):
    """Bytes a2 b2 a3 b3."""
    if PTX:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x7362;", "=r,r,r", [a, b], dtype=tl.uint32, is_pure=True, pack=1
        )
    else:
        return _zip_low(a >> 16, b >> 16, PTX)


@triton.jit
def _lanes():
    """Lane numbers. The hint keeps every access to one lane per thread, so that all tensors have
    one layout and no value changes hands between threads.
    """
    return tl.max_contiguous(tl.arange(0, _LANES), 1)


@triton.jit
def _load4(x_ptr, at, ok, ITEM: tl.constexpr):
    """Four elements from element `at`, one by one: (head words a, b, low halves as u64).

    Head words hold the top 16 bits of each element, two to a word; 8-bit elements are all in a.
    """
    if ITEM == 1:
        x = x_ptr.to(tl.pointer_type(tl.uint8))
    elif ITEM == 2:
        x = x_ptr.to(tl.pointer_type(tl.uint16))
    else:
        x = x_ptr.to(tl.pointer_type(tl.uint32))
    v0 = tl.load(x + at, mask=ok > 0, other=0).to(tl.uint32)
    v1 = tl.load(x + at + 1, mask=ok > 1, other=0).to(tl.uint32)
    v2 = tl.load(x + at + 2, mask=ok > 2, other=0).to(tl.uint32)
    v3 = tl.load(x + at + 3, mask=ok > 3, other=0).to(tl.uint32)
    return _heads(v0, v1, v2, v3, ITEM)


@triton.jit
def _heads(v0, v1, v2, v3, ITEM: tl.constexpr):
    if ITEM == 1:
        a = v0 | (v1 << 8) | (v2 << 16) | (v3 << 24)
        return a, a, a.to(tl.uint64)
    elif ITEM == 2:
        a = v0 | (v1 << 16)
        return a, v2 | (v3 << 16), a.to(tl.uint64)
    else:
        low = ((v0 & 0xFFFF) | (v1 << 16)).to(tl.uint64)
        low |= ((v2 & 0xFFFF) | (v3 << 16)).to(tl.uint64) << 32
        return (v0 >> 16) | (v1 & 0xFFFF0000), (v2 >> 16) | (v3 & 0xFFFF0000), low


@triton.jit
def _load4_aligned(x_ptr, at, ITEM: tl.constexpr):
    """As `_load4`, for all 512 elements of a row that starts at element `at`, a multiple of 4."""
    if ITEM == 1:
        a = tl.load(x_ptr.to(tl.pointer_type(tl.uint32)) + at // 4 + _lanes())
        return a, a, a.to(tl.uint64)
    elif ITEM == 2:
        v = tl.load(x_ptr.to(tl.pointer_type(tl.uint64)) + at // 4 + _lanes())
        return v.to(tl.uint32), (v >> 32).to(tl.uint32), v
    else:
        pair = tl.multiple_of(at // 2, 2)
        v = tl.load(x_ptr.to(tl.pointer_type(tl.uint64)) + pair + tl.arange(0, 2 * _LANES))
        p, q = tl.split(tl.reshape(v, [_LANES, 2]))
        return _heads(
            p.to(tl.uint32), (p >> 32).to(tl.uint32), q.to(tl.uint32), (q >> 32).to(tl.uint32), ITEM
        )


@triton.jit
def _exponents(a, b, EXP: tl.constexpr, MAN: tl.constexpr, ITEM: tl.constexpr, PTX: tl.constexpr):
    """Exponent fields of four elements, a byte each."""
    if ITEM == 1:
        return (a >> MAN) & (((1 << EXP) - 1) * _ONES)
    else:
        high = _odd(a, b, PTX)
        if EXP == 8:
            return ((high & _LOW7) << 1) | ((_even(a, b, PTX) >> 7) & _ONES)
        else:
            return (high >> 2) & 0x1F1F1F1F


@triton.jit
def _rest(a, b, EXP: tl.constexpr, MAN: tl.constexpr, ITEM: tl.constexpr, PTX: tl.constexpr):
    """(byte stream, extra bits) of sign and mantissa of four elements, a byte each."""
    if ITEM == 1:
        man: tl.constexpr = ((1 << MAN) - 1) * _ONES
        sign: tl.constexpr = (1 << MAN) * _ONES
        return a, (a & man) | ((a >> EXP) & sign)
    else:
        low = _even(a, b, PTX)
        high = _odd(a, b, PTX)
        if EXP == 8:
            return (low & _LOW7) | (high & _HIGH), low
        else:
            return low, (high & 0x03030303) | ((high >> 5) & 0x04040404)


@triton.jit
def _elements(
    e, s, x, low, EXP: tl.constexpr, MAN: tl.constexpr, ITEM: tl.constexpr, PTX: tl.constexpr
):
    """Inverse of `_exponents` and `_rest`: words v0, v1 with two 16-bit elements each.

    Of 32-bit elements v0 to v3; of 8-bit elements all in v0.
    """
    if ITEM == 1:
        man: tl.constexpr = ((1 << MAN) - 1) * _ONES
        sign: tl.constexpr = (1 << MAN) * _ONES
        v = (e << MAN) | (x & man) | ((x & sign) << EXP)
        return v, v, v, v
    else:
        if EXP == 8:
            byte0 = (s & _LOW7) | ((e << 7) & _HIGH)
            byte1 = (s & _HIGH) | ((e >> 1) & _LOW7)
        else:
            byte0 = s
            byte1 = (e << 2) | (x & 0x03030303) | ((x << 5) & _HIGH)
        a = _zip_low(byte0, byte1, PTX)
        b = _zip_high(byte0, byte1, PTX)
        if ITEM == 2:
            return a, b, a, b
        else:
            l0 = low.to(tl.uint32)
            l1 = (low >> 32).to(tl.uint32)
            v0 = (l0 & 0xFFFF) | (a << 16)
            v1 = (l0 >> 16) | (a & 0xFFFF0000)
            v2 = (l1 & 0xFFFF) | (b << 16)
            return v0, v1, v2, (l1 >> 16) | (b & 0xFFFF0000)


@triton.jit
def _sample_window(
    x_ptr, start, EXP: tl.constexpr, MAN: tl.constexpr, ITEM: tl.constexpr, PTX: tl.constexpr
):
    """Index entry of a whole tile that starts at element `start`, aligned to four elements."""
    k = _lanes()
    span = k // 4
    at = span * 32 + (span % 8) * 4 + k % 4
    if ITEM == 1:
        a = tl.load(x_ptr.to(tl.pointer_type(tl.uint32)) + start // 4 + at)
        b = a
    elif ITEM == 2:
        words = tl.load(x_ptr.to(tl.pointer_type(tl.uint64)) + start // 4 + at)
        a = words.to(tl.uint32)
        b = (words >> 32).to(tl.uint32)
    else:
        x64 = x_ptr.to(tl.pointer_type(tl.uint64)) + start // 2 + 2 * at
        left = tl.load(x64)
        right = tl.load(x64 + 1)
        a, b, _ = _heads(
            left.to(tl.uint32),
            (left >> 32).to(tl.uint32),
            right.to(tl.uint32),
            (right >> 32).to(tl.uint32),
            ITEM,
        )
    e = _exponents(a, b, EXP, MAN, ITEM, PTX)
    s0 = (e & 255).to(tl.int32)
    s1 = ((e >> 8) & 255).to(tl.int32)
    s2 = ((e >> 16) & 255).to(tl.int32)
    s3 = (e >> 24).to(tl.int32)
    top = tl.max(tl.maximum(tl.maximum(s0, s1), tl.maximum(s2, s3)), 0)
    zeros = tl.sum(
        (s0 == 0).to(tl.int32)
        + (s1 == 0).to(tl.int32)
        + (s2 == 0).to(tl.int32)
        + (s3 == 0).to(tl.int32),
        0,
    )
    best = top * 0 - 1
    entry = top * 0
    steps = top * 0
    while steps < 16:
        base = tl.maximum(top - 6, 0)
        # Three counts of at most 512 in one word: coded, equal to the base, below the top.
        c = tl.zeros([_LANES], tl.int32)
        h = tl.zeros([_LANES], tl.int32)
        for q in tl.static_range(4):
            if q == 0:
                v = s0
            elif q == 1:
                v = s1
            elif q == 2:
                v = s2
            else:
                v = s3
            d = v - base
            under = v < top
            c += ((d >= 0) & (d < 7)).to(tl.int32) + ((d == 0).to(tl.int32) << 10)
            c += under.to(tl.int32) << 20
            h = tl.maximum(h, tl.where(under, v, 0))
        total = tl.sum(c, 0)
        gain = tl.where(base > 0, zeros - ((total >> 10) & 1023), 0)
        coded = (total & 1023) + tl.maximum(gain, 0)
        entry = tl.where(coded > best, base | tl.where(gain > 0, 32768, 0), entry)
        best = tl.maximum(best, coded)
        steps = tl.where((total >> 20) <= best, 16, steps + 1)
        top = tl.max(h, 0)
    return entry


@triton.jit
def _histogram_window(
    x_ptr, start, valid, EXP: tl.constexpr, MAN: tl.constexpr, ITEM: tl.constexpr
):
    """Index entry of any tile of `valid` elements, at any address."""
    if ITEM == 1:
        x = x_ptr.to(tl.pointer_type(tl.uint8)) + start
    elif ITEM == 2:
        x = x_ptr.to(tl.pointer_type(tl.uint16)) + start
    else:
        x = x_ptr.to(tl.pointer_type(tl.uint32)) + start
    BINS: tl.constexpr = 1 << EXP
    bins = tl.arange(0, BINS)
    h = tl.zeros([BINS], tl.int32)
    left_out = valid * 0
    for row in range(0, 8):
        i = row * _COLUMNS + tl.arange(0, _COLUMNS)
        use = (i < valid) & (tl.where(valid < _TILE, 0, ((i >> 4) ^ (i >> 7)) & 7) == 0)
        v = tl.load(x + i, mask=use, other=0).to(tl.int32)
        h += tl.histogram((v >> MAN) & (BINS - 1), BINS)
        left_out += tl.sum((use == 0).to(tl.int32), 0)
    h -= tl.where(bins == 0, left_out, 0)
    zeros = tl.sum(tl.where(bins == 0, h, 0), 0)
    top = tl.max(tl.where(h > 0, bins, 0), 0)
    best = top * 0 - 1
    entry = top * 0
    steps = top * 0
    while steps < 16:
        base = tl.maximum(top - 6, 0)
        coded = tl.sum(tl.where((bins >= base) & (bins < base + 7), h, 0), 0)
        at_base = tl.sum(tl.where(bins == base, h, 0), 0)
        gain = tl.where(base > 0, zeros - at_base, 0)
        coded += tl.maximum(gain, 0)
        entry = tl.where(coded > best, base | tl.where(gain > 0, 32768, 0), entry)
        best = tl.maximum(best, coded)
        below = tl.sum(tl.where(bins < top, h, 0), 0)
        steps = tl.where(below <= best, 16, steps + 1)
        top = tl.max(tl.where((bins < top) & (h > 0), bins, 0), 0)
    return entry


@triton.jit
def _load(ptr, inside):
    if inside is None:
        return tl.load(ptr)
    else:
        return tl.load(ptr, mask=inside, other=0)


@triton.jit
def _terms(v, key, ahead, inside):
    """Checksum terms of words that lie `ahead` words behind those that `key` belongs to."""
    term = v.to(tl.uint64) * key_ahead(key, ahead).to(tl.uint64)
    if inside is not None:
        term = tl.where(inside, term, 0)
    return term


@triton.jit
def _terms64(v, key2, ahead, inside):
    """Checksum terms of pairs of words."""
    low = v.to(tl.uint32).to(tl.uint64) * key_ahead(key2, ahead).to(tl.uint64)
    term = low + (v >> 32) * key_ahead(key2, ahead + 1).to(tl.uint64)
    if inside is not None:
        term = tl.where(inside, term, 0)
    return term


@triton.jit
def _load_rows(x_ptr, start, valid, cols, FULL: tl.constexpr, ITEM: tl.constexpr):
    """The rows of a tile as `_load4` gives them, and how many elements of each lane are real."""
    lane = _lanes()
    rows = ()
    for r in tl.static_range(8):
        if FULL:
            a, b, low = _load4_aligned(x_ptr, start + r * _COLUMNS, ITEM)
            ok = lane
        else:
            i = r * cols + 4 * lane
            ok = tl.where(4 * lane < cols, tl.minimum(tl.maximum(valid - i, 0), 4), 0)
            a, b, low = _load4(x_ptr, start + i, ok, ITEM)
        rows = rows + ((a, b, low, ok),)
    return rows


@triton.jit
def _encode_tile(
    rows,
    cols,
    block_ptr,
    slot_ptr,
    entry,
    word,
    FULL: tl.constexpr,
    EXP: tl.constexpr,
    MAN: tl.constexpr,
    ITEM: tl.constexpr,
    SLOT: tl.constexpr,
    SUMS: tl.constexpr,
    PTX: tl.constexpr,
):
    """Write one tile's block, and its escapes to its slot: (escapes, checksum terms).

    `word` is the block's position in the static part in words. FULL: 4096 elements, aligned.
    """
    lane = _lanes()
    zero_mode = entry >= 32768
    base = (entry & 32767).to(tl.uint32)
    b4 = base * _ONES
    b7 = b4 & _LOW7
    nb = ~b4
    EXTRA: tl.constexpr = (1 + MAN) % 8
    if FULL:
        W: tl.constexpr = _COLUMNS
        inside = None
    else:
        W = cols
        inside = 4 * lane < W
    row_words = W // 4
    block32 = block_ptr.to(tl.pointer_type(tl.uint32))
    block64 = block_ptr.to(tl.pointer_type(tl.uint64))
    BYTES: tl.constexpr = 4 if ITEM == 4 else 0
    at = BYTES * W
    total = tl.zeros([_LANES], tl.uint64)
    key = key_of(word + lane)
    key2 = key_of(word + 2 * lane)
    es = ()
    xs = ()
    for r in tl.static_range(8):
        a, b, low, ok = rows[r]
        e = _exponents(a, b, EXP, MAN, ITEM, PTX)
        s, x = _rest(a, b, EXP, MAN, ITEM, PTX)
        if not FULL:
            # Padding elements have exponent base + 6; their other bits were loaded as zeros.
            real = tl.where(ok > 0, 0xFF, 0) | tl.where(ok > 1, 0xFF00, 0)
            real = (real | tl.where(ok > 2, 0xFF0000, 0)).to(tl.uint32)
            real |= tl.where(ok > 3, 0xFF, 0).to(tl.uint32) << 24
            e = (e & real) | (((base + 6) * _ONES) & ~real)
        k = r * row_words + lane
        if ITEM == 4:
            tl.store(block64 + k, low, mask=inside)
            if SUMS:
                total += _terms64(low, key2, 2 * r * row_words, inside)
        if ITEM >= 2:
            tl.store(block32 + at + k, s, mask=inside)
            if SUMS:
                total += _terms(s, key, at + r * row_words, inside)
        es = es + (e,)
        xs = xs + (x,)
    if ITEM >= 2:
        at += 2 * W
    f = tl.zeros([_LANES], tl.uint32)
    p0 = f
    p1 = f
    p2 = f
    if zero_mode:
        for r in tl.static_range(8):
            e = es[r]
            d = ((e | _HIGH) - b7) ^ ((e ^ nb) & _HIGH)
            escaped = ((((d & _LOW7) + 0x79797979) | d) >> 7) & _ONES
            nonzero = ((((e & _LOW7) + _LOW7) | e) >> 7) & _ONES
            above = ((((d & _LOW7) + _LOW7) | d) >> 7) & _ONES
            f |= ((escaped | (above ^ _ONES)) & nonzero) << r
            code = (e & (nonzero * 255)) | (b4 & ~(nonzero * 255))
            p0 |= (code & _ONES) << r
            p1 |= ((code >> 1) & _ONES) << r
            p2 |= ((code >> 2) & _ONES) << r
    else:
        for r in tl.static_range(8):
            e = es[r]
            d = ((e | _HIGH) - b7) ^ ((e ^ nb) & _HIGH)
            f |= (((((d & _LOW7) + 0x79797979) | d) >> 7) & _ONES) << r
            p0 |= (e & _ONES) << r
            p1 |= ((e >> 1) & _ONES) << r
            p2 |= ((e >> 2) & _ONES) << r
    if not FULL:
        f = tl.where(inside, f, 0)
    n = _popc(f, PTX).to(tl.int32)
    count = tl.sum(n, 0)
    free = (base + 7) & 7
    for k in tl.static_range(3 + EXTRA):
        if k < 3:
            if k == 0:
                plane = p0
            elif k == 1:
                plane = p1
            else:
                plane = p2
            plane = (plane & ~f) | (f & (0 - ((free >> k) & 1)))
        else:
            plane = tl.zeros([_LANES], tl.uint32)
            for r in tl.static_range(8):
                plane |= ((xs[r] >> (k - 3)) & _ONES) << r
        i = at + k * row_words + lane
        tl.store(block32 + i, plane, mask=inside)
        if SUMS:
            total += _terms(plane, key, at + k * row_words, inside)
    if count <= SLOT:
        pos = tl.cumsum(n, 0) - n
        left = tl.max(n, 0)
        while left > 0:
            bit = _popc((f & (0 - f)) - 1, PTX)
            row = bit & 7
            value = tl.where(row == 0, es[0], 0)
            for r in tl.static_range(1, 8):
                value |= tl.where(row == r, es[r], 0)
            tl.store(slot_ptr + pos, (value >> (bit & 24)).to(tl.uint8), mask=f != 0)
            pos += 1
            f = f & (f - 1)
            left -= 1
    return count, tl.sum(total, 0)


@kernel
def _encode_kernel(
    x_ptr,
    out_ptr,
    scratch_ptr,
    stats_ptr,
    nelem: tl.int64,
    chunk_nelem: tl.int64,
    tiles: tl.int32,
    groups: tl.int32,
    shift: tl.int32,
    static_at: tl.int64,
    static_stride: tl.int64,
    index_at: tl.int64,
    totals_at: tl.int64,
    counts_at: tl.int64,
    slots_at: tl.int64,
    fixed: tl.int32,
    EXP: tl.constexpr,
    ITEM: tl.constexpr,
    SLOT: tl.constexpr,
    STATS: tl.constexpr,
    SUMS: tl.constexpr,
    MODE: tl.constexpr,
    PTX: tl.constexpr,
):
    """One tile: its block, window, escape count and escapes. Offsets `*_at` are in 128 bytes.

    MODE 0: whole tiles at aligned addresses; 1: each chunk's partial tile; 2: any tile.
    """
    MAN: tl.constexpr = 8 * ITEM - 1 - EXP
    BLOCK: tl.constexpr = _COLUMNS * (MAN + 4)
    pid = tl.program_id(0)
    if MODE == 1:
        chunk = pid
    else:
        chunk = pid // tiles
    first = chunk.to(tl.int64) * chunk_nelem
    n = tl.maximum(tl.minimum(chunk_nelem, nelem - first), 0)
    if MODE == 1:
        tile = (n // _TILE).to(tl.int32)
        limit = (n + _TILE - 1) // _TILE
    else:
        tile = pid % tiles
        if MODE == 0:
            limit = n // _TILE
        else:
            limit = (n + _TILE - 1) // _TILE
    if tile < limit:
        tiles_here = (n + _TILE - 1) // _TILE
        lin = chunk.to(tl.int64) * tiles + tile
        static_ptr = out_ptr + (static_at + chunk.to(tl.int64) * static_stride) * 128
        start = first + tile.to(tl.int64) * _TILE
        slot_ptr = scratch_ptr + slots_at * 128 + lin * SLOT
        block_ptr = static_ptr + tile.to(tl.int64) * BLOCK
        word = tile * (BLOCK // 4)
        valid = tl.minimum(n - tile.to(tl.int64) * _TILE, _TILE).to(tl.int32)
        cols = (valid + 127) // 128 * 16
        # Loads first: no later load may pass a store, and the window is found while they travel.
        rows = _load_rows(x_ptr, start, valid, cols, MODE == 0, ITEM)
        if STATS == 1:
            entry = tl.load(stats_ptr).to(tl.int32)
            entry = tl.minimum(tl.maximum(entry, 0), (1 << EXP) - 7)
        elif STATS == 2:
            entry = fixed
        elif MODE == 0:
            entry = _sample_window(x_ptr, start, EXP, MAN, ITEM, PTX)
        else:
            entry = _histogram_window(x_ptr, start, valid, EXP, MAN, ITEM)
        count, total = _encode_tile(
            rows,
            cols,
            block_ptr,
            slot_ptr,
            entry,
            word,
            MODE == 0,
            EXP,
            MAN,
            ITEM,
            SLOT,
            SUMS,
            PTX,
        )
        entry_at = (index_at * 128 + 4 * tiles_here) // 2 + tile
        tl.store(static_ptr.to(tl.pointer_type(tl.uint16)) + entry_at, entry.to(tl.uint16))
        group = chunk * groups + (tile >> shift)
        totals = (scratch_ptr + totals_at * 128).to(tl.pointer_type(tl.int32))
        tl.atomic_add(totals + group, count, sem="relaxed")
        counts = (scratch_ptr + counts_at * 128).to(tl.pointer_type(tl.uint16))
        tl.store(counts + lin, count.to(tl.uint16))
        if SUMS:
            total += weigh_bytes(entry, entry_at * 2)
            tl.atomic_add(
                scratch_ptr.to(tl.pointer_type(tl.int64)) + group,
                total.to(tl.int64, bitcast=True),
                sem="relaxed",
            )


@triton.jit
def _list_escapes(
    x_ptr,
    start,
    valid,
    entry,
    dynamic_ptr,
    at,
    capacity,
    word,
    EXP: tl.constexpr,
    MAN: tl.constexpr,
    ITEM: tl.constexpr,
    SUMS: tl.constexpr,
    PTX: tl.constexpr,
):
    """List the escapes of a tile that has too many for a slot; returns their checksum terms.

    A lane is one column here: neighbouring lanes then write to neighbouring places. Escapes are
    told from the elements alone, so that a tile costs one trip to memory.
    """
    column = tl.max_contiguous(tl.arange(0, _COLUMNS), 1)
    cols = (valid + 127) // 128 * 16
    if ITEM == 1:
        x = x_ptr.to(tl.pointer_type(tl.uint8)) + start
    elif ITEM == 2:
        x = x_ptr.to(tl.pointer_type(tl.uint16)) + start
    else:
        x = x_ptr.to(tl.pointer_type(tl.uint32)) + start
    zero_mode = (entry >> 15).to(tl.uint32)
    lowest = (entry & 32767).to(tl.uint32) + zero_mode
    # All loads before the stores, which they could not pass.
    es = ()
    for row in tl.static_range(8):
        i = row * cols + column
        v = tl.load(x + i, mask=(column < cols) & (i < valid), other=0).to(tl.uint32)
        es = es + ((v >> MAN) & ((1 << EXP) - 1),)
    f = tl.zeros([_COLUMNS], tl.uint32)
    for row in tl.static_range(8):
        i = row * cols + column
        escaped = (es[row] - lowest > 6 - zero_mode) & ((es[row] != 0) | (zero_mode == 0))
        f |= (escaped & (column < cols) & (i < valid)).to(tl.uint32) << row
    n = _popc(f, PTX).to(tl.int32)
    pos = tl.cumsum(n, 0) - n
    left = tl.minimum(tl.maximum(capacity - at, 0), 1 << 30).to(tl.int32)
    total = tl.zeros([_COLUMNS], tl.uint64)
    key = key_of(word + (at >> 2))
    low = (at & 3).to(tl.int32)
    for row in tl.static_range(8):
        on = ((f >> row) & 1) != 0
        tl.store(dynamic_ptr + at + pos, es[row].to(tl.uint8), mask=on & (pos < left))
        if SUMS:
            # Positions count from a word's start, so that they fit 32 bits.
            term = weigh_from(es[row], key, low + pos)
            total += tl.where(on, term, 0)
        pos += on.to(tl.int32)
    return tl.sum(total, 0)


@kernel
def _finish_kernel(
    x_ptr,
    out_ptr,
    scratch_ptr,
    nelem: tl.int64,
    chunk_nelem: tl.int64,
    tiles: tl.int32,
    groups: tl.int32,
    shift: tl.int32,
    head: tl.int32,
    static_at: tl.int64,
    static_stride: tl.int64,
    index_at: tl.int64,
    dynamic_at: tl.int64,
    dynamic_stride: tl.int64,
    totals_at: tl.int64,
    counts_at: tl.int64,
    slots_at: tl.int64,
    EXP: tl.constexpr,
    ITEM: tl.constexpr,
    SLOT: tl.constexpr,
    SUMS: tl.constexpr,
    PTX: tl.constexpr,
):
    """One group of tiles: escapes to their place, offsets, record; or the chunk's raw bytes.

    The frame has written the record of an empty chunk, and cleared what tiles and index leave free.
    """
    MAN: tl.constexpr = 8 * ITEM - 1 - EXP
    pid = tl.program_id(0)
    chunk = pid // groups
    group = pid % groups
    first = chunk.to(tl.int64) * chunk_nelem
    n = tl.maximum(tl.minimum(chunk_nelem, nelem - first), 0)
    tiles_here = ((n + _TILE - 1) // _TILE).to(tl.int32)
    stride = static_stride * 128
    static_ptr = out_ptr + static_at * 128 + chunk.to(tl.int64) * stride
    capacity = dynamic_stride * 128
    dynamic_ptr = out_ptr + dynamic_at * 128 + chunk.to(tl.int64) * capacity
    dynamic_word = static_stride * 32

    totals = (scratch_ptr + totals_at * 128).to(tl.pointer_type(tl.int32)) + chunk * groups
    of_all = tl.zeros([512], tl.int32)
    of_earlier = tl.zeros([512], tl.int32)
    for g in range(0, groups, 512):
        i = g + tl.arange(0, 512)
        t = tl.load(totals + i, mask=i < groups, other=0)
        of_all += t
        of_earlier += tl.where(i < group, t, 0)
    escapes = tl.sum(of_all.to(tl.int64), 0)
    before = tl.sum(of_earlier.to(tl.int64), 0)
    raw_nbytes = n * ITEM
    raw_dynamic = tl.maximum(raw_nbytes - stride, 0)
    shrinks = escapes <= raw_dynamic
    dynamic_nbytes = tl.minimum(escapes, raw_dynamic)
    fits = dynamic_nbytes <= capacity
    total = tl.zeros([], tl.uint64)
    if SUMS:
        total += tl.load(scratch_ptr.to(tl.pointer_type(tl.int64)) + chunk * groups + group).to(
            tl.uint64, bitcast=True
        )

    lo = group << shift
    hi = tl.minimum(lo + (1 << shift), tiles_here)
    if shrinks:
        counts = (scratch_ptr + counts_at * 128).to(tl.pointer_type(tl.uint16)) + chunk.to(
            tl.int64
        ) * tiles
        slots = scratch_ptr + slots_at * 128 + chunk.to(tl.int64) * tiles * SLOT
        offsets = (static_ptr + index_at * 128).to(tl.pointer_type(tl.uint32))
        entries = (static_ptr + index_at * 128 + 4 * tiles_here.to(tl.int64)).to(
            tl.pointer_type(tl.uint16)
        )
        for t0 in range(lo, hi, 32):
            t = t0 + tl.arange(0, 32)
            n_escapes = tl.load(counts + t, mask=t < hi, other=0).to(tl.int32)
            ahead = tl.cumsum(n_escapes, 0) - n_escapes
            offset = (before + ahead).to(tl.uint32)
            tl.store(offsets + t, offset, mask=t < hi)
            if SUMS:
                terms = weigh(offset, index_at * 32 + t)
                total += tl.sum(tl.where(t < hi, terms, 0), 0)
            most = tl.max(n_escapes, 0)
            slot_ptr = slots + (before * 0 + t0) * SLOT
            target_ptr = dynamic_ptr + before
            # At most 32 tiles of escapes lie ahead: what matters of the capacity fits 32 bits.
            left = tl.minimum(tl.maximum(capacity - before, 0), 1 << 30).to(tl.int32)
            row = tl.arange(0, 32)[:, None] * SLOT
            in_slot = tl.where(n_escapes <= SLOT, n_escapes, 0)[:, None]
            key = key_of(dynamic_word + (before >> 2))
            low = (before & 3).to(tl.int32)
            for k in range(0, tl.minimum(most, SLOT), 64):
                b = k + tl.arange(0, 64)[None, :]
                e = tl.load(slot_ptr + (row + b), mask=b < in_slot, other=0)
                at = ahead[:, None] + b
                tl.store(target_ptr + at, e, mask=(b < in_slot) & (at < left))
                if SUMS:
                    of_escapes = weigh_from(e, key, low + at)
                    total += tl.sum(tl.where(b < in_slot, of_escapes, 0))
            if most > SLOT:
                for q in range(0, 32):
                    here = tl.arange(0, 32) == q
                    if tl.sum(tl.where(here, n_escapes, 0), 0) > SLOT:
                        tile = n * 0 + (t0 + q)
                        total += _list_escapes(
                            x_ptr,
                            first + tile * _TILE,
                            tl.minimum(n - tile * _TILE, _TILE).to(tl.int32),
                            tl.load(entries + tile).to(tl.int32),
                            dynamic_ptr,
                            before + tl.sum(tl.where(here, ahead, 0), 0),
                            capacity,
                            dynamic_word,
                            EXP,
                            MAN,
                            ITEM,
                            SUMS,
                            PTX,
                        )
            before += tl.sum(n_escapes, 0)
    else:
        total = total * 0
        if fits:
            if ITEM == 1:
                x = x_ptr.to(tl.pointer_type(tl.uint8)) + first
                s = static_ptr
                y = dynamic_ptr
            elif ITEM == 2:
                x = x_ptr.to(tl.pointer_type(tl.uint16)) + first
                s = static_ptr.to(tl.pointer_type(tl.uint16))
                y = dynamic_ptr.to(tl.pointer_type(tl.uint16))
            else:
                x = x_ptr.to(tl.pointer_type(tl.uint32)) + first
                s = static_ptr.to(tl.pointer_type(tl.uint32))
                y = dynamic_ptr.to(tl.pointer_type(tl.uint32))
            at = lo.to(tl.int64) * _TILE
            stop = tl.minimum(hi.to(tl.int64) * _TILE, n)
            cut = stride // ITEM
            AT_ONCE: tl.constexpr = 1024 if SUMS else 2048
            while at < stop:
                i = at + tl.max_contiguous(tl.arange(0, AT_ONCE), 1)
                v = tl.load(x + i, mask=i < stop, other=0)
                tl.store(s + i, v, mask=(i < stop) & (i < cut))
                tl.store(y + (i - cut), v, mask=(i < stop) & (i >= cut))
                if SUMS:
                    if ITEM == 4:
                        terms = weigh(v, i)
                    else:
                        terms = weigh_bytes(v, i * ITEM)
                    total += tl.sum(tl.where(i < stop, terms, 0), 0)
                at += AT_ONCE
            clear(static_ptr, raw_nbytes, stride, group, groups)
    flags = tl.where(fits, tl.where(shrinks, 0, 1), 2)
    record = out_ptr.to(tl.pointer_type(tl.int64)) + head + chunk.to(tl.int64) * 4
    if group == 0:
        tl.store(record + 1, dynamic_nbytes)
        tl.store(record + 2, flags.to(tl.int64) | (chunk.to(tl.int64) << 32))
        total += record_term(n * 0, dynamic_nbytes, flags, chunk * 0)
        if not fits:
            tl.store(record, n * 0)
    if SUMS:
        if fits:
            tl.atomic_add(record, total.to(tl.int64, bitcast=True), sem="relaxed")


@triton.jit
def decode_tile(
    block_ptr,
    cols,
    entry,
    escapes_ptr,
    begin,
    end,
    capacity,
    out_ptr,
    out_at,
    lo,
    hi,
    valid,
    word,
    FULL: tl.constexpr,
    EXP: tl.constexpr,
    MAN: tl.constexpr,
    ITEM: tl.constexpr,
    STORE: tl.constexpr,
    ADD: tl.constexpr,
    SUMS: tl.constexpr,
    PTX: tl.constexpr,
):
    """Decode one tile: (whether its payload is wrong, checksum terms of its block).

    Elements `lo` to `hi` of the tile go to `out_ptr` from element `out_at` on. FULL: all of a whole
    tile, to an aligned place. Escapes are read at `begin` + i while that is below `capacity`.
    """
    lane = _lanes()
    zero_mode = entry >= 32768
    base = (entry & 32767).to(tl.uint32)
    b4 = base * _ONES
    EXTRA: tl.constexpr = (1 + MAN) % 8
    if FULL:
        W: tl.constexpr = _COLUMNS
        inside = None
    else:
        W = cols
        inside = 4 * lane < W
    row_words = W // 4
    block32 = block_ptr.to(tl.pointer_type(tl.uint32))
    block64 = block_ptr.to(tl.pointer_type(tl.uint64))
    BYTES: tl.constexpr = 4 if ITEM == 4 else 0
    at = BYTES * W
    total = tl.zeros([_LANES], tl.uint64)
    ss = ()
    lows = ()
    for r in tl.static_range(8):
        k = r * row_words + lane
        low = tl.zeros([_LANES], tl.uint64)
        s = tl.zeros([_LANES], tl.uint32)
        if ITEM == 4:
            low = _load(block64 + k, inside)
        if ITEM >= 2:
            s = _load(block32 + at + k, inside)
        ss = ss + (s,)
        lows = lows + (low,)
    if ITEM >= 2:
        at += 2 * W
    planes = ()
    f = tl.zeros([_LANES], tl.uint32) - 1
    free = (base + 7) & 7
    for k in tl.static_range(3 + EXTRA):
        plane = _load(block32 + at + k * row_words + lane, inside)
        if k < 3:
            f = f & (plane ^ (((free >> k) & 1) - 1))
        planes = planes + (plane,)
    if not FULL:
        f = tl.where(inside, f, 0)
    if SUMS:
        key = key_of(word + lane)
        key2 = key_of(word + 2 * lane)
        for r in tl.static_range(8):
            if ITEM == 4:
                total += _terms64(lows[r], key2, 2 * r * row_words, None)
            if ITEM >= 2:
                total += _terms(ss[r], key, BYTES * W + r * row_words, None)
        for k in tl.static_range(3 + EXTRA):
            total += _terms(planes[k], key, at + k * row_words, None)
    block_terms = tl.sum(total, 0)
    offset = ((8 - (base & 7)) & 7) * _ONES
    b7 = b4 & _LOW7
    b8 = b4 & _HIGH
    e0 = _exponents_of_row(planes, 0, offset, b7, b8)
    e1 = _exponents_of_row(planes, 1, offset, b7, b8)
    e2 = _exponents_of_row(planes, 2, offset, b7, b8)
    e3 = _exponents_of_row(planes, 3, offset, b7, b8)
    e4 = _exponents_of_row(planes, 4, offset, b7, b8)
    e5 = _exponents_of_row(planes, 5, offset, b7, b8)
    e6 = _exponents_of_row(planes, 6, offset, b7, b8)
    e7 = _exponents_of_row(planes, 7, offset, b7, b8)
    lowest = base
    as_zero = tl.where(zero_mode, 0, 0xFFFFFFFF).to(tl.uint32)
    if zero_mode:
        # Code base stands for 0; nothing is coded as the base itself.
        lowest = base + 1
        e0 = _clear_base(e0, b4)
        e1 = _clear_base(e1, b4)
        e2 = _clear_base(e2, b4)
        e3 = _clear_base(e3, b4)
        e4 = _clear_base(e4, b4)
        e5 = _clear_base(e5, b4)
        e6 = _clear_base(e6, b4)
        e7 = _clear_base(e7, b4)
    n = _popc(f, PTX).to(tl.int32)
    count = tl.sum(n, 0)
    pos = tl.cumsum(n, 0) - n
    found_ptr = escapes_ptr + begin
    readable = tl.minimum(tl.maximum(capacity - begin, 0), 4096).to(tl.int32)
    coded = base + 7 - lowest
    wrong = tl.zeros([_LANES], tl.int32)
    left = tl.max(n, 0)
    while left > 0:
        bit = _popc((f & (0 - f)) - 1, PTX)
        on = (f != 0) & (pos < readable)
        found = tl.load(found_ptr + pos, mask=on, other=0).to(tl.uint32)
        odd = ((found - lowest) < coded) | (found == as_zero)
        if EXP < 8:
            odd = odd | (found >= (1 << EXP))
        wrong |= (on & odd).to(tl.int32)
        patch = tl.where(on, (found ^ ((base + 7) & 255)) << (bit & 24), 0)
        row = bit & 7
        e0 ^= tl.where(row == 0, patch, 0)
        e1 ^= tl.where(row == 1, patch, 0)
        e2 ^= tl.where(row == 2, patch, 0)
        e3 ^= tl.where(row == 3, patch, 0)
        e4 ^= tl.where(row == 4, patch, 0)
        e5 ^= tl.where(row == 5, patch, 0)
        e6 ^= tl.where(row == 6, patch, 0)
        e7 ^= tl.where(row == 7, patch, 0)
        pos += 1
        f = f & (f - 1)
        left -= 1
    bad = (count != end - begin) | (tl.max(wrong, 0) > 0)
    es = (e0, e1, e2, e3, e4, e5, e6, e7)
    for r in tl.static_range(8):
        x = tl.zeros([_LANES], tl.uint32)
        for k in tl.static_range(EXTRA):
            x |= ((planes[3 + k] >> r) & _ONES) << k
        v0, v1, v2, v3 = _elements(es[r], ss[r], x, lows[r], EXP, MAN, ITEM, PTX)
        if FULL:
            if STORE:
                _store_row(out_ptr, out_at + r * W, v0, v1, v2, v3, EXP, ITEM, ADD)
        else:
            if ITEM == 1:
                v1 = v0 >> 8
                v2 = v0 >> 16
                v3 = v0 >> 24
            elif ITEM == 2:
                v2 = v1
                v3 = v1 >> 16
                v1 = v0 >> 16
            vs = (v0, v1, v2, v3)
            for c in tl.static_range(4):
                v = vs[c] & ((1 << (8 * ITEM)) - 1)
                i = r * W + 4 * lane + c
                pad = inside & (i >= valid)
                padding = (pad & (v != ((base + 6) << MAN))).to(tl.int32)
                bad = bad | (tl.max(padding, 0) > 0)
                if STORE:
                    use = inside & (i >= lo) & (i < hi)
                    store_element(out_ptr, out_at + (i - lo), v, use, EXP, ITEM, ADD)
    return bad, block_terms


@triton.jit
def _exponents_of_row(planes, r: tl.constexpr, offset, b7, b8):
    """Exponents of row `r` by the code alone: base + (code - base) mod 8, a byte each."""
    code = (planes[0] >> r) & _ONES
    code |= ((planes[1] >> r) & _ONES) << 1
    code |= ((planes[2] >> r) & _ONES) << 2
    return (b7 + ((code + offset) & 0x07070707)) ^ b8


@triton.jit
def _clear_base(e, b4):
    """Zero where a byte is the base's."""
    d = e ^ b4
    other = ((((d & _LOW7) + _LOW7) | d) >> 7) & _ONES
    return e & (other * 255)


@triton.jit
def _store_row(
    out_ptr, at, v0, v1, v2, v3, EXP: tl.constexpr, ITEM: tl.constexpr, ADD: tl.constexpr
):
    """Store or add 512 elements from element `at` on, as `_elements` gives them."""
    if ADD == 0:
        if ITEM == 1:
            tl.store(out_ptr.to(tl.pointer_type(tl.uint32)) + at // 4 + _lanes(), v0)
        elif ITEM == 2:
            v = v0.to(tl.uint64) | (v1.to(tl.uint64) << 32)
            tl.store(out_ptr.to(tl.pointer_type(tl.uint64)) + at // 4 + _lanes(), v)
        else:
            v01 = v0.to(tl.uint64) | (v1.to(tl.uint64) << 32)
            v23 = v2.to(tl.uint64) | (v3.to(tl.uint64) << 32)
            tl.store(
                out_ptr.to(tl.pointer_type(tl.uint64))
                + tl.multiple_of(at // 2, 2)
                + tl.arange(0, 2 * _LANES),
                tl.reshape(tl.join(v01, v23), [2 * _LANES]),
            )
    else:
        if ITEM == 2:
            v2 = v1 & 0xFFFF
            v3 = v1 >> 16
            v1 = v0 >> 16
            v0 = v0 & 0xFFFF
        value = tl.join(
            tl.join(float_of(v0, EXP, ITEM), float_of(v2, EXP, ITEM)),
            tl.join(float_of(v1, EXP, ITEM), float_of(v3, EXP, ITEM)),
        )
        acc = accumulator(out_ptr, EXP, ADD) + at + tl.arange(0, _COLUMNS)
        add_to(acc, tl.reshape(value, [_COLUMNS]), None, EXP, ADD)


@triton.jit
def index_of(static_ptr, index_at, tile, tiles, dynamic_nbytes, fixed, EXP: tl.constexpr):
    """What the index at byte `index_at` says of a tile of a chunk that has `tiles`.

    (window, first and past-the-last escape, whether that cannot be, checksum terms.) `fixed`: the
    base, -1 if any, -2 if all are alike.
    """
    offsets = (static_ptr + index_at).to(tl.pointer_type(tl.uint32)) + tile
    entry_at = (index_at + 4 * tiles) // 2 + tile
    entry_ptr = static_ptr.to(tl.pointer_type(tl.uint16)) + entry_at
    entry = tl.load(entry_ptr).to(tl.int32)
    offset = tl.load(offsets)
    begin = offset.to(tl.int64)
    end = tl.load(offsets + 1, mask=(tile + 1) < tiles, other=0).to(tl.int64)
    end = tl.where(tile + 1 == tiles, dynamic_nbytes, end)
    base = entry & 32767
    bad = (begin > end) | (end > dynamic_nbytes) | ((tile == 0) & (begin != 0))
    bad = bad | (base > (1 << EXP) - 7) | (entry == 32768)
    if fixed != -1:
        alike = tl.load(entry_ptr - tile).to(tl.int32)
        alike = tl.where(fixed >= 0, fixed, alike & 32767)
        bad = bad | (entry != alike)
    terms = weigh(offset, index_at // 4 + tile) + weigh_bytes(entry, entry_at * 2)
    return entry, begin, end, bad, terms


@kernel
def _decode_kernel(
    src_ptr,
    out_ptr,
    sums_ptr,
    status_ptr,
    starts_ptr,
    start: tl.int64,
    stop: tl.int64,
    first_tile: tl.int64,
    nelem: tl.int64,
    chunk_nelem: tl.int64,
    tiles: tl.int32,
    groups: tl.int32,
    shift: tl.int32,
    head: tl.int32,
    static_at: tl.int64,
    static_stride: tl.int64,
    index_at: tl.int64,
    dynamic_at: tl.int64,
    dynamic_stride: tl.int64,
    fixed: tl.int32,
    EXP: tl.constexpr,
    ITEM: tl.constexpr,
    PACKED: tl.constexpr,
    STORE: tl.constexpr,
    ADD: tl.constexpr,
    SUMS: tl.constexpr,
    MODE: tl.constexpr,
    PTX: tl.constexpr,
):
    """One tile of elements `start` to `stop`. `fixed`: see `index_of`.

    MODE 0: tiles that are whole and wanted whole, to aligned addresses; 1: the others, that is
    each chunk's partial tile, the first and the last; 2: any tile.
    """
    MAN: tl.constexpr = 8 * ITEM - 1 - EXP
    BLOCK: tl.constexpr = _COLUMNS * (MAN + 4)
    pid = tl.program_id(0)
    if MODE == 1:
        first_chunk = (first_tile // tiles).to(tl.int32)
        ends = tl.num_programs(0) - 2
        edge = tl.where(pid == ends, start, stop - 1)
        chunk = tl.where(pid < ends, first_chunk + pid, (edge // chunk_nelem).to(tl.int32))
        first = chunk.to(tl.int64) * chunk_nelem
        n = tl.maximum(tl.minimum(chunk_nelem, nelem - first), 0)
        tile = tl.where(pid < ends, n // _TILE, (edge - first) // _TILE).to(tl.int32)
        # The ends may be partial tiles, which have their program, or one and the same tile.
        twice = (pid >= ends) & (tile.to(tl.int64) == n // _TILE)
        same = (start // chunk_nelem == chunk) & ((start - first) // _TILE == tile)
        twice = twice | ((pid > ends) & same)
    else:
        lin = first_tile + pid
        chunk = (lin // tiles).to(tl.int32)
        tile = (lin % tiles).to(tl.int32)
        first = chunk.to(tl.int64) * chunk_nelem
        n = tl.maximum(tl.minimum(chunk_nelem, nelem - first), 0)
        twice = pid < 0
    tiles_here = ((n + _TILE - 1) // _TILE).to(tl.int32)
    stride = static_stride * 128
    static_ptr = src_ptr + static_at * 128 + chunk.to(tl.int64) * stride
    if PACKED:
        dynamic_ptr = src_ptr + tl.load(starts_ptr + chunk)
    else:
        dynamic_ptr = src_ptr + dynamic_at * 128 + chunk.to(tl.int64) * dynamic_stride * 128

    record = src_ptr.to(tl.pointer_type(tl.int64)) + head + chunk.to(tl.int64) * 4
    claimed = tl.load(record + 1)
    both = tl.load(record + 2)
    flags = (both & 0xFFFFFFFF).to(tl.int32)
    raw_dynamic = tl.maximum(n * ITEM - stride, 0)
    # A number beyond 2^63 is negative here, and out of bounds as well.
    most = raw_dynamic
    if not PACKED:
        most = tl.minimum(most, dynamic_stride * 128)
    out_of_bounds = (claimed > most) | (claimed < 0)
    dynamic_nbytes = tl.where(out_of_bounds, 0, claimed)
    is_raw = (flags & 1) != 0
    begin_tile = tile.to(tl.int64) * _TILE
    lo = tl.maximum(start - first - begin_tile, 0)
    hi = tl.minimum(stop - first - begin_tile, tl.minimum(n - begin_tile, _TILE))
    mine = (tile < tiles_here) & (not twice)
    if MODE == 0:
        mine = mine & (hi - lo == _TILE)
    if MODE == 1:
        mine = mine & (hi - lo < _TILE) & (hi > lo)
    if mine:
        valid = tl.minimum(n - begin_tile, _TILE).to(tl.int32)
        out_at = first + begin_tile + lo - start
        total = tl.zeros([], tl.uint64)
        if is_raw:
            total = decode_raw(
                static_ptr,
                dynamic_ptr,
                stride,
                begin_tile,
                valid,
                lo,
                hi,
                out_ptr,
                out_at,
                raw_dynamic - dynamic_nbytes,
                EXP,
                ITEM,
                STORE,
                ADD,
                SUMS,
            )
        else:
            entry, begin, end, bad, of_index = index_of(
                static_ptr, index_at * 128, tile, tiles_here, dynamic_nbytes, fixed, EXP
            )
            wrong, total = decode_tile(
                static_ptr + tile.to(tl.int64) * BLOCK,
                (valid + 127) // 128 * 16,
                entry,
                dynamic_ptr,
                begin,
                end,
                dynamic_nbytes,
                out_ptr,
                out_at,
                lo,
                hi,
                valid,
                tile * (BLOCK // 4),
                MODE == 0,
                EXP,
                MAN,
                ITEM,
                STORE,
                ADD,
                SUMS,
                PTX,
            )
            if bad | wrong:
                report(status_ptr, CHUNK + (chunk.to(tl.int64) << 8) + CHUNK_PAYLOAD)
            if SUMS:
                total += of_index
                total += dynamic_share(dynamic_ptr, dynamic_nbytes, stride, tile, tiles_here)
        if SUMS:
            tl.atomic_add(
                sums_ptr + chunk * groups + (tile >> shift),
                total.to(tl.int64, bitcast=True),
                sem="relaxed",
            )


@triton.jit
def dynamic_share(dynamic_ptr, nbytes, static_stride, part, parts):
    """Checksum terms of this tile's equal share of the dynamic words."""
    words = (nbytes + 3) // 4
    share = (words + parts - 1) // parts
    at = part.to(tl.int64) * share
    n = tl.minimum(share, words - at).to(tl.int32)
    last = tl.minimum(words - 1 - at, 1 << 30).to(tl.int32)
    # Bytes of the last word behind the used ones count as zeros.
    unused = (8 * (4 * words - nbytes)).to(tl.uint32)
    w = dynamic_ptr.to(tl.pointer_type(tl.uint32)) + at
    key = key_of(static_stride // 4 + at + tl.arange(0, 32))
    total = tl.zeros([32], tl.uint64)
    done = 0
    while done < n:
        i = done + tl.arange(0, 32)
        v = tl.load(w + i, mask=i < n, other=0)
        v = tl.where(i == last, (v << unused) >> unused, v)
        total += _terms(v, key, done, None)
        done += 32
    return tl.sum(total, 0)


@triton.jit
def decode_raw(
    static_ptr,
    dynamic_ptr,
    stride,
    begin,
    valid,
    lo,
    hi,
    out_ptr,
    out_at,
    missing,
    EXP: tl.constexpr,
    ITEM: tl.constexpr,
    STORE: tl.constexpr,
    ADD: tl.constexpr,
    SUMS: tl.constexpr,
):
    """A tile of a chunk that is stored raw; `missing` dynamic bytes at its end are not there."""
    if ITEM == 1:
        s = static_ptr
        y = dynamic_ptr
    elif ITEM == 2:
        s = static_ptr.to(tl.pointer_type(tl.uint16))
        y = dynamic_ptr.to(tl.pointer_type(tl.uint16))
    else:
        s = static_ptr.to(tl.pointer_type(tl.uint32))
        y = dynamic_ptr.to(tl.pointer_type(tl.uint32))
    cut = stride // ITEM
    readable = tl.where(missing == 0, valid, 0)
    total = tl.zeros([256], tl.uint64)
    for at in range(0, valid, 256):
        k = at + tl.arange(0, 256)
        i = begin + k
        v = tl.load(s + i, mask=(k < valid) & (i < cut), other=0)
        v |= tl.load(y + (i - cut), mask=(k < readable) & (i >= cut), other=0)
        if STORE:
            store_element(
                out_ptr, out_at + (k - lo), v.to(tl.uint32), (k >= lo) & (k < hi), EXP, ITEM, ADD
            )
        if SUMS:
            if ITEM == 4:
                terms = weigh(v, i)
            else:
                terms = weigh_bytes(v, i * ITEM)
            total += tl.where(k < valid, terms, 0)
    return tl.sum(total, 0)


@kernel
def _check_kernel(
    src_ptr,
    plan_ptr,
    sums_ptr,
    status_ptr,
    starts_ptr,
    first_chunk: tl.int64,
    first_whole: tl.int64,
    end_whole: tl.int64,
    planned: tl.int32,
    groups: tl.int32,
    room: tl.int64,
    ITEM: tl.constexpr,
    PACKED: tl.constexpr,
    SUMS: tl.constexpr,
):
    """A chunk's record; of chunks `first_whole` to `end_whole` padding and checksum; the header.

    The header and the ordinals are compared if they are `planned`, not read by the host before.
    `room`: bytes of a dynamic slot.
    """
    chunk = first_chunk + tl.program_id(0).to(tl.int64)
    if (planned != 0) & (chunk == first_chunk):
        check_header(src_ptr, plan_ptr, status_ptr)
    n, kind_ptr = chunk_kind(plan_ptr, chunk)
    stride = tl.load(plan_ptr + 5)
    raw_dynamic = tl.maximum(n * ITEM - stride, 0)
    most = raw_dynamic
    if not PACKED:
        most = tl.minimum(most, room)
    record = check_record(src_ptr, plan_ptr, status_ptr, chunk, planned, most, raw_dynamic)
    if (chunk >= first_whole) & (chunk < end_whole):
        static_ptr = static_of(src_ptr, plan_ptr, chunk)
        if (tl.load(record + 2) & 1) != 0:
            total, padding = padding_of(static_ptr, tl.minimum(n * ITEM, stride), stride)
        else:
            total, padding = gaps_of(static_ptr, kind_ptr)
        if PACKED:
            claimed = tl.load(record + 1)
            used = tl.where((claimed < 0) | (claimed > most), 0, claimed)
            dynamic_ptr = src_ptr + tl.load(starts_ptr + chunk)
            _, behind = padding_of(dynamic_ptr, used, (used + 127) // 128 * 128)
            padding |= behind
        if SUMS:
            sums = tl.zeros([256], tl.uint64)
            for g in range(0, groups, 256):
                i = g + tl.arange(0, 256)
                t = tl.load(sums_ptr + chunk * groups + i, mask=i < groups, other=0)
                sums += t.to(tl.uint64, bitcast=True)
            total += tl.sum(sums, 0)
        check_whole(plan_ptr, status_ptr, record, chunk, n, padding, total, SUMS)


def supports(dtype: DType) -> bool:
    """True for the floats that have kernels: all but float64."""
    return dtype.is_float and dtype.itemsize <= 4


# Whole tiles of up to 16-bit elements: one warp per tile, so no barriers, and 12 to 16 tiles in
# flight on each multiprocessor, for which registers are limited. Wider elements need more warps to
# stay in registers. benchmarks/results/gpu.md has the measurements.
# Many warps for the second: tiles full of escapes are listed one after the other.
_FINISH = options(8, maxnreg=64)
_ANY_TILE = options(4)


def encode_options(itemsize: int, mode: int, sums: bool) -> dict[str, int | bool]:
    """Launch options of the first encode kernel."""
    if mode:
        return _ANY_TILE
    if itemsize == 4:
        return options(4 if sums else 2)
    return options(1, maxnreg=168) if sums else options(1)


def decode_options(itemsize: int, mode: int) -> dict[str, int | bool]:
    """Launch options of the decode kernel."""
    if mode:
        return _ANY_TILE
    return options(4) if itemsize == 4 else options(1, maxnreg=120)


@functools.cache
def _encode_variant(dtype: DType, mode: int, stats: int, sums: bool) -> Variant:
    chosen = encode_options(dtype.itemsize, mode, sums)
    slot = scratch_layout(dtype, TILE, 1).slot
    return Variant(
        _encode_kernel, chosen, **_meta(dtype), SLOT=slot, STATS=stats, SUMS=sums, MODE=mode
    )


@functools.cache
def _finish_variant(dtype: DType, sums: bool) -> Variant:
    slot = scratch_layout(dtype, TILE, 1).slot
    return Variant(_finish_kernel, _FINISH, **_meta(dtype), SLOT=slot, SUMS=sums)


@functools.cache
def _decode_variant(
    dtype: DType, mode: int, packed: bool, store: bool, add: int, sums: bool
) -> Variant:
    chosen = decode_options(dtype.itemsize, mode)
    return Variant(
        _decode_kernel,
        chosen,
        **_meta(dtype),
        PACKED=packed,
        STORE=store,
        ADD=add,
        SUMS=sums,
        MODE=mode,
    )


@functools.cache
def _check_variant(dtype: DType, packed: bool, sums: bool) -> Variant:
    return Variant(_check_kernel, options(1), ITEM=dtype.itemsize, PACKED=packed, SUMS=sums)


def _meta(dtype: DType) -> dict[str, int | bool]:
    return {"EXP": dtype.exponent, "ITEM": dtype.itemsize, "PTX": PTX}


class _Launches:
    """What kernels are told about a plan, and which are launched for it."""

    def __init__(self, plan: Plan) -> None:
        spec = plan.codec
        assert isinstance(spec, Zipccl)
        self.plan = plan
        self.tiles = tile_count(plan.chunk_nelem)
        scratch = scratch_layout(plan.dtype, plan.chunk_nelem, plan.chunks)
        self.groups = scratch.groups
        self.cleared = scratch.counts
        self.fixed = -1
        if spec.window != "tile":
            self.fixed = spec.window if isinstance(spec.window, int) else -2
        sizes = (plan.nelem, plan.chunk_nelem)
        groups = (self.tiles, scratch.groups, scratch.shift)
        # In units of 128 bytes, so that kernels know the alignment.
        index_at = plan.layout.sections[0].nbytes // 128
        static = (plan.static_offset // 128, plan.static_stride // 128, index_at)
        dynamic = (plan.dynamic_offset // 128, plan.dynamic_stride // 128)
        places = (scratch.totals // 128, scratch.counts // 128, scratch.slots // 128)
        head = plan.header.nbytes // 8
        self.encode = (*sizes, *groups, *static, *places, self.fixed)
        self.finish = (*sizes, *groups, head, *static, *dynamic, *places)
        self.decode = (*sizes, *groups, head, *static, *dynamic, self.fixed)
        self.check = (scratch.groups, plan.dynamic_stride)
        last = (plan.nelem - 1) // plan.chunk_nelem
        partial = any(hi % TILE for hi in (plan.chunk_nelem, plan.nelem - last * plan.chunk_nelem))
        self.rows_aligned = plan.chunks == 1 or plan.chunk_nelem * plan.dtype.itemsize % 16 == 0
        all_tiles = self.tiles * plan.chunks
        #: (mode, programs) of the first encode kernel, by whether rows are aligned.
        self.encode_programs = (
            ((2, all_tiles),),
            ((0, all_tiles), (1, plan.chunks)) if partial else ((0, all_tiles),),
        )
        self.decode_programs = (
            ((2, all_tiles),),
            ((0, all_tiles), (1, plan.chunks + 2)) if partial else ((0, all_tiles),),
        )

    def decode_range(self, start: int, stop: int, aligned: bool):
        """First tile of elements `start` to `stop`, and (mode, programs) of its kernels."""
        size = self.plan.chunk_nelem
        if (start, stop) == (0, self.plan.nelem):
            return 0, self.decode_programs[aligned]
        lo = start // size * self.tiles + start % size // TILE
        last = stop - 1
        hi = last // size * self.tiles + last % size // TILE + 1
        if not aligned:
            return lo, ((2, hi - lo),)
        return lo, ((0, hi - lo), (1, last // size - start // size + 3))


def _launches(plan: Plan) -> _Launches:
    found = plan.__dict__.get("_zipccl_launches")
    if found is None:
        found = plan.__dict__["_zipccl_launches"] = _Launches(plan)
    return found


def encode(plan: Plan, x, out, scratch, stats=None, key=None) -> None:
    """Encode the elements of `x` into `out`; see `tightwire.gpu` for the contract."""
    g = _launches(plan)
    frame_of(plan).begin(out, scratch[: g.cleared])
    aligned = g.rows_aligned and x.data_ptr() % 16 == 0
    chosen = 2 if g.fixed >= 0 else 0 if stats is None else 1
    if stats is None:
        stats = scratch
    elif stats.dtype != torch.int64:
        stats = stats.to(torch.int64)
    for mode, programs in g.encode_programs[aligned]:
        variant = _encode_variant(plan.dtype, mode, chosen, plan.checksum)
        variant.launch(programs, (x, out, scratch, stats), *g.encode)
    finish = _finish_variant(plan.dtype, plan.checksum)
    finish.launch(g.groups * plan.chunks, (x, out, scratch), *g.finish)


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
    packed = dynamic_starts is not None
    sums = check and plan.checksum and start < stop
    if sums:
        scratch[: 8 * g.groups * plan.chunks].zero_()
    if out is None:
        out = src
    if dynamic_starts is None:
        dynamic_starts = status
    if start < stop:
        aligned = g.rows_aligned and start * plan.dtype.itemsize % 16 == 0
        aligned = aligned and out.data_ptr() % 16 == 0
        lo, kernels = g.decode_range(start, stop, aligned)
        adding = out.element_size() if add else 0
        for mode, programs in kernels:
            variant = _decode_variant(plan.dtype, mode, packed, store, adding, sums)
            tensors = (src, out, scratch, status, dynamic_starts)
            variant.launch(programs, tensors, start, stop, lo, *g.decode)
    first, end, first_whole, end_whole = touched(plan, start, stop)
    _check_variant(plan.dtype, packed, sums).launch(
        end - first,
        (src, frame_of(plan).table(src.device), scratch, status, dynamic_starts),
        first,
        first_whole,
        end_whole if check else first_whole,
        int(planned),
        *g.check,
    )


def measure(spec: Zipccl, dtype: DType, x: torch.Tensor) -> torch.Tensor | None:
    """The window's base, int64, shape (1,), on the device of `x`; None where encode needs none.

    Counts elements by their top bits (sign, exponent and up to 7 of the mantissa), which is all
    that "histogram" and "sigma" look at.
    """
    if spec.window not in ("histogram", "sigma"):
        return None
    f = fields_of(dtype)
    shift = max(f.mantissa - 7, 0)
    counts = torch.zeros(1 << (8 * dtype.itemsize - shift), dtype=torch.int64, device=x.device)
    sums = torch.empty((3, 1 << f.exponent), dtype=torch.int64, device=x.device)
    base = torch.empty(1, dtype=torch.int64, device=x.device)
    n = x.numel() * x.element_size() // dtype.itemsize
    count, add_up, choose = _measure_variants(dtype, spec.window == "sigma")
    count.launch(-(-n // 4096), (x, counts), n)
    add_up.launch(1 << f.exponent, (counts, sums))
    choose.launch(1, (sums, base))
    return base


@functools.cache
def _measure_variants(dtype: DType, sigma: bool) -> tuple[Variant, Variant, Variant]:
    f = fields_of(dtype)
    meta = {"EXP": f.exponent, "MAN": f.mantissa}
    shift = max(f.mantissa - 7, 0)
    return (
        Variant(_count_kernel, options(4), ITEM=dtype.itemsize, SHIFT=shift),
        Variant(_sum_kernel, options(1), **meta),
        Variant(_base_kernel, options(1), **meta, SIGMA=sigma),
    )


@kernel
def _count_kernel(x_ptr, counts_ptr, n: tl.int64, ITEM: tl.constexpr, SHIFT: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * 4096 + tl.arange(0, 4096)
    if ITEM == 1:
        x = x_ptr
    elif ITEM == 2:
        x = x_ptr.to(tl.pointer_type(tl.uint16))
    else:
        x = x_ptr.to(tl.pointer_type(tl.uint32))
    v = tl.load(x + i, mask=i < n, other=0).to(tl.uint32) >> SHIFT
    one = tl.full([4096], 1, tl.int64)
    tl.atomic_add(counts_ptr + v.to(tl.int32), one, mask=i < n, sem="relaxed")


@kernel
def _sum_kernel(counts_ptr, sums_ptr, EXP: tl.constexpr, MAN: tl.constexpr):
    """Of one exponent field: elements, sum of signed significands, sum of their squares."""
    e = tl.program_id(0)
    KEPT: tl.constexpr = MAN if MAN < 7 else 7
    k = tl.arange(0, 1 << KEPT)
    at = (e << KEPT) + k
    above = tl.load(counts_ptr + at)
    below = tl.load(counts_ptr + (1 << (EXP + KEPT)) + at)
    hidden = tl.where(e > 0, 1 << KEPT, 0)
    q = ((hidden | k) << (7 - KEPT)).to(tl.int64)
    tl.store(sums_ptr + e, tl.sum(above + below, 0))
    tl.store(sums_ptr + (1 << EXP) + e, tl.sum((above - below) * q, 0))
    tl.store(sums_ptr + (2 << EXP) + e, tl.sum((above + below) * q * q, 0))


@kernel
def _base_kernel(sums_ptr, base_ptr, EXP: tl.constexpr, MAN: tl.constexpr, SIGMA: tl.constexpr):
    """The base of a window for the tensor; specs/zipccl.md, "One window for the tensor"."""
    BINS: tl.constexpr = 1 << EXP
    e = tl.arange(0, BINS)
    if SIGMA:
        # Exponent 0 counts with exponent 1; the last one is left out.
        squares = tl.load(sums_ptr + 2 * BINS + e, mask=e < BINS - 1, other=0)
        used = tl.where(squares > 0, tl.maximum(e, 1), 0)
        largest = tl.max(used, 0)
        n = tl.sum(tl.load(sums_ptr + e, mask=e < BINS - 1, other=0), 0)
        s1 = tl.full([], 0.0, tl.float64)
        s2 = tl.full([], 0.0, tl.float64)
        k = largest
        while k > 0:
            a = tl.load(sums_ptr + BINS + k)
            b = tl.load(sums_ptr + 2 * BINS + k)
            if k == 1:
                a += tl.load(sums_ptr + BINS)
                b += tl.load(sums_ptr + 2 * BINS)
            s1 += a.to(tl.float64) * _power_of_two(k - largest)
            s2 += b.to(tl.float64) * _power_of_two(2 * (k - largest))
            k -= 1
        mean = s1 / n.to(tl.float64)
        variance = s2 / n.to(tl.float64) - mean * mean
        # sqrt(variance) * F as 2^power times a number in [1/2, 1).
        root = tl.sqrt(tl.maximum(variance, 0.0)) * SIGMA_F
        power = ((root.to(tl.int64, bitcast=True) >> 52) & 2047).to(tl.int32) - 1022
        base = tl.where(variance > 0.0, largest - 8 + power, largest - 6)
        base = tl.where(largest > 0, tl.minimum(tl.maximum(base, 0), BINS - 7), 0)
    else:
        held = tl.zeros([BINS], tl.int64)
        for k in tl.static_range(7):
            held += tl.load(sums_ptr + e + k, mask=e + k < BINS, other=0)
        held = tl.where(e <= BINS - 7, held, -1)
        base = tl.min(tl.where(held == tl.max(held, 0), e, BINS), 0)
    tl.store(base_ptr, base.to(tl.int64))


@triton.jit
def _power_of_two(k):
    return ((k + 1023).to(tl.int64) << 52).to(tl.float64, bitcast=True)
