# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Chunks with a static and a dynamic part on a GPU: where they are, raw ones, checksums, checks.

For codecs whose kernels do not weigh what they write and read: words are summed up in shares.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import triton
import triton.language as tl

from .base import Plan
from .frame_triton import (
    check_header,
    check_record,
    check_whole,
    chunk_kind,
    frame_of,
    gaps_of,
    padding_of,
    record_term,
    static_of,
    touched,
    weigh,
)
from .launch_triton import Variant, kernel, options, program
from .plans_triton import Selection


@triton.jit
def items(ptr, ITEM: tl.constexpr):
    """Elements of so many bytes, unsigned."""
    if ITEM == 1:
        return ptr.to(tl.pointer_type(tl.uint8))
    elif ITEM == 2:
        return ptr.to(tl.pointer_type(tl.uint16))
    elif ITEM == 4:
        return ptr.to(tl.pointer_type(tl.uint32))
    else:
        return ptr.to(tl.pointer_type(tl.uint64))


@triton.jit
def chunk_at(data_ptr, chunk, nelem, chunk_nelem, g):
    """(first element, elements, static part, dynamic part, record) of a chunk."""
    head, static_at, stride, dynamic_at, dynamic_stride = g
    first = chunk * chunk_nelem
    n = tl.maximum(tl.minimum(chunk_nelem, nelem - first), 0)
    static_ptr = data_ptr + (static_at + chunk * stride) * 128
    dynamic_ptr = data_ptr + (dynamic_at + chunk * dynamic_stride) * 128
    record_ptr = data_ptr.to(tl.pointer_type(tl.int64)) + head + chunk * 4
    return first, n, static_ptr, dynamic_ptr, record_ptr


@triton.jit
def store_raw(x, begin, m, static_ptr, stride, dynamic_ptr, ITEM: tl.constexpr):
    """The elements `x` of a tile of a chunk that is stored raw."""
    static, dynamic = items(static_ptr, ITEM) + begin, items(dynamic_ptr, ITEM)
    cut = stride // ITEM - begin
    for at in range(0, m, 512):
        i = at + tl.arange(0, 512)
        v = tl.load(x + i, mask=i < m, other=0)
        tl.store(static + i, v, mask=(i < m) & (i < cut))
        tl.store(dynamic + (i - cut), v, mask=(i < m) & (i >= cut))


@triton.jit
def load_raw(
    static_ptr,
    dynamic_ptr,
    stride,
    nbytes,
    n,
    begin,
    m,
    out,
    lo,
    hi,
    ITEM: tl.constexpr,
    STORE: tl.constexpr,
    AT_ONCE: tl.constexpr = 512,
):
    """Elements `lo` to `hi` of a tile of a chunk that is stored raw, so many at a time."""
    static, dynamic = items(static_ptr, ITEM) + begin, items(dynamic_ptr, ITEM)
    cut = stride // ITEM - begin
    there = tl.where(nbytes == tl.maximum(n * ITEM - stride, 0), m, 0)
    for at in range(0, m, AT_ONCE):
        i = at + tl.arange(0, AT_ONCE)
        v = tl.load(static + i, mask=(i < m) & (i < cut), other=0)
        v |= tl.load(dynamic + (i - cut), mask=(i < there) & (i >= cut), other=0)
        if STORE:
            tl.store(out + i, v, mask=(i >= lo) & (i < hi))


@triton.jit
def write_record(record_ptr, chunk, dynamic_nbytes, fits, shrinks, SUMS: tl.constexpr):
    """What a chunk's record says of its dynamic part, and its terms."""
    flags = tl.where(fits, tl.where(shrinks, 0, 1), 2)
    tl.store(record_ptr + 1, dynamic_nbytes)
    tl.store(record_ptr + 2, flags.to(tl.int64) | (chunk << 32))
    if SUMS:
        term = record_term(chunk * 0, dynamic_nbytes, flags, chunk * 0)
        total = tl.load(record_ptr).to(tl.uint64, bitcast=True) + term
        tl.store(record_ptr, tl.where(fits, total, 0).to(tl.int64, bitcast=True))


@triton.jit
def share(ptr, nbytes, first_word, part, parts, AT_ONCE: tl.constexpr = 512):
    """Checksum terms of an equal share of a part's words; behind `nbytes` they count as zeros."""
    words = (nbytes + 3) // 4
    share = (words + parts - 1) // parts
    begin = part.to(tl.int64) * share
    end = tl.minimum(begin + share, words)
    # Of the last word some bytes may not be there.
    unused = (8 * (4 * words - nbytes)).to(tl.uint32)
    source = ptr.to(tl.pointer_type(tl.uint32))
    total = tl.zeros([AT_ONCE], tl.uint64)
    at = begin
    while at < end:
        i = at + tl.arange(0, AT_ONCE)
        v = tl.load(source + i, mask=i < end, other=0)
        v = tl.where(i == words - 1, (v << unused) >> unused, v)
        total += weigh(v, first_word + i)
        at += AT_ONCE
    return tl.sum(total, 0)


@triton.jit
def add_share(static_ptr, dynamic_ptr, record_ptr, stride, part, parts):
    """Add an equal share of a chunk's checksum terms to its record, unless it has overflowed."""
    nbytes, both = tl.load(record_ptr + 1), tl.load(record_ptr + 2)
    if (both & 2) == 0:
        total = share(static_ptr, stride, stride * 0, part, parts)
        total += share(dynamic_ptr, nbytes, stride // 4, part, parts)
        tl.atomic_add(record_ptr, total.to(tl.int64, bitcast=True), sem="relaxed")


@kernel
def _sum_kernel(
    out_ptr,
    nelem: tl.int64,
    chunk_nelem: tl.int64,
    parts: tl.int32,
    head: tl.int32,
    static_at: tl.int64,
    static_stride: tl.int64,
    dynamic_at: tl.int64,
    dynamic_stride: tl.int64,
    member=None,
):
    """Add a share of a chunk's checksum terms to its record."""
    chunk = (program(member) // parts).to(tl.int64)
    part = program(member) % parts
    g = (head, static_at, static_stride, dynamic_at, dynamic_stride)
    _, n, static_ptr, dynamic_ptr, record_ptr = chunk_at(out_ptr, chunk, nelem, chunk_nelem, g)
    if n > 0:
        add_share(static_ptr, dynamic_ptr, record_ptr, static_stride * 128, part, parts)


@triton.jit
def claims(record_ptr, n, stride, slot, ITEM: tl.constexpr):
    """(dynamic bytes that a record claims, 0 if there cannot be so many; whether it is raw)."""
    claimed, both = tl.load(record_ptr + 1), tl.load(record_ptr + 2)
    most = tl.minimum(tl.maximum(n * ITEM - stride, 0), slot)
    return tl.where((claimed < 0) | (claimed > most), 0, claimed), (both & 1) != 0


@kernel
def _check_kernel(
    src_ptr,
    plan_ptr,
    sums_ptr,
    status_ptr,
    starts_ptr,
    first_chunk: tl.int64,
    first_whole: tl.int64,
    end_whole: tl.int64,
    planned: tl.int32,
    slot: tl.int64,
    dynamic_at: tl.int64,
    dynamic_stride: tl.int64,
    ITEM: tl.constexpr,
    PACKED: tl.constexpr,
    SUMS: tl.constexpr,
    member=None,
):
    """A chunk's record; of those decoded whole padding and checksum; once, the header."""
    chunk = first_chunk + program(member).to(tl.int64)
    if (planned != 0) & (chunk == first_chunk):
        check_header(src_ptr, plan_ptr, status_ptr)
    n, kind_ptr = chunk_kind(plan_ptr, chunk)
    static_ptr = static_of(src_ptr, plan_ptr, chunk)
    stride = tl.load(plan_ptr + 5)
    raw_dynamic = tl.maximum(n * ITEM - stride, 0)
    most = tl.minimum(raw_dynamic, slot)
    record = check_record(src_ptr, plan_ptr, status_ptr, chunk, planned, most, raw_dynamic)
    if (chunk >= first_whole) & (chunk < end_whole):
        if (tl.load(record + 2) & 1) != 0:
            _, padding = padding_of(static_ptr, tl.minimum(n * ITEM, stride), stride)
            total = tl.zeros([], tl.uint64)
        else:
            total, padding = gaps_of(static_ptr, kind_ptr)
        if PACKED:
            claimed = tl.load(record + 1)
            used = tl.where((claimed < 0) | (claimed > most), 0, claimed)
            dynamic_ptr = src_ptr + tl.load(starts_ptr + chunk)
            _, behind = padding_of(dynamic_ptr, used, (used + 127) // 128 * 128)
            padding |= behind
        if SUMS:
            total += tl.load(sums_ptr + chunk).to(tl.uint64, bitcast=True)
        check_whole(plan_ptr, status_ptr, record, chunk, n, padding, total, SUMS)


@functools.cache
def _check_variant(item: int, packed: bool, sums: bool) -> Variant:
    return Variant(_check_kernel, options(1), ITEM=item, PACKED=packed, SUMS=sums)


_SUM = Variant(_sum_kernel, options(4))


class Parts(NamedTuple):
    """Where the parts of a plan's buffers are; offsets are in units of 128 bytes.

    Attributes:
        sizes: Elements of the tensor, and of a chunk.
        places: Words of the header, the first static part, their distance, the first dynamic part,
            their distance.
    """

    sizes: tuple[int, int]
    places: tuple[int, int, int, int, int]

    @classmethod
    def of(cls, plan: Plan) -> Parts:
        """Those of a plan."""
        static = plan.static_offset // 128, plan.static_stride // 128
        dynamic = plan.dynamic_offset // 128, plan.dynamic_stride // 128
        return cls((plan.nelem, plan.chunk_nelem), (plan.header.nbytes // 8, *static, *dynamic))


def add_sums(plan: Plan, parts: Parts, out, programs: int) -> None:
    """Add the terms of all chunks to their records, by so many programs for each."""
    _SUM.launch(programs * plan.chunks, (out,), *parts.sizes, programs, *parts.places)


def check(plan: Plan, parts: Parts, chosen: Selection, src, sums, status, slot: int) -> None:
    """As `Frame.check`, of chunks with dynamic parts of at most `slot` bytes."""
    packed, starts = chosen.dynamic_starts is not None, chosen.dynamic_starts
    summed = chosen.check and plan.checksum and chosen.start < chosen.stop
    begin, end, first_whole, end_whole = touched(plan, chosen.start, chosen.stop)
    _check_variant(plan.dtype.itemsize, packed, summed).launch(
        end - begin,
        (src, frame_of(plan).table(src.device), sums, status, status if starts is None else starts),
        begin,
        first_whole,
        end_whole if chosen.check else first_whole,
        int(chosen.planned),
        slot,
        *parts.places[3:],
    )
