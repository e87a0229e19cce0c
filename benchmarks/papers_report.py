"""training.md: the papers' experiments beside ours, from the records of the studies and benchmarks.

report.py calls it. What has no record is named, with the reason.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dynamiq_report import Rows, mean, table
from lossy_report import TABLE_2, UNCOMPRESSED, compared, differences
from rows import places, read, why_missing

P2P_OFF, NVLINK = "p2p off", "nvlink"
#: What stands for a time that is missing.
MISSING = "not recorded"
#: The device of rows that do not name another one.
USUAL = "H200"
#: Loss of a lossy run over that of the native one, above which its speed is not shown.
TRUSTED = 1.05
#: Parts of the loss that bfloat16 ends with, as in figure 4 of DynamiQ.
TARGETS = (1.05, 1.02, 1.01)
SKETCH, WITHOUT = "10x, selected", "10x, selected, no accumulation"
DYNAMIQ, BFLOAT16 = "dynamiq any, 5 bits", "bfloat16"
TWO, THREE = "tahquant, sdp4bit", "taco, tahquant, sdp4bit"
HEAD = """\
Made by `benchmarks/report.py` from the records it names. Each row has an experiment of a paper, the
paper's figure, and ours where there is a record. Our models are small and our ranks few, so signs
and orders can be compared, and figures seldom. *Times as fast*: the time without compression over
that with it. A speed is shown only where the result was right: the same bits, or, of a lossy codec,
a loss within 5 % of the native run's; with tagc both losses are given. Speeds are those of
H200s; where H100 stands behind one, of those. [steps.md](steps.md) has step times of an earlier
state of the library, written by hand."""


class Experiment(NamedTuple):
    """A row: what the paper did and found, ours, and where that is recorded."""

    name: str
    theirs: str
    ours: str
    record: str


def load(folder: Path, name: str) -> dict[str, Any] | None:
    """A record, if it is there."""
    path = folder / name
    return json.loads(path.read_text()) if path.exists() else None


def runs_of(recorded: dict[str, Any] | None) -> dict[str, dict[int, dict[str, Any]]]:
    """Runs by configuration and seed."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for run in recorded["runs"] if recorded else ():
        found.setdefault(run["config"], {})[run["seed"]] = run
    return found


def gap(
    runs: dict[str, dict[int, dict[str, Any]]], config: str, base: str, seeds: bool = True
) -> str:
    """The mean difference of final losses in per cent, and, if asked, those of seeds."""
    if config not in runs or base not in runs:
        return ""
    both = sorted(runs[config].keys() & runs[base].keys())
    if not both:
        return ""
    losses = [runs[base][seed]["loss"] for seed in both]
    apart = differences(runs[config], runs[base])
    percent = f"{compared(apart, losses)[2]} %"
    if not seeds:
        return percent
    each = ", ".join(f"{100 * d / loss:+.1f}" for d, loss in zip(apart, losses, strict=True))
    return percent + (f" (seeds: {each})" if len(both) > 1 else " (one seed)")


class Steps:
    """The rows of a file of lines that two ranks have, by network."""

    def __init__(self, folder: Path, name: str) -> None:
        self._rows: dict[str, dict[str, dict[str, Any]]] = {}
        for (link, world), rows in places(read(folder / name)).items():
            if world == 2:
                self._rows[link] = rows

    def row(self, link: str, key: str) -> dict[str, Any] | None:
        """A row, with results or without."""
        return self._rows.get(link, {}).get(key)

    def speeds(self, keys: dict[str, str], speed: Callable[[dict[str, Any]], str]) -> str:
        """What is known of a case by network, whose keys are given."""
        found = {}
        for link, key in keys.items():
            row = self.row(link, key)
            if row is not None:
                found[link] = why_missing(row) or speed(row) + device_of(row)
        return by_network(found)


def device_of(row: dict[str, Any]) -> str:
    """The device of a row, if it is not the usual one, to stand behind a speed."""
    name = row["machine"]["device"].removeprefix("NVIDIA ").split()[0]
    return "" if name == USUAL else f" ({name})"


def by_network(found: dict[str, str]) -> str:
    """What is known by network, or that nothing is."""
    names = {P2P_OFF: "at 25 GB/s", NVLINK: "over NVLink"}
    return "; ".join(f"{text} {names[link]}" for link, text in found.items() if text) or MISSING


def step_speed(row: dict[str, Any]) -> str:
    """How many times as fast as natively a step is, if its result was right."""
    if row["lossless"] and row["native_repeats"] and not row["same_bits"]:
        return "no speed: other bits than natively"
    if not row["lossless"] and not row["loss"] <= TRUSTED * row["native_loss"]:
        return f"no speed: loss {row['loss']:.2f}, natively {row['native_loss']:.2f}"
    return f"{1 / row['ratio']:.2f} x"


def to_loss(curve: Sequence[Sequence[float]], loss: float) -> float | None:
    """Steps until a loss, between points by a straight line; None if it is not reached."""
    for (before, high), (after, low) in itertools.pairwise(curve):
        if low <= loss:
            return before + (after - before) * max(0.0, (high - loss) / max(high - low, 1e-12))
    return None


def zipccl(folder: Path, steps: Steps, wide: Steps) -> list[Experiment]:
    """Figures 9 and 10 of ZipCCL; `wide` has steps of a wider model."""
    recorded = load(folder, "collectives_4.json")

    def collective(name: str) -> str:
        rows = [
            x
            for x in (recorded["measured"] if recorded else ())
            if (x["link"], x["collective"]) == (P2P_OFF, name)
        ]
        speeds = [
            f"{x['native_ms']['median'] / x['compressed_ms']['median']:.2f} x ({x['mib']} MiB)"
            for x in rows
        ]
        return f"{', '.join(speeds)} at 25 GB/s" if speeds else MISSING

    dense = {P2P_OFF: "fsdp, zipccl, network", NVLINK: "fsdp, zipccl, peers"}
    experts = dict.fromkeys((P2P_OFF, NVLINK), "moe, zipccl")
    return [
        Experiment(
            "figure 9, step of a dense model (Llama3-8B, FSDP)",
            "1.18 x on 64 A6000, 1.13 x on 16 H800; asked 1.13 x",
            steps.speeds(dense, step_speed),
            "training.jsonl: `fsdp, zipccl`",
        ),
        Experiment(
            "the same with layers of 4096, which keep the GPU busy for longer than the host",
            "1.18 x on 64 A6000, 1.13 x on 16 H800; asked 1.13 x",
            wide.speeds(dense, step_speed),
            "training_wide.jsonl: `fsdp, zipccl`",
        ),
        Experiment(
            "figure 9, step of a model with experts (DeepSeek-V3, Qwen3-MoE)",
            "1.06 to 1.16 x on 16 to 64 A6000, 1.13 x on 16 H800; asked 1.18 x",
            steps.speeds(experts, step_speed),
            "training.jsonl: `moe, zipccl`",
        ),
        Experiment(
            "figure 10, all-gather (Llama3-8B)",
            "1.35 x",
            collective("all_gather"),
            "[collectives_4.json](collectives.md)",
        ),
        Experiment(
            "figure 10, all-to-all (DeepSeek-V3, Qwen3-MoE)",
            "1.25 x, 1.24 x",
            collective("all_to_all"),
            "[collectives_4.json](collectives.md)",
        ),
    ]


def ncclx(moe: Steps) -> list[Experiment]:
    """Table 3 of NCCLX."""

    def keys(name: str) -> dict[str, str]:
        return dict.fromkeys((P2P_OFF, NVLINK), f"moe, {name}")

    def decoding(link: str) -> str:
        native, most = (
            moe.row(link, f"moe, {form}, 128 tokens, top 4")
            for form in ("native", "padded to the most")
        )
        missing = why_missing(native) or why_missing(most)
        if native is None or most is None or missing:
            return "" if native is None and most is None else missing
        # Each has had turns with the exact one.
        speed = (most["ms"] / most["exact_ms"]) / (native["ms"] / native["exact_ms"])
        least = native["padded_ms"] / native["ms"]
        return f"{speed:.2f} x, {least:.2f} x the least padding{device_of(native)}"

    def training(row: dict[str, Any]) -> str:
        padded, exact = (row[form] / row["ms"] for form in ("padded_ms", "exact_ms"))
        return f"{padded:.2f} x padded, {exact:.2f} x exact"

    decode = Experiment(
        "table 3, decoding without padding, 128 tokens, 4 experts of each",
        "22 to 65 % less time a step on 4 to 16 hosts: 1.3 to 2.9 x",
        by_network({link: decoding(link) for link in (P2P_OFF, NVLINK)}),
        "moe.jsonl: `native`, `padded to the most`",
    )
    train = [
        Experiment(
            f"the same exchange in training, 8,192 tokens, 2 experts of each, with {codec}{what}",
            f"not in the paper; asked {asked}",
            moe.speeds(keys(f"{codec}, 8192 tokens, top 2{end}"), training),
            f"moe.jsonl: `{codec}{end}`",
        )
        for codec, asked in (("zipccl", "1.25 x padded, 1.15 x exact"), ("taco", "1.7 x"))
        for what, end in (("", ""), (", forward and backward", ", backward"))
    ]
    resident = [
        Experiment(
            f"the same without waiting for the host (`connect_resident`), {what}{how}",
            f"not in the paper; asked {asked} over NVLink",
            moe.speeds({NVLINK: f"moe, resident{end}{graph}, 8192 tokens, top 2"}, training),
            f"moe.jsonl: `resident{end}{graph}`",
        )
        for what, end, asked in (
            ("without a codec", "", "1.1 x"),
            ("with mx", ", mx", "1.4 x"),
            ("with taco", ", taco", "1.4 x"),
        )
        for how, graph in (("", ""), (", in a CUDA graph", ", graph"))
    ]
    return [decode, *train, *resident]


def tagc(folder: Path, steps: Steps) -> list[Experiment]:
    """Table 2 and figure 4 of TAGC."""
    short, long = load(folder, "tagc.json"), load(folder, "tagc_long.json")
    some, more = runs_of(short), runs_of(long)
    sketches = load(folder, "collectives_4.json")
    exchange = [
        f"{x['sketch_ms']['median'] / x['native_ms']['median']:.2f} ({x['mib']} MiB)"
        for x in (sketches["sketches"] if sketches else ())
        if x["link"] == P2P_OFF and x["accumulate"]
    ]
    (before, after), (slow, fast) = TABLE_2["non-attention"]
    (all_before, all_after), (all_slow, all_fast) = TABLE_2["all"]
    found = [
        Experiment(
            "table 2, time of a step, 10x",
            f"{after / before:.2f} of FSDP's (layers outside attention), "
            f"{all_after / all_before:.2f} (all layers), over 10 Gbit/s",
            steps.speeds(
                {P2P_OFF: "fsdp, tagc, 10 x"},
                lambda row: (
                    f"{row['ratio']:.2f} of native, loss {row['loss']:.2f} "
                    f"({row['native_loss']:.2f})"
                ),
            ),
            "training.jsonl: `fsdp, tagc, 10 x`",
        ),
        Experiment(
            "table 2, time of the exchange of gradients",
            f"{fast / slow:.2f}, {all_fast / all_slow:.2f}",
            f"{', '.join(exchange)} at 25 GB/s" if exchange else MISSING,
            "[collectives_4.json](collectives.md)",
        ),
    ]
    for runs, recorded, name in ((some, short, "tagc"), (more, long, "tagc_long")):
        count = f" after {recorded['setting']['steps']} steps" if recorded else ""
        ours = [f"{gap(runs, SKETCH, UNCOMPRESSED)}"]
        ours += [f"without accumulation {gap(runs, WITHOUT, UNCOMPRESSED)}"]
        page = "[tagc.md](tagc.md)" if name == "tagc" else "tagc_long.json, below"
        found.append(
            Experiment(
                f"figure 4, loss at 10x{count}",
                "+3.6 % with a 1-bit index, 2 ranks",
                "; ".join(ours) if recorded else "not recorded: study_tagc.py was not run",
                page,
            )
        )
    return found


def dynamiq(folder: Path, steps: Steps) -> list[Experiment]:
    """Figures 4, 5 and 9 of DynamiQ."""
    long, errors = runs_of(load(folder, "ddp_long.json")), load(folder, "dynamiq.json")
    native = steps.row(P2P_OFF, "loss, native")

    def seconds(row: dict[str, Any]) -> str:
        if native is None or why_missing(native):
            return "no native run beside it"
        return "; ".join(_time_to_loss(row, native))

    runs = [long.get(config, {}).get(0) for config in (DYNAMIQ, BFLOAT16)]
    ours = "not recorded: study_ddp.py was not run"
    if runs[0] and runs[1]:
        ours = f"final loss {gap(long, DYNAMIQ, BFLOAT16)}; steps and bytes below"
    topologies = "not recorded: study_dynamiq.py was not run"
    if errors:
        rows = Rows(errors)
        ring = rows.scheme(DYNAMIQ)
        way = [r for r in rows.of("topologies") if (r["label"], r["how"]) == (DYNAMIQ, "butterfly")]
        if ring and way:
            ratio = mean(way[0], "GPT") / mean(ring, "GPT")
            topologies = (
                f"error {mean(way[0], 'GPT'):.2e}, {ratio:.2f} of the ring's. Loss not recorded: "
                "runs by ring end nearer to uncompressed ones than seeds to one another"
            )
    return [
        Experiment(
            "figures 4 and 5, time to loss by ring",
            "40.8 % less than bfloat16 (LLaMA 1B MMLU, 99 %), 4 servers over 100 Gbit/s; "
            "asked 25 % less at 25 GB/s",
            steps.speeds({P2P_OFF: "loss, dynamiq, ring"}, seconds),
            "training.jsonl: `loss`",
        ),
        Experiment(
            "the same, the loss itself, 4 ranks",
            "within 0.1 % of bfloat16's final accuracy",
            ours,
            "ddp_long.json, [ddp.md](ddp.md)",
        ),
        Experiment(
            "figure 9 and table 5, butterfly",
            "error 6.7e-4, by ring 9.6e-4: 0.70; 12 % less time to 99 % than MXFP8",
            topologies,
            "[dynamiq.md](dynamiq.md)",
        ),
    ]


def _time_to_loss(row: dict[str, Any], native: dict[str, Any]) -> list[str]:
    """Seconds until parts of the loss that the native run ends with, over its own."""
    found = []
    for part in TARGETS:
        target = part * native["curve"][-1][1]
        ours, theirs = to_loss(row["curve"], target), to_loss(native["curve"], target)
        each = row["seconds"] / row["steps"], native["seconds"] / native["steps"]
        if ours is None or theirs is None:
            found.append(f"{part:.0%}: not reached")
        else:
            found.append(f"{part:.0%}: {ours * each[0] / (theirs * each[1]):.2f} of bfloat16's")
    return found


def taco(folder: Path, steps: Steps, wide: Steps) -> list[Experiment]:
    """Tables 1 to 3 and figures 15 and 17 of TACO; `wide` has steps of a wider model."""
    accuracy = runs_of(load(folder, "accuracy.json"))
    three = runs_of(load(folder, "three_dimensions.json"))
    by_tp = {P2P_OFF: "tp, taco, network", NVLINK: "tp, taco, peers"}
    study = "not recorded: study_accuracy.py was not run"
    parts = "not recorded: study_3d.py was not run"
    ours = [
        (
            f"{gap(three, TWO, UNCOMPRESSED)} and {gap(three, THREE, UNCOMPRESSED)}; "
            f"TACO adds {gap(three, THREE, TWO, seeds=False)}"
        )
        if {TWO, THREE, UNCOMPRESSED} <= three.keys()
        else parts
    ]
    return [
        Experiment(
            "table 1, loss of tensor parallelism, TACO and TahQuant",
            "+0.25 % and +2.88 % (8 ranks, 10,000 iterations)",
            f"{gap(accuracy, 'taco', 'bfloat16')} and {gap(accuracy, 'tahquant', 'bfloat16')}"
            if accuracy
            else study,
            "[accuracy.md](accuracy.md)",
        ),
        Experiment(
            "table 2, blocks of 32 to 512, loss and throughput",
            "+0.17 to +0.29 %; 1.09 to 1.52 x",
            "not done: in our size a seed moves the loss by several times what blocks do there, "
            "and their throughput needs their eight GPUs",
            "",
        ),
        Experiment(
            "figure 17, loss in three dimensions: SDP4Bit and TahQuant, and with TACO",
            "+0.49 % and +0.63 %; TACO adds +0.14 %",
            ours[0],
            "three_dimensions.json, below",
        ),
        Experiment(
            "table 3, throughput in three dimensions",
            "1.50 to 1.53 x (TP 4, PP 2, DP 2); asked 1.4 x",
            "not recorded: eight GPUs are needed at least",
            "",
        ),
        Experiment(
            "figure 15, throughput of tensor parallelism, 2 ranks",
            "1.23 x (2.7B), 1.29 x (6.7B)",
            steps.speeds(by_tp, step_speed),
            "training.jsonl: `tp, taco`",
        ),
        Experiment(
            "the same with layers of 4096",
            "1.23 x (2.7B), 1.29 x (6.7B)",
            wide.speeds(by_tp, step_speed),
            "training_wide.jsonl: `tp, taco`",
        ),
    ]


#: Why figures differ, by paper.
WHY = {
    "ZipCCL": "Theirs are 16 to 64 GPUs of four or two hosts; ours are GPUs of one host, on which "
    "25 GB/s stands for a network. Our codes take .70 of bfloat16: an all-gather that the link "
    "bounds can be 1.43 times as fast at most.",
    "NCCLX": "Their step is a whole model's in a CUDA graph, over hosts, against two all-gathers "
    "and a padded all-to-all; ours is dispatch and combine of one layer, which but for "
    "`connect_resident` tells the host how many rows come, and is not captured. Padding grows with "
    "ranks: two show the least of it. Over NVLink the host is the limit; what is recorded there "
    "with taco, and the step with experts above, is of 2026-11-27, before rows travelled in "
    "messages of learnt capacities.",
    "TAGC": "Their model has 162 M parameters and trains for longer; ours has 1 M. They have two "
    "ranks and an index of 1 bit; we have four and an index that loses nothing. Why the gap stays "
    "with accumulation was not found out; what a rank holds back comes late, by about as many "
    "steps as the ratio of entries to those that are sent, and Adam may take it as a large "
    "gradient. Links of 25 GB/s are twenty times theirs.",
    "DynamiQ": "They fine-tune models of .1 to 1 G parameters to the end, and count perplexity or "
    "accuracy; ours starts from nothing, is far from converged, and counts loss. Bytes to a loss "
    "are time to it where the network alone counts.",
    "TACO": "Their models have .35 to 13 G parameters and see 10,000 iterations; ours has 1 M and "
    "sees a few hundred. Seeds end further apart here than codecs do there, so that no order of "
    "codecs follows from ours. A token of TahQuant is a row of 160 elements here.",
}
GPU_RECORDS = "training.jsonl, training_wide.jsonl, moe.jsonl, prepared.jsonl"
#: What makes the records that no other page lists, by file.
COMMANDS = {
    "tagc_long.json": "study_tagc.py --steps 400 --every 40 --curve 128 --seed 0 --config "
    f'{UNCOMPRESSED} "{SKETCH}" "{WITHOUT}" --out benchmarks/results/tagc_long.json',
    "ddp_long.json": "study_ddp.py --steps 240 --every 20 --curve 64 --seed 0 --config "
    f'{BFLOAT16} "{DYNAMIQ}" --out benchmarks/results/ddp_long.json',
    "three_dimensions.json": "study_3d.py --seed 0 1 --out "
    "benchmarks/results/three_dimensions.json",
}


def made(recorded: dict[str, Any]) -> str:
    """Where and when, as a sentence."""
    machine = recorded["machine"]
    named = ", ".join(f"{k} {v}" for k, v in machine["versions"].items())
    return f"{machine['cpu']}, {machine['cores']} cores, {named}; {recorded['date']}."


def gap_lines(recorded: dict[str, Any] | None) -> list[str]:
    """How the gap of TAGC goes on with steps."""
    runs = runs_of(recorded)
    if recorded is None or 0 not in runs.get(UNCOMPRESSED, {}):
        return []
    base = runs[UNCOMPRESSED][0]
    lines = [
        [config, *(f"{100 * (b / a - 1):+.1f}" for (_, a), (_, b) in _pairs(base, of[0]))]
        for config, of in runs.items()
        if config != UNCOMPRESSED and 0 in of
    ]
    windows, steps = recorded["setting"]["curve_windows"], [str(s) for s, _ in base["curve"][1:]]
    return [
        f"Loss above uncompressed training, in per cent, by steps; {windows} windows a point, so "
        f"that the last column is not quite the figure above. {made(recorded)}",
        "",
        *table(["", *steps], lines),
    ]


def _pairs(base: dict[str, Any], run: dict[str, Any]) -> list[Any]:
    return list(zip(base["curve"][1:], run["curve"][1:], strict=True))


def loss_lines(recorded: dict[str, Any] | None) -> list[str]:
    """Steps and bytes until parts of the loss that bfloat16 ends with."""
    runs = runs_of(recorded)
    both = [runs.get(config, {}).get(0) for config in (BFLOAT16, DYNAMIQ)]
    if recorded is None or both[0] is None or both[1] is None:
        return []
    total, lines = recorded["setting"]["steps"], []
    for part in TARGETS:
        target = part * both[0]["curve"][-1][1]
        cells = [f"{part:.0%}", f"{target:.3f}"]
        counts = [to_loss(run["curve"], target) for run in both if run]
        cells += ["not reached" if n is None else f"{n:.0f}" for n in counts]
        if counts[0] is not None and counts[1] is not None:
            sent = [n * run["wire_bytes"] / total for n, run in zip(counts, both, strict=True)]
            cells.append(f"{sent[1] / sent[0]:.2f}")
        else:
            cells.append("")
        lines.append(cells)
    return [
        f"Until parts of the loss that bfloat16 ends with after {total} steps "
        f"({recorded['setting']['curve_windows']} windows a point, straight lines between points). "
        f"{made(recorded)}",
        "",
        *table(
            ["of it", "loss", "steps, bfloat16", "steps, dynamiq", "bytes over bfloat16's"], lines
        ),
    ]


def three_lines(recorded: dict[str, Any] | None) -> list[str]:
    """Loss and bytes of three dimensions at once."""
    runs = runs_of(recorded)
    if recorded is None or UNCOMPRESSED not in runs:
        return []
    lines = []
    for config, of in runs.items():
        losses = ", ".join(f"{of[seed]['loss']:.4f}" for seed in sorted(of))
        sent = next(iter(of.values()))["sent"]
        ratios = [f"{wire / raw:.3f}" for raw, wire in sent.values()]
        apart = "" if config == UNCOMPRESSED else gap(runs, config, UNCOMPRESSED, seeds=False)
        lines.append([config, losses, apart, *ratios])
    setting = recorded["setting"]
    seeds = ", ".join(map(str, sorted(runs[UNCOMPRESSED])))
    return [
        "Two replicas of two stages of two tensor-parallel ranks on gloo, "
        f"{setting['steps']} steps of {2 * setting['batch'] * setting['context']} bytes of text; "
        f"{made(recorded)} Bytes are those of all ranks over "
        "raw ones: bfloat16 for tensor parallelism, float32 for stages and gradients.",
        "",
        *table(["", f"loss, seeds {seeds}", "difference", "tensor", "pipeline", "data"], lines),
    ]


def page(folder: Path) -> list[str]:
    """The lines of the page."""
    steps, wide = Steps(folder, "training.jsonl"), Steps(folder, "training_wide.jsonl")
    moe = Steps(folder, "moe.jsonl")
    papers = {
        "ZipCCL": (zipccl(folder, steps, wide), []),
        "NCCLX": (ncclx(moe), []),
        "TAGC": (tagc(folder, steps), gap_lines(load(folder, "tagc_long.json"))),
        "DynamiQ": (dynamiq(folder, steps), loss_lines(load(folder, "ddp_long.json"))),
        "TACO": (taco(folder, steps, wide), three_lines(load(folder, "three_dimensions.json"))),
    }
    lines = ["# Training: the papers' experiments at our size", "", HEAD, ""]
    for name, (experiments, more) in papers.items():
        lines += [f"## {name}", ""]
        lines += table(
            ["experiment", "the paper", "here", "record"], [list(e) for e in experiments]
        )
        lines += [*more, f"Why they differ: {WHY[name]}", ""]
    gpus = ["`python benchmarks/bench_papers.py`, on two GPUs, 8 minutes", GPU_RECORDS]
    studies = [[f"`python benchmarks/{command}`", name] for name, command in COMMANDS.items()]
    commands = [gpus, *studies]
    return [*lines, "## How to make them", "", *table(["command", "record"], commands)]


def write(folder: Path) -> None:
    """Write training.md."""
    (folder / "training.md").write_text("\n".join(page(folder)).rstrip() + "\n")
