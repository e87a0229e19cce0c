# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment,misc"
"""thc on a GPU: a pass for norms unless they are given, then one kernel each way. specs/thc.md.

A program takes four blocks, and holds 32 values of a block in a thread: a run side by side, then,
after an exchange, those that are 32 apart.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from ..formats.dtypes import DType
from .common.base import Key, Plan
from .common.columns_triton import to_columns
from .common.frame_triton import (
    CHUNK,
    CHUNK_PAYLOAD,
    frame_of,
    report,
    store_element,
    touched,
    weigh,
)
from .common.hadamard_triton import rotate
from .common.launch_triton import PTX, Variant, kernel, options
from .common.minifloat import INFINITY, largest_number
from .common.minifloat_triton import aligned_for, elements_at, narrow, widen
from .common.norms_triton import agreed, energies, of_tensor, roots
from .common.philox_triton import KEY_ON_DEVICE, key_arguments, philox4
from .thc import (
    BELOW,
    BLOCK,
    COUNT_NBYTES,
    GAPS,
    LEVEL_STREAM,
    MIDDLE,
    NAN_NORM,
    NORM_BITS,
    NORMS_AT,
    ROTATE_FACTOR,
    SIGN_STREAM,
    STEPS,
    TOP,
    Thc,
    workspace,
)

_BLOCK = tl.constexpr(BLOCK)
#: Blocks of a program, and what a thread holds of one.
_ROWS, _RUN = tl.constexpr(4), tl.constexpr(32)
_TILE = tl.constexpr(4 * BLOCK)
_INFINITY, _NAN_NORM = tl.constexpr(INFINITY), tl.constexpr(NAN_NORM)
_NORM_LOW, _NORM_HIGH = (tl.constexpr(bits) for bits in NORM_BITS)
_COUNT_NBYTES, _NORMS_AT = tl.constexpr(COUNT_NBYTES), tl.constexpr(NORMS_AT)
_LEVEL_STREAM, _SIGN_STREAM = tl.constexpr(LEVEL_STREAM), tl.constexpr(SIGN_STREAM)
_FACTOR, _STEPS = tl.constexpr(ROTATE_FACTOR), tl.constexpr(STEPS)
_MIDDLE, _TOP = tl.constexpr(MIDDLE), tl.constexpr(TOP)
#: Two bits for each whole number of steps: how far the level below is, and what lies between the
#: levels next to it.
_BEHIND = tl.constexpr(sum((w - int(b)) << 2 * w for w, b in enumerate(BELOW)))
_GAPS = tl.constexpr(sum(int(gap) << 2 * w for w, gap in enumerate(GAPS)))

_OPTIONS = options(num_warps=4)


@triton.jit
def _elements(tile):
    """Numbers of a tile's elements in their chunk, shape (blocks, runs, elements of a run)."""
    i = tl.arange(0, _ROWS)[:, None, None] * _BLOCK + tl.arange(0, _RUN)[None, :, None] * _RUN
    return tile * _TILE + (i + tl.arange(0, _RUN)[None, None, :])


@triton.jit
def _drawn(seed, step, rank, STREAM: tl.constexpr, group, N: tl.constexpr):
    """4 N random words, in their order, those of group number `group` first."""
    r0, r1, r2, r3 = philox4(seed, step, rank, STREAM, group + tl.arange(0, N))
    return tl.reshape(tl.join(tl.join(r0, r2), tl.join(r1, r3)), [4 * N])


@triton.jit
def _signs(seed, step, tile):
    """The sign bit, or 0, of each element of a tile; shape of `_elements`."""
    each: tl.constexpr = _TILE // _RUN // 4
    words = _drawn(seed, step, seed * 0, _SIGN_STREAM, tile * each, each)
    words = tl.reshape(words, [_ROWS, _RUN])[:, :, None]
    return (words >> tl.arange(0, _RUN).to(tl.uint32)[None, None, :]) << 31


@triton.jit
def _rotated(t):
    """The transform of a tile's blocks, shape (blocks, elements)."""
    rows: tl.constexpr = _TILE // _RUN
    low = to_columns(tl.reshape(t, [rows, _RUN]), rows, _RUN, 5)
    return rotate(low, _ROWS, 5, 5)


@triton.jit
def _norm_words(bits):
    """Words of norms, of their bits."""
    words = tl.where(bits < _NORM_LOW, 0, bits)
    return tl.where(bits >= _INFINITY, _NAN_NORM, words)


@kernel
def _encode_kernel(
    x_ptr,
    out_ptr,
    key_ptr,
    norms_ptr,
    nelem: tl.int64,
    chunk_nelem: tl.int64,
    tiles: tl.int32,
    head: tl.int32,
    static_at: tl.int64,
    static_stride: tl.int64,
    scales_at: tl.int64,
    norms: tl.int64,
    seed: tl.uint64,
    step: tl.uint64,
    rank: tl.uint64,
    BITS: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    ON_DEVICE: tl.constexpr,
    EXP: tl.constexpr,
    ITEM: tl.constexpr,
    ALIGNED: tl.constexpr,
    SUMS: tl.constexpr,
):
    """Encode one tile of one chunk; the last one also writes count, seed and shared norm."""
    CELLS: tl.constexpr = 32 // BITS
    WORDS: tl.constexpr = _BLOCK // CELLS
    pid = tl.program_id(0)
    chunk = (pid // tiles).to(tl.int64)
    tile = (pid % tiles).to(tl.int64)
    first = chunk * chunk_nelem
    if ALIGNED:
        first = tl.multiple_of(first, 16)
    n = tl.maximum(tl.minimum(chunk_nelem, nelem - first), 0)
    blocks = (n + _BLOCK - 1) // _BLOCK
    static_ptr = out_ptr + (static_at + chunk * static_stride) * 128
    payload = static_ptr.to(tl.pointer_type(tl.uint32))
    if ON_DEVICE:
        seed = tl.load(key_ptr).to(tl.uint64, bitcast=True)
        step = tl.load(key_ptr + 1).to(tl.uint64, bitcast=True)
    row = tile * _ROWS + tl.arange(0, _ROWS)
    here = row < blocks
    if PER_BLOCK:
        norm = _norm_words(agreed(norms_ptr, norms, first, row, here, _BLOCK))
    else:
        norm = _norm_words(tl.where(here, of_tensor(norms_ptr), 0))
    coded = (norm != 0) & (norm != _NAN_NORM)

    i = _elements(tile)
    x = elements_at(x_ptr, ITEM) + first
    if (tile + 1) * _TILE <= n:
        v = tl.load(x + i)
    else:
        v = tl.load(x + i, mask=i < n, other=0)
    words = tl.where(coded[:, None, None], widen(v, EXP, ITEM), 0)
    top = tl.max(tl.max(tl.max(words & 0x7FFFFFFF, 2), 1), 0)
    words ^= _signs(seed, step, tile).to(tl.int32, bitcast=True)
    t = _rotated(words.to(tl.float32, bitcast=True) * _FACTOR)

    t = tl.reshape(t, [_ROWS, WORDS, CELLS])
    divisor = tl.where(coded, norm, 127 << 23).to(tl.float32, bitcast=True)
    r = tl.div_rn(tl.full([_ROWS], _STEPS, tl.float32), divisor)
    u = t * r[:, None, None] + _MIDDLE
    u = tl.where(u < _TOP, u, _TOP)
    u = tl.where(u > 0, u, 0)
    steps = (u * 65536.0).to(tl.uint32)
    whole = steps >> 16
    twice = (2 * whole).to(tl.uint64)
    behind = (((twice * 0 + _BEHIND) >> twice) & 3).to(tl.uint32)
    gap = (((twice * 0 + _GAPS) >> twice) & 3).to(tl.uint32)
    below = whole - behind
    group = (chunk * ((scales_at - 1) // BITS) + tile * _ROWS) * (_BLOCK // 4)
    drawn = _drawn(seed, step, rank, _LEVEL_STREAM, group, _TILE // 4)
    drawn = tl.reshape(drawn, [_ROWS, WORDS, CELLS])
    above = steps - (below << 16) > (drawn >> 16) * gap
    level = (below + tl.where(above, gap, 0)).to(tl.int32)
    level = tl.where(coded[:, None, None], level, 0)
    placed = level << (BITS * tl.arange(0, CELLS))[None, None, :]
    word = tl.sum(placed, 2).to(tl.uint32, bitcast=True)
    at = row[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
    tl.store(payload + at, word, mask=here[:, None])
    total = tl.sum(tl.sum(weigh(word, at), 1), 0)

    norms_at = scales_at * 32 + _NORMS_AT // 4
    if PER_BLOCK:
        tl.store(payload + norms_at + row, norm, mask=here)
        total += tl.sum(weigh(norm.to(tl.uint32, bitcast=True), norms_at + row), 0)
    record = out_ptr.to(tl.pointer_type(tl.int64)) + head + chunk * 4
    if top >= _INFINITY:
        tl.atomic_or(record + 2, chunk * 0 + 2, sem="relaxed")
    if tile == tiles - 1:
        if PER_BLOCK == 0:
            only = _norm_words(of_tensor(norms_ptr))
            tl.store(payload + norms_at, only)
            total += weigh(only.to(tl.uint32, bitcast=True), norms_at)
        count_at = scales_at * 32 - _COUNT_NBYTES // 4
        one = tl.full([], 1, tl.uint32)
        tl.store(payload + count_at, one)
        total += weigh(one, count_at)
        s = tl.arange(0, 4)
        part = tl.where(s == 0, seed, tl.where(s == 1, seed >> 32, tl.where(s == 2, step, 0)))
        part = part.to(tl.uint32)
        tl.store(payload + scales_at * 32 + s, part)
        total += tl.sum(weigh(part, scales_at * 32 + s), 0)
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
    PER_BLOCK: tl.constexpr,
    RANKS: tl.constexpr,
    LARGEST: tl.constexpr,
    EXP: tl.constexpr,
    ITEM: tl.constexpr,
    ALIGNED: tl.constexpr,
    ADD: tl.constexpr,
    STORE: tl.constexpr,
    PTX: tl.constexpr,
    SUMS: tl.constexpr,
):
    """Elements `start` to `stop` of the tensor as far as they lie in one tile of one chunk.

    What is wrong counts in norms, and in blocks that hold some of those elements.
    """
    CELLS: tl.constexpr = 32 // BITS
    WORDS: tl.constexpr = _BLOCK // CELLS
    pid = tl.program_id(0)
    chunk = (first_chunk + pid // tiles).to(tl.int64)
    tile = (pid % tiles).to(tl.int64)
    first = chunk * chunk_nelem
    n = tl.maximum(tl.minimum(chunk_nelem, nelem - first), 0)
    blocks = (n + _BLOCK - 1) // _BLOCK
    static_ptr = src_ptr + (static_at + chunk * static_stride) * 128
    payload = static_ptr.to(tl.pointer_type(tl.uint32))
    to = first - start
    if ALIGNED:
        to = tl.multiple_of(to, 16)
    lo = tl.maximum(start - first, 0)
    hi = tl.minimum(stop - first, n)
    begin = tile * _TILE
    end = begin + _TILE
    ranks = (tl.load(payload + scales_at * 32 - _COUNT_NBYTES // 4) & ((1 << BITS) - 1)).to(
        tl.int32
    )
    wrong = ((ranks == 0) | (ranks > RANKS)).to(tl.int32)

    row = tile * _ROWS + tl.arange(0, _ROWS)
    here = row < blocks
    norms_at = scales_at * 32 + _NORMS_AT // 4
    if PER_BLOCK:
        norm = tl.load(payload + norms_at + row, mask=here, other=0)
        total = tl.sum(weigh(norm, norms_at + row), 0)
    else:
        norm = tl.load(payload + norms_at + row * 0)
        total = tl.full([], 0, tl.uint64)
    lost = norm == _NAN_NORM
    good = (norm >= _NORM_LOW) & (norm <= _NORM_HIGH)
    wrong |= tl.max(((good | lost | (norm == 0)) == 0).to(tl.int32), 0)

    if SUMS | ((begin < hi) & (end > lo)):
        at = row[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
        if end <= n:
            word = tl.load(payload + at)
        else:
            word = tl.load(payload + at, mask=here[:, None], other=0)
        total += tl.sum(tl.sum(weigh(word, at), 1), 0)
        shift = (BITS * tl.arange(0, CELLS)).to(tl.uint32)[None, None, :]
        cells = ((word[:, :, None] >> shift) & ((1 << BITS) - 1)).to(tl.int32)
        wanted = (row * _BLOCK < hi) & ((row + 1) * _BLOCK > lo)
        most = tl.where(good, _TOP * ranks, 0)
        largest = tl.max(tl.max(cells, 2), 1)
        wrong |= tl.max((wanted & (largest > most)).to(tl.int32), 0)
        t = _rotated((cells - _MIDDLE * ranks).to(tl.float32))
        bits = tl.reshape(t, [_ROWS, _RUN, _RUN]).to(tl.uint32, bitcast=True)
        seed = tl.load(payload + scales_at * 32).to(tl.uint64)
        seed |= tl.load(payload + scales_at * 32 + 1).to(tl.uint64) << 32
        step = tl.load(payload + scales_at * 32 + 2).to(tl.uint64)
        y = (bits ^ _signs(seed, step, tile)).to(tl.float32, bitcast=True)
        value = tl.where(good, norm, 0).to(tl.float32, bitcast=True)
        scale = tl.div_rn(value, tl.full([_ROWS], _STEPS, tl.float32))
        y *= scale[:, None, None]
        y = tl.where(y < LARGEST, y, LARGEST)
        y = tl.where(y > -LARGEST, y, -LARGEST)
        other = tl.where(lost, _NAN_NORM, 0).to(tl.uint32).to(tl.float32, bitcast=True)
        y = tl.where(good[:, None, None], y, other[:, None, None])
        if STORE:
            found = narrow(y, EXP, ITEM, PTX)
            i = _elements(tile)
            if (begin >= lo) & (end <= hi):
                store_element(out_ptr, to + i, found, None, EXP, ITEM, ADD)
            else:
                store_element(out_ptr, to + i, found, (i >= lo) & (i < hi), EXP, ITEM, ADD)
    if wrong != 0:
        report(status_ptr, CHUNK + (chunk << 8) + CHUNK_PAYLOAD)
    if SUMS:
        tl.atomic_add(sums_ptr + chunk, total.to(tl.int64, bitcast=True), sem="relaxed")


@functools.cache
def _encode_variant(spec: Thc, dtype: DType, aligned: bool, on_device: bool, sums: bool) -> Variant:
    return Variant(
        _encode_kernel,
        _OPTIONS,
        BITS=spec.bits,
        PER_BLOCK=spec.norm == "block",
        ON_DEVICE=on_device,
        EXP=dtype.exponent,
        ITEM=dtype.itemsize,
        ALIGNED=aligned,
        SUMS=sums,
    )


@functools.cache
def _decode_variant(
    spec: Thc, dtype: DType, aligned: bool, add: int, store: bool, sums: bool
) -> Variant:
    return Variant(
        _decode_kernel,
        _OPTIONS,
        BITS=spec.bits,
        PER_BLOCK=spec.norm == "block",
        RANKS=spec.max_ranks,
        LARGEST=largest_number(dtype),
        EXP=dtype.exponent,
        ITEM=dtype.itemsize,
        ALIGNED=aligned,
        ADD=add,
        STORE=store,
        PTX=PTX,
        SUMS=sums,
    )


def _spec(plan: Plan) -> Thc:
    if not isinstance(plan.codec, Thc):
        raise TypeError(f"the plan's codec is {plan.codec.name}; allowed: thc")
    return plan.codec


def _geometry(plan: Plan) -> tuple[int, int, int]:
    """Where static parts start, their distance, and where scales lie in them, by 128 bytes."""
    scales_at = plan.layout.sections[0].nbytes // 128
    return plan.static_offset // 128, plan.static_stride // 128, scales_at


def _tiles(plan: Plan) -> int:
    return max(1, -(-plan.chunk_nelem // int(_TILE.value)))


def measure(spec: Thc, dtype: DType, x: torch.Tensor) -> torch.Tensor:
    """As `Thc.measure`, float32, on the device of `x`."""
    memory = torch.empty(workspace(spec, x.numel(), 1)[1], dtype=torch.uint8, device=x.device)
    return _measured(spec, dtype, x, memory).clone()


def _measured(spec: Thc, dtype: DType, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """The norms of `x`, in `memory`, the second part of the workspace."""
    blocks = spec.blocks(x.numel())
    if spec.norm == "block":
        found = memory.view(torch.float32)[:blocks]
        roots(dtype, x, BLOCK, 1 / BLOCK, found)
        return found
    count, norm = memory[:8].view(torch.float64), memory[8:12].view(torch.float32)
    size = 1 << max(blocks - 1, 0).bit_length()
    sums = memory[16:].view(torch.float64)[:size].zero_()
    energies(dtype, x, BLOCK, sums)
    while size > 1:
        size //= 2
        sums[:size] += sums[size : 2 * size]
    # On a GPU division by a Python number is a product with its reciprocal.
    sums[:1] /= count.fill_(max(x.numel(), 1))
    return norm.copy_(sums[:1].sqrt_())


def encode(plan: Plan, x, out, scratch, stats=None, key: Key | None = None) -> None:
    """Encode the elements of `x` into `out`; see `tightwire.gpu` for the contract.

    Chunks with an element that is not finite where `stats` are get marked as overflowed.
    """
    spec, tiles = _spec(plan), _tiles(plan)
    random, on_device, numbers = key_arguments(key, out.device)
    norms = spec.blocks(plan.nelem) if spec.norm == "block" else 1
    if stats is None:
        used, nbytes = workspace(spec, plan.chunk_nelem, plan.chunks)
        stats = _measured(spec, plan.dtype, x, scratch[used : used + nbytes])
    elif stats.numel() != norms:
        raise ValueError(f"stats have {stats.numel()} norms; allowed: {norms} for {plan.shape}")
    frame_of(plan).begin(out)
    held = random == KEY_ON_DEVICE
    _encode_variant(spec, plan.dtype, aligned_for(plan, x), held, plan.checksum).launch(
        tiles * plan.chunks,
        (x, out, out if on_device is None else on_device, stats.view(torch.uint8)),
        plan.nelem,
        plan.chunk_nelem,
        tiles,
        plan.header.nbytes // 8,
        *_geometry(plan),
        norms,
        *numbers,
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
    spec, tiles = _spec(plan), _tiles(plan)
    stop = plan.nelem if stop is None else stop
    sums = check and plan.checksum and start < stop
    if sums:
        scratch[: 8 * plan.chunks].zero_()
    first, end, _, _ = touched(plan, start, stop)
    if start < stop:
        adding = out.element_size() if add else 0
        even = out is not None and aligned_for(plan, out, start)
        _decode_variant(spec, plan.dtype, even, adding, store, sums).launch(
            tiles * (end - first),
            (src, src if out is None else out, scratch, status),
            start,
            stop,
            first,
            plan.nelem,
            plan.chunk_nelem,
            tiles,
            *_geometry(plan),
        )
    frame_of(plan).check(
        src, scratch, status, start, stop, whole=check, summed=sums, planned=planned
    )
