"""The backend of torchcomms, with a module of its interface: ranks are threads over gloo."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import threading
import tomllib
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import tightwire as tw
from tightwire.adapters.transports.threads import run_ranks

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("PyTorch was built without gloo", allow_module_level=True)

import fake_torchcomms as torchcomms  # noqa: E402
from fake_torchcomms import ReduceOp  # noqa: E402

MODULE = "tightwire.adapters.collectives.torchcomms_backend"
#: Elements of a rank's share, and of one that is below the size from which calls are compressed.
N, FEW = 6007, 10
RANKS = 4


@pytest.fixture(autouse=True)
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module of the backend, imported where there is a torchcomms."""
    monkeypatch.setitem(sys.modules, "torchcomms", torchcomms)
    monkeypatch.setattr(torchcomms, "_classes", {})
    monkeypatch.delenv("TIGHTWIRE_POLICY", raising=False)
    sys.modules.pop(MODULE, None)
    yield importlib.import_module(MODULE)
    sys.modules.pop(MODULE, None)


def run(task: Callable[[int], None], ranks: int = RANKS) -> None:
    """Run a function on every rank, which torchcomms knows from the environment."""
    store = dist.HashStore()

    def on_rank(transport: Any) -> None:
        torchcomms.here.place = transport.rank, ranks
        torchcomms.here.default_store = store
        task(transport.rank)

    run_ranks(ranks, on_rank)


def rule(min_bytes: int) -> str:
    """A policy."""
    return f'[{{"min_bytes": {min_bytes}}}]'


POLICY = {"tightwire::policy": rule(2000)}


def tensor(rank: int, n: int, dtype: Any = torch.float32) -> Any:
    """Whole numbers, whose sums in any order are exact in all dtypes."""
    generator = torch.Generator().manual_seed(100 * rank + n)
    return torch.randint(-8, 9, (n,), generator=generator).to(dtype)


def counts(rank: int, other: int) -> int:
    """How many rows a rank sends to another one: not the same, and none to some."""
    return 600 * ((rank + 2 * other) % 3)


def collectives(comm: Any, n: int, dtype: Any, asynchronous: bool, op: Any) -> list[Any]:
    """The results of all calls that may be compressed, whose shares have `n` elements."""
    me, size = comm.get_rank(), comm.get_size()
    x, whole = tensor(me, n, dtype), tensor(me, n * size, dtype)

    def new(elements: int) -> Any:
        return torch.full((elements,), torch.nan, dtype=dtype)

    reduced, sent = whole.clone(), tensor(1, n, dtype) if me == 1 else new(n)
    gathered, share, share2, swapped = new(n * size), new(n), new(n), new(n * size)
    parts = [new(n) for _ in range(size)]
    works = [
        comm.all_reduce(reduced, op, asynchronous),
        comm.broadcast(sent, 1, asynchronous),
        comm.all_gather_single(gathered, x, asynchronous),
        comm.all_gather(parts, x, asynchronous),
        comm.reduce_scatter_single(share, whole, op, asynchronous),
        comm.reduce_scatter(share2, list(whole.chunk(size)), op, asynchronous),
        comm.all_to_all_single(swapped, whole, asynchronous),
    ]
    for work in works:
        # For torchcomms a work in Python is under way until it is waited for.
        assert work.is_completed() == (not asynchronous)
        work.wait()
        assert work.is_completed()
    return [reduced, sent, gathered, *parts, share, share2, swapped]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.fast_cases(2)
def test_results_are_those_of_the_wrapped_backend(dtype: Any, asynchronous: bool) -> None:
    def task(rank: int) -> None:
        plain = torchcomms.new_comm("gloo", "cpu", "plain")
        hints = {**POLICY, "lazy": "true"}
        comm = torchcomms.new_comm("tightwire", "cpu", "main", store=store, hints=hints)
        assert (comm.get_rank(), comm.get_size()) == (rank, RANKS)
        assert (comm.get_backend(), comm.get_name()) == ("tightwire", "main")
        impl = comm.get_backend_impl()
        wrapped = impl._comm.get_backend_impl()
        # Hints of the other backend reach it, and no others.
        assert wrapped.options.hints == {"lazy": "true"}
        for n, compressed in ((N, 7), (FEW, 0)):
            for op in (ReduceOp.SUM, ReduceOp.AVG):
                before, made = len(impl.trace()), len(wrapped.made)
                raw, wire = impl.raw_bytes, impl.wire_bytes
                found = collectives(comm, n, dtype, asynchronous, op)
                expected = collectives(plain, n, dtype, asynchronous, op)
                assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
                assert len(impl.trace()) - before == compressed
                assert len(wrapped.made) - made == 7 - compressed
                if compressed:
                    assert 0 < impl.wire_bytes - wire < 0.95 * (impl.raw_bytes - raw)
        for one in (comm, plain):
            one.finalize()
        kept.append(comm)

    kept: list[Any] = []
    store, before = dist.HashStore(), set(threading.enumerate())
    run(task)
    # Threads of compressed calls end with `finalize`.
    assert set(threading.enumerate()) <= before


def test_all_to_all_with_splits() -> None:
    hints = {"tightwire::policy": '[{"ops": ["all_to_all_v"]}]'}

    def task(rank: int) -> None:
        comm = torchcomms.new_comm("tightwire", "cpu", "main", store=store, hints=hints)
        out_splits = [counts(r, rank) for r in range(RANKS)]
        in_splits = [counts(rank, r) for r in range(RANKS)]
        # There may be more rows than the splits name, which stay as they are.
        for more in (0, 5):
            out = torch.full((sum(out_splits) + more, 3), torch.nan)
            x = tensor(rank, 3 * (sum(in_splits) + more)).view(-1, 3)
            comm.all_to_all_v_single(out, x, out_splits, in_splits, more == 0).wait()
            for r, part in enumerate(out[: sum(out_splits)].split(out_splits)):
                sizes = [counts(r, other) for other in range(RANKS)]
                given = tensor(r, 3 * (sum(sizes) + more)).view(-1, 3)
                assert torch.equal(part, given[: sum(sizes)].split(sizes)[rank])
            assert out[sum(out_splits) :].isnan().all()
        records = comm.get_backend_impl().trace()
        assert [record.collective for record in records] == ["all_to_all"] * 2
        comm.finalize()

    store = dist.HashStore()
    run(task)


def test_other_calls_go_to_the_wrapped_backend() -> None:
    def task(rank: int) -> None:
        comm = torchcomms.new_comm("tightwire", "cpu", "main", store=store, hints=POLICY)
        impl = comm.get_backend_impl()
        x = tensor(rank, N)
        every = torch.stack([tensor(r, N) for r in range(RANKS)])
        largest = x.clone()
        comm.all_reduce(largest, ReduceOp.MAX, False)
        assert torch.equal(largest, every.amax(0))
        numbers = torch.full((N,), rank)
        comm.all_reduce(numbers, ReduceOp.SUM, False)
        assert torch.equal(numbers, torch.full((N,), sum(range(RANKS))))
        total = x.clone()
        comm.reduce(total, 1, ReduceOp.SUM, True).wait()
        assert rank != 1 or torch.equal(total, every.sum(0))
        share = torch.zeros(N)
        comm.reduce_scatter_v(share, [x] * RANKS, ReduceOp.SUM, False)
        assert torch.equal(share, every.sum(0))
        parts = [torch.zeros(N) for _ in range(RANKS)]
        comm.all_gather_v(parts, x, False)
        assert torch.equal(torch.stack(parts), every)
        parts = [torch.zeros(N) for _ in range(RANKS)]
        comm.all_to_all(parts, [x + r for r in range(RANKS)], True).wait()
        assert torch.equal(torch.stack(parts), every + rank)
        out = torch.zeros(N)
        comm.scatter(out, [x + r for r in range(RANKS)] if rank == 1 else [], 1, False)
        assert torch.equal(out, every[1] + rank)
        parts = [torch.zeros(N) for _ in range(RANKS)] if rank == 1 else []
        comm.gather(parts, x, 1, False)
        assert rank != 1 or torch.equal(torch.stack(parts), every)
        if rank == 0:
            comm.send(x, 1, True).wait()
        elif rank == 1:
            comm.recv(out, 0, False).wait()
            assert torch.equal(out, every[0])
        comm.barrier(False)
        assert impl.trace() == []
        assert impl.raw_bytes == impl.wire_bytes == 0
        names = ["all_reduce", "all_reduce", "reduce", "reduce_scatter_v", "all_gather_v"]
        names += ["all_to_all", "scatter", "gather", *[["send"], ["recv"], [], []][rank], "barrier"]
        assert impl._comm.get_backend_impl().made == names
        comm.finalize()

    store = dist.HashStore()
    run(task)


def test_split(backend: Any) -> None:
    """Parts have the policy of the whole, or one of their own, and their own numbers."""

    def total(comm: Any, n: int, rank: int) -> Any:
        x = tensor(rank, n)
        comm.all_reduce(x, ReduceOp.SUM, False)
        return x

    def task(rank: int) -> None:
        comm = torchcomms.new_comm("tightwire", "cpu", "main", store=store, hints=POLICY)
        ranks = [[2, 0], [3, 1]][rank % 2]
        expected = tensor(ranks[0], N) + tensor(ranks[1], N)
        for name in ("part", "part", "other"):
            hints = {"tightwire::policy": "[]"} if name == "other" else None
            part = comm.split(ranks, name, hints=hints)
            assert part is not None
            assert isinstance(part.get_backend_impl(), backend.TightwireBackend)
            assert part.get_name() == name
            assert (part.get_rank(), part.get_size()) == (ranks.index(rank), 2)
            assert torch.equal(total(part, N, rank), expected)
            assert len(part.get_backend_impl().trace()) == (name == "part")
            assert total(part, FEW, rank).shape == (FEW,)
            part.finalize()
        assert torch.equal(total(comm, N, rank), sum(tensor(r, N) for r in range(RANKS)))
        assert (comm.split([0, 1] if rank < 2 else [], "half") is None) == (rank >= 2)
        with pytest.raises(RuntimeError, match=f"Current rank {rank} is not included"):
            comm.split([(rank + 1) % RANKS], "others")
        with pytest.raises(ValueError, match="tightwire::backend"):
            comm.split(ranks, "part", hints={"tightwire::backend": "gloo"})
        with pytest.raises(tw.CollectiveError, match=r"ranks differ: .*min_bytes=3001"):
            comm.split(ranks, "part", hints={"tightwire::policy": rule(3000 + rank // 2)})
        comm.finalize()

    store = dist.HashStore()
    run(task)


def test_names_of_communicators_are_groups_of_a_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a hint the policy is that of process groups; without a store there is a new one."""
    rules = [
        tw.process_group.Rule(codec=None, groups=("main",), min_bytes=0),
        tw.process_group.Rule("mx", ops=("all_reduce",), min_bytes=2000),
    ]
    monkeypatch.setattr(tw.process_group, "_current", [tw.process_group.Policy(tuple(rules))])
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")

    def task(rank: int) -> None:
        for name in ("main", "other"):
            comm = torchcomms.new_comm("tightwire", "cpu", name)
            impl = comm.get_backend_impl()
            assert impl.policy.rules == tuple(rules)
            x = torch.randn(60_000, generator=torch.Generator().manual_seed(rank))
            expected = sum(
                torch.randn(60_000, generator=torch.Generator().manual_seed(r)) for r in range(2)
            )
            comm.all_reduce(x, ReduceOp.SUM, False)
            if name == "main":
                assert torch.equal(x, expected)
                assert impl.trace() == []
            else:
                assert 0 < tw.error(expected.numpy(), x.numpy()).vnmse < 1e-2
                assert impl.wire_bytes < 0.3 * impl.raw_bytes
            comm.finalize()

    run(task, ranks=2)


def test_errors_of_compressed_calls_are_raised_by_wait() -> None:
    def task(rank: int) -> None:
        comm = torchcomms.new_comm("tightwire", "cpu", "main", store=store, hints=POLICY)
        work = comm.all_reduce(tensor(0, N + rank), ReduceOp.SUM, True)
        with pytest.raises(tw.CollectiveError, match="all_reduce #0 failed"):
            work.wait()
        with pytest.raises(tw.CollectiveError, match="an earlier call has failed"):
            comm.all_reduce(tensor(0, N), ReduceOp.SUM, False)
        x = torch.ones(1)
        comm.all_reduce(x, ReduceOp.SUM, False)
        assert x.item() == 2
        comm.finalize()

    store = dist.HashStore()
    run(task, ranks=2)


def test_policies_that_differ_are_told_of_on_all_ranks() -> None:
    def task(rank: int) -> None:
        hints = {"tightwire::policy": rule(2000 + rank)}
        with pytest.raises(tw.CollectiveError, match=r"ranks differ: .*min_bytes=2001"):
            torchcomms.new_comm("tightwire", "cpu", "main", store=store, hints=hints)

    store = dist.HashStore()
    run(task, ranks=2)


def test_what_is_not_supported_is_refused() -> None:
    def make(device: str = "cpu", **options: Any) -> Any:
        return torchcomms.new_comm("tightwire", device, "main", store=dist.HashStore(), **options)

    def task(rank: int) -> None:
        with pytest.raises(ValueError, match=r"device is meta; allowed: \['cpu', 'cuda'\]"):
            make("meta")
        with pytest.raises(ValueError, match=r"'tightwire::rules'; allowed .*::policy"):
            make(hints={"tightwire::rules": "[]"})
        with pytest.raises(ValueError, match="is not JSON"):
            make(hints={"tightwire::policy": "mx"})
        with pytest.raises(ModuleNotFoundError, match="failed to find backend ncclx"):
            make(hints={"tightwire::backend": "ncclx"})
        with pytest.raises(RuntimeError, match="enable_reconfigure=true is not supported"):
            make(enable_reconfigure=True)
        comm = make(hints={**POLICY, "tightwire::backend": "gloo"})
        with pytest.raises(RuntimeError, match="setTimeout not implemented"):
            comm.set_timeout(comm.get_options().timeout)
        x = tensor(0, N)
        comm.all_reduce(x, ReduceOp.SUM, False)
        assert torch.equal(x, tensor(0, N))
        # A rank alone has nobody to compress for.
        assert comm.get_backend_impl().trace() == []
        comm.finalize()

    run(task, ranks=1)


def test_the_entry_point_is_a_module_that_registers_the_backend(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torchcomms loads it, and calls nothing."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    ((name, value),) = project["entry-points"]["torchcomms.backends"].items()
    monkeypatch.setattr(torchcomms, "_classes", {})
    sys.modules.pop(MODULE)
    EntryPoint(name, value, "torchcomms.backends").load()
    assert list(torchcomms._classes) == ["tightwire"]


@pytest.mark.parametrize("stub", ["missing", "raises", "old"])
def test_without_torchcomms_the_error_says_what_to_install(
    stub: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sys.modules.pop(MODULE)
    if stub == "raises":
        (tmp_path / "torchcomms.py").write_text("raise ImportError('a placeholder')")
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, "torchcomms")
    else:
        # None: not to be found.
        module = ModuleType("torchcomms") if stub == "old" else None
        monkeypatch.setitem(sys.modules, "torchcomms", module)
    with pytest.raises(ImportError, match=r"install it as https://.*/torchcomms says") as caught:
        importlib.import_module(MODULE)
    assert stub != "raises" or "(a placeholder)" in str(caught.value)


@pytest.mark.slow
def test_tightwire_does_not_import_torchcomms(tmp_path: Path) -> None:
    """PyTorch does, where there is one."""
    (tmp_path / "torchcomms.py").write_text("raise ImportError('a placeholder')")
    code = "import sys; import tightwire; found = 'torchcomms' in sys.modules"
    code += f"; tightwire.process_group.Rule(); print(found, {MODULE!r} in sys.modules)"
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    environment = os.environ | {"PYTHONPATH": path}
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=240)
    assert done.stdout.split() == ["False", "False"], done.stderr
