"""Tiers of tests, and parameters that all tests share."""

from __future__ import annotations

import functools
import gc
import importlib.util
import os
from collections.abc import Hashable
from itertools import groupby
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import is_hypothesis_test, settings

from interpreter import hasten
from support import FLOATS
from tightwire.formats.dtypes import BY_NAME, DType
from tightwire.planning import HOST_BACKENDS

if TYPE_CHECKING:
    from kernels import Watched

#: From the smallest to the largest; the last needs packages of its own.
TIERS = ("slow", "gpu", "multi_gpu", "long", "plugins")
#: Cases that the fast tier has of one test, more than there are codecs and dtypes. The marker
#: `fast_cases` says fewer, where each takes long: it is interpreted, or has code compiled. With
#: `slow_cases` the slow tier has a part of them too, and the others are long.
MOST = 24


def pytest_configure(config: pytest.Config) -> None:
    """Without a GPU, Triton kernels are interpreted; Triton asks when it is imported.

    JAX takes most of a GPU's memory when it starts, and other libraries and processes need some.
    The first example of a property may have to wait for a compiler.
    """
    settings.register_profile("full", deadline=None)
    settings.register_profile("fast", deadline=None, max_examples=10)
    settings.load_profile("fast" if is_fast(config) else "full")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    starts_workers = bool(config.getoption("numprocesses", 0))
    if not starts_workers and importlib.util.find_spec("torch") is not None and not has_gpu():
        os.environ.setdefault("TRITON_INTERPRET", "1")
        if importlib.util.find_spec("triton") is not None:
            hasten()


def pytest_addoption(parser: pytest.Parser) -> None:
    """What CI asks for where every package is installed."""
    text = "fail if a test was skipped because a package is not installed"
    parser.addoption("--all-packages", action="store_true", help=text)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """What `-n auto` means: more processes would take longer to start than to run the tests."""
    affinity = getattr(os, "sched_getaffinity", None)
    return min(8, len(affinity(0)) if affinity is not None else os.cpu_count() or 1)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """With --all-packages, fail for skips of packages that are not installed."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if session.config.getoption("--all-packages") and reporter is not None:
        skipped = [str(report.longrepr) for report in reporter.stats.get("skipped", [])]
        missing = sorted({reason for reason in skipped if "could not import" in reason})
        if missing:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
            reporter.write_line("")
            reporter.write_line("--all-packages: " + "; ".join(missing), red=True)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The fast tier and that of GPUs have few cases of each test; -m leaves larger tiers out."""
    if not is_fast(config):
        for item in items:
            if is_hypothesis_test(getattr(item, "obj", None)):
                # Here with all its examples.
                item.add_marker(pytest.mark.slow)
    for _, found in groupby(items, key=lambda item: item.nodeid.partition("[")[0]):
        cases = list(found)
        tiers = {name: [case for case in cases if tier(case) == name] for name in (None, "gpu")}
        mark_others(tiers[None], pytest.mark.slow, number(cases[0], "fast_cases", MOST))
        slow = [case for case in cases if tier(case) == "slow"]
        spread(slow, pytest.mark.long, number(cases[0], "slow_cases", len(slow)))
        mark_others(tiers["gpu"], pytest.mark.long, len(tiers["gpu"]))
    asked = config.option.markexpr
    others = [name for name in TIERS if name not in asked] if asked else []
    # Those that take minutes come first: at the end one worker would be left with them.
    items.sort(key=lambda item: item.path.name != "test_triton_compile.py")
    left_out = [item for item in items if tier(item) in others]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]


def pytest_collection_finish() -> None:
    """What there is now stays until the end. Looking for garbage in it would take half a second."""
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    """Let the interpreter end as it does otherwise."""
    gc.unfreeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests of GPUs that are asked for where there is none say so."""
    if tier(item) in ("gpu", "multi_gpu") and not has_gpu():
        pytest.skip("needs a GPU, and PyTorch finds none")


@functools.cache
def has_gpu() -> bool:
    """Whether PyTorch finds a GPU."""
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return bool(torch.cuda.is_available())


def is_fast(config: pytest.Config) -> bool:
    """Whether slow tests are left out; properties have fewer examples then."""
    return "not slow" in config.option.markexpr


def tier(item: pytest.Item) -> str | None:
    """The largest tier that a test is marked with; None is the fast one."""
    names = {mark.name for mark in item.iter_markers()}
    return max(names.intersection(TIERS), key=TIERS.index, default=None)


def number(case: pytest.Item, name: str, otherwise: int) -> int:
    """How many cases of its test a tier has."""
    marker = case.get_closest_marker(name)
    return int(marker.args[0]) if marker is not None else otherwise


def spread(cases: list[pytest.Item], mark: pytest.MarkDecorator, most: int) -> None:
    """Mark the cases of a test but for `most` that lie evenly among them."""
    chosen = {i * len(cases) // most for i in range(most)}
    for i, case in enumerate(cases):
        if i not in chosen:
            case.add_marker(mark)


def mark_others(cases: list[pytest.Item], mark: pytest.MarkDecorator, most: int) -> None:
    """Mark the cases of a test but for `most` in which each parameter takes all its values."""
    met = [values(case) for case in cases]
    left = set().union(*met)
    chosen = []
    # Those first that differ from the first case in one parameter: few pairs of codec and dtype,
    # of which each has to be compiled.
    for i in sorted(range(len(cases)), key=lambda i: len(met[i] - met[0])):
        if met[i] & left:
            chosen.append(i)
            left -= met[i]
    if len(chosen) > most:
        chosen = [chosen[i * len(chosen) // most] for i in range(most)]
    for i, case in enumerate(cases):
        if met[i] and i not in chosen:
            case.add_marker(mark)


def is_value(x: Any) -> bool:
    """Whether equal ones are one parameter."""
    try:
        hash(x)
    except TypeError:
        return False
    return True


def values(case: pytest.Item) -> set[Hashable]:
    """Names and values of the parameters of a case."""
    callspec = getattr(case, "callspec", None)
    params: dict[str, Any] = callspec.params if callspec is not None else {}
    return {
        (name, type(value), value if is_value(value) else id(value))
        for name, value in params.items()
    }


@pytest.fixture(params=HOST_BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """Each backend of the host."""
    return str(request.param)


@pytest.fixture(params=sorted(FLOATS, key="bfloat16".__ne__))
def float_dtype(request: pytest.FixtureRequest) -> DType:
    """Each dtype with exponent bits."""
    return BY_NAME[request.param]


@pytest.fixture(params=sorted(BY_NAME, key="bfloat16".__ne__))
def any_dtype(request: pytest.FixtureRequest) -> DType:
    """Each dtype there is."""
    return BY_NAME[request.param]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request: pytest.FixtureRequest) -> str:
    """Where kernels run."""
    torch = pytest.importorskip("torch")
    if request.param == "cpu" and torch.cuda.is_available():
        pytest.skip("kernels are compiled for the GPU here")
    return str(request.param)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched | None:
    """Watch the interpreter; on a GPU guard bytes and compute-sanitizer (sanitize.py) do that."""
    from kernels import watch

    return watch(monkeypatch)
