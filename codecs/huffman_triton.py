# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment,misc"
"""huffman on a GPU: a program a tile, a lane a run. specs/huffman.md.

Encoding: tables of groups from samples; how long runs and tiles are; then all tiles know their
places, and are written, or the chunk is stored raw; checksums. Decoding: entries of tables; tiles;
checks.
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
from .common.frame_triton import CHUNK, CHUNK_PAYLOAD, clear, frame_of, report
from .common.huffman import WORK_NBYTES
from .common.huffman_encode_triton import count_bytes, measure_tile, write_tile
from .common.huffman_tables_triton import (
    COUNTS_AT,
    DECODER,
    DECODING,
    TABLE_NBYTES,
    find_table,
    load_words,
    read_table,
    table_memory,
    wide,
    words_at,
)
from .common.huffman_triton import (
    AT_ONCE,
    NARROW,
    RUN,
    RUNS,
    STORED,
    TILE,
    block_of,
    next_bytes,
    open_block,
    open_runs,
    padded,
)
from .common.launch_triton import PTX, Variant, kernel, options
from .common.minifloat_triton import aligned_for
from .common.plans_triton import Selection
from .huffman import GROUP, GROUP_TILES, STEP, group_count, planes_of, tile_count

_GROUP, _GROUP_TILES, _STEP = tl.constexpr(GROUP), tl.constexpr(GROUP_TILES), tl.constexpr(STEP)
#: Work memory of a plane of a group, in bytes: what `find_table` and `measure_tile` write. Or what
#: `read_table` writes, of which the last word is unused: there it says if the table is right.
_PLANE_NBYTES = tl.constexpr(WORK_NBYTES)
_GOOD_AT = tl.constexpr(WORK_NBYTES - 8)
#: Calls of fewer tiles leave multiprocessors idle with a warp each.
FEW_TILES = 528
#: Most registers of a thread that writes a tile, by bytes of an element.
PACK_REGISTERS = {1: 96, 2: 96, 4: 128, 8: 168}
#: Tiles have fewer bytes.
_LARGE = tl.constexpr(1 << 20)


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
):
    """Counts of the bytes of a tile, or of its part of a group's sample."""
    ITEM: tl.constexpr = L.item
    chunk = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
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
):
    """The table of a plane of a group."""
    ITEM: tl.constexpr = L.item
    plane = tl.program_id(0) % ITEM
    group = (tl.program_id(0) // ITEM) % groups
    chunk = (tl.program_id(0) // ITEM // groups).to(tl.int64)
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
):
    """Bytes of a tile, in steps."""
    ITEM: tl.constexpr = L.item
    chunk = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
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
):
    """Write a tile and its share of the index, or of the raw bytes; once, the record."""
    ITEM: tl.constexpr = L.item
    chunk = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
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
            if (m == TILE) & L.aligned:
                write_tile(x, m, t, work_ptr, tile_ptr, coded_ptr, True, L)
            else:
                write_tile(x, m, t, work_ptr, tile_ptr, coded_ptr, False, L)
            if begin + TILE >= n:
                end_ptr = dynamic_ptr + (nbytes - _STEP)
                tl.store(end_ptr.to(tl.pointer_type(tl.int64)), n * 0)


@kernel
def _read_kernel(
    src_ptr,
    scratch_ptr,
    status_ptr,
    starts_ptr,
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
):
    """A decoder's entries of a table of a group; whether it is right is said behind them."""
    ITEM: tl.constexpr = L.item
    k = tl.program_id(0) % ITEM
    lin = first_group + tl.program_id(0) // ITEM
    chunk, group = (lin // groups).to(tl.int64), (lin % groups).to(tl.int32)
    g = (head, static_at, static_stride, dynamic_at, dynamic_stride)
    _, n, static_ptr, dynamic_ptr, record_ptr = chunk_at(src_ptr, chunk, nelem, chunk_nelem, g)
    if L.packed:
        dynamic_ptr = src_ptr + tl.load(starts_ptr + chunk)
    nbytes, is_raw = claims(record_ptr, n, static_stride * 128, slot, ITEM)
    if (group.to(tl.int64) * _GROUP < n) & (is_raw == 0):
        of_chunk = (n + (TILE - 1)) // TILE
        coded = tl.load(static_ptr + 4 * of_chunk + group).to(tl.int32)
        bad = (coded >> ITEM) != 0
        if ((coded >> k) & 1) != 0:
            offsets = static_ptr.to(tl.pointer_type(tl.uint32))
            at = tl.load(offsets + group * _GROUP_TILES).to(tl.int64) * _STEP
            for j in range(0, k):
                at += ((coded >> j) & 1) * TABLE_NBYTES
            plane_ptr = _work_of(scratch_ptr, work_at, chunk, groups, group, ITEM)
            plane_ptr += k * _PLANE_NBYTES
            there = at + TABLE_NBYTES <= nbytes - _STEP
            if there:
                if L.cut >= ITEM:
                    bad = bad | read_table(dynamic_ptr + at, plane_ptr, L.low, L.ptx)
                else:
                    if k < L.cut:
                        bad = bad | read_table(dynamic_ptr + at, plane_ptr, L.low, L.ptx)
                    else:
                        bad = bad | read_table(dynamic_ptr + at, plane_ptr, L.high, L.ptx)
            bad = bad | (there == 0)
            tl.store(words_at(plane_ptr, _GOOD_AT), tl.where(bad, 0, 1))
        if bad:
            report(status_ptr, CHUNK + (chunk << 8) + CHUNK_PAYLOAD)


@triton.jit
def _load_bytes(ptr, i, m, full):
    """Bytes `i` of a plane of a tile that is stored."""
    if full:
        byte = tl.load(ptr + i)
    else:
        byte = tl.load(ptr + i, mask=i < m, other=0)
    return byte


@triton.jit
def _store_block(v, out, i, m, lo, hi, full, done, stored_ptr, coded, L: tl.constexpr):
    """Put what bytes of a plane are in elements, `v`, into these, with those that are not coded or,
    if that is `done`, with what is in `out`.
    """
    ITEM: tl.constexpr = L.item
    if done:
        if full:
            v |= wide(tl.load(out + i), ITEM)
        else:
            v |= wide(tl.load(out + i, mask=(i >= lo) & (i < hi), other=0), ITEM)
    else:
        others = v * 0
        at = m * 0
        for k in tl.static_range(ITEM):
            if ((coded >> k) & 1) == 0:
                byte = _load_bytes(stored_ptr + at // 8 * 8, i, m, full)
                others |= wide(byte, ITEM) << (8 * k)
                at += padded(m, _STEP)
        if L.rotated:
            others = (others >> 1) | ((others & 1) << (8 * ITEM - 1))
        v |= others
    found = v.to(out.dtype.element_ty)
    if full:
        tl.store(out + i, found)
    else:
        tl.store(out + i, found, mask=(i >= lo) & (i < hi))


@triton.jit
def _placed(byte, k, L: tl.constexpr):
    """What byte `k` of a rotated element is in the element."""
    v = wide(byte, L.item) << (k * 8)
    if L.rotated:
        v = (v >> 1) | ((v & 1) << (8 * L.item - 1))
    return v


@triton.jit
def _decode_plane(
    data_ptr, at, size, m, stored_ptr, coded, done, memory, table_ptr, plane_ptr, out, lo, hi, k,
    UNIT: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """Decode the block at byte `at` of a tile into elements `out`; (its end, whether it is wrong).

    The first plane takes those that are not coded along, the others find what is `done`.
    """
    mode, value, bit, ends, end, bad = open_block(data_ptr, at, size, m)
    if bad == 0:
        full = (lo == 0) & (hi == TILE) & L.aligned
        if mode >= NARROW:
            table = load_words(words_at(plane_ptr, 0), memory, DECODER, L.ptx)
            words = data_ptr.to(tl.pointer_type(tl.uint32))
            last = size // 4 - 1
            units = tl.minimum(tl.maximum(m - tl.arange(0, RUNS) * RUN, 0), RUN)
            units = (units + (UNIT - 1)) // UNIT
            s = open_runs(words, bit, last, units > 0, UNIT)
            for begin in range(0, tl.minimum(m, RUN), AT_ONCE):
                byte, s = next_bytes(
                    s, words, last, units, begin // UNIT, table, table_ptr, UNIT, L.ptx
                )
                if L.store:
                    i = block_of(begin)
                    v = _placed(byte, k, L)
                    _store_block(v, out, i, m, lo, hi, full, done, stored_ptr, coded, L)
            # Bits count from the word in which a run starts, with units of 8 bytes from the first.
            first = bit if UNIT == 8 else bit & 31
            wrong = (units > 0) & (s[3] - first != ends - bit)
            bad = tl.max(wrong.to(tl.int32), 0) > 0
        elif L.store:
            for begin in range(0, tl.minimum(m, RUN), AT_ONCE):
                i = block_of(begin)
                byte = (i * 0 + value).to(tl.uint8)
                if mode == STORED:
                    byte = _load_bytes(data_ptr + (at // 4 * 4 + 4), i, m, full)
                v = _placed(byte, k, L)
                _store_block(v, out, i, m, lo, hi, full, done, stored_ptr, coded, L)
    return end, bad


@triton.jit
def _any_between(data_ptr, start, end):
    """Whether one of less than 8 bytes `start` to `end` is not zero."""
    i = start + tl.arange(0, 8)
    found = tl.load(data_ptr + i, mask=i < end, other=0)
    return tl.max(found.to(tl.int32), 0) > 0


@triton.jit
def _decode_tile(data_ptr, at, size, m, coded, tables_ptr, work_ptr, out, lo, hi, L: tl.constexpr):
    """Decode elements `lo` to `hi` of a tile of `size` bytes, of which the first `at` are tables;
    whether it is wrong.
    """
    ITEM: tl.constexpr = L.item
    memory = table_memory(DECODING, L.ptx)
    stored_ptr = data_ptr + at
    n_coded = coded * 0
    bad = at > size
    for k in range(ITEM):
        if ((coded >> k) & 1) == 0:
            end = at + padded(m, _STEP)
            bad = bad | (end > size)
            if bad == 0:
                bad = _any_between(data_ptr, at + m, end)
            at = end
        else:
            good = tl.load(words_at(work_ptr + k * _PLANE_NBYTES, _GOOD_AT))
            bad = bad | (good == 0)
    if bad == 0:
        if L.store:
            if coded == 0:
                full = (lo == 0) & (hi == TILE) & L.aligned
                for begin in range(0, tl.minimum(m, RUN), AT_ONCE):
                    i = block_of(begin)
                    v = wide(i * 0, ITEM)
                    _store_block(v, out, i, m, lo, hi, full, n_coded > 0, stored_ptr, coded, L)
        for k in range(ITEM):
            if (((coded >> k) & 1) != 0) & (bad == 0):
                plane_ptr = work_ptr + k * _PLANE_NBYTES
                table_ptr = tables_ptr + n_coded * TABLE_NBYTES
                done = n_coded > 0
                # What the plane before has written is read.
                tl.debug_barrier()
                # fmt: off
                if L.cut >= ITEM:
                    at, bad = _decode_plane(
                        data_ptr, at, size, m, stored_ptr, coded, done, memory, table_ptr,
                        plane_ptr, out, lo, hi, k, L.low, L,
                    )
                else:
                    if k < L.cut:
                        at, bad = _decode_plane(
                            data_ptr, at, size, m, stored_ptr, coded, done, memory, table_ptr,
                            plane_ptr, out, lo, hi, k, L.low, L,
                        )
                    else:
                        at, bad = _decode_plane(
                            data_ptr, at, size, m, stored_ptr, coded, done, memory, table_ptr,
                            plane_ptr, out, lo, hi, k, L.high, L,
                        )
                # fmt: on
                n_coded += 1
    if bad == 0:
        bad = _any_between(data_ptr, at, size) | (padded(at, _STEP) != size)
    return bad


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
    first_tile: tl.int64,
    nelem: tl.int64,
    chunk_nelem: tl.int64,
    tiles: tl.int32,
    groups: tl.int32,
    work_at: tl.int64,
    head: tl.int32,
    static_at: tl.int64,
    static_stride: tl.int64,
    dynamic_at: tl.int64,
    dynamic_stride: tl.int64,
    slot: tl.int64,
    L: tl.constexpr,
):
    """One tile of elements `start` to `stop`, and its share of the checksum."""
    ITEM: tl.constexpr = L.item
    lin = first_tile + tl.program_id(0)
    chunk, tile = (lin // tiles).to(tl.int64), (lin % tiles).to(tl.int32)
    g = (head, static_at, static_stride, dynamic_at, dynamic_stride)
    first, n, static_ptr, dynamic_ptr, record_ptr = chunk_at(src_ptr, chunk, nelem, chunk_nelem, g)
    if L.packed:
        dynamic_ptr = src_ptr + tl.load(starts_ptr + chunk) // 128 * 128
    stride = static_stride * 128
    begin, m = _part_of(n, tile, TILE)
    lo = tl.maximum(start - first - begin, 0).to(tl.int32)
    hi = tl.minimum(stop - first - begin, m.to(tl.int64)).to(tl.int32)
    if lo < hi:
        nbytes, is_raw = claims(record_ptr, n, stride, slot, ITEM)
        of_chunk = ((n + (TILE - 1)) // TILE).to(tl.int32)
        out = _from(out_ptr, first + begin - start, L)
        if is_raw:
            load_raw(
                static_ptr, dynamic_ptr, stride, nbytes, n, begin, m, out, lo, hi, ITEM, L.store
            )
        else:
            limit = nbytes - _STEP
            offsets = static_ptr.to(tl.pointer_type(tl.uint32)) + tile
            at = tl.load(offsets).to(tl.int64) * _STEP
            more = tile + 1 < of_chunk
            end = tl.load(offsets + 1, mask=more, other=0).to(tl.int64) * _STEP
            end = tl.where(more, end, limit)
            bad = (at > end) | (end > limit) | ((tile == 0) & (at != 0)) | (nbytes % _STEP != 0)
            bad = bad | (end - at > _LARGE)
            if bad == 0:
                guard = tl.load((dynamic_ptr + limit).to(tl.pointer_type(tl.int64)))
                group = tile // _GROUP_TILES
                coded = tl.load(static_ptr + 4 * of_chunk + group).to(tl.int32)
                bad = (guard != 0) | ((coded >> ITEM) != 0)
                if bad == 0:
                    work_ptr = _work_of(scratch_ptr, work_at, chunk, groups, group, ITEM)
                    group_ptr = static_ptr.to(tl.pointer_type(tl.uint32)) + group * _GROUP_TILES
                    tables_ptr = dynamic_ptr + tl.load(group_ptr).to(tl.int64) * _STEP
                    tables = coded * 0
                    if tile % _GROUP_TILES == 0:
                        for k in range(ITEM):
                            tables += ((coded >> k) & 1) * TABLE_NBYTES
                    size = (end - at).to(tl.int32)
                    # fmt: off
                    bad = _decode_tile(
                        dynamic_ptr + at, tables, size, m, coded, tables_ptr, work_ptr, out, lo,
                        hi, L,
                    )
                    # fmt: on
            if bad:
                report(status_ptr, CHUNK + (chunk << 8) + CHUNK_PAYLOAD)
        if L.sums:
            total = share(static_ptr, stride, n * 0, tile, of_chunk)
            total += share(dynamic_ptr, nbytes, stride // 4, tile, of_chunk)
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
        scratch[: g.sums_nbytes].zero_()
    if starts is None:
        starts = status
    # Of packed buffers the elements' own size is the limit.
    slot = plan.raw_dynamic(0) if packed else plan.dynamic_stride
    if start < stop:
        size, item = plan.chunk_nelem, dtype.itemsize
        first, last = (i // size * g.groups + i % size // GROUP for i in (start, stop - 1))
        read = _variant(_read_kernel, dtype, 4, packed=packed)
        numbers = *g.parts.sizes, g.groups, g.work_at, *g.parts.places, slot
        read.launch((last - first + 1) * item, (src, scratch, status, starts), first, *numbers)
        # fmt: off
        tiles = _variant(
            _decode_kernel, dtype, 1, aligned=aligned_for(plan, target, start), packed=packed,
            store=chosen.store, sums=sums,
        )
        # fmt: on
        first, last = (i // size * g.tiles + i % size // TILE.value for i in (start, stop - 1))
        numbers = *g.parts.sizes, g.tiles, g.groups, g.work_at, *g.parts.places, slot
        tensors = src, target, scratch, scratch, status, starts
        tiles.launch(last - first + 1, tensors, start, stop, first, *numbers)
    check(plan, g.parts, chosen, src, scratch, status, slot)
    if chosen.add:
        values = out.view(dtype=out.dtype).reshape(-1)
        values.copy_(values.float() + target.float())
