"""Calls of a process group made by a communicator, between threads: exact, in odd sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tightwire as tw
from tightwire.adapters.transports.threads import run_ranks

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
if not dist.is_available():
    pytest.skip("PyTorch was built without torch.distributed", allow_module_level=True)

from tightwire.adapters.collectives import group_calls as calls  # noqa: E402

RANKS = 3
DTYPES = [torch.float32, torch.bfloat16, torch.float64]


def tensor(rank: int, shape: Any, dtype: Any = torch.float32) -> Any:
    generator = torch.Generator().manual_seed(1000 * rank + int(np.prod(shape)))
    return torch.randn(shape, generator=generator).to(dtype)


def poison(shape: Any, dtype: Any) -> Any:
    return torch.full(shape if isinstance(shape, tuple) else (shape,), float("nan"), dtype=dtype)


def total(parts: list[Any], op: Any) -> Any:
    """The sum or mean of tensors in the order of ranks, in float32, rounded once."""
    wide = torch.float64 if parts[0].dtype == torch.float64 else torch.float32
    found = parts[0].to(wide)
    for part in parts[1:]:
        found = found + part.to(wide)
    if op == dist.ReduceOp.AVG:
        found = found / len(parts)
    return found.to(parts[0].dtype)


def options(kind: Any, op: Any) -> Any:
    found = kind()
    found.reduceOp = op
    return found


def ranks(task: Callable[[tw.Communicator], None]) -> None:
    def run(transport: Any) -> None:
        with tw.Communicator(transport) as comm:
            task(comm)
            assert all(record.error is None for record in comm.trace())

    run_ranks(RANKS, run)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", [dist.ReduceOp.SUM, dist.ReduceOp.AVG])
def test_sums(dtype: Any, op: Any) -> None:
    def task(comm: tw.Communicator) -> None:
        shapes = [(7, 11), (1,), (501,)]
        xs = [tensor(comm.rank, shape, dtype) for shape in shapes]
        # Memory in another order than the dimensions.
        xs[0] = xs[0].t().contiguous().t()
        for given in ([xs[0].clone(memory_format=torch.preserve_format)], xs):
            call = calls.all_reduce(given, options(dist.AllreduceOptions, op))
            assert call is not None
            assert (call.op, call.dtype) == ("all_reduce", str(dtype)[6:])
            assert call.nbytes == sum(x.numel() * x.element_size() for x in given)
            call.run(comm, None)
            for x, shape in zip(given, shapes, strict=False):
                parts = [tensor(r, shape, dtype) for r in range(RANKS)]
                assert torch.equal(x, total(parts, op))

    ranks(task)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", [dist.ReduceOp.SUM, dist.ReduceOp.AVG])
def test_shares_of_sums(dtype: Any, op: Any) -> None:
    opts = options(dist.ReduceScatterOptions, op)

    def task(comm: tw.Communicator) -> None:
        sizes = [5, 1, 333]
        xs = [tensor(comm.rank, (RANKS * n, 2), dtype) for n in sizes]
        shares = [
            total([tensor(r, (RANKS * n, 2), dtype) for r in range(RANKS)], op)
            .chunk(RANKS)[comm.rank]
            for n in sizes
        ]  # fmt: skip
        # Memory in another order than the dimensions.
        outs = [poison((2, n), dtype).t() for n in sizes]
        found = calls.reduce_scatters(outs, xs, opts)
        assert found is not None
        found.run(comm, None)
        assert all(map(torch.equal, outs, shares))
        for x, share in zip(xs, shares, strict=True):
            out = poison((2, len(share)), dtype).t()
            single = calls.reduce_scatter(out, x.t().contiguous().t(), opts)
            assert single is not None
            single.run(comm, None)
            assert torch.equal(out, share)
            parts = [list(x.chunk(RANKS))]
            listed = calls.reduce_scatter_list([out := torch.full_like(share, 7)], parts, opts)
            assert listed is not None
            listed.run(comm, None)
            assert torch.equal(out, share)

    ranks(task)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gathers(dtype: Any) -> None:
    def task(comm: tw.Communicator) -> None:
        shapes = [(5, 3), (1,), (333,)]
        xs = [tensor(comm.rank, shape, dtype) for shape in shapes]
        wholes = [torch.cat([tensor(r, s, dtype) for r in range(RANKS)]) for s in shapes]
        outs = [torch.full_like(whole, torch.nan) for whole in wholes]
        several = calls.all_gathers(outs, xs)
        assert several is not None
        several.run(comm, None)
        assert all(map(torch.equal, outs, wholes))
        for x, whole in zip(xs, wholes, strict=True):
            out = torch.full_like(whole, torch.nan)
            # The input lies where it belongs in the output, as FSDP has it.
            mine = out.chunk(RANKS)[comm.rank]
            mine.copy_(x)
            single = calls.all_gather(out, mine)
            assert single is not None
            single.run(comm, None)
            assert torch.equal(out, whole)
            listed = calls.all_gather_list([parts := [torch.zeros_like(x) for _ in range(3)]], [x])
            assert listed is not None
            listed.run(comm, None)
            assert torch.equal(torch.cat(parts), whole)

    ranks(task)


def test_exchanges() -> None:
    splits = [[1, 0, 4], [2, 3, 0], [0, 0, 0]]

    def task(comm: tw.Communicator) -> None:
        me, width = comm.rank, 37
        x = tensor(me, (RANKS * 2, width))
        out = poison((RANKS * 2, width), x.dtype)
        equal = calls.all_to_all(out, x, [], [])
        assert equal is not None
        assert equal.op == "all_to_all"
        equal.run(comm, None)
        parts = [tensor(r, (RANKS * 2, width)).chunk(RANKS)[me] for r in range(RANKS)]
        assert torch.equal(out, torch.cat(parts))

        x = tensor(me, (sum(splits[me]), width))
        inward = [row[me] for row in splits]
        out = poison((sum(inward), width), x.dtype)
        unequal = calls.all_to_all(out, x, inward, splits[me])
        assert unequal is not None
        assert unequal.op == "all_to_all_v"
        unequal.run(comm, None)
        parts = [tensor(r, (sum(splits[r]), width)).split(splits[r])[me] for r in range(RANKS)]
        assert torch.equal(out, torch.cat(parts))

        x = tensor(me, (40, 3)) if me == 1 else poison((40, 3), torch.float32)
        opts = dist.BroadcastOptions()
        opts.rootRank = 1
        spread = calls.broadcast([x], opts)
        assert spread is not None
        spread.run(comm, None)
        assert torch.equal(x, tensor(1, (40, 3)))

    ranks(task)


def test_float32_is_rounded_on_the_wire_where_the_rule_says_so() -> None:
    def task(comm: tw.Communicator) -> None:
        x = tensor(comm.rank, (6000,))
        call = calls.all_reduce([x])
        assert call is not None
        call.run(comm, "bfloat16")
        parts = [tensor(r, (6000,)).bfloat16().float() for r in range(RANKS)]
        assert torch.equal(x, total(parts, None).bfloat16().float())
        assert comm.trace()[-1].raw_bytes == 4 * 2000 * 2

    ranks(task)


def test_calls_that_only_the_network_makes_are_left_to_it() -> None:
    x, half = torch.ones(6), torch.ones(6).bfloat16()
    largest = options(dist.AllreduceOptions, dist.ReduceOp.MAX)
    factor = options(dist.AllreduceOptions, dist._make_nccl_premul_sum(0.5))
    assert calls.all_reduce([x], largest) is None
    assert calls.all_reduce([x], factor) is None
    assert calls.all_reduce([x], dist.ReduceOp.SUM) is None
    assert calls.all_reduce(x, dist.ReduceOp.SUM) is None
    assert calls.all_reduce([x, half]) is None
    assert calls.all_reduce([]) is None
    assert calls.all_reduce([x.to_sparse()]) is None
    assert calls.broadcast([x, x], dist.BroadcastOptions()) is None
    assert calls.broadcast([x]) is None
    assert calls.all_gather([x], x) is None
    assert calls.all_gather(half, x) is None
    assert calls.all_gather_list([[x, half]], [x]) is None
    assert calls.all_gather_list([[x, torch.ones(5)]], [x]) is None
    assert calls.reduce_scatters([x], [x, x]) is None
    assert calls.reduce_scatter_list([x], [[x, torch.ones(5)]]) is None
    assert calls.all_to_all(x, half) is None
    assert calls.all_to_all(torch.ones(3, 2), torch.ones(2, 3), [3], [2]) is None
