"""torch.distributed as a transport: any process group, NCCL or gloo."""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, ClassVar, Self, TypeVar, cast

import torch
import torch.distributed as dist

from ..errors import CollectiveError
from . import aborting
from .base import Op, Transport
from .gloo_messages import swap, tensor_of
from .presence import Presence
from .torch_groups import (
    CONNECT,
    asked_timeout,
    backend_of,
    check_node,
    disagreement,
    failures_of,
    member_of,
    need_connection,
    store_of,
)

#: Seconds that a rank whose call failed waits for the others to say the same.
_REPORT = 1.0
#: Seconds that the exit of the process waits for groups that are being ended.
_EXIT = 30.0

#: Non-empty once the interpreter exits.
_exiting: list[bool] = []
#: Threads that end groups.
_ending: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_noting = threading.Lock()


def _note_exit() -> None:
    """Have `_exit` called before finalizers run: what is registered last is called first."""
    if _noting.acquire(blocking=False):
        atexit.register(_exit)


def _exit() -> None:
    """End all groups at once, and wait for the threads: one within NCCL would abort the process.

    Ranks drop groups in different orders: one after the other, they would wait for each other.
    """
    for transport in list(TorchDist.live):
        if transport._let_go is not None:
            transport._let_go()
    _exiting.append(True)
    until = time.monotonic() + _EXIT
    for thread in list(_ending):
        thread.join(max(0.0, until - time.monotonic()))


def _end(group: Any) -> None:
    """End a group whose transport is dropped.

    NCCL waits there for the other ranks, whose garbage collectors may find theirs much later, and
    this may be anywhere, in a call that they wait for: so it is done on a thread of its own. At the
    end of the process all ranks are here.
    """
    if _exiting or group.name() != "nccl":
        group.shutdown()
    else:
        thread = threading.Thread(target=group.shutdown, name="tightwire-close", daemon=True)
        thread.start()
        _ending.add(thread)


#: How errors name the call that connects ranks.
_NEW_GROUP = "new_group"
#: How they name the call in which ranks only say what they want.
_MEET = "meet"
_Method = TypeVar("_Method", bound=Callable[..., None])


def _names_silent_ranks(method: _Method) -> _Method:
    """Have errors of the network say which ranks have not noticed any."""

    @functools.wraps(method)
    def call(self: TorchDist, *args: Any, **options: Any) -> None:
        try:
            method(self, *args, **options)
        except NotImplementedError:
            raise
        except RuntimeError as error:
            # Of the backends' errors these are about peers.
            if self._store is None or not re.search("(?i)connection|timed out|timeout", str(error)):
                raise
            # Those that wait for this rank would wait for the timeout.
            self.cut()
            raise RuntimeError(f"{error}; {self._silent_ranks()}") from error

    return cast(_Method, call)


class TorchDist(Transport):
    """The ranks of a ``torch.distributed`` process group, over NCCL or gloo.

    Arrays are tensors on the group's device, or with gloo NumPy arrays; both are used in place.
    Give the communicator a group of its own (``TorchDist.new_group()`` or ``dist.new_group()``):
    other traffic on it must not interfere. All-gathers and equal all-to-alls take tensors of any
    shape and ``plain_dtypes``. gloo raises after the timeout, at once if a rank has ended or given
    up, and the error says why, or names ranks that have not noticed a failure a second later;
    NCCL's own watchdog ends the process.

    Call ``dist.init_process_group()`` first.

    Args:
        group: The process group. None: the default one.
        device: Device of the tensors. None: the current GPU for NCCL, else the CPU.
        timeout: Seconds, which become the timeout of the group. None: the group keeps its own; if
            that is PyTorch's default (30 minutes, NCCL: 10), which ``dist.new_group()`` uses
            whatever ``dist.init_process_group(timeout=...)`` was given, it gets that of the default
            group.

    Raises:
        ValueError: If this process is not in the group, the group was destroyed, or ``timeout`` is
            not above 0.
    """

    #: Dtypes that the backends know: small calls of them need not become uint8 first.
    plain_dtypes = frozenset(
        {torch.float16, torch.bfloat16, torch.float32, torch.float64}
        | {torch.int8, torch.uint8, torch.int32, torch.int64}
    )
    #: The transports of this process, as far as they are in use.
    live: ClassVar[weakref.WeakSet[TorchDist]] = weakref.WeakSet()

    def __init__(
        self, group: Any = None, device: Any = None, *, timeout: float | None = None
    ) -> None:
        self._given, self._device = member_of(group, device)
        backend = backend_of(self._given, self._device)
        before = backend.options._timeout
        wanted = asked_timeout(self._given, self._device, timeout)
        if wanted != before:
            backend._set_default_timeout(wanted)
        self._rank: int = self._given.rank()
        self._size: int = self._given.size()
        self._store: Any = store_of(self._given)
        self._failures = failures_of(self._given)
        self._timeout = wanted.total_seconds()
        self._prepare()

    @classmethod
    def new_group(
        cls,
        group: Any = None,
        device: Any = None,
        *,
        timeout: float | None = None,
        purpose: str = "TorchDist.new_group",
    ) -> Self:
        """Make a transport of the ranks of a process group, on connections of its own.

        All ranks of the group call it, and no others; ranks may be in any number of other groups.
        PyTorch does not list the connections among its process groups: ``close()`` ends them, or
        the end of the last reference to the transport.

        Args:
            group: The process group, which keeps its timeout. None: the default one.
            device: As in ``TorchDist``.
            timeout: As in ``TorchDist``.
            purpose: What all ranks want it for: ranks that call with different purposes raise.

        Returns:
            The transport.

        Raises:
            CollectiveError: At once if ranks differ in purpose, backend or timeout; within the
                timeout if a rank does not call it.
            TypeError: If the backend is neither gloo nor NCCL.
            ValueError: If this process is not in the group, or the group was destroyed.
        """
        given, device = member_of(group, device)
        need_connection(given, device)
        rank, size = given.rank(), given.size()
        store, number, wanted = cls._meet(given, device, timeout, purpose)
        return cls._part(given, device, (store, rank, size), number, wanted)

    @classmethod
    def new_grid(
        cls,
        node: int,
        group: Any = None,
        device: Any = None,
        *,
        timeout: float | None = None,
        purpose: str = "TorchDist.new_grid",
    ) -> tuple[Self, Self]:
        """Make transports of a node's ranks, and of the ranks of one number in all nodes.

        As ``new_group`` for parts of a group, whose ranks lie node by node: a node's have
        consecutive numbers.

        Args:
            node: Ranks of a node, which must divide those of the group.
            group: As in ``new_group``; all its ranks call this.
            device: As there.
            timeout: As there.
            purpose: As there.

        Returns:
            The transport of this rank's node, in which it has its number there, and that of the
            ranks with this number, in which it has the number of its node.

        Raises:
            CollectiveError: As ``new_group``, and if ranks name nodes of different sizes.
            TypeError: As ``new_group``, and if ``node`` is not an integer.
            ValueError: As ``new_group``, and if nodes would be uneven.
        """
        given, device = member_of(group, device)
        need_connection(given, device)
        rank, size = given.rank(), given.size()
        check_node(node, rank, size, purpose)
        store, number, wanted = cls._meet(given, device, timeout, f"{purpose}, nodes of {node}")
        place, local = divmod(rank, node)
        near = dist.PrefixStore(f"node {place}", store), local, node
        far = dist.PrefixStore(f"number {local}", store), place, size // node
        within = cls._part(given, device, near, number, wanted)
        try:
            return within, cls._part(given, device, far, number, wanted)
        except BaseException:
            within.close()
            raise

    @classmethod
    def meet(cls, group: Any, device: Any, purpose: str) -> None:
        """Compare by the store what ranks are about to use a process group for.

        All ranks of the group call it, in one order with ``new_group`` and ``new_grid``, with which
        it is compared, too.

        Args:
            group: The process group. None: the default one.
            device: As in ``TorchDist``.
            purpose: What this rank wants the group for.

        Raises:
            CollectiveError: At once if ranks differ in purpose, backend or timeout; within the
                timeout if a rank does not call it.
            ValueError: If this process is not in the group, or the group was destroyed.
        """
        cls._meet(*member_of(group, device), None, purpose, _MEET)

    @staticmethod
    def _meet(
        given: Any,
        device: torch.device,
        timeout: float | None,
        purpose: str,
        call: str = _NEW_GROUP,
    ) -> tuple[Any, int, timedelta]:
        """A store for one set of connections of a group, their number, and their timeout.

        Raises if ranks differ.
        """
        kind = backend_of(given, device).name()
        wanted = asked_timeout(given, device, timeout)
        rank, size = given.rank(), given.size()
        store = store_of(given)
        # Perhaps only some ranks ask later, in a block that fails together.
        failures_of(given)
        # The same on all ranks whatever else each of them has made: a rank counts its own calls.
        number = store.add(f"calls/{rank}", 1) - 1
        store = dist.PrefixStore(f"{number}", store)
        with _stage(rank, number, "agree", call):
            facts = f"{purpose}, {kind}, timeout {wanted.total_seconds():g} s"
            problem = disagreement(store, rank, size, facts, wanted)
        if problem:
            raise CollectiveError(rank, call, number, "agree", problem)
        return store, number, wanted

    @classmethod
    def _part(
        cls,
        given: Any,
        device: torch.device,
        place: tuple[Any, int, int],
        number: int,
        wanted: timedelta,
    ) -> Self:
        """The transport of ranks of a group that meet by a store; its number and theirs."""
        with _stage(given.rank(), number, "connect"):
            return cls._connected(backend_of(given, device).name(), *place, wanted, device)

    @classmethod
    def by_store(
        cls, store: Any, rank: int, world_size: int, *, timeout: float, device: Any = "cpu"
    ) -> Self:
        """Connect ranks that have nothing in common but a store, over gloo, on a GPU over NCCL.

        ``dist.init_process_group()`` is not needed. The connections end as those of ``new_group``.

        Args:
            store: A store of ``torch.distributed``, with keys of its own for these ranks, such as a
                ``PrefixStore``.
            rank: Number of this rank.
            world_size: Number of ranks.
            timeout: Seconds, for connecting and for every call.
            device: Device of the tensors.

        Returns:
            The transport.

        Raises:
            RuntimeError: If a rank is not there within the timeout, or the store does not answer.
        """
        where = torch.device(device)
        kind = "gloo" if where.type == "cpu" else "nccl"
        return cls._connected(kind, store, rank, world_size, timedelta(seconds=timeout), where)

    @classmethod
    def _connected(
        cls, kind: str, store: Any, rank: int, size: int, timeout: timedelta, device: torch.device
    ) -> Self:
        found = cls.__new__(cls)
        found._device, found._rank, found._size = device, rank, size
        found._store, found._timeout = store, timeout.total_seconds()
        found._failures = aborting.Failures(store, rank)
        found._given = CONNECT[kind](store, rank, size, timeout)
        # NCCL is to be told, also if nobody calls close().
        found._let_go = weakref.finalize(found, _end, found._given)
        _note_exit()
        found._prepare()
        return found

    #: Ends what `new_group` or `new_grid` has made, if the transport is dropped.
    _let_go: weakref.finalize[..., Any] | None = None

    def _prepare(self) -> None:
        self._gather = _in_order(dist.distributed_c10d.AllgatherOptions)
        self._swap = _in_order(dist.AllToAllOptions)
        self._nothing = self.empty(0)
        # NCCL registers captured memory with all ranks, and its debugging compares all calls on the
        # host. Ranks do not capture the same calls.
        self.capturable = (
            self._device.type == "cuda"
            and os.environ.get("NCCL_GRAPH_REGISTER") == "0"
            and dist.get_debug_level() != dist.DebugLevel.DETAIL
        )
        #: Whether connections have been closed, so that no more calls succeed.
        self._lost = False
        self._presences: weakref.WeakSet[Presence] = weakref.WeakSet()
        TorchDist.live.add(self)

    @property
    def _group(self) -> Any:
        if self._given is None:
            raise RuntimeError("the transport is closed")
        return self._given

    @property
    def backend(self) -> str:
        """The name of the group's backend, such as ``"nccl"``."""
        return str(self._group.name())

    @property
    def rank(self) -> int:
        """Number of this rank in the group; see ``Transport``."""
        return self._rank

    @property
    def world_size(self) -> int:
        """See ``Transport``."""
        return self._size

    @property
    def timeout(self) -> float:
        """Seconds: the group's timeout, or a tenth less where NCCL's watchdog ends the process."""
        return self._timeout if self._device.type == "cpu" else 0.9 * self._timeout

    def close(self) -> None:
        """End the connections that were made here. A group that was passed stays as it is.

        Not while another thread is in a call. Over NCCL ranks wait for one another here: all close
        their transports in the same order.
        """
        given, self._given, self._store = self._given, None, None
        TorchDist.live.discard(self)
        if self._let_go is not None and self._let_go.detach() is not None:
            given.shutdown()

    def _silent_ranks(self) -> str:
        """What is known of the other ranks, when a call has failed here."""
        ranks, found = range(self._size), []
        keys = [f"failed/{rank}" for rank in ranks]

        def ask() -> None:
            store = self._failures.store
            store.set(keys[self._rank], "")
            if why := self._failures.heard():
                found.append(why)
                return
            with contextlib.suppress(RuntimeError):
                store.wait(keys, timedelta(seconds=_REPORT))
            silent = [rank for rank in ranks if not store.check([keys[rank]])]
            gone = f"ranks {silent} have not noticed: stopped, gone, or not in this call"
            found.append(gone if silent else "all ranks have failed here")

        aborting.patiently(ask, seconds=2 * _REPORT + 1)
        if not found:
            return "the store does not answer either: the process that holds it has stopped"
        return found[0]

    def abort(self, why: str) -> None:
        """See ``Transport``; over NCCL only those hear it that ask a ``Presence``.

        Connections of a group that was passed are closed, too.
        """
        aborting.patiently(*self.tellings(why))
        self.cut()

    def tellings(self, why: str) -> list[Callable[[], object]]:
        """What ``abort`` calls to have the store say why, to the group and to who asks a presence.

        Each may raise RuntimeError, or hang if the store does.

        Args:
            why: As there.

        Returns:
            Functions without arguments. None on a transport that is closed.
        """
        if self._store is None:
            return []
        found: list[Callable[[], object]] = [
            functools.partial(presence.leave, why) for presence in self._presences
        ]
        # What has failed here because of another rank is not the reason.
        return found if self._lost else [functools.partial(self._failures.tell, why), *found]

    def cut(self) -> None:
        """Close the connections over gloo, for good: calls of the other ranks fail at once.

        Over NCCL nothing is closed.
        """
        if self._given is not None and self._device.type == "cpu" and not self._lost:
            self._lost = True
            aborting.cut(self._given, self._rank, self._size)

    def presence(self) -> Presence:
        """Have the other ranks know when this one leaves; all ranks call it.

        Raises:
            RuntimeError: If the group's store does not answer.
        """
        found = Presence(self._store, self._rank, self._size)
        self._presences.add(found)
        return found

    def empty(self, nbytes: int) -> Any:
        """See ``Transport``; a tensor."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    # The methods of the group itself, and not the functions of torch.distributed: these are renamed
    # (all_gather_into_tensor), and take global ranks.

    @property
    def pairs_gather(self) -> bool:
        """See ``Transport``: NCCL gathers at 25 GB/s what it sends and receives at 19 to 23."""
        return bool(self._device.type != "cpu")

    @property
    def gathers_in_place(self) -> bool:
        """See ``Transport``: NCCL can."""
        return bool(self._device.type != "cpu")

    @_names_silent_ranks
    def all_gather(self, out: Any, x: Any) -> None:
        """See ``Transport``."""
        _finish(self._group._allgather_base(tensor_of(out), tensor_of(x), self._gather))

    def all_gather_apart(self, out: Any, x: Any) -> None:
        """See ``Transport``; over NCCL it is an ``all_gather``."""
        if self._device.type == "cpu":
            self._gather_messages(out, x)
        else:
            self.all_gather(out, x)

    @_names_silent_ranks
    def _gather_messages(self, out: Any, x: Any) -> None:
        rows = [[row] for row in tensor_of(out).view(self._size, -1)]
        for work in swap(self._group, self._rank, rows, [[x]] * self._size, aborting.APART):
            self._received(work)

    @_names_silent_ranks
    def all_to_all(self, out: Any, x: Any) -> None:
        """See ``Transport``."""
        _finish(self._group.alltoall_base(tensor_of(out), tensor_of(x), [], [], self._swap))

    @_names_silent_ranks
    def all_to_all_v(self, outs: Sequence[Sequence[Any]], xs: Sequence[Sequence[Any]]) -> None:
        """See ``Transport``; NCCL makes one launch of the first pieces, one of the second."""
        if self._device.type != "cpu":
            for into, pieces in itertools.zip_longest(_rounds(outs), _rounds(xs)):
                got = self._pieces(into), self._pieces(pieces)
                _finish(self._group.alltoall(*got, self._swap))
            return
        # gloo's own all-to-all takes one tensor a side: it would need all pieces side by side.
        for work in swap(self._group, self._rank, outs, xs, aborting.TAG):
            self._received(work)

    def _pieces(self, pieces: Sequence[Any] | None) -> list[Any]:
        """A tensor for every rank, empty where there is none."""
        found = pieces or [None] * self.world_size
        return [self._nothing if piece is None else tensor_of(piece) for piece in found]

    @_names_silent_ranks
    def send(self, x: Any, to: int) -> None:
        """See ``Transport``."""
        self._received(self._group.send([tensor_of(x)], to, aborting.TAG))

    @_names_silent_ranks
    def recv(self, out: Any, source: int) -> None:
        """See ``Transport``."""
        self._received(self._group.recv([tensor_of(out)], source, aborting.TAG))

    def _received(self, work: Any) -> None:
        """Wait for a message."""
        if self._device.type == "cpu":
            # gloo's messages know no other timeout than that of the group when it was made.
            work.wait(timedelta(seconds=self._timeout))
        else:
            work.wait()

    @_names_silent_ranks
    def all_reduce(self, x: Any, op: Op = "sum") -> None:
        """See ``Transport``; NCCL has no "or"."""
        options = _in_order(dist.AllreduceOptions)
        options.reduceOp = {
            "sum": dist.ReduceOp.SUM,
            "max": dist.ReduceOp.MAX,
            "or": dist.ReduceOp.BOR,
        }[op]
        _finish(self._group.allreduce([tensor_of(x)], options))

    @_names_silent_ranks
    def reduce_scatter(self, out: Any, x: Any) -> None:
        """See ``Transport``."""
        options = _in_order(dist.ReduceScatterOptions)
        _finish(self._group._reduce_scatter_base(tensor_of(out), tensor_of(x), options))

    @_names_silent_ranks
    def broadcast(self, x: Any, root: int) -> None:
        """See ``Transport``."""
        options = _in_order(dist.BroadcastOptions)
        options.rootRank, options.rootTensor = root, 0
        _finish(self._group.broadcast([tensor_of(x)], options))

    @_names_silent_ranks
    def barrier(self) -> None:
        """See ``Transport``."""
        options = dist.BarrierOptions()
        if self._device.type != "cpu":
            # NCCL would have to guess.
            options.device_ids = [self._device.index]
        self._group.barrier(options).wait()


@contextmanager
def _stage(rank: int, number: int, name: str, call: str = _NEW_GROUP) -> Iterator[None]:
    """Make a CollectiveError of what fails while ranks connect."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        raise CollectiveError(rank, call, number, name, str(error)) from error


def _rounds(pieces: Sequence[Sequence[Any]]) -> Iterator[Sequence[Any]]:
    """The first pieces of all ranks, then the second; None for those that have no more."""
    return itertools.zip_longest(*pieces)


def _in_order(kind: Any) -> Any:
    """Options of a call that NCCL queues on the caller's stream, where nobody waits for another."""
    options = kind()
    if hasattr(options, "asyncOp"):
        options.asyncOp = False
    return options


def _finish(work: Any) -> None:
    """Wait for what has not been queued on the caller's stream."""
    if work is not None:
        work.wait()
