"""The tables of the vectors: complete, with a purpose for each, and as the files are."""

from __future__ import annotations

from pathlib import Path

import pytest

import tightwire as tw
import vector_table

SPECS = Path(__file__).resolve().parents[2] / "specs"
CODECS = sorted(tw.list_codecs())


def test_tables_are_those_of_the_files() -> None:
    made = vector_table.tables()
    assert {p.name for p in (SPECS / "tables").iterdir()} == set(made)
    for name, content in made.items():
        assert (SPECS / "tables" / name).read_text() == content, (
            f"run specs/vector_table.py: {name}"
        )


@pytest.mark.parametrize("codec", CODECS)
def test_every_vector_has_a_row_and_a_purpose(codec: str) -> None:
    rows = vector_table.read(SPECS / "tables" / f"{codec}.tsv")
    assert set(rows) == {p.stem for p in (SPECS / "vectors" / codec).glob("*.tw")}
    assert all(row["purpose"] for row in rows.values())


def test_a_changed_file_changes_its_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = SPECS / "vectors" / "raw" / "uint8_3"
    for end in (".tw", ".bin"):
        (tmp_path / "raw").mkdir(exist_ok=True)
        (tmp_path / "raw" / f"x{end}").write_bytes(source.with_suffix(end).read_bytes())
    monkeypatch.setattr(vector_table, "VECTORS", tmp_path)
    (row,) = vector_table.valid_table("raw")
    (tmp_path / "raw" / "x.bin").write_bytes(b"\1\2\4")
    (other,) = vector_table.valid_table("raw")
    assert row["purpose"] == ""
    assert {c for c in row if row[c] != other[c]} == {"bin"}


@pytest.mark.parametrize(
    "name", ["README", "buffer", "errors", "errata", "philox", "raw", "zipccl", "mx", "nvfp4"]
)
def test_lines_of_pages_are_short(name: str) -> None:
    lines = (SPECS / f"{name}.md").read_text().splitlines()
    assert [i for i, line in enumerate(lines, 1) if len(line) > 120] == []
