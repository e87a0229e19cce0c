"""README.md and pages like it show what was recorded, and count what there is."""

from __future__ import annotations

import runpy

import tightwire as tw
from doc_pages import ROOT

BENCHMARKS = ROOT / "benchmarks"


def test_the_table_is_that_of_the_records() -> None:
    made = runpy.run_path(str(BENCHMARKS / "overview_report.py"))["table"](BENCHMARKS / "results")
    table = "\n".join(made)
    assert table in (ROOT / "README.md").read_text(), "take the table of results/overview.md"


def test_codecs_are_counted() -> None:
    codecs = [tw.codec(name) for name in tw.list_codecs()]
    lossless = [codec.name for codec in codecs if codec.lossless]
    assert (
        f"{len(codecs)} codecs, {len(lossless)} of them lossless"
        in (ROOT / "README.md").read_text()
    )
    started = " ".join((ROOT / "docs/getting-started.md").read_text().split())
    assert f"compares all {len(codecs)} codecs" in started
    certain = (ROOT / "docs/faq.md").read_text().split("\n## ")[1]
    assert all(f"`{name}`" in certain for name in lossless)
