"""taco: the kernels against the reference; see kernels.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tightwire as tw
from kernels import (
    MARKS,
    SIZES,
    Memory,
    check_decode,
    check_encode,
    decoded_bits,
    patterns,
    raw,
    sums_agree,
    there_and_back,
)
from support import KEY, PATTERNS, make_bits
from tightwire.codecs.zipccl import TILE
from tightwire.formats.dtypes import BY_NAME

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

pytestmark = MARKS

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
