"""One bit that changes on the way to rank 1, in training and inference by prepared calls.

That rank raises before its optimizer steps, and makes no later call. The other one hears of it at
once. This file is also what the processes run.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import tightwire as tw
from forked import launch, main
from prepared_ranks import damage

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("PyTorch was built without gloo", allow_module_level=True)
pytest.importorskip("torch.distributed.fsdp")
if not hasattr(torch.distributed.fsdp.FSDPModule, "set_custom_reduce_scatter"):
    pytest.skip("this PyTorch has no custom collectives", allow_module_level=True)

from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from tightwire.adapters.collectives.prepared_work import Work  # noqa: E402
from tightwire.adapters.training import ddp, fsdp  # noqa: E402
from tightwire.adapters.training import tensor_parallel as tp  # noqa: E402

pytestmark = pytest.mark.slow

WIDTH = 64
#: Seconds that ranks wait for one another, which is to be no matter.
LONG = 60.0
#: The step in which it happens, of so many.
BAD, STEPS = 2, 5

#: What happens in a step. It is told how to have damage happen.
Step = Callable[[Callable[[Any], None]], None]


# What the processes run.


def later(work: Work) -> bool:
    """As on a device that is far behind: nothing is known before somebody waits."""
    return work.judged


def tensor_parallel(case: str) -> Step:
    backward = None if case == "forward only" else "taco"
    parallel = tp.connect("taco", backward, route="network")
    torch.manual_seed(0)
    layers: list[Any] = []
    for _ in range(2):
        first = tp.ColumnParallelLinear(torch.nn.Linear(WIDTH, 2 * WIDTH), parallel)
        last = tp.RowParallelLinear(torch.nn.Linear(2 * WIDTH, WIDTH), parallel)
        layers += [first, torch.nn.GELU(), last]
    # With "forward only" nothing is sent behind the first sum that has a gradient.
    model = torch.nn.Sequential(*(layers[:3] if case == "forward only" else layers))
    x = torch.randn(16, WIDTH, requires_grad=case != "forward only")
    infers = case.startswith("inference")
    way: Any = parallel._backward if case == "backward" else parallel._forward

    def step(harm: Callable[[Any], None]) -> None:
        if way._prepared:
            harm(next(iter(way._prepared.values())))
        with torch.no_grad() if infers else contextlib.nullcontext():
            y = model(x)
        if case == "inference, checked":
            parallel.check()
        if not infers:
            y.square().mean().backward()

    return step


def sharded(case: str) -> Step:
    torch.manual_seed(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    model.requires_grad_(case != "frozen")
    for module in (model,) if "whole" in case else (*model, model):
        # Held: a backward without sums sends nothing, nor does a second forward of the whole.
        held = case in ("accumulated, held", "inference, whole")
        fully_shard(module, reshard_after_forward=not held)
    codec = "zipccl" if "lossless" in case else "mx"
    hooks = fsdp.compress(model, route="network", codec=codec, ahead=0)
    head, numbers = None, itertools.count()
    if case == "frozen":
        head = DistributedDataParallel(torch.nn.Linear(WIDTH, 8))
        ddp.register(head, route="network")

    def step(harm: Callable[[Any], None]) -> None:
        def harm_hook(hook: Any) -> None:
            if hook._prepared:
                (call,) = hook._prepared.values()
                harm(call)

        if "accumulated" in case:
            model.set_requires_gradient_sync(False)
        in_backward = "backward" in case or "sums" in case
        # FSDP keeps what the outermost module has gathered. Else it is the last gather of a
        # forward: no later one needs its memory.
        if "whole" in case:
            # Rank 1 makes no more calls by itself.
            if next(numbers) <= BAD or dist.get_rank() == 0:
                model.reshard()
            harm_hook(hooks.all_gather)
        handle = model[1].register_forward_hook(
            lambda *_: None if in_backward or "whole" in case else harm_hook(hooks.all_gather)
        )
        with torch.no_grad() if "inference" in case else contextlib.nullcontext():
            y = model(torch.ones(3, WIDTH))
        handle.remove()
        if in_backward:
            harm_hook(hooks.reduce_scatter if "sums" in case else hooks.all_gather)
        if "inference" not in case:
            (y if head is None else head(y)).square().mean().backward()

    return step


def damaged(case: list[Any], rank: int, file: str, report: Callable[[Any], None]) -> None:
    """What each step of a rank ends with, and after how many seconds."""
    kind, name, known = case
    dist.init_process_group(
        "gloo", f"file://{file}", rank=rank, world_size=2, timeout=timedelta(seconds=LONG)
    )
    if not known:
        Work.done = later  # type: ignore[method-assign, assignment]
    made = {"tensor parallel": tensor_parallel, "FSDP": sharded}[kind](name)
    found = []
    for number in range(STEPS):
        start, error = time.monotonic(), ""

        def harm(call: Any, number: int = number) -> None:
            if (number, rank) == (BAD, 1):
                damage(call, 600 if kind == "tensor parallel" else 2000, 1)

        try:
            made(harm)
        except tw.CollectiveError as caught:
            error = str(caught)
        found.append([error, time.monotonic() - start])
    report(found)


def warm_up() -> None:
    """Have all compiled."""
    torch.set_num_threads(1)
    for codec in ("taco", "mx", "zipccl"):
        tw.decode(tw.encode(torch.ones(4096), codec))


# The tests.

TENSOR_PARALLEL = ("training", "forward only", "backward", "inference, checked")
SHARDED = (
    *("training", "backward", "sums", "accumulated", "accumulated, held"),
    *("accumulated backward", "inference", "inference, whole", "frozen"),
)


def check(found: dict[str, list[Any]]) -> None:
    for case, (other, own) in found.items():
        assert isinstance(own, list), (case, own)
        assert isinstance(other, list), (case, other)
        assert not any(error for error, _ in (*own[:BAD], *other[:BAD])), case
        # Before an optimizer can step.
        error = own[BAD][0]
        assert "stage 'decode'" in error, (case, own)
        assert "(from rank 0)" in error, (case, own)
        for refused, _ in own[BAD + 1 :]:
            assert error in refused, (case, own)
        # The other one may have ended that step.
        first = next(error for error, _ in other[BAD : BAD + 2] if error)
        assert f"rank 1 gave up: {error}" in first, (case, other)
        assert all(error for error, _ in other[BAD + 1 :]), (case, other)
        assert max(seconds for _, seconds in (*own, *other)) < LONG / 3, (case, own, other)


@pytest.mark.parametrize("known", [True, False])
def test_damage_is_raised_before_the_optimizer_steps(known: bool, tmp_path: Path) -> None:
    cases = [["tensor parallel", name, known] for name in TENSOR_PARALLEL]
    cases += [["FSDP", name, known] for name in SHARDED]
    found = launch(__file__, "damaged", cases, 2, tmp_path, 200, warnings="ignore")
    assert len(found) == len(cases)
    check(found)


def test_damage_of_what_the_host_waits_for_is_raised_at_once(tmp_path: Path) -> None:
    names = ("lossless", "lossless backward", "lossless sums", "lossless inference")
    cases = [["FSDP", name, True] for name in names]
    cases.append(["tensor parallel", "inference", True])
    found = launch(__file__, "damaged", cases, 2, tmp_path, 100, warnings="ignore")
    assert len(found) == len(cases)
    check(found)


def test_in_inference_on_a_device_that_is_behind_a_later_call_raises(tmp_path: Path) -> None:
    case = ["tensor parallel", "inference", False]
    ((other, own),) = launch(
        __file__, "damaged", [case], 2, tmp_path, 100, warnings="ignore"
    ).values()
    problems = [[error for error, _ in steps if error] for steps in (own, other)]
    assert "stage 'decode'" in problems[0][0]
    assert f"rank 1 gave up: {problems[0][0]}" in problems[1][0]


if __name__ == "__main__":
    main(globals(), warm_up, 3)
