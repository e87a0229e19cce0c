"""What is the same for all codecs: selections, sums, keys, statistics, what is left to raw."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tightwire as tw
from support import ALONE, CODEC_PARAMS, make_bits
from tightwire.codecs.common import threads as threads_module
from tightwire.codecs.common.sums import rounded
from tightwire.formats.dtypes import BY_NAME

KEY = tw.Key(0xFEDCBA9876543210, step=5, rank=2)
ALL = [(name, params) for name, several in CODEC_PARAMS.items() for params in several]
DRAWING = [pair for pair in ALL if tw.codec(pair[0], **pair[1]).spec.draws]
#: An explicit window of zipccl is measured as it is, and refused beside itself: test_misuse.py.
MEASURED = [pair for pair in ALL if pair[1].get("window") != 5]
LOSSY = ("bfloat16", "float16", "float32")
#: All dtypes with the first parameters of a codec, one with each of the others. mx with agreed
#: scales keeps those of the buffer in a sum; test_mx.py has that.
SUMMED = [
    (name, params, dtype)
    for name, several in CODEC_PARAMS.items()
    for i, params in enumerate(several)
    for k, dtype in enumerate(LOSSY)
    if (i == 0 or i % len(LOSSY) == k) and params.get("scale_rule") != "agreed"
]


def tensor(pattern: str, dtype: str, n: int, seed: int = 0) -> Any:
    kind = BY_NAME[dtype]
    return make_bits(pattern, kind, n, seed).view(kind.numpy)


def test_every_codec_is_here() -> None:
    assert set(CODEC_PARAMS) == set(ALONE)
    assert {name for name, _ in DRAWING} == {"sdp4bit", "taco", "dynamiq", "thc"}


@pytest.mark.fast_cases(12)
@pytest.mark.parametrize(("name", "params"), ALL)
def test_selections_at_borders(name: str, params: dict[str, Any], backend: str) -> None:
    """Of units of 16 elements and more, and of chunks."""
    n = 9001
    borders = [(0, n), (1, 2), (15, 17), (31, 33), (95, 770), (255, 257), (1023, 1025)]
    borders += [(2999, 3003), (4095, 4097), (6000, 6003), (n - 1, n), (n, n)]
    for pattern, dtype in (("scales", "float32"), ("normal", "bfloat16")):
        codec = tw.codec(name, **params)
        buf = codec.encode(tensor(pattern, dtype, n), chunks=3, key=KEY)
        assert buf.header.codec == name or dtype == "bfloat16"
        whole = tw.decode(buf, backend="ref")
        for start, stop in borders:
            part = tw.decode(buf, start=start, stop=stop, backend=backend)
            assert part.tobytes() == whole[start:stop].tobytes(), (start, stop)


@pytest.mark.fast_cases(4)
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize(("name", "params", "dtype"), SUMMED)
def test_sums_are_those_of_the_steps(
    name: str, params: dict[str, Any], dtype: str, backend: str
) -> None:
    codec = tw.codec(name, **params)
    kind, key = BY_NAME[dtype].numpy, KEY._replace(rank=5)
    cases = (("special", "special", 3001, 3), ("scales", "normal", 70_001, 1))
    for given, added, n, chunks in (*cases, ("mixed_zeros", "random", 4500, 2)):
        x, y = tensor(given, dtype, n), tensor(added, dtype, n, seed=1)
        buf = codec.encode(x, chunks=chunks, key=KEY)
        acc = y.astype(np.float32)
        total = acc + tw.decode(buf, backend="ref").astype(np.float32)
        assert codec.decode_add(buf, acc) is acc
        assert np.array_equal(acc, total, equal_nan=True)

        # A sum of dynamiq has the widths of the buffer.
        stats = codec.measure(x) if name == "dynamiq" else None
        options: dict[str, Any] = {"chunks": chunks, "key": key}
        # A sum has one NaN: the quiet, positive one.
        summed = rounded(total, BY_NAME[dtype]).view(kind)
        expected = codec.encode(summed, stats=stats, backend="ref", **options)
        found = codec.decode_add_encode(buf, y, backend=backend, **options)
        assert bytes(found) == bytes(expected), (given, added)
        # Into the memory of the buffer.
        found = codec.decode_add_encode(buf, y, out=buf, backend=backend, **options)
        assert bytes(found) == bytes(expected), (given, added)


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize(("name", "params"), DRAWING)
def test_random_words_follow_the_key_alone(
    name: str, params: dict[str, Any], backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads_module, "MIN_SPAN_NBYTES", 1)
    codec = tw.codec(name, **params)
    x = tensor("scales", "float32", 9000)
    first = bytes(codec.encode(x, key=KEY, backend=backend))
    assert bytes(codec.encode(x, key=KEY, backend=backend, threads=3)) == first
    numbers: Any = (np.array([7]), np.int64(KEY.step), np.uint8(KEY.rank))
    again = codec.encode(x, key=tw.Key(*numbers), backend=backend)
    assert bytes(again) == bytes(codec.encode(x, key=KEY._replace(seed=7)))
    others = [KEY._replace(**change) for change in ({"seed": 1}, {"step": 1}, {"rank": 1})]
    assert len({first, *(bytes(codec.encode(x, key=k, backend=backend)) for k in others)}) == 4
    with pytest.raises(ValueError, match="needs key"):
        codec.encode(x, backend=backend)
    half = tensor("normal", "float32", 2048)
    buf = codec.encode(np.concatenate([half, half]), key=KEY, chunks=2, backend=backend)
    assert bytes(buf.static(0)) != bytes(buf.static(1))


@pytest.mark.parametrize(("name", "params"), [pair for pair in ALL if pair not in DRAWING])
def test_a_key_changes_nothing_where_nothing_is_drawn(name: str, params: dict[str, Any]) -> None:
    codec, x = tw.codec(name, **params), tensor("scales", "bfloat16", 9000)
    assert bytes(codec.encode(x, key=KEY)) == bytes(codec.encode(x))


@pytest.mark.parametrize(("name", "params"), MEASURED)
def test_stats_are_those_measured_or_refused(name: str, params: dict[str, Any]) -> None:
    codec, x = tw.codec(name, **params), tensor("normal", "float32", 9000)
    stats = codec.measure(x)
    if stats is None:
        with pytest.raises(ValueError, match="takes no stats"):
            codec.encode(x, key=KEY, stats=np.array([1]))
    else:
        assert bytes(codec.encode(x, key=KEY, stats=stats)) == bytes(codec.encode(x, key=KEY))


@pytest.mark.parametrize(("name", "params"), ALL)
def test_what_gets_no_shorter_is_stored_raw(name: str, params: dict[str, Any]) -> None:
    codec = tw.codec(name, **params)
    assert codec.plan((100_000,), "float32").codec.name == name
    for dtype in codec.spec.dtypes:
        for shape in [*((n,) for n in range(0, 2100, 3)), (), (0, 7), (7, 0), (500, 7), (3000, 1)]:
            plan, raw = codec.plan(shape, dtype), tw.codec("raw").plan(shape, dtype)
            shorter = plan.static_stride < raw.static_stride
            assert plan.codec.name == (name if shorter else "raw"), (dtype, shape)


@pytest.mark.parametrize(("name", "params"), ALL)
def test_small_tensors_and_other_dtypes_come_back(name: str, params: dict[str, Any]) -> None:
    codec = tw.codec(name, **params)
    if name == "raw":
        return
    tensors = [np.full(shape, 1.25, np.float32) for shape in ((), (0,), (1,), (0, 7), (7, 0))]
    others = sorted(set(BY_NAME) - set(codec.spec.dtypes))
    for x in [*tensors, *(tensor("random", dtype, 4000) for dtype in others)]:
        buf = codec.encode(x, key=KEY)
        assert buf.header.codec == "raw"
        assert tw.decode(buf).tobytes() == x.tobytes()
