"""What prepared calls queue on a GPU, recorded: a call of the same memory is few launches then.

Frameworks call a collective with the same memory again and again: buckets stay where they are, and
an allocator hands out the same blocks step by step. What such calls queue is the same each time. A
CUDA graph has it, and the host only launches that. Where a graph cannot hold the network's calls
there is one for what comes before each of them, and one for what follows.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import weakref
from collections.abc import Callable, Hashable, Iterator, Sized
from typing import Any, NamedTuple, Protocol

#: Calls of a prepared collective before some are recorded: by then all kernels are compiled and
#: loaded. Those of certain memory are recorded when they come for the second time.
BEFORE = 2
#: Recordings of a slot at most, and different memory that is remembered.
MOST, REMEMBERED = 256, 1024


class Recording(NamedTuple):
    """A call of certain memory.

    Attributes:
        replay: Queues what the call has queued.
        raw_bytes: As of the call.
        wire_bytes: As of the call.
    """

    replay: Callable[[], None]
    raw_bytes: int
    wire_bytes: int


class Recorder(Protocol):
    """Records what functions queue."""

    def place(self, *arrays: Any) -> Hashable | None:
        """What calls of these arrays have in common. None: they are not recorded."""

    def record(self, queue: Callable[[], object], number: int) -> Callable[[], None]:
        """Have `queue` queue its work nowhere; what queues it, any number of times.

        What is recorded under one number never runs at the same time; under different numbers it
        may.
        """

    def queue(self, work: Callable[[], None]) -> None:
        """Queue work of the network; while something is recorded that is part of it."""


class _Pool(NamedTuple):
    """Memory that graphs share which run one after the other.

    Attributes:
        handle: PyTorch's, which drops the memory with the last graph.
        graphs: The graphs that still exist.
    """

    handle: Any
    graphs: weakref.WeakSet[Any]


class GraphRecorder:
    """Records as CUDA graphs.

    Args:
        device: The GPU, of PyTorch.
        whole: Whether graphs can hold the work of the network.
    """

    def __init__(self, device: Any, *, whole: bool) -> None:
        import torch

        from .side_stream import FIRST

        self._torch: Any = torch
        # Graphs keep the priority of their kernels.
        self._stream = torch.cuda.Stream(device, FIRST)
        self._pools: dict[int, _Pool] = {}
        self._whole = whole
        #: PyTorch warns of graphs without work: each part begins with some.
        self._word: Any = None if whole else torch.zeros(1, device=device)
        #: What is being recorded, and the graph that is not at its end.
        self._parts: list[Callable[[], None]] | None = None
        self._graph: Any = None
        self._pool: Any = None

    def place(self, *arrays: Any) -> Hashable | None:
        """See ``Recorder``: addresses, sizes and dtypes."""
        found: list[Any] = []
        for x in arrays:
            if type(x) is not self._torch.Tensor or not x.is_contiguous():
                return None
            found += (x.data_ptr(), x.numel(), x.dtype)
        return tuple(found)

    def record(self, queue: Callable[[], object], number: int) -> Callable[[], None]:
        """See ``Recorder``."""
        pool = self._pools.get(number)
        if pool is None or not pool.graphs:
            pool = _Pool(self._torch.cuda.graph_pool_handle(), weakref.WeakSet())
        self._pools[number] = self._pool = pool
        parts: list[Callable[[], None]] = []
        self._parts = parts
        try:
            with self._torch.cuda.stream(self._stream), _no_collection():
                self._begin()
                try:
                    queue()
                except BaseException:
                    # What ends here says only that something was wrong.
                    with contextlib.suppress(RuntimeError):
                        self._end()
                    raise
                self._end()
        finally:
            # A graph that nobody else has would take the pool with it when the next one begins.
            self._parts = self._graph = None
        return parts[0] if len(parts) == 1 else lambda: _run(parts)

    def queue(self, work: Callable[[], None]) -> None:
        """See ``Recorder``."""
        if self._parts is None or self._whole:
            work()
            return
        self._end()
        self._parts.append(work)
        self._begin()

    def _begin(self) -> None:
        self._graph = self._torch.cuda.CUDAGraph()
        # Other threads go on using the GPU.
        self._graph.capture_begin(pool=self._pool.handle, capture_error_mode="thread_local")
        if self._word is not None:
            self._word.zero_()

    def _end(self) -> None:
        assert self._parts is not None
        self._graph.capture_end()
        self._pool.graphs.add(self._graph)
        self._parts.append(self._graph.replay)


def _run(parts: list[Callable[[], None]]) -> None:
    for part in parts:
        part()


class Recordings:
    """Which calls of a prepared collective are recorded.

    Args:
        recorder: What records them. None: none is.
    """

    def __init__(self, recorder: Recorder | None = None) -> None:
        self._recorder = recorder
        #: The memory of calls so far.
        self._seen: set[Hashable] = set()
        #: Calls that were not recorded, at most `BEFORE`.
        self._run = 0

    def place(self, *arrays: Any) -> Hashable | None:
        """See ``Recorder``."""
        return None if self._recorder is None else self._recorder.place(*arrays)

    def wanted(self, place: Hashable | None, so_far: Sized) -> bool:
        """Note a call, and say whether it is worth a recording beside those that there are."""
        if place is None:
            return False
        known = place in self._seen
        if not known and len(self._seen) >= REMEMBERED:
            self._seen.clear()
        self._seen.add(place)
        if known and self._run >= BEFORE:
            return len(so_far) < MOST
        self._run = min(self._run + 1, BEFORE)
        return False

    def forget(self) -> None:
        """Have one call more not be recorded: messages have another size, and kernels may, too."""
        self._run = min(self._run, BEFORE - 1)

    def record(self, queue: Callable[[], object], number: int) -> Callable[[], None]:
        """See ``Recorder``."""
        assert self._recorder is not None
        return self._recorder.record(queue, number)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Have no graph of others be destroyed meanwhile."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def capturing() -> bool:
    """Whether the user captures a CUDA graph."""
    torch: Any = sys.modules["torch"]
    return bool(torch.cuda.is_current_stream_capturing())
