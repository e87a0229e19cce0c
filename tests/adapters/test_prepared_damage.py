"""Damaged messages of prepared calls: named, and no rank is left behind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from prepared_ranks import CASES, damage, prepare, result, run, same, tensor
from tightwire.adapters.collectives.prepared import PreparedCalls
from tightwire.adapters.errors import CollectiveError


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("codec", ["zipccl", "mx"])
def test_damage_is_named(case: str, codec: str) -> None:
    """A byte that changes on the way to rank 1 is found there.

    What lossless messages need is learnt from them, so that later calls are refused there.
    """

    def task(calls: PreparedCalls) -> Any:
        x = tensor(calls.rank, 6000)
        call, out = prepare(calls, case, x), result(case, 6000, 2)
        if calls.rank == 0:
            call(x, out).wait()
        else:
            damage(call, 1000, 1)
            work = call(x, out)
            with pytest.raises(CollectiveError, match=r"stage 'decode'.*\(from rank 0\)"):
                work.wait()
            with pytest.raises(CollectiveError, match="stage 'decode'"):
                work.wait()
            if codec == "zipccl":
                with pytest.raises(CollectiveError, match=r"an earlier call has failed: .*decode"):
                    call(x, out)
        if codec == "mx":
            for _ in range(2):
                call(x, result(case, 6000, 2)).wait()
        return out

    found = run(2, "network", task, codec=codec, pieces="pieces" in case)[0]
    if case == "two-shot":
        # What rank 1 could not add up is no number on rank 0 either.
        assert np.isnan(found[3072:].astype(np.float32)).all()
        assert not np.isnan(found[:3072].astype(np.float32)).any()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("bit", [1, 128])
def test_damage_of_what_messages_say_of_themselves_is_named(case: str, bit: int) -> None:
    """Sizes are learnt from that: a rank that believed it would leave the others behind."""
    n = 12_000

    def task(calls: PreparedCalls) -> None:
        x = tensor(calls.rank, n)
        call = prepare(calls, case, x)
        exchange = getattr(call, "prepared", call)._slots[0].exchanges[0]
        buffer = exchange.layouts[0].starts[0]
        # The words of what was needed, and the record.
        header = exchange.layouts[0].plans[0].header.nbytes
        places = [*range(min(buffer, 16)), *range(buffer + header, buffer + header + 32)]
        for at in places:
            out = result(case, n, 2)
            if calls.rank == 1:
                damage(call, at, bit)
            work = call(x, out)
            if calls.rank == 0:
                work.wait()
                assert not work.repeated
            else:
                with pytest.raises(CollectiveError, match="stage 'decode'"):
                    work.wait()
                assert calls.broken
                calls.broken = ""
            # Both ranks go on as if this call had not been.
            work.needs = []

    run(2, "network", task, pieces="pieces" in case)


def test_damage_for_which_nobody_waits_leaves_ranks_in_step() -> None:
    """The call that needs the memory is made like those of the others, and raises later."""

    def task(calls: PreparedCalls) -> list[Any]:
        gather, outs = calls.all_gather(tensor(0, 6000)), []
        if calls.rank == 1:
            damage(gather, 2000, 1)
        for k in range(5):
            outs.append(result("all_gather", 6000, 2))
            work = gather(tensor(calls.rank, 6000, k), outs[-1])
            if calls.rank == 1 and k == 2:
                with pytest.raises(CollectiveError, match=r"all_gather #2 .*from rank 0"):
                    work.wait()
            elif k > 1:
                work.wait()
        return outs[2:]

    first, second = run(2, "network", task, codec="mx")
    for k, (x, y) in enumerate(zip(first, second, strict=True)):
        assert same(x, y), k
