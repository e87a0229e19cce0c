"""Digests of what collectives move without checksums: one sum on NumPy, PyTorch, host and GPU."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from ... import arrays
from ...formats.dtypes import BY_NAME
from . import tensors

#: Odd numbers below 2^63 that spread the factors of the sum over 64 bits.
_GOLDEN = 0x1E3779B97F4A7C15
_MIX = 0x3F58476D1CE4E5B9
#: Elements that are multiplied at once, 8 bytes each: on the host as many as caches hold.
_PIECE_GPU, _PIECE_HOST = 1 << 24, 1 << 14


def content_digests(x: Any, counts: Sequence[int]) -> Any:
    """Digests of parts of `counts[k]` elements of the contiguous array `x`: int64, (len(counts),).

    A digest is the sum of the elements, as signed integers of their size, times odd factors that
    depend on the place alone, modulo 2^64: as the checksum of specs/buffer.md, it finds every
    change of one element and every two that trade places, and misses other damage once in 2^64.
    It is where `x` is, and nothing waits for it.
    """
    size = arrays.describe(x).dtype.itemsize
    words = tensors.view(x, BY_NAME[f"int{8 * min(size, 8)}"])
    # complex128 has two words for each element.
    each = max(1, size // 8)
    if len(set(counts)) == 1:
        return _of_rows(words.reshape(len(counts), counts[0] * each))
    found = tensors.empty((len(counts),), BY_NAME["int64"], words)
    at = 0
    for k, count in enumerate(counts):
        part = words[at : at + count * each]
        found[k : k + 1] = _of_rows(part.reshape(1, -1))
        at += count * each
    return found


def content_digest(x: Any) -> Any:
    """The digest of a whole contiguous array: int64, shape (1,)."""
    return content_digests(x, [math.prod(x.shape)])


def _of_rows(rows: Any) -> Any:
    """Of integers, shape (m, n), the digest of each row, int64, shape (m,)."""
    m, n = rows.shape
    step = max(1, (_PIECE_GPU if tensors.is_cuda(rows) else _PIECE_HOST) // max(1, m))
    total = tensors.empty((m,), BY_NAME["int64"], rows)
    tensors.fill(total, 0)
    for start in range(0, n, step):
        stop = min(start + step, n)
        # Numbers that are too large wrap around, as sums modulo 2^64 are to.
        with np.errstate(over="ignore"):
            total += (rows[:, start:stop] * _factors(start, stop, rows)).sum(1)
    return total


def _factors(start: int, stop: int, like: Any) -> Any:
    """Odd int64 factors of places `start` to `stop`, on the device of `like`."""
    if tensors.is_torch(like):
        torch = sys.modules["torch"]
        places = torch.arange(start + 1, stop + 1, dtype=torch.int64, device=like.device)
    else:
        places = np.arange(start + 1, stop + 1, dtype=np.int64)
    mixed = places * _GOLDEN
    return (mixed ^ (mixed >> 32)) * _MIX | 1
