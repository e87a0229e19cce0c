"""nvfp4: codes of an independent reference, rules at the edges, the page's error bound."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import tightwire as tw
from support import examples
from tightwire.codecs.common.minifloat import unpack
from tightwire.codecs.nvfp4 import BLOCK, ELEMENT
from tightwire.formats.dtypes import BY_NAME

Array = npt.NDArray[Any]
FLT_MAX = np.float32(np.finfo(np.float32).max)
#: Bits of magnitudes from the least to the largest there is, 0 among them.
EXTREME_STATS = (0, 1, 5, 1 << 23, 10 << 23, 60 << 23, 1 << 29, 200 << 23, 0x7F7FFFFF)


def coded(x: Array, **options: Any) -> tuple[Array, Array, np.float32]:
    """Codes, a byte each, scale codes, and the tensor scale."""
    buf = tw.codec("nvfp4").encode(x, **options)
    assert buf.header.codec == "nvfp4"
    static = np.asarray(buf.static(0))
    at = buf.header.sections[0].nbytes
    g = static[at : at + 4].view(np.float32)[0]
    return unpack(static, ELEMENT, 0, x.size), static[at + 16 :][: -(-x.size // BLOCK)], g


def reference(x: Array) -> tuple[Array, Array, np.float32]:
    """As `coded`, of whole blocks of finite values, with the casts of ml_dtypes."""
    values = x.astype(np.float32).reshape(-1, BLOCK)
    largest = np.abs(values).max(axis=1)
    with np.errstate(over="ignore", divide="ignore"):
        top = largest.max()
        g = np.minimum(np.float32(2688) / top, FLT_MAX) if top > 0 else np.float32(1)
        wanted = np.minimum(largest * (g * np.float32(1 / 6)), np.float32(448))
        scales = wanted.astype(ml_dtypes.float8_e4m3fn)
        factors = np.minimum(np.float32(1) / (scales.astype(np.float32) / g), FLT_MAX)
        scaled = np.clip(values * factors[:, None], np.float32(-6), np.float32(6))
    codes = scaled.astype(ml_dtypes.float4_e2m1fn).view(np.uint8).reshape(-1)
    return codes, scales.view(np.uint8), np.float32(g)


def check(x: Array, backend: str) -> None:
    codes, scales, g = coded(x, backend=backend)
    expected = reference(x)
    assert np.array_equal(codes, expected[0])
    assert np.array_equal(scales, expected[1])
    assert g == expected[2]


@pytest.mark.parametrize("scale", [0, -20, 100, -110, -130, -146])
def test_codes_of_the_reference(scale: int, backend: str) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((600, BLOCK)) * np.exp2(rng.integers(-16, 1, (600, 1)))
    x[7] = 0.0
    x[9, ::2] = -0.0
    check(np.ldexp(x, scale).astype(np.float32).reshape(-1), backend)


def test_every_bfloat16_has_the_codes_of_the_reference(backend: str) -> None:
    x = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16)
    wide = x.astype(np.float32)
    for anchor in (-126, -100, -14, 0, 15, 127):
        kept = x[np.abs(wide) <= np.ldexp(np.float32(1.5), anchor)]
        rng = np.random.default_rng(1)
        kept = np.concatenate([kept, rng.permutation(kept), kept[: -2 * kept.size % BLOCK]])
        check(kept, backend)


def test_codes_and_scales_of_gfloat() -> None:
    gfloat = pytest.importorskip("gfloat")
    from gfloat import formats

    rng = np.random.default_rng(2)
    x = (rng.standard_normal(1 << 12) * np.exp2(rng.integers(-9, 1, 1 << 12))).astype(np.float32)
    codes, scales, g = coded(x)
    largest = np.abs(x).reshape(-1, BLOCK).max(axis=1)
    wanted = (largest * (g * np.float32(1 / 6))).astype(np.float64)
    e4m3, e2m1 = formats.format_info_ocp_e4m3, formats.format_info_ocp_e2m1
    s = gfloat.round_ndarray(e4m3, wanted, sat=True)
    assert (gfloat.encode_ndarray(e4m3, s) == scales).all()
    assert (s > 0).all()
    y = x.reshape(-1, BLOCK) * (np.float32(1) / (s.astype(np.float32) / g))[:, None]
    rounded = gfloat.round_ndarray(e2m1, y.astype(np.float64), sat=True)
    assert (gfloat.encode_ndarray(e2m1, rounded).reshape(-1) == codes).all()


@examples(150)
@given(
    name=st.sampled_from(["bfloat16", "float16", "float32"]),
    n=st.integers(400, 1500),
    spread=st.floats(0, 20),
    centre=st.integers(-126, 120),
    seed=st.integers(0, 2**32),
)
@example("bfloat16", 400, 0.0, -126, 0)
def test_property_error_bound(name: str, n: int, spread: float, centre: int, seed: int) -> None:
    kind = BY_NAME[name]
    rng = np.random.default_rng(seed)
    centre = centre // 9 if name == "float16" else centre
    exponents = np.minimum(centre + (spread * rng.standard_normal(n)).astype(int), 124)
    with np.errstate(over="ignore"):
        x = np.ldexp(rng.standard_normal(n), exponents).astype(np.float32).astype(kind.numpy)
    wide = x.astype(np.float64)
    if not np.isfinite(wide).all():
        x[~np.isfinite(wide)] = 1
        wide = x.astype(np.float64)
    _, scales, g = coded(x)
    y = tw.decode(tw.codec("nvfp4").encode(x)).astype(np.float64)
    # As decoders divide: of subnormal quotients float32 keeps few bits.
    d = np.repeat(scales.view(ml_dtypes.float8_e4m3fn).astype(np.float32) / g, BLOCK)[:n]
    d = d.astype(np.float64)
    magnitude = np.abs(wide)
    allowed = np.where(magnitude <= 6 * d, np.maximum(magnitude, d) / 4, magnitude - 6 * d)
    # What 1 / d is too large for.
    allowed = np.where(d <= 2.0**-128, magnitude, allowed)
    least = {"bfloat16": -133, "float16": -24, "float32": -149}[name]
    steps = np.maximum(np.exp2(np.frexp(y)[1] - 1.0 - kind.mantissa), 2.0**least)
    assert (np.abs(y - wide) <= allowed + 2.0**-20 * magnitude + steps / 2).all()
    largest = np.maximum.reduceat(magnitude, np.arange(0, n, BLOCK)).repeat(BLOCK)[:n]
    cut = magnitude > 6 * d
    a = magnitude.max()
    bound = np.where(largest >= a / 28672, magnitude / 16, a / 458752)
    if float(g) < FLT_MAX:
        assert (magnitude - 6 * d <= bound * (1 + 1e-6))[cut].all()


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32"])
def test_special_values(name: str, backend: str) -> None:
    x = np.ones(500, BY_NAME[name].numpy)
    x[3], x[20], x[40] = -0.0, np.nan, -np.inf
    x[64:80] = 0
    codec = tw.codec("nvfp4")
    y = tw.decode(codec.encode(x, backend=backend), backend=backend).astype(np.float32)
    assert np.isnan(y[16:48]).all()
    assert (y[:16] == np.where(np.arange(16) == 3, 0, 1)).all()
    assert np.signbit(y[3])
    assert (y[48:64] == 1).all()
    assert (y[64:80] == 0).all()
    assert (y[80:] == 1).all()
    for value in (np.nan, 0.0):
        x[:] = value
        y = tw.decode(codec.encode(x, backend=backend), backend=backend).astype(np.float32)
        assert (np.isnan(y) if np.isnan(value) else y == 0).all()


def test_stats() -> None:
    rng = np.random.default_rng(3)
    x = rng.standard_normal(3000).astype(np.float32)
    codec = tw.codec("nvfp4")
    assert codec.reduce_op == "max"
    stats = codec.measure(x)
    assert stats is not None
    assert stats.view(np.float32)[0] == np.abs(x).max()
    assert bytes(codec.encode(x, stats=stats)) == bytes(codec.encode(x))
    parts = [codec.measure(x[:1000]), codec.measure(x[1000:])]
    assert max(p[0] for p in parts if p is not None) == stats[0]
    # Smaller than the truth: large values are cut off, and nothing else happens.
    half = np.array([np.float32(1.0).view(np.int32)])
    y = tw.decode(codec.encode(x, stats=half))
    assert np.abs(y).max() <= 1.0
    for bad in ([-1], [0x7F800000], [1, 2], [1.5]):
        with pytest.raises(ValueError, match="allowed: one integer"):
            codec.encode(x, stats=np.array(bad))
    assert codec.measure(np.zeros(5)) is None


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32"])
def test_stats_far_from_the_data_saturate(name: str) -> None:
    """On the host; tests/codecs/test_triton_lossy.py has the kernels."""
    codec = tw.codec("nvfp4")
    x = np.random.default_rng(6).standard_normal(4096).astype(BY_NAME[name].numpy)
    for stats in EXTREME_STATS:
        given: dict[str, Any] = {"stats": np.array([stats])}
        packed = bytes(codec.encode(x, backend="ref", **given))
        assert bytes(codec.encode(x, backend="cpu", **given)) == packed
        decoded = tw.decode(packed, backend="cpu")
        assert decoded.tobytes() == tw.decode(packed, backend="ref").tobytes()
        _, scales, g = coded(x, **given)
        wanted = np.abs(x.astype(np.float64)).reshape(-1, BLOCK).max(1) * (float(g) / 6)
        # Half a step of an e4m3 value, and the float operations.
        cut = wanted > 449
        assert (scales[cut] == 0x7E).all()
        assert cut.all() == (0 < stats <= 1 << 29)


def test_worked_example() -> None:
    x = np.zeros(257, np.float32)
    x[:2] = 1.0, -3.0
    static = np.asarray(tw.codec("nvfp4").encode(x).static(0))
    assert static[0] == 0xF4
    assert static[256:260].tobytes() == b"\0\0\x60\x44"
    assert static[272] == 0x7E
    assert np.count_nonzero(static) == 4
