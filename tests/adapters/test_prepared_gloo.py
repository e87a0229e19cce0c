"""Prepared calls on tensors between real processes, and measured messages: also what they run."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tightwire as tw
from prepared_ranks import check_tensors
from processes import join, launch

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("PyTorch was built without gloo", allow_module_level=True)

from tightwire.adapters.collectives import measuring  # noqa: E402
from tightwire.adapters.collectives.agreement import gather_apart  # noqa: E402
from tightwire.adapters.collectives.prepared import PreparedCalls  # noqa: E402
from tightwire.adapters.transports.torch_dist import TorchDist  # noqa: E402


def tensor(rank: int, n: int, dtype: Any = torch.bfloat16, wild: bool = False) -> Any:
    generator = torch.Generator().manual_seed(100 * rank + n % 97)
    if wild:
        bits = torch.randint(0, 1 << 15, (n,), generator=generator)
        return bits.to(torch.int16).view(torch.bfloat16)
    return (torch.randn(n, generator=generator) * 0.02).to(dtype)


def same(x: Any, y: Any) -> bool:
    return bool(torch.equal(x.view(torch.uint8), y.view(torch.uint8)))


def broadcasts(calls: PreparedCalls) -> None:
    """Also of values that do not fit, for which all ranks make the call again."""
    n, root = 70_001, calls.world_size - 1
    spread = calls.broadcast(tensor(0, n), root=root)
    for wild in (False, True, False):
        sent = tensor(root, n, wild=wild)
        x = sent.clone() if calls.rank == root else torch.full_like(sent, float("nan"))
        work = spread(x)
        work.wait()
        assert same(x, sent)
        assert work.repeated == wild


def lists(calls: PreparedCalls) -> None:
    """Tensors of three dtypes at once; of the second call one does not fit."""
    sizes = ((6000, torch.bfloat16), (5000, torch.float32), (7, torch.int64), (1, torch.bfloat16))

    def given(rank: int, wild: bool) -> list[Any]:
        xs = [tensor(rank, n, dtype) for n, dtype in sizes]
        return [tensor(rank, 6000, wild=True), *xs[1:]] if wild else xs

    gather = calls.all_gather(given(0, False))
    for k in range(3):
        outs = [torch.zeros(calls.world_size * n, dtype=dtype) for n, dtype in sizes]
        gather(given(calls.rank, k == 1), outs).wait()
        for i, out in enumerate(outs):
            parts = [given(rank, k == 1)[i] for rank in range(calls.world_size)]
            assert same(out, torch.cat(parts))


def narrow(calls: PreparedCalls) -> list[float]:
    """float32 travels as bfloat16: the same sums on all ranks, in about half of the bytes."""
    n, found = 30_000, []
    xs = [tensor(rank, n, torch.float32) for rank in range(calls.world_size)]
    exact = torch.stack(xs).double().sum(0)
    for algorithm in ("one-shot", "two-shot"):
        reduce = calls.all_reduce(xs[0], wire="bfloat16", algorithm=algorithm)
        out = torch.full_like(xs[0], float("nan"))
        work = reduce(xs[calls.rank], out)
        work.wait()
        assert work.wire_bytes < 0.5 * work.raw_bytes
        assert tw.error(exact.numpy(), out.double().numpy()).vnmse < 1e-4
        found += [float(out.double().sum()), float(out.double().square().sum())]
    return found


def messages(transport: TorchDist) -> None:
    """Large messages are timed by both ranks, which take the same path."""
    measuring._MESSAGES_HOST = (1 << 18, 1 << 20)
    comm = tw.Communicator(transport, algorithm="auto")
    x, out = tensor(0, 1 << 20), torch.zeros(1 << 20, dtype=torch.bfloat16)
    for _ in range(2):
        if comm.rank == 0:
            comm.send(x, 1)
        elif comm.rank == 1:
            comm.recv(out, 0)
            assert same(out, x)
    width = 1000 * (1 + comm.rank)
    sent = tensor(comm.rank, width * comm.world_size)
    counts = [1000 * (1 + rank) for rank in range(comm.world_size)]
    received = comm.all_to_all(sent, send_splits=[width] * comm.world_size, receive_splits=counts)
    mine = comm.rank
    parts = [
        tensor(r, n * comm.world_size)[mine * n : (mine + 1) * n] for r, n in enumerate(counts)
    ]
    assert same(received, torch.cat(parts))
    reasons = [record.reason for record in comm.trace()]
    assert all("native" in reason for reason in reasons)


def everything(device: Any) -> list[float]:
    """All of it on one rank."""
    calls = PreparedCalls(TorchDist(dist.new_group()))
    broadcasts(calls)
    lists(calls)
    lists(PreparedCalls(TorchDist(dist.new_group()), sizes="exact"))
    assert check_tensors(TorchDist(dist.new_group()), device, "zipccl") > 0
    assert check_tensors(TorchDist(dist.new_group()), device, "mx") == 0
    found = narrow(calls)
    messages(TorchDist(dist.new_group()))
    return found


def one_prepares(codec: str) -> str:
    """The error of a rank that prepares another call, or makes one that all have prepared."""
    transport = TorchDist(dist.new_group(timeout=timedelta(seconds=2)))
    calls = PreparedCalls(transport, codec)
    x = tensor(0, 3000)
    reduce, out = calls.all_reduce(x), torch.zeros_like(x)
    reduce(x, out).wait()
    with pytest.raises(tw.CollectiveError) as error:
        if calls.rank == 1:
            calls.all_reduce(tensor(0, 9000))
        else:
            reduce(x, out).wait()
    return str(error.value)


def apart(device: Any) -> list[str]:
    """What ranks agree by is told from what calls move."""
    transport = TorchDist(dist.new_group())
    mine = np.full(16, transport.rank, np.uint8)
    rows = gather_apart(transport, mine)
    assert rows.tolist() == [[rank] * 16 for rank in range(transport.world_size)]
    return [one_prepares("mx"), one_prepares("zipccl")]


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_that_prepares_another_call_ends_no_process(world_size: int, tmp_path: Path) -> None:
    for rank, errors in enumerate(launch(__file__, "apart", world_size, tmp_path)):
        name, stage = ("prepare ", "agree") if rank == 1 else ("", "exchange")
        for error in errors:
            assert f"rank {rank}: {name}all_reduce #" in error
            assert f"failed in stage '{stage}'" in error


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
def test_between_processes(world_size: int, tmp_path: Path) -> None:
    first, *others = launch(__file__, "everything", world_size, tmp_path)
    assert all(other == first for other in others)


if __name__ == "__main__":
    join(globals(), sys.argv[1:])
