"""Block formats: the kernels against the reference; see kernels.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tightwire as tw
from kernels import (
    MARKS,
    Memory,
    check_decode,
    check_encode,
    decoded_bits,
    patterns,
    raw,
    sums_agree,
    there_and_back,
)
from support import PATTERNS, make_bits
from tightwire.formats.dtypes import BY_NAME

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

pytestmark = MARKS

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
WIDE_SUMS = [
    *(tw.codec(name) for name in ("mx", "nvfp4", "sdp4bit", "taco")),
    tw.codec("tahquant", hidden=64),
]


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
