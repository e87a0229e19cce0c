# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment,misc"
"""tahquant on a GPU: a run of 32 elements to a thread, a tile of 64 to two. specs/tahquant.md.

Where tokens have widths, a program per token finds its entropy and a program per chunk picks the
narrow ones before tiles are encoded; decoding counts them first. What is added over values is
spelled out in the page's order or is in integers.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from ..formats.dtypes import DType
from ..formats.header import align
from .common.base import Key, Plan
from .common.frame_triton import (
    CHUNK,
    CHUNK_PAYLOAD,
    frame_of,
    padding_of,
    report,
    touched,
    weigh,
    weigh_bytes,
)
from .common.hadamard_triton import butterflies, spread
from .common.launch_triton import PTX, Variant, kernel, options
from .common.minifloat_triton import converts
from .common.runs_triton import (
    ANCHOR,
    RUN,
    add_elements,
    code_values,
    code_word,
    element_words,
    exact_product_plus,
    lanes,
    load_elements,
    load_words,
    report_any,
    store_elements,
    store_runs,
    sum_runs,
    sum_words,
    transpose_bits,
    word_values,
)
from .tahquant import (
    LOG,
    NAN_WORD,
    NARROW_SHARE,
    PIVOT,
    TOO_LARGE,
    Tahquant,
    tile_range,
)

#: Launch parameters: runs of a group of tiles, one program's share, one to a thread; and of what is
#: read at once of a token whose entropy is found.
RUNS = 128
ENTROPY_RUNS = 32
#: Whether decoded runs go through shared memory to where they are stored.
STAGED = False
_NAN_WORD, _TOO_LARGE = tl.constexpr(NAN_WORD), tl.constexpr(TOO_LARGE)
_PIVOT = tl.constexpr(PIVOT)
_SHARE = tl.constexpr(NARROW_SHARE)
_LOG_A, _LOG_B, _LOG_C = (tl.constexpr(c) for c in LOG)
#: Tokens that the kernels of chunks look at together, their warps, and a power of eight above all
#: entropies.
_TOKENS = tl.constexpr(4096)
_RANK_WARPS, _SELECT_WARPS = 16, 32
_ENTROPIES = tl.constexpr(1 << 18)


@triton.jit
def _tiles(n, hidden, token_tiles, TILE: tl.constexpr):
    """Tiles of a chunk of `n` elements."""
    return n // hidden * token_tiles + (n % hidden + TILE - 1) // TILE


@triton.jit
def _nelem(chunk, nelem, chunk_nelem):
    first = chunk.to(tl.int64) * chunk_nelem
    return first, tl.maximum(tl.minimum(chunk_nelem, nelem - first), 0)


@triton.jit
def _tile_counts(n, chunk_nelem, tiles, wide, hidden, token_tiles, ranked, TILE: tl.constexpr):
    """Tiles of a chunk of `n` elements, and those of wide tokens; `tiles` and `wide`: of a whole
    chunk, of which nothing has to be divided.
    """
    if n != chunk_nelem:
        tiles = _tiles(n, hidden, token_tiles, TILE)
        wide = tiles - ranked * (n // hidden // _SHARE) * token_tiles
    return tiles, wide


@triton.jit
def _log2(number):
    """log2 of float32 numbers in units of 2^-12, uint32; of 0 anything.

    The page's h is A less a whole part, which is one of a sum: rounded up by adding 2^16 - 1.
    """
    u = number.to(tl.uint32, bitcast=True) >> 7
    f = (u & 0xFFFF).to(tl.int32, bitcast=True)
    h = (_LOG_C * f - (_LOG_B << 16)) >> 16
    h = (h * f + ((_LOG_A << 16) + 0xFFFF)) >> 16
    more = (((f * (65536 - f)) >> 16) * h) >> 16
    return (u - (127 << 16) + more.to(tl.uint32, bitcast=True)) >> 4


@triton.jit
def _whole_part(y, PTX: tl.constexpr):
    """The whole part of float32 numbers from 0 to 2^16, as bits of 2^23 more than it."""
    if PTX:
        return tl.inline_asm_elementwise(
            "add.rz.f32 $0, $1, 0f4B000000;",
            "=r,r",
            [y],
            dtype=tl.uint32,
            is_pure=True,
            pack=1,
        )
    else:
        return (y.to(tl.int32).to(tl.float32) + 8388608.0).to(tl.uint32, bitcast=True)


@triton.jit
def _of_tiles(x, RUNS: tl.constexpr, WHAT: tl.constexpr):
    """Of the two runs of each tile the sum, the larger or the smaller value, for both."""
    both = tl.reshape(x, [RUNS // 2, 2])
    if WHAT == "sum":
        one = tl.sum(both, 1)
    elif WHAT == "max":
        one = tl.max(both, 1)
    else:
        one = tl.min(both, 1)
    return spread(one, RUNS // 2, 2)


@triton.jit
def _rotated(v, RUNS: tl.constexpr):
    """The transform of tiles of two runs."""
    v = butterflies(v, RUN, 5)
    second = lanes(RUNS) % 2 == 1
    rotated = ()
    for k in tl.static_range(RUN):
        own = v[k].to(tl.int32, bitcast=True)
        other = (_of_tiles(own, RUNS, "sum") - own).to(tl.float32, bitcast=True)
        rotated = rotated + (tl.where(second, other - v[k], v[k] + other) * 0.125,)
    return rotated


@triton.jit
def _swap(v, p, at_p, RUNS: tl.constexpr):
    """Tiles whose first value and that at `p`, which is `at_p` (bits), trade places."""
    part = lanes(RUNS) % 2
    first = tl.where(part == 0, v[0].to(tl.int32, bitcast=True), 0)
    first = _of_tiles(first, RUNS, "sum").to(tl.float32, bitcast=True)
    swapped = ()
    for k in tl.static_range(RUN):
        swapped = swapped + (tl.where(p == part * RUN + k, first, v[k]),)
    kept = (tl.where(part == 0, at_p.to(tl.float32, bitcast=True), swapped[0]),)
    for k in tl.static_range(1, RUN):
        kept = kept + (swapped[k],)
    return kept


@triton.jit
def _value_at(v, p, RUNS: tl.constexpr):
    """Bits of the value of tiles at `p`."""
    part = lanes(RUNS) % 2
    found = part * 0
    for k in tl.static_range(RUN):
        found = tl.where(p == part * RUN + k, v[k].to(tl.int32, bitcast=True), found)
    return _of_tiles(found, RUNS, "sum")


@triton.jit
def _decode_runs(
    static_ptr,
    run,
    t,
    here,
    wanted,
    tiles,
    wide,
    rank,
    token_tiles,
    payload,
    RUNS: tl.constexpr,
    TILE: tl.constexpr,
    SUMS: tl.constexpr,
    PTX: tl.constexpr,
):
    """Decode runs `run` of tiles `t`, those that are `here`; `rank`: what `_rank_kernel` says of
    their tokens. `tiles` and `wide` are the words of a plane and of that of wide tokens.

    Returns float32 columns, which runs are lost, which of the `wanted` ones are wrong, and the
    keyed sum (SUMS).
    """
    PARTS: tl.constexpr = TILE // RUN
    LOG: tl.constexpr = 2 if TILE == 64 else 3
    words_ptr = static_ptr.to(tl.pointer_type(tl.uint32))
    total = tl.zeros([RUNS], tl.uint64)
    words = ()
    for p in tl.static_range(3 if TILE == 64 else 6):
        at = p * tiles * PARTS
        word = tl.load(words_ptr + at + run, mask=here, other=0)
        if SUMS:
            total += weigh(word, at + run)
        words = words + (word,)
    if TILE == 64:
        slot = t - (rank >> 1) * token_tiles
        use = here & ((rank & 1) == 0) & (slot >= 0) & (slot < wide)
        at = 3 * tiles * PARTS + slot * PARTS + run % PARTS
        word = tl.load(words_ptr + at, mask=use, other=0)
        if SUMS:
            total += weigh(word, at)
        words = words + (word,)
    else:
        words = words + (words[0] * 0, words[0] * 0)
    words = transpose_bits(words, LOG)
    scale = tl.load(words_ptr + payload * 32 + t, mask=here, other=0)
    if SUMS:
        total += tl.where(run % PARTS == 0, weigh(scale, payload * 32 + t), 0)
    lost = scale == _NAN_WORD
    good = ((scale & 0x7C00) != 0x7C00) & (scale < 0x7C000000)
    bad = (good | lost) == 0
    scale = tl.where(good, scale, 0)
    m = scale.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    s = (scale >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    m = tl.where(lost, float("nan"), m)
    codes = ()
    for j in tl.static_range(1 << LOG):
        codes = codes + (code_values(words[j], 1 << LOG, 0, PTX),)
    y = ()
    for k in tl.static_range(RUN):
        y = y + (exact_product_plus(codes[k % (1 << LOG)][k >> LOG], s, m, PTX),)
    if TILE == 64:
        at = payload * 128 + tiles * 4 + t
        pivot = tl.load(static_ptr + at, mask=here, other=0).to(tl.int32)
        if SUMS:
            total += tl.where(run % PARTS == 0, weigh_bytes(pivot, at), 0)
        bad |= (pivot != 0) & ((pivot >> 6) != 2)
        if tl.max(pivot, 0) > 0:
            rotated = _rotated(y, RUNS)
            rotated = _swap(rotated, pivot & 63, _value_at(rotated, pivot & 63, RUNS), RUNS)
            chosen = ()
            for k in tl.static_range(RUN):
                chosen = chosen + (tl.where(pivot != 0, rotated[k], y[k]),)
            y = chosen
    if SUMS:
        return y, lost, bad & wanted, tl.sum(total, 0)
    else:
        return y, lost, bad & wanted, tl.zeros([], tl.uint64)


@triton.jit
def _load(
    x_ptr,
    at,
    begin,
    count,
    here,
    RUNS: tl.constexpr,
    EXP: tl.constexpr,
    ITEM: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Columns of runs: words (WORDS), those from element `at` on that are `here`, or float32 values
    of `count` elements each from elements `begin` on.
    """
    if WORDS:
        return load_words(x_ptr + at * ITEM, here, RUNS, ITEM)
    else:
        i = tl.arange(0, RUN)[None, :]
        return load_elements(x_ptr, begin[:, None] + i, i < count[:, None], RUNS, EXP, ITEM)


@triton.jit
def _added(
    y,
    x,
    count,
    EXP: tl.constexpr,
    ITEM: tl.constexpr,
    X_ITEM: tl.constexpr,
    WORDS: tl.constexpr,
    CVT: tl.constexpr,
):
    """float32 columns of what was decoded plus columns of `_load`, 0 behind `count` elements."""
    if WORDS and CVT and (X_ITEM == 2):
        v = sum_words(y, x, EXP)
    elif WORDS:
        v = sum_runs(y, word_values(x, EXP, X_ITEM), EXP, ITEM, CVT)
    else:
        v = sum_runs(y, x, EXP, ITEM, CVT)
    if count is not None:
        # What fills a tile up decodes to errors.
        used = ()
        for k in tl.static_range(RUN):
            used = used + (tl.where(k < count, v[k], 0.0),)
        v = used
    return v


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
    tiles: tl.int64,
    wide: tl.int64,
    static_at: tl.int64,
    static_stride: tl.int64,
    payload: tl.int64,
    RUNS: tl.constexpr,
    ALIGNED: tl.constexpr,
    EXP: tl.constexpr,
    ITEM: tl.constexpr,
    FUSED: tl.constexpr,
    X_ITEM: tl.constexpr,
    PTX: tl.constexpr,
    CVT: tl.constexpr,
):
    """The entropy of one of the `whole` tokens of a chunk, in bits times 2^12.

    FUSED: of the elements plus those that the buffer `src_ptr` decodes to, `base_ptr` being what
    `_rank_kernel` says of its tokens; the elements at `x_ptr` then have X_ITEM bytes, the plan's
    ITEM or float32's 4. ALIGNED: tokens are whole tiles, at multiples of 16 bytes.
    """
    TILE: tl.constexpr = 64
    pid = tl.program_id(0).to(tl.uint32)
    chunk = (pid // whole.to(tl.uint32)).to(tl.int64)
    token = pid.to(tl.int64) - chunk * whole
    first, n = _nelem(chunk, nelem, chunk_nelem)
    if (token + 1) * hidden <= n:
        first += token * hidden
        if ALIGNED:
            first = tl.multiple_of(first, 16)
        run = lanes(RUNS)
        rank = tl.zeros([RUNS], tl.int64)
        if FUSED:
            rank += tl.load(base_ptr + chunk * tokens + token)
            tiles, wide = _tile_counts(
                n, chunk_nelem, tiles, wide, hidden, token_tiles, hidden * 0 + 1, TILE
            )
        top = tl.zeros([RUNS], tl.int32)
        highest = tl.full([], 1, tl.int32)
        total = tl.zeros([RUNS], tl.int64)
        weighted = tl.zeros([RUNS], tl.uint64)
        for measured in range(2):
            # A is `highest`: magnitudes are multiplied by 2^(142 - A), in two steps that are exact.
            power = tl.minimum(142 - highest, 127)
            scale = ((power + 127) << 23).to(tl.float32, bitcast=True)
            more = ((142 - highest - power + 127) << 23).to(tl.float32, bitcast=True)
            # What is not finite counts as 2^15.
            cap = tl.where(highest == 255, 32768.0, 65536.0)
            at = token * 0
            while at < hidden:
                here = at + run * RUN < hidden
                count = tl.minimum(tl.maximum(hidden - at - run * RUN, 0), RUN)
                v = _load(
                    x_ptr,
                    first + at,
                    first + at + run * RUN,
                    count,
                    here,
                    RUNS,
                    EXP,
                    X_ITEM,
                    ALIGNED,
                )
                if FUSED:
                    t = token * token_tiles + at // TILE + run // 2
                    # Also what pads a token's last tile is rotated with the rest.
                    inside = at // TILE + run // 2 < token_tiles
                    y, _, _, _ = _decode_runs(
                        src_ptr + (static_at + chunk * static_stride) * 128,
                        t * 2 + run % 2,
                        t,
                        inside,
                        inside,
                        tiles,
                        wide,
                        rank,
                        token_tiles,
                        payload,
                        RUNS,
                        TILE,
                        False,
                        PTX,
                    )
                    v = _added(y, v, count, EXP, ITEM, X_ITEM, ALIGNED, CVT)
                elif ALIGNED:
                    v = word_values(v, EXP, ITEM)
                if measured == 0:
                    for k in tl.static_range(RUN):
                        top = tl.maximum(top, tl.abs(v[k]).to(tl.int32, bitcast=True))
                else:
                    part = tl.zeros([RUNS], tl.float32)
                    for k in tl.static_range(RUN):
                        bits = _whole_part(tl.minimum(tl.abs(v[k]) * scale * more, cap), PTX)
                        q = bits.to(tl.float32, bitcast=True) - 8388608.0
                        part += q
                        weighted += (bits & 0x7FFFFF).to(tl.uint64) * _log2(q).to(tl.uint64)
                    total += part.to(tl.int32).to(tl.int64)
                at += RUNS * RUN
            highest = tl.maximum(tl.max(top, 0) >> 23, 1)
        s = tl.sum(total, 0)
        mean = tl.sum(weighted.to(tl.int64, bitcast=True), 0) // tl.maximum(s, 1)
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
    ties = share
    # The largest number that fewer than `share` entropies are below, three bits at a time: how many
    # of them are below each of seven numbers.
    step = share * 0 + _ENTROPIES
    while step > 1:
        step = step // 8
        below = ()
        for _k in tl.static_range(7):
            below = below + (tl.zeros([_TOKENS], tl.int32),)
        at = share * 0
        while at < whole:
            e = tl.load(counts_ptr + at + i, mask=at + i < whole, other=1 << 40)
            more = ()
            for k in tl.static_range(7):
                more = more + (below[k] + (e < bound + (k + 1) * step).to(tl.int32),)
            below = more
            at += _TOKENS
        start = bound
        for k in tl.static_range(7):
            count = tl.sum(below[k], 0)
            if count < share:
                bound = start + (k + 1) * step
                ties = share - count
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
    odd = tl.zeros([_TOKENS], tl.int32)
    at = whole * 0
    while at < count:
        use = at + i < (count + 7) // 8 * 8
        byte = tl.load(index_ptr + (at + i) // 8, mask=use, other=0).to(tl.int32)
        narrow = (byte >> (i & 7)) & 1
        odd |= tl.where(at + i >= whole, narrow, 0)
        rank = (before + tl.cumsum(narrow, 0) - narrow) * 2 + narrow
        tl.store(counts_ptr + at + i, rank, mask=at + i < count)
        before += tl.sum(narrow, 0)
        at += _TOKENS
    if (tl.max(odd, 0) != 0) | (before != whole // _SHARE):
        report(status_ptr, CHUNK + (chunk << 8) + CHUNK_PAYLOAD)
        # Of a wrong index no token is narrow: every word is weighed once all the same.
        at = whole * 0
        while at < count:
            tl.store(counts_ptr + at + i, i * 0, mask=at + i < count)
            at += _TOKENS


@kernel
def _empty_kernel(
    src_ptr,
    status_ptr,
    first_chunk: tl.int64,
    nelem: tl.int64,
    chunk_nelem: tl.int64,
    hidden: tl.int64,
    static_at: tl.int64,
    static_stride: tl.int64,
    index: tl.int64,
):
    """Of chunks that have no narrow tokens: no bit of the index may be set."""
    chunk = (first_chunk + tl.program_id(0)).to(tl.int64)
    _, n = _nelem(chunk, nelem, chunk_nelem)
    index_ptr = src_ptr + (static_at + chunk * static_stride + index) * 128
    tokens = (n + hidden - 1) // hidden
    _, narrow = padding_of(index_ptr, tokens * 0, (tokens + 7) // 8)
    if narrow != 0:
        report(status_ptr, CHUNK + (chunk << 8) + CHUNK_PAYLOAD)


@triton.jit
def _places(
    counts_ptr,
    run,
    n,
    tiles,
    hidden,
    token_tiles,
    ranked,
    MODE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Of runs of a chunk what `counts_ptr` says of their tokens, 0 where nothing is `ranked`; their
    numbers of elements; and where in the chunk these begin.
    """
    PARTS: tl.constexpr = TILE // RUN
    t = run // PARTS
    if MODE == 0:
        # Tiles without gaps are fewer than 2^31.
        token = (t.to(tl.uint32) // token_tiles.to(tl.uint32)).to(tl.int64)
        at = run * RUN
        count = at * 0 + RUN
    else:
        token = t // token_tiles
        within = (t - token * token_tiles) * TILE + run % PARTS * RUN
        at = token * hidden + within
        count = tl.minimum(tl.minimum(hidden - within, n - at), RUN)
        count = tl.where(t < tiles, tl.maximum(count, 0), 0)
    if TILE == 64:
        rank = tl.load(counts_ptr + token, mask=t < tiles * ranked, other=0)
    else:
        rank = t * 0
    return rank, count, at


@triton.jit
def _encode_runs(
    v,
    static_ptr,
    run,
    t,
    here,
    tiles,
    rank,
    token_tiles,
    payload,
    RUNS: tl.constexpr,
    TILE: tl.constexpr,
    SUMS: tl.constexpr,
):
    """Encode float32 columns of runs `run` of tiles `t`, those that are `here`; `rank`: what
    `_select_kernel` says of their tokens. Gives the keyed sum (SUMS).
    """
    PARTS: tl.constexpr = TILE // RUN
    LOG: tl.constexpr = 2 if TILE == 64 else 3
    # Extremes of the two halves of each run.
    low, high, top = (), (), ()
    for half in tl.static_range(2):
        a, b = v[16 * half], v[16 * half]
        for k in tl.static_range(16 * half + 1, 16 * half + 16):
            a = tl.minimum(a, v[k], propagate_nan=tl.PropagateNan.ALL)
            b = tl.maximum(b, v[k], propagate_nan=tl.PropagateNan.ALL)
        size = tl.maximum(tl.abs(a), tl.abs(b), propagate_nan=tl.PropagateNan.ALL)
        low, high, top = low + (a,), high + (b,), top + (size.to(tl.int32, bitcast=True),)
    low, high = tl.minimum(low[0], low[1]), tl.maximum(high[0], high[1])
    largest = tl.maximum(top[0], top[1])
    pivot = largest * 0
    if TILE == 64:
        # The second largest of four parts of a tile: no more than that of its elements.
        other = tl.minimum(top[0], top[1])
        other = tl.maximum(_of_tiles(other, RUNS, "max"), _of_tiles(largest, RUNS, "min"))
        largest = _of_tiles(largest, RUNS, "max")
        low, high = _of_whole_tiles(low, high, largest, RUNS)
        dominated = _dominates(largest, other)
        if tl.max(dominated.to(tl.int32), 0) > 0:
            v, pivot = _rotated_dominated(v, largest, dominated, RUNS)
            low, high = v[0], v[0]
            for k in tl.static_range(1, RUN):
                low, high = tl.minimum(low, v[k]), tl.maximum(high, v[k])
            low, high = _of_whole_tiles(low, high, largest, RUNS)
    lost = largest >= _TOO_LARGE
    least = tl.where(low == 0.0, 0.0, low).to(tl.float16)
    least = least.to(tl.uint16, bitcast=True).to(tl.uint32)
    lost |= (least & 0x7FFF) == 0x7C00
    m = least.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    most = tl.full([RUNS], 15.0 if TILE == 64 else 63.0, tl.float32)
    if TILE == 64:
        most = tl.where((rank & 1) != 0, 7.0, most)
    span = high - m
    step = tl.div_rn(tl.where(span > 0.0, span, 0.0), most).to(tl.float16)
    step = step.to(tl.uint16, bitcast=True).to(tl.uint32)
    lost |= step == 0x7C00
    s = step.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    r = tl.div_rn(tl.full([RUNS], 1.0, tl.float32), tl.where(s > 0.0, s, 1.0))
    r = tl.where(s > 0.0, r, 0.0)
    numbers = ()
    for k in tl.static_range(RUN):
        q = tl.minimum(tl.maximum((v[k] - m) * r, 0.0), most)
        numbers = numbers + (q + ANCHOR,)
    words = ()
    for j in tl.static_range(1 << LOG):
        word = code_word(numbers, j, 1 << LOG, 1 << LOG, False)
        words = words + (tl.where(lost, 0, word),)
    words = transpose_bits(words, LOG)
    total = tl.zeros([RUNS], tl.uint64)
    words_ptr = static_ptr.to(tl.pointer_type(tl.uint32))
    for p in tl.static_range(3 if TILE == 64 else 6):
        at = p * tiles * PARTS
        tl.store(words_ptr + at + run, words[p], mask=here)
        if SUMS:
            total += tl.where(here, weigh(words[p], at + run), 0)
    # The first run of a tile writes what the tile has.
    own = here & (run % PARTS == 0)
    if TILE == 64:
        slot = t - (rank >> 1) * token_tiles
        use = here & ((rank & 1) == 0)
        at = (3 * tiles + slot) * PARTS + run % PARTS
        tl.store(words_ptr + at, words[3], mask=use)
        if SUMS:
            total += tl.where(use, weigh(words[3], at), 0)
        pivot = tl.where(lost, 0, pivot)
        at = payload * 128 + tiles * 4 + t
        tl.store(static_ptr + at, pivot.to(tl.uint8), mask=own)
        if SUMS:
            total += tl.where(own, weigh_bytes(pivot, at), 0)
    both = tl.where(lost, _NAN_WORD, least | (step << 16))
    tl.store(words_ptr + payload * 32 + t, both, mask=own)
    if SUMS:
        total += tl.where(own, weigh(both, payload * 32 + t), 0)
        return tl.sum(total, 0)
    else:
        return tl.zeros([], tl.uint64)


@triton.jit
def _of_whole_tiles(low, high, largest, RUNS: tl.constexpr):
    """(least, largest value) of tiles of two runs whose own these are; 0 of tiles that are lost."""
    lost = largest >= _TOO_LARGE
    low, high = tl.where(lost, 0.0, low), tl.where(lost, 0.0, high)
    return _of_tiles(low, RUNS, "min"), _of_tiles(high, RUNS, "max")


@triton.jit
def _dominates(top, second):
    """Whether a magnitude, int32 bits, is positive and at least twice another."""
    top, second = top.to(tl.float32, bitcast=True), second.to(tl.float32, bitcast=True)
    return (top > 0.0) & (top >= second * 2.0)


@triton.jit
def _rotated_dominated(v, top, dominated, RUNS: tl.constexpr):
    """(columns, of tiles of two runs those rotated that one magnitude dominates; pivot bytes).

    `top` are the largest magnitudes; where `dominated` is 0, none dominates.
    """
    part = lanes(RUNS) % 2
    p, count, second = part * 0, part * 0, part * 0
    for k in tl.static_range(RUN):
        size = tl.abs(v[k]).to(tl.int32, bitcast=True)
        found = size == top
        p = tl.where(found, part * RUN + k, p)
        count += found.to(tl.int32)
        second = tl.maximum(second, tl.where(found, 0, size))
    p, count = _of_tiles(p, RUNS, "sum"), _of_tiles(count, RUNS, "sum")
    second = tl.where(count == 1, _of_tiles(second, RUNS, "max"), top)
    dominated = dominated & _dominates(top, second) & (top < _TOO_LARGE)
    rotated = _rotated(_swap(v, p, _value_at(v, p, RUNS), RUNS), RUNS)
    chosen = ()
    for k in tl.static_range(RUN):
        chosen = chosen + (tl.where(dominated, rotated[k], v[k]),)
    return chosen, tl.where(dominated, p + _PIVOT, 0)


@kernel
def _encode_kernel(
    x_ptr,
    out_ptr,
    src_ptr,
    counts_ptr,
    base_ptr,
    sums_ptr,
    status_ptr,
    nelem: tl.int64,
    chunk_nelem: tl.int64,
    hidden: tl.int64,
    token_tiles: tl.int64,
    tokens: tl.int64,
    tiles: tl.int64,
    wide: tl.int64,
    groups: tl.int64,
    ranked: tl.int32,
    head: tl.int32,
    static_at: tl.int64,
    static_stride: tl.int64,
    payload: tl.int64,
    RUNS: tl.constexpr,
    MODE: tl.constexpr,
    EXP: tl.constexpr,
    ITEM: tl.constexpr,
    TILE: tl.constexpr,
    SUMS: tl.constexpr,
    FUSED: tl.constexpr,
    X_ITEM: tl.constexpr,
    PTX: tl.constexpr,
    CVT: tl.constexpr,
):
    """Encode a group of tiles. The index was written before.

    MODE 0: whole groups whose tiles follow one another without gaps; 1: the group at the end of a
    chunk of those, which may be empty; 2: both, tiles anywhere.
    `tiles` and `wide` are those of a whole chunk. `ranked`: there are narrow tokens. FUSED: as
    `_entropy_kernel`.
    """
    PARTS: tl.constexpr = TILE // RUN
    TILES: tl.constexpr = RUNS // PARTS
    pid = tl.program_id(0)
    chunk = pid
    if MODE != 1:
        chunk = (pid.to(tl.uint32) // groups.to(tl.uint32)).to(tl.int32)
    group = (pid - chunk * groups.to(tl.int32)).to(tl.int64)
    chunk = chunk.to(tl.int64)
    first, n = _nelem(chunk, nelem, chunk_nelem)
    # fmt: off
    tiles, wide = _tile_counts(
        n, chunk_nelem, tiles, wide, hidden, token_tiles, ranked.to(tl.int64), TILE
    )
    # fmt: on
    last = n // (RUNS * RUN)
    if MODE == 2:
        last = tiles // TILES
    if MODE == 1:
        group = last
    static_ptr = out_ptr + (static_at + chunk * static_stride) * 128
    total = tl.zeros([], tl.uint64)
    if (group < last) | ((MODE != 0) & (group == last)):
        run = group * RUNS + lanes(RUNS)
        t = run // PARTS
        rank, count, at = _places(
            counts_ptr + chunk * tokens, run, n, tiles, hidden, token_tiles, ranked, MODE, TILE
        )
        here = t < tiles
        used = None
        if MODE != 0:
            used = count
        begin = first + group * (RUNS * RUN)
        if MODE == 0:
            begin = tl.multiple_of(begin, 16)
        v = _load(x_ptr, begin, first + at, count, None, RUNS, EXP, X_ITEM, MODE == 0)
        if FUSED:
            source, _, _ = _places(
                base_ptr + chunk * tokens, run, n, tiles, hidden, token_tiles, ranked, MODE, TILE
            )
            y, _, wrong, weighed = _decode_runs(
                src_ptr + (static_at + chunk * static_stride) * 128,
                run,
                t,
                here,
                here,
                tiles,
                wide,
                source,
                token_tiles,
                payload,
                RUNS,
                TILE,
                SUMS,
                PTX,
            )
            report_any(status_ptr, CHUNK + (chunk << 8) + CHUNK_PAYLOAD, wrong)
            if SUMS:
                tl.atomic_add(sums_ptr + chunk, weighed.to(tl.int64, bitcast=True), sem="relaxed")
            v = _added(y, v, used, EXP, ITEM, X_ITEM, MODE == 0, CVT)
        elif MODE == 0:
            v = word_values(v, EXP, ITEM)
        total += _encode_runs(
            v, static_ptr, run, t, here, tiles, rank, token_tiles, payload, RUNS, TILE, SUMS
        )
    record = out_ptr.to(tl.pointer_type(tl.int64)) + head + chunk * 4
    if SUMS:
        tl.atomic_add(record, total.to(tl.int64, bitcast=True), sem="relaxed")


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
    tiles: tl.int64,
    wide: tl.int64,
    groups: tl.int64,
    ranked: tl.int32,
    static_at: tl.int64,
    static_stride: tl.int64,
    payload: tl.int64,
    RUNS: tl.constexpr,
    MODE: tl.constexpr,
    EXP: tl.constexpr,
    ITEM: tl.constexpr,
    TILE: tl.constexpr,
    STORE: tl.constexpr,
    ADD: tl.constexpr,
    STAGED: tl.constexpr,
    SUMS: tl.constexpr,
    PTX: tl.constexpr,
    CVT: tl.constexpr,
):
    """Decode a group's elements from `start` to `stop` of the tensor to the start of `out_ptr`.

    MODE 0: whole groups inside of that range, without gaps, aligned where they go; 1: the others,
    which are the last group of each of `chunks` chunks and those of `start` and `stop`; 2: all
    groups, tiles anywhere.
    """
    PARTS: tl.constexpr = TILE // RUN
    GROUP: tl.constexpr = RUNS * RUN
    pid = tl.program_id(0).to(tl.int64)
    if MODE == 1:
        pick = tl.where(pid == chunks, start, stop - 1)
        chunk = tl.where(pid < chunks, first_chunk + pid, pick // chunk_nelem)
    else:
        ahead = (first_group + pid).to(tl.uint32)
        chunk = (ahead // groups.to(tl.uint32)).to(tl.int64)
    first, n = _nelem(chunk, nelem, chunk_nelem)
    # fmt: off
    tiles, wide = _tile_counts(
        n, chunk_nelem, tiles, wide, hidden, token_tiles, ranked.to(tl.int64), TILE
    )
    # fmt: on
    if MODE == 1:
        group = tl.where(pid < chunks, n // GROUP, (pick - first) // GROUP)
    else:
        group = first_group + pid - chunk * groups
    at = group * GROUP
    inside = (n - at >= GROUP) & (first + at >= start) & (first + at + GROUP <= stop)
    mine = group * (RUNS // PARTS) < tiles
    if MODE == 0:
        mine = inside
    elif MODE == 1:
        again = (pid > chunks) & (chunk == start // chunk_nelem)
        again = again & (group == (start - first) // GROUP)
        mine &= (inside == 0) & ((pid < chunks) | ((n - at >= GROUP) & (again == 0)))
        mine &= (first + at < stop) & (first + tl.minimum(at + GROUP, n) > start)
    if mine:
        run = group * RUNS + lanes(RUNS)
        t = run // PARTS
        rank, count, begin = _places(
            counts_ptr + chunk * tokens, run, n, tiles, hidden, token_tiles, ranked, MODE, TILE
        )
        here = t < tiles
        wanted = here
        if MODE != 0:
            edge = begin - run % PARTS * RUN
            size = tl.minimum(tl.minimum(hidden - t % token_tiles * TILE, n - edge), TILE)
            wanted = here & (first + edge < stop) & (first + edge + size > start)
        y, lost, wrong, total = _decode_runs(
            src_ptr + (static_at + chunk * static_stride) * 128,
            run,
            t,
            here,
            wanted,
            tiles,
            wide,
            rank,
            token_tiles,
            payload,
            RUNS,
            TILE,
            SUMS,
            PTX,
        )
        report_any(status_ptr, CHUNK + (chunk << 8) + CHUNK_PAYLOAD, wrong)
        if SUMS:
            tl.atomic_add(sums_ptr + chunk, total.to(tl.int64, bitcast=True), sem="relaxed")
        if STORE:
            to = first + at - start
            i = tl.arange(0, RUN)[None, :]
            use = None
            if MODE == 0:
                to = tl.multiple_of(to, 16)
                i = tl.arange(0, RUNS)[:, None] * RUN + i
            else:
                to = first - start
                i = begin[:, None] + i
                use = (i < (begin + count)[:, None]) & (i + to >= 0) & (i + to < stop - start)
            if ADD > 0:
                add_elements(out_ptr, to + i, y, use, EXP, ITEM, ADD, CVT)
            else:
                words = element_words(y, lost, EXP, ITEM, CVT)
                if MODE == 0:
                    store_runs(out_ptr + to * ITEM, words, RUNS, STAGED)
                else:
                    store_elements(out_ptr, to + i, words, use, RUNS, ITEM)


@functools.cache
def _variant(name: str, dtype: DType, runs: int, **values: int) -> Variant:
    """A kernel for a dtype, with a thread for each of `runs`."""
    kernels = {"entropy": _entropy_kernel, "encode": _encode_kernel, "decode": _decode_kernel}
    chosen = kernels[name]
    kind = {"EXP": dtype.exponent, "ITEM": dtype.itemsize, "PTX": PTX, "RUNS": runs}
    meta = (values | kind).items()
    order = [n for n in chosen.arg_names if n.isupper()]
    return Variant(
        chosen, options(runs // 32), **dict(sorted(meta, key=lambda kv: order.index(kv[0])))
    )


_RANKS = Variant(_rank_kernel, options(_RANK_WARPS))
_EMPTY = Variant(_empty_kernel, options(1))
_SELECTS = {
    sums: Variant(_select_kernel, options(_SELECT_WARPS), SUMS=sums) for sums in (False, True)
}


class _Launches:
    """Arguments of a plan's kernels, put together once."""

    def __init__(self, plan: Plan) -> None:
        if not isinstance(plan.codec, Tahquant):
            raise TypeError(f"the plan's codec is {plan.codec.name}; allowed: tahquant")
        spec = self.spec = plan.codec
        n = plan.chunk_nelem
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
        group = RUNS * int(RUN.value)
        self.runs, self.group, self.rows = RUNS, group, group // spec.tile
        #: Tiles follow one another without gaps.
        self.dense = n <= spec.hidden or spec.hidden % spec.tile == 0
        self.whole = n // group
        tiles = spec.tiles(n)
        self.groups = tiles // self.rows + 1
        self.tiles = tiles, tiles - spec.narrow_tokens(n) * self.hidden[1]
        self.aligned = self.dense and (plan.chunks == 1 or n % 16 == 0)

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
    """Encode the elements of `x` into `out`; see `tightwire.gpu` for the contract."""
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
    nowhere: where tokens have widths they are made twice. See `tightwire.gpu` for the contract.
    """
    g = _launches(plan)
    sums, counts, base = g.split(plan, scratch)
    if plan.checksum:
        sums[: 8 * plan.chunks].zero_()
    _rank(plan, src, base, status, 0, plan.chunks)
    _encode(plan, x, out, src, (src, counts, base, sums, status))
    frame_of(plan).check(
        src, sums, status, 0, plan.nelem, whole=True, summed=plan.checksum, planned=planned
    )


def _encode(plan: Plan, x, out, src, tensors) -> None:
    g = _launches(plan)
    summed = {"FUSED": src is not None, "X_ITEM": x.element_size()}
    frame_of(plan).begin(out)
    cvt = converts(out.device)
    source, counts, base, *_ = tensors
    if g.ranked:
        whole = plan.chunk_nelem // g.spec.hidden
        aligned = g.aligned and g.spec.hidden % g.spec.tile == 0 and x.data_ptr() % 16 == 0
        _variant("entropy", plan.dtype, ENTROPY_RUNS, ALIGNED=aligned, CVT=cvt, **summed).launch(
            whole * plan.chunks,
            (x, source, base, counts),
            *g.sizes,
            *g.hidden,
            whole,
            g.tokens,
            *g.tiles,
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
    elif g.spec.forward:
        statics = out[plan.static_offset : plan.dynamic_offset].view(plan.chunks, -1)
        statics[:, 128 * g.index :].zero_()
    modes = [(2, g.groups, g.groups * plan.chunks)]
    if g.aligned and x.data_ptr() % 16 == 0:
        modes = [(0, g.whole, g.whole * plan.chunks), (1, 1, plan.chunks)]
    for mode, groups, programs in modes:
        if programs:
            values = {"MODE": mode, "TILE": g.spec.tile, "SUMS": plan.checksum, "CVT": cvt}
            _variant("encode", plan.dtype, g.runs, **values, **summed).launch(
                programs,
                (x, out, *tensors),
                *g.sizes,
                *g.hidden,
                g.tokens,
                *g.tiles,
                groups,
                int(g.ranked),
                g.head,
                *g.static,
                g.payload,
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
    sums, counts, _ = g.split(plan, scratch)
    summed = check and plan.checksum and (start < stop or not plan.nelem)
    if summed:
        sums[: 8 * plan.chunks].zero_()
    if out is None:
        out = src
    first, end, _, _ = touched(plan, start, stop)
    _rank(plan, src, counts, status, first, end)
    adding = out.element_size() if add else 0
    values = {"TILE": g.spec.tile, "STORE": store, "ADD": adding, "STAGED": STAGED}
    values |= {"SUMS": summed, "CVT": converts(src.device)}
    aligned = g.aligned and start % 16 == 0 and out.data_ptr() % 16 == 0
    for mode, groups, lo, programs in _programs(plan, start, stop, aligned, end - first):
        if programs > 0:
            _variant("decode", plan.dtype, g.runs, MODE=mode, **values).launch(
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
                *g.tiles,
                groups,
                int(g.ranked),
                *g.static,
                g.payload,
            )
    frame_of(plan).check(
        src, sums, status, start, stop, whole=check, summed=summed, planned=planned
    )


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
    size = g.group
    lo = low * g.whole + min(begin // size, g.whole)
    hi = high * g.whole + min(last // size + 1, g.whole)
    return [(0, g.whole, lo, hi - lo), (1, 1, 0, chunks + 2)]


def _rank(plan: Plan, src, counts, status, first: int, end: int) -> None:
    """Read the indexes of chunks `first` to `end`."""
    g = _launches(plan)
    sizes = first, *g.sizes, g.hidden[0]
    if g.ranked:
        _RANKS.launch(end - first, (src, counts, status), *sizes, g.tokens, *g.static, g.index)
    elif g.spec.forward:
        _EMPTY.launch(end - first, (src, status), *sizes, *g.static, g.index)
