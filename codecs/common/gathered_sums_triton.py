# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment,misc"
"""Sums of buffers of codecs that do not code tile by tile; see codecs/common/sums.py.

Buffers are checked first, by merged calls of the codec's `decode` without a result (merged_triton),
which leave in work memory where elements are. Then one launch adds up all buffers. A codec gives
READER(static_ptr, work_ptr, table_ptr, t, row, at, blocks, more, F): element bits, of the plan's
dtype, of rows of elements of a chunk, 0 where there are none. `t` is (chunk, chunks, first element,
elements).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from .base import Plan
from .frame_triton import Places, place_of
from .launch_triton import PTX, Variant, kernel, options
from .merged_triton import Work, launch_merged
from .minifloat_triton import aligned_for, as_float, elements_at, narrow, widen
from .runs_triton import negative_zero


@dataclass(frozen=True)
class Gather:
    """What the kernel knows of a codec and of a call.

    Attributes:
        rows, row: Rows of a tile, and the elements of one.
        exponent, item: Of the plan's dtype the bits of the exponent, and bytes.
        cell_exponent, cell_item: Those of the dtype in which a codec stores values.
        x_item: Bytes of the elements of the tensor; 0: there is none.
        out_item: Bytes of the elements that a sum is stored as: 4 is float32.
        scaled: A sum is multiplied by a number.
        aligned: Chunks start at multiples of 16 bytes of both.
        ptx: PTX may be used.
    """

    rows: int
    row: int
    exponent: int
    item: int
    cell_exponent: int
    cell_item: int
    x_item: int
    out_item: int
    scaled: bool
    aligned: bool
    ptx: bool


@triton.jit
def elements_of(row, F: tl.constexpr):
    """Numbers in the chunk of the elements of rows."""
    COLUMNS: tl.constexpr = F.row
    return row[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]


@triton.jit
def read_elements(static_ptr, work_ptr, table_ptr, t, row, at, blocks, more, F: tl.constexpr):
    """READER of buffers that were decoded to their work memory."""
    _, _, first, n = t
    i = elements_of(row, F)
    return tl.load(elements_at(work_ptr, F.item) + first + i, mask=i < n, other=0)


@triton.jit
def _local(x_ptr, first, i, n, F: tl.constexpr):
    """Elements of the tensor, float32."""
    x = tl.load(elements_at(x_ptr, F.x_item) + first + i, mask=i < n, other=0)
    return as_float(widen(x, F.exponent, F.x_item))


@kernel
def gathered_sum_kernel(
    x_ptr,
    out_ptr,
    sources_ptr,
    memory_ptr,
    table_ptr,
    nelem: tl.int64,
    chunk_nelem: tl.int64,
    tiles: tl.int32,
    static_at: tl.int64,
    stride: tl.int64,
    count: tl.int32,
    place: tl.int32,
    factor: tl.float32,
    work_stride: tl.int64,
    at: tl.int64,
    blocks: tl.int64,
    more: tl.int64,
    F: tl.constexpr,
    READER: tl.constexpr,
):
    """The sum of one tile of `count` buffers of a plan, and before number `place` of a tensor.

    Their work memory is `work_stride` * 16 bytes apart.
    """
    ROWS: tl.constexpr = F.rows
    COLUMNS: tl.constexpr = F.row
    pid = tl.program_id(0)
    chunk, tile = (pid // tiles).to(tl.int64), (pid % tiles).to(tl.int64)
    first = chunk * chunk_nelem
    if F.aligned:
        first = tl.multiple_of(first, 16)
    n = tl.maximum(tl.minimum(chunk_nelem, nelem - first), 0)
    t = chunk, (tl.num_programs(0) // tiles).to(tl.int64), first, n
    row = tile * ROWS + tl.arange(0, ROWS)
    i = elements_of(row, F)
    total = negative_zero([ROWS, COLUMNS])
    for number in range(0, count):
        if F.x_item > 0:
            if number == place:
                total += _local(x_ptr, first, i, n, F)
        src_ptr, _, _ = place_of(sources_ptr, number)
        static_ptr = src_ptr + (static_at + chunk * stride) * 128
        work_ptr = memory_ptr + number * work_stride * 16
        bits = READER(static_ptr, work_ptr, table_ptr, t, row, at, blocks, more, F)
        total += as_float(widen(bits, F.exponent, F.item))
    if F.x_item > 0:
        if place == count:
            total += _local(x_ptr, first, i, n, F)
    if F.scaled:
        total = total * factor
    bits = narrow(total, F.exponent, F.out_item, F.ptx)
    out = elements_at(out_ptr, F.out_item) + first + i
    bits = bits.to(out.dtype.element_ty)
    if (tile + 1) * (ROWS * COLUMNS) <= n:
        tl.store(out, bits)
    else:
        tl.store(out, bits, mask=i < n)


def check_sources(plan: Plan, places: Places, decode: Callable[..., None], planned: bool) -> Work:
    """Check buffers by `decode` of their codec; gives what that leaves in their work memory."""
    plans = [plan] * places.number
    work = Work(plans, places.table.device)

    def call(plan: Plan, src, scratch, status, _) -> None:
        decode(plan, src, None, scratch, status, store=False, planned=planned)

    srcs, statuses = places.kept[: places.number], places.kept[places.number :]
    launch_merged(plans, (srcs, work), call, statuses=statuses, kept=work.whole)
    return work


def launch_sum(
    read: Callable[..., Any],
    plan: Plan,
    places: Places,
    out: torch.Tensor,
    memory: torch.Tensor,
    work_nbytes: int,
    *,
    tile: int = 4096,
    row: int = 32,
    cell: Any = None,
    table: torch.Tensor | None = None,
    numbers: tuple[int, int, int] = (0, 0, 0),
    x: torch.Tensor | None = None,
    place: int = 0,
    factor: float | None = None,
) -> None:
    """Add up buffers that were checked, and `x`; see `tightwire.gpu_many` for the contract.

    Args:
        read: READER.
        plan: The plan of the buffers.
        places: Where they are.
        out: Where the sum goes.
        memory: Their work memory.
        work_nbytes: How far apart that of two is, a multiple of 16.
        tile: Elements of a tile.
        row: Elements of a row of it.
        cell: The dtype of stored values, if not the plan's.
        table: READER's `table_ptr`.
        numbers: READER's `at`, `blocks` and `more`.
        x: The tensor, or None.
        place: Before which number it is.
        factor: What the sum is multiplied by, or None.
    """
    dtype, cell = plan.dtype, cell or plan.dtype
    form = Gather(
        tile // row,
        row,
        dtype.exponent,
        dtype.itemsize,
        cell.exponent,
        cell.itemsize,
        0 if x is None else x.element_size(),
        out.element_size(),
        factor is not None,
        aligned_for(plan, out) and (x is None or aligned_for(plan, x)),
        PTX,
    )
    tiles = max(1, -(-plan.chunk_nelem // tile))
    _variant(read, form).launch(
        tiles * plan.chunks,
        (out if x is None else x, out, places.table, memory, out if table is None else table),
        plan.nelem,
        plan.chunk_nelem,
        tiles,
        plan.static_offset // 128,
        plan.static_stride // 128,
        places.number,
        place,
        1.0 if factor is None else factor,
        work_nbytes // 16,
        *numbers,
    )


@functools.cache
def _variant(read: Callable[..., Any], form: Gather) -> Variant:
    return Variant(gathered_sum_kernel, options(8), F=form, READER=read)
