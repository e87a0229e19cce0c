"""What prepared calls queue on a GPU, recorded: a call of the same memory is one launch then.

Frameworks call a collective with the same memory again and again: buckets stay where they are, and
an allocator hands out the same blocks step by step. What such calls queue is the same each time. A
CUDA graph has it, and the host only launches that.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import weakref
from collections.abc import Callable, Hashable, Iterator, Sized
from typing import Any, NamedTuple, Protocol

#: Calls of the same memory before they are recorded: by then all kernels are compiled and loaded.
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
    """Records what functions queue. What it has recorded never runs at once."""

    def place(self, *arrays: Any) -> Hashable | None:
        """What calls of these arrays have in common. None: they are not recorded."""

    def record(self, queue: Callable[[], object]) -> Callable[[], None]:
        """Have `queue` queue its work nowhere; what queues it, any number of times."""


class GraphRecorder:
    """Records as CUDA graphs.

    Args:
        device: The GPU, of PyTorch.
    """

    def __init__(self, device: Any) -> None:
        import torch

        from .side_stream import FIRST

        self._torch: Any = torch
        # Graphs keep the priority of their kernels.
        self._stream = torch.cuda.Stream(device, FIRST)
        #: Memory that graphs share. PyTorch drops it with the last of them.
        self._pool: Any = None
        self._graphs: weakref.WeakSet[Any] = weakref.WeakSet()

    def place(self, *arrays: Any) -> Hashable | None:
        """See ``Recorder``: addresses, sizes and dtypes."""
        found: list[Any] = []
        for x in arrays:
            if type(x) is not self._torch.Tensor or not x.is_contiguous():
                return None
            found += (x.data_ptr(), x.numel(), x.dtype)
        return tuple(found)

    def record(self, queue: Callable[[], object]) -> Callable[[], None]:
        """See ``Recorder``."""
        cuda = self._torch.cuda
        if not self._graphs:
            self._pool = cuda.graph_pool_handle()
        graph = cuda.CUDAGraph()
        with cuda.stream(self._stream), _no_collection():
            # Other threads go on using the GPU.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                queue()
            except BaseException:
                # What ends here says only that something was wrong.
                with contextlib.suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        self._graphs.add(graph)
        replay: Callable[[], None] = graph.replay
        return replay


class Recordings:
    """Which calls of a prepared collective are recorded.

    Args:
        recorder: What records them. None: none is.
    """

    def __init__(self, recorder: Recorder | None = None) -> None:
        self._recorder = recorder
        #: By memory, calls so far.
        self._seen: dict[Hashable, int] = {}

    def place(self, *arrays: Any) -> Hashable | None:
        """See ``Recorder``."""
        return None if self._recorder is None else self._recorder.place(*arrays)

    def wanted(self, place: Hashable | None, so_far: Sized) -> bool:
        """Note a call, and say whether it is worth a recording beside those that there are."""
        if place is None:
            return False
        count = self._seen.get(place, 0)
        if count == 0 and len(self._seen) >= REMEMBERED:
            self._seen.clear()
        self._seen[place] = count + 1
        return count >= BEFORE and len(so_far) < MOST

    def forget(self) -> None:
        """Count anew: calls will run other kernels."""
        self._seen.clear()

    def record(self, queue: Callable[[], object]) -> Callable[[], None]:
        """See ``Recorder``."""
        assert self._recorder is not None
        return self._recorder.record(queue)


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
