"""inspect: where the bytes of buffers, compressed and plain files go."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner

import tightwire as tw
from support import write_safetensors
from tightwire import convert, inspection
from tightwire.commands.app import app
from tightwire.contents import read_header
from tightwire.formats.container import Entry, directory_bytes
from tightwire.formats.header import RECORD, align


def call(code: int, *args: object) -> str:
    result = CliRunner().invoke(app, ["inspect", *map(str, args)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.stdout if code == 0 else result.stderr


def document(*args: object) -> Any:
    [found] = json.loads(call(0, *args, "--json"))["files"]
    return found


def values(n: int, dtype: Any = ml_dtypes.bfloat16) -> np.ndarray[Any, Any]:
    return (np.random.default_rng(n).standard_normal(n, np.float32) * np.float32(0.02)).astype(
        dtype
    )


def mixed() -> np.ndarray[Any, Any]:
    """The first fifth is noise, which is stored raw where chunks are small."""
    bits = values(100_000).view(np.uint16)
    bits[:20_000] = np.random.default_rng(0).integers(0, 1 << 16, 20_000, np.uint16)
    return bits.view(ml_dtypes.bfloat16)


@pytest.mark.parametrize("chunks", [1, 3, 10])
@pytest.mark.parametrize("codec", ["zipccl", "raw", "mx"])
@pytest.mark.parametrize("packed", [True, False])
def test_parts_are_the_whole_buffer(codec: str, chunks: int, packed: bool) -> None:
    buffer = tw.encode(mixed(), codec, chunks=chunks)
    info = tw.inspect(bytes(buffer) if packed else buffer.array)
    parts = info.parts()
    assert sum(part.nbytes for part in parts) == info.nbytes
    assert all(part.nbytes >= 0 for part in parts)
    sizes = dict.fromkeys((part.kind for part in parts), 0)
    for part in parts:
        sizes[part.kind] += part.nbytes
    assert sizes["header"] == info.header.nbytes + RECORD.itemsize * chunks
    assert sizes["static"] == info.static_nbytes
    assert sizes.get("dynamic", 0) == sum(info.dynamic_nbytes)
    slack = [part.nbytes for part in parts if part.name == "slack"]
    if codec == "zipccl":
        assert bool(info.raw_chunks) == (chunks == 10)
        assert ("raw elements" in {part.name for part in parts}) == (chunks == 10)
        assert bool(slack) != packed


def test_chunks_lie_where_they_say() -> None:
    buffer = tw.encode(mixed(), chunks=7)
    for data in (bytes(buffer), bytes(buffer.array)):
        info = tw.inspect(data)
        parts = list(info.chunk_parts())
        assert sum(part.elements for part in parts) == 100_000
        head = align(info.header.nbytes + 7 * RECORD.itemsize)
        assert parts[0].static_at == head
        assert parts[0].dynamic_at == head + info.static_nbytes
        assert tuple(part.dynamic_nbytes for part in parts) == info.dynamic_nbytes
        for i, part in enumerate(parts):
            piece = np.asarray(buffer.static(i)).tobytes()
            assert data[part.static_at : part.static_at + part.static_nbytes] == piece
            piece = np.asarray(buffer.dynamic(i)).tobytes()[: part.dynamic_nbytes]
            assert data[part.dynamic_at : part.dynamic_at + part.dynamic_nbytes] == piece


def test_an_empty_tensor() -> None:
    info = tw.inspect(bytes(tw.encode(np.empty((0, 3), np.float32), chunks=2)))
    assert sum(part.nbytes for part in info.parts()) == info.nbytes
    assert [part.elements for part in info.chunk_parts()] == [0, 0]


def test_layout_of_a_buffer(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes(tw.encode(mixed(), chunks=20)))
    shown = call(0, path)
    rows = {line.split()[0]: line for line in shown.splitlines() if line.strip()}
    info = tw.inspect(path.read_bytes())
    tiles = next(part.nbytes for part in info.parts() if part.name == "tiles")
    assert f" {tiles:,} " in rows["tiles"]
    assert f"{tiles / info.nbytes:.1%}" in rows["tiles"]
    # Bars are to scale, and each starts where the one above it ends.
    bar = rows["tiles"].count("\u2588") or rows["tiles"].count("#")
    assert abs(bar - 50 * tiles / info.nbytes) <= 1
    assert "... 8 more" in shown
    assert rows["0"].split()[-1] == "raw"
    assert rows["19"].split()[-1] != "raw"
    assert document(path)["parts"] == [part._asdict() for part in info.parts()]


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    tensors = {"z.w": values(60_000).reshape(200, 300), "a.b": values(9_000, np.float32)}
    tensors["ids"] = np.arange(777)
    return write_safetensors(tmp_path / "m.safetensors", tensors, {"format": "pt"})


def test_plain_file(plain: Path) -> None:
    shown = call(0, plain)
    for words in ("z.w bfloat16 200x300 120.0 kB 74.0%", "ids int64 777", "not compressed"):
        assert words in " ".join(shown.split())
    found = document(plain)
    assert [t["name"] for t in found["tensors"]] == ["z.w", "a.b", "ids"]
    assert found["tensors"][0]["shape"] == [200, 300]
    assert (found["compressed"], found["ratio"], found["estimate"]) == (False, 1.0, None)
    assert found["metadata"] == {"format": "pt"}
    assert found["nbytes"] == plain.stat().st_size == sum(p["nbytes"] for p in found["parts"])
    one = document(plain, "--tensor", "a.b")
    assert (one["tensor"], one["shape"], one["codec"]) == ("a.b", [9_000], "plain")
    assert "'nothing'" in call(2, plain, "--tensor", "nothing")


def test_compressed_file_has_parts(plain: Path) -> None:
    target = plain.with_name("m.tw.safetensors")
    convert.compress_file(plain, target)
    found = document(target)
    assert found["compressed"] is True
    assert sum(p["nbytes"] for p in found["parts"]) == target.stat().st_size
    named = {p["name"]: p["nbytes"] for p in found["parts"]}
    tiles = [s["nbytes"] for t in found["tensors"] for s in t["sections"] if s["name"] == "tiles"]
    assert named["tiles"] == sum(tiles)


@pytest.mark.parametrize("n", [0, 1, 50, 1_000_000])
def test_estimate(tmp_path: Path, n: int) -> None:
    """What compressing gives, from a part of the file."""
    tensors = {"w": values(n), "v": values(n // 2, np.float32), "i": np.arange(n // 10)}
    path = write_safetensors(tmp_path / "m.safetensors", tensors, {"format": "pt"})
    found = document(path, "--estimate")["estimate"]
    assert found["codec"] == "zipccl"
    assert found["samples"] <= inspection.SAMPLES
    assert found["sample_nbytes"] <= inspection.SAMPLES * inspection.SAMPLE_NBYTES
    if n == 1_000_000:
        convert.compress_file(path, tmp_path / "c")
        packed = document(tmp_path / "c")["ratio"]
        assert found["ratio"] == pytest.approx(packed, abs=0.01)
        assert f"about {found['ratio']:.0%}" in call(0, path, "--estimate")
    if n == 0:
        assert "save nothing" in call(0, path, "--estimate")


def test_directories(plain: Path) -> None:
    """Compressed and plain files of a directory side by side."""
    folder = plain.with_name("d")
    (folder / "sub").mkdir(parents=True)
    convert.compress_file(plain, folder / "one.tw.safetensors")
    plain.rename(folder / "sub" / "two.safetensors")
    shown = call(0, folder)
    assert "sub/two.safetensors" in shown
    assert "not compressed: 1 of 2" in shown
    found = document(folder)
    assert [f["compressed"] for f in found["files"]] == [True, False]
    assert len(document(folder, "--tensor", "ids")["files"]) == 2
    assert "estimate" in call(0, folder, "--estimate")
    assert "'nothing'" in call(2, folder, "--tensor", "nothing")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "0 bytes"),
        ((1 << 60).to_bytes(8, "little") + b"{}", "header of 1152921504606846976 bytes"),
        ((90 << 20).to_bytes(8, "little") + b"{}", "cut off"),
        (b"import this\n", "not a safetensors file"),
    ],
)
def test_bad_files(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "x").write_bytes(data)
    assert message in call(3, tmp_path / "x")


def test_a_file_that_may_not_be_read(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Any, *args: Any, **options: Any) -> int:
        raise PermissionError(13, "Permission denied", os.fspath(path))

    monkeypatch.setattr(os, "open", refused)
    assert call(4, plain) == f"tightwire: {plain}: Permission denied\n"


def test_an_element_type_that_is_not_known(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(directory_bytes([Entry("odd", "F4", (4,), 0, 2)], {}) + b"ab")
    assert document(path)["tensors"][0]["dtype"] == "F4"
    assert document(path, "--estimate")["estimate"]["samples"] == 0


def test_names_in_the_order_of_the_header(plain: Path) -> None:
    assert list(inspection.plain_tensors(read_header(plain))) == ["z.w", "a.b", "ids"]
