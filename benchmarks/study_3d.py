"""What compression in three dimensions of parallelism at once does to the loss of a small GPT.

    python benchmarks/study_3d.py --out benchmarks/results/three_dimensions.json

The model and the text of study_accuracy.py on eight ranks, real processes on gloo: two replicas of
two stages of two tensor-parallel ranks. Tensor parallelism sums activations and their gradients,
the pipeline (1F1B) sends them between stages, and DistributedDataParallel averages gradients over
the replicas, each of which draws its own windows. Arithmetic is float32; what tensor-parallel ranks
sum is rounded to bfloat16 before. Runs of one seed have the same initial weights and batches.
A run that the file has already is not made again; `--config` and `--seed` choose some.
"""

# DDP compares the annotations of a hook, which must therefore not be strings.
import time
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from study_accuracy import GPT, WIDTH, draw, rate
from study_tagc import Plan, study
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import Schedule1F1B
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from tightwire.adapters.training import ddp, pipeline
from tightwire.adapters.training import tensor_parallel as tp

BASELINE = "uncompressed"
#: Parts of a batch that are in the pipeline at once, and layers of the first stage.
MICROBATCHES, FIRST = 4, 2
PLAN = Plan(steps=120, every=20, curve=64, ranks=8, batch=8)


class Codecs(NamedTuple):
    """Of sums of tensor parallelism, of messages between stages, and of sums of gradients."""

    tensor: str | None = None
    pipeline: str | None = None
    data: str | None = None


CONFIGS = {
    BASELINE: Codecs(),
    "tahquant, sdp4bit": Codecs(None, "tahquant", "sdp4bit"),
    "taco, tahquant, sdp4bit": Codecs("taco", "tahquant", "sdp4bit"),
}


class Stage(nn.Module):
    """The first layers of a GPT, with its embeddings, or the others, with its head."""

    def __init__(self, gpt: GPT, is_first: bool) -> None:
        super().__init__()
        self.is_first = is_first
        self.blocks = gpt.blocks[:FIRST] if is_first else gpt.blocks[FIRST:]
        if is_first:
            self.tokens, self.positions = gpt.tokens, gpt.positions
        else:
            self.ln_f, self.head = gpt.ln_f, gpt.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Bytes (batch, CONTEXT) to activations, or activations to scores."""
        if self.is_first:
            x = self.tokens(x) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return x if self.is_first else self.head(self.ln_f(x))


def loss_of(scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Next-byte cross-entropy, in nats."""
    return F.cross_entropy(scores.flatten(0, 1), target.flatten())


class Place:
    """This rank in the three dimensions, and what connects it with the others."""

    def __init__(self, codecs: Codecs, seed: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "pp", "tp"))
        groups = {name: mesh[name].get_group() for name in ("dp", "pp", "tp")}
        self.replica, self.stage = mesh["dp"].get_local_rank(), mesh["pp"].get_local_rank()
        self.parallel = tp.connect(
            codecs.tensor, codecs.tensor, group=groups["tp"], wire="bfloat16"
        )
        self.boundary = pipeline.connect(
            codecs.pipeline, codecs.pipeline, group=groups["pp"], seed=seed
        )
        torch.manual_seed(seed)
        model = Stage(GPT(self.parallel), not self.stage)
        self.model = DistributedDataParallel(model, process_group=groups["dp"])
        options = {"codec": codecs.data} if codecs.data else {"algorithm": "native"}
        self.hook = ddp.register(self.model, **options)
        stage = self.boundary.stage(self.model, self.stage, 2, torch.device("cpu"))
        self.schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_of)
        self._validation = torch.zeros_like(self._counts())

    def step(self, windows: torch.Tensor) -> None:
        """Forward and backward of a batch."""
        if self.stage == 0:
            self.schedule.step(windows[:, :-1])
        else:
            self.schedule.step(target=windows[:, 1:], losses=[])

    def evaluate(self, windows: torch.Tensor) -> float:
        """Mean loss of the windows, of which replicas take halves; encoded as in training."""
        losses, before = [], self._counts()
        with torch.no_grad():
            for part in windows[self.replica :: 2].split(64):
                if self.stage == 0:
                    self.boundary.send(self.model.module(part[:, :-1]), 1)
                else:
                    shape = (*part[:, 1:].shape, WIDTH)
                    y = self.boundary.receive(shape, torch.float32, 0)
                    losses.append(loss_of(self.model.module(y), part[:, 1:]))
        self.boundary.flush()
        self._validation += self._counts() - before
        # Four ranks have the last stage.
        found = torch.stack(losses).mean().double() / 4 if losses else torch.zeros(()).double()
        dist.all_reduce(found)
        return float(found)

    def same_everywhere(self) -> None:
        """Raise RuntimeError unless the replicas' parameters have the same bits."""
        bits = torch.cat([p.detach().flatten() for p in self.model.parameters()]).view(torch.int32)
        low, high = bits.clone(), bits.clone()
        group = self.model.process_group
        dist.all_reduce(low, dist.ReduceOp.MIN, group=group)
        dist.all_reduce(high, dist.ReduceOp.MAX, group=group)
        if not torch.equal(low, high):
            raise RuntimeError("the replicas' parameters have come apart")

    def _counts(self) -> torch.Tensor:
        of = (self.parallel, self.boundary, self.hook)
        return torch.tensor([[x.raw_bytes, x.wire_bytes] for x in of])

    def sent(self) -> dict[str, list[int]]:
        """Bytes that all ranks have sent in training, by dimension: raw, and on the wire."""
        counts = self._counts() - self._validation
        dist.all_reduce(counts)
        return dict(zip(Codecs._fields, counts.tolist(), strict=True))

    def close(self) -> None:
        """End the connections."""
        self.hook.close()
        self.parallel.close()


def train(
    config: str, seed: int, plan: Plan, data: torch.Tensor, windows: torch.Tensor
) -> dict[str, Any]:
    """One run, on one rank of all."""
    place = Place(CONFIGS[config], seed)
    rng = torch.Generator().manual_seed(2 * seed + place.replica)
    optimizer = torch.optim.AdamW(place.model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    curve: list[tuple[int, float]] = []
    start = time.perf_counter()
    for step in range(plan.steps):
        if step % plan.every == 0:
            curve.append((step, place.evaluate(windows[: plan.curve])))
        optimizer.param_groups[0]["lr"] = rate(step, plan.steps)
        place.step(draw(data, plan.batch, rng))
        optimizer.step()
        optimizer.zero_grad()
    seconds = time.perf_counter() - start
    curve.append((plan.steps, place.evaluate(windows[: plan.curve])))
    loss, sent = place.evaluate(windows), place.sent()
    place.same_everywhere()
    place.close()
    raw, wire = (sum(column) for column in zip(*sent.values(), strict=True))
    return {
        "config": config,
        "seed": seed,
        "codecs": CONFIGS[config]._asdict(),
        "loss": loss,
        "curve": curve,
        "sent": sent,
        "raw_bytes": raw,
        "wire_bytes": wire,
        "seconds": seconds,
    }


if __name__ == "__main__":
    study(__doc__.splitlines()[0], CONFIGS, train, PLAN)
