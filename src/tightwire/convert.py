"""Whole safetensors files: compress, restore byte for byte, verify, compare. One tensor in memory
at a time.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from . import engine
from .arrays import aligned_bytes
from .codec import Codec, as_codec, thread_count
from .codecs.base import Bits, Bytes, Plan
from .codecs.float_mode import default_floats
from .codecs.threads import cpu_count
from .engine import DEFAULT_MAX_NBYTES, Head, Parsed
from .files import Contents, Draft, Plain, naming, stored_plain, write_container
from .formats.container import (
    VERSION_KEY,
    Directory,
    Entry,
    compressed_metadata,
    directory_bytes,
    directory_of,
    is_own,
    users_metadata,
)
from .formats.dtypes import BY_NAME, BY_SAFETENSORS, DType
from .formats.errors import FormatError
from .inspection import PLAIN, Info, PlainInfo, info_of
from .planning import make_plan
from .storage import Reader, is_path, new_file, reading

#: Called with (tensor name, its raw bytes) after each tensor.
Progress = Callable[[str, int], None]


@dataclass(frozen=True)
class TensorReport:
    """One tensor of a file: what it is and how small it became. Sizes in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    codec: str
    raw_nbytes: int
    packed_nbytes: int

    @property
    def ratio(self) -> float:
        """Packed size over raw size; 1.0 for an empty tensor."""
        return self.packed_nbytes / self.raw_nbytes if self.raw_nbytes else 1.0


def no_progress(name: str, nbytes: int) -> None:
    """Report nothing."""


def entry_dtype(entry: Entry) -> DType:
    """Element type of a tensor in a plain file; TypeError if it is none of ours."""
    try:
        return BY_SAFETENSORS[entry.dtype]
    except KeyError:
        allowed = ", ".join(BY_SAFETENSORS)
        raise TypeError(f"{entry.name!r} is {entry.dtype}; supported: {allowed}") from None


def compress_file(
    source: Any,
    target: Any,
    codec: str | Codec = "zipccl",
    *,
    cast: DType | None = None,
    threads: int | None = None,
    progress: Progress = no_progress,
) -> list[TensorReport]:
    """Compress a safetensors file tensor by tensor; `target` appears whole or not at all.

    `cast` (bfloat16) rounds every float32 and float64 tensor first; without it the source can be
    restored byte for byte. `target` gets the permissions of `source`. Raises FormatError,
    TypeError, ValueError or OSError.
    """
    chosen = as_codec(codec)
    with open_plain(source) as (reader, directory):
        draft = Draft(metadata=compressed_metadata(directory.metadata, None if cast else directory))
        for e in directory.entries:
            draft.add(e.name, _planned(reader, directory, e, chosen, cast))
        entries = {e.name: e for e in directory.entries}
        reports: dict[str, TensorReport] = {}

        def buffers() -> Iterator[Parsed]:
            for name, plan in draft.plans.items():
                e = entries[name]
                bits = cast_bits(read_entry(reader, directory, e), entry_dtype(e), plan.dtype)
                room = np.empty(plan.nbytes, np.uint8)
                engine.encode_into(plan, bits, room, threads=thread_count(threads))
                parsed = engine.parse(room, 1 << 63)
                yield parsed
                nbytes = plan.nelem * plan.dtype.itemsize
                reports[name] = TensorReport(
                    name, plan.dtype.name, e.shape, plan.codec.name, nbytes, parsed.packed_nbytes
                )
                del bits, room, parsed
                progress(name, e.nbytes)

        with new_file(target, _mode(source)) as file:
            write_container(file, draft, buffers())
    for name, plain in draft.plain.items():
        dtype = BY_SAFETENSORS[plain.dtype].name if plain.dtype in BY_SAFETENSORS else plain.dtype
        nbytes = plain.nbytes
        reports[name] = TensorReport(name, dtype, plain.shape, PLAIN, nbytes, nbytes)
        progress(name, entries[name].nbytes)
    return [reports[name] for name in draft.names]


def _planned(
    reader: Reader, directory: Directory, entry: Entry, codec: Codec, cast: DType | None
) -> Plan | Plain:
    """How a tensor of a plain file is stored."""
    dtype = BY_SAFETENSORS.get(entry.dtype)
    if dtype is None:
        return Plain(entry.dtype, entry.shape, partial(read_entry, reader, directory, entry))
    target = cast_dtype(dtype, cast)
    if not stored_plain(target, entry.shape):
        return make_plan(codec.spec, target, entry.shape, None)

    def read() -> Bytes:
        bits: Bits = cast_bits(read_entry(reader, directory, entry), dtype, target)
        return bits.view(np.uint8)

    return Plain(target.safetensors or "", entry.shape, read)


@contextmanager
def open_plain(source: Any) -> Iterator[tuple[Reader, Directory]]:
    """Read a safetensors file that is not compressed. Raises FormatError or OSError."""
    with reading(source) as reader:
        directory = directory_of(reader.read, reader.nbytes)
        if any(map(is_own, directory.metadata)):
            raise FormatError("bad_container", "compressed already, or its metadata says so")
        yield reader, directory


def read_entry(reader: Reader, directory: Directory, entry: Entry) -> Bytes:
    """The bytes of a tensor in a plain file."""
    return reader.read(directory.data_at + entry.begin, entry.nbytes)


def check_plain(path: Any) -> None:
    """Raise what `compress_file` would raise for the header of this file."""
    with open_plain(path):
        pass


def _mode(source: Any) -> int | None:
    """Permissions of a file: what is made from it is no more open than it."""
    return stat.S_IMODE(os.stat(source).st_mode) if is_path(source) else None


def cast_dtype(dtype: DType, cast: DType | None) -> DType:
    """What `cast` makes of a type: it takes float32 and float64 and leaves the others."""
    return cast if cast is not None and dtype.name in ("float32", "float64") else dtype


def cast_bits(raw: Bytes, dtype: DType, target: DType) -> Any:
    """Bits of a tensor's bytes, shape (n,), rounded to `target` if that is another type."""
    bits = aligned_bytes(raw, dtype.bits.itemsize).view(dtype.bits)
    if target is dtype:
        return bits
    # NaNs and values out of range have a place in the target: nothing to warn about.
    with default_floats():
        return bits.view(dtype.numpy).astype(target.numpy).view(target.bits)


def plain_tensors(path: Any, cast: DType | None) -> Iterator[tuple[Entry, DType, Bits]]:
    """Every tensor of a plain safetensors file after the cast: entry, type, bits of shape (n,).

    TypeError for elements of less than a byte.
    """
    with open_plain(path) as (reader, directory):
        for e in directory.entries:
            dtype = entry_dtype(e)
            target = cast_dtype(dtype, cast)
            yield e, target, cast_bits(read_entry(reader, directory, e), dtype, target)


def decompress_file(
    source: Any,
    target: Any,
    *,
    max_nbytes: int = DEFAULT_MAX_NBYTES,
    threads: int | None = None,
    progress: Progress = no_progress,
) -> None:
    """Restore the safetensors file that `source` was made from, byte for byte.

    A file made from arrays in memory becomes a plain safetensors file with the same tensors. Every
    tensor is checked; on any error `target` is left as it was. Raises FormatError or OSError.
    """
    with reading(source) as reader:
        contents = Contents(reader)
        heads = contents.heads(max_nbytes)
        names = _restored_names(contents)
        head = _restored_head(contents, heads)
        with new_file(target, _mode(source)) as out:
            out.write(head)
            for name in names:
                bits = contents.bits(name, heads[name], thread_count(threads))
                nbytes = out.write(bits.view(np.uint8).data)
                progress(name, nbytes)


def _restored_names(contents: Contents) -> list[str]:
    """Names of the tensors in the order of a restored file's data."""
    return [name for name in contents.names() if name not in contents.tied]


def _restored_head(contents: Contents, heads: Mapping[str, Head | None]) -> bytes:
    """First bytes of the file that a compressed one was made from, or of a plain one like it."""
    source = contents.source
    if source is not None:
        return len(source.json_bytes).to_bytes(8, "little") + source.json_bytes
    at = 0
    entries = []
    for name in _restored_names(contents):
        dtype, shape = kind_of(contents, name, heads[name])
        if isinstance(dtype, DType) and dtype.safetensors is None:
            raise TypeError(f"{name!r} is {dtype.name}, which safetensors has no name for")
        end = at + contents.tensor_nbytes(name, heads[name])
        label = (dtype.safetensors or "") if isinstance(dtype, DType) else dtype
        entries.append(Entry(name, label, shape, at, end))
        at = end
    return directory_bytes(entries, users_metadata(contents.directory.metadata))


def kind_of(
    contents: Contents, name: str, head: Head | None
) -> tuple[DType | str, tuple[int, ...]]:
    """Element type and shape of a tensor; the type is a text where it is none of ours."""
    if head is not None:
        return head.plan.dtype, head.plan.shape
    entry = contents.entry(name)
    return BY_SAFETENSORS.get(entry.dtype, entry.dtype), entry.shape


def verify_file(
    path: Any,
    *,
    max_nbytes: int = DEFAULT_MAX_NBYTES,
    progress: Progress = no_progress,
) -> int:
    """Check every tensor of a compressed file as decode() would: how many there are.

    Raises FormatError.
    """
    with reading(path) as reader:
        return verify_contents(Contents(reader), max_nbytes, progress)


def verify_contents(contents: Contents, max_nbytes: int, progress: Progress = no_progress) -> int:
    """As `verify_file`, of a file that is open."""
    heads = contents.heads(max_nbytes)
    for name, head in heads.items():
        with naming(f"tensor {name!r}"):
            if head is None:
                contents.plain(name)
            else:
                engine.verify_chunks(contents.parsed(name, head), threads=cpu_count())
        progress(name, contents.tensor_nbytes(name, head))
    return len(heads)


def inspect_file(
    path: Any, name: str | None = None
) -> tuple[Contents, dict[str, Info | PlainInfo]]:
    """What the buffers of all tensors of a compressed file, or of one, say about themselves.

    No payload is read. Raises FormatError, OSError, ValueError for a tensor that is not there.
    """
    with reading(path) as reader:
        contents = Contents(reader)
        if name is not None and name not in contents:
            raise ValueError(f"no tensor {name!r}; 'inspect FILE' lists the names")
        names = contents.names() if name is None else [name]
        return contents, {n: _info(contents, n) for n in names if n not in contents.tied}


def _info(contents: Contents, name: str) -> Info | PlainInfo:
    head = contents.head(name, 1 << 63)
    if head is not None:
        return info_of(head)
    dtype, shape = kind_of(contents, name, None)
    label = dtype.name if isinstance(dtype, DType) else dtype
    return PlainInfo(label, shape, contents.entry(name).nbytes)


@dataclass(frozen=True)
class Difference:
    """How one tensor differs between two files; `n_elements` counts where types agree."""

    name: str
    what: str
    n_elements: int | None = None


def diff_files(
    a: Any,
    b: Any,
    progress: Progress = no_progress,
    *,
    max_nbytes: int = DEFAULT_MAX_NBYTES,
) -> list[Difference]:
    """How the tensors of two safetensors files, each compressed or not, differ bit by bit."""
    with reading(a) as first, reading(b) as second:
        return _differences(_Tensors(first, max_nbytes), _Tensors(second, max_nbytes), progress)


def _differences(left: _Tensors, right: _Tensors, progress: Progress) -> list[Difference]:
    a, b = left.label, right.label
    found = [Difference(name, f"only in {a}") for name in left.names if name not in right.names]
    found += [Difference(name, f"only in {b}") for name in right.names if name not in left.names]
    for name in left.names:
        if name not in right.names:
            continue
        kind_a, kind_b = left.kind(name), right.kind(name)
        if kind_a != kind_b:
            found.append(Difference(name, f"{_text(*kind_a)} and {_text(*kind_b)}"))
            continue
        x, y = left.bits(name), right.bits(name)
        differing = int(np.count_nonzero(x != y))
        if differing:
            found.append(Difference(name, f"{differing} of {x.size} elements differ", differing))
        progress(name, x.nbytes)
    return found


def _text(dtype: DType | str, shape: tuple[int, ...]) -> str:
    return f"{dtype.name if isinstance(dtype, DType) else dtype}{list(shape)}"


class _Tensors:
    """Element bits of the tensors of a plain or compressed safetensors file."""

    def __init__(self, reader: Reader, max_nbytes: int) -> None:
        self._reader = reader
        self.label = reader.name
        self._contents: Contents | None = None
        self._heads: dict[str, Head | None] = {}
        with naming(reader.name):
            self._directory = directory_of(reader.read, reader.nbytes)
            if VERSION_KEY in self._directory.metadata:
                self._contents = Contents(reader)
                self._heads = self._contents.heads(max_nbytes)
        self._entries = {e.name: e for e in self._directory.entries}

    @property
    def names(self) -> list[str]:
        if self._contents is not None:
            return self._contents.names()
        return list(self._entries)

    def kind(self, name: str) -> tuple[DType | str, tuple[int, ...]]:
        if self._contents is not None:
            return kind_of(self._contents, name, self._head(name))
        entry = self._entries[name]
        return BY_SAFETENSORS.get(entry.dtype, entry.dtype), entry.shape

    def _head(self, name: str) -> Head | None:
        assert self._contents is not None
        return self._heads[self._contents.entry(name).name]

    def bits(self, name: str) -> Any:
        if self._contents is not None:
            with naming(self._reader.name):
                return self._contents.bits(name, self._head(name), cpu_count())
        entry = self._entries[name]
        dtype = BY_SAFETENSORS.get(entry.dtype, BY_NAME["uint8"])
        return cast_bits(read_entry(self._reader, self._directory, entry), dtype, dtype)


__all__ = [
    "Difference",
    "TensorReport",
    "compress_file",
    "decompress_file",
    "diff_files",
    "inspect_file",
    "verify_file",
]
