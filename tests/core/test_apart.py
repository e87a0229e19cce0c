"""Memory that a call writes overlaps nothing else, and what is wrong is said with its number.

The same on every backend: host tensors, and kernels under Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import tightwire as tw  # noqa: E402
from tightwire import gpu, many, prepared  # noqa: E402
from tightwire.apart import check_apart, span_of  # noqa: E402
from tightwire.prepared import Terms  # noqa: E402

BACKENDS = ["ref", "cpu", "triton"]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "cpu":
        pytest.importorskip("numba")
    if request.param == "triton":
        pytest.importorskip("triton")
        if torch.cuda.is_available():
            pytest.skip("kernels are compiled for the GPU here")
    return str(request.param)


def values(n: int, seed: int = 0, dtype: Any = torch.float32) -> Any:
    x = np.random.default_rng(seed).standard_normal(n).astype(np.float32)
    return torch.from_numpy(x).to(dtype)


def memory_for(codec: tw.Codec, x: Any) -> Any:
    return torch.zeros(codec.plan(x.shape, x.dtype).nbytes, dtype=torch.uint8)


def as_uint8(buf: Any) -> Any:
    return torch.frombuffer(bytearray(bytes(buf)), dtype=torch.uint8)


def refused(
    text: str,
    call: Callable[..., Any],
    *args: Any,
    error: type[Exception] = ValueError,
    **options: Any,
) -> None:
    with pytest.raises(error, match=text):
        call(*args, **options)


def test_spans() -> None:
    x = np.arange(20, dtype=np.float32)
    start = x.__array_interface__["data"][0]
    assert span_of(x) == (start, start + 80)
    assert span_of(x[3:]) == span_of(torch.from_numpy(x)[3:]) == (start + 12, start + 80)
    assert span_of(x[::2]) == span_of(torch.from_numpy(x)[::2]) == (start, start + 76)
    assert span_of(x[::-1]) == (start, start + 80)
    assert span_of(x, 8) == (start, start + 8)
    for nothing in (None, x[:0], [1, 2], 3, b"", "text", torch.zeros(3).to_sparse()):
        first, stop = span_of(nothing)
        assert first == stop
    data = bytes(9)
    first, stop = span_of(data)
    assert stop - first == 9
    assert span_of(memoryview(data)) == (first, stop)
    jax = pytest.importorskip("jax")
    y = jax.numpy.asarray(x)
    first, stop = span_of(y)
    assert stop - first == 80
    assert span_of(np.asarray(y)) == (first, stop)


@pytest.mark.parametrize("more", [0, 10])
def test_pairs_that_overlap(more: int) -> None:
    """Few are compared in pairs, many in order."""
    far = [(1000 + i, 1001 + i) for i in range(more)]
    check_apart({"a[{}]": [(0, 4), (4, 8)]}, {"b": [(8, 9)], "c[{}]": [(2, 2), (8, 9), *far]})
    for written, read, text in (
        ([(0, 4), (3, 8)], [(8, 9)], r"a\[1\] overlaps a\[0\]"),
        ([(3, 8), (0, 4)], [(8, 9)], r"a\[1\] overlaps a\[0\]"),
        ([(0, 4), (5, 8)], [(9, 10), (3, 4)], r"a\[0\] overlaps b\[1\]"),
        ([(20, 30)], [(0, 100)], r"a\[0\] overlaps b\[0\]"),
        ([(0, 100)], [(20, 30), (30, 40)], r"a\[0\] overlaps b\[[01]\]"),
    ):
        with pytest.raises(ValueError, match=text):
            check_apart({"a[{}]": written}, {"b[{}]": [*read, *far]})


@pytest.mark.parametrize("name", ["zipccl", "raw"])
def test_batches_are_checked_before_they_are_encoded(name: str, backend: str) -> None:
    codec = tw.codec(name)
    xs = [values(3000, i) for i in range(3)]
    memories = [memory_for(codec, x) for x in xs]
    refused(r"out\[.\] overlaps out\[.\]", codec.encode_many, xs, out=[memories[0]] * 3)
    inside = memories[2][: xs[0].nbytes].view(torch.float32)
    before = inside.clone()
    call = partial(codec.encode_many, [*xs[:2], inside], backend=backend)
    outs = [memories[2], memories[0], memories[1]]
    refused(r"out\[0\] overlaps tensors\[2\]", call, out=outs)
    refused(r"out\[2\] overlaps tensors\[2\]", call, out=memories)
    refused(r"scratch overlaps tensors\[2\]", call, scratch=memories[2])
    bad: Any
    for bad, text, error in (
        (torch.zeros(5, dtype=torch.uint8), "out has 5 bytes; the plan needs", ValueError),
        ("text", "Expected an array", TypeError),
    ):
        refused(rf"out\[2\]: {text}", call, out=[*memories[:2], bad], error=error)
    assert torch.equal(inside, before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_batches_that_take_single_calls_are_checked_first(
    dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where tensors lie on a GPU that has no kernel for them."""
    monkeypatch.setattr(many, "device_for", lambda *args: gpu)
    monkeypatch.setattr(many, "device_many", lambda: "triton")
    codec = tw.codec("zipccl")
    xs = [values(3000, i, dtype) for i in range(3)]
    memories = [memory_for(codec, x) for x in xs]
    refused("overlaps out", codec.encode_many, xs, out=[memories[0]] * 3)
    inside = memories[2][: xs[2].nbytes].view(dtype)
    inside.copy_(xs[2])
    outs = [memories[2], memories[0], memories[1]]
    refused(r"out\[0\] overlaps tensors\[2\]", codec.encode_many, [*xs[:2], inside], out=outs)
    assert torch.equal(inside, xs[2])
    small = [memories[0].fill_(7), memories[1], torch.zeros(5, dtype=torch.uint8)]
    refused(r"out\[2\]: out has 5 bytes", codec.encode_many, xs, out=small)
    assert bool((memories[0] == 7).all()), "nothing was encoded"
    found = codec.encode_many(xs, out=[*memories[:2], None])
    assert [bytes(b) for b in found] == [bytes(codec.encode(x, backend="ref")) for x in xs]


@pytest.mark.parametrize(
    ("name", "params"),
    [("nvfp4", {}), ("thc", {"norm": "tensor"}), ("mx", {"scale_rule": "agreed"}), ("lhc", {})],
)
def test_statistics_of_other_tensors_are_not_overwritten(
    name: str, params: dict[str, Any], backend: str
) -> None:
    codec, xs = tw.codec(name, **params), [values(3000), values(3000, 1) * 100]
    key = tw.Key(3) if name == "thc" else None
    stats = [torch.as_tensor(codec.measure(x)) for x in xs]
    out = [memory_for(codec, x) for x in xs]
    view = out[0][256:][: stats[1].nbytes].view(stats[1].dtype).reshape(stats[1].shape)
    view.copy_(stats[1])
    given: dict[str, Any] = {"stats": [stats[0], view], "key": key, "backend": backend}
    refused(r"out\[0\] overlaps stats\[1\]", codec.encode_many, xs, out=out, **given)
    if backend != "ref":
        plans, encode = [codec.plan(x.shape, x.dtype) for x in xs], prepared.prepare_encode_many
        refused(r"outs\[0\] overlaps stats\[1\]", encode, plans, xs, out, **given)
    assert torch.equal(view, stats[1])


def test_statistics_that_do_not_fit_are_named(backend: str) -> None:
    codec, xs = tw.codec("nvfp4"), [values(3000), values(3000, 1)]
    stats = [torch.as_tensor(codec.measure(xs[0])), torch.zeros(3)]
    refused(r"stats\[1\]: ", codec.encode_many, xs, stats=stats, backend=backend)


@pytest.mark.parametrize("name", ["zipccl", "mx"])
def test_sources_of_every_kind_are_checked(name: str, backend: str) -> None:
    codec = tw.codec(name)
    b, other = (codec.encode(values(n), backend=backend) for n in (3000, 500))
    y = torch.full((3000,), 7.0)
    for sources in ([b, b], [bytes(b), bytes(b)], [b, bytes(b)], [as_uint8(b), b]):
        call = partial(tw.decode_many, sources, backend=backend)
        refused(r"out\[1\] overlaps out\[0\]", call, out=[y, y])
        refused(r"out\[1\] is float32\[2999\]", call, out=[y, torch.empty(2999)])
        apart, scratch = [y, torch.empty(3000)], y.view(torch.uint8)
        refused(r"scratch overlaps out\[0\]", call, out=apart, scratch=scratch)
        assert bool((y == 7).all()), "nothing was decoded"
    u = as_uint8(b)
    u = torch.cat([u, torch.zeros(len(u) % 4, dtype=torch.uint8)])[: len(u)]
    before, over = u.clone(), u[:2000].view(torch.float32)
    call = partial(tw.decode_many, [other, u], backend=backend)
    refused(r"out\[0\] overlaps buffers\[1\]", call, out=[over, None])
    assert torch.equal(u, before)


def test_bytes_decode_to_the_host() -> None:
    """What Triton cannot write is said with its number."""
    pytest.importorskip("triton")
    b = tw.encode(values(300), "mx")
    text = r"the result of buffers\[1\] is a numpy array on the host"
    refused(text, tw.decode_many, [as_uint8(b), bytes(b)], backend="triton")


def test_numbers_where_some_buffers_are_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled for the GPU here")
    xs = [values(n) for n in (300, 400, 500)]
    sources: list[Any] = tw.codec("raw").encode_many(xs, backend="triton")
    sources[0] = bytes(sources[0])
    monkeypatch.setattr(many, "_on_device", lambda *args: [1, 2])
    outs = [torch.zeros_like(x) for x in xs]
    for out in (None, outs, [None, outs[1], None]):
        for x, y in zip(xs, tw.decode_many(sources, out=out), strict=True):
            assert torch.equal(x, torch.as_tensor(y))
    refused(r"out\[2\] is float32\[499\]", tw.decode_many, sources, out=[*outs[:2], outs[2][1:]])
    refused(
        r"out\[2\] overlaps out\[1\]", tw.decode_many, sources, out=[None, outs[2][:400], outs[2]]
    )
    data = as_uint8(sources[2])
    data[-200] ^= 1
    with pytest.raises(tw.FormatError, match="buffer 2: ") as caught:
        tw.decode_many([*sources[:2], data])
    assert caught.value.number == 2


@pytest.mark.parametrize("kind", ["Buffer", "bytes", "uint8"])
def test_a_buffer_that_needs_a_base_is_named(kind: str, backend: str) -> None:
    base, x = values(3000, dtype=torch.bfloat16), values(3000, dtype=torch.bfloat16)
    x[3] += 1
    mx = tw.codec("mx").encode_many([values(3000, i) for i in range(2)], backend=backend)
    delta: Any = tw.codec("delta").encode(x, base=base, backend=backend)
    delta = {"Buffer": lambda b: b, "bytes": bytes, "uint8": as_uint8}[kind](delta)
    outs = [torch.full((3000,), 9.0), x.clone().fill_(9), torch.full((3000,), 9.0)]
    sources = [mx[0], delta, mx[1]]
    with pytest.raises(tw.FormatError, match="delta needs a base, which batches") as caught:
        tw.decode_many(sources, out=outs, backend=backend)
    assert (caught.value.reason, caught.value.number) == ("base_mismatch", 1)
    assert bool((outs[1] == 9).all())
    for i in (0, 2):
        assert torch.equal(outs[i], torch.as_tensor(tw.decode(sources[i], backend=backend)))
    for call in (
        lambda: tw.codec("delta").encode_many([x, x], backend=backend),
        lambda: tw.decode_sum([delta, delta], backend=backend),
        lambda: tw.decode_sum([delta, x], backend=backend),
        lambda: tw.codec("raw").encode_sum([delta, x], backend=backend),
    ):
        with pytest.raises(ValueError, match=r"delta needs a base, which .* do not") as said:
            call()
        assert not hasattr(said.value, "__notes__")
    if backend != "ref":
        plan = tw.codec("delta").plan(x.shape, x.dtype)
        data = memory_for(tw.codec("delta"), x)
        encode, decode = prepared.prepare_encode, prepared.prepare_decode
        refused("which prepared calls", encode, plan, x, data, backend=backend)
        refused("which prepared calls", decode, plan, data, x, backend=backend)


def test_memory_of_the_caller_is_checked_where_elements_are_not_side_by_side(backend: str) -> None:
    codec = tw.codec("raw")
    big = values(6000)
    before, x = big.clone(), big[::2]
    b = codec.encode(values(3000, 1), backend=backend)
    needed = codec.plan(x.shape, x.dtype).nbytes
    memory = big.view(torch.uint8)[:needed]
    options: dict[str, Any] = {"backend": backend}
    refused("overlaps terms", tw.decode_sum, [b, x], out=big[:3000], **options)
    refused("out overlaps the array", codec.encode_sum, [b, x], out=memory, **options)
    refused("out overlaps the array", codec.decode_add_encode, b, x, out=memory, **options)
    refused("out overlaps the array", codec.encode, x, out=memory, **options)
    refused("overlaps tensors", codec.encode_many, [x], out=[memory], **options)
    lhc, zero = tw.codec("lhc"), torch.zeros(3000)
    size = lhc.plan(zero.shape, zero.dtype).nbytes
    whole = torch.zeros(size + 800, dtype=torch.uint8)
    stats = whole[size - 16 :][:750:2]
    refused("overlaps stats", lhc.encode, zero, stats=stats, out=whole[:size], **options)
    base = values(6000, 2)[::2]
    delta = tw.codec("delta").encode(base + 0, base=base, **options)
    over = torch.as_strided(base, (3000,), (1,), base.storage_offset())
    refused("out overlaps base", tw.decode, delta, base=base, out=over, **options)
    assert torch.equal(big, before)


def test_sources_that_are_not_side_by_side() -> None:
    b = tw.encode(np.linspace(-1, 1, 3000, dtype=np.float32), "raw")
    data = np.zeros(2 * b.nbytes, np.uint8)
    source = data[::2]
    source[:] = np.frombuffer(bytes(b), np.uint8)
    before, out = data.copy(), data[:12000].view(np.float32)
    refused("out overlaps the buffer", tw.decode, source, out=out)
    refused("acc overlaps the buffer", tw.codec("raw").decode_add, source, out)
    refused(r"out\[0\] overlaps buffers\[0\]", tw.decode_many, [source], out=[out])
    refused(r"out overlaps terms\[0\]", tw.decode_sum, [source], out=out)
    assert np.array_equal(data, before)


def test_terms_are_named(backend: str) -> None:
    b = tw.encode(values(3000), "zipccl", backend=backend)
    other = tw.encode(values(2999), "zipccl", backend=backend)
    bad: Any
    what = "Expected bytes, a Buffer or a uint8 array"
    like = r"is Zipccl\(window='tile'\) of float32\[2999\] in 1 chunks; needed: .*, as terms\[0\]"
    for bad, text, error in (
        (None, f": {what}", TypeError),
        (3, f": {what}", TypeError),
        (other, f" {like}", ValueError),
    ):
        for call in (tw.decode_sum, tw.codec("raw").encode_sum):
            refused(rf"terms\[1\]{text}", call, [b, bad], backend=backend, error=error)
    y = values(3000)
    given: dict[str, Any] = {"scratch": y.view(torch.uint8), "backend": backend}
    refused("scratch overlaps", tw.decode_sum, [b, y], **given)
    refused("scratch overlaps", tw.decode_sum, [b], out=y, **given)


def test_prepared_calls_name_what_does_not_fit(backend: str) -> None:
    if backend == "ref":
        return
    codec, xs = tw.codec("raw"), [values(3000, i) for i in range(2)]
    plans = [codec.plan(x.shape, x.dtype) for x in xs]
    outs = [memory_for(codec, x) for x in xs]
    options: dict[str, Any] = {"backend": backend}
    encode, encode_sum = prepared.prepare_encode_many, prepared.prepare_encode_sum
    refused(r"outs\[1\]", encode, plans, xs, [outs[0], outs[1][:-1]], **options)
    refused("overlaps", encode, plans, xs, [outs[0], outs[0]], **options)
    terms = Terms([outs[0]], xs[0])
    refused(r"out overlaps buffers\[0\]", encode_sum, plans[0], terms, outs[0], **options)


def test_errors_of_no_tensor_have_no_note() -> None:
    codec, xs = tw.codec("zipccl"), [values(3000, i) for i in range(2)]
    with pytest.raises(ValueError, match="backend is 'foo'") as caught:
        codec.encode_many(xs, backend="foo")
    assert not hasattr(caught.value, "__notes__")
