"""Runs a function of a test file on every rank of a real process group."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

#: PyTorch asks for names of addresses, which can take seconds where no server knows them.
NO_NAMES = {"RES_OPTIONS": "attempts:0"}


def launch(
    script: str,
    task: str,
    world_size: int,
    folder: Path,
    device: str = "cpu",
    warnings: str = "error",
    seconds: float = 240,
) -> list[Any]:
    """What `task(device)` of the file `script`, which calls `join`, returns on every rank."""
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    # cuBLAS gives the same bits in every run only with a workspace of fixed size.
    settings = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    # A process that is aborted says where.
    settings["PYTHONFAULTHANDLER"] = "1"
    settings |= NO_NAMES
    outs = [folder / f"{rank}.json" for rank in range(world_size)]
    logs = [folder / f"{rank}.log" for rank in range(world_size)]
    processes = []
    try:
        for rank, (out, log) in enumerate(zip(outs, logs, strict=True)):
            words = [task, str(rank), str(world_size), str(folder / "store"), device, str(out)]
            with log.open("w") as stream:
                process = subprocess.Popen(
                    [sys.executable, "-W", warnings, script, *words],
                    env=os.environ | settings,
                    stdout=stream,
                    stderr=stream,
                )
            processes.append(process)
        deadline = time.monotonic() + seconds
        while any(process.poll() is None for process in processes):
            failed = any(process.poll() for process in processes)
            if failed or time.monotonic() > deadline:
                # The others may be about to fail, and say more of it.
                time.sleep(1)
                break
            time.sleep(0.05)
        codes = [process.poll() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    text = "\n".join(
        f"rank {r}, exit code {codes[r]}: {log.read_text()}" for r, log in enumerate(logs)
    )
    assert codes == [0] * world_size, text
    return [json.loads(out.read_text()) for out in outs]


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


def join(tasks: dict[str, Any], words: Sequence[str], backend: str | None = None) -> None:
    """What a launched process does: join the group, run the task, write what it returns."""
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
