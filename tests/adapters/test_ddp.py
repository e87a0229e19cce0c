"""DistributedDataParallel with compressed gradients, between real processes: also what they run."""

from __future__ import annotations

import contextlib
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tightwire as tw
from capacities import PATTERNS, Scheduled, schedule
from lossy import Residuals
from processes import join, launch, run_example
from support import examples

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("PyTorch was built without gloo", allow_module_level=True)

from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from tightwire.adapters.training import ddp, prepared_ddp  # noqa: E402
from tightwire.adapters.training.error_feedback import ErrorFeedback  # noqa: E402
from tightwire.adapters.training.hooks import Channel, average, install  # noqa: E402
from tightwire.adapters.transports.threads import ThreadTransport, run_ranks  # noqa: E402
from tightwire.adapters.transports.torch_dist import TorchDist  # noqa: E402

FLOATS = ("bfloat16", "float16", "float32", "float64")

#: Options of DistributedDataParallel, and backward passes between two steps.
SETUPS: dict[str, tuple[dict[str, Any], int]] = {
    "plain": ({}, 1),
    "views": ({"gradient_as_bucket_view": True}, 3),
    "unused views": ({"find_unused_parameters": True, "gradient_as_bucket_view": True}, 2),
    "static views": ({"static_graph": True, "gradient_as_bucket_view": True}, 1),
}


class Model(torch.nn.Module):  # type: ignore[misc, name-defined]
    """Odd sizes, two dtypes, a frozen layer; perhaps a layer for some ranks, and one for none."""

    def __init__(self, unused: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = torch.nn.Linear(61, 213)
        self.narrow = torch.nn.Linear(213, 213).bfloat16()
        self.frozen = torch.nn.Linear(213, 213).requires_grad_(False)
        self.last = torch.nn.Linear(213, 41)
        if unused:
            self.sometimes = torch.nn.Linear(213, 41)
            self.never = torch.nn.Linear(213, 41)

    def forward(self, x: Any, sometimes: bool) -> Any:
        x = self.first(x).relu()
        x = self.frozen(x) + self.narrow(x.bfloat16()).float()
        y = self.last(x)
        return y + self.sometimes(x) if sometimes else y


def mean(parts: Any, dtype: Any) -> Any:
    """The mean of equal tensors: added up in float32 in order, divided, rounded."""
    total = torch.full_like(parts[0], -0.0, dtype=torch.promote_types(dtype, torch.float32))
    for part in parts:
        total += part.to(total.dtype)
    return (total / len(parts)).to(dtype)


def same(a: Any, b: Any) -> bool:
    """Equal bits."""
    bits = [t.contiguous().view(torch.uint8) for t in (a, b)]
    return a.dtype == b.dtype and bool(torch.equal(*bits))


def average_by_hand(model: Any) -> None:
    """Replace the gradients by their means over ranks; None where no rank has one."""
    for p in model.parameters():
        if not p.requires_grad:
            continue
        used = torch.tensor([p.grad is not None], dtype=torch.int32, device=p.device)
        dist.all_reduce(used)
        if used.item():
            mine = torch.zeros_like(p) if p.grad is None else p.grad
            parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, mine)
            p.grad = mean(parts, p.dtype)


def train(device: Any, setup: str, pattern: str | None = None) -> dict[str, Any]:
    """Some steps with the hook; the same by hand; gradients and weights must have the same bits.

    With a `pattern` by prepared calls, of which some do not fit.
    """
    options, passes = SETUPS[setup]
    rank = dist.get_rank()
    unused = "unused" in setup or "static" in setup
    by_hand = Model(unused).to(device)
    inner = Model(unused).to(device)
    where = [device] if device.type == "cuda" else None
    model = DistributedDataParallel(inner, device_ids=where, bucket_cap_mb=0.02, **options)
    seen: list[int] = []
    state: Any = None
    if pattern is not None:
        state = ddp.PreparedDdpHook("network", model.process_group)

        # DDP would not take annotations that are strings.
        def sized(state, bucket):  # type: ignore[no-untyped-def]
            Scheduled.small = PATTERNS[pattern](len(seen))
            seen.append(bucket.buffer().numel() * bucket.buffer().element_size())
            return ddp.prepared_ddp_hook(state, bucket)

        install(model, state, sized)
    elif setup == "plain":
        state = ddp.register(model)
    else:
        group = dist.new_group()
        state = ddp.DdpHook(tw.Communicator(TorchDist(group, device)))

        # DDP would not take annotations that are strings.
        def spy(state, bucket):  # type: ignore[no-untyped-def]
            seen.append(bucket.buffer().numel() * bucket.buffer().element_size())
            return ddp.ddp_hook(state, bucket)

        model.register_comm_hook(state, spy)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (inner, by_hand)]
    torch.manual_seed(100 + rank)
    losses = []
    for _ in range(3):
        for i in range(passes):
            x = torch.randn(7, 61, device=device)
            # A static graph is the same on all ranks and in all steps.
            sometimes = unused and rank == 0 and "static" not in setup
            with model.no_sync() if i < passes - 1 else contextlib.nullcontext():
                loss = model(x, sometimes).square().mean()
                loss.backward()
            reference = by_hand(x, sometimes).square().mean()
            reference.backward()
            assert loss.item() == reference.item()
            losses.append(loss.item())
        average_by_hand(by_hand)
        for (name, p), q in zip(inner.named_parameters(), by_hand.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name
            assert p.grad is None or same(p.grad, q.grad), name
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for p, q in zip(inner.parameters(), by_hand.parameters(), strict=True):
        assert same(p, q)
    if pattern is not None:
        assert state.wire_bytes > 0
        assert not state._sent
        # Buckets of the first step were others.
        assert setup != "plain" or set(state._prepared) == set(state._used)
        state.close()
        return {}
    records = state.comm.trace()
    assert all(record.error is None for record in records)
    return {
        "losses": losses,
        "seen": seen,
        "calls": [[r.collective, r.raw_bytes, r.wire_bytes] for r in records],
        "raw": state.raw_bytes,
        "wire": state.wire_bytes,
    }


def lossy(device: Any) -> dict[str, Any]:
    """Training with 4-bit gradients and error feedback; every bucket against NumPy, bit for bit."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    layers = torch.nn.Linear(61, 213), torch.nn.Linear(213, 213), torch.nn.Linear(213, 41)
    inner = torch.nn.Sequential(layers[0], torch.nn.Tanh(), layers[1], torch.nn.Tanh(), layers[2])
    inner = inner.to(device)
    where = [device] if device.type == "cuda" else None
    model = DistributedDataParallel(inner, device_ids=where, bucket_cap_mb=0.1)
    codec, feedback = tw.codec("nvfp4"), ErrorFeedback()
    comm = tw.Communicator(TorchDist(dist.new_group(), device), codec)
    names = {p: name for name, p in inner.named_parameters()}
    state = ddp.DdpHook(comm, feedback, names)
    reference = Residuals(codec, size)
    cuts = []

    def spy(state, bucket):  # type: ignore[no-untyped-def]
        parts = [(names[p], p.numel()) for p in bucket.parameters()]
        cuts.append([name for name, _ in parts])
        gradients = [torch.empty_like(bucket.buffer()) for _ in range(size)]
        dist.all_gather(gradients, bucket.buffer())
        wanted = reference.average([g.cpu().numpy() for g in gradients], parts)
        found = ddp.ddp_hook(state, bucket)
        assert found.wait().cpu().numpy().tobytes() == wanted.tobytes()
        for name, _ in parts:
            e = feedback.residual(name).cpu().numpy()
            assert e.tobytes() == reference.e[rank][name].tobytes()
        return found

    model.register_comm_hook(state, spy)
    optimizer = torch.optim.SGD(inner.parameters(), lr=2.0)
    data = torch.Generator().manual_seed(100 + rank)
    x = torch.randn(31, 61, generator=data).to(device)
    y = torch.randn(31, 41, generator=data).to(device)
    losses = []
    for _ in range(10):
        loss = (model(x) - y).square().mean()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    weights = torch.cat([p.detach().reshape(-1) for p in inner.parameters()])
    everyones = [torch.empty_like(weights) for _ in range(size)]
    dist.all_gather(everyones, weights)
    assert all(same(weights, other) for other in everyones)
    assert set(feedback.state_dict()["residuals"]) == set(names.values())
    return {"losses": losses, "cuts": cuts, "raw": state.raw_bytes, "wire": state.wire_bytes}


def registered(device: Any) -> list[int]:
    """The same by `register`, and options that do not fit."""
    model = DistributedDataParallel(torch.nn.Linear(100, 300).to(device))
    state = ddp.register(model, error_feedback=ErrorFeedback(), codec="taco")
    model(torch.ones(2, 100, device=device)).square().sum().backward()
    assert state.error_feedback is not None
    assert set(state.error_feedback.state_dict()["residuals"]) == {"weight", "bias"}
    with pytest.raises(ValueError, match="names are not"):
        ddp.DdpHook(state.comm, ErrorFeedback())
    return [state.raw_bytes, state.wire_bytes]


class Broken(TorchDist):
    """A transport that loses its peers between two calls."""

    def all_to_all(self, out: Any, x: Any) -> None:
        raise ConnectionError("the peer is gone")


def refuse(device: Any) -> list[str]:
    """What is raised for sparse gradients, for options beside a communicator, for lost peers."""
    found = []
    model = DistributedDataParallel(torch.nn.Embedding(10, 3, sparse=True).to(device))
    state = ddp.register(model)
    with pytest.raises(TypeError) as caught:
        model(torch.tensor([1, 2], device=device)).sum().backward()
    found.append(str(caught.value))
    with pytest.raises(ValueError, match="allowed") as both:
        ddp.register(model, state.comm, sizes="first")
    found.append(str(both.value))
    model = DistributedDataParallel(torch.nn.Linear(3, 3).to(device))
    state = ddp.register(model, tw.Communicator(Broken(dist.new_group(), device)))
    with pytest.raises(tw.CollectiveError) as broken:
        model(torch.ones(1, 3, device=device)).sum().backward()
    found.append(str(broken.value))
    assert isinstance(broken.value.__cause__, ConnectionError)
    assert state.comm.trace()[-1].error == str(broken.value)
    return found


def prepared(device: Any) -> dict[str, Any]:
    """Training by prepared calls, whatever does not fit."""
    again = schedule()
    found = {}
    vars(prepared_ddp)["_KEPT"] = 1
    for setup in SETUPS:
        for pattern in PATTERNS:
            again.clear()
            train(device, setup, pattern)
            found[f"{setup}; {pattern}"] = dict(again)
    model = DistributedDataParallel(torch.nn.Linear(100, 300).to(device))
    with ddp.register(model, route="network", codec="mx") as hook:
        model(torch.ones(2, 100, device=device)).square().sum().backward()
        assert 0 < hook.wire_bytes < 0.3 * hook.raw_bytes
    with pytest.raises(tw.CollectiveError, match="the hook is closed"):
        model(torch.ones(2, 100, device=device)).square().sum().backward()
    with pytest.raises(ValueError, match="allowed then: 'exact'"):
        ddp.register(model, route="network", error_feedback=ErrorFeedback())
    with pytest.raises(TypeError, match=r"options are \['topology'\]"):
        ddp.register(model, route="network", topology="ring")
    model = DistributedDataParallel(torch.nn.Linear(100, 300).to(device))
    with ddp.register(model, route="auto") as hook:
        model(torch.ones(2, 100, device=device) * dist.get_rank()).square().sum().backward()
        everyones = [torch.empty_like(model.module.bias.grad) for _ in range(2)]
        dist.all_gather(everyones, model.module.bias.grad)
        assert same(*everyones)
        (switch,) = hook.switches.values()
        assert len(switch.seconds) == 1
    joined(device)
    float32_as_bfloat16(device)
    return found


class Layouts(torch.nn.Module):  # type: ignore[misc, name-defined]
    """Weights that lie in memory in another order of dimensions, and one with gaps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        convs = [torch.nn.Conv2d(8, 8, 3, bias=False) for _ in range(2)]
        self.convs = torch.nn.Sequential(*convs).to(memory_format=torch.channels_last)
        self.last = torch.nn.Linear(8, 16)
        self.last.weight = torch.nn.Parameter(torch.randn(16, 16)[:, ::2])

    def forward(self, x: Any) -> Any:
        return self.last(self.convs(x).mean((2, 3)))


def layouts(device: Any) -> list[bool]:
    """Gradients have their parameters' order, and are copied out of buckets that are right."""
    again = schedule()
    Scheduled.small = True
    found = []
    for options in ({}, {"static_graph": True}):
        again.clear()
        plain, model = (
            DistributedDataParallel(Layouts(), bucket_cap_mb=0.002, **options) for _ in range(2)
        )
        with ddp.register(model, route="network"):
            for k in range(3):
                torch.manual_seed(10 * k + dist.get_rank())
                x = torch.randn(2, 8, 9, 9).to(memory_format=torch.channels_last)
                for each in (plain, model):
                    each.zero_grad()
                    each(x).square().sum().backward()
                for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
                    assert p.grad.stride() == q.grad.stride()
                    assert torch.allclose(p.grad, q.grad, rtol=1e-5), (options, k, name)
        found.append(bool(again))
    return found


def left_alone(device: Any) -> list[bool]:
    """Gradients of what no rank has used stay as they are, also beside what is sent again."""
    again = schedule()
    Scheduled.small = True
    found = []
    ways: list[dict[str, Any]] = [{"find_unused_parameters": True}, {"static_graph": True}]
    for options in ways:
        again.clear()
        plain, model = (DistributedDataParallel(Model(unused=True), **options) for _ in range(2))
        with ddp.register(model, route="network"):
            for k in range(3):
                torch.manual_seed(10 * k + dist.get_rank())
                x = torch.randn(7, 61)
                for each in (plain, model):
                    for p in each.module.never.parameters():
                        p.grad = torch.full_like(p, 10 * k + dist.get_rank())
                    # Another mean of what the user has changed would not be that.
                    for p in each.module.sometimes.parameters():
                        if p.grad is not None:
                            p.grad *= 1 + dist.get_rank()
                    # A graph that is not static has this layer in its first step only.
                    each(x, k == 0 and "static_graph" not in options).square().mean().backward()
                for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
                    assert (p.grad is None) == (q.grad is None), (options, k, name)
                    assert p.grad is None or same(p.grad, q.grad), (options, k, name)
        found.append(bool(again))
    return found


def copied(device: Any) -> list[bool]:
    """What is copied out of buckets. Whether something was sent again, by model."""
    return layouts(device) + left_alone(device)


def joined(device: Any) -> None:
    """A rank that has no more data makes the calls of the others, also when all send again."""
    from tightwire.adapters.collectives import prepared_work

    vars(prepared_work)["Capacity"], Scheduled.small = Scheduled, False
    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 64) for _ in range(6)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers).to(device), bucket_cap_mb=0.02)
    with ddp.register(model, route="network"), model.join():
        for k in range(5 if dist.get_rank() else 3):
            model.zero_grad()
            Scheduled.small = k >= 2
            torch.manual_seed(k)
            model(torch.randn(5, 64, device=device)).square().mean().backward()
            if k < 3:
                assert all(p.grad.any() for p in model.parameters())
                own = [p.grad.clone() for p in model.parameters()]
                continue
            # The other rank's term is zero.
            found = [p.grad.clone() for p in model.parameters()]
            model.zero_grad()
            torch.manual_seed(k)
            model.module(torch.randn(5, 64, device=device)).square().mean().backward()
            for mean, p in zip(found, model.parameters(), strict=True):
                assert same(mean, p.grad / 2)
    if not dist.get_rank():
        assert all(same(p.grad, kept) for p, kept in zip(model.parameters(), own, strict=True))


def float32_as_bfloat16(device: Any) -> None:
    """Between two ranks a sum is of the tensor's own term, and of the other's as it travels."""
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(torch.nn.Linear(100, 300).to(device))
    x = torch.randn(2, 100, device=device)
    with ddp.register(model, route="network", wire="bfloat16") as hook:
        model(x).square().sum().backward()
        assert hook.wire_bytes < 0.51 * hook.raw_bytes
    sums = model.module.weight.grad.clone()
    plain = torch.nn.Linear(100, 300).to(device)
    plain.load_state_dict(model.module.state_dict())
    plain(x).square().sum().backward()
    terms = [torch.empty_like(sums) for _ in range(2)]
    dist.all_gather(terms, plain.weight.grad)
    error = (sums - (terms[0] + terms[1]) / 2).abs().max()
    assert 0 < error <= (terms[0].abs() + terms[1].abs()).max() * 2**-8


def everything(device: Any) -> dict[str, Any]:
    """All setups, and what is refused."""
    results: dict[str, Any] = {setup: train(device, setup) for setup in SETUPS}
    results["lossy"] = lossy(device)
    results["registered"] = registered(device)
    if device.type == "cpu":
        results["refused"] = refuse(device)
    return results


def check(results: list[dict[str, Any]]) -> None:
    """That every rank has sent what it should: fewer bytes, in two calls per bucket."""
    world_size = len(results)
    for setup, (_, passes) in SETUPS.items():
        for found in (rank[setup] for rank in results):
            assert len(found["losses"]) == 3 * passes
            names, raw, wire = (list(column) for column in zip(*found["calls"], strict=True))
            assert names == ["reduce_scatter", "all_gather"] * (len(names) // 2)
            # Several buckets in each of the three steps, fewer perhaps before they are rebuilt.
            assert len(names) > 2 * 3 * 2
            assert found["raw"] == sum(raw)
            assert found["wire"] == sum(wire)
            assert sum(wire) < 0.93 * sum(raw)
            if setup == "plain":
                continue
            assert len(found["seen"]) == len(names) // 2
            for nbytes, scattered, gathered in zip(found["seen"], raw[::2], raw[1::2], strict=True):
                assert scattered == gathered
                # Padded by less than an element of 4 bytes for each rank.
                excess = scattered * world_size - nbytes * (world_size - 1)
                assert 0 <= excess < 4 * world_size**2
    for found in (rank["lossy"] for rank in results):
        assert found["losses"][-1] < 0.8 * found["losses"][0]
        # Buckets come in another cut once DDP has seen in which order gradients come.
        assert len({tuple(names) for names in found["cuts"]}) > 2
        assert found["wire"] < 0.17 * found["raw"]
    for raw, wire in (rank["registered"] for rank in results):
        assert raw > 0
        assert wire < 0.28 * raw


@pytest.mark.slow
def test_training_is_that_of_means_in_float32(tmp_path: Path) -> None:
    results = launch(__file__, "everything", 2, tmp_path)
    check(results)
    for me, (sparse, both, broken) in enumerate(rank["refused"] for rank in results):
        assert "sparse" in sparse
        assert "comm and ['sizes'] are given" in both
        assert broken.startswith(f"rank {me}: reduce_scatter #0 failed in stage 'sizes'")


@pytest.mark.slow
def test_prepared_calls_train_bit_for_bit(tmp_path: Path) -> None:
    for found in launch(__file__, "prepared", 2, tmp_path):
        assert len(found) == len(SETUPS) * len(PATTERNS)
        for case, again in found.items():
            pattern = case.rpartition("; ")[2]
            # The first bucket may be one of which nothing needs more.
            assert pattern == "the first" or bool(again) == (pattern != "none"), (case, again)


@pytest.mark.slow
def test_gradients_are_copied_as_ddp_copies_them(tmp_path: Path) -> None:
    for found in launch(__file__, "copied", 2, tmp_path, warnings="ignore"):
        assert found == [True] * 4


@pytest.mark.long
def test_example(tmp_path: Path) -> None:
    found = run_example(ddp, 2, tmp_path)
    assert len(found) == 2
    for raw, wire in found:
        # Three steps; half of the gradients goes out, and half of the means.
        assert raw == 3 * 2 * 1001 * 1000
        assert wire < 0.75 * raw


@pytest.mark.long
@pytest.mark.parametrize("world_size", [1, 3])
def test_training_on_other_numbers_of_ranks(world_size: int, tmp_path: Path) -> None:
    results = launch(__file__, "everything", world_size, tmp_path)
    if world_size > 1:
        check(results)


@pytest.mark.multi_gpu
def test_prepared_calls_on_gpus(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    for found in launch(__file__, "prepared", 2, tmp_path, "cuda", "default"):
        assert len(found) == len(SETUPS) * len(PATTERNS)


@pytest.mark.multi_gpu
def test_training_on_gpus(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    check(launch(__file__, "everything", 2, tmp_path, "cuda", "default"))


@given(
    world_size=st.integers(1, 5),
    size=st.integers(1, 40) | st.integers(4000, 9000),
    dtype=st.sampled_from(FLOATS),
    scale=st.sampled_from([1e-6, 1.0, 1e4]),
)
@examples(20)
def test_average_is_rounded_once_and_equal_on_all_ranks(
    world_size: int, size: int, dtype: str, scale: float
) -> None:
    kind = getattr(torch, dtype)
    generator = torch.Generator().manual_seed(size)
    parts = [(torch.randn(size, generator=generator) * scale).to(kind) for _ in range(world_size)]
    wanted = mean(parts, kind)

    def task(transport: ThreadTransport) -> Any:
        x = parts[transport.rank].clone()
        average(tw.Communicator(transport), x)
        return x

    for found in run_ranks(world_size, task):
        assert same(found, wanted)


@pytest.mark.parametrize("dtype", ["int32", "complex64"])
def test_average_takes_floats_only(dtype: str) -> None:
    def task(transport: ThreadTransport) -> None:
        average(tw.Communicator(transport), torch.zeros(3, dtype=getattr(torch, dtype)))

    with pytest.raises(TypeError, match=dtype):
        run_ranks(2, task)


def test_a_joined_rank_judges_at_its_last_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside of backward, also where buckets are left to PyTorch."""
    judged: list[int] = []
    with contextlib.closing(prepared_ddp.PreparedDdpHook("network", None)) as hook:
        monkeypatch.setattr(prepared_ddp, "allreduce_hook", lambda group, bucket: bucket)
        monkeypatch.setattr(hook, "_judge", lambda: judged.append(1))
        monkeypatch.setattr(hook.native_buckets, "take", lambda bucket: True)
        for last in (False, False, True):
            assert not judged
            bucket: Any = SimpleNamespace(is_last=lambda last=last: last)
            assert prepared_ddp.prepared_ddp_hook(hook, bucket) is bucket
    assert judged == [1]


def test_calls_of_a_channel_from_many_threads_take_turns() -> None:
    inside = threading.Semaphore(1)

    def task(transport: ThreadTransport) -> tuple[list[Any], int, int]:
        channel = Channel(tw.Communicator(transport))
        x = torch.randn(8192, generator=torch.Generator().manual_seed(1)).bfloat16()
        out = torch.zeros(8192, dtype=torch.bfloat16)

        def call() -> None:
            assert inside.acquire(blocking=False)
            channel.comm.all_gather(x, out)
            inside.release()

        threads = [threading.Thread(target=channel.run, args=(out, call)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert torch.equal(channel.run(out, call).wait(), x)
        return channel.comm.trace(), channel.raw_bytes, channel.wire_bytes

    ((records, raw, wire),) = run_ranks(1, task)
    assert [record.sequence for record in records] == list(range(9))
    assert (raw, wire) == (0, 0)


if __name__ == "__main__":
    join(globals(), sys.argv[1:])
