"""raw: the tensor's bytes as they are. specs/raw.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from ..formats.codec_ids import CODEC_IDS
from ..formats.dtypes import DTYPES, DType
from ..formats.errors import FormatError
from ..formats.header import SECTION_KINDS, Section, align
from .common.base import Bits, Chunk, ChunkDecoded, ChunkResult, CodecSpec, Key, Layout


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

    def layout(self, dtype: DType, nelem: int) -> Layout:
        """One static section with the chunk's bytes."""
        return Layout((Section(SECTION_KINDS["payload"], align(nelem * dtype.itemsize)),))

    def static_used(
        self, dtype: DType, nelem: int, sections: tuple[Section, ...]
    ) -> tuple[tuple[int, int], ...]:
        """See `CodecSpec.static_used`."""
        return ((0, nelem * dtype.itemsize),)

    @property
    def weighed_unit(self) -> int:
        """See `CodecSpec.weighed_unit`."""
        return 1

    def max_chunk_nelem(self, dtype: DType) -> int:
        """A section entry counts 128-byte blocks in 32 bits."""
        return ((1 << 39) - 128) // dtype.itemsize

    @classmethod
    def unpack_params(cls, data: bytes) -> Raw:
        """Raw has no parameters."""
        if data:
            raise FormatError("bad_header", f"raw takes no parameters, found {len(data)} bytes")
        return cls()


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
