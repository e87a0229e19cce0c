"""zipccl and raw: the kernels against the reference; see kernels.py."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import tightwire as tw
from kernels import (
    CODED,
    MARKS,
    SIZES,
    Memory,
    assert_same_buffer,
    check_decode,
    check_encode,
    patterns,
    raw,
    sums_agree,
    there_and_back,
)
from support import PATTERNS, make_bits
from tightwire import engine
from tightwire.codecs.common.base import Plan
from tightwire.codecs.common.sums import sum_of
from tightwire.codecs.zipccl import TILE, Zipccl, fields_of
from tightwire.formats.dtypes import BY_NAME, DType
from tightwire.planning import device_module

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

pytestmark = MARKS


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("name", CODED)
def test_every_pattern(place: str, name: str) -> None:
    dtype = BY_NAME[name]
    for n in SIZES if place == "cuda" else (TILE,):
        there_and_back(place, patterns(PATTERNS, dtype, n), dtype, chunks=len(PATTERNS))


@pytest.mark.parametrize("name", CODED)
def test_partial_tiles(place: str, name: str) -> None:
    dtype = BY_NAME[name]
    k = CODED.index(name)
    for n in SIZES if place == "cuda" else (SIZES[k],):
        for pattern in PATTERNS if place == "cuda" else (PATTERNS[k],):
            there_and_back(place, make_bits(pattern, dtype, n), dtype)


@pytest.mark.parametrize("name", CODED)
def test_one_window(place: str, name: str) -> None:
    dtype = BY_NAME[name]
    windows: list[Any] = ["sigma", "histogram", fields_of(dtype).max_base * 2 // 5]
    if place == "cpu":
        if dtype.exponent < 8:
            codec = tw.codec("zipccl", window=windows[CODED.index(name) % 2])
            there_and_back(place, make_bits("mixed_zeros", dtype, TILE), dtype, codec)
        codec = tw.codec("zipccl", window=windows[2])
        there_and_back(place, make_bits("scales", dtype, 2051), dtype, codec)
        return
    for codec in (tw.codec("zipccl", window=window) for window in windows):
        for pattern in PATTERNS:
            for n in (1301, 4096, 12289):
                there_and_back(place, make_bits(pattern, dtype, n), dtype, codec)
            bits = make_bits(pattern, dtype, 9001)
            there_and_back(place, bits, dtype, codec, first=1, chunks=2)


@pytest.mark.parametrize("name", CODED)
def test_measured_windows(place: str, name: str) -> None:
    dtype = BY_NAME[name]
    # The interpreter runs a program for every exponent.
    few = ("special",) if dtype.exponent < 8 else ()
    for pattern in PATTERNS if place == "cuda" else few:
        for window in ("sigma", "histogram"):
            codec = tw.codec("zipccl", window=window)
            bits = make_bits(pattern, dtype, 5001)
            found = codec.measure(Memory(place).put(bits, dtype, 1), backend="triton")
            expected = codec.measure(bits.view(dtype.numpy))
            assert found.tolist() == expected.tolist(), (pattern, window)


@pytest.mark.parametrize(("name", "n", "chunks"), [("bfloat16", 1301, 2), ("bfloat16", 2001, 3)])
def test_chunks(place: str, name: str, n: int, chunks: int) -> None:
    """The last chunk is shorter, and there are more chunks than one would fill tiles."""
    dtype = BY_NAME[name]
    bits = make_bits("normal", dtype, n)
    bits[n // 3 : n // 2] = make_bits("mixed_zeros", dtype, n // 2 - n // 3)
    buf = there_and_back(place, bits, dtype, chunks=chunks)
    assert buf.plan.codec.name == "zipccl"
    assert buf.plan.chunks == chunks


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn"])
def test_thousands_of_chunks_the_last_of_them_empty(name: str) -> None:
    dtype, n = BY_NAME[name], 7_017_350
    buf = there_and_back("cuda", make_bits("normal", dtype, n), dtype, chunks=2700)
    assert buf.plan.codec.name == "zipccl"
    assert buf.plan.chunk_range(2699) == (n, n)


@pytest.mark.parametrize(("n", "chunks"), [(5, 4), (1, 1)])
def test_chunks_of_hardly_any_elements(place: str, n: int, chunks: int) -> None:
    """Plans that the planner would leave to raw, with chunks of 2, 1 and 0 elements."""
    dtype, spec = BY_NAME["bfloat16"], Zipccl()
    shape = (n,) if n > 1 else ()
    plan = Plan(spec, dtype, shape, chunks, spec.layout(dtype, -(-n // chunks)), 0)
    kernels: Any = device_module("zipccl")
    bits = make_bits("normal", dtype, n)
    expected = np.full(plan.nbytes, 0x5A, np.uint8)
    engine.encode_into(plan, bits, expected, backend="ref")
    memory = Memory(place)
    out, scratch = memory.take(plan.nbytes), memory.take(plan.scratch_nbytes)
    kernels.encode(plan, memory.put(bits, dtype), out, scratch)
    assert_same_buffer(plan, raw(out), expected)
    y, status = memory.elements(dtype, n), torch.zeros(1, dtype=torch.int64, device=place)
    kernels.decode(plan, out, y, memory.take(plan.scratch_nbytes), status)
    assert status.tolist() == [0]
    assert raw(y).tobytes() == bits.tobytes()
    memory.check()


@pytest.mark.parametrize("name", CODED)
def test_addresses_that_are_not_aligned(place: str, name: str) -> None:
    """An input, and an output, that start at element 1; chunks that do as well."""
    dtype = BY_NAME[name]
    for n, chunks in ((5001, 1), (13002, 3)) if place == "cuda" else ((TILE, 1),):
        for pattern in PATTERNS if place == "cuda" else ("special",):
            bits = make_bits(pattern, dtype, n)
            memory = Memory(place)
            buf = check_encode(memory, bits, dtype, tw.codec("zipccl"), first=1, chunks=chunks)
            check_decode(memory, buf, bits, dtype, first=1, verify=False)
    if name in ("float32", "float8_e4m3fn"):
        bits = make_bits("normal", dtype, 2 * 2051)
        assert there_and_back(place, bits, dtype, chunks=2).plan.codec.name == "zipccl"


def test_without_checksums(place: str) -> None:
    for name in CODED if place == "cuda" else ("bfloat16",):
        dtype = BY_NAME[name]
        for pattern in PATTERNS if place == "cuda" else ("mixed_zeros",):
            bits = make_bits(pattern, dtype, 4096 + 641)
            buf = there_and_back(place, bits, dtype, checksum=False)
            assert not buf.plan.checksum


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5, 7, 41), (2, 3, 2, 5, 4, 6), (1,) * 32])
def test_shapes(place: str, shape: tuple[int, ...]) -> None:
    dtype = BY_NAME["bfloat16"]
    bits = make_bits("normal", dtype, math.prod(shape))
    memory = Memory(place)
    buf = check_encode(memory, bits, dtype, tw.codec("zipccl"), shape=shape)
    assert buf.plan.shape == shape
    assert buf.plan.codec.name == ("zipccl" if bits.size > 1000 else "raw")
    check_decode(memory, buf, bits, dtype)


@pytest.mark.fast_cases(4)
def test_raw(place: str, any_dtype: DType) -> None:
    both = ((1, 0), (3, 1))
    sizes = (0, 1, 129, 5000, 16385, 70001) if place == "cuda" else (0, 129, 2051)
    for k, n in enumerate(sizes):
        bits = make_bits("random", any_dtype, n)
        for chunks, first in both if place == "cuda" else both[k % 2 :][:1]:
            memory = Memory(place)
            codec = tw.codec("raw")
            buf = check_encode(memory, bits, any_dtype, codec, first=first, chunks=chunks)
            check_decode(memory, buf, bits, any_dtype, first=first)
            if n > 129:
                check_decode(memory, buf, bits, any_dtype, start=n // 3, stop=n - 1, verify=True)


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32"])
def test_raw_sums(place: str, name: str) -> None:
    """Elements that are added are floats, with the quiet NaN for every NaN."""
    dtype, codec = BY_NAME[name], tw.codec("raw")
    for n, chunks, first in ((4096, 1, 0), (4099, 1, 0), (4099, 3, 1)):
        memory = Memory(place)
        bits = make_bits("special", dtype, n)
        local = make_bits("special", dtype, n, seed=1)
        expected = sum_of((bits, local), dtype, None, dtype)
        wanted = codec.encode(expected.view(dtype.numpy), chunks=chunks, backend="ref")
        buf = codec.encode(memory.put(bits, dtype, first), chunks=chunks, backend="triton")
        out, x = memory.take(buf.plan.nbytes), memory.put(local, dtype, first)
        total = codec.decode_add_encode(buf, x, out=out, chunks=chunks)
        assert bytes(total) == bytes(wanted)
        check_decode(memory, total, expected, dtype)


@pytest.mark.parametrize("capacity", [0, 640])
def test_fixed_rate(place: str, capacity: int) -> None:
    """Slots that hold what their chunks need, or do not; as raw chunks or as coded ones."""
    for name in ("bfloat16", "float32") if place == "cuda" else ("bfloat16",):
        dtype = BY_NAME[name]
        bits = patterns(("scales", "random"), dtype, 1301)
        memory = Memory(place)
        codec = tw.codec("zipccl")
        buf = check_encode(memory, bits, dtype, codec, chunks=2, dynamic_capacity=capacity)
        assert buf.plan.dynamic_stride <= capacity
        overflows = buf.plan.raw_dynamic(1) > capacity
        assert overflows == (capacity < 640)
        assert buf.overflowed == overflows
        if overflows:
            tw.decode(buf)
            with pytest.raises(tw.FormatError, match="dynamic_overflow"):
                buf.check()
        else:
            check_decode(memory, buf, bits, dtype)


def with_escapes(dtype: DType, n: int, k: int) -> npt.NDArray[Any]:
    """`n` elements, `k` of them with exponents far below the others', in no order."""
    rng = np.random.default_rng([n, k])
    top = (1 << dtype.exponent) - 2
    exponents = np.full(n, top)
    cold = np.arange(1, top - 6, 8)
    at = rng.permutation(n)[:k]
    exponents[at] = cold[np.arange(k) % cold.size]
    rest = rng.integers(0, 2 << dtype.mantissa, n)
    sign, mantissa = rest >> dtype.mantissa, rest & ((1 << dtype.mantissa) - 1)
    bits = sign << 8 * dtype.itemsize - 1 | exponents << dtype.mantissa | mantissa
    return bits.astype(dtype.bits)


@pytest.mark.parametrize("name", CODED)
def test_tiles_with_many_escapes(place: str, name: str) -> None:
    """More than a slot of the workspace holds, as many as a chunk may have, and one more."""
    dtype = BY_NAME[name]
    plan = tw.codec("zipccl").plan((TILE,), name)
    most = plan.raw_dynamic(0)
    counts: tuple[int, ...] = (most, most + 1) if name == "bfloat16" else (most,)
    if place == "cuda":
        counts = (*range(100, 200), most - 1, most, most + 1, TILE // 2)
    for k in counts:
        buf = there_and_back(place, with_escapes(dtype, TILE, k), dtype)
        assert buf.sizes.tolist() == [min(k, most)]
        assert tw.inspect(buf).raw_chunks == ((0,) if k > most else ())


def test_a_tile_with_many_escapes_among_others(place: str) -> None:
    dtype = BY_NAME["bfloat16"]
    for tiles, heavy in ((2, 0), (70, 33), (70, 69)) if place == "cuda" else ((2, 0),):
        bits = make_bits("normal", dtype, tiles * TILE + 300)
        bits[heavy * TILE :][:TILE] = with_escapes(dtype, TILE, TILE // 2)
        buf = there_and_back(place, bits, dtype)
        assert tw.inspect(buf).raw_chunks == ()


@pytest.mark.parametrize("name", ["bfloat16", "float32", "float8_e4m3fn"])
def test_chunks_fall_back_one_by_one(place: str, name: str) -> None:
    dtype = BY_NAME[name]
    n = 13001 if place == "cuda" else 1301 if dtype.exponent == 8 else 2501
    bits = patterns(("normal", "random", "zero"), dtype, n)
    memory = Memory(place)
    buf = check_encode(memory, bits, dtype, tw.codec("zipccl"), chunks=3)
    assert tw.inspect(buf).raw_chunks == (1,)
    check_decode(memory, buf, bits, dtype, verify=True)
    if place == "cuda" or name == "bfloat16":
        check_decode(memory, buf, bits, dtype, start=n + 5, stop=2 * n - 7, first=1)


def test_selections(place: str) -> None:
    dtype = BY_NAME["bfloat16"]
    n = 2 * (2 * TILE + 1000)
    cuts = [(4, 4), (100, 4000), (4096, 8192), (9000, 9300)]
    bits = patterns(("normal", "scales"), dtype, n // 2)
    memory = Memory(place)
    buf = check_encode(memory, bits, dtype, tw.codec("zipccl"), chunks=2)
    if place == "cuda":
        rng = np.random.default_rng(1)
        cuts += [tuple(sorted(rng.integers(0, n + 1, 2).tolist())) for _ in range(200)]
    for k, (start, stop) in enumerate(cuts):
        check_decode(Memory(place), buf, bits, dtype, start=start, stop=stop, first=k % 2)
    for start, stop in cuts if place == "cuda" else [(100, 4000)]:
        check_decode(Memory(place), buf, bits, dtype, start=start, stop=stop, verify=True)
    check_decode(memory, buf, bits, dtype, start=n // 2, stop=n, verify=True)


@pytest.mark.fast_cases(2)
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("bfloat16", "float32"),
        ("bfloat16", "bfloat16"),
        ("float16", "float32"),
        ("float16", "float16"),
        ("float32", "float32"),
    ],
)
def test_decode_add(place: str, name: str, target: str) -> None:
    dtype, kind = BY_NAME[name], BY_NAME[target]
    codec = tw.codec("zipccl")
    cases = [("special", 1301 if name == "float32" else 2501, 1, 0)]
    if place == "cuda":
        cases = [(p, n, c, f) for p in PATTERNS for n in SIZES for c in (1, 3) for f in (0, 1)]
    elif name == "bfloat16":
        cases = [("special", TILE + 700, 1, 0), ("random", 1301, 1, 1)]
    for pattern, n, chunks, first in cases:
        bits = make_bits(pattern, dtype, n)
        memory = Memory(place)
        expected = make_bits("special", kind, n, seed=1).view(kind.numpy)
        acc = memory.put(expected.view(kind.bits), kind, first)
        buf = codec.encode(memory.put(bits, dtype), chunks=chunks, backend="triton")
        scratch = memory.take(buf.plan.scratch_nbytes)
        assert codec.decode_add(buf, acc, scratch=scratch) is acc
        buf.check()
        codec.decode_add(tw.encode(bits.view(dtype.numpy)), expected)
        found = raw(acc).view(kind.numpy)
        if target == "bfloat16":
            assert sums_agree(found.astype(np.float32), expected.astype(np.float32))
        else:
            assert sums_agree(found, expected)
        memory.check()


@pytest.mark.parametrize("name", ["bfloat16", "float8_e5m2"])
def test_packed_buffers(place: str, name: str) -> None:
    """Bytes from elsewhere: dynamic parts lie close together, at any multiple of 128."""
    dtype = BY_NAME[name]
    n = 30001 if place == "cuda" else 1301
    bits = patterns(("normal", "scales", "random"), dtype, n)
    packed = np.frombuffer(bytes(tw.encode(bits.view(dtype.numpy), chunks=3)), np.uint8)
    memory = Memory(place)
    device_bytes = memory.take(packed.size)
    device_bytes.copy_(torch.from_numpy(packed.copy()))
    check_decode(memory, device_bytes, bits, dtype)
    check_decode(memory, device_bytes, bits, dtype, start=n + 3, stop=2 * n + 9, first=1)
    if place == "cuda":
        check_decode(memory, packed.tobytes(), bits, dtype, verify=True)
