"""Odd but sensible uses of files, and what they have to give."""

from __future__ import annotations

import io
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tightwire as tw
from tightwire import storage

A = np.random.default_rng(0).standard_normal((300, 100)).astype(np.float32)


def test_lazy_conjugates_are_tensors_of_their_own() -> None:
    torch = pytest.importorskip("torch")
    x = torch.randn(40, 50, dtype=torch.complex64)
    for one, other in ((x, x.conj()), (x.imag, x.conj().imag)):
        back = tw.loads(tw.dumps([one, other]), like="torch")
        assert torch.equal(back[0], one)
        assert torch.equal(back[1], other.clone())


def test_an_open_file_is_saved_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "a.tw"
    tw.save_file({"a": A, "b": A, "n": {"s": [A[:3], 7]}}, path, metadata={"k": "v"})
    size = path.stat().st_size
    with tw.open(path) as f:
        tw.save_file(f, path)
        tw.save_file({"x": f["a"], "y": f["b"]}, tmp_path / "b.tw")
    with tw.open(path) as f:
        assert f.metadata == {"k": "v"}
    loaded = tw.load_file(path)
    assert path.stat().st_size == size
    assert loaded["a"] is loaded["b"]
    assert loaded["n"]["s"][1] == 7
    pair = tw.load_file(tmp_path / "b.tw")
    assert pair["x"] is pair["y"]


def test_lazy_tensors_of_the_target_are_written_where_it_stands(tmp_path: Path) -> None:
    path = tmp_path / "a.tw"
    tw.save_file({"a": A}, path)
    with open(path, "r+b") as stream:
        f = tw.open(stream)
        stream.seek(0)
        tw.save_file(f, stream)
        stream.truncate()
    assert np.array_equal(tw.load_file(path)["a"], A)


class NoneWriter:
    def __init__(self) -> None:
        self.data = b""

    def write(self, data: Any) -> None:
        assert len(self.data) < 1 << 20
        self.data += bytes(data)


class Full(io.RawIOBase):
    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> None:
        return None


def test_writers_that_return_none() -> None:
    stream = NoneWriter()
    tw.save_file({"a": A[:2]}, stream)
    assert np.array_equal(tw.loads(stream.data)["a"], A[:2])
    with pytest.raises(BlockingIOError):
        tw.save_file({"a": A[:2]}, Full())


def test_threads_that_do_not_start_keep_no_slots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    from tightwire import pinned

    path = tmp_path / "big"
    path.write_bytes(bytes(1 << 16))
    reader = storage.PathReader(path)
    windows = [[pinned.Range(reader, i << 12, (i + 1) << 12)] for i in range(8)]
    slots = pinned.Pool(False, 2)
    monkeypatch.setattr(pinned, "pool", lambda pinned: slots)
    start = threading.Thread.start
    started: list[threading.Thread] = []

    def failing(self: threading.Thread) -> None:
        if len(started) == 1:
            raise RuntimeError("can't start new thread")
        started.append(self)
        start(self)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", failing)
        with pytest.raises(RuntimeError, match="can't start"):
            pinned.Transfer(windows, torch.device("cpu")).__enter__()
    assert not started[0].is_alive()
    assert slots._made == len(slots._free)


def test_empty_tensors_are_where_others_are() -> None:
    torch = pytest.importorskip("torch")
    message = tw.dumps({"e": np.zeros((0, 3), np.float32)})
    with torch.device("meta"):
        assert tw.loads(message, like="torch")["e"].device.type == "cpu"


def test_errors_name_what_the_caller_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        tw.save_file({"a": A}, tmp_path / "no" / "x.tw")
    assert caught.value.filename == str(tmp_path / "no" / "x.tw")
    f = tw.open(tw.dumps({"a": A}))
    with pytest.raises(IndexError, match="row 300 of 300 in 'a'"):
        f["a"][300]
