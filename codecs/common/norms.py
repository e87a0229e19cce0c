"""Energies of blocks of elements, the same bits on every backend, in NumPy.

Squares of single precision are exact in double precision; they are added by halves, as the pages
of the codecs that measure norms say.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ...formats.dtypes import DType
from .base import Bits, check_vector
from .minifloat import widen

Doubles = npt.NDArray[np.float64]

_BATCH_NELEM = 1 << 18


def energies(bits: Bits, dtype: DType, block: int) -> Doubles:
    """Sums of squares of blocks of 2^k elements, shape (blocks,); the last is filled up with zeros.

    Infinity where an element is a NaN or infinite.
    """
    found = np.empty(-(-bits.size // block), np.float64)
    batch = max(_BATCH_NELEM // block, 1)
    for first in range(0, found.size, batch):
        part = bits[first * block : (first + batch) * block]
        rows = np.zeros((-(-part.size // block), block), np.float64)
        with np.errstate(invalid="ignore"):
            rows.reshape(-1)[: part.size] = widen(part, dtype).view(np.float32)
        found[first : first + batch] = sum_rows(rows * rows)
    found[np.isnan(found)] = np.inf
    return found


def sum_rows(rows: Doubles) -> Doubles:
    """Sums of the rows, shape (rows, 2^k), by halves."""
    while rows.shape[1] > 1:
        half = rows.shape[1] // 2
        rows = rows[:, :half] + rows[:, half:]
    return rows[:, 0]


def total(energy: Doubles) -> float:
    """The sum of all, filled up with zeros to a power of two, by halves."""
    row = np.zeros((1, 1 << max(energy.size - 1, 0).bit_length()), np.float64)
    row[0, : energy.size] = energy
    return float(sum_rows(row)[0])


def of_chunk(
    norms: npt.NDArray[np.float32], first: int, blocks: int, block: int
) -> npt.NDArray[np.float32]:
    """Of each of a chunk's blocks the norm, of those of the tensor's blocks.

    The chunk starts at element `first`. A block on two of the tensor's takes the larger.
    """
    at = first // block + np.arange(blocks)
    found: npt.NDArray[np.float32] = norms[at]
    if first % block:
        found = np.maximum(found, norms[np.minimum(at + 1, norms.size - 1)])
    return found


def check(norms: npt.NDArray[Any], what: str) -> None:
    """Raise ValueError unless `norms` are float32, 1-D, none negative or a NaN; `what` of."""
    check_vector(norms, np.float32, what)
    if not (norms >= 0).all():
        raise ValueError("stats are negative or NaN; allowed: norms, as measure() gives them")
