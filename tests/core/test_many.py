"""encode_many and decode_many give what encode and decode give, whatever the threads."""

from __future__ import annotations

import itertools
import math
import threading
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, strategies

import tightwire as tw
from support import ALONE, CODEC_PARAMS, KEY, examples, make_bits, needs
from tightwire.codecs.common import threads as threads_module
from tightwire.formats.dtypes import BY_NAME
from tightwire.planning import HOST_BACKENDS

BF16 = BY_NAME["bfloat16"].numpy
#: Empty, 0-d, tiny, less than a tile, several tiles.
SHAPES = ((0, 3), (), (1,), (7, 5), (4097,), (70_001,))


@pytest.fixture
def _small_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads also for few elements."""
    monkeypatch.setattr(threads_module, "MIN_SPAN_NBYTES", 1 << 10)


def tensors(dtype: str = "bfloat16", shapes: Any = SHAPES) -> list[npt.NDArray[Any]]:
    kind = BY_NAME[dtype]
    return [
        make_bits("normal", kind, math.prod(shape), seed=i).view(kind.numpy).reshape(shape)
        for i, shape in enumerate(shapes)
    ]


def assert_same(found: Any, expected: npt.NDArray[Any]) -> None:
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("backend", ["ref", None, "cpu"])
@pytest.mark.parametrize("name", ALONE)
@pytest.mark.fast_cases(3)
@pytest.mark.usefixtures("_small_spans")
def test_bytes_are_those_of_single_calls(name: str, backend: str | None) -> None:
    if backend == "cpu":
        pytest.importorskip("numba")
    codec = tw.codec(name, **CODEC_PARAMS[name][-1])
    xs = tensors()
    for checksum, threads in ((True, 2), (False, 1)):
        options: dict[str, Any] = {"key": KEY, "checksum": checksum, "backend": backend}
        expected = [bytes(codec.encode(x, **options)) for x in xs]
        found = codec.encode_many(xs, threads=threads, **options)
        assert [bytes(buf) for buf in found] == expected
        decoded = tw.decode_many(found, threads=threads, backend=backend)
        for x, data in zip(decoded, expected, strict=True):
            assert_same(x, tw.decode(data))


@given(strategies.data())
@examples(60)
def test_any_shapes(data: Any) -> None:
    name = data.draw(strategies.sampled_from(["zipccl", "raw"]))
    dtype = data.draw(strategies.sampled_from(["bfloat16", "int16"]))
    sizes = strategies.integers(0, 70)
    shapes = data.draw(strategies.lists(strategies.lists(sizes, max_size=3), max_size=6))
    xs = tensors(dtype, shapes)
    codec = tw.codec(name)
    found = codec.encode_many(xs, threads=data.draw(strategies.integers(1, 3)))
    assert [bytes(buf) for buf in found] == [bytes(codec.encode(x)) for x in xs]
    sources = [bytes(buf) if data.draw(strategies.booleans()) else buf for buf in found]
    for x, buf in zip(tw.decode_many(sources), found, strict=True):
        assert_same(x, tw.decode(buf))


@pytest.mark.usefixtures("_small_spans")
def test_views_of_every_kind() -> None:
    base = tensors("float32", [(300, 400)])[0]
    raw = np.zeros(4 * 1000 + 1, np.uint8)
    raw[1:] = base.reshape(-1)[:1000].view(np.uint8)
    xs = [base.T, base[::2, 3:], base[:0], raw[1:].view(np.float32), base.astype(">f4")]
    found = tw.codec("zipccl").encode_many(xs, threads=2)
    assert [bytes(buf) for buf in found] == [bytes(tw.encode(x)) for x in xs]


def test_no_tensors() -> None:
    assert tw.codec("mx").encode_many([]) == []
    assert tw.codec("mx").encode_many((), out=[], stats=[]) == []
    assert tw.decode_many([]) == []


def test_one_allocation() -> None:
    buffers = tw.codec("zipccl").encode_many(tensors())
    starts = [buf.array.__array_interface__["data"][0] for buf in buffers]
    assert all((start - starts[0]) % 128 == 0 for start in starts)
    for (a, first), (b, _) in itertools.pairwise(zip(starts, buffers, strict=True)):
        assert 0 <= b - a - first.plan.nbytes < 128
    for buf in buffers:
        assert buf.array.base is buffers[0].array.base


def test_memory_of_the_caller() -> None:
    codec, xs = tw.codec("zipccl"), tensors()
    plans = [codec.plan(x.shape, x.dtype) for x in xs]
    out: list[Any] = [np.full(plan.nbytes + 5, 0xA5, np.uint8) for plan in plans]
    out[2] = codec.encode(xs[2] * 2)
    buffers = codec.encode_many(xs, out=out)
    for x, buf, memory in zip(xs, buffers, out, strict=True):
        assert np.may_share_memory(buf.array, getattr(memory, "array", memory))
        assert bytes(buf) == bytes(codec.encode(x))
    targets: list[Any] = [np.empty(x.shape, x.dtype) for x in xs]
    given_out = [*targets[:-1], None]
    decoded = tw.decode_many(buffers, out=given_out)
    assert all(a is b for a, b in zip(decoded[:-1], targets[:-1], strict=True))
    for x, y in zip(xs, decoded, strict=True):
        assert_same(y, x)


def test_memory_that_does_not_fit() -> None:
    codec, xs = tw.codec("zipccl"), tensors(shapes=[(500,), (600,)])
    out: Any
    sizes = [codec.plan(x.shape, x.dtype).nbytes for x in xs]
    memory = np.zeros(sum(sizes), np.uint8)
    apart = [memory[: sizes[0]], memory[sizes[0] :]]
    codec.encode_many(xs, out=apart)
    for out, error, text in (
        ([apart[0]], ValueError, "out has 1 elements; needed: 2"),
        (memory, TypeError, "out is ndarray; allowed: a list or tuple"),
        ([apart[0], apart[1][1:-1]], ValueError, r"out\[1\]: out has .* bytes; the plan needs"),
        ([apart[0], xs[1]], ValueError, r"out\[1\]: out is bfloat16"),
        ([memory[: sizes[0] + 1], memory[sizes[0] - 8 :]], ValueError, r"out\[.\] overlaps out"),
        ([apart[0], "x"], TypeError, r"out\[1\]: Expected an array"),
    ):
        with pytest.raises(error, match=text):
            codec.encode_many(xs, out=out)
    raw = np.zeros(4096, np.uint8)
    with pytest.raises(ValueError, match=r"out\[0\] overlaps tensors\[0\]"):
        codec.encode_many([raw[:10], raw[4000:]], out=[raw, np.zeros(4096, np.uint8)])
    buffers = codec.encode_many(xs)
    target = np.zeros(600, BF16)
    for out, error, text in (
        ([None], ValueError, "out has 1 elements; needed: 2"),
        ([None, target[:-1]], ValueError, r"out\[1\] is bfloat16\[599\]; needed: bfloat16\[600\]"),
        ([target[:500], target], ValueError, r"out\[.\] overlaps out\[.\]"),
        ([None, buffers[0].array[128:1328].view(BF16)], ValueError, r"overlaps buffers\[0\]|out"),
    ):
        with pytest.raises(error, match=text):
            tw.decode_many(buffers, out=out)
    assert not target.any()


def test_arguments_that_are_refused() -> None:
    codec: Any = tw.codec("zipccl")
    decode_many: Any = tw.decode_many
    xs = tensors(shapes=[(500,), (600,)])
    wide = xs[0].astype(np.float32)
    calls: list[tuple[Any, type[Exception], str]] = [
        (lambda: codec.encode_many(np.zeros((3, 4))), TypeError, "tensors is ndarray"),
        (lambda: codec.encode_many({"a": xs[0]}), TypeError, "tensors is dict"),
        (lambda: codec.encode_many(3), TypeError, "tensors is 3"),
        (lambda: codec.encode_many([xs[0], 3]), TypeError, "Expected an array"),
        (lambda: codec.encode_many([xs[0], wide]), ValueError, r"tensors\[1\] is numpy float32"),
        (lambda: codec.encode_many([codec.encode(wide)]), TypeError, "is a Buffer"),
        (lambda: codec.encode_many(xs, stats=[None]), ValueError, "stats has 1 elements"),
        (lambda: codec.encode_many(xs, scratch=3), TypeError, "scratch is 3"),
        (lambda: codec.encode_many(xs, threads=0), ValueError, "threads is 0"),
        (lambda: codec.encode_many(xs, key=3), TypeError, "key is 3"),
        (lambda: codec.encode_many(xs, backend="gpu"), ValueError, "backend is 'gpu'"),
        (lambda: tw.codec("dynamiq").encode_many(xs), ValueError, "key"),
        (lambda: decode_many(bytes(codec.encode(wide))), TypeError, "buffers is bytes"),
        (lambda: decode_many(codec.encode(wide)), TypeError, "buffers is Buffer"),
        (lambda: decode_many([codec.encode(wide), 3]), TypeError, r"buffers\[1\]: Expected"),
        (lambda: decode_many([wide]), TypeError, r"buffers\[0\]: Expected"),
        (lambda: decode_many([], max_nbytes=-1), ValueError, "max_nbytes is -1"),
    ]
    for call, error, text in calls:
        with pytest.raises(error, match=text):
            call()


@pytest.mark.parametrize("backend", HOST_BACKENDS)
@pytest.mark.usefixtures("_small_spans")
def test_statistics_of_each_tensor(backend: str) -> None:
    if backend == "cpu":
        pytest.importorskip("numba")
    codec, xs = tw.codec("lhc"), tensors("float32", [(5000,), (3000,), (20_000,)])
    xs[1][::2] = 0
    stats = [None, np.full(375, 0xFF, np.uint8), codec.measure(xs[2])]
    found = codec.encode_many(xs, stats=stats, backend=backend, threads=2)
    for x, s, buf in zip(xs, stats, found, strict=True):
        assert bytes(buf) == bytes(codec.encode(x, stats=s))
    with pytest.raises(ValueError, match="lacks 1500 elements") as caught:
        codec.encode_many(xs, stats=[None, np.zeros(375, np.uint8), None], backend=backend)
    assert caught.value.__notes__ == ["The error is of tensors[1]"]


def mixed() -> tuple[list[Any], list[Any]]:
    """Buffers of several codecs and dtypes, and what they decode to."""
    buffers: list[Any] = []
    for name, dtype in (
        ("zipccl", "bfloat16"),
        ("raw", "int64"),
        ("mx", "float32"),
        ("sdp4bit", "float16"),
    ):
        for x in tensors(dtype, [(30, 11), (9000,)]):
            buffers += [tw.encode(x, name), bytes(tw.encode(x, name, chunks=3))]
    return buffers, [tw.decode(buf) for buf in buffers]


@pytest.mark.usefixtures("_small_spans")
def test_codecs_and_dtypes_may_be_mixed() -> None:
    buffers, expected = mixed()
    buffers.append(np.frombuffer(buffers[1], np.uint8))
    expected.append(expected[1])
    for x, y in zip(tw.decode_many(buffers, threads=2), expected, strict=True):
        assert_same(x, y)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("backend", [None, *HOST_BACKENDS])
@pytest.mark.fast_cases(2)
@pytest.mark.usefixtures("_small_spans")
def test_a_damaged_buffer_is_named_and_the_others_are_decoded(
    backend: str | None, threads: int
) -> None:
    if backend == "cpu":
        pytest.importorskip("numba")
    buffers, expected = mixed()
    damaged = [bytearray(bytes(buf)) for buf in buffers]
    good: list[Any] = list(map(bytes, damaged))
    for places in ((3,), (13, 6, 10), (0, 15)):
        for kind in ("payload", "header", "length"):
            sources = list(good)
            for i in places:
                bad = bytearray(good[i])
                at = 3 if kind == "header" else len(bad) - 1
                # The last one has damage of another kind.
                bad[at] ^= 0x40
                sources[i] = bad[:-128] if kind == "length" else bad
            out = [np.full(x.shape, 7, x.dtype) for x in expected]
            with pytest.raises(tw.FormatError) as single:
                tw.decode(sources[min(places)])
            with pytest.raises(tw.FormatError, match=f"buffer {min(places)}: ") as caught:
                tw.decode_many(sources, out=out, backend=backend, threads=threads)
            assert caught.value.number == min(places)
            assert caught.value.reason == single.value.reason
            assert caught.value.detail == f"buffer {min(places)}: {single.value.detail}"
            for i, (x, y) in enumerate(zip(out, expected, strict=True)):
                if i not in places:
                    assert_same(x, y)


def test_the_largest_tensor_is_limited() -> None:
    buffers = [bytes(tw.encode(x)) for x in tensors(shapes=[(10,), (2000,)])]
    assert len(tw.decode_many(buffers, max_nbytes=4000)) == 2
    with pytest.raises(tw.FormatError, match="buffer 1: ") as caught:
        tw.decode_many(buffers, max_nbytes=3999)
    assert (caught.value.reason, caught.value.number) == ("limit_exceeded", 1)


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_libraries(library: str) -> None:
    module = pytest.importorskip(library)
    xs = tensors(shapes=[(300,), (20, 3), ()])
    if library == "torch":
        ys = [module.from_numpy(x.view(np.int16)).view(module.bfloat16) for x in xs]
    else:
        ys = [module.numpy.asarray(x) for x in xs]
    buffers = tw.codec("zipccl").encode_many(ys)
    assert [bytes(buf) for buf in buffers] == [bytes(tw.encode(x)) for x in xs]
    for x, y in zip(tw.decode_many(buffers), ys, strict=True):
        assert (type(x), x.dtype) == (type(y), y.dtype)
        assert bool((x == y).all())
    with pytest.raises(ValueError, match="is numpy bfloat16 on the host; needed: "):
        tw.codec("zipccl").encode_many([ys[0], xs[1]])


@needs("numba")
def test_threads_take_tensors_from_one_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor of more than a thread's share is cut; the others are whole, the largest first."""
    from tightwire import host_many

    monkeypatch.setattr(threads_module, "MIN_SPAN_NBYTES", 1 << 10)
    lock = threading.Lock()
    calls: list[tuple[int, int]] = []

    def note(plan: Any, *args: Any) -> None:
        with lock:
            calls.append((plan.nelem, args[4]))

    monkeypatch.setattr(host_many, "encode_here", note)
    sizes = [100, 40_000, 300, 200, *[5000] * 6]
    tw.codec("raw").encode_many([np.zeros(n, np.uint8) for n in sizes], threads=2)
    assert calls[0] == (40_000, 2)
    assert sorted(calls[1:]) == sorted((n, 1) for n in sizes if n != 40_000)
    assert [n for n, _ in calls[1:7]] == [5000] * 6
    calls.clear()
    tw.codec("raw").encode_many([np.zeros(n, np.uint8) for n in sizes], threads=1)
    assert calls == [(n, 1) for n in sorted(sizes, reverse=True)]


@pytest.mark.parametrize("name", ["zipccl", "mx", "taco"])
@pytest.mark.parametrize(
    ("part", "reason"),
    [
        ("magic", "bad_magic"),
        ("header", "checksum_mismatch"),
        ("checksum", "checksum_mismatch"),
        ("size", "bad_record"),
        ("flags", "bad_record"),
        ("ordinal", "bad_record"),
        ("padding", "reserved_not_zero"),
        ("payload", "checksum_mismatch"),
        ("dynamic", "checksum_mismatch"),
    ],
)
@pytest.mark.fast_cases(9)
def test_what_is_wrong_with_a_buffer_is_said_as_of_its_bytes(
    name: str, part: str, reason: str
) -> None:
    """Buffers with one chunk go a short way, damaged ones the long one."""
    x = tensors(shapes=((70_000,),))[0]
    buf = tw.codec(name).encode(x)
    plan, good = buf.plan, bytes(buf)
    assert_same(tw.decode(buf), tw.decode(good))
    header = plan.header.nbytes
    places = {"magic": 0, "header": 40, "checksum": header, "size": header + 15}
    places |= {"flags": header + 17, "ordinal": header + 20, "padding": plan.static_offset - 1}
    places |= {"payload": plan.static_offset + 9, "dynamic": plan.dynamic_offset}
    at = places[part]
    if at >= buf.nbytes:
        return
    buf.array[at] ^= 1
    with pytest.raises(tw.FormatError) as caught:
        tw.decode(buf)
    assert caught.value.reason == reason
    with pytest.raises(tw.FormatError) as again:
        tw.decode_many([tw.encode(x), buf])
    assert (again.value.reason, again.value.number) == (caught.value.reason, 1)
    buf.array[at] ^= 1
    assert_same(tw.decode(buf), tw.decode(good))
