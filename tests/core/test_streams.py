"""Streams: buffers one after another, files by file objects and URLs, nested structures."""

from __future__ import annotations

import bz2
import errno
import gzip
import io
import lzma
import os
import re
import socket
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given

import tightwire as tw
from support import examples

ROOT = Path(__file__).parents[2]


def normal(*shape: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


ARRAYS: dict[str, Any] = {
    "w": normal(300, 40),
    "ids": np.arange(1000),
    "scalar": np.float32(2),
    "odd": b"\0\xff",
}


@cache
def message() -> bytes:
    """Made when a test needs it: nothing is compiled while tests are collected."""
    return tw.dumps(ARRAYS)


def check(found: Any) -> None:
    assert list(found) == list(ARRAYS)
    for name, x in ARRAYS.items():
        assert np.array_equal(found[name], x)


# Buffers one after another.


@cache
def buffers() -> list[bytes]:
    """Packed and slotted buffers of several codecs, chunks and sizes."""
    sent = []
    for x in (normal(700, 90), np.zeros((0, 3)), np.float32(3), np.arange(9).astype(np.uint8)):
        for codec, options in (("raw", {}), ("zipccl", {"chunks": 3}), ("mx", {"chunks": None})):
            chosen = tw.codec(codec)
            buf = chosen.encode(x, **options)
            sent.append(bytes(buf))
            slotted = chosen.encode(x, **options, dynamic_capacity=512)
            if not slotted.overflowed:
                slotted.zero_slack()
                sent.append(np.asarray(slotted.array).tobytes())
    return sent


@contextmanager
def by_socket(data: bytes) -> Iterator[Any]:
    here, there = socket.socketpair()

    def send() -> None:
        with here:
            here.sendall(data)

    writer = threading.Thread(target=send)
    writer.start()
    with there, there.makefile("rb") as stream:
        yield stream
    writer.join()


@contextmanager
def by_pipe(data: bytes) -> Iterator[Any]:
    """Its reads are short, as those of any unbuffered file."""
    reading, writing = os.pipe()

    def send() -> None:
        with os.fdopen(writing, "wb") as file:
            file.write(data)

    writer = threading.Thread(target=send)
    writer.start()
    with os.fdopen(reading, "rb", buffering=0) as stream:
        yield stream
    writer.join()


class Drip:
    """A stream that gives a few bytes at a time."""

    def __init__(self, data: bytes) -> None:
        self._file = io.BytesIO(data)

    def read(self, n: int) -> bytes:
        return self._file.read(min(n, 7))


@pytest.mark.parametrize("through", [by_socket, by_pipe])
def test_buffers_one_after_another(through: Callable[[bytes], Any]) -> None:
    with through(b"".join(buffers())) as stream:
        received = list(tw.read_buffers(stream))
    assert [x.tobytes() for x in received] == buffers()
    for data, sent in zip(received, buffers(), strict=True):
        assert np.array_equal(tw.decode(data), tw.decode(sent))


def test_no_byte_is_read_behind_a_buffer() -> None:
    stream = io.BytesIO(buffers()[0] + b"something else")
    assert next(tw.read_buffers(stream)).tobytes() == buffers()[0]
    assert stream.read() == b"something else"
    with pytest.raises(tw.FormatError, match="bad_magic"):
        list(tw.read_buffers(io.BytesIO(buffers()[0] + b"something else" * 9)))


def test_streams_that_are_cut_off() -> None:
    small = min((data for data in buffers() if len(data) > 200), key=len)
    for n in range(1, len(small)):
        found = tw.read_buffers(Drip(small + small[:n]))
        assert next(found).tobytes() == small
        with pytest.raises(tw.FormatError, match="truncated: the stream ends at"):
            next(found)
    assert list(tw.read_buffers(Drip(b""))) == []


def test_limits_of_buffers_on_streams() -> None:
    data = buffers()[0]
    assert len(list(tw.read_buffers(io.BytesIO(data), max_nbytes=len(data)))) == 1
    stream = io.BytesIO(data)
    with pytest.raises(tw.FormatError, match="limit_exceeded"):
        next(tw.read_buffers(stream, max_nbytes=len(data) - 1))
    assert stream.tell() < 1000
    with pytest.raises(ValueError, match="max_nbytes is -1"):
        next(tw.read_buffers(stream, max_nbytes=-1))


def test_a_stream_that_does_not_wait() -> None:
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    with os.fdopen(reading, "rb", buffering=0) as stream, os.fdopen(writing, "wb"):
        with pytest.raises(BlockingIOError, match="is non-blocking"):
            next(tw.read_buffers(stream))
        with pytest.raises(BlockingIOError, match="is non-blocking"):
            tw.load_file(stream)


def test_the_page_on_streams_runs() -> None:
    text = (ROOT / "docs" / "streams.md").read_text()
    scope: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(block, scope)
    for x, y in zip(scope["arrays"], scope["received"], strict=True):
        assert np.array_equal(x, y)
    assert scope["loaded"]["step"] == 7
    assert np.array_equal(scope["loaded"]["w"], scope["arrays"][0])


# File objects.


def _packed(opener: Callable[..., Any]) -> Callable[[Path], tuple[Any, Any]]:
    return lambda path: (opener(path, "wb"), lambda: opener(path, "rb"))


def _appending(path: Path) -> tuple[Any, Any]:
    return open(path, "ab"), lambda: open(path, "rb")


def _unbuffered(path: Path) -> tuple[Any, Any]:
    return open(path, "wb", buffering=0), lambda: open(path, "rb", buffering=0)


class Bare:
    """A file object with one method, beside what `with` needs."""

    def __init__(self, path: Path, mode: str) -> None:
        self._file = open(path, mode)  # noqa: SIM115
        if mode == "rb":
            self.read = self._file.read
        else:
            self.write = self._file.write

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _zipped(path: Path) -> tuple[Any, Any]:
    archive = zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED)
    member = archive.open("member", "w")

    def again() -> Any:
        archive.close()
        return zipfile.ZipFile(path).open("member")

    return member, again


FILES: dict[str, Callable[[Path], tuple[Any, Any]]] = {
    "open": _packed(open),
    "append": _appending,
    "unbuffered": _unbuffered,
    "gzip": _packed(gzip.open),
    "bz2": _packed(bz2.open),
    "lzma": _packed(lzma.open),
    "zip": _zipped,
    "bare": _packed(Bare),
}


@pytest.mark.parametrize("kind", FILES)
def test_file_objects(kind: str, tmp_path: Path) -> None:
    file, again = FILES[kind](tmp_path / "x")
    with file:
        tw.save_file(ARRAYS, file)
    with again() as stream:
        check(tw.load_file(stream))
    with again() as stream, tw.open(stream) as opened:
        assert np.array_equal(opened["w"][7:9], ARRAYS["w"][7:9])
        assert np.array_equal(opened["w"], ARRAYS["w"])


@pytest.mark.slow
def test_standard_input_and_output(tmp_path: Path) -> None:
    code = "import sys, tightwire as tw\n"
    code += "tw.save_file(tw.load_file(sys.stdin.buffer), sys.stdout.buffer)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, input=message(), stdout=subprocess.PIPE, check=True, timeout=60)
    assert done.stdout == message()
    (tmp_path / "in").write_bytes(message())
    # Appended to a file, of which the process only knows that it can seek.
    with open(tmp_path / "in", "rb") as source, open(tmp_path / "out", "ab") as target:
        target.write(b"before")
        target.flush()
        subprocess.run(command, stdin=source, stdout=target, check=True, timeout=60)
    assert (tmp_path / "out").read_bytes() == b"before" + message()


def test_files_start_where_file_objects_are() -> None:
    stream = io.BytesIO()
    stream.write(b"before")
    tw.save_file(ARRAYS, stream)
    assert stream.tell() == len(stream.getvalue())
    stream.seek(6)
    check(tw.load_file(stream))


@pytest.mark.parametrize("call", [tw.load_file, tw.open, lambda f: tw.save_file(ARRAYS, f)])
def test_what_is_no_file(call: Callable[[Any], Any], tmp_path: Path) -> None:
    for wrong in (3, None, ["x"]):
        name = type(wrong).__name__
        with pytest.raises(TypeError, match=rf"Expected a path, a URL.* binary file.*got {name}$"):
            call(wrong)
    with (
        open(tmp_path / "x", "w+") as text,
        pytest.raises(TypeError, match=r"open as text\. Allowed: .* sys.stdin.buffer"),
    ):
        call(text)
    with pytest.raises(TypeError, match="open as text"):
        call(io.StringIO("x" * 100))


class Failing(io.BytesIO):
    """Takes 10 kB and no more."""

    def write(self, data: Any) -> int:
        if self.tell() + len(data) > 10_000:
            raise OSError(errno.ENOSPC, "no space")
        return super().write(data)


@pytest.mark.slow
def test_a_failed_save_leaves_no_half_file(tmp_path: Path) -> None:
    bad = {"w": normal(200, 200), "x": object()}
    stream = Failing(b"kept")
    stream.seek(4)
    with pytest.raises(OSError, match="no space"):
        tw.save_file(ARRAYS, stream)
    assert stream.getvalue() == b"kept"
    with open(tmp_path / "x", "wb") as plain, gzip.open(tmp_path / "y", "wb") as packed:
        for file in (io.BytesIO(), plain, packed):
            with pytest.raises(TypeError):
                tw.save_file(bad, file)
            assert file.tell() == 0
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n"
    code = limit + (
        "import numpy as np, sys, tightwire as tw\n"
        "with open(sys.argv[1], 'wb', buffering=0) as file:\n"
        "    file.write(b'before')\n"
        "    try:\n"
        "        tw.save_file({'x': np.arange(30_000) ** 3}, file, 'raw')\n"
        "    except OSError as error:\n"
        "        print(error.strerror)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "z")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "File too large\n"
    assert (tmp_path / "z").read_bytes() == b"before"


# URLs and paths.


def test_urls(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    for url in (
        "memory://folder/x.tw",
        f"file://{tmp_path}/x.tw",
        f"simplecache::file://{tmp_path}/y",
    ):
        tw.save_file(ARRAYS, url)
        check(tw.load_file(url))
        with tw.open(url) as file:
            assert np.array_equal(file["w"][1:3], ARRAYS["w"][1:3])
    assert (tmp_path / "x.tw").read_bytes() == message()
    with pytest.raises(FileNotFoundError):
        tw.load_file("memory://nothing")
    with pytest.raises(ValueError, match="nonsense"):
        tw.load_file("nonsense://nothing")


def test_a_failed_save_to_a_url_uploads_nothing(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    for url in ("memory://failed.tw", f"file://{tmp_path}/failed.tw"):
        with pytest.raises(TypeError):
            tw.save_file({"w": normal(200, 200), "x": object()}, url)
        assert not fsspec.core.url_to_fs(url)[0].exists(url)
    # A URL of a local file is written like its path: the old file stays until the new one is whole.
    tw.save_file(ARRAYS, f"file://{tmp_path}/x")
    before = (tmp_path / "x").stat().st_ino
    tw.save_file(ARRAYS, f"file://{tmp_path}/x")
    assert (tmp_path / "x").stat().st_ino != before
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


class Named:
    """A path as os.PathLike says, in bytes or text."""

    def __init__(self, path: str | bytes) -> None:
        self._path = path

    def __fspath__(self) -> str | bytes:
        return self._path


def test_paths_of_any_kind(tmp_path: Path) -> None:
    for path in (tmp_path / "x", str(tmp_path / "x"), Named(str(tmp_path / "x"))):
        tw.save_file(ARRAYS, path)
        check(tw.load_file(path))
    encoded: Any = Named(os.fsencode(tmp_path / "x"))
    check(tw.load_file(encoded))
    with tw.open(encoded) as file:
        assert file.name == str(tmp_path / "x")


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, lambda m: np.frombuffer(m, "u1")])
def test_bytes_in_memory(kind: Callable[[bytes], Any]) -> None:
    check(tw.load_file(kind(message())))
    with tw.open(kind(message())) as file:
        assert np.array_equal(file["w"][:], ARRAYS["w"])


# Nested structures.

DTYPES = ["bool", "u1", "i2", "u4", "i8", "f2", "f4", "f8", "c8", "c16", ">f4", ml_dtypes.bfloat16]
DTYPES += [ml_dtypes.float8_e4m3fn]
FLOATS = st.floats(allow_nan=True, allow_infinity=True)
SCALARS = st.none() | st.booleans() | st.integers() | FLOATS | st.text() | st.binary()
KEYS = st.text() | st.integers() | st.booleans() | st.none()


@st.composite
def arrays(draw: st.DrawFn) -> Any:
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=20))
    seed = draw(st.integers(0, 9))
    values = np.random.default_rng(seed).integers(0, 2 if seed else 256, shape)
    return np.asarray(values.astype(np.dtype(draw(st.sampled_from(DTYPES)))))


VALUES = st.recursive(
    SCALARS | arrays(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
    ),
    max_leaves=12,
)


def same(a: Any, b: Any) -> bool:
    """True for equal types, structures and bits."""
    if isinstance(a, np.ndarray):
        native = a.dtype.newbyteorder("=")
        return (
            isinstance(b, np.ndarray)
            and (native, a.shape) == (b.dtype, b.shape)
            and a.astype(native).tobytes() == b.tobytes()
        )
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        # Keys that are equal, as 1 and True are, are of one type as well.
        keys = [(type(k), k) for k in a] == [(type(k), k) for k in b]
        return keys and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float):
        return np.float64(a).tobytes() == np.float64(b).tobytes() or (a != a and b != b)
    return bool(a == b)


@examples(150)
@given(
    st.dictionaries(KEYS, VALUES, max_size=4) | st.lists(VALUES, max_size=4),
    st.sampled_from(["zipccl", "raw"]),
    st.booleans(),
)
def test_nested_structures_come_back(value: Any, codec: str, twice: bool) -> None:
    if twice:
        # Every array has two names.
        value = [value, value]
    message = tw.dumps(value, codec)
    assert same(value, tw.loads(message))
    assert same(value, tw.load_file(io.BytesIO(message)))


def test_names_that_containers_keep_for_themselves() -> None:
    value = {"__metadata__": np.arange(3), "n": 1, "a.b": np.arange(4), "a": {"b": np.arange(5)}}
    assert same(value, tw.loads(tw.dumps(value)))


@pytest.mark.parametrize(
    "bad", [{1, 2}, object(), 1j, np.dtype("f4"), {(1, 2): 3}, "a\ud800", {"\udcff": 1}, range(3)]
)
def test_values_that_no_file_holds(bad: Any) -> None:
    target = io.BytesIO()
    with pytest.raises((TypeError, ValueError), match=r"llowed|lone surrogate"):
        tw.save_file({"x": np.arange(900), "inner": [bad]}, target)
    assert target.getvalue() == b""
