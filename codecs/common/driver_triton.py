# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment,misc"
"""The kernels of codecs that code tile by tile: encode, decode, and sums of both.

A format is two device functions, and what they have to know:

- PACK(v, t, s, draw, stats_ptr, F, L, MASKED) encodes a tile, and returns the checksum terms of the
  words that it wrote;
- UNPACK(t, lo, hi, F, L, MASKED) returns (float32 values, which threads found a code that is wrong
  among elements `lo` to `hi` of the chunk, checksum terms);
- SCALE(stats_ptr, static_ptr, at, F, CHOOSE) returns (a number that all tiles of a chunk share,
  whether the fast forms of the other two may be taken with it).

Values are columns: a tuple of `run` tensors, each with one value of every thread's run of
neighbouring elements. Where the device converts pairs of 16-bit floats, PACK gets those of a whole
tile as columns of words of two elements if the format takes them (`pairs`). F is the format, a
frozen dataclass of whatever the functions need; L is a `Launch`; `t` and `s` are `Tile`s.
Everything else is here: geometry, masks, selections, checksums, reports, sums.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ...formats.dtypes import DType
from .base import Key, Plan
from .frame_triton import CHUNK, CHUNK_PAYLOAD, frame_of, touched
from .launch_triton import PTX, Variant, kernel, options
from .minifloat_triton import aligned_for, converts
from .philox_triton import KEY_ON_DEVICE, NO_KEY, key_arguments
from .runs_triton import (
    add_elements,
    element_words,
    lanes,
    load_elements,
    load_words,
    report_any,
    store_elements,
    store_runs,
    sum_pairs,
    sum_runs,
    word_values,
)

_KEY_ON_DEVICE = tl.constexpr(KEY_ON_DEVICE)


class Tile(NamedTuple):
    """A tile of a chunk of a buffer.

    Attributes:
        chunk: Number of the chunk.
        tile: Number of the tile in the chunk.
        n: Elements of the chunk.
        first: Number of the chunk's first element in the tensor.
        nelem: Elements of the tensor.
        static_ptr: The chunk's static part.
        at: Where the second section starts in it, in units of 128 bytes.
        scale: What SCALE returned.
    """

    chunk: Any
    tile: Any
    n: Any
    first: Any
    nelem: Any
    static_ptr: Any
    at: Any
    scale: Any


class Tiling(NamedTuple):
    """Threads' runs of a tile, warps of a program, whether decoded elements go through shared
    memory to where they are stored, and the most registers of a thread.
    """

    rows: int
    warps: int
    staged: bool = False
    registers: int | None = None


@dataclass(frozen=True)
class Launch:
    """What the kernels know of a call.

    Attributes:
        rows: Runs of a tile.
        run: Elements of a run.
        exponent: Bits of the exponent of the plan's dtype.
        item: Bytes of its elements.
        x_item: Bytes of the elements that are read or added to; 0: decoded ones are stored.
        aligned: Chunks start at multiples of 16 bytes there.
        add: Encode the sum with a buffer.
        given: 1: scales are those of the statistics, 2: of the buffer that is added; 0: neither.
        random: Where the key is.
        sums: Sum up checksum terms.
        store: Decoded elements are wanted.
        staged: See `Tiling`.
        ptx: PTX may be used.
        cvt: The device converts small floats, and has packed integers.
    """

    rows: int
    run: int
    exponent: int
    item: int
    x_item: int
    aligned: bool
    add: bool = False
    given: int = 0
    random: int = NO_KEY
    sums: bool = False
    store: bool = True
    staged: bool = False
    ptx: bool = False
    cvt: bool = False


@dataclass(frozen=True)
class Format:
    """The part of a format that the driver knows; formats add their own.

    Attributes:
        run: Elements of a thread's run.
        limited: Decoded values are brought into the dtype's finite range.
        pairs: PACK takes words of two elements.
        checked: There are codes that are wrong.
    """

    run: int
    limited: bool
    pairs: bool
    checked: bool


@triton.jit
def no_scale(stats_ptr, static_ptr, at, F: tl.constexpr, CHOOSE: tl.constexpr):
    """SCALE of formats without one."""
    return 1.0, True


@triton.jit
def _load(x_ptr, t, L: tl.constexpr, WORDS: tl.constexpr, MASKED: tl.constexpr):
    """Values of a tile's elements, 0 from the chunk's end on; or WORDS of them."""
    begin = t.tile * (L.rows * L.run)
    if MASKED:
        i = begin + lanes(L.rows)[:, None] * L.run + tl.arange(0, L.run)[None, :]
        return load_elements(x_ptr, t.first + i, i < t.n, L.rows, L.exponent, L.x_item, L.run)
    else:
        words = load_words(x_ptr + (t.first + begin) * L.x_item, None, L.rows, L.x_item, L.run)
        if WORDS:
            return words
        else:
            return word_values(words, L.exponent, L.x_item)


@triton.jit
def _encode_tile(
    x_ptr,
    t,
    s,
    draw,
    stats_ptr,
    status_ptr,
    F: tl.constexpr,
    G: tl.constexpr,
    L: tl.constexpr,
    PACK: tl.constexpr,
    UNPACK: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Encode a tile, or its sum with that of a buffer; gives the checksum terms of both."""
    PAIRS: tl.constexpr = L.cvt and (L.x_item == 2) and (MASKED == 0)
    WORDS: tl.constexpr = PAIRS and (L.add or F.pairs)
    v = _load(x_ptr, t, L, WORDS, MASKED)
    added = tl.zeros([], tl.uint64)
    if L.add:
        y, wrong, added = UNPACK(s, t.n * 0, t.n, G, L, MASKED)
        if G.checked:
            report_any(status_ptr, CHUNK + (t.chunk << 8) + CHUNK_PAYLOAD, wrong)
        if WORDS:
            v = sum_pairs(y, v, L.exponent, G.limited)
        else:
            v = sum_runs(y, v, L.exponent, L.item, L.cvt, G.limited)
        if MASKED:
            used = ()
            RUN: tl.constexpr = L.run
            for k in tl.static_range(RUN):
                inside = (t.tile * L.rows + lanes(L.rows)) * L.run + k < t.n
                used = used + (tl.where(inside, v[k], 0.0),)
            v = used
    if WORDS and (not F.pairs):
        v = word_values(v, L.exponent, 2)
    total = PACK(v, t, s, draw, stats_ptr, F, L, MASKED)
    return total, added


@kernel
def encode_kernel(
    x_ptr,
    out_ptr,
    record_ptr,
    src_ptr,
    sums_ptr,
    status_ptr,
    key_ptr,
    stats_ptr,
    nelem: tl.int64,
    chunk_nelem: tl.int64,
    tiles: tl.int32,
    stride: tl.int64,
    at: tl.int64,
    source_stride: tl.int64,
    source_at: tl.int64,
    seed: tl.uint64,
    step: tl.uint64,
    rank: tl.uint64,
    F: tl.constexpr,
    G: tl.constexpr,
    L: tl.constexpr,
    PACK: tl.constexpr,
    UNPACK: tl.constexpr,
    SCALE: tl.constexpr,
):
    """Encode one tile of one chunk, or its sum with that of a buffer of format G.

    `out_ptr` and `src_ptr` are the first static parts, `record_ptr` is the first record.
    """
    pid = tl.program_id(0)
    chunk = (pid // tiles).to(tl.int64)
    tile = (pid % tiles).to(tl.int64)
    first = chunk * chunk_nelem
    if L.aligned:
        first = tl.multiple_of(first, 16)
    n = tl.maximum(tl.minimum(chunk_nelem, nelem - first), 0)
    if L.random == _KEY_ON_DEVICE:
        seed = tl.load(key_ptr).to(tl.uint64, bitcast=True)
        step = tl.load(key_ptr + 1).to(tl.uint64, bitcast=True)
    draw = (seed, step, rank)
    static_ptr = out_ptr + chunk * stride * 128
    scale, plain = SCALE(stats_ptr, static_ptr, at, F, True)
    t = Tile(chunk, tile, n, first, nelem, static_ptr, at, scale)
    s = t
    if L.add:
        source_ptr = src_ptr + chunk * source_stride * 128
        scale, usual = SCALE(stats_ptr, source_ptr, source_at, G, False)
        plain = plain & usual
        s = Tile(chunk, tile, n, first, nelem, source_ptr, source_at, scale)
    plain = plain & L.aligned & ((tile + 1) * (L.rows * L.run) <= n)
    # fmt: off
    if plain:
        total, added = _encode_tile(
            x_ptr, t, s, draw, stats_ptr, status_ptr, F, G, L, PACK, UNPACK, False
        )
    else:
        total, added = _encode_tile(
            x_ptr, t, s, draw, stats_ptr, status_ptr, F, G, L, PACK, UNPACK, True
        )
    # fmt: on
    if L.sums:
        record = record_ptr.to(tl.pointer_type(tl.int64)) + chunk * 4
        tl.atomic_add(record, total.to(tl.int64, bitcast=True), sem="relaxed")
        if L.add:
            tl.atomic_add(sums_ptr + chunk, added.to(tl.int64, bitcast=True), sem="relaxed")


@triton.jit
def _decode_tile(
    t,
    status_ptr,
    out_ptr,
    to,
    lo,
    hi,
    F: tl.constexpr,
    L: tl.constexpr,
    UNPACK: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Decode a tile; element i of the chunk goes to `to + i` if it is in [lo, hi). Gives the
    checksum terms.
    """
    y, wrong, total = UNPACK(t, lo, hi, F, L, MASKED)
    if F.checked:
        report_any(status_ptr, CHUNK + (t.chunk << 8) + CHUNK_PAYLOAD, wrong)
    if L.store:
        begin = t.tile * (L.rows * L.run)
        i = begin + lanes(L.rows)[:, None] * L.run + tl.arange(0, L.run)[None, :]
        use = None
        if MASKED:
            use = (i >= lo) & (i < hi)
        if L.x_item > 0:
            add_elements(out_ptr, to + i, y, use, L.exponent, L.item, L.x_item, L.cvt, F.limited)
        else:
            words = element_words(y, None, L.exponent, L.item, L.cvt, F.limited)
            if MASKED:
                store_elements(out_ptr, to + i, words, use, L.rows, L.item)
            else:
                store_runs(out_ptr + (to + begin) * L.item, words, L.rows, L.staged)
    return total


@kernel
def decode_kernel(
    src_ptr,
    out_ptr,
    sums_ptr,
    status_ptr,
    start: tl.int64,
    stop: tl.int64,
    first_chunk: tl.int64,
    nelem: tl.int64,
    chunk_nelem: tl.int64,
    tiles: tl.int32,
    stride: tl.int64,
    at: tl.int64,
    F: tl.constexpr,
    L: tl.constexpr,
    UNPACK: tl.constexpr,
    SCALE: tl.constexpr,
):
    """Elements `start` to `stop` of the tensor as far as they lie in one tile of one chunk.

    `src_ptr` is the first static part.
    """
    pid = tl.program_id(0)
    chunk = (first_chunk + pid // tiles).to(tl.int64)
    tile = (pid % tiles).to(tl.int64)
    first = chunk * chunk_nelem
    n = tl.maximum(tl.minimum(chunk_nelem, nelem - first), 0)
    static_ptr = src_ptr + chunk * stride * 128
    scale, plain = SCALE(static_ptr, static_ptr, at, F, False)
    t = Tile(chunk, tile, n, first, nelem, static_ptr, at, scale)
    to = first - start
    if L.aligned:
        to = tl.multiple_of(to, 16)
    lo = tl.maximum(start - first, 0)
    hi = tl.minimum(stop - first, n)
    begin = tile * (L.rows * L.run)
    plain = plain & L.aligned & (begin >= lo) & (begin + L.rows * L.run <= hi)
    if plain:
        total = _decode_tile(t, status_ptr, out_ptr, to, lo, hi, F, L, UNPACK, False)
    else:
        total = _decode_tile(t, status_ptr, out_ptr, to, lo, hi, F, L, UNPACK, True)
    if L.sums:
        tl.atomic_add(sums_ptr + chunk, total.to(tl.int64, bitcast=True), sem="relaxed")


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
