"""The safetensors header: what safetensors itself reads, and every kind of damage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import tightwire as tw
from tightwire.formats.container import Entry, directory_bytes, parse_directory, read_directory


def file_of(fields: Any, data: bytes = b"", pad: int = 0) -> bytes:
    text = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    text += b" " * pad
    return len(text).to_bytes(8, "little") + text + data


GOOD = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}


def reason(data: bytes) -> str:
    with pytest.raises(tw.FormatError) as caught:
        read_directory(memoryview(data))
    return caught.value.reason


def test_a_good_file() -> None:
    directory = read_directory(memoryview(file_of(GOOD, bytes(8), pad=5)))
    assert directory.entries == (Entry("a", "F32", (2,), 0, 8),)
    assert read_directory(memoryview(file_of({}))).entries == ()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"1234567",
        file_of(GOOD, bytes(7)),
        file_of(GOOD, bytes(9)),
        file_of(GOOD, bytes(8))[:20],
        (1 << 62).to_bytes(8, "little") + b"{}",
        file_of(b"not json"),
        file_of(b"\xff\xfe"),
        file_of(b"[" * 100000),
        file_of([]),
        file_of(b'{"a": {"dtype": "U8", "shape": [], "data_offsets": [0, 1]}, "a": 1}', b"1"),
        file_of({"__metadata__": {"a": 1}}),
        file_of({"__metadata__": []}),
        file_of({"a": []}),
        file_of({"a": {"dtype": "F32", "shape": [2]}}),
        file_of({"a": {"dtype": "F7", "shape": [2], "data_offsets": [0, 8]}}, bytes(8)),
        file_of({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}, bytes(8)),
        file_of({"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}, bytes(8)),
        file_of({"a": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}}, bytes(4)),
        file_of({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8, 9]}}, bytes(8)),
        file_of({"a": {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]}}, bytes(8)),
        file_of({"a": {"dtype": "U8", "shape": [4], "data_offsets": [4, 8]}}, bytes(8)),
        file_of({**GOOD, "b": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}, bytes(12)),
        file_of({"a": {"dtype": "U8", "shape": [1 << 62] * 100_000, "data_offsets": [0, 1]}}, b"1"),
        file_of(b'{"\\ud800": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}', b"1"),
        file_of({"a": {"dtype": "U8", "shape": [1 << 63], "data_offsets": [0, 1 << 63]}}),
    ],
)
def test_damage(data: bytes) -> None:
    assert reason(data) == "bad_container"


def test_written_headers_are_aligned_and_read_by_safetensors(tmp_path: Path) -> None:
    for n in range(40):
        entries = [Entry(f"t{i}" + "é" * n, "U8", (128,), 128 * i, 128 * i + 128) for i in range(3)]
        head = directory_bytes(entries, {"k": "v" * n})
        assert len(head) % 128 == 0
        assert parse_directory(head[8:]).entries == tuple(entries)
        path = tmp_path / f"{n}.safetensors"
        path.write_bytes(head + bytes(384))
        assert set(safetensors.numpy.load_file(path)) == {e.name for e in entries}


def test_compressed_files_are_ordinary_safetensors(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    x = np.random.default_rng(0).standard_normal((90, 100)).astype(ml_dtypes.bfloat16)
    tw.save_file({"x": x, "empty": np.zeros((0, 4)), "i": np.arange(9)}, path, metadata={"k": "v"})
    loaded = safetensors.numpy.load_file(path)
    assert set(loaded) == {"x", "empty", "i"}
    assert tw.decode(loaded["x"]).tobytes() == x.tobytes()
    with safetensors.safe_open(path, "numpy") as file:
        assert file.metadata() == {"k": "v", "tightwire": "1"}
    data = path.read_bytes()
    assert (8 + int.from_bytes(data[:8], "little")) % 128 == 0


@pytest.mark.parametrize(
    ("dtype", "shape"), [("U8", (128, 1)), ("I8", (128,)), ("F32", (32,)), ("U8", (0,))]
)
def test_compressed_tensors_are_flat_bytes(
    dtype: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    n = 128 if 0 not in shape else 0
    head = directory_bytes([Entry("x", dtype, shape, 0, n)], {"tightwire": "1"})
    (tmp_path / "x").write_bytes(head + bytes(n))
    expected = "truncated" if n == 0 else "bad_container"
    with pytest.raises(tw.FormatError, match=expected):
        tw.load_file(tmp_path / "x")
