"""Who is in after a failure: members as threads of this process, by a store in its memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import tightwire as tw

dist = pytest.importorskip("torch.distributed")
if not dist.is_available():
    pytest.skip("PyTorch was built without torch.distributed", allow_module_level=True)

from tightwire.adapters.transports import membership  # noqa: E402
from tightwire.adapters.transports.membership import Generation, Membership, Report  # noqa: E402

#: Seconds for members with a heartbeat, and without one.
TIMEOUT, SILENCE = 0.6, 0.25


class Run:
    """Members of one store, which end with the test."""

    def __init__(self) -> None:
        self.store = dist.HashStore()
        self.members: dict[int, Membership] = {}

    def start(self, count: int, width: int = 1, **options: Any) -> None:
        for number in range(count):
            self.members[number] = self.new(number, width, count, **options)

    def new(self, number: int, width: int, count: int | None, **options: Any) -> Membership:
        times = {"timeout": TIMEOUT, "silence": SILENCE} | options
        return Membership(self.store, number, width, count=count, **times)

    def die(self, number: int) -> None:
        """No more sign of life, and no word."""
        self.members[number]._heart.stop()

    def regroup(self, reports: Mapping[int, Report]) -> dict[int, Generation | tw.CollectiveError]:
        """What members that report get, all at once."""

        def report(number: int) -> Generation | tw.CollectiveError:
            try:
                return self.members[number].regroup(reports[number])
            except tw.CollectiveError as error:
                return error

        with ThreadPoolExecutor(len(reports)) as pool:
            return dict(zip(reports, pool.map(report, reports), strict=True))


@pytest.fixture
def run() -> Iterator[Run]:
    found = Run()
    yield found
    for member in found.members.values():
        member.close()


def all_in(found: Mapping[int, Any], members: Sequence[int]) -> Generation:
    """The generation that all of `found` are in, which has these members."""
    generations = list(found.values())
    assert all(g == generations[0] for g in generations), generations
    first: Generation = generations[0]
    assert first.members == tuple(members)
    return first


@pytest.mark.parametrize(
    ("reports", "step"),
    [
        # Nobody can know that step 4 was whole.
        ([Report(4, True), Report(4, False), Report(4, True)], 4),
        # One has gone past its end: so all had come to it.
        ([Report(5, False), Report(4, True), Report(4, True)], 5),
        # All have come to it, and nobody past it.
        ([Report(4, True), Report(4, True), Report(4, True)], 5),
        ([Report(5, True), Report(5, False), Report(4, True)], 5),
    ],
)
def test_a_step_counts_if_all_that_are_left_had_all_of_it(
    run: Run, reports: list[Report], step: int
) -> None:
    run.start(3)
    found = all_in(run.regroup(dict(enumerate(reports))), [0, 1, 2])
    assert (found.number, found.step, found.fresh, found.lost) == (1, step, (), {})


def test_members_that_are_dead_or_late_are_lost_and_told(run: Run) -> None:
    run.start(5)
    run.die(0)
    run.members[3].close("it had enough")
    start = time.monotonic()
    found = all_in(run.regroup({1: Report(2), 4: Report(2)}), [1, 4])
    # Member 2, which has a heartbeat and says nothing, has had the whole time.
    assert TIMEOUT <= time.monotonic() - start < TIMEOUT + 1
    assert found.lost == {
        "0": "nothing was heard of it for 0.25 s",
        "2": "it has not reported for 0.6 s",
        "3": "it has left: it had enough",
    }
    assert [run.members[m].rank for m in (1, 4)] == [0, 1]
    late = run.regroup({2: Report(1)})[2]
    assert isinstance(late, tw.CollectiveError)
    assert (late.stage, late.sequence) == ("lost", 1)
    assert late.detail == (
        "this process is not in generation 1: it has not reported for 0.6 s; the others (2) "
        "go on without it"
    )
    # What it does then disturbs nobody.
    run.members[2].close()
    assert not run.store.check(["tightwire/surviving/1/failed"])


def test_another_leads_when_the_leader_dies_with_the_others_waiting(run: Run) -> None:
    run.start(3)
    threading.Timer(0.1, run.die, [0]).start()
    run.store.set("tightwire/surviving/0/report/0", "[3, false]")
    all_in(run.regroup({1: Report(3), 2: Report(3)}), [1, 2])


def test_what_remains_of_a_broken_replica_leaves_with_it(run: Run) -> None:
    run.start(6, width=2)
    run.die(3)
    others = {m: Report(7) for m in (0, 1, 2, 4, 5)}
    found = run.regroup(others)
    broken = found.pop(2)
    assert isinstance(broken, tw.CollectiveError)
    assert "its replica has lost members [3]; the others (4) go on" in broken.detail
    all_in(found, [0, 1, 4, 5])
    assert [run.members[m].rank for m in (0, 1, 4, 5)] == [0, 0, 1, 1]
    assert run.members[4].column() == [0, 4]


def join(run: Run, width: int = 1) -> list[int]:
    """The members of a new replica, who have asked."""
    replica = Membership.new_replica(run.store, width, TIMEOUT)
    numbers = list(range(replica * width, (replica + 1) * width))
    for number in numbers:
        run.members[number] = run.new(number, width, None)
    return numbers


def test_a_replica_joins_when_all_have_the_same_state(run: Run) -> None:
    run.start(2)
    assert not run.members[0].asked()
    (new,) = join(run)
    assert new == 2
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(run.members[new].ask, 1, 10.0)
        while not run.members[0].asked():
            time.sleep(0.01)
        # Member 0 has yet to make the optimizer's step 3.
        uneven = all_in(run.regroup({0: Report(3, True), 1: Report(4)}), [0, 1])
        assert (uneven.step, uneven.fresh) == (4, ())
        assert run.members[0].asked()
        found = all_in(run.regroup({0: Report(4), 1: Report(4)}), [0, 1, 2])
        assert (found.step, found.fresh) == (4, (2,))
        assert first.result() == found
        assert not run.members[0].asked()
        # Before it has the state all fail, and one is ahead: it has to ask again.
        reports = {0: Report(4, True), 1: Report(5), 2: Report(4, fresh=True, joined=True)}
        after = run.regroup(reports)
        told = after.pop(2)
        assert isinstance(told, tw.CollectiveError)
        assert "others are between two steps: it may ask again" in told.detail
        all_in(after, [0, 1])
        again = pool.submit(run.members[2].ask, 2, 10.0)
        while not run.members[0].asked():
            time.sleep(0.01)
        assert all_in(run.regroup({0: Report(5), 1: Report(5)}), [0, 1, 2]) == again.result()


def test_a_replica_that_asked_and_died_holds_up_nobody(run: Run) -> None:
    run.start(2, width=2)
    numbers = join(run, 2)
    assert numbers == [2, 3]
    with ThreadPoolExecutor(2) as pool:
        asking = [pool.submit(run.members[m].ask, 1, 0.5) for m in numbers]
        while not run.members[0].asked():
            time.sleep(0.01)
        run.die(3)
        all_in(run.regroup({0: Report(), 1: Report()}), [0, 1])
        assert not run.members[0].asked()
        for future in asking:
            with pytest.raises(tw.CollectiveError, match=r"have not answered in 0\.5 s"):
                future.result()


def test_a_replica_that_was_not_heard_asks_again(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.start(2)
    (new,) = join(run)
    for m in (0, 1):
        monkeypatch.setattr(run.members[m], "_beating", lambda places: False)
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(run.members[new].ask, 1, 10.0)
        while not run.members[0].asked():
            time.sleep(0.01)
        all_in(run.regroup({0: Report(1), 1: Report(1)}), [0, 1])
        monkeypatch.undo()
        until = time.monotonic() + 5
        while not run.members[0].asked() and time.monotonic() < until:
            time.sleep(0.01)
        assert all_in(run.regroup({0: Report(1), 1: Report(1)}), [0, 1, 2]) == asking.result()


def test_nobody_goes_on_without_the_state(run: Run) -> None:
    run.start(1)
    join(run)
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(run.members[1].ask, 1, 5.0)
        while not run.members[0].asked():
            time.sleep(0.01)
        run.regroup({0: Report()})
        asking.result()
    run.die(0)
    found = run.regroup({1: Report(fresh=True, joined=True)})[1]
    assert isinstance(found, tw.CollectiveError)
    assert "no rank that is left has the state; nobody is left" in found.detail


def test_members_meet_or_hear_who_is_missing(run: Run) -> None:
    run.start(3)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda m: m.meet("a", TIMEOUT), run.members.values()))
        with pytest.raises(tw.CollectiveError, match=r"members \[1, 2\] have not come in 0.1 s"):
            run.members[0].meet("b", 0.1)
        run.die(2)
        waiting = pool.submit(run.members[1].meet, "b")
        with pytest.raises(tw.CollectiveError, match=r"members \[2\] are gone"):
            waiting.result()
        run.members[0].close()
        with pytest.raises(tw.CollectiveError, match="another member has seen a failure"):
            run.members[1].meet("c")


def test_what_does_not_belong_together_is_refused(run: Run) -> None:
    with pytest.raises(tw.CollectiveError, match=r"the store has had no members for 0\.1 s"):
        Membership.new_replica(run.store, 1, 0.1)
    run.start(2)
    with pytest.raises(tw.CollectiveError, match="a rank of this number before"):
        run.new(1, 1, 2)
    with pytest.raises(ValueError, match="the replica has 2 processes; allowed here: 1"):
        Membership.new_replica(run.store, 2, 0.1)
    with pytest.raises(ValueError, match="3 members are given, 2 on another rank"):
        run.new(2, 1, 3)
    with pytest.raises(ValueError, match="silence is 0; allowed: seconds above 0"):
        run.new(3, 1, 3, silence=0)


def test_a_store_that_stands_still_is_an_error_and_not_a_wait(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.start(1)
    member = run.members[0]
    monkeypatch.setattr(membership, "_GRACE", 0.1)
    free = threading.Event()

    class Stopped:
        def set(self, key: str, value: str) -> None:
            free.wait(10)

    member._store.store = Stopped()
    start = time.monotonic()
    # Only the first waits.
    calls: tuple[Any, ...] = (lambda: member.meet("a"), member.close)
    for call in calls:
        with pytest.raises(tw.CollectiveError, match=r"no answer in 0\.6 s") as caught:
            call()
        assert caught.value.stage == "store"
    assert time.monotonic() - start < 1.5
    free.set()


def test_a_store_that_is_gone_is_known_before_any_failure(run: Run) -> None:
    class Gone:
        def add(self, key: str, count: int) -> int:
            raise RuntimeError("broken pipe")

    run.start(1)
    member = run.members[0]
    member.check()
    heart, member._heart = member._heart, membership._Heart(Gone(), "beat/0", 0.01)
    member._heart._thread.join(5)
    with pytest.raises(tw.CollectiveError, match="The run has to start again: broken pipe"):
        member.check()
    heart.stop()
