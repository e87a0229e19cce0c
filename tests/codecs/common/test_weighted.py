"""Weighted sums of rows, and their gradients, against PyTorch's."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from tightwire.codecs.common import weighted_triton  # noqa: E402
from tightwire.codecs.common.weighted_triton import weighted_sum, weighted_sum_back  # noqa: E402


def case(place: str, dtype: Any, shape: tuple[int, int, int]) -> tuple[Any, Any, Any, Any]:
    """Rows, weights, and places, and a gradient of the sums."""
    count, top_k, width = shape
    generator = torch.Generator().manual_seed(count * width)
    rows = torch.randn(count * top_k, width, generator=generator).to(dtype).to(place)
    weights = torch.rand(count, top_k, generator=generator).to(dtype).to(place)
    places = torch.randperm(count * top_k, generator=generator).to(place)
    gradient = torch.randn(count, width, generator=generator).to(dtype).to(place)
    return rows, weights, places, gradient


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shape", [(3, 2, 48), (1, 1, 1), (5, 3, 33), (2, 2, 5000), (0, 2, 16)])
def test_they_are_those_of_pytorch(place: str, shape: tuple[int, int, int], dtype: str) -> None:
    count, top_k, width = shape
    rows, weights, places, gradient = case(place, getattr(torch, dtype), shape)
    wide, factors = rows.double().requires_grad_(), weights.double().requires_grad_()
    wanted = torch.zeros(count, width, dtype=torch.float64, device=place)
    for k in range(top_k):
        wanted = wanted + wide[places.view(count, top_k)[:, k]] * factors[:, k : k + 1]
    found = weighted_sum(rows, weights, places)
    near = {"rtol": torch.finfo(rows.dtype).eps * 1.01, "atol": 1e-6}
    torch.testing.assert_close(found.double(), wanted, **near)
    wanted.backward(gradient.double())
    of_rows, of_weights = weighted_sum_back(gradient, rows, weights, places)
    torch.testing.assert_close(of_rows.double(), wide.grad, **near)
    largest = 1 if not count else (gradient.abs().amax() * rows.abs().amax()).item()
    torch.testing.assert_close(
        of_weights.double(), factors.grad, rtol=near["rtol"], atol=1e-6 * width * largest
    )


def test_sums_without_weights(place: str) -> None:
    rows, weights, places, _ = case(place, torch.float32, (7, 3, 40))
    found = weighted_sum(rows, None, places, 3)
    assert torch.equal(found, weighted_sum(rows, torch.ones_like(weights), places))


def test_rows_that_are_not_at_multiples_of_16_bytes(place: str) -> None:
    rows, weights, places, _ = case(place, torch.float32, (4, 2, 32))
    moved = torch.cat([rows.new_zeros(1), rows.reshape(-1)])[1:].view_as(rows)
    assert torch.equal(weighted_sum(moved, weights, places), weighted_sum(rows, weights, places))


def test_infinities_and_nan_stay(place: str) -> None:
    rows, weights, places, _ = case(place, torch.float32, (4, 1, weighted_triton._BLOCK + 1))
    rows[places[2], -1], rows[places[1], 0] = torch.inf, torch.nan
    found = weighted_sum(rows, weights, places)
    assert found[2, -1].isinf()
    assert found[1, 0].isnan()
    assert int(found.isfinite().sum()) == found.numel() - 2
