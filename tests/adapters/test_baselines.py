"""thc and omnireduce over a transport: as any lossy codec, and by sums of their cells."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import tightwire as tw
from lossy import check_lossy, inputs
from tightwire.adapters.memory import MemoryTransport, run_ranks
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

    def rank(t: MemoryTransport) -> tuple[bytes, bytes]:
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
