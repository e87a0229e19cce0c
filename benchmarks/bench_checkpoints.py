"""Checkpoints of torch.distributed.checkpoint: `tw.dcp` beside PyTorch's own writer and reader.

    torchrun --standalone --nproc-per-node 2 benchmarks/bench_checkpoints.py --out FILE

Each rank has a share of the rows of every tensor. Saves and loads take turns; each save is to a new
directory and its files are synced, and loads read them from the cache of the system. What was
loaded is compared. `memory` is what a rank took beyond its state, at most.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import tightwire as tw

PLAIN, DELTA = "torch.distributed.checkpoint", "deltas"
CODECS = ("zipccl", "huffman")
ROWS, COLUMNS = 4096, 4096


def made(count: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """A sharded state of bfloat16, N(0, 0.02), and it after a step that changed 1 % of it."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    states: tuple[dict[str, Any], dict[str, Any]] = {}, {}
    for i in range(count):
        generator = torch.Generator().manual_seed(i)
        x = torch.randn(ROWS, COLUMNS, generator=generator).mul_(0.02).bfloat16()
        changed = torch.rand(ROWS, COLUMNS, generator=generator) < 0.01
        later = (x.view(torch.int16) + changed.short()).view(torch.bfloat16)
        for state, value in zip(states, (x, later), strict=True):
            state[f"layer{i}"] = distribute_tensor(value, mesh, [Shard(0)])
    return states


def peak() -> int:
    """Most bytes that this process has had since `reset_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def reset_peak() -> None:
    """Forget what was the most."""
    Path("/proc/self/clear_refs").write_text("5")


def timed(call: Callable[[], object]) -> tuple[float, int]:
    """Seconds until all ranks have ended, and bytes that this one took."""
    dist.barrier()
    reset_peak()
    before, start = peak(), time.perf_counter()
    call()
    dist.barrier()
    return time.perf_counter() - start, peak() - before


def sync(folder: Path) -> None:
    """Write to the disk what was saved."""
    for path in folder.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())


def measured(folder: Path, state: Any, later: Any, rounds: int) -> dict[str, Any]:
    """Seconds, bytes and memory of saves and loads by name."""
    writers: dict[str, Callable[[Path], Any]] = {PLAIN: dcp.FileSystemWriter}
    readers: dict[str, Callable[[Path], Any]] = {PLAIN: dcp.FileSystemReader}
    for codec in CODECS:
        writers[codec] = lambda path, codec=codec: tw.dcp.Writer(path, codec)
        readers[codec] = tw.dcp.Reader
    writers[DELTA] = lambda path: tw.dcp.Writer(path, base=path.with_name("zipccl"))
    readers[DELTA] = tw.dcp.Reader
    rows: dict[str, Any] = {name: {"save": [], "load": [], "memory": []} for name in writers}
    for number in range(rounds + 1):
        for name, writer in writers.items():
            saved = later if name == DELTA else state
            path = folder / f"{number}" / name

            def save(saved: Any = saved, path: Path = path, writer: Any = writer) -> None:
                dcp.save(saved, storage_writer=writer(path))
                sync(path)

            target = {n: torch.zeros_like(x) for n, x in saved.items()}

            def load(target: Any = target, path: Path = path, name: str = name) -> None:
                dcp.load(target, storage_reader=readers[name](path))

            for what, call in (("save", save), ("load", load)):
                seconds, memory = timed(call)
                rows[name][what].append(seconds)
                rows[name]["memory"].append(memory)
            pairs = [(target[n].to_local(), x.to_local()) for n, x in saved.items()]
            assert all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in pairs)
            rows[name]["nbytes"] = sum(file.stat().st_size for file in path.iterdir())
            dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder / f"{number}")
    return {
        name: {
            "save": statistics.median(row["save"][1:]),
            "load": statistics.median(row["load"][1:]),
            "memory": max(row["memory"][2:]),
            "nbytes": row["nbytes"],
        }
        for name, row in rows.items()
    }


def main() -> None:
    """Measure all, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tensors", type=int, default=16, help="of 32 MiB each")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default="/dev/shm", help="where; default: in memory")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo")
    state, later = made(options.tensors)
    shared = [tempfile.mkdtemp(dir=options.folder) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(shared)
    folder = Path(str(shared[0]))
    try:
        rows = measured(folder, state, later, options.rounds)
        dist.barrier()
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(folder)
    if dist.get_rank() == 0:
        record = {
            "date": time.strftime("%Y-%m-%d"),
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            "torch": torch.__version__,
            "world": dist.get_world_size(),
            "folder": options.folder,
            "nbytes": sum(x.numel() * x.itemsize for x in state.values()),
            "largest": max(x.to_local().numel() * x.itemsize for x in state.values()),
            "rows": rows,
        }
        options.out.write_text(json.dumps(record, indent=1) + "\n")
        print(json.dumps(record, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
