# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment,misc"
"""zipccl on a GPU, many tensors and their buffers at once: all chunks in the launches of one.

Chunks are rows of a table in device memory (common/batch_triton.py), with more words beside them
(`MORE`). The host makes both, of plans and addresses, and of records where it has read them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from ..formats.dtypes import BY_NAME, DType
from .common.base import Key, Plan
from .common.batch_triton import (
    Batch,
    Layout,
    addresses,
    elements_of,
    layout_of,
    put,
    row_of,
)
from .common.frame_triton import (
    ROW_PLANNED,
    ROW_WORDS,
    Words,
    check_header,
    place_of,
    plan_of_row,
)
from .common.launch_triton import Variant, kernel, options
from .zipccl import TILE, Zipccl
from .zipccl_decode_triton import check_one, decode_one, decode_options
from .zipccl_encode_triton import encode_one, encode_options, finish_one, window_of, work_at
from .zipccl_words_triton import Part, fixed_of, launch_of

_TILE, _PLANNED = tl.constexpr(TILE), tl.constexpr(ROW_PLANNED)
#: More of a row's chunk: where its dynamic part starts in the buffer and how long it may be, in
#: bytes; `Part.fixed`; whether the buffer is packed, so that the dynamic part is padded; numbers of
#: its first tile and group in the workspace.
MORE = np.dtype(
    [(name, np.int64) for name in ("dynamic", "slot_nbytes", "fixed", "packed", "tile", "group")]
)
_MORE = tl.constexpr(len(MORE.names or ()))
#: The element types by whose kernels raw chunks of an element size are copied.
RAW_AS = {1: BY_NAME["float8_e5m2"], 2: BY_NAME["bfloat16"], 4: BY_NAME["float32"]}


@triton.jit
def _part_of(row_ptr, more_ptr):
    """(The chunk of a row, its first element in the tensor, more of it)."""
    data_ptr, _, _ = place_of(row_ptr, 0, ROW_WORDS)
    more = more_ptr.to(tl.pointer_type(tl.int64)) + tl.load(row_ptr + 15) * _MORE
    chunk, nelem, size = tl.load(row_ptr + 4), tl.load(row_ptr + 8), tl.load(row_ptr + 9)
    stride = tl.load(row_ptr + 11) * 128
    p = Part(
        data_ptr + (tl.load(row_ptr + 10) * 128 + chunk * stride),
        data_ptr + tl.multiple_of(tl.load(more), 16),
        data_ptr.to(tl.pointer_type(tl.int64)) + (tl.load(row_ptr + 13) + chunk * 4),
        chunk,
        tl.maximum(tl.minimum(size, nelem - chunk * size), 0),
        stride,
        tl.load(more + 1),
        tl.load(row_ptr + 12) * 128,
        tl.load(more + 2).to(tl.int32),
    )
    return p, chunk * size, more


#: For tiles that are not whole, or not aligned: apart, so that kernels compile fast.
_encode_apart = triton.jit(encode_one.fn, noinline=True)
_decode_apart = triton.jit(decode_one.fn, noinline=True)


@kernel
def _encode_rows_kernel(
    sources_ptr,
    firsts_ptr,
    owners_ptr,
    more_ptr,
    totals_ptr,
    counts_ptr,
    slots_ptr,
    groups: tl.int64,
    shift: tl.int32,
    L: tl.constexpr,
):
    """One tile of a table's chunks. `totals_ptr`: checksum terms and escapes of all groups."""
    pid = tl.program_id(0)
    row_ptr = row_of(sources_ptr, firsts_ptr, owners_ptr, pid)
    p, first, more = _part_of(row_ptr, more_ptr)
    tile = (pid - tl.load(row_ptr + 7)).to(tl.int32)
    x_ptr, aligned = elements_of(row_ptr)
    stats_ptr = tl.load(row_ptr + 6).to(tl.pointer_type(tl.int64))
    # fmt: off
    work = work_at(
        totals_ptr, totals_ptr + groups * 8, counts_ptr, slots_ptr, tl.load(more + 5),
        tl.load(more + 4), L.slot,
    )
    # fmt: on
    begin = tile.to(tl.int64) * _TILE
    if aligned & (begin + _TILE <= p.n):
        encode_one(x_ptr, first, p, work, tile, shift, stats_ptr, True, L)
    elif begin < p.n:
        _encode_apart(x_ptr, first, p, work, tile, shift, stats_ptr, False, L)


@kernel
def _finish_rows_kernel(
    sources_ptr,
    firsts_ptr,
    owners_ptr,
    more_ptr,
    totals_ptr,
    counts_ptr,
    slots_ptr,
    groups: tl.int64,
    shift: tl.int32,
    L: tl.constexpr,
):
    """One group of tiles of a table's chunks."""
    pid = tl.program_id(0)
    row_ptr = row_of(sources_ptr, firsts_ptr, owners_ptr, pid)
    p, first, more = _part_of(row_ptr, more_ptr)
    x_ptr, _ = elements_of(row_ptr)
    # fmt: off
    work = work_at(
        totals_ptr, totals_ptr + groups * 8, counts_ptr, slots_ptr, tl.load(more + 5),
        tl.load(more + 4), L.slot,
    )
    # fmt: on
    group = (pid - tl.load(row_ptr + 7)).to(tl.int32)
    tiles = ((p.n + _TILE - 1) // _TILE).to(tl.int32)
    here = tl.maximum((tiles + (1 << shift) - 1) >> shift, 1)
    finish_one(x_ptr, first, p, work, group, here, shift, L)


@kernel
def _decode_rows_kernel(sources_ptr, firsts_ptr, owners_ptr, more_ptr, L: tl.constexpr):
    """One tile of a table's chunks."""
    pid = tl.program_id(0)
    row_ptr = row_of(sources_ptr, firsts_ptr, owners_ptr, pid)
    _, sums_ptr, status_ptr = place_of(row_ptr, 0, ROW_WORDS)
    p, first, _ = _part_of(row_ptr, more_ptr)
    tile = (pid - tl.load(row_ptr + 7)).to(tl.int32)
    out_ptr, aligned = elements_of(row_ptr)
    begin = tile.to(tl.int64) * _TILE
    if begin < p.n:
        hi = tl.minimum(p.n - begin, _TILE)
        lo, to = hi * 0, first + begin
        if aligned & (hi == _TILE):
            total = decode_one(p, tile, lo, hi, out_ptr, to, status_ptr, True, L)
        else:
            total = _decode_apart(p, tile, lo, hi, out_ptr, to, status_ptr, False, L)
        if L.sums:
            at = sums_ptr + p.chunk
            tl.atomic_add(at, total.to(tl.int64, bitcast=True), sem="relaxed")


@kernel
def _check_rows_kernel(sources_ptr, more_ptr, ITEM: tl.constexpr):
    """One of a table's chunks, that was decoded; once, the header of its buffer."""
    row_ptr = sources_ptr + tl.program_id(0).to(tl.int64) * ROW_WORDS
    src_ptr, sums_ptr, status_ptr = place_of(row_ptr, 0, ROW_WORDS)
    plan_ptr, chunk = plan_of_row(row_ptr)
    planned = (tl.load(row_ptr + 14) & _PLANNED).to(tl.int32)
    if (planned != 0) & (chunk == 0):
        check_header(src_ptr, plan_ptr, status_ptr)
    p, _, more = _part_of(row_ptr, more_ptr)
    # fmt: off
    check_one(
        p, p.n * ITEM, src_ptr, plan_ptr, sums_ptr + chunk, 1, status_ptr, True, planned,
        tl.load(more + 3) != 0, tl.load(plan_ptr + 7) != 0,
    )


def encode_many(
    plans: Sequence[Plan],
    xs: Sequence[torch.Tensor],
    outs: Sequence[torch.Tensor] | Words,
    stats: Sequence[torch.Tensor] | None = None,
    key: Key | None = None,
) -> None:
    """Encode tensors into buffers; see `tightwire.gpu_many` for the contract.

    One launch begins all, and two encode. The workspace, about 1/40 of the tensors, is torch's.
    """
    spec, dtype, device = plans[0].codec, plans[0].dtype, xs[0].device
    assert isinstance(spec, Zipccl)
    if stats is not None:
        stats = [s if s.dtype == torch.int64 else s.to(torch.int64) for s in stats]
    tiles = layout_of(TILE, plans, dtype.itemsize, True)
    shift = max(5, (int(tiles.rows["chunk_nelem"].max(initial=0)) // TILE >> 13).bit_length())
    groups = layout_of(TILE << shift, plans, dtype.itemsize, True)
    more = tiles.kept.get("more")
    if more is None:
        more = tiles.kept["more"] = _more(plans, tiles)
        more["tile"], more["group"] = tiles.rows["first"], groups.rows["first"]
    at = addresses(xs)
    batches = [Batch(layout, outs, at, stats=stats) for layout in (tiles, groups)]
    table, begin = put(batches, device, more.view(np.int64))
    launch = launch_of(dtype, window=window_of(spec, stats is not None), sums=plans[0].checksum)
    tensors = (
        table,
        torch.zeros(groups.programs * 12, dtype=torch.uint8, device=device),
        torch.empty(tiles.programs * 2, dtype=torch.uint8, device=device),
        torch.empty(tiles.programs * launch.slot, dtype=torch.uint8, device=device),
    )
    batches[0].begin()
    numbers = groups.programs, shift
    for variant, batch in zip(_encode_variants(launch), batches, strict=True):
        offsets = *batch.offsets, begin, 0, 0, 0
        variant.launch(batch.programs, (*batch.tensors, *tensors), *numbers, offsets=offsets)


def decode_many(
    plans: Sequence[Plan],
    srcs: Sequence[torch.Tensor] | Words,
    outs: Sequence[torch.Tensor],
    statuses: Sequence[torch.Tensor] | Words,
    planned: Sequence[bool],
) -> None:
    """Decode buffers whole, in one launch, and check them in one; see `tightwire.gpu_many`."""
    decode_places(plans[0].dtype, plans, srcs, outs, statuses, planned)


def decode_places(
    dtype: DType,
    plans: Sequence[Plan],
    data: Sequence[torch.Tensor] | Words,
    outs: Sequence[torch.Tensor],
    statuses: Sequence[torch.Tensor] | Words,
    planned: Sequence[bool] | None = None,
    packed: tuple[Words, Words] | None = None,
) -> None:
    """As `decode_many`, also of packed buffers, and of memory at addresses.

    Args:
        dtype: One that `supports` takes, that of the plans; or they are raw, of its element size
            or a multiple (`RAW_AS`).
        plans: Plans, one a buffer.
        data: Buffers, or their addresses, multiples of 16, shape (buffers,).
        outs: Where elements go.
        statuses: Status words, or their addresses, shape (buffers,).
        planned: Which headers are compared with the plans'; None: none.
        packed: None, or of packed buffers where dynamic parts start in their buffer, and their
            bytes: two arrays, of all chunks one behind the other.
    """
    layout = layout_of(TILE, plans, dtype.itemsize, True)
    more = layout.kept.get("slots")
    if more is None:
        more = layout.kept["slots"] = _more(plans, layout)
    if packed is not None:
        more = more.copy()
        more["packed"] = 1
        more["dynamic"], more["slot_nbytes"] = packed
    batch = Batch(layout, data, outs, statuses=statuses, planned=planned)
    table, begin = put([batch], outs[0].device, more.view(np.int64))
    decode, check = _decode_variants(dtype, any(plan.checksum for plan in plans))
    offsets = *batch.offsets, begin
    decode.launch(batch.programs, (*batch.tensors, table), offsets=offsets)
    check.launch(layout.number, (table, table), offsets=(batch.offsets[0], begin))


def _more(plans: Sequence[Plan], layout: Layout) -> np.ndarray:
    """`MORE` of rows of buffers with slots."""
    own = [(p.dynamic_offset, p.dynamic_stride, fixed_of(p.codec)) for p in plans]
    start, stride, fixed = np.array(own, np.int64).T[:, layout.owner]
    more = np.zeros(layout.number, MORE)
    more["dynamic"], more["slot_nbytes"] = start + layout.rows["chunk"] * stride, stride
    more["fixed"] = fixed
    return more


@functools.cache
def _encode_variants(launch) -> tuple[Variant, Variant]:
    chosen = encode_options(launch.item, 0, launch.sums)
    return (
        Variant(_encode_rows_kernel, chosen, L=launch),
        Variant(_finish_rows_kernel, options(8, maxnreg=64), L=launch),
    )


@functools.cache
def _decode_variants(dtype: DType, sums: bool) -> tuple[Variant, Variant]:
    return (
        Variant(
            _decode_rows_kernel, decode_options(dtype.itemsize, 0), L=launch_of(dtype, sums=sums)
        ),
        Variant(_check_rows_kernel, options(1), ITEM=dtype.itemsize),
    )
