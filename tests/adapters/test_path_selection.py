"""``algorithm="auto"`` of messages and unequal all-to-alls: measured, and alike on all ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tightwire as tw
from tightwire.adapters.collectives import measuring
from tightwire.adapters.collectives.path_selection import Measured
from tightwire.adapters.collectives.session import Topology
from tightwire.adapters.transports.threads import ThreadTransport, run_ranks

DTYPE = ml_dtypes.bfloat16
MIB = 1 << 20


class Clock(threading.local):
    """A rank's own time: what its network takes, and nothing else."""

    seconds = 1.0


CLOCK = Clock()


class Slow(ThreadTransport):
    """A network of so many bytes a second, by which compressing pays."""

    speed = 5e6

    def send(self, x: Any, to: int) -> None:
        self._takes(x.nbytes)
        super().send(x, to)

    def all_to_all(self, out: Any, x: Any) -> None:
        self._takes(x.nbytes)
        super().all_to_all(out, x)

    def all_to_all_v(self, outs: Sequence[Sequence[Any]], xs: Sequence[Sequence[Any]]) -> None:
        self._takes(sum(piece.nbytes for pieces in xs for piece in pieces))
        super().all_to_all_v(outs, xs)

    def _takes(self, nbytes: int) -> None:
        CLOCK.seconds += 1e-5 + nbytes / self.speed


class Fast(Slow):
    """A network on which more calls cost more than more bytes."""

    speed = 1e18


@pytest.fixture(autouse=True)
def small_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "_MESSAGES_HOST", (1 << 16, 1 << 18))
    monkeypatch.setattr(measuring, "_MEASURED_HOST", (1 << 13, 1 << 16, 1 << 18))
    clock = SimpleNamespace(perf_counter=lambda: CLOCK.seconds)
    monkeypatch.setattr(measuring, "time", clock)


def on(network: type[Slow], world: int, task: Callable[[tw.Communicator], Any], **more: Any) -> Any:
    def run(transport: ThreadTransport) -> Any:
        transport.__class__ = network
        return task(tw.Communicator(transport, algorithm="auto", **more))

    return run_ranks(world, run)


def weights(rank: int, nbytes: int, call: int = 0) -> Any:
    rng = np.random.default_rng([rank, nbytes, call])
    return rng.normal(0, 0.02, nbytes // 2).astype(np.float32).astype(DTYPE)


def same(x: Any, y: Any) -> bool:
    return bool(x.dtype == y.dtype and x.tobytes() == y.tobytes())


def deliver(comm: tw.Communicator, sizes: Sequence[int]) -> list[tuple[str, str]]:
    """Messages of these sizes from rank 0 to rank 1; paths and reasons."""
    for k, nbytes in enumerate(sizes):
        x = weights(0, nbytes, k)
        if comm.rank == 0:
            comm.send(x, 1)
        elif comm.rank == 1:
            out = np.full(nbytes // 2, np.nan, DTYPE)
            comm.recv(out, 0)
            if comm.codec.lossless:
                assert same(out, x)
    return [(r.algorithm.split(",")[0], r.reason) for r in comm.trace()]


@pytest.mark.parametrize("codec", ["zipccl", "mx"])
def test_messages_are_compressed_where_that_is_faster(codec: str) -> None:
    sizes = [1000, MIB, 2 * MIB, MIB]
    sent, received = on(Slow, 2, lambda comm: deliver(comm, sizes), codec=codec)
    assert sent == received
    assert sent[0] == ("native", f"under {MIB} bytes")
    assert [path for path, _ in sent[1:]] == ["message"] * 3
    assert "< native" in sent[1][1]


def test_messages_are_native_where_that_is_faster() -> None:
    sent, received = on(Fast, 2, lambda comm: deliver(comm, [2 * MIB, 5 * MIB]))
    assert sent == received
    assert [path for path, _ in sent] == ["native"] * 2
    assert "below native" in sent[0][1]


def test_each_pair_is_timed_once_in_each_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[tuple[int, int, bool]] = []
    original = measuring._time_message

    def noted(session: Any, move: Any, x: Any, peer: int, sends: bool) -> float:
        timed.append((session.rank, peer, sends))
        return original(session, move, x, peer, sends)

    monkeypatch.setattr(measuring, "_time_message", noted)

    def task(comm: tw.Communicator) -> None:
        out = np.empty(MIB // 2, DTYPE)
        for _ in range(2):
            if comm.rank == 0:
                comm.send(weights(0, MIB), 1)
                comm.recv(out, 1)
            else:
                comm.recv(out, 0)
                comm.send(weights(1, MIB), 0)

    on(Fast, 2, task)
    # Two sizes, two paths.
    assert {key: timed.count(key) for key in timed} == {
        (0, 1, True): 4,
        (1, 0, False): 4,
        (1, 0, True): 4,
        (0, 1, False): 4,
    }


def test_measurements_have_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    original = measuring._time

    def noted(run: Any, steps: Any, x: Any, takes_out: bool) -> float:
        if steps.session.rank == 1:
            sizes.append(x.nbytes)
        return original(run, steps, x, takes_out)

    monkeypatch.setattr(measuring, "_time", noted)

    def task(comm: tw.Communicator) -> None:
        comm.session.measuring_left = 1e-6
        comm.all_to_all(weights(comm.rank, 4000))
        assert comm.session.measuring_left < 0

    on(Fast, 2, task)
    assert len(set(sizes)) == 2


@pytest.mark.parametrize("network", [Slow, Fast])
def test_unequal_all_to_alls_follow_the_largest_rank(network: type[Slow]) -> None:
    """One rank alone has much to send; all take the path that is faster for it."""

    def task(comm: tw.Communicator) -> list[str]:
        world = comm.world_size
        for k, most in enumerate([MIB, MIB, 600, 600]):
            counts = [[most // 2 if r == 0 else 3] * world for r in range(world)]
            mine = counts[comm.rank]
            x = weights(comm.rank, 2 * sum(mine), k)
            receives = [row[comm.rank] for row in counts]
            out = comm.all_to_all(x, send_splits=mine, receive_splits=receives)
            parts = []
            for r, row in enumerate(counts):
                at = sum(row[: comm.rank])
                parts.append(weights(r, 2 * sum(row), k)[at : at + row[comm.rank]])
            assert same(out, np.concatenate(parts))
        return [r.algorithm.split(",")[0] for r in comm.trace()]

    paths = on(network, 3, task)
    large = "native" if network is Fast else "all-to-all"
    # The first small call still follows the large one before it.
    assert paths == [[large, large, large, "native"]] * 3


class EqualIsFree(Slow):
    """A network on which bytes cost nothing if parts are equal."""

    def all_to_all(self, out: Any, x: Any) -> None:
        self._takes(0)
        ThreadTransport.all_to_all(self, out, x)


def test_unequal_all_to_alls_are_measured_themselves() -> None:
    """By equal parts native calls take hardly any time, which says nothing of unequal ones."""

    def task(comm: tw.Communicator) -> list[str]:
        splits = [[3 * MIB // 4, MIB // 4], [MIB // 4, MIB // 4]]
        sends, receives = splits[comm.rank], [row[comm.rank] for row in splits]
        x = weights(comm.rank, 2 * sum(sends))
        out = comm.all_to_all(x, send_splits=sends, receive_splits=receives)
        assert out.shape == (sum(receives),)
        comm.all_to_all(weights(comm.rank, 2 * MIB))
        return [record.algorithm.split(",")[0] for record in comm.trace()]

    assert on(EqualIsFree, 2, task) == [["all-to-all", "native"]] * 2


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 9])
@pytest.mark.parametrize("each", [0, 1, 5, 1000])
def test_parts_that_are_timed_differ(ranks: int, each: int) -> None:
    for number in range(3):
        rows = np.array([measuring.uneven(each * ranks, ranks, r, number) for r in range(ranks)])
        assert (rows >= 0).all()
        assert (rows.sum(0) == each * ranks).all()
        assert (rows.sum(1) == each * ranks).all()
        if ranks > 1 and each == 1000:
            assert (rows.max(), rows.min()) == (1500 - number, 500 + number)


def test_another_message_is_refused_before_anything_is_timed() -> None:
    def task(comm: tw.Communicator) -> str:
        if comm.rank == 0:
            with pytest.raises(tw.CollectiveError):
                comm.send(np.ones(MIB, np.float32), 1)
            return ""
        with pytest.raises(tw.CollectiveError, match="make another call") as caught:
            comm.recv(np.ones(MIB, np.float16), 0)
        comm.transport.close()
        return str(caught.value)

    found = on(Fast, 2, task)
    assert "float32" in found[1]
    assert "float16" in found[1]


TOPOLOGIES: tuple[Topology | None, ...] = ("ring", "two-shot", None)


def test_each_topology_is_measured() -> None:
    """By ring sums are faster natively, two-shot they are not; each remembers its own."""

    def task(transport: ThreadTransport) -> None:
        comm = tw.Communicator(transport, "mx", algorithm="auto")
        asked: list[str] = []

        def measured(*what: Any) -> Measured:
            topology = what[-1]
            asked.append(topology)
            ours = 2.0 if topology == "ring" else 0.1
            return Measured((1 << 10, 1 << 20), [[1e-3, ours * 1e-3, 1], [1, ours, 9]], 4, 0.5)

        comm._measure = measured  # type: ignore[method-assign, assignment]
        x = np.ones(1 << 16, np.float32)
        for _ in range(2):
            for topology in TOPOLOGIES:
                comm.all_reduce(x, topology=topology)
        paths = [record.algorithm for record in comm.trace()]
        two_shot = "two-shot, no sizes, mx"
        assert paths == ["native", two_shot, two_shot] * 2
        assert asked == ["ring", "two-shot"]

    run_ranks(2, task)
