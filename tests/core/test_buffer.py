"""A Buffer as Python sees it: pickled, copied, as bytes, on a stream."""

from __future__ import annotations

import copy
import hashlib
import io
import pickle
import socket
import sys
import threading
from typing import Any

import numpy as np
import pytest

import tightwire as tw
from support import ALONE
from tightwire.formats.header import Header, Peek

torch = pytest.importorskip("torch")

FOREIGN = 0xA5
COPIES = {
    "pickle": lambda buf: pickle.loads(pickle.dumps(buf)),
    "old pickle": lambda buf: pickle.loads(pickle.dumps(buf, protocol=0)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}


def encoded(name: str, shape: tuple[int, ...] = (48, 640), **options: Any) -> tw.Buffer:
    codec = tw.codec(name, hidden=64) if name == "tahquant" else tw.codec(name)
    x = torch.linspace(-1, 1, int(np.prod(shape))).reshape(shape)
    # Nothing has to be compiled for that.
    return codec.encode(x, key=tw.Key(1), backend="ref", **options)


@pytest.mark.parametrize("how", COPIES)
def test_copies_are_of_the_packed_bytes(how: str) -> None:
    x = torch.linspace(-1, 1, 9000).bfloat16()
    plan = tw.codec("zipccl").plan(x.shape, x.dtype, chunks=3)
    room = np.full(plan.nbytes + 4096, FOREIGN, np.uint8)
    buf = tw.encode(x, out=room, chunks=3)
    assert FOREIGN in buf.array[plan.dynamic_offset :]
    again = COPIES[how](buf)
    assert (again.plan, again.nbytes, bytes(again)) == (plan, buf.nbytes, bytes(buf))
    decoded = tw.decode(again)
    assert isinstance(decoded, torch.Tensor)
    assert torch.equal(decoded, x)
    for i in range(3):
        assert again.dynamic(i).tolist() == buf.dynamic(i).tolist()
        used = again.dynamic(i).nbytes
        slot = again.array[plan.dynamic_offset + i * plan.dynamic_stride :]
        assert not slot[used : plan.dynamic_stride].any()
    # Their memory is their own.
    room[:] = 0
    assert torch.equal(tw.decode(again), x)
    assert torch.equal(tw.decode(tw.encode(x, out=again, chunks=3)), x)


@pytest.mark.parametrize("name", ALONE)
def test_a_pickle_is_about_as_long_as_the_packed_bytes(name: str) -> None:
    for options in ({}, {"chunks": 4}, {"checksum": False}):
        buf = encoded(name, **options)
        assert buf.header.codec == name
        _ = buf.array
        data = pickle.dumps(buf)
        assert buf.nbytes <= len(data) <= buf.nbytes + 200
        again = pickle.loads(data)
        assert again.plan == buf.plan
        assert bytes(again) == bytes(buf)


def test_what_was_put_together_from_ranks_is_copied_too() -> None:
    from tightwire.adapters.collectives.chunk_views import _head

    x = np.arange(9000, dtype=np.float32)
    buf = tw.encode(x, chunks=2)
    data = np.array(buf.array)
    records = slice(buf.header.nbytes, buf.header.nbytes + 64)
    kept = data[records].copy()
    data[: buf.plan.static_offset] = _head(buf.plan)
    data[records] = kept
    again = pickle.loads(pickle.dumps(tw.Buffer.wrap(buf.plan, data, assembled=True)))
    assert tw.decode(again).tobytes() == x.tobytes()


def test_fixed_rate_buffers_keep_their_slots_and_overflow_is_raised() -> None:
    x = np.random.default_rng(0).integers(0, 256, 20000, np.uint8).view(np.float16)
    codec = tw.codec("zipccl")
    buf = codec.encode(np.linspace(1, 2, 10000, dtype=np.float16), dynamic_capacity=2000)
    again = pickle.loads(pickle.dumps(buf))
    assert again.plan == buf.plan
    assert again.plan.dynamic_stride == 2048
    with pytest.raises(tw.FormatError, match="dynamic_overflow"):
        pickle.dumps(codec.encode(x, dynamic_capacity=0))


def test_a_library_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    buf = tw.encode(torch.ones(300))
    data = pickle.dumps(buf)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert isinstance(tw.decode(pickle.loads(data)), np.ndarray)


def test_encoding_a_buffer_would_publish_its_slack() -> None:
    with pytest.raises(TypeError, match=r"x is a Buffer.* Allowed: .*packed\(\)"):
        tw.encode(tw.encode(np.ones(300)))


@pytest.mark.parametrize("capacity", [None, 512])
def test_the_operator_leaves_nothing_foreign_in_slots(capacity: int | None) -> None:
    from tightwire import torch_ops

    x = torch.linspace(-1, 1, 6000)
    plan = tw.codec("zipccl").plan(x.shape, x.dtype, chunks=3, dynamic_capacity=capacity)
    out = torch.full((plan.nbytes + 100,), FOREIGN, dtype=torch.uint8)
    torch_ops.encode_into(x, out, "zipccl", 3, capacity)
    buf = tw.codec("zipccl").encode(x, chunks=3, dynamic_capacity=capacity)
    for i in range(3):
        slot = out[plan.dynamic_offset + i * plan.dynamic_stride :][: plan.dynamic_stride]
        used = int(buf.sizes[i])
        assert not slot[used if used <= plan.dynamic_stride else 0 :].any()
    assert buf.overflowed or bytes(tw.Buffer.wrap(plan, out)) == bytes(buf)
    # Behind the buffer there may be something else.
    assert out[plan.nbytes :].eq(FOREIGN).all()


@pytest.mark.parametrize("name", ["raw", "zipccl", "mx"])
def test_as_an_array_of_numpy(name: str) -> None:
    buf = encoded(name)
    packed = np.frombuffer(bytes(buf), np.uint8)
    found = np.asarray(buf)
    assert found.dtype == np.uint8
    assert found.tobytes() == packed.tobytes()
    assert np.array(buf, dtype=np.int16).tolist() == packed.tolist()
    assert len(buf) == buf.nbytes == found.size
    with pytest.raises(ValueError, match="Allowed: copy=None"):
        buf.__array__(copy=False)


def test_a_view_of_the_packed_bytes() -> None:
    buf = encoded("zipccl")
    view = buf.__buffer__(0)
    assert view.readonly
    assert view == bytes(buf)


@pytest.mark.skipif(sys.version_info < (3, 12), reason="PEP 688 is of Python 3.12")
def test_bytes_like() -> None:
    buf: Any = encoded("zipccl", dynamic_capacity=4096)
    assert memoryview(buf) == bytes(buf)
    assert hashlib.sha256(buf).digest() == hashlib.sha256(bytes(buf)).digest()
    file = io.BytesIO()
    file.write(buf)
    assert file.getvalue() == bytes(buf)
    assert tw.decode(memoryview(buf)).tobytes() == tw.decode(bytes(buf)).tobytes()
    with pytest.raises((TypeError, BufferError)):
        io.BytesIO(bytes(9)).readinto(buf)
    here, there = socket.socketpair()
    with here, there:
        here.sendall(buf)
        assert there.recv(len(buf), socket.MSG_WAITALL) == bytes(buf)


def test_repr_is_one_line() -> None:
    for buf in (encoded("zipccl"), encoded("mx", chunks=7)):
        assert repr(buf).startswith("<tightwire.Buffer ")
        assert len(repr(buf).splitlines()) == 1


@pytest.mark.parametrize("limit", [48 * 640 * 4 - 1, 0])
def test_max_nbytes_is_for_buffers_too(limit: int) -> None:
    buf = encoded("zipccl")
    for src in (buf, bytes(buf), torch.frombuffer(bytearray(bytes(buf)), dtype=torch.uint8)):
        for call in (tw.decode, tw.verify, tw.codec("zipccl").decode):
            with pytest.raises(tw.FormatError, match="limit_exceeded"):
                call(src, max_nbytes=limit)
        assert tw.decode(src, max_nbytes=48 * 640 * 4).shape == (48, 640)
        tw.verify(src, max_nbytes=48 * 640 * 4)


def test_max_nbytes_is_a_size() -> None:
    buf = encoded("raw")
    calls: list[Any] = [tw.decode, tw.verify, tw.codec("raw").decode, Header.peek]
    for call in calls:
        src = buf if call is not Header.peek else bytes(buf)
        with pytest.raises(ValueError, match="max_nbytes is -1; allowed: at least 0"):
            call(src, max_nbytes=-1)
        for bad in (1.5, "3"):
            with pytest.raises(TypeError, match=r"max_nbytes is .*; allowed: an integer"):
                call(src, max_nbytes=bad)


# Buffers on a stream.


def read_buffer(stream: Any, max_nbytes: int = 1 << 20) -> bytes:
    head = b""
    while (peek := Header.peek(head, max_nbytes=max_nbytes)).nbytes is None:
        head += stream.read(peek.needed - len(head))
    return head + bytes(stream.read(peek.nbytes - len(head)))


def messages() -> list[bytes]:
    """Packed buffers of all codecs, in slots too, of several chunks and of none to speak of."""
    found = []
    for name in ALONE:
        for options in ({}, {"chunks": 3}, {"checksum": False}):
            buf = encoded(name, **options)
            found += [bytes(buf)]
            buf = encoded(name, out=np.zeros(buf.plan.nbytes, np.uint8), **options)
            found += [np.asarray(buf.array).tobytes()]
    return [*found, bytes(tw.encode(np.zeros((0, 3)))), bytes(tw.encode(np.float32(3)))]


def test_buffers_follow_one_another_on_a_stream() -> None:
    sent = messages()
    here, there = socket.socketpair()
    with here, there, there.makefile("rb") as stream:
        writer = threading.Thread(target=here.sendall, args=(b"".join(sent),))
        writer.start()
        received = [read_buffer(stream) for _ in sent]
        writer.join()
    assert received == sent
    for data in received:
        assert tw.inspect(data).nbytes == len(data)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["raw", "zipccl", "mx", "lhc"])
def test_a_peek_asks_for_no_more_than_there_is(name: str) -> None:
    data = bytes(encoded(name, chunks=2))
    sizes = {Header.peek(data[:n]) for n in range(len(data) + 1)}
    assert {peek.nbytes for peek in sizes} == {None, len(data)}
    assert all(32 <= peek.needed <= len(data) for peek in sizes)
    assert len(sizes) <= 4
    assert Header.peek(memoryview(data)) == Header.peek(data + b"the next one")
    assert Header.peek(b"") == Peek(None, 32)


def test_a_peek_at_hostile_bytes() -> None:
    data = bytes(encoded("zipccl", chunks=2))
    for bad in (b"P", b"PK\3\4", data[1:], data[:8] + b"\xff" * 4 + data[12:], bytes(99)):
        with pytest.raises(tw.FormatError):
            Header.peek(bad)
    flipped = bytearray(data[:200])
    flipped[40] ^= 1
    with pytest.raises(tw.FormatError, match="checksum_mismatch"):
        Header.peek(flipped)
    header = tw.inspect(data).header.nbytes
    huge = data[: header + 8] + b"\xff" * 8 + data[header + 16 :]
    for claims, limit in ((huge, 64 << 30), (data, len(data) - 1), (data, 40)):
        with pytest.raises(tw.FormatError, match="limit_exceeded"):
            Header.peek(claims, max_nbytes=limit)
    assert Header.peek(data, max_nbytes=len(data)).nbytes == len(data)
    with pytest.raises(tw.FormatError):
        read_buffer(io.BytesIO(huge))


@pytest.mark.gpu
def test_a_buffer_on_a_gpu() -> None:
    """Copies are on the host and remember the library, not the device."""
    x = torch.linspace(-1, 1, 9000, device="cuda").bfloat16()
    plan = tw.codec("zipccl").plan(x.shape, x.dtype, chunks=3)
    out = torch.full((plan.nbytes,), FOREIGN, dtype=torch.uint8, device="cuda")
    buf = tw.encode(x, out=out, chunks=3)
    for how in COPIES.values():
        again = how(buf)
        assert (again.plan, bytes(again)) == (plan, bytes(buf))
        decoded = tw.decode(again)
        assert torch.equal(decoded, x.cpu())
    assert len(pickle.dumps(buf)) <= buf.nbytes + 200
    assert np.asarray(buf).tobytes() == bytes(buf) == bytes(buf.__buffer__(0))
    for call in (tw.decode, tw.verify):
        with pytest.raises(tw.FormatError, match="limit_exceeded"):
            call(buf, max_nbytes=17999)
        call(buf, max_nbytes=18000)


@pytest.mark.gpu
def test_the_operator_leaves_nothing_foreign_in_slots_of_a_gpu() -> None:
    from tightwire import torch_ops

    x = torch.linspace(-1, 1, 6000, device="cuda")
    plan = tw.codec("zipccl").plan(x.shape, x.dtype, chunks=3)
    out = torch.full((plan.nbytes + 96,), FOREIGN, dtype=torch.uint8, device="cuda")
    torch_ops.encode_into(x, out, "zipccl", 3)
    buf = tw.Buffer.wrap(plan, out)
    for i, used in enumerate(buf.sizes.tolist()):
        slot = out[plan.dynamic_offset + i * plan.dynamic_stride :][: plan.dynamic_stride]
        assert not slot[used:].any()
    assert torch.equal(tw.decode(buf, verify=True), x)
    assert out[plan.nbytes :].eq(FOREIGN).all()
    inside = out[: x.nbytes].view(torch.float32)
    before = out.clone()
    with pytest.raises(ValueError, match="overlaps"):
        torch_ops.encode_into(inside, out, "zipccl", 3)
    assert torch.equal(out, before)
