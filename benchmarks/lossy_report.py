"""Turn error.json, accuracy.json and tagc.json into pages and a plot; report.py calls it.

What stands on a page from the heading BY_HAND on is written by hand, and kept when the page is made
anew.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

#: Heading of the part of each page that is written by hand.
BY_HAND = "## Against the paper"
BASELINE, UNCOMPRESSED = "bfloat16", "uncompressed"
#: Of TAGC: seconds an iteration and ms/MB of gradients, by FSDP and by TAGC.
TABLE_2 = {
    "all": ((26.8, 28.5), (0.73, 0.64)),
    "non-attention": ((25.2, 22.6), (0.76, 0.51)),
}
#: Quantile .975 of Student's t by the number of pairs, less one.
STUDENT = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776}

#: vNMSE that the design expects: long-tailed, block-local, tiny.
EXPECTED: dict[str, tuple[float, float, float]] = {
    "e4m3, scale per tensor": (6.2e-4, 6.7e-4, 7.0e-4),
    "taco none e4m3": (1.6e-4, 5.7e-4, 6.5e-4),
    "taco hadamard e4m3": (6.7e-4, 6.7e-4, 6.8e-4),
    "taco ash e4m3": (6.7e-4, 6.7e-4, 6.8e-4),
    "taco hadamard int8": (1.9e-5, 4.2e-5, 4.8e-5),
}
EXPECTED_SUMS = {"two-shot": (1.1e-3, 1.4e-3), "ring": (3.1e-3, 5.5e-3)}
TOLERANCE = 0.05

LABELS = {
    "float32": "none, float32",
    "bfloat16": "none, bfloat16",
    "taco": "taco: ash, E4M3, two scales",
    "taco none": "taco, transform none, E4M3",
    "mxfp8": "mx, E4M3 (MXFP8)",
    "mxfp4": "mx, E2M1 (MXFP4)",
    "taco int8": "taco: ash, INT8",
    "nvfp4": "nvfp4",
    "taco hadamard": "taco, transform hadamard, E4M3",
    "taco e5m2": "taco: ash, E5M2",
    "taco int8 none": "taco, transform none, INT8",
    "tahquant": "tahquant: 4 bits forward, 6 backward",
}


def error_lines(recorded: dict[str, Any]) -> list[str]:
    """The page of errors without the part that is written by hand."""
    sets, versions = list(recorded["data"]), recorded["versions"]
    named = ", ".join(f"{k} {v}" for k, v in versions.items())
    lines = [
        "# Errors of lossy codecs",
        "",
        f"vNMSE, sum((x - y)^2) / sum(x^2). Mean and standard deviation over {recorded['draws']} "
        f"draws of {recorded['elements']} float32 values by `benchmarks/study_error.py`; {named}; "
        f"{recorded['date']}. a and b are from N(0, 1):",
        "",
        *(f"- {name}: {text}" for name, text in recorded["data"].items()),
        "",
        "## Beside what the design expects",
        "",
        "The parameters of the first two data sets (the width of the tail; the size of a group and "
        "the spread of its scale) were fitted so that these rows come out, so the page shows that "
        "one choice of data agrees with all of them, not where it comes from. Expected figures "
        "have two digits.",
        "",
        f"| method | {' | '.join(f'{name} | expected | off' for name in sets)} |",
        f"|---|{'---|---|---|' * len(sets)}",
    ]
    worst = 0.0
    for method, expected in EXPECTED.items():
        cells = []
        for name, wanted in zip(sets, expected, strict=True):
            value = recorded["codecs"][name][method]["vnmse"]
            off = value / wanted - 1
            worst = max(worst, abs(off))
            cells.append(f"{value:.2e} | {wanted:.1e} | {off:+.1%}")
        lines.append(f"| {method} | {' | '.join(cells)} |")
    verdict = "all" if worst <= TOLERANCE else "NOT all"
    lines += [
        "",
        f"Within {TOLERANCE:.0%}: {verdict}; the largest deviation is {worst:.1%}.",
        "",
        "## All methods",
        "",
        f"| method | bits | {' | '.join(sets)} |",
        f"|---|---|{'---|' * len(sets)}",
    ]
    for method, first in recorded["codecs"][sets[0]].items():
        bits = f"{first['bits']:.2f}" if "bits" in first else ""
        found = [recorded["codecs"][name][method] for name in sets]
        cells = [f"{f['vnmse']:.2e} ± {f['deviation']:.0e}" for f in found]
        lines.append(f"| {method} | {bits} | {' | '.join(cells)} |")
    lines += [
        "",
        "Bits are those of a whole buffer for each element. Rows without them are no codecs of the "
        "library: a cast to E4M3 with saturation, or to INT8, without a scale or with one for the "
        "tensor, of blocks of 256 that may be rotated. In the first three the size of the data "
        "matters.",
        "",
        "## All-reduces",
        "",
        f"{recorded['all_reduce_elements']} elements a rank, independent draws on each, mean of "
        f"{recorded['all_reduce_draws']}; all ranks got the same bits.",
        "",
        f"| codec | algorithm | ranks | {' | '.join(sets)} |",
        f"|---|---|---|{'---|' * len(sets)}",
    ]
    for rows in zip(*(recorded["all_reduce"][name] for name in sets), strict=True):
        head = rows[0]
        cells = " | ".join(f"{row['vnmse']:.2e}" for row in rows)
        lines.append(f"| {head['codec']} | {head['algorithm']} | {head['ranks']} | {cells} |")
    lines.append("")
    for algorithm, (low, high) in EXPECTED_SUMS.items():
        values: dict[int, list[float]] = {}
        for row in (row for name in sets for row in recorded["all_reduce"][name]):
            if (row["codec"], row["algorithm"]) == ("taco ash e4m3", algorithm):
                values.setdefault(row["ranks"], []).append(row["vnmse"])
        found = ", ".join(f"{n} ranks {min(v):.2e} to {max(v):.2e}" for n, v in values.items())
        lines.append(
            f"- taco ash e4m3, {algorithm}: {found}. The design expects {low:.1e} to {high:.1e}, "
            "without a number of ranks."
        )
    return lines


def by_config(recorded: dict[str, Any]) -> dict[str, dict[int, dict[str, Any]]]:
    """Runs by configuration, in the order of LABELS, and by seed."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for config in LABELS:
        runs = {r["seed"]: r for r in recorded["runs"] if r["config"] == config}
        if runs:
            found[config] = runs
    return found


def differences(runs: dict[int, dict[str, Any]], base: dict[int, dict[str, Any]]) -> list[float]:
    """Final losses less those of the baseline with the same seed."""
    return [runs[seed]["loss"] - base[seed]["loss"] for seed in sorted(runs) if seed in base]


def spread(values: Sequence[float]) -> float:
    """Standard deviation of one value; NaN for fewer than two."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else math.nan


def plus_minus(values: Sequence[float]) -> str:
    """The spread as it stands behind a mean, if there is one."""
    return f" ± {spread(values):.4f}" if len(values) > 1 else ""


def compared(apart: Sequence[float], losses: Sequence[float]) -> tuple[str, str, str]:
    """Mean difference and spread, its interval if there is one, and per cent of the mean loss."""
    mean, interval = float(np.mean(apart)), ""
    if len(apart) > 1:
        half = STUDENT[len(apart) - 1] * spread(apart) / math.sqrt(len(apart))
        interval = f"{mean - half:+.3f} to {mean + half:+.3f}"
    percent = f"{100 * mean / float(np.mean(losses)):+.2f}"
    return f"{mean:+.4f}{plus_minus(apart)}", interval, percent


def accuracy_lines(recorded: dict[str, Any]) -> list[str]:
    """The page of the accuracy study without the part that is written by hand."""
    configs, setting, machine = by_config(recorded), recorded["setting"], recorded["machine"]
    base, model, first = configs[BASELINE], setting["model"], recorded["runs"][0]
    named = ", ".join(f"{k} {v}" for k, v in machine["versions"].items())
    losses = [r["loss"] for r in base.values()]
    lines = [
        "# Training with encoded tensor-parallel communication",
        "",
        f"A byte-level GPT of {first['parameters'] / 1e6:.2f} M parameters ({model['layers']} "
        f"layers, width {model['width']}, {model['heads']} heads, context {model['context']}), "
        f"{setting['ranks']} tensor-parallel ranks on gloo, {setting['steps']} steps of "
        f"{setting['batch']} windows ({setting['batch'] * model['context']} bytes of text; "
        f"{setting['optimizer']}; learning rate {setting['learning_rate'][0]:g} to "
        f"{setting['learning_rate'][1]:g}). Text: sources of Python's standard library, "
        f"{first['train_bytes'] / 1e6:.1f} MB, and other files, "
        f"{first['validation_bytes'] / 1e6:.1f} MB, for validation: "
        f"{setting['validation_windows']} fixed windows at the end, {setting['curve_windows']} on "
        "the way. Arithmetic is float32. What the ranks exchange, activations forward and their "
        "gradients backward, is rounded to bfloat16 and then encoded; validation exchanges it in "
        "the same way.",
        "",
        f"By `benchmarks/study_accuracy.py` on {machine['cpu']}, {machine['cores']} cores, one "
        f"thread a rank; {named}; {recorded['date']}. Runs of one seed share initial weights and "
        "batches. Loss in nats; ± is the standard deviation over seeds, of the loss or of its "
        f"difference from {LABELS[BASELINE]} with the same seed; the interval is Student's, 95 %, "
        "for the mean difference; % is of the mean loss of that. MB and ratio: what a rank sent in "
        "training, by the trace of its communicators, and over what bfloat16 takes.",
        "",
        "| what travels | seeds | validation loss | difference | 95 % interval | % | MB | ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]
    plain = next(iter(base.values()))["raw_bytes"]
    for config, runs in configs.items():
        values = [r["loss"] for r in runs.values()]
        apart = differences(runs, base)
        wire = float(np.mean([r["wire_bytes"] for r in runs.values()]))
        gap, interval, percent = compared(apart, losses)
        if config == BASELINE:
            gap = interval = percent = ""
        lines.append(
            f"| {LABELS[config]} | {len(runs)} | {np.mean(values):.4f}{plus_minus(values)} | "
            f"{gap} | {interval} | {percent} | {wire / 1e6:.0f} | {wire / plain:.3f} |"
        )
    seeds = sorted(base)
    lines += [
        "",
        f"| final loss, seed | {' | '.join(str(seed) for seed in seeds)} |",
        f"|---|{'---|' * len(seeds)}",
    ]
    for config, runs in configs.items():
        cells = [f"{runs[s]['loss']:.4f}" if s in runs else "" for s in seeds]
        lines.append(f"| {LABELS[config]} | {' | '.join(cells)} |")
    lines += ["", "![Loss over steps, and differences at the end](accuracy.png)"]
    return lines + (tensor_lines(recorded["tensors"]) if "tensors" in recorded else [])


def tensor_lines(tensors: dict[str, Any]) -> list[str]:
    """Errors on the tensors that a trained model exchanges."""
    lines = ["", "## What is exchanged", ""]
    lines.append(
        "The tensors that one rank gives to all-reduces in one step after training (without codec, "
        "first seed), in bfloat16. vNMSE of one encoding: mean over tensors, and largest. Methods "
        "as on [the page of errors](error.md)."
    )
    lines.append("")
    for name, found in tensors.items():
        near = found["below a tenth of rms"]
        lines.append(
            f"- {name}: {found['tensors']} tensors, root mean square {min(found['rms']):.1e} to "
            f"{max(found['rms']):.1e}, kurtosis {min(found['kurtosis']):.1f} to "
            f"{max(found['kurtosis']):.1f} (normal: 3), {min(near):.0%} to {max(near):.0%} of the "
            "elements below a tenth of the root mean square (normal: 8 %)"
        )
    lines += ["", f"| method | {' | '.join(tensors)} |", f"|---|{'---|' * len(tensors)}"]
    for method in next(iter(tensors.values()))["vnmse"]:
        pairs = [found["vnmse"][method] for found in tensors.values()]
        cells = [f"{mean:.2e}, {most:.2e}" for mean, most in pairs]
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return lines


def tagc_lines(recorded: dict[str, Any]) -> list[str]:
    """The page of training with sums by sketch, without the part that is written by hand."""
    setting, machine, first = recorded["setting"], recorded["machine"], recorded["runs"][0]
    named = ", ".join(f"{k} {v}" for k, v in machine["versions"].items())
    configs: dict[str, dict[int, dict[str, Any]]] = {}
    for run in recorded["runs"]:
        configs.setdefault(run["config"], {})[run["seed"]] = run
    base = configs[UNCOMPRESSED]
    losses = [r["loss"] for r in base.values()]
    plain = float(np.mean([r["wire_bytes"] for r in base.values()]))
    tokens = setting["ranks"] * setting["batch"] * setting["context"]
    lines = [
        "# Training with gradients summed by sketch",
        "",
        f"The byte-level GPT of [the accuracy study](accuracy.md), {first['parameters'] / 1e6:.2f} "
        f"M parameters, under FSDP2 with {setting['ranks']} ranks on gloo: {setting['steps']} "
        f"steps of {tokens} bytes of text, {setting['validation_windows']} windows for "
        "validation. Gradients are float32; parameters and the gradients of other layers go "
        "uncompressed. Selected: embedding, head, feed-forward layers and the projection after "
        "attention; all: queries, keys and values too. In both, what would take no fewer bytes "
        "(biases, norms) goes uncompressed.",
        "",
        f"By `benchmarks/study_tagc.py` on {machine['cpu']}, {machine['cores']} cores, one thread "
        f"a rank; {named}; {recorded['date']}. Loss in nats; ± is the standard deviation over "
        "seeds, the interval Student's, 95 %, for the mean difference from uncompressed with the "
        "same seed. MB: what a rank sent of gradients, by the hooks' count. Of the layers that go "
        "by sketch: their share of the parameters, theta (zeroed by every rank), the density of "
        "the agreed index, and the shares of values that are estimated (mean, and of the worst "
        "layer, step and seed) or, kept by a rank, lost by the index.",
        "",
        "| gradients | seeds | validation loss | difference | 95 % interval | % | MB | ratio | "
        "share | theta | density | estimated | lost |",
        f"|---|{'---|' * 12}",
    ]
    for config, runs in configs.items():
        values = [r["loss"] for r in runs.values()]
        wire = float(np.mean([r["wire_bytes"] for r in runs.values()]))
        apart = differences(runs, base)
        cells = ["", "", ""] if config == UNCOMPRESSED or not apart else compared(apart, losses)
        facts = ["", "", "", "", ""]
        if config != UNCOMPRESSED:
            some = list(runs.values())
            mean = np.mean([r["estimated"][0] for r in some])
            worst = max(r["estimated"][1] for r in some)
            facts = [
                f"{some[0]['share_of_parameters']:.3f}",
                f"{some[0]['theta']:.4g}",
                f"{np.mean([r['density'] for r in some]):.4f}",
                f"{mean:.1e}, {worst:.1e}",
                f"{np.mean([r['lost'] for r in some]):.1e}",
            ]
        lines.append(
            f"| {config} | {len(runs)} | {np.mean(values):.4f}{plus_minus(values)} | "
            f"{' | '.join(cells)} | {wire / 1e6:.1f} | {wire / plain:.3f} | {' | '.join(facts)} |"
        )
    lines += [
        "",
        "The paper (162 M parameters, 2 ranks): validation loss +3.6 % at 10x with a 1-bit index; "
        "its table 2, at the same setting, for FSDP and TAGC:",
        "",
        "| layers | seconds an iteration | ratio | gradient exchange, ms/MB | ratio |",
        "|---|---|---|---|---|",
    ]
    for layers, ((before, after), (slow, fast)) in TABLE_2.items():
        lines.append(
            f"| {layers} | {before}, {after} | {after / before:.3f} | {slow}, {fast} | "
            f"{fast / slow:.3f} |"
        )
    return lines


def plot(recorded: dict[str, Any], path: Path) -> None:
    """Mean loss over steps, and the final difference of each run from the baseline's."""
    from matplotlib.figure import Figure

    configs = by_config(recorded)
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    for number, (config, runs) in enumerate(configs.items()):
        curves = np.array([r["curve"] for r in runs.values()])
        style = "-" if number < 10 else "--"
        color = f"C{number % 10}"
        steps, losses = curves[0, 1:, 0], curves[:, 1:, 1].mean(0)
        left.plot(steps, losses, style, color=color, label=LABELS[config])
        apart = differences(runs, configs[BASELINE])
        right.plot([number] * len(apart), apart, "o", color=color)
        right.plot([number - 0.3, number + 0.3], [np.mean(apart)] * 2, "-", color=color)
    left.set(xlabel="step", ylabel="validation loss, nats (mean over seeds)")
    left.legend(fontsize=8)
    right.axhline(0, color="grey", linewidth=0.5)
    right.set_xticks(range(len(configs)), configs, rotation=45, ha="right", fontsize=8)
    right.set_ylabel(f"final loss less {BASELINE}'s of the same seed")
    figure.savefig(path, dpi=110)


def write_page(page: Path, lines: list[str]) -> None:
    """Write the page, keeping what was written by hand."""
    old = page.read_text() if page.exists() else ""
    by_hand = old[old.index(BY_HAND) :] if BY_HAND in old else f"{BY_HAND}\n\n(to be written)\n"
    page.write_text("\n".join(lines) + f"\n\n{by_hand}")


def write_pages(folder: Path) -> list[str]:
    """Write the pages of what is recorded, and return their links."""
    links = []
    if (folder / "error.json").exists():
        recorded = json.loads((folder / "error.json").read_text())
        write_page(folder / "error.md", error_lines(recorded))
        links.append("Errors: [error.md](error.md)")
    if (folder / "accuracy.json").exists():
        recorded = json.loads((folder / "accuracy.json").read_text())
        write_page(folder / "accuracy.md", accuracy_lines(recorded))
        plot(recorded, folder / "accuracy.png")
        links.append("Training a small GPT with them: [accuracy.md](accuracy.md)")
    if (folder / "tagc.json").exists():
        recorded = json.loads((folder / "tagc.json").read_text())
        write_page(folder / "tagc.md", tagc_lines(recorded))
        links.append("Training it with gradients summed by sketch: [tagc.md](tagc.md)")
    return links
