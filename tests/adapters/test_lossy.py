"""Lossy codecs through the collectives: results bit for bit, steps on the wire, keys, damage."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tightwire as tw
from lossy import CODECS, DTYPES, check_lossy, inputs
from processes import join, launch
from ranks import exact
from support import examples
from tightwire.adapters.collectives import chunk_views as shares
from tightwire.adapters.collectives import pipelined, tensors
from tightwire.adapters.collectives.path_selection import Measured
from tightwire.adapters.transports.threads import ThreadTransport, run_ranks

#: Homomorphic ones are made for sums of their sketches, by hooks and not by a Communicator.
#: Every lossy codec that does not add up, as it comes.
PARAMS: dict[str, dict[str, Any]] = {"tahquant": {"hidden": 640}}
ALL = [tw.codec(name, **PARAMS.get(name, {})) for name in tw.list_codecs()]
LOSSY = [codec for codec in ALL if not codec.lossless and not codec.homomorphic]


def test_every_lossy_codec_is_tested() -> None:
    assert {codec.name for codec in LOSSY} == {codec.name for codec in CODECS}


@examples(20)
@given(
    world_size=st.integers(1, 4),
    codec=st.sampled_from(CODECS),
    dtype=st.sampled_from(DTYPES),
    each=st.integers(0, 9) | st.integers(200, 900),
    odd=st.integers(0, 3),
)
def test_results_are_what_decoding_gives(
    world_size: int, codec: tw.Codec, dtype: str, each: int, odd: int
) -> None:
    run_ranks(world_size, lambda t: check_lossy(t, codec, dtype, "numpy", each, odd))


@pytest.mark.slow
@pytest.mark.parametrize("codec", CODECS, ids=lambda c: str(c.spec))
def test_results_in_pieces(codec: tw.Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipelined, "_PIECE", 512)
    run_ranks(2, lambda t: check_lossy(t, codec, "float32", "numpy", 1237, 1, piece=512))


@pytest.mark.slow
@pytest.mark.parametrize("codec", CODECS, ids=lambda c: str(c.spec))
def test_results_of_tensors(codec: tw.Codec) -> None:
    pytest.importorskip("torch")
    run_ranks(3, lambda t: check_lossy(t, codec, "bfloat16", "torch", 577, 2))


class Steps(ThreadTransport):
    """Notes its calls and bytes to others; `damage` sees what came."""

    def __init__(self, inner: ThreadTransport, damage: Callable[[Any], None] | None = None) -> None:
        super().__init__(inner.rank, inner._pipes, inner.timeout)
        self.calls: list[str] = []
        self.sent = 0
        self.damage = damage

    def _exchange(
        self, kind: str, outs: Sequence[Sequence[Any]], xs: Sequence[Sequence[Any]]
    ) -> None:
        super()._exchange(kind, outs, xs)
        self.calls.append(kind)
        self.sent += sum(x.size for r, part in enumerate(xs) if r != self.rank for x in part)
        if self.damage is not None:
            self.damage(outs)


#: Calls, and what they exchange once ranks are known to make the same one.
CALLS: dict[str, tuple[Callable[[tw.Communicator, Any], Any], list[str]]] = {
    "all_gather": (lambda comm, x: comm.all_gather(x), ["all_gather"] * 2),
    "all_to_all": (lambda comm, x: comm.all_to_all(x), ["all_to_all_v"]),
    "reduce_scatter": (lambda comm, x: comm.reduce_scatter(x), ["all_to_all_v"]),
    "all_reduce": (lambda comm, x: comm.all_reduce(x), ["all_to_all_v", *["all_gather"] * 2]),
    "broadcast": (lambda comm, x: comm.broadcast(x), ["all_to_all_v", "all_gather"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("codec", LOSSY, ids=lambda c: str(c.name))
def test_one_step_on_the_wire_and_few_bytes(codec: tw.Codec) -> None:
    def task(transport: ThreadTransport) -> None:
        steps = Steps(transport)
        comm = tw.Communicator(steps, codec)
        x = np.random.default_rng(comm.rank).standard_normal(30_000, np.float32)
        for call, kinds in CALLS.values():
            call(comm, x.copy())
            steps.calls.clear()
            steps.sent = 0
            call(comm, x.copy())
            # On the host each call is compared with the other ranks' first.
            assert steps.calls[0] in ("all_gather", "all_to_all")
            assert steps.calls[1:] == kinds
            record = comm.trace()[-1]
            assert record.wire_bytes == steps.sent < 0.29 * record.raw_bytes
            assert "no sizes" in record.algorithm
        assert comm.slow_ranks()[0][1] >= 0

    run_ranks(3, task)


def test_unequal_splits() -> None:
    codec, splits = CODECS[4], [[5, 0, 700], [31, 64, 1], [0, 0, 3]]

    def task(transport: ThreadTransport) -> None:
        comm, me = tw.Communicator(transport, codec), transport.rank
        x = np.arange(sum(splits[me]), dtype=np.float32)
        inward = [row[me] for row in splits]
        found = comm.all_to_all(x, send_splits=splits[me], receive_splits=inward)
        assert found.size == sum(inward)
        # In blocks of 32 numbers up to 705 every value is near what it was.
        wanted = [
            np.arange(sum(row), dtype=np.float32)[sum(row[:me]) :][: row[me]] for row in splits
        ]
        assert np.abs(found - np.concatenate(wanted)).max() < 705 * 32**0.5 / 100

    run_ranks(3, task)


def test_pieces_follow_from_the_granularity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipelined, "_PIECE", 256)

    def task(transport: ThreadTransport) -> list[str]:
        comm = tw.Communicator(transport, "mx", algorithm="pipelined", granularity=4096)
        for n in (512, 2048, 2 * 4096):
            comm.all_gather(np.ones(n, np.float32))
            comm.all_reduce(np.ones(n, np.float32))
        return [record.algorithm for record in comm.trace()]

    for names in run_ranks(2, task):
        assert names[:2] == ["all-gather, no sizes, mx", "two-shot, no sizes, mx"]
        assert names[2] == "all-gather, no sizes, mx, 2 pieces"
        assert names[3] == "two-shot, no sizes, mx, 2 pieces, 2 pieces"
        assert names[4] == "all-gather, no sizes, mx, 8 pieces"


def test_random_rounding_is_reproducible_and_independent() -> None:
    codec = tw.codec("taco", rounding="stochastic")
    x = np.random.default_rng(1).standard_normal(4096, np.float32)

    def task(transport: ThreadTransport) -> list[Any]:
        found = []
        for seed in (3, 3, 4):
            comm = tw.Communicator(transport, codec, seed=seed)
            found.append(comm.all_gather(x))
            found.append(comm.all_gather(x))
        return found

    first, second = run_ranks(2, task)
    for a, b in zip(first, second, strict=True):
        exact(a, b)
    one, two, again, _, other, _ = first
    exact(one, again)
    # Ranks, calls and seeds.
    for a, b in ((one[:4096], one[4096:]), (one, two), (one, other)):
        wrong = (a - np.resize(x, a.shape), b - np.resize(x, b.shape))
        assert abs(np.corrcoef(*wrong)[0, 1]) < 0.1


def test_a_sum_is_rounded_by_words_of_its_own() -> None:
    """Errors of 64 all-reduces cancel: the two encodings of a call share no words."""
    codec = tw.codec("taco", rounding="stochastic", transform="none", block=32)
    x = np.random.default_rng(1).standard_normal(2 * 1024, np.float32)

    def task(transport: ThreadTransport) -> Any:
        comm = tw.Communicator(transport, codec)
        return np.mean([comm.all_reduce(x) for _ in range(64)], axis=0, dtype=np.float64)

    one = tw.decode(codec.encode(2 * x, key=tw.Key(0))) - 2.0 * x
    for mean in run_ranks(2, task):
        assert np.abs(mean - 2.0 * x).mean() < 0.3 * np.abs(one).mean()


def as_known(comm: tw.Communicator) -> None:
    """As on a GPU, where ranks compare the first call of a kind alone before data move."""
    comm._steps.comparisons.compare_new = lambda *_: None  # type: ignore[method-assign]


def settled(call: Callable[[], Any]) -> str:
    """The stage of what is raised."""
    with pytest.raises(tw.CollectiveError) as caught:
        call()
    assert "make another call" in str(caught.value)
    return caught.value.stage


class Late(tensors.PendingHostCopy):
    """As on a GPU: what is copied comes to the host when somebody waits for it."""

    def __init__(self, x: Any, room: Any = None) -> None:
        super().__init__(tensors.copied(x))
        self.came = False

    @property
    def on_host(self) -> bool:
        return False

    def done(self) -> bool:
        return self.came

    def wait(self, timeout: float, left: Any = None) -> Any:
        self.came = True
        return super().wait(timeout, left)


@pytest.mark.parametrize("how", ["at once", "verify", "check", "later"])
def test_another_call_is_noticed(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if how != "at once":
        monkeypatch.setattr(tensors, "PendingHostCopy", Late)

    def task(transport: ThreadTransport) -> None:
        comm = tw.Communicator(transport, "mx", verify=how == "verify")
        x = np.ones((60, 100), np.float32)
        for shaped in (x, x.reshape(100, 60)):
            comm.all_gather(shaped)
        comm.check()
        # Both kinds have been compared, and have as many bytes.
        as_known(comm)
        odd = x if comm.rank else x.reshape(100, 60)
        if how in ("at once", "verify"):
            assert settled(lambda: comm.all_gather(odd)) == "sizes"
        else:
            comm.all_gather(odd)
            if how == "later":
                comm.session.unchecked[0].call.late[0].arriving.came = True  # type: ignore[attr-defined]
                assert settled(lambda: comm.all_gather(odd)) == "sizes"
            else:
                assert settled(comm.check) == "sizes"
        with pytest.raises(tw.CollectiveError, match="an earlier call has failed"):
            comm.all_gather(x)

    run_ranks(2, task)


def test_calls_whose_descriptors_come_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "PendingHostCopy", Late)
    run_ranks(2, lambda t: check_lossy(t, CODECS[0], "float32", "numpy", 300, 1))


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("at", [0, shares.DESCRIPTOR_NBYTES - 30, shares.DESCRIPTOR_NBYTES - 1])
def test_damaged_descriptors(name: str, at: int) -> None:
    """Of digest and of record."""
    armed = False

    def damage(outs: Sequence[Sequence[Any]]) -> None:
        nonlocal armed
        for part in outs:
            if armed and part and part[0].size % shares.DESCRIPTOR_NBYTES == 0 and part[0].size:
                part[0][at] ^= 1
                armed = False

    def task(transport: ThreadTransport) -> str:
        nonlocal armed
        comm = tw.Communicator(Steps(transport, damage if transport.rank else None), "nvfp4")
        x = np.random.default_rng(0).standard_normal(6000, np.float32)
        call = CALLS[name][0]
        call(comm, x.copy())
        as_known(comm)
        transport.barrier()
        armed = armed or comm.rank == 1
        transport.barrier()
        try:
            call(comm, x.copy())
        except tw.CollectiveError as error:
            transport.close()
            return f"{error.stage}: {error}"
        return ""

    found = run_ranks(2, task, timeout=5)
    assert not armed
    assert found[1].startswith("decode" if at else "sizes"), found


@pytest.mark.parametrize("name", CALLS)
def test_damaged_payload(name: str) -> None:
    def damage(outs: Sequence[Sequence[Any]]) -> None:
        for part in outs:
            # Behind the descriptors.
            if part and part[-1].size > 512:
                part[-1][100] ^= 1

    def task(transport: ThreadTransport) -> str:
        comm = tw.Communicator(Steps(transport, damage if transport.rank else None), "mx")
        try:
            CALLS[name][0](comm, np.ones(6000, np.float32))
        except tw.CollectiveError as error:
            transport.close()
            return str(error)
        return ""

    found = run_ranks(2, task, timeout=5)
    assert "checksum_mismatch" in found[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "params", "times"),
    [
        ("mx", {}, 3),
        ("sdp4bit", {}, 3),
        ("tahquant", {"hidden": 100}, 3),
        ("taco", {}, 3),
        ("dynamiq", {}, 0),
    ],
)
def test_sums_are_encoded_in_one_pass_where_that_can_be(
    name: str, params: dict[str, Any], times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    one_pass = tw.Codec.decode_add_encode

    def noted(self: tw.Codec, *args: Any, **options: Any) -> tw.Buffer:
        steps.append(self.name)
        return one_pass(self, *args, **options)

    monkeypatch.setattr(tw.Codec, "decode_add_encode", noted)
    codec = tw.codec(name, **params)
    run_ranks(3, lambda t: tw.Communicator(t, codec).all_reduce(np.ones(3000, np.float32)))
    assert steps == [name] * times


def test_widths_of_a_sum_in_two_shots_are_its_own() -> None:
    """Not those of the last rank, which has nothing to add."""
    x = np.random.default_rng(0).standard_normal(3 * 2048, np.float32)

    def task(transport: ThreadTransport) -> Any:
        own = x if transport.rank == 0 else np.zeros_like(x)
        return tw.Communicator(transport, "dynamiq").all_reduce(own)

    for found in run_ranks(3, task):
        assert tw.error(x, found).vnmse < 0.01


def test_the_switch_knows_what_buffers_without_sizes_take() -> None:
    def task(transport: ThreadTransport) -> list[str]:
        comm = tw.Communicator(transport, "nvfp4", algorithm="auto")
        # Compressing half of the bytes would not pay, compressing a seventh of them does.
        rows = [[1e-4, 1e-4, 1e-1], [1e-1, 9e-2, 1e-1]]
        measured = Measured((1 << 10, 1 << 20), rows, 4, 0.14)
        comm._measure = lambda *_: measured  # type: ignore[method-assign]
        comm.all_gather(np.ones(1 << 16, np.float32))
        return [record.algorithm for record in comm.trace()]

    assert run_ranks(2, task) == [["all-gather, no sizes, nvfp4"]] * 2


def test_native_calls_lose_nothing() -> None:
    def task(transport: ThreadTransport) -> None:
        comm = tw.Communicator(transport, "nvfp4", algorithm="native")
        xs = inputs(comm.codec, "float32", 2, 1001)
        exact(comm.all_gather(xs[comm.rank]), np.concatenate(xs))
        exact(comm.all_reduce(xs[comm.rank]), xs[0] + xs[1])

    run_ranks(2, task)


def between_processes(device: Any) -> list[str]:
    """Every codec over gloo or NCCL; digests of what an all-reduce gave."""
    import hashlib

    import torch
    import torch.distributed as dist

    from tightwire.adapters.transports.torch_dist import TorchDist

    transport = TorchDist(dist.new_group(), device)
    size, where = transport.world_size, device if device.type == "cuda" else None
    found = []
    for i, codec in enumerate(CODECS):
        library = "torch" if where or i % 2 else "numpy"
        check_lossy(transport, codec, DTYPES[i % 3], library, 333 + i, i % size, device=where)
        x = torch.from_numpy(inputs(codec, "float32", size, 5001)[transport.rank]).to(device)
        total = tw.Communicator(transport, codec).all_reduce(x)
        found.append(hashlib.sha256(total.cpu().numpy().tobytes()).hexdigest())
    return found


@pytest.mark.slow
def test_between_processes(tmp_path: Path) -> None:
    pytest.importorskip("torch.distributed")
    world_size = 4
    first, *others = launch(__file__, "between_processes", world_size, tmp_path)
    assert len(first) == len(CODECS)
    assert others == [first] * (world_size - 1)


@pytest.mark.multi_gpu
def test_between_gpus(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    first, *others = launch(__file__, "between_processes", 2, tmp_path, "cuda", "default")
    assert len(first) == len(CODECS)
    assert others == [first]


if __name__ == "__main__":
    join(globals(), sys.argv[1:])
