# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment,attr-defined,misc"
"""Which tokens tahquant codes in fewer bits, on a GPU. specs/tahquant.md, "Narrow tokens".

To encode, a program per token finds its entropy, then programs of a chunk look for the largest of
the narrow ones and write index and ranks; to decode, a launch counts the index. A rank is twice the
narrow tokens before a token, plus 1 if it is narrow itself.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from ..formats.header import align
from .common.base import Plan
from .common.driver_triton import Driver, Tiling
from .common.frame_triton import (
    CHUNK,
    CHUNK_PAYLOAD,
    Places,
    Table,
    clear,
    place_of,
    report,
)
from .common.launch_triton import Variant, kernel, options, program, programs
from .common.minifloat_triton import aligned_for, by_ptx
from .common.runs_triton import (
    RUN,
    exact_product_plus,
    lanes,
    load_columns,
    load_words,
    sum_pairs,
    sum_runs,
    word_values,
)
from .common.tiles_triton import Format, Launch, Tile
from .tahquant import LOG, NARROW_SHARE, Tahquant

#: Runs of a token that are read at once to find its entropy; and, of tokens of no more than
#: ONCE_RUNS, the share of the threads that have to have a run for the token to be read only once.
ENTROPY_RUNS, ONCE_RUNS, ONCE_SHARE = 32, 256, 0.75
#: Warps of the programs that count and pick narrow tokens.
_RANK_WARPS, _SELECT_WARPS = 16, 16
#: Tokens of such a program.
_TOKENS = tl.constexpr(4096)

_SHARE = tl.constexpr(NARROW_SHARE)
_LOG_A, _LOG_B, _LOG_C = (tl.constexpr(c) for c in LOG)
#: Coefficients of `_log2_short`, and bits of 2^23.
SHORT_LOG = (12558.05, -8659.918, 2627.06, -331.1858)
_SHORT_A, _SHORT_B, _SHORT_C, _SHORT_D = (tl.constexpr(c) for c in SHORT_LOG)
_SHORT_LESS = tl.constexpr(6194.0)
_TWO_23 = tl.constexpr(0x4B000000)

#: Words of a table. The first three are the driver's (`Format.padded`).
HIDDEN, _ROW, _, _SIZE, _NELEM, _CHUNKS, _COUNT, _N, _WIDE, RANKED, _AT, _STRIDE, INDEX, _SECOND = (
    tl.constexpr(i) for i in range(14)
)
_WORDS = tl.constexpr(16)
#: Rows of int32 behind a copy of the table, a word for each token: ranks of what is encoded or of
#: the only buffer, those of a buffer that is added, and entropies.
_ENTROPIES = tl.constexpr(2)


def _table(plan: Plan) -> list[int]:
    """What kernels know of a plan. Places are in units of 128 bytes."""
    spec, n = plan.codec, plan.chunk_nelem
    assert isinstance(spec, Tahquant)
    # A token longer than the chunk counts as one of its size: sums of sizes stay in 64 bits.
    hidden = min(spec.hidden, max(n, 1))
    tiles, narrow = spec.tiles(n), spec.narrow_tokens(n)
    row = -(-hidden // spec.tile) * (spec.tile // int(RUN.value))
    dense = n <= spec.hidden or spec.hidden % spec.tile == 0
    payload, scales, _ = (s.nbytes // 128 for s in plan.layout.sections)
    words = [hidden, row, int(dense), n, plan.nelem, plan.chunks, -(-n // spec.hidden), tiles]
    words += [spec.wide_tiles(n), int(narrow > 0), plan.static_offset // 128]
    words += [plan.static_stride // 128, payload + scales, payload]
    return words


@triton.jit
def row_of(plan_ptr, stats_ptr, number, chunk):
    """A row for the tokens of a chunk, by the table at `plan_ptr`."""
    chunks, count = tl.load(plan_ptr + _CHUNKS), tl.load(plan_ptr + _COUNT)
    ranks_ptr = (stats_ptr + _WORDS).to(tl.pointer_type(tl.int32))
    return ranks_ptr + (number * chunks + chunk) * count


@triton.jit
def _chunk(plan_ptr, chunk):
    """(first element, elements) of a chunk."""
    size = tl.load(plan_ptr + _SIZE)
    first = chunk * size
    return first, tl.maximum(tl.minimum(size, tl.load(plan_ptr + _NELEM) - first), 0)


@triton.jit
def _tokens(plan_ptr, n):
    """(tokens of a chunk of `n` elements that have the most elements, all of them)."""
    hidden = tl.load(plan_ptr + HIDDEN)
    return n // hidden, (n + hidden - 1) // hidden


@triton.jit
def _index_of(ptr, plan_ptr, chunk):
    """The index of a chunk of the buffer at `ptr`."""
    static = tl.load(plan_ptr + _AT) + chunk * tl.load(plan_ptr + _STRIDE)
    return ptr + (static + tl.load(plan_ptr + INDEX)) * 128


@triton.jit
def tile_counts(stats_ptr, n, TILE: tl.constexpr):
    """Tiles of a chunk of `n` elements, those of wide tokens, and those of a token."""
    of_token = tl.load(stats_ptr + _ROW) // (TILE // RUN)
    tiles, wide = tl.load(stats_ptr + _N), tl.load(stats_ptr + _WIDE)
    # Nothing has to be divided for a whole chunk.
    if n != tl.load(stats_ptr + _SIZE):
        hidden = tl.load(stats_ptr + HIDDEN)
        tiles = n // hidden * of_token + (n % hidden + TILE - 1) // TILE
        wide = tiles - tl.load(stats_ptr + RANKED) * (n // hidden // _SHARE) * of_token
    return tiles, wide, of_token


@triton.jit
def _log2(number):
    """log2 of float32 numbers in units of 2^-12, uint32, plus 127 * 2^12; 0 of 0.

    The page's h is A less a whole part, which is one of a sum: rounded up by adding 2^16 - 1.
    """
    u = number.to(tl.uint32, bitcast=True) >> 7
    f = (u & 0xFFFF).to(tl.int32, bitcast=True)
    h = (_LOG_C * f - (_LOG_B << 16)) >> 16
    h = (h * f + ((_LOG_A << 16) + 0xFFFF)) >> 16
    more = (((f * (65536 - f)) >> 16) * h) >> 16
    return (u + more.to(tl.uint32, bitcast=True)) >> 4


@triton.jit
def _log2_short(number, PTX: tl.constexpr):
    """As `_log2`, of numbers of at most 8 significant bits, plus the bits of 2^23.

    What it is above a straight line between powers of two is the whole part of a polynomial, whose
    coefficients were found for these 128 significands.
    """
    u = number.to(tl.uint32, bitcast=True)
    m = ((u & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)
    p = exact_product_plus(m, _SHORT_D, _SHORT_C, PTX)
    p = exact_product_plus(p, m, _SHORT_B, PTX)
    p = exact_product_plus(p, m, _SHORT_A, PTX)
    return (u >> 11) + _whole_part(p, m, _SHORT_LESS, PTX)


@triton.jit
def _whole_part(x, y, LESS: tl.constexpr, PTX: tl.constexpr):
    """The whole part of x * y - LESS, from 0 to 2^16, as bits of 2^23 more than it."""
    if PTX:
        # 2^23 less 0 or 6194.
        FROM: tl.constexpr = "0f4B000000" if LESS == 0 else "0f4AFFCF9C"
        return by_ptx("fma.rz.f32 $0, $1, $2, " + FROM + ";", "=r,r,r", (x, y))
    else:
        whole = (x * y - LESS).to(tl.int32).to(tl.float32)
        return (whole + 8388608.0).to(tl.uint32, bitcast=True)


@triton.jit
def _token_values(x_ptr, t, at, rank, F: tl.constexpr, L: tl.constexpr, DECODE: tl.constexpr):
    """float32 columns of a token's magnitudes from element `at` on, 0 behind it; `t` is it as
    tile: `t.tile` its number, `t.n` the elements of the chunk, `t.first` its own first one.
    """
    run = at // RUN + lanes(L.rows)
    hidden = tl.load(t.scale + HIDDEN)
    count = hidden - run * RUN
    WORDS: tl.constexpr = L.aligned
    if WORDS:
        v = load_words(x_ptr + (t.first + at) * L.x_item, count > 0, L.rows, L.x_item)
    else:
        v = load_columns(x_ptr, t.first + run * RUN, count, L.exponent, L.x_item, RUN)
    if L.add:
        row = tl.load(t.scale + _ROW)
        run += t.tile * row
        # Also what pads a token's last tile is rotated with the rest.
        here = run < (t.tile + 1) * row
        tile = run // (F.tile // RUN)
        counts = tile_counts(t.scale, t.n, F.tile)
        y, _, _ = DECODE(t, run, tile, rank, here, counts, F, False, L.ptx)
        PAIRS: tl.constexpr = L.aligned and L.cvt and (L.x_item == 2)
        if PAIRS:
            v = word_values(sum_pairs(y, v, L.exponent), L.exponent, 2)
        else:
            if WORDS:
                v = word_values(v, L.exponent, L.x_item)
            v = sum_runs(y, v, L.exponent, L.item, L.cvt)
        used = ()
        for k in tl.static_range(RUN):
            used = used + (tl.where(k < count, tl.abs(v[k]), 0.0),)
        return used
    else:
        if WORDS:
            magnitudes = ()
            for k in tl.static_range(len(v)):
                magnitudes = magnitudes + (v[k] & (0x7FFFFFFF if L.x_item == 4 else 0x7FFF7FFF),)
            v = word_values(magnitudes, L.exponent, L.x_item)
        else:
            magnitudes = ()
            for k in tl.static_range(RUN):
                magnitudes = magnitudes + (tl.abs(v[k]),)
            v = magnitudes
        return v


@triton.jit
def _top_of(v, top):
    """The larger of `top` and magnitudes; NaN wherever one is."""
    for k in tl.static_range(RUN):
        top = tl.maximum(top, v[k], propagate_nan=tl.PropagateNan.ALL)
    return top


@triton.jit
def _highest(top):
    """The largest exponent field, at least 1, of magnitudes."""
    return tl.maximum(tl.max(top.to(tl.int32, bitcast=True), 0) >> 23, 1)


@triton.jit
def _weighted(v, highest, L: tl.constexpr):
    """The sums over runs of q and q * lg(q), uint64, by magnitudes and the largest exponent."""
    # A is `highest`: magnitudes are multiplied by 2^(142 - A).
    power = tl.minimum(142 - highest, 127)
    scale = ((power + 127) << 23).to(tl.float32, bitcast=True)
    if (highest < 15) | (highest == 255):
        # In two steps that are exact. What is not finite counts as 2^15.
        more = ((142 - highest - power + 127) << 23).to(tl.float32, bitcast=True)
        cap = tl.where(highest == 255, 32768.0, 65536.0)
        scaled = ()
        for k in tl.static_range(RUN):
            scaled = scaled + (tl.minimum(v[k] * scale * more, cap),)
        v = scaled
        scale = scale * 0.0 + 1.0
    SHORT: tl.constexpr = L.exponent == 8 and L.item == 2
    MORE: tl.constexpr = _TWO_23 if SHORT else 0
    ROWS: tl.constexpr = L.rows
    total = tl.zeros([ROWS], tl.uint32)
    logs = tl.zeros([ROWS], tl.uint32)
    weighted = tl.zeros([ROWS], tl.uint64)
    for k in tl.static_range(RUN):
        bits = _whole_part(v[k], scale, 0.0, L.ptx)
        q = bits.to(tl.float32, bitcast=True) - 8388608.0
        if SHORT:
            lg = _log2_short(q, L.ptx)
        else:
            lg = _log2(q)
        total += bits
        logs += lg
        weighted += bits.to(tl.uint64) * lg.to(tl.uint64)
    # What was added to every q and to every logarithm adds these. The sums of 32 bits wrap around.
    total = (total - ((RUN * _TWO_23) & 0xFFFFFFFF)).to(tl.uint64)
    logs = (logs - ((RUN * MORE) & 0xFFFFFFFF)).to(tl.uint64) + RUN * MORE
    return total, weighted - logs * _TWO_23 - total * (MORE + (127 << 12))


@kernel
def _entropy_kernel(
    x_ptr,
    src_ptr,
    stats_ptr,
    plan_ptr,
    whole: tl.int64,
    F: tl.constexpr,
    L: tl.constexpr,
    ONCE: tl.constexpr,
    DECODE: tl.constexpr,
    member=None,
):
    """The entropy of one of the `whole` tokens of a chunk, in bits times 2^12, to `stats_ptr`.

    With L.add of the elements plus those that the static parts at `src_ptr` decode to; the ranks
    of their tokens are there, and DECODE decodes runs. ONCE: the program's threads hold a token.
    L.aligned: tokens are whole tiles, at multiples of 16 bytes.
    """
    # Those that are read first when tiles are encoded are read last here: some stay in the cache.
    pid = (programs(member) - 1 - program(member)).to(tl.uint32)
    chunk = (pid // whole.to(tl.uint32)).to(tl.int64)
    token = pid.to(tl.int64) - chunk * whole
    hidden = tl.load(plan_ptr + HIDDEN)
    first, n = _chunk(plan_ptr, chunk)
    if (token + 1) * hidden <= n:
        first += token * hidden
        if L.aligned:
            first = tl.multiple_of(first, 16)
        ROWS: tl.constexpr = L.rows
        rank = tl.zeros([ROWS], tl.int64)
        static_ptr = src_ptr
        if L.add:
            rank += tl.load(row_of(plan_ptr, stats_ptr, 1, chunk) + token).to(tl.int64)
            static_ptr += chunk * tl.load(plan_ptr + _STRIDE) * 128
        second = tl.load(plan_ptr + _SECOND)
        t = Tile(chunk, token, n, first, n, static_ptr, second, plan_ptr, plan_ptr, 1, plan_ptr, 0)
        top = tl.zeros([ROWS], tl.float32)
        if ONCE:
            v = _token_values(x_ptr, t, token * 0, rank, F, L, DECODE)
            total, weighted = _weighted(v, _highest(_top_of(v, top)), L)
        else:
            at = token * 0
            while at < hidden:
                top = _top_of(_token_values(x_ptr, t, at, rank, F, L, DECODE), top)
                at += L.rows * RUN
            highest = _highest(top)
            total = tl.zeros([ROWS], tl.uint64)
            weighted = tl.zeros([ROWS], tl.uint64)
            at = token * 0
            while at < hidden:
                sums = _weighted(_token_values(x_ptr, t, at, rank, F, L, DECODE), highest, L)
                total += sums[0]
                weighted += sums[1]
                at += L.rows * RUN
        s = tl.sum(total, 0).to(tl.int64, bitcast=True)
        mean = tl.sum(weighted, 0).to(tl.int64, bitcast=True) // tl.maximum(s, 1)
        entropy = _log2(s.to(tl.float32)).to(tl.int64) - (127 << 12) - mean
        entropy = tl.where(s > 0, tl.maximum(entropy, 0), 0).to(tl.int32)
        tl.store(row_of(plan_ptr, stats_ptr, _ENTROPIES, chunk) + token, entropy)


@kernel
def _select_kernel(out_ptr, stats_ptr, plan_ptr, blocks: tl.int32, member=None):
    """Pick the narrow tokens of a chunk; ranks and the index of one of its `blocks` of tokens.

    All programs of a chunk look for the same bound.
    """
    pid = program(member).to(tl.int64)
    chunk, block = pid // blocks, pid % blocks
    _copy(stats_ptr, plan_ptr, pid)
    _, n = _chunk(plan_ptr, chunk)
    whole, count = _tokens(plan_ptr, n)
    share = whole // _SHARE
    entropies_ptr = row_of(plan_ptr, stats_ptr, _ENTROPIES, chunk)
    i = tl.arange(0, _TOKENS)
    least = tl.full([_TOKENS], 1 << 30, tl.int32)
    most = tl.zeros([_TOKENS], tl.int32)
    at = share * 0
    while at < whole:
        use = at + i < whole
        e = tl.load(entropies_ptr + at + i, mask=use, other=0)
        least, most = tl.minimum(least, tl.where(use, e, 1 << 30)), tl.maximum(most, e)
        at += _TOKENS
    bound = tl.min(least, 0)
    ties = share.to(tl.int32)
    # The largest number that fewer than `share` entropies are below, three bits at a time: how many
    # of them are below each of seven numbers.
    step = ties * 0 + 1
    # No entropy is near this; whatever lies in memory, the loop ends.
    span = tl.minimum(tl.max(most, 0) - bound + 1, 1 << 24)
    while step < span:
        step = step * 8
    while step > 1:
        step = step // 8
        below = ()
        for _k in tl.static_range(7):
            below = below + (tl.zeros([_TOKENS], tl.int32),)
        at = share * 0
        while at < whole:
            e = tl.load(entropies_ptr + at + i, mask=at + i < whole, other=1 << 30)
            more = ()
            for k in tl.static_range(7):
                more = more + (below[k] + (e < bound + (k + 1) * step).to(tl.int32),)
            below = more
            at += _TOKENS
        start = bound
        for k in tl.static_range(7):
            less = tl.sum(below[k], 0)
            if less < share:
                bound = start + (k + 1) * step
                ties = share.to(tl.int32) - less
    # Those of the blocks before this one.
    less = tl.zeros([_TOKENS], tl.int32)
    tied = tl.zeros([_TOKENS], tl.int32)
    at = share * 0
    while at < tl.minimum(block * _TOKENS, whole):
        e = tl.load(entropies_ptr + at + i, mask=at + i < whole, other=1 << 30)
        less += (e < bound).to(tl.int32)
        tied += (e == bound).to(tl.int32)
        at += _TOKENS
    before, tied = tl.sum(less, 0), tl.sum(tied, 0)
    before += tl.minimum(tied, ties)
    at = block * _TOKENS
    e = tl.load(entropies_ptr + at + i, mask=at + i < whole, other=1 << 30)
    tie = (e == bound).to(tl.int32)
    chosen = (e < bound) | ((tie != 0) & (tied + tl.cumsum(tie, 0) - tie < ties))
    chosen = chosen.to(tl.int32)
    rank = (before + tl.cumsum(chosen, 0) - chosen) * 2 + chosen
    tl.store(row_of(plan_ptr, stats_ptr, 0, chunk) + at + i, rank, mask=at + i < count)
    byte = tl.arange(0, _TOKENS // 8)
    bits = tl.reshape(chosen, [_TOKENS // 8, 8]) << tl.arange(0, 8)[None, :]
    bits = tl.sum(bits, 1)
    index_ptr = _index_of(out_ptr, plan_ptr, chunk)
    tl.store(index_ptr + at // 8 + byte, bits.to(tl.uint8), mask=at + byte * 8 < count)


@triton.jit
def _copy(stats_ptr, plan_ptr, program):
    """Copy a table, by one program."""
    words = tl.arange(0, _WORDS)
    tl.store(stats_ptr + words, tl.load(plan_ptr + words), mask=words * 0 == program)


@triton.jit
def _ones(v):
    """How many of the low 8 bits are 1."""
    v -= (v >> 1) & 0x55
    v = (v & 0x33) + ((v >> 2) & 0x33)
    return (v + (v >> 4)) & 15


@triton.jit
def _write_ranks(src_ptr, stats_ptr, status_ptr, plan_ptr, chunk, number, block):
    """Count a chunk's narrow tokens. Its row gets the ranks of a block of tokens, if it has any."""
    _, n = _chunk(plan_ptr, chunk)
    whole, count = _tokens(plan_ptr, n)
    ranked = tl.load(plan_ptr + RANKED)
    index_ptr = _index_of(src_ptr, plan_ptr, chunk)
    i = tl.arange(0, _TOKENS)
    odd = tl.zeros([_TOKENS], tl.int32)
    total = tl.zeros([_TOKENS], tl.int32)
    before = tl.zeros([_TOKENS], tl.int32)
    at = whole * 0
    while at < (count + 7) // 8:
        byte = tl.load(index_ptr + at + i, mask=at + i < (count + 7) // 8, other=0).to(tl.int32)
        odd |= byte >> tl.minimum(tl.maximum(whole - (at + i) * 8, 0), 8).to(tl.int32)
        ones = _ones(byte)
        total += ones
        before += tl.where(at + i < block * (_TOKENS // 8), ones, 0)
        at += _TOKENS
    good = (tl.max(odd, 0) == 0) & (tl.sum(total, 0) == ranked * (whole // _SHARE))
    if (good == 0) & (block == 0):
        report(status_ptr, CHUNK + (chunk << 8) + CHUNK_PAYLOAD)
    if ranked != 0:
        token = block * _TOKENS + i
        byte = tl.load(index_ptr + token // 8, mask=token < count, other=0).to(tl.int32)
        # Of a wrong index no token is narrow: every word is weighed once all the same.
        narrow = tl.where(good, (byte >> (i & 7)) & 1, 0)
        start = tl.where(good, tl.sum(before, 0), 0)
        rank = (start + tl.cumsum(narrow, 0) - narrow) * 2 + narrow
        tl.store(row_of(plan_ptr, stats_ptr, number, chunk) + token, rank, mask=token < count)


@kernel
def _rank_kernel(
    src_ptr,
    stats_ptr,
    status_ptr,
    plan_ptr,
    first_chunk: tl.int64,
    blocks: tl.int32,
    number: tl.int32,
    member=None,
):
    """Ranks of a block of tokens of a buffer, to row `number`."""
    pid = program(member).to(tl.int64)
    chunk, block = first_chunk + pid // blocks, pid % blocks
    if tl.load(plan_ptr + RANKED) != 0:
        _copy(stats_ptr, plan_ptr, pid)
    _write_ranks(src_ptr, stats_ptr, status_ptr, plan_ptr, chunk, number, block)


@kernel
def _rank_places_kernel(sources_ptr, stats_ptr, plan_ptr, blocks: tl.int32):
    """As `_rank_kernel`, of all chunks of several buffers."""
    pid = tl.program_id(0).to(tl.int64)
    if tl.load(plan_ptr + RANKED) != 0:
        _copy(stats_ptr, plan_ptr, pid)
    block, chunk = pid % blocks, pid // blocks
    chunks = tl.load(plan_ptr + _CHUNKS)
    number = chunk // chunks
    src_ptr, _, status_ptr = place_of(sources_ptr, number)
    _write_ranks(src_ptr, stats_ptr, status_ptr, plan_ptr, chunk % chunks, number, block)


@kernel
def _clear_kernel(out_ptr, plan_ptr, member=None):
    """The index of a chunk without narrow tokens, which is all there is behind the scales."""
    chunk = program(member).to(tl.int64)
    index_ptr = _index_of(out_ptr, plan_ptr, chunk)
    nbytes = (tl.load(plan_ptr + _STRIDE) - tl.load(plan_ptr + INDEX)) * 128
    clear(index_ptr, nbytes * 0, nbytes, chunk * 0, chunk * 0 + 1)


_CLEAR = Variant(_clear_kernel, options(1))
_RANKS = Variant(_rank_kernel, options(_RANK_WARPS))
_RANK_PLACES = Variant(_rank_places_kernel, options(_RANK_WARPS))
_SELECT = Variant(_select_kernel, options(_SELECT_WARPS))


@functools.cache
def _entropy_variant(form: Format, launch: Launch, once: bool, decode) -> Variant:
    values = {"F": form, "L": launch, "ONCE": once, "DECODE": decode}
    return Variant(_entropy_kernel, options(launch.rows // 32), **values)


def table_on(plan: Plan, device: torch.device) -> torch.Tensor:
    """The words of `_table` in the memory of a device, int64."""
    table: Table | None = plan.__dict__.get("_tahquant_table")
    if table is None:
        table = plan.__dict__["_tahquant_table"] = Table(_table(plan))
    return table.on(device)


def is_ranked(plan: Plan) -> bool:
    """Whether a whole chunk has narrow tokens."""
    return bool(plan.codec.narrow_tokens(plan.chunk_nelem))


def _blocks(plan: Plan) -> int:
    """Programs that the tokens of a chunk are ranked by."""
    return max(1, -(-plan.chunk_nelem // int(plan.codec.hidden) // int(_TOKENS.value)))


def stats_of(plan: Plan, scratch: torch.Tensor) -> torch.Tensor:
    """What the driver's kernels get: the table of a plan, with ranks behind it where there are any.

    Those are still to be written to the workspace.
    """
    return scratch[align(8 * plan.chunks) :] if is_ranked(plan) else table_on(plan, scratch.device)


def sum_stats(plan: Plan, places: Places) -> torch.Tensor:
    """As `stats_of`, with the ranks of several buffers."""
    table = stats = table_on(plan, places.table.device)
    if is_ranked(plan):
        ranks = places.number * plan.chunks * -(-plan.chunk_nelem // plan.codec.hidden)
        stats = torch.empty(
            int(_WORDS.value) + -(-ranks // 2), dtype=table.dtype, device=table.device
        )
    if plan.codec.forward:
        blocks = _blocks(plan)
        programs = places.number * plan.chunks * blocks
        _RANK_PLACES.launch(programs, (places.table, stats, table), blocks)
    return stats


def read_ranks(plan: Plan, src, stats, status, first: int, end: int, number: int = 0) -> None:
    """Read the indexes of chunks `first` to `end` of a buffer, and write ranks to row `number`."""
    if plan.codec.forward:
        blocks = _blocks(plan)
        tensors = src, stats, status, table_on(plan, src.device)
        _RANKS.launch((end - first) * blocks, tensors, first, blocks, number)


def clear_index(plan: Plan, out: torch.Tensor) -> None:
    """Write the index of a buffer without narrow tokens."""
    if plan.codec.forward:
        table = table_on(plan, out.device)
        _CLEAR.launch(plan.chunks, (out, table))


def choose_tokens(plan: Plan, driver: Driver, decode_runs, x, out, stats, src=None) -> None:
    """Write the index: that of `x`, or of its sum with the static parts `src`; and the ranks."""
    if not is_ranked(plan):
        clear_index(plan, out)
        return
    hidden = plan.codec.hidden
    runs = -(-hidden // int(RUN.value))
    rows = max(32, triton.next_power_of_2(runs))
    once = rows <= ONCE_RUNS and runs >= ONCE_SHARE * rows
    launch = driver.launch(
        Tiling(rows if once else ENTROPY_RUNS, 1),
        plan.dtype,
        x.device,
        x_item=x.element_size(),
        aligned=aligned_for(plan, x) and hidden % plan.codec.tile == 0,
        add=src is not None,
    )
    table, whole = table_on(plan, x.device), plan.chunk_nelem // hidden
    tensors = x, x if src is None else src, stats, table
    _entropy_variant(driver.form, launch, once, decode_runs).launch(
        whole * plan.chunks, tensors, whole
    )
    blocks = _blocks(plan)
    _SELECT.launch(plan.chunks * blocks, (out, stats, table), blocks)
