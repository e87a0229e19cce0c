"""Compressed safetensors files (specs/container.md): written whole or not at all, read lazily."""

from __future__ import annotations

import errno
import io
import math
import mmap
import os
import stat
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, BinaryIO

import numpy as np

from . import arrays, engine
from .codec import Codec, as_codec, decode
from .codecs.base import Bytes, Plan
from .engine import DEFAULT_MAX_NBYTES, Parsed
from .formats.container import (
    LIST,
    LIST_KEY,
    Directory,
    Entry,
    check_compressed,
    check_names,
    compressed_metadata,
    directory_bytes,
    read_directory,
    source_directory,
    users_metadata,
)
from .formats.errors import FormatError, integer
from .formats.header import Header
from .planning import device_files, make_plan

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
    """A file with one buffer per name, in order; see `write_container`."""
    with atomic_file(path, mode) as file:
        write_container(file, plans, buffers, metadata)


def write_container(
    file: BinaryIO,
    plans: Mapping[str, Plan],
    buffers: Iterator[Parsed],
    metadata: Mapping[str, str],
) -> None:
    """Write one buffer per name, in order, as each comes; the header goes in last.

    `plans` bounds the sizes, so that space for the header can be left in front. No buffer is held
    while the next one is made.
    """
    head_nbytes = header_bound(plans, metadata)
    entries = []
    at = 0
    file.seek(head_nbytes)
    for name in plans:
        size = _write_pieces(file, next(buffers))
        entries.append(Entry(name, "U8", (size,), at, at + size))
        at += size
    if next(buffers, None) is not None:
        raise ValueError("more buffers than plans")
    file.seek(0)
    file.write(directory_bytes(entries, metadata, head_nbytes))


def header_bound(plans: Mapping[str, Plan], metadata: Mapping[str, str]) -> int:
    """Where the data of a file with buffers of these plans can start."""
    largest = sum(plan.nbytes for plan in plans.values())
    widest = [Entry(name, "U8", (largest,), largest, largest) for name in plans]
    return len(directory_bytes(widest, metadata))


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
    encoded tensor. PyTorch's tensors of one GPU are encoded there, some 128 MiB at a time, while
    packed bytes cross the bus and are written by threads. The file appears whole or not at all.
    Raises TypeError or ValueError for a bad call, OSError if the disk fails.
    """
    if not isinstance(tensors, Mapping):
        raise TypeError(f"tensors is a {type(tensors).__name__}; allowed: names to arrays")
    fields = compressed_metadata(dict(metadata or {}))
    chosen = as_codec(codec)
    plans, buffers = _encoded(tensors, chosen, threads)
    gpu_files = device_files() if _on_one_gpu(tensors.values()) else None
    if isinstance(gpu_files, ModuleType):
        with atomic_file(path) as file:
            gpu_files.write_container(file, plans, tensors, chosen, fields)
    else:
        write_compressed(path, plans, buffers, fields)


def _on_one_gpu(tensors: Collection[Any]) -> bool:
    """True for tensors of PyTorch, one or more, all on the same GPU."""
    if not tensors or not all(arrays.on_gpu(x) for x in tensors):
        return False
    first, *others = (arrays.target_of(x) for x in tensors)
    return first.library == "torch" and all(other == first for other in others)


def _encoded(
    tensors: Mapping[str, Any], codec: str | Codec, threads: int | None
) -> tuple[dict[str, Plan], Iterator[Parsed]]:
    """Plans by name, and the buffers, each encoded when it is asked for."""
    chosen = as_codec(codec)
    check_names(tensors)
    plans = {}
    for name, x in tensors.items():
        with _naming_call(name):
            info = arrays.describe(x)
            plans[name] = make_plan(chosen.spec, info.dtype, info.shape, None)
    return plans, _buffers(chosen, tensors, threads)


def _buffers(chosen: Codec, tensors: Mapping[str, Any], threads: int | None) -> Iterator[Parsed]:
    for name, x in tensors.items():
        with _naming_call(name):
            parsed = chosen.encode(x, chunks=None, threads=threads).parsed()
        yield parsed


@contextmanager
def _naming_call(name: str) -> Iterator[None]:
    """Say in the error of a bad call which tensor it is about."""
    try:
        yield
    except FormatError:
        raise
    except TypeError as error:
        raise TypeError(f"tensors[{name!r}]: {error}") from error
    except ValueError as error:
        raise ValueError(f"tensors[{name!r}]: {error}") from error


def dumps(
    tensors: Mapping[str, Any] | Sequence[Any],
    codec: str | Codec = "zipccl",
    *,
    threads: int | None = None,
) -> bytes:
    """Many arrays of any library as one message, which `loads` reads.

    `tensors` is names to arrays or a list (or tuple) of arrays. The bytes are those of the file
    that `save_file` writes; a list is kept as tensors "0", "1", ... with a mark in the metadata
    (specs/container.md). Raises TypeError or ValueError for a bad call.
    """
    metadata = compressed_metadata({})
    if isinstance(tensors, (list, tuple)):
        tensors = {str(i): x for i, x in enumerate(tensors)}
        metadata[LIST_KEY] = LIST
    elif not isinstance(tensors, Mapping):
        found = type(tensors).__name__
        raise TypeError(f"tensors is a {found}; allowed: names to arrays, or a list of arrays")
    message = io.BytesIO()
    write_container(message, *_encoded(tensors, codec, threads), metadata)
    return message.getvalue()


def loads(
    data: Any,
    *,
    like: Any = "numpy",
    max_nbytes: int = DEFAULT_MAX_NBYTES,
    threads: int | None = None,
) -> dict[str, Any] | list[Any]:
    """The arrays of a message by `dumps`, checked: a dict, or a list if it was given one.

    `data` is bytes-like or a uint8 array; the contents of a compressed file will do. `like`, an
    array or a library's name, says which library the arrays belong to. Raises FormatError for
    bytes that are no such message, or whose arrays need more than `max_nbytes` bytes together.
    """
    max_nbytes = integer("max_nbytes", max_nbytes, least=0)
    contents = Contents(_message(data))
    buffers = contents.parse_all(max_nbytes)
    plans = [parsed.plan for parsed in buffers.values()]
    total = sum(plan.nelem * plan.dtype.itemsize for plan in plans)
    if total > max_nbytes:
        raise FormatError("limit_exceeded", f"{total} bytes, max_nbytes is {max_nbytes}")
    tensors = decode_all(buffers, like, threads)
    return list(tensors.values()) if LIST_KEY in contents.directory.metadata else tensors


def _message(data: Any) -> Bytes:
    try:
        return arrays.bytes_view(data)
    except TypeError as error:
        raise TypeError(f"Expected the bytes of a message: {error}") from error


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Say in a FormatError what it is about."""
    try:
        yield
    except FormatError as error:
        raise FormatError(error.reason, f"{what}: {error.detail}") from None


class Contents:
    """The bytes of a compressed file or message, their header checked.

    Every reader goes through here, so that all give the same reason for the same bytes
    (specs/container.md, "Reading"). Raises FormatError.
    """

    def __init__(self, data: Bytes) -> None:
        self.data = data
        self.directory = read_directory(data.data)
        check_compressed(self.directory)
        #: Header of the file that this one was made from, None if there was none.
        self.source = source_directory(self.directory)
        self._entries = {e.name: e for e in self.directory.entries}
        self._sources = {} if self.source is None else {e.name: e for e in self.source.entries}

    def names(self) -> list[str]:
        """Names of the tensors, in the order of their data."""
        return list(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def buffer(self, name: str) -> Bytes:
        """The bytes of one tensor's buffer, a view, as they are. KeyError for another name."""
        return self.data[self.directory.span(self._entries[name])]

    def parse(self, name: str, max_nbytes: int) -> Parsed:
        """One tensor's buffer, checked but for its payload."""
        with naming(f"tensor {name!r}"):
            parsed = engine.parse(self.buffer(name), max_nbytes)
            self.check_head(name, parsed.header, parsed.plan)
        return parsed

    def check_head(self, name: str, header: Header, plan: Plan) -> None:
        """Refuse a buffer that is not packed, or another tensor than the source header says."""
        if header.dynamic_stride:
            raise FormatError("bad_container", "the buffer is not packed")
        if self.source is not None:
            source = self._sources[name]
            if (source.dtype, source.shape) != (plan.dtype.safetensors, plan.shape):
                found = f"{plan.dtype.name}{list(plan.shape)}"
                wanted = f"{source.dtype}{list(source.shape)}"
                raise FormatError("bad_container", f"{found}; the source header says {wanted}")

    def parse_all(self, max_nbytes: int) -> dict[str, Parsed]:
        """The buffers of all tensors, so that a bad one is found before anything is decoded."""
        max_nbytes = integer("max_nbytes", max_nbytes, least=0)
        return {name: self.parse(name, max_nbytes) for name in self._entries}


def decode_all(
    buffers: Mapping[str, Parsed], like: Any, threads: int | None = None
) -> dict[str, Any]:
    """The tensors of parsed buffers, by name, payloads checked, in the library of `like`."""
    tensors = {}
    for name, parsed in buffers.items():
        with naming(f"tensor {name!r}"):
            tensors[name] = decode(parsed, like=like, threads=threads)
    return tensors


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
        self.max_nbytes = integer("max_nbytes", max_nbytes, least=0)
        self._contents = Contents(map_file(path))
        self._closed = False

    @property
    def contents(self) -> Contents:
        """What readers of whole files work on. ValueError after `close`."""
        if self._closed:
            raise ValueError(f"{self.path} is closed")
        return self._contents

    @property
    def metadata(self) -> dict[str, str]:
        """The file's metadata without tightwire's own entries."""
        return users_metadata(self._contents.directory.metadata)

    def keys(self) -> list[str]:
        """Names of the tensors, in the order of their data."""
        return self._contents.names()

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self.keys())

    def __contains__(self, name: object) -> bool:
        return name in self._contents

    def buffer(self, name: str) -> Bytes:
        """The packed buffer of one tensor: uint8, a view of the file."""
        return self._holding(name).buffer(name)

    def _holding(self, name: str) -> Contents:
        """The contents, if they hold a tensor of that name; else KeyError."""
        if name not in self:
            raise KeyError(f"{name!r} is not in {self.path}")
        return self.contents

    def __getitem__(self, name: str) -> LazyTensor:
        contents = self._holding(name)
        parsed = contents.parse(name, self.max_nbytes)
        return LazyTensor(name, parsed.header, parsed.data, self.like, self.max_nbytes)

    def get(self, name: str, *, like: Any = None, threads: int | None = None) -> Any:
        """One whole tensor, checked, in the library and on the device of `like`."""
        chosen = self.like if like is None else like
        contents = self._holding(name)
        parsed = contents.parse(name, self.max_nbytes)
        return decode_all({name: parsed}, chosen, threads)[name]

    def close(self) -> None:
        """Let go of the file; buffers handed out stay valid."""
        self._contents.data = np.empty(0, np.uint8)
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


def map_file(path: PathLike) -> Bytes:
    """The bytes of a file, mapped into memory."""
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            return np.empty(0, np.uint8)
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)


def map_safetensors(path: PathLike) -> tuple[Bytes, Directory]:
    """Map a safetensors file and read its header. Raises FormatError or OSError."""
    data = map_file(path)
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
    """Every tensor of a compressed safetensors file, checked, by name.

    `like`, an array or a library's name, says where they go. To a GPU the compressed bytes cross
    the bus, and are decoded and checked there, in the order of the current stream; reading, copies
    and kernels overlap. `max_nbytes` bounds each tensor. Raises FormatError, OSError, and
    torch.OutOfMemoryError where a GPU has too little memory.
    """
    contents = Contents(map_file(path))
    target = arrays.target_of(like)
    gpu_files = device_files() if target.device is not None else None
    if isinstance(gpu_files, ModuleType):
        loaded: dict[str, Any] = gpu_files.load_file(Path(path), contents, target, max_nbytes)
        return loaded
    return decode_all(contents.parse_all(max_nbytes), like, threads)
