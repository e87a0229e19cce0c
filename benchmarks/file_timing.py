"""Contestants that read and write files, timed in turns; bench_files.py and files_gpu.py use it.

No speed is reported of a run whose result was not checked: one wrong result, and the contestant has
none at all.
"""

from __future__ import annotations

import dataclasses
import errno
import gc
import importlib
import importlib.metadata
import math
import os
import platform
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

MIB = 1 << 20
#: Names of contestants that the report looks for.
TIGHTWIRE, SAFETENSORS, TORCH, ZIPNN = "tightwire", "safetensors", "torch.save", "ZipNN"
TO_NUMPY, TO_TORCH = "tightwire, like=numpy", "tightwire, like=torch"
RAW, INTO = "tightwire, plain bytes (codec raw)", "tightwire, out="
ZSTD, COPY, IN_MEMORY = "zstd -1 -T2, fsync", "cp, fsync", "tightwire, in memory, no file"
CHUNK = 16 * MIB
PAGE = 4096
PACKAGES = ("numpy", "numba", "torch", "triton", "safetensors", "zstandard", "zipnn")


class Missing(Exception):
    """A contestant cannot take part; says why."""


def _nothing() -> None:
    return None


@dataclasses.dataclass(frozen=True)
class Contestant:
    """Something timed: `call` takes what `prepare` gives, `check` its result, outside the clock.

    `reads` is its input, `writes` its output, files or directories; the output is removed before
    each run, and its size is recorded. `needs` is a module that must be there.
    """

    name: str
    call: Callable[[Any], Any]
    check: Callable[[Any], None]
    prepare: Callable[[], Any] = _nothing
    reads: Path | None = None
    writes: Path | None = None
    needs: str = ""


@dataclasses.dataclass(frozen=True)
class Case:
    """What is timed: a name, the bytes of its tensors, and whom the others are compared with."""

    name: str
    nbytes: int
    tensors: int
    baseline: str
    cold: bool = False


@dataclasses.dataclass(frozen=True)
class Timer:
    """How often, and until when, `sync` waits for the device.

    Past `deadline` (of time.monotonic) a case ends after two rounds, the fewest that it has.
    """

    rounds: int
    deadline: float = math.inf
    sync: Callable[[], Any] = _nothing

    def contest(self, case: Case, contestants: Sequence[Contestant]) -> dict[str, Any]:
        """A record of the case: a row for each contestant, all timed once in each round."""
        rows: dict[str, dict[str, Any]] = {c.name: {"name": c.name} for c in contestants}
        times: dict[str, list[float]] = {c.name: [] for c in contestants}
        for number in range(self.rounds):
            if number >= 2 and time.monotonic() > self.deadline:
                break
            for c in contestants:
                row = rows[c.name]
                if "missing" in row or "error" in row:
                    continue
                try:
                    times[c.name].append(self._time(c, case.cold))
                    if c.writes is not None:
                        row["file_nbytes"] = size(c.writes)
                except (Missing, ModuleNotFoundError) as error:
                    row["missing"] = str(error)
                except Exception as error:
                    row["error"] = f"{type(error).__name__}: {error}"
        for name, row in rows.items():
            if "missing" not in row and "error" not in row:
                row |= summary(times[name], case.nbytes)
        compare(list(rows.values()), case.baseline)
        return dataclasses.asdict(case) | {"rows": list(rows.values())}

    def _time(self, c: Contestant, cold: bool) -> float:
        if c.needs:
            importlib.import_module(c.needs)
        if c.reads is not None and not c.reads.exists():
            raise Missing("its input was not written")
        if c.writes is not None:
            remove(c.writes)
        given = c.prepare()
        if cold and c.reads is not None:
            drop_cache(c.reads)
        gc.collect()
        self.sync()
        start = time.perf_counter()
        result = c.call(given)
        self.sync()
        seconds = time.perf_counter() - start
        c.check(result)
        return seconds


def summary(times: Sequence[float], nbytes: int) -> dict[str, Any]:
    """Seconds of the first run; best and median of the others, and their GB/s of tensor bytes."""
    others = times[1:] or times
    best, median = min(others), statistics.median(others)
    return {
        "first_s": times[0],
        "best_s": best,
        "median_s": median,
        "runs": len(others),
        "GB/s": nbytes / best / 1e9,
        "median_GB/s": nbytes / median / 1e9,
    }


def compare(rows: Sequence[dict[str, Any]], baseline: str) -> None:
    """Give each row its speed over the baseline's, the best of both."""
    of = {row["name"]: row["GB/s"] for row in rows if "GB/s" in row}
    for row in rows:
        if "GB/s" in row and baseline in of:
            row["of_baseline"] = row["GB/s"] / of[baseline]


# Files


def files_of(path: Path) -> list[Path]:
    """The file itself, or all files of a directory, in order."""
    return sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]


def size(path: Path) -> int:
    """Bytes of a file or of all files of a directory."""
    return sum(p.stat().st_size for p in files_of(path))


def remove(path: Path) -> None:
    """Remove a file or directory, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def fsync(path: Path) -> None:
    """Bring a file, or the files of a directory, to the disk."""
    for file in files_of(path):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def drop_cache(path: Path) -> None:
    """Drop files from the page cache. Missing where the file system keeps them, as tmpfs does."""
    fsync(path)
    for file in files_of(path):
        with open(file, "rb", buffering=0) as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            middle = file.stat().st_size // 2
            try:
                os.preadv(opened.fileno(), [bytearray(1)], middle, os.RWF_NOWAIT)
            except BlockingIOError:
                continue
            except OSError as error:
                if error.errno != errno.EOPNOTSUPP:
                    raise
            if middle:
                raise Missing("the file cannot be dropped from the page cache here")


def file_system(folder: Path) -> str:
    """Type of the file system of a folder."""
    done = subprocess.run(
        ["stat", "-f", "-c", "%T", str(folder)], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


# Checks


def require(fine: bool, what: str) -> None:
    """Raise unless `fine`; unlike an assertion, always."""
    if not fine:
        raise RuntimeError(what)


def same_bytes(a: BinaryIO, b: BinaryIO) -> bool:
    """True if both give the same bytes to their ends."""
    while True:
        x, y = a.read(CHUNK), b.read(CHUNK)
        if x != y:
            return False
        if not x:
            return True


def check_files(found: Path, wanted: Path) -> None:
    """Raise unless both have the same files (names in a directory count) of the same bytes."""
    pairs = [files_of(found), files_of(wanted)]
    if wanted.is_dir():
        names = [
            [p.relative_to(top) for p in files]
            for top, files in zip((found, wanted), pairs, strict=True)
        ]
        require(names[0] == names[1], f"{found.name} has other files than {wanted.name}")
    for a, b in zip(*pairs, strict=True):
        with open(a, "rb") as first, open(b, "rb") as second:
            require(same_bytes(first, second), f"{a.name} differs from {b.name}")


def check_arrays(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raise unless both hold the same NumPy arrays, bit for bit."""
    require(set(found) == set(wanted), "other names")
    for name, x in wanted.items():
        y = found[name]
        require((y.dtype, y.shape) == (x.dtype, x.shape), f"{name}: another dtype or shape")
        same = np.array_equal(as_bytes(y), as_bytes(x))
        require(same, f"{name}: other values")


def as_bytes(x: Any) -> Any:
    """The bytes of a contiguous NumPy array, shape (n,), without a copy."""
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8)


# Data


def shapes(nbytes: int, layers: int = 10) -> Iterator[tuple[str, tuple[int, int]]]:
    """Names and shapes of 7 matrices in each layer of a transformer, of about `nbytes` bytes.

    Two bytes per element; grouped-query attention of a quarter of the heads, an MLP 3.5 times
    as wide as the model.
    """
    width = max(4, 4 * round(math.sqrt(nbytes / layers / 26) / 4))
    kinds = {"q": (4, 4), "k": (1, 4), "v": (1, 4), "o": (4, 4)}
    kinds |= {"up": (14, 4), "gate": (14, 4), "down": (4, 14)}
    for layer in range(layers):
        for kind, (rows, columns) in kinds.items():
            shape = (width * rows // 4, width * columns // 4)
            yield f"layers.{layer}.{kind}.weight", shape


def small_shapes(count: int) -> Iterator[tuple[str, tuple[int, int]]]:
    """Names and shapes of tensors of 100 KiB, two bytes per element."""
    for number in range(count):
        yield f"experts.{number}.weight", (200, 256)


# Where it ran


def machine() -> dict[str, Any]:
    """What a reader needs to judge the figures, and nothing that names this host."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
    }


def versions() -> dict[str, str | None]:
    """Versions of what takes part, None for what is not there."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def table(case: Mapping[str, Any]) -> list[str]:
    """The case as text, a line per contestant."""
    cache = ", cold" if case["cold"] else ""
    lines = [
        f"{case['name']}{cache}: {case['nbytes'] / 1e6:.1f} MB, {case['tensors']} tensors; "
        f"ratio: to {case['baseline']}",
        f"  {'':44}{'GB/s':>8}{'median':>8}{'best s':>10}{'first s':>10}{'ratio':>8}{'MB':>10}",
    ]
    for row in case["rows"]:
        if "GB/s" not in row:
            told = f"error: {row['error']}" if "error" in row else f"missing: {row['missing']}"
            lines.append(f"  {row['name']:44} {told}")
            continue
        over = f"{row['of_baseline']:.2f}" if "of_baseline" in row else ""
        file = f"{row['file_nbytes'] / 1e6:.1f}" if "file_nbytes" in row else ""
        lines.append(
            f"  {row['name']:44}{row['GB/s']:8.2f}{row['median_GB/s']:8.2f}"
            f"{row['best_s']:10.4f}{row['first_s']:10.4f}{over:>8}{file:>10}"
        )
    return lines
