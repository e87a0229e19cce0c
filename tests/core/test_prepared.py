"""Prepared calls do what calls do, with the same bytes, as often as one likes.

On the host, and by the kernels: on a GPU, or without one under the Triton interpreter.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import tightwire as tw  # noqa: E402
from tightwire import prepared  # noqa: E402
from tightwire.prepared import Terms  # noqa: E402

CODECS: list[tuple[str, dict[str, Any]]] = [
    ("mx", {"element": "e4m3"}),
    ("mx", {"element": "e2m1", "scale_rule": "agreed"}),
    ("nvfp4", {}),
    ("zipccl", {}),
    ("raw", {}),
    ("sdp4bit", {"rounding": "stochastic"}),
    ("taco", {}),
    ("dynamiq", {}),
    ("tahquant", {"hidden": 100}),
    ("thc", {}),
    ("lhc", {}),
    ("omnireduce", {}),
    ("huffman", {}),
]
SUMMED = ("mx", "nvfp4", "zipccl", "sdp4bit", "taco", "omnireduce", "lhc", "huffman")
NELEM = 9000
KEY = tw.Key(5, 6)


@pytest.fixture(
    params=["host", "kernels", pytest.param("cuda", marks=pytest.mark.gpu)],
)
def place(request: pytest.FixtureRequest) -> str:
    """Where calls run."""
    if request.param == "kernels" and torch.cuda.is_available():
        pytest.skip("kernels are compiled for the GPU here")
    return str(request.param)


def backend(place: str) -> str | None:
    return None if place == "host" else "triton"


def made(place: str, function: Any, *args: Any, **options: Any) -> prepared.Prepared:
    found: prepared.Prepared = function(*args, **options, backend=backend(place))
    return found


def values(place: str, seed: int, n: int = NELEM, dtype: str = "bfloat16") -> Any:
    x = np.random.default_rng(seed).standard_normal(n).astype(np.float32) * 3
    device = "cuda" if place == "cuda" else "cpu"
    return torch.from_numpy(x).to(getattr(torch, dtype)).reshape(-1, 100).to(device)


def poisoned(place: str, nbytes: int) -> Any:
    device = "cuda" if place == "cuda" else "cpu"
    return torch.full((nbytes,), 0xA5, dtype=torch.uint8, device=device)


def same(a: Any, b: Any) -> bool:
    alike = a.dtype == b.dtype and a.shape == b.shape
    a, b = a.cpu().contiguous(), b.cpu().contiguous()
    return alike and bool(a.reshape(-1).view(torch.uint8).equal(b.reshape(-1).view(torch.uint8)))


def packed(codec: tw.Codec, plan: tw.Plan, data: Any) -> bytes:
    return bytes(tw.Buffer.wrap(plan, data.cpu().numpy()))


def encoded(codec: tw.Codec, x: Any, place: str, **options: Any) -> Any:
    """Buffer of `x`, and its bytes with slots in memory that is as large as the plan says."""
    buf = codec.encode(x, key=KEY, backend=backend(place), **options)
    return buf, torch.as_tensor(np.asarray(buf.array)) if place == "host" else buf.array


@pytest.mark.parametrize(("name", "params"), CODECS, ids=lambda v: str(v) if v else "")
def test_calls_give_the_bytes_of_encode_and_decode(
    name: str, params: dict[str, Any], place: str
) -> None:
    codec = tw.codec(name, **params)
    x = values(place, 0)
    plan = codec.plan(tuple(x.shape), "bfloat16", chunks=2)
    out, y = poisoned(place, plan.nbytes), torch.full_like(x, 7)
    encode = made(place, prepared.prepare_encode, plan, x, out, key=KEY)
    decode = made(place, prepared.prepare_decode, plan, out, y)
    assert bool((out == 0xA5).all()), "nothing is done before the call"
    assert bool((y == 7).all())
    for seed in (1, 2):
        x.copy_(values(place, seed))
        out.fill_(0xA5)
        y.fill_(7)
        encode()
        decode()
        decode.check()
        wanted = codec.encode(x, key=KEY, chunks=2, backend=backend(place))
        assert packed(codec, plan, out) == bytes(wanted)
        assert same(y, tw.decode(wanted, backend=backend(place)))
        assert not decode.statuses.any()


@pytest.mark.parametrize("name", ["mx", "zipccl", "raw"])
def test_a_part_is_decoded(name: str, place: str) -> None:
    codec = tw.codec(name)
    buf, data = encoded(codec, values(place, 0), place)
    y = torch.zeros(5000, dtype=torch.bfloat16, device=data.device)
    call = made(place, prepared.prepare_decode, buf.plan, data, y, start=3000, stop=8000)
    call()
    call.check()
    assert same(y, tw.decode(buf, start=3000, stop=8000, backend=backend(place)))


@pytest.mark.parametrize("name", ["mx", "zipccl"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_elements_are_added(name: str, dtype: str, place: str) -> None:
    codec = tw.codec(name)
    buf, data = encoded(codec, values(place, 0), place)
    acc = values(place, 1, dtype=dtype)
    wanted = acc.clone()
    call = made(place, prepared.prepare_decode, buf.plan, data, acc, add=True)
    for _ in range(2):
        call()
        # On the host: under the interpreter a tensor there is the host's too.
        codec.decode_add(buf if place == "cuda" else bytes(buf), wanted)
    call.check()
    assert same(acc, wanted)


@pytest.mark.parametrize("name", ["mx", "zipccl", "taco", "huffman"])
def test_many_at_once(name: str, place: str) -> None:
    """Without a wait for the device, and in a graph."""
    codec = tw.codec(name)
    xs = [values(place, i, n) for i, n in enumerate((9000, 100, 8200, 100))]
    plans = [codec.plan(tuple(x.shape), "bfloat16") for x in xs]
    outs = [poisoned(place, plan.nbytes) for plan in plans]

    def encode() -> None:
        prepared.encode_planned(plans, xs, outs, backend=backend(place))

    def check() -> None:
        for x, plan, out in zip(xs, plans, outs, strict=True):
            assert packed(codec, plan, out) == bytes(codec.encode(x, backend=backend(place)))

    encode()
    check()
    if place != "cuda":
        return
    try:
        with warnings.catch_warnings():
            # It announces itself as a prototype.
            warnings.simplefilter("ignore", UserWarning)
            torch.cuda.set_sync_debug_mode("error")
        encode()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        encode()
    for i, (x, out) in enumerate(zip(xs, outs, strict=True)):
        x.copy_(values(place, 10 + i, x.numel()))
        out.fill_(0xA5)
    graph.replay()
    check()


@pytest.mark.parametrize("name", ["mx", "nvfp4", "zipccl", "thc"])
def test_many(name: str, place: str) -> None:
    codec = tw.codec(name)
    xs = [values(place, i, n) for i, n in enumerate((9000, 100, 8200, 100))]
    plans = [codec.plan(tuple(x.shape), "bfloat16") for x in xs]
    outs = [poisoned(place, plan.nbytes) for plan in plans]
    ys = [torch.full_like(x, 7) for x in xs]
    encode = made(place, prepared.prepare_encode_many, plans, xs, outs, key=KEY)
    alike = [i for i, plan in enumerate(plans) if plan.codec == plans[0].codec]
    chosen = [[values[i] for i in alike] for values in (plans, outs, ys)]
    decode = made(place, prepared.prepare_decode_many, *chosen)
    for seed in (1, 2):
        for i, (x, out) in enumerate(zip(xs, outs, strict=True)):
            x.copy_(values(place, 10 * seed + i, x.numel()))
            out.fill_(0xA5)
        encode()
        decode()
        decode.check()
        for i, (x, plan, out, y) in enumerate(zip(xs, plans, outs, ys, strict=True)):
            wanted = codec.encode(x, key=KEY, backend=backend(place))
            assert packed(codec, plan, out) == bytes(wanted)
            if i in alike:
                assert same(y, tw.decode(wanted, backend=backend(place)))


@pytest.mark.slow_cases(20)
@pytest.mark.parametrize("name", SUMMED)
@pytest.mark.parametrize("at", [None, 0, 1])
def test_sums(name: str, at: int | None, place: str) -> None:
    codec = tw.codec(name)
    # huffman's decoder is interpreted element by element.
    n = 300 if (name, place) == ("huffman", "kernels") else NELEM
    found = [encoded(codec, values(place, i, n), place) for i in range(3)]
    plan, sources = found[0][0].plan, [data.clone() for _, data in found]
    x = None if at is None else values(place, 9, n)
    terms = Terms(sources, x, at or 0, 0.25)
    total = torch.full_like(values(place, 0, n), 7)
    out = poisoned(place, plan.nbytes)
    add = made(place, prepared.prepare_decode_sum, plan, terms, total)
    like = values(place, 3, n)
    stats = codec.measure(like, backend=backend(place)) if name == "nvfp4" else None
    again = made(place, prepared.prepare_encode_sum, plan, terms, out, stats=stats, key=KEY)
    bufs = [buf for buf, _ in found]
    for _ in range(2):
        add()
        again()
        listed = list(bufs) if x is None else [*bufs[: terms.place], x, *bufs[terms.place :]]
        assert same(total, tw.decode_sum(listed, scale=0.25, backend=backend(place)))
        wanted = codec.encode_sum(listed, scale=0.25, stats=stats, key=KEY, backend=backend(place))
        assert packed(codec, plan, out) == bytes(wanted)
        # The buffers are read anew.
        new = encoded(codec, values(place, 5, n), place)
        sources[1].copy_(new[1])
        bufs[1] = new[0]
    add.check()
    again.check()


def test_sums_of_dynamiq_are_encoded(place: str) -> None:
    """They keep the first buffer's widths."""
    codec = tw.codec("dynamiq")
    buf, data = encoded(codec, values(place, 0), place)
    terms, out = Terms([data, data]), poisoned(place, buf.plan.nbytes)
    call = made(place, prepared.prepare_encode_sum, buf.plan, terms, out, key=KEY)
    call()
    call.check()
    wanted = codec.encode_sum([bytes(buf), bytes(buf)], key=KEY)
    assert packed(codec, buf.plan, out) == bytes(wanted)


@pytest.mark.parametrize("name", ["mx", "zipccl"])
def test_damage_is_kept_until_it_is_asked_for(name: str, place: str) -> None:
    codec = tw.codec(name)
    found = [encoded(codec, values(place, i), place) for i in range(3)]
    plan, sources = found[0][0].plan, [data.clone() for _, data in found]
    ys = [torch.zeros((90, 100), dtype=torch.bfloat16, device=d.device) for d in sources]
    many = made(place, prepared.prepare_decode_many, [plan] * 3, sources, ys)
    one = made(place, prepared.prepare_decode, plan, sources[1], ys[1].clone())
    total = made(place, prepared.prepare_decode_sum, plan, Terms(sources), ys[1].clone())
    good = sources[1].clone()
    sources[1][plan.static_offset + 5] ^= 1
    for call, number in ((many, 1), (one, None), (total, 1)):
        call()
        assert call.statuses.tolist().count(0) == len(call.statuses) - 1
        with pytest.raises(tw.FormatError, match="checksum_mismatch") as caught:
            call.check()
        assert caught.value.number == number
        call.check()
    for i in (0, 2):
        assert same(ys[i], tw.decode(found[i][0], backend=backend(place)))
    sources[1].copy_(good)
    for call in (many, one, total):
        call()
        call.check()
    assert same(ys[1], tw.decode(found[1][0], backend=backend(place)))


def test_a_buffer_of_another_plan_is_damaged(place: str) -> None:
    codec = tw.codec("mx")
    buf, data = encoded(codec, values(place, 0), place)
    plan = codec.plan((9000,), "bfloat16")
    assert plan.nbytes == buf.plan.nbytes
    y = torch.zeros(9000, dtype=torch.bfloat16, device=data.device)
    call = made(place, prepared.prepare_decode, plan, data, y)
    call()
    with pytest.raises(tw.FormatError, match="bad_header"):
        call.check()


def test_a_key_on_the_device_is_read_by_each_call(place: str) -> None:
    codec = tw.codec("sdp4bit", rounding="stochastic")
    x = values(place, 0)
    plan = codec.plan(tuple(x.shape), "bfloat16")
    out, step = poisoned(place, plan.nbytes), torch.zeros(1, dtype=torch.int64, device=x.device)
    call = made(place, prepared.prepare_encode, plan, x, out, key=tw.Key(3, step))
    found = []
    for number in (1, 2):
        step.fill_(number)
        call()
        found.append(packed(codec, plan, out))
        assert found[-1] == bytes(codec.encode(x, key=tw.Key(3, number), backend=backend(place)))
    assert found[0] != found[1]


def test_bad_arguments(place: str) -> None:
    codec = tw.codec("mx")
    x = values(place, 0)
    plan = codec.plan(tuple(x.shape), "bfloat16")
    out = poisoned(place, plan.nbytes)
    encode, decode = prepared.prepare_encode, prepared.prepare_decode
    for message, function, *args in (
        ("needed", encode, plan, x.float(), out),
        ("needed", encode, plan, x[:5], out),
        ("contiguous", encode, plan, x.reshape(100, 90).T, out),
        ("the plan needs", encode, plan, x, out[:-1]),
        ("the plan needs", decode, plan, out[:-1], x),
        ("needed", decode, plan, out, x.float()),
        ("overlaps", encode, codec.plan((20, 100), "bfloat16"), x[:20], x.view(torch.uint8)[:90]),
    ):
        memory = args[-1]
        if message == "overlaps":
            args[-1] = x.reshape(-1).view(torch.uint8)
        with pytest.raises(ValueError, match=message):
            made(place, function, *args)
        del memory
    with pytest.raises(ValueError, match="key"):
        made(
            place,
            encode,
            tw.codec("sdp4bit", rounding="stochastic").plan(tuple(x.shape), "bfloat16"),
            x,
            out,
        )
    with pytest.raises(ValueError, match="whole tensor"):
        made(place, decode, plan, out, x, start=5, add=True)


@pytest.mark.gpu
def test_a_graph_has_prepared_calls() -> None:
    codec = tw.codec("zipccl")
    x = values("cuda", 0)
    plan = codec.plan(tuple(x.shape), "bfloat16")
    out, y = poisoned("cuda", plan.nbytes), torch.zeros_like(x)
    calls = [
        prepared.prepare_encode(plan, x, out),
        prepared.prepare_decode(plan, out, y),
    ]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    for seed in (1, 2):
        x.copy_(values("cuda", seed))
        before = torch.cuda.memory_allocated()
        graph.replay()
        assert torch.cuda.memory_allocated() == before
        calls[1].check()
        assert same(x, y)


def test_a_batch_of_several_dtypes(place: str) -> None:
    """With and without checksums: what a launch takes together is alike."""
    codec = tw.codec("mx")
    kinds = [("bfloat16", True), ("float32", True), ("bfloat16", False), ("float32", True)]
    xs = [values(place, i, 700 * (i + 1), dtype) for i, (dtype, _) in enumerate(kinds)]
    plans = [
        codec.plan(tuple(x.shape), dtype, checksum=checksum)
        for x, (dtype, checksum) in zip(xs, kinds, strict=True)
    ]
    outs = [poisoned(place, plan.nbytes) for plan in plans]
    made(place, prepared.prepare_encode_many, plans, xs, outs)()
    for x, plan, out, (_, checksum) in zip(xs, plans, outs, kinds, strict=True):
        wanted = codec.encode(x, checksum=checksum, backend=backend(place))
        assert packed(codec, plan, out) == bytes(wanted)


def test_calls_that_cannot_be_prepared(place: str) -> None:
    codec = tw.codec("nvfp4")
    x = values(place, 0)
    buf, data = encoded(codec, x, place)
    terms = Terms([data], x)
    out = torch.full_like(x, 7)
    bad: list[tuple[Any, Any]] = [("a", TypeError), (True, TypeError), (10**400, ValueError)]
    for scale, error in bad:
        with pytest.raises(error, match="scale"):
            made(place, prepared.prepare_decode_sum, buf.plan, terms._replace(scale=scale), out)
    memory = poisoned(place, buf.plan.nbytes)
    stats = memory[:8].zero_().view(torch.int64)
    with pytest.raises(ValueError, match="overlap"):
        made(place, prepared.prepare_encode, buf.plan, x, memory, stats=stats)
    if place == "host":
        for options in ({"threads": 0}, {"backend": "nope"}):
            for function, target in (
                (prepared.prepare_decode_sum, out),
                (prepared.prepare_encode_sum, memory),
            ):
                with pytest.raises(ValueError, match=next(iter(options))):
                    function(buf.plan, terms, target, **options)
