"""Automatic scaling: how mu follows overflows, what it does to scales and sums."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import tightwire as tw
from lossy import inputs
from tightwire import arrays
from tightwire.adapters.collectives.auto_scale import AutoScale, Scaling
from tightwire.adapters.collectives.calls import Call
from tightwire.adapters.collectives.session import Topology
from tightwire.adapters.transports.threads import ThreadTransport, run_ranks
from tightwire.codecs.mx import Mx
from tightwire.formats.dtypes import BY_NAME

Array = npt.NDArray[Any]
HOPS: tuple[Topology, ...] = ("ring", "butterfly")
LIBRARIES = ("numpy", "torch")


def agreed(element: str = "e4m3") -> tw.Codec:
    return tw.codec("mx", element=element, scale_rule="agreed")


def spec_of(element: str) -> Mx:
    spec = agreed(element).spec
    assert isinstance(spec, Mx)
    return spec


def as_library(x: Array, library: str) -> Any:
    if library == "numpy":
        return x
    return pytest.importorskip("torch").from_numpy(x)


def scaling_of(ranks: int, element: str = "e4m3", **how: float) -> Scaling:
    return Scaling(AutoScale(**how), spec_of(element), ranks)


def next_sum(scaling: Scaling, scales: Array, overflowed: int, library: str = "numpy") -> Array:
    """The scales of a sum after one that did so or did not overflow on another rank."""
    given = as_library(scales.copy(), library)
    own, log = scaling.travelling(given)
    assert [own.dtype, log.dtype] == [given.dtype] * 2
    assert (own.shape, log.shape) == ((1,), (4,))
    flag = as_library(np.array([overflowed], np.uint8), library)
    scaling.widen(given, flag)
    return np.asarray(given)


@pytest.mark.parametrize("library", LIBRARIES)
def test_mu_doubles_and_shrinks_between_its_bounds(library: str) -> None:
    """From the number of ranks, which the first sum has; sums of nothing change nothing."""
    scaling = scaling_of(4, shrink=2**-0.5)
    some, none = np.array([0, 120, 0], np.uint8), np.array([0, 255, 250, 0], np.uint8)
    assert scaling.mu == 4
    found = []
    for over, scales in [(0, some), (0, some), *[(1, some)] * 3, (0, none), *[(0, none)] * 3]:
        next_sum(scaling, scales, over, library)
        found.append(np.log2(scaling.mu))
    # It is the sum before that counts.
    expected = [2, 1.5, 2.5, 3, 3, 2.5, 2.5, 2.5, 2.5]
    assert np.allclose(found, expected, atol=1e-4)
    for k in range(9):
        next_sum(scaling, some, 0, library)
        assert np.isclose(np.log2(scaling.mu), max(2.5 - k / 2, 0), atol=1e-4)
    assert np.isclose(scaling_of(3).mu, 3, rtol=1e-4)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("element", ["e4m3", "e2m1", "int8"])
def test_scales_become_larger(element: str, library: str) -> None:
    scaling = scaling_of(5, element, shrink=0.9)
    special = 255 - spec_of(element).format.emax
    # mu is 5, 4.5, 4.05, 3.645
    for steps in (3, 3, 3, 2):
        before = np.arange(256).astype(np.uint8)
        expected = np.where(before < special, np.minimum(before.astype(int) + steps, 254), before)
        assert np.array_equal(next_sum(scaling, before, 0, library), expected)


def test_mu_goes_into_a_checkpoint() -> None:
    scaling, again = (scaling_of(6, shrink=0.8) for _ in range(2))
    scales = np.full(9, 100, np.uint8)
    for _ in range(3):
        next_sum(scaling, scales, 0)
    again.load_state_dict(json.loads(json.dumps(scaling.state_dict())))
    assert again.mu == scaling.mu
    for over in (0, 1, 0, 0):
        assert np.array_equal(next_sum(scaling, scales, over), next_sum(again, scales, over))
        assert again.mu == scaling.mu
    # Of fewer ranks than there were.
    fewer = scaling_of(2)
    fewer.load_state_dict({"log2_mu": 5.0, "active": 1})
    assert fewer.mu == 4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_overflows_are_counted(library: str, dtype: str) -> None:
    """Of elements as large as their scale allows, behind whole blocks too; not of special ones."""
    n, kind = 1000, BY_NAME[dtype]
    scales = np.full(32, 127, np.uint8)
    scales[3], scales[31] = 255, 129
    x = np.zeros(n, np.float32)
    x[[5, 40, 999]] = 448, -448, 4 * 448
    x[41], x[998] = 440, 448
    x[96:128] = np.nan
    sums = arrays.from_bits(
        x.astype(kind.numpy).view(kind.bits), kind, (n,), arrays.Target(library, None)
    )
    for threshold, expected in ((0.0029, True), (0.0031, False)):
        for cuts in ([0, n], [0, 320, n]):
            scaling = scaling_of(2, threshold=threshold)
            parts = [sums[a:b] for a, b in itertools.pairwise(cuts)]
            given = [scales[a // 32 : -(-b // 32)] for a, b in itertools.pairwise(cuts)]
            scaling.count(parts, given)
            flag, _ = scaling.travelling(scales)
            assert (flag.dtype, flag.shape) == (np.uint8, (1,))
            assert bool(flag[0]) == expected
    scaling.count([sums[:0]], [scales[:0]])
    assert not scaling.travelling(scales)[0][0]
    # Infinity has no scale that it fits in.
    scaling.count([np.full(n, np.inf, np.float32)], [np.full(32, 247, np.uint8)])
    assert not scaling.travelling(scales)[0][0]


@pytest.mark.slow
@pytest.mark.parametrize("topology", HOPS)
def test_scales_follow_the_sums(topology: Topology) -> None:
    """Terms that cancel need less room than terms that add up; all ranks know it alike."""
    size, n = 4, 4001
    rng = np.random.default_rng(0)
    spread = rng.standard_normal((size, n)).astype(np.float32)
    alike = np.abs(np.tile(spread[:1], (size, 1)))

    def task(transport: ThreadTransport) -> tuple[list[float], list[Array]]:
        how = AutoScale(threshold=0.01, shrink=2**-0.5)
        comm = tw.Communicator(transport, agreed(), topology=topology, scaling=how)
        assert comm.scaling is not None
        found, sums = [], []
        for x in [spread] * 9 + [alike] * 9:
            sums.append(comm.all_reduce(x[comm.rank]))
            found.append(comm.scaling.mu)
        return found, sums

    (mus, sums), *others = run_ranks(size, task)
    for other, theirs in others:
        assert other == mus
        assert all(a.tobytes() == b.tobytes() for a, b in zip(sums, theirs, strict=True))
    assert np.allclose(mus[:2], [4, 4 * 2**-0.5], rtol=1e-3)
    # At most one of these sums overflowed in too many places, and mu came back.
    assert min(mus[:9]) < 2
    grown = mus[9:]
    assert any(b > a for a, b in itertools.pairwise(grown))
    errors = [
        float(((y - xs) ** 2).sum() / (xs**2).sum())
        for y, xs in zip(sums, [spread.sum(0)] * 9 + [alike.sum(0)] * 9, strict=True)
    ]
    # Saturated by a half where mu was too small, else rounded.
    assert max(errors[:2]) < 2e-3
    worst = int(np.argmax(errors[9:]))
    assert errors[9 + worst] > 0.02
    assert min(errors[9 + worst + 1 :]) < 2e-3


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["compressed", "pipelined"])
def test_nothing_saturates_while_mu_is_the_number_of_ranks(
    algorithm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tightwire.adapters.collectives.pipelined._PIECE", 512)
    size = 3
    for dtype in ("float32", "bfloat16"):
        xs = np.abs(np.stack(inputs(agreed(), "float32", size, 7001)))
        xs = xs.astype(BY_NAME[dtype].numpy)

        def task(transport: ThreadTransport, xs: Array = xs) -> Array:
            comm = tw.Communicator(
                transport,
                agreed("e5m2"),
                topology="ring",
                algorithm=algorithm,
                pieces=3 if algorithm == "pipelined" else None,
                scaling=AutoScale(shrink=1),
            )
            first, again = (comm.all_reduce(xs[comm.rank]) for _ in range(2))
            assert first.tobytes() == again.tobytes()
            found: Array = first
            return found

        exact = xs.astype(np.float64).sum(axis=0)
        found = run_ranks(size, task)[0].astype(np.float64)
        # 2 bits behind the leading one are rounded at each of three hops; small ones lose more.
        blocks = np.pad(exact, (0, -exact.size % 32)).reshape(-1, 32).max(axis=1)
        bound = np.maximum(exact, np.repeat(blocks, 32)[: exact.size] * 2**-14)
        assert (np.abs(found - exact) <= 3.2 * 0.125 * bound).all()


@pytest.mark.slow
def test_scatters_adapt_too() -> None:
    def task(transport: ThreadTransport) -> list[float]:
        comm = tw.Communicator(transport, agreed(), topology="ring", scaling=AutoScale(shrink=0.6))
        assert comm.scaling is not None
        found = []
        for _ in range(7):
            comm.reduce_scatter(np.ones((2, 999), np.float32))
            found.append(comm.scaling.mu)
        return found

    # 1 needs as much room as its scale has; 2 overflows it when mu has come down to 1.
    expected = [2, 1.2, 1, 2, 1.2, 1, 2]
    for mus in run_ranks(2, task):
        assert np.allclose(mus, expected, rtol=1e-3)


def test_data_after_many_sums_of_nothing_fits() -> None:
    def task(transport: ThreadTransport) -> None:
        comm = tw.Communicator(transport, agreed(), topology="ring", scaling=AutoScale(shrink=0.6))
        x = np.zeros(1000, np.float32)
        for _ in range(9):
            assert not comm.all_reduce(x).any()
        assert (comm.all_reduce(x + np.float32(1.75)) == 7).all()

    run_ranks(4, task)


def test_pieces_that_are_not_coded_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeros in what is coded, and behind them elements that travel as they are."""
    monkeypatch.setattr("tightwire.adapters.collectives.pipelined._PIECE", 512)

    def task(transport: ThreadTransport) -> list[float]:
        comm = tw.Communicator(
            transport,
            agreed(),
            topology="ring",
            algorithm="pipelined",
            pieces=2,
            scaling=AutoScale(shrink=0.6),
        )
        assert comm.scaling is not None
        x = np.zeros((2, 522), np.float32)
        x[:, 512:] = 1.75
        x[:, 0] = 1e-3
        found = []
        for _ in range(5):
            total = comm.all_reduce(x.reshape(-1)).reshape(2, 522)
            assert (total[:, 512:] == 3.5).all()
            found.append(comm.scaling.mu)
        return found

    for mus in run_ranks(2, task):
        assert mus[1] < mus[0]
        assert max(mus[2:]) <= 2


def test_timing_paths_leaves_mu_alone() -> None:
    def task(transport: ThreadTransport) -> None:
        comm = tw.Communicator(
            transport, agreed(), topology="ring", algorithm="auto", scaling=AutoScale(shrink=0.6)
        )
        scaling = comm.scaling
        assert scaling is not None
        comm.all_reduce(np.ones(5000, np.float32))
        assert comm.trace()[-1].algorithm.startswith(("native", "ring"))
        assert comm.scaling is scaling
        assert np.isclose(scaling.mu, 3, rtol=1e-4)

    run_ranks(3, task)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_in_two_shots_every_term_has_scales_of_its_own(dtype: str, op: Any) -> None:
    """So has the sum, which none of its terms' scales would hold."""
    size, kind = 5, BY_NAME[dtype].numpy

    def task(transport: ThreadTransport) -> None:
        comm = tw.Communicator(transport, agreed())
        x = np.full(9001, 1.75, np.float32).astype(kind)
        wanted = 8.75 if op == "sum" else 1.75
        total = comm.all_reduce(x, op=op).astype(np.float32)
        assert np.abs(total - wanted).max() <= wanted / 16
        share = comm.reduce_scatter(np.full((size, 1001), 1.75, np.float32))
        assert np.abs(share - 8.75).max() <= 8.75 / 16

    run_ranks(size, task)


def test_statistics_of_scales_are_compared_on_a_device() -> None:
    torch = pytest.importorskip("torch")

    def task(transport: ThreadTransport) -> str:
        comm = tw.Communicator(transport, agreed(), topology="ring")
        stats = torch.arange(5001).to(torch.uint8)
        if transport.rank == 1:
            stats[77] ^= 4
        call = Call(transport.rank, "all_reduce", 0, "")
        comm._statistics.summarize(call, stats, arrays.describe(np.ones(3, np.float32)))
        try:
            comm._statistics.judge(call)
        except tw.CollectiveError as error:
            return error.detail
        return "alike"

    others = "have other sums of statistics"
    assert run_ranks(3, task) == [f"ranks {ranks} {others}" for ranks in ([1], [0, 2], [1])]


def test_statistics_that_differ_are_refused() -> None:
    class Changed(ThreadTransport):
        def all_reduce(self, x: Any, op: Any = "sum") -> None:
            super().all_reduce(x, op)
            x[2] += self.rank == 1

    def task(transport: ThreadTransport) -> None:
        changed = Changed(transport.rank, transport._pipes, transport.timeout)
        comm = tw.Communicator(changed, agreed(), topology="ring")
        with pytest.raises(tw.CollectiveError, match="have other sums of statistics"):
            comm.all_reduce(np.ones(3000, np.float32))

    run_ranks(3, task)


def test_ranks_whose_mu_differs_are_refused() -> None:
    def task(transport: ThreadTransport) -> None:
        comm = tw.Communicator(transport, agreed(), topology="ring")
        assert comm.scaling is not None
        comm.all_reduce(np.ones(3000, np.float32))
        if transport.rank == 1:
            comm.scaling.load_state_dict({"log2_mu": 0.0, "active": 1})
        with pytest.raises(tw.CollectiveError, match="have other sums of statistics") as caught:
            comm.all_reduce(np.ones(3000, np.float32))
        assert ("[0, 2]" if transport.rank == 1 else "[1]") in caught.value.detail

    run_ranks(3, task)


def test_bad_calls_are_refused() -> None:
    for bad in ({"threshold": -1e-9}, {"threshold": 1.0}, {"shrink": 0.5}, {"shrink": 1.01}):
        with pytest.raises(ValueError, match="allowed"):
            AutoScale(**bad)
    wrong: Any
    for wrong in ("0.5", None, True):
        with pytest.raises(TypeError, match=r"threshold is .*allowed"):
            AutoScale(threshold=wrong)

    def task(transport: ThreadTransport) -> None:
        with pytest.raises(ValueError, match="scaling is given, codec is Mx"):
            tw.Communicator(transport, "mx", topology="ring", scaling=AutoScale())
        wrong: Any = 2.0
        with pytest.raises(TypeError, match="allowed: an AutoScale"):
            tw.Communicator(transport, agreed(), topology="ring", scaling=wrong)
        threshold = 1e-5 * (1 + transport.rank)
        with pytest.raises(tw.CollectiveError, match="ranks differ"):
            tw.Communicator(transport, agreed(), scaling=AutoScale(threshold))

    run_ranks(2, task)
