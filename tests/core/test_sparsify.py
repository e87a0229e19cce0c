"""Selection by magnitude: exactly so many, the largest, and nothing is lost."""

from __future__ import annotations

import importlib
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support import examples, make_bits
from tightwire.formats.dtypes import BY_NAME
from tightwire.sparsify import sparsify, sparsify_rows


@examples(60)
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


def test_a_parameter_has_no_part_in_autograd() -> None:
    torch = pytest.importorskip("torch")
    x = torch.nn.Parameter(torch.tensor([1.0, -3.0, 2.0]))
    for part, wanted in zip(sparsify(x, 0.5), ([0, -3, 0], [1, 0, 2]), strict=True):
        assert part.tolist() == wanted
        assert not part.requires_grad
    assert x.requires_grad


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> str:
    """Where kernels run: without a GPU the interpreter's memory stands for its."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    from tightwire import sparsify_triton

    if torch.cuda.is_available():
        return "cuda"
    module = importlib.import_module("tightwire.sparsify")
    monkeypatch.setattr(module, "_kernels", lambda x, dtype: sparsify_triton)
    return "cpu"


@pytest.mark.parametrize(
    ("dtype", "pattern", "n", "theta"),
    [
        ("float32", "special", 9001, 0.9625),
        ("float32", "zero", 500, 0.5),
        # More equal ones than there is room for, in several tiles.
        ("bfloat16", "mixed_zeros", 9008, 0.8),
        ("float16", "normal", 70, 1),
        ("float16", "special", 70, 0),
        ("float32", "normal", 0, 0.5),
    ],
)
def test_kernels_keep_the_same(place: str, dtype: str, pattern: str, n: int, theta: float) -> None:
    import torch

    kind = BY_NAME[dtype]
    bits = make_bits(pattern, kind, n)
    signed = torch.from_numpy(bits.view(f"i{kind.itemsize}").copy())
    x = signed.to(place).view(getattr(torch, dtype))
    expected = sparsify(bits.view(kind.numpy), theta)
    for found, wanted in zip(sparsify(x, theta), expected, strict=True):
        assert found.view(signed.dtype).cpu().numpy().tobytes() == wanted.tobytes()
    assert torch.equal(x.view(signed.dtype).cpu(), signed)


@pytest.mark.parametrize(
    ("kind", "cells"),
    [("as they come", "float32"), ("too many", "bfloat16"), ("apart", "float16")],
)
def test_rows_of_a_layer(
    place: str, cells: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a sample that guesses well; of one with too many equal, and too few for a guess."""
    import torch

    from tightwire import sparsify_triton

    monkeypatch.setattr(sparsify_triton, "SAMPLED", 20000)
    m, theta = (20016 if kind == "apart" else 20011), 0.9
    rng = np.random.default_rng(3)
    x = torch.from_numpy(rng.standard_t(3, (2, m)).astype(np.float32))
    if kind == "too many":
        x = x.round()
    if kind == "apart":
        # Of a row's periods the sample sees other parts than there are.
        x[0] = 2.0 ** torch.arange(m).remainder(64).float()
    x[1, 5], x[1, 7], x[0, 9] = math.nan, -math.inf, 7e4
    keep = m - math.ceil(Fraction(str(theta)) * m)
    exact = torch.stack([sparsify_numpy(row, theta) for row in x])
    sent = exact.to(getattr(torch, cells)).float()
    lost = (x - sent).nan_to_num(0.0, 0.0, 0.0)
    given = x.clone().to(place)
    rest = torch.full_like(given, math.nan)
    found, kept = sparsify_rows(given, theta, BY_NAME[cells], rest)
    assert torch.equal(given.cpu().nan_to_num(1.5), x.nan_to_num(1.5))
    assert torch.equal(found.cpu().nan_to_num(1.5), sent.nan_to_num(1.5))
    assert torch.equal(rest.cpu(), lost)
    assert kept.item() == torch.count_nonzero(sent).item() <= 2 * keep
    # In place.
    again, _ = sparsify_rows(given, theta, BY_NAME[cells], given)
    assert torch.equal(given.cpu(), lost)
    assert torch.equal(again.cpu().nan_to_num(1.5), sent.nan_to_num(1.5))


def sparsify_numpy(row: Any, theta: float) -> Any:
    import torch

    return torch.from_numpy(sparsify(row.numpy(), theta)[0])


def test_bad_calls() -> None:
    for theta in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="allowed: 0 to 1"):
            sparsify(np.ones(3), theta)
    for no_number in ("0.5", None, True):
        with pytest.raises(TypeError, match="allowed: a number from 0 to 1"):
            sparsify(np.ones(3), no_number)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="int64"):
        sparsify(np.ones(3, np.int64), 0.5)
