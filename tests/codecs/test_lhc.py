"""lhc: what is exact, when peeling ends, sums of ranks, bad values and bad calls."""

from __future__ import annotations

import tracemalloc
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tightwire as tw
from support import examples
from tightwire.codecs import lhc
from tightwire.codecs.common.base import Bytes
from tightwire.codecs.lhc import BLOCK, MAPPINGS, Lhc, mapping_of
from tightwire.formats.dtypes import BY_NAME, DType
from tightwire.homomorphic import add, diagnose
from tightwire.planning import HOST_BACKENDS, backend_module

DTYPES = tuple(BY_NAME[name] for name in Lhc.dtypes)
ROWS = 1024
LOAD = 0.75


def sparse(n: int, share: float, seed: int = 0, dtype: str = "float32") -> npt.NDArray[Any]:
    """Exactly floor(share * n) elements are not zero; magnitudes differ by up to 2^20."""
    rng = np.random.default_rng([seed, n])
    x = np.zeros(n, BY_NAME[dtype].numpy)
    at = rng.permutation(n)[: int(share * n)]
    sizes = 2.0 ** rng.integers(-13, 8, at.size) * (1 + rng.random(at.size))
    x[at] = (sizes * rng.choice([-1, 1], at.size)).astype(x.dtype)
    return x


def index_of(rng: np.random.Generator, n: int, share: float) -> Bytes:
    """An index with exactly floor(share * n) elements."""
    chosen = np.zeros(n, bool)
    chosen[rng.choice(n, int(share * n), replace=False)] = True
    return np.packbits(chosen, bitorder="little")


def unpeeled(ratio: float, rows: int, seed: int, tail: int = 0) -> int:
    """Estimated elements of a random index of 0.75 / ratio."""
    n = rows * ROWS + tail
    index = index_of(np.random.default_rng([seed, n]), n, LOAD / ratio)
    found = diagnose(tw.codec("lhc", ratio=ratio), index, (n,), "float32")
    assert found.occupied == int(LOAD / ratio * n)
    return found.estimated


@pytest.mark.parametrize("ratio", [2, 4, 10])
def test_peeling_ends_at_three_quarters_of_the_cells(ratio: float) -> None:
    for rows, tail in ((16, 0), (17, 1), (20, 0), (23, 999), (64, 0), (130, 77)):
        for seed in range(20 if rows < 24 else 2):
            assert unpeeled(ratio, rows, seed, tail) == 0, (rows, seed)


@pytest.mark.long
@pytest.mark.parametrize("ratio", [1.5, 2, 3, 4, 7.25, 10])
def test_peeling_ends_for_every_size(ratio: float) -> None:
    for rows in (*range(16, 200), 256, 333, 512, 1000, 2048, 5000):
        for seed in range(20 if rows < 1000 else 3):
            assert unpeeled(ratio, rows, seed, tail=(seed * 333) % ROWS) == 0, (rows, seed)


def with_structure(kind: str, n: int, share: float, rng: np.random.Generator) -> Bytes:
    """An index with about share * n elements of `n`, which lie in an order."""
    chosen = np.zeros(n, bool)
    start = int(rng.integers(n - int(share * n)))
    if kind == "rows":
        chosen.reshape(-1, 1024)[rng.permutation(n // 1024)[: int(share * n / 1024)]] = True
    elif kind == "prefix":
        chosen[: int(share * n)] = True
    elif kind == "run":
        chosen[start : start + int(share * n)] = True
    elif kind == "strided":
        chosen[:: int(np.ceil(1 / share))] = True
    elif kind == "strided rows":
        chosen.reshape(-1, 1024)[:: int(np.ceil(1 / share))] = True
    elif kind == "columns":
        chosen.reshape(-1, 1024)[:, rng.permutation(1024)[: int(share * 1024)]] = True
    else:
        side = int(np.sqrt(share) * 512)
        chosen.reshape(512, -1)[100 : 100 + side, 77 : 77 + int(side * n / 512**2)] = True
    return np.packbits(chosen, bitorder="little")


@pytest.mark.parametrize(
    "kind", ["rows", "prefix", "run", "strided", "strided rows", "columns", "block"]
)
def test_peeling_ends_for_indexes_in_an_order(kind: str) -> None:
    """Of rows that are multiples of 3, of 4 and of neither, to 0.65 / ratio."""
    n = 768 * ROWS
    for ratio in (2, 3, 4, 10):
        codec = tw.codec("lhc", ratio=ratio)
        for load in (0.2, 0.65):
            index = with_structure(kind, n, load / ratio, np.random.default_rng(ratio))
            found = diagnose(codec, index, (n,), "float32")
            assert 0 < found.density < LOAD / ratio
            assert (found.estimated, found.advice) == (0, None), (ratio, load)


def test_two_whole_rows_peel() -> None:
    """Rows 0 and 8 of 96, at 4x: where a third of the sketch's rows was what lay between them."""
    x = np.zeros((96, 1024), np.float32)
    x[[0, 8]] = 1
    assert tw.decode(tw.encode(x, "lhc")).tobytes() == x.tobytes()


def test_the_published_mapping_peels_worse() -> None:
    """Its lanes are small sketches of their own."""
    n = 64 * ROWS
    index = index_of(np.random.default_rng(1), n, 0.1)
    shares = {}
    for mapping in MAPPINGS:
        found = diagnose(tw.codec("lhc", mapping=mapping), index, (n,), "float32")
        shares[mapping] = found.estimated / found.occupied
    assert shares["rotated"] == 0
    assert 0.03 < shares["published"] < 0.3


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
@pytest.mark.parametrize("ratio", [2, 4, 10, 2.718])
def test_one_rank_is_exact(dtype: DType, ratio: float) -> None:
    """Bit for bit, NaN and infinity among the values, in a tail too."""
    for n in (16 * ROWS, 21 * ROWS + 513):
        x = sparse(n, LOAD / ratio, 3, dtype.name)
        bits = x.view(dtype.bits)
        at = np.flatnonzero(bits)[[0, 5, 9, -1]]
        x[at[:3]] = np.nan, np.inf, -np.inf
        bits[at[3]] = bits[at[0]] | 1
        buf = tw.codec("lhc", ratio=ratio).encode(x)
        assert buf.plan.codec.name == "lhc"
        assert tw.decode(buf).tobytes() == x.tobytes()
        assert tw.decode(tw.codec("lhc", ratio=ratio, sketch=dtype.name).encode(x)).tobytes() == (
            x.tobytes()
        )


@pytest.mark.parametrize("cells", ["float16", "bfloat16"])
def test_narrow_cells_lose_no_more_than_their_rounding(cells: str) -> None:
    x = sparse(20 * ROWS, 0.18)
    x[np.flatnonzero(x)[:3]] = np.nan, 1e30, -1e30
    y = tw.decode(tw.codec("lhc", sketch=cells).encode(x))
    with np.errstate(over="ignore"):
        expected = x.astype(BY_NAME[cells].numpy).astype(np.float32)
    assert np.array_equal(y, expected, equal_nan=True)


def test_the_order_of_the_additions_of_estimates() -> None:
    """Cells of a dense tensor, added one by one as the page says."""
    n = 3 * ROWS + 9
    x = sparse(n, 0.95, 5)
    spec = Lhc(2)
    buf = tw.Codec(spec).encode(x)
    static = buf.static(0)
    cells = static[: buf.plan.layout.sections[0].nbytes].view(np.float32)
    m = mapping_of(spec, n, 2)
    own = lhc.peel(spec_index(x), n, m, cells.size).own
    values = np.zeros(n, bool)
    values[np.flatnonzero(x)[own < 0]] = True
    expected = np.zeros(cells.size, np.float32)
    for g in range(13):
        for j in range(3):
            for i in range(g * BLOCK, min((g + 1) * BLOCK, n)):
                if values[i]:
                    c = m.blocks[g, j] * BLOCK + (i + m.offsets[g, j]) % BLOCK
                    sign = np.float32(-1 if m.signs[g, j] else 1)
                    expected[c] = np.float32(expected[c] + sign * x[i])
    expected[own[own >= 0]] = x[np.flatnonzero(x)[own >= 0]]
    assert np.count_nonzero(own < 0) > 2000
    assert cells.tobytes() == expected.tobytes()


def spec_index(x: npt.NDArray[Any]) -> Bytes:
    found: Bytes = tw.codec("lhc").measure(x)
    return found


def test_estimates_are_unbiased_medians() -> None:
    """Elements that are alone in one cell of the sketch at least; the others about as large."""
    x = sparse(32 * ROWS, 0.5, 2)
    x[x != 0] = np.sign(x[x != 0])
    y = tw.decode(tw.codec("lhc").encode(x))
    assert (y[x == 0] == 0).all()
    on = x != 0
    assert abs((y[on] * x[on]).mean() - 1) < 0.1
    assert ((y - x)[on] ** 2).mean() < 4


@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize("cells", ["float32", "bfloat16"])
def test_sums_of_ranks(world: int, cells: str) -> None:
    """Exactly the float sums in the order of the additions; a NaN of one rank stays alone."""
    n, ratio = 24 * ROWS + 100, 4
    codec = tw.codec("lhc", ratio=ratio, sketch=cells)
    xs = [sparse(n, 0.7 / ratio / world, seed) for seed in range(world)]
    # Where one rank has a value, all may have one.
    shared = np.flatnonzero(xs[0])[:50]
    for rank, x in enumerate(xs):
        x[shared] = np.float32(rank + 1) / 3
    xs[-1][np.flatnonzero(xs[-1])[-1]] = np.nan
    index = np.bitwise_or.reduce([codec.measure(x) for x in xs])
    assert diagnose(codec, index, (n,), "float32").estimated == 0
    buffers = [codec.encode(x, stats=index) for x in xs]
    kind = BY_NAME[cells].numpy
    expected = xs[0].astype(kind)
    for x in xs[1:]:
        expected = expected + x.astype(kind)
    for backend in HOST_BACKENDS:
        y = tw.decode(bytes(add(*buffers)), backend=backend)
        assert np.array_equal(y, expected.astype(np.float32), equal_nan=True)
    assert np.count_nonzero(np.isnan(expected)) == 1


@examples(40)
@given(
    dtype=st.sampled_from(DTYPES),
    n=st.integers(2100, 9000),
    share=st.floats(0, 1),
    thousandths=st.integers(1500, 20000),
    mapping=st.sampled_from(MAPPINGS),
    chunks=st.integers(1, 2),
    seed=st.integers(0, 2**32),
)
def test_backends_peel_alike(
    dtype: DType, n: int, share: float, thousandths: int, mapping: str, chunks: int, seed: int
) -> None:
    """All that peels is exact and what is not in the index 0; the backends agree on all else."""
    x = sparse(n, share, seed, dtype.name)
    codec = tw.codec("lhc", ratio=thousandths / 1000, mapping=mapping)
    buf = codec.encode(x, chunks=chunks, backend="ref")
    assert bytes(codec.encode(x, chunks=chunks, backend="cpu")) == bytes(buf)
    y, z = (tw.decode(buf, backend=b) for b in HOST_BACKENDS)
    assert y.tobytes() == z.tobytes()
    if isinstance(buf.plan.codec, Lhc) and chunks == 1:
        rows = buf.plan.codec.rows(n)
        m = mapping_of(buf.plan.codec, n, rows)
        found = [
            backend_module("lhc", b).peel(spec_index(x), n, m, rows * ROWS) for b in HOST_BACKENDS
        ]
        for a, b in zip(*found, strict=True):
            assert np.array_equal(a, b)
        peeled = found[0].elements[found[0].own >= 0]
        assert y[peeled].tobytes() == x[peeled].tobytes()
        assert not y[x == 0].view(dtype.bits).any()


def test_zeros_and_negative_zeros() -> None:
    x = np.zeros(4 * ROWS, np.float32)
    x[::2] = -0.0
    codec = tw.codec("lhc")
    assert not codec.measure(x).any()
    assert not tw.decode(codec.encode(x)).view(np.uint32).any()
    index = np.zeros(512, np.uint8)
    index[0] = 1
    assert tw.decode(codec.encode(x, stats=index)).view(np.uint32).tolist() == [1 << 31] + [0] * (
        x.size - 1
    )


def test_a_dense_tensor_is_estimated_and_reported() -> None:
    x = sparse(16 * ROWS, 1.0)
    found = diagnose("lhc", spec_index(x), x.shape, "float32")
    assert found.density == 1
    assert found.estimated > 0.99 * x.size
    assert found.advice is not None


def test_sizes_follow_the_ratio() -> None:
    for ratio, rows in ((2, 50), (4, 25), (10, 10), (1.001, 100), (99.999, 2), (1000, 1)):
        plan = tw.codec("lhc", ratio=ratio).plan((100 * ROWS - 5,), "bfloat16")
        if plan.codec.name == "lhc":
            assert plan.layout.sections[0].nbytes == rows * ROWS * 2
            assert plan.layout.sections[1].nbytes == 12800
        else:
            assert ratio == 1.001
    # The figures of TAGC, figure 2: a bit of index, 32 / ratio of sketch.
    plan = tw.codec("lhc", ratio=10).plan((1 << 20,), "float32")
    assert 8 * plan.static_stride / (1 << 20) == pytest.approx(1 + 3.2, rel=0.01)


def test_small_tensors_and_other_dtypes_are_raw() -> None:
    for n, dtype in ((0, "float32"), (1, "float32"), (1024, "float32"), (9999, "float64")):
        assert tw.codec("lhc").plan((n,), dtype).codec.name == "raw"
    assert tw.codec("lhc").measure(np.ones(5)) is None
    assert tw.codec("lhc", ratio=2, sketch="float32").plan((9999,), "bfloat16").codec.name == "raw"


@pytest.mark.parametrize(
    ("params", "error"),
    [
        ({"ratio": 1}, ValueError),
        ({"ratio": 1000.001}, ValueError),
        ({"ratio": 2.0005}, ValueError),
        ({"ratio": float("nan")}, ValueError),
        ({"ratio": True}, TypeError),
        ({"ratio": "4"}, TypeError),
        ({"sketch": "float64"}, ValueError),
        ({"sketch": None}, TypeError),
        ({"mapping": "random"}, ValueError),
        ({"mapping": 0}, TypeError),
    ],
)
def test_bad_parameters(params: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match="allowed"):
        tw.codec("lhc", **params)


def test_bad_stats(backend: str) -> None:
    codec, x = tw.codec("lhc"), sparse(5 * ROWS, 0.1)
    index = codec.measure(x)
    wrong = index.copy()
    wrong[np.flatnonzero(wrong)[0]] = 0
    for bad in (index[:-1], index.astype(np.int64), index[None], np.append(index, 0), wrong):
        with pytest.raises(ValueError, match=r"stats.*allowed"):
            codec.encode(x, stats=bad, backend=backend)
    assert codec.homomorphic
    assert codec.reduce_op == "or"
    assert not codec.lossless


def test_stats_of_a_tensor_in_chunks() -> None:
    """Chunks begin within bytes of the index; bits behind the last element do not matter."""
    x = sparse(3 * 5001, 0.1, 4)
    codec = tw.codec("lhc")
    index = codec.measure(x)
    index[-1] |= 0x80
    buf = codec.encode(x, stats=index, chunks=3)
    assert bytes(buf) == bytes(codec.encode(x, chunks=3))
    part = tw.decode(buf, start=4000, stop=11000)
    assert part.tobytes() == x[4000:11000].tobytes()


def test_the_hash_is_murmur3() -> None:
    """Published values of MurmurHash3_x86_32: of four zero bytes with seed 0."""
    assert lhc.hashes(1)[0, 0] == 0x2362F9DE


def test_cells_of_an_element_differ() -> None:
    for ratio in (2, 10, 1000):
        spec, rows = Lhc(ratio), 5000
        sketch_rows = spec.rows(rows * ROWS)
        m = mapping_of(spec, rows * ROWS, sketch_rows)
        assert m.blocks.shape == (4 * rows, 3)
        # Of each turn, by each hash, every block of cells takes one block.
        turns = 4 * rows // (4 * sketch_rows)
        whole = m.blocks[: turns * 4 * sketch_rows].reshape(turns, -1, 3)
        assert (np.sort(whole, axis=1) == np.arange(4 * sketch_rows)[:, None]).all()
        cells = np.sort(m.blocks * BLOCK + m.offsets, axis=1)
        assert (np.diff(cells, axis=1) > 0).all()
        assert cells.min() >= 0
        assert cells.max() < sketch_rows * ROWS


def test_bfloat16_of_torch() -> None:
    torch = pytest.importorskip("torch")
    x = sparse(9 * ROWS, 0.1, dtype="bfloat16")
    t = torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    y = tw.decode(tw.codec("lhc").encode(t))
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, t)
    assert x.dtype == ml_dtypes.bfloat16


@pytest.mark.slow
@pytest.mark.parametrize(("share", "most"), [(0.05, 2.2), (0.15, 2.5), (1.0, 5.5)])
def test_decoding_needs_little_memory_beside_the_tensor(share: float, most: float) -> None:
    """In tensors of float32, the one that is decoded among them, with Numba."""
    rng = np.random.default_rng(0)
    x = np.where(rng.random(1 << 21) < share, rng.standard_normal(1 << 21), 0).astype(np.float32)
    data = bytes(tw.encode(x, "lhc"))
    tw.decode(data)
    tracemalloc.start()
    try:
        tw.decode(data)
        assert tracemalloc.get_traced_memory()[1] < most * x.nbytes
    finally:
        tracemalloc.stop()
