"""Runs a function of a test file on every rank of a real process group."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import warm
from warm import NO_NAMES, Forked, one_thread, watch


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

    Ranks on the CPU are forked from a process that has imported all: see warm.py.
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
        done = warm.run(
            script,
            [task, "all", *common, str(folder), str(seconds)],
            env=settings,
            action=warnings,
            seconds=seconds + 60,
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


def run_example(module: Any, world_size: int, folder: Path) -> list[tuple[float, float]]:
    """Run the example in a module's docstring: all pairs of numbers that its ranks print."""
    lines = inspect.cleandoc(module.__doc__).splitlines()
    code = [line[4:] for line in lines if line.startswith("    ")]
    script = folder / "example.py"
    script.write_text("\n".join(code))
    done = warm.run(script, ranks=world_size)
    assert done.returncode == 0, done.stderr
    numbers = [float(word) for word in done.stdout.split()]
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def join(
    tasks: dict[str, Any],
    words: Sequence[str],
    backend: str | None = None,
) -> None:
    """What a launched process does: join the group, run the task, write what it returns.

    One that stands for all ranks forks them.
    """
    if words[1] == "all":
        words = fork(words)
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


def fork(words: Sequence[str]) -> list[str]:
    """Fork a process for each rank. Each returns with its words; this one ends with them."""
    task, _, world_size, store, device, place, seconds = words
    folder = Path(place)
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
