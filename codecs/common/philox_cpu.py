# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Numba form of codecs/common/philox.py: the same words."""

from __future__ import annotations

import numpy as np

from .compile_cache import part
from .philox import MULTIPLIERS, ROUNDS, STREAM_SHIFT, WEYL

U4, U8 = np.uint32, np.uint64
_M0, _M1 = U8(MULTIPLIERS[0]), U8(MULTIPLIERS[1])
_W0, _W1 = U4(WEYL[0]), U4(WEYL[1])


@part(nogil=True)
def philox4(seed, step, rank, stream, group):
    """Words 4 * group to 4 * group + 3 of a stream; numbers are uint64."""
    k0, k1 = U4(seed), U4(seed >> U8(32))
    c0, c1 = U4(group), U4(U8(group >> U8(32)) | U8(U8(stream) << U8(STREAM_SHIFT)))
    c2, c3 = U4(step), U4(rank)
    for _ in range(ROUNDS):
        p0 = _M0 * U8(c0)
        p1 = _M1 * U8(c2)
        c0 = U4(U4(p1 >> U8(32)) ^ c1 ^ k0)
        c2 = U4(U4(p0 >> U8(32)) ^ c3 ^ k1)
        c1 = U4(p1)
        c3 = U4(p0)
        k0 = U4(k0 + _W0)
        k1 = U4(k1 + _W1)
    return c0, c1, c2, c3


@part(nogil=True)
def fill_words(out, seed, step, rank, stream, first):
    """Fill `out`, uint32, with the words from number `first` on, a multiple of 4."""
    for i in range(0, out.size, 4):
        words = philox4(seed, step, rank, stream, U8(first + U8(i)) >> U8(2))
        for k in range(min(4, out.size - i)):
            out[i + k] = words[k]
