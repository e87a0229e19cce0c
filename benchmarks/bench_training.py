"""Training steps natively and with every hook: FSDP2, DDP, tensor and expert parallelism.

    torchrun --standalone --nproc-per-node 2 --max-restarts 9 benchmarks/bench_training.py
    python benchmarks/report.py

and with NCCL_P2P_DISABLE=1 for 25 GB/s. --suite and --only choose cases, --seconds ends in time: a
case that does not fit is left out. A case that fails has its error in the record, and the others
are measured; if it does not end, or takes its process along, torchrun starts again behind it. Rows
are appended to results/training.jsonl as they are measured. What the file has for this network and
number of ranks is not measured again without --again: a run that was cut off goes on where it was.

The model is a GPT of 870 million parameters, trained by AdamW on 2 x 2048 tokens a rank; options
give other sizes. Its layers are so small that on most hosts FSDP2 takes longer to queue a step than
the GPU to compute it. Of training_wide.jsonl are layers of 4096, as of models of 7 billion. Every
case is held against the native one in the same run: steps of the native model before and after its
own. A time is that of the slowest rank, from a barrier until the device has finished; the host's is
the time until all of the step is queued. Steps in a row are queued without waiting for the device
between them. The first steps, in which kernels are compiled, sizes are learnt and calls recorded,
are apart.

Exposed communication is a step's time less that of the same model whose collectives send nothing:
each rank copies its own data to where the others' belong. That keeps all else: the kernels of the
model and of the optimizer, and the copies round the collectives.

The suite "loss" trains replicas anew, step after step without waiting, and writes down how the loss
falls: at the end all ranks must have the same bits. Its native case sums gradients in bfloat16.

Bits of parameters are compared with the native run's after the first steps, in which PyTorch is
asked for deterministic kernels. The native run is made twice, to see whether it repeats its own.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import gc
import math
import os
import statistics
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

# For cuBLAS to repeat its bits; read when CUDA starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
# For calls over NCCL to be recorded; read when it captures.
os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")

import torch
import torch.distributed as dist
from recording import Job, Limits, Ranks, Record, facts, measure_all
from training_models import (
    Make,
    Setting,
    Sizes,
    Trainer,
    alone,
    divided,
    experts,
    keep_gradients,
    keep_parameters,
    mixed,
    natively,
    own_experts,
    replicated,
    sharded,
)

from tightwire.adapters.training import ddp, fsdp, tagc
from tightwire.adapters.training import tensor_parallel as tp

RESULTS = Path(__file__).parent / "results"
#: Steps after which bits are compared, and steps that are not timed after those.
CHECKED, WARM = 3, 64
#: Calls of CUDA in which a host waits, and with which it queues work.
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize", "cudaEventQuery")
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx")


class Case(NamedTuple):
    """A way to train.

    Attributes:
        group: Cases that are held against one native case.
        name: Its name in the group.
        call: What the user writes.
        make: Makes the model.
        lossless: Whether two ranks get the bits of the native run.
        peers: Whether the GPUs read one another's memory.
    """

    group: str
    name: str
    call: str
    make: Make
    lossless: bool = False
    peers: bool = False

    @property
    def key(self) -> str:
        """Its key in the record."""
        return f"{self.group}, {self.name}"


class Group(NamedTuple):
    """What cases are held against: the native model, and one that sends nothing."""

    suite: str
    text: str
    native: Make
    silent: Make


BF16, F32 = torch.bfloat16, torch.float32
GROUPS = {
    "fsdp": Group(
        "fsdp",
        "FSDP2, gradients reduced in bfloat16",
        sharded(BF16),
        sharded(BF16, keep_parameters),
    ),
    "fsdp float32": Group(
        "fsdp", "FSDP2, gradients reduced in float32", sharded(F32), sharded(F32, keep_parameters)
    ),
    "ddp": Group(
        "ddp", "DistributedDataParallel in bfloat16", replicated(), replicated(keep_gradients)
    ),
    "fsdp compiled": Group(
        "compiled",
        "FSDP2, blocks compiled, gradients reduced in bfloat16",
        sharded(BF16, compiled=True),
        sharded(BF16, keep_parameters, compiled=True),
    ),
    "fsdp float32 compiled": Group(
        "compiled",
        "FSDP2, blocks compiled, gradients reduced in float32",
        sharded(F32, compiled=True),
        sharded(F32, keep_parameters, compiled=True),
    ),
    "ddp compiled": Group(
        "compiled",
        "DistributedDataParallel in bfloat16, blocks compiled",
        replicated(compiled=True),
        replicated(keep_gradients, compiled=True),
    ),
    "tp": Group(
        "tp", "tensor parallelism, bfloat16 activations", divided(natively), divided(alone)
    ),
    "moe": Group(
        "moe",
        "experts on ranks, all else replicated, in bfloat16",
        mixed(experts(None)),
        mixed(own_experts, keep_gradients),
    ),
}
NATIVE = "native"
#: The suite of whole runs, whose cases stand for themselves, and steps of a point of its curves.
LOSS, POINT = "loss", 5


def _text(options: dict[str, Any]) -> str:
    return "".join(f", {name}={value!r}" for name, value in options.items())


def _fsdp(
    name: str,
    reduce: torch.dtype = BF16,
    *,
    lossless: bool = True,
    compiled: bool = False,
    **options: Any,
) -> Case:
    return Case(
        "fsdp" + " float32" * (reduce == F32) + " compiled" * compiled,
        name,
        f"fsdp.compress(model{_text(options)})",
        sharded(reduce, functools.partial(fsdp.compress, **options), compiled=compiled),
        lossless,
        options.get("route") == "peers",
    )


def _ddp(name: str, *, lossless: bool = False, compiled: bool = False, **options: Any) -> Case:
    return Case(
        "ddp" + " compiled" * compiled,
        name,
        f"ddp.register(model{_text(options)})",
        replicated(lambda model: ddp.register(model, **options), compiled=compiled),
        lossless,
        options.get("route") == "peers",
    )


def _tp(name: str, codec: str | None, *, lossless: bool = False, **options: Any) -> Case:
    def connect(device: torch.device) -> Any:
        return tp.connect(codec, codec, device=device, **options)

    call = f"tp.connect({codec!r}, {codec!r}{_text(options)})"
    return Case("tp", name, call, divided(connect), lossless, options.get("route") == "peers")


def _moe(name: str, *, lossless: bool = False) -> Case:
    call = f"moe.connect(experts, {name!r}, {name!r})"
    return Case("moe", name, call, mixed(experts(name)), lossless)


def _tagc(ratio: int) -> Case:
    def compress(model: Any) -> Any:
        hooks = tagc.compress(model, tagc.Tagc(ratio=ratio))
        return hooks.all_gather, hooks.reduce_scatter

    call = f"tagc.compress(model, Tagc(ratio={ratio}))"
    return Case("fsdp", f"tagc, {ratio} x", call, sharded(BF16, compress))


_DYNAMIQ = "dynamiq, ring", "dynamiq, network"
_CASES = (
    *(Case(name, NATIVE, "", group.native) for name, group in GROUPS.items()),
    _fsdp("zipccl, network", route="network"),
    _fsdp("zipccl, peers", route="peers"),
    _fsdp("zipccl, prepared, auto", route="auto"),
    _fsdp("zipccl, exact"),
    _fsdp("zipccl, auto", algorithm="auto"),
    _fsdp("mx gradients, network", route="network", gradients="mx", lossless=False),
    _fsdp("mx gradients, peers", route="peers", gradients="mx", lossless=False),
    _fsdp("mx gradients, exact", gradients="mx", lossless=False),
    _fsdp("mx, network", route="network", codec="mx", lossless=False),
    _fsdp("dynamiq gradients, ring", gradients="dynamiq", topology="ring", lossless=False),
    _fsdp("weight differences", weight_differences=True, lossless=False),
    _tagc(10),
    _fsdp("zipccl, network, bfloat16 travels", F32, route="network", wire="bfloat16"),
    _fsdp("zipccl, peers, bfloat16 travels", F32, route="peers", wire="bfloat16"),
    _fsdp("zipccl, network", F32, route="network"),
    _fsdp("zipccl, prepared, auto", F32, route="auto", wire="bfloat16"),
    _fsdp("zipccl, exact", F32),
    _fsdp("zipccl, auto", F32, algorithm="auto"),
    _ddp("zipccl, network", route="network", lossless=True),
    _ddp("zipccl, peers", route="peers", lossless=True),
    _ddp("zipccl, prepared, auto", route="auto", lossless=True),
    _ddp("zipccl, exact", lossless=True),
    _ddp("zipccl, auto", algorithm="auto", lossless=True),
    _ddp("mx, network", route="network", codec="mx"),
    _ddp("mx, peers", route="peers", codec="mx"),
    _ddp("mx, exact", codec="mx"),
    _ddp(_DYNAMIQ[0], codec="dynamiq", topology="ring"),
    _ddp(_DYNAMIQ[1], route="network", codec="dynamiq"),
    _ddp("taco, exact", codec="taco"),
    _fsdp("zipccl, network", compiled=True, route="network"),
    _fsdp("zipccl, peers", compiled=True, route="peers"),
    _fsdp("zipccl, prepared, auto", compiled=True, route="auto"),
    _fsdp("mx gradients, network", compiled=True, route="network", gradients="mx", lossless=False),
    _fsdp("mx gradients, peers", compiled=True, route="peers", gradients="mx", lossless=False),
    _fsdp(
        "zipccl, network, bfloat16 travels", F32, compiled=True, route="network", wire="bfloat16"
    ),
    _fsdp("zipccl, peers, bfloat16 travels", F32, compiled=True, route="peers", wire="bfloat16"),
    _ddp("zipccl, network", compiled=True, route="network", lossless=True),
    _ddp("zipccl, peers", compiled=True, route="peers", lossless=True),
    _ddp("zipccl, prepared, auto", compiled=True, route="auto", lossless=True),
    _ddp("mx, network", compiled=True, route="network", codec="mx"),
    _ddp(_DYNAMIQ[1], compiled=True, route="network", codec="dynamiq"),
    _tp("no codec", None, lossless=True),
    _tp("zipccl", "zipccl", lossless=True),
    _tp("taco", "taco"),
    _tp("taco, network", "taco", route="network"),
    _tp("taco, peers", "taco", route="peers"),
    _tp("mx", "mx"),
    _tp("mx, network", "mx", route="network"),
    _tp("mx, peers", "mx", route="peers"),
    _tp("mx, prepared, auto", "mx", route="auto"),
    _moe("zipccl", lossless=True),
    _moe("mx"),
    _moe("taco"),
)
#: By groups: the native model of one is in memory at a time.
CASES = [case for group in GROUPS for case in _CASES if case.group == group]
#: Whole runs.
RUNS = [
    case._replace(group=LOSS)
    for case in _CASES
    if case.group == "ddp" and case.name in (NATIVE, "mx, network", *_DYNAMIQ)
]


class Block(NamedTuple):
    """Steps one after the other: seconds of the slowest rank, and the last loss."""

    seconds: list[float]
    host: list[float]
    loss: float


class Native:
    """The native model of a group, which takes steps before and after those of a case.

    Attributes:
        row: Its results.
        digests: Of all ranks' parameters after the first steps.
        repeats: Whether a second run has the same.
        silent: Median seconds of a step that sends nothing.
    """

    def __init__(self, bench: Bench, group: str) -> None:
        before = bench.memory()
        first = Trainer(GROUPS[group].native, bench.setting)
        digests = bench.checked(first, group)
        first.close()
        del first
        silent = Trainer(GROUPS[group].silent, bench.setting)
        bench.warm(silent)
        self.silent = statistics.median(bench.block(silent).seconds)
        silent.close()
        del silent
        bench.forget()
        self.trainer = Trainer(GROUPS[group].native, bench.setting)
        start = time.perf_counter()
        self.digests = bench.checked(self.trainer, group)
        bench.warm(self.trainer)
        seconds = time.perf_counter() - start
        self.repeats = self.digests == digests
        block, peak = bench.peak_of(self.trainer)
        self.loss = block.loss
        self.row = bench.results(self.trainer, block, seconds)
        self.row |= bench.most_memory(peak, before)
        self.row |= _exposed(self.row, self.silent) | {"repeats": self.repeats}


class Bench:
    """The cases of a run, on one rank.

    Args:
        setting: Of all models.
        ranks: The processes.
        steps: Steps that are timed.
        warm_steps: Steps before those.
    """

    def __init__(self, setting: Setting, ranks: Ranks, steps: int, warm_steps: int) -> None:
        self.setting, self.ranks, self.steps = setting, ranks, steps
        self.warm_steps = warm_steps

    def memory(self) -> int:
        """Bytes that are allocated on the GPU, when what is not used has been freed."""
        self.forget()
        return torch.cuda.memory_allocated() if self.setting.device.type == "cuda" else 0

    def peak_of(self, trainer: Trainer) -> tuple[Block, int]:
        """Steps that are timed, and the most bytes that were allocated on the GPU meanwhile."""
        on_gpu = self.setting.device.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        block = self.block(trainer)
        return block, torch.cuda.max_memory_allocated() if on_gpu else 0

    def most_memory(self, peak: int, before: int) -> dict[str, int | None]:
        """Bytes of a model on the rank with the most, of which `before` are not its own."""
        most = max(self.ranks.gather(peak - before))
        return {"memory_bytes": most if self.setting.device.type == "cuda" else None}

    def forget(self) -> None:
        """Free what nobody has any more."""
        gc.unfreeze()
        gc.collect()
        if self.setting.device.type == "cuda":
            torch.cuda.empty_cache()

    def checked(self, trainer: Trainer, group: str) -> list[str]:
        """The first steps, by deterministic kernels where there are any: all ranks' digests."""
        # Of attention only the stricter mode has one. Experts have operations without.
        torch.set_deterministic_debug_mode("warn" if group == "moe" else "error")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for _ in range(CHECKED):
                    trainer.step(trainer.batch())
        finally:
            torch.set_deterministic_debug_mode("default")
        return self.ranks.gather(trainer.digest())

    def warm(self, trainer: Trainer) -> None:
        """Steps that are not timed."""
        for _ in range(self.warm_steps):
            trainer.step(trainer.batch())
        self.ranks.synchronize()
        # Else what compilers have left is looked through now and then, in the middle of a step.
        gc.collect()
        gc.freeze()

    def block(self, trainer: Trainer, steps: int = 0) -> Block:
        """Steps that are timed, behind one that is not."""
        trainer.step(trainer.batch())
        seconds, host = [], []
        for _ in range(steps or self.steps):
            tokens = trainer.batch()
            self.ranks.meet()
            start = time.perf_counter()
            loss = trainer.step(tokens)
            host.append(time.perf_counter() - start)
            self.ranks.synchronize()
            seconds.append(time.perf_counter() - start)
        mean = sum(self.ranks.gather(loss.item())) / self.ranks.world
        return Block(self.ranks.slowest(seconds), self.ranks.slowest(host), mean)

    def in_a_row(self, trainer: Trainer) -> float:
        """Seconds of a step of several that the host queues without waiting."""
        trainer.step(trainer.batch())
        self.ranks.meet()
        start = time.perf_counter()
        for _ in range(self.steps):
            trainer.step(trainer.batch())
        self.ranks.synchronize()
        return self.ranks.slowest([time.perf_counter() - start])[0] / self.steps

    def waits(self, trainer: Trainer) -> dict[str, Any] | None:
        """Calls of CUDA in a step on rank 0; None without a GPU."""
        profile, problem = None, ""
        if self.setting.device.type == "cuda" and self.ranks.rank == 0:
            kinds = torch.profiler.ProfilerActivity
            profile = torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA])
            try:
                profile.start()
            except RuntimeError as error:
                # Other ranks wait for the step.
                problem = str(error)
        tokens = trainer.batch()
        self.ranks.synchronize()
        trainer.step(tokens)
        if profile is None:
            return None
        if problem:
            return {"error": problem}
        profile.stop()
        calls = {e.key: (e.count, e.self_cpu_time_total) for e in profile.key_averages()}
        found: dict[str, Any] = {name: calls[name][0] for name in WAITS if name in calls}
        found["launches"] = sum(calls[name][0] for name in LAUNCHES if name in calls)
        found["waiting_ms"] = sum(calls[name][1] for name in WAITS if name in calls) / 1e3
        return found

    def results(self, trainer: Trainer, block: Block, first: float) -> dict[str, Any]:
        """What is said of every model; its `first` steps took so many seconds."""
        row: dict[str, Any] = {
            "step_ms": _summary(block.seconds),
            "host_ms": _summary(block.host),
            "first_s": first,
            "loss": block.loss,
            "loss_steps": trainer.steps,
            "parameters": sum(p.numel() for p in trainer.model.module.parameters()),
            "setting": self.setting.sizes._asdict(),
        }
        row["in_a_row_ms"] = 1e3 * self.in_a_row(trainer)
        row["waits"] = self.ranks.first(self.waits(trainer))
        return row

    def measure(self, case: Case, native: Native) -> dict[str, Any]:
        """The results of a case, between steps of the native model."""
        before = self.memory()
        trainer = Trainer(case.make, self.setting)
        try:
            start = time.perf_counter()
            same = self.checked(trainer, case.group) == native.digests
            self.warm(trainer)
            first = time.perf_counter() - start
            sides = [self.block(native.trainer, max(2, self.steps // 2))]
            before_block = trainer.model.sent()
            block, peak = self.peak_of(trainer)
            # One of its steps is not timed.
            sent = _bytes(before_block, trainer.model.sent(), self.steps + 1)
            sides.append(self.block(native.trainer, max(2, self.steps // 2)))
            row = self.results(trainer, block, first) | self.most_memory(peak, before)
        finally:
            trainer.close()
        both = [1e3 * s for side in sides for s in side.seconds]
        row |= {
            "native_ms": statistics.median(both),
            "native_sides_ms": [1e3 * statistics.median(side.seconds) for side in sides],
            "native_loss": native.loss,
            "same_bits": same,
            "native_repeats": native.repeats,
            "lossless": case.lossless,
            "call": case.call,
        }
        row["ratio"] = row["step_ms"]["median"] / row["native_ms"]
        return row | sent | _exposed(row, native.silent)

    def run(self, case: Case, steps: int) -> dict[str, Any]:
        """How the loss falls from the first step on, and the seconds of all steps."""
        # One model is for compiling.
        first = Trainer(case.make, self.setting)
        self.warm(first)
        first.close()
        del first
        self.forget()
        trainer = Trainer(case.make, self.setting)
        try:
            self.ranks.meet()
            start = time.perf_counter()
            losses = [trainer.step(trainer.batch()) for _ in range(steps)]
            self.ranks.synchronize()
            seconds = self.ranks.slowest([time.perf_counter() - start])[0]
            if len(set(self.ranks.gather(trainer.digest()))) > 1:
                raise RuntimeError("the ranks' parameters have come apart")
            points = self.ranks.gather(torch.stack(losses).view(-1, POINT).mean(1).tolist())
            means = [statistics.fmean(some) for some in zip(*points, strict=True)]
            if not all(math.isfinite(loss) for loss in means):
                raise RuntimeError(f"losses are {means}; needed: finite ones")
            sent = _bytes((0, 0), trainer.model.sent(), steps)
        finally:
            trainer.close()
        curve = [(POINT * (number + 1), loss) for number, loss in enumerate(means)]
        about = {"call": case.call, "setting": self.setting.sizes._asdict()}
        return {"curve": curve, "seconds": seconds, "steps": steps} | sent | about


def _summary(seconds: Sequence[float]) -> dict[str, float]:
    """Milliseconds."""
    return {
        "median": 1e3 * statistics.median(seconds),
        "least": 1e3 * min(seconds),
        "steps": len(seconds),
    }


def _exposed(row: dict[str, Any], silent: float) -> dict[str, float]:
    return {"silent_ms": 1e3 * silent, "exposed_ms": row["step_ms"]["median"] - 1e3 * silent}


def _bytes(
    before: tuple[int, int] | None, after: tuple[int, int] | None, steps: int
) -> dict[str, float | None]:
    """Bytes that this rank sent in a step."""
    if before is None or after is None:
        return {"raw_bytes": None, "wire_bytes": None}
    raw, wire = ((b - a) / steps for a, b in zip(before, after, strict=True))
    return {"raw_bytes": raw, "wire_bytes": wire}


def no_peers(device: torch.device) -> str:
    """Why GPUs do not read one another's memory in this run; ``""`` if they can."""
    if device.type != "cuda":
        return "peer memory needs GPUs"
    if os.environ.get("NCCL_P2P_DISABLE", "0") == "1":
        return "P2P is off"
    from tightwire.adapters.transports.symmetric import why_not

    return why_not(dist.group.WORLD, device)


class Natives:
    """The native models of the groups, of which one is in memory at a time.

    Args:
        bench: What measures them.
    """

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._group = ""
        self._native: Native | None = None
        self._problem = ""

    def of(self, group: str) -> Native:
        """That of a group; a failure is told again, not tried again."""
        if group != self._group:
            self.forget()
            self._group = group
            make = functools.partial(Native, self._bench, group)
            self._native, self._problem = self._bench.ranks.attempt(make)
        if self._native is None:
            raise RuntimeError(f"the native model: {self._problem}")
        return self._native

    def forget(self) -> None:
        """Free the native model that there is."""
        self._native, self._group = None, ""
        self._bench.forget()


def jobs(bench: Bench, cases: Sequence[Case], loss_steps: int) -> dict[str, Job]:
    """What measures the cases."""
    natives = Natives(bench)
    reason = no_peers(bench.setting.device)

    def measure(case: Case) -> dict[str, Any]:
        if case.group == LOSS:
            natives.forget()
            return bench.run(case, loss_steps)
        native = natives.of(case.group)
        return native.row if case.name == NATIVE else bench.measure(case, native)

    return {
        case.key: Job(functools.partial(measure, case), reason if case.peers else "")
        for case in cases
    }


def line(row: dict[str, Any]) -> str:
    """What is printed of a case."""
    if "curve" in row:
        return f"{row['seconds']:.1f} s, loss {row['curve'][-1][1]:.4f}"
    ratio = f", {row['ratio']:.3f} of native" if "ratio" in row else ""
    return f"{row['step_ms']['median']:.1f} ms{ratio}, host {row['host_ms']['median']:.1f} ms"


def chosen(suites: Sequence[str], only: Sequence[str]) -> list[Case]:
    """The cases of suites whose keys contain all words, joined by commas, of one of `only`."""

    def fits(case: Case) -> bool:
        words = (set(word.split(",")) for word in only)
        parts = {part.strip() for part in case.key.split(",")} | {case.group}
        return not only or any(w <= parts for w in words)

    suite = {name: group.suite for name, group in GROUPS.items()} | {LOSS: LOSS}
    return [c for c in (*CASES, *RUNS) if suite[c.group] in suites and fits(c)]


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """What the command line says."""
    suites = sorted({group.suite for group in GROUPS.values()} | {LOSS})
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS / "training.jsonl")
    parser.add_argument("--suite", nargs="+", choices=suites, default=suites)
    parser.add_argument(
        "--only", nargs="+", default=[], help="words of names: zipccl,network native mx,exact"
    )
    parser.add_argument("--list", action="store_true", help="print the cases, and end")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warm", type=int, default=WARM, help="steps before those")
    parser.add_argument("--loss-steps", type=int, default=100, help=f"multiple of {POINT}")
    parser.add_argument("--seconds", type=float, default=1e9, help="of all cases; others are left")
    parser.add_argument("--limit", type=float, default=180.0, help="seconds of a case")
    parser.add_argument("--again", action="store_true", help="measure what the file has, too")
    parser.add_argument("--device", choices=("cuda", "cpu"), default=None)
    parser.add_argument("--rate", type=float, default=3e-4, help="learning rate")
    for name, value in Sizes()._asdict().items():
        parser.add_argument(f"--{name}", type=int, default=value)
    found = parser.parse_args(words)
    if found.loss_steps < POINT or found.loss_steps % POINT:
        parser.error(f"--loss-steps is {found.loss_steps}; allowed: multiples of {POINT}")
    return found


def main(words: Sequence[str] | None = None) -> None:
    """Measure, in a process of torchrun's."""
    options = arguments(words)
    cases = chosen(options.suite, options.only)
    if options.list:
        print(*(f"{case.key}: {case.call}" for case in cases), sep="\n")
        return
    kind = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    index = int(os.environ["LOCAL_RANK"])
    device = torch.device(kind, index if kind == "cuda" else None)
    if kind == "cuda":
        torch.cuda.set_device(device)
        # cuDNN's attention does not repeat its bits.
        torch.backends.cuda.enable_cudnn_sdp(False)
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo",
        timeout=datetime.timedelta(seconds=options.limit),
        device_id=device if kind == "cuda" else None,
    )
    sizes = Sizes(*(getattr(options, name) for name in Sizes._fields))
    ranks = Ranks.processes(device, options.limit)
    bench = Bench(Setting(sizes, device, options.rate), ranks, options.steps, options.warm)
    record = Record(options.out, facts(device, ranks.world), ranks.rank == 0)
    limits = Limits(options.seconds, options.limit, options.again)
    groups = {name: group.text for name, group in GROUPS.items()}
    about = {"groups": groups, "cases": [[c.group, c.name, c.call] for c in CASES]}
    measure_all(ranks, record, jobs(bench, cases, options.loss_steps), limits, line, about)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
