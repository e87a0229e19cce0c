"""Prepared calls of nothing, and of a group of one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tightwire as tw
from prepared_ranks import CASES, ROUTES, prepare, result, run, same
from tightwire.adapters.collectives.calls import rounding_key
from tightwire.adapters.collectives.prepared import PreparedCalls


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("case", CASES)
def test_calls_take_tensors_of_no_elements(case: str, route: str) -> None:
    def task(calls: PreparedCalls) -> None:
        x = result("all_to_all", 0, 2)
        prepare(calls, case, x)(x, result(case, 0, 2)).wait()

    run(2, route, task, pieces="pieces" in case)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("case", ["reduce_scatter", "one-shot, pieces", "two-shot, pieces"])
@pytest.mark.parametrize("counts", [(0, 20_000), (20_000, 0), (0, 0), (6, 20_000)])
def test_sums_take_lists_with_tensors_of_no_elements(
    counts: tuple[int, ...], case: str, route: str
) -> None:
    def task(calls: PreparedCalls) -> list[Any]:
        xs = [np.full(n, calls.rank + 1, np.float32) for n in counts]
        share = 2 if case == "reduce_scatter" else 1
        outs = [np.zeros(n // share, np.float32) for n in counts]
        prepare(calls, case, xs)(xs, outs).wait()
        return outs

    for outs in run(2, route, task, pieces="pieces" in case):
        assert all((out == 3).all() for out in outs)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("case", ["reduce_scatter", "one-shot", "two-shot"])
@pytest.mark.parametrize("codec", ["dynamiq", "thc"])
def test_a_group_of_one_sums_by_codecs_that_draw(codec: str, case: str, route: str) -> None:
    x = np.linspace(-1, 1, 4096, dtype=np.float32)

    def task(calls: PreparedCalls) -> tuple[Any, Any]:
        call, out = prepare(calls, case, x), np.zeros_like(x)
        key = rounding_key(0, calls.number, 0, 0, 1)
        call(x, out).wait()
        return out, tw.decode(calls.codec.encode(x, key=key))

    ((out, once),) = run(1, route, task, codec=codec)
    if case == "two-shot":
        # It is rounded again as a sum.
        assert np.linalg.norm(out - x) < 2 * np.linalg.norm(once - x)
    else:
        assert same(out, once)
