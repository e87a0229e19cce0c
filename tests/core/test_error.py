"""tw.error: its three figures against their definitions, and its edges."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tightwire as tw


def test_the_definitions() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1500, 1000))
    y = x + 0.1 * rng.standard_normal(x.shape)
    found = tw.error(x, y)
    assert math.isclose(found.vnmse, float(((x - y) ** 2).sum() / (x**2).sum()), rel_tol=1e-12)
    assert found.max == np.abs(x - y).max()
    cosine = float((x * y).sum() / np.linalg.norm(x) / np.linalg.norm(y))
    assert math.isclose(found.cosine, cosine, rel_tol=1e-12)
    assert tw.error(x, x) == (0.0, 0.0, 1.0)
    assert math.isclose(tw.error(x, -x).cosine, -1.0)
    assert math.isclose(tw.error(x, 2 * x).vnmse, 1.0)


@pytest.mark.parametrize(
    ("x", "y", "expected"),
    [
        ([], [], (0.0, 0.0, 1.0)),
        (2.0, 1.0, (0.25, 1.0, 1.0)),
        ([0.0, -0.0], [0.0, 0.0], (0.0, 0.0, 1.0)),
        ([0.0], [3.0], (math.inf, 3.0, 0.0)),
        ([3.0], [0.0], (1.0, 3.0, 0.0)),
        ([np.inf, 1.0, -np.inf], [np.inf, 1.0, -np.inf], (0.0, 0.0, 1.0)),
        ([np.inf, 1.0], [np.inf, 3.0], (4.0, 2.0, 1.0)),
        ([np.nan, 1.0], [np.nan, 1.0], (math.nan, math.nan, math.nan)),
        ([np.inf], [-np.inf], (math.nan, math.nan, math.nan)),
        ([np.inf, 1.0], [1.0, 1.0], (math.nan, math.nan, math.nan)),
        ([1.0, 1.0], [1.0, -np.inf], (math.nan, math.nan, math.nan)),
        ([1.0, 1.0], [np.nan, 1.0], (math.nan, math.nan, math.nan)),
        ([1e-200, 0.0], [0.0, 0.0], (1.0, 1e-200, 0.0)),
        ([1e-200], [3e-200], (4.0, 2e-200, 1.0)),
        ([1e200], [-1e200], (4.0, 2e200, -1.0)),
        ([5e-324], [1e-323], (1.0, 5e-324, 1.0)),
        ([1e300, 1e-300], [1e300, 0.0], (0.0, 1e-300, 1.0)),
        ([1e308], [-1e308], (math.inf, math.inf, -1.0)),
    ],
)
def test_edges(x: Any, y: Any, expected: tuple[float, ...]) -> None:
    found = tw.error(np.array(x), np.array(y))
    for a, b in zip(found, expected, strict=True):
        assert math.isclose(a, b, rel_tol=1e-14) or (math.isnan(a) and math.isnan(b))


def test_large_integers() -> None:
    x = np.array([2**53, -(2**62), 7], np.int64)
    assert tw.error(x, x + 1).max == 1.0
    assert 0 < tw.error(x, x + 1).vnmse < 1e-36
    most = np.array([2**64 - 1], np.uint64)
    assert tw.error(most, most - np.uint64(1)).max == 1.0
    assert tw.error(np.array([-(2**63)]), most).max == 2.0**64 + 2.0**63
    assert tw.error(np.array([-1]), np.array([1], np.uint64)).max == 2.0


def test_libraries_and_dtypes() -> None:
    torch = pytest.importorskip("torch")
    x = np.arange(10).astype(ml_dtypes.bfloat16)
    y = torch.arange(10, dtype=torch.float16) + 1
    assert tw.error(x, y).max == 1.0
    assert tw.error(np.arange(3), np.arange(3, dtype=np.uint8)) == (0.0, 0.0, 1.0)
    with pytest.raises(ValueError, match="shape"):
        tw.error(np.zeros(3), np.zeros((3, 1)))
    with pytest.raises(TypeError, match="Expected real dtypes"):
        tw.error(np.zeros(3, np.complex64), np.zeros(3))
