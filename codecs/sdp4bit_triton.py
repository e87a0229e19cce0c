# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment,misc"
"""sdp4bit on a GPU: one kernel each way, a tile of 128 runs per program. specs/sdp4bit.md."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from ..formats.checksum import identity_term
from ..formats.dtypes import DType
from .base import CodecSpec, Key, Plan
from .columns_triton import to_columns
from .device import (
    CHUNK,
    CHUNK_PAYLOAD,
    HEADER_WORDS,
    PTX,
    Variant,
    add_header,
    clear,
    header_word,
    header_words,
    kernel,
    options,
    record_term,
    report,
    store_element,
    touched,
    weigh,
)
from .hadamard_triton import LOW, rotate, spread
from .minifloat import INFINITY
from .minifloat_triton import aligned_for, check_chunks, elements_at, narrow, widen
from .philox_triton import KEY_ON_DEVICE, NO_KEY, key_arguments, philox4
from .sdp4bit import (
    FLOOR,
    LOST,
    RUN,
    RUN_FACTOR,
    SCALE_BITS,
    SCALE_NBYTES,
    SHORT_BACK,
    SHORT_FACTOR,
    Sdp4bit,
    largest_number,
)

_RUN = tl.constexpr(RUN)
#: Runs of a tile, one program's share, which has whole groups of any size.
_RUNS = tl.constexpr(128)
_TILE = tl.constexpr(128 * RUN)
_NO_KEY = tl.constexpr(NO_KEY)
_KEY_ON_DEVICE = tl.constexpr(KEY_ON_DEVICE)
_INFINITY = tl.constexpr(INFINITY)
_LOST = tl.constexpr(LOST)
_FLOOR = tl.constexpr(FLOOR)
_RUN_FACTOR, _SHORT_FACTOR = tl.constexpr(RUN_FACTOR), tl.constexpr(SHORT_FACTOR)
_SHORT_BACK = tl.constexpr(SHORT_BACK)
_SCALE_LOW, _SCALE_HIGH = (tl.constexpr(b) for b in SCALE_BITS)
_OPTIONS = options(num_warps=4)

# Values of a tile have the shape (runs, words of codes, codes of a word). Only loads and stores of
# codes and elements, and what the end of a chunk asks for, are other than those of `whole` tiles.


@triton.jit
def _rotated(v, before, factor, tile, n, whole, BITS: tl.constexpr):
    """Values rotated, multiplied by `before`; those of a short run times `factor` instead."""
    low = to_columns(tl.reshape(v * before, [_TILE // LOW, LOW]), _TILE // LOW, LOW, 4)
    t = tl.reshape(rotate(low, _RUNS, 1), [_RUNS, BITS, _RUN // BITS])
    if whole == 0:
        short = (tile * _RUNS + tl.arange(0, _RUNS)) * _RUN + _RUN > n
        t = tl.where(short[:, None, None], v * factor, t)
    return t


@triton.jit
def _of_groups(v, GROUP: tl.constexpr):
    """The largest of values of runs, or of groups if they are longer; shape (groups,)."""
    if GROUP == _RUN:
        return v
    else:
        return tl.max(tl.reshape(v, [_TILE // GROUP, GROUP // _RUN]), 1)


@triton.jit
def _of_runs(v, GROUP: tl.constexpr):
    """The values of groups for each of their runs."""
    if GROUP == _RUN:
        return v
    else:
        return spread(v, _TILE // GROUP, GROUP // _RUN)


@triton.jit
def _random_words(group, seed, step, rank, BITS: tl.constexpr):
    """The words of a tile's codes; `group` counts the fours of words before them."""
    r0, r1, r2, r3 = philox4(seed, step, rank, 0, group + tl.arange(0, _TILE // 4))
    words = tl.join(tl.join(r0, r2), tl.join(r1, r3))
    return tl.reshape(words, [_RUNS, BITS, _RUN // BITS])


@triton.jit
def _elements(tile, BITS: tl.constexpr):
    """Numbers of a tile's elements in their chunk."""
    CODES: tl.constexpr = _RUN // BITS
    i = tl.arange(0, _RUNS)[:, None, None] * _RUN + tl.arange(0, BITS)[None, :, None] * CODES
    return tile * _TILE + (i + tl.arange(0, CODES)[None, None, :])


@triton.jit
def _words(tile, BITS: tl.constexpr):
    """Numbers of a tile's words of codes, shape (runs, words of a run)."""
    rows = tile * _RUNS + tl.arange(0, _RUNS)[:, None]
    return rows * BITS + tl.arange(0, BITS)[None, :]


@triton.jit
def _values(
    static_ptr,
    scales_at,
    tile,
    n,
    lo,
    hi,
    whole,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    BACK: tl.constexpr,
    TOP: tl.constexpr,
):
    """(float32 values of a tile, NaN where lost; whether a scale or code is wrong; checksum terms).

    Wrong counts only in groups that hold some of the elements `lo` to `hi` of the chunk.
    """
    payload = static_ptr.to(tl.pointer_type(tl.uint32))
    at = _words(tile, BITS)
    if whole:
        word = tl.load(payload + at)
    else:
        word = tl.load(payload + at, mask=at < (n * BITS + 31) // 32, other=0)
    total = tl.sum(tl.sum(weigh(word, at), 1), 0)
    shift = (32 - BITS - BITS * tl.arange(0, _RUN // BITS)[None, None, :]).to(tl.uint32)
    codes = (word[:, :, None] << shift).to(tl.int32, bitcast=True) >> (32 - BITS)
    group = tile * (_TILE // GROUP) + tl.arange(0, _TILE // GROUP)
    where = scales_at * 32 + group
    s = tl.load(payload + where, mask=group * GROUP < n, other=0)
    wanted = (group * GROUP < hi) & (group * GROUP + GROUP > lo)
    total += tl.sum(weigh(s, where), 0)
    lost = s == _LOST
    good = (s >= _SCALE_LOW) & (s <= _SCALE_HIGH)
    lost_runs = _of_runs(lost, GROUP)
    bad = codes == -(1 << (BITS - 1))
    bad = (bad | (lost_runs[:, None, None] & (codes != 0))).to(tl.int32)
    if whole == 0:
        bad = tl.where(_elements(tile, BITS) < n, bad, 0)
    bad = _of_groups(tl.max(tl.max(bad, 2), 1), GROUP)
    bad = (bad != 0) | ((good | lost) == 0)
    wrong = tl.max((bad & wanted).to(tl.int32), 0)
    w = codes.to(tl.float32)
    if BACK:
        w = _rotated(w, 1.0, _SHORT_BACK, tile, n, whole, BITS)
    scale = _of_runs(tl.where(good, s, 0), GROUP).to(tl.float32, bitcast=True)
    y = w * scale[:, None, None]
    y = tl.where(y < TOP, y, TOP)
    y = tl.where(y > -TOP, y, -TOP)
    nan = tl.full([1, 1, 1], _LOST, tl.uint32).to(tl.float32, bitcast=True)
    return tl.where(lost_runs[:, None, None], nan, y), wrong, total


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
    TOP: tl.constexpr,
    PTX: tl.constexpr,
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
    whole = (tile + 1) * _TILE <= n
    static_ptr = out_ptr + (static_at + chunk.to(tl.int64) * static_stride) * 128
    x = elements_at(x_ptr, X_ITEM) + first
    i = _elements(tile, BITS)
    if whole:
        v = tl.load(x + i)
    else:
        v = tl.load(x + i, mask=i < n, other=0)
    words = widen(v, EXP, X_ITEM)
    if ADD > 0:
        source_ptr = src_ptr + (source_static_at + chunk.to(tl.int64) * source_stride) * 128
        # fmt: off
        y, wrong, added = _values(
            source_ptr, source_scales_at, tile, n, n * 0, n, whole, ADD, ADD_GROUP, ADD_BACK, TOP
        )
        # fmt: on
        if wrong != 0:
            report(status_ptr, CHUNK + (chunk.to(tl.int64) << 8) + CHUNK_PAYLOAD)
        if SUMS:
            tl.atomic_add(sums_ptr + chunk, added.to(tl.int64, bitcast=True), sem="relaxed")
        y = tl.reshape(y, [_RUNS, BITS, _RUN // BITS])
        y = widen(narrow(y, EXP, ITEM, PTX), EXP, ITEM).to(tl.float32, bitcast=True)
        y += words.to(tl.float32, bitcast=True)
        words = widen(narrow(y, EXP, ITEM, PTX), EXP, ITEM)
        if whole == 0:
            words = tl.where(i < n, words, 0)
    tops = tl.max(tl.max(words & 0x7FFFFFFF, 2), 1)
    lost = _of_groups(tops, GROUP) >= _INFINITY
    lost_runs = _of_runs(lost, GROUP)
    t = tl.where(lost_runs[:, None, None], 0, words).to(tl.float32, bitcast=True)
    if ROTATE:
        t = _rotated(t, _RUN_FACTOR, _SHORT_FACTOR, tile, n, whole, BITS)
    a = _of_groups(tl.max(tl.max(tl.abs(t), 2), 1), GROUP)
    a = tl.where(a < _FLOOR, LARGEST, a)
    largest = tl.full([_TILE // GROUP], LARGEST, tl.float32)
    s = tl.div_rn(a, largest).to(tl.uint32, bitcast=True)
    r = _of_runs(tl.div_rn(largest, a), GROUP)
    q = t * r[:, None, None]
    q = tl.where(q < LARGEST, q, LARGEST)
    q = tl.where(q > -LARGEST, q, -LARGEST)
    if RANDOM == _NO_KEY:
        codes = (q + 12582912.0).to(tl.int32, bitcast=True)
    else:
        if RANDOM == _KEY_ON_DEVICE:
            seed = tl.load(key_ptr).to(tl.uint64, bitcast=True)
            step = tl.load(key_ptr + 1).to(tl.uint64, bitcast=True)
        group4 = chunk.to(tl.int64) * scales_at * (256 // BITS) + tile * (_TILE // 4)
        drawn = _random_words(group4, seed, step, rank, BITS)
        steps = ((q + (LARGEST + 1.0)) * 65536.0).to(tl.uint32)
        codes = ((steps + (drawn >> 16)) >> 16).to(tl.int32) - (1 << (BITS - 1))
    codes = tl.where(lost_runs[:, None, None], 0, codes & ((1 << BITS) - 1))
    placed = codes << (BITS * tl.arange(0, _RUN // BITS)[None, None, :])
    word = tl.sum(placed, 2).to(tl.uint32, bitcast=True)
    payload = static_ptr.to(tl.pointer_type(tl.uint32))
    at = _words(tile, BITS)
    words_end = (n * BITS + 31) // 32
    if whole:
        tl.store(payload + at, word)
    else:
        tl.store(payload + at, word, mask=at < words_end)
    s = tl.where(lost, _LOST, s)
    group = tile * (_TILE // GROUP) + tl.arange(0, _TILE // GROUP)
    where = scales_at * 32 + group
    tl.store(payload + where, s, mask=group * GROUP < n)
    total = tl.sum(tl.sum(weigh(word, at), 1), 0)
    total += tl.sum(tl.where(group * GROUP < n, weigh(s, where), 0), 0)
    record = out_ptr.to(tl.pointer_type(tl.int64)) + head + chunk.to(tl.int64) * 4
    if tile == tiles - 1:
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
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    BACK: tl.constexpr,
    TOP: tl.constexpr,
    EXP: tl.constexpr,
    ITEM: tl.constexpr,
    ALIGNED: tl.constexpr,
    ADD: tl.constexpr,
    STORE: tl.constexpr,
    PTX: tl.constexpr,
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
    whole = (tile + 1) * _TILE <= n
    y, wrong, total = _values(static_ptr, scales_at, tile, n, lo, hi, whole, BITS, GROUP, BACK, TOP)
    if wrong != 0:
        report(status_ptr, CHUNK + (chunk.to(tl.int64) << 8) + CHUNK_PAYLOAD)
    if SUMS:
        tl.atomic_add(sums_ptr + chunk, total.to(tl.int64, bitcast=True), sem="relaxed")
    if STORE:
        bits = narrow(y, EXP, ITEM, PTX)
        i = _elements(tile, BITS)
        if (tile * _TILE >= lo) & ((tile + 1) * _TILE <= hi):
            store_element(out_ptr, to + i, bits, None, EXP, ITEM, ADD)
        else:
            store_element(out_ptr, to + i, bits, (i >= lo) & (i < hi), EXP, ITEM, ADD)


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
    aligned: bool,
    source: Sdp4bit | None,
    item: int,
    random: int,
    sums: bool,
) -> Variant:
    added = {"ADD": 0, "ADD_GROUP": RUN, "ADD_BACK": False}
    if source is not None:
        added = {"ADD": source.bits, "ADD_GROUP": source.group, "ADD_BACK": source.rotates_back}
    return Variant(
        _encode_kernel,
        _OPTIONS,
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
        TOP=largest_number(dtype),
        PTX=PTX,
        SUMS=sums,
    )


@functools.cache
def _decode_variant(
    spec: Sdp4bit, dtype: DType, aligned: bool, add: int, store: bool, sums: bool
) -> Variant:
    return Variant(
        _decode_kernel,
        _OPTIONS,
        BITS=spec.bits,
        GROUP=spec.group,
        BACK=spec.rotates_back,
        TOP=largest_number(dtype),
        EXP=dtype.exponent,
        ITEM=dtype.itemsize,
        ALIGNED=aligned,
        ADD=add,
        STORE=store,
        PTX=PTX,
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


def _tiles(plan: Plan) -> int:
    return max(1, -(-plan.chunk_nelem // int(_TILE.value)))


def encode(plan: Plan, x, out, scratch, stats=None, key: Key | None = None) -> None:
    """Encode the elements of `x` into `out`; see `tightwire.device` for the contract."""
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
    `tightwire.device` for the contract.
    """
    if plan.checksum:
        scratch[: 8 * plan.chunks].zero_()
    _encode(plan, x, out, key, source_plan, (src, scratch, status))
    _check(source_plan, src, scratch, status, 0, plan.nelem, True, plan.checksum, planned)


def _encode(plan: Plan, x, out, key, source_plan: Plan | None, sources) -> None:
    spec, tiles = _spec(plan), _tiles(plan)
    random, on_device, numbers = NO_KEY, None, (0, 0, 0)
    if spec.rounding == "stochastic":
        random, on_device, numbers = key_arguments(key, out.device)
    out[: plan.static_offset].zero_()
    header = header_words(plan)
    source = None if source_plan is None else _spec(source_plan)
    aligned, item = aligned_for(plan, x), x.element_size()
    _encode_variant(spec, plan.dtype, aligned, source, item, random, plan.checksum).launch(
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
    """Decode elements `start` to `stop` into `out`; see `tightwire.device` for the contract."""
    stop = plan.nelem if stop is None else stop
    tiles = _tiles(plan)
    sums = check and plan.checksum and (start < stop or not plan.nelem)
    if sums:
        scratch[: 8 * plan.chunks].zero_()
    if out is None:
        out = src
    first, end, _, _ = touched(plan, start, stop)
    if start < stop:
        adding = out.element_size() if add else 0
        even = aligned_for(plan, out, start)
        _decode_variant(_spec(plan), plan.dtype, even, adding, store, sums).launch(
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
