"""How far a decoded array is from its original: the measure of lossy codecs."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from . import arrays
from .codecs.common.float_mode import default_floats

_BATCH = 1 << 20
_Array = npt.NDArray[Any]
_Doubles = npt.NDArray[np.float64]


class Error(NamedTuple):
    """The result of ``tightwire.error``.

    Attributes:
        vnmse: ``sum((x - y)^2) / sum(x^2)``, the vector-normalised mean squared error (DynamiQ,
            section 5; THC).
        max: The largest ``|x - y|``.
        cosine: The cosine of the angle between ``x`` and ``y``.
    """

    vnmse: float
    max: float
    cosine: float


@default_floats()
def error(x: Any, y: Any) -> Error:
    """Compare a decoded array with its original.

    Computed on the host in float64, on values that are scaled so that no square overflows or
    underflows. Integers that float64 cannot tell apart are subtracted exactly first. Differences
    above the largest float64 count as infinite.

    Where both arrays are zero, ``vnmse`` is 0 and ``cosine`` 1. Where one is zero, ``cosine`` is 0,
    and if that is ``x``, ``vnmse`` is infinite. Elements that are the same infinity in both count
    as zeros. With any other infinity or NaN all three are NaN. Empty arrays are equal.

    Args:
        x: The original, of any library and real dtype.
        y: The decoded array, of the same shape and any real dtype.

    Returns:
        The three measures.

    Raises:
        TypeError: If a dtype is complex.
        ValueError: If the shapes differ.

    Example:
        >>> import numpy as np
        >>> import tightwire as tw
        >>> x = np.random.default_rng(0).normal(size=4096).astype(np.float32)
        >>> tw.error(x, tw.decode(tw.encode(x, "mx"))).vnmse < 0.001
        True
    """
    infos = arrays.describe(x), arrays.describe(y)
    for info in infos:
        if info.dtype.name.startswith("complex"):
            raise TypeError(f"Expected real dtypes, got {info.dtype.name}")
    if infos[0].shape != infos[1].shape:
        raise ValueError(f"x has shape {infos[0].shape}, y {infos[1].shape}; needed: one shape")
    a, b = (
        arrays.host_bits(v, info.dtype).view(info.dtype.numpy)
        for v, info in zip((x, y), infos, strict=True)
    )
    parts = [slice(at, at + _BATCH) for at in range(0, a.size, _BATCH)]
    tops = np.zeros(3)
    for part in parts:
        found = [np.abs(v).max() for v in _compared(a[part], b[part])]
        tops = np.maximum(tops, found)
    if not np.isfinite(tops[:2]).all():
        return Error(math.nan, math.nan, math.nan)
    # Of powers of two, by which quotients are exact.
    exponents = [int(e) for e in np.frexp(np.minimum(tops, np.finfo(np.float64).max))[1]]
    sums = np.zeros(4)
    for part in parts:
        scaled = zip(_compared(a[part], b[part]), exponents, strict=True)
        u, v, apart = (np.ldexp(w, -e) for w, e in scaled)
        sums += [_dot(u, u), _dot(v, v), _dot(u, v), _dot(apart, apart)]
    return _figures(tops, exponents, *map(float, sums))


def _dot(a: _Doubles, b: _Doubles) -> float:
    # Not BLAS's: its threads have floating-point modes of their own.
    return float((a * b).sum())


def _figures(
    tops: _Doubles, exponents: list[int], xx: float, yy: float, xy: float, squares: float
) -> Error:
    """The figures from sums of squares of values over 2^exponents."""
    largest = float(tops[2])
    if largest == 0.0:
        return Error(0.0, 0.0, 1.0)
    vnmse = math.inf
    if xx:
        vnmse = float(np.ldexp(squares / xx, 2 * (exponents[2] - exponents[0])))
    lengths = math.sqrt(xx) * math.sqrt(yy)
    return Error(vnmse, largest, xy / lengths if lengths else 0.0)


def _compared(a: _Array, b: _Array) -> tuple[_Doubles, _Doubles, _Doubles]:
    """float64 of `a`, of `b` and of their difference; infinities that both have are zeros."""
    u, v = a.astype(np.float64), b.astype(np.float64)
    same = np.isinf(u) & (u == v)
    u[same] = v[same] = 0.0
    if a.dtype.kind in "iu" and b.dtype.kind in "iu":
        # Of one sign they are subtracted modulo 2^64, from the larger; of two nothing cancels.
        m, n = a.astype(np.uint64), b.astype(np.uint64)
        exact = np.where(a > b, m - n, n - m).astype(np.float64)
        return u, v, np.where((a < 0) == (b < 0), exact, u - v)
    return u, v, u - v
