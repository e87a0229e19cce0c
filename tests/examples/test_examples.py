"""Every program of examples/ runs as its README says, and prints what it should."""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import warm

EXAMPLES = Path(__file__).parents[2] / "examples"
#: What the last line of each says; the numbers are checked by the programs themselves.
ALONE = {
    "dynamiq_sum": ("numba", r"dynamiq, 5 bits, butterfly +vNMSE .*, \d+ bytes from rank 0"),
    "encode_decode": ("numpy", r"\w+, [\w.]+ +\d+ bytes, 0\.\d\d of the size"),
    "jax_pytree": ("jax", r"\d+ bytes in the file for 263168 bytes of arrays"),
    "model_checkpoint": ("torch", r"\d+ bytes in the file for 136320 bytes of parameters"),
    "your_own_codec": ("numpy", r"vNMSE of ordinary channels .*; \d+ bytes"),
}
PROCESSES = {
    "socket_stream": r"5 tensors came bit for bit: \d+ bytes in place of 130560",
    "surviving": r"ranks in a step: 3, then 2, then 3; all have the same weights",
    "weight_deltas": r"version 5 takes \d{4,5} bytes, the first one \d{6}",
}
#: Programs that need a package which is not in the extra `test`.
PACKAGES = {
    "transformers_model": (
        "transformers",
        r"the model takes 0\.7\d of its size, and has the same weights",
    ),
}
TORCHRUN = {
    "ddp": r"loss .* to .*; gradients took 0\.\d\d of their bytes",
    "fsdp2": r"parameters took 0\.\d\d of their bytes, gradients 0\.\d\d",
    "moe": r"tokens and gradients took 0\.[5-7]\d of their bytes; vNMSE .*",
    "process_group": r"the same weights as over gloo; calls took 0\.\d\d of their bytes",
    "sharded_checkpoint": r"the checkpoint has 0\.\d\d of the state's bytes",
    "tagc": r"0\.weight: this rank sent \d+ of 256000 elements last",
    "tensor_parallel": r"activations took 0\.5\d of their bfloat16 bytes; vNMSE .*",
    "weight_transfer": r"version 3: 0\.00\d of the bytes, \d+\.\d ms of pause",
}
#: Processes of those that do not run in two.
RANKS = {"weight_transfer": 3}
PLUGINS = {
    "lmcache_round_trip": (
        "lmcache",
        r"LMCache stored 0\.7\d of the bytes, and loaded them bit for bit",
    ),
}


@pytest.mark.parametrize("name", ALONE)
def test_a_program_runs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In this process: what it imports and compiles other tests need too."""
    library, wanted = ALONE[name]
    pytest.importorskip(library)
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    check_output(capsys.readouterr().out, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROCESSES)
def test_a_program_with_processes_runs(name: str) -> None:
    check_output(run([str(EXAMPLES / f"{name}.py")]), PROCESSES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", PACKAGES)
def test_a_program_with_a_package_runs(name: str) -> None:
    library, wanted = PACKAGES[name]
    pytest.importorskip(library)
    check_output(run([str(EXAMPLES / f"{name}.py")]), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("name", TORCHRUN)
def test_a_program_runs_on_ranks(name: str) -> None:
    """In processes that torchrun would have started; test_torchrun starts one of them so."""
    pytest.importorskip("torch")
    done = warm.run(EXAMPLES / f"{name}.py", ranks=RANKS.get(name, 2))
    assert done.returncode == 0, done.stderr
    check_output(done.stdout, TORCHRUN[name])


@pytest.mark.slow
def test_torchrun() -> None:
    pytest.importorskip("torch")
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    check_output(run([*words, str(EXAMPLES / "ddp.py")]), TORCHRUN["ddp"])


@pytest.mark.plugins
@pytest.mark.parametrize("name", PLUGINS)
def test_a_program_with_a_plugin_runs(name: str) -> None:
    library, wanted = PLUGINS[name]
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"could not import {library!r}")
    check_output(run([str(EXAMPLES / f"{name}.py")]), wanted)


def test_every_program_is_tested_short_and_listed() -> None:
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    assert names == {*ALONE, *PROCESSES, *PACKAGES, *TORCHRUN, *PLUGINS}
    listed = (EXAMPLES / "README.md").read_text()
    for name in names:
        torchrun = f"torchrun --nproc-per-node {RANKS.get(name, 2)}"
        launcher = torchrun if name in TORCHRUN else "python"
        command = f"{launcher} examples/{name}.py"
        text = (EXAMPLES / f"{name}.py").read_text()
        assert len(text.splitlines()) < 80, name
        assert f"`{command}`" in text, name
        assert f"`{command}`" in listed, name


def run(words: list[str]) -> str:
    """What Python prints, run with these words; the test fails with what it says if it fails."""
    done = subprocess.run(
        [sys.executable, *words],
        env=os.environ | warm.NO_NAMES | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def check_output(text: str, wanted: str) -> None:
    """Assert that the last line that was printed is the one expected."""
    assert re.fullmatch(wanted, text.rstrip().splitlines()[-1]), text
