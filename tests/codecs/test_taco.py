"""taco: its error bounds, bad values, limits, rounding at random, and the kernels' bytes."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tightwire as tw
from support import PATTERNS, examples, make_bits
from tightwire.codecs.common.philox import KeyNumbers, random_words
from tightwire.codecs.taco import (
    BLOCKS,
    FORMAT_OF,
    FORMATS,
    ROUNDINGS,
    SCALES,
    TRANSFORMS,
    Taco,
    round_to_code,
    values_of,
)
from tightwire.formats.dtypes import BY_NAME, DType

DTYPES = tuple(BY_NAME[name] for name in Taco.dtypes)
FLOAT8 = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
KEY = tw.Key(11, 22, 33)
finfo: Any = ml_dtypes.finfo


def decoded(x: npt.NDArray[Any], codec: tw.Codec, **options: Any) -> npt.NDArray[Any]:
    buf = codec.encode(x, **options)
    assert buf.header.codec == "taco"
    y: npt.NDArray[Any] = tw.decode(buf)
    assert (y.dtype, y.shape) == (x.dtype, x.shape)
    return y


def vnmse(x: npt.NDArray[Any], y: npt.NDArray[Any]) -> float:
    wide = x.astype(np.float64)
    return float(((y.astype(np.float64) - wide) ** 2).sum() / (wide**2).sum())


def merged_scales(buf: tw.Buffer) -> npt.NDArray[np.float64]:
    """s / alpha of each block of a buffer of one chunk."""
    plan = buf.plan
    spec = plan.codec
    assert isinstance(spec, Taco)
    at = plan.static_offset + plan.layout.sections[0].nbytes
    n = spec.blocks(plan.nelem)
    words = np.frombuffer(bytes(buf), "<f4", n * spec.scale_nbytes // 4, at).astype(np.float64)
    if spec.scales == "merged":
        return words
    return words[1::2] / words[0::2]


def bounds(x: npt.NDArray[Any], y: npt.NDArray[Any], buf: tw.Buffer) -> npt.NDArray[np.float64]:
    """The bound of specs/taco.md, "Error", for each element."""
    spec = buf.plan.codec
    assert isinstance(spec, Taco)
    f, size = FORMAT_OF[spec.format], spec.block
    wide = np.zeros(spec.blocks(x.size) * size)
    wide[: x.size] = x.astype(np.float64)
    blocks = wide.reshape(-1, size)
    m = merged_scales(buf)[:, None]
    relative = 2.0 ** -(f.mantissa + 1)
    least = 2.0 ** (1 - f.bias - f.mantissa)
    root = 1.0 if spec.transform == "none" else size**0.5
    if spec.format == "int8":
        bound = root * m / 2 + 0 * blocks
    elif spec.transform == "none":
        bound = np.maximum(relative * np.abs(blocks), m * least / 2)
    else:
        norm = np.sqrt((blocks**2).sum(axis=1, keepdims=True))
        bound = relative * norm + root * m * least / 2 + 0 * blocks
    twice = 2 if spec.rounding == "stochastic" else 1
    info = finfo(y.dtype)
    rounded = np.abs(y.astype(np.float64)) * float(info.eps) / 2
    rounded += float(info.smallest_subnormal) / 2
    return twice * 1.001 * bound.reshape(-1)[: x.size] + rounded


@examples(250)
@given(
    dtype=st.sampled_from(DTYPES),
    format=st.sampled_from(FORMATS),
    block=st.sampled_from(BLOCKS),
    transform=st.sampled_from(TRANSFORMS),
    scales=st.sampled_from(SCALES),
    rounding=st.sampled_from(ROUNDINGS),
    n=st.integers(1100, 4000),
    power=st.floats(-60, 127),
    spread=st.floats(0, 12),
    zeros=st.floats(0, 1),
    seed=st.integers(0, 2**32),
)
def test_error_is_within_the_bound_of_the_page(
    dtype: DType,
    format: str,
    block: int,
    transform: str,
    scales: str,
    rounding: str,
    n: int,
    power: float,
    spread: float,
    zeros: float,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(n) * 2.0 ** (power + spread * rng.standard_normal(n))
    values[rng.random(n) < zeros] = 0
    largest = float(finfo(dtype.numpy).max)
    x = np.clip(values, -largest, largest).astype(dtype.numpy)
    codec = tw.codec(
        "taco", format=format, block=block, transform=transform, scales=scales, rounding=rounding
    )
    buf = codec.encode(x, key=KEY)
    assert buf.header.codec == "taco"
    y: npt.NDArray[Any] = tw.decode(buf)
    assert np.isfinite(y).all()
    error = np.abs(y.astype(np.float64) - x.astype(np.float64))
    wrong = np.flatnonzero(error > bounds(x, y, buf))
    assert not wrong.size, (x[wrong[:3]], y[wrong[:3]], bounds(x, y, buf)[wrong[:3]])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("params", "most"),
    [
        ({}, 7.2e-4),
        ({"transform": "hadamard"}, 7.2e-4),
        ({"format": "e5m2"}, 2.9e-3),
        ({"format": "int8"}, 5.2e-5),
        ({"format": "int8", "block": 32}, 3.2e-5),
        ({"rounding": "stochastic"}, 1.45e-3),
    ],
)
@pytest.mark.parametrize("heavy", [False, True])
def test_squared_error_of_usual_data(params: dict[str, Any], most: float, heavy: bool) -> None:
    rng = np.random.default_rng(5)
    n = 1 << 18
    values = rng.standard_t(4, n) if heavy else rng.standard_normal(n)
    x = (values * 1e-3).astype(np.float32)
    assert most / 3 < vnmse(x, decoded(x, tw.codec("taco", **params), key=KEY)) < most


def test_merged_scales_decode_to_the_same_values() -> None:
    for transform, format_ in itertools.product(TRANSFORMS, FORMATS):
        for pattern in PATTERNS:
            x = make_bits(pattern, BY_NAME["float32"], 5000).view(np.float32)
            params = {"transform": transform, "format": format_}
            dual, merged = (tw.codec("taco", scales=s, **params) for s in SCALES)
            assert decoded(x, merged).tobytes() == decoded(x, dual).tobytes()
    assert merged.encode(x).nbytes < dual.encode(x).nbytes


@pytest.mark.slow
def test_alpha_cancels() -> None:
    x = (np.random.default_rng(6).standard_normal(1 << 16) * 1e-4).astype(np.float32)
    ash = vnmse(x, decoded(x, tw.codec("taco")))
    hadamard = vnmse(x, decoded(x, tw.codec("taco", transform="hadamard")))
    assert abs(ash / hadamard - 1) < 0.01


@pytest.mark.slow
def test_ratio() -> None:
    x = np.ones(1 << 20, ml_dtypes.bfloat16)
    assert tw.encode(x, "taco").nbytes / x.nbytes < 0.516
    assert tw.encode(x, tw.codec("taco", scales="merged")).nbytes / x.nbytes < 0.508
    assert tw.encode(x.astype(np.float32), "taco").nbytes / (2 * x.nbytes) < 0.258


@pytest.mark.slow
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
def test_a_block_with_a_bad_value_is_lost_and_no_other(
    dtype: DType, bad: float, backend: str
) -> None:
    for transform in TRANSFORMS:
        codec = tw.codec("taco", transform=transform, block=64)
        x = make_bits("normal", dtype, 1500).view(dtype.numpy).copy()
        expected = decoded(x, codec, backend=backend)
        x[700] = bad
        y = decoded(x, codec, backend=backend)
        lost = np.arange(1500) // 64 == 700 // 64
        nan = ((1 << dtype.exponent + 1) - 1) << dtype.mantissa - 1
        assert (y.view(dtype.bits)[lost] == nan).all()
        assert y[~lost].tobytes() == expected[~lost].tobytes()


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
@pytest.mark.parametrize("format_", FORMATS)
def test_largest_numbers_stay_finite(dtype: DType, format_: str) -> None:
    largest = finfo(dtype.numpy).max
    x = np.full(2000, largest, dtype.numpy)
    x[1::2] = -largest
    x[512:1024] = largest
    for transform, block in itertools.product(TRANSFORMS, BLOCKS):
        y = decoded(x, tw.codec("taco", format=format_, transform=transform, block=block))
        assert np.isfinite(y).all()
        ratio = y.astype(np.float64) / x.astype(np.float64)
        assert ratio.min() > 0.9, (transform, block)
        assert ratio.max() <= 1.0


def test_zeros_and_subnormals() -> None:
    for transform, format_ in itertools.product(TRANSFORMS, FORMATS):
        codec = tw.codec("taco", transform=transform, format=format_)
        assert not decoded(np.zeros(3000, np.float32), codec).any()
        assert not decoded(np.full(3000, 1e-41, np.float32), codec).any()
        # float16's subnormal numbers are large enough to be coded.
        x = np.full(3000, 3e-7, np.float16)
        assert vnmse(x[:2816], decoded(x, codec)[:2816]) < 0.01


@pytest.mark.parametrize(
    ("params", "error"),
    [
        ({"format": "e3m4"}, ValueError),
        ({"format": 8}, TypeError),
        ({"block": 100}, ValueError),
        ({"block": 1024}, ValueError),
        ({"block": 16}, ValueError),
        ({"block": "256"}, TypeError),
        ({"block": True}, TypeError),
        ({"transform": "dct"}, ValueError),
        ({"transform": None}, TypeError),
        ({"scales": "one"}, ValueError),
        ({"rounding": "up"}, ValueError),
    ],
)
def test_bad_parameters_are_refused(params: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match="allowed"):
        tw.codec("taco", **params)


def test_parameters_come_back() -> None:
    for chosen in itertools.product(FORMATS, BLOCKS, TRANSFORMS, SCALES, ROUNDINGS):
        spec = Taco(*chosen)
        assert Taco.unpack_params(spec.pack_params()) == spec


@pytest.mark.parametrize("name", FLOAT8)
def test_codes_are_those_of_ml_dtypes(name: str) -> None:
    f = FORMAT_OF[name]
    largest = np.float32(f.largest)
    rng = np.random.default_rng(1)
    bits = rng.integers(0, 1 << 32, 1 << 18, dtype=np.uint64).astype(np.uint32)
    grid = values_of(name)
    between = np.unique(np.abs(grid))
    ties = ((between[1:].astype(np.float64) + between[:-1]) / 2).astype(np.float32)
    v = np.concatenate([bits.view(np.float32), ties, -ties, np.nextafter(ties, largest), grid])
    v = v[np.abs(v) <= largest]
    codes = round_to_code(v, f, None)
    assert codes.tobytes() == v.astype(FLOAT8[name]).tobytes()
    every = np.arange(256, dtype=np.uint8)
    finite = np.isfinite(every.view(FLOAT8[name]).astype(np.float32))
    theirs = every.view(FLOAT8[name]).astype(np.float32)[finite]
    assert values_of(name)[finite].tobytes() == theirs.tobytes()


def test_codes_of_int8() -> None:
    v = np.concatenate([np.arange(-1270, 1271) / 10, np.arange(-127, 127) + 0.5])
    codes = round_to_code(v.astype(np.float32), FORMAT_OF["int8"], None)
    assert codes.view(np.int8).tolist() == np.rint(v.astype(np.float32)).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_stochastic_rounding_is_unbiased(name: str) -> None:
    """The mean of 2^16 draws of each of 400 values is less than 6 standard errors off.

    Draws lie in one step of width w, so by Hoeffding's inequality independent and unbiased ones
    are further off than 6 w / 2 / sqrt(draws) with a chance below 2 exp(-18): for all 400 values
    that is 1.3e-5, a confidence of 0.99998. The key is fixed, so the test never wavers.
    """
    f = FORMAT_OF[name]
    draws = 1 << 16
    rng = np.random.default_rng(3)
    scale = f.largest * 2.0 ** rng.uniform(-20 if name != "int8" else -6, 0, 400)
    v = (rng.uniform(-1, 1, 400) * scale).astype(np.float32)
    grid = np.unique(values_of(name).astype(np.float64))
    for i, value in enumerate(v):
        words = random_words(KeyNumbers(9, i, 0), 0, draws)
        codes = round_to_code(np.full(draws, value, np.float32), f, words)
        drawn = values_of(name)[codes].astype(np.float64)
        k = int(np.searchsorted(grid, float(value), side="right"))
        below, above = grid[k - 1], grid[min(k, grid.size - 1)]
        assert set(drawn) <= {below, above} or set(drawn) <= {float(value)}
        width = above - below
        assert abs(drawn.mean() - float(value)) <= 6 * width / 2 / draws**0.5


@pytest.mark.parametrize("name", FORMATS)
def test_values_of_the_format_are_never_rounded(name: str) -> None:
    f = FORMAT_OF[name]
    grid = values_of(name)
    for word in (0, 1, (1 << 31) + 7, (1 << 32) - 1):
        codes = round_to_code(grid, f, np.full(256, word, np.uint32))
        assert (values_of(name)[codes] == grid).all()


def test_mean_of_many_encodings_is_the_tensor() -> None:
    codec = tw.codec("taco", rounding="stochastic", format="int8")
    x = make_bits("normal", BY_NAME["float32"], 4096).view(np.float32)
    total = np.zeros(x.size)
    for step in range(200):
        total += decoded(x, codec, key=tw.Key(1, step))
    one = vnmse(x, decoded(x, codec, key=tw.Key(1)))
    assert vnmse(x, total / 200) < one / 100
