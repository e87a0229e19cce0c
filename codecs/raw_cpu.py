# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""raw on the CPU: one pass that copies and sums, block by block while the bytes are in cache."""

from __future__ import annotations

import numpy as np

from ..formats.checksum import MASK64
from .common.base import Bits, Chunk, ChunkResult
from .common.checksum_cpu import words_sum as sum_of
from .common.driver_cpu import (
    Decoder,
    Encoder,
    Given,
    decode_by,
    encode_by,
)
from .raw import Raw

_BLOCK = 1 << 17


def _copy_and_sum(source: Bits, target: Bits, first_word: int) -> int:
    total = 0
    for at in range(0, source.size, _BLOCK):
        block = source[at : at + _BLOCK]
        total += sum_of(block, first_word + at // 4)
        target[at : at + _BLOCK] = block
    return total


def encoder(spec: Raw, chunk: Chunk, given: Given) -> Encoder:
    """What encodes a chunk."""
    size = chunk.dtype.itemsize

    def encode(x: Bits, start: int) -> int:
        data = x.view(np.uint8)
        target = chunk.static[start * size :][: data.size]
        return _copy_and_sum(data, target, start * size // 4)

    def finish(sums: list[int]) -> ChunkResult:
        return ChunkResult(0, sum(sums) & MASK64)

    return Encoder(lambda start, stop: encode, _BLOCK // size, finish)


def decoder(spec: Raw, chunk: Chunk, start: int, stop: int, summed: bool = False) -> Decoder:
    """What decodes elements `start` to `stop` of a chunk."""
    size, used = chunk.dtype.itemsize, chunk.nelem * chunk.dtype.itemsize
    sums: list[int] = []

    def decode(out: Bits, at: int) -> None:
        data = out.view(np.uint8)
        source = chunk.static[at * size :][: data.size]
        if summed:
            sums.append(_copy_and_sum(source, data, at * size // 4))
        else:
            data[:] = source

    def words_sum() -> int:
        whole = used // 4 * 4
        padding = chunk.static[whole:].copy()
        padding[: used - whole] = 0
        return (sum(sums) + sum_of(padding, whole // 4)) & MASK64

    return Decoder(decode, _BLOCK // size, words_sum=words_sum if summed else None)


encode_chunk = encode_by(encoder)
decode_chunk = decode_by(decoder)
