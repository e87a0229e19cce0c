# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment,misc"
"""zipccl on a GPU: one program per tile, one pass over the tensor each way. specs/zipccl.md.

Encoding is two kernels. The first reads every tile once, chooses its window, writes its block and
lists its escapes in a scratch slot; the second, small, knows all counts, so it closes the escapes
up, writes the index and the records, and stores raw the chunks that did not shrink. Decoding is one
kernel, and a small one behind it that checks what was decoded.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton.language as tl

from ..formats.dtypes import DType
from .common.base import Key, Plan
from .common.frame_triton import Places, check_header, frame_of, touched
from .common.launch_triton import Variant, kernel, options
from .common.minifloat_triton import aligned_for
from .common.plans_triton import Launches, Selection
from .zipccl import TILE, Zipccl, scratch_layout, tile_count
from .zipccl_batch_triton import decode_many as decode_many
from .zipccl_batch_triton import encode_many as encode_many
from .zipccl_decode_triton import check_one, decode_one, decode_options
from .zipccl_encode_triton import FINISH, encode_one, encode_options, finish_one, window_of, work_at
from .zipccl_sums_triton import check_places_kernel, checked_part, sum_variant
from .zipccl_windows_triton import measure
from .zipccl_words_triton import fixed_of, launch_of, packed_part, part_at

_TILE = tl.constexpr(TILE)


@kernel
def _encode_kernel(
    x_ptr,
    out_ptr,
    scratch_ptr,
    stats_ptr,
    nelem: tl.int64,
    chunk_nelem: tl.int64,
    tiles: tl.int32,
    groups: tl.int32,
    shift: tl.int32,
    static_at: tl.int64,
    static_stride: tl.int64,
    index_at: tl.int64,
    totals_at: tl.int64,
    counts_at: tl.int64,
    slots_at: tl.int64,
    fixed: tl.int32,
    L: tl.constexpr,
):
    """One tile. Offsets `*_at` are in 128 bytes.

    Mode 0: whole tiles at aligned addresses; 1: each chunk's partial tile; 2: any tile.
    """
    pid = tl.program_id(0)
    if L.mode == 1:
        chunk = pid
    else:
        chunk = pid // tiles
    first = chunk.to(tl.int64) * chunk_nelem
    n = tl.maximum(tl.minimum(chunk_nelem, nelem - first), 0)
    if L.mode == 1:
        tile = (n // _TILE).to(tl.int32)
        limit = (n + _TILE - 1) // _TILE
    else:
        tile = pid % tiles
        if L.mode == 0:
            limit = n // _TILE
        else:
            limit = (n + _TILE - 1) // _TILE
    if tile < limit:
        p = part_at(out_ptr, chunk, n, (0, static_at, static_stride, index_at, 0, 0, fixed))
        # fmt: off
        work = work_at(
            scratch_ptr, scratch_ptr + totals_at * 128, scratch_ptr + counts_at * 128,
            scratch_ptr + slots_at * 128, chunk * groups, chunk.to(tl.int64) * tiles, L.slot,
        )
        # fmt: on
        encode_one(x_ptr, first, p, work, tile, shift, stats_ptr, L.mode == 0, L)


@kernel
def _finish_kernel(
    x_ptr,
    out_ptr,
    scratch_ptr,
    nelem: tl.int64,
    chunk_nelem: tl.int64,
    tiles: tl.int32,
    groups: tl.int32,
    shift: tl.int32,
    head: tl.int32,
    static_at: tl.int64,
    static_stride: tl.int64,
    index_at: tl.int64,
    dynamic_at: tl.int64,
    dynamic_stride: tl.int64,
    totals_at: tl.int64,
    counts_at: tl.int64,
    slots_at: tl.int64,
    L: tl.constexpr,
):
    """One group of tiles, see `finish_one`."""
    pid = tl.program_id(0)
    chunk = pid // groups
    first = chunk.to(tl.int64) * chunk_nelem
    n = tl.maximum(tl.minimum(chunk_nelem, nelem - first), 0)
    # fmt: off
    p = part_at(
        out_ptr, chunk, n,
        (head, static_at, static_stride, index_at, dynamic_at, dynamic_stride, -1),
    )
    work = work_at(
        scratch_ptr, scratch_ptr + totals_at * 128, scratch_ptr + counts_at * 128,
        scratch_ptr + slots_at * 128, chunk * groups, chunk.to(tl.int64) * tiles, L.slot,
    )
    # fmt: on
    finish_one(x_ptr, first, p, work, pid % groups, groups, shift, L)


@kernel
def _decode_kernel(
    src_ptr,
    out_ptr,
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
    shift: tl.int32,
    head: tl.int32,
    static_at: tl.int64,
    static_stride: tl.int64,
    index_at: tl.int64,
    dynamic_at: tl.int64,
    dynamic_stride: tl.int64,
    fixed: tl.int32,
    L: tl.constexpr,
):
    """One tile of elements `start` to `stop`. `fixed`: see `Part`.

    Mode 0: tiles that are whole and wanted whole, to aligned addresses; 1: the others, that is
    each chunk's partial tile, the first and the last; 2: any tile.
    """
    pid = tl.program_id(0)
    if L.mode == 1:
        first_chunk = (first_tile // tiles).to(tl.int32)
        ends = tl.num_programs(0) - 2
        edge = tl.where(pid == ends, start, stop - 1)
        chunk = tl.where(pid < ends, first_chunk + pid, (edge // chunk_nelem).to(tl.int32))
        first = chunk.to(tl.int64) * chunk_nelem
        n = tl.maximum(tl.minimum(chunk_nelem, nelem - first), 0)
        tile = tl.where(pid < ends, n // _TILE, (edge - first) // _TILE).to(tl.int32)
        # The ends may be partial tiles, which have their program, or one and the same tile.
        twice = (pid >= ends) & (tile.to(tl.int64) == n // _TILE)
        same = (start // chunk_nelem == chunk) & ((start - first) // _TILE == tile)
        twice = twice | ((pid > ends) & same)
    else:
        lin = first_tile + pid
        chunk = (lin // tiles).to(tl.int32)
        tile = (lin % tiles).to(tl.int32)
        first = chunk.to(tl.int64) * chunk_nelem
        n = tl.maximum(tl.minimum(chunk_nelem, nelem - first), 0)
        twice = pid < 0
    begin_tile = tile.to(tl.int64) * _TILE
    lo = tl.maximum(start - first - begin_tile, 0)
    hi = tl.minimum(stop - first - begin_tile, tl.minimum(n - begin_tile, _TILE))
    mine = (begin_tile < n) & (not twice)
    if L.mode == 0:
        mine = mine & (hi - lo == _TILE)
    if L.mode == 1:
        mine = mine & (hi - lo < _TILE) & (hi > lo)
    if mine:
        g = (head, static_at, static_stride, index_at, dynamic_at, dynamic_stride, fixed)
        p = part_at(src_ptr, chunk, n, g)
        if L.packed:
            p = packed_part(p, src_ptr + tl.load(starts_ptr + chunk), L.item)
        out_at = first + begin_tile + lo - start
        total = decode_one(p, tile, lo, hi, out_ptr, out_at, status_ptr, L.mode == 0, L)
        if L.sums:
            at = sums_ptr + chunk * groups + (tile >> shift)
            tl.atomic_add(at, total.to(tl.int64, bitcast=True), sem="relaxed")


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
    groups: tl.int32,
    slot_nbytes: tl.int64,
    ITEM: tl.constexpr,
    PACKED: tl.constexpr,
    SUMS: tl.constexpr,
):
    """A chunk's record; of chunks `first_whole` to `end_whole` padding and checksum; the header.

    The header and the ordinals are compared if they are `planned`, not read by the host before.
    `slot_nbytes`: bytes of a dynamic slot.
    """
    chunk = first_chunk + tl.program_id(0).to(tl.int64)
    if (planned != 0) & (chunk == first_chunk):
        check_header(src_ptr, plan_ptr, status_ptr)
    p = checked_part(src_ptr, plan_ptr, chunk, slot_nbytes, starts_ptr + chunk, PACKED)
    whole = (chunk >= first_whole) & (chunk < end_whole)
    # fmt: off
    check_one(
        p, p.n * ITEM, src_ptr, plan_ptr, sums_ptr + chunk * groups, groups, status_ptr, whole,
        planned, PACKED, SUMS,
    )


def supports(dtype: DType) -> bool:
    """True for the floats that have kernels: all but float64."""
    return dtype.is_float and dtype.itemsize <= 4


@functools.cache
def _encode_variant(dtype: DType, mode: int, window: int, sums: bool) -> Variant:
    chosen = encode_options(dtype.itemsize, mode, sums)
    launch = launch_of(dtype, mode=mode, window=window, sums=sums)
    return Variant(_encode_kernel, chosen, L=launch)


@functools.cache
def _finish_variant(dtype: DType, sums: bool) -> Variant:
    return Variant(_finish_kernel, FINISH, L=launch_of(dtype, sums=sums))


@functools.cache
def _decode_variant(dtype: DType, mode: int, **values: int | bool) -> Variant:
    launch = launch_of(dtype, mode=mode, **values)
    return Variant(_decode_kernel, decode_options(dtype.itemsize, mode), L=launch)


@functools.cache
def _check_variant(dtype: DType, packed: bool, sums: bool, places: bool = False) -> Variant:
    chosen = check_places_kernel if places else _check_kernel
    return Variant(chosen, options(1), ITEM=dtype.itemsize, PACKED=packed, SUMS=sums)


class Sizes(Launches):
    """What kernels are told about a plan, and which are launched for it."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        sizes, head = self.sizes, self.head
        self.plan = plan
        self.tiles = tile_count(plan.chunk_nelem)
        scratch = scratch_layout(plan.dtype, plan.chunk_nelem, plan.chunks)
        self.groups = scratch.groups
        self.cleared = scratch.counts
        fixed = fixed_of(self.spec)
        groups = (self.tiles, scratch.groups, scratch.shift)
        static = (*self.static, self.second)
        dynamic = (plan.dynamic_offset // 128, plan.dynamic_stride // 128)
        places = (scratch.totals // 128, scratch.counts // 128, scratch.slots // 128)
        self.encode = (*sizes, *groups, *static, *places, fixed)
        self.finish = (*sizes, *groups, head, *static, *dynamic, *places)
        self.decode = (*sizes, *groups, head, *static, *dynamic, fixed)
        self.sum = (*sizes, self.tiles, plan.chunks, head, *static, *dynamic, fixed)
        self.check = (scratch.groups, plan.dynamic_stride)
        last = (plan.nelem - 1) // plan.chunk_nelem
        partial = any(hi % TILE for hi in (plan.chunk_nelem, plan.nelem - last * plan.chunk_nelem))
        self.rows_aligned = plan.chunks == 1 or plan.chunk_nelem * plan.dtype.itemsize % 16 == 0
        self.all_tiles = all_tiles = self.tiles * plan.chunks
        #: (mode, programs) of the first encode kernel, by whether rows are aligned.
        self.encode_programs = (
            ((2, all_tiles),),
            ((0, all_tiles), (1, plan.chunks)) if partial else ((0, all_tiles),),
        )
        self.decode_programs = (
            ((2, all_tiles),),
            ((0, all_tiles), (1, plan.chunks + 2)) if partial else ((0, all_tiles),),
        )

    def decode_range(self, start: int, stop: int, aligned: bool):
        """First tile of elements `start` to `stop`, and (mode, programs) of its kernels."""
        size = self.plan.chunk_nelem
        if (start, stop) == (0, self.plan.nelem):
            return 0, self.decode_programs[aligned]
        lo = start // size * self.tiles + start % size // TILE
        last = stop - 1
        hi = last // size * self.tiles + last % size // TILE + 1
        if not aligned:
            return lo, ((2, hi - lo),)
        return lo, ((0, hi - lo), (1, last // size - start // size + 3))


def encode(plan: Plan, x, out, scratch, stats=None, key=None) -> None:
    """Encode the elements of `x` into `out`; see `tightwire.gpu` for the contract."""
    g = Sizes.of(plan)
    frame_of(plan).begin(out, scratch, g.cleared)
    aligned = g.rows_aligned and x.data_ptr() % 16 == 0
    chosen = window_of(plan.codec, stats is not None)
    if stats is None:
        stats = scratch
    elif stats.dtype != torch.int64:
        stats = stats.to(torch.int64)
    for mode, programs in g.encode_programs[aligned]:
        variant = _encode_variant(plan.dtype, mode, chosen, plan.checksum)
        variant.launch(programs, (x, out, scratch, stats), *g.encode)
    finish = _finish_variant(plan.dtype, plan.checksum)
    finish.launch(g.groups * plan.chunks, (x, out, scratch), *g.finish)


def decode(plan: Plan, src, out, scratch, status, **selection) -> None:
    """Decode elements into `out`; see `tightwire.gpu` for the contract."""
    g, chosen = Sizes.of(plan), Selection.of(plan, selection)
    start, stop, dynamic_starts = chosen.start, chosen.stop, chosen.dynamic_starts
    packed = dynamic_starts is not None
    sums = chosen.check and plan.checksum and start < stop
    if sums:
        scratch[: 8 * g.groups * plan.chunks].zero_()
    if out is None:
        out = src
    if dynamic_starts is None:
        dynamic_starts = status
    if start < stop:
        aligned = g.rows_aligned and start * plan.dtype.itemsize % 16 == 0
        aligned = aligned and out.data_ptr() % 16 == 0
        lo, kernels = g.decode_range(start, stop, aligned)
        adding = out.element_size() if chosen.add else 0
        for mode, programs in kernels:
            variant = _decode_variant(
                plan.dtype, mode, packed=packed, store=chosen.store, add=adding, sums=sums
            )
            tensors = (src, out, scratch, status, dynamic_starts)
            variant.launch(programs, tensors, start, stop, lo, *g.decode)
    first, end, first_whole, end_whole = touched(plan, start, stop)
    _check_variant(plan.dtype, packed, sums).launch(
        end - first,
        (src, frame_of(plan).table(src.device), scratch, status, dynamic_starts),
        first,
        first_whole,
        end_whole if chosen.check else first_whole,
        int(chosen.planned),
        *g.check,
    )


def sum(
    plan: Plan,
    places: Places,
    out: torch.Tensor,
    *,
    x: torch.Tensor | None = None,
    place: int = 0,
    factor: float | None = None,
    planned: bool = True,
    starts: torch.Tensor | None = None,
) -> None:
    """The sum of buffers of a plan of float32, bfloat16 or float16, wherever they lie, and of `x`
    before number `place`.

    See codecs/common/sums.py; `factor` is what it is multiplied by. `out` has elements of the
    plan's dtype or of float32, `x` too. `starts`: int64, shape (buffers, chunks), where the dynamic
    parts of packed buffers start. One launch sums up, one behind it checks all buffers.
    """
    if plan.dtype.itemsize == 1:
        raise TypeError(f"no kernel sums up {plan.dtype.name}; allowed: bfloat16, float16, float32")
    g = Sizes.of(plan)
    if plan.checksum:
        places.sums.zero_()
    packed = starts is not None
    starts = places.sums if starts is None else starts
    if plan.nelem:
        variant = sum_variant(
            plan.dtype,
            out.device,
            sums=plan.checksum,
            packed=packed,
            x_item=0 if x is None else x.element_size(),
            out_item=out.element_size(),
            aligned=(x is None or aligned_for(plan, x)) and aligned_for(plan, out),
            scaled=factor is not None,
        )
        tensors = (out if x is None else x, out, places.table, starts)
        numbers = places.number, place, 1.0 if factor is None else factor
        variant.launch(g.all_tiles, tensors, *g.sum, *numbers)
    _check_variant(plan.dtype, packed, plan.checksum, True).launch(
        plan.chunks * places.number,
        (places.table, frame_of(plan).table(out.device), starts),
        int(planned),
        plan.dynamic_stride,
    )


def encode_sum(
    plan: Plan,
    places: Places,
    out: torch.Tensor,
    *,
    stats: torch.Tensor | None = None,
    key: Key | None = None,
    **terms: Any,
) -> None:
    """As `sum`, with its `terms`, and the sum encoded into `out`, a buffer of the plan.

    The sum itself goes to memory in between: a buffer's size is not known before its end.
    """
    spec, device = plan.codec, out.device
    assert isinstance(spec, Zipccl)
    total = torch.empty(plan.nelem, dtype=getattr(torch, plan.dtype.name), device=device)
    sum(plan, places, total, **terms)
    if stats is None:
        stats = measure(spec, plan.dtype, total)
    scratch = torch.empty(plan.scratch_nbytes, dtype=torch.uint8, device=device)
    encode(plan, total, out, scratch, stats, key)
