"""Hooks that leave communication to PyTorch while that is faster: what real processes run."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import pytest

import tightwire as tw
from processes import join, launch

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("PyTorch was built without gloo", allow_module_level=True)

from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from tightwire import ddp, fsdp  # noqa: E402
from tightwire.adapters.collectives.faster import Faster  # noqa: E402
from tightwire.adapters.collectives.path_selection import Measured  # noqa: E402
from tightwire.adapters.training import ddp as ddp_module  # noqa: E402
from tightwire.adapters.training import leaving, prepared_ddp, prepared_fsdp  # noqa: E402
from tightwire.adapters.training.leaving import (  # noqa: E402
    AwayHooks,
    Communication,
    Counting,
    NativeBuckets,
    gather_groups,
)

#: Calls after which hooks come back; a module takes two gathers a step.
AGAIN = 4


class Says:
    """What is measured, by kind of call: whether PyTorch's own calls are the faster ones."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.native: dict[str, bool] = {"gather": True, "scatter": True, "bucket": True}
        self.asked: list[str] = []
        #: What groups of two ranks find instead, the one of ranks 0 and 1 first.
        self.pairs: tuple[bool, bool] | None = None

        def of(kind: str, size: int) -> bool:
            if self.pairs is None or size > 2:
                return self.native[kind]
            return self.pairs[dist.get_rank() // 2]

        def measured(switch: Faster, key: Any, native: Any, ours: Any, like: Any) -> bool:
            # Both ways are tried, as they are when they are timed.
            native()
            ours()
            found = "bucket" if isinstance(key[-1], int) else "scatter"
            found = "gather" if len(key) == 3 else found
            self.asked.append(found)
            return of(found, switch._transport.world_size)

        def timed(comm: tw.Communicator, collective: str, *rest: Any) -> Measured:
            kind = {"all_gather": "gather", "reduce_scatter": "scatter"}[collective]
            self.asked.append(kind)
            ours = 2.0 if of(kind, comm.world_size) else 0.1
            return Measured((1 << 10, 1 << 20), [[1e-3, ours * 1e-3, 1], [1, ours, 9]], 4, 0.5)

        patch.setattr(Faster, "_measured", measured)
        patch.setattr(tw.Communicator, "_measure", timed)
        patch.setattr(leaving, "AGAIN", AGAIN)


class Layers(torch.nn.Sequential):  # type: ignore[misc, name-defined]
    """Layers of which one may be skipped."""

    skip = -1

    def forward(self, x: Any) -> Any:
        for number, layer in enumerate(self):
            x = x if number == self.skip else layer(x)
        return x


class OwnGather:
    """A hook of the user's, around PyTorch's own."""

    def __init__(self, inner: Any = None) -> None:
        self.inner, self.calls = inner, 0

    def allocate(self, size: Any, *, dtype: Any, device: Any) -> Any:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.calls += 1
        return self.inner(*args, **options)


def make(mesh: Any, reshard: Any = None, sizes: Any = (64, 64, 96, 128), **policy: Any) -> Any:
    torch.manual_seed(0)
    # Of different sizes.
    layers = [torch.nn.Linear(*pair) for pair in itertools.pairwise(sizes)]
    model = Layers(*layers)
    for module in (layers[0], layers[1], model):
        kept = MixedPrecisionPolicy(**policy)
        fully_shard(module, mesh=mesh, mp_policy=kept, reshard_after_forward=reshard)
    return model


def step(model: Any, number: int = 0) -> list[Any]:
    """A forward and a backward; the gradients."""
    model.zero_grad()
    torch.manual_seed(10 * number + dist.get_rank())
    model(torch.randn(4, 64)).square().mean().backward()
    return [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad.clone()
            for p in model.parameters()]  # fmt: skip


def same(xs: list[Any], ys: list[Any]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(xs, ys, strict=True))


def alike(xs: list[Any], ys: list[Any]) -> bool:
    return all(torch.allclose(x, y, atol=1e-6) for x, y in zip(xs, ys, strict=True))


def comms(model: Any, kind: Any) -> list[Any]:
    return [Communication(m, kind).current() for _, m in fsdp.fsdp_modules(model)]


def ours(model: Any) -> list[int]:
    """How many hooks of each kind are set, those that count left out."""
    found = []
    for kind in ("all_gather", "reduce_scatter"):
        hooks = [c for c in comms(model, kind) if type(c).__module__.startswith("tightwire")]
        found.append(sum(not isinstance(c, Counting) for c in hooks))
    return found


def own_of(model: Any) -> list[Any]:
    """What hooks of this package take for PyTorch's own."""
    modules = [m for _, m in fsdp.fsdp_modules(model)]
    kinds: tuple[Any, ...] = ("all_gather", "reduce_scatter")
    return [Communication(m, kind).own for m in modules for kind in kinds]


def until_back(model: Any, number: int = 10) -> None:
    """Steps until hooks are set again."""
    steps = 0
    while ours(model) != [3, 3]:
        step(model, number + steps)
        steps += 1
        assert steps < 10


def refuse(patch: pytest.MonkeyPatch) -> None:
    """From here on no hook may be called."""

    def never(*args: Any, **options: Any) -> None:
        raise AssertionError("a hook was called")

    for kind in (prepared_fsdp._Gather, prepared_fsdp._Scatter, fsdp._AutoHook):
        patch.setattr(kind, "__call__", never)
        patch.setattr(kind, "allocate", never)


def fsdp_by(says: Says, mesh: Any, options: dict[str, Any]) -> None:
    """Hooks leave, no code of theirs is called, and they come back."""
    plain = make(mesh)
    before = comms(plain, "all_gather"), comms(plain, "reduce_scatter")
    model = make(mesh)
    own = comms(model, "all_gather"), comms(model, "reduce_scatter")
    says.native |= {"gather": True, "scatter": True}
    hooks = fsdp.compress(model, **options)
    assert ours(model) == [3, 3]
    step(model)
    assert ours(model) == [0, 0]
    # PyTorch's own objects are there again, and a module has one counter for what left with it.
    for kind, objects in zip(("all_gather", "reduce_scatter"), own, strict=True):
        now = comms(model, kind)
        counting = [c for c in now if isinstance(c, Counting)]
        expected = 3 if kind == "all_gather" or "algorithm" in options else 0
        assert len(counting) == expected
        assert [c.own if isinstance(c, Counting) else c for c in now] == objects
        assert {type(c) for c in objects} == {type(c) for c in before[kind != "all_gather"]}
    sent = [hook.wire_bytes for hook in hooks]
    with pytest.MonkeyPatch.context() as patch:
        refuse(patch)
        # The bits of a step without hooks.
        assert same(step(model, 1), step(plain, 1))
    assert sent == [hook.wire_bytes for hook in hooks]
    # They come back, look again, and stay.
    says.native |= {"gather": False, "scatter": False}
    asked = len(says.asked)
    until_back(model)
    step(model)
    assert {"gather", "scatter"} <= set(says.asked[asked:])
    assert all(hook.wire_bytes > old for hook, old in zip(hooks, sent, strict=True))
    assert ours(model) == [3, 3]
    asked = len(says.asked)
    for k in range(3):
        assert alike(step(model, k), step(plain, k))
    assert len(says.asked) == asked
    hooks.close()
    with pytest.raises(tw.CollectiveError, match="closed"):
        step(model)


def others_are_respected(says: Says, mesh: Any) -> None:
    """Closed while away; set by others; installed anew."""
    says.native |= {"gather": True, "scatter": True}
    model = make(mesh)
    own = comms(model, "all_gather")
    hooks = fsdp.compress(model, route="auto")
    step(model)
    assert ours(model) == [0, 0]
    # Those that are made now know PyTorch's own.
    again = fsdp.compress(model, route="auto")
    for k in range(2 * AGAIN):
        step(model, k)
        if k == 1:
            assert ours(model) == [0, 0]
    assert [getattr(c, "own", c) for c in comms(model, "all_gather")] == own
    there = ours(model)
    hooks.close()
    assert ours(model) == there
    again.close()
    assert ours(model) == [3, 3]
    with pytest.raises(tw.CollectiveError, match="closed"):
        step(model)


AUTO: tuple[dict[str, Any], ...] = ({"route": "auto"}, {"algorithm": "auto"})


def newer_hooks_win(says: Says, mesh: Any, first: dict[str, Any], second: dict[str, Any]) -> None:
    """Hooks know what was there before any of this package; replaced ones never come back."""
    plain = make(mesh)
    for closed in ("before", "away", "back"):
        says.native |= {"gather": True, "scatter": True}
        model = make(mesh)
        own = own_of(model)
        old = fsdp.compress(model, **first)
        for k in range(2):
            step(model, k)
        assert own_of(model) == own
        if closed == "before":
            old.close()
        new = fsdp.compress(model, **second)
        assert own_of(model) == own
        assert ours(model) == [3, 3]
        sent = [hook.wire_bytes for hook in old]
        step(model)
        assert ours(model) == [0, 0]
        if closed == "away":
            old.close()
        assert ours(model) == [0, 0]
        assert same(step(model, 1), step(plain, 1))
        says.native |= {"gather": False, "scatter": False}
        until_back(model)
        if closed == "back":
            old.close()
        assert alike(step(model, 2), step(plain, 2))
        assert sent == [hook.wire_bytes for hook in old]
        new.close()
        with pytest.raises(tw.CollectiveError, match="closed"):
            step(model)


def through_all_hooks(says: Says, mesh: Any) -> None:
    """A hook of the user's is found below any chain, and may be set above one."""
    says.native |= {"gather": True, "scatter": True}
    plain, model = make(mesh), make(mesh)
    users = OwnGather(Communication(model, "all_gather").own)
    for _, m in fsdp.fsdp_modules(model):
        m.set_custom_all_gather(users)
    feedback: dict[str, Any] = {"gradients": "mx", "error_feedback": tw.ErrorFeedback()}
    for options in ({}, feedback, {"weight_differences": True}, {"route": "network"}, *AUTO):
        hooks = fsdp.compress(model, **options)
        assert own_of(model)[::2] == [users] * 3
        step(model)
    assert ours(model) == [0, 0]
    calls = users.calls
    assert same(step(model, 1), step(plain, 1))
    assert users.calls > calls
    # Set while the hooks are away: they leave it alone.
    another = OwnGather(users)
    model.set_custom_all_gather(another)
    assert own_of(model)[0] is another
    hooks.close()
    assert comms(model, "all_gather")[0] is another
    # One that was set without `compress` tells nothing.
    model = make(mesh)
    model.set_custom_all_gather(fsdp.AllGather())
    own = own_of(model)
    with fsdp.compress(model, route="auto"):
        step(model)
        assert ours(model) == [0, 0]
        assert {type(c) for c in own[::2]} == {type(Communication(model[0], "all_gather").own)}
        assert same(step(model, 1), step(plain, 1))


def others_count_on(says: Says, mesh: Any) -> None:
    """Hooks come back whatever module is called no longer."""
    for skip, options in itertools.product(range(2), AUTO):
        says.native |= {"gather": True, "scatter": True}
        model = make(mesh, sizes=(64, 64, 64, 64))
        with fsdp.compress(model, **options):
            step(model)
            assert ours(model) == [0, 0]
            says.native |= {"gather": False, "scatter": False}
            model.skip = skip
            model[skip].requires_grad_(False)
            steps = 0
            while ours(model) != [3, 3]:
                model.zero_grad()
                model(torch.randn(4, 64)).square().mean().backward()
                steps += 1
                assert steps <= AGAIN


def some_stay(says: Says, mesh: Any) -> None:
    """A module leaves with all that it does, or not at all."""
    plain = make(mesh)
    for gather, scatter in ((True, False), (False, True)):
        says.native |= {"gather": gather, "scatter": scatter}
        model = make(mesh)
        with fsdp.compress(model, route="auto") as hooks:
            for k in range(3):
                assert alike(step(model, k), step(plain, k))
            assert ours(model) == [3, 3]
            assert (hooks.all_gather.wire_bytes == 0) == gather
            assert (hooks.reduce_scatter.wire_bytes == 0) == scatter
    # One without gradients has nothing else to do.
    says.native |= {"gather": True, "scatter": False}
    model = make(mesh)
    model[0].requires_grad_(False)
    with fsdp.compress(model, route="auto"):
        model(torch.ones(2, 64)).sum().backward()
        assert ours(model) == [2, 2]
    # With what sums narrower there is nothing to compare, but hooks leave alike.
    says.native |= {"gather": True, "scatter": True}
    model = make(mesh, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with fsdp.compress(model, route="auto", wire="bfloat16"):
        step(model)
        assert ours(model) == [0, 0]
    # Error feedback keeps what the hooks know.
    model = make(mesh)
    with fsdp.compress(model, algorithm="auto", gradients="mx", error_feedback=tw.ErrorFeedback()):
        step(model)
        assert ours(model)[1] == 3


def buckets(says: Says, options: dict[str, Any]) -> None:
    """A hook of DistributedDataParallel hands buckets to PyTorch's own, and takes them again."""
    says.native |= {"gather": True, "scatter": True, "bucket": True}
    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 64) for _ in range(4)]
    plain = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.02)
    # Without a hook it multiplies by the inverse of the number of ranks.
    plain.register_comm_hook(None, allreduce_hook)
    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 64) for _ in range(4)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.02)
    with pytest.MonkeyPatch.context() as patch:
        handed: list[int] = []
        for module in (prepared_ddp, ddp_module):
            original = module.allreduce_hook

            def noted(group: Any, bucket: Any, original: Any = original) -> Any:
                handed.append(bucket.index())
                return original(group, bucket)

            patch.setattr(module, "allreduce_hook", noted)
        with ddp.register(model, **options) as hook:
            # After the first step there are other buckets.
            for k in range(2):
                assert alike(step(model, k), step(plain, k))
            sent = hook.wire_bytes
            handed.clear()
            with pytest.MonkeyPatch.context() as inner:
                inner.setattr(prepared_ddp.PreparedDdpHook, "average", None)
                inner.setattr(ddp_module.DdpHook, "_average", None)
                assert same(step(model, 2), step(plain, 2))
            assert len(handed) > 1
            assert hook.wire_bytes == sent
            says.native |= {"gather": False, "scatter": False, "bucket": False}
            steps = 0
            while handed:
                handed.clear()
                assert alike(step(model, steps), step(plain, steps))
                steps += 1
            assert AGAIN - 1 <= steps <= AGAIN + 1
            assert hook.wire_bytes > sent
        with pytest.raises(tw.CollectiveError, match="closed"):
            step(model)


def everything(device: Any) -> None:
    """All of it on one rank."""
    torch.set_default_device(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    with pytest.MonkeyPatch.context() as patch:
        says = Says(patch)
        for options in AUTO:
            fsdp_by(says, mesh, options)
            buckets(says, options)
            for first in ({}, {"route": "network"}, *AUTO):
                newer_hooks_win(says, mesh, first, options)
        through_all_hooks(says, mesh)
        others_count_on(says, mesh)
        others_are_respected(says, mesh)
        some_stay(says, mesh)


def several_groups(device: Any) -> None:
    """Where FSDP gathers by half the ranks in backward hooks stay, as halves may differ."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with pytest.MonkeyPatch.context() as patch:
        says = Says(patch)
        for options, says.pairs in itertools.product(AUTO, ((True, False), (True, True))):
            says.native |= {"gather": False, "scatter": False}
            plain, model = make(mesh, reshard=2), make(mesh, reshard=2)
            assert [len(gather_groups(m)) for _, m in fsdp.fsdp_modules(model)] == [2] * 3
            for each in (plain, model):
                # The outermost module has one group.
                each.set_reshard_after_forward(True, recurse=False)
            with fsdp.compress(model, **options) as hooks:

                def until(left: list[list[int]], model: Any = model, plain: Any = plain) -> None:
                    """Steps until so many hooks have been set, one after the other."""
                    for k, wanted in enumerate(left):
                        steps = 0
                        while ours(model) != wanted:
                            assert alike(step(model, k), step(plain, k))
                            steps += 1
                            assert steps < 2 * AGAIN

                step(model)
                for hook in hooks:
                    for group in getattr(hook, "switches", getattr(hook, "_channels", ())):
                        # As if hooks had been away.
                        hook.away._renew(group)
                says.native |= {"gather": True, "scatter": True}
                until([[2, 2], [3, 3], [2, 2]])
                # Nothing that halves have found counts any more.
                for each in (plain, model):
                    each.set_reshard_after_forward(True)
                until([[0, 0]])
                assert same(step(model, 5), step(plain, 5))
                says.native |= {"gather": False, "scatter": False}
                until([[3, 3]])
                assert alike(step(model, 6), step(plain, 6))


class FakeCommunication:
    """What hooks need to know of a communication, without FSDP."""

    newest = True

    def __init__(self) -> None:
        self.own = OwnGather()
        self.now: Any = "hook"

    def current(self) -> Any:
        return self.now

    def set(self, comm: Any) -> None:
        self.now = comm

    def is_newest(self) -> bool:
        return self.newest


def test_hooks_come_back_by_their_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaving, "AGAIN", 2)
    renewed: list[str] = []
    away = AwayHooks(renewed.append)
    all_groups = ({"a"}, {"a", "b"}, {"b"}, {"c"}, {"a"}, {"a"})
    places: list[Any] = [FakeCommunication() for _ in all_groups]
    places[4].newest = False
    places[5].now = "another"
    replaced: Any = FakeCommunication()
    replaced.now = "another"
    for groups, place in zip(all_groups, places, strict=True):
        away.put_away(groups, [(replaced, "hook"), (place, "hook")])
    assert places[5].now == "another"
    last = places[1].now
    for _ in range(2):
        last.own = lambda *args: None
        last()
    assert [place.now == "hook" for place in places] == [True, True, True, False, False, False]
    assert sorted(renewed) == ["a", "b"]
    away.close()
    assert [place.now == "hook" for place in places] == [True] * 4 + [False] * 2


class FakeBucket:
    """A bucket of gradients."""

    def __init__(self, index: int, size: int, dtype: Any = torch.float32) -> None:
        self._index, self._buffer = index, torch.empty(size, dtype=dtype)

    def index(self) -> int:
        return self._index

    def buffer(self) -> Any:
        return self._buffer


def test_any_bucket_ends_it_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaving, "AGAIN", 3)
    renewed: list[bool] = []
    native = NativeBuckets(lambda: renewed.append(True))
    kept, gone = FakeBucket(0, 5), FakeBucket(1, 6)
    native.add(kept)
    native.add(gone)
    assert not native.take(FakeBucket(0, 6))
    assert not native.take(FakeBucket(0, 5, torch.bfloat16))
    # The model has made other buckets, and one of them is as before.
    assert [native.take(kept) for _ in range(4)] == [True, True, True, False]
    assert renewed == [True]
    assert not native.take(gone)


@pytest.mark.slow
def test_several_groups(tmp_path: Path) -> None:
    launch(__file__, "several_groups", 4, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.long)])
def test_between_processes(world_size: int, tmp_path: Path) -> None:
    launch(__file__, "everything", world_size, tmp_path)


@pytest.mark.multi_gpu
def test_on_gpus(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    launch(__file__, "everything", 2, tmp_path, "cuda", "default")


if __name__ == "__main__":
    join(globals(), sys.argv[1:])
