"""Experts on several ranks against one process that has them all: also what processes run."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tightwire as tw
from processes import join, launch, run_example
from ranks import Alone
from support import examples

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("PyTorch was built without gloo", allow_module_level=True)

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from expert_layers import WIDTH, Expert, dense, layer_of, tokens, trained  # noqa: E402
from tightwire.adapters.collectives import coding, message_views, tensors  # noqa: E402
from tightwire.adapters.collectives.chunk_views import DESCRIPTOR_NBYTES  # noqa: E402
from tightwire.adapters.collectives.cost import Choice  # noqa: E402
from tightwire.adapters.collectives.side_stream import SideStream  # noqa: E402
from tightwire.adapters.training import expert_rows, moe, weighted_rows  # noqa: E402
from tightwire.adapters.transports.threads import ThreadTransport, connect, run_ranks  # noqa: E402


def parallel_of(
    transport: Any, experts: int, forward: Any = "zipccl", backward: Any = None, **options: Any
) -> moe.ExpertParallel:
    """Expert parallelism over threads: one transport for both directions, or a pair of them."""
    there = tw.Communicator(transport, forward, name="there", **options)
    if backward is None:
        return moe.ExpertParallel(there, experts=experts)
    other = ThreadTransport(transport.rank, SECOND[transport._pipes[0][0]], 30.0)
    back = tw.Communicator(other, backward, name="back", **options)
    return moe.ExpertParallel(there, back, experts=experts)


#: Pipes of a second group of the same ranks, by a pipe of the first.
SECOND: dict[Any, Any] = {}


def run_pairs(ranks: int, task: Callable[[ThreadTransport], Any]) -> list[Any]:
    """As `run_ranks`, where the ranks of the task may form a second group."""
    second = connect(ranks)[0]._pipes

    def run(transport: ThreadTransport) -> Any:
        SECOND[transport._pipes[0][0]] = second
        return task(transport)

    return run_ranks(ranks, run)


@pytest.mark.parametrize("top_k", [1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_a_layer_is_that_of_one_process(ranks: int, top_k: int) -> None:
    """In float64, where order hardly matters."""
    count = 2 * ranks if ranks > 1 else 3
    experts = [Expert(i).double() for i in range(count)]
    wanted = []
    for rank in range(ranks):
        x, logits = tokens(rank, count, torch.float64)
        y = dense(x, logits, experts, top_k)
        y.square().sum().backward()
        wanted.append((y.detach(), x.grad, logits.grad))
    found = run_ranks(ranks, lambda t: trained(parallel_of(t, count), torch.float64, top_k))
    for rank, (mine, theirs) in enumerate(zip(found, wanted, strict=True)):
        for a, b in zip(mine, theirs, strict=False):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
        each = count // ranks
        own = [p for e in experts[rank * each : (rank + 1) * each] for p in e.parameters()]
        for gradient, p in zip(mine[3:], own, strict=True):
            torch.testing.assert_close(gradient, p.grad, rtol=1e-11, atol=1e-11)
    # No token has gone to the last expert.
    assert not any(gradient.any() for gradient in found[-1][-4:]) or top_k == count


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sizes": "between"},
        {"verify": True},
        {"verify": "digest", "algorithm": "native"},
        {"algorithm": "pipelined"},
        {"algorithm": "auto"},
    ],
    ids=str,
)
def test_lossless_codecs_change_no_bit(options: dict[str, Any]) -> None:
    def task(transport: ThreadTransport) -> None:
        plain = parallel_of(transport, 6, "raw", "raw", algorithm="native")
        wanted = trained(plain, torch.bfloat16, 2)
        parallel = parallel_of(transport, 6, "zipccl", "zipccl", **options)
        found = trained(parallel, torch.bfloat16, 2)
        for a, b in zip(found, wanted, strict=True):
            assert torch.equal(a.view(torch.int16), b.view(torch.int16))
        # Descriptors, by which ranks compare their calls before rows move.
        assert plain.wire_bytes == plain.raw_bytes + 4 * 2 * DESCRIPTOR_NBYTES

    run_pairs(3, task)


def test_rows_arrive_by_expert_bit_for_bit_without_padding() -> None:
    ranks, count, top_k, n = 3, 6, 2, 500
    data = [tokens(r, count, torch.bfloat16, n + 7 * r) for r in range(ranks)]
    routings = [moe.route(logits.detach(), top_k) for _, logits in data]

    def task(transport: ThreadTransport) -> None:
        parallel = parallel_of(transport, count)
        me = parallel.rank
        came = parallel.dispatch(data[me][0].detach(), routings[me])
        wanted = [
            x.detach()[(routing.experts == e).any(1)]
            for e in parallel.local_experts
            for (x, _), routing in zip(data, routings, strict=True)
        ]
        assert torch.equal(came.rows, torch.cat(wanted))
        lengths = [part.shape[0] for part in wanted]
        counts = [sum(lengths[k : k + ranks]) for k in range(0, len(lengths), ranks)]
        assert came.counts == counts == came.counts_on_device.tolist()
        move = parallel.trace()[-1]
        others = sum(came.sends) - came.sends[me]
        assert move.raw_bytes == 2 * WIDTH * others
        assert move.wire_bytes < 0.8 * move.raw_bytes
        assert [record.collective for record in parallel.trace()] == ["row_counts", "all_to_all"]
        assert parallel.wire_bytes == sum(r.wire_bytes for r in parallel.trace())

    run_ranks(ranks, task)


def test_own_rows_are_exact_where_ranks_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not encoded where all others are."""
    chosen = Choice("compressed", 1, 0.0, 0.0, "")
    monkeypatch.setattr(tw.Communicator, "_choose_splits", lambda *args: chosen)

    def task(transport: ThreadTransport) -> None:
        parallel = parallel_of(transport, 2, "mx", algorithm="auto")
        x = tokens(0, 2, torch.bfloat16, 100)[0].detach()
        routing = moe.Routing((torch.arange(100) % 2)[:, None], torch.ones(100, 1))
        parts = parallel.dispatch(x, routing).rows.split(50)
        assert [torch.equal(part, x[parallel.rank :: 2]) for part in parts] == [
            rank == parallel.rank for rank in range(2)
        ]
        assert parallel.wire_bytes == sum(record.wire_bytes for record in parallel.trace())

    run_ranks(2, task)


def test_codecs_of_the_two_directions() -> None:
    """What comes from other ranks is what the codec makes of it; a rank's own rows are exact."""
    ranks, count = 2, 2
    data = [tokens(r, count, torch.bfloat16, 300) for r in range(ranks)]
    # Half of the tokens of each rank to each expert, in order: the batch is known.
    experts = (torch.arange(300) >= 150).long()[:, None]
    routing = moe.Routing(experts, torch.ones(300, 1))

    def task(transport: ThreadTransport) -> None:
        parallel = parallel_of(transport, count, "taco", "mx")
        me, x = parallel.rank, data[parallel.rank][0].detach().clone().requires_grad_()
        came = parallel.dispatch(x, routing)
        theirs = data[1 - me][0].detach()[150 * me :][:150]
        arrived = came.rows[150 * (1 - me) :][:150].detach()
        own = came.rows[150 * me :][:150].detach()
        assert torch.equal(own, x.detach()[150 * me :][:150])
        assert torch.equal(arrived, through("taco", theirs))
        assert 0 < tw.error(theirs, arrived).vnmse < 2.5e-3
        gradient = torch.randn(300, WIDTH, generator=torch.Generator().manual_seed(5))
        came.rows.backward(gradient.bfloat16())
        # Rank r's gradients of rows of rank 1 - r are those that it got at their place.
        wanted = gradient.bfloat16().clone()
        at = slice(150 * (1 - me), 150 * (2 - me))
        wanted[at] = through("mx", gradient.bfloat16()[150 * me :][:150])
        assert torch.equal(x.grad, wanted)
        names = [record.algorithm for record in parallel.trace()]
        assert names[-2:] == ["all-to-all, no sizes, taco", "all-to-all, no sizes, mx"]

    def through(codec: str, rows: Any) -> Any:
        return tw.decode(tw.encode(rows.reshape(-1), codec)).view(rows.shape)

    run_pairs(ranks, task)


def test_lossy_training_is_close() -> None:
    def task(transport: ThreadTransport) -> list[float]:
        wanted = trained(parallel_of(transport, 6, "raw", "raw"), torch.float32, 2)
        found = trained(parallel_of(transport, 6, "mx", "taco"), torch.float32, 2)
        pairs = [(a, b) for a, b in zip(wanted, found, strict=True) if a.any()]
        return [tw.error(a, b).vnmse for a, b in pairs]

    for errors in run_pairs(3, task):
        assert all(error < 1e-2 for error in errors)
    assert any(error > 1e-6 for error in errors)


@examples(25)
@given(st.data())
def test_any_routing(data: st.DataObject) -> None:
    """Experts that return their rows: the result is the token times the sum of its weights."""
    ranks = data.draw(st.sampled_from([1, 2, 3, 4]), "ranks")
    count = ranks * data.draw(st.integers(1, 3), "experts of a rank")
    width = data.draw(st.integers(1, 40), "width")
    numbers = st.integers(0, count - 1)
    top_k = data.draw(st.integers(1, 3), "top_k")
    chosen = [
        data.draw(st.lists(st.tuples(*[numbers] * top_k), max_size=30), f"rank {r}")
        for r in range(ranks)
    ]
    codec = data.draw(st.sampled_from(["zipccl", "raw"]))

    def task(transport: ThreadTransport) -> None:
        parallel = parallel_of(transport, count, codec)
        mine = chosen[parallel.rank]
        experts = torch.tensor(mine, dtype=torch.int64).reshape(len(mine), top_k)
        weights = 2.0 ** torch.arange(top_k).repeat(len(mine), 1)
        x = torch.arange(len(mine) * width).view(-1, width) + 1000.0 * parallel.rank
        x.requires_grad_()
        came = parallel.dispatch(x, moe.Routing(experts, weights.requires_grad_()))
        for e, rows in zip(parallel.local_experts, came.rows.split(came.counts), strict=True):
            assert rows.shape[0] == sum(row.count(e) for rank in chosen for row in rank)
        y = parallel.combine(came.rows, came)
        factor = 2**top_k - 1
        assert torch.equal(y, x * factor)
        y.sum().backward()
        assert torch.equal(x.grad, torch.full_like(x, factor))
        assert torch.equal(weights.grad, x.detach().sum(1, keepdim=True).expand(-1, top_k))

    run_ranks(ranks, task)


def test_experts_may_be_combined_by_another_object() -> None:
    """Tokens in 8 bits, results exactly."""

    def task(transport: ThreadTransport) -> None:
        there = parallel_of(transport, 4, "mx")
        back = parallel_of(transport, 4, "zipccl")
        x, logits = tokens(transport.rank, 4, torch.bfloat16, 64)
        came = there.dispatch(x, moe.route(logits, 1))
        back.combine(came.rows * 2, came).sum().backward()
        assert x.grad.isfinite().all()
        assert [r.algorithm.split(", ")[-1] for r in there.trace()] == ["native", "mx", "mx"]
        assert {r.algorithm.split(", ")[-1] for r in back.trace()} == {"zipccl"}

    run_ranks(2, task)


def test_batches_and_shapes_of_a_layer() -> None:
    """Tokens of any leading dimensions, and no gradients at all."""

    def task(transport: ThreadTransport) -> None:
        layer = layer_of(parallel_of(transport, 2), torch.float32, 2)
        x, logits = tokens(transport.rank, 2, torch.float32, 30)
        with torch.inference_mode():
            flat = layer(x, logits)
            deep = layer(x.view(2, 5, 3, -1), logits.view(2, 5, 3, -1))
            assert torch.equal(deep.view(30, -1), flat)
        with pytest.raises(ValueError, match=r"logits \[30, 3\]; needed: \(\.\.\., hidden\)"):
            layer(x, logits.new_zeros(30, 3))

    run_ranks(2, task)


def test_autocast_leaves_sums_of_results_alone() -> None:
    """As kernels do."""

    def task(transport: ThreadTransport) -> None:
        parallel = parallel_of(transport, 2)
        x, logits = tokens(transport.rank, 2, torch.float32, 30)
        with torch.autocast("cpu", torch.bfloat16):
            came = parallel.dispatch(x, moe.route(logits, 2))
            y = parallel.combine(came.rows, came)
        assert y.dtype == torch.float32
        torch.testing.assert_close(y, x)
        y.sum().backward()
        torch.testing.assert_close(x.grad, torch.ones_like(x))

    run_ranks(2, task)


# torch.distributed.all_to_all_single.


def test_all_to_all_single_is_that_of_torch() -> None:
    ranks = 3
    splits = [[2, 0, 5], [0, 0, 3], [40, 1, 0]]
    xs = [torch.randn(sum(row), 50, dtype=torch.float64) for row in splits]
    parts = [x.split(row) for x, row in zip(xs, splits, strict=True)]

    def task(transport: ThreadTransport) -> None:
        parallel = moe.AllToAll(tw.Communicator(transport))
        me = parallel.rank
        x = xs[me].clone().requires_grad_()
        inward = [row[me] for row in splits]
        output = torch.empty(sum(inward), 50, dtype=torch.float64)
        swap = functools.partial(parallel.all_to_all_single, output, x, inward, splits[me])
        assert swap() is output
        wanted = torch.cat([parts[i][me] for i in range(ranks)])
        assert torch.equal(output, wanted)
        # What is done to the output reaches the input.
        (output * (me + 1)).sum().backward()
        factors = torch.arange(1, ranks + 1).repeat_interleave(torch.tensor(splits[me]))
        assert torch.equal(x.grad, factors[:, None].expand(-1, 50).double())
        with torch.no_grad():
            output = torch.empty_like(output)
            work = parallel.all_to_all_single(output, x, inward, splits[me], async_op=True)
            work.wait()
            assert torch.equal(output, wanted)
        equal = torch.empty(ranks * 2)
        parallel.all_to_all_single(equal, torch.arange(ranks * 2.0) + 10 * me)
        assert equal.tolist() == [10 * i + 2 * me + k for i in range(ranks) for k in range(2)]

    run_ranks(ranks, task)


def test_splits_that_do_not_fit() -> None:
    (transport,) = connect(1)
    parallel = moe.AllToAll(tw.Communicator(transport, name="experts"))
    x, out = torch.zeros(5, 2), torch.zeros(5, 2)
    for splits in ([4], [2, 3], [-1]):
        with pytest.raises(ValueError, match=r"input_split_sizes is .* rank 0 of 'experts'"):
            parallel.all_to_all_single(out, x, [5], splits)
    with pytest.raises(ValueError, match=r"output_split_sizes is \[6\] .*output has 5 rows"):
        parallel.all_to_all_single(out, x, [6], [5])
    with pytest.raises(ValueError, match="group is elsewhere; allowed"):
        parallel.all_to_all_single(out, x, group="elsewhere")
    parallel = moe.AllToAll(tw.Communicator(Alone(2)))
    with pytest.raises(ValueError, match="input has 5 rows on rank 0; allowed without"):
        parallel.all_to_all_single(out, x)

    def task(transport: ThreadTransport) -> None:
        parallel = moe.AllToAll(tw.Communicator(transport))
        outs = 3 if parallel.rank else 2
        with pytest.raises(tw.CollectiveError) as caught:
            parallel.all_to_all_single(torch.zeros(outs + 1, 2), x[:4], [1, outs], [3, 1])
        own = f"rank {parallel.rank} sends itself another number of rows than it expects; "
        assert caught.value.detail.startswith(own)
        # Rank 1 sends 3 rows to rank 0, which expects 2.
        others = "ranks [1] make another call, or one with another dtype or shape, or splits that"
        assert (others in caught.value.detail) == (parallel.rank == 0)

    run_ranks(2, task)


@pytest.mark.parametrize("codec", ["zipccl", "mx", "raw"])
@pytest.mark.parametrize("options", [{}, {"sizes": "between"}, {"algorithm": "auto"}], ids=str)
def test_ranks_may_differ_in_whether_they_give_splits(codec: str, options: Any) -> None:
    def task(transport: ThreadTransport) -> None:
        parallel = moe.AllToAll(tw.Communicator(transport, codec, **options))
        x = torch.arange(6 * 64.0).view(6, 64).requires_grad_()
        output = torch.empty(6, 64)
        splits = ([2] * 3, [2] * 3) if parallel.rank == 1 else ()
        parallel.all_to_all_single(output, x, *splits)
        own = x.detach()[2 * parallel.rank :][:2]
        for i, part in enumerate(output.detach().split(2)):
            assert tw.error(own, part).vnmse < 4e-3 if codec == "mx" else torch.equal(part, own), i
        output.sum().backward()
        assert x.grad.eq(1).all()

    run_ranks(3, task, timeout=20)


# Bad input and faults.


@pytest.mark.parametrize(
    ("fault", "what"),
    [
        ("negative", "numbers of experts are out of range"),
        ("above", "numbers of experts are out of range"),
        ("nan", "router weights are not all finite"),
        ("infinite", "router weights are not all finite"),
    ],
)
def test_a_bad_routing_is_an_error_of_all_ranks(fault: str, what: str) -> None:
    def task(transport: ThreadTransport) -> str:
        parallel = parallel_of(transport, 6)
        x, logits = tokens(transport.rank, 6, torch.float32, 9)
        good = moe.route(logits.detach(), 2)
        experts, weights = good.experts.clone(), good.weights.clone()
        if transport.rank == 1:
            if fault in ("negative", "above"):
                experts[4, 1] = -1 if fault == "negative" else 6
            else:
                weights[8, 0] = torch.nan if fault == "nan" else torch.inf
        with pytest.raises(tw.CollectiveError) as caught:
            parallel.dispatch(x, moe.Routing(experts, weights))
        assert (caught.value.stage, caught.value.rank) == ("counts", transport.rank)
        # The ranks are in step, and nothing but counts has travelled.
        came = parallel.dispatch(x, good)
        assert [r.collective for r in parallel.trace()] == ["row_counts"] * 2 + ["all_to_all"]
        assert sum(came.counts) == came.rows.shape[0]
        return caught.value.detail

    assert run_ranks(3, task) == [f"rank 1 of 'there': {what}"] * 3


@pytest.mark.parametrize("codec", ["zipccl", "mx", None])
@pytest.mark.parametrize(
    "other", [torch.ones(0, 65), torch.ones(0, 64).double()], ids=["width", "dtype"]
)
def test_other_results_are_told_before_they_move(codec: str | None, other: Any) -> None:
    """Over gloo they would end the process."""
    moved: list[int] = []

    class Noting(ThreadTransport):
        def all_to_all_v(self, outs: Any, xs: Any) -> None:
            moved.append(self.rank)
            super().all_to_all_v(outs, xs)

    def task(transport: ThreadTransport) -> None:
        noting = Noting(transport.rank, transport._pipes, transport.timeout)
        options: dict[str, Any] = {"algorithm": "native"} if codec is None else {"codec": codec}
        parallel = moe.ExpertParallel(tw.Communicator(noting, **options), experts=3)
        numbers = (torch.arange(60) % 3)[:, None]
        came = parallel.dispatch(torch.ones(60, 64), moe.Routing(numbers, torch.ones(60, 1)))
        y = came.rows if transport.rank != 1 else other.new_ones(60, other.shape[1])
        with pytest.raises(tw.CollectiveError, match=r"ranks \[.*\] make another call") as caught:
            parallel.combine(y, came)
        assert caught.value.stage == "sizes"

    run_ranks(3, task)
    assert sorted(moved) == [0, 1, 2]


def test_nan_logits_name_their_rank() -> None:
    def task(transport: ThreadTransport) -> None:
        layer = layer_of(parallel_of(transport, 4), torch.float32, 2)
        x, logits = tokens(transport.rank, 4, torch.float32, 9)
        bad = logits.detach().clone()
        bad[3] = torch.nan
        with pytest.raises(tw.CollectiveError, match="rank 0 of 'there': router weights"):
            layer(x, logits if transport.rank else bad)

    run_ranks(2, task)


def test_ranks_that_differ() -> None:
    def experts(transport: ThreadTransport) -> None:
        comm = tw.Communicator(transport, name="layer 3")
        with pytest.raises(tw.CollectiveError, match=r"ranks \[0\]: 4 bins .* ranks \[1\]: 6 bins"):
            moe.ExpertParallel(comm, experts=4 + 2 * comm.rank)

    def rows(transport: ThreadTransport) -> None:
        parallel = parallel_of(transport, 2)
        x = torch.zeros(3, 5 + parallel.rank)
        routing = moe.Routing(torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1))
        with pytest.raises(tw.CollectiveError, match=r"ranks \[.\] of 'there' make another call"):
            parallel.dispatch(x, routing)
        with pytest.raises(tw.CollectiveError, match="an earlier call has failed"):
            parallel.dispatch(x, routing)

    run_ranks(2, experts)
    run_ranks(2, rows)


def test_bad_arguments() -> None:
    parallel = parallel_of(connect(1)[0], 2)
    with pytest.raises(ValueError, match=r"experts is 0; allowed: multiples of 1, the ranks"):
        parallel_of(connect(1)[0], 0)
    with pytest.raises(ValueError, match=r"experts is 3; allowed: multiples of 2, the ranks"):
        moe.ExpertParallel(tw.Communicator(Alone(2)), experts=3)
    with pytest.raises(ValueError, match="rank and world size are"):
        moe.AllToAll(tw.Communicator(Alone(2)), tw.Communicator(connect(1)[0]))
    x, numbers = torch.zeros(3, 4), torch.zeros(3, 2, dtype=torch.int64)
    for routing in (
        moe.Routing(numbers, torch.ones(3, 1)),
        moe.Routing(numbers[:2], torch.ones(2, 2)),
        moe.Routing(numbers[:, 0], torch.ones(3)),
        moe.Routing(numbers[:, :0], torch.ones(3, 0)),
    ):
        with pytest.raises(ValueError, match=r"needed: \(tokens, \.\.\.\), and \(tokens, top_k\)"):
            parallel.dispatch(x, routing)
    for routing in (moe.Routing(numbers.int(), torch.ones(3, 2)), moe.Routing(numbers, numbers)):
        with pytest.raises(TypeError, match=r"needed: torch\.int64 and floats"):
            parallel.dispatch(x, routing)
    with pytest.raises(TypeError, match="allowed: tensors of PyTorch"):
        parallel.dispatch(x.numpy(), moe.Routing(numbers, torch.ones(3, 2)))
    came = parallel.dispatch(x.requires_grad_(), moe.Routing(numbers, torch.ones(3, 2)))
    with pytest.raises(ValueError, match=r"needed: \(6, width\)"):
        parallel.combine(torch.zeros(5, 4), came)
    with pytest.raises(TypeError, match=r"y is torch\.int32 on rank 0 of 'there'; allowed: floats"):
        parallel.combine(torch.zeros(6, 4, dtype=torch.int32), came)
    with pytest.raises(ValueError, match="y does not depend on the rows dispatched to rank 0"):
        parallel.combine(torch.zeros(6, 4), came)
    with pytest.raises(ValueError, match="experts are 1 on rank 0; needed: 2"):
        moe.MixtureOfExperts([Expert(0)], parallel)
    for logits, top_k in ((torch.zeros(3, 2), 3), (torch.zeros(3, 2), 0), (torch.zeros(2), 1)):
        with pytest.raises(ValueError, match="top_k from 1 to experts"):
            moe.route(logits, top_k)


@pytest.mark.parametrize(
    ("kind", "stage"),
    [("all_gather", "counts"), ("all_to_all", "sizes"), ("all_to_all_v", "decode")],
)
def test_damage_names_the_rank_that_sent(kind: str, stage: str) -> None:
    """Of the counts, of what messages need, or of what is encoded."""

    class Damaged(ThreadTransport):
        on = False

        def _take(self, what: str, source: int, out: Any) -> None:
            super()._take(what, source, out)
            if self.on and (what, source) == (kind, 1) and out.shape[0] > 8:
                out[out.shape[0] // 2] ^= 4

    def task(transport: ThreadTransport) -> None:
        inner = transport
        if transport.rank == 0:
            inner = Damaged(0, transport._pipes, transport.timeout)
        parallel = parallel_of(inner, 2)
        x, logits = tokens(transport.rank, 2, torch.bfloat16, 400)
        routing = moe.route(logits.detach() * 0 + torch.tensor([0.0, 0.1]), 2)
        if isinstance(inner, Damaged):
            inner.on = True
        if transport.rank:
            # Its own are whole; what rank 0 has raised may reach it as a peer that has left.
            parallel.dispatch(x, routing)
            return
        with pytest.raises(tw.CollectiveError, match=r"from rank 1|ranks \[1\]") as caught:
            parallel.dispatch(x, routing)
        assert caught.value.stage == stage
        inner.close()

    if kind != "all_to_all_v":
        with pytest.raises(tw.CollectiveError, match="rank 0 has left"):
            run_ranks(2, task)
    else:
        run_ranks(2, task)


# What an exchange costs.

#: Operations of PyTorch that launch nothing.
VIEWS = (
    *("view", "slice", "select", "as_strided", "split", "detach", "unsqueeze", "expand", "unbind"),
    *("empty", "new_empty", "set", "lift_fresh", "reshape"),
)


class Operations(TorchDispatchMode):  # type: ignore[misc]
    """Names of operations that would launch something on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        if name.strip("_") not in VIEWS:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def use_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have exchanges on the CPU take the kernels, under the interpreter."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled for the GPU here")
    from tightwire import gpu

    encode = functools.partialmethod(tw.Codec.encode_many, backend="triton")
    monkeypatch.setattr(tw.Codec, "encode_many", encode)
    decode = functools.partial(tw.decode_many, backend="triton")
    monkeypatch.setattr(coding, "decode_many", decode)
    monkeypatch.setattr(message_views, "Buffer", SimpleNamespace(wrap=gpu.wrap))


def dispatched_alone(ranks: int, codec: str) -> tuple[Any, Any]:
    """Tokens, and what comes of them to a rank that gets from each other what it sends there."""
    parallel = parallel_of(Alone(ranks), ranks, codec)
    numbers = torch.arange(2 * ranks).view(-1, 2) % ranks
    x = torch.randn(ranks, 1040, generator=torch.Generator().manual_seed(0)).bfloat16()
    came = parallel.dispatch(x, moe.Routing(numbers, torch.ones(ranks, 2)))
    parallel._forward.comm.check()
    return x, came.rows


@pytest.mark.slow
def test_kernels_give_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    use_kernels(monkeypatch)
    x, rows = dispatched_alone(4, "zipccl")
    # Tokens 0 and 2 go to experts 0 and 1, the others to 2 and 3.
    assert torch.equal(rows, x[[0, 2, 0, 2, 1, 3, 1, 3]])


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_kernels_add_up_results(top_k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As PyTorch does, forward and backward."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled for the GPU here")
    from tightwire.codecs.common import weighted_triton

    def task(transport: ThreadTransport) -> list[Any]:
        return trained(parallel_of(transport, 6), torch.float32, top_k)

    wanted = run_ranks(2, task)
    monkeypatch.setattr(weighted_rows, "kernels_for", lambda y: weighted_triton)
    for mine, theirs in zip(run_ranks(2, task), wanted, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_kernels_order_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """As PyTorch does: the same bits, and the same faults."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled for the GPU here")
    from tightwire.codecs.common import order_triton

    ordered, lock = order_triton.ordered, threading.Lock()

    def one_by_one(*args: Any) -> Any:
        # Triton's interpreter changes what threads share.
        with lock:
            return ordered(*args)

    monkeypatch.setattr(order_triton, "ordered", one_by_one)

    def task(transport: ThreadTransport) -> list[Any]:
        parallel = parallel_of(transport, 6)
        found = trained(parallel, torch.float32, 2)
        x = tokens(transport.rank, 6, torch.float32, 40)[0].detach()
        numbers = torch.zeros(40, 2, dtype=torch.int64)
        numbers[7, 1] = 6 * transport.rank
        weights = torch.ones(40, 2)
        weights[8, 0] = torch.nan if transport.rank else 1
        with pytest.raises(tw.CollectiveError) as caught:
            parallel.dispatch(x, moe.Routing(numbers, weights))
        return [found, caught.value.detail]

    wanted = run_ranks(2, task)
    monkeypatch.setattr(expert_rows, "has_kernels", lambda x: True)
    for (mine, fault), (theirs, known) in zip(run_ranks(2, task), wanted, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
        assert fault == known
        assert "weights are not all finite" in fault
        assert "numbers of experts are out of range" in fault


@pytest.mark.parametrize("codec", ["zipccl", "mx"])
def test_as_many_launches_for_any_number_of_ranks(
    codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of kernels, which are only counted, and of PyTorch's operations."""
    use_kernels(monkeypatch)
    from tightwire.codecs.common.launch_triton import Variant

    kernels: list[str] = []
    empty = tensors.empty_bytes
    note = lambda self, *args, **options: kernels.append(self.kernel.__name__)  # noqa: E731
    monkeypatch.setattr(Variant, "launch", note)
    # Where no kernel writes them sizes are 0.
    monkeypatch.setattr(tensors, "empty_bytes", lambda *args: empty(*args).zero_())
    found = []
    for ranks in (4, 16, 64):
        kernels.clear()
        with Operations() as operations:
            dispatched_alone(ranks, codec)
        found.append((list(kernels), operations.names))
    assert found[0] == found[1] == found[2]
    # Two or three launches encode, and two decode.
    assert len(found[0][0]) == (5 if codec == "zipccl" else 4)


@pytest.mark.parametrize("codec", ["zipccl", "mx"])
def test_an_exchange_changes_streams_once(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And all its bytes are counted."""
    changes: list[int] = []
    run_here = SideStream.run_here

    def note(*args: Any) -> None:
        changes.append(1)
        run_here(*args)

    monkeypatch.setattr(SideStream, "run_here", note)
    parallel = parallel_of(Alone(2), 4, codec)
    routing = moe.Routing(torch.arange(80).view(40, 2) % 4, torch.ones(40, 2))
    x = torch.ones(40, WIDTH, dtype=torch.bfloat16).requires_grad_()
    came = parallel.dispatch(x, routing)
    assert len(changes) == 1
    y = parallel.combine(came.rows, came)
    assert len(changes) == 2
    y.sum().backward()
    assert len(changes) == 4
    records = parallel.trace()
    assert [record.collective for record in records] == ["row_counts"] + 4 * ["all_to_all"]
    assert parallel.wire_bytes == sum(record.wire_bytes for record in records)


def everything(device: Any) -> dict[str, Any]:
    """On a process of a group: bits of a trained layer with and without codecs, and bytes."""
    plain, coded = (moe.connect(6, codec, codec, device=device) for codec in (None, "zipccl"))
    pairs = zip(trained(plain, torch.bfloat16, 2), trained(coded, torch.bfloat16, 2), strict=True)
    same = all(torch.equal(a, b) for a, b in pairs)
    lossy = moe.connect(6, "taco", "mx", device=device)
    x, logits = tokens(dist.get_rank(), 6, torch.bfloat16, 400)
    y = layer_of(lossy, torch.bfloat16, 2)(x, logits)
    y.square().sum().backward()
    z = layer_of(plain, torch.bfloat16, 2)(x, logits).detach()
    swap = moe.connect_all_to_all(device=device)
    size, me = dist.get_world_size(), dist.get_rank()
    output, plain = torch.empty(4 * size, 33), torch.empty(4 * size, 33)
    torch.manual_seed(me)
    mine = torch.randn(4 * size, 33)
    swap.all_to_all_single(output, mine, group=dist.group.WORLD)
    dist.all_to_all_single(plain, mine)
    return {
        "same": same and torch.equal(output, plain),
        "error": tw.error(z, y.detach()).vnmse,
        "ratio": lossy.wire_bytes / lossy.raw_bytes,
    }


@pytest.mark.slow
def test_processes(tmp_path: Path) -> None:
    for found in launch(__file__, "everything", 2, tmp_path):
        assert found["same"]
        assert 0 < found["error"] < 1e-2
        assert 0.4 < found["ratio"] < 0.56


@pytest.mark.long
def test_example(tmp_path: Path) -> None:
    pairs = run_example(moe, 2, tmp_path)
    assert len(pairs) == 2
    assert all(0 < wire < raw for raw, wire in pairs)


if __name__ == "__main__":
    join(globals(), sys.argv[1:])
