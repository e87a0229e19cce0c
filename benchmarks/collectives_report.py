"""collectives.md from the collectives_*.json that bench_collectives.py writes; see report.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

BOUNDS = "## What bounds them"
#: The speedups that are aimed at: link, collectives, at least.
TARGETS = (
    ("p2p off", ("all_gather", "all_to_all"), 1.30),
    ("p2p off", ("reduce_scatter", "all_reduce"), 2.2),
    ("sockets", ("all_gather", "all_to_all", "reduce_scatter", "all_reduce"), 1.38),
)
#: Of all-reduces by lossy codecs without peer-to-peer.
LOSSY_LEAST = {"dynamiq": 2.0}
TWO_SHOT_LEAST = 1.7
#: Of reduce-scatters by sketch without peer-to-peer.
SKETCH_LEAST = 3.0
#: On nvlink, of the path that the switch takes.
NEVER_UNDER = 0.98


HEAD = """\
{gpu}, {versions}; {date}. bfloat16 N(0, 0.02); MiB of one rank's input; milliseconds of the slowest
rank, median; speedups over NCCL's own call on the same tensors (sums: over NCCL in float32; here
bfloat16 travels and float32 is summed). Results were checked bit for bit before and after. Links:
see bench_collectives.py."""


def page_lines(results: list[dict[str, Any]]) -> list[str]:
    """The page, up to what is written by hand."""
    first = results[0]
    versions = ", ".join(f"{name} {version}" for name, version in first["versions"].items())
    head = HEAD.format(gpu=first["machine"]["gpu"], versions=versions, date=first["date"])
    lines = ["# Collectives beside NCCL's", "", head]
    for result in results:
        lines += ["", f"## {result['machine']['gpus']} GPUs", *_tables(result)]
    return lines


def _tables(result: dict[str, Any]) -> list[str]:
    measured = [
        [
            row["link"],
            row["collective"],
            row["mib"],
            f"{row['native_ms']['median']:.2f}",
            f"{row['compressed']['ratio']:.3f}",
            *(f"{row[f'{path}_speedup']:.2f}" for path in ("compressed", "pipelined", "auto")),
            row["auto"]["reason"],
            _asked(row),
        ]
        for row in result["measured"]
    ]
    small = [
        [
            row["collective"],
            row["nbytes"],
            f"{row['native_us']:.1f}",
            f"{row['auto_us']:.1f}",
            f"{row['auto_us'] - row['native_us']:.1f}",
        ]
        for row in result["small"]
    ]
    late = [
        [f"{row['late_ms']:.0f} ms", row["link"], row["mib"], row["sizes"], f"{row['ms']:.1f}"]
        for row in result["late"]
    ]
    lossy = [
        [
            row["link"],
            f"{row['codec']}, {row.get('topology', 'two-shot')}",
            row["mib"],
            f"{row['native_ms']['median']:.2f}",
            f"{row['compressed']['ratio']:.3f}",
            f"{row['compressed_error']:.1e}",
            *(f"{row[f'{path}_speedup']:.2f}" for path in ("compressed", "auto")),
            row["auto"]["reason"],
            _asked_of_lossy(row),
        ]
        for row in result.get("lossy", [])
    ]
    sketches = [
        [
            row["link"],
            row["mib"],
            "yes" if row["accumulate"] else "no",
            f"{row['native_ms']['median']:.2f}",
            f"{row['sketch_ms']['median']:.2f}",
            f"{row['ratio']:.3f}",
            f"{row['density']:.3f}",
            row["rounds"],
            f"{row['speedup']:.2f}",
            _asked_of_sketch(row),
        ]
        for row in result.get("sketches", [])
    ]
    paths = "compressed | pipelined | switch | the switch says"
    return [
        *_table(f"link | collective | MiB | NCCL ms | ratio | {paths} | asked", measured),
        *_table(
            "all-reduce | codec | MiB | NCCL ms, bfloat16 | ratio | vNMSE | compressed | switch "
            "| the switch says | asked",
            lossy,
        ),
        *_table(
            "reduce-scatter by sketch, 10x | MiB, float32 | accumulates | NCCL ms, float32 | ms "
            "| ratio | density | rounds | speedup | asked",
            sketches,
        ),
        *_table("small calls, nvlink | bytes | NCCL us | switch us | added", small),
        *_table("all-to-all, last rank late | link | MiB | sizes | ms in all", late),
    ]


def _table(head: str, rows: list[list[Any]]) -> list[str]:
    """A table in Markdown, nothing if it has no rows."""
    if not rows:
        return []
    lines = ["", f"| {head} |", "|---" * (head.count("|") + 1) + "|"]
    return lines + [f"| {' | '.join(map(str, row))} |" for row in rows]


def _asked(row: dict[str, Any]) -> str:
    if row["link"] == "nvlink":
        met = row["auto_speedup"] >= NEVER_UNDER
        return f"switch {NEVER_UNDER}" + ("" if met else ", not met")
    for link, collectives, least in TARGETS:
        if row["link"] == link and row["collective"] in collectives:
            best = max(row["compressed_speedup"], row["auto_speedup"])
            return f"{least}" + ("" if best >= least else ", not met")
    return ""


def _asked_of_lossy(row: dict[str, Any]) -> str:
    if row["link"] == "nvlink":
        return _asked(row)
    least = LOSSY_LEAST.get(row["codec"], TWO_SHOT_LEAST)
    best = max(row["compressed_speedup"], row["auto_speedup"])
    return f"{least}" + ("" if best >= least else ", not met")


def _asked_of_sketch(row: dict[str, Any]) -> str:
    if row["link"] != "p2p off":
        return ""
    return f"{SKETCH_LEAST}" + ("" if row["speedup"] >= SKETCH_LEAST else ", not met")


def write_page(folder: Path) -> bool:
    """Write collectives.md, keeping what was written by hand; False if nothing is recorded."""
    found = sorted(folder.glob("collectives_*.json"))
    if not found:
        return False
    page = folder / "collectives.md"
    old = page.read_text() if page.exists() else ""
    by_hand = old[old.index(BOUNDS) :] if BOUNDS in old else f"{BOUNDS}\n\n(to be written)\n"
    lines = page_lines([json.loads(path.read_text()) for path in found])
    page.write_text("\n".join(lines) + f"\n\n{by_hand}")
    return True
