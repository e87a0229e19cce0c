# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Numba form of formats/checksum.py: the same sums, at memory speed."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ...formats.checksum import KEY_STEP, MASK64
from .arrays_cpu import view_as
from .compile_cache import cached, part

_STEP = np.uint32(KEY_STEP)
_ONE = np.uint32(1)


@part(nogil=True)
def add_words(total, words, first_word):
    """`total` and the keyed sum of whole words (uint32), the first word `first_word` of a part."""
    key = np.uint32(np.uint32(first_word) * _STEP + _ONE)
    for i in range(words.size):
        total += np.uint64(words[i]) * np.uint64(np.uint32(key + np.uint32(np.uint32(i) * _STEP)))
    return total


@part(nogil=True)
def sum_part(total, data, first_word):
    """`total` and the keyed sum of `data` (uint8), its last partial word padded with zeros."""
    words = view_as(data, np.uint32)
    total = add_words(total, words, first_word)
    last = np.uint64(0)
    for i in range(4 * words.size, data.size):
        last |= np.uint64(data[i]) << np.uint64(8 * (i - 4 * words.size))
    key = np.uint64(np.uint32(np.uint32(first_word + words.size) * _STEP + _ONE))
    return total + last * key


@cached(nogil=True)
def _sum_bytes(data, first_word):
    return sum_part(np.uint64(0), data, first_word)


def words_sum(data: npt.NDArray[np.uint8], first_word: int = 0) -> int:
    """See `checksum.words_sum`."""
    # Read-only, as some are: one kind of array.
    data = data.view()
    data.flags.writeable = False
    return int(_sum_bytes(data, first_word)) & MASK64
