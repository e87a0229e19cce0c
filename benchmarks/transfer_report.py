"""Turn transfer.jsonl into a page; report.py calls it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rows import heading, places, read

NATIVE, WHOLE = "transfer, broadcast", "transfer, everything"
#: How many times as fast as the broadcast is asked for, where links have 25 GB/s.
ASKED = {WHOLE: 1.3, "transfer, 1 %": 20.0}
#: Most of a pause, as a share of a broadcast, which is the load of everything.
PAUSE = 0.1

HEAD = """\
# Weight transfer

Made by `benchmarks/report.py` from what `benchmarks/bench_transfer.py` recorded; its first lines
say how it measures. *Of the bytes*: what the publisher broadcast in a round, over the tensors'
bytes. *Faster*: how many times as fast as `torch.distributed.broadcast` of the same tensors; the
pause is given over the time of that broadcast, too."""


def _line(link: str, row: dict[str, Any], native: dict[str, Any]) -> str:
    key = row["key"]
    faster, pause = native["ms"] / row["ms"], row["pause_ms"] / native["ms"]
    asked = ""
    if link == "p2p off" and key in ASKED:
        verdicts = {f"{ASKED[key]:g}": faster >= ASKED[key], f"pause {PAUSE:g}": pause <= PAUSE}
        asked = "; ".join(f"{what}: {'' if met else 'not '}met" for what, met in verdicts.items())
    return (
        f"| {key.removeprefix('transfer, ')} | {row['ms']:.1f} | {row['least_ms']:.1f} | "
        f"{faster:.2f} | {row['pause_ms']:.2f} | {pause:.3f} | {row['sent'] / row['nbytes']:.4f} | "
        f"{asked} |"
    )


def lines(recorded: list[dict[str, Any]]) -> list[str]:
    """The page."""
    page = HEAD.splitlines()
    for place, rows in places(recorded).items():
        native = rows[NATIVE]
        page += ["", *heading(place, rows)]
        page += [
            f"{native['nbytes'] / 2**20:.0f} MiB of bfloat16 in {native['tensors']} tensors; "
            f"whole ones by {native['codec']}; medians of {native['rounds']} rounds. The broadcast "
            f"moved {native['nbytes'] / native['ms'] / 1e6:.1f} GB/s.",
            "",
            "| changed | round, ms | least | faster | pause, ms | of a broadcast | of the bytes | "
            "asked |",
            "|---|---|---|---|---|---|---|---|",
            *(_line(str(place[0]), row, native) for row in rows.values()),
        ]
    return page


def write(folder: Path) -> bool:
    """Write transfer.md if there is a record; whether there is."""
    recorded = read(folder / "transfer.jsonl")
    if recorded:
        (folder / "transfer.md").write_text("\n".join(lines(recorded)) + "\n")
    return bool(recorded)
