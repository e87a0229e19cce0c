"""Sums of tensors in NumPy: the reference of what every backend gives.

A *sum* has terms: chunks of one plan, and at most one local tensor, in an order. A term counts as
what `decode` gives of it, rounded to the dtype of the plan; a local tensor as it is. The first two
terms are added, then the third to their sum, and so on: nothing is added to a zero. The result is
multiplied by `scale`, if there is one, and then rounded once, to nearest even, to the dtype of the
plan or to float32. All before that is float32, or float64 if the plan's dtype is float64. Every NaN
becomes the quiet, positive one of the dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ...formats.dtypes import BY_NAME, DType
from .base import Bits
from .minifloat import WIDENED, narrow, widen

Values = npt.NDArray[Any]
FLOAT32 = BY_NAME["float32"]


class Damaged(Exception):
    """A chunk's payload is wrong.

    Attributes:
        problem: What is wrong.
        term: Number of the term of a sum.
    """

    def __init__(self, problem: str, term: int = 0) -> None:
        super().__init__(problem)
        self.problem, self.term = problem, term


def wide_dtype(dtype: DType) -> np.dtype[Any]:
    """The dtype that elements of `dtype` are summed in."""
    return np.dtype(np.float64 if dtype.name == "float64" else np.float32)


def dtype_of(bits: Bits, dtype: DType) -> DType:
    """The dtype of a term of a sum of `dtype`: that, or float32, as its elements are as wide."""
    return dtype if bits.dtype == dtype.bits else FLOAT32


def widened(bits: Bits, dtype: DType) -> Values:
    """Elements as what they are summed in, shape as `bits`."""
    if dtype.name in WIDENED:
        return widen(bits, dtype).view(np.float32)
    return bits.view(dtype.numpy).astype(wide_dtype(dtype))


def rounded(values: Values, dtype: DType) -> Bits:
    """Element bits nearest to `values`, float32 or float64, shape as they have."""
    if dtype.name in WIDENED and values.dtype == np.float32:
        return narrow(values.view(np.uint32), dtype)
    with np.errstate(all="ignore"):
        quiet = np.where(np.isnan(values), values.dtype.type(np.nan), values)
        return quiet.astype(dtype.numpy).view(dtype.bits)


def sum_of(terms: Sequence[Bits], dtype: DType, scale: float | None, target: DType) -> Bits:
    """The sum of terms of a plan of `dtype`, as elements of `target`; see this module.

    Args:
        terms: Element bits, of one shape: of `dtype`, or of float32.
        dtype: The dtype of the plan.
        scale: What the sum is multiplied by, or None.
        target: `dtype` or float32.
    """
    wide = wide_dtype(dtype)
    with np.errstate(all="ignore"):
        values = [widened(bits, dtype_of(bits, dtype)).astype(wide) for bits in terms]
        total = values[0]
        for other in values[1:]:
            total = total + other
        if scale is not None:
            total = total * wide.type(scale)
    return rounded(total, target)
