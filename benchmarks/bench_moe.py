"""Dispatch and combine of a layer of experts: with codecs, exactly without, and padded.

    torchrun --standalone --nproc-per-node 2 --max-restarts 9 benchmarks/bench_moe.py

and with NCCL_P2P_DISABLE=1 for 25 GB/s, which leaves out the forms that read peers' memory. Over
NCCL where there are GPUs, else over gloo on the CPU; options give other sizes. Rows are appended to
results/moe.jsonl as forms are measured; what the file has is not measured again without --again.

Experts return their rows, so that what is timed is what the layer does besides: tokens are sorted
by expert, exchanged, sorted back and added up by the router's weights. A time is that of the
slowest rank, from a barrier until the device has finished. A form takes turns with "exact, torch"
and "padded", call by call; the median of each counts. With --backward a call is forward and
backward.

"padded" sends as many rows to every rank as the largest pair of ranks needs, which is told
beforehand. "padded to the most" sends as many as any pair could need: what a static shape asks for
that must hold whatever the router says. "exact, torch" reads its splits on the host, as Megatron-LM
does, and calls all_to_all_single twice. All three are uncompressed, have their tokens' order made
beforehand, once, and leave rows of a rank's experts among each other. The results of lossless forms
are compared bit for bit with what PyTorch's exchange brings, added up as they are, those of others
by vNMSE, before they are timed.

"resident" experts have a capacity of a quarter more rows than a rank gets of an even routing, and
may not exceed it. Their bytes are those that ranks read from one another. "graph" replays a CUDA
graph of a call forward.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from recording import Job, Limits, Ranks, Record, connect, facts, measure_all

import tightwire as tw
from tightwire.adapters.training import moe
from tightwire.adapters.training.expert_rows import Order
from tightwire.adapters.training.weighted_rows import summed

RESULTS = Path(__file__).parent / "results"
#: Codecs forward and backward.
CODECS: dict[str, tuple[str | None, str | None]] = {
    "native": (None, None),
    "zipccl": ("zipccl", "zipccl"),
    "taco": ("taco", "taco"),
    "mx": ("mx", "mx"),
    "zipccl, mx": ("zipccl", "mx"),
}
#: Codecs of forms that read peers' memory.
PEERS = {"zipccl, peers": "zipccl", "mx, peers": "mx"}
#: Codecs of resident experts, eager and in a CUDA graph.
RESIDENT = {"resident": "raw", "resident, mx": "mx", "resident, taco": "taco"}
GRAPHS = {f"{name}, graph": codec for name, codec in RESIDENT.items()}
PADDED, MOST, EXACT = "padded", "padded to the most", "exact, torch"
FORMS = (PADDED, MOST, EXACT, *CODECS, *PEERS, *RESIDENT, *GRAPHS)
#: Calls that compile and measure, before those that are timed.
WARM = 3
#: Largest vNMSE of a lossy form.
BOUND = 1e-2


class Form(NamedTuple):
    """A way to exchange.

    Attributes:
        call: Tokens to results.
        wire_bytes: Bytes that this rank has sent to others so far; None where they are not counted.
    """

    call: Callable[[torch.Tensor], torch.Tensor]
    wire_bytes: Callable[[], int] | None


class Layer:
    """The routing of this rank's tokens, and the forms that exchange them."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.experts, self.device = options.experts, device
        generator = torch.Generator(device).manual_seed(self.rank)
        shape = options.tokens, options.hidden
        x = torch.randn(shape, generator=generator, device=device)
        self.x = x.to(torch.bfloat16).requires_grad_(options.backward)
        logits = torch.randn(options.tokens, self.experts, generator=generator, device=device)
        # Some experts are better liked than others.
        logits += torch.linspace(0, options.skew, self.experts, device=device)
        self.routing = moe.route(logits, options.top_k)
        self.weights = self.routing.weights.to(torch.bfloat16).unsqueeze(1)
        index = self.routing.experts.reshape(-1).argsort(stable=True)
        self.source = index // options.top_k
        self.inverse = torch.empty_like(index)
        self.inverse[index] = torch.arange(index.shape[0], device=device)
        self.order = Order(index, self.inverse)
        counts = torch.bincount(self.routing.experts.reshape(-1), minlength=self.experts)
        self.counts = counts.view(self.world, -1).sum(1)
        largest = self.counts.max().clone()
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        # A token's experts are different ones, so a rank of few gets few of its copies.
        copies = min(options.top_k, options.experts // self.world)
        self.capacities = {PADDED: int(largest), MOST: options.tokens * copies}
        self.row_nbytes = 2 * options.hidden

    def form(self, name: str) -> Form:
        """The form of this name."""
        if name in self.capacities:
            nbytes = 2 * (self.world - 1) * self.capacities[name] * self.row_nbytes
            return Form(self._padded_form(self.capacities[name]), self._counted(nbytes))
        if name == EXACT:
            others = int(self.counts.sum() - self.counts[self.rank])
            came = int(self._told(self.counts).sum()) - int(self.counts[self.rank])
            return Form(self._exact, self._counted((others + came) * self.row_nbytes))
        if name in RESIDENT or name in GRAPHS:
            return self._resident_form(name)
        codecs = CODECS[name] if name in CODECS else (PEERS[name], PEERS[name])
        route: Any = "peers" if name in PEERS else "network"
        parallel = moe.connect(self.experts, *codecs, device=self.device, route=route)

        def call(x: torch.Tensor) -> torch.Tensor:
            found = parallel.dispatch(x, self.routing)
            return parallel.combine(found.rows, found)

        return Form(call, lambda: parallel.wire_bytes)

    def _resident_form(self, name: str) -> Form:
        """A form of which no call exceeds a capacity, or that ends here."""
        codec = (RESIDENT | GRAPHS)[name]
        tokens, top_k = self.routing.experts.shape
        parallel = moe.connect_resident(
            self.experts,
            codec,
            codec,
            tokens=tokens,
            top_k=top_k,
            hidden=self.x.shape[1],
            capacity=tokens * top_k * 5 // 4,
            device=self.device,
        )

        def call(x: torch.Tensor) -> torch.Tensor:
            found = parallel.dispatch(x, self.routing)
            return parallel.combine(found.rows, found)

        call(self.x)
        call(self.x)
        parallel.check()
        plan = tw.codec(codec).plan((self.x.shape[1],), "bfloat16", checksum=False)
        others = int(self.counts.sum() - self.counts[self.rank])
        came = int(self._told(self.counts).sum()) - int(self.counts[self.rank])
        sent = self._counted((others + came) * plan.static_stride)
        if name in RESIDENT:
            return Form(call, sent)
        _synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(graph):
            y = call(self.x)

        def replay(x: torch.Tensor, kept: Any = parallel) -> torch.Tensor:
            """The graph uses memory of what is `kept`."""
            graph.replay()
            return y

        return Form(replay, sent)

    def _counted(self, nbytes: int) -> Callable[[], int]:
        """As `wire_bytes` of a form whose every call sends so many."""
        calls = [0]

        def sent() -> int:
            calls[0] += 1
            return nbytes * (calls[0] - 1)

        return sent

    def _padded_form(self, capacity: int) -> Callable[[torch.Tensor], torch.Tensor]:
        """Slots of ranks are filled from the front; the rest are copies of a row."""
        first = self.counts.cumsum(0) - self.counts
        slots = torch.arange(capacity, device=self.device)
        last = (first + self.counts - 1).clamp(min=0)
        rows = torch.minimum(first[:, None] + slots, last[:, None]).reshape(-1)
        target = torch.repeat_interleave(torch.arange(self.world, device=self.device), self.counts)
        place = torch.arange(target.shape[0], device=self.device) - first[target]
        # Where each copy of a token is when it has come back.
        back = (target * capacity + place)[self.inverse]
        source = self.source[rows]

        def call(x: torch.Tensor) -> torch.Tensor:
            sent = _Exchanged.apply(x.index_select(0, source), None, None)
            came = _Exchanged.apply(sent, None, None)
            return self._weighted(came.index_select(0, back))

        return call

    def _told(self, counts: torch.Tensor) -> torch.Tensor:
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts)
        return received

    def _exact(self, x: torch.Tensor) -> torch.Tensor:
        return self._weighted(self._exact_copies(x).index_select(0, self.inverse))

    def wanted(self) -> torch.Tensor:
        """The bits that a lossless form gives."""
        return summed(self._exact_copies(self.x), self.routing.weights, self.order).detach()

    def _exact_copies(self, x: torch.Tensor) -> torch.Tensor:
        sends, receives = torch.stack([self.counts, self._told(self.counts)]).tolist()
        came = _Exchanged.apply(x.index_select(0, self.source), receives, sends)
        return _Exchanged.apply(came, sends, receives)

    def _weighted(self, copies: torch.Tensor) -> torch.Tensor:
        return torch.bmm(self.weights, copies.view(*self.routing.experts.shape, -1)).squeeze(1)


class _Exchanged(torch.autograd.Function):
    """PyTorch's all-to-all, and that of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, receives: Any, sends: Any) -> torch.Tensor:
        ctx.splits = sends, receives
        out = x.new_empty((x.shape[0] if receives is None else sum(receives), *x.shape[1:]))
        dist.all_to_all_single(out, x, receives, sends)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _Exchanged.forward(ctx, gradient.contiguous(), *ctx.splits), None, None


def checked(layer: Layer, name: str, form: Form) -> dict[str, Any]:
    """Bytes of a call, and how far its result is from the exact one.

    Raises:
        RuntimeError: If that is too far.
    """
    codec = (PEERS | RESIDENT | GRAPHS).get(name, CODECS.get(name, ("none", ""))[0])
    lossless = codec in (None, "raw", "zipccl")
    wanted = layer.wanted() if lossless else layer.form(EXACT).call(layer.x).detach()
    result = form.call(layer.x).detach()
    before = 0 if form.wire_bytes is None else form.wire_bytes()
    form.call(layer.x)
    after = 0 if form.wire_bytes is None else form.wire_bytes()
    error = tw.error(wanted, result).vnmse
    if lossless or codec == "none":
        if not torch.equal(result.view(torch.int16), wanted.view(torch.int16)):
            raise RuntimeError("the result has other bits than the exact one")
    elif not error < BOUND:
        raise RuntimeError(f"the error is {error}; allowed: {BOUND}")
    return {"wire_nbytes": after - before, "vnmse": error}


def measure(layer: Layer, name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of a form and of what it takes turns with, bytes of a call, and its error."""
    form = layer.form(name)
    found = checked(layer, name, form)
    forms = {other: layer.form(other) for other in (PADDED, EXACT) if other != name} | {name: form}
    seconds: dict[str, list[float]] = {other: [] for other in forms}
    end = time.monotonic() + options.each
    calls = -WARM
    while calls < options.calls and _everywhere(float(time.monotonic() < end or calls < 1)) > 0:
        for other, turn in forms.items():
            taken = _timed(layer, turn, options.backward)
            if calls >= 0:
                seconds[other].append(taken)
        calls += 1
    ms = {other: 1e3 * statistics.median(taken) for other, taken in seconds.items()}
    return found | {
        "ms": round(ms[name], 4),
        "least_ms": round(1e3 * min(seconds[name]), 4),
        "calls": len(seconds[name]),
        "padded_ms": round(ms[PADDED], 4),
        "exact_ms": round(ms[EXACT], 4),
    }


def line(row: dict[str, Any]) -> str:
    """What is printed of a form."""
    return (
        f"{row['ms']:.3f} ms (padded {row['padded_ms']:.3f}, exact {row['exact_ms']:.3f}), "
        f"{row['wire_nbytes'] / 1e6:.3f} MB sent, vNMSE {row['vnmse']:.1e}"
    )


def _timed(layer: Layer, form: Form, backward: bool) -> float:
    """Seconds of a call, on the slowest rank."""
    _synchronize(layer.device)
    dist.barrier()
    _synchronize(layer.device)
    start = time.perf_counter()
    y = form.call(layer.x)
    if backward:
        layer.x.grad = None
        y.backward(y.detach())
    _synchronize(layer.device)
    return _everywhere(time.perf_counter() - start)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _everywhere(value: float) -> float:
    """The largest of all ranks' values."""
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    found = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def _options(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time dispatch and combine of experts.")
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--top-k", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=8192, help="of each rank")
    parser.add_argument("--skew", type=float, default=0.5, help="of the last expert's logit")
    parser.add_argument("--backward", action="store_true", help="time the backward pass too")
    parser.add_argument("--only", nargs="*", choices=FORMS)
    parser.add_argument("--calls", type=int, default=50)
    parser.add_argument("--each", type=float, default=10.0, help="seconds of a form's timed calls")
    parser.add_argument("--seconds", type=float, default=1e9, help="of all forms; others are left")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds of a form")
    parser.add_argument("--again", action="store_true", help="measure what the file has, too")
    parser.add_argument("--out", type=Path, default=RESULTS / "moe.jsonl")
    return parser.parse_args(words)


def main(words: list[str]) -> None:
    """Measure, and append rows."""
    options = _options(words)
    device = connect()
    layer = Layer(options, device)
    setting = {
        name: getattr(options, name)
        for name in ("experts", "hidden", "top_k", "tokens", "skew", "backward")
    }

    def job(name: str) -> Job:
        return Job(lambda: measure(layer, name, options) | setting)

    size = f"{options.tokens} tokens, top {options.top_k}"
    size += ", backward" if options.backward else ""
    ranks = Ranks.processes(device, options.limit)
    record = Record(options.out, facts(device, layer.world), layer.rank == 0)
    limits = Limits(options.seconds, options.limit, options.again)
    reads = device.type == "cuda" and os.environ.get("NCCL_P2P_DISABLE", "0") != "1"
    left = set() if reads else {*PEERS, *RESIDENT, *GRAPHS}
    if options.backward:
        left |= {*GRAPHS}
    only = options.only or [name for name in FORMS if name not in left]
    jobs = {f"moe, {name}, {size}": job(name) for name in only}
    measure_all(ranks, record, jobs, limits, line, {"forms": FORMS})
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
