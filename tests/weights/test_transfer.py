"""Weight transfer: versions come bit for bit on every rank; faults change nothing, and say why."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tightwire as tw
from tightwire import storage
from tightwire.adapters.transports import base as transports
from tightwire.adapters.transports.threads import ThreadTransport, connect, run_ranks
from tightwire.adapters.weights import publishing, rounds, subscribing
from tightwire.formats.dtypes import DTYPES
from transfers import PATIENCE, State, blank, copied, ranks, raw, same, step, versions


@pytest.fixture(autouse=True)
def no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.mark.parametrize(("count", "hold"), [(2, "elements"), (3, "buffers"), (5, "elements")])
def test_versions_come_bit_for_bit(count: int, hold: Any) -> None:
    follow(versions(3), count, hold)


@pytest.mark.slow
@pytest.mark.parametrize("hold", ["elements", "buffers"])
def test_large_tensors_of_all_dtypes(hold: Any) -> None:
    """They are coded by Numba, and differences are written over them without a copy."""
    follow(versions(3, 70_001, DTYPES), 3, hold)


def follow(states: list[State], count: int, hold: Any) -> None:
    def task(transport: ThreadTransport) -> None:
        rank = transport.rank
        if rank == count - 1:
            source = copied(states[0])
            publisher = tw.publish(source, transport, bucket_nbytes=9000)
            assert publisher.version is None
            for number, state in enumerate(states):
                for name, x in state.items():
                    source[name][...] = x
                assert publisher.send() == publisher.version == number
            return
        target = blank(states[0])
        if rank == 1:
            # An entry of another dtype, one that vanishes, and one that is missing.
            target |= {"v": np.zeros(3), "gone": np.zeros(5)}
            del target["uint8"]
        kept = dict(target)
        subscriber = tw.subscribe(target, transport, hold=hold)
        for number, state in enumerate(states):
            before = copied(target)
            update = subscriber.receive()
            assert same(target, before)
            assert subscriber.version == (None if number == 0 else number - 1)
            assert update.version == number
            assert update.since == (None if number == 0 else number - 1)
            update.write()
            assert subscriber.version == number
            assert same(target, state)
        assert target["embed"] is kept["embed"]
        assert target["embed"] is target["head"]

    assert ranks(count, task) == [None] * count


def traffic(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Rank and bytes of every broadcast of messages."""
    found: list[tuple[int, int]] = []
    original = ThreadTransport.broadcast

    def broadcast(self: ThreadTransport, x: Any, root: int) -> None:
        found.append((self.rank, x.shape[0]))
        original(self, x, root)

    monkeypatch.setattr(ThreadTransport, "broadcast", broadcast)
    return found


def test_ranks_get_what_they_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    """One has the base, one has missed a version, one has the new one already."""
    states = versions(3)
    sent = traffic(monkeypatch)

    def task(transport: ThreadTransport) -> Any:
        rank = transport.rank
        if rank == 0:
            source = copied(states[1])
            publisher = tw.publish(source, transport)
            publisher.send(version=7)
            sent.clear()
            step(source, 2)
            version = publisher.send()
            transport.barrier()
            nbytes = sum(n for r, n in sent if r == 0)
            # Nobody lacks anything: nothing travels.
            sent.clear()
            publisher.send()
            return version, nbytes, sum(n for r, n in sent if r == 0)
        target = copied(states[1])
        subscriber = tw.subscribe(target, transport)
        subscriber.receive().write()
        if rank == 2:
            target["v"][0, 0] += 1
        if rank == 3:
            step(target, 2)
        update = subscriber.receive()
        update.write()
        assert same(target, states[2])
        transport.barrier()
        assert subscriber.update() == 9
        assert same(target, states[2])
        return update.since, len(update.names)

    (version, nbytes, nothing), *others = ranks(4, task)
    assert (version, nothing) == (8, 0)
    assert others == [(7, 8), (None, 8), (7, 0)]
    whole = sum(x.nbytes for x in states[0].values())
    assert nbytes > 0.5 * whole


def test_a_delta_takes_few_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = traffic(monkeypatch)
    rng = np.random.default_rng(0)
    state = {"w": rng.normal(0, 0.02, 30_003).astype(ml_dtypes.bfloat16)}

    def task(transport: ThreadTransport) -> Any:
        mine = copied(state)
        if transport.rank:
            subscriber = tw.subscribe(mine, transport)
            return subscriber.update(), subscriber.update(), raw(mine["w"])
        publisher = tw.publish(mine, transport)
        publisher.send()
        mine["w"].view(np.int16)[::100] += 1
        publisher.send()
        return 0, 1, raw(mine["w"])

    first, *others = ranks(3, task)
    assert others == [first, first]
    assert 0 < sum(n for rank, n in sent if rank == 0) < 0.03 * state["w"].nbytes


def test_without_a_copy_versions_are_whole() -> None:
    states = versions(2)

    def task(transport: ThreadTransport) -> Any:
        if transport.rank == 0:
            source = copied(states[0])
            publisher = tw.publish(source, transport, keep=False, codec="raw")
            publisher.send()
            step(source, 1)
            return publisher.send()
        target = blank(states[0])
        subscriber = tw.subscribe(target, transport)
        subscriber.update()
        update = subscriber.receive()
        update.write()
        assert same(target, states[1])
        return update.since

    assert ranks(2, task) == [1, None]


def test_ties_may_differ() -> None:
    """The publisher ties what the target does not; what the target alone ties must be equal."""

    def task(transport: ThreadTransport) -> Any:
        x = np.arange(2000, dtype=np.float32)
        if transport.rank == 0:
            source = {"a": x, "b": x}
            publisher = tw.publish(source, transport)
            publisher.send()
            source["b"] = x + 1
            return publisher.send()
        target = {"a": np.zeros_like(x), "b": np.zeros_like(x)}
        subscriber = tw.subscribe(target, transport)
        subscriber.update()
        assert (target["a"] == x).all()
        assert (target["b"] == x).all()
        target["b"] = target["a"]
        return subscriber.update()

    publisher, subscriber = ranks(2, task)
    for error in (publisher, subscriber):
        assert isinstance(error, tw.CollectiveError)
        assert error.stage == "announce"
        assert "ranks [1]: ValueError: 'a' and 'b' share memory" in error.detail
    assert isinstance(subscriber.__cause__, ValueError)


@pytest.mark.parametrize("hold", ["elements", "buffers"])
@pytest.mark.parametrize(
    "ties", ["a=a b=b c=a", "c=a a=a b=b", "a=a b=a", "b=b a=b", "a=d b=d", "a=a", "b=b a=a"]
)
def test_names_that_become_ties(ties: str, hold: Any) -> None:
    """Names are added to a tensor, removed, or given another one, changed or not."""
    x = {name: np.arange(5000, dtype=np.float32) + i for i, name in enumerate(("a", "b", "d"))}
    later = {name: x[old] for name, old in (tie.split("=") for tie in ties.split())}

    def task(transport: ThreadTransport) -> Any:
        first = {"a": x["a"], "b": x["b"]}
        if transport.rank == 0:
            source = dict(first)
            publisher = tw.publish(source, transport)
            publisher.send()
            source.clear()
            source.update(later)
            publisher.send()
            source.clear()
            source.update(first)
            return publisher.send()
        target = {name: np.zeros_like(y) for name, y in first.items()}
        subscriber = tw.subscribe(target, transport, hold=hold)
        subscriber.update()
        subscriber.update()
        assert same(target, {name: later[name] for name in target})
        assert target.keys() == later.keys()
        update = subscriber.receive()
        update.write()
        assert same(target, {name: first[name] for name in target})
        assert update.since == 1
        return update.version

    assert ranks(2, task) == [2, 2]


def test_what_failed_to_be_checked_is_sent_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[bool] = []
    original = subscribing.Taker.take

    def take(self: Any, bucket: Any, message: Any, threads: int) -> None:
        sent.extend(message.against)
        if len(sent) == 1:
            raise tw.FormatError("bad_container", "not what was announced")
        original(self, bucket, message, threads)

    monkeypatch.setattr(subscribing.Taker, "take", take)

    def task(transport: ThreadTransport) -> Any:
        w = {"w": np.zeros(3000, np.float32)}
        side = tw.publish(w, transport) if transport.rank == 0 else tw.subscribe(w, transport)
        call: Callable[[], int] = getattr(side, "send" if transport.rank == 0 else "update")
        assert call() == 0
        w["w"][5] = 1 - transport.rank
        with pytest.raises(tw.CollectiveError, match="not what was"):
            call()
        return call()

    assert ranks(2, task) == [1, 1]
    assert sent == [True, False]


@pytest.mark.parametrize("hold", ["elements", "buffers"])
def test_modules(hold: Any) -> None:
    torch = pytest.importorskip("torch")

    def make() -> Any:
        model = torch.nn.Sequential(
            torch.nn.Linear(60, 40).bfloat16(), torch.nn.BatchNorm1d(40), torch.nn.Linear(40, 60)
        )
        model[2].weight.data = model[2].weight.data.t().contiguous().t()
        return model

    def bits(model: Any) -> dict[str, bytes]:
        return {n: bytes(tw.encode(x, "raw")) for n, x in model.state_dict().items()}

    def task(transport: ThreadTransport) -> Any:
        model = make()
        if transport.rank == 0:
            publisher = tw.publish(model, transport)
            publisher.send()
            with torch.no_grad():
                model[0].weight[3] += 1
                model[2].weight[3] += 1
                model[1].num_batches_tracked += 1
            publisher.send()
            return bits(model)
        before = [x.data_ptr() for x in model.parameters()]
        counters = [x._version for x in model.parameters()]
        subscriber = tw.subscribe(model, transport, hold=hold)
        subscriber.update()
        assert subscriber.update() == 1
        assert [x.data_ptr() for x in model.parameters()] == before
        written = [x._version > n for x, n in zip(model.parameters(), counters, strict=True)]
        assert all(written[::2][:1]), written
        return bits(model)

    first, *others = ranks(3, task)
    assert others == [first, first]


def test_names_of_a_module_must_match() -> None:
    torch = pytest.importorskip("torch")

    def task(transport: ThreadTransport) -> Any:
        model = torch.nn.Linear(4, 5, bias=transport.rank != 1)
        end = tw.publish(model, transport) if transport.rank == 0 else None
        if end is not None:
            with pytest.raises(tw.CollectiveError) as caught:
                end.send()
            other = torch.nn.Linear(4, 5, bias=False)
            end._source = other  # type: ignore[attr-defined]
            with pytest.raises(tw.CollectiveError):
                end.send()
            return str(caught.value)
        weight = model.weight.detach().clone()
        subscriber = tw.subscribe(model, transport)
        with pytest.raises(tw.CollectiveError) as caught:
            subscriber.update()
        with pytest.raises(tw.CollectiveError):
            subscriber.update()
        assert torch.equal(model.weight, weight)
        return str(caught.value)

    found = ranks(3, task)
    for text in found:
        assert "ranks [1]: ValueError: 'bias' is only in the version" in text
        assert "the next round may follow" in text


def test_a_round_follows_one_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that gets damage says so, no rank writes, and all take the next version."""
    states = versions(2)
    original = subscribing.Taker.take
    failing = threading.Event()
    failing.set()

    def take(self: Any, bucket: Any, message: Any, threads: int) -> None:
        if threading.current_thread().name.startswith("tightwire") and failing.is_set():
            failing.clear()
            message = message._replace(data=message.data ^ 1)
        original(self, bucket, message, threads)

    monkeypatch.setattr(subscribing.Taker, "take", take)

    def task(transport: ThreadTransport) -> Any:
        if transport.rank == 0:
            source = copied(states[0])
            publisher = tw.publish(source, transport)
            with pytest.raises(tw.CollectiveError) as caught:
                publisher.send()
            step(source, 1)
            assert publisher.send() == 0
            return caught.value.stage
        target = blank(states[0])
        subscriber = tw.subscribe(target, transport)
        with pytest.raises(tw.CollectiveError, match="FormatError"):
            subscriber.receive()
        assert same(target, blank(states[0]))
        subscriber.update()
        assert same(target, states[1])
        return "verify"

    assert ranks(3, task) == ["verify"] * 3


def test_a_publisher_that_cannot_encode_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    states = versions(1)
    original = publishing.Encoder._on_host
    count = [0]

    def failing(self: Any, *args: Any) -> Any:
        count[0] += 1
        if count[0] == 3:
            raise MemoryError("no memory")
        return original(self, *args)

    monkeypatch.setattr(publishing.Encoder, "_on_host", failing)

    def task(transport: ThreadTransport) -> Any:
        if transport.rank == 0:
            publisher = tw.publish(copied(states[0]), transport, bucket_nbytes=2000, threads=1)
            with pytest.raises(tw.CollectiveError) as caught:
                publisher.send()
            assert publisher.version is None
            publisher.send()
            return str(caught.value).partition(":")[2]
        target = blank(states[0])
        subscriber = tw.subscribe(target, transport)
        with pytest.raises(tw.CollectiveError) as caught:
            subscriber.receive()
        assert same(target, blank(states[0]))
        subscriber.update()
        assert same(target, states[0])
        return str(caught.value).partition(":")[2]

    found = ranks(3, task)
    assert len(set(found)) == 1
    assert "ranks [0]: MemoryError: no memory" in found[0]


def test_a_publisher_that_dies_between_messages() -> None:
    """The others raise, nothing is written, and a group of those that are left goes on."""
    states = versions(1)
    again = connect(3, PATIENCE)

    class Dying(ThreadTransport):
        calls = 0

        def broadcast(self, x: Any, root: int) -> None:
            self.calls += 1
            if self.calls == 8:
                raise SystemExit("killed")
            super().broadcast(x, root)

    def task(transport: ThreadTransport) -> Any:
        rank = transport.rank
        if rank == 0:
            dying = Dying(0, transport._pipes, PATIENCE)
            try:
                tw.publish(copied(states[0]), dying, bucket_nbytes=2000).send()
            except SystemExit:
                transport.close()
                return "dead"
        target = blank(states[0])
        subscriber = tw.subscribe(target, transport)
        with pytest.raises(tw.CollectiveError) as caught:
            subscriber.receive()
        transport.close()
        assert same(target, blank(states[0]))
        assert caught.value.stage == "receive"
        assert "Make a new transport of the ranks that are left" in caught.value.detail
        with pytest.raises(tw.CollectiveError, match="an earlier round failed"):
            subscriber.receive()
        # Rank 1 has a copy of the weights, and takes over.
        if rank == 1:
            return tw.publish(copied(states[0]), again[0]).send(version=5)
        other = tw.subscribe(target, again[rank - 1])
        other.update()
        assert same(target, states[0])
        return other.version

    again = connect(2, PATIENCE)
    assert ranks(3, task) == ["dead", 5, 5]


def test_an_interrupted_round_is_not_gone_on_with(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any) -> Any:
        raise KeyboardInterrupt

    def task(transport: ThreadTransport) -> Any:
        x = {"w": np.full(3000, transport.rank, np.float32)}
        if transport.rank == 0:
            publisher = tw.publish(x, transport)
            with pytest.raises(tw.CollectiveError, match="rank 1 has left"):
                publisher.send()
            return None
        subscriber = tw.subscribe(x, transport)
        monkeypatch.setattr(subscribing, "check_fit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            subscriber.receive()
        with pytest.raises(tw.CollectiveError, match="an earlier round was interrupted here"):
            subscriber.receive()
        transport.close()
        return float(x["w"][0])

    assert ranks(2, task) == [None, 1]


def test_a_subscriber_that_does_not_come() -> None:
    def task(transport: ThreadTransport) -> Any:
        x = {"w": np.zeros(10, np.float32)}
        if transport.rank == 2:
            return None
        with pytest.raises(tw.CollectiveError, match="rank 2 sent nothing") as caught:
            if transport.rank == 0:
                tw.publish(x, transport).send()
            else:
                tw.subscribe(x, transport).receive()
        return caught.value.stage

    assert run_ranks(3, task, 0.3) == ["meet", "meet", None]


def test_a_message_that_cannot_be_placed_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """No word of it is sent before, so that the others know, and the next round follows."""
    original, count = rounds.placed, [0]

    def placed(data: Any, device: Any) -> Any:
        count[0] += data.shape[0] > 2000
        if count[0] == 1:
            count[0] += 1
            raise MemoryError("no memory on the device")
        return original(data, device)

    monkeypatch.setattr(rounds, "placed", placed)

    def task(transport: ThreadTransport) -> Any:
        x = {"w": np.random.default_rng(transport.rank).normal(size=3000)}
        end = tw.publish(x, transport) if transport.rank == 0 else tw.subscribe(x, transport)
        call: Callable[[], int] = getattr(end, "send" if transport.rank == 0 else "update")
        with pytest.raises(tw.CollectiveError, match=r"ranks .0.: MemoryError: no memory"):
            call()
        return call()

    assert ranks(2, task) == [0, 0]


def test_a_worker_without_memory_for_a_message() -> None:
    """It says so; the others learn of it when it leaves, or at the timeout."""

    def task(transport: ThreadTransport) -> Any:
        x = {"w": np.random.default_rng(transport.rank).normal(size=3000)}
        if transport.rank == 0:
            with pytest.raises(tw.CollectiveError, match="rank 1"):
                tw.publish(x, transport).send()
            return None
        empty = transport.empty

        def failing(nbytes: int) -> Any:
            if nbytes > 10_000:
                raise MemoryError("no memory")
            return empty(nbytes)

        transport.empty = failing  # type: ignore[method-assign]
        subscriber = tw.subscribe(x, transport)
        with pytest.raises(tw.CollectiveError, match=r"no memory; nothing has been .* Make a new"):
            subscriber.update()
        with pytest.raises(tw.CollectiveError, match="an earlier round failed: no memory"):
            subscriber.update()
        transport.close()
        return None

    assert ranks(2, task) == [None, None]


@pytest.mark.parametrize(
    ("publishers", "text"), [((0, 2), "ranks [0, 2] publish"), ((), "no rank")]
)
def test_one_rank_publishes(publishers: tuple[int, ...], text: str) -> None:
    def task(transport: ThreadTransport) -> Any:
        x = {"w": np.full(10, transport.rank, np.float32)}
        with pytest.raises(tw.CollectiveError) as caught:
            if transport.rank in publishers:
                tw.publish(x, transport).send()
            else:
                tw.subscribe(x, transport).update()
        assert (x["w"] == transport.rank).all()
        assert "the next round may follow" in caught.value.detail
        with pytest.raises(tw.CollectiveError, match="no rank publishes"):
            tw.subscribe(x, transport).update()
        return text in caught.value.detail and caught.value.stage

    assert ranks(3, task) == ["meet"] * 3


def test_versions_only_grow() -> None:
    """A publisher that starts anew goes on where the subscribers are, and cannot go back."""

    def task(transport: ThreadTransport) -> Any:
        x = {"w": np.full(10, transport.rank, np.float32)}
        if transport.rank == 0:
            assert tw.publish(x, transport).send(version=41) == 41
            anew = tw.publish(x, transport)
            with pytest.raises(
                tw.CollectiveError, match=r"version 3 is sent, and ranks .1. have 41"
            ):
                anew.send(version=3)
            x["w"] += 1
            return anew.send()
        subscriber = tw.subscribe(x, transport)
        subscriber.update()
        with pytest.raises(tw.CollectiveError):
            subscriber.receive()
        return subscriber.update()

    assert ranks(2, task) == [42, 42]


@pytest.mark.parametrize("where", ["transport", "directory"])
def test_an_update_is_written_once_and_in_order(where: str, tmp_path: Path) -> None:
    def task(transport: ThreadTransport) -> Any:
        x = {"w": np.zeros(3000, np.float32)}
        there: Any = transport if where == "transport" else tmp_path / "versions"
        if transport.rank == 0:
            publisher = tw.publish(x, there)
            for _ in range(3):
                publisher.send()
                transport.barrier()
                x["w"][::100] += 1
                transport.barrier()
            return None
        transport_subscriber = tw.subscribe(x, there)
        updates = []
        for _ in range(3):
            if where == "directory":
                transport.barrier()
            updates.append(transport_subscriber.receive())
            if where == "transport":
                transport.barrier()
            if len(updates) == 1:
                updates[0].write()
                with pytest.raises(ValueError, match="have been written"):
                    updates[0].write()
            transport.barrier()
        with pytest.raises(ValueError, match="have been dropped"):
            updates[1].write()
        assert (x["w"] == 0).all()
        updates[2].write()
        assert (x["w"][::100] == 2).all()
        return updates[2].since, updates[2].version

    # Over a transport only what was sent last is a base.
    since = 0 if where == "directory" else None
    assert ranks(2, task) == [None, (since, 2)]


def test_buffers_that_are_held_notice_other_tensors() -> None:
    def task(transport: ThreadTransport) -> Any:
        x = {"w": np.zeros(3000, np.float32)}
        if transport.rank == 0:
            publisher = tw.publish(x, transport)
            publisher.send()
            x["w"][::100] += 1
            publisher.send()
            return publisher.send()
        subscriber = tw.subscribe(x, transport, hold="buffers")
        subscriber.update()
        update = subscriber.receive()
        x["w"][5] = 7
        with pytest.raises(tw.FormatError, match="base_mismatch"):
            update.write()
        assert subscriber.version == 0
        # The digests tell: it gets everything.
        subscriber.update()
        assert (x["w"][::100] == 1).all()
        assert x["w"][5] == 0
        return subscriber.version

    assert ranks(2, task) == [2, 2]


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_what_is_kept_is_written_in_place(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The publisher's copy takes no second memory while it follows."""
    count, copied_whole = 0, publishing._copied

    def counted(x: Any) -> Any:
        nonlocal count
        count += 1
        return copied_whole(x)

    monkeypatch.setattr(publishing, "_copied", counted)
    if library == "torch":
        pytest.importorskip("torch")

    def task(transport: ThreadTransport) -> Any:
        data = bytes(tw.encode(np.full(5000, transport.rank, np.float32)))
        mine = {"w": tw.decode(data, like=library)}
        if transport.rank == 0:
            publisher = tw.publish(mine, transport)
            publisher.send()
            mine["w"][7] = 9
            publisher.send()
            publisher.send()
            return count
        subscriber = tw.subscribe(mine, transport)
        for _ in range(3):
            subscriber.update()
        return float(mine["w"][7])

    assert ranks(2, task) == [1, 9.0]


def test_a_first_version_from_inference_mode() -> None:
    torch = pytest.importorskip("torch")

    def task(transport: ThreadTransport) -> Any:
        with torch.inference_mode():
            mine = {"w": torch.full((5000,), float(transport.rank))}
        side: Any = None
        if transport.rank == 0:
            side = tw.publish(mine, transport)
            with torch.inference_mode():
                side.send()
                mine["w"][7] = 9
            side.send()
        else:
            mine = {"w": torch.ones(5000)}
            side = tw.subscribe(mine, transport)
            side.update()
            side.update()
        return float(mine["w"][7])

    assert ranks(2, task) == [9.0, 9.0]


@pytest.mark.slow
def test_on_a_device_tensors_go_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of tensors on GPUs, on the host: the same bits, by `encode_many`."""
    torch = pytest.importorskip("torch")
    states = versions(3, 1501, DTYPES)

    def tensors(state: State) -> State:
        made = {id(x): tw.decode(bytes(tw.encode(x, "raw")), like="torch") for x in state.values()}
        return {name: made[id(x)] for name, x in state.items()}

    def messages(self: Any, announcement: Any, streams: Any) -> Any:
        for stream, bucket in announcement.messages(streams):
            yield self.finish(self.begin(stream, bucket))

    monkeypatch.setattr(publishing.Encoder, "messages", messages)

    def task(transport: ThreadTransport) -> Any:
        first = copied(states[0])
        target = tensors(first if transport.rank == 0 else blank(first))
        if transport.rank == 0:
            publisher = tw.publish(target, transport, bucket_nbytes=9000)
            for state in states:
                for name, x in tensors(state).items():
                    target[name].copy_(x)
                publisher.send()
            return None
        assert torch.is_tensor(target["v"])
        hold: Any = "buffers" if transport.rank == 1 else "elements"
        subscriber = tw.subscribe(target, transport, hold=hold)
        for state in states:
            subscriber.update()
            found = {n: tw.decode(bytes(tw.encode(x, "raw"))) for n, x in target.items()}
            assert same(found, state)
        return None

    assert ranks(3, task) == [None] * 3


# Directories


def test_directories(tmp_path: Path) -> None:
    states = versions(4)
    source, target = copied(states[0]), blank(states[0])
    folder = tmp_path / "versions"
    publisher = tw.publish(source, folder)
    subscriber = tw.subscribe(target, folder, timeout=0.2)
    with pytest.raises(TimeoutError, match="no version in"):
        subscriber.receive()
    for number, state in enumerate(states):
        for name, x in state.items():
            source[name][...] = x
        assert publisher.send() == number
        if number == 2:
            # This version is slept through.
            continue
        before = copied(target)
        update = subscriber.receive()
        assert same(target, before)
        update.write()
        assert same(target, state)
        assert subscriber.version == number
    with pytest.raises(TimeoutError, match="no version after 3"):
        subscriber.receive()
    # A trainer that starts anew goes on from the directory; a worker that is damaged recovers.
    target["v"][0, 0] += 1
    step(source, 9)
    assert tw.publish(source, folder, keep=False).send() == 4
    assert subscriber.update() == 4
    assert same(target, source)
    whole = (folder / "weight_v000000.tw.safetensors").stat().st_size
    assert (folder / "weight_v000004.from_v000003.tw.safetensors").stat().st_size < whole
    # The first publisher is told of the other one.
    with pytest.raises(ValueError, match=r"sent version 3, and .* has 4: another one writes there"):
        publisher.send()


@pytest.mark.parametrize("keep", [True, False])
def test_a_publisher_goes_on_after_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: bool
) -> None:
    """Whether the version that it could not write, or not sync, is there or not."""
    source = {"w": np.arange(2000, dtype=np.float32)}
    publisher = tw.publish(source, tmp_path, keep=keep)
    publisher.send()

    def fails(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    for number, (name, written) in enumerate([("sync_folder", 1), ("_lock", 0)]):
        source["w"][number] += 1
        with monkeypatch.context() as patch:
            patch.setattr(storage, name, fails)
            with pytest.raises(OSError, match="No space"):
                publisher.send()
        before = 2 * number + written
        assert publisher.version == before
        source["w"][9] += 1
        assert publisher.send() == before + 1
        assert same(tw.load_delta(tmp_path), source)
    # Another one's version is not taken for its own.
    tw.publish({"w": source["w"] + 1}, tmp_path).send()
    with pytest.raises(ValueError, match="another one writes there"):
        publisher.send()


def test_a_subscriber_waits_for_a_directory(tmp_path: Path) -> None:
    source = {"w": np.arange(2000, dtype=np.float32)}
    target = {"w": np.zeros(2000, np.float32)}
    folder = tmp_path / "versions"
    thread = threading.Timer(0.2, lambda: tw.publish(source, folder).send())
    thread.start()
    assert tw.subscribe(target, folder, timeout=PATIENCE).update() == 0
    thread.join()
    assert same(source, target)
    # Nothing has changed, and it is a version.
    assert tw.publish(source, folder, chain_limit=1).send() == 1
    source["w"][7] = 1
    assert tw.publish(source, folder, chain_limit=1).send() == 2
    assert (folder / "weight_v000002.tw.safetensors").exists()


# Calls


def test_bad_calls(tmp_path: Path) -> None:
    (transport,) = connect(1)
    x = {"w": np.zeros(3, np.float32)}
    bad: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (TypeError, "source is a list", lambda: tw.publish([1], transport)),
        (TypeError, "source is a str", lambda: tw.publish("x", tmp_path)),
        (TypeError, "where is a int", lambda: tw.publish(x, 3)),  # type: ignore[arg-type]
        (ValueError, "codec is 'mx'", lambda: tw.publish(x, transport, codec="mx")),
        (ValueError, "codec is 'delta'", lambda: tw.publish(x, transport, codec="delta")),
        (ValueError, "form", lambda: tw.publish(x, transport, form="x")),
        (TypeError, "keep is 3", lambda: tw.publish(x, transport, keep=3)),  # type: ignore[arg-type]
        (ValueError, "bucket_nbytes", lambda: tw.publish(x, transport, bucket_nbytes=0)),
        (ValueError, "threads", lambda: tw.publish(x, transport, threads=0)),
        (ValueError, "version", lambda: tw.publish(x, transport).send(version=-1)),
        (TypeError, "target is a list", lambda: tw.subscribe([1], transport)),
        (ValueError, "hold is 'x'", lambda: tw.subscribe(x, transport, hold="x")),  # type: ignore[arg-type]
        (ValueError, "timeout is 3", lambda: tw.subscribe(x, transport, timeout=3)),
        (ValueError, "bucket_nbytes is 9", lambda: tw.publish(x, tmp_path, bucket_nbytes=9)),
        (ValueError, "chain_limit is 3", lambda: tw.publish(x, transport, chain_limit=3)),
        (ValueError, "chain_limit", lambda: tw.publish(x, tmp_path, chain_limit=0)),
        (ValueError, "hold is 'elements'", lambda: tw.subscribe(x, tmp_path, hold="elements")),
        (ValueError, "timeout is -1", lambda: tw.subscribe(x, tmp_path, timeout=-1)),
        (ValueError, "max_nbytes", lambda: tw.subscribe(x, transport, max_nbytes=-1)),
    ]
    for kind, text, call in bad:
        with pytest.raises(kind, match=text):
            call()
    assert tw.publish(x, transport).send() == 0


def test_a_read_only_target_is_refused() -> None:
    def task(transport: ThreadTransport) -> Any:
        x = np.full(3000, transport.rank, np.float32)
        with pytest.raises(tw.CollectiveError, match=r"target.'w'. is read-only"):
            if transport.rank == 0:
                tw.publish({"w": x}, transport).send()
            else:
                x.flags.writeable = False
                tw.subscribe({"w": x}, transport).update()

    assert ranks(2, task) == [None, None]


# Broadcast


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("nbytes", [0, 1, 64, 1000])
def test_broadcast_by_segments(size: int, nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transports, "_SEGMENT", 64)
    x = np.random.default_rng(0).integers(0, 256, nbytes, dtype=np.uint8)

    def task(transport: ThreadTransport) -> bytes:
        for root in (0, size - 1):
            found = x.copy() if transport.rank == root else np.full_like(x, 7)
            transport.broadcast(found, root)
        return found.tobytes()

    assert ranks(size, task) == [x.tobytes()] * size


def test_few_segments_go_down_a_tree() -> None:
    assert transports._ways(2, 1) == transports._ways(3, 4) == transports._ways(8, 100) == 1
    assert transports._ways(64, 1) == transports._ways(64, 10) == 2
    assert [transports._depth(place, 2) for place in range(8)] == [0, 1, 1, 2, 2, 2, 2, 3]
    assert [transports._depth(place, 1) for place in range(4)] == [0, 1, 2, 3]
