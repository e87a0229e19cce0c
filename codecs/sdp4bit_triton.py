# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment,misc,var-annotated"
"""sdp4bit on a GPU: one kernel each way, a run to a thread. specs/sdp4bit.md."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..formats.checksum import identity_term
from ..formats.dtypes import DType
from .common.base import CodecSpec, Key, Plan
from .common.columns_triton import from_columns, to_columns
from .common.frame_triton import (
    CHUNK,
    CHUNK_PAYLOAD,
    HEADER_WORDS,
    add_header,
    clear,
    header_word,
    header_words,
    record_term,
    touched,
    weigh,
)
from .common.hadamard_triton import butterflies, spread
from .common.launch_triton import PTX, Variant, kernel, options
from .common.minifloat import INFINITY
from .common.minifloat_triton import aligned_for, check_chunks, converts
from .common.philox_triton import KEY_ON_DEVICE, NO_KEY, key_arguments, philox4
from .common.runs_triton import (
    ANCHOR,
    RUN,
    add_elements,
    code_values,
    code_word,
    element_words,
    lanes,
    load_elements,
    load_words,
    report_any,
    store_elements,
    store_runs,
    sum_runs,
    sum_words,
    word_values,
)
from .sdp4bit import (
    FLOOR,
    NAN_SCALE,
    RUN_FACTOR,
    SCALE_BITS,
    SCALE_NBYTES,
    SHORT_BACK,
    SHORT_FACTOR,
    Sdp4bit,
)

_NO_KEY = tl.constexpr(NO_KEY)
_KEY_ON_DEVICE = tl.constexpr(KEY_ON_DEVICE)
_INFINITY = tl.constexpr(INFINITY)
_NAN_SCALE = tl.constexpr(NAN_SCALE)
_FLOOR = tl.constexpr(FLOOR)
_RUN_FACTOR, _SHORT_FACTOR = tl.constexpr(RUN_FACTOR), tl.constexpr(SHORT_FACTOR)
_SHORT_BACK = tl.constexpr(SHORT_BACK)
_SCALE_LOW, _SCALE_HIGH = (tl.constexpr(b) for b in SCALE_BITS)


class Tiling(NamedTuple):
    """Runs of a tile, one program's share, one to a thread; whether decoded ones go through shared
    memory to where they are stored; and the most registers of a thread.

    128 runs or more have whole groups of any size.
    """

    runs: int
    staged: bool = False
    registers: int | None = None


#: Launch parameters; where they are changed, `_encode_variant` and the like forget their caches.
ENCODE = Tiling(128)
DECODE = Tiling(128)
DECODE_ADD_ENCODE = Tiling(128)


@triton.jit
def _of_groups(v, RUNS: tl.constexpr, GROUP: tl.constexpr):
    """For each run the largest value, int32, of its group's."""
    LANES: tl.constexpr = GROUP // RUN
    if LANES == 1:
        return v
    else:
        return spread(tl.max(tl.reshape(v, [RUNS // LANES, LANES]), 1), RUNS // LANES, LANES)


@triton.jit
def _positions(tile, RUNS: tl.constexpr):
    """Numbers of a tile's elements in their chunk, shape [RUNS, 32]."""
    runs = tile * RUNS + lanes(RUNS)
    return runs[:, None] * RUN + tl.arange(0, RUN)[None, :]


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
def _decode_runs(
    static_ptr,
    scales_at,
    tile,
    n,
    lo,
    hi,
    RUNS: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    BACK: tl.constexpr,
    SUMS: tl.constexpr,
    PTX: tl.constexpr,
    MASKED: tl.constexpr,
):
    """(float32 columns of a tile's runs, NaN where lost; which runs are lost, and which are wrong
    and in a group that holds some of the elements `lo` to `hi`; checksum terms).
    """
    run = lanes(RUNS)
    payload = (static_ptr + tile * (RUNS * 4 * BITS)).to(tl.pointer_type(tl.uint32))
    words = ()
    total = tl.zeros([RUNS], tl.uint64)
    for k in tl.static_range(0, BITS, 4):
        i = run[:, None] * BITS + k + tl.arange(0, 4)[None, :]
        if MASKED:
            at = tile * (RUNS * BITS) + i
            four = tl.load(payload + i, mask=at < (n * BITS + 31) // 32, other=0)
        else:
            four = tl.load(payload + i)
        words = words + to_columns(four, RUNS, 4, 2)
    if SUMS:
        for k in tl.static_range(BITS):
            total += weigh(words[k], tile * (RUNS * BITS) + run * BITS + k)
    if MASKED:
        used = ()
        for k in tl.static_range(BITS):
            at = tile * (RUNS * BITS) + run * BITS + k
            used = used + (_codes_before(words[k], at, n, BITS),)
        words = used
    LANES: tl.constexpr = GROUP // RUN
    scales_ptr = static_ptr.to(tl.pointer_type(tl.uint32)) + scales_at * 32
    scales_ptr += tile * (RUNS // LANES)
    edge = tile * (RUNS * RUN) + run // LANES * GROUP
    if MASKED:
        s = tl.load(scales_ptr + run // LANES, mask=edge < n, other=0)
        wanted = (edge < hi) & (edge + GROUP > lo)
    else:
        s = tl.load(scales_ptr + run // LANES)
        wanted = run >= 0
    if SUMS:
        where = scales_at * 32 + tile * (RUNS // LANES) + run // LANES
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
        v = v + code_values(words[k], BITS, 1 << (BITS - 1), PTX)
    if BACK:
        v = _rotated(v, 1.0, _SHORT_BACK, tile, n, RUNS, MASKED)
    scale = tl.where(good | lost, s, 0).to(tl.float32, bitcast=True)
    y = ()
    for k in tl.static_range(RUN):
        y = y + (v[k] * scale,)
    if SUMS:
        return y, lost, wrong, tl.sum(total, 0)
    else:
        return y, lost, wrong, tl.zeros([], tl.uint64)


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
def _encode_runs(
    v,
    static_ptr,
    scales_at,
    tile,
    n,
    group4,
    seed,
    step,
    rank,
    RUNS: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ROTATE: tl.constexpr,
    LARGEST: tl.constexpr,
    RANDOM: tl.constexpr,
    SUMS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Encode float32 columns of a tile's runs, zeros behind the end; gives the checksum terms.

    `group4` counts the fours of random words before those of the tile.
    """
    LANES: tl.constexpr = GROUP // RUN
    run = lanes(RUNS)
    t = v
    if ROTATE:
        t = _rotated(v, _RUN_FACTOR, _SHORT_FACTOR, tile, n, RUNS, MASKED)
    # A rotation makes no finite number infinite, and all of a run that holds others NaN or such.
    top = tl.abs(t[0])
    for k in tl.static_range(1, RUN):
        top = tl.maximum(top, tl.abs(t[k]), propagate_nan=tl.PropagateNan.ALL)
    top = _of_groups(top.to(tl.int32, bitcast=True), RUNS, GROUP)
    lost = top >= _INFINITY
    a = top.to(tl.float32, bitcast=True)
    a = tl.where(a < _FLOOR, LARGEST, a)
    largest = tl.full([RUNS], LARGEST, tl.float32)
    s = tl.where(lost, _NAN_SCALE, tl.div_rn(a, largest).to(tl.uint32, bitcast=True))
    r = tl.div_rn(largest, a)
    words = ()
    if RANDOM == _NO_KEY:
        # No product is so far above the largest code that it is not rounded to that.
        numbers = ()
        for k in tl.static_range(RUN):
            numbers = numbers + (t[k] * r + ANCHOR,)
        for k in tl.static_range(BITS):
            words = words + (code_word(numbers, k * (32 // BITS), 1, BITS, True),)
    else:
        steps = ()
        for k in tl.static_range(0, RUN, 4):
            drawn = philox4(seed, step, rank, 0, group4 + run * 8 + k // 4)
            for j in tl.static_range(4):
                q = t[k + j] * r
                q = tl.where(q < LARGEST, q, LARGEST)
                q = tl.where(q > -LARGEST, q, -LARGEST)
                q = ((q + (LARGEST + 1.0)) * 65536.0).to(tl.uint32)
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
    payload = (static_ptr + tile * (RUNS * 4 * BITS)).to(tl.pointer_type(tl.uint32))
    for k in tl.static_range(0, BITS, 4):
        i = run[:, None] * BITS + k + tl.arange(0, 4)[None, :]
        four = from_columns((words[k], words[k + 1], words[k + 2], words[k + 3]), 4, 2)
        if MASKED:
            at = tile * (RUNS * BITS) + i
            tl.store(payload + i, four, mask=at < (n * BITS + 31) // 32)
        else:
            tl.store(payload + i, four)
    # The first run of a group writes its scale.
    own = run % LANES == 0
    if MASKED:
        own = own & ((tile * RUNS + run) * RUN < n)
    where = tile * (RUNS // LANES) + run // LANES
    tl.store(static_ptr.to(tl.pointer_type(tl.uint32)) + scales_at * 32 + where, s, mask=own)
    total = tl.zeros([], tl.uint64)
    if SUMS:
        terms = tl.where(own, weigh(s, scales_at * 32 + where), 0)
        for k in tl.static_range(BITS):
            terms += weigh(words[k], tile * (RUNS * BITS) + run * BITS + k)
        total += tl.sum(terms, 0)
    return total


@triton.jit
def _load(
    x_ptr,
    first,
    tile,
    n,
    RUNS: tl.constexpr,
    EXP: tl.constexpr,
    ITEM: tl.constexpr,
    MASKED: tl.constexpr,
):
    """float32 columns of a tile's runs, 0 from element `n` of the chunk on."""
    if MASKED:
        i = _positions(tile, RUNS)
        return load_elements(x_ptr, first + i, i < n, RUNS, EXP, ITEM)
    else:
        words = load_words(x_ptr + (first + tile * (RUNS * RUN)) * ITEM, None, RUNS, ITEM)
        return word_values(words, EXP, ITEM)


@triton.jit
def _summed(
    x_ptr,
    first,
    source_ptr,
    scales_at,
    status_ptr,
    code,
    tile,
    n,
    RUNS: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    BACK: tl.constexpr,
    EXP: tl.constexpr,
    ITEM: tl.constexpr,
    X_ITEM: tl.constexpr,
    SUMS: tl.constexpr,
    PTX: tl.constexpr,
    CVT: tl.constexpr,
    MASKED: tl.constexpr,
):
    """(float32 columns of what a tile's elements and those of a buffer add up to; checksum terms of
    the buffer). BITS, GROUP and BACK are the buffer's.
    """
    PAIRS: tl.constexpr = CVT and (X_ITEM == 2) and (MASKED == 0)
    if PAIRS:
        v = load_words(x_ptr + (first + tile * (RUNS * RUN)) * ITEM, None, RUNS, ITEM)
    else:
        v = _load(x_ptr, first, tile, n, RUNS, EXP, X_ITEM, MASKED)
    y, _, wrong, added = _decode_runs(
        source_ptr, scales_at, tile, n, n * 0, n, RUNS, BITS, GROUP, BACK, SUMS, PTX, MASKED
    )
    report_any(status_ptr, code, wrong)
    if PAIRS:
        v = sum_words(y, v, EXP)
    else:
        v = sum_runs(y, v, EXP, ITEM, CVT)
    if MASKED:
        used = ()
        for k in tl.static_range(RUN):
            inside = (tile * RUNS + lanes(RUNS)) * RUN + k < n
            used = used + (tl.where(inside, v[k], 0.0),)
        v = used
    return v, added


@kernel
def _encode_kernel(
    x_ptr,
    out_ptr,
    key_ptr,
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
    identity: tl.uint64,
    nelem: tl.int64,
    chunk_nelem: tl.int64,
    tiles: tl.int32,
    head: tl.int32,
    static_at: tl.int64,
    static_stride: tl.int64,
    scales_at: tl.int64,
    source_static_at: tl.int64,
    source_stride: tl.int64,
    source_scales_at: tl.int64,
    seed: tl.uint64,
    step: tl.uint64,
    rank: tl.uint64,
    RUNS: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ROTATE: tl.constexpr,
    LARGEST: tl.constexpr,
    RANDOM: tl.constexpr,
    EXP: tl.constexpr,
    ITEM: tl.constexpr,
    ALIGNED: tl.constexpr,
    ADD: tl.constexpr,
    ADD_GROUP: tl.constexpr,
    ADD_BACK: tl.constexpr,
    X_ITEM: tl.constexpr,
    PTX: tl.constexpr,
    CVT: tl.constexpr,
    SUMS: tl.constexpr,
):
    """Encode one tile of one chunk. Header and records were cleared before.

    With ADD the elements of the sdp4bit buffer at `src_ptr`, whose codes have so many bits, are
    added before: in float32, and rounded to the plan's dtype. Those at `x_ptr` have X_ITEM bytes:
    ITEM, or where they are added 4, float32.
    """
    pid = tl.program_id(0)
    chunk = pid // tiles
    tile = (pid % tiles).to(tl.int64)
    first = chunk.to(tl.int64) * chunk_nelem
    if ALIGNED:
        first = tl.multiple_of(first, 16)
    n = tl.maximum(tl.minimum(chunk_nelem, nelem - first), 0)
    plain = ALIGNED and (tile + 1) * (RUNS * RUN) <= n
    static_ptr = out_ptr + (static_at + chunk.to(tl.int64) * static_stride) * 128
    source_ptr = src_ptr + (source_static_at + chunk.to(tl.int64) * source_stride) * 128
    code = CHUNK + (chunk.to(tl.int64) << 8) + CHUNK_PAYLOAD
    if RANDOM == _KEY_ON_DEVICE:
        seed = tl.load(key_ptr).to(tl.uint64, bitcast=True)
        step = tl.load(key_ptr + 1).to(tl.uint64, bitcast=True)
    group4 = chunk.to(tl.int64) * scales_at * (256 // BITS) + tile * (RUNS * RUN // 4)
    added = tl.zeros([], tl.uint64)
    # fmt: off
    if plain:
        if ADD > 0:
            v, added = _summed(
                x_ptr, first, source_ptr, source_scales_at, status_ptr, code, tile, n, RUNS, ADD,
                ADD_GROUP, ADD_BACK, EXP, ITEM, X_ITEM, SUMS, PTX, CVT, False,
            )
        else:
            v = _load(x_ptr, first, tile, n, RUNS, EXP, ITEM, False)
        total = _encode_runs(
            v, static_ptr, scales_at, tile, n, group4, seed, step, rank, RUNS, BITS, GROUP, ROTATE,
            LARGEST, RANDOM, SUMS, False,
        )
    else:
        if ADD > 0:
            v, added = _summed(
                x_ptr, first, source_ptr, source_scales_at, status_ptr, code, tile, n, RUNS, ADD,
                ADD_GROUP, ADD_BACK, EXP, ITEM, X_ITEM, SUMS, PTX, CVT, True,
            )
        else:
            v = _load(x_ptr, first, tile, n, RUNS, EXP, ITEM, True)
        total = _encode_runs(
            v, static_ptr, scales_at, tile, n, group4, seed, step, rank, RUNS, BITS, GROUP, ROTATE,
            LARGEST, RANDOM, SUMS, True,
        )
    # fmt: on
    record = out_ptr.to(tl.pointer_type(tl.int64)) + head + chunk.to(tl.int64) * 4
    if tile == tiles - 1:
        words_end = (n * BITS + 31) // 32
        clear(static_ptr, words_end * 4, scales_at * 128, chunk * 0, chunk * 0 + 1)
        scales_end = scales_at * 128 + (n + GROUP - 1) // GROUP * 4
        clear(static_ptr, scales_end, static_stride * 128, chunk * 0, chunk * 0 + 1)
        tl.store(record + 2, chunk.to(tl.int64) << 32)
        total += identity + record_term(n, n * 0, chunk * 0, chunk)
        if chunk == 0:
            k = tl.arange(0, 16)
            w = header_word(k, h0, h1, h2, h3, h4, h5, h6, h7, h8, h9, h10, h11)
            tl.store(out_ptr.to(tl.pointer_type(tl.uint64)) + k, w, mask=k < tl.minimum(head, 12))
    if SUMS:
        tl.atomic_add(record, total.to(tl.int64, bitcast=True), sem="relaxed")
        if ADD > 0:
            tl.atomic_add(sums_ptr + chunk, added.to(tl.int64, bitcast=True), sem="relaxed")


@triton.jit
def _decode_tile(
    static_ptr,
    scales_at,
    status_ptr,
    code,
    tile,
    n,
    out_ptr,
    to,
    lo,
    hi,
    RUNS: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    BACK: tl.constexpr,
    EXP: tl.constexpr,
    ITEM: tl.constexpr,
    ADD: tl.constexpr,
    STORE: tl.constexpr,
    STAGED: tl.constexpr,
    SUMS: tl.constexpr,
    PTX: tl.constexpr,
    CVT: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Decode a tile; element i of the chunk goes to `to + i` if it is in [lo, hi). Gives the
    checksum terms.
    """
    y, lost, wrong, total = _decode_runs(
        static_ptr, scales_at, tile, n, lo, hi, RUNS, BITS, GROUP, BACK, SUMS, PTX, MASKED
    )
    report_any(status_ptr, code, wrong)
    if STORE:
        i = _positions(tile, RUNS)
        use = None
        if MASKED:
            use = (i >= lo) & (i < hi)
        if ADD > 0:
            add_elements(out_ptr, to + i, y, use, EXP, ITEM, ADD, CVT)
        else:
            words = element_words(y, lost, EXP, ITEM, CVT)
            if MASKED:
                store_elements(out_ptr, to + i, words, use, RUNS, ITEM)
            else:
                store_runs(out_ptr + (to + tile * (RUNS * RUN)) * ITEM, words, RUNS, STAGED)
    return total


@kernel
def _decode_kernel(
    src_ptr,
    out_ptr,
    sums_ptr,
    status_ptr,
    start: tl.int64,
    stop: tl.int64,
    first_chunk: tl.int32,
    nelem: tl.int64,
    chunk_nelem: tl.int64,
    tiles: tl.int32,
    static_at: tl.int64,
    static_stride: tl.int64,
    scales_at: tl.int64,
    RUNS: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    BACK: tl.constexpr,
    EXP: tl.constexpr,
    ITEM: tl.constexpr,
    ALIGNED: tl.constexpr,
    ADD: tl.constexpr,
    STORE: tl.constexpr,
    STAGED: tl.constexpr,
    PTX: tl.constexpr,
    CVT: tl.constexpr,
    SUMS: tl.constexpr,
):
    """Elements `start` to `stop` of the tensor as far as they lie in one tile of one chunk."""
    pid = tl.program_id(0)
    chunk = first_chunk + pid // tiles
    tile = (pid % tiles).to(tl.int64)
    first = chunk.to(tl.int64) * chunk_nelem
    n = tl.maximum(tl.minimum(chunk_nelem, nelem - first), 0)
    static_ptr = src_ptr + (static_at + chunk.to(tl.int64) * static_stride) * 128
    to = first - start
    if ALIGNED:
        to = tl.multiple_of(to, 16)
    lo = tl.maximum(start - first, 0)
    hi = tl.minimum(stop - first, n)
    begin = tile * (RUNS * RUN)
    plain = ALIGNED and (begin >= lo) & (begin + RUNS * RUN <= hi)
    code = CHUNK + (chunk.to(tl.int64) << 8) + CHUNK_PAYLOAD
    # fmt: off
    if plain:
        total = _decode_tile(
            static_ptr, scales_at, status_ptr, code, tile, n, out_ptr, to, lo, hi, RUNS, BITS,
            GROUP, BACK, EXP, ITEM, ADD, STORE, STAGED, SUMS, PTX, CVT, False,
        )
    else:
        total = _decode_tile(
            static_ptr, scales_at, status_ptr, code, tile, n, out_ptr, to, lo, hi, RUNS, BITS,
            GROUP, BACK, EXP, ITEM, ADD, STORE, STAGED, SUMS, PTX, CVT, True,
        )
    # fmt: on
    if SUMS:
        tl.atomic_add(sums_ptr + chunk, total.to(tl.int64, bitcast=True), sem="relaxed")


def supports(dtype: DType) -> bool:
    """True for the dtypes that sdp4bit takes."""
    return dtype.name in Sdp4bit.dtypes


def measure(spec: CodecSpec, dtype: DType, x: torch.Tensor) -> torch.Tensor | None:
    """None: sdp4bit needs no statistics."""
    return None


@functools.cache
def _encode_variant(
    spec: Sdp4bit,
    dtype: DType,
    tiling: Tiling,
    aligned: bool,
    source: Sdp4bit | None,
    item: int,
    random: int,
    sums: bool,
    cvt: bool,
) -> Variant:
    added = {"ADD": 0, "ADD_GROUP": int(RUN.value), "ADD_BACK": False}
    if source is not None:
        added = {"ADD": source.bits, "ADD_GROUP": source.group, "ADD_BACK": source.rotates_back}
    return Variant(
        _encode_kernel,
        options(tiling.runs // 32, tiling.registers),
        RUNS=tiling.runs,
        BITS=spec.bits,
        GROUP=spec.group,
        ROTATE=spec.rotates,
        LARGEST=float(spec.largest),
        RANDOM=random,
        EXP=dtype.exponent,
        ITEM=dtype.itemsize,
        ALIGNED=aligned,
        **added,
        X_ITEM=item,
        PTX=PTX,
        CVT=cvt,
        SUMS=sums,
    )


@functools.cache
def _decode_variant(
    spec: Sdp4bit,
    dtype: DType,
    tiling: Tiling,
    aligned: bool,
    add: int,
    store: bool,
    sums: bool,
    cvt: bool,
) -> Variant:
    return Variant(
        _decode_kernel,
        options(tiling.runs // 32, tiling.registers),
        RUNS=tiling.runs,
        BITS=spec.bits,
        GROUP=spec.group,
        BACK=spec.rotates_back,
        EXP=dtype.exponent,
        ITEM=dtype.itemsize,
        ALIGNED=aligned,
        ADD=add,
        STORE=store,
        STAGED=tiling.staged,
        PTX=PTX,
        CVT=cvt,
        SUMS=sums,
    )


def _spec(plan: Plan) -> Sdp4bit:
    if not isinstance(plan.codec, Sdp4bit):
        raise TypeError(f"the plan's codec is {plan.codec.name}; allowed: sdp4bit")
    return plan.codec


def _geometry(plan: Plan) -> tuple[int, int, int]:
    """Where static parts start, their distance, and where scales lie in them, by 128 bytes."""
    scales_at = plan.layout.sections[0].nbytes // 128
    return plan.static_offset // 128, plan.static_stride // 128, scales_at


def _tiles(plan: Plan, tiling: Tiling) -> int:
    return max(1, -(-plan.chunk_nelem // (tiling.runs * int(RUN.value))))


def encode(plan: Plan, x, out, scratch, stats=None, key: Key | None = None) -> None:
    """Encode the elements of `x` into `out`; see `tightwire.gpu` for the contract."""
    _encode(plan, x, out, key, None, (out, out, out))


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
    """Encode what `src`, a buffer of `source_plan`, decodes to plus `x` into `out`, in one pass.

    `x` has the plan's dtype or float32. Sums are in float32, rounded to the plan's. See
    `tightwire.gpu` for the contract.
    """
    if plan.checksum:
        scratch[: 8 * plan.chunks].zero_()
    _encode(plan, x, out, key, source_plan, (src, scratch, status))
    _check(source_plan, src, scratch, status, 0, plan.nelem, True, plan.checksum, planned)


def _encode(plan: Plan, x, out, key, source_plan: Plan | None, sources) -> None:
    spec = _spec(plan)
    tiling = ENCODE if source_plan is None else DECODE_ADD_ENCODE
    tiles = _tiles(plan, tiling)
    random, on_device, numbers = NO_KEY, None, (0, 0, 0)
    if spec.rounding == "stochastic":
        random, on_device, numbers = key_arguments(key, out.device)
    out[: plan.static_offset].zero_()
    header = header_words(plan)
    source = None if source_plan is None else _spec(source_plan)
    aligned, item = aligned_for(plan, x), x.element_size()
    cvt = converts(out.device)
    _encode_variant(
        spec, plan.dtype, tiling, aligned, source, item, random, plan.checksum, cvt
    ).launch(
        tiles * plan.chunks,
        (x, out, out if on_device is None else on_device, *sources),
        *header[:HEADER_WORDS],
        identity_term(plan.codec.id, plan.codec.version, plan.dtype.id, 0),
        plan.nelem,
        plan.chunk_nelem,
        tiles,
        plan.header.nbytes // 8,
        *_geometry(plan),
        *_geometry(source_plan or plan),
        *numbers,
    )
    add_header(plan, out, header)


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
    stop = plan.nelem if stop is None else stop
    tiles = _tiles(plan, DECODE)
    sums = check and plan.checksum and (start < stop or not plan.nelem)
    if sums:
        scratch[: 8 * plan.chunks].zero_()
    if out is None:
        out = src
    first, end, _, _ = touched(plan, start, stop)
    if start < stop:
        adding = out.element_size() if add else 0
        even = aligned_for(plan, out, start)
        cvt = converts(src.device)
        _decode_variant(_spec(plan), plan.dtype, DECODE, even, adding, store, sums, cvt).launch(
            tiles * (end - first),
            (src, out, scratch, status),
            start,
            stop,
            first,
            plan.nelem,
            plan.chunk_nelem,
            tiles,
            *_geometry(plan),
        )
    _check(plan, src, scratch, status, start, stop, check, sums, planned)


def _check(plan: Plan, src, scratch, status, start, stop, check, sums, planned) -> None:
    spec = _spec(plan)
    checks = (start, stop, check, sums, planned, spec.bits, spec.group)
    check_chunks(plan, src, scratch, status, *checks, scale=SCALE_NBYTES)
