"""The error of dynamiq and others in sums over ranks, by budget, component and number of ranks.

    python benchmarks/study_dynamiq.py --out benchmarks/results/dynamiq.json

vNMSE is sum((x - y)^2) / sum(x^2) of the sum of all ranks. It is what `Communicator.all_reduce`
makes of it, the ranks being threads of one process; thc and omnireduce add up their cells. Columns
are gradients: of the GPT of study_accuracy.py, trained, every rank having windows of its own; and
of Student's t(4), with a scale for each 256 elements that ranks share, whose logarithm is normal:
the more it spreads, the more locality there is.

A row that the file has already is not made again; `--table` chooses some.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from study_accuracy import BATCH, CURVE, GPT, VALIDATION, draw, fit, load_bytes, machine

import tightwire as tw
from tightwire.adapters.collectives.auto_scale import AutoScale
from tightwire.adapters.collectives.communicator import Topology
from tightwire.adapters.transports.threads import ThreadTransport, run_ranks
from tightwire.homomorphic import add

Floats = npt.NDArray[np.float32]

#: Elements of the synthetic sets; steps that the GPT is trained; draws of the gradients.
N, STEPS, DRAWS, RANKS = 1 << 20, 150, 2, 8
#: One draw is enough from here on.
MANY_RANKS = 16
#: Of automatic scaling: steps, the share of sums that may overflow, and by how much mu shrinks.
SCALING_STEPS, OVERFLOWS, SHRINKING = 40, 1e-5, 0.95
#: Elements of what is scaled so, at most.
SCALED = 1 << 16
#: All parameters, and one of them, which has less locality.
TRAINED, LAYER, PARAMETER = "GPT", "GPT, one layer", "blocks.1.up.weight"
SPREADS = (1.6, 0.8, 0.0)
COLUMNS = (TRAINED, LAYER, *(f"spread {s}" for s in SPREADS))

Params = dict[str, Any]
PAPER: Params = {"widths": "pow2", "grid": "signed", "scales": "stochastic"}
#: What the paper's table 6 starts from; then what each step changes. All of them, with correlated
#: rounding, is PAPER.
PLAIN: Params = {
    "widths": "fixed",
    "grid": "uniform",
    "scales": "wide",
    "group": 32,
    "rounding": "stochastic",
}
STEPS_UP: dict[str, Params] = {
    "uniform": {},
    "non-uniform": {"grid": "signed"},
    "+ variable widths": {"widths": "pow2"},
    "+ hierarchical scales": {"scales": "stochastic", "group": 16},
}
#: Each changes one thing of the default, at 5 bits.
COMPONENTS: dict[str, Params] = {
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
}


@dataclass(frozen=True)
class Row:
    """A line of a table: a codec, and how so many ranks sum by it.

    `how` is a topology, or names one of the functions below.
    """

    table: str
    label: str
    codec: tw.Codec
    ranks: int = RANKS
    how: Topology | Literal["in-network", "agreed scales"] = "ring"
    #: Of scales that ranks agree on, the share of a sum that may overflow.
    allowed: float = OVERFLOWS

    @property
    def name(self) -> str:
        """No other row has it."""
        return f"{self.table}: {self.label}, {self.how}, {self.ranks} ranks"

    @property
    def bits(self) -> float:
        """Bits of a whole buffer for each of 2^20 elements."""
        return self.codec.plan((N,), "float32").nbytes * 8 / N

    def error(self, xs: Floats, seed: int) -> float:
        """VNMSE of the sum of the rows of `xs`."""
        if self.how == "in-network":
            return cells_error(self.codec, xs, seed)
        if self.how == "agreed scales":
            return scaled_error(self.codec, xs, self.allowed)
        return sum_error(self.codec, self.how, xs, seed)


def dynamiq(**params: Any) -> tw.Codec:
    return tw.codec("dynamiq", **params)


def thc(ranks: int) -> tw.Codec:
    """Cells that hold the sum of so many ranks; beyond 8 the paper has 12 bits, we have 16."""
    return tw.codec("thc", bits=8 if ranks <= 8 else 16)


def rows() -> Iterator[Row]:
    """All rows, those first that say most."""
    yield Row("schemes", "dynamiq any, 5 bits", dynamiq())
    for name, bits in (("e4m3", 8), ("e3m2", 6), ("e2m1", 4)):
        mx = tw.codec("mx", element=name)
        yield Row("schemes", f"MXFP{bits}", mx)
        agreed = tw.codec("mx", element=name, scale_rule="agreed")
        label = f"MXFP{bits}, scales agreed on"
        yield Row("schemes", label, agreed, how="agreed scales")
    label += ", 1 % may overflow"
    yield Row("schemes", label, agreed, how="agreed scales", allowed=0.01)
    yield Row("schemes", "thc", thc(RANKS), how="in-network")
    yield Row("schemes", "thc, one norm", tw.codec("thc", norm="tensor"), how="in-network")
    yield Row("schemes", "omnireduce", tw.codec("omnireduce"), how="in-network")
    for bits in (3, 4, 5, 6, 8):
        yield Row("schemes", f"dynamiq pow2, {bits} bits", dynamiq(bits=bits, widths="pow2"))
    for bits in (3, 4, 5.5, 6, 7, 8):
        yield Row("schemes", f"dynamiq any, {bits} bits", dynamiq(bits=bits))
    for bits in (3, 4, 5, 6):
        yield Row("schemes", f"the paper's, {bits} bits", dynamiq(bits=bits, **PAPER))
    # A fixed width is a whole number: 3 bits of 4, as scales take some. So they get more, too.
    for bits in (4, 4.5625):
        params = PLAIN | {"bits": bits}
        for label, change in STEPS_UP.items():
            params |= change
            if bits == 4 or params["widths"] == "fixed":
                yield Row("steps", f"{label}, {bits} bits", dynamiq(**params))
    for label, params in COMPONENTS.items():
        yield Row("components", label, dynamiq(**params))
    others: tuple[Topology, ...] = ("butterfly", "two-shot")
    for how in others:
        yield Row("topologies", "dynamiq any, 5 bits", dynamiq(), how=how)
        yield Row("topologies", "MXFP8", tw.codec("mx"), how=how)
        yield Row("topologies", "MXFP4", tw.codec("mx", element="e2m1"), how=how)
    for ranks in (2, 4, 16, 32, 64):
        yield Row("ranks", "dynamiq any, 5 bits", dynamiq(), ranks)
        yield Row("ranks", "MXFP8", tw.codec("mx"), ranks)
        yield Row("ranks", "MXFP4", tw.codec("mx", element="e2m1"), ranks)
        yield Row("ranks", "thc", thc(ranks), ranks, "in-network")
        yield Row("ranks", "omnireduce", tw.codec("omnireduce"), ranks, "in-network")


def synthetic(ranks: int, n: int, spread: float, seed: int) -> Floats:
    """Gradients of all ranks, shape (ranks, n)."""
    rng = np.random.default_rng(seed)
    scale = np.repeat(np.exp(spread * rng.standard_normal(n // 256)), 256)
    x: Floats = (rng.standard_t(4, (ranks, n)) * scale).astype(np.float32)
    return x


@functools.cache
def trained(steps: int) -> tuple[GPT, torch.Tensor, float]:
    """The GPT after so many steps in this process, the text, and the loss in the end."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    data, held_back = load_bytes()
    windows = draw(held_back, VALIDATION, torch.Generator().manual_seed(0))
    model = GPT()
    curve = fit(model, data, windows[:CURVE], seed=0, steps=steps)
    return model, data, curve[-1][1]


@functools.lru_cache(maxsize=DRAWS)
def of_gpt(ranks: int, steps: int, seed: int) -> Floats:
    """Gradients of all parameters of as many data-parallel ranks, shape (ranks, parameters)."""
    model, data, _ = trained(steps)
    rng = torch.Generator().manual_seed(1 + seed)
    found = []
    for _ in range(ranks):
        model.zero_grad()
        model.loss(draw(data, BATCH, rng)).backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]).numpy())
    return np.stack(found)


def of_layer(ranks: int, steps: int, seed: int) -> Floats:
    """The columns of `of_gpt` that are of PARAMETER."""
    at = 0
    for name, parameter in trained(steps)[0].named_parameters():
        if name == PARAMETER:
            return of_gpt(ranks, steps, seed)[:, at : at + parameter.numel()]
        at += parameter.numel()
    raise ValueError(f"the model has no {PARAMETER}")


def gradients(column: str, ranks: int, n: int, steps: int, seed: int) -> Floats:
    """Gradients of all ranks, shape (ranks, n); of the GPT as many as it has parameters."""
    if column == TRAINED:
        return of_gpt(ranks, steps, seed)
    if column == LAYER:
        return of_layer(ranks, steps, seed)
    return synthetic(ranks, n, SPREADS[COLUMNS.index(column) - 2], seed)


def vnmse(y: npt.NDArray[Any], xs: Floats) -> float:
    """Of `y` as the sum of the rows of `xs`."""
    exact = xs.sum(axis=0, dtype=np.float64)
    return float(((y - exact) ** 2).sum() / (exact**2).sum())


def sum_error(codec: tw.Codec, topology: Topology, xs: Floats, seed: int) -> float:
    """VNMSE of the sum of the rows of `xs`, which all ranks get bit for bit."""

    def task(transport: ThreadTransport) -> Floats:
        comm = tw.Communicator(transport, codec, seed=seed, topology=topology)
        found: Floats = comm.all_reduce(xs[transport.rank])
        return found

    first, *others = run_ranks(len(xs), task, timeout=600)
    if any(y.tobytes() != first.tobytes() for y in others):
        raise RuntimeError(f"{codec}: ranks got different sums")
    return vnmse(first, xs)


def cells_error(codec: tw.Codec, xs: Floats, seed: int) -> float:
    """VNMSE of the sum that the cells of all ranks, encoded with agreed norms, add up to."""
    stats = functools.reduce(np.maximum, (codec.measure(x) for x in xs))
    keys = (tw.Key(seed, 0, rank, len(xs)) for rank in range(len(xs)))
    terms = (codec.encode(x, stats=stats, key=key) for x, key in zip(xs, keys, strict=True))
    return vnmse(tw.decode(functools.reduce(add, terms)), xs)


def scaled_error(codec: tw.Codec, xs: Floats, allowed: float) -> float:
    """VNMSE of a ring whose ranks agree on scales, as `AutoScale` has them in the end.

    The mean of the last quarter of so many sums, all of the same gradients; of many blocks some are
    taken, evenly spaced. A share `allowed` of a sum may overflow.
    """
    count = xs.shape[1] // 32
    blocks = xs[:, : 32 * count].reshape(len(xs), count, 32)[:, :: -(-32 * count // SCALED)]
    own = np.ascontiguousarray(blocks.reshape(len(xs), -1))

    def task(transport: ThreadTransport) -> list[float]:
        scaling = AutoScale(allowed, SHRINKING)
        comm = tw.Communicator(transport, codec, topology="ring", scaling=scaling)
        sums = [comm.all_reduce(own[transport.rank]) for _ in range(SCALING_STEPS)]
        return [vnmse(y, own) for y in sums[-SCALING_STEPS // 4 :]] if not comm.rank else []

    return float(np.mean(run_ranks(len(xs), task, timeout=600)[0]))


def locality(x: Floats) -> float:
    """Standard deviation of ln of the root mean squares of super-groups that are not zero."""
    energies = np.add.reduceat(x.astype(np.float64) ** 2, np.arange(0, x.size, 256))
    return float(np.log(energies[energies > 0]).std() / 2)


def setting(given: argparse.Namespace) -> dict[str, Any]:
    """All that rows of one file must have in common."""
    return {
        "elements": given.elements,
        "draws": given.draws,
        "spreads": list(SPREADS),
        "columns": list(COLUMNS),
        "steps": given.steps,
        "batch": BATCH,
        "scaled": SCALED,
        "ranks": RANKS,
        "many_ranks": MANY_RANKS,
    }


def measured(row: Row, given: argparse.Namespace) -> dict[str, Any]:
    """What the file says of the row."""
    start = time.perf_counter()
    draws = 1 if row.ranks >= MANY_RANKS else given.draws
    errors = {
        column: [
            row.error(gradients(column, row.ranks, given.elements, given.steps, seed), seed)
            for seed in range(draws)
        ]
        for column in COLUMNS
    }
    return {
        "table": row.table,
        "label": row.label,
        "how": row.how,
        "ranks": row.ranks,
        "codec": str(row.codec.spec),
        "bits": row.bits,
        "vnmse": errors,
        "seconds": time.perf_counter() - start,
    }


def write(out: Path, recorded: dict[str, Any]) -> None:
    """Write the file whole or not at all."""
    recorded |= {"date": time.strftime("%Y-%m-%d"), "machine": machine()}
    new = out.with_name(out.name + ".tmp")
    new.write_text(json.dumps(recorded, indent=1) + "\n")
    os.replace(new, out)


def main() -> None:
    """Make the rows that are missing, and write each down when it is done."""
    wanted = list(rows())
    tables = list(dict.fromkeys(row.table for row in wanted))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--table", choices=tables, nargs="+", default=tables)
    parser.add_argument("--elements", type=int, default=N, help="of a synthetic set")
    parser.add_argument("--draws", type=int, default=DRAWS)
    parser.add_argument("--steps", type=int, default=STEPS, help="that the GPT is trained")
    given = parser.parse_args()
    recorded: dict[str, Any] = {"setting": setting(given), "rows": {}}
    if given.out.exists():
        recorded = json.loads(given.out.read_text())
        if recorded["setting"] != setting(given):
            parser.error(f"{given.out} has rows of another setting")
    todo = [r for r in wanted if r.table in given.table and r.name not in recorded["rows"]]
    if todo and "gpt" not in recorded:
        found = [f(RANKS, given.steps, 0) for f in (of_gpt, of_layer)]
        recorded["gpt"] = {
            "loss": trained(given.steps)[2],
            "parameters": found[0].shape[1],
            "layer": PARAMETER,
            "locality": [locality(x.sum(axis=0)) for x in found],
        }
    for row in todo:
        made = recorded["rows"][row.name] = measured(row, given)
        write(given.out, recorded)
        errors = ", ".join(f"{np.mean(e):.2e}" for e in made["vnmse"].values())
        print(f"{row.name}: {errors}; {made['seconds']:.0f} s", flush=True)


if __name__ == "__main__":
    main()
