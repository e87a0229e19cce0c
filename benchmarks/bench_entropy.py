"""huffman and delta on one GPU, beside the device's own copy and nvCOMP of the same run.

    python benchmarks/bench_entropy.py --out benchmarks/results
    python benchmarks/report.py

Measured as in bench_gpu.py: replays of graphs on tensors that are not in the cache, checked before
and after. A delta is that of a step which changes a share of N(0, 0.02) in bfloat16, of a product
by 2, or of a share of the signs. To apply it in place there are two, there and back, in one graph.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import bench_gpu
import torch
from bench_gpu import (
    MIB,
    NARROW,
    Case,
    as_words,
    byte_rows,
    captured,
    measure,
    poison,
    require,
    told,
)

import tightwire as tw

HARD = ("random", "equal", "half_escaped", "rows")
SHARES = (0.001, 0.01, 0.1, 0.5)
SIGNS = (0.04, 0.5)
DELTA_MIB, DELTA_SETS = 256, 2
COMPARED_NELEM = 1 << 20


CASES = [
    *(Case("bfloat16", "gaussian", mib, "huffman") for mib in (256, 1024, 64, 16, 2)),
    *(Case(dtype, "gaussian", 256, "huffman") for dtype in ("float16", "float32", *NARROW)),
    *(Case("bfloat16", data, 256, "huffman") for data in HARD),
]


def compare(x: torch.Tensor, codec: tw.Codec, **base: torch.Tensor) -> None:
    """Raise unless both backends encode the start of `x` into the same bytes."""
    part = x.reshape(-1)[:COMPARED_NELEM]
    here = {name: value.reshape(-1)[:COMPARED_NELEM] for name, value in base.items()}
    there = {name: value.cpu() for name, value in here.items()}
    for checksum in (False, True):
        on_gpu = codec.encode(part, checksum=checksum, **here)
        on_cpu = codec.encode(part.cpu(), checksum=checksum, backend="cpu", **there)
        require(bytes(on_gpu) == bytes(on_cpu), "bytes differ from the CPU's")


def step(share: float, sets: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tensors before and after a step that changes a share of elements, shape (sets, nelem)."""
    shape = sets, DELTA_MIB * MIB // 2
    rng = torch.Generator("cuda").manual_seed(bench_gpu.SEED)
    masters = torch.randn(shape, device="cuda", generator=rng).mul_(0.02)
    moves = torch.randn(shape, device="cuda", generator=rng)
    base = masters.to(torch.bfloat16)
    low, high = 0.0, 0.1
    for _ in range(20):
        rate = (low + high) / 2
        differs = (masters[0] + rate * moves[0]).to(torch.bfloat16) != base[0]
        low, high = (rate, high) if differs.float().mean() < share else (low, rate)
    return base, (masters + high * moves).to(torch.bfloat16)


def product(sets: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tensors before and after a product by 2, shape (sets, nelem)."""
    base = step(0, sets)[0]
    return base, base * 2


def signs(share: float, sets: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tensors before and after a share of the signs has changed, shape (sets, nelem)."""
    base = step(0, sets)[0]
    rng = torch.Generator("cuda").manual_seed(bench_gpu.SEED + 1)
    return base, torch.where(
        torch.rand(base.shape, device="cuda", generator=rng) < share, -base, base
    )


def run_delta(
    tensors: Callable[[int], tuple[torch.Tensor, torch.Tensor]], checksum: bool
) -> dict[str, Any]:
    """Check and time deltas of some tensors before and after."""
    base, x = tensors(DELTA_SETS)
    codec = tw.codec("delta")
    compare(x, codec, base=base)
    plan = codec.plan((x.shape[1],), "bfloat16", checksum=checksum)
    room, back = (byte_rows(len(x), plan.nbytes) for _ in range(2))
    scratch = byte_rows(1, plan.scratch_nbytes)[0]
    y, live = torch.empty_like(x), base.clone()
    every = range(len(x))

    def encode_into(target: torch.Tensor, new: torch.Tensor, old: torch.Tensor) -> list[tw.Buffer]:
        return [
            codec.encode(new[i], base=old[i], out=target[i], scratch=scratch, checksum=checksum)
            for i in every
        ]

    buffers, backward = encode_into(room, x, base), encode_into(back, base, x)

    def apply() -> None:
        for i in every:
            tw.decode(buffers[i], base=base[i], out=y[i], scratch=scratch)

    def in_place() -> None:
        for way in (buffers, backward):
            for i in every:
                tw.decode(way[i], base=live[i], out=live[i], scratch=scratch)

    def there_only() -> None:
        for i in every:
            tw.decode(buffers[i], base=live[i], out=live[i], scratch=scratch)

    def check(encode: Callable[[], Any], decode: Callable[[], Any]) -> None:
        poison(room, scratch)
        encode()
        poison(y, scratch)
        decode()
        for buffer in buffers:
            buffer.check()
        require(torch.equal(as_words(x), as_words(y)), "the tensor does not come back")

    check(lambda: encode_into(room, x, base), apply)
    there_only()
    require(torch.equal(as_words(x), as_words(live)), "applied in place, it is another tensor")
    live.copy_(base)
    runs = {
        "encode": captured(lambda: encode_into(room, x, base)),
        "apply": captured(apply),
        "in place": captured(in_place),
        "copy": captured(lambda: y.copy_(x)),
    }
    check(runs["encode"], runs["apply"])
    us = {op: measure(run, len(x) * (2 if op == "in place" else 1)) for op, run in runs.items()}
    us["copy"] = min(us["copy"], measure(lambda: y.copy_(x), len(x)), key=lambda u: u["median"])
    check(runs["encode"], runs["apply"])
    live.copy_(base)
    runs["in place"]()
    require(torch.equal(as_words(base), as_words(live)), "there and back, it is another tensor")
    raw = x[0].nbytes
    packed = statistics.fmean(buffer.nbytes for buffer in buffers)
    copied = 2 * raw / us["copy"]["median"]
    return {
        "changed": (as_shorts(x) != as_shorts(base)).float().mean().item(),
        "mib": DELTA_MIB,
        "checksum": checksum,
        "ratio": packed / raw,
        "scratch_share": plan.scratch_nbytes / raw,
        "us": us,
        "GB/s": {op: raw / t["median"] / 1e3 for op, t in us.items()},
        # Both tensors are read, or one is read and one written, and the buffer.
        "of_copy": {op: (2 * raw + packed) / t["median"] / copied for op, t in us.items()},
    }


def as_shorts(x: torch.Tensor) -> torch.Tensor:
    """Bits of elements of 2 bytes."""
    return x.view(torch.int16)


def run_huffman(case: Case) -> dict[str, Any]:
    """Check and time a case of huffman."""
    x = bench_gpu.make(case, 1)
    compare(x, case.codec)
    del x
    found: dict[str, Any] = bench_gpu.run_case(case, None)
    return found


def attempt(call: Callable[..., dict[str, Any]], *given: Any) -> dict[str, Any]:
    """What the call finds, or why it failed."""
    try:
        return call(*given)
    except Exception as error:
        return {"error": told(error)}


def huffmans() -> Iterator[tuple[str, dict[str, Any]]]:
    """Results of huffman, one by one, and of nvCOMP."""
    for case in CASES:
        found = attempt(run_huffman, case)
        yield "cases", dataclasses.asdict(case) | {"timings": []} | found
    yield "nvcomp", bench_gpu.beside_nvcomp()


def deltas() -> Iterator[tuple[str, dict[str, Any]]]:
    """Results of delta, one by one."""
    cases: dict[str, Callable[[int], tuple[torch.Tensor, torch.Tensor]]] = {
        **{f"a step, {share:.1%}": functools.partial(step, share) for share in SHARES},
        "product by 2": product,
        **{f"{share:.0%} of the signs": functools.partial(signs, share) for share in SIGNS},
    }
    for name, tensors in cases.items():
        for checksum in (False, True) if name == "a step, 1.0%" else (False,):
            found = attempt(run_delta, tensors, checksum)
            yield "deltas", {"change": name, "checksum": checksum} | found


#: By codec what measures it, and the file that it is written to.
PARTS = {"huffman": (huffmans, "entropy_gpu.json"), "delta": (deltas, "delta_gpu.json")}


def record(codec: str, folder: Path) -> bool:
    """Measure a codec and write down what is found, as it comes; whether all went well."""
    measured, name = PARTS[codec]
    result: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": bench_gpu.machine(),
        "versions": bench_gpu.versions(),
    }
    for key, found in measured():
        if key == "nvcomp":
            result[key] = found
        else:
            result.setdefault(key, []).append(found)
        fine = [case for case in result.get("cases", []) if case["timings"]]
        if fine:
            result["copy_GB/s"] = bench_gpu.add_rates(fine)
        (folder / name).write_text(json.dumps(result, indent=1) + "\n")
    return not any("error" in row for key in ("cases", "deltas") for row in result.get(key, []))


def main() -> None:
    """Measure everything, write it down."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--only", choices=PARTS, help="one of the codecs")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    gc.collect()
    gc.freeze()  # every capture collects: let it look at what is new only
    chosen = PARTS if arguments.only is None else [arguments.only]
    # Each is measured, whatever failed before.
    fine = [record(codec, arguments.out) for codec in chosen]
    sys.exit(not all(fine))


if __name__ == "__main__":
    main()
