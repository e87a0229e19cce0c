"""Which of two ways of one call is faster on a group: measured at first, and again now and then."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

from ..transports.base import Transport
from . import tensors
from .agreement import gather_plain
from .kept_measurements import KeptMeasurements

#: Seconds that the measurements of a group may take in all, but for two calls of each way.
BUDGET = 2.0
#: Calls after which is measured again.
AGAIN = 2000
#: Repetitions of each way, at most.
_MOST = 7
#: Ours has to gain so much, as a share of the other's time.
_GAIN = 0.02


class Faster:
    """Chooses between the network's own call and ours, by key; all ranks choose alike.

    Args:
        transport: The group's transport.
        budget: Seconds for all first measurements. Then other calls are not measured any more: they
            go the way that was faster for those that were, taken together, and ours if none was.
        again: Calls of a key after which it is measured again.
        warm: Calls before those that are timed, of each way.
        kept: Measurements of earlier programs, by the text of keys. None: there are none.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        budget: float = BUDGET,
        again: int = AGAIN,
        warm: int = 2,
        kept: KeptMeasurements | None = None,
    ) -> None:
        self._transport = transport
        self._kept = kept
        self._warm = warm
        self._left = self._budget = budget
        self._again = again
        #: By key: whether the other way is taken, and for how many calls.
        self._verdicts: dict[Hashable, list[Any]] = {}
        #: Seconds of the other way and of ours, by key.
        self.seconds: dict[Hashable, tuple[float, float]] = {}

    def native(
        self, key: Hashable, native: Callable[[], object], ours: Callable[[], object], like: Any
    ) -> bool:
        """Whether the network's own way is the faster one for calls of this key.

        Args:
            key: What calls have in common that take as long.
            native: Makes the call in the network's own way. Both may be made several times.
            ours: Makes it in ours.
            like: An array on the device on which calls are timed.
        """
        verdict = self._verdicts.get(key)
        if verdict is None or verdict[1] <= 0:
            known = self._of_earlier(key) if verdict is None else None
            if verdict is not None:
                # Another look, which takes as long as some of the calls since the last.
                self._left = max(self._left, self._budget / 4)
            found = self._measured(key, native, ours, like) if known is None else known
            verdict = self._verdicts[key] = [found, self._again]
        verdict[1] -= 1
        return bool(verdict[0])

    def look_again(self) -> None:
        """Have every key be measured again at its next call; on all ranks between the same ones."""
        for verdict in self._verdicts.values():
            verdict[1] = 0

    def _of_earlier(self, key: Hashable) -> bool | None:
        """What an earlier program has found of a key; None if it has not measured it."""
        found = None if self._kept is None else self._kept.get(str(key))
        if found is None:
            return None
        self.seconds[key] = found[0], found[1]
        return _gains_nothing(self.seconds[key])

    def _measured(
        self, key: Hashable, native: Callable[[], object], ours: Callable[[], object], like: Any
    ) -> bool:
        if self._left <= 0:
            rows = [self.seconds[key]] if key in self.seconds else list(self.seconds.values())
            return bool(rows) and _gains_nothing((sum(r[0] for r in rows), sum(r[1] for r in rows)))
        start = time.perf_counter()
        # Before they are timed kernels are compiled, capacities learnt, calls recorded.
        rows, spent = [], 0.0
        for k in range(_MOST + self._warm):
            pair = _seconds(native, like), _seconds(ours, like)
            # The first pair may compile.
            late = (k >= 1 and spent > self._left) or (k >= 2 and spent > self._left / 4)
            if k >= self._warm or late:
                rows.append(pair)
            spent = self._slowest(time.perf_counter() - start)
            if rows and spent > self._left / 4:
                break
        mine = np.array(np.median(rows, axis=0), np.float64)
        every = gather_plain(self._transport, mine.view(np.uint8)).view(np.float64)
        found = float(every[:, 0].max()), float(every[:, 1].max())
        self.seconds[key] = found
        self._left -= self._slowest(time.perf_counter() - start)
        if self._kept is not None:
            self._kept.put(str(key), list(found))
        return _gains_nothing(found)

    def _slowest(self, seconds: float) -> float:
        mine = np.array([seconds], np.float64)
        return float(gather_plain(self._transport, mine.view(np.uint8)).view(np.float64).max())


def _gains_nothing(seconds: tuple[float, float]) -> bool:
    native, ours = seconds
    return ours > (1 - _GAIN) * native


def _seconds(call: Callable[[], object], like: Any) -> float:
    tensors.synchronize(like)
    start = time.perf_counter()
    call()
    tensors.synchronize(like)
    return time.perf_counter() - start
