"""doctor: what it says of things that work, are missing, are broken, or never answer."""

from __future__ import annotations

import json
import os
import sys
import time
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import tightwire as tw
from tightwire import doctor
from tightwire.commands.app import app
from tightwire.doctor import Check, _Probe, answer, run

ROOT = Path(__file__).resolve().parents[2]


def call(code: int, *args: str) -> str:
    result = CliRunner().invoke(app, ["doctor", *args])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert (result.exit_code, result.stderr) == (code, ""), result.output
    return result.stdout


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[Check, dict[str, Any]]]:
    """What each check gives in place of a process: all is well, on a machine without a GPU."""
    found: dict[str, tuple[Check, dict[str, Any]]] = {}
    for probe in doctor._PROBES:
        more = {"digest": "0"} if probe.group == "backends" else {}
        found[probe.key] = Check(probe.group, probe.name, "ok", "fine"), more
    found["torch"][1]["no_gpu"] = "PyTorch is built without CUDA"
    monkeypatch.setattr(doctor, "run", lambda probe, timeout: found[probe.key])
    return found


def change(results: dict[str, tuple[Check, dict[str, Any]]], key: str, **fields: Any) -> None:
    check, more = results[key]
    results[key] = replace(check, **fields), more


Results = dict[str, tuple[Check, dict[str, Any]]]


def test_all_is_well(results: Results) -> None:
    shown = call(0)
    assert shown.startswith(f"tightwire {tw.__version__}, Python ")
    assert shown.endswith("\ntightwire works here\n")
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    for line in ("ok ref fine", "ok mpi fine", "transports", "extras"):
        assert line in lines
    assert "- gpu none found: PyTorch is built without CUDA" in lines
    assert "- torch.distributed, nccl no GPU: PyTorch is built without CUDA" in lines
    assert max(map(len, shown.splitlines())) <= 100
    document = json.loads(call(0, "--json"))
    assert document["ok"] is True
    groups = ["backends", "arrays", "transports", "devices", "compiled kernels", "extras"]
    assert list(dict.fromkeys(check["group"] for check in document["checks"])) == groups
    assert {*document["checks"][0]} == {"group", "name", "status", "detail", "fix"}
    assert document["processor"]["cores"] >= 1
    assert document["gpus"] == []


@pytest.mark.parametrize(
    ("key", "code"), [("ref", 1), ("cpu", 1), ("triton", 0), ("mpi", 0), ("torch", 0)]
)
def test_what_fails(results: Results, key: str, code: int) -> None:
    """tightwire works without transports, libraries and a GPU; not with a broken backend."""
    change(results, key, status="failed", detail="OSError: libx.so: no such file")
    shown = call(code)
    assert "FAILED" in shown
    assert "OSError: libx.so: no such file" in shown
    assert ("tightwire works here" in shown) == (code == 0)
    assert json.loads(call(code, "--json"))["ok"] == (code == 0)


def test_what_is_missing(results: Results) -> None:
    fix = doctor.pip_command("cpu")
    change(results, "cpu", status="missing", detail="not installed (numba)", fix=fix)
    assert "not installed (numba); pip install 'tightwire[cpu]'" in " ".join(call(0).split())


@pytest.mark.parametrize("key", ["cpu", "triton"])
def test_other_bytes(results: Results, key: str) -> None:
    results[key][1]["digest"] = "1"
    assert "gives other bytes than ref" in call(1)


def test_gpus(results: Results) -> None:
    gpu = {"index": 0, "name": "NVIDIA H200", "capability": "9.0"}
    gpu |= {"memory_nbytes": 150 * 10**9, "free_nbytes": 149 * 10**9}
    results["torch"] = results["torch"][0], {"gpus": [gpu]}
    document = json.loads(call(0, "--json"))
    status = {check["name"]: check["status"] for check in document["checks"]}
    assert (status["gpu 0"], status["nccl by cupy"]) == ("ok", "ok")
    assert document["gpus"] == [gpu]
    assert "NVIDIA H200, compute capability 9.0, 149.0 GB of 150.0 GB free" in call(0)


def test_without_torch(results: Results) -> None:
    change(results, "torch", status="missing")
    del results["torch"][1]["no_gpu"]
    assert "unknown: PyTorch, which would find GPUs, is not installed" in " ".join(call(0).split())


def test_caches(results: Results, tmp_path: Path) -> None:
    (tmp_path / "f.nbc").write_bytes(bytes(1500))
    (tmp_path / "other").write_bytes(bytes(1000))
    results["cpu"][1]["cache"] = str(tmp_path)
    results["triton"][1]["cache"] = "/proc/nothing"
    numba, triton = json.loads(call(0, "--json"))["caches"]
    assert numba == {"name": "numba", "folder": str(tmp_path), "writable": True, "nbytes": 1500}
    assert (triton["writable"], triton["nbytes"]) == (False, 0)
    shown = " ".join(call(0).split())
    assert f"{tmp_path}, 1.5 kB, writable" in shown
    assert "set TRITON_CACHE_DIR" in shown


def test_extras_are_those_of_the_package() -> None:
    """Each extra of pyproject.toml that brings libraries, and the packages that it brings."""
    with open(ROOT / "pyproject.toml", "rb") as file:
        extras = tomllib.load(file)["project"]["optional-dependencies"]
    assert {*doctor.EXTRAS} == {*extras} - {"demo", "bench", "test", "docs", "dev"}
    for extra, packages in doctor.EXTRAS.items():
        listed = " ".join(extras[extra])
        assert all(f"{package}" in listed for package in packages)


def test_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check in this process: it worked, cannot work, or raised."""

    def cannot(more: dict[str, Any]) -> str:
        raise doctor._CannotWork("no GPU")

    def broken(more: dict[str, Any]) -> str:
        raise ImportError("libmpi.so.40: cannot open\n shared object file")

    path = tmp_path / "result"
    for key, call_, status, detail in (
        ("ref", doctor._TRIES["ref"], "ok", "NumPy; always there, slow for large tensors"),
        ("x", cannot, "missing", "no GPU"),
        ("x", broken, "failed", "ImportError: libmpi.so.40: cannot open shared object file"),
    ):
        monkeypatch.setitem(doctor._TRIES, key, call_)
        answer(key, str(path))
        found = json.loads(path.read_text())
        assert (found["status"], found["detail"]) == (status, detail)


@pytest.mark.parametrize("name", ["numpy", "ml_dtypes", "threads"])
def test_light_checks(name: str) -> None:
    more: dict[str, Any] = {}
    assert doctor._TRIES[name](more)


def test_a_round_trip_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sys.modules["tightwire.decoding"], "decode", lambda src, **options: np.zeros(3, np.float32)
    )
    with pytest.raises(RuntimeError, match="give the input back"):
        doctor._round_trip(np.ones(3, np.float32), {}, "ref")


def test_packages_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(doctor.EXTRAS, "mpi", ("os", "no_such_package"))
    check, _ = run(_Probe("transports", "mpi", "mpi", "mpi"), 1)
    assert (check.status, check.detail) == ("missing", "not installed (no_such_package)")
    assert check.fix == "pip install 'tightwire[mpi]'"


STUBS = {
    "dies": "import os, sys\nsys.stderr.write('No driver\\n')\nsys.stderr.flush()\nos.abort()",
    "leaves": "raise SystemExit(7)",
    "waits": "import subprocess, time\nsubprocess.run(['sleep', '600'])",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stub", "timeout", "detail"),
    [
        ("dies", 60, "the process ended with SIGABRT: No driver"),
        ("leaves", 60, "SystemExit: 7"),
        ("waits", 3, "no answer within 3 s"),
    ],
)
def test_broken_libraries(
    stub: str, timeout: float, detail: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mpi4py aborts the process, ends it, or never comes back."""
    package = tmp_path / "mpi4py"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "MPI.py").write_text(STUBS[stub])
    monkeypatch.syspath_prepend(str(tmp_path))
    start = time.monotonic()
    check, _ = run(_Probe("transports", "mpi", "mpi", "mpi"), timeout)
    assert (check.status, check.detail) == ("failed", detail)
    assert time.monotonic() - start < timeout + 20


def test_a_child_is_no_rank_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "3")
    assert "OMPI_COMM_WORLD_RANK" not in doctor._environment()
    assert doctor._environment()["PATH"] == os.environ["PATH"]


@pytest.mark.slow
def test_here() -> None:
    """All that is installed for the tests works."""
    document = json.loads(call(0, "--json"))
    status = {check["name"]: check["status"] for check in document["checks"]}
    assert document["ok"] is True
    assert "failed" not in status.values()
    for name in ("ref", "cpu", "numpy", "ml_dtypes", "threads"):
        assert status[name] == "ok"
