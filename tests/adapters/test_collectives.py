"""The collectives over threads: results, wire bytes, trace, disagreement, damage, lost ranks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tightwire as tw
from ranks import DESIGNS, DTYPES, Ranks, check_collectives, exact, same
from support import examples, make_bits
from tightwire.adapters.collectives import pipelined
from tightwire.adapters.collectives.calls import TraceRecord
from tightwire.adapters.collectives.communicator import Design
from tightwire.adapters.collectives.path_selection import Measured
from tightwire.adapters.transports.base import Transport
from tightwire.adapters.transports.threads import ThreadTransport, connect, run_ranks
from tightwire.arrays import Target
from tightwire.codecs.common.base import Plan
from tightwire.formats.dtypes import BY_NAME
from transports import check_transport

#: What a Communicator receives when it is made: lengths, then descriptions.
AGREEMENT = 2
DESCRIPTOR = 48


class Tap(Transport):
    """A transport that counts what it sends, and lets `damage` see what came."""

    def __init__(
        self, inner: Transport, damage: Callable[[int, str, Sequence[Any]], None] | None = None
    ) -> None:
        self.inner = inner
        self.damage = damage
        self.sent = 0
        self.calls: list[str] = []

    @property
    def rank(self) -> int:
        return self.inner.rank

    @property
    def world_size(self) -> int:
        return self.inner.world_size

    @property
    def timeout(self) -> float:
        return self.inner.timeout

    def empty(self, nbytes: int) -> Any:
        return self.inner.empty(nbytes)

    def _came(self, name: str, outs: Sequence[Any]) -> None:
        self.calls.append(name)
        if self.damage is not None:
            self.damage(self.rank, name, outs)

    def all_gather(self, out: Any, x: Any) -> None:
        self.inner.all_gather(out, x)
        self.sent += x.size * (self.world_size - 1)
        self._came("all_gather", [out])

    def all_to_all(self, out: Any, x: Any) -> None:
        self.inner.all_to_all(out, x)
        self.sent += x.size - x.size // self.world_size
        self._came("all_to_all", [out])

    def all_to_all_v(self, outs: Sequence[Sequence[Any]], xs: Sequence[Sequence[Any]]) -> None:
        self.inner.all_to_all_v(outs, xs)
        self.sent += sum(x.size for r, part in enumerate(xs) if r != self.rank for x in part)
        self._came("all_to_all_v", [out for part in outs for out in part])

    def send(self, x: Any, to: int) -> None:
        self.inner.send(x, to)
        self.sent += x.size
        self._came("send", [])

    def recv(self, out: Any, source: int) -> None:
        self.inner.recv(out, source)
        self._came("recv", [out])

    def all_reduce(self, x: Any, op: Any = "sum") -> None:
        self.inner.all_reduce(x, op)

    def barrier(self) -> None:
        self.inner.barrier()


def failures(
    world_size: int, task: Callable[[ThreadTransport], Any], timeout: float = 20.0
) -> list[Exception | None]:
    """What every rank raises, None where nothing; a rank that raises leaves the group."""

    def guarded(transport: ThreadTransport) -> Exception | None:
        try:
            task(transport)
        except Exception as error:
            transport.close()
            return error
        return None

    return run_ranks(world_size, guarded, timeout)


def failed(error: Exception | None) -> tw.CollectiveError:
    assert isinstance(error, tw.CollectiveError), error
    return error


def weights(n: int, seed: int = 0) -> Any:
    return make_bits("normal", BY_NAME["bfloat16"], n, seed).view(ml_dtypes.bfloat16)


@pytest.mark.parametrize("design", DESIGNS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("world_size", "library"), [(1, "numpy"), (2, "torch"), (3, "numpy")])
def test_results_are_those_without_compression(
    world_size: int, library: str, dtype: str, design: Design
) -> None:
    pytest.importorskip(library)
    run_ranks(world_size, lambda t: check_collectives(t, library, dtype, design))


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize("design", DESIGNS)
@pytest.mark.parametrize(
    ("world_size", "library", "dtype"),
    [(2, "torch", "bfloat16"), (2, "numpy", "bfloat16"), (3, "torch", "float32")],
)
def test_pieces_come_back_in_their_places(
    world_size: int, library: str, dtype: str, design: Design, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipelined, "_PIECE", 4096)

    def task(transport: ThreadTransport) -> list[TraceRecord]:
        return check_collectives(transport, library, dtype, design, 11, 1237, algorithm="pipelined")

    for trace in run_ranks(world_size, task):
        assert any("4 pieces" in record.algorithm for record in trace)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("world_size", "library"), [(1, "torch"), (2, "numpy"), (3, "torch")])
def test_native_calls_move_everything(world_size: int, library: str, dtype: str) -> None:
    def task(transport: ThreadTransport) -> list[TraceRecord]:
        return check_collectives(transport, library, dtype, "first", algorithm="native")

    for trace in run_ranks(world_size, task):
        assert all(r.algorithm == "native" for r in trace)
        # A descriptor goes ahead of all; what equal shares leave over has a checksum.
        ahead = DESCRIPTOR * (world_size - 1)
        for record in trace:
            more = record.wire_bytes - record.raw_bytes
            assert more in (0, DESCRIPTOR, ahead) or record.collective == "all_reduce"
            assert more <= 2 * ahead + 128 * (world_size - 1)


@pytest.mark.slow
@pytest.mark.parametrize("library", ["torch", "numpy"])
def test_the_switch_takes_a_path_and_says_why(library: str) -> None:
    def task(transport: ThreadTransport) -> list[TraceRecord]:
        check_collectives(transport, library, "bfloat16", "first", algorithm="auto")
        return check_collectives(transport, library, "int32", "first", algorithm="auto")

    for trace in run_ranks(2, task):
        assert all(r.algorithm == "native" for r in trace)
        reasons = ("zipccl gains nothing on int32", "as before", "under 1048576 bytes")
        assert all(r.reason in reasons for r in trace)


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("world_size", [4, 5, 6, 7, 8])
def test_any_number_of_ranks(world_size: int) -> None:
    dtype, design = DTYPES[world_size % len(DTYPES)], DESIGNS[world_size % 2]
    run_ranks(world_size, lambda t: check_collectives(t, "numpy", dtype, design, 1, 301))


@pytest.mark.long
@pytest.mark.parametrize("design", DESIGNS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("world_size", range(1, 9))
def test_all_of_it(world_size: int, library: str, dtype: str, design: Design) -> None:
    pytest.importorskip(library)
    run_ranks(world_size, lambda t: check_collectives(t, library, dtype, design))


@examples(25)
@given(st.data())
def test_any_splits(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 4), "ranks")
    numbers = st.integers(0, 6) | st.sampled_from([0, 700, 1501])
    splits = [[data.draw(numbers, f"{i} to {j}") for j in range(n)] for i in range(n)]
    design = data.draw(st.sampled_from(DESIGNS))
    tensors = Ranks(n, "numpy", data.draw(st.sampled_from(DTYPES)))

    def task(transport: ThreadTransport) -> None:
        comm, me = tw.Communicator(transport, sizes=design), transport.rank
        inward = [splits[i][me] for i in range(n)]
        x = tensors.array(me, (sum(splits[me]), 3))
        found = comm.all_to_all(x, send_splits=splits[me], receive_splits=inward)
        parts = []
        for i in range(n):
            start = sum(splits[i][:me])
            parts.append(tensors.host(i, (sum(splits[i]), 3))[start : start + splits[i][me]])
        exact(found, np.concatenate(parts))

    run_ranks(n, task)


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_inputs_in_any_layout_stay_as_they_are(library: str) -> None:
    pytest.importorskip(library)
    tensors = Ranks(2, library, "float32")

    def task(transport: ThreadTransport) -> None:
        comm, me = tw.Communicator(transport), transport.rank
        x = tensors.array(me, (60, 90))[::3, 10:50].T
        before = bytes(tw.encode(x, "raw"))
        host = [tensors.host(r, (60, 90))[::3, 10:50].T for r in range(2)]
        exact(comm.all_gather(x), np.concatenate(host))
        exact(comm.all_to_all(x), np.concatenate([h[me * 20 : me * 20 + 20] for h in host]))
        exact(comm.all_reduce(x), host[0] + host[1])
        exact(comm.reduce_scatter(x), (host[0] + host[1])[me * 20 : me * 20 + 20])
        assert bytes(tw.encode(x, "raw")) == before

    run_ranks(2, task)


def test_strided_vectors_of_odd_size() -> None:
    def task(transport: ThreadTransport) -> None:
        x = np.arange(2003, dtype=np.float32)[::-2]
        exact(tw.Communicator(transport).all_reduce(x), 3 * x)

    run_ranks(3, task)


def test_tensors_that_require_gradients_are_inputs_and_outputs() -> None:
    torch = pytest.importorskip("torch")

    def task(transport: ThreadTransport) -> None:
        comm = tw.Communicator(transport)
        x = torch.nn.Parameter(torch.full((7,), float(transport.rank)))
        with torch.no_grad():
            assert comm.broadcast(x, 1) is x
            assert x.tolist() == [1.0] * 7
            assert comm.all_reduce(x, x) is x
            assert x.tolist() == [2.0] * 7
            gathered = torch.nn.Parameter(torch.zeros(14))
            comm.all_gather(x, gathered)
            assert comm.reduce_scatter(gathered, x) is x
            assert x.tolist() == [4.0] * 7
            assert comm.all_to_all(gathered, gathered) is gathered

    run_ranks(2, task)


def test_negative_zeros_and_infinities_are_summed_as_floats() -> None:
    def task(transport: ThreadTransport) -> Any:
        value = np.inf if transport.rank else -np.inf
        return tw.Communicator(transport).all_reduce(np.array([-0.0, value, np.inf] * 2, "f4"))

    for result in run_ranks(2, task):
        assert np.signbit(result[0])
        assert np.isnan(result[1])
        assert result[2] == np.inf


@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint32", "uint64"])
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_integer_sums_wrap_around(library: str, dtype: str) -> None:
    pytest.importorskip(library)
    tensors = Ranks(3, library, dtype)

    def task(transport: ThreadTransport) -> None:
        comm = tw.Communicator(transport)
        exact(comm.all_reduce(tensors.array(transport.rank, (1001,))), tensors.sum((1001,)))

    run_ranks(3, task)


CALLS: dict[str, Callable[[tw.Communicator, Any], Any]] = {
    "all_gather": lambda comm, x: comm.all_gather(x),
    "all_to_all": lambda comm, x: comm.all_to_all(x),
    "reduce_scatter": lambda comm, x: comm.reduce_scatter(x),
    "all_reduce": lambda comm, x: comm.all_reduce(x),
    "broadcast": lambda comm, x: comm.broadcast(x, 1),
}


@pytest.mark.parametrize("design", DESIGNS)
@pytest.mark.parametrize("name", CALLS)
def test_weights_take_less_than_three_quarters_of_the_wire(name: str, design: Design) -> None:
    def task(transport: ThreadTransport) -> tuple[int, int]:
        tap = Tap(transport)
        comm = tw.Communicator(tap, sizes=design)
        tap.sent = 0
        CALLS[name](comm, weights(600_000, transport.rank))
        (record,) = comm.trace()
        assert record.wire_bytes == tap.sent
        return record.raw_bytes, record.wire_bytes

    sums = np.array(run_ranks(4, task)).sum(axis=0)
    # In tensors, what the same algorithms send of them uncompressed.
    passes = {"all_gather": 12, "all_reduce": 6, "broadcast": 3.75}.get(name, 3)
    assert sums[0] == pytest.approx(1_200_000 * passes)
    assert 0.6 < sums[1] / sums[0] < 0.74


def test_a_message_takes_less_than_three_quarters_of_the_wire() -> None:
    def task(transport: ThreadTransport) -> Any:
        comm = tw.Communicator(transport)
        if comm.rank == 0:
            comm.send(weights(200_000), 1)
        else:
            exact(comm.recv(np.empty(200_000, ml_dtypes.bfloat16), 0), weights(200_000))
        (record,) = comm.trace()
        assert record.raw_bytes == 400_000
        assert record.wire_bytes < 0.74 * 400_000

    run_ranks(2, task)


def test_static_parts_travel_in_one_equal_all_to_all() -> None:
    def task(transport: ThreadTransport) -> list[list[str]]:
        found = []
        for design in DESIGNS:
            tap = Tap(transport)
            comm = tw.Communicator(tap, sizes=design)
            for _ in range(2):
                tap.calls.clear()
                comm.all_to_all(weights(40_000))
            found.append(tap.calls)
        return found

    # On the host "between" compares calls before data move.
    for first, between in run_ranks(2, task):
        assert first == ["all_to_all", "all_to_all", "all_to_all_v"]
        assert between == ["all_to_all", "all_to_all", "all_to_all", "all_to_all_v"]


def test_one_encode_and_one_decode_without_staging(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is sent lies in the encoder's buffer, what comes in the decoder's."""
    wrapped: list[Any] = []
    wrap = tw.Buffer.wrap

    def watched(plan: Plan, array: Any, **options: Any) -> tw.Buffer:
        wrapped.append(array)
        return wrap(plan, array, **options)

    monkeypatch.setattr(tw.Buffer, "wrap", watched)

    def task(transport: ThreadTransport) -> None:
        moved: list[Any] = []
        tap = Tap(transport, lambda rank, name, outs: moved.extend(outs))
        comm = tw.Communicator(tap, sizes="between")
        moved.clear()
        comm.all_to_all(weights(40_000))
        _, static, _, *dynamic = moved
        own = [a for a in wrapped if np.shares_memory(a, static)]
        assert len(own) == 1
        assert all(np.shares_memory(a, own[0]) for a in dynamic)

    run_ranks(2, task)


def test_the_trace() -> None:
    def task(transport: ThreadTransport) -> list[Any]:
        comm = tw.Communicator(transport, trace=3)
        for x in (weights(5), weights(5000), np.arange(5000, dtype=np.int32)):
            comm.all_gather(x)
        comm.all_reduce(weights(5000))
        return comm.trace()

    for small, integers, reduced in [trace[-3:] for trace in run_ranks(2, task)]:
        assert [r.sequence for r in (small, integers, reduced)] == [1, 2, 3]
        assert (small.collective, reduced.collective) == ("all_gather", "all_reduce")
        assert small.algorithm == "all-gather, sizes first, zipccl"
        assert small.reason == "zipccl codes bfloat16"
        assert integers.algorithm.endswith("raw")
        assert integers.reason == "zipccl gains nothing on int32"
        assert list(small.seconds) == ["encode", "sizes", "static", "dynamic", "decode"]
        assert {"encode", "sizes", "dynamic", "decode"} < set(reduced.seconds)
        assert all(s >= 0 for s in small.seconds.values())
        assert small.raw_bytes == 10_000
        assert integers.wire_bytes - integers.raw_bytes < 200
        assert small.error is None


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("codec", ["zipccl", "raw"]),
        ("codec", [tw.codec("zipccl"), tw.codec("zipccl", window="sigma")]),
        ("sizes", ["first", "between"]),
        ("checksum", [True, False]),
        ("seed", [1, 2]),
    ],
)
def test_ranks_with_other_parameters_are_named_everywhere(option: str, values: list[Any]) -> None:
    def task(transport: ThreadTransport) -> None:
        tw.Communicator(transport, **{option: values[transport.rank in (1, 3)]})

    for rank, error in enumerate(failures(5, task)):
        found = failed(error)
        assert (found.rank, found.collective, found.stage) == (rank, "Communicator", "agree")
        assert "ranks [0, 2, 4]: " in str(error)
        assert "ranks [1, 3]: " in str(error)


def test_ranks_with_another_version_are_named_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(type(tw.codec("zipccl").spec)):  # type: ignore[misc]
        version = 2

    def task(transport: ThreadTransport) -> None:
        spec = Other() if transport.rank == 2 else tw.codec("zipccl").spec
        tw.Communicator(transport, tw.Codec(spec))

    for error in failures(3, task):
        assert "ranks [2]: format 1.0, codec zipccl version 2" in str(failed(error))


MISMATCHES: dict[str, Callable[[tw.Communicator, bool], Any]] = {
    "shape": lambda comm, odd: comm.all_gather(weights(6000).reshape((2, -1) if odd else (-1, 2))),
    "dtype": lambda comm, odd: comm.all_gather(np.zeros(9, np.int16 if odd else np.uint16)),
    "sizes": lambda comm, odd: comm.all_reduce(weights(9002 if odd else 9000)),
    "collective": lambda comm, odd: (comm.all_to_all if odd else comm.reduce_scatter)(weights(6)),
    "root": lambda comm, odd: comm.broadcast(weights(900), 1 if odd else 0),
    "splits": lambda comm, odd: comm.all_to_all(
        weights(6), send_splits=(2, 2, 2), receive_splits=(2, 2, 3) if odd else (2, 2, 2)
    ),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_mismatched_calls_raise(name: str) -> None:
    def task(transport: ThreadTransport) -> None:
        MISMATCHES[name](tw.Communicator(transport), transport.rank == 2)

    found = failures(3, task)
    assert failed(found[2]).rank == 2
    if name in ("shape", "dtype", "sizes", "collective"):
        for error in found[:2]:
            assert failed(error).stage == "sizes"
            assert "ranks [2] make another call, or one with another dtype or shape" in str(error)


def test_messages_of_another_shape_raise() -> None:
    def task(transport: ThreadTransport) -> None:
        comm = tw.Communicator(transport)
        if comm.rank == 0:
            comm.send(weights(5000), 1)
        else:
            comm.recv(weights(5001), 0)

    sender, receiver = failures(2, task)
    assert sender is None
    assert "rank 1: recv #0 failed in stage 'sizes': ranks [0]" in str(failed(receiver))


@pytest.mark.parametrize("design", DESIGNS)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("arrival", [0, 1, 2])
def test_a_damaged_byte_is_an_error_on_the_receiver(
    name: str, design: Design, arrival: int
) -> None:
    """The first bytes of descriptors are the digest; all else that comes is checked by decoding."""
    arrived: list[int] = []

    def damage(rank: int, _: str, outs: Sequence[Any]) -> None:
        for out in outs:
            if rank == 0 and out.size:
                if len(arrived) == arrival + AGREEMENT:
                    out[0] ^= 1
                arrived.append(out.size)

    def task(transport: ThreadTransport) -> None:
        comm = tw.Communicator(Tap(transport, damage), sizes=design)
        x = weights(90_000, transport.rank)
        wrong = None
        try:
            CALLS[name](comm, x.copy())
        except tw.CollectiveError as error:
            wrong = error
            assert comm.trace()[-1].error == str(error)
            if error.stage != "decode" or name == "all_reduce":
                raise
        # All bytes were exchanged: the next call works.
        exact(comm.all_gather(x)[:90_000], weights(90_000))
        if wrong is not None:
            raise wrong

    found = failures(2, task)
    # The descriptors, and what "between" compares before the first call of its kind.
    descriptors = arrived[arrival + AGREEMENT] == 2 * DESCRIPTOR
    error = failed(found[0])
    assert (error.rank, error.collective, error.sequence) == (0, name, 0)
    assert error.stage == ("sizes" if descriptors else "decode")
    if not descriptors:
        assert isinstance(error.__cause__, tw.FormatError)
        # Damage to the first half of an all-reduce keeps its second half from others.
        assert (found[1] is None) == (name != "all_reduce")


@pytest.mark.parametrize("design", DESIGNS)
def test_any_flipped_bit_of_a_card_raises(design: Design) -> None:
    x = weights(9000)
    for byte in range(DESCRIPTOR):

        def damage(rank: int, name: str, outs: Sequence[Any], byte: int = byte) -> None:
            # The descriptors are the only thing of this size; this one is of rank 1.
            if rank == 0 and name == "all_to_all" and outs[0].size == 2 * DESCRIPTOR:
                outs[0][DESCRIPTOR + byte] ^= 1 << byte % 8

        def task(transport: ThreadTransport, damage: Any = damage) -> None:
            tw.Communicator(Tap(transport, damage), sizes=design).all_to_all(x)

        assert failed(failures(2, task)[0]).stage in ("sizes", "payload", "dynamic", "decode")


def test_a_failed_communicator_refuses_to_go_on() -> None:
    def task(transport: ThreadTransport) -> Any:
        comm = tw.Communicator(transport)
        if comm.rank == 1:
            transport.close()
            return None
        with pytest.raises(tw.CollectiveError, match="rank 1 has left") as first:
            comm.all_gather(weights(100))
        assert isinstance(first.value.__cause__, OSError)
        with pytest.raises(tw.CollectiveError, match="an earlier call has failed: rank 0") as again:
            comm.all_gather(weights(100))
        assert again.value.sequence == 1
        return True

    assert run_ranks(2, task)[0]


def test_a_silent_rank_is_an_error_within_the_timeout() -> None:
    done = threading.Barrier(3)

    def task(transport: ThreadTransport) -> float:
        comm = tw.Communicator(transport)
        start = time.monotonic()
        if comm.rank != 1:
            with pytest.raises(tw.CollectiveError, match=r"#0 .*rank 1 sent nothing for 0.5 s"):
                comm.all_reduce(weights(100))
        took = time.monotonic() - start
        done.wait(10)
        return took

    assert max(run_ranks(3, task, timeout=0.5)) < 5


def bad_calls(comm: tw.Communicator) -> list[tuple[type[Exception], str, Callable[[], Any]]]:
    x = np.zeros((5, 4), np.float32)
    halves: Any = (2.5, 2.5)
    two, wrong = np.zeros((4, 4), np.float32), np.zeros((3, 4), np.float32)
    return [
        (ValueError, "x has 5 rows; allowed: a multiple of 2", lambda: comm.all_to_all(x)),
        (ValueError, "x has 5 rows", lambda: comm.reduce_scatter(x)),
        (ValueError, r"x has shape \(\); allowed", lambda: comm.all_to_all(np.float32(1))),
        (ValueError, "both or none", lambda: comm.all_to_all(x, send_splits=(2, 3))),
        (
            ValueError,
            "add up to 4; x has 5",
            lambda: comm.all_to_all(x, send_splits=(2, 2), receive_splits=(2, 3)),
        ),
        (
            ValueError,
            r"receive_splits is \[6, -1\]; allowed: 2 numbers",
            lambda: comm.all_to_all(x, send_splits=(2, 3), receive_splits=(6, -1)),
        ),
        (
            TypeError,
            "allowed: an integer",
            lambda: comm.all_to_all(x, send_splits=halves, receive_splits=(2, 3)),
        ),
        (ValueError, r"out is float32\[3, 4\]; needed", lambda: comm.all_gather(two, wrong)),
        (ValueError, "needed", lambda: comm.reduce_scatter(two, wrong)),
        (ValueError, "must be contiguous", lambda: comm.all_reduce(two, two.copy().T)),
        (TypeError, "x is bool; allowed: floats and integers", lambda: comm.all_reduce(x > 0)),
        (TypeError, "Expected an array, got list", lambda: comm.all_gather([1, 2])),
        (ValueError, "root is 2; allowed: 0 to 1", lambda: comm.broadcast(x, 2)),
        (ValueError, "to is 0; allowed: 0 to 1 but 0", lambda: comm.send(x, 0)),
        (ValueError, "source is -1", lambda: comm.recv(x, -1)),
    ]


def test_bad_calls_say_what_is_allowed() -> None:
    def task(transport: ThreadTransport) -> None:
        comm = tw.Communicator(transport)
        if comm.rank == 0:
            for kind, message, call in bad_calls(comm):
                with pytest.raises(kind, match=message):
                    call()
        # They were refused before anything was sent.
        comm.all_gather(weights(10))

    run_ranks(2, task)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"sizes": "last"}, ValueError),
        ({"codec": "zstd"}, ValueError),
        ({"codec": 3}, TypeError),
        ({"codec": tw.codec("sdp4bit", rotate="encode")}, ValueError),
        ({"codec": tw.codec("sdp4bit", rotate="decode")}, ValueError),
        ({"codec": "tahquant"}, ValueError),
        ({"codec": tw.codec("tahquant", direction="backward")}, ValueError),
        ({"trace": -1}, ValueError),
        ({"trace": None}, TypeError),
        ({"pieces": 0}, ValueError),
        ({"granularity": 0}, ValueError),
        ({"seed": -1}, ValueError),
        ({"seed": 1 << 64}, ValueError),
    ],
)
def test_bad_parameters(options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=r"allowed|known"):
        tw.Communicator(connect(1)[0], **options)


@pytest.mark.slow
def test_arrays_of_jax() -> None:
    jax = pytest.importorskip("jax")

    def task(transport: ThreadTransport) -> list[Any]:
        comm = tw.Communicator(transport)
        x = jax.numpy.arange(6000, dtype="bfloat16") * (transport.rank + 1)
        return [comm.all_gather(x), comm.all_to_all(x), comm.all_reduce(x), x]

    first, second = run_ranks(2, task)
    x, y = np.asarray(first[3]), np.asarray(second[3])
    assert all(isinstance(found, jax.Array) for found in first)
    exact(np.asarray(first[0]), np.concatenate([x, y]))
    exact(np.asarray(first[1]), np.concatenate([x[:3000], y[:3000]]))
    total = x.astype(np.float32) + y.astype(np.float32)
    exact(np.asarray(second[2]), total.astype(x.dtype))


@pytest.mark.parametrize("algorithm", ["compressed", "pipelined"])
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_sums_of_what_is_rounded_before_it_travels(library: str, algorithm: Any) -> None:
    pytest.importorskip(library)
    n, size = 3, 3 * 5000
    data = Ranks(n, library, "float32")
    with np.errstate(all="ignore"):
        rounded = [data.host(r, (size,)).astype(ml_dtypes.bfloat16) for r in range(n)]
        total = sum((x.astype(np.float32) for x in rounded), np.full(size, -0.0, np.float32))
        gathered = total.astype(ml_dtypes.bfloat16).astype(np.float32)

    def task(transport: ThreadTransport) -> None:
        comm = tw.Communicator(transport, algorithm=algorithm, pieces=4)
        x = data.array(transport.rank, (size,))
        share = comm.reduce_scatter(x, wire="bfloat16")
        same(share, total[transport.rank * 5000 :][:5000])
        same(comm.all_reduce(x, wire="bfloat16"), gathered)
        first = comm.trace()[0]
        # What travels is bfloat16; only some ranks' data shrink.
        assert first.raw_bytes == (n - 1) * 5000 * 2
        assert transport.rank or first.wire_bytes < 0.8 * first.raw_bytes
        for wire in ("float64", "int8"):
            with pytest.raises(ValueError, match="wire is"):
                comm.all_reduce(x, wire=wire)

    with np.errstate(all="ignore"):
        run_ranks(n, task)


@pytest.mark.parametrize("codec", ["zipccl", "mx"])
def test_evaluation_before_training(codec: str) -> None:
    """What is kept from a call in inference mode is used outside."""
    torch = pytest.importorskip("torch")

    def task(transport: ThreadTransport) -> None:
        comm = tw.Communicator(transport, codec)
        x = torch.full((5000,), float(transport.rank + 1))
        with torch.inference_mode():
            first = comm.all_reduce(x)
            comm.all_gather(x)
        assert torch.equal(comm.all_reduce(x), first)
        assert first.unique().tolist() == [3.0]
        comm.all_gather(x)

    run_ranks(2, task)


def test_a_slow_rank_is_told_to_everybody() -> None:
    def task(transport: ThreadTransport) -> list[tuple[int, float]]:
        comm = tw.Communicator(transport)
        for _ in range(4):
            if transport.rank == 1:
                time.sleep(0.1)
            comm.all_gather(weights(5000))
        return comm.slow_ranks()

    first, *others = run_ranks(3, task)
    assert others == [first, first]
    assert first[0][0] == 1
    # Four times .1 s, of which the others spend some on their own.
    assert first[0][1] > 0.1


@pytest.mark.parametrize("name", ["all_gather", "all_to_all", "reduce_scatter"])
def test_a_damaged_piece_is_an_error_on_the_receiver(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipelined, "_PIECE", 4096)
    done: list[str] = []

    def damage(rank: int, what: str, outs: Sequence[Any]) -> None:
        if rank == 0 and outs[0].size > 4096 and not done:
            done.append(what)
            outs[-1][-200] ^= 1

    def task(transport: ThreadTransport) -> None:
        comm = tw.Communicator(Tap(transport, damage), algorithm="pipelined", pieces=4)
        getattr(comm, name)(weights(2 * 20_000, transport.rank))
        getattr(comm, name)(weights(2 * 20_000, transport.rank))

    error = failed(failures(2, task)[0])
    assert done
    assert (error.stage, error.collective, error.sequence) == ("decode", name, 0)
    assert "checksum_mismatch" in str(error)


def slow_network(transport: ThreadTransport, **options: Any) -> tw.Communicator:
    """A switch that has measured what makes it compress from about a kilobyte on."""
    comm = tw.Communicator(transport, algorithm="auto", **options)
    measured = Measured((1 << 10, 1 << 20), [[1e-4, 1e-4, 1e-1], [1e-1, 7.1e-2, 1e-1]], 4, 0.7)
    comm._measure = lambda *_: measured  # type: ignore[method-assign]
    return comm


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_switch_compresses_and_changes_its_mind(world_size: int) -> None:
    def task(transport: ThreadTransport) -> list[str]:
        comm = slow_network(transport)
        n, me = comm.world_size, comm.rank
        random = make_bits("random", BY_NAME["bfloat16"], 40_000, me).view(ml_dtypes.bfloat16)
        for x in (weights(40_000, me), random):
            for _ in range(14):
                exact(comm.all_gather(x)[me * 40_000 :][:40_000], x)
                # Two ranks alone, sizes of one rank, and a bad call: no other may notice.
                if me < 2:
                    comm.send(x, 1) if me == 0 else comm.recv(x.copy(), 0)
                rows = [40_000 if r == 0 else n for r in range(n)]
                splits = [[rows[r] - n + 1] + [1] * (n - 1) for r in range(n)]
                comm.all_to_all(
                    x[: rows[me]],
                    send_splits=splits[me],
                    receive_splits=[splits[r][me] for r in range(n)],
                )
                if me == 0:
                    with pytest.raises(ValueError, match="out"):
                        comm.all_gather(x, np.empty(3, x.dtype))
        return [r.algorithm.split(",")[0] for r in comm.trace() if r.collective == "all_gather"]

    first, *others = run_ranks(world_size, task)
    assert others == [first] * (world_size - 1)
    assert first[:14] == ["all-gather"] * 14
    assert "native" in first[14:]
    assert first[-1] == "native"


@pytest.mark.parametrize("algorithm", ["native", "auto", "pipelined", "compressed"])
@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", ["int16", "uint64", "float8_e5m2", "complex64", "bool"])
def test_calls_of_any_dtype_again_and_again(library: str, dtype: str, algorithm: Any) -> None:
    pytest.importorskip(library)
    data = Ranks(2, library, dtype)

    def task(transport: ThreadTransport) -> None:
        comm = tw.Communicator(transport, algorithm=algorithm, pieces=4)
        for shape in ((6, 700), (2,), (0, 3)):
            hosts = [data.host(r, shape) for r in range(2)]
            for _ in range(3):
                exact(comm.all_gather(data.array(comm.rank, shape)), np.concatenate(hosts))
                half = slice(comm.rank * shape[0] // 2, (comm.rank + 1) * shape[0] // 2)
                wanted = np.concatenate([host[half] for host in hosts])
                exact(comm.all_to_all(data.array(comm.rank, shape)), wanted)

    run_ranks(2, task)


@pytest.mark.parametrize("algorithm", ["native", "pipelined", "compressed"])
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_results_over_their_input(
    library: str, algorithm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(library)
    monkeypatch.setattr(pipelined, "_PIECE", 4096)
    size = 20_000
    data = Ranks(2, library, "float32")

    def task(transport: ThreadTransport) -> None:
        comm = tw.Communicator(transport, algorithm=algorithm, pieces=4)
        me = comm.rank
        hosts = [data.host(r, (size,)) for r in range(2)]
        for shift in (0, 100, size // 2):
            room = data.poison((4 * size,))
            x, out = room[shift : shift + size], room[: 2 * size]
            x[:] = data.array(me, (size,))
            exact(comm.all_gather(x, out), np.concatenate(hosts))
            x, out = room[shift : shift + size], room[:size]
            x[:] = data.array(me, (size,))
            half = slice(me * size // 2, (me + 1) * size // 2)
            exact(comm.all_to_all(x, out), np.concatenate([h[half] for h in hosts]))
            x[:] = data.array(me, (size,))
            same(comm.reduce_scatter(x, out[: size // 2]), data.sum((size,))[half])
            x[:] = data.array(me, (size,))
            same(comm.all_reduce(x, out), data.sum((size,)))

    run_ranks(2, task)


def test_strided_vectors_of_one_element() -> None:
    torch = pytest.importorskip("torch")

    def task(transport: ThreadTransport) -> None:
        for algorithm in ("native", "compressed"):
            comm = tw.Communicator(transport, algorithm=algorithm, pieces=4)
            for n in (2, 6):
                x = torch.arange(float(n))[::2]
                exact(comm.all_reduce(x), 2 * x.numpy())
                exact(comm.all_gather(x), np.concatenate([x.numpy()] * 2))

    run_ranks(2, task)


@pytest.mark.slow
def test_a_lost_rank_while_paths_are_timed() -> None:
    def task(transport: ThreadTransport) -> None:
        comm = tw.Communicator(transport, algorithm="auto", trace=0)
        if transport.rank == 1:
            return
        with pytest.raises(tw.CollectiveError) as caught:
            comm.all_gather(weights(5000))
        assert caught.value.stage == "measure"
        with pytest.raises(tw.CollectiveError, match="an earlier call has failed"):
            comm.all_gather(weights(5000))

    start = time.monotonic()
    run_ranks(2, task, timeout=1.0)
    assert time.monotonic() - start < 10


@pytest.mark.parametrize("name", ["shape", "dtype", "size"])
@pytest.mark.parametrize(
    ("algorithm", "design"),
    [("native", "first"), ("compressed", "between"), ("pipelined", "first")],
)
def test_first_calls_are_compared_before_data_move(name: str, algorithm: Any, design: Any) -> None:
    first = weights(4000).reshape(40, 100)
    other = {"shape": first.reshape(100, 40), "dtype": first.view(np.int16), "size": first[:20]}

    def task(transport: ThreadTransport) -> None:
        comm = tw.Communicator(transport, algorithm=algorithm, sizes=design)
        comm.all_gather(first if transport.rank else other[name])

    for error in failures(2, task):
        assert failed(error).stage == "sizes"
        assert "make another call" in str(error)


def test_the_package_offers_them_on_demand() -> None:
    assert tw.Communicator.__module__ == "tightwire.adapters.collectives.communicator"
    assert {"Communicator", "CollectiveError"} < set(tw.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Transport'"):
        tw.Transport  # noqa: B018


def test_work_memory_is_kept() -> None:
    comm = tw.Communicator(connect(1)[0])
    comm.all_to_all(weights(50_000))
    before = {name: room.ctypes.data for name, room in comm.session.memory._memories.items()}
    comm.all_to_all(weights(40_000))
    assert {
        name: room.ctypes.data for name, room in comm.session.memory._memories.items()
    } == before


@pytest.mark.parametrize(("world_size", "library"), [(1, "numpy"), (2, "torch"), (5, "numpy")])
def test_every_method_of_the_transport_between_threads(world_size: int, library: str) -> None:
    pytest.importorskip(library)
    run_ranks(world_size, lambda t: check_transport(t, Target(library)))


def test_a_network_without_a_sum_says_so() -> None:
    with pytest.raises(NotImplementedError, match="Tap has no reduce_scatter"):
        Tap(connect(1)[0]).reduce_scatter(np.empty(1), np.empty(1))


def test_the_transport_between_threads() -> None:
    def task(transport: ThreadTransport) -> None:
        me = transport.rank
        for op, wanted in (("sum", 6), ("max", 3), ("or", 3)):
            x = np.array([[me], [-me]], np.int64)
            transport.all_reduce(x, op)  # type: ignore[arg-type]
            assert x[0, 0] == wanted
        transport.barrier()
        if me == 0:
            transport.send(np.arange(9, dtype=np.uint8), 1)
        elif me == 1:
            with pytest.raises(RuntimeError, match="rank 0 sent 9 bytes of send; expected: 8"):
                transport.recv(np.empty(8, np.uint8), 0)
        transport.barrier()

    run_ranks(4, task)
    with pytest.raises(ValueError, match="allowed: at least 1"):
        connect(0)
