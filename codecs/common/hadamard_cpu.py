# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Numba form of codecs/common/hadamard.py: the same sums.

`LANES` blocks go side by side, value i of all of them next to each other, so that every addition is
one of whole vectors and none changes its order.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from .compile_cache import part

I8 = np.int64
LANES = 16

# Distances are constants where these are called, and these become part of their callers: so LLVM
# knows that what is read and written does not overlap.


@part(nogil=True, error_model="numpy", forceinline=True)
def _one_stage(v, distance):
    for at in range(0, v.size, 2 * distance):
        w = v[at : at + 2 * distance]
        for j in range(distance):
            a = w[j]
            b = w[j + distance]
            w[j] = a + b
            w[j + distance] = a - b


@part(nogil=True, error_model="numpy", forceinline=True)
def _two_stages(v, distance):
    for at in range(0, v.size, 4 * distance):
        w = v[at : at + 4 * distance]
        for j in range(distance):
            a = w[j] + w[j + distance]
            b = w[j] - w[j + distance]
            c = w[j + 2 * distance] + w[j + 3 * distance]
            d = w[j + 2 * distance] - w[j + 3 * distance]
            w[j] = a + c
            w[j + distance] = b + d
            w[j + 2 * distance] = a - c
            w[j + 3 * distance] = b - d


@cache
def rotate_by(size):
    """The transform of `LANES` blocks of `size` (32 to 1024) values, without its factor, in place.

    Value i of block `lane` is `v[i * LANES + lane]`.
    """

    @part(nogil=True, error_model="numpy")
    def rotate(v):
        _two_stages(v, I8(LANES))
        _two_stages(v, I8(4 * LANES))
        if size == 32:
            _one_stage(v, I8(16 * LANES))
        else:
            _two_stages(v, I8(16 * LANES))
        if size == 128:
            _one_stage(v, I8(64 * LANES))
        if size > 128:
            _two_stages(v, I8(64 * LANES))
        if size == 512:
            _one_stage(v, I8(256 * LANES))
        if size > 512:
            _two_stages(v, I8(256 * LANES))

    return rotate
