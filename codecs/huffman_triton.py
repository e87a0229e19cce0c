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
from .common.huffman_decode_triton import (
    DECODING,
    EDGE_WORDS,
    LANES,
    TILES,
    WORDS,
    any_between,
    any_of_tile,
    interleaved,
    next_words,
    of_lanes,
    of_tiles,
    one_of_tile,
    open_block,
    open_runs,
)
from .common.huffman_tables_triton import (
    ENCODER,
    ENCODING,
    ENTRIES_AT,
    FLAG_AT,
    TABLE_AT,
    TABLE_NBYTES,
    check_table,
    counts_of,
    fill_table,
    find_table,
    load_words,
    table_memory,
    wide,
    words_at,
)
from .common.huffman_triton import (
    CONSTANT,
    NARROW,
    RUN,
    RUNS,
    STORED,
    TILE,
    measure_block,
    padded,
    write_block,
    write_plane,
)
from .common.launch_triton import CUDA, PTX, Variant, kernel, options
from .common.minifloat_triton import aligned_for
from .common.plans_triton import Selection
from .huffman import GROUP, GROUP_TILES, STEP, group_count, planes_of, tile_count

_GROUP, _GROUP_TILES, _STEP = tl.constexpr(GROUP), tl.constexpr(GROUP_TILES), tl.constexpr(STEP)
#: Work memory of a plane of a group, in bytes: what `find_table` writes, then of its tiles sizes of
#: runs, heads and bytes of blocks. Or a decoder's entries, where they are not in shared memory.
_PLANE_NBYTES = tl.constexpr(WORK_NBYTES)
_SIZES_AT, _HEADS_AT, _NBYTES_AT = tl.constexpr(4096), tl.constexpr(5120), tl.constexpr(5152)
#: Tiles have fewer bytes.
_LARGE = tl.constexpr(1 << 20)
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
def _tables_kernel(
    x_ptr,
    scratch_ptr,
    nelem: tl.int64,
    chunk_nelem: tl.int64,
    groups: tl.int32,
    work_at: tl.int64,
    L: tl.constexpr,
):
    """The table of a plane of a group."""
    ITEM: tl.constexpr = L.item
    pid = tl.program_id(0)
    plane = pid % ITEM
    group = (pid // ITEM) % groups
    chunk = (pid // ITEM // groups).to(tl.int64)
    first = chunk * chunk_nelem
    begin, m = _part_of(tl.minimum(chunk_nelem, nelem - first), group, _GROUP)
    work_ptr = _work_of(scratch_ptr, work_at, chunk, groups, group, ITEM)
    if m > 0:
        counts = counts_of(_from(x_ptr, first + begin, L), m, plane, ITEM, L.rotated)
        plane_ptr = work_ptr + plane * _PLANE_NBYTES
        if L.cut >= ITEM:
            find_table(counts, plane_ptr, L.low, L.ptx)
        else:
            if plane < L.cut:
                find_table(counts, plane_ptr, L.low, L.ptx)
            else:
                find_table(counts, plane_ptr, L.high, L.ptx)


@triton.jit
def _measure_plane(x, m, full, plane_ptr, memory, t, k, UNIT: tl.constexpr, L: tl.constexpr):
    """Find what the block of a plane is, of tile `t` of its group; gives its bytes."""
    table = load_words(words_at(plane_ptr, ENTRIES_AT), memory, ENCODER, L.ptx)
    sizes, head, nbytes = measure_block(x, m, full, table, k, UNIT, L.item, L.rotated, L.ptx)
    tl.store(words_at(plane_ptr, _SIZES_AT) + t * RUNS + tl.arange(0, RUNS), sizes)
    tl.store(words_at(plane_ptr, _HEADS_AT) + t, head)
    tl.store(words_at(plane_ptr, _NBYTES_AT) + t, nbytes)
    return nbytes


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
    L: tl.constexpr,
):
    """Bytes of a tile, in steps."""
    ITEM: tl.constexpr = L.item
    chunk = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    group, t = tile // _GROUP_TILES, tile % _GROUP_TILES
    first = chunk * chunk_nelem
    begin, m = _part_of(tl.minimum(chunk_nelem, nelem - first), tile, TILE)
    work_ptr = _work_of(scratch_ptr, work_at, chunk, groups, group, ITEM)
    memory = table_memory(ENCODING, L.ptx)
    total = tile * 0
    if m > 0:
        x = _from(x_ptr, first + begin, L)
        full = (m == TILE) & L.aligned
        for k in range(ITEM):
            plane_ptr = work_ptr + k * _PLANE_NBYTES
            if tl.load(words_at(plane_ptr, FLAG_AT)) != 0:
                if t == 0:
                    total += TABLE_NBYTES
                if L.cut >= ITEM:
                    total += _measure_plane(x, m, full, plane_ptr, memory, t, k, L.low, L)
                else:
                    if k < L.cut:
                        total += _measure_plane(x, m, full, plane_ptr, memory, t, k, L.low, L)
                    else:
                        total += _measure_plane(x, m, full, plane_ptr, memory, t, k, L.high, L)
            else:
                total += padded(m, _STEP)
    sizes = (scratch_ptr + sizes_at * 128).to(tl.pointer_type(tl.int32))
    tl.store(sizes + chunk * tiles + tile, (total + (_STEP - 1)) // _STEP)


@triton.jit
def _write_plane(x, m, full, plane_ptr, memory, t, out_ptr, k, UNIT: tl.constexpr, L: tl.constexpr):
    """Write the block of a plane; gives its bytes."""
    table = load_words(words_at(plane_ptr, ENTRIES_AT), memory, ENCODER, L.ptx)
    sizes = tl.load(words_at(plane_ptr, _SIZES_AT) + t * RUNS + tl.arange(0, RUNS))
    head = tl.load(words_at(plane_ptr, _HEADS_AT) + t)
    nbytes = tl.load(words_at(plane_ptr, _NBYTES_AT) + t)
    # fmt: off
    write_block(
        x, m, full, table, sizes, head, nbytes, out_ptr, k, UNIT, L.item, L.rotated, L.ptx
    )
    # fmt: on
    return nbytes


@triton.jit
def _write_tile(x, m, t, work_ptr, out_ptr, coded_ptr, L: tl.constexpr):
    """Write tile `t` of a group; of the first one also the tables, and which planes are coded."""
    ITEM: tl.constexpr = L.item
    memory = table_memory(ENCODING, L.ptx)
    full = (m == TILE) & L.aligned
    coded = m * 0
    at = m * 0
    for k in range(ITEM):
        plane_ptr = work_ptr + k * _PLANE_NBYTES
        if tl.load(words_at(plane_ptr, FLAG_AT)) != 0:
            coded |= 1 << k
            if t == 0:
                c = tl.arange(0, 256)
                table = tl.load(plane_ptr + TABLE_AT + c, mask=c < TABLE_NBYTES, other=0)
                tl.store(out_ptr + at + c, table, mask=c < TABLE_NBYTES)
                at += TABLE_NBYTES
    if t == 0:
        tl.store(coded_ptr, coded.to(tl.uint8))
    for k in range(ITEM):
        if ((coded >> k) & 1) == 0:
            # Tables and planes are multiples of 8 bytes long, which else is lost in the loop.
            write_plane(x, m, full, padded(m, _STEP), out_ptr + at // 8 * 8, k, ITEM, L.rotated)
            at += padded(m, _STEP)
    for k in range(ITEM):
        if ((coded >> k) & 1) != 0:
            plane_ptr = work_ptr + k * _PLANE_NBYTES
            to = out_ptr + at // 4 * 4
            if L.cut >= ITEM:
                at += _write_plane(x, m, full, plane_ptr, memory, t, to, k, L.low, L)
            else:
                if k < L.cut:
                    at += _write_plane(x, m, full, plane_ptr, memory, t, to, k, L.low, L)
                else:
                    at += _write_plane(x, m, full, plane_ptr, memory, t, to, k, L.high, L)
    if at % _STEP != 0:
        tl.store((out_ptr + at).to(tl.pointer_type(tl.int32)), 0)


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
        sizes = (scratch_ptr + sizes_at * 128).to(tl.pointer_type(tl.int32)) + chunk * tiles
        of_all = tl.zeros([512], tl.int64)
        of_earlier = tl.zeros([512], tl.int64)
        for at in range(0, tiles, 512):
            i = at + tl.arange(0, 512)
            size = tl.load(sizes + i, mask=i < tiles, other=0).to(tl.int64)
            of_all += size
            of_earlier += tl.where(i < tile, size, 0)
        before = tl.sum(of_earlier, 0)
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
            group, t = tile // _GROUP_TILES, tile % _GROUP_TILES
            tl.store(static_ptr.to(tl.pointer_type(tl.uint32)) + tile, before.to(tl.uint32))
            coded_ptr = static_ptr + 4 * ((n + (TILE - 1)) // TILE) + group
            work_ptr = _work_of(scratch_ptr, work_at, chunk, groups, group, ITEM)
            _write_tile(x, m, t, work_ptr, dynamic_ptr + before * _STEP, coded_ptr, L)
            if begin + TILE >= n:
                end_ptr = dynamic_ptr + (nbytes - _STEP)
                tl.store(end_ptr.to(tl.pointer_type(tl.int64)), n * 0)


@triton.jit
def _placed(byte, k, L: tl.constexpr):
    """What byte `k` of a rotated element is in the element."""
    v = wide(byte, L.item) << (k * 8)
    if L.rotated:
        v = (v >> 1) | ((v & 1) << (8 * L.item - 1))
    return v


@triton.jit
def _fours_of(p0, p1, p2, p3, W: tl.constexpr, L: tl.constexpr):
    """Words of a byte each of four planes."""
    a, b = interleaved(p0, p1, L.ptx)
    c, d = interleaved(p2, p3, L.ptx)
    first, second = (a & 0xFFFF) | (c << 16), (a >> 16) | (c & 0xFFFF0000)
    third, fourth = (b & 0xFFFF) | (d << 16), (b >> 16) | (d & 0xFFFF0000)
    v = tl.join(tl.join(first, third), tl.join(second, fourth))
    return tl.reshape(v, [TILES, RUNS, 4 * W])


@triton.jit
def _elements_of(p, fixed, W: tl.constexpr, L: tl.constexpr):
    """Elements as words, of words of each plane, and of what their other bits are in each tile."""
    ITEM: tl.constexpr = L.item
    fixed = fixed[:, None, None]
    if ITEM == 1:
        v = p[0]
        if L.rotated:
            v = ((v >> 1) & 0x7F7F7F7F) | ((v << 7) & 0x80808080)
        return v | (fixed * 0x01010101)
    elif ITEM == 2:
        a, b = interleaved(p[0], p[1], L.ptx)
        v = tl.reshape(tl.join(a, b), [TILES, RUNS, 2 * W])
        if L.rotated:
            v = ((v >> 1) & 0x7FFF7FFF) | ((v << 15) & 0x80008000)
        return v | (fixed * 0x00010001)
    else:
        low = _fours_of(p[0], p[1], p[2], p[3], W, L)
        if ITEM == 4:
            if L.rotated:
                low = (low >> 1) | (low << 31)
            return low | fixed
        else:
            high = _fours_of(p[4], p[5], p[6], p[7], W, L)
            if L.rotated:
                low, high = (low >> 1) | (high << 31), (high >> 1) | (low << 31)
            low |= (fixed & 0xFFFFFFFF).to(tl.uint32)
            high |= (fixed >> 32).to(tl.uint32)
            return tl.reshape(tl.join(low, high), [TILES, RUNS, 8 * W])


@triton.jit
def _put(v, out, begin, rows, lo, hi, done, W: tl.constexpr, EDGE: tl.constexpr, L: tl.constexpr):
    """Write the words `v` of elements number `begin` and on of lanes' runs.

    Runs `rows` of a group are written, with EDGE those of their elements from `lo` to `hi`; what is
    in memory from another plane stays if that is `done`.
    """
    ITEM: tl.constexpr = L.item
    COUNT: tl.constexpr = W * ITEM
    t, run = tl.arange(0, TILES)[:, None, None], tl.arange(0, RUNS)[None, :, None]
    if EDGE:
        PER: tl.constexpr = 4 // ITEM if ITEM < 4 else 1
        if ITEM == 8:
            low, high = tl.split(tl.reshape(v, [TILES, RUNS, COUNT // 2, 2]))
            v = low.to(tl.uint64) | (high.to(tl.uint64) << 32)
        elif ITEM < 4:
            shifts = (tl.arange(0, PER) * (8 * ITEM))[None, None, None, :]
            v = tl.reshape(v[:, :, :, None] >> shifts, [TILES, RUNS, COUNT * PER])
        i = t * TILE + run * RUN + (tl.arange(0, 4 * W) + begin)[None, None, :]
        use = rows[:, :, None] & (i >= lo) & (i < hi)
        if done:
            v |= tl.load(out + i, mask=use, other=0).to(v.dtype)
        tl.store(out + i, v.to(out.dtype.element_ty), mask=use)
    else:
        words = out.to(tl.pointer_type(tl.uint32)) + begin // 4 * ITEM
        i = t * (TILE // 4 * ITEM) + run * (RUN // 4 * ITEM) + tl.arange(0, COUNT)[None, None, :]
        use = rows[:, :, None]
        if done:
            v |= tl.load(words + i, mask=use, other=0)
        tl.store(words + i, v, mask=use)


@triton.jit
def _words_at(ptr, begin, m, use, W: tl.constexpr, EDGE: tl.constexpr):
    """The words of a stored plane from byte `begin` of runs on, zeros where not in `use`, and with
    EDGE behind the `m` bytes of a tile. Behind runs their first words are taken.
    """
    at, c = tl.arange(0, RUNS) * RUN, tl.arange(0, W)
    words = ptr.to(tl.pointer_type(tl.uint32))[:, None, None]
    there = use[:, :, None]
    if EDGE:
        place = at[:, None] + (4 * c + begin)[None, :]
        there = there & (place[None, :, :] < m[:, None, None])
        there = there & (4 * c + begin < RUN)[None, None, :]
    # No line of them is needed again: lines of codes are to stay.
    return tl.load(
        words + (begin % RUN // 4 + at[:, None] // 4 + c[None, :])[None, :, :],
        mask=there,
        other=0,
        cache_modifier=".cg",
    )


@triton.jit
def _others_at(
    tile, plane, begin, coded, done, W: tl.constexpr, EDGE: tl.constexpr, L: tl.constexpr
):
    """The words of the planes but number `plane`, from byte `begin` of runs on, zeros of such as
    are coded or, with a plane before, `done`.
    """
    stored_ptr, m, rows, _, _, _ = tile
    found = ()
    OTHERS: tl.constexpr = L.item - 1
    nbytes = padded(m, _STEP)
    for j in tl.static_range(OTHERS):
        k = tl.where(plane <= j, j + 1, j)
        # Bits of planes before number k that are stored.
        before = ~coded & ((1 << k) - 1)
        at = nbytes * 0
        for i in tl.static_range(OTHERS):
            at += ((before >> i) & 1) * nbytes
        here = ((coded >> k) & 1) + done == 0
        use = rows & (tl.arange(0, RUNS)[None, :] >= tl.where(here, 0, RUNS))
        found = found + (_words_at(stored_ptr + at, begin, nbytes, use, W, EDGE),)
    return found


@triton.jit
def _decode_planes(
    tile, out, plane, source, s, words, last, use, fixed, done, coded, table, table_ptr,
    MODE: tl.constexpr, UNIT: tl.constexpr, EDGE: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """Put plane number `plane` into elements, and if none is `done` those that are not coded.

    Where `use` says that a tile's are of that MODE, the bytes are runs of codes, or stored from
    `source` on; else they are zero. `fixed` is what other planes are. Gives the state behind runs.
    """
    _, m, rows, lo, hi, stop = tile
    ITEM: tl.constexpr = L.item
    W: tl.constexpr = EDGE_WORDS if EDGE else WORDS
    run = tl.arange(0, LANES) % RUNS
    count = tl.minimum(tl.maximum(of_lanes(m) - run * RUN, 0), RUN)
    if L.store:
        others = _others_at(tile, plane, stop * 0, coded, done, W, EDGE, L)
    for number in range(0, stop, 4 * W):
        # What the interpreter counts with is no tensor.
        begin = stop * 0 + number
        if MODE == STORED:
            found = _words_at(source, begin, m, of_tiles(use), W, EDGE)
        else:
            found, s = next_words(
                s, words, last, begin, count, use, table, table_ptr, W, UNIT, EDGE, L.ptx
            )
        if L.store:
            # Loaded long before they are needed. That this is behind look-ups also lets Triton keep
            # words where they are loaded, and move those that are decoded there.
            following = _others_at(tile, plane, begin + 4 * W, coded, done, W, EDGE, L)
            merged = (tl.where(plane == 0, found, others[0]) if ITEM > 1 else found,)
            for k in tl.static_range(1, ITEM):
                v = tl.where(plane == k, found, others[k - 1])
                if k < ITEM - 1:
                    v = tl.where(plane > k, others[k], v)
                merged = merged + (v,)
            _put(_elements_of(merged, fixed, W, L), out, begin, rows, lo, hi, done, W, EDGE, L)
            others = following
    return s


@triton.jit
def _decode_runs(
    tile, out, k, data, size, bit, bits, use, fixed, done, coded, memory, codes, table_ptr,
    plane_ptr, edge, UNIT: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """Decode runs, where `use`, of plane `k`; whether they do not end where they should."""
    table = memory
    if not L.ptx:
        table = words_at(plane_ptr, 0)
    lengths, of_escape = codes
    # Behind it threads see what others have written of the plane before.
    fill_table(lengths, of_escape, table_ptr, table, UNIT, L.ptx)
    s, words, last = open_runs(data, bit, size, use, table, UNIT, L.ptx)
    first = s[3]
    # fmt: off
    if edge:
        s = _decode_planes(
            tile, out, k, 0, s, words, last, use, fixed, done, coded, table, table_ptr, NARROW,
            UNIT, True, L,
        )
    else:
        s = _decode_planes(
            tile, out, k, 0, s, words, last, use, fixed, done, coded, table, table_ptr, NARROW,
            UNIT, False, L,
        )
    # fmt: on
    return any_of_tile(use & (s[3] - first != bits))


@triton.jit
def _any(found):
    """Whether a lane, or tile, has found something."""
    return tl.max(found.to(tl.int32), 0) > 0


@triton.jit
def _decode_tiles(
    dynamic_ptr, data_at, at, size, n, lo, hi, coded, tables_ptr, work_ptr, out, good,
    L: tl.constexpr,
):  # fmt: skip
    """Decode elements `lo` to `hi` of a group of `n`, of the tiles that are `good`.

    These have `size` bytes from `data_at` of the payload on, of which the first `at` are tables.
    Gives the tiles that are good after all.
    """
    ITEM: tl.constexpr = L.item
    memory = table_memory(DECODING, L.ptx)
    run = tl.arange(0, LANES) % RUNS
    first = tl.arange(0, LANES) // RUNS * TILE
    m = tl.minimum(tl.maximum(n - first, 0), TILE)
    data = dynamic_ptr + data_at // _STEP * _STEP
    stored_at = one_of_tile(data_at + at)
    for k in range(ITEM):
        if ((coded >> k) & 1) == 0:
            end = at + padded(m, _STEP)
            good = good & (end <= size)
            good = good & (any_between(data, at + m, end, good) == 0)
            at = end
    first += run * RUN
    edge = (L.aligned == 0) | (n % RUN != 0) | (lo % RUN != 0) | (hi % RUN != 0)
    rows = (first < hi) & (first + RUN > lo)
    of_tile = tl.minimum(tl.maximum(n - tl.arange(0, TILES) * TILE, 0), TILE)
    fixed = wide(of_tile * 0, ITEM)
    n_coded, done = coded * 0, coded * 0
    for k in range(ITEM + 1):
        stored_ptr = dynamic_ptr + stored_at // _STEP * _STEP
        is_coded = ((coded >> k) & 1) != 0
        if is_coded:
            table_ptr = tables_ptr + n_coded * TABLE_NBYTES
            n_coded += 1
            lengths, of_escape, bad = check_table(table_ptr)
            good = good & (m * 0 + bad == 0)
            mode, value, bit, ends, end, bad = open_block(data, at, size, m, good)
            good = good & (bad == 0)
            value = tl.where(good & (mode == CONSTANT), value, 0)
            fixed |= _placed(one_of_tile(value), k, L)
            use = good & (mode >= NARROW) & (run * RUN < m)
            source_at = one_of_tile(data_at + at + 4)
            stored = good & (mode == STORED)
            at = end
            if _any(use):
                bits = ends - bit
                plane_ptr = work_ptr + k * _PLANE_NBYTES
                plane = coded * 0 + k
                codes = lengths, of_escape
                tile = stored_ptr, of_tile, of_tiles(rows & good), lo, hi, tl.minimum(n, RUN)
                # fmt: off
                if L.cut >= ITEM:
                    bad = _decode_runs(
                        tile, out, plane, data, size, bit, bits, use, fixed, done, coded,
                        memory, codes, table_ptr, plane_ptr, edge, L.low, L,
                    )
                else:
                    if k < L.cut:
                        bad = _decode_runs(
                            tile, out, plane, data, size, bit, bits, use, fixed, done, coded,
                            memory, codes, table_ptr, plane_ptr, edge, L.low, L,
                        )
                    else:
                        bad = _decode_runs(
                            tile, out, plane, data, size, bit, bits, use, fixed, done, coded,
                            memory, codes, table_ptr, plane_ptr, edge, L.high, L,
                        )
                # fmt: on
                good = good & (bad == 0)
                fixed = fixed * 0
                done = done * 0 + 1
        else:
            # At the end planes that are not coded may be left, the first of them with the others.
            left = (k == ITEM) & ((done == 0) | _any(fixed != 0))
            source_at = stored_at
            stored = good & (first * 0 + left != 0) & (first * 0 + (coded & 1) + done == 0)
        left = (k == ITEM) & ((done == 0) | _any(fixed != 0))
        if L.store:
            if _any(stored) | left:
                tile = stored_ptr, of_tile, of_tiles(rows & good), lo, hi, tl.minimum(n, RUN)
                source = dynamic_ptr + source_at // 4 * 4
                plane = (1 - left.to(tl.int32)) * k
                s = (run, run, run, run)
                tl.debug_barrier()
                # fmt: off
                if edge:
                    _decode_planes(
                        tile, out, plane, source, s, 0, 0, stored, fixed, done, coded, 0, 0,
                        STORED, 1, True, L,
                    )
                else:
                    _decode_planes(
                        tile, out, plane, source, s, 0, 0, stored, fixed, done, coded, 0, 0,
                        STORED, 1, False, L,
                    )
                # fmt: on
                fixed = fixed * 0
                done = done * 0 + 1
    good = good & (padded(at, _STEP) == size)
    return good & (any_between(data, at, size, good) == 0)


@triton.jit
def _decode_group(
    static_ptr, dynamic_ptr, of_chunk, nbytes, group, n, lo, hi, work_ptr, out, L: tl.constexpr
):
    """Decode elements `lo` to `hi` of a group of `n`, from a chunk with so many tiles and bytes of
    payload; whether what they are read from is wrong.
    """
    limit = nbytes - _STEP
    offsets = static_ptr.to(tl.pointer_type(tl.uint32)) + group * TILES
    coded = tl.load(static_ptr + 4 * of_chunk + group).to(tl.int32)
    tables = coded * 0
    for k in range(L.item):
        tables += ((coded >> k) & 1) * TABLE_NBYTES
    tables_at = tl.load(offsets).to(tl.int64) * _STEP
    right = (nbytes % _STEP == 0) & (tables_at + tables <= limit) & ((coded >> L.item) == 0)
    bad = right == 0
    if right:
        guard = tl.load((dynamic_ptr + limit).to(tl.pointer_type(tl.int64)))
        # Tiles, as every lane of theirs knows them.
        t = tl.arange(0, LANES) // RUNS
        m = tl.minimum(tl.maximum(n - t * TILE, 0), TILE)
        used = (t * TILE < hi) & (t * TILE + m > lo)
        at = tl.load(offsets + t, mask=used, other=0).to(tl.int64) * _STEP
        more = group * TILES + t + 1 < of_chunk
        end = tl.load(offsets + (t + 1), mask=used & more, other=0).to(tl.int64) * _STEP
        end = tl.where(more, end, limit)
        wrong = (at > end) | (end > limit) | (end - at > _LARGE) | (guard + at != at)
        wrong = wrong | ((group + t == 0) & (at != 0))
        size = tl.where(used & (wrong == 0), end - at, 0).to(tl.int32)
        data_at = tl.where(used & (wrong == 0), at, 0)
        behind = tl.where(t == 0, tables, 0)
        good = used & (wrong == 0) & (behind <= size)
        # fmt: off
        good = _decode_tiles(
            dynamic_ptr, data_at, behind, size, n, lo, hi, coded, dynamic_ptr + tables_at,
            work_ptr, out, good, L,
        )
        # fmt: on
        bad = _any(used & (good == 0))
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
    """A group's share of elements `start` to `stop`, and of the checksum."""
    ITEM: tl.constexpr = L.item
    lin = first_group + tl.program_id(0)
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
            # fmt: off
            bad = _decode_group(
                static_ptr, dynamic_ptr, of_chunk, nbytes, group, m, lo, hi, work_ptr, out, L
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
    tables = _variant(_tables_kernel, dtype, 4, **chosen)
    work = *g.parts.sizes, g.groups, g.work_at
    tables.launch(g.groups * chunks * dtype.itemsize, (x, scratch), *work)
    numbers = *g.parts.sizes, g.tiles, g.groups, g.work_at, g.sizes_at
    _variant(_measure_kernel, dtype, 1, **chosen).launch(g.tiles * chunks, (x, scratch), *numbers)
    pack = _variant(_pack_kernel, dtype, 1, sums=plan.checksum, **chosen)
    pack.launch(g.tiles * chunks, (x, out, scratch), *numbers, *g.parts.places)
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
