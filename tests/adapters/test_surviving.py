"""Training that goes on when ranks are killed or stopped: also what the processes run."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import tightwire as tw
from warm import NO_NAMES

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("PyTorch was built without gloo", allow_module_level=True)

from tightwire.adapters.weights.stateful import load_tensors, tensors_of  # noqa: E402

#: Seconds that ranks wait for one another, and without a sign of life.
TIMEOUT, SILENCE = 6.0, 1.0
OPTIONS: dict[str, Any] = {"timeout": TIMEOUT, "silence": SILENCE}


# What the processes run.


def new_model() -> Any:
    """Odd sizes; the weights of each process are other ones."""
    return torch.nn.Sequential(torch.nn.Linear(61, 37), torch.nn.ReLU(), torch.nn.Linear(37, 5))


def seeded(seed: int) -> Any:
    torch.manual_seed(seed)
    return new_model()


def new_optimizer(model: Any) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def batch(step: int, rank: int, world_size: int) -> Any:
    """A rank's share of a step's data."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(24, 61, generator=generator).chunk(world_size)[rank]


def loss_of(model: Any, x: Any) -> Any:
    return model(x).square().mean()


def digest(model: Any) -> str:
    """Of a model's weights, bit for bit."""
    found = hashlib.sha256()
    for p in model.parameters():
        x = p.detach()
        found.update((x.to_local() if hasattr(x, "to_local") else x).numpy().tobytes())
    return found.hexdigest()


def dies_in_backward(model: Any, how: signal.Signals = signal.SIGKILL) -> None:
    """Have this process killed in the middle of the next backward pass."""
    model[1].register_full_backward_pre_hook(lambda *_: os.kill(os.getpid(), how))


class Trainer:
    """A model that is trained in a group of survivors."""

    def __init__(self, store: Any, rank: int | None, world_size: int, **options: Any) -> None:
        self.model = seeded(100 if rank is None else rank)
        self.optimizer = new_optimizer(self.model)
        state = {"model": self.model, "optimizer": self.optimizer}
        if rank is None:
            self.group = tw.surviving.Group.join(store, state=state, **OPTIONS | options)
        else:
            self.group = tw.surviving.Group(
                store, rank, world_size, state=state, **OPTIONS | options
            )
        self.computes = self.model
        #: World sizes of the steps that were whole.
        self.sizes: list[int] = []
        self.start = digest(self.model)

    def gradients(self, comm: Any) -> None:
        self.optimizer.zero_grad()
        step = self.group.steps
        loss_of(self.computes, batch(step, comm.rank, comm.world_size)).backward()
        if self.computes is self.model:
            self.group.average(self.model)

    def train(self, until: int, before: Callable[[int], None] = lambda step: None) -> None:
        while self.group.steps < until:
            before(self.group.steps)
            self.group.step(self.gradients)
            self.optimizer.step()
            self.sizes.append(self.group.world_size)

    def result(self) -> dict[str, Any]:
        group = self.group
        return {
            "weights": digest(self.model),
            "start": self.start,
            "sizes": self.sizes,
            "rank": group.rank,
            "generation": group.generation,
            "steps": group.steps,
            "lost": group.lost,
        }


def lost(trainer: Trainer, until: int, before: Callable[[int], None]) -> tw.CollectiveError:
    """Train until the others go on without this rank; what it is told."""
    with pytest.raises(tw.CollectiveError) as caught:
        trainer.train(until, before)
    with pytest.raises(tw.CollectiveError, match="the group is closed"):
        trainer.group.step(trainer.gradients)
    return caught.value


def killed(store: Any, rank: int, world_size: int) -> Any:
    """The last rank is killed in the third step, and some ranks fail where others do not."""
    trainer = Trainer(store, rank, world_size)
    group, commit, average = trainer.group, trainer.group._commit, trainer.group.average
    calls = []

    def before(step: int) -> None:
        calls.append(step)
        if step == 2 and rank == world_size - 1:
            dies_in_backward(trainer.model)

    def fails_late() -> None:
        commit()
        if group.steps == 5 and rank == 0:
            # As if it had not heard that all were here, while the others have.
            group._steps, group._entered = 4, True
            raise tw.CollectiveError(rank, "test", 0, "commit", "connection closed")

    def fails_early(parameters: Any) -> None:
        average(parameters)
        if group.steps == 5 and group.generation == 2 and rank == 1:
            group._held = "connection closed"

    group._commit, group.average = fails_late, fails_early  # type: ignore[method-assign]
    trainer.train(7, before)
    trainer.group.close()
    assert calls == list(range(7))
    return trainer.result()


def dwindling(store: Any, rank: int, world_size: int) -> Any:
    """Two of five are lost at once, one of them while ranks regroup; then the first; then one."""
    trainer = Trainer(store, rank, world_size)
    member = trainer.group._membership
    regroup = member.regroup

    def dies(report: Any) -> Any:
        regroup(report)
        os.kill(os.getpid(), signal.SIGKILL)

    def before(step: int) -> None:
        if (step, rank) in ((1, 4), (3, 0), (4, 1)):
            dies_in_backward(trainer.model)
        if (step, rank) == (1, 3):
            member.regroup = dies  # type: ignore[method-assign]

    trainer.train(6, before)
    trainer.group.close()
    return trainer.result()


def stopped(store: Any, rank: int, world_size: int) -> Any:
    """A rank is stopped, the others go on without it; it goes on, is told, and joins again."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    trainer = Trainer(store, rank, world_size)
    store.set(f"pid {rank}", str(os.getpid()))
    told = ""

    def wrap() -> None:
        trainer.computes = torch.nn.parallel.DistributedDataParallel(
            trainer.model, bucket_cap_mb=0.002
        )
        tw.surviving.register(trainer.computes, trainer.group)

    def before(step: int) -> None:
        if (rank, step) == (1, 2) and not told:
            dies_in_backward(trainer.model, signal.SIGSTOP)
        if (rank, step) == (0, 4):
            os.kill(int(store.get("pid 1")), signal.SIGCONT)
        time.sleep(0.02)

    wrap()
    if rank == 1:
        error = lost(trainer, 6, before)
        told = str(error)
        assert error.stage == "lost"
        trainer = Trainer(store, None, world_size, wait=30)
        wrap()
    # All ranks see the others join in the same step.
    while trainer.sizes[-2:] != [3, 3] or trainer.group.steps < 6:
        trainer.train(trainer.group.steps + 1, before)
    trainer.group.close()
    return trainer.result() | {"told": told}


def without_a_store(store: Any, rank: int, world_size: int) -> Any:
    """The first rank holds the store, and is killed."""
    if rank == 0:
        own = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        store.set("own", str(own.port))
    else:
        own = dist.TCPStore("127.0.0.1", int(store.get("own")), is_master=False)
    trainer = Trainer(own, rank, world_size)
    before = lambda step: dies_in_backward(trainer.model) if rank == 0 and step == 1 else None  # noqa: E731
    start = time.monotonic()
    error = lost(trainer, 3, before)
    return {"stage": error.stage, "text": str(error), "seconds": time.monotonic() - start}


def sharded(store: Any, rank: int, world_size: int) -> Any:
    """Two replicas of two processes: one of them is killed. Later a new replica joins."""
    from torch.distributed.fsdp import fully_shard

    replica, place = divmod(rank, 2)
    own = dist.PrefixStore(f"replica {replica}", store)
    dist.init_process_group(
        "gloo", store=own, rank=place, world_size=2, timeout=timedelta(seconds=20)
    )
    if replica == 2:
        store.wait(["lost"])
    model = seeded(replica)
    for module in (*model, model):
        if list(module.parameters()):
            fully_shard(module)
    if replica != 1:
        # What travels within a replica is its own affair.
        tw.fsdp.compress(model)
    optimizer = new_optimizer(model)
    options = OPTIONS | {"state": {"model": model, "optimizer": optimizer}}
    within = dist.group.WORLD
    if replica == 2:
        group = tw.surviving.Group.join(store, within=within, **options)
    else:
        group = tw.surviving.Group(store, replica, 2, within=within, **options)
    sizes: list[int] = []

    def gradients(comm: Any) -> None:
        optimizer.zero_grad()
        x = batch(group.steps, 2 * comm.rank + place, 2 * comm.world_size)
        loss_of(model, x).backward()
        group.average(model)

    def train() -> None:
        while len(sizes) < 4 or sizes[-2:] != [2, 2]:
            if (rank, group.steps) == (3, 2):
                dies_in_backward(model)
            group.step(gradients)
            optimizer.step()
            sizes.append(group.world_size)
            time.sleep(0.02)
            if len(sizes) == 4 and replica == 0:
                store.set("lost", "")

    if replica == 1:
        with pytest.raises(RuntimeError) as caught:
            train()
        return {"text": str(caught.value), "notes": caught.value.__notes__}
    if replica == 2:
        sizes += [0, 0]
    train()
    group.close()
    found = hashlib.sha256()
    for p in model.parameters():
        found.update(p.full_tensor().detach().numpy().tobytes())
    return {"weights": found.hexdigest(), "sizes": sizes, "rank": group.rank}


TASKS = {task.__name__: task for task in (killed, dwindling, stopped, without_a_store, sharded)}


# The processes.


def launch(task: str, world_size: int, folder: Path, seconds: float = 60) -> list[Any]:
    """What `task` returns on every rank; the signal's number of one that was killed."""
    path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)])
    settings = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    log = folder / "log"
    with log.open("w") as stream:
        process = subprocess.Popen(
            [sys.executable, "-W", "error", __file__, task, str(world_size), str(folder)],
            env=os.environ | NO_NAMES | settings,
            stdout=stream,
            stderr=stream,
            start_new_session=True,
        )
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        # Ranks say where they are.
        os.killpg(process.pid, signal.SIGABRT)
        time.sleep(5)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert process.returncode == 0, log.read_text()
    return list(json.loads((folder / "results").read_text()))


def main(task: str, world_size: str, folder: str) -> None:
    """Fork the ranks, and hold their store; write what they return."""
    torch.set_num_threads(1)
    # What takes long to import: once, and not in each rank.
    for name in ("numba", "torch._dynamo", "tightwire.adapters.training.fsdp"):
        importlib.import_module(name)
    ranks, children = int(world_size), []
    home = Path(folder)
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                (home / f"{rank}.json").write_text(json.dumps(in_rank(task, rank, ranks, home)))
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        children.append(pid)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    (home / "port.part").write_text(str(store.port))
    (home / "port.part").rename(home / "port")
    codes: dict[int, int] = {}
    try:
        while len(codes) < ranks:
            # The first that fails ends all: others may train without it for ever.
            pid, status = os.wait()
            code = os.waitstatus_to_exitcode(status)
            codes[pid] = code
            assert code <= 0, f"rank {children.index(pid)} has ended with {code}"
    finally:
        for pid in set(children) - codes.keys():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    results = [
        codes[pid] or json.loads((home / f"{rank}.json").read_text())
        for rank, pid in enumerate(children)
    ]
    (home / "results").write_text(json.dumps(results))


def in_rank(task: str, rank: int, world_size: int, home: Path) -> Any:
    while not (home / "port").exists():
        time.sleep(0.01)
    port = int((home / "port").read_text())
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=30))
    return TASKS[task](store, rank, world_size)


# The tests.


def by_hand(sizes: Sequence[int], width: int = 1) -> str:
    """The weights after steps of so many replicas each, in this process and by PyTorch alone."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model = seeded(0)
        optimizer = new_optimizer(model)
        for step, size in enumerate(sizes):
            gradients = []
            for rank in range(size * width):
                optimizer.zero_grad()
                loss_of(model, batch(step, rank, size * width)).backward()
                gradients.append([p.grad.clone() for p in model.parameters()])
            for i, p in enumerate(model.parameters()):
                replicas = [
                    mean([terms[i] for terms in gradients[r * width : (r + 1) * width]])
                    for r in range(size)
                ]
                p.grad = mean(replicas)
            optimizer.step()
        return digest(model)
    finally:
        torch.set_num_threads(threads)


def mean(terms: Sequence[Any]) -> Any:
    total = torch.full_like(terms[0], -0.0)
    for term in terms:
        total += term
    return total / len(terms)


@pytest.mark.slow
def test_a_killed_rank_costs_a_repeated_step(tmp_path: Path) -> None:
    *survivors, lost = launch("killed", 3, tmp_path)
    assert lost == -signal.SIGKILL
    sizes = [3, 3, 2, 2, 2, 2, 2]
    for rank, found in enumerate(survivors):
        assert found["sizes"] == sizes
        # One more for the rank that did not hear of the end of a step, one for a step by halves.
        assert (found["rank"], found["generation"], found["steps"]) == (rank, 3, 7)
        assert found["weights"] == by_hand(sizes)


@pytest.mark.slow
def test_ranks_are_lost_while_others_regroup_until_one_is_left(tmp_path: Path) -> None:
    first, second, found, *last = launch("dwindling", 5, tmp_path)
    assert [first, second, *last] == [-signal.SIGKILL] * 4
    assert found["sizes"] == [5, 3, 3, 2, 1, 1]
    assert (found["rank"], found["generation"]) == (0, 4)
    assert found["lost"] == {"1": "nothing was heard of it for 1 s"}
    assert found["weights"] == by_hand(found["sizes"])


@pytest.mark.slow
def test_a_stopped_rank_is_told_and_joins_again(tmp_path: Path) -> None:
    first, back, last = launch("stopped", 3, tmp_path)
    assert "rank 1: surviving #1 failed in stage 'lost': this process is not in" in back["told"]
    assert "generation 1: nothing was heard of it for 1 s; the others (2) go" in back["told"]
    assert [first["rank"], last["rank"], back["rank"]] == [0, 1, 2]
    sizes = first["sizes"]
    assert sizes[:4] == [3, 3, 2, 2]
    assert sizes[-3:] == [2, 3, 3]
    assert sizes == last["sizes"]
    assert back["start"] != first["weights"] == last["weights"] == back["weights"] == by_hand(sizes)


@pytest.mark.slow
def test_without_its_store_nobody_survives(tmp_path: Path) -> None:
    lost, *others = launch("without_a_store", 3, tmp_path)
    assert lost == -signal.SIGKILL
    for found in others:
        assert found["stage"] == "store"
        assert "the process that holds it has ended or cannot be reached" in found["text"]
        assert found["seconds"] < TIMEOUT


@pytest.mark.slow
def test_a_replica_that_loses_a_rank_leaves_and_another_joins(tmp_path: Path) -> None:
    first, second, left, lost, *joined = launch("sharded", 6, tmp_path)
    assert lost == -signal.SIGKILL
    assert re.search("closed by peer|reset by peer", left["text"])
    assert left["notes"] == ["replica 1 leaves its group, which goes on without it"]
    sizes = first["sizes"]
    assert sizes == second["sizes"]
    assert sizes[:4] == [2, 2, 1, 1]
    for rank, found in enumerate((first, second, *joined)):
        assert found["rank"] == rank // 2
        assert found["weights"] == by_hand(sizes, 2)


# Ranks that are threads of this process.


def in_threads(tasks: Sequence[Callable[[Any], Any]]) -> list[Any]:
    """What tasks return or raise, run at the same time with one store."""
    store = dist.HashStore()

    def run(task: Callable[[Any], Any]) -> Any:
        try:
            return task(store)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(tasks)) as pool:
        return list(pool.map(run, tasks))


def two_steps(rank: int, before: Callable[[int, int], None], **options: Any) -> Any:
    """A rank of two that averages its number and 4, twice: means and world sizes, or an error."""

    def task(store: Any) -> list[Any]:
        found: list[Any] = []
        with tw.surviving.Group(store, rank, 2, **OPTIONS | options) as group:

            def call(comm: Any) -> float:
                before(rank, group.steps)
                x, y = torch.tensor([float(rank)]), torch.tensor([[4.0]], dtype=torch.float64)
                group.average_tensors([x, y])
                # Different dtypes are different buckets.
                return float(x) + float(y) - 4

            while group.steps < 2:
                found.append((group.step(call), group.world_size, group.rank))
        return found

    return task


@pytest.mark.parametrize(
    "error", [KeyError("no such thing"), tw.CollectiveError(0, "another group's", 3, "sizes", "")]
)
def test_a_rank_that_raises_leaves_at_once(error: Exception) -> None:
    def before(rank: int, step: int) -> None:
        if (rank, step) == (0, 1):
            raise error

    start = time.monotonic()
    raised, found = in_threads([two_steps(rank, before) for rank in range(2)])
    assert time.monotonic() - start < TIMEOUT
    assert raised is error
    assert error.__notes__ == ["replica 0 leaves its group, which goes on without it"]
    assert found == [(0.5, 2, 1), (1.0, 1, 0)]


@pytest.mark.slow
def test_a_rank_that_is_too_slow_is_told_that_the_others_went_on() -> None:
    def before(rank: int, step: int) -> None:
        if (rank, step) == (1, 1):
            # It computes, with a heartbeat: longer than a collective and the regrouping wait.
            time.sleep(2)

    found, error = in_threads([two_steps(rank, before, timeout=0.6) for rank in range(2)])
    assert found == [(0.5, 2, 0), (0.0, 1, 0)]
    assert isinstance(error, tw.CollectiveError)
    assert (error.rank, error.stage) == (1, "lost")
    assert "it has not reported for 0.6 s; the others (1) go on" in error.detail


def test_ranks_that_cannot_connect_give_up() -> None:
    codecs = ("zipccl", "raw")
    tasks = [two_steps(rank, lambda *_: None, codec=codecs[rank]) for rank in range(2)]
    for rank, error in enumerate(in_threads(tasks)):
        assert isinstance(error, tw.CollectiveError)
        assert (error.rank, error.stage) == (rank, "regroup")
        assert "3 generations of the same ranks have failed" in error.detail
        assert "ranks differ" in error.detail


def test_gradients_that_are_missing_count_as_zeros() -> None:
    def task(rank: int) -> Any:
        def call(store: Any) -> Any:
            layers = torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(1, 1)
            layers[1].bias.requires_grad_(False)
            with tw.surviving.Group(store, rank, 2, **OPTIONS) as group:

                def gradients(comm: Any) -> None:
                    layers[rank].weight.grad = torch.ones(1, 1)
                    group.average(p for layer in layers for p in layer.parameters())

                group.step(gradients)
            assert layers[1].bias.grad is None
            return [float(layer.weight.grad) for layer in layers]

        return call

    assert in_threads([task(0), task(1)]) == [[0.5, 0.5]] * 2


def test_means_outside_of_a_step_raise() -> None:
    """Else gradients would stay as they are, and nothing would say so."""

    def task(rank: int) -> Any:
        def call(store: Any) -> Any:
            model = new_model()
            weight = next(model.parameters())
            with tw.surviving.Group(store, rank, 2, **OPTIONS) as group:
                weight.grad = torch.full_like(weight, 1.0 + rank)
                group.average([weight])
                with pytest.raises(TypeError, match="is sparse; allowed: dense ones"):
                    group.average_tensors([torch.eye(2).to_sparse()])
            with pytest.raises(tw.CollectiveError, match="the group is closed"):
                group.average([weight])
            return weight.grad.unique().tolist()

        return call

    assert in_threads([task(0), task(1)]) == [[1.5]] * 2


class Reader:
    """Has a state that no module has."""

    def __init__(self, found: Any) -> None:
        self.found = found

    def state_dict(self) -> Any:
        return {"place": self.found}

    def load_state_dict(self, state: Any) -> None:
        self.found = state["place"]


def test_a_state_of_any_nesting_goes_through_tensors() -> None:
    nested = {"seen": [torch.arange(3), (None, 2.5, {"x": torch.tensor(True)})], 7: "seven"}
    giver, taker = Reader(nested), Reader(None)
    model = new_model()
    optimizers = new_optimizer(model), new_optimizer(model)
    loss_of(model, batch(0, 0, 1)).backward()
    optimizers[0].step()
    optimizers[0].param_groups[0]["lr"] = 0.125
    tensors = tensors_of({"optimizer": optimizers[0], "reader": giver})
    assert {"reader.place.seen.0", "optimizer.state.0.exp_avg", "rest"} < set(tensors)
    # What travels is read while both are used on.
    arrived = {name: x.clone() for name, x in tensors.items()}
    load_tensors({"optimizer": optimizers[1], "reader": taker}, arrived)
    assert optimizers[1].param_groups[0]["lr"] == 0.125
    for i in range(4):
        for name, x in optimizers[0].state_dict()["state"][i].items():
            assert torch.equal(optimizers[1].state_dict()["state"][i][name], x)
    assert list(taker.found) == ["seen", 7]
    first, (nothing, number, last) = taker.found["seen"]
    assert torch.equal(first, torch.arange(3))
    assert (nothing, number) == (None, 2.5)
    assert torch.equal(last["x"], torch.tensor(True))
    with pytest.raises(KeyError, match="model"):
        load_tensors({"model": model}, arrived)


@pytest.mark.slow
def test_a_replica_that_cannot_take_the_state_leaves_and_another_joins() -> None:
    def train(group: Any) -> list[int]:
        with group:
            sizes: list[int] = []
            until = time.monotonic() + 20
            while sizes.count(3) < 2 and time.monotonic() < until:
                sizes.append(group.step(lambda comm: comm.world_size))
                time.sleep(0.01)
        return sizes

    def rank(number: int) -> Any:
        def task(store: Any) -> Any:
            # Rank 1 gets that of rank 0.
            own = Reader(torch.full((3,), 5 + number))
            group = tw.surviving.Group(store, number, 2, state={"own": own}, **OPTIONS)
            return own.found.tolist(), set(train(group))

        return task

    def joins(store: Any) -> Any:
        refuses = Reader(0)
        refuses.load_state_dict = lambda x: int(x["place"])  # type: ignore[method-assign, assignment]
        with pytest.raises((ValueError, RuntimeError)) as caught:
            tw.surviving.Group.join(store, state={"own": refuses}, wait=20, **OPTIONS)
        own = Reader(None)
        group = tw.surviving.Group.join(store, state={"own": own}, wait=20, **OPTIONS)
        return own.found.tolist(), train(group), group.rank, str(caught.value)

    first, second, (state, sizes, number, why) = in_threads([rank(0), rank(1), joins])
    assert first == second == ([5, 5, 5], {2, 3})
    assert (state, sizes, number) == ([5, 5, 5], [3, 3], 2)
    assert "scalar" in why


def test_bad_arguments_are_refused() -> None:
    store = dist.HashStore()
    group = tw.surviving.Group(store, 0, 1, **OPTIONS)
    with pytest.raises(ValueError, match="rank is 2; allowed: 0 to 1"):
        tw.surviving.Group(store, 2, 2)
    with pytest.raises(TypeError, match=r"state\['w'\] is a int; allowed: objects with state_dict"):
        tw.surviving.Group(store, 0, 2, state={"w": 1})
    with pytest.raises(TypeError, match=r"options are \['codecs'\]"):
        tw.surviving.Group(store, 0, 2, codecs="raw")
    with pytest.raises(TypeError, match="model is a Linear; allowed: DistributedDataParallel"):
        tw.surviving.register(torch.nn.Linear(1, 1), group)
    with pytest.raises(tw.CollectiveError, match="a rank of this number before"):
        tw.surviving.Group(store, 0, 1, **OPTIONS)
    assert group.step(lambda comm: comm.world_size) == 1
    group.close()
    group.close()
    with pytest.raises(tw.CollectiveError, match="the group is closed"):
        _ = group.comm


if __name__ == "__main__":
    main(*sys.argv[1:])
