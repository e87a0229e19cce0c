"""Hooks that sum by index and sketch, between real processes: this file is also what they run."""

from __future__ import annotations

import math
import sys
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from capacities import Scheduled, schedule
from prepared_ranks import damage
from processes import join, launch, run_example

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("PyTorch was built without gloo", allow_module_level=True)
pytest.importorskip("torch.distributed.fsdp")
if not hasattr(torch.distributed.fsdp.FSDPModule, "set_custom_reduce_scatter"):
    pytest.skip("this PyTorch has no custom collectives", allow_module_level=True)

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh  # noqa: E402
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from tightwire.adapters.errors import CollectiveError  # noqa: E402
from tightwire.adapters.training import sketch_messages, tagc  # noqa: E402
from tightwire.adapters.training.hooks import communicator  # noqa: E402
from tightwire.adapters.training.sketches import Sketches  # noqa: E402

STEPS = 3
RULE = tagc.Rule(nelem=1 << 15)


class Block(torch.nn.Module):  # type: ignore[misc, name-defined]
    """Odd sizes, which sharding pads; layers by sketch and not, one of them by name, one frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(131, 393)
        self.frozen = torch.nn.Linear(131, 131).requires_grad_(False)
        self.up = torch.nn.Linear(131, 517)
        self.down = torch.nn.Linear(517, 131, bias=False)

    def forward(self, x: Any) -> Any:
        q, k, v = self.qkv(x).chunk(3, -1)
        x = x + self.frozen(q * k.tanh() + v)
        return x + self.down(self.up(x).relu())


class Half(torch.nn.Module):  # type: ignore[misc, name-defined]
    """A layer that is used, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = torch.nn.Linear(257, 256), torch.nn.Linear(257, 256)

    def forward(self, x: Any) -> Any:
        return self.used(x)


SKETCHED = {f"{i}.{name}.weight" for i in (0, 1) for name in ("up", "down")}


def make(device: Any) -> Any:
    torch.manual_seed(1)
    return torch.nn.Sequential(Block(), Block(), torch.nn.Linear(131, 5)).to(device)


def train(model: Any, device: Any) -> list[float]:
    """Losses of some steps."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    torch.manual_seed(100 + dist.get_rank())
    x = torch.randn(7, 131, device=device)
    losses = []
    for _ in range(STEPS):
        loss = model(x).float().square().mean()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


class Expected:
    """Sums of layers by hand, from what all ranks gather uncompressed."""

    def __init__(self, settings: tagc.Tagc, ranks: int) -> None:
        self.theta, self.accumulate = settings.share_zeroed(ranks), settings.accumulate
        self.ranks = ranks
        self.e: dict[str, Any] = {}

    def sum(self, name: str, xs: Any) -> Any:
        """The sum, shape (ranks, m), of the layer's gradients, shape (ranks, ranks, m)."""
        corrected = xs.float() + self.e.get(name, 0)
        m = xs.shape[2]
        keep = m - math.ceil(Fraction(str(self.theta)) * m)
        order = corrected.abs().argsort(dim=2, descending=True, stable=True)[:, :, :keep]
        sent = torch.zeros_like(corrected).scatter_(2, order, corrected.gather(2, order))
        sent = sent.to(xs.dtype).float()
        if self.accumulate:
            self.e[name] = corrected - sent
        total = torch.zeros_like(sent[0])
        for part in sent:
            total += part
        return total.to(xs.dtype).float()


def gathered(x: Any, group: Any = None) -> Any:
    """The `x`, shape (n,), of all ranks, shape (ranks, n)."""
    ranks = dist.get_world_size(group)
    parts = [torch.empty_like(x) for _ in range(ranks)]
    dist.all_gather(parts, x, group=group)
    return torch.stack(parts)


class CheckedUnit:
    """The reduce-scatter of one FSDP module, compared with sums by hand."""

    def __init__(self, inner: Any, expected: Expected, divisor: float) -> None:
        self.inner, self.expected, self.divisor = inner, expected, divisor
        self.calls = 0

    def allocate(self, *args: Any, **kwargs: Any) -> Any:
        room = self.inner.allocate(*args, **kwargs)
        room.view(torch.uint8).fill_(0xAB)
        return room

    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        ranks, me = group.size(), group.rank()
        before = input_tensor.clone()
        xs = gathered(input_tensor, group).view(ranks, ranks, -1)
        done = self.inner(output_tensor, input_tensor, group, op, async_op)
        assert torch.equal(input_tensor, before)
        total = torch.full(xs.shape[1:], -0.0, device=xs.device)
        for part in xs:
            total += part.float()
        at = 0
        for name, _, n in self.inner._parameters():
            if name in SKETCHED:
                part = xs[:, :, at : at + n]
                total[:, at : at + n] = self.expected.sum(name, part)
            at += n
        assert at == xs.shape[2]
        if op == dist.ReduceOp.AVG:
            total /= ranks
        else:
            assert op == dist.ReduceOp.PREMUL_SUM
            total *= 1 / self.divisor
        wanted = total[me].to(output_tensor.dtype)
        assert torch.equal(output_tensor, wanted)
        self.calls += 1
        return done


def sharded(device: Any, setup: str) -> dict[str, Any]:
    """FSDP2; every reduce-scatter is compared."""
    ranks = dist.get_world_size()
    mesh = init_device_mesh(device.type, (ranks,))
    model = make(device)
    narrow = torch.bfloat16 if setup == "bfloat16" else None
    for module in (model[0], model[1], model):
        fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=narrow))
        if setup == "bfloat16":
            module.set_gradient_divide_factor(3.0)
    options = tagc.Tagc(ratio=4, layers=RULE, index="4bit" if setup == "bfloat16" else "or")
    hooks = tagc.compress(model, options)
    expected = Expected(options, ranks)
    checks = []
    for module in (model[0], model[1], model):
        unit = hooks.reduce_scatter.unit(
            tagc._parameters(module, {id(p): n for n, p in model.named_parameters()})
        )
        checks.append(CheckedUnit(unit, expected, 3.0))
        module.set_custom_reduce_scatter(checks[-1])
    losses = train(model, device)
    reports = hooks.state.reports
    if ranks > 1:
        assert {check.calls for check in checks} == {STEPS}
        assert {r.name for r in reports} == SKETCHED
        assert len(reports) == STEPS * len(SKETCHED)
        records = hooks.reduce_scatter.trace()
        assert sum(r.collective == "sketches" for r in records) == 2 * STEPS
        assert sum(r.wire_bytes for r in records) == hooks.reduce_scatter.wire_bytes
        assert sum(r.raw_bytes for r in records) == hooks.reduce_scatter.raw_bytes
        for name, e in expected.e.items():
            mine = e[dist.get_rank()].reshape(-1)
            assert torch.equal(hooks.state.residuals.residual(name), mine)
    full = torch.cat([p.full_tensor().reshape(-1) for p in model.parameters()])
    return {
        "losses": losses,
        "weights": full.double().sum().item(),
        "bytes": [hooks.reduce_scatter.raw_bytes, hooks.reduce_scatter.wire_bytes],
        "estimated": max([r.estimated for r in reports], default=0),
    }


def routes(device: Any) -> list[int]:
    """Parameters that travel by prepared calls, also if no message fits, arrive as without."""
    again = schedule()
    found: list[Any] = []
    sent_again: list[int] = []
    route: Any
    for route, small in (("exact", False), ("network", False), ("network", True)):
        Scheduled.small = small
        model = make(device)
        for module in (model[0], model[1], model):
            fully_shard(module)
        hooks = tagc.compress(model, tagc.Tagc(ratio=4, layers=RULE), route=route)
        found.append(train(model, device))
        found[-1] += [p.to_local().double().sum().item() for p in model.parameters()]
        found[-1] += [list(report) for report in hooks.state.reports]
        if route == "network":
            assert all(work.judged for work in hooks.all_gather._made)
            assert bool(again) == small
            sent_again.append(hooks.all_gather.sent_again)
        assert hooks.all_gather.wire_bytes > 0
        hooks.close()
    assert found[0] == found[1] == found[2]
    with pytest.raises(ValueError, match="allowed with node: 'exact'"):
        tagc.compress(model, route="network", node=2)
    with pytest.raises(TypeError, match="keep_nbytes"):
        tagc.compress(model, keep_nbytes=1)
    return sent_again


def damaged(device: Any) -> None:
    """Damage of parameters in the last gather is raised before backward returns.

    The other rank, which waits in sums that are no prepared calls, hears of it at once.
    """
    # Not the default group, which ends.
    mesh = DeviceMesh.from_group(dist.new_group(), "cpu")
    torch.manual_seed(1)
    model = fully_shard(torch.nn.Linear(257, 256), mesh=mesh)
    hooks = tagc.compress(model, tagc.Tagc(layers=RULE), route="network", codec="mx")
    model(torch.randn(3, 257)).sum().backward()
    model.reshard()
    if dist.get_rank() == 1:
        (call,) = hooks.all_gather._prepared.values()
        damage(call, 2000, 1)
    start = time.monotonic()
    for _ in range(2):
        with pytest.raises(CollectiveError, match=r"rank 1: all_gather .*\(from rank 0\)"):
            model(torch.randn(3, 257)).sum().backward()
    assert time.monotonic() - start < 20


def hooked(kind: str, device: Any) -> tuple[Any, Any, Any]:
    """A model with hooks, the hook of gradients, and the state."""
    options = tagc.Tagc(ratio=4, layers=RULE)
    if kind == "ddp":
        model = DistributedDataParallel(make(device), bucket_cap_mb=0.5)
        hook = tagc.register(model, options)
        return model, hook, hook.state
    model = make(device)
    for module in (model[0], model[1], model):
        fully_shard(module)
    hooks = tagc.compress(model, options)
    return model, hooks.reduce_scatter, hooks.state


class Waits:
    """Counts what is waited for within sums, and spoils their messages from a rank if told to."""

    def __init__(self) -> None:
        self.within: list[str] = []
        self.at_the_end = 0
        self.spoils = False
        inside = False
        sums, settle = Sketches.sums, sketch_messages.Wire.settle
        opened = sketch_messages.Wire._opened

        def in_sums(*args: Any, **options: Any) -> Any:
            nonlocal inside
            inside = True
            try:
                return sums(*args, **options)
            finally:
                inside = False

        def in_settle(wire: Any, verdict: Any) -> Any:
            if inside:
                self.within += verdict.stages[:1]
            else:
                self.at_the_end += 1
            return settle(wire, verdict)

        def in_opened(wire: Any, stage: str, received: Any) -> Any:
            if self.spoils and stage == "sketch":
                received[0, 9] ^= 4  # the checksum
            return opened(wire, stage, received)

        wire = sketch_messages.Wire
        watched = (Sketches, "sums", in_sums), (wire, "settle", in_settle)
        for owner, name, function in (*watched, (wire, "_opened", in_opened)):
            setattr(owner, name, function)


def late(device: Any) -> None:
    """Hooks wait for nothing but the index, once, where messages are not looked at on the host.

    Damage in a step is raised by its backward, on the rank that has found it.
    """
    wanted = {}
    for kind in ("fsdp", "ddp"):
        model, hook, state = hooked(kind, device)
        wanted[kind] = train(model, device), list(state.reports)
        hook.close()
    waits = Waits()
    vars(sketch_messages)["is_cuda"] = lambda _: True
    for kind in ("fsdp", "ddp"):
        waits.within.clear()
        waits.at_the_end, waits.spoils = 0, False
        model, hook, state = hooked(kind, device)
        losses, reports = wanted[kind]
        assert train(model, device) == losses
        assert list(state.reports) == reports
        units = len(waits.within)
        assert waits.within == ["index"] * units
        # The index and the sums of every call, of which the index is known in the first step.
        calls = sum(record.collective == "sketches" for record in hook.trace())
        assert waits.at_the_end == 2 * calls - units
        assert 0 < units < calls
        waits.spoils = dist.get_rank() == 1
        try:
            model(torch.ones(3, 131)).square().mean().backward()
        except CollectiveError as error:
            assert waits.spoils
            assert "stage 'sketch': data from rank 0 are damaged" in str(error)
        else:
            assert not waits.spoils
        dist.barrier()
        hook.close()


def partial(device: Any) -> list[Any]:
    """A unit of which a layer has no gradient goes by the communicator, and a report says so."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    torch.manual_seed(1)
    model = fully_shard(Half().to(device), mesh=mesh)
    hooks = tagc.compress(model, tagc.Tagc(layers=RULE))
    torch.manual_seed(dist.get_rank())
    x = torch.randn(4, 257, device=device)
    model(x).sum().backward()
    model.unshard()
    with pytest.raises(ValueError, match=r"not sharded; allowed: .* after reshard"):
        tagc.compress(model)
    model.reshard()
    found = model.used.weight.grad.full_tensor()
    wanted = gathered(x.sum(0)).mean(0).expand(256, -1)
    torch.testing.assert_close(found, wanted)
    return [[r.name, r.ratio, r.reason] for r in hooks.state.reports]


class Pair(torch.nn.Module):  # type: ignore[misc, name-defined]
    """Two layers of the same size, not to be told apart by it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(400, 400, bias=False)
        self.second = torch.nn.Linear(400, 400, bias=False)

    def forward(self, x: Any, whole: bool = True) -> Any:
        x = self.first(x)
        return self.second(x) if whole else x


def frozen(device: Any) -> list[Any]:
    """What is frozen and not changes: gradients and residuals stay with their layers."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    torch.manual_seed(1)
    model = Pair().to(device)
    model.first.requires_grad_(False)
    fully_shard(model, mesh=mesh)
    hooks = tagc.compress(model, tagc.Tagc(ratio=2, layers=RULE))
    residuals = hooks.state.residuals
    x = torch.randn(4, 400, device=device)
    model(x).sum().backward()
    kept = residuals.residual("second.weight").clone()
    assert kept.any()

    def swap(first: bool) -> None:
        model.zero_grad()
        model.first.requires_grad_(first)
        model.second.requires_grad_(not first)

    swap(True)
    for _ in range(2):
        # A gradient of zeros: what came of another layer's residual would show.
        model(x * 0).sum().backward()
        assert not model.first.weight.grad.full_tensor().any()
        assert torch.equal(residuals.residual("second.weight"), kept)
    # FSDP accumulates a gradient of the first layer, and has none of the second.
    model.set_requires_gradient_sync(False)
    model(x).sum().backward()
    model.set_requires_gradient_sync(True)
    swap(False)
    model(x.requires_grad_(), whole=False).sum().backward()
    total = gathered(x.detach().sum(0)).mean(0)
    wanted = torch.outer(model.second.weight.full_tensor().sum(0), total)
    torch.testing.assert_close(model.first.weight.grad.full_tensor(), wanted)
    assert model.second.weight.grad is None
    assert torch.equal(residuals.residual("second.weight"), kept)
    return [[r.name, r.reason] for r in hooks.state.reports]


def replicated(device: Any) -> dict[str, Any]:
    """DDP; every bucket is compared, and all ranks have the same bits."""
    ranks = dist.get_world_size()
    model = DistributedDataParallel(make(device), bucket_cap_mb=0.5)
    options = tagc.Tagc(ratio=10, theta=0.99, layers=RULE)
    comm = communicator(None, device)
    names = {p: name for name, p in model.module.named_parameters()}
    hook = tagc.DdpHook(comm, options, tagc.State(), names)
    expected = Expected(options, ranks)
    buckets = []

    def checked(state: Any, bucket: Any) -> Any:
        xs = gathered(bucket.buffer())
        future = tagc.ddp_hook(hook, bucket)
        found, at = future.wait(), 0
        for p in bucket.parameters():
            n = p.numel()
            part = xs[:, at : at + n]
            if names[p] in SKETCHED:
                padded = torch.nn.functional.pad(part, (0, -n % ranks)).view(ranks, ranks, -1)
                wanted = expected.sum(names[p], padded).view(-1)[:n] / ranks
            else:
                wanted = part.new_full((n,), -0.0)
                for row in part:
                    wanted += row
                wanted /= ranks
            assert torch.equal(found[at : at + n], wanted)
            at += n
        buckets.append(names[bucket.parameters()[0]])
        return future

    # DDP compares annotations, which are strings here.
    checked.__annotations__ = {}
    model.register_comm_hook(None, checked)
    losses = train(model, device)
    assert len(buckets) > STEPS
    weights = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    for other in gathered(weights):
        assert torch.equal(other, weights)
    assert {r.name for r in hook.state.reports} == SKETCHED
    registered = tagc.register(DistributedDataParallel(make(device)), options)
    return {
        "losses": losses,
        "bytes": [hook.raw_bytes, hook.wire_bytes],
        "reports": len(hook.state.reports),
        "registered": registered.wire_bytes,
    }


def halves(device: Any) -> float:
    """A mean of gradients of float16 whose sum is too large for it."""
    model = DistributedDataParallel(torch.nn.Linear(300, 300, bias=False).half().to(device))
    tagc.register(model, tagc.Tagc(ratio=2))
    x = torch.zeros(1, 300, device=device).half()
    x[0, 0] = 200
    out = model(x)
    out.backward(200 * torch.eye(1, 300, device=device).half())
    found: float = model.module.weight.grad[0, 0].item()
    return found


def counts(device: Any) -> list[list[int]]:
    """Bytes with and without a memory of calls: of DDP and FSDP, some layers falling back."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    options = tagc.Tagc(theta=0, fallback=(), layers=RULE)
    found = []
    for trace in (1000, 1, 0):
        torch.manual_seed(1)
        x = torch.randn(4, 400, device=device)
        model = DistributedDataParallel(Pair().to(device))
        hook: Any = tagc.register(model, options, trace=trace)
        model(x).sum().backward()
        sharded_model = fully_shard(Pair().to(device), mesh=mesh)
        hooks = tagc.compress(sharded_model, options, trace=trace)
        sharded_model(x).sum().backward()
        some = hook, hooks.reduce_scatter, hooks.all_gather
        found.append([n for one in some for n in (one.raw_bytes, one.wire_bytes)])
    return found


def refused(device: Any) -> None:
    """Calls that raise, and say what is allowed."""
    linear = torch.nn.Linear(2, 2)
    model = DistributedDataParallel(linear.to(device))
    comm, silent = communicator(None, device), communicator(None, device, trace=0)
    wide = DistributedDataParallel(torch.nn.Linear(512, 512).double().to(device))
    hook = tagc.register(wide, comm=comm)
    wide(torch.ones(1, 512, device=device).double()).sum().backward()
    (report,) = hook.state.reports
    assert report.reason.startswith("torch.float64 has no sketch; allowed: torch.float16")
    bad: Any = 10
    calls: list[tuple[Any, type[Exception], str]] = [
        (lambda: tagc.compress(linear), ValueError, "fully_shard comes first"),
        (lambda: tagc.compress(linear, foo=1), TypeError, r"options are \['foo'\]; allowed"),
        (lambda: tagc.compress(linear, bad), TypeError, r"tagc is 10; allowed: a Tagc\(\)"),
        (lambda: tagc.compress(linear, codec="none"), ValueError, "none"),
        (lambda: tagc.register(linear), TypeError, "model is a Linear; allowed: Distributed"),
        (lambda: tagc.register(model, bad), TypeError, r"tagc is 10; allowed: a Tagc\(\)"),
        (lambda: tagc.register(model, state=bad), TypeError, r"state is 10; allowed: a State\(\)"),
        (lambda: tagc.register(model, comm=bad), TypeError, "comm is 10; allowed: a Communicator"),
        (lambda: tagc.register(model, trace=-1), ValueError, "trace is -1; allowed"),
        (lambda: tagc.register(model, comm=comm, trace=3), ValueError, "comm and .* are given"),
        (
            lambda: tagc.register(model, comm=silent),
            ValueError,
            "comm was made with trace=0; allowed",
        ),
    ]
    for call, error, text in calls:
        with pytest.raises(error, match=text):
            call()


def everything(device: Any) -> dict[str, Any]:
    """All of the above; some of it between two ranks only."""
    found: dict[str, Any] = {"float32": sharded(device, "float32"), "ddp": replicated(device)}
    if dist.get_world_size() == 2:
        found["bfloat16"] = sharded(device, "bfloat16")
        found["partial"] = partial(device)
        found["frozen"] = frozen(device)
        found["halves"] = halves(device)
        found["counts"] = counts(device)
        refused(device)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "device"),
    [
        (2, "cpu"),
        pytest.param(4, "cpu", marks=pytest.mark.long),
        pytest.param(2, "cuda", marks=pytest.mark.multi_gpu),
    ],
)
def test_hooks_against_sums_by_hand(ranks: int, device: str, tmp_path: Path) -> None:
    if device == "cuda" and torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    warnings = "error" if device == "cpu" else "default"
    results = launch(__file__, "everything", ranks, tmp_path, device, warnings)
    for found in results:
        for setup in ("float32", "bfloat16") if ranks == 2 else ("float32",):
            assert found[setup]["losses"][-1] < found[setup]["losses"][0]
            assert found[setup]["weights"] == results[0][setup]["weights"]
            assert found[setup]["estimated"] == 0
            raw, wire = found[setup]["bytes"]
            # FSDP calls no hook on a single rank. The rest, a quarter, goes by zipccl.
            assert (raw > 0) == (ranks > 1)
            assert wire <= {"float32": 0.55, "bfloat16": 0.85}[setup] * raw
        assert found["ddp"]["losses"][-1] < found["ddp"]["losses"][0]
        assert found["ddp"]["reports"] == STEPS * len(SKETCHED)
        raw, wire = found["ddp"]["bytes"]
        assert (wire > 0) == (ranks > 1)
        assert wire <= 0.6 * raw
        if ranks == 2:
            reasons = [reason for _, _, reason in found["partial"]]
            assert len(reasons) == 2
            assert all("have no gradient" in reason for reason in reasons)
            changed = "other parameters of its FSDP module require gradients than before"
            assert found["frozen"] == [
                ["second.weight", ""],
                ["first.weight", changed],
                ["first.weight", ""],
                ["second.weight", changed],
            ]
            assert found["halves"] == 40000
            assert all(sizes == found["counts"][0] for sizes in found["counts"])
            assert min(found["counts"][0]) > 0


@pytest.mark.slow
def test_sums_are_judged_at_the_end_of_backward(tmp_path: Path) -> None:
    launch(__file__, "late", 2, tmp_path, warnings="ignore")


@pytest.mark.slow
@pytest.mark.parametrize("task", ["routes", "damaged"])
def test_parameters_by_prepared_calls(task: str, tmp_path: Path) -> None:
    for found in launch(__file__, task, 2, tmp_path, warnings="ignore"):
        assert found is None or min(found) > 0


@pytest.mark.long
def test_the_example_in_the_docstring(tmp_path: Path) -> None:
    found = run_example(tagc, 2, tmp_path)
    assert len(found) == 2
    for loss, ratio in found:
        # Of eight classes, it begins at log(8), 2.1.
        assert loss < 1
        assert 0 < ratio < 0.25


if __name__ == "__main__":
    join(globals(), sys.argv[1:])
