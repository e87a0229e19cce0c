"""The containers of specs/vectors/container, read by every reader; the page's example."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import readers
import tightwire as tw
from tightwire import convert

SPECS = Path(__file__).resolve().parents[2] / "specs"
FOLDER = SPECS / "vectors" / "container"
EXPECTED: dict[str, Any] = json.loads((FOLDER / "expected.json").read_text())


def copied(name: str, tmp_path: Path) -> Path:
    return Path(shutil.copy(FOLDER / f"{name}.safetensors", tmp_path))


def test_vectors_are_complete() -> None:
    assert {p.stem for p in FOLDER.glob("*.safetensors")} == set(EXPECTED)
    assert sum("reason" in e for e in EXPECTED.values()) > 30


@pytest.mark.parametrize("name", [n for n, e in EXPECTED.items() if "tensors" in e])
def test_valid(name: str, tmp_path: Path) -> None:
    path, expected = copied(name, tmp_path), EXPECTED[name]
    tensors = readers.agreed(path)
    assert isinstance(tensors, dict)
    assert expected["tensors"] == [
        [n, dtype, list(shape), hashlib.sha256(data).hexdigest()]
        for n, (dtype, shape, data) in tensors.items()
    ]
    assert isinstance(tw.loads(path.read_bytes()), list) == expected["list"]
    if "restored" in expected:
        convert.decompress_file(path, tmp_path / "restored")
        restored = (tmp_path / "restored").read_bytes()
        assert hashlib.sha256(restored).hexdigest() == expected["restored"]
    with tw.open(path) as file:
        assert not any(key.startswith("tightwire") for key in file.metadata)


@pytest.mark.parametrize("name", [n for n, e in EXPECTED.items() if "reason" in e])
def test_invalid(name: str, tmp_path: Path) -> None:
    path = copied(name, tmp_path)
    assert readers.agreed(path) == EXPECTED[name]["reason"]
    # inspect sees all but the payload.
    seen = None if name == "payload" else EXPECTED[name]["reason"]
    assert readers.reason(convert.inspect_file, path) == seen
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_worked_example() -> None:
    page = (SPECS / "container.md").read_text().partition("## Worked example")[2]
    start, header, *_ = [line[4:] for line in page.splitlines() if line.startswith("    ")]
    data = (FOLDER / "one.safetensors").read_bytes()
    n = int(page.partition("so N = ")[2].partition(",")[0])
    spaces = int(page.partition("followed by ")[2].partition(" ")[0])
    assert data[:8] == bytes.fromhex(start) == n.to_bytes(8, "little")
    assert data[8 : 8 + n] == header.encode() + b" " * spaces
    assert data[8 + n :] == (SPECS / "vectors" / "raw" / "uint8_3.tw").read_bytes()


def test_lines_of_the_page_are_short() -> None:
    assert max(map(len, (SPECS / "container.md").read_text().splitlines())) <= 120
