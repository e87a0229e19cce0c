"""What a rank that gives up tells, closes and leaves alone, within one process."""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

import tightwire as tw

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("PyTorch was built without gloo", allow_module_level=True)

from tightwire.adapters.collectives.prepared import PreparedCalls  # noqa: E402
from tightwire.adapters.training.hooks import raise_at_the_end  # noqa: E402
from tightwire.adapters.training.prepared_ddp import PreparedDdpHook  # noqa: E402
from tightwire.adapters.transports import aborting, together, torch_dist  # noqa: E402
from tightwire.adapters.transports.aborting import Failures  # noqa: E402
from tightwire.adapters.transports.presence import Presence  # noqa: E402
from tightwire.adapters.transports.threads import connect  # noqa: E402
from tightwire.adapters.transports.torch_dist import TorchDist  # noqa: E402
from tightwire.adapters.transports.torch_groups import failures_of, store_of  # noqa: E402

#: Seconds that stores may take.
PATIENCE = 0.3


class UserError(Exception):
    """What no library raises."""


class Mute(Exception):
    """An error without a text."""

    def __str__(self) -> str:
        raise ValueError("no text")


@pytest.fixture
def transports(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[TorchDist]]:
    """Two transports of one rank, the only ones that are live."""
    found = [TorchDist.by_store(dist.HashStore(), 0, 1, timeout=20) for _ in range(2)]
    monkeypatch.setattr(TorchDist, "live", weakref.WeakSet(found))
    monkeypatch.setattr(
        aborting, "patiently", functools.partial(aborting.patiently, seconds=PATIENCE)
    )
    yield found
    for transport in found:
        transport.close()


def others(transport: TorchDist) -> tuple[Failures, Presence]:
    """What a second rank of a transport has."""
    return Failures(transport._store, 1), Presence(transport._store, 1, 2)


def notes(error: BaseException) -> list[str]:
    return getattr(error, "__notes__", [])


def test_a_later_group_by_the_same_store_hears_nothing_of_the_first() -> None:
    store = dist.HashStore()
    for life in range(3):
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            group = dist.group.WORLD
            own, other = failures_of(group), Failures(store_of(group), 1)
            assert failures_of(group) is own
            assert (own.heard(), other.heard()) == ("", "")
            assert TorchDist()._silent_ranks() == "all ranks have failed here"
            assert other.tell(f"reason {life}") == ""
            text = f"rank 1 gave up: reason {life}"
            assert (own.heard(), own.tell("late")) == (text, text)
            assert TorchDist()._silent_ranks() == text
            with pytest.raises(UserError) as caught, tw.fail_together():
                raise UserError
            assert notes(caught.value) == [text]
        finally:
            dist.destroy_process_group()


def test_leaving_keeps_the_timeout_of_the_store() -> None:
    store = dist.HashStore()
    before = store.timeout
    ranks = [Presence(store, rank, 3) for rank in range(3)]
    ranks[1].leave("why")
    del ranks[2]
    assert store.timeout == before
    assert ranks[0].left() == {1: "why", 2: ""}


@pytest.mark.parametrize("how", ["raises", "hangs"])
def test_a_store_that_does_not_answer_keeps_no_other_from_being_told(
    how: str, transports: list[TorchDist], monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()

    def broken(why: str) -> str:
        if how == "raises":
            raise ValueError("out of order")
        release.wait(60)
        return ""

    presences = [transport.presence() for transport in transports]
    (_, first), (failures, second) = map(others, transports)
    monkeypatch.setattr(transports[0]._failures, "tell", broken)
    try:
        with pytest.raises(UserError) as caught, tw.fail_together():
            raise UserError("out of luck")
        assert failures.heard() == "rank 0 gave up: UserError: out of luck"
        assert first.left() == second.left() == {0: "UserError: out of luck"}
        assert all(transport._lost for transport in transports)
        (note,) = notes(caught.value)
        assert {"raises": "out of order", "hangs": "has not answered"}[how] in note
    finally:
        release.set()
    assert len(presences) == 2


@pytest.mark.parametrize("what", ["text", "groups", "thread", "cut"])
def test_the_exception_is_raised_on_whatever_fails(
    what: str, transports: list[TorchDist], monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = others(transports[0])[0]

    def fail(*_: Any) -> Any:
        raise RuntimeError("nothing works")

    if what == "groups":
        monkeypatch.setattr(together, "_groups", fail)
    if what == "thread":
        monkeypatch.setattr(threading.Thread, "start", fail)
    if what == "cut":
        monkeypatch.setattr(transports[0], "cut", fail)
    error = Mute() if what == "text" else UserError("out of luck")
    with pytest.raises(type(error)) as caught, tw.fail_together():
        raise error
    assert caught.value is error
    assert transports[1]._lost
    told = {"text": "Mute", "thread": ""}.get(what, "UserError: out of luck")
    assert failures.heard() == (f"rank 0 gave up: {told}" if told else "")
    if what == "text":
        assert notes(error) == []
    else:
        (note,) = notes(error)
        assert "nothing works" in note


@pytest.mark.parametrize(
    ("error", "fails"),
    [
        (SystemExit(), False),
        (SystemExit(0), False),
        (GeneratorExit(), False),
        (SystemExit(1), True),
        (SystemExit("why"), True),
        (KeyboardInterrupt(), True),
    ],
    ids=repr,
)
def test_an_end_that_is_no_failure_ends_nothing(
    error: BaseException, fails: bool, transports: list[TorchDist]
) -> None:
    with pytest.raises(type(error)), tw.fail_together():
        raise error
    assert [transport._lost for transport in transports] == [fails] * 2


def test_what_another_rank_has_caused_is_no_reason_but_this_one_leaves(
    transports: list[TorchDist],
) -> None:
    transport = transports[0]
    failures, there = others(transport)
    mine = transport.presence()
    transport.cut()
    transport.abort("why")
    assert failures.heard() == ""
    assert there.left() == {0: "why"}
    assert mine.left() == {}


def test_where_nothing_can_be_closed_the_reason_is_told(transports: list[TorchDist]) -> None:
    transport = transports[0]
    failures, there = others(transport)
    mine = transport.presence()
    transport._device = torch.device("meta")
    transport.cut()
    transport.abort("why")
    assert failures.heard() == "rank 0 gave up: why"
    assert there.left() == {0: "why"}
    assert mine.left() == {}


def refusing(monkeypatch: pytest.MonkeyPatch) -> tuple[PreparedCalls, list[str]]:
    """Calls that an earlier failure has ended, and what the others are told."""
    told: list[str] = []
    transport = connect(1)[0]
    monkeypatch.setattr(transport, "abort", told.append)
    calls = PreparedCalls(transport)
    calls.broken = "damage"
    return calls, told


def test_the_others_are_told_once_and_not_by_a_question(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, told = refusing(monkeypatch)
    assert calls.refusal("all_gather") is not None
    assert told == []
    for _ in range(2):
        with pytest.raises(tw.CollectiveError, match="an earlier call has failed: damage"):
            calls.begin("all_gather", "")
    calls.fail(UserError())
    assert told == ["damage"]


def test_a_backward_that_ends_in_damage_tells_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, told = refusing(monkeypatch)
    hook = PreparedDdpHook("network", None)
    monkeypatch.setattr(hook, "_calls", {None: calls})
    assert hook._refuses() is not None
    assert told == []

    class Ends(torch.autograd.Function):  # type: ignore[misc, name-defined]
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            raise_at_the_end(hook, UserError("out of luck"))
            return gradient

    x = torch.ones(3, requires_grad=True)
    with pytest.raises(UserError, match="out of luck"):
        Ends.apply(x).sum().backward()
    assert told == ["damage"]
    assert isinstance(hook._unended, tw.CollectiveError)


def test_groups_that_are_left_end_together_with_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks drop groups in different orders; NCCL's end when all ranks end theirs."""
    both = threading.Barrier(2, timeout=10)
    ended = []

    class Group:
        def name(self) -> str:
            return "nccl"

        def shutdown(self) -> None:
            both.wait()
            ended.append(self)

    transports = []
    for _ in range(2):
        transport: Any = TorchDist.__new__(TorchDist)
        transport._let_go = weakref.finalize(transport, torch_dist._end, Group())
        transports.append(transport)
    monkeypatch.setattr(torch_dist, "_exiting", [])
    monkeypatch.setattr(TorchDist, "live", weakref.WeakSet(transports[1:]))
    # The first is dropped, the second is not.
    del transport, transports[0]
    gc.collect()
    assert not ended
    torch_dist._exit()
    assert len(ended) == 2
