"""What a command imports: the time that it takes to start, without a clock."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from click.testing import CliRunner

import tightwire as tw
from support import ALONE
from tightwire import convert, planning
from tightwire.commands.app import app
from tightwire.formats.container import Entry, directory_bytes
from tightwire.formats.dtypes import BY_NAME

IMPORTS = """
import atexit, sys
atexit.register(lambda: print("\\nimported:", *sorted(sys.modules)))
from tightwire.cli import main
main()
"""
HEAVY = {"numba", "llvmlite", "torch", "ml_dtypes", "matplotlib", "asyncio", "concurrent", "typer"}


def imports_of(*words: object) -> set[str]:
    """Top-level packages that a command has imported when it ends, with exit code 0."""
    command = [sys.executable, "-c", IMPORTS, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    names = done.stdout.partition("\nimported:")[2].split()
    assert "tightwire" in names
    return {name.partition(".")[0] for name in names}


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """A safetensors file of 25 kB: bfloat16, float32, int64, an empty tensor and a scalar."""
    rng = np.random.default_rng(0)
    weights = (rng.standard_normal(4_000) * 0.02).astype(np.float32)
    tensors: dict[str, tuple[str, tuple[int, ...], np.ndarray[Any, Any]]] = {
        "w.bf16": ("BF16", (40, 100), (weights.view(np.uint32) >> 16).astype(np.uint16)),
        "w.f32": ("F32", (4_000,), weights),
        "ids": ("I64", (100,), np.arange(100)),
        "empty": ("F32", (0, 4), weights[:0]),
        "scalar": ("F32", (), weights[:1]),
    }
    entries, at = [], 0
    for name, (kind, shape, x) in tensors.items():
        entries.append(Entry(name, kind, shape, at, at + x.nbytes))
        at += x.nbytes
    path = tmp_path / "m.safetensors"
    data = b"".join(x.tobytes() for _, _, x in tensors.values())
    path.write_bytes(directory_bytes(entries, {}) + data)
    return path


def test_version_imports_nothing_that_takes_long() -> None:
    assert not {*HEAVY, "numpy", "click", "rich"} & imports_of("--version")


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--json"]])
def test_small_files_need_neither_numba_nor_rich(plain: Path, more: list[str]) -> None:
    packed, restored = plain.with_name("m.tw.safetensors"), plain.with_name("restored")
    buffer = plain.with_name("buffer")
    buffer.write_bytes(bytes(tw.encode(np.arange(5_000, dtype=np.float32))))
    for words in (
        ["compress", plain, "-o", packed],
        ["decompress", packed, "-o", restored],
        ["verify", packed, buffer],
        ["inspect", packed],
        ["diff", packed, plain],
    ):
        light = {"rich"} if more or words[0] != "inspect" else set()
        assert not (HEAVY | light) & imports_of(*words, *more)
    assert restored.read_bytes() == plain.read_bytes()


def test_help_imports_nothing_heavy() -> None:
    assert not {*HEAVY, "rich"} & imports_of("compress", "--help")


@pytest.mark.parametrize("codec", [c for c in ALONE if tw.codec(c).lossless])
def test_small_files_are_those_of_numba(
    plain: Path, codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_numpy, by_numba = plain.with_name("numpy"), plain.with_name("numba")
    convert.compress_file(plain, by_numpy, codec)
    monkeypatch.setattr(planning, "SMALL_NBYTES", 0)
    convert.compress_file(plain, by_numba, codec)
    assert by_numpy.read_bytes() == by_numba.read_bytes()


def test_numpy_codes_what_is_small_in_sum() -> None:
    spec = tw.codec("zipccl").spec
    small = planning.make_plan(spec, BY_NAME["bfloat16"], (5_000,))
    large = planning.make_plan(spec, BY_NAME["bfloat16"], (4 << 20,))
    many = planning.make_plan(spec, BY_NAME["bfloat16"], (5_000,), 500)
    assert planning.backend_for_once([]) == "ref"
    assert planning.backend_for_once([small] * 3) == "ref"
    # Calls count too, not bytes alone.
    for plans in ([large], [small, large], [small] * 500, [many]):
        assert planning.backend_for_once(plans) is None


def test_every_command_has_its_name() -> None:
    assert isinstance(app, click.Group)
    for name in app.commands:
        assert app.commands[name].name == name
    done = CliRunner().invoke(app, ["vrify"])
    assert done.exit_code == 2
    assert "No such command 'vrify'" in done.stderr


SUBMODULES = """
import tightwire.codec, tightwire.codecs.zipccl, tightwire.error
from tightwire.codecs.zipccl import SPEC
from tightwire import codec, error, list_codecs
assert tightwire.codec is codec and tightwire.error is error
assert tightwire.codecs.zipccl.SPEC is SPEC
assert codec("zipccl").spec == SPEC() and "zipccl" in list_codecs() and callable(error)
"""


@pytest.mark.slow
def test_submodules_do_not_hide_functions() -> None:
    subprocess.run([sys.executable, "-W", "error", "-c", SUBMODULES], check=True, timeout=60)
