"""The Walsh-Hadamard transform of blocks, in NumPy; additions in the order of the codecs' pages."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


def rotate(t: Floats) -> None:
    """The transform of each row of `t`, shape (blocks, 2^k), in place and without its factor."""
    h = 1
    while h < t.shape[1]:
        pairs = t.reshape(-1, 2, h)
        difference = pairs[:, 0] - pairs[:, 1]
        pairs[:, 0] += pairs[:, 1]
        pairs[:, 1] = difference
        h *= 2
