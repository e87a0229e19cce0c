"""tahquant: its error bounds, which tokens get fewer bits, bad values, limits, sums."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tightwire as tw
from support import examples, make_bits
from tightwire import engine
from tightwire.codecs.tahquant import (
    DIRECTIONS,
    MAX_RANKED,
    NAN_WORD,
    PIVOT,
    Tahquant,
    Views,
    _entropy,
    _log2,
    static_views,
)
from tightwire.formats.dtypes import BY_NAME, DType

DTYPES = tuple(BY_NAME[name] for name in Tahquant.dtypes)
finfo: Any = ml_dtypes.finfo


def views(buf: tw.Buffer, chunk: int = 0) -> Views:
    """The static part of a chunk that is coded by tahquant."""
    spec = buf.plan.codec
    assert isinstance(spec, Tahquant)
    parsed = engine.parse(np.frombuffer(bytes(buf), np.uint8))
    return static_views(spec, parsed.chunk(chunk))


def narrow_tokens(buf: tw.Buffer, chunk: int = 0) -> list[int]:
    found = np.unpackbits(views(buf, chunk).narrow, bitorder="little")
    return [int(i) for i in np.flatnonzero(found)]


def tokens(
    dtype: DType, shape: tuple[int, ...], power: float, spread: float, outliers: float, seed: int
) -> npt.NDArray[Any]:
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(shape) * 2.0 ** (power + spread * rng.standard_normal(shape))
    values[rng.random(shape) < outliers] *= 100
    x: npt.NDArray[Any] = np.clip(values, -60000, 60000).astype(dtype.numpy)
    return x


def rows_of_tiles(x: npt.NDArray[Any], tile: int) -> npt.NDArray[np.float64]:
    """Values, shape (tiles, tile), of a tensor of whole tokens: each ends with zeros."""
    rows = x.reshape(-1, x.shape[-1]).astype(np.float64)
    padded = np.pad(rows, ((0, 0), (0, -rows.shape[1] % tile)))
    return padded.reshape(-1, tile)


def bounds(x: npt.NDArray[Any], y: npt.NDArray[Any], buf: tw.Buffer) -> npt.NDArray[np.float64]:
    """The bound of specs/tahquant.md, "Error bound", shape (tiles, tile); buffers of one chunk."""
    spec = buf.plan.codec
    assert isinstance(spec, Tahquant)
    v = views(buf)
    halves = v.words.copy().view(np.float16).reshape(-1, 2)
    m, s = (halves[:, i].astype(np.float64) for i in (0, 1))
    unit = np.maximum(np.spacing(np.abs(halves[:, 0])).astype(np.float64), 2.0**-24)
    most = np.full(m.size, 15.0 if spec.forward else 63.0)
    if spec.forward:
        narrow = np.unpackbits(v.narrow, bitorder="little").astype(bool)
        most[narrow[np.arange(m.size) // spec.token_tiles]] = 7
    tiles = rows_of_tiles(x, spec.tile)
    largest = np.abs(tiles).max(axis=1)
    spread = v.pivots != 0 if spec.forward else np.zeros(m.size, bool)
    # The largest rotated magnitude: what decodes, and half a step more.
    rotated = np.abs(m) + most * s + s + unit
    base = 1.001 * np.maximum.reduce([s / 2, unit / 2, most * 2.0**-25])
    plain = base + 2.0**-23 * largest
    turned = 8 * (base + 2.0**-23 * rotated) + 2.0**-16 * largest
    info = finfo(y.dtype)
    rounded = np.abs(rows_of_tiles(y, spec.tile)) * float(info.eps) / 2
    rounded += float(info.smallest_subnormal) / 2
    found: npt.NDArray[np.float64] = np.where(spread, turned, plain)[:, None] + rounded
    return found


@examples(200)
@given(
    dtype=st.sampled_from(DTYPES),
    direction=st.sampled_from(DIRECTIONS),
    rows=st.integers(1, 12),
    hidden=st.integers(65, 400),
    power=st.floats(-24, 12),
    spread=st.floats(0, 6),
    outliers=st.sampled_from([0.0, 0.01]),
    seed=st.integers(0, 2**32),
)
def test_error_is_within_the_bound_of_the_page(
    dtype: DType,
    direction: str,
    rows: int,
    hidden: int,
    power: float,
    spread: float,
    outliers: float,
    seed: int,
) -> None:
    x = tokens(dtype, (rows, hidden), power, spread, outliers, seed)
    buf = tw.codec("tahquant", direction=direction).encode(x)
    if buf.header.codec == "raw":
        return
    y: npt.NDArray[Any] = tw.decode(buf)
    tile = 64 if direction == "forward" else 32
    kept = views(buf).words != NAN_WORD
    error = np.abs(rows_of_tiles(y, tile) - rows_of_tiles(x, tile))
    assert (error <= bounds(x, y, buf))[kept].all()
    assert np.isfinite(rows_of_tiles(y, tile)[kept]).all()


def test_log2_is_near_and_monotone() -> None:
    numbers = np.arange(1, 1 << 16)
    found = _log2(numbers)
    assert np.abs(found / 4096 - np.log2(numbers)).max() < 2 / 4096
    assert (np.diff(found) >= 0).all()


def test_narrow_tokens_are_those_of_least_entropy(backend: str) -> None:
    x = tokens(BY_NAME["float32"], (53, 640), -3, 0, 0, 1)
    x *= np.exp(np.arange(53)[:, None] / 40 * np.random.default_rng(2).standard_normal(x.shape))
    x = x.astype(np.float32)[np.random.default_rng(3).permutation(53)]
    p = np.abs(x.astype(np.float64))
    p /= p.sum(axis=1, keepdims=True)
    entropies = -(p * np.log2(p)).sum(axis=1)
    mine = np.array([_entropy(row.view(np.uint32)) for row in x]) / 4096
    assert np.abs(mine - entropies).max() < 5e-3
    buf = tw.codec("tahquant").encode(x, backend=backend)
    assert narrow_tokens(buf) == sorted(np.argsort(entropies)[:10].tolist())


def test_of_equal_tokens_the_first_are_narrow(backend: str) -> None:
    row = make_bits("normal", BY_NAME["bfloat16"], 256).view(ml_dtypes.bfloat16)
    x = np.tile(row, (23, 1))
    x[5] = 0
    buf = tw.codec("tahquant").encode(x, backend=backend)
    assert narrow_tokens(buf) == [0, 1, 2, 5]
    x[9, 3], x[11, 3] = np.nan, -np.inf
    assert len(narrow_tokens(tw.codec("tahquant").encode(x, backend=backend))) == 4


def test_an_outlier_is_spread_where_it_is_twice_the_rest() -> None:
    x = np.ones((2, 2048), np.float32)
    x[0, 70], x[0, 130], x[0, 200], x[1, 0] = 2, -100, np.nextafter(2, 0, dtype=np.float32), -2
    buf = tw.codec("tahquant").encode(x)
    pivots = views(buf).pivots
    assert pivots[[1, 2, 3, 32]].tolist() == [PIVOT + 6, PIVOT + 2, 0, PIVOT]
    assert np.count_nonzero(pivots) == 3
    assert np.abs(tw.decode(buf) - x).max() < 0.2


def test_rotation_helps_tiles_with_an_outlier() -> None:
    rng = np.random.default_rng(5)
    x = rng.standard_normal((64, 1024)).astype(np.float32)
    x[:, ::64] = 30
    error = tw.error(x, tw.decode(tw.encode(x, "tahquant")))
    assert error.vnmse < 1.5e-3


@pytest.mark.parametrize(("direction", "most"), [("forward", 1.45e-2), ("backward", 4e-4)])
def test_squared_error_and_ratio_of_usual_data(direction: str, most: float) -> None:
    x = np.random.default_rng(5).standard_normal((512, 1024)).astype(ml_dtypes.bfloat16)
    buf = tw.codec("tahquant", direction=direction).encode(x)
    assert buf.nbytes / x.nbytes < (0.278 if direction == "forward" else 0.439)
    assert most / 3 < tw.error(x, tw.decode(buf)).vnmse < most


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, -70000.0, 2.0**20])
def test_a_tile_with_a_bad_value_is_lost_and_no_other(bad: float, backend: str) -> None:
    for dtype, direction in ((BY_NAME["float32"], "forward"), (BY_NAME["bfloat16"], "backward")):
        codec = tw.codec("tahquant", direction=direction)
        x = np.full((1, 1500), 0.5, dtype.numpy)
        x[0, ::2] = 1
        expected = tw.decode(codec.encode(x, backend=backend), backend=backend)
        x[0, 700], x[0, 701] = bad, -bad
        y = tw.decode(codec.encode(x, backend=backend), backend=backend)
        tile = 64 if direction == "forward" else 32
        lost = np.arange(1500)[None] // tile == 700 // tile
        nan = ((1 << dtype.exponent + 1) - 1) << dtype.mantissa - 1
        assert (y.view(dtype.bits)[lost] == nan).all()
        assert y[~lost].tobytes() == expected[~lost].tobytes()


def test_values_of_float16_that_are_alone_in_their_tile_come_back() -> None:
    for value in (0.0, 1.0, -3.25, 60000.0, -65504.0, 6e-8):
        x = np.full((3, 512), value, np.float16)
        assert (tw.decode(tw.encode(x, "tahquant")) == x).all()
    assert not tw.decode(tw.encode(np.full((3, 512), 1e-41, np.float32), "tahquant")).any()


def test_shapes_say_what_a_token_is() -> None:
    codec = tw.codec("tahquant")
    x = tokens(BY_NAME["float32"], (2, 25, 128), 0, 1, 0, 7)
    buf = codec.encode(x)
    assert buf.plan.codec == Tahquant("forward", 128)
    assert len(narrow_tokens(buf)) == 10
    flat = tw.codec("tahquant", hidden=128).encode(x.reshape(-1))
    assert bytes(flat.static(0)) == bytes(buf.static(0))
    one = codec.encode(x.reshape(-1))
    assert (one.plan.codec, narrow_tokens(one)) == (Tahquant("forward", 6400), [])
    two = codec.encode(x, chunks=2)
    assert [len(narrow_tokens(two, i)) for i in range(2)] == [5, 5]
    assert (
        tw.decode(two).tobytes()
        == tw.decode(codec.encode(x[:1])).tobytes() + tw.decode(codec.encode(x[1:])).tobytes()
    )


def test_huge_tokens_have_one_width(backend: str) -> None:
    x = make_bits("normal", BY_NAME["float32"], 5000).view(np.float32)
    expected = bytes(tw.codec("tahquant").encode(x, backend="ref").static(0))
    for hidden in (MAX_RANKED + 1, (1 << 63) - 1):
        buf = tw.codec("tahquant", hidden=hidden).encode(x, backend=backend)
        assert bytes(buf.static(0)) == expected
        assert tw.decode(bytes(buf), backend=backend, start=999, stop=1001).size == 2


@pytest.mark.parametrize(
    ("params", "error"),
    [
        ({"direction": "up"}, ValueError),
        ({"direction": 1}, TypeError),
        ({"hidden": -1}, ValueError),
        ({"hidden": 1 << 63}, ValueError),
        ({"hidden": 64.0}, TypeError),
        ({"hidden": True}, TypeError),
    ],
)
def test_bad_parameters_are_refused(params: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match="allowed"):
        tw.codec("tahquant", **params)


def test_parameters_come_back() -> None:
    for direction in DIRECTIONS:
        for hidden in (1, 64, 4097, (1 << 63) - 1):
            spec = Tahquant(direction, hidden)
            assert Tahquant.unpack_params(spec.pack_params()) == spec
