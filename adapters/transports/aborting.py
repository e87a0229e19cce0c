"""How a rank over torch.distributed gives up: the others hear at once, and why."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..errors import described

#: Which rank gave up first, and why.
_KEY = "gave up"
#: Of messages of this package over gloo, which keeps them apart from those that a user sends in the
#: same group, whose tag is 0 unless he names one.
TAG = 0x7468
#: Of those by which ranks agree, which may come while a peer makes another call.
APART = 0x746A
#: No message has this one. One of a user's with this tag would be taken for late.
_TAG = 0x7469
#: Seconds that the store may take. It may be a rank's that has stopped: then it never answers.
_PATIENCE = 2.0


def patiently(*asks: Callable[[], object], seconds: float = _PATIENCE) -> list[str]:
    """Call what asks stores, each on a thread, and go on without those that take longer or fail.

    Returns:
        What has failed.
    """
    problems: list[str] = []

    def run(ask: Callable[[], object]) -> None:
        try:
            ask()
        except Exception as error:
            problems.append(described(error))

    threads = []
    for ask in asks:
        thread = threading.Thread(target=run, args=(ask,), daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            problems.append(described(error))
        else:
            threads.append(thread)
    until = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    if any(thread.is_alive() for thread in threads):
        problems.append(f"a store has not answered in {seconds:g} s")
    return problems


def own_store(store: Any, rank: int) -> Any:
    """A store for one group alone; each rank calls it once for every group that it makes.

    A store may outlive a group, and serve another one of the same name, which is not to find what
    the first has written.

    Args:
        store: A store of the group's ranks, of ``torch.distributed``.
        rank: Number of this rank.

    Returns:
        The store, with a prefix that the ranks have counted.

    Raises:
        RuntimeError: If the store does not answer.
    """
    return dist.PrefixStore(f"group {store.add(f'groups/{rank}', 1)}", store)


class Failures:
    """What the ranks of a group say of their failures, by its store.

    A store may outlive its group, and serve another one of the same name, whose ranks are not to
    hear of failures of the first. So each rank counts the groups: all make one of these for each.

    Args:
        store: The key-value store of the group.
        rank: Number of this rank.
    """

    def __init__(self, store: Any, rank: int) -> None:
        self._rank = rank
        self._store: Any = None

        def count() -> None:
            self._store = own_store(store, rank)

        patiently(count)

    @property
    def store(self) -> Any:
        """A store for this group alone.

        Raises:
            RuntimeError: If the store did not answer when this was made.
        """
        if self._store is None:
            raise RuntimeError("the store did not answer when the group was met")
        return self._store

    def tell(self, why: str) -> str:
        """Write why this rank gives up into the store, unless another rank has done so.

        Args:
            why: The reason.

        Returns:
            What another rank has said before; ``""`` if none has.

        Raises:
            RuntimeError: If the store does not answer.
        """
        own = f"rank {self._rank} gave up: "
        first: str = self.store.compare_set(_KEY, "", own + why).decode()
        return "" if first.startswith(own) else first

    def heard(self) -> str:
        """What the first rank that gave up has said; ``""`` if none has.

        Raises:
            RuntimeError: If the store does not answer.
        """
        return str(self.store.get(_KEY).decode()) if self.store.check([_KEY]) else ""


def cut(group: Any, rank: int, size: int) -> None:
    """Close a rank's connections of a gloo group, so that the calls of the others fail at once.

    gloo has no call for it, but closes all of them when a message does not come in time. A
    connection that is closed already raises without waiting, so that each of them is tried.

    Args:
        group: The gloo group, for good.
        rank: Number of this rank.
        size: Number of ranks.
    """
    for peer in range(size):
        if peer != rank:
            with contextlib.suppress(RuntimeError):
                work = group.recv([torch.empty(1, dtype=torch.uint8, device="cpu")], peer, _TAG)
                work.wait(timedelta(milliseconds=1))
