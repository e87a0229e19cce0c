"""The form of the codec pages, and their constants."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import tightwire as tw
from tightwire.codecs import dynamiq, lhc, thc

SPECS = Path(__file__).resolve().parents[2] / "specs"
#: Pages whose sections are not those of HEADS.
OTHERS = {"raw", "zipccl", "mx", "nvfp4"}
PAGES = [name for name in tw.list_codecs() if name not in OTHERS]
HEADS = [
    "Parameters",
    "Layout",
    "Values",
    "Mapping",
    "Peeling",
    "Arithmetic",
    "Decoding",
    "Encoding",
    "Sums",
    "Special values",
    "Error bound",
    "Checks",
    "Partial decoding",
    "Worked example",
    "Notes (informative)",
    "History",
]
#: Sections that every page has.
NEEDED = {"Parameters", "Layout", "Decoding", "Encoding", "Special values", "Checks", *HEADS[11:]}


def page(name: str) -> str:
    return (SPECS / f"{name}.md").read_text()


def section(name: str, head: str) -> str:
    return re.split(r"^## ", page(name).partition(f"\n## {head}")[2], flags=re.MULTILINE)[0]


def cells(row: str) -> list[str]:
    """A row of a table without its first cell."""
    return [cell.strip() for cell in row.strip("|\n ").split("|")][1:]


@pytest.mark.parametrize("name", PAGES)
def test_form(name: str) -> None:
    text = page(name)
    assert max(map(len, text.splitlines())) <= 120
    heads = [re.sub(r" \(\d+ bytes\)", "", h) for h in re.findall("^## (.*)$", text, re.MULTILINE)]
    assert heads == sorted(heads, key=HEADS.index)
    assert set(heads) >= NEEDED
    assert ("Sums" in heads) == ("homomorphic." in text.split("\n## ")[0])
    prose = re.sub("`[^`]*`", "", text)
    assert not re.search(r"\b(turns?|cells?|shots?|lanes?|room|beside)\b", prose)


@pytest.mark.parametrize("name", PAGES)
def test_every_check_has_a_number_and_a_reason(name: str) -> None:
    checks = section(name, "Checks")
    rules = re.findall(r"^(\d)\. ((?:.+\n)+?)(?=\d\. |\n)", checks, re.MULTILINE)
    assert [int(number) for number, _ in rules] == list(range(1, len(rules) + 1))
    assert len(rules) >= 2
    assert all(rule.endswith(": else `bad_payload`.\n") for _, rule in rules)
    assert "(`reserved_not_zero`)" in checks
    assert re.match(r"\n\nThe unit.* are? |\n\nThe unit is ", section(name, "Partial decoding"))


def test_constants_of_taco_and_thc() -> None:
    sizes, roots = re.findall(r"^\| [BK] \|.*(?:32|`) \|.*$", page("taco"), re.MULTILINE)[:2]
    words = [int(word.strip("`"), 16) for word in cells(roots)]
    assert words == [int(np.float32(int(b) ** -0.5).view(np.uint32)) for b in cells(sizes)]
    word = re.search(r"\| K \| the float32 `(\w{8})`", page("thc"))
    assert word is not None
    assert int(word[1], 16) == int(np.float32(thc.STEPS).view(np.uint32))
    levels = re.search(r"The levels are ([\d, ]*)\.", page("thc"))
    assert levels is not None
    assert tuple(map(int, levels[1].split(", "))) == thc.LEVELS


def test_constants_of_dynamiq() -> None:
    growth = re.search(r"^\| growth .*$", page("dynamiq"), re.MULTILINE)
    factors = re.search(r"^\| factor .*$", page("dynamiq"), re.MULTILINE)
    units = re.search(r"^\| units .*$", page("dynamiq"), re.MULTILINE)
    assert growth is not None
    assert factors is not None
    assert units is not None
    assert list(map(float, cells(growth[0]))) == list(dynamiq.GROWTH.values())
    assert list(map(float, cells(factors[0])[:6])) == [f for _, _, f in dynamiq.ANY_STEPS]
    assert cells(factors[0])[7:] == ["15 / 2^9", "255 / 2^18"]
    costs = [cost for _, cost, _ in (*dynamiq.ANY_STEPS, *dynamiq.POW2_STEPS)]
    assert [int(unit) for unit in cells(units[0]) if unit] == costs


def test_hash_of_lhc() -> None:
    """The five lines of the page, evaluated as they stand."""
    formula = re.search(
        r"((?:    [xy] = .*\n)+)    hash\(k, j\) = (.*)\n", section("lhc", "Mapping")
    )
    assert formula is not None

    def word(value: int) -> int:
        return value & 0xFFFFFFFF

    def rotl(x: int, s: int) -> int:
        return word(word(x) << s | word(x) >> 32 - s)

    source = re.sub(r"\b([0-9a-f]{8})\b", r"0x\1", formula[1])
    for k, row in enumerate(lhc.hashes(40).tolist()):
        for j, expected in enumerate(row):
            names = {"k": k, "j": j, "rotl": rotl}
            for line in source.splitlines():
                target, _, value = line.strip().partition(" = ")
                names[target] = word(eval(value, {}, names))
            assert eval(formula[2], {}, names) == expected
