"""omnireduce: the blocks of largest norm, whole, as many as a budget allows. specs/omnireduce.md.

OmniReduce in the form for sums over many hops (DynamiQ, section 6 and appendix C): ranks agree on
which blocks travel, and the values of those then add up. This module holds layout, constants and
the NumPy reference.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from ..formats.codec_ids import CODEC_IDS
from ..formats.dtypes import BY_NAME, DType
from ..formats.header import align
from .common import norms
from .common.base import Bits, Bytes, Chunk, ChunkDecoded, ChunkResult, CodecSpec, Key, ReduceOp
from .common.hadamard import Floats
from .common.minifloat import WIDENED, narrow, widen
from .common.params import choice, fraction, log2
from .common.sections import Array

Ints = npt.NDArray[np.int64]

BLOCKS = (64, 128, 256, 512, 1024, 2048, 4096)
#: In the order of their numbers on the page.
VALUES = WIDENED
#: A budget counts in steps of 1 / BUDGET_STEPS bits.
BUDGET_STEPS = 16
MAX_BITS = 32

INDEX_PROBLEM = "more blocks in the index than fit, or bits behind the last one"
CELL_PROBLEM = "a payload element of no block is not zero"


@dataclass(frozen=True)
class Omnireduce(CodecSpec):
    """omnireduce: the blocks of largest norm are kept whole, the others become zeros.

    Lossy and homomorphic: payload elements of buffers add up without decoding. Takes float16,
    bfloat16 and float32. ``stats`` are the norms of the tensor's blocks, float32, shape
    ``(blocks,)``, of which ranks take the maximum, so that all of them keep the same blocks. NaN
    and infinities in blocks beyond the budget are lost.

    Size: ``bits`` bits per element, and 1 bit per block.

    Source: OmniReduce (Fei et al., SIGCOMM 2021), in the form for sums over several hops of
    DynamiQ, section 6 and appendix C.

    Args:
        bits: Budget of bits per element, 1/16 to 32 in steps of 1/16.
        block: Elements of a block: 64, 128, ... or 4096.
        values: Dtype of the kept values: ``"bfloat16"``, ``"float16"`` or ``"float32"``.

    Raises:
        TypeError: If a parameter has a wrong type.
        ValueError: If a value is not allowed.
    """

    bits: float = fraction(0, 2, per=BUDGET_STEPS, least=1, most=MAX_BITS * BUDGET_STEPS, default=8)
    block: int = choice(2, BLOCKS, default=256, number=log2)
    values: str = choice(3, VALUES, default="bfloat16")

    name: ClassVar[str] = "omnireduce"
    id: ClassVar[int] = CODEC_IDS["omnireduce"][0]
    lossless: ClassVar[bool] = False
    homomorphic: ClassVar[bool] = True
    reduce_op: ClassVar[ReduceOp | None] = "max"
    dtypes: ClassVar[tuple[str, ...]] = WIDENED
    measures_in_encode: ClassVar[bool] = True
    ruins_dense: ClassVar[str] = "it makes most blocks of a dense gradient zero"
    caution: ClassVar[str] = "NaN and infinities in blocks beyond the budget are lost"
    max_nelem: ClassVar[int] = 1 << 36
    weighs_gaps: ClassVar[bool] = True

    def arrays(self, dtype: DType, nelem: int) -> tuple[Array, ...]:
        """Payload elements of the kept blocks, and a bit per block."""
        slots = self.slots(nelem) * self.block
        return (
            Array("payload", 8 * self.cell_dtype(dtype).itemsize, slots, fills=True),
            Array("index", 1, self.blocks(nelem)),
        )

    def blocks(self, nelem: int) -> int:
        """Blocks of `nelem` elements."""
        return -(-nelem // self.block)

    def slots(self, nelem: int) -> int:
        """Number of blocks that a chunk can keep that has `nelem` elements when whole."""
        blocks, width = self.blocks(nelem), 8 * BY_NAME[self.values].itemsize
        fit = blocks * int(self.bits * BUDGET_STEPS) // (BUDGET_STEPS * width)
        return min(max(fit, 1), blocks)

    def scratch_nbytes(self, dtype: DType, nelem: int, chunks: int) -> int:
        """Of the GPU backend: see `workspace`."""
        return sum(workspace(self, nelem, chunks))

    def cell_dtype(self, dtype: DType) -> DType:
        """The dtype of payload elements."""
        return BY_NAME[self.values]

    def measure(self, bits: Bits, dtype: DType) -> Floats | None:
        """Euclidean norms of the tensor's blocks, float32, shape (blocks,).

        Infinity where an element is a NaN or infinite. Ranks take the maximum of theirs.
        """
        if dtype.name not in self.dtypes:
            return None
        return roots(norms.energies(bits, dtype, self.block))

    def check_stats(self, stats: npt.NDArray[Any], dtype: DType) -> None:
        """Stats are norms: float32, 1-D, none of them negative or a NaN."""
        norms.check(stats, "one of each block")


SPEC = Omnireduce

#: Of the GPU backend: blocks that a program chooses among, values of a norm's digit, digits.
SPAN, BINS, LEVELS = 1024, 256, 4


def workspace(spec: Omnireduce, nelem: int, chunks: int) -> tuple[int, ...]:
    """Bytes of the parts of the GPU backend's workspace, for `chunks` chunks of `nelem` elements.

    For each chunk a sum, a number of payload elements, histograms, two counts for each SPAN of
    blocks, and for each block a number; the tensor's norms.
    """
    blocks = spec.blocks(nelem)
    counts = 2 * 4 * -(-blocks // SPAN)
    sizes = 8, 8, 4 * BINS * LEVELS, counts, 4 * blocks
    each = tuple(align(size * chunks) for size in sizes)
    return *each, align(4 * spec.blocks(nelem * chunks))


def roots(energies: norms.Doubles) -> Floats:
    """Norms as float32; infinite only where the energy is."""
    found = np.sqrt(energies)
    finite = np.minimum(found, np.finfo(np.float32).max)
    return np.where(np.isinf(found), found, finite).astype(np.float32)


def largest(norm: Floats, k: int) -> Ints:
    """Numbers of the `k` largest norms, ascending; of equal ones the first; none of those of 0."""
    order = np.argsort(-norm, kind="stable")[:k]
    found: Ints = np.sort(order[norm[order] > 0])
    return found


class Views(NamedTuple):
    """A chunk's static part."""

    #: Shape (slots, block).
    cells: Bits
    #: A bit for each of the chunk's blocks: the index.
    bits: Bytes


def static_views(spec: Omnireduce, chunk: Chunk) -> Views:
    """See `Views`."""
    cells, index = spec.static_arrays(chunk)
    return Views(cells.view(spec.cell_dtype(chunk.dtype).bits).reshape(-1, spec.block), index)


def converted(bits: Bits, source: DType, target: DType) -> Bits:
    """Bits of values of `source` as those of `target`: to nearest even; NaNs become one."""
    return bits if source == target else narrow(widen(bits, source), target)


Convert = Callable[[Bits, DType, DType], Bits]


def choose(spec: Omnireduce, chunk: Chunk, stats: npt.NDArray[Any] | None) -> Ints:
    """Numbers of the blocks to keep, ascending; writes index and the payload of no block.

    ValueError if `stats` are of another size.
    """
    blocks, expected = spec.blocks(chunk.nelem), (spec.blocks(math.prod(chunk.shape)),)
    if stats is None or stats.shape != expected:
        found = None if stats is None else stats.shape
        raise ValueError(f"stats have shape {found}; allowed: {expected} for {chunk.shape}")
    cells, index = static_views(spec, chunk)
    kept = largest(norms.of_chunk(stats, chunk.first, blocks, spec.block), cells.shape[0])
    chosen = np.zeros(blocks, bool)
    chosen[kept] = True
    index[:] = np.packbits(chosen, bitorder="little")
    cells[kept.size :] = 0
    return kept


def encode_blocks(
    spec: Omnireduce,
    chunk: Chunk,
    kept: Ints,
    bits: Bits,
    start: int = 0,
    convert: Convert = converted,
) -> None:
    """Write those of the blocks `kept` whose elements are in `bits` (1-D).

    Its first element has the number `start`, that of a block's first; its last ends a block, or the
    chunk.
    """
    cells, size = static_views(spec, chunk).cells, spec.block
    first, whole = start // size, bits.size // size
    low, high = np.searchsorted(kept, [first, first + whole])
    rows = bits[: whole * size].reshape(whole, size)
    kind = spec.cell_dtype(chunk.dtype)
    cells[low:high] = convert(rows[kept[low:high] - first], chunk.dtype, kind)
    tail = bits[whole * size :]
    if tail.size and high < kept.size and kept[high] == first + whole:
        cells[high, : tail.size] = convert(tail, chunk.dtype, kind)
        cells[high, tail.size :] = 0


def encode_chunk(
    spec: Omnireduce,
    chunk: Chunk,
    bits: Bits,
    *,
    stats: npt.NDArray[Any] | None = None,
    key: Key | None = None,
    threads: int = 1,
) -> ChunkResult:
    """Encode the chunk's elements `bits` (1-D) into its static part.

    ValueError if `stats` are of another size.
    """
    encode_blocks(spec, chunk, choose(spec, chunk, stats), bits)
    return ChunkResult(0)


def kept_blocks(spec: Omnireduce, chunk: Chunk) -> tuple[Ints, str | None]:
    """Numbers of the blocks in the index, ascending, and what is wrong with the chunk, or None.

    All of the index is checked, and the payload elements of no block.
    """
    cells, index = static_views(spec, chunk)
    blocks = spec.blocks(chunk.nelem)
    flags = np.unpackbits(index, bitorder="little")
    kept: Ints = np.flatnonzero(flags)
    if kept.size > cells.shape[0] or flags[blocks:].any():
        return kept, INDEX_PROBLEM
    used = kept.size * spec.block
    if kept.size and kept[-1] == blocks - 1:
        used -= blocks * spec.block - chunk.nelem
    return kept, CELL_PROBLEM if cells.reshape(-1)[used:].any() else None


def decode_blocks(
    spec: Omnireduce,
    chunk: Chunk,
    kept: Ints,
    out: Bits,
    start: int,
    convert: Convert = converted,
) -> None:
    """Write elements `start` to `start + out.size` of a chunk with the blocks `kept` to `out`."""
    cells, size, stop = static_views(spec, chunk).cells, spec.block, start + out.size
    kind = spec.cell_dtype(chunk.dtype)
    out[:] = 0
    # Blocks that lie whole in `out` go together, those at its ends, two at most, one by one.
    lo_block, hi_block = -(-start // size), max(stop // size, -(-start // size))
    low, high = np.searchsorted(kept, [lo_block, hi_block])
    rows = out[lo_block * size - start : hi_block * size - start].reshape(-1, size)
    rows[kept[low:high] - lo_block] = convert(cells[low:high], kind, chunk.dtype)
    for slot in (low - 1, high):
        at = int(kept[slot]) * size if 0 <= slot < kept.size else stop
        lo, hi = max(start, at), min(stop, at + size)
        if lo < hi:
            out[lo - start : hi - start] = convert(
                cells[slot, lo - at : hi - at], kind, chunk.dtype
            )


def decode_chunk(
    spec: Omnireduce, chunk: Chunk, out: Bits, start: int = 0, *, threads: int = 1
) -> ChunkDecoded:
    """Decode elements `start` to `start + out.size` of the chunk into `out` (1-D)."""
    kept, problem = kept_blocks(spec, chunk)
    if problem is None:
        decode_blocks(spec, chunk, kept, out, start)
    return ChunkDecoded(problem)
