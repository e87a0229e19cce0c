# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment,misc"
"""tahquant on a GPU: 4096 values per program, in rows of a tile each. specs/tahquant.md.

Where tokens have widths, a program per token finds its entropy and a program per chunk picks the
narrow ones before tiles are encoded; decoding counts them first. What is added over values is
spelled out in the page's order or is in integers.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from ..formats.checksum import identity_term
from ..formats.dtypes import DType
from ..formats.header import align
from .base import CodecSpec, Key, Plan
from .columns_triton import to_columns
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
    weigh_bytes,
)
from .hadamard_triton import rotate, spread
from .minifloat_triton import elements_at
from .tahquant import (
    ANCHOR,
    LOG,
    LOST,
    NARROW_SHARE,
    PIVOT,
    TOO_LARGE,
    Tahquant,
    tile_range,
)

_GROUP = tl.constexpr(4096)
_WARPS = 4
#: Of groups whose elements may lie anywhere: each has its own address and mask.
_WARPS_ANYWHERE = 8
_LOST, _TOO_LARGE = tl.constexpr(LOST), tl.constexpr(TOO_LARGE)
_PIVOT, _ANCHOR = tl.constexpr(PIVOT), tl.constexpr(ANCHOR)
_SHARE = tl.constexpr(NARROW_SHARE)
_LOG_A, _LOG_B, _LOG_C = (tl.constexpr(c) for c in LOG)
#: Tokens that one program looks at together, and a power of two above all entropies.
_TOKENS = tl.constexpr(1024)
_ENTROPIES = tl.constexpr(1 << 18)
#: Rows of a token that its entropy is taken of together.
_ROWS = tl.constexpr(16)


@triton.jit
def _tiles(n, hidden, token_tiles, TILE: tl.constexpr):
    """Tiles of a chunk of `n` elements."""
    return n // hidden * token_tiles + (n % hidden + TILE - 1) // TILE


@triton.jit
def _nelem(chunk, nelem, chunk_nelem):
    first = chunk.to(tl.int64) * chunk_nelem
    return first, tl.maximum(tl.minimum(chunk_nelem, nelem - first), 0)


@triton.jit
def _log2(number):
    """log2 of float32 numbers in units of 2^-12; of 0 something finite."""
    u = number.to(tl.uint32, bitcast=True)
    f = (u >> 7) & 0xFFFF
    h = _LOG_A - ((_LOG_B - ((_LOG_C * f) >> 16)) * f >> 16)
    e = (u >> 23) - 127
    return ((e << 16) + f + (((f * (65536 - f)) >> 16) * h >> 16)) >> 4


@triton.jit
def _sum_bits(a, b, EXP: tl.constexpr, ITEM: tl.constexpr, X_ITEM: tl.constexpr):
    """Bits of a + b, elements given as bits, those of `b` X_ITEM bytes, summed in float32."""
    y = float_of(a, EXP, ITEM) + float_of(b, EXP, X_ITEM)
    if ITEM == 4:
        return y.to(tl.uint32, bitcast=True)
    elif EXP == 8:
        return round_bfloat16(y).to(tl.uint32)
    else:
        return y.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32)


@triton.jit
def _swap(u, p, col):
    """Rows whose first value and that in column `p` trade places; bits."""
    first = tl.sum(tl.where(col == 0, u, 0), 1)
    other = tl.sum(tl.where(col == p[:, None], u, 0), 1)
    return tl.where(col == 0, other[:, None], tl.where(col == p[:, None], first[:, None], u))


@triton.jit
def _rotated(u, ROWS: tl.constexpr):
    """The transform of rows of 64 values, given as bits."""
    v = tl.reshape(u.to(tl.float32, bitcast=True), [ROWS * 4, 16])
    return rotate(to_columns(v, ROWS * 4, 16, 4), ROWS, 2) * 0.125


@triton.jit
def _decode_rows(
    static_ptr,
    t,
    here,
    wanted,
    tiles,
    wide,
    slot,
    narrow,
    payload,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    EXP: tl.constexpr,
    ITEM: tl.constexpr,
    SUMS: tl.constexpr,
):
    """Decode tiles `t`, shape [ROWS], those that are `here`.

    `tiles` and `wide` are the words of a plane and of that of wide tokens. Returns element bits,
    shape [ROWS, TILE], whether one of the `wanted` tiles is wrong, and the keyed sum (SUMS).
    """
    PARTS: tl.constexpr = TILE // 32
    PLANES: tl.constexpr = 3 if TILE == 64 else 6
    words_ptr = static_ptr.to(tl.pointer_type(tl.uint32))
    part = tl.arange(0, ROWS * PARTS) % PARTS
    at = spread(t * PARTS, ROWS, PARTS) + part
    use = spread(here, ROWS, PARTS)
    column = tl.arange(0, 32)[None, :]
    code = tl.zeros([ROWS * PARTS, 32], tl.uint32)
    total = tl.zeros([], tl.uint64)
    for p in tl.static_range(PLANES):
        word = tl.load(words_ptr + p * tiles * PARTS + at, mask=use, other=0)
        code |= ((word[:, None] >> column) & 1) << p
        if SUMS:
            total += tl.sum(weigh(word, p * tiles * PARTS + at), 0)
    if TILE == 64:
        use = spread(here & (narrow == 0) & (slot >= 0) & (slot < wide), ROWS, PARTS)
        at = spread((3 * tiles + slot) * PARTS, ROWS, PARTS) + part
        word = tl.load(words_ptr + at, mask=use, other=0)
        code |= ((word[:, None] >> column) & 1) << 3
        if SUMS:
            total += tl.sum(weigh(word, at), 0)
    scale = tl.load(words_ptr + payload * 32 + t, mask=here, other=0)
    if SUMS:
        total += tl.sum(weigh(scale, payload * 32 + t), 0)
    lost = scale == _LOST
    good = ((scale & 0x7C00) != 0x7C00) & (scale < 0x7C000000)
    bad = (good | lost) == 0
    scale = tl.where(good, scale, 0)
    m = scale.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    s = (scale >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    y = m[:, None] + tl.reshape(code, [ROWS, TILE]).to(tl.float32) * s[:, None]
    if TILE == 64:
        pivot_at = payload * 128 + tiles * 4 + t
        pivot = tl.load(static_ptr + pivot_at, mask=here, other=0).to(tl.uint32)
        if SUMS:
            total += tl.sum(weigh_bytes(pivot, pivot_at), 0)
        bad |= (pivot != 0) & ((pivot >> 6) != 2)
        turned = _rotated(y.to(tl.uint32, bitcast=True), ROWS).to(tl.uint32, bitcast=True)
        turned = _swap(turned, (pivot & 63).to(tl.int32), tl.arange(0, TILE)[None, :])
        y = tl.where((pivot != 0)[:, None], turned.to(tl.float32, bitcast=True), y)
    if EXP == 5:
        y = tl.where(y < 65504.0, y, 65504.0)
        y = tl.where(y > -65504.0, y, -65504.0)
        b = y.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32)
        b = tl.where(lost[:, None], 0x7E00, b)
    elif ITEM == 2:
        b = tl.where(lost[:, None], 0x7FC0, round_bfloat16(y).to(tl.uint32))
    else:
        b = tl.where(lost[:, None], 0x7FC00000, y.to(tl.uint32, bitcast=True))
    return b, tl.max((bad & wanted).to(tl.int32), 0), total


@kernel
def _entropy_kernel(
    x_ptr,
    src_ptr,
    base_ptr,
    counts_ptr,
    nelem: tl.int64,
    chunk_nelem: tl.int64,
    hidden: tl.int64,
    token_tiles: tl.int64,
    whole: tl.int64,
    tokens: tl.int64,
    static_at: tl.int64,
    static_stride: tl.int64,
    payload: tl.int64,
    EXP: tl.constexpr,
    ITEM: tl.constexpr,
    FUSED: tl.constexpr,
    X_ITEM: tl.constexpr,
):
    """The entropy of one of the `whole` tokens of a chunk, in bits times 2^12.

    FUSED: of the elements plus those that the buffer `src_ptr` decodes to, `base_ptr` being what
    `_rank_kernel` says of its tokens; the elements at `x_ptr` then have X_ITEM bytes, the plan's
    ITEM or float32's 4.
    """
    TILE: tl.constexpr = 64
    pid = tl.program_id(0).to(tl.int64)
    chunk = pid // whole
    token = pid % whole
    first, n = _nelem(chunk, nelem, chunk_nelem)
    if token < n // hidden:
        x = elements_at(x_ptr, X_ITEM) + first + token * hidden
        row = tl.arange(0, _ROWS)
        i = row[:, None] * TILE + tl.arange(0, TILE)[None, :]
        rank = token * 0
        if FUSED:
            rank = tl.load(base_ptr + chunk * tokens + token)
        tiles = _tiles(n, hidden, token_tiles, TILE)
        wide = tiles - n // hidden // _SHARE * token_tiles
        top = tl.zeros([_ROWS, TILE], tl.int32)
        highest = tl.full([], 1, tl.int32)
        total = tl.zeros([_ROWS, TILE], tl.int64)
        weighted = tl.zeros([_ROWS, TILE], tl.int64)
        for measured in range(2):
            at = token * 0
            while at < hidden:
                e = tl.load(x + at + i, mask=at + i < hidden, other=0).to(tl.uint32)
                if FUSED:
                    t = token * token_tiles + at // TILE + row
                    here = row * TILE + at < hidden
                    b, _, _ = _decode_rows(
                        src_ptr + (static_at + chunk * static_stride) * 128,
                        t,
                        here,
                        here,
                        tiles,
                        wide,
                        t - (rank >> 1) * token_tiles,
                        (t * 0 + rank) & 1,
                        payload,
                        _ROWS,
                        TILE,
                        EXP,
                        ITEM,
                        False,
                    )
                    e = tl.where(at + i < hidden, _sum_bits(b, e, EXP, ITEM, X_ITEM), 0)
                u = float_of(e, EXP, ITEM).to(tl.uint32, bitcast=True) & 0x7FFFFFFF
                if measured == 0:
                    top = tl.maximum(top, u.to(tl.int32))
                else:
                    field = (u >> 23).to(tl.int32)
                    w = tl.where(field == 255, 0, u & 0x7FFFFF)
                    w |= tl.where(field > 0, 1 << 23, 0).to(tl.uint32)
                    shift = tl.minimum(highest - tl.maximum(field, 1), 31)
                    q = (w >> 8) >> shift.to(tl.uint32)
                    total += q.to(tl.int64)
                    weighted += (q * _log2(q.to(tl.float32))).to(tl.int64)
                at += _ROWS * TILE
            highest = tl.maximum(tl.max(tl.max(top, 1), 0) >> 23, 1)
        s = tl.sum(tl.sum(total, 1), 0)
        mean = tl.sum(tl.sum(weighted, 1), 0) // tl.maximum(s, 1)
        entropy = tl.maximum(_log2(s.to(tl.float32)).to(tl.int64) - mean, 0)
        tl.store(counts_ptr + chunk * tokens + token, tl.where(s > 0, entropy, 0))


@kernel
def _select_kernel(
    out_ptr,
    counts_ptr,
    nelem: tl.int64,
    chunk_nelem: tl.int64,
    hidden: tl.int64,
    tokens: tl.int64,
    head: tl.int32,
    static_at: tl.int64,
    static_stride: tl.int64,
    index: tl.int64,
    SUMS: tl.constexpr,
):
    """Pick the narrow tokens of a chunk, and write its index.

    `counts_ptr` has entropies and gets 2 * (narrow tokens before) + (1 if it is narrow itself).
    """
    chunk = tl.program_id(0).to(tl.int64)
    _, n = _nelem(chunk, nelem, chunk_nelem)
    counts_ptr += chunk * tokens
    whole = n // hidden
    share = whole // _SHARE
    i = tl.arange(0, _TOKENS)
    bound = share * 0
    below = share * 0
    # The largest number that fewer than `share` entropies are below, bit by bit.
    bit = share * 0 + _ENTROPIES
    while bit > 0:
        bit = bit // 2
        trial = bound | bit
        below = share * 0
        at = share * 0
        while at < whole:
            e = tl.load(counts_ptr + at + i, mask=at + i < whole, other=1 << 40)
            below += tl.sum((e < trial).to(tl.int64), 0)
            at += _TOKENS
        if below < share:
            bound = trial
    ties = share - below
    before = share * 0
    total = tl.zeros([], tl.uint64)
    at = share * 0
    count = (n + hidden - 1) // hidden
    index_ptr = out_ptr + (static_at + chunk * static_stride) * 128
    while at < count:
        e = tl.load(counts_ptr + at + i, mask=at + i < whole, other=1 << 40)
        tie = (e == bound).to(tl.int32)
        chosen = (e < bound) | ((tie != 0) & (tl.cumsum(tie, 0) - tie < ties))
        chosen = chosen.to(tl.int32)
        rank = (before + tl.cumsum(chosen, 0) - chosen) * 2 + chosen
        tl.store(counts_ptr + at + i, rank, mask=at + i < count)
        byte = tl.arange(0, _TOKENS // 8)
        bits = tl.reshape(chosen, [_TOKENS // 8, 8]) << tl.arange(0, 8)[None, :]
        bits = tl.sum(bits, 1)
        where = index * 128 + at // 8 + byte
        use = at + byte * 8 < count
        tl.store(index_ptr + where, bits.to(tl.uint8), mask=use)
        if SUMS:
            total += tl.sum(tl.where(use, weigh_bytes(bits, where), 0), 0)
        before += tl.sum(chosen, 0)
        ties = tl.maximum(ties - tl.sum(tie, 0), 0)
        at += _TOKENS
    if SUMS:
        record = out_ptr.to(tl.pointer_type(tl.int64)) + head + chunk * 4
        tl.atomic_add(record, total.to(tl.int64, bitcast=True), sem="relaxed")


@kernel
def _rank_kernel(
    src_ptr,
    counts_ptr,
    status_ptr,
    first_chunk: tl.int64,
    nelem: tl.int64,
    chunk_nelem: tl.int64,
    hidden: tl.int64,
    tokens: tl.int64,
    static_at: tl.int64,
    static_stride: tl.int64,
    index: tl.int64,
):
    """Count a chunk's narrow tokens; `counts_ptr` gets what `_select_kernel` leaves there."""
    chunk = (first_chunk + tl.program_id(0)).to(tl.int64)
    _, n = _nelem(chunk, nelem, chunk_nelem)
    counts_ptr += chunk * tokens
    whole = n // hidden
    count = (n + hidden - 1) // hidden
    index_ptr = src_ptr + (static_at + chunk * static_stride + index) * 128
    i = tl.arange(0, _TOKENS)
    before = whole * 0
    odd = whole * 0
    at = whole * 0
    while at < count:
        use = at + i < (count + 7) // 8 * 8
        byte = tl.load(index_ptr + (at + i) // 8, mask=use, other=0).to(tl.int32)
        narrow = (byte >> (i & 7)) & 1
        odd += tl.sum(tl.where(at + i >= whole, narrow, 0), 0)
        rank = (before + tl.cumsum(narrow, 0) - narrow) * 2 + narrow
        tl.store(counts_ptr + at + i, rank, mask=at + i < count)
        before += tl.sum(narrow, 0)
        at += _TOKENS
    if (odd != 0) | (before != whole // _SHARE):
        report(status_ptr, CHUNK + (chunk << 8) + CHUNK_PAYLOAD)
        # Of a wrong index no token is narrow: every word is weighed once all the same.
        at = whole * 0
        while at < count:
            tl.store(counts_ptr + at + i, i * 0, mask=at + i < count)
            at += _TOKENS


@kernel
def _encode_kernel(
    x_ptr,
    out_ptr,
    src_ptr,
    counts_ptr,
    base_ptr,
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
    hidden: tl.int64,
    token_tiles: tl.int64,
    tokens: tl.int64,
    groups: tl.int64,
    ranked: tl.int32,
    head: tl.int32,
    static_at: tl.int64,
    static_stride: tl.int64,
    payload: tl.int64,
    index: tl.int64,
    MODE: tl.constexpr,
    EXP: tl.constexpr,
    ITEM: tl.constexpr,
    TILE: tl.constexpr,
    SUMS: tl.constexpr,
    FUSED: tl.constexpr,
    X_ITEM: tl.constexpr,
):
    """Encode a group of tiles. Header and records were cleared, the index written before.

    MODE 0: whole groups whose tiles follow one another without gaps; 1: the group at the end of a
    chunk of those, which may be empty, with what else a chunk has; 2: both, tiles anywhere.
    `ranked`: there are narrow tokens. FUSED: as `_entropy_kernel`.
    """
    ROWS: tl.constexpr = _GROUP // TILE
    PARTS: tl.constexpr = TILE // 32
    PLANES: tl.constexpr = 3 if TILE == 64 else 6
    pid = tl.program_id(0).to(tl.int64)
    chunk = pid
    if MODE != 1:
        chunk = pid // groups
    first, n = _nelem(chunk, nelem, chunk_nelem)
    tiles = _tiles(n, hidden, token_tiles, TILE)
    last = n // _GROUP
    if MODE == 2:
        last = tiles // ROWS
    group = last
    if MODE != 1:
        group = pid % groups
    static_ptr = out_ptr + (static_at + chunk * static_stride) * 128
    words_ptr = static_ptr.to(tl.pointer_type(tl.uint32))
    total = tl.zeros([], tl.uint64)
    if (group < last) | ((MODE != 0) & (group == last)):
        t = group * ROWS + tl.arange(0, ROWS)
        token = t // token_tiles
        here = t < tiles
        use = t < tiles * ranked
        rank = tl.load(counts_ptr + chunk * tokens + token, mask=use, other=0)
        narrow = rank & 1
        slot = t - (rank >> 1) * token_tiles
        if MODE == 0:
            i = tl.arange(0, _GROUP // 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
            x = elements_at(x_ptr, X_ITEM) + tl.multiple_of(first + group * _GROUP, 16)
            inside = i >= 0
            e = tl.load(x + i).to(tl.uint32)
        else:
            within = (t - token * token_tiles) * TILE
            at = token * hidden + within
            count = tl.minimum(tl.minimum(hidden - within, n - at), TILE)
            count = tl.where(here, count, 0).to(tl.int32)
            part = tl.arange(0, _GROUP // 16) % (TILE // 16) * 16
            i = part[:, None] + tl.arange(0, 16)[None, :]
            inside = i < spread(count, ROWS, TILE // 16)[:, None]
            x = elements_at(x_ptr, X_ITEM) + first
            e = tl.load(x + spread(at, ROWS, TILE // 16)[:, None] + i, mask=inside, other=0)
            e = e.to(tl.uint32)
        if FUSED:
            rank = tl.load(base_ptr + chunk * tokens + token, mask=use, other=0)
            b, wrong, weighed = _decode_rows(
                src_ptr + (static_at + chunk * static_stride) * 128,
                t,
                here,
                here,
                tiles,
                tiles - ranked * (n // hidden // _SHARE) * token_tiles,
                t - (rank >> 1) * token_tiles,
                rank & 1,
                payload,
                ROWS,
                TILE,
                EXP,
                ITEM,
                SUMS,
            )
            if wrong != 0:
                report(status_ptr, CHUNK + (chunk << 8) + CHUNK_PAYLOAD)
            if SUMS:
                tl.atomic_add(sums_ptr + chunk, weighed.to(tl.int64, bitcast=True), sem="relaxed")
            e = _sum_bits(tl.reshape(b, [_GROUP // 16, 16]), e, EXP, ITEM, X_ITEM)
            # What fills a tile up decodes to errors.
            e = tl.where(inside, e, 0)
        u = tl.reshape(float_of(e, EXP, ITEM).to(tl.uint32, bitcast=True), [ROWS, TILE])
        size = (u & 0x7FFFFFFF).to(tl.int32)
        top = tl.max(size, 1)
        lost = top >= _TOO_LARGE
        top = tl.where(lost, 0, top)
        u = tl.where(lost[:, None], 0, u)
        v = u.to(tl.float32, bitcast=True)
        pivot = top * 0
        if TILE == 64:
            size = tl.where(lost[:, None], 0, size)
            column = tl.arange(0, TILE)[None, :]
            p = tl.min(tl.where(size == top[:, None], column, TILE - 1), 1)
            second = tl.max(tl.where(column == p[:, None], 0, size), 1)
            twice = second.to(tl.float32, bitcast=True) * 2.0
            turn = (top > 0) & (top.to(tl.float32, bitcast=True) >= twice)
            pivot = tl.where(turn, p + _PIVOT, 0)
            v = tl.where(turn[:, None], _rotated(_swap(u, p, column), ROWS), v)
        low = tl.min(v, 1)
        least = tl.where(low == 0.0, 0.0, low).to(tl.float16)
        least = least.to(tl.uint16, bitcast=True).to(tl.uint32)
        lost |= (least & 0x7FFF) == 0x7C00
        least = tl.where(lost, 0, least)
        m = least.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
        most = tl.full([ROWS], 15.0 if TILE == 64 else 63.0, tl.float32)
        most = tl.where(narrow != 0, 7.0, most)
        span = tl.max(v, 1) - m
        step = tl.div_rn(tl.where(span > 0.0, span, 0.0), most).to(tl.float16)
        step = step.to(tl.uint16, bitcast=True).to(tl.uint32)
        lost |= step == 0x7C00
        step = tl.where(lost, 0, step)
        s = step.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
        r = tl.div_rn(tl.full([ROWS], 1.0, tl.float32), tl.where(s > 0.0, s, 1.0))
        r = tl.where(s > 0.0, r, 0.0)
        q = (v - m[:, None]) * r[:, None]
        q = tl.where(q > 0.0, q, 0.0)
        q = tl.where(q < most[:, None], q, most[:, None])
        code = (q + _ANCHOR).to(tl.uint32, bitcast=True) & 0xFF
        code = tl.reshape(tl.where(lost[:, None], 0, code), [ROWS * PARTS, 32])
        bit = tl.arange(0, 32)[None, :]
        half = tl.arange(0, ROWS * PARTS)
        at = group * ROWS * PARTS + half
        use = at < tiles * PARTS
        for p in tl.static_range(PLANES):
            word = tl.sum(((code >> p) & 1) << bit, 1)
            if MODE == 0:
                tl.store(words_ptr + p * tiles * PARTS + at, word)
            else:
                tl.store(words_ptr + p * tiles * PARTS + at, word, mask=use)
            if SUMS:
                terms = weigh(word, p * tiles * PARTS + at)
                total += tl.sum(tl.where(use, terms, 0), 0)
        if TILE == 64:
            word = tl.sum(((code >> 3) & 1) << bit, 1)
            at = spread((3 * tiles + slot) * PARTS, ROWS, PARTS) + half % PARTS
            use = spread(here & (narrow == 0), ROWS, PARTS)
            tl.store(words_ptr + at, word, mask=use)
            if SUMS:
                total += tl.sum(tl.where(use, weigh(word, at), 0), 0)
        both = tl.where(lost, _LOST, least | (step << 16))
        tl.store(words_ptr + payload * 32 + t, both, mask=here)
        if SUMS:
            total += tl.sum(tl.where(here, weigh(both, payload * 32 + t), 0), 0)
        if TILE == 64:
            pivot = tl.where(lost, 0, pivot)
            at = payload * 128 + tiles * 4 + t
            tl.store(static_ptr + at, pivot.to(tl.uint8), mask=here)
            if SUMS:
                total += tl.sum(tl.where(here, weigh_bytes(pivot, at), 0), 0)
    record = out_ptr.to(tl.pointer_type(tl.int64)) + head + chunk * 4
    if MODE != 0:
        if group == last:
            zero = (chunk * 0).to(tl.int32)
            ends = _ends(n, tiles, hidden, token_tiles, ranked, payload, index, TILE)
            payload_end, scales_end, index_end = ends
            index_end = tl.where(ranked != 0, index_end, index * 128)
            clear(static_ptr, payload_end, payload * 128, zero, zero + 1)
            clear(static_ptr, scales_end, index * 128, zero, zero + 1)
            clear(static_ptr, index_end, static_stride * 128, zero, zero + 1)
            tl.store(record + 2, chunk << 32)
            total += identity + record_term(n, n * 0, zero, chunk.to(tl.int32))
            if chunk == 0:
                k = tl.arange(0, 16)
                h = header_word(k, h0, h1, h2, h3, h4, h5, h6, h7, h8, h9, h10, h11)
                header_ptr = out_ptr.to(tl.pointer_type(tl.uint64))
                tl.store(header_ptr + k, h, mask=k < tl.minimum(head, 12))
    if SUMS:
        tl.atomic_add(record, total.to(tl.int64, bitcast=True), sem="relaxed")


@triton.jit
def _ends(n, tiles, hidden, token_tiles, ranked, payload, index, TILE: tl.constexpr):
    """Where the bytes in use of a chunk's sections end."""
    if TILE == 64:
        wide = tiles - ranked * (n // hidden // _SHARE) * token_tiles
        tokens = (n + hidden - 1) // hidden
        return 8 * (3 * tiles + wide), payload * 128 + tiles * 5, index * 128 + (tokens + 7) // 8
    else:
        return 24 * tiles, payload * 128 + tiles * 4, index * 128


@kernel
def _decode_kernel(
    src_ptr,
    out_ptr,
    counts_ptr,
    sums_ptr,
    status_ptr,
    start: tl.int64,
    stop: tl.int64,
    first_group: tl.int64,
    first_chunk: tl.int64,
    chunks: tl.int64,
    nelem: tl.int64,
    chunk_nelem: tl.int64,
    hidden: tl.int64,
    token_tiles: tl.int64,
    tokens: tl.int64,
    groups: tl.int64,
    ranked: tl.int32,
    static_at: tl.int64,
    static_stride: tl.int64,
    payload: tl.int64,
    MODE: tl.constexpr,
    EXP: tl.constexpr,
    ITEM: tl.constexpr,
    TILE: tl.constexpr,
    STORE: tl.constexpr,
    ADD: tl.constexpr,
    SUMS: tl.constexpr,
):
    """Decode a group's elements from `start` to `stop` of the tensor to the start of `out_ptr`.

    MODE 0: whole groups inside of that range, without gaps, aligned where they go; 1: the others,
    which are the last group of each of `chunks` chunks and those of `start` and `stop`; 2: all
    groups, tiles anywhere.
    """
    ROWS: tl.constexpr = _GROUP // TILE
    pid = tl.program_id(0).to(tl.int64)
    if MODE == 1:
        pick = tl.where(pid == chunks, start, stop - 1)
        chunk = tl.where(pid < chunks, first_chunk + pid, pick // chunk_nelem)
    else:
        chunk = (first_group + pid) // groups
    first, n = _nelem(chunk, nelem, chunk_nelem)
    tiles = _tiles(n, hidden, token_tiles, TILE)
    if MODE == 1:
        group = tl.where(pid < chunks, n // _GROUP, (pick - first) // _GROUP)
    else:
        group = (first_group + pid) % groups
    at = group * _GROUP
    inside = (n - at >= _GROUP) & (first + at >= start) & (first + at + _GROUP <= stop)
    mine = group * ROWS < tiles
    if MODE == 0:
        mine = inside
    elif MODE == 1:
        again = (pid > chunks) & (chunk == start // chunk_nelem)
        again = again & (group == (start - first) // _GROUP)
        mine &= (inside == 0) & ((pid < chunks) | ((n - at >= _GROUP) & (again == 0)))
        mine &= (first + at < stop) & (first + tl.minimum(at + _GROUP, n) > start)
    if mine:
        t = group * ROWS + tl.arange(0, ROWS)
        token = t // token_tiles
        within = (t - token * token_tiles) * TILE
        here = t < tiles
        begin = token * hidden + within
        count = tl.where(here, tl.minimum(tl.minimum(hidden - within, n - begin), TILE), 0)
        wanted = (first + begin < stop) & (first + begin + count > start)
        use = t < tiles * ranked
        rank = tl.load(counts_ptr + chunk * tokens + token, mask=use, other=0)
        b, wrong, total = _decode_rows(
            src_ptr + (static_at + chunk * static_stride) * 128,
            t,
            here,
            wanted,
            tiles,
            tiles - ranked * (n // hidden // _SHARE) * token_tiles,
            t - (rank >> 1) * token_tiles,
            rank & 1,
            payload,
            ROWS,
            TILE,
            EXP,
            ITEM,
            SUMS,
        )
        if wrong != 0:
            report(status_ptr, CHUNK + (chunk << 8) + CHUNK_PAYLOAD)
        if SUMS:
            tl.atomic_add(sums_ptr + chunk, total.to(tl.int64, bitcast=True), sem="relaxed")
        if STORE:
            b = tl.reshape(b, [_GROUP // 16, 16])
            row = tl.arange(0, _GROUP // 16)
            column = tl.arange(0, 16)[None, :]
            if MODE == 0:
                use = None
                i = row[:, None] * 16 + column
                to = tl.multiple_of(first + at - start, 16)
            else:
                to = first + begin - start
                low = tl.minimum(tl.maximum(-to, 0), TILE).to(tl.int32)
                high = tl.maximum(tl.minimum(count, stop - start - to), 0).to(tl.int32)
                i = (row % (TILE // 16) * 16)[:, None] + column
                use = i >= spread(low, ROWS, TILE // 16)[:, None]
                use &= i < spread(high, ROWS, TILE // 16)[:, None]
                to = spread(to, ROWS, TILE // 16)[:, None]
            if ADD == 0:
                kind = tl.uint16 if ITEM == 2 else tl.uint32
                tl.store(elements_at(out_ptr, ITEM) + to + i, b.to(kind), mask=use)
            else:
                value = float_of(b, EXP, ITEM)
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
    hidden: tl.int64,
    token_tiles: tl.int64,
    chunks: tl.int32,
    head: tl.int32,
    static_at: tl.int64,
    static_stride: tl.int64,
    payload: tl.int64,
    index: tl.int64,
    ranked: tl.int32,
    summed: tl.int32,
    TILE: tl.constexpr,
    SUMS: tl.constexpr,
):
    """A chunk's record and empty index; of whole ones padding and checksum; once, the header."""
    chunk = first_chunk + tl.program_id(0)
    _, n = _nelem(chunk, nelem, chunk_nelem)
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
    static_ptr = src_ptr + (static_at + chunk.to(tl.int64) * static_stride) * 128
    tiles = _tiles(n, hidden, token_tiles, TILE)
    ends = _ends(n, tiles, hidden, token_tiles, ranked, payload, index, TILE)
    payload_end, scales_end, index_end = ends
    total, narrow = padding_of(static_ptr, index * 128, index_end)
    if (ranked == 0) & (narrow != 0):
        report(status_ptr, CHUNK + where + CHUNK_PAYLOAD)
    if (chunk >= first_whole) & (chunk < end_whole):
        part, padding = padding_of(static_ptr, payload_end, payload * 128)
        total += part
        part, more = padding_of(static_ptr, scales_end, index * 128)
        total += part
        padding |= more
        part, more = padding_of(static_ptr, index_end, static_stride * 128)
        total += part
        if (padding | more) != 0:
            report(status_ptr, CHUNK + where + CHUNK_PADDING)
        if SUMS:
            total += tl.load(sums_ptr + chunk).to(tl.uint64, bitcast=True) + identity
            total += record_term(n, n * 0, both & 0xFFFFFFFF, both >> 32)
            if total != tl.load(record).to(tl.uint64, bitcast=True):
                report(status_ptr, CHUNK + where + CHUNK_SUM)


def supports(dtype: DType) -> bool:
    """True for the dtypes that tahquant takes."""
    return dtype.name in Tahquant.dtypes


def measure(spec: CodecSpec, dtype: DType, x: torch.Tensor) -> torch.Tensor | None:
    """None: tahquant takes no statistics."""
    return None


@functools.cache
def _variant(name: str, dtype: DType, warps: int, **values: int) -> Variant:
    """A kernel for a dtype."""
    kernels = {"entropy": _entropy_kernel, "encode": _encode_kernel, "decode": _decode_kernel}
    chosen = kernels[name]
    kind = {"EXP": dtype.exponent, "ITEM": dtype.itemsize}
    meta = (values | kind).items()
    order = [n for n in chosen.arg_names if n.isupper()]
    return Variant(chosen, options(warps), **dict(sorted(meta, key=lambda kv: order.index(kv[0]))))


_RANKS = Variant(_rank_kernel, options(_WARPS))
_SELECTS = {sums: Variant(_select_kernel, options(_WARPS), SUMS=sums) for sums in (False, True)}


@functools.cache
def _check_variant(tile: int, sums: bool) -> Variant:
    return Variant(_check_kernel, options(1), TILE=tile, SUMS=sums)


class _Launches:
    """Arguments of a plan's kernels, put together once."""

    def __init__(self, plan: Plan) -> None:
        if not isinstance(plan.codec, Tahquant):
            raise TypeError(f"the plan's codec is {plan.codec.name}; allowed: tahquant")
        spec = self.spec = plan.codec
        n = plan.chunk_nelem
        self.header = header_words(plan)
        self.first_words = self.header[:HEADER_WORDS]
        self.identity = identity_term(spec.id, spec.version, plan.dtype.id, 0)
        self.sizes = plan.nelem, n
        # A token longer than the chunk counts as one of its size: sums of sizes stay in 64 bits.
        hidden = min(spec.hidden, max(n, 1))
        self.hidden = hidden, -(-hidden // spec.tile)
        self.tokens = -(-n // spec.hidden)
        self.ranked = spec.narrow_tokens(n) > 0
        self.head = plan.header.nbytes // 8
        # In units of 128 bytes, so that kernels know the alignment.
        self.static = plan.static_offset // 128, plan.static_stride // 128
        payload, scales, _ = (s.nbytes // 128 for s in plan.layout.sections)
        self.payload, self.index = payload, payload + scales
        self.rows = _GROUP.value // spec.tile
        #: Tiles follow one another without gaps.
        self.dense = n <= spec.hidden or spec.hidden % spec.tile == 0
        self.whole = n // _GROUP.value
        self.groups = spec.tiles(n) // self.rows + 1
        self.aligned = self.dense and (plan.chunks == 1 or n * plan.dtype.itemsize % 16 == 0)

    def split(self, plan: Plan, scratch: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Workspace for sums of chunks and, twice, a number of each token."""
        sums, ranks = align(8 * plan.chunks), align(8 * plan.chunks * self.tokens)
        if not self.ranked:
            return scratch, scratch, scratch
        return scratch[:sums], scratch[sums : sums + ranks], scratch[sums + ranks :]


def _launches(plan: Plan) -> _Launches:
    found = plan.__dict__.get("_tahquant_launches")
    if found is None:
        found = plan.__dict__["_tahquant_launches"] = _Launches(plan)
    return found


def encode(plan: Plan, x, out, scratch, stats=None, key: Key | None = None) -> None:
    """Encode the elements of `x` into `out`; see `tightwire.device` for the contract."""
    sums, counts, _ = _launches(plan).split(plan, scratch)
    _encode(plan, x, out, None, (out, counts, counts, sums, sums))


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
    """Encode what `src`, a planned buffer of `plan`, decodes to plus `x` into `out`.

    `x` has the plan's dtype or float32. Sums are in float32, rounded to the plan's, and kept
    nowhere: where tokens have widths they are made twice. See `tightwire.device` for the contract.
    """
    g = _launches(plan)
    sums, counts, base = g.split(plan, scratch)
    if plan.checksum:
        sums[: 8 * plan.chunks].zero_()
    _rank(plan, src, base, status, 0, plan.chunks)
    _encode(plan, x, out, src, (src, counts, base, sums, status))
    _check(plan, src, sums, status, (0, plan.chunks, 0, plan.chunks), planned, plan.checksum)


def _encode(plan: Plan, x, out, src, tensors) -> None:
    g = _launches(plan)
    summed = {"FUSED": src is not None, "X_ITEM": x.element_size()}
    out[: plan.static_offset].zero_()
    source, counts, base, *_ = tensors
    if g.ranked:
        whole = plan.chunk_nelem // g.spec.hidden
        _variant("entropy", plan.dtype, _WARPS, **summed).launch(
            whole * plan.chunks,
            (x, source, base, counts),
            *g.sizes,
            *g.hidden,
            whole,
            g.tokens,
            *g.static,
            g.payload,
        )
        _SELECTS[plan.checksum].launch(
            plan.chunks,
            (out, counts),
            *g.sizes,
            g.hidden[0],
            g.tokens,
            g.head,
            *g.static,
            g.index,
        )
    modes = [(2, g.groups, g.groups * plan.chunks)]
    if g.aligned and x.data_ptr() % 16 == 0:
        modes = [(0, g.whole, g.whole * plan.chunks), (1, 1, plan.chunks)]
    for mode, groups, programs in modes:
        if programs:
            values = {"MODE": mode, "TILE": g.spec.tile, "SUMS": plan.checksum} | summed
            warps = _WARPS if mode == 0 else _WARPS_ANYWHERE
            _variant("encode", plan.dtype, warps, **values).launch(
                programs,
                (x, out, *tensors),
                *g.first_words,
                g.identity,
                *g.sizes,
                *g.hidden,
                g.tokens,
                groups,
                int(g.ranked),
                g.head,
                *g.static,
                g.payload,
                g.index,
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
    sums, counts, _ = g.split(plan, scratch)
    summed = check and plan.checksum and (start < stop or not plan.nelem)
    if summed:
        sums[: 8 * plan.chunks].zero_()
    if out is None:
        out = src
    first, end, first_whole, end_whole = touched(plan, start, stop)
    _rank(plan, src, counts, status, first, end)
    adding = out.element_size() if add else 0
    values = {"TILE": g.spec.tile, "STORE": store, "ADD": adding}
    aligned = g.aligned and start * plan.dtype.itemsize % 16 == 0 and out.data_ptr() % 16 == 0
    for mode, groups, lo, programs in _programs(plan, start, stop, aligned, end - first):
        if programs > 0:
            warps = _WARPS if mode == 0 else _WARPS_ANYWHERE
            _variant("decode", plan.dtype, warps, MODE=mode, SUMS=summed, **values).launch(
                programs,
                (src, out, counts, sums, status),
                start,
                stop,
                lo,
                first,
                end - first,
                *g.sizes,
                *g.hidden,
                g.tokens,
                groups,
                int(g.ranked),
                *g.static,
                g.payload,
            )
    if not check:
        end_whole = first_whole
    _check(plan, src, sums, status, (first, end, first_whole, end_whole), planned, summed)


def _programs(
    plan: Plan, start: int, stop: int, aligned: bool, chunks: int
) -> list[tuple[int, int, int, int]]:
    """Mode, groups of a chunk, first group and number of programs of each launch of decode."""
    g = _launches(plan)
    if start >= stop:
        return []
    (low, begin), (high, last) = (divmod(i, plan.chunk_nelem) for i in (start, stop - 1))
    if not aligned:
        lo = low * g.groups + tile_range(g.spec, begin, begin + 1)[0] // g.rows
        hi = high * g.groups + tile_range(g.spec, last, last + 1)[0] // g.rows + 1
        return [(2, g.groups, lo, hi - lo)]
    size = _GROUP.value
    lo = low * g.whole + min(begin // size, g.whole)
    hi = high * g.whole + min(last // size + 1, g.whole)
    return [(0, g.whole, lo, hi - lo), (1, 1, 0, chunks + 2)]


def _rank(plan: Plan, src, counts, status, first: int, end: int) -> None:
    g = _launches(plan)
    if g.ranked:
        _RANKS.launch(
            end - first,
            (src, counts, status),
            first,
            *g.sizes,
            g.hidden[0],
            g.tokens,
            *g.static,
            g.index,
        )


def _check(plan: Plan, src, scratch, status, chunks, planned: bool, sums: bool) -> None:
    """Check chunks `first` to `end`, of which some are decoded whole; see `touched`."""
    g = _launches(plan)
    first, end, first_whole, end_whole = chunks
    _check_variant(g.spec.tile, sums).launch(
        end - first,
        (src, scratch, status),
        *g.first_words,
        first,
        first_whole,
        end_whole,
        int(planned),
        g.identity,
        *g.sizes,
        *g.hidden,
        plan.chunks,
        g.head,
        *g.static,
        g.payload,
        g.index,
        int(g.ranked),
        int(plan.checksum),
    )
    if planned:
        match_header(plan, src, status, g.header)
