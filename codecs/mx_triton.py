# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""mx on a GPU: one read of the elements and one write of codes and scales, a tile per program."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from ..formats.checksum import identity_term
from ..formats.dtypes import DType
from .base import CodecSpec, Plan
from .device import (
    HEADER_WORDS,
    Variant,
    add_header,
    clear,
    header_word,
    header_words,
    kernel,
    options,
    record_term,
    store_element,
    touched,
    weigh_bytes,
)
from .minifloat import INFINITY, WIDENED, Element
from .minifloat_triton import (
    aligned_for,
    check_chunks,
    decode_bits,
    element_constants,
    elements_at,
    narrow,
    round_codes,
    split,
    store_words,
    unpack,
    widen,
)
from .mx import BLOCK

#: Blocks of a tile, one program's share.
_BLOCKS = tl.constexpr(64)
_BLOCK = tl.constexpr(BLOCK)
_INFINITY = tl.constexpr(INFINITY)
_OPTIONS = options(num_warps=4)


@triton.jit
def _scales(tops, EMAX: tl.constexpr, MAX_FRACTION: tl.constexpr, CEIL: tl.constexpr):
    """Scale bytes, int32, from the largest magnitudes of blocks; see `mx.block_scales`."""
    parts = split(tops)
    scales = (parts >> 23) - EMAX
    if CEIL:
        scales += ((parts & 0x7FFFFF) > MAX_FRACTION).to(tl.int32)
    scales = tl.minimum(tl.maximum(scales, 0), 254)
    scales = tl.where(tops == _INFINITY, 255 - EMAX, scales)
    return tl.where(tops > _INFINITY, 255, scales)


@triton.jit
def _encode_tile(
    x,
    payload,
    scales_ptr,
    scales_at,
    block,
    n,
    words,
    source_ptr,
    EMAX: tl.constexpr,
    MAX_FRACTION: tl.constexpr,
    CEIL: tl.constexpr,
    BITS: tl.constexpr,
    M: tl.constexpr,
    BIAS: tl.constexpr,
    TOP: tl.constexpr,
    INF: tl.constexpr,
    NAN: tl.constexpr,
    INTEGER: tl.constexpr,
    EXP: tl.constexpr,
    ITEM: tl.constexpr,
    ADD: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Encode blocks from `block` on of a chunk of `n` elements.

    With ADD those of the static part at `source_ptr` are added. Gives the checksum terms of what is
    written and of what is added.
    """
    GROUPS: tl.constexpr = 2 if BITS == 6 else BITS
    CODES: tl.constexpr = _BLOCK // GROUPS
    rows = tl.arange(0, _BLOCKS)
    i = rows[:, None, None] * _BLOCK + tl.arange(0, GROUPS)[None, :, None] * CODES
    i = block * _BLOCK + (i + tl.arange(0, CODES)[None, None, :])
    if MASKED:
        v = tl.load(x + i, mask=i < n, other=0)
    else:
        v = tl.load(x + i)
    values = widen(v, EXP, ITEM)
    added = tl.zeros([], tl.uint64)
    if ADD:
        source = source_ptr.to(tl.pointer_type(tl.uint32))
        codes, added = unpack(source, block, words, _BLOCKS, GROUPS, BITS, MASKED)
        at = block + rows
        if MASKED:
            scales = tl.load(source_ptr + scales_at + at, mask=at * _BLOCK < n, other=0)
        else:
            scales = tl.load(source_ptr + scales_at + at)
        added += tl.sum(weigh_bytes(scales, scales_at + at), 0)
        scales = scales.to(tl.int32)[:, None, None]
        bits = decode_bits(codes, scales, BITS, M, BIAS, INF, NAN, INTEGER, EXP, ITEM)
        total = widen(bits, EXP, ITEM).to(tl.float32, bitcast=True)
        total += values.to(tl.float32, bitcast=True)
        values = widen(narrow(total, EXP, ITEM), EXP, ITEM)
        if MASKED:
            values = tl.where(i < n, values, 0)
    tops = tl.max(tl.max(values & 0x7FFFFFFF, 2), 1)
    scales = _scales(tops, EMAX, MAX_FRACTION, CEIL)
    codes = round_codes(values, scales[:, None, None], BITS, M, BIAS, TOP, INTEGER)
    total = store_words(payload, codes, block, words, _BLOCKS, GROUPS, BITS, MASKED)
    at = block + rows
    if MASKED:
        tl.store(scales_ptr + at, scales.to(tl.uint8), mask=at * _BLOCK < n)
        scales = tl.where(at * _BLOCK < n, scales, 0)
    else:
        tl.store(scales_ptr + at, scales.to(tl.uint8))
    return total + tl.sum(weigh_bytes(scales, scales_at + at), 0), added


@kernel
def _encode_kernel(
    x_ptr,
    out_ptr,
    src_ptr,
    sums_ptr,
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
    EMAX: tl.constexpr,
    MAX_FRACTION: tl.constexpr,
    CEIL: tl.constexpr,
    BITS: tl.constexpr,
    M: tl.constexpr,
    BIAS: tl.constexpr,
    TOP: tl.constexpr,
    INF: tl.constexpr,
    NAN: tl.constexpr,
    INTEGER: tl.constexpr,
    EXP: tl.constexpr,
    ITEM: tl.constexpr,
    ALIGNED: tl.constexpr,
    ADD: tl.constexpr,
    SUMS: tl.constexpr,
):
    """Encode one tile of one chunk. Header and records were cleared before.

    With ADD the elements of the buffer at `src_ptr`, of the same plan, are added before.
    """
    pid = tl.program_id(0)
    chunk = pid // tiles
    tile = pid % tiles
    first = chunk.to(tl.int64) * chunk_nelem
    if ALIGNED:
        first = tl.multiple_of(first, 16)
    n = tl.maximum(tl.minimum(chunk_nelem, nelem - first), 0)
    static_ptr = out_ptr + (static_at + chunk.to(tl.int64) * static_stride) * 128
    source_ptr = src_ptr + (static_at + chunk.to(tl.int64) * static_stride) * 128
    x = elements_at(x_ptr, ITEM) + first
    payload = static_ptr.to(tl.pointer_type(tl.uint32))
    scales_ptr = static_ptr + scales_at * 128
    block = tile.to(tl.int64) * _BLOCKS
    words = (n * BITS + 31) // 32
    # fmt: off
    if (block + _BLOCKS) * _BLOCK <= n:
        total, added = _encode_tile(
            x, payload, scales_ptr, scales_at * 128, block, n, words, source_ptr, EMAX,
            MAX_FRACTION, CEIL, BITS, M, BIAS, TOP, INF, NAN, INTEGER, EXP, ITEM, ADD, False,
        )
    else:
        total, added = _encode_tile(
            x, payload, scales_ptr, scales_at * 128, block, n, words, source_ptr, EMAX,
            MAX_FRACTION, CEIL, BITS, M, BIAS, TOP, INF, NAN, INTEGER, EXP, ITEM, ADD, True,
        )
    # fmt: on
    record = out_ptr.to(tl.pointer_type(tl.int64)) + head + chunk.to(tl.int64) * 4
    if tile == tiles - 1:
        clear(static_ptr, words * 4, scales_at * 128, tile * 0, tile * 0 + 1)
        scales_end = scales_at * 128 + (n + _BLOCK - 1) // _BLOCK
        clear(static_ptr, scales_end, static_stride * 128, tile * 0, tile * 0 + 1)
        tl.store(record + 2, chunk.to(tl.int64) << 32)
        total += identity + record_term(n, n * 0, chunk * 0, chunk)
        if chunk == 0:
            k = tl.arange(0, 16)
            w = header_word(k, h0, h1, h2, h3, h4, h5, h6, h7, h8, h9, h10, h11)
            tl.store(out_ptr.to(tl.pointer_type(tl.uint64)) + k, w, mask=k < tl.minimum(head, 12))
    if SUMS:
        tl.atomic_add(record, total.to(tl.int64, bitcast=True), sem="relaxed")
        if ADD:
            tl.atomic_add(sums_ptr + chunk, added.to(tl.int64, bitcast=True), sem="relaxed")


@triton.jit
def _decode_tile(
    payload,
    scales_ptr,
    scales_at,
    out_ptr,
    at,
    lo,
    hi,
    block,
    n,
    words,
    BITS: tl.constexpr,
    M: tl.constexpr,
    BIAS: tl.constexpr,
    INF: tl.constexpr,
    NAN: tl.constexpr,
    INTEGER: tl.constexpr,
    EXP: tl.constexpr,
    ITEM: tl.constexpr,
    ADD: tl.constexpr,
    STORE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Decode blocks from `block` on; gives the checksum terms.

    Element i of the chunk goes to `at + i` if it is in [lo, hi).
    """
    GROUPS: tl.constexpr = 2 if BITS == 6 else BITS
    CODES: tl.constexpr = _BLOCK // GROUPS
    codes, total = unpack(payload, block, words, _BLOCKS, GROUPS, BITS, MASKED)
    rows = block + tl.arange(0, _BLOCKS)
    if MASKED:
        scales = tl.load(scales_ptr + rows, mask=rows * _BLOCK < n, other=127).to(tl.int32)
        counted = tl.where(rows * _BLOCK < n, scales, 0)
    else:
        scales = tl.load(scales_ptr + rows).to(tl.int32)
        counted = scales
    total += tl.sum(weigh_bytes(counted, scales_at + rows), 0)
    if STORE:
        bits = decode_bits(
            codes, scales[:, None, None], BITS, M, BIAS, INF, NAN, INTEGER, EXP, ITEM
        ).to(tl.uint32, bitcast=True)
        i = tl.arange(0, _BLOCKS)[:, None, None] * _BLOCK + tl.arange(0, CODES)[None, None, :]
        i = block * _BLOCK + (i + tl.arange(0, GROUPS)[None, :, None] * CODES)
        if MASKED:
            store_element(out_ptr, at + i, bits, (i >= lo) & (i < hi), EXP, ITEM, ADD)
        else:
            store_element(out_ptr, at + i, bits, None, EXP, ITEM, ADD)
    return total


@kernel
def _decode_kernel(
    src_ptr,
    out_ptr,
    sums_ptr,
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
    M: tl.constexpr,
    BIAS: tl.constexpr,
    INF: tl.constexpr,
    NAN: tl.constexpr,
    INTEGER: tl.constexpr,
    EXP: tl.constexpr,
    ITEM: tl.constexpr,
    ALIGNED: tl.constexpr,
    ADD: tl.constexpr,
    STORE: tl.constexpr,
    SUMS: tl.constexpr,
):
    """Elements `start` to `stop` of the tensor as far as they lie in one tile of one chunk."""
    pid = tl.program_id(0)
    chunk = first_chunk + pid // tiles
    tile = pid % tiles
    first = chunk.to(tl.int64) * chunk_nelem
    n = tl.maximum(tl.minimum(chunk_nelem, nelem - first), 0)
    static_ptr = src_ptr + (static_at + chunk.to(tl.int64) * static_stride) * 128
    payload = static_ptr.to(tl.pointer_type(tl.uint32))
    scales_ptr = static_ptr + scales_at * 128
    block = tile.to(tl.int64) * _BLOCKS
    words = (n * BITS + 31) // 32
    at = first - start
    if ALIGNED:
        at = tl.multiple_of(at, 16)
    lo = tl.maximum(start - first, 0)
    hi = tl.minimum(stop - first, n)
    # fmt: off
    if (block * _BLOCK >= lo) & ((block + _BLOCKS) * _BLOCK <= hi):
        total = _decode_tile(
            payload, scales_ptr, scales_at * 128, out_ptr, at, lo, hi, block, n, words, BITS, M,
            BIAS, INF, NAN, INTEGER, EXP, ITEM, ADD, STORE, False,
        )
    else:
        total = _decode_tile(
            payload, scales_ptr, scales_at * 128, out_ptr, at, lo, hi, block, n, words, BITS, M,
            BIAS, INF, NAN, INTEGER, EXP, ITEM, ADD, STORE, True,
        )
    # fmt: on
    if SUMS:
        tl.atomic_add(sums_ptr + chunk, total.to(tl.int64, bitcast=True), sem="relaxed")


def supports(dtype: DType) -> bool:
    """True for the dtypes that mx takes."""
    return dtype.name in WIDENED


def measure(spec: CodecSpec, dtype: DType, x: torch.Tensor) -> torch.Tensor | None:
    """None: mx needs no statistics."""
    return None


def _format(spec) -> Element:
    element: Element = spec.format
    return element


@functools.cache
def _encode_variant(spec, dtype: DType, aligned: bool, add: bool, sums: bool) -> Variant:
    e = _format(spec)
    chosen = element_constants(e)
    chosen |= {"EMAX": e.emax, "MAX_FRACTION": e.max_fraction, "CEIL": spec.scale_rule == "ceil"}
    chosen |= {"EXP": dtype.exponent, "ITEM": dtype.itemsize, "ALIGNED": aligned, "SUMS": sums}
    return Variant(_encode_kernel, _OPTIONS, **chosen, ADD=add)


@functools.cache
def _decode_variant(
    spec, dtype: DType, aligned: bool, add: int, store: bool, sums: bool
) -> Variant:
    chosen = element_constants(_format(spec))
    del chosen["TOP"]
    chosen |= {"EXP": dtype.exponent, "ITEM": dtype.itemsize, "ALIGNED": aligned}
    return Variant(_decode_kernel, _OPTIONS, **chosen, ADD=add, STORE=store, SUMS=sums)


def _tiles(plan: Plan) -> int:
    tile = BLOCK * int(_BLOCKS.value)
    return max(1, -(-plan.chunk_nelem // tile))


def encode(plan: Plan, x, out, scratch, stats=None, key=None) -> None:
    """See `zipccl_triton.encode`."""
    _encode(plan, x, out, out, out, False)


def decode_add_encode(
    plan: Plan, src, x, out, scratch, status, *, key=None, planned: bool = True
) -> None:
    """Encode into `out` the elements `x` plus those of `src`, a buffer of the same plan.

    `scratch` and `status` are those of `decode`: what is wrong with `src` is left in `status`.
    """
    sums = plan.checksum
    if sums:
        scratch[: 8 * plan.chunks].zero_()
    _encode(plan, x, out, src, scratch, True)
    bits = _format(plan.codec).bits
    check_chunks(plan, src, scratch, status, 0, plan.nelem, True, sums, planned, bits, BLOCK)


def _encode(plan: Plan, x, out, src, scratch, add: bool) -> None:
    tiles = _tiles(plan)
    out[: plan.static_offset].zero_()
    header = header_words(plan)
    _encode_variant(plan.codec, plan.dtype, aligned_for(plan, x), add, plan.checksum).launch(
        tiles * plan.chunks,
        (x, out, src, scratch),
        *header[:HEADER_WORDS],
        identity_term(plan.codec.id, plan.codec.version, plan.dtype.id, 0),
        plan.nelem,
        plan.chunk_nelem,
        tiles,
        plan.header.nbytes // 8,
        plan.static_offset // 128,
        plan.static_stride // 128,
        plan.layout.sections[0].nbytes // 128,
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
    """See `zipccl_triton.decode`."""
    stop = plan.nelem if stop is None else stop
    tiles = _tiles(plan)
    sums = check and plan.checksum and (start < stop or not plan.nelem)
    if sums:
        scratch[: 8 * plan.chunks].zero_()
    if out is None:
        out = src
    first, end, _, _ = touched(plan, start, stop)
    geometry = (
        plan.static_offset // 128,
        plan.static_stride // 128,
        plan.layout.sections[0].nbytes // 128,
    )
    if start < stop and (store or sums):
        adding = out.element_size() if add else 0
        even = aligned_for(plan, out, start)
        _decode_variant(plan.codec, plan.dtype, even, adding, store, sums).launch(
            tiles * (end - first),
            (src, out, scratch),
            start,
            stop,
            first,
            plan.nelem,
            plan.chunk_nelem,
            tiles,
            *geometry,
        )
    check_chunks(
        plan,
        src,
        scratch,
        status,
        start,
        stop,
        check,
        sums,
        planned,
        _format(plan.codec).bits,
        BLOCK,
    )
