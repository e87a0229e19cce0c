"""The error of lossy codecs on three data sets, and of all-reduces through one of them.

    python benchmarks/study_error.py --out benchmarks/results/error.json

vNMSE is sum((x - y)^2) / sum(x^2). Every figure is a mean over draws of 2^20 float32 values, with
its standard deviation. All-reduces are done between threads over the memory transport: two-shot by
the communicator, the ring by its messages.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

import tightwire as tw
from tightwire.adapters.transports.threads import ThreadTransport, run_ranks

Floats = npt.NDArray[np.float32]
Rng = np.random.Generator

N, DRAWS = 1 << 20, 8
SHARED, GROUPS, SUMS = 1 << 18, (4, 8, 16), 2  # elements of a rank, ranks, draws of all-reduces
BLOCK, LARGEST = 256, np.float32(448)
TAIL, GROUP, SPREAD, TINY = 1.75, 16, 0.95, 1e-7

#: What the data sets are; `long-tailed` and `block-local` have fitted parameters.
DATA = {
    "long-tailed": f"1e-3 a exp({TAIL} b), a and b from N(0, 1): logarithmic normal tails",
    "block-local": f"0.01 a exp({SPREAD} b), b the same for {GROUP} neighbours",
    "tiny": f"{TINY:g} a",
}


def draw(name: str, n: int, rng: Rng) -> Floats:
    """Values of a data set, shape (n,)."""
    x = rng.standard_normal(n)
    if name == "long-tailed":
        x *= 1e-3 * np.exp(TAIL * rng.standard_normal(n))
    elif name == "block-local":
        x *= 0.01 * np.repeat(np.exp(SPREAD * rng.standard_normal(n // GROUP)), GROUP)
    else:
        x *= TINY
    return x.astype(np.float32)


def e4m3(x: Floats) -> Floats:
    """The nearest E4M3 value; what is larger than the largest becomes that."""
    return np.clip(x, -LARGEST, LARGEST).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)


def rotated(x: Floats) -> Floats:
    """The orthonormal Walsh-Hadamard transform of each block of x, its own inverse."""
    h, y = 1, x.reshape(-1, BLOCK)
    while h < BLOCK:
        pair = y.reshape(-1, BLOCK // (2 * h), 2, h)
        a, b = pair[:, :, 0], pair[:, :, 1]
        y = np.stack([a + b, a - b], axis=2).reshape(-1, BLOCK)
        h *= 2
    return (y * np.float32(BLOCK**-0.5)).reshape(-1)


def alphas(x: Floats) -> Floats:
    """TACO's rescaling factor (equations 6 and 7) of every block, for each of its elements."""
    energy = np.square(x.reshape(-1, BLOCK)).mean(1)
    alpha = np.clip(LARGEST / np.sqrt(energy + np.float32(1e-6)), 1e-3, 1e3)
    return np.repeat(alpha, BLOCK)


def cast(x: Floats) -> Floats:
    """E4M3 without any scale."""
    return e4m3(x)


def scaled(x: Floats) -> Floats:
    """E4M3 with one scale for the whole array."""
    s = np.abs(x).max() / LARGEST
    return e4m3(x / s) * s


def integers(x: Floats) -> Floats:
    """INT8 with one scale for the whole array, as in TACO's section 2.3."""
    s = np.abs(x).max() / np.float32(127)
    return np.rint(x / s) * s


def hadamard(quantize: Callable[[Floats], Floats]) -> Callable[[Floats], Floats]:
    """Rotate, quantize, rotate back."""
    return lambda x: rotated(quantize(rotated(x)))


def ash(quantize: Callable[[Floats], Floats]) -> Callable[[Floats], Floats]:
    """Rescale and rotate, quantize, and back."""

    def run(x: Floats) -> Floats:
        alpha = alphas(x)
        return rotated(quantize(rotated(x * alpha))) / alpha

    return run


#: Not codecs of the library: what the scale of each block is worth.
BY_HAND: dict[str, Callable[[Floats], Floats]] = {
    "e4m3, no scale": cast,
    "hadamard, e4m3, no scale": hadamard(cast),
    "ash, e4m3, no second scale": ash(cast),
    "e4m3, scale per tensor": scaled,
    "hadamard, e4m3, scale per tensor": hadamard(scaled),
    "ash, e4m3, second scale per tensor": ash(scaled),
    "int8, scale per tensor": integers,
}

CODECS: dict[str, tuple[str, dict[str, Any]]] = {
    "taco none e4m3": ("taco", {"transform": "none"}),
    "taco hadamard e4m3": ("taco", {"transform": "hadamard"}),
    "taco ash e4m3": ("taco", {}),
    "taco ash e4m3 merged": ("taco", {"scales": "merged"}),
    "taco ash e5m2": ("taco", {"format": "e5m2"}),
    "taco hadamard int8": ("taco", {"format": "int8", "transform": "hadamard"}),
    "taco ash int8": ("taco", {"format": "int8"}),
    "taco none int8": ("taco", {"format": "int8", "transform": "none"}),
    "mx e4m3": ("mx", {"element": "e4m3"}),
    "mx e4m3 ceil": ("mx", {"element": "e4m3", "scale_rule": "ceil"}),
    "mx e5m2": ("mx", {"element": "e5m2"}),
    "mx e3m2": ("mx", {"element": "e3m2"}),
    "mx e2m3": ("mx", {"element": "e2m3"}),
    "mx e2m1": ("mx", {"element": "e2m1"}),
    "mx int8": ("mx", {"element": "int8"}),
    "nvfp4": ("nvfp4", {}),
    "sdp4bit int8": ("sdp4bit", {"bits": 8}),
    "sdp4bit int4": ("sdp4bit", {}),
    "tahquant": ("tahquant", {"hidden": 1024}),
    "tahquant backward": ("tahquant", {"hidden": 1024, "direction": "backward"}),
    "dynamiq 5 bits": ("dynamiq", {}),
    "dynamiq 5 bits pow2": ("dynamiq", {"widths": "pow2"}),
}

SUMMED = ("taco ash e4m3", "taco none e4m3", "mx e4m3")


def summary(values: list[float]) -> dict[str, float]:
    """Mean, and standard deviation of one draw."""
    return {"vnmse": float(np.mean(values)), "deviation": float(np.std(values, ddof=1))}


def codec_errors(name: str) -> dict[str, dict[str, float]]:
    """Error of every method on a data set, and the bits that it takes for an element."""
    found: dict[str, list[float]] = {method: [] for method in (*BY_HAND, *CODECS)}
    bits = {}
    for seed in range(DRAWS):
        x = draw(name, N, np.random.default_rng(seed))
        for method, quantize in BY_HAND.items():
            found[method].append(tw.error(x, quantize(x)).vnmse)
        for method, (codec, params) in CODECS.items():
            chosen = tw.codec(codec, **params)
            buf = chosen.encode(x, key=tw.Key(seed) if chosen.spec.draws else None)
            found[method].append(tw.error(x, tw.decode(buf)).vnmse)
            bits[method] = {"bits": 8 * buf.nbytes / N}
    return {method: summary(values) | bits.get(method, {}) for method, values in found.items()}


def ring(comm: tw.Communicator, x: Floats) -> Floats:
    """A ring all-reduce of x, shape (ranks * n,): partial sums are encoded at every hop."""
    rank, size = comm.rank, comm.world_size
    shares = x.reshape(size, -1).copy()
    for step in range(size - 1):
        comm.send(shares[(rank - step) % size], (rank + 1) % size)
        came = np.empty_like(shares[0])
        comm.recv(came, (rank - 1) % size)
        shares[(rank - step - 1) % size] += came
    # Rank r has the sum of share r + 1.
    sums = comm.all_gather(shares[(rank + 1) % size]).reshape(size, -1)
    return np.roll(sums, 1, axis=0).reshape(-1)


def sum_error(name: str, method: str, algorithm: str, size: int, seed: int) -> float:
    """Error of one all-reduce of independent draws; all ranks must get the same bits."""
    rng = np.random.default_rng([seed, size])
    parts = [draw(name, SHARED, rng) for _ in range(size)]
    codec, params = CODECS[method]

    def task(transport: ThreadTransport) -> Floats:
        comm = tw.Communicator(transport, tw.codec(codec, **params))
        x = parts[transport.rank]
        total: Floats = comm.all_reduce(x) if algorithm == "two-shot" else ring(comm, x)
        return total

    results = run_ranks(size, task, timeout=300.0)
    if any(r.tobytes() != results[0].tobytes() for r in results):
        raise RuntimeError(f"{algorithm}: ranks have different sums")
    exact = np.sum(parts, axis=0, dtype=np.float64)
    return tw.error(exact, results[0]).vnmse


def sum_errors(name: str) -> list[dict[str, Any]]:
    """All-reduces of a data set."""
    return [
        {"codec": method, "algorithm": algorithm, "ranks": size}
        | summary([sum_error(name, method, algorithm, size, seed) for seed in range(SUMS)])
        for method in SUMMED
        for algorithm in ("two-shot", "ring")
        for size in GROUPS
    ]


def main() -> None:
    """Measure everything and write it down."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "versions": {
            "tightwire": tw.__version__,
            "python": platform.python_version(),
            "numpy": np.__version__,
            "ml_dtypes": ml_dtypes.__version__,
        },
        "data": DATA,
        "elements": N,
        "draws": DRAWS,
        "all_reduce_elements": SHARED,
        "all_reduce_draws": SUMS,
        "codecs": {name: codec_errors(name) for name in DATA},
        "all_reduce": {name: sum_errors(name) for name in DATA},
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
