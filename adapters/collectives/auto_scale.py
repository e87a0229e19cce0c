"""How much larger than terms need the scales of sums are: FP8-LM's automatic scaling.

After DynamiQ, appendix C, and FP8-LM (arXiv 2310.18313), section 2.1. Blocks of all ranks' terms
have one scale, mu times what the largest of them needs, and so has their sum. It is rounded to the
same steps at every hop, and saturates where mu is too small. mu starts as the number of ranks, with
which nothing saturates. It shrinks from sum to sum until too many elements of a sum are as large as
their scale allows, and then doubles. Unlike in the papers scales are powers of two, as mx has them,
so mu counts as 2^ceil(log2 mu).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ... import arrays
from ...codecs.common.base import CodecSpec
from ...formats.dtypes import BY_NAME
from . import tensors

_UINT8, _INT32, _INT64 = (BY_NAME[name] for name in ("uint8", "int32", "int64"))
#: log2 of mu counts in steps of 1 / ONE.
ONE = 1 << 16


@dataclass(frozen=True)
class AutoScale:
    """How the factor mu of the scales of sums follows the sums.

    mu doubles after a sum in which, on any rank, too many elements have the largest magnitude that
    their scales allow, and is multiplied by ``shrink`` after any other.

    Source: FP8-LM (arXiv 2310.18313), section 2.1; DynamiQ, appendix C.

    Args:
        threshold: Largest share of such elements in a rank's part of the sum, from 0 to below 1.
        shrink: Factor, above 1/2 and at most 1.

    Raises:
        TypeError: If a value is not a number.
        ValueError: If a value is out of range.
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
    """The factor mu of one communicator, for sums over hops whose ranks agree on scale bytes.

    mu stays between 1, below which single terms would saturate, and twice the number of ranks,
    where no sum does, rounding apart. Blocks with NaN or infinities do not count as overflowing,
    and a sum that is all zeros leaves mu as it is. All tensors of the communicator share it. All
    ranks have the same; on a GPU nothing waits for it.

    Args:
        how: The rule.
        spec: The codec.
        ranks: Number of ranks.

    Raises:
        ValueError: If the statistics of the codec are not scale bytes.
    """

    def __init__(self, how: AutoScale, spec: CodecSpec, ranks: int) -> None:
        scales = spec.scale_bytes
        if scales is None:
            raise ValueError(f"codec is {spec!r}; allowed: codecs with scale_bytes")
        self._how, self._scales = how, scales
        self._step = round(-math.log2(how.shrink) * ONE)
        start = round(math.log2(ranks) * ONE)
        self._most = start + ONE
        # log2 of mu, int32; of the last sum whether it had elements, and whether this rank's share
        # overflowed, uint8; all of shape (1,). The first sum has the mu that is here.
        self._log: Any = np.array([start], np.int32)
        self._active: Any = np.zeros(1, np.uint8)
        self._over: Any = np.zeros(1, np.uint8)
        self._bounds: Any = scales.bounds

    @property
    def mu(self) -> float:
        """The mu of the last sum; on a GPU reading it waits for that sum."""
        return float(2.0 ** (int(self._log[0]) / ONE))

    def state_dict(self) -> dict[str, float]:
        """The state for a checkpoint; every rank has the same."""
        return {"log2_mu": int(self._log[0]) / ONE, "active": int(self._active[0])}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue with a saved mu; on all ranks.

        Args:
            state: A result of ``state_dict``.
        """
        log = min(max(round(state["log2_mu"] * ONE), 0), self._most)
        self._log = np.array([log], np.int32)
        self._active = np.array([bool(state["active"])], np.uint8)
        self._over = np.zeros(1, np.uint8)

    @tensors.kept
    def travelling(self, like: Any) -> tuple[Any, Any]:
        """Statistics that travel with those of the sum that begins.

        Args:
            like: Statistics of the sum, whose library and device the result has.

        Returns:
            Whether this rank's share of the last sum overflowed, uint8; and log2 of mu, its bytes.
        """
        for name in ("_log", "_active", "_over", "_bounds"):
            setattr(self, name, _in_place_of(getattr(self, name), like))
        return self._over, tensors.as_bytes(self._log)

    @tensors.kept
    def widen(self, scales: Any, overflowed: Any) -> None:
        """Adapt mu, and multiply the agreed scales by it, rounded up.

        Scale bytes of blocks with NaN or infinities stay.

        Args:
            scales: Scale bytes that all ranks agreed on, uint8.
            overflowed: The maximum over ranks of the first result of ``travelling``.
        """
        by = tensors.cast(overflowed, _INT32) * (ONE + self._step) - self._step
        self._log = (self._log + tensors.cast(self._active, _INT32) * by).clip(0, self._most)
        special = scales >= self._scales.special
        self._active = tensors.cast(((scales > 0) & ~special).any().reshape(1), _UINT8)
        wider = (tensors.cast(scales, _INT32) - (-self._log // ONE)).clip(0, self._scales.largest)
        tensors.put(scales, _library(scales).where(special, scales, tensors.cast(wider, _UINT8)))

    @tensors.kept
    def count(self, sums: Sequence[Any], scales: Sequence[Any]) -> None:
        """Note whether too many elements of sums overflowed their scales.

        Args:
            sums: Arrays of shape ``(n,)``.
            scales: The scales of each.
        """
        total = self._bounds[:0].sum(dtype=_library(self._bounds).int64)
        for x, s in zip(sums, scales, strict=True):
            bounds = self._bounds[tensors.cast(s, _INT64)]
            block = self._scales.block
            blocks = x.shape[0] // block
            magnitudes, whole = _magnitudes(x, tensors.is_torch(s)), blocks * block
            total += (magnitudes[:whole].reshape(-1, block) >= bounds[:blocks, None]).sum()
            total += (magnitudes[whole:] >= bounds[blocks:]).sum()
        over = total > self._how.threshold * sum(x.shape[0] for x in sums)
        self._over = tensors.cast(over.reshape(1), _UINT8)


def _magnitudes(x: Any, as_tensor: bool) -> Any:
    if as_tensor:
        return abs(x)
    dtype = tensors.dtype_of(x)
    return abs(arrays.host_bits(x, dtype).view(dtype.numpy).astype(np.float32))


def _library(x: Any) -> Any:
    return sys.modules["torch"] if tensors.is_torch(x) else np


def _in_place_of(x: Any, like: Any) -> Any:
    """`x` in the library and on the device of `like`."""
    if not tensors.is_torch(like):
        return arrays.host_array(x)
    return x.to(like.device) if tensors.is_torch(x) else tensors.on_device(x, like.device)


def scaling_of(given: Any, spec: CodecSpec, ranks: int) -> Scaling | None:
    """The scaling of a communicator with this codec, None if its ranks agree on no scales.

    Args:
        given: An ``AutoScale``; None: the default one.
        spec: The codec.
        ranks: Number of ranks.

    Raises:
        TypeError: If ``given`` is neither.
        ValueError: If it is given, and the codec has no use for it.
    """
    if spec.scale_bytes is None:
        if given is not None:
            raise ValueError(
                f'scaling is given, codec is {spec!r}; allowed with it: mx with scale_rule="agreed"'
            )
        return None
    if not isinstance(given, AutoScale | None):
        raise TypeError(f"scaling is {given!r}; allowed: an AutoScale() or None")
    return Scaling(AutoScale() if given is None else given, spec, ranks)
