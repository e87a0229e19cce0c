# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Numba form of codecs/common/sums.py: what is done with one term, or with a total.

Dtypes that float32 does not hold exactly, and 8-bit floats, are NumPy's.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from ...formats.dtypes import DType
from .arrays_cpu import as_read_only, read_only, view_as, with_scratch
from .base import Bits
from .compile_cache import cached
from .minifloat import WIDENED
from .minifloat_cpu import (
    I4,
    LANES,
    U4,
    float_of,
    kind_of,
    load_last,
    narrow_by,
    store_last,
    widen_by,
)
from .sums import Values, dtype_of, rounded, wide_dtype, widened


@cache
def _accumulator(kind):
    """What adds elements to float32 values, or puts them there if they are the first."""
    if kind != 1:
        shift = 16 if kind == 0 else 0

        @cached(nogil=True)
        def accumulate(acc, a, is_first):
            if is_first:
                for i in range(a.size):
                    acc[i] = float_of(I4(U4(U4(a[i]) << U4(shift))))
            else:
                for i in range(a.size):
                    acc[i] += float_of(I4(U4(U4(a[i]) << U4(shift))))

        return accumulate

    widen = widen_by(1)

    @cached(nogil=True)
    def accumulate_halves(space, acc, a, is_first):
        words = view_as(space[: 4 * LANES], np.uint32)
        floats = view_as(space[4 * LANES : 8 * LANES], np.float32)
        padded = view_as(space[8 * LANES :], a.dtype)
        x = view_as(words, np.float32)
        for at in range(0, a.size, LANES):
            n = a.size - at if a.size - at < LANES else LANES
            source = read_only(padded)
            if n == LANES:
                source = a[at : at + LANES]
            else:
                load_last(a, at, padded)
            widen(source, words, floats)
            here = acc[at : at + n]
            if is_first:
                for i in range(n):
                    here[i] = x[i]
            else:
                for i in range(n):
                    here[i] += x[i]

    return with_scratch(accumulate_halves, 12 * LANES)


@cache
def _rounder(kind):
    narrow = narrow_by(kind)

    @cached(nogil=True)
    def round_scaled(space, acc, scale, out):
        floats = view_as(space[: 4 * LANES], np.float32)
        padded = view_as(space[4 * LANES :], out.dtype)
        words = view_as(floats, np.uint32)
        for at in range(0, acc.size, LANES):
            n = acc.size - at if acc.size - at < LANES else LANES
            for i in range(n):
                floats[i] = np.float32(acc[at + i] * scale)
            target = out[at : at + LANES] if n == LANES else padded
            narrow(words, target)
            if n < LANES:
                store_last(padded, out, at)

    return with_scratch(round_scaled, 8 * LANES)


@cache
def _adder(kind, other):
    widen, widen_other, narrow = widen_by(kind), widen_by(other), narrow_by(kind)

    @cached(nogil=True)
    def add_bits(space, a, b):
        u = view_as(space[: 4 * LANES], np.uint32)
        v = view_as(space[4 * LANES : 8 * LANES], np.uint32)
        floats = view_as(space[8 * LANES : 12 * LANES], np.float32)
        padded = view_as(space[12 * LANES : 16 * LANES], a.dtype)
        beside = view_as(space[16 * LANES :], b.dtype)
        x, y, bits = view_as(u, np.float32), view_as(v, np.float32), view_as(floats, np.uint32)
        for at in range(0, a.size, LANES):
            n = a.size - at if a.size - at < LANES else LANES
            target, source = padded, read_only(beside)
            if n == LANES:
                target, source = a[at : at + LANES], b[at : at + LANES]
            else:
                load_last(a, at, padded)
                load_last(b, at, beside)
            widen(target, u, floats)
            widen_other(source, v, floats)
            for i in range(LANES):
                floats[i] = np.float32(x[i] + y[i])
            narrow(bits, target)
            if n < LANES:
                store_last(padded, a, at)

    return with_scratch(add_bits, 20 * LANES)


def accumulate(acc: Values, bits: Bits, dtype: DType, is_first: bool = False) -> None:
    """Add elements, `bits` of `dtype` or of float32, to `acc`, or put them there.

    `acc` is float32, or of any float dtype if no kernel knows `dtype`; it is added to in its own.
    """
    kind = dtype_of(bits, dtype)
    if kind.name in WIDENED and acc.dtype == np.float32:
        _accumulator(kind_of(kind))(acc, as_read_only(bits), is_first)
    elif is_first:
        acc[:] = widened(bits, kind)
    else:
        acc += widened(bits, kind).astype(acc.dtype)


def round_scaled(acc: Values, scale: float | None, out: Bits, target: DType) -> None:
    """Write `acc`, times `scale`, to the elements `out` of `target`."""
    if target.name in WIDENED and acc.dtype == np.float32:
        _rounder(kind_of(target))(as_read_only(acc), np.float32(1 if scale is None else scale), out)
    else:
        out[:] = rounded(acc if scale is None else acc * acc.dtype.type(scale), target)


def add(bits: Bits, other: Bits, dtype: DType) -> None:
    """Add elements of `dtype` or of float32 to `bits`, of `dtype`: one sum of two, rounded."""
    kind = dtype_of(other, dtype)
    if dtype.name in WIDENED:
        _adder(kind_of(dtype), kind_of(kind))(bits, as_read_only(other))
    else:
        total = widened(bits, dtype) + widened(other, kind).astype(wide_dtype(dtype))
        bits[:] = rounded(total, dtype)
