# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""zipccl on the CPU with Numba: the bytes of codecs/zipccl.py at memory speed.

Loops run over flat arrays with a constant tile width and L1-sized scratch, and every operand is
cast to its unsigned type: that is the form LLVM vectorises.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from ..formats.checksum import MASK64
from ..formats.dtypes import BY_NAME
from .common.arrays_cpu import as_read_only, read_only, view_as, with_scratch
from .common.base import Bits, Bytes, Chunk, ChunkResult, Plan
from .common.checksum_cpu import add_words, sum_part
from .common.compile_cache import cached
from .common.driver_cpu import (
    Decoder,
    Encoder,
    Given,
    by_tiles,
    decode_by,
    encode_by,
)
from .zipccl import (
    COLUMNS,
    ROWS,
    TILE,
    WINDOW,
    ZERO_MODE,
    Zipccl,
    entries_fit,
    fields_of,
    static_views,
    tile_count,
    tiles_nbytes,
)
from .zipccl_tile_cpu import (
    any_bits,
    append_escapes,
    collect_padded_tile,
    collect_tile,
    columns_of,
    count_flags,
    escapes_are_outside,
    gather_escapes,
    join_bf16,
    join_e4m3,
    join_e5m2,
    join_f16,
    join_f32,
    join_f64,
    narrow_block,
    pack_codes,
    pack_top,
    pad_tile,
    scatter_escapes,
    split_bf16,
    split_e4m3,
    split_e5m2,
    split_f16,
    split_f32,
    split_f64,
    spread_tile,
    swap_zeros,
    tile_window,
    unpack_codes,
    unpack_top3,
    unpack_top4,
    unpack_top5,
    widen_block,
)

U1, U2, U4, U8 = np.uint8, np.uint16, np.uint32, np.uint64
I8 = np.int64
_SAMPLED = TILE // 8
_WORDS = COLUMNS // 8
_BASE_MASK = ZERO_MODE - 1
_PROBLEMS = (
    None,
    "escape offsets or windows out of range",
    "escape count of a tile",
    "an escaped exponent",
    "padding elements of the last tile",
    "padding of the buffer",
)
#: What `decode_span` sums: nothing, tiles, or tiles and all else.
_NOTHING, _TILES, _ALL = range(3)
_NO_GAPS = np.empty((0, 2), np.int64)


# One kernel for each way and dtype: branches on the numbers that a factory is called with are
# decided before anything is compiled. Each helper is called at one place, as LLVM compiles it anew
# at each.


@functools.cache
def _encoder(mantissa, extra, width):
    streams = (1 + mantissa) // 8
    planes = 3 + extra
    codes_at = TILE * streams
    nbytes = codes_at + planes * COLUMNS
    group = 2 * width
    # Scratch: exponents, a sample of them, two arrays of counts, bits for planes, escape flags, and
    # elements and block of the last tile.
    sample_at = (TILE + 64) * width
    highs_at = sample_at + (TILE + 64) * width
    lanes_at = highs_at + 64 * width
    top_at = lanes_at + 192
    escaped_at = top_at + TILE
    xs_at = escaped_at + COLUMNS
    wide_at = xs_at + TILE * 8

    @cached(nogil=True, error_model="numpy")
    def encode_span(space, static, index_at, nelem, fixed, x, start, escapes, count, used):
        """Encode `x`, elements `start` and on, behind the first `count` escapes.

        `fixed` is the index entry of all tiles, or -1. Returns the number of escapes, which may be
        more than there is place for in `escapes`, and the keyed sum of the tile blocks. If `used`,
        the size of all tile blocks, is given, not -1, it is that of all that was written.
        """
        e = space[:sample_at]
        sample = space[sample_at:highs_at]
        highs = space[highs_at:lanes_at]
        e_words, sample_words = view_as(e, np.uint64), view_as(sample, np.uint64)
        if width == 2:
            e, sample = view_as(e, np.uint16), view_as(sample, np.uint16)
            highs = view_as(highs, np.uint16)
        lanes = space[lanes_at:top_at]
        top = space[top_at:escaped_at]
        escaped = space[escaped_at:xs_at]
        flags = view_as(escaped, np.uint64)
        xs = view_as(space[xs_at:wide_at], x.dtype)
        wide = space[wide_at:]
        n_tiles = (nelem + TILE - 1) // TILE
        entries_at = index_at + 4 * n_tiles
        offsets = view_as(static[index_at:entries_at], np.uint32)
        entries = view_as(static[entries_at : entries_at + 2 * n_tiles], np.uint16)
        words = view_as(read_only(static), np.uint32)
        one = e.dtype.type
        full = nelem // TILE
        total = U8(0)
        for source_at in range(0, x.size, TILE):
            t = (start + source_at) // TILE
            at = t * nbytes
            if t < full:
                n = TILE
                columns = COLUMNS
                source = x[source_at : source_at + TILE]
                block = static[at : at + nbytes]
            else:
                n = x.size - source_at
                columns = columns_of(n)
                spread_tile(x, source_at, columns, xs)
                source = read_only(xs)
                block = wide
            if mantissa == 2:
                split_e5m2(source, e, top)
            elif mantissa == 3:
                split_e4m3(source, e, top)
            elif mantissa == 7:
                split_bf16(source, e, block)
            elif mantissa == 10:
                split_f16(source, e, top, block)
            elif mantissa == 23:
                split_f32(source, e, block)
            else:
                split_f64(source, e, top, block)
            if fixed >= 0:
                entry = fixed
            else:
                sampled = n
                if t < full:
                    sampled = _SAMPLED
                    for k in range(TILE // 128):
                        to, begin = k * group, (8 * k + k % 8) * group
                        for i in range(group):
                            sample_words[to + i] = e_words[begin + i]
                else:
                    collect_tile(e, n, columns, sample)
                entry = tile_window(sample, sampled, lanes, highs)
            base = one(entry & _BASE_MASK)
            if t == full:
                pad_tile(e, n, columns, one(base + one(WINDOW - 1)))
            plain = e
            if entry >= ZERO_MODE:
                swap_zeros(e, base, sample)
                plain = sample
            pack_codes(plain, base, block[codes_at:], escaped)
            if extra != 0:
                pack_top(top, extra, block[codes_at + 3 * COLUMNS :])
            offsets[t] = U4(count)
            entries[t] = U2(entry)
            if count >= escapes.size:
                count += count_flags(flags)
            else:
                fits = count + TILE <= escapes.size
                end = gather_escapes(
                    e, flags, escapes if fits else sample, count if fits else I8(0)
                )
                if fits:
                    count = end
                else:
                    append_escapes(escapes, count, sample, end)
                    count += end
            end = at + columns * (ROWS * streams + planes)
            if t == full:
                narrow_block(static[at:end], wide, columns, streams, planes)
            total = add_words(total, words[at // 4 : end // 4], at // 4)
        if used >= 0 and count <= escapes.size:
            coded = view_as(escapes[:count], np.uint8)
            for k in range(2):
                rest = read_only(static[used:] if k == 0 else coded)
                total = sum_part(total, rest, used // 4 if k == 0 else static.size // 4)
        return count, total

    return with_scratch(encode_span, wide_at + nbytes)


@functools.cache
def _decoder(exponent, mantissa, extra, width):
    streams = (1 + mantissa) // 8
    planes = 3 + extra
    codes_at = TILE * streams
    nbytes = codes_at + planes * COLUMNS
    top_at = (TILE + 64) * width
    escaped_at = top_at + TILE
    xs_at = escaped_at + COLUMNS
    wide_at = xs_at + TILE * 8

    @cached(nogil=True, error_model="numpy")
    def decode_span(
        space, static_in, dynamic_in, x, places, gaps, dynamic_nbytes, nelem, first, last, sums
    ):
        """Decode tiles `first` to `last` of a chunk of `nelem` elements to the start of `x`.

        `places` are start and size of the static part in `static_in`, start of the dynamic part in
        `dynamic_in`, size of the tile blocks, start of the index, and number of tiles. `gaps` are
        ranges of `static_in` that have to be zero, as is what lies behind the dynamic part.

        Returns an index into `_PROBLEMS` and the keyed sum of what `sums` says. Nothing outside the
        arrays is touched, whatever the bytes say.
        """
        static_at, static_nbytes, dynamic_at, used, index_at, n_tiles = places
        end = dynamic_at + dynamic_nbytes
        found = U1(0)
        for k in range(gaps.shape[0] + 1):
            behind = k == gaps.shape[0]
            data = dynamic_in if behind else static_in
            found |= any_bits(
                data, end if behind else gaps[k, 0], data.size if behind else gaps[k, 1]
            )
        static = static_in[static_at : static_at + static_nbytes]
        dynamic = dynamic_in[dynamic_at:end]
        entries_at = index_at + 4 * n_tiles
        offsets = view_as(static[index_at:entries_at], np.uint32)
        entries = view_as(static[entries_at : entries_at + 2 * n_tiles], np.uint16)
        e = space[:top_at]
        escapes = dynamic
        if width == 2:
            e, escapes = view_as(e, np.uint16), view_as(escapes, np.uint16)
        top = space[top_at:escaped_at]
        escaped = space[escaped_at:xs_at]
        flags = view_as(escaped, np.uint64)
        xs = view_as(space[xs_at:wide_at], x.dtype)
        wide = space[wide_at:]
        words = view_as(static, np.uint32)
        one = e.dtype.type
        full = nelem // TILE
        total = U8(0)
        problem = 5 if found != U1(0) else 0
        for t in range(first, last):
            at = t * nbytes
            columns = COLUMNS if t < full else columns_of(nelem)
            end = at + columns * (ROWS * streams + planes)
            if sums != _NOTHING:
                total = add_words(total, words[at // 4 : end // 4], at // 4)
            entry = I8(entries[t])
            base = entry & _BASE_MASK
            begin_escapes = I8(offsets[t])
            end_escapes = I8(offsets[t + 1]) if t + 1 < offsets.size else escapes.size
            if (
                (t == 0 and begin_escapes != 0)
                or begin_escapes > end_escapes
                or end_escapes > escapes.size
                or base + WINDOW > 1 << exponent
                or entry == ZERO_MODE
            ):
                problem = 1
                continue
            block = static[at:end]
            to = (t - first) * TILE
            target = xs
            if t < full:
                target = x[to : to + TILE]
            else:
                widen_block(block, wide, columns, streams, planes)
                block = read_only(wide)
            unpack_codes(block[codes_at:], one(base), entry >= ZERO_MODE, e, escaped)
            for i in range(columns, COLUMNS):
                escaped[i] = 0
            if count_flags(flags) != end_escapes - begin_escapes:
                problem = 2
                continue
            if not escapes_are_outside(escapes, begin_escapes, end_escapes, entry, exponent):
                problem = 3
                continue
            scatter_escapes(e, flags, escapes, begin_escapes, end_escapes)
            if extra == 3:
                unpack_top3(block[codes_at + 3 * COLUMNS :], top)
            elif extra == 4:
                unpack_top4(block[codes_at + 3 * COLUMNS :], top)
            elif extra == 5:
                unpack_top5(block[codes_at + 3 * COLUMNS :], top)
            if mantissa == 2:
                join_e5m2(e, top, target)
            elif mantissa == 3:
                join_e4m3(e, top, target)
            elif mantissa == 7:
                join_bf16(e, block, target)
            elif mantissa == 10:
                join_f16(e, top, block, target)
            elif mantissa == 23:
                join_f32(e, block, target)
            else:
                join_f64(e, top, block, target)
            if t == full:
                n = nelem - full * TILE
                padding = x.dtype.type(base + WINDOW - 1) << x.dtype.type(mantissa)
                if not collect_padded_tile(xs, columns, padding, x[to : to + n]):
                    problem = 4
        if sums == _ALL:
            for k in range(2):
                rest = static[used:] if k == 0 else dynamic
                total = sum_part(total, rest, used // 4 if k == 0 else static.size // 4)
        return problem, total

    return with_scratch(decode_span, wide_at + nbytes)


def cache_folder() -> str | None:
    """Where Numba keeps these kernels; None if no folder can be written."""
    f = fields_of(BY_NAME["bfloat16"])
    cache = _encoder(f.mantissa, f.extra, f.width).__wrapped__._cache
    return getattr(cache, "_cache_path", None)


class _Span:
    """Tiles that are encoded piece by piece, one after the other, and their escapes.

    `encode_span` has all arguments that do not change. `used` is as there for the last piece.
    """

    def __init__(
        self, encode_span: Callable[..., Any], start: int, stop: int, escapes: Bits, used: int
    ) -> None:
        self._encode_span, self._used = encode_span, used
        self.start, self.stop, self.escapes = start, stop, escapes
        self.count, self.total = 0, 0

    def encode(self, x: Bits, at: int) -> None:
        """See `Encoder`."""
        used = self._used if at + x.size == self.stop else -1
        self.count, total = self._encode_span(x, at, self.escapes, self.count, used)
        self.total += int(total)


def encoder(spec: Zipccl, chunk: Chunk, given: Given) -> Encoder:
    """What encodes a chunk. Escapes of spans but the first are copied behind those before them."""
    f, nelem = fields_of(chunk.dtype), chunk.nelem
    slot = chunk.dynamic[: chunk.dynamic.size // f.width * f.width].view(f.escape_dtype)
    fixed = -1 if given.stats is None else int(given.stats[0])
    index_at, used = chunk.sections[0].nbytes, tiles_nbytes(f, nelem)
    kernel = _encoder(f.mantissa, f.extra, f.width)
    encode_span = functools.partial(kernel, chunk.static, index_at, nelem, fixed)
    made: list[_Span] = []

    def span(start: int, stop: int) -> Callable[[Bits, int], None]:
        escapes = slot
        if start > 0:
            escapes = np.empty(min(slot.size, stop - start) + TILE, f.escape_dtype)
        whole = stop - start == nelem
        made.append(_Span(encode_span, start, stop, escapes, used if whole else -1))
        return made[-1].encode

    def finish(results: list[None]) -> ChunkResult:
        if len(made) == 1:
            count = made[0].count
            known = made[0].total & MASK64 if count <= slot.size else None
            return ChunkResult(count * f.width, known)
        offsets = static_views(chunk)[1]
        count, total = 0, 0
        for one in made:
            total += one.total
            if count > 0:
                offsets[one.start // TILE : -(-one.stop // TILE)] += np.uint32(count)
            if one.escapes is not slot and count + one.count <= slot.size:
                slot[count : count + one.count] = one.escapes[: one.count]
            count += one.count
        if count > slot.size:
            return ChunkResult(count * f.width)
        # No more tiles: what is behind them is summed.
        nothing = as_read_only(np.empty(0, chunk.dtype.bits))
        total += int(encode_span(nothing, 0, slot, count, used)[1])
        return ChunkResult(count * f.width, total & MASK64)

    return Encoder(span, TILE, finish)


def _nothing(out: Bits, start: int) -> None:
    pass


def decoder(spec: Zipccl, chunk: Chunk, start: int, stop: int, summed: bool = False) -> Decoder:
    """What decodes elements `start` to `stop` of a chunk."""
    f, nelem = fields_of(chunk.dtype), chunk.nelem
    if nelem == 0 or chunk.dynamic.size % f.width:
        size = chunk.dynamic.size
        problem = f"{size} bytes of escapes of {f.width} bytes each" if size else None
        return Decoder(_nothing, problem=problem)
    here = slice(start // TILE, -(-stop // TILE))
    problem = None
    if not entries_fit(spec, static_views(chunk)[2], here):
        problem = "windows that differ in a tensor with one window"
    decode_span = _decoder(f.exponent, f.mantissa, f.extra, f.width)
    static, dynamic = as_read_only(chunk.static), as_read_only(chunk.dynamic)
    used = tiles_nbytes(f, nelem)
    places = (0, static.size, 0, used, chunk.sections[0].nbytes, tile_count(nelem))
    totals: list[int] = []

    def decode_some(out: Bits, first: int, last: int, sums: int) -> int:
        fixed = places, _NO_GAPS, dynamic.size, nelem
        found, total = decode_span(static, dynamic, out, *fixed, first, last, sums)
        totals.append(int(total))
        return int(found)

    def decode(out: Bits, at: int) -> int:
        sums = (_ALL if out.size == nelem else _TILES) if summed else _NOTHING
        return decode_some(out, at // TILE, -(-(at + out.size) // TILE), sums)

    def words_sum() -> int:
        if len(totals) > 1:
            # No more tiles: what is behind them is summed.
            decode_some(np.empty(0, chunk.dtype.bits), 0, 0, _ALL)
        return sum(totals) & MASK64

    decode_any = by_tiles(decode, TILE, nelem)
    return Decoder(decode_any, TILE, _PROBLEMS, problem, words_sum if summed else None)


encode_chunk = encode_by(encoder)
decode_chunk = decode_by(decoder)


def buffer_encoder(plan: Plan) -> Callable[..., tuple[int, int | None]]:
    """What encodes the one chunk of buffers of `plan` in one call, on one thread.

    It takes buffer, elements (1-D) and statistics, as `encoder` does, and gives the size of the
    dynamic part and the keyed sum of the chunk, or None if that part does not fit.
    """
    f, nelem = fields_of(plan.dtype), plan.nelem
    kernel = _encoder(f.mantissa, f.extra, f.width)
    index_at, used = plan.layout.sections[0].nbytes, tiles_nbytes(f, nelem)
    start, end = plan.static_offset, plan.dynamic_offset
    slot_end = end + plan.dynamic_stride // f.width * f.width
    escape_dtype, width = f.escape_dtype, f.width

    def encode(out: Bytes, bits: Bits, stats: Any, key: Any) -> tuple[int, int | None]:
        fixed = -1 if stats is None else int(stats[0])
        slot = out[end:slot_end].view(escape_dtype)
        x = as_read_only(bits)
        count, total = kernel(out[start:end], index_at, nelem, fixed, x, 0, slot, 0, used)
        return count * width, int(total) & MASK64 if count <= slot.size else None

    return encode


def buffer_decoder(plan: Plan, gaps: Bits) -> Callable[[Bytes, Bits, int], int | None] | None:
    """What decodes packed buffers of `plan`, one chunk not stored raw, in one call, or None.

    It takes buffer, elements to write (1-D) and size of the dynamic part, and gives the keyed sum
    of the chunk; None if the payload is bad. `gaps`, shape (n, 2), are bytes that have to be zero.
    """
    spec = plan.codec
    if not isinstance(spec, Zipccl) or spec.window != "tile" or plan.chunks != 1 or not plan.nelem:
        return None
    f = fields_of(plan.dtype)
    decode_span = _decoder(f.exponent, f.mantissa, f.extra, f.width)
    nelem, n_tiles = plan.nelem, tile_count(plan.nelem)
    places = (
        plan.static_offset,
        plan.dynamic_offset - plan.static_offset,
        plan.dynamic_offset,
        tiles_nbytes(f, nelem),
        plan.layout.sections[0].nbytes,
        n_tiles,
    )

    def decode(data: Bytes, out: Bits, dynamic_nbytes: int) -> int | None:
        if dynamic_nbytes % f.width:
            return None
        data = as_read_only(data)
        problem, total = decode_span(
            data, data, out, places, gaps, dynamic_nbytes, nelem, 0, n_tiles, _ALL
        )
        return int(total) if problem == 0 else None

    return decode
