"""The calls of a group that a policy has compressed, and their works.

The backends of ``torch.distributed`` and of torchcomms have these in common.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (  # type: ignore[attr-defined]
    Work,
    _create_work_from_future,
)

from ..errors import CollectiveError
from ..transports.base import Transport
from ..transports.torch_dist import TorchDist
from ..transports.torch_groups import disagreement
from .calls import TraceRecord
from .communicator import Communicator
from .group_calls import GroupCall
from .policy import Policy
from .side_stream import SideStream

_T = TypeVar("_T")
#: Why calls fail that ``abort()`` ends.
_ABORTED = "the group was aborted"


def compare_policies(policy: Policy, store: Any, rank: int, size: int, timeout: timedelta) -> None:
    """Raise where the ranks of a group have different policies; all of them call it together.

    Args:
        policy: That of this rank.
        store: A store of these ranks, of ``torch.distributed``.
        rank: Number of this rank.
        size: Ranks of the group.
        timeout: How long ranks wait for one another.

    Raises:
        CollectiveError: On all ranks, if policies differ or a rank does not come in time.
    """
    store = dist.PrefixStore("policy", store)
    _agree(store, rank, size, repr(policy.rules), timeout)


def connect(
    store: Any,
    rank: int,
    size: int,
    timeout: float,
    device: torch.device,
    number: int,
    group: str,
) -> TorchDist:
    """Connect the ranks of a group for one rule; each calls it when it is to make a call of it.

    Args:
        store: As in ``compare_policies``. It may be used meanwhile.
        rank: As there.
        size: As there.
        timeout: Seconds, for connecting and for every call.
        device: Device of the tensors.
        number: Number of the rule.
        group: How errors call the group.

    Returns:
        The transport.

    Raises:
        CollectiveError: If a rank does not call it within the timeout.
    """
    # Who waits in a store holds up all others that use it. Versions before 2.8 have no clone().
    own = store.clone() if hasattr(store, "clone") else store
    own = dist.PrefixStore(f"rule {number}, {device.type}", own)
    what = f"{group}, rule {number}"
    _agree(dist.PrefixStore("agree", own), rank, size, "", timedelta(seconds=timeout), what)
    try:
        return TorchDist.by_store(own, rank, size, timeout=timeout, device=device)
    except (RuntimeError, OSError) as error:
        raise CollectiveError(rank, "new_group", 0, "connect", f"{what}: {error}") from error


def _agree(
    store: Any, rank: int, size: int, facts: str, timeout: timedelta, what: str = "policy"
) -> None:
    """Raise on all ranks if they differ in `facts` of `what`, or one does not come."""
    problem = disagreement(store, rank, size, facts, timeout)
    if problem:
        raise CollectiveError(rank, "new_group", 0, "agree", f"{what}: {problem}")


class CompressedCalls:
    """Makes the calls of a group that its policy names, by communicators of their own.

    Args:
        policy: Which calls are compressed.
        rank: Number of this rank.
    """

    def __init__(self, policy: Policy, rank: int) -> None:
        #: Which calls are compressed.
        self.policy = policy
        self._rank = rank
        self._channels: dict[tuple[int, torch.device], _Channel] = {}
        self._making = threading.Lock()

    @property
    def raw_bytes(self) -> int:
        """Bytes to other ranks so far, without compression."""
        return sum(channel.raw_bytes for channel in self._channels.values())

    @property
    def wire_bytes(self) -> int:
        """Bytes sent to other ranks so far."""
        return sum(channel.wire_bytes for channel in self._channels.values())

    def trace(self) -> list[TraceRecord]:
        """Records of the last calls, by rule and device, oldest first."""
        return [record for channel in self._channels.values() for record in channel.trace()]

    def begin(
        self, call: GroupCall, group: str, connect: Callable[[torch.device, int], Transport]
    ) -> Any:
        """Begin a call, if the policy names it.

        Args:
            call: The call.
            group: Description of the group.
            connect: Makes a transport of the group's ranks on a device, for the rule of a number;
                called by what makes the first call of the rule, on the CPU a thread.

        Returns:
            The work of the call; None if it is not to be compressed.

        Raises:
            CollectiveError: On a GPU, as the work does on the CPU.
        """
        number, run = self.way(call, group)
        if number is None:
            return None
        rule = self.policy.rules[number]
        with self._making:
            found = self._channels.get((number, call.device))
            if found is None:

                def communicator() -> Communicator:
                    transport = connect(call.device, number)
                    try:
                        return rule.communicator(transport, f"{group}, rule {number}")
                    except BaseException:
                        transport.close()
                        raise

                found = _Channel(communicator, self._rank, call.device)
                self._channels[number, call.device] = found
        return found.run(replace(call, run=run), rule.wire)

    def way(self, call: GroupCall, group: str) -> tuple[int | None, Any]:
        """The rule of a call, None if it is not compressed, and what makes it then.

        Args:
            call: The call.
            group: Description of the group.

        Returns:
            The number of the rule, and ``run`` or ``run_splits`` of the call.
        """
        if call.run_splits is not None and call.device.type == "cpu":
            equal, unequal = self.policy.all_to_alls(call.dtype, group)
            if equal is not None and equal == unequal:
                # Other ranks may give splits, whose rule does not ask for sizes.
                return equal, call.run_splits
        return self.policy.number(call.op, call.dtype, call.nbytes, group), call.run

    def close(self) -> None:
        """End all connections, once the calls under way are over."""
        for channel in self._channels.values():
            channel.close()

    def abort(self) -> None:
        """Make no more calls, and over gloo end those under way."""
        for channel in self._channels.values():
            channel.abort()


class Compressing:
    """What a group tells of its compressed calls."""

    _calls: CompressedCalls

    @property
    def policy(self) -> Policy:
        """Which calls are compressed."""
        return self._calls.policy

    @property
    def raw_bytes(self) -> int:
        """Bytes to other ranks in compressed calls so far, without compression."""
        return self._calls.raw_bytes

    @property
    def wire_bytes(self) -> int:
        """Bytes that compressed calls have sent to other ranks so far."""
        return self._calls.wire_bytes

    def trace(self) -> list[TraceRecord]:
        """Records of the last compressed calls, by rule and device, oldest first."""
        return self._calls.trace()


class _Channel:
    """A communicator for one rule, and on the CPU a thread, on a GPU a stream, for its calls."""

    def __init__(
        self, communicator: Callable[[], Communicator], rank: int, device: torch.device
    ) -> None:
        self.raw_bytes = self.wire_bytes = 0
        self._rank = rank
        self._numbers = itertools.count()
        self._stream = SideStream()
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "tightwire-group")
        #: Set once the ranks are connected.
        self._comm: Communicator | None = None

        def begin() -> Communicator:
            self._comm = communicator()
            return self._comm

        #: Others may come to their call only after what this rank does next.
        self._begun = self._thread.submit(begin) if device.type == "cpu" else _called(begin)

    def trace(self) -> list[TraceRecord]:
        return [] if self._comm is None else self._comm.trace()

    def run(self, call: GroupCall, wire: str | None) -> Any:
        """The work of a call that has begun."""
        # Modes belong to threads, and only inference mode writes to tensors that it has made.
        inference = torch.is_inference_mode_enabled() or any(x.is_inference() for x in call.tensors)

        def make() -> None:
            with torch.inference_mode(inference):
                self._make(call, wire)

        if call.device.type != "cpu":
            return _create_work_from_future(self._stream.run(call.tensors[-1], make))
        aborted = CollectiveError(self._rank, call.op, next(self._numbers), "queue", _ABORTED)
        return _HostWork(self._thread.submit(make), call.result, aborted)

    def _make(self, call: GroupCall, wire: str | None) -> None:
        if call.device.type != "cpu":
            for tensor in call.tensors:
                # The caller may let go of it before it is read.
                tensor.record_stream(torch.cuda.current_stream(call.device))
        comm = self._begun.result()
        call.run(comm, wire)
        for record in comm.trace(last=1):
            self.raw_bytes += record.raw_bytes
            self.wire_bytes += record.wire_bytes

    def close(self) -> None:
        self._thread.shutdown()
        if self._comm is not None:
            self._comm.close()

    def abort(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._comm is not None:
            self._comm.transport.abort(_ABORTED)


def _called(function: Callable[[], _T]) -> concurrent.futures.Future[_T]:
    """What a function returns or raises, as if a thread had called it."""
    future: concurrent.futures.Future[_T] = concurrent.futures.Future()
    try:
        future.set_result(function())
    except BaseException as error:
        future.set_exception(error)
    return future


class _HostWork(Work):
    """A call that a thread makes."""

    def __init__(
        self, done: concurrent.futures.Future[None], result: Any, aborted: CollectiveError
    ) -> None:
        super().__init__()
        self._done = done
        self._result = result
        #: What is wrong if the call was never begun.
        self._aborted = aborted

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the call, and raise what went wrong in it. A timeout of 0 is that of the group.

        Raises:
            CollectiveError: If the call has failed, or the group was aborted before it.
            TimeoutError: If it takes longer.
        """
        error = self._failure(timeout.total_seconds() or None)
        if error is not None:
            raise error
        return True

    def _failure(self, timeout: float | None = None) -> BaseException | None:
        """What went wrong in the call, which is waited for."""
        try:
            return self._done.exception(timeout)
        except concurrent.futures.CancelledError:
            return self._aborted

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._done.done()

    def is_success(self) -> bool:
        return self._done.done() and self._failure() is None

    def exception(self) -> Any:
        return self._failure() if self._done.done() else None

    def result(self) -> Any:
        return self._result

    def get_future(self) -> Any:
        """A torch Future of the result, which C++ waits for too."""
        future: Any = torch.futures.Future()

        def tell() -> None:
            error = self._failure()
            if error is None:
                future.set_result(self._result)
            else:
                future.set_exception(error)

        if self._done.done():
            tell()
        else:
            # Callbacks of the future may make other calls and wait for them. On the thread of the
            # calls, or on one that all futures share, these would be queued behind the callback.
            threading.Thread(target=tell, name="tightwire-future").start()
        # An exception that is set is a value for C++; one that a callback raises is an error.
        return future.then(lambda found: found.wait())
