"""Pages and plots from what bench_training.py recorded; see report.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rows import LINKS, RUN, errors, heading, places, read, why_missing

NATIVE = "native"
#: By record, the name of the page and its title.
PAGES = {
    "training.jsonl": ("training_steps", "Training steps"),
    "training_wide.jsonl": ("training_wide", "Training steps of a wider model"),
}
#: Step time over native that is asked for, and aimed at: network, case.
TARGETS = {
    ("p2p off", "fsdp, zipccl, network"): (0.85, 0.75),
    ("p2p off", "fsdp float32, zipccl, network, bfloat16 travels"): (0.65, 0.58),
    ("p2p off", "fsdp, mx gradients, network"): (0.75, 0.65),
    ("p2p off", "ddp, zipccl, network"): (0.90, 0.85),
    ("p2p off", "ddp, mx, network"): (0.80, 0.75),
    ("p2p off", "ddp, dynamiq, ring"): (0.75, 0.72),
    ("p2p off", "ddp, dynamiq, network"): (0.75, 0.72),
    ("nvlink", "fsdp, zipccl, peers"): (0.95, 0.88),
}
#: Of cases that choose by themselves, on any network.
AUTO = (1.02, 1.0)
#: What groups of compiled blocks have at the end of their names.
_COMPILED = " compiled"
_COLORS = {
    "fsdp": "#0b7a75",
    "fsdp float32": "#2f87d8",
    "ddp": "#d9742b",
    "tp": "#a06cd5",
    "moe": "#c2497a",
}
_GREY = "#9aa5b1"

HEAD = """\
Made by `benchmarks/report.py` from what `benchmarks/bench_training.py` recorded; its first lines
say how it measures. Milliseconds are medians of the slowest rank. *Of native* is over steps of the
native model before and after, in the same run. *In a row*: steps that the host queues without
waiting between them. *Exposed* is a step's time less that of the same model whose collectives send
nothing. *Bits*: whether parameters have the bits of the native run after the first steps."""
COLUMNS = (
    "call",
    "ms",
    "of native",
    "asked",
    "least ms",
    "in a row ms",
    "host ms",
    "exposed ms",
    "MB a step",
    "loss",
    "bits",
    "GiB",
    "host waits",
    "date",
)


def target(link: str, key: str) -> tuple[float, float] | None:
    """What is asked of a case, and aimed at; the same of compiled blocks."""
    if key.endswith(", auto"):
        return AUTO
    return TARGETS.get((link, key.replace(_COMPILED, "")))


def _asked(link: str, row: dict[str, Any]) -> str:
    found = target(link, row["key"])
    if found is None or "ratio" not in row:
        return ""
    return f"{found[0]:.2f}" + ("" if row["ratio"] <= found[0] else ", not met")


def _sent(row: dict[str, Any]) -> str:
    if row.get("raw_bytes") is None:
        return ""
    raw, wire = row["raw_bytes"], row["wire_bytes"]
    return f"{raw / 1e6:.3g} → {wire / 1e6:.3g} ({wire / max(raw, 1):.3f})"


def _loss(row: dict[str, Any]) -> str:
    own = f"{row['loss']:.4f}"
    return own + (f" ({row['native_loss']:.4f})" if "native_loss" in row else "")


def _bits(row: dict[str, Any]) -> str:
    if "same_bits" not in row:
        return "repeats" if row["repeats"] else "does not repeat"
    if row["same_bits"]:
        return "same"
    if not row["lossless"]:
        return "lossy"
    return "differ" if row["native_repeats"] else "native does not repeat"


def _waits(row: dict[str, Any]) -> str:
    waits = row["waits"]
    if waits is None or "error" in waits:
        return ""
    calls = sum(n for name, n in waits.items() if name.endswith("Synchronize"))
    queries = waits.get("cudaEventQuery", 0)
    return (
        f"{calls} + {queries} queries, {waits['waiting_ms']:.1f} ms, {waits['launches']} launches"
    )


def _cells(link: str, row: dict[str, Any]) -> list[str]:
    memory = row["memory_bytes"]
    return [
        f"{row['step_ms']['median']:.1f}",
        f"{row['ratio']:.3f}" if "ratio" in row else "1",
        _asked(link, row),
        f"{row['step_ms']['least']:.1f}",
        f"{row['in_a_row_ms']:.1f}",
        f"{row['host_ms']['median']:.1f}",
        f"{row['exposed_ms']:.1f}",
        _sent(row),
        _loss(row),
        _bits(row),
        f"{memory / 2**30:.1f}" if memory is not None else "",
        _waits(row),
        row["date"],
    ]


def _model(rows: dict[str, dict[str, Any]]) -> list[str]:
    """The line about the model, and an empty one."""
    some = next((row for row in rows.values() if "loss_steps" in row), None)
    if some is None:
        return []
    sizes = some["setting"]
    return [
        f"A GPT of {sizes['layers']} layers of width {sizes['width']}, "
        f"{sizes['batch']} x {sizes['tokens']} tokens a rank, AdamW; losses after "
        f"{some['loss_steps']} steps, those of the native run in brackets.",
        "",
    ]


def _section(place: tuple[Any, ...], rows: dict[str, dict[str, Any]]) -> list[str]:
    run = rows[RUN]
    lines = heading(place, rows) + _model(rows)
    for group, text in run["groups"].items():
        cases = [(name, call) for case_group, name, call in run["cases"] if case_group == group]
        measured, others = [], []
        for name, call in cases:
            row = rows.get(f"{group}, {name}")
            missing = why_missing(row)
            shown = f"`{call}`" if call else NATIVE
            if row is None:
                others.append(shown)
            elif missing:
                others.append(f"{shown} ({missing})")
            else:
                measured.append([shown, *_cells(place[0], row)])
        lines += [f"### {text[0].upper()}{text[1:]}", ""]
        if measured:
            lines += [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
            lines += [f"| {' | '.join(cells)} |" for cells in measured] + [""]
        if not any(f"{group}, {name}" in rows for name, _ in cases):
            lines += ["Not measured.", ""]
        elif others:
            lines += [f"Not measured: {'; '.join(others)}.", ""]
    return lines + errors(rows)


def plot(found: dict[tuple[Any, ...], dict[str, dict[str, Any]]], path: Path) -> None:
    """Draw the time of a step relative to the native one: a panel for each network.

    Args:
        found: As ``places`` returns it.
        path: The SVG.
    """
    import matplotlib
    from matplotlib.figure import Figure

    cases = max((rows[RUN]["cases"] for rows in found.values()), key=len)
    shown = [
        (group, name)
        for group, name, _ in cases
        if name != NATIVE
        and any(not why_missing(rows.get(f"{group}, {name}")) for rows in found.values())
    ][::-1]
    with matplotlib.rc_context({"svg.hashsalt": "tightwire", "font.size": 9}):
        size = (2.4 + 3.6 * len(found), 0.6 + 0.22 * len(shown))
        figure = Figure(figsize=size, layout="constrained")
        panels = figure.subplots(1, len(found), sharey=True, squeeze=False)[0]
        for axes, ((link, world), rows) in zip(panels, found.items(), strict=True):
            for y, (group, name) in enumerate(shown):
                key = f"{group}, {name}"
                row = rows.get(key)
                missing = why_missing(row).partition(":")[0]
                if row is None or missing:
                    axes.text(0.02, y, missing, va="center", color=_GREY, fontsize=8)
                    continue
                axes.barh(y, row["ratio"], color=_COLORS[group.removesuffix(_COMPILED)])
                label = f"{row['ratio']:.2f}"
                axes.text(0.03, y, label, va="center", fontsize=8, color="white")
                asked = target(link, key)
                if asked:
                    axes.plot([asked[0]] * 2, [y - 0.45, y + 0.45], color="black", linewidth=1.2)
            axes.axvline(1, color=_GREY, linewidth=0.8)
            names = [f"{group}: {name}" for group, name in shown]
            axes.set_yticks(range(len(shown)), names)
            title = f"{LINKS.get(link, link)}, {world} ranks"
            axes.set_title(f"{title}\nstep time over native", loc="left", fontsize=9)
            axes.set_xlim(left=0)
            axes.set_ylim(-0.7, len(shown) - 0.3)
            axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, metadata={"Date": None})


def write_pages(folder: Path) -> list[str]:
    """Write the pages of which there is a record, and their plots.

    Returns:
        Their names, without an ending.
    """
    written = []
    for record, (name, title) in PAGES.items():
        found = places(read(folder / record))
        if not found:
            continue
        plot(found, folder / f"{name}.svg")
        lines = [f"# {title}", "", HEAD, "", f"![step time over native]({name}.svg)", ""]
        lines += ["In the plot lines mark what is asked; shorter bars are better.", ""]
        for place, rows in found.items():
            lines += _section(place, rows)
        (folder / f"{name}.md").write_text("\n".join(lines).rstrip() + "\n")
        written.append(name)
    return written
