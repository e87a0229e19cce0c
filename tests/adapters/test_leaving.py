"""Hooks that leave communication to PyTorch while that is faster: what real processes run."""

from __future__ import annotations

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
from tightwire.adapters.training.leaving import Communication, Counting  # noqa: E402

#: Calls after which hooks come back; a module takes two gathers a step.
AGAIN = 4


class Says:
    """What is measured, by kind of call: whether PyTorch's own calls are the faster ones."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.native: dict[str, bool] = {"gather": True, "scatter": True, "bucket": True}
        self.asked: list[str] = []

        def measured(switch: Faster, key: Any, native: Any, ours: Any, like: Any) -> bool:
            # Both ways are tried, as they are when they are timed.
            native()
            ours()
            found = "bucket" if isinstance(key[-1], int) else "scatter"
            found = "gather" if len(key) == 3 else found
            self.asked.append(found)
            return self.native[found]

        def timed(comm: tw.Communicator, collective: str, *rest: Any) -> Measured:
            kind = {"all_gather": "gather", "reduce_scatter": "scatter"}[collective]
            self.asked.append(kind)
            ours = 2.0 if self.native[kind] else 0.1
            return Measured((1 << 10, 1 << 20), [[1e-3, ours * 1e-3, 1], [1, ours, 9]], 4, 0.5)

        patch.setattr(Faster, "_measured", measured)
        patch.setattr(tw.Communicator, "_measure", timed)
        patch.setattr(leaving, "AGAIN", AGAIN)


def make(mesh: Any, **policy: Any) -> Any:
    torch.manual_seed(0)
    # Of different sizes.
    layers = [torch.nn.Linear(64, 64), torch.nn.Linear(64, 96), torch.nn.Linear(96, 128)]
    model = torch.nn.Sequential(*layers)
    for module in (layers[0], layers[1], model):
        fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(**policy))
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


def refuse(patch: pytest.MonkeyPatch) -> None:
    """From here on no hook may be called."""

    def never(*args: Any, **options: Any) -> None:
        raise AssertionError("a hook was called")

    for kind in (prepared_fsdp._Gather, prepared_fsdp._Scatter, fsdp._Leaving):
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
    # PyTorch's own objects are there again, but for one that counts.
    for kind, objects in zip(("all_gather", "reduce_scatter"), own, strict=True):
        now = comms(model, kind)
        counting = [c for c in now if isinstance(c, Counting)]
        expected = 1 if kind == "all_gather" or "algorithm" in options else 0
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
    steps = 0
    while ours(model) != [3, 3]:
        step(model, 2 + steps)
        steps += 1
        assert steps < 10
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
    hooks.close()
    again.close()
    assert ours(model) == [3, 3]
    with pytest.raises(tw.CollectiveError, match="closed"):
        step(model)


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
        for options in ({"route": "auto"}, {"algorithm": "auto"}):
            fsdp_by(says, mesh, options)
            buckets(says, options)
        others_are_respected(says, mesh)
        some_stay(says, mesh)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
def test_between_processes(world_size: int, tmp_path: Path) -> None:
    launch(__file__, "everything", world_size, tmp_path)


@pytest.mark.multi_gpu
def test_on_gpus(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    launch(__file__, "everything", 2, tmp_path, "cuda", "default")


if __name__ == "__main__":
    join(globals(), sys.argv[1:])
