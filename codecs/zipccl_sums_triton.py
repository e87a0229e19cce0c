# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment,misc"
"""Sums of zipccl buffers on a GPU, tile by tile. codecs/common/sums.py."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from ..formats.dtypes import DType
from .common.frame_triton import (
    CHUNK,
    CHUNK_PAYLOAD,
    PLACE_WORDS,
    check_header,
    chunk_kind,
    float_of,
    place_of,
    report,
    static_of,
    store_element,
)
from .common.launch_triton import Variant, kernel, options
from .common.minifloat_triton import converts
from .common.runs_triton import element_words, negative_zero
from .zipccl import TILE
from .zipccl_decode_triton import (
    check_one,
    claims,
    decode_rows,
    dynamic_share,
    index_of,
    padding_is_wrong,
    row_of,
    store_row,
)
from .zipccl_words_triton import (
    LANES,
    WIDTH,
    Part,
    columns_of,
    lanes,
    launch_of,
    load4,
    load4_aligned,
    one_by_one,
    packed_part,
    part_at,
    quads,
    real_of,
    weigh_items,
)

_TILE = tl.constexpr(TILE)


@triton.jit
def negative_zeros():
    """The start of a sum of tiles.

    Sums are 32 tensors, of each lane its four elements in the eight rows.
    """
    v = ()
    for _ in tl.static_range(32):
        v = v + (negative_zero([LANES]),)
    return v


@triton.jit
def _plus(v, r: tl.constexpr, bits, EXP: tl.constexpr, ITEM: tl.constexpr):
    """The four sums of a lane in row `r`, and what they are with elements of these bits."""
    b0, b1, b2, b3 = bits
    return (
        v[4 * r] + float_of(b0, EXP, ITEM),
        v[4 * r + 1] + float_of(b1, EXP, ITEM),
        v[4 * r + 2] + float_of(b2, EXP, ITEM),
        v[4 * r + 3] + float_of(b3, EXP, ITEM),
    )


@triton.jit
def add_local(v, x_ptr, at, valid, FULL: tl.constexpr, L: tl.constexpr):
    """`v` plus a tile of a tensor, from element `at` on."""
    cols = columns_of(valid)
    total = ()
    for r in tl.static_range(8):
        if FULL:
            if L.x_item == 4:
                bits = quads(x_ptr, at + r * WIDTH)
            else:
                a, b, _ = load4_aligned(x_ptr, at + r * WIDTH, L.x_item)
                bits = (a & 0xFFFF, a >> 16, b & 0xFFFF, b >> 16)
        else:
            i = r * cols + 4 * lanes()
            bits = load4(x_ptr, at + i, real_of(i, cols, valid), L.x_item)
        total = total + _plus(v, r, bits, L.exponent, L.x_item)
    return total


@triton.jit
def add_rows(v, rows, valid, entry, FULL: tl.constexpr, L: tl.constexpr):
    """(`v` plus a tile that `decode_rows` gave, whether its padding is wrong)."""
    cols = columns_of(valid)
    bad = entry < 0
    total = ()
    for r in tl.static_range(8):
        v0, v1, v2, v3 = row_of(rows, r, L)
        bits = one_by_one(v0, v1, v2, v3, L)
        if not FULL:
            bad = bad | padding_is_wrong(r * cols + 4 * lanes(), cols, valid, bits, entry, L)
        total = total + _plus(v, r, bits, L.exponent, L.item)
    return total, bad


@triton.jit
def add_raw(
    v, static_ptr, dynamic_ptr, stride, begin, valid, missing, FULL: tl.constexpr, L: tl.constexpr
):
    """(`v` plus a tile of a chunk that is stored raw, checksum terms); see `decode_raw`."""
    cut = stride // L.item
    cols = columns_of(valid)
    total = tl.zeros([LANES], tl.uint64)
    found = ()
    for r in tl.static_range(8):
        k = r * cols + 4 * lanes()
        i = begin + k
        # The cut is a multiple of four elements: none of four is in the other part.
        ok = tl.where((i < cut) | (missing == 0), real_of(k, cols, valid), 0)
        at = tl.where(i < cut, static_ptr.to(tl.int64), dynamic_ptr.to(tl.int64) - stride)
        at += i * L.item
        if FULL and L.item == 2:
            four = tl.load(at.to(tl.pointer_type(tl.uint64)), mask=ok > 0, other=0)
            a, b = four.to(tl.uint32), (four >> 32).to(tl.uint32)
            bits = (a & 0xFFFF, a >> 16, b & 0xFFFF, b >> 16)
        else:
            bits = load4(at.to(tl.pointer_type(tl.uint8)), 0, ok, L.item)
        if L.sums:
            for c in tl.static_range(4):
                total += weigh_items(bits[c], i + c, L.item)
        found = found + _plus(v, r, bits, L.exponent, L.item)
    return found, tl.sum(total, 0)


@triton.jit
def store_sum(v, out_ptr, at, valid, factor, FULL: tl.constexpr, L: tl.constexpr):
    """Store sums, times `factor` if they are scaled, from element `at` on."""
    ITEM: tl.constexpr = L.out_item
    if L.scaled:
        scaled = ()
        for k in tl.static_range(32):
            scaled = scaled + (v[k] * factor,)
        v = scaled
    words = element_words(v, None, L.exponent, ITEM, L.cvt, False)
    cols = columns_of(valid)
    for r in tl.static_range(8):
        if ITEM == 4:
            v0, v1, v2, v3 = words[4 * r], words[4 * r + 1], words[4 * r + 2], words[4 * r + 3]
        else:
            v0, v1, v2, v3 = words[2 * r], words[2 * r + 1], words[2 * r], words[2 * r]
        if FULL:
            store_row(out_ptr, at + r * WIDTH, v0, v1, v2, v3, L.exponent, ITEM, 0)
        else:
            if ITEM == 2:
                v0, v1, v2, v3 = v0 & 0xFFFF, v0 >> 16, v1 & 0xFFFF, v1 >> 16
            i = r * cols + 4 * lanes()
            vs = (v0, v1, v2, v3)
            for c in tl.static_range(4):
                use = real_of(i, cols, valid) > c
                store_element(out_ptr, at + i + c, vs[c], use, L.exponent, ITEM, 0)


@triton.jit
def _add_source(v, p, tile, status_ptr, FULL: tl.constexpr, L: tl.constexpr):
    """(`v` plus a tile of a chunk, checksum terms)."""
    dynamic_nbytes, is_raw, raw_dynamic = claims(p, L.item)
    begin_tile = tile.to(tl.int64) * _TILE
    valid = tl.minimum(p.n - begin_tile, _TILE).to(tl.int32)
    total = tl.zeros([], tl.uint64)
    # fmt: off
    if is_raw:
        v, total = add_raw(
            v, p.static_ptr, p.dynamic_ptr, p.stride, begin_tile, valid,
            raw_dynamic - dynamic_nbytes, FULL, L,
        )
    else:
        tiles = ((p.n + _TILE - 1) // _TILE).to(tl.int32)
        entry, begin, end, bad, of_index = index_of(
            p.static_ptr, p.index_at, tile, tiles, dynamic_nbytes, p.fixed, L.exponent
        )
        rows, wrong, total = decode_rows(
            p.static_ptr + tile.to(tl.int64) * L.block, valid, entry, p.dynamic_ptr, begin, end,
            dynamic_nbytes, tile * (L.block // 4), FULL, L,
        )
        # fmt: on
        v, padding = add_rows(v, rows, valid, entry, FULL, L)
        if bad | wrong | padding:
            report(status_ptr, CHUNK + (p.chunk << 8) + CHUNK_PAYLOAD)
        if L.sums:
            total += of_index
            total += dynamic_share(p.dynamic_ptr, dynamic_nbytes, p.stride, tile, tiles)
    return v, total


@triton.jit
def _plus_source(
    v,
    sources_ptr,
    starts_ptr,
    number,
    n,
    chunk,
    chunks,
    tile,
    g,
    FULL: tl.constexpr,
    L: tl.constexpr,
):
    """`v` plus a tile of buffer `number`; its checksum terms are added up."""
    src_ptr, sums_ptr, status_ptr = place_of(sources_ptr, number, PLACE_WORDS)
    p = part_at(src_ptr, chunk, n, g)
    if L.packed:
        p = packed_part(p, src_ptr + tl.load(starts_ptr + number * chunks + chunk), L.item)
    v, total = _add_source(v, p, tile, status_ptr, FULL, L)
    if L.sums:
        tl.atomic_add(sums_ptr + chunk, total.to(tl.int64, bitcast=True), sem="relaxed")
    return v


@triton.jit
def _sum_one(
    x_ptr,
    out_ptr,
    sources_ptr,
    starts_ptr,
    first,
    n,
    chunk,
    chunks,
    tile,
    g,
    count,
    place,
    factor,
    FULL: tl.constexpr,
    L: tl.constexpr,
):
    """See `_sum_kernel`. FULL: a whole tile at aligned addresses."""
    begin_tile = tile.to(tl.int64) * _TILE
    valid = tl.minimum(n - begin_tile, _TILE).to(tl.int32)
    at = first + begin_tile
    v = negative_zeros()
    number = count * 0
    terms = count
    if L.x_item > 0:
        # The tensor is one too.
        terms += 1
    for term in range(0, terms):
        # fmt: off
        if L.x_item == 0:
            v = _plus_source(
                v, sources_ptr, starts_ptr, term, n, chunk, chunks, tile, g, FULL, L
            )
        elif term == place:
            v = add_local(v, x_ptr, at, valid, FULL, L)
        else:
            v = _plus_source(
                v, sources_ptr, starts_ptr, number, n, chunk, chunks, tile, g, FULL, L
            )
            number += 1
        # fmt: on
    store_sum(v, out_ptr, at, valid, factor, FULL, L)


#: For tiles that are not whole, or not aligned: apart, so that kernels compile fast.
_sum_apart = triton.jit(_sum_one.fn, noinline=True)


@kernel
def _sum_kernel(
    x_ptr,
    out_ptr,
    sources_ptr,
    starts_ptr,
    nelem: tl.int64,
    chunk_nelem: tl.int64,
    tiles: tl.int32,
    chunks: tl.int32,
    head: tl.int32,
    static_at: tl.int64,
    static_stride: tl.int64,
    index_at: tl.int64,
    dynamic_at: tl.int64,
    dynamic_stride: tl.int64,
    fixed: tl.int32,
    count: tl.int32,
    place: tl.int32,
    factor: tl.float32,
    L: tl.constexpr,
):
    """The sum of one tile of `count` buffers of a plan, and before number `place` of a tensor.

    See codecs/common/sums.py. `starts_ptr` has where the dynamic parts of packed ones start.
    """
    pid = tl.program_id(0)
    chunk = pid // tiles
    tile = pid % tiles
    first = chunk.to(tl.int64) * chunk_nelem
    n = tl.maximum(tl.minimum(chunk_nelem, nelem - first), 0)
    g = (head, static_at, static_stride, index_at, dynamic_at, dynamic_stride, fixed)
    begin = tile.to(tl.int64) * _TILE
    # fmt: off
    if L.aligned & (begin + _TILE <= n):
        _sum_one(
            x_ptr, out_ptr, sources_ptr, starts_ptr, first, n, chunk, chunks, tile, g, count, place,
            factor, True, L,
        )
    elif begin < n:
        _sum_apart(
            x_ptr, out_ptr, sources_ptr, starts_ptr, first, n, chunk, chunks, tile, g, count, place,
            factor, False, L,
        )


@triton.jit
def checked_part(src_ptr, plan_ptr, chunk, slot_nbytes, starts_ptr, PACKED: tl.constexpr):
    """What `check_one` takes of a chunk of the plan at `plan_ptr`."""
    n, _ = chunk_kind(plan_ptr, chunk)
    dynamic_ptr = src_ptr
    if PACKED:
        dynamic_ptr = src_ptr + tl.load(starts_ptr)
        slot_nbytes = n * 4
    static_ptr, stride = static_of(src_ptr, plan_ptr, chunk), tl.load(plan_ptr + 5)
    return Part(static_ptr, dynamic_ptr, src_ptr, chunk, n, stride, slot_nbytes, n, -1)


@kernel
def check_places_kernel(
    sources_ptr,
    plan_ptr,
    starts_ptr,
    planned: tl.int32,
    slot_nbytes: tl.int64,
    ITEM: tl.constexpr,
    PACKED: tl.constexpr,
    SUMS: tl.constexpr,
):
    """One chunk of one of several buffers that were decoded whole, and their headers."""
    chunks = tl.load(plan_ptr + 1)
    pid = tl.program_id(0).to(tl.int64)
    chunk = pid % chunks
    src_ptr, sums_ptr, status_ptr = place_of(sources_ptr, pid // chunks, PLACE_WORDS)
    if (planned != 0) & (chunk == 0):
        check_header(src_ptr, plan_ptr, status_ptr)
    p = checked_part(src_ptr, plan_ptr, chunk, slot_nbytes, starts_ptr + pid, PACKED)
    # fmt: off
    check_one(
        p, p.n * ITEM, src_ptr, plan_ptr, sums_ptr + chunk, 1, status_ptr, True, planned, PACKED,
        SUMS,
    )


#: Of sums: a thread has 32 of them. Of what is more than these registers spills are of raw chunks.
_SUM = options(4, maxnreg=128)


@functools.cache
def sum_variant(dtype: DType, device: torch.device, **values: int | bool) -> Variant:
    """The kernel of sums of a dtype, with values of its `Launch`."""
    return Variant(_sum_kernel, _SUM, L=launch_of(dtype, cvt=converts(device), **values))
