"""UCX as a transport, through ucxx."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
from ucxx import libucxx
from ucxx._lib.arr import Array
from ucxx.exceptions import UCXError

from ...arrays import host_array, on_gpu
from .base import Op, Transport, all_reduce_by_gather, finish_queued_work, shares, wait_until
from .rendezvous import meet

#: A request under way with the rank that it concerns, and the array that UCX uses meanwhile.
_Pending = tuple[int, Any, Any]


class Ucx(Transport):
    """One of ``world_size`` ranks, each of which has a UCX endpoint to every other.

    Arrays are NumPy arrays or PyTorch tensors on the CPU, and CuPy arrays or tensors on a GPU if
    UCX was built for it; all are used in place. UCX chooses the networks; UCX_TLS and its other
    environment variables restrict them. A thread of ucxx moves the bytes. A rank that dies is
    noticed at once by those that wait for it, a silent one after ``timeout``.

    Args:
        rank: Number of this rank, from 0.
        world_size: Number of ranks.
        address: ``(host, port)`` where rank 0 listens and all ranks meet, to exchange the addresses
            of their UCX workers.
        timeout: Seconds after which a call gives up waiting for a rank.

    Raises:
        OSError: If the ranks do not meet within the timeout; by calls, if a rank is gone or silent.
        RuntimeError: If other ranks connect than expected.
        ValueError: If ``rank`` is not from 0 to ``world_size - 1``.
    """

    def __init__(
        self, rank: int, world_size: int, address: tuple[str, int], timeout: float = 30.0
    ) -> None:
        self._rank = rank
        self._timeout = timeout
        #: Requests that were given up: UCX may still use their arrays.
        self._abandoned: list[_Pending] = []
        # Of its own, as `ucxx.init` knows one for the whole process.
        context = libucxx.UCXContext({})
        worker = libucxx.UCXWorker(
            context, enable_delayed_submission=True, enable_python_future=False
        )
        worker.start_progress_thread(polling_mode=False, epoll_timeout=1)
        self._leave = weakref.finalize(self, worker.stop_progress_thread)
        workers = meet(rank, world_size, address, bytes(worker.address), timeout)
        self._endpoints: list[Any] = [
            worker.create_endpoint_from_worker_address(
                libucxx.UCXAddress.create_from_buffer(found), True
            )
            if peer != rank
            else None
            for peer, found in enumerate(workers)
        ]
        self.barrier()

    @property
    def rank(self) -> int:
        """See ``Transport``."""
        return self._rank

    @property
    def world_size(self) -> int:
        """See ``Transport``."""
        return len(self._endpoints)

    @property
    def timeout(self) -> float:
        """See ``Transport``."""
        return self._timeout

    def close(self) -> None:
        """Leave the group: peers that wait for this rank raise."""
        self._leave()

    def empty(self, nbytes: int) -> Any:
        """See ``Transport``; a NumPy array."""
        return np.empty(nbytes, np.uint8)

    def all_gather(self, out: Any, x: Any) -> None:
        """See ``Transport``."""
        self.all_to_all_v(shares(out, self.world_size), [[x]] * self.world_size)

    def all_to_all(self, out: Any, x: Any) -> None:
        """See ``Transport``."""
        self.all_to_all_v(shares(out, self.world_size), shares(x, self.world_size))

    def all_to_all_v(self, outs: Sequence[Sequence[Any]], xs: Sequence[Sequence[Any]]) -> None:
        """See ``Transport``."""
        for out, x in zip(outs[self._rank], xs[self._rank], strict=True):
            out[...] = x
        receives = [(peer, out) for peer, pieces in enumerate(outs) for out in pieces]
        sends = [(peer, x) for peer, pieces in enumerate(xs) for x in pieces]
        self._messages(
            [(peer, out) for peer, out in receives if peer != self._rank],
            [(peer, x) for peer, x in sends if peer != self._rank],
        )

    def send(self, x: Any, to: int) -> None:
        """See ``Transport``."""
        self._messages([], [(to, x)])

    def recv(self, out: Any, source: int) -> None:
        """See ``Transport``."""
        self._messages([(source, out)], [])

    def all_reduce(self, x: Any, op: Op = "sum") -> None:
        """See ``Transport``; ``x`` is on the host, and small: all of it is sent to every rank."""
        all_reduce_by_gather(self, x, op)

    def barrier(self) -> None:
        """See ``Transport``."""
        self.all_gather(self.empty(self.world_size), self.empty(1))

    def _messages(
        self, receives: Sequence[tuple[int, Any]], sends: Sequence[tuple[int, Any]]
    ) -> None:
        """Receive and send arrays, given with the rank of the other side."""
        for _, x in (*receives, *sends)[:1]:
            finish_queued_work(x)
        pending = self._abandoned
        try:
            # Between two ranks order tells messages apart: the tag only says who sends.
            for peer, out in receives:
                if out.shape[0]:
                    array = _memory(out)
                    tag = libucxx.UCXXTag(peer)
                    request = self._endpoints[peer].tag_recv(array, tag)
                    pending.append((peer, request, array))
            for peer, x in sends:
                if x.shape[0]:
                    array = _memory(x)
                    tag = libucxx.UCXXTag(self._rank)
                    request = self._endpoints[peer].tag_send(array, tag)
                    pending.append((peer, request, array))
            done = wait_until(self._done, self._timeout)
        except UCXError as error:
            raise ConnectionError(f"UCX: {error}") from error
        if not done:
            late = sorted({peer for peer, *_ in pending})
            raise TimeoutError(f"ranks {late} did not answer within {self._timeout:g} s")

    def _done(self) -> bool:
        for item in list(self._abandoned):
            peer, request, _ = item
            if request.completed:
                try:
                    request.check_error()
                except UCXError as error:
                    raise ConnectionError(
                        f"rank {peer} is gone or sent too much: {error}"
                    ) from error
                self._abandoned.remove(item)
        return not self._abandoned


def _memory(x: Any) -> Any:
    return Array(x if on_gpu(x) else host_array(x))
