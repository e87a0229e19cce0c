"""Selection by magnitude: exactly so many, the largest, and nothing is lost."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support import make_bits
from tightwire.formats.dtypes import BY_NAME
from tightwire.sparsify import sparsify


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(["float32", "bfloat16", "float16", "float64"]),
    pattern=st.sampled_from(["normal", "zero", "special", "mixed_zeros"]),
    n=st.integers(0, 600),
    theta=st.floats(0, 1) | st.sampled_from([0.8, 0.9, 0.9875]),
    library=st.sampled_from(["numpy", "torch"]),
)
def test_the_largest_are_kept(dtype: str, pattern: str, n: int, theta: float, library: str) -> None:
    kind = BY_NAME[dtype]
    bits = make_bits(pattern, kind, n)
    before = bits.tobytes()
    kept, rest = (found.reshape(-1) for found in parts(bits, kind, theta, library))
    assert bits.tobytes() == before
    magnitude = bits.dtype.type((1 << 8 * kind.itemsize - 1) - 1)
    chosen = kept != 0
    # Disjoint, and bit for bit what was there.
    assert not ((kept != 0) & (rest != 0)).any()
    assert np.array_equal(np.where(chosen, kept, rest), np.where(chosen | (rest != 0), bits, 0))
    zeros = n - np.count_nonzero(kept & magnitude)
    assert zeros >= Fraction(str(theta)) * n
    keep = n - math.ceil(Fraction(str(theta)) * n)
    expected, found = (np.sort(part & magnitude)[::-1] for part in (bits, kept))
    assert found[:keep].tobytes() == expected[:keep].tobytes()
    assert not found[keep:].any()


def parts(bits: Any, kind: Any, theta: float, library: str) -> tuple[Any, Any]:
    """Bits of both parts."""
    if library == "numpy":
        kept, rest = sparsify(bits.view(kind.numpy).reshape(1, -1), theta)
        assert kept.dtype == rest.dtype == kind.numpy
        assert kept.shape == rest.shape == (1, bits.size)
        return kept.view(bits.dtype), rest.view(bits.dtype)
    torch = pytest.importorskip("torch")
    signed = bits.view(f"i{kind.itemsize}").copy()
    x = torch.from_numpy(signed).view(getattr(torch, kind.name))
    found = [t.view(getattr(torch, f"int{8 * kind.itemsize}")) for t in sparsify(x, theta)]
    return tuple(t.numpy().view(bits.dtype) for t in found)


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_equal_magnitudes_are_kept_in_order(library: str) -> None:
    kind = BY_NAME["float32"]
    x = np.array([[1, -2, 2, 1], [-1, 2, 1, 0.5]], np.float32)
    kept, rest = parts(x.reshape(-1).view(np.uint32), kind, 0.5, library)
    wanted = np.array([1, -2, 2, 0, 0, 2, 0, 0], np.float32)
    assert kept.reshape(-1).view(np.float32).tolist() == wanted.tolist()
    assert (rest.reshape(-1).view(np.float32) + wanted).tolist() == x.reshape(-1).tolist()


def test_the_share_is_the_decimal_number() -> None:
    """0.9 as a float is above nine tenths."""
    kept, _ = sparsify(np.arange(1, 11, dtype=np.float32), 0.9)
    assert kept.tolist() == [0] * 9 + [10]


def test_bad_calls() -> None:
    for theta in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="allowed: 0 to 1"):
            sparsify(np.ones(3), theta)
    with pytest.raises(TypeError, match="int64"):
        sparsify(np.ones(3, np.int64), 0.5)
