"""omnireduce: the blocks of largest norm, whole, as many as a budget allows. specs/omnireduce.md.

OmniReduce in the form for sums over many hops (DynamiQ, section 6 and appendix C): ranks agree on
which blocks travel, and the values of those then add up. This module holds layout, constants and
the NumPy reference.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from ..formats.codec_ids import CODEC_IDS
from ..formats.dtypes import BY_NAME, DType
from ..formats.errors import FormatError
from ..formats.header import SECTION_KINDS, Section, align
from .common import norms
from .common.base import (
    Bits,
    Bytes,
    Chunk,
    ChunkDecoded,
    ChunkResult,
    CodecSpec,
    Key,
    Layout,
    ReduceOp,
    check_choice,
    plain_number,
)
from .common.hadamard import Floats
from .common.minifloat import WIDENED, narrow, widen

Ints = npt.NDArray[np.int64]

BLOCKS = (64, 128, 256, 512, 1024, 2048, 4096)
#: In the order of their numbers on the page.
VALUES = WIDENED
#: A budget counts in steps of 1 / BUDGET_STEPS bits.
BUDGET_STEPS = 16
MAX_BITS = 32
_PARAMS = struct.Struct("<HBBI")

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

    bits: float = 8
    block: int = 256
    values: str = "bfloat16"

    name: ClassVar[str] = "omnireduce"
    id: ClassVar[int] = CODEC_IDS["omnireduce"][0]
    lossless: ClassVar[bool] = False
    homomorphic: ClassVar[bool] = True
    reduce_op: ClassVar[ReduceOp | None] = "max"
    dtypes: ClassVar[tuple[str, ...]] = WIDENED
    measures_in_encode: ClassVar[bool] = True
    caution: ClassVar[str] = "NaN and infinities in blocks beyond the budget are lost"

    def __post_init__(self) -> None:
        """Raise TypeError or ValueError for a parameter that is not allowed."""
        object.__setattr__(self, "bits", plain_number(self.bits))
        allowed = f"bits is {self.bits!r}; allowed: 1/16 to {MAX_BITS} in steps of 1/{BUDGET_STEPS}"
        if isinstance(self.bits, bool) or not isinstance(self.bits, (int, float)):
            raise TypeError(allowed)
        if not 0 < self.bits <= MAX_BITS or self.bits * BUDGET_STEPS % 1:
            raise ValueError(allowed)
        check_choice("block", self.block, BLOCKS)
        check_choice("values", self.values, VALUES)

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

    def layout(self, dtype: DType, nelem: int) -> Layout:
        """Static sections with the payload elements of the kept blocks, and with their index."""
        payload = self.slots(nelem) * self.block * BY_NAME[self.values].itemsize
        index = align(-(-self.blocks(nelem) // 8))
        return Layout(
            (Section(SECTION_KINDS["payload"], payload), Section(SECTION_KINDS["index"], index))
        )

    def static_used(
        self, dtype: DType, nelem: int, sections: tuple[Section, ...]
    ) -> tuple[tuple[int, int], ...]:
        """See `CodecSpec.static_used`."""
        at = sections[0].nbytes
        return (0, at), (at, at + -(-self.blocks(nelem) // 8))

    @property
    def weighs_gaps(self) -> bool:
        """See `CodecSpec.weighs_gaps`."""
        return True

    def max_chunk_nelem(self, dtype: DType) -> int:
        """A section entry counts 128-byte blocks in 32 bits."""
        return 1 << 36

    def accepts(self, dtype: DType, nelem: int) -> bool:
        """True for dtypes it codes where the chunk gets smaller."""
        if not super().accepts(dtype, nelem):
            return False
        static = sum(s.nbytes for s in self.layout(dtype, nelem).sections)
        return static < align(nelem * dtype.itemsize)

    def pack_params(self) -> bytes:
        """Budget in 1/16 bits, log2 of the block, dtype of the payload elements, zero."""
        steps, log_block = int(self.bits * BUDGET_STEPS), self.block.bit_length() - 1
        return _PARAMS.pack(steps, log_block, VALUES.index(self.values), 0)

    @classmethod
    def unpack_params(cls, data: bytes) -> Omnireduce:
        """Inverse of `pack_params`."""
        if len(data) != _PARAMS.size:
            raise FormatError("bad_header", f"omnireduce has 8 parameter bytes, found {len(data)}")
        steps, log_block, values, reserved = _PARAMS.unpack(data)
        try:
            spec = cls(steps / BUDGET_STEPS, 1 << log_block, VALUES[values])
        except (IndexError, ValueError):
            reserved = 1
        if reserved:
            raise FormatError("bad_header", f"omnireduce parameters {data.hex()}")
        return spec

    def measure(self, bits: Bits, dtype: DType) -> Floats | None:
        """Euclidean norms of the tensor's blocks, float32, shape (blocks,).

        Infinity where an element is a NaN or infinite. Ranks take the maximum of theirs.
        """
        if dtype.name not in self.dtypes:
            return None
        return roots(norms.energies(bits, dtype, self.block))

    def check_stats(self, stats: npt.NDArray[Any], dtype: DType) -> None:
        """Stats are norms: float32, 1-D, none of them negative or a NaN."""
        if stats.ndim != 1 or stats.dtype != np.float32:
            found = f"{stats.dtype} of shape {stats.shape}"
            raise ValueError(f"stats are {found}; allowed: float32, one of each block")
        if not (stats >= 0).all():
            raise ValueError("stats are negative or NaN; allowed: norms, as measure() gives them")


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
    at = chunk.sections[0].nbytes
    cells = chunk.static[:at].view(spec.cell_dtype(chunk.dtype).bits)
    index = chunk.static[at : at + -(-spec.blocks(chunk.nelem) // 8)]
    return Views(cells.reshape(-1, spec.block), index)


def converted(bits: Bits, source: DType, target: DType) -> Bits:
    """Bits of values of `source` as those of `target`: to nearest even; NaNs become one."""
    return bits if source == target else narrow(widen(bits, source), target)


Convert = Callable[[Bits, DType, DType], Bits]


def encode_chunk(
    spec: Omnireduce,
    chunk: Chunk,
    bits: Bits,
    *,
    stats: npt.NDArray[Any] | None = None,
    key: Key | None = None,
    threads: int = 1,
    convert: Convert = converted,
) -> ChunkResult:
    """Encode the chunk's elements `bits` (1-D) into its static part.

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
    kind, whole = spec.cell_dtype(chunk.dtype), bits.size // spec.block
    full = kept[kept < whole]
    rows = bits[: whole * spec.block].reshape(whole, spec.block)
    cells[: full.size] = convert(rows[full], chunk.dtype, kind)
    if full.size < kept.size:
        tail = bits[whole * spec.block :]
        cells[full.size, : tail.size] = convert(tail, chunk.dtype, kind)
        cells[full.size, tail.size :] = 0
    return ChunkResult(0)


def decode_chunk(
    spec: Omnireduce,
    chunk: Chunk,
    out: Bits,
    start: int = 0,
    *,
    threads: int = 1,
    convert: Convert = converted,
) -> ChunkDecoded:
    """Decode elements `start` to `start + out.size` of the chunk into `out` (1-D).

    All of the index is checked, and the payload elements of no block.
    """
    cells, index = static_views(spec, chunk)
    blocks, stop = spec.blocks(chunk.nelem), start + out.size
    flags = np.unpackbits(index, bitorder="little")
    kept = np.flatnonzero(flags)
    out[:] = 0
    if kept.size > cells.shape[0] or flags[blocks:].any():
        return ChunkDecoded(INDEX_PROBLEM)
    used = kept.size * spec.block
    if kept.size and kept[-1] == blocks - 1:
        used -= blocks * spec.block - chunk.nelem
    if cells.reshape(-1)[used:].any():
        return ChunkDecoded(CELL_PROBLEM)
    kind = spec.cell_dtype(chunk.dtype)
    size = spec.block
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
    return ChunkDecoded()
