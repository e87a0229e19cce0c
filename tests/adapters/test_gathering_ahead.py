"""Gathers of FSDP2 that come before they are needed, and those that nobody waits for.

This file is also what the processes run.
"""

from __future__ import annotations

import functools
import sys
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

from torch.distributed.device_mesh import DeviceMesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from tightwire.adapters.errors import CollectiveError  # noqa: E402
from tightwire.adapters.training import fsdp, prepared_fsdp, tagc  # noqa: E402
from tightwire.adapters.training.gathering_ahead import GatheringAhead  # noqa: E402
from tightwire.adapters.training.prepared_fsdp import PreparedGather  # noqa: E402

WIDTH, BLOCKS, STEPS = 72, 5, 6


class Model(torch.nn.Module):  # type: ignore[misc, name-defined, unused-ignore]
    """Blocks that run in an order that can be changed."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))
        self.order = list(range(BLOCKS))
        #: How many modules each block gathers ahead in this forward.
        self.asks: list[int] = []
        #: What was called: numbers of blocks, and of gathers with a letter in front.
        self.log: list[str] = []

    def forward(self, x: Any) -> Any:
        for i in self.order:
            x = torch.tanh(self.blocks[i](x))
            self.log.append(str(i))
        self.asks = asked(self)
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
                assert model.asks == lists
                # Backward, in which blocks may be called again, gathers what it needs.
                assert asked(model) == [0] * BLOCKS
            first = model.log[: model.log.index("0")]
            assert first == [f"g{i}" for i in range(1 + lists[0])], (count, model.log)
            assert [x for x in model.log if x[0] == "g"] == [f"g{i}" for i in range(BLOCKS)]


def other_orders(device: Any) -> None:
    """Another order, a module that is left out, or one that comes twice: as without it."""
    swapped = [1, 0, 2, 3, 4]
    for orders in (
        {6: swapped},
        dict.fromkeys((0, 2, 4, 6), swapped) | dict.fromkeys((1, 3, 5, 7), swapped[::-1]),
        {6: [0, 1, 3], 7: swapped},
        {0: [0, 1, 2, 1, 3, 4]},
    ):
        wanted = train(make(), 8, orders)
        model = make()
        with fsdp.compress(model, route="network"):
            assert same(train(model, 8, orders), wanted), orders
            assert model.asks == [0] * BLOCKS


def own_lists(device: Any) -> None:
    """What the user has asked for stays, and other modules ask for nothing."""
    model = make()
    model.blocks[1].set_modules_to_forward_prefetch([model.blocks[3]])
    with fsdp.compress(model, route="network"):
        assert same(train(model), train(make()))
        assert model.asks == [0, 1, 0, 0, 0]
    assert asked(model) == [0, 1, 0, 0, 0]
    model = make()
    with fsdp.compress(model, route="network"):
        train(model, 3)
        assert model.asks == [2, 2, 2, 1, 0]
        model.blocks[1].set_modules_to_forward_prefetch([model.blocks[3]])
        train(model, 3)
        assert model.asks == [0, 1, 0, 0, 0]
    assert asked(model) == [0, 1, 0, 0, 0]


def shift(model: Any) -> None:
    """Change all parameters, as an average over steps does."""
    with torch.no_grad():
        for p in model.parameters():
            p.to_local().add_(0.01)


def evaluations(leave: Callable[[Any, int], None], hooked: bool) -> list[Any]:
    """What a model says that is never trained, but changes; `leave` leaves modules out."""
    model, found = make(), []
    hooks = fsdp.compress(model, route="network") if hooked else None
    with torch.no_grad():
        for step in range(8):
            leave(model, step)
            found.append(model(torch.ones(3, WIDTH)).clone())
            shift(model)
    if hooks is not None:
        hooks.close()
    return found


def short(model: Any, step: int) -> None:
    model.order = [0, 1] if step == 4 else list(range(BLOCKS))


def alone(model: Any, step: int) -> None:
    if step >= 4:
        model.blocks[2](torch.ones(3, WIDTH))
        shift(model)


def raises(model: Any, step: int) -> None:
    if step == 4:
        handle = model.blocks[1].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(torch.ones(3, WIDTH))
        handle.remove()
        # FSDP keeps what the block that has raised computes with.
        model.blocks[1].reshard()
        shift(model)


def not_used(device: Any) -> None:
    """What a forward has gathered ahead and not used is gathered anew by the next one."""
    for leave in (short, alone, raises):
        assert same(evaluations(leave, True), evaluations(leave, False)), leave.__name__


class Scaled(Model):
    """A model whose root has a parameter, which it keeps after an evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Any) -> Any:
        return super().forward(x * self.scale)


def evaluated(device: Any) -> None:
    """Evaluations, before training or in between, end nothing."""
    for first in (False, True):
        model = Scaled()
        for module in (*model.blocks, model):
            fully_shard(module)
        with fsdp.compress(model, route="network"):
            for step in range(4):
                if step or first:
                    with torch.no_grad():
                        for _ in range(3):
                            model(torch.ones(3, WIDTH))
                train(model, 4)
                assert model.asks == [2, 2, 2, 1, 0], (first, step)


def other_hooks(device: Any) -> None:
    """Hooks of tagc gather parameters ahead, too, as many as they are told."""
    for count, lists in ((None, [2, 2, 2, 1, 0]), (0, [0] * BLOCKS)):
        model = make()
        with tagc.compress(model, tagc.Tagc(ratio=4), route="network", ahead=count):
            train(model, 4)
            assert model.asks == lists


def several_roots(device: Any) -> None:
    """Nothing is gathered ahead by modules of another root, which wait for other streams."""
    model = Model()
    for block in model.blocks:
        fully_shard(block)
    with fsdp.compress(model, route="network"):
        train(model)
        assert model.asks == [0] * BLOCKS


def called_again(device: Any) -> None:
    """Blocks that backward calls once more gather nothing ahead there."""
    found, numbers = [], []
    for count in (0, 2):
        model = make()
        for block in model.blocks:
            forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
            block.forward = forward
        with fsdp.compress(model, route="network", ahead=count) as hooks:
            found.append(train(model))
            numbers.append(sum(calls.number for calls in hooks.all_gather._calls.values()))
    assert same(*found)
    assert numbers[0] == numbers[1]


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
    # What one rank alone knows to have changed is certain, too: all have to find the same.
    for between in (change_of_one_rank, step_between):
        found = []
        for hooked in (False, True):
            model = make()
            if hooked:
                fsdp.compress(model, route="network")
            loss = model(torch.ones(3, WIDTH)).square().mean()
            between(model)
            certain.clear()
            loss.backward()
            found.append([p.grad.to_local() for p in model.parameters()])
        assert same(*found)
        assert certain == [between is change_of_one_rank] * BLOCKS, certain


def change_of_one_rank(model: Any) -> None:
    if dist.get_rank() == 1:
        with torch.no_grad():
            model.blocks[2].weight.to_local().mul_(1.5)


def step_between(model: Any) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.zero_grad()


def random_bits(x: Any) -> Any:
    """Finite numbers that no codec makes smaller."""
    return torch.randint(0, 2**31 - 1, x.shape, dtype=torch.int32).bitwise_and(~(1 << 30))


def does_not_fit(change: Callable[[Any], None], frozen: bool = False) -> None:
    as_on_a_gpu()
    # Over gloo, an error ends the process group.
    model = make(DeviceMesh.from_group(dist.new_group(), "cpu"))
    with fsdp.compress(model, route="network"):
        train(model)
        model.requires_grad_(not frozen)
        loss = model(torch.ones(3, WIDTH, requires_grad=frozen)).square().mean()
        change(model)
        with pytest.raises(CollectiveError, match=r"did not fit|dynamic_overflow: .*from rank"):
            loss.backward()
        hook = model.blocks[0]._get_fsdp_state()._fsdp_param_group._all_gather_comm._hook
        made = [calls._exact for calls in hook._calls.values()]
        assert made == [None], "no rank has made a call that others did not"


def changed_unseen(device: Any) -> None:
    """What PyTorch does not see change, and does not fit any more, is an error on all ranks."""

    def change(model: Any) -> None:
        if dist.get_rank() == 1:
            local = model.blocks[1].weight.to_local().detach()
            local.numpy().view("i4")[...] = random_bits(local).numpy()

    does_not_fit(change)


def changed_on_one_rank(device: Any) -> None:
    """So is what PyTorch does see on one rank: the others do not know of it."""

    def change(model: Any) -> None:
        if dist.get_rank() == 1:
            with torch.no_grad():
                local = model.blocks[1].weight.to_local()
                local.copy_(random_bits(local).view(torch.float32))

    does_not_fit(change)


def changed_without_sums(device: Any) -> None:
    """Also a backward that sums no gradients raises, for what it gathers last."""

    def change(model: Any) -> None:
        local = model.blocks[0].weight.to_local().detach()
        local.numpy().view("i4")[...] = random_bits(local).numpy()

    does_not_fit(change, frozen=True)


@pytest.mark.parametrize(("count", "error"), [(-1, ValueError), (1.5, TypeError)])
def test_wrong_numbers_of_modules_are_refused(count: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="ahead is"):
        PreparedGather("network", ahead=count)


class Asked:
    """An FSDP module, as far as orders are concerned."""

    def __init__(self) -> None:
        self.lists: list[Any] = []
        self._states_to_forward_prefetch: list[Any] = []
        self._fsdp_param_groups: list[Any] = []

    def _get_fsdp_state(self) -> Any:
        return self

    def set_modules_to_forward_prefetch(self, modules: Any) -> None:
        self._states_to_forward_prefetch = list(modules)
        self.lists.append(list(modules))


def go(order: GatheringAhead, *modules: Asked) -> list[list[Any]]:
    """What modules gather ahead in a forward, by module."""
    for module in modules:
        order.note(module)
    found = [list(module._states_to_forward_prefetch) for module in modules]
    order.end_forward()
    assert not any(module._states_to_forward_prefetch for module in modules)
    return found


def test_nothing_is_asked_before_two_forwards_had_one_order() -> None:
    a, b, c = Asked(), Asked(), Asked()
    order = GatheringAhead(1)
    for forward in ((a, b), (a, b, c), (a, b, c)):
        assert not order.active
        assert not any(go(order, *forward))
    assert order.active
    assert go(order, a, b, c) == [[b], [c], []]
    assert go(order, b, c) == [[c], []], "a still has its parameters"
    assert go(order) == []
    assert go(order, a, b, c) == [[b], [c], []]
    go(order, a, c, b)
    assert not order.active


def test_an_order_is_learnt_three_times() -> None:
    a, b = Asked(), Asked()
    order = GatheringAhead(1)
    for tries in range(4):
        go(order, a, b)
        go(order, a, b)
        assert order.active == (tries < 3)
        go(order, b, a)
    assert len(a.lists) == 3 * 2


def test_a_forward_without_an_end_is_not_remembered() -> None:
    order = GatheringAhead(1)
    for module in [Asked(), Asked()] * 10_000:
        order.note(module)
    assert not order._now


@pytest.mark.slow
@pytest.mark.parametrize(
    "task",
    [
        "ahead",
        "other_orders",
        "own_lists",
        "not_used",
        "evaluated",
        "other_hooks",
        "several_roots",
        "called_again",
        "known_to_fit",
        "changed_unseen",
        "changed_on_one_rank",
        "changed_without_sums",
    ],
)
def test_training(task: str, tmp_path: Path) -> None:
    launch(__file__, task, 2, tmp_path, warnings="ignore")


if __name__ == "__main__":
    join(globals(), sys.argv[1:])
