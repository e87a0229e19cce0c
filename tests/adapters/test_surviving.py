"""Training that goes on when ranks are killed or stopped: also what the processes run."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import tightwire as tw

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("PyTorch was built without gloo", allow_module_level=True)

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
    model[0].weight.register_hook(lambda _: os.kill(os.getpid(), how))


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
        }


def killed(store: Any, rank: int, world_size: int) -> Any:
    """The last rank is killed in the third step."""
    trainer = Trainer(store, rank, world_size)
    last = rank == world_size - 1
    trainer.train(6, lambda step: dies_in_backward(trainer.model) if last and step == 2 else None)
    trainer.group.close()
    return trainer.result()


TASKS = {task.__name__: task for task in (killed,)}


# The processes.


def launch(task: str, world_size: int, folder: Path, seconds: float = 60) -> list[Any]:
    """What `task` returns on every rank; the signal's number of one that was killed."""
    path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-W", "error", __file__, task, str(world_size), str(folder)],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert done.returncode == 0, done.stderr
    return list(json.loads((folder / "results").read_text()))


def main(task: str, world_size: str, folder: str) -> None:
    """Fork the ranks, and hold their store; write what they return."""
    torch.set_num_threads(1)
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
    results: list[Any] = []
    for rank, pid in enumerate(children):
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert code <= 0, f"rank {rank} has ended with {code}"
        results.append(code or json.loads((home / f"{rank}.json").read_text()))
    (home / "results").write_text(json.dumps(results))


def in_rank(task: str, rank: int, world_size: int, home: Path) -> Any:
    while not (home / "port").exists():
        time.sleep(0.01)
    port = int((home / "port").read_text())
    store = dist.TCPStore(
        "127.0.0.1", port, is_master=False, timeout=timedelta(seconds=30)
    )
    return TASKS[task](store, rank, world_size)


# The tests.


def by_hand(sizes: Sequence[int]) -> str:
    """The weights after steps of so many ranks each, in this process and by PyTorch alone."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model = seeded(0)
        optimizer = new_optimizer(model)
        for step, size in enumerate(sizes):
            gradients = []
            for rank in range(size):
                optimizer.zero_grad()
                loss_of(model, batch(step, rank, size)).backward()
                gradients.append([p.grad.clone() for p in model.parameters()])
            for p, *terms in zip(model.parameters(), *gradients, strict=True):
                total = torch.full_like(p, -0.0)
                for term in terms:
                    total += term
                p.grad = total / size
            optimizer.step()
        return digest(model)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.slow
def test_a_killed_rank_costs_a_repeated_step(tmp_path: Path) -> None:
    *survivors, lost = launch("killed", 3, tmp_path)
    assert lost == -signal.SIGKILL
    sizes = [3, 3, 2, 2, 2, 2]
    for rank, found in enumerate(survivors):
        assert found["sizes"] == sizes
        assert (found["rank"], found["generation"], found["steps"]) == (rank, 1, 6)
        assert found["weights"] == by_hand(sizes)


if __name__ == "__main__":
    main(*sys.argv[1:])
