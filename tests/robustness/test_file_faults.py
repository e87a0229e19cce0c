"""Disks that fail, processes that are killed, files that change while they are read."""

from __future__ import annotations

import contextlib
import errno
import gc
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import faults
import readers
import tightwire as tw
from tightwire import convert
from tightwire.formats.container import Entry, directory_bytes, read_directory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")

VECTORS = Path(__file__).resolve().parents[2] / "specs" / "vectors" / "container"
Reader = Callable[[Path], object]


def states(n: int = 60_000, shift: float = 0) -> dict[str, Any]:
    """Tensors of several sizes; of any two shifts all differ, and files are of the same size."""
    rng = np.random.default_rng(1)
    tensors = {f"w{i}": rng.integers(0, 255, n).astype(np.uint8).reshape(-1, 100) for i in range(4)}
    return {name: x + np.uint8(shift) for name, x in tensors.items()} | {
        "step": np.float32(shift),
        "empty": np.zeros((0, 3), np.int16),
    }


def plain_bytes(tensors: dict[str, Any]) -> bytes:
    """A safetensors file."""
    entries, at = [], 0
    names = {"uint8": "U8", "float32": "F32", "int16": "I16"}
    for name, x in tensors.items():
        entries.append(Entry(name, names[x.dtype.name], x.shape, at, at + x.nbytes))
        at += x.nbytes
    return directory_bytes(entries, {}) + b"".join(x.tobytes() for x in tensors.values())


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """A compressed file, an hour old; raw, so that other values leave its header as it is."""
    path = tmp_path / "packed"
    tw.save_file(states(), path, "raw")
    return aged(path)


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """A safetensors file, an hour old."""
    path = tmp_path / "plain"
    path.write_bytes(plain_bytes(states()))
    return aged(path)


def aged(path: Path) -> Path:
    """The file, last changed an hour ago: clocks of file systems are coarse."""
    before = path.stat().st_mtime - 3600
    os.utime(path, (before, before))
    return path


def same(a: Any, b: Any) -> bool:
    return {k: readers.value(x) for k, x in a.items()} == {
        k: readers.value(x) for k, x in b.items()
    }


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """After a test no files and threads are there that were not before."""
    # What is made at first use: caches of compiled functions, pools of threads.
    path = VECTORS / "written.safetensors"
    tw.load_file(path)
    convert.verify_file(path)
    before, threads = open_files(), set(threading.enumerate())
    yield
    if more_than(before) or set(threading.enumerate()) - threads:
        gc.collect()
    assert not more_than(before)
    assert not set(threading.enumerate()) - threads


def more_than(before: list[str]) -> list[str]:
    """What is open now and was not; other tests' garbage may have been closed meanwhile."""
    return sorted((Counter(open_files()) - Counter(before)).elements())


def open_files() -> list[str]:
    """What the descriptors of this process are."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that lists them
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return sorted(found)


def decompress(path: Path) -> None:
    target = path.with_name("target")
    target.write_bytes(b"old")
    try:
        convert.decompress_file(path, target)
    except Exception:
        assert target.read_bytes() == b"old"
        raise


def compress(path: Path) -> None:
    target = path.with_name("target")
    target.write_bytes(b"old")
    try:
        convert.compress_file(path, target, "raw")
    except Exception:
        assert target.read_bytes() == b"old"
        raise


COMPRESSED: dict[str, Reader] = {
    "load_file": tw.load_file,
    "verify": convert.verify_file,
    "decompress": decompress,
    "diff": lambda path: convert.diff_files(path, path),
}
ALL = COMPRESSED | {"compress": compress}


@pytest.fixture(params=ALL)
def reading(request: pytest.FixtureRequest) -> tuple[Reader, Path]:
    """A reader of files, and a file for it."""
    fixture = "plain" if request.param == "compress" else "packed"
    return ALL[request.param], request.getfixturevalue(fixture)


class Hook:
    """Does something once, before the first bytes behind a file's header are read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, path: Path, act: Callable[[], Any]) -> None:
        self._read = os.preadv
        self._at = read_directory(memoryview(path.read_bytes())).data_at
        self._file = os.stat(path).st_ino
        self._act = act
        self.done = False
        monkeypatch.setattr(os, "preadv", self)

    def __call__(self, fd: int, views: Any, offset: int, *flags: int) -> int:
        if offset >= self._at and os.fstat(fd).st_ino == self._file and not self.done:
            self.done = True
            self._act()
        return self._read(fd, views, offset, *flags)


# Reads


@pytest.mark.parametrize("nbytes", [1, 7, 1000])
def test_short_reads(
    nbytes: int, reading: tuple[Reader, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, path = reading
    if nbytes < 100:
        tensors = states(600)
        if reader is compress:
            path.write_bytes(plain_bytes(tensors))
        else:
            tw.save_file(tensors, path)
    expected = reader(path)
    target = path.with_name("target")
    restored = target.read_bytes() if target.exists() else None
    read = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, to, at: read(fd, [to[0][:nbytes]], at))
    found = reader(path)
    if isinstance(expected, dict):
        assert isinstance(found, dict)
        assert same(found, expected)
    else:
        assert found == expected
    assert restored is None or target.read_bytes() == restored


def test_a_failing_read_names_the_file(
    reading: tuple[Reader, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, path = reading

    def fail() -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    hook = Hook(monkeypatch, path, fail)
    with pytest.raises(OSError, match="Input/output") as caught:
        reader(path)
    assert hook.done
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(path))


class Failing(io.BytesIO):
    """A file object that fails at its end."""

    name = "a stream"

    def read(self, size: int | None = -1, /) -> bytes:
        assert size is not None
        if size < 0 or self.tell() + size > len(self.getvalue()) // 2:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().read(size)


def test_a_failing_stream_is_not_taken_for_the_target(packed: Path, plain: Path) -> None:
    for work, path in ((convert.decompress_file, packed), (convert.compress_file, plain)):
        target = path.with_name("target")
        with pytest.raises(OSError, match="Input/output") as caught:
            work(Failing(path.read_bytes()), target)
        assert caught.value.filename == "a stream"
        assert not target.exists()


@pytest.mark.parametrize("left", ["header", "half", "all but one"])
def test_a_file_cut_off_while_it_is_read(
    left: str, reading: tuple[Reader, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, path = reading
    data = path.read_bytes()
    header = read_directory(memoryview(data)).data_at
    size = {"header": header, "half": len(data) // 2, "all but one": len(data) - 1}[left]
    hook = Hook(monkeypatch, path, lambda: os.truncate(path, size))
    with pytest.raises(tw.FormatError, match=r"truncated.*became shorter"):
        reader(path)
    assert hook.done


def test_a_stream_cut_off_while_it_is_read(packed: Path) -> None:
    data = packed.read_bytes()
    for reader in (tw.load_file, convert.verify_file):

        class Shrinking(io.BytesIO):
            def read(self, size: int | None = -1, /) -> bytes:
                if self.tell() > 8:
                    self.truncate(len(data) // 2)
                return super().read(size)

        with pytest.raises(tw.FormatError, match="truncated"):
            reader(Shrinking(data))


def changes(packed: Path, plain: Path) -> dict[str, tuple[Reader, Path, bytes]]:
    """Readers, their files, and other bytes with the same header, but for checksums."""
    other = io.BytesIO()
    tw.save_file(states(shift=1), other, "raw")
    found: dict[str, tuple[Reader, Path, bytes]] = {
        name: (reader, packed, other.getvalue()) for name, reader in COMPRESSED.items()
    }
    found["compress"] = compress, plain, plain_bytes(states(shift=1))
    return found


@pytest.mark.parametrize("name", ALL)
def test_a_file_changed_while_it_is_read(
    name: str, packed: Path, plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All tensors are sound, before and after: checksums alone would let a mixture pass."""
    reader, path, other = changes(packed, plain)[name]
    before = path.read_bytes()
    assert len(before) == len(other)

    def change() -> None:
        with open(path, "r+b") as file:
            file.seek(len(other) // 2)
            file.write(other[len(other) // 2 :])

    hook = Hook(monkeypatch, path, change)
    with pytest.raises(OSError, match="changed while it was read") as caught:
        reader(path)
    assert hook.done
    assert caught.value.filename == str(path)
    # The old tensors in full, after the file is as it was and if it is replaced meanwhile.
    path.write_bytes(before)
    expected = reader(path)
    new = path.with_name("new")
    new.write_bytes(other)
    hook = Hook(monkeypatch, path, lambda: os.replace(new, path))
    found = reader(path)
    assert hook.done
    if isinstance(expected, dict):
        assert isinstance(found, dict)
        assert same(found, expected)
        assert same(tw.load_file(path), states(shift=1))


def test_a_file_that_grows_is_refused(
    reading: tuple[Reader, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, path = reading

    def grow() -> None:
        with open(path, "ab") as file:
            file.write(b"more")

    Hook(monkeypatch, path, grow)
    with pytest.raises(OSError, match="changed while it was read"):
        reader(path)


@contextlib.contextmanager
def in_time() -> Iterator[None]:
    """TimeoutError for what waits."""

    def late(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, 20)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _open(path: Path) -> None:
    tw.open(path)


@pytest.mark.parametrize("name", [*ALL, "open"])
def test_pipes_and_folders_are_refused_at_once(name: str, tmp_path: Path) -> None:
    reader = ALL.get(name, _open)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with (
        in_time(),
        pytest.raises((OSError, tw.FormatError), match=r"regular file|0 bytes") as caught,
    ):
        reader(pipe)
    assert not isinstance(caught.value, TimeoutError)
    with pytest.raises(IsADirectoryError):
        reader(tmp_path)


def test_what_another_call_reads_is_named(plain: Path, tmp_path: Path) -> None:
    for reader in (tw.load_file, tw.open):
        with pytest.raises(IsADirectoryError, match=r"tightwire\.load reads directories"):
            reader(tmp_path)
        with pytest.raises(tw.FormatError, match="'tightwire compress' on it first, or load it"):
            reader(plain)


def test_special_files_are_no_targets(plain: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for target in (pipe, Path("/dev/full")):
        with in_time(), pytest.raises(OSError, match="not a regular file"):
            tw.save_file(states(100), target)
        with in_time(), pytest.raises(OSError, match="not a regular file"):
            convert.compress_file(plain, target)


# Nothing is left open


def test_errors_leave_nothing_open(tmp_path: Path) -> None:
    expected = json.loads((VECTORS / "expected.json").read_text())
    names = [name for name, e in expected.items() if "reason" in e]
    assert len(names) > 100
    for name in names:
        path = Path(shutil.copy(VECTORS / f"{name}.safetensors", tmp_path))
        before = open_files()
        for reader in readers.WHOLE.values():
            assert readers.reason(reader, path) == expected[name]["reason"]
        assert readers.reason(readers.by_tensor, path) is not None
        assert not more_than(before), name


def test_what_is_dropped_is_closed(packed: Path) -> None:
    before = open_files()
    file = tw.open(packed)
    lazy = file["w0"]
    assert lazy[3:5].shape == (2, 100)
    del file
    assert lazy[5].shape == (100,)
    del lazy
    gc.collect()
    assert not more_than(before)


# Writes


class ShortWrites(io.FileIO):
    """An unbuffered file that takes few bytes at a time."""

    def write(self, data: Any, /) -> int:
        return super().write(memoryview(data)[:7])


def test_short_writes(tmp_path: Path, plain: Path) -> None:
    tensors = states(600)
    with ShortWrites(tmp_path / "x", "w") as file:
        tw.save_file(tensors, file)
    assert same(tw.load_file(tmp_path / "x"), tensors)
    plain.write_bytes(plain_bytes(tensors))
    with ShortWrites(tmp_path / "y", "w") as file:
        convert.compress_file(plain, file)
    with ShortWrites(tmp_path / "z", "w") as file:
        convert.decompress_file(tmp_path / "y", file)
    assert (tmp_path / "z").read_bytes() == plain.read_bytes()


def test_full_streams(plain: Path, packed: Path) -> None:
    for buffering in (0, -1):
        for work in (
            lambda file: tw.save_file(states(), file),
            lambda file: convert.compress_file(plain, file),
            lambda file: convert.decompress_file(packed, file),
        ):
            with (
                pytest.raises(OSError, match="No space"),
                open("/dev/full", "wb", buffering) as file,
            ):
                work(file)


FAULTS = r"""
import json, os, signal, sys, threading
from pathlib import Path
import numpy as np
import tightwire as tw
from faults import at_call, limited
from tightwire import convert

folder, plain, packed = map(Path, sys.argv[1:])
target = folder / "target"
works = {
    "save": lambda: tw.save_file({"x": np.arange(60_000)}, target, "raw", threads=1),
    "compress": lambda: convert.compress_file(plain, target, threads=1),
    "decompress": lambda: convert.decompress_file(packed, target, threads=1),
}

def moments(size):
    yield "fchmod", lambda: at_call("fchmod", False)
    yield "fsync", lambda: at_call("fsync", False)
    yield "rename", lambda: at_call("replace", False)
    yield "renamed", lambda: at_call("replace", True)
    for part in (0, 1, 4096, size // 2, size - 1):
        yield f"killed at {part}", lambda: limited(part, signal.SIG_DFL)
        yield f"full at {part}", lambda: limited(part, signal.SIG_IGN)

def attempt(work, fault, report):
    fault()
    try:
        work()
    except OSError as error:
        os.write(report, json.dumps([error.errno, error.filename]).encode())
        os._exit(3)
    os._exit(0)

found = []
for name, work in works.items():
    # Here, so that children need not load compiled functions again.
    work()
    assert threading.active_count() == 1
    new = target.read_bytes()
    for old in (None, b"old"):
        for moment, fault in moments(len(new)):
            target.unlink(missing_ok=True)
            if old is not None:
                target.write_bytes(old)
            ours, theirs = os.pipe()
            child = os.fork()
            if not child:
                attempt(work, fault, theirs)
            os.close(theirs)
            status = os.waitpid(child, 0)[1]
            with os.fdopen(ours, "rb") as pipe:
                error = json.loads(pipe.read() or b"null")
            data = target.read_bytes() if target.exists() else None
            state = "old" if data == old else "new" if data == new else "damaged"
            left = [p.name for p in folder.iterdir() if p != target]
            for p in left:
                (folder / p).unlink()
            found.append([name, moment, state, left, status, error])
print(json.dumps(found))
"""


@pytest.mark.slow
def test_kills_and_full_disks(plain: Path, packed: Path, tmp_path: Path) -> None:
    """The old file or the new one, whole; after an error nothing beside it."""
    folder = tmp_path / "folder"
    folder.mkdir()
    command = [sys.executable, "-W", "ignore", "-c", FAULTS, str(folder), str(plain), str(packed)]
    path = os.pathsep.join([str(Path(faults.__file__).parent), *filter(None, sys.path)])
    environment = os.environ | {"PYTHONPATH": path}
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert len(found) == 3 * 2 * 14
    for name, moment, state, left, status, error in found:
        what = name, moment, state, left, status, error
        assert state == ("new" if moment == "renamed" else "old"), what
        if moment.startswith("full"):
            assert (os.waitstatus_to_exitcode(status), left) == (3, []), what
            assert error == [errno.EFBIG, str(folder / "target")], what
            continue
        number = signal.SIGXFSZ if moment.startswith("killed") else signal.SIGKILL
        assert os.waitstatus_to_exitcode(status) == -number, what
        assert len(left) == (moment != "renamed"), what
        assert all(re.fullmatch(r"\.target\.[0-9a-f]{16}\.tmp", p) for p in left), what
