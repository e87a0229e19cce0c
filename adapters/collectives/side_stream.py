"""Streams for collectives of PyTorch tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

#: Of streams whose kernels start before those that wait on others: they are short, and the network
#: waits for them.
FIRST = -1


class SideStream:
    """On a GPU a stream that one kind of call has to itself, or several of them.

    Calls come from the main thread and from autograd's, and from several streams; a lock orders
    them.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._streams: dict[tuple[torch.device, int], Any] = {}

    def run(self, tensor: Any, call: Callable[[], None], number: int = 0) -> Any:
        """A torch Future of `tensor`, which `call()` fills.

        On a GPU `call` is queued on the own stream of this number, behind the current one; who
        waits for the future has his current stream wait. Work memory thus never changes streams.
        """
        with self.lock:
            if tensor.device.type != "cuda":
                call()
                return finished_future(tensor, None)
            own = self._own(tensor.device, number)
            own.wait_stream(torch.cuda.current_stream(tensor.device))
            with torch.cuda.stream(own):
                call()
                return finished_future(tensor, [tensor.device])

    def run_here(self, tensor: Any, call: Callable[[], None]) -> None:
        """As `run`, and the current stream waits at once, which costs less than by a future."""
        with self.lock, self.within(tensor):
            call()

    @contextmanager
    def within(self, tensor: Any, number: int = 0) -> Iterator[None]:
        """Queue on the own stream of this number, behind the current one, which waits for it."""
        if tensor.device.type != "cuda":
            yield
            return
        own, current = self._own(tensor.device, number), torch.cuda.current_stream(tensor.device)
        if own == current:
            yield
            return
        own.wait_stream(current)
        try:
            with torch.cuda.stream(own):
                yield
        finally:
            current.wait_stream(own)

    def _own(self, device: torch.device, number: int) -> Any:
        own = self._streams.get((device, number))
        if own is None:
            own = self._streams[device, number] = torch.cuda.Stream(device, FIRST)
        return own


def finished_future(tensor: Any, devices: Any) -> Any:
    """A Future of `tensor` that the current streams of `devices` have filled when they get here."""
    future: Any = torch.futures.Future(devices=devices)
    future.set_result(tensor)
    return future
