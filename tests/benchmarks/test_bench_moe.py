"""benchmarks/bench_moe.py: a tiny layer on two ranks of gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from processes import NO_NAMES

pytest.importorskip("torch")
pytest.importorskip("numba")

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.mark.long
def test_a_tiny_layer(tmp_path: Path) -> None:
    out = tmp_path / "moe.jsonl"
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(BENCHMARKS / "bench_moe.py"), "--out", str(out), "--backward"]
    sizes = {"experts": 4, "hidden": 200, "tokens": 60, "calls": 2, "seconds": 60}
    command += [f"--{name}={value}" for name, value in sizes.items()]
    command += ["--only", "padded", "exact, torch", "zipccl, mx"]
    path = os.pathsep.join([str(BENCHMARKS), *filter(None, sys.path)])
    subprocess.run(
        [sys.executable, *command],
        env=os.environ | NO_NAMES | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        check=True,
        timeout=240,
    )
    rows = {row["key"]: row for row in map(json.loads, out.read_text().splitlines())}
    padded, exact, coded = rows.values()
    assert list(rows)[-1] == "moe, zipccl, mx, backward"
    assert padded["wire_nbytes"] > exact["wire_nbytes"] > coded["wire_nbytes"] > 0
    assert all(row["calls"] == 2 and row["ms"] > 0 and row["vnmse"] == 0 for row in rows.values())
