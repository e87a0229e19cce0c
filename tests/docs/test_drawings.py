"""The drawings are what their program makes of the real layout."""

from __future__ import annotations

import runpy

from doc_pages import DOCS


def test_drawings_are_those_of_their_program() -> None:
    drawings = runpy.run_path(str(DOCS / "drawings" / "make.py"))["drawings"]()
    there = {path.name: path.read_text() for path in (DOCS / "drawings").glob("*.svg")}
    assert there == drawings, "run python docs/drawings/make.py"
