"""NCCL as a transport without torch.distributed, through CuPy."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

# Before CuPy, so that both use the NCCL that comes with PyTorch.
import torch  # isort: skip
import cupy
from cupy.cuda import nccl

from ...arrays import describe
from .base import Op, Transport, shares

_BYTE = nccl.NCCL_UINT8
_DTYPES = {
    "uint8": nccl.NCCL_UINT8,
    "int32": nccl.NCCL_INT32,
    "int64": nccl.NCCL_INT64,
    "float32": nccl.NCCL_FLOAT32,
    "float64": nccl.NCCL_FLOAT64,
}
_OPS = {"sum": nccl.NCCL_SUM, "max": nccl.NCCL_MAX}

#: In seconds: how often the watchdog looks.
_PERIOD = 0.1


class Nccl(Transport):
    """One of ``world_size`` ranks, each with a GPU of its own: the current one when it is made.

    Arrays are PyTorch tensors and CuPy arrays on that GPU, used in place on the library's current
    stream. Every call waits for the stream: then it has succeeded, or raised. A call that takes
    longer than ``timeout``, or whose peer NCCL finds gone, is aborted by a thread; work that was
    queued on the stream before the call counts too. After that the transport cannot be used.

    Args:
        unique_id: The same bytes on all ranks, which one of them got from ``Nccl.unique_id()``.
        rank: Number of this rank, from 0.
        world_size: Number of ranks.
        timeout: Seconds after which a call is aborted.

    Raises:
        TimeoutError: If ranks are missing, and by calls.
        RuntimeError: By calls after one that failed.
    """

    def __init__(self, unique_id: bytes, rank: int, world_size: int, timeout: float = 30.0) -> None:
        self._rank = rank
        self._size = world_size
        self._timeout = timeout
        self._device: int = torch.cuda.current_device()
        self._failure: BaseException | None = None
        #: When the call under way is to be aborted.
        self._deadline: float | None = None
        self._comm = self._connect(unique_id)
        threading.Thread(target=self._watch, daemon=True).start()

    @staticmethod
    def unique_id() -> bytes:
        """Make a name for a new group, on one rank, which passes it to the others."""
        found: bytes = nccl.get_unique_id()
        return found

    @property
    def rank(self) -> int:
        """See ``Transport``."""
        return self._rank

    @property
    def world_size(self) -> int:
        """See ``Transport``."""
        return self._size

    @property
    def timeout(self) -> float:
        """See ``Transport``."""
        return self._timeout

    def empty(self, nbytes: int) -> Any:
        """See ``Transport``; a tensor."""
        return torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{self._device}")

    @property
    def pairs_gather(self) -> bool:
        """See ``TorchDist``."""
        return True

    @property
    def gathers_in_place(self) -> bool:
        """See ``Transport``."""
        return True

    def all_gather(self, out: Any, x: Any) -> None:
        """See ``Transport``."""
        if not x.shape[0]:
            return
        with self._call("all_gather", x) as stream:
            self._comm.allGather(_pointer(x), _pointer(out), x.shape[0], _BYTE, stream)

    def all_to_all(self, out: Any, x: Any) -> None:
        """See ``Transport``."""
        self.all_to_all_v(shares(out, self._size), shares(x, self._size))

    def all_to_all_v(self, outs: Sequence[Sequence[Any]], xs: Sequence[Sequence[Any]]) -> None:
        """See ``Transport``: one group of sends and receives, which NCCL makes one launch."""
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
        """See ``Transport``; NCCL has no "or"."""
        if op not in _OPS:
            raise NotImplementedError(f"NCCL has no {op!r}; allowed: {sorted(_OPS)}")
        size, dtype = _count(x), _DTYPES[describe(x).dtype.name]
        if not size:
            return
        with self._call("all_reduce", x) as stream:
            self._comm.allReduce(_pointer(x), _pointer(x), size, dtype, _OPS[op], stream)

    def reduce_scatter(self, out: Any, x: Any) -> None:
        """See ``Transport``."""
        size, dtype = _count(out), _DTYPES[describe(out).dtype.name]
        if not size:
            return
        with self._call("reduce_scatter", x) as stream:
            pointers = _pointer(x), _pointer(out)
            self._comm.reduceScatter(*pointers, size, dtype, nccl.NCCL_SUM, stream)

    def barrier(self) -> None:
        """See ``Transport``."""
        self.all_reduce(torch.zeros(1, dtype=torch.int32, device=f"cuda:{self._device}"))

    def close(self) -> None:
        """Leave the group, when all calls are over."""
        self._failure = RuntimeError("the transport was closed")

    def _messages(
        self, what: str, receives: Sequence[tuple[Any, int]], sends: Sequence[tuple[Any, int]]
    ) -> None:
        """Receive and send arrays, given with the rank of the other side."""
        calls = [(self._move(True), out, peer) for out, peer in receives if out.shape[0]]
        calls += [(self._move(False), x, peer) for x, peer in sends if x.shape[0]]
        if not calls:
            return
        with self._call(what, calls[0][1]) as stream:
            nccl.groupStart()
            try:
                for move, x, peer in calls:
                    move(_pointer(x), x.shape[0], _BYTE, peer, stream)
            finally:
                nccl.groupEnd()

    def _move(self, receive: bool) -> Callable[[int, int, int, int, int], None]:
        move: Callable[[int, int, int, int, int], None]
        move = self._comm.recv if receive else self._comm.send
        return move

    @contextmanager
    def _call(self, what: str, x: Any) -> Iterator[int]:
        """The stream for a call on `x`; at its end wait for it. The watchdog guards all of it."""
        if describe(x).library == "torch":
            stream = torch.cuda.current_stream(x.device)
            pointer = stream.cuda_stream
        else:
            stream = cupy.cuda.get_current_stream()
            pointer = stream.ptr
        if self._failure is not None:
            raise RuntimeError(f"{what}: an earlier call has failed: {self._failure}")
        self._deadline = time.monotonic() + self._timeout
        try:
            yield pointer
            stream.synchronize()
        except RuntimeError as error:
            self._failure = self._failure or error
            raise self._failure from error
        finally:
            self._deadline = None
        if self._failure is not None:
            raise self._failure

    def _connect(self, unique_id: bytes) -> Any:
        """The communicator. Making it waits for all ranks, without a timeout of its own."""
        made: list[Any] = []

        def make() -> None:
            try:
                with torch.cuda.device(self._device), cupy.cuda.Device(self._device):
                    made.append(nccl.NcclCommunicator(self._size, unique_id, self._rank))
            except (RuntimeError, ValueError) as error:
                made.append(error)

        thread = threading.Thread(target=make, daemon=True)
        thread.start()
        thread.join(self._timeout)
        if not made:
            raise TimeoutError(
                f"not all of {self._size} ranks took part within {self._timeout:g} s"
            )
        if isinstance(made[0], Exception):
            raise made[0]
        return made[0]

    def _watch(self) -> None:
        """Abort the call under way when it is late or a peer is gone: whoever waits, wakes up."""
        while self._failure is None:
            time.sleep(_PERIOD)
            deadline = self._deadline
            if deadline is None:
                continue
            try:
                self._comm.check_async_error()
            except RuntimeError as error:
                self._failure = error
            if time.monotonic() > deadline:
                self._failure = TimeoutError(f"a rank did not come for {self._timeout:g} s")
        self._comm.abort()


def _pointer(x: Any) -> int:
    return int(x.data_ptr() if describe(x).library == "torch" else x.data.ptr)


def _count(x: Any) -> int:
    return int(x.numel() if describe(x).library == "torch" else x.size)
