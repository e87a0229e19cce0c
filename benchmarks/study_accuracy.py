"""What encoding tensor-parallel activations and gradients does to the loss of a small GPT.

    python benchmarks/study_accuracy.py --out benchmarks/results/accuracy.json

A byte-level GPT of a million parameters is trained on sources of Python's standard library with two
tensor-parallel ranks, real processes on gloo; every tenth file is kept for validation. Arithmetic
is float32; what ranks exchange is rounded to bfloat16 before it is encoded. Runs of one seed have
the same initial weights and batches, so the effect of a codec is their difference. A run that the
file has already is not made again; `--config` and `--seed` choose some.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import pathlib
import platform
import sysconfig
import tempfile
import time
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from study_error import BY_HAND, CODECS
from torch import nn
from torch.nn import functional as F

import tightwire as tw
from tightwire.adapters.training import tensor_parallel as tp
from tightwire.adapters.transports.torch_dist import TorchDist

RANKS, SEEDS = 2, (0, 1, 2)
VOCAB, WIDTH, HEADS, LAYERS, CONTEXT = 256, 160, 4, 3, 64
STEPS, BATCH, WARMUP, LEARNING_RATE, LAST_RATE = 300, 8, 30, 2e-3, 2e-4
TENSORS, BASELINE = "tensors", "bfloat16"
EVERY, VALIDATION, CURVE = 50, 512, 64  # steps between points of the curve; windows

#: Codec, its parameters, and what tensors are rounded to before they are encoded.
CONFIGS: dict[str, tuple[str | None, dict[str, Any], str | None]] = {
    "float32": (None, {}, None),
    "bfloat16": (None, {}, "bfloat16"),
    "taco": ("taco", {}, "bfloat16"),
    "taco none": ("taco", {"transform": "none"}, "bfloat16"),
    "mxfp8": ("mx", {"element": "e4m3"}, "bfloat16"),
    "mxfp4": ("mx", {"element": "e2m1"}, "bfloat16"),
    "taco int8": ("taco", {"format": "int8"}, "bfloat16"),
    "nvfp4": ("nvfp4", {}, "bfloat16"),
    "taco hadamard": ("taco", {"transform": "hadamard"}, "bfloat16"),
    "taco e5m2": ("taco", {"format": "e5m2"}, "bfloat16"),
    "taco int8 none": ("taco", {"format": "int8", "transform": "none"}, "bfloat16"),
    # Shares of a sum are flat: a token is told.
    "tahquant": ("tahquant", {"hidden": WIDTH}, "bfloat16"),
}


class Block(nn.Module):
    """Pre-norm transformer block of (batch, time, width) whose two halves are tensor-parallel."""

    def __init__(self, parallel: tp.TensorParallel | None) -> None:
        super().__init__()
        self.heads = HEADS // (1 if parallel is None else RANKS)
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = linear(WIDTH, 3 * WIDTH), linear(WIDTH, WIDTH)
        self.up, self.down = linear(WIDTH, 4 * WIDTH), linear(4 * WIDTH, WIDTH)
        if parallel is not None:
            self.qkv = tp.ColumnParallelLinear(self.qkv, parallel, parts=3)
            self.proj = tp.RowParallelLinear(self.proj, parallel)
            self.up = tp.ColumnParallelLinear(self.up, parallel)
            self.down = tp.RowParallelLinear(self.down, parallel)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Residual attention over this rank's heads, then a residual MLP."""
        split = self.qkv(self.ln1(x)).unflatten(-1, (3, self.heads, WIDTH // HEADS))
        q, k, v = split.permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(heads.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class GPT(nn.Module):
    """Embedding and head are on every rank, and get the same gradients there.

    Without `parallel` the model is not tensor-parallel.
    """

    def __init__(self, parallel: tp.TensorParallel | None = None) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)
        self.blocks = nn.ModuleList(Block(parallel) for _ in range(LAYERS))
        self.ln_f, self.head = nn.LayerNorm(WIDTH), linear(WIDTH, VOCAB)

    def loss(self, windows: torch.Tensor) -> torch.Tensor:
        """Next-byte cross-entropy, in nats, of windows of shape (batch, CONTEXT + 1)."""
        x = self.tokens(windows[:, :-1]) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.ln_f(x)).flatten(0, 1), windows[:, 1:].flatten())


def linear(width: int, out: int) -> nn.Linear:
    """A layer initialised with N(0, 0.02); the same on all ranks, which have the same seed."""
    layer = nn.Linear(width, out)
    nn.init.normal_(layer.weight, std=0.02)
    nn.init.zeros_(layer.bias)
    return layer


def load_bytes() -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes of the standard library's sources, for training and, of other files, for validation."""
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3"}
    paths = [
        path
        for path in sorted(root.rglob("*.py"))
        if not skipped.intersection(path.relative_to(root).parts)
    ]
    parts = [paths[k::10] for k in range(10)]
    sources = [path for part in parts[1:] for path in part], parts[0]
    found = [b"\n".join(path.read_bytes() for path in part) for part in sources]
    train, validation = (torch.frombuffer(bytearray(data), dtype=torch.uint8) for data in found)
    return train, validation


def draw(data: torch.Tensor, count: int, rng: torch.Generator) -> torch.Tensor:
    """`count` random windows of CONTEXT + 1 bytes, as int64."""
    starts = torch.randint(len(data) - CONTEXT, (count, 1), generator=rng)
    return data[starts + torch.arange(CONTEXT + 1)].long()


def rate(step: int, steps: int = STEPS) -> float:
    """Linear warm-up, then half a cosine down to LAST_RATE."""
    if step < WARMUP:
        return LEARNING_RATE * (step + 1) / WARMUP
    done = (step - WARMUP) / (steps - WARMUP)
    return LAST_RATE + (LEARNING_RATE - LAST_RATE) * 0.5 * (1 + float(np.cos(np.pi * done)))


def evaluate(model: GPT, windows: torch.Tensor) -> float:
    """Mean loss of the windows, with what the ranks exchange encoded as in training."""
    with torch.no_grad():
        return float(np.mean([model.loss(part).item() for part in windows.split(64)]))


def fit(
    model: GPT,
    data: torch.Tensor,
    windows: torch.Tensor,
    seed: int,
    steps: int = STEPS,
    batch: int = BATCH,
    foreach: bool | None = None,
    every: int = EVERY,
) -> list[Any]:
    """Train in place, and return steps and losses on the way."""
    rng = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, foreach=foreach
    )
    curve: list[tuple[int, float]] = []
    for step in range(steps):
        if step % every == 0:
            curve.append((step, evaluate(model, windows[:CURVE])))
        optimizer.param_groups[0]["lr"] = rate(step, steps)
        optimizer.zero_grad()
        model.loss(draw(data, batch, rng)).backward()
        optimizer.step()
    return [*curve, (steps, evaluate(model, windows[:CURVE]))]


def train(config: str, seed: int) -> dict[str, Any]:
    """One run, on one rank of all."""
    codec, params, wire = CONFIGS[config]
    chosen = None if codec is None else tw.codec(codec, **params)
    # It has another form for gradients.
    back = tw.codec(codec, direction="backward", **params) if codec == "tahquant" else chosen
    parallel = tp.connect(chosen, back, wire=wire)
    torch.manual_seed(seed)
    model = GPT(parallel)
    data, held_back = load_bytes()
    windows = draw(held_back, VALIDATION, torch.Generator().manual_seed(0))
    start = time.perf_counter()
    curve = fit(model, data, windows, seed)
    seconds = time.perf_counter() - start
    sent = {"raw_bytes": parallel.raw_bytes, "wire_bytes": parallel.wire_bytes}
    loss = evaluate(model, windows)
    same_everywhere(model)
    parameters = sum(p.numel() for p in model.parameters())
    shared = sum(p.numel() for p in replicated(model))
    return {
        "config": config,
        "seed": seed,
        "loss": loss,
        "curve": curve,
        **sent,
        "seconds": seconds,
        "parameters": shared + RANKS * (parameters - shared),
        "train_bytes": len(data),
        "validation_bytes": len(held_back),
    }


class Spy(tw.Communicator):
    """Keeps a rank's tensors that are summed, as bfloat16, while `kept` is a list."""

    kept: list[torch.Tensor] | None = None

    def all_reduce(self, x: Any, out: Any = None, *, wire: str | None = None) -> Any:
        """As a communicator's."""
        if self.kept is not None:
            self.kept.append(x.to(torch.bfloat16).reshape(-1))
        return super().all_reduce(x, out, wire=wire)


def exchanged(seed: int) -> dict[str, Any]:
    """Errors of codecs on what this rank of a trained model has to exchange in one step."""
    spies = [Spy(TorchDist(dist.new_group()), algorithm="native") for _ in range(2)]
    torch.manual_seed(seed)
    model = GPT(tp.TensorParallel(*spies, wire=BASELINE))
    data, held_back = load_bytes()
    windows = draw(held_back, VALIDATION, torch.Generator().manual_seed(0))
    fit(model, data, windows, seed)
    for spy in spies:
        spy.kept = []
    model.loss(windows[:BATCH]).backward()
    found = {}
    for name, spy in zip(("activations", "gradients"), spies, strict=True):
        assert spy.kept is not None
        assert len(spy.kept) == 2 * LAYERS
        wide = [x.float() for x in spy.kept]
        errors = {
            method: [tw.error(x, quantize(x.numpy())).vnmse for x in wide]
            for method, quantize in BY_HAND.items()
        }
        for method, (codec, params) in CODECS.items():
            chosen = tw.codec(codec, **params)
            coded = [(x, tw.decode(tw.encode(x, chosen))) for x in spy.kept]
            errors[method] = [tw.error(x, y).vnmse for x, y in coded]
        found[name] = {
            "tensors": len(wide),
            "rms": [x.square().mean().sqrt().item() for x in wide],
            "kurtosis": [(x**4).mean().div(x.square().mean() ** 2).item() for x in wide],
            "below a tenth of rms": [
                (x.abs() < 0.1 * x.square().mean().sqrt()).float().mean().item() for x in wide
            ],
            "vnmse": {method: [float(np.mean(v)), max(v)] for method, v in errors.items()},
        }
    return found


def replicated(model: GPT) -> list[Any]:
    """Parameters that every rank has whole."""
    cut = {
        id(p)
        for m in model.modules()
        if isinstance(m, (tp.ColumnParallelLinear, tp.RowParallelLinear))
        for p in (m.weight, m.bias if isinstance(m, tp.ColumnParallelLinear) else None)
    }
    return [p for p in model.parameters() if id(p) not in cut]


def same_everywhere(model: GPT) -> None:
    """Raise RuntimeError unless replicated parameters have the same bits on all ranks."""
    mine = torch.cat([p.detach().reshape(-1) for p in replicated(model)]).view(torch.int32)
    parts = [torch.empty_like(mine) for _ in range(RANKS)]
    dist.all_gather(parts, mine)
    if not all(torch.equal(mine, part) for part in parts):
        raise RuntimeError("replicated parameters have come apart")


def run_rank(rank: int, store: str, jobs: list[tuple[str, int]], out: pathlib.Path) -> None:
    """What the process of a rank does: all runs, which rank 0 writes down one by one."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(minutes=5),
    )
    for config, seed in jobs:
        found = exchanged(seed) if config == TENSORS else train(config, seed)
        if rank == 0:
            record(out, config, found)
    dist.barrier()
    dist.destroy_process_group()


def record(out: pathlib.Path, config: str, found: dict[str, Any]) -> None:
    """Add a run, or the errors on its tensors, to the file."""
    recorded: dict[str, Any] = {"setting": setting(), "runs": []}
    if out.exists():
        recorded = json.loads(out.read_text())
    recorded |= {"date": time.strftime("%Y-%m-%d"), "machine": machine()}
    if config == TENSORS:
        recorded[TENSORS] = found
    else:
        recorded["runs"].append(found)
        print(f"{config}, seed {found['seed']}: {found['loss']:.4f}, {found['seconds']:.0f} s")
    out.write_text(json.dumps(recorded, indent=1) + "\n")


def setting() -> dict[str, Any]:
    """All that runs of one file must have in common."""
    return {
        "ranks": RANKS,
        "model": {"vocabulary": VOCAB, "width": WIDTH, "heads": HEADS, "layers": LAYERS}
        | {"context": CONTEXT},
        "steps": STEPS,
        "batch": BATCH,
        "learning_rate": [LEARNING_RATE, LAST_RATE],
        "warmup": WARMUP,
        "validation_windows": VALIDATION,
        "curve_windows": CURVE,
        "optimizer": "AdamW, betas 0.9 and 0.95, weight decay 0.1, no clipping",
    }


def machine() -> dict[str, Any]:
    """Processor and versions."""
    info = pathlib.Path("/proc/cpuinfo")
    names = [
        line.split(":", 1)[1].strip()
        for line in (info.read_text().splitlines() if info.exists() else [])
        if line.startswith("model name")
    ]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": multiprocessing.cpu_count(),
        "versions": {
            "tightwire": tw.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
        },
    }


def main() -> None:
    """Make the runs that are missing, and write each down when it is done."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--config", choices=CONFIGS, nargs="+", default=list(CONFIGS))
    parser.add_argument("--seed", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument(
        "--tensors",
        action="store_true",
        help="instead: errors on the tensors that a trained model exchanges",
    )
    arguments = parser.parse_args()
    done = set()
    if arguments.out.exists():
        recorded = json.loads(arguments.out.read_text())
        if recorded["setting"] != setting():
            parser.error(f"{arguments.out} has runs of another setting")
        done = {(r["config"], r["seed"]) for r in recorded["runs"]}
    wanted = [(config, seed) for seed in arguments.seed for config in arguments.config]
    jobs = [job for job in wanted if job not in done]
    if arguments.tensors:
        jobs = [(TENSORS, arguments.seed[0])]
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=run_rank, args=(rank, f"{folder}/store", jobs, arguments.out))
            for rank in range(RANKS)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    if any(process.exitcode for process in ranks):
        raise RuntimeError("a rank has failed")


if __name__ == "__main__":
    main()
