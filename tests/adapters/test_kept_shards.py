"""Shards that are encoded once for several gathers, between real processes.

Bits are compared with those of plain gloo: two ranks add two numbers, whose sum has no order. This
file is also what the processes run.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from capacities import Scheduled, schedule
from processes import join, launch

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("PyTorch was built without gloo", allow_module_level=True)
pytest.importorskip("torch.distributed.fsdp")
if not hasattr(torch.distributed.fsdp.FSDPModule, "set_custom_reduce_scatter"):
    pytest.skip("this PyTorch has no custom collectives", allow_module_level=True)

import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402

from tightwire.adapters.collectives.prepared_gathers import AllGather  # noqa: E402
from tightwire.adapters.training import fsdp  # noqa: E402
from tightwire.adapters.training.prepared_fsdp import PreparedGather  # noqa: E402

WIDTH, BLOCKS = 72, 3
Step = Callable[[Any, Any], None]


def make() -> Any:
    torch.manual_seed(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS)))
    for block in model:
        fully_shard(block)
    return fully_shard(model)


def loss_of(model: Any) -> Any:
    return model(torch.randn(3, WIDTH)).square().mean()


def plain(model: Any, optimizer: Any) -> None:
    loss_of(model).backward()
    optimizer.step()
    optimizer.zero_grad()


def accumulated(model: Any, optimizer: Any) -> None:
    for last in (False, False, True):
        model.set_requires_gradient_sync(last)
        loss_of(model).backward()
    optimizer.step()
    optimizer.zero_grad()


def evaluated(model: Any, optimizer: Any) -> None:
    plain(model, optimizer)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            loss_of(model)


def changed_between(model: Any, optimizer: Any) -> None:
    """By hand, on one rank, in a shard that backward computes with."""
    loss = loss_of(model)
    if dist.get_rank() == 1:
        with torch.no_grad():
            model[1].weight.to_local()[0, 0] += 0.5
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def stepped_between(model: Any, optimizer: Any) -> None:
    """An optimizer steps between forward and backward, by gradients of the step before."""
    loss = loss_of(model)
    optimizer.step()
    optimizer.zero_grad()
    loss.backward()


def twice(model: Any, optimizer: Any) -> None:
    """Two backwards of one graph; between them a change that nothing counts."""
    loss = loss_of(model)
    loss.backward(retain_graph=True)
    model[1].weight.data.mul_(1.5)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def loaded(model: Any, optimizer: Any) -> None:
    plain(model, optimizer)
    model.load_state_dict({name: x * 1.25 for name, x in model.state_dict().items()})
    plain(model, optimizer)
    assign = {name: x * 1.25 for name, x in model.state_dict().items()}
    model.load_state_dict(assign, assign=True)
    for module in model:
        # Assigned parameters are others than those of the optimizer, which FSDP has, too.
        module.reshard()


def restored(model: Any, optimizer: Any) -> None:
    """A checkpoint is loaded into the shards where they lie, which nothing counts."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    dcp.save(model.state_dict(), checkpoint_id=folder[0])
    plain(model, optimizer)
    dcp.load(model.state_dict(), checkpoint_id=folder[0])
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])


def uncounted(model: Any, optimizer: Any) -> None:
    """What only bytes tell, between forward and backward."""
    loss = loss_of(model)
    if dist.get_rank() == 1:
        model[1].weight.data.add_(0.5)
        model[2].weight.to_local().detach().numpy()[0] = 2.0
    loss.backward()
    plain(model, optimizer)


STEPS: tuple[Step, ...] = (
    plain,
    accumulated,
    evaluated,
    changed_between,
    stepped_between,
    twice,
    loaded,
    restored,
)
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "foreach": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, foreach=True),
    "one by one": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, foreach=False),
    "fused": lambda ps: torch.optim.AdamW(ps, lr=0.1, fused=True),
}


def tell_by_state() -> None:
    """Have changes on the host told as on a GPU, where bytes are not compared."""
    keep = PreparedGather.keep

    def kept(self: Any, device: Any) -> Any:
        one = keep(self, device)
        if one is not None:
            one.compares = False
        return one

    PreparedGather.keep = kept  # type: ignore[method-assign]


def train(step: Step, name: str, hooked: bool) -> tuple[list[Any], int]:
    """Shards after some steps, and how many were sent again."""
    model = make()
    hooks = fsdp.compress(model, route="network") if hooked else None
    optimizer = OPTIMIZERS[name](model.parameters())
    torch.manual_seed(100 + dist.get_rank())
    for _ in range(3):
        step(model, optimizer)
    again = 0
    if hooks is not None:
        again = hooks.all_gather.sent_again
        hooks.close()
    return [x.to_local().clone() for x in model.state_dict().values()], again


def compare(steps: tuple[Step, ...]) -> None:
    """Training has the bits that it has without hooks, also if no message fits."""
    schedule()
    for step in steps:
        for name in OPTIMIZERS if step is plain else ["foreach"]:
            wanted, _ = train(step, name, hooked=False)
            for small in (False, True):
                Scheduled.small = small
                found, again = train(step, name, hooked=True)
                rows = zip(found, wanted, strict=True)
                assert all(torch.equal(a, b) for a, b in rows), (step.__name__, name, small)
                assert again or step is stepped_between, step.__name__


def bytes_tell(device: Any) -> None:
    compare((*STEPS, uncounted))


def states_tell(device: Any) -> None:
    tell_by_state()
    compare(STEPS)


def counts(device: Any) -> list[list[int]]:
    """Shards that a step of three backwards encodes, and those that it sends again."""
    schedule()
    encoded: list[int] = []
    encode = AllGather._encode

    def counted(self: AllGather, *args: Any) -> None:
        encoded.append(1)
        encode(self, *args)

    AllGather._encode = counted  # type: ignore[method-assign, assignment]
    found = []
    for keep_nbytes in (0, None, 1 << 20):
        if keep_nbytes:
            tell_by_state()
        model = make()
        hooks = fsdp.compress(model, route="network", keep_nbytes=keep_nbytes)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(3):
            before = len(encoded), hooks.all_gather.sent_again
            accumulated(model, optimizer)
            after = len(encoded), hooks.all_gather.sent_again
        found.append([b - a for a, b in zip(before, after, strict=True)])
        hooks.close()
    return found


@pytest.mark.parametrize(("nbytes", "error"), [(-1, ValueError), (1.5, TypeError)])
def test_wrong_numbers_of_bytes_are_refused(nbytes: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="keep_nbytes is"):
        PreparedGather("network", keep_nbytes=nbytes)


def test_a_route_that_keeps_nothing_refuses_the_option() -> None:
    with pytest.raises(TypeError, match="keep_nbytes"):
        fsdp.compress(torch.nn.Linear(3, 3), keep_nbytes=1)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["bytes_tell", "states_tell"])
def test_a_shard_that_changes_is_never_sent_as_it_was(task: str, tmp_path: Path) -> None:
    launch(__file__, task, 2, tmp_path, warnings="ignore")


@pytest.mark.slow
def test_how_often_a_shard_is_encoded(tmp_path: Path) -> None:
    """Once for each change, and where bytes are not compared once for each forward."""
    gathers = 3 * 2 * BLOCKS
    wanted = [[gathers, 0], [BLOCKS, gathers - BLOCKS], [gathers // 2, gathers // 2]]
    assert launch(__file__, "counts", 2, tmp_path, warnings="ignore") == [wanted, wanted]


if __name__ == "__main__":
    join(globals(), sys.argv[1:])
