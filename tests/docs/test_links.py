"""Relative links of the pages lead to files and headings that exist."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from urllib.parse import unquote

import pytest

from doc_pages import DOCS, PAGES, ROOT, name_of

markdown_it = pytest.importorskip("markdown_it", reason="pip install -e '.[docs]'")
# CI runs these where the docs are built: the fast tier does without their packages.
pytestmark = pytest.mark.slow

LINKED_PAGES = [
    *PAGES,
    *(ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "adapters/README.md")),
    *sorted((ROOT / "specs").glob("*.md")),
    *sorted((ROOT / "benchmarks" / "results").glob("*.md")),
    *sorted((DOCS / "api").glob("*.md")),
]


def _anchors(page: Path) -> set[str]:
    """The anchors that forges and Sphinx give the headings of a page."""
    tokens = markdown_it.MarkdownIt().parse(page.read_text())
    found: set[str] = set()
    for opening, heading in itertools.pairwise(tokens):
        if opening.type == "heading_open":
            words = "".join(child.content for child in heading.children)
            slug = re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")
            count = sum(re.fullmatch(rf"{re.escape(slug)}(-\d+)?", f) is not None for f in found)
            found.add(f"{slug}-{count}" if count else slug)
    return found | set(re.findall(r'^\((\S+)\)=$|<a (?:id|name)="', page.read_text(), re.M))


def _links(page: Path) -> list[str]:
    tokens = markdown_it.MarkdownIt().enable("table").parse(page.read_text())
    children = [child for token in tokens for child in token.children or ()]
    links = [c.attrs.get("href", c.attrs.get("src")) for c in children]
    return [unquote(str(link)) for link in links if link]


def _problem(page: Path, link: str) -> str | None:
    if re.match(r"[a-z]+:", link):
        return None
    name, _, anchor = link.partition("#")
    target = page.parent / name if name else page
    if not target.exists():
        return f"{link}: no such file"
    if anchor and anchor not in _anchors(target):
        return f"{link}: no such heading"
    return None


@pytest.mark.parametrize("page", LINKED_PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    problems = [problem for link in _links(page) if (problem := _problem(page, link))]
    assert not problems


def test_bad_links_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A `b` title\n\n[x](#a-b-title) [y](#other) [z](no.md) ![p](no.png)\n")
    problems = [_problem(page, link) for link in _links(page)]
    assert problems == [
        None,
        "#other: no such heading",
        "no.md: no such file",
        "no.png: no such file",
    ]
