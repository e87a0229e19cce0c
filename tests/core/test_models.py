"""Directories of models: byte for byte back, resumed after a kill, and nothing is overwritten."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tightwire as tw
from support import examples
from tightwire import convert, directories, models
from tightwire.formats.dtypes import BY_NAME
from tightwire.model_index import PLAIN_SUFFIX, SUFFIX, compressed_name, with_suffix

safetensors = pytest.importorskip("safetensors.numpy")

Shards = Mapping[str, Mapping[str, Any]]
INDEX = "model.safetensors.index.json"


def weights(*shape: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.float32]]:
    values = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return values * np.float32(0.02)


def write(path: Path, tensors: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    safetensors.save_file(dict(tensors), path, metadata={"format": "pt"})
    # Not the time of a copy made now, and not in whole seconds.
    os.utime(path, ns=(10**18 + 123_456_789,) * 2)


def write_sharded(folder: Path, shards: Shards, index: str = INDEX) -> None:
    for name, tensors in shards.items():
        write(folder / name, tensors)
    weight_map = {tensor: name for name, tensors in shards.items() for tensor in tensors}
    text = json.dumps({"metadata": {"total_size": 7}, "weight_map": weight_map}, indent=2)
    (folder / index).write_text(text + "\n", encoding="utf-8")


SHARDS: dict[str, dict[str, Any]] = {
    "model-00001-of-00002.safetensors": {
        "embed": weights(300, 40),
        "ids": np.arange(900),
        # A tensor with the name of a file.
        "model-00002-of-00002.safetensors": weights(700, seed=1),
    },
    "model-00002-of-00002.safetensors": {"head": weights(250, 40, seed=2), "s": np.ones(3)},
}
TENSORS = {name: x for tensors in SHARDS.values() for name, x in tensors.items()}


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A model of two shards and what lies beside them."""
    folder = tmp_path / "model"
    write_sharded(folder, SHARDS)
    (folder / "config.json").write_text('{"a": 1}')
    (folder / "empty").touch()
    (folder / ".gitattributes").write_text("x")
    (folder / "run.sh").write_text("#!/bin/sh")
    (folder / "run.sh").chmod(0o750)
    os.utime(folder / "run.sh", ns=(10**18 + 1,) * 2)
    return folder


def contents(folder: Path) -> dict[str, bytes | None]:
    """All files and folders below a directory; None for a folder."""
    found: dict[str, bytes | None] = {}
    for at, folders, files in os.walk(folder, followlinks=True):
        inside = Path(at).relative_to(folder)
        found |= {str(inside / name): None for name in folders}
        found |= {str(inside / name): Path(at, name).read_bytes() for name in files}
    return found


def stamps(folder: Path) -> dict[str, tuple[int, int]]:
    """What changes when a file is written."""
    found = ((p, p.stat()) for p in sorted(folder.rglob("*")) if p.is_file())
    return {str(p.relative_to(folder)): (s.st_ino, s.st_ctime_ns) for p, s in found}


def check_loaded(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    assert set(found) == set(expected)
    for name, x in expected.items():
        assert (found[name].dtype, found[name].shape) == (x.dtype, x.shape)
        assert found[name].tobytes() == x.tobytes()


def check_round_trip(source: Path) -> Path:
    """Compress, verify, compare and restore a directory; returns the compressed one."""
    packed, restored = source.with_name("packed"), source.with_name("restored")
    directories.compress_directory(source, packed)
    directories.verify_directory(packed)
    assert directories.diff_directories(source, packed) == []
    directories.decompress_directory(packed, restored)
    assert contents(restored) == contents(source)
    for path in (p for p in source.rglob("*") if p.is_file()):
        was, now = path.stat(), (restored / path.relative_to(source)).stat()
        assert stat.S_IMODE(now.st_mode) == stat.S_IMODE(was.st_mode)
        assert now.st_mtime_ns == was.st_mtime_ns
    return packed


# Layouts


def test_sharded(sharded: Path) -> None:
    packed = check_round_trip(sharded)
    index = json.loads((packed / INDEX).read_text())
    assert index["metadata"] == {"total_size": 7}
    names = {t: n.replace(".safe", ".tw.safe") for n, ts in SHARDS.items() for t in ts}
    assert index["weight_map"] == names
    assert (packed / "config.json").read_bytes() == (sharded / "config.json").read_bytes()
    assert not list(packed.rglob("*.tmp"))
    check_loaded(tw.load(packed), TENSORS)


def test_one_file_gets_an_index(tmp_path: Path) -> None:
    write(tmp_path / "a" / "model.safetensors", {"x": weights(99, 9), "y": np.arange(5)})
    packed = check_round_trip(tmp_path / "a")
    index = json.loads((packed / INDEX).read_text())
    assert index["weight_map"] == dict.fromkeys(("x", "y"), "model.tw.safetensors")
    assert index["metadata"]["total_size"] == 99 * 9 * 4 + 5 * 8


def test_sub_folders(tmp_path: Path) -> None:
    source = tmp_path / "pipe"
    single = "diffusion_pytorch_model.safetensors"
    write(source / "vae" / single, {"x": weights(1000)})
    write(source / "text" / "model.safetensors", {"x": weights(1001)})
    variant = "diffusion_pytorch_model.safetensors.index.fp16.json"
    shard = "diffusion_pytorch_model.fp16-00001-of-00001.safetensors"
    write_sharded(source / "unet" / "deep", {shard: {"x": weights(1002)}}, variant)
    (source / "nothing").mkdir()
    (source / "model_index.json").write_text("{}")
    packed = check_round_trip(source)
    found = {p.relative_to(packed).as_posix() for p in packed.rglob("*.index*.json")}
    assert found == {f"vae/{single}.index.json", f"text/{INDEX}", f"unet/deep/{variant}"}
    check_loaded(tw.load(packed / "vae"), {"x": weights(1000)})
    check_loaded(tw.load(packed / "unet" / "deep"), {"x": weights(1002)})
    with pytest.raises(FileNotFoundError, match="sub-folder"):
        tw.load(packed)


def test_shards_beside_the_model(sharded: Path) -> None:
    write(sharded / "consolidated.safetensors", {"embed": weights(300, 40)})
    packed = check_round_trip(sharded)
    assert (packed / "consolidated.tw.safetensors").exists()
    check_loaded(tw.load(packed), TENSORS)


def test_links_are_followed(tmp_path: Path) -> None:
    """As in the cache of huggingface_hub: files are links to blobs."""
    snapshot, blobs = tmp_path / "snapshots" / "main", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    write(blobs / "0a1b", {"x": weights(1000)})
    (blobs / "2c").write_text("{}")
    (snapshot / "model.safetensors").symlink_to("../../blobs/0a1b")
    (snapshot / "config.json").symlink_to("../../blobs/2c")
    (snapshot / "extra").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "notes").write_text("n")
    packed = check_round_trip(snapshot)
    assert not any(p.is_symlink() for p in packed.rglob("*"))
    check_loaded(tw.load(packed), {"x": weights(1000)})


@pytest.mark.parametrize("to", [".", "..", "sub"])
def test_a_loop_of_links_is_refused(sharded: Path, to: str) -> None:
    (sharded / "sub").mkdir()
    (sharded / "sub" / "loop").symlink_to(sharded / to, target_is_directory=True)
    target = sharded.parent.parent / f"{sharded.parent.name}-target"
    with pytest.raises(ValueError, match="a link to a folder above it"):
        directories.compress_directory(sharded if to != ".." else sharded.parent, target)
    assert not target.exists()


def test_what_is_left_out(sharded: Path) -> None:
    expected = contents(sharded)
    for folder in (".git", ".cache"):
        write(sharded / folder / "x.safetensors", {"x": weights(3)})
    (sharded / f".model.safetensors.{'0' * 16}.tmp").write_bytes(b"half")
    directories.compress_directory(sharded, sharded.with_name("packed"))
    directories.decompress_directory(sharded.with_name("packed"), sharded.with_name("restored"))
    assert contents(sharded.with_name("restored")) == expected


@pytest.mark.parametrize(
    "text",
    [
        '{"weight_map":{"embed":"SHARD","ids":"SHARD"}}',
        '{ "weight_map" :\r\n{"embed"\t:\t"SHARD", "ids" : "SHARD" } , "metadata": {"n": 1e3}}\n\n',
        '{"metadata": {"main": "SHARD", "é\\"\\u00e9": ["SHARD", null]}, '
        '"weight_map": {"embed": "SHARD", "ids": "SHARD"}}',
    ],
)
@pytest.mark.parametrize("shard", ["model.safetensors", "sub/Übung #1 \U0001f600.safetensors"])
def test_texts_of_an_index(tmp_path: Path, text: str, shard: str) -> None:
    source = tmp_path / "m"
    write(source / shard, {"embed": weights(500), "ids": np.arange(5)})
    (source / INDEX).write_bytes(text.replace("SHARD", shard).encode())
    packed = check_round_trip(source)
    check_loaded(tw.load(packed), {"embed": weights(500), "ids": np.arange(5)})


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=8), st.booleans())
def test_names_in_an_index_come_back(name: str, escaped: bool) -> None:
    shard = f"{name}.safetensors"
    fields = {"weight_map": {shard: shard, "b": "c.safetensors", "c": 'x"\\'}, "d": [name]}
    text = json.dumps(fields, ensure_ascii=escaped)
    names = {shard: compressed_name(shard)}
    packed = with_suffix(text, names, PLAIN_SUFFIX, SUFFIX)
    found = json.loads(packed)["weight_map"]
    assert found == {shard: names[shard], "b": "c.safetensors", "c": 'x"\\'} or name == "c"
    back = with_suffix(packed, names.values(), SUFFIX, PLAIN_SUFFIX)
    assert back == text


# Bad input


@pytest.mark.parametrize(
    ("name", "error", "match"),
    [
        ("../model.safetensors", tw.FormatError, "allowed: paths"),
        ("/etc/model.safetensors", tw.FormatError, "allowed: paths"),
        ("a\\..\\b.safetensors", tw.FormatError, "allowed: paths"),
        ("pytorch_model.bin", tw.FormatError, "allowed: paths"),
        (7, tw.FormatError, "expected a text"),
        ("none.safetensors", FileNotFoundError, "none.safetensors"),
        (".cache/x.safetensors", ValueError, "left out"),
    ],
)
def test_bad_names_of_shards(sharded: Path, name: Any, error: Any, match: str) -> None:
    write(sharded.parent / "model.safetensors", {"embed": weights(3)})
    write(sharded / ".cache" / "x.safetensors", {"embed": weights(3)})
    (sharded / INDEX).write_text(json.dumps({"weight_map": {"embed": name}}))
    target = sharded.with_name("packed")
    with pytest.raises(error, match=match):
        directories.compress_directory(sharded, target)
    assert not target.exists()


@pytest.mark.parametrize(
    "text",
    [
        *(b"", b"[]", b"{}", b'{"weight_map": []}', b"\xff", b"[" * 100_000, b'{"a":1,"a":2}'),
        b'{"weight_map":{"embed":"x"},"metadata":[' + b"[]," * (1 << 19) + b"0]}",
        b'{"weight_map":{"ids":"\\ud800.safetensors"}}',
    ],
)
def test_bad_indexes(sharded: Path, text: bytes) -> None:
    (sharded / INDEX).write_bytes(text)
    with pytest.raises(tw.FormatError, match=INDEX) as raised:
        directories.compress_directory(sharded, sharded.with_name("packed"))
    assert raised.value.reason == "bad_container"


@examples(200)
@given(st.integers(0, 10_000), st.integers(1, 255))
def test_damaged_indexes(packed_once: Path, at: int, flipped: int) -> None:
    """The tensors, or an error; never a file outside of the directory."""
    index = packed_once / INDEX
    whole = index.read_bytes()
    data = bytearray(whole)
    data[at % len(data)] ^= flipped
    index.write_bytes(data)
    try:
        check_loaded(tw.load(packed_once), TENSORS)
    except (tw.FormatError, FileNotFoundError):
        pass
    finally:
        index.write_bytes(whole)


@pytest.fixture(scope="module")
def packed_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("damaged")
    write_sharded(folder / "model", SHARDS)
    directories.compress_directory(folder / "model", folder / "packed")
    return folder / "packed"


def test_dangling_links_and_pipes(sharded: Path) -> None:
    for make in (os.mkfifo, lambda path: os.symlink("nowhere", path)):
        make(sharded / "odd")
        with pytest.raises(OSError, match="odd"):
            directories.compress_directory(sharded, sharded.with_name("packed"))
        (sharded / "odd").unlink()
    assert not sharded.with_name("packed").exists()


def test_an_index_that_could_not_be_restored(sharded: Path) -> None:
    text = (sharded / INDEX).read_text()
    (sharded / INDEX).write_text(
        text.replace('of-00002.safetensors"', 'of-00002.s\\u0061fetensors"')
    )
    with pytest.raises(ValueError, match="could not restore"):
        directories.compress_directory(sharded, sharded.with_name("packed"))
    (sharded / INDEX).write_text(text.replace("7", '"model-00001-of-00002.tw.safetensors"'))
    with pytest.raises(ValueError, match="could not restore"):
        directories.compress_directory(sharded, sharded.with_name("packed"))


def test_directories_without_a_model(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "file").touch()
    calls: list[Any] = [directories.compress_directory, directories.decompress_directory]
    for call in calls:
        with pytest.raises(FileNotFoundError, match="holds no"):
            call(tmp_path / "a", tmp_path / "b")
        with pytest.raises(FileNotFoundError):
            call(tmp_path / "none", tmp_path / "b")
        with pytest.raises(NotADirectoryError):
            call(tmp_path / "file", tmp_path / "b")
    for read in (directories.verify_directory, directories.inspect_directory, tw.load):
        with pytest.raises(FileNotFoundError, match="holds no"):
            read(tmp_path / "a")
    assert not (tmp_path / "b").exists()


def test_compressed_shards_are_refused(sharded: Path) -> None:
    convert.compress_file(sharded / "model-00001-of-00002.safetensors", sharded / "x.safetensors")
    with pytest.raises(tw.FormatError, match=r"x\.safetensors: compressed already"):
        directories.compress_directory(sharded, sharded.with_name("packed"))
    assert not sharded.with_name("packed").exists()


def test_damage_names_the_file(sharded: Path) -> None:
    packed = sharded.with_name("packed")
    directories.compress_directory(sharded, packed)
    shard = packed / "model-00002-of-00002.tw.safetensors"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    for call in (directories.verify_directory, tw.load):
        with pytest.raises(tw.FormatError) as raised:
            call(packed)
        assert str(raised.value).count("model-00002-of-00002.tw.safetensors: ") == 1
    with pytest.raises(tw.FormatError, match=r"model-00002-of-00002\.tw\.safetensors"):
        directories.decompress_directory(packed, sharded.with_name("restored"))
    # What came before is whole, and the index is not there.
    restored = contents(sharded.with_name("restored"))
    assert INDEX not in restored
    assert all(contents(sharded)[name] == data for name, data in restored.items())


def test_verify_checks_the_index(sharded: Path) -> None:
    packed = sharded.with_name("packed")
    directories.compress_directory(sharded, packed)
    text = (packed / INDEX).read_text()
    (packed / INDEX).write_text(text.replace('"head"', '"body"'))
    for call in (directories.verify_directory, tw.load):
        with pytest.raises(tw.FormatError, match=r"'body' is not in model-00002-of-00002\.tw"):
            call(packed)


def test_directories_in_one_another(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = contents(sharded.parent)
    (sharded.parent / "link").symlink_to(sharded, target_is_directory=True)
    monkeypatch.chdir(sharded)
    targets: list[Any] = [
        sharded,
        sharded / "out",
        sharded / "a" / "..",
        sharded.parent,
        ".",
        "..",
        "../link",
    ]
    for target in targets:
        with pytest.raises(ValueError, match="the same, or one lies in the other"):
            directories.compress_directory(sharded, target)
        with pytest.raises(ValueError, match="the same, or one lies in the other"):
            directories.compress_directory(".", target)
    (sharded.parent / "link").unlink()
    assert contents(sharded.parent) == before


def test_relative_paths(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(sharded)
    directories.compress_directory(".", "../packed/")
    directories.decompress_directory("../packed/", "../restored")
    assert contents(sharded.with_name("restored")) == contents(sharded)


# What is there already


def test_nothing_uncompressed_is_overwritten(sharded: Path) -> None:
    packed, restored = sharded.with_name("packed"), sharded.with_name("restored")
    directories.compress_directory(sharded, packed)
    obstacles = {
        sharded: ["model-00001-of-00002.tw.safetensors", "config.json", INDEX],
        packed: ["model-00001-of-00002.safetensors", "config.json", INDEX],
    }
    plain = (sharded / "model-00002-of-00002.safetensors").read_bytes()
    for source, names in obstacles.items():
        what = "compress_directory" if source == sharded else "decompress_directory"
        for name in names:
            for data in (plain, b"mine"):
                restored.mkdir()
                (restored / name).write_bytes(data)
                with pytest.raises(FileExistsError) as raised:
                    getattr(directories, what)(source, restored, force=True)
                assert raised.value.filename == str(restored / name)
                assert contents(restored) == {name: data}
                shutil.rmtree(restored)


@pytest.mark.parametrize("name", ["config.json", "model-00001-of-00002.tw.safetensors"])
def test_obstacles_of_other_kinds(sharded: Path, name: str) -> None:
    packed = sharded.with_name("packed")
    packed.mkdir()
    (packed / name).mkdir()
    with pytest.raises(FileExistsError):
        directories.compress_directory(sharded, packed, force=True)
    (packed / name).rmdir()
    (packed / name).symlink_to("nowhere")
    with pytest.raises(FileExistsError):
        directories.compress_directory(sharded, packed)
    shutil.rmtree(packed)
    packed.write_text("a file")
    with pytest.raises(NotADirectoryError):
        directories.compress_directory(sharded, packed, force=True)
    assert packed.read_text() == "a file"
    with pytest.raises(FileNotFoundError, match="create it first"):
        directories.compress_directory(sharded, sharded.with_name("none") / "packed")


def test_an_input_is_not_overwritten(sharded: Path) -> None:
    packed, target = sharded.with_name("packed"), sharded.with_name("target")
    directories.compress_directory(sharded, packed)
    before = contents(packed)
    target.mkdir()
    link = target / "model-00001-of-00002.safetensors"
    link.symlink_to(packed / "model-00001-of-00002.tw.safetensors")
    with pytest.raises(FileExistsError, match="is an input itself"):
        directories.decompress_directory(packed, target, force=True)
    assert contents(packed) == before


def test_two_inputs_for_one_target(sharded: Path) -> None:
    packed = sharded.with_name("packed")
    directories.compress_directory(sharded, packed)
    shutil.copy(sharded / "model-00001-of-00002.safetensors", packed)
    with pytest.raises(ValueError, match="both be written there"):
        directories.decompress_directory(packed, sharded.with_name("restored"))


def test_a_disk_that_is_too_small(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status = os.statvfs(sharded)
    fields = list(status)
    fields[4] = 1  # f_bavail
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(fields))
    packed = sharded.with_name("packed")
    with pytest.raises(OSError, match="bytes at least") as raised:
        directories.compress_directory(sharded, packed)
    assert raised.value.errno == errno.ENOSPC
    assert not packed.exists()
    fields[4] = 1 << 30
    directories.compress_directory(sharded, packed)


def test_errors_of_the_disk_name_the_file(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(errno.EIO, "io")))
    packed = sharded.with_name("packed")
    with pytest.raises(OSError, match="Input/output error") as raised:
        directories.compress_directory(sharded, packed)
    assert Path(raised.value.filename).parent == packed
    assert contents(packed) == {}


# Again, and after a kill


def test_a_second_run_writes_nothing(sharded: Path) -> None:
    packed, restored = sharded.with_name("packed"), sharded.with_name("restored")
    write(sharded / "sub" / "model.safetensors", {"x": weights(1000)})
    directories.compress_directory(sharded, packed)
    directories.decompress_directory(packed, restored)
    calls: list[Any] = [
        (sharded, packed, directories.compress_directory),
        (packed, restored, directories.decompress_directory),
    ]
    for source, target, call in calls:
        before = stamps(target)
        told: list[int] = []
        report = call(source, target, progress=lambda name, nbytes, told=told: told.append(nbytes))
        assert all(shard.done_before for shard in report.shards)
        assert told == []
        assert stamps(target) == before


KILLED = """
import os, signal, sys
from tightwire import directories
seen = 0

def progress(name, nbytes):
    global seen
    seen += 1
    if seen == int(sys.argv[4]):
        os.kill(os.getpid(), signal.SIGKILL)

getattr(directories, sys.argv[1])(sys.argv[2], sys.argv[3], progress=progress)
"""


@pytest.mark.slow
@pytest.mark.parametrize("what", ["compress_directory", "decompress_directory"])
@pytest.mark.parametrize("after", [1, 4])
def test_kill_and_resume(sharded: Path, what: str, after: int) -> None:
    """Killed in the first shard, or in the second."""
    expected, target, source = sharded.with_name("expected"), sharded.with_name("target"), sharded
    if what == "decompress_directory":
        source = sharded.with_name("packed")
        directories.compress_directory(sharded, source)
    call = getattr(directories, what)
    call(source, expected)
    words = [sys.executable, "-c", KILLED, what, str(source), str(target), str(after)]
    assert subprocess.run(words, timeout=120).returncode == -signal.SIGKILL
    assert list(target.glob(".*.tmp"))
    assert not (target / INDEX).exists()
    for path in target.glob("[!.]*"):
        assert path.read_bytes() == (expected / path.name).read_bytes()
    before = stamps(target)
    report = call(source, target)
    assert [shard.done_before for shard in report.shards] == [after == 4, False]
    assert contents(target) == contents(expected)
    now = stamps(target)
    assert all(now[name] == stamp for name, stamp in before.items() if not name.endswith(".tmp"))


@pytest.mark.parametrize(
    "options", [{"codec": "raw"}, {"codec": tw.codec("zipccl", window="sigma")}, "cast", "source"]
)
def test_other_shards_are_replaced_by_force_alone(sharded: Path, options: Any) -> None:
    packed = sharded.with_name("packed")
    directories.compress_directory(sharded, packed)
    if options == "source":
        write(
            sharded / "model-00002-of-00002.safetensors",
            {"head": weights(250, 40, seed=9), "s": np.ones(4)},
        )
    if not isinstance(options, dict):
        options = {"cast": BY_NAME["bfloat16"]} if options == "cast" else {}
    before = contents(packed)
    with pytest.raises(FileExistsError, match="force replaces it") as raised:
        directories.compress_directory(sharded, packed, **options)
    assert Path(raised.value.filename).name.startswith("model-0000")
    assert contents(packed) == before
    directories.compress_directory(sharded, packed, **options, force=True)
    fresh = sharded.with_name("fresh")
    directories.compress_directory(sharded, fresh, **options)
    assert contents(packed) == contents(fresh)
    report = directories.compress_directory(sharded, packed, **options)
    assert all(shard.done_before for shard in report.shards)


def test_a_source_that_changed_is_noticed(sharded: Path) -> None:
    """Of the same header and size, but written at another time."""
    packed = sharded.with_name("packed")
    directories.compress_directory(sharded, packed)
    shard = sharded / "model-00002-of-00002.safetensors"
    write(shard, {"head": weights(250, 40, seed=9), "s": np.ones(3)})
    os.utime(shard, ns=(10**18 + 123_456_790,) * 2)
    with pytest.raises(FileExistsError, match=r"model-00002-of-00002\.tw\.safetensors"):
        directories.compress_directory(sharded, packed)
    report = directories.compress_directory(sharded, packed, force=True)
    assert [shard.done_before for shard in report.shards] == [True, False]
    assert directories.diff_directories(sharded, packed) == []


def test_leftovers(sharded: Path) -> None:
    packed = sharded.with_name("packed")
    packed.mkdir()
    digits = "0123456789abcdef"
    left = packed / f".model-00001-of-00002.tw.safetensors.{digits}.tmp"
    used = packed / f".config.json.{digits}.tmp"
    others = [f".other.json.{digits}.tmp", ".config.json.tmp", f"config.json.{digits}.tmp"]
    for path in (left, used, *(packed / name for name in others)):
        path.write_bytes(b"half")
        os.utime(path, (1, 1))
    with used.open("rb") as file:
        # As a process that is still writing it.
        fcntl.flock(file, fcntl.LOCK_EX)
        directories.compress_directory(sharded, packed)
    assert not left.exists()
    assert all(path.exists() for path in (used, *(packed / name for name in others)))


# Comparing and inspecting


def test_diff(sharded: Path) -> None:
    packed = sharded.with_name("packed")
    directories.compress_directory(sharded, packed)
    one = sharded.with_name("one.safetensors")
    write(one, TENSORS)
    for a, b in [(one, packed), (packed, one), (sharded, one), (packed, sharded)]:
        assert directories.diff_directories(a, b) == []
    write(one, TENSORS | {"head": weights(250, 40, seed=3), "new": np.ones(9)})
    found = directories.diff_directories(packed, one)
    assert [(d.name, d.what) for d in found if d.n_elements is None] == [("new", f"only in {one}")]
    assert [d.name for d in found if d.n_elements] == ["head"]


def test_inspect(sharded: Path) -> None:
    packed = sharded.with_name("packed")
    directories.compress_directory(sharded, packed)
    found = directories.inspect_directory(packed)
    assert [path.name for path in found] == sorted(map(compressed_name, SHARDS))
    assert {name for _, infos in found.values() for name in infos} == set(TENSORS)
    [(path, (_, infos))] = directories.inspect_directory(packed, "head").items()
    assert (path.name, list(infos)) == ("model-00002-of-00002.tw.safetensors", ["head"])
    with pytest.raises(ValueError, match="'nothing'"):
        directories.inspect_directory(packed, "nothing")


# load and save


def test_load_takes_files_too(tmp_path: Path) -> None:
    tw.save_file({"a": {"b": np.arange(5)}}, tmp_path / "x")
    found = tw.load(tmp_path / "x")
    assert found["a"]["b"].tolist() == list(range(5))
    assert tw.load((tmp_path / "x").read_bytes())["a"]["b"].tolist() == list(range(5))


def test_load_refuses_plain_shards(sharded: Path) -> None:
    with pytest.raises(tw.FormatError, match="tightwire compress"):
        tw.load(sharded)
    packed = sharded.with_name("packed")
    directories.compress_directory(sharded, packed)
    shutil.copy(sharded / "model-00002-of-00002.safetensors", packed / "model-x.safetensors")
    text = (packed / INDEX).read_text()
    name = '"model-00002-of-00002.tw.safetensors"'
    (packed / INDEX).write_text(text.replace(f": {name}", ': "model-x.safetensors"'))
    with pytest.raises(tw.FormatError, match=r"model-x\.safetensors: not compressed"):
        tw.load(packed)


def test_load_refuses_what_is_not_one_model(sharded: Path) -> None:
    packed = sharded.with_name("packed")
    directories.compress_directory(sharded, packed)
    (packed / "model-00001-of-00002.tw.safetensors").rename(sharded.parent / "kept")
    with pytest.raises(FileNotFoundError, match=r"model-00001-of-00002\.tw\.safetensors"):
        tw.load(packed)
    (sharded.parent / "kept").rename(packed / "model-00001-of-00002.tw.safetensors")
    (packed / INDEX).rename(packed / "away")
    with pytest.raises(FileNotFoundError, match=INDEX):
        tw.load(packed)
    (packed / "model-00001-of-00002.tw.safetensors").rename(packed / "a.tw.safetensors")
    (packed / "model-00002-of-00002.tw.safetensors").rename(packed / "b.tw.safetensors")
    check_loaded(tw.load(packed), TENSORS)
    shutil.copy(packed / "a.tw.safetensors", packed / "c.tw.safetensors")
    with pytest.raises(tw.FormatError, match=r"is in .*a\.tw\.s.* and in .*c\.tw\.s"):
        tw.load(packed)


@pytest.mark.parametrize("limit", [1, 60_000, 5 * 10**9])
def test_save_and_load(tmp_path: Path, limit: int) -> None:
    tied = TENSORS | {"tied": TENSORS["embed"]}
    folder = tmp_path / "new" / "model"
    tw.save(tied, folder, max_shard_nbytes=limit)
    n = {1: 5, 60_000: 2, 5 * 10**9: 1}[limit]
    names = [f"model-{i:05}-of-{n:05}.tw.safetensors" for i in range(1, n + 1)]
    names = names if n > 1 else ["model.tw.safetensors"]
    assert sorted(contents(folder)) == sorted([*names, INDEX])
    index = json.loads((folder / INDEX).read_text())
    assert list(dict.fromkeys(index["weight_map"][name] for name in TENSORS)) == names
    assert set(index["weight_map"]) == set(TENSORS)
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in TENSORS.values())
    loaded = tw.load(folder)
    check_loaded(loaded, tied)
    assert loaded["tied"] is loaded["embed"]
    with tw.open(folder / names[0]) as file:
        assert file.metadata == {"format": "pt"}
    directories.verify_directory(folder)
    directories.decompress_directory(folder, tmp_path / "plain")
    assert (tmp_path / "plain" / INDEX).exists() == (n > 1)
    assert directories.diff_directories(tmp_path / "plain", folder)[0].name == "tied"


def test_save_replaces_only_what_it_may(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    tw.save(TENSORS, folder, max_shard_nbytes=60_000)
    (folder / "config.json").write_text("{}")
    before = contents(folder)
    taken = tmp_path / "taken"
    taken.write_bytes(b"mine")
    with pytest.raises(FileExistsError, match="save writes a directory, save_file a file"):
        tw.save({"x": np.arange(3)}, taken)
    assert taken.read_bytes() == b"mine"
    with pytest.raises(FileExistsError, match="overwrite=True"):
        tw.save({"x": np.arange(5)}, folder)
    assert contents(folder) == before
    tw.save({"x": np.arange(5)}, folder, overwrite=True)
    assert sorted(contents(folder)) == ["config.json", INDEX, "model.tw.safetensors"]
    check_loaded(tw.load(folder), {"x": np.arange(5)})
    write(folder / "model.safetensors", {"x": np.arange(6)})
    before = contents(folder)
    with pytest.raises(FileExistsError, match="uncompressed model"):
        tw.save({"x": np.arange(5)}, folder, overwrite=True)
    assert contents(folder) == before


def test_a_save_that_fails_keeps_the_old_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or, where shards have the same names, leaves none that is a mixture."""
    folder = tmp_path / "m"
    tw.save(TENSORS, folder, max_shard_nbytes=60_000)
    old = contents(folder)
    calls = []

    def fails(*args: Any, **kwargs: Any) -> None:
        calls.append(args)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "full")
        tw.save_file(*args, **kwargs)

    monkeypatch.setattr(models, "save_file", fails)
    with pytest.raises(OSError, match="full"):
        tw.save(TENSORS, folder, max_shard_nbytes=1, overwrite=True)
    check_loaded(tw.load(folder), TENSORS)
    assert old.items() <= contents(folder).items()
    calls.clear()
    with pytest.raises(OSError, match="full"):
        tw.save(TENSORS | {"s": np.zeros(3)}, folder, max_shard_nbytes=60_000, overwrite=True)
    with pytest.raises(FileNotFoundError, match=INDEX):
        tw.load(folder)


def test_bad_calls_of_save(tmp_path: Path) -> None:
    x = np.arange(5)
    for tensors, error in [([x], TypeError), ({"a": {"b": x}}, ValueError), ({"a": 1}, ValueError)]:
        with pytest.raises(error):
            tw.save(tensors, tmp_path / "m")  # type: ignore[arg-type]
    for limit in (0, -1, 1.5):
        with pytest.raises((TypeError, ValueError), match="max_shard_nbytes"):
            tw.save({"x": x}, tmp_path / "m", max_shard_nbytes=limit)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="lossy"):
        directories.compress_directory(tmp_path, tmp_path / "m", "lhc")
    assert contents(tmp_path) == {}


# Found by review


def test_one_time_of_change_does_not_make_two_models_one(tmp_path: Path) -> None:
    a, b, packed, plain = (tmp_path / name for name in ("a", "b", "packed", "plain"))
    for seed, folder in enumerate((a, b)):
        write(folder / "model.safetensors", {"w": weights(50, 50, seed=seed)})
        os.utime(folder / "model.safetensors", (1, 1))
    directories.compress_directory(a, packed)
    with pytest.raises(FileExistsError, match="made from another file"):
        directories.compress_directory(b, packed)
    assert directories.compress_directory(a, packed).shards[0].done_before
    shutil.copytree(b, plain)
    with pytest.raises(FileExistsError, match="uncompressed"):
        directories.decompress_directory(packed, plain)
    assert directories.decompress_directory(packed, a).shards[0].done_before
    cast = BY_NAME["bfloat16"]
    directories.compress_directory(a, packed, cast=cast, force=True)
    assert directories.compress_directory(a, packed, cast=cast).shards[0].done_before


def test_shards_that_are_being_replaced_are_no_model(sharded: Path) -> None:
    packed = sharded.with_name("packed")
    directories.compress_directory(sharded, packed)
    for name, tensors in SHARDS.items():
        write(sharded / name, {key: x[::-1].copy() for key, x in tensors.items()})
        os.utime(sharded / name, ns=(10**18 + 7,) * 2)

    def stop(name: str, nbytes: int) -> None:
        if name in SHARDS["model-00002-of-00002.safetensors"]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        directories.compress_directory(sharded, packed, force=True, progress=stop)
    with pytest.raises(FileNotFoundError, match="not complete"):
        tw.load(packed, like="numpy")
    directories.compress_directory(sharded, packed, force=True)
    assert directories.diff_directories(sharded, packed) == []


def test_a_copied_file_that_changes(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def copy(source: Any, target: Any, length: int) -> None:
        target.write(source.read())
        os.utime(source.name, ns=(5, 5))

    monkeypatch.setattr(shutil, "copyfileobj", copy)
    with pytest.raises(OSError, match="changed while it was read"):
        directories.compress_directory(sharded, sharded.with_name("packed"))
    assert not any(p.is_file() for p in sharded.with_name("packed").iterdir())


def test_links_in_the_target_do_not_merge_files(sharded: Path) -> None:
    packed = sharded.with_name("packed")
    for name in ("a", "b"):
        (sharded / name).mkdir()
        (sharded / name / "x.json").write_text(name)
    (packed / "b").mkdir(parents=True)
    (packed / "a").symlink_to("b")
    with pytest.raises(ValueError, match="both be written"):
        directories.compress_directory(sharded, packed)


@pytest.mark.slow
def test_links_without_end(tmp_path: Path) -> None:
    write(tmp_path / "m" / "model.safetensors", {"w": weights(4)})
    for i in range(20):
        (tmp_path / "m" / str(i)).mkdir()
    for i in range(19):
        for name in "ab":
            (tmp_path / "m" / str(i) / name).symlink_to(f"../{i + 1}")
    with pytest.raises(ValueError, match="too many folders"):
        directories.compress_directory(tmp_path / "m", tmp_path / "packed")


def test_an_index_of_nothing(sharded: Path) -> None:
    packed = sharded.with_name("packed")
    (sharded / INDEX).write_text('{"weight_map": {}}')
    directories.compress_directory(sharded, packed)
    with pytest.raises(FileNotFoundError, match="not complete"):
        tw.load(packed)


def test_save_takes_no_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TypeError, match="save_file takes URLs"):
        tw.save({"x": weights(3)}, "s3://bucket/model")
    assert not list(tmp_path.iterdir())


def test_save_keeps_the_index_of_another_model(tmp_path: Path) -> None:
    write_sharded(tmp_path, {"sub/part-1.safetensors": {"x": weights(3)}})
    before = contents(tmp_path)
    with pytest.raises(FileExistsError, match="not compressed"):
        tw.save({"x": weights(3)}, tmp_path, overwrite=True)
    assert contents(tmp_path) == before


def test_the_time_of_a_source_that_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, other, packed = (tmp_path / name for name in ("a.safetensors", "b.safetensors", "p"))
    write(source, {"w": weights(50, 50)})
    write(other, {"w": weights(50, 50, seed=1)})
    os.utime(other, ns=(10**18 + 7,) * 2)
    drafted = convert._drafted

    def replaced(*args: Any) -> Any:
        if other.exists():
            os.replace(other, source)
        return drafted(*args)

    monkeypatch.setattr(convert, "_drafted", replaced)
    convert.compress_file(source, packed)
    assert not convert.forecast_compress(source, packed).done
