"""One byte of every message between ranks flipped in turn: no rank goes on with a wrong result."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import tightwire as tw
from tightwire.adapters.collectives import digests, tensors
from tightwire.adapters.transports.threads import ThreadTransport, run_ranks

WORLD_SIZE = 3
#: The rank that gets the damaged message.
VICTIM = 1


class Flipping(ThreadTransport):
    """Flips a bit of the array number `at`, from 0, that other ranks have sent to this one."""

    def __init__(self, inner: ThreadTransport, at: int | None) -> None:
        super().__init__(inner.rank, inner._pipes, inner.timeout)
        self.at = at
        #: Bytes of the arrays that other ranks have sent.
        self.sizes: list[int] = []

    def _take(self, kind: str, source: int, out: Any) -> None:
        super()._take(kind, source, out)
        if source == self.rank or not out.shape[0]:
            return
        if len(self.sizes) == self.at:
            out[self.at * 131 % out.shape[0]] ^= 1 << self.at % 8
        self.sizes.append(out.shape[0])


def data(rank: int, n: int, dtype: str) -> Any:
    values = np.random.default_rng(rank).standard_normal(n) * 30
    return values.astype(tw.codec("raw").plan((1,), dtype).dtype.numpy)


def message(comm: tw.Communicator, x: Any) -> Any:
    """From the rank before the victim to the victim."""
    if comm.rank == VICTIM - 1:
        comm.send(x, VICTIM)
    return comm.recv(np.zeros_like(x), VICTIM - 1) if comm.rank == VICTIM else x


def unequal(comm: tw.Communicator, x: Any) -> Any:
    splits = [2 * 1000 - 100 * r for r in range(WORLD_SIZE)]
    here = [splits[comm.rank]] * WORLD_SIZE
    return comm.all_to_all(x[: sum(splits)], send_splits=splits, receive_splits=here)


Call = Callable[[tw.Communicator, Any], Any]
MOVES: list[Call] = [
    lambda comm, x: comm.all_gather(x),
    lambda comm, x: comm.all_to_all(x),
    unequal,
    lambda comm, x: comm.broadcast(x.copy(), 0),
    message,
]
SUMS: list[Call] = [
    lambda comm, x: comm.reduce_scatter(x),
    # Shares are not equal, and what is left over is added up too.
    lambda comm, x: comm.all_reduce(x[:-1]),
    lambda comm, x: comm.all_reduce(x),
]
Found = tuple[list[bytes], tw.CollectiveError | None, list[int]]


def run(
    calls: list[Call], codec: Any, dtype: str, at: int | None, options: dict[str, Any]
) -> list[Found]:
    """Of every rank the results of `calls`, the error that ended them, and bytes of messages."""

    def task(inner: ThreadTransport) -> Found:
        transport = Flipping(inner, at if inner.rank == VICTIM else None)
        results: list[bytes] = []
        try:
            comm = tw.Communicator(transport, codec, **options)
            for call in calls:
                out = call(comm, data(comm.rank, 3 * 2000, dtype))
                comm.check()
                results.append(out.tobytes())
        except tw.CollectiveError as error:
            transport.close()
            return results, error, transport.sizes
        return results, None, transport.sizes

    # The first call may compile.
    return run_ranks(WORLD_SIZE, task, timeout=120)


def check_every_message(
    calls: list[Call], codec: Any, dtype: str, options: dict[str, Any]
) -> list[tuple[int, list[tw.CollectiveError | None]]]:
    """Of every message its bytes, and with it damaged the errors of all ranks.

    Whatever results ranks have are the right ones.
    """
    right = run(calls, codec, dtype, None, options)
    assert [error for _, error, _ in right] == [None] * WORLD_SIZE
    sizes = right[VICTIM][2]
    assert len(sizes) > len(calls)
    found = []
    for at, size in enumerate(sizes):
        ranks = run(calls, codec, dtype, at, options)
        for (wanted, _, _), (results, error, _) in zip(right, ranks, strict=True):
            assert results == wanted[: len(results)], at
            assert error is not None or len(results) == len(wanted)
        found.append((size, [error for _, error, _ in ranks]))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("codec", "dtype", "options"),
    [
        ("zipccl", "bfloat16", {}),
        ("zipccl", "float32", {"sizes": "between"}),
        (tw.codec("mx", scale_rule="agreed"), "float32", {}),
        (tw.codec("mx", scale_rule="agreed"), "float32", {"topology": "ring"}),
    ],
)
def test_compressed_calls(codec: Any, dtype: str, options: dict[str, Any]) -> None:
    calls = MOVES + SUMS
    if options:
        # What these change.
        calls = SUMS[:2] if "topology" in options else [*MOVES[:2], SUMS[1]]
    options = options | {"checksum": True, "verify": True}
    for at, (_, errors) in enumerate(check_every_message(calls, codec, dtype, options)):
        # Whose text alone is damaged serves its purpose; its results are right.
        assert errors[VICTIM] is not None or errors == [None] * WORLD_SIZE, at


@pytest.mark.slow
@pytest.mark.parametrize(
    ("codec", "dtype", "options"),
    [
        ("zipccl", "float32", {"algorithm": "native"}),
        ("zipccl", "int32", {"algorithm": "native"}),
        ("thc", "float32", {"topology": "in-network"}),
        ("omnireduce", "float32", {"topology": "in-network"}),
    ],
)
def test_digests_of_calls_without_checksums(
    codec: str, dtype: str, options: dict[str, Any]
) -> None:
    calls = SUMS[::2] if "topology" in options else MOVES + SUMS
    found = check_every_message(calls, codec, dtype, options | {"verify": "digest"})
    told = 0
    for at, (size, errors) in enumerate(found):
        error = errors[VICTIM]
        assert error is not None or errors == [None] * WORLD_SIZE, at
        if size > 500 and error is not None:
            # All ranks learn of it, but for messages, which concern two.
            learn = [e for e in errors if e is not None and e.stage == "digest"]
            assert len(learn) == (1 if error.collective == "recv" else WORLD_SIZE), at
            told += 1
    assert told >= len(calls)


def test_native_damage_is_not_seen_without_digests() -> None:
    """What `verify="digest"` is for."""
    call: list[Call] = [lambda comm, x: comm.all_gather(x)]
    options = {"algorithm": "native", "verify": True}
    right = run(call, "zipccl", "float32", None, options)
    damaged = run(call, "zipccl", "float32", len(right[VICTIM][2]) - 1, options)
    assert damaged[VICTIM][1] is None
    assert damaged[VICTIM][0] != right[VICTIM][0]


@pytest.mark.parametrize("late", [False, True])
def test_digests_that_come_late(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Late(tensors.PendingHostCopy):
        def done(self) -> bool:
            return False

    if late:
        monkeypatch.setattr(tensors, "PendingHostCopy", Late)
    run_ranks(2, partial(_exchange_with_damage, late=late))


def _exchange_with_damage(inner: ThreadTransport, late: bool) -> None:
    transport = Flipping(inner, None)
    comm = tw.Communicator(transport, algorithm="native", verify="digest")
    x = data(comm.rank, 1000, "float32")
    comm.all_gather(x)
    # A descriptor, and then the bytes.
    transport.at = len(transport.sizes) + 1 if comm.rank == VICTIM else None
    with pytest.raises(tw.CollectiveError, match=r"ranks \[1\] got other bytes") as caught:
        comm.all_gather(x)
        assert late
        comm.check()
    assert (caught.value.stage, caught.value.sequence) == ("digest", 1)
    with pytest.raises(tw.CollectiveError, match="an earlier call has failed"):
        comm.all_gather(x)


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", ["int8", "bfloat16", "float32", "float64", "complex128", "bool"])
def test_digests_are_one_algorithm(
    library: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(library)
    kind = tw.codec("raw").plan((1,), dtype).dtype
    bits = np.random.default_rng(0).integers(0, 2 if dtype == "bool" else 256, 6000, np.uint8)
    host = bits[: 300 * kind.itemsize].view(kind.numpy)
    x: Any = host
    if library == "torch":
        torch = pytest.importorskip("torch")
        x = torch.from_numpy(host.view(np.uint8)).view(getattr(torch, dtype))
    parts = (0, 100, 1, 199)
    wanted = _by_hand(host, parts)
    assert digests.content_digests(x, parts).tolist() == wanted
    assert digests.content_digests(x, (100,) * 3).tolist() == _by_hand(host, (100,) * 3)
    assert digests.content_digest(x).tolist() == _by_hand(host, (300,))
    monkeypatch.setattr(digests, "_PIECE_HOST", 7)
    assert digests.content_digests(x, parts).tolist() == wanted


def _by_hand(host: Any, counts: tuple[int, ...]) -> list[int]:
    """The sum of the module's page in Python's own integers."""
    size = min(host.dtype.itemsize, 8)
    found, at = [], 0
    for count in counts:
        words = host[at : at + count].view(f"i{size}").tolist()
        at += count
        total = 0
        for place, word in enumerate(words, 1):
            mixed = _signed(place * 0x1E3779B97F4A7C15)
            total += word * (_signed((mixed ^ mixed >> 32) * 0x3F58476D1CE4E5B9) | 1)
        found.append(_signed(total))
    return found


def _signed(number: int) -> int:
    number %= 2**64
    return number - (number >> 63 << 64)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"verify": "always"}, "verify is 'always'; allowed: False, True, 'digest'"),
        ({"verify": "digest", "checksum": False}, "allowed with it: checksum=True"),
    ],
)
def test_bad_verify(options: dict[str, Any], message: str) -> None:
    def task(transport: ThreadTransport) -> None:
        with pytest.raises(ValueError, match=message):
            tw.Communicator(transport, **options)

    run_ranks(1, task)


def test_ranks_agree_on_digests() -> None:
    def task(transport: ThreadTransport) -> None:
        with pytest.raises(tw.CollectiveError, match="digests False"):
            tw.Communicator(transport, verify="digest" if transport.rank else True)

    run_ranks(2, task)
