"""blocks8, a codec for tests: int8 codes, and for each 64 elements a float32 scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from tightwire.codecs.common.base import Bits, Chunk, ChunkDecoded, ChunkResult, CodecSpec
from tightwire.codecs.common.minifloat import WIDENED, narrow, widen
from tightwire.codecs.common.sections import Array
from tightwire.formats.dtypes import DType

BLOCK = 64
ID = 32769


@dataclass(frozen=True)
class Blocks8(CodecSpec):
    """Codes are value / scale to nearest even; the scale of a block is its largest / 127, or 1."""

    name = "blocks8"
    id = ID
    lossless = False
    dtypes = WIDENED
    weighed_unit: ClassVar[int] = 1

    def arrays(self, dtype: DType, nelem: int) -> tuple[Array, ...]:
        return Array("payload", 8, nelem), Array("scales", 32, -(-nelem // BLOCK))

    def accepts(self, dtype: DType, nelem: int) -> bool:
        return dtype.name in self.dtypes  # every size, so that tests have short tensors


SPEC = Blocks8


def encode_chunk(
    spec: Blocks8, chunk: Chunk, bits: Bits, *, stats: Any = None, key: Any = None, threads: int = 1
) -> ChunkResult:
    stored, stored_scales = spec.static_arrays(chunk)
    x = np.zeros((-(-bits.size // BLOCK), BLOCK), np.float32)
    x.reshape(-1)[: bits.size] = widen(bits, chunk.dtype).view(np.float32)
    top = np.abs(x).max(axis=1, initial=0)
    scales = np.where(top > 0, top / np.float32(127), np.float32(1))
    stored.view(np.int8)[:] = np.rint(x / scales[:, None]).reshape(-1)[: bits.size]
    stored_scales.view(np.float32)[:] = scales
    return ChunkResult(0)


def decode_chunk(
    spec: Blocks8, chunk: Chunk, out: Bits, start: int = 0, *, threads: int = 1
) -> ChunkDecoded:
    i = np.arange(start, start + out.size)
    stored, stored_scales = spec.static_arrays(chunk)
    codes, scales = stored.view(np.int8)[i], stored_scales.view(np.float32)[i // BLOCK]
    bad = (codes == -128).any() or not (np.isfinite(scales) & (scales > 0)).all()
    out[:] = narrow((codes.astype(np.float32) * scales).view(np.uint32), chunk.dtype)
    return ChunkDecoded("a code or a scale that no encoder writes" if bad else None)
