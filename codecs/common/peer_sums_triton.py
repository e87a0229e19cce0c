# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment,misc"
"""A sum over GPUs that read one another's memory, by one launch on each.

A program encodes a tile where its peers read it, tells them by a flag, waits for their flags of the
same tile, and adds up what all ranks have of it: nobody waits for a whole tensor. A flag has the
number of the call and the tile's checksum. There are no headers and records, which all ranks know.

Memory of a rank has two sets of tiles and flags, which calls take in turn: a rank that writes to
one again has seen flags of the call before from all others, who had read it by then. A program
takes the next tile when it starts, so that the first one that is waited for is never behind others.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from .base import Plan
from .driver_triton import Driver, Tiling, geometry_of
from .flags_triton import tell, wait_for
from .frame_triton import CHUNK, CHUNK_PAYLOAD, CHUNK_SUM, pointer_of, report, table_of
from .launch_triton import Variant, kernel, options
from .minifloat_triton import aligned_for
from .runs_triton import negative_zero, report_any
from .sums_triton import finish_tile, plus, source_at, unpack_all
from .tiles_triton import encode_tile, no_load, no_scale, terms_of, tile_at

#: Bits of a flag that are the tile's checksum. The number of the call is above them.
_CHECK_BITS = tl.constexpr(24)
_CHECK = tl.constexpr((1 << 24) - 1)
#: Bytes of the elements of dtypes that kernels sum up.
_ITEMS = (2, 4)


@triton.jit
def _folded(terms):
    """Checksum terms in the low bits of an int64."""
    total = terms_of(terms)
    total ^= total >> 48
    total ^= total >> _CHECK_BITS
    return (total & _CHECK).to(tl.int64, bitcast=True)


@triton.jit
def _sum_ranks(
    out_ptr,
    sources_ptr,
    status_ptr,
    flags,
    t,
    plain,
    factor,
    static_at,
    stride,
    F: tl.constexpr,
    L: tl.constexpr,
    PACK: tl.constexpr,
    LOAD: tl.constexpr,
    UNPACK: tl.constexpr,
    SCALE: tl.constexpr,
    RANKS: tl.constexpr,
    TOGETHER: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Store the sum of a tile of all ranks, TOGETHER at a time. Tells what is wrong."""
    COUNT: tl.constexpr = L.columns
    ROWS: tl.constexpr = L.rows
    i = tl.arange(0, flags.shape[0])
    v = ()
    for _ in tl.static_range(COUNT):
        v = v + (negative_zero([ROWS, 4] if L.apart > 0 else [ROWS]),)
    # fmt: off
    for first in range(0, RANKS, TOGETHER):
        own = ()
        for k in tl.static_range(TOGETHER):
            src_ptr = pointer_of(tl.load(sources_ptr + first + k))
            source = source_at(
                first + k, src_ptr, t, static_at, stride, sources_ptr, 0, 0, F, L, LOAD, SCALE,
                MASKED,
            )
            own = own + (source[0],)
        if L.loaded and (TOGETHER > 1):
            # Else the compiler puts loads off, one behind another's values.
            tl.debug_barrier()
        found = unpack_all(own, first, t, F, L, UNPACK, TOGETHER, MASKED)
        for k in tl.static_range(TOGETHER):
            v = plus(v, found[k][0], F, L)
            if F.checked:
                report_any(
                    status_ptr + first + k, CHUNK + (t.chunk << 8) + CHUNK_PAYLOAD, found[k][1]
                )
            if L.sums:
                said = tl.sum(tl.where(i == first + k, flags, 0), 0) & _CHECK
                if _folded(found[k][2]) != said:
                    report(status_ptr + first + k, CHUNK + (t.chunk << 8) + CHUNK_SUM)
    finish_tile(v, out_ptr, t, t, plain, factor, 0, sources_ptr, F, L, PACK, MASKED)
    # fmt: on


@kernel
def peer_sum_kernel(
    x_ptr,
    out_ptr,
    sources_ptr,
    counts_ptr,
    late_ptr,
    status_ptr,
    nelem: tl.int64,
    chunk_nelem: tl.int64,
    tiles: tl.int32,
    stride: tl.int64,
    at: tl.int64,
    set_nbytes: tl.int64,
    rank: tl.int32,
    factor: tl.float32,
    limit_ns: tl.int64,
    F: tl.constexpr,
    L: tl.constexpr,
    S: tl.constexpr,
    PACK: tl.constexpr,
    LOAD: tl.constexpr,
    UNPACK: tl.constexpr,
    SCALE: tl.constexpr,
    RANKS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Encode one tile of `x_ptr`, and store the sum of what all ranks have of it at `out_ptr`.

    `sources_ptr` has the addresses of all ranks' memory, int64, `counts_ptr` the number of
    programs that this rank's calls have begun, `status_ptr` a word for each rank, see `report`, and
    one for a rank that is late. A set takes `set_nbytes`: static parts, and behind them for each
    rank a flag of every tile. L is of encoding, S of adding up. See `wait_for` for the rest.
    """
    TOGETHER: tl.constexpr = 2 - RANKS % 2
    programs = tl.num_programs(0).to(tl.int64)
    begun = tl.atomic_add(counts_ptr, tl.full([], 1, tl.int64), sem="relaxed")
    number, pid = begun // programs + 1, begun % programs
    here = (number & 1) * set_nbytes
    flags_at = programs // tiles * stride * 128
    mine = tl.load(sources_ptr + rank) + here
    late_ptr = late_ptr.to(tl.pointer_type(tl.int64))
    # fmt: off
    t = tile_at(
        pointer_of(mine), pid // tiles, pid % tiles, nelem, chunk_nelem, stride, at, L.aligned
    )
    terms, _ = encode_tile(
        x_ptr, t, t, status_ptr, 0, sources_ptr, True, F, F, L, PACK, UNPACK, SCALE
    )
    flag = number << _CHECK_BITS
    if L.sums:
        flag |= _folded(terms)
    i = tl.arange(0, SIZE)
    used = i < RANKS
    theirs = tl.load(sources_ptr + i, used, 0) + here + flags_at + (rank * programs + pid) * 8
    tell(theirs.to(tl.pointer_type(tl.int64), bitcast=True), used, flag)
    own_flags = (mine + flags_at + (i * programs + pid) * 8).to(
        tl.pointer_type(tl.int64), bitcast=True
    )
    flags, late = wait_for(own_flags, used, number, 0, late_ptr, limit_ns, _CHECK_BITS, S.ptx)
    tl.store(status_ptr + RANKS, late, mask=late > 0)
    plain = S.aligned & ((t.tile + 1) * (S.rows * S.run) <= t.n)
    if S.once:
        _sum_ranks(
            out_ptr, sources_ptr, status_ptr, flags, t, plain, factor, here // 128, stride, F, S,
            PACK, LOAD, UNPACK, SCALE, RANKS, TOGETHER, True,
        )
    elif plain:
        _sum_ranks(
            out_ptr, sources_ptr, status_ptr, flags, t, plain, factor, here // 128, stride, F, S,
            PACK, LOAD, UNPACK, SCALE, RANKS, TOGETHER, False,
        )
    else:
        _sum_ranks(
            out_ptr, sources_ptr, status_ptr, flags, t, plain, factor, here // 128, stride, F, S,
            PACK, LOAD, UNPACK, SCALE, RANKS, TOGETHER, True,
        )
    # fmt: on


def takes(driver: Driver, plan: Plan) -> bool:
    """Whether kernels sum up the plan's dtype, and code tiles by nothing but their elements."""
    alone = driver.prepare is None and driver.scale is no_scale and not plan.codec.draws
    alone = alone and not plan.dynamic_stride and plan.nelem > 0
    return alone and plan.dtype.is_float and plan.dtype.itemsize in _ITEMS


class PeerSum:
    """Sums over ranks of tensors of a plan, by one launch each.

    All ranks make it, and call it in the same order. It can be captured in a CUDA graph.

    Args:
        driver: The kernels of the plan; see `takes`.
        plan: The plan.
        device: This rank's GPU.
        ranks: Number of ranks.
        rank: Number of this one.
    """

    def __init__(
        self, driver: Driver, plan: Plan, device: torch.device, ranks: int, rank: int
    ) -> None:
        self._driver, self._plan, self._device = driver, plan, device
        self._ranks, self._rank = ranks, rank
        self._sources: torch.Tensor | None = None
        self._tiling = driver.exchanging or driver.summing or driver.tilings[2]
        self._tiles = driver.tiles(self._tiling, driver.extent(plan))
        self._programs = self._tiles * plan.chunks
        flags_nbytes = -(-ranks * self._programs * 8 // 128) * 128
        self._set_nbytes = plan.static_stride * plan.chunks + flags_nbytes

    @property
    def has_memory(self) -> bool:
        """Whether `begin` was called."""
        return self._sources is not None

    @property
    def nbytes(self) -> int:
        """Bytes that each rank has to have."""
        return 2 * self._set_nbytes

    def begin(self, parts: Sequence[torch.Tensor], late: torch.Tensor, seconds: float) -> None:
        """Take memory.

        Args:
            parts: What all ranks have of it, uint8, zero.
            late: See `wait_for`.
            seconds: How long a rank is waited for.
        """
        self._parts, self._late = tuple(parts), late
        self._sources = table_of([part.data_ptr() for part in parts], self._device)
        self._counts = torch.zeros(1, dtype=torch.int64, device=self._device)
        self._limit = round(seconds * 1e9)

    def sum(
        self, x: torch.Tensor, out: torch.Tensor, status: torch.Tensor, factor: float | None = None
    ) -> None:
        """Fill `out` with the sum of all ranks' `x`, as decoded, in the order of ranks.

        Args:
            x: Of the plan's dtype.
            out: Of that or float32; it may be `x`.
            status: Where it is told what is wrong with what a rank has written, and behind that 1 +
                a rank that did not come: int64, shape (ranks + 1,).
            factor: What the sum is multiplied by, in float32. None: nothing.
        """
        plan = self._plan
        variant = _variant(
            self._driver,
            self._tiling,
            plan.dtype,
            self._device,
            plan.checksum,
            self._ranks,
            (aligned_for(plan, x), aligned_for(plan, out)),
            out.element_size(),
            factor is not None,
        )
        variant.launch(
            self._programs,
            (x, out, self._sources, self._counts, self._late, status),
            plan.nelem,
            plan.chunk_nelem,
            self._tiles,
            *geometry_of(plan),
            self._set_nbytes,
            self._rank,
            1.0 if factor is None else factor,
            self._limit,
        )


@functools.cache
def _variant(
    driver: Driver,
    tiling: Tiling,
    dtype,
    device: torch.device,
    sums: bool,
    ranks: int,
    aligned: tuple[bool, bool],
    out_item: int,
    scaled: bool,
) -> Variant:
    values = {"sums": sums, "x_item": dtype.itemsize, "aligned": aligned[0]}
    encodes = driver.launch(tiling, dtype, device, **values)
    adds = driver.launch(
        tiling,
        dtype,
        device,
        x_item=0,
        aligned=aligned[1],
        sums=sums,
        out_item=out_item,
        scaled=scaled,
        summed=True,
        loaded=driver.load is not None,
    )
    return Variant(
        peer_sum_kernel,
        options(tiling.warps, tiling.registers),
        F=driver.form,
        L=encodes,
        S=adds,
        PACK=driver.pack,
        LOAD=driver.load or no_load,
        UNPACK=driver.unpack,
        SCALE=driver.scale,
        RANKS=ranks,
        SIZE=triton.next_power_of_2(ranks),
    )
