"""lhc: an index of nonzero elements and a sketch of their values, which add up. specs/lhc.md.

After TAGC (section 2.2) and the lossless homomorphic compression that it builds on. Ranks agree on
the index before they encode; their sketches then add element by element. This module holds layout,
constants and the NumPy reference.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from ..formats.codec_ids import CODEC_IDS
from ..formats.dtypes import BY_NAME, DType
from ..formats.header import align
from .common.base import (
    Bits,
    Bytes,
    Chunk,
    ChunkDecoded,
    ChunkResult,
    CodecSpec,
    Key,
    ReduceOp,
    check_vector,
)
from .common.minifloat import INFINITY, NAN, WIDENED, narrow, widen
from .common.params import choice, fraction
from .common.sections import Array

Ints = npt.NDArray[np.int64]
#: int32 where that is enough, else int64: there may be as many as elements.
Numbers = npt.NDArray[np.signedinteger[Any]]
Words = npt.NDArray[np.uint32]

#: Buckets of a row of the sketch, which is the least that it grows by.
LANES = 1024
#: Elements that are mapped alike, to as many buckets that follow one another.
BLOCK = 256
HASHES = 3
#: In the order of their numbers on the page.
SKETCHES = ("same", *WIDENED)
MAPPINGS = ("rotated", "published")
#: Of the GPU backend's state of a chunk: rounds that have launches of their own, and the word each
#: of them has; where it says that elements are left, and how many rounds came after; words in all.
ROUNDS = 24
LEFT = ROUNDS
FINISHED = LEFT + 1
STATE = 32
#: Bits of the number of a round, below ROUNDS, or of one that is above them all.
NUMBER_BITS = 5
#: The parameter bytes hold the ratio in steps of this.
RATIO_STEPS = 1000
MAX_RATIO = 1000

INDEX_PROBLEM = "bits of the index behind the last element"
CELL_PROBLEM = "a bucket of no element is not zero"
_SIGN = np.uint32(1 << 31)
#: Elements in the index that a thread decodes at a time, with about 80 bytes of memory for each.
_BATCH_NELEM = 1 << 14


@dataclass(frozen=True)
class Lhc(CodecSpec):
    """lhc: an index of nonzero elements and a sketch of their values, which add up.

    Homomorphic: sketches of buffers with the same index add up without decoding. Takes float16,
    bfloat16 and float32. ``stats`` is the index, uint8, one bit per element, of which ranks take
    the bitwise OR. Values are decoded exactly if no more than about ``0.75 / ratio`` of the
    elements are in the index, in no special order; beyond that some are estimated.

    Size: 1 bit per element for the index, and the bits of ``sketch`` divided by ``ratio``: 9 bits
    for float32 with the defaults.

    Source: lossless homomorphic compression (Li et al., 2024) and TAGC (EuroMLSys 2025), section
    2.2. The mapping "rotated" is an addition.

    Args:
        ratio: How many times fewer buckets than elements the sketch has: above 1, up to 1000, in
            steps of 0.001.
        sketch: Dtype of the buckets: ``"same"`` as the tensor, ``"float32"``, ``"bfloat16"`` or
            ``"float16"``.
        mapping: Which elements share buckets: ``"rotated"``, or ``"published"``, as in the authors'
            code, which recovers fewer elements.

    Raises:
        TypeError: If a parameter has a wrong type.
        ValueError: If a value is not allowed.
    """

    ratio: float = fraction(
        0, 4, per=RATIO_STEPS, least=RATIO_STEPS + 1, most=MAX_RATIO * RATIO_STEPS, default=4
    )
    sketch: str = choice(4, SKETCHES)
    mapping: str = choice(5, MAPPINGS)

    name: ClassVar[str] = "lhc"
    id: ClassVar[int] = CODEC_IDS["lhc"][0]
    lossless: ClassVar[bool] = False
    homomorphic: ClassVar[bool] = True
    ruins_dense: ClassVar[str] = (
        "it is for sums by sketch: tightwire.tagc makes gradients sparse and uses it"
    )
    reduce_op: ClassVar[ReduceOp | None] = "or"
    dtypes: ClassVar[tuple[str, ...]] = WIDENED
    measures_in_encode: ClassVar[bool] = True
    #: Rows have numbers of 32 bits.
    max_nelem: ClassVar[int] = 1 << 36
    weighs_gaps: ClassVar[bool] = True

    def arrays(self, dtype: DType, nelem: int) -> tuple[Array, ...]:
        """The buckets of the sketch, and a bit per element: the index."""
        bits = 8 * self.cell_dtype(dtype).itemsize
        return (
            Array("payload", bits, self.rows(nelem) * LANES, fills=True),
            Array("index", 1, nelem),
        )

    def rows(self, nelem: int) -> int:
        """Rows of the sketch of chunks that have `nelem` elements when whole."""
        rows = -(-nelem // LANES)
        return -(-rows * RATIO_STEPS // round(self.ratio * RATIO_STEPS))

    def cell_dtype(self, dtype: DType) -> DType:
        """The dtype of the buckets for tensors of `dtype`."""
        return dtype if self.sketch == "same" else BY_NAME[self.sketch]

    def scratch_nbytes(self, dtype: DType, nelem: int, chunks: int) -> int:
        """Of the GPU backend: see `workspace`."""
        return sum(workspace(self, nelem, chunks))

    def measure(self, bits: Bits, dtype: DType) -> Bytes | None:
        """The index: a bit for each element that is not zero, the first in bit 0 of byte 0.

        uint8, shape (ceil(elements / 8),). Ranks take the bitwise OR of theirs.
        """
        if dtype.name not in self.dtypes:
            return None
        return np.packbits(occupied(bits, dtype), bitorder="little")

    def check_stats(self, stats: npt.NDArray[Any], dtype: DType) -> None:
        """Stats are bytes in one dimension; encode() compares their number."""
        check_vector(stats, np.uint8, "one dimension, of measure()")


SPEC = Lhc


def workspace(spec: Lhc, nelem: int, chunks: int) -> tuple[int, ...]:
    """Bytes of the parts of the GPU backend's workspace, for `chunks` chunks of `nelem` elements.

    A sum per chunk; STATE words of state; of whole rows three bits an element, and a bucket's bit
    and number.
    """
    rows = 3 * -(-nelem // LANES) + (1 + NUMBER_BITS) * spec.rows(nelem)
    return align(8 * chunks), align(8 * STATE * chunks), rows * LANES // 8 * chunks


def occupied(bits: Bits, dtype: DType) -> npt.NDArray[np.bool]:
    """Which elements are neither 0 nor -0."""
    magnitude = bits.dtype.type((1 << 8 * dtype.itemsize - 1) - 1)
    found: npt.NDArray[np.bool] = (bits & magnitude) != 0
    return found


class Peeling(NamedTuple):
    """Where the K elements of a chunk's index have their values."""

    #: Numbers of the elements, ascending, shape (K,).
    elements: Numbers
    #: The bucket that an element has for itself; -1 if it is estimated. Shape (K,).
    own: Numbers
    rounds: int


def hashes(n: int) -> Words:
    """MurmurHash3_x86_32 of 0 to `n` - 1 as 4 bytes, with seeds 0, 1, 2: shape (n, 3)."""
    k = np.arange(n, dtype=np.uint32)[:, None] * np.uint32(0xCC9E2D51)
    k = _rotl(k, 15) * np.uint32(0x1B873593)
    h = _rotl(k ^ np.arange(HASHES, dtype=np.uint32), 13) * np.uint32(5) + np.uint32(0xE6546B64)
    h ^= np.uint32(4)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h = (h ^ h >> np.uint32(shift)) * np.uint32(factor)
    found: Words = h ^ h >> np.uint32(16)
    return found


def _rotl(x: Words, by: int) -> Words:
    found: Words = x << np.uint32(by) | x >> np.uint32(32 - by)
    return found


class Mapping(NamedTuple):
    """Of each block of elements, by hash: block of buckets, offset, sign. Shapes (blocks, 3)."""

    blocks: Ints
    offsets: Ints
    #: The sign bit, or 0.
    signs: Words


def mapping_of(spec: Lhc, nelem: int, sketch_rows: int) -> Mapping:
    """See `Mapping`. Blocks of whole rows, as if the last one were not short."""
    rows, per_row = -(-nelem // LANES), LANES // BLOCK
    if spec.mapping == "published":
        h = hashes(rows).repeat(per_row, axis=0)
        to = (h % np.uint32(max(sketch_rows, 1))).astype(np.int64) * per_row
        to += np.arange(len(h))[:, None] % per_row
        return Mapping(to, np.zeros(h.shape, np.int64), h & _SIGN)
    blocks, period = rows * per_row, max(sketch_rows, 1) * per_row
    h = hashes(-(-blocks // period) * period)
    keys = (h & ~_SIGN).reshape(-1, period, HASHES)
    to = np.empty(keys.shape, np.int64)
    np.put_along_axis(to, keys.argsort(axis=1, kind="stable"), np.arange(period)[:, None], axis=1)
    h, to = h[:blocks], to.reshape(-1, HASHES)[:blocks]
    offsets = h.astype(np.int64) % BLOCK
    a, b, c = offsets.T
    # Three different offsets, so that the three buckets of an element differ.
    b += b == a
    b %= BLOCK
    for _ in range(2):
        c += (c == a) | (c == b)
        c %= BLOCK
    return Mapping(to, offsets, h & _SIGN)


def number_dtype(nelem: int, n_cells: int) -> type[np.signedinteger[Any]]:
    """The dtype of numbers of elements and of buckets."""
    return np.int32 if max(nelem, n_cells) < 1 << 31 else np.int64


def cells_of(elements: Numbers, mapping: Mapping) -> Ints:
    """The buckets of each of the elements, shape (n, 3)."""
    block = elements // BLOCK
    places = (elements[:, None] + mapping.offsets[block]) % BLOCK
    found: Ints = mapping.blocks[block] * BLOCK + places
    return found


def peel(index: Bytes, nelem: int, mapping: Mapping, n_cells: int) -> Peeling:
    """Peel by rounds: an element alone in a bucket owns the first such bucket, and leaves."""
    kind = number_dtype(nelem, n_cells)
    elements = np.flatnonzero(np.unpackbits(index, count=nelem, bitorder="little")).astype(kind)
    cells = cells_of(elements, mapping).astype(kind)
    own = np.full(elements.size, -1, kind)
    counts = np.bincount(cells.reshape(-1), minlength=n_cells)
    left, rounds = np.arange(elements.size), 0
    while left.size:
        alone = counts[cells[left]] == 1
        found = alone.any(axis=1)
        if not found.any():
            break
        peeled = left[found]
        own[peeled] = cells[peeled, alone[found].argmax(axis=1)]
        counts -= np.bincount(cells[peeled].reshape(-1), minlength=n_cells)
        left, rounds = left[~found], rounds + 1
    return Peeling(elements, own, rounds)


def part_of(found: Peeling, start: int, stop: int) -> Peeling:
    """What was found of elements `start` to `stop`."""
    # Bounds of another dtype would have all elements converted.
    bounds = np.array([start, stop], found.elements.dtype)
    first, last = np.searchsorted(found.elements, bounds)
    return Peeling(found.elements[first:last], found.own[first:last], found.rounds)


def agreed_index(chunk: Chunk, stats: npt.NDArray[Any]) -> npt.NDArray[np.bool]:
    """Which elements of the chunk are in the index `stats`; ValueError if that has another size."""
    total = math.prod(chunk.shape)
    if stats.size != -(-total // 8):
        raise ValueError(f"stats have {stats.size} bytes; allowed: {-(-total // 8)}")
    return chunk_bits(stats, chunk.first, chunk.nelem)


def check_lacking(n: int) -> None:
    """ValueError if the index lacks `n` elements that are not zero."""
    if n:
        raise ValueError(
            f"the index in stats lacks {n} elements that are not zero; allowed: the bitwise OR of "
            "the measure() of all ranks"
        )


def encode_chunk(
    spec: Lhc,
    chunk: Chunk,
    bits: Bits,
    *,
    stats: npt.NDArray[Any] | None = None,
    key: Key | None = None,
    threads: int = 1,
) -> ChunkResult:
    """Encode the chunk's elements `bits` (1-D) into its static part.

    ValueError if `stats` are of another size, or lack an element that is not zero.
    """
    here = occupied(bits, chunk.dtype)
    if stats is not None:
        agreed = agreed_index(chunk, stats)
        check_lacking(int(np.count_nonzero(here > agreed)))
        here = agreed
    cells, index = static_views(spec, chunk)
    index[:] = np.packbits(here, bitorder="little")
    cells[:] = 0
    mapping = mapping_of(spec, chunk.nelem, cells.size // LANES)
    found = peel(index, chunk.nelem, mapping, cells.size)
    kind = spec.cell_dtype(chunk.dtype)
    add_up(found, mapping, put_own(found, bits, 0, chunk.dtype, cells, kind), cells, kind)
    return ChunkResult(0)


def put_own(
    found: Peeling, bits: Bits, start: int, dtype: DType, cells: Bits, kind: DType
) -> Words:
    """Write peeled elements to their buckets; the values of the others, as float32 bits.

    Element number `start` of the chunk is the first of `bits`.
    """
    alone = found.own >= 0
    values = bits[found.elements[alone] - start]
    if kind != dtype:
        values = narrow(widen(values, dtype), kind)
    cells[found.own[alone]] = values
    return widen(bits[found.elements[~alone] - start], dtype)


def add_up(found: Peeling, mapping: Mapping, words: Words, cells: Bits, kind: DType) -> None:
    """Add the elements that were not peeled, float32 bits `words`, with signs to their buckets.

    In float32, by block, hash and element.
    """
    if not words.size:
        return
    elements = found.elements[found.own < 0]
    block = elements // BLOCK
    order = np.argsort((block[:, None] * HASHES + np.arange(HASHES)).reshape(-1), kind="stable")
    at = cells_of(elements, mapping).reshape(-1)[order]
    signed = (words[:, None] ^ mapping.signs[block]).reshape(-1)[order]
    sums = np.zeros(cells.size, np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        np.add.at(sums, at, signed.view(np.float32))
    touched = np.zeros(cells.size, bool)
    touched[at] = True
    cells[touched] = narrow(sums[touched].view(np.uint32), kind)


def decode_chunk(
    spec: Lhc, chunk: Chunk, out: Bits, start: int = 0, *, threads: int = 1
) -> ChunkDecoded:
    """Decode elements `start` to `start + out.size` of the chunk into `out` (1-D).

    All of the chunk is peeled, however few they are.
    """
    cells, index = static_views(spec, chunk)
    if not index_ends(index, chunk.nelem):
        return ChunkDecoded(INDEX_PROBLEM)
    mapping = mapping_of(spec, chunk.nelem, cells.size // LANES)
    found = peel(index, chunk.nelem, mapping, cells.size)
    if not rest_is_zero(found, mapping, cells):
        return ChunkDecoded(CELL_PROBLEM)
    decode_elements(spec, chunk.dtype, found, mapping, cells, out, start)
    return ChunkDecoded()


def index_ends(index: Bytes, nelem: int) -> bool:
    """Whether no bit of the index is behind the last element."""
    return not (nelem % 8 and int(index[-1]) >> nelem % 8)


def rest_is_zero(found: Peeling, mapping: Mapping, cells: Bits) -> bool:
    """Whether the buckets of no element are zero."""
    unused = np.ones(cells.size, bool)
    for part in _batches(found):
        own = part.own
        unused[own[own >= 0]] = False
        unused[cells_of(part.elements[own < 0], mapping)] = False
    return not cells[unused].any()


def decode_elements(
    spec: Lhc, dtype: DType, found: Peeling, mapping: Mapping, cells: Bits, out: Bits, start: int
) -> None:
    """Write elements `start` to `start + out.size` of a chunk to `out` (1-D)."""
    kind = spec.cell_dtype(dtype)
    out[:] = 0
    for part in _batches(part_of(found, start, start + out.size)):
        stay = part.own < 0
        values = cells[part.own[~stay]]
        if kind != dtype:
            values = narrow(widen(values, kind), dtype)
        out[part.elements[~stay] - start] = values
        estimated = part.elements[stay]
        words = widen(cells[cells_of(estimated, mapping)], kind)
        words = words ^ mapping.signs[estimated // BLOCK]
        out[estimated - start] = narrow(median(words), dtype)


def _batches(found: Peeling) -> Iterator[Peeling]:
    """What was found of a few elements at a time: decoding needs memory for these alone."""
    for at in range(0, found.elements.size, _BATCH_NELEM):
        part = slice(at, at + _BATCH_NELEM)
        yield Peeling(found.elements[part], found.own[part], found.rounds)


def median(words: Words) -> Words:
    """The middle one of each row of three, float32 bits; a NaN if one of them is. -0 is below 0."""
    negative = words >> np.uint32(31) != 0
    a, b, c = np.where(negative, ~words, words | _SIGN).T
    keys = np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c))
    middle = np.where(keys >= _SIGN, keys ^ _SIGN, ~keys)
    nan = ((words & ~_SIGN) > INFINITY).any(axis=1)
    return np.where(nan, np.uint32(NAN), middle)


def chunk_bits(index: Bytes, first: int, nelem: int) -> npt.NDArray[np.bool]:
    """Bits `first` to `first + nelem` of a tensor's index."""
    part = index[first // 8 : -(-(first + nelem) // 8)]
    found = np.unpackbits(part, bitorder="little")[first % 8 :][:nelem]
    return found.astype(bool)


def static_views(spec: Lhc, chunk: Chunk) -> tuple[Bits, Bytes]:
    """The bits of the chunk's buckets, shape (rows * 1024,), and its index (uint8)."""
    cells, index = spec.static_arrays(chunk)
    return cells.view(spec.cell_dtype(chunk.dtype).bits), index
