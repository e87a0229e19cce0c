"""bench: which codecs are measured, in which order, and what is told meanwhile."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import tightwire as tw
from support import ALONE
from tightwire import bench
from tightwire.commands.app import app

safetensors = pytest.importorskip("safetensors.numpy")


@pytest.mark.parametrize("dtypes", [["float32"], ["int64"], ["int64", "bfloat16"]])
def test_codecs_that_fit(dtypes: list[str]) -> None:
    chosen, left_out = bench.fitting(dtypes)
    names = [c.name for c in chosen]
    assert sorted([*names, *left_out]) == sorted(ALONE)
    lossless = [c.lossless for c in chosen]
    assert lossless == sorted(lossless, reverse=True)
    for name in left_out:
        assert not set(tw.codec(name).dtypes) & set(dtypes)
    # raw copies; it is the last that is lossless.
    expected = ["huffman", "raw"] if dtypes == ["int64"] else ["zipccl", "huffman", "raw"]
    assert [c.name for c in chosen if c.lossless] == expected


def test_a_file_of_integers(tmp_path: Path) -> None:
    path = tmp_path / "i.safetensors"
    safetensors.save_file({"ids": np.arange(5000)}, path)
    done = CliRunner().invoke(app, ["bench", str(path), "--repeat", "1"])
    assert (done.exit_code, done.stderr) == (0, "")
    rows = [line.split()[0] for line in done.stdout.splitlines()]
    assert rows[2:5] == ["memcpy", "huffman", "raw"]
    assert "none of these types: zipccl, mx" in done.stdout
    done = CliRunner().invoke(app, ["bench", str(path), "--repeat", "1", "--json"])
    document = json.loads(done.stdout)
    assert "zipccl" in document["left_out"]
    # A codec that is named is measured, whatever it makes of the file.
    words = ["bench", str(path), "--repeat", "1", "--json", "--codec", "zipccl"]
    document = json.loads(CliRunner().invoke(app, words).stdout)
    assert [s["name"] for s in document["speeds"]][:2] == ["memcpy", "zipccl"]
    assert document["left_out"] == []


def test_the_error_of_a_lossy_codec(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    x, y = np.random.default_rng(0).standard_normal((2, 3000), np.float32)
    safetensors.save_file({"x": x, "y": y, "ids": np.arange(500)}, path)
    report = bench.bench_file(path, ["zipccl", "mx"], repeat=1)
    exact, mx = (s for s in report.speeds if s.name in ("zipccl", "mx"))
    both = np.concatenate([x, y])
    decoded = np.concatenate([tw.decode(tw.encode(v, "mx")) for v in (x, y)])
    assert exact.vnmse is None
    assert mx.vnmse == pytest.approx(tw.error(both, decoded).vnmse)
    words = ["bench", str(path), "--repeat", "1", "--codec", "zipccl", "--codec", "mx"]
    lines = CliRunner().invoke(app, words).stdout.splitlines()
    last = {line.split()[0]: line.split()[-2:] for line in lines if line}
    assert last["zipccl"] == ["yes", "0"]
    assert last["mx"] == ["lossy", f"{mx.vnmse:.1e}"]
    # What has no error that a number could say.
    safetensors.save_file({"x": np.array([np.inf] * 900, np.float32)}, path)
    for speed in bench.bench_file(path, ["mx"], repeat=1).speeds:
        assert speed.vnmse is None


def test_progress(tmp_path: Path) -> None:
    path = tmp_path / "i.safetensors"
    safetensors.save_file({"a": np.arange(500), "b": np.arange(9)}, path)
    told: list[tuple[str, float]] = []
    bench.bench_file(path, repeat=2, progress=lambda what, share: told.append((what, share)))
    assert sum(share for _, share in told) == pytest.approx(1)
    names = [what for what, _ in told]
    assert names[0] == "reading"
    for name in ("memcpy: check", "raw: encode", "raw: decode"):
        assert name in names


def test_progress_of_a_codec_that_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "i.safetensors"
    safetensors.save_file({"a": np.arange(500)}, path)
    monkeypatch.setattr(bench, "decode", lambda *args, **kwargs: None)
    told: list[float] = []
    bench.bench_file(path, ["raw"], repeat=3, progress=lambda what, share: told.append(share))
    assert sum(told) == pytest.approx(1)


@pytest.mark.slow
def test_bar_on_a_terminal(tmp_path: Path) -> None:
    path = tmp_path / "i.safetensors"
    safetensors.save_file({"a": np.arange(5000)}, path)
    ours, theirs = pty.openpty()
    child = subprocess.run(
        [sys.executable, "-m", "tightwire.cli", "bench", str(path), "--json"],
        stdout=subprocess.PIPE,
        stderr=theirs,
        env=os.environ | {"TERM": "xterm"},
        timeout=120,
    )
    os.close(theirs)
    assert json.loads(child.stdout)["n_tensors"] == 1
    assert b"raw: " in os.read(ours, 1 << 16)
    os.close(ours)
