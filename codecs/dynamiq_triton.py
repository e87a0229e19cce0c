# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment,attr-defined,misc"
"""dynamiq on a GPU: one pass over the elements each way. specs/dynamiq.md.

A thread holds a slot, 8 rows of 8 neighbouring columns of a super-group: codes become planes, and
planes codes, by exchanging bits between its own registers. An encoder goes through the rows twice,
for scales and for codes: it reads them again. What groups and super-groups have, each of their
slots has: tensors of shape [SLOTS], in which nothing moves.

Before that, `_prepare` finds the widths, and so where codes are; see dynamiq_widths_triton.
Energies are a pass over the tensor of their own: no element can be coded before all are known. With
given stats, and in sums with buffers, which have the widths of the first one if no stats are given,
there is no such pass.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from ..formats.dtypes import DType
from .common.base import Key, Plan
from .common.batch_triton import addresses
from .common.driver_triton import (
    Driver,
    Reads,
    Source,
    Tiling,
    checksum_terms,
    encode_sum_function,
    functions,
    sum_function,
)
from .common.frame_triton import Places, clear, round_bfloat16, weigh, weigh_bytes
from .common.hadamard_triton import spread
from .common.merged_triton import Work, launch_merged
from .common.minifloat import INFINITY, NAN
from .common.minifloat_triton import MAGNITUDE, aligned_for, as_bits, as_float, by_ptx, halves
from .common.philox_triton import philox4
from .common.runs_triton import transpose_bits
from .common.slots_triton import load_slots, row_at, to_pairs, to_row, top_of_words
from .common.tiles_triton import OF_SOURCE, Format, elements_left, no_scale
from .dynamiq import (
    CENTER_LIMIT,
    FLOOR,
    FLOOR_WORD,
    MAX_SCALE_WORD,
    NAN_SCALE,
    ROUNDINGS,
    SCALE_STREAM,
    SCALES,
    SHARED_STREAM,
    TABLES,
    WORK_HEAD,
    Dynamiq,
    shares_of,
)
from .dynamiq_codes_triton import (
    INTEGER,
    SHAPES,
    TO_INTEGER,
    codes_of,
    stratum_of,
    tables_near,
    tables_of,
)
from .dynamiq_widths_triton import (
    INDEX_AT,
    LEAST_WIDTH,
    MOST_WIDTH,
    PLACES,
    RING_RANK,
    STRATA,
    UNITS,
    USED,
    Widths,
)

_INFINITY, _NAN = tl.constexpr(INFINITY), tl.constexpr(NAN)
_LARGEST = tl.constexpr(float(np.finfo(np.float32).max))
_FLOOR = tl.constexpr(FLOOR)
_CENTER_LIMIT = tl.constexpr(int(np.float32(CENTER_LIMIT).view(np.int32)))
_NAN_SCALE, _FLOOR_WORD = tl.constexpr(NAN_SCALE), tl.constexpr(FLOOR_WORD)
_MAX_SCALE_WORD = tl.constexpr(MAX_SCALE_WORD)
_SHARED = tl.constexpr(SHARED_STREAM)
_DRAWN_SCALES = tl.constexpr(SCALE_STREAM)
_STOCHASTIC, _WIDE = (tl.constexpr(SCALES.index(name)) for name in ("stochastic", "wide"))
_CORRELATED, _, _NEAREST = (tl.constexpr(i) for i in range(len(ROUNDINGS)))
_OF_SOURCE = tl.constexpr(OF_SOURCE)


@dataclass(frozen=True)
class Slots(Format):
    """What kernels know of the codec.

    Attributes:
        size, group: Elements of a super-group, and of a group.
        log_columns: The logarithm of a row's elements.
        scales, rounding: Numbers of these choices; a decoder does not use the latter.
        center: Super-groups have means.
        zeros: The grid has two zeros, as values may: -0 is to become +0.
        step: Rows that an encoder codes at once, 2, 4 or 8: fewer have less code, which it goes
            through again.
    """

    size: int
    group: int
    log_columns: int
    scales: int
    rounding: int
    center: bool
    zeros: bool
    step: int


#: Slots of a tile, which are whole super-groups of any size, and the like. Where they are changed,
#: `_driver` forgets its cache.
MEASURE = Tiling(128, 4)
ENCODE = Tiling(64, 2)
#: Of chunks without checksums and means, with scales "up" of few rows: they need no more registers.
ENCODE_PLAIN = Tiling(64, 2, registers=88)
DECODE = Tiling(64, 2)
DECODE_ADD_ENCODE = Tiling(128, 4, registers=168)
STEP = 2
#: Also for kernels that round nothing.
NEAREST = ROUNDINGS.index("nearest")


@triton.jit
def _inverse(x, PTX: tl.constexpr):
    """1 / x, or 0 of 0."""
    if PTX:
        # With fewer operations than a division.
        found = as_float(by_ptx("rcp.rn.f32 $0, $1;", "=r,r", (x,)))
    else:
        one = tl.full(x.shape, 1.0, tl.float32)
        found = tl.div_rn(one, tl.where(x > 0, x, 1.0))
    return tl.where(x > 0, found, 0.0)


@triton.jit
def _of_word(word):
    """Values of bfloat16 bits."""
    return as_float(word.to(tl.int32) << 16)


@triton.jit
def _word_up(x):
    """Bits of the least bfloat16 not below `x`, at most the largest finite one, int32."""
    words = (as_bits(x).to(tl.uint32, bitcast=True) + 0xFFFF) >> 16
    words = tl.minimum(words.to(tl.int32), _MAX_SCALE_WORD)
    return tl.where(x < _FLOOR, 0, words)


@triton.jit
def _tree_sum(rows, GROUPS: tl.constexpr, LOG_COLUMNS: tl.constexpr):
    """Sums of super-groups, in the page's order; shape [GROUPS]."""
    a = (rows[0] + rows[4]) + (rows[2] + rows[6])
    b = (rows[1] + rows[5]) + (rows[3] + rows[7])
    t = a + b
    for k in tl.static_range(LOG_COLUMNS):
        t = tl.sum(tl.reshape(t, [GROUPS, 2, (1 << LOG_COLUMNS) >> (k + 1)]), 1)
    return tl.reshape(t, [GROUPS])


@triton.jit
def _top(x, SLOTS: tl.constexpr, N: tl.constexpr):
    """The largest of each N neighbours of `x`, shape [SLOTS], for each of them."""
    if N > 1:
        x = spread(tl.max(tl.reshape(x, [SLOTS // N, N]), 1), SLOTS // N, N)
    return x


@triton.jit
def _tops(rows, ROWS: tl.constexpr):
    """The largest magnitude of a slot's values in ROWS rows, and NaN of any; shape [SLOTS, 8]."""
    top = tl.abs(rows[0])
    for k in tl.static_range(1, ROWS):
        top = tl.maximum(top, tl.abs(rows[k]), propagate_nan=tl.PropagateNan.ALL)
    return top


@triton.jit
def _finite(rows, lost):
    """Rows of values, those of lost slots 0."""
    v = ()
    for k in tl.static_range(len(rows)):
        v = v + (tl.where(lost[:, None], 0.0, rows[k]),)
    return v


@triton.jit
def _about(v, mean, k, left, L: tl.constexpr):
    """Rows of values from row `k` on about the means of their slots; from number `left` of the tile
    on they stay 0.
    """
    about = ()
    for r in tl.static_range(len(v)):
        inside = row_at(k + r, L.rows, L.apart) < left
        about = about + (tl.where(inside, v[r] - mean[:, None], 0.0),)
    return about


@triton.jit
def _means(v, top, group, n, F: tl.constexpr, L: tl.constexpr):
    """Words of the means of super-groups with the largest magnitudes `top`, for their slots."""
    LANES: tl.constexpr = F.size // 64
    GROUPS: tl.constexpr = L.rows // LANES
    total = spread(_tree_sum(v, GROUPS, F.log_columns), GROUPS, LANES)
    count = tl.minimum(tl.maximum(n - group * F.size, 1), F.size).to(tl.float32)
    mean = tl.div_rn(total, count)
    none = (top >= _CENTER_LIMIT) | (tl.abs(mean) < _FLOOR)
    return round_bfloat16(tl.where(none, 0.0, mean)).to(tl.int32)


@triton.jit
def _values(rows, group, t, F: tl.constexpr, L: tl.constexpr):
    """(values about their means, those of lost super-groups 0; of slots the largest magnitude of
    their super-group, whether it is lost, the word of its mean) of 8 rows; `group` are the numbers
    of the super-groups of slots.
    """
    LANES: tl.constexpr = F.size // 64
    SLOTS: tl.constexpr = L.rows
    top = tl.max(as_bits(_tops(rows, 8)) & MAGNITUDE, 1)
    top = _top(top, SLOTS, LANES)
    lost = top >= _INFINITY
    v = _finite(rows, lost)
    words = top * 0
    most = as_float(tl.where(lost, 0, top))
    if F.center:
        words = _means(v, top, group, t.n, F, L)
        v = _about(v, _of_word(words), 0, elements_left(t, L), L)
        most = _top(tl.max(_tops(v, 8), 1), SLOTS, LANES)
    return v, most, lost, words


@triton.jit
def _slots(tile, F: tl.constexpr, L: tl.constexpr):
    """Of a tile's slots the numbers of their super-groups, int64, and their numbers in those."""
    LANES: tl.constexpr = F.size // 64
    ROWS: tl.constexpr = L.rows
    slot = tl.arange(0, ROWS)
    return tile * (ROWS // LANES) + slot // LANES, slot % LANES


@triton.jit
def _load_rows(x_ptr, t, k, L: tl.constexpr, COUNT: tl.constexpr):
    """COUNT rows of a tile's slots from row `k` on, float32, shape [SLOTS, 8]; 0 behind the end."""
    return _rows_of(_load(x_ptr, t, k, L, COUNT, False), L, False)


@triton.jit
def _load(x_ptr, t, k, L: tl.constexpr, COUNT: tl.constexpr, WORDS: tl.constexpr):
    """COUNT rows of a tile's slots from row `k` on, as by `load_slots`; 0 behind the end."""
    begin = t.tile * (L.rows * L.run)
    x = x_ptr + (t.first + begin) * L.x_item
    left = elements_left(t, L)
    if L.aligned == 0:
        v = load_slots(x, k, left, COUNT, L, WORDS, True)
    elif begin + L.rows * L.run <= t.n:
        v = load_slots(x, k, left, COUNT, L, WORDS, False)
    else:
        v = load_slots(x, k, left, COUNT, L, WORDS, True)
    return v


@triton.jit
def _rows_of(v, L: tl.constexpr, WORDS: tl.constexpr):
    """Rows of columns, or of WORDS of two elements."""
    rows = ()
    if WORDS:
        for k in tl.static_range(len(v)):
            a, b = halves(v[k], L.exponent)
            rows = rows + (to_row(a, b, L.rows),)
    else:
        for k in tl.static_range(0, len(v), 2):
            rows = rows + (to_row(v[k], v[k + 1], L.rows),)
    return rows


@triton.jit
def _write_energies(
    v, t, s, draw, stats_ptr, F: tl.constexpr, L: tl.constexpr, MASKED: tl.constexpr
):
    """Energies of a tile of a tensor's super-groups, to `stats_ptr`."""
    GROUPS: tl.constexpr = L.rows * 64 // F.size
    group, _ = _slots(t.tile, F, L)
    x, _, _, _ = _values(_load_rows(v, t, 0, L, 8), group, t, F, L)
    squares = ()
    for k in tl.static_range(8):
        squares = squares + (x[k] * x[k],)
    found = tl.minimum(_tree_sum(squares, GROUPS, F.log_columns), _LARGEST)
    group = t.tile * GROUPS + tl.arange(0, GROUPS)
    energies = stats_ptr.to(tl.pointer_type(tl.float32))
    tl.store(energies + group, found, mask=group * F.size < t.n)
    return tl.zeros([], tl.uint64)


@triton.jit
def _rotated(x, left, PTX: tl.constexpr):
    """Words whose bits are `left`, 0 to 31, places further up, the highest at the low end."""
    if PTX:
        # Of two shifts the compiler makes no rotation where it does not know `left`.
        return by_ptx("shf.l.wrap.b32 $0, $1, $1, $2;", "=r,r,r", (x, left))
    else:
        return (x << left) | (x >> ((32 - left) & 31))


@triton.jit
def _with_rows(planes, words, k, N: tl.constexpr, PTX: tl.constexpr):
    """Planes with the bits of N rows of codes from row `k` on, a code in each byte of `words`."""
    words = transpose_bits(words, N.bit_length() - 1)
    k += tl.full([], 0, tl.int32)
    mask = tl.full([], ((1 << N) - 1) * 0x01010101, tl.uint32) << k.to(tl.uint32)
    found = ()
    for p in tl.static_range(8):
        # To their place in bytes; what comes from others is masked.
        rotated = _rotated(words[p % N], (k - p // N * N).to(tl.uint32) & 31, PTX)
        found = found + (planes[p] | (rotated & mask),)
    return found


@triton.jit
def _sections(t, F: tl.constexpr):
    """Super-groups of a chunk, and where in its static part the means, and behind them the scales
    of one byte, start.
    """
    groups = (t.n + F.size - 1) // F.size
    means = t.at * 128 + groups * (2 * (F.size // F.group) if F.scales == _WIDE else 2)
    return groups, means, means + groups * (2 if F.center else 0)


@triton.jit
def _store_word(static_ptr, at, words, use):
    """Store words of 2 bytes at byte `at`; gives their checksum terms."""
    tl.store((static_ptr + at).to(tl.pointer_type(tl.uint16)), words.to(tl.uint16), mask=use)
    return tl.where(use, weigh_bytes(words, at), 0)


@triton.jit
def _load_word(static_ptr, at, use):
    return tl.load((static_ptr + at).to(tl.pointer_type(tl.uint16)), mask=use, other=0).to(tl.int32)


@triton.jit
def _grid_at(stats_ptr, static_ptr, at, F: tl.constexpr, CHOOSE: tl.constexpr):
    """Where `tables_of` are."""
    return stats_ptr.to(tl.pointer_type(tl.float32)), True


@triton.jit
def _pack(v, t, s, draw, stats_ptr, F: tl.constexpr, L: tl.constexpr, MASKED: tl.constexpr):
    """Encode a tile's slots: a pass for what super-groups have, one for the codes."""
    SIZE: tl.constexpr = F.size
    SLOTS: tl.constexpr = L.rows
    LANES: tl.constexpr = SIZE // 64
    COLUMNS: tl.constexpr = SIZE // 8
    # Of a group a row has SHARE slots; it has ROWS rows. N rows are coded at once.
    SHARE: tl.constexpr = (F.group if F.group < COLUMNS else COLUMNS) // 8
    ROWS: tl.constexpr = 1 if F.group <= COLUMNS else F.group // COLUMNS
    N: tl.constexpr = max(ROWS, F.step)
    work = s.work if L.given == _OF_SOURCE else t.work
    group, lane = _slots(t.tile, F, L)
    groups, means_at, bytes_at = _sections(t, F)
    here = group < groups
    slot_width = tl.load(work + PLACES + group, mask=here, other=0) & 15
    slot_width = tl.maximum(slot_width.to(tl.int32), LEAST_WIDTH)[:, None]
    # Values that were added are there; elements are read twice.
    SUM: tl.constexpr = L.add or L.summed
    if SUM:
        EACH: tl.constexpr = len(v) // 8
    if L.cvt and (L.x_item == 2) and (F.center == 0) and ((not SUM) or (EACH == 1)):
        # As of all rows, with half the instructions.
        words = v if SUM else _load(v, t, 0, L, 8, True)
        means = _top(top_of_words(words, L.exponent), SLOTS, LANES)
        lost = means >= _INFINITY
        most = as_float(tl.where(lost, 0, means))
    else:
        every = _rows_of(v, L, EACH == 1) if SUM else _load_rows(v, t, 0, L, 8)
        _, most, lost, means = _values(every, group, t, F, L)
    terms = tl.zeros([SLOTS], tl.uint64)
    ones = here & (lane == 0)
    if F.center:
        terms += _store_word(t.static_ptr, means_at + group * 2, means, ones)
    unit = most * 0.0
    finer = unit
    if F.scales != _WIDE:
        words = _word_up(most)
        unit = tl.div_rn(_of_word(words), unit + 255.0)
        finer = _inverse(unit, L.ptx)
        words = tl.where(lost, _NAN_SCALE, words)
        terms += _store_word(t.static_ptr, t.at * 128 + group * 2, words, ones)
    part = group * (SIZE // F.group) + lane // SHARE
    firsts = here & (lane % SHARE == 0)
    half = (slot_width * 0 + 1) << (slot_width - 1)
    # Places among values half a step ahead are those among bounds.
    shape_at = t.scale + SHAPES + 8 * slot_width + 4
    shape = (tl.load(shape_at), tl.load(shape_at + 1), tl.load(shape_at + 2))
    table = tables_near(t.scale, slot_width, half, F, L)
    start = half.to(tl.float32) + TO_INTEGER
    less = tl.full([], -INTEGER, tl.int32).to(tl.uint32, bitcast=True) * 0x01010101
    zero = tl.zeros([SLOTS, 2], tl.uint32)
    planes = (zero, zero, zero, zero, zero, zero, zero, zero)
    eighths = (t.first >> 3) + group * (SIZE // 8) + lane
    shared = ()
    if F.rounding == _CORRELATED:
        # Halves of two rows each, for all 8 neighbours of a row.
        number = (t.first // SIZE + group) * LANES + lane
        shared = philox4(draw[0], draw[1], draw[0] * 0, _SHARED, number)
    # Of sums, which move on, such that no compiler knows how often: it would write out all rows.
    for k in range(0, tl.where(t.n > 0, 8, 0) if SUM else 8, N):
        if SUM:
            rows = _rows_of(v[0 : N * EACH], L, EACH == 1)
            v = v[N * EACH : 8 * EACH] + v[0 : N * EACH]
        else:
            rows = _load_rows(v, t, k, L, N)
        if L.ptx == 0:
            # Else `_scaled` makes zeros of lost super-groups.
            rows = _finite(rows, lost)
        if F.center:
            rows = _about(rows, _of_word(means), k, elements_left(t, L), L)
        codes = ()
        for r in tl.static_range(N // ROWS):
            top = tl.max(_tops(rows[r * ROWS : r * ROWS + ROWS], ROWS), 1)
            top = tl.where(lost, 0.0, _top(top, SLOTS, SHARE))
            number = part + (k // ROWS + r) * (LANES // SHARE)
            if F.scales == _WIDE:
                fraction = _word_up(top)
                inverse = _inverse(_of_word(fraction), L.ptx)
                at = t.at * 128 + number * 2
                fraction = tl.where(lost, _NAN_SCALE, fraction)
                terms += _store_word(t.static_ptr, at, fraction, firsts)
            else:
                quotient = tl.minimum(top * finer, 255.0)
                if F.scales == _STOCHASTIC:
                    steps = (quotient * 65536.0).to(tl.uint32)
                    word = t.first // F.group + number
                    drawn = philox4(draw[0], draw[1], draw[2], _DRAWN_SCALES, word >> 2)
                    low = tl.where((word & 1) != 0, drawn[1], drawn[0])
                    high = tl.where((word & 1) != 0, drawn[3], drawn[2])
                    own = tl.where((word & 2) != 0, high, low)
                    fraction = ((steps + (own >> 16)) >> 16).to(tl.int32)
                    some = (unit > 0.0) & (top >= _FLOOR)
                    inverse = _inverse(tl.where(some, top, 0.0), L.ptx)
                else:
                    # Rounded up by hand: `tl.ceil` takes subnormal numbers for 0 on NVIDIA's.
                    fraction = quotient.to(tl.int32)
                    fraction += (quotient > fraction.to(tl.float32)).to(tl.int32)
                    inverse = _inverse(fraction.to(tl.float32) * unit, L.ptx)
                at = bytes_at + number
                tl.store(t.static_ptr + at, fraction.to(tl.uint8), mask=firsts)
                terms += tl.where(firsts, weigh_bytes(fraction, at), 0)
            # fmt: off
            for j in tl.static_range(ROWS):
                eighth = eighths + (k + r * ROWS + j) * (COLUMNS // 8)
                stratum = inverse
                strata = 1
                if F.rounding == _CORRELATED:
                    # Read again and again: registers are few.
                    strata, ring_rank = tl.load(work + STRATA), tl.load(work + RING_RANK)
                    one = shared[(r * ROWS + j) // 2] >> (16 if (r * ROWS + j) % 2 else 0)
                    stratum = stratum_of(one & 0xFFFF, strata, ring_rank)
                    strata = strata.to(tl.int32).to(tl.float32)
                row = less + codes_of(
                    rows[r * ROWS + j], inverse[:, None], eighth, stratum[:, None], strata, t,
                    draw, table, start, shape, F, L,
                )
                codes = codes + (tl.where(inverse[:, None] > 0.0, row, 0),)
            # fmt: on
        if F.rounding == _CORRELATED:
            shared = shared[N // 2 : 4] + shared[0 : N // 2]
        planes = _with_rows(planes, codes, k, N, L.ptx)
    payload = t.static_ptr.to(tl.pointer_type(tl.uint32))
    units = tl.load(work + UNITS)
    # Read again: registers are few before.
    place = tl.load(work + PLACES + group, mask=here, other=0)
    row = place >> 4
    width = (place & 15).to(tl.int32)
    # Of a sum whose source has an index that is wrong there may be too many planes.
    most_planes = tl.minimum(width, units - row).to(tl.int32)[:, None]
    at = (row * (COLUMNS // 4) + lane * 2)[:, None] + tl.arange(0, 2)[None, :]
    plane_terms = tl.zeros([SLOTS, 2], tl.uint64)
    for p in tl.static_range(MOST_WIDTH):
        use = p < most_planes
        where = at + p * (COLUMNS // 4)
        tl.store(payload + where, planes[p], mask=use)
        plane_terms += tl.where(use, weigh(planes[p], where), 0)
    terms += tl.sum(plane_terms, 1)
    # A byte for two super-groups.
    after = tl.load(work + PLACES + group + 1, mask=group + 1 < groups, other=0)
    pair = width | ((after & 15).to(tl.int32) << 4)
    at = tl.load(work + INDEX_AT) * 128 + group // 2
    use = ones & (group % 2 == 0)
    tl.store(t.static_ptr + at, pair.to(tl.uint8), mask=use)
    terms += tl.where(use, weigh_bytes(pair, at), 0)
    start, stop = tl.load(work + USED) * COLUMNS, units * COLUMNS
    clear(t.static_ptr, start, stop, t.tile, _tiles(t, L))
    return tl.sum(terms, 0)


@triton.jit
def _tiles(t, L: tl.constexpr):
    """Tiles of a chunk's elements."""
    return tl.maximum((t.n + (L.rows * L.run - 1)) // (L.rows * L.run), 1)


@triton.jit
def _behind(static_ptr, start, stop, part, parts):
    """(checksum terms, OR) of this program's share of bytes `start` to `stop`."""
    total = tl.zeros([128], tl.uint64)
    any_set = tl.zeros([128], tl.int32)
    at = start + part * 128
    while at < stop:
        i = at + tl.arange(0, 128)
        v = tl.load(static_ptr + i, mask=i < stop, other=0)
        total += weigh_bytes(v, i)
        any_set |= v.to(tl.int32)
        at += parts.to(tl.int64) * 128
    return tl.sum(total, 0), tl.max(any_set, 0)


@triton.jit
def _unpack(t, lo, hi, F: tl.constexpr, L: tl.constexpr, MASKED: tl.constexpr):
    """Values of a tile's slots, NaN where they are lost.

    Super-groups with some of the elements `lo` to `hi` alone are read, and rows behind the last
    plane with the chunk's last element.
    """
    SIZE: tl.constexpr = F.size
    SLOTS: tl.constexpr = L.rows
    LANES: tl.constexpr = SIZE // 64
    COLUMNS: tl.constexpr = SIZE // 8
    SHARE: tl.constexpr = (F.group if F.group < COLUMNS else COLUMNS) // 8
    ROWS: tl.constexpr = 1 if F.group <= COLUMNS else F.group // COLUMNS
    group, lane = _slots(t.tile, F, L)
    _, means_at, bytes_at = _sections(t, F)
    here = (group * SIZE < hi) & (group * SIZE + SIZE > lo)
    place = tl.load(t.work + PLACES + group, mask=here, other=0)
    units = tl.load(t.work + UNITS)
    payload = t.static_ptr.to(tl.pointer_type(tl.uint32))
    row = place >> 4
    width = (place & 15).to(tl.int32)[:, None]
    # An index that is wrong may have too many planes.
    most = tl.minimum(place & 15, units - row).to(tl.int32)[:, None]
    at = (row * (COLUMNS // 4) + lane * 2)[:, None] + tl.arange(0, 2)[None, :]
    words = ()
    plane_terms = tl.zeros([SLOTS, 2], tl.uint64)
    for p in tl.static_range(MOST_WIDTH):
        where = at + p * (COLUMNS // 4)
        word = tl.load(payload + where, mask=p < most, other=0)
        plane_terms += weigh(word, where)
        words = words + (word,)
    terms = tl.sum(plane_terms, 1)
    words = transpose_bits(words, 3)
    ones = here & (lane == 0)
    part = group * (SIZE // F.group) + lane // SHARE
    firsts = here & (lane % SHARE == 0)
    scales = ()
    if F.scales == _WIDE:
        lost_in = lane * 0
        bad_in = lane * 0
        for r in tl.static_range(8 // ROWS):
            at = t.at * 128 + (part + r * (LANES // SHARE)) * 2
            word = _load_word(t.static_ptr, at, here)
            terms += tl.where(firsts, weigh_bytes(word, at), 0)
            lost_in += (word == _NAN_SCALE).to(tl.int32)
            finite = (word == 0) | ((word >= _FLOOR_WORD) & (word <= _MAX_SCALE_WORD))
            bad_in += 1 - finite.to(tl.int32)
            scales = scales + (_of_word(tl.where(finite, word, 0)),)
        # A slot for slot of a group, and NaN of any but all: neither finite nor lost.
        bad = _top(bad_in, SLOTS, LANES) > 0
        lost = _top(lost_in, SLOTS, LANES) > 0
        bad &= _top(8 // ROWS - lost_in, SLOTS, LANES) > 0
    else:
        at = t.at * 128 + group * 2
        word = _load_word(t.static_ptr, at, here)
        terms += tl.where(ones, weigh_bytes(word, at), 0)
        lost = word == _NAN_SCALE
        finite = (word == 0) | ((word >= _FLOOR_WORD) & (word <= _MAX_SCALE_WORD))
        bad = (finite | lost) == 0
        unit = _of_word(tl.where(finite, word, 0))
        unit = tl.div_rn(unit, unit * 0.0 + 255.0)
        for r in tl.static_range(8 // ROWS):
            at = bytes_at + part + r * (LANES // SHARE)
            fraction = tl.load(t.static_ptr + at, mask=here, other=0)
            terms += tl.where(firsts, weigh_bytes(fraction, at), 0)
            scales = scales + (fraction.to(tl.float32) * unit,)
    mean = tl.zeros([SLOTS], tl.float32)
    if F.center:
        at = means_at + group * 2
        word = _load_word(t.static_ptr, at, here)
        terms += tl.where(ones, weigh_bytes(word, at), 0)
        finite = (word & 0x7F80) != 0x7F80
        bad |= finite == 0
        mean = _of_word(tl.where(finite, word, 0))
    table = t.scale + ((width * 0 + 1) << width)
    nan = as_float(tl.full([], _NAN, tl.int32))
    columns = ()
    for k in tl.static_range(8):
        code = words[k][:, :, None] >> (8 * tl.arange(0, 4))[None, None, :]
        code = tl.reshape(code & 0xFF, [SLOTS, 8]).to(tl.int32)
        y = tl.load(table + code) * scales[k // ROWS][:, None]
        y = tl.where(lost[:, None], nan, y + mean[:, None])
        columns = columns + to_pairs(y, SLOTS)
    total = tl.sum(terms, 0)
    wrong = (bad & here).to(tl.int32)
    if (hi == t.n) & (t.tile < _tiles(t, L)):
        start, stop = tl.load(t.work + USED) * COLUMNS, units * COLUMNS
        behind, any_set = _behind(t.static_ptr, start, stop, t.tile, _tiles(t, L))
        total += behind
        wrong |= any_set
    return columns, wrong != 0, total


class Keyed(Driver):
    """The driver, which encodes by the kernels of what its key asks for."""

    def encode(
        self,
        plan: Plan,
        x: torch.Tensor,
        out: torch.Tensor,
        *,
        key: Key | None = None,
        source: Source | None = None,
        **options: Any,
    ) -> None:
        """See `Driver.encode`. Without stats, widths are those of a buffer that is added."""
        spec = Widths.of(plan).spec
        driver = _driver(spec, shares_of(spec, key)[0], sums=plan.checksum or source is not None)
        super(Keyed, driver).encode(plan, x, out, key=key, source=source, **options)

    def sum(
        self,
        plan: Plan,
        places: Places,
        out: torch.Tensor,
        *,
        key: Key | None = None,
        **options: Any,
    ) -> None:
        """See `Driver.sum`. Without stats, widths are those of the first buffer."""
        driver = self
        if options.get("encoded"):
            spec = Widths.of(plan).spec
            driver = _driver(spec, shares_of(spec, key)[0])
        super(Keyed, driver).sum(plan, places, out, key=key, **options)


@functools.cache
def _driver(
    spec: Dynamiq, rounding: int | None = None, *, sums: bool = True, measures: bool = False
) -> Keyed:
    """The kernels of a codec; `rounding` is that of a key, `sums`: there may be checksums."""
    form = Slots(
        run=64,
        limited=True,
        pairs=True,
        checked=True,
        apart=spec.super_group // 8,
        loads=True,
        shared=TABLES,
        words=WORK_HEAD,
        word_nelem=spec.super_group,
        size=spec.super_group,
        group=spec.group,
        log_columns=spec.super_group.bit_length() - 4,
        scales=SCALES.index(spec.scales),
        rounding=ROUNDINGS.index(spec.rounding) if rounding is None else rounding,
        center=spec.center,
        zeros=spec.grid != "balanced",
        step=STEP,
    )
    if measures:
        return Keyed(_write_energies, _unpack, no_scale, form, (MEASURE,) * 3)
    plain = not sums and not spec.center and spec.scales == "up"
    plain = plain and spec.group <= spec.super_group // 4
    tilings = ENCODE_PLAIN if plain else ENCODE, DECODE, DECODE_ADD_ENCODE
    return Keyed(_pack, _unpack, _grid_at, form, tilings, prepare=_prepare)


def measure(spec: Dynamiq, dtype: DType, x: torch.Tensor) -> torch.Tensor:
    """Energies of the super-groups of `x`, float32, shape (super-groups,), on its device."""
    energies = torch.empty(spec.super_groups(x.numel()), dtype=torch.float32, device=x.device)
    _driver(spec, NEAREST, measures=True).measure(dtype, x, energies)
    return energies


def _prepare(
    plan: Plan,
    reads: Reads | None,
    encodes: bool,
    *,
    scratch: torch.Tensor | None = None,
    x: torch.Tensor | None = None,
    stats: torch.Tensor | None = None,
    key: Key | None = None,
) -> torch.Tensor:
    """Find where super-groups are; see `Driver` and dynamiq_widths_triton.

    Without any of `x`, `reads` and `stats`, energies are already in the workspace.
    """
    widths = Widths.of(plan)
    spec, chunks = widths.spec, plan.chunks
    buffers = 0 if reads is None else max(1, reads.number)
    given = scratch if x is None and reads is None else x if reads is None else reads.data
    assert given is not None
    tables = tables_of(spec.grid, given.device)
    _, energies, state, counts, work = widths.parts_of(scratch, buffers, tables.device)
    shares = shares_of(spec, key)[1:] if encodes else (1, 0)
    if encodes and (reads is None or stats is not None):
        if stats is not None:
            if stats.numel() != widths.stats:
                shape = tuple(stats.shape)
                raise ValueError(f"stats have shape {shape}; allowed: ({widths.stats},)")
            energies = stats
        elif spec.widths != "fixed" and plan.nelem and x is not None:
            energies = energies.view(torch.float32)
            _driver(spec, NEAREST, measures=True).measure(plan.dtype, x, energies)
        widths.choose(energies, state, counts, work, tables, shares)
    if reads is not None:
        first = chunks if encodes or reads.number else 0
        widths.read(reads, first, counts, work, tables, shares)
    return work


def encode_many(plans, xs, outs, stats=None, key: Key | None = None) -> None:
    """Encode tensors into buffers; see `tightwire.gpu_many` for the contract.

    Elements are loaded by 16 bytes, or one by one: tensors of either kind are a batch.
    """
    aligned = [aligned_for(plan, x) for plan, x in zip(plans, xs, strict=True)]
    at = addresses(outs)
    for kind in sorted(set(aligned), reverse=True):
        some = [i for i, own in enumerate(aligned) if own == kind]
        own = None if stats is None else [stats[i] for i in some]
        batch = [plans[i] for i in some], [xs[i] for i in some], at[some]
        _encode_batch(*batch, own, key, kind)


def _encode_batch(plans, xs, outs, stats, key: Key | None, aligned: bool) -> None:
    spec, work = Widths.of(plans[0]).spec, Work(plans, xs[0].device)
    if stats is None and spec.widths != "fixed":
        energies = work.addresses + [Widths.of(plan).parts[0] for plan in plans]
        measuring = _driver(spec, NEAREST, measures=True)
        measuring.measure_many(plans[0].dtype, xs, energies, aligned=aligned)

    def prepare(plan: Plan, scratch, own, _) -> torch.Tensor:
        return _prepare(plan, None, True, scratch=scratch, stats=own, key=key)

    sizes = None if stats is None else [own.numel() for own in stats]
    known = launch_merged(plans, (work, stats), prepare, alike=sizes, kept=work.whole)
    driver = _driver(spec, shares_of(spec, key)[0], sums=plans[0].checksum)
    options = {"stats": known, "key": key, "draws": spec.draws, "aligned": aligned}
    driver.encode_many(plans, xs, outs, **options)


def decode_many(plans, srcs, outs, statuses, planned) -> None:
    """Decode buffers whole; see `tightwire.gpu_many` for the contract."""
    work = Work(plans, outs[0].device)

    def prepare(plan: Plan, src, scratch, status, _) -> torch.Tensor:
        sums = checksum_terms(plan, scratch, status, plan.checksum)
        reads = Reads(src, sums, status, 0, plan.chunks, plan.checksum)
        return _prepare(plan, reads, False, scratch=scratch)

    known = launch_merged(plans, (srcs, work), prepare, statuses=statuses, kept=work.whole)
    driver, sums = driver_of(plans[0]), work.addresses
    driver.decode_many(plans, srcs, outs, statuses, planned, stats=known, sums=sums)


def driver_of(plan: Plan) -> Driver:
    """The kernels of a plan."""
    return _driver(plan.codec, NEAREST)


encode, decode_add_encode, decode = functions(driver_of)
sum, encode_sum = sum_function(driver_of), encode_sum_function(driver_of)
