"""Prepared calls whose messages have the size that they need: ``sizes="exact"``.

What they give is tested with the other routes, in test_prepared.py.
"""

from __future__ import annotations

import numpy as np
import pytest

import tightwire as tw
from prepared_ranks import CASES, prepare, result, run, same, tensor
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


def test_exact_sizes_are_refused_with_peers_and_by_other_names() -> None:
    transport, (memory,) = connect(1)[0], connect_threads(1, 5)
    with pytest.raises(ValueError, match="allowed with peers: 'learnt'"):
        PreparedCalls(transport, peers=memory, sizes="exact")
    with pytest.raises(ValueError, match="sizes is 'first'; allowed: "):
        PreparedCalls(transport, sizes="first")  # type: ignore[arg-type]

    def differ(calls: PreparedCalls) -> None:
        with pytest.raises(tw.CollectiveError, match="exact sizes"):
            PreparedCalls(calls.transport, sizes="exact" if calls.rank else "learnt")

    run(2, "network", differ)
