# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment,misc"
"""Triton form of codecs/common/hadamard.py: the same sums.

A rotation is two sets of butterflies between registers: a thread holds 16 neighbouring values,
then, after one exchange, all values of a block that are a multiple of 16 apart. Every addition is
spelled out.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .columns_triton import from_rows, to_rows

#: Values of a block that a thread holds side by side, unless a caller chooses others.
LOW = tl.constexpr(16)


@triton.jit
def butterflies(parts, N: tl.constexpr, LOG: tl.constexpr):
    """LOG stages of the transform over N columns."""
    for k in tl.static_range(LOG):
        found = ()
        for i in tl.static_range(N):
            if (i >> k) % 2 == 0:
                found = found + (parts[i] + parts[i + (1 << k)],)
            else:
                found = found + (parts[i - (1 << k)] - parts[i],)
        parts = found
    return parts


@triton.jit
def rotate(low, ROWS: tl.constexpr, LOG_HIGH: tl.constexpr, LOG_LOW: tl.constexpr = 4):
    """The transform of ROWS blocks given as columns of 2^LOG_LOW; shape [ROWS, block]."""
    HIGH: tl.constexpr = 1 << LOG_HIGH
    WIDTH: tl.constexpr = 1 << LOG_LOW
    low = butterflies(low, WIDTH, LOG_LOW)
    t = tl.reshape(from_rows(low, WIDTH, LOG_LOW), [WIDTH, ROWS, HIGH])
    t = tl.reshape(tl.permute(t, [2, 1, 0]), [HIGH, ROWS * WIDTH])
    high = butterflies(to_rows(t, ROWS * WIDTH, HIGH, LOG_HIGH), HIGH, LOG_HIGH)
    t = tl.reshape(from_rows(high, HIGH, LOG_HIGH), [HIGH, ROWS, WIDTH])
    return tl.reshape(tl.permute(t, [1, 0, 2]), [ROWS, HIGH * WIDTH])


@triton.jit
def transpose(
    parts,
    BLOCKS: tl.constexpr,
    LOG_PARTS: tl.constexpr,
    LOG_KEPT: tl.constexpr,
    LOG_NEW: tl.constexpr,
):
    """Columns of other lines than those whose columns are given, by one exchange.

    Each of BLOCKS blocks is a matrix, whose lines of 2^LOG_PARTS values threads hold. What is
    returned are columns of its transpose, lines of 2^(LOG_KEPT + LOG_NEW) values that are cut into
    lines of 2^LOG_NEW.
    """
    KEPT: tl.constexpr = 1 << LOG_KEPT
    NEW: tl.constexpr = 1 << LOG_NEW
    PARTS: tl.constexpr = 1 << LOG_PARTS
    x = tl.reshape(from_rows(parts, PARTS, LOG_PARTS), [PARTS, BLOCKS, KEPT, NEW])
    x = tl.reshape(tl.permute(x, [3, 1, 0, 2]), [NEW, BLOCKS * PARTS * KEPT])
    return to_rows(x, BLOCKS * PARTS * KEPT, NEW, LOG_NEW)


@triton.jit
def spread(x, ROWS: tl.constexpr, N: tl.constexpr):
    """Each of ROWS values N times, shape [ROWS * N]."""
    return tl.reshape(tl.broadcast_to(x[:, None], [ROWS, N]), [ROWS * N])
