"""docs/troubleshooting.md knows every reason of the format, and quotes messages that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tightwire.formats.errors import REASONS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
#: The code as one text, in which the parts of a string that goes on in the next line are joined.
SOURCE = "".join(path.read_text() for path in sorted((ROOT / "adapters").rglob("*.py")))
SOURCE = re.sub(r'"\s*\n\s*f?"', "", SOURCE)


def rows(heading: str) -> list[list[str]]:
    """The cells of the first table under a heading."""
    section = PAGE.split(f"\n## {heading}", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_every_reason_has_a_row_that_says_what_to_do() -> None:
    table = rows("Bytes that do not decode")
    assert [row[0] for row in table] == [f"`{reason}`" for reason in REASONS]
    assert all(len(row) == 3 and all(row) for row in table)


QUOTED = [row[0].strip("`") for row in rows("Between ranks") if row[0].startswith("`")]


@pytest.mark.parametrize("message", QUOTED)
def test_messages_are_those_of_the_code(message: str) -> None:
    assert message in SOURCE
