"""The pipeline: pieces of a large message are encoded and decoded while others are on the wire."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

from . import tensors

Task = Callable[[], Any]


class Lanes:
    """Runs encoding and decoding while data are on the wire, each in the order of its tasks.

    On a GPU these are two streams, on the host two threads; the wire is the caller's own stream and
    thread. Leaving the context joins them: what follows sees all results, and errors are raised.
    """

    def __init__(self, like: Any) -> None:
        self._cuda = tensors.is_cuda(like)
        self._like = like
        self._waiting: list[Future[Any]] = []

    def __enter__(self) -> Self:
        if self._cuda:
            import torch

            self._wire = torch.cuda.current_stream(self._like.device)
            self._encoding = torch.cuda.Stream(self._like.device)
            self._decoding = torch.cuda.Stream(self._like.device)
            self._encoding.wait_stream(self._wire)
        else:
            self._encoder = ThreadPoolExecutor(1, "tightwire-encode")
            self._decoder = ThreadPoolExecutor(1, "tightwire-decode")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._cuda:
            self._wire.wait_stream(self._encoding)
            self._wire.wait_stream(self._decoding)
            return
        self._encoder.shutdown(cancel_futures=error is not None)
        self._decoder.shutdown(cancel_futures=error is not None)
        if error is None:
            for future in self._waiting:
                future.result()

    def encode(self, task: Task, *, behind: bool = False) -> Task:
        """Start `task`; what is returned makes the wire wait for it, and gives its result.

        With `behind` it starts behind what is on the wire now.
        """
        if not self._cuda:
            return self._encoder.submit(task).result
        import torch

        if behind:
            self._encoding.wait_stream(self._wire)
        with torch.cuda.stream(self._encoding):
            result = task()
            done = torch.cuda.Event()
            done.record()

        def ready() -> Any:
            self._wire.wait_event(done)
            return result

        return ready

    def decode(self, task: Task) -> None:
        """Start `task` behind what is on the wire now."""
        if not self._cuda:
            self._waiting.append(self._decoder.submit(task))
            return
        import torch

        done = torch.cuda.Event()
        done.record(self._wire)
        self._decoding.wait_event(done)
        with torch.cuda.stream(self._decoding):
            task()


class Inline:
    """`Lanes` for a single piece: tasks run where and when somebody waits for them."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        pass

    def encode(self, task: Task, *, behind: bool = False) -> Task:
        """The task itself."""
        return task

    def decode(self, task: Task) -> None:
        """Run `task`."""
        task()
