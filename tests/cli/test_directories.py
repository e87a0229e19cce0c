"""The command on directories of models."""

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
from tightwire import directories
from tightwire.commands.app import app

safetensors = pytest.importorskip("safetensors.numpy")

CLI = [sys.executable, "-m", "tightwire.cli"]
INDEX = "model.safetensors.index.json"
NAMES = ["model-00001-of-00002", "model-00002-of-00002"]


def model(folder: Path) -> Path:
    """A model of two shards of 20 kB and a sub-folder with a third."""
    (folder / "sub").mkdir(parents=True)
    rng = np.random.default_rng(0)
    for i, name in enumerate(NAMES):
        x = rng.standard_normal(5000, np.float32)
        safetensors.save_file({f"w{i}": x}, folder / f"{name}.safetensors")
    safetensors.save_file({"w0": np.arange(5000)}, folder / "sub" / "model.safetensors")
    weight_map = {f"w{i}": f"{name}.safetensors" for i, name in enumerate(NAMES)}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return model(tmp_path / "m")


@pytest.fixture
def packed(plain: Path) -> Path:
    directories.compress_directory(plain, plain.with_name("m.tw"))
    return plain.with_name("m.tw")


def call(code: int, *args: object) -> tuple[str, str]:
    """What a command that exits with `code` prints: standard output and error."""
    result = CliRunner().invoke(app, [str(a) for a in args])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.stderr
    return result.stdout, result.stderr


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_there_and_back(plain: Path) -> None:
    before = contents(plain)
    out, err = call(0, "compress", plain)
    packed = plain.with_name("m.tw")
    assert (err, out.startswith(f"{packed}: 3 shards, 3 other files, 80.")) == ("", True)
    plain.rename(plain.with_name("kept"))
    call(0, "decompress", packed)
    assert contents(plain) == before
    out, _ = call(0, "compress", f"{plain}/")
    assert "3 shards (3 done before)" in out
    restored = plain.with_name("restored")
    call(4, "decompress", restored)
    call(0, "decompress", packed, "-o", restored)
    assert contents(restored) == before


def test_json(plain: Path) -> None:
    out, err = call(0, "compress", plain, "--json")
    [document] = json.loads(out)["files"]
    assert err == ""
    assert (document["path"], document["target"]) == (str(plain), f"{plain}.tw")
    assert document["other_files"] == 3
    sizes = ("source_nbytes", "target_nbytes")
    assert [document[s] for s in sizes] == [sum(f[s] for f in document["files"]) for s in sizes]
    first = document["files"][0]
    assert first["path"] == str(plain / f"{NAMES[0]}.safetensors")
    assert [t["name"] for t in first["tensors"]] == ["w0"]
    [document] = json.loads(call(0, "decompress", f"{plain}.tw", "--json")[0])["files"]
    assert [f["done_before"] for f in document["files"]] == [True] * 3


def test_several_inputs(plain: Path, tmp_path: Path) -> None:
    """Directories and files; all are inputs, whatever they are named."""
    other = model(tmp_path / "other")
    shards = [plain / f"{name}.safetensors" for name in NAMES]
    out = tmp_path / "out"
    _, err = call(4, "compress", plain, other, *shards, "-o", out)
    assert "no such folder; create it first" in err
    out.mkdir()
    call(0, "compress", plain, other, *shards, "-o", out)
    assert {p.name for p in out.iterdir()} == {
        *("m.tw", "other.tw"),
        *(f"{name}.tw.safetensors" for name in NAMES),
    }
    before = contents(plain)
    call(0, "compress", *shards)
    assert {name: data for name, data in contents(plain).items() if name in before} == before
    _, err = call(2, "compress", plain, plain)
    assert "would both be written there" in err


def test_bad_input_stops_before_anything_is_written(plain: Path, tmp_path: Path) -> None:
    other = model(tmp_path / "other")
    bad = other / f"{NAMES[1]}.safetensors"
    bad.write_bytes(bad.read_bytes()[:-1])
    before = contents(tmp_path)
    _, err = call(3, "compress", plain, other)
    assert str(bad) in err
    assert contents(tmp_path) == before


@pytest.mark.parametrize("words", [["-o", "."], ["-o", "sub/x"], ["-o", ".."], ["-o", "../m/"]])
def test_directories_in_one_another(
    plain: Path, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(plain)
    before = contents(plain.parent)
    _, err = call(5, "compress", ".", *words, "--force")
    assert "or one lies in the other" in err
    assert contents(plain.parent) == before


def test_names_of_the_working_directory(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(plain / "sub")
    call(0, "compress", "..")
    call(0, "verify", "../../m.tw")
    monkeypatch.chdir(plain.parent / "m.tw")
    call(0, "decompress", ".")
    call(0, "diff", ".", "../m")


def test_force_overwrites_nothing_uncompressed(plain: Path, packed: Path) -> None:
    (packed / "config.json").write_text('{"mine": 1}')
    before = contents(plain.parent)
    for words in (["compress", plain], ["decompress", packed]):
        _, err = call(4, *words, "--force")
        assert "config.json: exists and differs" in err
    assert contents(plain.parent) == before
    (packed / "config.json").write_text("{}")
    _, err = call(4, "compress", plain, "--codec", "raw")
    assert "force replaces it" in err
    call(0, "compress", plain, "--codec", "raw", "--force")
    call(0, "verify", packed)


def test_errors(plain: Path, packed: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for command in ("compress", "decompress", "verify", "inspect"):
        words = ["-o", tmp_path / "x"] if "compress" in command else []
        _, err = call(4, command, tmp_path / "empty", *words)
        assert err.startswith(f"tightwire: {tmp_path / 'empty'}: holds no ")
    call(4, "diff", tmp_path / "empty", plain)
    _, err = call(3, "compress", packed)
    assert "compressed already" in err
    _, err = call(4, "verify", plain)
    assert "holds no compressed" in err
    _, err = call(4, "compress", plain, "-o", "/sys/tightwire")
    assert "/sys/tightwire" in err


def test_verify(packed: Path) -> None:
    assert call(0, "verify", packed) == (f"{packed}: ok, 5 files, 3 tensors\n", "")
    for name in NAMES:
        path = packed / f"{name}.tw.safetensors"
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    out, err = call(3, "verify", packed)
    lines = err.splitlines()
    assert (out, len(lines)) == ("", 3)
    assert all(name in line for name, line in zip(NAMES, lines, strict=False))
    assert lines[2] == f"tightwire: {packed}: 2 of 5 files are bad"
    document = json.loads(call(3, "verify", packed, "--json")[0])
    assert document["error"]["reason"] == "checksum_mismatch"
    [directory] = document["files"]
    assert [file["ok"] for file in directory["files"]] == [False, False, True, True, True]


def test_inspect(packed: Path) -> None:
    out, _ = call(0, "inspect", packed)
    assert [line.split()[0] for line in out.splitlines() if "tensors" in line] == [
        "shard",
        *(f"{name}.tw.safetensors" for name in NAMES),
        "sub/model.tw.safetensors",
    ]
    assert out.splitlines()[-1].split()[:2] == ["total", "3"]
    [document] = json.loads(call(0, "inspect", packed, "--json")[0])["files"]
    assert document["raw_nbytes"] == 2 * 20_000 + 40_000
    assert len(document["files"]) == 3
    out, _ = call(0, "inspect", packed, "--tensor", "w0")
    assert [line for line in out.splitlines() if line.endswith(":")] == [
        f"{packed / NAMES[0]}.tw.safetensors:",
        f"{packed / 'sub' / 'model.tw.safetensors'}:",
    ]
    _, err = call(2, "inspect", packed, "--tensor", "nothing")
    assert "'nothing'" in err


def test_diff(plain: Path, packed: Path) -> None:
    assert call(0, "diff", plain, packed)[0] == "identical tensors\n"
    one = plain.with_name("one.tw.safetensors")
    tw.save_file(tw.load(packed) | {"sub/w0": np.arange(5000)}, one)
    assert call(0, "diff", one, packed)[0] == "identical tensors\n"
    out, _ = call(1, "diff", packed, plain / "sub")
    assert "w0: float32[5000] and int64[5000]" in out


@pytest.mark.slow
def test_one_progress_bar(plain: Path) -> None:
    ours, theirs = pty.openpty()
    child = subprocess.run(
        [*CLI, "compress", str(plain), "--json"],
        stdout=subprocess.PIPE,
        stderr=theirs,
        env=os.environ | {"TERM": "xterm"},
        timeout=60,
    )
    os.close(theirs)
    shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert json.loads(child.stdout)["files"][0]["ok"]
    # All three shards are in the total of the one bar.
    assert "80.0/80.0" in shown


def test_verify_goes_on_after_a_damaged_header(packed: Path) -> None:
    for name in NAMES:
        path = packed / f"{name}.tw.safetensors"
        data = bytearray(path.read_bytes())
        data[20] ^= 1
        path.write_bytes(data)
    shown = call(3, "verify", packed)[1]
    assert all(name in shown for name in NAMES)
    assert "3 of 5 files are bad" in shown  # The index cannot be checked against them.


def test_force_replaces_the_index_that_tightwire_made(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    safetensors.save_file({"w": np.ones(5000, np.float32)}, tmp_path / "m" / "model.safetensors")
    call(0, "compress", tmp_path / "m")
    call(0, "compress", tmp_path / "m", "--cast", "bfloat16", "--force")
    call(0, "verify", tmp_path / "m.tw")


@pytest.mark.slow
@pytest.mark.parametrize("command", ["verify", "inspect", "compress"])
def test_a_named_pipe_is_refused(tmp_path: Path, command: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    child = [*CLI, command, str(tmp_path / "pipe")]
    assert subprocess.run(child, capture_output=True, timeout=30).returncode == 4


@pytest.mark.slow
def test_closed_standard_error(plain: Path) -> None:
    def closed(*words: str) -> subprocess.CompletedProcess[bytes]:
        script = ["sh", "-c", 'exec "$@" 2>&-', "sh", *CLI, *words]
        return subprocess.run(script, stdout=subprocess.PIPE)

    assert closed("compress", str(plain)).returncode == 0
    done = closed("verify", "nothing")
    assert (done.returncode, done.stdout) == (4, b"")


def test_a_file_named_minus(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(plain)
    os.replace("sub/model.safetensors", "-")
    call(0, "compress", "./-", "-o", "x.tw.safetensors")
