# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""raw on a GPU: one pass that copies and sums, a block of 16 KiB per program."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from ..formats.checksum import identity_term
from ..formats.dtypes import DType
from .common.base import CodecSpec, Plan
from .common.frame_triton import (
    CHUNK,
    CHUNK_PADDING,
    CHUNK_SUM,
    FLAGS,
    HEADER_WORDS,
    OVERFLOWED,
    RECORD,
    add_header,
    check_header,
    clear,
    header_word,
    header_words,
    match_header,
    padding_of,
    record_term,
    report,
    store_element,
    touched,
    weigh,
    weigh_bytes,
)
from .common.launch_triton import Variant, kernel, options

_BLOCK = tl.constexpr(1 << 14)
_OPTIONS = options(num_warps=8)


@triton.jit
def _units(ptr, UNIT: tl.constexpr):
    if UNIT == 1:
        return ptr
    elif UNIT == 2:
        return ptr.to(tl.pointer_type(tl.uint16))
    elif UNIT == 4:
        return ptr.to(tl.pointer_type(tl.uint32))
    else:
        return ptr.to(tl.pointer_type(tl.uint64))


@triton.jit
def _unit_terms(v, i, UNIT: tl.constexpr):
    """Checksum terms of units number `i` of a static part."""
    if UNIT < 4:
        return weigh_bytes(v, i * UNIT)
    elif UNIT == 4:
        return weigh(v, i)
    else:
        return weigh(v.to(tl.uint32), 2 * i) + weigh((v >> 32).to(tl.uint32), 2 * i + 1)


@kernel
def _encode_kernel(
    x_ptr,
    out_ptr,
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
    nbytes: tl.int64,
    chunk_nbytes: tl.int64,
    blocks: tl.int32,
    head: tl.int32,
    static_at: tl.int64,
    static_stride: tl.int64,
    itemsize: tl.int32,
    UNIT: tl.constexpr,
    SUMS: tl.constexpr,
):
    """Copy one block of one chunk. Header and records were cleared before."""
    pid = tl.program_id(0)
    chunk = pid // blocks
    block = pid % blocks
    first = chunk.to(tl.int64) * chunk_nbytes
    n = tl.maximum(tl.minimum(chunk_nbytes, nbytes - first), 0)
    static_ptr = out_ptr + (static_at + chunk.to(tl.int64) * static_stride) * 128
    x = _units(x_ptr + first, UNIT)
    y = _units(static_ptr, UNIT)
    i = block.to(tl.int64) * (_BLOCK // UNIT) + tl.arange(0, _BLOCK // UNIT)
    v = tl.load(x + i, mask=i < n // UNIT, other=0)
    tl.store(y + i, v, mask=i < n // UNIT)
    total = tl.zeros([], tl.uint64)
    if SUMS:
        total += tl.sum(_unit_terms(v, i, UNIT), 0)
    record = out_ptr.to(tl.pointer_type(tl.int64)) + head + chunk.to(tl.int64) * 4
    if block == 0:
        clear(static_ptr, n, static_stride * 128, block, blocks)
        tl.store(record + 2, chunk.to(tl.int64) << 32)
        total += identity + record_term(n // itemsize, n * 0, chunk * 0, chunk)
        if chunk == 0:
            k = tl.arange(0, 16)
            w = header_word(k, h0, h1, h2, h3, h4, h5, h6, h7, h8, h9, h10, h11)
            tl.store(out_ptr.to(tl.pointer_type(tl.uint64)) + k, w, mask=k < tl.minimum(head, 12))
    elif static_stride * 128 > n:
        clear(static_ptr, n, static_stride * 128, block, blocks)
    if SUMS:
        tl.atomic_add(record, total.to(tl.int64, bitcast=True), sem="relaxed")


@kernel
def _decode_kernel(
    src_ptr,
    out_ptr,
    sums_ptr,
    start: tl.int64,
    stop: tl.int64,
    first_chunk: tl.int32,
    nbytes: tl.int64,
    chunk_nbytes: tl.int64,
    blocks: tl.int32,
    static_at: tl.int64,
    static_stride: tl.int64,
    UNIT: tl.constexpr,
    EXP: tl.constexpr,
    ADD: tl.constexpr,
    STORE: tl.constexpr,
    SUMS: tl.constexpr,
):
    """Bytes `start` to `stop` of the tensor as far as they lie in one block of one chunk.

    With ADD a unit is an element: ADD is the size of the accumulator's elements.
    """
    pid = tl.program_id(0)
    chunk = first_chunk + pid // blocks
    block = pid % blocks
    first = chunk.to(tl.int64) * chunk_nbytes
    n = tl.maximum(tl.minimum(chunk_nbytes, nbytes - first), 0)
    static_ptr = src_ptr + (static_at + chunk.to(tl.int64) * static_stride) * 128
    i = block.to(tl.int64) * (_BLOCK // UNIT) + tl.arange(0, _BLOCK // UNIT)
    v = tl.load(_units(static_ptr, UNIT) + i, mask=i < n // UNIT, other=0)
    if STORE:
        at = i + (first - start) // UNIT
        use = (i < n // UNIT) & (at >= 0) & (at < (stop - start) // UNIT)
        if ADD == 0:
            tl.store(_units(out_ptr, UNIT) + at, v, mask=use)
        else:
            store_element(out_ptr, at, v.to(tl.uint32), use, EXP, UNIT, ADD)
    if SUMS:
        total = tl.sum(_unit_terms(v, i, UNIT), 0)
        tl.atomic_add(sums_ptr + chunk, total.to(tl.int64, bitcast=True), sem="relaxed")


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
    identity: tl.uint64,
    nbytes: tl.int64,
    chunk_nbytes: tl.int64,
    chunks: tl.int32,
    head: tl.int32,
    static_at: tl.int64,
    static_stride: tl.int64,
    itemsize: tl.int32,
    planned: tl.int32,
    summed: tl.int32,
    SUMS: tl.constexpr,
):
    """A chunk's record; if it was decoded whole its padding and checksum; once, the header."""
    chunk = first_chunk + tl.program_id(0)
    first = chunk.to(tl.int64) * chunk_nbytes
    n = tl.maximum(tl.minimum(chunk_nbytes, nbytes - first), 0)
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
    if (chunk >= first_whole) & (chunk < end_whole):
        static_ptr = src_ptr + (static_at + chunk.to(tl.int64) * static_stride) * 128
        total, padding = padding_of(static_ptr, n, static_stride * 128)
        if padding != 0:
            report(status_ptr, CHUNK + where + CHUNK_PADDING)
        if SUMS:
            total += tl.load(sums_ptr + chunk).to(tl.uint64, bitcast=True) + identity
            total += record_term(n // itemsize, n * 0, both & 0xFFFFFFFF, both >> 32)
            if total != tl.load(record).to(tl.uint64, bitcast=True):
                report(status_ptr, CHUNK + where + CHUNK_SUM)


def supports(dtype: DType) -> bool:
    """True: raw takes every dtype."""
    return True


def measure(spec: CodecSpec, dtype: DType, x: torch.Tensor) -> torch.Tensor | None:
    """None: raw needs no statistics."""
    return None


def _unit(*numbers: int) -> int:
    """The largest of 8, 4, 2 and 1 that divides all of `numbers`."""
    return next(u for u in (8, 4, 2, 1) if all(k % u == 0 for k in numbers))


@functools.cache
def _encode_variant(unit: int, sums: bool) -> Variant:
    return Variant(_encode_kernel, _OPTIONS, UNIT=unit, SUMS=sums)


@functools.cache
def _decode_variant(unit: int, exponent: int, add: int, store: bool, sums: bool) -> Variant:
    return Variant(
        _decode_kernel, _OPTIONS, UNIT=unit, EXP=exponent, ADD=add, STORE=store, SUMS=sums
    )


@functools.cache
def _check_variant(sums: bool) -> Variant:
    return Variant(_check_kernel, options(1), SUMS=sums)


def encode(plan: Plan, x, out, scratch, stats=None, key=None) -> None:
    """See `zipccl_triton.encode`."""
    size = plan.dtype.itemsize
    chunk_nbytes = plan.chunk_nelem * size
    blocks = max(1, -(-chunk_nbytes // _BLOCK.value))
    out[: plan.static_offset].zero_()
    header = header_words(plan)
    unit = _unit(size * plan.nelem, chunk_nbytes, x.data_ptr())
    _encode_variant(unit, plan.checksum).launch(
        blocks * plan.chunks,
        (x, out),
        *header[:HEADER_WORDS],
        identity_term(plan.codec.id, plan.codec.version, plan.dtype.id, 0),
        plan.nelem * size,
        chunk_nbytes,
        blocks,
        plan.header.nbytes // 8,
        plan.static_offset // 128,
        plan.static_stride // 128,
        size,
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
    size = plan.dtype.itemsize
    stop = plan.nelem if stop is None else stop
    chunk_nbytes = plan.chunk_nelem * size
    blocks = max(1, -(-chunk_nbytes // _BLOCK.value))
    sums = check and plan.checksum and (start < stop or not plan.nelem)
    if sums:
        scratch[: 8 * plan.chunks].zero_()
    if out is None:
        out = src
    first, end, first_whole, end_whole = touched(plan, start, stop)
    geometry = (plan.static_offset // 128, plan.static_stride // 128)
    if start < stop and (store or sums):
        unit = (
            size
            if add
            else _unit(size * plan.nelem, chunk_nbytes, start * size, stop * size, out.data_ptr())
        )
        adding = out.element_size() if add else 0
        _decode_variant(unit, plan.dtype.exponent, adding, store, sums).launch(
            blocks * (end - first),
            (src, out, scratch),
            start * size,
            stop * size,
            first,
            plan.nelem * size,
            chunk_nbytes,
            blocks,
            *geometry,
        )
    if not check:
        end_whole = first_whole
    header = header_words(plan)
    _check_variant(sums).launch(
        end - first,
        (src, scratch, status),
        *header[:HEADER_WORDS],
        first,
        first_whole,
        end_whole,
        identity_term(plan.codec.id, plan.codec.version, plan.dtype.id, 0),
        plan.nelem * size,
        chunk_nbytes,
        plan.chunks,
        plan.header.nbytes // 8,
        *geometry,
        size,
        int(planned),
        int(plan.checksum),
    )
    if planned:
        match_header(plan, src, status, header)
