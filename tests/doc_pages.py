"""The pages that tests of the documentation read."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
#: The README and the pages of docs, without the specifications, the API and recorded results.
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]


def name_of(path: Path) -> str:
    """The path from the top folder, for names of tests and messages."""
    return path.relative_to(ROOT).as_posix()
