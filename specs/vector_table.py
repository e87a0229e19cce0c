"""Write the tables of the vectors: `python specs/vector_table.py`.

`tables/<codec>.tsv` has a row for each valid vector. All columns but `purpose` and `alone` follow
from the files in `vectors`; those two are written by hand and kept. `tables/invalid.tsv` follows
from the files and from reasons.json.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from dataclasses import fields
from pathlib import Path

import tightwire as tw
from tightwire.planning import spec_class

SPECS = Path(__file__).parent
VECTORS, TABLES = SPECS / "vectors", SPECS / "tables"
KEY = "seed 0x0123456789abcdef, step 7, rank 3"
BY_HAND = ("purpose", "alone")
COLUMNS = ("name", "dtype", "shape", "chunks", "parameters", "key", *BY_HAND, "tw", "bin", "input")
INVALID_COLUMNS = ("name", "reason", "tw")

Row = dict[str, str]


def sha256(path: Path) -> str:
    """The file's SHA-256 as hex, "-" if there is no file."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else "-"


def derived(path: Path) -> Row:
    """What follows from a vector's files; `path` is that of its buffer."""
    header = tw.inspect(path.read_bytes()).header
    spec = spec_class(header.codec).unpack_params(header.params)
    ranks = re.search(r"_of_(\d+)_ranks$", path.stem)
    world = int(ranks[1]) if ranks else 1
    given = path.with_suffix(".input")
    hashed = {end: sha256(path.with_suffix(f".{end}")) for end in ("tw", "bin", "input", "base")}
    return {
        "name": path.stem,
        "dtype": header.dtype.name,
        "shape": "x".join(map(str, header.shape)) or "()",
        "chunks": str(header.chunks),
        "parameters": " ".join(f"{f.name}={getattr(spec, f.name)}" for f in fields(spec)) or "-",
        "key": f"{KEY}, world {world}" if spec.draws and given.exists() else "-",
        **hashed,
    }


def read(path: Path) -> dict[str, Row]:
    """Rows of a table by name; none if there is no table."""
    if not path.exists():
        return {}
    head, *lines = path.read_text().splitlines()
    columns = head.split("\t")
    rows = [dict(zip(columns, line.split("\t"), strict=True)) for line in lines]
    return {row["name"]: row for row in rows}


def valid_table(codec: str) -> list[Row]:
    """Rows of a codec's vectors; the purpose of a new vector is empty."""
    written = read(TABLES / f"{codec}.tsv")
    rows = []
    for path in sorted((VECTORS / codec).glob("*.tw")):
        by_hand = {c: written.get(path.stem, {}).get(c, "") for c in BY_HAND}
        rows.append(derived(path) | by_hand)
    return rows


def invalid_table() -> list[Row]:
    """Rows of the invalid buffers."""
    folder = VECTORS / "invalid"
    reasons = json.loads((folder / "reasons.json").read_text())
    return [
        {"name": name, "reason": reason, "tw": sha256(folder / f"{name}.tw")}
        for name, reason in sorted(reasons.items())
    ]


def text(columns: tuple[str, ...], rows: list[Row]) -> str:
    """A table as tab-separated text."""
    lines = [columns, *(tuple(row[c] for c in columns) for row in rows)]
    return "".join("\t".join(line) + "\n" for line in lines)


def tables() -> dict[str, str]:
    """What each table should hold, by the name of its file."""
    found = {}
    for codec in tw.list_codecs():
        columns = (*COLUMNS, "base") if tw.codec(codec).needs_base else COLUMNS
        found[f"{codec}.tsv"] = text(columns, valid_table(codec))
    return found | {"invalid.tsv": text(INVALID_COLUMNS, invalid_table())}


def main() -> int:
    """Write the tables; 1 if a vector has no purpose."""
    missing = 0
    for name, content in tables().items():
        (TABLES / name).write_text(content)
        for row in read(TABLES / name).values():
            if row.get("purpose") == "":
                print(f"no purpose in {name}: {row['name']}")
                missing = 1
    return missing


if __name__ == "__main__":
    sys.exit(main())
