"""Prepared calls whose messages have the size that they need: ``sizes="exact"``.

What they give is tested with the other routes, in test_prepared.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tightwire as tw
from prepared_ranks import CASES, prepare, result, run, same, tensor, wanted
from tightwire.adapters.collectives import exact_messages, messages, tensors
from tightwire.adapters.collectives.prepared import PreparedCalls
from tightwire.adapters.transports.peer import connect_threads
from tightwire.adapters.transports.threads import connect


@pytest.mark.parametrize("case", CASES)
def test_exact_sizes_fit_any_data(case: str) -> None:
    """Nothing is sent again, whatever the data, and no more than they need."""
    world, n = 3, 30_000

    def task(calls: PreparedCalls) -> list[int]:
        call = prepare(calls, case, tensor(0, n))
        wire = []
        for k in range(4):
            wild = k >= 2 and calls.rank == 1
            xs = [tensor(r, n, k, wild=k >= 2 and r == 1) for r in range(world)]
            out = result(case, n, world)
            work = call(tensor(calls.rank, n, k, wild=wild), out)
            assert not work.may_change
            work.wait()
            assert not work.repeated
            if case == "all_gather":
                assert same(out, np.concatenate(xs))
            wire.append(work.wire_bytes)
        return wire

    exact = run(world, "exact", task, pieces="pieces" in case)

    def learns(calls: PreparedCalls) -> list[int]:
        call, out, wire = prepare(calls, case, tensor(0, n)), result(case, n, world), []
        for k in range(2):
            work = call(tensor(calls.rank, n, k), out)
            work.wait()
            wire.append(work.wire_bytes)
        return wire

    learnt = run(world, "network", learns, pieces="pieces" in case)
    for mine, theirs in zip(exact, learnt, strict=True):
        assert all(a < b for a, b in zip(mine[:2], theirs, strict=True))
    if case not in ("broadcast", "all_to_all"):
        # Rank 1 has other data.
        assert exact[1][2] > exact[1][1]


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("case", CASES)
def test_sizes_are_read_of_what_was_encoded(
    case: str, world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other messages hold whatever the memory held before."""
    n = 9000
    found: list[int] = []
    pieces = exact_messages._pieces

    def stale(nbytes: int, like: Any) -> Any:
        memory = tensors.empty_bytes(nbytes, like)
        memory[:] = 0x80
        return memory

    def noted(message: Any, layout: Any, sizes: Any) -> list[Any]:
        found.extend(sizes.tolist())
        assert all(0 <= s <= p.nbytes for s, p in zip(sizes, layout.plans, strict=True))
        return pieces(message, layout, sizes)

    monkeypatch.setattr(messages, "zeros", stale)
    monkeypatch.setattr(exact_messages, "_pieces", noted)

    def task(calls: PreparedCalls) -> None:
        xs = [tensor(r, n) for r in range(world)]
        out = result(case, n, world)
        prepare(calls, case, xs[0])(xs[calls.rank], out).wait()
        assert same(out, wanted(case, xs, calls.rank))

    run(world, "exact", task, pieces="pieces" in case)
    assert any(found) or world == 1


def test_exact_sizes_are_refused_with_peers_and_by_other_names() -> None:
    transport, (memory,) = connect(1)[0], connect_threads(1, 5)
    with pytest.raises(ValueError, match="allowed with peers: 'learnt'"):
        PreparedCalls(transport, peers=memory, sizes="exact")
    with pytest.raises(ValueError, match="side_by_side and peers are given; allowed: one"):
        PreparedCalls(transport, peers=memory, side_by_side=True)
    with pytest.raises(ValueError, match="sizes is 'first'; allowed: "):
        PreparedCalls(transport, sizes="first")  # type: ignore[arg-type]

    def differ(calls: PreparedCalls) -> None:
        with pytest.raises(tw.CollectiveError, match="exact sizes"):
            PreparedCalls(calls.transport, sizes="exact" if calls.rank else "learnt")

    run(2, "network", differ)


def damaging(calls: PreparedCalls, name: str, damage: Callable[[Any], None]) -> None:
    """Have a call of a rank's transport damage what it receives, once."""
    move = getattr(calls.transport, name)

    def damaged(outs: Any, *rest: Any) -> None:
        delattr(calls.transport, name)
        move(outs, *rest)
        damage(outs)

    setattr(calls.transport, name, damaged)


def largest(outs: Any) -> Any:
    return max((piece for row in outs for piece in row), key=len)


@pytest.mark.parametrize("what", ["terms", "sizes"])
def test_damage_is_told_to_all_ranks(what: str) -> None:
    """At once if nobody knows how long messages are, else by the next call."""
    n, world, sizes = 9000, 3, what == "sizes"

    def task(calls: PreparedCalls) -> str:
        call = prepare(calls, "two-shot", tensor(0, n))
        x, out = tensor(calls.rank, n), result("two-shot", n, world)
        call(x, out).wait()
        if calls.rank == 1 and sizes:
            damaging(calls, "all_to_all", lambda out: np.bitwise_xor(out, 1, out=out))
        elif calls.rank == 1:

            def flip(outs: Any) -> None:
                piece = largest(outs)
                piece[piece.size * 3 // 4] ^= 4

            damaging(calls, "all_to_all_v", flip)
        if not sizes and calls.rank != 1:
            call(x, out).wait()
            assert np.isnan(out.astype(np.float32)).sum() == 3072
        with pytest.raises(tw.CollectiveError) as caught:
            call(x, out).wait()
        with pytest.raises(tw.CollectiveError, match="an earlier call has failed"):
            call(x, out)
        return str(caught.value)

    start = time.monotonic()
    found = run(world, "exact", task)
    assert time.monotonic() - start < 10
    assert ("damaged in transit" if sizes else "stage 'decode'") in found[1]
    for text in (found[0], found[2]):
        assert "rank 1 gave up" in text, found
