"""What sums of gradients by sketch do to the loss of a small GPT, and to the bytes on the wire.

    python benchmarks/study_tagc.py --out benchmarks/results/tagc.json

The model and the text of study_accuracy.py, under FSDP2 with four ranks, real processes on gloo;
every rank draws its own windows. Arithmetic and gradients are float32; what does not go by sketch,
parameters too, goes uncompressed. Runs of one seed have the same initial weights and batches.
A run that the file has already is not made again; `--config` and `--seed` choose some.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from study_accuracy import CONTEXT, EVERY, GPT, draw, evaluate, fit, load_bytes, machine
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

from tightwire.adapters.training import fsdp, tagc

RANKS, SEEDS = 4, (0, 1, 2)
STEPS, BATCH, VALIDATION, CURVE = 80, 4, 512, 16  # windows; the batch is a rank's
BASELINE = "uncompressed"
#: Embedding, head, feed-forward layers and the projection after attention, as in the paper.
SELECTED = tagc.Rule(nelem=1 << 14)
#: Biases and norms are named too, but take fewer bytes uncompressed.
ALL = tagc.Rule(exclude=None, nelem=1, dimensions=None)


class Plan(NamedTuple):
    """What all runs of a file have in common.

    Attributes:
        steps: Steps of a run.
        every: Steps between the points of its curve.
        curve: Windows of such a point.
        ranks: Number of ranks.
        batch: Windows of a batch, of each rank that draws its own.
    """

    steps: int = STEPS
    every: int = EVERY
    curve: int = CURVE
    ranks: int = RANKS
    batch: int = BATCH


DEFAULT_PLAN = Plan()
#: Makes a run: configuration, seed, plan, text, windows for validation.
Train = Callable[[str, int, Plan, torch.Tensor, torch.Tensor], dict[str, Any]]
#: None is no compression.
CONFIGS: dict[str, tagc.Tagc | None] = {
    BASELINE: None,
    **{f"{r}x, selected": tagc.Tagc(ratio=r, layers=SELECTED) for r in (2, 4, 10)},
    **{f"{r}x, all": tagc.Tagc(ratio=r, layers=ALL) for r in (2, 4, 10)},
    **{
        f"{r}x, selected, no accumulation": tagc.Tagc(ratio=r, layers=SELECTED, accumulate=False)
        for r in (2, 4, 10)
    },
    "10x, all, no accumulation": tagc.Tagc(ratio=10, layers=ALL, accumulate=False),
    "10x, selected, 1bit": tagc.Tagc(ratio=10, layers=SELECTED, index="1bit"),
}


def train(
    config: str, seed: int, plan: Plan, data: torch.Tensor, windows: torch.Tensor
) -> dict[str, Any]:
    """One run, on one rank of all."""
    torch.manual_seed(seed)
    model = GPT()
    parameters = sum(p.numel() for p in model.parameters())
    mesh = init_device_mesh("cpu", (RANKS,))
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh)
    register_fsdp_forward_method(model, "loss")
    options = CONFIGS[config]
    facts: dict[str, Any] = {}
    if options is None:
        reduce = fsdp.compress(model, algorithm="native").reduce_scatter
    else:
        hooks = tagc.compress(model, options, state=tagc.State(history=1 << 20), algorithm="native")
        reduce = hooks.reduce_scatter
    start = time.perf_counter()
    curve = fitted(model, seed, plan, data, windows, foreach=True)
    seconds = time.perf_counter() - start
    if options is not None:
        facts = diagnoses(hooks.state, parameters)
    return {
        "config": config,
        "seed": seed,
        "loss": validated(model, windows),
        "curve": curve,
        "raw_bytes": reduce.raw_bytes,
        "wire_bytes": reduce.wire_bytes,
        "seconds": seconds,
        "parameters": parameters,
        **facts,
    }


def fitted(
    model: Any,
    seed: int,
    plan: Plan,
    data: torch.Tensor,
    windows: torch.Tensor,
    foreach: bool | None = None,
) -> list[Any]:
    """Train on batches of this rank's own; steps and losses of all ranks on the way."""
    mine = windows[: plan.curve][dist.get_rank() :: plan.ranks]
    own = seed * plan.ranks + dist.get_rank()
    curve = fit(model, data, mine, own, plan.steps, plan.batch, foreach, plan.every)
    losses = torch.tensor([loss for _, loss in curve], dtype=torch.float64)
    dist.all_reduce(losses)
    steps = [step for step, _ in curve]
    return list(zip(steps, (losses / plan.ranks).tolist(), strict=True))


def validated(model: GPT, windows: torch.Tensor) -> float:
    """Mean loss of the windows, of which every rank takes some."""
    mine = torch.tensor(evaluate(model, windows[dist.get_rank() :: RANKS]))
    dist.all_reduce(mine)
    return float(mine) / RANKS


def diagnoses(state: tagc.State, parameters: int) -> dict[str, Any]:
    """What the reports of a run say of its sketches."""
    sketched = [r for r in state.reports if r.ratio is not None]
    first = {r.name: r.nelem for r in sketched}
    return {
        "theta": sketched[0].theta,
        "share_of_parameters": sum(first.values()) / parameters,
        "density": float(np.mean([r.density for r in sketched])),
        "estimated": [
            float(np.average([r.estimated for r in sketched], weights=[r.nelem for r in sketched])),
            max(r.estimated for r in sketched),
        ],
        "lost": sum(r.lost for r in sketched) / max(sum(r.kept for r in sketched), 1),
    }


def run_rank(
    rank: int, store: str, jobs: list[tuple[str, int]], train: Train, plan: Plan, out: Path
) -> None:
    """What the process of a rank does: all runs, which rank 0 writes down one by one."""
    torch.set_num_threads(1)
    # Reports tell it, and the table does.
    warnings.filterwarnings("ignore", message=".*(values are estimated|'1bit' lost)")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=plan.ranks,
        timeout=timedelta(minutes=5),
    )
    data, held_back = load_bytes()
    windows = draw(held_back, VALIDATION, torch.Generator().manual_seed(0))
    for config, seed in jobs:
        found = train(config, seed, plan, data, windows)
        if rank == 0:
            record(out, plan, found)
    dist.barrier()
    dist.destroy_process_group()


def record(out: Path, plan: Plan, found: dict[str, Any]) -> None:
    """Add a run to the file."""
    recorded: dict[str, Any] = {"setting": setting(plan), "runs": []}
    if out.exists():
        recorded = json.loads(out.read_text())
    recorded |= {"date": time.strftime("%Y-%m-%d"), "machine": machine()}
    recorded["runs"].append(found)
    out.write_text(json.dumps(recorded, indent=1) + "\n")
    took = f"{found['wire_bytes'] / 1e6:.1f} MB, {found['seconds']:.0f} s"
    print(f"{found['config']}, seed {found['seed']}: {found['loss']:.4f}, {took}", flush=True)


def setting(plan: Plan) -> dict[str, Any]:
    """All that runs of one file must have in common."""
    return {
        "ranks": plan.ranks,
        "steps": plan.steps,
        "batch": plan.batch,
        "context": CONTEXT,
        "validation_windows": VALIDATION,
        "curve_windows": plan.curve,
    }


def study(
    description: str, configs: Iterable[str], train: Train, usual: Plan = DEFAULT_PLAN
) -> None:
    """Make the runs that the command line wants and the file lacks, and write each down.

    `train` makes one, on one rank of all, and is a function of the module that was started.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--config", choices=configs, nargs="+", default=list(configs))
    parser.add_argument("--seed", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--steps", type=int, default=usual.steps)
    parser.add_argument("--every", type=int, default=usual.every, help="steps between points")
    parser.add_argument("--curve", type=int, default=usual.curve, help="windows of a point")
    given = parser.parse_args()
    plan = usual._replace(steps=given.steps, every=given.every, curve=given.curve)
    if not 0 < plan.curve <= VALIDATION or plan.curve % plan.ranks:
        parser.error(f"--curve is {plan.curve}; allowed: multiples of {plan.ranks} to {VALIDATION}")
    done = set()
    if given.out.exists():
        recorded = json.loads(given.out.read_text())
        if recorded["setting"] != setting(plan):
            parser.error(f"{given.out} has runs of another setting")
        done = {(r["config"], r["seed"]) for r in recorded["runs"]}
    wanted = [(config, seed) for seed in given.seed for config in given.config]
    jobs = [job for job in wanted if job not in done]
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        shared = f"{folder}/store", jobs, train, plan, given.out
        ranks = [context.Process(target=run_rank, args=(r, *shared)) for r in range(plan.ranks)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    if any(process.exitcode for process in ranks):
        raise RuntimeError("a rank has failed")


if __name__ == "__main__":
    study(__doc__.splitlines()[0], CONFIGS, train)
