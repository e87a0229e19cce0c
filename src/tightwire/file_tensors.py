"""Elements of the tensors of safetensors files, of files of deltas too, which need other files."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from .arrays import aligned_bytes
from .codecs.common.base import Bits, Bytes
from .codecs.common.threads import cpu_count
from .contents import Contents, naming
from .engine import Head
from .formats.container import (
    MAX_DELTAS,
    VERSION_KEY,
    BaseNote,
    Directory,
    Entry,
    base_note,
    directory_of,
)
from .formats.dtypes import BY_NAME, BY_SAFETENSORS, DType
from .formats.errors import FormatError
from .planning import backend_for_once
from .storage import Reader, is_path, reading

#: Element type, a text where it is none of ours, and shape.
Kind = tuple[DType | str, tuple[int, ...]]


class Tensors(Protocol):
    """What can be compared."""

    @property
    def label(self) -> str:
        """What to call it."""

    @property
    def names(self) -> list[str]:
        """Names of the tensors."""

    def kind(self, name: str) -> Kind:
        """See `Kind`."""

    def bits(self, name: str, threads: int | None = None) -> Any:
        """Bits of the elements, shape (n,), made by at most so many threads."""


class FileTensors:
    """Element bits of the tensors of a plain or compressed safetensors file.

    Raises FormatError. `base` has the tensors that a file of deltas is against.
    """

    def __init__(self, reader: Reader, max_nbytes: int, contents: Contents | None = None) -> None:
        self._reader = reader
        self.label = reader.name
        self.base: Tensors | None = None
        self.contents = contents
        self.heads: dict[str, Head | None] = {}
        with naming(reader.name):
            if contents is None:
                self._directory = directory_of(reader.read, reader.nbytes)
                if VERSION_KEY in self._directory.metadata:
                    self.contents = Contents(reader)
            else:
                self._directory = contents.directory
            if self.contents is not None:
                self.heads = self.contents.heads(max_nbytes)
        self.backend = backend_for_once(h.plan for h in self.heads.values() if h is not None)
        self._entries = {e.name: e for e in self._directory.entries}

    @property
    def names(self) -> list[str]:
        """See `Tensors`."""
        return list(self._entries) if self.contents is None else self.contents.names()

    @property
    def deltas(self) -> int:
        """Files of deltas in a row, this one the last; 0 without deltas."""
        note = self.base_note
        return 0 if note is None else note.deltas

    @property
    def base_note(self) -> BaseNote | None:
        """What a file of deltas says of its base."""
        return None if self.contents is None else base_note(self._directory)

    @property
    def base_files(self) -> list[Path]:
        """The file that deltas are against, followed by its own base and so on."""
        if not isinstance(self.base, FileTensors):
            return []
        return [Path(self.base.label), *self.base.base_files]

    @cached_property
    def _base_names(self) -> frozenset[str]:
        return frozenset(() if self.base is None else self.base.names)

    def kind(self, name: str) -> Kind:
        """See `Tensors`."""
        if self.contents is not None:
            return kind_of(self.contents, name, self._head(name))
        entry = self._entries[name]
        return BY_SAFETENSORS.get(entry.dtype, entry.dtype), entry.shape

    def _head(self, name: str) -> Head | None:
        assert self.contents is not None
        return self.heads[self.contents.entry(name).name]

    def bits(self, name: str, threads: int | None = None) -> Any:
        """See `Tensors`."""
        if self.contents is None:
            entry = self._entries[name]
            dtype = BY_SAFETENSORS.get(entry.dtype, BY_NAME["uint8"])
            raw = read_entry(self._reader, self._directory, entry)
            return aligned_bytes(raw, dtype.bits.itemsize).view(dtype.bits)
        head = self._head(name)
        with naming(self._reader.name):
            base = self.base_bits(name, threads)
            return self.contents.bits(name, head, threads or cpu_count(), self.backend, base)

    def base_bits(self, name: str, threads: int | None = None) -> Bits | None:
        """Elements of what a tensor was coded against, None if it was not. Raises FormatError."""
        head = self._head(name)
        if head is None or not head.plan.needs_base:
            return None
        if self.base is None:
            detail = f"tensor {name!r} was coded against a base, and the file names none"
            raise FormatError("bad_container", detail)
        where = f"tensor {name!r} was coded against one of {self.base.label}"
        if name not in self._base_names:
            raise FormatError("base_mismatch", f"{where}, which is not there")
        found = self.base.kind(name)
        if found != (head.plan.dtype, head.plan.shape):
            raise FormatError("base_mismatch", f"{where}, which is {kind_text(*found)}")
        bits: Bits = self.base.bits(name, threads)
        return bits


@contextmanager
def file_tensors(source: Any, max_nbytes: int, base: Any = None) -> Iterator[FileTensors]:
    """The tensors of a file, and of those that its deltas are against.

    These are looked for in the folder of the file; the first of them is `base` if that is given.
    Raises FormatError, OSError, or ValueError for a `base` that the file does not need.
    """
    with ExitStack() as files:
        reader = files.enter_context(reading(source))
        tensors = FileTensors(reader, max_nbytes)
        add_base(files, tensors, source, max_nbytes, base)
        yield tensors


def add_base(
    files: ExitStack, tensors: FileTensors, source: Any, max_nbytes: int, base: Any = None
) -> None:
    """Open the base of `tensors`, which are those of `source`; see `file_tensors`."""
    note = tensors.base_note
    if note is None:
        if base is not None:
            raise ValueError(f"{tensors.label} holds no deltas. Allowed: no base")
        return
    if base is None:
        if not is_path(source):
            raise ValueError(f"{tensors.label} holds deltas against {note.file!r}. Needed: base")
        base = os.path.join(os.path.dirname(os.fsdecode(source)), note.file)
    try:
        reader = files.enter_context(reading(base))
    except FileNotFoundError as error:
        message = f"no such file; {tensors.label} holds deltas against it"
        raise FileNotFoundError(errno.ENOENT, message, error.filename) from None
    tensors.base = found = FileTensors(reader, max_nbytes)
    if found.deltas >= note.deltas:
        detail = f"{tensors.label}: {note.deltas} files of deltas, its base has as many"
        raise FormatError("bad_container", detail)
    add_base(files, found, base, max_nbytes)


def check_chain_limit(limit: int) -> int:
    """`limit` itself. Raises ValueError."""
    if not 1 <= limit <= MAX_DELTAS:
        raise ValueError(f"chain_limit is {limit}; allowed: 1 to {MAX_DELTAS}")
    return limit


def kind_of(contents: Contents, name: str, head: Head | None) -> Kind:
    """Element type and shape of a tensor."""
    if head is not None:
        return head.plan.dtype, head.plan.shape
    entry = contents.entry(name)
    return BY_SAFETENSORS.get(entry.dtype, entry.dtype), entry.shape


def kind_text(dtype: DType | str, shape: tuple[int, ...]) -> str:
    """A `Kind` in words."""
    return f"{dtype.name if isinstance(dtype, DType) else dtype}{list(shape)}"


def read_entry(reader: Reader, directory: Directory, entry: Entry) -> Bytes:
    """The bytes of a tensor in a plain file."""
    return reader.read(directory.data_at + entry.begin, entry.nbytes)
