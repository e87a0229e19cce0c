# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""omnireduce on the CPU: conversions with Numba; choosing and copying blocks is NumPy's."""

from __future__ import annotations

from functools import partial

import numpy as np

from ..formats.dtypes import DType
from ..numba_cache import cached
from . import omnireduce
from .base import Bits
from .minifloat_cpu import LANES, kind_of, narrow, widen


@cached(nogil=True)
def _convert(x, kind, out, out_kind):
    """Elements of one dtype as those of another."""
    words, floats = np.empty(LANES, np.uint32), np.empty(LANES, np.float32)
    part, found = np.zeros(LANES, x.dtype), np.empty(LANES, out.dtype)
    for at in range(0, x.size, LANES):
        n = min(LANES, x.size - at)
        part[:n] = x[at : at + n]
        widen(part, kind, words, floats)
        narrow(words, out_kind, found)
        out[at : at + n] = found[:n]


def converted(bits: Bits, source: DType, target: DType) -> Bits:
    """See `omnireduce.converted`."""
    if source == target:
        return bits
    flat = np.ascontiguousarray(bits).reshape(-1)
    flat.flags.writeable = False
    out = np.empty(flat.size, target.bits)
    _convert(flat, kind_of(source), out, kind_of(target))
    return out.reshape(bits.shape)


encode_chunk = partial(omnireduce.encode_chunk, convert=converted)
decode_chunk = partial(omnireduce.decode_chunk, convert=converted)
