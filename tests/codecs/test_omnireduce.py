"""omnireduce: which blocks are kept, sums of ranks, bad values and bad calls."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tightwire as tw
from support import examples, make_bits
from tightwire.codecs.omnireduce import VALUES, Omnireduce
from tightwire.formats.dtypes import BY_NAME
from tightwire.homomorphic import add, seal, sketch
from tightwire.local_top import LocalTop
from tightwire.planning import HOST_BACKENDS

Array = npt.NDArray[Any]


def local(n: int, seed: int = 0, block: int = 64) -> npt.NDArray[np.float32]:
    """Values whose scale is another one in every block."""
    rng = np.random.default_rng([seed, n])
    scales = np.exp(1.6 * rng.standard_normal(-(-n // block)))
    return (rng.standard_normal(n) * scales.repeat(block)[:n]).astype(np.float32)


def blocks_kept(x: Array, block: int, k: int, stats: Array | None = None) -> Array:
    """`x` with all but its k blocks of largest norm, in double precision, zero."""
    rows = np.zeros((-(-x.size // block), block))
    rows.reshape(-1)[: x.size] = x
    norms = np.sqrt((rows**2).sum(axis=1)) if stats is None else stats
    kept = np.argsort(-norms, kind="stable")[:k]
    found = np.zeros(rows.shape, x.dtype)
    found[kept] = rows[kept]
    return found.reshape(-1)[: x.size]


@pytest.mark.parametrize(("bits", "k"), [(1, 6), (8, 50), (15.5, 96)])
def test_the_largest_blocks_come_back(bits: float, k: int) -> None:
    x = local(99 * 64 + 17)
    codec = tw.codec("omnireduce", bits=bits, block=64)
    plan = codec.plan(x.shape, "float32")
    assert plan.layout.sections[0].nbytes == k * 64 * 2
    bf16 = BY_NAME["bfloat16"].numpy
    expected = blocks_kept(x, 64, k).astype(bf16).astype(np.float32)
    y = tw.decode(codec.encode(x))
    assert np.array_equal(y, expected)
    dropped = 1 - (expected.astype(np.float64) ** 2).sum() / (x.astype(np.float64) ** 2).sum()
    assert tw.error(x, y).vnmse == pytest.approx(dropped, abs=2e-5 + 2**-8 * dropped)


def test_values_keep_their_bits_where_dtypes_agree() -> None:
    for name in VALUES:
        kind = BY_NAME[name]
        x = make_bits("special", kind, 3000).view(kind.numpy)
        codec = tw.codec("omnireduce", values=name, block=128, bits=4 * kind.itemsize)
        y = tw.decode(codec.encode(x))
        kept = y.view(kind.bits) != 0
        assert np.count_nonzero(kept) > 900
        assert np.array_equal(y.view(kind.bits)[kept], x.view(kind.bits)[kept])


@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize("values", VALUES)
def test_sums_of_ranks(world: int, values: str) -> None:
    """Exactly the float sums of the blocks that are largest on any rank, in order."""
    codec = tw.codec("omnireduce", bits=6, block=64, values=values)
    xs = [local(3000, r) for r in range(world)]
    xs[-1][5] = np.nan
    stats = np.maximum.reduce([codec.measure(x) for x in xs])
    buffers = [codec.encode(x, stats=stats) for x in xs]
    k = 47 * 6 // (16 if values != "float32" else 32)
    kind = BY_NAME[values].numpy
    expected = np.zeros(3000, kind)
    for i, x in enumerate(xs):
        part = blocks_kept(x, 64, k, stats).astype(kind)
        expected = part if i == 0 else expected + part
    for backend in HOST_BACKENDS:
        y = tw.decode(bytes(add(*buffers)), backend=backend)
        assert np.array_equal(y, expected.astype(np.float32), equal_nan=True)
    for b in buffers[1:]:
        sketch(buffers[0])[:] += sketch(b)
    assert np.array_equal(tw.decode(seal(buffers[0])), expected.astype(np.float32), equal_nan=True)


def test_unlike_indexes_do_not_add_up() -> None:
    codec = tw.codec("omnireduce")
    a, b = codec.encode(local(9000)), codec.encode(local(9000, 1))
    with pytest.raises(ValueError, match="by max"):
        add(a, b)


def test_unions_of_proposals() -> None:
    """A union above the slots keeps its largest; one below leaves slots empty."""
    codec = tw.codec("omnireduce", bits=4, block=64)
    xs = [local(64 * 80, r) for r in range(3)]
    tops = [LocalTop(codec.plan(x.shape, "float32")) for x in xs]
    assert tops[0].target == 20
    for k, few in ((20, False), (4, True)):
        for top in tops:
            top.k = k
        proposed = [t.propose(codec.measure(x)) for t, x in zip(tops, xs, strict=True)]
        stats = np.maximum.reduce(proposed)
        union = np.flatnonzero(stats)
        assert (union.size <= 20) == few
        kept = np.flatnonzero(
            [row.any() for row in tw.decode(codec.encode(xs[0], stats=stats)).reshape(-1, 64)]
        )
        assert kept.size == min(union.size, 20)
        assert set(kept) <= set(union)
        assert few or stats[kept].min() >= np.sort(stats)[-20]


def test_chunks_keep_blocks_of_their_own() -> None:
    x = local(64 * 40)
    x[64 * 10 :] *= 2.0**-20
    codec = tw.codec("omnireduce", block=64)
    y = tw.decode(codec.encode(x, chunks=4)).reshape(4, 10, 64)
    assert y.any(axis=2).sum(axis=1).tolist() == [5, 5, 5, 5]
    whole = tw.decode(codec.encode(x)).reshape(4, 10, 64)
    assert whole.any(axis=2).sum(axis=1)[0] == 10


@examples(40)
@given(
    dtype=st.sampled_from(Omnireduce.dtypes),
    values=st.sampled_from(VALUES),
    n=st.integers(1, 6000),
    block=st.sampled_from((64, 256, 1024)),
    steps=st.integers(1, 320),
    chunks=st.integers(1, 4),
    zeros=st.floats(0, 1),
)
def test_sizes(
    dtype: str, values: str, n: int, block: int, steps: int, chunks: int, zeros: float
) -> None:
    """Backends agree; every block comes back whole or not at all; parts are those of the whole."""
    codec = tw.codec("omnireduce", bits=steps / 16, block=block, values=values)
    kind = BY_NAME[dtype]
    x = local(n, steps, 64).astype(kind.numpy)
    x[np.random.default_rng(n).random(n) < zeros] = 0
    buf = codec.encode(x, chunks=chunks, backend="ref")
    assert bytes(codec.encode(x, chunks=chunks, backend="cpu")) == bytes(buf)
    y, z = (tw.decode(buf, backend=b) for b in HOST_BACKENDS)
    assert y.tobytes() == z.tobytes()
    for backend in HOST_BACKENDS:
        part = tw.decode(buf, start=n // 3, stop=n // 2 + 1, backend=backend)
        assert part.tobytes() == y[n // 3 : n // 2 + 1].tobytes()
    if buf.plan.codec.name == "raw":
        return
    with np.errstate(over="ignore"):
        rounded = x.astype(BY_NAME[values].numpy).astype(kind.numpy)
    each, spec = buf.plan.chunk_nelem, buf.plan.codec
    assert isinstance(spec, Omnireduce)
    for i in range(chunks):
        part, own = (a[i * each : (i + 1) * each] for a in (y, rounded))
        kept = 0
        for at in range(0, part.size, block):
            a, b = part[at : at + block], own[at : at + block]
            assert np.array_equal(a, b) or not a.any()
            kept += bool(a.any())
        assert kept <= spec.slots(each)


@pytest.mark.parametrize("backend", HOST_BACKENDS)
def test_hops_by_decoding_and_encoding_again(backend: str) -> None:
    codec = tw.codec("omnireduce", bits=12, block=64)
    a, b = local(5000), local(5000, 1)
    buf = codec.encode(a, backend=backend)
    acc = b.copy()
    codec.decode_add(buf, acc)
    assert acc.tobytes() == (b + tw.decode(buf)).tobytes()
    hop = codec.decode_add_encode(buf, b, backend=backend)
    assert bytes(hop) == bytes(codec.encode(acc))
    assert tw.error(a + b, tw.decode(hop)).vnmse < 0.01


def test_nan_infinity_and_zeros() -> None:
    x = local(64 * 30)
    x[1000], x[64] = np.nan, -np.inf
    codec = tw.codec("omnireduce", bits=1.25, block=64)
    assert np.flatnonzero(np.isinf(codec.measure(x))).tolist() == [1, 15]
    y = tw.decode(codec.encode(x)).reshape(30, 64)
    assert np.flatnonzero((y != 0).any(axis=1)).tolist() == [1, 15]
    assert np.isnan(y.reshape(-1)[1000])
    assert y.reshape(-1)[64] == -np.inf
    zeros = np.full(3000, -0.0, np.float32)
    assert not tw.decode(codec.encode(zeros)).view(np.uint32).any()
    tiny = np.full(3000, 2.0**-149, np.float32)
    assert np.count_nonzero(tw.decode(tw.codec("omnireduce", values="float32").encode(tiny))) > 600
    huge = np.full(3000, np.finfo(np.float32).max)
    assert np.isfinite(codec.measure(huge)).all()


@pytest.mark.parametrize(
    ("params", "error"),
    [
        ({"bits": 0}, ValueError),
        ({"bits": 33}, ValueError),
        ({"bits": 4.01}, ValueError),
        ({"bits": float("nan")}, ValueError),
        ({"bits": True}, TypeError),
        ({"bits": "8"}, TypeError),
        ({"block": 32}, ValueError),
        ({"block": 100}, ValueError),
        ({"block": 64.0}, TypeError),
        ({"values": "float64"}, ValueError),
        ({"values": None}, TypeError),
    ],
)
def test_bad_parameters(params: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match="allowed"):
        tw.codec("omnireduce", **params)


@pytest.mark.parametrize("backend", HOST_BACKENDS)
def test_bad_stats(backend: str) -> None:
    codec, x = tw.codec("omnireduce"), local(9000)
    stats = codec.measure(x)
    wrong = stats.copy()
    wrong[2] = np.nan
    for bad in (stats[1:], stats.astype(np.float64), stats[None], -stats, wrong):
        with pytest.raises(ValueError, match=r"stats.*allowed"):
            codec.encode(x, stats=bad, backend=backend)
    assert (codec.homomorphic, codec.reduce_op, codec.lossless) == (True, "max", False)
    assert codec.measure(np.ones(5)) is None


@pytest.mark.parametrize("backend", HOST_BACKENDS)
def test_a_chunk_without_elements(backend: str) -> None:
    n, chunks = 340 * 320 + 1, 340
    x = local(n)
    buf = tw.codec("omnireduce", block=64).encode(x, chunks=chunks, backend=backend)
    assert buf.plan.codec.name == "omnireduce"
    assert buf.plan.chunk_range(chunks - 1) == (n, n)
    assert not buf.static(chunks - 1).any()
    assert tw.error(x, tw.decode(buf, backend=backend)).vnmse < 0.2


def test_small_tensors_and_other_dtypes_are_raw() -> None:
    for n, dtype in ((0, "float32"), (128, "float32"), (9999, "float64")):
        assert tw.codec("omnireduce").plan((n,), dtype).codec.name == "raw"
    assert tw.codec("omnireduce", bits=16).plan((9999,), "bfloat16").codec.name == "raw"
    assert tw.codec("omnireduce", bits=16).plan((9999,), "float32").codec.name == "omnireduce"
