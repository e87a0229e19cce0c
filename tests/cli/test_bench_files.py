"""benchmarks/bench_files.py: both parts in small sizes, the page made of them, and its checks."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numba")
pytest.importorskip("torch")
pytest.importorskip("safetensors")

pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
PARTS = {"cpu": ["--cpu"], "gpu": ["--gpu", "--device", "cpu"]}
#: Not installed here, or not in every version.
MISSING = {
    ("save", "ZipNN"),
    ("load", "ZipNN"),
    ("save, small tensors", "ZipNN"),
    ("load, small tensors", "ZipNN"),
    ("compress, directory", "tightwire"),
    ("decompress, directory", "tightwire"),
    ("load to the GPU", "tightwire, out="),
}


def run(command: Sequence[str | Path]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Records of both parts, the GPU's made on the host."""
    out = tmp_path_factory.mktemp("files")
    options = ["--quick", "--rounds", "1", "--out", str(out), "--folder", str(out)]
    commands = [
        [sys.executable, BENCHMARKS / "bench_files.py", *p, *options] for p in PARTS.values()
    ]
    with ThreadPoolExecutor() as pool:
        for done in pool.map(run, commands):
            assert done.returncode == 0, done.stdout + done.stderr
    return out


def module(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module(name)


@pytest.mark.parametrize("part", PARTS)
def test_records(folder: Path, part: str) -> None:
    record = json.loads((folder / f"files_{part}.json").read_text())
    assert record["settings"]["quick"]
    assert record["versions"]["safetensors"]
    rows = {(case["name"], row["name"]): row for case in record["cases"] for row in case["rows"]}
    assert [row for row in rows.values() if "error" in row] == []
    assert {name for name, row in rows.items() if "missing" in row} <= MISSING
    for case in record["cases"]:
        for row in case["rows"]:
            if "missing" not in row:
                assert row["GB/s"] == pytest.approx(case["nbytes"] / row["best_s"] / 1e9)
    save = "save" if part == "cpu" else "save from the GPU"
    plain, packed = (rows[save, name]["file_nbytes"] for name in ("safetensors", "tightwire"))
    assert packed < 0.75 * plain
    assert rows[save, "safetensors"]["of_baseline"] == 1
    assert [row for row in record.get("first_loads", []) if "GB/s" not in row] == []
    assert list(folder.glob("tmp*")) == []


def test_page(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert module("files_report", monkeypatch).write_page(folder)
    page = (folder / "files.md").read_text()
    for text in ("## On the CPU", "## On the GPU", "| torch.load |", "load on the CPU, speed over"):
        assert text in page
    assert str(folder) not in page
    assert (folder / "files.png").read_bytes().startswith(b"\x89PNG")


def test_no_page_without_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not module("files_report", monkeypatch).write_page(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_no_speed_of_a_wrong_result(monkeypatch: pytest.MonkeyPatch) -> None:
    timing = module("file_timing", monkeypatch)
    results = iter([1, 1, 2, 1])

    def check(found: int) -> None:
        timing.require(found == 1, "other values")

    contestants = [
        timing.Contestant("right", lambda _: 1, check),
        timing.Contestant("wrong in the third round", lambda _: next(results), check),
        timing.Contestant("not there", lambda _: 1, check, needs="no_such_module"),
    ]
    case = timing.Case("load", 1000, 1, "right")
    right, wrong, missing = timing.Timer(rounds=4).contest(case, contestants)["rows"]
    assert right["of_baseline"] == 1
    assert right["runs"] == 3
    assert wrong == {"name": contestants[1].name, "error": "RuntimeError: other values"}
    assert "no_such_module" in missing.pop("missing")
    assert missing == {"name": "not there"}


def test_files_that_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timing = module("file_timing", monkeypatch)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").write_bytes(b"same")
    timing.check_files(tmp_path / "a", tmp_path / "b")
    (tmp_path / "a" / "x").write_bytes(b"sane")
    with pytest.raises(RuntimeError, match="x differs"):
        timing.check_files(tmp_path / "a", tmp_path / "b")
    (tmp_path / "a" / "x").rename(tmp_path / "a" / "y")
    with pytest.raises(RuntimeError, match="other files"):
        timing.check_files(tmp_path / "a", tmp_path / "b")
