"""Deltas in the layout of slime and ModelExpress: there and back, against their own arithmetic."""

from __future__ import annotations

import errno
import json
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tightwire as tw
from tightwire import delta_folders as folders

N = 30_011
INDEX = "model.safetensors.index.json"
State = dict[str, Any]
FORMS = [("xor", "tightwire"), ("xor", "zstd"), ("overwrite", "zstd")]


@pytest.fixture(autouse=True)
def no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def states() -> list[State]:
    rng = np.random.default_rng(0)
    found = [
        {
            "w": rng.normal(0, 0.02, N).astype(ml_dtypes.bfloat16),
            "fp8": rng.normal(size=999).astype(ml_dtypes.float8_e4m3fn),
            "ids": np.arange(700),
            "../x": np.zeros(3, np.float32),
        }
    ]
    for i in range(3):
        new = {name: x.copy() for name, x in found[-1].items()}
        new["w"].view(np.int16)[rng.integers(0, N, N // 50)] += 1
        new["fp8"].view(np.uint8)[i] ^= 1
        new["../x"][i] = 1
        found.append(new)
    return found


def copied(state: State) -> State:
    return {name: x.copy() for name, x in state.items()}


def same(a: State, b: State) -> bool:
    return all(a[name].tobytes() == b[name].tobytes() for name in a.keys() | b.keys())


def publish(folder: Path, encoding: str, compression: str) -> list[State]:
    if compression == "zstd":
        pytest.importorskip("zstandard")
    made = states()
    for i in (1, 2, 3):
        path = folders.save(
            made[i], made[i - 1], folder, version=i, encoding=encoding, compression=compression
        )
        assert path == folder / f"weight_v{i:06}"
    return made


@pytest.mark.parametrize(("encoding", "compression"), FORMS)
def test_versions_come_back(tmp_path: Path, encoding: str, compression: str) -> None:
    made = publish(tmp_path, encoding, compression)
    for first in range(4):
        for last in range(first, 4):
            tensors = copied(made[first])
            arrays = dict(tensors)
            assert folders.apply(tensors, tmp_path, since=first, version=last) == last
            assert same(tensors, made[last])
            assert all(tensors[name] is x for name, x in arrays.items())
    folder = tmp_path / "weight_v000002"
    assert sorted(p.name for p in folder.iterdir()) == ["model-00000-of-00001.safetensors", INDEX]
    index = json.loads((folder / INDEX).read_text())
    assert index["metadata"] == {
        "version": "000002",
        "base_version": "000001",
        "delta_encoding": encoding,
        "compression_format": compression,
        "checksum_format": "adler32",
    }
    assert sorted(index["weight_map"]) == ["../x", "fp8", "w"]


def receive(folder: Path, state: State, decompress: Callable[[memoryview], Any]) -> None:
    """Apply a folder as the receivers do: written from their description, with nothing of ours."""
    index = json.loads((folder / INDEX).read_text())
    for name, shard in index["weight_map"].items():
        data = (folder / shard).read_bytes()
        size = struct.unpack("<Q", data[:8])[0]
        header = json.loads(data[8 : 8 + size])
        assert header[name]["dtype"] == "U8"
        begin, end = header[name]["data_offsets"]
        reader = decompress(memoryview(data)[8 + size + begin : 8 + size + end])
        target = state[name].view(np.uint8)
        if index["metadata"]["delta_encoding"] == "xor":
            at = 0
            while block := reader.read(1000):
                target[at : at + len(block)] ^= np.frombuffer(block, np.uint8)
                at += len(block)
            assert at == target.size
        else:
            (count,) = struct.unpack("<I", reader.read(4))
            places = np.frombuffer(reader.read(4 * count), "<u4")
            target[places] = np.frombuffer(reader.read(count), np.uint8)
        assert reader.read(1) == b""
        reader.close()
        assert f"{zlib.adler32(target):08x}" == header["__metadata__"][name]


@pytest.mark.parametrize(("encoding", "compression"), FORMS)
def test_receivers_read_them(tmp_path: Path, encoding: str, compression: str) -> None:
    made = publish(tmp_path, encoding, compression)
    tensors = copied(made[0])
    if compression == "zstd":
        import zstandard

        def decompress(data: memoryview) -> Any:
            return zstandard.ZstdDecompressor().stream_reader(data)
    else:
        decompress = folders.decompressor
    for i in (1, 2, 3):
        receive(tmp_path / f"weight_v{i:06}", tensors, decompress)
        assert same(tensors, made[i])


@pytest.mark.plugins
@pytest.mark.parametrize("compression", ["tightwire", "zstd"])
def test_the_receiver_of_modelexpress(tmp_path: Path, compression: str) -> None:
    receiver = pytest.importorskip("modelexpress_rl.inference.receiver", exc_type=ImportError)
    from safetensors.numpy import save_file

    made = [
        {name: s[name] for name in ("ids", "../x")} for s in publish(tmp_path, "xor", compression)
    ]
    plain = tmp_path / "plain.safetensors"
    save_file(made[0], plain)
    data = plain.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    locations = {}
    for name in made[0]:
        begin, end = header[name]["data_offsets"]
        locations[name] = plain, 8 + size + begin, end - begin
    table = receiver._DECOMPRESSORS
    table["tightwire"] = folders.decompressor
    try:
        folder = tmp_path / "weight_v000001"
        version = receiver._S3Version(
            "000001", "000000", receiver.WeightPayloadFormat.XOR_DELTA, "s3://x"
        )
        index = (folder / INDEX).read_bytes()
        metadata, weight_map = receiver._parse_index_manifest(index, is_delta=True, version=version)
        shards: dict[str, Any] = {}
        for name, file in weight_map.items():
            if name in locations:
                shards.setdefault(file, ((folder / file).read_bytes(), []))[1].append(name)
        checkpoint = SimpleNamespace(locations=locations)
        receiver._LocalCheckpoint._apply_shards(checkpoint, shards, index_metadata=metadata)
    finally:
        del table["tightwire"]
    from safetensors.numpy import load_file

    assert same(load_file(plain), made[1])


def test_xor_applies_once(tmp_path: Path) -> None:
    made = publish(tmp_path, "xor", "tightwire")
    tensors = copied(made[2])
    for since in (0, 1):
        with pytest.raises(tw.FormatError, match="not the version before, or have this") as error:
            folders.apply(tensors, tmp_path, since=since, version=2)
        assert error.value.reason == "base_mismatch"
        assert same(tensors, made[2])
    with pytest.raises(ValueError, match="since is 2, after version 1"):
        folders.apply(tensors, tmp_path, since=2, version=1)
    assert folders.apply(tensors, tmp_path, since=3) == 3
    assert same(tensors, made[2])


def test_overwrite_applies_twice(tmp_path: Path) -> None:
    made = publish(tmp_path, "overwrite", "zstd")
    tensors = copied(made[3])
    assert folders.apply(tensors, tmp_path, since=2) == 3
    assert same(tensors, made[3])


def test_a_whole_version_between(tmp_path: Path) -> None:
    made = publish(tmp_path, "xor", "tightwire")
    for path in (tmp_path / "weight_v000002").iterdir():
        path.unlink()
    tw.save_file(made[2], tmp_path / "weight_v000002" / "model.tw.safetensors")
    tensors = copied(made[0])
    assert folders.apply(tensors, tmp_path, since=0) == 3
    assert same(tensors, made[3])


def test_versions_against_one_that_is_not_the_one_before(tmp_path: Path) -> None:
    made = states()
    for version, base, new in [(2, 0, 1), (5, 2, 2), (7, 0, 3)]:
        old = made[{0: 0, 2: 1}[base]]
        options: Any = {"version": version, "base_version": base, "compression": "tightwire"}
        folders.save(made[new], old, tmp_path, **options)
    for since, goal, known, wanted in [(0, 5, 0, 2), (2, 5, 1, 2), (0, None, 0, 3)]:
        tensors = copied(made[known])
        assert folders.apply(tensors, tmp_path, since=since, version=goal) == (goal or 7)
        assert same(tensors, made[wanted])
    tensors = copied(made[1])
    with pytest.raises(ValueError, match=r"from version 2 to 7 .*weight_v000007 is against 0"):
        folders.apply(tensors, tmp_path, since=2)
    with pytest.raises(ValueError, match="has no version 6"):
        folders.apply(tensors, tmp_path, since=2, version=6)
    assert same(tensors, made[1])


def test_tied_names(tmp_path: Path) -> None:
    old = np.zeros(3000, np.float32)
    new = old.copy()
    new[7] = 1
    folders.save(
        {"a": new, "b": new}, {"a": old, "b": old}, tmp_path, version=1, compression="tightwire"
    )
    tied, apart = old.copy(), {"a": old.copy(), "b": old.copy()}
    folders.apply({"a": tied, "b": tied}, tmp_path, since=0)
    folders.apply(apart, tmp_path, since=0)
    assert all(np.array_equal(x, new) for x in (tied, *apart.values()))


def test_nothing_changed(tmp_path: Path) -> None:
    state = states()[0]
    folder = folders.save(state, state, tmp_path, version=1, compression="tightwire")
    assert [p.name for p in folder.iterdir()] == [INDEX]
    assert folders.apply(copied(state), tmp_path, since=0) == 1


@pytest.mark.parametrize("name", ["fsync", "replace", "rename"])
def test_a_failing_save_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    made = states()

    def failing(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, name, failing)
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            folders.save(made[1], made[0], tmp_path, version=1, compression="tightwire")
    assert [p.name for p in tmp_path.iterdir()] == [".tightwire.lock"]
    folders.save(made[1], made[0], tmp_path, version=1, compression="tightwire")
    with pytest.raises(FileExistsError, match="written once"):
        folders.save(made[1], made[0], tmp_path, version=1, compression="tightwire")


METADATA: dict[str, list[Any]] = {
    "version": ["000002", 1, None, "x", "1" * 30],
    "base_version": ["000001", 0, None],
    "delta_encoding": ["add", 7, None],
    "compression_format": ["gzip", None],
    "checksum_format": ["md5", None],
}


@pytest.mark.parametrize(("key", "value"), [(k, v) for k, vs in METADATA.items() for v in vs])
def test_hostile_metadata(tmp_path: Path, key: str, value: Any) -> None:
    made = publish(tmp_path, "xor", "tightwire")
    path = tmp_path / "weight_v000001" / INDEX
    index = json.loads(path.read_text())
    index["metadata"][key] = value
    path.write_text(json.dumps(index))
    tensors = copied(made[0])
    with pytest.raises(tw.FormatError):
        folders.apply(tensors, tmp_path, since=0)
    assert same(tensors, made[0])


@pytest.mark.parametrize(
    "shard", ["../x.safetensors", "/etc/x.safetensors", "a\\b.safetensors", ".."]
)
def test_names_of_files_stay_in_the_folder(tmp_path: Path, shard: str) -> None:
    made = publish(tmp_path, "xor", "tightwire")
    path = tmp_path / "weight_v000001" / INDEX
    index = json.loads(path.read_text())
    index["weight_map"]["w"] = shard
    path.write_text(json.dumps(index))
    with pytest.raises(tw.FormatError, match="allowed: paths of safetensors files in this"):
        folders.apply(copied(made[0]), tmp_path, since=0)


@pytest.mark.parametrize(("encoding", "compression"), FORMS)
def test_damage_changes_nothing(tmp_path: Path, encoding: str, compression: str) -> None:
    made = publish(tmp_path, encoding, compression)
    (path,) = (tmp_path / "weight_v000002").glob("*.safetensors")
    data = path.read_bytes()
    start = 8 + struct.unpack("<Q", data[:8])[0]
    rng = np.random.default_rng(1)
    for at in [*rng.integers(start, len(data), 40).tolist(), start, len(data) - 1]:
        path.write_bytes(data[:at] + bytes([data[at] ^ 0x21]) + data[at + 1 :])
        tensors = copied(made[0])
        try:
            folders.apply(tensors, tmp_path, since=0)
        except tw.FormatError:
            assert same(tensors, made[0])
        else:
            assert same(tensors, made[3])


def test_hostile_overwrites(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    made = publish(tmp_path, "overwrite", "zstd")
    path = tmp_path / "weight_v000001" / "model-00000-of-00001.safetensors"
    from safetensors.numpy import save_file

    index = tmp_path / "weight_v000001" / INDEX
    fields = json.loads(index.read_text())
    fields["weight_map"] = {"ids": path.name}
    index.write_text(json.dumps(fields))
    for payload in (
        struct.pack("<I", 2**32 - 1),
        struct.pack("<II", 1, 5600) + b"x",
        struct.pack("<II", 1, 0),
        struct.pack("<II", 1, 0) + b"xy",
        b"",
        bytes(1 << 24),
    ):
        packed = np.frombuffer(zstandard.ZstdCompressor().compress(payload), np.uint8)
        save_file({"ids": packed}, path, metadata={"ids": "00000000"})
        tensors = copied(made[0])
        with pytest.raises(tw.FormatError) as error:
            folders.apply(tensors, tmp_path, since=0, version=1)
        assert error.value.reason in ("bad_container", "base_mismatch")
        assert same(tensors, made[0])


def test_a_payload_of_another_size(tmp_path: Path) -> None:
    made = publish(tmp_path, "xor", "tightwire")
    tensors = copied(made[0])
    tensors["w"] = tensors["w"][:-1]
    with pytest.raises(tw.FormatError):
        folders.apply(tensors, tmp_path, since=0)
    del tensors["w"]
    with pytest.raises(ValueError, match="changes 'w', which target has not"):
        folders.apply(tensors, tmp_path, since=0)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"version": 0}, ValueError),
        ({"version": 3, "base_version": 3}, ValueError),
        ({"version": 1, "encoding": "add"}, ValueError),
        ({"version": 1, "compression": "gzip"}, ValueError),
        ({"version": 1, "checksum": "md5"}, ValueError),
        ({"version": 1, "encoding": "overwrite"}, ValueError),
    ],
)
def test_bad_arguments(tmp_path: Path, options: Any, error: type[Exception]) -> None:
    made = states()
    with pytest.raises(error):
        folders.save(made[1], made[0], tmp_path / "x", **{"compression": "tightwire"} | options)
    assert not (tmp_path / "x").exists()


def test_states_that_do_not_go_together(tmp_path: Path) -> None:
    made = states()
    for change in ({"new": np.ones(3)}, {"ids": np.arange(3)}):
        with pytest.raises(ValueError, match="is new, gone or of another"):
            folders.save(made[1] | change, made[0], tmp_path, version=1, compression="tightwire")
    publish(tmp_path, "xor", "tightwire")
    with pytest.raises(ValueError, match="has no version 5"):
        folders.apply(made[0], tmp_path, since=0, version=5)
