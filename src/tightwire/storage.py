"""Bytes of files: read range by range from paths, memory and file objects; written whole or not
at all.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np

from . import arrays
from .codecs.base import Bytes
from .formats.errors import FormatError

PathLike = str | os.PathLike[str]

#: Errors that say a folder cannot be synced here, as on some network file systems.
_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EACCES, errno.EPERM)


class Reader(Protocol):
    """Where bytes of a file come from. Threads may share one."""

    #: What to call it in errors.
    name: str
    nbytes: int

    def read(self, start: int, nbytes: int) -> Bytes:
        """Bytes `start` to `start + nbytes`, uint8, aligned to 8 or a view.

        Raises FormatError("truncated") if the file has become shorter, and OSError.
        """

    def read_into(self, start: int, out: Bytes) -> None:
        """As `read`, into `out`."""

    def close(self) -> None:
        """Let go of the file."""


class MemoryReader:
    """Bytes that are in memory: what it reads are views."""

    def __init__(self, data: Bytes, name: str = "bytes") -> None:
        self.name = name
        self.nbytes = data.size
        self._data = data

    def read(self, start: int, nbytes: int) -> Bytes:
        """See `Reader`."""
        return self._data[start : start + nbytes]

    def read_into(self, start: int, out: Bytes) -> None:
        """See `Reader`."""
        out[:] = self._data[start : start + out.size]

    def close(self) -> None:
        """See `Reader`."""
        self._data = self._data[:0]


class MappedReader(MemoryReader):
    """A file mapped into memory, for reads of a few rows here and there."""

    def __init__(self, path: PathLike) -> None:
        super().__init__(map_file(path), str(path))


class PathReader:
    """A file of the system."""

    def __init__(self, path: PathLike) -> None:
        self.name = os.fspath(path)
        self.fd = -1
        self.fd = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        try:
            status = os.fstat(self.fd)
            if stat.S_ISDIR(status.st_mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), self.name)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "is not a regular file", self.name)
            self.nbytes = status.st_size
        except BaseException:
            self.close()
            raise

    def read(self, start: int, nbytes: int) -> Bytes:
        """See `Reader`."""
        out = np.empty(nbytes, np.uint8)
        self.read_into(start, out)
        return out

    def read_into(self, start: int, out: Bytes) -> None:
        """See `Reader`."""
        view = out.data
        done = 0
        while done < len(view):
            try:
                n = os.preadv(self.fd, [view[done:]], start + done)
            except OSError as error:
                raise OSError(error.errno, error.strerror, self.name) from error
            if n == 0:
                raise FormatError("truncated", f"{self.name} became shorter while it was read")
            done += n

    def close(self) -> None:
        """See `Reader`."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __del__(self) -> None:
        self.close()


class StreamReader:
    """A file object that can seek, from its present position to its end."""

    def __init__(self, file: BinaryIO, close: Callable[[], None]) -> None:
        self.name = str(getattr(file, "name", None) or type(file).__name__)
        self._file = file
        self._close = close
        self._lock = threading.Lock()
        self._start = file.tell()
        self.nbytes = file.seek(0, os.SEEK_END) - self._start

    def read(self, start: int, nbytes: int) -> Bytes:
        """See `Reader`."""
        with self._lock:
            self._file.seek(self._start + start)
            data = _read_all(self._file, nbytes)
        if len(data) < nbytes:
            raise FormatError("truncated", f"{self.name} became shorter while it was read")
        return np.frombuffer(data, np.uint8)

    def read_into(self, start: int, out: Bytes) -> None:
        """See `Reader`."""
        out[:] = self.read(start, out.size)

    def close(self) -> None:
        """See `Reader`."""
        self._close()


def _read_all(file: BinaryIO, nbytes: int) -> bytes:
    """`nbytes` bytes of a file object whose reads may be short, fewer at its end."""
    data = file.read(nbytes)
    if len(data) == nbytes or not data:
        return data
    pieces = [data]
    missing = nbytes - len(data)
    while missing and (data := file.read(missing)):
        pieces.append(data)
        missing -= len(data)
    return b"".join(pieces)


def is_url(source: Any) -> bool:
    """True for text like s3://bucket/key, which fsspec opens."""
    return isinstance(source, str) and "://" in source


def is_path(source: Any) -> bool:
    """True for the path of a file of the system."""
    return isinstance(source, (str, os.PathLike)) and not is_url(source)


def _fsspec() -> Any:
    try:
        import fsspec
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("URLs need fsspec: pip install fsspec", name="fsspec") from error
    return fsspec


def open_reader(source: Any) -> Reader:
    """A reader of a path, a URL for fsspec, a binary file object, bytes-like or a uint8 array.

    A file object that cannot seek is read to its end. Raises OSError; TypeError for anything else.
    """
    if is_url(source):
        file = _fsspec().open(source, "rb").open()
        return StreamReader(file, file.close)
    if isinstance(source, (str, os.PathLike)):
        return PathReader(source)
    if hasattr(source, "read") and not isinstance(source, np.memmap):
        if not source.seekable():
            return MemoryReader(np.frombuffer(source.read(), np.uint8), "the stream")
        return StreamReader(source, lambda: None)
    try:
        return MemoryReader(arrays.bytes_view(source))
    except TypeError as error:
        raise TypeError(f"Expected a path, a URL, a file object or bytes: {error}") from None


@contextmanager
def reading(source: Any) -> Iterator[Reader]:
    """`open_reader`, closed when the block ends."""
    reader = open_reader(source)
    try:
        yield reader
    finally:
        reader.close()


def map_file(path: PathLike) -> Bytes:
    """The bytes of a file, mapped into memory."""
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            return np.empty(0, np.uint8)
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)


@contextmanager
def new_file(target: Any, mode: int | None = None) -> Iterator[Any]:
    """A file to write and seek in, whose bytes are at `target` when the block ends without error.

    `target` is a path (see `atomic_file`), a URL for fsspec, or a binary file object, written from
    its present position on. What cannot seek gets everything at the end, from a temporary file.
    """
    if is_path(target):
        with atomic_file(target, mode) as file:
            yield file
        return
    import shutil
    import tempfile

    if is_url(target):
        with tempfile.TemporaryFile() as file:
            yield file
            file.seek(0)
            with _fsspec().open(target, "wb") as out:
                shutil.copyfileobj(file, out, 1 << 22)
        return
    if not hasattr(target, "write"):
        raise TypeError(f"Expected a path, a URL or a file object, got {type(target).__name__}")
    if target.seekable():
        yield _Part(target)
        return
    with tempfile.TemporaryFile() as file:
        yield file
        file.seek(0)
        shutil.copyfileobj(file, target, 1 << 22)
        target.flush()


class _Part:
    """A file object whose position 0 is where another one's was."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._start = file.tell()

    def seek(self, at: int, whence: int = os.SEEK_SET) -> int:
        """As that of a file."""
        if whence == os.SEEK_SET:
            at += self._start
        return self._file.seek(at, whence) - self._start

    def write(self, data: Any) -> int:
        """Write all of `data`: an unbuffered file may take less at a time."""
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view):
            done += self._file.write(view[done:]) or 0
        return done


@contextmanager
def atomic_file(path: PathLike, mode: int | None = None) -> Iterator[BinaryIO]:
    """A new file that takes the name `path` when the block ends without an error.

    Until then it has another name in the same folder, and nobody else may read it; on an error it
    is removed. Data and folder are synced, so that a crash leaves the old file or the new one. A
    link is followed, an existing file keeps its permissions, a new one gets `mode` or what the
    umask says. Raises OSError, also for a `path` that is there and no regular file.
    """
    target = Path(os.path.realpath(path))
    if target.exists():
        status = target.stat()
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "is there and not a regular file", str(path))
        mode = stat.S_IMODE(status.st_mode)
    temporary = target.with_name(f".{target.name[:40]}.{os.urandom(8).hex()}.tmp")
    if mode is None:
        mode = _mode_by_umask(temporary)
    try:
        with os.fdopen(_create(temporary, 0o600), "wb") as file:
            yield file
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    try:
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise


def _create(path: Path, mode: int) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)


def _mode_by_umask(path: Path) -> int:
    """Permissions of a new file, learnt from an empty one: to read the umask is to change it."""
    descriptor = _create(path, 0o666)
    try:
        return stat.S_IMODE(os.fstat(descriptor).st_mode)
    finally:
        os.close(descriptor)
        path.unlink()
