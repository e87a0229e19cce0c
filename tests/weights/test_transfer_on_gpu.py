"""Weight transfer of tensors on a GPU, or without one under the Triton interpreter."""

from __future__ import annotations

import threading
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import tightwire as tw  # noqa: E402
from tightwire import arrays, gpu_memory, gpu_together  # noqa: E402
from tightwire.adapters.errors import CollectiveError  # noqa: E402
from tightwire.adapters.transports.threads import ThreadTransport, run_ranks  # noqa: E402
from tightwire.adapters.weights import aside, publishing, rounds  # noqa: E402
from tightwire.codecs.common.launch_triton import Variant  # noqa: E402

PATIENCE = 300.0


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where tensors and kernels are. The interpreter's memory stands for a GPU's."""
    if request.param == "cuda":
        return "cuda"
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled for the GPU here")
    monkeypatch.setattr(arrays, "on_gpu", lambda x: isinstance(x, torch.Tensor))
    # The interpreter runs one kernel at a time.
    launch, lock = Variant.launch, threading.Lock()

    def alone(*args: Any, **options: Any) -> None:
        with lock:
            launch(*args, **options)

    monkeypatch.setattr(Variant, "launch", alone)
    return "cpu"


def weights(place: str, seed: int, count: int = 3) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    found = {f"w{i}": torch.randn(40, 50 + i, generator=generator) for i in range(count)}
    found = {name: x.bfloat16() for name, x in found.items()}
    found |= {
        "v": torch.randn(3001, generator=generator),
        "double": torch.randn(500, generator=generator).double(),
        "tiny": torch.randn(3, generator=generator),
        "scale": torch.tensor(0.5 + seed),
        "none": torch.empty(0, 4).half(),
        "steps": torch.arange(seed, 4000 + seed, dtype=torch.int32),
    }
    found = {name: x.to(place) for name, x in found.items()}
    return found | {"tied": found["w0"]}


def changed(weights: dict[str, Any]) -> None:
    """A step of training, in place."""
    for name, x in weights.items():
        if name != "tied" and x.numel():
            x.view(-1)[::97] += 1


def scattered(x: Any) -> None:
    """Other bits everywhere: no difference is shorter than half of them."""
    bits = x.view(torch.uint8).view(-1)
    bits.copy_(torch.arange(1, bits.numel() + 1).mul(40503).bitwise_right_shift(7).to(bits))


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    assert a.keys() == b.keys()
    return all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("bucket_nbytes", [None, 9000])
@pytest.mark.slow
def test_versions_come_bit_for_bit(place: str, bucket_nbytes: int | None) -> None:
    def task(transport: ThreadTransport) -> list[dict[str, Any]]:
        mine = weights(place, transport.rank)
        if transport.rank == 0:
            publisher = tw.publish(mine, transport, bucket_nbytes=bucket_nbytes)
            seen = []
            for _ in range(3):
                publisher.send()
                seen.append({name: x.clone() for name, x in mine.items()})
                if len(seen) == 1:
                    changed(mine)
            return seen
        subscriber, seen = tw.subscribe(mine, transport), []
        held = dict(mine)
        for number in range(3):
            before = {name: x.clone() for name, x in mine.items()}
            update = subscriber.receive()
            assert same(mine, before)
            assert bool(update.names) == (number < 2)
            update.write()
            seen.append({name: x.clone() for name, x in mine.items()})
        assert all(mine[name] is held[name] for name in mine)
        assert mine["tied"] is mine["w0"]
        return seen

    sent, came = run_ranks(2, task, timeout=PATIENCE)
    assert all(same(a, b) for a, b in zip(sent, came, strict=True))
    assert not same(sent[0], sent[1])


@pytest.mark.slow
def test_what_has_changed_too_much_goes_whole(place: str) -> None:
    names = "w1", "v", "double", "steps"

    def task(transport: ThreadTransport) -> dict[str, Any]:
        mine = {name: x for name, x in weights(place, 3).items() if name in (*names, "w2")}
        if transport.rank == 0:
            publisher = tw.publish(mine, transport)
            publisher.send()
            for name in names:
                scattered(mine[name])
            mine["w2"].view(-1)[5] += 1
            publisher.send()
        else:
            subscriber = tw.subscribe(mine, transport)
            subscriber.update()
            subscriber.update()
        return mine

    sent, came = run_ranks(2, task, timeout=PATIENCE)
    assert all(
        torch.equal(sent[name].view(torch.uint8), came[name].view(torch.uint8)) for name in sent
    )


def test_damage_is_named_and_changes_nothing(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    receive = rounds.Group.receive

    def damaged(self: Any, bucket: Any, root: int) -> Any:
        message = receive(self, bucket, root)
        assert message is not None
        names = [tensor.names[0] for tensor in bucket]
        if "w1" in names:
            at = sum(-(-size // 128) * 128 for size in message.sizes[: names.index("w1")])
            message.data[at + message.sizes[names.index("w1")] // 2] ^= 4
        return message

    monkeypatch.setattr(rounds.Group, "receive", damaged)

    def task(transport: ThreadTransport) -> str:
        mine = weights(place, transport.rank)
        before = {name: x.clone() for name, x in mine.items()}
        with pytest.raises(CollectiveError) as found:
            if transport.rank == 0:
                tw.publish(mine, transport).send()
            else:
                tw.subscribe(mine, transport).receive()
        assert same(mine, before)
        return str(found.value)

    for text in run_ranks(2, task, timeout=PATIENCE):
        assert "tensor 'w1': payload of chunk 0" in text


def test_what_was_begun_is_waited_for_when_a_worker_refuses(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The publisher's tensors are read until then; the next round goes on."""
    made: list[str] = []
    for name in ("begin", "finish"):
        call = getattr(publishing.Encoder, name)

        def noted(*args: Any, name: str = name, call: Any = call) -> Any:
            made.append(name)
            return call(*args)

        monkeypatch.setattr(publishing.Encoder, name, noted)
    end = aside.Aside.end

    def ended(self: Any) -> None:
        if threading.current_thread() is publisher_thread[0]:
            made.append("end")
        end(self)

    publisher_thread: list[Any] = []
    monkeypatch.setattr(aside.Aside, "end", ended)

    def task(transport: ThreadTransport) -> list[str]:
        mine = weights(place, 5)
        if transport.rank == 0:
            publisher_thread.append(threading.current_thread())
            publisher = tw.publish(mine, transport, bucket_nbytes=9000)
            with pytest.raises(CollectiveError, match="announce"):
                publisher.send()
            seen = list(made)
            publisher.send()
            return seen
        model = torch.nn.Module()
        model.register_buffer("other", mine["w1"].clone())
        with pytest.raises(CollectiveError):
            tw.subscribe(model, transport).receive()
        blank = {name: torch.zeros_like(x) for name, x in mine.items()}
        tw.subscribe(blank, transport).update()
        assert same(blank, mine)
        return []

    found, _ = run_ranks(2, task, timeout=PATIENCE)
    assert found == ["begin", "begin", "finish", "end"]


@pytest.mark.slow
def test_waits_do_not_grow_with_the_number_of_tensors(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a round in which all tensors that differ go in a message."""
    found: dict[int, int] = {}
    for module, name in (
        (gpu_together, "_download"),
        (gpu_memory, "_download"),
        (gpu_memory, "_settle"),
    ):
        original = getattr(module, name)

        def counted(data: Any, original: Any = original) -> Any:
            me = threading.get_ident()
            found[me] = found.get(me, 0) + 1
            return original(data)

        monkeypatch.setattr(module, name, counted)
    monkeypatch.setattr("tightwire.gpu._settle", gpu_memory._settle)

    def waits(count: int) -> list[int]:
        def task(transport: ThreadTransport) -> int:
            me = threading.get_ident()
            mine = weights(place, 0, count)
            # The host codes it.
            del mine["double"]
            side: Any = (tw.subscribe if transport.rank else tw.publish)(mine, transport)
            go = side.update if transport.rank else side.send
            go()
            if not transport.rank:
                changed(mine)
            found[me] = 0
            go()
            return found[me]

        return run_ranks(2, task, timeout=PATIENCE)

    few = waits(2)
    assert waits(7) == few
    # Digests; sizes of deltas, records; heads, digests, verdicts when they are written.
    assert max(few) <= 6
