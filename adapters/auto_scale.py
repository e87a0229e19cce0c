"""How much larger than terms need the scales of sums are: FP8-LM's automatic scaling.

After DynamiQ, appendix C, and FP8-LM (arXiv 2310.18313), section 2.1. Blocks of all ranks' terms
have one scale, mu times what the largest of them needs, and their sum has it too: it is rounded to
the same steps at every hop, and saturates where mu is too small. mu starts as the number of ranks,
with which nothing does; from call to call it shrinks, until too many elements of a sum are as large
as their scale allows, and doubles then.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import arrays
from ..codecs.minifloat import values_of
from ..codecs.mx import BLOCK, MAX_SCALE, NAN_SCALE, Mx
from ..formats.dtypes import BY_NAME
from . import tensors

_UINT8, _INT32, _INT64 = (BY_NAME[name] for name in ("uint8", "int32", "int64"))
#: log2 of mu counts in steps of 1 / ONE.
ONE = 1 << 16


class AutoScale:
    """The mu of the sums of one Communicator with codec mx, scale_rule="agreed".

    A block's scale is the power of two that the block's largest magnitude of all ranks needs, times
    2^ceil(log2 mu). Before each sum mu is doubled if in the last one, on any rank, more than
    `threshold` of its share's elements had the largest magnitude that their scales allow, and else
    multiplied by `shrink`. It stays between 1, as below that terms alone would saturate, and twice
    the number of ranks, where no sum does but by rounding. Blocks with NaN or infinities do not
    count. All ranks have the same mu; on a GPU nothing waits for it.
    """

    def __init__(self, threshold: float = 1e-5, shrink: float = 0.99) -> None:
        """Raises ValueError if not 0 <= threshold < 1 and 1/2 < shrink <= 1."""
        if not 0 <= threshold < 1:
            raise ValueError(f"threshold is {threshold!r}; allowed: from 0, below 1")
        if not 0.5 < shrink <= 1:
            raise ValueError(f"shrink is {shrink!r}; allowed: above 1/2, at most 1")
        self.threshold = float(threshold)
        self.shrink = float(shrink)
        self._step = round(-math.log2(shrink) * ONE)
        self._most = 0
        #: log2 of mu, int32, and whether the last sum overflowed, uint8, both of shape (1,).
        self._log: Any = np.zeros(1, np.int32)
        self._over: Any = np.zeros(1, np.uint8)
        self._bounds: Any = None

    @property
    def mu(self) -> float:
        """The mu of the last sum; on a GPU this waits for it."""
        return float(2.0 ** (int(self._log[0]) / ONE))

    def start(self, ranks: int) -> None:
        """Let mu be the number of ranks, and nothing have overflowed."""
        start = round(math.log2(ranks) * ONE)
        self._most = start + ONE
        self._log = np.array([start], np.int32)
        self._over = np.zeros(1, np.uint8)

    @tensors.kept
    def overflowed(self, like: Any) -> Any:
        """Whether this rank's share of the last sum overflowed: uint8, shape (1,), like `like`."""
        self._over, self._log = _beside(self._over, like), _beside(self._log, like)
        return self._over

    @tensors.kept
    def adapt(self, overflowed: Any) -> None:
        """Double or shrink mu by the maximum of what ranks say has `overflowed`."""
        grown = self._log + tensors.cast(overflowed, _INT32) * (ONE + self._step) - self._step
        self._log = grown.clip(0, self._most)

    def widen(self, scales: Any, spec: Mx) -> None:
        """Multiply `scales`, scale bytes of blocks that all ranks agreed on, by mu, rounded up.

        Those of blocks with NaN or infinities stay.
        """
        steps = -(-self._log // ONE)
        wider = (tensors.cast(scales, _INT32) + steps).clip(0, MAX_SCALE)
        special = scales >= NAN_SCALE - spec.format.emax
        tensors.put(scales, _library(scales).where(special, scales, tensors.cast(wider, _UINT8)))

    @tensors.kept
    def count(self, sums: Sequence[Any], scales: Sequence[Any], spec: Mx) -> None:
        """Note whether too many elements of `sums`, arrays of shape (n,), overflowed `scales`."""
        if self._bounds is None:
            self._bounds = _bounds(spec)
        self._bounds = _beside(self._bounds, scales[0])
        total = self._bounds[:0].sum(dtype=_library(scales[0]).int64)
        for x, s in zip(sums, scales, strict=True):
            bounds = self._bounds[tensors.cast(s, _INT64)]
            blocks = x.shape[0] // BLOCK
            magnitudes = _magnitudes(x, tensors.is_torch(s))
            total += (
                magnitudes[: blocks * BLOCK].reshape(-1, BLOCK) >= bounds[:blocks, None]
            ).sum()
            total += (magnitudes[blocks * BLOCK :] >= bounds[blocks:]).sum()
        over = total > self.threshold * sum(x.shape[0] for x in sums)
        self._over = tensors.cast(over.reshape(1), _UINT8)


def _bounds(spec: Mx) -> Any:
    """The largest magnitude by scale byte, float32, shape (256,); NaN for special blocks."""
    element = spec.format
    with np.errstate(over="ignore"):
        found = np.ldexp(values_of(element)[element.largest], np.arange(256) - 127)
        bounds = found.astype(np.float32)
    bounds[NAN_SCALE - element.emax :] = np.nan
    return bounds


def _magnitudes(x: Any, as_tensor: bool) -> Any:
    if as_tensor:
        return abs(x)
    dtype = tensors.dtype_of(x)
    return abs(arrays.host_bits(x, dtype).view(dtype.numpy).astype(np.float32))


def _library(x: Any) -> Any:
    return sys.modules["torch"] if tensors.is_torch(x) else np


def _beside(x: Any, like: Any) -> Any:
    """`x` in the library and on the device of `like`."""
    if not tensors.is_torch(like):
        return arrays.host_array(x)
    return x.to(like.device) if tensors.is_torch(x) else tensors.on_device(x, like.device)
