"""Who is in a group of processes that goes on when some of them fail.

Members follow one another in *generations*: lists of who is in, which a store keeps. When a member
sees a failure, or ranks ask to join, all members report to the store how far they are. The lowest
of those that are there waits for the others, as long as their heartbeats are heard, and writes the
list of the next generation. Whoever writes it first decides: the store takes one.

Source: NCCLX, section 5.3 (fault tolerant all-reduce), whose coordinator is the store here.
"""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Self

import torch.distributed as dist

from ..errors import CollectiveError

#: How errors name what happens here.
NAME = "surviving"
#: Seconds between looks at the store.
_PAUSE = 0.02
#: A look counts as so many seconds of silence at most: while the store or this process stood still
#: nobody was heard.
_LOOK = 5 * _PAUSE
#: Heartbeats in the time after which a member counts as gone.
_BEATS = 5
#: Seconds that an answer of the store may come late.
_GRACE = 1.0
#: Seconds that the end of the process waits for the thread of heartbeats.
_EXIT = 2.0


class Generation(NamedTuple):
    """One list of members.

    Attributes:
        number: Its number, from 0.
        members: Numbers of the members, ascending. Those of a replica of ``width`` processes
            follow each other: member m is place ``m % width`` of replica ``m // width``.
        fresh: Members that do not have the state yet.
        step: The step that comes next, the same for all.
        asks: How many times replicas had asked to join, of those that have had an answer.
        lost: Members of the generation before, or that asked to join, and why they are not in.
    """

    number: int
    members: tuple[int, ...]
    fresh: tuple[int, ...] = ()
    step: int = 0
    asks: int = 0
    lost: dict[str, str] = {}  # noqa: RUF012 (nobody writes to it)


class Report(NamedTuple):
    """How far a member is when a generation ends.

    Attributes:
        step: The step that it is in.
        entered: Whether it has all of that step's gradients, and waits to hear so of the others.
        fresh: Whether it lacks the state.
        joined: Whether it asked to join: what it has without the state is worth nothing.
        leaves: Why it leaves; empty if it does not.
    """

    step: int = 0
    entered: bool = False
    fresh: bool = False
    joined: bool = False
    leaves: str = ""


class _Client:
    """A store whose calls raise RuntimeError if there is no answer in some seconds.

    One whose process was stopped would let them wait for ever.
    """

    def __init__(self, store: Any, patience: float) -> None:
        self.store, self._patience = store, patience
        self._silent = ""

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.store, name)

        def call(*args: Any) -> Any:
            if self._silent:
                raise RuntimeError(self._silent)
            answers: list[Any] = []
            errors: list[RuntimeError] = []

            def ask() -> None:
                try:
                    answers.append(method(*args))
                except RuntimeError as error:
                    errors.append(error)

            thread = threading.Thread(target=ask, daemon=True)
            thread.start()
            thread.join(self._patience)
            # If this process itself stood still the answer may be about to come.
            thread.join(_GRACE)
            if errors:
                raise errors[0]
            if not answers:
                self._silent = f"no answer in {self._patience:g} s"
                raise RuntimeError(self._silent)
            return answers[0]

        return call


class _Heart:
    """A thread that tells the store again and again that this process is there."""

    def __init__(self, store: Any, key: str, interval: float) -> None:
        self._store, self._key, self._interval = store, key, interval
        self._stop = threading.Event()
        #: What the store's connection said when it broke.
        self.error = ""
        self._thread = threading.Thread(target=self._beat, name="tightwire-beat", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        while not self._stop.is_set():
            try:
                self._store.add(self._key, 1)
            except RuntimeError as error:
                self.error = str(error)
                return
            self._stop.wait(self._interval)

    def stop(self) -> None:
        """End the thread. It must not be within the store's client when the interpreter ends."""
        self._stop.set()
        self._thread.join(_EXIT)


class Membership:
    """One process among those that go on without the ones that fail.

    ``generation`` is the newest that this process is in. Every method raises CollectiveError with
    the stage ``"store"`` if the store does not answer, and ``"lost"`` if the others go on without
    this process.

    Args:
        store: A store of torch.distributed that outlives the members, or the one of them that must
            not fail.
        number: Number of this member.
        width: Processes of a replica, which stay and go together.
        timeout: Seconds that members with a heartbeat are waited for.
        silence: Seconds without a heartbeat after which a member is lost.
        count: Number of members of generation 0, for those; None for a process that joins.
        takes: Whether replicas may join.

    Raises:
        CollectiveError: If the store does not answer, or has had a member of this number before.
        ValueError: If a value is not allowed.
    """

    def __init__(
        self,
        store: Any,
        number: int,
        width: int,
        *,
        timeout: float,
        silence: float,
        count: int | None,
        takes: bool = True,
    ) -> None:
        for name, value in (("timeout", timeout), ("silence", silence)):
            if not value > 0:
                raise ValueError(f"{name} is {value}; allowed: seconds above 0")
        self.number, self.width = number, width
        self._timeout, self._silence, self._takes = timeout, silence, takes
        self._quiet: dict[int, tuple[int, float, float]] = {}
        self.generation = Generation(-1, ())
        with self._asking("start"):
            # Its own connection: the caller's may be in use, or wait for something.
            self._store = _Client(_keys(store).clone(), timeout)
            if self._store.add(f"born/{number}", 1) > 1:
                raise self._error(
                    "start",
                    f"the store has had a rank of this number before (member {number}); allowed: "
                    "a store for each run, and join() to come back",
                )
            self._heart = _Heart(self._store.clone(), f"beat/{number}", silence / _BEATS)
        self._stop = weakref.finalize(self, _Heart.stop, self._heart)
        if count is not None:
            with self._asking("start"):
                first = Generation(0, tuple(range(count)), tuple(range(width, count)))
                self._store.compare_set("width", "", str(width))
                self._store.compare_set("0/list", "", json.dumps(first))
                self._enter(0)
            if self.generation.members != first.members:
                self.close("another world size")
                members = len(self.generation.members)
                raise ValueError(f"{count} members are given, {members} on another rank")

    @classmethod
    def new_replica(cls, store: Any, width: int, timeout: float) -> int:
        """The number of a replica that joins, asked for by one of its processes.

        Args:
            store: The store of the members.
            width: Processes of a replica.
            timeout: Seconds to wait for a first member.

        Raises:
            CollectiveError: If the store does not answer, or nobody has come.
            ValueError: If the replicas have another width.
        """
        try:
            keys = _Client(_keys(store), timeout)
            until = time.monotonic() + timeout
            while not keys.check(["0/list", "width"]):
                if time.monotonic() > until:
                    detail = f"the store has had no members for {timeout:g} s"
                    raise CollectiveError(-1, NAME, -1, "join", detail)
                time.sleep(_PAUSE)
            theirs = int(keys.get("width"))
            if theirs != width:
                raise ValueError(f"the replica has {width} processes; allowed here: {theirs}")
            first = _generation(keys, 0)
            return len(first.members) // width + int(keys.add("replicas", 1)) - 1
        except CollectiveError:
            raise
        except RuntimeError as error:
            raise CollectiveError(-1, NAME, -1, "store", _silent_store(error)) from error

    @property
    def rank(self) -> int:
        """Number of this process's replica in the generation; its old one if it is in none."""
        replicas = sorted({member // self.width for member in self.generation.members})
        own = self.number // self.width
        return replicas.index(own) if own in replicas else own

    def column(self) -> list[int]:
        """Members with this one's place in their replicas."""
        return [m for m in self.generation.members if (m - self.number) % self.width == 0]

    def prefix(self, what: str) -> Any:
        """A store for something that members of this generation do once."""
        return dist.PrefixStore(f"{self.generation.number}/{what}", self._store.store)

    def check(self) -> None:
        """Raise CollectiveError if the store has gone."""
        if self._heart.error:
            raise self._error("store", _silent_store(self._heart.error))

    def asked(self) -> bool:
        """Whether replicas have asked to join that have had no answer."""
        if not self._takes:
            return False
        with self._asking("join"):
            return bool(self._store.add("asks", 0) > self.generation.asks)

    def meet(self, what: str, wait: float | None = None) -> None:
        """Wait until all members of the generation are here.

        Args:
            what: What for.
            wait: Seconds to wait for members with a heartbeat. None: as long as they have one.

        Raises:
            CollectiveError: If a member is gone or late, or has seen a failure.
        """
        number = self.generation.number
        keys = {m: f"{number}/{what}/{m}" for m in self.generation.members}
        until = None if wait is None else time.monotonic() + wait
        with self._asking(what):
            self._store.set(keys[self.number], "")
            while not self._store.check(list(keys.values())):
                if self._store.check([f"{number}/failed"]):
                    raise self._error(what, "another member has seen a failure")
                missing = [m for m, key in keys.items() if not self._store.check([key])]
                gone = [m for m in missing if self._silent(m)]
                if gone:
                    raise self._error(what, f"members {gone} are gone")
                if until is not None and time.monotonic() > until:
                    raise self._error(what, f"members {missing} have not come in {wait:g} s")
                time.sleep(_PAUSE)

    def regroup(self, report: Report) -> Generation:
        """End the generation, and enter the next one with those that are left.

        Args:
            report: How far this member is.

        Returns:
            The next generation.

        Raises:
            CollectiveError: With the stage ``"lost"`` if this process is not in it.
        """
        before = self.generation
        key = f"{before.number + 1}/list"
        with self._asking("regroup"):
            self._store.set(self._report_key(self.number), json.dumps(report))
            self._store.set(f"{before.number}/failed", "")
            until = time.monotonic() + self._timeout
            while not self._store.check([key]):
                if self._leads():
                    reports = {m: self._report(m) for m in before.members}
                    late = [m for m, r in reports.items() if r is None and not self._silent(m)]
                    if not late or time.monotonic() > until:
                        self._propose(reports)
                        break
                time.sleep(_PAUSE)
            self._enter(before.number + 1)
        if self.number not in self.generation.members:
            why = self.generation.lost.get(str(self.number), "it had not asked")
            left = len(self.generation.members)
            others = f"the others ({left}) go on without it" if left else "nobody is left"
            raise self._error(
                "lost", f"this process is not in generation {before.number + 1}: {why}; {others}"
            )
        return self.generation

    def ask(self, attempt: int, wait: float) -> Generation:
        """Ask to join, and wait until the members take this process's replica in.

        Args:
            attempt: How many times this process has asked, with this.
            wait: Seconds to wait.

        Returns:
            The generation that this process is in.

        Raises:
            CollectiveError: If they do not take it in.
        """
        until = time.monotonic() + wait
        replica, place = divmod(self.number, self.width)
        own = range(replica * self.width, (replica + 1) * self.width)
        with self._asking("join"):
            self._store.add(f"ready/{replica}", 1)
            number = max(self.generation.number, int(self._store.add("generations", 0)))
            # Which of all asks is this replica's; 0 before it is made.
            ask = 0
            while True:
                all_ready = self._store.add(f"ready/{replica}", 0) >= attempt * self.width
                if place == 0 and not ask and all_ready:
                    ask = int(self._store.add("asks", 1))
                    self._store.set(f"ask/{ask}", str(replica))
                while self._store.check([f"{number + 1}/list"]):
                    number += 1
                    found = _generation(self._store, number)
                    if self.number in found.members:
                        self.generation = found
                        return found
                    if 0 < ask <= found.asks and self._beating(own):
                        # The members did not hear it in time.
                        ask = 0
                if time.monotonic() > until:
                    raise self._error("join", f"the members have not answered in {wait:g} s")
                time.sleep(_LOOK)

    def close(self, why: str = "it was closed") -> None:
        """Leave: the others need not wait for silence. Closing again does nothing."""
        if self._stop.detach() is None:
            return
        self._heart.stop()
        if self._heart.error or self.number not in self.generation.members:
            # Nobody is left who could be told, or who waits.
            return
        with self._asking("leave"):
            self._store.set(self._report_key(self.number), json.dumps(Report(leaves=why)))
            self._store.set(f"{self.generation.number}/failed", "")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """`close()`."""
        self.close()

    # The end of a generation.

    def _leads(self) -> bool:
        """No lower member is there that could."""
        for m in self.generation.members:
            if m == self.number:
                break
            report = self._report(m)
            if report is not None and not report.leaves and not self._silent(m):
                return False
        return True

    def _propose(self, reports: dict[int, Report | None]) -> None:
        """Write the next list, unless another has."""
        before, width = self.generation, self.width
        lost: dict[str, str] = {}
        here: dict[int, Report] = {}
        for m, report in reports.items():
            if report is not None and report.leaves:
                lost[str(m)] = f"it has left: {report.leaves}"
            elif self._silent(m):
                lost[str(m)] = f"nothing was heard of it for {self._silence:g} s"
            elif report is None:
                lost[str(m)] = f"it has not reported for {self._timeout:g} s"
            else:
                here[m] = report
        whole = _whole(here, width, lost)
        holders = [m for m in whole if not here[m].fresh] or [
            m for m in whole if not here[m].joined
        ]
        columns = {m % width for m in holders}
        if len(columns) < width:
            why = "no rank that is left has the state"
            lost |= {str(m): why for m in whole}
            self._write(Generation(before.number + 1, (), asks=before.asks, lost=lost))
            return
        step = min(here[m].step + here[m].entered for m in holders)
        # The state is that of `step` on all that have it: it can be sent.
        even = all(here[m].step == step for m in holders)
        fresh = [m for m in whole if here[m].fresh]
        asks, joining = self._joining() if even and self._takes else (before.asks, [])
        if not even:
            lost |= {str(m): "others are between two steps: it may ask again" for m in fresh}
            whole = _whole([m for m in whole if m not in fresh], width, lost)
            fresh = []
        members = sorted({*whole, *joining})
        lacking = sorted({*fresh, *joining})
        self._write(Generation(before.number + 1, tuple(members), tuple(lacking), step, asks, lost))

    def _joining(self) -> tuple[int, list[int]]:
        """How many have asked, and the members of those that are there."""
        before = self.generation
        count = before.asks
        found: list[int] = []
        asked = self._store.add("asks", 0)
        while count < asked and self._store.check([f"ask/{count + 1}"]):
            count += 1
            replica = int(self._store.get(f"ask/{count}"))
            places = range(replica * self.width, (replica + 1) * self.width)
            if places[0] not in before.members and self._beating(places):
                found += places
        return count, found

    def _beating(self, members: Sequence[int]) -> bool:
        """Whether all of these are heard now."""
        before = [self._store.add(f"beat/{m}", 0) for m in members]
        until = time.monotonic() + self._silence
        while time.monotonic() < until:
            now = [self._store.add(f"beat/{m}", 0) for m in members]
            if all(a < b for a, b in zip(before, now, strict=True)):
                return True
            time.sleep(_PAUSE)
        return False

    def _write(self, proposed: Generation) -> None:
        text = json.dumps(proposed)
        taken = self._store.compare_set(f"{proposed.number}/list", "", text)
        if taken.decode() == text:
            self._store.add("generations", 1)

    def _enter(self, number: int) -> None:
        self.generation = _generation(self._store, number)

    def _report_key(self, member: int) -> str:
        return f"{self.generation.number}/report/{member}"

    def _report(self, member: int) -> Report | None:
        key = self._report_key(member)
        return Report(*json.loads(self._store.get(key))) if self._store.check([key]) else None

    def _silent(self, member: int) -> bool:
        """Whether looks at a member's heartbeat have found nothing new for `silence` seconds.

        One that has never had a heartbeat is still starting.
        """
        count, now = self._store.add(f"beat/{member}", 0), time.monotonic()
        before, quiet, last = self._quiet.get(member, (-1, 0.0, now))
        quiet = quiet + min(now - last, _LOOK) if count == before else 0.0
        self._quiet[member] = count, quiet, now
        return bool(count > 0 and quiet > self._silence)

    @contextmanager
    def _asking(self, stage: str) -> Iterator[None]:
        """Have errors say that it is the store that does not answer."""
        try:
            yield
        except CollectiveError:
            raise
        except RuntimeError as error:
            raise self._error("store", f"{_silent_store(error)} (stage {stage!r})") from error

    def _error(self, stage: str, detail: str) -> CollectiveError:
        return CollectiveError(self.rank, NAME, self.generation.number, stage, detail)


def _whole(members: Any, width: int, lost: dict[str, str]) -> list[int]:
    """Those of `members` whose replicas are whole; says of the others in `lost` why they are not.

    What remains of a broken replica leaves with it.
    """
    found = []
    for m in sorted(members):
        first = m - m % width
        missing = [o for o in range(first, first + width) if o not in members]
        if missing:
            lost[str(m)] = f"its replica has lost members {missing}"
        else:
            found.append(m)
    return found


def _keys(store: Any) -> Any:
    return dist.PrefixStore("tightwire/surviving", store)


def _generation(store: Any, number: int) -> Generation:
    _, members, fresh, *others = json.loads(store.get(f"{number}/list"))
    return Generation(number, tuple(members), tuple(fresh), *others)


def _silent_store(error: Any) -> str:
    return (
        "the store does not answer, by which the ranks that are left agree: the process that "
        f"holds it has ended or cannot be reached. The run has to start again: {error}"
    )
