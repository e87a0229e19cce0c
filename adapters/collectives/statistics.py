"""Statistics that ranks reduce before they encode, and compare."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ... import arrays
from ...arrays import ArrayInfo
from ...codecs.common.base import Plan
from ...formats.dtypes import BY_NAME
from ..transports.base import Op
from . import tensors
from .calls import Call
from .steps import Steps

_INT64 = BY_NAME["int64"]
_OTHER_SUMS = "have other sums of statistics"


class Statistics:
    """Agrees on statistics of a session's codec."""

    def __init__(self, steps: Steps) -> None:
        self._session = steps.session
        self._comparisons = steps.comparisons
        self._codec = steps.session.codec
        self._transport = steps.session.transport
        self._size = steps.session.size
        #: Memory on the host for summaries of statistics on a GPU.
        self._summaries: list[tensors.PendingHostCopy] = []

    def agreed(
        self, call: Call, flat: Any, xs: Sequence[Any], plans: Sequence[Plan], info: ArrayInfo
    ) -> list[Any]:
        """Statistics of each of `xs`, parts of `flat`, of all ranks; None if nobody needs any.

        Raises CollectiveError, on all ranks, if one of them has got others; on a GPU, where nobody
        waits for that, `judge` does. Statistics that do not hold for sums are not agreed on: every
        hop measures for itself.
        """
        codec, spec, scaling = self._codec, self._codec.spec, self._session.scaling
        if not spec.sums_keep_stats or all(plan.codec != spec for plan in plans):
            return [None] * len(xs)
        op: Op = "sum" if spec.reduce_op == "sum" else "max"
        each = spec.stats_nelem
        # One after the other, the parts have those of the whole.
        at_once = each and len(plans) == 1 and plans[0].nelem % each == 0
        with call.stage("statistics"), np.errstate(all="ignore"):
            found = [codec.measure(x) for x in ([flat] if at_once else xs)]
        if scaling is None:
            stats = self.reduced(call, found, flat, op, info)
        else:
            with call.stage("statistics"):
                overflowed, own = scaling.travelling(found[0])
            joined = self._joined(call, [*found, overflowed], flat, op, info, own)
            with call.stage("statistics"):
                scaling.widen(joined[:-1], joined[-1:])
            stats = _split(joined[:-1], found)
        return list(stats[0].reshape(len(xs), -1)) if at_once else stats

    def reduced(
        self, call: Call, parts: Sequence[Any], like: Any, op: Op, info: ArrayInfo
    ) -> list[Any]:
        """Statistics `parts` of all ranks reduced, on the device of `like`, and compared.

        If there is a single part, it may be overwritten.
        """
        return _split(self._joined(call, parts, like, op, info), parts)

    def _joined(
        self,
        call: Call,
        parts: Sequence[Any],
        like: Any,
        op: Op,
        info: ArrayInfo,
        own: Any = None,
    ) -> Any:
        """As `reduced`, one behind the other. `own`, of their dtype, is only compared."""
        with call.stage("statistics"), np.errstate(all="ignore"):
            joined = side_by_side(parts, like)
            self._transport.all_reduce(joined, op)
            if op == "sum":
                _limit(joined)
            compared = joined if own is None else side_by_side([joined, own], like)
        call.wire_bytes += 2 * (self._size - 1) * joined.nbytes // self._size
        if tensors.is_cuda(compared):
            self.summarize(call, compared, info)
        else:
            host = np.ascontiguousarray(arrays.host_array(compared))
            digests = [call.digest_of(host.tobytes(), info)] * self._size
            # First, so that no rank waits for one whose sums are none.
            self._comparisons.compare(call, like, digests, digests, "statistics", _OTHER_SUMS)
            self._remark(call, host, info)
        return joined

    def summarize(self, call: Call, stats: Any, info: ArrayInfo) -> None:
        """Leave in `call.verdict` what compares `stats` of all ranks, which are on a GPU."""
        with call.stage("statistics"):
            own = device_summary(stats, self._codec.spec.remark_nelem)
            words = tensors.empty((self._size,), _INT64, stats)
            self._transport.all_gather(tensors.as_bytes(words), tensors.as_bytes(own[:1]))
            all_words = sys.modules["torch"].cat([words, own])
            spare = self._summaries.pop() if self._summaries else None
            arriving = tensors.PendingHostCopy(all_words, spare)
        call.wire_bytes += 8 * (self._size - 1)

        def verdict() -> None:
            with call.stage("statistics"):
                arrived = arriving.wait(self._transport.timeout)
            theirs, (mine, *bounds), sample = np.split(arrived, [self._size, self._size + 3])
            strange = [rank for rank, word in enumerate(theirs.tolist()) if word != mine]
            known = sample.astype(np.uint8)
            if stats.dtype.is_floating_point:
                least, most = np.array(bounds, np.int32).view(np.float32)
                # Of strange ones all may be said.
                good = least >= 0 and most < np.inf
                known = sample.astype(np.int32).view(np.float32)
                known = known if good else arrays.host_array(stats)
            self._summaries.append(arriving)
            self._remark(call, known, info)
            if strange:
                raise call.failure("statistics", f"ranks {strange} {_OTHER_SUMS}")

        call.verdict = verdict

    def _remark(self, call: Call, stats: npt.NDArray[Any], info: ArrayInfo) -> None:
        """Have the trace say what there is to say of `stats`; raises if no codec takes them."""
        spec = self._codec.spec
        try:
            spec.check_stats(stats, info.dtype)
        except ValueError as error:
            raise call.failure("statistics", str(error)) from error
        remark = spec.remark(stats)
        if remark:
            call.reason += f"; {remark}"

    def judge(self, call: Call) -> None:
        """Raise if ranks turn out to have other statistics: on all of them, and none goes on."""
        if call.verdict is not None:
            exchanged, call.exchanged = call.exchanged, False
            call.verdict()
            call.exchanged = exchanged

    def clear(self) -> None:
        """Free memory."""
        self._summaries.clear()


def _split(joined: Any, parts: Sequence[Any]) -> list[Any]:
    """What lies in `joined` in the place of each of `parts`."""
    stops = np.cumsum([part.shape[0] for part in parts]).tolist()
    return [joined[stop - part.shape[0] : stop] for part, stop in zip(parts, stops, strict=True)]


def side_by_side(parts: Sequence[Any], like: Any) -> Any:
    """Arrays of shape (n,) one behind the other, on the device of `like`."""
    if len(parts) == 1 and tensors.is_cuda(parts[0]):
        return parts[0]
    if tensors.is_torch(parts[0]):
        return sys.modules["torch"].cat(list(parts))
    host = np.concatenate(parts)
    return tensors.on_device(host, tensors.device_of(like)) if tensors.is_cuda(like) else host


def device_summary(stats: Any, most: int) -> Any:
    """The sum modulo 2^64 of `stats`, float32 as words or uint8, times odd numbers, the least and
    the largest, and at most `most` of them, evenly spaced; int64, on their device.

    Nothing waits for it.
    """
    torch = sys.modules["torch"]
    n = stats.shape[0]
    words = stats.view(torch.int32) if stats.dtype.is_floating_point else stats
    total = (words * torch.arange(1, 2 * n + 1, 2, device=stats.device)).sum()
    bounds = torch.stack(stats.aminmax())
    bounds = bounds.view(torch.int32) if stats.dtype.is_floating_point else bounds
    return torch.cat([total.view(1), bounds, words[:: -(-n // most)]])


def _limit(x: Any) -> None:
    """Make sums that are too large the largest finite number."""
    if tensors.is_torch(x):
        largest = sys.modules["torch"].finfo(x.dtype).max
        tensors.change(lambda v: v.clamp_(max=largest), x)
    else:
        tensors.change(lambda v: np.minimum(v, np.finfo(v.dtype).max, out=v), x)
