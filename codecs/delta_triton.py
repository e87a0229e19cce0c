# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment,misc"
"""delta on a GPU: a program for each tile. specs/delta.md.

Encoding: one launch compares, one lists what has changed and writes what it takes to work memory,
one adds up how many words tiles have, one moves them to where they belong. Decoding: one launch
reads the base, one checks records, checksums and digests of bases, one decodes, one compares
digests of results. In the memory of the base only then is anything written: by one launch changes
that were listed, by a last one those of tiles with more of them.
"""

from __future__ import annotations

import functools

import triton
import triton.language as tl

from ..formats.dtypes import DType
from .common.base import Plan
from .common.dynamic_triton import Parts, add_sums, items, load_raw, share
from .common.frame_triton import (
    BASE_CHUNK,
    CHUNK,
    CHUNK_PAYLOAD,
    LATE,
    check_header,
    check_record,
    check_whole,
    chunk_kind,
    frame_of,
    gaps_of,
    padding_of,
    report,
    static_of,
    touched,
)
from .common.launch_triton import Variant, kernel, options
from .common.minifloat_triton import aligned_for
from .delta import Delta, kind_of, sums_scratch, tile_count
from .delta_decode_triton import (
    GROUP,
    LISTED,
    MASKS,
    PLAIN,
    RAW,
    change_kernel,
    copy,
    fields_of,
    list_of,
    load_words,
    parts_of,
    place_of,
    shift_of,
    words_of,
)
from .delta_encode_triton import measure_kernel, pack_kernel, place_kernel, scan_kernel
from .delta_words_triton import SUMS, TILE, Launch, info_at, keys_of


@triton.jit
def _weigh(base, masks, m, first_word, center, L: tl.constexpr, FULL: tl.constexpr):
    """Terms of the digest of a tile of the base. At `masks` are stored how many elements of each
    group are in each class.
    """
    WORDS: tl.constexpr = 8 * L.item
    ROWS: tl.constexpr = 128 // L.item
    PER: tl.constexpr = 4 // L.item
    terms = tl.zeros([ROWS, WORDS], tl.uint64)
    for at in range(0, TILE if FULL else m, ROWS * GROUP):
        group = at // GROUP + tl.arange(0, ROWS)
        k = group[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
        word = load_words(base, k, m, L, FULL)
        terms += word.to(tl.uint64) * keys_of(first_word + k.to(tl.uint32)).to(tl.uint64)
        if L.classes > 1:
            ones = tl.zeros([ROWS, WORDS], tl.int32)
            fields = fields_of(word, center, L)
            for h in tl.static_range(PER):
                one = (k * 0 + 1) << shift_of(fields, h, center, L)
                ones += one if FULL else tl.where(k * PER + h < m, one, 0)
            counts = tl.sum(ones, 1)
            if FULL:
                tl.store(masks + group, counts)
            else:
                tl.store(masks + group, counts, mask=group * GROUP < m)
    return tl.sum(tl.sum(terms, 1), 0)


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
    """A tile's share of the digest of a chunk's base, and of the checksum terms; the classes of its
    groups.
    """
    pid = tl.program_id(0).to(tl.int64) + first_tile
    chunk, tile, begin, n, m = place_of(pid, nelem, chunk_nelem, tiles)
    sums = scratch_ptr.to(tl.pointer_type(tl.int64)) + chunk * SUMS
    g = (head, static_at, static_stride, dynamic_at, dynamic_stride)
    static_ptr, dynamic_ptr, stride, nbytes, raw = parts_of(
        src_ptr, starts_ptr, chunk, n, g, slot, L
    )
    if m > 0:
        center = m * 0
        if L.classes > 1:
            if raw == 0:
                words, count, _ = words_of(static_ptr, dynamic_ptr, nbytes, tile, begin, n)
                word = tl.load(words, mask=count > 0, other=0).to(tl.int32, bitcast=True)
                center = (word >> 1) & ((1 << L.exponent) - 1)
        first = chunk * chunk_nelem + begin
        if L.aligned:
            first = tl.multiple_of(first, 16)
        base = items(from_ptr, L.item) + first
        masks = info_at(scratch_ptr, sums_words, chunk, tile, tiles) + MASKS
        first_word = (begin // 4 * L.item).to(tl.uint32)
        if m == TILE:
            total = _weigh(base, masks, m, first_word, center, L, True)
        else:
            total = _weigh(base, masks, m, first_word, center, L, False)
        tl.atomic_add(sums + 1, total.to(tl.int64, bitcast=True), sem="relaxed")
    if L.sums:
        total = share(static_ptr, stride, stride * 0, tile, tiles)
        total += share(dynamic_ptr, nbytes, stride // 4, tile, tiles)
        tl.atomic_add(sums, total.to(tl.int64, bitcast=True), sem="relaxed")


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
    """A chunk's record and the digest of its base; of those checked whole padding and checksum;
    once, the header.
    """
    chunk = first_chunk + tl.program_id(0).to(tl.int64)
    if (planned != 0) & (chunk == first_chunk):
        check_header(src_ptr, plan_ptr, status_ptr)
    n, kind_ptr = chunk_kind(plan_ptr, chunk)
    static_ptr = static_of(src_ptr, plan_ptr, chunk)
    stride = tl.load(plan_ptr + 5)
    raw_dynamic = tl.maximum(n * L.item - stride, 0)
    most = tl.minimum(raw_dynamic, slot)
    record = check_record(src_ptr, plan_ptr, status_ptr, chunk, planned, most, raw_dynamic)
    sums = scratch_ptr.to(tl.pointer_type(tl.int64)) + chunk * SUMS
    raw = (tl.load(record + 2) & 1) != 0
    if (chunk >= first_whole) & (chunk < end_whole):
        if raw:
            _, padding = padding_of(static_ptr, tl.minimum(n * L.item, stride), stride)
        else:
            _, padding = gaps_of(static_ptr, kind_ptr)
        if L.packed:
            claimed = tl.load(record + 1)
            used = tl.where((claimed < 0) | (claimed > most), 0, claimed)
            dynamic_ptr = src_ptr + tl.load(starts_ptr + chunk)
            _, behind = padding_of(dynamic_ptr, used, (used + 127) // 128 * 128)
            padding |= behind
        total = tl.load(sums).to(tl.uint64, bitcast=True)
        check_whole(plan_ptr, status_ptr, record, chunk, n, padding, total, L.sums)
    if raw == 0:
        digests = static_ptr.to(tl.pointer_type(tl.int64))
        found = tl.load(sums + 1)
        fits = found == tl.load(digests)
        if L.overwrite:
            fits = fits | (found == tl.load(digests + 1))
        if fits == 0:
            report(status_ptr, CHUNK + (chunk << 8) + BASE_CHUNK)


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
    """Compare the digest of a chunk's result."""
    chunk = first_chunk + tl.program_id(0).to(tl.int64)
    record_ptr = src_ptr.to(tl.pointer_type(tl.int64)) + head + chunk * 4
    if (tl.load(record_ptr + 2) & 1) == 0:
        static_ptr = src_ptr + (static_at + chunk * static_stride) * 128
        sums = scratch_ptr.to(tl.pointer_type(tl.int64)) + chunk * SUMS
        # That of the base, and what changes add.
        found = tl.load(sums + 1) + tl.load(sums + 2)
        if found != tl.load(static_ptr.to(tl.pointer_type(tl.int64)) + 1):
            report(status_ptr, LATE + (chunk << 8) + CHUNK_PAYLOAD)


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
    """Write over a tile of the base, if nothing was found wrong, what is listed, or all of it."""
    pid = tl.program_id(0).to(tl.int64)
    chunk, tile, begin, n, m = place_of(pid, nelem, chunk_nelem, tiles)
    if (m > 0) & (tl.load(status_ptr) == 0):
        out = items(out_ptr, L.item) + (chunk * chunk_nelem + begin)
        info = info_at(scratch_ptr, sums_words, chunk, tile, tiles)
        kind = tl.load(info)
        if kind == LISTED:
            numbers, values = list_of(info, L)
            count = tl.load(info + 1)
            for at in range(0, count, 512):
                k = at + tl.arange(0, 512)
                i = tl.load(numbers + k, mask=k < count, other=0).to(tl.int32)
                tl.store(out + i, tl.load(values + k, mask=k < count, other=0), mask=k < count)
        elif (kind == PLAIN) | (kind == RAW):
            g = (head, static_at, static_stride, dynamic_at, dynamic_stride)
            # fmt: off
            static_ptr, dynamic_ptr, stride, nbytes, _ = parts_of(
                src_ptr, starts_ptr, chunk, n, g, slot, L
            )
            if kind == RAW:
                load_raw(
                    static_ptr, dynamic_ptr, stride, nbytes, n, begin, m, out, m * 0, m, L.item,
                    True,
                )
            # fmt: on
            else:
                words, _, _ = words_of(static_ptr, dynamic_ptr, nbytes, tile, begin, n)
                copy(items(words + 1, L.item), out, m, m * 0, m, L, False)


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
def _variant(
    which, spec: Delta, dtype: DType, warps: int = 4, maxnreg: int | None = None, **values: bool
) -> Variant:
    return Variant(which, options(warps, maxnreg), L=launch_of(spec, dtype, **values))


#: Warps and registers. What lanes tell each other of a tile's changes needs no barrier in one warp.
#: With fewer registers more tiles are in flight.
_CHANGES = 1, 128
_RESULT = Variant(_result_kernel, options(1))
_PLACE = Variant(place_kernel, options(16))


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
    # Fewer registers are more tiles at a time, which wait for memory.
    for which, warps, most in ((scan_kernel, 4, 80), (measure_kernel, 1, 160)):
        variant = _variant(which, spec, dtype, warps, most, aligned=aligned)
        variant.launch(programs, (x, base, scratch), *g.sizes, g.sums_words)
    _PLACE.launch(plan.chunks, (scratch,), *g.sizes, g.sums_words)
    pack = _variant(pack_kernel, spec, dtype, sums=plan.checksum, aligned=aligned)
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
    read = _variant(_read_kernel, spec, dtype, aligned=aligned, **chosen)
    tensors = src, base, scratch, starts
    read.launch(programs, tensors, *g.sizes, first, g.sums_words, *g.places, slot)
    table = frame_of(plan).table(src.device)
    _variant(_check_kernel, spec, dtype, **chosen).launch(
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

    def change(target, near: bool, **values: bool) -> None:
        variant = _variant(
            change_kernel, spec, dtype, *_CHANGES, packed=packed, aligned=near, **values
        )
        tensors = src, base, target, scratch, status, starts
        numbers = start, stop, *g.sizes, place(start), g.sums_words, *g.places, slot
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
        write = _variant(_write_kernel, spec, dtype, packed=packed)
        tensors, numbers = (src, out, scratch, status, starts), (*g.sizes, g.sums_words, *g.places)
        write.launch(g.tiles * plan.chunks, tensors, *numbers, slot)
        change(out, aligned, store=True, known=True)
