# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Numba form of formats/checksum.py: the same sums, at memory speed."""

from __future__ import annotations

import numpy as np

from ..numba_cache import cached
from .checksum import KEY_STEP, MASK64

_STEP = np.uint32(KEY_STEP)
_ONE = np.uint32(1)


@cached(nogil=True)
def sum_words(words, first_word):
    """Keyed sum of whole words (uint32) whose first is word `first_word` of the part."""
    total = np.uint64(0)
    key = np.uint32(np.uint32(first_word) * _STEP + _ONE)
    for i in range(words.size):
        total += np.uint64(words[i]) * np.uint64(np.uint32(key + np.uint32(np.uint32(i) * _STEP)))
    return total


@cached(nogil=True)
def sum_bytes(data, first_word):
    """Keyed sum of `data` (uint8), its last partial word padded with zeros."""
    whole = data.size // 4
    total = sum_words(data[: 4 * whole].view(np.uint32), first_word)
    last = np.uint64(0)
    for i in range(4 * whole, data.size):
        last |= np.uint64(data[i]) << np.uint64(8 * (i - 4 * whole))
    key = np.uint64(np.uint32(np.uint32(first_word + whole) * _STEP + _ONE))
    return total + last * key


def words_sum(data, first_word: int = 0) -> int:
    """See `checksum.words_sum`."""
    return int(sum_bytes(data, first_word)) & MASK64
