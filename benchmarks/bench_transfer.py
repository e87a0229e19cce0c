"""Rounds of weight transfer: a publisher and its workers, beside a broadcast of the same tensors.

    torchrun --standalone --nproc-per-node 2 benchmarks/bench_transfer.py

and with NCCL_P2P_DISABLE=1 for a slower link, by memory of the host: the row of the broadcast says
how fast it is. Over NCCL where there are GPUs, else over gloo on the CPU.
Rows are appended to results/transfer.jsonl.

The tensors are those of a transformer in bfloat16, N(0, 0.02). A round takes from a barrier until
the last worker has written, and its pause is the longest `Update.write`. Before each round a share
of all elements changes, outside of the time; forms take turns, round by round, and the median of
each counts. After every round the workers' tensors are compared with the publisher's.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from recording import Ranks, Record, connect, facts

import tightwire as tw
from tightwire.adapters.transports.torch_dist import TorchDist

RESULTS = Path(__file__).parent / "results"
#: Share of the elements that change before a round, by form. All of them: everything is sent whole.
SHARES = {"broadcast": 1.0, "everything": 1.0, "10 %": 0.1, "1 %": 0.01, "nothing": 0.0}
#: Rounds before those that count: they compile, and send what the first deltas are against.
WARM = 2


class Taken(NamedTuple):
    """What a round took of a rank: seconds, seconds of the pause, and bytes that it sent."""

    seconds: float
    pause: float
    nbytes: int


class Counting(TorchDist):
    """A transport that counts the bytes that this rank broadcasts."""

    sent = 0

    def broadcast(self, x: Any, root: int) -> None:
        """See ``Transport``."""
        if root == self.rank:
            self.sent += x.nbytes
        super().broadcast(x, root)


def shapes(layers: int, width: int) -> dict[str, tuple[int, ...]]:
    """The tensors of a transformer's layers."""
    found: dict[str, tuple[int, ...]] = {}
    for i in range(layers):
        found |= {f"{i}.{name}": (width, width) for name in ("query", "key", "value", "out")}
        found |= {f"{i}.up": (4 * width, width), f"{i}.down": (width, 4 * width)}
        found |= {f"{i}.norm1": (width,), f"{i}.norm2": (width,)}
    return found


def random(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """A new tensor."""
    return torch.randn(shape, device=device).mul_(0.02).bfloat16()


class Form:
    """One way to send the tensors; each has tensors of its own."""

    def __init__(self, name: str, options: argparse.Namespace, device: torch.device) -> None:
        self.share, self.root = SHARES[name], dist.get_rank() == 0
        wanted = shapes(options.layers, options.width)
        self.tensors = {n: random(shape, device) for n, shape in wanted.items()}
        self._side: Any = None
        if name == "broadcast":
            return
        self._transport = Counting.new_group()
        if self.root:
            self._side = tw.publish(
                self.tensors, self._transport, codec=options.codec, keep=self.share < 1
            )
        else:
            self._side = tw.subscribe(self.tensors, self._transport)

    def step(self) -> None:
        """Change the publisher's tensors."""
        for x in self.tensors.values() if self.root else ():
            if self.share == 1:
                x.copy_(random(tuple(x.shape), x.device))
            elif self.share:
                changed = torch.rand(x.shape, device=x.device) < self.share
                x.view(torch.int16).add_(changed)

    def send(self, synchronize: Callable[[], None]) -> Taken:
        """A round."""
        start = time.perf_counter()
        if self._side is None:
            works = [dist.broadcast(x, 0, async_op=True) for x in self.tensors.values()]
            for work in works:
                assert work is not None
                work.wait()
            synchronize()
            taken = time.perf_counter() - start
            return Taken(taken, taken, sum(x.nbytes for x in self.tensors.values()))
        if self.root:
            before = self._transport.sent
            self._side.send()
            synchronize()
            return Taken(time.perf_counter() - start, 0.0, self._transport.sent - before)
        update = self._side.receive()
        synchronize()
        middle = time.perf_counter()
        update.write()
        synchronize()
        end = time.perf_counter()
        return Taken(end - start, end - middle, 0)

    def check(self) -> None:
        """Compare all elements with the publisher's."""
        for name, x in self.tensors.items():
            wanted = x.clone()
            dist.broadcast(wanted, 0)
            assert torch.equal(wanted.view(torch.int16), x.view(torch.int16)), name


def measured(ranks: Ranks, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Results of every form."""
    forms = {name: Form(name, options, ranks.device) for name in options.only}
    taken: dict[str, list[Taken]] = {name: [] for name in forms}
    end = time.monotonic() + options.seconds
    number = 0
    while number < options.rounds + WARM:
        if number > WARM and not ranks.first(time.monotonic() < end):
            break
        for name, form in forms.items():
            form.step()
            ranks.meet()
            found = ranks.gather(form.send(ranks.synchronize))
            form.check()
            taken[name].append(Taken(*(max(some) for some in zip(*found, strict=True))))
        number += 1
    return {
        name: {
            "ms": round(1e3 * statistics.median(t.seconds for t in rounds[WARM:]), 3),
            "least_ms": round(1e3 * min(t.seconds for t in rounds[WARM:]), 3),
            "pause_ms": round(1e3 * statistics.median(t.pause for t in rounds[WARM:]), 3),
            "sent": rounds[-1].nbytes,
            "rounds": len(rounds) - WARM,
        }
        for name, rounds in taken.items()
    }


def _options(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, help="None: 16 on a GPU, 10 on the CPU")
    parser.add_argument("--width", type=int, help="None: 2048 on a GPU, 1024 on the CPU")
    parser.add_argument("--codec", default="zipccl", help="of tensors that are sent whole")
    parser.add_argument("--only", nargs="*", choices=SHARES, default=list(SHARES))
    parser.add_argument("--rounds", type=int, default=7, help="that are timed, at most")
    parser.add_argument("--seconds", type=float, default=120.0, help="of all rounds, about")
    parser.add_argument("--out", type=Path, default=RESULTS / "transfer.jsonl")
    options = parser.parse_args(words)
    on_gpu = torch.cuda.is_available()
    options.layers = options.layers or (16 if on_gpu else 10)
    options.width = options.width or (2048 if on_gpu else 1024)
    return options


def main(words: list[str]) -> None:
    """Measure, print a table on rank 0, and append rows."""
    options = _options(words)
    device = connect()
    torch.manual_seed(dist.get_rank())
    ranks = Ranks.processes(device, 300)
    found = measured(ranks, options)
    record = Record(options.out, facts(device, ranks.world), ranks.rank == 0)
    wanted = shapes(options.layers, options.width)
    nbytes = 2 * sum(int(torch.Size(shape).numel()) for shape in wanted.values())
    setting = {"nbytes": nbytes, "tensors": len(wanted), "codec": options.codec}
    for name, row in found.items():
        record.add(f"transfer, {name}", **row, **setting)
    if ranks.rank == 0:
        print(f"{'form':<12}{'ms':>10}{'least':>10}{'pause ms':>10}{'of the bytes':>14}")
        for name, row in found.items():
            share = row["sent"] / nbytes
            print(f"{name:<12}{row['ms']:>10.2f}{row['least_ms']:>10.2f}", end="")
            print(f"{row['pause_ms']:>10.2f}{share:>14.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
