"""thc: rotated values on a grid of 16 levels, in integers that hold sums over ranks. specs/thc.md.

After THC (tensor homomorphic compression) in the form that DynamiQ compares itself with (section
6): ranks agree on the largest norm and on the signs of a rotation, and their payload elements then
add up as integers. Float operations are single precision, each rounded to nearest, in the page's
order. This module holds layout, constants and the NumPy reference.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from ..formats.codec_ids import CODEC_IDS
from ..formats.dtypes import BY_NAME, DType
from ..formats.header import align
from .common import norms
from .common.base import Bits, Chunk, ChunkDecoded, ChunkResult, CodecSpec, Key, ReduceOp
from .common.hadamard import Floats, rotate
from .common.minifloat import INFINITY, NAN, WIDENED, largest_number, narrow, widen
from .common.params import choice
from .common.philox import KeyNumbers, Words, key_numbers, random_words
from .common.sections import Array

BITS = (8, 16)
#: In the order of their numbers on the page.
NORMS = ("block", "tensor")
#: Elements that are rotated together.
BLOCK = 1024
#: The levels of the grid, steps 0 to 30, whose middle stands for 0.
LEVELS = (0, 3, 5, 7, 9, 11, 13, 14, 16, 17, 19, 21, 23, 25, 27, 30)
TOP, MIDDLE = 30, 15
#: The most ranks whose sums payload elements of so many bits can hold.
MAX_RANKS = {8: 8, 16: 2184}
#: Steps of a root mean square of rotated values, on either side: 15 / 2.1539 * 32.
STEPS = 480 / 2.1539
ROTATE_FACTOR = 2.0**-10
#: Blocks of root mean squares below this become zeros: nothing that counts is subnormal.
FLOOR = 2.0**-90
#: The norm's word of a lost block.
NAN_NORM = NAN
#: Least norm that is not 0 and largest, as float32 bits.
NORM_BITS = (127 - 90) << 23, INFINITY - 1
#: Streams of random words: a rank's own for levels, that of all ranks for signs.
LEVEL_STREAM, SIGN_STREAM = 0, 1

#: Bytes after the payload elements; the first of them counts ranks.
COUNT_NBYTES = 128
NORMS_AT = 16
RANKS_PROBLEM = "the number of ranks"
PAYLOAD_PROBLEM = "a norm or a payload element of a block"
_BATCH = 256

#: Of each whole number of steps the next level below or there, and the distance to the next above.
BELOW = np.array([max(v for v in LEVELS if v <= i) for i in range(TOP + 1)], np.uint32)
GAPS = np.array([min((v for v in LEVELS if v > b), default=TOP + 1) - b for b in BELOW.tolist()])


@dataclass(frozen=True)
class Thc(CodecSpec):
    """thc: rotated values on a grid of 16 levels, in integers that hold sums over ranks.

    Lossy and homomorphic: payload elements of buffers add up without decoding. Takes float16,
    bfloat16 and float32. To encode a ``key`` is needed, with the same seed and step on all ranks.
    ``stats`` are norms, float32, shape ``(blocks,)`` or ``(1,)``, of which ranks take the maximum.

    Size: ``bits`` bits per element, and 32 bits per block of 1024.

    Source: THC (Li et al., NSDI 2024), in the form for sums over several hops of DynamiQ, section
    6. A norm per block is an addition.

    Args:
        bits: Bits of a payload element: 8 holds the sum of up to 8 ranks, 16 of up to 2184.
        norm: What ranks agree on: the root mean square of every ``"block"`` of 1024 elements, or of
            the ``"tensor"``, as in the paper, which loses blocks that are much smaller or larger
            than others.

    Raises:
        TypeError: If a parameter has a wrong type.
        ValueError: If a value is not in the list.
    """

    bits: int = choice(0, BITS, number=int)
    norm: str = choice(1, NORMS)

    name: ClassVar[str] = "thc"
    id: ClassVar[int] = CODEC_IDS["thc"][0]
    lossless: ClassVar[bool] = False
    homomorphic: ClassVar[bool] = True
    reduce_op: ClassVar[ReduceOp | None] = "max"
    dtypes: ClassVar[tuple[str, ...]] = WIDENED
    measures_in_encode: ClassVar[bool] = True
    max_nelem: ClassVar[int] = 1 << 37

    def arrays(self, dtype: DType, nelem: int) -> tuple[Array, ...]:
        """Payload elements and the number of ranks; the signs' seed and step, and the norms."""
        blocks = self.blocks(nelem)
        return (
            Array("payload", self.bits, blocks * BLOCK),
            Array("payload", self.bits, 1, at=-COUNT_NBYTES),
            Array("scales", 32, 3),
            Array("scales", 32, 1 if self.norm == "tensor" else blocks, at=NORMS_AT),
        )

    @property
    def draws(self) -> bool:
        """Always: payload elements are rounded at random."""
        return True

    @property
    def max_ranks(self) -> int:
        """The most ranks whose sum the payload elements can hold."""
        return MAX_RANKS[self.bits]

    def blocks(self, nelem: int) -> int:
        """Blocks of a chunk, or norms of a tensor by blocks, of `nelem` elements."""
        return -(-nelem // BLOCK)

    def scratch_nbytes(self, dtype: DType, nelem: int, chunks: int) -> int:
        """Of the GPU backend: see `workspace`."""
        return sum(workspace(self, nelem, chunks))

    def cell_dtype(self, dtype: DType) -> DType:
        """The dtype of payload elements."""
        return BY_NAME[f"uint{self.bits}"]

    def check_sum(self, cells: Bits) -> None:
        """Raise ValueError if payload elements, summed, are of more ranks than they can hold."""
        ranks = int(cells[cells.size - COUNT_NBYTES * 8 // self.bits])
        if ranks > self.max_ranks:
            raise ValueError(f"a sum of {ranks} ranks; allowed: {self.max_ranks} in {self}")

    @property
    def weighed_by_frame(self) -> tuple[int, ...]:  # type: ignore[override]
        """The count, the seed, and a norm that all blocks share."""
        return (1, 2) if self.norm == "block" else (1, 2, 3)

    def measure(self, bits: Bits, dtype: DType) -> Floats | None:
        """Root mean squares, float32, of the tensor's blocks, shape (blocks,), or of it, (1,).

        Infinity where an element is a NaN or infinite. Ranks take the maximum of theirs.
        """
        if dtype.name not in self.dtypes:
            return None
        return roots(self, norms.energies(bits, dtype, BLOCK), bits.size)

    def check_stats(self, stats: npt.NDArray[Any], dtype: DType) -> None:
        """Stats are norms: float32, 1-D, none of them negative or a NaN."""
        norms.check(stats, "one dimension, of measure()")


SPEC = Thc


def workspace(spec: Thc, nelem: int, chunks: int) -> tuple[int, int]:
    """Bytes of the parts of the GPU backend's workspace, for `chunks` chunks of `nelem` elements.

    A sum per chunk; the tensor's norms, and one for their sum over the tensor.
    """
    blocks = spec.blocks(nelem * chunks)
    if spec.norm == "block":
        return align(8 * chunks), align(4 * blocks)
    return align(8 * chunks), align(8 * (2 + (1 << max(blocks - 1, 0).bit_length())))


def roots(spec: Thc, energies: norms.Doubles, nelem: int) -> Floats:
    """Root mean squares of blocks, or of the tensor, as float32."""
    if spec.norm == "block":
        means = energies / BLOCK
    else:
        means = np.array([norms.total(energies) / max(nelem, 1)])
    found: Floats = np.sqrt(means).astype(np.float32)
    return found


class Views(NamedTuple):
    """A chunk's static part."""

    #: Shape (blocks, 1024), uint8 or uint16.
    cells: Bits
    #: The element that counts ranks, shape (1,).
    ranks: Bits
    #: Seed and step of the signs, three words.
    seed: Words
    #: The norms' words, shape (blocks,) or (1,).
    norms: Words


def static_views(spec: Thc, chunk: Chunk) -> Views:
    """See `Views`."""
    kind = spec.cell_dtype(chunk.dtype).bits
    cells, ranks, seed, norm = spec.static_arrays(chunk)
    cells = cells.view(kind).reshape(-1, BLOCK)
    return Views(cells, ranks.view(kind), seed.view("<u4"), norm.view("<u4"))


def encode_chunk(
    spec: Thc,
    chunk: Chunk,
    bits: Bits,
    *,
    stats: npt.NDArray[Any] | None = None,
    key: Key | None = None,
    threads: int = 1,
) -> ChunkResult:
    """Encode the chunk's elements `bits` (1-D) into its static part.

    ValueError if `stats` are of another size, or finite where the elements are not.
    """
    numbers, views = key_numbers(key), prepare(spec, chunk, stats, key)
    words, blocks = block_words(views), spec.blocks(chunk.nelem)
    for first in range(0, blocks, _BATCH):
        here = slice(first, min(first + _BATCH, blocks))
        part = bits[here.start * BLOCK : here.stop * BLOCK]
        x = np.zeros((here.stop - first, BLOCK), np.float32)
        x.view(np.uint32).reshape(-1)[: part.size] = widen(part, chunk.dtype)
        coded = (words[here] != 0) & (words[here] != NAN_NORM)
        check_finite(bool((np.isfinite(x).all(axis=1) | ~coded).all()))
        x[~coded] = 0
        x.view(np.uint32)[...] ^= sign_bits(numbers, first, here.stop)
        x *= np.float32(ROTATE_FACTOR)
        rotate(x)
        norm = np.where(coded, words[here], np.uint32(127 << 23)).view(np.float32)
        with np.errstate(over="ignore"):
            u = x * (np.float32(STEPS) / norm)[:, None] + np.float32(MIDDLE)
        at = word_index(spec, chunk) + first * BLOCK
        drawn = random_words(numbers, at, x.size, LEVEL_STREAM).reshape(x.shape)
        levels = round_to_level(np.clip(u, 0, np.float32(TOP)), drawn)
        views.cells[here] = np.where(coded[:, None], levels, 0)
    return ChunkResult(0)


def prepare(spec: Thc, chunk: Chunk, stats: npt.NDArray[Any] | None, key: Key | None) -> Views:
    """Write the chunk's seed, number of ranks and norms; return its views, payload unwritten."""
    numbers, size = key_numbers(key), math.prod(chunk.shape)
    expected = (1,) if spec.norm == "tensor" else (spec.blocks(size),)
    if stats is None or stats.shape != expected:
        found = None if stats is None else stats.shape
        raise ValueError(f"stats have shape {found}; allowed: {expected} for {chunk.shape}")
    views = static_views(spec, chunk)
    views.seed[:] = numbers.seed & 0xFFFFFFFF, numbers.seed >> 32, numbers.step
    views.ranks[:] = 1
    agreed = stats
    if spec.norm == "block":
        agreed = norms.of_chunk(stats, chunk.first, spec.blocks(chunk.nelem), BLOCK)
    words = np.where(agreed < np.float32(FLOOR), np.float32(0), agreed).view(np.uint32)
    views.norms[:] = np.where(np.isinf(agreed), np.uint32(NAN_NORM), words)
    return views


def check_finite(finite: bool) -> None:
    """Raise ValueError unless blocks that the stats call finite are."""
    if not finite:
        raise ValueError(
            "stats are finite where an element is not; allowed: the maximum of the measure() of "
            "all ranks"
        )


def decode_chunk(
    spec: Thc, chunk: Chunk, out: Bits, start: int = 0, *, threads: int = 1
) -> ChunkDecoded:
    """Decode elements `start` to `start + out.size` of the chunk into `out` (1-D).

    Only the number of ranks and the blocks that hold those elements are looked at.
    """
    views, stop = static_views(spec, chunk), start + out.size
    ranks = int(views.ranks[0])
    if not 1 <= ranks <= spec.max_ranks:
        return ChunkDecoded(RANKS_PROBLEM)
    numbers, words = seed_of(views), block_words(views)
    wrong = not norms_are_right(views)
    limit = np.float32(largest_number(chunk.dtype))
    last_block = -(-stop // BLOCK) if out.size else 0
    for first in range(start // BLOCK, last_block, _BATCH):
        here = slice(first, min(first + _BATCH, last_block))
        cells, here_words = views.cells[here], np.asarray(words[here], np.uint32)
        good = (here_words >= NORM_BITS[0]) & (here_words <= NORM_BITS[1])
        wrong |= int(cells.max()) > TOP * ranks or bool(cells[~good].any())
        b = (cells.astype(np.int32) - np.int32(MIDDLE * ranks)).astype(np.float32)
        rotate(b)
        b.view(np.uint32)[...] ^= sign_bits(numbers, first, here.stop)
        norm = np.where(good, here_words, np.uint32(0)).view(np.float32)
        with np.errstate(over="ignore"):
            b *= (norm / np.float32(STEPS))[:, None]
        y = np.clip(b, -limit, limit).view(np.uint32)
        y[~good] = np.where(here_words[~good] == NAN_NORM, np.uint32(NAN), np.uint32(0))[:, None]
        found = narrow(y, chunk.dtype).reshape(-1)
        at = first * BLOCK
        lo, hi = max(start - at, 0), min(stop - at, found.size)
        out[at + lo - start : at + hi - start] = found[lo:hi]
    return ChunkDecoded(PAYLOAD_PROBLEM if wrong else None)


def block_words(views: Views) -> Words:
    """The norm's word of each block."""
    return np.broadcast_to(views.norms, (views.cells.shape[0],))


def norms_are_right(views: Views) -> bool:
    """Whether all norms are 0, in range, or of lost blocks."""
    words = np.asarray(views.norms, np.uint32)
    good = (words >= NORM_BITS[0]) & (words <= NORM_BITS[1])
    return bool((good | (words == 0) | (words == NAN_NORM)).all())


def seed_of(views: Views) -> KeyNumbers:
    """The key of the signs."""
    low, high, step = views.seed.tolist()
    return KeyNumbers(high << 32 | low, step, 0)


def sign_bits(numbers: KeyNumbers, first: int, last: int) -> Words:
    """The sign bit, or 0, of each element of blocks `first` to `last`, shape (blocks, 1024)."""
    each = BLOCK // 32
    shared = numbers._replace(rank=0)
    words = random_words(shared, first * each, (last - first) * each, SIGN_STREAM)
    signs: Words = words[:, None] >> np.arange(32, dtype=np.uint32) << np.uint32(31)
    return signs.reshape(-1, BLOCK)


def word_index(spec: Thc, chunk: Chunk) -> int:
    """Index of the chunk's first random word."""
    return chunk.number * (chunk.sections[0].nbytes - COUNT_NBYTES) * 8 // spec.bits


def round_to_level(u: Floats, words: Words) -> Words:
    """Levels at random from `u`, in [0, 30], so that their mean is u."""
    steps = (u * np.float32(1 << 16)).astype(np.uint32)
    whole = steps >> np.uint32(16)
    below, gaps = BELOW[whole], GAPS[whole].astype(np.uint32)
    above = steps - (below << np.uint32(16)) > (words >> np.uint32(16)) * gaps
    levels: Words = np.where(above, below + gaps, below)
    return levels
