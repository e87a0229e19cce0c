"""huffman: what its page claims, its tables and blocks, and damage that no vector has."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tightwire as tw
from support import examples, make_bits, repair
from tightwire.codecs import huffman as codec
from tightwire.codecs.common import huffman
from tightwire.codecs.common.base import Bytes
from tightwire.formats.dtypes import BY_NAME, DType

CODEC = tw.codec("huffman")
UNITS = (1, 2, 8)


def encoded(x: Any, **options: Any) -> bytes:
    return bytes(CODEC.encode(x, backend="cpu", **options))


def normal(dtype: str, n: int) -> Any:
    kind = BY_NAME[dtype]
    return make_bits("normal", kind, n).view(kind.numpy)


def drawn(dtype: str, n: int, sigma: float = 0.02) -> Any:
    """N(0, sigma^2)."""
    values = np.random.default_rng(5).standard_normal(n) * sigma
    return values.astype(BY_NAME[dtype].numpy)


def low_zeros(n: int) -> Any:
    """float32 whose 13 lowest bits are zero, as after a computation in TF32."""
    x = drawn("float32", n)
    x.view(np.uint32)[:] &= np.uint32(0xFFFFE000)
    return x


def token_ids(dtype: str, vocabulary: int, n: int) -> Any:
    return (vocabulary ** np.random.default_rng(2).random(n) - 1).astype(dtype)


def mask(share: float, n: int) -> Any:
    return np.random.default_rng(1).random(n) < share


def entropy_nbytes(x: Any) -> float:
    """Bytes of all planes by the order-0 entropy of their bytes."""
    kind = BY_NAME[x.dtype.name]
    bits = 0.0
    for plane in codec.split(x.view(kind.bits), kind):
        counts = np.bincount(plane)
        counts = counts[counts > 0]
        bits += float((counts * np.log2(x.size / counts)).sum())
    return bits / 8


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("dtype", "sigma", "most"),
    [
        ("bfloat16", 0.02, 0.6625),
        ("bfloat16", 1.0, 0.6625),
        ("float32", 0.02, 0.8315),
        ("float16", 0.02, 0.845),
        ("float64", 0.02, 0.8820),
        ("float8_e4m3fn", 16.0, 0.82),
        ("float8_e5m2", 16.0, 0.70),
    ],
)
def test_ratio_of_normal_numbers(dtype: str, sigma: float, most: float) -> None:
    x = drawn(dtype, 1 << 20, sigma)
    data = encoded(x)
    assert len(data) <= most * x.nbytes
    assert tw.decode(data, backend="cpu").tobytes() == x.tobytes()


N = 1 << 19
#: What is drawn, and what it may take over the entropy of its bytes.
SAMPLES: dict[str, tuple[Callable[[], Any], float]] = {
    "bfloat16": (lambda: drawn("bfloat16", N), 1.005),
    "float16": (lambda: drawn("float16", N), 1.005),
    "float32": (lambda: drawn("float32", N), 1.005),
    "float64": (lambda: drawn("float64", N), 1.005),
    "low_zeros": (lambda: low_zeros(N), 1.02),
    "float8_e4m3fn": (lambda: drawn("float8_e4m3fn", N, 16), 1.02),
    "float8_e5m2": (lambda: drawn("float8_e5m2", N, 16), 1.02),
    "int8": (lambda: drawn("float32", N, 30).astype(np.int8), 1.02),
    "int16": (lambda: drawn("float32", N, 300).astype(np.int16), 1.02),
    "int64": (lambda: drawn("float64", N, 1e5).astype(np.int64), 1.05),
    "numbers": (lambda: np.arange(N, dtype=np.int32), 1.02),
    "half": (lambda: mask(0.5, N), 1.1),
    "fifth": (lambda: mask(0.2, N), 1.1),
    "tenth": (lambda: mask(0.1, N), 1.1),
    "ids_int32": (lambda: token_ids("int32", 32000, N), 1.1),
    "ids_int64": (lambda: token_ids("int64", 128256, N), 1.1),
}


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("name", SAMPLES)
def test_ratio_is_close_to_the_entropy_of_bytes(name: str) -> None:
    draw, over = SAMPLES[name]
    x = draw()
    data = encoded(x)
    # Offsets, tables and padding.
    assert len(data) <= over * entropy_nbytes(x) + 0.001 * x.nbytes + 512
    assert tw.decode(data, backend="cpu").tobytes() == x.tobytes()


@pytest.mark.parametrize("dtype", CODEC.spec.dtypes)
@pytest.mark.fast_cases(3)
def test_zeros_take_next_to_nothing(dtype: str) -> None:
    x = np.zeros(1 << 20, BY_NAME[dtype].numpy)
    assert len(encoded(x)) <= 0.002 * x.nbytes


@pytest.mark.parametrize("dtype", CODEC.spec.dtypes)
@pytest.mark.parametrize("n", [0, 1, 100, 33000])
def test_bytes_without_structure_cost_no_more_than_the_frame(dtype: str, n: int) -> None:
    kind = BY_NAME[dtype]
    x = np.random.default_rng(n).integers(0, 256, n * kind.itemsize, np.uint8).view(kind.numpy)
    data = encoded(x)
    assert len(data) == len(bytes(tw.codec("raw").encode(x, backend="cpu")))
    assert tw.decode(data, backend="cpu").tobytes() == x.tobytes()


@given(
    st.lists(st.integers(0, 1 << 16), min_size=1, max_size=256),
    st.sampled_from(UNITS),
)
@examples(60)
def test_codes_of_any_counts_are_complete(counts: list[int], unit: int) -> None:
    padded = np.array(counts + [0] * (256 - len(counts)), np.int64)
    padded[0] += 1
    _, weights = huffman.weights_of(padded, unit)
    if not weights[:256].any():
        return
    lengths = huffman.lengths_of(weights).astype(np.int64)
    used = weights > 0
    assert ((lengths > 0) == used).all()
    assert lengths.max() <= huffman.LIMIT
    assert int((4096 >> lengths[used]).sum()) == 4096
    # No lighter symbol has a shorter code.
    order = np.argsort(-weights[used], kind="stable")
    assert (np.diff(lengths[used][order]) >= 0).all()


@given(st.binary(min_size=1, max_size=3000), st.sampled_from(UNITS), st.integers(1, 255))
@examples(60)
def test_blocks_come_back(data: bytes, unit: int, mask: int) -> None:
    plane: Bytes = np.frombuffer(data, np.uint8) & np.uint8(mask)
    table = huffman.table_of(huffman.counts_of(plane), unit)
    if table is None:
        return
    found = huffman.unpack_table(huffman.pack_table(table))
    assert found is not None
    # Bytes that the table was not made for are coded as well, or stored.
    for some in (plane, plane ^ np.uint8(mask)):
        block = huffman.encode_block(found, unit, some)
        out = np.full(some.size, 170, np.uint8)
        assert huffman.decode_block(found, unit, block, out) == block.size
        assert out.tobytes() == some.tobytes()
        assert block.size <= 4 + -(-some.size // 4) * 4
        if block.size > 4:
            assert huffman.decode_block(found, unit, block[:-4], out) is None


@pytest.mark.parametrize("dtype", CODEC.spec.dtypes)
def test_split_and_join(dtype: str) -> None:
    kind = BY_NAME[dtype]
    bits = make_bits("random", kind, 1000)
    assert codec.join(codec.split(bits, kind), kind).tobytes() == bits.tobytes()


def damaged(data: bytes, kind: DType, rng: np.random.Generator) -> bytes:
    """A buffer with some bytes of its chunk changed; checksums are right."""
    changed = bytearray(data)
    start = 128
    for at in rng.integers(start, len(data), rng.integers(1, 4)):
        changed[at] = rng.integers(0, 256)
    repair(changed)
    return bytes(changed)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e5m2", "float32", "bool"])
def test_backends_agree_on_damage(dtype: str) -> None:
    kind = BY_NAME[dtype]
    bits = make_bits("normal", kind, 3000)
    if dtype == "bool":
        bits[np.arange(3000) % 3 > 0] = 0
    data = encoded(bits.view(kind.numpy))
    rng = np.random.default_rng(3)
    verdicts = set()
    for _ in range(150):
        bad = damaged(data, kind, rng)
        found = []
        for backend in ("ref", "cpu"):
            try:
                found.append(tw.decode(bad, backend=backend).tobytes())
            except tw.FormatError as error:
                found.append(error.reason)
        assert found[0] == found[1]
        verdicts.add(type(found[0]))
    assert str in verdicts


def test_decoding_needs_little_memory() -> None:
    x = normal("bfloat16", 1 << 22)
    data = encoded(x)
    out = np.empty_like(x)
    tw.decode(data, out=out, backend="cpu", threads=1)
    tracemalloc.start()
    tw.decode(data, out=out, backend="cpu", threads=1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak <= 0.1 * x.nbytes


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_bytes_do_not_depend_on_threads(threads: int) -> None:
    x = normal("bfloat16", (1 << 21) + 77)
    assert encoded(x, threads=threads) == encoded(x, threads=1)


def test_worked_example() -> None:
    kind = BY_NAME["bfloat16"]
    x = np.where(np.arange(1024) % 4 == 3, -2.0, 1.0).astype(kind.numpy)
    buffer = CODEC.encode(x, backend="ref")
    payload = bytes(buffer.dynamic(0))
    assert bytes(buffer.static(0)[:5]) == bytes.fromhex("0000000003")
    assert len(payload) == 304 + 136 + 136 + 8
    assert payload[304:316] == bytes.fromhex("020000040000000088888888")
    assert payload[440:452] == bytes.fromhex("020000040000000066666666")
