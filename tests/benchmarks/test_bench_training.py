"""benchmarks/bench_training.py: a tiny model on two ranks of gloo, what fails, and the page."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from warm import NO_NAMES

pytest.importorskip("torch")
pytest.importorskip("numba")

pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
TINY = (
    "--layers 1 --width 64 --heads 4 --vocabulary 256 --tokens 16 --batch 1 --steps 2 --warm 4 "
    "--limit 90"
)
CASES = [
    "fsdp, native",
    "fsdp, zipccl, network",
    "fsdp, zipccl, peers",
    "ddp, native",
    "ddp, zipccl, network",
    "ddp, mx, network",
    "tp, native",
    "tp, zipccl",
    "moe, native",
    "moe, zipccl",
    "loss, native",
    "loss, dynamiq, ring",
]
#: The program with two more cases: a hook that fails, and one that takes its process along.
BROKEN = """
import os, sys
import bench_training
from bench_training import Case, main
from training_models import replicated

def fail(model):
    raise ValueError("no hook")

def vanish(model):
    os._exit(3)

# As a process that torchrun has started again, which goes on with the run.
os.environ["TORCHELASTIC_RESTART_COUNT"] = os.environ["RESTARTS"]
bench_training.CASES[1:1] = [
    Case("fsdp", "failing", "fail(model)", replicated(fail)),
    Case("fsdp", "vanishing", "vanish(model)", replicated(vanish)),
]
main(sys.argv[1:])
"""


def torchrun(script: Path, words: Sequence[str], restarts: int = 0, fails: bool = False) -> str:
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(script), *words]
    path = os.pathsep.join([str(BENCHMARKS), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, *command],
        env=os.environ
        | NO_NAMES
        | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "RESTARTS": str(restarts)},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert (done.returncode != 0) == fails, done.stdout + done.stderr
    return done.stdout


def rows(path: Path) -> dict[str, dict[str, Any]]:
    """The last row of each key."""
    return {row["key"]: row for row in map(json.loads, path.read_text().splitlines())}


def page(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    report = importlib.import_module("training_report")
    assert report.write_pages(folder) == ["training_steps"]
    return (folder / "training_steps.md").read_text()


def test_steps_are_recorded_and_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    record = tmp_path / "training.jsonl"
    only = ["fsdp,native", "ddp,native", "tp,native", "ddp,mx,network", "tp,zipccl"]
    only += ["moe,native", "moe,zipccl", "loss,native", "loss,dynamiq,ring"]
    only += ["fsdp,zipccl,peers", "fsdp,zipccl,network", "ddp,zipccl,network"]
    words = ["--out", str(record), *TINY.split(), "--loss-steps", "10", "--only", *only]
    torchrun(BENCHMARKS / "bench_training.py", words)
    found = rows(record)
    assert sorted(found) == sorted([*CASES, "run"])
    assert found["fsdp, zipccl, peers"]["skipped"] == "peer memory needs GPUs"
    for key, row in found.items():
        if key in ("run", "fsdp, zipccl, peers"):
            continue
        assert "error" not in row, row
        if key.startswith("loss"):
            (first, high), (last, low) = row["curve"]
            assert (first, last, row["steps"]) == (5, 10, 10)
            assert low < high - 0.1
            assert row["seconds"] > 0
            continue
        assert row["step_ms"]["median"] >= row["step_ms"]["least"] > 0
        assert 0 < row["host_ms"]["median"] <= row["step_ms"]["median"] * 1.01
        assert (row["link"], row["world"], row["loss_steps"]) == ("gloo", 2, 10)
        if key.endswith("native"):
            assert row["repeats"]
            continue
        assert row["ratio"] == row["step_ms"]["median"] / row["native_ms"]
        assert 0 < row["wire_bytes"] < row["raw_bytes"]
        assert row["same_bits"] == row["lossless"] == ("zipccl" in key)
        assert row["loss"] == pytest.approx(row["native_loss"], rel=1e-3)
    native, dynamiq = (found[key]["curve"] for key in CASES[-2:])
    assert [loss for _, loss in dynamiq] == pytest.approx([loss for _, loss in native], rel=1e-2)
    assert dynamiq != native
    before = record.read_text()
    torchrun(BENCHMARKS / "bench_training.py", words)
    after = record.read_text().removeprefix(before).splitlines()
    keys = [json.loads(line)["key"] for line in after]
    assert keys == ["run", "fsdp, zipccl, peers"], "results are kept"
    shown = page(tmp_path, monkeypatch)
    assert "| `ddp.register(model, route='network')` |" in shown
    (line,) = (line for line in shown.splitlines() if "tagc" in line)
    assert line.startswith("Not measured: ")
    assert "`fsdp.compress(model, route='peers')` (skipped: peer memory needs GPUs); " in line
    assert line.endswith("`tagc.compress(model, Tagc(ratio=10))`.")
    assert "tagc" not in (tmp_path / "training_steps.svg").read_text()


def test_failures_end_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    script, record = tmp_path / "broken.py", tmp_path / "training.jsonl"
    script.write_text(BROKEN)
    only = ["fsdp,native", "failing", "vanishing", "fsdp,zipccl,network"]
    words = ["--out", str(record), *TINY.split(), "--only", *only, "--seconds", "300"]
    # The line of a run that was cut off.
    record.write_text('{"key": "fsdp, na')
    torchrun(script, words, fails=True)
    torchrun(script, words, restarts=1)
    lines = record.read_text().splitlines()[1:]
    found = {row["key"]: row for row in map(json.loads, lines)}
    assert found["fsdp, failing"]["error"] == (
        "rank 0: ValueError: no hook; rank 1: ValueError: no hook"
    )
    assert found["fsdp, vanishing"]["error"].startswith("a process ended")
    assert found["fsdp, native"]["step_ms"]["steps"] == 2
    assert found["fsdp, zipccl, network"]["same_bits"]
    assert sum(json.loads(line)["key"] == "run" for line in lines) == 1, "one run, restarted"
    shown = page(tmp_path, monkeypatch)
    assert "`fail(model)` (failed)" in shown
    assert "- fsdp, failing: rank 0: ValueError: no hook" in shown
