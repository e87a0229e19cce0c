"""Hooks on nodes, over gloo, against training without them: this file is also a rank."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tightwire as tw
from processes import join, launch

NODES, SIZE = 2, 2
RANKS = NODES * SIZE
STEPS = 4


def model_of() -> Any:
    import torch

    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(128, 512), torch.nn.ReLU(), torch.nn.Linear(512, 7))


def trained(model: Any, steps: int = STEPS) -> list[float]:
    """Losses of this rank, each with data of its own."""
    import torch
    import torch.distributed as dist

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(100 + dist.get_rank())
    x, y = torch.randn(16, 128, generator=data), torch.randn(16, 7, generator=data)
    losses = []
    for _ in range(steps):
        loss = (model(x) - y).square().mean()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def weights(model: Any) -> list[Any]:
    return [getattr(p, "full_tensor", lambda p=p: p)().detach() for p in model.parameters()]


def digest(tensors: list[Any]) -> str:
    return hashlib.sha256(b"".join(t.numpy().tobytes() for t in tensors)).hexdigest()


def outcome(model: Any, plain: Any, hooks: list[Any], losses: list[float]) -> dict[str, Any]:
    pairs = list(zip(weights(model), weights(plain), strict=True))
    return {
        "off": max((a - b).abs().max().item() for a, b in pairs),
        "weights": digest([a for a, _ in pairs]),
        "bytes": [[hook.raw_bytes, hook.wire_bytes] for hook in hooks],
        "losses": losses,
    }


def run_ddp(device: Any) -> dict[str, Any]:
    """Exact sums; then constant gradients in 4 bits, whose mean error feedback makes right."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    found = {}
    plain = DistributedDataParallel(model_of())
    trained(plain)
    cases: dict[str, dict[str, Any]] = {
        "raw": {"codec": "raw"},
        "nvfp4": {"codec": "nvfp4"},
        "ring": {"codec": "nvfp4", "topology": "ring"},
        "tagc": {},
    }
    for name, options in cases.items():
        model = DistributedDataParallel(model_of())
        if name == "tagc":
            hook: Any = tw.tagc.register(model, tw.tagc.Tagc(ratio=4), node=SIZE, codec="raw")
        else:
            hook = tw.ddp.register(model, node=SIZE, **options)
        losses = trained(model)
        found[name] = outcome(model, plain, [hook], losses)
        if name == "tagc":
            found[name]["layers"] = sorted({report.name for report in hook.state.reports})
        hook.close()
    for name, feedback in (("lost", None), ("kept", tw.ErrorFeedback())):
        model = DistributedDataParallel(model_of())
        hook = tw.ddp.register(model, node=SIZE, codec="nvfp4", error_feedback=feedback)
        true, mean = model_of_gradients(plain), []
        for _ in range(8):
            mean.append(model_of_gradients(model))
        error = torch.stack(mean).mean(0) - true
        found[name] = {"off": error.abs().max().item()}
    return found


def model_of_gradients(model: Any) -> Any:
    """Mean gradients of a model at the weights where it begins."""
    import torch
    import torch.distributed as dist

    with torch.no_grad():
        for p, first in zip(model.parameters(), model_of().parameters(), strict=True):
            p.copy_(first)
    data = torch.Generator().manual_seed(100 + dist.get_rank())
    x, y = torch.randn(16, 128, generator=data), torch.randn(16, 7, generator=data)
    model.zero_grad()
    (model(x) - y).square().mean().backward()
    return torch.cat([p.grad.view(-1).clone() for p in model.parameters()])


def run_fsdp(device: Any) -> dict[str, Any]:
    """Shards over all ranks, over those of a node (HSDP), and both by sketch."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    whole = init_device_mesh(device.type, (RANKS,))
    grid = init_device_mesh(device.type, (NODES, SIZE), mesh_dim_names=("nodes", "node"))

    def sharded(mesh: Any) -> Any:
        model = model_of()
        for module in (model[0], model[2], model):
            fully_shard(module, mesh=mesh)
        return model

    plain = sharded(whole)
    trained(plain)
    found = {}
    cases: dict[str, tuple[Any, dict[str, Any]]] = {
        "raw": (whole, {"codec": "raw"}),
        "nvfp4": (whole, {"codec": "raw", "gradients": "nvfp4"}),
        "hsdp raw": (grid, {"codec": "raw"}),
        "hsdp nvfp4": (grid, {"codec": "raw", "gradients": "nvfp4"}),
    }
    for name, (mesh, options) in cases.items():
        model = sharded(mesh)
        hooks: Any = tw.fsdp.compress(model, node=SIZE, **options)
        found[name] = outcome(model, plain, list(hooks), trained(model))
        hooks.close()
    for name, (mesh, node) in SKETCHED.items():
        model = sharded(grid if mesh == "grid" else whole)
        hooks = tw.tagc.compress(model, tw.tagc.Tagc(ratio=4), node=node, codec="raw")
        losses = trained(model)
        found[name] = outcome(model, plain, list(hooks[:2]), losses)
        found[name]["layers"] = sorted({report.name for report in hooks.state.reports})
        hooks.close()
    found["replicas"] = run_replicas(sharded(grid))
    with pytest.raises(ValueError, match=r"node is 3; rank . is in a group of 4 ranks, FSDP: AllG"):
        model = sharded(whole)
        tw.fsdp.compress(model, node=3)
        trained(model)
    return found


def run_replicas(model: Any) -> dict[str, Any]:
    """Mean gradients by sketch, and what ranks keep of them, are together those of FSDP."""
    import torch
    import torch.distributed as dist

    data = torch.Generator().manual_seed(100 + dist.get_rank())
    x = torch.randn(16, 128, generator=data)

    def gradients() -> Any:
        model.zero_grad()
        model(x).square().mean().backward()
        return model[0].weight.grad.to_local().clone()

    true = gradients()
    hooks = tw.tagc.compress(model, tw.tagc.Tagc(ratio=4), node=SIZE, codec="raw")
    total = sum(gradients() for _ in range(3))
    kept = hooks.state.residuals.residual("0.weight, replicas")[: true.numel()].clone()
    dist.all_reduce(kept, group=dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])[0])
    hooks.remove()
    calls = len(hooks.reduce_scatter.trace())
    return {
        "off": (total + kept.view_as(true) / NODES - 3 * true).abs().max().item(),
        "kept": kept.abs().max().item(),
        "removed": torch.equal(gradients(), true) and len(hooks.reduce_scatter.trace()) == calls,
        "reasons": sorted({report.reason for report in hooks.state.reports}),
    }


#: Meshes and nodes of sums by sketch: shards over nodes, replicas over nodes, and both.
SKETCHED = {"tagc": ("whole", SIZE), "hsdp tagc": ("grid", SIZE), "both tagc": ("grid", 1)}

#: Codecs of tensor parallelism, along which dimension sequences are cut, and of sums in a node.
LAYERS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "raw": ("raw", None, {}),
    "sequence raw": ("raw", 0, {}),
    "plain": (None, None, {}),
    "nvfp4": ("nvfp4", None, {}),
    "sequence nvfp4": ("nvfp4", 0, {}),
    "within": ("nvfp4", None, {"within": "nvfp4"}),
}


def run_tensor_parallel(device: Any) -> dict[str, Any]:
    """A layer that all ranks share, as far as what comes of it is from that of one process."""
    import torch
    import torch.distributed as dist

    tp = tw.tensor_parallel
    me, (first, _, last) = dist.get_rank(), model_of()
    torch.manual_seed(3)
    whole, gradient = torch.randn(64, 128, requires_grad=True), torch.randn(64, 7)
    model_of()(whole).backward(gradient)
    found: dict[str, Any] = {}
    for name, (codec, dim, options) in LAYERS.items():
        parallel = tp.connect(codec, codec, node=SIZE, **options)
        model = torch.nn.Sequential(
            tp.ColumnParallelLinear(first, parallel, sequence_dim=dim),
            torch.nn.ReLU(),
            tp.RowParallelLinear(last, parallel, sequence_dim=dim),
        )
        part = slice(None) if dim is None else slice(16 * me, 16 * (me + 1))
        x = whole.detach()[part].requires_grad_()
        y = model(x)
        y.backward(gradient[part])
        wanted = model_of()(whole).detach()[part], whole.grad[part]
        pairs = list(zip((y.detach(), x.grad), wanted, strict=True))
        found[name] = {
            "off": max((a - b).norm().item() / b.norm().item() for a, b in pairs),
            "bytes": [parallel.raw_bytes, parallel.wire_bytes],
            "bits": digest([y.detach(), x.grad]),
        }
        parallel.close()
    # In the mean over steps nothing is lost.
    with tp.connect("nvfp4", "nvfp4", node=SIZE) as parallel:
        fed = parallel.with_feedback(tw.ErrorFeedback(), "layer")
        x = torch.randn(4096, generator=torch.Generator().manual_seed(me))
        exact = x.clone()
        dist.all_reduce(exact)
        for name, one in (("lost", parallel), ("kept", fed)):
            mean = torch.stack([one.all_reduce(x.requires_grad_()).detach() for _ in range(8)])
            found[name] = {"off": (mean.mean(0) - exact).norm().item() / exact.norm().item()}
    with pytest.raises(
        ValueError, match=r"node is 3; rank . is in a group of 4 ranks, tensor_para"
    ):
        tp.connect("raw", "raw", node=3)
    with pytest.raises(ValueError, match="within is 'mx', node None"):
        tp.connect("raw", "raw", within="mx")
    return found


def run_hooks(device: Any) -> dict[str, Any]:
    # Ranks differ where sequences are cut.
    hooks = {"ddp": run_ddp(device), "fsdp": run_fsdp(device)}
    return hooks | {"tensor_parallel": run_tensor_parallel(device)}


TASKS: dict[str, Callable[[Any], Any]] = {"run_hooks": run_hooks}


def check_alike(found: list[Any], name: str) -> tuple[dict[str, Any], list[list[list[int]]]]:
    """One rank's outcome, when all have the same weights; bytes of hooks by node."""
    assert len({rank[name]["weights"] for rank in found}) == 1
    nodes = [found[:SIZE], found[SIZE:]]
    return found[0][name], [np.sum([r[name]["bytes"] for r in node], 0).tolist() for node in nodes]


@pytest.mark.slow
def test_hooks(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if not hasattr(getattr(torch.distributed, "fsdp", None), "FSDPModule"):
        pytest.importorskip("torch.distributed.fsdp")
    found = launch(__file__, "run_hooks", RANKS, tmp_path)
    check_ddp([rank["ddp"] for rank in found])
    check_fsdp([rank["fsdp"] for rank in found])
    check_tensor_parallel([rank["tensor_parallel"] for rank in found])


def check_ddp(found: list[Any]) -> None:
    whole = STEPS * 4 * (128 * 512 + 512 + 512 * 7 + 7)
    exact, nodes = check_alike(found, "raw")
    assert exact["off"] < 1e-6
    for ((raw, wire),) in nodes:
        # A node sends half of the sums, and then half of the results.
        assert whole <= raw <= 1.001 * whole
        assert whole < wire < 1.05 * whole
    for name in ("nvfp4", "ring"):
        lossy, nodes = check_alike(found, name)
        assert 1e-6 < lossy["off"] < 1e-2
        for ((raw, wire),) in nodes:
            assert 0.14 * raw < wire < 0.16 * raw
    sketched, nodes = check_alike(found, "tagc")
    assert sketched["layers"] == ["0.weight"]
    assert sketched["losses"][-1] < sketched["losses"][0]
    for ((raw, wire),) in nodes:
        assert whole <= raw <= 1.05 * whole
        # A quarter, two bits of index and what is small.
        assert 0.3 * raw < wire < 0.45 * raw
    assert found[0]["kept"]["off"] < 0.4 * found[0]["lost"]["off"]


def check_fsdp(found: list[Any]) -> None:
    whole = STEPS * 4 * (128 * 512 + 512 + 512 * 7 + 7)
    for name in ("raw", "hsdp raw", "nvfp4", "hsdp nvfp4"):
        result, nodes = check_alike(found, name)
        hsdp, exact = name.startswith("hsdp"), name.endswith("raw")
        assert result["off"] < (1e-6 if exact else 1e-2)
        assert exact or result["off"] > 1e-6
        for gathers, (raw, wire) in nodes:
            # Of replicas a node sends its half of the sums of its shards, and of the results.
            assert 1 <= raw / whole / (1.0 if hsdp else 0.5) < 1.05
            assert (1.0 if exact else 0.14) < wire / raw < (1.1 if exact else 0.19)
            if hsdp:
                assert gathers == [0, 0]
            else:
                # In each forward, and in backward once more.
                assert 1 < gathers[0] / whole < 2.1
                assert gathers[0] < gathers[1] < 1.1 * gathers[0]
    layers = ["0.weight", "0.weight, replicas"]
    # Of a rank that is a node, two have the numbers of one.
    for name, reported, share in (
        ("tagc", layers[:1], 0.5),
        ("hsdp tagc", layers[1:], 1.0),
        ("both tagc", layers, 2.0),
    ):
        sketched, nodes = check_alike(found, name)
        assert sketched["layers"] == reported
        assert sketched["losses"][-1] < sketched["losses"][0]
        for _, (raw, wire) in nodes:
            assert share <= raw / whole <= 1.1 * share, name
            assert 0.3 * raw < wire < 0.5 * raw, name
    for rank in found:
        replicas = rank["replicas"]
        assert replicas["kept"] > 1e-5 > replicas["off"]
        assert replicas["removed"]
        assert replicas["reasons"] == [""]


def check_tensor_parallel(found: list[Any]) -> None:
    # Of output and gradient of the input a node sends half of the sums, and half of the results.
    whole = 64 * (128 + 7) * 4
    for name, (codec, dim, _) in LAYERS.items():
        lossy = codec == "nvfp4"
        ranks = [rank[name] for rank in found]
        assert all(1e-3 < r["off"] < 0.4 if lossy else r["off"] < 1e-6 for r in ranks), name
        assert dim is not None or len({r["bits"] for r in ranks}) == 1
        for node in (ranks[:SIZE], ranks[SIZE:]):
            raw, wire = np.sum([r["bytes"] for r in node], 0)
            assert whole <= raw < 1.05 * whole, name
            assert (0.14 if lossy else 1.0) * raw <= wire < (0.25 if lossy else 1.1) * raw, name
    for rank in found:
        assert rank["within"]["off"] > rank["nvfp4"]["off"]
        assert rank["kept"]["off"] < 0.4 * rank["lost"]["off"]


if __name__ == "__main__":
    join(TASKS, sys.argv[1:])
