"""A transport between the threads of one process, for tests and for trying algorithms."""

from __future__ import annotations

import functools
import queue
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

from ...arrays import describe, host_array, writable_bits
from ...codecs.common.float_mode import default_floats
from .base import Op, Transport, all_reduce_by_gather, shares

T = TypeVar("T")

#: A kind of call and its bytes; a kind of None that the rank has left, and how errors say that.
_Message = tuple[str | None, Any]
_Pipes = list[list["queue.SimpleQueue[_Message]"]]


class ThreadTransport(Transport):
    """One rank of a group of threads; ``connect`` makes the group.

    Arrays are NumPy arrays or PyTorch tensors on the CPU. Bytes are copied when they are sent, so
    no call waits for its receiver.

    Args:
        rank: Number of this rank, from 0.
        pipes: The connections of the group.
        timeout: Seconds after which a call gives up waiting for a rank.

    Raises:
        TimeoutError: By calls, if a rank sends nothing.
        ConnectionError: By calls, if a rank has left or given up.
    """

    def __init__(self, rank: int, pipes: _Pipes, timeout: float) -> None:
        self._rank = rank
        #: `pipes[i][j]` holds what rank i has sent to rank j.
        self._pipes = pipes
        self._timeout = timeout

    @property
    def rank(self) -> int:
        """See ``Transport``."""
        return self._rank

    @property
    def world_size(self) -> int:
        """See ``Transport``."""
        return len(self._pipes)

    @property
    def timeout(self) -> float:
        """See ``Transport``."""
        return self._timeout

    def empty(self, nbytes: int) -> Any:
        """See ``Transport``; a NumPy array."""
        return np.empty(nbytes, np.uint8)

    def all_gather(self, out: Any, x: Any) -> None:
        """See ``Transport``."""
        self._exchange("all_gather", shares(out, self.world_size), [[x]] * self.world_size)

    def all_to_all(self, out: Any, x: Any) -> None:
        """See ``Transport``."""
        size = self.world_size
        self._exchange("all_to_all", shares(out, size), shares(x, size))

    def all_to_all_v(self, outs: Sequence[Sequence[Any]], xs: Sequence[Sequence[Any]]) -> None:
        """See ``Transport``."""
        self._exchange("all_to_all_v", outs, xs)

    def send(self, x: Any, to: int) -> None:
        """See ``Transport``."""
        self._post("send", to, x)

    def recv(self, out: Any, source: int) -> None:
        """See ``Transport``."""
        self._take("send", source, out)

    def all_reduce(self, x: Any, op: Op = "sum") -> None:
        """See ``Transport``."""
        all_reduce_by_gather(self, x, op)

    def reduce_scatter(self, out: Any, x: Any) -> None:
        """See ``Transport``; added up in the order of ranks."""
        info = describe(out)
        total = writable_bits(out, info.dtype, info.shape, "out").view(info.dtype.numpy)
        came = np.empty((self.world_size, total.size), total.dtype)
        self.all_to_all(came.reshape(-1).view(np.uint8), host_array(x).view(np.uint8))
        with default_floats():
            total[...] = functools.reduce(np.add, came)

    def barrier(self) -> None:
        """See ``Transport``."""
        nothing = [[self.empty(0)]] * self.world_size
        self._exchange("barrier", nothing, nothing)

    def close(self) -> None:
        """Leave the group: peers that wait for this rank raise at once."""
        self._leave("has left")

    def abort(self, why: str) -> None:
        """See ``Transport``; peers that wait for this rank raise at once."""
        self._leave(f"gave up: {why}")

    def _leave(self, how: str) -> None:
        for pipe in self._pipes[self._rank]:
            pipe.put((None, how))

    def _exchange(
        self, kind: str, outs: Sequence[Sequence[Any]], xs: Sequence[Sequence[Any]]
    ) -> None:
        for peer, pieces in enumerate(xs):
            for piece in pieces:
                self._post(kind, peer, piece)
        for peer, pieces in enumerate(outs):
            for piece in pieces:
                self._take(kind, peer, piece)

    def _post(self, kind: str, to: int, x: Any) -> None:
        self._pipes[self._rank][to].put((kind, host_array(x).copy()))

    def _take(self, kind: str, source: int, out: Any) -> None:
        try:
            found, data = self._pipes[source][self._rank].get(timeout=self._timeout)
        except queue.Empty:
            seconds = f"{self._timeout:g} s"
            raise TimeoutError(f"rank {source} sent nothing for {seconds}") from None
        target = host_array(out)
        if found is None:
            raise ConnectionError(f"rank {source} {data}")
        if (found, data.size) != (kind, target.size):
            got = f"{data.size} bytes of {found}"
            raise RuntimeError(f"rank {source} sent {got}; expected: {target.size} of {kind}")
        target[...] = data


def connect(world_size: int, timeout: float = 30.0) -> list[ThreadTransport]:
    """Make the transports of a new group.

    Args:
        world_size: Number of ranks.
        timeout: Seconds after which a call gives up waiting for a rank.

    Returns:
        A transport per rank.

    Raises:
        ValueError: If ``world_size`` is below 1.
    """
    if world_size < 1:
        raise ValueError(f"world_size is {world_size}; allowed: at least 1")
    ranks = range(world_size)
    pipes: _Pipes = [[queue.SimpleQueue() for _ in ranks] for _ in ranks]
    return [ThreadTransport(rank, pipes, timeout) for rank in ranks]


def run_ranks(
    world_size: int, task: Callable[[ThreadTransport], T], timeout: float = 120.0
) -> list[T]:
    """Run a function on every rank of a new group, each in a thread of its own.

    A rank whose function raises leaves the group.

    Args:
        world_size: Number of ranks.
        task: Called with the transport of the rank.
        timeout: Seconds after which a call gives up waiting for a rank.

    Returns:
        The results, in the order of ranks.

    Raises:
        Exception: What the function raised first on any rank, when all have ended.
        ValueError: If ``world_size`` is below 1.

    Example:
        >>> from tightwire.adapters.transports.threads import run_ranks
        >>> run_ranks(3, lambda transport: transport.rank)
        [0, 1, 2]
    """
    return _run([(transport,) for transport in connect(world_size, timeout)], task)


def run_grid(
    nodes: int,
    size: int,
    task: Callable[[ThreadTransport, ThreadTransport], T],
    timeout: float = 120.0,
) -> list[T]:
    """Run a function on every rank of a grid of nodes, each in a thread of its own.

    Args:
        nodes: Number of nodes.
        size: Ranks of a node.
        task: Called with the transport of the rank's node, and that of the ranks with its number in
            all nodes.
        timeout: As in ``run_ranks``.

    Returns:
        The results, node by node.

    Raises:
        Exception: As by ``run_ranks``.
        ValueError: If ``nodes`` or ``size`` is below 1.

    Example:
        >>> from tightwire.adapters.transports.threads import run_grid
        >>> run_grid(2, 2, lambda within, between: (between.rank, within.rank))
        [(0, 0), (0, 1), (1, 0), (1, 1)]
    """
    within = [connect(size, timeout) for _ in range(nodes)]
    between = [connect(nodes, timeout) for _ in range(size)]
    grid = [(within[m][n], between[n][m]) for m in range(nodes) for n in range(size)]
    return _run(grid, task)


def _run(ranks: Sequence[tuple[ThreadTransport, ...]], task: Callable[..., T]) -> list[T]:
    """What `task` returns on every rank, given its transports."""
    failures: list[BaseException] = []

    def run(*transports: ThreadTransport) -> T:
        try:
            return task(*transports)
        except BaseException as error:
            failures.append(error)
            for transport in transports:
                transport.close()
            raise

    with ThreadPoolExecutor(len(ranks)) as pool:
        futures = [pool.submit(run, *transports) for transports in ranks]
    if failures:
        raise failures[0]
    return [future.result() for future in futures]
