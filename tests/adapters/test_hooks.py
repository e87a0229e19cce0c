"""What the training hooks share, between real processes: groups, closing, failures in backward."""

from __future__ import annotations

import gc
import os
import sys
import time
import weakref
from collections.abc import Iterator
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
pytest.importorskip("torch.distributed.fsdp")
if not hasattr(torch.distributed.fsdp.FSDPModule, "set_custom_reduce_scatter"):
    pytest.skip("this PyTorch has no custom collectives", allow_module_level=True)

from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from tightwire.adapters.training import ddp, fsdp, tagc  # noqa: E402
from tightwire.adapters.training import tensor_parallel as tp  # noqa: E402
from tightwire.adapters.training.error_feedback import ErrorFeedback  # noqa: E402
from tightwire.adapters.training.hooks import average, communicator  # noqa: E402
from tightwire.adapters.transports.threads import ThreadTransport, run_ranks  # noqa: E402
from tightwire.adapters.transports.torch_dist import TorchDist  # noqa: E402
from tightwire.adapters.transports.torch_groups import disagreement  # noqa: E402

#: A model whose hook goes as it is, so that nothing is compiled.
RAW: dict[str, Any] = {"codec": "raw"}


def linear() -> Any:
    torch.manual_seed(1)
    return torch.nn.Linear(5, 3)


def step(model: Any, factor: float = 1.0) -> None:
    """A backward pass of which every gradient of the weight is `factor` on every rank."""
    (model(torch.ones(1, 5)).sum() * factor).backward()


def gradient(model: Any) -> list[float]:
    """The different numbers in the gradients of a model."""
    grads = [
        p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad for p in parameters(model)
    ]
    return sorted({float(x) for g in grads for x in g.reshape(-1)})


def parameters(model: Any) -> Any:
    return [p for p in model.parameters() if p.grad is not None]


def uneven_groups(device: Any) -> dict[str, Any]:
    """Ranks 0 and 1 are in a group more than the others; then every kind of hook."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank < 2:
        dist.new_group([0, 1], use_local_synchronization=True)
    mean = sum(range(size)) / size
    model = DistributedDataParallel(linear())
    ddp.register(model, **RAW)
    step(model, rank)
    assert gradient(model) == [mean]

    mesh = init_device_mesh("cpu", (size,))
    for compress in (fsdp.compress, tagc.compress):
        sharded = fully_shard(linear(), mesh=mesh)
        with compress(sharded, **RAW) as hooks:
            step(sharded, rank)
            # Of three rows the last rank has none.
            assert gradient(sharded) == ([mean] if rank < 3 else [])
            assert hooks.reduce_scatter.trace()
    with tp.connect(None, None) as parallel:
        assert parallel.all_reduce(torch.ones(3)).tolist() == [size] * 3

    # Two pipelines' stages: each half registers a model of its own, one of them two.
    stages = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    mine = rank // 2
    for _ in range(1 + mine):
        stage = DistributedDataParallel(linear(), process_group=stages[mine])
        ddp.register(stage, **RAW)
        step(stage, rank)
        assert gradient(stage) == [2 * mine + 0.5]
    again = DistributedDataParallel(linear())
    ddp.register(again, **RAW)
    step(again, rank)
    assert gradient(again) == [mean]

    # Ranks that want different things, and a rank that does not come.
    start = time.monotonic()
    with pytest.raises(tw.CollectiveError) as differ:
        communicator(None, device, "one thing" if rank < 3 else "another")
    with pytest.raises(tw.CollectiveError) as codecs:
        ddp.register(DistributedDataParallel(linear()), codec="raw" if rank else "zipccl")
    found = [str(differ.value), str(codecs.value)]
    if rank != 2:
        with pytest.raises(tw.CollectiveError) as missing:
            TorchDist.new_group(timeout=0.5)
        found.append(str(missing.value))
    assert time.monotonic() - start < 30
    return {"errors": found}


def resources() -> list[int]:
    """Process groups, threads and descriptors of this process."""
    gc.collect()
    folders = [len(os.listdir(f"/proc/self/{name}")) for name in ("task", "fd")]
    return [len(dist.distributed_c10d._world.pg_map), *folders]


def at_rest() -> list[int]:
    """The resources when they have not changed for a while, as peers close in their own time."""
    found, since = resources(), time.monotonic()
    deadline = since + 10
    while time.monotonic() < min(since + 0.5, deadline):
        time.sleep(0.05)
        now = resources()
        if now != found:
            found, since = now, time.monotonic()
    return found


def many_models(device: Any) -> dict[str, Any]:
    """Models that are dropped, or whose hooks are closed, one after another."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def replicated(close: bool) -> None:
        model = DistributedDataParallel(linear())
        hook = ddp.register(model, **RAW)
        step(model)
        if not close:
            return
        hook.close()
        hook.close()
        with pytest.raises(tw.CollectiveError, match="the communicator is closed"):
            step(model)
        assert hook.raw_bytes > 0
        kept.append((model, hook))

    def sharded(close: bool) -> None:
        model = fully_shard(linear(), mesh=mesh)
        hooks = fsdp.compress(model, **RAW)
        step(model)
        if not close:
            return
        hooks.close()
        hooks.close()
        model.reshard()
        with pytest.raises(tw.CollectiveError, match="closed"):
            model(torch.ones(1, 5))
        kept.append((model, hooks))

    kept: list[Any] = []
    # What the first ones load stays.
    replicated(False)
    sharded(False)
    dist.barrier()
    before = at_rest()
    for i in range(20):
        replicated(i % 2 == 0)
    for i in range(5):
        sharded(i % 2 == 0)
    dist.barrier()
    after = at_rest()
    comm = tw.Communicator(TorchDist(dist.new_group()), "raw")
    with comm:
        comm.all_reduce(torch.ones(3))
    comm.close()
    with pytest.raises(tw.CollectiveError, match="the communicator is closed"):
        comm.all_reduce(torch.ones(3))
    return {"before": before, "after": after, "kept": len(kept)}


class Failing:
    """In place of `hook._average`: raises at bucket `bad`, when ranks are in step again."""

    def __init__(self, hook: Any, bad: int) -> None:
        self.average, self.bad, self.calls = hook._average, bad, 0

    def __call__(self, bucket: Any) -> None:
        self.average(bucket)
        self.calls += 1
        if self.calls == self.bad + 1:
            raise tw.CollectiveError(0, "reduce_scatter", 0, "decode", "damaged")


def failures(device: Any) -> None:
    """A step after one that failed: it goes on, or says in our words that it does not."""
    for register in (ddp.register, tagc.register):
        for options in ({}, {"static_graph": True}, {"find_unused_parameters": True}):
            inner = torch.nn.Sequential(torch.nn.Linear(200, 200), torch.nn.Linear(200, 200))
            model = DistributedDataParallel(inner, bucket_cap_mb=0.1, **options)
            hook: Any = register(model, **RAW)
            x = torch.ones(1, 200)
            # From the third step on there are several buckets.
            for _ in range(2):
                model(x).sum().backward()
            for bad in (0, 1):
                hook._average = failing = Failing(hook, bad)
                with pytest.raises(tw.CollectiveError, match="'decode': damaged"):
                    model(x).sum().backward()
                # Later buckets went, too: no other rank waits for them.
                assert failing.calls > 1
                hook._average = failing.average
                model.zero_grad()
                model(x).sum().backward()
                assert inner[1].bias.grad.eq(1).all()
            # A peer that is lost.
            hook._channel.comm.session.broken = "the peer is gone"
            for _ in range(2):
                with pytest.raises(tw.CollectiveError, match="failed: the peer is gone"):
                    model(x).sum().backward()


def unused(device: Any) -> None:
    """Ranks out of step in a model that makes a collective of its own behind the last bucket."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    model = DistributedDataParallel(linear(), process_group=group, find_unused_parameters=True)
    hook: Any = ddp.register(model, **RAW)
    step(model)

    def fail(bucket: Any) -> None:
        hook.comm.session.broken = "damaged"
        raise tw.CollectiveError(0, "reduce_scatter", 0, "sizes", "damaged")

    if dist.get_rank() == 0:
        hook._average = fail
    for _ in range(2):
        with pytest.raises(tw.CollectiveError):
            step(model)
    with torch.no_grad():
        model(torch.ones(1, 5))


def refuse(device: Any) -> None:
    """What is raised for modules that are not meant."""

    class Complex(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.inner = linear()
            self.phase = torch.nn.Parameter(torch.ones(4, dtype=torch.complex64))

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    calls: list[tuple[Any, str]] = [
        (lambda: ddp.register(linear()), "allowed: DistributedDataParallel"),
        (lambda: tagc.register(linear()), "allowed: DistributedDataParallel"),
        (lambda: ddp.register(None), "allowed: DistributedDataParallel"),
        (lambda: fsdp.compress([]), "allowed: a module after fully_shard"),
        (lambda: tagc.compress(None), "allowed: a module after fully_shard"),
        (lambda: fsdp.compress(fully_shard(Complex(), mesh=mesh)), "'phase' is torch.complex64"),
        (lambda: tagc.compress(fully_shard(Complex(), mesh=mesh)), "'phase' is torch.complex64"),
    ]
    for call, text in calls:
        with pytest.raises(TypeError, match=text):
            call()


def everything(device: Any) -> dict[str, Any]:
    failures(device)
    unused(device)
    refuse(device)
    return many_models(device) | uneven_groups(device)


class Damaging(ThreadTransport):
    """Flips a bit of the next large array that another rank sends for a reduce-scatter."""

    def __init__(self, inner: ThreadTransport) -> None:
        super().__init__(inner.rank, inner._pipes, inner.timeout)
        self.armed = False

    def _take(self, kind: str, source: int, out: Any) -> None:
        super()._take(kind, source, out)
        if self.armed and kind.startswith("all_to_all") and source != self.rank and len(out) > 500:
            out[len(out) // 2] ^= 16
            self.armed = False


@pytest.mark.parametrize(("codec", "fed_back"), [("zipccl", False), ("nvfp4", True)])
@pytest.mark.parametrize("n", [4000, 4001])
def test_damage_of_terms(codec: str, fed_back: bool, n: int) -> None:
    """Who gets damaged terms raises, and comes to the all-gather that the others are in."""

    def task(inner: ThreadTransport) -> tuple[str, Any, Any]:
        transport = Damaging(inner)
        comm = tw.Communicator(transport, codec)
        feedback, parts = (ErrorFeedback(), [("x", n)]) if fed_back else (None, [])
        x = torch.randn(n, generator=torch.Generator().manual_seed(comm.rank))
        first, damaged, then = x.clone(), x.clone(), x.clone()
        average(comm, first, feedback, parts)
        transport.armed = comm.rank == 1
        error = ""
        try:
            average(comm, damaged, feedback, parts)
        except tw.CollectiveError as caught:
            error = caught.stage
        average(comm, then, feedback, parts)
        return error, damaged, then

    (left, seen, then), (right, _, also) = run_ranks(2, task)
    assert (left, right) == ("", "decode")
    share = -(-n // 2)
    assert seen[:share].isfinite().all()
    assert seen[share:].isnan().all()
    assert then.isfinite().all()
    assert torch.equal(then, also)


@pytest.fixture
def alone(request: Any) -> Iterator[None]:
    """A process group of this process alone, at the debug level `request.param` if there is one."""
    before = dist.get_debug_level()
    dist.set_debug_level(getattr(request, "param", before))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.set_debug_level(before)


@pytest.mark.parametrize("alone", [dist.DebugLevel.DETAIL], indirect=True)
def test_wrapped_backends(alone: None) -> None:
    """TORCH_DISTRIBUTED_DEBUG=DETAIL."""
    for transport in (TorchDist(dist.new_group(), timeout=7), TorchDist.new_group(timeout=7)):
        assert transport.timeout == 7
        with tw.Communicator(transport, "raw") as comm:
            assert comm.all_reduce(torch.ones(3)).tolist() == [1] * 3


def test_the_last_reference(alone: None) -> None:
    """A model that is gone closes its connections, without the garbage collector."""
    model = DistributedDataParallel(linear())
    hook = ddp.register(model, **RAW)
    step(model)
    comm = weakref.ref(hook.comm)
    transport = weakref.ref(hook.comm.transport)
    gc.collect()
    gc.disable()
    try:
        del model, hook
        assert comm() is None
        assert transport() is None
    finally:
        gc.enable()


def test_a_group_that_is_gone(alone: None) -> None:
    group = dist.new_group([0])
    dist.destroy_process_group(group)
    with pytest.raises(ValueError, match="the process group has been destroyed"):
        TorchDist.new_group(group)
    model = DistributedDataParallel(linear())
    dist.destroy_process_group()
    with pytest.raises(ValueError, match="the process group has been destroyed"):
        ddp.register(model, **RAW)


def test_a_late_rank_0() -> None:
    """Who waited for it has given up, which it says at once."""
    store, timeout = dist.HashStore(), timedelta(seconds=0.1)
    waited = [disagreement(store, rank, 3, "facts", timeout) for rank in (1, 2)]
    assert waited == ["rank 0 has not come in 0.1 s"] * 2
    told = [disagreement(store, rank, 3, "facts", timedelta(hours=1)) for rank in (0, 2)]
    assert told == ["rank 0 has not come in time, other ranks have given up"] * 2


@pytest.mark.slow
def test_hooks(tmp_path: Path) -> None:
    for rank, found in enumerate(launch(__file__, "everything", 4, tmp_path)):
        assert found["kept"] == 13
        assert all(a <= b for a, b in zip(found["after"], found["before"], strict=True)), found
        differ, codecs, *missing = found["errors"]
        assert "ranks differ: ranks [0, 1, 2]: one thing" in differ
        assert "ranks [3]: another" in differ
        assert "ranks differ: ranks [0]: " in codecs
        for text in missing:
            assert "ranks [2] have not come in 0.5 s" in text
        assert bool(missing) == (rank != 2)


if __name__ == "__main__":
    join(globals(), sys.argv[1:])
