"""Ranks of resident experts as threads, with PyTorch or with interpreted kernels."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from tightwire.adapters.transports.peer import ThreadMemory, ThreadRegion, connect_threads


class TurnRegion:
    """A region whose ranks run one at a time, as Triton's interpreter must, and count barriers."""

    def __init__(self, region: ThreadRegion, lock: threading.Lock) -> None:
        self._region, self._lock = region, lock
        self._number = torch.zeros(1, dtype=torch.int64)

    @property
    def parts(self) -> list[Any]:
        return self._region.parts

    def barrier(self) -> None:
        self._lock.release()
        try:
            self._region.barrier()
        finally:
            self._lock.acquire()
        self._number += 1

    def late(self) -> Any:
        return None

    def number(self) -> Any:
        return self._number


class TurnMemory:
    """Memory of such regions, which start with what is left of earlier data."""

    def __init__(self, memory: ThreadMemory, lock: threading.Lock) -> None:
        self._memory, self._lock = memory, lock
        self.rank, self.world_size = memory.rank, memory.world_size

    def region(self, nbytes: int) -> TurnRegion:
        self._lock.release()
        try:
            region = self._memory.region(nbytes)
            region.parts[self.rank][:] = 0xA5
            region.barrier()
        finally:
            self._lock.acquire()
        return TurnRegion(region, self._lock)


def run_ranks(ranks: int, task: Callable[[Any], Any], timeout: float = 60.0) -> list[Any]:
    """What `task(memory)` returns on each of so many threads, which run one at a time."""
    lock = threading.Lock()
    found: list[Any] = [None] * ranks
    errors: list[BaseException] = []

    def run(memory: ThreadMemory) -> None:
        with lock:
            try:
                found[memory.rank] = task(TurnMemory(memory, lock))
            except BaseException as error:
                errors.append(error)
                memory._meeting.abort()

    memories = connect_threads(ranks, timeout)
    threads = [threading.Thread(target=run, args=(memory,)) for memory in memories]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        # What a rank found comes before what the others missed of it.
        raise min(errors, key=lambda error: isinstance(error.__cause__, TimeoutError))
    return found


class Alone:
    """Memory of rank 0 of many, which are simulated: the others have written nothing."""

    rank = 0

    def __init__(self, ranks: int) -> None:
        self.world_size = ranks
        self.barriers = 0
        #: What is done to memory behind a barrier.
        self.damage: Callable[[Any], None] | None = None
        self._number = torch.zeros(1, dtype=torch.int64)

    def region(self, nbytes: int) -> Any:
        # What ranks compare is the same on all of them.
        part = torch.zeros(nbytes, dtype=torch.uint8)
        self.parts = [part] * self.world_size
        return self

    def barrier(self) -> None:
        self.barriers += 1
        self._number += 1
        if self.damage is not None:
            self.damage(self.parts[0])

    def late(self) -> Any:
        return None

    def number(self) -> Any:
        return self._number


def by_ends(experts: list[Any], rows: Any, ends: Any) -> Any:
    """The results of experts for rows of the capacity, zeros behind the last."""
    stops = ends.tolist()
    parts = [rows[a:b] for a, b in zip([0, *stops[:-1]], stops, strict=True)]
    results = [expert(part) for expert, part in zip(experts, parts, strict=True)]
    return torch.cat([*results, rows[stops[-1] :] * 0])
