# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""raw on the CPU: one pass that copies and sums, block by block while the bytes are in cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..formats.checksum import MASK64
from .common.base import Bits, Chunk, ChunkDecoded, ChunkResult, Key
from .common.checksum_cpu import words_sum as sum_of
from .common.threads import run, spans
from .raw import Raw

_BLOCK = 1 << 17


def _copy_and_sum(source: Bits, target: Bits, first: int, last: int) -> int:
    total = 0
    for at in range(first * _BLOCK, last * _BLOCK, _BLOCK):
        block = source[at : at + _BLOCK]
        total += sum_of(block, at // 4)
        target[at : at + _BLOCK] = block
    return total


def _spanned(source: Bits, target: Bits, threads: int) -> int:
    cuts = spans(-(-source.size // _BLOCK), source.size, threads)
    return sum(run(_copy_and_sum, [(source, target, *cut) for cut in cuts])) & MASK64


def encode_chunk(
    spec: Raw,
    chunk: Chunk,
    bits: Bits,
    *,
    stats: npt.NDArray[Any] | None = None,
    key: Key | None = None,
    threads: int = 1,
) -> ChunkResult:
    """See `raw.encode_chunk`."""
    data = bits.view(np.uint8)
    return ChunkResult(0, _spanned(data, chunk.static[: data.size], threads))


def decode_chunk(
    spec: Raw, chunk: Chunk, out: Bits, start: int = 0, *, threads: int = 1
) -> ChunkDecoded:
    """See `raw.decode_chunk`."""
    data = out.view(np.uint8)
    source = chunk.static[start * chunk.dtype.itemsize :][: data.size]
    words_sum = _spanned(source, data, threads)
    if out.size != chunk.nelem:
        return ChunkDecoded()
    whole = data.size // 4 * 4
    padding = chunk.static[whole:].copy()
    padding[: data.size - whole] = 0
    words_sum += sum_of(padding, whole // 4)
    return ChunkDecoded(None, words_sum & MASK64)
