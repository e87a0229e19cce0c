"""Ranks of a weight transfer that are killed, at any message, in real processes over gloo.

This file is also what the processes run.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import tightwire as tw
from forked import launch, main

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("PyTorch was built without gloo", allow_module_level=True)

from tightwire.adapters.transports.torch_dist import TorchDist  # noqa: E402

RANKS = 3
#: Seconds that ranks wait for one that says nothing. One that is killed is noticed at once.
PATIENCE = 20.0
#: (who, what it is killed in, how often it did that before). A round over gloo gathers at its
#: start, announces, gathers again, sends two arrays for each message, and gathers at its end.
CASES = [
    ("publisher", "broadcast", 0),
    ("publisher", "broadcast", 1),
    ("publisher", "broadcast", 4),
    ("publisher", "all_gather", 2),
    ("worker", "all_gather", 0),
    ("worker", "all_gather", 1),
    ("worker", "broadcast", 3),
    ("worker", "all_gather", 2),
]


# What the processes run.


def weights(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {f"w{i}": torch.randn(120, 100, generator=generator).bfloat16() for i in range(4)}


def digest(tensors: dict[str, Any]) -> str:
    found = hashlib.sha256()
    for name, x in tensors.items():
        found.update(name.encode() + x.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def killing(transport: TorchDist, what: str, before: int) -> None:
    """Have this process killed in a call of the transport."""
    call, count = getattr(transport, what), [0]

    def killed(*args: Any) -> None:
        count[0] += 1
        if count[0] > before:
            os.kill(os.getpid(), signal.SIGKILL)
        call(*args)

    setattr(transport, what, killed)


def task(case: list[Any], rank: int, store: str, report: Callable[[Any], None]) -> None:
    who, what, before = case
    seconds = timedelta(seconds=PATIENCE)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS, timeout=seconds
    )
    victim = 0 if who == "publisher" else RANKS - 1
    transport = TorchDist.new_group(timeout=PATIENCE)
    # Groups are made while all are there.
    left = dist.new_group([r for r in range(RANKS) if r != victim], timeout=seconds)
    mine = weights(rank)
    side: Any = None
    if rank == 0:
        side = tw.publish(mine, transport, bucket_nbytes=1 << 14)
        side.send()
        mine["w1"].view(-1)[::50] += 1
        mine["w3"].view(-1)[::70] += 1
    else:
        side = tw.subscribe(mine, transport)
        side.update()
    first = digest(mine)
    dist.barrier()
    if rank == victim:
        killing(transport, what, before)
    try:
        found = side.send() if rank == 0 else side.receive()
        error = f"none, but {found}"
    except tw.CollectiveError as failure:
        error = str(failure)
    kept = digest(mine) == first
    # Those that are left go on, from the first of them.
    if rank == (1 if victim == 0 else 0):
        version = tw.publish(mine, TorchDist(left)).send()
    else:
        version = tw.subscribe(mine, TorchDist(left)).update()
    report({"error": error, "kept": kept, "version": version, "digest": digest(mine)})


def warm_up() -> None:
    """Compile before the processes are forked."""
    for x in weights(0).values():
        for codec, given in (("zipccl", {}), ("delta", {"base": x})):
            for backend in ("cpu", None):
                y = x.clone()
                y.view(-1)[::50] += 1
                buffer = tw.encode(y, codec, backend=backend, **given)
                assert torch.equal(tw.decode(bytes(buffer), like=x, backend=backend, **given), y)


@pytest.mark.slow
def test_a_killed_rank_leaves_the_others_whole(tmp_path: Path) -> None:
    found = launch(__file__, "task", CASES, RANKS, tmp_path, 200)
    assert len(found) == len(CASES)
    for text, results in found.items():
        who, _, _ = json.loads(text)
        victim = 0 if who == "publisher" else RANKS - 1
        assert results.pop(victim) is None, text
        for result in results:
            assert result is not None, text
            assert "unexpected" not in result, (text, result)
            assert "Make a new transport of the ranks that are left" in result["error"], text
            assert result["kept"], (text, result)
            assert result["version"] == 0, (text, result)
        assert results[0]["digest"] == results[1]["digest"], text


if __name__ == "__main__":
    main(globals(), warm_up, at_a_time=2)
