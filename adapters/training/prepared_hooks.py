"""What hooks by prepared calls share."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch

from ...codec import as_codec
from ..collectives.arguments import check_collective
from ..collectives.calls import TraceRecord
from ..collectives.faster import Faster
from ..collectives.kept_measurements import KeptMeasurements, check_measurements
from ..collectives.measurements_file import absolute
from ..collectives.prepared import PreparedCalls
from ..collectives.prepared_work import Work
from ..collectives.recorded import BEFORE
from ..errors import CollectiveError
from ..transports.attempts import attempt
from ..transports.peer import PeerMemory, PeerMemoryError
from ..transports.torch_dist import TorchDist
from .leaving import AwayHooks

#: How bytes travel: as ``Communicator`` sends them, or by prepared calls.
Route = Literal["exact", "network", "peers", "auto"]
ROUTES: tuple[Route, ...] = ("exact", "network", "peers", "auto")
#: Kinds of devices whose memory peers may read.
_READABLE = {"cuda"}
#: Bytes of the memory that "auto" tries, before it relies on more.
_TRIAL_NBYTES = 1 << 12
#: Calls of a group that a hook keeps prepared: tensors may have as many sizes as batches have.
_MOST_PREPARED = 256
#: Options of ``PreparedCalls`` that hooks take.
_OPTIONS = ("codec", "checksum", "seed", "trace")


def check_route(route: Any, options: Mapping[str, Any], others: Sequence[str] = ()) -> None:
    """Raise ValueError for an unknown route, TypeError for options that a prepared hook has not.

    Args:
        route: The route.
        options: What is given.
        others: Options of the hook itself.
    """
    if route not in ROUTES:
        raise ValueError(f"route is {route!r}; allowed: {ROUTES}")
    allowed = (*_OPTIONS, *others)
    if route == "auto":
        allowed = (*allowed, "measurements")
    strange = sorted(set(options) - set(allowed))
    if route != "exact" and strange:
        raise TypeError(f"options are {strange}; allowed with route {route!r}: {allowed}")


class EndOfBackward:
    """Calls a function before each backward returns that asks for it.

    A backward that raises calls nothing, so that the next one is told from it.

    Args:
        function: Called without arguments.
    """

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function
        self._backward = -1

    def ask(self) -> bool:
        """Have this backward call the function; once is enough. False if nobody is in backward."""
        now = torch._C._current_graph_task_id()
        if now == -1:
            return False
        if now != self._backward:
            torch.autograd.Variable._execution_engine.queue_callback(self._function)
            self._backward = now
        return True


class Pending(deque[Work]):
    """Works that nobody else has to wait for, until they are judged in the order of calls.

    Args:
        end_calls: Called with what was wrong before that is raised.
    """

    def __init__(self, end_calls: Callable[[CollectiveError], None]) -> None:
        super().__init__()
        self._end_calls = end_calls
        self._problem: CollectiveError | None = None

    def take_done(self) -> None:
        """Judge those at the front that need neither the device nor other ranks; raise nothing."""
        while self and self[0].done() and not self[0].may_change:
            self._judge_first()

    def judge(self) -> None:
        """Judge all; raise what was wrong first.

        Raises:
            CollectiveError: If a rank was late, or bytes were damaged.
        """
        while self:
            self._judge_first()
        self.tell()

    def tell(self) -> None:
        """Raise what has been found wrong so far; see `judge`."""
        problem, self._problem = self._problem, None
        if problem is not None:
            self._end_calls(problem)
            raise problem

    def _judge_first(self) -> None:
        try:
            self.popleft().wait()
        except CollectiveError as error:
            self._problem = self._problem or error


class PreparedHook:
    """Prepared calls for every process group, made when it is first used.

    Args:
        route: How bytes travel.
        measurements: With the route "auto": a file in which measurements are kept, as in
            ``Communicator``.
        **options: Arguments of ``PreparedCalls``.

    Raises:
        TypeError: If ``measurements`` is not a path.
        ValueError: If it is given with another route, or the codec needs more than tensors'
            elements.
    """

    #: How errors name it.
    purpose = ""
    #: What else ranks have to have in common, as errors say it.
    common = ""
    #: Whether calls over a network may run at the same time, as ``PreparedCalls`` says.
    side_by_side = False

    def __init__(
        self,
        route: Route,
        *,
        measurements: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        check_measurements(measurements, "route", route)
        # Connections are made in the first step, and what raises there breaks them.
        check_collective(as_codec(options.get("codec", "zipccl")))
        # Groups come later, and the working directory may be another one then.
        self._measurements = None if measurements is None else absolute(measurements)
        self._route = route
        self._options = options
        self._calls: dict[Any, PreparedCalls] = {}
        #: Groups whose ranks have the same hook.
        self._met: set[Any] = set()
        self._prepared: dict[Any, Any] = {}
        #: By group, with the route "auto".
        self.switches: dict[Any, Faster] = {}
        #: By group, with the route "auto": why messages go over the network there, and peers'
        #: memory is not read. Records of calls have it as their reason.
        self.why_no_peers: dict[Any, str] = {}
        self._lock = threading.Lock()
        self._closed = False
        #: Of the FSDP modules that have this hook.
        self.away = AwayHooks(self.look_again)
        #: What a group's first call of a step is about; see `_repeats`.
        self._first: dict[Any, Hashable] = {}
        #: Hooks of the same model, whose calls end with those of this one.
        self.partners: list[PreparedHook] = []
        #: Called with the reason when they end: what ends calls of another kind.
        self.ends: list[Callable[[str], None]] = []
        #: Bytes to other ranks, without compression and as they were sent, in all calls so far.
        self.raw_bytes = self.wire_bytes = 0

    def close(self) -> None:
        """Free the memory of the calls. Later calls raise CollectiveError."""
        self._closed = True
        self.away.close()
        for calls in self._calls.values():
            calls.forget()
        self._prepared.clear()
        self._calls.clear()
        self._first.clear()

    def end_calls(self, error: CollectiveError) -> None:
        """Refuse later calls, and have those of the other ranks fail.

        Where a rank finds damage depends on how far its device is. The others, who have found
        nothing, may be anywhere in the step.

        Args:
            error: What has gone wrong; later errors, also of other ranks, name it.
        """
        ended = [calls for hook in (self, *self.partners) for calls in hook._calls.values()]
        for calls in ended:
            calls.broken = calls.broken or str(error)
        for calls in ended:
            calls.give_up()
        for end in self.ends:
            end(str(error))

    def wait_for(self, work: Work) -> bool:
        """Wait for a call; an error ends the calls of this hook.

        Args:
            work: The work of the call.

        Returns:
            True.

        Raises:
            CollectiveError: If a rank was late, or bytes were damaged.
        """
        try:
            return work.wait()
        except CollectiveError as error:
            self.end_calls(error)
            raise

    def trace(self) -> list[TraceRecord]:
        """Records of the last calls, group by group, oldest first; none without ``trace=``."""
        return [record for calls in self._calls.values() for record in calls.trace()]

    def _get(self, group: Any, key: tuple[Any, ...], make: Callable[[PreparedCalls], Any]) -> Any:
        """The prepared call of a group under `key`; all its ranks make it alike.

        If there are too many, the one that has not been used for longest is dropped, on all ranks
        the same.
        """
        found = self._prepared.pop((group, *key), None)
        if found is not None:
            # The dictionary is in the order of use.
            self._prepared[(group, *key)] = found
            return found
        device = key[0]
        calls = self._begun(group, device)
        try:
            found = make(calls)
        except PeerMemoryError as error:
            if self._route != "auto":
                raise
            # All ranks are told. Works under way keep the memory that there is.
            found = make(self._start(group, device, _without(str(error), self.purpose)))
        # By group: a rank's other groups have other ranks.
        known = [whole for whole in self._prepared if whole[0] == group]
        for whole in known[: max(0, len(known) + 1 - _MOST_PREPARED)]:
            self._prepared.pop(whole).rest()
        self._prepared[(group, *key)] = found
        return found

    def _begun(self, group: Any, device: torch.device) -> PreparedCalls:
        """The calls of a group, which all its ranks begin with their first one."""
        if self._closed:
            raise CollectiveError(group.rank(), self.purpose, 0, "start", "the hook is closed")
        calls = self._calls.get(group)
        if calls is None:
            self.meet(group, device)
            calls = self._start(group, device, peers_of(self._route, group, device, self.purpose))
        return calls

    def meet(self, group: Any, device: torch.device) -> None:
        """Compare by the store, once, which hook the ranks of a group have, and its route.

        Args:
            group: The process group, all of whose ranks call this.
            device: The device of this rank.

        Raises:
            CollectiveError: On all ranks, at once if they differ; within the timeout if a rank does
                not call it, or an exact hook's first call.
        """
        if group not in self._met:
            purpose = ", ".join(filter(None, [self.purpose, f"route {self._route!r}", self.common]))
            TorchDist.meet(group, device, purpose)
            self._met.add(group)

    def _start(self, group: Any, device: torch.device, peers: Peers) -> PreparedCalls:
        """Calls of a group, which take the place of those that it has; all its ranks start them."""
        before = self._calls.get(group)
        transport = TorchDist(group, device)
        # Messages of peers are a rank's own alone: more of them cost little.
        depth = 2 if peers.memory is None else 4
        calls = PreparedCalls(
            transport,
            peers=peers.memory,
            depth=depth,
            side_by_side=self.side_by_side and peers.memory is None,
            name=self.purpose,
            **self._options,
        )
        calls.reason = peers.why_not
        if peers.why_not:
            self.why_no_peers[group] = peers.why_not
        if before is not None:
            before.forget()
            calls.broken = before.broken
            calls.records.extend(before.records)
            self._prepared = {k: v for k, v in self._prepared.items() if k[0] != group}
        self._calls[group] = calls
        if self._route == "auto":
            kept = self._earlier(calls)
            self.switches[group] = Faster(transport, warm=BEFORE + depth, kept=kept)
        return calls

    def _earlier(self, calls: PreparedCalls) -> KeptMeasurements | None:
        """What earlier programs have measured of such calls; all ranks ask."""
        path = self._measurements
        calls.agreed("measurements", "kept" if path is not None else "not kept")
        if path is None or calls.world_size == 1:
            return None
        about = f"{self.purpose}, {calls.codec!r}, {calls.route.name}, checksum {calls.checksum}"
        return KeptMeasurements(path, calls.transport, about, self.purpose)

    def _repeats(self, group: Any, what: Hashable) -> bool:
        """Say what a call is about that is made once a step. With the first of them a step begins.

        All ranks say the same of their calls. True if a step begins that is not the first.
        """
        begins = self._first.setdefault(group, what) == what and group in self._calls
        if begins:
            self._calls[group].restart()
        return begins

    def forget(self, group: Any, what: Hashable) -> None:
        """Have others than calls of `what` begin a step: these are left to PyTorch.

        Args:
            group: The process group.
            what: What they are about, as it was said of them.
        """
        if self._first.get(group) == what:
            del self._first[group]

    def look_again(self, group: Any) -> None:
        """Have the ways of a group be measured again, on all its ranks between the same calls.

        Args:
            group: The process group.
        """
        if group in self.switches:
            self.switches[group].look_again()

    def _keep_only(self, used: Container[Hashable]) -> None:
        """Drop what is prepared under other keys, groups first, and the memory that it shared."""
        unused = [whole for whole in self._prepared if whole not in used]
        for whole in unused:
            self._prepared.pop(whole).rest()
        for group in {whole[0] for whole in unused}:
            self._calls[group].route.trim()

    def _native(
        self,
        group: Any,
        key: tuple[Any, ...],
        native: Callable[[], object],
        ours: Callable[[], object],
        like: Any,
    ) -> bool:
        """Whether the network's own call is the faster one; never if a route was asked for."""
        switch = self.switches.get(group)
        # Ranks call their devices by other numbers.
        if switch is None or not switch.native((key[0].type, *key[1:]), native, ours, like):
            return False
        # It needs no memory until it is measured again.
        self._prepared[(group, *key)].rest()
        return True

    def _count(self, work: Work) -> None:
        self.raw_bytes += work.raw_bytes
        self.wire_bytes += work.wire_bytes


class Peers(NamedTuple):
    """Whether ranks read one another's memory.

    Attributes:
        memory: The memory. None: messages go over the network.
        why_not: Why there is none although it was looked for, the same on all ranks; else ``""``.
    """

    memory: PeerMemory | None
    why_not: str


def peers_of(route: Route, group: Any, device: torch.device, purpose: str) -> Peers:
    """Memory that the ranks of a group can read from one another, if that is the route.

    With ``"auto"`` some is tried. What fails there on one rank has all of them take the network;
    the logger "tightwire" says why, at level INFO.

    Args:
        route: The route.
        group: The process group, all of whose ranks call this.
        device: The device of this rank.
        purpose: What it is for, as the log names it.

    Raises:
        RuntimeError: On all ranks, if the route is ``"peers"`` and there can be no such memory.
    """
    if route == "network":
        return Peers(None, "")
    if route != "auto":
        return Peers(_memory(group, device), "")
    if device.type not in _READABLE:
        return _without(f"tensors are on the device {device.type!r}", purpose)
    try:
        attempt(group, device, _check_here)
        memory = _memory(group, device)
        attempt(group, device, lambda: memory.region(_TRIAL_NBYTES))
    except PeerMemoryError as error:
        return _without(str(error), purpose)
    return Peers(memory, "")


def _check_here() -> None:
    """Raise if this process wants no peers' memory, or cannot import what makes it."""
    # What the user has told NCCL holds for what is chosen here, too.
    if os.environ.get("NCCL_P2P_DISABLE", "0") == "1":
        raise PeerMemoryError("NCCL_P2P_DISABLE is set")
    from ..transports import symmetric  # noqa: F401


def _memory(group: Any, device: torch.device) -> PeerMemory:
    from ..transports.symmetric import SymmetricMemory
    from ..transports.torch_groups import timeout_of

    # Less than the host waits, which cannot name the rank that is late.
    return SymmetricMemory(group, device, timeout=0.8 * timeout_of(group, device))


def _without(why: str, purpose: str) -> Peers:
    logging.getLogger("tightwire").info(
        "%s: messages go over the network, as peers' memory cannot be read: %s", purpose, why
    )
    return Peers(None, why)
