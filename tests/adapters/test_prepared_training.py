"""Training by prepared calls between real processes, in all the ways that people train.

Bits are compared with those of plain gloo: two ranks add two numbers, whose sum has no order. This
file is also what the processes run.
"""

from __future__ import annotations

import itertools
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from capacities import Scheduled, schedule
from processes import join, launch

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("PyTorch was built without gloo", allow_module_level=True)
pytest.importorskip("torch.distributed.fsdp")
if not hasattr(torch.distributed.fsdp.FSDPModule, "set_custom_reduce_scatter"):
    pytest.skip("this PyTorch has no custom collectives", allow_module_level=True)

from torch.distributed.checkpoint.state_dict import get_model_state_dict  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from interrupt import Interrupt  # noqa: E402
from tightwire.adapters.collectives.prepared_work import Work  # noqa: E402
from tightwire.adapters.training import ddp, fsdp  # noqa: E402
from tightwire.adapters.training.leaving import param_groups  # noqa: E402
from tightwire.adapters.training.prepared_hooks import EndOfBackward, peers_of  # noqa: E402

ERROR = KeyError("in the middle of backward")

WIDTH = 72


def test_peers_wait_about_as_long_as_the_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that saves a checkpoint is late by more than a moment."""
    from tightwire.adapters.transports import symmetric

    found: list[float] = []
    monkeypatch.setattr(
        symmetric, "SymmetricMemory", lambda group, device, timeout: found.append(timeout)
    )
    dist.init_process_group(
        "gloo", f"file://{tmp_path}/store", rank=0, world_size=1, timeout=timedelta(minutes=7)
    )
    try:
        groups = None, dist.new_group(), dist.new_group(timeout=timedelta(minutes=3))
        for group in groups:
            peers_of("peers", group, torch.device("cpu"), "a test")
    finally:
        dist.destroy_process_group()
    assert found == pytest.approx([336, 336, 144])


def test_a_hook_remembers_calls(tmp_path: Path) -> None:
    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        x = torch.ones(2, 8)
        replica = DistributedDataParallel(torch.nn.Linear(8, 8))
        hook = ddp.register(replica, route="network", trace=3)
        quiet = DistributedDataParallel(torch.nn.Linear(8, 8))
        none = ddp.register(quiet, route="network")
        for _ in range(5):
            for each in (replica, quiet):
                each(x).sum().backward()
        found = hook.trace()
        assert not none.trace()
        hook.close()
        none.close()
    finally:
        dist.destroy_process_group()
    assert [record.collective for record in found] == ["all_reduce"] * 3
    assert all(record.raw_bytes == 0 < record.seconds["encode"] for record in found)


def test_every_backward_that_asks_is_told_once_also_behind_one_that_raised() -> None:
    told: list[int] = []
    end = EndOfBackward(lambda: told.append(1))
    assert not end.ask()

    class Asks(torch.autograd.Function):  # type: ignore[misc, name-defined]
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            assert end.ask()
            return gradient

    x = torch.ones(3, requires_grad=True)
    for step in range(5):
        Interrupt.armed = ERROR if step == 2 else None
        y = Asks.apply(Asks.apply(Interrupt.apply(Asks.apply(x))))
        if Interrupt.armed:
            with pytest.raises(KeyError):
                y.sum().backward()
            assert not told
        else:
            y.sum().backward()
            assert told == [1]
        told.clear()


def test_parameter_groups_of_all_versions() -> None:
    def module(**state: Any) -> Any:
        return SimpleNamespace(_get_fsdp_state=lambda: SimpleNamespace(**state))

    assert param_groups(module(_fsdp_param_groups=["a", "b"])) == ["a", "b"]
    assert param_groups(module(_fsdp_param_group="a")) == ["a"]
    assert param_groups(module(_fsdp_param_group=None)) == []


class Block(torch.nn.Module):  # type: ignore[misc, name-defined]
    """Modules of one size, which share memory of prepared calls; how they are run is an option."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.mode = mode
        self.first = torch.nn.Linear(WIDTH, WIDTH)
        self.last = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        if mode == "frozen":
            self.last.requires_grad_(False)

    def inner(self, x: Any) -> Any:
        hidden = self.first(x).relu()
        if self.mode == "unused":
            return x + hidden
        return x + self.last(Interrupt.apply(hidden) if self.mode == "interrupted" else hidden)

    def forward(self, x: Any) -> Any:
        if self.mode == "checkpointed inside":
            return checkpoint(self.inner, x, use_reentrant=False)
        return self.inner(x)


class Model(torch.nn.Sequential):  # type: ignore[misc, name-defined]
    def forward(self, x: Any) -> Any:
        for block in self:
            mode = getattr(block, "mode", "")
            if mode in ("reentrant", "checkpointed"):
                x = checkpoint(block, x, use_reentrant=mode == "reentrant")
            else:
                x = block(x)
        return x


def make(mode: str) -> Any:
    """An FSDP2 model, the same on every rank."""
    torch.manual_seed(1)
    blocks = [Block(mode) for _ in range(4)]
    model = Model(*blocks, torch.nn.Linear(WIDTH, 5))
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    if mode == "replicas":
        mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("copy", "shard"))
    narrow, wide = torch.bfloat16, torch.float32
    policies = {
        "mixed": MixedPrecisionPolicy(param_dtype=narrow, reduce_dtype=wide),
        "narrow": MixedPrecisionPolicy(param_dtype=narrow),
    }
    policy = policies.get(mode, MixedPrecisionPolicy())
    for module in (*blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    if mode == "compiled":
        for block in blocks:
            block.compile(backend="aot_eager")
    return model


def train(model: Any, mode: str) -> list[float]:
    """Losses of some steps, and everything else that people do between them."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    torch.manual_seed(100 + dist.get_rank())
    losses = []
    for step in range(4):
        Interrupt.armed = ERROR if mode == "interrupted" and step == 1 else None
        for last in (False, False, True) if mode in ("accumulated", "summed") else (True,):
            if mode == "accumulated":
                model.set_requires_gradient_sync(last)
            # Batches of several sizes.
            x = torch.randn(3 + step, WIDTH, requires_grad=mode == "reentrant")
            loss = model(x).float().square().mean()
            try:
                loss.backward()
            except KeyError:
                assert Interrupt.armed
                optimizer.zero_grad()
            losses.append(loss.item())
        if Interrupt.armed:
            continue
        if mode == "clipped":
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            losses.append(norm.full_tensor().item())
        optimizer.step()
        optimizer.zero_grad()
        if mode == "evaluated":
            model.eval()
            with torch.no_grad():
                losses += [model(torch.ones(2, WIDTH)).sum().item() for _ in range(3)]
            model.train()
        if mode == "saved":
            state = get_model_state_dict(model)
            losses += [float(p.full_tensor().double().sum()) for p in state.values()]
    return losses


def bits(model: Any) -> list[Any]:
    """This rank's shards, as bytes."""
    for module in (*model, model):
        if isinstance(module, torch.distributed.fsdp.FSDPModule):
            module.reshard()
    return [p.to_local().contiguous().view(torch.uint8) for p in model.parameters()]


def same(model: Any, reference: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(bits(model), bits(reference), strict=True))


MODES = (
    "plain",
    "clipped",
    "accumulated",
    "summed",
    "mixed",
    "narrow",
    "evaluated",
    "saved",
    "reentrant",
    "checkpointed",
    "checkpointed inside",
    "compiled",
    "frozen",
    "unused",
    "interrupted",
)


def ways(modes: tuple[str, ...]) -> dict[str, Any]:
    """Training has the bits that it has without hooks, also if no message fits."""
    again = schedule()
    found: dict[str, Any] = {}
    for mode in modes:
        Scheduled.small = False
        reference = make(mode)
        losses = train(reference, mode)
        for small in (False, True):
            Scheduled.small = small
            again.clear()
            model = make(mode)
            hooks = fsdp.compress(model, route="network")
            assert train(model, mode) == losses, (mode, small)
            assert same(model, reference), (mode, small)
            assert not hooks.reduce_scatter._late, mode
            assert all(work.judged for work in hooks.all_gather._made), mode
            found[f"{mode}, {small}"] = dict(again)
            hooks.close()
    return found


def modes(device: Any) -> dict[str, Any]:
    """What people do between steps, and with dtypes."""
    return ways(MODES[:8])


def more(device: Any) -> dict[str, Any]:
    """How modules are run."""
    return ways(MODES[8:])


def replicas(device: Any) -> dict[str, Any]:
    """The same of HSDP: FSDP itself sums over replicas, so that sums are judged at once."""
    return ways(("replicas",))


def together(device: Any) -> dict[str, Any]:
    """Two models whose steps mix; hooks that end and are set again; states in between."""
    found: list[list[Any]] = []
    for hooked in (False, True):
        models = [make("plain"), make("narrow")]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        torch.manual_seed(dist.get_rank())
        values: list[Any] = []
        hooks: list[Any] = []
        for step in range(4):
            if hooked and step % 2 == 0:
                for one in hooks:
                    one.close()
                hooks = [fsdp.compress(model, route="network") for model in models]
            first, second = (m(torch.randn(3, WIDTH)).float().square().mean() for m in models)
            second.backward()
            first.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            # A gather is under way, for which nobody has waited yet.
            models[0].unshard(async_op=True)
            state = get_model_state_dict(models[1])
            values += [value.full_tensor() for value in state.values()]
            values += [first.detach(), second.detach()]
        found.append([*values, *bits(models[0]), *bits(models[1])])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    return {}


def late(device: Any) -> dict[str, Any]:
    """Sums that always fit stand between others, and the device of rank 1 is far behind."""
    found = []
    done = Work.done

    def behind(self: Work) -> bool:
        return self.judged if dist.get_rank() == 1 and not self.may_change else done(self)

    Scheduled.small = True
    again = schedule()
    for hooked in (False, True):
        torch.manual_seed(0)
        # Of the smallest nothing is compressed.
        widths = [WIDTH + 8 * k for k in range(5)]
        layers = [torch.nn.Linear(a, b) for a, b in itertools.pairwise([*widths, 2, WIDTH, 2])]
        model = torch.nn.Sequential(*layers)
        for module in (*model, model):
            fully_shard(module)
        hooks = fsdp.compress(model, route="network", trace=3) if hooked else None
        Work.done = behind if hooked else done  # type: ignore[method-assign]
        torch.manual_seed(dist.get_rank())
        for _ in range(2):
            model(torch.randn(3, WIDTH)).square().mean().backward()
        found.append([p.grad.to_local() for p in model.parameters()])
        if hooks is not None:
            assert not hooks.reduce_scatter._late
            assert not hooks.reduce_scatter._settled
            for kind, hook in hooks._asdict().items():
                records = hook.trace()
                assert [record.collective for record in records] == [kind] * 3
                assert all("exchange" in record.seconds for record in records)
    Work.done = done  # type: ignore[method-assign]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    return {"late, True": dict(again)}


def check_again(found: dict[str, Any]) -> None:
    for case, again in found.items():
        assert bool(again) == case.endswith("True"), case


@pytest.mark.slow
@pytest.mark.parametrize("task", ["modes", "more", "replicas", "together", "late"])
def test_every_way_to_train(task: str, tmp_path: Path) -> None:
    world_size = 4 if task == "replicas" else 2
    for found in launch(__file__, task, world_size, tmp_path, warnings="ignore"):
        check_again(found)


if __name__ == "__main__":
    join(globals(), sys.argv[1:])
