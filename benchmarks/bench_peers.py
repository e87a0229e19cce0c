"""Prepared calls out of peers' memory and over the network, beside NCCL's own.

    torchrun --standalone --nproc-per-node 2 --max-restarts 9 benchmarks/bench_peers.py
    python benchmarks/report.py

and with NCCL_P2P_DISABLE=1 for 25 GB/s, where only the network is used. Rows are appended to
results/prepared.jsonl as they are measured; what the file has is not measured again without
--again. --codecs, --routes, --sizes, --collectives and --seconds make a run shorter. --checksum off
measures messages without checksums, and --checksum on off both; they have rows of their own. With
--threads 2, and without torchrun, the ranks are threads on the CPU, and their transport takes
NCCL's part.

Tensors are bfloat16 N(0, 0.02), of so many KiB on each rank before the call. A time is the median
of whole calls of the slowest rank, from a barrier until the device has finished; the host's is the
time until the call returns. Messages over a network have learnt their size before. A CUDA graph
holds two calls, as a prepared call has two sets of messages; its time is that of a call in a row of
replays. NCCL's calls are timed before and after in the same way, in bfloat16; "reduce_scatter
float32" is of float32 tensors, whose terms travel as bfloat16 here, and of an all-reduce the time
of NCCL's in float32 is there, too. Every result is compared before it is timed, and that of a graph
after: with a lossless codec bit for bit with the sum in float32 in the order of ranks, rounded
once.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from recording import Job, Limits, Ranks, Record, facts, measure_all

from tightwire.adapters.collectives.prepared import PreparedCalls
from tightwire.adapters.transports.base import Transport
from tightwire.adapters.transports.peer import PeerMemory, connect_threads
from tightwire.adapters.transports.threads import ThreadTransport, connect
from tightwire.adapters.transports.torch_dist import TorchDist

RESULTS = Path(__file__).parent / "results"
WIDE = "reduce_scatter float32"
COLLECTIVES = ("all_gather", "all_to_all", "reduce_scatter", WIDE, "all_reduce")
CODECS = ("zipccl", "mx", "taco", "nvfp4", "dynamiq", "raw")
ROUTES = ("peers", "network")
KIB = (64, 512, 2048, 16 << 10, 64 << 10, 256 << 10)
#: vNMSE of results that is allowed to lossy codecs.
ERROR = {"mx": 3e-3, "taco": 3e-3, "nvfp4": 3e-2, "dynamiq": 3e-2}
#: Calls in a graph: a prepared call has as many sets of messages, which are used alternately.
DEPTH = 2
#: Calls before the first is timed: messages over a network have learnt their size by then.
SETTLED = 24
#: Of one measurement.
SECONDS, LEAST, MOST, REPLAYS = 0.15, 5, 30, 10


class Network(Protocol):
    """Collectives without compression, in place or into `out`."""

    def all_gather(self, out: Any, x: Any) -> None:
        """Concatenate the tensors of all ranks."""

    def all_to_all(self, out: Any, x: Any) -> None:
        """Exchange equal shares."""

    def reduce_scatter(self, out: Any, x: Any) -> None:
        """Sum over ranks; a share for each."""

    def all_reduce(self, x: Any) -> None:
        """Sum over ranks, in place."""


class Nccl:
    """The default process group."""

    def all_gather(self, out: Any, x: Any) -> None:
        """See ``Network``."""
        dist.all_gather_into_tensor(out, x)

    def all_to_all(self, out: Any, x: Any) -> None:
        """See ``Network``."""
        dist.all_to_all_single(out, x)

    def reduce_scatter(self, out: Any, x: Any) -> None:
        """See ``Network``."""
        dist.reduce_scatter_tensor(out, x)

    def all_reduce(self, x: Any) -> None:
        """See ``Network``."""
        dist.all_reduce(x)


class Place(NamedTuple):
    """A rank, and what connects it with the others."""

    ranks: Ranks
    network: Network
    transport: Transport
    #: None: no GPU can read another's memory.
    peers: PeerMemory | None


class Case(NamedTuple):
    """What is measured."""

    collective: str
    codec: str
    route: str
    kib: int
    checksum: bool = True

    @property
    def key(self) -> str:
        """Its key in the record."""
        text = f"{self.collective}, {self.codec}, {self.route}, {self.kib} KiB"
        return text if self.checksum else f"{text}, checksum off"


class Call(NamedTuple):
    """A call on tensors that stay."""

    #: Queues it; what it returns is waited for.
    make: Callable[[], Any]
    out: torch.Tensor


class CaptureError(RuntimeError):
    """A call could not be captured in a CUDA graph."""


def tensor(place: Place, case: Case) -> torch.Tensor:
    """This rank's tensor: bfloat16, N(0, 0.02), its length a multiple of the ranks."""
    ranks = place.ranks
    rng = torch.Generator(ranks.device).manual_seed(case.kib * 100 + ranks.rank)
    n = case.kib * 512 // ranks.world * ranks.world
    values = torch.randn(n, device=ranks.device, generator=rng).mul_(0.02).to(torch.bfloat16)
    return values.float() if case.collective == WIDE else values


def result(case: Case, x: torch.Tensor, world: int) -> torch.Tensor:
    """Memory for a result."""
    kind = case.collective.partition(" ")[0]
    n = x.numel()
    return x.new_empty({"all_gather": world * n, "reduce_scatter": n // world}.get(kind, n))


def native(place: Place, case: Case, x: torch.Tensor, dtype: torch.dtype | None = None) -> Call:
    """The network's own call; `dtype`: with the tensor in this one."""
    x = x.to(dtype or x.dtype)
    out = result(case, x, place.ranks.world)
    network = place.network
    if case.collective == "all_reduce":
        # Time and again the same memory: values grow, times do not.
        return Call(functools.partial(network.all_reduce, out.copy_(x)), out)
    move = getattr(network, case.collective.partition(" ")[0])
    return Call(functools.partial(move, out, x), out)


def prepared(calls: PreparedCalls, case: Case, x: torch.Tensor) -> Call:
    """A prepared call on tensors of its own memory."""
    out = result(case, x, calls.world_size)
    if case.collective == WIDE:
        call: Any = calls.reduce_scatter(x, wire="bfloat16", dtype="float32")
    else:
        call = getattr(calls, case.collective)(x)
    return Call(functools.partial(call, x, out), out)


def expected(place: Place, case: Case, x: torch.Tensor) -> torch.Tensor:
    """The result without compression: sums in float32 in the order of ranks, rounded once."""
    ranks = place.ranks
    whole = x.new_empty(ranks.world * x.numel())
    place.network.all_gather(whole, x)
    if case.collective == "all_gather":
        return whole
    terms = whole.view(ranks.world, -1)
    if case.collective != "all_reduce":
        terms = terms.view(ranks.world, ranks.world, -1)[:, ranks.rank]
    if case.collective == "all_to_all":
        return terms.reshape(-1)
    total = terms[0].float()
    for term in terms[1:]:
        total = total + term
    return total.to(x.dtype)


def check(place: Place, case: Case, out: torch.Tensor, wanted: torch.Tensor) -> float:
    """The vNMSE of a result, which is to be as good as the codec's are, and alike on all ranks.

    Raises:
        RuntimeError: If it is not.
    """
    bits = {2: torch.int16, 4: torch.int32}[out.element_size()]
    if case.codec not in ERROR and not torch.equal(out.view(bits), wanted.view(bits)):
        raise RuntimeError("the result has other bits than the sum in float32")
    difference = (out.float() - wanted.float()).square().sum()
    error = float(difference / wanted.float().square().sum())
    if not error <= ERROR.get(case.codec, 0.0):
        raise RuntimeError(f"the error is {error}; allowed: {ERROR.get(case.codec, 0.0)}")
    if case.collective == "all_reduce":
        odd = torch.arange(1, 2 * out.numel(), 2, device=out.device)
        if len(set(place.ranks.gather((out.view(bits).long() * odd).sum().item()))) > 1:
            raise RuntimeError("ranks get different bits")
    return error


def finish(work: Any) -> Any:
    """Wait for what a call has returned; NCCL's return nothing."""
    if work is not None:
        work.wait()
    return work


def eager(ranks: Ranks, make: Callable[[], Any]) -> dict[str, float]:
    """Milliseconds of a call, and microseconds until it returns, on the slowest rank."""

    def once() -> tuple[float, float]:
        ranks.meet()
        start = time.perf_counter()
        work = make()
        host = time.perf_counter() - start
        ranks.synchronize()
        seconds = time.perf_counter() - start
        finish(work)
        return seconds, host

    once()
    first = ranks.slowest([once()[0]])[0]
    count = min(MOST, max(LEAST, int(SECONDS / first)))
    samples = [once() for _ in range(count)]
    seconds, host = (ranks.slowest(column) for column in zip(*samples, strict=True))
    return {
        "ms": 1e3 * statistics.median(seconds),
        "least_ms": 1e3 * min(seconds),
        "host_us": 1e6 * statistics.median(host),
    }


def graphed(ranks: Ranks, make: Callable[[], Any]) -> tuple[float, Callable[[], None]]:
    """Milliseconds of a call in a CUDA graph, and what replays it.

    Raises:
        CaptureError: On all ranks, if it cannot be captured on one.
    """
    graph = torch.cuda.CUDAGraph()

    def capture() -> None:
        # Threads of NCCL look at events meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(DEPTH):
                make()

    ranks.synchronize()
    _, problem = ranks.attempt(capture)
    if problem:
        raise CaptureError(problem)
    samples = []
    for _ in range(LEAST + 1):
        ranks.meet()
        start = time.perf_counter()
        for _ in range(REPLAYS):
            graph.replay()
        ranks.synchronize()
        samples.append((time.perf_counter() - start) / REPLAYS / DEPTH)
    return 1e3 * statistics.median(ranks.slowest(samples)[1:]), graph.replay


def measure(place: Place, case: Case) -> dict[str, Any]:
    """The times of a case, between those of the network's own call."""
    ranks, on_gpu = place.ranks, place.ranks.device.type == "cuda"
    x = tensor(place, case)
    wanted = expected(place, case, x)
    memory = place.peers if case.route == "peers" else None
    options: dict[str, Any] = {"checksum": case.checksum, "depth": DEPTH}
    calls = PreparedCalls(place.transport, case.codec, peers=memory, **options)
    ours, theirs = prepared(calls, case, x), native(place, case, x)
    for _ in range(SETTLED if case.route == "network" else DEPTH):
        ours.out.fill_(float("nan"))
        work = finish(ours.make())
    ranks.synchronize()
    row: dict[str, Any] = case._asdict() | {"error_vnmse": check(place, case, ours.out, wanted)}
    row |= {"raw_bytes": work.raw_bytes, "wire_bytes": work.wire_bytes}
    before = eager(ranks, theirs.make)
    row["eager"] = eager(ranks, ours.make)
    after = eager(ranks, theirs.make)
    row["native"] = {name: (before[name] + after[name]) / 2 for name in before}
    row["native_sides_ms"] = [before["ms"], after["ms"]]
    row["speedup"] = row["native"]["ms"] / row["eager"]["ms"]
    if case.collective == "all_reduce":
        wide = native(place, case, x, torch.float32)
        row["native_float32_ms"] = eager(ranks, wide.make)["ms"]
        del wide
    check(place, case, ours.out, wanted)
    row["graph_ms"] = row["native_graph_ms"] = row["graph_speedup"] = row["graph_error"] = None
    if on_gpu:
        try:
            row["native_graph_ms"], _ = graphed(ranks, theirs.make)
            row["graph_ms"], replay = graphed(ranks, ours.make)
        except CaptureError as error:
            row["graph_error"] = str(error)
        else:
            ours.out.fill_(float("nan"))
            replay()
            ranks.synchronize()
            check(place, case, ours.out, wanted)
            row["graph_speedup"] = row["native_graph_ms"] / row["graph_ms"]
    ranks.meet()
    return row


def line(row: dict[str, Any]) -> str:
    """What is printed of a case."""
    ours = row["eager"]
    text = f"{ours['ms']:.3f} ms, {row['speedup']:.2f} x, host {ours['host_us']:.0f} us"
    if row["graph_ms"] is not None:
        text += f"; graph {row['graph_ms']:.3f} ms, {row['graph_speedup']:.2f} x"
    return text + (f"; {row['graph_error']}" if row["graph_error"] else "")


def run(place: Place, options: argparse.Namespace) -> None:
    """Measure what is to be measured, on one rank."""
    ranks = place.ranks
    if place.peers is None and ranks.rank == 0:
        print("no peer memory here", flush=True)
    cases = [
        Case(collective, codec, route, kib, checksum == "on")
        for codec in options.codecs
        for route in options.routes
        if place.peers is not None or route != "peers"
        for kib in options.sizes
        for collective in options.collectives
        for checksum in options.checksum
    ]
    jobs = {case.key: Job(functools.partial(measure, place, case)) for case in cases}
    common = facts(ranks.device, ranks.world)
    if options.threads:
        common["link"] = "threads"
    record = Record(options.out, common, ranks.rank == 0)
    limits = Limits(options.seconds, options.limit, options.again)
    about = {"collectives": COLLECTIVES, "codecs": CODECS, "routes": ROUTES, "kib": KIB}
    measure_all(ranks, record, jobs, limits, line, about)


def in_processes(options: argparse.Namespace) -> None:
    """Run in a process of torchrun's."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    timeout = datetime.timedelta(seconds=options.limit)
    dist.init_process_group("nccl", timeout=timeout, device_id=device)
    peers: Any = None
    if os.environ.get("NCCL_P2P_DISABLE", "0") != "1":
        from tightwire.adapters.transports.symmetric import SymmetricMemory, why_not

        if not why_not(dist.group.WORLD, device):
            peers = SymmetricMemory(device=device)
    ranks = Ranks.processes(device, options.limit)
    transport = TorchDist.new_group(None, device, purpose="bench_peers")
    run(Place(ranks, Nccl(), transport, peers), options)
    transport.close()
    dist.destroy_process_group()


class Meeting:
    """Where threads exchange small objects.

    Args:
        world: Number of threads.
        timeout: Seconds that they wait for one another.
    """

    def __init__(self, world: int, timeout: float) -> None:
        self._values: list[Any] = [None] * world
        self._all = threading.Barrier(world, timeout=timeout)

    def exchange(self, rank: int, value: Any) -> list[Any]:
        """The objects of all threads."""
        self._values[rank] = value
        self._all.wait()
        found = list(self._values)
        self._all.wait()
        return found


class Threads:
    """Collectives of a thread, by a transport."""

    def __init__(self, transport: ThreadTransport) -> None:
        self._transport = transport

    def all_gather(self, out: Any, x: Any) -> None:
        """See ``Network``."""
        self._transport.all_gather(out.view(torch.uint8), x.view(torch.uint8))

    def all_to_all(self, out: Any, x: Any) -> None:
        """See ``Network``."""
        self._transport.all_to_all(out.view(torch.uint8), x.view(torch.uint8))

    def reduce_scatter(self, out: Any, x: Any) -> None:
        """See ``Network``."""
        self._transport.reduce_scatter(out, x)

    def all_reduce(self, x: Any) -> None:
        """See ``Network``."""
        self._transport.all_reduce(x)


def in_threads(options: argparse.Namespace) -> None:
    """Run with threads on the CPU as ranks."""
    world, limit = options.threads, options.limit
    meeting, memory = Meeting(world, limit), connect_threads(world, limit)
    network, transports = connect(world, limit), connect(world, limit)
    failed: list[BaseException] = []

    def work(rank: int) -> None:
        exchange = functools.partial(meeting.exchange, rank)
        ranks = Ranks(rank, world, torch.device("cpu"), exchange)
        place = Place(ranks, Threads(network[rank]), transports[rank], memory[rank])
        try:
            run(place, options)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def main(words: Sequence[str] | None = None) -> None:
    """Measure, in a process of torchrun's or in threads."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS / "prepared.jsonl")
    parser.add_argument("--codecs", nargs="+", choices=CODECS, default=CODECS)
    parser.add_argument("--collectives", nargs="+", choices=COLLECTIVES, default=COLLECTIVES)
    parser.add_argument("--routes", nargs="+", choices=ROUTES, default=ROUTES)
    parser.add_argument("--sizes", nargs="+", type=int, default=KIB, help="KiB of a rank")
    checksums = {"nargs": "+", "choices": ("on", "off"), "default": ["on"]}
    parser.add_argument("--checksum", **checksums, help="of messages")
    parser.add_argument("--seconds", type=float, default=1e9, help="of all cases; others are left")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds of a case")
    parser.add_argument("--again", action="store_true", help="measure what the file has, too")
    parser.add_argument("--threads", type=int, default=0, help="ranks that are threads on the CPU")
    options = parser.parse_args(words)
    if options.threads:
        in_threads(options)
    else:
        in_processes(options)


if __name__ == "__main__":
    main()
