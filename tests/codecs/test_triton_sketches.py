"""Codecs of sums without decoding: the kernels against the reference; see kernels.py."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import tightwire as tw
from kernels import (
    MARKS,
    Memory,
    assert_same_buffer,
    check_decode,
    check_encode,
    decoded_bits,
    raw,
    sums_agree,
)
from support import KEY, make_bits
from tightwire import engine
from tightwire.codecs.common.base import Plan
from tightwire.formats.dtypes import BY_NAME, DType
from tightwire.formats.header import RECORD
from tightwire.planning import device_module

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

pytestmark = MARKS


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
