# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment,misc"
"""omnireduce on a GPU: which blocks have which slots, then blocks that move. specs/omnireduce.md.

To choose, norms count as integers, which have their order:

1. `_histogram_kernel`, once for each of the four bytes of a norm: how many blocks there are by the
   next byte of those that begin like the smallest one that is kept.
2. `_count_kernel`: of each SPAN of blocks, how many are above that norm, and how many have it.
3. `_place_kernel`: the index, and of each slot the block.

Decoding, the last two read the index, and find of each block the slot. Only blocks that are kept
are read and written; but for norms that is one pass over memory.
"""

from __future__ import annotations

import builtins
import functools

import torch
import triton
import triton.language as tl

from ..formats.dtypes import DType
from ..formats.header import align
from .common.base import Key, Plan
from .common.fill_triton import zero
from .common.frame_triton import (
    CHUNK,
    CHUNK_PAYLOAD,
    Places,
    frame_of,
    report,
    store_element,
    touched,
    weigh,
    weigh_bytes,
)
from .common.gathered_sums_triton import check_sources, launch_sum
from .common.launch_triton import PTX, kernel, program
from .common.merged_triton import merged_functions
from .common.minifloat_triton import aligned_for, converted, elements_at
from .common.norms_triton import agreed, roots
from .common.plans_triton import Launches, Selection, variant_of
from .omnireduce import BINS, LEVELS, SPAN, Omnireduce, workspace

_SPAN, _BINS, _LEVELS = tl.constexpr(SPAN), tl.constexpr(BINS), tl.constexpr(LEVELS)
#: Elements, or cells, of a program that moves them: whole blocks.
_TILE = tl.constexpr(4096)


@triton.jit
def _span_at(member, first_chunk, spans, nelem, chunk_nelem, BLOCK: tl.constexpr):
    """(chunk, number of the span, its blocks, which of them are there, first element, blocks)."""
    chunk = (first_chunk + program(member) // spans).to(tl.int64)
    span = program(member) % spans
    first = chunk * chunk_nelem
    n = tl.maximum(tl.minimum(chunk_nelem, nelem - first), 0)
    blocks = (n + BLOCK - 1) // BLOCK
    block = span.to(tl.int64) * _SPAN + tl.arange(0, _SPAN)
    return chunk, span, block, block < blocks, first, blocks


@triton.jit
def _digits(bins_ptr, chunk, blocks, slots, LEVEL: tl.constexpr):
    """(first LEVEL bytes of the smallest norm that is kept, slots for those that begin so)."""
    left = tl.minimum(blocks, slots).to(tl.int32)
    found = left * 0
    d = tl.arange(0, _BINS)
    bins = bins_ptr.to(tl.pointer_type(tl.int32)) + chunk * (_BINS * _LEVELS)
    for level in tl.static_range(LEVEL):
        count = tl.load(bins + level * _BINS + d)
        from_here = tl.sum(count, 0) - tl.cumsum(count, 0) + count
        digit = tl.sum((from_here >= left).to(tl.int32), 0) - 1
        left -= tl.sum(tl.where(d > digit, count, 0), 0)
        found = (found << 8) | digit
    return found, left


@kernel
def _histogram_kernel(
    norms_ptr,
    bins_ptr,
    nelem: tl.int64,
    chunk_nelem: tl.int64,
    spans: tl.int32,
    norms: tl.int64,
    slots: tl.int64,
    BLOCK: tl.constexpr,
    LEVEL: tl.constexpr,
    member=None,
):
    """Count the blocks of a span by byte LEVEL of their norms, if those before are the chosen."""
    chunk, _, block, here, first, blocks = _span_at(member, 0, spans, nelem, chunk_nelem, BLOCK)
    key = agreed(norms_ptr, norms, first, block, here, BLOCK)
    chosen, _ = _digits(bins_ptr, chunk, blocks, slots, LEVEL)
    if LEVEL > 0:
        here = here & ((key >> (32 - 8 * LEVEL)) == chosen)
    digit = (key >> (24 - 8 * LEVEL)) & 255
    d = tl.arange(0, _BINS)
    # Those that do not count are in the first.
    others = _SPAN - tl.sum(here.to(tl.int32), 0)
    counts = tl.histogram(tl.where(here, digit, 0), _BINS) - tl.where(d == 0, others, 0)
    at = bins_ptr.to(tl.pointer_type(tl.int32)) + chunk * (_BINS * _LEVELS) + LEVEL * _BINS
    tl.atomic_add(at + d, counts, mask=counts > 0, sem="relaxed")


@triton.jit
def _classes(norms_ptr, bins_ptr, chunk, block, here, first, blocks, norms, slots, BLOCK):
    """(blocks above the smallest norm that is kept, those that have it, slots for the latter)."""
    key = agreed(norms_ptr, norms, first, block, here, BLOCK)
    least, ties = _digits(bins_ptr, chunk, blocks, slots, _LEVELS)
    return here & (key > least), here & (key == least) & (key > 0), ties


@triton.jit
def _flags(index_ptr, block, use):
    """Bits of the index, int32; 0 if not `use`."""
    byte = tl.load(index_ptr + (block >> 3), mask=use, other=0).to(tl.int32)
    return (byte >> (block & 7).to(tl.int32)) & 1


@kernel
def _count_kernel(
    norms_ptr,
    bins_ptr,
    data_ptr,
    table_ptr,
    first_chunk: tl.int32,
    nelem: tl.int64,
    chunk_nelem: tl.int64,
    spans: tl.int32,
    norms: tl.int64,
    slots: tl.int64,
    static_at: tl.int64,
    static_stride: tl.int64,
    index_at: tl.int64,
    BLOCK: tl.constexpr,
    ENCODE: tl.constexpr,
    member=None,
):
    """How many blocks of a span are above the smallest norm that is kept, and how many have it.

    Decoding, how many are in the index, and 0.
    """
    chunk, span, block, here, first, blocks = _span_at(
        member, first_chunk, spans, nelem, chunk_nelem, BLOCK
    )
    counts = table_ptr.to(tl.pointer_type(tl.int32)) + (chunk * spans + span) * 2
    if ENCODE:
        above, tie, _ = _classes(
            norms_ptr, bins_ptr, chunk, block, here, first, blocks, norms, slots, BLOCK
        )
        tl.store(counts, tl.sum(above.to(tl.int32), 0))
        tl.store(counts + 1, tl.sum(tie.to(tl.int32), 0))
    else:
        index_ptr = data_ptr + (static_at + chunk * static_stride + index_at) * 128
        tl.store(counts, tl.sum(_flags(index_ptr, block, here), 0))
        tl.store(counts + 1, 0)


@kernel
def _place_kernel(
    norms_ptr,
    bins_ptr,
    data_ptr,
    table_ptr,
    slots_ptr,
    used_ptr,
    sums_ptr,
    status_ptr,
    first_chunk: tl.int32,
    nelem: tl.int64,
    chunk_nelem: tl.int64,
    spans: tl.int32,
    norms: tl.int64,
    slots: tl.int64,
    static_at: tl.int64,
    static_stride: tl.int64,
    index_at: tl.int64,
    chunk_blocks: tl.int64,
    head: tl.int32,
    BLOCK: tl.constexpr,
    ENCODE: tl.constexpr,
    SUMS: tl.constexpr,
    member=None,
):
    """A span's share of the index, and of the block of each slot; how many slots have one.

    Decoding, the slot of each of its blocks, -1 if it has none, and how many cells are in use.
    """
    chunk, span, block, here, first, blocks = _span_at(
        member, first_chunk, spans, nelem, chunk_nelem, BLOCK
    )
    counts = table_ptr.to(tl.pointer_type(tl.int32)) + chunk * spans * 2
    found_ptr = slots_ptr.to(tl.pointer_type(tl.int32)) + chunk * chunk_blocks
    used = used_ptr.to(tl.pointer_type(tl.int64)) + chunk
    index_ptr = data_ptr + (static_at + chunk * static_stride + index_at) * 128
    before = tl.zeros([_SPAN], tl.int32)
    ties_before = tl.zeros([_SPAN], tl.int32)
    at = span * 0
    while at < span:
        other = at + tl.arange(0, _SPAN)
        before += tl.load(counts + 2 * other, mask=other < span, other=0)
        if ENCODE:
            ties_before += tl.load(counts + 2 * other + 1, mask=other < span, other=0)
        at += _SPAN
    slot = tl.sum(before, 0)
    words = index_ptr.to(tl.pointer_type(tl.uint32)) + span * (_SPAN // 32)
    w = tl.arange(0, _SPAN // 32)
    if ENCODE:
        above, tie, ties = _classes(
            norms_ptr, bins_ptr, chunk, block, here, first, blocks, norms, slots, BLOCK
        )
        rank = tl.sum(ties_before, 0)
        one = tie.to(tl.int32)
        slot += tl.minimum(rank, ties)
        kept = (above | (tie & (rank + tl.cumsum(one, 0) - one < ties))).to(tl.int32)
        to = slot + tl.cumsum(kept, 0) - kept
        tl.store(found_ptr + to, block.to(tl.int32), mask=kept != 0)
        placed = tl.reshape(kept, [_SPAN // 32, 32]) << tl.arange(0, 32)[None, :]
        word = tl.sum(placed, 1).to(tl.uint32, bitcast=True)
        tl.store(words + w, word)
        slot += tl.sum(kept, 0)
        if span == spans - 1:
            tl.store(used, slot.to(tl.int64))
    else:
        kept = _flags(index_ptr, block, here)
        to = slot + tl.cumsum(kept, 0) - kept
        to = tl.where((kept != 0) & (to < slots), to, -1)
        tl.store(found_ptr + block, to, mask=here)
        word = tl.load(words + w)
        slot += tl.sum(kept, 0)
        in_last_byte = (block >= blocks) & (block < (blocks + 7) // 8 * 8)
        wrong = tl.sum(_flags(index_ptr, block, in_last_byte), 0)
        if span == spans - 1:
            wrong |= (slot > slots).to(tl.int32)
            cells = slot.to(tl.int64) * BLOCK
            if blocks > 0:
                last = _flags(index_ptr, blocks - 1, blocks > 0)
                n = tl.minimum(chunk_nelem, nelem - first)
                cells -= last * (blocks * BLOCK - n)
            tl.store(used, cells)
        if wrong != 0:
            report(status_ptr, CHUNK + (chunk << 8) + CHUNK_PAYLOAD)
    if SUMS:
        total = tl.sum(weigh(word, index_at * 32 + span * (_SPAN // 32) + w), 0)
        if ENCODE:
            to_sum = data_ptr.to(tl.pointer_type(tl.int64)) + head + chunk * 4
        else:
            to_sum = sums_ptr + chunk
        tl.atomic_add(to_sum, total.to(tl.int64, bitcast=True), sem="relaxed")


@triton.jit
def _terms(cell, at, ITEM: tl.constexpr):
    """The checksum of cells of a chunk's payload, shape [n, m]."""
    if ITEM == 2:
        terms = weigh_bytes(cell, at * 2)
    else:
        terms = weigh(cell, at)
    return tl.sum(tl.sum(terms, 1), 0)


@kernel
def _encode_kernel(
    x_ptr,
    out_ptr,
    slots_ptr,
    used_ptr,
    nelem: tl.int64,
    chunk_nelem: tl.int64,
    chunk_blocks: tl.int64,
    slots: tl.int64,
    tiles: tl.int32,
    head: tl.int32,
    static_at: tl.int64,
    static_stride: tl.int64,
    BLOCK: tl.constexpr,
    EXP: tl.constexpr,
    ITEM: tl.constexpr,
    CELL_EXP: tl.constexpr,
    CELL_ITEM: tl.constexpr,
    ALIGNED: tl.constexpr,
    PTX: tl.constexpr,
    SUMS: tl.constexpr,
    member=None,
):
    """Fill some slots of a chunk."""
    ROWS: tl.constexpr = _TILE // BLOCK
    chunk = (program(member) // tiles).to(tl.int64)
    tile = (program(member) % tiles).to(tl.int64)
    first = chunk * chunk_nelem
    if ALIGNED:
        first = tl.multiple_of(first, 16)
    n = tl.maximum(tl.minimum(chunk_nelem, nelem - first), 0)
    slot = tile * ROWS + tl.arange(0, ROWS)
    used = tl.load(used_ptr.to(tl.pointer_type(tl.int64)) + chunk)
    blocks = slots_ptr.to(tl.pointer_type(tl.int32)) + chunk * chunk_blocks
    block = tl.load(blocks + slot, mask=slot < used, other=-1).to(tl.int64)
    j = tl.arange(0, BLOCK)[None, :]
    i = block[:, None] * BLOCK + j
    x = elements_at(x_ptr, ITEM) + first
    if (tl.max(block, 0) + 1) * BLOCK <= n:
        v = tl.load(x + i, mask=(block >= 0)[:, None], other=0)
    else:
        v = tl.load(x + i, mask=(block >= 0)[:, None] & (i < n), other=0)
    cell = converted(v, EXP, ITEM, CELL_EXP, CELL_ITEM, PTX)
    at = slot[:, None] * BLOCK + j
    static_ptr = out_ptr + (static_at + chunk * static_stride) * 128
    store_element(static_ptr, at, cell, (slot < slots)[:, None], CELL_EXP, CELL_ITEM, 0)
    if SUMS:
        total = _terms(cell, at, CELL_ITEM)
        record = out_ptr.to(tl.pointer_type(tl.int64)) + head + chunk * 4
        tl.atomic_add(record, total.to(tl.int64, bitcast=True), sem="relaxed")


@triton.jit
def _cells(payload, slots_ptr, chunk, chunk_nelem, block, n, BLOCK: tl.constexpr):
    """(cells of blocks of a chunk, 0 of those without slots, and their numbers)."""
    blocks = (chunk_nelem + BLOCK - 1) // BLOCK
    found_ptr = slots_ptr.to(tl.pointer_type(tl.int32)) + chunk * blocks
    slot = tl.load(found_ptr + block, mask=block * BLOCK < n, other=-1).to(tl.int64)
    at = slot[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    return tl.load(payload + at, mask=(slot >= 0)[:, None], other=0), at


@triton.jit
def _read(static_ptr, work_ptr, table_ptr, t, block, at, chunk_nelem, more, F: tl.constexpr):
    """READER: see gathered_sums_triton. `at`: where in the work memory slots are, by 128 bytes."""
    BLOCK: tl.constexpr = F.row
    chunk, _, _, n = t
    payload = elements_at(static_ptr, F.cell_item)
    v, _ = _cells(payload, work_ptr + at * 128, chunk, chunk_nelem, block, n, BLOCK)
    return converted(v, F.cell_exponent, F.cell_item, F.exponent, F.item, F.ptx)


@kernel
def _decode_kernel(
    src_ptr,
    out_ptr,
    slots_ptr,
    used_ptr,
    sums_ptr,
    status_ptr,
    start: tl.int64,
    stop: tl.int64,
    first_chunk: tl.int32,
    nelem: tl.int64,
    chunk_nelem: tl.int64,
    slots: tl.int64,
    static_stride: tl.int64,
    BLOCK: tl.constexpr,
    EXP: tl.constexpr,
    ITEM: tl.constexpr,
    CELL_EXP: tl.constexpr,
    CELL_ITEM: tl.constexpr,
    ALIGNED: tl.constexpr,
    ADD: tl.constexpr,
    STORE: tl.constexpr,
    PTX: tl.constexpr,
    SUMS: tl.constexpr,
    member=None,
):
    """Elements `start` to `stop` of the tensor as far as they lie in one tile of one chunk.

    `src_ptr` is the first static part. The program also looks whether cells are zero of those of a
    tile that no element has.
    """
    ROWS: tl.constexpr = _TILE // BLOCK
    tiles = tl.maximum((chunk_nelem + _TILE - 1) // _TILE, 1).to(tl.int32)
    chunk = (first_chunk + program(member) // tiles).to(tl.int64)
    tile = (program(member) % tiles).to(tl.int64)
    first = chunk * chunk_nelem
    n = tl.maximum(tl.minimum(chunk_nelem, nelem - first), 0)
    static_ptr = src_ptr + chunk * static_stride * 128
    payload = elements_at(static_ptr, CELL_ITEM)
    to = first - start
    if ALIGNED:
        to = tl.multiple_of(to, 16)
    lo = tl.maximum(start - first, 0)
    hi = tl.minimum(stop - first, n)
    begin = tile * _TILE
    end = begin + _TILE
    j = tl.arange(0, BLOCK)[None, :]
    block = tile * ROWS + tl.arange(0, ROWS)
    total = tl.full([], 0, tl.uint64)
    if SUMS | ((begin < hi) & (end > lo)):
        v, at = _cells(payload, slots_ptr, chunk, chunk_nelem, block, n, BLOCK)
        total += _terms(v, at, CELL_ITEM)
        if STORE:
            bits = converted(v, CELL_EXP, CELL_ITEM, EXP, ITEM, PTX)
            i = block[:, None] * BLOCK + j
            if (begin >= lo) & (end <= hi):
                store_element(out_ptr, to + i, bits, None, EXP, ITEM, ADD)
            else:
                store_element(out_ptr, to + i, bits, (i >= lo) & (i < hi), EXP, ITEM, ADD)
    used = tl.load(used_ptr.to(tl.pointer_type(tl.int64)) + chunk)
    cells = slots * BLOCK
    if (begin < cells) & (end > used):
        at = block[:, None] * BLOCK + j
        v = tl.load(payload + at, mask=(at >= used) & (at < cells), other=0)
        if tl.max(tl.max((v != 0).to(tl.int32), 1), 0) != 0:
            report(status_ptr, CHUNK + (chunk << 8) + CHUNK_PAYLOAD)
        # Those of the last slot in use are summed already.
        total += _terms(tl.where(at >= (used + BLOCK - 1) // BLOCK * BLOCK, v, 0), at, CELL_ITEM)
    if SUMS:
        tl.atomic_add(sums_ptr + chunk, total.to(tl.int64, bitcast=True), sem="relaxed")


class Slots(Launches):
    """What a plan's kernels take; `norms` and `blocks` are blocks of the tensor and of a chunk."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        spec = self.spec
        self.norms = spec.blocks(plan.nelem)
        self.blocks, self.slots = spec.blocks(plan.chunk_nelem), spec.slots(plan.chunk_nelem)
        self.spans = max(1, -(-self.blocks // SPAN))
        self.parts = workspace(spec, plan.chunk_nelem, plan.chunks)

    def place(self, plan: Plan, data, norms, parts, status, first: int, end: int, sums) -> None:
        """Find the slots of chunks `first` to `end`: by norms, with a `status` by the index."""
        totals, used, bins, counts, found = parts
        encode = status is None
        programs = self.spans * (end - first)
        numbers = *self.sizes, self.spans, self.norms, self.slots
        where = *self.static, self.second
        values = {"BLOCK": self.spec.block, "ENCODE": encode}
        count = variant_of(_count_kernel, **values)
        count.launch(programs, (norms, bins, data, counts), first, *numbers, *where)
        status = totals if encode else status
        tensors = norms, bins, data, counts, found, used, totals, status
        place = variant_of(_place_kernel, **values, SUMS=sums)
        place.launch(programs, tensors, first, *numbers, *where, self.blocks, self.head)


@functools.cache
def _types(spec: Omnireduce, dtype: DType) -> dict[str, int | bool]:
    cell = spec.cell_dtype(dtype)
    own = {"BLOCK": spec.block, "EXP": dtype.exponent, "ITEM": dtype.itemsize, "PTX": PTX}
    return own | {"CELL_EXP": cell.exponent, "CELL_ITEM": cell.itemsize}


def measure(spec: Omnireduce, dtype: DType, x: torch.Tensor) -> torch.Tensor:
    """As `Omnireduce.measure`, float32, on the device of `x`."""
    found = torch.empty(spec.blocks(x.numel()), dtype=torch.float32, device=x.device)
    roots(dtype, x, spec.block, 1.0, found)
    return found


def encode(plan: Plan, x, out, scratch, stats=None, key: Key | None = None) -> None:
    """Encode the elements of `x` into `out`; see `tightwire.gpu` for the contract."""
    g = Slots.of(plan)
    *parts, measured = g.split(scratch)
    if stats is None:
        stats = measured.view(torch.float32)[: g.norms]
        roots(plan.dtype, x, g.spec.block, 1.0, stats)
    elif stats.numel() != g.norms:
        raise ValueError(f"stats have {stats.numel()} norms; allowed: {g.norms} for {plan.shape}")
    norms = stats.view(torch.uint8)
    _, used, bins, _, found = parts
    frame_of(plan).begin(out, bins)
    for level in range(LEVELS):
        histogram = variant_of(_histogram_kernel, BLOCK=g.spec.block, LEVEL=level)
        histogram.launch(g.spans * plan.chunks, (norms, bins), *g.sizes, g.spans, g.norms, g.slots)
    g.place(plan, out, norms, parts, None, 0, plan.chunks, plan.checksum)
    tiles = _tiles(g.slots * g.spec.block)
    types = _types(g.spec, plan.dtype)
    types = types | {"ALIGNED": aligned_for(plan, x), "SUMS": plan.checksum}
    variant = variant_of(_encode_kernel, 8, **types)
    numbers = *g.sizes, g.blocks, g.slots, tiles, g.head, *g.static
    variant.launch(tiles * plan.chunks, (x, out, found, used), *numbers)


def _tiles(nelem: int) -> int:
    return max(1, -(-nelem // int(_TILE.value)))


def decode(plan: Plan, src, out, scratch, status, **selection) -> None:
    """Decode elements into `out`; see `tightwire.gpu` for the contract."""
    g, chosen = Slots.of(plan), Selection.of(plan, selection)
    start, stop = chosen.start, chosen.stop
    *parts, _ = g.split(scratch)
    totals, used, _, _, found = parts
    sums = chosen.check and plan.checksum and start < stop
    first, end, _, _ = touched(plan, start, stop)
    if sums:
        zero(totals)
    if start < stop:
        g.place(plan, src, src, parts, status, first, end, sums)
        adding = out.element_size() if chosen.add else 0
        even = out is not None and aligned_for(plan, out, start)
        values = _types(g.spec, plan.dtype) | {"ADD": adding, "STORE": chosen.store, "SUMS": sums}
        variant = variant_of(_decode_kernel, 8, **values, ALIGNED=even)
        tensors = src, src if out is None else out, found, used, totals, status
        programs = _tiles(plan.chunk_nelem) * (end - first)
        numbers = start, stop, first, *g.sizes, g.slots, g.static[1]
        variant.launch(programs, tensors, *numbers, offsets=(plan.static_offset, 0, 0, 0, 0, 0))
    chosen.check_frame(plan, src, totals, status, sums)


encode_many, decode_many = merged_functions(encode, decode)


def sum(plan: Plan, places: Places, out, *, planned=True, **terms) -> None:
    """Add up buffers; see `tightwire.gpu_many` for the contract."""
    g, work = Slots.of(plan), check_sources(plan, places, decode, planned)
    *before, _, _ = g.parts
    launch_sum(
        _read,
        plan,
        places,
        out,
        work.whole,
        align(plan.scratch_nbytes),
        row=g.spec.block,
        cell=g.spec.cell_dtype(plan.dtype),
        numbers=(builtins.sum(before) // 128, plan.chunk_nelem, 0),
        **terms,
    )
