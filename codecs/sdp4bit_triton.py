# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment,misc,var-annotated"
"""sdp4bit on a GPU: one kernel each way, a run to a thread. specs/sdp4bit.md."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import triton
import triton.language as tl

from .common.base import Plan
from .common.columns_triton import from_columns, to_columns
from .common.driver_triton import Driver, Tiling, functions, many_functions
from .common.frame_triton import weigh
from .common.hadamard_triton import butterflies, spread
from .common.minifloat import INFINITY
from .common.philox_triton import NO_KEY, philox4
from .common.runs_triton import ANCHOR, RUN, code_values, code_word, lanes
from .common.tiles_triton import Format, no_scale
from .sdp4bit import (
    FLOOR,
    NAN_SCALE,
    RUN_FACTOR,
    SCALE_BITS,
    SHORT_BACK,
    SHORT_FACTOR,
    Sdp4bit,
)

_NO_KEY = tl.constexpr(NO_KEY)
_INFINITY = tl.constexpr(INFINITY)
_NAN_SCALE = tl.constexpr(NAN_SCALE)
_FLOOR = tl.constexpr(FLOOR)
_RUN_FACTOR, _SHORT_FACTOR = tl.constexpr(RUN_FACTOR), tl.constexpr(SHORT_FACTOR)
_SHORT_BACK = tl.constexpr(SHORT_BACK)
_SCALE_LOW, _SCALE_HIGH = (tl.constexpr(b) for b in SCALE_BITS)


@dataclass(frozen=True)
class Runs(Format):
    """What the kernels know of a codec.

    Attributes:
        bits: Bits of a code.
        group: Elements of a group.
        rotate: Runs are rotated before they are rounded.
        back: Decoded runs are rotated back.
        largest: The largest code.
    """

    bits: int
    group: int
    rotate: bool
    back: bool
    largest: float


#: Launch parameters. 128 runs or more have whole groups of any size.
ENCODE = Tiling(128, 4)
DECODE = Tiling(128, 4)
DECODE_ADD_ENCODE = Tiling(128, 4)
#: Of sums of several buffers: with as many registers as it would take by itself it spills.
SUMMING = Tiling(128, 4, registers=168)


@triton.jit
def _of_groups(v, RUNS: tl.constexpr, GROUP: tl.constexpr):
    """For each run the largest value, int32, of its group's."""
    LANES: tl.constexpr = GROUP // RUN
    if LANES == 1:
        return v
    else:
        return spread(tl.max(tl.reshape(v, [RUNS // LANES, LANES]), 1), RUNS // LANES, LANES)


@triton.jit
def _codes_before(word, at, n, BITS: tl.constexpr):
    """Words at `at`, without the codes of elements from `n` on."""
    keep = tl.minimum(tl.maximum(n * BITS - at * 32, 0), 32).to(tl.uint32)
    return tl.where(keep < 32, word & ((1 << (keep & 31)) - 1), word)


@triton.jit
def _one_of_codes(words, CODE: tl.constexpr, BITS: tl.constexpr):
    """Nonzero where a code in one of the columns of words is CODE."""
    LOWEST: tl.constexpr = 0x11111111 if BITS == 4 else 0x01010101
    found = words[0] * 0
    for k in tl.static_range(len(words)):
        other = words[k] ^ (LOWEST * CODE)
        found |= (other - LOWEST) & (other ^ 0xFFFFFFFF)
    return found & (LOWEST << (BITS - 1))


@triton.jit
def _unpack(t, lo, hi, F: tl.constexpr, L: tl.constexpr, MASKED: tl.constexpr):
    """Values of a tile's runs, NaN where lost. A wrong code counts in groups that hold some of the
    elements `lo` to `hi`.
    """
    BITS: tl.constexpr = F.bits
    ROWS: tl.constexpr = L.rows
    run = lanes(ROWS)
    payload = (t.static_ptr + t.tile * (ROWS * 4 * BITS)).to(tl.pointer_type(tl.uint32))
    words = ()
    total = tl.zeros([ROWS], tl.uint64)
    for k in tl.static_range(0, BITS, 4):
        i = run[:, None] * BITS + k + tl.arange(0, 4)[None, :]
        if MASKED:
            at = t.tile * (ROWS * BITS) + i
            four = tl.load(payload + i, mask=at < (t.n * BITS + 31) // 32, other=0)
        else:
            four = tl.load(payload + i)
        words = words + to_columns(four, ROWS, 4, 2)
    if L.sums:
        for k in tl.static_range(BITS):
            total += weigh(words[k], t.tile * (ROWS * BITS) + run * BITS + k)
    if MASKED:
        used = ()
        for k in tl.static_range(BITS):
            at = t.tile * (ROWS * BITS) + run * BITS + k
            used = used + (_codes_before(words[k], at, t.n, BITS),)
        words = used
    LANES: tl.constexpr = F.group // RUN
    scales_ptr = t.static_ptr.to(tl.pointer_type(tl.uint32)) + t.at * 32
    scales_ptr += t.tile * (ROWS // LANES)
    edge = t.tile * (ROWS * RUN) + run // LANES * F.group
    if MASKED:
        s = tl.load(scales_ptr + run // LANES, mask=edge < t.n, other=0)
        wanted = (edge < hi) & (edge + F.group > lo)
    else:
        s = tl.load(scales_ptr + run // LANES)
        wanted = run >= 0
    if L.sums:
        where = t.at * 32 + t.tile * (ROWS // LANES) + run // LANES
        total += tl.where(run % LANES == 0, weigh(s, where), 0)
    lost = s == _NAN_SCALE
    good = (s >= _SCALE_LOW) & (s <= _SCALE_HIGH)
    any_code = words[0]
    for k in tl.static_range(1, BITS):
        any_code |= words[k]
    bad = (_one_of_codes(words, 1 << (BITS - 1), BITS) != 0) | (lost & (any_code != 0))
    wrong = wanted & (bad | ((good | lost) == 0))
    v = ()
    for k in tl.static_range(BITS):
        v = v + code_values(words[k], BITS, 1 << (BITS - 1), L.ptx)
    if F.back:
        v = _rotated(v, 1.0, _SHORT_BACK, t.tile, t.n, ROWS, MASKED)
    scale = tl.where(good | lost, s, 0).to(tl.float32, bitcast=True)
    y = ()
    for k in tl.static_range(RUN):
        y = y + (v[k] * scale,)
    if L.sums:
        return y, wrong, tl.sum(total, 0)
    else:
        return y, wrong, tl.zeros([], tl.uint64)


@triton.jit
def _rotated(v, before, factor, tile, n, RUNS: tl.constexpr, MASKED: tl.constexpr):
    """Columns of runs rotated, multiplied by `before`; those of a short run times `factor`."""
    t = v
    if before != 1.0:
        t = ()
        for k in tl.static_range(RUN):
            t = t + (v[k] * before,)
    t = butterflies(t, RUN, 5)
    if MASKED:
        short = (tile * RUNS + lanes(RUNS) + 1) * RUN > n
        chosen = ()
        for k in tl.static_range(RUN):
            chosen = chosen + (tl.where(short, v[k] * factor, t[k]),)
        t = chosen
    return t


@triton.jit
def _pack(v, t, s, draw, stats_ptr, F: tl.constexpr, L: tl.constexpr, MASKED: tl.constexpr):
    """Encode a tile's runs, zeros behind the end."""
    BITS: tl.constexpr = F.bits
    ROWS: tl.constexpr = L.rows
    LANES: tl.constexpr = F.group // RUN
    run = lanes(ROWS)
    # Fours of random words before those of the tile.
    group4 = t.chunk * t.at * (256 // BITS) + t.tile * (ROWS * RUN // 4)
    w = v
    if F.rotate:
        w = _rotated(v, _RUN_FACTOR, _SHORT_FACTOR, t.tile, t.n, ROWS, MASKED)
    # A rotation makes no finite number infinite, and all of a run that holds others NaN or such.
    top = tl.abs(w[0])
    for k in tl.static_range(1, RUN):
        top = tl.maximum(top, tl.abs(w[k]), propagate_nan=tl.PropagateNan.ALL)
    top = _of_groups(top.to(tl.int32, bitcast=True), ROWS, F.group)
    lost = top >= _INFINITY
    a = top.to(tl.float32, bitcast=True)
    a = tl.where(a < _FLOOR, F.largest, a)
    largest = tl.full([ROWS], F.largest, tl.float32)
    scales = tl.where(lost, _NAN_SCALE, tl.div_rn(a, largest).to(tl.uint32, bitcast=True))
    r = tl.div_rn(largest, a)
    words = ()
    if L.random == _NO_KEY:
        # No product is so far above the largest code that it is not rounded to that.
        numbers = ()
        for k in tl.static_range(RUN):
            numbers = numbers + (w[k] * r + ANCHOR,)
        for k in tl.static_range(BITS):
            words = words + (code_word(numbers, k * (32 // BITS), 1, BITS, True),)
    else:
        steps = ()
        for k in tl.static_range(0, RUN, 4):
            drawn = philox4(draw[0], draw[1], draw[2], 0, group4 + run * 8 + k // 4)
            for j in tl.static_range(4):
                q = w[k + j] * r
                q = tl.where(q < F.largest, q, F.largest)
                q = tl.where(q > -F.largest, q, -F.largest)
                q = ((q + (F.largest + 1.0)) * 65536.0).to(tl.uint32)
                steps = steps + ((q + (drawn[j] >> 16)) >> 16,)
        COUNT: tl.constexpr = 32 // BITS
        for k in tl.static_range(BITS):
            word = steps[k * COUNT]
            for j in tl.static_range(1, COUNT):
                word |= steps[k * COUNT + j] << (BITS * j)
            words = words + (word ^ (0x88888888 if BITS == 4 else 0x80808080),)
    kept = ()
    for k in tl.static_range(BITS):
        kept = kept + (tl.where(lost, 0, words[k]),)
    words = kept
    payload = (t.static_ptr + t.tile * (ROWS * 4 * BITS)).to(tl.pointer_type(tl.uint32))
    for k in tl.static_range(0, BITS, 4):
        i = run[:, None] * BITS + k + tl.arange(0, 4)[None, :]
        four = from_columns((words[k], words[k + 1], words[k + 2], words[k + 3]), 4, 2)
        if MASKED:
            at = t.tile * (ROWS * BITS) + i
            tl.store(payload + i, four, mask=at < (t.n * BITS + 31) // 32)
        else:
            tl.store(payload + i, four)
    # The first run of a group writes its scale.
    own = run % LANES == 0
    if MASKED:
        own = own & ((t.tile * ROWS + run) * RUN < t.n)
    where = t.tile * (ROWS // LANES) + run // LANES
    tl.store(t.static_ptr.to(tl.pointer_type(tl.uint32)) + t.at * 32 + where, scales, mask=own)
    total = tl.zeros([], tl.uint64)
    if L.sums:
        terms = tl.where(own, weigh(scales, t.at * 32 + where), 0)
        for k in tl.static_range(BITS):
            terms += weigh(words[k], t.tile * (ROWS * BITS) + run * BITS + k)
        total += tl.sum(terms, 0)
    return total


@functools.cache
def _driver(spec: Sdp4bit) -> Driver:
    form = Runs(
        run=int(RUN.value),
        limited=True,
        pairs=False,
        checked=True,
        bits=spec.bits,
        group=spec.group,
        rotate=spec.rotates,
        back=spec.rotates_back,
        largest=float(spec.largest),
    )
    tilings = ENCODE, DECODE, DECODE_ADD_ENCODE
    return Driver(_pack, _unpack, no_scale, form, tilings, summing=SUMMING)


def driver_of(plan: Plan) -> Driver:
    """The kernels of a plan."""
    return _driver(plan.codec)


encode, decode_add_encode, decode = functions(driver_of)
encode_many, decode_many, sum, encode_sum = many_functions(driver_of)
