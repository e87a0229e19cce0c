# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment,misc"
"""The kernel that sums up buffers of codecs that code tile by tile; see tiles_triton, sums.

Buffers are decoded `Launch.together` at a time, then half as many, and so on. What they tell of
themselves, damage and checksum terms, is told after all of them were read: no load waits for
another's values. As `UNPACK` is most of the code, it is there once for each of these, and once for
tiles that are not whole.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .columns_triton import from_columns
from .frame_triton import CHUNK, CHUNK_PAYLOAD, PLACE_WORDS, place_of
from .launch_triton import kernel
from .runs_triton import element_words, negative_zero, report_any, rounded_pair
from .slots_triton import column_at, slots_before
from .tiles_triton import (
    Tile,
    add_terms,
    draw_of,
    elements_left,
    is_dense,
    load_tile,
    numbered,
    only_inside,
    recorded,
    store_tile,
    terms_of,
    tile_at,
    with_scale,
    work_of,
)


@triton.jit
def plus(v, y, F: tl.constexpr, L: tl.constexpr):
    """Columns of values, and of decoded ones, added up."""
    COUNT: tl.constexpr = L.columns
    total = ()
    for k in tl.static_range(0, COUNT, 2):
        a, b = y[k], y[k + 1]
        if not F.exact:
            a, b = rounded_pair(a, b, L.exponent, L.item, F.limited, L.cvt)
        total = total + (v[k] + a, v[k + 1] + b)
    return total


@triton.jit
def _plus_local(v, x_ptr, t, plain, F: tl.constexpr, L: tl.constexpr):
    """Columns of values, and of the tensor's elements, added up."""
    COUNT: tl.constexpr = L.columns
    if L.once:
        local = load_tile(x_ptr, t, plain, F, L, False, True)
    elif plain:
        local = load_tile(x_ptr, t, plain, F, L, False, False)
    else:
        local = load_tile(x_ptr, t, plain, F, L, False, True)
    total = ()
    for k in tl.static_range(COUNT):
        total = total + (v[k] + local[k],)
    return total


@triton.jit
def source_at(
    number,
    src_ptr,
    t,
    static_at,
    stride,
    stats_ptr,
    chunks,
    chunk_nelem,
    F: tl.constexpr,
    L: tl.constexpr,
    LOAD: tl.constexpr,
    SCALE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """(what a tile of buffer `number`, whose bytes are at `src_ptr`, has of its own; whether fast
    forms may be taken).
    """
    static_ptr = src_ptr + (static_at + t.chunk * stride) * 128
    scale, usual = SCALE(stats_ptr, static_ptr, t.at, F, False)
    work = work_of(stats_ptr, number + 1, t.chunk, chunks, chunk_nelem, F)
    # fmt: off
    s = Tile(
        t.chunk, t.tile, t.n, t.first, t.nelem, static_ptr, t.at, scale, t.record_ptr, number, work,
        0,
    )
    # fmt: on
    return (static_ptr, scale, work, LOAD(s, F, L, MASKED)), usual


@triton.jit
def _tell_all(found, sources_ptr, first, t, F: tl.constexpr, L: tl.constexpr):
    """Tell what is wrong in a tile of buffers from number `first` on, and its checksum terms.

    `found`: of each what UNPACK gives. Terms are added up for all buffers at once, and told by one
    operation: else each would wait for all threads of the program, and for the one before.
    """
    SIZE: tl.constexpr = len(found)
    if F.checked:
        for i in tl.static_range(SIZE):
            _, _, status_ptr = place_of(sources_ptr, first + i)
            report_any(status_ptr, CHUNK + (t.chunk << 8) + CHUNK_PAYLOAD, found[i][1])
    if L.sums:
        TERMS: tl.constexpr = len(found[0][2].shape)
        if (SIZE > 1) and (TERMS > 0):
            LOG: tl.constexpr = 1 + SIZE // 4 - SIZE // 8
            columns = ()
            for i in tl.static_range(SIZE):
                columns = columns + (found[i][2],)
            totals = tl.sum(from_columns(columns, SIZE, LOG), 0)
            rows = sources_ptr + (first + tl.arange(0, SIZE)) * PLACE_WORDS
            add_terms(tl.load(rows + 1).to(tl.pointer_type(tl.int64)) + t.chunk, totals)
        else:
            for i in tl.static_range(SIZE):
                _, sums_ptr, _ = place_of(sources_ptr, first + i)
                add_terms(sums_ptr + t.chunk, terms_of(found[i][2]))


@triton.jit
def unpack_all(
    own,
    first,
    t,
    F: tl.constexpr,
    L: tl.constexpr,
    UNPACK: tl.constexpr,
    SIZE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """What UNPACK gives of tile `t` of SIZE buffers from number `first` on; see `source_at`."""
    found = ()
    for i in tl.static_range(SIZE):
        static_ptr, scale, work, loaded = own[i]
        # fmt: off
        s = Tile(
            t.chunk, t.tile, t.n, t.first, t.nelem, static_ptr, t.at, scale, t.record_ptr,
            first + i, work, loaded,
        )
        # fmt: on
        found = found + (UNPACK(s, t.n * 0, t.n, F, L, MASKED),)
    return found


@triton.jit
def _add_group(
    v,
    sources_ptr,
    first,
    t,
    static_at,
    stride,
    stats_ptr,
    chunks,
    chunk_nelem,
    F: tl.constexpr,
    L: tl.constexpr,
    LOAD: tl.constexpr,
    UNPACK: tl.constexpr,
    SCALE: tl.constexpr,
    SIZE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add SIZE buffers from number `first` on to columns of values. All are loaded before one of
    them is added.
    """
    places = ()
    for i in tl.static_range(SIZE):
        src_ptr, _, _ = place_of(sources_ptr, first + i)
        places = places + (src_ptr,)
    own = ()
    fast = True
    for i in tl.static_range(SIZE):
        # fmt: off
        one, usual = source_at(
            first + i, places[i], t, static_at, stride, stats_ptr, chunks, chunk_nelem, F, L, LOAD,
            SCALE, MASKED,
        )
        # fmt: on
        own = own + (one,)
        fast = fast & usual
    if L.loaded and (SIZE > 1):
        # Else the compiler puts loads off, one behind another's values.
        tl.debug_barrier()
    if MASKED:
        found = unpack_all(own, first, t, F, L, UNPACK, SIZE, True)
    elif fast:
        found = unpack_all(own, first, t, F, L, UNPACK, SIZE, False)
    else:
        found = unpack_all(own, first, t, F, L, UNPACK, SIZE, True)
    for i in tl.static_range(SIZE):
        v = plus(v, found[i][0], F, L)
    _tell_all(found, sources_ptr, first, t, F, L)
    return v


@triton.jit
def _add_groups(
    v,
    sources_ptr,
    first,
    count,
    t,
    static_at,
    stride,
    stats_ptr,
    chunks,
    chunk_nelem,
    F: tl.constexpr,
    L: tl.constexpr,
    LOAD: tl.constexpr,
    UNPACK: tl.constexpr,
    SCALE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add buffers `first` to `count` to columns of values: `L.together` at a time, then half as
    many, and so on. Tiles that are not whole are added one at a time.
    """
    MOST: tl.constexpr = L.together if L.once or not MASKED else 1
    SIZES: tl.constexpr = 1 + MOST // 2 - MOST // 8
    for k in tl.static_range(SIZES):
        stop = first + (count - first) // (MOST >> k) * (MOST >> k)
        for number in range(first, stop, MOST >> k):
            # fmt: off
            v = _add_group(
                v, sources_ptr, number, t, static_at, stride, stats_ptr, chunks, chunk_nelem, F, L,
                LOAD, UNPACK, SCALE, MOST >> k, MASKED,
            )
            # fmt: on
        first = stop
    return v


@triton.jit
def finish_tile(
    v,
    out_ptr,
    t,
    s,
    plain,
    factor,
    draw,
    stats_ptr,
    F: tl.constexpr,
    L: tl.constexpr,
    PACK: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Store a sum, or encode it; gives the checksum terms."""
    COUNT: tl.constexpr = L.columns
    if L.scaled:
        scaled = ()
        for k in tl.static_range(COUNT):
            scaled = scaled + (v[k] * factor,)
        v = scaled
    total = tl.zeros([], tl.uint64)
    if L.out_item > 0:
        end = t.n
        store_tile(
            out_ptr, t.first, v, t, plain, end * 0, end, L.out_item, False, False, F, L, MASKED
        )
    else:
        SLOTS: tl.constexpr = L.apart > 0
        PAIRS: tl.constexpr = L.cvt and (L.item == 2) and (MASKED == 0 or SLOTS)
        if F.pairs and PAIRS:
            v = element_words(v, None, L.exponent, L.item, L.cvt, False)
            if SLOTS:
                v = slots_before(v, elements_left(t, L), L.rows, L.apart)
        else:
            rounded = ()
            for k in tl.static_range(0, COUNT, 2):
                a, b = rounded_pair(v[k], v[k + 1], L.exponent, L.item, False, L.cvt)
                rounded = rounded + (a, b)
            if SLOTS:
                v = ()
                for k in tl.static_range(COUNT):
                    inside = column_at(k, L.rows, L.apart) < elements_left(t, L)
                    v = v + (tl.where(inside, rounded[k], 0.0),)
            elif MASKED:
                v = only_inside(rounded, t, F, L)
            else:
                v = rounded
        total += terms_of(PACK(v, t, s, draw, stats_ptr, F, L, MASKED))
    return total


@kernel
def sum_kernel(
    x_ptr,
    out_ptr,
    record_ptr,
    sources_ptr,
    key_ptr,
    stats_ptr,
    nelem: tl.int64,
    chunk_nelem: tl.int64,
    tiles: tl.int32,
    static_at: tl.int64,
    stride: tl.int64,
    at: tl.int64,
    count: tl.int32,
    place: tl.int32,
    factor: tl.float32,
    seed: tl.uint64,
    step: tl.uint64,
    rank: tl.uint64,
    F: tl.constexpr,
    L: tl.constexpr,
    PACK: tl.constexpr,
    LOAD: tl.constexpr,
    UNPACK: tl.constexpr,
    SCALE: tl.constexpr,
):
    """The sum of one tile of `count` buffers of a plan, and before number `place` of a tensor.

    See codecs/common/sums.py. It is stored at `out_ptr`, or encoded: then that is the first static
    part, and `record_ptr` is the first record.
    """
    COUNT: tl.constexpr = L.columns
    ROWS: tl.constexpr = L.rows
    pid = tl.program_id(0)
    chunk = (pid // tiles).to(tl.int64)
    tile = (pid % tiles).to(tl.int64)
    src_ptr, _, _ = place_of(sources_ptr, 0)
    source_ptr = src_ptr + static_at * 128
    s = tile_at(source_ptr, chunk, tile, nelem, chunk_nelem, stride, at, L.aligned)
    t = s
    plain = L.aligned & ((tile + 1) * (L.rows * L.run) <= s.n)
    if (L.out_item == 0) or F.padded:
        t = tile_at(out_ptr, chunk, tile, nelem, chunk_nelem, stride, at, L.aligned)
        t = recorded(t, record_ptr + chunk * 32)
        scale, usual = SCALE(stats_ptr, t.static_ptr, at, F, True)
        plain = plain & usual & is_dense(scale, F)
        t, s = with_scale(t, scale), with_scale(s, scale)
    chunks = tl.num_programs(0) // tiles
    t = numbered(t, 0, stats_ptr, chunks, chunk_nelem, F)
    s = numbered(s, 1, stats_ptr, chunks, chunk_nelem, F)
    v = ()
    for _ in tl.static_range(COUNT):
        v = v + (negative_zero([ROWS, 4] if L.apart > 0 else [ROWS]),)
    # fmt: off
    # Buffers before the tensor, then the tensor and those behind it.
    for part in range(0, 1 if L.x_item == 0 else 2):
        first, stop = count * 0, count
        if L.x_item > 0:
            first, stop = tl.where(part > 0, place, 0), tl.where(part > 0, count, place)
            if part > 0:
                v = _plus_local(v, x_ptr, t, plain, F, L)
        if L.once:
            v = _add_groups(
                v, sources_ptr, first, stop, t, static_at, stride, stats_ptr, chunks, chunk_nelem,
                F, L, LOAD, UNPACK, SCALE, True,
            )
        elif plain:
            v = _add_groups(
                v, sources_ptr, first, stop, t, static_at, stride, stats_ptr, chunks, chunk_nelem,
                F, L, LOAD, UNPACK, SCALE, False,
            )
        else:
            v = _add_groups(
                v, sources_ptr, first, stop, t, static_at, stride, stats_ptr, chunks, chunk_nelem,
                F, L, LOAD, UNPACK, SCALE, True,
            )
    draw = draw_of(key_ptr, seed, step, rank, L)
    if L.once:
        terms = finish_tile(v, out_ptr, t, s, plain, factor, draw, stats_ptr, F, L, PACK, True)
    elif plain:
        terms = finish_tile(v, out_ptr, t, s, plain, factor, draw, stats_ptr, F, L, PACK, False)
    else:
        terms = finish_tile(v, out_ptr, t, s, plain, factor, draw, stats_ptr, F, L, PACK, True)
    # fmt: on
    if L.sums and (L.out_item == 0):
        add_terms(record_ptr + chunk * 32, terms)
