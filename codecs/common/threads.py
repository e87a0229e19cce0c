"""The library's own thread pool. Kernels release the GIL, so spans of tiles run side by side."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from .float_mode import default_floats

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

T = TypeVar("T")

#: Least input bytes that are worth a thread of their own.
MIN_SPAN_NBYTES = 1 << 20

_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None


def cpu_count() -> int:
    """Processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _executor() -> ThreadPoolExecutor:
    global _pool
    with _lock:
        if _pool is None:
            # Imported at first use: it brings logging, and importing the library is to be quick.
            from concurrent.futures import ThreadPoolExecutor

            _pool = ThreadPoolExecutor(max(cpu_count(), 2), thread_name_prefix="tightwire")
        return _pool


def _forget_pool() -> None:
    """A forked child has none of its parent's threads."""
    global _pool, _lock
    _pool, _lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pool)


def spans(n_units: int, nbytes: int, threads: int) -> list[tuple[int, int]]:
    """`n_units` of `nbytes` in all, cut into contiguous, nearly equal, non-empty ranges.

    At most `threads` of them, and no more than the size is worth.
    """
    threads = min(threads, n_units, nbytes // MIN_SPAN_NBYTES)
    if threads <= 1:
        return [(0, n_units)]
    cuts = [n_units * i // threads for i in range(threads + 1)]
    return list(itertools.pairwise(cuts))


def run(task: Callable[..., T], calls: Sequence[tuple[Any, ...]]) -> list[T]:
    """`task(*call)` for every call, in order: the first runs here, the others on the pool.

    On the pool it computes in the default floating-point mode; here the caller sees to that. The
    task must not call `run` itself: a pool whose threads wait for it can stall.
    """
    if len(calls) == 1:
        return [task(*calls[0])]
    # Threads of the pool have the mode of whoever was the first to need one.
    there = default_floats()(task)
    futures = [_executor().submit(there, *call) for call in calls[1:]]
    try:
        first = task(*calls[0])
    finally:
        # Spans write to the caller's buffers: none may still run when this returns or raises.
        for future in futures:
            future.exception()
    return [first, *(future.result() for future in futures)]
