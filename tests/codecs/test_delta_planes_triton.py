"""Tiles of planes by delta's kernels: the bytes and refusals of the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import tightwire as tw  # noqa: E402
from support import make_bits, repair  # noqa: E402
from tightwire.engine import parse  # noqa: E402
from tightwire.formats.dtypes import BY_NAME  # noqa: E402

Bits = npt.NDArray[Any]
CODEC = tw.codec("delta")
#: Bits that are flipped, -1 the highest, and in which share of the elements.
SHARES = (
    {-1: 0.5},
    {0: 0.375, 1: 0.01, 3: 1, -1: 0.97},
    {0: 0.36, 5: 0.64},
    {-1: 0.01},
    {0: 0.02, 3: 0.005},
    dict.fromkeys(range(8), 0.1),
)


def pair(dtype: str, n: int, shares: dict[int, float]) -> tuple[Bits, Bits]:
    """Bits of base and tensor. Some of its tiles are as the base, others have few changes."""
    rng = np.random.default_rng(n)
    kind = BY_NAME[dtype]
    base = make_bits("normal", kind, n)
    x = base.copy()
    for k, share in shares.items():
        x[rng.random(n) < share] ^= kind.bits.type(1 << k % (8 * kind.itemsize))
    for first in range(0, n, 5 << 15):
        few = slice(first + (2 << 15), first + (4 << 15))
        x[few] = base[few]
        x[first + (3 << 15) : first + (4 << 15) : 500] ^= kind.bits.type(1)
    return base, x


def tensor(bits: Bits, dtype: str, place: str, first: int = 0) -> Any:
    """A tensor, so many elements behind the start of its memory."""
    kind = getattr(torch, dtype)
    room = torch.zeros(bits.size + first, dtype=kind, device=place)[first:]
    given = torch.from_numpy(bits.view(np.uint8).copy()).to(place)
    room.view(torch.uint8).copy_(given)
    return room


def same(x: Any, y: Any) -> bool:
    return bool(torch.equal(x.view(torch.uint8), y.view(torch.uint8)))


@pytest.mark.fast_cases(3)
@pytest.mark.slow_cases(16)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float8_e4m3fn", "int16"])
@pytest.mark.parametrize("shares", SHARES)
@pytest.mark.parametrize(("chunks", "first"), [(1, 0), (3, 0), (2, 1)])
def test_bytes_and_tensors(
    dtype: str, shares: dict[int, float], chunks: int, first: int, place: str
) -> None:
    n = 1_500_017 if place == "cuda" else 1_030
    base, x = pair(dtype, n, shares)
    kind = BY_NAME[dtype].numpy
    expected = bytes(CODEC.encode(x.view(kind), base=base.view(kind), chunks=chunks, backend="cpu"))
    old, new = (tensor(v, dtype, place, first) for v in (base, x))
    buf = CODEC.encode(new, base=old, chunks=chunks, backend="triton")
    assert bytes(buf) == expected
    for src in (buf, expected):
        assert same(tw.decode(src, base=old, like=old, backend="triton"), new)
        live = tensor(base, dtype, place, first)
        tw.decode(src, base=live, out=live, backend="triton")
        buf.check()
        assert same(live, new)
    part = tw.decode(expected, base=old, like=old, start=n // 3, stop=n - 7, backend="triton")
    assert same(part, new[n // 3 : n - 7])


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "uint8"])
@pytest.mark.parametrize("shares", SHARES)
def test_damage_that_checksums_do_not_tell(
    dtype: str, shares: dict[int, float], place: str
) -> None:
    """Nothing is written over a base that is not the tensor afterwards."""
    n, many = (40_000, 60) if place == "cuda" else (500, 8)
    base, x = pair(dtype, n, shares)
    kind = BY_NAME[dtype].numpy
    data = bytes(CODEC.encode(x.view(kind), base=base.view(kind), backend="cpu"))
    start = parse(np.frombuffer(data, np.uint8)).plan.dynamic_offset
    rng = np.random.default_rng(n)
    reasons = set()
    for _ in range(many):
        damaged = bytearray(data)
        behind = 16 if rng.random() < 0.5 else len(data) - start
        damaged[start + int(rng.integers(behind))] ^= 1 << int(rng.integers(8))
        repair(damaged)
        try:
            expected = tw.decode(bytes(damaged), base=base.view(kind), backend="cpu").tobytes()
        except tw.FormatError as error:
            expected = error.reason
        live = tensor(base, dtype, place)
        found: Any
        try:
            found = tw.decode(bytes(damaged), base=live, out=live, backend="triton")
            found = found.view(torch.uint8).cpu().numpy().tobytes()
        except tw.FormatError as error:
            found = error.reason
            assert same(live, tensor(base, dtype, place))
        assert found == expected
        reasons.add(expected if isinstance(expected, str) else "decoded")
    assert "bad_payload" in reasons
