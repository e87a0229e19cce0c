"""Gathers that send a message again while its tensors have not changed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from prepared_ranks import DTYPE, ROUTES, run, same, tensor
from tightwire.adapters.collectives.kept_messages import Budget, KeptMessage
from tightwire.adapters.collectives.prepared import PreparedCalls
from tightwire.adapters.errors import CollectiveError

N = 40_001


def gathered(calls: PreparedCalls, gather: Any, x: Any, kept: Any, change: int | None) -> None:
    """Gather `x`, whose element `change` differs in its lowest bit from what others expect."""
    out = np.full(calls.world_size * N, np.nan, DTYPE)
    assert gather(x, out, kept).wait()
    for rank in range(calls.world_size):
        wanted = tensor(rank, N)
        if change is not None:
            wanted.view(np.uint16)[change] ^= 1
        assert same(out[rank * N : (rank + 1) * N], wanted)


@pytest.mark.parametrize("change", [0, N // 2, N - 1])
@pytest.mark.parametrize("world", [2, 3])
def test_a_message_is_sent_again_until_a_bit_changes(world: int, change: int) -> None:
    def task(calls: PreparedCalls) -> None:
        x = tensor(calls.rank, N)
        gather, kept = calls.all_gather(x), KeptMessage(Budget(1 << 20))
        # In the first calls capacities are learnt, and messages laid out anew.
        for _ in range(4):
            gathered(calls, gather, x, kept, None)
        before = kept.sent_again
        for again, flip in enumerate((None, None, change, change, None)):
            x = tensor(calls.rank, N)
            if flip is not None:
                x.view(np.uint16)[flip] ^= 1
            gathered(calls, gather, x, kept, flip)
            assert kept.sent_again - before == (1, 2, 2, 3, 3)[again]

    run(world, "network", task)


def test_ranks_keep_messages_each_for_itself() -> None:
    """One changes its tensor, one has no memory for a message, one keeps it."""

    def task(calls: PreparedCalls) -> int:
        x = tensor(calls.rank, N)
        budget = Budget(0 if calls.rank == 1 else 1 << 20)
        gather, kept = calls.all_gather(x), KeptMessage(budget)
        for call in range(8):
            x = tensor(calls.rank, N, call if calls.rank == 0 else 0)
            out = np.full(3 * N, np.nan, DTYPE)
            assert gather(x, out, kept).wait()
            whole = [tensor(rank, N, call if rank == 0 else 0) for rank in range(3)]
            assert same(out, np.concatenate(whole))
        return kept.sent_again

    first, second, third = run(3, "network", task)
    assert first == second == 0
    assert third >= 4


def test_what_does_not_fit_is_exchanged_exactly_each_time() -> None:
    def task(calls: PreparedCalls) -> None:
        gather, kept = calls.all_gather(tensor(0, N)), KeptMessage(Budget(1 << 20))
        x = tensor(calls.rank, N, wild=True)
        whole = np.concatenate([tensor(rank, N, wild=True) for rank in range(2)])
        repeated = []
        for _ in range(6):
            out = np.full(2 * N, np.nan, DTYPE)
            work = gather(x, out, kept)
            work.wait()
            repeated.append(work.repeated)
            assert same(out, whole)
        assert repeated[0]
        assert not repeated[-1]
        assert kept.sent_again

    run(2, "network", task)


def test_lists_are_kept_as_one_message() -> None:
    def task(calls: PreparedCalls) -> None:
        def given(rank: int, last: int) -> list[Any]:
            return [tensor(rank, N), tensor(rank, 7, dtype=np.float32), np.full(3, last)]

        gather, kept = calls.all_gather(given(0, 0)), KeptMessage(Budget(1 << 20))
        for last in (0, 0, 0, 0, 1, 1):
            outs = [np.zeros(2 * x.size, x.dtype) for x in given(0, 0)]
            gather(given(calls.rank, last), outs, kept).wait()
            rows = zip(outs, given(0, last), given(1, last), strict=True)
            assert all(same(out, np.concatenate([a, b])) for out, a, b in rows)
        assert kept.sent_again >= 2

    run(2, "network", task)


@pytest.mark.parametrize("route", ROUTES)
def test_a_message_that_failed_to_be_encoded_is_not_sent(
    route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is anything else: the ranks may be out of step. Peers keep no messages."""

    def task(calls: PreparedCalls) -> None:
        x = tensor(calls.rank, N)
        gather, kept = calls.all_gather(x), KeptMessage(Budget(1 << 20))
        for _ in range(4):
            gathered(calls, gather, x, kept, None)
        encode, before = gather._encode, kept.sent_again

        def fails(slot: Any, call: Any, at: int, given: Any, message: Any = None) -> None:
            encode(slot, call, at, given, message)
            raise ValueError("out of memory")

        monkeypatch.setattr(gather, "_encode", fails)
        with pytest.raises(ValueError, match="out of memory"):
            gather(tensor(calls.rank, N, 5), np.empty(2 * N, DTYPE), kept)
        assert not kept.holds([x])
        assert bool(before) == (route != "peers")
        monkeypatch.setattr(gather, "_encode", encode)
        with pytest.raises(CollectiveError, match=r"an earlier call has failed: .*out of memory"):
            gather(x, np.empty(2 * N, DTYPE), kept)

    run(2, route, task)


def test_a_budget_is_shared_and_given_back() -> None:
    def task(calls: PreparedCalls) -> None:
        x = tensor(calls.rank, N)
        gather, budget = calls.all_gather(x), Budget(200_000)
        first, second = KeptMessage(budget), KeptMessage(budget)
        for _ in range(4):
            for kept in (first, second):
                gathered(calls, gather, x, kept, None)
        assert first.sent_again
        assert not second.sent_again
        first.free()
        # Messages have been laid out anew meanwhile, as less was needed than there was room for.
        for _ in range(5):
            gathered(calls, gather, x, second, None)
        assert second.sent_again >= 2

    run(2, "network", task)
