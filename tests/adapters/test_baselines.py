"""thc and omnireduce over a transport: as any lossy codec, and by sums of their cells."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import tightwire as tw
from lossy import check_lossy, inputs
from ranks import exact
from tightwire.adapters.collectives.calls import rounding_key
from tightwire.adapters.transports.threads import ThreadTransport, run_ranks
from tightwire.arrays import Target, from_bits
from tightwire.formats.dtypes import BY_NAME
from tightwire.homomorphic import add, seal, sketch

CODECS = (
    tw.codec("thc"),
    tw.codec("thc", bits=16, norm="tensor"),
    tw.codec("omnireduce", block=64, values="float32", bits=12),
)


@pytest.mark.parametrize("codec", CODECS, ids=lambda c: str(c.spec))
def test_collectives_decode_and_encode_them_like_others(codec: tw.Codec) -> None:
    run_ranks(2, lambda t: check_lossy(t, codec, "float32", "numpy", 1777, 1))


@pytest.mark.parametrize("world", [1, 2, 5, 8])
@pytest.mark.parametrize("codec", CODECS, ids=lambda c: str(c.spec))
def test_sums_of_cells(codec: tw.Codec, world: int) -> None:
    """All ranks get the same bits: those of the sum of the buffers."""
    xs = inputs(codec, "float32", world, 2501)

    def rank(t: ThreadTransport) -> tuple[bytes, bytes]:
        stats = codec.measure(xs[t.rank])
        t.all_reduce(stats, "max")
        buf = codec.encode(xs[t.rank], stats=stats, key=tw.Key(3, 4, t.rank, world))
        own = bytes(buf)
        cells: npt.NDArray[Any] = sketch(buf)
        # Transports add 32-bit integers: no cell carries into the next.
        t.all_reduce(cells.view(np.int32) if codec.name == "thc" else cells)
        return own, bytes(seal(buf))

    own, sums = zip(*run_ranks(world, rank), strict=True)
    plan = codec.plan((2501,), "float32")
    total = add(*(tw.Buffer.wrap(plan, np.frombuffer(data, np.uint8)) for data in own))
    assert set(sums) == {bytes(total)}
    exact = np.sum(xs, axis=0, dtype=np.float64)
    assert tw.error(exact, tw.decode(total)).vnmse < {"thc": 0.2, "omnireduce": 0.1}[codec.name]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("codec", "topology", "value"),
    [
        (tw.codec("omnireduce", bits=8), "in-network", np.nan),
        (tw.codec("omnireduce", bits=8), "two-shot", np.nan),
        (tw.codec("tahquant", hidden=192), "two-shot", 2.0**20),
    ],
)
def test_traces_say_what_sums_lose(codec: tw.Codec, topology: Any, value: float) -> None:
    """Of blocks with a NaN as many are kept as the budget allows; of tiles all become NaN."""

    def rank(t: ThreadTransport) -> None:
        comm = tw.Communicator(t, codec, topology=topology)
        x = np.full(192 * 40, value, np.float32)
        comm.all_gather(x)
        total = comm.all_reduce(x)
        lost = ~np.isnan(total) if codec.name == "omnireduce" else np.isnan(total)
        assert lost.any()
        gathered, summed = comm.trace()
        assert summed.reason.endswith(f"; {codec.spec.caution}")
        assert ";" not in gathered.reason

    run_ranks(2, rank)


class Counted(ThreadTransport):
    """Counts bytes to others; those of `all_reduce` as a network sends them."""

    def __init__(self, inner: ThreadTransport) -> None:
        super().__init__(inner.rank, inner._pipes, inner.timeout)
        self.sent = 0

    def all_gather(self, out: Any, x: Any) -> None:
        super().all_gather(out, x)
        self.sent += (self.world_size - 1) * x.nbytes

    def all_to_all(self, out: Any, x: Any) -> None:
        super().all_to_all(out, x)
        self.sent += (self.world_size - 1) * x.nbytes // self.world_size

    def all_reduce(self, x: Any, op: Any = "sum") -> None:
        sent = self.sent
        super().all_reduce(x, op)
        self.sent = sent + 2 * (self.world_size - 1) * x.nbytes // self.world_size


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("world", [2, 5, 8])
@pytest.mark.parametrize("codec", [*CODECS, tw.codec("omnireduce")], ids=lambda c: str(c.spec))
def test_a_communicator_sums_cells(codec: tw.Codec, world: int, library: str) -> None:
    """Bit for bit what `add` makes of the buffers of all ranks, with statistics agreed on."""
    dtype = "bfloat16" if codec == CODECS[0] else "float32"
    xs = inputs(codec, dtype, world, world * 1800)
    kind = BY_NAME[dtype]

    def summed(parts: list[Any], sequence: int, encoding: int) -> npt.NDArray[Any]:
        stats = np.max([codec.measure(x) for x in parts], 0)
        buffers = [
            codec.encode(x, stats=stats, key=rounding_key(7, sequence, encoding, r, world))
            for r, x in enumerate(parts)
        ]
        found: npt.NDArray[Any] = tw.decode(bytes(add(*buffers)))
        return found

    def rank(t: ThreadTransport) -> None:
        counted = Counted(t)
        comm = tw.Communicator(counted, codec, seed=7, topology="in-network")
        counted.sent = 0
        own = from_bits(xs[t.rank].view(kind.bits), kind, xs[0].shape, Target(library, None))
        exact(comm.all_reduce(own), summed(xs, 0, 0))
        shares = [x.reshape(world, -1)[t.rank] for x in xs]
        out = comm.reduce_scatter(own)
        # Of shares every one has statistics of its own.
        exact(out, summed(shares, 1, t.rank))
        records = comm.trace()
        assert records[0].algorithm == f"in-network, no sizes, {codec.name}"
        for record in records:
            assert 0 < record.wire_bytes < record.raw_bytes
        assert counted.sent == sum(record.wire_bytes for record in records)
        small = comm.all_reduce(own[:50])
        assert comm.trace()[-1].algorithm.startswith("two-shot")
        assert tw.error(sum(x[:50].astype(np.float32) for x in xs), small).vnmse < 1e-4

    run_ranks(world, rank)


def test_cells_keep_what_is_not_finite_and_refuse_what_they_cannot_hold() -> None:
    def rank(t: ThreadTransport) -> None:
        x = np.ones(5000, np.float32)
        if t.rank == 1:
            x[1500] = np.nan
        total = tw.Communicator(t, "thc", topology="in-network").all_reduce(x, op="mean")
        assert np.isnan(total[1024:2048]).all()
        assert np.isfinite(total[2048:]).all()

    run_ranks(2, rank)
    with pytest.raises(ValueError, match="adds up at most 8 ranks; the group has 9"):
        run_ranks(9, lambda t: tw.Communicator(t, "thc", topology="in-network"))

    def refused(t: ThreadTransport) -> None:
        for name in ("mx", "zipccl", "lhc"):
            with pytest.raises(ValueError, match="topology is 'in-network', codec"):
                tw.Communicator(t, name, topology="in-network")

    run_ranks(1, refused)
