"""benchmarks/bench_peers.py: both routes between threads, wrong results, and the page."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("numba")

pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    bench = importlib.import_module("bench_peers")
    monkeypatch.setattr(bench, "SECONDS", 0.02)
    return bench


def rows(path: Path) -> dict[str, dict[str, Any]]:
    """The last row of each key."""
    return {row["key"]: row for row in map(json.loads, path.read_text().splitlines())}


def test_calls_are_recorded_and_shown(bench: Any, tmp_path: Path) -> None:
    record = tmp_path / "prepared.jsonl"
    words = ["--threads", "2", "--out", str(record), "--sizes", "64", "--codecs", "zipccl", "mx"]
    bench.main(words)
    found = rows(record)
    assert len(found) == 1 + 2 * len(bench.ROUTES) * len(bench.COLLECTIVES)
    for key, row in found.items():
        if key == "run":
            continue
        assert "error" not in row, row
        assert row["speedup"] == row["native"]["ms"] / row["eager"]["ms"]
        assert 0 < row["eager"]["host_us"] <= row["eager"]["ms"] * 1001
        assert row["wire_bytes"] > 0
        assert (row["error_vnmse"] == 0) == (row["codec"] == "zipccl")
        assert ("native_float32_ms" in row) == (row["collective"] == "all_reduce")
    before = record.read_text()
    bench.main(words)
    after = record.read_text().removeprefix(before).splitlines()
    assert [json.loads(line)["key"] for line in after] == ["run"], "results are kept"
    assert importlib.import_module("prepared_report").write_page(tmp_path)
    shown = (tmp_path / "prepared.md").read_text()
    row = found["all_gather, mx, peers, 64 KiB"]
    assert f"| mx, peers | {row['speedup']:.2f}; -; {row['eager']['host_us']:.0f} us |" in shown
    assert "nvfp4" not in shown, "rows of what was not measured"
    assert "not measured" not in shown.partition("### ")[2]


def test_messages_without_checksums_have_rows_of_their_own(bench: Any, tmp_path: Path) -> None:
    record = tmp_path / "prepared.jsonl"
    words = ["--threads", "2", "--out", str(record), "--sizes", "64", "--codecs", "zipccl"]
    words += ["--collectives", "all_gather", "--routes", "peers"]
    bench.main(words)
    with_checksums = rows(record)
    bench.main([*words, "--checksum", "off"])
    found = rows(record)
    keys = [f"all_gather, zipccl, peers, 64 KiB{end}" for end in ("", ", checksum off")]
    assert list(found) == ["run", *keys]
    assert found[keys[0]] == with_checksums[keys[0]], "it stays"
    assert [found[key]["checksum"] for key in keys] == [True, False]
    report = importlib.import_module("prepared_report")
    assert report.write_page(tmp_path)
    lines = (tmp_path / "prepared.md").read_text().splitlines()
    speedups = [f"{found[key]['speedup']:.2f}; -;" for key in keys]
    shown = [line for line in lines if line.startswith("| zipccl, peers")]
    # Nothing is shown of other collectives.
    assert len(shown) == 2
    assert shown[0].startswith(f"| zipccl, peers | {speedups[0]}")
    assert shown[1].startswith(f"| zipccl, peers, checksum off | {speedups[1]}")
    before = record.read_text()
    bench.main([*words, "--checksum", "on", "off"])
    after = record.read_text().removeprefix(before).splitlines()
    assert [json.loads(line)["key"] for line in after] == ["run"], "results are kept"
    target = report.Target("nvlink", "all_gather", "zipccl", "peers", 64, 1e9, 1e9)
    for key in keys:
        assert report._measured(target, found[key]) == f"{found[key]['speedup']:.2f}, not met"


def test_pages_leave_out_what_nobody_measured(bench: Any) -> None:
    report = importlib.import_module("prepared_report")
    no = "not measured"
    table = {"NCCL, ms": [no, "1", "2"], "mx, peers": [no, no, "3"], "raw, peers": [no] * 3}
    assert report._table("all_gather", ["1 KiB", "2 KiB", "3 KiB"], table) == [
        *("### all_gather", "", "|  | 2 KiB | 3 KiB |", "|---|---|---|"),
        *("| NCCL, ms | 1 | 2 |", "| mx, peers | not measured | 3 |", ""),
    ]
    assert report._table("all_gather", ["1 KiB"], {"NCCL, ms": [no]}) == []


def test_a_reason_of_several_calls_has_one_line(bench: Any) -> None:
    report = importlib.import_module("prepared_report")

    def row(collective: str, why: str) -> dict[str, Any]:
        text = "; ".join(f"rank {rank}: ValueError: {why}" for rank in range(2))
        return {"collective": collective, "graph_error": text}

    rows = {
        "a": row("all_gather", "all_gather is captured"),
        "b": row("reduce_scatter float32", "reduce_scatter is captured"),
        "c": row("all_gather", "all_gather is captured"),
        "d": row("all_to_all", "no memory"),
        "e": {"collective": "all_to_all", "graph_error": None},
    }
    assert report._uncaptured(rows) == [
        *("Not captured in a graph:", ""),
        "- all_gather, reduce_scatter float32: a call is captured",
        *("- all_to_all: no memory", ""),
    ]


def test_wrong_results_have_no_times(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = bench.expected

    def wrong(place: Any, case: Any, x: Any) -> Any:
        found = right(place, case, x)
        if place.ranks.rank == 1:
            found[-1] += 1
        return found

    monkeypatch.setattr(bench, "expected", wrong)
    record = tmp_path / "prepared.jsonl"
    words = ["--threads", "2", "--out", str(record), "--sizes", "4", "--codecs", "raw"]
    bench.main([*words, "--collectives", "all_gather", "all_reduce"])
    found = rows(record)
    assert len(found) == 5
    for key, row in found.items():
        if key != "run":
            assert row["error"] == (
                "rank 1: RuntimeError: the result has other bits than the sum in float32"
            )
            assert "eager" not in row


def test_no_time_is_said(bench: Any, tmp_path: Path) -> None:
    record = tmp_path / "prepared.jsonl"
    words = ["--threads", "2", "--out", str(record), "--codecs", "raw", "--seconds", "0"]
    bench.main(words)
    skipped = [row["skipped"] for key, row in rows(record).items() if key != "run"]
    assert skipped == ["no time was left"] * (2 * len(bench.KIB) * len(bench.COLLECTIVES))


#: The program, whose calls do not end on one rank.
HANGING = """
import sys, time
import bench_peers

def measure(place, case):
    if place.ranks.rank == 1:
        time.sleep(300)
    return place.ranks.gather(None)

bench_peers.measure = measure
bench_peers.main(sys.argv[1:])
"""


def test_what_does_not_end_is_recorded(tmp_path: Path) -> None:
    script, record = tmp_path / "hanging.py", tmp_path / "prepared.jsonl"
    script.write_text(HANGING)
    words = ["--threads", "2", "--out", str(record), "--sizes", "4", "--limit", "1"]
    path = os.pathsep.join([str(BENCHMARKS), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, str(script), *words, "--codecs", "raw", "--collectives", "all_gather"],
        env=os.environ | {"PYTHONPATH": path},
        timeout=120,
    )
    assert done.returncode == 70
    assert rows(record)["all_gather, raw, peers, 4 KiB"]["error"] == "no end after 1 s"
