"""Resident experts on the GPUs of a host: eager and in CUDA graphs, against the network's form."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest

import tightwire as tw
from processes import join, launch

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
pytest.importorskip("triton")
if not dist.is_available():
    pytest.skip("PyTorch was built without torch.distributed", allow_module_level=True)

from tightwire.adapters.training import moe  # noqa: E402
from tightwire.adapters.training.resident_experts import ResidentExperts  # noqa: E402

CODECS = ("raw", "mx", "taco", "nvfp4")
EXPERTS, TOKENS, TOP_K = 8, 300, 2
#: Rows of whole tiles, and such as end within one.
WIDTH = 1024
CASES = [*((WIDTH, codec) for codec in CODECS), (1000, "raw"), (1000, "mx")]


def connected(device: Any, hidden: int, codec: str, **options: Any) -> ResidentExperts:
    given: dict[str, Any] = {"tokens": TOKENS, "top_k": TOP_K, "hidden": hidden}
    return moe.connect_resident(EXPERTS, codec, codec, device=device, **given | options)


def given(device: Any, hidden: int, call: int) -> tuple[Any, Any]:
    """Tokens and logits of this rank; experts are liked more and less."""
    generator = torch.Generator(device).manual_seed(1000 * dist.get_rank() + call)
    count = TOKENS - 7 * dist.get_rank()
    x = torch.randn(count, hidden, device=device, generator=generator).bfloat16()
    logits = torch.randn(count, EXPERTS, device=device, generator=generator)
    return x, logits + torch.linspace(0, 1.0 + call, EXPERTS, device=device)


def results_of(parallel: Any, came: Any) -> Any:
    """Results of experts that multiply by a number of their own."""
    ends = came.ends if hasattr(came, "ends") else came.counts_on_device.cumsum(0)
    rows = torch.arange(came.rows.shape[0], device=came.rows.device)
    own = torch.searchsorted(ends.long(), rows, right=True).clamp(max=ends.shape[0] - 1)
    factors = 1 + 0.5 * (own + parallel.local_experts.start)
    return came.rows * factors.to(came.rows.dtype).unsqueeze(1)


def step(parallel: Any, x: Any, logits: Any) -> list[Any]:
    """A call forward and backward: rows, results, and gradients of results, tokens and logits."""
    x, logits = x.detach().requires_grad_(), logits.detach().requires_grad_()
    came = parallel.dispatch(x, moe.route(logits, TOP_K))
    rows = results_of(parallel, came)
    rows.retain_grad()
    y = parallel.combine(rows, came)
    y.backward(x.detach() * 0.5)
    return [came.rows.detach(), y.detach(), rows.grad, x.grad, logits.grad]


def same(a: Any, b: Any) -> bool:
    return bool(torch.equal(a.view(torch.int16), b.view(torch.int16)))


def eager(device: Any) -> list[str]:
    """Without loss the bits are those of rows that the network brings; else results are close."""
    done = []
    plain = moe.connect(EXPERTS, None, None, device=device)
    for hidden, codec in CASES:
        parallel = connected(device, hidden, codec)
        for call in range(4):
            text = f"{codec} {hidden} call {call}"
            x, logits = given(device, hidden, call)
            found, wanted = step(parallel, x, logits), step(plain, x, logits)
            parallel.check()
            n = wanted[0].shape[0]
            for k in (0, 2):
                assert not found[k][n:].any(), text
                found[k] = found[k][:n]
            for k, (a, b) in enumerate(zip(found, wanted, strict=True)):
                if codec == "raw" and k < 4:
                    assert same(a, b), f"{text} result {k}"
                else:
                    bound = 1e-2 if codec == "raw" else 0.1
                    assert tw.error(b.float(), a.float()).vnmse < bound, f"{text} result {k}"
            again = step(parallel, x, logits)
            for a, b in zip(found, again, strict=True):
                assert torch.equal(a, b[: a.shape[0]]), text
        done.append(f"{codec} {hidden}")
    return done


def graphs(device: Any) -> list[str]:
    """Forward and backward captured: replays with other data, between eager calls, are the same."""
    done = []
    hidden = WIDTH
    for codec in CODECS:
        parallel = connected(device, hidden, codec, capacity=TOKENS * TOP_K * dist.get_world_size())
        x, logits = given(device, hidden, 0)
        x.requires_grad_(), logits.requires_grad_()

        def forward_and_back(parallel: Any = parallel, x: Any = x, logits: Any = logits) -> Any:
            came = parallel.dispatch(x, moe.route(logits, TOP_K))
            y = parallel.combine(results_of(parallel, came), came)
            return y, *torch.autograd.grad(y, (x, logits), x.detach() * 0.5), came.ends

        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                forward_and_back()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph, half = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = forward_and_back()
        # An odd number of exchanges.
        with torch.cuda.graph(half), torch.no_grad():
            came = parallel.dispatch(x, moe.route(logits, TOP_K))
        for call in range(5):
            new_x, new_logits = given(device, hidden, call)
            with torch.no_grad():
                x.copy_(new_x), logits.copy_(new_logits)
            wanted = [t.clone() for t in forward_and_back()]
            for _ in range(1 + call % 2):
                graph.replay()
            if call % 3 == 1:
                half.replay()
                assert torch.equal(came.ends, wanted[-1])
            # Eager calls behind a replay use the same memory.
            again = forward_and_back()
            text = f"{codec} call {call}"
            for k, (a, b, c) in enumerate(zip(wanted, results, again, strict=True)):
                assert torch.equal(a, b), f"{text} result {k}"
                assert torch.equal(a, c), f"{text} result {k}, behind it"
        parallel.check()
        done.append(codec)
    return done


def wrong(device: Any) -> list[str]:
    """What is wrong is told on all ranks, in eager calls; then calls are fine."""
    hidden, done = WIDTH, []
    parallel = connected(device, hidden, "raw", capacity=TOKENS)
    x, logits = given(device, hidden, 0)
    routing = moe.route(logits, TOP_K)
    for what in ("range", "weights", "capacity"):
        numbers, weights = routing.experts.clone(), routing.weights.clone()
        # What fits: experts of all ranks in turn, of a few tokens.
        numbers[:] = torch.arange(numbers.numel(), device=device).view(numbers.shape) % EXPERTS
        few = x[:100], numbers[:100].clone(), weights[:100].clone()
        if what == "range" and dist.get_rank() == 1:
            few[1][3, 0], few[1][4, 1] = -5, 1 << 40
        if what == "weights" and dist.get_rank() == 1:
            few[2][3, 0] = torch.inf
        if what == "capacity":
            few = x, torch.zeros_like(numbers), weights
        came = parallel.dispatch(few[0], few[1:])
        parallel.combine(came.rows, came)
        try:
            parallel.check()
        except tw.CollectiveError as error:
            done.append(f"{what}: {error.detail}")
        came = parallel.dispatch(x[:100], (numbers[:100], torch.ones_like(weights[:100]) / 2))
        assert same(parallel.combine(came.rows, came), x[:100])
        parallel.check()
    return done


def late(device: Any) -> float:
    """A rank that does not come is named within the timeout, and the device goes on."""
    from tightwire.adapters.transports.symmetric import SymmetricMemory

    memory = SymmetricMemory(None, device, timeout=2)
    options: dict[str, Any] = {"tokens": TOKENS, "top_k": TOP_K, "hidden": 64, "device": device}
    parallel = ResidentExperts(memory, experts=EXPERTS, **options)
    x, logits = given(device, 64, 0)
    routing = moe.route(logits, TOP_K)
    parallel.dispatch(x, routing)
    parallel.check()
    start = time.monotonic()
    if dist.get_rank() == 0:
        parallel.dispatch(x, routing)
        with pytest.raises(tw.CollectiveError, match="rank 1 did not come"):
            parallel.check()
        with pytest.raises(tw.CollectiveError, match="an earlier call has failed"):
            parallel.dispatch(x, routing)
    spent = time.monotonic() - start
    torch.cuda.synchronize()
    # Rank 1 does not leave before: that would be another error.
    dist.barrier()
    return spent


#: What a task tries one after the other.
DONE = {"eager": len(CASES), "graphs": len(CODECS)}


@pytest.mark.multi_gpu
@pytest.mark.parametrize("task", [*DONE, "wrong", "late"])
def test_on_two_gpus(task: str, tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    found = launch(__file__, task, 2, tmp_path, "cuda", "default")
    if task == "late":
        assert found[0] < 10
    elif task == "wrong":
        assert (
            found[0]
            == found[1]
            == [
                "range: on ranks [1] numbers of experts are out of range",
                "weights: on ranks [1] router weights are not all finite",
                "capacity: on ranks [0] rows exceed the capacity",
            ]
        )
    else:
        assert len(found[0]) == DONE[task]


if __name__ == "__main__":
    join(globals(), sys.argv[1:])
