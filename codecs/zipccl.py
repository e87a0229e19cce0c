"""zipccl: lossless coding of floats by a window of seven exponents. specs/zipccl.md.

After ZipCCL, sections 4 and 4.1: sign and mantissa are stored as they are. The exponent becomes a
3-bit code where it is in the window, and is stored in full, as an escape, where it is not. Not in
the paper: each tile has its own window. This module holds layout, constants and the NumPy
reference.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from ..formats.codec_ids import CODEC_IDS
from ..formats.dtypes import DTYPES, DType
from ..formats.errors import FormatError
from ..formats.header import SECTION_KINDS, Section, align
from .common.base import Bits, Bytes, Chunk, ChunkDecoded, ChunkResult, CodecSpec, Key, Layout
from .common.sections import Array

ROWS = 8
COLUMNS = 512
TILE = ROWS * COLUMNS
CODE_BITS = 3
WINDOW = 7
#: Columns of a partial tile come in multiples of this, so that its parts stay 128-byte aligned.
COLUMN_STEP = 16

#: Bit of an index entry: code `base & 7` stands for exponent 0 instead of the base itself.
ZERO_MODE = 1 << 15
#: Windows that the choice per tile looks at.
CANDIDATES = 16

WINDOWS = ("tile", "sigma", "histogram")
_EXPLICIT = 3
_PARAMS = struct.Struct("<BBHI")
#: sqrt(28 ln 2 / 16383): 2 ** (the paper's constant -5.3607 + 1/2), see `sigma_base`.
SIGMA_FACTOR = float.fromhex("0x1.19f55702c6141p-5")

#: Elements of a whole tile whose exponents choose its window: one group of 16 in every 128.
SAMPLE = np.flatnonzero((np.arange(TILE) >> 4) % 8 == (np.arange(TILE) >> 7) % 8)

_BATCH = 64


class Fields(NamedTuple):
    """How one dtype's bits are shared out.

    `streams` are the byte widths of the sign-and-mantissa streams, low bits first, `extra` the
    number of its top bits that are stored as planes, `width` the bytes of an escape.
    """

    exponent: int
    mantissa: int
    streams: tuple[int, ...]
    extra: int
    width: int

    @property
    def planes(self) -> int:
        """Bit planes per tile."""
        return CODE_BITS + self.extra

    @property
    def max_base(self) -> int:
        """Largest base whose window holds no exponent beyond the field."""
        return (1 << self.exponent) - WINDOW

    @property
    def escape_dtype(self) -> np.dtype[Any]:
        """Unsigned dtype of an escape."""
        return np.dtype(f"<u{self.width}")

    def block_nbytes(self, columns: int) -> int:
        """Bytes of a tile of `columns` columns in the tiles section."""
        return columns * (ROWS * sum(self.streams) + self.planes)


@functools.cache
def fields_of(dtype: DType) -> Fields:
    """The `Fields` of a float dtype."""
    low_bytes, extra = divmod(1 + dtype.mantissa, 8)
    streams = tuple(w for w in (4, 2, 1) if low_bytes & w)
    return Fields(dtype.exponent, dtype.mantissa, streams, extra, 1 if dtype.exponent <= 8 else 2)


def tail_columns(nelem: int) -> int:
    """Columns of the partial tile at the end of a chunk of `nelem` elements; 0 if there is none."""
    return -(-(nelem % TILE) // (ROWS * COLUMN_STEP)) * COLUMN_STEP


def tile_count(nelem: int) -> int:
    """Tiles of a chunk of `nelem` elements."""
    return -(-nelem // TILE)


def tiles_nbytes(f: Fields, nelem: int) -> int:
    """Bytes of a chunk's tile blocks."""
    return nelem // TILE * f.block_nbytes(COLUMNS) + f.block_nbytes(tail_columns(nelem))


class ScratchLayout(NamedTuple):
    """Workspace of the GPU backend: checksum terms, then these offsets, in bytes.

    `shift` is log2 of the tiles in a group, `groups` counts them per chunk. Escapes of a tile that
    do not fit `slot` bytes are listed a second time. What lies below `counts` starts as zeros.
    """

    shift: int
    groups: int
    slot: int
    totals: int
    counts: int
    slots: int
    nbytes: int


@functools.lru_cache(maxsize=1024)
def scratch_layout(dtype: DType, nelem: int, chunks: int) -> ScratchLayout:
    """The workspace for `chunks` chunks of `nelem` elements: about 1/40 of the tensor."""
    tiles = tile_count(nelem)
    shift = max(5, (tiles >> 13).bit_length())
    groups = -(-tiles // (1 << shift))
    # Normally distributed numbers have 87 to 99 escapes a tile, and 10 more or fewer.
    slot = 144 if dtype.itemsize == 1 else 192
    totals = align(8 * groups * chunks)
    counts = totals + align(4 * groups * chunks)
    slots = counts + align(2 * tiles * chunks)
    nbytes = slots + align(slot * tiles * chunks)
    return ScratchLayout(shift, groups, slot, totals, counts, slots, nbytes)


@dataclass(frozen=True)
class Zipccl(CodecSpec):
    """zipccl: lossless coding of floats by a window of seven exponents.

    Takes every float dtype, and float8 too; others are stored raw. No statistics with
    ``window="tile"``; otherwise ``stats`` is the base of the window, int32, shape ``(1,)``, which
    each rank may choose by itself.

    Size: sign, mantissa and 3 bits per element, about 0.01 bit of index, and the escapes: from 11
    of 16 bits for bfloat16, 27 of 32 for float32. A chunk that does not shrink is stored raw.

    Source: ZipCCL, section 4; the window "sigma" is section 4.1. A window per tile is an addition.

    Args:
        window: How the window of exponents is chosen. ``"tile"``: one for each tile of 8 x 512
            elements, the one that leaves the fewest escapes. ``"sigma"``: one for the tensor, from
            its standard deviation, as in the paper. ``"histogram"``: one for the tensor, with the
            fewest escapes. An integer from 0 to 2041: the biased exponent at which the window
            starts.

    Raises:
        TypeError: If the window is neither a string nor an integer.
        ValueError: If the window is unknown, or not within the exponents of the dtype.
    """

    window: str | int = "tile"

    name: ClassVar[str] = "zipccl"
    id: ClassVar[int] = CODEC_IDS["zipccl"][0]
    dtypes: ClassVar[tuple[str, ...]] = tuple(d.name for d in DTYPES if d.is_float)
    #: Escape offsets are uint32.
    max_nelem: ClassVar[int] = (1 << 32) - 1
    raw_fallback: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Raise TypeError or ValueError for an invalid window."""
        if isinstance(self.window, bool) or not isinstance(self.window, (str, int)):
            raise TypeError(f"window is {self.window!r}; allowed: {WINDOWS} or an integer base")
        if isinstance(self.window, str) and self.window not in WINDOWS:
            raise ValueError(f"window is {self.window!r}; allowed: {WINDOWS} or an integer base")
        if isinstance(self.window, int) and not 0 <= self.window <= (1 << 11) - WINDOW:
            raise ValueError(f"window base is {self.window}; allowed: 0 to {(1 << 11) - WINDOW}")

    def arrays(self, dtype: DType, nelem: int) -> tuple[Array, ...]:
        """Tile blocks; escape offsets and windows of tiles."""
        tiles = tile_count(nelem)
        return (
            Array("tiles", 8, tiles_nbytes(fields_of(dtype), nelem)),
            Array("index", 32, tiles),
            Array("index", 16, tiles),
        )

    def layout(self, dtype: DType, nelem: int) -> Layout:
        """The static sections, and the dynamic escapes."""
        static = super().layout(dtype, nelem).sections
        bound = max(0, nelem * dtype.itemsize - sum(s.nbytes for s in static))
        escapes = Section(SECTION_KINDS["escapes"], align(bound), dynamic=True)
        return Layout((*static, escapes), dynamic_bound=bound)

    def scratch_nbytes(self, dtype: DType, nelem: int, chunks: int) -> int:
        """Of the GPU backend: per group of tiles a sum and a count, per tile a count and a slot."""
        return scratch_layout(dtype, nelem, chunks).nbytes

    def accepts(self, dtype: DType, nelem: int) -> bool:
        """True for floats whose static part is smaller than their bytes."""
        if dtype.is_float and isinstance(self.window, int):
            allowed = fields_of(dtype).max_base
            if self.window > allowed:
                raise ValueError(
                    f"window base is {self.window}; {dtype.name} allows 0 to {allowed}"
                )
        return super().accepts(dtype, nelem)

    def pack_params(self) -> bytes:
        """Window kind, log2 of the tile size, explicit base."""
        if isinstance(self.window, int):
            return _PARAMS.pack(_EXPLICIT, TILE.bit_length() - 1, self.window, 0)
        return _PARAMS.pack(WINDOWS.index(self.window), TILE.bit_length() - 1, 0, 0)

    @classmethod
    def unpack_params(cls, data: bytes) -> Zipccl:
        """Inverse of `pack_params`."""
        if len(data) != _PARAMS.size:
            raise FormatError("bad_header", f"zipccl has 8 parameter bytes, found {len(data)}")
        kind, log2_tile, base, reserved = _PARAMS.unpack(data)
        explicit = kind == _EXPLICIT
        if kind > _EXPLICIT or log2_tile != TILE.bit_length() - 1 or reserved:
            raise FormatError("bad_header", f"zipccl parameters {data.hex()}")
        if base > ((1 << 11) - WINDOW if explicit else 0):
            raise FormatError("bad_header", f"zipccl parameters {data.hex()}")
        return cls(base if explicit else WINDOWS[kind])

    def measure(self, bits: Bits, dtype: DType) -> npt.NDArray[np.int32] | None:
        """The base of the whole tensor, shape (1,), or None for window="tile"."""
        if self.window == "tile" or not dtype.is_float:
            return None
        if isinstance(self.window, int):
            return np.array([self.window], np.int32)
        choose = sigma_base if self.window == "sigma" else histogram_base
        return np.array([choose(bits, dtype)], np.int32)

    def check_stats(self, stats: npt.NDArray[Any], dtype: DType) -> None:
        """Stats are one integer base, that of an explicit window if there is one."""
        largest = fields_of(dtype).max_base
        if stats.shape != (1,) or stats.dtype.kind not in "iu" or not 0 <= stats[0] <= largest:
            raise ValueError(f"stats are {stats!r}; allowed: one integer from 0 to {largest}")
        if isinstance(self.window, int) and stats[0] != self.window:
            raise ValueError(f"stats are {stats!r}; the window is {self.window}")
        if self.window == "tile":
            raise ValueError('window="tile" takes no stats')


SPEC = Zipccl


def split(bits: Bits, f: Fields) -> tuple[Bits, Bits]:
    """Exponent fields, and sign-and-mantissa values of 1 + mantissa bits (sign on top)."""
    one = bits.dtype.type
    total = 8 * bits.dtype.itemsize
    exponents = (bits >> one(f.mantissa)) & one((1 << f.exponent) - 1)
    rest = bits & one((1 << f.mantissa) - 1)
    return exponents, rest | (bits >> one(total - 1)) << one(f.mantissa)


def join(exponents: Bits, rest: Bits, f: Fields, bits_dtype: np.dtype[Any]) -> Bits:
    """Inverse of `split`."""
    one = bits_dtype.type
    total = 8 * bits_dtype.itemsize
    sign = (rest >> one(f.mantissa)) << one(total - 1)
    mantissa = rest & one((1 << f.mantissa) - 1)
    joined: Bits = sign | exponents.astype(bits_dtype) << one(f.mantissa) | mantissa
    return joined


def tile_window(sample: Bits) -> int:
    """Index entry (base, zero-mode bit) of a tile from the exponents of its sample.

    Of the windows that end at one of the 16 largest exponents in the sample, the one that codes
    most of it, the highest at a tie; specs/zipccl.md, "Window of a tile".
    """
    counts = np.bincount(sample.astype(np.int64))
    zeros = int(counts[0])
    best, entry = -1, 0
    for top in np.flatnonzero(counts)[: -CANDIDATES - 1 : -1].tolist():
        base = max(top - WINDOW + 1, 0)
        coded = int(counts[base : base + WINDOW].sum())
        gain = zeros - int(counts[base]) if base > 0 else 0
        if coded + max(gain, 0) > best:
            best, entry = coded + max(gain, 0), base | (ZERO_MODE if gain > 0 else 0)
    return entry


def histogram_base(bits: Bits, dtype: DType) -> int:
    """The lowest base whose window holds the most elements."""
    f = fields_of(dtype)
    counts = np.zeros(1 << f.exponent, np.int64)
    for start in range(0, bits.size, 1 << 20):
        exponents, _ = split(bits[start : start + (1 << 20)], f)
        counts += np.bincount(exponents.astype(np.int64), minlength=counts.size)
    return best_base(counts)


def best_base(counts: npt.NDArray[np.int64]) -> int:
    """The lowest base whose window holds the most of a histogram over all exponents."""
    held = np.convolve(counts, np.ones(WINDOW, np.int64), "valid")
    return int(held.argmax())


def sigma_base(bits: Bits, dtype: DType) -> int:
    """`round(log2(sigma) - 5.3607)` of ZipCCL equation 5, in integers and fixed-order float64.

    Sums are exact per exponent (top 8 bits of the significand), so that no order of summation
    changes the choice. Infinities and NaNs are left out.
    """
    f = fields_of(dtype)
    n_exponents = 1 << f.exponent
    count = 0
    first = np.zeros(n_exponents, np.int64)
    second = np.zeros(n_exponents, np.int64)
    for start in range(0, bits.size, 1 << 20):
        exponents, rest = split(bits[start : start + (1 << 20)], f)
        e = exponents.astype(np.int64)
        mantissa = (rest & rest.dtype.type((1 << f.mantissa) - 1)).astype(np.int64)
        significand = mantissa | np.where(e > 0, 1 << f.mantissa, 0)
        shift = f.mantissa - 7
        significand = significand >> shift if shift >= 0 else significand << -shift
        signed = np.where(rest >> rest.dtype.type(f.mantissa) != 0, -significand, significand)
        finite = e < n_exponents - 1
        count += int(np.count_nonzero(finite))
        e = np.maximum(e, 1)[finite]
        np.add.at(first, e, signed[finite])
        np.add.at(second, e, significand[finite] ** 2)
    present = np.flatnonzero(second)
    if not present.size:
        return 0
    largest = int(present[-1])
    sum1 = sum2 = 0.0
    for e in present[::-1].tolist():
        sum1 += math.ldexp(float(first[e]), e - largest)
        sum2 += math.ldexp(float(second[e]), 2 * (e - largest))
    mean = sum1 / count
    variance = sum2 / count - mean * mean
    if variance <= 0.0:
        base = largest - WINDOW + 1
    else:
        _, power = math.frexp(math.sqrt(variance) * SIGMA_FACTOR)
        base = largest - 7 + power - 1
    return min(max(base, 0), f.max_base)


def encode_chunk(
    spec: Zipccl,
    chunk: Chunk,
    bits: Bits,
    *,
    stats: npt.NDArray[Any] | None = None,
    key: Key | None = None,
    threads: int = 1,
) -> ChunkResult:
    """Encode the chunk's elements `bits` (1-D) into its static part and its dynamic slot."""
    f = fields_of(chunk.dtype)
    tiles, offsets, entries = static_views(chunk)
    dynamic = chunk.dynamic
    escapes_at = 0
    for first, columns, batch in _runs(bits.size, 0, offsets.size):
        n_valid = min(bits.size - first * TILE, batch * ROWS * columns)
        values = np.zeros(batch * ROWS * columns, bits.dtype)
        values[:n_valid] = bits[first * TILE :][:n_valid]
        valid = (np.arange(values.size) < n_valid).reshape(batch, ROWS, columns)
        fields, rest = split(values.reshape(valid.shape), f)
        exponents = fields.astype(np.int64)
        here = entries[first : first + batch]
        if stats is not None:
            here[:] = stats[0]
        else:
            whole = first < bits.size // TILE
            for i, tile in enumerate(exponents.reshape(batch, -1)):
                here[i] = tile_window(tile[SAMPLE] if whole else tile[:n_valid])
        base, zero_mode = window_of(here)
        exponents = np.where(valid, exponents, base + (WINDOW - 1))
        block = tiles[first * f.block_nbytes(COLUMNS) :][: batch * f.block_nbytes(columns)]
        block = block.reshape(batch, -1)
        at = 0
        for width in f.streams:
            stream = rest.astype(f"<u{width}")
            rest = rest >> rest.dtype.type(8 * width) if width < rest.itemsize else rest
            nbytes = ROWS * columns * width
            block[:, at : at + nbytes] = stream.reshape(batch, -1).view(np.uint8)
            at += nbytes
        inside = (exponents >= base + zero_mode) & (exponents < base + WINDOW)
        as_zero = zero_mode & (exponents == 0)
        escaped = ~(inside | as_zero)
        codes = np.where(escaped, base + WINDOW, np.where(as_zero, base, exponents))
        for source, n_bits in ((codes, CODE_BITS), (rest, f.extra)):
            for k in range(n_bits):
                plane = (source >> source.dtype.type(k) & source.dtype.type(1)).astype(np.uint8)
                packed = np.packbits(plane, axis=1, bitorder="little")
                block[:, at : at + columns] = packed.reshape(batch, -1)
                at += columns
        counts = escaped.sum(axis=(1, 2), dtype=np.int64)
        starts = escapes_at + np.concatenate(([0], counts.cumsum()))
        offsets[first : first + batch] = starts[:-1] & 0xFFFFFFFF
        by_column = exponents.transpose(0, 2, 1)[escaped.transpose(0, 2, 1)]
        found = by_column.astype(f.escape_dtype).view(np.uint8)
        slot = dynamic[escapes_at * f.width :][: found.size]
        slot[:] = found[: slot.size]
        escapes_at = int(starts[-1])
    return ChunkResult(escapes_at * f.width)


def decode_chunk(
    spec: Zipccl, chunk: Chunk, out: Bits, start: int = 0, *, threads: int = 1
) -> ChunkDecoded:
    """Decode elements `start` to `start + out.size` of the chunk into `out` (1-D).

    Only the tiles that hold those elements are looked at.
    """
    dtype, nelem, dynamic = chunk.dtype, chunk.nelem, chunk.dynamic
    f = fields_of(dtype)
    tiles, offsets, entries = static_views(chunk)
    total = dynamic.size // f.width
    if nelem == 0:
        return ChunkDecoded(f"{dynamic.size} bytes of escapes in an empty chunk" if total else None)
    if dynamic.size % f.width:
        return ChunkDecoded(f"{dynamic.size} bytes of escapes of {f.width} bytes each")
    ends = np.append(offsets[1:], np.uint32(total)).astype(np.int64)
    begins = offsets.astype(np.int64)
    stop = start + out.size
    here = slice(start // TILE, -(-stop // TILE))
    if (
        (here.start == 0 and begins[0] != 0)
        or (begins[here] > ends[here]).any()
        or (ends[here] > total).any()
        or (entries[here] & (ZERO_MODE - 1) > f.max_base).any()
        or (entries[here] == ZERO_MODE).any()
    ):
        return ChunkDecoded("escape offsets or windows out of range")
    if not entries_fit(spec, entries, here):
        return ChunkDecoded("windows that differ in a tensor with one window")
    escapes = dynamic.view(f.escape_dtype)
    for first, columns, batch in _runs(nelem, here.start, here.stop):
        block = tiles[first * f.block_nbytes(COLUMNS) :][: batch * f.block_nbytes(columns)]
        block = block.reshape(batch, -1)
        rest = np.zeros((batch, ROWS, columns), dtype.bits)
        at = shift = 0
        for width in f.streams:
            nbytes = ROWS * columns * width
            stream = np.ascontiguousarray(block[:, at : at + nbytes]).view(f"<u{width}")
            rest |= stream.reshape(rest.shape).astype(dtype.bits) << dtype.bits.type(shift)
            at += nbytes
            shift += 8 * width
        codes = np.zeros(rest.shape, np.int64)
        for target, low, n_bits in ((codes, 0, CODE_BITS), (rest, shift, f.extra)):
            one = target.dtype.type
            for k in range(n_bits):
                packed = block[:, None, at : at + columns]
                plane = np.unpackbits(packed, axis=1, count=ROWS, bitorder="little")
                target |= plane.astype(target.dtype) << one(low + k)
                at += columns
        base, zero_mode = window_of(entries[first : first + batch])
        distance = (codes - base) & 7
        exponents = np.where(zero_mode & (distance == 0), 0, base + distance)
        escaped = distance == WINDOW
        lo, hi = int(begins[first]), int(ends[first + batch - 1])
        counts = escaped.sum(axis=(1, 2), dtype=np.int64)
        if (counts != ends[first : first + batch] - begins[first : first + batch]).any():
            return ChunkDecoded(f"escape count of a tile in {first}..{first + batch - 1}")
        found = escapes[lo:hi].astype(np.int64)
        lowest = np.repeat(base.ravel() + zero_mode.ravel(), counts)
        inside = (found >= lowest) & (found < np.repeat(base.ravel(), counts) + WINDOW)
        inside |= np.repeat(zero_mode.ravel(), counts) & (found == 0)
        if inside.any() or (found >= 1 << f.exponent).any():
            return ChunkDecoded(f"an escaped exponent of tiles {first}..{first + batch - 1}")
        exponents.transpose(0, 2, 1)[escaped.transpose(0, 2, 1)] = found
        values = join(exponents, rest, f, dtype.bits).reshape(-1)
        n_valid = min(nelem - first * TILE, values.size)
        padding = int(base[-1, 0, 0] + WINDOW - 1) << f.mantissa
        if (values[n_valid:] != padding).any():
            return ChunkDecoded("padding elements of the last tile")
        lo, hi = max(start - first * TILE, 0), min(stop - first * TILE, n_valid)
        at = first * TILE + lo - start
        out[at : at + hi - lo] = values[lo:hi]
    return ChunkDecoded()


def _runs(nelem: int, first: int, last: int) -> Iterator[tuple[int, int, int]]:
    """(first tile, columns, number of tiles) of batches that cover tiles `first` to `last`."""
    full = nelem // TILE
    for at in range(first, min(last, full), _BATCH):
        yield at, COLUMNS, min(_BATCH, min(last, full) - at)
    if last > full:
        yield full, tail_columns(nelem), 1


def window_of(
    entries: npt.NDArray[np.uint16],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool]]:
    """Bases and zero modes of index entries, shape (tiles, 1, 1) each."""
    column = entries.astype(np.int64)[:, None, None]
    return column & (ZERO_MODE - 1), column >= ZERO_MODE


def entries_fit(spec: Zipccl, entries: npt.NDArray[np.uint16], here: slice) -> bool:
    """False if an index entry of the tiles `here` is not the one window that `spec` promises.

    `entries` are those of the chunk. What `spec` does not say, the chunk's first entry does.
    """
    if spec.window == "tile":
        return True
    first = spec.window if isinstance(spec.window, int) else int(entries[0]) & (ZERO_MODE - 1)
    return not (entries[here] != first).any()


def static_views(
    chunk: Chunk,
) -> tuple[Bytes, npt.NDArray[np.uint32], npt.NDArray[np.uint16]]:
    """The chunk's tile blocks (uint8), escape offsets (uint32 per tile) and index entries."""
    _, offsets, entries = Zipccl().static_arrays(chunk)
    return chunk.static, offsets.view("<u4"), entries.view("<u2")
