"""nvfp4: 4-bit floats, an 8-bit float scale per 16 of them and one for the tensor. specs/nvfp4.md.

NVIDIA's NVFP4 with the scaling of Transformer Engine. This module holds layout, constants and the
NumPy reference, in float32 operations of a fixed order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from ..formats.codec_ids import CODEC_IDS
from ..formats.dtypes import DType
from ..formats.errors import FormatError
from ..formats.header import SECTION_KINDS, Section, align
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
    Tail,
    tail_of,
)
from .common.minifloat import (
    BY_NAME,
    E4M3_E2M1_RANGE,
    FLT_MAX,
    INFINITY,
    NO_RECIPROCAL,
    SIXTH,
    WIDENED,
    narrow,
    pack,
    payload_nbytes,
    round_codes,
    tail_is_zero,
    unpack,
    values_of,
    widen,
)

BLOCK = 16
ELEMENT, SCALE = BY_NAME["e2m1"], BY_NAME["e4m3"]
#: Bytes in the scales section before the scale codes: the tensor scale (float32), zeros.
SCALES_HEAD = 16
NAN_SCALE = SCALE.nan

TAIL_PROBLEM = "bits behind the last code"
SCALE_PROBLEM = "the tensor scale is not a positive finite number"

_BATCH = 1 << 15


@dataclass(frozen=True)
class Nvfp4(CodecSpec):
    """nvfp4: 4-bit floats (e2m1), an e4m3 scale per 16 elements, a float32 scale per tensor.

    No parameters. Lossy. Takes float16, bfloat16 and float32. ``stats`` is the largest finite
    magnitude of the tensor, as the bits of a float32: int32, shape ``(1,)``, which ranks may reduce
    by maximum.

    Size: 4.5 bits per element.

    Source: NVIDIA's NVFP4, with the scaling of Transformer Engine.
    """

    name: ClassVar[str] = "nvfp4"
    id: ClassVar[int] = CODEC_IDS["nvfp4"][0]
    lossless: ClassVar[bool] = False
    reduce_op: ClassVar[ReduceOp | None] = "max"
    dtypes: ClassVar[tuple[str, ...]] = WIDENED

    def layout(self, dtype: DType, nelem: int) -> Layout:
        """Sections payload (packed codes) and scales (the tensor's, then a byte per block)."""
        payload = Section(SECTION_KINDS["payload"], align(payload_nbytes(ELEMENT, nelem)))
        scales = Section(SECTION_KINDS["scales"], align(SCALES_HEAD + -(-nelem // BLOCK)))
        return Layout((payload, scales))

    def static_used(
        self, dtype: DType, nelem: int, sections: tuple[Section, ...]
    ) -> tuple[tuple[int, int], ...]:
        """See `CodecSpec.static_used`."""
        at = sections[0].nbytes
        codes_at = at + SCALES_HEAD
        used = payload_nbytes(ELEMENT, nelem)
        return (0, used), (at, at + 4), (codes_at, codes_at + -(-nelem // BLOCK))

    def tail(self, nelem: int) -> Tail:
        """See `CodecSpec.tail`."""
        return tail_of(ELEMENT.bits, nelem)

    @property
    def weighed_by_frame(self) -> tuple[int, ...]:
        """The tensor's scale."""
        return (1,)

    def max_chunk_nelem(self, dtype: DType) -> int:
        """That of mx; a section entry counts 128-byte blocks in 32 bits."""
        return (1 << 39) - 128

    def accepts(self, dtype: DType, nelem: int) -> bool:
        """True for floats of at most 32 bits where the sections are smaller than the elements."""
        if not super().accepts(dtype, nelem):
            return False
        coded = sum(s.nbytes for s in self.layout(dtype, nelem).sections)
        return coded < align(nelem * dtype.itemsize)

    @classmethod
    def unpack_params(cls, data: bytes) -> Nvfp4:
        """nvfp4 has no parameters."""
        if data:
            raise FormatError("bad_header", f"nvfp4 takes no parameters, found {len(data)} bytes")
        return cls()

    def measure(self, bits: Bits, dtype: DType) -> npt.NDArray[np.int32] | None:
        """The largest finite magnitude as the bits of a float32, shape (1,)."""
        if dtype.name not in self.dtypes:
            return None
        one = bits.dtype.type
        magnitude = one((1 << 8 * dtype.itemsize - 1) - 1)
        infinity = one(((1 << dtype.exponent) - 1) << dtype.mantissa)
        largest = one(0)
        for start in range(0, bits.size, 1 << 18):
            part = bits[start : start + (1 << 18)] & magnitude
            part[part >= infinity] = 0
            largest = max(largest, part.max())
        return widen(np.array([largest], bits.dtype), dtype).astype(np.int32)

    def check_stats(self, stats: npt.NDArray[Any], dtype: DType) -> None:
        """Stats are one integer, the bits of a finite float32 without sign."""
        if stats.shape != (1,) or stats.dtype.kind not in "iu" or not 0 <= stats[0] < INFINITY:
            allowed = f"one integer from 0 to {INFINITY - 1}"
            raise ValueError(f"stats are {stats!r}; allowed: {allowed}")


SPEC = Nvfp4


def tensor_scale(stats: int) -> np.float32:
    """g, by which the tensor's largest magnitude becomes 448 * 6; `stats` are its bits."""
    largest = np.array([stats], np.uint32).view(np.float32)[0]
    if largest == 0:
        return np.float32(1)
    with np.errstate(over="ignore"):
        return np.float32(min(E4M3_E2M1_RANGE / largest, FLT_MAX))


def encode_chunk(
    spec: Nvfp4,
    chunk: Chunk,
    bits: Bits,
    *,
    stats: npt.NDArray[Any] | None = None,
    key: Key | None = None,
    threads: int = 1,
) -> ChunkResult:
    """Encode the chunk's elements `bits` (1-D) into its static part."""
    if stats is None:
        stats = spec.measure(bits, chunk.dtype)
    assert stats is not None
    payload, g, scales = static_views(chunk)
    g[0] = tensor_scale(int(stats[0]))
    for first in range(0, scales.size, _BATCH):
        part = bits[first * BLOCK :][: _BATCH * BLOCK]
        words = np.zeros((-(-part.size // BLOCK), BLOCK), np.uint32)
        words.reshape(-1)[: part.size] = widen(part, chunk.dtype)
        largest = (words & np.uint32(0x7FFFFFFF)).max(axis=1)
        special = largest >= INFINITY
        largest[special] = 0
        words[special] = 0
        with np.errstate(over="ignore"):
            wanted = largest.view(np.float32) * (g[0] * SIXTH)
            here = round_codes(wanted.view(np.uint32), 127, SCALE)
            scaled = words.view(np.float32) * reciprocals(here, g[0])[:, None]
        codes = round_codes(
            np.clip(scaled, np.float32(-6), np.float32(6)).view(np.uint32), 127, ELEMENT
        )
        scales[first : first + here.size] = np.where(special, NAN_SCALE, here)
        packed = pack(codes.reshape(-1)[: part.size], ELEMENT)
        payload[first * BLOCK // 2 :][: packed.size] = packed
    return ChunkResult(0)


def reciprocals(scales: Bytes, g: np.float32) -> npt.NDArray[np.float32]:
    """What the elements of blocks are multiplied by."""
    steps = values_of(SCALE)[scales].astype(np.float32) / g
    none = steps <= NO_RECIPROCAL
    return np.where(none, FLT_MAX, np.float32(1) / np.where(none, np.float32(1), steps))


def decode_chunk(
    spec: Nvfp4, chunk: Chunk, out: Bits, start: int = 0, *, threads: int = 1
) -> ChunkDecoded:
    """Decode elements `start` to `start + out.size` of the chunk into `out` (1-D)."""
    payload, g, scales = static_views(chunk)
    if not is_tensor_scale(g):
        return ChunkDecoded(SCALE_PROBLEM)
    elements = values_of(ELEMENT).astype(np.float32)
    with np.errstate(over="ignore"):
        steps = values_of(SCALE).astype(np.float32) / g[0]
    for first in range(0, out.size, _BATCH * BLOCK):
        part = out[first : first + _BATCH * BLOCK]
        at = start + first
        codes = unpack(payload, ELEMENT, at, at + part.size)
        blocks = scales[np.arange(at, at + part.size) // BLOCK]
        with np.errstate(over="ignore", invalid="ignore"):
            part[:] = narrow((elements[codes] * steps[blocks]).view(np.uint32), chunk.dtype)
    if start + out.size == chunk.nelem and not tail_is_zero(payload, ELEMENT, chunk.nelem):
        return ChunkDecoded(TAIL_PROBLEM)
    return ChunkDecoded()


def is_tensor_scale(g: npt.NDArray[np.float32]) -> bool:
    """Whether g, shape (1,), is a positive finite number."""
    return 0 < int(g.view(np.uint32)[0]) < INFINITY


def static_views(chunk: Chunk) -> tuple[Bytes, npt.NDArray[np.float32], Bytes]:
    """The chunk's payload section, its tensor scale, shape (1,), and its scale codes."""
    at = chunk.sections[0].nbytes
    scales = chunk.static[at + SCALES_HEAD :][: -(-chunk.nelem // BLOCK)]
    return chunk.static[:at], chunk.static[at : at + 4].view("<f4"), scales
