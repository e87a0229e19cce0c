"""Records of runs on several ranks: lines of JSON.

A row has a ``key``, which is unique within a kind of network and a number of ranks, and either
results, an ``error``, why it was ``skipped``, or ``began`` and did not end. Of several rows with
one key the last counts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

#: The row that says when a run began, and what it is about.
RUN = "run"
#: What tells the rows of one kind of run from others.
PLACE = ("link", "world")
#: How pages name a network; see bench_collectives.py.
LINKS = {
    "p2p off": "25 GB/s (P2P off)",
    "nvlink": "NVLink",
    "sockets": "sockets",
    "gloo": "gloo, on the CPU",
    "threads": "threads, on the CPU",
}


def read(path: Path) -> list[dict[str, Any]]:
    """The last row of each key, network and number of ranks; a line that was cut off is left out.

    Args:
        path: The record; it may be absent.
    """
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        found[tuple(row[name] for name in (*PLACE, "key"))] = row
    return list(found.values())


def places(rows: Sequence[dict[str, Any]]) -> dict[tuple[Any, ...], dict[str, dict[str, Any]]]:
    """Rows by network and number of ranks, then by key; in the order of LINKS."""
    found: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in PLACE), {})[row["key"]] = row
    order = list(LINKS)
    return dict(sorted(found.items(), key=lambda item: (_rank(order, item[0][0]), item[0][1])))


def _rank(order: Sequence[str], name: str) -> int:
    return order.index(name) if name in order else len(order)


def heading(place: tuple[Any, ...], rows: dict[str, dict[str, Any]]) -> list[str]:
    """The title of a section, and the lines that say where and when it was measured.

    Args:
        place: The network, and the number of ranks.
        rows: Its rows by key, that of the run among them, if there is one.
    """
    link, world = place
    run = rows.get(RUN) or next(iter(rows.values()))
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    by_device: dict[str, list[str]] = {}
    for key, row in rows.items():
        if key != RUN and not why_missing(row):
            by_device.setdefault(row["machine"]["device"], []).append(key)
    # All but the most common one are named with what they measured.
    most = max(by_device, key=lambda device: len(by_device[device]), default="")
    others = [
        f"On {world} x {device}: {'; '.join(keys)}."
        for device, keys in by_device.items()
        if device != most
    ]
    return [
        f"## {LINKS.get(link, link)}, {world} ranks",
        "",
        f"{world} x {most or run['machine']['device']}, {versions}; {run['date']}.",
        *others,
        "",
    ]


def why_missing(row: dict[str, Any] | None) -> str:
    """Why a case has no results, in a word or two; ``""`` if it has."""
    if row is None:
        return "not measured"
    if "error" in row:
        return "failed"
    if "skipped" in row:
        return f"skipped: {row['skipped']}"
    return "cut off" if row.get("began") else ""


def errors(rows: dict[str, dict[str, Any]]) -> list[str]:
    """A list of what has failed, and an empty line."""
    found = [f"- {key}: {row['error'][:300]}" for key, row in rows.items() if "error" in row]
    return ["Failed:", "", *found, ""] if found else []
