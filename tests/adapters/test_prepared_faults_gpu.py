"""A rank that is killed or stops in a prepared call on a GPU: what the others get, and when.

This file is also what the processes run.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import tightwire as tw
from forked import launch, main
from prepared_ranks import befall, strike

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
pytest.importorskip("triton")
if not dist.is_available():
    pytest.skip("PyTorch was built without torch.distributed", allow_module_level=True)

from tightwire.adapters.collectives.prepared import PreparedCalls  # noqa: E402
from tightwire.adapters.transports.torch_dist import TorchDist  # noqa: E402

VICTIM = 1
#: When the victim is struck: in a call, or before a replay of a graph that holds one.
EAGER = ("before encode", "before network", "before decode")
STAGES = (*EAGER, "before replay")
#: By the number of ranks, collectives and stages; with more than two there are few.
STRUCK: dict[int, tuple[tuple[str, ...], tuple[str, ...]]] = {
    2: (("all_gather", "all_reduce"), STAGES),
    4: (("all_reduce",), ("before network", "before replay")),
}
#: Seconds that a rank waits for another by peers' memory, and those of the process group.
PEERS, GROUP = 4.0, 10.0
N = 300_000


# What the processes run.


def prepared(route: str, codec: str, rank: int, ranks: int, store: str) -> Any:
    """Calls of some GPUs."""
    # Without it a graph cannot hold NCCL's calls.
    os.environ["NCCL_GRAPH_REGISTER"] = "0"
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl",
        init_method=f"file://{store}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=GROUP),
        device_id=device,
    )
    peers = None
    if route == "peers":
        from tightwire.adapters.transports.symmetric import SymmetricMemory

        peers = SymmetricMemory(None, device, timeout=PEERS)
    return PreparedCalls(TorchDist(dist.group.WORLD, device), codec, peers=peers)


def captured(call: Any, x: Any, out: Any) -> Any:
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        call(x, out)
    return graph


def faults(case: list[Any], rank: int, store: str, report: Callable[[Any], None]) -> None:
    ranks, route, collective, stage, fault = case
    # A graph holds no messages that may not fit. The values are exact in either codec.
    lossy = route == "network" and stage == "before replay"
    calls = prepared(route, "mx" if lossy else "zipccl", rank, ranks, store)
    x = torch.full((N,), rank + 1.0, dtype=torch.bfloat16, device="cuda")
    size = ranks * N if collective == "all_gather" else N
    out = torch.full((size,), float("nan"), dtype=torch.bfloat16, device="cuda")
    call = getattr(calls, collective)(x)
    for _ in range(2):
        call(x, out).wait()
    graph = None
    if stage == "before replay":
        graph = captured(call, x, out)
        graph.replay()
        call.check()
    terms = {rank + 1.0 for rank in range(ranks)}
    assert set(out.tolist()) == (terms if collective == "all_gather" else {sum(terms)})
    torch.cuda.synchronize()
    if rank == VICTIM:
        if graph is not None:
            strike(fault)
        befall(call, stage, fault)
    start = time.monotonic()
    try:
        for _ in range(3):
            start = time.monotonic()
            if graph is not None:
                graph.replay()
                call.check()
            else:
                # Other memory each time, so that the call is not replayed.
                call(x.clone(), torch.empty_like(out)).wait()
    except tw.CollectiveError as error:
        seconds, again, works = time.monotonic() - start, "", True
        try:
            call(x, out)
        except tw.CollectiveError as later:
            again = str(later)
        if route == "peers":
            # The device goes on: no kernel waits for ever.
            torch.cuda.synchronize()
            works = bool((x + x == 2 * rank + 2).all())
        report({"error": str(error), "seconds": seconds, "again": again, "works": works})
    time.sleep(60)


# The test.


@pytest.mark.multi_gpu
@pytest.mark.parametrize("ranks", STRUCK)
@pytest.mark.parametrize("route", ["peers", "network"])
def test_the_other_ranks_get_an_error_in_time(route: str, ranks: int, tmp_path: Path) -> None:
    count = torch.cuda.device_count()
    if count < ranks:
        pytest.skip(f"needs {ranks} GPUs; found: {count}")
    struck = itertools.product(*STRUCK[ranks], ("killed", "stopped"))
    cases = [(ranks, route, *case) for case in struck]
    found = launch(__file__, "faults", cases, ranks, tmp_path, 200, "default")
    assert len(found) == len(cases)
    text = "rank 1 did not come" if route == "peers" else "nothing arrived|have left|not noticed"
    for case, results in found.items():
        collective = json.loads(case)[2]
        assert results[VICTIM] is None, (case, results)
        for rank, result in enumerate(results):
            if rank == VICTIM:
                continue
            assert result is not None, (case, rank)
            wanted = rf"rank {rank}: {collective} #\d.*({text})"
            # Texts of NCCL have several lines.
            assert re.search(wanted, result["error"], re.DOTALL), (case, result)
            assert result["seconds"] < (PEERS + 2 if route == "peers" else GROUP), (case, result)
            assert "an earlier call has failed" in result["again"], (case, result)
            assert result["works"], (case, result)


if __name__ == "__main__":
    main(globals(), lambda: None, at_a_time=8)
