"""What compressed sums of gradients do to the loss of a small GPT under DDP, and to its traffic.

    python benchmarks/study_ddp.py --out benchmarks/results/ddp.json

The model and the text of study_accuracy.py, under DistributedDataParallel with four ranks, real
processes on gloo; every rank draws its own windows. Arithmetic and gradients are float32. Runs of
one seed have the same initial weights and batches, so the effect of a codec is their difference.
A run that the file has already is not made again; `--config` and `--seed` choose some.
"""

# DDP compares the annotations of a hook, which must therefore not be strings.
import time
from typing import Any

import torch
import torch.distributed as dist
from study_accuracy import GPT
from study_tagc import RANKS, Plan, fitted, study, validated
from torch.nn.parallel import DistributedDataParallel

import tightwire as tw
from tightwire.adapters.training import ddp
from tightwire.homomorphic import seal, sketch

ROUNDED = "bfloat16"
#: None is no compression.
CONFIGS: dict[str, tw.Codec | None] = {
    "float32": None,
    ROUNDED: None,
    "dynamiq any, 5 bits": tw.codec("dynamiq"),
    "dynamiq pow2, 5 bits": tw.codec("dynamiq", widths="pow2"),
    "MXFP8": tw.codec("mx"),
    "MXFP8, scales agreed on": tw.codec("mx", scale_rule="agreed"),
    "MXFP4": tw.codec("mx", element="e2m1"),
    "MXFP4, scales agreed on": tw.codec("mx", element="e2m1", scale_rule="agreed"),
    "thc": tw.codec("thc"),
}


class Model(GPT):
    """The GPT; calling it gives its loss, as DDP needs it."""

    forward = GPT.loss


class Replica(DistributedDataParallel):
    """A rank's model, as `fit` takes it."""

    def loss(self, windows: torch.Tensor) -> torch.Tensor:
        """As the model's, with gradients averaged over ranks."""
        return self(windows)


class Plain:
    """Sums of the network in float32, with its bytes counted as the library's hooks count them."""

    def __init__(self) -> None:
        self.raw_bytes = self.wire_bytes = 0

    def average(self, x: torch.Tensor) -> None:
        """Overwrite the gradients `x` with their mean over ranks."""
        self.raw_bytes += sent(x)
        self.wire_bytes += sent(x)
        dist.all_reduce(x)
        x.div_(RANKS)


class Rounded(Plain):
    """Sums of the network in bfloat16, as PyTorch's own hook of that kind makes them."""

    def average(self, x: torch.Tensor) -> None:
        """As Plain's."""
        rounded = x.div(RANKS).bfloat16()
        dist.all_reduce(rounded)
        self.raw_bytes += sent(x)
        self.wire_bytes += sent(rounded)
        x.copy_(rounded)


class Cells(Plain):
    """Sums of the cells of thc, with norms that ranks agree on before."""

    def __init__(self, codec: tw.Codec, seed: int) -> None:
        super().__init__()
        self.codec, self.seed, self.step = codec, seed, 0

    def average(self, x: torch.Tensor) -> None:
        """As Plain's."""
        norms = torch.as_tensor(self.codec.measure(x))
        dist.all_reduce(norms, dist.ReduceOp.MAX)
        key = tw.Key(self.seed, self.step, dist.get_rank(), RANKS)
        buf = self.codec.encode(x, stats=norms, key=key)
        # The network adds 32-bit integers: no cell carries into the next.
        cells = sketch(buf).view(torch.int32)
        dist.all_reduce(cells)
        tw.decode(seal(buf), out=x)
        x.div_(RANKS)
        self.step += 1
        self.raw_bytes += sent(x)
        self.wire_bytes += sent(norms) + sent(cells)


def sent(x: torch.Tensor) -> int:
    """Bytes that a rank sends in an all-reduce of `x` by ring."""
    return 2 * (RANKS - 1) * x.nbytes // RANKS


def average_hook(state: Plain, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    gradients = bucket.buffer()
    state.average(gradients)
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(gradients)
    return future


def register(replica: Replica, config: str, seed: int) -> Any:
    """Register what sums gradients; its state has `raw_bytes` and `wire_bytes`."""
    codec = CONFIGS[config]
    if codec is not None and not codec.homomorphic:
        return ddp.register(replica, codec=codec, topology="ring", seed=seed)
    if codec is not None:
        state: Plain = Cells(codec, seed)
    else:
        state = Rounded() if config == ROUNDED else Plain()
    replica.register_comm_hook(state, average_hook)
    return state


def train(
    config: str, seed: int, plan: Plan, data: torch.Tensor, windows: torch.Tensor
) -> dict[str, Any]:
    """One run, on one rank of all."""
    torch.manual_seed(seed)
    replica = Replica(Model())
    state = register(replica, config, seed)
    start = time.perf_counter()
    curve = fitted(replica, seed, plan, data, windows)
    seconds = time.perf_counter() - start
    same_everywhere(replica)
    return {
        "config": config,
        "seed": seed,
        "loss": validated(replica.module, windows),
        "curve": curve,
        "raw_bytes": state.raw_bytes,
        "wire_bytes": state.wire_bytes,
        "seconds": seconds,
        "parameters": sum(p.numel() for p in replica.parameters()),
    }


def same_everywhere(replica: Replica) -> None:
    """Raise RuntimeError unless parameters have the same bits on all ranks."""
    bits = torch.cat([p.detach().flatten() for p in replica.parameters()]).view(torch.int32)
    low, high = bits.clone(), bits.clone()
    dist.all_reduce(low, dist.ReduceOp.MIN)
    dist.all_reduce(high, dist.ReduceOp.MAX)
    if not torch.equal(low, high):
        raise RuntimeError("the ranks' parameters have come apart")


if __name__ == "__main__":
    study(__doc__.splitlines()[0], CONFIGS, train)
