"""Turn lossless.json into a page; report.py calls it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def lines(recorded: dict[str, Any]) -> list[str]:
    """The page."""
    versions = ", ".join(f"{name} {number}" for name, number in recorded["versions"].items())
    page = [
        "# Lossless codecs beside other libraries",
        "",
        f"By `study_lossless.py`, {recorded['date']}, one thread of a machine of "
        f"{recorded['cores']} cores ({recorded['machine']}); {versions}. Whole calls, ours with "
        "checksums; every result was compared with its input, and the fastest of some passes "
        "counts. *ratio*: packed bytes, headers included, over those of the tensors; speeds in "
        "GB/s of tensor bytes.",
        "",
    ]
    for name, found in recorded["data"].items():
        page += [f"## {name}", "", f"{found['nbytes'] / 1e6:.0f} MB.", ""]
        page += ["| | ratio | encode | decode |", "|---|---|---|---|"]
        for speed in found["speeds"].values():
            encode, decode = speed["encode_gbps"], speed["decode_gbps"]
            page.append(f"| {speed['name']} | {speed['ratio']:.4f} | {encode:.2f} | {decode:.2f} |")
        page.append("")
    return page[:-1]


def write(folder: Path) -> bool:
    """Write lossless.md if there is a record; whether there is."""
    record = folder / "lossless.json"
    if not record.exists():
        return False
    page = "\n".join(lines(json.loads(record.read_text())))
    (folder / "lossless.md").write_text(page + "\n")
    return True
