# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment,misc"
"""Tensors as tuples of columns: what a thread holds side by side, as tensors of their own."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def to_columns(x, M: tl.constexpr, N: tl.constexpr, LOG: tl.constexpr):
    """The N = 2^LOG columns of `x`, shape [M, N], as a tuple of tensors [M]."""
    parts = (x,)
    for k in tl.static_range(LOG):
        even = ()
        odd = ()
        for i in tl.static_range(1 << k):
            a, b = tl.split(tl.reshape(parts[i], [M, N >> (k + 1), 2]))
            even = even + (a,)
            odd = odd + (b,)
        parts = even + odd
    columns = ()
    for i in tl.static_range(N):
        columns = columns + (tl.reshape(parts[i], [M]),)
    return columns


@triton.jit
def from_columns(columns, N: tl.constexpr, LOG: tl.constexpr):
    """Inverse of `to_columns`: N = 2^LOG tensors [M] as columns of one, shape [M, N]."""
    M: tl.constexpr = columns[0].shape[0]
    parts = columns
    for k in tl.static_range(LOG):
        joined = ()
        for i in tl.static_range(N >> (k + 1)):
            both = tl.join(parts[i], parts[i + (N >> (k + 1))])
            joined = joined + (tl.reshape(both, [M, 2 << k]),)
        parts = joined
    return parts[0]


@triton.jit
def to_rows(x, M: tl.constexpr, N: tl.constexpr, LOG: tl.constexpr):
    """The N = 2^LOG rows of `x`, shape [N, M], as a tuple of tensors [M].

    The layout that Triton gives to a split whose last dimension fills the threads keeps the others
    in one thread: values change hands once, before the first split.
    """
    parts = (x,)
    for k in tl.static_range(LOG):
        even = ()
        odd = ()
        for i in tl.static_range(1 << k):
            pairs = tl.reshape(parts[i], [N >> (k + 1), 2, M])
            a, b = tl.split(tl.permute(pairs, [0, 2, 1]))
            even = even + (a,)
            odd = odd + (b,)
        parts = even + odd
    rows = ()
    for i in tl.static_range(N):
        rows = rows + (tl.reshape(parts[i], [M]),)
    return rows


@triton.jit
def from_rows(rows, N: tl.constexpr, LOG: tl.constexpr):
    """Inverse of `to_rows`: N = 2^LOG tensors [M] as rows of one, shape [N, M]."""
    M: tl.constexpr = rows[0].shape[0]
    parts = ()
    for i in tl.static_range(N):
        parts = parts + (tl.reshape(rows[i], [1, M]),)
    for k in tl.static_range(LOG):
        joined = ()
        for i in tl.static_range(N >> (k + 1)):
            both = tl.join(parts[i], parts[i + (N >> (k + 1))])
            joined = joined + (tl.reshape(tl.permute(both, [0, 2, 1]), [2 << k, M]),)
        parts = joined
    return parts[0]
