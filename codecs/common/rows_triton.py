# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment,misc,var-annotated"
"""Rows that are encoded each by itself, and read out of the memory of several ranks.

A row is a chunk of its own, whose static part lies a stride behind the row's before. There are no
headers and no checksums: rows are for memory that ranks read where it lies, and they live until the
next exchange but one. The codecs' own functions encode and decode tiles (tiles_triton).

Memory has two halves, which exchanges use alternately. A count on the device, of barriers so far,
says which: before the barrier of an exchange ranks write to half (count + 1) % 2, behind it they
read half count % 2. So a captured graph can be replayed at any time.

Which rows are read is on the device: a place is `rank << 32 | row`, and -1 is none.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from .base import Plan
from .driver_triton import Driver, Tiling, geometry_of
from .frame_triton import CHUNK, CHUNK_PAYLOAD, pointer_of
from .launch_triton import Variant, kernel, options
from .order_triton import DTYPES, rounded
from .runs_triton import negative_zero, report_any, rounded_pair
from .tiles_triton import (
    Launch,
    Tile,
    decode_tile,
    encode_tile,
    load_tile,
    no_load,
    store_tile,
    tile_at,
)

#: What `sum_rows_kernel` makes: sums of rows, weighted sums, or gradients of rows and of weights.
SUM, WEIGHTED, BACK = 0, 1, 2
_WEIGHTED, _BACK = tl.constexpr(WEIGHTED), tl.constexpr(BACK)
#: Fewest runs of a tile, of those that divide a row.
_FEWEST_RUNS = 32
_LOW = tl.constexpr((1 << 32) - 1)


@triton.jit
def half_of(sources_ptr, counts_ptr, rank, half, WRITES: tl.constexpr):
    """The half of a rank's memory that an exchange reads, or WRITES."""
    turn = (tl.load(counts_ptr) + WRITES) & 1
    return pointer_of(tl.load(sources_ptr + rank)) + turn * half


@triton.jit
def _tile_of_row(static_ptr, row, tile, n, at, ALIGNED: tl.constexpr):
    """A tile of row `row` of a tensor, whose static part is at `static_ptr`."""
    first = row * n
    if ALIGNED:
        first = tl.multiple_of(first, 16)
    return Tile(row, tile, n, first, first + n, static_ptr, at, 1.0, static_ptr, 0, static_ptr, 0)


@kernel
def put_rows_kernel(
    x_ptr,
    sources_ptr,
    counts_ptr,
    limit_ptr,
    stats_ptr,
    rank: tl.int32,
    half: tl.int64,
    rows_at: tl.int64,
    nelem: tl.int64,
    n: tl.int64,
    tiles: tl.int32,
    stride: tl.int64,
    at: tl.int64,
    F: tl.constexpr,
    L: tl.constexpr,
    PACK: tl.constexpr,
    UNPACK: tl.constexpr,
    SCALE: tl.constexpr,
    LIMITED: tl.constexpr,
):
    """Encode a tile of a row of `n` elements; if LIMITED none of rows from number `limit_ptr` on.

    The tensor has `nelem` elements. Rows begin `rows_at` bytes behind the start of a half.
    """
    pid = tl.program_id(0)
    row, tile = (pid // tiles).to(tl.int64), (pid % tiles).to(tl.int64)
    wanted = True
    if LIMITED:
        wanted = row < tl.load(limit_ptr.to(tl.pointer_type(tl.int32)))
    if wanted:
        static_ptr = half_of(sources_ptr, counts_ptr, rank, half, 1) + rows_at
        t = tile_at(static_ptr, row, tile, nelem, n, stride, at, L.aligned)
        draw = n, n, n
        # fmt: off
        encode_tile(
            x_ptr, t, t, stats_ptr, draw, stats_ptr, True, F, F, L, PACK, UNPACK, SCALE
        )
        # fmt: on


@triton.jit
def _static_of(place, sources_ptr, counts_ptr, half, rows_at, stride):
    """Where the row at a place is; some row of rank 0 if there is none."""
    place = tl.maximum(place, 0)
    base = half_of(sources_ptr, counts_ptr, place >> 32, half, 0)
    return base + rows_at + (place & _LOW) * (stride * 128)


@triton.jit
def _clear_tile(out_ptr, row, tile, n, L: tl.constexpr):
    """Store zeros for a tile of a row."""
    SIZE: tl.constexpr = L.rows * L.run
    i = tile * SIZE + tl.arange(0, SIZE)
    if L.item == 2:
        to_ptr = out_ptr.to(tl.pointer_type(tl.uint16))
        tl.store(to_ptr + row * n + i, tl.zeros([SIZE], tl.uint16), mask=i < n)
    else:
        to_ptr = out_ptr.to(tl.pointer_type(tl.uint32))
        tl.store(to_ptr + row * n + i, tl.zeros([SIZE], tl.uint32), mask=i < n)


@kernel
def take_rows_kernel(
    out_ptr,
    sources_ptr,
    counts_ptr,
    starts_ptr,
    status_ptr,
    half: tl.int64,
    rows_at: tl.int64,
    n: tl.int64,
    tiles: tl.int32,
    stride: tl.int64,
    at: tl.int64,
    F: tl.constexpr,
    L: tl.constexpr,
    UNPACK: tl.constexpr,
    SCALE: tl.constexpr,
    TILE: tl.constexpr,
    CLEAR: tl.constexpr,
):
    """Decode a tile of the row at a place of `starts_ptr`; with CLEAR, no row becomes zeros."""
    pid = tl.program_id(0)
    row, tile = (pid // tiles).to(tl.int64), (pid % tiles).to(tl.int64)
    place = tl.load(starts_ptr + row)
    if place >= 0:
        static_ptr = _static_of(place, sources_ptr, counts_ptr, half, rows_at, stride)
        t = _tile_of_row(static_ptr, row, tile, n, at, L.aligned)
        # fmt: off
        decode_tile(
            t, out_ptr, status_ptr, n * 0, t.nelem, status_ptr, True, F, L, UNPACK, SCALE, TILE
        )
        # fmt: on
    elif CLEAR:
        _clear_tile(out_ptr, row, tile, n, L)


@triton.jit
def _unpack_rows(
    places, t, at, status_ptr, F, L: tl.constexpr, LOAD, UNPACK, SCALE, MASKED: tl.constexpr
):
    """Columns of a tile of each of several rows, of which all are loaded before one is decoded."""
    SIZE: tl.constexpr = len(places)
    own = ()
    for i in tl.static_range(SIZE):
        static_ptr = places[i]
        scale, _ = SCALE(status_ptr, static_ptr, at, F, False)
        # fmt: off
        s = Tile(
            t.chunk, t.tile, t.n, t.first, t.nelem, static_ptr, at, scale, static_ptr, 0,
            static_ptr, 0,
        )
        own = own + ((static_ptr, scale, LOAD(s, F, L, MASKED)),)
        # fmt: on
    if L.loaded and (SIZE > 1):
        # Else the compiler puts loads off, one behind another's values.
        tl.debug_barrier()
    found = ()
    for i in tl.static_range(SIZE):
        static_ptr, scale, loaded = own[i]
        # fmt: off
        s = Tile(
            t.chunk, t.tile, t.n, t.first, t.nelem, static_ptr, at, scale, static_ptr, 0,
            static_ptr, loaded,
        )
        # fmt: on
        found = found + (UNPACK(s, t.n * 0, t.n, F, L, MASKED),)
    return found


@triton.jit
def _add_rows(
    v,
    first,
    places_ptr,
    factors_ptr,
    t,
    at,
    sources_ptr,
    counts_ptr,
    status_ptr,
    half,
    rows_at,
    stride,
    F,
    L: tl.constexpr,
    LOAD,
    UNPACK,
    SCALE,
    TO: tl.constexpr,
    SIZE: tl.constexpr,
    MODE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add rows at places `first` to `first` + SIZE to columns of values, times their factors."""
    COUNT: tl.constexpr = L.columns
    here = ()
    places = ()
    for i in tl.static_range(SIZE):
        place = tl.load(places_ptr + first + i)
        here = here + (place >= 0,)
        static_ptr = _static_of(place, sources_ptr, counts_ptr, half, rows_at, stride)
        places = places + (static_ptr,)
    fast = True
    for i in tl.static_range(SIZE):
        _, usual = SCALE(status_ptr, places[i], at, F, False)
        fast = fast & usual
    if MASKED:
        found = _unpack_rows(places, t, at, status_ptr, F, L, LOAD, UNPACK, SCALE, True)
    elif fast:
        found = _unpack_rows(places, t, at, status_ptr, F, L, LOAD, UNPACK, SCALE, False)
    else:
        found = _unpack_rows(places, t, at, status_ptr, F, L, LOAD, UNPACK, SCALE, True)
    for i in tl.static_range(SIZE):
        y, wrong, _ = found[i]
        if F.checked:
            damaged = tl.where(here[i], wrong.to(tl.int32), 0) != 0
            report_any(status_ptr, CHUNK + (t.chunk << 8) + CHUNK_PAYLOAD, damaged)
        if MODE > 0:
            factor = rounded(tl.load(factors_ptr + first + i), TO).to(tl.float32)
        total = ()
        for k in tl.static_range(0, COUNT, 2):
            a, b = y[k], y[k + 1]
            if not F.exact:
                a, b = rounded_pair(a, b, L.exponent, L.item, F.limited, L.cvt)
            if MODE > 0:
                a, b = a * factor, b * factor
            a = tl.where(here[i], v[k] + a, v[k])
            total = total + (a, tl.where(here[i], v[k + 1] + b, v[k + 1]))
        v = total
    return v


@triton.jit
def _dot_tile(y_ptr, t, plain, gradient, F, L: tl.constexpr, MASKED: tl.constexpr):
    """The sum over a tile of columns of values times elements."""
    COUNT: tl.constexpr = L.columns
    other = load_tile(y_ptr, t, plain, F, L, False, MASKED)
    total = gradient[0] * other[0]
    for k in tl.static_range(1, COUNT):
        total += gradient[k] * other[k]
    return tl.sum(total, 0)


@triton.jit
def _sum_tile(
    out_ptr,
    y_ptr,
    dots_ptr,
    places_ptr,
    factors_ptr,
    t,
    plain,
    at,
    sources_ptr,
    counts_ptr,
    status_ptr,
    half,
    rows_at,
    stride,
    F,
    L: tl.constexpr,
    LOAD,
    UNPACK,
    SCALE,
    TO: tl.constexpr,
    K: tl.constexpr,
    MODE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Store a tile of a sum of K rows; of a gradient, the dot product with a tile of `y_ptr` too.

    Rows are read `L.together` at a time.
    """
    COUNT: tl.constexpr = L.columns
    ROWS: tl.constexpr = L.rows
    MOST: tl.constexpr = L.together if L.together < K else K
    v = ()
    for _ in tl.static_range(COUNT):
        if MODE == _BACK:
            v = v + (negative_zero([ROWS]),)
        else:
            v = v + (tl.zeros([ROWS], tl.float32),)
    # fmt: off
    if MODE == _BACK:
        v = _add_rows(
            v, 0, places_ptr, factors_ptr, t, at, sources_ptr, counts_ptr, status_ptr, half,
            rows_at, stride, F, L, LOAD, UNPACK, SCALE, TO, 1, 0, MASKED,
        )
        dot = _dot_tile(y_ptr, t, plain, v, F, L, MASKED)
        tl.store(dots_ptr, dot)
        factor = tl.load(factors_ptr).to(tl.float32)
        scaled = ()
        for k in tl.static_range(COUNT):
            scaled = scaled + (v[k] * factor,)
        v = scaled
    else:
        for first in range(0, K // MOST * MOST, MOST):
            v = _add_rows(
                v, first, places_ptr, factors_ptr, t, at, sources_ptr, counts_ptr, status_ptr,
                half, rows_at, stride, F, L, LOAD, UNPACK, SCALE, TO, MOST, MODE, MASKED,
            )
        if K % MOST > 0:
            v = _add_rows(
                v, K // MOST * MOST, places_ptr, factors_ptr, t, at, sources_ptr, counts_ptr,
                status_ptr, half, rows_at, stride, F, L, LOAD, UNPACK, SCALE, TO, K % MOST,
                MODE, MASKED,
            )
    store_tile(
        out_ptr, t.first, v, t, plain, t.n * 0, t.n, L.item, False, False, F, L, MASKED
    )
    # fmt: on


@kernel
def sum_rows_kernel(
    out_ptr,
    y_ptr,
    sources_ptr,
    counts_ptr,
    starts_ptr,
    weights_ptr,
    status_ptr,
    rank: tl.int32,
    half: tl.int64,
    rows_at: tl.int64,
    dots_at: tl.int64,
    n: tl.int64,
    tiles: tl.int32,
    stride: tl.int64,
    at: tl.int64,
    F: tl.constexpr,
    L: tl.constexpr,
    LOAD: tl.constexpr,
    UNPACK: tl.constexpr,
    SCALE: tl.constexpr,
    KIND: tl.constexpr,
    TO: tl.constexpr,
    K: tl.constexpr,
    MODE: tl.constexpr,
):
    """A tile of a sum of K rows, whose places are at `starts_ptr`, in order, in float32.

    Weights are of dtype KIND, and rounded to TO, that of the rows.

    BACK: a row times its factor, or zeros, and the dot product with the row of `y_ptr`, for the
    next exchange, `dots_at` bytes behind the start of a half.
    """
    pid = tl.program_id(0)
    row, tile = (pid // tiles).to(tl.int64), (pid % tiles).to(tl.int64)
    places_ptr = starts_ptr + row * K
    factors_ptr = weights_ptr.to(tl.pointer_type(KIND)) + row * K
    wanted = True
    dots_ptr = out_ptr.to(tl.pointer_type(tl.float32))
    if MODE == _BACK:
        wanted = tl.load(places_ptr) >= 0
        dots_ptr = half_of(sources_ptr, counts_ptr, rank, half, 1) + dots_at
        dots_ptr = dots_ptr.to(tl.pointer_type(tl.float32)) + pid
    t = _tile_of_row(out_ptr, row, tile, n, at, L.aligned)
    plain = L.aligned & ((tile + 1) * (L.rows * L.run) <= n)
    # fmt: off
    if wanted:
        if L.once:
            _sum_tile(
                out_ptr, y_ptr, dots_ptr, places_ptr, factors_ptr, t, plain, at, sources_ptr,
                counts_ptr, status_ptr, half, rows_at, stride, F, L, LOAD, UNPACK, SCALE, TO, K,
                MODE, True,
            )
        elif plain:
            _sum_tile(
                out_ptr, y_ptr, dots_ptr, places_ptr, factors_ptr, t, plain, at, sources_ptr,
                counts_ptr, status_ptr, half, rows_at, stride, F, L, LOAD, UNPACK, SCALE, TO, K,
                MODE, False,
            )
        else:
            _sum_tile(
                out_ptr, y_ptr, dots_ptr, places_ptr, factors_ptr, t, plain, at, sources_ptr,
                counts_ptr, status_ptr, half, rows_at, stride, F, L, LOAD, UNPACK, SCALE, TO, K,
                MODE, True,
            )
    elif MODE == _BACK:
        _clear_tile(out_ptr, row, tile, n, L)
    # fmt: on


class Memory(NamedTuple):
    """Memory of ranks, in which rows lie.

    Attributes:
        sources: Addresses of all ranks' memory, int64.
        turn: Barriers so far, int64, shape (1,), on the device.
        half: Bytes of a half, a multiple of 128.
        rows_at: Where rows begin in a half, a multiple of 128.
        dots_at: Where dot products are: float32, one for each tile of a row.
        rank: This rank.
    """

    sources: torch.Tensor
    turn: torch.Tensor
    half: int
    rows_at: int
    dots_at: int
    rank: int


class Rows:
    """The launches that code rows of one plan.

    Args:
        plan: The plan of a row, without a checksum.
        driver: The kernels of its codec.
        measuring: A driver that finds what the codec needs to know of all rows, or None.
        device: Where they run.
    """

    def __init__(
        self, plan: Plan, driver: Driver, measuring: Driver | None, device: torch.device
    ) -> None:
        self.plan, self._driver, self._measuring, self._device = plan, driver, measuring, device
        #: The distance of rows, and where the second section starts in them.
        self._at = geometry_of(plan)
        self._variants: dict[Any, Any] = {}

    def dot_tiles(self) -> int:
        """Dot products of a row."""
        return self._tiles(self._tiled(self._summing))

    def put(self, x: torch.Tensor, memory: Memory, limit: torch.Tensor | None = None) -> None:
        """Encode the rows of `x`, contiguous; with `limit`, int32, only so many."""
        if not x.shape[0]:
            return
        stats = memory.turn
        if self._measuring is not None:
            stats = torch.zeros(1, dtype=torch.int64, device=x.device)
            self._put(self._measuring, x, memory, limit, stats)
        self._put(self._driver, x, memory, limit, stats)

    def _put(self, driver: Driver, x, memory: Memory, limit, stats) -> None:
        kind = "put", driver is self._driver, limit is not None, x.data_ptr() % 16 == 0
        known = self._variants.get(kind)
        if known is None:
            tiling = self._tiled(driver.tilings[0])
            values = {"x_item": self.plan.dtype.itemsize, "aligned": self._aligned and kind[3]}
            launch = driver.launch(tiling, self.plan.dtype, self._device, **values)
            own = {"PACK": driver.pack, "LIMITED": limit is not None}
            variant = _variant(put_rows_kernel, driver, tiling, launch, **own)
            known = self._variants[kind] = variant, self._tiles(tiling)
        variant, tiles = known
        rows, n = x.shape
        tensors = x, memory.sources, memory.turn, x if limit is None else limit, stats
        numbers = memory.rank, memory.half, memory.rows_at, rows * n, n, tiles
        variant.launch(rows * tiles, tensors, *numbers, *self._at)

    def take(
        self, out: torch.Tensor, places: torch.Tensor, memory: Memory, status, clear: bool
    ) -> None:
        """Decode the rows at `places` into those of `out`; `clear`: where none is, zeros."""
        if not out.shape[0]:
            return
        known = self._variants.get(("take", clear))
        if known is None:
            tiling = self._tiled(self._driver.tilings[1])
            if tiling.registers is not None:
                # Where a row is takes some more.
                tiling = tiling._replace(registers=tiling.registers + 8)
            values = {"x_item": 0, "aligned": self._aligned}
            launch = self._driver.launch(tiling, self.plan.dtype, self._device, **values)
            own = {"TILE": self._driver.tile, "CLEAR": clear}
            variant = _variant(take_rows_kernel, self._driver, tiling, launch, **own)
            known = self._variants["take", clear] = variant, self._tiles(tiling)
        variant, tiles = known
        rows, n = out.shape
        tensors = out, memory.sources, memory.turn, places, status
        numbers = memory.half, memory.rows_at, n, tiles
        variant.launch(rows * tiles, tensors, *numbers, *self._at)

    def sum(
        self,
        out: torch.Tensor,
        places: torch.Tensor,
        memory: Memory,
        status: torch.Tensor,
        *,
        weights: torch.Tensor | None = None,
        y: torch.Tensor | None = None,
    ) -> None:
        """Add up the rows at `places`, shape (rows, k), by `weights`, which may be None.

        With `y`, rows like those of `out`: of one place each the row times its weight, and the dot
        product with that of `y`.
        """
        if not out.shape[0]:
            return
        k = places.numel() // out.shape[0]
        mode = BACK if y is not None else SUM if weights is None else WEIGHTED
        factors = out if weights is None else weights
        kind = "sum", mode, k, factors.dtype, y is None or y.data_ptr() % 16 == 0
        known = self._variants.get(kind)
        if known is None:
            tiling, item = self._tiled(self._summing), self.plan.dtype.itemsize
            launch = self._driver.launch(
                tiling,
                self.plan.dtype,
                self._device,
                x_item=item if mode == BACK else 0,
                aligned=self._aligned and kind[-1],
                out_item=item,
                summed=True,
                loaded=self._driver.load is not None,
            )
            own = {
                "LOAD": self._driver.load or no_load,
                "KIND": DTYPES[factors.dtype],
                "TO": DTYPES[out.dtype],
                "K": k,
                "MODE": mode,
            }
            variant = _variant(sum_rows_kernel, self._driver, tiling, launch, **own)
            known = self._variants[kind] = variant, self._tiles(tiling)
        variant, tiles = known
        rows, n = out.shape
        other = out if y is None else y
        tensors = out, other, memory.sources, memory.turn, places, factors, status
        numbers = memory.rank, memory.half, memory.rows_at, memory.dots_at, n, tiles
        variant.launch(rows * tiles, tensors, *numbers, *self._at)

    @property
    def _summing(self) -> Tiling:
        driver = self._driver
        return driver.summing or driver.adding or driver.tilings[2]

    @property
    def _aligned(self) -> bool:
        # What kernels store is new memory, which is aligned.
        return self.plan.nelem % 16 == 0

    def _tiles(self, tiling: Tiling) -> int:
        return -(-self.plan.nelem // (tiling.rows * self._driver.form.run))

    def _tiled(self, tiling: Tiling) -> Tiling:
        """A tiling of which tiles divide a row, if that needs no small ones, with as many warps."""
        form = self._driver.form
        runs = -(-self.plan.nelem // form.run)
        # A block that several runs share lies in one tile.
        least = 1 << getattr(form, "log_high", 2)
        rows = tiling.rows
        while rows > max(runs, least):
            rows //= 2
        even = rows
        while self.plan.nelem % (even * form.run) and even > 1:
            even //= 2
        if even >= max(_FEWEST_RUNS, least) and not self.plan.nelem % (even * form.run):
            rows = even
        warps = max(1, tiling.warps * rows // tiling.rows)
        return tiling._replace(rows=rows, warps=warps)


@functools.cache
def _variant(made_of: Any, driver: Driver, tiling: Tiling, launch: Launch, **own: Any) -> Variant:
    """A kernel of this file with a codec's functions, and values of its `own`."""
    return Variant(
        made_of,
        options(tiling.warps, tiling.registers),
        F=driver.form,
        L=launch,
        UNPACK=driver.unpack,
        SCALE=driver.scale,
        **own,
    )
