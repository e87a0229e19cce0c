"""Turn checkpoints.json into a page; report.py calls it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def lines(recorded: dict[str, Any]) -> list[str]:
    """The page."""
    size, rows = recorded["nbytes"], recorded["rows"]
    page = [
        "# Checkpoints of torch.distributed.checkpoint",
        "",
        f"By `bench_checkpoints.py`, {recorded['date']}, {recorded['world']} ranks over gloo on "
        f"{recorded['cores']} cores ({recorded['machine']}), torch {recorded['torch']}. A state of "
        f"{size / 2**20:.0f} MiB of bfloat16, N(0, 0.02), half of the rows of each tensor on a "
        "rank. *deltas*: a later state, of which 1 % changed, against the checkpoint by zipccl. "
        f"Medians of whole calls of `save` to a new directory of {recorded['folder']}, files "
        "synced, and of `load`; what was loaded was compared. *memory*: what a rank took beyond "
        f"its state, in pieces of {recorded['largest'] / 2**20:.0f} MiB, the largest on a rank.",
        "",
        "| | bytes | save, s | load, s | memory, pieces |",
        "|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        ratio, memory = row["nbytes"] / size, row["memory"] / recorded["largest"]
        page.append(
            f"| {name} | {ratio:.4f} | {row['save']:.2f} | {row['load']:.2f} | {memory:.1f} |"
        )
    return page


def write(folder: Path) -> bool:
    """Write checkpoints.md if there is a record; whether there is."""
    record = folder / "checkpoints.json"
    if not record.exists():
        return False
    page = "\n".join(lines(json.loads(record.read_text())))
    (folder / "checkpoints.md").write_text(page + "\n")
    return True
