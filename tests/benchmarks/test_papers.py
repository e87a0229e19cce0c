"""training.md is the page of the records, and bench_papers.py asks for the cases that it lacks."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
COMMON: dict[str, Any] = {"link": "p2p off", "world": 2, "machine": {"device": "NVIDIA H200"}}
H100 = {"machine": {"device": "NVIDIA H100 80GB HBM3"}}


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("papers_report")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("bench_papers")


def write(path: Path, rows: dict[str, dict[str, Any]]) -> None:
    path.write_text(
        "".join(json.dumps({"key": k, **COMMON, **row}) + "\n" for k, row in rows.items())
    )


def test_the_page_is_that_of_the_records(report: Any) -> None:
    text = (RESULTS / "training.md").read_text()
    assert text == "\n".join(report.page(RESULTS)).rstrip() + "\n", "run benchmarks/report.py"


def test_what_is_not_recorded_is_named(report: Any, tmp_path: Path) -> None:
    text = "\n".join(report.page(tmp_path))
    rows = [line for line in text.splitlines() if line.startswith("| figure") or "table" in line]
    assert len(rows) == 16
    assert all("not recorded" in row or "not done" in row for row in rows)


def test_speeds_need_right_results(report: Any, tmp_path: Path) -> None:
    right = {"ratio": 0.8, "lossless": True, "native_repeats": True, "same_bits": True}
    lossy = {"lossless": False, "native_repeats": True, "same_bits": False, "native_loss": 4.0}
    write(
        tmp_path / "training.jsonl",
        {
            "fsdp, zipccl, network": right,
            "moe, zipccl": right | {"same_bits": False},
            "tp, taco, network": lossy | {"ratio": 0.5, "loss": 4.1},
            "fsdp, tagc, 10 x": {"error": "rank 1: RuntimeError: nothing"},
            "loss, native": {"curve": [[5, 6.0], [10, 5.0], [20, 4.0]], "seconds": 4, "steps": 20},
            "loss, dynamiq, ring": {
                "curve": [[5, 6.0], [15, 5.0], [20, 4.05]],
                "seconds": 2,
                "steps": 20,
            },
        },
    )
    forms = {"exact_ms": 2.0, "padded_ms": 4.0}
    write(
        tmp_path / "moe.jsonl",
        {
            "moe, native, 128 tokens, top 4": forms | {"ms": 2.0},
            "moe, padded to the most, 128 tokens, top 4": forms | {"ms": 6.0},
            "moe, zipccl, 8192 tokens, top 2": forms | {"ms": 1.6} | H100,
        },
    )
    rows = [line.split(" | ") for line in report.page(tmp_path) if line.count(" | ") == 3]
    cells = {row[0]: row[2] for row in rows}
    of = {name: next(cell for key, cell in cells.items() if name in key) for name in NAMES}
    assert of["a dense model"] == "1.25 x at 25 GB/s"
    assert of["with experts"] == "no speed: other bits than natively at 25 GB/s"
    assert of["parallelism, 2 ranks"] == "2.00 x at 25 GB/s"
    assert of["time of a step, 10x"] == "failed at 25 GB/s"
    assert of["decoding"] == "3.00 x, 2.00 x the least padding at 25 GB/s"
    assert of["with zipccl"] == "2.50 x padded, 1.25 x exact (H100) at 25 GB/s"
    # 4.2 is reached after 18 steps of 0.2 s, and after 19.2 of 0.1 s.
    assert of["time to loss"].startswith("105%: 0.53 of bfloat16's; 102%: ")
    assert of["time to loss"].endswith("101%: not reached at 25 GB/s")
    write(tmp_path / "training.jsonl", {"tp, taco, network": lossy | {"ratio": 0.5, "loss": 4.3}})
    assert "no speed: loss 4.30, natively 4.00" in "\n".join(report.page(tmp_path))


NAMES = (
    *("a dense model", "with experts", "parallelism, 2 ranks", "time of a step, 10x", "decoding"),
    *("with zipccl", "time to loss"),
)


def test_steps_to_a_loss(report: Any) -> None:
    curve = [(0, 6.0), (10, 4.0), (20, 4.5), (30, 3.0)]
    assert report.to_loss(curve, 5.0) == 5
    assert report.to_loss(curve, 3.5) == pytest.approx(20 + 10 * 2 / 3)
    assert report.to_loss(curve, 6.5) == 0
    assert report.to_loss(curve, 2.9) is None


@pytest.mark.slow
def test_parts_ask_for_cases_that_there_are(bench: Any, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("numba")
    training = importlib.import_module("bench_training")
    moe = importlib.import_module("bench_moe")
    wanted: dict[str, set[str]] = {}
    for link in bench.LINKS:
        for part in bench.PARTS:
            for is_small in (False, True):
                command = bench.command(part, link, tmp_path, 50, is_small)
                words = command[command.index(str(bench.HERE / f"{part.program}.py")) + 1 :]
                assert words[-4:] == ["--out", str(tmp_path / part.out), "--seconds", "50"]
                if part.program == "bench_training":
                    options = training.arguments(words)
                    cases = training.chosen(options.suite, options.only)
                    wanted[link] = {case.key for case in cases}
                elif part.program == "bench_moe":
                    options = moe._options(words)
                    assert set(options.only) <= set(moe.FORMS)
                    assert is_small or (options.tokens, options.top_k) in ((8192, 2), (128, 4))
    runs = {"native", "mx, network", "dynamiq, ring", "dynamiq, network"}
    both = {"fsdp, native", "tp, native", "moe, native", "moe, zipccl"}
    assert wanted["NVLink"] == both | {"fsdp, zipccl, peers", "tp, taco, peers"}
    slow = {"fsdp, zipccl, network", "tp, taco, network", "moe, mx", "fsdp, tagc, 10 x"}
    assert wanted["25 GB/s"] == both | slow | {f"loss, {run}" for run in runs}
    assert sum(part.most for part in bench.PARTS) < 470, "of one network"


@pytest.mark.slow
def test_one_part_that_fails_or_hangs_is_not_all(
    bench: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    programs = {"fails": "raise SystemExit(3)", "hangs": "import time; time.sleep(60)", "ends": ""}
    monkeypatch.setenv(bench.P2P, "1")
    checks = "import os; assert os.environ.get('NCCL_P2P_DISABLE') == {}\n"
    ran: list[str] = []

    def command(part: Any, link: str, folder: Path, seconds: float, small: bool) -> list[str]:
        ran.append(f"{part.program}, {link}")
        text = checks.format("'1'" if link == "25 GB/s" else None) + programs[part.program]
        return [sys.executable, "-c", text]

    parts = [bench.Part(name, "", 3.0, (), {}, ()) for name in programs]
    monkeypatch.setattr(bench, "PARTS", parts)
    monkeypatch.setattr(bench, "LEAST", 1.0)
    monkeypatch.setattr(bench, "command", command)
    assert bench.main(["--small"]) == 1
    assert ran == [f"{name}, {link}" for link in bench.LINKS for name in programs]
    said = capsys.readouterr().out
    for link in bench.LINKS:
        assert f"fails, {link}: ended with status 3" in said
        assert f"hangs, {link}: stopped after 3 s" in said
        assert f"ends, {link}:" not in said
    assert bench.main(["--small", "--seconds", "0"]) == 1
    assert "ends, NVLink: no time was left" in capsys.readouterr().out


def test_two_gpus_are_needed(
    bench: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert bench.main([]) == 2
    assert "1 GPUs found; needed: 2" in capsys.readouterr().err
