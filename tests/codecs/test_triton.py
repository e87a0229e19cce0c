"""The kernels against the reference: the same bytes, the same tensors, the same refusals.

Without a GPU the Triton interpreter runs the kernels on host memory, and every access is checked
to be aligned and inside the tensors that the launch was given. With `-m gpu` the same tests run
compiled, on more cases, and with them random cases and a tensor of more than 2**31 elements. What
is written is poisoned before, and has guard bytes around it.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import tightwire as tw
from support import KEY, PATTERNS, make_bits, vector_key
from tightwire import engine
from tightwire.codecs.common.base import Plan
from tightwire.codecs.common.sums import sum_of
from tightwire.codecs.zipccl import COLUMNS, TILE, Zipccl, fields_of, tail_columns, tile_count
from tightwire.formats.dtypes import BY_NAME, DType
from tightwire.formats.header import ASSEMBLED, CHECKSUM, OVERFLOW, RECORD
from tightwire.planning import device_module, spec_class

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

VECTORS = Path(__file__).resolve().parents[2] / "specs" / "vectors"
#: One dtype of each kind that kernels tell apart.
CODED = ("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2")
SIZES = (641, 1301, 2048, 4095, 4096, 4097, 12289, 70001)
GUARD = 512
POISON = 0xA5

# Squares of huge numbers are infinite in specs/taco.md, and elements that are not finite go through
# taco's kernels up to the codes: of both NumPy, which interprets, warns.
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered"),
    # The interpreter is slow.
    pytest.mark.fast_cases(1),
]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request: pytest.FixtureRequest) -> str:
    """Where kernels run."""
    if request.param == "cpu" and torch.cuda.is_available():
        pytest.skip("kernels are compiled for the GPU here")
    return str(request.param)


class Watched:
    """The interpreter's memory accesses, each checked against the tensors of the launch."""

    def __init__(self, real: Any) -> None:
        self.real = real
        self.spans: list[tuple[int, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def check(self, pointers: Any, mask: Any, size: int) -> None:
        at = np.asarray(pointers)[np.asarray(mask, bool)].astype(np.int64)
        if at.size:
            assert not (at % size).any(), f"an address is no multiple of {size}"
            inside = np.zeros(at.shape, bool)
            for start, stop in self.spans:
                inside |= (at >= start) & (at <= stop - size)
            assert inside.all(), f"{np.count_nonzero(~inside)} accesses out of bounds"

    def load(self, pointers: Any, mask: Any, other: Any, dtype: Any) -> Any:
        self.check(pointers, mask, np.dtype(dtype).itemsize)
        return self.real.load(pointers, mask, other, dtype)

    def store(self, pointers: Any, value: Any, mask: Any) -> Any:
        self.check(pointers, mask, value.dtype.itemsize)
        return self.real.store(pointers, value, mask)

    def atomic_rmw(self, op: Any, pointers: Any, value: Any, mask: Any, order: Any) -> Any:
        self.check(pointers, mask, value.dtype.itemsize)
        return self.real.atomic_rmw(op, pointers, value, mask, order)


@pytest.fixture(autouse=True)
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched | None:
    """Watch the interpreter; on a GPU guard bytes and compute-sanitizer (sanitize.py) do that."""
    if torch.cuda.is_available():
        return None
    from triton.runtime import interpreter

    found = Watched(interpreter._interpreter)
    run = interpreter.GridExecutor.__call__

    def launch(self: Any, *args: Any, **options: Any) -> Any:
        tensors = [getattr(a, "base", a) for a in args if hasattr(a, "data_ptr")]
        found.spans = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors]
        return run(self, *args, **options)

    monkeypatch.setattr(interpreter, "_interpreter", found)
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch)
    return found


class Memory:
    """Tensors at one place, with guard bytes on both sides."""

    def __init__(self, place: str) -> None:
        self.place = place
        self.taken: list[tuple[Any, int, int]] = []

    def take(self, nbytes: int, offset: int = 0) -> Any:
        """Poisoned memory, uint8, shape (nbytes,), `offset` bytes behind a multiple of 512."""
        start = GUARD + offset
        block = torch.full((start + nbytes + GUARD,), POISON, dtype=torch.uint8, device=self.place)
        self.taken.append((block, start, start + nbytes))
        return block[start : start + nbytes]

    def elements(self, dtype: DType, n: int, first: int = 0) -> Any:
        """Poisoned memory for n elements, `first` elements behind a multiple of 512 bytes."""
        taken = self.take(n * dtype.itemsize, first * dtype.itemsize)
        return taken.view(getattr(torch, dtype.name))

    def put(self, bits: npt.NDArray[Any], dtype: DType, first: int = 0) -> Any:
        """A tensor of `bits`."""
        x = self.elements(dtype, bits.size, first)
        x.view(torch.uint8).copy_(torch.from_numpy(bits.view(np.uint8).copy()))
        return x

    def check(self) -> None:
        for block, start, stop in self.taken:
            assert (block[:start] == POISON).all()
            assert (block[stop:] == POISON).all()


def raw(x: Any) -> npt.NDArray[np.uint8]:
    host: npt.NDArray[np.uint8] = x.detach().reshape(-1).view(torch.uint8).cpu().numpy()
    return host


def assert_same(found: npt.NDArray[Any], expected: npt.NDArray[Any], what: str) -> None:
    assert found.size == expected.size, what
    wrong = np.flatnonzero(found != expected)
    assert not wrong.size, f"{what}: {wrong.size} bytes differ, the first at {wrong[0]}"


def assert_same_buffer(plan: Plan, found: npt.NDArray[Any], expected: npt.NDArray[Any]) -> None:
    """The same bytes, but for slack; of chunks that overflowed their slots only the records."""
    cut = plan.header.nbytes + RECORD.itemsize * plan.chunks
    records = expected[plan.header.nbytes : cut].view(RECORD)
    assert found[plan.header.nbytes : cut].view(RECORD).tolist() == records.tolist()
    assert_same(found[:cut], expected[:cut], "header")
    assert_same(found[cut : plan.static_offset], expected[cut : plan.static_offset], "padding")
    for i, record in enumerate(records):
        if record["flags"] & OVERFLOW:
            continue
        part = plan.static_range(i)
        assert_same(found[part], expected[part], f"static part of chunk {i}")
        at = plan.dynamic_offset + i * plan.dynamic_stride
        part = slice(at, at + int(record["dynamic_nbytes"]))
        assert_same(found[part], expected[part], f"dynamic part of chunk {i}")


def check_encode(
    memory: Memory,
    bits: npt.NDArray[Any],
    dtype: DType,
    codec: tw.Codec,
    *,
    shape: tuple[int, ...] | None = None,
    first: int = 0,
    key: tw.Key = KEY,
    **options: Any,
) -> tw.Buffer:
    """Encode where `memory` is; every byte must be the reference's. Returns that buffer."""
    host = bits.view(dtype.numpy).reshape(bits.shape if shape is None else shape)
    plan = codec.plan(host.shape, dtype.name, **options)
    room = np.full(plan.nbytes, 0x5A, np.uint8)
    options |= {"key": key}
    expected = codec.encode(host, out=room, backend="ref", **options)
    x = memory.put(bits, dtype, first)
    out, scratch = memory.take(plan.nbytes), memory.take(plan.scratch_nbytes)
    buf = codec.encode(x.reshape(host.shape), out=out, scratch=scratch, backend="triton", **options)
    assert buf.array.data_ptr() == out.data_ptr()
    assert_same_buffer(plan, raw(out), room)
    assert buf.overflowed == expected.overflowed
    if not expected.overflowed:
        assert_same(np.frombuffer(bytes(buf), np.uint8), np.asarray(expected.packed()), "packed")
    assert raw(x).tobytes() == bits.tobytes()
    memory.check()
    return buf


def check_decode(
    memory: Memory,
    src: Any,
    bits: npt.NDArray[Any],
    dtype: DType,
    *,
    first: int = 0,
    start: int = 0,
    stop: int | None = None,
    **options: Any,
) -> None:
    """Decode elements `start` to `stop` into poisoned memory: `bits` must come back."""
    expected = bits[start:stop]
    out = memory.elements(dtype, expected.size, first)
    whole = (start, stop) == (0, None)
    if whole and isinstance(src, tw.Buffer):
        out = out.reshape(src.plan.shape)
    if not whole:
        options |= {"start": start, "stop": stop}
    if isinstance(src, tw.Buffer):
        options["scratch"] = memory.take(src.plan.scratch_nbytes)
        before = raw(src.array).copy()
    assert tw.decode(src, out=out, backend="triton", **options) is out
    assert_same(raw(out), expected.view(np.uint8), f"elements {start} to {stop}")
    if isinstance(src, tw.Buffer):
        src.check()
        assert_same(raw(src.array), before, "the buffer that was decoded")
    memory.check()


def there_and_back(
    place: str, bits: npt.NDArray[Any], dtype: DType, codec: tw.Codec | None = None, **options: Any
) -> tw.Buffer:
    memory = Memory(place)
    buf = check_encode(memory, bits, dtype, codec or tw.codec("zipccl"), **options)
    check_decode(memory, buf, decoded_bits(buf, bits), dtype)
    return buf


def decoded_bits(buf: tw.Buffer, bits: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """What must come out of `buf`: `bits`, or what the reference makes of it."""
    if buf.plan.codec.lossless:
        return bits
    values: npt.NDArray[Any] = tw.decode(bytes(buf), backend="ref").reshape(-1)
    return values.view(bits.dtype)


def patterns(names: tuple[str, ...], dtype: DType, n: int) -> npt.NDArray[Any]:
    """`n` elements of each pattern, one after the other."""
    return np.concatenate([make_bits(name, dtype, n, seed=i) for i, name in enumerate(names)])


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


def sums_agree(found: npt.NDArray[Any], expected: npt.NDArray[Any]) -> bool:
    """Bit by bit the same, but for what is in a NaN: devices make others than hosts."""
    both = np.isnan(found) & np.isnan(expected)
    width = f"u{found.itemsize}"
    return bool((both | (found.view(width) == expected.view(width))).all())


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


LOSSY = {
    **{f"mx_{e}": tw.codec("mx", element=e) for e in ("e4m3", "e5m2", "e3m2", "e2m3")},
    "mx_e2m1": tw.codec("mx", element="e2m1", scale_rule="ceil"),
    "mx_int8": tw.codec("mx", element="int8", scale_rule="ceil"),
    "nvfp4": tw.codec("nvfp4"),
    "sdp4bit": tw.codec("sdp4bit"),
}


#: The interpreter is slow: there every dtype meets some of the codecs.
LOSSY_CASES = [
    pytest.param(codec, name, marks=() if (i + j) % 3 == 0 else pytest.mark.gpu, id=f"{key}-{name}")
    for i, (key, codec) in enumerate(LOSSY.items())
    for j, name in enumerate(("bfloat16", "float16", "float32"))
]


@pytest.mark.fast_cases(2)
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize(("codec", "name"), LOSSY_CASES)
def test_lossy(place: str, codec: tw.Codec, name: str) -> None:
    """Whole tiles and a short last block, chunks, addresses that are not aligned, selections."""
    dtype = BY_NAME[name]
    for n in (257, 4096, 70001) if place == "cuda" else (4096,):
        there_and_back(place, patterns(PATTERNS, dtype, n), dtype, codec, chunks=len(PATTERNS))
    for pattern in PATTERNS if place == "cuda" else ("scales", "special"):
        bits = make_bits(pattern, dtype, 2 * 2113 - 1)
        memory = Memory(place)
        buf = check_encode(memory, bits, dtype, codec, first=1, chunks=2)
        assert buf.plan.codec == codec.spec
        expected = decoded_bits(buf, bits)
        check_decode(memory, buf, expected, dtype, first=1, verify=True)
        for start, stop in ((0, 1), (31, 2049), (2000, 2200), (4000, bits.size)):
            check_decode(memory, buf, expected, dtype, start=start, stop=stop)
    there_and_back(place, bits, dtype, codec, checksum=False)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("codec", LOSSY.values(), ids=LOSSY)
def test_lossy_decode_add(place: str, codec: tw.Codec) -> None:
    for name, target in (("bfloat16", "float32"), ("bfloat16", "bfloat16"), ("float32", "float32")):
        dtype, kind = BY_NAME[name], BY_NAME[target]
        bits = make_bits("special", dtype, 2048 + 333)
        memory = Memory(place)
        expected = make_bits("normal", kind, bits.size, seed=1).view(kind.numpy)
        acc = memory.put(expected.view(kind.bits), kind)
        buf = codec.encode(memory.put(bits, dtype), backend="triton")
        assert codec.decode_add(buf, acc, scratch=memory.take(buf.plan.scratch_nbytes)) is acc
        buf.check()
        codec.decode_add(codec.encode(bits.view(dtype.numpy)), expected)
        found = raw(acc).view(kind.numpy).astype(np.float32)
        assert sums_agree(found, expected.astype(np.float32))
        memory.check()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("codec", LOSSY.values(), ids=LOSSY)
def test_lossy_decode_add_encode(place: str, codec: tw.Codec, name: str) -> None:
    """The bytes of the host's three steps, in memory that was given."""
    dtype = BY_NAME[name]
    if place == "cpu" and name == "float16" and codec.name not in ("mx", "nvfp4"):
        pytest.skip("the interpreter is slow")
    for pattern, n, chunks in (("special", 2048 + 333, 1), ("normal", 1501, 2)):
        memory = Memory(place)
        bits = make_bits("special", dtype, n)
        local = make_bits(pattern, dtype, n, seed=2)
        buf = codec.encode(memory.put(bits, dtype), chunks=chunks, backend="triton")
        plan = buf.plan
        out, scratch = memory.take(plan.nbytes), memory.take(plan.scratch_nbytes)
        x = memory.put(local, dtype)
        found = codec.decode_add_encode(
            buf, x, out=out, scratch=scratch, chunks=chunks, backend="triton"
        )
        buf.check()
        y = tw.decode(bytes(buf), backend="ref").astype(np.float32)
        total = (y + local.view(dtype.numpy).astype(np.float32)).astype(dtype.numpy)
        assert bytes(found) == bytes(codec.encode(total, chunks=chunks, backend="ref"))
        assert raw(x).tobytes() == local.tobytes()
        expected = bytes(found)
        again = codec.decode_add_encode(buf, x, out=buf, chunks=chunks, backend="triton")
        assert bytes(again) == expected
        memory.check()
    buf = found
    data = buf.array.clone()
    data[-200] ^= 1
    broken = tw.Buffer.wrap(plan, data)
    with pytest.raises(tw.FormatError, match="checksum_mismatch"):
        # At once, as the interpreter's memory is the host's, or when it is asked for.
        codec.decode_add_encode(broken, x, chunks=chunks, backend="triton")
        broken.check()


def test_nvfp4_sums_with_given_stats(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One pass then, and no checksum where none is asked for."""
    from tightwire import gpu

    monkeypatch.setattr(gpu, "added", None)
    codec, dtype = tw.codec("nvfp4"), BY_NAME["bfloat16"]
    bits, local = make_bits("normal", dtype, 1501), make_bits("normal", dtype, 1501, seed=2)
    memory = Memory(place)
    stats = np.array([np.float32(3).view(np.int32)])
    src = codec.encode(memory.put(bits, dtype), checksum=False, backend="triton")
    given: dict[str, Any] = {"stats": stats, "checksum": False}
    found = codec.decode_add_encode(src, memory.put(local, dtype), **given, backend="triton")
    src.check()
    expected = codec.decode_add_encode(bytes(src), local.view(dtype.numpy), **given, backend="ref")
    assert not expected.plan.checksum
    assert bytes(found) == bytes(expected)


#: Codecs, of which tahquant has narrow tokens.
WIDE_SUMS = [tw.codec(name) for name in ("mx", "nvfp4", "sdp4bit", "taco")]
WIDE_SUMS.append(tw.codec("tahquant", hidden=64))


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("name", "checksum"), [("bfloat16", True), ("float16", False)])
@pytest.mark.parametrize("codec", WIDE_SUMS, ids=lambda codec: str(codec.name))
def test_sums_of_float32_and_a_narrow_buffer(
    place: str, codec: tw.Codec, name: str, checksum: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one pass, and the bytes of the host's three steps."""
    from tightwire import gpu

    if place == "cpu" and (name == "float16") != (codec.name in ("nvfp4", "sdp4bit")):
        pytest.skip("the interpreter is slow, and another codec's case has this dtype")

    monkeypatch.setattr(gpu, "added", None)
    dtype, kind, n = BY_NAME[name], BY_NAME["float32"], 2 * 2048 + 700
    memory = Memory(place)
    local = make_bits("normal", kind, n, seed=2)
    options: dict[str, Any] = {"chunks": 2, "checksum": checksum}
    x = memory.put(make_bits("normal", dtype, n), dtype)
    src = codec.encode(x, **options, backend="triton")
    assert src.plan.codec.name == codec.name
    total = codec.decode_add_encode(src, memory.put(local, kind), **options, backend="triton")
    src.check()
    y = tw.decode(bytes(src), backend="ref").astype(np.float32) + local.view(np.float32)
    expected = bytes(codec.encode(y.astype(dtype.numpy), **options))
    assert bytes(total) == expected
    again = codec.decode_add_encode(bytes(src), local.view(np.float32), **options)
    assert bytes(again) == expected
    memory.check()


@pytest.mark.slow
@pytest.mark.parametrize("hidden", [96, pytest.param(160, marks=pytest.mark.gpu)])
def test_tahquant_sums_of_tokens_whose_last_tile_is_half_empty(place: str, hidden: int) -> None:
    """Its pivot turns what fills it up, too, which tells which tokens are narrow."""
    memory, codec, kind = Memory(place), tw.codec("tahquant", hidden=hidden), BY_NAME["float32"]
    rng = np.random.default_rng(0)
    a, x = rng.standard_normal((2, 20, hidden)).astype(np.float32)
    a[:, hidden // 64 * 64] = 50
    src = codec.encode(memory.put(a.reshape(-1).view(np.uint32), kind), backend="triton")
    x = x.reshape(-1) / 2
    total = codec.decode_add_encode(src, memory.put(x.view(np.uint32), kind), backend="triton")
    src.check()
    assert bytes(total) == bytes(codec.decode_add_encode(bytes(src), x, backend="ref"))


#: Elements of all widths; the interpreter meets each dtype and width once.
AGREED = [("e4m3", "bfloat16"), ("e2m1", "float16"), ("e3m2", "float32"), ("int8", "bfloat16")]
AGREED_GPU = [("e5m2", "bfloat16"), ("e4m3", "float16"), ("e2m1", "bfloat16"), ("e4m3", "float32")]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize(
    ("element", "name"),
    [*AGREED, *(pytest.param(*case, marks=pytest.mark.gpu) for case in AGREED_GPU)],
)
def test_mx_scales_that_are_agreed_on(place: str, element: str, name: str) -> None:
    """Measured, given, and kept by sums, also of float32; chunks may start within a block."""
    dtype, codec = BY_NAME[name], tw.codec("mx", element=element, scale_rule="agreed")
    memory, rng = Memory(place), np.random.default_rng(3)
    for pattern, n, chunks in (("scales", 4 * 2048, 2), ("special", 2 * 2048 + 777, 3)):
        bits, other = (make_bits(pattern, dtype, n, seed=s) for s in (1, 2))
        x, y = memory.put(bits, dtype, first=chunks - 2), memory.put(other, dtype)
        stats = codec.measure(x, backend="triton")
        assert stats.dtype == torch.uint8
        expected = codec.measure(bits.view(dtype.numpy))
        assert np.array_equal(stats.cpu().numpy(), expected)
        own = codec.encode(x, chunks=chunks, backend="triton")
        assert bytes(own) == bytes(codec.encode(bits.view(dtype.numpy), chunks=chunks))
        moved = np.clip(expected.astype(int) + rng.integers(-9, 9, expected.size), 0, 255)
        moved = np.where(
            rng.random(expected.size) < 0.1, rng.integers(0, 255, expected.size), moved
        )
        given = memory.put(moved.astype(np.uint8), BY_NAME["uint8"], first=5)
        src = codec.encode(x, stats=given, chunks=chunks, backend="triton")
        host = codec.encode(bits.view(dtype.numpy), stats=moved.astype(np.uint8), chunks=chunks)
        assert bytes(src) == bytes(host)
        total = codec.decode_add_encode(src, y, chunks=chunks, backend="triton")
        src.check()
        sums = codec.decode_add_encode(host, other.view(dtype.numpy), chunks=chunks, backend="ref")
        assert bytes(total) == bytes(sums)
        again = codec.encode(x, stats=given, chunks=chunks, backend="triton")
        codec.decode_add_encode(again, y, out=again, chunks=chunks, backend="triton")
        assert bytes(again) == bytes(sums)
        wide = make_bits("normal", BY_NAME["float32"], n, seed=4)
        total = codec.decode_add_encode(
            src, memory.put(wide, BY_NAME["float32"]), chunks=chunks, backend="triton"
        )
        for backend in ("ref", "cpu"):
            sums = codec.decode_add_encode(
                host, wide.view(np.float32), chunks=chunks, backend=backend
            )
            assert bytes(total) == bytes(sums)
        with pytest.raises(ValueError, match=r"stats have shape .*allowed"):
            codec.encode(x, stats=stats[:-1], chunks=chunks, backend="triton")
    memory.check()


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_dynamiq_sums_of_float32_keep_widths(place: str, name: str) -> None:
    dtype, kind, n = BY_NAME[name], BY_NAME["float32"], 2 * 2048 + 700
    memory, codec = Memory(place), tw.codec("dynamiq", rounding="nearest")
    local = make_bits("scales", kind, n, seed=2)
    src = codec.encode(memory.put(make_bits("mixed_zeros", dtype, n), dtype), chunks=2)
    found = codec.decode_add_encode(src, memory.put(local, kind), chunks=2, backend="triton")
    src.check()
    for backend in ("ref", "cpu"):
        room = np.frombuffer(bytearray(bytes(src)), np.uint8)
        for out in (None, room):
            again = codec.decode_add_encode(
                room, local.view(np.float32), chunks=2, out=out, backend=backend
            )
            assert bytes(again) == bytes(found)


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32"])
def test_measured_magnitude(place: str, name: str) -> None:
    """Of finite elements alone; and stats from elsewhere are taken."""
    dtype, codec = BY_NAME[name], tw.codec("nvfp4")
    for pattern, n in (("special", 9000), ("zero", 300), ("normal", 1)):
        bits = make_bits(pattern, dtype, n)
        found = codec.measure(Memory(place).put(bits, dtype, 1), backend="triton")
        assert found.tolist() == codec.measure(bits.view(dtype.numpy)).tolist()
    bits = make_bits("normal", dtype, 700)
    stats = np.array([np.float32(1.5).view(np.int32)])
    expected = bytes(codec.encode(bits.view(dtype.numpy), stats=stats))
    x = Memory(place).put(bits, dtype)
    for given in (
        stats,
        torch.from_numpy(stats).to(place),
        torch.from_numpy(stats).long().to(place),
    ):
        assert bytes(codec.encode(x, stats=given, backend="triton")) == expected
    for far in (5, 60 << 23, 0x7F7FFFFF):
        stats = np.array([far])
        expected = bytes(codec.encode(bits.view(dtype.numpy), stats=stats, backend="ref"))
        assert bytes(codec.encode(x, stats=stats, backend="triton")) == expected


TACO: tuple[dict[str, Any], ...] = (
    {},
    {"format": "e5m2", "block": 32, "transform": "hadamard"},
    {"format": "int8", "block": 512, "scales": "merged"},
    {"transform": "none", "scales": "merged", "block": 64},
    {"rounding": "stochastic"},
    {"rounding": "stochastic", "format": "int8", "transform": "none"},
)
TACO_DTYPES = ("bfloat16", "float16", "float32")


def seldom(place: str, name: str, params: dict[str, Any]) -> None:
    """Skip two of three cases of other dtypes than bfloat16 in the interpreter."""
    at = TACO.index(params) + TACO_DTYPES.index(name)
    if place == "cpu" and name != "bfloat16" and at % 3:
        pytest.skip("the interpreter is slow")


@pytest.mark.parametrize("params", TACO, ids=str)
@pytest.mark.parametrize("name", TACO_DTYPES)
def test_taco(place: str, name: str, params: dict[str, Any]) -> None:
    """Whole tiles, a tile at the end, chunks, and elements that lie at odd places."""
    seldom(place, name, params)
    dtype, codec = BY_NAME[name], tw.codec("taco", **params)
    bits = patterns(("normal", "special", "random"), dtype, TILE)
    buf = there_and_back(place, bits, dtype, codec, chunks=3)
    assert buf.plan.codec.name == "taco"
    cases = [("scales", 4999, 2, 0), ("mixed_zeros", 1301, 1, 1)]
    if place == "cuda":
        cases = [(p, n, c, f) for p in PATTERNS for n in SIZES for c in (1, 3) for f in (0, 1)]
    for pattern, n, chunks, first in cases:
        bits = make_bits(pattern, dtype, n)
        memory = Memory(place)
        buf = check_encode(memory, bits, dtype, codec, first=first, chunks=chunks)
        if buf.plan.codec.name == "taco":
            check_decode(memory, buf, decoded_bits(buf, bits), dtype, first=first)


@pytest.mark.slow
@pytest.mark.parametrize("params", TACO[:4], ids=str)
@pytest.mark.parametrize("chunks", [1, 3])
def test_taco_selections(place: str, params: dict[str, Any], chunks: int) -> None:
    if place == "cpu" and (TACO.index(params) + chunks // 2) % 2:
        pytest.skip("the interpreter is slow")
    dtype = BY_NAME["bfloat16"]
    n = 4 * TILE + 700
    bits = make_bits("normal", dtype, n)
    memory = Memory(place)
    buf = check_encode(memory, bits, dtype, tw.codec("taco", **params), chunks=chunks)
    expected = decoded_bits(buf, bits)
    cuts = [(0, 1), (8, TILE + 8), (TILE, 3 * TILE), (n - 1, n), (5, n - 9), (17, 17)]
    for start, stop in cuts:
        check_decode(memory, buf, expected, dtype, start=start, stop=stop, verify=False)
    check_decode(memory, buf, expected, dtype, start=TILE - 3, stop=TILE + 9, verify=True)
    check_decode(memory, buf, expected, dtype, start=100, stop=6000, first=1)


def test_taco_damage_outside_of_a_selection_is_not_seen(place: str) -> None:
    """A wrong code in a block of the same tile matters to those who decode that block."""
    dtype, codec = BY_NAME["float16"], tw.codec("taco", block=64)
    bits = make_bits("normal", dtype, TILE + 300)
    data = bytearray(bytes(codec.encode(bits.view(np.float16), checksum=False)))
    data[128 + 1000] = 0x7F
    memory = Memory(place)
    src = memory.put(np.frombuffer(bytes(data), np.uint8), BY_NAME["uint8"])
    for start, stop in ((0, 960), (1024, TILE + 300)):
        part = tw.decode(src, start=start, stop=stop, backend="triton")
        assert raw(part).tobytes() == tw.decode(bytes(data), start=start, stop=stop).tobytes()
    for start, stop in ((0, 961), (1023, 1024), (0, TILE)):
        with pytest.raises(tw.FormatError, match="bad_payload"):
            tw.decode(src, start=start, stop=stop, backend="triton")


@pytest.mark.slow
@pytest.mark.parametrize("name", TACO_DTYPES)
def test_taco_decode_add(place: str, name: str) -> None:
    dtype, kind = BY_NAME[name], BY_NAME["float32"]
    codec = tw.codec("taco")
    for n, chunks in ((TILE + 700, 1), (1301, 1), (2 * TILE + 500, 2)):
        bits = make_bits("scales", dtype, n)
        memory = Memory(place)
        expected = make_bits("normal", kind, n, seed=1).view(np.float32)
        acc = memory.put(expected.view(np.uint32), kind)
        buf = codec.encode(memory.put(bits, dtype), chunks=chunks, backend="triton")
        assert codec.decode_add(buf, acc) is acc
        buf.check()
        codec.decode_add(bytes(buf), expected)
        assert sums_agree(raw(acc).view(np.float32), expected)
        memory.check()


@pytest.mark.parametrize("params", TACO, ids=str)
@pytest.mark.parametrize("name", TACO_DTYPES)
def test_taco_decode_add_encode(
    place: str, name: str, params: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One pass, and the bytes of decoding, adding and encoding."""
    from tightwire import gpu

    seldom(place, name, params)
    monkeypatch.setattr(gpu, "added", None)
    dtype, codec = BY_NAME[name], tw.codec("taco", **params)
    for pattern, n, chunks, first in (
        ("special", TILE + 700, 1, 0),
        ("normal", 4999, 2, 0),
        ("random", 1301, 1, 1),
    ):
        bits, other = make_bits(pattern, dtype, n), make_bits("scales", dtype, n, seed=1)
        memory = Memory(place)
        src = codec.encode(memory.put(bits, dtype), chunks=chunks, key=KEY, backend="triton")
        if src.plan.codec.name != "taco":
            continue
        before = bytes(src)
        x = memory.put(other, dtype, first)
        out, scratch = memory.take(src.plan.nbytes), memory.take(src.plan.scratch_nbytes)
        total = codec.decode_add_encode(
            src, x, key=KEY, out=out, scratch=scratch, chunks=chunks, backend="triton"
        )
        src.check()
        expected = codec.decode_add_encode(
            before, other.view(dtype.numpy), key=KEY, chunks=chunks, backend="ref"
        )
        assert bytes(total) == bytes(expected)
        assert total.array.data_ptr() == out.data_ptr()
        assert (bytes(src), raw(x).tobytes()) == (before, other.tobytes())
        memory.check()


@pytest.mark.parametrize(("at", "reason"), [(300, "checksum_mismatch"), (88, "bad_record")])
def test_taco_decode_add_encode_finds_damage(place: str, at: int, reason: str) -> None:
    dtype, codec = BY_NAME["bfloat16"], tw.codec("taco")
    memory = Memory(place)
    x = memory.put(make_bits("normal", dtype, TILE + 700), dtype)
    src = codec.encode(x, backend="triton")
    src.array[at] ^= 4
    codec.decode_add_encode(src, x, backend="triton")
    with pytest.raises(tw.FormatError, match=reason):
        src.check()


def test_taco_keys_on_the_device(place: str) -> None:
    """The same words, whether numbers come with the launch or lie in memory."""
    dtype, codec = BY_NAME["bfloat16"], tw.codec("taco", rounding="stochastic")
    bits = make_bits("normal", dtype, TILE + 700)
    memory = Memory(place)
    x = memory.put(bits, dtype)

    def word(value: int) -> Any:
        return torch.tensor([value], dtype=torch.int64, device=place)

    expected = bytes(codec.encode(bits.view(dtype.numpy), key=tw.Key((1 << 64) - 5, 9, 4)))
    for seed, step in ((word(-5), word(9)), ((1 << 64) - 5, word(9)), (word(-5), 9)):
        key = tw.Key(seed, step, 4)
        assert bytes(codec.encode(x, key=key, backend="triton")) == expected
    for key in (tw.Key(word(1)[:0]), tw.Key(torch.ones(1, device=place)), tw.Key(word(1), 0, -1)):
        with pytest.raises((TypeError, ValueError), match="allowed"):
            codec.encode(x, key=key, backend="triton")
    with pytest.raises(ValueError, match="needs key"):
        codec.encode(x, backend="triton")


#: Pairs of codecs: of a buffer, and of the sum that is made of it.
SDP4BIT = {
    "two_levels": (
        tw.codec("sdp4bit", bits=8, rotate="encode"),
        tw.codec("sdp4bit", rotate="decode", rounding="stochastic"),
    ),
    "weights": (
        tw.codec("sdp4bit", rotate="none", group=4096),
        tw.codec("sdp4bit", bits=8, group=32, rounding="stochastic"),
    ),
}


@pytest.mark.fast_cases(1)
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("name", TACO_DTYPES)
@pytest.mark.parametrize("pair", SDP4BIT.values(), ids=SDP4BIT)
def test_sdp4bit_sums(
    place: str, pair: tuple[tw.Codec, tw.Codec], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Encoded by one codec, added in one pass to what the other encodes, and that decoded."""
    from tightwire import gpu

    monkeypatch.setattr(gpu, "added", None)
    dtype, (source, codec) = BY_NAME[name], pair
    for pattern, n, chunks, first in (("special", TILE + 700, 1, 0), ("normal", 1301, 2, 1)):
        bits, other = make_bits(pattern, dtype, n), make_bits("scales", dtype, n, seed=1)
        memory = Memory(place)
        src = check_encode(memory, bits, dtype, source, chunks=chunks)
        x = memory.put(other, dtype, first)
        out, scratch = memory.take(src.plan.nbytes + 4096), memory.take(src.plan.scratch_nbytes)
        total = codec.decode_add_encode(
            src, x, key=KEY, out=out, scratch=scratch, chunks=chunks, backend="triton"
        )
        src.check()
        expected = codec.decode_add_encode(
            bytes(src), other.view(dtype.numpy), key=KEY, chunks=chunks, backend="ref"
        )
        assert bytes(total) == bytes(expected)
        check_decode(memory, total, decoded_bits(expected, bits), dtype, start=40, stop=n - 1)
        memory.check()
    src.array[200] ^= 1
    codec.decode_add_encode(src, x, key=KEY, chunks=chunks, backend="triton")
    with pytest.raises(tw.FormatError, match="checksum_mismatch"):
        src.check()


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("name", "params", "n", "chunks", "first"),
    [
        ("float32", {}, TILE + 700, 1, 0),
        ("bfloat16", {"hidden": 1024}, 6 * 1024, 1, 0),
        ("float16", {"hidden": 399}, 4500, 2, 0),
        ("bfloat16", {"hidden": 400}, 3 * 2800, 3, 1),
        ("float32", {"direction": "backward", "hidden": 100}, TILE + 700, 1, 0),
        ("bfloat16", {"direction": "backward"}, 2 * (TILE + 64), 2, 0),
    ],
)
def test_tahquant(
    place: str,
    name: str,
    params: dict[str, Any],
    n: int,
    chunks: int,
    first: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both ways, in part, added to float32, and added and encoded again without a temporary sum."""
    from tightwire import gpu

    monkeypatch.setattr(gpu, "added", None)
    dtype, kind, codec = BY_NAME[name], BY_NAME["float32"], tw.codec("tahquant", **params)
    for pattern in PATTERNS if place == "cuda" else ("special",):
        bits, other = make_bits(pattern, dtype, n), make_bits("scales", dtype, n, seed=1)
        memory = Memory(place)
        buf = check_encode(memory, bits, dtype, codec, first=first, chunks=chunks)
        assert buf.plan.codec.name == "tahquant"
        expected = decoded_bits(buf, bits)
        for start, stop in ((0, None), (100, n - 9), (n // 2, n // 2 + 70)):
            check_decode(memory, buf, expected, dtype, first=first, start=start, stop=stop)
        check_decode(memory, buf, expected, dtype, start=n - 3, stop=n, verify=True)
        sums = make_bits("normal", kind, n, seed=2).view(np.float32)
        acc = memory.put(sums.view(np.uint32), kind)
        codec.decode_add(buf, acc)
        buf.check()
        codec.decode_add(bytes(buf), sums)
        assert sums_agree(raw(acc).view(np.float32), sums)
        out, scratch = memory.take(buf.plan.nbytes), memory.take(buf.plan.scratch_nbytes)
        x = memory.put(other, dtype, first)
        total = codec.decode_add_encode(
            buf, x, out=out, scratch=scratch, chunks=chunks, backend="triton"
        )
        buf.check()
        again = codec.decode_add_encode(
            bytes(buf), other.view(dtype.numpy), chunks=chunks, backend="ref"
        )
        assert bytes(total) == bytes(again)
        memory.check()


def test_tahquant_logarithms_of_numbers_of_8_bits() -> None:
    """Between powers of two the polynomial gives what the page's whole numbers do, fused or not."""
    from tightwire.codecs import tahquant_ranks_triton
    from tightwire.codecs.tahquant import LOG

    f = np.arange(128) << 9
    h = LOG[0] - ((LOG[1] - (LOG[2] * f >> 16)) * f >> 16)
    expected = (f + ((f * (65536 - f) >> 16) * h >> 16) >> 4) - (f >> 4)
    a, b, c, d = (np.float32(x) for x in tahquant_ranks_triton.SHORT_LOG)
    less = np.float32(tahquant_ranks_triton._SHORT_LESS.value)
    for kind in (np.float32, np.float64):
        # Products and sums of float64 are exact enough to be rounded once, as if fused.
        m: Any = (1 + f / 65536).astype(kind)
        p = (kind(d) * m + kind(c)).astype(np.float32)
        p = (p.astype(kind) * m + kind(b)).astype(np.float32)
        p = (p.astype(kind) * m + kind(a)).astype(np.float32)
        assert np.array_equal(np.floor(p.astype(kind) * m - kind(less)), expected)


def test_tahquant_with_more_tokens_than_a_program_looks_at(place: str) -> None:
    """Some thousand tokens, equal ones among them, in the kernels that rank them."""
    from tightwire.codecs import tahquant_ranks_triton
    from tightwire.codecs.tahquant import Tahquant

    dtype, hidden, tokens = BY_NAME["bfloat16"], 64, 5000
    assert tokens > tahquant_ranks_triton._TOKENS.value
    codec = tw.codec("tahquant", hidden=hidden)
    plan = codec.plan((tokens * hidden,), dtype.name)
    bits = make_bits("normal", dtype, tokens * hidden)
    expected = np.frombuffer(bytes(codec.encode(bits.view(dtype.numpy))), np.uint8)
    index = slice(plan.dynamic_offset - plan.layout.sections[2].nbytes, plan.dynamic_offset)
    spec = plan.codec
    narrow = np.unpackbits(expected[index], bitorder="little")[:tokens].astype(np.int64)
    assert isinstance(spec, Tahquant)
    memory = Memory(place)
    src = memory.put(expected, BY_NAME["uint8"])
    # Behind the table's words three rows of int32: ranks, those of a second buffer, entropies.
    stats = memory.elements(BY_NAME["int32"], 32 + 3 * tokens)
    status = memory.put(np.zeros(1, np.uint64), BY_NAME["int64"])
    tahquant_ranks_triton.read_ranks(plan, src, stats.view(torch.uint8), status, 0, 1)
    ranks = 2 * (np.cumsum(narrow) - narrow) + narrow
    assert raw(stats).view(np.int32)[32 : 32 + tokens].tolist() == ranks.tolist()
    assert int(status.item()) == 0
    entropies = np.where(narrow != 0, 7, 1000 + np.arange(tokens) % 3)
    entropies[np.flatnonzero(narrow)[-1]] = 1000
    stats[32 + 2 * tokens :] = torch.from_numpy(entropies.astype(np.int32))
    out = memory.take(plan.nbytes)
    table = tahquant_ranks_triton.table_on(plan, out.device)
    tahquant_ranks_triton._SELECT.launch(2, (out, stats.view(torch.uint8), table), 2)
    chosen = np.zeros(tokens, np.int64)
    chosen[np.argsort(entropies, kind="stable")[: tokens // 5]] = 1
    found = np.unpackbits(raw(out)[index][: tokens // 8], bitorder="little")[:tokens]
    assert found.tolist() == chosen.tolist()
    ranks = 2 * (np.cumsum(chosen) - chosen) + chosen
    assert raw(stats).view(np.int32)[32 : 32 + tokens].tolist() == ranks.tolist()
    memory.check()


@pytest.mark.parametrize(("at", "reason"), [(300, "checksum_mismatch"), (104, "bad_record")])
def test_tahquant_decode_add_encode_finds_damage(place: str, at: int, reason: str) -> None:
    dtype, codec = BY_NAME["bfloat16"], tw.codec("tahquant")
    memory = Memory(place)
    x = memory.put(make_bits("normal", dtype, TILE + 700), dtype)
    src = codec.encode(x, backend="triton")
    src.array[at] ^= 4
    codec.decode_add_encode(src, x, backend="triton")
    with pytest.raises(tw.FormatError, match=reason):
        src.check()


DYNAMIQ: dict[str, dict[str, Any]] = {
    "default": {},
    "paper": {
        "super_group": 128,
        "group": 64,
        "center": True,
        "grid": "signed",
        "scales": "stochastic",
        "rounding": "stochastic",
    },
    "wide": {"widths": "pow2", "scales": "wide", "super_group": 1024, "center": True},
    "fixed": {"widths": "fixed", "grid": "uniform", "rounding": "nearest", "group": 8, "bits": 8},
}


@pytest.mark.fast_cases(1)
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize(
    ("name", "params", "pattern", "n", "chunks", "first"),
    [
        ("bfloat16", "default", "scales", 8192 + 700, 1, 0),
        ("float16", "default", "special", 2 * 2051 - 1, 2, 1),
        ("float32", "paper", "special", 2 * 2051, 2, 1),
        ("float16", "wide", "scales", 5001, 1, 0),
        ("bfloat16", "fixed", "mixed_zeros", 3 * 1304 - 5, 3, 0),
    ],
)
def test_dynamiq(
    place: str,
    name: str,
    params: str,
    pattern: str,
    n: int,
    chunks: int,
    first: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both ways, in part, added to float32, and added and encoded again without a temporary sum."""
    from tightwire import gpu

    monkeypatch.setattr(gpu, "added", None)
    dtype, kind, codec = BY_NAME[name], BY_NAME["float32"], tw.codec("dynamiq", **DYNAMIQ[params])
    bits, other = make_bits(pattern, dtype, n), make_bits("scales", dtype, n, seed=1)
    key, memory = tw.Key(KEY.seed, 7, 4, 5), Memory(place)
    buf = check_encode(memory, bits, dtype, codec, first=first, key=key, chunks=chunks)
    assert buf.plan.codec.name == "dynamiq"
    expected = decoded_bits(buf, bits)
    check_decode(memory, buf, expected, dtype, first=first)
    check_decode(memory, buf, expected, dtype, start=n // 2 + 3, stop=n - 9, verify=True)
    sums = make_bits("normal", kind, n, seed=2).view(np.float32)
    acc = memory.put(sums.view(np.uint32), kind)
    codec.decode_add(buf, acc, scratch=memory.take(buf.plan.scratch_nbytes))
    buf.check()
    codec.decode_add(bytes(buf), sums)
    assert sums_agree(raw(acc).view(np.float32), sums)
    out, scratch = memory.take(buf.plan.nbytes), memory.take(buf.plan.scratch_nbytes)
    x = memory.put(other, dtype, first)
    total = codec.decode_add_encode(
        buf, x, key=key, out=out, scratch=scratch, chunks=chunks, backend="triton"
    )
    buf.check()
    again = codec.decode_add_encode(
        bytes(buf), other.view(dtype.numpy), key=key, chunks=chunks, backend="ref"
    )
    assert bytes(total) == bytes(again)
    assert raw(x).tobytes() == other.tobytes()
    memory.check()


def test_dynamiq_chunks_of_hardly_any_elements(place: str) -> None:
    """A plan that the planner would leave to raw, with chunks of 2, 1 and 0 elements."""
    from tightwire.codecs.dynamiq import Dynamiq, decode_chunk

    dtype, spec = BY_NAME["bfloat16"], Dynamiq(rounding="nearest")
    plan = Plan(spec, dtype, (5,), 4, spec.layout(dtype, 2), 0)
    kernels: Any = device_module("dynamiq")
    bits = make_bits("normal", dtype, 5)
    expected = np.full(plan.nbytes, 0x5A, np.uint8)
    engine.encode_into(plan, bits, expected, backend="ref")
    memory = Memory(place)
    out = memory.take(plan.nbytes)
    kernels.encode(plan, memory.put(bits, dtype), out, memory.take(plan.scratch_nbytes))
    assert_same_buffer(plan, raw(out), expected)
    y, status = memory.elements(dtype, 5), torch.zeros(1, dtype=torch.int64, device=place)
    kernels.decode(plan, out, y, memory.take(plan.scratch_nbytes), status)
    assert status.tolist() == [0]
    found = raw(y).view(np.uint16)
    for i in range(4):
        lo, hi = plan.chunk_range(i)
        decoded = np.empty(hi - lo, np.uint16)
        problem = decode_chunk(spec, plan.chunk(i, expected, expected[:0]), decoded).problem
        assert problem is None
        assert found[lo:hi].tolist() == decoded.tolist()
    memory.check()


@pytest.mark.slow
def test_dynamiq_stats(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured, given from the host or the device, of another tensor, for a sum; and wrong ones."""
    from tightwire import gpu

    monkeypatch.setattr(gpu, "added", None)
    dtype, codec, n = BY_NAME["bfloat16"], tw.codec("dynamiq", rounding="nearest"), 3001
    bits, other = make_bits("scales", dtype, n), make_bits("normal", dtype, n, seed=3)
    memory = Memory(place)
    x = memory.put(bits, dtype)
    expected = codec.measure(other.view(dtype.numpy))
    stats = codec.measure(memory.put(other, dtype), backend="triton")
    assert raw(stats).tobytes() == expected.tobytes()
    assert stats.dtype == torch.float32
    host = codec.encode(bits.view(dtype.numpy), stats=expected)
    for given in (stats, expected):
        assert bytes(codec.encode(x, stats=given, backend="triton")) == bytes(host)
    mine = codec.encode(x, backend="triton")
    total = codec.decode_add_encode(mine, x, stats=stats, backend="triton")
    sums = (tw.decode(bytes(mine)).astype(np.float32) + bits.view(dtype.numpy)).astype(dtype.numpy)
    assert bytes(total) == bytes(codec.encode(sums, stats=expected))
    for bad in (stats[:-1], stats.double(), stats.reshape(1, -1), -expected, expected[None]):
        with pytest.raises(ValueError, match="stats"):
            codec.encode(x, stats=bad, backend="triton")
    # Nobody reads those on the device: they count as 0, or as the largest number.
    strange = stats.clone()
    strange[:4] = torch.tensor([math.nan, -1.0, math.inf, 1e-40])
    clean = expected.copy()
    clean[:4] = 0, 0, np.finfo(np.float32).max, 0
    host = codec.encode(bits.view(dtype.numpy), stats=clean)
    assert bytes(codec.encode(x, stats=strange, backend="triton")) == bytes(host)
    memory.check()


@pytest.mark.slow
@pytest.mark.parametrize("widths", ["any", "pow2"])
def test_dynamiq_widths_of_many_super_groups(place: str, widths: str) -> None:
    """More than a block of them, chunks that cut some in two, ties, zeros; back from an index."""
    from tightwire.codecs import dynamiq, dynamiq_codes_triton
    from tightwire.codecs.common.driver_triton import Reads
    from tightwire.codecs.dynamiq_widths_triton import Widths

    chunks, groups = 2, 4500
    codec = tw.codec("dynamiq", widths=widths, super_group=128, bits=4, rounding="nearest")
    plan = codec.plan((2 * (groups * 128 - 40),), "bfloat16", chunks=chunks)
    spec = plan.codec
    assert isinstance(spec, dynamiq.Dynamiq)
    rng = np.random.default_rng(1)
    g = Widths.of(plan)
    assert g.blocks > 2
    tables = dynamiq_codes_triton.tables_of(spec.grid, torch.device(place))
    for spread in (0.3, 40.0):
        stats = np.exp(spread * rng.standard_normal(g.stats)).astype(np.float32)
        stats[rng.random(g.stats) < 0.3] = np.float32(1.5)
        stats[rng.random(g.stats) < 0.1] = 0
        memory = Memory(place)
        energies = memory.put(stats.view(np.uint32), BY_NAME["float32"])
        _, _, state, counts, work = g.parts_of(memory.take(plan.scratch_nbytes), 1, tables.device)
        g.choose(energies, state, counts, work, tables, (4, 3))
        data = np.zeros(plan.nbytes, np.uint8)
        wanted = []
        for i in range(chunks):
            chunk = plan.chunk(i, data, data[:0])
            units = spec.units(chunk.nelem)
            found = dynamiq.choose_widths(spec, dynamiq.chunk_energies(spec, chunk, stats), units)
            dynamiq.store_widths(dynamiq.static_views(spec, chunk), found)
            index_at = sum(section.nbytes for section in plan.layout.sections[:2]) // 128
            head = [found.sum(), units, index_at]
            wanted.append((head, dynamiq.first_rows(found) << 4 | found))
        status = torch.zeros(1, dtype=torch.int64, device=place)
        sums = torch.zeros(chunks, dtype=torch.int64, device=place)
        src = memory.put(data, BY_NAME["uint8"])
        g.read(Reads(src, sums, status, 0, chunks, True), chunks, counts, work, tables, (1, 0))
        assert status.tolist() == [0]
        assert raw(work)[: tables.nbytes].tobytes() == raw(tables).tobytes()
        size = 2 * chunks * (dynamiq.WORK_HEAD + groups)
        left = raw(work).view(np.int64)[dynamiq.TABLES :][:size].reshape(2, chunks, -1)
        for k, shares in enumerate(([4, 3], [1, 0])):
            for i, (head, expected) in enumerate(wanted):
                assert left[k, i, :5].tolist() == head + shares
                assert np.array_equal(left[k, i, dynamiq.WORK_HEAD :], expected)
        memory.check()


@pytest.mark.parametrize("grid", ["balanced", "signed", "uniform"])
def test_dynamiq_finds_the_place_in_a_grid_from_an_estimate(grid: str) -> None:
    """Numbers next to all values, and between them: less than half a step off, by any log2."""
    from tightwire.codecs import dynamiq, dynamiq_codes_triton

    table = dynamiq_codes_triton.tables_of(grid, torch.device("cpu")).numpy()
    for width in range(2, 9):
        half = dynamiq.grid_of(grid, width)[0][1 << width - 1 :].astype(np.float64)
        shapes = table[dynamiq_codes_triton.SHAPES.value + 8 * width :].astype(np.float64)
        v = np.concatenate([np.linspace(a, b, 9) for a, b in itertools.pairwise(half)])
        exact = np.interp(v, half, np.arange(half.size))
        for (offset, slope, factor), ahead in ((shapes[:3], 0.0), (shapes[4:7], 0.5)):
            assert np.abs(np.log2(offset + v * slope) * factor - ahead - exact).max() < 0.4
        # Below the first value of a balanced grid.
        least = np.log2(shapes[0]) * shapes[2]
        assert -0.9 < least < 0 if grid == "balanced" else -0.4 < least < 0.4


@pytest.mark.parametrize("grid", ["balanced", "signed", "uniform"])
def test_dynamiq_bounds_are_the_least_numbers_rounded_up(grid: str) -> None:
    from tightwire.codecs import dynamiq, dynamiq_codes_triton

    half = np.float32(0.5)
    for width in range(2, 9):
        values, inverse = dynamiq.grid_of(grid, width)
        bounds = dynamiq_codes_triton._bounds(values, inverse)
        below = np.nextafter(bounds, np.float32(-2))
        up = (bounds - values[:-1]) * inverse[:-1] > half
        assert np.all(up | (bounds == values[1:]))
        assert not np.any((below - values[:-1]) * inverse[:-1] > half)
        assert np.all(below < values[1:])
        assert np.all((bounds > values[:-1]) | (bounds == 0))


@pytest.mark.parametrize(
    ("at", "value", "checksum", "reason"),
    [
        (200, 1, True, "checksum_mismatch"),
        (88, 4, True, "bad_record"),
        (-128, 9, False, "bad_payload"),
        (-128, 0x88, False, "bad_payload"),
        (-120, 1, False, "bad_payload"),
        (-119, 1, False, "reserved_not_zero"),
        ("words", 0x7F, False, "bad_payload"),
        ("rows", 1, False, "bad_payload"),
    ],
)
def test_dynamiq_finds_damage(
    place: str, at: int | str, value: int, checksum: bool, reason: str
) -> None:
    """Also in what is decoded, added to and encoded; widths that are too many stay inside."""
    dtype, codec = BY_NAME["bfloat16"], tw.codec("dynamiq", rounding="nearest")
    bits = make_bits("zero" if at == "rows" else "normal", dtype, 17 * 256)
    data = np.frombuffer(
        bytes(codec.encode(bits.view(dtype.numpy), checksum=checksum)), np.uint8
    ).copy()
    plan = codec.plan((bits.size,), dtype.name, checksum=checksum)
    payload = plan.static_offset + plan.layout.sections[0].nbytes
    where = {"words": payload + 1, "rows": payload - 128 - 40}.get(str(at), at)
    assert isinstance(where, int)
    data[where] = data[where] ^ value if checksum else value
    with pytest.raises(tw.FormatError, match=reason):
        tw.decode(data.tobytes(), backend="ref")
    memory = Memory(place)
    src = tw.Buffer.wrap(plan, memory.put(data, BY_NAME["uint8"]))
    x, out = memory.put(bits, dtype), memory.take(plan.nbytes)
    with pytest.raises(tw.FormatError, match=reason):
        # At once, as the interpreter's memory is the host's, or when it is asked for.
        codec.decode_add_encode(src, x, out=out, checksum=checksum, backend="triton")
        src.check()
    memory.check()
    if at != 200:
        with pytest.raises(tw.FormatError, match=reason):
            tw.decode(src, backend="triton", verify=True)


def test_dynamiq_keys_on_the_device(place: str) -> None:
    dtype, codec = BY_NAME["bfloat16"], tw.codec("dynamiq", super_group=1024, scales="stochastic")
    bits = make_bits("normal", dtype, 2048)
    x = Memory(place).put(bits, dtype)
    seed = torch.tensor([-5], dtype=torch.int64, device=place)
    expected = codec.encode(bits.view(dtype.numpy), key=tw.Key((1 << 64) - 5, 9, 4, 6))
    found = codec.encode(x, key=tw.Key(seed, 9, 4, 6), backend="triton")
    assert bytes(found) == bytes(expected)
    for key in (tw.Key(seed, 0, 0, 0), tw.Key(seed, 0, -1, 2), tw.Key(1, 2, 3, 1.5)):  # type: ignore[arg-type]
        with pytest.raises((TypeError, ValueError), match="allowed"):
            codec.encode(x, key=key, backend="triton")
    with pytest.raises(ValueError, match="needs key"):
        codec.encode(x, backend="triton")


def sparse_bits(pattern: str, dtype: DType, n: int, share: float) -> npt.NDArray[Any]:
    """Bits of a pattern, about `share` of which are not zero."""
    bits = make_bits(pattern, dtype, n)
    bits[np.random.default_rng(n).random(n) > share] = 0
    return bits


@pytest.mark.fast_cases(1)
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize(
    ("name", "params", "pattern", "n", "share", "chunks", "first", "rounds"),
    [
        # All peel, in launches of their own and in those that follow.
        ("float32", {"ratio": 2}, "special", 4 * 1024 + 37, 0.36, 1, 0, 2),
        # Most are estimated, some cells of an element coincide; a chunk of more than a tile.
        ("bfloat16", {"mapping": "published"}, "normal", 2 * 5003 - 1, 0.5, 2, 1, 0),
        ("float16", {"sketch": "bfloat16"}, "special", 3000, 0.7, 1, 0, 0),
    ],
)
def test_lhc(
    place: str,
    name: str,
    params: dict[str, Any],
    pattern: str,
    n: int,
    share: float,
    chunks: int,
    first: int,
    rounds: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both ways, in part, and added to float32."""
    from tightwire.codecs import lhc_peeling_triton

    if rounds:
        monkeypatch.setattr(lhc_peeling_triton, "SMALL_BLOCKS", 0)
        monkeypatch.setattr(lhc_peeling_triton, "ROUNDS", rounds)
    dtype, codec, memory = BY_NAME[name], tw.codec("lhc", **params), Memory(place)
    bits = sparse_bits(pattern, dtype, n, share)
    buf = check_encode(memory, bits, dtype, codec, first=first, chunks=chunks)
    assert buf.plan.codec.name == "lhc"
    expected = decoded_bits(buf, bits)
    if rounds:
        assert expected.tobytes() == np.where(bits << 1, bits, 0).astype(bits.dtype).tobytes()
    else:
        assert expected.tobytes() != bits.tobytes()
    check_decode(memory, buf, expected, dtype, first=first)
    check_decode(memory, buf, expected, dtype, start=n // 2 + 3, stop=n - 9, verify=True)
    sums = make_bits("normal", BY_NAME["float32"], n, seed=2).view(np.float32)
    acc = memory.put(sums.view(np.uint32), BY_NAME["float32"])
    codec.decode_add(buf, acc, scratch=memory.take(buf.plan.scratch_nbytes))
    buf.check()
    codec.decode_add(bytes(buf), sums)
    assert sums_agree(raw(acc).view(np.float32), sums)
    memory.check()


def test_lhc_chunks_of_hardly_any_elements(place: str) -> None:
    """A plan that the planner would leave to raw, with chunks of 2, 1 and 0 elements."""
    from tightwire.codecs.lhc import Lhc

    dtype, spec = BY_NAME["bfloat16"], Lhc()
    plan = Plan(spec, dtype, (5,), 4, spec.layout(dtype, 2), 0)
    kernels: Any = device_module("lhc")
    bits = make_bits("normal", dtype, 5)
    expected = np.full(plan.nbytes, 0x5A, np.uint8)
    engine.encode_into(plan, bits, expected, backend="ref")
    memory = Memory(place)
    out, scratch = memory.take(plan.nbytes), memory.take(plan.scratch_nbytes)
    kernels.encode(plan, memory.put(bits, dtype), out, scratch)
    assert_same_buffer(plan, raw(out), expected)
    y, status = memory.elements(dtype, 5), torch.zeros(1, dtype=torch.int64, device=place)
    kernels.decode(plan, out, y, scratch, status)
    assert status.tolist() == [0]
    assert raw(y).tobytes() == bits.tobytes()
    memory.check()


def test_lhc_sums_of_ranks(place: str) -> None:
    """An index measured on the device, and a union; sketches are views; chunks begin in a byte."""
    from tightwire.homomorphic import sketch

    dtype, codec, n, chunks = BY_NAME["float32"], tw.codec("lhc", ratio=2), 2 * 2501, 2
    memory = Memory(place)
    ranks = [sparse_bits("normal", dtype, n, 0.1 + 0.01 * i).view(np.float32) for i in range(2)]
    xs = [memory.put(x.view(np.uint32), dtype) for x in ranks]
    measured = [codec.measure(x, backend="triton") for x in xs]
    for found, x in zip(measured, ranks, strict=True):
        assert found.dtype == torch.uint8
        assert raw(found).tobytes() == codec.measure(x).tobytes()
    index = measured[0] | measured[1]
    hosted = raw(index)
    buffers = []
    for x, rank, stats in zip(xs, ranks, (index, hosted), strict=True):
        buf = codec.encode(x, stats=stats, chunks=chunks, checksum=False, backend="triton")
        expected = codec.encode(rank, stats=hosted, chunks=chunks, checksum=False)
        assert bytes(buf) == bytes(expected)
        buffers.append(buf)
    for i in range(chunks):
        sketch(buffers[0], i).add_(sketch(buffers[1], i))
    found = tw.decode(buffers[0], backend="triton", verify=True)
    assert raw(found).tobytes() == (ranks[0] + ranks[1]).tobytes()
    memory.check()


def test_lhc_refuses_wrong_indexes(place: str) -> None:
    """At once where the host sees it; else by a mark that decoding meets."""
    dtype, codec, n = BY_NAME["bfloat16"], tw.codec("lhc", ratio=2), 5000
    bits = sparse_bits("normal", dtype, n, 0.2)
    x = Memory(place).put(bits, dtype)
    stats = codec.measure(x, backend="triton")
    for bad in (stats[:-1], stats.int(), stats.reshape(1, -1), raw(stats)[:-1], raw(stats)[None]):
        with pytest.raises(ValueError, match=r"stats.*allowed"):
            codec.encode(x, stats=bad, chunks=2, backend="triton")
    # An element of the second chunk.
    stats[500] = 0
    buf = codec.encode(x, stats=stats, chunks=2, backend="triton")
    assert buf.overflowed
    assert raw(buf.array)[buf.plan.header.nbytes :][:64].view(RECORD)["flags"].tolist() == [0, 2]
    with pytest.raises(tw.FormatError, match="dynamic_overflow"):
        tw.decode(buf, backend="triton", verify=True)
    for data in (buf.array, raw(buf.array).tobytes()):
        with pytest.raises(tw.FormatError, match="dynamic_overflow"):
            tw.decode(data)


HOMOMORPHIC = [
    # Chunks that cut the tensor's blocks; their last is short, and infinite values are lost.
    ("thc", "bfloat16", {}, "special", 5199, 2, 1),
    ("thc", "float32", {"bits": 16}, "scales", 4096 + 900, 1, 0),
    ("thc", "float16", {"norm": "tensor"}, "normal", 3002, 2, 0),
    # More blocks than a program chooses among.
    ("omnireduce", "bfloat16", {"block": 64, "bits": 4}, "special", 70_001, 1, 1),
    ("omnireduce", "float32", {"block": 1024, "values": "float16"}, "scales", 19_000, 2, 0),
    ("omnireduce", "float16", {"values": "float32", "block": 128}, "mixed_zeros", 5000, 3, 0),
    # All norms are equal; slots that no block has.
    ("omnireduce", "float32", {"block": 64}, "ones", 3100, 1, 0),
    ("omnireduce", "bfloat16", {"block": 64}, "one_hot", 5100, 2, 0),
]


@pytest.mark.fast_cases(2)
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize(
    ("codec", "name", "params", "pattern", "n", "chunks", "first"), HOMOMORPHIC, ids=str
)
def test_homomorphic(
    place: str,
    codec: str,
    name: str,
    params: dict[str, Any],
    pattern: str,
    n: int,
    chunks: int,
    first: int,
) -> None:
    """Measured, both ways, in part, and added to float32."""
    dtype, made, memory = BY_NAME[name], tw.codec(codec, **params), Memory(place)
    if pattern == "ones":
        bits = np.ones(n, dtype.numpy).view(dtype.bits)
    else:
        bits = make_bits(pattern, dtype, n)
    found = made.measure(memory.put(bits, dtype, first), backend="triton")
    assert found.dtype == torch.float32
    assert raw(found).tobytes() == made.measure(bits.view(dtype.numpy)).tobytes()
    buf = check_encode(memory, bits, dtype, made, first=first, chunks=chunks)
    assert buf.plan.codec.name == codec
    expected = decoded_bits(buf, bits)
    check_decode(memory, buf, expected, dtype, first=first)
    check_decode(memory, buf, expected, dtype, start=n // 2 + 3, stop=n - 9, verify=True)
    sums = make_bits("normal", BY_NAME["float32"], n, seed=2).view(np.float32)
    acc = memory.put(sums.view(np.uint32), BY_NAME["float32"])
    made.decode_add(buf, acc, scratch=memory.take(buf.plan.scratch_nbytes))
    buf.check()
    made.decode_add(bytes(buf), sums)
    assert sums_agree(raw(acc).view(np.float32), sums)
    memory.check()


@pytest.mark.parametrize("codec", ["thc", "omnireduce"])
def test_homomorphic_chunks_of_hardly_any_elements(place: str, codec: str) -> None:
    """A plan that the planner would leave to raw, with chunks of 2, 1 and 0 elements."""
    dtype, spec = BY_NAME["bfloat16"], tw.codec(codec).spec
    plan = Plan(spec, dtype, (5,), 4, spec.layout(dtype, 2), 0)
    kernels: Any = device_module(codec)
    bits = make_bits("normal", dtype, 5)
    expected = np.full(plan.nbytes, 0x5A, np.uint8)
    engine.encode_into(plan, bits, expected, key=KEY, backend="ref")
    memory = Memory(place)
    out, scratch = memory.take(plan.nbytes), memory.take(plan.scratch_nbytes)
    kernels.encode(plan, memory.put(bits, dtype), out, scratch, key=KEY)
    assert_same_buffer(plan, raw(out), expected)
    y, status = memory.elements(dtype, 5), torch.zeros(1, dtype=torch.int64, device=place)
    kernels.decode(plan, out, y, scratch, status)
    assert status.tolist() == [0]
    if codec == "omnireduce":
        assert raw(y).tobytes() == bits.tobytes()
    else:
        values = raw(y).view(dtype.numpy).astype(np.float32)
        assert np.abs(values - bits.view(dtype.numpy).astype(np.float32)).max() < 0.1
    memory.check()


@pytest.mark.parametrize(("codec", "bits"), [("thc", 8), ("thc", 16), ("omnireduce", 16)])
def test_homomorphic_sums_of_ranks(place: str, codec: str, bits: int) -> None:
    """With norms agreed on, from the device and the host, and seeds from there; cells are views."""
    from tightwire.homomorphic import add, sketch

    dtype, made, n, chunks = BY_NAME["float32"], tw.codec(codec, bits=bits), 2 * 2101, 2
    memory = Memory(place)
    ranks = [make_bits("scales", dtype, n, seed=i).view(np.float32) for i in range(2)]
    xs = [memory.put(x.view(np.uint32), dtype) for x in ranks]
    stats = torch.maximum(*(made.measure(x, backend="triton") for x in xs))
    buffers, expected = [], []
    for i, given in enumerate((stats, raw(stats).view(np.float32))):
        key = KEY._replace(rank=i)
        options: dict[str, Any] = {"chunks": chunks, "checksum": False}
        host = made.encode(ranks[i], stats=raw(stats).view(np.float32), key=key, **options)
        if codec == "thc" and i:
            key = key._replace(seed=torch.tensor([KEY.seed], device=place))
        buf = made.encode(xs[i], stats=given, key=key, backend="triton", **options)
        assert bytes(buf) == bytes(host)
        buffers.append(buf)
        expected.append(host)
    total = add(*expected)
    for i in range(chunks):
        sketch(buffers[0], i).add_(sketch(buffers[1], i))
    assert bytes(buffers[0]) == bytes(total)
    found = tw.decode(buffers[0], backend="triton", verify=True)
    assert raw(found).tobytes() == tw.decode(total).tobytes()
    memory.check()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_thc_refuses_wrong_norms_and_sums(place: str) -> None:
    """At once where the host sees it; else by a mark, or a count, that decoding meets."""
    from tightwire.homomorphic import sketch

    dtype, codec, n = BY_NAME["float32"], tw.codec("thc"), 3000
    x = Memory(place).put(make_bits("normal", dtype, n), dtype)
    stats = codec.measure(x, backend="triton")
    for bad in (stats[:-1], stats.double(), stats.reshape(1, -1), -raw(stats).view(np.float32)):
        with pytest.raises(ValueError, match=r"stats.*allowed"):
            codec.encode(x, stats=bad, key=KEY, backend="triton")
    with pytest.raises(ValueError, match="needs key"):
        codec.encode(x, backend="triton")
    buf = codec.encode(x, stats=stats, key=KEY, checksum=False, backend="triton")
    cells = sketch(buf)
    cells[-128] = 9
    with pytest.raises(tw.FormatError, match="bad_payload"):
        tw.decode(buf, start=0, stop=5, backend="triton", verify=True)
    x[2999] = math.inf
    buf = codec.encode(x, stats=stats, key=KEY, chunks=2, backend="triton")
    assert buf.overflowed
    with pytest.raises(tw.FormatError, match="dynamic_overflow"):
        tw.decode(buf, backend="triton", verify=True)
    # Norms on the device that are none: a NaN loses its block, a negative one drops it.
    stats[:2] = torch.tensor([math.nan, -1.0])
    stats[2] = math.inf
    y = tw.decode(codec.encode(x, stats=stats, key=KEY, backend="triton"), backend="triton")
    assert torch.isnan(y).tolist() == [not 1024 <= i < 2048 for i in range(n)]
    assert not y[1024:2048].any()


def test_omnireduce_refuses_wrong_norms(place: str) -> None:
    dtype, codec, n = BY_NAME["float32"], tw.codec("omnireduce"), 3000
    x = Memory(place).put(make_bits("normal", dtype, n), dtype)
    stats = codec.measure(x, backend="triton")
    for bad in (stats[:-1], stats.double(), stats.reshape(1, -1), -raw(stats).view(np.float32)):
        with pytest.raises(ValueError, match=r"stats.*allowed"):
            codec.encode(x, stats=bad, backend="triton")
    # On the device a NaN is the largest norm, a negative one none.
    stats[:4] = torch.tensor([-1.0, math.nan, 0.0, -math.inf])
    buf = codec.encode(x, stats=stats, backend="triton")
    host = raw(stats).view(np.float32).copy()
    host[:4] = 0, math.inf, 0, 0
    assert bytes(buf) == bytes(codec.encode(raw(x).view(np.float32), stats=host))


def has_kernels(codec: str) -> bool:
    return isinstance(device_module(codec), ModuleType)


def vectors(codec: str) -> list[str]:
    return sorted(f"{codec}/{path.stem}" for path in (VECTORS / codec).glob("*.tw"))


#: The vectors that the interpreter, which is slow, is shown; every one of codecs not named.
SHOWN = {
    "dynamiq": (
        "512_fixed",
        "bfloat16_zeros",
        "wide_center",
        "tiny_stochastic",
        "float16_specials",
        "of_8_ranks",
    ),
    "lhc": ("float32_example", "float16_published", "float16_estimated"),
}
#: Codecs with more vectors than forms: the interpreter is shown every second one.
HALVED = ("zipccl", "taco", "sdp4bit", "tahquant", "delta")
#: Vectors of more elements than the interpreter gets through in time.
LARGE = ("delta/bfloat16_33000", "delta/bfloat16_empty_chunk", "delta/uint8_plain_tile_overwrite")


def is_shown(name: str) -> bool:
    """Whether the interpreter is shown a vector: others of its codec have the same kernels."""
    folder = name.partition("/")[0]
    if "fnuz" in name or name.endswith("_all") or name in LARGE:
        return False
    if folder in SHOWN:
        return name.endswith(SHOWN[folder])
    return folder not in HALVED or vectors(folder).index(name) % 2 == 0


def at_places(names: Sequence[str], shown: Callable[[str], bool]) -> list[Any]:
    """Pairs of a place and a name: on a GPU all, and what the interpreter is `shown`."""
    on_gpu = [pytest.param("cuda", name, marks=pytest.mark.gpu) for name in names]
    return [*(("cpu", name) for name in names if shown(name)), *on_gpu]


NAMES = [
    name
    for codec in tw.list_codecs()
    if has_kernels(codec)
    for name in vectors(codec)
    if not name.startswith("zipccl/float64_")
    if not (codec == "delta" and "64_" in name)
]


@pytest.mark.fast_cases(11)
@pytest.mark.slow_cases(100)
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize(("place", "name"), at_places(NAMES, is_shown), indirect=["place"])
def test_vectors(place: str, name: str) -> None:
    data = (VECTORS / f"{name}.tw").read_bytes()
    tensor = (VECTORS / f"{name}.bin").read_bytes()
    header = tw.inspect(data).header
    bits = np.frombuffer(tensor, header.dtype.bits)
    memory = Memory(place)
    src = memory.put(np.frombuffer(data, np.uint8), BY_NAME["uint8"])
    base = base_of(VECTORS / f"{name}.base", header, memory)
    out = memory.elements(header.dtype, bits.size).reshape(header.shape)
    if header.required & ASSEMBLED:
        with pytest.raises(ValueError, match="assembled"):
            tw.decode(src, out=out, backend="triton")
        return
    tw.decode(src, base=base, out=out, backend="triton")
    assert raw(out).tobytes() == tensor
    if base is not None:
        live = base.clone()
        tw.decode(src, base=live, out=live, backend="triton")
        assert raw(live).tobytes() == tensor
    codec = tw.Codec(spec_class(header.codec).unpack_params(header.params))
    if not codec.lossless:
        given = VECTORS / f"{name}.input"
        if not given.exists():
            return
        out.reshape(-1).view(torch.uint8).copy_(
            torch.from_numpy(np.frombuffer(given.read_bytes(), np.uint8).copy())
        )
    buf = codec.encode(
        out,
        base=base,
        key=vector_key(name),
        out=memory.take(len(data) + 2 * bits.nbytes + 4096 * header.chunks),
        chunks=header.chunks,
        checksum=bool(header.required & CHECKSUM),
        dynamic_capacity=header.dynamic_stride or None,
        backend="triton",
    )
    if header.dynamic_stride:
        assert_same_buffer(buf.plan, raw(buf.array), np.frombuffer(data, np.uint8))
    elif name != "raw/uint8_newer_minor":
        assert bytes(buf) == data
    memory.check()


def base_of(path: Path, header: Any, memory: Memory) -> Any:
    """The base of a vector, None if it has none."""
    if not path.exists():
        return None
    base = np.frombuffer(path.read_bytes(), header.dtype.bits)
    return memory.put(base, header.dtype).reshape(header.shape)


REASONS: dict[str, str] = json.loads((VECTORS / "invalid" / "reasons.json").read_text())
#: Of an assembled buffer, of float64: the host decodes these.
ON_HOST = {"checksum_of_ordinal", "half_escape"}
INVALID = [
    name
    for name in sorted(set(REASONS) - ON_HOST)
    if not name.startswith(tuple(f"{c}_" for c in tw.list_codecs() if not has_kernels(c)))
]


#: The interpreter is shown every second one of these: the kernels check the others alike.
CHECKED_ALIKE = (*HALVED, *SHOWN, "padding_", "escape_", "order_", "mx_", "nvfp4_")
INVALID_CASES = at_places(
    INVALID, lambda name: not name.startswith(CHECKED_ALIKE) or INVALID.index(name) % 2 == 0
)


@pytest.mark.fast_cases(6)
@pytest.mark.parametrize(("place", "name"), INVALID_CASES, indirect=["place"])
def test_invalid_vectors(place: str, name: str) -> None:
    data = (VECTORS / "invalid" / f"{name}.tw").read_bytes()
    memory = Memory(place)
    src = memory.put(np.frombuffer(data, np.uint8), BY_NAME["uint8"])
    base = None
    if (path := VECTORS / "invalid" / f"{name}.base").exists():
        try:
            base = base_of(path, tw.inspect(data).header, memory)
        except tw.FormatError:
            pytest.skip("no header, so no base: the host refuses it")
        except ValueError:
            # Of a header of another shape.
            pytest.skip("the base does not fit: a bad call")
    with pytest.raises(tw.FormatError) as caught:
        tw.decode(src, base=base, backend="triton")
    assert caught.value.reason == REASONS[name]
    if base is not None:
        live = base.clone()
        with pytest.raises(tw.FormatError) as caught:
            tw.decode(src, base=live, out=live, backend="triton")
        assert caught.value.reason == REASONS[name]
        assert raw(live).tobytes() == raw(base).tobytes()


def sanitize() -> ModuleType:
    """The module beside this one, which is also a script."""
    if "sanitize" not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            "sanitize", Path(__file__).with_name("sanitize.py")
        )
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["sanitize"] = module
        spec.loader.exec_module(module)
    return sys.modules["sanitize"]


def on_host(data: bytes, **options: Any) -> Any:
    """The tensor's bytes, or the reason of the refusal."""
    # The reference need not be compiled; where thousands are decoded, it would take too long.
    backend = "cpu" if torch.cuda.is_available() else "ref"
    try:
        return tw.decode(data, backend=backend, max_nbytes=1 << 28, **options).tobytes()
    except tw.FormatError as error:
        return error.reason


@pytest.mark.slow
@pytest.mark.parametrize("part", range(6))
def test_damage(place: str, part: int) -> None:
    """With verification the host's reason, or its tensor; without, no access out of bounds."""
    cases = list(sanitize().cases(400 if place == "cuda" else 120))
    for k, case in enumerate(cases[part :: 6 if place == "cuda" else 30]):
        memory = Memory(place)
        array = memory.put(case.data, BY_NAME["uint8"])
        expected = on_host(case.data.tobytes())
        plan = case.plan
        if case.data[: plan.header.nbytes].tobytes() != plan.header_bytes.tobytes():
            expected = "bad_header"
        found = sanitize().decodes(case, array)
        verified = next(found)
        assert as_bytes(verified) == expected, case.name
        if place == "cuda" or k % 2 == part % 2:
            unverified = as_bytes(next(found))
            if isinstance(expected, bytes):
                assert unverified == expected, case.name
        for _ in found if place == "cuda" else ():
            pass
        assert raw(array).tobytes() == case.data.tobytes()
        memory.check()


def as_bytes(result: Any) -> Any:
    return result if isinstance(result, str) else raw(result).tobytes()


def random_case(
    rng: np.random.Generator, place: str, most: int
) -> tuple[tw.Codec, dict[str, Any], Any]:
    """Codec, options of encode, and at most `most` elements made at `place`."""
    name = CODED[rng.integers(0, len(CODED))]
    dtype = BY_NAME[name]
    sizes = (rng.integers(0, most + 1), rng.integers(0, 9000), TILE * rng.integers(0, 40))
    n = min(int(rng.choice(sizes)), most)
    offset = int(rng.choice([0, 0, 1, 7]))
    x = torch.empty(n + offset, dtype=getattr(torch, name), device=place)[offset:]
    generator = torch.Generator(device=place).manual_seed(int(rng.integers(0, 1 << 62)))
    kind = rng.integers(0, 6)
    if kind == 0:
        x.view(torch.uint8).random_(0, 256, generator=generator)
    else:
        spread = float(2.0 ** rng.integers(-12, 3)) * (1 if dtype.itemsize > 1 else 64)
        values = torch.empty(n, device=place).normal_(0, spread, generator=generator)
        chance = torch.empty(n, device=place).uniform_(generator=generator)
        if kind >= 3:
            values.masked_fill_(chance < float(rng.random()), 0.0)
        if kind == 4:
            values[n // 3 : n // 2] *= float(2.0 ** rng.integers(-20, 20))
        if kind == 5:
            rare = float(10.0 ** -rng.integers(1, 5))
            value = float(rng.choice([-0.0, 1e-4, float("nan"), float("-inf")]))
            values.masked_fill_(chance > 1 - rare, value)
        x.copy_(values)
    few = name in ("bfloat16", "float16")
    window: Any = "tile"
    if few and rng.random() < 0.3:
        base = int(rng.integers(0, fields_of(dtype).max_base + 1))
        window = ("sigma", "histogram", base)[rng.integers(0, 3)]
    options = {
        "chunks": int(rng.choice([1, 1, 2, 3, 7, 40])),
        "checksum": not few or bool(rng.random() < 0.7),
    }
    return tw.codec("zipccl", window=window), options, x


def check_random_case(seed: int, place: str, most: int = 200_000) -> None:
    rng = np.random.default_rng(seed)
    codec, options, x = random_case(rng, place, most)
    dtype = BY_NAME[str(x.dtype).removeprefix("torch.")]
    plan = codec.plan(tuple(x.shape), dtype, **options)
    out = torch.full((plan.nbytes + GUARD,), POISON, dtype=torch.uint8, device=place)
    scratch = torch.full((plan.scratch_nbytes,), POISON, dtype=torch.uint8, device=place)
    buf = codec.encode(x, out=out, scratch=scratch, backend="triton", **options)
    first = int(rng.choice([0, 0, 1])) * dtype.itemsize
    room = torch.full((first + x.nbytes + GUARD,), POISON, dtype=torch.uint8, device=place)
    y = room[first : first + x.nbytes].view(x.dtype)
    tw.decode(buf, out=y, scratch=scratch.fill_(POISON), backend="triton")
    host = raw(x).view(dtype.numpy)
    expected = bytes(codec.encode(host, threads=1, backend="cpu", **options))
    what = f"seed {seed}: {dtype.name}, {plan.nelem} elements, {codec}, {options}"
    try:
        packed = bytes(buf)
    except tw.FormatError as error:
        pytest.fail(f"{what}: {error}")
    assert packed == expected, what
    assert torch.equal(y.view(torch.uint8), x.view(torch.uint8)), what
    assert (out[plan.nbytes :] == POISON).all(), what
    assert (room[:first] == POISON).all(), what
    assert (room[first + x.nbytes :] == POISON).all(), what


@pytest.mark.gpu
@pytest.mark.parametrize("batch", range(20))
def test_ten_thousand_random_cases(batch: int) -> None:
    """Packed bytes are the cpu backend's, and the tensor comes back; 500 cases in each batch."""
    for seed in range(500 * batch, 500 * batch + 500):
        check_random_case(seed, "cuda")


def test_a_few_random_cases() -> None:
    if torch.cuda.is_available():
        pytest.skip("the GPU runs thousands")
    for seed in range(4):
        check_random_case(seed, "cpu", 2300)


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements() -> None:
    n = (1 << 31) + 4099
    generator = torch.Generator(device="cuda").manual_seed(1)
    x = torch.empty(n, dtype=torch.bfloat16, device="cuda")
    for at in range(0, n, 1 << 28):
        x[at : at + (1 << 28)].normal_(0, 0.02, generator=generator)
    buf = tw.encode(x)
    y = torch.full_like(x, 3.0)
    tw.decode(buf, out=y, verify=True)
    for at in range(0, n, 1 << 28):
        assert torch.equal(x[at : at + (1 << 28)], y[at : at + (1 << 28)])
    check_tiles(buf, x, 0, 3)
    check_tiles(buf, x, (1 << 31) // TILE - 2, 3)
    check_tiles(buf, x, tile_count(n) - 2, 2)
    part = tw.decode(buf, start=(1 << 31) - 5000, stop=(1 << 31) + 4000)
    assert torch.equal(part, x[(1 << 31) - 5000 : (1 << 31) + 4000])
    y.fill_(3.0)
    bytes_ = tw.encode(x.view(torch.uint8), tw.codec("raw"), chunks=3)
    tw.decode(bytes_, out=y.view(torch.uint8), verify=True)
    for at in range(0, n, 1 << 28):
        assert torch.equal(x[at : at + (1 << 28)], y[at : at + (1 << 28)])


def check_tiles(buf: tw.Buffer, x: Any, first: int, count: int) -> None:
    """Tiles of a buffer of one chunk are those that the reference makes of their elements."""
    plan = buf.plan
    f = fields_of(plan.dtype)
    part = x[first * TILE : (first + count) * TILE]
    host = raw(part).view(plan.dtype.numpy)
    expected = tw.encode(host, backend="ref")
    block = f.block_nbytes(COLUMNS)
    size = part.numel() // TILE * block + f.block_nbytes(tail_columns(part.numel()))
    at = plan.static_offset + first * block
    small = np.asarray(expected.array)[expected.plan.static_offset :]
    assert_same(raw(buf.array[at : at + size]), small[:size], f"tile {first}")
    index = plan.static_offset + plan.layout.sections[0].nbytes
    small_index = expected.plan.layout.sections[0].nbytes
    entries = index + 4 * tile_count(plan.nelem) + 2 * first
    assert_same(
        raw(buf.array[entries : entries + 2 * count]),
        small[small_index + 4 * count :][: 2 * count],
        f"windows from tile {first}",
    )
    offsets = raw(buf.array[index + 4 * first : index + 4 * (first + count)]).view("<u4")
    small_offsets = small[small_index : small_index + 4 * count].view("<u4")
    assert (offsets - offsets[0]).tolist() == small_offsets.tolist()
    escapes = np.asarray(expected.dynamic(0))
    start = plan.dynamic_offset + int(offsets[0])
    assert_same(raw(buf.array[start : start + escapes.size]), escapes, f"escapes of tile {first}")


def test_the_watch_sees_what_it_should(watched: Watched | None) -> None:
    if watched is None:
        pytest.skip("the interpreter does not run here")
    watched.spans = [(1024, 1032), (4096, 8192)]
    on = np.ones(2, bool)
    watched.check(np.array([1024, 8188], np.uint64), on, 4)
    watched.check(np.array([0, 4096], np.uint64), np.array([False, True]), 4)
    for bad in ([1024, 8192], [1020, 4096], [1028, 1032]):
        with pytest.raises(AssertionError, match="out of bounds"):
            watched.check(np.array(bad, np.uint64), on, 4)
    with pytest.raises(AssertionError, match="no multiple"):
        watched.check(np.array([1026, 4096], np.uint64), on, 4)
