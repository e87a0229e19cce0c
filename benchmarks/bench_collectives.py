"""Compressed collectives beside NCCL's own on the GPUs of one machine, one process each.

    python benchmarks/bench_collectives.py --out benchmarks/results [--world 2] [--sizes 64 256]
        [--tables sketches]
    python benchmarks/report.py

Links: "nvlink" as NCCL finds it, "p2p off" (NCCL_P2P_DISABLE=1: through host memory, which stands
in for a network of 200 Gb/s), "sockets" (TCP over the loopback). Tensors are bfloat16 N(0, 0.02),
MiB are those of one rank's input in bfloat16. Sums are of the same values in float32 tensors: here
`wire="bfloat16"` travels, there float32; an all-reduce is in place. A time is the median over calls
of the slowest rank's wall clock, from a barrier until the device has finished. Every result is
compared before and after it is timed. Reduce-scatters by sketch are of one layer of float32, and
held against NCCL's of the same. With `--tables` the others stay as they are recorded.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import tightwire as tw
from tightwire.adapters.collectives.communicator import Topology
from tightwire.adapters.training.sketches import Sketches, State, Tagc
from tightwire.adapters.transports.torch_dist import TorchDist

MIB = 1 << 20
LINKS: dict[str, dict[str, str]] = {
    "p2p off": {"NCCL_P2P_DISABLE": "1"},
    "nvlink": {},
    "sockets": {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1"},
}
COLLECTIVES = ("all_gather", "all_to_all", "reduce_scatter", "all_reduce")
SIZES = {"p2p off": (64, 256, 512), "nvlink": (64, 512), "sockets": (64, 256)}
PATHS: dict[str, dict[str, Any]] = {
    "compressed": {"algorithm": "compressed"},
    "pipelined": {"algorithm": "pipelined", "pieces": 4},
    "auto": {"algorithm": "auto"},
}
#: Of all-reduces held against NCCL's in bfloat16: codec, topology, error allowed.
LOSSY: tuple[tuple[str | tw.Codec, Topology, float], ...] = (
    ("mx", "two-shot", 3e-3),
    (tw.codec("mx", scale_rule="agreed"), "ring", 5e-3),
    ("taco", "two-shot", 3e-3),
    ("taco", "ring", 3e-3),
    ("dynamiq", "ring", 2e-2),
    ("thc", "in-network", 0.1),
)
LOSSY_PATHS = ("compressed", "auto")
#: Of a layer that goes by sketch: MiB of float32, and the ratio.
SKETCHED = (256, 512)
RATIO = 10
TABLES = ("measured", "lossy", "sketches", "small", "late")
SMALL = (4 << 10, 64 << 10)
LATE_SECONDS = 0.02
#: Of one measurement.
SECONDS, LEAST, MOST = 0.25, 3, 30


class Run(NamedTuple):
    """A call, what goes before it without being timed, and where its result is."""

    prepare: Callable[[], Any]
    call: Callable[[], Any]
    out: torch.Tensor


class Rank:
    """One process and its GPU."""

    def __init__(self, rank: int, world: int, port: int) -> None:
        self.rank, self.world = rank, world
        torch.cuda.set_device(rank)
        store = f"tcp://127.0.0.1:{port}"
        timeout = datetime.timedelta(seconds=60)
        dist.init_process_group(
            "nccl",
            init_method=store,
            rank=rank,
            world_size=world,
            timeout=timeout,
            device_id=torch.device("cuda", rank),
        )
        self.paths = {
            name: tw.Communicator(TorchDist(dist.new_group()), **options)
            for name, options in PATHS.items()
        }

    def tensor(self, nbytes: int, seed: int) -> torch.Tensor:
        """This rank's input: bfloat16, N(0, 0.02), its length a multiple of the ranks."""
        rng = torch.Generator("cuda").manual_seed(seed * 1000 + self.rank)
        n = nbytes // 2 // self.world * self.world
        return torch.randn(n, device="cuda", generator=rng).mul_(0.02).to(torch.bfloat16)

    def everywhere(self, value: float) -> float:
        """The largest of all ranks' values."""
        found = torch.tensor(value, device="cuda", dtype=torch.float64)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return found.item()

    def time(self, run: Run) -> dict[str, float]:
        """Milliseconds of a call until the slowest rank has its result."""
        prepare, call, _ = run

        def once() -> float:
            prepare()
            torch.cuda.synchronize()
            dist.barrier()
            torch.cuda.synchronize()
            start = time.perf_counter()
            call()
            torch.cuda.synchronize()
            return self.everywhere(time.perf_counter() - start)

        once()
        first = once()
        count = min(MOST, max(LEAST, int(SECONDS / first)))
        samples = sorted(once() * 1e3 for _ in range(count))
        return {"median": statistics.median(samples), "least": samples[0], "samples": count}

    def host_time(self, call: Callable[[], Any], calls: int = 300) -> float:
        """Microseconds of a call in a row of calls, the device waited for at the end."""
        samples = []
        for _ in range(5):
            torch.cuda.synchronize()
            dist.barrier()
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                call()
            torch.cuda.synchronize()
            samples.append((time.perf_counter() - start) / calls * 1e6)
        return statistics.median(samples[1:])


def natively(rank: Rank, collective: str, x: torch.Tensor) -> Run:
    """NCCL's call; sums in float32."""
    if collective == "all_gather":
        out = x.new_empty(rank.world * x.numel())
        return Run(int, lambda: dist.all_gather_into_tensor(out, x), out)
    if collective == "all_to_all":
        out = torch.empty_like(x)
        return Run(int, lambda: dist.all_to_all_single(out, x), out)
    wide = x.float()
    if collective == "reduce_scatter":
        out = wide.new_empty(x.numel() // rank.world)
        return Run(int, lambda: dist.reduce_scatter_tensor(out, wide), out)
    out = wide.clone()
    return Run(lambda: out.copy_(x), lambda: dist.all_reduce(out), out)


def compressed(comm: tw.Communicator, collective: str, x: torch.Tensor) -> Run:
    """Our call on the same tensors."""
    if collective == "all_gather":
        out = x.new_empty(comm.world_size * x.numel())
        return Run(int, lambda: comm.all_gather(x, out), out)
    if collective == "all_to_all":
        out = torch.empty_like(x)
        return Run(int, lambda: comm.all_to_all(x, out), out)
    wide = x.float()
    if collective == "reduce_scatter":
        out = wide.new_empty(x.numel() // comm.world_size)
        return Run(int, lambda: comm.reduce_scatter(wide, out, wire="bfloat16"), out)
    out = wide.clone()
    return Run(lambda: out.copy_(x), lambda: comm.all_reduce(out, out, wire="bfloat16"), out)


def check(rank: Rank, comm: tw.Communicator, collective: str, x: torch.Tensor, run: Run) -> None:
    """Compare a result with NCCL's: bit for bit, sums with the float32 sum of what travelled."""
    run.out.fill_(float("nan"))
    run.prepare()
    run.call()
    if collective in ("all_gather", "all_to_all"):
        plain = natively(rank, collective, x)
        plain.call()
        same = torch.equal(run.out.view(torch.int16), plain.out.view(torch.int16))
    else:
        shares = torch.empty_like(x)
        dist.all_to_all_single(shares, x)
        rows = shares.view(rank.world, -1)
        total = torch.full((rows.shape[1],), -0.0, device="cuda")
        for share in rows:
            total += share
        most = rows.float().abs().sum(0) * 2.0**-22
        is_native = comm.trace()[-1].algorithm == "native"
        if collective == "all_reduce":
            gathered = [total, most] if is_native else [total.to(torch.bfloat16).float(), most]
            total, most = [t.new_empty(x.numel()) for t in gathered]
            for whole, part in zip((total, most), gathered, strict=True):
                dist.all_gather_into_tensor(whole, part)
        # NCCL adds up in an order of its own.
        same = bool(((run.out - total).abs() <= (most if is_native else 0.0)).all())
    if rank.everywhere(float(not same)):
        raise RuntimeError(f"{collective} gives another result on a rank")


def measure(rank: Rank, link: str, sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Every collective, size and path on this link."""
    found = []
    for mib in sizes:
        x = rank.tensor(mib * MIB, mib)
        for collective in COLLECTIVES:
            row: dict[str, Any] = {"link": link, "collective": collective, "mib": mib}
            run = natively(rank, collective, x)
            row["native_ms"] = rank.time(run)
            del run
            for name, comm in rank.paths.items():
                run = compressed(comm, collective, x)
                check(rank, comm, collective, x, run)
                row[f"{name}_ms"] = rank.time(run)
                check(rank, comm, collective, x, run)
                comm.check()
                record = comm.trace()[-1]
                row[name] = {
                    "algorithm": record.algorithm,
                    "reason": record.reason,
                    "ratio": record.wire_bytes / record.raw_bytes,
                }
                row[f"{name}_speedup"] = row["native_ms"]["median"] / row[f"{name}_ms"]["median"]
                del run
            found.append(row)
            if rank.rank == 0:
                speedups = {n: round(row[f"{n}_speedup"], 3) for n in PATHS}
                native = round(row["native_ms"]["median"], 2)
                print(link, collective, mib, native, speedups, row["auto"]["reason"], flush=True)
    return found


def lossy(rank: Rank, link: str, sizes: Sequence[int]) -> list[dict[str, Any]]:
    """All-reduces by lossy codecs beside NCCL's, in place and in bfloat16 both."""
    found = []
    for codec, topology, allowed in LOSSY:
        comms = {
            path: tw.Communicator(
                TorchDist(dist.new_group()),
                codec,
                algorithm=path,  # type: ignore[arg-type]
                topology=topology,
            )
            for path in LOSSY_PATHS
        }
        for mib in sizes:
            x = rank.tensor(mib * MIB, mib)
            work = x.clone()
            plain = Run(lambda w=work, x=x: w.copy_(x), lambda w=work: dist.all_reduce(w), work)
            name = codec if isinstance(codec, str) else f"{codec.name}, scales agreed on"
            row: dict[str, Any] = {"link": link, "codec": name, "topology": topology, "mib": mib}
            row["native_ms"] = rank.time(plain)
            total = x.float()
            dist.all_reduce(total)
            for path, comm in comms.items():
                run = plain._replace(call=lambda c=comm, w=work: c.all_reduce(w, w))
                row[f"{path}_error"] = agreed_error(rank, run, total, allowed)
                row[f"{path}_ms"] = rank.time(run)
                agreed_error(rank, run, total, allowed)
                comm.check()
                record = comm.trace()[-1]
                row[path] = {
                    "algorithm": record.algorithm,
                    "reason": record.reason,
                    "ratio": record.wire_bytes / record.raw_bytes,
                }
                row[f"{path}_speedup"] = row["native_ms"]["median"] / row[f"{path}_ms"]["median"]
            found.append(row)
            if rank.rank == 0:
                speedups = {path: round(row[f"{path}_speedup"], 3) for path in LOSSY_PATHS}
                errors = {path: row[f"{path}_error"] for path in LOSSY_PATHS}
                print(link, name, mib, round(row["native_ms"]["median"], 2), speedups, errors)
                print(row["auto"]["reason"], flush=True)
    return found


def agreed_error(rank: Rank, run: Run, total: torch.Tensor, allowed: float) -> float:
    """The vNMSE of a sum, which must be the same on all ranks, and as good as is allowed."""
    run.prepare()
    run.call()
    first = run.out.clone()
    dist.broadcast(first, 0)
    same = torch.equal(first.view(torch.int16), run.out.view(torch.int16))
    error = float((run.out.float() - total).square().sum() / total.square().sum())
    if rank.everywhere(float(not same)) or not rank.everywhere(error) <= allowed:
        raise RuntimeError(f"ranks differ, or the error {error} is above {allowed}")
    return error


def sketches(rank: Rank, link: str) -> list[dict[str, Any]]:
    """Reduce-scatters of a layer by index and sketch beside NCCL's in float32."""
    found = []
    for mib in SKETCHED:
        x = torch.empty((rank.world, mib * MIB // 4 // rank.world), device="cuda")
        rng = torch.Generator("cuda").manual_seed(mib * 1000 + rank.rank)
        x.normal_(0, 0.02, generator=rng)
        out = torch.empty_like(x[0])
        plain = functools.partial(dist.reduce_scatter_tensor, out, x.view(-1))
        native = rank.time(Run(int, plain, out))
        for accumulate in (False, True):
            state, tagc = State(), Tagc(ratio=RATIO, accumulate=accumulate)
            sums = Sketches(tw.Communicator(TorchDist(dist.new_group())), tagc, state)
            call = functools.partial(sums.sums, [("layer", x)])
            check_sketches(rank, x, sums)
            ms = rank.time(Run(int, call, out))
            check_sketches(rank, x, sums)
            record, report = sums.trace()[-1], state.reports[-1]
            row = {"link": link, "mib": mib, "accumulate": accumulate, "codec_ratio": RATIO}
            row |= {"native_ms": native, "sketch_ms": ms, "seconds": record.seconds}
            row |= {"ratio": record.wire_bytes / record.raw_bytes, "density": report.density}
            row |= {"rounds": report.diagnosis.rounds if report.diagnosis else 0}
            row["speedup"] = native["median"] / ms["median"]
            found.append(row)
            if rank.rank == 0:
                print(link, "sketches", row, flush=True)
    return found


def check_sketches(rank: Rank, x: torch.Tensor, sums: Sketches) -> None:
    """Compare a call's result with the sum of what ranks keep, found by sorting; and the residual.

    Bit for bit: each sum is made in the order of the ranks.
    """
    corrected, share = x, sums.tagc.share_zeroed(rank.world)
    if sums.tagc.accumulate and sums.state.reports:
        corrected = x + sums.state.residuals.residual("layer").view(x.shape)
    keep = x.shape[1] - math.ceil(Fraction(str(share)) * x.shape[1])
    sent = torch.zeros_like(x)
    for row, kept in zip(corrected, sent, strict=True):
        size = row.abs()
        least = size.sort().values[-keep]
        ties = size == least
        stays = (size > least) | ties & (ties.cumsum(0) <= keep - (size > least).sum())
        kept.copy_(torch.where(stays, row, 0))
        del size, ties, stays
    terms = torch.empty_like(sent)
    dist.all_to_all_single(terms, sent)
    total = torch.zeros_like(x[0])
    for term in terms:
        total += term
    (result,) = sums.sums([("layer", x)])
    same = torch.equal(result, total) and sums.state.reports[-1].estimated == 0
    if sums.tagc.accumulate:
        rest = sums.state.residuals.residual("layer").view(x.shape)
        same = same and torch.equal(rest, corrected - sent)
    if rank.everywhere(float(not same)):
        raise RuntimeError("a reduce-scatter by sketch gives another result on a rank")


def small(rank: Rank, link: str) -> list[dict[str, Any]]:
    """Microseconds that the switch adds to a small native call."""
    found = []
    for nbytes in SMALL:
        x = rank.tensor(nbytes, 1)
        for collective in ("all_gather", "all_to_all"):
            plain = natively(rank, collective, x)
            run = compressed(rank.paths["auto"], collective, x)
            check(rank, rank.paths["auto"], collective, x, run)
            row = {
                "link": link,
                "collective": collective,
                "nbytes": nbytes,
                "native_us": rank.host_time(plain.call),
                "auto_us": rank.host_time(run.call),
                "algorithm": rank.paths["auto"].trace()[-1].algorithm,
            }
            found.append(row)
            if rank.rank == 0:
                print(row, flush=True)
    return found


def late(rank: Rank, link: str, mib: int) -> list[dict[str, Any]]:
    """Both designs of all-to-all where the last rank comes late: seconds after it has come."""
    x = rank.tensor(mib * MIB, 3)
    found = []
    for design in ("first", "between"):
        comm = tw.Communicator(TorchDist(dist.new_group()), sizes=design)  # type: ignore[arg-type]
        run = compressed(comm, "all_to_all", x)
        check(rank, comm, "all_to_all", x, run)
        samples = []
        for _ in range(9):
            torch.cuda.synchronize()
            dist.barrier()
            torch.cuda.synchronize()
            start = time.perf_counter()
            if rank.rank == rank.world - 1:
                time.sleep(LATE_SECONDS)
            run.call()
            torch.cuda.synchronize()
            samples.append(rank.everywhere(time.perf_counter() - start) * 1e3)
        check(rank, comm, "all_to_all", x, run)
        row = {"link": link, "mib": mib, "sizes": design, "late_ms": LATE_SECONDS * 1e3}
        found.append(row | {"ms": statistics.median(samples[2:])})
        if rank.rank == 0:
            print(found[-1], flush=True)
    return found


def work(
    rank: int, world: int, port: int, link: str, out: str, tables: str, sizes: Sequence[int]
) -> None:
    """What one process does; `tables` with commas."""
    me = Rank(rank, world, port)
    makers: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "measured": lambda: measure(me, link, sizes)
    }
    if link != "sockets":
        makers["lossy"] = lambda: lossy(me, link, sizes)
        makers["sketches"] = lambda: sketches(me, link)
    if link == "nvlink":
        makers["small"] = lambda: small(me, link)
    if link == "p2p off":
        makers["late"] = lambda: late(me, link, min(256, max(sizes)))
    result = {table: makers[table]() for table in tables.split(",") if table in makers}
    if rank == 0:
        Path(out).write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def launch(
    world: int, link: str, tables: Sequence[str], sizes: Sequence[int], limit: float
) -> dict[str, Any]:
    """Run `work` in `world` processes on a link."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        environment = os.environ | LINKS[link]
        words = [str(world), str(port), link, str(out), ",".join(tables), *map(str, sizes)]
        processes = [
            subprocess.Popen([sys.executable, __file__, "work", str(r), *words], env=environment)
            for r in range(world)
        ]
        try:
            codes = [process.wait(limit) for process in processes]
        finally:
            for process in processes:
                process.kill()
        if any(codes):
            raise RuntimeError(f"{link}: processes ended with {codes}")
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def main() -> None:
    """Measure every link and write collectives_<world>.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--world", type=int, default=torch.cuda.device_count())
    parser.add_argument("--links", nargs="*", default=list(LINKS))
    parser.add_argument("--tables", nargs="*", choices=TABLES, default=TABLES)
    parser.add_argument("--sizes", nargs="*", type=int, help="MiB")
    parser.add_argument("--limit", type=float, default=300.0)
    options = parser.parse_args()
    result: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": {"gpu": torch.cuda.get_device_name(0), "gpus": options.world},
        "versions": {
            "python": sys.version.split()[0],
            "torch": torch.__version__,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "tightwire": tw.__version__,
        },
    } | {table: [] for table in TABLES}
    path = options.out / f"collectives_{options.world}.json"
    if path.exists():
        old = json.loads(path.read_text())
        if any(old[name] != result[name] for name in ("machine", "versions")):
            parser.error(f"{path} is of another machine or versions; give another folder")
        # What is measured anew takes the place of all that its table has of its link.
        for table in TABLES:
            measured = options.links if table in options.tables else ()
            result[table] = [row for row in old.get(table, []) if row["link"] not in measured]
    for link in options.links:
        sizes = options.sizes or SIZES[link]
        found = launch(options.world, link, options.tables, sizes, options.limit)
        for key, rows in found.items():
            result[key] += rows
        path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["work"]:
        rank, world, port, link, out, tables, *sizes = sys.argv[2:]
        work(int(rank), int(world), int(port), link, out, tables, list(map(int, sizes)))
    else:
        main()
