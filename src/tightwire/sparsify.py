"""Set the entries of least magnitude to zero, exactly as many as requested. TAGC, section 3.2."""

from __future__ import annotations

import importlib
import math
from fractions import Fraction
from numbers import Real
from typing import Any

import numpy as np

from . import arrays
from .codecs.common.float_mode import default_floats
from .formats.dtypes import BY_NAME, DType


def sparsify(x: Any, theta: float) -> tuple[Any, Any]:
    """Split a float array into its largest entries and a residual; both add up to ``x``.

    Source: TAGC, section 3.2. Of n elements the first result keeps the ``n - ceil(theta * n)`` of
    the largest magnitude; among equal ones those that come first in C order. The residual has the
    others, and is what to add to the gradient of the next step. A NaN counts as largest. ``x`` is
    not changed. A tensor stays on its device, nothing waits for it, and the results are not part of
    an autograd graph.

    Args:
        x: A float array of NumPy or PyTorch, of any shape.
        theta: Share of the entries to set to zero, 0 to 1.

    Returns:
        The kept entries and the residual, both with the shape and dtype of ``x``.

    Raises:
        TypeError: If ``x`` is of another library or dtype, or ``theta`` is not a number.
        ValueError: If ``theta`` is not from 0 to 1.

    Example:
        >>> import numpy as np
        >>> from tightwire.sparsify import sparsify
        >>> sparsify(np.array([1.0, -3.0, 2.0, 0.5]), 0.5)
        (array([ 0., -3.,  2.,  0.]), array([1. , 0. , 0. , 0.5]))
    """
    check_theta(theta)
    info = arrays.describe(x)
    if not info.dtype.is_float or info.library not in ("numpy", "torch"):
        raise TypeError(
            f"x is {info.dtype.name} of {info.library}; allowed: floats of numpy or torch"
        )
    n = math.prod(info.shape)
    keep = kept(theta, n)
    if info.library == "torch":
        torch = importlib.import_module("torch")
        x = x.detach()
        flat = x.contiguous().view(-1)[None]
        kernels = _kernels(flat, info.dtype)
        if kernels is not None:
            with kernels.on(flat.device):
                rest = torch.empty_like(flat)
                sent, _ = kernels.cut(flat, keep, info.dtype, rest=rest, what=kernels.OTHERS)
            return sent.view(x.shape), rest.view(x.shape)
        stays = _largest_torch(torch, flat[0], info.dtype, keep).view(x.shape)
        return torch.where(stays, x, 0), torch.where(stays, 0, x)
    bits = np.ascontiguousarray(x).reshape(-1).view(info.dtype.bits)
    magnitudes = bits & info.dtype.bits.type((1 << 8 * info.dtype.itemsize - 1) - 1)
    stays = _largest(magnitudes, keep).reshape(info.shape)
    zero = np.zeros((), info.dtype.numpy)
    return np.where(stays, x, zero), np.where(stays, zero, x)


def sparsify_rows(x: Any, theta: float, cells: DType, rest: Any = None) -> tuple[Any, Any]:
    """What `sparsify` keeps of each row of a tensor, rounded to `cells`; and how many there are.

    `x` is contiguous and float32, shape (rows, m); `rest`, where it is given, of this shape or `x`
    itself, gets the residual: x - what is kept, with zeros for NaN and infinities. The second
    result is int64, shape (): entries that are not zero. A tensor on a GPU stays there, and nothing
    waits for it.
    """
    torch = importlib.import_module("torch")
    keep, dtype = kept(theta, x.shape[1]), BY_NAME["float32"]
    kernels = _kernels(x, dtype)
    if kernels is not None:
        what = kernels.NOTHING if rest is None else kernels.ROUNDING
        with kernels.on(x.device):
            sent, counts = kernels.cut(x, keep, dtype, cell=cells, rest=rest, what=what)
        return sent, counts.sum()
    sent = torch.zeros_like(x)
    for row, part in zip(x, sent, strict=True):
        here = _largest_torch(torch, row, dtype, keep)
        torch.where(here, row, part, out=part)
    sent = sent.to(getattr(torch, cells.name)).float()
    if rest is not None:
        torch.sub(x, sent, out=rest).nan_to_num_(0.0, 0.0, 0.0)
    return sent, torch.count_nonzero(sent)


def check_theta(theta: Any, more: str = "") -> None:
    """Raise TypeError if `theta` is not a number, ValueError if it is not from 0 to 1.

    `more` says what else is allowed.
    """
    if isinstance(theta, bool) or not isinstance(theta, Real):
        raise TypeError(f"theta is {theta!r}; allowed: a number from 0 to 1{more}")
    if not 0 <= float(theta) <= 1:
        raise ValueError(f"theta is {theta!r}; allowed: 0 to 1{more}")


@default_floats()
def kept(theta: float, n: int) -> int:
    """How many of n elements are not zeroed."""
    # The share as it is written: 0.9 of 10 elements are 9, though the float is above 0.9.
    return n - math.ceil(Fraction(str(float(theta))) * n)


def _kernels(x: Any, dtype: DType) -> Any:
    """The kernels for a tensor, None if there are none where it is."""
    if not x.is_cuda:
        return None
    try:
        from . import sparsify_triton
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        return None
    return sparsify_triton if sparsify_triton.supports(dtype) else None


def _largest(magnitudes: Any, keep: int) -> Any:
    if keep == 0:
        return np.zeros(magnitudes.size, bool)
    least = np.partition(magnitudes, magnitudes.size - keep)[magnitudes.size - keep]
    kept = magnitudes > least
    ties = np.flatnonzero(magnitudes == least)
    kept[ties[: keep - np.count_nonzero(kept)]] = True
    return kept


def _largest_torch(torch: Any, x: Any, dtype: DType, keep: int) -> Any:
    """Which entries of a tensor of shape (n,) are kept, bool."""
    width = 8 * dtype.itemsize
    magnitudes = x.view(getattr(torch, f"int{width}")) & (1 << width - 1) - 1
    if x.device.type == "cpu":
        # Several times as fast as kthvalue.
        return torch.from_numpy(_largest(magnitudes.numpy(), keep))
    if keep == 0:
        return torch.zeros(magnitudes.shape, dtype=torch.bool, device=magnitudes.device)
    least = torch.kthvalue(magnitudes, magnitudes.numel() - keep + 1).values
    above, ties = magnitudes > least, magnitudes == least
    return above | ties & (ties.cumsum(0) <= keep - above.sum())
