"""The backend "tightwire" between real processes, over gloo: also what they run."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import tightwire as tw
from processes import join, launch

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("PyTorch was built without gloo", allow_module_level=True)

from tightwire.adapters.collectives import process_group  # noqa: E402
from tightwire.adapters.collectives.process_group import Rule, TightwireGroup  # noqa: E402

# Under the names of PyTorch 2.13, and of versions before.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

#: Bytes from which on calls are compressed in these tests.
LEAST = 2000
#: In seconds, what an error may take on a busy machine.
BOUND = 30.0


def tensor(rank: int, n: int, dtype: Any = torch.float32) -> Any:
    generator = torch.Generator().manual_seed(100 * rank + n % 97)
    return (torch.randn(n, generator=generator) * 0.02).to(dtype)


def totals(n: int, dtype: Any = torch.float32) -> Any:
    """The sum in the order of ranks."""
    found = tensor(0, n, dtype).float()
    for rank in range(1, dist.get_world_size()):
        found = found + tensor(rank, n, dtype).float()
    return found.to(dtype)


@contextmanager
def compressed(group: Any, expected: int) -> Iterator[None]:
    """So many calls of the group are compressed, and fewer bytes travel."""
    before = len(group.trace())
    raw, wire = group.raw_bytes, group.wire_bytes
    yield
    assert len(group.trace()) - before == expected, group.trace()[before:]
    raw, wire = group.raw_bytes - raw, group.wire_bytes - wire
    assert (wire < 0.95 * raw) if expected else (raw == wire == 0)


def sums_and_gathers(group: Any) -> None:
    """The functions of torch.distributed, synchronous or not."""
    ranks, me = dist.get_world_size(), dist.get_rank()
    for asynchronous in (False, True):
        for dtype in (torch.float32, torch.bfloat16):
            n = 6007 * ranks
            works = []
            with compressed(group, 4):
                x = tensor(me, n, dtype)
                works.append(dist.all_reduce(x, async_op=asynchronous))
                whole = torch.full((n,), torch.nan, dtype=dtype)
                share = tensor(me, 6007, dtype)
                works.append(all_gather(whole, share, async_op=asynchronous))
                part = torch.full((6007,), torch.nan, dtype=dtype)
                given = tensor(me, n, dtype)
                works.append(reduce_scatter(part, given, async_op=asynchronous))
                sent = tensor(1, n, dtype) if me == 1 else torch.zeros(n, dtype=dtype)
                works.append(dist.broadcast(sent, 1, async_op=asynchronous))
                for work in works:
                    assert (work is not None) == asynchronous
                    if work is not None:
                        # PyTorch takes the result of some works in C++.
                        assert work.get_future().wait() is not None
                        assert work.wait()
                        assert work.is_completed()
                        assert work.is_success()
            assert torch.equal(x, totals(n, dtype))
            assert torch.equal(whole, torch.cat([tensor(r, 6007, dtype) for r in range(ranks)]))
            assert torch.equal(part, totals(n, dtype)[6007 * me : 6007 * (me + 1)])
            assert torch.equal(sent, tensor(1, n, dtype))
    with compressed(group, 3):
        parts = [torch.zeros(6007) for _ in range(ranks)]
        dist.all_gather(parts, tensor(me, 6007))
        assert all(torch.equal(part, tensor(r, 6007)) for r, part in enumerate(parts))
        out = torch.zeros(6007)
        dist.reduce_scatter(out, list(tensor(me, 6007 * ranks).chunk(ranks)))
        assert torch.equal(out, totals(6007 * ranks).chunk(ranks)[me])
        swapped = torch.zeros(6007 * ranks)
        dist.all_to_all_single(swapped, tensor(me, 6007 * ranks))
        wanted = [tensor(r, 6007 * ranks).chunk(ranks)[me] for r in range(ranks)]
        assert torch.equal(swapped, torch.cat(wanted))
    with torch.inference_mode(), compressed(group, 1):
        x = tensor(me, 6007)
        dist.all_reduce(x)
        assert torch.equal(x, totals(6007))


def untouched(group: Any) -> None:
    """What the policy does not name works as ever."""
    ranks, me = dist.get_world_size(), dist.get_rank()
    with compressed(group, 0):
        x = torch.full((6007,), me)
        dist.all_reduce(x)
        assert torch.equal(x, torch.full((6007,), sum(range(ranks))))
        x = tensor(me, 6007)
        dist.all_reduce(x, dist.ReduceOp.MAX)
        assert torch.equal(x, torch.stack([tensor(r, 6007) for r in range(ranks)]).amax(0))
        x = tensor(me, 10)
        dist.all_reduce(x)
        assert torch.allclose(x, totals(10), atol=1e-6)
        objects: list[Any] = [None] * ranks
        dist.all_gather_object(objects, {"rank": me})
        assert objects == [{"rank": r} for r in range(ranks)]
        x = tensor(me, 6007)
        dist.reduce(x, 1)
        if me == 1:
            assert torch.allclose(x, totals(6007), atol=1e-6)
        parts = [torch.zeros(6007) for _ in range(ranks)] if me == 0 else None
        dist.gather(tensor(me, 6007), parts)
        splits = [6000 if r == (me + 1) % ranks else 0 for r in range(ranks)]
        inward = [6000 if r == (me - 1) % ranks else 0 for r in range(ranks)]
        out = torch.zeros(6000)
        dist.all_to_all_single(out, tensor(me, 6000), inward, splits)
        assert torch.equal(out, tensor((me - 1) % ranks, 6000))
        dist.barrier()
        out = torch.zeros(6007)
        ops = [
            dist.P2POp(dist.isend, tensor(me, 6007), (me + 1) % ranks),
            dist.P2POp(dist.irecv, out, (me - 1) % ranks),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        assert torch.equal(out, tensor((me - 1) % ranks, 6007))


def coalesced(group: Any) -> None:
    """Several tensors in one call, whose bytes count together."""
    ranks, me = dist.get_world_size(), dist.get_rank()
    sizes = (2400, 301, 6000)
    for asynchronous in (False, True):
        with compressed(group, 3):
            xs = [tensor(me, n) for n in sizes]
            with dist._coalescing_manager(async_ops=asynchronous) as works:
                for x in xs:
                    dist.all_reduce(x)
            if asynchronous:
                works.wait()
            assert all(torch.equal(x, totals(n)) for x, n in zip(xs, sizes, strict=True))
            outs = [torch.zeros(ranks * n) for n in sizes]
            with dist._coalescing_manager(async_ops=asynchronous) as works:
                for out, n in zip(outs, sizes, strict=True):
                    all_gather(out, tensor(me, n))
            if asynchronous:
                works.wait()
            for out, n in zip(outs, sizes, strict=True):
                assert torch.equal(out, torch.cat([tensor(r, n) for r in range(ranks)]))
            outs = [torch.zeros(n) for n in sizes]
            with dist._coalescing_manager(async_ops=asynchronous) as works:
                for out, n in zip(outs, sizes, strict=True):
                    reduce_scatter(out, tensor(me, ranks * n))
            if asynchronous:
                works.wait()
            for out, n in zip(outs, sizes, strict=True):
                assert torch.equal(out, totals(ranks * n)[me * n : (me + 1) * n])


def transposed(x: Any) -> Any:
    return x.t().contiguous().t()


def strided(x: Any) -> Any:
    return x.repeat_interleave(2, 1)[:, ::2]


def negated(x: Any) -> Any:
    return torch._neg_view(-x)


def of_inference(x: Any) -> Any:
    with torch.inference_mode():
        return x.clone()


def every_call(group: Any, given: Callable[[Any], Any], out: Callable[[Any], Any]) -> list[Any]:
    """What calls of a group leave, with inputs that `given` has made and outputs that `out` has."""
    ranks, me = dist.get_world_size(), dist.get_rank()
    generator = torch.Generator().manual_seed(me)
    # Their sums are the same in any order.
    whole = torch.randint(0, 100, (80 * ranks, 30), generator=generator).float()
    parts = whole.chunk(ranks)
    splits = [80] * ranks
    found: list[Any] = []

    def new(like: Any) -> Any:
        found.append(out(torch.zeros_like(like)))
        return found[-1]

    def changed(x: Any) -> Any:
        found.append(given(x.clone()))
        return found[-1]

    how: dict[str, Any] = {"group": group, "async_op": True}
    single: list[Callable[[], Any]] = [
        lambda: dist.all_reduce(changed(whole), **how),
        lambda: dist.broadcast(changed(parts[0]), 1, **how),
        lambda: all_gather(new(whole), given(parts[0]), **how),
        lambda: dist.all_gather([new(part) for part in parts], given(parts[0]), **how),
        lambda: reduce_scatter(new(parts[0]), given(whole), **how),
        lambda: dist.reduce_scatter(new(parts[0]), [given(part) for part in parts], **how),
        lambda: dist.all_to_all_single(new(whole), given(whole), **how),
        lambda: dist.all_to_all_single(new(whole), given(whole), splits, splits, **how),
    ]
    for call in single:
        call().wait()
    coalescing: list[Callable[[], Any]] = [
        lambda: dist.all_reduce(changed(whole), group=group),
        lambda: all_gather(new(whole), given(parts[0]), group=group),
        lambda: reduce_scatter(new(parts[0]), given(whole), group=group),
    ]
    for call in coalescing:
        with dist._coalescing_manager(group=group):
            call()
            call()
    return found


def layouts() -> None:
    """Calls with any tensors, of all ranks or of one, leave what contiguous ones have over gloo."""
    ops = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "all_to_all_v")
    group = dist.new_group(pg_options=[Rule(min_bytes=LEAST, ops=ops)])
    wanted = every_call(dist.new_group(backend="gloo"), torch.clone, torch.clone)
    for make in (transposed, strided, negated, of_inference):
        for some in (range(dist.get_world_size()), [1]):
            mine = make if dist.get_rank() in some else torch.clone
            for given, out in ((mine, torch.clone), (torch.clone, mine)):
                with compressed(group, 11):
                    found = every_call(group, given, out)
                    assert list(map(torch.equal, found, wanted)) == [True] * len(wanted), make


def groups() -> None:
    """Subgroups with policies of their own, by description and by argument."""
    me = dist.get_rank()
    evens = dist.new_group([0, 2], group_desc="evens")
    lossy = dist.new_group([1, 3], pg_options=[Rule("mx", ops=("all_reduce",), min_bytes=LEAST)])
    if me % 2 == 0:
        assert isinstance(evens, TightwireGroup)
        with compressed(evens, 1):
            x = tensor(me, 6007)
            dist.all_reduce(x, group=evens)
            assert torch.equal(x, tensor(0, 6007) + tensor(2, 6007))
    else:
        wanted = tensor(1, 60_000) + tensor(3, 60_000)
        with compressed(lossy, 1):
            x = tensor(me, 60_000)
            dist.all_reduce(x, group=lossy)
            assert 0 < tw.error(wanted.numpy(), x.numpy()).vnmse < 1e-2
            out = torch.zeros(120_000)
            all_gather(out, tensor(me, 60_000), group=lossy)
            assert torch.equal(out, torch.cat([tensor(1, 60_000), tensor(3, 60_000)]))
        assert lossy.wire_bytes < 0.3 * lossy.raw_bytes
    # Those of two processes for each other are right while all others are in other calls.
    dist.barrier()


def policies_differ() -> list[str]:
    """Told on all ranks when the group is made."""
    process_group.set_policy([Rule(min_bytes=LEAST + dist.get_rank() // 3)])
    start = time.monotonic()
    with pytest.raises(tw.CollectiveError) as caught:
        dist.new_group()
    assert time.monotonic() - start < BOUND
    process_group.set_policy([Rule(min_bytes=LEAST)])
    return [str(caught.value)]


def calls_differ() -> list[str]:
    """Told by wait(); later compressed calls are refused, others are not."""
    group = dist.new_group()
    x = tensor(0, 6000 + dist.get_rank() // 3)
    found = []
    for _ in range(2):
        work = dist.all_reduce(x, group=group, async_op=True)
        with pytest.raises(tw.CollectiveError) as caught:
            work.wait()
        assert not work.is_success()
        found.append(str(caught.value))
    x = torch.ones(1)
    dist.all_reduce(x, group=group)
    assert x.item() == dist.get_world_size()
    return found


def calls(device: Any) -> list[str]:
    process_group.set_policy([Rule(min_bytes=LEAST)])
    group = dist.new_group()
    assert isinstance(group, TightwireGroup)
    assert dist.get_backend(group) == "tightwire"
    world = dist.group.WORLD
    assert world is not None
    # The default group was made before, with a rule for larger tensors.
    with compressed(world, 0):
        dist.all_reduce(tensor(0, 6000))
    dist.distributed_c10d._update_default_pg(group)
    try:
        sums_and_gathers(group)
        untouched(group)
        coalesced(group)
    finally:
        dist.distributed_c10d._update_default_pg(world)
    groups()
    layouts()
    return policies_differ() + calls_differ()


def train(model: Any, wrap: Callable[[Any], Any], steps: int = 2) -> Any:
    """The parameters after some steps, each rank with data of its own."""
    model = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        model(torch.randn(8, 40, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = []
    for parameter in model.parameters():
        full = getattr(parameter, "full_tensor", None)
        found.append((full() if full else parameter).detach().flatten())
    return torch.cat(found)


def model() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(40, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64), torch.nn.Linear(64, 40)
    )


def training(device: Any) -> list[float]:
    """DDP, FSDP2 and DTensor end with the same bits as over gloo: pairs add up in one way only."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    process_group.set_policy([Rule(min_bytes=LEAST)])
    names = ("dp", "tp")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    plain = dict.fromkeys(names, "gloo")
    gloo = init_device_mesh("cpu", (2, 2), mesh_dim_names=names, backend_override=plain)
    dp, tp = mesh["dp"].get_group(), mesh["tp"].get_group()
    assert isinstance(dp, TightwireGroup)
    assert not isinstance(gloo["dp"].get_group(), TightwireGroup)

    def ddp(m: Any) -> Callable[[Any], Any]:
        data_parallel = torch.nn.parallel.DistributedDataParallel
        return lambda net: data_parallel(net, process_group=m["dp"].get_group())

    def fsdp(m: Any) -> Callable[[Any], Any]:
        def wrap(net: Any) -> Any:
            for layer in (*net, net):
                fully_shard(layer, mesh=m["dp"])
            return net

        return wrap

    def hsdp(m: Any) -> Callable[[Any], Any]:
        return lambda net: fully_shard(net, mesh=m)

    def sharded(m: Any) -> Callable[[Any], Any]:
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        return lambda net: fully_shard(parallelize_module(net, m["tp"], plan), mesh=m["dp"])

    # Activations are smaller than the least size of these tests: they are for the last case.
    for wrap, least in ((ddp, 3), (fsdp, 8), (hsdp, 6), (sharded, 6)):
        before = len(dp.trace()) + len(tp.trace())
        found = train(model(), wrap(mesh))
        assert torch.equal(found, train(model(), wrap(gloo))), wrap.__name__
        assert len(dp.trace()) + len(tp.trace()) - before >= least, wrap.__name__
    ops = {record.collective for record in dp.trace()}
    assert ops == {"all_reduce", "all_gather", "reduce_scatter", "broadcast"}
    assert {record.collective for record in tp.trace()} >= {"all_reduce"}
    assert dp.wire_bytes < 0.95 * dp.raw_bytes
    return [float(found.double().sum())]


def other_things(me: int) -> dict[str, Callable[[], Any]]:
    """What a rank can do between beginning a call and waiting for it, when others do it before."""
    return {
        "message": lambda: dist.send(torch.ones(3), 1) if me == 0 else dist.recv(torch.zeros(3), 0),
        "group": dist.new_group,
    }


def callbacks(group: Any) -> None:
    """What a future's callback calls and waits for, also by a future with callbacks."""

    def again(depth: int) -> Any:
        def call(done: Any) -> Any:
            done.wait()
            x = tensor(dist.get_rank(), 6007)
            work = dist.all_reduce(x, group=group, async_op=True)
            return work.get_future().then(again(depth - 1)).wait() if depth else work.wait() and x

        return call

    with compressed(group, 4):
        work = dist.all_reduce(tensor(0, 6007), group=group, async_op=True)
        assert torch.equal(work.get_future().then(again(2)).wait(), totals(6007))


def split() -> None:
    """Parts of a group, also of the same ranks again, and in another order."""
    me = dist.get_rank()
    world: Any = dist.group.WORLD
    world.get_group_store().set(f"{me}", "here")
    world.get_group_store().wait(["0", "1"])
    for ranks in ([0, 1], [1], [1, 0], [0, 1]):
        group = world.split_group(ranks)
        assert (group is None) == (me not in ranks)
        if group is not None:
            assert group.rank() == ranks.index(me)
            with compressed(group, len(ranks) - 1):
                x = tensor(me, 6007)
                group.allreduce([x]).wait()
                assert torch.equal(x, totals(6007) if len(ranks) > 1 else tensor(me, 6007))


def aborted() -> list[str]:
    """Rank 0 gives up a call under way and two that wait; rank 1 is told in the first of them."""
    group = dist.new_group(group_desc="aborted")
    dist.all_reduce(tensor(0, 6007), group=group)
    found = []
    start = time.monotonic()
    if dist.get_rank() == 0:
        works = [dist.all_reduce(tensor(0, 6007), group=group, async_op=True) for _ in range(3)]
        future = works[2].get_future()
        while not works[0]._done.running():
            time.sleep(0.01)
        group.abort()
        waits = [works[0].wait, works[1].wait, future.wait]
        assert not works[1].is_success()
    else:
        dist.recv(torch.zeros(3), 0)
        waits = [lambda: dist.all_reduce(tensor(0, 6007), group=group)]
    for wait in waits:
        with pytest.raises(RuntimeError) as caught:
            wait()
        found.append(str(caught.value))
    if dist.get_rank() == 0:
        dist.send(torch.zeros(3), 1)
    assert time.monotonic() - start < BOUND
    return found


def first_calls(device: Any) -> list[list[str]]:
    """They return at once, though another rank comes only after what this one does next."""
    me = dist.get_rank()
    port: list[Any] = [None]
    if me == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = [store.port]
    dist.broadcast_object_list(port)
    if me:
        store = dist.TCPStore("127.0.0.1", port[0], is_master=False)
    seconds = timedelta(seconds=BOUND)
    # Groups of one store, one after the other, find nothing that those before have written.
    for least in (LEAST + 2, LEAST + 1, LEAST):
        dist.destroy_process_group()
        process_group.set_policy([Rule(min_bytes=least)])
        dist.init_process_group("tightwire", store=store, rank=me, world_size=2, timeout=seconds)
        x = tensor(me, 6007)
        dist.all_reduce(x)
        assert torch.equal(x, totals(6007))
    split()
    for name, do in other_things(me).items():
        group = dist.new_group()
        x = tensor(me, 6007)
        if me:
            do()
        work = dist.all_reduce(x, group=group, async_op=True)
        if not me:
            do()
        work.wait()
        assert torch.equal(x, totals(6007)), name
        assert len(group.trace()) == 1
    groups = [dist.new_group(), dist.new_group()]
    xs = [tensor(me, 6007) for _ in groups]
    each = list(zip(xs, groups, strict=True))[:: -1 if me else 1]
    for work in [dist.all_reduce(x, group=group, async_op=True) for x, group in each]:
        work.wait()
    assert all(torch.equal(x, totals(6007)) for x in xs)
    callbacks(groups[0])
    late = dist.new_group(timeout=timedelta(seconds=1), group_desc="slow ones")
    found = []
    if me == 0:
        start = time.monotonic()
        for _ in range(2):
            work = dist.all_reduce(tensor(me, 6007), group=late, async_op=True)
            with pytest.raises(tw.CollectiveError) as caught:
                work.wait()
            found.append(str(caught.value))
        assert late.trace() == []
        assert time.monotonic() - start < BOUND
    dist.barrier()
    return [found, aborted()]


def leave(result: str) -> None:
    """End the process at once, with what it has found: its peers are not waited for."""
    Path(sys.argv[-1]).write_text(result)
    os._exit(0)


def gone(device: Any) -> None:
    """The last rank leaves; the others are told by wait(), and by backward() of DDP."""
    process_group.set_policy([Rule(min_bytes=LEAST)])
    group = dist.new_group()
    net = torch.nn.parallel.DistributedDataParallel(model(), process_group=group)
    x = tensor(dist.get_rank(), 6000)
    dist.all_reduce(x, group=group)
    # DDP orders its buckets anew before the second step.
    for _ in range(2):
        net(torch.ones(4, 40)).sum().backward()
    if dist.get_rank() == dist.get_world_size() - 1:
        leave("null")
    start = time.monotonic()
    loss = net(torch.ones(4, 40)).sum()
    with pytest.raises(RuntimeError, match=r"rank \d: all_reduce #\d+ failed in stage") as caught:
        loss.backward()
    assert "not noticed" in str(caught.value) or "all ranks" in str(caught.value)
    work = dist.all_reduce(x, group=group, async_op=True)
    with pytest.raises(tw.CollectiveError, match="an earlier call has failed"):
        work.wait()
    assert time.monotonic() - start < BOUND
    leave("null")


def all_to_alls(device: Any) -> str:
    """Some ranks give splits, and others none, by a rule for both; what wrong splits raise."""
    me = dist.get_rank()
    x = tensor(me, 12_000).view(6000, 2)
    splits = ([3000] * 2, [3000] * 2)
    both = ("all_to_all", "all_to_all_v")
    wanted = torch.cat([tensor(rank, 12_000).view(6000, 2).chunk(2)[me] for rank in range(2)])
    for least in (LEAST, 1 << 20):
        group = dist.new_group(pg_options=[Rule(min_bytes=least, ops=both)])
        for culprit in range(2):
            with compressed(group, 1):
                out = torch.full_like(x, torch.nan)
                dist.all_to_all_single(out, x, *splits[: 2 * (me == culprit)], group=group)
                assert torch.equal(out, wanted)
    with pytest.raises(ValueError, match="input_split_sizes") as wrong:
        dist.all_to_all_single(torch.empty_like(x), x, [3000] * 2, [3000, 3001], group=group)
    return str(wrong.value)


@pytest.mark.slow
def test_ranks_that_differ_in_whether_they_give_splits(tmp_path: Path) -> None:
    for rank, wrong in enumerate(launch(__file__, "all_to_alls", 2, tmp_path)):
        assert wrong == (
            f"input_split_sizes is [3000, 3001] on rank {rank} of 'undefined, rule 0', input has "
            "6000 rows; needed: 2 numbers >= 0 that add up to these"
        )


@pytest.mark.slow
def test_functions_of_torch_distributed(tmp_path: Path) -> None:
    for differ, first, second in launch(__file__, "calls", 4, tmp_path):
        assert "ranks differ: ranks [0, 1, 2]: " in differ
        assert "; ranks [3]: " in differ
        assert f"min_bytes={LEAST + 1}" in differ
        assert "all_reduce #0" in first
        assert re.search(r"ranks \[[0-3, ]+\] make another call", first)
        assert "an earlier call has failed" in second


@pytest.mark.slow
def test_training_is_that_of_gloo(tmp_path: Path) -> None:
    launch(__file__, "training", 4, tmp_path)


@pytest.mark.slow
def test_first_calls_return_at_once(tmp_path: Path) -> None:
    (late, mine), (_, others) = launch(__file__, "first_calls", 2, tmp_path)
    assert ["the group was aborted" in text for text in (*mine, *others)] == [True] * 4
    assert mine[1] == "rank 0: all_reduce #2 failed in stage 'queue': the group was aborted"
    for text in late:
        assert "rank 0: new_group #0 failed in stage 'agree': slow ones, rule 0: " in text
        assert "ranks [1] have not come in 1 s" in text


@pytest.mark.slow
def test_a_rank_that_is_gone_is_told_of(tmp_path: Path) -> None:
    launch(__file__, "gone", 2, tmp_path)


if __name__ == "__main__":
    tasks = (calls, first_calls, training, gone, all_to_alls)
    join({task.__name__: task for task in tasks}, sys.argv[1:], backend="tightwire")
