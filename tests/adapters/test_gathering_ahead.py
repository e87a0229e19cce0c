"""Gathers of FSDP2 that come before they are needed, and those that nobody waits for.

This file is also what the processes run.
"""

from __future__ import annotations

import sys
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

from torch.distributed.device_mesh import DeviceMesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402

from tightwire.adapters.errors import CollectiveError  # noqa: E402
from tightwire.adapters.training import fsdp, prepared_fsdp  # noqa: E402
from tightwire.adapters.training.gathering_ahead import GatheringAhead  # noqa: E402
from tightwire.adapters.training.prepared_fsdp import PreparedGather  # noqa: E402

WIDTH, BLOCKS, STEPS = 72, 5, 6


class Model(torch.nn.Module):  # type: ignore[misc, name-defined, unused-ignore]
    """Blocks that run in an order that can be changed."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))
        self.order = list(range(BLOCKS))
        #: What was called: numbers of blocks, and of gathers with a letter in front.
        self.log: list[str] = []

    def forward(self, x: Any) -> Any:
        for i in self.order:
            x = torch.tanh(self.blocks[i](x))
            self.log.append(str(i))
        return x


def make(mesh: Any = None) -> Any:
    torch.manual_seed(1)
    model = Model()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def log_gathers(model: Any) -> None:
    for i, block in enumerate(model.blocks):
        hook = block._get_fsdp_state()._fsdp_param_group._all_gather_comm
        inner = hook._hook.gather

        def gather(*args: Any, i: int = i, hook: Any = hook, inner: Any = inner) -> Any:
            if args[-1] is hook and torch._C._current_graph_task_id() == -1:
                model.log.append(f"g{i}")
            return inner(*args)

        hook._hook.gather = gather


def train(model: Any, steps: int = STEPS, orders: dict[int, list[int]] | None = None) -> list[Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)
    torch.manual_seed(100 + dist.get_rank())
    for step in range(steps):
        model.order = (orders or {}).get(step, model.order)
        model.log.clear()
        model(torch.randn(3, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [x.to_local().clone() for x in model.state_dict().values()]


def asked(model: Any) -> list[int]:
    """How many modules each block gathers ahead."""
    states = [block._get_fsdp_state() for block in model.blocks]
    return [len(state._states_to_forward_prefetch) for state in states]


def same(found: list[Any], wanted: list[Any]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def ahead(device: Any) -> None:
    """Bits stay, and gathers come before the modules in front have computed."""
    schedule()
    wanted = train(make())
    for count, lists in ((0, [0] * 5), (1, [1, 1, 1, 1, 0]), (None, [2, 2, 2, 1, 0])):
        for small in (False, True):
            Scheduled.small = small
            model = make()
            with fsdp.compress(model, route="network", ahead=count):
                log_gathers(model)
                assert same(train(model), wanted), (count, small)
                assert asked(model) == lists
            assert asked(model) == [0] * BLOCKS
            first = model.log[: model.log.index("0")]
            assert first == [f"g{i}" for i in range(1 + lists[0])], (count, model.log)
            assert [x for x in model.log if x[0] == "g"] == [f"g{i}" for i in range(BLOCKS)]


def other_orders(device: Any) -> None:
    """Another order, a module that is left out, or one that comes twice: as without it."""
    swapped = [1, 0, 2, 3, 4]
    for orders in (
        {4: swapped},
        {0: swapped, 1: [0, 1, 2, 3, 4], 2: swapped, 3: [0, 1, 2, 3, 4]},
        {4: [0, 1, 3]},
        {0: [0, 1, 2, 1, 3, 4]},
    ):
        wanted = train(make(), 8, orders)
        model = make()
        with fsdp.compress(model, route="network"):
            assert same(train(model, 8, orders), wanted), orders
            # A module that is left out has been gathered for nothing, which nobody sees.
            assert (asked(model) == [0] * BLOCKS) != (4 in orders and len(orders[4]) < BLOCKS)


def own_lists(device: Any) -> None:
    """What the user has asked for stays, and other modules ask for nothing."""
    model = make()
    model.blocks[1].set_modules_to_forward_prefetch([model.blocks[3]])
    with fsdp.compress(model, route="network"):
        assert same(train(model), train(make()))
        assert asked(model) == [0, 1, 0, 0, 0]
    assert asked(model) == [0, 1, 0, 0, 0]


def as_on_a_gpu() -> list[bool]:
    """Have gathers be judged as where that takes time; whether each is known to fit."""
    vars(prepared_fsdp)["known_at_once"] = lambda device: False
    certain: list[bool] = []
    note = prepared_fsdp._Gather.note

    def noted(self: Any, work: Any) -> None:
        note(self, work)
        certain.append(work.certain)

    prepared_fsdp._Gather.note = noted  # type: ignore[method-assign]
    return certain


def known_to_fit(device: Any) -> None:
    """Nobody waits for what backward gathers, unless it did not fit in forward, or has changed."""
    certain = as_on_a_gpu()
    schedule()
    wanted = train(make())
    for small in (False, True):
        Scheduled.small = small
        model = make()
        with fsdp.compress(model, route="network"):
            certain.clear()
            assert same(train(model), wanted)
        step = [False] * BLOCKS + [not small] * BLOCKS
        assert certain == STEPS * step, certain

    Scheduled.small = False
    found = []
    for hooked in (False, True):
        model = make()
        if hooked:
            fsdp.compress(model, route="network")
        loss = model(torch.ones(3, WIDTH)).square().mean()
        with torch.no_grad():
            model.blocks[2].weight.to_local().mul_(1.5)
        certain.clear()
        loss.backward()
        found.append([p.grad.to_local() for p in model.parameters()])
    assert same(*found)
    assert certain == [True, True, False, True, True], certain


def changed_unseen(device: Any) -> None:
    """What PyTorch does not see change, and does not fit any more, is an error on all ranks."""
    as_on_a_gpu()
    # Over gloo, an error ends the process group.
    model = make(DeviceMesh.from_group(dist.new_group(), "cpu"))
    with fsdp.compress(model, route="network"):
        train(model)
        loss = model(torch.ones(3, WIDTH)).square().mean()
        if dist.get_rank() == 1:
            local = model.blocks[1].weight.to_local().detach()
            local.numpy().view("u4")[...] = torch.randint(0, 2**31, local.shape).numpy() & ~(
                1 << 30
            )
        with pytest.raises(CollectiveError, match=r"did not fit|dynamic_overflow: .*from rank 1"):
            loss.backward()


@pytest.mark.parametrize(("count", "error"), [(-1, ValueError), (1.5, TypeError)])
def test_wrong_numbers_of_modules_are_refused(count: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="ahead is"):
        PreparedGather("network", ahead=count)


def test_nothing_is_asked_before_two_forwards_had_one_order() -> None:
    class Asked:
        def __init__(self) -> None:
            self.lists: list[Any] = []

        def _get_fsdp_state(self) -> Any:
            return type("State", (), {"_states_to_forward_prefetch": []})

        def set_modules_to_forward_prefetch(self, modules: Any) -> None:
            self.lists.append(list(modules))

    a, b, c = Asked(), Asked(), Asked()
    order = GatheringAhead(1)
    for forward in ((a, b), (a, b, c), (a, b, c)):
        for module in forward:
            order.note(module, module is a)
        assert not order.active
    order.note(a, True)
    assert [m.lists for m in (a, b, c)] == [[[b]], [[c]], []]
    order.note(c, False)
    order.note(b, False)
    order.note(a, True)
    assert not order.active
    assert [m.lists[1:] for m in (a, b, c)] == [[[]], [[]], []]


@pytest.mark.slow
@pytest.mark.parametrize(
    "task", ["ahead", "other_orders", "own_lists", "known_to_fit", "changed_unseen"]
)
def test_training(task: str, tmp_path: Path) -> None:
    launch(__file__, task, 2, tmp_path, warnings="ignore")


if __name__ == "__main__":
    join(globals(), sys.argv[1:])
