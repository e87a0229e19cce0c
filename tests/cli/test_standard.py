"""`-` on the command line: standard input and output."""

from __future__ import annotations

import errno
import io
import json
import os
import pty
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import tightwire as tw
from tightwire import convert
from tightwire.cli import main
from tightwire.commands import standard
from tightwire.commands.failures import Failure

CLI = [sys.executable, "-m", "tightwire.cli"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain file, its compressed form, and a bare buffer."""
    path = tmp_path_factory.mktemp("standard")
    x = np.random.default_rng(0).standard_normal((500, 1000), np.float32)
    tw.save_file({"x": x, "ids": np.arange(9)}, path / "made")
    convert.decompress_file(path / "made", path / "plain")
    convert.compress_file(path / "plain", path / "packed")
    (path / "buffer").write_bytes(bytes(tw.encode(x)))
    return path


class Stream(io.BytesIO):
    name = "<stdin>"


class Done(NamedTuple):
    stdout: bytes
    stderr: bytes


def run(*args: object, code: int = 0, input: bytes = b"") -> Done:
    """What the command writes, in this process."""
    stdin, stdout, stderr = (io.TextIOWrapper(Stream(data)) for data in (input, b"", b""))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["tightwire", *map(str, args)])
        # Commands may set it for their process.
        patch.setenv("OPENBLAS_NUM_THREADS", "1")
        for name, stream in (("stdin", stdin), ("stdout", stdout), ("stderr", stderr)):
            patch.setattr(sys, name, stream)
        with pytest.raises(SystemExit) as exit:
            main()
    written = []
    for stream in (stdout, stderr):
        stream.flush()
        assert isinstance(stream.buffer, io.BytesIO)
        written.append(stream.buffer.getvalue())
    assert (exit.value.code or 0) == code, written
    return Done(*written)


def failed(*args: object, code: int, input: bytes = b"") -> str:
    """What the command says on standard error; on standard output it says nothing."""
    done = run(*args, code=code, input=input)
    assert done.stdout == b""
    return done.stderr.decode()


def test_through_pipes_there_and_back(folder: Path) -> None:
    plain, packed = (folder / "plain").read_bytes(), (folder / "packed").read_bytes()
    for args in (["-"], ["-", "-o", "-"]):
        assert run("compress", *args, input=plain).stdout == packed
    assert run("decompress", "-", input=packed).stdout == plain
    assert run("compress", folder / "plain", "-o", "-").stdout == packed


@pytest.mark.slow
def test_processes_in_a_pipe(folder: Path) -> None:
    command = [*CLI, "compress", "-"]
    with open(folder / "plain", "rb") as source:
        with subprocess.Popen(command, stdin=source, stdout=subprocess.PIPE) as first:
            command = [*CLI, "decompress", "-"]
            done = subprocess.run(command, stdin=first.stdout, capture_output=True, timeout=60)
        assert first.returncode == 0
    assert done.stdout == (folder / "plain").read_bytes()
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.slow
def test_standard_output_that_appends(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "all").write_bytes(b"before")
    with open(tmp_path / "all", "ab") as target:
        command = [*CLI, "compress", str(folder / "plain"), "-o", "-"]
        subprocess.run(command, stdout=target, check=True, timeout=60)
    assert (tmp_path / "all").read_bytes() == b"before" + (folder / "packed").read_bytes()


@pytest.mark.slow
def test_from_standard_input_to_a_file(folder: Path, tmp_path: Path) -> None:
    plain, packed = (folder / "plain").read_bytes(), (folder / "packed").read_bytes()
    target = tmp_path / "out"
    done = run("compress", "-", "-o", target, input=plain)
    assert done.stdout.startswith(f"{target}: ".encode())
    assert target.read_bytes() == packed
    assert "--force" in failed("compress", "-", "-o", target, code=4, input=plain)
    done = run("compress", "-", "-o", target, "--force", "--json", input=plain)
    (document,) = json.loads(done.stdout)["files"]
    assert (document["path"], document["ok"]) == ("-", True)
    assert document["target_nbytes"] == len(packed)
    # What is not compressed stays, --force or not.
    target.write_bytes(plain)
    assert "uncompressed" in failed("compress", "-", "-o", target, "--force", code=4, input=plain)
    assert "folder" in failed("compress", "-", "-o", tmp_path, code=4, input=plain)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.slow
def test_reading_commands_take_standard_input(folder: Path) -> None:
    packed, buffer = (folder / "packed").read_bytes(), (folder / "buffer").read_bytes()
    assert run("verify", "-", input=packed).stdout == b"-: ok, 2 tensors\n"
    assert run("verify", "-", input=buffer).stdout == b"-: ok, 1 tensor\n"
    for command in ("verify", "inspect"):
        done = run(command, "-", "--json", input=packed)
        assert json.loads(done.stdout)["files"][0]["ok"]
    (found,) = json.loads(run("inspect", "-", "--json", input=buffer).stdout)["files"]
    assert found["shape"] == [500, 1000]
    for pair in (("-", folder / "plain"), (folder / "plain", "-")):
        assert run("diff", *pair, input=packed).stdout == b"identical tensors\n"
    assert "standard input" in failed("diff", "-", "-", code=2, input=packed)
    done = run("diff", "-", folder / "plain", code=1, input=tw.dumps({"z": np.arange(9)}))
    assert b"z: only in <stdin>" in done.stdout


def test_bad_bytes_give_no_result(folder: Path) -> None:
    packed = bytearray((folder / "packed").read_bytes())
    packed[-50_000] ^= 1
    message = failed("decompress", "-", code=3, input=bytes(packed))
    assert message.startswith("tightwire: checksum_mismatch: standard input: tensor 'x'")
    for data in (b"", bytes(packed[:5000]), b"x" * 5000):
        for command in ("compress", "decompress"):
            assert "bad_container" in failed(command, "-", code=3, input=data)
        assert run("verify", "-", code=3, input=data).stdout == b""


def test_errors_of_the_system_name_their_file(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for command in ("compress", "decompress"):
        message = failed(command, tmp_path / "none", "-o", "-", code=4)
        assert message == f"tightwire: {tmp_path / 'none'}: No such file or directory\n"
        assert f"{tmp_path}: Is a directory" in failed(command, tmp_path, "-o", "-", code=4)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(convert, "write_container", full)
    message = failed("compress", "-", code=4, input=(folder / "plain").read_bytes())
    assert message.startswith(f"tightwire: {tempfile.gettempdir()}: No space left on device")


@pytest.mark.slow
def test_calls_that_cannot_be_meant(folder: Path) -> None:
    assert "one FILE only" in failed("compress", "-", folder / "plain", code=2, input=b"")
    assert "one FILE only" in failed("compress", "-", "-", code=2, input=b"")
    done = run("compress", "-", "--json", code=2, input=(folder / "plain").read_bytes())
    assert "--json" in json.loads(done.stdout)["error"]["message"]
    with pytest.MonkeyPatch.context() as patch:
        # As in a process that was started without one.
        patch.setattr(sys, "stdin", None)
        with pytest.raises(Failure, match="standard input is closed"):
            standard.standard_input()


@pytest.mark.slow
def test_no_bytes_on_a_terminal(folder: Path) -> None:
    for args, stdin in (
        (["compress", folder / "plain", "-o", "-"], False),
        (["verify", "-"], True),
    ):
        parent, child = pty.openpty()
        files: dict[str, Any] = {"stdin": child} if stdin else {"stdout": child}
        command = [*CLI, *map(str, args)]
        done = subprocess.run(command, stderr=subprocess.PIPE, timeout=60, **files)
        assert done.returncode == 2
        assert b"is a terminal" in done.stderr
        os.set_blocking(parent, False)
        os.close(child)
        with pytest.raises(OSError, match="rrno"):
            os.read(parent, 1)
        os.close(parent)


@pytest.mark.slow
def test_an_output_that_nobody_reads(folder: Path) -> None:
    # More than a pipe holds.
    command = [*CLI, "decompress", str(folder / "packed"), "-o", "-"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert len(process.stdout.read(10)) == 10
        process.stdout.close()
        assert process.stderr is not None
        assert (process.stderr.read(), process.wait(60)) == (b"", 141)
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, timeout=60)
    assert done.returncode == 4
    assert done.stderr == b"tightwire: cannot write the output: No space left on device\n"
