"""Memory that all ranks of a host can read: each writes its own part, and reads the others'.

``connect_threads`` makes it between the threads of a process. ``SymmetricMemory`` makes it on the
GPUs of a host, by ``torch.distributed._symmetric_memory``: bytes are then read over NVLink where
they lie.
"""

from __future__ import annotations

import threading
from typing import Any, Protocol

import numpy as np


class PeerMemoryError(RuntimeError):
    """Peer memory could not be made. All ranks raise it, and none has made any.

    Args:
        text: Why.

    Raises:
        RuntimeError: Never here; it is the base class.
    """


class Region(Protocol):
    """Memory of one size on every rank, which all of them read.

    A rank writes to ``parts[rank]`` only. ``barrier`` orders what it has written before what the
    others read behind it, and what it has read before what they write behind it.
    """

    @property
    def parts(self) -> list[Any]:
        """The memory of every rank: uint8, shape ``(n,)``."""

    def barrier(self) -> None:
        """Wait for all ranks: on the host, or on a GPU on the current stream.

        Raises:
            TimeoutError: If a rank does not come within the timeout. On a GPU nobody raises; see
                ``late``.
        """

    def late(self) -> Any:
        """What barriers on a GPU have found.

        Returns:
            int64, shape ``(1,)``, on the device: 0, or 1 + the number of a rank that did not come
            in time. None where ``barrier`` raises.
        """

    def number(self) -> Any:
        """How many barriers there were.

        Returns:
            int64, shape ``(1,)``, on the device. None where that is not known.
        """


class PeerMemory(Protocol):
    """A fixed group of ranks that can read one another's memory."""

    @property
    def rank(self) -> int:
        """Number of this rank, from 0."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""

    @property
    def timeout(self) -> float:
        """Seconds for which a rank waits for another."""

    def region(self, nbytes: int) -> Region:
        """Make memory. All ranks call it, with the same size and in the same order.

        Args:
            nbytes: Bytes of each rank; a multiple of 128.

        Returns:
            The region, zero.

        Raises:
            PeerMemoryError: On all ranks, if it cannot be made on one of them.
            RuntimeError: If ranks differ in the size.
            TimeoutError: If a rank does not come within the timeout.
        """


class ThreadRegion:
    """A ``Region`` of threads: NumPy arrays of one process."""

    def __init__(self, parts: list[Any], meeting: threading.Barrier, timeout: float) -> None:
        self._parts = parts
        self._meeting = meeting
        self._timeout = timeout

    @property
    def parts(self) -> list[Any]:
        """See ``Region``."""
        return self._parts

    def barrier(self) -> None:
        """See ``Region``."""
        _meet(self._meeting, self._timeout)

    def late(self) -> Any:
        """See ``Region``."""
        return None

    def number(self) -> Any:
        """See ``Region``."""
        return None


class ThreadMemory:
    """``PeerMemory`` of a thread; ``connect_threads`` makes it.

    Args:
        rank: Number of this rank, from 0.
        meeting: Where all ranks meet.
        parts: What all ranks have in common: the memory that they make, in their order.
        timeout: Seconds after which waiting ends.
    """

    def __init__(
        self,
        rank: int,
        meeting: threading.Barrier,
        parts: list[Any],
        timeout: float,
    ) -> None:
        self._rank = rank
        self._meeting = meeting
        self._shared = parts
        self._timeout = timeout

    @property
    def rank(self) -> int:
        """See ``PeerMemory``."""
        return self._rank

    @property
    def world_size(self) -> int:
        """See ``PeerMemory``."""
        return self._meeting.parties

    @property
    def timeout(self) -> float:
        """See ``PeerMemory``."""
        return self._timeout

    def region(self, nbytes: int) -> ThreadRegion:
        """See ``PeerMemory``."""
        self._shared[self._rank] = np.zeros(nbytes, np.uint8)
        _meet(self._meeting, self._timeout)
        parts = list(self._shared)
        _meet(self._meeting, self._timeout)
        sizes = [part.size for part in parts]
        if len(set(sizes)) > 1:
            raise RuntimeError(f"ranks ask for {sizes} bytes; needed: the same size on all ranks")
        return ThreadRegion(parts, self._meeting, self._timeout)


def connect_threads(world_size: int, timeout: float = 30.0) -> list[ThreadMemory]:
    """Make the memory of a new group of threads.

    Args:
        world_size: Number of ranks.
        timeout: Seconds after which a rank gives up waiting for another.

    Returns:
        One for each rank.
    """
    parts: list[Any] = [None] * world_size
    meeting = threading.Barrier(world_size)
    return [ThreadMemory(rank, meeting, parts, timeout) for rank in range(world_size)]


def _meet(meeting: threading.Barrier, timeout: float) -> None:
    try:
        meeting.wait(timeout)
    except threading.BrokenBarrierError:
        raise TimeoutError(f"a rank did not come within {timeout:g} s, or has failed") from None
