"""files.md and files.png from files_cpu.json and files_gpu.json, which bench_files.py writes.

report.py calls it; nothing here needs a GPU, and one of the two records is enough.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from file_timing import (
    COPY,
    IN_MEMORY,
    INTO,
    RAW,
    SAFETENSORS,
    TIGHTWIRE,
    TO_NUMPY,
)
from gpu_report import Goal

GIB = 1 << 30
#: Of a limit that was measured: from here on it counts as reached.
AT_LIMIT = 0.9
#: Panels of the plot on one line.
ACROSS = 4
HEADINGS = {"cpu": "On the CPU", "gpu": "On the GPU"}
HEAD = """\
Tensors are bfloat16, N(0, 0.02), in matrices of a transformer; small tensors have 100 KiB each.
GB/s counts the tensors' bytes. Contestants take turns; best and median are of the runs after the
first, which has a column of its own. Every run's result was checked bit for bit, outside the clock.
Files are synced within the clock when they are written, and in the page cache when they are read,
unless it says cold. On the CPU each page of a loaded tensor is read within the clock: one byte of
it, which is all that ever happens to the file that safetensors.torch maps. "x" is the speed over
that of the line that is printed bold, best over best."""


def rows_of(record: Mapping[str, Any], name: str, cold: bool = False) -> dict[str, dict[str, Any]]:
    """Rows of one case that have a speed, by contestant."""
    for case in record.get("cases", []):
        if (case["name"], case["cold"]) == (name, cold):
            return {row["name"]: row for row in case["rows"] if "GB/s" in row}
    return {}


def over(record: Mapping[str, Any], case: str, name: str, others: Sequence[str]) -> float:
    """Speed of a contestant over that of the fastest of others; NaN if either has none."""
    rows = rows_of(record, case)
    speeds = [rows[other]["GB/s"] for other in others if other in rows]
    return rows[name]["GB/s"] / max(speeds) if name in rows and speeds else math.nan


def baseline_of(record: Mapping[str, Any], name: str) -> str:
    """Whom a case is compared with, "" if it was not measured."""
    return next((c["baseline"] for c in record.get("cases", []) if c["name"] == name), "")


def goals(cpu: Mapping[str, Any], gpu: Mapping[str, Any]) -> list[Goal]:
    """The figures asked for; NaN where one was not measured."""
    found = []
    for case in ("compress", "decompress"):
        zstd = baseline_of(cpu, case)
        value = over(cpu, case, TIGHTWIRE, [zstd])
        found.append(Goal(f"`tightwire {case}`, speed over {zstd}", value, "least", 1.0))
    for case in ("compress", "decompress"):
        value = 1 / over(cpu, f"{case}, directory", TIGHTWIRE, [COPY])
        name = f"`tightwire {case}` of a directory, time over cp (or the next)"
        found.append(Goal(name, value, "most", 1.3))
        mine, limit = (
            rows_of(cpu, which).get(row, {}).get("GB/s", math.nan)
            for which, row in ((f"{case}, directory", TIGHTWIRE), (case, IN_MEMORY))
        )
        name = f"`tightwire {case}` of a directory, speed over the codec's in memory"
        found.append(Goal(name, mine / limit, "least", AT_LIMIT))
    value = over(cpu, "load", TO_NUMPY, [SAFETENSORS])
    found.append(Goal("load on the CPU, speed over safetensors", value, "least", 1.0))
    load, save, small = "load to the GPU", "save from the GPU", "load to the GPU, small tensors"
    for name in (TIGHTWIRE, INTO):
        value = over(gpu, load, name, [SAFETENSORS])
        found.append(Goal(f"{load}, {name}, speed over safetensors", value, "least", 5.0))
    value = over(gpu, load, TIGHTWIRE, [RAW])
    found.append(Goal(f"{load}, speed over its reader on plain bytes", value, "least", 1.15))
    large, many = (rows_of(gpu, case).get(TIGHTWIRE, {}).get("GB/s") for case in (load, small))
    value = many / large if many and large else math.nan
    found.append(Goal(f"{small}, of the speed of large ones", value, "least", 0.5))
    value = over(gpu, save, TIGHTWIRE, [SAFETENSORS])
    limit = max((r["GB/s"] for r in rows_of(gpu, "the file system's limit").values()), default=0)
    mine = rows_of(gpu, save).get(TIGHTWIRE, {}).get("GB/s", math.nan)
    found.append(Goal(f"{save}, speed over safetensors (or the next)", value, "least", 5.0))
    value = mine / limit if limit else math.nan
    found.append(Goal(f"{save}, of the file system's limit", value, "least", AT_LIMIT))
    for row in gpu.get("first_loads", []):
        if row["name"] == TIGHTWIRE and row.get("pinned_nbytes") is not None:
            value = (row["resident_growth_nbytes"] + row["pinned_nbytes"]) / GIB
            found.append(Goal(f"{load}, host memory, GiB", value, "most", 1.0))
    return [goal for goal in found if not math.isnan(goal.value)]


def case_lines(case: Mapping[str, Any]) -> list[str]:
    """Heading and table of a case, and what is missing or went wrong."""
    cold = ", cold" if case["cold"] else ""
    lines = [
        "",
        f"### {case['name'].capitalize().replace('gpu', 'GPU')}{cold}: "
        f"{case['nbytes'] / 1e6:,.0f} MB, {case['tensors']:,} tensors",
        "",
        "| | GB/s, best | median | x | best s | median s | first s | file, MB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    left_out = []
    for row in case["rows"]:
        if "GB/s" not in row:
            left_out.append(f"- {row['name']}: {row.get('error') or row['missing']}")
            continue
        name = f"**{row['name']}**" if row["name"] == case["baseline"] else row["name"]
        ratio = f"{row['of_baseline']:.2f}" if "of_baseline" in row else ""
        file = f"{row['file_nbytes'] / 1e6:,.1f}" if "file_nbytes" in row else ""
        seconds = " | ".join(f"{row[f'{which}_s']:.3f}" for which in ("best", "median", "first"))
        lines.append(
            f"| {name} | {row['GB/s']:.2f} | {row['median_GB/s']:.2f} | {ratio} | {seconds} "
            f"| {file} |"
        )
    return lines + (["", "Not measured:", "", *left_out] if left_out else [])


def first_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Time and host memory of first loads."""
    if not rows:
        return []
    lines = [
        "",
        "### First load to the GPU",
        "",
        "Of the large file, in a new process that has loaded a small one. Host memory in MiB: by "
        "how much resident memory grows at most, how much of that is anonymous (not mapped from "
        "files), and PyTorch's pinned memory. The result, on the GPU, is not among it.",
        "",
        "| | s | GB/s | resident | anonymous | pinned |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        fields = ("resident_growth_nbytes", "anonymous_growth_nbytes", "pinned_nbytes")
        cells = ["" if row.get(f) is None else f"{row[f] / 2**20:,.0f}" for f in fields]
        cells = [f"{row[f]:.2f}" if f in row else "" for f in ("first_s", "GB/s")] + cells
        told = row.get("error") or row.get("missing")
        lines.append(f"| {row['name']}{f': {told}' if told else ''} | {' | '.join(cells)} |")
    return lines


def part_lines(part: str, record: Mapping[str, Any]) -> list[str]:
    """The part of the page that one record makes."""
    machine, settings = record["machine"], record["settings"]
    named = {k: v for k, v in record["versions"].items() if v} | {"zstd": settings["zstd"]}
    versions = ", ".join(f"{name} {version}" for name, version in named.items() if version)
    gpu = f"{machine['gpu']}, driver {machine['driver']}; " if "gpu" in machine else ""
    lines = [
        "",
        f"## {HEADINGS[part]}",
        "",
        f"{gpu}{machine['cpu']}, {machine['cores']} cores; files "
        f"on {settings['file_system']}; {versions}; {record['date']}.",
    ]
    if settings["quick"]:
        lines += ["", "Made with `--quick`: the sizes are too small for speeds to mean anything."]
    for case in record["cases"]:
        lines += case_lines(case)
    return lines + first_lines(record.get("first_loads", []))


def page_lines(records: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The whole page."""
    lines = [
        "# Speed of files",
        "",
        "Made by `benchmarks/report.py` from files_cpu.json and files_gpu.json, which "
        "`benchmarks/bench_files.py` writes.",
        "",
        HEAD,
        "",
        "![GB/s of each contestant](files.png)",
        "",
        "## Figures asked for",
        "",
        f"A limit counts as reached at {AT_LIMIT} of it.",
        "",
        "| | measured | asked | |",
        "|---|---|---|---|",
    ]
    for goal in goals(records.get("cpu", {}), records.get("gpu", {})):
        asked = f"at {goal.bound} {goal.asked:.4g}"
        lines.append(f"| {goal.name} | {goal.shown} | {asked} | {'' if goal.met else 'not met'} |")
    for part, record in records.items():
        lines += part_lines(part, record)
    return lines


def plot(records: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Bars of GB/s, a panel per case with a warm cache; each record begins a new line."""
    from matplotlib.figure import Figure

    from tightwire.storage import save_figure

    shown = []
    for record in records.values():
        warm = [case for case in record["cases"] if not case["cold"]]
        shown += [warm[i : i + ACROSS] for i in range(0, len(warm), ACROSS)]
    figure = Figure(figsize=(4.6 * ACROSS, 2.2 * len(shown)), layout="constrained")
    panels = figure.subplots(len(shown), ACROSS, squeeze=False)
    for line, cases in zip(panels, shown, strict=True):
        for axes in line[len(cases) :]:
            axes.set_axis_off()
        for axes, case in zip(line, cases, strict=False):
            rows = [row for row in case["rows"] if "GB/s" in row][::-1]
            colors = ["C0" if row["name"].startswith(TIGHTWIRE) else "C7" for row in rows]
            bars = axes.barh([r["name"] for r in rows], [r["GB/s"] for r in rows], color=colors)
            axes.bar_label(bars, fmt="%.2f", fontsize=7, padding=2)
            axes.tick_params(axis="y", labelsize=7)
            axes.set_title(case["name"], fontsize=9)
            axes.set_xlabel("GB/s of tensors", fontsize=8)
            axes.margins(x=0.2)
    machines = {r["machine"].get("gpu", r["machine"]["cpu"]): None for r in records.values()}
    dates = sorted({r["date"] for r in records.values()})
    figure.suptitle(f"Files of bfloat16: {'; '.join(machines)}; {', '.join(dates)}")
    save_figure(figure, path)


def write_page(folder: Path) -> bool:
    """Write files.md and files.png from the records in `folder`; False if there are none."""
    files = {part: folder / f"files_{part}.json" for part in HEADINGS}
    records = {p: json.loads(file.read_text()) for p, file in files.items() if file.exists()}
    if not records:
        return False
    plot(records, folder / "files.png")
    (folder / "files.md").write_text("\n".join(page_lines(records)) + "\n")
    return True
