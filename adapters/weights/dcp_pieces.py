"""Pieces of tensors in the files of compressed checkpoints of torch.distributed.checkpoint."""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path, PurePath
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from ... import arrays
from ...contents import Contents, advising, naming
from ...decoding import decode
from ...file_tensors import Kind
from ...formats.container import MAX_DELTAS
from ...formats.dtypes import BY_NAME, DType
from ...formats.errors import FormatError
from ...loading import fill
from ...storage import reading

#: What DCP's own reader says that it lacks, when it is given a compressed checkpoint.
EXTENSION = "tightwire"
#: What pieces that were coded against a base have besides it.
DELTA = "delta"
#: The attribute of ``.metadata`` that has a `BaseName`, as a dict.
_BASE = "tightwire_base"
#: What to do about one that is not valid.
_NEEDED = "Needed: a copy of the checkpoint, or another one"


class BaseName(NamedTuple):
    """Which checkpoint one with deltas is against.

    `name` is that of its directory, without folders; `deltas` counts the checkpoints with deltas in
    a row, this one included.
    """

    name: str
    deltas: int


def set_base(metadata: Metadata, base: BaseName) -> None:
    """Note in ``.metadata`` which checkpoint it is against."""
    setattr(metadata, _BASE, base._asdict())


def base_of(metadata: Metadata) -> BaseName | None:
    """What ``.metadata`` says of the base; None if there is none. Raises FormatError."""
    note = getattr(metadata, _BASE, None)
    if note is None:
        return None
    try:
        name, deltas = BaseName(**note)
    except TypeError:
        detail = f"has the base {note!r:.64}. Allowed: name and deltas"
        raise FormatError("bad_container", detail) from None
    if type(name) is not str or name in ("", ".", "..") or any(c in name for c in "/\\\0"):
        detail = f"names the base {name!r:.64}. Allowed: the name of a directory, without folders"
        raise FormatError("bad_container", detail)
    if type(deltas) is not int or not 1 <= deltas <= MAX_DELTAS:
        detail = f"counts {deltas!r:.64} deltas in a row. Allowed: 1 to {MAX_DELTAS}"
        raise FormatError("bad_container", detail)
    return BaseName(name, deltas)


def entry_name(index: MetadataIndex) -> str:
    """The name of a piece of a tensor in a file: ``weight``, or ``weight@512,0`` with its offset.

    ``@`` in names of tensors is doubled, so that no two pieces have the same name.
    """
    name = str(index.fqn).replace("@", "@@")
    if not index.offset or not any(index.offset):
        return name
    return f"{name}@{','.join(map(str, index.offset))}"


def is_ours(info: Any) -> bool:
    """Whether a piece is in a compressed file."""
    return EXTENSION in (info.transform_descriptors or ())


def files_of(path: str | os.PathLike[str]) -> set[str]:
    """Names of the compressed files of a checkpoint, by its metadata, if there is one."""
    try:
        data = Path(path).read_bytes()
    except FileNotFoundError:
        return set()
    try:
        stored = (pickle.loads(data).storage_data or {}).values()
        return {i.relative_path for i in stored if is_ours(i) and is_inside(i.relative_path)}
    except Exception:
        # A damaged pickle may raise anything. It names no files, and may be replaced.
        return set()


def is_inside(name: str) -> bool:
    """Whether a file that ``.metadata`` names is in the checkpoint's directory."""
    path = PurePath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts


def shapes_of(metadata: Metadata) -> dict[MetadataIndex, tuple[int, ...]]:
    """The shape of each piece of a tensor."""
    return {
        MetadataIndex(name, piece.offsets): tuple(piece.sizes)
        for name, tensor in metadata.state_dict_metadata.items()
        if isinstance(tensor, TensorStorageMetadata)
        for piece in tensor.chunks
    }


@contextmanager
def telling(what: str) -> Iterator[None]:
    """Say in an error of the system what happened besides."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise OSError(f"{error}. {what}") from error
        detail = f"{error.strerror}. {what}"
        raise OSError(error.errno, detail, error.filename) from error


class OpenFiles(FileSystem):  # type: ignore[misc]
    """Gives DCP's own reader files that are open already, by their paths."""

    def __init__(self, files: Mapping[str, Any]) -> None:
        self._files = files

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        """One of the files."""
        yield self._files[os.fspath(path)]


class Checkpoint:
    """The compressed files of a checkpoint, open within a ``with`` block, and its base.

    Threads may share it. `find_base` opens the checkpoint called so that deltas are against.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        metadata: Metadata,
        find_base: Callable[[str], Checkpoint],
        max_nbytes: int,
        threads: int | None = None,
    ) -> None:
        self.path = Path(path)
        self.metadata = metadata
        with advising(_NEEDED), naming(str(self.path / ".metadata")):
            self.note = base_of(metadata)
        self.shapes = shapes_of(metadata)
        self._find_base = find_base
        self._max_nbytes = max_nbytes
        self._threads = threads

    def __enter__(self) -> Self:
        self._stack, self._lock = ExitStack(), threading.Lock()
        self._files: dict[str, Contents] = {}
        self._base: Checkpoint | None = None
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()
        # A checkpoint is pickled where a process of its own saves.
        del self._stack, self._lock, self._files, self._base

    def contents(self, file: str) -> Contents:
        """A file, its header read once. Raises FormatError or OSError."""
        if not is_inside(file):
            detail = f"{self.path}: .metadata names {file!r:.64}, which is not a file in it"
            raise FormatError("bad_container", detail)
        with self._lock:
            if file not in self._files:
                reader = self._stack.enter_context(reading(self.path / file))
                with naming(reader.name):
                    self._files[file] = Contents(reader)
            return self._files[file]

    @property
    def base(self) -> Checkpoint:
        """The checkpoint that deltas are against. Raises FormatError or OSError."""
        with self._lock:
            if self._base is None:
                if self.note is None:
                    detail = "has tensors that were coded against a base, and .metadata names none"
                    raise FormatError("bad_container", f"{self.path} {detail}")
                self._base = self._stack.enter_context(self._earlier(self.note))
            return self._base

    def _earlier(self, note: BaseName) -> Checkpoint:
        """The checkpoint that is noted, not open. Raises FormatError or OSError."""
        base = self._find_base(note.name)
        if base.note is not None and base.note.deltas >= note.deltas:
            detail = f"{self.path}: {note.deltas} deltas in a row, its base has as many"
            raise FormatError("bad_container", detail)
        return base

    def folders(self) -> list[Path]:
        """Where it is, and where those are that it needs, as far as they are there.

        Raises FormatError or OSError.
        """
        found, last = [self.path.resolve()], self
        while last.note is not None:
            try:
                last = last._earlier(last.note)
            except FileNotFoundError:
                break
            found.append(last.path.resolve())
        return found

    def open_files(self, indices: Iterable[MetadataIndex]) -> None:
        """Open the files that pieces are in, and those of the bases that they need.

        Raises FormatError or OSError.
        """
        stored = self.metadata.storage_data
        of_pieces = {index: stored[index] for index in indices if index in stored}
        for info in filter(is_ours, of_pieces.values()):
            self.contents(info.relative_path)
        deltas = [i for i, info in of_pieces.items() if DELTA in (info.transform_descriptors or ())]
        if deltas:
            self.base.open_files(deltas)

    def fill(self, index: MetadataIndex, out: torch.Tensor) -> None:
        """Put a piece into `out`, which has its shape and dtype and is contiguous.

        Raises FormatError or OSError.
        """
        info = self.metadata.storage_data.get(index)
        if info is None or not is_ours(info) or self.shapes.get(index) != tuple(out.shape):
            detail = f"{self.path} has no {entry_name(index)!r} of shape {list(out.shape)}"
            raise FormatError("base_mismatch", f"{detail}, which another checkpoint is against")
        contents, name = self.contents(info.relative_path), entry_name(index)
        with naming(contents.reader.name):
            head = contents.head(name, self._max_nbytes)
        if head is None or not head.plan.needs_base:
            fill([contents], {name: out}, "state", self._max_nbytes, self._threads)
            return
        self.base.fill(index, out)
        with naming(contents.reader.name), naming(f"tensor {name!r}"):
            packed = contents.buffer(name)
            decode(packed, base=out, out=out, max_nbytes=self._max_nbytes, threads=self._threads)


class EarlierTensors:
    """The pieces of tensors of a checkpoint, as what new ones are coded against."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self.label = str(checkpoint.path)
        self._indices: dict[str, MetadataIndex] = {}
        self._kinds: dict[str, tuple[DType, tuple[int, ...]]] = {}
        for index, shape in checkpoint.shapes.items():
            info = checkpoint.metadata.storage_data.get(index)
            dtype = str(checkpoint.metadata.state_dict_metadata[index.fqn].properties.dtype)
            kind = BY_NAME.get(dtype.removeprefix("torch."))
            if info is not None and is_ours(info) and kind is not None:
                self._indices[entry_name(index)] = index
                self._kinds[entry_name(index)] = kind, shape

    @property
    def names(self) -> list[str]:
        """Names as in the files."""
        return list(self._kinds)

    def kind(self, name: str) -> Kind:
        """Dtype and shape."""
        return self._kinds[name]

    def bits(self, name: str, threads: int | None = None) -> Any:
        """Bits of the elements, on the host, shape (n,)."""
        dtype, shape = self._kinds[name]
        out = torch.empty(shape, dtype=getattr(torch, dtype.name), device="cpu")
        with torch.no_grad():
            self._checkpoint.fill(self._indices[name], out)
        return arrays.host_bits(out, dtype)
