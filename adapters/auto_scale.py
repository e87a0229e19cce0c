"""How much larger than terms need the scales of sums are: FP8-LM's automatic scaling.

After DynamiQ, appendix C, and FP8-LM (arXiv 2310.18313), section 2.1. Blocks of all ranks' terms
have one scale, mu times what the largest of them needs, and their sum has it too: it is rounded to
the same steps at every hop, and saturates where mu is too small. mu starts as the number of ranks,
with which nothing does; from sum to sum it shrinks, until too many elements of one are as large as
their scale allows, and doubles then. Unlike theirs, scales are powers of two, as MX has them, so
that mu counts as 2^ceil(log2 mu).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class AutoScale:
    """How mu follows sums: doubled after one in which, on any rank, more than `threshold` of the
    share's elements have the largest magnitude that their scales allow, else multiplied by
    `shrink`.

    Raises TypeError or ValueError unless 0 <= threshold < 1 and 1/2 < shrink <= 1.
    """

    threshold: float = 1e-5
    shrink: float = 0.99

    def __post_init__(self) -> None:
        """Check both."""
        for name, low, high in (("threshold", "0 <=", "< 1"), ("shrink", "1/2 <", "<= 1")):
            value = getattr(self, name)
            message = f"{name} is {value!r}; allowed: numbers with {low} {name} {high}"
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(message)
            fits = 0 <= value < 1 if name == "threshold" else 0.5 < value <= 1
            if not fits:
                raise ValueError(message)


class Scaling:
    """The mu of one Communicator, for sums by hops with codec mx and scale_rule="agreed".

    It stays between 1, as below that terms alone would saturate, and twice the number of ranks,
    where no sum does but by rounding. Blocks with NaN or infinities do not count as overflowing,
    and a sum of zeros alone says nothing: mu stays. All tensors of the Communicator share it. All
    ranks have the same; on a GPU nothing waits for it.
    """

    def __init__(self, how: AutoScale, spec: Mx, ranks: int) -> None:
        self._how, self._spec = how, spec
        self._step = round(-math.log2(how.shrink) * ONE)
        start = round(math.log2(ranks) * ONE)
        self._most = start + ONE
        self._special = NAN_SCALE - spec.format.emax
        # log2 of mu, int32; of the last sum whether it had elements, and whether this rank's share
        # overflowed, uint8; all of shape (1,). The first sum has the mu that is here.
        self._log: Any = np.array([start], np.int32)
        self._active: Any = np.zeros(1, np.uint8)
        self._over: Any = np.zeros(1, np.uint8)
        self._bounds: Any = _bounds(spec)

    @property
    def mu(self) -> float:
        """That of the last sum, of which there may be none; on a GPU this waits for it."""
        return float(2.0 ** (int(self._log[0]) / ONE))

    def state_dict(self) -> dict[str, float]:
        """What the next sum depends on, for a checkpoint: every rank has the same."""
        return {"log2_mu": int(self._log[0]) / ONE, "active": int(self._active[0])}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on with mu as it was; on all ranks."""
        log = min(max(round(state["log2_mu"] * ONE), 0), self._most)
        self._log = np.array([log], np.int32)
        self._active = np.array([bool(state["active"])], np.uint8)
        self._over = np.zeros(1, np.uint8)

    @tensors.kept
    def beside(self, like: Any) -> tuple[Any, Any]:
        """(whether this rank's share of the last sum overflowed, uint8; log2 of mu, its bytes).

        Like `like`, statistics of the sum that begins.
        """
        for name in ("_log", "_active", "_over", "_bounds"):
            setattr(self, name, _beside(getattr(self, name), like))
        return self._over, tensors.as_bytes(self._log)

    @tensors.kept
    def widen(self, scales: Any, overflowed: Any) -> None:
        """Adapt mu, and multiply `scales`, which all ranks agreed on, by it, rounded up.

        `overflowed` is the maximum of what ranks had `beside` theirs. Scale bytes of blocks with
        NaN or infinities stay.
        """
        by = tensors.cast(overflowed, _INT32) * (ONE + self._step) - self._step
        self._log = (self._log + tensors.cast(self._active, _INT32) * by).clip(0, self._most)
        special = scales >= self._special
        self._active = tensors.cast(((scales > 0) & ~special).any().reshape(1), _UINT8)
        wider = (tensors.cast(scales, _INT32) - (-self._log // ONE)).clip(0, MAX_SCALE)
        tensors.put(scales, _library(scales).where(special, scales, tensors.cast(wider, _UINT8)))

    @tensors.kept
    def count(self, sums: Sequence[Any], scales: Sequence[Any]) -> None:
        """Note whether too many elements of `sums`, arrays of shape (n,), overflowed `scales`."""
        total = self._bounds[:0].sum(dtype=_library(self._bounds).int64)
        for x, s in zip(sums, scales, strict=True):
            bounds = self._bounds[tensors.cast(s, _INT64)]
            blocks = x.shape[0] // BLOCK
            magnitudes = _magnitudes(x, tensors.is_torch(s))
            total += (
                magnitudes[: blocks * BLOCK].reshape(-1, BLOCK) >= bounds[:blocks, None]
            ).sum()
            total += (magnitudes[blocks * BLOCK :] >= bounds[blocks:]).sum()
        over = total > self._how.threshold * sum(x.shape[0] for x in sums)
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
