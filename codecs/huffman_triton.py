# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment,misc"
"""huffman on a GPU: a program a tile, or a group to decode; a lane a run. specs/huffman.md.

Encoding: tables of groups from samples; how long runs and tiles are; then all tiles know their
places, and are written, or the chunk is stored raw; checksums. Decoding: groups; checks.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..formats.dtypes import DType
from ..formats.header import align
from .common.base import Plan
from .common.dynamic_triton import (
    Parts,
    add_sums,
    check,
    chunk_at,
    claims,
    items,
    load_raw,
    share,
    store_raw,
    write_record,
)
from .common.fill_triton import zero
from .common.frame_triton import CHUNK, CHUNK_PAYLOAD, Places, clear, frame_of, report
from .common.gathered_sums_triton import launch_sum, read_elements
from .common.huffman import WORK_NBYTES
from .common.huffman_decode_triton import DECODING, LANES, TILES
from .common.huffman_encode_triton import PACKING, count_bytes, measure_tile, write_tile
from .common.huffman_tables_triton import (
    COUNTS_AT,
    find_table,
    table_memory,
    words_at,
)
from .common.huffman_triton import RUN, TILE
from .common.launch_triton import CUDA, PTX, Variant, kernel, options, program
from .common.merged_triton import merged_functions
from .common.minifloat_triton import aligned_for
from .common.plans_triton import Selection
from .huffman import GROUP, GROUP_TILES, STEP, group_count, planes_of, tile_count
from .huffman_decode_triton import decode_group

_GROUP, _GROUP_TILES, _STEP = tl.constexpr(GROUP), tl.constexpr(GROUP_TILES), tl.constexpr(STEP)
#: Work memory of a plane of a group, in bytes: what `find_table` and `measure_tile` write. Or a
#: decoder's entries, where they are not in shared memory.
_PLANE_NBYTES = tl.constexpr(WORK_NBYTES)
#: Calls of fewer tiles leave multiprocessors idle with a warp each.
FEW_TILES = 528
#: Most registers of a thread that writes a tile, by bytes of an element.
PACK_REGISTERS = {1: 96, 2: 96, 4: 128, 8: 168}
#: Bytes of a raw chunk that a decoder's program copies at a time, and words that it sums up.
_RAW, _SUMMED = tl.constexpr(8192), tl.constexpr(2048)


@dataclass(frozen=True)
class Launch:
    """What the kernels know of a call.

    Attributes:
        item: Bytes of an element, and its planes.
        rotated: Whether elements are rotated.
        low: Bytes of the units of planes before number `cut`.
        high: Those of the others.
        cut: See there.
        aligned: Chunks start at multiples of 16 bytes in the tensor.
        packed: Dynamic parts are where they are said to start, not in slots.
        store: Decoded elements are wanted.
        sums: Sum up checksum terms.
        ptx: PTX may be used.
    """

    item: int
    rotated: bool
    low: int
    high: int
    cut: int
    aligned: bool = True
    packed: bool = False
    store: bool = True
    sums: bool = False
    ptx: bool = False


@triton.jit
def _from(ptr, at, L: tl.constexpr):
    """The elements of a tensor from number `at`, the first of a tile, on."""
    if L.aligned:
        # A hint would be lost.
        at = at // 16 * 16
    return items(ptr, L.item) + at


@triton.jit
def _part_of(n, number, SIZE: tl.constexpr):
    """(first element of a part of a chunk of `n` elements, how many it has), each of up to SIZE."""
    begin = number.to(tl.int64) * SIZE
    return begin, tl.maximum(tl.minimum(n - begin, SIZE), 0).to(tl.int32)


@triton.jit
def _work_of(scratch_ptr, work_at, chunk, groups, group, ITEM: tl.constexpr):
    """Work memory of a group's first plane."""
    return scratch_ptr + work_at * 128 + (chunk * groups + group) * (ITEM * _PLANE_NBYTES)


@kernel
def _counts_kernel(
    x_ptr,
    scratch_ptr,
    nelem: tl.int64,
    chunk_nelem: tl.int64,
    tiles: tl.int32,
    groups: tl.int32,
    work_at: tl.int64,
    L: tl.constexpr,
    member=None,
):
    """Counts of the bytes of a tile, or of its part of a group's sample."""
    ITEM: tl.constexpr = L.item
    chunk = (program(member) // tiles).to(tl.int64)
    tile = program(member) % tiles
    group, t = tile // _GROUP_TILES, tile % _GROUP_TILES
    first = chunk * chunk_nelem
    n = tl.minimum(chunk_nelem, nelem - first)
    begin, m = _part_of(n, tile, TILE)
    _, of_group = _part_of(n, group, _GROUP)
    work_ptr = _work_of(scratch_ptr, work_at, chunk, groups, group, ITEM)
    COUNTING: tl.constexpr = "2048" if ITEM <= 2 else "8192"
    memory = table_memory(COUNTING, L.ptx)
    if m > 0:
        x = _from(x_ptr, first + begin, L)
        if (m == TILE) & L.aligned:
            count_bytes(x, t, m, of_group, work_ptr, memory, True, L)
        else:
            count_bytes(x, t, m, of_group, work_ptr, memory, False, L)


@kernel
def _tables_kernel(
    scratch_ptr,
    nelem: tl.int64,
    chunk_nelem: tl.int64,
    groups: tl.int32,
    work_at: tl.int64,
    sizes_at: tl.int64,
    L: tl.constexpr,
    member=None,
):
    """The table of a plane of a group."""
    ITEM: tl.constexpr = L.item
    plane = program(member) % ITEM
    group = (program(member) // ITEM) % groups
    chunk = (program(member) // ITEM // groups).to(tl.int64)
    _, m = _part_of(tl.minimum(chunk_nelem, nelem - chunk * chunk_nelem), group, _GROUP)
    if plane == 0:
        tl.store(_group_sizes(scratch_ptr, sizes_at, chunk, groups) + group, 0)
    if m > 0:
        plane_ptr = _work_of(scratch_ptr, work_at, chunk, groups, group, ITEM)
        plane_ptr += plane * _PLANE_NBYTES
        counts = tl.zeros([256], tl.int32)
        for t in range(_GROUP_TILES):
            there = tl.arange(0, 256) * 0 + m > t * TILE
            at = words_at(plane_ptr, COUNTS_AT) + t * 256 + tl.arange(0, 256)
            counts += tl.load(at, mask=there, other=0)
        if L.cut >= ITEM:
            find_table(counts, plane_ptr, L.low, L.ptx)
        else:
            if plane < L.cut:
                find_table(counts, plane_ptr, L.low, L.ptx)
            else:
                find_table(counts, plane_ptr, L.high, L.ptx)


@triton.jit
def _group_sizes(scratch_ptr, sizes_at, chunk, groups):
    """Sizes of the groups of a chunk, in steps."""
    return (scratch_ptr + sizes_at * 128).to(tl.pointer_type(tl.int32)) + chunk * groups


@triton.jit
def _tile_sizes(scratch_ptr, sizes_at, chunk, chunks_groups, groups):
    """Those of its tiles; `chunks_groups` groups are in all chunks."""
    sizes = (scratch_ptr + sizes_at * 128).to(tl.pointer_type(tl.int32)) + chunks_groups
    return sizes + chunk * groups * _GROUP_TILES


@kernel
def _measure_kernel(
    x_ptr,
    scratch_ptr,
    nelem: tl.int64,
    chunk_nelem: tl.int64,
    tiles: tl.int32,
    groups: tl.int32,
    work_at: tl.int64,
    sizes_at: tl.int64,
    all_groups: tl.int64,
    L: tl.constexpr,
    COLUMNS: tl.constexpr,
    member=None,
):
    """Bytes of a tile, in steps."""
    ITEM: tl.constexpr = L.item
    chunk = (program(member) // tiles).to(tl.int64)
    tile = program(member) % tiles
    group, t = tile // _GROUP_TILES, tile % _GROUP_TILES
    first = chunk * chunk_nelem
    begin, m = _part_of(tl.minimum(chunk_nelem, nelem - first), tile, TILE)
    work_ptr = _work_of(scratch_ptr, work_at, chunk, groups, group, ITEM)
    if m > 0:
        x = _from(x_ptr, first + begin, L)
        total = m * 0
        if (m == TILE) & L.aligned:
            total = measure_tile(x, m, work_ptr, t, True, COLUMNS, L)
        else:
            total = measure_tile(x, m, work_ptr, t, False, COLUMNS, L)
        total = (total + (_STEP - 1)) // _STEP
        tl.store(_tile_sizes(scratch_ptr, sizes_at, chunk, all_groups, groups) + tile, total)
        of_groups = _group_sizes(scratch_ptr, sizes_at, chunk, groups)
        tl.atomic_add(of_groups + group, total, sem="relaxed")


@kernel
def _pack_kernel(
    x_ptr,
    out_ptr,
    scratch_ptr,
    nelem: tl.int64,
    chunk_nelem: tl.int64,
    tiles: tl.int32,
    groups: tl.int32,
    work_at: tl.int64,
    sizes_at: tl.int64,
    all_groups: tl.int64,
    head: tl.int32,
    static_at: tl.int64,
    static_stride: tl.int64,
    dynamic_at: tl.int64,
    dynamic_stride: tl.int64,
    L: tl.constexpr,
    member=None,
):
    """Write a tile and its share of the index, or of the raw bytes; once, the record."""
    ITEM: tl.constexpr = L.item
    chunk = (program(member) // tiles).to(tl.int64)
    tile = program(member) % tiles
    g = (head, static_at, static_stride, dynamic_at, dynamic_stride)
    first, n, static_ptr, dynamic_ptr, record_ptr = chunk_at(out_ptr, chunk, nelem, chunk_nelem, g)
    begin, m = _part_of(n, tile, TILE)
    if m > 0:
        stride = static_stride * 128
        group, t = tile // _GROUP_TILES, tile % _GROUP_TILES
        sizes = _group_sizes(scratch_ptr, sizes_at, chunk, groups)
        used = ((n + (_GROUP - 1)) // _GROUP).to(tl.int32)
        of_all = tl.zeros([128], tl.int64)
        of_earlier = tl.zeros([128], tl.int64)
        for at in range(0, used, 128):
            i = at + tl.arange(0, 128)
            size = tl.load(sizes + i, mask=i < used, other=0).to(tl.int64)
            of_all += size
            of_earlier += tl.where(i < group, size, 0)
        i = tl.arange(0, _GROUP_TILES)
        sizes = _tile_sizes(scratch_ptr, sizes_at, chunk, all_groups, groups)
        size = tl.load(sizes + group * _GROUP_TILES + i, mask=i < t, other=0)
        before = tl.sum(of_earlier, 0) + tl.sum(size, 0)
        nbytes = (tl.sum(of_all, 0) + 1) * _STEP
        raw_dynamic = tl.maximum(n * ITEM - stride, 0)
        shrinks = nbytes <= raw_dynamic
        dynamic_nbytes = tl.minimum(nbytes, raw_dynamic)
        fits = dynamic_nbytes <= dynamic_stride * 128
        if tile == 0:
            write_record(record_ptr, chunk, dynamic_nbytes, fits, shrinks, L.sums)
        x = _from(x_ptr, first + begin, L)
        if fits & (shrinks == 0):
            store_raw(x, begin, m, static_ptr, stride, dynamic_ptr, ITEM)
            clear(static_ptr, n * ITEM, stride, tile, tiles)
        if fits & shrinks:
            tl.store(static_ptr.to(tl.pointer_type(tl.uint32)) + tile, before.to(tl.uint32))
            coded_ptr = static_ptr + 4 * ((n + (TILE - 1)) // TILE) + group
            work_ptr = _work_of(scratch_ptr, work_at, chunk, groups, group, ITEM)
            tile_ptr = dynamic_ptr + before * _STEP
            memory = table_memory(PACKING, L.ptx)
            if (m == TILE) & L.aligned:
                write_tile(x, m, t, work_ptr, tile_ptr, coded_ptr, memory, True, L)
            else:
                write_tile(x, m, t, work_ptr, tile_ptr, coded_ptr, memory, False, L)
            if begin + TILE >= n:
                end_ptr = dynamic_ptr + (nbytes - _STEP)
                tl.store(end_ptr.to(tl.pointer_type(tl.int64)), n * 0)


@kernel
def _decode_kernel(
    src_ptr,
    out_ptr,
    scratch_ptr,
    sums_ptr,
    status_ptr,
    starts_ptr,
    start: tl.int64,
    stop: tl.int64,
    first_group: tl.int64,
    nelem: tl.int64,
    chunk_nelem: tl.int64,
    groups: tl.int32,
    work_at: tl.int64,
    head: tl.int32,
    static_at: tl.int64,
    static_stride: tl.int64,
    dynamic_at: tl.int64,
    dynamic_stride: tl.int64,
    slot: tl.int64,
    L: tl.constexpr,
    member=None,
):
    """A group's share of elements `start` to `stop`, and of the checksum."""
    ITEM: tl.constexpr = L.item
    lin = first_group + program(member)
    chunk, group = (lin // groups).to(tl.int64), (lin % groups).to(tl.int32)
    g = (head, static_at, static_stride, dynamic_at, dynamic_stride)
    first, n, static_ptr, dynamic_ptr, record_ptr = chunk_at(src_ptr, chunk, nelem, chunk_nelem, g)
    if L.packed:
        dynamic_ptr = src_ptr + tl.load(starts_ptr + chunk) // 128 * 128
    stride = static_stride * 128
    begin, m = _part_of(n, group, _GROUP)
    lo = tl.maximum(start - first - begin, 0).to(tl.int32)
    hi = tl.minimum(stop - first - begin, m.to(tl.int64)).to(tl.int32)
    if lo < hi:
        nbytes, is_raw = claims(record_ptr, n, stride, slot, ITEM)
        of_chunk = ((n + (TILE - 1)) // TILE).to(tl.int32)
        out = _from(out_ptr, first + begin - start, L)
        if is_raw:
            # fmt: off
            load_raw(
                static_ptr, dynamic_ptr, stride, nbytes, n, begin, m, out, lo, hi, ITEM, L.store,
                _RAW // ITEM,
            )
            # fmt: on
        else:
            work_ptr = _work_of(scratch_ptr, work_at, chunk, groups, group, ITEM)
            memory = table_memory(DECODING, L.ptx)
            edge = (L.aligned == 0) | (m % RUN != 0) | (lo % RUN != 0) | (hi % RUN != 0)
            # fmt: off
            if edge:
                bad = decode_group(
                    static_ptr, dynamic_ptr, of_chunk, nbytes, group, m, lo, hi, work_ptr, out,
                    memory, True, L,
                )
            else:
                bad = decode_group(
                    static_ptr, dynamic_ptr, of_chunk, nbytes, group, m, lo, hi, work_ptr, out,
                    memory, False, L,
                )
            # fmt: on
            if bad:
                report(status_ptr, CHUNK + (chunk << 8) + CHUNK_PAYLOAD)
        if L.sums:
            parts = (of_chunk + (TILES - 1)) // TILES
            total = share(static_ptr, stride, n * 0, group, parts, _SUMMED)
            total += share(dynamic_ptr, nbytes, stride // 4, group, parts, _SUMMED)
            tl.atomic_add(sums_ptr + chunk, total.to(tl.int64, bitcast=True), sem="relaxed")


@functools.cache
def launch_of(dtype: DType, **values: bool) -> Launch:
    """The `Launch` of a dtype, with more `values`."""
    planes = planes_of(dtype)
    low, high = planes.units[0], planes.units[-1]
    cut = planes.units.index(high) if low != high else len(planes.units)
    return Launch(dtype.itemsize, bool(planes.rotation), low, high, cut, ptx=PTX, **values)


@functools.cache
def _variant(which, dtype: DType, warps: int, **values: bool) -> Variant:
    # Shared memory allows 12 decoders of a tile on a multiprocessor, and so do registers.
    registers = 168 if warps == 1 else None
    return Variant(which, options(warps, registers), L=launch_of(dtype, **values))


@functools.cache
def _measuring(dtype: DType, warps: int, **values: bool) -> Variant:
    launch = launch_of(dtype, **values)
    return Variant(_measure_kernel, options(warps, 80), L=launch, COLUMNS=8 * warps)


@functools.cache
def _packing(dtype: DType, warps: int, **values: bool) -> Variant:
    registers = PACK_REGISTERS[dtype.itemsize] if warps == 1 else 128
    return Variant(_pack_kernel, options(warps, registers), L=launch_of(dtype, **values))


@functools.cache
def _decoder(dtype: DType, **values: bool) -> Variant:
    # Elements of two bytes are so many that four programs should fit on a multiprocessor.
    registers = 64 if dtype.itemsize <= 2 else 128
    chosen = options(LANES.value // (32 if CUDA else 64), registers)
    return Variant(_decode_kernel, chosen, L=launch_of(dtype, **values))


class _Launches:
    """What kernels take of a plan, put together once. Offsets are in units of 128 bytes."""

    def __init__(self, plan: Plan) -> None:
        chunks, planes = plan.chunks, plan.dtype.itemsize
        self.parts = Parts.of(plan)
        self.tiles = max(tile_count(plan.chunk_nelem), 1)
        self.groups = max(group_count(plan.chunk_nelem), 1)
        self.sums_nbytes = align(8 * chunks)
        self.work_at = self.sums_nbytes // 128
        self.sizes_at = self.work_at + self.groups * chunks * planes * WORK_NBYTES // 128


def _launches(plan: Plan) -> _Launches:
    found = plan.__dict__.get("_huffman_launches")
    if found is None:
        found = plan.__dict__["_huffman_launches"] = _Launches(plan)
    return found


def encode(plan: Plan, x, out, scratch, stats=None, key=None) -> None:
    """Encode the elements of `x` into `out`; see `tightwire.gpu` for the contract."""
    g, chunks, dtype = _launches(plan), plan.chunks, plan.dtype
    frame_of(plan).begin(out)
    if not plan.nelem:
        return
    chosen = {"aligned": aligned_for(plan, x)}
    tiles, all_groups = g.tiles * chunks, g.groups * chunks
    # Of few tiles each gets more warps.
    warps = 4 if tiles < FEW_TILES else 1
    places = g.tiles, g.groups, g.work_at
    counts = _variant(_counts_kernel, dtype, 4, **chosen)
    counts.launch(tiles, (x, scratch), *g.parts.sizes, *places)
    tables = _variant(_tables_kernel, dtype, 1)
    tables.launch(all_groups * dtype.itemsize, (scratch,), *g.parts.sizes, *places[1:], g.sizes_at)
    numbers = *g.parts.sizes, *places, g.sizes_at, all_groups
    measure = _measuring(dtype, 4 * warps, **chosen)
    measure.launch(tiles, (x, scratch), *numbers)
    pack = _packing(dtype, warps, sums=plan.checksum, **chosen)
    pack.launch(tiles, (x, out, scratch), *numbers, *g.parts.places)
    if plan.checksum:
        add_sums(plan, g.parts, out, g.tiles)


def decode(plan: Plan, src, out, scratch, status, **options) -> None:
    """Decode a selection of elements into `out`; see `tightwire.gpu` for the contract."""
    g, dtype, chosen = _launches(plan), plan.dtype, Selection.of(plan, options)
    start, stop, starts = chosen.start, chosen.stop, chosen.dynamic_starts
    packed = starts is not None
    sums = chosen.check and plan.checksum and start < stop
    target = src if out is None else out
    if chosen.add:
        # Planes are put together in memory, so sums take a pass of their own.
        target = torch.empty(stop - start, dtype=getattr(torch, dtype.name), device=out.device)
    if sums:
        zero(scratch[: g.sums_nbytes])
    if starts is None:
        starts = status
    # Of packed buffers the elements' own size is the limit.
    slot = plan.raw_dynamic(0) if packed else plan.dynamic_stride
    if start < stop:
        # fmt: off
        decoder = _decoder(
            dtype, aligned=aligned_for(plan, target, start), packed=packed, store=chosen.store,
            sums=sums,
        )
        # fmt: on
        size = plan.chunk_nelem
        first, last = (i // size * g.groups + i % size // GROUP for i in (start, stop - 1))
        numbers = *g.parts.sizes, g.groups, g.work_at, *g.parts.places, slot
        tensors = src, target, scratch, scratch, status, starts
        decoder.launch(last - first + 1, tensors, start, stop, first, *numbers)
    check(plan, g.parts, chosen, src, scratch, status, slot)
    if chosen.add:
        values = out.view(dtype=out.dtype).reshape(-1)
        values.copy_(values.float() + target.float())


encode_many, decode_many = merged_functions(encode, decode)


def sum(plan: Plan, places: Places, out, *, planned=True, **terms) -> None:
    """Add up buffers; see `tightwire.gpu_many` for the contract.

    Elements are put together in memory, plane by plane: so all buffers are decoded before.
    """
    number, item = places.number, plan.dtype.itemsize
    nbytes = align(plan.nelem * item)
    memory = torch.empty(max(number * nbytes, 1), dtype=torch.uint8, device=out.device)
    kind = getattr(torch, plan.dtype.name)
    decoded = [memory[k * nbytes :][: plan.nelem * item].view(kind) for k in range(number)]
    srcs, statuses = places.kept[:number], places.kept[number:]
    decode_many([plan] * number, srcs, decoded, statuses, [planned] * number)
    launch_sum(read_elements, plan, places, out, memory, nbytes, **terms)
