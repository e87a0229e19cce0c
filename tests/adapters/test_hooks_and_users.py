"""Hooks beside what users do themselves, between real processes: this file is also a rank."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import time
import warnings
import weakref
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
from torch.optim.swa_utils import AveragedModel  # noqa: E402

from tightwire.adapters.collectives.calls import Call  # noqa: E402
from tightwire.adapters.collectives.prepared_work import Work  # noqa: E402
from tightwire.adapters.training import ddp, tagc  # noqa: E402
from tightwire.adapters.training.prepared_fsdp import GatherWork, PreparedGather  # noqa: E402

WIDTH = 64


def sharded(mesh: Any = None) -> Any:
    torch.manual_seed(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    for module in (*model, model):
        fully_shard(module, mesh=mesh or init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def replica(group: Any = None) -> Any:
    torch.manual_seed(1)
    return DistributedDataParallel(torch.nn.Linear(WIDTH, WIDTH), process_group=group)


def step(model: Any, seed: int = 0) -> Any:
    """Gradients of one step, and leaves none."""
    torch.manual_seed(10 * seed + dist.get_rank())
    model(torch.randn(3, WIDTH)).square().mean().backward()
    found = [getattr(p.grad, "_local_tensor", p.grad).clone() for p in model.parameters()]
    model.zero_grad()
    return found


def same(xs: Any, ys: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(xs, ys, strict=True))


def messages(_: Any) -> None:
    """The user's own messages in the group of the hooks, with the default tag, in every order."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    to, source = (rank + 1) % ranks, (rank - 1) % ranks
    fully, many = sharded(), replica()
    tw.fsdp.compress(fully, route="network")
    ddp.register(many, route="network")
    for model in (fully, many):
        # As long as a message of the hook, shorter and longer.
        for n in (16, 1 << 16):
            for first in ("receive", "send", "any"):
                x, out = torch.full((n,), 7.0 + rank), torch.zeros(n)
                loss = model(torch.randn(3, WIDTH)).square().mean()
                works = []
                if first == "send":
                    works.append(dist.isend(x, to))
                else:
                    works.append(dist.irecv(out, source if first == "receive" else None))
                loss.backward()
                if first == "send":
                    works.append(dist.irecv(out, source))
                else:
                    works.append(dist.isend(x, to))
                for work in works:
                    work.wait()
                assert bool((out == 7 + source).all())


def refused(_: Any) -> list[str]:
    """What is raised, at once, if ranks have other hooks."""
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"route": "network", "ahead": 0}, {"route": "network", "ahead": 2}),
        ({"route": "network"}, {"route": "exact"}),
        ({"route": "auto", "ahead": 2}, {"route": "network"}),
    ]
    rank, found = dist.get_rank(), []
    start = time.monotonic()
    for options in cases:
        model = sharded()
        tw.fsdp.compress(model, **options[rank])
        with pytest.raises(tw.CollectiveError) as caught:
            step(model)
        found.append(str(caught.value))
        with pytest.raises(tw.CollectiveError) as caught:
            ddp.register(replica(), route=("network", "exact")[rank])
        found.append(str(caught.value))
    with pytest.raises(tw.CollectiveError) as caught:
        tw.moe.connect(4, route=("network", "auto")[rank])
    found.append(str(caught.value))
    with pytest.raises(tw.CollectiveError) as caught:
        parallel = tw.tensor_parallel.connect("mx", "mx", route=("network", "exact")[rank])
        parallel.copy(torch.ones(4, WIDTH, requires_grad=True)).sum().backward()
    found.append(str(caught.value))
    assert time.monotonic() - start < 30
    return found


def hooked(kind: str, group: Any = None) -> tuple[Any, Any, Any]:
    """A model, the state of its hook, and the hook."""
    model = replica(group)
    if kind == "tagc":
        rule = tagc.Rule(nelem=1)
        return model, tagc.register(model, tagc.Tagc(ratio=4, layers=rule)), tagc.ddp_hook
    if kind == "network":
        return model, ddp.register(model, route="network"), ddp.prepared_ddp_hook
    options: dict[str, Any] = {"error_feedback": tw.ErrorFeedback(), "codec": "nvfp4"}
    return model, ddp.register(model, **(options if kind == "lossy" else {})), ddp.ddp_hook


def copies(_: Any) -> None:
    """Copies of models, which PyTorch has use no hook, and of hooks, which connect anew."""
    for kind in ("exact", "lossy", "network", "tagc"):
        model, state, hook = hooked(kind)
        before = step(model)
        assert state.wire_bytes > 0
        averaged = AveragedModel(model)
        averaged.update_parameters(model)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            (_, copied), *rest = other._comm_hooks
            assert not rest
            assert copied is not state
            assert copied.wire_bytes == copied.raw_bytes == 0
            copied.close()
            if kind == "lossy":
                kept = (s.error_feedback.state_dict()["residuals"] for s in (state, copied))
                assert same(*(list(residuals.values()) for residuals in kept))
        # PyTorch has the copy of a model use no hook, unless it is given one.
        other = copy.deepcopy(model)
        copied = other._comm_hooks[0][1]
        other.register_comm_hook(copied, hook)
        # Others depend on buckets, which PyTorch makes anew after the first step.
        assert same(step(other, 1), step(model, 1)) or kind in ("lossy", "tagc")
        assert copied.wire_bytes > 0
        copied.close()
        if kind in ("exact", "network"):
            assert same(step(model), before)
        else:
            assert not same(step(model), before)
        again = copy.deepcopy(model)
        ddp.register(again, route="network")
        step(again)
        state.close()
    # PyTorch copies no models of other groups; a state alone can be copied.
    other = dist.new_group()
    for kind in ("exact", "network", "tagc"):
        model, state, _ = hooked(kind, other)
        with pytest.warns(RuntimeWarning, match="the copy uses the default one"):
            copy.deepcopy(state)
        state.close()
    comm = tw.Communicator(tw.adapters.transports.torch_dist.TorchDist.new_group())
    model = replica()
    ddp.register(model, comm)
    other = copy.deepcopy(model)
    copied = other._comm_hooks[0][1]
    with pytest.raises(TypeError, match="is a copy, which has no communicator"):
        _ = copied.comm
    other.register_comm_hook(copied, ddp.ddp_hook)
    with pytest.raises(TypeError, match="register a hook on the model that was copied"):
        step(other)


def removed(_: Any) -> None:
    """Hooks leave a model, which goes on with what it had, and may be compressed again."""
    reference = step(sharded())
    model = sharded()
    own = [m._get_fsdp_state()._fsdp_param_group for m in model]
    default = [(type(g._all_gather_comm), type(g._reduce_scatter_comm)) for g in own]
    ways: list[dict[str, Any]] = [
        {"route": "network"},
        {"route": "auto"},
        {},
        {"algorithm": "auto"},
        {"weight_differences": True},
        {"route": "network", "ahead": 2},
    ]
    for options in ways:
        hooks = tw.fsdp.compress(model, **options)
        for _ in range(4):
            assert same(step(model), reference)
        raw = hooks.all_gather.raw_bytes
        assert raw > 0 or "auto" in options.values()
        hooks.remove()
        hooks.remove()
        assert [(type(g._all_gather_comm), type(g._reduce_scatter_comm)) for g in own] == default
        assert same(step(model), reference)
        assert hooks.all_gather.raw_bytes == raw
    sketched = tw.tagc.compress(model, tw.tagc.Tagc(ratio=4))
    step(model)
    sketched.remove()
    assert same(step(model), reference)
    # What has been replaced since stays.
    first = tw.fsdp.compress(model, route="network")
    second = tw.fsdp.compress(model, route="network")
    first.remove()
    assert same(step(model), reference)
    assert second.all_gather.raw_bytes > 0
    second.remove()
    assert same(step(model), reference)


def replicas(_: Any) -> None:
    """HSDP, where the hooks took the mean over replicas, too."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copy", "shard"))
    reference, model = step(sharded(mesh)), sharded(mesh)
    own = [m._get_fsdp_state()._fsdp_param_group for m in model]
    before = [dict(vars(group)) for group in own]
    hooks = tw.fsdp.compress(model, node=2)
    step(model)
    assert hooks.reduce_scatter.replicas
    hooks.remove()
    assert all(group._is_hsdp for group in own)
    assert same(step(model), reference)
    replicas_go_over(model, reference)
    settings_of_users(model, reference)
    for group, values in zip(own, before, strict=True):
        assert "_tightwire" not in vars(group)
        for name in ("mesh_info", "post_forward_mesh_info", "_all_reduce_hook"):
            assert vars(group)[name] is values[name]


def replicas_go_over(model: Any, reference: Any) -> None:
    """The newest hooks have the replicas, too, whatever becomes of those that they replace."""
    own = [m._get_fsdp_state()._fsdp_param_group for m in model]
    lossy: dict[str, Any] = {"gradients": "mx", "node": 2}
    for end in ("close", "remove", "later"):
        first = tw.fsdp.compress(model, **lossy)
        assert not same(step(model), reference)
        second = tw.fsdp.compress(model, node=2)
        if end != "later":
            getattr(first, end)()
        assert same(step(model), reference), end
        assert second.reduce_scatter.trace()
        second.remove()
        assert same(step(model), reference), end
        first.remove()
        assert all(group._is_hsdp for group in own)
        assert same(step(model), reference), end
    settings = tagc.Tagc(ratio=4, layers=tagc.Rule(nelem=1))
    sketched = tw.tagc.compress(model, settings, node=2)
    tw.fsdp.compress(model, **lossy).close()
    again = tw.tagc.compress(model, settings, node=2)
    sketched.close()
    step(model)
    assert {report.name for report in again.state.reports} >= {"0.weight, replicas"}
    again.close()
    # Hooks without nodes leave the replicas to FSDP.
    without: list[dict[str, Any]] = [{}, {"route": "network"}]
    for options in without:
        hooks = tw.fsdp.compress(model, **options)
        assert all(group._is_hsdp for group in own)
        assert same(step(model), reference)
        hooks.remove()


def settings_of_users(model: Any, reference: Any) -> None:
    """What users have set comes back with FSDP's mean, or stays if it is newer."""
    seen: list[int] = []
    for newer in (False, True):
        model[0].set_all_reduce_hook(None if newer else lambda x: seen.append(1))
        hooks = tw.fsdp.compress(model, node=2)
        if newer:
            model[0].set_all_reduce_hook(lambda x: seen.append(2))
        else:
            step(model)
            assert not seen
        hooks.remove()
        assert same(step(model), reference)
        assert seen.pop() == 1 + newer
        assert not seen
    model[0].set_all_reduce_hook(None)
    group = model[0]._get_fsdp_state()._fsdp_param_group
    for reshards in (False, True):
        hooks = tw.fsdp.compress(model, node=2)
        model[0].set_reshard_after_forward(reshards)
        hooks.remove()
        assert group.post_forward_mesh_info is (group.mesh_info if reshards else None)


def replaced(_: Any) -> None:
    """A hook that another one has replaced is over, whatever was wrong with it."""
    for ahead in (0, 2):
        model = sharded()
        first = tw.fsdp.compress(model, route="network", ahead=ahead)
        step(model)
        gathers, memory = first.all_gather, torch.zeros(WIDTH)
        gathers(memory, torch.ones(WIDTH // dist.get_world_size()), dist.group.WORLD)
        for calls in gathers._calls.values():
            calls.broken = "damage"
        second = tw.fsdp.compress(model, route="network", ahead=ahead)
        step(model)
        with torch.no_grad():
            model(torch.randn(3, WIDTH))
        alive = [weakref.ref(gathers), *map(weakref.ref, gathers._calls.values())]
        assert len(alive) == 2
        del first, gathers, calls
        gc.collect()
        assert [one() for one in alive] == [None, None]
        second.close()


def models_end(_: Any) -> None:
    """Hooks that somebody holds keep no model alive."""
    for options in ({}, {"route": "network", "ahead": 0}, {"route": "auto"}):
        model = sharded()
        hooks = tw.fsdp.compress(model, **options)
        step(model)
        hooks.close()
        alive = [weakref.ref(module) for module in (*model, model)]
        del model
        gc.collect()
        assert [one() for one in alive] == [None] * 4, options
        hooks.remove()


def closed_copies(_: Any) -> None:
    """A copy that was closed before it has connected makes no calls."""
    ways: list[tuple[Any, Any]] = [("exact", ddp.ddp_hook), ("network", ddp.prepared_ddp_hook)]
    for route, hook in ways:
        state = copy.deepcopy(ddp.register(replica(), route=route))
        state.close()
        other = replica()
        other.register_comm_hook(state, hook)
        with pytest.raises(tw.CollectiveError, match="closed"):
            step(other)


def test_what_was_wrong_with_a_gather_is_raised_again() -> None:
    """FSDP keeps what it waits for, and may ask again, also when the hook is closed."""
    hook = PreparedGather("network", codec="mx")
    work = Work(None, None, Call(0, "all_gather", 1, "", ""), None, None)
    work._error = tw.CollectiveError(0, "all_gather", 1, "decode", "damaged (from rank 1)")
    gathered = GatherWork(hook, work)
    for _ in range(2):
        with pytest.raises(tw.CollectiveError, match="damaged"):
            gathered.wait()
        hook.close()


@pytest.mark.slow
@pytest.mark.parametrize("task", ["replaced", "models_end", "closed_copies"])
def test_ends(task: str, tmp_path: Path) -> None:
    launch(__file__, task, 1, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("task", "ranks"), [("messages", 2), ("messages", 3), ("copies", 2)])
def test_users(task: str, ranks: int, tmp_path: Path) -> None:
    launch(__file__, task, ranks, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("task", "ranks"), [("removed", 2), ("replicas", 4)])
def test_hooks_are_removed(task: str, ranks: int, tmp_path: Path) -> None:
    launch(__file__, task, ranks, tmp_path)


@pytest.mark.slow
def test_ranks_with_other_hooks_are_told_at_once(tmp_path: Path) -> None:
    for found in launch(__file__, "refused", 2, tmp_path):
        assert len(found) == 8
        assert "ahead 0" in found[0]
        assert "ahead 2" in found[0]
        for text in found[1:]:
            assert "route 'network'" in text
            assert "route 'exact'" in text or "route 'auto'" in text
            assert "ranks [0]: " in text
            assert "; ranks [1]: " in text


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message="torch.distributed")
    join(globals(), sys.argv[1:])
