"""Speed on the CPU: whole encode and decode calls, checksum on, results checked before timing.

    pytest benchmarks/bench_cpu.py --benchmark-json=benchmarks/results/cpu.json
    python benchmarks/report.py

GB/s counts the tensor's bytes. Every figure of one run is to be read against `copyto` of that run.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tightwire as tw

MIB = 1 << 20


def gaussian(nbytes: int, dtype: Any = ml_dtypes.bfloat16) -> Any:
    """N(0, 0.02), as weights are."""
    n = nbytes // np.dtype(dtype).itemsize
    scale = 16.0 if np.dtype(dtype).itemsize == 1 else 0.02
    values = np.random.default_rng(0).standard_normal(n, dtype=np.float32) * np.float32(scale)
    return values.astype(dtype)


def record(benchmark: Any, x: Any, ratio: float | None = None) -> None:
    """GB/s of the median call."""
    benchmark.extra_info["nbytes"] = x.nbytes
    benchmark.extra_info["GB/s"] = x.nbytes / benchmark.stats.stats.median / 1e9
    if ratio is not None:
        benchmark.extra_info["ratio"] = ratio


def check(x: Any, buf: tw.Buffer) -> None:
    """No speed without a right result: the tensor comes back, and equals the reference's bytes."""
    assert tw.decode(bytes(buf)).tobytes() == x.tobytes()
    part = x.reshape(-1)[:200_001]
    assert bytes(tw.encode(part)) == bytes(tw.encode(part, backend="ref"))


@pytest.mark.parametrize("mib", [64])
def test_copyto(benchmark: Any, mib: int) -> None:
    x = gaussian(mib * MIB)
    y = np.ones_like(x)
    benchmark(np.copyto, y, x)
    record(benchmark, x)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64", "float8_e4m3fn"])
@pytest.mark.parametrize("threads", [1, 2])
def test_encode(benchmark: Any, dtype: str, threads: int) -> None:
    kind = getattr(ml_dtypes, dtype, dtype)
    x = gaussian(64 * MIB, kind)
    codec = tw.codec("zipccl")
    buf = codec.encode(x)
    check(x, buf)
    benchmark(codec.encode, x, out=buf, threads=threads)
    assert tw.decode(buf).tobytes() == x.tobytes()
    record(benchmark, x, buf.nbytes / x.nbytes)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64", "float8_e4m3fn"])
@pytest.mark.parametrize("threads", [1, 2])
def test_decode(benchmark: Any, dtype: str, threads: int) -> None:
    kind = getattr(ml_dtypes, dtype, dtype)
    x = gaussian(64 * MIB, kind)
    buf = tw.encode(x)
    check(x, buf)
    y = np.full(x.nbytes, 0xA5, np.uint8).view(x.dtype)
    benchmark(tw.decode, buf, out=y, threads=threads)
    assert y.tobytes() == x.tobytes()
    record(benchmark, x, buf.nbytes / x.nbytes)


LOSSY = {
    "mx": tw.codec("mx"),
    "nvfp4": tw.codec("nvfp4"),
    "taco": tw.codec("taco"),
    "sdp4bit": tw.codec("sdp4bit"),
    "tahquant": tw.codec("tahquant", hidden=4096),
    "dynamiq": tw.codec("dynamiq"),
}
KEY = tw.Key(0)


def lossy_case(name: str) -> tuple[Any, tw.Codec, tw.Buffer]:
    """Array, codec and buffer, of which a part has the reference's bytes and values."""
    x, codec = gaussian(64 * MIB), LOSSY[name]
    part = x[:200_001]
    packed = bytes(codec.encode(part, key=KEY))
    assert packed == bytes(codec.encode(part, key=KEY, backend="ref"))
    assert tw.decode(packed).tobytes() == tw.decode(packed, backend="ref").tobytes()
    return x, codec, codec.encode(x, key=KEY)


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("threads", [1])
def test_lossy_encode(benchmark: Any, name: str, threads: int) -> None:
    x, codec, buf = lossy_case(name)
    packed = bytes(buf)
    benchmark(codec.encode, x, key=KEY, out=buf, threads=threads)
    assert bytes(buf) == packed
    record(benchmark, x, buf.nbytes / x.nbytes)


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("threads", [1])
def test_lossy_decode(benchmark: Any, name: str, threads: int) -> None:
    x, _, buf = lossy_case(name)
    y = np.full(x.nbytes, 0xA5, np.uint8).view(x.dtype)
    benchmark(tw.decode, buf, out=y, threads=threads)
    assert tw.error(x, y).vnmse < 0.05
    record(benchmark, x, buf.nbytes / x.nbytes)


@pytest.mark.parametrize("threads", [1, 2])
def test_raw_encode(benchmark: Any, threads: int) -> None:
    x = gaussian(64 * MIB)
    codec = tw.codec("raw")
    buf = codec.encode(x)
    assert tw.decode(bytes(buf)).tobytes() == x.tobytes()
    benchmark(codec.encode, x, out=buf, threads=threads)
    assert tw.decode(buf).tobytes() == x.tobytes()
    record(benchmark, x, buf.nbytes / x.nbytes)


def test_verify(benchmark: Any) -> None:
    x = gaussian(64 * MIB)
    buf = tw.encode(x)
    check(x, buf)
    damaged = bytearray(bytes(buf))
    damaged[len(damaged) // 2] ^= 1
    with pytest.raises(tw.FormatError):
        tw.verify(damaged)
    benchmark(tw.verify, buf)
    record(benchmark, x)


@pytest.mark.parametrize("pattern", ["random", "zeros", "half_zeros", "nan"])
def test_encode_of_worst_cases(benchmark: Any, pattern: str) -> None:
    rng = np.random.default_rng(0)
    x = gaussian(64 * MIB)
    if pattern == "random":
        x = rng.integers(0, 1 << 16, x.size, dtype=np.uint16).view(x.dtype)
    elif pattern == "half_zeros":
        x[rng.random(x.size) < 0.5] = 0
    else:
        x[:] = 0 if pattern == "zeros" else np.nan
    buf = tw.encode(x)
    check(x, buf)
    codec = tw.codec("zipccl")
    benchmark(codec.encode, x, out=buf, threads=1)
    record(benchmark, x, buf.nbytes / x.nbytes)


def test_encode_1_kib(benchmark: Any) -> None:
    x = gaussian(1024)
    codec = tw.codec("zipccl")
    check(x, codec.encode(x))
    benchmark(codec.encode, x)
    record(benchmark, x)


def test_decode_1_kib(benchmark: Any) -> None:
    x = gaussian(1024)
    buf = tw.encode(x)
    check(x, buf)
    y = benchmark(tw.decode, buf)
    assert y.tobytes() == x.tobytes()
    record(benchmark, x)


def zipnn_case() -> tuple[Any, Any, bytes, Any]:
    """Array, ZipNN codec, the array's bytes and their compressed form, checked."""
    zipnn = pytest.importorskip("zipnn")
    x = gaussian(64 * MIB)
    codec = zipnn.ZipNN(bytearray_dtype="bfloat16", threads=1, input_format="byte")
    data = x.tobytes()
    packed = codec.compress(bytearray(data))
    assert bytes(codec.decompress(packed)) == data
    return x, codec, data, packed


def test_zipnn_compress(benchmark: Any) -> None:
    x, codec, data, packed = zipnn_case()
    # ZipNN overwrites its input: each round gets a fresh copy, made outside the clock.
    benchmark.pedantic(
        codec.compress, setup=lambda: ((bytearray(data),), {}), rounds=7, warmup_rounds=1
    )
    record(benchmark, x, len(packed) / x.nbytes)


def test_zipnn_decompress(benchmark: Any) -> None:
    x, codec, _, packed = zipnn_case()
    benchmark(codec.decompress, packed)
    record(benchmark, x, len(packed) / x.nbytes)
