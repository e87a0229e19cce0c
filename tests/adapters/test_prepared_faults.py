"""A rank that raises, is killed or stops at any stage of a prepared call: what the others get.

This file is also what the processes run.
"""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tightwire as tw
from forked import launch, main
from prepared_ranks import UserError, befall, damage, run

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("PyTorch was built without gloo", allow_module_level=True)

from tightwire.adapters.collectives.prepared import PreparedCalls  # noqa: E402
from tightwire.adapters.transports.torch_dist import TorchDist  # noqa: E402

pytestmark = pytest.mark.slow

RANKS, VICTIM = 3, 1
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
STAGES = ("before encode", "before network", "while waiting", "before decode")
#: Seconds that ranks wait for one that has stopped, and for others, which is to be no matter.
STOPPED, LONG = 4.0, 60.0
#: Elements, so many that sums take two shots.
N = 3 * 50_000


# What the processes run.


def result_of(collective: str) -> Any:
    size = {"all_gather": RANKS * N, "reduce_scatter": N // RANKS}.get(collective, N)
    return torch.full((size,), float("nan"), dtype=torch.bfloat16)


def faults(case: list[str], rank: int, file: str, report: Callable[[Any], None]) -> None:
    collective, stage, fault = case
    store = dist.FileStore(file, RANKS)
    timeout = STOPPED if fault == "stopped" else LONG
    transport = TorchDist.by_store(dist.PrefixStore("test", store), rank, RANKS, timeout=timeout)
    calls = PreparedCalls(transport)
    x, out = torch.full((N,), rank + 1.0, dtype=torch.bfloat16), result_of(collective)
    call = getattr(calls, collective)(x)
    for _ in range(2):
        call(x, out).wait()
    if collective in ("reduce_scatter", "all_reduce"):
        assert set(out.tolist()) == {6.0}
    else:
        assert set(out.tolist()) == {1.0, 2.0, 3.0}
    if rank == VICTIM:
        befall(call, stage, fault)
    elif stage == "while waiting":
        time.sleep(0.5)
    start = time.monotonic()
    try:
        # Where the others have got all of the call, it is the next one that fails.
        for _ in range(3):
            start = time.monotonic()
            call(x, out).wait()
    except (tw.CollectiveError, UserError) as error:
        seconds = time.monotonic() - start
        again = ""
        try:
            call(x, out)
        except tw.CollectiveError as later:
            again = str(later)
        report({"error": str(error), "seconds": seconds, "again": again})
    # A process that lives on: its connections are not closed by its end.
    time.sleep(LONG)


def damaged(case: str, rank: int, file: str, report: Callable[[Any], None]) -> None:
    """The victim gets other bytes, and makes the next call all the same."""
    store = dist.FileStore(file, RANKS)
    transport = TorchDist.by_store(dist.PrefixStore("test", store), rank, RANKS, timeout=LONG)
    calls = PreparedCalls(transport)
    x, out = torch.full((N,), rank + 1.0, dtype=torch.bfloat16), result_of(case)
    call = getattr(calls, case)(x)
    call(x, out).wait()
    errors, start = [], time.monotonic()
    if rank == VICTIM:
        damage(call, 2000, 1)
    for number in range(3):
        try:
            call(x, out).wait()
        except tw.CollectiveError as error:
            errors.append(str(error))
        if number == 0:
            # The damage has closed no connection.
            flag = torch.tensor([len(errors)], dtype=torch.int32)
            transport.all_reduce(flag)
            assert flag.item() == 1
    report({"errors": errors, "seconds": time.monotonic() - start})
    time.sleep(LONG)


def warm_up() -> None:
    """Have all imported and compiled."""
    torch.set_num_threads(1)

    def all_calls(calls: PreparedCalls) -> None:
        x = torch.full((N,), calls.rank + 1.0, dtype=torch.bfloat16)
        for collective in COLLECTIVES:
            call, out = getattr(calls, collective)(x), result_of(collective)
            for _ in range(2):
                call(x, out).wait()

    run(RANKS, "network", all_calls, LONG)


# The tests.


@pytest.mark.parametrize("fault", ["raises", "killed", "stopped"])
def test_every_other_rank_gets_an_error_with_names(fault: str, tmp_path: Path) -> None:
    cases = [(name, stage, fault) for name, stage in itertools.product(COLLECTIVES, STAGES)]
    found = launch(__file__, "faults", cases, RANKS, tmp_path, 120)
    assert len(found) == len(cases)
    for case, results in found.items():
        own = results.pop(VICTIM)
        if fault == "raises":
            assert own["error"] == "out of luck", (case, own)
            assert "an earlier call has failed: UserError: out of luck" in own["again"], (case, own)
        else:
            assert own is None
        for result in results:
            name = json.loads(case)[0]
            text = (
                r"rank 1 gave up: UserError: out of luck"
                if fault == "raises"
                else r"ranks \[(0, )?1(, 2)?\] have not noticed"
            )
            assert re.search(rf"rank [02]: {name} #\d.*{text}", result["error"]), (case, result)
            assert "an earlier call has failed" in result["again"], (case, result)
            limit = STOPPED + 4 if fault == "stopped" else 10
            assert result["seconds"] < limit, (case, result)


def test_damage_is_told_when_the_next_call_is_refused(tmp_path: Path) -> None:
    found = launch(__file__, "damaged", ["all_gather", "all_to_all"], RANKS, tmp_path, 60)
    for case, (first, own, last) in found.items():
        assert "stage 'decode'" in own["errors"][0], (case, own)
        assert "(from rank 0)" in own["errors"][0], (case, own)
        assert len(own["errors"]) == 3, (case, own)
        for result in (first, last):
            assert len(result["errors"]) == 2, (case, result)
            assert "rank 1 gave up: rank 1: all_" in result["errors"][0], (case, result)
            assert "stage 'decode'" in result["errors"][0], (case, result)
            assert result["seconds"] < 10, (case, result)


if __name__ == "__main__":
    main(globals(), warm_up)
