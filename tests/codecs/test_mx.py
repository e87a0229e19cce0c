"""mx: the codes of other implementations, rules at the edges, the page's error bound."""

from __future__ import annotations

import warnings
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tightwire as tw
from support import examples, make_bits
from tightwire.codecs.common.minifloat import BY_NAME, Element, unpack
from tightwire.codecs.mx import BLOCK
from tightwire.formats.dtypes import BY_NAME as DTYPES
from tightwire.formats.dtypes import DType

Array = npt.NDArray[Any]
BFLOAT16 = DTYPES["bfloat16"]
FLOATS = tuple(n for n in BY_NAME if n != "int8")
RULES = ("floor", "ceil")
#: Scale exponents of blocks: the smallest, those of usual data, the largest.
ANCHORS = (-126, -125, -110, -64, -20, -9, -1, 0, 1, 8, 60, 120, 126, 127)
ML_DTYPES = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
}
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0, "e3m2": 28.0, "e2m3": 7.5, "e2m1": 6.0}


def all_bfloat16() -> Array:
    """Every bfloat16."""
    return np.arange(1 << 16, dtype=np.uint16).view(BFLOAT16.numpy)


def anchored(exponent: int) -> Array:
    """Blocks that hold every bfloat16 up to 1.5 * 2^exponent, after that value itself."""
    x = all_bfloat16()
    anchor = np.ldexp(np.float32(1.5), exponent)
    kept = x[np.abs(x.astype(np.float32)) <= anchor]
    n = -(-kept.size // (BLOCK - 1))
    blocks = np.zeros((n, BLOCK), x.dtype)
    blocks[:, 0] = anchor
    blocks[:, 1:] = np.resize(kept, (n, BLOCK - 1))
    return blocks.reshape(-1)


def coded(x: Array, element: str, rule: str = "floor") -> tuple[Array, Array]:
    """Codes, a byte each, and scale bytes, by the default backend."""
    buf = tw.codec("mx", element=element, scale_rule=rule).encode(x)
    assert buf.header.codec == "mx"
    static = np.asarray(buf.static(0))
    at = buf.header.sections[0].nbytes
    codes = unpack(static, BY_NAME[element], 0, x.size)
    return codes, static[at:][: -(-x.size // BLOCK)]


def exponents(x: Array) -> npt.NDArray[np.int64]:
    """floor(log2) of the largest magnitude of each block of finite values, none of them zero."""
    largest = np.abs(x.astype(np.float64)).reshape(-1, BLOCK).max(axis=1)
    found: npt.NDArray[np.int64] = np.frexp(largest)[1].astype(np.int64) - 1
    return found


@pytest.mark.slow
def test_every_bfloat16_has_the_codes_of_ml_dtypes() -> None:
    for element, kind in ML_DTYPES.items():
        largest = LARGEST[element]
        for rule in RULES:
            for anchor in ANCHORS:
                x = anchored(anchor)
                codes, scales = coded(x, element, rule)
                up = rule == "ceil" and np.frexp(largest)[0] * 2 < 1.5
                e = exponents(x) - (np.frexp(largest)[1] - 1) + up
                assert (scales == np.clip(e, -127, 127) + 127).all()
                y = np.ldexp(x.astype(np.float64), 127 - np.repeat(scales.astype(int), BLOCK))
                expected = np.clip(y, -largest, largest).astype(kind).view(np.uint8)
                assert (codes == expected).all(), (element, rule, anchor)


@pytest.mark.slow
def test_every_bfloat16_has_the_codes_of_gfloat() -> None:
    gfloat = pytest.importorskip("gfloat")
    from gfloat import formats

    infos = {
        "e4m3": formats.format_info_ocp_e4m3,
        "e5m2": formats.format_info_ocp_e5m2,
        "e3m2": formats.format_info_ocp_e3m2,
        "e2m3": formats.format_info_ocp_e2m3,
        "e2m1": formats.format_info_ocp_e2m1,
        "int8": formats.format_info_ocp_int8,
    }
    for element, info in infos.items():
        for rule, anchor in (("floor", 0), ("ceil", -126), ("floor", 127)):
            x = anchored(anchor)
            codes, scales = coded(x, element, rule)
            y = np.ldexp(x.astype(np.float64), 127 - np.repeat(scales.astype(int), BLOCK))
            if element == "int8":
                # Ours is symmetric: -2 is not used.
                y = np.maximum(y, -127 / 64)
            rounded = gfloat.round_ndarray(info, y, sat=True)
            expected = gfloat.encode_ndarray(info, rounded)
            assert (codes == expected).all(), (element, rule, anchor)


@pytest.mark.slow
def test_scales_and_codes_of_torchao() -> None:
    torch = pytest.importorskip("torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mx_tensor = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    kinds = {
        "e4m3": torch.float8_e4m3fn,
        "e5m2": torch.float8_e5m2,
        "e3m2": mx_tensor.DTYPE_FP6_E3M2,
        "e2m3": mx_tensor.DTYPE_FP6_E2M3,
        "e2m1": torch.float4_e2m1fn_x2,
    }
    # In the order of their bits, so that blocks of zeros, infinities and NaN are among them.
    cases = [all_bfloat16(), *(anchored(anchor) for anchor in ANCHORS)]
    for element, kind in kinds.items():
        for x in cases:
            bits = torch.from_numpy(x.view(np.int16).reshape(-1, BLOCK).copy())
            scale, data = mx_tensor.to_mx(bits.view(torch.bfloat16), kind, BLOCK)
            codes, scales = coded(x, element)
            assert (scale.view(torch.uint8).numpy().reshape(-1) == scales).all(), element
            theirs = data.view(torch.uint8).numpy().reshape(-1)
            if element == "e2m1":
                theirs = np.stack([theirs & 15, theirs >> 4], axis=1).reshape(-1)
            # It divides by 2^-126 where the scale is 2^-127, and has codes for what is NaN.
            per_element = np.repeat(scales, BLOCK)
            same = (per_element > 0) & (per_element < 255)
            assert (codes == theirs)[same].all(), element


@pytest.mark.slow
def test_ceil_is_the_rule_of_torchao() -> None:
    torch = pytest.importorskip("torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mx_tensor = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    mode = mx_tensor.ScaleCalculationMode.RCEIL
    for element, kind in (("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)):
        x = np.repeat(np.arange(1 << 12, 0x7F80, dtype=np.uint16), BLOCK).view(BFLOAT16.numpy)
        bits = torch.from_numpy(x.view(np.int16).reshape(-1, BLOCK).copy())
        scale, data = mx_tensor.to_mx(bits.view(torch.bfloat16), kind, BLOCK, mode)
        codes, scales = coded(x, element, "ceil")
        assert (scale.view(torch.uint8).numpy().reshape(-1) == scales).all()
        assert (data.view(torch.uint8).numpy().reshape(-1) == codes).all()


def bound(x: Array, y: Array, scales: Array, element: Element, dtype: DType) -> Array:
    """The page's "Error bound" of each element, float64; NaN where it has none."""
    u = np.repeat(np.ldexp(1.0, scales.astype(int) - 127), BLOCK)[: x.size]
    largest = (element.largest & (1 << element.mantissa) - 1 | 1 << element.mantissa) * 2.0 ** (
        element.emax - element.mantissa
    )
    magnitude = np.abs(x.astype(np.float64))
    if element.name == "int8":
        rounding = u / 128
    else:
        rounding = 0.5 ** (element.mantissa + 1) * np.maximum(
            magnitude, u * 2.0 ** (1 - element.bias)
        )
    result = np.where(magnitude <= largest * u, rounding, magnitude - largest * u)
    least = {"bfloat16": -133, "float16": -24, "float32": -149}[dtype.name]
    result += 2.0 ** (least - 1)
    special = ~np.isfinite(x.astype(np.float64))
    blocks = np.zeros(scales.size, bool)
    blocks[np.flatnonzero(special) // BLOCK] = True
    result[np.repeat(blocks, BLOCK)[: x.size]] = np.nan
    return result


@examples(200)
@given(
    dtype=st.sampled_from(["bfloat16", "float16", "float32"]),
    element=st.sampled_from(sorted(BY_NAME)),
    rule=st.sampled_from(RULES),
    n=st.integers(300, 1500),
    spread=st.floats(0, 60),
    centre=st.integers(-150, 127),
    seed=st.integers(0, 2**32),
)
def test_property_error_bound(
    dtype: str, element: str, rule: str, n: int, spread: float, centre: int, seed: int
) -> None:
    kind, e = DTYPES[dtype], BY_NAME[element]
    rng = np.random.default_rng(seed)
    with np.errstate(over="ignore"):
        values = np.ldexp(
            rng.standard_normal(n), centre + (spread * rng.standard_normal(n)).astype(int)
        )
        x = values.astype(np.float32).astype(kind.numpy)
    _, scales = coded(x, element, rule)
    y = tw.decode(tw.codec("mx", element=element, scale_rule=rule).encode(x))
    allowed = bound(x, y, scales, e, kind)
    finite = ~np.isnan(allowed)
    with np.errstate(invalid="ignore"):
        error = np.abs(y.astype(np.float64) - x.astype(np.float64))
    top = 65504.0 if dtype == "float16" else 2.0**127
    overflowed = np.isinf(y.astype(np.float64)) & (np.abs(x.astype(np.float64)) > top / 2)
    assert (error <= allowed)[finite & ~overflowed].all()
    assert rule == "ceil" or not overflowed[finite].any()


@pytest.mark.slow
def test_ceil_saturates_nothing() -> None:
    x = np.linspace(1.4, 2.0, 1 << 14, endpoint=False).astype(np.float32)
    for element, e in BY_NAME.items():
        for rule in RULES:
            codes, _ = coded(x, element, rule)
            y = tw.decode(tw.codec("mx", element=element, scale_rule=rule).encode(x))
            magnitudes = np.abs(codes.view(np.int8)) if e.is_integer else codes & (e.sign - 1)
            at_top = magnitudes == e.largest
            significand = e.largest & (1 << e.mantissa) - 1 | 1 << e.mantissa
            half_step = np.abs(y[at_top]) / (2 * significand)
            cut = np.abs(x[at_top]) - np.abs(y[at_top]) > half_step
            assert cut.any() == (rule == "floor"), (element, rule)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("element", BY_NAME)
def test_special_values(dtype: str, element: str, backend: str) -> None:
    kind = DTYPES[dtype].numpy
    x = np.ones(320, kind)
    x[:32] = 0
    x[3] = -0.0
    x[40] = np.nan
    x[70], x[71] = np.inf, -np.inf
    y = tw.decode(tw.codec("mx", element=element).encode(x, backend=backend), backend=backend)
    wide = y.astype(np.float32)
    assert (wide[:32] == 0).all()
    assert np.signbit(wide[3]) == (element != "int8")
    assert np.flatnonzero(np.signbit(wide[:32])).tolist() == ([3] if element != "int8" else [])
    assert np.isnan(wide[32:64]).all()
    assert (wide[96:] == 1).all()
    if element == "int8":
        assert np.isnan(wide[64:96]).all()
    else:
        assert wide[70] == np.inf
        assert wide[71] == -np.inf
        assert (wide[72:96] == 0).all()


def scales_of(buf: tw.Buffer, i: int = 0) -> Array:
    """Scale bytes of chunk `i`."""
    lo, hi = buf.plan.chunk_range(i)
    at = buf.header.sections[0].nbytes
    found: Array = np.asarray(buf.static(i))[at:][: -(-(hi - lo) // BLOCK)]
    return found


@pytest.mark.slow
@examples(60)
@given(
    dtype=st.sampled_from(["bfloat16", "float16", "float32"]),
    element=st.sampled_from(sorted(BY_NAME)),
    n=st.integers(300, 1500),
    chunks=st.integers(1, 4),
    shift=st.integers(-300, 300),
    seed=st.integers(0, 2**32),
)
def test_property_scales_that_are_given(
    dtype: str, element: str, n: int, chunks: int, shift: int, seed: int
) -> None:
    """They are taken, whatever they are, and the page's error bound holds with them."""
    kind, rng = DTYPES[dtype], np.random.default_rng(seed)
    low, high = (-24, 15) if dtype == "float16" else (-149, 126)
    x = np.ldexp(rng.standard_normal(n), rng.integers(low, high, n)).astype(np.float32)
    with np.errstate(over="ignore"):
        x = np.nan_to_num(x.astype(kind.numpy).astype(np.float32), posinf=1, neginf=-1)
    x = x.astype(kind.numpy)
    codec = tw.codec("mx", element=element, scale_rule="agreed")
    measured = codec.measure(x).astype(int)
    stats = np.clip(measured + rng.integers(min(shift, 0), max(shift, 1), measured.size), 0, 254)
    stats = stats.astype(np.uint8)
    before = stats.copy()
    bufs = [codec.encode(x, stats=stats, chunks=chunks, backend=b) for b in ("ref", "cpu")]
    assert bytes(bufs[0]) == bytes(bufs[1])
    assert (stats == before).all()
    if bufs[0].header.codec != "mx":
        return
    y = tw.decode(bufs[0])
    for i in range(chunks):
        lo, hi = bufs[0].plan.chunk_range(i)
        scales = scales_of(bufs[0], i)
        at = lo // BLOCK + np.arange(scales.size)
        after = np.minimum(at + (lo % BLOCK > 0), stats.size - 1)
        assert np.array_equal(scales, np.maximum(stats[at], stats[after]))
        part, found = x[lo:hi].astype(np.float64), y[lo:hi].astype(np.float64)
        allowed = bound(x[lo:hi], y[lo:hi], scales, BY_NAME[element], kind)
        with np.errstate(invalid="ignore"):
            good = np.abs(found - part) <= allowed
        # Half a step above the largest number is infinity.
        assert (good | np.isinf(found)).all()


def test_scales_agreed_on_are_measured_as_ceil() -> None:
    for element in BY_NAME:
        for name in ("bfloat16", "float16", "float32"):
            x = make_bits("special", DTYPES[name], 3001).view(DTYPES[name].numpy)
            codec = tw.codec("mx", element=element, scale_rule="agreed")
            buf = codec.encode(x)
            ceil = tw.codec("mx", element=element, scale_rule="ceil").encode(x)
            assert np.asarray(buf.static(0)).tobytes() == np.asarray(ceil.static(0)).tobytes()
            stats = codec.measure(x)
            assert stats is not None
            assert np.array_equal(stats, scales_of(ceil))
            assert codec.measure(np.ones(40)) is None
            assert codec.reduce_op == "max"
    assert tw.codec("mx").measure(x) is None
    assert codec.measure(np.zeros((0, 3), np.float32)).shape == (0,)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("element", BY_NAME)
def test_sums_keep_scales(element: str) -> None:
    """In place, of float32 and of the buffer's dtype; a NaN of what is added is not lost."""
    codec = tw.codec("mx", element=element, scale_rule="agreed")
    for name, n, chunks in (("bfloat16", 1001, 3), ("float16", 70_001, 1), ("float32", 700, 2)):
        kind = DTYPES[name]
        x, y = (make_bits("normal", kind, n, seed=s).view(kind.numpy).copy() for s in (1, 2))
        y[n // 2], y[0] = np.nan, np.inf
        stats = codec.measure(x) - np.uint8(1)
        buf = codec.encode(x, stats=stats, chunks=chunks)
        total = tw.decode(buf).astype(np.float32) + y.astype(np.float32)
        expected = bytes(codec.encode(total.astype(kind.numpy), stats=stats, chunks=chunks))
        lost = np.flatnonzero(np.isnan(tw.decode(expected).astype(np.float32)))
        assert n // 2 in lost
        assert lost.size <= (BLOCK if element != "int8" else 2 * BLOCK)
        assert element == "int8" or tw.decode(expected)[0] == np.inf
        for added in (y, y.astype(np.float32)):
            for backend in ("ref", "cpu"):
                room = np.frombuffer(bytearray(bytes(buf)), np.uint8)
                for out in (None, room):
                    found = codec.decode_add_encode(
                        room, added, chunks=chunks, out=out, backend=backend
                    )
                    assert bytes(found) == expected
        y.flags.writeable = False
        assert bytes(codec.decode_add_encode(buf, y, chunks=chunks)) == expected
        # With stats of their own, sums have those.
        found = codec.decode_add_encode(buf, y, stats=stats + np.uint8(3), chunks=chunks)
        again = codec.encode(total.astype(kind.numpy), stats=stats + np.uint8(3), chunks=chunks)
        assert bytes(found) == bytes(again)


@pytest.mark.slow
def test_sums_of_ranks_fit_in_scales_that_are_so_much_larger() -> None:
    """The page: the largest byte of R ranks plus ceil(log2 R)."""
    rng = np.random.default_rng(5)
    for element, e in BY_NAME.items():
        codec = tw.codec("mx", element=element, scale_rule="agreed")
        xs = np.abs(rng.standard_normal((5, 2000))).astype(np.float32)
        stats = np.maximum.reduce([codec.measure(x) for x in xs]) + np.uint8(3)
        buf = codec.encode(xs[0], stats=stats)
        for x in xs[1:]:
            buf = codec.decode_add_encode(buf, x)
        u = np.repeat(np.ldexp(1.0, stats.astype(int) - 127), BLOCK)[:2000]
        step = u * 2.0 ** (e.emax - e.mantissa)
        # A step at most, even of the largest, a hop.
        assert (np.abs(tw.decode(buf) - xs.sum(axis=0)) <= 2.5 * step).all()


@pytest.mark.parametrize("bad", [np.zeros(15, np.uint8), np.zeros(16, np.int16), np.zeros((16, 1))])
def test_bad_scales_are_refused(bad: Array, backend: str) -> None:
    codec = tw.codec("mx", scale_rule="agreed")
    with pytest.raises(ValueError, match=r"stats .*allowed"):
        codec.encode(np.ones(500, np.float32), stats=bad, backend=backend)


@pytest.mark.parametrize(
    ("params", "error"),
    [
        ({"element": "e4m4"}, ValueError),
        ({"scale_rule": "round"}, ValueError),
        ({"element": 4}, TypeError),
    ],
)
def test_bad_parameters_are_refused(params: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match="allowed"):
        tw.codec("mx", **params)


def test_worked_example() -> None:
    x = np.zeros(257, BFLOAT16.numpy)
    x[:2] = 1.0, -3.0
    static = np.asarray(tw.codec("mx", element="e2m1").encode(x).static(0))
    assert static.size == 384
    assert static[0] == 0xF4
    assert static[256] == 0x7E
    assert np.count_nonzero(static) == 2
