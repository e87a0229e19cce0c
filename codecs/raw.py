"""raw: the tensor's bytes as they are. specs/raw.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from ..formats.codec_ids import CODEC_IDS
from ..formats.dtypes import DTYPES, DType
from .common.base import Bits, Chunk, ChunkDecoded, ChunkResult, CodecSpec, Key
from .common.sections import Array


@dataclass(frozen=True)
class Raw(CodecSpec):
    """raw: stores any dtype unchanged, with the checksum, shape and chunks of every other codec.

    No parameters. Lossless.

    Size: the bytes of the tensor, padded to 128 for each chunk.

    Source: the format itself (specs/raw.md).
    """

    name: ClassVar[str] = "raw"
    id: ClassVar[int] = CODEC_IDS["raw"][0]
    dtypes: ClassVar[tuple[str, ...]] = tuple(d.name for d in DTYPES)
    weighed_unit: ClassVar[int] = 1

    def arrays(self, dtype: DType, nelem: int) -> tuple[Array, ...]:
        """The chunk's elements."""
        return (Array("payload", 8 * dtype.itemsize, nelem),)

    def max_chunk_nelem(self, dtype: DType) -> int:
        """See `CodecSpec.max_chunk_nelem`."""
        return self.max_nelem // dtype.itemsize

    def accepts(self, dtype: DType, nelem: int) -> bool:
        """Always: this codec stores what others do not accept."""
        return True


SPEC = Raw


def encode_chunk(
    spec: Raw,
    chunk: Chunk,
    bits: Bits,
    *,
    stats: npt.NDArray[Any] | None = None,
    key: Key | None = None,
    threads: int = 1,
) -> ChunkResult:
    """Copy the chunk's elements `bits` (1-D) to its static part."""
    data = bits.view(np.uint8)
    chunk.static[: data.size] = data
    return ChunkResult(0)


def decode_chunk(
    spec: Raw, chunk: Chunk, out: Bits, start: int = 0, *, threads: int = 1
) -> ChunkDecoded:
    """Copy elements `start` to `start + out.size` of the chunk to `out` (1-D)."""
    data = out.view(np.uint8)
    data[:] = chunk.static[start * chunk.dtype.itemsize :][: data.size]
    return ChunkDecoded()
