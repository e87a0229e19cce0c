# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Numba form of codecs/hadamard.py: the same sums.

`LANES` blocks go side by side, value i of all of them next to each other, so that every addition is
one of whole vectors and none changes its order.
"""

from __future__ import annotations

from numba import njit

LANES = 16

# Constant distances tell LLVM that what is read and written does not overlap.


def _one_stage(distance):
    @njit(nogil=True, error_model="numpy")
    def stage(v):
        for at in range(0, v.size, 2 * distance):
            w = v[at : at + 2 * distance]
            for j in range(distance):
                a = w[j]
                b = w[j + distance]
                w[j] = a + b
                w[j + distance] = a - b

    return stage


def _two_stages(distance):
    @njit(nogil=True, error_model="numpy")
    def stages(v):
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

    return stages


_stages_1_2, _stages_4_8 = _two_stages(LANES), _two_stages(4 * LANES)
_stages_16_32, _stages_64_128 = _two_stages(16 * LANES), _two_stages(64 * LANES)
_stages_256_512 = _two_stages(256 * LANES)
_stage_16, _stage_64, _stage_256 = (_one_stage(h * LANES) for h in (16, 64, 256))


@njit(nogil=True, error_model="numpy")
def rotate(v, size):
    """The transform, without its factor, of `LANES` blocks of `size` (32 to 1024) values, in place.

    Value i of block `lane` is `v[i * LANES + lane]`.
    """
    _stages_1_2(v)
    _stages_4_8(v)
    if size == 32:
        _stage_16(v)
        return
    _stages_16_32(v)
    if size == 128:
        _stage_64(v)
    elif size > 128:
        _stages_64_128(v)
        if size == 512:
            _stage_256(v)
        elif size > 512:
            _stages_256_512(v)
