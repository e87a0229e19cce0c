"""Turn what bench_entropy.py writes into a page; report.py calls it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gpu_report import DATA, cold, fraction, nvcomp_lines, spread, timings

#: Records by what their part is called: the later decoder was not timed whole, nor beside nvCOMP.
HUFFMAN = {
    "entropy_gpu.json": "huffman",
    "entropy_gpu_h200.json": "huffman on an H200, with an earlier decoder",
}
DELTA = "delta_gpu.json"
DIETGPU = "DietGPU on an H200, of another run (2026-11-20): 0.674, 535 and 929 GB/s at 256 MiB."


def lines(found: dict[str, dict[str, Any]]) -> list[str]:
    """The page, from the records of huffman and of delta, by file."""
    failures: list[str] = []
    page = [
        "# huffman and delta on the GPU",
        "",
        "By `bench_entropy.py`. Median of graph replays into memory given beforehand, results "
        "checked before and after, bytes compared with the CPU's. GB/s of tensor bytes. Fractions "
        "are in bytes moved, of the copy of the same tensors and, in brackets, of the largest. "
        "Checksum off; no tensor is in the cache when its turn comes.",
    ]
    for file, title in HUFFMAN.items():
        if file in found:
            page += ["", f"## {title}", *huffman_lines(found[file], failures)]
    if DELTA in found:
        page += delta_lines(found[DELTA], failures)
    return page + (["", "What failed:", "", *failures] if failures else [])


def made_on(recorded: dict[str, Any]) -> str:
    """Date, machine and versions of a record."""
    machine, found = recorded["machine"], recorded["versions"]
    versions = ", ".join(f"{k} {found[k]}" for k in ("python", "torch", "triton", "tightwire"))
    return f"{recorded['date']}: {machine['gpu']}, driver {machine['driver']}, {versions}."


def huffman_lines(recorded: dict[str, Any], failures: list[str]) -> list[str]:
    """The part on huffman; what failed is added to `failures`."""
    page = [
        "",
        made_on(recorded),
        "",
        "| | MiB | ratio | encode GB/s | of copy | decode GB/s | of copy | decode_add to float32, "
        "of copy |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case in recorded["cases"]:
        name = f"{case['dtype']}, {shown_data(case)}"
        if "error" in case:
            failures.append(f"- huffman, {name}, {case['mib']} MiB: {case['error']}")
            continue
        encode, decode = cold(case, "encode"), cold(case, "decode")
        page.append(
            f"| {name} | {case['mib']} | {case['ratio']:.4f} | {encode['GB/s']:.0f} | "
            f"{fraction(encode)} | {decode['GB/s']:.0f} | {fraction(decode)} | "
            f"{fraction(cold(case, 'decode_add'))} |"
        )
    page += ["", "A graph of one call, bfloat16, us (p10 to p90):", ""]
    for t in timings(recorded, how="replay", checksum=False):
        page.append(f"- {t['op']}, {t['mib']} MiB: {spread(t['us'])}")
    return [*page, *nvcomp_lines(recorded), "", DIETGPU] if "nvcomp" in recorded else page


def delta_lines(recorded: dict[str, Any], failures: list[str]) -> list[str]:
    """The part on delta; what failed is added to `failures`."""
    page = [
        "",
        "## delta",
        "",
        made_on(recorded),
        "",
        "Changes of N(0, 0.02) in bfloat16, 256 MiB: a step of one rate, a product, and signs. "
        "Moved are both tensors and the buffer, so that a digest of the base before anything is "
        "written counts as lost.",
        "",
        "| change | changed | checksum | ratio | encode GB/s | of copy | apply GB/s | of copy | in "
        "place GB/s | of copy |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in recorded["deltas"]:
        if "error" in row:
            failures.append(f"- delta, {row['change']}: {row['error']}")
            continue
        cells = [
            f"{row['GB/s'][op]:.0f} | {row['of_copy'][op]:.2f}"
            for op in ("encode", "apply", "in place")
        ]
        page.append(
            f"| {row['change']} | {row['changed']:.2%} | {'on' if row['checksum'] else 'off'} | "
            f"{row['ratio']:.4f} | {' | '.join(cells)} |"
        )
    return page


def shown_data(case: dict[str, Any]) -> str:
    """What the elements of a case are."""
    narrow = case["data"] == "gaussian" and case["dtype"].startswith("float8")
    return "N(0, 16)" if narrow else DATA[case["data"]]


def write(folder: Path) -> bool:
    """Write entropy_gpu.md if there is a record; whether there is."""
    records = [folder / name for name in (*HUFFMAN, DELTA)]
    found = {file.name: json.loads(file.read_text()) for file in records if file.exists()}
    if found:
        (folder / "entropy_gpu.md").write_text("\n".join(lines(found)) + "\n")
    return bool(found)
