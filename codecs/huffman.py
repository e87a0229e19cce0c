"""huffman: entropy coding of byte planes, by canonical Huffman codes. specs/huffman.md.

Elements are split into bytes, after floats are rotated so that their exponent fills one. Planes of
bytes that are worth it are coded, a table for each group of tiles; the others are stored. This
module holds layout, constants and the NumPy reference.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from ..formats.codec_ids import CODEC_IDS
from ..formats.dtypes import DTYPES, DType
from ..formats.header import SECTION_KINDS, Section, align
from .common.base import Bits, Bytes, Chunk, ChunkDecoded, ChunkResult, CodecSpec, Key, Layout
from .common.huffman import (
    TABLE_NBYTES,
    TILE,
    WORK_NBYTES,
    Table,
    counts_of,
    decode_block,
    encode_block,
    pack_table,
    table_of,
    unpack_table,
)
from .common.sections import Array

#: Tiles that share tables, and their elements.
GROUP_TILES = 8
GROUP = GROUP_TILES * TILE
#: Units in which offsets count, and zeros at the end of the dynamic part, in bytes.
STEP = 8


class Planes(NamedTuple):
    """How elements of a dtype are split into bytes.

    Attributes:
        rotation: Bits by which an element is rotated to the left first.
        units: Bytes of the units of each plane, of the lowest bytes first.
    """

    rotation: int
    units: tuple[int, ...]


@functools.cache
def planes_of(dtype: DType) -> Planes:
    """The `Planes` of a dtype of 1 to 8 bytes."""
    size = dtype.itemsize
    if dtype.name == "bool":
        return Planes(0, (8,))
    if dtype.exponent >= 8:
        return Planes(1, (*[1] * (size - 1), 2))
    return Planes(0, tuple(1 if k < 2 else 2 for k in range(size)))


@dataclass(frozen=True)
class Huffman(CodecSpec):
    """huffman: entropy coding of exponents and other bytes with few likely values.

    Lossless. Takes all dtypes of up to 8 bytes but complex numbers. No parameters, no statistics.

    Size: sign and mantissa, and the entropy of the exponents and up to 0.05 bits, per element: 10.6
    of 16 bits for weights in bfloat16. Bytes that are all alike take none. A chunk that does not
    shrink is stored raw.

    Source: Huffman (Proceedings of the IRE, 1952), with canonical codes (Schwartz and Kallick,
    CACM 1964) of limited length, of pairs of exponents.
    """

    name: ClassVar[str] = "huffman"
    id: ClassVar[int] = CODEC_IDS["huffman"][0]
    dtypes: ClassVar[tuple[str, ...]] = tuple(d.name for d in DTYPES if "complex" not in d.name)
    #: Offsets are uint32.
    max_nelem: ClassVar[int] = (1 << 31) - 1
    raw_fallback: ClassVar[bool] = True
    weighs_gaps: ClassVar[bool] = True

    def arrays(self, dtype: DType, nelem: int) -> tuple[Array, ...]:
        """Offsets of tiles; for each group the planes that are coded."""
        return (
            Array("index", 32, tile_count(nelem)),
            Array("index", 8, group_count(nelem)),
        )

    def layout(self, dtype: DType, nelem: int) -> Layout:
        """The index, and the dynamic payload."""
        static = super().layout(dtype, nelem).sections
        bound = max(0, nelem * dtype.itemsize - sum(s.nbytes for s in static))
        payload = Section(SECTION_KINDS["payload"], align(bound), dynamic=True)
        return Layout((*static, payload), dynamic_bound=bound)

    def scratch_nbytes(self, dtype: DType, nelem: int, chunks: int) -> int:
        """Of the GPU backend: sums of chunks, of each plane of groups a table's entries, and sizes
        of groups and tiles.
        """
        groups = max(group_count(nelem), 1) * chunks
        entries = groups * dtype.itemsize * WORK_NBYTES
        return align(8 * chunks) + entries + align(4 * (1 + GROUP_TILES) * groups)


SPEC = Huffman


def tile_count(nelem: int) -> int:
    """Tiles of a chunk of `nelem` elements."""
    return -(-nelem // TILE)


def group_count(nelem: int) -> int:
    """Groups of tiles of a chunk of `nelem` elements."""
    return -(-nelem // GROUP)


def split(bits: Bits, dtype: DType) -> Bytes:
    """Byte planes of elements, shape (planes, elements)."""
    rotation, size = planes_of(dtype).rotation, dtype.itemsize
    if rotation:
        one = bits.dtype.type
        bits = bits << one(rotation) | bits >> one(8 * size - rotation)
    return np.ascontiguousarray(bits.astype(f"<u{size}").view(np.uint8).reshape(-1, size).T)


def join(planes: Bytes, dtype: DType) -> Bits:
    """Inverse of `split`."""
    rotation, size = planes_of(dtype).rotation, dtype.itemsize
    bits = np.ascontiguousarray(planes.T).view(f"<u{size}").reshape(-1).astype(dtype.bits)
    if rotation:
        one = bits.dtype.type
        bits = bits >> one(rotation) | bits << one(8 * size - rotation)
    return bits


def index_of(chunk: Chunk) -> tuple[npt.NDArray[np.uint32], Bytes]:
    """A chunk's offsets of tiles, and coded planes of groups."""
    offsets, coded = Huffman().static_arrays(chunk)
    return offsets.view("<u4"), coded


def _stored(plane: Bytes) -> Bytes:
    return np.append(plane, np.zeros(-plane.size % STEP, np.uint8))


def encode_group(bits: Bits, dtype: DType) -> tuple[int, Bytes, list[Bytes]]:
    """(coded planes, a bit each; tables; tiles) of the elements of a group."""
    units = planes_of(dtype).units
    planes = split(bits, dtype)
    tables = [table_of(counts_of(p), unit) for p, unit in zip(planes, units, strict=True)]
    packed = [pack_table(table) for table in tables if table is not None]
    tiles = []
    for at in range(0, bits.size, TILE):
        parts = [_stored(planes[k, at : at + TILE]) for k, t in enumerate(tables) if t is None]
        for k, table in enumerate(tables):
            if table is not None:
                parts.append(encode_block(table, units[k], planes[k, at : at + TILE]))
        tiles.append(_stored(np.concatenate(parts)))
    coded = sum(1 << k for k, table in enumerate(tables) if table is not None)
    return coded, np.concatenate([np.zeros(0, np.uint8), *packed]), tiles


def encode_chunk(
    spec: Huffman,
    chunk: Chunk,
    bits: Bits,
    *,
    stats: npt.NDArray[Any] | None = None,
    key: Key | None = None,
    threads: int = 1,
) -> ChunkResult:
    """Encode the chunk's elements `bits` (1-D) into its static part and its dynamic slot."""
    if not bits.size:
        return ChunkResult(0)
    offsets, coded = index_of(chunk)
    at = 0
    for g in range(coded.size):
        coded[g], tables, tiles = encode_group(bits[g * GROUP : (g + 1) * GROUP], chunk.dtype)
        for k, tile in enumerate(tiles):
            offsets[g * GROUP_TILES + k] = at // STEP
            data = np.concatenate((tables, tile)) if k == 0 else tile
            slot = chunk.dynamic[at : at + data.size]
            slot[:] = data[: slot.size]
            at += data.size
    slot = chunk.dynamic[at : at + STEP]
    slot[:] = 0
    return ChunkResult(at + STEP)


def index_problem(offsets: Bits, dynamic: Bytes, first: int, last: int) -> str | None:
    """What is wrong with the dynamic part as a whole, or with where tiles `first` to `last` are.

    `last` is past the end, and more than `first`.
    """
    if dynamic.size % STEP or dynamic.size < STEP or any(dynamic[-STEP:].tolist()):
        return f"{dynamic.size} bytes that do not end with {STEP} zeros"
    end = dynamic.size // STEP - 1
    # Lists, as there are often few: NumPy takes longer.
    ends = [*offsets[first : last + 1].tolist(), end]
    if (first == 0 and ends[0]) or sorted(ends) != ends:
        return "offsets of tiles out of range"
    return None


def tables_of(data: Bytes, coded: int, planes: int) -> list[Table | None] | None:
    """Tables of a group from its first bytes, None for a plane that is stored.

    None if a table is wrong, or there are too few bytes, or too many planes.
    """
    if coded >> planes or data.size < coded.bit_count() * TABLE_NBYTES:
        return None
    found: list[Table | None] = [None] * planes
    at = 0
    for k in range(planes):
        if coded >> k & 1:
            found[k] = unpack_table(data[at : at + TABLE_NBYTES])
            at += TABLE_NBYTES
            if found[k] is None:
                return None
    return found


def decode_tile(data: Bytes, dtype: DType, tables: list[Table | None], n: int) -> Bits | None:
    """The `n` elements of a tile, None unless it is exactly `data`."""
    units = planes_of(dtype).units
    planes = np.empty((len(units), n), np.uint8)
    at, padded = 0, -(-n // STEP) * STEP
    for k, table in enumerate(tables):
        if table is None:
            plane = data[at : at + padded]
            if plane.size < padded or plane[n:].any():
                return None
            planes[k] = plane[:n]
            at += padded
    for k, table in enumerate(tables):
        if table is not None:
            nbytes = decode_block(table, units[k], data[at:], planes[k])
            if nbytes is None:
                return None
            at += nbytes
    if -(-at // STEP) * STEP != data.size or data[at:].any():
        return None
    return join(planes, dtype)


def decode_chunk(
    spec: Huffman, chunk: Chunk, out: Bits, start: int = 0, *, threads: int = 1
) -> ChunkDecoded:
    """Decode elements `start` to `start + out.size` of the chunk into `out` (1-D).

    Only the tiles that hold those elements, and the tables of their groups, are looked at.
    """
    nelem, dynamic = chunk.nelem, chunk.dynamic
    if nelem == 0:
        size = dynamic.size
        return ChunkDecoded(f"{size} bytes of payload in an empty chunk" if size else None)
    offsets, coded = index_of(chunk)
    stop = start + out.size
    first, last = start // TILE, -(-stop // TILE)
    problem = index_problem(offsets, dynamic, first, last)
    if problem is not None:
        return ChunkDecoded(problem)
    ends = np.append(offsets, dynamic.size // STEP - 1).astype(np.int64) * STEP
    planes = len(planes_of(chunk.dtype).units)
    tables: list[Table | None] | None = None
    group = -1
    for t in range(first, last):
        if t // GROUP_TILES != group:
            group = t // GROUP_TILES
            begin = int(ends[group * GROUP_TILES])
            tables = tables_of(dynamic[begin:-STEP], int(coded[group]), planes)
            if tables is None:
                return ChunkDecoded(f"tables of group {group}")
        assert tables is not None
        begin, end = int(ends[t]), int(ends[t + 1])
        if t % GROUP_TILES == 0:
            begin += int(coded[group]).bit_count() * TABLE_NBYTES
        n = min(TILE, nelem - t * TILE)
        values = decode_tile(dynamic[begin:end], chunk.dtype, tables, n)
        if values is None:
            return ChunkDecoded(f"tile {t}")
        lo, hi = max(start - t * TILE, 0), min(stop - t * TILE, n)
        out[t * TILE + lo - start : t * TILE + hi - start] = values[lo:hi]
    return ChunkDecoded()
