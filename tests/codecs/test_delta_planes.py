"""delta in the form adaptive: tiles of planes, on the host."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tightwire as tw
from decoders.buffer import decode as decode_of_the_pages
from decoders.common import FormatError as DecoderError
from support import examples, make_bits, repair
from tightwire.codecs.delta import TILE, Delta, digest_of, ends_of
from tightwire.engine import parse
from tightwire.formats.dtypes import BY_NAME
from tightwire.planning import HOST_BACKENDS

Array = npt.NDArray[Any]
ADAPTIVE, DIFFERENCE = (tw.codec("delta", form=form) for form in ("adaptive", "difference"))


def weights(dtype: str, n: int, seed: int = 0) -> Array:
    kind = BY_NAME[dtype]
    return make_bits("normal", kind, n, seed).view(kind.numpy)


def flipped(base: Array, shares: Mapping[int, float], seed: int = 0) -> Array:
    """`base` with these bits flipped, each in a share of the elements; -1 is the highest bit."""
    rng = np.random.default_rng(seed)
    kind = BY_NAME[base.dtype.name]
    bits = base.view(kind.bits).copy()
    for k, share in shares.items():
        bit = kind.bits.type(1 << k % (8 * kind.itemsize))
        bits[rng.random(base.size) < share] ^= bit
    return bits.view(kind.numpy)


def kinds_of(data: Any) -> list[str]:
    """How each tile is stored."""
    parsed = parse(np.frombuffer(bytes(data), np.uint8))
    found = []
    for i in range(parsed.plan.chunks):
        chunk = parsed.chunk(i)
        if parsed.records[i].flags & 1:
            found.append("raw")
            continue
        ends = ends_of(chunk, 0, chunk.nelem)
        assert ends is not None
        for lo, hi in itertools.pairwise(ends):
            words = chunk.dynamic[lo:hi]
            named = ("differences", "plain", "differences", "planes")
            found.append(named[int(words[0]) & 3] if words.size else "same")
    return found


def check(base: Array, x: Array, chunks: int = 1) -> bytes:
    """The buffer, which all host backends make and read, whole and in part."""
    n = x.size
    data = bytes(ADAPTIVE.encode(x, base=base, chunks=chunks, backend="ref"))
    assert bytes(ADAPTIVE.encode(x, base=base, chunks=chunks, backend="cpu", threads=2)) == data
    for backend in HOST_BACKENDS:
        assert tw.decode(data, base=base, backend=backend).tobytes() == x.tobytes()
        part = tw.decode(data, base=base, backend=backend, start=n // 3, stop=n - n // 4)
        assert part.tobytes() == x[n // 3 : n - n // 4].tobytes()
        live = base.copy()
        assert tw.decode(data, base=live, out=live, backend=backend, threads=2) is live
        assert live.tobytes() == x.tobytes()
    return data


@pytest.mark.fast_cases(6)
@pytest.mark.slow_cases(60)
@pytest.mark.parametrize("dtype", [name for name in Delta.dtypes if name != "bool"])
@pytest.mark.parametrize("n", [300, 1, 63, 64, 65, 4097, TILE, TILE + 1])
@pytest.mark.parametrize(
    "shares", [{-1: 0.5}, {0: 1}, {0: 0.375, 1: 0.01, -1: 0.97}, dict.fromkeys(range(8), 0.1)]
)
def test_backends_agree(dtype: str, n: int, shares: dict[int, float]) -> None:
    base = weights(dtype, n)
    check(base, flipped(base, shares))


def test_kinds_of_tiles() -> None:
    """One beside the other, in one chunk and in several."""
    base = weights("uint8", 5 * TILE - 77)
    x = base.copy()
    x[0 : 2 * TILE : 500] += 1
    x[TILE : 2 * TILE] = base[TILE : 2 * TILE]
    x[2 * TILE : 3 * TILE] = np.random.default_rng(1).integers(0, 256, TILE)
    x[3 * TILE :] = flipped(base[3 * TILE :], {7: 0.5, 2: 0.1})
    kinds = ["differences", "same", "plain", "planes", "planes"]
    assert kinds_of(check(base, x)) == kinds
    assert len(kinds_of(check(base, x, chunks=3))) == 6
    # Forms that were there before have none.
    for form in ("difference", "overwrite"):
        codec = tw.codec("delta", form=form)
        assert "planes" not in kinds_of(codec.encode(x, base=base))


@pytest.mark.parametrize("dtype", ["bfloat16", "bool"])
def test_sizes_rise_with_the_share_of_flipped_bits(dtype: str) -> None:
    """However few they are, planes are what signs are stored as if that takes less."""
    rng = np.random.default_rng(3)
    n, kind = 1 << 18, BY_NAME[dtype]
    base = rng.random(n) < 0.5 if dtype == "bool" else weights(dtype, n)
    order, sizes, kinds = rng.permutation(n), [], set[str]()
    for thousandths in (0, 1, 2, 3, 5, 7, 10, 20, 30, 40, 50, 80, 100, 200):
        x = base.copy()
        bits = x.view(kind.bits)
        bits[order[: n * thousandths // 1000]] ^= kind.bits.type(1 if dtype == "bool" else 1 << 15)
        data = ADAPTIVE.encode(x, base=base)
        sizes.append(data.packed().nbytes)
        kinds |= set(kinds_of(data))
        assert sizes[-1] <= DIFFERENCE.encode(x, base=base).packed().nbytes
    assert sizes == sorted(sizes)
    assert kinds == {"same", "planes"}


def test_a_tile_of_few_changes_is_what_takes_less() -> None:
    """Differences where each changes other bits; planes where all change the same one."""
    base = weights("bfloat16", 4096)
    for step, bit, kind in ((64, None, "differences"), (64, 15, "planes"), (700, 15, "planes")):
        x = base.copy()
        if bit is None:
            x.view(np.uint16)[::step] += 1
        else:
            x.view(np.uint16)[::step] ^= 1 << bit
        assert kinds_of(check(base, x)) == [kind]


@given(
    dtype=st.sampled_from(["bfloat16", "float32", "float64", "int8", "float8_e4m3fn"]),
    n=st.integers(1, 70_000),
    chunks=st.integers(1, 3),
    shares=st.dictionaries(st.integers(0, 63), st.floats(0, 1) | st.floats(0, 0.01), max_size=6),
    seed=st.integers(0, 1 << 30),
)
@examples(40)
def test_any_planes(dtype: str, n: int, chunks: int, shares: dict[int, float], seed: int) -> None:
    base = weights(dtype, n, seed % 1000)
    x = flipped(base, shares, seed)
    data = check(base, x, chunks)
    least = bytes(DIFFERENCE.encode(x, base=base, chunks=chunks))
    assert len(data) <= len(least)


@pytest.mark.parametrize(
    ("share", "most"),
    [(0.5, 0.07), (0.9, 0.04), (1.0, 0.002), (0.1, 0.04), (0.04, 0.016), (0.02, 0.0095)],
)
def test_size_of_flipped_signs(share: float, most: float) -> None:
    base = weights("bfloat16", 1 << 19)
    buffer = tw.encode(flipped(base, {-1: share}), "delta", base=base)
    assert buffer.packed().nbytes <= most * base.nbytes


@pytest.mark.parametrize(
    ("dtype", "most"), [("bfloat16", 0.25), ("float16", 0.25), ("float32", 0.1)]
)
@pytest.mark.parametrize("factor", [2, 0.5, -1])
def test_size_of_products(dtype: str, factor: float, most: float) -> None:
    base = weights(dtype, 1 << 18)
    x = (base.astype(np.float64) * factor).astype(base.dtype)
    assert tw.encode(x, "delta", base=base).packed().nbytes <= most * base.nbytes


@pytest.mark.parametrize(("rate", "share"), [(5e-7, 0.01), (8e-6, 0.1)])
def test_steps_of_an_optimizer_take_what_they_took(rate: float, share: float) -> None:
    """Byte for byte, but for the form in the header and what sums it up."""
    rng = np.random.default_rng(0)
    kind = BY_NAME["bfloat16"].numpy
    masters = rng.normal(0, 0.02, 1 << 19).astype(np.float32)
    moved = masters - np.float32(rate) * np.clip(rng.normal(0, 0.5, masters.size), -3, 3)
    base, x = masters.astype(kind), moved.astype(kind)
    assert np.mean(base.view(np.uint16) != x.view(np.uint16)) == pytest.approx(share, rel=0.1)
    buffers = [codec.encode(x, base=base).packed() for codec in (ADAPTIVE, DIFFERENCE)]
    first = parse(np.asarray(buffers[0])).plan.dynamic_offset
    assert bytes(buffers[0])[first:] == bytes(buffers[1])[first:]


def test_a_wrong_base_is_refused_before_anything_is_written(backend: str) -> None:
    base = weights("bfloat16", 70_000)
    data = bytes(tw.encode(flipped(base, {-1: 0.5}), "delta", base=base, chunks=3))
    other = flipped(base, {3: 0.0001})
    live = other.copy()
    with pytest.raises(tw.FormatError, match="base_mismatch"):
        tw.decode(data, base=live, out=live, backend=backend)
    assert live.tobytes() == other.tobytes()


def mutated(data: bytes, rng: np.random.Generator) -> bytes:
    """Bits of dynamic parts changed, most of them in heads, and checksums right again."""
    found = bytearray(data)
    start = parse(np.frombuffer(data, np.uint8)).plan.dynamic_offset
    for _ in range(int(rng.integers(1, 4))):
        behind = 16 if rng.random() < 0.5 else len(found) - start
        found[start + int(rng.integers(behind))] ^= 1 << int(rng.integers(8))
    repair(found)
    return bytes(found)


def outcomes(data: bytes, base: Array) -> list[Any]:
    """What the pages' decoder and those of the host make of it: a tensor's bytes, or a reason."""
    found: list[Any] = []
    try:
        found.append(decode_of_the_pages(data, base=base.tobytes()))
    except DecoderError as error:
        found.append(error.reason)
    for backend in HOST_BACKENDS:
        live = base.copy()
        try:
            found.append(tw.decode(data, base=live, out=live, backend=backend).tobytes())
        except tw.FormatError as error:
            assert live.tobytes() == base.tobytes()
            found.append(error.reason)
    return found


@pytest.mark.parametrize(
    ("dtype", "n", "shares"),
    [
        ("bfloat16", 700, {-1: 0.5, 3: 0.1}),
        ("uint8", 900, {0: 0.05, 4: 0.9}),
        ("float32", 300, dict.fromkeys(range(20), 0.02)),
        ("float64", 200, {63: 0.5, 1: 0.1}),
    ],
)
def test_damage_that_checksums_do_not_tell(dtype: str, n: int, shares: dict[int, float]) -> None:
    base = weights(dtype, n)
    data = bytes(ADAPTIVE.encode(flipped(base, shares), base=base, backend="ref"))
    assert kinds_of(data) == ["planes"]
    rng = np.random.default_rng(n)
    reasons = set()
    for _ in range(120):
        found = outcomes(mutated(data, rng), base)
        assert found.count(found[0]) == len(found)
        reasons.add(found[0] if isinstance(found[0], str) else "decoded")
    assert "bad_payload" in reasons


def test_damage_that_the_digest_alone_does_not_tell() -> None:
    """Bits are changed, and the digest of the result is made that of what comes out."""
    base = weights("bfloat16", 600)
    data = bytes(ADAPTIVE.encode(flipped(base, {-1: 0.5, 2: 0.1}), base=base, backend="ref"))
    at = parse(np.frombuffer(data, np.uint8)).plan.static_offset + 8
    rng = np.random.default_rng(7)
    for _ in range(60):
        damaged = bytearray(mutated(data, rng))
        # What is decoded has any digest, but is a tensor of planes that are sound.
        for xor in (0, 1 << 15):
            result = base.view(np.uint16) ^ np.uint16(xor)
            damaged[at : at + 8] = digest_of(result.view(np.uint8)).to_bytes(8, "little")
            repair(damaged)
            found = outcomes(bytes(damaged), base)
            assert found.count(found[0]) == len(found)


@pytest.mark.parametrize("chunks", [1, 3])
def test_fold(chunks: int) -> None:
    base = weights("bfloat16", 70_000)
    second = flipped(base, {-1: 0.5}, 1)
    third = flipped(second, {-1: 0.5, 7: 0.3}, 2)
    steps = [
        ADAPTIVE.encode(y, base=x, chunks=chunks) for x, y in ((base, second), (second, third))
    ]
    both = tw.fold(*steps, base=base)
    assert bytes(both) == bytes(ADAPTIVE.encode(third, base=base, chunks=chunks))
    with pytest.raises(ValueError, match="of the form 'adaptive' fold against a base"):
        tw.fold(*steps)
    other = DIFFERENCE.encode(third, base=second, chunks=chunks)
    with pytest.raises(ValueError, match="differ in form"):
        tw.fold(steps[0], other, base=base)


def test_it_is_the_default() -> None:
    assert Delta() == Delta(form="adaptive")
    base = weights("bfloat16", 1000)
    assert tw.inspect(tw.encode(base, "delta", base=base)).header.params[0] == 3
