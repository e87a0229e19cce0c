"""How far a decoded array is from its original: what lossy codecs are measured by."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from . import arrays

_BATCH = 1 << 20


class Error(NamedTuple):
    """What `error` found.

    `vnmse` is sum((x - y)^2) / sum(x^2), the vector-normalised mean squared error of DynamiQ and
    THC; `max` the largest |x - y|; `cosine` the cosine of the angle between x and y.
    """

    vnmse: float
    max: float
    cosine: float


def error(x: Any, y: Any) -> Error:
    """Compare `y` with the original `x`: arrays of any library, one shape and real dtypes.

    Computed on the host in float64. Where both are all zero the vNMSE is 0 and the cosine 1; where
    only `x` is, infinity and 0. Not-a-number or infinite elements make the results NaN, but for
    those that are the same infinity in both. Empty arrays are equal. Raises TypeError for complex
    numbers and ValueError for shapes that differ.
    """
    infos = arrays.describe(x), arrays.describe(y)
    for info in infos:
        if info.dtype.name.startswith("complex"):
            raise TypeError(f"error() was given {info.dtype.name}; allowed: real dtypes")
    if infos[0].shape != infos[1].shape:
        raise ValueError(f"x has shape {infos[0].shape}, y {infos[1].shape}")
    a, b = (
        arrays.host_bits(v, info.dtype).view(info.dtype.numpy)
        for v, info in zip((x, y), infos, strict=True)
    )
    squares = xx = yy = xy = largest = 0.0
    for at in range(0, a.size, _BATCH):
        with np.errstate(invalid="ignore", over="ignore"):
            u, v = (w[at : at + _BATCH].astype(np.float64) for w in (a, b))
            same = np.isinf(u) & (u == v)
            u[same] = v[same] = 0.0
            apart = np.abs(u - v)
            squares += float(apart @ apart)
            xx, yy, xy = xx + float(u @ u), yy + float(v @ v), xy + float(u @ v)
            largest = float(np.maximum(largest, apart.max()))
    lengths = math.sqrt(xx) * math.sqrt(yy)
    if squares == 0.0:
        return Error(0.0, largest, 1.0)
    vnmse = squares / xx if xx != 0.0 else math.inf
    return Error(vnmse, largest, xy / lengths if lengths != 0.0 else 0.0)
