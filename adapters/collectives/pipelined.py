"""The pipeline: pieces of a large message are encoded and decoded while others are on the wire."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

from . import tensors
from .calls import Call
from .chunk_views import ChunkViews
from .coding import Span
from .steps import PendingExchange

#: Elements of a piece of a pipelined message are a multiple of this, so that tiles are whole.
_PIECE = 1 << 16

Task = Callable[[], Any]


class Pipeline:
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


class Serial:
    """`Pipeline` for a single piece: tasks run where and when somebody waits for them."""

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


def spans_of(n: int, pieces: int) -> list[Span]:
    """Elements 0 to n in at most `pieces` pieces of whole tiles."""
    step = max(_PIECE, -(-n // (pieces * _PIECE)) * _PIECE)
    return [(a, min(a + step, n)) for a in range(0, n, step)] or [(0, 0)]


def in_pieces(
    call: Call,
    like: Any,
    count: int,
    encode: Callable[[int], ChunkViews],
    begin: Callable[[int, ChunkViews], PendingExchange],
    end: Callable[[int, PendingExchange], Callable[[], None]],
    last: bool,
) -> None:
    """Pieces 0 to `count`, each encoded, begun, ended and decoded, overlapping.

    Chunk descriptors and static parts of a piece go ahead of the dynamic parts of the one
    before, so that its sizes are known when these have gone.
    """
    call.algorithm += f", {count} pieces"
    with Pipeline(like) as pipeline:
        ready = pipeline.encode(lambda: encode(0))
        before: PendingExchange | None = None
        for k in range(count):
            with call.stage("wait"):
                send = ready()
            began = begin(k, send)
            if k + 1 < count:
                ready = pipeline.encode(functools.partial(encode, k + 1))
            if began.arriving is None:
                pipeline.decode(end(k, began))
                continue
            if before is not None:
                pipeline.decode(end(k - 1, before))
            before = began
        if before is not None:
            pipeline.decode(end(count - 1, before))
        # What goes wrong from now on, on the pipeline too, is this rank's own.
        call.exchanged = last
