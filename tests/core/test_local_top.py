"""Proposals of ranks: the union is led to the number of slots."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tightwire as tw
from tightwire.local_top import LocalTop

CODEC = tw.codec("omnireduce", block=64, bits=4)
N = 64 * 400 - 3
PLAN = CODEC.plan((N,), "float32")


def steps(world: int, count: int, overlap: float) -> list[int]:
    """Sizes of the unions; the norms of all ranks have a share `overlap` in common."""
    rng = np.random.default_rng(world)
    tops = [LocalTop(PLAN) for _ in range(world)]
    found = []
    for _ in range(count):
        shared = rng.random(400)
        ranks = [overlap * shared + (1 - overlap) * rng.random(400) for _ in range(world)]
        proposed = [t.propose(r.astype(np.float32)) for t, r in zip(tops, ranks, strict=True)]
        for top, p in zip(tops, proposed, strict=True):
            assert np.count_nonzero(p) == round(top.k)
        agreed = np.maximum.reduce(proposed)
        found.append(tops[0].update(agreed))
        assert found[-1] == np.count_nonzero(agreed)
        for top in tops[1:]:
            assert top.update(agreed) == found[-1]
            assert top.k == tops[0].k
    return found


@pytest.mark.parametrize("overlap", [0.0, 0.5, 1.0])
def test_the_union_is_led_to_the_slots(overlap: float) -> None:
    assert LocalTop(PLAN).target == 100
    found = steps(4, 40, overlap)
    assert (found[0] == 100) == (overlap == 1)
    assert np.mean(found[20:]) == pytest.approx(100, abs=8)


def test_one_step_by_the_equation() -> None:
    top = LocalTop(PLAN, momentum=0.75)
    agreed = np.zeros(400, np.float32)
    agreed[:160] = 1
    assert top.update(agreed) == 160
    assert top.k == 0.75 * 100 + 0.25 * 100 * 100 / 160
    assert top.update(0 * agreed) == 0
    assert top.k == 0.75 * 100 + 0.25 * 100 * 100 / 160


def test_the_largest_are_proposed_and_the_first_of_equal_ones() -> None:
    top = LocalTop(PLAN)
    norms = np.ones(400, np.float32)
    norms[[7, 399]] = 2, np.inf
    norms[0] = 0
    before = norms.copy()
    found = top.propose(norms)
    assert np.array_equal(norms, before)
    assert np.flatnonzero(found).tolist() == [*range(1, 100), 399]
    assert np.array_equal(found[found > 0], norms[found > 0])
    assert np.count_nonzero(top.propose(0 * before[:400].clip(max=1))) == 0


def test_slots_of_chunks_and_bounds_of_k() -> None:
    # Chunks of 134, 134 and 132 blocks; of 33 slots each.
    top = LocalTop(CODEC.plan((N,), "float32", chunks=3))
    assert top.target == 3 * (134 * 4 // 16)
    one = np.zeros(400, np.float32)
    one[3] = 1
    for _ in range(30):
        top.update(one)
    assert top.k == 400
    tiny = LocalTop(CODEC.plan((700,), "float32"))
    for _ in range(30):
        tiny.update(np.ones(11, np.float32))
    assert tiny.k == 1


@pytest.mark.parametrize(
    "call",
    [
        lambda: LocalTop(tw.codec("mx").plan((5000,), "float32")),
        lambda: LocalTop(PLAN, momentum=1.5),
        lambda: LocalTop(PLAN, momentum=float("nan")),
        lambda: LocalTop(PLAN).propose(np.ones(399, np.float32)),
        lambda: LocalTop(PLAN).propose(np.ones(400)),
        lambda: LocalTop(PLAN).update(np.ones((1, 400), np.float32)),
    ],
)
def test_bad_calls(call: Any) -> None:
    with pytest.raises(ValueError, match="allowed"):
        call()
