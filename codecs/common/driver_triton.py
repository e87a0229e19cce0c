# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""The driver of codecs that code tile by tile on a GPU: what launches the kernels of tiles_triton.

A codec gives the two functions of its format, and what they have to know.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ...formats.dtypes import DType
from .base import Key, Plan
from .batch_triton import Batch, batch_of, batch_to_measure, decode_rows_kernel, encode_rows_kernel
from .fill_triton import zero
from .frame_triton import Places, Words, frame_of, touched
from .launch_triton import PTX, Variant, options
from .minifloat_triton import aligned_for, converts
from .philox_triton import NO_KEY, key_arguments
from .sums_triton import sum_kernel
from .tiles_triton import (
    OF_SOURCE,
    Format,
    Launch,
    decode_kernel,
    encode_kernel,
    no_load,
    unpack_tile,
)


class Tiling(NamedTuple):
    """Threads' runs of a tile, warps of a program, whether decoded elements go through shared
    memory to where they are stored, the most registers of a thread, and how many buffers of a sum
    are read together.
    """

    rows: int
    warps: int
    staged: bool = False
    registers: int | None = None
    together: int = 1


class Source(NamedTuple):
    """A buffer that is added to what is encoded.

    Attributes:
        plan: Its plan.
        form: Its format.
        data: Its bytes.
        scratch: Workspace, int64 words of each chunk; None: new memory.
        status: Where it is told what is wrong with it.
        planned: Its header is compared with the plan's.
    """

    plan: Plan
    form: Format
    data: torch.Tensor
    scratch: torch.Tensor | None
    status: torch.Tensor
    planned: bool


class Reads(NamedTuple):
    """Chunks that are to be decoded, for `prepare`.

    Attributes:
        data: Bytes of their buffer; or where `number` buffers are, the table of `Places`.
        sums: Checksum terms of chunks, which it adds to if they are `summed`.
        status: Where it tells what is wrong; of several buffers that is in the table.
        first, end: The first chunk, and the one behind the last; of several buffers all.
        number: Buffers at the places in `data`; 0: it is the buffer.
    """

    data: torch.Tensor
    sums: torch.Tensor
    status: torch.Tensor
    first: int
    end: int
    summed: bool
    number: int = 0


class _Known(NamedTuple):
    """What calls of one kind have in common: all but pointers and keys.

    Attributes:
        variant: Their kernel.
        programs: Programs for whole tensors.
        offsets: What is added to the addresses that it takes, in bytes.
        numbers: The numbers that it takes first, or behind those of a selection.
        tiling: The kernel's.
        keeps: What is known by its `id`, which stays its own as long as it is here.
    """

    variant: Variant
    programs: int
    offsets: tuple[int, ...]
    numbers: tuple[int, ...]
    tiling: Tiling
    keeps: tuple[Any, ...]


def _known_of(plan: Plan) -> dict[tuple[Any, ...], _Known]:
    """What a plan keeps of its calls, by kind: there are no more kinds than kernels it can take."""
    found: dict[Any, _Known] | None = plan.__dict__.get("_known")
    if found is None:
        # Threads that come first at the same time take the same.
        found = plan.__dict__.setdefault("_known", {})
    return found


def checksum_terms(
    plan: Plan, scratch: torch.Tensor | None, status: torch.Tensor, summed: bool
) -> torch.Tensor:
    """Words for the checksum terms of chunks, zero: the first of `scratch`, or new ones.

    If they are not `summed` it is any memory.
    """
    if not summed:
        return status if scratch is None else scratch
    if scratch is None:
        return torch.zeros(plan.chunks, dtype=torch.int64, device=status.device)
    zero(scratch[: 8 * plan.chunks])
    return scratch


#: The kernels of `Driver.measure`, and their drivers, by kind of call.
_measuring: dict[Any, tuple[Any, Any]] = {}


class Driver(NamedTuple):
    """The kernels of a format.

    Attributes:
        pack, unpack, scale: Its device functions.
        form: What they have to know.
        tilings: Of encoding, of decoding, and of encoding sums.
        tile: Decodes a tile and stores or adds it; see `unpack_tile`.
        adding: Tiling of decoding where elements are added to others, if it is one of its own.
        prepare: None, or what is done before the launch: `prepare(plan, reads, encodes, scratch=,
            x=, stats=, key=)` returns a tensor with the words that `Format` counts. They are of the
            chunks of the buffer that is encoded, or place for them in sums, and then of `reads`
            (None: none). What is encoded has `stats`, or else what the first of those that are read
            has; or it is `x`.
        load: LOAD, or None.
        summing: Tiling of sums of several buffers, if it is one of its own; else that is `adding`.
        exchanging: Tiling of peer_sums_triton, if it is one of its own; else that is `summing`, or
            that of encoding sums.
    """

    pack: Callable[..., Any]
    unpack: Callable[..., Any]
    scale: Callable[..., Any]
    form: Format
    tilings: tuple[Tiling, Tiling, Tiling]
    tile: Callable[..., Any] = unpack_tile
    adding: Tiling | None = None
    prepare: Callable[..., torch.Tensor] | None = None
    load: Callable[..., Any] | None = None
    summing: Tiling | None = None
    exchanging: Tiling | None = None

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
        scratch: torch.Tensor | None = None,
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
        src, sums, status, source_plan = out, out, out, plan
        if source is not None:
            source_plan, src, status = source.plan, source.data, source.status
            sums = checksum_terms(plan, source.scratch, status, plan.checksum)
        if self.prepare is not None:
            reads = None
            if source is not None:
                reads = Reads(src, sums, status, 0, plan.chunks, plan.checksum)
                given = OF_SOURCE if stats is None else 0
            stats = self.prepare(plan, reads, True, scratch=scratch, x=x, stats=stats, key=key)
        known = self._encoding(plan, source, out, x, given, random)
        known.variant.launch(
            known.programs,
            (
                x,
                out,
                out,
                src,
                sums,
                status,
                out if on_device is None else on_device,
                out if stats is None else stats,
            ),
            *known.numbers,
            *numbers,
            offsets=known.offsets,
        )
        if source is not None:
            frame_of(source_plan).check(
                src,
                sums,
                status,
                0,
                plan.nelem,
                whole=True,
                summed=plan.checksum,
                planned=source.planned,
            )

    def _encoding(
        self,
        plan: Plan,
        source: Source | None,
        out: torch.Tensor,
        x: torch.Tensor,
        given: int,
        random: int,
    ) -> _Known:
        """The launch that encodes by `plan`, made once for each kind of call."""
        aligned, item = aligned_for(plan, x), x.element_size()
        form, other = None, (plan.static_offset, *geometry_of(plan))
        if source is not None:
            form, other = source.form, (source.plan.static_offset, *geometry_of(source.plan))
        kind = (id(self), id(form), other, out.get_device(), item, aligned, given, random)
        kept = _known_of(plan)
        found = kept.get(kind)
        if found is None:
            tiling = self.tilings[0 if source is None else 2]
            launch = self.launch(
                tiling,
                plan.dtype,
                out.device,
                x_item=item,
                aligned=aligned,
                add=source is not None,
                given=given,
                random=random,
                sums=plan.checksum,
            )
            tiles = self.tiles(tiling, self.extent(plan))
            found = kept[kind] = _Known(
                _encode_variant(self, form, tiling, launch),
                tiles * plan.chunks,
                (0, plan.static_offset, plan.header.nbytes, other[0], 0, 0, 0, 0),
                (plan.nelem, plan.chunk_nelem, tiles, *geometry_of(plan), *other[1:]),
                tiling,
                (self, form),
            )
        return found

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
            chunks, chunk_nelem, geometry = plan.chunks, plan.chunk_nelem, geometry_of(plan)
            aligned, source = aligned_for(plan, x), src[plan.static_offset :]
        if not chunk_nelem:
            return
        tiling = self.tilings[0 if plan is None else 2]
        kind = (id(self), dtype, x.get_device(), x.element_size(), aligned, plan is not None)
        driver, variant = _measuring.get(kind, (None, None))
        if driver is not self:
            launch = self.launch(
                tiling, dtype, x.device, x_item=kind[3], aligned=aligned, add=kind[5]
            )
            variant = _encode_variant(self, None, tiling, launch)
            _measuring[kind] = self, variant
        tiles = self.tiles(tiling, chunk_nelem)
        variant.launch(
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
        scratch: torch.Tensor | None,
        status: torch.Tensor,
        *,
        start: int = 0,
        stop: int | None = None,
        check: bool = True,
        dynamic_starts: torch.Tensor | None = None,
        store: bool = True,
        add: bool = False,
        planned: bool = True,
        stats: torch.Tensor | None = None,
    ) -> None:
        """Decode elements `start` to `stop` into `out`; see `tightwire.gpu` for the contract.

        `stats` are what SCALE gets.
        """
        stop = plan.nelem if stop is None else stop
        summed = check and plan.checksum and (start < stop or not plan.nelem)
        sums = checksum_terms(plan, scratch, status, summed)
        if out is None:
            out = src
        if start < stop and (store or summed or self.form.checked):
            if self.prepare is not None:
                first, end, _, _ = touched(plan, start, stop)
                reads = Reads(src, sums, status, first, end, summed)
                stats = self.prepare(plan, reads, False, scratch=scratch)
            known = self._decoding(plan, src, out, start, add, summed, store)
            tiles, first, programs = known.numbers[2], 0, known.programs
            if stop - start < plan.nelem:
                first, last = self._tiles_of(plan, known.tiling, start, stop)
                programs = last + 1 - first
            known.variant.launch(
                programs,
                (src, out, sums, status, sums if stats is None else stats),
                start,
                stop,
                first // tiles,
                first % tiles,
                *known.numbers,
                offsets=known.offsets,
            )
        frame_of(plan).check(
            src, sums, status, start, stop, whole=check, summed=summed, planned=planned
        )

    def _decoding(
        self,
        plan: Plan,
        src: torch.Tensor,
        out: torch.Tensor,
        start: int,
        add: bool,
        sums: bool,
        store: bool,
    ) -> _Known:
        """The launch that decodes by `plan`, made once for each kind of call."""
        aligned = aligned_for(plan, out, start)
        item = out.element_size() if add else 0
        kind = (id(self), src.get_device(), aligned, item, sums, store)
        kept = _known_of(plan)
        found = kept.get(kind)
        if found is None:
            tiling = self.adding if add and self.adding else self.tilings[1]
            launch = self.launch(
                tiling,
                plan.dtype,
                src.device,
                x_item=item,
                aligned=aligned,
                sums=sums,
                store=store,
            )
            tiles = self.tiles(tiling, self.extent(plan))
            found = kept[kind] = _Known(
                _decode_variant(self, tiling, launch),
                self._tiles_of(plan, tiling, 0, plan.nelem)[1] + 1,
                (plan.static_offset, 0, 0, 0, 0),
                (plan.nelem, plan.chunk_nelem, tiles, *geometry_of(plan)),
                tiling,
                (self,),
            )
        return found

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
        if self.prepare is not None:
            tensors_of = places.table, places.sums, places.sums
            reads = Reads(*tensors_of, 0, plan.chunks, plan.checksum, places.number)
            given = OF_SOURCE if stats is None else 0
            stats = self.prepare(plan, reads, encoded, stats=stats, key=key)
        tiling = self.summing or self.adding or self.tilings[2]
        aligned = (x is None or aligned_for(plan, x)) and (encoded or aligned_for(plan, out))
        launch = self.launch(
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
            summed=True,
            loaded=self.load is not None,
        )
        tiles = self.tiles(tiling, self.extent(plan))
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
            *geometry_of(plan),
            places.number,
            place,
            1.0 if factor is None else factor,
            *numbers,
        )
        frame_of(plan).check_places(places, summed=plan.checksum, planned=planned)

    def encode_many(
        self,
        plans: Sequence[Plan],
        xs: Sequence[torch.Tensor],
        outs: Sequence[torch.Tensor] | Words,
        *,
        stats: Sequence[torch.Tensor] | torch.Tensor | Words | None = None,
        key: Key | None = None,
        draws: bool = False,
        given: int = 0,
        aligned: bool = True,
    ) -> None:
        """As `encode`, of contiguous tensors of one device and dtype, by plans of one codec.

        One launch writes all headers, one encodes all tensors. If there is a `prepare`, it was done
        by the caller, and `stats` is what it left, or where that is. A PACK that loads elements by
        itself is told whether they are `aligned`, which has to be so of all.
        """
        random, on_device, numbers = NO_KEY, None, (0, 0, 0)
        if draws:
            random, on_device, numbers = key_arguments(key, xs[0].device)
        options: dict[str, Any] = {"stats": stats, "extent": self.extent_of(plans[0])}
        batch = batch_of(self._tile_nelem(0), plans, outs, xs, **options)
        batch.begin()
        sums = any(plan.checksum for plan in plans)
        options = {"given": given, "random": random, "sums": sums, "aligned": aligned}
        launch = self._launch_many(plans[0].dtype, xs[0], **options)
        self._encode_rows(batch, launch, on_device, numbers)

    def measure_many(
        self,
        dtype: DType,
        xs: Sequence[torch.Tensor],
        stats: torch.Tensor | Words,
        *,
        aligned: bool = True,
    ) -> None:
        """As `measure`, of contiguous tensors of one device and dtype, in a launch.

        The statistics of each are a row of `stats`, or there. `aligned` is as in `encode_many`.
        """
        batch = batch_to_measure(self._tile_nelem(0), xs, stats)
        launch = self._launch_many(dtype, xs[0], aligned=aligned)
        self._encode_rows(batch, launch, None, (0, 0, 0))

    def decode_many(
        self,
        plans: Sequence[Plan],
        srcs: Sequence[torch.Tensor] | Words,
        outs: Sequence[torch.Tensor],
        statuses: Sequence[torch.Tensor] | Words,
        planned: Sequence[bool],
        **prepared: Words,
    ) -> None:
        """As `decode`, of whole buffers of one device, dtype and codec: a launch, and one to check.

        Each has a status word of its own, int64, shape (1,), and is `planned` or not. `prepared`
        says where `stats` are, what `prepare` left, and `sums`, if that added checksum terms.
        """
        tiling = self.tilings[1]
        options: dict[str, Any] = {"statuses": statuses, "planned": planned, **prepared}
        options["extent"] = self.extent_of(plans[0])
        batch = batch_of(self._tile_nelem(1), plans, srcs, outs, **options)
        if batch.programs:
            launch = self.launch(
                tiling,
                plans[0].dtype,
                outs[0].device,
                x_item=0,
                aligned=True,
                sums=any(plan.checksum for plan in plans),
            )
            variant = _decode_variant(self, tiling, launch, many=True)
            variant.launch(batch.programs, batch.tensors, offsets=batch.offsets)
        batch.check()

    def _encode_rows(
        self,
        batch: Batch,
        launch: Launch,
        on_device: torch.Tensor | None,
        numbers: tuple[int, int, int],
    ) -> None:
        if batch.programs:
            key = batch.tensors[0] if on_device is None else on_device
            variant = _encode_variant(self, None, self.tilings[0], launch, many=True)
            offsets = *batch.offsets, 0
            variant.launch(batch.programs, (*batch.tensors, key), *numbers, offsets=offsets)

    def _launch_many(self, dtype: DType, x: torch.Tensor, **values) -> Launch:
        values = {"aligned": True} | values
        return self.launch(self.tilings[0], dtype, x.device, x_item=x.element_size(), **values)

    def _tile_nelem(self, which: int) -> int:
        return self.tilings[which].rows * self.form.run

    def extent(self, plan: Plan) -> int:
        """Elements of a chunk, and those that pad them."""
        return plan.chunk_nelem

    def extent_of(self, plan: Plan) -> Callable[[Words], Words] | None:
        """As `extent`, of chunks of any numbers of elements; None if nothing pads them."""
        return None

    def _tiles_of(self, plan: Plan, tiling: Tiling, start: int, stop: int) -> tuple[int, int]:
        """The first and the last tile that elements lie in, numbered over all chunks."""
        size, extent = plan.chunk_nelem, self.extent(plan)
        tiles = self.tiles(tiling, extent)
        if extent != size:
            return start // size * tiles, ((stop - 1) // size + 1) * tiles - 1
        nelem = tiling.rows * self.form.run
        first, last = (i // size * tiles + i % size // nelem for i in (start, stop - 1))
        return first, last

    def launch(self, tiling: Tiling, dtype: DType, device: torch.device, **values) -> Launch:
        """What kernels of a tiling know of a call; `values` are the call's own."""
        return Launch(
            tiling.rows,
            self.form.run,
            dtype.exponent,
            dtype.itemsize,
            staged=tiling.staged,
            together=tiling.together,
            once=self.form.once or self.form.apart > 0,
            ptx=PTX,
            cvt=converts(device),
            apart=self.form.apart,
            **values,
        )

    def tiles(self, tiling: Tiling, nelem: int) -> int:
        """Tiles of a chunk of so many elements, at least 1."""
        return max(1, -(-nelem // (tiling.rows * self.form.run)))


class Functions(NamedTuple):
    """What `tightwire.gpu` calls in the GPU module of a codec."""

    encode: Callable[..., None]
    decode_add_encode: Callable[..., None]
    decode: Callable[..., None]


def functions(
    driver_of: Callable[[Plan], Driver], given: Callable[..., int] | None = None
) -> Functions:
    """The functions of a codec, of whose plans `driver_of` gives the driver.

    Encoding draws by its key if the codec does. `given(plan, stats, adds)` says where scales are,
    see `Launch`; `adds`: a buffer is added. Their contract is that of `tightwire.gpu`.
    """

    def run(plan: Plan, x, out, scratch, stats, key, source: Source | None) -> None:
        options: dict[str, Any] = {"draws": plan.codec.draws, "scratch": scratch, "source": source}
        options["given"] = 0 if given is None else given(plan, stats, source is not None)
        driver_of(plan).encode(plan, x, out, stats=stats, key=key, **options)

    def encode(plan: Plan, x, out, scratch, stats=None, key: Key | None = None) -> None:
        run(plan, x, out, scratch, stats, key, None)

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
        form = driver_of(source_plan).form
        source = Source(source_plan, form, src, scratch, status, planned)
        run(plan, x, out, scratch, stats, key, source)

    def decode(plan: Plan, src, out, scratch, status, **selection) -> None:
        driver_of(plan).decode(plan, src, out, scratch, status, **selection)

    return Functions(encode, decode_add_encode, decode)


class ManyFunctions(NamedTuple):
    """What `tightwire.gpu_many` calls in the GPU module of a codec."""

    encode_many: Callable[..., None]
    decode_many: Callable[..., None]
    sum: Callable[..., None]
    encode_sum: Callable[..., None]


def sum_function(driver_of: Callable[[Plan], Driver]) -> Callable[..., None]:
    """`sum` of a codec, of whose plans `driver_of` gives the driver; see `tightwire.gpu_many`."""

    def sum_up(plan: Plan, places: Places, out, **options) -> None:
        driver_of(plan).sum(plan, places, out, **options)

    return sum_up


def encode_sum_function(
    driver_of: Callable[[Plan], Driver], given: Callable[..., int] | None = None
) -> Callable[..., None]:
    """`encode_sum` of a codec, as `sum_function`; `given` is as in `functions`."""

    def encode_sum(plan: Plan, places: Places, out, *, stats=None, **options) -> None:
        options["given"] = 0 if given is None else given(plan, stats, True)
        driver_of(plan).sum(plan, places, out, stats=stats, encoded=True, **options)

    return encode_sum


def many_functions(
    driver_of: Callable[[Plan], Driver], given: Callable[..., int] | None = None
) -> ManyFunctions:
    """The functions of a codec, of whose plans `driver_of` gives the driver, for many tensors.

    `given` is as in `functions`. Their contract is that of `tightwire.gpu_many`.
    """

    def encode_many(plans, xs, outs, stats=None, key=None) -> None:
        codec, found = plans[0].codec, 0
        if given is not None and stats is None:
            found = given(plans[0], None, False)
        elif given is not None:
            for plan, own in zip(plans, stats, strict=True):
                found = given(plan, own, False)
        driver_of(plans[0]).encode_many(
            plans, xs, outs, stats=stats, key=key, draws=codec.draws, given=found
        )

    def decode_many(plans, srcs, outs, statuses, planned) -> None:
        driver_of(plans[0]).decode_many(plans, srcs, outs, statuses, planned)

    sums = sum_function(driver_of), encode_sum_function(driver_of, given)
    return ManyFunctions(encode_many, decode_many, *sums)


@functools.cache
def _encode_variant(
    driver: Driver, source: Format | None, tiling: Tiling, launch: Launch, many: bool = False
) -> Variant:
    formats = {"F": driver.form} if many else {"F": driver.form, "G": source or driver.form}
    return Variant(
        encode_rows_kernel if many else encode_kernel,
        options(tiling.warps, tiling.registers),
        **formats,
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
        LOAD=driver.load or no_load,
        UNPACK=driver.unpack,
        SCALE=driver.scale,
    )


@functools.cache
def _decode_variant(driver: Driver, tiling: Tiling, launch: Launch, many: bool = False) -> Variant:
    return Variant(
        decode_rows_kernel if many else decode_kernel,
        options(tiling.warps, tiling.registers),
        F=driver.form,
        L=launch,
        UNPACK=driver.unpack,
        SCALE=driver.scale,
        TILE=driver.tile,
    )


def geometry_of(plan: Plan) -> tuple[int, int]:
    """The distance of static parts, and where the second section starts in them, by 128 bytes."""
    return plan.static_stride // 128, plan.layout.sections[0].nbytes // 128
