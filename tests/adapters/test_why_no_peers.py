"""Hooks with `route="auto"` whose peers' memory cannot be made, on one rank or on all of them.

This file is also what the processes run.
"""

from __future__ import annotations

import logging
import sys
import tempfile
import time
import unittest.mock
from pathlib import Path
from typing import Any

import pytest

from processes import join, launch

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("PyTorch was built without gloo", allow_module_level=True)
pytest.importorskip("triton")
_symmetric_memory = pytest.importorskip("torch.distributed._symmetric_memory")

from tightwire.adapters.training import ddp, moe, prepared_hooks  # noqa: E402
from tightwire.adapters.training.directions import PreparedDirection  # noqa: E402
from tightwire.adapters.transports import symmetric  # noqa: E402
from tightwire.adapters.transports.attempts import attempt  # noqa: E402
from tightwire.adapters.transports.peer import PeerMemoryError  # noqa: E402

CPU = torch.device("cpu")
NO_HANDLE = "OSError: no handle"
#: Which memory cannot be made, counted from the one that is tried: on which rank, None for all.
CASES: dict[str, tuple[int, int | None] | None] = {
    "works": None,
    "on one rank": (0, 1),
    "on all ranks": (0, None),
    "later": (1, 0),
    "much later": (5, 1),
}


class FileRegion:
    """A `Region` of processes: a file for each rank."""

    def __init__(self, folder: str, number: int, nbytes: int) -> None:
        dist.barrier()
        names = [f"{folder}/{number}-{rank}" for rank in range(dist.get_world_size())]
        self.parts = [
            torch.from_file(name, shared=True, size=nbytes, dtype=torch.uint8) for name in names
        ]
        dist.barrier()

    def barrier(self) -> None:
        dist.barrier()

    def late(self) -> Any:
        return None


class FileMemory:
    """`PeerMemory` of processes, of which some cannot be made."""

    case = "works"
    folder = ""

    def __init__(self, group: Any, device: Any, *, timeout: float) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.fails = CASES[self.case]
        self.made = 0

    def region(self, nbytes: int) -> FileRegion:
        number, self.made = self.made, self.made + 1

        def make() -> None:
            if self.fails is not None:
                at, rank = self.fails
                if number == at and rank in (None, self.rank):
                    raise OSError("no handle")

        # As SymmetricMemory: nobody goes to meet the others before all can.
        attempt(None, CPU, make)
        return FileRegion(self.folder, number, nbytes)


class Naive(FileMemory):
    """Tells nobody that it failed, and makes no memory: the trial alone has to find out."""

    def region(self, nbytes: int) -> Any:
        if self.rank == 1:
            raise OSError("no handle")


class Logged(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.getMessage()}")


def on_the_host(memory: type) -> Any:
    """Have "auto" look for this memory, though tensors are on the CPU."""
    stack = unittest.mock.patch.multiple(symmetric, SymmetricMemory=memory)
    return stack, unittest.mock.patch.object(prepared_hooks, "_READABLE", {"cpu"})


def tensor(n: int, call: int) -> Any:
    generator = torch.Generator().manual_seed(1000 * dist.get_rank() + call)
    return torch.randint(-9, 9, (n,), generator=generator).bfloat16()


def sums(direction: PreparedDirection) -> None:
    """Sums of several sizes, each of which needs other memory; they are whole numbers."""
    for n in (1000, 70_000, 300_000):
        for call in range(3):
            x = tensor(n, call)
            out, wanted = torch.full_like(x, torch.nan), x.clone()
            dist.all_reduce(wanted)
            direction.all_reduce(x, out)
            assert torch.equal(out, wanted), (n, call)


def directions(device: Any) -> list[Any]:
    """For each case: the route in the end, why it is that one, and what was logged."""
    found = []
    logger = logging.getLogger("tightwire")
    logger.setLevel(logging.INFO)
    for kind in (FileMemory, Naive):
        for case in CASES if kind is FileMemory else ["naive"]:
            folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
            dist.broadcast_object_list(folder)
            kind.case, kind.folder = case if kind is FileMemory else "works", str(folder[0])
            logged = Logged()
            logger.addHandler(logged)
            first, second = on_the_host(kind)
            start = time.monotonic()
            with first, second:
                direction = PreparedDirection("auto", None, native=False, codec="zipccl", trace=99)
                sums(direction)
            logger.removeHandler(logged)
            (calls,) = direction._calls.values()
            why = list(direction.why_no_peers.values())
            reasons = sorted({record.reason for record in direction.trace()})
            seconds = time.monotonic() - start
            lines = [line for line in logged.lines if "peers" in line]
            found.append([case, calls.route.name, why, reasons, lines, seconds])
            direction.close()
    return found


def handles(device: Any) -> list[str]:
    """What handles of hooks say, for tensors on the CPU and with memory that cannot be made."""
    found: list[str] = []
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    with ddp.register(model, route="auto", trace=9) as hook:
        for _ in range(3):
            model(torch.ones(2, 8)).sum().backward()
        found += hook.why_no_peers.values()
    for node in (None, 1):
        with moe.connect(4, route="auto", node=node) as parallel:
            found.append(parallel.why_no_peers)
    FileMemory.case = "on one rank"
    first, second = on_the_host(FileMemory)
    with first, second, moe.connect(4, route="auto") as parallel:
        found.append(parallel.why_no_peers)
        x = torch.randn(6, 4)
        sent = parallel.dispatch(x, moe.route(torch.randn(6, 4), 2, normalize=True))
        assert parallel.combine(sent.rows, sent).shape == x.shape
    with moe.connect(4, route="network") as parallel:
        found.append(parallel.why_no_peers)
    return found


def gpu_memory(device: Any) -> list[str]:
    """`SymmetricMemory` whose memory or rendezvous fails on one rank: all raise the same."""
    found = []
    rank, failing = dist.get_rank(), ["memory"]

    def empty(nbytes: int, **options: Any) -> Any:
        if failing[0] == "memory" and rank == 1:
            raise torch.OutOfMemoryError("out of memory")
        return torch.empty(nbytes, dtype=torch.uint8)

    def rendezvous(memory: Any, name: str) -> Any:
        if rank == 0:
            raise RuntimeError("cannot import")
        raise RuntimeError("timed out")

    for failing[0] in ("memory", "rendezvous"):
        with (
            unittest.mock.patch.object(symmetric, "why_not", return_value=""),
            unittest.mock.patch.object(_symmetric_memory, "empty", empty),
            unittest.mock.patch.object(_symmetric_memory, "rendezvous", rendezvous),
            unittest.mock.patch.object(torch.cuda, "current_stream"),
        ):
            memory = symmetric.SymmetricMemory(None, torch.device("cuda", 0))
            memory._device = CPU
            with pytest.raises(PeerMemoryError) as caught:
                memory.region(256)
        found.append(str(caught.value))
    # A rank that cannot say what its GPU is.
    with unittest.mock.patch.object(torch.cuda, "get_device_properties", side_effect=OSError("x")):
        found.append(symmetric.why_not(dist.group.WORLD, torch.device("cuda", 0)))
    return found


# The tests.


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
def test_auto_takes_the_network_and_says_why(world_size: int, tmp_path: Path) -> None:
    ranks = launch(__file__, "directions", world_size, tmp_path)
    others = {
        failing: [rank for rank in range(world_size) if rank != failing] for failing in range(2)
    }

    def of(failing: int) -> set[str]:
        texts = f"ranks {others[failing]}: no problem", f"ranks [{failing}]: {NO_HANDLE}"
        return {f"ranks differ: {'; '.join(order)}" for order in (texts, texts[::-1])}

    wanted = {
        "works": {""},
        "on one rank": of(1),
        "on all ranks": {NO_HANDLE},
        "later": of(0),
        "much later": of(1),
        "naive": of(1),
    }
    for cases in ranks:
        assert [row[0] for row in cases] == list(wanted)
        for case, route, why, reasons, lines, seconds in cases:
            assert seconds < 30, case
            if case == "works":
                assert (route, why, reasons, lines) == ("peer memory", [], [""], [])
                continue
            (text,) = why
            assert route == "network"
            assert text in wanted[case]
            # Before it was found out calls had no reason.
            assert set(reasons) - {""} == {text}
            (line,) = lines
            assert line.startswith("INFO tensor_parallel.connect: messages go over the network")
            assert line.endswith(text)
    assert all([row[1:4] for row in cases] == [row[1:4] for row in ranks[0]] for cases in ranks)


@pytest.mark.slow
def test_what_handles_say(tmp_path: Path) -> None:
    device = "tensors are on the device 'cpu'"
    for found in launch(__file__, "handles", 2, tmp_path):
        *before, failed, network = found
        assert before == [device, device, "node= is given"]
        assert f"ranks [1]: {NO_HANDLE}" in failed
        assert network == ""


def test_memory_of_gpus_fails_on_all_ranks(tmp_path: Path) -> None:
    ranks = launch(__file__, "gpu_memory", 2, tmp_path)
    assert ranks[0] == ranks[1]
    memory, rendezvous, unknown = ranks[0]
    assert "ranks [0]: no problem" in memory
    assert "ranks [1]: OutOfMemoryError: out of memory" in memory
    assert "ranks [0]: RuntimeError: cannot import" in rendezvous
    assert "ranks [1]: RuntimeError: timed out" in rendezvous
    assert unknown == "OSError: x"


if __name__ == "__main__":
    join(globals(), sys.argv[1:])
