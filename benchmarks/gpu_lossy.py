"""Speed of the lossy codecs on one GPU; `bench_gpu.py --lossy` runs it.

Bytes that an operation moves: encode and decode the raw and the packed bytes, decode_add the packed
bytes and a float32 accumulator twice, decode_add_encode the packed bytes twice and the raw ones.
Where nvfp4 looks for the largest magnitude first, or dynamiq for energies, what it reads for that
counts as well, and so for codecs that add up, which have an index or norms to make; omnireduce
moves no more of its elements than it keeps. What dynamiq's statistics take is timed
by itself; what its widths take is the time between encode with given stats and encode with fixed
widths. Tensors of lhc are sparse enough to peel; how many rounds that takes is recorded beside the
times.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import gc
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import bench_gpu as bench
import numpy as np
import torch

import tightwire as tw
from tightwire.codecs.omnireduce import Omnireduce
from tightwire.formats.dtypes import BY_NAME
from tightwire.homomorphic import SAFE_LOAD, diagnose

MIB = 1 << 20
KEY = tw.Key(5, 1, 1, 8)
#: Codecs whose sums need no decoding.
ADDS_UP = ("lhc", "thc", "omnireduce")
MX = ("e4m3", "e5m2", "e3m2", "e2m3", "e2m1", "int8")
#: Compilers at work side by side.
WORKERS = max(8, (os.cpu_count() or 8) // 2)


@dataclasses.dataclass(frozen=True)
class Lossy:
    """A codec, an element type and a size. `given`: encode is told the tensor's statistics."""

    name: str
    codec: str
    params: tuple[tuple[str, Any], ...]
    mib: int
    dtype: str = "bfloat16"
    given: bool = False

    @property
    def made(self) -> tw.Codec:
        """The codec with its parameters."""
        return tw.codec(self.codec, **dict(self.params))

    @property
    def share(self) -> float:
        """How many of the elements are not zero."""
        ratio = dict(self.params).get("ratio")
        return SAFE_LOAD / ratio if ratio else 1.0

    @property
    def sets(self) -> int:
        """How many tensors a cold pass takes."""
        return max(1, bench.COLD_NBYTES // (self.mib * MIB))


def cases() -> list[Lossy]:
    """What is measured, the most important first."""
    kinds: list[tuple[str, str, dict[str, Any], bool]] = [
        ("mx e4m3", "mx", {}, False),
        ("mx agreed, stats given", "mx", {"scale_rule": "agreed"}, True),
        ("nvfp4", "nvfp4", {}, False),
        ("nvfp4, stats given", "nvfp4", {}, True),
        ("taco", "taco", {}, False),
        ("dynamiq", "dynamiq", {}, False),
        ("dynamiq, stats given", "dynamiq", {}, True),
        ("dynamiq, nearest, stats given", "dynamiq", {"rounding": "nearest"}, True),
        ("lhc 10x", "lhc", {"ratio": 10}, False),
        ("thc", "thc", {}, False),
        ("omnireduce", "omnireduce", {}, False),
        ("sdp4bit", "sdp4bit", {}, False),
        ("tahquant", "tahquant", {"hidden": 4096}, False),
        ("taco none", "taco", {"transform": "none"}, False),
        ("dynamiq, fixed widths", "dynamiq", {"widths": "fixed"}, False),
        ("lhc 10x, stats given", "lhc", {"ratio": 10}, True),
        ("thc, stats given", "thc", {}, True),
        ("omnireduce, stats given", "omnireduce", {}, True),
        ("tahquant backward", "tahquant", {"hidden": 4096, "direction": "backward"}, False),
        ("sdp4bit int8", "sdp4bit", {"bits": 8, "group": 2048, "rotate": "none"}, False),
        ("taco int8", "taco", {"format": "int8"}, False),
        ("taco stochastic", "taco", {"rounding": "stochastic"}, False),
        *((f"lhc {ratio}x", "lhc", {"ratio": ratio}, False) for ratio in (2, 4)),
        ("thc, norm of the tensor", "thc", {"norm": "tensor"}, False),
        *((f"mx {e}", "mx", {"element": e}, False) for e in MX[1:]),
    ]
    found = [Lossy(n, c, tuple(p.items()), 256, given=g) for n, c, p, g in kinds]
    large = [dataclasses.replace(case, mib=1024) for case in (*found[:1], *found[2:6])]
    large.append(Lossy("lhc 10x", "lhc", (("ratio", 10),), 1024, "float32"))
    found[14:14] = large
    found += [Lossy(name, name, (), 1024) for name in ADDS_UP[1:]]
    return [*found, Lossy("mx e4m3", "mx", (), 256, "float32")]


class LossyWork:
    """Tensors, buffers and expected bytes of a case, as often as a cold pass needs them."""

    def __init__(self, case: Lossy, sets: int, nelem: int) -> None:
        self.case, self.codec = case, case.made
        kind = getattr(torch, case.dtype)
        rng = torch.Generator("cuda").manual_seed(bench.SEED)
        x = torch.randn(sets * nelem, device="cuda", generator=rng).mul_(0.02).to(kind)
        if case.share < 1:
            x *= torch.rand(x.numel(), device="cuda", generator=rng) < case.share
        self.x = x.reshape(sets, nelem)
        self.plan = self.codec.plan((nelem,), case.dtype, checksum=False)
        self.room = bench.byte_rows(sets, self.plan.nbytes)
        self.sums = bench.byte_rows(sets, self.plan.nbytes)
        self.scratch = bench.byte_rows(1, max(128, self.plan.scratch_nbytes))[0]
        self.y = torch.empty_like(self.x)
        self.acc = torch.empty(self.x.shape, dtype=torch.float32, device="cuda")
        self.every = range(sets)
        self.stats = [self.codec.measure(row) if case.given else None for row in self.x]
        self.sum_stats: list[Any] = [None] * sets
        self.found: list[Any] = [None] * sets
        self.buffers = [self.encode(i) for i in self.every]
        self._expect()

    def _expect(self) -> None:
        """What the CPU backend makes of the same tensors, on the device."""
        threads = os.cpu_count()
        dtype = BY_NAME[self.case.dtype]
        packed, values, sums = [], [], []
        self.measured: list[Any] = []
        # A sum keeps the widths of its source, as if encoded with the same stats.
        kept = self.case.codec == "dynamiq" and not self.case.given
        for row, local in zip(self.x, self.x.flip(0).flip(1), strict=True):
            host = on_host(row, dtype)
            measured = self.codec.measure(host)
            self.measured.append(measured)
            buffer = self.codec.encode(
                host, key=KEY, checksum=False, backend="cpu", threads=threads
            )
            packed.append(on_device(bytes_of(buffer)))
            decoded = tw.decode(buffer, threads=threads)
            values.append(on_device(decoded.view(np.uint8)))
            total = decoded.astype(np.float32) + on_host(local, dtype).astype(np.float32)
            total = total.astype(dtype.numpy)
            if self.case.codec in ADDS_UP:
                continue
            if self.case.given:
                found = torch.from_numpy(self.codec.measure(total)).cuda()
                self.sum_stats[len(sums)] = found
            again = self.codec.encode(
                total,
                stats=measured if kept else None,
                key=KEY,
                checksum=False,
                backend="cpu",
                threads=threads,
            )
            sums.append(on_device(bytes_of(again)))
        self.packed, self.values, self.totals = packed, values, sums
        self.local = self.x.flip(0).flip(1).contiguous()

    def encode(self, i: int) -> tw.Buffer:
        """Encode tensor `i` into its room."""
        return self.codec.encode(
            self.x[i],
            stats=self.stats[i],
            key=KEY,
            out=self.room[i],
            scratch=self.scratch,
            checksum=False,
        )

    def measure(self, i: int) -> None:
        """Statistics of tensor `i`."""
        self.found[i] = self.codec.measure(self.x[i])

    def decode(self, i: int) -> None:
        """Decode buffer `i` into its output."""
        tw.decode(self.buffers[i], out=self.y[i], scratch=self.scratch)

    def decode_add(self, i: int) -> None:
        """Add buffer `i` to its accumulator."""
        self.codec.decode_add(self.buffers[i], self.acc[i], scratch=self.scratch)

    def decode_add_encode(self, i: int) -> tw.Buffer:
        """Encode the sum of buffer `i` and a tensor into a room of its own."""
        return self.codec.decode_add_encode(
            self.buffers[i],
            self.local[i],
            stats=self.sum_stats[i],
            key=KEY,
            out=self.sums[i],
            scratch=self.scratch,
            checksum=False,
        )

    def copy(self, i: int) -> None:
        """What the others are measured against."""
        self.y[i].copy_(self.x[i])

    def each(self, call: Callable[[int], Any]) -> Callable[[], Any]:
        """`call` on every tensor in turn."""
        return lambda: [call(i) for i in self.every]

    def check(self, op: str, run: Callable[[], Any]) -> None:
        """Run one pass into poisoned memory, and compare with the CPU's bytes."""
        if op == "encode":
            bench.poison(self.room)
            run()
            self._same(self.room, self.packed, op)
        elif op == "decode":
            bench.poison(self.y)
            run()
            self._same(self.y.view(torch.uint8), self.values, op)
        elif op == "measure":
            run()
            for found, wanted in zip(self.found, self.measured, strict=True):
                same = found.cpu().numpy().tobytes() == wanted.tobytes()
                bench.require(same, "the statistics differ from the CPU's")
        elif op == "copy":
            bench.poison(self.y)
            run()
            bench.require(torch.equal(self.y, self.x), "the copy differs")
        elif op == "decode_add":
            start = self.x.float().flip(-1)
            self.acc.copy_(start)
            run()
            for i in self.every:
                decoded = self.values[i].view(self.x.dtype).float()
                bench.require(torch.equal(self.acc[i], start[i] + decoded), "the sum differs")
        else:
            bench.poison(self.sums)
            run()
            self._same(self.sums, self.totals, op)
        for buffer in self.buffers:
            buffer.check()

    def _same(self, found: torch.Tensor, expected: list[torch.Tensor], op: str) -> None:
        for row, wanted in zip(found, expected, strict=True):
            bench.require(torch.equal(row, wanted), f"{op}: bytes differ from the CPU's")

    def moved(self, op: str) -> int:
        """Bytes that an operation must move for one tensor."""
        raw, packed = self.x[0].nbytes, self.plan.nbytes
        chooses = ("widths", "fixed") not in self.case.params
        measures = {"nvfp4": True, "dynamiq": chooses} | dict.fromkeys(ADDS_UP, True)
        again = measures.get(self.case.codec, False) and not self.case.given
        twice = again and self.case.codec == "nvfp4"
        spec, taken = self.plan.codec, raw
        if isinstance(spec, Omnireduce):
            taken = spec.slots(self.plan.nelem) * spec.block * self.plan.dtype.itemsize
        return {
            "copy": 2 * raw,
            "measure": raw,
            "encode": taken + packed + again * raw,
            "decode": raw + packed,
            "decode_add": packed + 2 * self.acc[0].nbytes,
            "decode_add_encode": raw + 2 * packed + twice * (raw + packed),
        }[op]


def on_host(x: torch.Tensor, dtype: Any) -> np.ndarray[Any, Any]:
    """A tensor as a NumPy array of its element type."""
    return x.contiguous().view(torch.uint8).cpu().numpy().view(dtype.numpy)


def bytes_of(buffer: tw.Buffer) -> np.ndarray[Any, Any]:
    """A whole buffer as uint8."""
    return np.frombuffer(bytes(buffer), np.uint8)


def on_device(data: np.ndarray[Any, Any]) -> torch.Tensor:
    """Bytes on the device."""
    return torch.from_numpy(np.array(data)).cuda()


OPS = ("encode", "decode", "decode_add", "decode_add_encode")


def ops(case: Lossy) -> tuple[str, ...]:
    """What is measured of a case."""
    if case.codec in ADDS_UP:
        return (*OPS[:3], "measure")
    return (*OPS, "measure") if case.name == "dynamiq" else OPS


def compare(case: Lossy) -> str:
    """Check a small tensor in a process of its own, so that kernels compile side by side."""
    try:
        work = LossyWork(case, 1, MIB // BY_NAME[case.dtype].itemsize)
        for op in ops(case):
            work.check(op, work.each(getattr(work, op)))
    except Exception as error:
        return bench.told(error)
    return ""


def run_case(case: Lossy, problem: str) -> dict[str, Any]:
    """Check, time and check again; an operation that fails leaves its error in the record."""
    record: dict[str, Any] = {
        "name": case.name,
        "dtype": case.dtype,
        "mib": case.mib,
        "date": time.strftime("%Y-%m-%d"),
        "timings": [],
        "errors": [problem] if problem else [],
    }
    nelem = case.mib * MIB // BY_NAME[case.dtype].itemsize
    work = LossyWork(case, case.sets, nelem)
    record |= {"ratio": work.plan.nbytes / work.x[0].nbytes}
    if case.codec == "lhc":
        found = diagnose(case.made, work.measured[0], (nelem,), case.dtype)
        record |= {"rounds": found.rounds, "estimated": found.estimated}
    for op in ("copy", *ops(case)):
        try:
            call = work.each(getattr(work, op))
            work.check(op, call)
            run = bench.captured(call)
            work.check(op, run)
            us = bench.measure(run, case.sets)
            if op == "copy":  # a graph may copy in a slower way
                us = min(us, bench.measure(call, case.sets), key=lambda us: us["median"])
            work.check(op, run)
        except Exception as error:
            record["errors"].append(f"{op}: {bench.told(error)}")
            continue
        rate = work.moved(op) / us["median"] / 1e3
        record["timings"].append({"op": op, "us": us, "moved_GB/s": rate})
    copy = next((t["moved_GB/s"] for t in record["timings"] if t["op"] == "copy"), None)
    for t in record["timings"]:
        t["GB/s"] = work.x[0].nbytes / t["us"]["median"] / 1e3
        t["of_copy"] = t["moved_GB/s"] / copy if copy else None
    return record


def torchao_side_by_side() -> dict[str, Any]:
    """MXFP8 of such tensors by torchao, its cast compiled by torch."""
    try:
        from torchao.prototype.mx_formats.config import ScaleCalculationMode
        from torchao.prototype.mx_formats.mx_tensor import to_mx
    except Exception as error:
        return {"missing": f"{type(error).__name__}: {error}"[:400]}
    rows = []
    for mib in (256, 1024):
        case = Lossy("torchao", "mx", (), mib)
        rng = torch.Generator("cuda").manual_seed(bench.SEED)
        x = torch.randn(mib * MIB // 2, device="cuda", generator=rng).mul_(0.02).bfloat16()
        x = x.reshape(-1, 4096)
        cast = torch.compile(
            functools.partial(
                to_mx,
                elem_dtype=torch.float8_e4m3fn,
                block_size=32,
                scaling_mode=ScaleCalculationMode.FLOOR,
            )
        )
        row: dict[str, Any] = {"name": "torchao to_mx e4m3, torch.compile", "mib": mib}
        try:
            scales, codes = cast(x)
            ours = tw.codec("mx").encode(x, checksum=False)
            same = torch.equal(codes.view(torch.uint8).reshape(-1), ours.static(0)[: x.numel()])
            us = bench.measure(lambda cast=cast, x=x: cast(x), 1)
            moved = x.nbytes + codes.nbytes + scales.nbytes
            row |= {"us": us, "same_codes": same, "moved_GB/s": moved / us["median"] / 1e3}
            row["GB/s"] = x.nbytes / us["median"] / 1e3
        except Exception as error:
            row["error"] = bench.told(error)
        rows.append(row | {"sets": case.sets})
    return {"rows": rows}


def run(
    budget: float, chosen: Sequence[str], before: Any, keep: Callable[[dict[str, Any]], None]
) -> bool:
    """Measure every case for which the `budget`, in seconds, is enough; whether one failed.

    `keep` is given what there is after each of them. With `chosen` those alone whose name has one
    of these in it; the others stay as they were `before`. Raises RuntimeError if that was another
    machine, or with other versions.
    """
    begin = time.perf_counter()
    found = {"machine": bench.machine(), "versions": bench.versions()}
    if chosen and any(before[name] != fact for name, fact in found.items()):
        raise RuntimeError(f"what is recorded is of another machine or versions than {found}")
    todo = [case for case in cases() if not chosen or any(text in case.name for text in chosen)]
    kinds = {(c.codec, c.params, c.dtype, c.given): c for c in todo}
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(WORKERS, mp_context=spawn) as pool:
        problems = dict(zip(kinds, pool.map(compare, kinds.values()), strict=True))
    gc.collect()
    gc.freeze()  # every capture collects: let it look at what is new only
    records: list[dict[str, Any]] = []
    left_out: list[str] = []
    torchao = before["torchao"] if chosen else {"missing": "not run"}

    def result() -> dict[str, Any]:
        shown, missing = records, left_out
        if chosen:
            made = {(r["name"], r["dtype"], r["mib"]): r for r in [*before["cases"], *records]}
            order = [(case.name, case.dtype, case.mib) for case in cases()]
            shown = [made[key] for key in order if key in made]
            missing = [f"{n}, {d}, {m} MiB" for n, d, m in order if (n, d, m) not in made]
        return {
            "date": time.strftime("%Y-%m-%d"),
            **found,
            "cases": shown,
            "left_out": missing,
            "torchao": torchao,
            "seconds": round(time.perf_counter() - begin, 1),
        }

    for case in todo:
        if time.perf_counter() - begin > budget:
            left_out.append(f"{case.name}, {case.dtype}, {case.mib} MiB")
            continue
        problem = problems[case.codec, case.params, case.dtype, case.given]
        try:
            records.append(run_case(case, problem))
        except Exception as error:
            failed = {"name": case.name, "dtype": case.dtype, "mib": case.mib, "timings": []}
            records.append(failed | {"errors": [bench.told(error)]})
        torch.cuda.empty_cache()
        keep(result())
    if not chosen:
        torchao = torchao_side_by_side()
    keep(result())
    return any(record["errors"] for record in records)
