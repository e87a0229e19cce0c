"""Two chunks of delta in the form overwrite, one after the other, as one: without the base."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..formats.dtypes import DType
from .common.base import Bits, Bytes, Chunk, ChunkResult
from .delta import (
    OFFSETS_PROBLEM,
    TILE,
    BadTileError,
    Flags,
    Reader,
    encode_new,
    ends_of,
    index_of,
    plain_tile,
    read_new,
)


class _New(NamedTuple):
    """What a tile says is new: which elements, and their bits one behind the other."""

    changed: Flags
    bits: Bits


def fold_chunk(target: Chunk, first: Chunk, second: Chunk) -> ChunkResult:
    """Write to `target` what `second` makes of what `first` makes of any base.

    Raises `BadTileError` if one of them is damaged, ValueError if only the base tells how a tile is
    to be stored.
    """
    index = index_of(target)
    index.digests[:] = index_of(first).digests[0], index_of(second).digests[1]
    used = 0
    ends = [ends_of(chunk, 0, chunk.nelem) for chunk in (first, second)]
    for number in range(index.offsets.size):
        nelem = min(TILE, target.nelem - number * TILE)
        words = []
        for chunk, here in zip((first, second), ends, strict=True):
            if here is None:
                raise BadTileError(OFFSETS_PROBLEM)
            words.append(chunk.dynamic[here[number] : here[number + 1]])
        folded = _fold_tile(target.dtype, nelem, *words)
        index.offsets[number] = used // 4
        slot = target.dynamic[used : used + folded.size]
        slot[:] = folded[: slot.size]
        used += folded.size
    return ChunkResult(used)


def _fold_tile(dtype: DType, nelem: int, first: Bytes, second: Bytes) -> Bytes:
    old, new = (_read(dtype, nelem, words) for words in (first, second))
    changed = old.changed | new.changed
    if not changed.any():
        return np.empty(0, np.uint8)
    bits = np.zeros(nelem, dtype.bits)
    bits[old.changed] = old.bits
    bits[new.changed] = new.bits
    coded = encode_new(dtype, bits, changed)
    plain = plain_tile(bits)
    if coded.size <= plain.size:
        return coded
    if not changed.all():
        raise ValueError("a tile has to be stored plain. Needed: base")
    return plain


def _read(dtype: DType, nelem: int, words: Bytes) -> _New:
    """Raises `BadTileError`."""
    if not words.size:
        return _New(np.zeros(nelem, bool), np.empty(0, dtype.bits))
    source = Reader(words)
    if source.number(1):
        if source.number(31):
            raise BadTileError("the first word of a plain tile")
        found = _New(np.ones(nelem, bool), source.values(nelem * dtype.itemsize).view(dtype.bits))
    else:
        found = _New(*read_new(source, dtype, nelem))
    source.end()
    return found
