"""thc: its error, rounding without bias, sums of ranks, bad values and bad calls."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tightwire as tw
from support import examples, make_bits
from tightwire.codecs import thc
from tightwire.codecs.common.philox import key_numbers
from tightwire.codecs.thc import LEVELS, MAX_RANKS, NORMS, STEPS, Thc
from tightwire.formats.dtypes import BY_NAME
from tightwire.homomorphic import add, seal, sketch
from tightwire.planning import HOST_BACKENDS

Array = npt.NDArray[Any]
KEY = tw.Key(5, step=3)
WIDE = tw.codec("thc", bits=16)


def normal(n: int, seed: int = 0, scale: float = 1.0) -> npt.NDArray[np.float32]:
    return (scale * np.random.default_rng([seed, n]).standard_normal(n)).astype(np.float32)


def summed(codec: tw.Codec, xs: list[Array], **options: Any) -> list[tw.Buffer]:
    """The buffers of ranks that agreed on their norms."""
    stats = np.maximum.reduce([codec.measure(x) for x in xs])
    keys = [KEY._replace(rank=rank) for rank in range(len(xs))]
    return [codec.encode(x, stats=stats, key=k, **options) for x, k in zip(xs, keys, strict=True)]


def rotated(x: Array, key: tw.Key = KEY) -> Array:
    """What is rounded, in steps from the middle, not cut off: shape (blocks, 1024), in float64."""
    blocks = -(-x.size // 1024)
    v = np.zeros((blocks, 1024))
    v.reshape(-1)[: x.size] = x
    signs = thc.sign_bits(key_numbers(key), 0, blocks) >> np.uint32(31)
    v *= 1.0 - 2.0 * signs
    i = np.arange(1024)
    hadamard = 1.0 - 2.0 * (np.bitwise_count(i[:, None] & i) % 2)
    norm = np.sqrt((v**2).mean(axis=1, keepdims=True))
    found: Array = v @ hadamard / 1024 * STEPS / norm
    return found


@pytest.mark.parametrize("n", [1024, 5000])
def test_cells_are_the_levels_next_to_the_rotated_values(n: int) -> None:
    """Computed anew with a matrix in double precision."""
    x = normal(n)
    buf = tw.codec("thc").encode(x, key=KEY)
    u = np.clip(rotated(x) + 15, 0, 30)
    cells = buf.static(0)[: u.size].reshape(u.shape).astype(int)
    levels = np.array(LEVELS)
    assert np.isin(cells, levels).all()
    at = np.clip(np.searchsorted(levels, u, side="right") - 1, 0, 14)
    near = (cells == levels[at]) | (cells == levels[at + 1])
    assert (near | (np.abs(u - cells) < 1e-3)).all()
    assert 0.02 < np.mean((u == 0) | (u == 30)) < 0.045


@pytest.mark.slow
@pytest.mark.parametrize("scale", [2.0**-60, 1.0, 2.0**60])
def test_error_bound_and_what_is_usual(scale: float) -> None:
    x = normal(1 << 16, scale=scale)
    for codec in (tw.codec("thc"), tw.codec("thc", norm="tensor"), WIDE):
        y = tw.decode(codec.encode(x, key=KEY))
        assert 0.017 < tw.error(x, y).vnmse < 0.023
    # Few blocks have no value that is cut off: take norms twice as large, the error of which is 4x.
    r = 2 * WIDE.measure(x)
    y = tw.decode(WIDE.encode(x, stats=r, key=KEY)).astype(np.float64).reshape(-1, 1024)
    squares = ((y - x.reshape(y.shape)) ** 2).sum(axis=1)
    inside = (np.abs(rotated(x)) < 30).all(axis=1)
    assert inside.mean() > 0.9
    assert (
        squares[inside] <= (1.001 * 1024 * (96 * r.astype(np.float64) / STEPS) ** 2)[inside]
    ).all()
    assert 0.03 < squares.sum() / (x.astype(np.float64) ** 2).sum() < 0.09


def test_norms_of_blocks_keep_blocks_of_unlike_scale() -> None:
    x = normal(1 << 15) * np.repeat(2.0 ** np.arange(-16, 16, dtype=np.float32), 1024)
    by_block, by_tensor = (
        tw.decode(tw.codec("thc", norm=norm).encode(x, key=KEY)) for norm in NORMS
    )
    for part in (slice(0, 1024), slice(-1024, None)):
        assert tw.error(x[part], by_block[part]).vnmse < 0.03
        assert tw.error(x[part], by_tensor[part]).vnmse > 0.2


@pytest.mark.slow
def test_rounding_has_no_bias() -> None:
    """Over ranks, whose rotation is the same, the mean is that of what was cut off.

    Of 2048 cells drawn 4000 times all are within 5.5 standard deviations of their own mean, which
    fails by chance once in 10^4 times; and the mean of all within 4.
    """
    x, draws = normal(2048, 9), 4000
    total = np.zeros(2048, np.int64)
    for rank in range(draws):
        buf = tw.codec("thc").encode(x, key=KEY._replace(rank=rank), checksum=False)
        total += buf.static(0)[:2048]
    u = np.clip(rotated(x) + 15, 0, 30).reshape(-1)
    levels = np.array(LEVELS)
    at = np.clip(np.searchsorted(levels, u, side="right") - 1, 0, 14)
    deviation = np.sqrt(np.maximum((u - levels[at]) * (levels[at + 1] - u), 1e-3) / draws)
    apart = total / draws - u
    assert (np.abs(apart) < 5.5 * deviation + 1e-4).all()
    assert abs(apart.mean()) < 4 * np.sqrt((deviation**2).mean() / 2048) + 3 * 2**-16


@pytest.mark.parametrize(("bits", "world"), [(8, 1), (8, 2), (8, 5), (8, 8), (16, 3), (16, 40)])
def test_sums_of_ranks(bits: int, world: int) -> None:
    """Cells and the count add up, whatever the width of the words; sums decode as the parts do."""
    codec = tw.codec("thc", bits=bits)
    xs = [normal(2300, r, 1 + r % 3) for r in range(world)]
    buffers = summed(codec, xs)
    total = add(*buffers)
    parts = [tw.decode(b).astype(np.float64) for b in buffers]
    exact = np.sum(parts, axis=0)
    for backend in HOST_BACKENDS:
        found = tw.decode(bytes(total), backend=backend)
        assert np.abs(found - exact).max() < 1e-5 * world * np.abs(parts).max()
    cells = [sketch(b).astype(int) for b in buffers]
    assert np.array_equal(sketch(total), np.sum(cells, axis=0))
    assert sketch(total)[-128 * 8 // bits] == world
    wide = sketch(buffers[0]).view(np.uint32)
    for b in buffers[1:]:
        wide += sketch(b).view(np.uint32)
    assert bytes(seal(buffers[0])) == bytes(total)
    error = tw.error(np.sum(xs, axis=0), tw.decode(total)).vnmse
    assert error < 0.02 * 9 * 3


def test_the_error_of_a_mean_falls_with_the_ranks() -> None:
    x = normal(1 << 14)
    for world, low, high in ((1, 0.017, 0.023), (8, 0.0075, 0.0095)):
        total = tw.decode(add(*summed(tw.codec("thc"), [x] * world)))
        # What is cut off is the same on all ranks and does not average out.
        assert low < tw.error(x, total / world).vnmse < high


def test_more_ranks_than_cells_hold() -> None:
    xs = [normal(1100, r) for r in range(9)]
    buffers = summed(tw.codec("thc"), xs)
    with pytest.raises(ValueError, match="a sum of 9 ranks; allowed: 8"):
        add(*buffers)
    cells = sketch(buffers[0])
    for b in buffers[1:]:
        cells += sketch(b)
    with pytest.raises(tw.FormatError, match="number of ranks"):
        tw.decode(seal(buffers[0]))
    assert tw.decode(add(*summed(WIDE, xs))).shape == (1100,)
    # All ranks at the top level fill the cells to the last.
    assert [MAX_RANKS[b] * 30 <= 2**b - 1 < (MAX_RANKS[b] + 1) * 30 for b in (8, 16)] == [True] * 2


def test_unlike_norms_and_seeds_do_not_add_up() -> None:
    x = normal(1100)
    codec = tw.codec("thc")
    a = codec.encode(x, key=KEY)
    for other in (
        codec.encode(2 * x, key=KEY),
        codec.encode(x, key=KEY._replace(step=4)),
        codec.encode(x, key=KEY._replace(seed=6)),
    ):
        with pytest.raises(ValueError, match=r"by max\), and keys of one seed"):
            add(a, other)
    assert tw.decode(add(a, codec.encode(x, key=KEY._replace(rank=1)))).shape == (1100,)


def test_sums_on_torch_in_place() -> None:
    torch = pytest.importorskip("torch")
    for bits in (8, 16):
        codec = tw.codec("thc", bits=bits)
        xs = [torch.from_numpy(normal(2100, r)) for r in range(3)]
        stats = np.maximum.reduce([codec.measure(x) for x in xs])
        keys = [KEY._replace(rank=r) for r in range(3)]
        buffers = [
            codec.encode(x, stats=stats, key=k, checksum=False)
            for x, k in zip(xs, keys, strict=True)
        ]
        expected = tw.decode(add(*buffers))
        for b in buffers[1:]:
            sketch(buffers[0]).add_(sketch(b))
        assert torch.equal(tw.decode(seal(buffers[0])), expected)


@pytest.mark.parametrize("norm", NORMS)
def test_hops_by_decoding_and_encoding_again(norm: str) -> None:
    codec = tw.codec("thc", norm=norm)
    xs = [normal(3000, r) for r in range(3)]
    buf = codec.encode(xs[0], key=KEY)
    acc = xs[1].copy()
    codec.decode_add(buf, acc)
    assert acc.tobytes() == (xs[1] + tw.decode(buf)).tobytes()
    hop = codec.decode_add_encode(buf, xs[1], key=KEY._replace(rank=1))
    assert bytes(hop) == bytes(codec.encode(acc, key=KEY._replace(rank=1)))
    hop = codec.decode_add_encode(hop, xs[2], key=KEY._replace(rank=2))
    assert tw.error(xs[0] + xs[1] + xs[2], tw.decode(hop)).vnmse < 0.06


@examples(25)
@given(
    dtype=st.sampled_from(Thc.dtypes),
    n=st.integers(600, 5000),
    bits=st.sampled_from((8, 16)),
    norm=st.sampled_from(NORMS),
    chunks=st.integers(1, 3),
    world=st.integers(1, 3),
    scale=st.integers(-20, 10),
)
def test_sizes(
    dtype: str, n: int, bits: int, norm: str, chunks: int, world: int, scale: int
) -> None:
    """Backends agree, sums decode alike in parts, nobody's norm is lost where chunks cut blocks."""
    codec = tw.codec("thc", bits=bits, norm=norm)
    kind = BY_NAME[dtype]
    xs = [(normal(n, r) * 2.0**scale).astype(kind.numpy) for r in range(world)]
    if codec.plan((n,), dtype, chunks=chunks).codec.name == "raw":
        return
    refs = summed(codec, xs, chunks=chunks, backend="ref")
    cpus = summed(codec, xs, chunks=chunks, backend="cpu")
    assert [bytes(b) for b in refs] == [bytes(b) for b in cpus]
    total = add(*cpus)
    y, z = (tw.decode(total, backend=b) for b in HOST_BACKENDS)
    assert y.tobytes() == z.tobytes()
    part = tw.decode(total, start=n // 3, stop=n // 2 + 1)
    assert part.tobytes() == y[n // 3 : n // 2 + 1].tobytes()
    exact = np.sum([x.astype(np.float64) for x in xs], axis=0)
    assert tw.error(exact, y).vnmse < 0.15


@pytest.mark.parametrize("backend", HOST_BACKENDS)
def test_nan_and_infinity_are_loud(backend: str) -> None:
    x = normal(4000)
    x[1500] = np.inf
    x[1501] = -np.inf
    x[3999] = np.nan
    codec = tw.codec("thc")
    assert np.isinf(codec.measure(x)).tolist() == [False, True, False, True]
    y = tw.decode(codec.encode(x, key=KEY, backend=backend), backend=backend)
    assert np.isnan(y).reshape(-1).tolist() == [1024 <= i < 2048 or i >= 3072 for i in range(4000)]
    z = normal(4000, 1)
    total = add(*summed(codec, [x, z, z], backend=backend))
    assert np.array_equal(np.isnan(tw.decode(total, backend=backend)), np.isnan(y))
    whole = tw.codec("thc", norm="tensor")
    assert np.isnan(tw.decode(whole.encode(x, key=KEY, backend=backend))).all()
    for c in (codec, whole):
        with pytest.raises(ValueError, match="finite where an element is not"):
            c.encode(x, stats=c.measure(z), key=KEY, backend=backend)


@pytest.mark.parametrize("backend", HOST_BACKENDS)
def test_zeros_and_extremes(backend: str) -> None:
    x = normal(5 * 1024)
    x[:1024] = -0.0
    x[1024:2048] *= np.float32(2.0**-100)
    x[2048:3072] = np.finfo(np.float32).max * np.sign(x[2048:3072])
    x[3072:4096] = np.finfo(np.float32).max
    y = tw.decode(tw.codec("thc").encode(x, key=KEY, backend=backend), backend=backend)
    assert not y[:2048].view(np.uint32).any()
    assert np.isfinite(y).all()
    for part in (slice(2048, 3072), slice(3072, 4096)):
        half = (a[part].astype(np.float64) for a in (x, y))
        assert tw.error(*half).vnmse < 0.1
    # A zero is rounded like any other value where others are not zero.
    assert np.count_nonzero(tw.decode(tw.codec("thc").encode(x[3000:], key=KEY))) == 2120


def test_measure_does_not_overflow_and_takes_all() -> None:
    x = np.full(3000, np.finfo(np.float32).max)
    for norm in NORMS:
        found = tw.codec("thc", norm=norm).measure(x)
        assert found.dtype == np.float32
        assert np.isfinite(found).all()
    x = normal(2500, 4)
    exact = x.astype(np.float64)
    blocks = np.sqrt([(exact[i : i + 1024] ** 2).sum() / 1024 for i in (0, 1024, 2048)])
    assert tw.codec("thc").measure(x) == pytest.approx(blocks, rel=1e-7)
    tensor = np.sqrt((exact**2).mean())
    assert tw.codec("thc", norm="tensor").measure(x) == pytest.approx([tensor], rel=1e-7)
    assert tw.codec("thc").measure(np.ones(5)) is None
    assert tw.codec("thc").measure(x[:0]).shape == (0,)


@pytest.mark.parametrize("backend", HOST_BACKENDS)
def test_a_chunk_without_elements_counts_ranks_too(backend: str) -> None:
    n, chunks = 340 * 320 + 1, 340
    codec = tw.codec("thc")
    xs = [normal(n, r) for r in range(2)]
    buffers = summed(codec, xs, chunks=chunks, backend=backend)
    assert buffers[0].plan.codec.name == "thc"
    assert buffers[0].plan.chunk_range(chunks - 1) == (n, n)
    total = add(*buffers)
    assert sketch(total, chunks - 1).tolist() == [0] * 1024 + [2] + [0] * 127
    y = tw.decode(total, backend=backend)
    assert tw.error(xs[0].astype(np.float64) + xs[1], y).vnmse < 0.1


def test_small_tensors_and_other_dtypes_are_raw() -> None:
    cases = ((0, "float32", 8), (320, "float32", 8), (4000, "float64", 8), (9999, "bfloat16", 16))
    for n, dtype, bits in cases:
        assert tw.codec("thc", bits=bits).plan((n,), dtype).codec.name == "raw"
    for n, dtype, bits in ((321, "float32", 8), (641, "bfloat16", 8), (577, "float32", 16)):
        assert tw.codec("thc", bits=bits).plan((n,), dtype).codec.name == "thc"


@pytest.mark.parametrize(
    ("params", "error"),
    [
        ({"bits": 12}, ValueError),
        ({"bits": True}, TypeError),
        ({"bits": 8.0}, TypeError),
        ({"norm": "row"}, ValueError),
        ({"norm": 1}, TypeError),
    ],
)
def test_bad_parameters(params: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match="allowed"):
        tw.codec("thc", **params)


@pytest.mark.parametrize("backend", HOST_BACKENDS)
def test_bad_stats_and_keys(backend: str) -> None:
    codec, x = tw.codec("thc"), normal(4000)
    stats = codec.measure(x)
    wrong = stats.copy()
    wrong[2] = np.nan
    for bad in (stats[1:], stats.astype(np.float64), stats[None], -stats, wrong):
        with pytest.raises(ValueError, match=r"stats.*allowed"):
            codec.encode(x, stats=bad, key=KEY, backend=backend)
    with pytest.raises(ValueError, match="key"):
        codec.encode(x, backend=backend)
    assert (codec.homomorphic, codec.reduce_op, codec.lossless) == (True, "max", False)


def test_bits_of_special_values_do_not_warn() -> None:
    for dtype in Thc.dtypes:
        kind = BY_NAME[dtype]
        x = make_bits("random", kind, 3000).view(kind.numpy)
        assert tw.decode(tw.codec("thc").encode(x, key=KEY)).shape == (3000,)
