"""Tensor-parallel layers with encoded collectives, between real processes: also what they run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tightwire as tw
from lossy import check_over_time
from processes import join, launch, run_example
from support import examples

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("PyTorch was built without gloo", allow_module_level=True)

from torch.utils.checkpoint import checkpoint  # noqa: E402

from parallel_layers import batch, digest, made, mine  # noqa: E402
from tightwire.adapters.training import tensor_parallel as tp  # noqa: E402
from tightwire.adapters.training.error_feedback import ErrorFeedback  # noqa: E402
from tightwire.adapters.transports.threads import ThreadTransport, connect, run_ranks  # noqa: E402

#: Codecs forward and backward, and what the error of a sum by each may be: at least, at most.
LOSSY: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "taco, mxfp4": ("taco", {}, "mx", {"element": "e2m1"}),
    "mxfp8, taco int8": ("mx", {"element": "e4m3"}, "taco", {"format": "int8"}),
}
ERRORS = {"taco": (5e-4, 2.5e-3), "mxfp4": (5e-3, 6e-2), "mxfp8": (5e-4, 3e-3)}
ERRORS |= {"taco int8": (1e-5, 4e-4)}


def check_against_one_process(device: Any) -> None:
    """In float64, where order hardly matters: outputs and gradients are those of the full model."""
    dtype = torch.float64
    x, gradient = batch(device, dtype)
    full = made(device, dtype)
    y = full(x)
    y.backward(gradient)
    wanted = {
        "first.weight": mine(full.first.weight.grad, 0, 3),
        "first.bias": mine(full.first.bias.grad, 0, 3),
        "last.weight": mine(full.last.weight.grad, 1),
        "last.bias": full.last.bias.grad,
    }
    for sequence_dim in (None, 1):
        for codec in ("zipccl", None):
            parallel = tp.connect(codec, codec, device=device)
            model = made(device, dtype, parallel, sequence_dim)
            own, out, end = x.detach(), y.detach(), gradient
            if sequence_dim is not None:
                own, out, end = (mine(t, sequence_dim) for t in (own, out, end))
            own = own.clone().requires_grad_()
            found = model(own)
            found.backward(end)
            torch.testing.assert_close(found.detach(), out, rtol=1e-12, atol=1e-12)
            share = x.grad if sequence_dim is None else mine(x.grad, sequence_dim)
            torch.testing.assert_close(own.grad, share, rtol=1e-12, atol=1e-12)
            for name, p in model.named_parameters():
                torch.testing.assert_close(p.grad, wanted[name], rtol=1e-12, atol=1e-12)


def bits_of(device: Any, codec: str | None, sequence_dim: int | None) -> list[Any]:
    """Output and gradients in bfloat16."""
    x, gradient = batch(device, torch.bfloat16)
    parallel = tp.connect(codec, codec, device=device)
    model = made(device, torch.bfloat16, parallel, sequence_dim)
    if sequence_dim is not None:
        x, gradient = mine(x.detach(), 1).clone().requires_grad_(), mine(gradient, 1)
    y = model(x)
    y.backward(gradient)
    records = parallel.trace()
    assert parallel.raw_bytes == sum(r.raw_bytes for r in records)
    assert parallel.wire_bytes == sum(r.wire_bytes for r in records)
    if codec is not None:
        assert 0 < parallel.wire_bytes < parallel.raw_bytes
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]


def lossless(device: Any) -> None:
    """zipccl changes no bit of a computation in bfloat16, nor does a checkpoint."""
    for sequence_dim in (None, 1):
        plain = bits_of(device, None, sequence_dim)
        for a, b in zip(plain, bits_of(device, "zipccl", sequence_dim), strict=True):
            assert digest(a) == digest(b)
    x, gradient = batch(device, torch.bfloat16)
    model = made(device, torch.bfloat16, tp.connect("zipccl", None, device=device))
    checkpoint(model, x, use_reentrant=False).backward(gradient)
    plain = bits_of(device, None, None)
    assert digest(x.grad, *(p.grad for p in model.parameters())) == digest(*plain[1:])


def lossy(device: Any, name: str) -> dict[str, Any]:
    """Sums through lossy codecs: errors forward and backward, digests, and what was sent."""
    forward, forward_params, backward, backward_params = LOSSY[name]
    codecs = tw.codec(forward, **forward_params), tw.codec(backward, **backward_params)
    parallel = tp.connect(*codecs, device=device, wire="bfloat16")
    rank, size = dist.get_rank(), dist.get_world_size()
    xs = [torch.randn(65, 129, generator=torch.Generator().manual_seed(r)) for r in range(size)]
    exact = torch.stack(xs).sum(0)

    x = xs[rank].to(device).requires_grad_()
    y = parallel.all_reduce(x)
    y.backward(xs[rank].to(device))
    # Identity backward.
    assert torch.equal(x.grad, xs[rank].to(device))
    z = exact.to(device).requires_grad_()
    parallel.copy(z).backward(xs[rank].to(device))
    found = {
        "errors": [tw.error(exact, y.detach().cpu()).vnmse, tw.error(exact, z.grad.cpu()).vnmse],
        "digest": digest(y, z.grad),
        "calls": [[r.algorithm, r.raw_bytes, r.wire_bytes] for r in parallel.trace()],
    }
    gathered = parallel.all_gather(xs[rank].to(device).requires_grad_(), dim=1)
    assert gathered.shape == (65, 129 * size)
    found["gathered"] = digest(gathered)
    return found


def narrow(device: Any) -> list[int]:
    """`wire` alone: values are rounded to bfloat16, added up in float32, and rounded again."""
    parallel = tp.connect(None, None, device=device, wire="bfloat16")
    rank, size = dist.get_rank(), dist.get_world_size()
    xs = [torch.randn(64, 3, generator=torch.Generator().manual_seed(r)) for r in range(size)]
    total = torch.zeros(64, 3)
    for x in xs:
        total += x.bfloat16().float()
    found = parallel.all_reduce(xs[rank].to(device)).cpu()
    assert digest(found) == digest(total.bfloat16().float())
    # Sums arrive as they are, what is gathered is rounded.
    scattered = parallel.reduce_scatter(xs[rank].to(device)).cpu()
    assert digest(scattered) == digest(mine(total, 0))
    gathered = parallel.all_gather(xs[rank].to(device)).cpu()
    assert digest(gathered) == digest(torch.cat(xs).bfloat16().float())
    integers = parallel.all_reduce(torch.full((3,), 70001, device=device))
    assert integers.tolist() == [70001 * size] * 3
    return [parallel.raw_bytes, parallel.wire_bytes]


def over_time(device: Any) -> None:
    """The same tensors in 4 bits again and again, forward and backward, in odd shapes."""
    steps, rank, size = 16, dist.get_rank(), dist.get_world_size()
    codec, feedback = tw.codec("mx", element="e2m1"), ErrorFeedback()
    parallel = tp.connect(codec, codec, device=device, wire="bfloat16")
    fed = parallel.with_feedback(feedback, "a")
    generator = torch.Generator().manual_seed(3)
    shares = torch.randn(size, 5, 43, generator=generator).to(device)
    wholes = torch.randn(size, 5, 43 * size, generator=generator).to(device)
    joined, split = torch.cat(list(shares), 1), wholes.sum(0).chunk(size, 1)[rank]
    calls: dict[str, tuple[Any, Any, Any]] = {
        # What goes in forward and backward, and what comes out.
        "all_reduce": (shares, shares, (shares.sum(0), shares[rank])),
        "copy": (shares, shares, (shares[rank], shares.sum(0))),
        "all_gather": (shares, wholes, (joined, split)),
        "reduce_scatter": (wholes, shares, (split, joined)),
    }

    def run(parallel: Any, name: str) -> list[Any]:
        x, gradient = (inputs[rank].clone() for inputs in calls[name][:2])
        dim = (1,) if name in ("all_gather", "reduce_scatter") else ()
        y = getattr(parallel, name)(x.requires_grad_(), *dim)
        y.backward(gradient)
        assert torch.equal(x, calls[name][0][rank])
        assert torch.equal(gradient, calls[name][1][rank])
        return [t.detach().cpu().numpy() for t in (y, x.grad)]

    def left(key: str) -> Any:
        """What is missing of a result, from the residuals of all ranks."""
        e = [torch.empty_like(feedback.residual(key)) for _ in range(size)]
        dist.all_gather(e, feedback.residual(key))
        if key.endswith("all_gather"):
            return torch.cat([one.view(43, 5) for one in e]).t().cpu().numpy()
        total = torch.stack(e).sum(0)
        if key.endswith("reduce_scatter"):
            return total.view(43 * size, 5).t().chunk(size, 1)[rank].cpu().numpy()
        return total.view(5, 43).cpu().numpy()

    for name, (_, _, exact) in calls.items():
        feedback.reset()
        found = [run(fed, name) for _ in range(steps)]
        plain = run(parallel, name)
        keys = {key.split(".")[1]: key for key in feedback.state_dict()["residuals"]}
        for k, direction in enumerate(("forward", "backward")):
            results, wanted = [f[k] for f in found], exact[k].cpu().numpy()
            if direction in keys:
                check_over_time(results, wanted, left(keys[direction]), plain[k])
            else:
                assert digest(*map(torch.from_numpy, results)) == digest(*[exact[k]] * steps)


NAMES = {
    None: ["first.backward.all_reduce", "last.forward.all_reduce"],
    1: [
        *("first.backward.reduce_scatter", "first.forward.all_gather"),
        *("last.backward.all_gather", "last.backward.all_reduce", "last.forward.reduce_scatter"),
    ],
}


def fed_back(device: Any) -> None:
    """Layers with feedback: in evaluation as without, and on from a checkpoint bit for bit."""
    codec = tw.codec("mx", element="e2m1")
    parallel = tp.connect(codec, codec, device=device)
    for sequence_dim, names in NAMES.items():
        whole, end = batch(device, torch.bfloat16)
        if sequence_dim is not None:
            whole, end = mine(whole, sequence_dim), mine(end, sequence_dim)
        x = whole.detach()
        model = made(device, torch.bfloat16, parallel, sequence_dim)

        def step(model: Any, x: Any = x, end: Any = end) -> str:
            own = x.clone().requires_grad_()
            model.zero_grad()
            y = model(own)
            y.backward(end)
            return digest(y, own.grad, *(p.grad for p in model.parameters()))

        plain = step(model)
        with torch.no_grad():
            unfed = digest(model(x))
        feedback, other = ErrorFeedback(), ErrorFeedback()
        tp.set_error_feedback(model, feedback)
        step(model)
        state = feedback.state_dict()
        residuals = state["residuals"]
        assert sorted(residuals) == names
        assert all(e.any() for e in residuals.values())
        model.eval()
        assert step(model) == plain
        model.train()
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                assert digest(model(x)) == unfed
        assert all(torch.equal(e, feedback.residual(name)) for name, e in residuals.items())
        other.load_state_dict(state)
        second = step(model)
        assert second != plain
        tp.set_error_feedback(model, other)
        assert step(model) == second
        tp.set_error_feedback(model, None)
        assert step(model) == plain


def everything(device: Any) -> dict[str, Any]:
    """All of it on one rank."""
    check_against_one_process(device)
    lossless(device)
    over_time(device)
    fed_back(device)
    return {name: lossy(device, name) for name in LOSSY} | {"narrow": narrow(device)}


def check(ranks: list[dict[str, Any]]) -> None:
    """Errors are those of the codecs, all ranks have the same bits, and fewer bytes were sent."""
    for name in LOSSY:
        found = [rank[name] for rank in ranks]
        assert len({f["digest"] for f in found}) == 1
        assert len({f["gathered"] for f in found}) == 1
        for value, kind in zip(found[0]["errors"], name.split(", "), strict=True):
            least, most = ERRORS[kind]
            assert least < value < most, (name, kind, value)
        for f in found:
            for (path, raw, wire), codec in zip(f["calls"], LOSSY[name][::2], strict=True):
                assert path.endswith(f", {codec}")
                # The others' shares out, and of the sums its own to each, in bfloat16.
                assert abs(raw - 2 * 2 * 65 * 129 * (1 - 1 / len(ranks))) <= 4 * len(ranks)
                assert wire < (0.35 if codec == "mx" and "mxfp4" in name else 0.65) * raw
    for rank in ranks:
        raw, wire = rank["narrow"]
        size = len(ranks)
        share, whole = 2 * 192 // size, 2 * 192
        # All-reduce, reduce-scatter and all-gather of 192 bfloat16; a sum of three int64.
        assert raw == (size - 1) * (2 * share + share + whole + 2 * (24 // size))
        # Calls are compared before the first of a kind.
        assert raw <= wire < raw + 100 * size


@pytest.mark.slow
def test_layers_are_those_of_one_process(tmp_path: Path) -> None:
    check(launch(__file__, "everything", 2, tmp_path))


@pytest.mark.long
def test_example(tmp_path: Path) -> None:
    found = run_example(tp, 2, tmp_path)
    assert len(found) == 2
    for raw, wire in found:
        # An all-reduce of 64 x 256 bfloat16 forward, and one backward.
        assert raw == 2 * 2 * 64 * 256
        assert wire < 0.56 * raw


@pytest.mark.long
def test_layers_on_four_ranks(tmp_path: Path) -> None:
    check(launch(__file__, "everything", 4, tmp_path))


@pytest.mark.multi_gpu
def test_layers_on_gpus(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    check(launch(__file__, "everything", 2, tmp_path, "cuda", "default"))


@given(
    world_size=st.integers(1, 3),
    shape=st.lists(st.integers(0, 5), min_size=1, max_size=3),
    data=st.data(),
)
@examples(25)
def test_gather_and_scatter_are_adjoint(world_size: int, shape: list[int], data: Any) -> None:
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    whole = list(shape)
    whole[dim] *= world_size
    torch.manual_seed(0)
    # Small integers: sums are exact.
    shares = [torch.randint(-9, 9, shape).float() for _ in range(world_size)]
    wholes = [torch.randint(-9, 9, whole).float() for _ in range(world_size)]

    def task(transport: ThreadTransport) -> None:
        parallel = tp.TensorParallel(tw.Communicator(transport))
        rank = transport.rank
        total = torch.stack(wholes).sum(0)
        own = total.chunk(world_size, dim)[rank] if total.numel() else total.new_empty(shape)

        x = shares[rank].clone().requires_grad_()
        y = parallel.all_gather(x, dim)
        assert torch.equal(y, torch.cat(shares, dim))
        y.backward(wholes[rank])
        assert torch.equal(x.grad, own)

        x = wholes[rank].clone().requires_grad_()
        y = parallel.reduce_scatter(x, dim)
        assert torch.equal(y, own)
        y.backward(shares[rank])
        assert torch.equal(x.grad, torch.cat(shares, dim))
        assert torch.equal(x.detach(), wholes[rank])

    run_ranks(world_size, task)


def test_gradients_may_be_expanded_and_inputs_frozen() -> None:
    def task(transport: ThreadTransport) -> None:
        parallel = tp.TensorParallel(tw.Communicator(transport))
        x = torch.ones(3, 5, requires_grad=True)
        parallel.copy(x).sum().backward()
        assert torch.equal(x.grad, torch.full((3, 5), 2.0))
        frozen = parallel.all_reduce(torch.ones(5, 3).t())
        assert not frozen.requires_grad
        assert torch.equal(frozen, torch.full((3, 5), 2.0))
        (first,) = torch.autograd.grad(parallel.copy(x).square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            first.sum().backward()

    run_ranks(2, task)


def test_what_is_refused() -> None:
    one = tw.Communicator(connect(1)[0])
    with pytest.raises(ValueError, match="wire is 'float8'; allowed"):
        tp.TensorParallel(one, wire="float8")
    for call in (tp.TensorParallel(one).all_gather, tp.TensorParallel(one).reduce_scatter):
        with pytest.raises(ValueError, match=r"x has shape \(\); allowed"):
            call(torch.tensor(3.0))

    def task(transport: ThreadTransport) -> None:
        comm = tw.Communicator(transport)
        with pytest.raises(ValueError, match=r"\(0, 1\) backward|\(1, 2\) forward"):
            tp.TensorParallel(comm, one)
        parallel = tp.TensorParallel(comm)
        linear = torch.nn.Linear(6, 9)
        with pytest.raises(ValueError, match="9 features"):
            tp.ColumnParallelLinear(linear, parallel)
        with pytest.raises(ValueError, match="3 parts times 2 ranks"):
            tp.ColumnParallelLinear(torch.nn.Linear(6, 8), parallel, parts=3)
        with pytest.raises(ValueError, match="9 features"):
            tp.RowParallelLinear(torch.nn.Linear(9, 2), parallel)
        with pytest.raises(ValueError, match="x has 5 rows"):
            parallel.reduce_scatter(torch.zeros(2, 5), dim=1)
        # Nothing was sent: the ranks are still in step.
        assert parallel.all_reduce(torch.ones(3)).tolist() == [2.0] * 3

    run_ranks(2, task)


def test_feedback_of_one_direction_and_of_other_sizes() -> None:
    xs = torch.randn(2, 3, 77, generator=torch.Generator().manual_seed(0))

    def task(transport: ThreadTransport) -> None:
        lossy, exact = (tw.Communicator(transport, codec) for codec in ("nvfp4", "zipccl"))
        feedback, x = ErrorFeedback(), xs[transport.rank]
        plain = tp.TensorParallel(lossy, exact)
        parallel = plain.with_feedback(feedback, "a")
        for collective, dim in (("all_gather", (1,)), ("all_reduce", ())):

            def call(by: Any, x: Any, collective: str = collective, dim: Any = dim) -> Any:
                return getattr(by, collective)(x, *dim)

            key = f"a.forward.{collective}"
            first = call(parallel, x)
            assert not torch.equal(call(parallel, x), first)
            # Another size starts at zero, and so do residuals without any element.
            call(parallel, x[:2])
            assert feedback.residual(key).shape == (2 * 77,)
            assert torch.equal(call(parallel, x), first)
            assert call(parallel, x[:0]).shape == call(plain, x[:0]).shape
            integers = call(parallel, torch.arange(5).view(1, 5))
            assert torch.equal(integers, call(plain, torch.arange(5).view(1, 5)))
            assert feedback.residual(key).shape == (0,)
        parallel.copy(x.clone().requires_grad_()).sum().backward()
        assert sorted(feedback.state_dict()["residuals"]) == [
            "a.forward.all_gather",
            "a.forward.all_reduce",
        ]
        with pytest.raises(ValueError, match="x has 3 rows"):
            parallel.reduce_scatter(x)
        wide = parallel.all_reduce(x.double())
        assert wide.dtype == feedback.residual("a.forward.all_reduce").dtype == torch.float64

    run_ranks(2, task)


def test_what_feedback_is_refused_for() -> None:
    one = connect(1)[0]
    feedback, wrong = ErrorFeedback(), cast(Any, ErrorFeedback)
    exact = tp.TensorParallel(tw.Communicator(one))
    with pytest.raises(ValueError, match=r"codec is Zipccl.*allowed with it: lossy codecs"):
        exact.with_feedback(feedback, "a")
    (forward,) = exact._exact()
    hops = tp.TensorParallel(tw.Communicator(one, "mx", topology="ring"), forward.comm)
    with pytest.raises(ValueError, match="topology is 'ring'; allowed with it: 'two-shot'"):
        hops.with_feedback(feedback, "a")
    with pytest.raises(ValueError, match="allowed: codecs whose round_trips is True"):
        tw.Communicator(one, tw.codec("sdp4bit", rotate="encode"))
    lossy = tp.TensorParallel(tw.Communicator(one, "mx"))
    with pytest.raises(TypeError, match="allowed: an ErrorFeedback"):
        lossy.with_feedback(wrong, "a")
    with pytest.raises(ValueError, match="allowed: ColumnParallelLinear and RowParallelLinear"):
        tp.set_error_feedback(torch.nn.Linear(2, 2), feedback)
    layers = [tp.RowParallelLinear(torch.nn.Linear(2, 2), by) for by in (lossy, exact)]
    with pytest.raises(ValueError, match="allowed with it: lossy codecs"):
        tp.set_error_feedback(torch.nn.ModuleList(layers), feedback)
    layers[0](torch.ones(3, 2))
    assert not feedback.state_dict()["residuals"]


def test_a_lost_peer_is_an_error_of_backward() -> None:
    def task(transport: ThreadTransport) -> Any:
        parallel = tp.TensorParallel(tw.Communicator(transport))
        x = torch.ones(4, requires_grad=True)
        y = parallel.all_gather(x)
        if transport.rank == 1:
            transport.close()
            return None
        with pytest.raises(tw.CollectiveError, match="reduce_scatter #1") as caught:
            y.sum().backward()
        return isinstance(caught.value.__cause__, ConnectionError)

    assert run_ranks(2, task) == [True, None]


if __name__ == "__main__":
    join(globals(), sys.argv[1:])
