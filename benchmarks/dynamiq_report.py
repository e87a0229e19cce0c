"""Turn dynamiq.json and ddp.json into pages and a plot; report.py calls it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from lossy_report import compared, differences, plus_minus, write_page

DEFAULT, MXFP8, BASELINE = "dynamiq any, 5 bits", "MXFP8", "float32"
#: Columns that the plot shows.
PLOTTED = ("GPT", "spread 1.6")
#: The paper's tables 3 (four workloads, 8 ranks, ring), 4 (MMLU, Gemma 1B Chat), 5 (butterfly,
#: MMLU) and 6 (LLaMA 1B Chat, MMLU).
TABLE_3 = {
    DEFAULT: (0.00217, 0.00149, 0.00122, 0.00096),
    "the paper's, 5 bits": (0.00217, 0.00149, 0.00122, 0.00096),
    MXFP8: (0.00591, 0.00320, 0.00308, 0.00299),
    "MXFP6": (0.02332, 0.01350, 0.01458, 0.01298),
    "MXFP4": (0.12080, 0.11059, 0.11583, 0.09039),
    "omnireduce": (0.15499, 0.08044, 0.04676, 0.04530),
    "thc, one norm": (0.00897, 0.11978, 0.15168, 0.19599),
}
TABLE_4 = {
    "the paper's, 3 bits": (0.01603, 0.02334),
    "the paper's, 4 bits": (0.00589, 0.00831),
    "the paper's, 6 bits": (0.00059, 0.00053),
}
TABLE_5 = {DEFAULT: 0.00067, MXFP8: 0.00203, "MXFP4": 0.17058}
TABLE_6 = {
    "uniform, 4 bits": (0.1278, 0.1207),
    "non-uniform, 4 bits": (0.0707, 0.0664),
    "+ variable widths, 4 bits": (0.0198, 0.0130),
    "+ hierarchical scales, 4 bits": (0.0138, 0.0092),
    "the paper's, 4 bits": (0.0091, 0.0059),
}
#: What `any` should be of `pow2` at 5 bits, on gradients of a trained model.
WANTED = 0.65


class Rows:
    """The rows of a file, and their mean errors by column."""

    def __init__(self, recorded: dict[str, Any]) -> None:
        self.columns: list[str] = recorded["setting"]["columns"]
        self._rows: list[dict[str, Any]] = list(recorded["rows"].values())

    def of(self, table: str) -> list[dict[str, Any]]:
        """The rows of a table."""
        return [row for row in self._rows if row["table"] == table]

    def labels(self, table: str) -> list[str]:
        """The labels of a table, each once."""
        return list(dict.fromkeys(row["label"] for row in self.of(table)))

    def scheme(self, label: str) -> dict[str, Any] | None:
        """The row of a scheme by ring, or by cells, at the usual number of ranks, if it is made."""
        return next((row for row in self.of("schemes") if row["label"] == label), None)

    def by_bits(self, start: str) -> list[dict[str, Any]]:
        """Schemes whose label begins so, by their bits."""
        found = [row for row in self.of("schemes") if row["label"].startswith(start)]
        return sorted(found, key=lambda row: float(row["bits"]))

    def by_ranks(self, label: str) -> list[dict[str, Any]]:
        """The rows of a scheme by its number of ranks."""
        found = [row for row in self.of("ranks") + self.of("schemes") if row["label"] == label]
        return sorted(found, key=lambda row: int(row["ranks"]))


def mean(row: dict[str, Any], column: str) -> float:
    """The mean error over draws."""
    return float(np.mean(row["vnmse"][column]))


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    """A table and an empty line, if it has lines."""
    if not lines:
        return []
    rows = [f"| {' | '.join(cells)} |" for cells in (head, *lines)]
    return [rows[0], "|" + "---|" * len(head), *rows[1:], ""]


def cells(row: dict[str, Any], columns: Sequence[str]) -> list[str]:
    """Errors as they stand in a table."""
    return [f"{mean(row, column):.2e}" for column in columns]


def figures(values: Sequence[float]) -> str:
    """The paper's figures, as they stand in a table."""
    return ", ".join(f"{v:.2e}" for v in values)


def bits_to_meet(rows: Sequence[dict[str, Any]], target: float, column: str) -> float | None:
    """Bits at which the error falls to `target`, its logarithm interpolated between rows.

    The first row's if it is there at once, None if it never is.
    """
    before: tuple[float, float] | None = None
    for row in rows:
        bits, error = float(row["bits"]), math.log(mean(row, column))
        if error <= math.log(target):
            if before is None:
                return bits
            share = (before[1] - math.log(target)) / (before[1] - error)
            return before[0] + share * (bits - before[0])
        before = bits, error
    return None


def aims(rows: Rows) -> list[str]:
    """What was aimed at, as far as the rows are made that tell it."""
    lines = []
    anys, pow2 = rows.scheme(DEFAULT), rows.scheme("dynamiq pow2, 5 bits")
    if anys and pow2:
        ratios = [mean(anys, c) / mean(pow2, c) for c in rows.columns]
        named = ", ".join(f"{c} {r:.2f}" for c, r in zip(rows.columns, ratios, strict=True))
        lines.append(
            f"- Error of any over pow2 at 5 bits: {named}. Aim on a trained model's gradients: at "
            f"most {WANTED}."
        )
    mx, ladder = rows.scheme(MXFP8), rows.by_bits("dynamiq any")
    if mx and ladder:
        found = [bits_to_meet(ladder, mean(mx, c), c) for c in rows.columns]
        named = ", ".join(
            f"{c} {'more than measured' if bits is None else f'{bits:.2f}'}"
            for c, bits in zip(rows.columns, found, strict=True)
        )
        lines.append(f"- Bits at which any meets the error of MXFP8 ({mx['bits']:.2f}): {named}.")
    return lines


def error_lines(recorded: dict[str, Any]) -> list[str]:
    """The page of the study of errors without the part that is written by hand."""
    rows, setting, machine = Rows(recorded), recorded["setting"], recorded["machine"]
    gpt, columns = recorded["gpt"], rows.columns
    named = ", ".join(f"{k} {v}" for k, v in machine["versions"].items())
    usual = [row for row in (rows.scheme(DEFAULT),) if row]
    lines = [
        "# Errors of sums over ranks: dynamiq and others",
        "",
        "vNMSE, sum((x - y)^2) / sum(x^2), of the sum that all ranks get, bit for bit the same. "
        f"GPT: gradients of all {gpt['parameters']} parameters of the model of [the accuracy "
        f"study](accuracy.md) after {setting['steps']} steps in one process (validation loss "
        f"{gpt['loss']:.3f}), each rank's of {setting['batch']} windows of its own; one layer: "
        f"of those, what {gpt['layer']} has. The root mean squares of the super-groups of the sum "
        f"have a standard deviation of {gpt['locality'][0]:.2f}, of the layer's of "
        f"{gpt['locality'][1]:.2f} (ln). Spread s: {setting['elements']} values of Student's t(4) "
        "with scales for each 256 elements whose ln is N(0, s), the same on all ranks.",
        "",
        f"By `benchmarks/study_dynamiq.py` on {machine['cpu']}, {machine['cores']} cores; {named}; "
        f"{recorded['date']}. Means over draws ({setting['draws']}; from {setting['many_ranks']} "
        f"ranks on 1); {setting['ranks']} ranks if nothing else is said. Ranks are threads that "
        "run the library's ring over a transport in memory; thc and omnireduce are sums of cells. "
        "Bits: of a whole buffer for each element. The paper's figures are of other models: they "
        "say what order to expect.",
        "",
        *aims(rows),
        "",
        "## Schemes and budgets",
        "",
    ]
    paper = {label: ("3", figures(v)) for label, v in TABLE_3.items()}
    paper |= {label: ("4", figures(v)) for label, v in TABLE_4.items()}
    lines += table(
        ["scheme", "bits", *columns, "paper", "its table"],
        [
            [
                r["label"],
                f"{r['bits']:.2f}",
                *cells(r, columns),
                *paper.get(r["label"], ("", ""))[::-1],
            ]
            for r in rows.of("schemes")
        ],
    )
    lines += [
        "Table 3: BERT-large MaskedLM, LLaMA 1B Chat, Gemma 1B Chat, LLaMA 1B MMLU, by ring on 8 "
        "GPUs; table 4: LLaMA 1B MMLU, Gemma 1B Chat. Scales agreed on: codec mx "
        f'with scale_rule="agreed" and AutoScale, on at most {setting["scaled"]} elements '
        "(appendix C of the paper, which measured MXFP so, with scales that are no powers of two).",
        "",
        "![Errors by bits and by ranks](dynamiq.png)",
        "",
        "## Step by step",
        "",
    ]
    last = rows.scheme("the paper's, 4 bits")
    steps = rows.of("steps")
    steps[4:4] = [last] if last and len(steps) >= 4 else []
    lines += table(
        ["", *columns, "paper, table 6"],
        [
            [
                "+ correlated rounding, 4 bits" if r is last else r["label"],
                *cells(r, columns),
                figures(TABLE_6.get(r["label"], ())),
            ]
            for r in steps
        ],
    )
    lines += [
        "Table 6: LLaMA 1B Chat, LLaMA 1B MMLU. A budget counts scales here: of 4 bits a fixed "
        "width can spend 3 on codes, of 4.5625 bits 4.",
        "",
        "## Components",
        "",
        "Each row changes one thing of the default, at 5 bits.",
        "",
    ]
    lines += table(
        ["", *columns],
        [
            ["default" if r in usual else r["label"], *cells(r, columns)]
            for r in usual + rows.of("components")
        ],
    )
    lines += ["## Topologies", ""]
    topologies = rows.of("topologies")
    labels = rows.labels("topologies")
    rings = [row for row in map(rows.scheme, labels) if row]
    lines += table(
        ["scheme", "topology", *columns, "paper, table 5"],
        [
            [
                r["label"],
                r["how"],
                *cells(r, columns),
                figures([TABLE_5[r["label"]]] if r["how"] == "butterfly" else ()),
            ]
            for r in (
                row for label in labels for row in rings + topologies if row["label"] == label
            )
        ],
    )
    lines += ["## Numbers of ranks", ""]
    lines += table(
        ["scheme", "ranks", "bits", *columns],
        [
            [label, str(r["ranks"]), f"{r['bits']:.2f}", *cells(r, columns)]
            for label in rows.labels("ranks")
            for r in rows.by_ranks(label)
        ],
    )
    lines.append(
        "The paper's figures 10 and 11 are of this kind. Cells of thc have 16 bits beyond 8 ranks; "
        "the paper's have 12."
    )
    return lines


def plot(recorded: dict[str, Any], path: Path) -> None:
    """Errors by bits at the usual number of ranks, and by ranks."""
    from matplotlib.figure import Figure

    rows = Rows(recorded)
    figure = Figure(figsize=(12, 9), layout="constrained")
    families = {
        "dynamiq any": rows.by_bits("dynamiq any"),
        "dynamiq pow2": rows.by_bits("dynamiq pow2"),
        "the paper's": rows.by_bits("the paper's"),
        "MXFP": [r for r in rows.by_bits("MXFP") if r["how"] == "ring"],
        "thc": [r for r in (rows.scheme("thc"),) if r],
        "omnireduce": [r for r in (rows.scheme("omnireduce"),) if r],
    }
    by_ranks = {label: rows.by_ranks(label) for label in rows.labels("ranks")}
    shown = (("bits", "bits an element", families), ("ranks", "ranks", by_ranks))
    for line, column in zip(figure.subplots(2, 2), PLOTTED, strict=True):
        for axes, (key, named, lines) in zip(line, shown, strict=True):
            for label, found in lines.items():
                x, y = [r[key] for r in found], [mean(r, column) for r in found]
                axes.plot(x, y, "o-", label=label)
            axes.set(title=column, xlabel=named, ylabel="vNMSE", yscale="log")
            if lines:
                axes.legend(fontsize=8)
        line[1].set_xscale("log", base=2)
    figure.savefig(path, dpi=100)


def training_lines(recorded: dict[str, Any]) -> list[str]:
    """The page of training under DDP without the part that is written by hand."""
    setting, machine, first = recorded["setting"], recorded["machine"], recorded["runs"][0]
    named = ", ".join(f"{k} {v}" for k, v in machine["versions"].items())
    configs: dict[str, dict[int, dict[str, Any]]] = {}
    for run in recorded["runs"]:
        configs.setdefault(run["config"], {})[run["seed"]] = run
    base = configs[BASELINE]
    losses = [run["loss"] for run in base.values()]
    plain = float(np.mean([run["wire_bytes"] for run in base.values()]))
    tokens = setting["ranks"] * setting["batch"] * setting["context"]
    lines = [
        "# Training under DDP with compressed sums of gradients",
        "",
        f"The byte-level GPT of [the accuracy study](accuracy.md), {first['parameters'] / 1e6:.2f} "
        f"M parameters, under DDP with {setting['ranks']} ranks on gloo: {setting['steps']} steps "
        f"of {tokens} bytes of text, {setting['validation_windows']} windows for validation. "
        "Gradients are float32. float32: the network's all-reduce; dynamiq and mx by ring, every "
        "rank encoding the sum so far; thc: 8-bit cells, added up by the network's all-reduce.",
        "",
        f"By `benchmarks/study_ddp.py` on {machine['cpu']}, {machine['cores']} cores, one thread a "
        f"rank; {named}; {recorded['date']}. All ranks ended with the same bits. Loss in nats; ± "
        "is the standard deviation over seeds, of the loss or of its difference from float32 with "
        "the same seed; the interval is Student's, 95 %, for the mean difference; % is of the mean "
        "loss of float32 (aim for dynamiq at 5 bits: within 0.5). MB: what a rank sent, statistics "
        "included, a network's all-reduce counted as a ring.",
        "",
    ]
    found = []
    for config, runs in configs.items():
        values = [run["loss"] for run in runs.values()]
        wire = float(np.mean([run["wire_bytes"] for run in runs.values()]))
        apart = differences(runs, base)
        against = ("", "", "") if config == BASELINE or not apart else compared(apart, losses)
        loss = f"{np.mean(values):.4f}{plus_minus(values)}"
        sizes = [f"{wire / 1e6:.1f}", f"{wire / plain:.3f}"]
        found.append([config, str(len(runs)), loss, *against, *sizes])
    head = ["gradients", "seeds", "validation loss", "difference", "95 % interval", "%"]
    lines += table([*head, "MB", "ratio"], found)
    seeds = sorted(base)
    lines += table(
        ["final loss, seed", *map(str, seeds)],
        [
            [config, *(f"{runs[s]['loss']:.4f}" if s in runs else "" for s in seeds)]
            for config, runs in configs.items()
        ],
    )
    return lines[:-1]


def write_pages(folder: Path) -> list[str]:
    """Write the pages of what is recorded, and return their links."""
    links = []
    if (folder / "dynamiq.json").exists():
        recorded = json.loads((folder / "dynamiq.json").read_text())
        write_page(folder / "dynamiq.md", error_lines(recorded))
        plot(recorded, folder / "dynamiq.png")
        links.append("Sums over ranks, by budget, component and ranks: [dynamiq.md](dynamiq.md)")
    if (folder / "ddp.json").exists():
        recorded = json.loads((folder / "ddp.json").read_text())
        write_page(folder / "ddp.md", training_lines(recorded))
        links.append("Training a small GPT with such sums: [ddp.md](ddp.md)")
    return links
