"""An exception in the middle of one rank's backward reaches the others at once, and says why.

This file is also what the processes run.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tightwire as tw
from forked import launch, main

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("PyTorch was built without gloo", allow_module_level=True)
pytest.importorskip("torch.distributed.fsdp")

from datetime import timedelta  # noqa: E402

from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from interrupt import Interrupt  # noqa: E402
from tightwire.adapters.training import ddp, fsdp, tagc, tensor_parallel  # noqa: E402
from tightwire.adapters.transports.torch_dist import TorchDist  # noqa: E402

RANKS, VICTIM = 3, 1
#: Seconds of the groups, for which no test may wait.
LONG = 60.0
WIDTH = 66
HOOKS = (
    "ddp, exact",
    "ddp, network",
    "fsdp, exact",
    "fsdp, network",
    "tensor parallel, exact",
    "tensor parallel, network",
    "tagc",
    "plain ddp",
    "communicator",
)


class UserError(Exception):
    """What no library raises."""


# What the processes run.


class Layers(torch.nn.Module):  # type: ignore[misc, name-defined]
    """Layers, between which a backward can be interrupted."""

    def __init__(self, layers: list[Any]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = Interrupt.apply(layer(x))
        return x


def linears() -> list[Any]:
    torch.manual_seed(1)
    return [torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)]


def step_of(hook: str) -> Callable[[], Any]:
    """Forward and backward of a model with a hook."""
    kind, _, way = hook.partition(", ")
    model: Any
    route: Any = way
    kept: Any = None
    if kind == "communicator":
        comm = tw.Communicator(TorchDist.new_group())
        y = torch.ones(5000, requires_grad=True)

        def step() -> None:
            Interrupt.apply(y).sum().backward()
            comm.all_reduce(y.grad)

        return step
    if kind == "tensor parallel":
        kept = tensor_parallel.connect("zipccl", "zipccl", route=route)
        model = Layers(
            [tensor_parallel.ColumnParallelLinear(layer, kept) for layer in linears()[:1]]
            + [tensor_parallel.RowParallelLinear(layer, kept) for layer in linears()[:1]]
        )
    elif kind in ("fsdp", "tagc"):
        model = Layers(linears())
        mesh = init_device_mesh("cpu", (RANKS,))
        for module in (*model.layers, model):
            fully_shard(module, mesh=mesh)
        if kind == "tagc":
            kept = tagc.compress(model, tagc.Tagc(ratio=10))
        else:
            kept = fsdp.compress(model, route=route)
    else:
        model = DistributedDataParallel(Layers(linears()), bucket_cap_mb=0.01)
        if kind == "ddp":
            kept = ddp.register(model, route=route)

    def steps() -> Any:
        x = torch.ones(12, WIDTH, requires_grad=True)
        model(x).square().mean().backward()
        return kept

    return steps


def interrupted(case: list[str], rank: int, file: str, report: Callable[[Any], None]) -> None:
    hook, wrapped = case
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(file, RANKS),
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=LONG),
    )
    step = step_of(hook)
    for _ in range(2):
        with tw.fail_together():
            step()
    Interrupt.armed = UserError("out of luck") if rank == VICTIM else None
    start = time.monotonic()
    try:
        if rank == VICTIM or wrapped == "all":
            with tw.fail_together():
                step()
        else:
            step()
    except Exception as error:
        report(
            {
                "type": type(error).__name__,
                "error": str(error),
                "notes": getattr(error, "__notes__", []),
                "seconds": time.monotonic() - start,
            }
        )
    # A process that lives on: its connections are not closed by its end.
    time.sleep(LONG)


def warm_up() -> None:
    """Have all imported and compiled."""
    torch.set_num_threads(1)
    x = torch.ones(600)
    buffers = [tw.encode(x) for _ in range(RANKS)]
    tw.decode_many(buffers)
    tw.decode_sum(buffers)


# The tests.


@pytest.mark.slow
def test_an_exception_in_backward_is_heard_at_once(tmp_path: Path) -> None:
    cases = [(hook, "all") for hook in HOOKS]
    cases += [("ddp, exact", "victim"), ("fsdp, network", "victim")]
    found = launch(__file__, "interrupted", cases, RANKS, tmp_path, 150)
    for case, results in found.items():
        hook = json.loads(case)[0]
        own = results.pop(VICTIM)
        assert own is not None, case
        assert (own["type"], own["error"], own["notes"]) == ("UserError", "out of luck", []), case
        for result in results:
            assert result is not None, (case, results)
            assert result["seconds"] < 10, (case, result)
            text = f"{VICTIM} gave up: UserError: out of luck"
            if hook == "plain ddp":
                assert result["notes"] == [f"rank {text}"], (case, result)
            else:
                assert f"rank {text}" in result["error"], (case, result)
                assert result["notes"] == [], (case, result)


def test_a_block_that_raises_without_any_group_raises_the_same() -> None:
    with pytest.raises(KeyError) as caught, tw.fail_together():
        raise KeyError(5)
    assert not hasattr(caught.value, "__notes__")


if __name__ == "__main__":
    main(globals(), warm_up)
