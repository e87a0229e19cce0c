"""Zero the entries of least magnitude, exactly as many as asked for. TAGC, section 3.2."""

from __future__ import annotations

import importlib
import math
from fractions import Fraction
from typing import Any

import numpy as np

from . import arrays


def sparsify(x: Any, theta: float) -> tuple[Any, Any]:
    """Cut a float array in two: at least a share `theta` of the first is zero, both add up to `x`.

    Of n elements the first array keeps the n - ceil(theta * n) of the largest magnitudes, among
    equal ones those that come first in C order; the second, the residual to add to the next step's
    gradient, has the others. A NaN counts as largest. `x`, of NumPy or PyTorch and any shape, is
    left alone; PyTorch's stays on its device and waits for nothing.

    Raises TypeError for other arrays or dtypes, ValueError if `theta` is not from 0 to 1.
    """
    if not 0 <= theta <= 1:
        raise ValueError(f"theta is {theta!r}; allowed: 0 to 1")
    info = arrays.describe(x)
    if not info.dtype.is_float or info.library not in ("numpy", "torch"):
        raise TypeError(
            f"x is {info.dtype.name} of {info.library}; allowed: floats of numpy or torch"
        )
    n = math.prod(info.shape)
    # The share as it is written: 0.9 of 10 elements are 9, though the float is above 0.9.
    keep = n - math.ceil(Fraction(str(float(theta))) * n)
    if info.library == "torch":
        torch = importlib.import_module("torch")
        width = 8 * info.dtype.itemsize
        flat = x.detach().contiguous().view(-1)
        magnitudes = flat.view(getattr(torch, f"int{width}")) & (1 << width - 1) - 1
        kept = _largest_torch(torch, magnitudes, keep).view(x.shape)
        return torch.where(kept, x, 0), torch.where(kept, 0, x)
    bits = np.ascontiguousarray(x).reshape(-1).view(info.dtype.bits)
    magnitudes = bits & info.dtype.bits.type((1 << 8 * info.dtype.itemsize - 1) - 1)
    kept = _largest(magnitudes, keep).reshape(info.shape)
    zero = np.zeros((), info.dtype.numpy)
    return np.where(kept, x, zero), np.where(kept, zero, x)


def _largest(magnitudes: Any, keep: int) -> Any:
    if keep == 0:
        return np.zeros(magnitudes.size, bool)
    least = np.partition(magnitudes, magnitudes.size - keep)[magnitudes.size - keep]
    kept = magnitudes > least
    ties = np.flatnonzero(magnitudes == least)
    kept[ties[: keep - np.count_nonzero(kept)]] = True
    return kept


def _largest_torch(torch: Any, magnitudes: Any, keep: int) -> Any:
    if magnitudes.device.type == "cpu":
        # Several times as fast as kthvalue.
        return torch.from_numpy(_largest(magnitudes.numpy(), keep))
    if keep == 0:
        return torch.zeros(magnitudes.shape, dtype=torch.bool, device=magnitudes.device)
    least = torch.kthvalue(magnitudes, magnitudes.numel() - keep + 1).values
    above, ties = magnitudes > least, magnitudes == least
    return above | ties & (ties.cumsum(0) <= keep - above.sum())
