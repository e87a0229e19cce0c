"""Buffers in device memory: a GPU's, or without one the host's under the Triton interpreter."""

from __future__ import annotations

import contextlib
import pickle
import subprocess
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import tightwire as tw
from support import make_bits
from tightwire.formats.dtypes import BY_NAME

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

N = 5000


def tensor(place: str, dtype: str = "bfloat16", n: int = N, pattern: str = "normal") -> Any:
    bits = make_bits(pattern, BY_NAME[dtype], n)
    flat = torch.from_numpy(bits.view(np.uint8).copy()).view(getattr(torch, dtype))
    return flat.to(place)


def same(a: Any, b: Any) -> bool:
    return bytes(raw(a)) == bytes(raw(b))


def raw(x: Any) -> Any:
    return x.detach().cpu().resolve_conj().contiguous().reshape(-1).view(torch.uint8).numpy()


def encode(x: Any, codec: Any = "zipccl", **options: Any) -> tw.Buffer:
    return tw.encode(x, codec, backend="triton", **options)


def on_host(x: Any, codec: Any = "zipccl", **options: Any) -> tw.Buffer:
    return tw.encode(x.detach().cpu(), codec, **options)


@pytest.mark.parametrize(
    "dtype", ["bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2", "int32", "bool"]
)
def test_a_tensor_is_encoded_where_it_is(place: str, dtype: str) -> None:
    x = tensor(place, dtype).reshape(50, 100)
    before = raw(x).copy()
    buf = encode(x, chunks=2)
    expected = on_host(x, chunks=2)
    assert buf.array.device == buf.sizes.device == x.device
    assert buf.array.shape == (buf.plan.nbytes,)
    assert buf.sizes.dtype == torch.int64
    assert buf.sizes.tolist() == expected.sizes.tolist()
    assert buf.nbytes == len(buf) == expected.nbytes
    assert not buf.overflowed
    assert bytes(buf) == bytes(buf.packed().cpu().numpy()) == bytes(expected)
    y = tw.decode(buf)
    buf.check()
    assert (y.dtype, y.shape, y.device) == (x.dtype, x.shape, x.device)
    assert same(x, y)
    assert bytes(raw(x)) == bytes(before)


def test_views_of_a_buffer(place: str) -> None:
    x = tensor(place)
    buf = encode(x, chunks=2)
    expected = on_host(x, chunks=2)
    for i in range(2):
        assert same(buf.static(i), torch.from_numpy(np.asarray(expected.static(i))))
        assert same(buf.dynamic(i), torch.from_numpy(np.asarray(expected.dynamic(i))))
        assert buf.static(i).data_ptr() == buf.array[buf.plan.static_range(i)].data_ptr()
    assert torch.from_dlpack(buf).data_ptr() == buf.array.data_ptr()
    assert f"bytes on {x.device}" in repr(buf)
    assert tw.inspect(buf).as_dict() | {"nbytes": 0} == tw.inspect(expected).as_dict() | {
        "nbytes": 0
    }
    tw.verify(buf)
    with pytest.raises(IndexError, match="allowed"):
        buf.static(2)


def test_memory_of_the_caller_is_used(place: str) -> None:
    x = tensor(place)
    codec = tw.codec("zipccl")
    plan = codec.plan(x.shape, x.dtype)
    room = torch.zeros(plan.nbytes + 256, dtype=torch.uint8, device=place)
    scratch = torch.empty(plan.scratch_nbytes + 16, dtype=torch.uint8, device=place)
    buf = encode(x, out=room, scratch=scratch)
    assert buf.array.data_ptr() == room.data_ptr()
    assert not room[plan.nbytes :].any()
    again = encode(-x, out=buf, scratch=scratch)
    assert again is buf
    y = torch.empty_like(x)
    assert tw.decode(buf, out=y, scratch=scratch) is y
    assert same(y, -x)
    other = encode(x[:4500], out=buf)
    assert other.array.data_ptr() == room.data_ptr()
    assert same(tw.decode(other), x[:4500])


def test_memory_that_is_not_fit_is_refused(place: str) -> None:
    x = tensor(place)
    plan = tw.codec("zipccl").plan(x.shape, x.dtype)
    room = torch.zeros(plan.nbytes + 128 + x.nbytes, dtype=torch.uint8, device=place)
    bad: Any
    for bad, problem in (
        (room[:100], "needs"),
        (room[1:], "multiple of 16"),
        (torch.zeros(2 * plan.nbytes, dtype=torch.uint8, device=place)[::2], "contiguous"),
        (room.view(torch.int8), "needed"),
        (np.zeros(plan.nbytes, np.uint8), "reach"),
        (tw.encode(x.cpu(), backend="cpu"), "host memory"),
    ):
        with pytest.raises(ValueError, match=problem):
            encode(x, out=bad)
        if not isinstance(bad, tw.Buffer):
            with pytest.raises(ValueError, match=r"needed|needs|contiguous|multiple|reach"):
                encode(x, scratch=bad[:64])
    inside = room[plan.nbytes - 400 :][: x.nbytes].view(x.dtype)
    inside.copy_(x)
    with pytest.raises(ValueError, match="overlaps"):
        encode(inside, out=room)
    buf = encode(x, out=room)
    with pytest.raises(ValueError, match="overlaps"):
        tw.decode(buf, out=inside)
    lhc, room = tw.codec("lhc"), torch.zeros(1 << 17, dtype=torch.uint8, device=place)
    stats = room[2048:][: -(-N // 8)]
    for given in ({"out": room}, {"scratch": room}):
        with pytest.raises(ValueError, match="overlaps stats"):
            lhc.encode(x, stats=stats, backend="triton", **given)
    for out in (torch.empty(N + 1, dtype=x.dtype, device=place), x.half(), x[None]):
        with pytest.raises(ValueError, match="needed"):
            tw.decode(buf, out=out)
    with pytest.raises(ValueError, match="contiguous"):
        tw.decode(buf, out=torch.empty(2 * N, dtype=x.dtype, device=place)[::2])


@pytest.mark.slow
def test_awkward_tensors(place: str) -> None:
    x = tensor(place, "float32").reshape(50, 100)
    views = [x.T, x[::2, 1::3], x[0].expand(50, 100), torch.nn.Parameter(x), x.reshape(-1)[1:]]
    views += [torch.view_as_complex(x.reshape(50, 50, 2)).conj(), x[:0], x[0, 0]]
    for view in views:
        buf = encode(view)
        assert bytes(buf) == bytes(on_host(view))
        assert same(tw.decode(buf), view)
        buf.check()


@pytest.mark.slow
def test_selections(place: str) -> None:
    x = tensor(place, n=13000)
    buf = encode(x, chunks=2)
    for start, stop in ((0, 6500), (100, 6400), (6000, 7001), (12999, None), (7, 7), (13000, None)):
        for verify in (None, True):
            part = tw.decode(buf, start=start, stop=stop, verify=verify)
            assert same(part, x[start:stop])
    buf.check()
    with pytest.raises(ValueError, match="allowed"):
        tw.decode(buf, start=5, stop=4)


def damaged(x: Any, **options: Any) -> tw.Buffer:
    """A buffer whose second of two chunks has a wrong bit that only its checksum shows."""
    buf = encode(x, chunks=2, **options)
    buf.static(1)[100] ^= 4
    return buf


def test_damage_is_raised_when_the_device_is_read(place: str) -> None:
    x = tensor(place, n=1400)
    buf = damaged(x)
    for look in (
        tw.Buffer.check,
        bytes,
        len,
        tw.Buffer.packed,
        lambda b: b.overflowed,
        lambda b: b.dynamic(0),
        tw.inspect,
    ):
        tw.decode(buf)
        buf.sizes, repr(buf)
        with pytest.raises(tw.FormatError, match="checksum_mismatch"):
            look(buf)
        buf.check()
    with pytest.raises(tw.FormatError, match="checksum_mismatch"):
        tw.decode(buf, verify=True)
    with pytest.raises(tw.FormatError, match="checksum_mismatch"):
        tw.verify(buf)
    tw.decode(buf, verify=False)
    tw.decode(buf, stop=700, verify=True)
    tw.decode(buf, start=701, stop=800)
    buf.check()
    with pytest.raises(tw.FormatError, match="checksum_mismatch"):
        tw.decode(buf, start=701, stop=800, verify=True)
    assert same(tw.decode(encode(x, chunks=2, out=buf), verify=True), x)


def test_a_buffer_keeps_what_decoding_found_while_its_memory_is_reused(place: str) -> None:
    x = tensor(place, n=1400)
    buf = damaged(x)
    tw.decode(buf)
    again = encode(x[:900], out=buf)
    with pytest.raises(tw.FormatError, match="checksum_mismatch"):
        again.check()
    buf.check()


@pytest.mark.parametrize("codec", ["zipccl", "raw"])
@pytest.mark.parametrize("at", [4, 100])
def test_headers_and_records_are_checked_whatever_is_decoded(
    place: str, codec: str, at: int
) -> None:
    x = tensor(place).reshape(5, 1, 1, 1, 1, 10, 10, 10)
    buf = encode(x, codec, chunks=2)
    assert buf.plan.header.nbytes > 100
    for byte, reason in ((at, "bad_header"), (buf.plan.header.nbytes + 16, "bad_record")):
        buf.array[byte] ^= 0x40
        for options in ({"verify": False}, {"start": 10, "stop": 20}, {"start": 7, "stop": 7}):
            tw.decode(buf, backend="triton", **options)
            if options == {"start": 7, "stop": 7} and reason == "bad_record":
                # Of an empty selection no record is read.
                buf.check()
                continue
            with pytest.raises(tw.FormatError) as caught:
                buf.check()
            assert caught.value.reason == reason
        buf.array[byte] ^= 0x40


@pytest.mark.parametrize("codec", ["zipccl", "raw"])
def test_a_checksum_that_no_plan_promised_is_refused(place: str, codec: str) -> None:
    buf = encode(tensor(place), codec, checksum=False)
    buf.array[buf.plan.header.nbytes] = 1
    with pytest.raises(tw.FormatError) as caught:
        tw.decode(buf, backend="triton", verify=True)
    assert caught.value.reason == "bad_record"


def test_a_verdict_at_once_is_on_its_call_alone(place: str) -> None:
    x = tensor(place)
    buf = encode(x, chunks=2)
    second = buf.plan.static_range(1).start
    buf.array[second] ^= 1
    tw.decode(buf, backend="triton")
    first = tw.decode(buf, backend="triton", stop=N // 2, verify=True)
    assert same(first, x[: N // 2])
    for _ in range(2):
        with pytest.raises(tw.FormatError, match="chunk 1"):
            tw.decode(buf, backend="triton", verify=True)
    with pytest.raises(tw.FormatError, match="chunk 1"):
        buf.check()
    buf.check()


def test_a_plan_that_was_used_is_sent_without_its_launches(place: str) -> None:
    buf = encode(tensor(place))
    sent = pickle.dumps(buf.plan)
    assert b"triton" not in sent
    assert pickle.loads(sent) == buf.plan


@pytest.mark.slow
def test_foreign_bytes_are_checked_at_once(place: str) -> None:
    x = tensor(place, n=1400)
    buf = encode(x, chunks=2)
    packed = buf.packed()
    for source in (packed, buf.array, torch.cat([packed[:3], packed])[3:], bytes(buf)):
        y = tw.decode(source, like=x, backend="triton")
        assert same(y, x)
        assert y.device == x.device
        part = tw.decode(source, like=x, start=600, stop=1000, backend="triton")
        assert same(part, x[600:1000])
    wrong = packed.clone()
    wrong[buf.plan.static_range(1)][100] ^= 4
    for source in (wrong, bytes(raw(wrong))):
        with pytest.raises(tw.FormatError, match="checksum_mismatch"):
            tw.decode(source, like=x, backend="triton")
    for source, reason in (
        (packed[:-1], "truncated"),
        (packed[:50], "truncated"),
        (torch.cat([packed, packed]), "trailing_bytes"),
        (packed.flip(0).contiguous(), "bad_magic"),
    ):
        with pytest.raises(tw.FormatError, match=reason):
            tw.decode(source, like=x, backend="triton")
    with pytest.raises(tw.FormatError, match="limit_exceeded"):
        tw.decode(packed, like=x, backend="triton", max_nbytes=100)
    with pytest.raises(TypeError, match="uint8"):
        tw.decode(packed.view(torch.int8), like=x, backend="triton")


def test_a_fixed_rate_that_is_too_low(place: str) -> None:
    x = tensor(place, pattern="random")
    buf = encode(x, dynamic_capacity=128)
    assert buf.overflowed
    assert buf.sizes.tolist() == on_host(x, dynamic_capacity=128).sizes.tolist()
    tw.decode(buf)
    with pytest.raises(tw.FormatError, match="dynamic_overflow"):
        buf.check()
    with pytest.raises(tw.FormatError, match="dynamic_overflow"):
        buf.packed()


def test_received_bytes_of_a_known_plan(place: str) -> None:
    from tightwire import gpu

    x = tensor(place)
    buf = encode(x)
    room = torch.zeros(buf.plan.nbytes + 128, dtype=torch.uint8, device=place)
    received = gpu.wrap(buf.plan, room)
    room[: buf.plan.nbytes] = buf.array
    assert received.array.data_ptr() == room.data_ptr()
    assert same(tw.decode(received), x)
    received.check()
    assert bytes(received) == bytes(buf)
    other = encode(x.reshape(50, 100)).array
    room[: other.numel()] = other
    tw.decode(received)
    with pytest.raises(tw.FormatError, match="bad_header"):
        received.check()
    with pytest.raises(tw.FormatError, match="bad_header"):
        received.packed()
    for bad in (room[:100], room[8:]):
        with pytest.raises(ValueError, match=r"needs|multiple of 16"):
            gpu.wrap(buf.plan, bad)
    with pytest.raises(TypeError, match="uint8"):
        gpu.wrap(buf.plan, room.view(torch.int8))


def test_received_bytes_on_the_host() -> None:
    x = tensor("cpu")
    buf = tw.encode(x)
    for array in (buf.array, bytearray(buf.array.numpy()), np.asarray(buf.array)):
        received = tw.Buffer.wrap(buf.plan, array)
        assert bytes(received) == bytes(buf)
        assert same(torch.as_tensor(tw.decode(received, like="torch")), x)
    assert isinstance(tw.decode(tw.Buffer.wrap(buf.plan, buf.array)), torch.Tensor)
    with pytest.raises(ValueError, match="needs"):
        tw.Buffer.wrap(buf.plan, bytes(100))
    other = tw.codec("zipccl").plan((50, 100), x.dtype)
    with pytest.raises(tw.FormatError, match="bad_header"):
        tw.decode(tw.Buffer.wrap(other, bytes(other.nbytes - buf.plan.nbytes) + bytes(buf.array)))


@pytest.mark.parametrize(
    ("dtype", "acc_dtype"),
    [
        ("bfloat16", "float32"),
        ("bfloat16", "bfloat16"),
        ("float16", "float16"),
        ("float32", "float32"),
        ("float32", "bfloat16"),
        ("bfloat16", "float64"),
        ("float8_e5m2", "float32"),
        ("bfloat16", "float8_e5m2"),
    ],
)
def test_decode_add(place: str, dtype: str, acc_dtype: str) -> None:
    codec = tw.codec("zipccl")
    x = tensor(place, dtype)
    acc = torch.linspace(-1, 1, N, device=place).to(getattr(torch, acc_dtype))
    expected = acc.cpu()
    codec.decode_add(on_host(x), expected)
    buf = encode(x)
    assert codec.decode_add(buf, acc) is acc
    buf.check()
    assert same(acc, expected)
    with pytest.raises(ValueError, match="shape"):
        codec.decode_add(buf, acc[None])


def test_decode_add_refuses(place: str) -> None:
    codec = tw.codec("zipccl")
    buf = encode(tensor(place))
    with pytest.raises(TypeError, match="float dtypes"):
        codec.decode_add(buf, torch.zeros(N, dtype=torch.int32, device=place))
    with pytest.raises(ValueError, match="contiguous"):
        codec.decode_add(buf, torch.zeros(2 * N, device=place)[::2])


def test_decode_add_encode(place: str) -> None:
    codec = tw.codec("zipccl")
    x, y = tensor(place), tensor(place).flip(0)
    total = codec.decode_add_encode(encode(x), y, chunks=2, backend="triton")
    expected = codec.decode_add_encode(on_host(x), y.cpu(), chunks=2)
    assert total.array.device == x.device
    assert bytes(total) == bytes(expected)
    with pytest.raises(ValueError, match="the buffer"):
        codec.decode_add_encode(encode(x), y.half(), backend="triton")


@pytest.mark.slow
@pytest.mark.parametrize("window", ["tile", "sigma", "histogram", 116])
def test_stats(place: str, window: Any) -> None:
    codec = tw.codec("zipccl", window=window)
    x = tensor(place)
    found = codec.measure(x, backend="triton")
    expected = codec.measure(x.cpu())
    assert bytes(encode(x, codec)) == bytes(on_host(x, codec))
    if window == "tile":
        assert found is None
        with pytest.raises(ValueError, match="takes no stats"):
            encode(x, stats=torch.zeros(1, dtype=torch.int64, device=place))
        return
    if found is not None:
        assert found.device == x.device
        assert found.tolist() == expected.tolist()
        assert bytes(encode(x, codec, stats=found)) == bytes(on_host(x, codec))
    assert bytes(encode(x, codec, stats=expected)) == bytes(on_host(x, codec))
    for bad in ([-1], [300], [1, 2]):
        with pytest.raises(ValueError, match="stats"):
            encode(x, codec, stats=np.array(bad))
    for shape, dtype in (((2,), torch.int64), ((1,), torch.float32)):
        with pytest.raises(ValueError, match="stats"):
            encode(x, codec, stats=torch.zeros(shape, dtype=dtype, device=place))


def test_the_host_takes_over_where_it_is_asked_to(place: str) -> None:
    x = tensor(place)
    buf = encode(x)
    y = tw.decode(buf, like="numpy")
    assert isinstance(y, np.ndarray)
    assert y.tobytes() == bytes(raw(x))
    assert same(tw.decode(buf, backend="ref"), x)
    out = np.empty(N, y.dtype)
    assert tw.decode(buf, out=out, start=0).tobytes() == bytes(raw(x))
    acc = np.zeros(N, np.float32)
    tw.codec("zipccl").decode_add(buf, acc)
    assert np.array_equal(acc, raw(x.float()).view(np.float32))


def test_what_triton_does_not_reach(place: str) -> None:
    x = tensor(place)
    with pytest.raises(ValueError, match="GPU arrays"):
        encode(np.zeros(5, np.float32))
    with pytest.raises(ValueError, match="GPU arrays"):
        tw.decode(bytes(encode(x)), backend="triton")
    with pytest.raises(ValueError, match="GPU arrays"):
        tw.codec("zipccl", window="sigma").measure(np.zeros(5, np.float32), backend="triton")
    with pytest.raises(ValueError, match="float64"):
        encode(tensor(place, "float64"))
    with pytest.raises(TypeError, match="to_dense"):
        encode(torch.zeros(3, 3, device=place).to_sparse())


WITHOUT = """
import sys
sys.modules[{0!r}] = None
import {1}, numpy as np
import tightwire as tw
x = {1}.zeros(5000, dtype={1}.float32)
assert bytes(tw.encode(x)) == bytes(tw.encode(np.zeros(5000, np.float32)))
try:
    tw.encode(x, backend="triton")
except ValueError as error:
    print("needs {0}" in str(error) and "pip install" in str(error))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("missing", "library"), [("triton", "torch"), ("torch", "numpy")])
def test_without_triton_or_torch_the_library_works(missing: str, library: str) -> None:
    code = WITHOUT.format(missing, library)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "True"


NOT_INTERPRETED = """
import os
os.environ["TRITON_INTERPRET"] = "0"
import torch
import tightwire as tw

try:
    tw.encode(torch.zeros(5000), backend="triton")
except ValueError as error:
    print("TRITON_INTERPRET" in str(error))
"""


@pytest.mark.slow
def test_host_tensors_need_the_interpreter() -> None:
    command = [sys.executable, "-c", NOT_INTERPRETED]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "True"


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def ops_place(request: pytest.FixtureRequest) -> str:
    """Where custom operators run: the host's own kernels, or a GPU."""
    return str(request.param)


def through_ops(x: Any, nbytes: int) -> Any:
    out = torch.empty(nbytes, dtype=torch.uint8, device=x.device)
    y = torch.empty_like(x)
    torch.ops.tightwire.encode_into(x * 2, out, "zipccl", 2)
    status = torch.ops.tightwire.decode_into(out, y, "zipccl", 2)
    return y + 1, status


@pytest.mark.slow
def test_custom_operators(ops_place: str) -> None:
    import tightwire.torch_ops

    x = tensor(ops_place)
    expected = on_host(x, chunks=2)
    out = torch.zeros(expected.plan.nbytes, dtype=torch.uint8, device=ops_place)
    tightwire.torch_ops.encode_into(x, out, "zipccl", chunks=2)
    assert bytes(tw.Buffer.wrap(expected.plan, out)) == bytes(expected)
    y = torch.empty_like(x)
    status = tightwire.torch_ops.decode_into(out, y, "zipccl", chunks=2)
    assert same(x, y)
    assert (status.tolist(), status.dtype, status.device) == ([0], torch.int64, x.device)
    torch.library.opcheck(torch.ops.tightwire.encode_into.default, (x, out, "zipccl", 2))
    torch.library.opcheck(torch.ops.tightwire.decode_into.default, (out, y, "zipccl", 2))
    out[expected.plan.static_range(1)][100] ^= 4
    if ops_place == "cpu":
        with pytest.raises(tw.FormatError, match="checksum_mismatch"):
            tightwire.torch_ops.decode_into(out, y, "zipccl", chunks=2)
    else:
        assert tightwire.torch_ops.decode_into(out, y, "zipccl", chunks=2).item() != 0


# Inductor's own imports warn of what will be removed from torch.
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_custom_operators_under_compile(ops_place: str) -> None:
    import tightwire.torch_ops  # noqa: F401

    x = tensor(ops_place)
    nbytes = tw.codec("zipccl").plan(x.shape, "bfloat16", chunks=2).nbytes
    backend = "aot_eager" if ops_place == "cpu" else "inductor"
    compiled = torch.compile(through_ops, fullgraph=True, backend=backend)
    for values in (x, -x):
        y, status = compiled(values, nbytes)
        assert same(y, values * 2 + 1)
        assert status.tolist() == [0]


@contextlib.contextmanager
def no_waiting() -> Iterator[None]:
    """Any call that waits for the device is an error."""
    try:
        with warnings.catch_warnings():
            # It announces itself as a prototype.
            warnings.simplefilter("ignore", UserWarning)
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def gpu_case(dtype: str = "bfloat16", n: int = 100_000, **options: Any) -> tuple[Any, ...]:
    """A tensor, its codec, and a buffer, result and workspace that have been used once."""
    x = tensor("cuda", dtype, n)
    codec = tw.codec(options.pop("codec", "zipccl"), **options)
    buf = codec.encode(x, chunks=4)
    y = tw.decode(buf)
    buf.check()
    scratch = torch.empty(buf.plan.scratch_nbytes, dtype=torch.uint8, device="cuda")
    return x, codec, buf, y, scratch


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float8_e4m3fn", "int16"])
def test_nothing_waits_for_the_device(dtype: str) -> None:
    x, codec, buf, y, scratch = gpu_case(dtype)
    plan = buf.plan
    acc = torch.zeros(x.shape, device="cuda")
    room = torch.empty(plan.nbytes, dtype=torch.uint8, device="cuda")
    with no_waiting():
        codec.encode(x, chunks=4, out=buf, scratch=scratch)
        tw.decode(buf, out=y, scratch=scratch)
        tw.decode(buf, start=10, stop=70_000)
        codec.encode(x, chunks=4, out=room)
        received = tw.Buffer.wrap(plan, room)
        tw.decode(received, out=y)
        sizes = received.sizes
        if x.dtype.is_floating_point:
            codec.decode_add(buf, acc)
            codec.decode_add_encode(buf, x)
            tw.codec("zipccl", window="sigma").measure(x)
            tw.codec("zipccl", window="histogram").encode(x)
    assert same(x, y)
    assert sizes.tolist() == on_host(x, chunks=4).sizes.tolist()
    received.check()


@pytest.mark.gpu
def test_nothing_is_allocated_with_memory_of_the_caller() -> None:
    x, codec, buf, y, scratch = gpu_case()
    acc = torch.zeros(x.shape, device="cuda")

    def allocations() -> int:
        return int(torch.cuda.memory_stats()["allocation.all.allocated"])

    before = allocations()
    codec.encode(x, chunks=4, out=buf, scratch=scratch)
    tw.decode(buf, out=y, scratch=scratch)
    codec.decode_add(buf, acc, scratch=scratch)
    assert allocations() == before
    assert same(x, y)


@pytest.mark.gpu
def test_a_captured_graph_is_replayed_on_changing_data() -> None:
    x, codec, buf, y, scratch = gpu_case(n=300_000)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        codec.encode(x, chunks=4, out=buf, scratch=scratch)
        tw.decode(buf, out=y, scratch=scratch)
    for pattern in ("normal", "random", "zero", "special", "normal"):
        x.copy_(tensor("cuda", n=300_000, pattern=pattern))
        y.zero_()
        graph.replay()
        assert same(x, y)
        assert bytes(buf) == bytes(on_host(x, chunks=4))
    decoding = torch.cuda.CUDAGraph()
    with torch.cuda.graph(decoding):
        tw.decode(buf, out=y, scratch=scratch)
    buf.static(2)[100] ^= 4
    decoding.replay()
    codec.encode(x, chunks=4, out=buf)
    decoding.replay()
    with pytest.raises(tw.FormatError, match="checksum_mismatch"):
        buf.check()
    decoding.replay()
    buf.check()


@pytest.mark.gpu
def test_work_is_done_in_the_order_of_the_current_stream() -> None:
    x, codec, buf, y, scratch = gpu_case(n=1 << 22)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for i in range(1, 5):
            torch.cuda._sleep(10_000_000)
            x.mul_(-1)
            codec.encode(x, chunks=4, out=buf, scratch=scratch)
            torch.cuda._sleep(10_000_000)
            tw.decode(buf, out=y, scratch=scratch)
            z = y * i
        assert same(z, x * 4)
        buf.check()


def foreign(library: str, x: Any) -> tuple[Any, Any]:
    """`x` in another library, and a function that gives an array's address."""
    if library == "torch":
        return torch.from_numpy(x).cuda(), lambda a: a.data_ptr()
    if library == "cupy":
        return pytest.importorskip("cupy").asarray(x), lambda a: a.data.ptr
    return on_jax(x), lambda a: a.unsafe_buffer_pointer()


def on_jax(x: Any) -> Any:
    jax = pytest.importorskip("jax")
    try:
        gpus = jax.devices("gpu")
    except RuntimeError:
        pytest.skip("JAX has no GPU here")
    return jax.device_put(x, gpus[0])


@pytest.mark.gpu
@pytest.mark.parametrize("library", ["torch", "cupy", "jax"])
def test_arrays_of_other_libraries_are_not_copied(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tightwire import gpu
    from tightwire.codecs import zipccl_triton

    host = make_bits("normal", BY_NAME["float32"], 300 * 500).view(np.float32).reshape(300, 500)
    x, address = foreign(library, host)
    seen: list[Any] = []

    class Kernels:
        def __getattr__(self, name: str) -> Any:
            def call(*args: Any, **options: Any) -> Any:
                seen.extend(a.data_ptr() for a in args if isinstance(a, torch.Tensor))
                return getattr(zipccl_triton, name)(*args, **options)

            return call

    kernels = Kernels()
    monkeypatch.setattr(gpu, "_kernels", lambda plan, required, based=False: kernels)
    buf = tw.encode(x)
    assert address(x) in seen
    array = buf.array
    assert type(array) is type(x)
    assert address(array) in seen
    assert bytes(buf) == bytes(tw.encode(host))
    y = tw.decode(buf)
    assert type(y) is type(x)
    assert address(y) in seen
    assert [int(n) for n in buf.sizes] == tw.encode(host).sizes.tolist()
    back = np.asarray(y.get() if library == "cupy" else y.cpu() if library == "torch" else y)
    assert back.tobytes() == host.tobytes()
    again = tw.decode(buf.packed())
    assert type(again) is type(x)
    if library != "jax":
        room, _ = foreign(library, np.zeros(buf.plan.nbytes, np.uint8))
        placed = tw.encode(x, out=room)
        assert address(placed.array) == address(room)
        assert (tw.decode(placed, out=x * 0) == x).all()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float16", "int8", "bool"])
def test_types_of_jax(name: str) -> None:
    dtype = BY_NAME[name]
    host = make_bits("normal", dtype, 20000).view(dtype.numpy)
    x = on_jax(host)
    for _ in range(3):
        # The buffer keeps an input that nobody else does.
        buf = tw.encode(on_jax(host))
        y = tw.decode(buf)
        assert (y.dtype, y.devices()) == (x.dtype, x.devices())
        assert np.asarray(y).tobytes() == host.tobytes()


@pytest.mark.gpu
def test_the_default_stream_of_cupy_is_that_of_pytorch() -> None:
    cupy = pytest.importorskip("cupy")
    from tightwire import gpu_arrays

    place = torch.device("cuda", torch.cuda.current_device())
    for stream in (cupy.cuda.Stream.null, cupy.cuda.Stream(non_blocking=True)):
        with stream:
            assert gpu_arrays._stream(place, "cupy").cuda_stream == stream.ptr


@pytest.mark.gpu
def test_the_streams_of_cupy() -> None:
    cupy = pytest.importorskip("cupy")
    host = make_bits("normal", BY_NAME["float16"], 1 << 21).view(np.float16)
    with cupy.cuda.Stream(non_blocking=True):
        x = cupy.asarray(host)
        out = cupy.zeros_like(x)
        for _ in range(4):
            x *= -1
            buf = tw.encode(x)
            tw.decode(buf, out=out)
            mixed = tw.decode(buf, like=torch.empty(0, device="cuda"))
            out *= 1
        assert out.get().tobytes() == x.get().tobytes()
        assert same(mixed, torch.from_numpy(x.get()))
        buf.check()


@pytest.mark.gpu
def test_float64_on_a_gpu_is_coded_on_the_host() -> None:
    x = tensor("cuda", "float64", 9000)
    codec = tw.codec("zipccl")
    buf = codec.encode(x)
    assert bytes(buf) == bytes(on_host(x))
    y = tw.decode(buf)
    assert same(x, y)
    assert y.device == x.device
    room = torch.empty(buf.plan.nbytes, dtype=torch.uint8, device="cuda")
    placed = codec.encode(x, out=room)
    assert placed.array.data_ptr() == room.data_ptr()
    assert bytes(placed) == bytes(buf)
    out = torch.empty_like(x)
    assert tw.decode(placed, out=out) is out
    assert same(x, out)
    assert same(codec.decode_add(placed, out), x + x)


@pytest.mark.gpu
def test_arrays_of_two_devices() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    x = tensor("cuda:1", n=9000)
    buf = tw.encode(x, chunks=2)
    assert buf.array.device == x.device
    assert same(tw.decode(buf), x)
    other = tw.decode(buf, like=torch.empty(0, device="cuda:0"))
    assert other.device == torch.device("cuda:0")
    assert same(other, x)
    with pytest.raises(ValueError, match="needed: memory on"):
        tw.encode(x, out=torch.empty(buf.plan.nbytes, dtype=torch.uint8, device="cuda:0"))
