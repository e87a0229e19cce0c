"""Parameters that all tests share."""

from __future__ import annotations

import pytest

from support import FLOATS
from tightwire.formats.dtypes import BY_NAME, DType
from tightwire.planning import BACKENDS


@pytest.fixture(params=BACKENDS)
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
