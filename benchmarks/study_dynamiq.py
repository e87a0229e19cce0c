"""The error of dynamiq in sums by hops, by budget, component and number of ranks.

    python benchmarks/study_dynamiq.py [--out FILE.json]

vNMSE is sum((x - y)^2) / sum(x^2) of the sum of all ranks. It is what `Communicator.all_reduce`
makes of it, the ranks being threads of one process. Gradients are of Student's t(4), with a scale
for each 256 elements that ranks share, whose logarithm is normal: the more it spreads, the more
locality there is.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import tightwire as tw
from tightwire.adapters.collectives import TOPOLOGIES, Topology
from tightwire.adapters.memory import MemoryTransport, run_ranks

Floats = npt.NDArray[np.float32]

N, DRAWS, RANKS = 1 << 20, 2, 8
SPREADS = (1.6, 0.8, 0.0)
PAPER: dict[str, Any] = {"widths": "pow2", "grid": "signed", "scales": "stochastic"}
#: What is compared, each at 5 bits unless it says otherwise.
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "pow2": {"widths": "pow2"},
    "fixed": {"widths": "fixed"},
    "signed grid": {"grid": "signed"},
    "uniform grid": {"grid": "uniform"},
    "stochastic scales": {"scales": "stochastic"},
    "wide scales of 32": {"scales": "wide", "group": 32},
    "independent rounding": {"rounding": "stochastic"},
    "groups of 8": {"group": 8},
    "groups of 32": {"group": 32},
    "super-groups of 128": {"super_group": 128},
    "means": {"center": True},
    "the paper's": PAPER,
    **{f"{bits} bits": {"bits": bits} for bits in (3.5, 4, 6, 7, 8)},
    **{f"the paper's, {bits} bits": PAPER | {"bits": bits} for bits in (4, 6)},
}


def gradients(ranks: int, n: int, spread: float, seed: int) -> Floats:
    """Gradients of all ranks, shape (ranks, n)."""
    rng = np.random.default_rng(seed)
    scale = np.repeat(np.exp(spread * rng.standard_normal(n // 256)), 256)
    x: Floats = (rng.standard_t(4, (ranks, n)) * scale).astype(np.float32)
    return x


def sum_error(codec: tw.Codec, xs: Floats, seed: int, topology: Topology) -> float:
    """VNMSE of the sum of the rows of `xs`, which all ranks get bit for bit."""

    def task(transport: MemoryTransport) -> Floats:
        comm = tw.Communicator(transport, codec, seed=seed, topology=topology)
        found: Floats = comm.all_reduce(xs[transport.rank])
        return found

    first, *others = run_ranks(len(xs), task, timeout=600)
    if any(y.tobytes() != first.tobytes() for y in others):
        raise RuntimeError(f"{codec}: ranks got different sums")
    exact = xs.sum(axis=0, dtype=np.float64)
    return float(((first - exact) ** 2).sum() / (exact**2).sum())


def errors(
    codec: tw.Codec, ranks: int, n: int, draws: int, topology: Topology = "ring"
) -> list[float]:
    """Mean errors, one of each spread."""
    found = [
        [
            sum_error(codec, gradients(ranks, n, spread, seed), seed, topology)
            for seed in range(draws)
        ]
        for spread in SPREADS
    ]
    return np.mean(found, axis=1).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--elements", type=int, default=N)
    parser.add_argument("--draws", type=int, default=DRAWS)
    given = parser.parse_args()
    rows: dict[str, list[float]] = {}

    def note(name: str, codec: tw.Codec, ranks: int = RANKS, topology: Topology = "ring") -> None:
        rows[name] = errors(codec, ranks, given.elements, given.draws, topology)
        print(f"| {name} | " + " | ".join(f"{e:.2e}" for e in rows[name]) + " |", flush=True)

    print("| | " + " | ".join(f"spread {s}" for s in SPREADS) + " |\n|---|" + "---|" * len(SPREADS))
    for element, bits in (("e4m3", 8.25), ("e3m2", 6.25), ("e2m1", 4.25)):
        note(f"mx {element}, {bits} bits", tw.codec("mx", element=element))
    for name, params in VARIANTS.items():
        note(name, tw.codec("dynamiq", **params))
    for ranks in (2, 4, 16, 32, 64):
        for name in ("dynamiq", "mx"):
            note(f"{name}, {ranks} ranks", tw.codec(name), ranks)
    for name in ("dynamiq", "mx"):
        for topology in TOPOLOGIES:
            if topology != "ring":
                note(f"{name}, {topology}", tw.codec(name), RANKS, topology)
    if given.out:
        record = {"elements": given.elements, "draws": given.draws, "spreads": SPREADS}
        given.out.write_text(json.dumps(record | {"vnmse": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
