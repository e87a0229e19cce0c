"""Runs on several ranks: cases measured one by one, and written as soon as they are; see rows."""

from __future__ import annotations

import datetime
import functools
import gc
import itertools
import json
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rows import PLACE, RUN, read

import tightwire as tw

#: Exit status of ranks that give up a case because it does not end.
STUCK = 70
#: Seconds that other ranks wait longer than rank 0 before they give a case up.
_GRACE = 5.0


def machine(device: torch.device) -> dict[str, Any]:
    """What the ranks run on, without the name of the host."""
    on_gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else platform.machine(),
        "cores": os.cpu_count(),
    }


def versions(device: torch.device) -> dict[str, str]:
    """Versions of what the results depend on."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    if device.type == "cuda":
        import triton

        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["triton"] = triton.__version__
    return found | {"tightwire": tw.__version__}


def link(device: torch.device) -> str:
    """How bytes get from rank to rank, as the environment of NCCL says; see bench_collectives."""
    if device.type != "cuda":
        return "gloo"
    off = [os.environ.get(f"NCCL_{name}_DISABLE", "0") == "1" for name in ("P2P", "SHM")]
    if all(off):
        return "sockets"
    if off[0]:
        return "p2p off"
    pairs = itertools.permutations(range(torch.cuda.device_count()), 2)
    peers = all(torch.cuda.can_device_access_peer(*pair) for pair in pairs)
    return "nvlink" if peers else "no peer access"


def facts(device: torch.device, world: int) -> dict[str, Any]:
    """What every row of a run has."""
    return {
        "link": link(device),
        "world": world,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": machine(device),
        "versions": versions(device),
    }


def connect() -> torch.device:
    """Join the ranks of torchrun, over NCCL where there are GPUs, else over gloo.

    Returns:
        This rank's device.
    """
    on_gpu = torch.cuda.is_available()
    device = torch.device("cpu")
    if on_gpu:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        timeout=datetime.timedelta(minutes=5),
        device_id=device if on_gpu else None,
    )
    return device


class Record:
    """The file of a run; rank 0 writes it.

    Args:
        path: The file. What it has stays.
        common: What every row gets; see ``facts``.
        writes: Whether this rank writes.
    """

    def __init__(self, path: Path, common: dict[str, Any], writes: bool) -> None:
        self.path, self.common, self._writes = path, common, writes

    def rows(self) -> dict[str, dict[str, Any]]:
        """The rows of this network and number of ranks, by key."""
        place = [self.common[name] for name in PLACE]
        return {r["key"]: r for r in read(self.path) if [r[name] for name in PLACE] == place}

    def add(self, key: str, **row: Any) -> None:
        """Write a row.

        Args:
            key: Its key.
            **row: Results; ``error=``, ``skipped=``; or ``began=True`` before a case.
        """
        if not self._writes:
            return
        text = json.dumps({"key": key} | row | {"time": round(time.time(), 1)} | self.common)
        # A run that was cut off may have left half a line.
        old = self.path.read_bytes() if self.path.exists() else b""
        with self.path.open("a") as stream:
            stream.write("\n" * (old[-1:] not in (b"", b"\n")) + text + "\n")
            stream.flush()
            os.fsync(stream.fileno())

    def start(
        self, wanted: Sequence[str], again: bool, about: Mapping[str, Any]
    ) -> tuple[list[str], float]:
        """What is to be measured, and when the run began; rank 0 calls it before all else.

        A run that torchrun has restarted goes on behind the case that ended it.

        Args:
            wanted: Keys.
            again: Whether to measure what has results from an earlier run, too.
            about: What the row of the run says.
        """
        rows, began = self.rows(), time.time()
        restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
        if restarted:
            began = rows[RUN]["time"]
        else:
            self.add(RUN, **about)
        for key, row in rows.items():
            if restarted and row.get("began"):
                self.add(key, error="a process ended, or hung, while this was measured")

        def ended(key: str) -> bool:
            row = rows.get(key)
            if row is None or (row.get("began") and not restarted):
                return False
            has_results = not {"skipped", "error"} & row.keys()
            return bool(row["time"] >= began) or (has_results and not again)

        return [key for key in wanted if not ended(key)], began


class ProblemError(RuntimeError):
    """Something went wrong on a rank; the text is the same on all ranks."""


class Ranks:
    """Agreement between the ranks of a run, whatever happens on their GPUs.

    Args:
        rank: Number of this rank.
        world: Number of ranks.
        device: This rank's device.
        exchange: Gives a small object to all ranks, and returns those of all.
        align: Has ranks that have met go on at the same time, as far as that is possible.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        device: torch.device,
        exchange: Callable[[Any], list[Any]],
        align: Callable[[], None] = lambda: None,
    ) -> None:
        self.rank, self.world, self.device = rank, world, device
        self._exchange, self._align = exchange, align

    @classmethod
    def processes(cls, device: torch.device, timeout: float) -> Ranks:
        """The ranks of the default process group, which agree over gloo.

        Args:
            device: This rank's device.
            timeout: Seconds that ranks wait for one another.
        """
        limit = datetime.timedelta(seconds=timeout)
        group = dist.new_group(backend="gloo", timeout=limit)
        world = dist.get_world_size()

        def exchange(value: Any) -> list[Any]:
            found: list[Any] = [None] * world
            dist.all_gather_object(found, value, group=group)
            return found

        def align() -> None:
            # gloo lets ranks go some 100 us apart, which is long for a call of a GPU.
            if device.type == "cuda":
                dist.barrier(device_ids=[device.index])
                torch.cuda.synchronize(device)

        return cls(dist.get_rank(), world, device, exchange, align)

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, which are to be small.

        Raises:
            ProblemError: If a rank has a problem, and thus is elsewhere.
        """
        return self._gather("", value)

    def _gather(self, problem: str, value: Any) -> list[Any]:
        found = self._exchange((problem, value))
        problems = [text for text, _ in found if text]
        if problems:
            raise ProblemError("; ".join(problems))
        return [value for _, value in found]

    def first(self, value: Any) -> Any:
        """The value of rank 0."""
        return self.gather(value)[0]

    def slowest(self, values: Sequence[float]) -> list[float]:
        """The largest of all ranks' numbers, one by one."""
        return [max(some) for some in zip(*self.gather(list(values)), strict=True)]

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def meet(self) -> None:
        """Wait until the devices of all ranks are idle."""
        self.synchronize()
        self.gather(None)
        self._align()

    def attempt(self, call: Callable[[], Any]) -> tuple[Any, str]:
        """What `call()` returns, and what went wrong with it on any rank, the same text on all.

        Where a rank has failed the others notice when they next gather something. If they do not
        come to that, because they wait for that rank, nobody goes on; see ``limited``.
        """
        result, problem = None, ""
        try:
            result = call()
            self.synchronize()
        except ProblemError as error:
            return None, str(error)
        except Exception as error:
            problem = f"rank {self.rank}: {type(error).__name__}: {str(error)[:500]}"
        try:
            self._gather(problem, None)
        except ProblemError as error:
            return None, str(error)
        return result, ""


def limited(seconds: float, note: Callable[[], None]) -> threading.Timer:
    """Have the process end when a case has not ended after so many `seconds`; cancel it if it has.

    torchrun then ends the other ranks, and with --max-restarts starts all of them again.

    Args:
        seconds: Seconds from now.
        note: Called before.
    """

    def give_up() -> None:
        note()
        sys.stdout.flush()
        os._exit(STUCK)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    return timer


class Job(NamedTuple):
    """A case: what measures it on all ranks, or why it is skipped."""

    measure: Callable[[], dict[str, Any]]
    skip: str = ""


class Limits(NamedTuple):
    """Seconds of all cases and of one, and whether to measure what the record has."""

    seconds: float
    case: float
    again: bool


def measure_all(
    ranks: Ranks,
    record: Record,
    jobs: Mapping[str, Job],
    limits: Limits,
    line: Callable[[dict[str, Any]], str],
    about: Mapping[str, Any],
) -> None:
    """Measure cases and write them, one by one.

    A case that fails is an error in the record. One that is not expected to end in time, as the
    longest one before would not, is skipped.

    Args:
        ranks: The ranks, which all call this with the same cases.
        record: Where rank 0 writes.
        jobs: Cases by key.
        limits: Of time.
        line: What to print of results.
        about: What the row of the run says.

    Raises:
        RuntimeError: If a device does not work any more.
    """
    start_run = functools.partial(record.start, list(jobs), limits.again, about)
    pending, began = ranks.first(start_run() if ranks.rank == 0 else None)
    longest = 0.0
    for key in pending:
        job, start = jobs[key], time.time()
        in_time = ranks.first(start + longest < began + limits.seconds)
        if job.skip or not in_time:
            record.add(key, skipped=job.skip or "no time was left")
            continue
        stuck = functools.partial(record.add, key, error=f"no end after {limits.case:g} s")
        # Rank 0 is to write before another ends, and torchrun all of them.
        timer = limited(limits.case + (_GRACE if ranks.rank else 0), stuck)
        record.add(key, began=True)
        row, problem = ranks.attempt(job.measure)
        record.add(key, **(row if row is not None else {"error": problem}))
        if not ranks.rank:
            print(f"{key}: {problem or line(row)}", flush=True)
        timer.cancel()
        gc.collect()
        # A device that has failed says so here.
        ranks.meet()
        longest = max(longest, time.time() - start)
