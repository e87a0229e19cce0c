"""Code that exchanges tensors, compiled by torch.compile, between real processes: what they run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from processes import join, launch

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("PyTorch was built without gloo", allow_module_level=True)

from expert_layers import layer_of, tokens  # noqa: E402
from parallel_layers import batch, made, mine  # noqa: E402
from tightwire.adapters.training import moe, pipeline  # noqa: E402
from tightwire.adapters.training import tensor_parallel as tp  # noqa: E402

#: What is compiled: nothing, a forward, or a step with its backward.
MODES = ("no", "forward", "step")


def trained(forward: Callable[..., Any], mode: str, *inputs: Any) -> Any:
    """What `forward` returns, after the backward of its mean square."""
    if mode == "forward":
        forward = torch.compile(forward, backend="aot_eager")

    def step(*inputs: Any) -> Any:
        y = forward(*inputs)
        y.square().sum().backward()
        return y

    if mode == "step":
        step = torch.compile(step, backend="aot_eager")
    return step(*inputs).detach()


def same(found: list[list[Any]]) -> None:
    """All modes give the same bits."""
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
    torch._dynamo.reset()


def layers(device: Any) -> None:
    """Tensor-parallel layers, with sequence parallelism and without it."""
    for route in ("exact", "network"):
        for sequence_dim in (None, 1):
            with tp.connect("zipccl", "zipccl", route=route) as parallel:
                found: list[list[Any]] = []
                for mode in MODES:
                    model = made("cpu", torch.float32, parallel, sequence_dim)
                    x, _ = batch("cpu", torch.float32)
                    if sequence_dim is not None:
                        x = mine(x.detach(), sequence_dim).clone().requires_grad_()
                    y = trained(model, mode, x)
                    found.append([y, x.grad, *(p.grad for p in model.parameters())])
                assert parallel.wire_bytes > 0
            same(found)


def experts(device: Any) -> None:
    """Numbers of rows that change from step to step."""
    with moe.connect(4, "zipccl", "zipccl") as parallel:
        found: list[list[Any]] = []
        for mode in MODES:
            layer, values = layer_of(parallel, torch.float32, 2), []
            for number in range(4):
                layer.zero_grad()
                given = tokens(parallel.rank + 2 * number, 4, torch.float32, 20 + 7 * number)
                y = trained(layer, mode, *given)
                values += [y, *(x.grad for x in (*given, *layer.parameters()))]
            found.append(values)
        assert parallel.wire_bytes > 0
    same(found)


def exchanged(device: Any) -> None:
    """The all-to-all of code that has its own layers."""
    with moe.connect_all_to_all("zipccl", "zipccl") as parallel:

        def forward(x: Any) -> Any:
            out = torch.zeros_like(x)
            return 2 * parallel.all_to_all_single(out, 3 * x)

        found: list[list[Any]] = []
        for mode in MODES:
            x = torch.arange(40.0).reshape(8, 5).add(parallel.rank).requires_grad_()
            y = trained(forward, mode, x)
            found.append([y, x.grad])
        assert parallel.wire_bytes > 0
    same(found)


def stages(device: Any) -> None:
    """Two stages of a pipeline."""
    boundary = pipeline.connect("mx", "mx")
    linear = torch.nn.Linear(64, 64)

    def forward(x: Any) -> Any:
        if boundary.rank == 0:
            return boundary.send(linear(x).relu(), 1)
        return linear(boundary.receive((8, 64), torch.float32, source=0))

    found: list[list[Any]] = []
    for mode in MODES:
        linear.zero_grad()
        y = trained(forward, mode, torch.ones(8, 64))
        boundary.flush()
        assert linear.weight.grad.any()
        found.append([y, linear.weight.grad.clone()])
    assert boundary.wire_bytes > 0
    same(found)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["layers", "experts", "exchanged", "stages"])
def test_compiled_code_gives_the_bits_of_eager_code(task: str, tmp_path: Path) -> None:
    # The compiler warns of its own calls.
    launch(__file__, task, 2, tmp_path, warnings="default")


if __name__ == "__main__":
    join(globals(), sys.argv[1:])
