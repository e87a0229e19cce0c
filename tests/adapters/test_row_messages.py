"""Rows in messages whose dynamic parts have a learnt capacity, and what exceeds it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import pytest

import tightwire as tw

torch = pytest.importorskip("torch")

from expert_layers import tokens, trained  # noqa: E402
from tightwire.adapters.collectives import row_messages, tensors  # noqa: E402
from tightwire.adapters.collectives.chunk_views import DESCRIPTOR_NBYTES  # noqa: E402
from tightwire.adapters.collectives.message_views import (  # noqa: E402
    MessageViews,
    alike,
    spare_of,
)
from tightwire.adapters.collectives.row_exchange import RowExchange  # noqa: E402
from tightwire.adapters.collectives.row_messages import Learnt, Needs  # noqa: E402
from tightwire.adapters.training import moe  # noqa: E402
from tightwire.adapters.transports.peer import connect_threads  # noqa: E402
from tightwire.adapters.transports.threads import ThreadTransport, run_ranks  # noqa: E402
from tightwire.formats.header import ALIGN  # noqa: E402

WIDTH = 256
DTYPE = torch.bfloat16


class Counting(ThreadTransport):
    """Counts calls that move rows, and bytes that they send to others."""

    def __init__(self, inner: ThreadTransport) -> None:
        super().__init__(inner.rank, inner._pipes, inner.timeout)
        self.calls = self.nbytes = 0

    def all_to_all_v(self, outs: Sequence[Sequence[Any]], xs: Sequence[Sequence[Any]]) -> None:
        self.calls += 1
        self.nbytes += sum(int(x.shape[0]) for row in xs for x in row)
        super().all_to_all_v(outs, xs)


class Gathering(Counting):
    """As GPUs over NCCL: two ranks gather faster than they send and receive."""

    pairs_gather = True

    def __init__(self, inner: ThreadTransport) -> None:
        super().__init__(inner)
        self.gathers = 0

    def all_gather(self, out: Any, x: Any) -> None:
        self.gathers += 1
        self.nbytes += int(x.shape[0])
        super().all_gather(out, x)


def rows_of(seed: int, count: int, hard: bool) -> Any:
    """Bfloat16 rows: of a normal distribution, or of any bits, which have many escapes."""
    generator = torch.Generator().manual_seed(seed)
    if hard:
        bits = torch.randint(-(2**15), 2**15, (count, WIDTH), generator=generator)
        return bits.to(torch.int16).view(torch.bfloat16)
    return torch.randn(count, WIDTH, generator=generator).bfloat16()


def swapped(
    exchange: RowExchange, table: list[list[int]], hard: Sequence[bool], purpose: str = ""
) -> bool:
    """Send rows, `table[i][j]` from rank i to rank j, those of some ranks hard to encode.

    Returns whether all have come as they were.
    """
    ranks, me = len(table), exchange._comm.rank
    sent = [rows_of(rank, sum(table[rank]), hard[rank]) for rank in range(ranks)]
    receives = [row[me] for row in table]
    out = torch.empty(sum(receives), WIDTH, dtype=torch.bfloat16)
    exchange.move(sent[me], out, table[me], receives, purpose=purpose)
    wanted = [x.split(row)[me] for x, row in zip(sent, table, strict=True)]
    return bool(torch.equal(out.view(torch.int16), torch.cat(wanted).view(torch.int16)))


def exchanged(calls: list[tuple[list[list[int]], list[bool]]]) -> list[list[tuple[int, int]]]:
    """Make these calls on all ranks; by rank, calls of the network and bytes sent by each."""

    def task(transport: ThreadTransport) -> list[tuple[int, int]]:
        counting = Counting(transport)
        exchange = RowExchange(tw.Communicator(counting), len(calls[0][0]), [])
        found = []
        for table, hard in calls:
            before = counting.calls, counting.nbytes
            assert swapped(exchange, table, hard)
            found.append((counting.calls - before[0], counting.nbytes - before[1]))
            record = exchange._session.trace(last=1)[0]
            # Beside these each rank tells each other what its message needs.
            assert record.wire_bytes == found[-1][1] + 16 * (len(table) - 1)
            others = sum(table[counting.rank]) - table[counting.rank][counting.rank]
            assert record.raw_bytes == 2 * WIDTH * others
        return found

    return run_ranks(len(calls[0][0]), task)


EQUAL = [[40, 40, 40]] * 3


def test_what_exceeds_the_first_capacity_follows() -> None:
    hard = [True] * 3
    for calls in exchanged([(EQUAL, hard), (EQUAL, hard), (EQUAL, hard)]):
        # Then it is known.
        assert [count for count, _ in calls] == [2, 1, 1]
        assert calls[0][1] <= calls[1][1] == calls[2][1]


def test_what_exceeds_a_learnt_capacity_follows() -> None:
    easy, hard = [False] * 3, [True] * 3
    for calls in exchanged([(EQUAL, easy), (EQUAL, easy), (EQUAL, hard), (EQUAL, easy)]):
        assert [count for count, _ in calls] == [1, 1, 2, 1]
        raw = 2 * 2 * 40 * WIDTH
        assert calls[1][1] < 0.78 * raw


def test_only_those_whose_messages_exceed_take_part() -> None:
    """The others do not even make the call."""
    table = [[5, 30, 0], [7, 1, 50], [20, 40, 3]]
    # Of rank 0 only rank 1 gets rows.
    counts = [
        [count for count, _ in calls]
        for calls in exchanged([(table, [False] * 3), (table, [True, False, False])])
    ]
    assert counts == [[1, 2], [1, 2], [1, 1]]


@pytest.mark.parametrize(
    "table",
    [
        [[0, 0], [0, 0]],
        [[9, 0], [0, 0]],
        [[0, 90], [0, 0]],
        [[0, 0], [1, 0]],
        [[3, 100], [1, 2]],
    ],
    ids=str,
)
@pytest.mark.parametrize("hard", [False, True])
def test_uneven_rows(table: list[list[int]], hard: bool) -> None:
    exchanged([(table, [hard] * 2), (EQUAL_2, [not hard] * 2), (table, [hard] * 2)])


EQUAL_2 = [[30, 30]] * 2


def gathered(
    calls: list[tuple[list[list[int]], list[bool]]], codec: str = "zipccl"
) -> list[tuple[int, int]]:
    """As `exchanged`, of two ranks that may gather; of each call the gathers, and other calls."""

    def task(transport: ThreadTransport) -> list[tuple[int, int]]:
        network = Gathering(transport)
        exchange = RowExchange(tw.Communicator(network, codec), 2, [])
        found = []
        for table, hard in calls:
            before = network.gathers, network.calls, network.nbytes
            same = swapped(exchange, table, hard)
            assert same or codec != "zipccl"
            found.append((network.gathers - before[0], network.calls - before[1]))
            told = 16 if codec == "zipccl" else DESCRIPTOR_NBYTES
            (record,) = exchange._session.trace(last=1)
            assert record.wire_bytes == network.nbytes - before[2] + told
        return found

    first, second = run_ranks(2, task)
    assert first == second
    return first


def test_two_ranks_gather_what_is_alike() -> None:
    easy, hard, mixed = [False] * 2, [True] * 2, [True, False]
    tables = [EQUAL_2, [[0, 64], [62, 9]], [[7, 62], [64, 0]], [[0, 64], [32, 0]], [[9, 9], [0, 0]]]
    calls = [(table, easy) for table in tables]
    assert gathered(calls) == [(1, 0), (1, 0), (1, 0), (0, 1), (0, 1)]
    # What exceeds a capacity is sent, though the gather has filled the memory around messages.
    assert gathered([(EQUAL_2, hard)] * 3) == [(1, 1), (1, 0), (1, 0)]
    assert gathered([(EQUAL_2, mixed), (EQUAL_2, easy)])[0] == (1, 1)
    assert gathered([(EQUAL_2, mixed[::-1]), (EQUAL_2, easy)])[0] == (1, 1)


def test_two_ranks_gather_messages_without_dynamic_parts() -> None:
    tables = [EQUAL_2, [[0, 640], [620, 9]], [[7, 620], [640, 0]], [[0, 64], [32, 0]], EQUAL_2]
    found = gathered([(table, [False] * 2) for table in tables], "mx")
    # Descriptors are compared on the host before rows move.
    assert [count for _, count in found] == [0, 0, 0, 1, 0]


@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_memory_of_gathers(rank: int, prefix: bool) -> None:
    """It holds the longest messages that are alike, and buffers lie where they are decoded from."""
    peer = 1 - rank
    codec = tw.codec("zipccl")
    for nelem in (1, 300, 50_000):
        plans = [codec.plan((nelem if i == peer else 0,), "bfloat16") for i in range(2)]
        bound = plans[peer].nbytes + prefix * ALIGN
        longest = bound * 16 // 15 // ALIGN * ALIGN
        assert alike(bound // 2, bound // 2 * 16 // 15)
        assert not alike(bound, longest + ALIGN + 16)
        for source in (None, peer):
            spare = spare_of(plans[peer], prefix, source)
            nbytes = MessageViews.nbytes_of(plans, prefix) + sum(spare)
            memory = torch.zeros(nbytes, dtype=torch.uint8)
            views = MessageViews(plans, memory, prefix, spare)
            message = views.longer(peer, longest)
            assert message.shape[0] == longest
            assert message[prefix * ALIGN :].data_ptr() == views.data[peer].data_ptr()
            if source is not None:
                both = views.both(peer, longest)
                assert both.shape[0] == 2 * longest
                assert both[peer * longest :].data_ptr() == message.data_ptr()
    assert not alike(0, 0)
    assert not alike(0, 128)


@pytest.mark.parametrize(("codec", "capacity"), [("zipccl", None), ("zipccl", 0), ("mx", None)])
def test_a_layer_has_the_same_bits_by_gathers(
    codec: str, capacity: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if capacity is not None:
        monkeypatch.setattr(Learnt, "capacity", lambda *args: capacity)

    def evenly(network: Counting) -> list[Any]:
        """Rows and gradients of a layer that sends as many tokens to each expert."""
        parallel = moe.ExpertParallel(tw.Communicator(network, codec), experts=4)
        x, _ = tokens(network.rank, 4, DTYPE, 200)
        routing = moe.Routing((torch.arange(400) % 4).view(200, 2), torch.ones(200, 2))
        for _ in range(2):
            x.grad = None
            came = parallel.dispatch(x, routing)
            y = parallel.combine(came.rows * 2, came)
            y.square().sum().backward()
        return [came.rows.detach(), y.detach(), x.grad]

    def task(transport: ThreadTransport) -> None:
        network, plain = Gathering(transport), Counting(transport)
        for a, b in zip(evenly(network), evenly(plain), strict=True):
            assert torch.equal(a.view(torch.int16), b.view(torch.int16))
        # Numbers of rows are gathered twice, the capacities of 0 exceeded eight times.
        assert network.calls == (0 if capacity is None else 8)
        assert network.gathers >= 2 + 8
        assert plain.calls == (8 if capacity is None else 16)

    run_ranks(2, task)


def test_damage_in_a_gather_names_the_rank() -> None:
    class Damaged(Gathering):
        def _take(self, kind: str, source: int, out: Any) -> None:
            super()._take(kind, source, out)
            if kind == "all_gather" and source == 1 and out.shape[0] > 4096:
                out[out.shape[0] // 2] ^= 4

    def task(transport: ThreadTransport) -> None:
        network = Gathering(transport) if transport.rank else Damaged(transport)
        exchange = RowExchange(tw.Communicator(network), 2, [])
        if transport.rank:
            assert swapped(exchange, EQUAL_2, [False] * 2)
            return
        with pytest.raises(tw.CollectiveError, match="from rank 1") as caught:
            swapped(exchange, EQUAL_2, [False] * 2)
        assert caught.value.stage == "decode"

    run_ranks(2, task)


def test_what_is_alike_is_learnt_together() -> None:
    """Tokens and results are not."""

    def task(transport: ThreadTransport) -> int:
        counting = Counting(transport)
        exchange = RowExchange(tw.Communicator(counting), 2, [])
        for _ in range(3):
            assert swapped(exchange, EQUAL_2, [False] * 2, "there")
            assert swapped(exchange, EQUAL_2, [True] * 2, "back")
        return counting.calls

    assert run_ranks(2, task) == [7, 7]


@pytest.mark.parametrize("codec", ["zipccl", "mx"])
@pytest.mark.parametrize("network", [Counting, Gathering])
def test_a_rank_in_another_call_is_named(codec: str, network: type[Counting]) -> None:
    def task(transport: ThreadTransport) -> None:
        comm = tw.Communicator(network(transport), codec)
        exchange = RowExchange(comm, 2, [])
        x, out = rows_of(0, 60, False), torch.empty(60, WIDTH, dtype=torch.bfloat16)
        if transport.rank:
            # As wide rows of as many bytes, but another dtype.
            x, out = x.view(torch.float16), out.view(torch.float16)
        with pytest.raises(tw.CollectiveError, match=r"ranks \[.\] make another call") as caught:
            exchange.move(x, out, [30, 30], [30, 30])
        assert caught.value.stage == "sizes"
        with pytest.raises(tw.CollectiveError, match="an earlier call has failed"):
            exchange.move(x, out, [30, 30], [30, 30])

    run_ranks(2, task)


def test_a_layer_has_the_same_bits_whatever_exceeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of every message in the forward and the backward pass."""
    monkeypatch.setattr(Learnt, "capacity", lambda *args: 0)

    def task(transport: ThreadTransport) -> None:
        plain = tw.Communicator(transport, "raw", algorithm="native")
        wanted = trained(moe.ExpertParallel(plain, experts=6), torch.bfloat16, 2)
        counting = Counting(transport)
        parallel = moe.ExpertParallel(tw.Communicator(counting), experts=6)
        found = trained(parallel, torch.bfloat16, 2)
        for a, b in zip(found, wanted, strict=True):
            assert torch.equal(a.view(torch.int16), b.view(torch.int16))
        assert counting.calls == 8

    run_ranks(3, task)


def test_on_a_gpu_messages_are_queued_before_needs_are_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """But for the first ones."""

    class Noting(Needs):
        did: list[Any]

        def __init__(self, ranks: int, like: Any) -> None:
            super().__init__(ranks, like)
            self.on_host, self.did = False, []

        def mark(self) -> None:
            self.did.append("mark")

        def arriving(self, stream: Any = None) -> Any:
            self.did.append(stream)
            return super().arriving()

    class Network(Counting):
        did: Any = None

        def all_to_all_v(self, outs: Any, xs: Any) -> None:
            self.did.append("messages")
            super().all_to_all_v(outs, xs)

    monkeypatch.setattr(row_messages, "Needs", Noting)
    monkeypatch.setattr(tensors, "on_stream", lambda stream: contextlib.nullcontext())

    def task(transport: ThreadTransport) -> None:
        network = Network(transport)
        exchange = RowExchange(tw.Communicator(network), 2, [])
        x, out = rows_of(0, 60, True), torch.empty(60, WIDTH, dtype=DTYPE)
        needs: Any = exchange._messages._needs_on(x)
        network.did = needs.did
        for _ in range(2):
            exchange.move(x, out, [30, 30], [30, 30], stream="another")
        exchange.move(x, out, [30, 30], [30, 30])
        first, second = [None, "messages", "messages"], ["mark", "messages", "another"]
        assert network.did == [*first, *second, None, "messages"]

    run_ranks(2, task)


def test_capacities() -> None:
    learnt = Learnt()
    assert learnt.capacity(1 << 20, 1 << 16) == 1 << 11
    assert learnt.capacity(128, 1 << 16) == 128
    for need in (1000, 500):
        learnt.learn(need, 1 << 16)
    assert learnt.capacity(1 << 20, 1 << 17) == 2560
    for _ in range(16):
        learnt.learn(0, 1 << 16)
    assert learnt.capacity(1 << 20, 1 << 17) == 0


# Out of peers' memory.


@pytest.mark.parametrize("codec", ["zipccl", "mx"])
def test_a_layer_out_of_peers_memory(codec: str) -> None:
    """It has the bits of one over the network, and sends numbers of rows alone."""
    ranks = 3
    memory = connect_threads(ranks)

    def task(transport: ThreadTransport) -> None:
        plain = moe.ExpertParallel(tw.Communicator(transport, codec), experts=6)
        wanted = trained(plain, torch.bfloat16, 2)
        counting = Counting(transport)
        comm = tw.Communicator(counting, codec)
        parallel = moe.ExpertParallel(comm, experts=6, peers=memory[transport.rank])
        for _ in range(2):
            found = trained(parallel, torch.bfloat16, 2)
            for a, b in zip(found, wanted, strict=True):
                assert torch.equal(a.view(torch.int16), b.view(torch.int16))
        assert counting.calls == 0
        assert 0 < parallel.wire_bytes < 0.85 * parallel.raw_bytes

    run_ranks(ranks, task)


def test_peers_memory_grows() -> None:
    memory = connect_threads(2)
    tables = [[[3, 5], [7, 1]], [[0, 0], [0, 0]], [[0, 300], [2, 0]], [[1, 0], [400, 9]]]

    def task(transport: ThreadTransport) -> None:
        peers = memory[transport.rank]
        exchange = RowExchange(tw.Communicator(transport), 2, [], peers)
        me = transport.rank
        for table in tables * 3:
            sent = [rows_of(rank, sum(table[rank]), rank == 1) for rank in range(2)]
            receives = [row[me] for row in table]
            out = torch.empty(sum(receives), WIDTH, dtype=torch.bfloat16)
            exchange.move(sent[me], out, table[me], receives, pairs=table)
            wanted = [x.split(row)[me] for x, row in zip(sent, table, strict=True)]
            assert torch.equal(out.view(torch.int16), torch.cat(wanted).view(torch.int16))

    run_ranks(2, task)


def test_damage_in_peers_memory_names_the_rank() -> None:
    memory = connect_threads(2)

    def task(transport: ThreadTransport) -> None:
        exchange = RowExchange(tw.Communicator(transport), 2, [], memory[transport.rank])
        coding: Any = exchange._steps.coding
        encode = coding.encode_to

        def damaged(call: Any, parts: Any, plans: Any, outs: Any) -> None:
            encode(call, parts, plans, outs)
            if transport.rank == 1:
                outs[0][plans[0].static_offset + 7] ^= 1

        coding.encode_to = damaged
        x, out = rows_of(0, 60, False), torch.empty(60, WIDTH, dtype=torch.bfloat16)
        move = functools.partial(exchange.move, x, out, [30, 30], [30, 30], pairs=EQUAL_2)
        if transport.rank:
            move()
            return
        with pytest.raises(tw.CollectiveError, match="from rank 1"):
            move()

    run_ranks(2, task)


def test_peers_memory_that_creeps_up_is_made_few_times() -> None:
    """What is too small stays, and must not add up."""
    memory = connect_threads(2)

    def task(transport: ThreadTransport) -> None:
        exchange = RowExchange(tw.Communicator(transport, "raw"), 2, [], memory[transport.rank])
        for rows in range(100, 400, 4):
            x = torch.empty(2 * rows, WIDTH, dtype=torch.bfloat16)
            split = [rows, rows]
            exchange.move(x, torch.empty_like(x), split, split, pairs=[split] * 2)
        messages: Any = exchange._peers
        for regions in messages._regions:
            assert sum(region.parts[0].size for region in regions) < 4.5 * x.nbytes

    run_ranks(2, task)


@pytest.mark.parametrize("width", [63, 65, 4096])
@pytest.mark.fast_cases(1)
def test_other_rows_in_peers_memory_are_told(width: int) -> None:
    """What was there before is not taken for an answer, also where memory would have to grow."""
    memory = connect_threads(2, timeout=2.0)

    def task(transport: ThreadTransport) -> None:
        comm = tw.Communicator(transport)
        parallel = moe.ExpertParallel(comm, experts=2, peers=memory[transport.rank])
        numbers = (torch.arange(50) % 2)[:, None]
        routing = moe.Routing(numbers, torch.ones(50, 1))
        for step in range(2):
            came = parallel.dispatch(torch.ones(50, 64), routing)
            parallel.combine(torch.full((50, 64), float(step)), came)
        came = parallel.dispatch(torch.ones(50, 64), routing)
        y = torch.ones(50, width if transport.rank else 64)
        what = "ranks .* make another call"
        if width == 4096 and transport.rank:
            what = "a rank did not come"
        with pytest.raises(tw.CollectiveError, match=what) as caught:
            parallel.combine(y, came)
        assert caught.value.stage == "exchange"
        with pytest.raises(tw.CollectiveError, match="an earlier call has failed"):
            parallel.combine(y, came)

    run_ranks(2, task)


def test_layouts_in_peers_memory_keep_their_plans() -> None:
    """Numbers of elements that no longer are planned do not lend their `id` to others."""
    memory = connect_threads(2)

    def task(transport: ThreadTransport) -> None:
        exchange = RowExchange(tw.Communicator(transport), 2, [], memory[transport.rank])
        x, out = rows_of(0, 60, False), torch.empty(60, WIDTH, dtype=torch.bfloat16)
        exchange.move(x, out, [30, 30], [30, 30], pairs=EQUAL_2)
        messages: Any = exchange._peers
        ((_, _, there, here),) = messages._layouts
        (laid,) = messages._layouts.values()
        assert tuple(map(id, laid.plans)) == there
        assert tuple(id(buffer.plan) for buffer in laid.buffers) == here

    run_ranks(2, task)


def test_ranks_that_differ_in_peers() -> None:
    memory = connect_threads(2)

    def task(transport: ThreadTransport) -> None:
        peers = memory[0] if transport.rank == 0 else None
        with pytest.raises(tw.CollectiveError, match="2 bins of rows, out of peers' memory"):
            moe.ExpertParallel(tw.Communicator(transport), experts=2, peers=peers)

    run_ranks(2, task)


def test_routes() -> None:
    choices: list[tuple[Any, int | None]] = [("peer", None), ("peers", 2)]
    for route, node in choices:
        with pytest.raises(ValueError, match="allowed: 'network', 'auto', 'peers' without node"):
            moe.connect(4, route=route, node=node)
