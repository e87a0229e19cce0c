"""The record of blocks of caches: its page and docs/plugins.md have its figures."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
RECORD = json.loads((RESULTS / "caches.json").read_text())
FOUND = {b["name"]: b for b in RECORD["benchmarks"]}
SIZES = {64: "64 KiB", 256: "256 KiB", 1024: "1 MiB", 5760: "5.6 MiB, 256 tokens of LMCache"}


def test_the_page_is_that_of_the_record() -> None:
    report = runpy.run_path(str(ROOT / "benchmarks" / "caches_report.py"))
    page = "\n".join(report["lines"](RECORD)) + "\n"
    assert page == (RESULTS / "caches.md").read_text(), "run benchmarks/report.py"


def test_the_tables_of_the_docs_have_its_figures() -> None:
    lines = (ROOT / "docs" / "plugins.md").read_text().splitlines()
    for kib, label in SIZES.items():
        parts = []
        for codec in ("zipccl", "huffman"):
            info = FOUND[f"test_cache_encode[files-{codec}-{kib}]"]["extra_info"]
            parts += [f"{info['ratio']:.3f}", f"{info['largest']:.3f}"]
        assert f"| {label} | {' | '.join(parts)} |" in lines
        times = []
        for way in ("files", "prepared"):
            encode, decode = (
                FOUND[f"test_cache_{op}[{way}-zipccl-{kib}]"]["stats"]["min"]
                for op in ("encode", "decode")
            )
            rate = (kib << 10) / decode / 1e9
            times += [f"{encode * 1e6:.0f}", f"{decode * 1e6:.0f} ({rate:.1f} GB/s)"]
        assert kib == 5760 or f"| {label} | {' | '.join(times)} |" in lines
