"""The first screen, and the help of every command: its examples are run."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner

import tightwire as tw
from tightwire.commands.app import app

safetensors = pytest.importorskip("safetensors.numpy")

ROOT = Path(__file__).resolve().parents[2]
#: They compile kernels of all codecs, or start many processes.
SLOW = ("bench", "demo", "conformance", "doctor")

assert isinstance(app, click.Group)
COMMANDS: Mapping[str, click.Command] = app.commands


def shown(*words: str) -> str:
    done = CliRunner().invoke(app, list(words), terminal_width=80)
    assert (done.exit_code, done.stderr) == (0, "")
    return done.stdout


def examples_of(*words: str) -> list[str]:
    """The command lines below "Examples" in a help text."""
    text = shown(*words, "--help").partition("Examples:\n")[2].partition("\n\n")[0]
    return [line.strip() for line in text.splitlines()]


EXAMPLES = {(name, e) for name in COMMANDS for e in examples_of(name)}
EXAMPLES |= {("", e) for e in examples_of()}


def test_every_command_has_an_example() -> None:
    assert {name for name, _ in EXAMPLES} == {"", *COMMANDS}
    for name, example in EXAMPLES:
        assert f"tightwire {name}" in example


@pytest.mark.parametrize("name", COMMANDS)
def test_help_fits_a_terminal(name: str) -> None:
    assert max(map(len, shown(name, "--help").splitlines())) <= 88


def test_the_list_of_commands_shows_whole_sentences() -> None:
    lines = shown("--help").partition("Commands:\n")[2].partition("\n\n")[0].splitlines()
    assert len(lines) == len(COMMANDS)
    assert all(line.endswith(".") and not line.endswith("...") for line in lines)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with all files that examples name."""
    monkeypatch.chdir(tmp_path)
    w = (np.sin(np.arange(9_000, dtype=np.float32)) / 16).astype(ml_dtypes.bfloat16)
    plain = tmp_path / "model.safetensors"
    safetensors.save_file({"w": w.reshape(90, 100)}, plain)
    (tmp_path / "weights.tw").write_bytes(bytes(tw.encode(w)))
    Path("model-directory").mkdir()
    shutil.copy(plain, "model-directory/model.safetensors")
    for path in ("step1.safetensors", "step2.safetensors", "old.safetensors"):
        shutil.copy(plain, path)
    for words in (
        ["model.safetensors"],
        ["model-directory"],
        ["step1.safetensors"],
        ["step2.safetensors", "--delta-from", "old.safetensors"],
    ):
        assert CliRunner().invoke(app, ["compress", *words]).exit_code == 0
    shutil.copy(plain, "back.safetensors")
    return tmp_path


ALL = sorted({e for _, e in EXAMPLES})
FAST = [e for e in ALL if shlex.split(e)[1] not in SLOW and not set(e) & set("<|>")]


@pytest.mark.parametrize("example", FAST)
def test_examples(folder: Path, example: str) -> None:
    program, *words = shlex.split(example)
    assert program == "tightwire"
    remove_results(words[0])
    done = CliRunner().invoke(app, words)
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout


def remove_results(command: str) -> None:
    """What the examples of compress and decompress write is not there yet."""
    if command == "compress":
        Path("model.tw.safetensors").unlink()
        Path("step2.tw.safetensors").unlink()
        shutil.rmtree("model-directory.tw")
    elif command == "decompress":
        Path("back.safetensors").unlink()


def program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.mark.slow
@pytest.mark.parametrize("example", [e for e in ALL if e not in FAST])
def test_examples_in_a_shell(folder: Path, example: str) -> None:
    bin_folder = folder / "bin"
    bin_folder.mkdir()
    program(bin_folder / "tightwire", f'exec "{sys.executable}" -m tightwire.cli "$@"')
    program(bin_folder / "python", f'exec "{sys.executable}" "$@"')
    # A tenth of the vectors, and a decoder of one's own.
    (folder / "specs").mkdir()
    shutil.copy(ROOT / "specs" / "decoder.py", folder / "specs")
    shutil.copytree(ROOT / "specs" / "decoders", folder / "specs" / "decoders")
    shutil.copytree(ROOT / "specs" / "vectors" / "raw", folder / "vectors")
    program(folder / "decoder", 'exec python specs/decoder.py "$@"')
    if "--vectors" not in example and " conformance " in example:
        example += " --vectors vectors"
    environment: dict[str, Any] = {**os.environ, "PATH": f"{bin_folder}:{os.environ['PATH']}"}
    command = ["bash", "-o", "pipefail", "-c", example]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout or ">" in example


def test_first_screen() -> None:
    text = shown()
    assert text.startswith(f"tightwire {tw.__version__}: ")
    assert max(map(len, text.splitlines())) <= 100
    commands = re.findall(r"^  tightwire (\w+)", text, re.MULTILINE)
    assert commands == ["compress", "inspect", "diff", "doctor"]
    assert "tightwire --help" in text


WITHOUT_CLICK = """
import sys
sys.modules["click"] = sys.modules["numpy"] = None
sys.argv = ["tightwire"]
from tightwire.cli import main
main()
"""


def test_first_screen_needs_no_package() -> None:
    command = [sys.executable, "-c", WITHOUT_CLICK]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == shown()


def test_the_screen_says_what_works(folder: Path) -> None:
    """The commands of the first screen are run; doctor has tests of its own."""
    (folder / "model.tw.safetensors").unlink()
    for line in shown().splitlines():
        words = line.strip().partition("    ")[0].split()
        if line.startswith("  tightwire") and words[1] != "doctor":
            assert CliRunner().invoke(app, words[1:]).exit_code == 0
