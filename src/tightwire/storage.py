"""Bytes of files: read range by range from paths, memory and file objects; written
atomically.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import mmap
import os
import re
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np

from . import arrays
from .codecs.common.base import Bytes
from .formats.errors import FormatError

PathLike = str | os.PathLike[str]

#: Errors that say a folder cannot be synced here, as on some network file systems.
_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EACCES, errno.EPERM)
#: Modules whose file objects start anew from the beginning to seek backwards.
_UNPACKERS = ("gzip", "bz2", "lzma", "zipfile", "tarfile")


class Reader(Protocol):
    """Where bytes of a file come from. Threads may share one. Closed, it raises ValueError."""

    #: What to call it in errors.
    name: str
    nbytes: int

    def read(self, start: int, nbytes: int) -> Bytes:
        """Bytes `start` to `start + nbytes`, uint8, aligned to 8 or a view.

        Raises FormatError("truncated") if the file has become shorter, and OSError, also if it has
        been changed since it was opened.
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
        self._data: Bytes | None = data

    def read(self, start: int, nbytes: int) -> Bytes:
        """See `Reader`."""
        data = self._data
        if data is None:
            raise ValueError(f"{self.name} is closed")
        return data[start : start + nbytes]

    def read_into(self, start: int, out: Bytes) -> None:
        """See `Reader`."""
        out[:] = self.read(start, out.size)

    def close(self) -> None:
        """See `Reader`."""
        self._data = None


class MappedReader(MemoryReader):
    """A file mapped into memory, for reads of a few rows here and there."""

    def __init__(self, path: PathLike) -> None:
        super().__init__(map_file(path), os.fsdecode(path))


class PathReader:
    """A file of the system."""

    def __init__(self, path: PathLike) -> None:
        self.name = os.fsdecode(path)
        self.fd = -1
        self.fd = _open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        try:
            status = os.fstat(self.fd)
            if stat.S_ISDIR(status.st_mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), self.name)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "is not a regular file", self.name)
            self.nbytes = status.st_size
            self._changed_ns = status.st_mtime_ns
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
        if self.fd < 0:
            raise ValueError(f"{self.name} is closed")
        view = out.data
        done = 0
        while done < len(view):
            try:
                n = os.preadv(self.fd, [view[done:]], start + done)
            except OSError as error:
                raise OSError(error.errno, error.strerror, self.name) from error
            if n == 0:
                raise _truncated(self.name)
            done += n
        self._check_unchanged()

    def _check_unchanged(self) -> None:
        """Old bytes and new ones are not mixed, as far as the system keeps time."""
        status = os.fstat(self.fd)
        if status.st_size < self.nbytes:
            raise _truncated(self.name)
        if (status.st_size, status.st_mtime_ns) != (self.nbytes, self._changed_ns):
            raise OSError(errno.EBUSY, "changed while it was read", self.name)

    def close(self) -> None:
        """See `Reader`."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __del__(self) -> None:
        self.close()


def _open(path: PathLike, flags: int) -> int:
    """As os.open; never waits for the other end of a pipe."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _truncated(name: str) -> FormatError:
    return FormatError("truncated", f"{name} became shorter while it was read")


def _name_file(error: OSError, name: str) -> None:
    """Say in an error of the system which file it is about."""
    if error.filename is None:
        error.filename = name


class StreamReader:
    """A file object that can seek, from its present position to its end."""

    def __init__(self, file: BinaryIO, close: Callable[[], None]) -> None:
        self.name = _name_of(file)
        self._file: BinaryIO | None = file
        self._close = close
        self._lock = threading.Lock()
        self._start = file.tell()
        self.nbytes = file.seek(0, os.SEEK_END) - self._start

    def read(self, start: int, nbytes: int) -> Bytes:
        """See `Reader`."""
        with self._lock:
            if self._file is None:
                raise ValueError(f"{self.name} is closed")
            self._file.seek(self._start + start)
            data = _read_all(self._file, nbytes)
        if len(data) < nbytes:
            raise _truncated(self.name)
        return np.frombuffer(data, np.uint8)

    def read_into(self, start: int, out: Bytes) -> None:
        """See `Reader`."""
        out[:] = self.read(start, out.size)

    def close(self) -> None:
        """See `Reader`."""
        with self._lock:
            self._file = None
        self._close()


def _name_of(file: Any) -> str:
    """What to call a file object: its name if it has one, as files of the system do."""
    name = getattr(file, "name", None)
    return name if isinstance(name, str) and name else f"the {type(file).__name__}"


def _read_all(file: BinaryIO, nbytes: int) -> bytes:
    """`nbytes` bytes of a file object whose reads may be short, fewer at its end."""
    pieces = []
    missing = nbytes
    try:
        while missing and (data := file.read(missing)):
            pieces.append(data)
            missing -= len(data)
    except OSError as error:
        _name_file(error, str(getattr(file, "name", type(file).__name__)))
        raise
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def is_url(source: Any) -> bool:
    """True for text like s3://bucket/key, which fsspec opens."""
    return isinstance(source, str) and "://" in source


def is_path(source: Any) -> bool:
    """True for the path of a file of the system."""
    return isinstance(source, (str, os.PathLike)) and not is_url(source)


def _url(url: str) -> tuple[Any, str]:
    """The file system of fsspec and the path there that a URL names.

    Of URLs of local files (file://) the file system is None.
    """
    try:
        from fsspec.core import url_to_fs
        from fsspec.implementations.local import LocalFileSystem
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("URLs need fsspec: pip install fsspec", name="fsspec") from error
    system, path = url_to_fs(url)
    return (None if isinstance(system, LocalFileSystem) else system), path


def _check_binary(file: Any) -> None:
    if isinstance(file, io.TextIOBase):
        raise TypeError(
            f"{_name_of(file)} is open as text. Allowed: files in binary mode, sys.stdin.buffer, "
            "sys.stdout.buffer"
        )


def _can_seek(file: Any) -> bool:
    seekable = getattr(file, "seekable", None)
    return seekable is not None and bool(seekable())


def open_reader(source: Any) -> Reader:
    """A reader of a path, a URL for fsspec, a binary file object, bytes-like or a uint8 array.

    A file object is read from its present position to its end; at once if it cannot seek, or only
    by starting anew as those that unpack do. Raises OSError; TypeError for anything else.
    """
    if is_url(source):
        system, path = _url(source)
        if system is None:
            return PathReader(path)
        file = system.open(path, "rb")
        return StreamReader(file, file.close)
    if isinstance(source, (str, os.PathLike)):
        return PathReader(source)
    if hasattr(source, "read") and not isinstance(source, (np.memmap, mmap.mmap)):
        _check_binary(source)
        if not _can_seek(source) or type(source).__module__ in _UNPACKERS:
            return MemoryReader(_to_the_end(source), _name_of(source))
        return StreamReader(source, lambda: None)
    try:
        return MemoryReader(arrays.bytes_view(source))
    except TypeError:
        kind = type(source).__name__
        raise TypeError(f"Expected a path, a URL, a binary file or bytes, got {kind}") from None


def _to_the_end(file: Any) -> Bytes:
    data = file.read()
    if data is None:
        raise BlockingIOError(errno.EAGAIN, "is non-blocking and has no bytes yet", _name_of(file))
    return np.frombuffer(data, np.uint8)


@contextmanager
def reading(source: Any) -> Iterator[Reader]:
    """`open_reader`, closed when the block ends."""
    reader = open_reader(source)
    try:
        yield reader
    finally:
        reader.close()


def refuse_directory(path: Any) -> None:
    """Raise IsADirectoryError for a path of a directory, where one file is read."""
    if is_path(path) and os.path.isdir(path):
        message = f"{os.strerror(errno.EISDIR)}; tightwire.load reads directories"
        raise IsADirectoryError(errno.EISDIR, message, os.fsdecode(path))


def map_file(path: PathLike) -> Bytes:
    """The bytes of a file, mapped into memory."""
    with open(path, "rb", opener=_open) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "is not a regular file", os.fsdecode(path))
        if status.st_size == 0:
            return np.empty(0, np.uint8)
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)


@contextmanager
def new_file(target: Any, mode: int | None = None, mtime_ns: int | None = None) -> Iterator[Any]:
    """A file to write and seek in, whose bytes are at `target` when the block ends without error.

    `target` is a path (see `atomic_file`, also for `mode` and `mtime_ns`), a URL for fsspec, or a
    binary file object, written from its present position on. BytesIO and files of the system are
    written in place, and are as long as before after an error; what else there is gets everything
    at the end, from a temporary file.
    """
    import tempfile

    if is_url(target):
        system, path = _url(target)
        if system is not None:
            with tempfile.NamedTemporaryFile(prefix="tightwire.") as file:
                yield file
                file.flush()
                system.put_file(file.name, path)
            return
        target = path
    if is_path(target):
        with atomic_file(target, mode, mtime_ns) as file:
            yield file
        return
    if not hasattr(target, "write"):
        kind = type(target).__name__
        raise TypeError(f"Expected a path, a URL or a binary file, got {kind}")
    _check_binary(target)
    if _written_in_place(target):
        with _part(target) as part:
            yield part
        return
    with tempfile.TemporaryFile() as file:
        yield file
        file.seek(0)
        while piece := file.read(1 << 22):
            _write_all(target, piece)
        if hasattr(target, "flush"):
            target.flush()


def _written_in_place(file: Any) -> bool:
    """True if bytes go where `seek` says: not for files that unpack or append."""
    if isinstance(file, io.BytesIO):
        return True
    if not isinstance(file, (io.FileIO, io.BufferedWriter, io.BufferedRandom)):
        return False
    if not isinstance(getattr(file, "raw", file), io.FileIO) or not file.seekable():
        return False
    return not fcntl.fcntl(file.fileno(), fcntl.F_GETFL) & os.O_APPEND


def _write_all(file: Any, data: Any) -> int:
    """Write all of `data`: an unbuffered file may take less at a time.

    File objects that are not of `io` may give None, as SFTP's of paramiko do: they took all.
    """
    view = memoryview(data).cast("B")
    done = 0
    while done < len(view):
        n = file.write(view[done:])
        if n is None and not isinstance(file, io.IOBase):
            n = len(view) - done
        if not n:
            raise BlockingIOError(errno.EAGAIN, "is non-blocking and takes no bytes now")
        done += n
    return done


@contextmanager
def _part(file: BinaryIO) -> Iterator[_Part]:
    """`file` from its present position on; as long as before if the block ends with an error."""
    part = _Part(file)
    size = part.seek(0, os.SEEK_END)
    part.seek(0)
    try:
        yield part
    except BaseException:
        # What went wrong counts, not that it cannot be undone.
        with contextlib.suppress(OSError):
            part.seek(0)
            part.truncate(max(size, 0))
        raise


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
        """Write all of `data`."""
        return _write_all(self._file, data)

    def truncate(self, size: int) -> None:
        """As that of a file."""
        self._file.truncate(self._start + size)


def refuse_link(path: PathLike) -> None:
    """Raise FileExistsError for a link, which is not to be written through."""
    if os.path.islink(path):
        raise FileExistsError(errno.EEXIST, "is a link, and not written through", os.fspath(path))


@contextmanager
def atomic_file(
    path: PathLike, mode: int | None = None, mtime_ns: int | None = None, *, follow: bool = True
) -> Iterator[BinaryIO]:
    """A new file that takes the name `path` when the block ends without an error.

    Until then it has another name in the same folder, and nobody else may read it; on an error it
    is removed. Data and folder are synced, so that a crash leaves the old file or the new one. A
    link is followed, or refused without `follow`; links of folders before it are always followed.
    An existing file keeps its permissions, a new one gets `mode` or what the umask says.
    `mtime_ns`, if given, becomes the time of its last change. Raises OSError, also for a `path`
    that is there and no regular file.
    """
    target = Path(os.path.realpath(path))
    if not follow:
        refuse_link(path)
        # Also of a link that appears later: it is replaced.
        target = Path(os.path.realpath(Path(path).parent), Path(path).name)
    if target.exists():
        status = target.stat()
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "is there and not a regular file", str(path))
        mode = stat.S_IMODE(status.st_mode)
    temporary = target.with_name(f"{_temporary_stem(target)}{os.urandom(8).hex()}.tmp")
    try:
        if mode is None:
            mode = _mode_by_umask(temporary)
        with os.fdopen(_create(temporary, 0o600), "wb") as file:
            _lock(file.fileno())
            yield file
            file.flush()
            os.fchmod(file.fileno(), mode)
            if mtime_ns is not None:
                os.utime(file.fileno(), ns=(mtime_ns, mtime_ns))
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            if error.filename == str(temporary):
                # The caller knows nothing of that file.
                raise OSError(error.errno, error.strerror, str(path)) from None
            _name_file(error, str(path))
        raise
    sync_folder(target.parent)


def sync_folder(path: Path) -> None:
    """Have the names in a folder survive a crash, where its file system can. Raises OSError."""
    try:
        folder = os.open(path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise


def _temporary_stem(target: Path) -> str:
    """How the temporary names of a file begin."""
    return f".{target.name[:40]}."


#: Characters behind it: 16 digits and ".tmp".
_RANDOM_LENGTH = 20
_TEMPORARY = re.compile(r"\..{1,40}\.[0-9a-f]{16}\.tmp", re.DOTALL)


def is_temporary(name: str) -> bool:
    """True for names that `atomic_file` gives to files that are not whole yet."""
    return _TEMPORARY.fullmatch(name) is not None


def _lock(descriptor: int) -> bool:
    """Lock a file until it is closed or this process ends. False if another process has it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def remove_leftovers(targets: Iterable[Path], before_ns: int) -> None:
    """Remove the temporary files that killed processes left of these targets.

    They are locked by nobody and were last written before `before_ns`, in nanoseconds since 1970.
    """
    stems: dict[Path, set[str]] = {}
    for target in targets:
        stems.setdefault(target.parent, set()).add(_temporary_stem(target))
    for folder, of_targets in stems.items():
        for path in list(folder.iterdir()):
            if is_temporary(path.name) and path.name[:-_RANDOM_LENGTH] in of_targets:
                _remove_leftover(path, before_ns)


def _remove_leftover(path: Path, before_ns: int) -> None:
    # Those of other users, which cannot be opened, stay.
    with contextlib.suppress(FileNotFoundError, PermissionError), open(path, "rb") as file:
        if os.fstat(file.fileno()).st_mtime_ns < before_ns and _lock(file.fileno()):
            path.unlink()


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


def save_figure(figure: Any, path: PathLike) -> None:
    """Write a matplotlib figure as PNG; `path` appears atomically."""
    with atomic_file(path) as file:
        figure.savefig(file, format="png", dpi=150)
