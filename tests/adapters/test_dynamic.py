"""The dynamic all-to-all-v, over threads, gloo and on a GPU: this file is also what ranks run."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tightwire as tw
from ranks import Alone, Ranks, exact
from support import examples
from tightwire.adapters.collectives import all_to_all_v
from tightwire.adapters.collectives.all_to_all_v import (
    ABOVE_CAPACITY,
    INVALID,
    OVERFLOWED,
    DynamicAllToAll,
    FixedRateAllToAll,
    Received,
)
from tightwire.adapters.transports.base import Transport
from tightwire.adapters.transports.threads import ThreadTransport, connect, run_ranks

DTYPES = ("bfloat16", "float32", "int32")
MAX_SPLITS, MAX_INDICES, CAPACITY = 6, 9, 12


class Metadata(NamedTuple):
    """What one rank asks for: rows of x, send_splits, send_indices, send_indices_block_lens."""

    rows: int
    splits: list[int]
    indices: list[int]
    lens: list[int]

    def arrays(self, library: str, device: str = "cpu") -> list[Any]:
        values = [np.array(v, np.int64) for v in self[1:]]
        if library == "numpy":
            return values
        return [sys.modules["torch"].from_numpy(v).to(device) for v in values]

    def block(self, rank: int) -> list[int]:
        """The splits for a rank."""
        start = sum(self.lens[:rank])
        return self.indices[start : start + self.lens[rank]]

    def rows_for(self, rank: int) -> list[int]:
        starts = np.cumsum([0, *self.splits])
        return [r for k in self.block(rank) for r in range(starts[k], starts[k + 1])]


def random_metadata(seed: Any, world_size: int, most: int = 4) -> Metadata:
    """Splits of up to `most` rows: some empty, some never sent, some sent twice or everywhere."""
    rng = np.random.default_rng(seed)
    splits = (rng.integers(0, most + 1, rng.integers(1, MAX_SPLITS + 1))).tolist()
    lens = rng.multinomial(rng.integers(0, MAX_INDICES + 1), [1 / world_size] * world_size)
    lens[lens > 3] = 3
    spare = int(rng.integers(0, MAX_INDICES - int(lens.sum()) + 1))
    # Entries that no block has may be anything.
    indices = [*rng.integers(0, len(splits), lens.sum()).tolist(), *[-7] * spare]
    return Metadata(sum(splits) + int(rng.integers(0, 3)), splits, indices, lens.tolist())


@st.composite
def metadata(draw: st.DrawFn, world_size: int) -> Metadata:
    splits = draw(st.lists(st.integers(0, 5) | st.sampled_from([0, 300]), max_size=MAX_SPLITS))
    choices = st.integers(0, len(splits) - 1) if splits else st.nothing()
    indices = draw(st.lists(choices, max_size=MAX_INDICES)) if splits else []
    cuts = sorted(draw(st.integers(0, len(indices))) for _ in range(world_size))
    lens = np.diff([0, *cuts]).tolist()
    return Metadata(sum(splits) + draw(st.integers(0, 3)), splits, indices, lens)


def check_received(
    found: Received, everyone: list[Metadata], tensors: Ranks, row: tuple[int, ...], me: int
) -> None:
    """Every field of a result, against the definition."""
    n = len(everyone)
    parts = [tensors.host(i, (m.rows, *row))[m.rows_for(me)] for i, m in enumerate(everyone)]
    counts = [len(part) for part in parts]
    if found.data.ndim == len(row) + 2:
        stride = found.data.shape[1]
        offsets = [i * stride for i in range(n)]
        for i, part in enumerate(parts):
            exact(found.data[i, : counts[i]], part)
    else:
        offsets = np.cumsum([0, *counts[:-1]]).tolist()
        exact(found.data, np.concatenate(parts))
    exact(found.counts, np.array(counts, np.int64))
    exact(found.offsets, np.array(offsets, np.int64))
    splits = np.zeros((n, MAX_SPLITS), np.int64)
    indices = np.full((n, MAX_INDICES), -1, np.int64)
    lengths = np.zeros((n, MAX_INDICES), np.int64)
    for i, m in enumerate(everyone):
        block = m.block(me)
        splits[i, : len(m.splits)] = m.splits
        indices[i, : len(block)] = block
        lengths[i, : len(block)] = [m.splits[k] for k in block]
    exact(found.splits, splits)
    exact(found.indices, indices)
    exact(found.lengths, lengths)


def check_exchanges(
    transport: Transport,
    library: str,
    dtype: str,
    rounds: list[list[Metadata]],
    row: tuple[int, ...] = (5, 3),
) -> None:
    """Eager exchanges, one after the other, and of each the way back."""
    comm = tw.Communicator(transport)
    n, me = comm.world_size, comm.rank
    exchange = DynamicAllToAll(comm, row, dtype, max_splits=MAX_SPLITS, max_indices=MAX_INDICES)
    back = DynamicAllToAll(comm, row, dtype, max_splits=n)
    tensors = Ranks(n, library, dtype)
    for everyone in rounds:
        x = tensors.array(me, (everyone[me].rows, *row))
        before = bytes(tw.encode(x, "raw"))
        found = exchange(x, *everyone[me].arrays(library))
        check_received(found, everyone, tensors, row, me)
        assert bytes(tw.encode(x, "raw")) == before
        (kind, counts) = (type(found.counts), found.counts)
        way = Metadata(0, [], list(range(n)), [1] * n).arrays(library)
        returned = back(found.data, counts, *way[1:])
        assert isinstance(returned.counts, kind)
        mine = everyone[me]
        sent = [r for j in range(n) for r in mine.rows_for(j)]
        exact(returned.data, tensors.host(me, (mine.rows, *row))[sent])


def check_fixed_rate(
    transport: Transport, dtype: str, rounds: list[list[Metadata]], row: tuple[int, ...] = (700,)
) -> None:
    """Fixed-rate exchanges, one after the other, some of data that do not fit."""
    comm = tw.Communicator(transport)
    n, me = comm.world_size, comm.rank
    exchange = FixedRateAllToAll(
        comm, row, dtype, max_splits=MAX_SPLITS, max_indices=MAX_INDICES, capacity=CAPACITY
    )
    back = FixedRateAllToAll(comm, row, dtype, max_splits=2 * n, max_indices=n, capacity=CAPACITY)
    tensors = Ranks(n, "torch", dtype)
    for everyone in rounds:
        mine = everyone[me]
        x = tensors.array(me, (mine.rows, *row))
        launched = exchange.launch(x, *mine.arrays("torch"))
        assert exchange.finish() is launched
        check_received(launched, everyone, tensors, row, me)
        counts = launched.counts.tolist()
        splits = [rows for count in counts for rows in (count, CAPACITY - count)]
        way = Metadata(0, splits, list(range(0, 2 * n, 2)), [1] * n).arrays("torch")
        back.launch(launched.data.reshape(n * CAPACITY, *row), *way)
        returned = back.finish()
        for j in range(n):
            sent = mine.rows_for(j)
            exact(returned.data[j, : len(sent)], tensors.host(me, (mine.rows, *row))[sent])


def raises_everywhere(
    world_size: int, match: str, call: Callable[[ThreadTransport], Callable[[bool], Any]]
) -> list[tw.CollectiveError]:
    """What every rank raises of `call(transport)(False)`; after that `(True)` works."""

    def task(transport: ThreadTransport) -> tw.CollectiveError:
        exchange = call(transport)
        with pytest.raises(tw.CollectiveError, match=match) as caught:
            exchange(False)
        exchange(True)
        return caught.value

    return run_ranks(world_size, task)


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("world_size", "library"), [(1, "torch"), (2, "numpy"), (4, "torch"), (8, "numpy")]
)
def test_rows_arrive_as_the_metadata_say(world_size: int, library: str, dtype: str) -> None:
    pytest.importorskip(library)
    rounds = [
        [random_metadata([k, r], world_size, 4 + 100 * k) for r in range(world_size)]
        for k in range(3)
    ]
    run_ranks(world_size, lambda t: check_exchanges(t, library, dtype, rounds))


@examples(20)
@given(st.data())
def test_any_metadata(data: st.DataObject) -> None:
    n = data.draw(st.sampled_from([1, 2, 4]), "ranks")
    rounds = [[data.draw(metadata(n), f"rank {r}") for r in range(n)] for _ in range(2)]
    dtype = data.draw(st.sampled_from(DTYPES))
    run_ranks(n, lambda t: check_exchanges(t, "numpy", dtype, rounds, (7,)))


def test_the_example_of_the_paper() -> None:
    """Rank 0 of figure 17: split 0 goes to both ranks, split 1 to one, 2 and 3 to the other."""
    rank0 = Metadata(768, [128, 256, 256, 128], [0, 1, 0, 2, 3], [2, 3])
    rank1 = Metadata(10, [3, 0, 7], [2, 2, 1], [2, 1])
    everyone = [rank0, rank1]
    run_ranks(2, lambda t: check_exchanges(t, "numpy", "bfloat16", [everyone], (16,)))
    assert [len(rank0.rows_for(r)) for r in range(2)] == [384, 512]


def test_a_row_may_be_one_element_and_x_in_any_layout() -> None:
    torch = pytest.importorskip("torch")
    everyone = [Metadata(6, [2, 3], [1, 0, 1], [2, 1]), Metadata(6, [6], [0], [0, 1])]

    def task(transport: ThreadTransport) -> None:
        comm = tw.Communicator(transport)
        m = everyone[comm.rank]
        scalars = DynamicAllToAll(comm, (), "int32", max_splits=2, max_indices=3)
        rows = DynamicAllToAll(comm, (4,), torch.float32, max_splits=2, max_indices=3)
        x = np.arange(12, dtype=np.int32)[::-2] + 100 * comm.rank
        y = torch.arange(24.0).reshape(4, 6).T.requires_grad_()
        host = y.detach().numpy().copy()
        want = [everyone[i].rows_for(comm.rank) for i in range(2)]
        found = scalars(x, *m.arrays("numpy"))
        all_x = [np.arange(12, dtype=np.int32)[::-2] + 100 * i for i in range(2)]
        exact(found.data, np.concatenate([a[w] for a, w in zip(all_x, want, strict=True)]))
        found = rows(y, *m.arrays("torch"))
        exact(found.data, np.concatenate([host[w] for w in want]))

    run_ranks(2, task)


class Watched(ThreadTransport):
    """Counts the bytes that go to other ranks, and lets `damage` see what came."""

    def __init__(
        self, inner: ThreadTransport, damage: Callable[[str, int, Any], None] | None = None
    ) -> None:
        super().__init__(inner.rank, inner._pipes, inner.timeout)
        self.sent = 0
        self.calls: list[str] = []
        self.damage = damage

    def _exchange(self, kind: str, outs: Any, xs: Any) -> None:
        self.calls.append(kind)
        super()._exchange(kind, outs, xs)

    def _post(self, kind: str, to: int, x: Any) -> None:
        if to != self.rank:
            self.sent += int(np.prod(x.shape))
        super()._post(kind, to, x)

    def _take(self, kind: str, source: int, out: Any) -> None:
        super()._take(kind, source, out)
        if self.damage is not None:
            self.damage(kind, source, out)


def test_only_the_rows_that_are_asked_for_travel() -> None:
    n, row = 4, (640,)
    everyone = [random_metadata([5, r], n, 90) for r in range(n)]

    def task(transport: ThreadTransport) -> tuple[int, int]:
        watched = Watched(transport)
        comm = tw.Communicator(watched)
        me = comm.rank
        exchange = DynamicAllToAll(
            comm, row, "bfloat16", max_splits=MAX_SPLITS, max_indices=MAX_INDICES
        )
        x = Ranks(n, "numpy", "bfloat16").array(0, (everyone[me].rows, *row))
        watched.sent = 0
        watched.calls.clear()
        exchange(x, *everyone[me].arrays("numpy"))
        # Metadata; then what the communicator does: sizes, static parts, dynamic parts.
        assert watched.calls == ["all_gather", "all_to_all", "all_to_all_v", "all_to_all_v"]
        (record,) = comm.trace()
        rows = sum(len(everyone[me].rows_for(j)) for j in range(n) if j != me)
        assert record.collective == "all_to_all"
        assert record.raw_bytes == rows * 2 * row[0]
        assert record.wire_bytes == watched.sent - (n - 1) * exchange.metadata_nbytes
        return record.raw_bytes, record.wire_bytes

    sums = np.array(run_ranks(n, task)).sum(axis=0)
    assert sums[0] > 100_000
    assert sums[1] < 0.74 * sums[0]


GOOD = Metadata(9, [4, 2, 3], [2, 0, 1], [1, 1, 1])
BAD = {
    "a negative split": GOOD._replace(splits=[4, -2, 3]),
    "splits beyond the rows": GOOD._replace(splits=[4, 2, 4]),
    "splits that wrap around": GOOD._replace(splits=[2**62, 2**62, 2**62, 2**62, 5]),
    "a negative index": GOOD._replace(indices=[2, -1, 1]),
    "an index of no split": GOOD._replace(indices=[2, 0, 3]),
    "a huge index": GOOD._replace(indices=[2, 2**62, 3]),
    "a negative block len": GOOD._replace(lens=[1, -1, 1]),
    "block lens beyond the indices": GOOD._replace(lens=[1, 2, 1]),
    "block lens that wrap around": GOOD._replace(lens=[2**63 - 1, 2**63 - 1, 3]),
    "no splits": GOOD._replace(splits=[], indices=[0, 0, 0]),
    "no indices": GOOD._replace(indices=[]),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_metadata_that_make_no_sense_are_an_error_on_every_rank(name: str, library: str) -> None:
    pytest.importorskip(library)

    def call(transport: ThreadTransport) -> Callable[[bool], None]:
        comm = tw.Communicator(transport)
        exchange = DynamicAllToAll(comm, (3,), "float32", max_splits=5)
        tensors = Ranks(3, library, "float32")

        def run(good: bool) -> None:
            mine = GOOD if good or comm.rank != 1 else BAD[name]
            found = exchange(tensors.array(comm.rank, (9, 3)), *mine.arrays(library))
            parts = [tensors.host(i, (9, 3))[GOOD.rows_for(comm.rank)] for i in range(3)]
            exact(found.data, np.concatenate(parts))

        return run

    for rank, error in enumerate(raises_everywhere(3, "rank 1: send_", call)):
        assert (error.rank, error.collective, error.stage) == (
            rank,
            "dynamic_all_to_all",
            "metadata",
        )
        assert "rank 0: send_" not in str(error)


@pytest.mark.parametrize("name", BAD)
def test_metadata_that_make_no_sense_at_a_fixed_rate(name: str) -> None:
    pytest.importorskip("torch")

    def call(transport: ThreadTransport) -> Callable[[bool], None]:
        comm = tw.Communicator(transport)
        exchange = FixedRateAllToAll(comm, (3,), "float32", max_splits=5, capacity=4)
        tensors = Ranks(3, "torch", "float32")

        def run(good: bool) -> None:
            mine = GOOD if good or comm.rank != 1 else BAD[name]
            found = exchange.launch(tensors.array(comm.rank, (9, 3)), *mine.arrays("torch"))
            assert ((exchange.status & INVALID) != 0).tolist() == [False, not good, False]
            # The rank counts as one that sent nothing.
            assert found.counts.bool().tolist() == [True, good, True]
            assert found.lengths.sum(1).tolist() == found.counts.tolist()
            assert (found.indices >= 0).any(1).tolist() == [True, good, True]
            assert found.splits.bool().any(1).tolist() == [True, good, True]
            exchange.finish()
            for i in range(3):
                rows = tensors.host(i, (9, 3))[GOOD.rows_for(comm.rank)]
                exact(found.data[i, : len(rows)], rows)

        return run

    for rank, error in enumerate(raises_everywhere(3, r"ranks \[1\] are invalid", call)):
        assert (error.rank, error.stage) == (rank, "metadata")


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_a_fixed_rate_gives_the_same_rows(world_size: int, dtype: str) -> None:
    """From four ranks on there are data of random bits among them, which do not fit."""
    pytest.importorskip("torch")
    rounds = [[random_metadata([k, r], world_size) for r in range(world_size)] for k in range(3)]
    run_ranks(world_size, lambda t: check_fixed_rate(t, dtype, rounds))


@pytest.mark.parametrize("rows", [CAPACITY, CAPACITY + 1])
def test_the_capacity_is_what_one_rank_may_get_of_another(rows: int) -> None:
    pytest.importorskip("torch")
    n = 2
    # Rank 1 has more in all, and rank 0 splits that nobody gets.
    fits = Metadata(40, [CAPACITY, CAPACITY, 9], [0, 1], [1, 1])
    everyone = [fits, Metadata(40, [CAPACITY, 5, rows - 5], [0, 1, 2], [1, 2])]

    def task(transport: ThreadTransport) -> None:
        if rows <= CAPACITY:
            check_fixed_rate(transport, "float32", [everyone], (3,))
        else:
            with pytest.raises(tw.CollectiveError, match=r"ranks \[1\] have more rows"):
                check_fixed_rate(transport, "float32", [everyone], (3,))

    run_ranks(n, task)


@examples(20)
@given(st.data())
def test_any_metadata_at_a_fixed_rate(data: st.DataObject) -> None:
    """More rows than the capacity are an error that names the ranks which have them."""
    pytest.importorskip("torch")
    n = data.draw(st.sampled_from([1, 2, 3]), "ranks")
    everyone = [data.draw(metadata(n), f"rank {r}") for r in range(n)]
    above = [
        r for r, m in enumerate(everyone) if max(len(m.rows_for(j)) for j in range(n)) > CAPACITY
    ]

    def task(transport: ThreadTransport) -> None:
        comm = tw.Communicator(transport)
        me = comm.rank
        exchange = FixedRateAllToAll(
            comm, (7,), "bfloat16", max_splits=MAX_SPLITS, max_indices=MAX_INDICES, capacity=12
        )
        tensors = Ranks(n, "torch", "bfloat16")
        x = tensors.array(me, (everyone[me].rows, 7))
        found = exchange.launch(x, *everyone[me].arrays("torch"))
        high = ((exchange.status & ABOVE_CAPACITY) != 0).tolist()
        assert found.lengths.sum(1).tolist() == found.counts.tolist()
        assert found.counts.max().item() <= CAPACITY
        assert [r for r in range(n) if high[r]] == above
        if not above:
            exchange.finish()
            check_received(found, everyone, tensors, (7,), me)
            return
        message = rf"ranks \[{', '.join(map(str, above))}\] have more rows .* capacity, 12"
        with pytest.raises(tw.CollectiveError, match=message):
            exchange.finish()
        fits = Metadata(5, [5], [0], [1, *[0] * (n - 1)])
        found = exchange.launch(tensors.array(me, (5, 7)), *fits.arrays("torch"))
        exchange.finish()
        check_received(found, [fits] * n, tensors, (7,), me)

    run_ranks(n, task)


def test_data_that_do_not_fit_are_sent_again_by_all_ranks() -> None:
    """Rank 2's bits are random; rank 1 gets none of them, and takes part all the same."""
    torch = pytest.importorskip("torch")
    n, row = 3, (2048,)
    m = Metadata(8, [4, 4], [0, 1], [1, 0, 1])

    def task(transport: ThreadTransport) -> tuple[int, list[int]]:
        watched = Watched(transport)
        comm = tw.Communicator(watched)
        tensors = Ranks(n, "torch", "bfloat16")
        exchange = FixedRateAllToAll(comm, row, "bfloat16", max_splits=2, capacity=4)
        sent = []
        for again in range(4):
            # Every other time all data fit.
            source = comm.rank if again % 2 else 0
            x = tensors.array(source, (8, *row))
            watched.sent = 0
            watched.calls.clear()
            found = exchange.launch(x, *m.arrays("torch"))
            assert watched.calls == ["all_to_all"]
            assert watched.sent == (n - 1) * exchange.nbytes
            assert exchange.status.tolist() == [0, 0, OVERFLOWED if again % 2 else 0]
            assert exchange.overflowed.item() == bool(again % 2)
            found.data[found.counts == 0] = torch.nan
            if again == 1:
                # What came cannot be trusted, and x need not be kept.
                x.zero_()
            exchange.finish()
            assert len(comm.trace()) == (again + 1) // 2
            sent.append(watched.sent)
            for i in range(n):
                rows = tensors.host(i if again % 2 else 0, (8, *row))[m.rows_for(comm.rank)]
                exact(found.data[i, : len(rows)], rows)
        return exchange.nbytes, sent

    for nbytes, sent in run_ranks(n, task):
        assert nbytes < 0.78 * 4 * 2 * row[0]
        assert sent[0] == sent[2] < sent[1] == sent[3]


def test_launch_never_reads_the_device() -> None:
    """PyTorch's own operations that wait for a GPU, or have a shape that depends on data."""
    pytest.importorskip("torch")
    from torch.utils._python_dispatch import TorchDispatchMode

    waits = ("_local_scalar_dense", "nonzero", "_to_copy", "masked_select", "unique", "item")
    seen: list[str] = []

    class Watch(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            name = function.name().removeprefix("aten::").split(".")[0]
            dtype = (kwargs or {}).get("dtype")
            # A change of type is a copy on the device.
            seen.append(name if name != "_to_copy" or dtype is None else "cast")
            return function(*args, **(kwargs or {}))

    def task(transport: ThreadTransport) -> None:
        comm = tw.Communicator(transport, "raw")
        exchange = FixedRateAllToAll(comm, (8,), "float32", max_splits=3, capacity=4)
        tensors = Ranks(1, "torch", "float32")
        m = Metadata(9, [4, 2, 3], [2, 0, 1], [1])
        arguments = (tensors.array(0, (9, 8)), *m.arrays("torch"))
        with Watch():
            exchange.launch(*arguments)
        exact(exchange.finish().data[0, :3], tensors.host(0, (9, 8))[6:])

    run_ranks(1, task)
    assert "searchsorted" in seen
    assert "index_select" in seen
    assert not set(seen) & set(waits)


def use_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have fixed-rate exchanges on the CPU take the kernels, under the interpreter."""
    for name in ("prepare_encode_many", "prepare_decode_many"):
        kernels = functools.partial(getattr(all_to_all_v, name), backend="triton")
        monkeypatch.setattr(all_to_all_v, name, kernels)


@pytest.mark.slow
def test_as_many_launches_for_any_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled for the GPU here")
    from tightwire.codecs.common.launch_triton import Variant

    names: list[str] = []
    launch = Variant.launch

    def noted(self: Variant, *args: Any, **options: Any) -> None:
        names.append(self.kernel.__name__)
        launch(self, *args, **options)

    use_kernels(monkeypatch)
    monkeypatch.setattr(Variant, "launch", noted)
    found = {}
    merged = "huffman", "omnireduce"
    for codec in ("zipccl", "mx", *merged):
        for ranks in (4, 16, 64):
            comm = tw.Communicator(Alone(ranks), codec)
            names.clear()
            exchange = FixedRateAllToAll(comm, (520,), "bfloat16", max_splits=ranks, capacity=2)
            found[codec, ranks] = list(names)
            if ranks > 4:
                # Interpreted, they would take a minute.
                continue
            m = Metadata(ranks, [1] * ranks, list(range(ranks)), [1] * ranks).arrays("torch")
            x = Ranks(1, "torch", "bfloat16").array(0, (ranks, 520))
            exchange.launch(x, *m)
            data = exchange.finish().data[:, 0]
            assert codec not in ("zipccl", "huffman") or torch.equal(data, x)
        assert found[codec, 4] == found[codec, 16] == found[codec, 64]
        if codec in merged:
            assert 8 <= found[codec, 4].count("merged_kernel") <= 14
        else:
            assert 4 <= len(found[codec, 4]) <= 5


def test_what_a_device_finds_is_raised_by_finish_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels' way, under the interpreter: decoding raises nothing, and overflow is settled."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled for the GPU here")
    use_kernels(monkeypatch)
    comm = tw.Communicator(connect(1)[0])
    exchange = FixedRateAllToAll(comm, (250,), "bfloat16", max_splits=3, capacity=7)
    m = Metadata(9, [4, 2, 3], [2, 0], [2]).arrays("torch")
    ranks = Ranks(4, "torch", "bfloat16")
    for source in (2, 0):
        # Rank 2's bits are random.
        x = ranks.array(source, (9, 250))
        found = exchange.launch(x, *m)
        assert exchange.overflowed.item() == (source == 2)
        exchange.finish()
        exact(found.data[0], ranks.host(source, (9, 250))[[6, 7, 8, 0, 1, 2, 3]])
    exchange._transport = Watched(connect(1)[0], lambda kind, i, out: out[700].bitwise_xor_(1))
    exchange.launch(x, *m)
    with pytest.raises(tw.CollectiveError, match="from rank 0"):
        exchange.finish()


@pytest.mark.parametrize("at", [0, 8, 17, 26, 38, 140, 190, 500])
def test_damaged_bytes_are_an_error_on_the_receiver(at: int) -> None:
    """Of the metadata, or of the buffer behind them."""
    pytest.importorskip("torch")
    done: list[int] = []

    def damage(kind: str, source: int, out: Any) -> None:
        if kind == "all_to_all" and source == 1:
            out[at] ^= 8
            done.append(at)

    def task(transport: ThreadTransport) -> None:
        comm = tw.Communicator(Watched(transport, damage if transport.rank == 0 else None))
        exchange = FixedRateAllToAll(comm, (64,), "bfloat16", max_splits=1, capacity=4)
        m = Metadata(4, [4], [0], [1, 0] if comm.rank else [0, 1])
        x = Ranks(2, "torch", "bfloat16").array(comm.rank, (4, 64))
        exchange.launch(x, *m.arrays("torch"))
        if comm.rank == 1:
            exchange.finish()
            return
        stage, what = ("exchange", r"metadata of ranks \[1\]")
        if at >= 128:
            stage, what = "decode", "from rank 1"
        with pytest.raises(tw.CollectiveError, match=what) as caught:
            exchange.finish()
        assert caught.value.stage == stage
        if at < 128:
            with pytest.raises(tw.CollectiveError, match="an earlier call has failed"):
                exchange.launch(x, *m.arrays("torch"))

    run_ranks(2, task)
    assert done == [at]


@pytest.mark.parametrize("word", range(4 + 3 + 2 + 3))
def test_damaged_metadata_are_an_error_on_the_receiver(word: int) -> None:
    done: list[int] = []

    def damage(kind: str, source: int, out: Any) -> None:
        if (kind, source, out.size) == ("all_gather", 1, 12 * 8):
            out[8 * word + word % 8] ^= 1 << word % 7
            done.append(word)

    def task(transport: ThreadTransport) -> None:
        comm = tw.Communicator(Watched(transport, damage if transport.rank == 0 else None))
        exchange = DynamicAllToAll(comm, (3,), "float32", max_splits=3)
        m = GOOD._replace(lens=[2, 1])
        with pytest.raises(tw.CollectiveError) as caught:
            exchange(np.zeros((9, 3), np.float32), *m.arrays("numpy"))
        if comm.rank == 0:
            transport.close()
            assert "ranks [1] make another call, or" in str(caught.value)
        else:
            assert "rank 0 has left" in str(caught.value)

    run_ranks(2, task)
    assert done == [word]


def test_after_damaged_rows_the_ranks_go_on() -> None:
    done: list[int] = []

    def damage(kind: str, source: int, out: Any) -> None:
        if kind == "all_to_all_v" and source == 1 and not done:
            out[0] ^= 1
            done.append(out.size)

    def task(transport: ThreadTransport) -> bool:
        comm = tw.Communicator(Watched(transport, damage if transport.rank == 0 else None))
        exchange = DynamicAllToAll(comm, (3,), "float32", max_splits=3)
        m = GOOD._replace(lens=[2, 1])
        arguments = (np.ones((9, 3), np.float32), *m.arrays("numpy"))
        failed = False
        try:
            exchange(*arguments)
        except tw.CollectiveError as error:
            assert isinstance(error.__cause__, tw.FormatError)
            failed = True
        wanted = 2 * len(m.rows_for(comm.rank))
        exact(exchange(*arguments).data, np.ones((wanted, 3), np.float32))
        return failed

    assert run_ranks(2, task) == [True, False]
    assert len(done) == 1


OTHERS: list[dict[str, Any]] = [
    {"max_splits": 4},
    {"max_indices": 7},
    {"dtype": "float16"},
    {"row_shape": (4, 2)},
]
OTHERS_FIXED: list[dict[str, Any]] = [{"capacity": 9}, {"dynamic_capacity": 0}]


@pytest.mark.parametrize(
    ("fixed", "other"),
    [(False, o) for o in OTHERS] + [(True, o) for o in OTHERS + OTHERS_FIXED],
)
def test_ranks_with_other_parameters_are_named_everywhere(
    fixed: bool, other: dict[str, Any]
) -> None:
    pytest.importorskip("torch")

    def task(transport: ThreadTransport) -> None:
        comm = tw.Communicator(transport)
        options: dict[str, Any] = {"row_shape": (8,), "dtype": "bfloat16", "max_splits": 3}
        if fixed:
            options |= {"capacity": 600}
        if transport.rank == 2:
            options |= other
        with pytest.raises(tw.CollectiveError) as caught:
            (FixedRateAllToAll if fixed else DynamicAllToAll)(comm, **options)
        found = caught.value
        assert (found.rank, found.stage) == (transport.rank, "agree")
        assert ("ranks [2] differ" in str(found)) == (transport.rank != 2)

    run_ranks(3, task)


def test_a_lost_rank_is_an_error() -> None:
    def task(transport: ThreadTransport) -> None:
        comm = tw.Communicator(transport)
        exchange = DynamicAllToAll(comm, (3,), "float32", max_splits=3)
        if comm.rank == 1:
            transport.close()
            return
        x = np.zeros((9, 3), np.float32)
        with pytest.raises(tw.CollectiveError, match="rank 1 has left") as caught:
            exchange(x, *GOOD.arrays("numpy"))
        assert isinstance(caught.value.__cause__, OSError)
        with pytest.raises(tw.CollectiveError, match="an earlier call has failed"):
            exchange(x, *GOOD.arrays("numpy"))

    run_ranks(3, task)


def test_bad_calls_say_what_is_allowed() -> None:
    torch = pytest.importorskip("torch")

    def task(transport: ThreadTransport) -> None:
        comm = tw.Communicator(transport)
        eager = DynamicAllToAll(comm, (3,), "float32", max_splits=3)
        fixed = FixedRateAllToAll(comm, (3,), "float32", max_splits=3, capacity=4)
        x = torch.zeros(9, 3)
        splits, indices, lens = Metadata(9, [4, 2, 3], [0], [1]).arrays("torch")
        cases: list[tuple[type[Exception], str, tuple[Any, ...]]] = [
            (ValueError, r"x is float64\[9, 3\]; needed: float32", (x.double(), splits)),
            (ValueError, "rows of shape", (x[:, :2], splits)),
            (ValueError, "rows of shape", (x[0, 0], splits)),
            (ValueError, "send_splits must be where x is", (x, splits.numpy())),
            (ValueError, r"send_splits is int32\[3\]; needed: int64, 0 to 3", (x, splits.int())),
            (ValueError, r"send_splits is int64\[4\]", (x, torch.zeros(4, dtype=torch.int64))),
            (ValueError, r"send_indices is int64\[4\]", (x, splits, torch.zeros(4).long())),
            (ValueError, r"block_lens is int64\[2\]", (x, splits, indices, lens.repeat(2))),
            (TypeError, "Expected an array, got list", (x, [4, 2, 3])),
        ]
        for kind, message, given_ in cases:
            arguments = (*given_, *(splits, indices, lens)[len(given_) - 1 :])
            for call in (eager, fixed.launch):
                with pytest.raises(kind, match=message):
                    call(*arguments)
        with pytest.raises(ValueError, match="x must be a PyTorch tensor on cpu"):
            fixed.launch(x.numpy(), *(a.numpy() for a in (splits, indices, lens)))
        with pytest.raises(ValueError, match="called before launch"):
            fixed.finish()
        for options in (
            {"max_splits": 0},
            {"max_splits": 1, "max_indices": 0},
            {"max_splits": 1, "row_shape": (0,)},
            {"max_splits": 1, "capacity": 0},
        ):
            form: Any = FixedRateAllToAll if "capacity" in options else DynamicAllToAll
            with pytest.raises(ValueError, match="allowed"):
                form(comm, **({"row_shape": (3,), "dtype": "float32"} | options))
        # They were refused before anything was sent.
        exact(eager(x, splits, indices, lens).data, np.zeros((4, 3), np.float32))

    run_ranks(1, task)


@pytest.mark.slow
def test_jax_arrays_are_refused() -> None:
    jax = pytest.importorskip("jax")

    def task(transport: ThreadTransport) -> None:
        exchange = DynamicAllToAll(tw.Communicator(transport), (3,), "float32", max_splits=3)
        with pytest.raises(TypeError, match="x is a jax array; allowed"):
            exchange(jax.numpy.zeros((9, 3)), *GOOD.arrays("numpy"))

    run_ranks(1, task)


def gloo_rounds(world_size: int) -> list[list[Metadata]]:
    return [[random_metadata([9, k, r], world_size) for r in range(world_size)] for k in range(3)]


@pytest.mark.slow
def test_over_gloo_between_processes(tmp_path: Path) -> None:
    dist = pytest.importorskip("torch.distributed")
    if not (dist.is_available() and dist.is_gloo_available()):
        pytest.skip("PyTorch was built without gloo")
    path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error", __file__, str(tmp_path / "store")]
    ranks = [
        subprocess.Popen([*command, str(rank)], env=environment, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        for rank, process in enumerate(ranks):
            _, errors = process.communicate(timeout=120)
            assert process.returncode == 0, f"rank {rank}: {errors}"
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


def main(store: str, rank: str) -> None:
    """One of two ranks of gloo."""
    import torch
    import torch.distributed as dist

    from tightwire.adapters.transports.torch_dist import TorchDist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=int(rank),
        world_size=2,
        timeout=timedelta(seconds=60),
    )
    transport = TorchDist()
    rounds = gloo_rounds(2)
    check_exchanges(transport, "torch", "bfloat16", rounds)
    check_exchanges(transport, "numpy", "float32", rounds)
    check_fixed_rate(transport, "bfloat16", rounds)
    comm = tw.Communicator(transport)
    exchange = FixedRateAllToAll(comm, (4096,), "bfloat16", max_splits=2, capacity=3)
    bits = np.random.default_rng(int(rank)).integers(0, 1 << 16, (4, 4096), np.uint16)
    m = Metadata(4, [3, 1], [0, 1], [1, 1])
    x = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
    found = exchange.launch(x, *m.arrays("torch"))
    assert exchange.status.tolist() == [OVERFLOWED, OVERFLOWED]
    exchange.finish()
    everyone = [
        np.random.default_rng(r).integers(0, 1 << 16, (4, 4096), np.uint16) for r in range(2)
    ]
    for i, rows in enumerate(everyone):
        wanted = rows[m.rows_for(int(rank))]
        assert found.data[i, : len(wanted)].view(torch.int16).numpy().tobytes() == wanted.tobytes()
    transport.barrier()
    dist.destroy_process_group()


class Loopback(ThreadTransport):
    """A group of one rank on a GPU: copies on the current stream."""

    def __init__(self) -> None:
        super().__init__(0, connect(1)[0]._pipes, 1.0)

    def empty(self, nbytes: int) -> Any:
        import torch

        return torch.empty(nbytes, dtype=torch.uint8, device="cuda")

    def _exchange(self, kind: str, outs: Any, xs: Any) -> None:
        for out, x in zip(outs[0], xs[0], strict=True):
            out.copy_(x)


def refuse_waiting() -> None:
    """Any call that waits for the device is an error from now on."""
    torch = pytest.importorskip("torch")
    with warnings.catch_warnings():
        # It announces itself as a prototype.
        warnings.simplefilter("ignore", UserWarning)
        torch.cuda.set_sync_debug_mode("error")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_captured_graph_is_replayed_on_changing_metadata(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    row, rows = (700,), 24
    tensors = Ranks(1, "torch", dtype)
    exchange = FixedRateAllToAll(
        tw.Communicator(Loopback()),
        row,
        dtype,
        max_splits=MAX_SPLITS,
        max_indices=MAX_INDICES,
        capacity=CAPACITY,
    )
    x = tensors.array(0, (rows, *row)).cuda()
    arguments = [torch.zeros(n, dtype=torch.int64, device="cuda") for n in (MAX_SPLITS, 9, 1)]

    def fill(m: Metadata) -> None:
        for room, values in zip(arguments, m.arrays("torch", "cuda"), strict=True):
            room.zero_()
            room[: values.shape[0]] = values

    exchange.launch(x, *arguments)
    exchange.finish()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    segments = torch.cuda.memory_stats()["segment.all.allocated"]
    refuse_waiting()
    try:
        exchange.launch(x, *arguments)
        # Temporaries are those of the first launch: the device is not asked for memory.
        assert torch.cuda.memory_stats()["segment.all.allocated"] == segments
        with torch.cuda.graph(graph):
            found = exchange.launch(x, *arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    exchange.finish()
    for seed in range(8):
        m = random_metadata(seed, 1)._replace(rows=rows)
        fill(m)
        found.data.fill_(3)
        torch.cuda.synchronize()
        refuse_waiting()
        try:
            graph.replay()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert exchange.finish() is found
        check_received(found, [m], tensors, row, 0)
    fill(Metadata(rows, [3], [MAX_SPLITS], [1]))
    graph.replay()
    with pytest.raises(tw.CollectiveError, match=r"ranks \[0\] are invalid"):
        exchange.finish()
    fill(Metadata(rows, [CAPACITY + 1], [0], [1]))
    graph.replay()
    with pytest.raises(tw.CollectiveError, match=r"ranks \[0\] have more rows"):
        exchange.finish()


if __name__ == "__main__":
    main(*sys.argv[1:])


def test_codecs_that_draw_are_refused() -> None:
    """A captured graph would draw the same every time."""

    def task(transport: ThreadTransport) -> None:
        comm = tw.Communicator(transport, tw.codec("taco", rounding="stochastic"))
        with pytest.raises(ValueError, match="round to nearest"):
            FixedRateAllToAll(comm, (256,), "float32", max_splits=2, capacity=4)

    run_ranks(1, task)
