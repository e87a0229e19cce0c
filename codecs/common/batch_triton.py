# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment,misc"
"""Many tensors and their buffers in a launch: the kernels of tiles_triton for a table of chunks.

Every chunk has a row (`ROW`) in device memory, and programs find theirs by a map. The host makes
both, of plans and addresses: nothing that a buffer holds is taken for an address or a size.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from .base import Plan
from .frame_triton import (
    ROW,
    ROW_ALIGNED,
    ROW_PLANNED,
    Words,
    begin_rows,
    check_rows,
    fill,
    frame_of,
    new_table,
    place_of,
    pointer_of,
)
from .launch_triton import is_recording, kernel
from .tiles_triton import add_terms, decode_tile, draw_of, encode_tile, numbered, recorded, tile_at

#: Programs of a block of the map: as every row has one, they are of no more than so many rows.
BLOCK = 32
#: Programs that begin chunks, of all together: those of a chunk are as many as that leaves.
_BEGINNERS = 1 << 14
_BLOCK = tl.constexpr(BLOCK)
_FIELDS = tl.constexpr(len(ROW.names or ()))
_ALIGNED = tl.constexpr(ROW_ALIGNED)
_AFTER_ALL = np.iinfo(np.int32).max


@triton.jit
def row_of(rows_ptr, firsts_ptr, owners_ptr, pid, FIELDS: tl.constexpr = _FIELDS):
    """The row of a program, of so many words.

    `firsts_ptr`: numbers of rows' first programs; `owners_ptr`: the row of the first program of
    each block.
    """
    owner = tl.load(owners_ptr.to(tl.pointer_type(tl.int32)) + pid // _BLOCK)
    following = owner + 1 + tl.arange(0, _BLOCK)
    firsts = tl.load(firsts_ptr.to(tl.pointer_type(tl.int32)) + following)
    row = owner + tl.sum((firsts <= pid).to(tl.int32), 0)
    return rows_ptr + row.to(tl.int64) * FIELDS


@triton.jit
def _tile_of(row_ptr, data_ptr, stats_ptr, pid, F: tl.constexpr, ALIGNED: tl.constexpr):
    tile = pid - tl.load(row_ptr + 7)
    static_ptr = data_ptr + tl.load(row_ptr + 10) * 128
    nelem, chunk_nelem = tl.load(row_ptr + 8), tl.load(row_ptr + 9)
    stride, second = tl.load(row_ptr + 11), tl.load(row_ptr + 12)
    chunk = tl.load(row_ptr + 4)
    t = tile_at(static_ptr, chunk, tile, nelem, chunk_nelem, stride, second, ALIGNED)
    return numbered(t, 0, stats_ptr, chunk, chunk_nelem, F)


@triton.jit
def _record_of(row_ptr, data_ptr):
    """The record of a row's chunk."""
    return data_ptr + tl.load(row_ptr + 13) * 8 + tl.load(row_ptr + 4) * 32


@triton.jit
def elements_of(row_ptr):
    """(the tensor, whether its chunks start at multiples of 16 bytes).

    The hint is true of those. Elsewhere elements are loaded and stored one by one, as masks may
    end anywhere.
    """
    return pointer_of(tl.load(row_ptr + 5)), (tl.load(row_ptr + 14) & _ALIGNED) != 0


@kernel
def encode_rows_kernel(
    sources_ptr,
    firsts_ptr,
    owners_ptr,
    key_ptr,
    seed: tl.uint64,
    step: tl.uint64,
    rank: tl.uint64,
    F: tl.constexpr,
    L: tl.constexpr,
    PACK: tl.constexpr,
    UNPACK: tl.constexpr,
    SCALE: tl.constexpr,
):
    """As `encode_kernel`, of one tile of a table's chunks."""
    pid = tl.program_id(0)
    row_ptr = row_of(sources_ptr, firsts_ptr, owners_ptr, pid)
    data_ptr, _, status_ptr = place_of(row_ptr, 0)
    stats_ptr = tl.load(row_ptr + 6).to(tl.pointer_type(tl.int64))
    t = _tile_of(row_ptr, data_ptr, stats_ptr, pid, F, L.aligned)
    t = recorded(t, _record_of(row_ptr, data_ptr))
    x_ptr, aligned = elements_of(row_ptr)
    draw = draw_of(key_ptr, seed, step, rank, L)
    # fmt: off
    total, _ = encode_tile(
        x_ptr, t, t, status_ptr, draw, stats_ptr, aligned, F, F, L, PACK, UNPACK, SCALE
    )
    # fmt: on
    if L.sums:
        # Looked up only now: registers are few in between.
        data_ptr, _, _ = place_of(row_ptr, 0)
        add_terms(_record_of(row_ptr, data_ptr), total)


@kernel
def decode_rows_kernel(
    sources_ptr,
    firsts_ptr,
    owners_ptr,
    F: tl.constexpr,
    L: tl.constexpr,
    UNPACK: tl.constexpr,
    SCALE: tl.constexpr,
    TILE: tl.constexpr,
):
    """As `decode_kernel`, of one tile of a table's chunks, that are decoded whole."""
    pid = tl.program_id(0)
    row_ptr = row_of(sources_ptr, firsts_ptr, owners_ptr, pid)
    data_ptr, _, status_ptr = place_of(row_ptr, 0)
    stats_ptr = tl.load(row_ptr + 6).to(tl.pointer_type(tl.int64))
    t = _tile_of(row_ptr, data_ptr, stats_ptr, pid, F, L.aligned)
    out_ptr, aligned = elements_of(row_ptr)
    # fmt: off
    total = decode_tile(
        t, out_ptr, status_ptr, t.first * 0, t.nelem, stats_ptr, aligned, F, L, UNPACK, SCALE, TILE
    )
    # fmt: on
    if L.sums:
        _, sums_ptr, _ = place_of(row_ptr, 0)
        add_terms(sums_ptr + tl.load(row_ptr + 4), total)


def map_of(first: Words, programs: int) -> tuple[Any, Any]:
    """`firsts` and `owners` of `row_of`, int32, for rows whose first programs are these."""
    owners = np.searchsorted(first, np.arange(0, programs, BLOCK), side="right") - 1
    firsts = np.full(len(first) + BLOCK + 1, _AFTER_ALL, np.int32)
    firsts[: len(first)] = first
    return firsts, owners.astype(np.int32)


class Layout:
    """What tables for the same plans have in common: all but addresses.

    Attributes:
        words: The table, int64: rows, what frames say of the distinct plans, checksum terms, which
            start at 0, and the map. Addresses in the table are in bytes behind its start, others 0.
        owner: Number of the tensor of each row.
        aligned: Whether chunks of a row's tensor are multiples of 16 elements.
        number: Number of rows.
        programs: Programs of a launch.
        parts: Programs that begin a chunk.
        terms, firsts, owners: Where these are, in words.
        kept: What codecs derive of it, by name.
    """

    def __init__(
        self,
        tile_nelem: int,
        sizes: Words,
        kinds: Words,
        plans: Sequence[Plan],
        empty: bool,
        extent: Callable[[Words], Words] | None = None,
    ) -> None:
        """Of what `_sizes` gives of each tensor, shape (tensors, 7), and numbers of distinct plans.

        The kernels have a program for tensors without elements if `empty` says so. `extent` says
        how many elements those of a chunk are with what pads them.
        """
        chunks = sizes[:, 0]
        owner = np.repeat(np.arange(len(sizes)), chunks)
        rows = np.zeros(len(owner), ROW)
        rows["row"] = np.arange(len(owner))
        rows["sums"] = (chunks.cumsum() - chunks)[owner]
        rows["chunk"] = rows["row"] - rows["sums"]
        rows["plan"] = kinds[owner]
        fields = ("nelem", "chunk_nelem", "static", "stride", "second", "head")
        for k, field in enumerate(fields, start=1):
            rows[field] = sizes[owner, k]
        filled = (rows["nelem"] > 0) | empty
        # Those that have no program are behind the others.
        rows = np.concatenate([rows[filled], rows[~filled]])
        n = rows[: np.count_nonzero(filled)]
        nelem = np.clip(n["nelem"] - n["chunk"] * n["chunk_nelem"], 0, n["chunk_nelem"])
        tiles = np.maximum(1, -(-(nelem if extent is None else extent(nelem)) // tile_nelem))
        ends = tiles.cumsum()
        n["first"] = ends - tiles
        self.programs = int(ends[-1]) if len(n) else 0
        firsts, owners = map_of(n["first"], self.programs)
        frames = [frame_of(plan) for plan in plans]
        parts = max([frame.parts for frame in frames], default=1)
        self.parts = max(1, min(parts, _BEGINNERS // max(1, len(rows))))
        self.number = len(rows)
        self.owner = owner[rows["row"]]
        self.aligned = ((chunks == 1) | (sizes[:, 2] % 16 == 0))[self.owner]
        pieces: list[Any] = [rows.view(np.int64), *[frame.words for frame in frames]]
        pieces += [np.zeros(len(rows), np.int64), firsts, owners]
        # Each at a multiple of 16 bytes: kernels have one form for all.
        starts = np.cumsum([0, *[-(-piece.nbytes // 16) * 2 for piece in pieces]])
        *_, self.terms, self.firsts, self.owners, end = starts.tolist()
        self.words: Words = np.zeros(end, np.int64)
        data = self.words.view(np.uint8)
        for start, piece in zip((8 * starts).tolist(), pieces, strict=False):
            data[start : start + piece.nbytes] = piece.view(np.uint8)
        self.rows["sums"] = 8 * (self.terms + rows["sums"])
        self.rows["plan"] = 8 * starts[1:][rows["plan"]]
        self.kept: dict[str, Any] = {}

    @property
    def rows(self) -> np.ndarray:
        """The rows of the table, `ROW`."""
        return self.rows_in(self.words)

    def rows_in(self, words: Words) -> np.ndarray:
        """The rows in a copy of the table."""
        return words[: self.number * len(ROW.names or ())].view(ROW)


#: Layouts by what they are made of, and their plans: what is known by its `id` stays its own.
_layouts: dict[Any, tuple[Layout, Sequence[Plan]]] = {}
#: Most of them, and most rows of one: a program has few batches that it codes again and again.
_MOST_LAYOUTS, _MOST_ROWS = 64, 1 << 13


def layout_of(
    tile_nelem: int,
    plans: Sequence[Plan],
    item: int,
    empty: bool,
    extent: Callable[[Words], Words] | None = None,
) -> Layout:
    """The layout for tensors by plans, made once while the same plans come again.

    `item`: bytes of what counts as an element; those of the plans are as large, or some of them.
    `extent` is as in `Layout`, and follows from the plans.
    """
    keys = tuple(map(id, plans))
    found = _layouts.get((keys, tile_nelem, item, empty))
    if found is None:
        distinct = dict(zip(keys, plans, strict=True))
        numbers = dict(zip(distinct, range(len(distinct)), strict=True))
        kinds = np.array([numbers[key] for key in keys], np.int64)
        of_plans = [_sizes(plan, plan.dtype.itemsize // item) for plan in distinct.values()]
        sizes = np.array(of_plans, np.int64)[kinds]
        layout = Layout(tile_nelem, sizes, kinds, list(distinct.values()), empty, extent)
        found = layout, tuple(plans)
        if len(_layouts) >= _MOST_LAYOUTS:
            _layouts.clear()
        if found[0].number <= _MOST_ROWS:
            _layouts[keys, tile_nelem, item, empty] = found
    return found[0]


@functools.lru_cache(maxsize=_MOST_LAYOUTS)
def _layout_to_measure(tile_nelem: int, nelems: tuple[int, ...]) -> Layout:
    sizes = np.array([(1, nelem, nelem, 0, 0, 0, 0) for nelem in nelems], np.int64)
    return Layout(tile_nelem, sizes, np.zeros(len(nelems), np.int64), (), False)


class Batch:
    """Tensors and buffers in a table on a device, for the kernels of this module.

    Nothing waits for the device: the memory that is named must stay until its stream has come this
    far.

    Attributes:
        layout: Its layout.
        tensors: What the kernels take, once the batch is in a table (`put`): that, and the map.
        offsets: Where these start in the tensors, in bytes.
    """

    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    offsets: tuple[int, int, int]

    def __init__(
        self,
        layout: Layout,
        buffers: Sequence[torch.Tensor] | Words,
        elements: Sequence[torch.Tensor] | Words,
        *,
        statuses: Sequence[torch.Tensor] | Words | None = None,
        stats: Sequence[torch.Tensor] | torch.Tensor | Words | None = None,
        sums: Words | None = None,
        planned: Sequence[bool] | None = None,
    ) -> None:
        """See `batch_of`."""
        self.layout, owner = layout, layout.owner
        self.decodes = statuses is not None
        self.sums = sums
        self.words = layout.words.copy()
        rows = layout.rows_in(self.words)
        at = addresses(elements)[owner]
        memory = {"data": buffers, "status": statuses, "stats": stats, "sums": sums}
        for field, found in memory.items():
            if found is not None:
                rows[field] = addresses(found)[owner]
        rows["elements"] = at
        rows["flags"] = np.where(layout.aligned & (at % 16 == 0), ROW_ALIGNED, 0)
        if planned is not None:
            rows["flags"] |= np.where(np.array(planned, bool)[owner], ROW_PLANNED, 0)

    @property
    def programs(self) -> int:
        """Programs of a launch."""
        return self.layout.programs

    def begin(self) -> None:
        """Write all of the buffers but what encoding does."""
        begin_rows(self.tensors[0], self.offsets[0], self.layout.number, self.layout.parts)

    def check(self) -> None:
        """Check buffers that were decoded."""
        check_rows(self.tensors[0], self.offsets[0], self.layout.number)


def put(batches: Sequence[Batch], device: torch.device, *more: Words) -> tuple[torch.Tensor, int]:
    """Put the tables of batches in one on a device, and what a codec has to know behind them.

    Returns:
        That table, and where in it that starts, in bytes.
    """
    pieces = [*[batch.words for batch in batches], *more]
    starts = list(itertools.accumulate([piece.size for piece in pieces], initial=0))
    table = new_table(starts[-1], device)
    address = table.data_ptr()
    for batch, at in zip(batches, starts, strict=False):
        layout = batch.layout
        rows = layout.rows_in(batch.words)
        if batch.sums is None:
            rows["sums"] += address + 8 * at
        rows["plan"] += address + 8 * at
        batch.tensors = table, table, table
        batch.offsets = 8 * at, 8 * (at + layout.firsts), 8 * (at + layout.owners)
    fill(table, pieces[0] if len(pieces) == 1 else np.concatenate(pieces))
    if is_recording():
        for batch, at in zip(batches, starts, strict=False):
            if batch.decodes:
                # Terms start at 0 whenever the launches are made.
                table[at + batch.layout.terms : at + batch.layout.firsts].zero_()
    return table, 8 * starts[len(batches)]


def batch_of(
    tile_nelem: int,
    plans: Sequence[Plan],
    buffers: Sequence[torch.Tensor] | Words,
    elements: Sequence[torch.Tensor],
    *,
    extent: Callable[[Words], Words] | None = None,
    **options: Any,
) -> Batch:
    """Tensors, contiguous, and their buffers, for tiles of so many elements, on their device.

    Args:
        tile_nelem: Elements of a tile.
        plans: Plans, one a tensor.
        buffers: Bytes of buffers, or their addresses, shape (n,).
        elements: The tensors.
        extent: See `Layout`.
        **options: `statuses`: status words, int64, or their addresses, where they are decoded;
            `stats`: statistics, where they are encoded with such, the rows of a tensor or their
            addresses, too, or what was left before by `Driver.prepare`; `sums`: where checksum
            terms are added, if not in the table; `planned`: whether headers are compared with the
            plans'.
    """
    empty = options.get("statuses") is None
    layout = layout_of(tile_nelem, plans, plans[0].dtype.itemsize, empty, extent)
    batch = Batch(layout, buffers, elements, **options)
    put([batch], elements[0].device)
    return batch


def batch_to_measure(
    tile_nelem: int,
    elements: Sequence[torch.Tensor],
    stats: Sequence[torch.Tensor] | torch.Tensor | Words,
) -> Batch:
    """Tensors, contiguous, and memory for their statistics, as `batch_of`."""
    layout = _layout_to_measure(tile_nelem, tuple(map(torch.Tensor.numel, elements)))
    at = addresses(elements)
    batch = Batch(layout, at, at, stats=stats)
    put([batch], elements[0].device)
    return batch


def addresses(memory: Sequence[torch.Tensor] | torch.Tensor | Words) -> Words:
    """Addresses of tensors, or of the rows of one, shape (n,); or `memory` if it is such, or has
    them.
    """
    if isinstance(memory, np.ndarray):
        return memory
    known: Words | None = getattr(memory, "addresses", None)
    if known is not None:
        return known
    if isinstance(memory, torch.Tensor):
        step = memory.stride(0) * memory.element_size()
        found: Words = np.arange(len(memory), dtype=np.int64) * step + memory.data_ptr()
        return found
    return np.fromiter(map(torch.Tensor.data_ptr, memory), np.int64, len(memory))


def _sizes(plan: Plan, units: int) -> tuple[int, ...]:
    """What a layout has to know of a plan, whose elements are so many units."""
    return (
        plan.chunks,
        plan.nelem * units,
        plan.chunk_nelem * units,
        plan.static_offset // 128,
        plan.static_stride // 128,
        plan.layout.sections[0].nbytes // 128,
        plan.header.nbytes // 8,
    )
