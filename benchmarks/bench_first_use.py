"""Seconds of a first use: a fresh process for each codec and dtype, with an empty cache of kernels.

    python benchmarks/bench_first_use.py

writes results/first_use.json and results/first_use.md. A first call compiles kernels; the second is
that of a steady state, of the best of many, with one thread. CPU seconds are those of the process,
user and system: they depend less on what else runs.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = Path(__file__).parent / "results"
NELEM = 1 << 20
STEADY_S = 1.0
CASES = (
    ("zipccl", "bfloat16"),
    ("zipccl", "float32"),
    ("zipccl", "float16"),
    ("zipccl", "float64"),
    ("zipccl", "float8_e4m3fn"),
    ("mx", "bfloat16"),
    ("mx", "float32"),
    ("nvfp4", "bfloat16"),
    ("nvfp4", "float32"),
    ("taco", "bfloat16"),
    ("taco", "float32"),
    ("sdp4bit", "bfloat16"),
    ("tahquant", "bfloat16"),
    ("dynamiq", "bfloat16"),
    ("thc", "bfloat16"),
    ("huffman", "bfloat16"),
    ("huffman", "float32"),
    ("raw", "bfloat16"),
)


def cpu_seconds() -> float:
    """User and system time of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def first(call: Callable[[], Any]) -> dict[str, float]:
    """Seconds of one call, on the wall and of the processor."""
    wall, cpu = time.perf_counter(), cpu_seconds()
    call()
    return {"wall_s": time.perf_counter() - wall, "cpu_s": cpu_seconds() - cpu}


def best(call: Callable[[], Any]) -> float:
    """Least seconds of calls for a while."""
    found, end = float("inf"), time.perf_counter() + STEADY_S
    while time.perf_counter() < end:
        start = time.perf_counter()
        call()
        found = min(found, time.perf_counter() - start)
    return found


def measure(name: str, dtype: str) -> dict[str, Any]:
    """One case, in this process."""
    import ml_dtypes

    import tightwire as tw

    codec = tw.codec(name, **({"hidden": 4096} if name == "tahquant" else {}))
    values = np.random.default_rng(0).standard_normal(NELEM, dtype=np.float32)
    x = (values * np.float32(0.02)).astype(getattr(ml_dtypes, dtype, dtype))
    key = tw.Key(0)
    found: dict[str, Any] = {"codec": name, "dtype": dtype}
    made: list[Any] = []
    found["encode"] = first(lambda: made.append(codec.encode(x, key=key, threads=1)))
    buf = made[0]
    packed, y = bytes(buf), np.empty_like(x)
    found["decode"] = first(lambda: tw.decode(packed, threads=1))
    found["sum_wall_s"] = found["encode"]["wall_s"] + found["decode"]["wall_s"]
    found["sum_cpu_s"] = found["encode"]["cpu_s"] + found["decode"]["cpu_s"]
    steady = best(lambda: codec.encode(x, key=key, out=buf, threads=1))
    found["encode"]["steady_gbps"] = x.nbytes / steady / 1e9
    steady = best(lambda: tw.decode(buf, out=y, threads=1))
    found["decode"]["steady_gbps"] = x.nbytes / steady / 1e9
    return found


def in_fresh_process(name: str, dtype: str) -> dict[str, Any]:
    """One case, with an empty cache."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"NUMBA_CACHE_DIR": folder}
        command = [sys.executable, __file__, name, dtype]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def processor() -> str:
    """Model name of the processor, where /proc says it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((x.partition(": ")[2] for x in lines if x.startswith("model name")), "unknown")


def table(found: dict[str, Any]) -> str:
    """The page of the results."""
    head = f"""# First use

Seconds of the first encode and of the first decode of {NELEM} elements in a fresh process with an
empty cache of kernels, and GB/s of later calls (best of {STEADY_S:.0f} s, one thread).
CPU seconds are user and system time of the process. Later processes load kernels from the cache.

{found["machine"]}, {found["cores"]} cores, load {found["load"]}, {found["date"]}, \
Python {found["python"]}, Numba {found["numba"]}, llvmlite {found["llvmlite"]}.

| codec | dtype | encode s | decode s | sum s | sum CPU s | encode GB/s | decode GB/s |
|---|---|---|---|---|---|---|---|
"""
    rows = [
        f"| {r['codec']} | {r['dtype']} | {r['encode']['wall_s']:.1f} | {r['decode']['wall_s']:.1f}"
        f" | {r['sum_wall_s']:.1f} | {r['sum_cpu_s']:.1f} | {r['encode']['steady_gbps']:.2f}"
        f" | {r['decode']['steady_gbps']:.2f} |"
        for r in found["rows"]
    ]
    return head + "\n".join(rows) + "\n"


def main() -> None:
    """Without arguments all cases, with CODEC DTYPE one, printed."""
    if sys.argv[1:]:
        print(json.dumps(measure(*sys.argv[1:])))
        return
    found: dict[str, Any] = {
        "machine": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load": f"{os.getloadavg()[0]:.1f}",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "python": platform.python_version(),
        "numba": version("numba"),
        "llvmlite": version("llvmlite"),
        "rows": [],
    }
    for case in CASES:
        found["rows"].append(in_fresh_process(*case))
        print(json.dumps(found["rows"][-1]), flush=True)
    (RESULTS / "first_use.json").write_text(json.dumps(found, indent=1) + "\n")
    (RESULTS / "first_use.md").write_text(table(found))


if __name__ == "__main__":
    main()
