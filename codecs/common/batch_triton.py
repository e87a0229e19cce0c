# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment,misc"
"""Many tensors and their buffers in a launch: the kernels of tiles_triton for a table of chunks.

Every chunk has a row (`ROW`) in device memory, and programs find theirs by a map. The host makes
both, of plans and addresses: nothing that a buffer holds is taken for an address or a size.
"""

from __future__ import annotations

from collections.abc import Sequence

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
from .tiles_triton import add_terms, decode_tile, draw_of, encode_tile, recorded, tile_at

#: Programs of a block of the map: as every row has one, they are of no more than so many rows.
BLOCK = 32
#: Programs that begin chunks, of all together: those of a chunk are as many as that leaves.
_BEGINNERS = 1 << 14
_BLOCK = tl.constexpr(BLOCK)
_FIELDS = tl.constexpr(len(ROW.names or ()))
_ALIGNED = tl.constexpr(ROW_ALIGNED)
_AFTER_ALL = np.iinfo(np.int32).max


@triton.jit
def row_of(rows_ptr, firsts_ptr, owners_ptr, pid):
    """The row of a program.

    `firsts_ptr`: numbers of rows' first programs; `owners_ptr`: the row of the first program of
    each block.
    """
    owner = tl.load(owners_ptr.to(tl.pointer_type(tl.int32)) + pid // _BLOCK)
    following = owner + 1 + tl.arange(0, _BLOCK)
    firsts = tl.load(firsts_ptr.to(tl.pointer_type(tl.int32)) + following)
    row = owner + tl.sum((firsts <= pid).to(tl.int32), 0)
    return rows_ptr + row.to(tl.int64) * _FIELDS


@triton.jit
def _tile_of(row_ptr, data_ptr, pid, ALIGNED: tl.constexpr):
    tile = pid - tl.load(row_ptr + 7)
    static_ptr = data_ptr + tl.load(row_ptr + 10) * 128
    nelem, chunk_nelem = tl.load(row_ptr + 8), tl.load(row_ptr + 9)
    stride, second = tl.load(row_ptr + 11), tl.load(row_ptr + 12)
    chunk = tl.load(row_ptr + 4)
    return tile_at(static_ptr, chunk, tile, nelem, chunk_nelem, stride, second, ALIGNED)


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
    t = _tile_of(row_ptr, data_ptr, pid, L.aligned)
    t = recorded(t, _record_of(row_ptr, data_ptr))
    x_ptr, aligned = elements_of(row_ptr)
    stats_ptr = tl.load(row_ptr + 6).to(tl.pointer_type(tl.int64))
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
    t = _tile_of(row_ptr, data_ptr, pid, L.aligned)
    out_ptr, aligned = elements_of(row_ptr)
    # fmt: off
    total = decode_tile(
        t, out_ptr, status_ptr, t.first * 0, t.nelem, data_ptr, aligned, F, L, UNPACK, SCALE, TILE
    )
    # fmt: on
    if L.sums:
        _, sums_ptr, _ = place_of(row_ptr, 0)
        add_terms(sums_ptr + tl.load(row_ptr + 4), total)


class Batch:
    """Tensors and buffers in a table on a device, for the kernels of this module.

    Nothing waits for the device: the memory that is named must stay until its stream has come this
    far.

    Attributes:
        tensors: What the kernels take: the table, and the map.
        programs: Programs of a launch.
    """

    def __init__(
        self,
        tile_nelem: int,
        rows: np.ndarray,
        plans: Sequence[Plan],
        device: torch.device,
        empty: bool = False,
        summed: bool = False,
    ) -> None:
        """Rows as `rows_of` gives them, of the distinct `plans`.

        The kernels have a program for tensors without elements if `empty` says so. Buffers that are
        decoded are `summed`.
        """
        filled = (rows["nelem"] > 0) | empty
        if not filled.all():
            rows = np.concatenate([rows[filled], rows[~filled]])
        n = rows[: np.count_nonzero(filled)]
        sizes = np.clip(n["nelem"] - n["chunk"] * n["chunk_nelem"], 0, n["chunk_nelem"])
        tiles = np.maximum(1, -(-sizes // tile_nelem))
        ends = tiles.cumsum()
        n["first"] = ends - tiles
        self.programs = int(ends[-1]) if len(n) else 0
        owners = np.searchsorted(n["first"], np.arange(0, self.programs, BLOCK), side="right") - 1
        frames = [frame_of(plan) for plan in plans]
        self._parts = max([frame.parts for frame in frames], default=1)
        self._parts = max(1, min(self._parts, _BEGINNERS // max(1, len(rows))))
        self._number = len(rows)
        pieces: list[Words] = [rows.view(np.int64), *[frame.words for frame in frames]]
        # Checksum terms, which start at 0.
        pieces.append(np.zeros(len(rows), np.int64))
        firsts = np.full(len(n) + BLOCK + 1 + (len(n) + BLOCK + 1) % 2, _AFTER_ALL, np.int32)
        firsts[: len(n)] = n["first"]
        pieces.append(firsts.view(np.int64))
        pieces.append(np.resize(owners.astype(np.int32), len(owners) + len(owners) % 2).view("i8"))
        ends = np.cumsum([piece.size for piece in pieces])
        table = new_table(int(ends[-1]), device)
        address = table.data_ptr()
        rows["plan"] = address + 8 * (ends - [p.size for p in pieces])[1:][rows["plan"]]
        rows["sums"] = address + 8 * (int(ends[-4]) + rows["sums"])
        fill(table, np.concatenate(pieces))
        if summed and is_recording():
            # Terms start at 0 whenever the launches are made.
            table[ends[-4] : ends[-3]].zero_()
        self.tensors = table, table[ends[-3] :], table[ends[-2] :]

    def begin(self) -> None:
        """Write all of the buffers but what encoding does."""
        begin_rows(self.tensors[0], self._number, self._parts)

    def check(self) -> None:
        """Check buffers that were decoded."""
        check_rows(self.tensors[0], self._number)


def batch_of(
    tile_nelem: int,
    plans: Sequence[Plan],
    buffers: Sequence[torch.Tensor] | Words,
    elements: Sequence[torch.Tensor],
    *,
    statuses: Sequence[torch.Tensor] | Words | None = None,
    stats: Sequence[torch.Tensor] | torch.Tensor | None = None,
    planned: Sequence[bool] | None = None,
) -> Batch:
    """Tensors, contiguous, and their buffers, for tiles of so many elements.

    Args:
        tile_nelem: Elements of a tile.
        plans: Plans, one a tensor.
        buffers: Bytes of buffers, or their addresses, shape (n,).
        elements: The tensors.
        statuses: Status words, int64, or their addresses, where they are decoded.
        stats: Statistics, where they are encoded with such; the rows of a tensor are some.
        planned: Whether headers are compared with the plans'.
    """
    item = plans[0].dtype.itemsize
    rows, distinct = rows_of(plans, buffers, elements, item, statuses, stats, planned)
    decodes = statuses is not None
    return Batch(tile_nelem, rows, distinct, elements[0].device, empty=not decodes, summed=decodes)


def rows_of(
    plans: Sequence[Plan],
    buffers: Sequence[torch.Tensor] | Words,
    elements: Sequence[torch.Tensor],
    item: int,
    statuses: Sequence[torch.Tensor] | Words | None = None,
    stats: Sequence[torch.Tensor] | torch.Tensor | None = None,
    planned: Sequence[bool] | None = None,
) -> tuple[np.ndarray, list[Plan]]:
    """The rows of tensors and their buffers, see `batch_of`, and the distinct ones of the plans.

    `item`: bytes of what counts as an element; those of the plans are as large, or some of them.
    Memory may be given by addresses.
    """
    keys = list(map(id, plans))
    plan_of = dict(zip(keys, plans, strict=True))
    distinct = list(plan_of.values())
    numbers = dict(zip(plan_of, range(len(distinct)), strict=True))
    kinds = np.fromiter(map(numbers.__getitem__, keys), np.int64, len(keys))
    sizes = np.array([_sizes(plan, plan.dtype.itemsize // item) for plan in distinct], np.int64)
    rows = _rows(sizes[kinds], elements)
    owner = rows["tensor"]
    rows["plan"] = kinds[owner]
    for field, memory in (("data", buffers), ("status", statuses), ("stats", stats)):
        if memory is not None:
            rows[field] = addresses(memory)[owner]
    if planned is not None:
        rows["flags"] |= np.where(np.array(planned, bool)[owner], ROW_PLANNED, 0)
    return rows, distinct


def batch_to_measure(
    tile_nelem: int, elements: Sequence[torch.Tensor], stats: Sequence[torch.Tensor] | torch.Tensor
) -> Batch:
    """Tensors, contiguous, and memory for their statistics, as `batch_of`."""
    sizes = [(1, x.numel(), x.numel(), 0, 0, 0, 0) for x in elements]
    rows = _rows(np.array(sizes, np.int64), elements)
    rows["data"] = rows["elements"]
    rows["stats"] = addresses(stats)
    return Batch(tile_nelem, rows, (), elements[0].device)


def addresses(memory: Sequence[torch.Tensor] | torch.Tensor | Words) -> Words:
    """Addresses of tensors, or of the rows of one, shape (n,); or `memory` if it is such."""
    if isinstance(memory, np.ndarray):
        return memory
    if isinstance(memory, torch.Tensor):
        step = memory.stride(0) * memory.element_size()
        found: Words = np.arange(len(memory), dtype=np.int64) * step + memory.data_ptr()
        return found
    return np.fromiter(map(torch.Tensor.data_ptr, memory), np.int64, len(memory))


def _sizes(plan: Plan, units: int) -> tuple[int, ...]:
    """What `_rows` has to know of a plan, whose elements are so many units."""
    return (
        plan.chunks,
        plan.nelem * units,
        plan.chunk_nelem * units,
        plan.static_offset // 128,
        plan.static_stride // 128,
        plan.layout.sections[0].nbytes // 128,
        plan.header.nbytes // 8,
    )


def _rows(sizes: Words, elements: Sequence[torch.Tensor]) -> np.ndarray:
    """Rows of the chunks of tensors, of what `_sizes` gives of each, shape (tensors, 7).

    `tensor` is the number of a row's tensor, `sums` that of the first chunk of its tensor.
    """
    chunks = sizes[:, 0]
    owner = np.repeat(np.arange(len(sizes)), chunks)
    begins = (chunks.cumsum() - chunks)[owner]
    address = addresses(elements)
    aligned = (address % 16 == 0) & ((chunks == 1) | (sizes[:, 2] % 16 == 0))
    rows = np.zeros(len(owner), ROW)
    rows["sums"], rows["tensor"] = begins, owner
    rows["chunk"] = np.arange(len(owner)) - begins
    rows["elements"] = address[owner]
    rows["flags"] = np.where(aligned, ROW_ALIGNED, 0)[owner]
    fields = ("nelem", "chunk_nelem", "static", "stride", "second", "head")
    for k, field in enumerate(fields, start=1):
        rows[field] = sizes[owner, k]
    return rows
