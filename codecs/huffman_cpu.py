# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""huffman on the CPU with Numba: the bytes of codecs/huffman.py, a tile in cache at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from ..formats.checksum import MASK64
from ..formats.dtypes import DType
from .common.arrays_cpu import as_read_only, read_only, view_as, with_scratch
from .common.base import Bits, Bytes, Chunk, ChunkResult, Plan
from .common.checksum_cpu import add_words, words_sum
from .common.compile_cache import cached, part
from .common.driver_cpu import (
    Decoder,
    Encoder,
    Given,
    by_tiles,
    decode_by,
    encode_by,
)
from .common.huffman import RUNS, SAMPLED, TABLE_NBYTES, TILE
from .common.huffman_cpu import (
    BITS_NBYTES,
    DECODING_NBYTES,
    ENCODING_NBYTES,
    FINDING_NBYTES,
    decode_block_by,
    decoding_of,
    encode_block_by,
    encoding_of,
    find_table,
    is_good,
    less,
    sampled_at,
)
from .common.memory_cpu import copy_bytes, fill_bytes
from .huffman import (
    GROUP,
    GROUP_TILES,
    STEP,
    Huffman,
    group_count,
    index_of,
    index_problem,
    planes_of,
    tile_count,
)

U1, U2, U4, U8, I8 = np.uint8, np.uint16, np.uint32, np.uint64, np.int64
_PROBLEMS = (None, "tables of a group", "a tile")
#: Memory of a plane of a tile: decoders write behind its end.
_PLANE = TILE + 64


@functools.cache
def _elements(size, rotation):
    """(what takes a plane out of elements, what puts elements together from planes)."""
    one = np.dtype(f"u{size}").type
    top = 8 * size - rotation

    @part(nogil=True, apart=True)
    def take(x, k, plane):
        if size == 1:
            copy_bytes(plane, 0, x, 0, x.size)
        elif size == 2:
            # Shifts by constants, which LLVM vectorises.
            if k == 1:
                for i in range(x.size):
                    plane[i] = U1(x[i] >> U2(8 - rotation))
            elif rotation:
                for i in range(x.size):
                    plane[i] = U1(U2(x[i] << U2(1)) | U2(x[i] >> U2(15)))
            else:
                for i in range(x.size):
                    plane[i] = U1(x[i])
        else:
            shift = one(8 * k)
            for i in range(x.size):
                v = x[i]
                if rotation:
                    v = one(one(v << one(rotation)) | one(v >> one(top)))
                plane[i] = U1(v >> shift)

    @part(nogil=True, apart=True)
    def put(planes, out):
        n = out.size
        if size == 1:
            for i in range(n):
                out[i] = planes[i]
        elif size == 2:
            low, high = planes[:_PLANE], planes[_PLANE:]
            if rotation:
                for i in range(n):
                    sign = U2(U2(low[i]) << U2(15))
                    out[i] = U2(sign | U2(U2(U2(high[i]) << U2(7)) | U2(low[i] >> U1(1))))
            else:
                for i in range(n):
                    out[i] = U2(U2(low[i]) | U2(U2(high[i]) << U2(8)))
        elif size == 4:
            a, b = planes[:_PLANE], planes[_PLANE : 2 * _PLANE]
            c, d = planes[2 * _PLANE : 3 * _PLANE], planes[3 * _PLANE :]
            for i in range(n):
                low = U4(U4(a[i]) | U4(U4(b[i]) << U4(8)))
                v = U4(low | U4(U4(U4(c[i]) << U4(16)) | U4(U4(d[i]) << U4(24))))
                if rotation:
                    v = U4(U4(v >> U4(1)) | U4(v << U4(31)))
                out[i] = v
        else:
            for i in range(n):
                out[i] = planes[i]
            for k in range(1, size):
                plane = planes[k * _PLANE : (k + 1) * _PLANE]
                shift = one(8 * k)
                for i in range(n):
                    out[i] = one(out[i] | one(one(plane[i]) << shift))
            if rotation:
                for i in range(n):
                    out[i] = one(one(out[i] >> one(rotation)) | one(out[i] << one(top)))

    return take, put


@functools.cache
def _encoder(size, rotation, units):
    word = np.dtype(f"u{size}").type
    take, _ = _elements(size, rotation)
    first, last = units[0], units[-1]
    n_first = sum(unit == first for unit in units) if first != last else 0
    planes = len(units)
    encode_block = encode_block_by(last == 8)
    counts_at = _PLANE + 16
    finding_at = counts_at + 8 * 1024
    sizes_at = finding_at + (FINDING_NBYTES + 63) // 64 * 64
    tables_at = sizes_at + 8 * RUNS
    encodings_at = (tables_at + planes * TABLE_NBYTES + 63) // 64 * 64
    coded_at = encodings_at + planes * ENCODING_NBYTES
    sample_at = (coded_at + BITS_NBYTES + 63) // 64 * 64
    tile_at = sample_at + size * SAMPLED
    tile_nbytes = planes * (TILE + TABLE_NBYTES + 16) + 64

    @part(nogil=True, rare=True)
    def sample_of(x, sample):
        """Copy the sample of a group's elements; gives their number."""
        data, n = view_as(x, np.uint8), 0
        for begin in range(0, x.size, 256):
            at = begin + sampled_at(begin)
            m = less(32, x.size - at)
            if m > 0:
                copy_bytes(sample, n * size, data, at * size, m * size)
                n += m
        return n

    @part(nogil=True)
    def count(x, k, plane, counts):
        for v in range(1024):
            counts[v] = 0
        for at in range(0, x.size, TILE):
            some = x[at : less(at + TILE, x.size)]
            take(some, k, plane)
            # Four tables: a count does not wait for the one before.
            whole = some.size // 4 * 4
            for i in range(0, whole, 4):
                counts[U8(plane[i])] += 1
                counts[U8(256) + U8(plane[i + 1])] += 1
                counts[U8(512) + U8(plane[i + 2])] += 1
                counts[U8(768) + U8(plane[i + 3])] += 1
            for i in range(whole, some.size):
                counts[U8(plane[i])] += 1
        for v in range(256):
            counts[v] += counts[256 + v] + counts[512 + v] + counts[768 + v]

    @cached(nogil=True)
    def encode_span(space, static_words, x, payload, offsets, coded, at):
        """Encode the groups `x` from byte `at` of `payload` on, as far as that goes.

        `offsets` and `coded` are those of the span, `static_words` the words before the payload.
        Gives where the last tile ends, and the keyed sum of the tiles.
        """
        plane = space[:_PLANE]
        counts = view_as(space[counts_at:finding_at], np.int64)
        finding = space[finding_at:sizes_at]
        sizes = view_as(space[sizes_at:tables_at], np.int64)
        bits = space[coded_at:sample_at]
        sampled = space[sample_at:tile_at]
        spare = space[tile_at:]
        total = U8(0)
        mask = 0
        for t in range((x.size + TILE - 1) // TILE):
            begin = t * TILE
            m = less(TILE, x.size - begin)
            tables_nbytes = 0
            if t % GROUP_TILES == 0:
                mask = 0
                group = x[begin : less(begin + GROUP, x.size)]
                sample = group
                if group.size > SAMPLED:
                    n_sampled = sample_of(group, sampled)
                    sample = read_only(view_as(sampled, word)[:n_sampled])
                for k in range(planes):
                    count(sample, k, plane, counts)
                    table = space[tables_at + tables_nbytes :][:TABLE_NBYTES]
                    unit = first if k < n_first else last
                    if find_table(finding, counts, table, unit):
                        encoding_of(table, space[encodings_at + k * ENCODING_NBYTES :], unit)
                        mask |= 1 << k
                        tables_nbytes += TABLE_NBYTES
                coded[t // GROUP_TILES] = mask
            direct = at + tile_nbytes <= payload.size
            out = payload[at : at + tile_nbytes] if direct else spare
            copy_bytes(out, 0, space, tables_at, tables_nbytes)
            end = I8(tables_nbytes)
            elements = x[begin : begin + m]
            for k in range(planes):
                if mask >> k & 1 == 0:
                    padded = (m + STEP - 1) // STEP * STEP
                    stored = out[end : end + padded]
                    take(elements, k, stored)
                    fill_bytes(stored, m, padded - m, U1(0))
                    end += padded
            for k in range(planes):
                if mask >> k & 1:
                    take(elements, k, plane)
                    fill_bytes(plane, m, 8, plane[m - 1])
                    encoding = space[encodings_at + k * ENCODING_NBYTES :]
                    unit = first if k < n_first else last
                    end = encode_block(encoding, sizes, bits, unit, plane, m, out, end)
            gap = -end & (STEP - 1)
            fill_bytes(out, end, gap, U1(0))
            end += gap
            offsets[t] = at // STEP
            if not direct:
                fits = less(end, payload.size - at)
                if fits > 0:
                    copy_bytes(payload, at, spare, 0, fits)
            words = view_as(read_only(out[:end]), np.uint32)
            total = add_words(total, words, static_words + at // 4)
            at += end
        return at, total

    return with_scratch(encode_span, tile_at + tile_nbytes)


@functools.cache
def _decoder(size, rotation, units):
    _, put = _elements(size, rotation)
    first, last = units[0], units[-1]
    n_first = sum(unit == first for unit in units) if first != last else 0
    planes = len(units)
    decode_block = decode_block_by(last == 8)
    ends_at = planes * _PLANE
    decodings_at = (ends_at + 16 * RUNS + 63) // 64 * 64

    @cached(nogil=True)
    def decode_span(
        space, payload, offsets, coded, static_words, nelem, summed, out, first_tile, last_tile
    ):
        """Decode tiles `first_tile` to `last_tile`, whose offsets are checked, to `out`.

        Gives an index into `_PROBLEMS` and, if `summed`, the keyed sum of the tiles.
        """
        ends = view_as(space[ends_at : ends_at + 16 * RUNS], np.int64)
        total = U8(0)
        group, mask, tables_nbytes = -1, I8(0), 0
        limit = payload.size - STEP
        for t in range(first_tile, last_tile):
            at = I8(offsets[t]) * STEP
            stop = limit
            if t + 1 < offsets.size:
                stop = I8(offsets[t + 1]) * STEP
            if summed:
                words = view_as(payload[at:stop], np.uint32)
                total = add_words(total, words, static_words + at // 4)
            if t // GROUP_TILES != group:
                group = t // GROUP_TILES
                mask, tables_nbytes = I8(coded[group]), 0
                if mask >> planes != 0:
                    return 1, total
                table_at = I8(offsets[group * GROUP_TILES]) * STEP
                for k in range(planes):
                    if mask >> k & 1:
                        if table_at + TABLE_NBYTES > limit:
                            return 1, total
                        table = payload[table_at : table_at + TABLE_NBYTES]
                        if not is_good(table):
                            return 1, total
                        unit = first if k < n_first else last
                        decoding_of(table, space[decodings_at + k * DECODING_NBYTES :], unit)
                        table_at += TABLE_NBYTES
                        tables_nbytes += TABLE_NBYTES
            if t % GROUP_TILES == 0:
                at += tables_nbytes
            m = less(TILE, nelem - t * TILE)
            padded = (m + STEP - 1) // STEP * STEP
            rest = U1(0)
            for k in range(planes):
                if mask >> k & 1 == 0:
                    if at + padded > stop:
                        return 2, total
                    copy_bytes(space, k * _PLANE, payload, at, m)
                    for i in range(at + m, at + padded):
                        rest |= payload[i]
                    at += padded
            for k in range(planes):
                if mask >> k & 1:
                    plane = space[k * _PLANE : (k + 1) * _PLANE]
                    decoding = space[decodings_at + k * DECODING_NBYTES :]
                    unit = first if k < n_first else last
                    at = decode_block(decoding, ends, unit, payload, at, stop, plane, m)
                    if at < 0:
                        return 2, total
            for i in range(at, stop if stop - at < STEP else at):
                rest |= payload[i]
            if rest != 0 or (at + STEP - 1) // STEP * STEP != stop:
                return 2, total
            to = (t - first_tile) * TILE
            put(space[:ends_at], out[to : to + m])
        return 0, total

    return with_scratch(decode_span, decodings_at + planes * DECODING_NBYTES)


def _kernels(dtype: DType) -> tuple[int, int, tuple[int, ...]]:
    planes = planes_of(dtype)
    return dtype.itemsize, planes.rotation, planes.units


class _Span:
    """Groups that are encoded one after the other, and where."""

    def __init__(self, encode: Callable[..., Any], chunk: Chunk, start: int, stop: int) -> None:
        offsets, coded = index_of(chunk)
        self._encode = encode
        self._words = chunk.static.size // 4
        self.offsets = offsets[start // TILE : -(-stop // TILE)]
        self._coded = coded[start // GROUP : -(-stop // GROUP)]
        self.payload = chunk.dynamic
        if start > 0:
            size = chunk.dtype.itemsize
            tiles = -(-(stop - start) // TILE)
            bound = (stop - start + 16 * tiles) * size + tiles * size * TABLE_NBYTES
            self.payload = np.empty(bound, np.uint8)
        self.end = self.total = 0

    def encode(self, x: Bits, at: int) -> None:
        """See `Encoder`; `x` is all of the span."""
        target = self.payload, self.offsets, self._coded
        self.end, total = self._encode(self._words, x, *target, 0)
        self.total = int(total)


def encoder(spec: Huffman, chunk: Chunk, given: Given) -> Encoder | None:
    """What encodes a chunk. Spans but the first are copied behind those before them.

    None without elements: tables come first.
    """
    if given.bits is None:
        return None
    encode_span = _encoder(*_kernels(chunk.dtype))
    made: list[_Span] = []

    def span(start: int, stop: int) -> Callable[[Bits, int], None]:
        made.append(_Span(encode_span, chunk, start, stop))
        return made[-1].encode

    def finish(results: list[None]) -> ChunkResult:
        if not chunk.nelem:
            return ChunkResult(0)
        at = made[0].end
        for one in made[1:]:
            one.offsets += np.uint32(at // STEP)
            target = chunk.dynamic[at : at + one.end]
            target[:] = one.payload[: target.size]
            at += one.end
        slot = chunk.dynamic[at : at + STEP]
        slot[:] = 0
        if len(made) > 1 or at + STEP > chunk.dynamic.size:
            return ChunkResult(at + STEP)
        total = made[0].total + _of_index(chunk)
        return ChunkResult(at + STEP, total & MASK64)

    return Encoder(span, GROUP, finish)


def _of_index(chunk: Chunk) -> int:
    """The keyed sum of a chunk's index and of the zeros behind it."""
    return words_sum(chunk.static)


def _nothing(out: Bits, start: int) -> None:
    pass


def decoder(spec: Huffman, chunk: Chunk, start: int, stop: int, summed: bool = False) -> Decoder:
    """What decodes elements `start` to `stop` of a chunk."""
    nelem, dynamic = chunk.nelem, chunk.dynamic
    if nelem == 0 or start == stop:
        size = dynamic.size if nelem == 0 else 0
        problem = f"{size} bytes of payload in an empty chunk" if size else None
        return Decoder(_nothing, problem=problem)
    offsets, coded = index_of(chunk)
    problem = index_problem(offsets, dynamic, start // TILE, -(-stop // TILE))
    decode_span = _decoder(*_kernels(chunk.dtype))
    words = chunk.static.size // 4
    index = as_read_only(offsets), as_read_only(coded)
    payload: Bytes = as_read_only(dynamic)
    totals: list[int | None] = []

    def decode(out: Bits, at: int) -> int:
        tiles = at // TILE, -(-(at + out.size) // TILE)
        found, total = decode_span(payload, *index, words, nelem, summed, out, *tiles)
        totals.append(None if found else int(total))
        return int(found)

    def chunk_sum() -> int:
        if None in totals:
            # Damage ended a kernel before it had summed up all.
            return (_of_index(chunk) + words_sum(dynamic, words)) & MASK64
        return (sum(filter(None, totals)) + _of_index(chunk)) & MASK64

    decode_any = by_tiles(decode, TILE, nelem)
    return Decoder(decode_any, TILE, _PROBLEMS, problem, chunk_sum if summed else None)


encode_chunk = encode_by(encoder)
decode_chunk = decode_by(decoder)


def buffer_encoder(plan: Plan) -> Callable[..., tuple[int, int | None]]:
    """See `zipccl_cpu.buffer_encoder`."""
    encode_span = _encoder(*_kernels(plan.dtype))
    start, coded_at, coded_end, end = _index_in(plan)
    slot_end = end + plan.dynamic_stride

    def encode(out: Bytes, bits: Bits, stats: Any, key: Any) -> tuple[int, int | None]:
        slot, static = out[end:slot_end], out[start:end]
        index = out[start:coded_at].view(np.uint32), out[coded_at:coded_end]
        at, total = encode_span(static.size // 4, as_read_only(bits), slot, *index, 0)
        slot[at : at + STEP] = 0
        at += STEP
        fits = at <= slot.size
        return at, (int(total) + words_sum(static)) & MASK64 if fits else None

    return encode


def buffer_decoder(plan: Plan, gaps: Bits) -> Callable[[Bytes, Bits, int], int | None] | None:
    """See `zipccl_cpu.buffer_decoder`."""
    if plan.chunks != 1 or not plan.nelem:
        return None
    decode_span = _decoder(*_kernels(plan.dtype))
    start, coded_at, coded_end, end = _index_in(plan)
    nelem, tiles = plan.nelem, tile_count(plan.nelem)
    zeros = [slice(*gap) for gap in gaps.tolist()]

    def decode(data: Bytes, out: Bits, dynamic_nbytes: int) -> int | None:
        data = as_read_only(data)
        behind = end + dynamic_nbytes
        dynamic, static = data[end:behind], data[start:end]
        index = data[start:coded_at].view(np.uint32), data[coded_at:coded_end]
        if index_problem(index[0], dynamic, 0, tiles) is not None:
            return None
        if any(data[gap].tobytes().strip(b"\0") for gap in (*zeros, slice(behind, None))):
            return None
        words = static.size // 4
        problem, total = decode_span(dynamic, *index, words, nelem, True, out, 0, tiles)
        return None if problem else (int(total) + words_sum(static)) & MASK64

    return decode


def _index_in(plan: Plan) -> tuple[int, int, int, int]:
    """Where in buffers of one chunk the index, its second array, its end and the payload start."""
    start, n = plan.static_offset, plan.nelem
    coded_at = start + 4 * tile_count(n)
    return start, coded_at, coded_at + group_count(n), plan.dynamic_offset
