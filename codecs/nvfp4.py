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
from .common.base import Bits, Bytes, Chunk, ChunkDecoded, ChunkResult, CodecSpec, Key, ReduceOp
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
    round_codes,
    unpack,
    values_of,
    widen,
)
from .common.sections import Array

BLOCK = 16
ELEMENT, SCALE = BY_NAME["e2m1"], BY_NAME["e4m3"]
#: Bytes in the scales section before the scale codes: the tensor scale (float32), zeros.
SCALES_HEAD = 16
NAN_SCALE = SCALE.nan

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
    #: The tensor's scale.
    weighed_by_frame: ClassVar[tuple[int, ...]] = (1,)

    def arrays(self, dtype: DType, nelem: int) -> tuple[Array, ...]:
        """Packed codes; the tensor's scale, and a scale code per block."""
        return (
            Array("payload", ELEMENT.bits, nelem),
            Array("scales", 32, 1),
            Array("scales", SCALE.bits, -(-nelem // BLOCK), at=SCALES_HEAD),
        )

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
    return ChunkDecoded()


def is_tensor_scale(g: npt.NDArray[np.float32]) -> bool:
    """Whether g, shape (1,), is a positive finite number."""
    return 0 < int(g.view(np.uint32)[0]) < INFINITY


def static_views(chunk: Chunk) -> tuple[Bytes, npt.NDArray[np.float32], Bytes]:
    """The chunk's packed codes, its tensor scale, shape (1,), and its scale codes."""
    payload, g, scales = Nvfp4().static_arrays(chunk)
    return payload, g.view("<f4"), scales
