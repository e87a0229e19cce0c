# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""raw on a GPU: one pass that copies and sums, a block of 16 KiB per program."""

from __future__ import annotations

import functools

import triton
import triton.language as tl

from .common.base import Plan
from .common.frame_triton import frame_of, store_element, touched, weigh, weigh_bytes
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
    nbytes: tl.int64,
    chunk_nbytes: tl.int64,
    blocks: tl.int32,
    head: tl.int32,
    static_at: tl.int64,
    static_stride: tl.int64,
    UNIT: tl.constexpr,
    SUMS: tl.constexpr,
):
    """Copy one block of one chunk."""
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


def encode(plan: Plan, x, out, scratch, stats=None, key=None) -> None:
    """See `zipccl_triton.encode`."""
    size = plan.dtype.itemsize
    chunk_nbytes = plan.chunk_nelem * size
    blocks = max(1, -(-chunk_nbytes // _BLOCK.value))
    frame_of(plan).begin(out)
    unit = _unit(size * plan.nelem, chunk_nbytes, x.data_ptr())
    _encode_variant(unit, plan.checksum).launch(
        blocks * plan.chunks,
        (x, out),
        plan.nelem * size,
        chunk_nbytes,
        blocks,
        plan.header.nbytes // 8,
        plan.static_offset // 128,
        plan.static_stride // 128,
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
    first, end, _, _ = touched(plan, start, stop)
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
    frame_of(plan).check(
        src, scratch, status, start, stop, whole=check, summed=sums, planned=planned
    )
