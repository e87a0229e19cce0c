"""Many tensors in device memory in a call: a GPU's, or without one under the Triton interpreter."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

import tightwire as tw  # noqa: E402
from tightwire import gpu, gpu_many, many  # noqa: E402
from tightwire.codecs.common import batch_triton, frame_triton  # noqa: E402
from tightwire.codecs.common.driver_triton import Driver  # noqa: E402
from tightwire.codecs.common.frame_triton import ROW_ALIGNED  # noqa: E402
from tightwire.codecs.common.launch_triton import Variant, is_recording  # noqa: E402
from tightwire.codecs.common.sums import sum_of  # noqa: E402
from tightwire.formats.dtypes import BY_NAME  # noqa: E402

#: Tensors of a batch, and whether each is a view that starts at no multiple of 16 bytes.
SIZES = ((9001, False), (0, False), (40, True), (8192, False), (8200, True), (1, False))
#: Parameters with kernels for many tensors, and codecs that take a call for each.
BATCHED: list[tuple[str, dict[str, Any]]] = [
    ("mx", {"element": "e4m3"}),
    ("nvfp4", {}),
    ("mx", {"element": "e2m1", "scale_rule": "agreed"}),
    ("sdp4bit", {}),
    ("sdp4bit", {"rounding": "stochastic"}),
    ("raw", {}),
    ("huffman", {}),
    ("tahquant", {"hidden": 100}),
    ("dynamiq", {}),
    ("thc", {}),
    ("omnireduce", {"block": 64}),
    ("lhc", {}),
    ("thc", {"norm": "tensor"}),
    ("dynamiq", {"widths": "fixed", "rounding": "nearest"}),
    ("tahquant", {"hidden": 64, "direction": "backward"}),
]
ALONE: list[tuple[str, dict[str, Any]]] = [("zipccl", {})]
#: Codecs that draw by a key.
KEYED = ("thc", "dynamiq")
#: Parameters of codecs whose batches are made of single calls, all or in part, and how many
#: launches those of tensors that start at multiples of 16 bytes take each way.
MERGED: list[tuple[str, dict[str, Any], tuple[int, int]]] = [
    ("huffman", {}, (6, 3)),
    ("tahquant", {"hidden": 100}, (4, 3)),
    ("dynamiq", {}, (11, 5)),
    ("thc", {}, (3, 2)),
    ("thc", {"norm": "tensor"}, (4, 2)),
    ("omnireduce", {}, (9, 5)),
    ("lhc", {}, (6, 8)),
    ("tahquant", {"hidden": 100, "direction": "backward"}, (2, 2)),
]


#: Codecs that take long where kernels are interpreted, and how many times fewer elements they get.
SLOW = {"huffman": 16, "tahquant": 4, "thc": 4}


def lengths(name: str, place: str, *nelems: int) -> list[int]:
    """Numbers of elements, fewer of codecs that take long."""
    return [max(n // SLOW.get(name, 1), min(n, 1)) if place == "cpu" else n for n in nelems]


def values(n: int, place: str, seed: int = 0, dtype: str = "bfloat16", apart: bool = False) -> Any:
    x = np.random.default_rng(seed).standard_normal(n + 1).astype(np.float32) * 3
    tensor = torch.from_numpy(x).to(getattr(torch, dtype)).to(place)
    return tensor[1:] if apart else tensor[:-1]


def tensors(name: str, place: str, dtype: str = "bfloat16") -> list[Any]:
    nelems = lengths(name, place, *(n for n, _ in SIZES))
    rows = zip(nelems, SIZES, strict=True)
    found = [values(n, place, i, dtype, apart) for i, (n, (_, apart)) in enumerate(rows)]
    # Of no dimension, and one whose elements are not side by side.
    x = found[0]
    return [*found, x[3], x[: len(x) // 90 * 90].view(-1, 90).T]


def encode_many(codec: tw.Codec, xs: list[Any], **options: Any) -> Any:
    chosen: dict[str, Any] = {"out": None, "stats": None, "key": None, "scratch": None}
    chosen |= {"checksum": True, "required": True} | options
    return gpu_many.encode_many(codec.spec, xs, many._described(xs), **chosen)


def decode_many(buffers: list[Any], **options: Any) -> Any:
    chosen: dict[str, Any] = {"scratch": None, "max_nbytes": None, "threads": None}
    out = options.pop("out", None)
    results = [None] * len(buffers) if out is None else list(out)
    chosen |= {"required": True} | options
    failed = gpu_many.decode_many(buffers, range(len(buffers)), out, results, **chosen)
    if failed:
        raise failed[min(failed)].of_buffer(min(failed))
    return results


def decode_sum(terms: list[Any], **options: Any) -> Any:
    chosen: dict[str, Any] = {"scale": None, "dtype": None, "out": None, "scratch": None}
    return gpu_many.decode_sum(terms, **(chosen | {"required": True} | options))


def encode_sum(codec: tw.Codec, terms: list[Any], **options: Any) -> Any:
    chosen: dict[str, Any] = {"scale": None, "stats": None, "key": None, "out": None}
    chosen |= {"scratch": None, "checksum": True, "required": True} | options
    return gpu_many.encode_sum(codec.spec, terms, **chosen)


def same(a: Any, b: Any) -> bool:
    alike = a.dtype == b.dtype and a.shape == b.shape
    a, b = a.detach().cpu().contiguous(), b.detach().cpu().contiguous()
    a, b = a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)
    return alike and bool(a.equal(b))


def test_dynamiq_loads_tensors_as_they_are_aligned(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernels load elements by themselves, by 16 bytes where they are told so."""
    told: list[tuple[bool, set[bool]]] = []
    launch = Driver._encode_rows

    def noted(self: Any, batch: Any, form: Any, *arguments: Any) -> None:
        rows = batch.layout.rows_in(batch.words)
        told.append((form.aligned, {bool(flag) for flag in rows["flags"] & ROW_ALIGNED}))
        launch(self, batch, form, *arguments)

    monkeypatch.setattr(Driver, "_encode_rows", noted)
    codec = tw.codec("dynamiq")
    xs = [values(n, place, seed=n, apart=n % 2 == 1) for n in (5000, 701, 4096, 1300, 999)]
    key = tw.Key(3, step=1)
    expected = [bytes(codec.encode(x.cpu(), backend="ref", key=key)) for x in xs]
    assert [bytes(buf) for buf in encode_many(codec, xs, key=key)] == expected
    assert told == [(True, {True})] * 2 + [(False, {False})] * 2


@pytest.mark.parametrize("checksum", [True, False])
@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize(("name", "params"), [*BATCHED, *ALONE])
@pytest.mark.fast_cases(5)
@pytest.mark.slow_cases(36)
def test_a_batch_has_the_bytes_of_single_calls(
    name: str, params: dict[str, Any], given: bool, checksum: bool, place: str
) -> None:
    """In memory of the caller, which is not zero, or in one allocation; and decoded again."""
    codec = tw.codec(name, **params)
    xs = tensors(name, place)
    options: dict[str, Any] = {"checksum": checksum}
    if name in KEYED or "rounding" in params:
        options["key"] = tw.Key(3, step=1)
    expected = [codec.encode(x.cpu(), backend="ref", **options) for x in xs]
    out = None
    if given:
        sizes = [buf.plan.nbytes + 16 for buf in expected]
        out = [torch.full((n,), 0xA5, dtype=torch.uint8, device=place) for n in sizes]
    buffers = encode_many(codec, xs, out=out, **options)
    assert [bytes(buf) for buf in buffers] == [bytes(buf) for buf in expected]
    if out is not None:
        assert all((o[-16:] == 0xA5).all() for o in out)
    else:
        starts = [buf.array.data_ptr() for buf in buffers]
        assert {(start - starts[0]) % 128 for start in starts} == {0}
    outs = [torch.full(x.shape, 7, dtype=x.dtype, device=place) for x in xs]
    decoded = decode_many(buffers, out=outs)
    for buf, x, y, ref in zip(buffers, xs, decoded, expected, strict=True):
        buf.check()
        assert y.device == x.device
        assert same(y, tw.decode(ref, backend="ref").reshape(x.shape))


@pytest.mark.slow
def test_memory_that_was_checked_before(place: str) -> None:
    """Those that are too small for the codec are raw, and a batch of their own."""
    codec = tw.codec("mx")
    xs = [values(n, place, n) for n in (9000, 10, 4096, 1)]
    expected = [codec.encode(x.cpu(), backend="ref") for x in xs]
    plans = [buffer.plan for buffer in expected]
    memory = [torch.full((plan.nbytes,), 0xA5, dtype=torch.uint8, device=place) for plan in plans]
    assert gpu_many.encode_into(plans, xs, memory, None)
    buffers = [gpu.wrap(plan, data) for plan, data in zip(plans, memory, strict=True)]
    assert list(map(bytes, buffers)) == list(map(bytes, expected))
    outs = [torch.full_like(x, torch.nan) for x in xs]
    assert gpu_many.decode_into(buffers, outs)
    for buffer, out, wanted in zip(buffers, outs, expected, strict=True):
        buffer.check()
        assert same(out, tw.decode(wanted))
    # A dtype that the host codes.
    wide = tw.codec("zipccl").plan((5000,), "float64")
    x = torch.zeros(5000, dtype=torch.float64, device=place)
    data = torch.zeros(wide.nbytes, dtype=torch.uint8, device=place)
    assert not gpu_many.encode_into([wide], [x], [data], None)
    assert not data.any()


@pytest.mark.parametrize("name", ["mx", "nvfp4"])
def test_statistics_of_each_tensor(name: str, place: str) -> None:
    codec = tw.codec(name, **({"scale_rule": "agreed"} if name == "mx" else {}))
    xs = [values(n, place, n) for n in (600, 96, 4500)]
    # Those of larger tensors, as ranks agree on.
    stats = [codec.measure(x * 2, backend="triton") for x in xs]
    buffers = encode_many(codec, xs, stats=stats)
    for x, s, buf in zip(xs, stats, buffers, strict=True):
        assert bytes(buf) == bytes(codec.encode(x.cpu(), stats=s.cpu().numpy(), backend="ref"))


def test_buffers_of_any_codecs_are_decoded_where_they_are_wanted(place: str) -> None:
    x, wide = values(5000, place), values(700, place, 1, "float32").view(7, 100)
    sources = [
        tw.encode(x, "mx", backend="triton"),
        tw.encode(x, "zipccl", backend="triton"),
        tw.encode(wide, "nvfp4", backend="triton"),
        tw.codec("mx").encode(x, chunks=3, checksum=False, backend="triton"),
        tw.encode(wide, "mx", backend="triton"),
        tw.encode(x[:100], "mx", backend="triton"),
        tw.encode(wide, "nvfp4", backend="triton"),
    ]
    packed = torch.from_numpy(np.frombuffer(bytes(sources[0]), np.uint8).copy()).to(place)
    sources.append(packed)
    expected = [tw.decode(bytes(source), like="torch") for source in sources[:-1]]
    expected.append(expected[0])
    out: list[Any] = [None] * len(sources)
    for i in (0, 1, 2, 7):
        out[i] = torch.full_like(expected[i], 7).to(place)
    out[5] = torch.full((101,), 7, dtype=x.dtype, device=place)[1:]
    found = decode_many(sources, out=out)
    for i, (result, wanted) in enumerate(zip(found, expected, strict=True)):
        assert same(result, wanted), i
        if out[i] is not None:
            assert result is out[i]


def test_one_damaged_buffer_of_a_batch(place: str) -> None:
    codec = tw.codec("mx")
    xs = [values(n, place, n) for n in (5000, 700, 9000, 64)]
    buffers = encode_many(codec, xs)
    expected = [tw.decode(buf) for buf in buffers]
    start = buffers[2].plan.static_offset
    for at, reason in ((3, "bad_header"), (start + 50, "checksum_mismatch")):
        buffers[2].array[at] ^= 1
        found = decode_many(buffers)
        for i, buf in enumerate(buffers):
            if i != 2:
                assert same(found[i], expected[i])
                buf.check()
        with pytest.raises(tw.FormatError) as caught:
            buffers[2].check()
        assert caught.value.reason == reason
        buffers[2].array[at] ^= 1
    packed = [torch.from_numpy(np.frombuffer(bytes(b), np.uint8).copy()).to(place) for b in buffers]
    packed[1][0] ^= 1
    packed[2][-1] ^= 1
    out = [torch.zeros_like(x) for x in xs]
    with pytest.raises(tw.FormatError) as caught:
        decode_many([buffers[0], *packed[1:]], out=out)
    assert (caught.value.reason, caught.value.number) == ("bad_magic", 1)
    assert caught.value.detail.startswith("buffer 1: ")
    assert same(out[0], expected[0])
    assert same(out[3], expected[3])
    with pytest.raises(tw.FormatError, match="limit_exceeded") as caught:
        decode_many(buffers, out=out, max_nbytes=12000)
    assert caught.value.number == 2


@pytest.mark.parametrize(("name", "params", "_"), MERGED)
@pytest.mark.fast_cases(1)
def test_a_damaged_buffer_among_others(
    name: str, params: dict[str, Any], _: Any, place: str
) -> None:
    """It is named, and the others are decoded: of one size, and of several."""
    codec, key = tw.codec(name, **params), tw.Key(5)
    sizes = lengths(name, place, 5000, 9001, 5000, 4000, 5000)
    xs = [values(n, place, i) for i, n in enumerate(sizes)]
    for checksum in (True, False):
        buffers = encode_many(codec, xs, key=key, checksum=checksum)
        expected = [tw.decode(buf) for buf in buffers]
        head = buffers[2].plan.header.nbytes
        # A flag that there is not; and where there is one, the checksum.
        for at in (head + 16, head)[: 1 + checksum]:
            buffers[2].array[at] ^= 64
            outs = [torch.full_like(x, torch.nan) for x in xs]
            decode_many(buffers, out=outs)
            for i, buf in enumerate(buffers):
                if i != 2:
                    buf.check()
                    assert same(outs[i], expected[i])
            with pytest.raises(tw.FormatError):
                buffers[2].check()
            buffers[2].array[at] ^= 64


@pytest.mark.parametrize(("name", "most"), [("huffman", 4), ("omnireduce", 6), ("lhc", 8)])
@pytest.mark.fast_cases(1)
def test_a_sum_is_as_many_launches_whatever_its_terms(
    name: str, most: int, place: str, launched: list[str]
) -> None:
    """Of buffers one of which is damaged, and told so."""
    codec = tw.codec(name)
    (nelem,) = lengths(name, place, 5000)
    for n in (2, 5):
        xs = [values(nelem, place, i) for i in range(n)]
        buffers = encode_many(codec, xs)
        expected = decode_sum(buffers)
        buffers[1].array[buffers[1].plan.header.nbytes + 16] ^= 64
        launched.clear()
        decode_sum([*buffers[:2], xs[0], *buffers[2:]], scale=0.5)
        made = [kernel for kernel in launched if kernel != "_table_kernel"]
        assert made == ["merged_kernel"] * (most - 1) + ["gathered_sum_kernel"]
        for buffer in [buffers[0], *buffers[2:]]:
            buffer.check()
        with pytest.raises(tw.FormatError, match="bad_record"):
            buffers[1].check()
        buffers[1].array[buffers[1].plan.header.nbytes + 16] ^= 64
        assert same(decode_sum(buffers), expected)


def test_memory_that_overlaps_is_refused(place: str) -> None:
    codec = tw.codec("mx")
    xs = [values(4096, place, i) for i in range(2)]
    plan = codec.plan((4096,), "bfloat16")
    memory = torch.zeros(2 * plan.nbytes, dtype=torch.uint8, device=place)
    inside = memory[plan.nbytes - 128 :]
    with pytest.raises(ValueError, match=r"out\[1\] overlaps out\[0\]"):
        encode_many(codec, xs, out=[memory, inside])
    with pytest.raises(ValueError, match="overlaps"):
        encode_many(codec, [xs[0], memory[:8192].view(torch.bfloat16)], out=[inside, None])
    with pytest.raises(ValueError, match="overlaps"):
        encode_many(codec, xs, scratch=memory, out=[inside, None])
    buffers = encode_many(codec, xs)
    shared = torch.zeros(4097, dtype=torch.bfloat16, device=place)
    with pytest.raises(ValueError, match="overlaps"):
        decode_many(buffers, out=[shared[:-1], shared[1:]])
    own = buffers[0].array
    room = own[: own.numel() // 2 * 2].view(torch.bfloat16)
    small = encode_many(codec, [x[:1000] for x in xs])
    with pytest.raises(ValueError, match="overlaps"):
        decode_many([*small, buffers[0]], out=[room[:1000], None, None])


@pytest.fixture
def launched() -> Iterator[list[str]]:
    """Names of the kernels that are launched while the test runs."""
    names: list[str] = []
    launch = Variant.launch

    def noted(self: Any, programs: int, *args: Any, **options: Any) -> None:
        if not is_recording():
            names.append(self.kernel.fn.__name__ if hasattr(self.kernel, "fn") else "?")
        launch(self, programs, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Variant, "launch", noted)
        yield names


def test_a_batch_takes_few_launches(place: str, launched: list[str]) -> None:
    xs = [values(n, place) for n in (2000, 3000, 700, 9000, 2000)]
    buffers = encode_many(tw.codec("mx"), xs)
    assert launched == ["_begin_kernel", "encode_rows_kernel"]
    launched.clear()
    decode_many(buffers)
    assert launched == ["decode_rows_kernel", "_check_kernel"]
    launched.clear()
    encode_many(tw.codec("nvfp4"), xs)
    assert launched == ["encode_rows_kernel", "_begin_kernel", "encode_rows_kernel"]
    launched.clear()
    decode_sum([buffers[0], buffers[4]])
    assert [name for name in launched if name != "_table_kernel"] == ["sum_kernel", "_check_kernel"]


@pytest.mark.parametrize(("name", "params", "expected"), MERGED)
@pytest.mark.fast_cases(1)
def test_launches_do_not_grow_with_a_batch(
    name: str, params: dict[str, Any], expected: tuple[int, int], place: str, launched: list[str]
) -> None:
    codec = tw.codec(name, **params)
    sizes = lengths(name, place, 5000, 5700, 6400)
    for n in (2, 7):
        xs = [values(sizes[i % 3], place, i) for i in range(n)]
        made = []
        launched.clear()
        buffers = encode_many(codec, xs, key=tw.Key(1))
        made.append([kernel for kernel in launched if kernel != "_table_kernel"])
        launched.clear()
        decode_many(buffers)
        made.append([kernel for kernel in launched if kernel != "_table_kernel"])
        assert tuple(map(len, made)) == expected, made


@pytest.mark.slow
def test_a_batch_of_large_chunks_and_small_ones(
    place: str, launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of lhc take other launches, and some that are the same."""
    peeling = importlib.import_module("tightwire.codecs.lhc_peeling_triton")
    monkeypatch.setattr(peeling, "SMALL_BLOCKS", 20)
    codec = tw.codec("lhc")
    xs = [values(n, place, n) * (torch.arange(n, device=place) % 5 == 0) for n in (9001, 3000)]
    buffers = encode_many(codec, xs)
    assert launched.count("merged_kernel") == 7 + 2 * peeling.ROUNDS
    for buffer, x, found in zip(buffers, xs, decode_many(buffers), strict=True):
        buffer.check()
        expected = codec.encode(x.cpu(), backend="ref")
        assert bytes(buffer) == bytes(expected)
        assert same(found, tw.decode(expected, backend="ref"))


class _Counted(TorchDispatchMode):  # type: ignore[misc,unused-ignore]
    """Counts PyTorch's operations. Slices are left out: one of all of a tensor is none."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is not torch.ops.aten.slice:
            self.operations.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize(
    ("name", "params"),
    [("mx", {}), ("nvfp4", {}), ("zipccl", {}), ("raw", {}), *[one[:2] for one in MERGED]],
)
def test_operations_of_a_batch_do_not_grow_with_it(
    name: str, params: dict[str, Any], given: bool, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each may be a launch or an allocation. Kernels do nothing here."""
    launch = Variant.launch

    def noted(self: Any, *args: Any, **options: Any) -> None:
        if is_recording():
            launch(self, *args, **options)

    monkeypatch.setattr(Variant, "launch", noted)
    codec, counts = tw.codec(name, **params), []
    for n in (3, 50):
        xs = [values(4096 + 16 * (i % 3), place) for i in range(n)]
        outs = [torch.empty_like(x) for x in xs] if given else None
        buffers = encode_many(codec, xs, key=tw.Key(1))
        with _Counted() as encoding:
            encode_many(codec, xs, key=tw.Key(1), out=buffers if given else None)
        with _Counted() as decoding:
            decode_many(buffers, out=outs)
        counts.append((encoding.operations, decoding.operations))
    assert counts[0] == counts[1]


@pytest.mark.parametrize("name", ["mx", "zipccl"])
@pytest.mark.fast_cases(1)
def test_a_batch_again_with_other_memory(name: str, place: str) -> None:
    """What is kept of batches of the same plans are no addresses and no alignment."""
    codec, sizes = tw.codec(name), (4200, 40)
    made = []
    for seed, apart in ((0, False), (5, True)):
        xs = [values(n, place, seed + i, apart=apart) for i, n in enumerate(sizes)]
        expected = [codec.encode(x.cpu(), backend="ref") for x in xs]
        buffers = encode_many(codec, xs)
        outs = [values(n, place, apart=not apart) for n in sizes]
        made.append((xs, expected, buffers))
        decode_many(buffers, out=outs)
        for buffer, out, wanted in zip(buffers, outs, expected, strict=True):
            buffer.check()
            assert bytes(buffer) == bytes(wanted)
            assert same(out, tw.decode(wanted, backend="ref"))
    # Buffers of several batches.
    mixed = [made[k][2][k] for k in range(2)]
    for k, found in enumerate(decode_many(mixed)):
        mixed[k].check()
        assert same(found, tw.decode(made[k][1][k], backend="ref"))


@pytest.mark.parametrize("shape", [(7, 100), (3, 4, 100), (801,)])
@pytest.mark.fast_cases(1)
def test_decoded_tensors_are_no_views(shape: tuple[int, ...], place: str) -> None:
    """Tensors of one shape lie side by side, and are each their own to autograd."""
    codec = tw.codec("mx")
    xs = [values(math.prod(shape), place, i).view(shape) for i in range(3)]
    first, second, _ = found = decode_many(encode_many(codec, xs))
    for x, y in zip(xs, found, strict=True):
        assert same(y, tw.decode(codec.encode(x, backend="triton"), backend="triton"))
        assert not y._is_view()
        assert y.is_contiguous()
        assert (y.data_ptr() - first.data_ptr()) % 128 == 0
    weight = torch.ones(shape, dtype=first.dtype, device=place, requires_grad=True)
    version = second._version
    first.mul_(weight)
    first.sum().backward()
    assert same(weight.grad, tw.decode(codec.encode(xs[0], backend="triton"), backend="triton"))
    assert second._version == version


@pytest.mark.parametrize(
    "spoiled",
    [
        lambda x: x.view(-1, 2).T,
        lambda x: torch.nn.Parameter(x),
        lambda x: x.requires_grad_(),
        lambda x: torch._neg_view(x),
    ],
    ids=["strided", "parameter", "with gradients", "negated"],
)
def test_tensors_that_are_looked_at_one_by_one(spoiled: Callable[[Any], Any], place: str) -> None:
    codec = tw.codec("mx")
    xs = [values(n, place, n, "float32") for n in (4096, 512)]
    xs[1] = spoiled(xs[1])
    expected = [codec.encode(x.detach().cpu().resolve_neg(), backend="ref") for x in xs]
    assert list(map(bytes, encode_many(codec, xs))) == list(map(bytes, expected))


def test_programs_find_their_rows() -> None:
    """The map of a batch, against a plain search."""
    sizes = [8192 * n for n in (1, 1, 70, 1, 33, 31, 1, 1, *[1] * 40, 300)]
    plan_of = {n: tw.codec("mx").plan((n,), "bfloat16") for n in sizes}
    buffers = [torch.zeros(128, dtype=torch.uint8)] * len(sizes)
    plans = [plan_of[n] for n in sizes]
    batch = batch_triton.batch_of(8192, plans, buffers, buffers)
    table, firsts, owners = (
        t[at // 8 :] for t, at in zip(batch.tensors, batch.offsets, strict=True)
    )
    first = table[: 16 * len(sizes)].view(-1, 16)[:, 7].tolist()
    assert batch.programs == sum(sizes) // 8192
    firsts, owners = firsts.view(torch.int32).tolist(), owners.view(torch.int32).tolist()
    assert firsts[: len(sizes)] == first
    for pid in range(batch.programs):
        owner = owners[pid // batch_triton.BLOCK]
        row = owner + sum(f <= pid for f in firsts[owner + 1 : owner + 1 + batch_triton.BLOCK])
        assert first[row] <= pid < [*first, batch.programs][row + 1]


def bits(x: Any) -> Any:
    return x.cpu().contiguous().view(torch.uint8).numpy().view(f"u{x.element_size()}").reshape(-1)


def expected_sum(terms: list[Any], dtype: str, scale: float | None, target: str) -> Any:
    found = sum_of([bits(x) for x in terms], BY_NAME[dtype], scale, BY_NAME[target])
    return torch.from_numpy(found.view(np.uint8)).view(getattr(torch, target))


SUMS: list[tuple[str, dict[str, Any]]] = [
    ("mx", {}),
    ("nvfp4", {}),
    ("zipccl", {}),
    ("raw", {}),
    ("thc", {}),
    ("sdp4bit", {}),
    ("huffman", {}),
    ("omnireduce", {"block": 64, "values": "float16"}),
    ("lhc", {"ratio": 3}),
    ("omnireduce", {}),
]


@pytest.mark.parametrize("local", [None, 0, 1, 3])
@pytest.mark.parametrize(("name", "params"), SUMS)
@pytest.mark.fast_cases(2)
@pytest.mark.slow_cases(24)
def test_sums(name: str, params: dict[str, Any], local: int | None, place: str) -> None:
    codec = tw.codec(name, **params)
    key = tw.Key(5) if name == "thc" else None
    # Of a whole tile and of part of one, but where that takes long.
    n, scale = 600 if (name, place) == ("huffman", "cpu") else 4128, 0.3 if local else None
    buffers = [
        codec.encode(values(n, place, i), key=key, chunks=2, backend="triton") for i in range(3)
    ]
    terms = [tw.decode(buf, backend="triton") for buf in buffers]
    sources: list[Any] = list(buffers)
    if name in ("zipccl", "raw", "huffman"):
        terms[1][7] = float("nan")
        buffers[1] = codec.encode(terms[1], chunks=2, backend="triton")
        sources[1] = torch.from_numpy(np.frombuffer(bytes(buffers[1]), np.uint8).copy()).to(place)
    if local is not None:
        x = values(n, place, 9, "float32" if local == 1 else "bfloat16")
        terms.insert(local, x)
        sources.insert(local, x)
    expected = expected_sum(terms, "bfloat16", scale, "bfloat16")
    found = decode_sum(sources, scale=scale)
    assert same(found, expected)
    out = torch.full((n,), 7, dtype=torch.float32, device=place)
    assert decode_sum(sources, scale=scale, dtype="float32", out=out) is out
    assert same(out, expected_sum(terms, "bfloat16", scale, "float32"))
    total = encode_sum(codec, sources, scale=scale, key=key)
    encoded = codec.encode(expected, key=key, chunks=2, backend="ref")
    assert bytes(total) == bytes(encoded)
    again = encode_sum(codec, [total, buffers[0]], out=total, key=key)
    pair = [tw.decode(encoded), tw.decode(buffers[0]).cpu()]
    expected = expected_sum(pair, "bfloat16", None, "bfloat16")
    assert bytes(again) == bytes(codec.encode(expected, key=key, chunks=2, backend="ref"))


@pytest.mark.slow
def test_sums_that_keep_statistics(place: str) -> None:
    """Those of the first buffer: by kernels, or they are not encoded here."""
    codec = tw.codec("mx", scale_rule="agreed")
    x, y = (values(4100, place, i) for i in range(2))
    buffers = [codec.encode(4 * x, backend="triton"), codec.encode(y, backend="triton")]
    terms = [torch.from_numpy(np.frombuffer(bytes(b), np.uint8).copy()) for b in buffers]
    total = encode_sum(codec, [*buffers, x], scale=0.5)
    for backend in ("ref", "cpu"):
        host = codec.encode_sum([*terms, x.cpu()], scale=0.5, backend=backend)
        assert bytes(total) == bytes(host)
    codec, key = tw.codec("dynamiq"), tw.Key(1)
    buf = codec.encode(x, key=key, backend="triton")
    pair = codec.decode_add_encode(bytes(buf), y.cpu(), key=key, backend="ref")
    assert bytes(encode_sum(codec, [buf, y], key=key)) == bytes(pair)
    more = [buf, y, codec.encode(64 * y, key=key, backend="triton")]
    terms = [bytes(buf), y.cpu(), bytes(more[2])]
    total = encode_sum(codec, more, key=key, scale=0.5)
    assert bytes(total) == bytes(codec.encode_sum(terms, key=key, scale=0.5, backend="cpu"))


def test_statistics_of_some(place: str) -> None:
    codec = tw.codec("nvfp4")
    xs = [values(n, place, n) for n in (700, 4096, 90)]
    stats = [None, codec.measure(4 * xs[1], backend="triton"), None]
    found = encode_many(codec, xs, stats=stats)
    singles = zip(xs, stats, strict=True)
    assert [bytes(b) for b in found] == [
        bytes(codec.encode(x, stats=s, backend="triton")) for x, s in singles
    ]


def test_outputs_of_different_codecs_must_not_overlap(place: str) -> None:
    x = values(4096, place)
    buffers = [tw.codec(name).encode(x, backend="triton") for name in ("mx", "nvfp4", "lhc")]
    memory = torch.full((3 * 4096,), 7, dtype=torch.bfloat16, device=place)
    apart = list(memory.split(4096))
    for bad in (1, 2):
        outs = list(apart)
        outs[bad] = memory[100 : 100 + 4096]
        with pytest.raises(ValueError, match=r"out\[\d\] overlaps out\[\d\]"):
            decode_many(buffers, out=outs)
        outs[bad] = memory[:4095]
        with pytest.raises(ValueError, match=rf"out\[{bad}\]"):
            decode_many(buffers, out=outs)
    assert bool((memory == 7).all()), "nothing was decoded"
    for buf, found in zip(buffers, decode_many(buffers, out=apart), strict=True):
        assert same(found, tw.decode(buf, backend="triton"))


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow encountered")
@pytest.mark.parametrize("dtype", ["float64", "float8_e4m3fn", "float8_e5m2", "float16"])
@pytest.mark.fast_cases(2)
def test_sums_of_other_dtypes(dtype: str, place: str) -> None:
    xs = [values(900, place, i, dtype) for i in range(3)]
    xs[0].view(torch.uint8)[:256] = torch.arange(256, dtype=torch.uint8, device=place)
    buffers = [tw.encode(x, "raw", backend="triton") for x in xs]
    for scale in (None, 1 / 3, 40.0):
        found = decode_sum([*buffers[:2], xs[2]], scale=scale)
        assert same(found, expected_sum(xs, dtype, scale, dtype))
        wide = decode_sum(buffers, scale=scale, dtype="float32")
        assert same(wide, expected_sum(xs, dtype, scale, "float32"))


@pytest.mark.parametrize("dtype", ["bool", "float8_e5m2", "int16", "int64", "complex128"])
def test_raw_batches(dtype: str, place: str) -> None:
    """Elements of all sizes, that start anywhere."""
    codec, kind = tw.codec("raw"), BY_NAME[dtype]
    item = kind.itemsize
    xs = []
    for i, (n, apart) in enumerate(((0, False), (1, False), (2051, True), (2051, False))):
        x = torch.zeros((n + 1) * item, dtype=torch.uint8)
        words = np.random.default_rng(i).integers(0, 2 if dtype == "bool" else 256, x.numel())
        x.copy_(torch.from_numpy(words.astype(np.uint8)))
        xs.append((x[item:] if apart else x[:-item]).view(getattr(torch, dtype)).to(place))
    buffers = encode_many(codec, xs)
    outs = [torch.full_like(x, 1) for x in xs]
    decode_many(buffers, out=outs)
    for buf, x, out in zip(buffers, xs, outs, strict=True):
        assert bytes(buf) == bytes(codec.encode(x.cpu(), backend="ref"))
        assert same(out, x)


def test_a_damaged_term(place: str) -> None:
    codec = tw.codec("mx")
    buffers = [codec.encode(values(5000, place, i), backend="triton") for i in range(3)]
    buffers[1].array[buffers[1].plan.static_offset + 64] ^= 1
    for add in (decode_sum, lambda terms: encode_sum(codec, terms)):
        add(buffers)
        for i in (0, 2):
            buffers[i].check()
        with pytest.raises(tw.FormatError, match="checksum_mismatch"):
            buffers[1].check()
    packed = torch.from_numpy(np.frombuffer(bytes(buffers[2]), np.uint8).copy()).to(place)
    packed[100] ^= 1
    with pytest.raises(tw.FormatError) as caught:
        decode_sum([buffers[0], values(5000, place), packed])
    assert caught.value.number == 2


def test_terms_that_do_not_fit(place: str) -> None:
    x = values(5000, place)
    buf = tw.encode(x, "mx", backend="triton")
    for terms, problem in (
        ([x], "at least one"),
        ([buf, x, x], "at most one"),
        ([buf, tw.encode(x, "nvfp4", backend="triton")], r"as terms\[0\]"),
        ([buf, tw.codec("mx").encode(x, chunks=2, backend="triton")], r"as terms\[0\]"),
        ([buf, x[:10]], "needed"),
        ([buf, x.half()], "needed"),
    ):
        with pytest.raises(ValueError, match=problem):
            decode_sum(terms)
        with pytest.raises(ValueError, match=problem):
            encode_sum(tw.codec("mx"), terms)
    with pytest.raises(ValueError, match="allowed"):
        decode_sum([buf], dtype="float16")
    with pytest.raises(ValueError, match="overlaps"):
        decode_sum([buf, x], out=x)
    with pytest.raises(TypeError, match="float"):
        decode_sum([tw.encode(x.to(torch.int32), "raw", backend="triton")])


def test_a_table_that_is_written_is_the_graphs_too() -> None:
    plan = tw.codec("mx").plan((4096,), "bfloat16")
    frame, here = frame_triton.Frame(plan), torch.device("cpu")
    table = frame.table(here)
    assert table[: frame.words.size].tolist() == frame.words.tolist()
    assert frame._table._for_graph(here) is table
    unwritten = torch.zeros(1, dtype=torch.int64)
    frame._table._tables[here, 0] = frame_triton._Written(table, unwritten)
    own = frame._table._for_graph(here)
    assert own is not table
    assert own[: frame.words.size].equal(table[: frame.words.size])


def captured(call: Callable[[], Any]) -> tuple[Any, Any]:
    """A graph of a call that ran once before, on a stream of its own; and what it returns."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        result = call()
    return graph, result


@pytest.mark.gpu
def test_a_graph_of_one_tensor_has_no_more_launches(launched: list[str]) -> None:
    x = values(9001, "cuda")
    buf = tw.encode(x, "mx")

    def call() -> Any:
        launched.clear()
        return tw.decode(tw.encode(x, "mx", out=buf))

    graph, result = captured(call)
    kernels = ["_begin_kernel", "encode_kernel", "decode_kernel", "_check_kernel"]
    assert launched == kernels
    x.copy_(-x)
    graph.replay()
    buf.check()
    assert same(result, tw.decode(tw.encode(x.cpu(), "mx")))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "params"), [("mx", {}), ("nvfp4", {}), *[m[:2] for m in MERGED if m[0] not in KEYED]]
)
def test_a_graph_of_a_batch(name: str, params: dict[str, Any]) -> None:
    codec = tw.codec(name, **params)
    xs = [values(n, "cuda", n, apart=n == 700) for n in (9001, 700, 65536)]

    def call() -> Any:
        buffers = encode_many(codec, xs)
        return buffers, decode_many(buffers)

    graph, (buffers, results) = captured(call)
    for _ in range(2):
        for x in xs:
            x.copy_(-1.5 * x)
        for result in results:
            result.zero_()
        graph.replay()
        for x, buf, result in zip(xs, buffers, results, strict=True):
            expected = codec.encode(x.cpu())
            assert bytes(buf) == bytes(expected)
            assert same(result, tw.decode(expected))


@pytest.mark.gpu
def test_streams_and_threads_share_plans() -> None:
    """Each stream may be the first that needs a plan's table."""
    import threading

    x = values(40000, "cuda")
    expected = bytes(tw.encode(x.cpu(), "mx"))
    found: list[bytes] = []

    def run() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for n in range(20):
                buf = tw.encode(x[: 40000 - n], "mx")
                tw.decode(buf)
                buf.check()
            found.append(bytes(tw.encode(x, "mx")))

    torch.cuda.synchronize()
    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 4


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "params"),
    [("mx", {}), ("nvfp4", {}), ("sdp4bit", {}), *[one[:2] for one in MERGED]],
)
def test_many_sizes_on_a_gpu(name: str, params: dict[str, Any]) -> None:
    rng = np.random.default_rng(0)
    codec, key = tw.codec(name, **params), tw.Key(2)
    sizes = [int(n) for n in 10 ** rng.uniform(0, 6.5, 100)]
    xs = [values(n, "cuda", n, apart=n % 3 == 0) for n in [*sizes, *sizes[:50]]]
    buffers = encode_many(codec, xs, key=key)
    for x, buf, y in zip(xs, buffers, decode_many(buffers), strict=True):
        single = codec.encode(x, key=key)
        assert bytes(buf) == bytes(single)
        assert same(y, tw.decode(single))
        buf.check()
