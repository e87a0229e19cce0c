# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment,misc"
"""lhc on a GPU: cells of what is peeled, and sums of estimates without atomics. specs/lhc.md.

What is peeled lhc_peeling_triton finds. Peeled elements go to their own cells; those that are left
are added up by cells, which gather them in the order of the page.
"""

from __future__ import annotations

import functools

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
)
from .common.gathered_sums_triton import check_sources, launch_sum
from .common.launch_triton import PTX, kernel
from .common.merged_triton import merged_functions
from .common.minifloat import INFINITY, NAN
from .common.minifloat_triton import aligned_for, converted, elements_at, narrow, widen
from .common.plans_triton import Selection, variant_of
from .lhc import BLOCK, HASHES, LEFT
from .lhc_peeling_triton import (
    BLOCK_WORDS,
    OF_BUFFER,
    OF_ELEMENTS,
    OF_STATS,
    PROGRAMS,
    ROUND_BLOCKS,
    WORD,
    WORDS,
    Shape,
    bits_set,
    chunk_at,
    elements_of,
    index_of,
    list_at,
    peel_chunks,
    places_at,
    planes_of,
    program_of,
    read_index,
    rotated,
    spread,
    state_at,
    tiles_of,
    words_of,
)
from .lhc_peeling_triton import measure as measure
from .lhc_peeling_triton import peeling as peeling

_BLOCK, _HASHES, _LEFT = tl.constexpr(BLOCK), tl.constexpr(HASHES), tl.constexpr(LEFT)
_MAGNITUDE = tl.constexpr((1 << 31) - 1)
_INFINITY, _NAN = tl.constexpr(INFINITY), tl.constexpr(NAN)
#: A program's share of the words of a static part when they are summed.
_SUMMED = tl.constexpr(4096)


@triton.jit
def _places(table, word, a, b, inside):
    """What the table has of the own cells of elements; those of hash 0 for the others."""
    at = table + word // BLOCK_WORDS * _HASHES
    first = tl.load(at, mask=inside, other=0)[:, None]
    second = tl.load(at + 1, mask=inside, other=0)[:, None]
    third = tl.load(at + 2, mask=inside, other=0)[:, None]
    in_a = spread(a & (a ^ b))
    in_b = spread(b & (a ^ b))
    return tl.where(in_a, second, tl.where(in_b, third, first)), first, second, third


@triton.jit
def _cell(place, i):
    """The numbers of the cells of elements `i` in places of the table."""
    return (place >> 9) * _BLOCK + ((i + (place >> 1)) & (_BLOCK - 1))


@triton.jit
def _lowest(bits, PTX: tl.constexpr):
    """The numbers of the lowest bits of words that are set; of words 0 some number."""
    low = bits & (~bits + 1)
    if PTX:
        return tl.inline_asm_elementwise(
            "bfind.u32 $0, $1;", "=r,r", (low,), dtype=tl.uint32, is_pure=True, pack=1
        )
    else:
        return bits_set(low - 1)


@triton.jit
def _next_own(x, todo, places, in_a, in_b, word, ITEM: tl.constexpr, PTX: tl.constexpr):
    """Of each word the lowest element in `todo`: its bits, its cell, and `todo` without it."""
    first, second, third = places
    bit = _lowest(todo, PTX) & 31
    a, b = ((in_a >> bit) & 1) != 0, ((in_b >> bit) & 1) != 0
    place = tl.where(a, tl.where(b, first, second), third)
    i = word * WORD + bit.to(tl.int32)
    v = tl.load(x + i, mask=todo != 0, other=0)
    return v, _cell(place, i), todo & (todo - 1)


@kernel
def _scatter_kernel(
    x_ptr,
    out_ptr,
    table_ptr,
    work_ptr,
    state_ptr,
    chunks: tl.int64,
    nelem: tl.int64,
    chunk_nelem: tl.int64,
    blocks: tl.int64,
    sketch_blocks: tl.int64,
    tiles: tl.int64,
    head: tl.int32,
    static_at: tl.int64,
    static_stride: tl.int64,
    EXP: tl.constexpr,
    ITEM: tl.constexpr,
    CELL_EXP: tl.constexpr,
    CELL_ITEM: tl.constexpr,
    ALIGNED: tl.constexpr,
    GIVEN: tl.constexpr,
    PTX: tl.constexpr,
    member=None,
):
    """Store elements in their own cells, a tile of them. All cells are zero.

    A thread has a word of the bitmaps, and goes through the elements that are peeled, two at a
    time: few are. Says in the state if a chunk has elements to estimate, and, of an index that was
    GIVEN, in the chunk's record if an element is not zero and not in it.
    """
    chunk, tile = program_of(member, 0, tiles)
    first, n = chunk_at(chunk, nelem, chunk_nelem)
    word, _ = words_of(tile, n)
    inside = word < blocks * BLOCK_WORDS
    left, a, b, _ = planes_of(work_ptr, chunk, chunks, blocks, sketch_blocks)
    stay = tl.load(left + word, mask=inside, other=0)
    in_a = tl.load(a + word, mask=inside, other=0)
    in_b = tl.load(b + word, mask=inside, other=0)
    if GIVEN:
        lacking = index_of(x_ptr, first, word, tile, n, ITEM, ALIGNED) & ~(in_a | in_b | stay)
        if tl.max((lacking != 0).to(tl.int32), 0) != 0:
            record = out_ptr.to(tl.pointer_type(tl.int64)) + head + chunk * 4
            tl.atomic_or(record + 2, chunk * 0 + 2, sem="relaxed")
    x = elements_at(x_ptr, ITEM) + first
    at = table_ptr.to(tl.pointer_type(tl.int64)) + word // BLOCK_WORDS * _HASHES
    todo = in_a | in_b
    use = todo != 0
    place_0 = tl.load(at, mask=use, other=0)
    place_1 = tl.load(at + 1, mask=use, other=0)
    place_2 = tl.load(at + 2, mask=use, other=0)
    places = place_0, place_1, place_2
    static_ptr = out_ptr + (static_at + chunk * static_stride) * 128
    most = tl.max(bits_set(todo).to(tl.int32), 0)
    for _k in range(0, most, 2):
        use = todo != 0
        v, cell, rest = _next_own(x, todo, places, in_a, in_b, word, ITEM, PTX)
        use_2 = rest != 0
        v_2, cell_2, todo = _next_own(x, rest, places, in_a, in_b, word, ITEM, PTX)
        v = converted(v, EXP, ITEM, CELL_EXP, CELL_ITEM, PTX)
        v_2 = converted(v_2, EXP, ITEM, CELL_EXP, CELL_ITEM, PTX)
        store_element(static_ptr, cell, v, use, CELL_EXP, CELL_ITEM, 0)
        store_element(static_ptr, cell_2, v_2, use_2, CELL_EXP, CELL_ITEM, 0)
    if tl.max((stay != 0).to(tl.int32), 0) != 0:
        tl.store(state_at(state_ptr, chunk) + _LEFT, 1)


@kernel
def _estimate_kernel(
    x_ptr,
    out_ptr,
    table_ptr,
    work_ptr,
    state_ptr,
    chunks: tl.int64,
    nelem: tl.int64,
    chunk_nelem: tl.int64,
    blocks: tl.int64,
    sketch_blocks: tl.int64,
    parts: tl.int64,
    static_at: tl.int64,
    static_stride: tl.int64,
    EXP: tl.constexpr,
    ITEM: tl.constexpr,
    CELL_EXP: tl.constexpr,
    CELL_ITEM: tl.constexpr,
    PTX: tl.constexpr,
    member=None,
):
    """Add up blocks of cells from the elements that stay left, in the order of their lists.

    Programs are few, as mostly there is nothing to do.
    """
    chunk, block = program_of(member, 0, parts)
    if tl.load(state_at(state_ptr, chunk) + _LEFT) != 0:
        first, _ = chunk_at(chunk, nelem, chunk_nelem)
        left, _, _, _ = planes_of(work_ptr, chunk, chunks, blocks, sketch_blocks)
        table = table_ptr.to(tl.pointer_type(tl.int64))
        x = elements_at(x_ptr, ITEM) + first
        static_ptr = out_ptr + (static_at + chunk * static_stride) * 128
        cell = tl.arange(0, _BLOCK)
        while block < sketch_blocks:
            lists, at, end = list_at(table, block, blocks, sketch_blocks)
            total = tl.zeros([_BLOCK], tl.float32)
            some = tl.zeros([_BLOCK], tl.int32)
            while at < end:
                entry = tl.load(lists + at)
                at_x = (cell - (entry >> 1).to(tl.int32)) & (_BLOCK - 1)
                bits = tl.load(left + (entry >> 11) * BLOCK_WORDS + (at_x >> 5))
                on = ((bits >> (at_x & 31).to(tl.uint32)) & 1) != 0
                v = tl.load(x + (entry >> 11) * _BLOCK + at_x, mask=on, other=0)
                v = widen(v, EXP, ITEM) ^ ((entry & 1) << 31).to(tl.int32)
                total = tl.where(on, total + v.to(tl.float32, bitcast=True), total)
                some |= on.to(tl.int32)
                at += 1
            found = narrow(total, CELL_EXP, CELL_ITEM, PTX)
            to = block * _BLOCK + cell
            store_element(static_ptr, to, found, some != 0, CELL_EXP, CELL_ITEM, 0)
            block += parts


@kernel
def _sum_kernel(
    data_ptr,
    sums_ptr,
    first_chunk: tl.int64,
    tiles: tl.int64,
    head: tl.int32,
    static_at: tl.int64,
    static_stride: tl.int64,
    WRITE: tl.constexpr,
    member=None,
):
    """Checksum terms of some words of a chunk's static part, added in `sums_ptr`.

    With WRITE `data_ptr` is being encoded, and its record gets them, or no checksum if the index
    lacks an element.
    """
    chunk, tile = program_of(member, first_chunk, tiles)
    static_ptr = data_ptr + (static_at + chunk * static_stride) * 128
    at = tile * _SUMMED + tl.arange(0, _SUMMED)
    words = static_ptr.to(tl.pointer_type(tl.uint32))
    total = tl.sum(weigh(tl.load(words + at, mask=at < static_stride * 32, other=0), at), 0)
    if WRITE:
        record = data_ptr.to(tl.pointer_type(tl.int64)) + head + chunk * 4
        if (tl.load(record + 2) & 2) == 0:
            tl.atomic_add(record, total.to(tl.int64, bitcast=True), sem="relaxed")
        elif tile == 0:
            tl.store(record, chunk * 0)
    else:
        tl.atomic_add(sums_ptr + chunk, total.to(tl.int64, bitcast=True), sem="relaxed")


@triton.jit
def _used_at(left, a, b, where, number, use):
    """Words of the elements that have their cells by hash `number`: own, or estimated."""
    mask = use[:, None]
    stay = tl.load(left + where, mask=mask, other=0)
    in_a = tl.load(a + where, mask=mask, other=0)
    in_b = tl.load(b + where, mask=mask, other=0)
    both = in_a & in_b
    one = (number == 1)[:, None]
    two = (number == 2)[:, None]
    return stay | tl.where(one, in_a ^ both, tl.where(two, in_b ^ both, both))


@kernel
def _used_kernel(
    table_ptr,
    work_ptr,
    first_chunk: tl.int64,
    chunks: tl.int64,
    blocks: tl.int64,
    sketch_blocks: tl.int64,
    tiles: tl.int64,
    BLOCKS: tl.constexpr,
    member=None,
):
    """Set in the bitmap of some blocks of cells which are own cells or those of estimates."""
    chunk, tile = program_of(member, first_chunk, tiles)
    block = tile * BLOCKS + tl.arange(0, BLOCKS)
    left, a, b, cells = planes_of(work_ptr, chunk, chunks, blocks, sketch_blocks)
    table = table_ptr.to(tl.pointer_type(tl.int64))
    lists, at, end = list_at(table, block, blocks, sketch_blocks)
    longest = tl.max(end - at, 0)
    used = tl.zeros([BLOCKS, BLOCK_WORDS], tl.uint32)
    k = longest * 0
    while k < longest:
        use = at + k < end
        entry = tl.load(lists + at + k, mask=use, other=0)
        by = -(entry >> 1) & (_BLOCK - 1)
        where, behind = places_at(entry >> 11, by)
        number = (entry >> 9) & 3
        low = _used_at(left, a, b, where, number, use)
        used |= rotated(low, _used_at(left, a, b, behind, number, use), by)
        k += 1
    where = block[:, None] * BLOCK_WORDS + tl.arange(0, BLOCK_WORDS)[None, :]
    tl.store(cells + where, used, mask=(block < sketch_blocks)[:, None])


@kernel
def _cells_kernel(
    src_ptr,
    work_ptr,
    status_ptr,
    first_chunk: tl.int64,
    chunks: tl.int64,
    blocks: tl.int64,
    sketch_blocks: tl.int64,
    nelem: tl.int64,
    chunk_nelem: tl.int64,
    tiles: tl.int64,
    static_at: tl.int64,
    static_stride: tl.int64,
    index_at: tl.int64,
    ITEM: tl.constexpr,
    member=None,
):
    """Report a cell that is not zero and not used, of some words of the bitmap of cells.

    Once, also the bits behind those of the last element in the index.
    """
    chunk, tile = program_of(member, first_chunk, tiles)
    word = tile * WORDS + tl.arange(0, WORDS)
    inside = word < sketch_blocks * BLOCK_WORDS
    _, _, _, cells = planes_of(work_ptr, chunk, chunks, blocks, sketch_blocks)
    used = tl.load(cells + word, mask=inside, other=0)
    static_ptr = src_ptr + (static_at + chunk * static_stride) * 128
    payload = elements_at(static_ptr, ITEM)
    v = tl.load(payload + elements_of(word), mask=inside[:, None], other=0)
    wrong = tl.max(tl.max(((v != 0) & (spread(used) == 0)).to(tl.int32), 1), 0)
    _, n = chunk_at(chunk, nelem, chunk_nelem)
    if (tile == 0) & (n % 8 != 0):
        last = tl.load(static_ptr + index_at * 128 + n // 8).to(tl.int32)
        wrong |= last >> (n % 8).to(tl.int32)
    if wrong != 0:
        report(status_ptr, CHUNK + (chunk << 8) + CHUNK_PAYLOAD)


@triton.jit
def _ordered(bits):
    """Integers in the order of floats of these bits, -0 below 0; and back."""
    return bits ^ ((bits >> 31) & _MAGNITUDE)


@triton.jit
def _signed_cell(payload, place, i, on, EXP: tl.constexpr, ITEM: tl.constexpr):
    """float32 bits of cells of elements `i`, with the signs of their places."""
    v = tl.load(payload + _cell(place, i), mask=on, other=0)
    return widen(v, EXP, ITEM) ^ ((place & 1) << 31).to(tl.int32)


@triton.jit
def _median(x, y, z):
    """The middle one of three float32 bits, int32; a NaN if one is."""
    nan = tl.maximum(tl.maximum(x & _MAGNITUDE, y & _MAGNITUDE), z & _MAGNITUDE) > _INFINITY
    x, y, z = _ordered(x), _ordered(y), _ordered(z)
    middle = tl.maximum(tl.minimum(x, y), tl.minimum(tl.maximum(x, y), z))
    return tl.where(nan, _NAN, _ordered(middle))


@triton.jit
def _decoded(
    static_ptr,
    table_ptr,
    planes,
    word,
    i,
    blocks,
    EXP: tl.constexpr,
    ITEM: tl.constexpr,
    CELL_EXP: tl.constexpr,
    CELL_ITEM: tl.constexpr,
    PTX: tl.constexpr,
):
    """Bits of elements `i`, those of words of a chunk's bitmaps."""
    inside = word < blocks * BLOCK_WORDS
    left, a, b, _ = planes
    stay = tl.load(left + word, mask=inside, other=0)
    in_a = tl.load(a + word, mask=inside, other=0)
    in_b = tl.load(b + word, mask=inside, other=0)
    table = table_ptr.to(tl.pointer_type(tl.int64))
    place, first, second, third = _places(table, word, in_a, in_b, inside)
    payload = elements_at(static_ptr, CELL_ITEM)
    v = tl.load(payload + _cell(place, i), mask=spread(in_a | in_b), other=0)
    bits = converted(v, CELL_EXP, CELL_ITEM, EXP, ITEM, PTX)
    if tl.max((stay != 0).to(tl.int32), 0) != 0:
        on = spread(stay)
        x = _signed_cell(payload, first, i, on, CELL_EXP, CELL_ITEM)
        y = _signed_cell(payload, second, i, on, CELL_EXP, CELL_ITEM)
        z = _signed_cell(payload, third, i, on, CELL_EXP, CELL_ITEM)
        value = _median(x, y, z).to(tl.float32, bitcast=True)
        bits = tl.where(on, narrow(value, EXP, ITEM, PTX), bits)
    return bits


@triton.jit
def _read(static_ptr, work_ptr, table_ptr, t, word, at, blocks, sketch_blocks, F: tl.constexpr):
    """READER: see gathered_sums_triton. `at`: where bitmaps are in work memory, by 128 bytes."""
    chunk, chunks, _, _ = t
    planes = planes_of(work_ptr + at * 128, chunk, chunks, blocks, sketch_blocks)
    # fmt: off
    return _decoded(
        static_ptr, table_ptr, planes, word, elements_of(word), blocks, F.exponent, F.item,
        F.cell_exponent, F.cell_item, F.ptx,
    )
    # fmt: on


@kernel
def _decode_kernel(
    src_ptr,
    out_ptr,
    table_ptr,
    work_ptr,
    start: tl.int64,
    stop: tl.int64,
    first_chunk: tl.int64,
    chunks: tl.int64,
    nelem: tl.int64,
    chunk_nelem: tl.int64,
    blocks: tl.int64,
    sketch_blocks: tl.int64,
    tiles: tl.int64,
    static_at: tl.int64,
    static_stride: tl.int64,
    EXP: tl.constexpr,
    ITEM: tl.constexpr,
    CELL_EXP: tl.constexpr,
    CELL_ITEM: tl.constexpr,
    ALIGNED: tl.constexpr,
    ADD: tl.constexpr,
    PTX: tl.constexpr,
    member=None,
):
    """Elements `start` to `stop` of the tensor as far as they lie in one tile of one chunk."""
    chunk, tile = program_of(member, first_chunk, tiles)
    first, n = chunk_at(chunk, nelem, chunk_nelem)
    to = first - start
    if ALIGNED:
        to = tl.multiple_of(to, 16)
    lo = tl.maximum(start - first, 0)
    hi = tl.minimum(stop - first, n)
    begin = tile * (WORDS * WORD)
    end = begin + WORDS * WORD
    if (begin < hi) & (end > lo):
        word, _ = words_of(tile, n)
        i = elements_of(word)
        planes = planes_of(work_ptr, chunk, chunks, blocks, sketch_blocks)
        static_ptr = src_ptr + (static_at + chunk * static_stride) * 128
        # fmt: off
        bits = _decoded(
            static_ptr, table_ptr, planes, word, i, blocks, EXP, ITEM, CELL_EXP, CELL_ITEM, PTX
        )
        # fmt: on
        if (begin >= lo) & (end <= hi):
            store_element(out_ptr, to + i, bits, None, EXP, ITEM, ADD)
        else:
            store_element(out_ptr, to + i, bits, (i >= lo) & (i < hi), EXP, ITEM, ADD)


@functools.cache
def _types(dtype: DType, cell: DType) -> dict[str, int | bool]:
    own = {"EXP": dtype.exponent, "ITEM": dtype.itemsize, "PTX": PTX}
    return own | {"CELL_EXP": cell.exponent, "CELL_ITEM": cell.itemsize}


def encode(plan: Plan, x, out, scratch, stats=None, key: Key | None = None) -> None:
    """Encode the elements of `x` into `out`; see `tightwire.gpu` for the contract.

    Chunks with an element that is not zero and not in `stats` are marked as overflowed.
    """
    g = Shape.of(plan)
    nbytes = -(-plan.nelem // 8)
    if stats is not None and stats.numel() != nbytes:
        raise ValueError(f"stats have {stats.numel()} bytes; allowed: {nbytes}")
    _, state, planes = g.split(scratch)
    table = g.table(out.device)
    # Cells that no element has are zero.
    frame_of(plan).begin(out, out[plan.static_offset : plan.dynamic_offset])
    source = int((OF_ELEMENTS if stats is None else OF_STATS).value)
    given = out if stats is None else stats
    read_index(plan, source, (x, given, out, planes, state), 0, plan.chunks)
    peel_chunks(plan, table, planes, state, 0, plan.chunks)
    tensors, where = (x, out, table, planes, state), (plan.chunks, *g.sizes, *g.both)
    types = _types(plan.dtype, g.cell)
    # Whether chunks are aligned matters where the index is compared with the elements.
    known = {"GIVEN": stats is not None, "ALIGNED": stats is not None and aligned_for(plan, x)}
    scatter = variant_of(_scatter_kernel, **types, **known)
    scatter.launch(g.tiles * plan.chunks, tensors, *where, g.tiles, g.head, *g.static)
    estimate = variant_of(_estimate_kernel, **types)
    parts = min(g.sketch_blocks, PROGRAMS)
    estimate.launch(parts * plan.chunks, tensors, *where, parts, *g.static)
    if plan.checksum:
        _sum(plan, out, out, 0, plan.chunks, True)


def _sum(plan: Plan, data, sums, first: int, end: int, write: bool) -> None:
    g = Shape.of(plan)
    tiles = -(-plan.static_stride // (4 * int(_SUMMED.value)))
    numbers = first, tiles, g.head, *g.static
    variant = variant_of(_sum_kernel, 8, WRITE=write)
    variant.launch(tiles * (end - first), (data, sums), *numbers)


def decode(plan: Plan, src, out, scratch, status, *, peeled=False, **selection) -> None:
    """Decode elements into `out`; see `tightwire.gpu` for the contract.

    If `peeled`, `scratch` has what `encode` of this plan has left there, of the same index.
    """
    g, chosen = Shape.of(plan), Selection.of(plan, selection)
    start, stop = chosen.start, chosen.stop
    sums, state, planes = g.split(scratch)
    summed = chosen.check and plan.checksum and (start < stop or not plan.nelem)
    first, end, _, _ = touched(plan, start, stop)
    if summed:
        zero(sums)
        _sum(plan, src, sums, first, end, False)
    if start < stop:
        table = g.table(src.device)
        where = first, plan.chunks
        if not peeled:
            read_index(plan, int(OF_BUFFER.value), (src, src, src, planes, state), first, end)
            peel_chunks(plan, table, planes, state, first, end)
        tiles = -(-g.sketch_blocks // ROUND_BLOCKS)
        used = variant_of(_used_kernel, BLOCKS=ROUND_BLOCKS)
        used.launch(tiles * (end - first), (table, planes), *where, *g.both, tiles)
        tiles = tiles_of(g.sketch_blocks)
        numbers = *where, *g.both, *g.sizes, tiles, *g.static, g.second
        cells = variant_of(_cells_kernel, ITEM=g.cell.itemsize)
        cells.launch(tiles * (end - first), (src, planes, status), *numbers)
        if chosen.store:
            values = _types(plan.dtype, g.cell) | {"ADD": out.element_size() if chosen.add else 0}
            variant = variant_of(_decode_kernel, 8, **values, ALIGNED=aligned_for(plan, out, start))
            numbers = start, stop, *where, *g.sizes, *g.both, g.tiles, *g.static
            variant.launch(g.tiles * (end - first), (src, out, table, planes), *numbers)
    chosen.check_frame(plan, src, sums, status, summed)


encode_many, decode_many = merged_functions(encode, decode)


def sum(plan: Plan, places: Places, out, *, planned=True, **terms) -> None:
    """Add up buffers; see `tightwire.gpu_many` for the contract."""
    g, work = Shape.of(plan), check_sources(plan, places, decode, planned)
    sums, state, _ = g.parts
    launch_sum(
        _read,
        plan,
        places,
        out,
        work.whole,
        align(plan.scratch_nbytes),
        tile=2048,
        row=int(WORD.value),
        cell=g.cell,
        table=g.table(out.device),
        numbers=((sums + state) // 128, *g.both),
        **terms,
    )
