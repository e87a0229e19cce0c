"""blocks8, a codec for tests: int8 codes, and for each 64 elements a float32 scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tightwire.codecs.common.base import Bits, Chunk, ChunkDecoded, ChunkResult, CodecSpec, Layout
from tightwire.codecs.common.minifloat import narrow, widen
from tightwire.formats.dtypes import DType
from tightwire.formats.header import SECTION_KINDS, Section, align

BLOCK = 64
ID = 32769


@dataclass(frozen=True)
class Blocks8(CodecSpec):
    """Codes are value / scale to nearest even; the scale of a block is its largest / 127, or 1."""

    name = "blocks8"
    id = ID
    lossless = False
    dtypes = ("bfloat16", "float16", "float32")

    def layout(self, dtype: DType, nelem: int) -> Layout:
        payload, scales = align(nelem), align(-(-nelem // BLOCK) * 4)
        kinds = SECTION_KINDS
        return Layout((Section(kinds["payload"], payload), Section(kinds["scales"], scales)))

    def static_used(
        self, dtype: DType, nelem: int, sections: tuple[Section, ...]
    ) -> tuple[tuple[int, int], ...]:
        at = sections[0].nbytes
        return (0, nelem), (at, at - nelem // -BLOCK * 4)

    @property
    def weighed_unit(self) -> int:
        return 1

    @classmethod
    def unpack_params(cls, data: bytes) -> Blocks8:
        return cls()


SPEC = Blocks8


def encode_chunk(
    spec: Blocks8, chunk: Chunk, bits: Bits, *, stats: Any = None, key: Any = None, threads: int = 1
) -> ChunkResult:
    blocks = -(-bits.size // BLOCK)
    x = np.zeros((blocks, BLOCK), np.float32)
    x.reshape(-1)[: bits.size] = widen(bits, chunk.dtype).view(np.float32)
    top = np.abs(x).max(axis=1, initial=0)
    scales = np.where(top > 0, top / np.float32(127), np.float32(1))
    codes = np.rint(x / scales[:, None]).astype(np.int8).reshape(-1)[: bits.size]
    chunk.static[: bits.size] = codes.view(np.uint8)
    chunk.static[chunk.sections[0].nbytes :][: 4 * blocks] = scales.view(np.uint8)
    return ChunkResult(0)


def decode_chunk(
    spec: Blocks8, chunk: Chunk, out: Bits, start: int = 0, *, threads: int = 1
) -> ChunkDecoded:
    i = np.arange(start, start + out.size)
    at = chunk.sections[0].nbytes
    scales = chunk.static[at : at - chunk.nelem // -BLOCK * 4].view(np.float32)[i // BLOCK]
    codes = chunk.static[i].view(np.int8)
    bad = (codes == -128).any() or not (np.isfinite(scales) & (scales > 0)).all()
    out[:] = narrow((codes.astype(np.float32) * scales).view(np.uint32), chunk.dtype)
    return ChunkDecoded("a code or a scale that no encoder writes" if bad else None)
