"""Runs a function of a test file on every rank of a real process group."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

#: PyTorch asks for names of addresses, which can take seconds where no server knows them.
NO_NAMES = {"RES_OPTIONS": "attempts:0"}
#: What wrappers of models import when they are used: seconds.
WRAPPERS = ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor")


class Forked:
    """A process that was forked from this one, used as one that `subprocess` started."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.code: int | None = None

    def poll(self) -> int | None:
        """Its exit code, below 0 for a signal, or None while it runs."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code

    def kill(self) -> None:
        """End it, and wait until it has ended."""
        if self.code is None:
            os.kill(self.pid, signal.SIGKILL)
            self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def watch(processes: Sequence[Any], seconds: float) -> list[int | None]:
    """Exit codes of processes once all have ended, one has failed, or time is up."""
    deadline = time.monotonic() + seconds
    while any(process.poll() is None for process in processes):
        failed = any(process.poll() for process in processes)
        if failed or time.monotonic() > deadline:
            # The others may be about to fail, and say more of it.
            time.sleep(1)
            break
        time.sleep(0.05)
    return [process.poll() for process in processes]


def launch(
    script: str,
    task: str,
    world_size: int,
    folder: Path,
    device: str = "cpu",
    warnings: str = "error",
    seconds: float = 240,
) -> list[Any]:
    """What `task(device)` of the file `script`, which calls `join`, returns on every rank.

    Ranks on the CPU are forked from a process that has imported all.
    """
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    # cuBLAS gives the same bits in every run only with a workspace of fixed size.
    settings = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    # A process that is aborted says where.
    settings["PYTHONFAULTHANDLER"] = "1"
    settings |= NO_NAMES
    words = [sys.executable, "-W", warnings, script, task]
    common = [str(world_size), str(folder / "store"), device]
    if device == "cpu":
        done = subprocess.run(
            [*words, "all", *common, str(folder), str(seconds)],
            env=os.environ | settings,
            capture_output=True,
            text=True,
            timeout=seconds + 60,
        )
        assert done.returncode == 0, done.stderr
        codes = json.loads((folder / "codes.json").read_text())
    else:
        started = []
        try:
            for rank in range(world_size):
                with log_of(folder, rank).open("w") as stream:
                    process = subprocess.Popen(
                        [*words, str(rank), *common, str(out_of(folder, rank))],
                        env=os.environ | settings,
                        stdout=stream,
                        stderr=stream,
                    )
                started.append(process)
            codes = watch(started, seconds)
        finally:
            for process in started:
                process.kill()
                process.wait()
    text = "\n".join(
        f"rank {rank}, exit code {code}: {log_of(folder, rank).read_text()}"
        for rank, code in enumerate(codes)
    )
    assert codes == [0] * world_size, text
    return [json.loads(out_of(folder, rank).read_text()) for rank in range(world_size)]


def out_of(folder: Path, rank: int) -> Path:
    """The file of what a rank returns."""
    return folder / f"{rank}.json"


def log_of(folder: Path, rank: int) -> Path:
    """The file of what a rank writes."""
    return folder / f"{rank}.log"


def torchrun(module: Any, world_size: int, folder: Path) -> list[tuple[float, float]]:
    """Launch the example in a module's docstring: all pairs of numbers that its ranks print."""
    lines = inspect.cleandoc(module.__doc__).splitlines()
    code = [line[4:] for line in lines if line.startswith("    ")]
    script = folder / "example.py"
    script.write_text("\n".join(code))
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
    # A file for each rank: in one, a rank may write between another's words.
    logs = folder / "logs"
    words += ["--log-dir", str(logs), "--redirects", "1"]
    done = subprocess.run(
        [sys.executable, *words, str(script)],
        env=os.environ | NO_NAMES | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    found: list[tuple[float, float]] = []
    for out in sorted(logs.rglob("stdout.log")):
        numbers = [float(word) for word in out.read_text().split()]
        found += zip(numbers[::2], numbers[1::2], strict=True)
    return found


def join(
    tasks: dict[str, Any],
    words: Sequence[str],
    backend: str | None = None,
    imports: Sequence[str] = (),
) -> None:
    """What a launched process does: join the group, run the task, write what it returns.

    One that stands for all ranks imports `imports`, which tasks would, and forks them.
    """
    if words[1] == "all":
        words = fork(words, imports)
    import torch
    import torch.distributed as dist

    task, rank, world_size, store, device, out = words
    run: Callable[[Any], Any] = tasks[task]
    torch.set_num_threads(1)
    # As use_deterministic_algorithms(True), which imports the compiler: seconds.
    torch.set_deterministic_debug_mode("error")
    where = torch.device(device, int(rank) if device == "cuda" else None)
    if where.type == "cuda":
        torch.cuda.set_device(where)
    dist.init_process_group(
        backend or ("nccl" if where.type == "cuda" else "gloo"),
        init_method=f"file://{store}",
        rank=int(rank),
        world_size=int(world_size),
        timeout=timedelta(seconds=60),
        device_id=where if where.type == "cuda" else None,
    )
    result = run(where)
    Path(out).write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def fork(words: Sequence[str], imports: Sequence[str]) -> list[str]:
    """Fork a process for each rank. Each returns with its words; this one ends with them."""
    task, _, world_size, store, device, place, seconds = words
    folder = Path(place)
    for name in ("numba", *imports):
        if importlib.util.find_spec(name) is not None:
            importlib.import_module(name)
    one_thread()
    processes: list[Forked] = []
    for rank in range(int(world_size)):
        log_of(folder, rank).touch()
        pid = os.fork()
        if not pid:
            log = os.open(log_of(folder, rank), os.O_WRONLY)
            os.dup2(log, 1)
            os.dup2(log, 2)
            mine = [task, str(rank), world_size, store, device, str(out_of(folder, rank))]
            sys.argv[1:] = mine
            return mine
        processes.append(Forked(pid))
    try:
        (folder / "codes.json").write_text(json.dumps(watch(processes, float(seconds))))
    finally:
        for process in processes:
            process.kill()
    os._exit(0)


def one_thread() -> None:
    """Wait until this process has one thread: those forked from it would lack the others."""
    # Threads that have been joined are still about to end.
    until = time.monotonic() + 10
    while (threads := len(os.listdir("/proc/self/task"))) > 1 and time.monotonic() < until:
        time.sleep(0.01)
    assert threads == 1, f"{threads} threads: forked processes would lack some"
