"""Which facts of the machine and the commit go into the recorded JSON."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from typing import Any

import tightwire


def pytest_benchmark_update_machine_info(config: Any, machine_info: dict[str, Any]) -> None:
    """Keep what a reader needs to judge the figures, and nothing that names this host."""
    cpu = machine_info.get("cpu", {})
    kept = {
        "cpu": cpu.get("brand_raw", ""),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "system": platform.system(),
        "tightwire": tightwire.__version__,
    }
    for name in ("numpy", "numba", "zipnn", "zstandard"):
        try:
            kept[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            kept[name] = None
    machine_info.clear()
    machine_info.update(kept)


def pytest_benchmark_update_commit_info(config: Any, commit_info: dict[str, Any]) -> None:
    """Branch names and authors are of no use in a record."""
    kept = {k: commit_info[k] for k in ("id", "time", "dirty") if k in commit_info}
    commit_info.clear()
    commit_info.update(kept)


def pytest_benchmark_update_json(config: Any, benchmarks: Any, output_json: dict[str, Any]) -> None:
    """Keep the statistics, not every single round."""
    for benchmark in output_json["benchmarks"]:
        benchmark["stats"].pop("data", None)
