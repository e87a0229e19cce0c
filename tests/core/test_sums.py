"""decode_sum and encode_sum are the reference's sums; decode_add adds in one pass, too."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import tightwire as tw
from support import ALONE, KEY, make_bits, needs
from tightwire import host_sums
from tightwire.codecs.common.sums import FLOAT32, rounded, sum_of, widened
from tightwire.formats.dtypes import BY_NAME, DType

Bits = npt.NDArray[Any]
N = 4100
BF16 = BY_NAME["bfloat16"]
#: A dtype that each codec takes.
DTYPES = {name: FLOAT32 if name == "sdp4bit" else BF16 for name in ALONE}


def codec_of(name: str) -> tw.Codec:
    return tw.codec(name, hidden=205) if name == "tahquant" else tw.codec(name)


def values(dtype: DType, seed: int, n: int = N) -> npt.NDArray[Any]:
    return make_bits("normal", dtype, n, seed).view(dtype.numpy)


def bits_of(x: npt.NDArray[Any]) -> Bits:
    return x.reshape(-1).view(f"u{x.itemsize}")


def buffers(codec: tw.Codec, dtype: DType, chunks: int = 2, n: int = N) -> list[tw.Buffer]:
    return [codec.encode(values(dtype, i, n), key=KEY, chunks=chunks) for i in range(3)]


@pytest.mark.parametrize("backend", ["ref", None, "cpu"])
@pytest.mark.parametrize("name", ALONE)
@pytest.mark.fast_cases(3)
def test_sums_are_those_of_the_reference(name: str, backend: str | None) -> None:
    if backend == "cpu":
        pytest.importorskip("numba")
    codec, dtype = codec_of(name), DTYPES[name]
    bufs = buffers(codec, dtype)
    for local, at in ((None, 0), (values(dtype, 5), 1), (values(FLOAT32, 5), 3)):
        # A buffer, bytes and an array of bytes.
        terms: list[Any] = [bufs[0], bytes(bufs[1]), np.frombuffer(bytes(bufs[2]), np.uint8)]
        decoded = [bits_of(tw.decode(buf)) for buf in bufs]
        if local is not None:
            terms.insert(at, local)
            decoded.insert(at, bits_of(local))
        for scale, kind in ((None, None), (1 / 3, "float32")):
            target = FLOAT32 if kind else dtype
            expected = sum_of(decoded, dtype, scale, target)
            out = np.full(N, 7, target.numpy)
            options: dict[str, Any] = {"scale": scale, "backend": backend}
            found = tw.decode_sum(terms, dtype=kind, **options)
            assert (found.dtype, found.tobytes()) == (target.numpy, expected.tobytes())
            assert tw.decode_sum(terms, dtype=kind, out=out, **options) is out
            assert out.tobytes() == expected.tobytes()
        total = sum_of(decoded, dtype, 0.5, dtype).view(dtype.numpy)
        stats = codec.measure(total)
        encoded = codec.encode_sum(terms, scale=0.5, stats=stats, key=KEY, backend=backend)
        assert bytes(encoded) == bytes(codec.encode(total, stats=stats, key=KEY, chunks=2))


def test_what_a_sum_returns() -> None:
    torch = pytest.importorskip("torch")
    codec = tw.codec("zipccl")
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    y = torch.from_numpy(x)
    for terms, library in (
        ([codec.encode(x), codec.encode(y)], np.ndarray),
        ([codec.encode(y), codec.encode(x)], torch.Tensor),
        ([codec.encode(x), y], torch.Tensor),
        ([bytes(codec.encode(y)), bytes(codec.encode(y))], np.ndarray),
    ):
        found = tw.decode_sum(terms, scale=0.5)
        assert isinstance(found, library)
        assert np.array_equal(np.asarray(found), x)
        assert type(tw.decode(codec.encode_sum(terms))) is library
    # The terms need not have the codec, the slots or the checksums that the sum gets.
    loose = codec.encode(x, checksum=False, dynamic_capacity=1 << 10)
    found = tw.codec("mx").encode_sum([bytes(loose), codec.encode(x)], checksum=False)
    assert bytes(found) == bytes(tw.encode(2 * x, "mx", checksum=False))
    wide = codec.encode(x.astype(np.float64) / 3)
    assert tw.decode_sum([wide, wide], dtype="float32").tobytes() == (
        (x.astype(np.float64) / 3 * 2).astype(np.float32).tobytes()
    )


def test_memory_of_the_caller() -> None:
    codec = tw.codec("zipccl")
    x = values(FLOAT32, 1)
    a, b = codec.encode(x), codec.encode(x * 3)
    expected = bytes(codec.encode(x * 4))
    out = np.full(a.plan.nbytes + 9, 0xA5, np.uint8)
    assert bytes(codec.encode_sum([a, b], out=out)) == expected
    # Memory of a term is written last.
    assert bytes(codec.encode_sum([a, b], out=b)) == expected
    with pytest.raises(ValueError, match="out overlaps the array that is added"):
        tw.codec("mx").encode_sum([a, x], out=x.view(np.uint8))
    for taken, name in ((x, r"terms\[1\]"), (a.array[: 4 * N].view(np.float32), r"terms\[0\]")):
        with pytest.raises(ValueError, match=f"out overlaps {name}|{name} overlaps out"):
            tw.decode_sum([a, x], out=taken)
    with pytest.raises(ValueError, match=r"out is float32\[4099\]; needed: float32\[4100\]"):
        tw.decode_sum([a, x], out=x[1:])


def test_arguments_that_are_refused() -> None:
    codec, x = tw.codec("zipccl"), values(FLOAT32, 1)
    buf = codec.encode(x)
    whole = tw.encode(np.arange(9))
    decode_sum: Any = tw.decode_sum
    calls: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        ([], {}, ValueError, "terms are 0 buffers and 0 tensors; allowed"),
        ([x], {}, ValueError, "terms are 0 buffers and 1 tensors; allowed"),
        ([buf, x, x], {}, ValueError, "terms are 1 buffers and 2 tensors; allowed"),
        (buf, {}, TypeError, "terms is Buffer; allowed: a list or tuple"),
        ([buf, 3], {}, TypeError, "Expected bytes"),
        ([buf, codec.encode(x[1:])], {}, ValueError, r"terms\[1\] is .*4099.* needed: .*4100"),
        ([buf, codec.encode(x, chunks=2)], {}, ValueError, "2 chunks; needed: .* 1 chunks"),
        ([buf, tw.encode(x, "mx")], {}, ValueError, r"is Mx\(.*; needed: Zipccl\("),
        ([buf, x[1:]], {}, ValueError, "x is float32.*; needed: float32"),
        ([buf, x.astype(np.float64)], {}, ValueError, "x is float64.*; needed: float32"),
        ([whole, whole], {}, TypeError, "the buffer is int64; allowed: float"),
        ([buf], {"scale": "1"}, TypeError, "scale is '1'; allowed: a number"),
        ([buf], {"scale": True}, TypeError, "scale is True"),
        ([buf], {"threads": 0}, ValueError, "threads is 0"),
        ([buf], {"scratch": 1}, TypeError, "scratch is 1"),
        ([buf], {"backend": "gpu"}, ValueError, "backend is 'gpu'"),
    ]
    for terms, options, error, text in calls:
        with pytest.raises(error, match=text):
            decode_sum(terms, **options)
        with pytest.raises(error, match=text):
            codec.encode_sum(terms, **options)
    with pytest.raises(ValueError, match="dtype is float16; allowed: float32, None"):
        tw.decode_sum([buf], dtype="float16")
    with pytest.raises(ValueError, match="key"):
        tw.codec("dynamiq").encode_sum([buf])


def test_damage_is_named() -> None:
    codec, x = tw.codec("zipccl"), values(FLOAT32, 1)
    good = bytes(codec.encode(x))
    for at in (3, -1, 5000):
        bad = bytearray(good)
        bad[at] ^= 0x40
        with pytest.raises(tw.FormatError) as single:
            tw.decode(bad)
        for call in (tw.decode_sum, codec.encode_sum):
            with pytest.raises(tw.FormatError, match="buffer 2: ") as caught:
                call([good, x, bad])
            assert (caught.value.reason, caught.value.number) == (single.value.reason, 2)
            with pytest.raises(tw.FormatError) as caught:
                call([bad, x])
            assert (str(caught.value), caught.value.number) == (str(single.value), None)


def no_total(*args: Any) -> None:
    raise AssertionError("the sum is in memory as a whole")


@needs("numba")
@pytest.mark.parametrize("name", ["zipccl", "lhc", "omnireduce"])
def test_sums_that_are_one_pass(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A packed source has no slots; statistics are not measured where they are passed."""
    codec, n = tw.codec(name), 40_000
    x = values(FLOAT32, 1, n)
    total = x + x
    stats = codec.measure(total)
    expected = bytes(
        codec.encode(total if name == "zipccl" else 2 * tw.decode(codec.encode(x)), stats=stats)
    )
    source = bytes(codec.encode(x))
    monkeypatch.setattr(host_sums, "_sum", no_total)
    monkeypatch.setattr(host_sums, "write_into", no_total)
    local = tw.decode(source)
    assert bytes(codec.decode_add_encode(source, local, stats=stats)) == expected
    assert bytes(codec.encode_sum([source, local], stats=stats)) == expected


@needs("numba")
@pytest.mark.parametrize("name", ["zipccl", "lhc", "omnireduce"])
@pytest.mark.parametrize("own", ["bfloat16", "float16", "float64", "float32"])
@pytest.mark.fast_cases(2)
def test_decode_add_is_one_pass(name: str, own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Into any float accumulator; that of the buffer's dtype is rounded once."""
    dtype, n = BF16, 40_000
    source = tw.codec(name).encode(values(dtype, 1, n), chunks=2)
    added = tw.decode(source)
    acc = values(BY_NAME[own], 2, n)
    expected = acc + added.astype(acc.dtype)
    if own == "bfloat16":
        words = widened(bits_of(acc), dtype) + widened(bits_of(added), dtype)
        assert expected.tobytes() == rounded(words, dtype).tobytes()

    def whole(*args: Any, **options: Any) -> None:
        raise AssertionError("all elements are decoded, then added")

    monkeypatch.setattr("tightwire.engine.decode_range", whole)
    assert tw.codec(name).decode_add(source, acc) is acc
    assert acc.tobytes() == expected.tobytes()
