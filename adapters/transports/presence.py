"""Which ranks have left a group of processes, told by the store through which they have met."""

from __future__ import annotations

import contextlib
import threading
import weakref
from datetime import timedelta
from typing import Any

import torch.distributed as dist

#: What leaving may take at the end of a process.
_PATIENCE = timedelta(seconds=2)
#: Held while the timeout of a store, which others use, is another.
_patient = threading.RLock()


class Presence:
    """This rank is there until it says otherwise, is dropped, or its process ends by itself.

    A process that is killed says nothing. All ranks make one, in the same order.

    Args:
        store: The key-value store of the group.
        rank: Number of this rank.
        world_size: Number of ranks.
    """

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        # The same on all ranks: each counts its own.
        number = store.add(f"presences/{rank}", 1) - 1
        self._store = dist.PrefixStore(f"presence/{number}", store)
        self._others = [r for r in range(world_size) if r != rank]
        self._rank = rank
        self._leave = weakref.finalize(self, _leave, self._store, rank)

    def leave(self, why: str = "") -> None:
        """Tell the others that this rank takes part in nothing any more. The first time counts.

        Args:
            why: What they are told.

        Raises:
            RuntimeError: If the store does not answer.
        """
        if self._leave.detach() is not None:
            self._store.set(str(self._rank), why)

    def left(self) -> dict[int, str]:
        """Ranks that have left, as far as they have said so, and why; ``""`` if they just did.

        Raises:
            RuntimeError: If the store does not answer: the process that holds it has ended.
        """
        gone = [r for r in self._others if self._store.check([str(r)])]
        return {r: self._store.get(str(r)).decode() for r in gone}


def _leave(store: Any, rank: int) -> None:
    # Where the store has gone first, nobody is left who could be told.
    with contextlib.suppress(RuntimeError), _patient:
        before = store.timeout
        store.set_timeout(min(before, _PATIENCE))
        try:
            store.set(str(rank), "")
        finally:
            store.set_timeout(before)
