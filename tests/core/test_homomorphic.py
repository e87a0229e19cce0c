"""Sums of sketches in place and of buffers, diagnoses of an index, ways to reduce it."""

from __future__ import annotations

import importlib
import re
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import tightwire as tw
from tightwire.homomorphic import (
    SAFE_LOAD,
    Sketched,
    add,
    agreed_index,
    diagnose,
    index_to_reduce,
    safe_codec,
    seal,
    sketch,
)

N = 18 * 1024 + 5
CODEC = tw.codec("lhc", ratio=4)


def ranks(world: int, seed: int = 0) -> list[npt.NDArray[np.float32]]:
    rng = np.random.default_rng(seed)
    found = np.zeros((world, N), np.float32)
    for x in found:
        x[rng.choice(N, N // 25, replace=False)] = rng.standard_normal(N // 25)
    return list(found)


def test_sketches_add_in_place() -> None:
    """As a reduce of any transport does it, for chunks of two owners."""
    xs = ranks(3)
    index = np.bitwise_or.reduce([CODEC.measure(x) for x in xs])
    buffers = [CODEC.encode(x, stats=index, chunks=2) for x in xs]
    for chunk in range(2):
        total = sketch(buffers[0], chunk)
        assert (total.dtype, total.shape) == (np.float32, (3 * 1024,))
        for buf in buffers[1:]:
            total += sketch(buf, chunk)
    with pytest.raises(tw.FormatError, match="checksum_mismatch"):
        tw.decode(buffers[0])
    assert seal(buffers[0]) is buffers[0]
    assert tw.decode(bytes(buffers[0])).tobytes() == (xs[0] + xs[1] + xs[2]).tobytes()


def test_sketches_of_torch_without_checksums() -> None:
    torch = pytest.importorskip("torch")
    xs = [torch.from_numpy(x).to(torch.bfloat16) for x in ranks(2)]
    index = np.bitwise_or(*(CODEC.measure(x) for x in xs))
    a, b = (CODEC.encode(x, stats=index, checksum=False) for x in xs)
    assert sketch(a).dtype == torch.bfloat16
    sketch(a).add_(sketch(b))
    assert torch.equal(tw.decode(seal(a)), xs[0] + xs[1])


@pytest.mark.slow
def test_sketches_of_what_the_host_encodes_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The buffer lies there, so its sketch is a view of it."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    from tightwire import gpu

    codec = importlib.import_module("tightwire.codec")
    place = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    x = torch.from_numpy(ranks(1)[0]).to(place)
    thc = tw.codec("thc", bits=16)
    key = tw.Key(1)
    expected = bytes(thc.encode(x.cpu().numpy(), key=key, checksum=False))
    if place.type == "cpu":
        # The interpreter's memory stands for a GPU's.
        monkeypatch.setattr(codec, "device_for", lambda *_: gpu)
        monkeypatch.setattr(codec, "on_gpu", lambda a: isinstance(a, torch.Tensor))
    monkeypatch.setattr(gpu, "encode", lambda *_, **__: NotImplemented)
    buf = thc.encode(x, key=key, checksum=False)
    monkeypatch.undo()
    assert bytes(buf) == expected
    before = sketch(buf).clone()
    sketch(buf).add_(before)
    assert torch.equal(sketch(buf), 2 * before)
    cells = np.frombuffer(bytes(buf), np.uint8)[buf.plan.static_offset :]
    total = 2 * before.cpu().numpy()
    assert cells[: total.nbytes].tobytes() == total.tobytes()
    assert before.any()


def test_sums_of_buffers_leave_them_alone() -> None:
    xs = ranks(2)
    index = np.bitwise_or(*(CODEC.measure(x) for x in xs))
    buffers = [CODEC.encode(x, stats=index) for x in xs]
    before = [bytes(b) for b in buffers]
    assert tw.decode(add(*buffers)).tobytes() == (xs[0] + xs[1]).tobytes()
    assert [bytes(b) for b in buffers] == before
    assert bytes(add(buffers[0])) == before[0]


def test_sums_of_unlike_buffers_are_refused() -> None:
    x, y = ranks(2)
    index = CODEC.measure(x)
    a = CODEC.encode(x)
    others: list[tw.Buffer] = [
        CODEC.encode(y),
        tw.codec("lhc", ratio=5).encode(x, stats=index),
        CODEC.encode(x, stats=index, chunks=2),
        tw.encode(x, "zipccl"),
    ]
    for other in others:
        with pytest.raises(ValueError, match="allowed"):
            add(a, other)
    bad: Any
    for call in (sketch, seal, add, lambda buf: add(a, buf)):
        with pytest.raises(ValueError, match="allowed: buffers of"):
            call(others[-1])
        for bad in (bytes(a), a.array, None):
            with pytest.raises(TypeError, match="allowed: a Buffer"):
                call(bad)


def test_damage_is_not_sealed_by_a_sum() -> None:
    a, b = (CODEC.encode(ranks(1)[0]) for _ in range(2))
    sketch(b)[7] += 1
    with pytest.raises(tw.FormatError, match="checksum_mismatch"):
        add(a, b)


def test_a_sum_over_different_indexes_is_found() -> None:
    x, y = ranks(2)
    a, b = CODEC.encode(x), CODEC.encode(y)
    sketch(a)[:] += sketch(b)
    with pytest.raises(tw.FormatError, match="a bucket of no element"):
        tw.decode(seal(a))


@pytest.mark.slow
def test_terms_of_too_many_ranks_are_refused() -> None:
    """Two of 200 and 60 ranks count 4 in 8 bits."""
    codec = tw.codec("thc")
    a, b = (codec.encode(ranks(1)[0], key=tw.Key(1)) for _ in range(2))
    for buf, count in ((a, 200), (b, 60)):
        sketch(buf)[-128] = count
        seal(buf)
    with pytest.raises(ValueError, match="a sum of 200 ranks; allowed: 8"):
        add(a, b)
    sketch(a)[-128] = 1
    with pytest.raises(ValueError, match="a sum of 60 ranks; allowed: 8"):
        add(seal(a), b)


def index_with(share: float, n: int = N) -> Any:
    rng = np.random.default_rng(3)
    chosen = np.zeros(n, np.float32)
    chosen[rng.choice(n, int(share * n), replace=False)] = 1
    return CODEC.measure(chosen)


def test_diagnosis() -> None:
    good = diagnose(CODEC, index_with(0.18), (N,), "float32")
    assert (good.estimated, good.advice, good.limit) == (0, None, SAFE_LOAD / 4)
    assert good.density == pytest.approx(0.18, abs=1e-4)
    assert good.rounds > 3
    dense = diagnose(CODEC, index_with(0.30), (N,), "float32")
    assert dense.peeled + dense.estimated == dense.occupied == int(0.3 * N)
    assert dense.advice is not None
    assert f"{dense.estimated} of {dense.occupied}" in dense.advice
    assert "ratio of at most 2.5" in dense.advice
    full = diagnose(CODEC, index_with(1), (N,), "float32")
    assert full.advice is not None
    assert "uncompressed" in full.advice
    published = tw.codec("lhc", mapping="published")
    small = diagnose(published, index_with(0.1), (N,), "float32", chunks=2)
    assert small.advice is not None
    assert small.advice.endswith("take the mapping 'rotated'")
    assert (small.limit, small.structured) == (0, False)
    empty = diagnose(CODEC, index_with(0), (N,), "float32")
    assert (empty.occupied, empty.rounds, empty.density, empty.advice) == (0, 0, 0, None)


def test_the_diagnosis_is_what_decoding_gives() -> None:
    rng = np.random.default_rng(5)
    x = np.zeros(N, np.float32)
    x[rng.choice(N, int(0.3 * N), replace=False)] = 1 + rng.random(int(0.3 * N))
    found = diagnose(CODEC, CODEC.measure(x), (N,), "float32", chunks=2)
    wrong = np.count_nonzero(tw.decode(CODEC.encode(x, chunks=2)) != x)
    assert 0 < wrong <= found.estimated


def test_safe_codec() -> None:
    kind = "float32"
    assert safe_codec(CODEC, index_with(0.18), N, kind) is CODEC
    assert safe_codec("lhc", index_with(0.3), N, kind) == tw.codec("lhc", ratio=2)
    narrow = tw.codec("lhc", ratio=50, sketch="float16")
    assert safe_codec(narrow, index_with(0.1), N, kind) == tw.codec(
        "lhc", ratio=4, sketch="float16"
    )
    others = (2.5, 1.5, 8)
    assert safe_codec(CODEC, index_with(0.3), N, kind, others) == tw.codec("lhc", ratio=2.5)
    assert safe_codec(CODEC, index_with(0.5), N, kind) is None
    assert safe_codec(tw.codec("lhc", mapping="published"), index_with(0.01), N, kind) is None
    with pytest.raises(ValueError, match="allowed: lhc"):
        safe_codec("mx", index_with(0.1), N, kind)
    for ratio in (1, 0.5, -1):
        with pytest.raises(ValueError, match=r"allowed: 1\.001"):
            safe_codec(CODEC, index_with(0.1), N, kind, (2, ratio))


def test_safe_codecs_do_not_store_raw() -> None:
    """Raw buffers do not add up. Of bfloat16 a bit of index is much more than of float32."""
    n = 64 * 1024
    dense, half, tenth = (index_with(share, n) for share in (0.7, 0.3, 0.1))
    assert safe_codec(CODEC, dense, n, "float32", (1.06,)) == tw.codec("lhc", ratio=1.06)
    assert safe_codec(CODEC, dense, n, "bfloat16", (1.06,)) is None
    assert safe_codec(CODEC, tenth, n, "int32") is None
    assert safe_codec(CODEC, tenth, n, "float32", chunks=n // 512) is None
    wide = tw.codec("lhc", sketch="float32")
    assert safe_codec(wide, half, n, "bfloat16", (2.5, 2)) == tw.codec(
        "lhc", ratio=2.5, sketch="float32"
    )
    assert safe_codec(wide, half, n, "bfloat16", (2,)) is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mapping", ["rotated", "published"])
def test_advice_can_be_taken(dtype: str, mapping: str) -> None:
    """The ratio that it names peels fully and does not store raw."""
    n = 64 * 1024
    codec = tw.codec("lhc", mapping=mapping)
    named = []
    for share in (0.25, 0.4, 0.6, 0.7, 0.735, 0.7499, 0.76, 1):
        index = index_with(share, n)
        advice = diagnose(codec, index, (n,), dtype).advice
        assert advice is not None
        ratio = re.search(r"a ratio of at most ([\d.]+),", advice)
        if ratio is None:
            assert "; send it uncompressed" in advice
            continue
        assert ("'rotated'" in advice) == (mapping == "published")
        again = diagnose(tw.codec("lhc", ratio=float(ratio[1])), index, (n,), dtype)
        assert (again.estimated, again.advice) == (0, None)
        named.append(share)
    assert named == [0.25, 0.4, 0.6, 0.7][: 4 if dtype == "float32" else 3]


def test_a_structured_index_is_named() -> None:
    """Two whole rows of a sketch of five, where a block meets others in all of its cells."""
    x = np.zeros(20 * 1024, np.float32)
    x[:2048] = 1
    found = diagnose(CODEC, CODEC.measure(x), x.shape, "float32")
    assert (found.estimated, found.structured) == (256, True)
    assert found.density < found.limit
    assert found.advice is not None
    assert "structured" in found.advice
    assert "take a lower ratio" in found.advice
    assert "16 rows" not in found.advice
    assert diagnose(tw.codec("lhc", ratio=2), CODEC.measure(x), x.shape, "float32").advice is None


@pytest.mark.parametrize(
    "call",
    [
        lambda i, n: safe_codec(CODEC, i, n, "float32"),
        lambda i, n: diagnose(CODEC, i, (n,), "float32"),
    ],
)
def test_an_index_of_another_size(call: Any) -> None:
    index = index_with(0.1)
    for bad in (index[1:], index.astype(np.int32), index[None]):
        with pytest.raises(ValueError, match="allowed: uint8"):
            call(bad, N)
    with pytest.raises(ValueError, match="as raw"):
        diagnose(CODEC, index[:1], (8,), "float32")


@pytest.mark.parametrize("world", [1, 2, 15])
def test_index_modes(world: int) -> None:
    indexes = [CODEC.measure(x) for x in ranks(world, 4)]
    expected = np.bitwise_or.reduce(indexes)
    for mode, operation in (("or", "bitwise_or"), ("4bit", "sum")):
        sent = [index_to_reduce(i, mode, world) for i in indexes]
        assert {name for _, name in sent} == {operation}
        ufunc = np.bitwise_or if mode == "or" else np.add
        reduced = ufunc.reduce([data for data, _ in sent])
        assert reduced.size == len(indexes[0]) * (4 if mode == "4bit" else 1)
        assert agreed_index(reduced, mode).tobytes() == expected.tobytes()


def test_one_bit_sums_lose_shared_elements() -> None:
    """Both ranks have element 0: the carry gives element 1 instead. encode() refuses that."""
    x = np.zeros(4096, np.float32)
    x[0] = 1
    data, operation = index_to_reduce(CODEC.measure(x), "1bit", 2)
    index = agreed_index(data + data, "1bit")
    assert (operation, index[0]) == ("sum", 2)
    with pytest.raises(ValueError, match="lacks 1 elements"):
        CODEC.encode(x, stats=index)


def test_bad_index_modes() -> None:
    index = index_with(0.1)
    with pytest.raises(ValueError, match="at most 15"):
        index_to_reduce(index, "4bit", 16)
    for call in (lambda m: index_to_reduce(index, m, 2), lambda m: agreed_index(index, m)):
        with pytest.raises(ValueError, match="allowed: or, 4bit, 1bit"):
            call("2bit")
    for mode in ("or", "4bit", "1bit"):
        for world in (0, -1):
            with pytest.raises(ValueError, match="allowed: at least 1"):
                index_to_reduce(index, mode, world)
        for bad in (index.astype(np.float64), index != 0, index[None]):
            with pytest.raises(ValueError, match="allowed: uint8, one dimension"):
                index_to_reduce(bad, mode, 2)
    with pytest.raises(ValueError, match="a multiple of 4"):
        agreed_index(index[:3], "4bit")


@pytest.mark.parametrize("mode", ["or", "4bit", "1bit"])
def test_index_modes_of_tensors(mode: str) -> None:
    """As of NumPy arrays, in PyTorch."""
    torch = pytest.importorskip("torch")
    index = index_with(0.3)
    data, operation = index_to_reduce(torch.from_numpy(index), mode, 3)
    expected, wanted = index_to_reduce(index, mode, 3)
    assert (operation, data.dtype) == (wanted, torch.uint8)
    assert data.numpy().tobytes() == expected.tobytes()
    found = agreed_index(data + data, mode)
    assert found.numpy().tobytes() == agreed_index(expected + expected, mode).tobytes()


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("share", "rounds"), [(0.18, 0), (0.18, 2), (0.3, 0)])
def test_what_encoding_has_found(
    share: float, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of chunks on the host, and by kernels, which peel for the diagnosis, and to decode, once."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    from tightwire.codecs import lhc_peeling_triton, lhc_triton

    rng = np.random.default_rng(1)
    x = np.where(np.unpackbits(index_with(share), count=N, bitorder="little"), rng.random(N), 0)
    x = x.astype(np.float32)
    index = CODEC.measure(x)
    wanted = diagnose(CODEC, index, (N,), "float32", chunks=2)
    expected = tw.decode(CODEC.encode(x, chunks=2))
    hosted = Sketched(CODEC, x, index, chunks=2)
    assert hosted.diagnosis(hosted.counts().tolist()) == wanted
    assert hosted.decode(5, N - 7).tobytes() == expected[5 : N - 7].tobytes()
    if rounds:
        monkeypatch.setattr(lhc_peeling_triton, "SMALL_BLOCKS", 0)
        monkeypatch.setattr(lhc_peeling_triton, "ROUNDS", rounds)
    place = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tensor, stats = (torch.from_numpy(a).to(place) for a in (x, index))
    found = Sketched(CODEC, tensor, stats, chunks=2, backend="triton")
    assert found.diagnosis(found.counts().tolist()) == wanted
    monkeypatch.setattr(lhc_triton, "peel_chunks", None)
    assert found.decode(5, N - 7).cpu().numpy().tobytes() == expected[5 : N - 7].tobytes()
    assert found.counts().tolist() == [wanted.occupied, wanted.peeled, wanted.rounds]
    assert wanted.rounds > 2
    found.check()
    with pytest.raises(ValueError, match="as raw"):
        Sketched(CODEC, x[:8], index[:1])
