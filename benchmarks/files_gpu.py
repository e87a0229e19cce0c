"""The part of bench_files.py that loads files to a GPU and saves tensors from it.

It needs PyTorch; without safetensors the others are measured alone. With the device "cpu" the same
calls run on the host, which shows that they work and measures nothing of interest.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import inspect
import multiprocessing
import os
import resource
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from file_timing import (
    CHUNK,
    INTO,
    MIB,
    RAW,
    SAFETENSORS,
    TIGHTWIRE,
    TORCH,
    Case,
    Contestant,
    Missing,
    fsync,
    require,
    shapes,
    small_shapes,
)

import tightwire as tw

SEED = 7
POISON = 0xA5
Tensors = dict[str, torch.Tensor]
Record = Callable[[Case, list[Contestant]], None]
#: Between looks at how much memory the process has.
SAMPLE_SECONDS = 0.004


def machine(device: str) -> dict[str, Any]:
    """The GPU and its driver, nothing if it is the host."""
    if torch.device(device).type != "cuda":
        return {}
    import bench_gpu

    found = bench_gpu.machine()
    return {name: found[name] for name in ("gpu", "driver")}


def syncing(device: str) -> Callable[[], Any]:
    """What waits for the device."""
    return torch.cuda.synchronize if torch.device(device).type == "cuda" else lambda: None


def gaussian(named: Iterable[tuple[str, tuple[int, int]]], device: str) -> Tensors:
    """Tensors of these names and shapes on `device`: bfloat16, N(0, 0.02)."""
    rng = torch.Generator(device).manual_seed(SEED)
    return {
        name: torch.randn(shape, device=device, generator=rng).mul_(0.02).bfloat16()
        for name, shape in named
    }


def nbytes_of(tensors: Mapping[str, torch.Tensor]) -> int:
    """Bytes of all tensors together."""
    return sum(x.nbytes for x in tensors.values())


def check_tensors(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    """Raise unless both hold the same tensors on the same device, bit for bit."""
    require(set(found) == set(wanted), "other names")
    for name, x in wanted.items():
        y = found[name]
        kinds = [(t.dtype, t.shape, t.device) for t in (x, y)]
        require(kinds[0] == kinds[1], f"{name}: another dtype, shape or device")
        require(torch.equal(y.view(torch.int16), x.view(torch.int16)), f"{name}: other values")


# Readers: path and device to tensors


def read_tightwire(path: Path, device: str) -> Tensors:
    return tw.load_file(path, like=torch.empty(0, device=device))


def read_safetensors(path: Path, device: str) -> Tensors:
    from safetensors.torch import load_file

    return load_file(path, device=device)


def read_torch(path: Path, device: str) -> Tensors:
    return torch.load(path, map_location=device, weights_only=True)


READERS = {
    TIGHTWIRE: read_tightwire,
    RAW: read_tightwire,
    SAFETENSORS: read_safetensors,
    TORCH: read_torch,
}
NEEDS = {SAFETENSORS: "safetensors.torch"}
#: What a contestant of loads is called, where that is not what it is called among saves.
LOADED = {TORCH: "torch.load"}


# Writers: tensors to a path


def save_tightwire(tensors: Tensors, path: Path) -> None:
    tw.save_file(tensors, path)


def save_raw(tensors: Tensors, path: Path) -> None:
    tw.save_file(tensors, path, codec="raw")


def save_safetensors(tensors: Tensors, path: Path) -> None:
    from safetensors.torch import save_file

    save_file(tensors, path)
    fsync(path)


def save_torch(tensors: Tensors, path: Path) -> None:
    torch.save(tensors, path)
    fsync(path)


WRITERS = {
    TIGHTWIRE: save_tightwire,
    RAW: save_raw,
    SAFETENSORS: save_safetensors,
    TORCH: save_torch,
}


def saved(folder: Path, name: str) -> Path:
    """The file that a contestant of this name writes."""
    return folder / f"saved {name}"


def saves(tensors: Tensors, folder: Path, device: str, names: Iterable[str]) -> list[Contestant]:
    """Contestants that write `tensors` to a synced file each."""

    def saver(name: str) -> Contestant:
        path = saved(folder, name)
        return Contestant(
            name,
            lambda _: WRITERS[name](tensors, path),
            lambda _: check_tensors(READERS[name](path, device), tensors),
            writes=path,
            needs=NEEDS.get(name, ""),
        )

    return [saver(name) for name in names]


def loads(tensors: Tensors, folder: Path, device: str, names: Iterable[str]) -> list[Contestant]:
    """Contestants that read what those of `saves` wrote."""

    def loader(name: str) -> Contestant:
        path = saved(folder, name)
        return Contestant(
            LOADED.get(name, name),
            lambda _: READERS[name](path, device),
            lambda found: check_tensors(found, tensors),
            reads=path,
            needs=NEEDS.get(name, ""),
        )

    return [loader(name) for name in names]


def load_into(tensors: Tensors, folder: Path) -> Contestant:
    """`load_file(out=)` into tensors that are there, filled with what no result looks like."""
    path = saved(folder, TIGHTWIRE)
    given: Tensors = {}

    def prepare() -> None:
        if "out" not in inspect.signature(tw.load_file).parameters:
            raise Missing("load_file has no out=")
        for name, x in tensors.items():
            y = given.setdefault(name, torch.empty_like(x))
            y.view(torch.uint8).fill_(POISON)

    def call(_: None) -> None:
        tw.load_file(path, out=given)

    return Contestant(INTO, call, lambda _: check_tensors(given, tensors), prepare, reads=path)


# What the file system allows


def on_host(tensors: Tensors) -> Any:
    """The bytes of all tensors, one behind the other, in host memory: uint8, shape (n,)."""
    data = torch.empty(nbytes_of(tensors), dtype=torch.uint8)
    at = 0
    for x in tensors.values():
        data[at : at + x.nbytes].copy_(x.reshape(-1).view(torch.uint8))
        at += x.nbytes
    return data.numpy()


def pwrites(tensors: Tensors, folder: Path) -> list[Contestant]:
    """Contestants that write as many bytes as `tensors`, or their packed file, have."""
    data = on_host(tensors)
    packed = saved(folder, TIGHTWIRE)

    def writer(what: str, threads: int, nbytes: Callable[[], int]) -> Contestant:
        path = folder / "written"

        def call(_: None) -> None:
            source = memoryview(data)[: nbytes()]
            with open(path, "wb", buffering=0) as file:

                def put(at: int) -> None:
                    end = min(at + CHUNK, len(source))
                    while at < end:
                        at += os.pwrite(file.fileno(), source[at:end], at)

                starts = range(0, len(source), CHUNK)
                if threads == 1:
                    for at in starts:
                        put(at)
                else:
                    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
                        list(pool.map(put, starts))
                os.fsync(file.fileno())

        def check(_: None) -> None:
            found = np.memmap(path, np.uint8, "r")
            require(len(found) == nbytes(), "the file has another size")
            for at in range(0, len(found), CHUNK):
                piece = found[at : at + CHUNK]
                require(np.array_equal(piece, data[at : at + len(piece)]), "other bytes")

        several = f"{threads} thread{'s' if threads > 1 else ''}"
        return Contestant(
            f"pwrite of {what} bytes, {several}", call, check, reads=packed, writes=path
        )

    return [
        writer(what, threads, nbytes)
        for what, nbytes in (
            ("the tensors'", lambda: len(data)),
            ("as many packed", lambda: min(packed.stat().st_size, len(data))),
        )
        for threads in (1, 4)
    ]


# Memory of the host


class _Peak:
    """The most memory that the process has, looked at again and again while the block runs.

    `resident` is all, `anonymous` without what is mapped from files and shared.
    """

    def __init__(self) -> None:
        self.resident = self.anonymous = 0
        self._known = most_resident()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._over.wait(SAMPLE_SECONDS):
            resident, anonymous = memory()
            self.resident = max(self.resident, resident)
            self.anonymous = max(self.anonymous, anonymous)

    def __enter__(self) -> _Peak:
        self.resident, self.anonymous = memory()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        # What was more than ever before was seen by the kernel, if not by the thread.
        if (most := most_resident()) > self._known:
            self.resident = max(self.resident, most)


def most_resident() -> int:
    """The most bytes that were ever resident."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def memory() -> tuple[int, int]:
    """Bytes that are resident, and those among them that are anonymous."""
    pages = [int(n) for n in Path("/proc/self/statm").read_text().split()[1:3]]
    size = os.sysconf("SC_PAGE_SIZE")
    return pages[0] * size, (pages[0] - pages[1]) * size


def first_load(name: str, folder: Path, small: Path, device: str) -> dict[str, Any]:
    """Seconds and host memory of a first load, after one of a small file; for a new process."""
    read = READERS[name]
    sync = syncing(device)
    read(small, device)
    sync()
    resident, anonymous = memory()
    with _Peak() as peak:
        start = time.perf_counter()
        found = read(saved(folder, name), device)
        sync()
        seconds = time.perf_counter() - start
    stats = getattr(torch.cuda, "host_memory_stats", None)
    known = stats is not None and torch.device(device).type == "cuda"
    pinned = stats().get("allocated_bytes.peak") if known else None
    check_tensors(found, read_torch(saved(folder, TORCH), device))
    return {
        "name": name,
        "first_s": seconds,
        "GB/s": nbytes_of(found) / seconds / 1e9,
        "resident_growth_nbytes": peak.resident - resident,
        "anonymous_growth_nbytes": peak.anonymous - anonymous,
        "result_nbytes": nbytes_of(found),
        "pinned_nbytes": pinned,
    }


def first_loads(
    tensors: Tensors, folder: Path, device: str, names: Iterable[str]
) -> list[dict[str, Any]]:
    """`first_load` of each contestant, in a process of its own."""
    first = dict(list(tensors.items())[1:3])
    rows = []
    for name in names:
        try:
            small = folder / f"small {name}"
            WRITERS[name](first, small)
            context = multiprocessing.get_context("spawn")
            with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as process:
                call = process.submit(first_load, name, folder, small, device)
                rows.append(call.result())
        except ModuleNotFoundError as error:
            rows.append({"name": name, "missing": str(error)})
        except Exception as error:
            rows.append({"name": name, "error": f"{type(error).__name__}: {error}"})
    return rows


def run(record: Record, folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """All cases of the GPU; rows of first loads."""
    device = options.device
    nbytes, count = (20 * MIB, 50) if options.quick else (int(options.mb * 1e6), 8000)
    needed = 5 * nbytes
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise SystemExit(f"{folder.parent} has {free} bytes free, {needed} are needed: --folder")
    if device == "cuda":
        device = f"cuda:{torch.cuda.current_device()}"
    tensors = gaussian(shapes(nbytes), device)
    total = nbytes_of(tensors)
    record(
        Case("save from the GPU", total, len(tensors), SAFETENSORS),
        saves(tensors, folder, device, WRITERS),
    )
    record(
        Case("load to the GPU", total, len(tensors), SAFETENSORS),
        [*loads(tensors, folder, device, READERS), load_into(tensors, folder)],
    )
    names = (TIGHTWIRE,) if options.quick else (TIGHTWIRE, SAFETENSORS)
    rows = first_loads(tensors, folder, device, names)
    writing = pwrites(tensors, folder)
    record(Case("the file system's limit", total, len(tensors), writing[0].name), writing)
    del writing, tensors
    for file in folder.iterdir():
        file.unlink()
    small = gaussian(small_shapes(count), device)
    names = (TIGHTWIRE, SAFETENSORS, TORCH)
    for what, contestants in (("save from", saves), ("load to", loads)):
        case = Case(f"{what} the GPU, small tensors", nbytes_of(small), len(small), SAFETENSORS)
        record(case, contestants(small, folder, device, names))
    return rows
