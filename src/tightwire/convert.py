"""Whole safetensors files: compress, restore byte for byte, verify, compare. One tensor in memory
at a time.
"""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from . import engine
from .codec import Codec, as_codec, thread_count
from .codecs.base import Bits, Bytes, Plan
from .codecs.float_mode import default_floats
from .codecs.threads import cpu_count
from .engine import DEFAULT_MAX_NBYTES, Parsed
from .files import (
    Contents,
    PathLike,
    atomic_file,
    map_file,
    map_safetensors,
    naming,
    write_compressed,
)
from .formats.container import (
    VERSION_KEY,
    Directory,
    Entry,
    compressed_metadata,
    directory_bytes,
    is_own,
    users_metadata,
)
from .formats.dtypes import BY_SAFETENSORS, DType
from .formats.errors import FormatError
from .inspection import Info, inspect
from .planning import backend_for_once, make_plan

_COPY_NBYTES = 1 << 22

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


def _release(data: Bytes) -> None:
    """Let the system drop the pages of a mapped file: they would count as this process's memory."""
    base: Any = data
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, memoryview):
        base = base.obj
    if isinstance(base, mmap.mmap) and hasattr(base, "madvise"):
        base.madvise(mmap.MADV_DONTNEED)


def compress_file(
    source: PathLike,
    target: PathLike,
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
    data, directory = plain_file(source)
    dtypes = {e.name: entry_dtype(e) for e in directory.entries}
    plans: dict[str, Plan] = {}
    for e in directory.entries:
        plans[e.name] = make_plan(chosen.spec, cast_dtype(dtypes[e.name], cast), e.shape, None)
    backend = backend_for_once(plans.values())
    reports: list[TensorReport] = []

    def buffers() -> Iterator[Parsed]:
        for e in directory.entries:
            plan = plans[e.name]
            raw = data[directory.span(e)]
            bits = cast_bits(raw, dtypes[e.name], plan.dtype)
            room = np.empty(plan.nbytes, np.uint8)
            engine.encode_into(plan, bits, room, threads=thread_count(threads), backend=backend)
            parsed = engine.parse(room, 1 << 63)
            yield parsed
            nbytes = plan.nelem * plan.dtype.itemsize
            codec_name, packed = plan.codec.name, parsed.packed_nbytes
            reports.append(
                TensorReport(e.name, plan.dtype.name, e.shape, codec_name, nbytes, packed)
            )
            del raw, bits, room, parsed
            _release(data)
            progress(e.name, e.end - e.begin)

    metadata = compressed_metadata(directory.metadata, None if cast else directory)
    write_compressed(target, plans, buffers(), metadata, _mode(source))
    return reports


def plain_file(path: PathLike) -> tuple[Bytes, Directory]:
    """Map a safetensors file that is not compressed. Raises FormatError or OSError."""
    data, directory = map_safetensors(path)
    if any(map(is_own, directory.metadata)):
        raise FormatError("bad_container", "compressed already, or its metadata says so")
    return data, directory


def check_plain(path: PathLike) -> None:
    """Raise what `compress_file` would raise for the header of this file."""
    for entry in plain_file(path)[1].entries:
        entry_dtype(entry)


def _mode(path: PathLike) -> int:
    """Permissions of a file: what is made from it is no more open than it."""
    return stat.S_IMODE(os.stat(path).st_mode)


def cast_dtype(dtype: DType, cast: DType | None) -> DType:
    """What `cast` makes of a type: it takes float32 and float64 and leaves the others."""
    return cast if cast is not None and dtype.name in ("float32", "float64") else dtype


def _aligned(raw: Bytes, itemsize: int) -> Bytes:
    """`raw`, or a copy of it where its address does not suit elements of `itemsize` bytes."""
    if raw.__array_interface__["data"][0] % itemsize == 0:
        return raw
    copy = np.empty(raw.size, np.uint8)
    for at in range(0, raw.size, _COPY_NBYTES):
        copy[at : at + _COPY_NBYTES] = raw[at : at + _COPY_NBYTES]
        _release(raw)
    return copy


def cast_bits(raw: Bytes, dtype: DType, target: DType) -> Any:
    """Bits of a tensor's bytes, shape (n,), rounded to `target` if that is another type."""
    bits = _aligned(raw, dtype.bits.itemsize).view(dtype.bits)
    if target is dtype:
        return bits
    # NaNs and values out of range have a place in the target: nothing to warn about.
    with default_floats():
        return bits.view(dtype.numpy).astype(target.numpy).view(target.bits)


def plain_tensors(path: PathLike, cast: DType | None) -> Iterator[tuple[Entry, DType, Bits]]:
    """Every tensor of a plain safetensors file after the cast: entry, type, bits of shape (n,)."""
    data, directory = plain_file(path)
    for e in directory.entries:
        dtype = entry_dtype(e)
        target = cast_dtype(dtype, cast)
        yield e, target, cast_bits(data[directory.span(e)], dtype, target)


def decompress_file(
    source: PathLike,
    target: PathLike,
    *,
    max_nbytes: int = DEFAULT_MAX_NBYTES,
    threads: int | None = None,
    progress: Progress = no_progress,
) -> None:
    """Restore the safetensors file that `source` was made from, byte for byte.

    A file made from arrays in memory becomes a plain safetensors file with the same tensors. Every
    tensor is checked; on any error `target` is left as it was. Raises FormatError or OSError.
    """
    contents = Contents(map_file(source))
    parsed = contents.parse_all(max_nbytes)
    head = _restored_head(contents, parsed)
    backend = _backend(parsed)
    with atomic_file(target, _mode(source)) as out:
        out.write(head)
        for name, item in parsed.items():
            with naming(f"tensor {name!r}"):
                nbytes = _write_decoded(out, item, thread_count(threads), backend)
            _release(contents.data)
            progress(name, nbytes)


def _backend(buffers: Mapping[str, Parsed]) -> str | None:
    return backend_for_once(parsed.plan for parsed in buffers.values())


def _write_decoded(out: BinaryIO, parsed: Parsed, threads: int, backend: str | None) -> int:
    return out.write(_decoded_bits(parsed, threads, backend).view(np.uint8).data)


def _decoded_bits(parsed: Parsed, threads: int, backend: str | None) -> Bits:
    """Element bits of a whole tensor, shape (n,)."""
    plan = parsed.plan
    bits = np.empty(plan.nelem * plan.dtype.itemsize, np.uint8).view(plan.dtype.bits)
    engine.decode_range(parsed, bits, 0, threads=threads, backend=backend)
    return bits


def _restored_head(contents: Contents, parsed: dict[str, Parsed]) -> bytes:
    """First bytes of the file that a compressed one was made from, or of a plain one like it."""
    source = contents.source
    if source is not None:
        return len(source.json_bytes).to_bytes(8, "little") + source.json_bytes
    for name, item in parsed.items():
        if item.plan.dtype.safetensors is None:
            dtype = item.plan.dtype.name
            raise TypeError(f"{name!r} is {dtype}, which safetensors has no name for")
    metadata = users_metadata(contents.directory.metadata)
    return directory_bytes(_decoded_entries(parsed), metadata)


def _decoded_entries(parsed: dict[str, Parsed]) -> list[Entry]:
    at = 0
    entries = []
    for name, item in parsed.items():
        plan = item.plan
        end = at + plan.nelem * plan.dtype.itemsize
        entries.append(Entry(name, plan.dtype.safetensors or "", plan.shape, at, end))
        at = end
    return entries


def verify_file(
    path: PathLike,
    *,
    max_nbytes: int = DEFAULT_MAX_NBYTES,
    progress: Progress = no_progress,
) -> None:
    """Check every tensor of a compressed file as decode() would. Raises FormatError."""
    contents = Contents(map_file(path))
    parsed = contents.parse_all(max_nbytes)
    backend = _backend(parsed)
    for name, item in parsed.items():
        with naming(f"tensor {name!r}"):
            engine.verify_chunks(item, cpu_count(), backend)
        _release(contents.data)
        progress(name, item.plan.nelem * item.plan.dtype.itemsize)


def inspect_file(path: PathLike, name: str | None = None) -> tuple[Contents, dict[str, Info]]:
    """What the buffers of all tensors of a compressed file, or of one, say about themselves.

    No payload is read. Raises FormatError, OSError, ValueError for a tensor that is not there.
    """
    contents = Contents(map_file(path))
    if name is not None and name not in contents:
        raise ValueError(f"no tensor {name!r}; 'inspect FILE' lists the names")
    names = contents.names() if name is None else [name]
    return contents, {n: inspect(contents.parse(n, 1 << 63).data) for n in names}


@dataclass(frozen=True)
class Difference:
    """How one tensor differs between two files; `n_elements` counts where types agree."""

    name: str
    what: str
    n_elements: int | None = None


def diff_files(
    a: PathLike,
    b: PathLike,
    progress: Progress = no_progress,
    *,
    max_nbytes: int = DEFAULT_MAX_NBYTES,
) -> list[Difference]:
    """How the tensors of two safetensors files, each compressed or not, differ bit by bit."""
    left, right = _Tensors(a, max_nbytes), _Tensors(b, max_nbytes)
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


def _text(dtype: DType, shape: tuple[int, ...]) -> str:
    return f"{dtype.name}{list(shape)}"


class _Tensors:
    """Element bits of the tensors of a plain or compressed safetensors file."""

    def __init__(self, path: PathLike, max_nbytes: int) -> None:
        self._path = path
        self._parsed: dict[str, Parsed] = {}
        with naming(str(path)):
            self._data, self._directory = map_safetensors(path)
            if VERSION_KEY in self._directory.metadata:
                self._parsed = Contents(self._data).parse_all(max_nbytes)
        self._backend = _backend(self._parsed)
        self._entries = {e.name: e for e in self._directory.entries}

    @property
    def names(self) -> dict[str, Entry]:
        return self._entries

    def kind(self, name: str) -> tuple[DType, tuple[int, ...]]:
        if name in self._parsed:
            plan = self._parsed[name].plan
            return plan.dtype, plan.shape
        entry = self._entries[name]
        return entry_dtype(entry), entry.shape

    def bits(self, name: str) -> Any:
        dtype, _ = self.kind(name)
        if name in self._parsed:
            with naming(f"{self._path}: tensor {name!r}"):
                return _decoded_bits(self._parsed[name], cpu_count(), self._backend)
        entry = self._entries[name]
        return cast_bits(self._data[self._directory.span(entry)], dtype, dtype)


__all__ = [
    "Difference",
    "TensorReport",
    "compress_file",
    "decompress_file",
    "diff_files",
    "inspect_file",
    "verify_file",
]
