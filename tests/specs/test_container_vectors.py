"""The containers of specs/vectors/container, read by every reader; the page's example."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest

import readers
import tightwire as tw
from tightwire import convert
from tightwire.formats.container import (
    DIGEST_KEY,
    MAX_TREE,
    NO_DIGEST,
    TREE_KEY,
    directory_bytes,
)

SPECS = Path(__file__).resolve().parents[2] / "specs"
FOLDER = SPECS / "vectors" / "container"
EXPECTED: dict[str, Any] = json.loads((FOLDER / "expected.json").read_text())


#: Damage that only readers of the data see.
PAYLOAD = {"payload", "plain_data", "plain_value", "payload_and_plain"}


def copied(name: str, tmp_path: Path) -> Path:
    return Path(shutil.copy(FOLDER / f"{name}.safetensors", tmp_path))


def test_vectors_are_complete() -> None:
    assert {p.stem for p in FOLDER.glob("*.safetensors")} == set(EXPECTED)
    assert sum("reason" in e for e in EXPECTED.values()) > 100


@pytest.mark.parametrize("name", [n for n, e in EXPECTED.items() if "tensors" in e])
def test_valid(name: str, tmp_path: Path) -> None:
    path, expected = copied(name, tmp_path), EXPECTED[name]
    tensors = readers.agreed(path)
    assert isinstance(tensors, dict)
    with tw.open(path) as file:
        assert expected["tensors"] == [
            [n, x.dtype, list(x.shape), hashlib.sha256(x.numpy().tobytes()).hexdigest()]
            for n, x in ((n, file[n]) for n in file)
        ]
        assert not any(key.startswith("tightwire") for key in file.metadata)
    if not name.startswith("tree"):
        assert isinstance(tw.loads(path.read_bytes()), list) == expected["list"]
        assert {row[3] for row in expected["tensors"]} == {
            hashlib.sha256(data).hexdigest() for _, _, data in tensors.values()
        }
    if "restored" in expected:
        convert.decompress_file(path, tmp_path / "restored")
        restored = (tmp_path / "restored").read_bytes()
        assert hashlib.sha256(restored).hexdigest() == expected["restored"]


@pytest.mark.parametrize("name", [n for n, e in EXPECTED.items() if "reason" in e])
def test_invalid(name: str, tmp_path: Path) -> None:
    path = copied(name, tmp_path)
    assert readers.agreed(path) == EXPECTED[name]["reason"]
    # inspect sees all but the payload.
    seen = None if name in PAYLOAD else EXPECTED[name]["reason"]
    assert readers.reason(convert.inspect_file, path) == seen
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_tree() -> None:
    tree = tw.load_file(FOLDER / "tree.safetensors")
    x, again, members, numbers, *rest = tree
    assert x.tolist() == [1, 2, 3]
    assert again is x is members[None]
    assert list(members) == ["a", 1, 2.5, False, None]
    assert [type(key) for key in members] == [str, int, float, bool, type(None)]
    assert (members["a"], members[1], members[2.5], members[False]) == (1, "é", None, True)
    assert type(numbers) is tuple
    assert repr(numbers) == f"(-0.0, 1e+300, {10**40}, nan, inf, -inf)"
    assert rest == [b"\0\1\xff", (), {}, [], [[""]]]
    assert tw.load_file(FOLDER / "tree_value.safetensors") == "no tensor"


def test_tied() -> None:
    tensors = tw.load_file(FOLDER / "tied.safetensors")
    assert list(tensors) == ["x", "y", "é", "a", "b"]
    assert tensors["é"] is tensors["b"] is tensors["x"]
    assert tensors["a"] is tensors["y"]


@pytest.mark.parametrize("name", ["one", "example"])
def test_worked_example(name: str) -> None:
    page = (SPECS / "container.md").read_text().partition("## Worked examples")[2]
    page = page.partition(f"[vectors/container/{name}.safetensors]")[2]
    blocks = re.findall("(?:^    .*\n)+", page, re.MULTILINE)
    start, header = ("".join(line[4:] for line in b.splitlines()) for b in blocks[:2])
    data = (FOLDER / f"{name}.safetensors").read_bytes()
    n = int(page.partition("so N = ")[2].partition(",")[0])
    spaces = int(page.partition("followed by ")[2].split()[0])
    assert data[:8] == bytes.fromhex(start) == n.to_bytes(8, "little")
    assert data[8 : 8 + n] == header.encode() + b" " * spaces
    buffer = (SPECS / "vectors" / "raw" / "uint8_3.tw").read_bytes()
    assert data[8 + n :][:256] == buffer
    if name == "example":
        plain = bytes.fromhex(page.partition("plain entry, ")[2].partition(",")[0])
        assert data[8 + n + 256 :] == plain == np.float32(1.5).tobytes()
        crc = page.partition("whose CRC32C is ")[2][:8]
        assert int(crc, 16) == google_crc32c.value(plain)
        zeros = re.sub('(?<="tightwire.digest":")[0-9a-f]{64}', "0" * 64, data[8 : 8 + n].decode())
        assert hashlib.sha256(zeros.encode()).hexdigest() in header
    else:
        assert data[8 + n + 256 :] == b""


@pytest.mark.parametrize(("nbytes", "reason"), [(MAX_TREE, None), (MAX_TREE + 1, "bad_container")])
def test_the_longest_tree(nbytes: int, reason: str | None) -> None:
    metadata = {"tightwire": "2", DIGEST_KEY: NO_DIGEST, TREE_KEY: f'"{"a" * (nbytes - 2)}"'}
    data = directory_bytes([], metadata)
    if reason is None:
        assert len(tw.loads(data)) == nbytes - 2
    else:
        with pytest.raises(tw.FormatError, match=reason):
            tw.loads(data)


def test_lines_of_the_page_are_short() -> None:
    assert max(map(len, (SPECS / "container.md").read_text().splitlines())) <= 120
