"""Copies in the order of their experts, against PyTorch's stable sort."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from tightwire.codecs.common import order_triton  # noqa: E402
from tightwire.codecs.common.order_triton import ordered, takes  # noqa: E402

#: Rows, experts of each, and of all.
SHAPES = [(1, 1, 1), (3, 2, 8), (700, 2, 8), (513, 1, 5), (41, 3, 61), (9, 8, 509), (90, 2, 13)]


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_they_are_those_of_a_stable_sort(
    place: str, shape: tuple[int, int, int], dtype: str
) -> None:
    rows, top_k, experts = shape
    generator = torch.Generator().manual_seed(rows)
    choices = torch.randint(experts, (rows, top_k), generator=generator)
    weights = torch.rand(rows, top_k, generator=generator).to(getattr(torch, dtype))
    found = ordered(choices.to(place), weights.to(place), experts)
    ranked, index = choices.view(-1).sort(stable=True)
    assert torch.equal(found.index.cpu(), index)
    assert torch.equal(found.rows.cpu(), index // top_k)
    assert torch.equal(found.inverse.cpu(), index.argsort())
    before = [int((ranked < e).sum()) for e in range(experts + 1)]
    assert found.words[0].tolist() == [*before, rows * top_k, 0]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1 << 16, 8, 256), (8192, 2, 8), (1 << 18, 1, 3)])
def test_many(shape: tuple[int, int, int]) -> None:
    rows, top_k, experts = shape
    choices = torch.rand(rows, experts, device="cuda").topk(top_k).indices
    found = ordered(choices, torch.rand(rows, top_k, device="cuda"), experts)
    index = choices.view(-1).sort(stable=True).indices
    assert torch.equal(found.index, index)
    assert torch.equal(found.rows, index // top_k)
    assert torch.equal(found.inverse, index.argsort())
    counts = choices.view(-1).bincount(minlength=experts)
    assert torch.equal(found.words[0, : experts + 1].diff(), counts)


def test_copies_of_other_programs(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few copies at the same time, so that programs make several turns."""
    monkeypatch.setattr(order_triton, "_BLOCK", 16)
    monkeypatch.setattr(order_triton, "_PROGRAMS", 11)
    choices = torch.arange(900).view(-1, 2).mul(7).remainder(6)
    found = ordered(choices.to(place), torch.ones(450, 2, device=place), 6)
    assert torch.equal(found.index.cpu(), choices.view(-1).sort(stable=True).indices)


@pytest.mark.parametrize("number", [-1, 4, -(2**63), 2**63 - 1])
def test_numbers_out_of_range(place: str, number: int) -> None:
    choices = torch.tensor([[1, 2], [number, 0], [3, 1]])
    found = ordered(choices.to(place), torch.ones(3, 2, device=place), 4)
    # Every copy has a place all the same.
    assert sorted(found.index.tolist()) == list(range(6))
    first, last = found.words[0, 0].item(), found.words[0, 4].item()
    assert (first, last) == ((1, 6) if number < 0 else (0, 5))
    assert found.words[0, 5] == 6


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite(place: str, value: float, dtype: str) -> None:
    weights = torch.ones(300, 2, dtype=getattr(torch, dtype), device=place)
    weights[299, 0] = value
    words = ordered(torch.zeros(300, 2, dtype=torch.int64, device=place), weights, 2).words
    assert math.isnan(words.view(torch.float64)[0, -1].item())


def test_large_weights_are_finite(place: str) -> None:
    weights = torch.full((5, 1), 1e308, dtype=torch.float64, device=place)
    words = ordered(torch.zeros(5, 1, dtype=torch.int64, device=place), weights, 1).words
    assert words[0, -1] == 0


def test_what_is_left_to_pytorch() -> None:
    choices = torch.zeros(2, 1, dtype=torch.int64)
    assert takes(choices, torch.ones(2, 1), 509)
    assert not takes(choices, torch.ones(2, 1), 510)
    assert not takes(choices, torch.ones(2, 1).to(torch.float8_e5m2), 4)
    assert not takes(choices[:0], torch.ones(0, 1), 4)
