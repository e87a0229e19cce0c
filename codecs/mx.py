"""mx: the OCP microscaling formats, a power-of-two scale per 32 small elements. specs/mx.md.

After the OCP Microscaling Formats (MX) specification v1.0, sections 5 and 6. This module holds
layout, constants and the NumPy reference.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from ..formats.codec_ids import CODEC_IDS
from ..formats.dtypes import DType
from .common.base import (
    Bits,
    Bytes,
    Chunk,
    ChunkDecoded,
    ChunkResult,
    CodecSpec,
    Key,
    ReduceOp,
    ScaleBytes,
    check_vector,
)
from .common.minifloat import (
    BY_NAME,
    INFINITY,
    WIDENED,
    Element,
    narrow,
    pack,
    round_codes,
    split,
    unpack,
    values_of,
    widen,
)
from .common.params import choice, log2
from .common.sections import Array

BLOCK = 32
SCALE_RULES = ("floor", "ceil", "agreed")
#: Scale byte of a block that is NaN, and the largest of any other.
NAN_SCALE = 255
MAX_SCALE = 254


_BATCH = 1 << 15


@dataclass(frozen=True)
class Mx(CodecSpec):
    """mx: the OCP microscaling formats, with a power-of-two scale for every 32 elements.

    Lossy. Takes float16, bfloat16 and float32. NaN and infinities are kept, as NaN or infinity of
    the element type or as a NaN block.

    Size: 8 bits (``e4m3``, ``e5m2``, ``int8``), 6 (``e3m2``, ``e2m3``) or 4 (``e2m1``) per element,
    and 0.25 bit for the scales: 8.25, 6.25 or 4.25 bits.

    Source: OCP Microscaling Formats (MX) specification v1.0, sections 5 and 6. The scale rule
    "agreed": DynamiQ, appendix C.

    Args:
        element: ``"e4m3"``, ``"e5m2"``, ``"e3m2"``, ``"e2m3"``, ``"e2m1"`` or ``"int8"``.
        scale_rule: ``"floor"``, the rule of the specification, saturates the largest values of some
            blocks. ``"ceil"`` takes the smallest scale that saturates none. With ``"agreed"`` the
            scales are ``stats``: scale bytes of the tensor's blocks, uint8, shape ``(blocks,)``,
            which ranks reduce by maximum and may enlarge, so that their sums fit; without ``stats``
            they are those of ``"ceil"``. ``decode_add_encode`` in one pass and without ``stats``
            keeps the scales of its source.

    Raises:
        TypeError: If a parameter has a wrong type.
        ValueError: If a value is not in the list.
    """

    element: str = choice(0, tuple(BY_NAME))
    scale_rule: str = choice(1, SCALE_RULES)

    name: ClassVar[str] = "mx"
    id: ClassVar[int] = CODEC_IDS["mx"][0]
    lossless: ClassVar[bool] = False
    needs_stats: ClassVar[bool] = False
    dtypes: ClassVar[tuple[str, ...]] = WIDENED
    measures_in_encode: ClassVar[bool] = True
    adds_float32: ClassVar[bool] = True
    fixed_params: ClassVar[Mapping[int, int]] = {2: log2(BLOCK)}

    def arrays(self, dtype: DType, nelem: int) -> tuple[Array, ...]:
        """Packed codes, and a scale byte per block."""
        return (
            Array("payload", self.format.bits, nelem),
            Array("scales", 8, -(-nelem // BLOCK)),
        )

    @property
    def agrees(self) -> bool:
        """Whether scales are stats."""
        return self.scale_rule == "agreed"

    @property
    def reduce_op(self) -> ReduceOp | None:  # type: ignore[override]
        """How ranks agree on scales, where they do."""
        return "max" if self.agrees else None

    @property
    def sums_keep_stats(self) -> bool:  # type: ignore[override]
        """True where scales are stats."""
        return self.agrees

    @property
    def stats_nelem(self) -> int | None:
        """A scale byte is of a block."""
        return BLOCK if self.agrees else None

    @property
    def scale_bytes(self) -> ScaleBytes | None:
        """Bounds of blocks where scales are agreed on."""
        if not self.agrees:
            return None
        special = NAN_SCALE - self.format.emax
        with np.errstate(over="ignore"):
            largest = values_of(self.format)[self.format.largest]
            bounds = np.ldexp(largest, np.arange(256) - 127).astype(np.float32)
        bounds[special:] = np.nan
        return ScaleBytes(BLOCK, MAX_SCALE, special, bounds)

    @property
    def format(self) -> Element:
        """The element type."""
        return BY_NAME[self.element]

    def measure(self, bits: Bits, dtype: DType) -> Bytes | None:
        """Where scales are agreed on, those of "ceil" of the tensor's blocks, uint8, (blocks,)."""
        if not self.agrees or dtype.name not in self.dtypes:
            return None
        found = np.empty(-(-bits.size // BLOCK), np.uint8)
        for first in range(0, found.size, _BATCH):
            words = _words(bits[first * BLOCK :][: _BATCH * BLOCK], dtype)
            found[first : first + _BATCH] = block_scales(_largest(words), self)
        return found

    def check_stats(self, stats: npt.NDArray[Any], dtype: DType) -> None:
        """Stats are scale bytes, where scales are agreed on."""
        if not self.agrees:
            super().check_stats(stats, dtype)
        check_vector(stats, np.uint8, f"one of each block of {BLOCK}")


SPEC = Mx


def block_scales(magnitudes: Bits, spec: Mx) -> npt.NDArray[np.uint8]:
    """Scale bytes of blocks from their largest magnitudes, the bits of float32 values.

    Where scales are agreed on, those of "ceil".
    """
    element = spec.format
    exponents, fractions = split(magnitudes)
    scales = exponents - np.int32(element.emax)
    if spec.scale_rule != "floor":
        scales += (fractions > element.max_fraction).astype(np.int32)
    scales = np.clip(scales, 0, MAX_SCALE)
    # Infinity counts as 2^128, which int8 cannot reach with any scale.
    scales = np.where(magnitudes == INFINITY, NAN_SCALE - element.emax, scales)
    return np.where(magnitudes > INFINITY, NAN_SCALE, scales).astype(np.uint8)


def encode_chunk(
    spec: Mx,
    chunk: Chunk,
    bits: Bits,
    *,
    stats: npt.NDArray[Any] | None = None,
    key: Key | None = None,
    threads: int = 1,
    kept: Chunk | None = None,
) -> ChunkResult:
    """Encode the chunk's elements `bits` (1-D) into its static part.

    Where scales are agreed on and there are no `stats`, a sum has those of `kept`.
    """
    given = None if stats is None else agreed_scales(chunk, stats)
    if kept is not None and spec.agrees:
        given = static_views(kept)[1]
    _encode(spec, chunk, bits, given)
    return ChunkResult(0)


def _encode(spec: Mx, chunk: Chunk, bits: Bits, given: Bytes | None) -> None:
    element = spec.format
    payload, scales = static_views(chunk)
    for first in range(0, scales.size, _BATCH):
        part = bits[first * BLOCK :][: _BATCH * BLOCK]
        words = _words(part, chunk.dtype)
        tops = _largest(words)
        here = block_scales(tops, spec)
        if given is not None:
            kept = given[first : first + _BATCH]
            here = np.where((tops < INFINITY) | (kept == NAN_SCALE), kept, here)
        nan = here[:, None] == NAN_SCALE
        words = np.where(nan, np.uint32(0), words)
        codes = round_codes(words, here[:, None].astype(np.int32), element)
        scales[first : first + here.size] = here
        packed = pack(codes.reshape(-1)[: part.size], element)
        payload[first * BLOCK * element.bits // 8 :][: packed.size] = packed


def _words(bits: Bits, dtype: DType) -> Bits:
    """float32 bits of elements, shape (blocks, BLOCK), with zeros behind the last."""
    words = np.zeros((-(-bits.size // BLOCK), BLOCK), np.uint32)
    words.reshape(-1)[: bits.size] = widen(bits, dtype)
    return words


def _largest(words: Bits) -> Bits:
    """Largest magnitudes of blocks."""
    largest: Bits = (words & np.uint32(0x7FFFFFFF)).max(axis=1)
    return largest


def agreed_scales(chunk: Chunk, stats: npt.NDArray[Any]) -> Bytes:
    """The scale bytes of a chunk's blocks, of those of the tensor's.

    Where the chunk starts within one of those, its blocks take the larger of that which they start
    in and the next. ValueError for a wrong number.
    """
    blocks = -(-math.prod(chunk.shape) // BLOCK)
    if stats.shape != (blocks,):
        raise ValueError(f"stats have shape {stats.shape}; allowed: ({blocks},) for {chunk.shape}")
    at = chunk.first // BLOCK + np.arange(-(-chunk.nelem // BLOCK))
    scales: Bytes = stats[at]
    if chunk.first % BLOCK:
        scales = np.maximum(scales, stats[np.minimum(at + 1, blocks - 1)])
    return scales


def decode_chunk(
    spec: Mx, chunk: Chunk, out: Bits, start: int = 0, *, threads: int = 1
) -> ChunkDecoded:
    """Decode elements `start` to `start + out.size` of the chunk into `out` (1-D)."""
    element = spec.format
    payload, scales = static_views(chunk)
    values = values_of(element)
    for first in range(0, out.size, _BATCH * BLOCK):
        part = out[first : first + _BATCH * BLOCK]
        at = start + first
        codes = unpack(payload, element, at, at + part.size)
        blocks = scales[np.arange(at, at + part.size) // BLOCK]
        # Exact in float64; beyond float32's range it becomes infinity.
        exact = np.ldexp(values[codes], blocks.astype(np.int32) - 127)
        with np.errstate(over="ignore"):
            words = exact.astype(np.float32).view(np.uint32)
        words = np.where(blocks == NAN_SCALE, np.uint32(0x7FFFFFFF), words)
        part[:] = narrow(words, chunk.dtype)
    return ChunkDecoded()


def static_views(chunk: Chunk) -> tuple[Bytes, Bytes]:
    """The chunk's payload section, and its scale bytes."""
    at = chunk.sections[0].nbytes
    return chunk.static[:at], chunk.static[at:][: -(-chunk.nelem // BLOCK)]
