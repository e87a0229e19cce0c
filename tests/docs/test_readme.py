"""README.md shows what was recorded."""

from __future__ import annotations

import runpy

from doc_pages import ROOT

BENCHMARKS = ROOT / "benchmarks"


def test_the_table_is_that_of_the_records() -> None:
    made = runpy.run_path(str(BENCHMARKS / "overview_report.py"))["table"](BENCHMARKS / "results")
    table = "\n".join(made)
    assert table in (ROOT / "README.md").read_text(), "take the table of results/overview.md"
