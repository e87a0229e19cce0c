"""Experts on the ranks of nodes against the same without nodes, with bytes counted."""

from __future__ import annotations

import functools
import itertools
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tightwire as tw
from processes import join, launch
from ranks import Counted, nodes_of
from support import examples

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("PyTorch was built without gloo", allow_module_level=True)

from expert_layers import WIDTH, dense, experts_of, layer_of, tokens, trained  # noqa: E402
from tightwire.adapters.collectives.chunk_views import DESCRIPTOR_NBYTES  # noqa: E402
from tightwire.adapters.collectives.communicator import Communicator  # noqa: E402
from tightwire.adapters.training import moe  # noqa: E402
from tightwire.adapters.transports.threads import (  # noqa: E402
    ThreadTransport,
    connect,
    run_grid,
    run_ranks,
)

GRIDS = [(2, 2), (2, 3), (3, 1), (1, 3), (1, 1)]
#: Tokens of the ranks.
LENGTHS = (41, 0, 130, 1, 7, 33)


def parallel_of(
    within: Any, between: Any, experts: int, codec: Any = "zipccl", **options: Any
) -> moe.ExpertParallel:
    return moe.ExpertParallel(nodes_of(within, between, codec, **options), experts=experts)


def flat(transport: Any, experts: int, codec: Any = "zipccl") -> moe.ExpertParallel:
    return moe.ExpertParallel(tw.Communicator(transport, codec), experts=experts)


def same(found: list[Any], wanted: list[Any]) -> bool:
    """Whether tensors have the same bits."""
    pairs = zip(found, wanted, strict=True)
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


@pytest.mark.fast_cases(8)
@pytest.mark.slow_cases(30)
@pytest.mark.parametrize(("nodes", "size"), GRIDS)
@pytest.mark.parametrize("top_k", [2, 1, 3])
@pytest.mark.parametrize("each", [2, 1])
@pytest.mark.parametrize(
    "options",
    [{}, {"sizes": "between"}, {"verify": "digest"}, {"algorithm": "auto"}],
    ids=str,
)
def test_a_layer_has_the_bits_of_one_without_nodes(
    nodes: int, size: int, top_k: int, each: int, options: dict[str, Any]
) -> None:
    """Results and all gradients; a rank without tokens, and an expert."""
    ranks = nodes * size
    experts = max(each * ranks, top_k)
    train = functools.partial(trained, dtype=torch.bfloat16, top_k=top_k, lengths=LENGTHS)
    wanted = run_ranks(ranks, lambda t: train(flat(t, experts)))
    found = run_grid(nodes, size, lambda w, b: train(parallel_of(w, b, experts, **options)))
    for mine, theirs in zip(found, wanted, strict=True):
        assert same(mine, theirs)
    assert any(gradient.any() for gradient in found[0][1:])


@pytest.mark.slow
def test_a_layer_is_that_of_one_process() -> None:
    count = 8
    experts = experts_of(range(count), torch.float64)
    train = functools.partial(trained, dtype=torch.float64, top_k=2, lengths=LENGTHS)
    found = run_grid(2, 2, lambda w, b: train(parallel_of(w, b, count, "raw")))
    for rank, (y, of_x, of_logits, *_) in enumerate(found):
        x, logits = tokens(rank, count, torch.float64, LENGTHS[rank])
        wanted = dense(x, logits, experts, 2)
        wanted.square().sum().backward()
        for a, b in ((y, wanted), (of_x, x.grad), (of_logits, logits.grad)):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


@examples(15)
@given(st.data())
def test_any_routing(data: st.DataObject) -> None:
    """Rows as without nodes, whatever experts tokens go to, one of them twice too."""
    nodes, size = data.draw(st.sampled_from(GRIDS), "nodes and ranks of each")
    ranks = nodes * size
    count = ranks * data.draw(st.integers(1, 3), "experts of a rank")
    top_k = data.draw(st.integers(1, 3), "top_k")
    numbers = st.tuples(*[st.integers(0, count - 1)] * top_k)
    chosen = [data.draw(st.lists(numbers, max_size=20), f"rank {r}") for r in range(ranks)]

    def task(parallel: moe.ExpertParallel) -> list[Any]:
        mine = chosen[parallel.rank]
        routing = moe.Routing(
            torch.tensor(mine, dtype=torch.int64).reshape(len(mine), top_k),
            2.0 ** torch.arange(top_k).repeat(len(mine), 1),
        )
        x = (torch.arange(len(mine) * 3).view(-1, 3) + 1000.0 * parallel.rank).requires_grad_()
        came = parallel.dispatch(x, routing)
        y = parallel.combine(came.rows * (1 + parallel.rank), came)
        y.sum().backward()
        facts = [came.counts, came.counts_on_device.tolist(), came.sends, came.receives]
        return [came.rows.detach(), y.detach(), x.grad, torch.tensor(list(itertools.chain(*facts)))]

    wanted = run_ranks(ranks, lambda t: task(flat(t, count)))
    found = run_grid(nodes, size, lambda w, b: task(parallel_of(w, b, count)))
    assert all(same(a, b) for a, b in zip(found, wanted, strict=True))


# What crosses a NIC.


def routed(rank: int, size: int, experts: int, n: int = 200) -> moe.Routing:
    """Half of the tokens go to two experts of one node, the others to experts of two."""
    node = experts // 2
    first = (torch.arange(n) + rank) % node
    second = torch.where(torch.arange(n) % 2 == 0, (first + 1) % node, first + node)
    return moe.Routing(torch.stack([first, second], 1), torch.ones(n, 2))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("codec", ["raw", "mx", "zipccl"])
def test_what_crosses_a_nic(size: int, codec: str) -> None:
    """A token once to a node, results and gradients of its copies each, own rows never."""
    experts, n, nbytes = 4 * size, 200, WIDTH * 2

    def task(within: ThreadTransport, between: ThreadTransport) -> list[list[int]]:
        near, far = Counted(within), Counted(between)
        parallel = parallel_of(near, far, experts, codec)
        x = tokens(parallel.rank, experts, torch.bfloat16, n)[0]
        found = []

        def count(what: Callable[[], Any]) -> Any:
            before = [near.sent, far.sent, parallel.raw_bytes, parallel.wire_bytes]
            result = what()
            after = [near.sent, far.sent, parallel.raw_bytes, parallel.wire_bytes]
            found.append([b - a for a, b in zip(before, after, strict=True)])
            return result

        routing = routed(parallel.rank, size, experts)
        came = count(lambda: parallel.dispatch(x, routing))
        y = count(lambda: parallel.combine(came.rows, came))
        # Combine's gradients go forth, dispatch's come back.
        count(lambda: y.backward(torch.randn(y.shape).bfloat16()))
        return found

    ranks = run_grid(2, size, task)
    ratio = {"raw": 1.0, "mx": 0.52, "zipccl": 0.75}[codec]
    # Descriptors of steps, and counts of rows.
    small = 4 * 128 + 8 * 8 * experts
    # From the first node, half of the second copies; from the other the first ones too.
    for ranks_of_node, rows, copies in (
        (ranks[:size], n // 2, n // 2),
        (ranks[size:], n, n + n // 2),
    ):
        for dispatch, _, _ in ranks_of_node:
            sent, raw, wire = dispatch[1:]
            assert rows * nbytes + 4 * copies <= raw <= rows * nbytes + 4 * copies + small
            assert 0.5 * ratio * rows * nbytes < sent <= ratio * rows * nbytes + 4 * copies + small
            assert abs(sent - wire) <= small
    # What is sent from a rank goes to all of the other node, and results come from there.
    for node, back in ((0, n + n // 2), (1, n // 2)):
        sent = sum(rank[1][1] for rank in ranks[node * size : (node + 1) * size])
        whole = size * back * nbytes
        assert 0.5 * ratio * whole < sent <= ratio * whole + size * small
    # Within a node all copies for its experts travel as they are, unless they are there already.
    for node in range(2):
        near = sum(
            (routed(rank, size, experts).experts // 2 == node * size + number).sum().item()
            for rank in range(2 * size)
            for number in range(size)
            if number != rank % size
        )
        sent = sum(rank[1][0] for rank in ranks[node * size : (node + 1) * size])
        assert sent == near * nbytes + size * (size - 1) * DESCRIPTOR_NBYTES
    both = sum(rank[2][1] for rank in ranks)
    whole = 2 * 2 * size * n * nbytes
    assert 0.5 * ratio * whole < both <= ratio * whole + 4 * size * small


@pytest.mark.parametrize("near", [{"algorithm": "native"}, {"codec": "mx"}], ids=str)
def test_rows_of_the_own_node_are_exact(near: dict[str, Any]) -> None:
    """Whatever codec sums have there; others are what the codec makes of a token."""
    n, experts = 200, 8

    def task(within: ThreadTransport, between: ThreadTransport) -> list[Any]:
        inner = tw.Communicator(within, **near)
        comm = tw.NodeCommunicator(inner, tw.Communicator(between, "mx"))
        parallel = moe.ExpertParallel(comm, experts=experts)
        x = tokens(parallel.rank, experts, torch.bfloat16, n)[0].detach()
        came = parallel.dispatch(x, routed(parallel.rank, 2, experts))
        return [x, came.rows, came.counts]

    found = run_grid(2, 2, task)
    for me, (_, rows, counts) in enumerate(found):
        for expert, part in zip(range(2 * me, 2 * me + 2), rows.split(counts), strict=True):
            wanted = []
            for rank, (x, _, _) in enumerate(found):
                token = (routed(rank, 2, experts).experts == expert).any(1)
                wanted.append((rank // 2 == me // 2, x[token]))
            parts = part.split([x.shape[0] for _, x in wanted])
            for got, (own, x) in zip(parts, wanted, strict=True):
                assert torch.equal(got, x) == (own or not x.numel())
                assert not x.numel() or tw.error(x, got).vnmse < 4e-3


@pytest.mark.parametrize("splits", [True, False])
def test_all_to_all_single(splits: bool) -> None:
    """Exact within nodes, and what a lossy codec makes of rows from others."""

    def task(within: ThreadTransport, between: ThreadTransport) -> None:
        parallel = moe.AllToAll(nodes_of(within, between, "mx", name="rows"))
        me, ranks = parallel.rank, parallel.world_size
        table = [[(3 * i + j) % 4 + 1 if splits else 2 for j in range(ranks)] for i in range(ranks)]
        xs = [
            torch.randn(sum(row), 64, generator=torch.Generator().manual_seed(i))
            for i, row in enumerate(table)
        ]
        inward = [row[me] for row in table]
        output, x = torch.empty(sum(inward), 64), xs[me].clone().requires_grad_()
        given = (inward, table[me]) if splits else (None, None)
        parallel.all_to_all_single(output, x, *given)
        for i, part in enumerate(output.split(inward)):
            wanted = xs[i].split(table[i])[me]
            assert torch.equal(part, wanted) == (i // 2 == me // 2)
            assert tw.error(wanted, part.detach()).vnmse < 4e-3
        output.square().sum().backward()
        for j, part in enumerate(x.grad.split(table[me])):
            wanted = 2 * xs[me].split(table[me])[j]
            assert torch.equal(part, wanted) == (j // 2 == me // 2)
            assert tw.error(wanted, part).vnmse < 4e-3
        with pytest.raises(ValueError, match=rf"input_split_sizes is .* rank {me} of 'rows'"):
            parallel.all_to_all_single(output, x, inward, [*table[me][:-1], 77])

    run_grid(2, 2, task)


# Bad input and faults.


@pytest.mark.parametrize("culprit", [0, 3])
def test_a_bad_routing_is_an_error_of_all_ranks(culprit: int) -> None:
    def task(within: ThreadTransport, between: ThreadTransport) -> None:
        parallel = parallel_of(within, between, 8, name="experts")
        x, logits = tokens(parallel.rank, 8, torch.float32, 9)
        good = moe.route(logits.detach(), 2)
        numbers, weights = good.experts.clone(), good.weights.clone()
        if parallel.rank == culprit:
            numbers[4, 1], weights[8, 0] = 8, torch.nan
        with pytest.raises(tw.CollectiveError) as caught:
            parallel.dispatch(x, moe.Routing(numbers, weights))
        assert (caught.value.rank, caught.value.stage) == (parallel.rank, "counts")
        assert caught.value.detail == (
            f"rank {culprit} of 'experts': numbers of experts are out of range; "
            f"rank {culprit} of 'experts': router weights are not all finite"
        )
        assert parallel.trace()[-1].error is not None
        # All ranks are in step.
        assert parallel.dispatch(x, good).rows.isfinite().all()

    run_grid(2, 2, task)


def test_splits_of_all_to_all_single_that_differ() -> None:
    """Also where each node sends as many rows as the other expects."""

    def task(within: ThreadTransport, between: ThreadTransport) -> None:
        parallel = moe.AllToAll(nodes_of(within, between))
        sends = {0: [2, 2, 1, 3], 1: [2, 2, 3, 1]}.get(parallel.rank, [2] * 4)
        x, output = torch.ones(8, 1, requires_grad=True), torch.empty(8, 1)
        with pytest.raises(tw.CollectiveError, match="rank 1 sends 3 rows to rank 2, which exp"):
            parallel.all_to_all_single(output, x, [2] * 4, sends)
        parallel.all_to_all_single(output, x, [2] * 4, [2] * 4)

    run_grid(2, 2, task, timeout=20)


def test_ranks_may_differ_in_whether_they_give_splits() -> None:
    def task(within: ThreadTransport, between: ThreadTransport) -> None:
        parallel = moe.AllToAll(nodes_of(within, between))
        x = torch.arange(8.0)[:, None].requires_grad_()
        output = torch.empty(8, 1)
        splits = ([2] * 4, [2] * 4) if parallel.rank in (1, 2) else ()
        parallel.all_to_all_single(output, x, *splits)
        own = [2.0 * parallel.rank, 2.0 * parallel.rank + 1]
        assert output.flatten().tolist() == own * 4
        output.sum().backward()
        assert x.grad.eq(1).all()

    run_grid(2, 2, task, timeout=20)


@pytest.mark.parametrize("culprit", [0, 3])
def test_other_rows_are_an_error_of_all_ranks_at_once(culprit: int) -> None:
    def task(within: ThreadTransport, between: ThreadTransport) -> None:
        parallel = parallel_of(within, between, 4)
        x = torch.zeros(3, 5 + (parallel.rank == culprit))
        routing = moe.Routing(torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1))
        with pytest.raises(tw.CollectiveError, match="make another call, or one with") as caught:
            parallel.dispatch(x, routing)
        assert parallel.rank == culprit or f"ranks [{culprit}] make" in caught.value.detail
        with pytest.raises(tw.CollectiveError, match="an earlier call has failed"):
            parallel.dispatch(x, routing)

    run_grid(2, 2, task, timeout=20)


def test_objects_that_do_not_fit() -> None:
    def experts(within: ThreadTransport, between: ThreadTransport) -> None:
        comm = nodes_of(within, between)
        last = comm.rank == 3
        with pytest.raises(
            tw.CollectiveError, match=r"ranks \[0, 1, 2\]: 4 .* ranks \[3\]: 8 bins"
        ):
            moe.ExpertParallel(comm, experts=8 if last else 4)

    def others(within: ThreadTransport, between: ThreadTransport) -> None:
        there, back = parallel_of(within, between, 4), parallel_of(between, within, 4)
        x = torch.zeros(3, 5)
        routing = moe.Routing(torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1))
        came = there.dispatch(x, routing)
        alone = moe.ExpertParallel(Communicator(connect(1)[0]), experts=4)
        with pytest.raises(ValueError, match=r"nodes and ranks \(2, 2\), rank 0 has None; needed"):
            alone.combine(came.rows, came)
        # A grid of the same shape will do.
        assert back._there.grid == there._there.grid

    run_grid(2, 2, experts, timeout=20)
    run_grid(2, 2, others)
    alone = nodes_of(connect(1)[0], connect(1)[0])
    with pytest.raises(ValueError, match=r"nodes and their ranks are \(1, 1\) forward, None back"):
        moe.ExpertParallel(alone, Communicator(connect(1)[0]), experts=2)


def test_ranks_may_differ_in_experts_of_a_token() -> None:
    """One each on some ranks: all go the way of those that have several."""

    def task(parallel: moe.ExpertParallel) -> list[Any]:
        x = tokens(parallel.rank, 4, torch.float32, 20)[0]
        top_k = (1, 3, 2, 1)[parallel.rank]
        numbers = torch.arange(20 * top_k).view(20, top_k) % 4
        came = parallel.dispatch(x, moe.Routing(numbers, torch.ones(20, top_k)))
        y = parallel.combine(came.rows, came)
        assert torch.equal(y, top_k * x)
        y.sum().backward()
        return [came.rows.detach(), x.grad]

    wanted = run_ranks(4, lambda t: task(flat(t, 4)))
    found = run_grid(2, 2, lambda w, b: task(parallel_of(w, b, 4)), timeout=20)
    for mine, theirs in zip(found, wanted, strict=True):
        assert same(mine, theirs)


# Processes.


def everything(device: Any) -> dict[str, Any]:
    """A trained layer with and without nodes, bytes, and nodes that do not fit."""
    size = dist.get_world_size() // 2
    count = 2 * dist.get_world_size()
    with pytest.raises(ValueError, match=rf"node is {size + 1}; rank \d is in a group of .*moe"):
        moe.connect(count, node=size + 1)
    with pytest.raises(ValueError, match="node is 0; allowed"):
        moe.connect_all_to_all(node=0)
    # Other codecs would take each process seconds to load.
    exact, rounded = ("zipccl", "mx") if size == 2 else ("raw", "raw")
    train = functools.partial(trained, dtype=torch.bfloat16, top_k=2, lengths=LENGTHS)
    plain = moe.connect(count, None, None)
    coded = moe.connect(count, exact, exact, node=size)
    result: dict[str, Any] = {"same": same(train(coded), train(plain))}
    x = tokens(dist.get_rank(), count, torch.bfloat16, 200)[0]
    lossy = moe.connect(count, rounded, rounded, node=size)
    came = lossy.dispatch(x, routed(lossy.rank, size, count))
    result["dispatch"] = [lossy.raw_bytes, lossy.wire_bytes]
    layer = layer_of(lossy, torch.bfloat16, 2)
    parts = zip(layer.experts, came.rows.split(came.counts), strict=True)
    y = lossy.combine(torch.cat([expert(rows) for expert, rows in parts]), came)
    y.square().sum().backward()
    result["all"] = [lossy.raw_bytes, lossy.wire_bytes]
    swap = moe.connect_all_to_all(exact, exact, node=size)
    mine = torch.randn(4 * count, 33, generator=torch.Generator().manual_seed(lossy.rank))
    output, wanted = torch.empty_like(mine), torch.empty_like(mine)
    swap.all_to_all_single(output, mine)
    dist.all_to_all_single(wanted, mine)
    result["swapped"] = torch.equal(output, wanted)
    for parallel in (plain, coded, lossy, swap):
        parallel.close()
    return result


def gone(device: Any) -> None:
    """Rank 1 leaves: what others are told is in numbers of the whole."""
    parallel = moe.connect(8, "raw", "raw", node=2)
    x, logits = tokens(dist.get_rank(), 8, torch.float32, 9)
    routing = moe.route(logits.detach(), 2)
    parallel.dispatch(x, routing)
    rank = parallel.rank
    if rank != 1:
        with pytest.raises(tw.CollectiveError) as caught:
            parallel.dispatch(x, routing)
        assert caught.value.rank == rank
        where, partner = {
            0: ("within node 0", 1),
            2: ("within node 1", 3),
            3: ("between nodes, ranks of number 1", 1),
        }[rank]
        detail = caught.value.detail
        assert detail.startswith(f"{where} of moe.connect, forward: row_counts #"), detail
        assert re.search(rf"ranks \[{partner}\] have not noticed|all ranks have failed", detail)
    # The store is rank 0's: it leaves last.
    leave = Path(sys.argv[-1])
    leave.write_text("null")
    if rank == 0:
        time.sleep(5)
    os._exit(0)


@pytest.mark.slow
def test_a_rank_that_is_gone_is_named_as_the_whole_does(tmp_path: Path) -> None:
    launch(__file__, "gone", 4, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_processes(size: int, tmp_path: Path) -> None:
    found = launch(__file__, "everything", 2 * size, tmp_path)
    ratio = 0.52 if size == 2 else 1.0
    row, small = 2 * WIDTH, 4 * 128 + 8 * 8 * 4 * size
    assert all(rank["same"] and rank["swapped"] for rank in found)
    for ranks, rows, copies in ((found[:size], 100, 100), (found[size:], 200, 300)):
        for rank in ranks:
            raw, wire = rank["dispatch"]
            assert rows * row + 4 * copies <= raw <= rows * row + 4 * copies + small
            assert 0.5 * rows * row < wire < ratio * rows * row + 4 * copies + small
    raw, wire = (sum(rank["all"][i] for rank in found) for i in range(2))
    assert 0.5 * raw < wire < (ratio + 0.04) * raw


if __name__ == "__main__":
    join({"everything": everything, "gone": gone}, sys.argv[1:])
