"""Sums of buffers in host memory are those of codecs/common/sums.py, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("numba")

import tightwire as tw
from support import ALONE, KEY, make_bits
from tightwire import engine, host_sums
from tightwire.codecs.common import driver_cpu
from tightwire.codecs.common import threads as threads_module
from tightwire.codecs.common.base import Plan
from tightwire.codecs.common.compile_cache import NotCompiledError
from tightwire.codecs.common.sums import FLOAT32, rounded, sum_of, widened
from tightwire.formats.dtypes import BY_NAME, DType

Bits = npt.NDArray[Any]
PARAMS: dict[str, dict[str, Any]] = {"tahquant": {"hidden": 199}}
#: Every codec and every dtype whose elements can be summed; that first whose kernels other tests
#: compile too.
CASES = [
    (name, dtype)
    for name in ALONE
    for dtype in sorted(BY_NAME.values(), key=lambda dtype: dtype.name != "bfloat16")
    if dtype.is_float and dtype.name in tw.codec(name, **PARAMS.get(name, {})).dtypes
]
NAMED = pytest.mark.parametrize(
    ("name", "dtype"), CASES, ids=[f"{name}-{dtype.name}" for name, dtype in CASES]
)
#: Elements and chunks: several pieces of a chunk, and less than one.
SIZES = ((70_001, 1), (70_003, 2), (4097, 3), (1, 1))


@pytest.fixture(autouse=True)
def _small_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads also for few elements."""
    monkeypatch.setattr(threads_module, "MIN_SPAN_NBYTES", 1 << 10)


def codec_of(name: str) -> tw.Codec:
    return tw.codec(name, **PARAMS.get(name, {}))


def buffers(codec: tw.Codec, dtype: DType, n: int, chunks: int) -> list[engine.Parsed]:
    """Three buffers of one plan; raw chunks, infinities and NaNs are among them."""
    # THC takes no tensor whose norm overflows; random bits are of all magnitudes.
    patterns = ("normal", "special", "random") if codec.name != "thc" else ("normal",) * 3
    found = []
    for i, pattern in enumerate(patterns):
        x = make_bits(pattern, dtype, n, seed=i).view(dtype.numpy)
        buf = codec.encode(x, chunks=chunks, key=KEY._replace(rank=i))
        found.append(engine.parse(np.frombuffer(bytes(buf), np.uint8)))
    return found


def decoded(parsed: engine.Parsed) -> Bits:
    out = np.empty(parsed.plan.nelem, parsed.plan.dtype.bits)
    engine.decode_range(parsed, out, 0, backend="cpu")
    return out


@NAMED
@pytest.mark.fast_cases(3)
@pytest.mark.slow_cases(20)
def test_sums_are_those_of_the_reference(name: str, dtype: DType) -> None:
    codec = codec_of(name)
    for n, chunks in SIZES:
        terms: list[Any] = list(buffers(codec, dtype, n, chunks))
        local = make_bits("special", dtype, n, seed=9)
        wide_local = make_bits("special", FLOAT32, n, seed=9)
        values = [decoded(term) for term in terms]
        for added, at in ((None, 0), (local, 0), (local, 2), (wide_local, 3)):
            mixed, expected_terms = list(terms), list(values)
            if added is not None:
                mixed.insert(at, added)
                expected_terms.insert(at, added)
            for scale, wide in ((None, False), (0.375, False), (1 / 3, True)):
                target = FLOAT32 if wide else dtype
                expected = sum_of(expected_terms, dtype, scale, target)
                for threads in (1, 2):
                    out = np.full(n, 0xA5, target.bits)
                    host_sums.sum_into(
                        mixed, out, scale=scale, wide=wide, threads=threads, backend="cpu"
                    )
                    assert out.tobytes() == expected.tobytes(), (n, at, scale, threads)


@NAMED
@pytest.mark.fast_cases(4)
@pytest.mark.slow_cases(20)
def test_the_reference_backend_sums_alike(name: str, dtype: DType) -> None:
    terms: list[Any] = list(buffers(codec_of(name), dtype, 4097, 2))
    found = []
    for backend in ("ref", "cpu", None):
        out = np.empty(4097, dtype.bits)
        host_sums.sum_into([*terms, terms[0]], out, scale=0.5, backend=backend)
        found.append(out.tobytes())
    assert found == found[:1] * 3


@NAMED
@pytest.mark.fast_cases(4)
@pytest.mark.slow_cases(20)
def test_accumulators(name: str, dtype: DType) -> None:
    codec = codec_of(name)
    # Tiny tensors are decoded, then added.
    for n, chunks in ((70_001, 1), (70_003, 2)):
        for parsed in buffers(codec, dtype, n, chunks):
            values = widened(decoded(parsed), dtype)
            own = make_bits("special", dtype, n, seed=7)
            for threads in (1, 2):
                acc = make_bits("special", FLOAT32, n, seed=8).view(np.float32)
                with np.errstate(all="ignore"):
                    expected = acc + values.astype(np.float32)
                assert engine.decode_add(parsed, acc, threads=threads)
                same = acc.view(np.uint32) == expected.view(np.uint32)
                assert (same | np.isnan(acc) & np.isnan(expected)).all()
                with np.errstate(all="ignore"):
                    rounded_sum = rounded(widened(own, dtype) + values, dtype)
                found = own.copy()
                assert engine.decode_add(parsed, found, threads=threads)
                assert found.tobytes() == rounded_sum.tobytes()


def test_a_tiny_tensor_waits_for_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is added before it is known that all of it can be."""
    x = np.linspace(-1, 1, 500, dtype=np.float32)
    parsed = engine.parse(np.frombuffer(bytes(tw.encode(x, "mx")), np.uint8))
    acc = np.zeros(500, np.float32)
    monkeypatch.setattr(host_sums, "kernels_known", lambda plan, direction: False)
    assert not engine.decode_add(parsed, acc)
    monkeypatch.setattr(host_sums, "kernels_known", lambda plan, direction: True)

    def missing(*args: Any) -> None:
        raise NotCompiledError("accumulate")

    monkeypatch.setattr(driver_cpu, "add_elements", missing)
    assert not engine.decode_add(parsed, acc)
    assert not acc.any()


def encoded(plan: Plan, terms: list[Any], **options: Any) -> bytes:
    """Bytes of the sum, encoded into poisoned memory."""
    out = np.full(plan.nbytes, 0xA5, np.uint8)
    host_sums.encode_sum(plan, terms, out, key=KEY, **options)
    return engine.parse(out).pack().tobytes()


@NAMED
@pytest.mark.fast_cases(4)
@pytest.mark.slow_cases(20)
def test_sums_are_encoded_again(name: str, dtype: DType) -> None:
    codec = codec_of(name)
    for n, chunks in SIZES:
        terms: list[Any] = list(buffers(codec, dtype, n, chunks))
        plan = codec.plan((n,), dtype.name, chunks=chunks)
        local = make_bits("normal", dtype, n, seed=9)
        for mixed, scale in (([terms[0], local], None), ([*terms, local], 0.25)):
            values = [decoded(t) if isinstance(t, engine.Parsed) else t for t in mixed]
            total = sum_of(values, dtype, scale, dtype)
            stats = plan.codec.measure(total, dtype) if plan.codec.sums_keep_stats else None
            expected = np.empty(plan.nbytes, np.uint8)
            engine.encode_into(plan, total, expected, stats=stats, key=KEY, backend="ref")
            packed = engine.parse(expected).pack().tobytes()
            for threads in (1, 2):
                options = {"scale": scale, "stats": stats, "threads": threads}
                assert encoded(plan, mixed, backend="cpu", **options) == packed, (n, chunks, scale)


def test_a_sum_that_is_measured() -> None:
    """One window of a tensor is that of the sum, whatever the chunks."""
    codec = tw.codec("zipccl", window="sigma")
    x = make_bits("normal", BY_NAME["bfloat16"], 70_001).view(BY_NAME["bfloat16"].numpy)
    y = (x.astype(np.float32) * 37).astype(x.dtype)
    total = (x.astype(np.float32) + y.astype(np.float32)).astype(x.dtype)
    found = codec.decode_add_encode(codec.encode(x, chunks=3), y, chunks=3)
    assert bytes(found) == bytes(codec.encode(total, chunks=3))


@pytest.mark.parametrize("name", ["mx", "dynamiq"])
def test_statistics_of_the_first_buffer_are_kept(name: str) -> None:
    codec = tw.codec("mx", scale_rule="agreed") if name == "mx" else tw.codec(name)
    terms = buffers(codec, FLOAT32, 70_001, 2)
    plan, local = terms[0].plan, make_bits("normal", FLOAT32, 70_001, seed=5)
    cases: list[list[Any]] = [[terms[0], local], [local, *terms], [*terms, terms[0]]]
    for mixed in cases:
        for scale in (None, 0.25):
            found = [encoded(plan, mixed, backend=b, scale=scale) for b in ("ref", "cpu")]
            assert found[0] == found[1]
            # A sum that is measured has others.
            values = [decoded(t) if isinstance(t, engine.Parsed) else t for t in mixed]
            total = sum_of(values, FLOAT32, scale, FLOAT32)
            out = np.empty(plan.nbytes, np.uint8)
            engine.encode_into(plan, total, out, key=KEY, backend="ref")
            assert found[0] != engine.parse(out).pack().tobytes()


@pytest.mark.parametrize("backend", ["ref", "cpu"])
def test_damage_names_the_buffer(backend: str) -> None:
    x = make_bits("normal", FLOAT32, 501).view(np.float32)
    for checksum, reason in ((True, "checksum_mismatch"), (False, "bad_payload")):
        good = bytes(tw.encode(x, "sdp4bit", checksum=checksum))
        bad = bytearray(good)
        bad[-1] = 1 if checksum else bad[-1]
        # A code that no encoder writes.
        bad[128 + 130] = 0x88 if not checksum else bad[128 + 130]
        parsed = [engine.parse(np.frombuffer(bytes(data), np.uint8)) for data in (good, bad)]
        plan = parsed[0].plan
        with pytest.raises(tw.FormatError, match="buffer 1: ") as caught:
            host_sums.sum_into(parsed, np.empty(501, np.uint32), backend=backend)
        assert caught.value.reason == reason
        local = x.view(np.uint32)
        with pytest.raises(tw.FormatError, match="buffer 2: ") as caught:
            encoded(plan, [parsed[0], local, parsed[1]], backend=backend)
        assert caught.value.reason == reason
