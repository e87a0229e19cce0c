"""FSDP2 with compressed collectives, between real processes: this file is also what they run."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tightwire as tw
from capacities import PATTERNS, Scheduled, schedule
from lossy import Residuals, check_over_time
from processes import join, launch, run_example

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("PyTorch was built without gloo", allow_module_level=True)
pytest.importorskip("torch.distributed.fsdp")
if not hasattr(torch.distributed.fsdp.FSDPModule, "set_custom_reduce_scatter"):
    pytest.skip("this PyTorch has no custom collectives", allow_module_level=True)

from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # noqa: E402

from tightwire.adapters.training import fsdp  # noqa: E402
from tightwire.adapters.training.error_feedback import ErrorFeedback  # noqa: E402

STEPS = 3

#: Parameter and reduce dtype, options of `fully_shard`, and what `setup` does more.
SETUPS: dict[str, tuple[str | None, str | None, dict[str, Any], str]] = {
    "float32": (None, None, {}, ""),
    "bfloat16, reduced in float32": ("bfloat16", "float32", {}, "accumulate"),
    "bfloat16": ("bfloat16", "bfloat16", {"reshard_after_forward": False}, ""),
    "float16": ("float16", None, {}, "prefetch"),
    "bfloat16, a divisor": ("bfloat16", None, {}, "divide"),
    "bfloat16, forced sums": ("bfloat16", None, {}, "sum"),
}


#: Of these, what has other kernels on a GPU.
ON_GPUS = ("float32", "bfloat16, reduced in float32", "bfloat16")


class Block(torch.nn.Module):  # type: ignore[misc, name-defined]
    """Odd sizes, which sharding pads; a frozen layer, and one without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(61, 127)
        self.frozen = torch.nn.Linear(127, 127).requires_grad_(False)
        self.last = torch.nn.Linear(127, 61, bias=False)
        self.unused = torch.nn.Linear(61, 3)

    def forward(self, x: Any) -> Any:
        return x + self.last(self.frozen(self.first(x).relu()))


def make(device: Any, setup: str, mesh: Any) -> Any:
    """A sharded model, the same on every rank and in every call."""
    narrow, reduce, options, extra = SETUPS[setup]
    torch.manual_seed(1)
    model = torch.nn.Sequential(Block(), Block(), torch.nn.Linear(61, 5)).to(device)
    policy = MixedPrecisionPolicy(
        param_dtype=narrow and getattr(torch, narrow),
        reduce_dtype=reduce and getattr(torch, reduce),
    )
    for module in (model[0], model[1], model):
        fully_shard(module, mesh=mesh, mp_policy=policy, **options)
    if extra == "divide":
        for module in (model[0], model[1], model):
            module.set_gradient_divide_factor(3.0)
    if extra == "sum":
        for module in (model[0], model[1], model):
            module.set_force_sum_reduction_for_comms(True)
    return model


def train(model: Any, device: Any, extra: str) -> list[float]:
    """Losses of some steps, and at last of one evaluation."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    torch.manual_seed(100 + dist.get_rank())
    losses = []
    for step in range(STEPS):
        if extra == "other divisors":
            for module in (model[0], model[1], model):
                module.set_gradient_divide_factor(3.0 + step)
        for last in (False, True) if extra == "accumulate" else (True,):
            model.set_requires_gradient_sync(last)
            if extra == "prefetch":
                # Started here, waited for by forward.
                model.unshard(async_op=True)
                model[1].unshard(async_op=True)
            loss = model(torch.randn(7, 61, device=device)).float().square().mean()
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    with torch.inference_mode():
        losses.append(model(torch.ones(2, 61, device=device)).float().square().mean().item())
    return losses


def weights(model: Any) -> list[Any]:
    """This rank's shards, as bytes."""
    for module in (model[0], model[1], model):
        module.reshard()
    return [p.to_local().contiguous().view(torch.uint8) for p in model.parameters()]


class Plain:
    """FSDP's own collective behind a counter."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.raw: list[int] = []

    def allocate(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner.allocate(*args, **kwargs)

    def __call__(self, output_tensor: Any, input_tensor: Any, **kwargs: Any) -> Any:
        self.raw.append(other_ranks(output_tensor, input_tensor))
        return self.inner(output_tensor=output_tensor, input_tensor=input_tensor, **kwargs)


def other_ranks(output: Any, x: Any) -> int:
    """Bytes of the larger tensor that are not this rank's share."""
    small, large = sorted(int(t.numel() * t.element_size()) for t in (output, x))
    return large - small


class CheckedReduceScatter(fsdp.ReduceScatter):
    """Compares every result, bit for bit, with one by hand from uncompressed inputs."""

    def __init__(self, divisor: float, **options: Any) -> None:
        super().__init__(**options)
        self.divisor = divisor
        self.ops: set[str] = set()

    def allocate(self, *args: Any, **kwargs: Any) -> Any:
        room = super().allocate(*args, **kwargs)
        room.view(torch.uint8).fill_(0xAB)
        return room

    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        parts = [torch.empty_like(input_tensor) for _ in range(group.size())]
        dist.all_gather(parts, input_tensor, group=group)
        result = super().__call__(output_tensor, input_tensor, group, op, async_op)
        self.ops.add(str(op).rpartition(".")[2] if op != dist.ReduceOp.PREMUL_SUM else "PREMUL_SUM")
        each = output_tensor.numel()
        mine = slice(each * group.rank(), each * (group.rank() + 1))
        total = torch.full((each,), -0.0, device=input_tensor.device)
        for part in parts:
            total += part[mine].float()
        if op == dist.ReduceOp.AVG:
            total /= group.size()
        elif op == dist.ReduceOp.PREMUL_SUM:
            total *= 1 / self.divisor
        wanted = total.to(output_tensor.dtype)
        assert wanted.view(torch.uint8).equal(output_tensor.view(torch.uint8))
        assert torch.equal(input_tensor, parts[group.rank()])
        return result


def compare(device: Any, setup: str, mesh: Any) -> dict[str, Any]:
    """Training with and without; what all-gathers and reduce-scatters had to send, and sent."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as own

    extra = SETUPS[setup][3]
    reference = make(device, setup, mesh)
    plain = Plain(own.DefaultAllGather())
    exact = CheckedReduceScatter(3.0)
    for module in (reference[0], reference[1], reference):
        module.set_custom_all_gather(plain)
        module.set_custom_reduce_scatter(exact)
    losses = train(reference, device, extra)

    model = make(device, setup, mesh)
    hooks = fsdp.compress(model)
    assert train(model, device, extra) == losses
    pairs = zip(weights(model), weights(reference), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    facts = {"losses": losses, "expected": plain.raw, "ops": sorted(exact.ops)}
    for name, hook in (("all_gather", hooks.all_gather), ("reduce_scatter", hooks.reduce_scatter)):
        records = hook.trace()
        assert {r.collective for r in records} == {name}
        assert all(r.error is None for r in records)
        assert hook.raw_bytes == sum(r.raw_bytes for r in records)
        assert hook.wire_bytes == sum(r.wire_bytes for r in records)
        facts[name] = [[r.raw_bytes, r.wire_bytes] for r in records]
    assert exact.raw_bytes == hooks.reduce_scatter.raw_bytes
    assert exact.wire_bytes == hooks.reduce_scatter.wire_bytes

    if setup == "float32" and dist.get_world_size() == 2:
        # Two numbers have one sum: even FSDP's own reduce-scatter gives these bits.
        untouched = make(device, setup, mesh)
        assert train(untouched, device, extra) == losses
    return facts


def replicas(device: Any) -> dict[str, Any]:
    """Shards on rows of ranks, and a compressed mean over columns: against FSDP's own HSDP."""
    size = dist.get_world_size()
    rows = 2 if size == 2 else size // 2
    both = init_device_mesh(device.type, (rows, size // rows), mesh_dim_names=("copy", "shard"))
    native = make(device, "float32", both)
    losses = train(native, device, "")
    model = make(device, "float32", both["shard"])
    fsdp.compress(model)
    hook = fsdp.AllReduce(both["copy"].get_group())
    for module in (model[0], model[1], model):
        module.set_all_reduce_hook(hook)
    found = train(model, device, "")
    assert hook.wire_bytes < 0.97 * hook.raw_bytes
    calls = [r.collective for r in hook.trace()]
    assert calls == ["reduce_scatter", "all_gather"] * (3 * STEPS)
    if rows == 2:
        assert found == losses
        assert all(torch.equal(a, b) for a, b in zip(weights(model), weights(native), strict=True))

    feedback = ErrorFeedback()
    lossy = fsdp.AllReduce(both["copy"].get_group(), codec="nvfp4")
    for name, module in (("0", model[0]), ("1", model[1]), ("", model)):
        module.set_all_reduce_hook(lossy.with_feedback(feedback, name))
    train(model, device, "")
    assert sorted(feedback.state_dict()["residuals"]) == ["", "0", "1"]
    assert feedback.residual("0").any()
    assert lossy.wire_bytes < 0.2 * lossy.raw_bytes
    # All copies got the same means.
    for shard in weights(model):
        copies = [torch.empty_like(shard) for _ in range(rows)]
        dist.all_gather(copies, shard, group=both["copy"].get_group())
        assert all(torch.equal(one, shard) for one in copies)
    return {"losses": found}


class CheckedFeedback:
    """Compares what an FSDP module's reduce-scatter gives, and the residual, with NumPy's."""

    def __init__(self, inner: Any, feedback: ErrorFeedback, name: str, codec: Any) -> None:
        self.inner, self.feedback, self.name = inner, feedback, name
        self.reference = Residuals(codec, dist.get_world_size())
        self.calls = 0

    def allocate(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner.allocate(*args, **kwargs)

    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        rank = group.rank()
        xs = [torch.empty_like(input_tensor) for _ in range(group.size())]
        dist.all_gather(xs, input_tensor, group=group)
        done = self.inner(output_tensor, input_tensor, group, op, False)
        parts = [(self.name, input_tensor.numel())]
        total = self.reference.scatter([x.cpu().numpy() for x in xs], parts)[rank]
        assert op == dist.ReduceOp.AVG
        wanted = total / np.float32(group.size())
        assert output_tensor.cpu().numpy().tobytes() == wanted.tobytes()
        e = self.feedback.residual(self.name).cpu().numpy()
        assert e.tobytes() == self.reference.e[rank][self.name].tobytes()
        assert e.any()
        self.calls += 1
        return done


def lossy(device: Any) -> dict[str, Any]:
    """Parameters bit for bit, gradients in 4 bits with error feedback."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    model, codec, feedback = make(device, "float32", mesh), tw.codec("nvfp4"), ErrorFeedback()
    hooks = fsdp.compress(model, gradients=codec, error_feedback=feedback)
    checked = []
    for name, module in (("0", model[0]), ("1", model[1]), ("", model)):
        inner = hooks.reduce_scatter.with_feedback(feedback, name)
        checked.append(CheckedFeedback(inner, feedback, name, codec))
        module.set_custom_reduce_scatter(checked[-1])
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    torch.manual_seed(100 + dist.get_rank())
    x = torch.randn(7, 61, device=device)
    losses = []
    for _ in range(6):
        loss = model(x).square().mean()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    full = torch.cat([p.full_tensor().reshape(-1) for p in model.parameters()])
    assert {check.calls for check in checked} == {6}
    found = [hooks.all_gather, hooks.reduce_scatter]
    return {
        "losses": losses,
        "weights": hashlib.sha256(full.detach().cpu().numpy().tobytes()).hexdigest(),
        "bytes": [[hook.raw_bytes, hook.wire_bytes] for hook in found],
        "codecs": [hook.trace()[-1].algorithm.rpartition(" ")[2] for hook in found],
    }


def as_array(x: Any) -> Any:
    return x.detach().cpu().float().numpy()


def over_time(device: Any) -> None:
    """The same gradients and the same parameters with feedback, in 4 bits, again and again."""
    group, n, steps = dist.group.WORLD, 1001, 32
    size, rank = dist.get_world_size(), dist.get_rank()
    codec, module = tw.codec("mx", element="e2m1"), torch.nn.Linear(1, 1)
    feedback, saved = ErrorFeedback(), ErrorFeedback()
    xs = torch.randn(size, n, generator=torch.Generator().manual_seed(3)).to(device)
    xs = xs.bfloat16().float()
    hooks = fsdp.AllReduce(group, codec=codec), fsdp.AllGather(codec=codec)
    fed = hooks[0].with_feedback(feedback, "g"), hooks[1].with_feedback(feedback, "w", module)

    def mean(hook: Any) -> Any:
        x = xs[rank].clone()
        hook(x)
        return x

    def gathered(hook: Any, dtype: Any = torch.float32) -> Any:
        out = torch.full((size * n,), float("nan"), device=device, dtype=dtype)
        # FSDP's input lies in its output.
        mine = out[rank * n :][:n].copy_(xs[rank])
        assert hook(out, mine, group) is None
        return out

    def left(name: str) -> Any:
        e = [torch.empty(n, device=device) for _ in range(size)]
        dist.all_gather(e, feedback.residual(name))
        return as_array(torch.stack(e))

    means = [as_array(mean(fed[0])) for _ in range(steps)]
    plain = mean(hooks[0])
    check_over_time(means, as_array(xs.mean(0)), left("g").mean(0), as_array(plain))
    wholes = [as_array(gathered(fed[1])) for _ in range(steps)]
    plain = gathered(hooks[1])
    check_over_time(wholes, as_array(xs).reshape(-1), left("w").reshape(-1), as_array(plain))

    # Who goes on from a checkpoint goes on with the same bits.
    saved.load_state_dict(feedback.state_dict())
    again = hooks[0].with_feedback(saved, "g"), hooks[1].with_feedback(saved, "w", module)
    assert torch.equal(mean(fed[0]), mean(again[0]))
    assert torch.equal(gathered(fed[1]), gathered(again[1]))
    # In evaluation residuals rest; bytes, of several dtypes, have none.
    before = feedback.state_dict()["residuals"]["w"]
    module.eval()
    assert torch.equal(gathered(fed[1]), plain)
    module.train()
    found = torch.zeros(3 * size, dtype=torch.uint8, device=device)
    fed[1](found, torch.full_like(found[:3], rank + 1), group)
    assert found.tolist() == [r + 1 for r in range(size) for _ in range(3)]
    assert torch.equal(feedback.residual("w"), before)
    assert not torch.equal(gathered(fed[1]), plain)
    feedback.reset()
    narrow = [as_array(gathered(fed[1], torch.bfloat16)) for _ in range(steps)]
    plain = gathered(hooks[1], torch.bfloat16)
    check_over_time(narrow, as_array(xs).reshape(-1), left("w").reshape(-1), as_array(plain))


def parameters(device: Any) -> list[str]:
    """Residuals of parameter shards in training: by module, and at rest in evaluation."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    model, feedback = make(device, "bfloat16", mesh), ErrorFeedback()
    codec = tw.codec("mx", element="e2m1")
    hooks = fsdp.compress(model, codec=codec, gradients=codec, parameter_feedback=feedback)
    x = torch.ones(7, 61, device=device)
    states = []
    for training in (True, False, True):
        model.train(training)
        with torch.set_grad_enabled(training):
            y = model(x)
        if training:
            y.square().mean().backward()
        states.append(feedback.state_dict()["residuals"])
        for module in (model[0], model[1], model):
            module.reshard()
    assert all(torch.equal(states[1][name], e) for name, e in states[0].items())
    changed = {name for name, e in states[0].items() if not torch.equal(states[2][name], e)}
    # Of the last module a rank may have no row.
    assert changed >= {"0, parameters", "1, parameters"}
    assert hooks.all_gather.wire_bytes < 0.4 * hooks.all_gather.raw_bytes
    return list(states[2])


def mixed(device: Any) -> list[int]:
    """Parameters of two dtypes in one module are bytes to FSDP: they go raw, and exact."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    torch.manual_seed(1)
    layers = torch.nn.Linear(9, 301), torch.nn.Linear(301, 7).bfloat16()
    model = torch.nn.Sequential(*layers).requires_grad_(False).to(device)
    wanted = [p.clone() for p in model.parameters()]
    hooks = fsdp.compress(fully_shard(model, mesh=mesh), trace=1)
    for _ in range(2):
        model.unshard()
        pairs = zip(model.parameters(), wanted, strict=True)
        assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)
        model.reshard()
    assert len(hooks.all_gather.trace()) == 1
    return [hooks.all_gather.raw_bytes, hooks.all_gather.wire_bytes]


def refuse(device: Any) -> list[str]:
    """What is raised for a module that is not sharded, bad options, and another ReduceOp."""
    found = []
    calls: Sequence[Any] = (
        lambda: fsdp.compress(torch.nn.Linear(2, 2)),
        lambda: fsdp.AllGather(sizes="never"),
        lambda: fsdp.ReduceScatter()(
            torch.zeros(1), torch.zeros(2), dist.group.WORLD, dist.ReduceOp.MAX
        ),
    )
    for call in calls:
        with pytest.raises(ValueError, match=r"comes first|allowed") as caught:
            call()
        found.append(str(caught.value))
    return found


class Sized:
    """A hook whose calls fit as a pattern says."""

    def __init__(self, inner: Any, calls: list[None], pattern: str) -> None:
        self.inner, self.calls, self.pattern = inner, calls, PATTERNS[pattern]

    def allocate(self, *args: Any, **kwargs: Any) -> Any:
        room = self.inner.allocate(*args, **kwargs)
        room.view(torch.uint8).fill_(0xAB)
        return room

    def __call__(self, **arguments: Any) -> Any:
        Scheduled.small = self.pattern(len(self.calls))
        self.calls.append(None)
        return self.inner(**arguments)


def prepared(device: Any) -> dict[str, Any]:
    """Training by prepared calls has the bits of exact ones, whatever does not fit."""
    again = schedule()
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    found: dict[str, Any] = {}
    for setup in SETUPS if device.type == "cpu" else ON_GPUS:
        extra = SETUPS[setup][3].replace("divide", "other divisors")
        reference = make(device, setup, mesh)
        fsdp.compress(reference)
        losses = train(reference, device, extra)
        for pattern in PATTERNS:
            if setup != "bfloat16, reduced in float32" and pattern not in ("none", "all"):
                continue
            again.clear()
            model = make(device, setup, mesh)
            hooks = fsdp.compress(model, route="network")
            gathers: list[None] = []
            sums: list[None] = []
            for module in (model[0], model[1], model):
                module.set_custom_all_gather(Sized(hooks.all_gather, gathers, pattern))
                scatter = hooks.reduce_scatter.of(module)
                module.set_custom_reduce_scatter(Sized(scatter, sums, pattern))
            assert train(model, device, extra) == losses, (setup, pattern)
            pairs = zip(weights(model), weights(reference), strict=True)
            assert all(torch.equal(a, b) for a, b in pairs), (setup, pattern)
            assert hooks.all_gather.wire_bytes > 0
            assert not hooks.reduce_scatter._late
            # Two of the three modules are as large as each other.
            assert len(hooks.reduce_scatter._prepared) == 2
            found[f"{setup}; {pattern}"] = dict(again)
            hooks.close()
    model = make(device, "float32", mesh)
    hooks = fsdp.compress(model, route="auto")
    train(model, device, "")
    for hook in hooks:
        (switch,) = hook.switches.values()
        assert all(seconds > 0 for pair in switch.seconds.values() for seconds in pair)
    hooks.close()
    return found


def everything(device: Any) -> dict[str, Any]:
    """All setups."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    results: dict[str, Any] = {setup: compare(device, setup, mesh) for setup in SETUPS}
    results["replicas"] = replicas(device)
    results["lossy"] = lossy(device)
    over_time(device)
    results["parameters"] = parameters(device)
    results["mixed"] = mixed(device)
    if device.type == "cpu":
        results["refused"] = refuse(device)
    return results


def check(results: list[dict[str, Any]]) -> None:
    """That every expected collective went encoded, in fewer bytes."""
    for rank in results:
        for setup, (narrow, reduce, _, extra) in SETUPS.items():
            found = rank[setup]
            passes = 2 if extra == "accumulate" else 1
            assert len(found["losses"]) == STEPS * passes + 1
            assert [raw for raw, _ in found["all_gather"]] == found["expected"]
            # Three FSDP modules; a step's reduce-scatters are one for each.
            assert len(found["all_gather"]) >= 3 * (STEPS * passes + 1)
            assert len(found["reduce_scatter"]) == 3 * STEPS
            ratio = {None: 0.9, "float32": 0.9, "bfloat16": 0.78, "float16": 0.95}
            for name, dtype in (("all_gather", narrow), ("reduce_scatter", reduce or narrow)):
                # The last module is small, and its header is not.
                raw = sum(raw for raw, _ in found[name])
                assert sum(wire for _, wire in found[name]) < ratio[dtype] * raw, (setup, name)
            wanted = {"divide": "PREMUL_SUM", "sum": "SUM"}.get(extra, "AVG")
            assert found["ops"] == ["SUM" if narrow == "float16" else wanted]
        found = rank["lossy"]
        assert found["weights"] == results[0]["lossy"]["weights"]
        assert found["losses"][-1] < 0.8 * found["losses"][0]
        assert found["codecs"] == ["zipccl", "nvfp4"]
        (_, _), (raw, wire) = found["bytes"]
        assert 0 < wire < 0.17 * raw
        assert sorted(rank["parameters"]) == [", parameters", "0, parameters", "1, parameters"]
        raw, wire = rank["mixed"]
        # Two calls, of which the trace has the last only; a descriptor each, and padding.
        shard = 4 * (301 * 9 + 301) + 2 * (7 * 301 + 7)
        assert raw >= 2 * shard * (len(results) - 1) / len(results)
        assert raw < wire < raw + 1000


@pytest.mark.slow
def test_training_is_bit_identical_with_fewer_bytes(tmp_path: Path) -> None:
    results = launch(__file__, "everything", 2, tmp_path)
    check(results)
    for module, option, op in (rank["refused"] for rank in results):
        assert "fully_shard comes first" in module
        assert "sizes is 'never'" in option
        assert "SUM, AVG and PREMUL_SUM" in op


@pytest.mark.slow
def test_prepared_calls_train_bit_for_bit(tmp_path: Path) -> None:
    for found in launch(__file__, "prepared", 2, tmp_path):
        assert len(found) == len(SETUPS) * 2 + len(PATTERNS) - 2
        for case, again in found.items():
            assert bool(again) == (not case.endswith("; none")), (case, again)
        assert found["bfloat16, reduced in float32; every other"].keys() == {
            "all_gather",
            "reduce_scatter",
        }


@pytest.mark.long
def test_example(tmp_path: Path) -> None:
    found = run_example(fsdp, 2, tmp_path)
    assert len(found) == 4
    for raw, wire in found:
        assert raw > 3 * 1000 * 1000
        assert wire < 0.9 * raw


@pytest.mark.long
def test_training_on_four_ranks(tmp_path: Path) -> None:
    check(launch(__file__, "everything", 4, tmp_path))


@pytest.mark.multi_gpu
def test_prepared_calls_on_gpus(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    for found in launch(__file__, "prepared", 2, tmp_path, "cuda", "default"):
        assert len(found) == len(ON_GPUS) * 2 + len(PATTERNS) - 2


@pytest.mark.multi_gpu
def test_training_on_gpus(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    check(launch(__file__, "everything", 2, tmp_path, "cuda", "default"))


if __name__ == "__main__":
    join(globals(), sys.argv[1:])
