"""MPI as a transport, through mpi4py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from .base import Op, Transport, finish_queued_work, wait_until

_OPS = {"sum": MPI.SUM, "max": MPI.MAX, "or": MPI.BOR}


class Mpi(Transport):
    """The ranks of an MPI communicator, of which it makes a duplicate for itself.

    Arrays are NumPy arrays or PyTorch tensors on the CPU, and on a GPU if the MPI library is
    CUDA-aware; all are used in place. A silent rank raises TimeoutError. A rank that dies ends the
    whole job, and mpiexec reports it, as MPI jobs do by default; with Open MPI's ``mpiexec
    --with-ft ulfm`` the others raise MPI.Exception, a RuntimeError. After an error leave by
    ``comm.Abort()``: MPI_Finalize, which mpi4py calls when Python ends, waits for all ranks.

    Args:
        comm: The MPI communicator, all of whose ranks make the transport together.
        timeout: Seconds after which a call gives up waiting for a rank.

    Raises:
        TimeoutError: By calls, if a rank does not take part.
        RuntimeError: By calls, if a rank sends another number of bytes.
    """

    def __init__(self, comm: MPI.Comm = MPI.COMM_WORLD, timeout: float = 30.0) -> None:
        self._timeout = timeout
        #: Requests that were given up: MPI may still use their arrays, which they hold.
        self._abandoned: list[MPI.Request] = []
        self._comm, request = comm.Idup()
        self._wait("MPI_Comm_idup", [request])
        self._comm.Set_errhandler(MPI.ERRORS_RETURN)

    @property
    def rank(self) -> int:
        """See ``Transport``."""
        return int(self._comm.rank)

    @property
    def world_size(self) -> int:
        """See ``Transport``."""
        return int(self._comm.size)

    @property
    def timeout(self) -> float:
        """See ``Transport``."""
        return self._timeout

    def empty(self, nbytes: int) -> Any:
        """See ``Transport``; a NumPy array."""
        return np.empty(nbytes, np.uint8)

    def all_gather(self, out: Any, x: Any) -> None:
        """See ``Transport``."""
        finish_queued_work(x)
        self._wait("all_gather", [self._comm.Iallgather([x, MPI.BYTE], [out, MPI.BYTE])])

    def all_to_all(self, out: Any, x: Any) -> None:
        """See ``Transport``."""
        finish_queued_work(x)
        self._wait("all_to_all", [self._comm.Ialltoall([x, MPI.BYTE], [out, MPI.BYTE])])

    def all_to_all_v(self, outs: Sequence[Sequence[Any]], xs: Sequence[Sequence[Any]]) -> None:
        """See ``Transport``: a message for every array, as their addresses have no common base."""
        receives = [(out, peer) for peer, pieces in enumerate(outs) for out in pieces]
        sends = [(x, peer) for peer, pieces in enumerate(xs) for x in pieces]
        self._messages("all_to_all_v", receives, sends)

    def send(self, x: Any, to: int) -> None:
        """See ``Transport``."""
        self._messages("send", [], [(x, to)])

    def recv(self, out: Any, source: int) -> None:
        """See ``Transport``."""
        self._messages("recv", [(out, source)], [])

    def all_reduce(self, x: Any, op: Op = "sum") -> None:
        """See ``Transport``; bit-identical where the MPI library follows the standard's advice."""
        finish_queued_work(x)
        self._wait("all_reduce", [self._comm.Iallreduce(MPI.IN_PLACE, x, _OPS[op])])

    def reduce_scatter(self, out: Any, x: Any) -> None:
        """See ``Transport``."""
        finish_queued_work(x)
        self._wait("reduce_scatter", [self._comm.Ireduce_scatter_block(x, out, MPI.SUM)])

    def broadcast(self, x: Any, root: int) -> None:
        """See ``Transport``."""
        finish_queued_work(x)
        self._wait("broadcast", [self._comm.Ibcast([x, MPI.BYTE], root)])

    def barrier(self) -> None:
        """See ``Transport``."""
        self._wait("barrier", [self._comm.Ibarrier()])

    def _messages(
        self, what: str, receives: Sequence[tuple[Any, int]], sends: Sequence[tuple[Any, int]]
    ) -> None:
        """Receive and send arrays, given with the rank of the other side."""
        for x, _ in (*receives, *sends)[:1]:
            finish_queued_work(x)
        requests = [self._comm.Isend([x, MPI.BYTE], peer) for x, peer in sends if x.shape[0]]
        missing = [(out, peer) for out, peer in receives if out.shape[0]]

        def matched() -> bool:
            """Match what has come. A message that is too long must not get near the array."""
            late: list[tuple[Any, int]] = []
            for out, peer in missing:
                status = MPI.Status()
                overtakes = any(peer == other for _, other in late)
                message = None if overtakes else self._comm.Improbe(peer, status=status)
                if message is None:
                    late.append((out, peer))
                    continue
                found, wanted = status.Get_count(MPI.BYTE), out.shape[0]
                if found != wanted:
                    raise RuntimeError(f"rank {peer} sent {found} bytes; expected: {wanted}")
                requests.append(message.Irecv([out, MPI.BYTE]))
            missing[:] = late
            return not missing

        self._wait(what, requests, matched)

    def _wait(
        self, what: str, requests: list[MPI.Request], ready: Callable[[], bool] = lambda: True
    ) -> None:
        """Return when `ready()`, which may add requests, and all requests are done."""
        try:
            done = wait_until(lambda: ready() and MPI.Request.Testall(requests), self._timeout)
            if not done:
                raise TimeoutError(f"{what}: a rank did not take part within {self._timeout:g} s")
        except (RuntimeError, TimeoutError):
            self._abandoned += requests
            raise
