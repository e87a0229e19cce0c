"""Prepared calls on the GPUs of a host: out of peers' memory, over NCCL, eager and in graphs."""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import tightwire as tw
from processes import join, launch

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
pytest.importorskip("triton")
if not dist.is_available():
    pytest.skip("PyTorch was built without torch.distributed", allow_module_level=True)

from tightwire.adapters.collectives import prepared_sums  # noqa: E402
from tightwire.adapters.collectives.prepared import PreparedCalls  # noqa: E402
from tightwire.adapters.transports.torch_dist import TorchDist  # noqa: E402

# Without it calls over NCCL are not recorded.
os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
CODECS = ("zipccl", "mx", "taco", "nvfp4", "raw")
ROUTES = ("peers", "network")
COUNTS = (1, 4099, 1 << 20)
#: Of pieces here, so that small sums are made in some.
PIECE_NBYTES = 64 << 10
#: What a task tries one after the other.
DONE = {
    "everything": 2 * len(CODECS),
    "graphs": len(CODECS),
    "recorded": 4,
    "in_parts": 2,
    "overlapping": 4,
    "in_order": 1,
}
#: The same in fewer cases, for more ranks: a single run of processes does all of it.
QUICK = {"everything": 4, "graphs": 2, "recorded": 2, "in_parts": 1, "overlapping": 2}
CASES = [(2, task) for task in (*DONE, "late")] + [(4, "quick"), (4, "late")]


def some(codecs: Sequence[str], most: int) -> Sequence[str]:
    """All of these between two ranks, the first ones between more."""
    return codecs if dist.get_world_size() == 2 else codecs[:most]


def make(device: Any, route: str, *, whole: bool = True, **options: Any) -> PreparedCalls:
    """Calls of all ranks; without `whole` graphs of recorded calls hold none of NCCL's."""
    from tightwire.adapters.transports.symmetric import SymmetricMemory

    peers = SymmetricMemory(None, device, timeout=60) if route == "peers" else None
    transport = TorchDist(dist.group.WORLD, device)
    transport.capturable = transport.capturable and whole
    return PreparedCalls(transport, peers=peers, **options)


def tensor(device: Any, n: int, call: int = 0, wild: bool = False) -> Any:
    generator = torch.Generator(device).manual_seed(1000 * dist.get_rank() + call)
    if wild:
        bits = torch.randint(0, 1 << 15, (n,), device=device, generator=generator)
        return bits.to(torch.int16).view(torch.bfloat16)
    return (torch.randn(n, device=device, generator=generator) * 0.02).bfloat16()


def same(x: Any, y: Any) -> bool:
    return bool(torch.equal(x.view(torch.int16), y.view(torch.int16)))


def gathered(x: Any) -> list[Any]:
    found = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(found, x)
    return found


def summed(parts: list[Any]) -> Any:
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total


def near(x: Any, y: Any, codec: str) -> bool:
    """The same bits, of NaN any, or with a lossy codec close to that."""
    if codec in ("zipccl", "raw"):
        return same(x.masked_fill(x.isnan(), 0), y.masked_fill(y.isnan(), 0)) and bool(
            torch.equal(x.isnan(), y.isnan())
        )
    error = (x.float() - y.float()).square().sum() / y.float().square().sum().clamp(min=1e-30)
    return bool(error < 0.05)


def everything(device: Any) -> list[str]:
    """Every collective, codec, route and size, several calls, some of data that do not compress."""
    done = []
    rank, world = dist.get_rank(), dist.get_world_size()
    # The process is this test's alone.
    prepared_sums.PIECE_NBYTES = PIECE_NBYTES
    for route in ROUTES:
        for codec in some(CODECS, 2):
            calls = make(device, route, codec=codec)
            for n in COUNTS:
                whole = world * n
                gather = calls.all_gather(tensor(device, n))
                swap = calls.all_to_all(tensor(device, whole))
                scatter = calls.reduce_scatter(tensor(device, whole), scale=0.5)
                ones = calls.all_reduce(tensor(device, n), algorithm="one-shot")
                # Tensors of a few elements are stored raw, whatever the codec.
                stored = calls.codec.plan((n,), "bfloat16").codec.name
                quick = route == "peers" and stored in ("mx", "taco", "raw")
                assert isinstance(ones, prepared_sums.OneLaunch) == quick, f"{route} {codec} {n}"
                twos = calls.all_reduce(tensor(device, n), algorithm="two-shot")
                spread = calls.broadcast(tensor(device, n), root=world - 1)
                listed = calls.all_gather([tensor(device, n), tensor(device, 77)])
                for k in range(5):
                    wild = codec in ("zipccl", "raw") and k in (1, 3) and rank == 0
                    x, big = tensor(device, n, k, wild), tensor(device, whole, k, wild)
                    parts, bigs = gathered(x), gathered(big)
                    mine = slice(rank * n, (rank + 1) * n)
                    swapped = torch.cat([part[mine] for part in bigs])
                    cases = (
                        (gather, x, torch.cat(parts)),
                        (swap, big, swapped),
                        (scatter, big, (summed([p[mine] for p in bigs]) * 0.5).bfloat16()),
                        (ones, x, summed(parts).bfloat16()),
                        (twos, x, summed(parts).bfloat16()),
                    )
                    for call, given, wanted in cases:
                        out = torch.full_like(wanted, float("nan"))
                        call(given, out).wait()
                        text = f"{route} {codec} {call.collective} {n} call {k}"
                        assert near(out, wanted, codec), text
                        if call.collective in ("all_gather", "all_reduce"):
                            assert all(same(out, other) for other in gathered(out)), text
                    text = f"{route} {codec} {n} call {k}"
                    copy = x.clone()
                    spread(copy).wait()
                    assert near(copy, parts[-1], codec), f"broadcast {text}"
                    assert all(same(copy, other) for other in gathered(copy)), text
                    short = tensor(device, 77, k)
                    outs = [torch.full_like(torch.cat(gathered(t)), torch.nan) for t in (x, short)]
                    listed([x, short], outs).wait()
                    for out, one in zip(outs, (x, short), strict=True):
                        assert near(out, torch.cat(gathered(one)), codec), f"list {text}"
            done.append(f"{route} {codec}")
    return done


def graphs(device: Any) -> list[str]:
    """Calls out of peers' memory are captured, and replayed with other data."""
    done = []
    for codec in some(CODECS, 2):
        calls = make(device, "peers", codec=codec)
        x = tensor(device, 1 << 18)
        out = torch.empty(dist.get_world_size() * (1 << 18), dtype=x.dtype, device=device)
        total, one_total = torch.empty_like(x), torch.empty_like(x)
        gather = calls.all_gather(x)
        reduce = calls.all_reduce(x, algorithm="two-shot")
        one = calls.all_reduce(x, algorithm="one-shot")
        works = []
        for _ in range(3):
            gather(x, out).wait()
            reduce(x, total).wait()
            works.append(one(x, one_total))
        refused = torch.cuda.CUDAGraph()
        with torch.cuda.graph(refused), pytest.raises(ValueError, match="not been waited for"):
            one(x, one_total)
        for work in works:
            work.wait()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            gather(x, out)
            reduce(x, total)
            one(x, one_total)
        other, whole = calls.all_gather(x), torch.empty_like(out)
        for k in range(3):
            x.copy_(tensor(device, 1 << 18, k))
            for result in (out, total, one_total):
                result.fill_(float("nan"))
            # Calls before a replay use the same memory, and nobody waits for them.
            works = [other(x, whole) for _ in range(calls.depth)]
            graph.replay()
            for work in works:
                work.wait()
            assert near(whole, torch.cat(gathered(x)), codec)
            assert near(out, torch.cat(gathered(x)), codec)
            for result in (total, one_total):
                assert near(result, summed(gathered(x)).bfloat16(), codec)
        for call in (gather, reduce, one):
            call.check()
        done.append(codec)
    return done


def recorded(device: Any) -> list[str]:
    """Calls of the same memory are recorded; results are those of calls that are not."""
    return recordings(device, ROUTES, whole=True)


def in_parts(device: Any) -> list[str]:
    """The same, where graphs hold no calls of NCCL's."""
    return recordings(device, ["network"], whole=False)


def recordings(device: Any, routes: Sequence[str], *, whole: bool) -> list[str]:
    done = []
    n, rank, world = 1 << 18, dist.get_rank(), dist.get_world_size()
    prepared_sums.PIECE_NBYTES = PIECE_NBYTES
    mine = slice(rank * n, (rank + 1) * n)
    for route in routes:
        for codec in some(("zipccl", "raw"), 1):
            calls = make(device, route, whole=whole, codec=codec)
            big = tensor(device, world * n)
            prepared: dict[str, Any] = {
                "gather": calls.all_gather(tensor(device, n)),
                "swap": calls.all_to_all(big),
                "scatter": calls.reduce_scatter(big, scale=0.5),
                "one": calls.all_reduce(tensor(device, n), algorithm="one-shot"),
                "two": calls.all_reduce(tensor(device, n), algorithm="two-shot"),
            }
            xs = {
                name: torch.empty_like(big if name in ("swap", "scatter") else big[mine])
                for name in prepared
            }
            outs = {
                name: torch.empty_like(big if name in ("gather", "swap") else big[mine])
                for name in prepared
            }
            # Sums in place, whose terms are read once more if a message did not fit.
            outs["one"], outs["two"] = xs["one"], xs["two"]
            for k in range(12):
                # In some calls the data of rank 0 fit into no message.
                wild = k in (1, 7, 8) and rank == 0
                for name, call in prepared.items():
                    given = tensor(device, xs[name].numel(), k, wild)
                    parts = gathered(given)
                    wanted = {
                        "gather": lambda parts: torch.cat(parts),
                        "swap": lambda parts: torch.cat([part[mine] for part in parts]),
                        "scatter": lambda parts: (
                            summed([p[mine] for p in parts]) * 0.5
                        ).bfloat16(),
                        "one": lambda parts: summed(parts).bfloat16(),
                        "two": lambda parts: summed(parts).bfloat16(),
                    }[name](parts)
                    # Rank 1 now and then has other memory, which is not recorded.
                    x, out = xs[name], outs[name]
                    if rank == 1 and k in (5, 9):
                        x, out = torch.empty_like(x), torch.empty_like(out)
                        out = x if name in ("one", "two") else out
                    x.copy_(given)
                    if out is not x:
                        out.fill_(float("nan"))
                    call(x, out).wait()
                    assert near(out, wanted, codec), f"{route} {codec} {name} call {k}"
            for name, call in prepared.items():
                assert any(slot.recordings for slot in call._slots), f"{route} {codec} {name}"
            # Recordings are dropped, and made anew.
            calls.forget()
            assert not any(slot.recordings for call in prepared.values() for slot in call._slots)
            for k in range(5):
                given = tensor(device, n, k)
                xs["gather"].copy_(given)
                prepared["gather"](xs["gather"], outs["gather"]).wait()
                assert near(outs["gather"], torch.cat(gathered(given)), codec)
            assert any(slot.recordings for slot in prepared["gather"]._slots)
            done.append(f"{route} {codec}")
    return done


def overlapping(device: Any) -> list[str]:
    """Calls with different sets of memory run at the same time, late on one rank or the other."""
    done = []
    sizes = [1 << 18, 4099, 77_777, 1 << 17, 300_001]
    prepared_sums.PIECE_NBYTES = PIECE_NBYTES
    rng = random.Random(dist.get_rank())
    rounds = 60 if dist.get_world_size() == 2 else 40
    for codec in some(("zipccl", "mx"), 1):
        for algorithm in ("one-shot", "two-shot"):
            calls = make(device, "network", codec=codec, side_by_side=True)
            streams = [torch.cuda.Stream(device) for _ in range(calls.depth)]
            xs = [tensor(device, n) for n in sizes]
            sums = [calls.all_reduce(x, algorithm=algorithm) for x in xs]
            for k in range(rounds):
                wild = codec == "zipccl" and k in (1, 20, 21) and dist.get_rank() == 0
                given = [tensor(device, n, k, wild) for n in sizes]
                wanted = [summed(gathered(x)).bfloat16() for x in given]
                works = []
                for x, new, call in zip(xs, given, sums, strict=True):
                    own = streams[calls.queue_of(calls.phase)]
                    own.wait_stream(torch.cuda.current_stream())
                    with torch.cuda.stream(own):
                        x.copy_(new)
                        torch.cuda._sleep(rng.randrange(400_000))
                        works.append(call(x, x))
                for work, x, total in zip(works, xs, wanted, strict=True):
                    work.wait()
                    assert near(x, total, codec), f"{codec} {algorithm} {x.numel()} call {k}"
                torch.cuda.synchronize()
            assert all(slot.recordings for slot in sums[0]._slots)
            done.append(f"{codec} {algorithm}")
    return done


def quick(device: Any) -> dict[str, int]:
    """All of the above, one after the other."""
    tasks = (everything, graphs, recorded, in_parts, overlapping)
    return {task.__name__: len(task(device)) for task in tasks}


def in_order(device: Any) -> list[str]:
    """Sums that each take all of a GPU, on two streams that come in different orders on the ranks.

    Two at the same time would wait for each other.
    """
    n, world = 1 << 24, dist.get_world_size()
    x = torch.full((n,), 1.0 + dist.get_rank(), dtype=torch.bfloat16, device=device)
    streams = [torch.cuda.Stream(device) for _ in range(2)]
    outs = [torch.empty_like(x) for _ in streams]
    sums = [make(device, "peers", codec="mx").all_reduce(x, algorithm="one-shot") for _ in streams]
    assert all(isinstance(call, prepared_sums.OneLaunch) for call in sums)
    for _ in range(20):
        works = []
        for i, (stream, out, call) in enumerate(zip(streams, outs, sums, strict=True)):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                torch.cuda._sleep(1_000_000 * (i == dist.get_rank()))
                works.append(call(x, out))
        for work, out in zip(works, outs, strict=True):
            work.wait()
            assert (out == world * (world + 1) / 2).all()
    return ["mx"]


def late(device: Any) -> float:
    """A rank that does not come is named within the timeout, and the device goes on."""
    from tightwire.adapters.transports.symmetric import SymmetricMemory

    memory = SymmetricMemory(None, device, timeout=2)
    calls = PreparedCalls(TorchDist(dist.group.WORLD, device), peers=memory)
    x = tensor(device, 1000)
    out = torch.empty(dist.get_world_size() * 1000, dtype=x.dtype, device=device)
    gather = calls.all_gather(x)
    gather(x, out).wait()
    start = time.monotonic()
    if dist.get_rank() != 1:
        work = gather(x, out)
        with pytest.raises(tw.CollectiveError, match="rank 1 did not come"):
            work.wait()
        with pytest.raises(tw.CollectiveError, match="an earlier call has failed"):
            gather(x, out)
    spent = time.monotonic() - start
    torch.cuda.synchronize()
    # Rank 1 does not leave before: that would be another error.
    dist.barrier()
    return spent


@pytest.mark.multi_gpu
@pytest.mark.parametrize(("world_size", "task"), CASES)
def test_on_the_gpus_of_a_host(world_size: int, task: str, tmp_path: Path) -> None:
    count = torch.cuda.device_count()
    if count < world_size:
        pytest.skip(f"needs {world_size} GPUs; found: {count}")
    for found in launch(__file__, task, world_size, tmp_path, "cuda", "default"):
        if task == "late":
            assert found < 10
        elif task == "quick":
            assert found == QUICK
        else:
            assert len(found) == DONE[task]


if __name__ == "__main__":
    join(globals(), sys.argv[1:])
