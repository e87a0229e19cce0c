"""The collectives over gloo, between real processes: this file is also what they run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tightwire as tw
from ranks import DESIGNS, DTYPES, SOME_DTYPES, check_collectives
from tightwire.arrays import Target
from transports import check_transport

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("PyTorch was built without gloo", allow_module_level=True)

from tightwire.adapters.collectives import pipelined  # noqa: E402
from tightwire.adapters.transports.torch_dist import TorchDist  # noqa: E402

#: In seconds, of the group whose last rank does not come.
TIMEOUT = 2.0
#: In seconds, of the default group whose last rank is stopped.
PATIENCE = 10.0


def launch(task: str, world_size: int, tmp_path: Path) -> list[Any]:
    """What `task` returns on every rank but the last, which is killed when the others are done."""
    path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    processes = []
    try:
        for rank in range(world_size):
            words = [task, str(rank), str(world_size), str(tmp_path / "store")]
            process = subprocess.Popen(
                [sys.executable, "-W", "error", __file__, *words],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            processes.append(process)
        deadline = time.monotonic() + 240
        told = [
            process.communicate(timeout=max(0.1, deadline - time.monotonic()))
            for process in processes[:-1]
        ]
        codes = [process.returncode for process in processes[:-1]]
        assert not any(codes), "\n".join(f"rank {rank}: {e}" for rank, (_, e) in enumerate(told))
        return [json.loads(out) for out, _ in told]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def every_collective(transport: TorchDist, dtypes: tuple[str, ...]) -> list[list[int]]:
    """All checks over the whole group; raw and wire bytes of some calls."""
    transport.barrier()
    n, me = transport.world_size, transport.rank
    for library in ("numpy", "torch"):
        check_transport(transport, Target(library))
    for i, dtype in enumerate(dtypes):
        check_collectives(transport, ("torch", "numpy")[i % 2], dtype, DESIGNS[i % 2], 2, 641)
    check_collectives(transport, "torch", "bfloat16", "between", 2, 300)
    pipelined._PIECE = 4096
    for algorithm in ("native", "pipelined", "auto"):
        check_collectives(transport, "torch", "bfloat16", "first", 7, 1237, algorithm)
    for op, wanted in (("sum", n * (n - 1) // 2), ("max", n - 1), ("or", n - 1)):
        x = np.array([me], np.int64)
        transport.all_reduce(x, op)  # type: ignore[arg-type]
        assert x[0] == wanted
    with pytest.raises(tw.CollectiveError, match=r"ranks \[0\]: .*ranks \[1"):
        tw.Communicator(transport, "raw" if me == 0 else "zipccl")
    comm = tw.Communicator(transport)
    with pytest.raises(tw.CollectiveError, match=r"ranks \[.*\] make another call"):
        comm.all_gather(torch.zeros((4, 2) if me == 0 else (2, 4)))
    # Two ranks are a group of their own, in which they have other numbers.
    group = dist.new_group([0, n - 1])
    if me in (0, n - 1):
        check_collectives(TorchDist(group), "torch", "bfloat16", "first", 1, 300)
    else:
        with pytest.raises(ValueError, match="not in it"):
            TorchDist(group)
    comm = tw.Communicator(transport)
    weights = torch.randn(n * 30_000, generator=torch.Generator().manual_seed(me)) * 0.02
    weights = weights.bfloat16().requires_grad_()
    for call in (comm.all_gather, comm.all_to_all, comm.reduce_scatter, comm.all_reduce):
        call(weights)
    return [[r.raw_bytes, r.wire_bytes] for r in comm.trace()]


def survive(transport: TorchDist, leave: Any, codec: str = "zipccl") -> list[Any]:
    """The last rank leaves between two calls; what the others say of it, and after how long."""
    comm = tw.Communicator(transport, codec)
    x = torch.ones(100_000, dtype=torch.bfloat16)
    comm.all_reduce(x)
    if comm.rank == comm.world_size - 1:
        leave()
    start = time.monotonic()
    with pytest.raises(tw.CollectiveError) as caught:
        comm.all_reduce(x)
    took = time.monotonic() - start
    with pytest.raises(tw.CollectiveError, match="an earlier call has failed"):
        comm.all_reduce(x)
    error = caught.value
    return [error.rank, error.collective, error.sequence, error.stage, took, str(error)]


def two_ranks(transport: TorchDist) -> dict[str, Any]:
    """The checks; then the last rank does not come, and only the timeout tells."""
    calls = every_collective(transport, DTYPES)
    patient = TorchDist(dist.new_group([0, 1], timeout=timedelta(seconds=TIMEOUT)))
    assert patient.timeout == TIMEOUT
    return {"calls": calls, "error": survive(patient, lambda: time.sleep(100))}


def four_ranks(transport: TorchDist) -> dict[str, Any]:
    """The checks; then the last rank is killed."""
    calls = every_collective(transport, SOME_DTYPES)
    return {
        "calls": calls,
        "error": survive(transport, lambda: os.kill(os.getpid(), signal.SIGKILL)),
    }


def stopped(transport: TorchDist) -> dict[str, Any]:
    """Timeouts of groups; then the last rank is stopped, of a group that was given none."""

    def seconds(group: Any, timeout: float | None = None) -> list[float]:
        """The timeout of the transport, and what PyTorch then has for the group."""
        found = TorchDist(group, timeout=timeout).timeout
        return [found, group._get_backend(torch.device("cpu")).options._timeout.total_seconds()]

    transport.barrier()
    # As of init_process_group(timeout=...), in which processes have time to start.
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=PATIENCE))
    assert seconds(dist.new_group()) == [PATIENCE] * 2
    assert seconds(dist.new_group(timeout=timedelta(seconds=20))) == [20, 20]
    assert seconds(dist.new_group(timeout=timedelta(seconds=20)), 30) == [30, 30]
    assert seconds(dist.group.WORLD) == [PATIENCE] * 2
    with pytest.raises(ValueError, match=r"timeout is 0; allowed: seconds above 0"):
        TorchDist(timeout=0)
    # It is kept: other ranks may still connect.
    first = TorchDist.new_group()
    assert first.timeout == PATIENCE
    own = TorchDist.new_group(timeout=40)
    assert own.timeout == 40
    assert (own.rank, own.world_size) == (transport.rank, transport.world_size)
    check_transport(own, Target("torch"))
    own.close()
    own.close()
    with pytest.raises(RuntimeError, match="the transport is closed"):
        own.barrier()
    fresh = TorchDist(dist.new_group())
    return {"error": survive(fresh, lambda: os.kill(os.getpid(), signal.SIGSTOP), "raw")}


@pytest.mark.slow
def test_a_stopped_rank_is_named_within_the_default_groups_timeout(tmp_path: Path) -> None:
    for me, found in enumerate(launch("stopped", 3, tmp_path)):
        rank, _, _, _, took, text = found["error"]
        assert rank == me
        assert "ranks [2] have not noticed: stopped, gone, or not in this call" in text
        assert took < PATIENCE + 10


@pytest.mark.slow
@pytest.mark.parametrize("task", ["two_ranks", "four_ranks"])
def test_every_collective_and_a_lost_rank(task: str, tmp_path: Path) -> None:
    for me, found in enumerate(launch(task, {"two_ranks": 2, "four_ranks": 4}[task], tmp_path)):
        assert len(found["calls"]) == 4
        for raw, wire in found["calls"]:
            assert raw > 0
            assert wire < 0.74 * raw
        rank, collective, sequence, stage, took, text = found["error"]
        last = {"two_ranks": 1, "four_ranks": 3}[task]
        assert f"ranks [{last}] have not noticed" in text
        assert (rank, collective, sequence) == (me, "all_reduce", 1)
        assert stage in ("sizes", "payload", "static", "dynamic")
        assert took < TIMEOUT + 10


def main(task: str, rank: str, world_size: str, store: str) -> None:
    """Join the group, run the task, print what it returns."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=int(rank),
        world_size=int(world_size),
        timeout=timedelta(seconds=60),
    )
    result = globals()[task](TorchDist())
    sys.stdout.write(json.dumps(result))
    sys.stdout.flush()
    # No tidy end: some tasks leave the group in pieces.
    os._exit(0)


@pytest.mark.slow
def test_the_process_waits_for_groups_that_are_being_ended(tmp_path: Path) -> None:
    """A thread that is within NCCL when the interpreter goes would abort the process."""
    program = """
import sys, time
from pathlib import Path
from tightwire.adapters.transports import torch_dist

class Group:
    def name(self):
        return "nccl"

    def shutdown(self):
        time.sleep(0.5)
        Path(sys.argv[1]).write_text("ended")

torch_dist._note_exit()
torch_dist._end(Group())
"""
    subprocess.run([sys.executable, "-c", program, tmp_path / "x"], check=True, timeout=120)
    assert (tmp_path / "x").read_text() == "ended"


if __name__ == "__main__":
    main(*sys.argv[1:])
