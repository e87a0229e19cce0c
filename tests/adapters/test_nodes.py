"""Collectives of nodes against sums by hand, with bytes counted: this file is also a rank."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import tightwire as tw
from processes import join, launch
from ranks import Counted, NodeRanks, check_calls, nodes_of
from tightwire.adapters.collectives.auto_scale import AutoScale
from tightwire.adapters.collectives.node_steps import in_whole
from tightwire.adapters.collectives.session import Topology
from tightwire.adapters.errors import CollectiveError
from tightwire.adapters.transports.threads import ThreadTransport, connect, run_grid, run_ranks
from tightwire.formats.dtypes import BY_NAME

Array = npt.NDArray[Any]

GRIDS = [(2, 3), (2, 2), (3, 1), (1, 3), (1, 1)]
#: A codec of each kind, and how its sums are made between nodes.
LOSSY: list[tuple[str, dict[str, Any], Topology]] = [
    ("mx", {}, "two-shot"),
    ("mx", {"element": "e4m3", "scale_rule": "agreed"}, "ring"),
    ("nvfp4", {}, "butterfly"),
    ("dynamiq", {"rounding": "nearest"}, "ring"),
    ("dynamiq", {"rounding": "nearest"}, "butterfly"),
    ("thc", {}, "in-network"),
    ("omnireduce", {}, "in-network"),
    ("taco", {}, "two-shot"),
    ("sdp4bit", {}, "two-shot"),
]


def normal(rank: int, shape: tuple[int, ...], dtype: str = "float32") -> Array:
    x = np.random.default_rng(rank).normal(0, 0.02, shape)
    return x.astype(BY_NAME[dtype].numpy)


@pytest.mark.fast_cases(5)
@pytest.mark.slow_cases(16)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int32", "float8_e4m3fn"])
@pytest.mark.parametrize(("nodes", "size"), GRIDS)
@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("near", ["native", "compressed"])
def test_every_collective(dtype: str, nodes: int, size: int, library: str, near: Any) -> None:
    """Bit for bit, of a lossless codec: odd sizes, empty shares, poisoned outputs."""
    if library == "torch":
        pytest.importorskip("torch")
    data = NodeRanks(nodes, size, library, dtype)

    def task(within: ThreadTransport, between: ThreadTransport) -> None:
        inner = tw.Communicator(within, algorithm=near)
        with tw.NodeCommunicator(inner, tw.Communicator(between)) as comm:
            assert comm.rank == between.rank * size + within.rank
            assert comm.world_size == nodes * size
            check_calls(comm, data, 5, 137)
            comm.check()

    run_grid(nodes, size, task)


def by_hand(xs: Sequence[Array], size: int, make: Callable[[Any], tw.Communicator]) -> Array:
    """The sum that nodes of so many ranks make: theirs in float32, then by one communicator."""
    nodes, n = len(xs) // size, xs[0].size
    each = -(-n // size)
    sums = []
    for m in range(nodes):
        total = np.zeros(each * size, np.float32)
        for x in xs[m * size : (m + 1) * size]:
            total[:n] += x.reshape(-1).astype(np.float32)
        sums.append(total.reshape(size, each))

    def share(number: int, transport: ThreadTransport) -> Array:
        comm = make(transport)
        comm.session.seed = 2 * number + 2 << 32
        found: Array = comm.all_reduce(sums[comm.rank][number])
        return found

    shares = [run_ranks(nodes, functools.partial(share, number))[0] for number in range(size)]
    return np.concatenate(shares)[:n].reshape(xs[0].shape)


@pytest.mark.fast_cases(9)
@pytest.mark.slow_cases(9)
@pytest.mark.parametrize(("codec", "params", "topology"), LOSSY)
@pytest.mark.parametrize(("nodes", "size"), [(2, 3), (3, 2)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_lossy_codecs(
    codec: str, params: dict[str, Any], topology: Topology, nodes: int, size: int, dtype: str
) -> None:
    """What one communicator between nodes makes of their sums; the same bits on all ranks."""
    chosen = tw.codec(codec, **params)
    scaling = AutoScale() if params.get("scale_rule") else None
    shape = (nodes * size, 771)
    xs = [normal(rank, shape, dtype) for rank in range(nodes * size)]

    def make(transport: Any) -> tw.Communicator:
        return tw.Communicator(transport, chosen, topology=topology, scaling=scaling)

    def task(within: ThreadTransport, between: ThreadTransport) -> Any:
        near = tw.Communicator(within, algorithm="native")
        comm = tw.NodeCommunicator(near, make(between))
        assert (comm.codec, comm.topology) == (chosen, topology)
        x = xs[comm.rank]
        total = comm.all_reduce(x)
        mean = comm.all_reduce(x, op="mean")
        share = comm.reduce_scatter(x, np.empty((1, 771), np.float32))
        gathered = comm.all_gather(x[:2])
        own = x.copy()
        comm.broadcast(own, nodes * size - 1)
        swapped = comm.all_to_all(x)
        return total, mean, share, [gathered.tobytes(), own.tobytes()], own, swapped

    ranks = run_grid(nodes, size, task)
    wanted = by_hand(xs, size, make).astype(xs[0].dtype)
    true = np.sum([x.astype(np.float64) for x in xs], axis=0)
    for total, mean, *_, same, _, _ in ranks:
        assert total.tobytes() == wanted.tobytes()
        assert mean.tobytes() == ranks[0][1].tobytes()
        assert same == ranks[0][3]
    # Of omnireduce only the largest blocks arrive.
    most = 1.0 if codec == "omnireduce" else 0.1
    shares = np.concatenate([share for _, _, share, *_ in ranks])
    for found, exact in ((wanted, true), (ranks[0][1], true / len(xs)), (shares, true)):
        error = found.astype(np.float64) - exact
        assert (error**2).sum() < most * (exact**2).sum()
    for rank, (*_, swapped) in enumerate(ranks):
        near = slice(rank // size * size, (rank // size + 1) * size)
        # What stays in a node is as it was.
        assert swapped[near].tobytes() == np.stack([x[rank] for x in xs[near]]).tobytes()
        assert (swapped != np.stack([x[rank] for x in xs])).any()
    if codec != "omnireduce":
        assert np.abs(ranks[0][4].astype(np.float32) - xs[-1].astype(np.float32)).max() < 0.02
        first = np.concatenate([x[:1] for x in xs]).astype(np.float32)
        assert np.abs(ranks[0][5].astype(np.float32) - first).max() < 0.02


@pytest.mark.parametrize("codec", ["zipccl", "mx", "nvfp4"])
@pytest.mark.parametrize("wire", [None, "bfloat16"])
def test_what_a_node_loses_is_one_ranks_to_make_good(codec: str, wire: str | None) -> None:
    """All that ranks are told of their losses is what the sum lacks."""
    xs = [normal(rank, (6, 333)) for rank in range(6)]

    def task(within: ThreadTransport, between: ThreadTransport) -> tuple[Array, Array]:
        comm = nodes_of(within, between, codec)
        told = np.full_like(xs[0], np.nan)
        return comm.reduce_scatter(xs[comm.rank], wire=wire, decoded=told), told

    found = run_grid(2, 3, task)
    total = np.concatenate([share for share, _ in found]).astype(np.float64)
    lost = sum(x.astype(np.float64) - told for x, (_, told) in zip(xs, found, strict=True))
    true = np.sum([x.astype(np.float64) for x in xs], axis=0)
    assert np.abs(true - total - lost).max() < 1e-6
    if codec == "zipccl" and wire is None:
        assert all(told.tobytes() == x.tobytes() for x, (_, told) in zip(xs, found, strict=True))
    else:
        assert np.abs(lost).max() > 1e-5


#: Collectives of a tensor of a row for each rank, and how often of it a node has to send what,
#: by the number of nodes: M nodes of N ranks with B bytes each.
CALLS: dict[str, tuple[Callable[[Any, Any], Any], Callable[[int, int], float]]] = {
    "all_gather": (lambda comm, x: comm.all_gather(x), lambda m, n: n * (m - 1)),
    "all_to_all": (lambda comm, x: comm.all_to_all(x), lambda m, n: n * (m - 1) / m),
    "reduce_scatter": (lambda comm, x: comm.reduce_scatter(x), lambda m, n: (m - 1) / m),
    "all_reduce": (lambda comm, x: comm.all_reduce(x), lambda m, n: 2 * (m - 1) / m),
    # The root's node scatters, then all gather.
    "broadcast": (lambda comm, x: comm.broadcast(x), lambda m, n: 2 * (m - 1) / m),
}


def count_bytes(comm: Any, transport: Any, name: str, x: Any) -> tuple[int, int]:
    """Bytes that left for other nodes in one call, counted; and as its record says."""
    call, _ = CALLS[name]
    call(comm, x.copy())
    before = transport.sent
    call(comm, x.copy())
    return transport.sent - before, comm.trace(last=1)[0].wire_bytes


@pytest.mark.fast_cases(8)
@pytest.mark.slow_cases(16)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(("nodes", "size"), [(2, 3), (2, 2), (4, 2)])
@pytest.mark.parametrize("codec", ["mx", "raw", "zipccl"])
def test_a_nodes_nic_carries_a_byte_once(name: str, nodes: int, size: int, codec: str) -> None:
    """Of the raw codec as many bytes as there have to be, and of others by their ratio."""
    shape = (nodes * size, 4096)

    def task(within: ThreadTransport, between: ThreadTransport) -> tuple[int, int]:
        card = Counted(between)
        comm = nodes_of(within, card, codec, algorithm="compressed")
        # A broadcast's root has more to send than others: all ranks of its node alike.
        return count_bytes(comm, card, name, normal(comm.rank, shape))

    found = run_grid(nodes, size, task)
    # Descriptors, and comparisons of calls before and after, of a few steps to each other node.
    small = 4 * size * (nodes - 1) * 128
    node = sum(sent for sent, _ in found[:size])
    told = sum(wire for _, wire in found[:size])
    whole = math.prod(shape) * 4 * CALLS[name][1](nodes, size)
    ratio = {"mx": 1.0 / 4 + 1 / 128, "raw": 1.0, "zipccl": 0.86}[codec]
    assert abs(node - told) <= small
    if codec == "zipccl":
        assert 0.8 * whole < node < ratio * whole + small
    else:
        assert ratio * whole <= node <= ratio * whole + small
    if name in ("all_gather", "reduce_scatter", "all_reduce") and codec == "mx" and size > 1:
        flat = run_ranks(nodes * size, functools.partial(flat_bytes, name, shape, size))
        # Each of the node's ranks sends its own to each rank of another node.
        assert node < 1.05 / size * sum(flat[:size]) + small


def flat_bytes(name: str, shape: tuple[int, ...], size: int, transport: ThreadTransport) -> int:
    """Bytes that leave a node of so many ranks without a grid."""

    class Card(ThreadTransport):
        sent = 0

        def _post(self, kind: str, to: int, x: Any) -> None:
            self.sent += x.size * (to // size != self.rank // size)
            super()._post(kind, to, x)

    card = Card(transport.rank, transport._pipes, transport.timeout)
    comm = tw.Communicator(card, "mx")
    return count_bytes(comm, card, name, normal(comm.rank, shape))[0]


def test_records_and_slow_ranks() -> None:
    def task(within: ThreadTransport, between: ThreadTransport) -> Any:
        comm = nodes_of(within, between, name="gradients")
        assert comm.name == "gradients"
        comm.all_reduce(normal(comm.rank, (6000,)))
        comm.reduce_scatter(normal(comm.rank, (6000,)))
        slow = comm.slow_ranks()
        first, last = comm.trace()
        assert (first.collective, first.sequence, first.error) == ("all_reduce", 0, None)
        assert (last.collective, last.sequence) == ("reduce_scatter", 1)
        assert last.algorithm.startswith("within nodes: native; between: all-to-all and sum")
        assert comm.trace(last=1) == [last]
        assert last.raw_bytes == 3000 // 3 * 4 > last.wire_bytes
        assert last.seconds["within"] > 0
        assert last.seconds["sizes"] > 0
        assert len(comm.within.trace()) == 3
        return slow

    found = run_grid(2, 3, task)
    assert all(slow == found[0] for slow in found)
    assert sorted(rank for rank, _ in found[0]) == list(range(6))
    assert min(seconds for _, seconds in found[0]) >= 0


def test_messages() -> None:
    """Within a node and between ranks of a number; others are refused, with the reason."""
    xs = [normal(rank, (5000,), "bfloat16") for rank in range(6)]

    def task(within: ThreadTransport, between: ThreadTransport) -> None:
        comm = nodes_of(within, between)
        me, out = comm.rank, np.zeros_like(xs[0])
        node, number = divmod(me, 3)
        # Around the node, then across.
        after, before = 3 * node + (number + 1) % 3, 3 * node + (number - 1) % 3
        comm.sendrecv(xs[me], after, out, before)
        assert out.tobytes() == xs[before].tobytes()
        assert comm.trace()[-1].wire_bytes == 0
        other = (me + 3) % 6
        if node:
            comm.send(xs[me], other)
            comm.recv(out, other)
        else:
            comm.recv(out, other)
            comm.send(xs[me], other)
        assert out.tobytes() == xs[other].tobytes()
        assert 0 < comm.trace()[-1 if not node else -2].wire_bytes < out.nbytes
        strange = (me + 4) % 6 if number < 2 else (me + 2) % 6
        for refused in (comm.send, comm.recv):
            with pytest.raises(ValueError, match=f"is {strange}, number . of node .; rank {me} is"):
                refused(xs[me], strange)
        with pytest.raises(ValueError, match="out may overlap x"):
            comm.sendrecv(out, other, out, other)
        comm.all_reduce(np.ones(3))

    run_grid(2, 3, task)


def test_bad_calls() -> None:
    def task(within: ThreadTransport, between: ThreadTransport) -> None:
        comm = nodes_of(within, between)
        x = np.ones((8, 3), np.float32)
        splits = {"send_splits": [2] * 4, "receive_splits": [2] * 3}
        bad: list[tuple[type[Exception], str, Callable[[], Any]]] = [
            (ValueError, "multiple of 4, the ranks", lambda: comm.reduce_scatter(x[:5])),
            (ValueError, "multiple of 4, the ranks", lambda: comm.all_to_all(x[:5])),
            (ValueError, "4 numbers of rows", lambda: comm.all_to_all(x, **splits)),
            (ValueError, "needed: both or none", lambda: comm.all_to_all(x, send_splits=[2] * 4)),
            (ValueError, "topology is 'ring'", lambda: comm.all_reduce(x, topology="ring")),
            (ValueError, "op is 'max'", lambda: comm.all_reduce(x, op="max")),  # type: ignore[arg-type]
            (ValueError, "wire is 'float64'", lambda: comm.all_reduce(x, wire="float64")),
            (TypeError, "allowed for a mean", lambda: comm.all_reduce(np.ones(3, int), op="mean")),
            (TypeError, "floats and integers", lambda: comm.all_reduce(np.ones(3, complex))),
            (ValueError, "root is 4", lambda: comm.broadcast(x, 4)),
            (ValueError, "out is float32", lambda: comm.all_gather(x, np.ones((8, 3), np.float32))),
        ]
        for kind, match, call in bad:
            with pytest.raises(kind, match=match):
                call()
        # Nothing was sent: ranks are in step.
        assert comm.refusal("all_reduce") is None
        assert comm.all_reduce(x)[0, 0] == 4

    run_grid(2, 2, task)
    ring = tw.Communicator(connect(1)[0], "mx", topology="ring")
    alone = tw.NodeCommunicator(tw.Communicator(connect(1)[0]), ring)
    x = np.ones((2, 3), np.float32)
    with pytest.raises(ValueError, match="decoded is given, topology is 'ring'"):
        alone.reduce_scatter(x, decoded=x.copy())
    with pytest.raises(TypeError, match="within is a ThreadTransport; allowed: a Communicator"):
        tw.NodeCommunicator(connect(1)[0], ring)  # type: ignore[arg-type]


def test_ranks_that_do_not_make_a_grid() -> None:
    """The second node has its ranks in another order; a node has fewer; codecs differ."""

    def errors(ranks: Sequence[tuple[Any, Any, str]]) -> list[str]:
        def make(within: Any, between: Any, codec: str) -> str:
            near = tw.Communicator(within, algorithm="native")
            with pytest.raises(CollectiveError) as caught:
                tw.NodeCommunicator(near, tw.Communicator(between, codec, name="grads"))
            assert (caught.value.collective, caught.value.stage) == ("NodeCommunicator", "agree")
            return caught.value.detail

        with ThreadPoolExecutor(len(ranks)) as pool:
            return list(pool.map(make, *zip(*ranks, strict=True)))

    within, between = [connect(2), connect(2)], [connect(2), connect(2)]
    crossed = [(within[m][n], between[n ^ m][m], "raw") for m in range(2) for n in range(2)]
    found = errors(crossed)
    assert "number 0 of 2 in node 0 of 2: the ranks of number 0 have rank and world" in found[0]
    assert all("allowed: equal ones" in text for text in found)

    # Nodes of 3 and 2 ranks: number 2 of the first has nobody in the other.
    within = [connect(3), connect(2)]
    between = [connect(2), connect(2), connect(1)]
    places = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    found = errors([(within[m][n], between[n][m], "raw") for m, n in places])
    assert "rank and world size [(0, 2), (0, 2), (0, 1)] between nodes" in found[0]
    assert "rank and world size [(0, 3), (0, 2)] in their nodes" in found[3]

    within, between = [connect(2), connect(2)], [connect(2), connect(2)]
    codecs = ["zipccl", "raw"]
    found = errors([(within[m][n], between[n][m], codecs[n]) for m in range(2) for n in range(2)])
    assert "numbers [1] of this node have another codec between nodes" in found[0]


@pytest.mark.parametrize("level", [0, 1])
def test_failures_name_the_level(level: int) -> None:
    """Damage in the last step is that rank's own; a rank that has left is named by those left."""

    class Damaged(ThreadTransport):
        on = False

        def _take(self, kind: str, source: int, out: Any) -> None:
            super()._take(kind, source, out)
            if self.on and out.size > 512 and source != self.rank:
                out[300] ^= 1

    def task(*inner: ThreadTransport) -> Any:
        within, between = (Damaged(t.rank, t._pipes, 10.0) for t in inner)
        near = tw.Communicator(within, "mx")
        comm = tw.NodeCommunicator(near, tw.Communicator(between, "mx"))
        x = normal(comm.rank, (4 * 1000,))
        damaged = (within, between)[level]
        damaged.on = comm.rank == 2
        if comm.rank == 2:
            with pytest.raises(CollectiveError) as caught:
                comm.reduce_scatter(x)
            error = caught.value
            assert (error.rank, error.collective, error.stage) == (2, "reduce_scatter", "decode")
            assert "checksum_mismatch" in error.detail
            where = ["within node 1", "between nodes, ranks of number 0"][level]
            assert error.detail.startswith(f"{where}: reduce_scatter #0: ")
            # In numbers of the whole.
            assert f"(from rank {[3, 0][level]})" in error.detail
            assert comm.trace()[-1].error is not None
            damaged.on = False
            if level == 1:
                # It had been the last step: all are in step.
                assert comm.all_reduce(x).shape == x.shape
                return None
            with pytest.raises(CollectiveError, match="an earlier call has failed: rank 2: reduce"):
                comm.all_gather(x)
            comm.close()
            return None
        if level == 1:
            comm.reduce_scatter(x)
            comm.all_reduce(x)
            return None
        with pytest.raises(CollectiveError, match=r"has left|earlier call"):
            for _ in range(2):
                comm.reduce_scatter(x)
        comm.close()
        return None

    run_grid(2, 2, task)


#: What ranks send to which, and expect, where all others have 2; and what all ranks are told.
DIFFERING = [
    ({0: [1, 3, 2, 2]}, {0: [1, 2, 2, 2]}, ["rank 0 sends 3 rows to rank 1, which expects 2"]),
    (
        {0: [2, 2, 1, 3], 1: [2, 2, 3, 1]},
        {},
        [
            "rank 0 sends 1 rows to rank 2, which expects 2",
            "rank 0 sends 3 rows to rank 3, which expects 2",
            "rank 1 sends 3 rows to rank 2, which expects 2",
            "rank 1 sends 1 rows to rank 3, which expects 2",
        ],
    ),
    ({}, {3: [2, 3, 2, 2]}, ["rank 1 sends 2 rows to rank 3, which expects 3"]),
    ({2: [2, 2, 3, 1]}, {3: [2, 2, 1, 2]}, ["rank 2 sends 3 rows to rank 2, which expects 2"]),
]


@pytest.mark.parametrize(("sends", "receives", "told"), DIFFERING)
@pytest.mark.parametrize("codec", ["zipccl", "mx"])
def test_splits_that_differ(
    sends: dict[int, list[int]], receives: dict[int, list[int]], told: list[str], codec: str
) -> None:
    """All ranks are told of all, also where sums over a node agree, and can go on."""

    def task(within: ThreadTransport, between: ThreadTransport) -> None:
        comm = nodes_of(within, between, codec)
        x = normal(comm.rank, (8, 3))
        there, here = (table.get(comm.rank, [2] * 4) for table in (sends, receives))
        with pytest.raises(CollectiveError) as caught:
            comm.all_to_all(x, send_splits=there, receive_splits=here)
        error = caught.value
        assert (error.rank, error.collective, error.stage) == (comm.rank, "all_to_all", "splits")
        assert error.detail == f"splits differ: {'; '.join(told)}"
        assert comm.trace()[-1].error is not None
        assert comm.all_reduce(x).shape == x.shape

    run_grid(2, 2, task, timeout=20)


def test_many_splits_that_differ() -> None:
    def task(within: ThreadTransport, between: ThreadTransport) -> None:
        comm = nodes_of(within, between)
        x, splits = np.ones((8, 3), np.float32), [2] * 4
        with pytest.raises(CollectiveError, match=r"rank 3, which expects 3; 8 more pairs$"):
            comm.all_to_all(x, send_splits=splits, receive_splits=[3] * 4)

    run_grid(2, 2, task, timeout=20)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("ranks [0, 1] make another call; rank 1: float32", "ranks [4, 7] make; rank 7: float32"),
        ("damaged (hop 1, from rank 0)", "damaged (hop 1, from rank 4)"),
        ("closed; rank 1 gave up: rank 0: all_reduce #3", "closed; rank 7 gave up: rank 0: "),
        ("ranks [0]; here also: rank 1, send #2", "ranks [4]; here also: rank 1, send #2"),
        ("ranks differ: ranks [1]: x has 3 rows", "ranks differ: ranks [7]: x has 3 rows"),
        ("rank 12 of another program", "rank 12 of another program"),
    ],
)
def test_errors_are_in_numbers_of_the_whole(text: str, wanted: str) -> None:
    found = in_whole(text, [4, 7])
    assert found.replace("make another call", "make").startswith(wanted)


def test_a_network_error_of_a_level_names_ranks_of_the_whole() -> None:
    """The second node has lost its rank 3: rank 2 is told, and none of node 0 is blamed."""

    class Lost(ThreadTransport):
        lost = False

        def all_gather(self, out: Any, x: Any) -> None:
            if self.lost:
                raise RuntimeError(f"ranks [{1 - self.rank}] have not noticed: stopped")
            super().all_gather(out, x)

    def task(*inner: ThreadTransport) -> None:
        within, between = (Lost(t.rank, t._pipes, 10.0) for t in inner)
        comm = nodes_of(within, between)
        within.lost = True
        other = comm.rank ^ 1
        told = rf"ranks \[{other}\] have not noticed"
        with pytest.raises(RuntimeError, match=f"within node .: {told}"):
            comm.gather_plain(np.zeros(8, np.uint8))
        with pytest.raises(CollectiveError, match=told) as caught:
            comm.all_gather(np.ones(4, np.float32))
        assert caught.value.detail.startswith(f"within node {comm.rank // 2}: all_gather #0: ")

    run_grid(2, 2, task)


class CountedDist:
    """Counts bytes to others by a transport's calls."""

    def __init__(self, inner: Any) -> None:
        self._inner, self.sent = inner, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def all_gather(self, out: Any, x: Any) -> None:
        self.sent += (self._inner.world_size - 1) * x.nbytes
        self._inner.all_gather(out, x)

    def all_to_all(self, out: Any, x: Any) -> None:
        self.sent += x.nbytes // self._inner.world_size * (self._inner.world_size - 1)
        self._inner.all_to_all(out, x)

    def all_to_all_v(self, outs: Any, xs: Any) -> None:
        others = [part for r, part in enumerate(xs) if r != self._inner.rank]
        self.sent += sum(x.nbytes for part in others for x in part)
        self._inner.all_to_all_v(outs, xs)

    def all_reduce(self, x: Any, op: Any = "sum") -> None:
        self.sent += 2 * x.nbytes
        self._inner.all_reduce(x, op)


def grid(size: int) -> tuple[Any, Any]:
    """Transports within nodes of so many ranks and between them, over gloo."""
    import torch.distributed as dist

    from tightwire.adapters.transports.torch_dist import TorchDist

    me, ranks = dist.get_rank(), range(dist.get_world_size())
    nodes = [dist.new_group(list(ranks[at : at + size])) for at in range(0, len(ranks), size)]
    columns = [dist.new_group(list(ranks[number::size])) for number in range(size)]
    return TorchDist(nodes[me // size]), CountedDist(TorchDist(columns[me % size]))


def every_call(size: int, device: Any) -> dict[str, Any]:
    """All collectives; bytes to other nodes of each; sums of a few codecs, as bytes."""
    within, between = grid(size)
    nodes = between.world_size
    # Other codecs would take each process seconds to load.
    comm = nodes_of(within, between, "raw" if size > 2 else "zipccl")
    for library, dtype in (("torch", "bfloat16"), ("numpy", "int32")):
        check_calls(comm, NodeRanks(nodes, size, library, dtype), 2, 641)
    shape = (nodes * size, 4096)
    x = normal(comm.rank, shape)
    counted, sums = {}, []
    for codec, params, topology in LOSSY[:1] + (LOSSY[3:6] if size == 2 else []):
        between.sent = 0
        own = nodes_of(within, between, tw.codec(codec, **params), topology=topology)
        for name in CALLS if codec == "mx" else ["all_reduce"]:
            counted[f"{codec} {topology} {name}"] = count_bytes(own, between, name, x)
        sums.append(own.all_reduce(x).tobytes().hex()[:4096])
    return {"counted": counted, "sums": sums}


TASKS = {f"every_call_{size}": functools.partial(every_call, size) for size in (2, 3)}


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_processes(size: int, tmp_path: Path) -> None:
    """Grids of gloo ranks: all bits, and the bytes of a node's NIC."""
    pytest.importorskip("torch.distributed")
    found = launch(__file__, f"every_call_{size}", 2 * size, tmp_path)
    assert all(rank["sums"] == found[0]["sums"] for rank in found)
    whole = 2 * size * 4096 * 4
    for name, (_, times) in CALLS.items():
        for number, node in enumerate((found[:size], found[size:])):
            sent = sum(rank["counted"][f"mx two-shot {name}"][0] for rank in node)
            packed = (1 / 4 + 1 / 128) * times(2, size) * whole
            if name == "broadcast" and number == 1:
                # The root's node alone scatters.
                packed /= 2
            assert packed <= sent <= packed + 4 * size * 128, name
    for name in found[0]["counted"]:
        sent = sum(sum(rank["counted"][name]) for rank in found[:size]) / 2
        assert sent < 0.3 * whole * max(2, size), name


if __name__ == "__main__":
    join(TASKS, sys.argv[1:])
