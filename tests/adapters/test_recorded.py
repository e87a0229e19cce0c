"""Calls of the same memory are recorded: here by what runs their steps again on the host."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Hashable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from prepared_ranks import DTYPE, ROUTES, run, same, tensor
from ranks import Alone
from tightwire.adapters.collectives import prepared_work
from tightwire.adapters.collectives import recorded as recorded_calls
from tightwire.adapters.collectives.prepared import PreparedCalls
from tightwire.adapters.collectives.prepared_work import Prepared
from tightwire.adapters.collectives.recorded import GraphRecorder, Recordings

N = 5000


class Recorder:
    """Notes what is queued, and queues it again."""

    def __init__(self) -> None:
        self.records = 0
        self.replays = 0
        self.numbers: set[int] = set()

    def place(self, *arrays: Any) -> Hashable:
        return tuple((x.ctypes.data, x.size, x.dtype) for x in arrays)

    def record(self, queue: Callable[[], object], number: int) -> Callable[[], None]:
        self.records += 1
        self.numbers.add(number)

        def replay() -> None:
            self.replays += 1
            queue()

        return replay

    def queue(self, work: Callable[[], None]) -> None:
        work()


@pytest.fixture(autouse=True)
def no_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared_work, "capturing", lambda: False)


def recorded(prepared: Prepared) -> Recorder:
    recorder = Recorder()
    prepared._recordings = Recordings(recorder)
    return recorder


def summed(parts: list[Any]) -> Any:
    return sum(part.astype(np.float32) for part in parts)


COLLECTIVES: dict[str, tuple[Callable[[PreparedCalls], Any], Callable[..., Any]]] = {
    "all_gather": (
        lambda calls: calls.all_gather(tensor(0, N)),
        lambda parts, me: np.concatenate(parts),
    ),
    "all_to_all": (
        lambda calls: calls.all_to_all(tensor(0, 2 * N)),
        lambda parts, me: np.concatenate([part[me * N : (me + 1) * N] for part in parts]),
    ),
    "reduce_scatter": (
        lambda calls: calls.reduce_scatter(tensor(0, 2 * N), scale=0.5),
        lambda parts, me: (summed(parts)[me * N : (me + 1) * N] * 0.5).astype(DTYPE),
    ),
    "one-shot": (
        lambda calls: calls.all_reduce(tensor(0, N), algorithm="one-shot"),
        lambda parts, me: summed(parts).astype(DTYPE),
    ),
    "two-shot": (
        lambda calls: calls.all_reduce(tensor(0, N), algorithm="two-shot"),
        lambda parts, me: summed(parts).astype(DTYPE),
    ),
}
COLLECTIVES |= {f"{case}, pieces": COLLECTIVES[case] for case in ("one-shot", "two-shot")}


def data(rank: int, n: int, call: int, wild: bool) -> Any:
    """Values of a rank; no message of wild ones fits."""
    if not wild:
        return tensor(rank, n, call)
    bits = np.random.default_rng([rank, n, call]).integers(0, 0x7F80, n)
    return bits.astype(np.uint16).view(DTYPE)


@pytest.mark.parametrize(
    ("route", "side_by_side"), [*[(route, False) for route in ROUTES], ("network", True)]
)
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_results_are_those_of_calls_that_are_not_recorded(
    collective: str, route: str, side_by_side: bool
) -> None:
    prepare, result = COLLECTIVES[collective]

    def task(calls: PreparedCalls) -> None:
        call = prepare(calls)
        recorder = recorded(call)
        n = 2 * N if collective in ("all_to_all", "reduce_scatter") else N
        # Some sums are in place.
        xs = [np.empty(n, DTYPE) for _ in range(2)]
        wanted = result([tensor(rank, n) for rank in range(2)], calls.rank)
        in_place = "shot" in collective
        outs = [xs[0] if in_place else np.empty_like(wanted), np.empty_like(wanted)]
        for k in range(40):
            # Memory in pairs, each input with each result, and on rank 1 now and then other.
            x, out = xs[k // 2 % 2], outs[k % 2]
            if calls.rank == 1 and k in (7, 12):
                x, out = np.empty_like(x), np.empty_like(out)
            parts = [data(rank, n, k, k in (3, 13) and rank == 0) for rank in range(2)]
            x[...] = parts[calls.rank]
            if out is not x:
                out[...] = np.nan
            call(x, out).wait()
            assert same(out, result(parts, calls.rank)), k
        assert recorder.records
        assert recorder.replays > recorder.records
        assert recorder.numbers == set(range(calls.depth if side_by_side else 1))

    run(2, route, task, pieces="pieces" in collective, side_by_side=side_by_side)


def test_a_recording_has_its_factor() -> None:
    """Also what does not fit is made once more with the factor of its call."""

    def task(calls: PreparedCalls) -> None:
        sums = calls.reduce_scatter(tensor(0, 2 * N))
        recorder = recorded(sums)
        x, out = np.empty(2 * N, DTYPE), np.empty(N, DTYPE)
        for k in range(40):
            factor = (None, 0.5, 0.25)[k // 4 % 3]
            parts = [data(rank, 2 * N, k, k in (3, 21) and rank == 0) for rank in range(2)]
            x[...] = parts[calls.rank]
            out[...] = np.nan
            sums(x, out, scale=factor).wait()
            share = summed(parts)[calls.rank * N : (calls.rank + 1) * N]
            assert same(out, (share * np.float32(factor or 1)).astype(DTYPE)), k
        assert recorder.replays > recorder.records >= 3

    run(2, "network", task)


def test_places_of_graphs() -> None:
    """Calls are alike whose memory, sizes and dtypes are all the same."""
    torch = pytest.importorskip("torch")
    recorder = object.__new__(GraphRecorder)
    recorder._torch = torch
    x, y = torch.zeros(8), torch.zeros(8)
    place = recorder.place(x, y)
    assert place == recorder.place(x[:], y.view(8))
    others = [(y, x), (x, x), (x[:4], y), (x, y[1:]), (x.view(torch.int32), y)]
    assert all(recorder.place(*other) not in (place, None) for other in others)
    strange = [(x[::2], y), (x, torch.nn.Parameter(y)), (np.zeros(8), y)]
    assert [recorder.place(*other) for other in strange] == [None] * 3


class Graphs:
    """Takes the part of PyTorch: notes what is captured, queued and replayed."""

    def __init__(self) -> None:
        self.noted: list[str] = []
        self.cuda = self
        self.made = self.pools = 0

    def stream(self, stream: Any) -> Any:
        return contextlib.nullcontext()

    def graph_pool_handle(self) -> int:
        self.pools += 1
        return self.pools

    def CUDAGraph(self) -> Any:
        return Graph(self)


class Graph:
    """Of ``Graphs``."""

    def __init__(self, graphs: Graphs) -> None:
        self._noted, self._number = graphs.noted, graphs.made
        graphs.made += 1

    def capture_begin(self, pool: int, capture_error_mode: str) -> None:
        self.pool = pool
        self._noted.append(f"begin {self._number}")

    def capture_end(self) -> None:
        self._noted.append(f"end {self._number}")

    def replay(self) -> None:
        self._noted.append(f"replay {self._number}")


def graph_recorder(graphs: Graphs, whole: bool) -> Any:
    recorder: Any = object.__new__(GraphRecorder)
    vars(recorder).update(_torch=graphs, _stream=None, _pools={}, _whole=whole, _word=None)
    vars(recorder).update(_parts=None, _graph=None)
    return recorder


def test_graphs_that_may_run_at_the_same_time_share_no_memory() -> None:
    graphs = Graphs()
    recorder = graph_recorder(graphs, True)

    def pool() -> int:
        return int(recorder._graph.pool)

    used: list[int] = []
    kept = [recorder.record(lambda: used.append(pool()), number) for number in (0, 1, 0, 1, 1)]
    assert used == [1, 2, 1, 2, 2]
    # PyTorch drops the memory with the last graph.
    del kept[1:2], kept[2:]
    kept.append(recorder.record(lambda: used.append(pool()), 1))
    assert used[-1] == 3
    kept.append(recorder.record(lambda: used.append(pool()), 0))
    assert used[-1] == 1


@pytest.mark.parametrize("whole", [False, True])
def test_what_graphs_cannot_hold_is_queued_anew(whole: bool) -> None:
    graphs = Graphs()
    recorder = graph_recorder(graphs, whole)
    noted = graphs.noted

    def queue() -> None:
        noted.append("encode")
        recorder.queue(lambda: noted.append("exchange"))
        noted.append("decode")

    replay = recorder.record(queue, 0)
    if whole:
        assert noted == ["begin 0", "encode", "exchange", "decode", "end 0"]
    else:
        assert noted == ["begin 0", "encode", "end 0", "begin 1", "decode", "end 1"]
    for _ in range(2):
        noted.clear()
        replay()
        assert noted == (["replay 0"] if whole else ["replay 0", "exchange", "replay 1"])
    noted.clear()
    # Outside of a recording it is queued at once, also after one that failed.
    recorder.queue(lambda: noted.append("exchange"))

    def fails() -> None:
        queue()
        raise ValueError("out of memory")

    with pytest.raises(ValueError, match="out of memory"):
        recorder.record(fails, 0)
    assert noted[-1].startswith("end")
    # No graph outlives what was recorded: the last one ends the pool.
    del replay
    gc.collect()
    assert not recorder._pools[0].graphs
    recorder.queue(lambda: noted.append("exchange"))
    assert noted[0] == noted[-1] == "exchange"


def test_recordings_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not more than so many are made; closing drops them."""
    monkeypatch.setattr(recorded_calls, "MOST", 3)

    def task(calls: PreparedCalls) -> None:
        gather = calls.all_gather(tensor(0, N))
        recorder = recorded(gather)
        memory = [(np.empty(N, DTYPE), np.empty(2 * N, DTYPE)) for _ in range(5)]
        for k in range(50):
            x, out = memory[k % 5]
            x[...] = tensor(calls.rank, N, k)
            gather(x, out).wait()
            assert same(out, np.concatenate([tensor(rank, N, k) for rank in range(2)]))
        assert recorder.records == 3 * calls.depth
        assert all(len(slot.recordings) == 3 for slot in gather._slots)
        calls.close()
        assert not any(slot.recordings for slot in gather._slots)

    run(2, "peers", task)


def test_few_calls_are_not_recorded() -> None:
    """Each memory comes once before; when messages get larger, one call for each set of memory."""

    def task(calls: PreparedCalls) -> None:
        gather = calls.all_gather(tensor(0, N))
        recorder = recorded(gather)
        memory = [(np.empty(N, DTYPE), np.empty(2 * N, DTYPE)) for _ in range(6)]
        not_recorded = []
        # Later messages might get smaller.
        for k in range(16):
            x, out = memory[k % 6]
            parts = [data(rank, N, k, wild=k == 8) for rank in range(2)]
            x[...] = parts[calls.rank]
            before = recorder.replays
            gather(x, out).wait()
            assert same(out, np.concatenate(parts)), k
            if recorder.replays == before:
                not_recorded.append(k)
        first = [k for k in not_recorded if k <= 8]
        assert first == list(range(6))
        assert len(not_recorded) - len(first) in (1, 2)

    run(2, "network", task)


class Stream:
    """A stream of a GPU: what it waits for."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.waits: list[int] = []

    def wait_stream(self, other: Stream) -> None:
        self.waits.append(other.number)


@pytest.mark.parametrize("side_by_side", [False, True])
def test_what_calls_follow(side_by_side: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All calls before, whatever their streams; or those with the same set of memory."""
    torch = pytest.importorskip("torch")
    current: list[Stream] = []
    raw = "_cuda_getCurrentRawStream"
    monkeypatch.setattr(torch._C, raw, lambda _: current[0].number, raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: current[0])
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)

    def task(calls: PreparedCalls) -> None:
        like = SimpleNamespace(get_device=lambda: 0, device=None)
        streams = [Stream(0), Stream(1)]

        def follow(stream: int, phase: int) -> list[int]:
            current[:], before = [streams[stream]], len(streams[stream].waits)
            calls.follow(like, phase)
            with calls.ordered(phase) as found:
                assert found is streams[stream] is calls.stream_of(phase)
            return streams[stream].waits[before:]

        found = [follow(0, 0), follow(1, 1), follow(0, 0), follow(1, 1), follow(0, 1)]
        apart = [[], [], [], [], [1]]
        assert found == (apart if side_by_side else [[], [0], [1], [0], [1]])

    run(1, "network", task, side_by_side=side_by_side)


def test_a_call_that_is_known_to_fit_keeps_nothing() -> None:
    def task(calls: PreparedCalls) -> None:
        x, out = tensor(calls.rank, N), np.empty(2 * N, DTYPE)
        gather = calls.all_gather(x)
        for _ in range(calls.depth):
            gather(x, out).wait()
        work = gather(x, out)
        kept = weakref.ref(out)
        work.note_fit()
        assert not work.may_change
        del x, out
        assert kept() is None
        work.wait()

    gc.disable()
    try:
        run(2, "network", task)
    finally:
        gc.enable()


@pytest.mark.parametrize("route", ROUTES)
def test_works_that_were_waited_for_keep_nothing(route: str) -> None:
    def task(calls: PreparedCalls) -> None:
        x, out = tensor(calls.rank, N), np.empty(2 * N, DTYPE)
        gather = calls.all_gather(x)
        work = gather(x, out)
        work.wait()
        kept = [weakref.ref(thing) for thing in (x, out, *gather._slots)]
        del x, out, gather
        assert [ref() for ref in kept] == [None] * len(kept)
        assert work.judged

    gc.disable()
    try:
        run(2, route, task)
    finally:
        gc.enable()


@pytest.mark.parametrize("codec", ["zipccl", "mx"])
def test_no_graph_of_a_user_has_messages_that_may_not_fit(
    codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")

    class OnGpu(torch.Tensor):  # type: ignore[misc, name-defined]
        is_cuda = True

    def task(calls: PreparedCalls) -> None:
        gather = calls.all_gather(tensor(calls.rank, N))
        gather._like = torch.zeros(0).as_subclass(OnGpu)
        if codec == "mx":
            gather._ready()
            return
        with pytest.raises(ValueError, match=r"over a network is captured .* zipccl"):
            gather(tensor(calls.rank, N), np.empty(2 * N, DTYPE))
        # Nothing was sent.
        gather._like = tensor(0, 0)
        out = np.empty(2 * N, DTYPE)
        gather(tensor(calls.rank, N), out).wait()
        assert same(out, np.concatenate([tensor(rank, N) for rank in range(2)]))

    monkeypatch.setattr(prepared_work, "capturing", lambda: True)
    run(2, "network", task, codec=codec)


#: Ranks that swap or gather, and the elements that each of them has.
GROUP, EACH = 4, 512 * 137


@pytest.mark.gpu
@pytest.mark.parametrize("codec", ["zipccl", "mx", "huffman", "taco"])
@pytest.mark.parametrize("side_by_side", [False, True])
@pytest.mark.parametrize(
    "collective", ["all_gather", "all_to_all", "reduce_scatter", "one-shot", "two-shot"]
)
def test_graphs_of_more_than_two_ranks(collective: str, side_by_side: bool, codec: str) -> None:
    """Messages to several ranks are a batch. The others do what this one does."""
    torch = pytest.importorskip("torch")
    transport = Alone(GROUP)
    transport.capturable = True

    def exchange(kind: str, outs: Any, xs: Any) -> None:
        for receives, sends in zip(outs, xs, strict=True):
            for out, x in zip(receives, sends, strict=True):
                to, given = (a if hasattr(a, "copy_") else torch.from_numpy(a) for a in (out, x))
                to.copy_(given)

    transport._exchange = exchange  # type: ignore[method-assign]
    calls = PreparedCalls(transport, codec, side_by_side=side_by_side)
    whole = collective in ("all_to_all", "reduce_scatter")
    x = torch.randn(GROUP * EACH if whole else EACH, device="cuda").bfloat16()
    size = GROUP * EACH if collective in ("all_gather", "all_to_all") else EACH
    if "shot" in collective:
        call = calls.all_reduce(x, algorithm=collective)
    else:
        call = getattr(calls, collective)(x)
    streams = [torch.cuda.Stream() for _ in range(calls.depth)]
    memory = [torch.empty(size, device="cuda", dtype=x.dtype) for _ in streams]
    found = []
    for _ in range(12):
        phase = calls.phase
        memory[phase].fill_(torch.nan)
        torch.cuda.synchronize()
        with torch.cuda.stream(streams[calls.queue_of(phase)]):
            work = call(x, memory[phase])
        work.wait()
        found.append(memory[phase].clone())
    assert all(slot.recordings for slot in call._slots)
    assert all(torch.equal(one, found[0]) for one in found)
    near = {"rtol": 0, "atol": 0} if codec in ("zipccl", "huffman") else {"rtol": 0.3, "atol": 0.5}
    if collective == "all_gather":
        wanted = x.repeat(GROUP)
    elif collective == "all_to_all":
        wanted = x
    elif collective == "one-shot":
        wanted = (GROUP * x.float()).bfloat16()
    else:
        # Others send what this rank has for them.
        share = x.float().view(GROUP, -1).sum(0).bfloat16()
        wanted = share if collective == "reduce_scatter" else share.repeat(GROUP)
    torch.testing.assert_close(found[0], wanted, **near)
