"""Every codec: the same bytes on every backend, and the same tensor back."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tightwire as tw
from support import ALONE, CODEC_PARAMS, PATTERNS, examples, make_bits
from tightwire.formats.dtypes import BY_NAME, DType
from tightwire.planning import HOST_BACKENDS

SIZES = (0, 1, 127, 129, 2048, 4095, 4096, 4097, 12289, 70001)
KEY = tw.Key(0xFEDCBA9876543210, step=5, rank=2)


def encoded_bytes(bits: npt.NDArray[Any], dtype: DType, codec: tw.Codec, **options: Any) -> bytes:
    """Encode into a poisoned buffer, so that a byte nobody wrote shows."""
    x = bits.view(dtype.numpy)
    plan = codec.plan(x.shape, dtype.name, chunks=options.get("chunks", 1))
    room = np.full(plan.nbytes, 0xA5, np.uint8)
    return bytes(codec.encode(x, out=room, key=KEY, **options))


def check_all_backends(
    bits: npt.NDArray[Any], dtype: DType, codec: tw.Codec, chunks: int = 1
) -> bytes:
    before = bits.tobytes()
    packed = [encoded_bytes(bits, dtype, codec, chunks=chunks, backend=b) for b in HOST_BACKENDS]
    assert bits.tobytes() == before
    for other in packed[1:]:
        assert other == packed[0]
    expected = before
    if not tw.codec(tw.inspect(packed[0]).header.codec).lossless:
        expected = tw.decode(packed[0], backend="ref").tobytes()
    for backend in HOST_BACKENDS:
        out = np.full(bits.nbytes, 0xA5, np.uint8).view(dtype.numpy)
        result = tw.decode(packed[0], out=out, backend=backend)
        assert result is out
        assert out.tobytes() == expected
    return packed[0]


@pytest.mark.parametrize("name", ALONE)
def test_backends_agree_and_round_trip(name: str, any_dtype: DType) -> None:
    for pattern in PATTERNS if any_dtype.is_float else ("random",):
        for n in SIZES:
            bits = make_bits(pattern, any_dtype, n)
            check_all_backends(bits, any_dtype, tw.codec(name))


@pytest.mark.slow_cases(500)
@pytest.mark.parametrize("chunks", [2, 3, 8, 40])
@pytest.mark.parametrize("pattern", ["normal", "random", "mixed_zeros"])
@pytest.mark.parametrize("name", ALONE)
def test_chunks(name: str, pattern: str, chunks: int, float_dtype: DType) -> None:
    for n in (17, 4097, 40000):
        bits = make_bits(pattern, float_dtype, n)
        packed = check_all_backends(bits, float_dtype, tw.codec(name), chunks)
        assert tw.inspect(packed).header.chunks == chunks


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "params"), [(name, params) for name, all_ in CODEC_PARAMS.items() for params in all_]
)
def test_parameters(name: str, params: dict[str, Any], float_dtype: DType) -> None:
    codec = tw.codec(name, **params)
    for pattern in PATTERNS:
        check_all_backends(make_bits(pattern, float_dtype, 9001), float_dtype, codec)


def test_chunks_of_one_buffer_may_fall_back_one_by_one(backend: str) -> None:
    dtype = BY_NAME["bfloat16"]
    bits = make_bits("normal", dtype, 30000)
    bits[10000:20000] = make_bits("random", dtype, 10000)
    buf = tw.encode(bits.view(dtype.numpy), chunks=3, backend=backend)
    assert tw.inspect(buf).raw_chunks == (1,)
    assert tw.decode(buf, backend=backend).tobytes() == bits.tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("name", ALONE)
def test_any_number_of_threads_gives_the_same_bytes(name: str, float_dtype: DType) -> None:
    n = (6 << 20) // float_dtype.itemsize + 77
    bits = make_bits("mixed_zeros", float_dtype, n)
    x = bits.view(float_dtype.numpy)
    key = tw.Key(3)
    buf = tw.encode(x, name, threads=1, key=key)
    packed, expected = bytes(buf), tw.decode(buf, threads=1).tobytes()
    assert expected == bits.tobytes() or not tw.codec(buf.header.codec).lossless
    for threads in (2, 3, 7):
        assert bytes(tw.encode(x, name, threads=threads, key=key)) == packed
        assert tw.decode(packed, threads=threads).tobytes() == expected


def test_all_bfloat16_patterns_in_every_row_and_column() -> None:
    dtype = BY_NAME["bfloat16"]
    for shift in (0, 1, 511, 512, 4095):
        bits = np.roll(np.arange(1 << 16, dtype=np.uint16), shift)
        check_all_backends(bits, dtype, tw.codec("zipccl"))


@pytest.mark.slow
@examples(150)
@given(
    dtype=st.sampled_from([d for d in BY_NAME.values() if d.is_float]),
    codec=st.sampled_from([tw.codec(n, **p) for n, all_ in CODEC_PARAMS.items() for p in all_]),
    n=st.integers(0, 9000),
    chunks=st.integers(1, 5),
    spread=st.floats(0, 40),
    zeros=st.floats(0, 1),
    seed=st.integers(0, 2**32),
)
def test_property_round_trip(
    dtype: DType, codec: tw.Codec, n: int, chunks: int, spread: float, zeros: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    half = 1 << dtype.exponent - 1
    exponents = np.clip(half + spread * rng.standard_normal(n), 0, 2 * half - 1).astype(np.int64)
    exponents[rng.random(n) < zeros] = 0
    rest = rng.integers(0, 1 << dtype.mantissa + 1, n)
    sign, mantissa = rest >> dtype.mantissa, rest & (1 << dtype.mantissa) - 1
    bits = sign << 8 * dtype.itemsize - 1 | exponents << dtype.mantissa | mantissa
    check_all_backends(bits.astype(dtype.bits), dtype, codec, chunks)


@examples(100)
@given(
    n=st.integers(0, 20000),
    chunks=st.integers(1, 4),
    cut=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    pattern=st.sampled_from(PATTERNS),
    dtype=st.sampled_from(list(BY_NAME.values())),
    codec=st.sampled_from([tw.codec(n, **p) for n, all_ in CODEC_PARAMS.items() for p in all_]),
)
def test_property_selections(
    n: int, chunks: int, cut: tuple[float, float], pattern: str, dtype: DType, codec: tw.Codec
) -> None:
    bits = make_bits(pattern, dtype, n)
    packed = bytes(codec.encode(bits.view(dtype.numpy), chunks=chunks, key=KEY))
    whole = tw.decode(packed, backend="ref")
    if tw.codec(tw.inspect(packed).header.codec).lossless:
        assert whole.tobytes() == bits.tobytes()
    start, stop = sorted(int(c * n) for c in cut)
    for backend in HOST_BACKENDS:
        for verify in (False, True):
            part = tw.decode(packed, start=start, stop=stop, backend=backend, verify=verify)
            assert part.shape == (stop - start,)
            assert part.tobytes() == whole[start:stop].tobytes()
