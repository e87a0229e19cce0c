"""Order of kernels that take all of a GPU while they wait for other ranks.

If two of them began in different orders on two ranks, each would wait for the other, which has no
processor there.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class KernelOrder:
    """The order of such kernels on each GPU, which is that in which the host queues them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: By GPU, CUDA's number of the stream of the last one, and an event behind it.
        self._last: dict[int, tuple[int, Any]] = {}

    @contextmanager
    def next(self, device: Any) -> Iterator[None]:
        """Have what is queued inside, on the current stream, follow the last of them.

        Args:
            device: The GPU, of PyTorch.
        """
        import torch

        with self._lock:
            stream = torch.cuda.current_stream(device)
            number, event = self._last.get(device.index) or (stream.cuda_stream, torch.cuda.Event())
            if number != stream.cuda_stream:
                stream.wait_event(event)
            try:
                yield
            finally:
                event.record(stream)
                self._last[device.index] = stream.cuda_stream, event


#: That of this process.
KERNEL_ORDER = KernelOrder()
