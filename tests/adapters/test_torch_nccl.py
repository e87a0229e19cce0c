"""The collectives over NCCL, one process for each GPU: this file is also what they run."""

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

import pytest

import tightwire as tw
from prepared_ranks import check_tensors
from ranks import DESIGNS, DTYPES, Ranks, check_collectives, exact

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
pytestmark = [
    pytest.mark.multi_gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

from tightwire.adapters.collectives import pipelined  # noqa: E402
from tightwire.adapters.training.sketches import Sketches, State, Tagc  # noqa: E402
from tightwire.adapters.transports.torch_dist import TorchDist  # noqa: E402
from tightwire.formats.dtypes import BY_NAME  # noqa: E402
from tightwire.sparsify import sparsify_rows  # noqa: E402

#: In seconds, of the group whose last rank is killed.
TIMEOUT = 6.0
LINKS: dict[str, dict[str, str]] = {
    "nvlink": {},
    "p2p off": {"NCCL_P2P_DISABLE": "1"},
    "sockets": {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1"},
}


def launch(task: str, world_size: int, tmp_path: Path, settings: dict[str, str]) -> list[Any]:
    """What `task` returns on every rank but the last, which may have been killed."""
    path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "2"} | settings
    processes = []
    try:
        for rank in range(world_size):
            words = [task, str(rank), str(world_size), str(tmp_path / "store")]
            process = subprocess.Popen(
                [sys.executable, __file__, *words],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            processes.append(process)
        deadline = time.monotonic() + 240
        results = []
        for rank, process in enumerate(processes[:-1]):
            out, errors = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
            assert process.returncode == 0, f"rank {rank}: {errors[-4000:]}"
            results.append(json.loads(out))
        return results
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def every_collective(transport: TorchDist) -> list[list[int]]:
    """All checks over the whole group; raw and wire bytes of some calls."""
    place = torch.device("cuda", transport.rank)
    for i, dtype in enumerate(DTYPES):
        check_collectives(transport, "torch", dtype, DESIGNS[i % 2], device=place)
    check_collectives(transport, "torch", "bfloat16", "between", 2, 300, device=place)
    check_collectives(transport, "cupy", "bfloat16", "first", 2, 300, device=place.index)
    pipelined._PIECE = 4096
    for algorithm in ("pipelined", "native", "auto"):
        check_collectives(
            transport, "torch", "bfloat16", "first", 11, 1237, algorithm, device=place
        )
    n, me = transport.world_size, transport.rank
    with pytest.raises(tw.CollectiveError, match=r"ranks \[0\]: .*ranks \[1"):
        tw.Communicator(transport, "raw" if me == 0 else "zipccl")
    comm = tw.Communicator(transport)
    with pytest.raises(tw.CollectiveError, match=r"ranks \[.*\] make another call"):
        comm.all_gather(torch.zeros((4, 2) if me == 0 else (2, 4), device="cuda"))
    damage(transport)
    native_damage()
    native_messages()
    comm = tw.Communicator(transport)
    weights = Ranks(1, "torch", "bfloat16", place).array(0, (n * 30_000,))
    for call in (comm.all_gather, comm.all_to_all, comm.reduce_scatter, comm.all_reduce):
        call(weights)
    comm.check()
    return [[r.raw_bytes, r.wire_bytes] for r in comm.trace()]


class Damaging(TorchDist):
    """Flips a bit in the first static part that comes."""

    armed = False

    def all_gather(self, out: Any, x: Any) -> None:
        super().all_gather(out, x)
        if self.armed and x.shape[0] > 1000:
            out[x.shape[0] + 77] ^= 4
            self.armed = False


def damage(transport: TorchDist) -> None:
    """A flipped bit is raised at the end of a later call or by `check`; ranks stay in step."""
    place = torch.device("cuda", transport.rank)
    damaging = Damaging(dist.new_group())
    data = Ranks(transport.world_size, "torch", "bfloat16", place)
    for verify in (False, True):
        comm = tw.Communicator(damaging, verify=verify)
        x = data.array(transport.rank, (50_000,))
        damaging.armed = True
        with pytest.raises(tw.CollectiveError, match="checksum_mismatch") as caught:
            comm.all_gather(x)
            comm.check()
        assert (caught.value.stage, caught.value.sequence) == ("decode", 0)
        gathered = comm.all_gather(x)
        comm.check()
        exact(gathered[-50_000:], data.host(transport.world_size - 1, (50_000,)))


def native_damage() -> None:
    """With digests a flipped bit of one rank is raised on all of them, late."""
    damaging = Damaging(dist.new_group())
    comm = tw.Communicator(damaging, algorithm="native", verify="digest")
    x = torch.ones(50_000, device="cuda")
    comm.all_gather(x)
    comm.check()
    damaging.armed = comm.rank == 0
    with pytest.raises(tw.CollectiveError, match=r"ranks \[0\] got other bytes than were sent"):
        comm.all_gather(x)
        comm.check()


def native_messages() -> None:
    """Of another dtype: the receiver raises, late or at once; of this one: they come."""
    for verify in (False, "digest"):
        comm = tw.Communicator(TorchDist(dist.new_group()), algorithm="native", verify=verify)
        x = torch.arange(1000, dtype=torch.float32, device="cuda")
        if comm.rank == 0:
            comm.send(x, 1)
            comm.send(x, 1)
        elif comm.rank == 1:
            assert torch.equal(comm.recv(torch.empty_like(x), 0), x)
            comm.check()
            wrong = torch.empty(1000, dtype=torch.int32, device="cuda")
            with pytest.raises(tw.CollectiveError, match=r"rank 0: float32 \(1000,\) send"):
                comm.recv(wrong, 0)
                comm.check()
    dist.barrier()


def killed(transport: TorchDist) -> list[Any]:
    """The last rank is killed between two calls; what the others say of it, and after how long."""
    comm = tw.Communicator(TorchDist(dist.new_group(timeout=timedelta(seconds=TIMEOUT))))
    x = torch.ones(100_000, dtype=torch.bfloat16, device="cuda")
    comm.all_reduce(x)
    torch.cuda.synchronize()
    transport.barrier()
    torch.cuda.synchronize()
    if comm.rank == comm.world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(tw.CollectiveError) as caught:
        comm.all_reduce(x)
    took = time.monotonic() - start
    error = caught.value
    return [error.rank, error.collective, error.sequence, error.stage, took]


def finishes(transport: TorchDist) -> dict[str, Any]:
    """The checks, and what becomes of a group whose last rank is killed."""
    calls = every_collective(transport)
    return {"calls": calls, "error": killed(transport)}


@pytest.mark.parametrize("link", LINKS)
def test_every_collective_and_a_lost_rank(link: str, tmp_path: Path) -> None:
    world_size = min(torch.cuda.device_count(), 4)
    for me, found in enumerate(launch("finishes", world_size, tmp_path, LINKS[link])):
        assert len(found["calls"]) == 4
        for raw, wire in found["calls"]:
            assert raw > 0
            assert wire < 0.74 * raw
        rank, collective, sequence, stage, took = found["error"]
        assert (rank, collective, sequence) == (me, "all_reduce", 1)
        assert stage in ("sizes", "static", "dynamic")
        assert took < TIMEOUT + 5


def sketched(transport: TorchDist) -> list[int]:
    """Sums by sketch, compared with those of what is selected on the host; what damage does."""
    ranks, me, m = transport.world_size, transport.rank, (1 << 18) + 3
    found = []
    for dtype, index in ((torch.float32, "or"), (torch.bfloat16, "4bit")):
        tagc, state = Tagc(ratio=4, index=index), State()
        comm = tw.Communicator(TorchDist(dist.new_group()))
        sums, residual = Sketches(comm, tagc, state), torch.zeros(ranks, ranks, m)
        cells = BY_NAME[str(dtype).removeprefix("torch.")]
        for step in range(2):
            xs = torch.randn(ranks, ranks, m, generator=torch.Generator().manual_seed(step))
            xs = xs.to(dtype)
            corrected = xs.float() + residual
            theta = tagc.share_zeroed(ranks)
            sent = torch.stack([sparsify_rows(rows, theta, cells)[0] for rows in corrected])
            residual = corrected - sent
            total = torch.zeros(ranks, m)
            for part in sent:
                total += part
            total = total.to(dtype).float()
            (result,) = sums.sums([("w", xs[me].cuda())], everywhere=step == 1)
            assert torch.equal(result.cpu(), total if step else total[me])
            assert torch.equal(state.residuals.residual("w").cpu(), residual[me].view(-1))
        report = state.reports[-1]
        assert (report.estimated, report.kept) == (0, int(torch.count_nonzero(sent[me])))
        found.append(report.diagnosis.rounds if report.diagnosis else 0)
    damaging = Damaging(dist.new_group())
    sums = Sketches(tw.Communicator(damaging), Tagc(ratio=4), State())
    damaging.armed = True
    with pytest.raises(tw.CollectiveError, match="'index': data from rank 1 are damaged"):
        sums.sums([("w", xs[me].float().cuda())])
    return found


@pytest.mark.parametrize("link", ["nvlink", "p2p off"])
def test_sums_by_sketch(link: str, tmp_path: Path) -> None:
    world_size = min(torch.cuda.device_count(), 4)
    for rounds in launch("sketched", world_size, tmp_path, LINKS[link]):
        assert min(rounds) > 3


def prepared(transport: TorchDist) -> list[int]:
    """Every prepared collective, of one tensor and of lists; how many calls were made again."""
    device = torch.device("cuda", transport.rank)
    found = [check_tensors(transport, device, codec) for codec in ("zipccl", "mx")]
    # Also the last rank, whose result nobody reads, has come so far.
    dist.barrier()
    torch.cuda.synchronize()
    return found


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("link", ["p2p off", "sockets"])
def test_prepared_calls(link: str, world_size: int, tmp_path: Path) -> None:
    count = torch.cuda.device_count()
    if count < world_size:
        pytest.skip(f"needs {world_size} GPUs; found: {count}")
    for lossless, lossy in launch("prepared", world_size, tmp_path, LINKS[link]):
        assert lossless > 0
        assert lossy == 0


def main(task: str, rank: str, world_size: str, store: str) -> None:
    """Join the group, run the task, print what it returns."""
    torch.cuda.set_device(int(rank))
    dist.init_process_group(
        "nccl",
        init_method=f"file://{store}",
        rank=int(rank),
        world_size=int(world_size),
        timeout=timedelta(seconds=60),
        device_id=torch.device("cuda", int(rank)),
    )
    result = globals()[task](TorchDist())
    sys.stdout.write(json.dumps(result))
    sys.stdout.flush()
    # No tidy end: the group is in pieces.
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
