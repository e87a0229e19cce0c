# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""The driver of codecs that code tile by tile on a GPU: what launches the kernels of tiles_triton.

A codec gives the two functions of its format, and what they have to know.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ...formats.dtypes import DType
from .base import Key, Plan
from .frame_triton import Places, frame_of, touched
from .launch_triton import PTX, Variant, options
from .minifloat_triton import aligned_for, converts
from .philox_triton import NO_KEY, key_arguments
from .tiles_triton import Format, Launch, decode_kernel, encode_kernel, sum_kernel


class Tiling(NamedTuple):
    """Threads' runs of a tile, warps of a program, whether decoded elements go through shared
    memory to where they are stored, and the most registers of a thread.
    """

    rows: int
    warps: int
    staged: bool = False
    registers: int | None = None


class Source(NamedTuple):
    """A buffer that is added to what is encoded.

    Attributes:
        plan: Its plan.
        form: Its format.
        data: Its bytes.
        scratch: Workspace, int64 words of each chunk.
        status: Where it is told what is wrong with it.
        planned: Its header is compared with the plan's.
    """

    plan: Plan
    form: Format
    data: torch.Tensor
    scratch: torch.Tensor
    status: torch.Tensor
    planned: bool


class Driver(NamedTuple):
    """The kernels of a format.

    Attributes:
        pack, unpack, scale: Its device functions.
        form: What they have to know.
        tilings: Of encoding, of decoding, and of encoding sums.
    """

    pack: Callable[..., Any]
    unpack: Callable[..., Any]
    scale: Callable[..., Any]
    form: Format
    tilings: tuple[Tiling, Tiling, Tiling]

    def encode(
        self,
        plan: Plan,
        x: torch.Tensor,
        out: torch.Tensor,
        *,
        stats: torch.Tensor | None = None,
        key: Key | None = None,
        draws: bool = False,
        given: int = 0,
        source: Source | None = None,
    ) -> None:
        """Encode `x` into `out`, or the sum of its elements with those of a buffer, in one pass.

        `x` has the plan's dtype, or float32 where a buffer is added. Sums are in float32, rounded
        to the plan's dtype. `draws`: codes are rounded by the random words of `key`; `given`: see
        `Launch`. The contract is that of `tightwire.gpu`.
        """
        random, on_device, numbers = NO_KEY, None, (0, 0, 0)
        if draws:
            random, on_device, numbers = key_arguments(key, out.device)
        frame_of(plan).begin(out)
        statics = out[plan.static_offset :]
        src, sums, status, source_plan = statics, out, out, plan
        if source is not None:
            source_plan, sums, status = source.plan, source.scratch, source.status
            src = source.data[source_plan.static_offset :]
            if plan.checksum:
                sums[: 8 * plan.chunks].zero_()
        tiling = self.tilings[0 if source is None else 2]
        launch = self._launch(
            tiling,
            plan.dtype,
            out.device,
            x_item=x.element_size(),
            aligned=aligned_for(plan, x),
            add=source is not None,
            given=given,
            random=random,
            sums=plan.checksum,
        )
        tiles = self._tiles(tiling, plan.chunk_nelem)
        _encode_variant(self, None if source is None else source.form, tiling, launch).launch(
            tiles * plan.chunks,
            (
                x,
                statics,
                out[plan.header.nbytes :],
                src,
                sums,
                status,
                out if on_device is None else on_device,
                out if stats is None else stats,
            ),
            plan.nelem,
            plan.chunk_nelem,
            tiles,
            *_geometry(plan),
            *_geometry(source_plan),
            *numbers,
        )
        if source is not None:
            frame_of(source_plan).check(
                source.data,
                sums,
                status,
                0,
                plan.nelem,
                whole=True,
                summed=plan.checksum,
                planned=source.planned,
            )

    def measure(
        self,
        dtype: DType,
        x: torch.Tensor,
        stats: torch.Tensor,
        plan: Plan | None = None,
        src: torch.Tensor | None = None,
    ) -> None:
        """Run PACK, which writes to `stats` alone, over the elements of `x`, or over their sums
        with `src`, a buffer of `plan`.
        """
        chunks, chunk_nelem, geometry = 1, x.numel(), (0, 0)
        aligned, source = x.data_ptr() % 16 == 0, x
        if plan is not None and src is not None:
            chunks, chunk_nelem, geometry = plan.chunks, plan.chunk_nelem, _geometry(plan)
            aligned, source = aligned_for(plan, x), src[plan.static_offset :]
        if not chunk_nelem:
            return
        tiling = self.tilings[0 if plan is None else 2]
        item = x.element_size()
        launch = self._launch(
            tiling, dtype, x.device, x_item=item, aligned=aligned, add=plan is not None
        )
        tiles = self._tiles(tiling, chunk_nelem)
        _encode_variant(self, None, tiling, launch).launch(
            tiles * chunks,
            (x, x, x, source, x, x, x, stats),
            x.numel(),
            chunk_nelem,
            tiles,
            *geometry,
            *geometry,
            0,
            0,
            0,
        )

    def decode(
        self,
        plan: Plan,
        src: torch.Tensor,
        out: torch.Tensor | None,
        scratch: torch.Tensor,
        status: torch.Tensor,
        *,
        start: int = 0,
        stop: int | None = None,
        check: bool = True,
        dynamic_starts: torch.Tensor | None = None,
        store: bool = True,
        add: bool = False,
        planned: bool = True,
    ) -> None:
        """Decode elements `start` to `stop` into `out`; see `tightwire.gpu` for the contract."""
        stop = plan.nelem if stop is None else stop
        sums = check and plan.checksum and (start < stop or not plan.nelem)
        if sums:
            scratch[: 8 * plan.chunks].zero_()
        if out is None:
            out = src
        tiling = self.tilings[1]
        if start < stop and (store or sums or self.form.checked):
            launch = self._launch(
                tiling,
                plan.dtype,
                src.device,
                x_item=out.element_size() if add else 0,
                aligned=aligned_for(plan, out, start),
                sums=sums,
                store=store,
            )
            first, end, _, _ = touched(plan, start, stop)
            tiles = self._tiles(tiling, plan.chunk_nelem)
            _decode_variant(self, tiling, launch).launch(
                tiles * (end - first),
                (src[plan.static_offset :], out, scratch, status),
                start,
                stop,
                first,
                plan.nelem,
                plan.chunk_nelem,
                tiles,
                *_geometry(plan),
            )
        frame_of(plan).check(
            src, scratch, status, start, stop, whole=check, summed=sums, planned=planned
        )

    def sum(
        self,
        plan: Plan,
        places: Places,
        out: torch.Tensor,
        *,
        x: torch.Tensor | None = None,
        place: int = 0,
        factor: float | None = None,
        stats: torch.Tensor | None = None,
        key: Key | None = None,
        given: int = 0,
        encoded: bool = False,
        planned: bool = True,
    ) -> None:
        """The sum of buffers of a plan, wherever they lie, and of `x` before number `place`.

        See codecs/common/sums.py; `factor` is what it is multiplied by. `out` has elements of the
        plan's dtype or of float32, or it is a buffer of the plan, in which the sum is `encoded`
        with `stats` and `key`. One launch sums up, one behind it checks all buffers.
        """
        random, on_device, numbers = NO_KEY, None, (0, 0, 0)
        if encoded and plan.codec.draws:
            random, on_device, numbers = key_arguments(key, out.device)
        tensors = (out, out)
        if encoded:
            frame_of(plan).begin(out)
            tensors = (out[plan.static_offset :], out[plan.header.nbytes :])
        if plan.checksum:
            places.sums.zero_()
        tiling = self.tilings[2]
        aligned = (x is None or aligned_for(plan, x)) and (encoded or aligned_for(plan, out))
        launch = self._launch(
            tiling,
            plan.dtype,
            out.device,
            x_item=0 if x is None else x.element_size(),
            aligned=aligned and (plan.chunks == 1 or plan.chunk_nelem % 16 == 0),
            given=given,
            random=random,
            sums=plan.checksum,
            out_item=0 if encoded else out.element_size(),
            scaled=factor is not None,
        )
        tiles = self._tiles(tiling, plan.chunk_nelem)
        _sum_variant(self, tiling, launch).launch(
            tiles * plan.chunks,
            (
                out if x is None else x,
                *tensors,
                places.table,
                out if on_device is None else on_device,
                out if stats is None else stats,
            ),
            plan.nelem,
            plan.chunk_nelem,
            tiles,
            plan.static_offset // 128,
            *_geometry(plan),
            places.number,
            place,
            1.0 if factor is None else factor,
            *numbers,
        )
        frame_of(plan).check_places(places, summed=plan.checksum, planned=planned)

    def _launch(self, tiling: Tiling, dtype: DType, device: torch.device, **values) -> Launch:
        return Launch(
            tiling.rows,
            self.form.run,
            dtype.exponent,
            dtype.itemsize,
            staged=tiling.staged,
            ptx=PTX,
            cvt=converts(device),
            **values,
        )

    def _tiles(self, tiling: Tiling, nelem: int) -> int:
        return max(1, -(-nelem // (tiling.rows * self.form.run)))


class Functions(NamedTuple):
    """What `tightwire.gpu` calls in the GPU module of a codec."""

    encode: Callable[..., None]
    decode_add_encode: Callable[..., None]
    decode: Callable[..., None]


def functions(driver_of: Callable[[Any], Driver]) -> Functions:
    """The functions of a codec without statistics, whose parameters' driver `driver_of` gives.

    Encoding draws by its key if the codec does. Their contract is that of `tightwire.gpu`.
    """

    def encode(plan: Plan, x, out, scratch, stats=None, key: Key | None = None) -> None:
        driver_of(plan.codec).encode(plan, x, out, key=key, draws=plan.codec.draws)

    def decode_add_encode(
        plan: Plan,
        source_plan: Plan,
        src,
        x,
        out,
        scratch,
        status,
        *,
        stats=None,
        key=None,
        planned=True,
    ) -> None:
        form = driver_of(source_plan.codec).form
        source = Source(source_plan, form, src, scratch, status, planned)
        driver = driver_of(plan.codec)
        driver.encode(plan, x, out, key=key, draws=plan.codec.draws, source=source)

    def decode(plan: Plan, src, out, scratch, status, **selection) -> None:
        driver_of(plan.codec).decode(plan, src, out, scratch, status, **selection)

    return Functions(encode, decode_add_encode, decode)


@functools.cache
def _encode_variant(
    driver: Driver, source: Format | None, tiling: Tiling, launch: Launch
) -> Variant:
    return Variant(
        encode_kernel,
        options(tiling.warps, tiling.registers),
        F=driver.form,
        G=source or driver.form,
        L=launch,
        PACK=driver.pack,
        UNPACK=driver.unpack,
        SCALE=driver.scale,
    )


@functools.cache
def _sum_variant(driver: Driver, tiling: Tiling, launch: Launch) -> Variant:
    return Variant(
        sum_kernel,
        options(tiling.warps, tiling.registers),
        F=driver.form,
        L=launch,
        PACK=driver.pack,
        UNPACK=driver.unpack,
        SCALE=driver.scale,
    )


@functools.cache
def _decode_variant(driver: Driver, tiling: Tiling, launch: Launch) -> Variant:
    return Variant(
        decode_kernel,
        options(tiling.warps, tiling.registers),
        F=driver.form,
        L=launch,
        UNPACK=driver.unpack,
        SCALE=driver.scale,
    )


def _geometry(plan: Plan) -> tuple[int, int]:
    """The distance of static parts, and where the second section starts in them, by 128 bytes."""
    return plan.static_stride // 128, plan.layout.sections[0].nbytes // 128
