"""Tiers of tests, and parameters that all tests share."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Hashable
from itertools import groupby
from typing import Any

import pytest
from hypothesis import is_hypothesis_test, settings

from interpreter import hasten
from support import FLOATS
from tightwire.formats.dtypes import BY_NAME, DType
from tightwire.planning import HOST_BACKENDS

#: From the smallest to the largest.
TIERS = ("slow", "gpu", "long")
#: Cases that the fast tier has of one test: at least one for each codec, or dtype.
MOST = 16


def pytest_configure(config: pytest.Config) -> None:
    """Without a GPU, Triton kernels are interpreted; Triton asks when it is imported.

    JAX takes most of a GPU's memory when it starts, and other libraries and processes need some.
    The first example of a property may have to wait for a compiler.
    """
    settings.register_profile("full", deadline=None)
    settings.register_profile("fast", deadline=None, max_examples=10)
    settings.load_profile("fast" if is_fast(config) else "full")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if importlib.util.find_spec("torch") is not None:
        import torch

        if not torch.cuda.is_available():
            os.environ.setdefault("TRITON_INTERPRET", "1")
            if importlib.util.find_spec("triton") is not None:
                hasten()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The fast tier has few cases of each test; `-m slow` has no case of a larger tier."""
    if not is_fast(config):
        for item in items:
            if is_hypothesis_test(getattr(item, "obj", None)):
                # Here with all its examples.
                item.add_marker(pytest.mark.slow)
    for _, cases in groupby(items, key=lambda item: item.nodeid.partition("[")[0]):
        mark_slow([case for case in cases if tier(case) is None])
    asked = config.option.markexpr
    others = [name for name in TIERS if name not in asked] if asked else []
    left_out = [item for item in items if tier(item) in others]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]


def is_fast(config: pytest.Config) -> bool:
    """Whether slow tests are left out; properties have fewer examples then."""
    return "not slow" in config.option.markexpr


def tier(item: pytest.Item) -> str | None:
    """The largest tier that a test is marked with; None is the fast one."""
    return max(filter(item.get_closest_marker, TIERS), key=TIERS.index, default=None)


def mark_slow(cases: list[pytest.Item]) -> None:
    """Mark the cases of a test as slow but for few in which each parameter takes all its values."""
    met = [values(case) for case in cases]
    left = set().union(*met)
    chosen: list[int] = []
    while left:
        chosen.append(max(range(len(cases)), key=lambda i: len(met[i] & left)))
        left -= met[chosen[-1]]
    chosen = sorted(chosen)
    if len(chosen) > MOST:
        chosen = [chosen[i * len(chosen) // MOST] for i in range(MOST)]
    for i, case in enumerate(cases):
        if met[i] and i not in chosen:
            case.add_marker(pytest.mark.slow)


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


@pytest.fixture(params=FLOATS)
def float_dtype(request: pytest.FixtureRequest) -> DType:
    """Each dtype with exponent bits."""
    return BY_NAME[request.param]


@pytest.fixture(params=list(BY_NAME))
def any_dtype(request: pytest.FixtureRequest) -> DType:
    """Each dtype there is."""
    return BY_NAME[request.param]
