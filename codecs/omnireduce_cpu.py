# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""omnireduce on the CPU: conversions with Numba; choosing and copying blocks is NumPy's."""

from __future__ import annotations

from functools import partial

import numpy as np

from ..formats.dtypes import DType
from . import omnireduce
from .common.arrays_cpu import view_as, with_scratch
from .common.base import Bits
from .common.compile_cache import cached
from .common.minifloat_cpu import LANES, kind_of, narrow, widen


@cached(nogil=True)
def _convert(space, x, kind, out, out_kind):
    """Elements of one dtype as those of another."""
    words = view_as(space[: 4 * LANES], np.uint32)
    floats = view_as(space[4 * LANES : 8 * LANES], np.float32)
    part = view_as(space[8 * LANES : 12 * LANES], x.dtype)
    found = view_as(space[12 * LANES :], out.dtype)
    for at in range(0, x.size, LANES):
        n = x.size - at if x.size - at < LANES else LANES
        for i in range(LANES):
            part[i] = x[at + i] if i < n else 0
        widen(part, kind, words, floats)
        narrow(words, out_kind, found)
        for i in range(n):
            out[at + i] = found[i]


_convert_with = with_scratch(_convert, 16 * LANES)


def converted(bits: Bits, source: DType, target: DType) -> Bits:
    """See `omnireduce.converted`."""
    if source == target:
        return bits
    flat = np.ascontiguousarray(bits).reshape(-1)
    flat.flags.writeable = False
    out = np.empty(flat.size, target.bits)
    _convert_with(flat, kind_of(source), out, kind_of(target))
    return out.reshape(bits.shape)


encode_chunk = partial(omnireduce.encode_chunk, convert=converted)
decode_chunk = partial(omnireduce.decode_chunk, convert=converted)
