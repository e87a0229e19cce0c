# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment,misc"
"""delta on a GPU: a program for each tile. specs/delta.md.

Encoding: one launch compares, one lists what has changed and writes what it takes to work memory,
one adds up how many words tiles have, one moves them to where they belong. Decoding: one launch
reads the base, one checks records, checksums and digests of bases, one decodes, one compares
digests of results. In the memory of the base only then is anything written: by one launch changes
that were listed, by a last one those of tiles with more of them. In the form adaptive a launch
behind each of those that measure, write and decode does so with tiles of planes.
"""

from __future__ import annotations

import functools

import triton.language as tl

from ..formats.dtypes import DType
from .common.base import Plan
from .common.dynamic_triton import Parts, add_sums, chunk_at
from .common.frame_triton import check_header, frame_of, touched
from .common.launch_triton import Variant, kernel, options
from .common.minifloat_triton import aligned_for
from .delta import Delta, kind_of, sums_scratch, tile_count
from .delta_decode_triton import change_one, part_of
from .delta_encode_triton import Target, measure_one, pack_one, place_one, scan_one
from .delta_planes_triton import flip_one, size_one, write_planes_one
from .delta_read_triton import check_one, read_one, result_one, write_one
from .delta_words_triton import SUMS, TILE, Launch, tile_of


@kernel
def _scan_kernel(
    x_ptr,
    from_ptr,
    scratch_ptr,
    nelem: tl.int64,
    chunk_nelem: tl.int64,
    tiles: tl.int32,
    sums_words: tl.int64,
    L: tl.constexpr,
):
    """See `scan_one`."""
    t = tile_of(tl.program_id(0), nelem, chunk_nelem, tiles, scratch_ptr, sums_words)
    scan_one(x_ptr, from_ptr, t, L)


@kernel
def _measure_kernel(
    x_ptr,
    from_ptr,
    scratch_ptr,
    nelem: tl.int64,
    chunk_nelem: tl.int64,
    tiles: tl.int32,
    sums_words: tl.int64,
    L: tl.constexpr,
):
    """See `measure_one`."""
    t = tile_of(tl.program_id(0), nelem, chunk_nelem, tiles, scratch_ptr, sums_words)
    measure_one(x_ptr, from_ptr, t, L)


@kernel
def _size_kernel(
    x_ptr,
    from_ptr,
    scratch_ptr,
    nelem: tl.int64,
    chunk_nelem: tl.int64,
    tiles: tl.int32,
    sums_words: tl.int64,
    L: tl.constexpr,
):
    """See `size_one`."""
    t = tile_of(tl.program_id(0), nelem, chunk_nelem, tiles, scratch_ptr, sums_words)
    size_one(x_ptr, from_ptr, t, L)


@kernel
def _place_kernel(
    scratch_ptr,
    nelem: tl.int64,
    chunk_nelem: tl.int64,
    tiles: tl.int32,
    sums_words: tl.int64,
):
    """See `place_one`."""
    pid = tl.program_id(0).to(tl.int64)
    t = tile_of(pid * tiles, nelem, chunk_nelem, tiles, scratch_ptr, sums_words)
    place_one(t.info, t.sums, tiles)


@kernel
def _pack_kernel(
    x_ptr,
    from_ptr,
    out_ptr,
    scratch_ptr,
    nelem: tl.int64,
    chunk_nelem: tl.int64,
    tiles: tl.int32,
    sums_words: tl.int64,
    head: tl.int32,
    static_at: tl.int64,
    static_stride: tl.int64,
    dynamic_at: tl.int64,
    dynamic_stride: tl.int64,
    L: tl.constexpr,
):
    """See `pack_one`."""
    t = tile_of(tl.program_id(0), nelem, chunk_nelem, tiles, scratch_ptr, sums_words)
    g = (head, static_at, static_stride, dynamic_at, dynamic_stride)
    _, _, static_ptr, dynamic_ptr, record_ptr = chunk_at(out_ptr, t.chunk, nelem, chunk_nelem, g)
    target = Target(static_ptr, dynamic_ptr, record_ptr, static_stride * 128, dynamic_stride * 128)
    pack_one(x_ptr, from_ptr, t, target, L)


@kernel
def _write_planes_kernel(
    x_ptr,
    from_ptr,
    out_ptr,
    scratch_ptr,
    nelem: tl.int64,
    chunk_nelem: tl.int64,
    tiles: tl.int32,
    sums_words: tl.int64,
    head: tl.int32,
    static_at: tl.int64,
    static_stride: tl.int64,
    dynamic_at: tl.int64,
    dynamic_stride: tl.int64,
    L: tl.constexpr,
):
    """See `write_planes_one`."""
    t = tile_of(tl.program_id(0), nelem, chunk_nelem, tiles, scratch_ptr, sums_words)
    g = (head, static_at, static_stride, dynamic_at, dynamic_stride)
    _, _, static_ptr, dynamic_ptr, record_ptr = chunk_at(out_ptr, t.chunk, nelem, chunk_nelem, g)
    target = Target(static_ptr, dynamic_ptr, record_ptr, static_stride * 128, dynamic_stride * 128)
    write_planes_one(x_ptr, from_ptr, t, target, L)


@kernel
def _read_kernel(
    src_ptr,
    from_ptr,
    scratch_ptr,
    starts_ptr,
    nelem: tl.int64,
    chunk_nelem: tl.int64,
    tiles: tl.int32,
    first_tile: tl.int64,
    sums_words: tl.int64,
    head: tl.int32,
    static_at: tl.int64,
    static_stride: tl.int64,
    dynamic_at: tl.int64,
    dynamic_stride: tl.int64,
    slot: tl.int64,
    L: tl.constexpr,
):
    """See `read_one`."""
    pid = tl.program_id(0).to(tl.int64) + first_tile
    t = tile_of(pid, nelem, chunk_nelem, tiles, scratch_ptr, sums_words)
    g = (head, static_at, static_stride, dynamic_at, dynamic_stride)
    read_one(t, part_of(src_ptr, starts_ptr, t, g, slot, L), from_ptr, L)


@kernel
def _check_kernel(
    src_ptr,
    plan_ptr,
    scratch_ptr,
    status_ptr,
    starts_ptr,
    first_chunk: tl.int64,
    first_whole: tl.int64,
    end_whole: tl.int64,
    planned: tl.int32,
    slot: tl.int64,
    L: tl.constexpr,
):
    """See `check_one`; once, the header."""
    chunk = first_chunk + tl.program_id(0).to(tl.int64)
    if (planned != 0) & (chunk == first_chunk):
        check_header(src_ptr, plan_ptr, status_ptr)
    sums = scratch_ptr.to(tl.pointer_type(tl.int64)) + chunk * SUMS
    whole = (chunk >= first_whole) & (chunk < end_whole)
    dynamic_ptr = src_ptr
    if L.packed:
        dynamic_ptr += tl.load(starts_ptr + chunk)
    check_one(src_ptr, plan_ptr, status_ptr, chunk, sums, dynamic_ptr, whole, planned, slot, L)


@kernel
def _change_kernel(
    src_ptr,
    from_ptr,
    out_ptr,
    scratch_ptr,
    status_ptr,
    starts_ptr,
    start: tl.int64,
    stop: tl.int64,
    nelem: tl.int64,
    chunk_nelem: tl.int64,
    tiles: tl.int32,
    first_tile: tl.int64,
    sums_words: tl.int64,
    head: tl.int32,
    static_at: tl.int64,
    static_stride: tl.int64,
    dynamic_at: tl.int64,
    dynamic_stride: tl.int64,
    slot: tl.int64,
    L: tl.constexpr,
):
    """See `change_one`; elements `start` to `stop` of the tensor are wanted."""
    pid = tl.program_id(0).to(tl.int64) + first_tile
    t = tile_of(pid, nelem, chunk_nelem, tiles, scratch_ptr, sums_words)
    g = (head, static_at, static_stride, dynamic_at, dynamic_stride)
    p = part_of(src_ptr, starts_ptr, t, g, slot, L)
    lo = tl.minimum(tl.maximum(start - t.first, 0), t.m).to(tl.int32)
    hi = tl.minimum(tl.maximum(stop - t.first, 0), t.m).to(tl.int32)
    change_one(t, p, from_ptr, out_ptr, t.first - start, lo, hi, status_ptr, L)


@kernel
def _flip_kernel(
    src_ptr,
    from_ptr,
    out_ptr,
    scratch_ptr,
    status_ptr,
    starts_ptr,
    start: tl.int64,
    stop: tl.int64,
    nelem: tl.int64,
    chunk_nelem: tl.int64,
    tiles: tl.int32,
    first_tile: tl.int64,
    sums_words: tl.int64,
    head: tl.int32,
    static_at: tl.int64,
    static_stride: tl.int64,
    dynamic_at: tl.int64,
    dynamic_stride: tl.int64,
    slot: tl.int64,
    L: tl.constexpr,
):
    """See `flip_one`; elements `start` to `stop` of the tensor are wanted."""
    pid = tl.program_id(0).to(tl.int64) + first_tile
    t = tile_of(pid, nelem, chunk_nelem, tiles, scratch_ptr, sums_words)
    g = (head, static_at, static_stride, dynamic_at, dynamic_stride)
    p = part_of(src_ptr, starts_ptr, t, g, slot, L)
    lo = tl.minimum(tl.maximum(start - t.first, 0), t.m).to(tl.int32)
    hi = tl.minimum(tl.maximum(stop - t.first, 0), t.m).to(tl.int32)
    flip_one(t, p, from_ptr, out_ptr, t.first - start, lo, hi, status_ptr, L)


@kernel
def _result_kernel(
    src_ptr,
    scratch_ptr,
    status_ptr,
    first_chunk: tl.int64,
    head: tl.int32,
    static_at: tl.int64,
    static_stride: tl.int64,
):
    """See `result_one`."""
    chunk = first_chunk + tl.program_id(0).to(tl.int64)
    record_ptr = src_ptr.to(tl.pointer_type(tl.int64)) + head + chunk * 4
    static_ptr = src_ptr + (static_at + chunk * static_stride) * 128
    sums = scratch_ptr.to(tl.pointer_type(tl.int64)) + chunk * SUMS
    result_one(record_ptr, static_ptr, sums, chunk, status_ptr)


@kernel
def _write_kernel(
    src_ptr,
    out_ptr,
    scratch_ptr,
    status_ptr,
    starts_ptr,
    nelem: tl.int64,
    chunk_nelem: tl.int64,
    tiles: tl.int32,
    sums_words: tl.int64,
    head: tl.int32,
    static_at: tl.int64,
    static_stride: tl.int64,
    dynamic_at: tl.int64,
    dynamic_stride: tl.int64,
    slot: tl.int64,
    L: tl.constexpr,
):
    """See `write_one`."""
    pid = tl.program_id(0).to(tl.int64)
    t = tile_of(pid, nelem, chunk_nelem, tiles, scratch_ptr, sums_words)
    g = (head, static_at, static_stride, dynamic_at, dynamic_stride)
    write_one(t, part_of(src_ptr, starts_ptr, t, g, slot, L), out_ptr, status_ptr, L)


@functools.cache
def launch_of(spec: Delta, dtype: DType, **values: bool) -> Launch:
    """The `Launch` of a codec and dtype, with more `values`."""
    kind = kind_of(dtype)
    overwrite = spec.form == "overwrite"
    classes = 1 if overwrite else kind.classes
    lanes = 1 if classes == 1 else 8
    form = kind.width // 8, kind.exponent, kind.mantissa, kind.scale_bits, classes, lanes
    return Launch(*form, kind.signed, overwrite, **values)


@functools.cache
def variant_of(
    which, spec: Delta, dtype: DType, warps: int = 4, maxnreg: int | None = None, **values: bool
) -> Variant:
    """A kernel for a codec and dtype, with more `values` of its `Launch`."""
    return Variant(which, options(warps, maxnreg), L=launch_of(spec, dtype, **values))


#: Warps and registers. What lanes tell each other of a tile's changes needs no barrier in one warp.
#: With fewer registers more tiles are in flight, which wait for memory.
SCAN, MEASURE, CHANGES = (4, 80), (1, 160), (1, 128)
#: Those of tiles of planes, which look at all elements, and of what writes them.
PLANES, WRITE_PLANES = (4, 96), (4, 128)
_RESULT = Variant(_result_kernel, options(1))
_PLACE = Variant(_place_kernel, options(16))


class _Launches:
    """What kernels are told about a plan."""

    def __init__(self, plan: Plan) -> None:
        self.tiles = max(tile_count(plan.chunk_nelem), 1)
        self.sums_nbytes = sums_scratch(plan.chunks)
        self.sums_words = self.sums_nbytes // 4
        self.parts = Parts.of(plan)
        self.places = self.parts.places
        self.sizes = *self.parts.sizes, self.tiles


def _launches(plan: Plan) -> _Launches:
    found = plan.__dict__.get("_delta_launches")
    if found is None:
        found = plan.__dict__["_delta_launches"] = _Launches(plan)
    return found


def is_adaptive(spec) -> bool:
    """Whether tiles may be planes."""
    return bool(spec.form == "adaptive")


def supports(dtype: DType) -> bool:
    """Elements of 8 bytes are coded on the host."""
    return dtype.itemsize <= 4


def encode(plan: Plan, x, out, scratch, stats=None, key=None, *, base) -> None:
    """Encode the elements of `x` against those of `base`; see `tightwire.gpu` for the contract."""
    spec, dtype, g = plan.codec, plan.dtype, _launches(plan)
    frame_of(plan).begin(out, scratch, g.sums_nbytes)
    if not plan.nelem:
        return
    programs = g.tiles * plan.chunks
    aligned = aligned_for(plan, x) and aligned_for(plan, base)
    adaptive = is_adaptive(spec)
    measured = [(_scan_kernel, SCAN, False), (_measure_kernel, MEASURE, adaptive)]
    packing = [variant_of(_pack_kernel, spec, dtype, sums=plan.checksum, aligned=aligned)]
    if adaptive:
        measured.append((_size_kernel, PLANES, False))
        write = variant_of(_write_planes_kernel, spec, dtype, *WRITE_PLANES, aligned=aligned)
        packing.append(write)
    for which, chosen, counts in measured:
        variant = variant_of(which, spec, dtype, *chosen, aligned=aligned, adaptive=counts)
        variant.launch(programs, (x, base, scratch), *g.sizes, g.sums_words)
    _PLACE.launch(plan.chunks, (scratch,), *g.sizes, g.sums_words)
    for pack in packing:
        pack.launch(programs, (x, base, out, scratch), *g.sizes, g.sums_words, *g.places)
    if plan.checksum:
        add_sums(plan, g.parts, out, g.tiles)


def decode(
    plan: Plan,
    src,
    out,
    scratch,
    status,
    *,
    base,
    start: int = 0,
    stop: int | None = None,
    check: bool = True,
    dynamic_starts=None,
    store: bool = True,
    planned: bool = True,
    in_place: bool = False,
) -> None:
    """Decode elements `start` to `stop` into `out`; see `tightwire.gpu` for the contract.

    `in_place`: `out` is the memory of `base`, all of it.
    """
    spec, dtype, g = plan.codec, plan.dtype, _launches(plan)
    stop = plan.nelem if stop is None else stop
    packed = dynamic_starts is not None
    starts = dynamic_starts if packed else status
    slot = plan.raw_dynamic(0) if packed else plan.dynamic_stride
    sums = check and plan.checksum
    scratch[: g.sums_nbytes].zero_()
    begin, end, first_whole, end_whole = touched(plan, start, stop)
    chosen = {"packed": packed, "sums": sums}
    # The digest is that of all of a chunk's base.
    first, programs = begin * g.tiles, (end - begin) * g.tiles
    aligned = aligned_for(plan, base)
    read = variant_of(_read_kernel, spec, dtype, aligned=aligned, **chosen)
    tensors = src, base, scratch, starts
    read.launch(programs, tensors, *g.sizes, first, g.sums_words, *g.places, slot)
    table = frame_of(plan).table(src.device)
    variant_of(_check_kernel, spec, dtype, **chosen).launch(
        end - begin,
        (src, table, scratch, status, starts),
        begin,
        first_whole,
        end_whole if check else first_whole,
        int(planned),
        slot,
    )

    def place(i: int) -> int:
        size = plan.chunk_nelem
        return i // size * g.tiles + i % size // int(TILE.value)

    adaptive = is_adaptive(spec)
    changing = [(_change_kernel, CHANGES)] + adaptive * [(_flip_kernel, PLANES)]

    def change(target, near: bool, **values: bool) -> None:
        values |= {"packed": packed, "aligned": near, "adaptive": adaptive}
        tensors = src, base, target, scratch, status, starts
        numbers = start, stop, *g.sizes, place(start), g.sums_words, *g.places, slot
        for which, chosen in changing:
            variant = variant_of(which, spec, dtype, *chosen, **values)
            variant.launch(place(stop - 1) + 1 - place(start), tensors, *numbers)

    apart = store and not in_place
    if start < stop:
        if apart:
            change(out, aligned and aligned_for(plan, out, start), store=True)
        else:
            change(src, aligned, store=False)
    if first_whole < end_whole:
        numbers = first_whole, *g.places[:3]
        _RESULT.launch(end_whole - first_whole, (src, scratch, status), *numbers)
    if store and in_place and start < stop:
        write = variant_of(_write_kernel, spec, dtype, packed=packed)
        tensors, numbers = (src, out, scratch, status, starts), (*g.sizes, g.sums_words, *g.places)
        write.launch(g.tiles * plan.chunks, tensors, *numbers, slot)
        change(out, aligned, store=True, known=True)
