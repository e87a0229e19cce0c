# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment,misc"
"""zipccl on a GPU, many tensors at once: whole chunks of any number of packed buffers.

Every chunk has a row of a table in device memory, which says where its parts lie, where its
elements go, and what its record holds: the host has read headers and records. A launch decodes all
chunks of one element size; a small one behind it checks padding and checksums. Chunks of the raw
codec are chunks that are stored raw.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
import triton.language as tl

from ..formats.dtypes import BY_NAME, DType
from .common.frame_triton import (
    CHUNK,
    CHUNK_PADDING,
    CHUNK_PAYLOAD,
    CHUNK_SUM,
    padding_of,
    report,
)
from .common.launch_triton import PTX, Variant, kernel, options
from .zipccl import COLUMNS, TILE, fields_of
from .zipccl_triton import decode_options, decode_raw, decode_tile, dynamic_share, index_of

_TILE = tl.constexpr(TILE)
_COLUMNS = tl.constexpr(COLUMNS)

#: A row of the table. `static` and `dynamic` are offsets in the memory that is decoded, `out` is an
#: address, sizes are in bytes; `nelem` counts units of the element size.
#: `words` is what the checksum leaves for the words of both parts; `fixed` is the base of all
#: windows, -1 if each tile has its own, -2 if all are alike; `flags`: 1 raw, 2 with a checksum.
ROW = np.dtype(
    [
        (name, np.int64)
        for name in (
            "static",
            "dynamic",
            "dynamic_nbytes",
            "out",
            "nelem",
            "static_nbytes",
            "index_at",
            "flags",
            "words",
            "first_tile",
            "fixed",
            "spare",
        )
    ]
)
_FIELDS = tl.constexpr(len(ROW.names or ()))

#: The element types by whose kernels raw chunks of an element size are copied.
RAW_AS = {1: BY_NAME["float8_e5m2"], 2: BY_NAME["bfloat16"], 4: BY_NAME["float32"]}


@kernel
def _decode_kernel(
    src_ptr,
    table_ptr,
    rows_ptr,
    sums_ptr,
    status_ptr,
    first_program: tl.int64,
    EXP: tl.constexpr,
    MAN: tl.constexpr,
    ITEM: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
    PTX: tl.constexpr,
):
    """One tile of one chunk. WHOLE: tiles of 4096 coded elements; else all the others."""
    pid = first_program + tl.program_id(0)
    row = tl.load(rows_ptr.to(tl.pointer_type(tl.int32)) + pid)
    r = table_ptr.to(tl.pointer_type(tl.int64)) + row.to(tl.int64) * _FIELDS
    n = tl.load(r + 4)
    flags = tl.load(r + 7)
    tile = (pid - tl.load(r + 9)).to(tl.int32)
    begin_tile = tile.to(tl.int64) * _TILE
    valid = tl.minimum(n - begin_tile, _TILE).to(tl.int32)
    is_raw = (flags & 1) != 0
    whole = (valid == _TILE) & (not is_raw)
    mine = whole
    if not WHOLE:
        mine = not whole
    if mine:
        static_ptr = src_ptr + tl.multiple_of(tl.load(r), 16)
        dynamic_ptr = src_ptr + tl.multiple_of(tl.load(r + 1), 16)
        dynamic_nbytes = tl.load(r + 2)
        out_ptr = tl.multiple_of(tl.load(r + 3), 16).to(tl.pointer_type(tl.uint8))
        stride = tl.load(r + 5)
        total = tl.zeros([], tl.uint64)
        if is_raw:
            total = decode_raw(
                static_ptr,
                dynamic_ptr,
                stride,
                begin_tile,
                valid,
                0,
                valid,
                out_ptr,
                begin_tile,
                0,
                EXP,
                ITEM,
                True,
                0,
                True,
            )
        else:
            index_at = tl.load(r + 6)
            fixed = tl.load(r + 10).to(tl.int32)
            tiles = ((n + _TILE - 1) // _TILE).to(tl.int32)
            entry, begin, end, bad, of_index = index_of(
                static_ptr, index_at, tile, tiles, dynamic_nbytes, fixed, EXP
            )
            wrong, total = decode_tile(
                static_ptr + tile.to(tl.int64) * BLOCK,
                (valid + 127) // 128 * 16,
                entry,
                dynamic_ptr,
                begin,
                end,
                dynamic_nbytes,
                out_ptr,
                begin_tile,
                0,
                valid,
                valid,
                tile * (BLOCK // 4),
                WHOLE,
                EXP,
                MAN,
                ITEM,
                True,
                0,
                True,
                PTX,
            )
            if bad | wrong:
                report(status_ptr, CHUNK + (row.to(tl.int64) << 8) + CHUNK_PAYLOAD)
            total += of_index
            total += dynamic_share(dynamic_ptr, dynamic_nbytes, stride, tile, tiles)
        tl.atomic_add(sums_ptr + row, total.to(tl.int64, bitcast=True), sem="relaxed")


@kernel
def _check_kernel(
    src_ptr,
    table_ptr,
    sums_ptr,
    status_ptr,
    first_row: tl.int32,
    ITEM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Padding and checksum of one chunk."""
    row = first_row + tl.program_id(0)
    r = table_ptr.to(tl.pointer_type(tl.int64)) + row.to(tl.int64) * _FIELDS
    static_ptr = src_ptr + tl.load(r)
    dynamic_ptr = src_ptr + tl.load(r + 1)
    dynamic_nbytes = tl.load(r + 2)
    n = tl.load(r + 4)
    stride = tl.load(r + 5)
    index_at = tl.load(r + 6)
    flags = tl.load(r + 7)
    where = row.to(tl.int64) << 8
    if (flags & 1) != 0:
        total, padding = padding_of(static_ptr, tl.minimum(n * ITEM, stride), stride)
    else:
        whole = n // _TILE
        cols = (n % _TILE + 127) // 128 * 16
        tiles = (n + _TILE - 1) // _TILE
        total, padding = padding_of(
            static_ptr, whole * BLOCK + cols * (BLOCK // _COLUMNS), index_at
        )
        more, others = padding_of(static_ptr, index_at + 6 * tiles, stride)
        total += more
        padding |= others
    _, others = padding_of(dynamic_ptr, dynamic_nbytes, (dynamic_nbytes + 127) // 128 * 128)
    padding |= others
    if padding != 0:
        report(status_ptr, CHUNK + where + CHUNK_PADDING)
    if (flags & 2) != 0:
        total += tl.load(sums_ptr + row).to(tl.uint64, bitcast=True)
        if total != tl.load(r + 8).to(tl.uint64, bitcast=True):
            report(status_ptr, CHUNK + where + CHUNK_SUM)


class Batch:
    """Chunks of buffers, described by rows (of `ROW`), to decode in a few launches.

    All are of `dtype`, one that `supports` takes, or raw with its element size (`RAW_AS`). Parts
    and results start at multiples of 16 bytes. Nothing waits for the device: the memory that rows
    name must stay until the stream has come this far.
    """

    def __init__(self, dtype: DType, rows: np.ndarray, device: torch.device) -> None:
        tiles = -(-rows["nelem"] // TILE)
        ends = np.cumsum(tiles)
        rows["first_tile"] = ends - tiles
        raw = (rows["flags"] & 1) != 0
        self._dtype = dtype
        self._programs = np.concatenate([[0], ends])
        self._whole = ~raw & (rows["nelem"] >= TILE)
        self._rest = raw | (rows["nelem"] % TILE != 0)
        owners = np.repeat(np.arange(len(rows), dtype=np.int32), tiles)
        self._table = _upload(rows.view(np.uint8), device)
        self._owners = _upload(owners.view(np.uint8), device)
        self._sums = torch.zeros(len(rows), dtype=torch.int64, device=device)
        #: What decoding finds wrong, int64, shape (1,); its chunk number is that of a row. See
        #: `tightwire.codecs.common.frame_triton.problem`.
        self.status = torch.zeros(1, dtype=torch.int64, device=device)

    def decode(self, first: int, stop: int, src: torch.Tensor) -> None:
        """Decode and check the chunks of rows `first` to `stop`, whose bytes are in `src`."""
        start, end = int(self._programs[first]), int(self._programs[stop])
        tensors = (src, self._table, self._owners, self._sums, self.status)
        for whole, wanted in ((True, self._whole), (False, self._rest)):
            if end > start and wanted[first:stop].any():
                _decode_variant(self._dtype, whole).launch(end - start, tensors, start)
        check = (src, self._table, self._sums, self.status)
        _check_variant(self._dtype).launch(stop - first, check, first)


def _upload(host: np.ndarray, device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(host)
    if device.type == "cpu":
        return tensor.clone()
    return tensor.pin_memory().to(device, non_blocking=True)


@functools.cache
def _decode_variant(dtype: DType, whole: bool) -> Variant:
    fields = fields_of(dtype)
    return Variant(
        _decode_kernel,
        decode_options(dtype.itemsize, 0 if whole else 2),
        EXP=fields.exponent,
        MAN=fields.mantissa,
        ITEM=dtype.itemsize,
        BLOCK=fields.block_nbytes(COLUMNS),
        WHOLE=whole,
        PTX=PTX,
    )


@functools.cache
def _check_variant(dtype: DType) -> Variant:
    block = fields_of(dtype).block_nbytes(COLUMNS)
    return Variant(_check_kernel, options(1), ITEM=dtype.itemsize, BLOCK=block)
