# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment,attr-defined,misc"
"""tahquant on a GPU: a run of 32 elements to a thread, a tile of 64 to two. specs/tahquant.md.

Which tokens are narrow is known before tiles are looked at: see tahquant_ranks_triton.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from .common.base import Key, Plan
from .common.driver_triton import Driver, Source, Tiling, encode_sum_function, sum_function
from .common.frame_triton import Places, Words, touched, weigh, weigh_bytes
from .common.hadamard_triton import butterflies, spread
from .common.merged_triton import Work, launch_merged
from .common.minifloat_triton import halves
from .common.runs_triton import (
    ANCHOR,
    RUN,
    code_values,
    code_word,
    exact_product_plus,
    lanes,
    transpose_bits,
    word_values,
)
from .common.tiles_triton import Format
from .tahquant import NAN_WORD, PIVOT, TOO_LARGE, Tahquant
from .tahquant_ranks_triton import (
    HIDDEN,
    INDEX,
    RANKED,
    choose_tokens,
    clear_index,
    is_ranked,
    read_ranks,
    row_of,
    stats_of,
    sum_stats,
    tile_counts,
)


@dataclass(frozen=True)
class Tiles(Format):
    """What the kernels know of a direction; `tile`: elements of a tile."""

    tile: int


#: Launch parameters: of encoding, decoding, and encoding sums.
TILINGS = (Tiling(128, 4), Tiling(128, 4), Tiling(128, 4))
#: Where decoded elements are added to others: what tiles of padded rows take more of spills.
ADDING = Tiling(128, 4, registers=168)

_NAN_WORD, _TOO_LARGE = tl.constexpr(NAN_WORD), tl.constexpr(TOO_LARGE)
_PIVOT = tl.constexpr(PIVOT)


@triton.jit
def _runs_of(t, F: tl.constexpr, L: tl.constexpr, MASKED: tl.constexpr):
    """Runs of a group of tiles: (their numbers, tiles and tokens; twice the narrow tokens before
    those plus 1 if they are narrow; what `tile_counts` gives).
    """
    TILE: tl.constexpr = F.tile
    counts = tile_counts(t.scale, t.n, TILE)
    run = t.tile * L.rows + lanes(L.rows)
    tile = run // (TILE // RUN)
    if counts[0] < 1 << 31:
        token = (tile.to(tl.uint32) // counts[2].to(tl.uint32)).to(tl.int64)
    else:
        token = tile // counts[2]
    rank = tile * 0
    if TILE == 64:
        use = tile < counts[0] * tl.load(t.scale + RANKED)
        ranks = tl.load(row_of(t.scale, t.scale, t.number, t.chunk) + token, mask=use, other=0)
        rank += ranks.to(tl.int64)
    return run, tile, token, rank, counts


@triton.jit
def _and(a, b):
    """Both `a` and `b`; None is true."""
    if a is None:
        return b
    else:
        return a & b


@triton.jit
def _read(ptr, here):
    """What is at `ptr`, 0 where it is not `here`."""
    if here is None:
        return tl.load(ptr)
    else:
        return tl.load(ptr, mask=here, other=0)


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
def _table_of(stats_ptr, static_ptr, at, F: tl.constexpr, CHOOSE: tl.constexpr):
    """SCALE: where the words of `_table` and ranks are."""
    return stats_ptr, True


@triton.jit
def _decode_runs(
    t, run, tile, rank, here, counts, F: tl.constexpr, SUMS: tl.constexpr, PTX: tl.constexpr
):
    """Decode runs `run` of tiles `tile` with ranks of their tokens, those that are `here`.

    Returns float32 columns, NaN where lost, which runs are wrong, and the checksum terms (SUMS).
    """
    TILE: tl.constexpr = F.tile
    PARTS: tl.constexpr = TILE // RUN
    LOG: tl.constexpr = 2 if TILE == 64 else 3
    RUNS: tl.constexpr = run.shape[0]
    tiles, wide, of_token = counts
    words_ptr = t.static_ptr.to(tl.pointer_type(tl.uint32))
    total = tl.zeros([RUNS], tl.uint64)
    words = ()
    for p in tl.static_range(3 if TILE == 64 else 6):
        at = p * tiles * PARTS
        word = _read(words_ptr + at + run, here)
        if SUMS:
            total += weigh(word, at + run)
        words = words + (word,)
    if TILE == 64:
        slot = tile - (rank >> 1) * of_token
        use = _and(here, ((rank & 1) == 0) & (slot >= 0) & (slot < wide))
        at = 3 * tiles * PARTS + slot * PARTS + run % PARTS
        word = tl.load(words_ptr + at, mask=use, other=0)
        if SUMS:
            total += weigh(word, at)
        words = words + (word,)
    else:
        words = words + (words[0] * 0, words[0] * 0)
    words = transpose_bits(words, LOG)
    scale = _read(words_ptr + t.at * 32 + tile, here)
    if SUMS:
        total += tl.where(run % PARTS == 0, weigh(scale, t.at * 32 + tile), 0)
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
        at = t.at * 128 + tiles * 4 + tile
        pivot = _read(t.static_ptr + at, here).to(tl.int32)
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
        return y, bad, tl.sum(total, 0)
    else:
        return y, bad, tl.zeros([], tl.uint64)


@triton.jit
def _unpack(t, lo, hi, F: tl.constexpr, L: tl.constexpr, MASKED: tl.constexpr):
    """Values of a group of tiles. Wrong words count in tiles that hold some of the elements `lo` to
    `hi`.
    """
    run, tile, token, rank, counts = _runs_of(t, F, L, MASKED)
    here = None
    if MASKED:
        here = tile < counts[0]
    y, wrong, total = _decode_runs(t, run, tile, rank, here, counts, F, L.sums, L.ptx)
    if MASKED:
        hidden = tl.load(t.scale + HIDDEN)
        begin = token * hidden + (tile - token * counts[2]) * F.tile
        end = tl.minimum(tl.minimum(begin + F.tile, (token + 1) * hidden), t.n)
        wrong = wrong & here & (begin < hi) & (end > lo)
    return y, wrong, total


@triton.jit
def _extreme_pair(a, b, EXP: tl.constexpr, WHAT: tl.constexpr):
    """The lesser (WHAT: min) or larger (max) of two pairs of 16-bit floats; NaN if one is NaN."""
    TYPE: tl.constexpr = "bf16x2" if EXP == 8 else "f16x2"
    return tl.inline_asm_elementwise(
        WHAT + ".NaN." + TYPE + " $0, $1, $2;",
        "=r,r,r",
        [a, b],
        dtype=tl.uint32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _extremes(v, EXP: tl.constexpr):
    """(least, largest values) of runs' elements at even and at odd places; NaN wherever one is."""
    if len(v) == RUN:
        low, high = (v[0], v[1]), (v[0], v[1])
        for k in tl.static_range(2, RUN, 2):
            low = (
                tl.minimum(low[0], v[k], propagate_nan=tl.PropagateNan.ALL),
                tl.minimum(low[1], v[k + 1], propagate_nan=tl.PropagateNan.ALL),
            )
            high = (
                tl.maximum(high[0], v[k], propagate_nan=tl.PropagateNan.ALL),
                tl.maximum(high[1], v[k + 1], propagate_nan=tl.PropagateNan.ALL),
            )
        return low, high
    else:
        least, most = v[0], v[0]
        for k in tl.static_range(1, RUN // 2):
            least = _extreme_pair(least, v[k], EXP, "min")
            most = _extreme_pair(most, v[k], EXP, "max")
        return halves(least, EXP), halves(most, EXP)


@triton.jit
def _limited_product(x, y, limit, PTX: tl.constexpr):
    """The product x * y from 0 to `limit`, which is below 1."""
    if PTX:
        q = tl.inline_asm_elementwise(
            "mul.rn.sat.f32 $0, $1, $2;",
            "=r,r,r",
            [x, y],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        q = tl.maximum(x * y, 0.0)
    return tl.minimum(q, limit)


@triton.jit
def _pack(v, t, s, draw, stats_ptr, F: tl.constexpr, L: tl.constexpr, MASKED: tl.constexpr):
    """Encode a group of tiles. The index was written before; its terms are added here."""
    TILE: tl.constexpr = F.tile
    PARTS: tl.constexpr = TILE // RUN
    LOG: tl.constexpr = 2 if TILE == 64 else 3
    RUNS: tl.constexpr = L.rows
    run, tile, token, rank, counts = _runs_of(t, F, L, MASKED)
    here = None
    if MASKED:
        here = tile < counts[0]
    tiles, _, of_token = counts
    low, high = _extremes(v, L.exponent)
    if len(v) != RUN:
        v = word_values(v, L.exponent, 2)
    top = ()
    for k in tl.static_range(2):
        size = tl.maximum(tl.abs(low[k]), tl.abs(high[k]), propagate_nan=tl.PropagateNan.ALL)
        top = top + (size.to(tl.int32, bitcast=True),)
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
    # One more than the largest code, by which codes are divided: a power of two.
    unit = tl.full([RUNS], 16.0 if TILE == 64 else 64.0, tl.float32)
    if TILE == 64:
        unit = tl.where((rank & 1) != 0, 8.0, unit)
    span = high - m
    step = tl.div_rn(tl.where(span > 0.0, span, 0.0), unit - 1.0).to(tl.float16)
    step = step.to(tl.uint16, bitcast=True).to(tl.uint32)
    lost |= step == 0x7C00
    scale = step.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    r = tl.div_rn(tl.full([RUNS], 1.0, tl.float32), tl.where(scale > 0.0, scale, 1.0))
    part = tl.where(unit == 16.0, 0.0625, tl.where(unit == 8.0, 0.125, 0.015625))
    r = tl.where(scale > 0.0, r * part, 0.0)
    numbers = ()
    for k in tl.static_range(RUN):
        q = _limited_product(v[k] - m, r, 1.0 - part, L.ptx)
        numbers = numbers + (exact_product_plus(q, unit, ANCHOR, L.ptx),)
    words = ()
    for j in tl.static_range(1 << LOG):
        word = code_word(numbers, j, 1 << LOG, 1 << LOG, False)
        words = words + (tl.where(lost, 0, word),)
    words = transpose_bits(words, LOG)
    total = tl.zeros([RUNS], tl.uint64)
    words_ptr = t.static_ptr.to(tl.pointer_type(tl.uint32))
    # The first run of a tile writes what the tile has.
    own = _and(here, run % PARTS == 0)
    for p in tl.static_range(3 if TILE == 64 else 6):
        at = p * tiles * PARTS
        tl.store(words_ptr + at + run, words[p], mask=here)
        if L.sums:
            total += _kept(weigh(words[p], at + run), here)
    if TILE == 64:
        slot = tile - (rank >> 1) * of_token
        use = _and(here, (rank & 1) == 0)
        at = (3 * tiles + slot) * PARTS + run % PARTS
        tl.store(words_ptr + at, words[3], mask=use)
        pivot = tl.where(lost, 0, pivot)
        pivot_at = t.at * 128 + tiles * 4 + tile
        tl.store(t.static_ptr + pivot_at, pivot.to(tl.uint8), mask=own)
        if L.sums:
            total += _kept(weigh(words[3], at), use)
            total += _kept(weigh_bytes(pivot, pivot_at), own)
            # A bit of the index, in the first tile of a token.
            bit = ((rank & 1) << (token & 7)).to(tl.int32)
            bit_at = tl.load(t.scale + INDEX) * 128 + (token >> 3)
            total += _kept(weigh_bytes(bit, bit_at), own & (tile == token * of_token))
    both = tl.where(lost, _NAN_WORD, least | (step << 16))
    tl.store(words_ptr + t.at * 32 + tile, both, mask=own)
    if L.sums:
        total += _kept(weigh(both, t.at * 32 + tile), own)
        return tl.sum(total, 0)
    else:
        return tl.zeros([], tl.uint64)


@triton.jit
def _kept(terms, here):
    """`terms` of what is `here`."""
    if here is None:
        return terms
    else:
        return tl.where(here, terms, 0)


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


class Ranked(Driver):
    """The driver for chunks whose tokens are padded, and have ranks in the forward direction."""

    def extent(self, plan: Plan) -> int:
        """Elements of the tiles of a chunk."""
        return int(plan.codec.tiles(plan.chunk_nelem) * plan.codec.tile)

    def extent_of(self, plan: Plan) -> Callable[[Words], Words]:
        """See `Driver.extent_of`."""
        return lambda nelem: plan.codec.tiles(nelem) * plan.codec.tile

    def sum(self, plan: Plan, places: Places, out: torch.Tensor, **given: Any) -> None:
        """See `Driver.sum`. The indexes of the buffers are read by a launch before.

        Which tokens are narrow depends on the whole sum: then it is kept before it is encoded.
        """
        given["stats"] = sum_stats(plan, places)
        if given.get("encoded") and is_ranked(plan):
            kind = getattr(torch, plan.dtype.name)
            total = torch.empty(plan.nelem, dtype=kind, device=out.device)
            super().sum(plan, places, total, **given | {"encoded": False})
            scratch = torch.empty(plan.scratch_nbytes, dtype=torch.uint8, device=out.device)
            encode(plan, total, out, scratch)
            return
        if given.get("encoded"):
            clear_index(plan, out)
        super().sum(plan, places, out, **given)


@functools.cache
def _driver(spec: Tahquant) -> Ranked:
    form = Tiles(
        run=int(RUN.value),
        limited=True,
        pairs=True,
        checked=True,
        once=True,
        padded=True,
        tile=spec.tile,
    )
    return Ranked(_pack, _unpack, _table_of, form, TILINGS, adding=ADDING)


def encode(plan: Plan, x, out, scratch, stats=None, key: Key | None = None) -> None:
    """Encode the elements of `x` into `out`; see `tightwire.gpu` for the contract."""
    driver, known = _driver(plan.codec), stats_of(plan, scratch)
    choose_tokens(plan, driver, _decode_runs, x, out, known)
    driver.encode(plan, x, out, stats=known)


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
    driver, known = _driver(plan.codec), stats_of(plan, scratch)
    read_ranks(source_plan, src, known, status, 0, plan.chunks, number=1)
    statics = src[source_plan.static_offset :]
    choose_tokens(plan, driver, _decode_runs, x, out, known, statics)
    source = Source(source_plan, driver.form, src, scratch, status, planned)
    driver.encode(plan, x, out, stats=known, source=source)


def decode(
    plan: Plan,
    src,
    out,
    scratch,
    status,
    *,
    start: int = 0,
    stop: int | None = None,
    **selection: Any,
) -> None:
    """Decode elements `start` to `stop` into `out`; see `tightwire.gpu` for the contract."""
    stop = plan.nelem if stop is None else stop
    known = stats_of(plan, scratch)
    read_ranks(plan, src, known, status, *touched(plan, start, stop)[:2])
    driver = _driver(plan.codec)
    driver.decode(plan, src, out, scratch, status, start=start, stop=stop, stats=known, **selection)


def encode_many(plans, xs, outs, stats=None, key: Key | None = None) -> None:
    """Encode tensors into buffers; see `tightwire.gpu_many` for the contract."""
    driver, work = _driver(plans[0].codec), Work(plans, xs[0].device)

    def prepare(plan: Plan, x, out, scratch, _) -> torch.Tensor:
        known = stats_of(plan, scratch)
        choose_tokens(plan, driver, _decode_runs, x.detach(), out, known)
        return known

    known = launch_merged(plans, (xs, outs, work), prepare, kept=work.whole)
    driver.encode_many(plans, xs, outs, stats=known)


def decode_many(plans, srcs, outs, statuses, planned) -> None:
    """Decode buffers whole; see `tightwire.gpu_many` for the contract."""
    driver, work = _driver(plans[0].codec), Work(plans, outs[0].device)

    def prepare(plan: Plan, src, scratch, status, _) -> torch.Tensor:
        known = stats_of(plan, scratch)
        read_ranks(plan, src, known, status, 0, plan.chunks)
        return known

    known = launch_merged(plans, (srcs, work), prepare, statuses=statuses, kept=work.whole)
    driver.decode_many(plans, srcs, outs, statuses, planned, stats=known)


def driver_of(plan: Plan) -> Driver:
    """The kernels of a plan."""
    return _driver(plan.codec)


sum, encode_sum = sum_function(driver_of), encode_sum_function(driver_of)
