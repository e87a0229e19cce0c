"""delta: what it takes, what it refuses, and how small its buffers are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tightwire as tw
from decoders.buffer import decode as decode_of_the_pages
from decoders.common import FormatError as DecoderError
from support import examples, repair
from tightwire.codecs import delta, delta_cpu
from tightwire.codecs.delta import Delta
from tightwire.engine import parse
from tightwire.formats.dtypes import BY_NAME
from tightwire.planning import HOST_BACKENDS

Pair = tuple[npt.NDArray[Any], npt.NDArray[Any]]
FORMS = ("adaptive", "difference", "overwrite")
BOTH = ("ref", "cpu")


def step(dtype: str, n: int, rate: float, seed: int = 0) -> Pair:
    """Weights before and after a step of Adam, of about `rate` for each of them."""
    rng = np.random.default_rng(seed)
    kind = BY_NAME[dtype].numpy
    scale = 16 if BY_NAME[dtype].itemsize == 1 else 0.02
    w = rng.normal(0, scale, n).astype(np.float32)
    moved = w - np.float32(rate * scale / 0.02) * np.clip(rng.normal(0, 0.5, n), -3, 3)
    return w.astype(kind), moved.astype(kind)


def any_pair(dtype: str, n: int, share: float, seed: int) -> Pair:
    """Any bits, of which a share changes to any other, or by one."""
    rng = np.random.default_rng(seed)
    kind = BY_NAME[dtype]
    base = rng.integers(0, 256, n * kind.itemsize, dtype=np.uint8).view(kind.bits)
    x = base.copy()
    chosen = rng.random(n) < share
    if seed % 2:
        x[chosen] ^= kind.bits.type(1)
    else:
        x[chosen] = rng.permutation(base)[chosen]
    return base.view(kind.numpy), x.view(kind.numpy)


def conditional_bits(base: npt.NDArray[Any], x: npt.NDArray[Any], dtype: str) -> float:
    """Order-0 entropy of place and difference of a change, given the exponent."""
    kind = BY_NAME[dtype]
    old, new = (a.view(kind.bits).astype(np.int64) for a in (base, x))
    exponents = old >> kind.mantissa & (1 << kind.exponent) - 1
    symbols = np.where(old != new, (new - old) + (1 << 20), 0)
    total = 0.0
    for e in np.unique(exponents):
        counts = np.unique(symbols[exponents == e], return_counts=True)[1]
        total -= float((counts * np.log2(counts / counts.sum())).sum())
    return total / int(np.count_nonzero(old != new))


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize("dtype", Delta.dtypes)
@pytest.mark.parametrize("form", FORMS)
def test_backends_agree(form: str, dtype: str) -> None:
    codec = tw.codec("delta", form=form)
    for n, share in ((1, 1.0), (300, 0.02), (33_000, 0.001), (40_001, 0.6)):
        base, x = any_pair(dtype, n, share, n)
        packed = bytes(codec.encode(x, base=base, backend="ref", chunks=2))
        assert bytes(codec.encode(x, base=base, backend="cpu", chunks=2)) == packed
        for backend in HOST_BACKENDS:
            found = tw.decode(packed, base=base, backend=backend)
            assert found.tobytes() == x.tobytes()
            part = tw.decode(packed, base=base, backend=backend, start=n // 3, stop=n - n // 4)
            assert part.tobytes() == x[n // 3 : n - n // 4].tobytes()
            live = base.copy()
            assert tw.decode(packed, base=live, out=live, backend=backend) is live
            assert live.tobytes() == x.tobytes()


@pytest.mark.parametrize("form", FORMS)
def test_any_number_of_threads_gives_the_same_bytes(form: str) -> None:
    base, x = step("bfloat16", (3 << 20) + 77, 2e-6)
    codec = tw.codec("delta", form=form)
    packed = bytes(codec.encode(x, base=base, threads=1, backend="cpu"))
    for threads in (2, 3, 5):
        assert bytes(codec.encode(x, base=base, threads=threads, backend="cpu")) == packed
        found = tw.decode(packed, base=base, threads=threads, backend="cpu")
        assert found.tobytes() == x.tobytes()
        live = base.copy()
        tw.decode(packed, base=live, out=live, threads=threads, backend="cpu")
        assert live.tobytes() == x.tobytes()
    live = x.copy()
    with pytest.raises(tw.FormatError, match="base_mismatch"):
        tw.decode(packed, base=base[::-1].copy(), out=live, threads=3)
    assert live.tobytes() == x.tobytes()


@given(
    dtype=st.sampled_from(Delta.dtypes),
    form=st.sampled_from(FORMS),
    n=st.integers(0, 70_000),
    chunks=st.integers(1, 3),
    share=st.floats(0, 1),
    seed=st.integers(0, 1 << 30),
)
@examples(60)
def test_any_tensors(dtype: str, form: str, n: int, chunks: int, share: float, seed: int) -> None:
    base, x = any_pair(dtype, n, share, seed)
    codec = tw.codec("delta", form=form)
    buf = codec.encode(x, base=base, chunks=chunks, backend="cpu")
    assert bytes(buf) == bytes(codec.encode(x, base=base, chunks=chunks, backend="ref"))
    assert tw.decode(buf, base=base).tobytes() == x.tobytes()
    assert buf.nbytes <= x.nbytes + 512 + 32 * chunks + 256 * chunks


@pytest.mark.parametrize(
    ("dtype", "rate", "most"),
    [
        ("bfloat16", 1e-6, 1.15),
        ("bfloat16", 1e-5, 1.15),
        ("float16", 1e-6, 1.15),
        ("float8_e4m3fn", 1e-4, 1.15),
        ("float32", 1e-6, 1.15),
    ],
)
def test_size_of_steps_of_adam(dtype: str, rate: float, most: float) -> None:
    base, x = step(dtype, 1 << 20, rate)
    bits = BY_NAME[dtype].bits
    changed = int(np.count_nonzero(base.view(bits) != x.view(bits)))
    coded = 8 * tw.encode(x, "delta", base=base).nbytes / changed
    assert coded <= most * conditional_bits(base, x, dtype)


@pytest.mark.parametrize(("rate", "share", "most"), [(5e-7, 0.01, 0.011), (8e-6, 0.1, 0.09)])
def test_ratio(rate: float, share: float, most: float) -> None:
    base, x = step("bfloat16", 1 << 19, rate)
    assert np.mean(base.view(np.uint16) != x.view(np.uint16)) == pytest.approx(share, rel=0.1)
    assert tw.encode(x, "delta", base=base).nbytes <= most * x.nbytes


@pytest.mark.parametrize(
    "dtype", ["bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2"]
)
@pytest.mark.parametrize("share", [0.5, 0.25, 0.9])
def test_no_more_bytes_than_the_xor_takes(dtype: str, share: float) -> None:
    rate = 1e-5 if dtype == "float32" else 1e-4
    base, moved = step(dtype, 1 << 18, 20 * rate if dtype.startswith("float8") else rate)
    bits = BY_NAME[dtype].bits
    chosen = np.random.default_rng(1).random(base.size) < share
    x = np.where(chosen, moved.view(bits), base.view(bits)).astype(bits)
    differences = tw.encode(x ^ base.view(bits), "huffman").nbytes
    assert tw.encode(x.view(base.dtype), "delta", base=base).nbytes <= differences


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize("n", [1000, 32768 + 37])
def test_values_just_below_a_power_of_two(dtype: str, n: int) -> None:
    """Bits that are rounded anywhere on their way have another exponent."""
    kind = BY_NAME[dtype]
    one = np.ones(n, kind.numpy)
    base = (one.view(kind.bits) - kind.bits.type(1)).view(kind.numpy)
    x = base.copy()
    x[[3, n - 10]] = 1
    found = {backend: bytes(tw.encode(x, "delta", base=base, backend=backend)) for backend in BOTH}
    assert found["ref"] == found["cpu"]
    for backend in BOTH:
        assert tw.decode(found["cpu"], base=base, backend=backend).tobytes() == x.tobytes()


def test_all_of_a_tile_changes() -> None:
    base = np.arange(32768, dtype=np.int32)
    x = base + 1
    buffer = tw.encode(x, "delta", base=base)
    assert bytes(buffer) == bytes(tw.encode(x, "delta", base=base, backend="ref"))
    assert np.array_equal(tw.decode(buffer, base=base), x)


@pytest.mark.parametrize("backend", BOTH)
@pytest.mark.parametrize("dtype", ["bfloat16", "int32", "int64"])
def test_a_base_whose_elements_are_swapped(dtype: str, backend: str) -> None:
    """Sums of two swaps of neighbours, or of steps up and down, are not those of others."""
    kind = BY_NAME[dtype]
    rng = np.random.default_rng(0)
    n = 5000
    base = np.zeros(n, kind.bits)
    x = base.copy()
    x[4000] = 1
    packed = [
        bytes(tw.encode(a.view(kind.numpy), "delta", base=b.view(kind.numpy), backend=backend))
        for a, b in ((x, base), (base, base))
    ]
    for _ in range(40):
        i, j = 2 * rng.choice(n // 2 - 40, 2, replace=False)
        step = int(rng.choice([2, 4, 64]))
        other = base.copy()
        other[[i, j + step]] += kind.bits.type(1)
        other[[i + step, j]] -= kind.bits.type(1)
        for data in packed:
            with pytest.raises(tw.FormatError, match="base_mismatch"):
                tw.decode(data, base=other.view(kind.numpy), backend=backend)


@pytest.mark.parametrize("nbytes", [0, 1, 3, 4, 7, 4096, 300_001])
def test_digests_of_both_backends(nbytes: int) -> None:
    data = np.random.default_rng(nbytes).integers(0, 256, nbytes, dtype=np.uint8)
    words = [int.from_bytes(data[i : i + 4].tobytes(), "little") for i in range(0, nbytes, 4)]
    keys = delta.digest_keys(5, len(words)).tolist()
    want = sum(k * w for k, w in zip(keys, words, strict=True)) % 2**64
    assert delta.digest_of(data, 5) == want
    assert delta_cpu.digest_of(data, 5) == want


@pytest.mark.parametrize("backend", BOTH)
def test_damage_is_not_taken_for_another_base(backend: str) -> None:
    """In place, too, where the base is read while it is decoded against."""
    base = np.arange(70_000, dtype=np.int32)
    x = base.copy()
    x[::50] += 1
    buffer = tw.encode(x, "delta", base=base, checksum=False)
    data = bytearray(bytes(buffer))
    data[buffer.plan.dynamic_offset + 2] ^= 255
    live = base.copy()
    part: dict[str, Any] = {"start": 60_000, "stop": 60_010, "verify": True}
    for options in ({}, {"out": live}, part):
        given = live if "out" in options else base
        with pytest.raises(tw.FormatError, match="bad_payload"):
            tw.decode(data, base=given, backend=backend, **options)
    assert np.array_equal(live, base)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("dtype", "rate"),
    [("bfloat16", 8e-6), ("bfloat16", 1e-4), ("float32", 1e-6), ("float8_e4m3fn", 3e-4)],
)
def test_in_place_where_much_has_changed(dtype: str, rate: float, form: str) -> None:
    """Changes of some tiles are kept from the check, those of others are decoded again."""
    base, x = step(dtype, 5 * delta.TILE + 99, rate)
    # Differences of more than a byte, and gaps too.
    x[70_000:70_300] = -base[80_000:80_300]
    x[100_000:105_000] = base[100_000:105_000]
    codec = tw.codec("delta", form=form)
    packed = codec.encode(x, base=base, backend="cpu", checksum=False).packed()
    assert bytes(packed) == bytes(codec.encode(x, base=base, backend="ref", checksum=False))
    for threads in (1, 2):
        live = base.copy()
        tw.decode(packed, base=live, out=live, backend="cpu", threads=threads)
        assert live.tobytes() == x.tobytes()
    damaged = bytearray(packed)
    plan = parse(np.frombuffer(damaged, np.uint8)).plan
    for at in (plan.dynamic_offset + 9, len(damaged) - 200):
        damaged[at] ^= 16
        live = base.copy()
        with pytest.raises(tw.FormatError):
            tw.decode(damaged, base=live, out=live, backend="cpu")
        assert live.tobytes() == base.tobytes()


@pytest.mark.slow
def test_on_a_processor_of_the_oldest_kind(tmp_path: Path) -> None:
    """Without the instructions that move bits to places."""
    code = """
import numpy as np
import tightwire as tw
rng = np.random.default_rng(0)
base = rng.integers(0, 1 << 16, 70_001, dtype=np.uint16).view("<f2")
for share in (0.003, 0.3, 0.9):
    x = base.copy()
    x.view(np.uint16)[rng.random(x.size) < share] ^= 1
    buf = tw.encode(x, "delta", base=base, backend="cpu")
    assert bytes(buf) == bytes(tw.encode(x, "delta", base=base, backend="ref"))
    assert tw.decode(buf, base=base, backend="cpu").tobytes() == x.tobytes()
"""
    env = {**os.environ, "NUMBA_CPU_NAME": "generic", "NUMBA_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], env=env, check=True, timeout=300)


def test_an_unchanged_tensor_takes_a_few_bytes() -> None:
    base, _ = step("bfloat16", 1 << 16, 1e-6)
    assert tw.encode(base, "delta", base=base).nbytes <= 384


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("chunks", [1, 3])
def test_a_wrong_base_is_refused_before_anything_is_written(
    chunks: int, form: str, backend: str
) -> None:
    base, x = step("bfloat16", 100_000, 1e-5)
    packed = bytes(tw.codec("delta", form=form).encode(x, base=base, chunks=chunks))
    other = base.copy()
    other.view(np.uint16)[-1] ^= 1
    out = np.full(x.size, 7, x.dtype)
    live = other.copy()
    for target in (out, live):
        with pytest.raises(tw.FormatError) as caught:
            tw.decode(packed, base=other if target is out else live, out=target, backend=backend)
        assert caught.value.reason == "base_mismatch"
    assert (out == 7).all()
    assert live.tobytes() == other.tobytes()
    # Selections too, whatever is not verified, and all else that is decoded.
    for options in ({"start": x.size - 9, "stop": x.size - 5}, {"verify": False}):
        with pytest.raises(tw.FormatError, match="base_mismatch"):
            tw.decode(packed, base=other, backend=backend, **options)
    with pytest.raises(tw.FormatError, match="base_mismatch"):
        tw.verify(packed, base=other)
    tw.verify(packed, base=base)
    tw.verify(packed)


@pytest.mark.parametrize(("dtype", "n"), [("uint8", 100), ("uint8", 3), ("complex64", 5000)])
@pytest.mark.parametrize("chunks", [1, 3])
def test_damage_of_what_is_stored_raw_leaves_the_base_alone(
    dtype: str, n: int, chunks: int, backend: str
) -> None:
    kind = BY_NAME[dtype].numpy
    base, x = np.zeros(n, kind), np.ones(n, kind)
    data = bytearray(bytes(tw.encode(x, "delta", base=base, chunks=chunks)))
    plan = parse(np.frombuffer(bytes(data), np.uint8)).plan
    assert plan.codec.name == "raw"
    live = base.copy()
    tw.decode(data, base=live, out=live, backend=backend)
    assert live.tobytes() == x.tobytes()
    for at in (plan.static_range(chunks - 1).start, len(data) - 1):
        damaged, live = bytearray(data), base.copy()
        damaged[at] ^= 1
        with pytest.raises(tw.FormatError, match="checksum_mismatch"):
            tw.decode(damaged, base=live, out=live, backend=backend)
        assert live.tobytes() == base.tobytes()


def test_twice() -> None:
    """A difference applies once; new values may be applied again."""
    base, x = step("bfloat16", 50_000, 1e-5)
    for form in FORMS:
        live = base.copy()
        buf = tw.codec("delta", form=form).encode(x, base=base)
        tw.decode(buf, base=live, out=live)
        if form == "overwrite":
            tw.decode(buf, base=live, out=live)
        else:
            with pytest.raises(tw.FormatError, match="base_mismatch"):
                tw.decode(buf, base=live, out=live)
        assert live.tobytes() == x.tobytes()


def test_calls_that_cannot_be() -> None:
    base, x = step("bfloat16", 5000, 1e-5)
    codec = tw.codec("delta")
    buf = codec.encode(x, base=base)
    assert codec.needs_base
    assert buf.plan.needs_base
    assert not tw.codec("zipccl").needs_base
    needed = r"Needed: base, of bfloat16\[5000\]"
    for call in (
        lambda: codec.encode(x),
        lambda: tw.encode(x[:3], "delta"),
        lambda: tw.decode(buf),
        lambda: codec.encode_many([x]),
        lambda: tw.decode_many([buf]),
    ):
        with pytest.raises(ValueError, match=r"Needed: base, of|needs a base, which batches"):
            call()
    with pytest.raises(ValueError, match=needed):
        codec.decode(bytes(buf))
    for wrong in (base[1:], base.astype(np.float32), base.reshape(50, 100)):
        with pytest.raises(ValueError, match=r"base is .*; needed: bfloat16\[5000\]"):
            codec.encode(x, base=wrong)
        with pytest.raises(ValueError, match=r"base is .*; needed: bfloat16\[5000\]"):
            codec.decode(buf, base=wrong)
    with pytest.raises(TypeError, match="Expected an array"):
        codec.encode(x, base="old")
    with pytest.raises(ValueError, match="'zipccl' takes no base"):
        tw.encode(x, base=base)
    with pytest.raises(ValueError, match="'zipccl' takes no base"):
        tw.decode(tw.encode(x), base=base)
    with pytest.raises(ValueError, match="on the host, which Triton does not reach"):
        codec.encode(x, base=base, backend="triton")
    with pytest.raises(ValueError, match="on the host, which Triton does not reach"):
        tw.decode(buf, base=base, backend="triton")
    room = np.zeros(5001, base.dtype)
    with pytest.raises(ValueError, match="out overlaps base"):
        tw.decode(buf, base=room[:-1], out=room[1:])
    memory = np.zeros(40_000, np.uint8)
    with pytest.raises(ValueError, match="out overlaps base"):
        codec.encode(x, base=memory[10_000:20_000].view(x.dtype), out=memory)


def test_small_tensors_are_stored_raw() -> None:
    base, x = step("bfloat16", 7, 1e-3)
    buf = tw.encode(x, "delta", base=base)
    assert buf.header.codec == "raw"
    assert tw.decode(buf, base=base).tobytes() == tw.decode(buf).tobytes() == x.tobytes()
    with pytest.raises(ValueError, match="base is"):
        tw.decode(buf, base=base[1:])


def test_sums_take_no_buffers_with_a_base() -> None:
    base, x = step("float32", 5000, 1e-5)
    buf = tw.encode(x, "delta", base=base)
    acc = np.zeros(5000, np.float32)
    for call in (
        lambda: tw.codec("delta").decode_add(buf, acc),
        lambda: tw.decode_sum([buf, buf]),
        lambda: tw.codec("zipccl").decode_add_encode(buf, x),
        lambda: tw.codec("delta").decode_add_encode(tw.encode(x), x),
        lambda: tw.codec("delta").encode_sum([tw.encode(x), x]),
    ):
        with pytest.raises(ValueError, match="base"):
            call()
    assert not acc.any()


def outcome(data: bytes, base: npt.NDArray[Any], backend: str) -> bytes | str:
    """The elements, or the reason of the refusal; in place the base is left alone then."""
    live = base.copy()
    try:
        tw.decode(data, base=live, out=live, backend=backend)
    except tw.FormatError as error:
        assert live.tobytes() == base.tobytes()
        with pytest.raises(tw.FormatError) as caught:
            tw.decode(data, base=base, backend=backend)
        assert caught.value.reason == error.reason
        return error.reason
    assert tw.decode(data, base=base, backend=backend).tobytes() == live.tobytes()
    return live.tobytes()


def outcome_of_the_pages(data: bytes, base: npt.NDArray[Any]) -> bytes | str:
    try:
        return decode_of_the_pages(data, base=base.tobytes())[2]
    except DecoderError as error:
        return error.reason


def mutated(data: bytes, rng: np.random.Generator) -> bytes:
    """Some bytes of static and dynamic part changed, and checksums right again."""
    found = bytearray(data)
    plan = parse(np.frombuffer(data, np.uint8)).plan
    for _ in range(int(rng.integers(1, 4))):
        start = plan.dynamic_offset if rng.random() < 0.9 else plan.static_offset
        at = int(rng.integers(start, len(found)))
        found[at] = found[at] ^ 1 << int(rng.integers(8)) if rng.random() < 0.7 else 0
    repair(found)
    return bytes(found)


def sources() -> list[tuple[bytes, npt.NDArray[Any]]]:
    found = []
    for form in FORMS:
        codec = tw.codec("delta", form=form)
        pairs = [step("bfloat16", 900, 1e-5), step("bfloat16", 600, 2e-4)]
        pairs += [any_pair("int8", 700, 0.1, 0), any_pair("float64", 300, 0.3, 1)]
        found += [(bytes(codec.encode(x, base=b, backend="ref")), b) for b, x in pairs]
    return found


def test_every_flipped_bit_is_refused() -> None:
    data, base = sources()[0]
    for i in range(len(data)):
        damaged = bytearray(data)
        damaged[i] ^= 1 << i % 8
        with pytest.raises((tw.FormatError, ValueError)):
            tw.decode(damaged, base=base, backend="cpu")


@pytest.mark.parametrize("number", range(12))
@pytest.mark.fast_cases(3)
def test_damage_that_checksums_do_not_tell(number: int) -> None:
    """All decoders say the same, and write nothing over the base before they know."""
    data, base = sources()[number]
    rng = np.random.default_rng(number)
    reasons = set()
    for _ in range(150):
        damaged = mutated(data, rng)
        expected = outcome_of_the_pages(damaged, base)
        for backend in HOST_BACKENDS:
            assert outcome(damaged, base, backend) == expected
        if isinstance(expected, str):
            reasons.add(expected)
    assert reasons >= {"bad_payload"}


def test_on_arrays_of_torch() -> None:
    torch = pytest.importorskip("torch")
    base, x = step("bfloat16", 5000, 1e-5)
    old, new = (torch.from_numpy(a.view(np.int16)).view(torch.bfloat16) for a in (base, x))
    buf = tw.encode(new, "delta", base=old)
    live = old.clone()
    assert tw.decode(buf, base=live, out=live) is live
    assert torch.equal(live.view(torch.int16), new.view(torch.int16))
    assert isinstance(tw.decode(buf, base=old), torch.Tensor)


def versions(n: int, chunks: int, seed: int = 0) -> list[npt.NDArray[Any]]:
    """Three versions of a tensor; some elements change twice, some back."""
    base, second = step("bfloat16", n, 1e-5, seed)
    third = second.copy()
    third[::7] = base[::7]
    third.view(np.uint16)[1::91] += 3
    return [base, second, third]


@pytest.mark.parametrize("chunks", [1, 3])
def test_fold(chunks: int) -> None:
    base, second, third = versions(70_000, chunks)
    for form in FORMS:
        codec = tw.codec("delta", form=form)
        steps = [
            codec.encode(new, base=old, chunks=chunks)
            for old, new in ((base, second), (second, third))
        ]
        both = tw.fold(*steps, base=base)
        assert bytes(both) == bytes(codec.encode(third, base=base, chunks=chunks))
        if form != "overwrite":
            with pytest.raises(ValueError, match="Needed: base"):
                tw.fold(*steps)
        else:
            both = tw.fold(bytes(steps[0]), bytes(steps[1]))
            for backend in HOST_BACKENDS:
                found = tw.decode(bytes(both), base=base, backend=backend)
                assert found.tobytes() == third.tobytes()
        for wrong in ((steps[1], steps[0]), (steps[0], steps[0])):
            with pytest.raises(tw.FormatError, match="base_mismatch"):
                tw.fold(*wrong)
        with pytest.raises(tw.FormatError, match="base_mismatch"):
            tw.fold(*steps, base=third)


def test_fold_of_plain_tiles_and_raw_chunks() -> None:
    """What one of the buffers has whole."""
    rng = np.random.default_rng(1)
    base = rng.integers(0, 256, 100_000, dtype=np.uint8)
    whole = base.copy()
    whole[:32768] = rng.integers(0, 256, 32768)
    whole[70_000:] = rng.integers(0, 256, 30_000)
    few = whole.copy()
    few[::1000] ^= 1
    codec = tw.codec("delta", form="overwrite")
    for old, middle, new in ((base, whole, few), (few, whole, base), (base, whole, base)):
        for chunks in (1, 2, 3):
            steps = [
                codec.encode(y, base=x, chunks=chunks) for x, y in ((old, middle), (middle, new))
            ]
            both = tw.fold(*steps)
            assert tw.decode(bytes(both), base=old).tobytes() == new.tobytes()


def test_fold_refuses_what_does_not_go_together() -> None:
    base, second, third = versions(5000, 1)
    codec = tw.codec("delta")
    step_1, step_2 = codec.encode(second, base=base), codec.encode(third, base=second)
    with pytest.raises(ValueError, match="buffer 1 is of zipccl"):
        tw.fold(step_1, tw.encode(third), base=base)
    with pytest.raises(ValueError, match="differ in form"):
        tw.fold(step_1, tw.codec("delta", form="overwrite").encode(third, base=second), base=base)
    damaged = bytearray(bytes(step_2))
    damaged[-200] ^= 1
    with pytest.raises(tw.FormatError, match="buffer 1") as caught:
        tw.fold(step_1, damaged, base=base)
    assert caught.value.reason == "checksum_mismatch"
