"""sdp4bit: its error bounds, the rotated domain, both of its uses, bad values, the fused sums."""

from __future__ import annotations

import itertools
import sys
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tightwire as tw
from support import examples, make_bits
from tightwire.codecs.common.philox import KeyNumbers, random_words
from tightwire.codecs.sdp4bit import BITS, GROUPS, ROTATE, ROUNDINGS, RUN, Sdp4bit, round_to_code
from tightwire.formats.dtypes import BY_NAME, DType

Array = npt.NDArray[Any]
DTYPES = tuple(BY_NAME[name] for name in Sdp4bit.dtypes)
KEY = tw.Key(11, 22, 33)
INSIDE = tw.codec("sdp4bit", bits=8, rotate="encode")
BETWEEN = tw.codec("sdp4bit", bits=4, rotate="decode")
WEIGHTS = tw.codec("sdp4bit", bits=4, group=2048, rotate="none")
finfo: Any = ml_dtypes.finfo


def decoded(x: Array, codec: tw.Codec, **options: Any) -> Array:
    buf = codec.encode(x, **options)
    assert buf.header.codec == "sdp4bit"
    y: Array = tw.decode(buf)
    assert (y.dtype, y.shape) == (x.dtype, x.shape)
    return y


def vnmse(x: Array, y: Array) -> float:
    wide = x.astype(np.float64)
    return float(((y.astype(np.float64) - wide) ** 2).sum() / (wide**2).sum())


def hadamard(x: Array) -> npt.NDArray[np.float64]:
    """The page's rotation as a product with the matrix, float64."""
    matrix = np.ones((1, 1))
    while matrix.shape[0] < RUN:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    whole = x.size // RUN * RUN
    rotated = x[:whole].astype(np.float64).reshape(-1, RUN) @ matrix / RUN
    return np.concatenate([rotated.reshape(-1), x[whole:].astype(np.float64) / 8])


def scales_of(buf: tw.Buffer) -> npt.NDArray[np.float64]:
    """The scale of each element of a buffer of one chunk."""
    spec, n = buf.plan.codec, buf.plan.nelem
    assert isinstance(spec, Sdp4bit)
    at = buf.plan.static_offset + buf.plan.layout.sections[0].nbytes
    scales = np.frombuffer(bytes(buf), "<f4", spec.groups(n), at).astype(np.float64)
    return np.repeat(scales, spec.group)[:n]


@examples(200)
@given(
    dtype=st.sampled_from(DTYPES),
    bits=st.sampled_from(BITS),
    group=st.sampled_from(GROUPS),
    rotate=st.sampled_from(ROTATE),
    rounding=st.sampled_from(ROUNDINGS),
    n=st.integers(1, 6000),
    power=st.floats(-80, 127),
    spread=st.floats(0, 12),
    zeros=st.floats(0, 1),
    seed=st.integers(0, 2**32),
)
def test_error_is_within_the_bound_of_the_page(
    dtype: DType,
    bits: int,
    group: int,
    rotate: str,
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
    codec = tw.codec("sdp4bit", bits=bits, group=group, rotate=rotate, rounding=rounding)
    buf = codec.encode(x, key=KEY)
    if buf.header.codec == "raw":
        assert rotate in ("both", "none")
        return
    y: Array = tw.decode(buf)
    assert np.isfinite(y).all()
    wide = x.astype(np.float64)
    # Half a step of the codes, on the way back a sum of 32 of them, or 8.
    steps = np.full(n, 1 / 2)
    if rotate in ("both", "decode"):
        steps = np.where(np.arange(n) < n // RUN * RUN, 16.0, 4.0)
    expected = hadamard(x) if rotate == "encode" else wide
    if rotate == "decode":
        # What went in was a rotated tensor: rotated back it is 32 times that.
        whole = n // RUN * RUN
        expected = hadamard(x) * np.where(np.arange(n) < whole, 32, 64)
        expected = np.clip(expected, -largest, largest)
    info = finfo(dtype.numpy)
    rounded = np.abs(y.astype(np.float64)) * float(info.eps) / 2
    rounded += float(info.smallest_subnormal) / 2
    twice = 2 if rounding == "stochastic" else 1
    bound = 1.003 * twice * steps * scales_of(buf) + rounded
    wrong = np.flatnonzero(np.abs(y.astype(np.float64) - expected) > bound)
    assert not wrong.size, (expected[wrong[:3]], y[wrong[:3]], bound[wrong[:3]])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("params", "most"),
    [
        ({"bits": 8}, 5e-5),
        ({"bits": 8, "rotate": "none"}, 5e-5),
        ({}, 1.6e-2),
        ({"rotate": "none"}, 1.6e-2),
        ({"group": 32}, 1e-2),
        ({"rounding": "stochastic"}, 3.2e-2),
    ],
)
def test_squared_error_of_usual_data(params: dict[str, Any], most: float) -> None:
    x = (np.random.default_rng(5).standard_normal(1 << 18) * 1e-3).astype(np.float32)
    assert most / 2 < vnmse(x, decoded(x, tw.codec("sdp4bit", **params), key=KEY)) < most


def test_rotation_spreads_outliers() -> None:
    x = np.random.default_rng(6).standard_normal(1 << 16).astype(np.float32)
    x[::1000] *= 50
    rotated, plain = (decoded(x, tw.codec("sdp4bit", rotate=r)) for r in ("both", "none"))
    usual = np.arange(x.size) % 1000 != 0
    assert vnmse(x[usual], rotated[usual]) < vnmse(x[usual], plain[usual]) / 2


def test_ratio() -> None:
    x = np.ones(1 << 20, ml_dtypes.bfloat16)
    assert tw.encode(x, "sdp4bit").nbytes / x.nbytes < 0.2659
    assert WEIGHTS.encode(x).nbytes / x.nbytes < 0.2512
    assert tw.encode(x, tw.codec("sdp4bit", bits=8)).nbytes / x.nbytes < 0.5159


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
def test_rotated_tensors_are_those_of_the_matrix(dtype: DType, backend: str) -> None:
    x = make_bits("scales", dtype, 3001).view(dtype.numpy)
    codec = tw.codec("sdp4bit", bits=8, group=32, rotate="encode")
    buf = codec.encode(x, backend=backend)
    y = tw.decode(buf, backend=backend).astype(np.float64)
    slack = np.abs(y) * float(finfo(dtype.numpy).eps) + float(finfo(dtype.numpy).tiny)
    assert (np.abs(y - hadamard(x)) <= 0.501 * scales_of(buf) + slack).all()
    runs = np.abs(x[:2976].astype(np.float64)).reshape(-1, RUN)
    assert (np.abs(y[:2976]).reshape(-1, RUN).max(axis=1) <= 1.01 * runs.max(axis=1)).all()
    back = tw.decode(BETWEEN.encode(y.astype(np.float32), backend=backend), backend=backend)
    assert vnmse(x, back) < 2e-2


@pytest.mark.parametrize("n", [8192, 5003])
def test_two_levels(n: int) -> None:
    """Two nodes of four ranks: 8 bits in the node, 4 bits between, one rotation each way."""
    rng = np.random.default_rng(8)
    gradients = rng.standard_normal((2, 4, n)).astype(np.float32) * np.float32(1e-3)
    total = np.zeros(n, np.float32)
    for node in gradients:
        local = np.zeros(n, np.float32)
        for gradient in node[:-1]:
            INSIDE.decode_add(INSIDE.encode(gradient), local)
        summed = BETWEEN.decode_add_encode(INSIDE.encode(node[-1]), local)
        BETWEEN.decode_add(summed, total)
    exact = gradients.astype(np.float64).sum(axis=(0, 1))
    error = vnmse(exact, total)
    once = vnmse(exact, decoded(exact.astype(np.float32), tw.codec("sdp4bit")))
    assert error < 1.2 * once


def test_errors_of_weight_differences_do_not_add_up() -> None:
    """A replica stays as near to the weights as one difference is; of open differences it drifts.

    Two ranks add the same decoded difference, and their replicas stay the same.
    """
    rng = np.random.default_rng(9)
    n = 6000
    weights = rng.standard_normal(n).astype(np.float32)
    owner, other = weights.copy(), weights.copy()
    drifting, before = weights.copy(), weights.copy()
    errors, drifts = [], []
    for _ in range(60):
        weights += (rng.standard_normal(n) * 1e-3).astype(np.float32)
        buf = WEIGHTS.encode(weights - owner)
        WEIGHTS.decode_add(buf, owner)
        WEIGHTS.decode_add(bytes(buf), other)
        WEIGHTS.decode_add(WEIGHTS.encode(weights - before), drifting)
        before[:] = weights
        assert owner.tobytes() == other.tobytes()
        bound = scales_of(buf) * 0.502 + np.abs(weights) * 2.0**-22
        assert (np.abs(owner.astype(np.float64) - weights) <= bound).all()
        errors.append(float(((owner - weights) ** 2).mean()))
        drifts.append(float(((drifting - weights) ** 2).mean()))
    assert max(errors[30:]) < 1.5 * max(errors[1:10])
    assert drifts[-1] > 20 * errors[-1]


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
def test_a_group_with_a_bad_value_is_lost_and_no_other(
    dtype: DType, bad: float, backend: str
) -> None:
    for rotate, bits in itertools.product(ROTATE, BITS):
        codec = tw.codec("sdp4bit", rotate=rotate, group=64, bits=bits)
        x = make_bits("normal", dtype, 1500).view(dtype.numpy).copy()
        expected = decoded(x, codec, backend=backend)
        x[700] = bad
        buf = codec.encode(x, backend=backend)
        y = tw.decode(buf, backend=backend)
        lost = np.arange(1500) // 64 == 700 // 64
        nan = ((1 << dtype.exponent + 1) - 1) << dtype.mantissa - 1
        assert (y.view(dtype.bits)[lost] == nan).all()
        assert y[~lost].tobytes() == expected[~lost].tobytes()
        acc = np.ones(1500, np.float32)
        codec.decode_add(buf, acc)
        assert np.array_equal(np.isnan(acc), lost)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
def test_largest_numbers_stay_finite(dtype: DType) -> None:
    largest = finfo(dtype.numpy).max
    x = np.full(2009, largest, dtype.numpy)
    x[1::2] = -largest
    x[512:1024] = largest
    for rotate, bits in itertools.product(("both", "none"), BITS):
        y = decoded(x, tw.codec("sdp4bit", rotate=rotate, bits=bits, group=256))
        assert np.isfinite(y).all()
        ratio = y.astype(np.float64) / x.astype(np.float64)
        assert ratio.min() > 0.9
        assert ratio.max() <= 1.0
    # Sums of 32 of the largest values.
    y = decoded(x, tw.codec("sdp4bit", rotate="decode"))
    assert np.isfinite(y).all()
    assert np.abs(y).max() == largest


def test_zeros_and_subnormals() -> None:
    for rotate, bits in itertools.product(ROTATE, BITS):
        codec = tw.codec("sdp4bit", rotate=rotate, bits=bits)
        for x in (np.full(3000, -0.0, np.float32), np.full(3000, 1e-41, np.float32)):
            buf = codec.encode(x)
            assert not np.signbit(tw.decode(buf)).any()
            assert not tw.decode(buf).any()
            assert (scales_of(buf) == 1).all()
        # float16's subnormal numbers are large enough to be coded.
        x16 = np.full(3000, 3e-7, np.float16)
        assert rotate != "both" or vnmse(x16, decoded(x16, codec)) < 0.01


def test_every_size_is_rotated_where_both_sides_count_on_it(backend: str) -> None:
    """Raw would not rotate, and the two codecs of a sum need not gain at the same sizes."""
    for shape in ((), (0,), (1,), (31,), (32,), (150,), (0, 7), (3, 11)):
        x = np.full(shape, 1.25, np.float32)
        buf = INSIDE.encode(x, backend=backend)
        rotated = tw.decode(buf, backend=backend)
        assert buf.header.codec == "sdp4bit"
        total = BETWEEN.decode_add_encode(buf, rotated, backend=backend)
        assert total.header.codec == "sdp4bit"
        y = tw.decode(total, backend=backend)
        assert y.shape == shape
        assert np.allclose(y, 2 * x, rtol=0.15)
    for codec in (INSIDE, BETWEEN):
        for dtype in ("float64", "int32", "float8_e4m3fn"):
            with pytest.raises(ValueError, match="allowed: float16, bfloat16, float32"):
                codec.plan((4000,), dtype)


@pytest.mark.parametrize(
    ("params", "error"),
    [
        ({"bits": 6}, ValueError),
        ({"bits": "4"}, TypeError),
        ({"bits": True}, TypeError),
        ({"group": 100}, ValueError),
        ({"group": 16}, ValueError),
        ({"group": 8192}, ValueError),
        ({"group": 128.0}, TypeError),
        ({"rotate": True}, TypeError),
        ({"rotate": "once"}, ValueError),
        ({"rounding": "up"}, ValueError),
        ({"rounding": None}, TypeError),
    ],
)
def test_bad_parameters_are_refused(params: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match="allowed"):
        tw.codec("sdp4bit", **params)


def test_parameters_come_back() -> None:
    for chosen in itertools.product(BITS, GROUPS, ROTATE, ROUNDINGS):
        spec = Sdp4bit(*chosen)
        assert Sdp4bit.unpack_params(spec.pack_params()) == spec


@pytest.mark.slow
@pytest.mark.parametrize("largest", [7, 127])
def test_stochastic_rounding_is_unbiased(largest: int) -> None:
    """Means of 2^16 draws of each of 200 values are less than 6 standard errors off.

    By Hoeffding's inequality draws from one step are further off than 3 / sqrt(draws) with a chance
    below 2 exp(-18). The key is fixed, so the test never wavers.
    """
    draws = 1 << 16
    v = (np.random.default_rng(3).uniform(-1, 1, 200) * largest).astype(np.float32)
    for i, value in enumerate(v):
        words = random_words(KeyNumbers(9, i, 0), 0, draws)
        codes = round_to_code(np.full(draws, value, np.float32), largest, words)
        assert set(codes) <= {np.floor(value), np.ceil(value)}
        assert abs(codes.mean() - float(value)) <= 3 / draws**0.5
    whole = np.arange(-largest, largest + 1).astype(np.float32)
    for word in (0, 1, (1 << 32) - 1):
        words = np.full(whole.size, word, np.uint32)
        assert (round_to_code(whole, largest, words) == whole).all()


FUSED = (
    (tw.codec("sdp4bit"), tw.codec("sdp4bit")),
    (INSIDE, BETWEEN),
    (WEIGHTS, tw.codec("sdp4bit", bits=8, group=32, rounding="stochastic")),
    (tw.codec("sdp4bit", bits=8, group=4096), tw.codec("sdp4bit", rotate="encode", group=64)),
)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
def test_fused_sums_are_those_of_the_steps(dtype: DType) -> None:
    for source, codec in FUSED:
        for pattern, n, chunks in (("special", 1001, 3), ("normal", 70_001, 1), ("random", 900, 2)):
            x = make_bits(pattern, dtype, n, seed=1).view(dtype.numpy)
            given = make_bits("special", dtype, n).view(dtype.numpy)
            buf = source.encode(given, chunks=chunks, key=KEY)
            y = tw.decode(buf, backend="ref")
            total = (y.astype(np.float32) + x.astype(np.float32)).astype(dtype.numpy)
            found = codec.decode_add_encode(buf, x, chunks=chunks, key=KEY)
            expected = codec.encode(total, chunks=chunks, key=KEY, backend="ref")
            assert bytes(found) == bytes(expected), (source, codec, pattern)
            acc = x.astype(np.float32)
            expected_acc = acc + y.astype(np.float32)
            assert codec.decode_add(buf, acc) is acc
            assert np.array_equal(acc, expected_acc, equal_nan=True)


def test_damage_is_found_before_a_sum_of_two_codecs() -> None:
    x = np.ones(601, np.float32)
    for at, value, reason in ((130, 1, "checksum_mismatch"), (128, 0x80, "bad_payload")):
        checksum = reason == "checksum_mismatch"
        data = bytearray(bytes(INSIDE.encode(x, checksum=checksum)))
        data[at] ^= value if checksum else data[at] ^ value
        with pytest.raises(tw.FormatError, match=reason):
            BETWEEN.decode_add_encode(bytes(data), x, checksum=checksum)


def test_sums_of_two_codecs_take_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    x = make_bits("normal", BY_NAME["float32"], 4000).view(np.float32)
    buf = INSIDE.encode(x)
    steps = BETWEEN.decode_add_encode(buf, x, backend="ref")
    # The module: the package's `codec` is the function of that name.
    monkeypatch.setattr(sys.modules["tightwire.codec"], "decode", None)
    assert bytes(BETWEEN.decode_add_encode(buf, x)) == bytes(steps)
