"""Prepared calls: the right bits over a network and out of peers' memory, whatever does not fit."""

from __future__ import annotations

import gc
import itertools
import threading
import time
import unittest.mock
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import tightwire as tw
from prepared_ranks import CASES, DTYPE, ROUTES, prepare, result, run, same, tensor
from tightwire.adapters.collectives import running, tensors
from tightwire.adapters.collectives.calls import Call
from tightwire.adapters.collectives.faster import Faster
from tightwire.adapters.collectives.messages import Capacity, NetworkRoute, PeerRoute
from tightwire.adapters.collectives.prepared import PreparedCalls
from tightwire.adapters.collectives.prepared_sums import MOST_PIECES
from tightwire.adapters.collectives.prepared_work import Work
from tightwire.adapters.collectives.running import running_calls
from tightwire.adapters.errors import CollectiveError
from tightwire.adapters.transports.threads import ThreadTransport, run_ranks

SUMS = [case for case in CASES if "shot" in case]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("n", [1, 1000, 40_000])
def test_all_gather(route: str, world: int, n: int) -> None:
    def task(calls: PreparedCalls) -> None:
        gather = calls.all_gather(tensor(calls.rank, n))
        outs = [np.full(world * n, np.nan, DTYPE) for _ in range(3)]
        for k, out in enumerate(outs):
            assert gather(tensor(calls.rank, n, k), out).wait()
        for k, out in enumerate(outs):
            assert same(out, np.concatenate([tensor(r, n, k) for r in range(world)]))
        mine = [(call.name, call.rank) for call in running_calls()]
        assert ("gathers", calls.rank) not in mine

    run(world, route, task, name="gathers")


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("lossy", [False, True])
def test_the_input_may_lie_in_the_output(route: str, lossy: bool) -> None:
    def task(calls: PreparedCalls) -> Any:
        out = np.full(2 * 5000, np.nan, DTYPE)
        own = out[calls.rank * 5000 : (calls.rank + 1) * 5000]
        own[:] = tensor(calls.rank, 5000)
        calls.all_gather(own)(own, out).wait()
        return out

    first, second = run(2, route, task, codec="mx" if lossy else "zipccl")
    assert same(first, second)
    whole = np.concatenate([tensor(r, 5000) for r in range(2)])
    assert same(first, whole) != lossy


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_all_to_all(route: str, world: int) -> None:
    n = 3000

    def task(calls: PreparedCalls) -> None:
        x = tensor(calls.rank, world * n)
        out = np.full(world * n, np.nan, DTYPE)
        calls.all_to_all(x)(x, out).wait()
        mine = slice(calls.rank * n, (calls.rank + 1) * n)
        assert same(out, np.concatenate([tensor(r, world * n)[mine] for r in range(world)]))

    run(world, route, task)


def summed(world: int, n: int, wire: Any = DTYPE, dtype: Any = DTYPE, rank: int = 0) -> Any:
    """The sum of all ranks' tensors in their order, in float32; `rank` has its own as it is."""
    total = None
    for r in range(world):
        x = tensor(r, n, dtype=dtype)
        term = (x if r == rank else x.astype(wire)).astype(np.float32)
        total = term if total is None else total + term
    return total


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("scale", [None, 0.25])
def test_reduce_scatter(route: str, world: int, scale: float | None) -> None:
    n = 2000

    def task(calls: PreparedCalls) -> None:
        x, out = tensor(calls.rank, world * n), np.full(n, np.nan, DTYPE)
        total = summed(world, world * n)[calls.rank * n : (calls.rank + 1) * n]
        sums = calls.reduce_scatter(x, scale=scale)
        for factor in (None, 3.0, None):
            sums(x, out, scale=factor).wait()
            assert same(out, (total * np.float32(factor or scale or 1)).astype(DTYPE))

    run(world, route, task)


@pytest.mark.parametrize("route", ROUTES)
def test_float32_gradients_travel_as_bfloat16(route: str) -> None:
    n = 2000

    def task(calls: PreparedCalls) -> None:
        x = tensor(calls.rank, 2 * n, dtype=np.float32)
        out = np.full(n, np.nan, np.float32)
        sums = calls.reduce_scatter(x, wire="bfloat16", dtype="float32")
        sums(x, out).wait()
        total = summed(2, 2 * n, DTYPE, np.float32, calls.rank)
        assert same(out, total[calls.rank * n : (calls.rank + 1) * n])

    run(2, route, task)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("case", SUMS)
@pytest.mark.parametrize("n", [1, 500, 10_001])
@pytest.mark.parametrize("in_place", [False, True])
def test_all_reduce(route: str, world: int, case: str, n: int, in_place: bool) -> None:
    def task(calls: PreparedCalls) -> None:
        x = tensor(calls.rank, n)
        out = x if in_place else np.full(n, np.nan, DTYPE)
        reduce = prepare(calls, case, x)
        if "pieces" in case and n > 500:
            assert len(reduce._pieces) == (1 if route == "peers" else MOST_PIECES)
        reduce(x, out).wait()
        assert same(out, summed(world, n).astype(DTYPE))

    run(world, route, task, pieces="pieces" in case)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("case", SUMS)
@pytest.mark.parametrize("codec", ["mx", "taco", "nvfp4"])
def test_ranks_get_the_same_lossy_sums(route: str, case: str, codec: str) -> None:
    def task(calls: PreparedCalls) -> Any:
        x, out = tensor(calls.rank, 9000), np.full(9000, np.nan, DTYPE)
        prepare(calls, case, x)(x, out).wait()
        return out

    sums = run(3, route, task, codec=codec, pieces="pieces" in case)
    assert same(sums[0], sums[1])
    assert same(sums[0], sums[2])
    exact = summed(3, 9000)
    error = ((sums[0].astype(np.float32) - exact) ** 2).sum() / (exact**2).sum()
    assert 0 < error < 0.05


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("who", [(0,), (1,), (2,), (0, 1, 2)])
@pytest.mark.parametrize("when", [(0,), (1,), (2,), (1, 2)])
def test_what_does_not_fit_is_sent_again(
    case: str, who: tuple[int, ...], when: tuple[int, ...]
) -> None:
    """Whoever's data do not compress, and in whatever calls, the bits are those without limits."""
    sent_again(case, who, when, world=3)


def sent_again(case: str, who: tuple[int, ...], when: tuple[int, ...], world: int) -> None:
    n = 6000

    def task(calls: PreparedCalls) -> list[Any]:
        call = prepare(calls, case, tensor(0, n))
        outs = []
        for k in range(4):
            x = tensor(calls.rank, n, k, wild=calls.rank in who and k in when)
            out = result(case, n, world)
            call(x, out).wait()
            outs.append(out)
        return outs

    pieces = "pieces" in case
    small, large = (run(world, route, task, pieces=pieces) for route in ("network", "peers"))
    for found, wanted in zip(small, large, strict=True):
        assert all(same(x, y) for x, y in zip(found, wanted, strict=True))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("who", [(0,), (1,), (0, 1)])
def test_two_ranks_may_swap_by_a_gather(
    case: str, who: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ThreadTransport, "pairs_gather", True)
    if case != "broadcast":
        monkeypatch.setattr(ThreadTransport, "all_to_all_v", None)
    sent_again(case, who, (1, 2), world=2)
    test_all_to_all("network", 2)
    test_reduce_scatter("network", 2, 0.25)


#: Cases that gather what every rank has.
GATHERING = {case for case in CASES if case == "all_gather" or "shot" in case}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("who", [(0,), (1, 2)])
def test_gathers_in_place(case: str, who: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    in_place, plain = [], ThreadTransport.all_gather

    def all_gather(self: ThreadTransport, out: Any, x: Any) -> None:
        in_place.append(np.shares_memory(out, x))
        plain(self, out, x)

    monkeypatch.setattr(ThreadTransport, "all_gather", all_gather)
    monkeypatch.setattr(ThreadTransport, "gathers_in_place", True)
    sent_again(case, who, (1, 2), world=3)
    assert any(in_place) == (case in GATHERING)
    for route in ("network", "exact"):
        test_all_gather(route, 3, 300)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("n", [1, 300, 10_001])
@pytest.mark.parametrize("codec", ["zipccl", "mx"])
def test_broadcast(route: str, world: int, n: int, codec: str) -> None:
    root = world - 1

    def task(calls: PreparedCalls) -> list[Any]:
        spread, found = calls.broadcast(tensor(0, n), root=root), []
        for k in range(3):
            x = tensor(root, n, k) if calls.rank == root else np.full(n, np.nan, DTYPE)
            spread(x).wait()
            found.append(x)
        return found

    results = run(world, route, task, codec=codec)
    for found in results:
        for k, (x, first) in enumerate(zip(found, results[0], strict=True)):
            assert same(x, first)
            assert codec == "mx" or same(x, tensor(root, n, k))


@pytest.mark.parametrize("route", ROUTES)
def test_bytes_of_a_broadcast(route: str) -> None:
    """Over a network the root sends each a share, and each sends its share to all."""
    world, n = 3, 3 * 4096

    def task(calls: PreparedCalls) -> tuple[int, int]:
        work = calls.broadcast(tensor(0, n), root=1)(tensor(0, n))
        work.wait()
        return work.raw_bytes, work.wire_bytes

    found = run(world, route, task, codec="raw")
    share = 2 * n // world
    times = [0, 6, 0] if route == "peers" else [2, 4, 2]
    assert [raw for raw, _ in found] == [share * k for k in times]
    for (raw, wire), k in zip(found, times, strict=True):
        assert raw <= wire <= raw + 512 * k


def test_a_root_that_is_not_there_is_refused() -> None:
    def task(calls: PreparedCalls) -> None:
        with pytest.raises(ValueError, match="root is 2; allowed: 0 to 1"):
            calls.broadcast(tensor(0, 10), root=2)

    run(2, "network", task)


LISTED = ((600, DTYPE), (9000, np.float32), (6, DTYPE), (6000, DTYPE))


def lists(rank: int, call: int, wild: bool = False) -> list[Any]:
    """Tensors of several dtypes and sizes; of the wild ones some compress."""
    found = [tensor(rank, n, call, dtype) for n, dtype in LISTED]
    if wild:
        found[3] = tensor(rank, 6000, call, wild=True)
    return found


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("case", "codec"),
    # Pieces of a list are others, and so are the terms that a rank has as they are.
    [(c, k) for c in CASES for k in ("zipccl", "mx") if k == "zipccl" or "pieces" not in c],
)
def test_a_list_is_one_call_and_gives_what_single_calls_give(
    route: str, case: str, codec: str
) -> None:
    world = 3

    def task(calls: PreparedCalls) -> int:
        listed = prepare_list(calls, case, lists(0, 0))
        single = [prepare(calls, case, x) for x in lists(0, 0)]
        before = calls.number
        for k in range(4):
            xs = lists(calls.rank, k, wild=codec == "zipccl" and calls.rank == 1 and k == 2)
            outs = [result(case, x.size, world).astype(x.dtype) for x in xs]
            wanted = [out.copy() for out in outs]
            listed(xs, outs).wait()
            for call, x, out in zip(single, xs, wanted, strict=True):
                call(x, out).wait()
            assert all(same(x, y) for x, y in zip(outs, wanted, strict=True))
        return calls.number - before

    assert len(set(run(world, route, task, codec=codec, pieces="pieces" in case))) == 1


def prepare_list(calls: PreparedCalls, case: str, like: list[Any]) -> Any:
    if case != "broadcast":
        return prepare(calls, case, like)
    spread = calls.broadcast(like, root=0)

    def call(xs: list[Any], outs: list[Any]) -> Work:
        for x, out in zip(xs, outs, strict=True):
            out[...] = x if calls.rank == 0 else np.nan
        return spread(outs)

    return call


@pytest.mark.parametrize("route", ROUTES)
def test_lists_of_codecs_that_round_at_random(route: str) -> None:
    """Each buffer is encoded by itself, in its place."""
    codec = tw.codec("sdp4bit", rounding="stochastic")
    assert codec.spec.draws

    def task(calls: PreparedCalls) -> list[Any]:
        xs = lists(calls.rank, 0)
        outs = [np.full(2 * x.size, np.nan, x.dtype) for x in xs]
        calls.all_gather(xs)(xs, outs).wait()
        return outs

    first, second = run(2, route, task, codec=codec)
    for i, (x, y) in enumerate(zip(first, second, strict=True)):
        assert same(x, y)
        wanted = np.concatenate([lists(r, 0)[i] for r in range(2)]).astype(np.float32)
        assert tw.error(wanted, x.astype(np.float32)).vnmse < 0.05


def test_wrong_lists_are_refused() -> None:
    def task(calls: PreparedCalls) -> None:
        with pytest.raises(ValueError, match="like is an empty list"):
            calls.all_gather([])
        gather = calls.all_gather([tensor(0, 10), tensor(0, 20)])
        with pytest.raises(ValueError, match="x has 1 arrays; needed: 2"):
            gather([tensor(0, 10)], [])
        outs = [np.empty(20, DTYPE), np.empty(40, DTYPE)]
        with pytest.raises(ValueError, match=r"x\[1\] is bfloat16 of 10 elements; needed: .* 20"):
            gather([tensor(0, 10)] * 2, outs)

    run(2, "network", task)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("algorithm", ["one-shot", "two-shot"])
@pytest.mark.parametrize("wild", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_an_all_reduce_of_float32_travels_as_bfloat16(
    route: str, algorithm: str, wild: bool, in_place: bool
) -> None:
    world, n = 3, 7001
    xs = [tensor(r, n, dtype=np.float32) for r in range(world)]
    if wild:
        xs[1] = tensor(1, n, wild=True).astype(np.float32)

    def task(calls: PreparedCalls) -> Any:
        x = xs[calls.rank].copy()
        out = x if in_place else np.full(n, np.nan, np.float32)
        calls.all_reduce(x, wire="bfloat16", algorithm=algorithm, scale=0.5)(x, out).wait()
        return out

    results = run(world, route, task)
    assert all(same(results[0], other) for other in results)
    # The rank that adds up a share has its own term as it is; the sum is rounded to what travels.
    each = -(-n // (world * 128)) * 128
    with np.errstate(invalid="ignore"):
        terms = [x.astype(DTYPE).astype(np.float32) for x in xs]
        total = sum(terms[1:], terms[0])
        if algorithm == "two-shot":
            for r in range(world):
                own = slice(r * each, (r + 1) * each)
                parts = [(xs if i == r else terms)[i][own] for i in range(world)]
                total[own] = sum(parts[1:], parts[0])
        total *= np.float32(0.5)
        if algorithm == "two-shot":
            total = total.astype(DTYPE).astype(np.float32)
    assert np.array_equal(results[0], total, equal_nan=True)


def test_what_cannot_travel_is_refused() -> None:
    def task(calls: PreparedCalls) -> None:
        with pytest.raises(TypeError, match="like is int32; allowed in sums: floats"):
            calls.all_reduce([tensor(0, 10), np.ones(3, np.int32)])
        for wire in ("float32", "int16"):
            with pytest.raises(ValueError, match=f"wire is {wire}, the tensor bfloat16"):
                calls.all_reduce(tensor(0, 10), wire=wire)

    run(2, "network", task)


@pytest.mark.parametrize("pieces", [False, True])
def test_sums_in_place_are_sent_again(pieces: bool) -> None:
    def task(calls: PreparedCalls) -> list[Any]:
        found = []
        for algorithm in ("one-shot", "two-shot"):
            x = tensor(calls.rank, 5000, wild=calls.rank == 1)
            calls.all_reduce(x, algorithm=algorithm)(x, x).wait()
            found.append(x)
        return found

    small, large = run(3, "network", task, pieces=pieces), run(3, "peers", task)
    for found, wanted in zip(small, large, strict=True):
        assert all(same(x, y) for x, y in zip(found, wanted, strict=True))


def test_works_may_be_waited_for_late() -> None:
    """Also by nobody: then the call that needs the memory waits."""

    def task(calls: PreparedCalls) -> None:
        gather = calls.all_gather(tensor(0, 3000))
        outs = [np.full(2 * 3000, np.nan, DTYPE) for _ in range(7)]
        works: list[Work] = []
        for k, out in enumerate(outs):
            works.append(gather(tensor(calls.rank, 3000, k, wild=k in (1, 2, 5)), out))
            assert [work.judged for work in works] == [True] * (k - 2) + [False] * min(k + 1, 3)
        for work in works[-3:]:
            work.wait()
        for k, out in enumerate(outs):
            parts = [tensor(r, 3000, k, wild=k in (1, 2, 5)) for r in range(2)]
            assert same(out, np.concatenate(parts))

    run(2, "network", task, depth=3)


@pytest.mark.parametrize("fails", [False, True])
def test_later_waits_wait_for_the_first_and_end_as_it_does(fails: bool) -> None:
    def task(calls: PreparedCalls) -> None:
        xs = [tensor(rank, 3000, wild=True) for rank in range(2)]
        out, gather = np.zeros(2 * 3000, DTYPE), calls.all_gather(xs[0])
        begun, go = threading.Event(), threading.Event()
        exactly = gather._exactly

        def once_more(*arrays: Any) -> None:
            begun.set()
            assert go.wait(10)
            # The thread that is in the first one goes on.
            assert work.wait()
            if fails:
                raise LookupError("out of luck")
            exactly(*arrays)

        def wait() -> str:
            try:
                return f"{work.wait()}, {same(out, np.concatenate(xs))}"
            except LookupError as error:
                return str(error)

        with (
            unittest.mock.patch.object(gather, "_exactly", once_more),
            ThreadPoolExecutor(2) as pool,
        ):
            work = gather(xs[calls.rank], out)
            first = pool.submit(wait)
            assert begun.wait(10)
            second = pool.submit(wait)
            time.sleep(0.02)
            assert not second.done()
            assert not work.judged
            go.set()
            wanted = "out of luck" if fails else "True, True"
            assert [first.result(), second.result(), wait()] == [wanted] * 3

    run(2, "network", task)


def test_calls_on_the_host_run_no_more_when_they_return() -> None:
    def task(calls: PreparedCalls) -> None:
        x, out = tensor(calls.rank, 300), np.empty(600, DTYPE)
        gathers = [calls.all_gather(x) for _ in range(3)]
        works = [gather(x, out) for gather in gathers]
        mine = [(call.name, call.rank) for call in running_calls()]
        assert ("returned", calls.rank) not in mine
        assert not any(work.judged for work in works)

    run(2, "network", task, name="returned")


def test_works_that_are_dropped_are_running_no_more() -> None:
    """As on a GPU, where they are until somebody waits for them."""
    call = Call(0, "all_gather", 0, "", "dropped")
    running.begin(call)
    work = Work(None, None, call, None, None)
    assert "dropped" in [call.name for call in running_calls()]
    del work
    gc.collect()
    assert "dropped" not in [call.name for call in running_calls()]


def test_messages_become_as_large_as_is_needed() -> None:
    sizes: list[int] = []

    def task(calls: PreparedCalls) -> None:
        gather = calls.all_gather(tensor(0, 100_000))
        out = np.empty(2 * 100_000, DTYPE)
        for k in range(40):
            gather(tensor(calls.rank, 100_000), out).wait()
            if calls.rank == 0 and k in (0, 39):
                sizes.append(gather._slots[0].exchanges[0].layouts[0].nbytes)

    run(2, "network", task)
    exact = tw.encode(tensor(0, 100_000)).nbytes
    assert exact < sizes[1] < 1.05 * exact < sizes[0]


@pytest.mark.parametrize("route", ROUTES)
def test_calls_of_many_sizes_share_memory(route: str) -> None:
    """One after the other, in any order: the bits are those of calls that are alone."""
    sizes = [30_000 + 128 * k for k in range(40)]

    def task(calls: PreparedCalls) -> None:
        reduces = {n: calls.all_reduce(tensor(0, n), algorithm="two-shot") for n in sizes}
        gathers = {n: calls.all_gather(tensor(0, n)) for n in sizes}
        for n in (*sizes, *reversed(sizes)):
            x, total = tensor(calls.rank, n), np.empty(n, DTYPE)
            whole = np.empty(2 * n, DTYPE)
            first, second = reduces[n](x, total), gathers[n](x, whole)
            first.wait()
            second.wait()
            both = [tensor(rank, n) for rank in range(2)]
            wanted = sum(part.astype(np.float32) for part in both).astype(DTYPE)
            assert total.tobytes() == wanted.tobytes()
            assert whole.tobytes() == np.concatenate(both).tobytes()
        route = calls.route
        if isinstance(route, PeerRoute):
            regions = route._regions.values()
            assert sum(p.nbytes for region in regions for p in region.parts) < 120 * max(sizes)
        else:
            assert isinstance(route, NetworkRoute)
            # Of four purposes in two phases the memory of the largest call is left.
            blocks = list(route._blocks.values())
            assert len(blocks) <= 8
            assert sum(block.memory.nbytes for block in blocks) < 30 * max(sizes)
            slots = [
                slot for call in (*reduces.values(), *gathers.values()) for slot in call._slots
            ]
            used = {
                id(block) for slot in slots for e in slot.exchanges for block in e.messages._blocks
            }
            assert used == {id(block) for block in blocks}

    run(2, route, task)


def test_memory_of_large_calls_that_are_over_is_given_back() -> None:
    large, small = 60_000, 3000

    def task(calls: PreparedCalls) -> None:
        first, then = (calls.all_reduce(tensor(0, n), algorithm="two-shot") for n in (large, small))
        out, total = np.empty(large, DTYPE), np.empty(small, DTYPE)
        for _ in range(2):
            first(tensor(calls.rank, large), out).wait()
            then(tensor(calls.rank, small), total).wait()
        route = calls.route
        assert isinstance(route, NetworkRoute)

        def held() -> int:
            gc.collect()
            return sum(block.memory.nbytes for block in route._blocks.values())

        assert held() > large
        first.rest()
        del first
        assert held() > large
        # A work that nobody has waited for has its own.
        work = then(tensor(calls.rank, small, 1), total)
        route.trim()
        for k in range(2, 5):
            other = np.empty(small, DTYPE)
            then(tensor(calls.rank, small, k), other).wait()
            assert same(other, both(small, k))
        work.wait()
        assert same(total, both(small, 1))
        assert 0 < held() < 20 * small

    def both(n: int, k: int) -> Any:
        parts = [tensor(rank, n, k).astype(np.float32) for rank in range(2)]
        return (parts[0] + parts[1]).astype(DTYPE)

    run(2, "network", task)


@pytest.mark.parametrize("route", ROUTES)
def test_calls_at_rest_have_no_memory(route: str) -> None:
    """Except for works that somebody waits for."""

    def task(calls: PreparedCalls) -> None:
        gather, out = calls.all_gather(tensor(0, 1000)), np.empty(2000, DTYPE)
        wanted = np.concatenate([tensor(rank, 1000) for rank in range(2)]).tobytes()
        for _ in range(3):
            work = gather(tensor(calls.rank, 1000), out)
            gather.rest()
            assert sum(bool(slot.exchanges) for slot in gather._slots) == 1
            work.wait()
            assert out.tobytes() == wanted
            gather.rest()
            assert not any(slot.exchanges for slot in gather._slots)
            del work
            if isinstance(calls.route, NetworkRoute):
                assert not list(calls.route._blocks.values())

    run(2, route, task)


@pytest.mark.parametrize("depth", [2, 3, 4])
def test_steps_take_memory_in_the_same_order(depth: int) -> None:
    def task(calls: PreparedCalls) -> None:
        gather = calls.all_gather(tensor(0, 1000))
        out = np.empty(2000, DTYPE)
        for length in range(1, 7):
            steps = []
            for _ in range(6):
                calls.restart()
                phases = []
                for _ in range(length):
                    phases.append(calls.phase)
                    gather(tensor(calls.rank, 1000), out).wait()
                steps.append(phases)
            flat = [phase for phases in steps for phase in phases]
            assert all(a != b for a, b in itertools.pairwise(flat))
            # Two orders by phases at most.
            assert steps[2:4] == steps[4:6]

    run(2, "peers", task, depth=depth)


def test_capacity() -> None:
    capacity = Capacity(bound=1 << 20, raw_nbytes=1 << 20)
    first = capacity.nbytes
    assert first % 128 == 0
    assert 1 << 20 <= 10 * first < 1.05 * (1 << 20)
    capacity.learn(1000)
    assert capacity.nbytes == first
    capacity.learn(300_000)
    assert 300_000 < capacity.nbytes < 600_000
    grown = capacity.nbytes
    for _ in range(15):
        capacity.learn(1000)
        assert capacity.nbytes == grown
    capacity.learn(1000)
    assert 1000 < capacity.nbytes < first
    # It was too small once: it may shrink again after twice as many.
    capacity.learn(300_000)
    grown = capacity.nbytes
    for _ in range(31):
        capacity.learn(1000)
        assert capacity.nbytes == grown
    capacity.learn(1000)
    assert 1000 < capacity.nbytes < first
    capacity.learn(1 << 30)
    assert capacity.nbytes == 1 << 20


@pytest.mark.parametrize(("noise", "most"), [(0.0, 1.08), (0.01, 1.2), (0.1, 1.75)])
def test_capacities_spare_what_needs_vary(noise: float, most: float) -> None:
    """Steady needs leave little idle, and what grows with the steps fits all the same."""
    rng = np.random.default_rng(0)
    raw = 1 << 24
    capacity = Capacity(bound=raw, raw_nbytes=raw)
    for step in range(200):
        share = 0.08 - 0.05 * 0.9**step
        need = round(share * (1 + noise * rng.uniform(-1, 1)) * raw)
        assert need <= capacity.nbytes
        capacity.learn(need)
    assert capacity.nbytes < most * 0.08 * raw


def test_capacities_settle() -> None:
    """Where needs of several modules take turns, or fall for long, there are few capacities."""
    capacity = Capacity(bound=1 << 24, raw_nbytes=1 << 24)
    found = {capacity.nbytes}
    for step in range(2000):
        for module in range(40):
            # From 5 % to 1 %, and by a third more in some modules than in others.
            share = (0.01 + 0.04 * 0.99**step) * (1 + module % 7 / 18)
            capacity.learn(round(share * (1 << 24)))
            found.add(capacity.nbytes)
    assert len(found) <= 8
    assert capacity.nbytes < 0.03 * (1 << 24)


def test_capacities_grow_together() -> None:
    """One that is outgrown takes along those that soon would be."""
    capacity = Capacity(bound=1 << 20, raw_nbytes=1 << 20)
    first = capacity.nbytes
    capacity.learn(first // 2)
    capacity.refit()
    assert capacity.nbytes == first
    capacity.learn(first * 7 // 8)
    assert capacity.nbytes == first
    capacity.refit()
    assert first < capacity.nbytes <= first * 5 // 4


def test_exchanges_have_capacities_of_their_own() -> None:
    """Terms that do not compress, of which the sums do."""

    def task(calls: PreparedCalls) -> None:
        n = 40_000
        reduce = calls.all_reduce(tensor(0, n), algorithm="two-shot")
        out = np.empty(n, DTYPE)
        noise = (2.0 ** np.random.default_rng(0).uniform(-90, 90, n)).astype(DTYPE)
        for _ in range(4):
            x = noise if calls.rank else -noise
            reduce(x, out).wait()
            assert not out.any()
        swapped, gathered = reduce._slots[0].capacities
        assert swapped > 2 * gathered

    run(2, "network", task)


@pytest.mark.parametrize("route", ROUTES)
def test_other_calls_are_refused_when_they_are_prepared(route: str) -> None:
    def task(calls: PreparedCalls) -> None:
        like = tensor(0, 1000 + 2 * calls.rank)
        with pytest.raises(CollectiveError, match=r"ranks differ: ranks .0.: bfloat16 .1000,"):
            calls.all_gather(like)

    run(2, route, task)


@pytest.mark.parametrize(
    "option", [{"depth": 3}, {"checksum": False}, {"codec": "raw"}, {"seed": 1}]
)
def test_ranks_with_other_options_are_refused(option: dict[str, Any]) -> None:
    """Of other depths they would learn sizes from other calls, and read past messages."""

    def task(transport: ThreadTransport) -> None:
        with pytest.raises(CollectiveError, match=r"PreparedCalls #0 .* ranks differ"):
            PreparedCalls(transport, **option if transport.rank else {})

    run_ranks(2, task, 5)


REFUSED: tuple[Callable[[PreparedCalls], Any], ...] = (
    lambda calls: calls.all_gather([]),
    lambda calls: calls.all_to_all(tensor(0, 7)),
    lambda calls: calls.reduce_scatter(np.ones(8, np.int32)),
    lambda calls: calls.reduce_scatter(tensor(0, 8), wire="float32"),
    lambda calls: calls.all_reduce(tensor(0, 8), algorithm="ring"),
    lambda calls: calls.broadcast(tensor(0, 8), root=2),
    lambda calls: calls.all_gather("no array"),
)


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_what_one_rank_is_refused_the_others_do_not_wait_for(number: int) -> None:
    def task(calls: PreparedCalls) -> None:
        with pytest.raises(CollectiveError, match=r"ranks differ: .*ranks .1.: "):
            if calls.rank == 1:
                REFUSED[number](calls)
            else:
                calls.all_gather(tensor(0, 8))
        # All go on.
        x, out = tensor(calls.rank, 8), result("all_gather", 8, 2)
        calls.all_gather(x)(x, out).wait()

    run(2, "network", task, timeout=5)


def test_a_lost_rank_is_an_error_with_names_and_the_last() -> None:
    def task(calls: PreparedCalls) -> None:
        x = tensor(0, 1000)
        gather, out = calls.all_gather(x), np.empty(2000, DTYPE)
        if calls.rank == 1:
            calls.close()
            return
        with pytest.raises(CollectiveError, match="all_gather #2 failed in stage 'exchange'"):
            gather(x, out)
        with pytest.raises(CollectiveError, match="an earlier call has failed"):
            gather(x, out)

    run(2, "network", task)


def test_a_late_rank_is_an_error_for_peers() -> None:
    def task(calls: PreparedCalls) -> None:
        x = tensor(0, 1000)
        gather, out = calls.all_gather(x), np.empty(2000, DTYPE)
        if calls.rank == 1:
            return
        with pytest.raises(CollectiveError, match=r"did not come within 0\.3 s"):
            gather(x, out)

    run(2, "peers", task, timeout=0.3)


def test_wrong_arrays_are_refused_before_anything_is_sent() -> None:
    def task(calls: PreparedCalls) -> None:
        x, out = tensor(0, 1000), np.empty(2000, DTYPE)
        gather, swap = calls.all_gather(x), calls.all_to_all(x)
        with pytest.raises(ValueError, match="x is bfloat16 of 999 elements; needed"):
            gather(x[:999], out)
        with pytest.raises(ValueError, match="out is float32"):
            gather(x, out.astype(np.float32))
        with pytest.raises(ValueError, match="out overlaps x"):
            swap(x, x)
        with pytest.raises(ValueError, match="x lies in out, but not where its own values come"):
            gather(out[500:1500], out)
        with pytest.raises(ValueError, match="not contiguous"):
            gather(np.empty(2000, DTYPE)[::2], out)
        with pytest.raises(ValueError, match="a multiple of 2"):
            calls.all_to_all(x[:999])
        with pytest.raises(ValueError, match="algorithm is 'ring'"):
            calls.all_reduce(x, algorithm="ring")
        gather(x, out).wait()

    run(2, "network", task)


@pytest.mark.parametrize("route", ROUTES)
def test_memory_of_lists_that_lies_over_other_memory_is_refused(route: str) -> None:
    def task(calls: PreparedCalls) -> None:
        n = 4096
        whole, other = np.zeros(2 * n, DTYPE), np.zeros(2 * n, DTYPE)
        xs = [tensor(0, n), whole[:n]]
        with pytest.raises(ValueError, match="x lies in out, but not where its own values come"):
            calls.all_gather(xs)(xs, [whole, other])
        for algorithm in ("one-shot", "two-shot"):
            reduce = calls.all_reduce(xs, algorithm=algorithm)
            with pytest.raises(ValueError, match="x lies in out"):
                reduce(xs, [whole[n - 8 : 2 * n - 8], other[:n]])
            # In place each is where its own result comes.
            reduce(xs, xs).wait()

    run(2, route, task)


@pytest.mark.parametrize("route", ROUTES)
def test_calls_go_on_after_arrays_that_cannot_be_used(route: str) -> None:
    torch = pytest.importorskip("torch")

    def task(calls: PreparedCalls) -> None:
        x, locked = tensor(calls.rank, 1000), np.zeros(2000, DTYPE)
        locked.flags.writeable = False
        wide, half = np.zeros(2000, DTYPE), locked[:500]
        made: dict[Any, Any] = {
            calls.all_gather(x): locked,
            calls.all_to_all(x): locked[:1000],
            calls.reduce_scatter(x): half,
            calls.all_reduce(x, algorithm="one-shot"): locked[:1000],
            calls.all_reduce(x, algorithm="two-shot"): locked[:1000],
        }
        for call, out in made.items():
            with pytest.raises(ValueError, match="out is read-only; needed: memory that can be"):
                call(x, out)
            with pytest.raises(ValueError, match="x is torch on the host; needed: numpy"):
                call(torch.zeros(1000, dtype=torch.bfloat16), wide)
            with pytest.raises(ValueError, match="out is torch on the host; needed: numpy"):
                call(x, torch.zeros(out.size, dtype=torch.bfloat16))
            call(x, wide[: out.size]).wait()
        spread = calls.broadcast(x, root=0)
        if calls.rank:
            with pytest.raises(ValueError, match="x is read-only"):
                spread(locked[:1000])
        spread(locked[:1000] if calls.rank == 0 else wide[:1000]).wait()

    run(2, route, task)


@pytest.mark.parametrize("route", ROUTES)
def test_calls_go_on_after_tensors_that_may_not_be_written(route: str) -> None:
    torch = pytest.importorskip("torch")

    def task(calls: PreparedCalls) -> None:
        x, leaf = torch.ones(1000), torch.zeros(2000, requires_grad=True)
        with torch.inference_mode():
            inner = torch.zeros(2000)
        made: dict[Any, tuple[int, float]] = {
            calls.all_gather(x): (2000, 1.0),
            calls.all_to_all(x): (1000, 1.0),
            calls.reduce_scatter(x): (500, 2.0),
            calls.all_reduce(x, algorithm="one-shot"): (1000, 2.0),
            calls.all_reduce(x, algorithm="two-shot"): (1000, 2.0),
        }
        for call, (n, value) in made.items():
            with pytest.raises(ValueError, match="out is an inference tensor, which"):
                call(x, inner[:n])
            with pytest.raises(ValueError, match="out requires grad, and autograd would not see"):
                call(x, leaf[:n])
            with torch.no_grad():
                call(x, leaf[:n]).wait()
            with torch.inference_mode():
                call(x, inner[:n]).wait()
            for out in (leaf, inner):
                assert torch.equal(out[:n], torch.full((n,), value))
        spread = calls.broadcast(x, root=0)
        if calls.rank:
            with pytest.raises(ValueError, match="x is an inference tensor"):
                spread(inner[:1000])
        spread(inner[:1000] if calls.rank == 0 else x).wait()
        assert torch.equal(x, inner[:1000] if calls.rank else torch.ones(1000))

    run(2, route, task)


def test_results_that_were_allowed_are_written_again_in_another_mode() -> None:
    torch = pytest.importorskip("torch")

    def task(calls: PreparedCalls) -> None:
        xs = [torch.from_numpy(tensor(r, 3000, wild=True).view(np.int16)) for r in range(2)]
        xs = [x.view(torch.bfloat16) for x in xs]
        for mode in (torch.no_grad, torch.inference_mode):
            gather = calls.all_gather(xs[0])
            with mode():
                out = torch.zeros(6000, dtype=torch.bfloat16).requires_grad_(mode is torch.no_grad)
                work = gather(xs[calls.rank], out)
            work.wait()
            assert work.repeated
            found = out.detach().view(torch.int16)
            assert torch.equal(found, torch.cat(xs).view(torch.int16))

    run(2, "network", task)


def test_the_root_of_a_lossy_broadcast_needs_memory_that_can_be_written() -> None:
    def task(calls: PreparedCalls) -> None:
        x, locked = tensor(0, 1000), tensor(0, 1000)
        locked.flags.writeable = False
        spread = calls.broadcast(x, root=0)
        with pytest.raises(ValueError, match="x is read-only"):
            spread(locked)
        spread(x).wait()

    run(2, "network", task, codec="mx")


@pytest.mark.parametrize("codec", ["delta", "tahquant"])
def test_codecs_that_need_more_than_elements_are_refused(codec: str) -> None:
    def task(transport: ThreadTransport) -> None:
        with pytest.raises(ValueError, match=r"which (codes a tensor against|takes a parameter)"):
            PreparedCalls(transport, codec)
        with pytest.raises(ValueError, match=r"which (codes a tensor against|takes a parameter)"):
            tw.Communicator(transport, codec)

    run_ranks(1, task)


@pytest.mark.parametrize("route", ROUTES)
def test_trace(route: str) -> None:
    def task(calls: PreparedCalls) -> None:
        x, out = tensor(calls.rank, 40_000), np.empty(80_000, DTYPE)
        gather = calls.all_gather(x)
        for _ in range(3):
            gather(x, out).wait()
        records = calls.trace()
        assert [r.collective for r in records] == ["all_gather"] * 2
        assert [r.sequence for r in records] == [3, 4]
        for r in records:
            assert r.raw_bytes == x.nbytes
            assert 0.6 * x.nbytes < r.wire_bytes < 0.9 * x.nbytes
            assert set(r.seconds) == {"encode", "exchange", "decode"}
            assert r.error is None
            assert r.device_seconds == {}

    run(2, route, task, trace=2)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES[:-1])
@pytest.mark.parametrize("codec", ["zipccl", "mx"])
def test_operations_of_a_call_do_not_grow_with_the_ranks(case: str, codec: str) -> None:
    """What PyTorch would launch on a GPU, besides encoding and decoding; views launch nothing."""
    torch = pytest.importorskip("torch")
    from torch.utils._python_dispatch import TorchDispatchMode

    views = ("slice", "view", "detach", "expand", "as_strided", "alias", "empty", "split")

    class Counted(TorchDispatchMode):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.launches: list[str] = []

        def __torch_dispatch__(self, op: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
            name = str(op).split(".")[1]
            if not any(view in name for view in views):
                self.launches.append(name)
            return op(*args, **(kwargs or {}))

    def launches(world: int) -> list[str]:
        def task(calls: PreparedCalls) -> list[str]:
            x = torch.randn(world * 4096).bfloat16()
            out = torch.empty(result(case, x.numel(), world).size, dtype=torch.bfloat16)
            call = prepare(calls, case, x)
            call(x, out).wait()
            if calls.rank:
                call(x, out).wait()
                return []
            with Counted() as counted:
                call(x, out).wait()
            return list(counted.launches)

        found: list[str] = run(world, "network", task, 60, pieces="pieces" in case, codec=codec)[0]
        return found

    assert launches(2) == launches(4)


def test_who_has_left_is_known_at_once() -> None:
    torch = pytest.importorskip("torch")
    from tightwire.adapters.transports.presence import Presence

    store = torch.distributed.HashStore()
    ranks = [Presence(store, rank, 3) for rank in range(3)]
    later = [Presence(store, rank, 3) for rank in range(3)]
    assert [one.left() for one in ranks] == [{}, {}, {}]
    ranks[1].leave("KeyError: 5")
    ranks[1].leave("it comes too late")
    assert [one.left() for one in ranks] == [{1: "KeyError: 5"}, {}, {1: "KeyError: 5"}]
    del ranks[2]
    assert ranks[0].left() == {1: "KeyError: 5", 2: ""}
    assert [one.left() for one in later] == [{}, {}, {}]

    class Never:
        def query(self) -> bool:
            return False

    pending = tensors.PendingHostCopy(np.zeros(1, np.int64))
    pending._event = Never()
    with pytest.raises(ConnectionError, match=r"ranks \[1, 2\] have left; KeyError: 5"):
        pending.wait(20, ranks[0].left)
    with pytest.raises(TimeoutError, match="nothing arrived within"):
        pending.wait(0.2, later[0].left)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_what_has_no_kernels_is_coded_on_the_host(
    world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors here stand for those of a GPU, whose float64 no kernel of zipccl takes."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    from tightwire import gpu_prepared, prepared

    monkeypatch.setattr(prepared, "_gpu_for", lambda backend, *values: gpu_prepared)

    def task(calls: PreparedCalls) -> Any:
        whole = torch.arange(world * 2048.0).double() * (calls.rank + 1)
        out = torch.full((2048,), torch.nan).double()
        reduce = calls.reduce_scatter(whole)
        assert reduce._recordings._recorder is None
        for _ in range(3):
            reduce(whole, out).wait()
        gather = calls.all_gather([out, out])
        outs = [torch.empty(world * 2048).double() for _ in range(2)]
        gather([out, out], outs).wait()
        return [out, *outs]

    found = run(world, "network", task)
    total = torch.arange(world * 2048.0).double() * sum(range(1, world + 1))
    for rank, (out, *outs) in enumerate(found):
        assert torch.equal(out, total[rank * 2048 : (rank + 1) * 2048])
        assert all(torch.equal(whole, total) for whole in outs)


def test_the_faster_way_is_taken_and_looked_for_again() -> None:
    def task(transport: ThreadTransport) -> None:
        like, made = np.zeros(1), []
        slow_rank = transport.rank == 1
        pause = {"native": 0.004, "ours": 0.0}

        def way(name: str) -> Callable[[], None]:
            def call() -> None:
                made.append(name)
                # What counts is the slowest rank.
                time.sleep(pause[name] if slow_rank else 0)

            return call

        switch = Faster(transport, budget=20, again=5)
        for _ in range(5):
            assert not switch.native("a", way("native"), way("ours"), like)
        measured = len(made)
        assert 2 * 3 <= measured <= 2 * 9
        pause.update(native=0.0, ours=0.004)
        for _ in range(5):
            assert switch.native("a", way("native"), way("ours"), like)
        assert measured < len(made) <= 2 * measured
        native, ours = switch.seconds["a"]
        assert native < 0.004 < ours
        spent = Faster(transport, budget=0)
        made.clear()
        assert not spent.native("b", way("native"), way("ours"), like)
        assert not made
        # Others go the way of those that were measured.
        spent.seconds = {"c": (1.0, 0.5), "d": (2.0, 3.0)}
        assert spent.native("e", way("native"), way("ours"), like)
        spent.seconds["c"] = (1.5, 0.1)
        assert not spent.native("f", way("native"), way("ours"), like)
        assert not made

    run_ranks(2, task)
