"""Turn delta.json into a page; report.py calls it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

#: What other columns there are, if they were installed.
OTHERS = (
    "huffman_of_xor",
    *(f"{name} of XOR" for name in ("zstd -1", "ZipNN", "OpenZL", "blosc2 zstd -1")),
)


def ratios(rows: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """A table of what tensors take."""
    others = [name for name in OTHERS if all(name in row for row in rows.values())]
    names = [name.replace("_of_xor", " of XOR") for name in others]
    yield (
        "| | changed | entropy | delta | over it | ratio | difference | overwrite | "
        f"{' | '.join(names)} |"
    )
    yield "|---|" + "---|" * (7 + len(others))
    for name, row in rows.items():
        ours = row["adaptive"]
        cells = [
            name,
            f"{row['changed']:.2%}",
            f"{row['entropy_bits']:.2f}",
            f"{ours['bits']:.2f}",
            "" if ours["over_entropy"] is None else f"{ours['over_entropy'] - 1:+.1%}",
            f"{ours['ratio']:.4f}",
            f"{row['difference']['ratio']:.4f}",
            f"{row['overwrite']['ratio']:.4f}",
            *(f"{row[other]:.4f}" for other in others),
        ]
        yield f"| {' | '.join(cells)} |"


def lines(recorded: dict[str, Any]) -> list[str]:
    """The page."""
    speed = recorded["speed"]
    columns = list(next(iter(speed.values())))
    return [
        "# Deltas",
        "",
        f"By `study_delta.py`, {recorded['date']}, one thread of the CPU. Steps of AdamW "
        f"of a small transformer after {recorded['steps']} steps; masters in float32, base and "
        "tensor in the dtype named. *entropy*: bits for each changed element by the order-0 "
        "entropy of change and no change given the base's exponent; *delta*: those of the whole "
        "buffer, header and index included, in the form `adaptive`, which is the default; *ratio* "
        "and what follows: bytes over the tensor's, by this form, the others, and other codecs.",
        "",
        *ratios(recorded["adam"]),
        "",
        "Shares of bfloat16, N(0, 0.02), in a step of one rate:",
        "",
        *ratios(recorded["synthetic"]),
        "",
        "Changes of N(0, 0.02) that are no steps:",
        "",
        *ratios(recorded["otherwise"]),
        "",
        "GB/s of tensor bytes, whole calls with checksums and digests, the fastest of some calls:",
        "",
        f"| changed | {' | '.join(columns)} |",
        "|---|" + "---|" * len(columns),
        *(
            f"| {name} | {' | '.join(f'{row[c]:.2f}' for c in columns)} |"
            for name, row in speed.items()
        ),
    ]


def write(folder: Path) -> bool:
    """Write delta.md if there is a record; whether there is."""
    record = folder / "delta.json"
    if not record.exists():
        return False
    page = "\n".join(lines(json.loads(record.read_text())))
    (folder / "delta.md").write_text(page + "\n")
    return True
