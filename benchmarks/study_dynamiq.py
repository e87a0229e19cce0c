"""The error of dynamiq in sums by hops, by budget, component and number of ranks.

    python benchmarks/study_dynamiq.py [--out FILE.json]

vNMSE is sum((x - y)^2) / sum(x^2) of the sum of all ranks. It is what `Communicator.all_reduce`
makes of it, the ranks being threads of one process. Gradients are of Student's t(4), with a scale
for each 256 elements that ranks share, whose logarithm is normal: the more it spreads, the more
locality there is.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import tightwire as tw
from tightwire.adapters.collectives import TOPOLOGIES, Topology
from tightwire.adapters.memory import MemoryTransport, run_ranks
from tightwire.codecs.minifloat import BY_NAME, round_codes, values_of

Floats = npt.NDArray[np.float32]

N, DRAWS, RANKS = 1 << 20, 2, 8
#: Of automatic scaling: steps, the share of sums that may overflow, and by how much mu shrinks.
SCALING_STEPS, OVERFLOWS, SHRINKING = 40, 1e-5, 0.95
#: Elements of what is scaled so, at most.
SCALED = 1 << 16
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


def sum_error(codec: tw.Codec, topology: Topology, xs: Floats, seed: int) -> float:
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


def agreed_scales_error(name: str, xs: Floats, seed: int) -> float:
    """VNMSE of a ring whose ranks agree on scales and change none on the way; appendix C.

    Blocks of 32 have the scale mu times the largest magnitude of all ranks, so that sums are small
    floats too, which saturate. mu starts at the number of ranks; too many overflows double it, else
    it shrinks (FP8-LM, section 2.1). The mean of the last steps, all of the same gradients; nothing
    is drawn, and `seed` not looked at.
    """
    element = BY_NAME[name]
    values = values_of(element).astype(np.float32)
    most = values[element.largest]
    blocks = xs.reshape(len(xs), -1, 32)
    largest = np.abs(blocks).max(axis=(0, 2), keepdims=True)
    exact = xs.sum(axis=0, dtype=np.float64)

    def rounded(x: Floats) -> Floats:
        found: Floats = values[round_codes(x.view(np.uint32), 127, element)]
        return found

    mu, found = float(len(xs)), []
    for _ in range(SCALING_STEPS):
        scale: Floats = np.where(largest > 0, largest * np.float32(mu) / most, np.float32(1))
        total, overflows = np.zeros(blocks.shape[1:], np.float32), 0
        for x in rounded(np.divide(blocks, scale, dtype=np.float32)):
            total += x
            overflows += int(np.count_nonzero(np.abs(total) > most))
            total = rounded(total)
        y = (total * scale[0]).reshape(-1)
        found.append(float(((y - exact) ** 2).sum() / (exact**2).sum()))
        mu *= 2 if overflows > OVERFLOWS * xs.size else SHRINKING
    return float(np.mean(found[-SCALING_STEPS // 4 :]))


def errors(error: Callable[[Floats, int], float], ranks: int, n: int, draws: int) -> list[float]:
    """Mean errors, one of each spread; `error` takes gradients and a seed."""
    found = [
        [error(gradients(ranks, n, spread, seed), seed) for seed in range(draws)]
        for spread in SPREADS
    ]
    means: list[float] = np.mean(found, axis=1).tolist()
    return means


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--elements", type=int, default=N)
    parser.add_argument("--draws", type=int, default=DRAWS)
    given = parser.parse_args()
    rows: dict[str, list[float]] = {}

    def tell(name: str, found: list[float]) -> None:
        rows[name] = found
        print(f"| {name} | " + " | ".join(f"{e:.2e}" for e in found) + " |", flush=True)

    def note(name: str, codec: tw.Codec, ranks: int = RANKS, topology: Topology = "ring") -> None:
        error = functools.partial(sum_error, codec, topology)
        tell(name, errors(error, ranks, given.elements, given.draws))

    print("| | " + " | ".join(f"spread {s}" for s in SPREADS) + " |\n|---|" + "---|" * len(SPREADS))
    for element, bits in (("e4m3", 8.25), ("e3m2", 6.25), ("e2m1", 4.25)):
        note(f"mx {element}, {bits} bits", tw.codec("mx", element=element))
        scaled = functools.partial(agreed_scales_error, element)
        n = min(given.elements, SCALED)
        tell(f"{element}, scales agreed on", errors(scaled, RANKS, n, given.draws))
    for name, params in VARIANTS.items():
        note(name, tw.codec("dynamiq", **params))
    for ranks in (2, 4, 16, 32, 64):
        for name in ("dynamiq", "mx"):
            note(f"{name}, {ranks} ranks", tw.codec(name), ranks)
    for topology in TOPOLOGIES:
        for name in ("dynamiq", "mx"):
            if topology != "ring":
                note(f"{name}, {topology}", tw.codec(name), RANKS, topology)
    if given.out:
        record = {"elements": given.elements, "draws": given.draws, "spreads": SPREADS}
        given.out.write_text(json.dumps(record | {"vnmse": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
