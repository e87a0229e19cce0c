"""prepared.md from the prepared.jsonl of bench_peers.py; report.py calls it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

from rows import RUN, errors, heading, places, read, why_missing

MIB = 1 << 10
HEAD = """\
Made by `benchmarks/report.py` from what `benchmarks/bench_peers.py` recorded; its first lines say
how it measures. In a cell: how many times as fast as NCCL a call is, eager, then in a CUDA graph,
and the microseconds until an eager call returns. *peers*: messages are read in the memory of other
GPUs; *network*: NCCL moves them. Messages have checksums, except in rows that say *checksum off*.
Sizes are of one rank's tensor before the call. What was not measured at all is left out."""
#: What keys of messages without checksums end with.
PLAIN = ", checksum off"


class Target(NamedTuple):
    """What is asked of a call, and aimed at: how many times as fast as NCCL, at least."""

    link: str
    collective: str
    codec: str
    route: str
    kib: int
    asked: float
    aim: float
    graph: bool = False


_NVLINK = ("nvlink", "all_gather", "zipccl", "peers")
_SMALL = ("nvlink", "all_reduce", "mx", "peers")
_SLOW = ("p2p off", "zipccl", "network", 64 * MIB)
TARGETS = (
    Target(*_NVLINK, 16 * MIB, 1.05, 1.2),
    Target(*_NVLINK, 64 * MIB, 1.20, 1.4),
    Target(*_NVLINK, 256 * MIB, 1.30, 1.5),
    Target("nvlink", "reduce_scatter", "zipccl", "peers", 256 * MIB, 1.15, 1.3),
    Target("nvlink", "all_reduce", "zipccl", "peers", 256 * MIB, 1.15, 1.3),
    Target("nvlink", "all_reduce", "mx", "peers", 64 * MIB, 1.45, 1.8),
    Target("nvlink", "all_reduce", "taco", "peers", 64 * MIB, 1.3, 1.8),
    Target("nvlink", "all_reduce", "mx", "peers", 256 * MIB, 1.6, 1.8),
    Target("nvlink", "all_reduce", "taco", "peers", 256 * MIB, 1.5, 1.8),
    # 1.1 and .7 of NCCL's time.
    *(Target(*_SMALL, kib, 1 / 1.1, 1 / 0.7, True) for kib in (64, 512, 2 * MIB)),
    Target(_SLOW[0], "all_gather", *_SLOW[1:], 1.30, 1.38),
    Target(_SLOW[0], "all_to_all", *_SLOW[1:], 1.25, 1.35),
    Target(_SLOW[0], "reduce_scatter float32", *_SLOW[1:], 2.3, 2.6),
)
#: Microseconds of an eager call until it returns, asked and aimed at.
HOST_US = (150, 80)


def _size(kib: int) -> str:
    return f"{kib // MIB} MiB" if kib >= MIB else f"{kib} KiB"


def _key(collective: str, codec: str, route: str, kib: int) -> str:
    return f"{collective}, {codec}, {route}, {kib} KiB"


def _cell(row: dict[str, Any] | None) -> str:
    missing = why_missing(row)
    if row is None or missing:
        return missing
    graph = row["graph_speedup"]
    return f"{row['speedup']:.2f}; {'-' if graph is None else f'{graph:.2f}'}; {_host(row)}"


def _host(row: dict[str, Any]) -> str:
    return f"{row['eager']['host_us']:.0f} us"


def _natives(rows: dict[str, dict[str, Any]], collective: str, sizes: list[int]) -> list[str]:
    """NCCL's milliseconds by size, the median of all that were measured; in a graph behind it."""
    cells = []
    for kib in sizes:
        some = [
            row
            for row in rows.values()
            if row.get("collective") == collective and row.get("kib") == kib and "native" in row
        ]
        eager = sorted(row["native"]["ms"] for row in some)
        graph = sorted(ms for row in some if (ms := row["native_graph_ms"]) is not None)
        both = [f"{times[len(times) // 2]:.3f}" if times else "-" for times in (eager, graph)]
        cells.append("; ".join(both) if some else why_missing(None))
    return cells


def _asked(link: str, rows: dict[str, dict[str, Any]]) -> list[str]:
    wanted = [target for target in TARGETS if target.link == link]
    if not wanted:
        return []
    lines = ["| asked | at least | aim | measured |", "|---|---|---|---|"]
    for t in wanted:
        key = _key(t.collective, t.codec, t.route, t.kib)
        text = _measured(t, rows.get(key))
        if key + PLAIN in rows:
            text += f"; checksum off: {_measured(t, rows[key + PLAIN])}"
        how = f"{t.collective}, {t.codec}, {t.route}, {_size(t.kib)}"
        how += ", in a graph" if t.graph else ""
        lines.append(f"| {how} | {t.asked:.2f} | {t.aim:.2f} | {text} |")
    hosts = sorted(row["eager"]["host_us"] for row in rows.values() if "eager" in row)
    shown = f"{hosts[len(hosts) // 2]:.0f} (median), {hosts[-1]:.0f} (most)" if hosts else ""
    lines.append(f"| host time of a call, us, at most | {HOST_US[0]} | {HOST_US[1]} | {shown} |")
    return [*lines, ""]


def _measured(target: Target, row: dict[str, Any] | None) -> str:
    missing = why_missing(row)
    if row is None or missing:
        return missing
    found = row["graph_speedup" if target.graph else "speedup"]
    if found is None:
        return "no graph"
    return f"{found:.2f}" if found >= target.asked else f"{found:.2f}, not met"


def _section(place: tuple[Any, ...], rows: dict[str, dict[str, Any]]) -> list[str]:
    run = rows[RUN]
    lines = heading(place, rows) + _asked(place[0], rows)
    measured = {row["kib"] for key, row in rows.items() if key != RUN and "kib" in row}
    sizes = sorted(measured | set(run["kib"]))
    for collective in run["collectives"]:
        table = {"NCCL, ms": _natives(rows, collective, sizes)}
        for codec in run["codecs"]:
            for route in run["routes"]:
                keys = [_key(collective, codec, route, kib) for kib in sizes]
                for end in ("", PLAIN):
                    cells = [_cell(rows.get(key + end)) for key in keys]
                    table[f"{codec}, {route}{end}"] = cells
        lines += _table(collective, [_size(kib) for kib in sizes], table)
    return lines + _uncaptured(rows) + errors(rows)


def _table(title: str, sizes: list[str], table: dict[str, list[str]]) -> list[str]:
    """Rows of cells under a title, without rows and columns of which nothing was measured."""
    missing = why_missing(None)
    table = {name: cells for name, cells in table.items() if set(cells) != {missing}}
    kept = [i for i in range(len(sizes)) if any(cells[i] != missing for cells in table.values())]
    if not kept:
        return []
    head = ["", *(sizes[i] for i in kept)]
    lines = [f"### {title}", "", f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name, cells in table.items():
        lines.append(f"| {' | '.join([name, *(cells[i] for i in kept)])} |")
    return [*lines, ""]


def _uncaptured(rows: dict[str, dict[str, Any]]) -> list[str]:
    """Why calls are not in a graph: a line for each reason, which rank 0 gives for all ranks."""
    reasons: dict[str, list[str]] = {}
    for row in rows.values():
        if row.get("graph_error") is not None:
            collective = row["collective"]
            text = re.sub(r"^rank \d+: \w+: |; rank \d+: .*", "", row["graph_error"], flags=re.S)
            reason = text.replace(collective.split()[0], "a call", 1)[:200]
            reasons.setdefault(reason, []).append(collective)
    found = [f"- {', '.join(dict.fromkeys(some))}: {why}" for why, some in reasons.items()]
    return ["Not captured in a graph:", "", *found, ""] if found else []


def write_page(folder: Path) -> bool:
    """Write prepared.md if there is a record; whether there is."""
    found = places(read(folder / "prepared.jsonl"))
    if not found:
        return False
    lines = ["# Prepared calls beside NCCL's", "", HEAD, ""]
    for place, rows in found.items():
        lines += _section(place, rows)
    (folder / "prepared.md").write_text("\n".join(lines).rstrip() + "\n")
    return True
