"""Speed on one GPU: encode, decode and decode_add beside the device's own copy of the same run.

    python benchmarks/bench_gpu.py --out benchmarks/results [--weights FILE.safetensors] [--quick]
    python benchmarks/bench_gpu.py --out benchmarks/results --lossy     # those codecs alone
    python benchmarks/report.py

GB/s counts the tensor's bytes. Fractions are of the copy rate, in bytes moved: encode and decode
move the raw and the packed bytes, decode_add the packed bytes and its accumulator twice, a copy
the raw bytes twice. Calls are replayed from CUDA graphs and timed with events. "cold" is a graph
that calls once on each of many tensors, too many for the cache; "hot" one that calls again and
again on a single tensor; "replay" one call on a single tensor, alone. Nothing is timed before its
result was checked, and everything timed is checked again afterwards, through the same graph.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import gc
import hashlib
import importlib.metadata
import json
import math
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import gpt_tensors
import gpu_report
import numpy as np
import torch
from gpu_report import cold

import tightwire as tw
from tightwire.bench import POISON
from tightwire.convert import plain_tensors
from tightwire.demo import find_model
from tightwire.formats.dtypes import BY_NAME
from tightwire.storage import save_figure

MIB = 1 << 20
WIDE = ("bfloat16", "float16", "float32")
NARROW = ("float8_e4m3fn", "float8_e5m2")
SIZES = (256, 1024, 64, 16, 2)  # MiB; those that matter most come first
ADVERSARIAL = ("random", "equal", "nan", "half_escaped", "missed", "rows", "half_zeros")
#: A pass over at least so much input leaves nothing of the cache to the next pass.
COLD_NBYTES = 512 * MIB
#: Single-tensor times are of interest up to here, in MiB.
SMALL = 16
#: MiB that both backends encode, for each kind of data, before anything is timed.
COMPARED = 16
HOT_CALLS = 20
#: Clock ticks, some 1 ms, that the device idles before each sample: launches are queued by then.
DELAY, DELAY_SECONDS = 2_000_000, 1e-3
SECONDS, LEAST = 0.06, 20
HOST_NBYTES, HOST_CALLS = 1 << 16, 200
SEED = 7
STEPS = 400
ROW = 1536


@dataclasses.dataclass(frozen=True)
class Case:
    """One element type, kind of data, size of tensor and codec."""

    dtype: str
    data: str
    mib: int
    name: str = "zipccl"

    @property
    def codec(self) -> tw.Codec:
        """The codec; of "missed" with a window that holds no element."""
        return tw.codec(self.name, **({"window": 1} if self.data == "missed" else {}))

    @property
    def nelem(self) -> int:
        """Elements of one tensor."""
        return self.mib * MIB // BY_NAME[self.dtype].itemsize

    @property
    def sets(self) -> int:
        """How many tensors a cold pass takes."""
        return max(1, COLD_NBYTES // (self.mib * MIB))


def cases(quick: bool) -> list[Case]:
    """What is measured, the most important first."""
    if quick:
        found = [Case("bfloat16", "gaussian", mib) for mib in (256, 16, 2)]
        found += [Case(dtype, "gaussian", 256) for dtype in ("float16", "float32")]
        return found + [Case("bfloat16", data, 256) for data in ("random", "half_escaped", "nan")]
    found = [Case(dtype, "gaussian", mib) for dtype in WIDE for mib in SIZES]
    found += [Case(dtype, "weights", mib) for dtype in WIDE for mib in (256, 16)]
    found += [Case("bfloat16", data, 256) for data in ADVERSARIAL]
    return found + [Case(dtype, "gaussian", mib) for dtype in NARROW for mib in (256, 16)]


# Data


def make(case: Case, sets: int, weights: torch.Tensor | None = None) -> torch.Tensor:
    """Data of a case on the device, shape (sets, nelem); `weights` is flat, float32."""
    total = sets * case.nelem
    dtype = getattr(torch, case.dtype)
    rng = torch.Generator("cuda").manual_seed(SEED)

    def normal() -> torch.Tensor:
        scale = 16.0 if dtype.itemsize == 1 else 0.02
        return torch.randn(total, device="cuda", generator=rng).mul_(scale)

    def integers(low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high, (total,), device="cuda", dtype=torch.int16, generator=rng)

    def chosen() -> torch.Tensor:
        return torch.rand(total, device="cuda", generator=rng) < 0.5

    if case.data == "weights":
        if weights is None:
            raise ValueError("no weights to measure")
        # One tensor behind the other, from the first again when the last is used up.
        x = weights.to("cuda", dtype).repeat(-(-total // weights.numel()))[:total]
    elif case.data in ("gaussian", "missed"):
        x = normal().to(dtype)
    elif case.data == "random":
        words = total * dtype.itemsize // 8
        limit = (1 << 63) - 1
        x = torch.randint(-limit - 1, limit, (words,), device="cuda", generator=rng).view(dtype)
    elif case.data in ("equal", "nan"):
        value = 1.0 if case.data == "equal" else float("nan")
        x = torch.full((total,), value, device="cuda", dtype=dtype)
    elif case.data == "half_zeros":
        x = normal().to(dtype)
        x[chosen()] = 0
    elif case.data == "rows":
        scale = torch.tensor([1.0, 2.0**-10], device="cuda")
        number = torch.arange(total, device="cuda") // ROW
        x = (normal() * scale[number % 2]).to(dtype)
    elif case.data == "half_escaped" and case.dtype == "bfloat16":
        # Half of the exponents in one window of seven, the others anywhere below it.
        exponent = torch.where(chosen(), integers(117, 124), integers(1, 101))
        magnitude = (exponent << 7) | integers(0, 128)
        x = torch.where(chosen(), magnitude | -(1 << 15), magnitude).view(dtype)
    else:
        raise ValueError(f"no data {case.data!r} in {case.dtype}")
    return x.reshape(sets, -1)


def load_weights(path: Path) -> torch.Tensor:
    """All floats of a safetensors file, one tensor behind the other: flat, float32, on the host."""
    parts = [
        bits.view(dtype.numpy).astype(np.float32)
        for _, dtype, bits in plain_tensors(path, None)
        if dtype.is_float
    ]
    return torch.from_numpy(np.concatenate(parts))


def train_weights() -> torch.Tensor:
    """Weights of a small GPT after some hundred steps on the device: flat, float32."""
    tokens = gpt_tensors.load_tokens().to("cuda")
    torch.manual_seed(SEED)
    with torch.device("cuda"):
        model = gpt_tensors.GPT()
        gpt_tensors.train(model, tokens, STEPS, torch.Generator("cuda").manual_seed(SEED))
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).cpu()


def real_weights(path: Path | None) -> tuple[torch.Tensor, str]:
    """Real weights and where they are from: `path`, the installed checkpoint, or a training."""
    if path is not None:
        return load_weights(path), path.stem
    try:
        model = find_model()
    except FileNotFoundError:
        return train_weights(), f"GPT of gpt_tensors.py after {STEPS} steps"
    return load_weights(model), "MiniLM"


# Work that is checked and timed


def as_words(x: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor as one row of 64-bit words."""
    return x.reshape(-1).view(torch.uint8).view(torch.int64)


def poison(*tensors: torch.Tensor) -> None:
    """Fill memory with what no result looks like."""
    for x in tensors:
        x.reshape(-1).view(torch.uint8).fill_(POISON)


class Work:
    """Inputs, outputs and workspace of a case, as often as a cold pass needs them."""

    def __init__(self, case: Case, x: torch.Tensor, checksum: bool) -> None:
        self.codec, self.checksum = case.codec, checksum
        self.plan = self.codec.plan((x.shape[1],), case.dtype, checksum=checksum)
        self.x, self.y = x, torch.empty_like(x)
        self.room = byte_rows(len(x), self.plan.nbytes)
        self.scratch = byte_rows(1, self.plan.scratch_nbytes)[0]
        self.xs, self.ys, self.rooms = x.unbind(), self.y.unbind(), self.room.unbind()
        self.buffers = [self.encode(i) for i in range(len(x))]

    def encode(self, i: int) -> tw.Buffer:
        """Encode tensor `i` into its room."""
        return self.codec.encode(
            self.xs[i], out=self.rooms[i], scratch=self.scratch, checksum=self.checksum
        )

    def decode(self, i: int) -> None:
        """Decode buffer `i` into its output."""
        tw.decode(self.buffers[i], out=self.ys[i], scratch=self.scratch)

    def copy(self, i: int) -> None:
        """What the others are measured against."""
        self.ys[i].copy_(self.xs[i])

    def each(self, call: Callable[[int], Any]) -> Callable[[], Any]:
        """`call` on every tensor in turn."""
        return lambda: [call(i) for i in range(len(self.xs))]

    def packed_nbytes(self) -> float:
        """Exact packed bytes of one tensor, on average."""
        return statistics.fmean(buffer.nbytes for buffer in self.buffers)

    def check_round_trip(self, encode: Callable[[], Any], decode: Callable[[], Any]) -> None:
        """Nothing that lay in memory before may help: every tensor comes back bit for bit."""
        poison(self.room, self.scratch)
        encode()
        poison(self.y, self.scratch)
        decode()
        for buffer in self.buffers:
            buffer.check()
        require(torch.equal(as_words(self.x), as_words(self.y)), "the tensor does not come back")

    def check_copy(self, copy: Callable[[], Any]) -> None:
        """The copy is held to the same."""
        poison(self.y)
        copy()
        require(torch.equal(as_words(self.x), as_words(self.y)), "the copy differs")


class Adding:
    """Accumulators beside a Work, for decode_add."""

    def __init__(self, work: Work, dtype: torch.dtype) -> None:
        self.work = work
        self.total = torch.empty(work.x.shape, dtype=dtype, device="cuda")
        self.accs = self.total.unbind()

    def add(self, i: int) -> None:
        """Add buffer `i` to its accumulator."""
        work = self.work
        work.codec.decode_add(work.buffers[i], self.accs[i], scratch=work.scratch)

    def check(self, add: Callable[[], Any]) -> None:
        """One pass from known values, compared bit for bit with the sum that torch computes."""
        start = self.work.x.to(self.total.dtype).flip(-1)
        self.total.copy_(start)
        poison(self.work.scratch)
        add()
        for buffer in self.work.buffers:
            buffer.check()
        wanted = start.add_(self.work.x.to(start.dtype))
        require(torch.equal(as_words(self.total), as_words(wanted)), "the sum differs")


def byte_rows(count: int, nbytes: int) -> torch.Tensor:
    """Poisoned device memory, shape (count, nbytes)."""
    return torch.full((count, nbytes), POISON, dtype=torch.uint8, device="cuda")


def require(fine: bool, what: str) -> None:
    """Raise unless `fine`; unlike an assertion, always."""
    if not fine:
        raise RuntimeError(what)


# Both backends


def compare(dtype: str, names: Iterable[str], weights_file: str | None) -> dict[str, str]:
    """Encode each kind of data on the GPU and the CPU; what is wrong with it, "" if nothing.

    Runs in processes of its own: one per element type, so that kernels compile side by side.
    """
    found = {}
    for name in names:
        try:
            weights = torch.load(weights_file) if weights_file else None
            case = Case(dtype, name, COMPARED)
            x = make(case, 1, weights)
            host = x[0].view(torch.uint8).cpu().numpy().view(BY_NAME[dtype].numpy)
            for checksum in (False, True):
                work = Work(case, x, checksum)
                work.check_round_trip(work.each(work.encode), work.each(work.decode))
                on_host = case.codec.encode(host, backend="cpu", checksum=checksum, threads=2)
                require(digest(work.buffers[0]) == digest(on_host), "bytes differ from the CPU's")
                require(work.buffers[0].nbytes == on_host.nbytes, "nbytes differs from the CPU's")
                if name == "gaussian":
                    adding = Adding(work, torch.float32)
                    adding.check(work.each(adding.add))
            found[name] = ""
        except Exception as error:
            found[name] = told(error)
    return found


def digest(buffer: tw.Buffer) -> str:
    """SHA-256 of the packed bytes."""
    return hashlib.sha256(bytes(buffer)).hexdigest()


def told(error: Exception) -> str:
    """An exception as a line for the record; the whole story goes to stderr."""
    traceback.print_exception(error)
    return f"{type(error).__name__}: {error}"[:400]


class Comparisons:
    """Runs `compare` for the kinds of data that are asked for, and remembers what came out."""

    def __init__(self, workers: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.pool = concurrent.futures.ProcessPoolExecutor(workers, mp_context=spawn)
        self.running: dict[tuple[str, tuple[str, ...]], concurrent.futures.Future[Any]] = {}

    def start(self, dtype: str, names: Iterable[str], weights_file: str | None = None) -> None:
        """Begin with some kinds of data of one element type."""
        key = (dtype, tuple(names))
        self.running[key] = self.pool.submit(compare, dtype, key[1], weights_file)

    def finish(self) -> dict[str, str]:
        """What is wrong with each "dtype data", when all are done and the processes are gone."""
        problems = {}
        for (dtype, names), future in self.running.items():
            try:
                found = future.result()
            except Exception as error:
                found = dict.fromkeys(names, told(error))
            problems |= {f"{dtype} {name}": problem for name, problem in found.items()}
        self.pool.shutdown()
        return problems


# Time


def summary(samples: list[float]) -> dict[str, float]:
    """Median and spread of microseconds."""
    low, middle, high = np.percentile(samples, [10, 50, 90]).tolist()
    return {"median": middle, "p10": low, "p90": high, "samples": len(samples)}


def measure(run: Callable[[], Any], calls: int) -> dict[str, float]:
    """Microseconds per call on the device of `run`, which makes `calls` of them."""

    def batch(count: int) -> list[float]:
        marks = [[torch.cuda.Event(enable_timing=True) for _ in "ab"] for _ in range(count)]
        for start, end in marks:
            torch.cuda._sleep(DELAY)
            start.record()
            run()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) * 1e3 / calls for start, end in marks]

    batch(2)
    once = statistics.median(batch(3)) * calls / 1e6 + DELAY_SECONDS
    return summary(batch(max(LEAST, int(SECONDS / once))))


def captured(run: Callable[[], Any]) -> Callable[[], Any]:
    """A call that replays on the device what `run` does now."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = run()
    return lambda kept=kept: graph.replay()  # buffers live as long as the graph that fills them


Spent = dict[tuple[str, str], dict[str, float]]


def time_calls(work: Work, case: Case, copied: bool) -> Spent:
    """Check and time encode and decode, with `copied` the copy too, by operation and manner."""
    calls: dict[str, Callable[[int], Any]] = {"encode": work.encode, "decode": work.decode}
    work.check_round_trip(work.each(work.encode), work.each(work.decode))
    if copied:
        calls["copy"] = work.copy
        work.check_copy(work.each(work.copy))
    passes = {op: captured(work.each(call)) for op, call in calls.items()}
    work.check_round_trip(passes["encode"], passes["decode"])
    spent = {(op, "cold"): measure(run, case.sets) for op, run in passes.items()}
    if copied:
        work.check_copy(passes["copy"])
        if case.mib > SMALL:  # should a graph copy in another way, the faster one counts
            spent["copy", "eager"] = measure(work.each(work.copy), case.sets)
    work.check_round_trip(passes["encode"], passes["decode"])
    if case.mib <= SMALL:
        spent |= time_single(work, calls, passes, "hot", HOT_CALLS)
        spent |= time_single(work, calls, passes, "replay", 1)
    return spent


def time_single(
    work: Work,
    calls: dict[str, Callable[[int], Any]],
    passes: dict[str, Callable[[], Any]],
    how: str,
    count: int,
) -> Spent:
    """Time graphs of `count` calls on the first tensor; what they write is checked with `passes`
    for the other tensors.
    """
    runs = {
        op: captured(lambda call=call: [call(0) for _ in range(count)])
        for op, call in calls.items()
    }

    def encode() -> None:
        passes["encode"]()
        poison(work.rooms[0])
        runs["encode"]()

    def decode() -> None:
        passes["decode"]()
        poison(work.ys[0])
        runs["decode"]()

    work.check_round_trip(encode, decode)
    spent = {(op, how): measure(run, count) for op, run in runs.items()}
    work.check_round_trip(encode, decode)
    return spent


def time_add(work: Work, case: Case, dtype: torch.dtype) -> dict[str, float]:
    """Check and time decode_add into accumulators of this type."""
    adding = Adding(work, dtype)
    adding.check(work.each(adding.add))
    run = captured(work.each(adding.add))
    adding.check(run)
    us = measure(run, case.sets)
    adding.check(run)
    return us


def run_case(case: Case, weights: torch.Tensor | None) -> dict[str, Any]:
    """Check and time one case."""
    x = make(case, case.sets, weights)
    raw = x[0].nbytes
    record = dataclasses.asdict(case) | {"nelem": case.nelem, "sets": case.sets, "raw_nbytes": raw}
    timings = []
    for checksum in (True, False):  # so that without comes last, and its sizes are recorded
        work = Work(case, x, checksum)
        spent = time_calls(work, case, copied=not checksum)
        packed = work.packed_nbytes()
        moved = {"encode": raw + packed, "decode": raw + packed, "copy": 2 * raw}
        if not checksum and case.data not in ADVERSARIAL:
            sums = {"decode_add": torch.float32}
            if case.dtype in ("bfloat16", "float16"):
                sums["decode_add_same"] = x.dtype
            for op, dtype in sums.items():
                spent[op, "cold"] = time_add(work, case, dtype)
                moved[op] = packed + 2 * dtype.itemsize * case.nelem
        timings += [
            {"op": op, "how": how, "checksum": checksum, "us": us, "moved_nbytes": moved[op]}
            for (op, how), us in spent.items()
        ]
    return record | {
        "packed_nbytes": packed,
        "ratio": packed / raw,
        "plan_nbytes": work.plan.nbytes,
        "scratch_nbytes": work.plan.scratch_nbytes,
        "scratch_share": work.plan.scratch_nbytes / raw,
        "timings": timings,
    }


def add_rates(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Derive rates and fractions in place; return the copy rate in GB/s moved at each size.

    `of_copy` is against the same case's copy, `of_largest` against that of the largest tensors.
    """
    copies: dict[int, list[float]] = {}
    for record in records:
        for t in record["timings"]:
            t["GB/s"] = record["raw_nbytes"] / t["us"]["median"] / 1e3
            t["moved_GB/s"] = t["moved_nbytes"] / t["us"]["median"] / 1e3
        own = {t["how"]: t["moved_GB/s"] for t in record["timings"] if t["op"] == "copy"}
        own["cold"] = own["eager"] = max(own["cold"], own.get("eager", 0.0))
        copies.setdefault(record["mib"], []).append(own["cold"])
        for t in record["timings"]:
            t["of_copy"] = t["moved_GB/s"] / own[t["how"]]
    rates = {mib: statistics.median(values) for mib, values in sorted(copies.items())}
    for record in records:
        for t in record["timings"]:
            t["of_largest"] = t["moved_GB/s"] / rates[max(rates)]
    return {"by_mib": {str(mib): rate for mib, rate in rates.items()}, "largest_mib": max(rates)}


def host_times() -> dict[str, Any]:
    """Microseconds of host time per eager call on a small tensor, the device never waited for."""
    x = torch.randn(HOST_NBYTES // 2, device="cuda").mul_(0.02).to(torch.bfloat16)
    codec = tw.codec("zipccl")
    plan = codec.plan(x.shape, "bfloat16", checksum=False)
    room, scratch = byte_rows(1, plan.nbytes)[0], byte_rows(1, plan.scratch_nbytes)[0]
    y = torch.empty_like(x)
    poison(y)
    buffer = codec.encode(x, out=room, scratch=scratch, checksum=False)
    tw.decode(buffer, out=y, scratch=scratch)
    buffer.check()
    require(torch.equal(as_words(x), as_words(y)), "the tensor does not come back")
    calls = {
        "encode, out and scratch given": lambda: codec.encode(
            x, out=room, scratch=scratch, checksum=False
        ),
        "encode": lambda: codec.encode(x, checksum=False),
        "decode, out and scratch given": lambda: tw.decode(buffer, out=y, scratch=scratch),
        "torch's copy_": lambda: y.copy_(x),
    }
    found = {}
    for name, call in calls.items():
        samples = []
        for _ in range(LEAST + 1):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(HOST_CALLS):
                call()
            samples.append((time.perf_counter() - start) / HOST_CALLS * 1e6)
        torch.cuda.synchronize()
        found[name] = summary(samples[1:])
    poison(y)
    tw.decode(buffer, out=y, scratch=scratch)
    buffer.check()
    require(torch.equal(as_words(x), as_words(y)), "the tensor does not come back")
    return {"nbytes": HOST_NBYTES, "calls": HOST_CALLS, "us": found}


# Records


def machine() -> dict[str, Any]:
    """What a reader needs to judge the figures, and nothing that names this host."""
    device = torch.cuda.get_device_properties(0)
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(query, check=True, capture_output=True, text=True).stdout
        driver = driver.splitlines()[0].strip()
    except (OSError, subprocess.CalledProcessError, IndexError):
        driver = None
    return {
        "gpu": device.name,
        "driver": driver,
        "sms": device.multi_processor_count,
        "memory_gib": round(device.total_memory / 2**30, 1),
        "l2_mib": round(getattr(device, "L2_cache_size", 0) / MIB, 1),
        "cores": os.cpu_count(),
    }


def versions() -> dict[str, str | None]:
    """Versions of what takes part."""
    found: dict[str, str | None] = {
        "python": platform.python_version(),
        "tightwire": tw.__version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    for name in ("triton", "numpy", "numba", "nvidia-nvcomp-cu13"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def table(result: dict[str, Any]) -> list[str]:
    """A line per case, the goals last."""
    lines = [
        f"{'':26}{'MiB':>5} {'ratio':>6} {'encode':>7}{'of copy':>8} {'decode':>7}{'of copy':>8}"
        f" {'add':>6}{'copy':>7}"
    ]
    for record in result["cases"]:
        name = f"{record['dtype']} {record['data']}"
        if "error" in record:
            lines.append(f"{name:26}{record['mib']:5} {record['error']}")
            continue
        encode, decode = cold(record, "encode"), cold(record, "decode")
        add = cold(record, "decode_add")
        lines.append(
            f"{name:26}{record['mib']:5} {record['ratio']:6.4f}"
            f" {encode['GB/s']:7.0f}{encode['of_copy']:8.3f}"
            f" {decode['GB/s']:7.0f}{decode['of_copy']:8.3f}"
            f" {add['of_copy'] if add else float('nan'):6.3f}"
            f"{cold(record, 'copy')['moved_GB/s']:7.0f}"
        )
    for row in result["nvcomp"].get("rows", []):
        shown = row.get("error") or (
            f"{row['ratio']:.4f} {row['encode_GB/s']:.0f} {row['decode_GB/s']:.0f}"
        )
        lines.append(f"nvCOMP {row['name']}, {row['form']}, {row['mib']} MiB: {shown}")
    if "missing" in result["nvcomp"]:
        lines.append(f"nvCOMP: {result['nvcomp']['missing']}")
    lines += [
        f"{goal.name}: {goal.shown}, at {goal.bound} {goal.asked}"
        f"{'' if goal.met else '   <-- not met'}"
        for goal in gpu_report.goals(result)
        if not math.isnan(goal.value)
    ]
    return [*lines, f"{result['seconds']:.0f} s in all"]


def plot(result: dict[str, Any], path: Path) -> None:
    """Draw fractions of the copy rate against size, and speeds on adversarial data."""
    from matplotlib.figure import Figure

    fine = [record for record in result["cases"] if "error" not in record]
    figure = Figure(figsize=(14, 4.6), layout="constrained")
    *curves, bars = figure.subplots(1, 3)
    for axes, op in zip(curves, ("encode", "decode"), strict=True):
        for number, dtype in enumerate((*WIDE, *NARROW)):
            for data, style in (("gaussian", "o-"), ("weights", "x")):
                points = sorted(
                    (r["mib"], cold(r, op)["of_largest"])
                    for r in fine
                    if (r["dtype"], r["data"]) == (dtype, data)
                )
                if points:
                    label = dtype if data == "gaussian" else None
                    axes.plot(*zip(*points, strict=True), style, color=f"C{number}", label=label)
        sizes = sorted({r["mib"] for r in fine})
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(mib) for mib in sizes])
        axes.set_ylim(0, 1.05)
        axes.axhline(1, color="black", linewidth=0.8)
        axes.grid(alpha=0.3)
        axes.set_title(f"{op}: bytes moved, fraction of the copy rate")
        axes.set_xlabel("MiB of tensor (crosses: real weights)")
        axes.legend()
    shown = [r for r in fine if r["dtype"] == "bfloat16" and r["mib"] == 256]
    at = np.arange(len(shown))
    for offset, op in ((-0.2, "encode"), (0.2, "decode")):
        values = [cold(r, op)["GB/s"] for r in shown]
        bars.bar_label(bars.bar(at + offset, values, 0.38, label=op), fmt="%.0f", fontsize=7)
        for record in (r for r in shown if r["data"] == "gaussian"):
            quarter = cold(record, op)["GB/s"] / 4
            bars.axhline(quarter, color="C0" if op == "encode" else "C1", linestyle=":")
    bars.set_xticks(at, [r["data"] for r in shown], rotation=40, ha="right")
    bars.set_ylabel("GB/s of tensor")
    bars.set_title("bfloat16, 256 MiB (dotted: a quarter of the usual)")
    bars.margins(y=0.25)
    bars.legend()
    figure.suptitle(f"{result['machine']['gpu']}, zipccl, checksum off, {result['date']}")
    save_figure(figure, path)


def main() -> None:
    """Compare both backends, measure everything, write it down."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--weights", type=Path, metavar="FILE.safetensors")
    parser.add_argument("--quick", action="store_true", help="a few cases, no weights, no nvCOMP")
    parser.add_argument("--lossy", action="store_true", help="the lossy codecs, nothing else")
    parser.add_argument("--seconds", type=float, default=90.0, help="of --lossy, then it stops")
    parser.add_argument("--cases", nargs="*", default=[], help="of --lossy, parts of their names")
    arguments = parser.parse_args()
    begin = time.perf_counter()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.lossy:
        sys.exit(add_lossy(arguments.out, arguments.seconds, arguments.cases))
    todo = cases(arguments.quick)
    names: dict[str, list[str]] = {}
    for case in todo:
        if case.data not in (known := names.setdefault(case.dtype, [])):
            known.append(case.data)

    file = arguments.out / "gpu.json"
    before = json.loads(file.read_text()) if file.exists() else {}
    result: dict[str, Any] = {
        "lossy": before.get("lossy"),
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "versions": versions(),
        "settings": {
            "cold_mib": COLD_NBYTES // MIB,
            "hot_calls": HOT_CALLS,
            "compared_mib": COMPARED,
            "quick": arguments.quick,
        },
        "weights": None,
        "cases": [],
    }
    comparisons = Comparisons(len(names))
    for dtype, known in names.items():
        comparisons.start(dtype, [name for name in known if name != "weights"])
    weights = None
    with tempfile.TemporaryDirectory() as folder:
        if any(case.data == "weights" for case in todo):
            file = f"{folder}/weights.pt"
            try:
                weights, source = real_weights(arguments.weights)
                torch.save(weights, file)
                result["weights"] = {"source": source, "nelem": weights.numel()}
            except Exception as error:
                result["weights"] = {"missing": told(error)}
            for dtype in (dtype for dtype, known in names.items() if "weights" in known):
                comparisons.start(dtype, ["weights"], file)
        problems = result["compared_with_cpu"] = comparisons.finish()

    gc.collect()
    gc.freeze()  # every capture collects: let it look at what is new only
    for case in todo:
        begin_case = time.perf_counter()
        try:
            require(not (problem := problems[f"{case.dtype} {case.data}"]), problem)
            record = run_case(case, weights)
        except Exception as error:
            record = {**dataclasses.asdict(case), "error": told(error), "timings": []}
        record["seconds"] = round(time.perf_counter() - begin_case, 2)
        result["cases"].append(record)
        save(result, arguments.out)
    for name, call in (("host", host_times), ("nvcomp", beside_nvcomp)):
        try:
            skipped = arguments.quick and name == "nvcomp"
            result[name] = {"missing": "left out"} if skipped else call()
        except Exception as error:
            result[name] = {"missing": told(error)}
    result["seconds"] = round(time.perf_counter() - begin, 1)
    save(result, arguments.out)
    fine = [record for record in result["cases"] if "error" not in record]
    if fine:
        plot(result, arguments.out / "gpu.png")
        print("\n".join(table(result)))
    host_failed = "missing" in result["host"]
    sys.exit(host_failed or len(fine) < len(todo))


def beside_nvcomp() -> dict[str, Any]:
    """What nvCOMP does to the same tensors."""
    import gpu_nvcomp

    return dict(gpu_nvcomp.side_by_side())


def add_lossy(folder: Path, seconds: float, cases: Sequence[str]) -> bool:
    """Measure the lossy codecs, put them beside what is recorded; True if something failed."""
    import gpu_lossy

    file = folder / "gpu.json"
    recorded = json.loads(file.read_text()) if file.exists() else {}

    def keep(found: dict[str, Any]) -> None:
        recorded["lossy"] = found
        file.write_text(json.dumps(recorded, indent=1) + "\n")

    failed: bool = gpu_lossy.run(seconds, cases, recorded.get("lossy"), keep)
    print("\n".join(gpu_report.lossy_lines(recorded)))
    return failed


def save(result: dict[str, Any], folder: Path) -> None:
    """Write what there is so far, rates included."""
    fine = [record for record in result["cases"] if record["timings"]]
    if fine:
        result["copy_GB/s"] = add_rates(fine)
    (folder / "gpu.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
