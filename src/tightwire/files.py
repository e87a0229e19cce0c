"""Compressed safetensors files (specs/container.md): written whole or not at all, read lazily."""

from __future__ import annotations

import errno
import math
import mmap
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np

from . import arrays, engine
from .codec import Codec, as_codec, decode
from .codecs.base import Bytes, Plan
from .engine import DEFAULT_MAX_NBYTES, Parsed
from .formats.container import (
    SOURCE_KEY,
    VERSION_KEY,
    Directory,
    Entry,
    check_compressed,
    compressed_metadata,
    directory_bytes,
    read_directory,
)
from .formats.header import Header
from .planning import make_plan

PathLike = str | os.PathLike[str]


#: Errors that say a folder cannot be synced here, as on some network file systems.
_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EACCES, errno.EPERM)


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


def write_compressed(
    path: PathLike,
    plans: Mapping[str, Plan],
    buffers: Iterator[Parsed],
    metadata: Mapping[str, str],
    mode: int | None = None,
) -> None:
    """Write one buffer per name, in order, as each comes; the header goes in last.

    `plans` bounds the sizes, so that room for the header can be left in front. No buffer is held
    while the next one is made.
    """
    largest = sum(plan.nbytes for plan in plans.values())
    widest = [Entry(name, "U8", (largest,), largest, largest) for name in plans]
    room = len(directory_bytes(widest, metadata))
    entries = []
    at = 0
    with atomic_file(path, mode) as file:
        file.seek(room)
        for name in plans:
            size = _write_pieces(file, next(buffers))
            entries.append(Entry(name, "U8", (size,), at, at + size))
            at += size
        if next(buffers, None) is not None:
            raise ValueError("more buffers than plans")
        file.seek(0)
        file.write(directory_bytes(entries, metadata, room))


def _write_pieces(file: BinaryIO, parsed: Parsed) -> int:
    return sum(file.write(piece.data) for piece in parsed.pieces())


def save_file(
    tensors: Mapping[str, Any],
    path: PathLike,
    codec: str | Codec = "zipccl",
    *,
    metadata: Mapping[str, str] | None = None,
    threads: int | None = None,
) -> None:
    """Write named arrays of any library as a compressed safetensors file.

    Tensors are encoded and written one by one: beside the caller's arrays, memory holds one
    encoded tensor. The file appears whole or not at all. Raises TypeError or ValueError for a bad
    call, OSError if the disk fails.
    """
    chosen = as_codec(codec)
    if not isinstance(tensors, Mapping):
        raise TypeError(f"tensors is a {type(tensors).__name__}; allowed: names to arrays")
    for name in tensors:
        if not isinstance(name, str) or name == "__metadata__":
            raise ValueError(f"tensor name {name!r}; allowed: any text but '__metadata__'")
    metadata = dict(metadata or {})
    for key, value in metadata.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise TypeError(f"metadata {key!r}: {value!r}; allowed: text to text")
        if key in (VERSION_KEY, SOURCE_KEY):
            raise ValueError(f"metadata {key!r} is tightwire's own; allowed: other keys")
    plans = {}
    for name, x in tensors.items():
        info = arrays.describe(x)
        plans[name] = make_plan(chosen.spec, info.dtype, info.shape, None)
    buffers = (chosen.encode(x, chunks=None, threads=threads).parsed() for x in tensors.values())
    write_compressed(path, plans, buffers, compressed_metadata(metadata))


@dataclass(frozen=True)
class LazyTensor:
    """A tensor in an open file. Indexing decodes only the rows (first dimension) that it needs."""

    name: str
    header: Header
    data: Bytes
    like: Any
    max_nbytes: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the decoded tensor."""
        return self.header.shape

    @property
    def dtype(self) -> str:
        """Name of its element type."""
        return self.header.dtype.name

    def numpy(self) -> Any:
        """The whole tensor, checked, as a NumPy array."""
        return decode(self.data, like="numpy", max_nbytes=self.max_nbytes)

    def __getitem__(self, index: Any) -> Any:
        rest = index if isinstance(index, tuple) else (index,)
        if not self.shape or not rest or rest[0] is Ellipsis or rest[0] is None:
            return self._whole()[index]
        first = rest[0]
        n_rows = self.shape[0]
        if isinstance(first, slice):
            rows = range(n_rows)[first]
            lo, last = sorted((rows[0], rows[-1])) if rows else (0, -1)
            hi = last + 1
            inner: Any = slice(None, None, rows.step)
        elif isinstance(first, (int, np.integer)) and not isinstance(first, bool):
            lo = range(n_rows)[int(first)]
            hi, inner = lo + 1, 0
        else:
            return self._whole()[index]
        row = math.prod(self.shape[1:])
        flat = decode(
            self.data, like=self.like, start=lo * row, stop=hi * row, max_nbytes=self.max_nbytes
        )
        return flat.reshape((hi - lo, *self.shape[1:]))[(inner, *rest[1:])]

    def _whole(self) -> Any:
        return decode(self.data, like=self.like, max_nbytes=self.max_nbytes)


class File:
    """A compressed safetensors file, mapped into memory: tensors decode when they are asked for.

    A context manager and a mapping from names to `LazyTensor`. Whole tensors and chunks are
    checked; a selection of rows skips the checksum of chunks that it decodes in part. As with any
    mapped file, another process that cuts the file off while it is open ends this one (SIGBUS);
    files that are replaced, as `save_file` does, are safe.
    """

    def __init__(
        self, path: PathLike, *, like: Any = "numpy", max_nbytes: int = DEFAULT_MAX_NBYTES
    ) -> None:
        self.path = Path(path)
        self.like = like
        self.max_nbytes = max_nbytes
        self.data, self.directory = map_safetensors(path)
        check_compressed(self.directory)
        self._entries = {e.name: e for e in self.directory.entries}
        self._closed = False

    @property
    def metadata(self) -> dict[str, str]:
        """The file's metadata without tightwire's own entries."""
        own = (VERSION_KEY, SOURCE_KEY)
        return {k: v for k, v in self.directory.metadata.items() if k not in own}

    def keys(self) -> list[str]:
        """Names of the tensors, in the order of their data."""
        return list(self._entries)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def buffer(self, name: str) -> Bytes:
        """The packed buffer of one tensor: uint8, a view of the file."""
        if self._closed:
            raise ValueError(f"{self.path} is closed")
        try:
            entry = self._entries[name]
        except KeyError:
            raise KeyError(f"{name!r} is not in {self.path}") from None
        return self.data[self.directory.span(entry)]

    def __getitem__(self, name: str) -> LazyTensor:
        data = self.buffer(name)
        parsed = engine.parse(data, self.max_nbytes)
        return LazyTensor(name, parsed.header, data, self.like, self.max_nbytes)

    def get(self, name: str, *, like: Any = None, threads: int | None = None) -> Any:
        """One whole tensor, checked, in the library and on the device of `like`."""
        chosen = self.like if like is None else like
        return decode(self.buffer(name), like=chosen, max_nbytes=self.max_nbytes, threads=threads)

    def close(self) -> None:
        """Let go of the file; buffers handed out stay valid."""
        self.data = np.empty(0, np.uint8)
        self._closed = True

    def __enter__(self) -> File:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def map_safetensors(path: PathLike) -> tuple[Bytes, Directory]:
    """Map a safetensors file and read its header. Raises FormatError or OSError."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size == 0:
            data = np.empty(0, np.uint8)
        else:
            data = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    return data, read_directory(data.data)


def open_file(path: PathLike, *, like: Any = "numpy", max_nbytes: int = DEFAULT_MAX_NBYTES) -> File:
    """Open a compressed safetensors file lazily (`tightwire.open`).

    `like`, an array or a library's name, says which library decoded tensors belong to.
    Raises FormatError if it is none, OSError if it cannot be read.
    """
    return File(path, like=like, max_nbytes=max_nbytes)


def load_file(
    path: PathLike,
    *,
    like: Any = "numpy",
    max_nbytes: int = DEFAULT_MAX_NBYTES,
    threads: int | None = None,
) -> dict[str, Any]:
    """Every tensor of a compressed safetensors file, checked, by name."""
    with open_file(path, like=like, max_nbytes=max_nbytes) as file:
        return {name: file.get(name, threads=threads) for name in file}
