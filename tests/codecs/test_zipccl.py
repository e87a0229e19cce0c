"""zipccl: ratios, windows, limits."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import tightwire as tw
from support import make_bits
from tightwire.codecs.zipccl import (
    SIGMA_FACTOR,
    ZERO_MODE,
    histogram_base,
    sigma_base,
    tile_window,
)
from tightwire.formats.dtypes import BY_NAME, DType


def ratio(bits: npt.NDArray[Any], dtype: DType, **options: Any) -> float:
    return tw.encode(bits.view(dtype.numpy), **options).nbytes / bits.nbytes


@pytest.mark.slow
def test_ratio_of_gaussians() -> None:
    rng = np.random.default_rng(0)
    normal = rng.standard_normal(1 << 20)
    limits = {"bfloat16": 0.700, "float16": 0.888, "float32": 0.851, "float64": 0.882}
    limits |= {"float8_e4m3fn": 0.902, "float8_e5m2": 0.78}
    for name, limit in limits.items():
        dtype = BY_NAME[name]
        bits = (normal * (16 if dtype.itemsize == 1 else 0.02)).astype(dtype.numpy)
        assert ratio(bits.view(dtype.bits), dtype) <= limit, name


@pytest.mark.slow
@pytest.mark.parametrize("pattern", ["random", "special", "scales", "mixed_zeros"])
@pytest.mark.parametrize("chunks", [1, 3])
def test_never_expands_by_more_than_the_header(
    pattern: str, chunks: int, float_dtype: DType
) -> None:
    n = (1 << 16) // float_dtype.itemsize * 2
    bits = make_bits(pattern, float_dtype, n)
    header = 128 if chunks == 1 else 256 + 128 * chunks
    buf = tw.encode(bits.view(float_dtype.numpy), chunks=chunks)
    assert buf.nbytes <= bits.nbytes + header
    assert buf.nbytes <= buf.plan.nbytes


def test_expansion_at_64_kib_is_at_most_two_thousandths() -> None:
    for name in ("bfloat16", "float32", "uint8"):
        dtype = BY_NAME[name]
        bits = make_bits("random", dtype, 65536 // dtype.itemsize)
        for shape in ((-1,), (64, -1), (4, 16, -1), (2, 2, 16, -1)):
            x = bits.view(dtype.numpy).reshape(shape)
            assert tw.encode(x).nbytes <= 1.002 * x.nbytes


def test_window_of_a_tile_codes_most_of_its_sample() -> None:
    rng = np.random.default_rng(1)
    for spread in (0.5, 2.0, 6.0, 30.0):
        sample = np.clip(rng.normal(120, spread, 512), 0, 255).astype(np.uint8)
        sample[rng.random(512) < 0.3] = 0
        entry = tile_window(sample)
        base, zero_mode = entry & (ZERO_MODE - 1), entry >= ZERO_MODE

        def coded(base: int, zero_mode: bool, sample: Any = sample) -> int:
            inside = (sample >= base + zero_mode) & (sample < base + 7)
            return int(np.count_nonzero(inside | (zero_mode & (sample == 0))))

        tops = np.unique(sample)[-16:].tolist()
        bases = [max(top - 6, 0) for top in tops]
        best = max(coded(b, z) for b in bases for z in (False, True) if b > 0 or not z)
        assert coded(base, zero_mode) == best


@pytest.mark.parametrize("outlier", [np.inf, -np.inf, np.nan, 1e38, 1e9])
def test_outliers_cost_little(outlier: float) -> None:
    dtype = BY_NAME["bfloat16"]
    bits = make_bits("normal", dtype, 1 << 16)
    before = ratio(bits, dtype)
    bits[::512] = np.float32(outlier).astype(dtype.numpy).view(np.uint16)
    assert ratio(bits, dtype) < before + 0.002


def test_zero_mode_codes_exact_zeros() -> None:
    dtype = BY_NAME["bfloat16"]
    bits = make_bits("mixed_zeros", dtype, 1 << 18)
    assert ratio(bits, dtype) < 0.71


@pytest.mark.parametrize("sigma", [1e-30, 1e-3, 0.02, 0.5, 1.0, 3.0, 1e20])
def test_sigma_is_the_papers_rule(sigma: float) -> None:
    x = (np.random.default_rng(2).standard_normal(1 << 18) * sigma).astype(np.float32)
    bits = x.view(np.uint32) >> 16 << 16
    exact = math.log2(float(np.std(bits.view(np.float32).astype(np.float64)))) - 5.3606617
    assert sigma_base(bits, BY_NAME["float32"]) - 127 in {round(exact + d) for d in (-0.01, 0.01)}


def test_sigma_constant() -> None:
    assert math.isclose(SIGMA_FACTOR, math.sqrt(28 * math.log(2) / 16383), rel_tol=1e-15)
    assert math.isclose(math.log2(SIGMA_FACTOR) - 0.5, -5.36066, abs_tol=1e-5)


def test_sigma_of_a_constant_tensor_starts_below_its_exponent() -> None:
    bits = np.full(5000, 0x3F80, np.uint16)
    assert sigma_base(bits, BY_NAME["bfloat16"]) == 127 - 6
    assert sigma_base(np.zeros(9, np.uint16), BY_NAME["bfloat16"]) == 0
    nans = np.full(9, 0x7FC1, np.uint16)
    assert sigma_base(nans, BY_NAME["bfloat16"]) == 0


def test_histogram_finds_the_best_window() -> None:
    dtype = BY_NAME["bfloat16"]
    bits = make_bits("normal", dtype, 50000)
    exponents = bits >> 7 & 255
    held = [int(((exponents >= b) & (exponents < b + 7)).sum()) for b in range(250)]
    assert histogram_base(bits, dtype) == held.index(max(held))


def test_measured_stats_can_be_passed_in() -> None:
    dtype = BY_NAME["bfloat16"]
    x = make_bits("normal", dtype, 50000).view(dtype.numpy)
    codec = tw.codec("zipccl", window="histogram")
    stats = codec.measure(x)
    assert stats is not None
    assert bytes(codec.encode(x, stats=stats)) == bytes(codec.encode(x))
    assert tw.codec("zipccl").measure(x) is None


@pytest.mark.parametrize("window", ["best", -1, 5000, True, 1.5, None])
def test_bad_windows_are_refused(window: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="allowed"):
        tw.codec("zipccl", window=window)


def test_a_window_beyond_the_dtype_is_refused() -> None:
    x = np.zeros(5000, np.float16)
    with pytest.raises(ValueError, match="allows 0 to 25"):
        tw.encode(x, tw.codec("zipccl", window=100))


def test_fixed_rate_buffers(backend: str) -> None:
    dtype = BY_NAME["bfloat16"]
    good = make_bits("normal", dtype, 40960).view(dtype.numpy)
    bad = make_bits("random", dtype, 40960).view(dtype.numpy)
    codec = tw.codec("zipccl")
    plan = codec.plan(good.shape, "bfloat16", dynamic_capacity=2000)
    assert plan.dynamic_stride == 2048
    fits = codec.encode(good, dynamic_capacity=2000, backend=backend)
    assert not fits.overflowed
    assert fits.array.size == plan.nbytes
    assert bytes(fits) == bytes(codec.encode(good))
    assert tw.decode(fits.array).tobytes() == good.tobytes()
    over = codec.encode(bad, dynamic_capacity=2000, backend=backend)
    assert over.overflowed
    assert int(over.sizes[0]) > 2000
    for use in (tw.decode, bytes, tw.verify, tw.Buffer.packed):
        with pytest.raises(tw.FormatError, match="dynamic_overflow"):
            use(over)
