"""benchmarks/bench_transfer.py and its page: a few small tensors on two ranks of gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("numba")

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
PAGE = "import sys, pathlib, transfer_report; transfer_report.write(pathlib.Path(sys.argv[1]))"


@pytest.mark.long
def test_small_tensors(tmp_path: Path) -> None:
    out = tmp_path / "transfer.jsonl"
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(BENCHMARKS / "bench_transfer.py"), "--out", str(out)]
    command += ["--layers=1", "--width=200", "--rounds=2"]
    path = os.pathsep.join([str(BENCHMARKS), *filter(None, sys.path)])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    subprocess.run([sys.executable, *command], env=environment, check=True, timeout=240)
    rows = {row["key"]: row for row in map(json.loads, out.read_text().splitlines())}
    share = {key.removeprefix("transfer, "): r["sent"] / r["nbytes"] for key, r in rows.items()}
    assert share["broadcast"] == 1
    assert share["nothing"] == 0
    assert 0.001 < share["1 %"] < share["10 %"] < share["everything"] < 0.8
    assert all(row["rounds"] == 2 and row["ms"] >= row["pause_ms"] >= 0 for row in rows.values())
    subprocess.run([sys.executable, "-c", PAGE, str(tmp_path)], env=environment, check=True)
    page = (tmp_path / "transfer.md").read_text()
    assert page.count("| everything |") == 1
