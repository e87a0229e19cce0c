"""benchmarks/bench_moe.py: a tiny layer on two ranks of gloo."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from warm import NO_NAMES

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
    command += ["--only", "padded", "padded to the most", "exact, torch", "zipccl, mx"]
    path = os.pathsep.join([str(BENCHMARKS), *filter(None, sys.path)])
    subprocess.run(
        [sys.executable, *command],
        env=os.environ | NO_NAMES | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        check=True,
        timeout=240,
    )
    last = {row["key"]: row for row in map(json.loads, out.read_text().splitlines())}
    rows = {key: row for key, row in last.items() if key != "run"}
    padded, most, exact, coded = rows.values()
    assert list(rows)[-1] == "moe, zipccl, mx, 60 tokens, top 2, backward"
    sent = [row["wire_nbytes"] for row in (most, padded, exact, coded)]
    assert sent == sorted(sent, reverse=True)
    assert len(set(sent)) == 4
    assert sent[0] == 2 * (2 * 60) * 2 * 200
    for row in rows.values():
        assert row["calls"] == 2
        assert row["vnmse"] == 0
        assert min(row["ms"], row["padded_ms"], row["exact_ms"]) > 0
    assert padded["padded_ms"] == padded["ms"]


def test_wrong_results_have_no_times(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    bench = importlib.import_module("bench_moe")

    class Layer:
        x = torch.ones(4, 8, dtype=torch.bfloat16)

        def form(self, name: str) -> Any:
            return bench.Form(lambda x: x * 2, None)

        def wanted(self) -> Any:
            return self.x * 2

    assert bench.checked(Layer(), "mx", Layer().form("mx")) == {"wire_nbytes": 0, "vnmse": 0}
    for name, message in (("zipccl", "other bits"), ("taco", "the error is 0.25; allowed: 0.01")):
        with pytest.raises(RuntimeError, match=message):
            bench.checked(Layer(), name, bench.Form(lambda x: x * 3, None))
