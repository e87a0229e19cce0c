# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment,misc"
"""delta on a GPU, many tensors and their buffers at once: all chunks in the launches of one.

Chunks are rows of a table in device memory (common/batch_triton.py), with more words beside them
(`MORE`). The host makes both, of plans and addresses, and of records where it has read them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import torch
import triton
import triton.language as tl

from .common.base import Plan
from .common.batch_triton import Batch, Layout, addresses, elements_of, layout_of, put, row_of
from .common.dynamic_triton import add_share, claims
from .common.frame_triton import (
    ROW_ALIGNED,
    ROW_PLANNED,
    ROW_WORDS,
    Words,
    check_header,
    place_of,
    plan_of_row,
    pointer_of,
)
from .common.launch_triton import Variant, kernel, options
from .delta import TILE, TILE_SCRATCH, sums_scratch
from .delta_decode_triton import Part, change_one
from .delta_encode_triton import Target, measure_one, pack_one, place_one, scan_one
from .delta_planes_triton import flip_one, size_one, write_planes_one
from .delta_read_triton import check_one, read_one, result_one
from .delta_triton import CHANGES, MEASURE, PLANES, SCAN, WRITE_PLANES, is_adaptive, variant_of
from .delta_words_triton import SUMS, tile_at

_TILE, _PLANNED = tl.constexpr(TILE), tl.constexpr(ROW_PLANNED)
#: More of a row's chunk: the address of the base, where its dynamic part starts in the buffer, and
#: how long it may be, in bytes.
MORE = np.dtype([(name, np.int64) for name in ("base", "dynamic", "slot_nbytes")])
_MORE = tl.constexpr(len(MORE.names or ()))

#: What decoding is for: memory of its own; none, all is checked; that of the base, without a check
#: of the result, which was made before.
Goal = Literal["out", "check", "base"]


@triton.jit
def _tile_of(row_ptr, number, pid, scratch_ptr, sums_words):
    """Tile number `pid` of all, which row `number` has."""
    tile = (pid - tl.load(row_ptr + 7)).to(tl.int32)
    chunk, nelem, size = tl.load(row_ptr + 4), tl.load(row_ptr + 8), tl.load(row_ptr + 9)
    return tile_at(chunk, tile, pid.to(tl.int64), number, nelem, size, scratch_ptr, sums_words)


@triton.jit
def _more_of(more_ptr, number):
    """(base, where the dynamic part starts in the buffer, bytes that it may have) of a row."""
    more = more_ptr.to(tl.pointer_type(tl.int64)) + number * _MORE
    return pointer_of(tl.load(more)), tl.multiple_of(tl.load(more + 1), 16), tl.load(more + 2)


@triton.jit
def _places_of(row_ptr, chunk, dynamic):
    """(static part, dynamic part, record, bytes of a static part) of a row's chunk."""
    data_ptr, _, _ = place_of(row_ptr, 0, ROW_WORDS)
    stride = tl.load(row_ptr + 11) * 128
    static_ptr = data_ptr + (tl.load(row_ptr + 10) * 128 + chunk * stride)
    record_ptr = data_ptr.to(tl.pointer_type(tl.int64)) + (tl.load(row_ptr + 13) + chunk * 4)
    return static_ptr, data_ptr + dynamic, record_ptr, stride


@triton.jit
def _target_of(row_ptr, more_ptr, t, number):
    """Where a tile's chunk is written to."""
    _, dynamic, most = _more_of(more_ptr, number)
    static_ptr, dynamic_ptr, record_ptr, stride = _places_of(row_ptr, t.chunk, dynamic)
    return Target(static_ptr, dynamic_ptr, record_ptr, stride, most)


@triton.jit
def _part_of(row_ptr, more_ptr, t, number, ITEM: tl.constexpr):
    """The chunk of a tile."""
    _, dynamic, slot = _more_of(more_ptr, number)
    static_ptr, dynamic_ptr, record_ptr, stride = _places_of(row_ptr, t.chunk, dynamic)
    nbytes, raw = claims(record_ptr, t.n, stride, slot, ITEM)
    return Part(static_ptr, dynamic_ptr, stride, nbytes, raw)


@triton.jit
def _own(sources_ptr, firsts_ptr, owners_ptr, more_ptr, scratch_ptr, sums_words):
    """(The row of this program's tile, its number, the tile, the base)."""
    pid = tl.program_id(0)
    row_ptr = row_of(sources_ptr, firsts_ptr, owners_ptr, pid)
    number = (row_ptr.to(tl.int64) - sources_ptr.to(tl.int64)) // (8 * ROW_WORDS)
    from_ptr, _, _ = _more_of(more_ptr, number)
    return row_ptr, number, _tile_of(row_ptr, number, pid, scratch_ptr, sums_words), from_ptr


@kernel
def _scan_rows_kernel(
    sources_ptr,
    firsts_ptr,
    owners_ptr,
    more_ptr,
    scratch_ptr,
    sums_words: tl.int64,
    L: tl.constexpr,
):
    """See `scan_one`; one tile of a table's chunks."""
    # fmt: off
    row_ptr, _, t, from_ptr = _own(
        sources_ptr, firsts_ptr, owners_ptr, more_ptr, scratch_ptr, sums_words
    )
    # fmt: on
    scan_one(elements_of(row_ptr)[0], from_ptr, t, L)


@kernel
def _measure_rows_kernel(
    sources_ptr,
    firsts_ptr,
    owners_ptr,
    more_ptr,
    scratch_ptr,
    sums_words: tl.int64,
    L: tl.constexpr,
):
    """See `measure_one`; one tile of a table's chunks."""
    # fmt: off
    row_ptr, _, t, from_ptr = _own(
        sources_ptr, firsts_ptr, owners_ptr, more_ptr, scratch_ptr, sums_words
    )
    # fmt: on
    measure_one(elements_of(row_ptr)[0], from_ptr, t, L)


@kernel
def _size_rows_kernel(
    sources_ptr,
    firsts_ptr,
    owners_ptr,
    more_ptr,
    scratch_ptr,
    sums_words: tl.int64,
    L: tl.constexpr,
):
    """See `size_one`; one tile of a table's chunks."""
    # fmt: off
    row_ptr, _, t, from_ptr = _own(
        sources_ptr, firsts_ptr, owners_ptr, more_ptr, scratch_ptr, sums_words
    )
    # fmt: on
    size_one(elements_of(row_ptr)[0], from_ptr, t, L)


@kernel
def _place_rows_kernel(sources_ptr, scratch_ptr, sums_words: tl.int64):
    """See `place_one`; one of a table's chunks."""
    number = tl.program_id(0).to(tl.int64)
    row_ptr = sources_ptr + number * ROW_WORDS
    first = tl.load(row_ptr + 7)
    t = _tile_of(row_ptr, number, first, scratch_ptr, sums_words)
    place_one(t.info, t.sums, ((t.n + _TILE - 1) // _TILE).to(tl.int32))


@kernel
def _pack_rows_kernel(
    sources_ptr,
    firsts_ptr,
    owners_ptr,
    more_ptr,
    scratch_ptr,
    sums_words: tl.int64,
    L: tl.constexpr,
):
    """See `pack_one`; one tile of a table's chunks."""
    # fmt: off
    row_ptr, number, t, from_ptr = _own(
        sources_ptr, firsts_ptr, owners_ptr, more_ptr, scratch_ptr, sums_words
    )
    # fmt: on
    if t.m > 0:
        target = _target_of(row_ptr, more_ptr, t, number)
        pack_one(elements_of(row_ptr)[0], from_ptr, t, target, L)


@kernel
def _write_planes_rows_kernel(
    sources_ptr,
    firsts_ptr,
    owners_ptr,
    more_ptr,
    scratch_ptr,
    sums_words: tl.int64,
    L: tl.constexpr,
):
    """See `write_planes_one`; one tile of a table's chunks."""
    # fmt: off
    row_ptr, number, t, from_ptr = _own(
        sources_ptr, firsts_ptr, owners_ptr, more_ptr, scratch_ptr, sums_words
    )
    # fmt: on
    if t.m > 0:
        target = _target_of(row_ptr, more_ptr, t, number)
        write_planes_one(elements_of(row_ptr)[0], from_ptr, t, target, L)


@kernel
def _sum_rows_kernel(
    sources_ptr, firsts_ptr, owners_ptr, more_ptr, scratch_ptr, sums_words: tl.int64
):
    """Add a tile's share of the checksum terms of its chunk to the record."""
    # fmt: off
    row_ptr, number, t, _ = _own(
        sources_ptr, firsts_ptr, owners_ptr, more_ptr, scratch_ptr, sums_words
    )
    # fmt: on
    target = _target_of(row_ptr, more_ptr, t, number)
    if t.m > 0:
        tiles = (t.n + _TILE - 1) // _TILE
        add_share(
            target.static_ptr, target.dynamic_ptr, target.record_ptr, target.stride, t.tile, tiles
        )


@kernel
def _read_rows_kernel(
    sources_ptr,
    firsts_ptr,
    owners_ptr,
    more_ptr,
    scratch_ptr,
    sums_words: tl.int64,
    L: tl.constexpr,
):
    """See `read_one`; one tile of a table's chunks."""
    # fmt: off
    row_ptr, number, t, from_ptr = _own(
        sources_ptr, firsts_ptr, owners_ptr, more_ptr, scratch_ptr, sums_words
    )
    # fmt: on
    read_one(t, _part_of(row_ptr, more_ptr, t, number, L.item), from_ptr, L)


@kernel
def _check_rows_kernel(sources_ptr, more_ptr, scratch_ptr, sums_words: tl.int64, L: tl.constexpr):
    """See `check_one`; one of a table's chunks; once, the header of its buffer."""
    number = tl.program_id(0).to(tl.int64)
    row_ptr = sources_ptr + number * ROW_WORDS
    src_ptr, _, status_ptr = place_of(row_ptr, 0, ROW_WORDS)
    plan_ptr, chunk = plan_of_row(row_ptr)
    planned = (tl.load(row_ptr + 14) & _PLANNED).to(tl.int32)
    if (planned != 0) & (chunk == 0):
        check_header(src_ptr, plan_ptr, status_ptr)
    _, dynamic, slot = _more_of(more_ptr, number)
    sums = scratch_ptr.to(tl.pointer_type(tl.int64)) + number * SUMS
    # fmt: off
    check_one(
        src_ptr, plan_ptr, status_ptr, chunk, sums, src_ptr + dynamic, chunk >= 0, planned, slot, L
    )
    # fmt: on


@kernel
def _change_rows_kernel(
    sources_ptr,
    firsts_ptr,
    owners_ptr,
    more_ptr,
    scratch_ptr,
    sums_words: tl.int64,
    L: tl.constexpr,
):
    """See `change_one`; one tile of a table's chunks, whole."""
    # fmt: off
    row_ptr, number, t, from_ptr = _own(
        sources_ptr, firsts_ptr, owners_ptr, more_ptr, scratch_ptr, sums_words
    )
    # fmt: on
    _, _, status_ptr = place_of(row_ptr, 0, ROW_WORDS)
    p = _part_of(row_ptr, more_ptr, t, number, L.item)
    out_ptr, _ = elements_of(row_ptr)
    change_one(t, p, from_ptr, out_ptr, t.first, t.m * 0, t.m, status_ptr, L)


@kernel
def _flip_rows_kernel(
    sources_ptr,
    firsts_ptr,
    owners_ptr,
    more_ptr,
    scratch_ptr,
    sums_words: tl.int64,
    L: tl.constexpr,
):
    """See `flip_one`; one tile of a table's chunks, whole."""
    # fmt: off
    row_ptr, number, t, from_ptr = _own(
        sources_ptr, firsts_ptr, owners_ptr, more_ptr, scratch_ptr, sums_words
    )
    # fmt: on
    _, _, status_ptr = place_of(row_ptr, 0, ROW_WORDS)
    p = _part_of(row_ptr, more_ptr, t, number, L.item)
    out_ptr, _ = elements_of(row_ptr)
    flip_one(t, p, from_ptr, out_ptr, t.first, t.m * 0, t.m, status_ptr, L)


@kernel
def _result_rows_kernel(sources_ptr, scratch_ptr, sums_words: tl.int64):
    """See `result_one`; one of a table's chunks."""
    number = tl.program_id(0).to(tl.int64)
    row_ptr = sources_ptr + number * ROW_WORDS
    _, _, status_ptr = place_of(row_ptr, 0, ROW_WORDS)
    chunk = tl.load(row_ptr + 4)
    static_ptr, _, record_ptr, _ = _places_of(row_ptr, chunk, chunk * 0)
    sums = scratch_ptr.to(tl.pointer_type(tl.int64)) + number * SUMS
    result_one(record_ptr, static_ptr, sums, chunk, status_ptr)


class Rows:
    """Tensors of one codec, dtype and checksum, their bases and buffers, in a table on a device.

    All are contiguous and on torch's current device.
    """

    def __init__(
        self,
        plans: Sequence[Plan],
        buffers: Sequence[torch.Tensor] | Words,
        elements: Sequence[torch.Tensor],
        bases: Sequence[torch.Tensor],
        statuses: Words | None = None,
        planned: Sequence[bool] | None = None,
        packed: tuple[Words, Words] | None = None,
    ) -> None:
        """Nothing waits for the device: the memory that is named must stay.

        Args:
            plans: Plans, one a buffer.
            buffers: Buffers, or their addresses, multiples of 16, shape (n,).
            elements: Tensors that are encoded, or where elements go.
            bases: What they are against.
            statuses: Where they are decoded, addresses of status words, shape (n,).
            planned: Which headers are compared with the plans'; None: none.
            packed: None, or of packed buffers where dynamic parts start in their buffer, and their
                bytes: two arrays, of all chunks one behind the other.
        """
        self._plan, self._device = plans[0], elements[0].device
        layout = layout_of(TILE, plans, self._plan.dtype.itemsize, True)
        more = layout.kept.get("delta")
        if more is None:
            more = layout.kept["delta"] = _more(plans, layout)
        more = more.copy()
        self._packed = packed is not None
        if packed is not None:
            more["dynamic"], more["slot_nbytes"] = packed
        places = addresses(bases)[layout.owner]
        more["base"] = places
        batch = Batch(layout, buffers, elements, statuses=statuses, planned=planned)
        flags = layout.rows_in(batch.words)["flags"]
        self._aligned = bool(((flags & ROW_ALIGNED) != 0).all()) and not (places % 16).any()
        table, begin = put([batch], self._device, more.view(np.int64))
        self._batch, self._number = batch, layout.number
        self._tensors = *batch.tensors, table
        self._offsets = *batch.offsets, begin, 0

    def encode(self) -> None:
        """Encode tensors into buffers, as `delta_triton.encode` does one."""
        plan = self._plan
        self._batch.begin()
        kind, aligned = (plan.codec, plan.dtype), self._aligned
        tiles, chunks = self._launchers()
        tiles(variant_of(_scan_rows_kernel, *kind, *SCAN, aligned=aligned))
        adaptive = is_adaptive(plan.codec)
        measure = variant_of(
            _measure_rows_kernel, *kind, *MEASURE, aligned=aligned, adaptive=adaptive
        )
        tiles(measure)
        if adaptive:
            tiles(variant_of(_size_rows_kernel, *kind, *PLANES, aligned=aligned))
        chunks(_PLACE, 0)
        tiles(variant_of(_pack_rows_kernel, *kind, aligned=aligned, sums=plan.checksum))
        if adaptive:
            tiles(variant_of(_write_planes_rows_kernel, *kind, *WRITE_PLANES, aligned=aligned))
        if plan.checksum:
            tiles(_SUM)

    def decode(self, goal: Goal) -> None:
        """Decode buffers whole, all of which is checked, as `delta_triton.decode` does one.

        Unless the `goal` is "out" tensors are the bases. Nothing is written of a buffer whose
        status word is not 0.
        """
        plan = self._plan
        kind, aligned = (plan.codec, plan.dtype), self._aligned
        chosen = {"packed": self._packed, "sums": plan.checksum}
        # What `change_one` is to do.
        adaptive = is_adaptive(plan.codec)
        goals = {"store": goal != "check", "over": goal == "base", "adaptive": adaptive}
        tiles, chunks = self._launchers()
        tiles(variant_of(_read_rows_kernel, *kind, aligned=aligned, **chosen))
        chunks(variant_of(_check_rows_kernel, *kind, **chosen), 0, 3)
        tiles(variant_of(_change_rows_kernel, *kind, *CHANGES, aligned=aligned, **goals))
        if adaptive:
            tiles(variant_of(_flip_rows_kernel, *kind, *PLANES, aligned=aligned, **goals))
        if goal != "base":
            chunks(_RESULT, 0)

    def _launchers(self) -> tuple[Callable[..., None], Callable[..., None]]:
        """What launches a program for each tile, and what does for each chunk.

        They share work memory, in which sums of chunks start at 0. The second takes the numbers of
        the tables that its kernel has.
        """
        sums = sums_scratch(self._number)
        nbytes = sums + TILE_SCRATCH * self._batch.programs
        scratch = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        scratch[:sums].zero_()
        tensors, offsets = (*self._tensors, scratch), self._offsets

        def of_tiles(variant: Variant) -> None:
            variant.launch(self._batch.programs, tensors, sums // 4, offsets=offsets)

        def of_chunks(variant: Variant, *tables: int) -> None:
            chosen = *tables, len(tensors) - 1
            given, at = [tensors[i] for i in chosen], [offsets[i] for i in chosen]
            variant.launch(self._number, given, sums // 4, offsets=at)

        return of_tiles, of_chunks


def _more(plans: Sequence[Plan], layout: Layout) -> np.ndarray:
    """`MORE` of rows of buffers with slots."""
    own = [(p.dynamic_offset, p.dynamic_stride) for p in plans]
    start, stride = np.array(own, np.int64).T[:, layout.owner]
    more = np.zeros(layout.number, MORE)
    more["dynamic"], more["slot_nbytes"] = start + layout.rows["chunk"] * stride, stride
    return more


_PLACE = Variant(_place_rows_kernel, options(16))
_SUM = Variant(_sum_rows_kernel, options(4))
_RESULT = Variant(_result_rows_kernel, options(1))
