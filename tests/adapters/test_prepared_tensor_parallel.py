"""Tensor parallelism by prepared calls, between real processes: also what they run."""

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

from capacities import PATTERNS, Scheduled, schedule  # noqa: E402
from parallel_layers import batch, digest, made, mine  # noqa: E402
from tightwire.adapters.collectives import prepared_work  # noqa: E402
from tightwire.adapters.training import prepared_hooks  # noqa: E402
from tightwire.adapters.training import tensor_parallel as tp  # noqa: E402
from tightwire.adapters.training.directions import PreparedDirection  # noqa: E402
from tightwire.adapters.training.error_feedback import ErrorFeedback  # noqa: E402


def bits_of(codec: Any, sequence_dim: int | None, steps: int, **options: Any) -> list[str]:
    """Digests of output and gradients of some steps, in bfloat16."""
    found = []
    with tp.connect(codec, codec, **options) as parallel:
        model = made("cpu", torch.bfloat16, parallel, sequence_dim)
        for _ in range(steps):
            x, gradient = batch("cpu", torch.bfloat16)
            if sequence_dim is not None:
                x, gradient = mine(x.detach(), 1).clone().requires_grad_(), mine(gradient, 1)
            y = model(x)
            y.backward(gradient)
            found.append(digest(y.detach(), x.grad, *(p.grad for p in model.parameters())))
        assert parallel.wire_bytes > 0
        assert codec is None or parallel.wire_bytes < 1.1 * parallel.raw_bytes
    return found


def lossless() -> None:
    """The bits are those of exact calls, whatever does not fit, and with nothing encoded."""
    for sequence_dim in (None, 1):
        exact = bits_of("zipccl", sequence_dim, 3)
        for route in ("network", "auto"):
            assert bits_of("zipccl", sequence_dim, 3, route=route) == exact
        assert bits_of(None, sequence_dim, 3, route="network") == exact
    exact = bits_of("zipccl", 1, 6)
    again = schedule()
    ready = prepared_work.Prepared._ready
    made_calls = 0
    for pattern in ("all", "the first", "every other"):

        def scheduled(self: Any, pattern: str = pattern) -> Any:
            nonlocal made_calls
            Scheduled.small = PATTERNS[pattern](made_calls)
            made_calls += 1
            return ready(self)

        made_calls = 0
        prepared_work.Prepared._ready = scheduled  # type: ignore[method-assign]
        assert bits_of("zipccl", 1, 6, route="network") == exact
    assert {"all_gather", "reduce_scatter"} <= set(again)


def lossy() -> list[str]:
    """All ranks have the same sums; `wire` is what travels, and integers are summed as they are."""
    rank, size = dist.get_rank(), dist.get_world_size()
    xs = [torch.randn(65, 128, generator=torch.Generator().manual_seed(r)) for r in range(size)]
    exact = torch.stack(xs).sum(0)
    with tp.connect("taco", "mx", wire="bfloat16", route="network", seed=3) as parallel:
        x = xs[rank].clone().requires_grad_()
        y = parallel.all_reduce(x)
        y.backward(xs[rank])
        assert torch.equal(x.grad, xs[rank])
        assert 1e-4 < tw.error(exact, y.detach()).vnmse < 3e-3
        assert parallel.wire_bytes < 0.6 * parallel.raw_bytes
        gathered = parallel.all_gather(xs[rank], dim=1)
        assert gathered.shape == (65, 128 * size)
        share = parallel.reduce_scatter(xs[rank], dim=1)
        assert tw.error(mine(exact, 1), share).vnmse < 3e-3
        integers = parallel.all_reduce(torch.full((3,), 70001))
        assert integers.tolist() == [70001 * size] * 3
        assert parallel.all_gather(torch.zeros(0, 4)).shape == (0, 4)
        with pytest.raises(ValueError, match="route 'exact'"):
            parallel.with_feedback(ErrorFeedback(), "a")
        found = [digest(y.detach()), digest(gathered)]
    with pytest.raises(tw.CollectiveError, match="the hook is closed"):
        parallel.all_reduce(xs[rank])
    return found


def many_sizes() -> None:
    """Batches of more lengths than calls stay prepared; some lengths come again."""
    rank, size = dist.get_rank(), dist.get_world_size()
    vars(prepared_hooks)["_MOST_PREPARED"] = 4
    with tp.connect("zipccl", "zipccl", route="network") as parallel:
        assert isinstance(parallel._forward, PreparedDirection)
        for n in (*range(1, 10), 9, 3, 1, 8):
            total = parallel.all_reduce(torch.full((n, 100), 1.0 + rank))
            assert (total == size * (size + 1) / 2).all()
            assert len(parallel._forward._prepared) <= 4


def everything(device: Any) -> list[str]:
    """All of it on one rank."""
    many_sizes()
    with pytest.raises(ValueError, match="route is 'fast'; allowed"):
        tp.connect("zipccl", None, route="fast")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"options are \['sizes'\]; allowed with route"):
        tp.connect("zipccl", None, route="network", sizes="first")
    with pytest.raises(ValueError, match="route is 'network', given with node or within; allowed"):
        tp.connect("zipccl", None, route="network", node=2)
    found = lossy()
    lossless()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2])
def test_layers_by_prepared_calls(world_size: int, tmp_path: Path) -> None:
    first, *others = launch(__file__, "everything", world_size, tmp_path)
    assert all(other == first for other in others)


if __name__ == "__main__":
    join(globals(), sys.argv[1:])
