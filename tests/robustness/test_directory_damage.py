"""Damaged directories of models: every reader gives the exact tensors or refuses, none writes
elsewhere, none waits.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

import readers
import tightwire as tw
from mutants import Rng, edit_value
from tightwire import convert, file_tensors
from tightwire.formats.container import Entry, directory_bytes
from tightwire.formats.errors import REASONS

directories = pytest.importorskip("tightwire.directories", exc_type=ImportError)
models = pytest.importorskip("tightwire.models", exc_type=ImportError)

INDEX = "model.safetensors.index.json"
SHARDS: dict[str, dict[str, Any]] = {
    "model-00001-of-00002.safetensors": {
        "embed": np.linspace(-1, 1, 3000, dtype=np.float32).reshape(30, 100),
        "step": np.int64(7),
    },
    "model-00002-of-00002.safetensors": {"head": np.arange(900, dtype=np.int32)},
    "sub/model.safetensors": {"inner": np.ones((40, 40), np.float32)},
}
DTYPES = {"float32": "F32", "int64": "I64", "int32": "I32"}
Values = dict[str, readers.Value]
VALUES: Values = {k: readers.value(x) for shard in SHARDS.values() for k, x in shard.items()}
#: Changes something in a folder; `outside` is a folder beside it with files of its own.
Mutant = Callable[[Rng, Path, Path], None]


def file_of(tensors: dict[str, Any]) -> bytes:
    entries, at = [], 0
    for name, x in tensors.items():
        entries.append(Entry(name, DTYPES[x.dtype.name], x.shape, at, at + x.nbytes))
        at += x.nbytes
    return directory_bytes(entries, {"format": "pt"}) + b"".join(
        x.tobytes() for x in tensors.values()
    )


def snapshot(folder: Path) -> dict[str, bytes | str]:
    """Every file below a folder and what is in it; of anything else what it is."""
    found: dict[str, bytes | str] = {}
    for root, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(root, name)
            key = str(path.relative_to(folder))
            if path.is_symlink():
                found[key] = f"link to {os.readlink(path)}"
            else:
                found[key] = path.read_bytes() if path.is_file() else "special or folder"
    return found


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A plain model, with a sub-folder, and its compressed form."""
    root = tmp_path_factory.mktemp("samples")
    plain, packed = root / "plain", root / "packed"
    (plain / "sub").mkdir(parents=True)
    for name, tensors in SHARDS.items():
        (plain / name).write_bytes(file_of(tensors))
    weight_map = {k: name for name, t in SHARDS.items() if "/" not in name for k in t}
    text = json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}, indent=2)
    (plain / INDEX).write_text(text)
    (plain / "config.json").write_text("{}")
    directories.compress_directory(plain, packed)
    return {"plain": plain, "packed": packed}


def shards_of(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*.safetensors") if p.is_file())


def pick(rng: Rng, items: list[Any]) -> Any:
    return items[int(rng.integers(len(items)))]


def remove(rng: Rng, folder: Path, outside: Path) -> None:
    pick(rng, sorted(p for p in folder.rglob("*") if p.is_file())).unlink()


def truncate(rng: Rng, folder: Path, outside: Path) -> None:
    path = pick(rng, sorted(p for p in folder.rglob("*") if p.is_file()))
    os.truncate(path, int(rng.integers(path.stat().st_size)))


def flip(rng: Rng, folder: Path, outside: Path) -> None:
    path = pick(rng, sorted(p for p in folder.rglob("*") if p.is_file()))
    data = bytearray(path.read_bytes())
    data[int(rng.integers(len(data)))] ^= 1 << int(rng.integers(8))
    path.write_bytes(data)


FILES = ["x.tw.safetensors", "x.safetensors", ".safetensors", ".tw.safetensors", "né\n.safetensors"]
FILES += ["model.tw.safetensors", "model.safetensors", "a.tw.tw.safetensors", "x", INDEX]
FILES += ["x.safetensors.index.json", ".x.0123456789abcdef.tmp", "sub/y.tw.safetensors"]


def rename(rng: Rng, folder: Path, outside: Path) -> None:
    pick(rng, shards_of(folder)).rename(folder / pick(rng, FILES))


def swap(rng: Rng, folder: Path, outside: Path) -> None:
    a, b, *_ = rng.permutation(np.array(shards_of(folder), object))
    a.rename(outside / "a")
    b.rename(a)
    (outside / "a").rename(b)


def duplicate(rng: Rng, folder: Path, outside: Path) -> None:
    shutil.copy(pick(rng, shards_of(folder)), folder / pick(rng, FILES))


NAMED = ["../outside/x.tw.safetensors", "../outside/x.safetensors", "sub/model.tw.safetensors"]
NAMED += ["missing.safetensors", "", ".", "..", "/", "a\0.safetensors", "sub/../x.safetensors"]
NAMED += ["..\\outside\\x.safetensors", "a" * 5000 + ".safetensors", "./x.safetensors", "//x"]


def index_names(rng: Rng, folder: Path, outside: Path) -> None:
    """A shard of the index has another name, or one more tensor is named."""
    fields = json.loads((folder / INDEX).read_text())
    name = pick(rng, [*NAMED, str(outside / "x.tw.safetensors"), str(outside / "x.safetensors")])
    tensor = pick(rng, [*fields["weight_map"], "more", ""])
    old = fields["weight_map"].get(tensor)
    fields["weight_map"][tensor] = name
    if rng.random() < 0.5:
        fields["weight_map"] |= {k: name for k, v in fields["weight_map"].items() if v == old}
    (folder / INDEX).write_text(json.dumps(fields))


def index_edit(rng: Rng, folder: Path, outside: Path) -> None:
    fields = json.loads((folder / INDEX).read_text())
    for _ in range(int(rng.integers(1, 3))):
        if fields:
            edit_value(rng, fields)
    (folder / INDEX).write_text(json.dumps(fields))


def index_text(rng: Rng, folder: Path, outside: Path) -> None:
    text = (folder / INDEX).read_bytes()
    at, n = int(rng.integers(len(text))), int(rng.integers(0, 3))
    token = pick(
        rng, [b"{", b"}", b"[" * 3000, b'"', b",", b"\\u0000", b"\\ud800", b"\xff", b"NaN"]
    )
    (folder / INDEX).write_bytes(text[:at] + token + text[at + n :])


def link(rng: Rng, folder: Path, outside: Path) -> None:
    """Links to files and folders elsewhere, to nothing, and to themselves."""
    path = pick(rng, [*shards_of(folder), folder / INDEX, folder / pick(rng, FILES)])
    path.unlink(missing_ok=True)
    targets = [outside / "x.safetensors", outside / "x.tw.safetensors", outside, folder, "nothing"]
    path.symlink_to(pick(rng, [*targets, path.name]))


def special(rng: Rng, folder: Path, outside: Path) -> None:
    """Pipes and folders in the place of files."""
    path = pick(rng, [*shards_of(folder), folder / INDEX, folder / pick(rng, FILES)])
    path.unlink(missing_ok=True)
    pick(rng, [os.mkfifo, os.mkdir])(path)


def other_file(rng: Rng, folder: Path, outside: Path) -> None:
    """Another container, and what is none."""
    others = [tw.dumps([np.ones(300)]), tw.dumps({"a": {"b": 1}}), tw.dumps({}), b"", b"{}"]
    others += [file_of({}), file_of({"x": np.ones(2, np.int32)})]
    pick(rng, shards_of(folder)).write_bytes(pick(rng, others))


MUTANTS: tuple[Mutant, ...] = (
    remove,
    truncate,
    flip,
    rename,
    swap,
    duplicate,
    index_names,
    index_edit,
    index_text,
    link,
    special,
    other_file,
)


@contextlib.contextmanager
def in_time() -> Iterator[None]:
    """AssertionError for what waits."""

    def late(*_: object) -> None:
        raise AssertionError("it waits")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, 20)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def refused(work: Callable[[], Any]) -> Exception | None:
    """Why it is refused; None if it is not. Any other error than these is a defect."""
    try:
        with in_time():
            work()
    except tw.FormatError as error:
        assert error.reason in REASONS
        return error
    except OSError as error:
        assert error.filename is not None
        return error
    except ValueError as error:
        assert type(error) is ValueError
        return error
    return None


def exact(tensors: Any) -> None:
    """Tensors have digests, so whatever the names of files are, they are what they were."""
    for name, x in tensors.items():
        assert name in VALUES or name == "x"
        assert name == "x" or readers.value(x) == VALUES[name]


def check_packed(folder: Path, root: Path) -> bool:
    """Read one mutant of a compressed directory; True if it was loaded."""
    back = root / "back"
    before = snapshot(root)
    verified = refused(lambda: directories.verify_directory(folder))
    loaded = refused(lambda: exact(models.load(folder)))
    refused(lambda: directories.inspect_directory(folder))
    compared = refused(lambda: directories.diff_directories(folder, folder))
    assert snapshot(root) == before
    restored = refused(lambda: directories.decompress_directory(folder, back))
    after = snapshot(root)
    assert {k: v for k, v in after.items() if k.split("/")[0] != "back"} == before
    if restored is None:
        # What verify and diff refuse beside are indexes, and tensors that are in two files.
        assert compared is None or type(compared) is ValueError or "index" in str(compared)
        assert verified is None or "index" in str(verified)
        for path in shards_of(back):
            with convert.open_plain(path) as (reader, directory):
                for e in directory.entries:
                    data = file_tensors.read_entry(reader, directory, e).tobytes()
                    assert e.name not in VALUES or data == VALUES[e.name][2]
    assert not [p for p in after if p.endswith(".tmp") and p not in before]
    return loaded is None


def check_plain(folder: Path, root: Path) -> bool:
    """Compress and restore one mutant of a plain directory; True if it was taken."""
    packed, back = root / "packed", root / "back"
    before = snapshot(root)
    taken = refused(lambda: directories.compress_directory(folder, packed)) is None
    after = snapshot(root)
    assert {k: v for k, v in after.items() if k.split("/")[0] != "packed"} == before
    if taken:
        assert refused(lambda: directories.decompress_directory(packed, back)) is None
        names = {p.relative_to(folder) for p in folder.rglob("*") if p.is_file()}
        names = {p for p in names if not p.name.endswith(".tmp")}
        assert {p.relative_to(back) for p in back.rglob("*") if p.is_file()} == names
        for name in names:
            assert (back / name).read_bytes() == (folder / name).read_bytes()
    return taken


CHECKS = {"packed": check_packed, "plain": check_plain}


def check(mutant: Mutant, seed: int, kind: str, samples: dict[str, Path], root: Path) -> bool:
    rng = np.random.default_rng(seed)
    folder, outside = root / "folder", root / "outside"
    shutil.copytree(samples[kind], folder)
    outside.mkdir()
    (outside / "x.safetensors").write_bytes(file_of({"x": np.ones(300, np.float32)}))
    tw.save_file({"x": np.ones(300, np.float32)}, outside / "x.tw.safetensors")
    mutant(rng, folder, outside)
    if rng.random() < 0.2:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            pick(rng, list(MUTANTS))(rng, folder, outside)
    return CHECKS[kind](folder, root)


def check_many(
    mutant: Mutant, seeds: range, kind: str, samples: dict[str, Path], tmp_path: Path
) -> int:
    taken = 0
    with mock.patch.object(os, "fsync"):
        for seed in seeds:
            root = tmp_path / str(seed)
            root.mkdir()
            taken += check(mutant, seed, kind, samples, root)
            shutil.rmtree(root)
    return taken


@pytest.mark.slow
@pytest.mark.parametrize("kind", CHECKS)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.__name__)
def test_mutants(mutant: Mutant, kind: str, samples: dict[str, Path], tmp_path: Path) -> None:
    n = 12
    taken = check_many(mutant, range(n), kind, samples, tmp_path)
    assert taken < n or mutant in (flip, rename, duplicate, swap, other_file, remove)


@pytest.mark.long
@pytest.mark.parametrize("kind", CHECKS)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.__name__)
def test_many_mutants(mutant: Mutant, kind: str, samples: dict[str, Path], tmp_path: Path) -> None:
    check_many(mutant, range(12, 500), kind, samples, tmp_path)


@pytest.mark.parametrize("kind", CHECKS)
def test_the_samples_are_taken(kind: str, samples: dict[str, Path], tmp_path: Path) -> None:
    assert check(lambda *_: None, 0, kind, samples, tmp_path)


def test_pipes_are_refused_at_once(samples: dict[str, Path], tmp_path: Path) -> None:
    for name in (INDEX, "model-00002-of-00002.tw.safetensors"):
        folder = tmp_path / name
        shutil.copytree(samples["packed"], folder)
        (folder / name).unlink()
        os.mkfifo(folder / name)
        for work in (directories.verify_directory, models.load):
            assert refused(partial(work, folder)) is not None
