"""Turn caches.json into a page; report.py calls it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

WAYS = {
    "files-zipccl": "SGLang and vLLM, zipccl",
    "lmcache-zipccl": "LMCache, zipccl",
    "files-huffman": "SGLang and vLLM, huffman",
    "prepared-zipccl": "prepared calls, zipccl",
}


def size_text(nbytes: int) -> str:
    """`64 KiB`."""
    if nbytes < 1 << 20:
        return f"{nbytes >> 10} KiB"
    return f"{nbytes / 2**20:.1f} MiB".replace(".0 ", " ")


def times(benchmark: dict[str, Any]) -> str:
    """The fastest and the median call, as cells."""
    stats, nbytes = benchmark["stats"], benchmark["extra_info"]["nbytes"]
    best, median = stats["min"], stats["median"]
    return f"{best * 1e6:.0f} | {median * 1e6:.0f} | {nbytes / best / 1e9:.1f}"


def lines(recorded: dict[str, Any]) -> list[str]:
    """The page."""
    machine = recorded["machine_info"]
    found = {b["name"]: b for b in recorded["benchmarks"]}
    sizes = sorted({b["params"]["kib"] for b in recorded["benchmarks"]})
    page = [
        "# Blocks of caches",
        "",
        f"By `bench_cpu.py`, {recorded['datetime'][:10]}, one thread of {machine['cores']} cores "
        f"({machine['cpu']}), Python {machine['python']}, numba "
        f"{machine['numba']}. Keys and values of SmolLM2-135M in bfloat16 for 2,048 tokens of "
        "text, in objects of 256 tokens as LMCache's, cut into blocks. Every block was decoded "
        "and compared.",
        "",
        "Calls are those of the plug-ins. LMCache's blocks take 0.75 of their bytes each, the "
        "others what they need. Each call has another block, so that it comes from memory; "
        "prepared calls have the same one each time. Microseconds of the fastest and the median "
        "call, GB/s of the block's bytes at the fastest.",
        "",
        "| | block | mean size | largest | encode: best | median | GB/s | decode: best | median "
        "| GB/s |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for way, label in WAYS.items():
        for kib in sizes:
            encode, decode = (found[f"test_cache_{op}[{way}-{kib}]"] for op in ("encode", "decode"))
            info = encode["extra_info"]
            page.append(
                f"| {label} | {size_text(info['nbytes'])} | {info['ratio']:.3f} "
                f"| {info['largest']:.3f} | {times(encode)} | {times(decode)} |"
            )
    return page


def write(folder: Path) -> bool:
    """Write caches.md if there is a record; whether there is."""
    record = folder / "caches.json"
    if not record.exists():
        return False
    page = "\n".join(lines(json.loads(record.read_text())))
    (folder / "caches.md").write_text(page + "\n")
    return True
