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

from ...planning import integer
from ..errors import CollectiveError
from . import aborting
from .base import Op, Transport
from .gloo_messages import swap, tensor_of
from .presence import Presence

#: Seconds that a rank whose call failed waits for the others to say the same.
_REPORT = 1.0
#: What rank 0 has to tell the others that somebody did not come.
_GRACE = timedelta(seconds=5)


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


def check_node(node: int, rank: int, size: int, purpose: str) -> None:
    """Raise for nodes that the ranks of a group do not fill.

    Args:
        node: Ranks of a node.
        rank: Number of this rank in the group.
        size: Ranks of the group.
        purpose: How the error calls what nodes are for.

    Raises:
        TypeError: If ``node`` is not an integer.
        ValueError: If nodes would be uneven.
    """
    if integer("node", node) < 1 or size % node:
        raise ValueError(
            f"node is {node}; rank {rank} is in a group of {size} ranks, {purpose}; allowed: a "
            f"divisor of {size}, as nodes have equally many ranks"
        )


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
        self._given, self._device = _member(group, device)
        backend = backend_of(self._given, self._device)
        before = backend.options._timeout
        wanted = _timeout(self._given, self._device, timeout)
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
        given, device = _member(group, device)
        _connects(given, device)
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
        given, device = _member(group, device)
        _connects(given, device)
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
        cls._meet(*_member(group, device), None, purpose, _MEET)

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
        wanted = _timeout(given, device, timeout)
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
        found._given = _CONNECT[kind](store, rank, size, timeout)
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


def _member(group: Any, device: Any) -> tuple[Any, torch.device]:
    """The process group, which this process is in, and the device of its tensors."""
    found = dist.group.WORLD if group is None else group
    if found is None or found == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("no process group, or this process is not in it")
    if found not in dist.distributed_c10d._world.pg_map:
        raise ValueError("the process group has been destroyed")
    if device is None:
        on_gpu = dist.get_backend(found) == "nccl"
        device = f"cuda:{torch.cuda.current_device()}" if on_gpu else "cpu"
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return found, device


def _connects(group: Any, device: torch.device) -> None:
    """Raise TypeError for a group whose ranks nobody here can connect once more."""
    kind = backend_of(group, device).name()
    if kind not in _CONNECT:
        raise TypeError(f"group has the backend {kind!r}; allowed: {sorted(_CONNECT)}")


def backend_of(group: Any, device: torch.device) -> Any:
    """What a group moves tensors of a device by; TORCH_DISTRIBUTED_DEBUG=DETAIL wraps it.

    Args:
        group: The process group.
        device: A device that it serves.

    Returns:
        The backend, such as a ``ProcessGroupGloo``.

    Raises:
        RuntimeError: If the group has none for the device.
    """
    backend = group._get_backend(device)
    return getattr(backend, "wrapped_pg", backend)


def timeout_of(group: Any, device: torch.device) -> float:
    """Seconds after which calls of a group on a device give up: as ``TorchDist`` without a timeout.

    Args:
        group: The process group; None: the default one.
        device: The device.

    Returns:
        The seconds.

    Raises:
        RuntimeError: If the group has no backend for the device.
    """
    given = dist.group.WORLD if group is None else group
    return _timeout(given, device, None).total_seconds()


def _timeout(group: Any, device: torch.device, asked: float | None) -> timedelta:
    """See `TorchDist`."""
    if asked is not None:
        if not asked > 0:
            raise ValueError(f"timeout is {asked}; allowed: seconds above 0, or None")
        return timedelta(seconds=asked)
    own, is_default = _timeout_of(group, device)
    if not is_default:
        return own
    world = dist.group.WORLD
    devices = [d for d in world._device_types if d.type == device.type] or world._device_types
    inherited, is_default = _timeout_of(world, devices[0])
    return own if is_default else inherited


def _timeout_of(group: Any, device: torch.device) -> tuple[timedelta, bool]:
    """The timeout of a group's backend, and whether it is what PyTorch takes if none is given."""
    backend = backend_of(group, device)
    found: timedelta = backend.options._timeout
    return found, found == dist.distributed_c10d._get_default_timeout(backend.name())


def store_of(group: Any) -> Any:
    """The key-value store by which a group's ranks have met; every group has keys of its own.

    Args:
        group: The process group.

    Returns:
        The store.

    Raises:
        KeyError: If there is no such group.
    """
    return dist.PrefixStore("tightwire", dist.distributed_c10d._get_process_group_store(group))


#: Of the groups that have been met.
_failures: weakref.WeakKeyDictionary[Any, aborting.Failures] = weakref.WeakKeyDictionary()
_meeting = threading.Lock()


def failures_of(group: Any) -> aborting.Failures:
    """What the ranks of a process group say of their failures. All of them ask, at least once.

    Args:
        group: The process group.

    Returns:
        The same at every call.

    Raises:
        KeyError: If there is no such group.
    """
    with _meeting:
        found = _failures.get(group)
        if found is None:
            found = _failures[group] = aborting.Failures(store_of(group), group.rank())
        return found


def disagreement(store: Any, rank: int, size: int, facts: str, timeout: timedelta) -> str:
    """Compare what ranks say by a store, before they have connections.

    Args:
        store: A store of these ranks, with keys of its own for this comparison.
        rank: Number of this rank.
        size: Number of ranks.
        facts: What this rank says.
        timeout: How long ranks wait for one another.

    Returns:
        What is wrong if ranks differ or do not come, the same on all of them; else "".

    Raises:
        RuntimeError: If the store does not answer.
    """
    store.set(f"facts/{rank}", facts)
    late = f"rank 0 has not come in {timeout.total_seconds():g} s"
    if rank != 0:
        # Rank 0 may come when this rank gives up: who is first to say so decides.
        in_time = _told(store, ["facts/0"], timeout)
        if not in_time and store.compare_set("first", "", "late") == b"late":
            return late
        # It waits as long for the others.
        if _told(store, ["verdict"], timeout + _GRACE):
            return str(store.get("verdict").decode())
        return late
    keys = [f"facts/{r}" for r in range(size)]
    if store.compare_set("first", "", "in time") == b"late":
        problem = "rank 0 has not come in time, other ranks have given up"
    elif _told(store, keys, timeout):
        said = [store.get(key).decode() for key in keys]
        groups = {text: [r for r in range(size) if said[r] == text] for text in said}
        differ = "; ".join(f"ranks {ranks}: {text}" for text, ranks in groups.items())
        problem = f"ranks differ: {differ}" if len(groups) > 1 else ""
    else:
        missing = [r for r in range(size) if not store.check([keys[r]])]
        problem = f"ranks {missing} have not come in {timeout.total_seconds():g} s"
    store.set("verdict", problem)
    return problem


def _told(store: Any, keys: list[str], timeout: timedelta) -> bool:
    try:
        store.wait(keys, timeout)
    except RuntimeError:
        # Stores differ in what they raise when time is up.
        return bool(store.check(keys))
    return True


def _gloo(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)


def _nccl(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)


#: How to connect the ranks of a group once more, by backend. Not `dist.new_group()`, which wants
#: all ranks of the default group, or (`use_local_synchronization`) ranks that have made equally
#: many groups before, and with NCCL splits the default group, which its other ranks have to join.
_CONNECT: dict[str, Callable[..., Any]] = {"gloo": _gloo, "nccl": _nccl}


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
