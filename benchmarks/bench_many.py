"""Batches of tensors and sums of buffers on one GPU.

    python benchmarks/bench_many.py [CODEC ...]

writes results/many.json and results/many.md. A batch is compared with one tensor of its size, a sum
with the device's own copy, in bytes moved. Device times are between events, with the device kept
busy until all launches are queued; host times are those of the call, until it returns. Everything
is checked before it is timed.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import tightwire as tw

RESULTS = Path(__file__).parent / "results"
MIB = 1 << 20
CODECS = ("zipccl", "mx", "nvfp4", "taco", "raw")
KEY = tw.Key(1, 2)
#: Clock ticks that the device is busy before each sample, some 20 ms.
DELAY = 40_000_000
SAMPLES = 9
TERMS, TERM_NBYTES = 8, 32 * MIB


def model_sizes() -> list[int]:
    """Bytes of the 300 tensors of a transformer: 4 KiB to 100 MiB, 4 GiB in all."""
    layer = [100 * MIB, 32 * MIB, 16 * MIB, 8 * MIB, 4 * MIB, 1 * MIB]
    sizes = layer * 25 + [4096 * (1 + i % 16) for i in range(150)]
    return [n for n in sizes if n]


SHAPES: dict[str, list[int]] = {
    "300 tensors of a model": model_sizes(),
    "1,000 blocks of 64 KiB": [1 << 16] * 1000,
}


def seconds_on_device(call: Callable[[], Any]) -> float:
    """Median seconds between events round a call, without its host time."""
    found = []
    for _ in range(SAMPLES):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(DELAY)
        start.record()
        kept = call()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end) / 1e3)
        del kept
    return statistics.median(found)


def seconds_on_host(call: Callable[[], Any]) -> float:
    """Median seconds until a call returns; the device is idle when it starts."""
    found = []
    for _ in range(SAMPLES):
        torch.cuda.synchronize()
        start = time.perf_counter()
        kept = call()
        found.append(time.perf_counter() - start)
        torch.cuda.synchronize()
        del kept
    return statistics.median(found)


def seconds_in_all(call: Callable[[], Any]) -> float:
    """Median seconds until what a call has queued is done."""
    found = []
    for _ in range(SAMPLES):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same bytes."""
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def require(holds: bool, what: str) -> None:
    """Raise RuntimeError unless `holds`."""
    if not holds:
        raise RuntimeError(what)


def normal(nelem: int, seed: int = 0) -> torch.Tensor:
    """N(0, 0.02) in bfloat16."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(nelem, device="cuda", generator=generator).mul_(0.02).bfloat16()


def times(encode: Callable[[], Any], decode: Callable[[], Any], nbytes: int) -> dict[str, float]:
    """GB/s and microseconds of both."""
    found = {}
    for name, call in (("encode", encode), ("decode", decode)):
        found[f"{name}_gbps"] = nbytes / seconds_on_device(call) / 1e9
        found[f"{name}_wall_gbps"] = nbytes / seconds_in_all(call) / 1e9
        found[f"{name}_host_us"] = seconds_on_host(call) * 1e6
    return found


def batch(name: str, sizes: list[int]) -> dict[str, Any]:
    """A batch beside one tensor of as many bytes."""
    codec = tw.codec(name)
    nbytes = sum(sizes)
    whole = normal(nbytes // 2)
    tensors = list(whole.split([n // 2 for n in sizes]))
    results = list(torch.empty_like(whole).split([n // 2 for n in sizes]))
    one = codec.encode(whole, key=KEY, chunks=None)
    back = torch.empty_like(whole)
    buffers = codec.encode_many(tensors, key=KEY)
    tw.decode_many(buffers, out=results)
    for x, buffer, y in zip(tensors, buffers, results, strict=True):
        buffer.check()
        single = codec.encode(x, key=KEY)
        require(same(buffer.packed(), single.packed()), "a batch has other bytes than single calls")
        require(same(y, tw.decode(single)), "a batch is decoded to something else")
    found: dict[str, Any] = {"codec": name, "tensors": len(sizes), "mib": nbytes / MIB}
    found["batch"] = times(
        lambda: codec.encode_many(tensors, key=KEY, out=buffers),
        lambda: tw.decode_many(buffers, out=results),
        nbytes,
    )
    found["one"] = times(
        lambda: codec.encode(whole, key=KEY, out=one, chunks=None),
        lambda: tw.decode(one, out=back),
        nbytes,
    )
    return found


def sums(name: str) -> dict[str, Any]:
    """The sum of buffers and a local tensor: as elements, and encoded again."""
    codec = tw.codec(name)
    nelem = TERM_NBYTES // 2
    parts = [normal(nelem, seed) for seed in range(TERMS + 1)]
    terms: list[Any] = [codec.encode(x, key=KEY) for x in parts[:TERMS]]
    total = tw.decode(terms[0]).float()
    for term in terms[1:]:
        total += tw.decode(term).float()
    wanted = total.bfloat16()
    out = torch.empty_like(wanted)
    tw.decode_sum(terms, out=out)
    require(same(out, wanted), "the sum is another")
    with_local = [*terms, parts[TERMS]]
    total += parts[TERMS].float()
    stats = {"stats": codec.measure(total.bfloat16())} if name == "nvfp4" else {}
    encoded = codec.encode_sum(with_local, key=KEY, **stats)
    require(
        same(encoded.packed(), codec.encode(total.bfloat16(), key=KEY).packed()),
        "the encoded sum is another",
    )
    packed = sum(term.nbytes for term in terms)
    cases = {
        "sum": (packed + out.nbytes, lambda: tw.decode_sum(terms, out=out)),
        "sum, encoded": (
            packed + out.nbytes + encoded.nbytes,
            lambda: codec.encode_sum(with_local, key=KEY, out=encoded, **stats),
        ),
    }
    found: dict[str, Any] = {"codec": name, "terms": TERMS, "term_mib": TERM_NBYTES / MIB}
    large = torch.empty(1 << 29, dtype=torch.uint8, device="cuda")
    copied = large.numel() / seconds_on_device(lambda: large[: 1 << 28].copy_(large[1 << 28 :]))
    found["copy_gbps"] = copied / 1e9
    for label, (moved, call) in cases.items():
        rate = moved / seconds_on_device(call)
        found[label] = {
            "moved_gbps": rate / 1e9,
            "of_copy": rate / copied,
            "host_us": seconds_on_host(call) * 1e6,
        }
    return found


def page(found: dict[str, Any]) -> str:
    """The page of the results."""
    lines = [
        "# Batches and sums on a GPU",
        "",
        f"{found['device']}, {found['date']}, PyTorch {found['torch']}, Triton {found['triton']},",
        "bfloat16 of N(0, 0.02), with checksums, outputs given. GB/s of tensor bytes.",
        "",
        "`encode_many` and `decode_many`, and the same bytes as one tensor. The device's time is",
        "without the host's; a whole call has both.",
        "",
        "| codec | batch | | device GB/s | of one tensor | whole call GB/s | host ms |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in found["batches"]:
        if "error" in row:
            lines.append(f"| {row['codec']} | {row['batch']} | {row['error']} | | | | |")
            continue
        many, one = row["batch_times"], row["one_times"]
        for op in ("encode", "decode"):
            lines.append(
                f"| {row['codec']} | {row['batch']} | {op} | {many[f'{op}_gbps']:.0f} "
                f"| {many[f'{op}_gbps'] / one[f'{op}_gbps']:.2f} "
                f"| {many[f'{op}_wall_gbps']:.0f} | {many[f'{op}_host_us'] / 1e3:.2f} |"
            )
    lines += [
        "",
        f"The sum of {TERMS} buffers of {TERM_NBYTES // MIB} MiB (`decode_sum`), and of those and",
        "a local tensor, encoded (`encode_sum`): bytes moved, beside a copy of 256 MiB.",
        "",
        "| codec | | GB/s | of the copy | host us |",
        "|---|---|---|---|---|",
    ]
    for row in found["sums"]:
        if "error" in row:
            lines.append(f"| {row['codec']} | {row['error']} | | | |")
            continue
        for label in ("sum", "sum, encoded"):
            r = row[label]
            lines.append(
                f"| {row['codec']} | {label} | {r['moved_gbps']:.0f} | {r['of_copy']:.2f} "
                f"| {r['host_us']:.0f} |"
            )
    return "\n".join(lines) + "\n"


def attempt(call: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """What a case gives, or how it failed."""
    try:
        return call(*arguments)
    except Exception as error:
        return {"codec": arguments[0], "error": f"{type(error).__name__}: {error}"[:200]}
    finally:
        torch.cuda.empty_cache()


def main() -> None:
    """All cases, or those of the codecs that are named."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("codecs", nargs="*", default=CODECS)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": importlib.metadata.version("triton"),
        "batches": [],
        "sums": [],
    }
    for name in arguments.codecs:
        for label, sizes in SHAPES.items():
            row = attempt(batch, name, sizes)
            if "error" not in row:
                row["batch_times"], row["one_times"] = row.pop("batch"), row.pop("one")
            found["batches"].append(row | {"batch": label})
        found["sums"].append(attempt(sums, name))
        (arguments.out / "many.json").write_text(json.dumps(found, indent=1) + "\n")
        (arguments.out / "many.md").write_text(page(found))
    print(page(found))


if __name__ == "__main__":
    main()
