"""The papers' experiments that need two GPUs, in one command of eight minutes.

    python benchmarks/bench_papers.py
    python benchmarks/report.py

It runs bench_training.py, bench_moe.py and bench_peers.py with the cases that results/training.md
compares with the papers, first at 25 GB/s (NCCL_P2P_DISABLE=1), then over NVLink. They append rows
to their own files as cases are measured, and check results before or beside each time: a case that
fails, hangs or finds no time left costs nothing but itself, and the same command goes on with what
is missing. --small tries everything with tiny sizes, whose times mean nothing, over gloo where
there are no GPUs.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
P2P = "NCCL_P2P_DISABLE"
#: Environment by network.
LINKS: dict[str, dict[str, str]] = {"25 GB/s": {P2P: "1"}, "NVLink": {}}
#: Seconds that a program gets to end after its last case, and below which none is started.
END, LEAST = 15.0, 25.0


class Part(NamedTuple):
    """A program with its words.

    Attributes:
        program: Its name without suffix.
        out: The name of its file.
        most: Seconds that it gets at most.
        words: For all networks.
        only: Further ones by network.
        small: Further ones with --small.
    """

    program: str
    out: str
    most: float
    words: tuple[str, ...]
    only: dict[str, tuple[str, ...]]
    small: tuple[str, ...]


_ALL = ("fsdp,native", "tp,native", "moe,native", "moe,zipccl")
_MOE = ("--hidden", "64", "--calls", "2")
PARTS = (
    Part(
        "bench_moe",
        "moe.jsonl",
        60.0,
        ("--each", "4", "--only", "padded", "exact, torch", "native", "zipccl", "taco"),
        {},
        ("--tokens", "64", *_MOE),
    ),
    # A step of decoding: few tokens, to several experts each.
    Part(
        "bench_moe",
        "moe.jsonl",
        40.0,
        (
            *("--each", "2", "--tokens", "128", "--top-k", "4"),
            *("--only", "padded to the most", "exact, torch", "native"),
        ),
        {},
        _MOE,
    ),
    Part(
        "bench_peers",
        "prepared.jsonl",
        40.0,
        ("--codecs", "zipccl", "--collectives", "all_gather", "all_to_all", "--sizes", "65536"),
        {},
        ("--threads", "2", "--sizes", "64"),
    ),
    Part(
        "bench_training",
        "training.jsonl",
        240.0,
        ("--limit", "90", "--suite", "fsdp", "tp", "moe", "loss", "--only", *_ALL),
        {
            "25 GB/s": ("fsdp,zipccl,network", "tp,taco,network", "loss", "moe,mx", "fsdp,tagc"),
            "NVLink": ("fsdp,zipccl,peers", "tp,taco,peers"),
        },
        (
            *("--layers", "1", "--width", "64", "--heads", "4", "--vocabulary", "256"),
            *("--tokens", "16", "--batch", "1", "--steps", "2", "--loss-steps", "10"),
        ),
    ),
)


def command(part: Part, link: str, folder: Path, seconds: float, small: bool) -> list[str]:
    """The command of a part on two ranks, which is to end after so many seconds."""
    start = [sys.executable]
    if not (small and "--threads" in part.small):
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        start += ["--max-restarts", "9"]
    words = [*part.words, *part.only.get(link, ()), *(part.small if small else ())]
    words += ["--out", str(folder / part.out), "--seconds", f"{seconds:.0f}"]
    return [*start, str(HERE / f"{part.program}.py"), *words]


def run(words: Sequence[str], link: str, seconds: float) -> str:
    """Run a command; what went wrong, if anything did."""
    rest = {name: value for name, value in os.environ.items() if name != P2P}
    process = subprocess.Popen(words, env=rest | LINKS[link])
    try:
        status = process.wait(seconds)
    except subprocess.TimeoutExpired:
        # torchrun ends its ranks when it is asked to, and not when it is killed.
        process.terminate()
        try:
            process.wait(END)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        return f"stopped after {seconds:.0f} s"
    return f"ended with status {status}" if status else ""


def main(words: Sequence[str] | None = None) -> int:
    """Run the parts one after the other; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE / "results", help="a folder")
    parser.add_argument("--seconds", type=float, default=470.0, help="of everything")
    parser.add_argument("--small", action="store_true", help="tiny sizes, on the CPU too")
    options = parser.parse_args(words)
    if not options.small:
        import torch

        if torch.cuda.device_count() < 2:
            print(
                f"{torch.cuda.device_count()} GPUs found; needed: 2. NCCL lets no two ranks share"
                " one, so that one alone has nothing to time; see --small.",
                file=sys.stderr,
            )
            return 2
    end, problems = time.monotonic() + options.seconds, []
    for link in LINKS:
        for part in PARTS:
            left = min(part.most, end - time.monotonic())
            name = f"{part.program}, {link}"
            if left < LEAST:
                problem = "no time was left"
            else:
                print(f"== {name}, {left:.0f} s at most", flush=True)
                made = command(part, link, options.out, left - END, options.small)
                problem = run(made, link, left)
            if problem:
                problems.append(f"{name}: {problem}")
    print(*problems, "Now: python benchmarks/report.py", sep="\n")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
