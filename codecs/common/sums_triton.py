# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment,misc"
"""The kernel that sums up buffers of codecs that code tile by tile; see tiles_triton, sums.

Buffers are decoded `Launch.together` at a time, and what one tells of itself, damage and checksum
terms, is told after all of them were read: no load waits for an atomic operation of a buffer
before. As `UNPACK` is most of the code, it is there once for each of these, and once for tiles that
are not whole and buffers that are left over.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .frame_triton import CHUNK, CHUNK_PAYLOAD, place_of
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
def _plus(v, y, F: tl.constexpr, L: tl.constexpr):
    """Columns of values, and of decoded ones, added up."""
    COUNT: tl.constexpr = L.columns
    total = ()
    for k in tl.static_range(0, COUNT, 2):
        a, b = rounded_pair(y[k], y[k + 1], L.exponent, L.item, F.limited, L.cvt)
        total = total + (v[k] + a, v[k + 1] + b)
    return total


@triton.jit
def _plus_local(v, x_ptr, t, plain, F: tl.constexpr, L: tl.constexpr, MASKED: tl.constexpr):
    """Columns of values, and of the tensor's elements, added up."""
    COUNT: tl.constexpr = L.columns
    if L.once or not MASKED:
        local = load_tile(x_ptr, t, plain, F, L, False, MASKED)
    elif plain:
        local = load_tile(x_ptr, t, plain, F, L, False, False)
    else:
        local = load_tile(x_ptr, t, plain, F, L, False, True)
    total = ()
    for k in tl.static_range(COUNT):
        total = total + (v[k] + local[k],)
    return total


@triton.jit
def _decoded(
    number,
    sources_ptr,
    t,
    static_at,
    stride,
    stats_ptr,
    chunks,
    chunk_nelem,
    F: tl.constexpr,
    L: tl.constexpr,
    UNPACK: tl.constexpr,
    SCALE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """(values of a tile of buffer `number`; what is wrong, checksum terms, and where both go)."""
    src_ptr, sums_ptr, status_ptr = place_of(sources_ptr, number)
    static_ptr = src_ptr + (static_at + t.chunk * stride) * 128
    scale, usual = SCALE(stats_ptr, static_ptr, t.at, F, False)
    work = work_of(stats_ptr, number + 1, t.chunk, chunks, chunk_nelem, F)
    # fmt: off
    s = Tile(
        t.chunk, t.tile, t.n, t.first, t.nelem, static_ptr, t.at, scale, t.record_ptr, number, work,
    )
    # fmt: on
    if MASKED:
        y, wrong, terms = UNPACK(s, t.n * 0, t.n, F, L, True)
    else:
        if usual:
            y, wrong, terms = UNPACK(s, t.n * 0, t.n, F, L, False)
        else:
            y, wrong, terms = UNPACK(s, t.n * 0, t.n, F, L, True)
    return y, (wrong, terms, sums_ptr, status_ptr)


@triton.jit
def _tell(found, t, F: tl.constexpr, L: tl.constexpr):
    """Tell what is wrong in a tile of a buffer, and its checksum terms; see `_decoded`."""
    wrong, terms, sums_ptr, status_ptr = found
    if F.checked:
        report_any(status_ptr, CHUNK + (t.chunk << 8) + CHUNK_PAYLOAD, wrong)
    if L.sums:
        add_terms(sums_ptr + t.chunk, terms_of(terms))


@triton.jit
def _add_groups(
    v,
    x_ptr,
    sources_ptr,
    last,
    place,
    t,
    plain,
    static_at,
    stride,
    stats_ptr,
    chunks,
    chunk_nelem,
    F: tl.constexpr,
    L: tl.constexpr,
    UNPACK: tl.constexpr,
    SCALE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add buffers up to number `last` - 1, `L.together` at a time, to columns of values; and before
    number `place` the tensor's elements.
    """
    TOGETHER: tl.constexpr = L.together
    for first in range(0, last, TOGETHER):
        decoded = ()
        told = ()
        for i in tl.static_range(TOGETHER):
            # fmt: off
            y, found = _decoded(
                first + i, sources_ptr, t, static_at, stride, stats_ptr, chunks, chunk_nelem, F, L,
                UNPACK, SCALE, MASKED,
            )
            # fmt: on
            decoded = decoded + (y,)
            told = told + (found,)
        for i in tl.static_range(TOGETHER):
            if L.x_item > 0:
                if first + i == place:
                    v = _plus_local(v, x_ptr, t, plain, F, L, MASKED)
            v = _plus(v, decoded[i], F, L)
        for i in tl.static_range(TOGETHER):
            _tell(told[i], t, F, L)
    return v


@triton.jit
def _plus_one(
    v,
    number,
    sources_ptr,
    t,
    static_at,
    stride,
    stats_ptr,
    chunks,
    chunk_nelem,
    F: tl.constexpr,
    L: tl.constexpr,
    UNPACK: tl.constexpr,
    SCALE: tl.constexpr,
):
    """Columns of values, and of a tile of buffer `number`, added up; what that tells is told."""
    # fmt: off
    y, found = _decoded(
        number, sources_ptr, t, static_at, stride, stats_ptr, chunks, chunk_nelem, F, L, UNPACK,
        SCALE, True,
    )
    # fmt: on
    v = _plus(v, y, F, L)
    _tell(found, t, F, L)
    return v


@triton.jit
def _add_rest(
    v,
    x_ptr,
    sources_ptr,
    first,
    count,
    place,
    t,
    plain,
    static_at,
    stride,
    stats_ptr,
    chunks,
    chunk_nelem,
    F: tl.constexpr,
    L: tl.constexpr,
    UNPACK: tl.constexpr,
    SCALE: tl.constexpr,
):
    """Add buffers from number `first` on, one at a time, and if `place` is not below `first` the
    tensor's elements, to columns of values.
    """
    number = first
    terms = count - first
    if L.x_item > 0:
        terms += (place >= first).to(tl.int32)
    for _ in range(0, terms):
        # fmt: off
        if L.x_item == 0:
            v = _plus_one(
                v, number, sources_ptr, t, static_at, stride, stats_ptr, chunks, chunk_nelem, F, L,
                UNPACK, SCALE,
            )
            number += 1
        elif number == place:
            v = _plus_local(v, x_ptr, t, plain, F, L, True)
            # Not again.
            place = place * 0 - 1
        else:
            v = _plus_one(
                v, number, sources_ptr, t, static_at, stride, stats_ptr, chunks, chunk_nelem, F, L,
                UNPACK, SCALE,
            )
            number += 1
        # fmt: on
    return v


@triton.jit
def _finish_tile(
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
    UNPACK: tl.constexpr,
    SCALE: tl.constexpr,
):
    """The sum of one tile of `count` buffers of a plan, and before number `place` of a tensor.

    See codecs/common/sums.py. It is stored at `out_ptr`, or encoded: then that is the first static
    part, and `record_ptr` is the first record.
    """
    TOGETHER: tl.constexpr = L.together
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
    done = count * 0
    if L.once:
        if TOGETHER > 1:
            done = count // TOGETHER * TOGETHER
            v = _add_groups(
                v, x_ptr, sources_ptr, done, place, t, plain, static_at, stride, stats_ptr, chunks,
                chunk_nelem, F, L, UNPACK, SCALE, True,
            )
    elif plain:
        done = count // TOGETHER * TOGETHER
        v = _add_groups(
            v, x_ptr, sources_ptr, done, place, t, plain, static_at, stride, stats_ptr, chunks,
            chunk_nelem, F, L, UNPACK, SCALE, False,
        )
    v = _add_rest(
        v, x_ptr, sources_ptr, done, count, place, t, plain, static_at, stride, stats_ptr, chunks,
        chunk_nelem, F, L, UNPACK, SCALE,
    )
    draw = draw_of(key_ptr, seed, step, rank, L)
    if L.once:
        terms = _finish_tile(v, out_ptr, t, s, plain, factor, draw, stats_ptr, F, L, PACK, True)
    elif plain:
        terms = _finish_tile(v, out_ptr, t, s, plain, factor, draw, stats_ptr, F, L, PACK, False)
    else:
        terms = _finish_tile(v, out_ptr, t, s, plain, factor, draw, stats_ptr, F, L, PACK, True)
    # fmt: on
    if L.sums and (L.out_item == 0):
        add_terms(record_ptr + chunk * 32, terms)
