"""Parameters that all tests share."""

from __future__ import annotations

import importlib.util
import os

import pytest
from hypothesis import settings

from interpreter import hasten
from support import FLOATS
from tightwire.formats.dtypes import BY_NAME, DType
from tightwire.planning import HOST_BACKENDS


def pytest_configure() -> None:
    """Without a GPU, Triton kernels are interpreted; Triton asks when it is imported.

    JAX takes most of a GPU's memory when it starts, and other libraries and processes need some.
    The first example of a property may have to wait for a compiler.
    """
    settings.register_profile("compiled", deadline=None)
    settings.load_profile("compiled")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if importlib.util.find_spec("torch") is not None:
        import torch

        if not torch.cuda.is_available():
            os.environ.setdefault("TRITON_INTERPRET", "1")
            if importlib.util.find_spec("triton") is not None:
                hasten()


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
