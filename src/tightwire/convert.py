"""Whole safetensors files: compress, restore byte for byte, verify, compare. One tensor in memory
at a time.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from . import engine
from .arguments import thread_count
from .arrays import aligned_bytes
from .codec import Codec, as_codec
from .codec import codec as make_codec
from .codecs.common.base import Bits, Bytes, Plan
from .codecs.common.float_mode import default_floats
from .codecs.common.threads import cpu_count
from .contents import Contents, naming, parsed_of, read_header
from .engine import DEFAULT_MAX_NBYTES, Head
from .file_tensors import (
    FileTensors,
    Tensors,
    add_base,
    check_chain_limit,
    file_tensors,
    kind_of,
    kind_text,
    read_entry,
)
from .files import (
    Against,
    Draft,
    Encoded,
    Plain,
    bases_of,
    encode_jobs,
    encode_shorter,
    stored_plain,
    write_container,
)
from .formats.container import (
    VERSION_KEY,
    BaseNote,
    Directory,
    Entry,
    compressed_metadata,
    directory_bytes,
    directory_of,
    is_own,
    users_metadata,
)
from .formats.dtypes import BY_SAFETENSORS, DType
from .formats.errors import FormatError
from .inspection import PLAIN, Info, PlainInfo, info_of
from .pipeline import Job, Memory, grouped, in_order, read_ranges
from .planning import backend_for_once, make_plan
from .storage import PathReader, Reader, is_path, new_file, reading

#: Called with (tensor name, its raw bytes) after each tensor.
Progress = Callable[[str, int], None]
#: Files of deltas in a row, if nothing else is asked for.
CHAIN_LIMIT = 16


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
    base: Any = None,
    chain_limit: int = CHAIN_LIMIT,
) -> list[TensorReport]:
    """Compress a safetensors file tensor by tensor; `target` appears atomically.

    `cast` (bfloat16) rounds every float32 and float64 tensor first; without it the source can be
    restored byte for byte. `target` gets the permissions and the time of the last change of
    `source`.

    With `base`, a safetensors file, compressed or not, tensors that it has too are coded against
    its, by codec delta, where that takes fewer bytes. After `chain_limit` files of deltas in a row
    `base` is not used. Raises FormatError, TypeError, ValueError or OSError.
    """
    chosen = as_codec(codec)
    with open_plain(source) as (reader, directory), _old_tensors(base, chain_limit) as old:
        draft = _drafted(reader, directory, chosen, cast, old)
        backend = backend_for_once(draft.plans.values())
        entries = {e.name: e for e in directory.entries}
        reports: dict[str, TensorReport] = {}

        def elements(names: Sequence[str], memory: Memory) -> Iterator[Bits]:
            at = directory.data_at
            ranges = [(at + entries[name].begin, at + entries[name].end) for name in names]
            for name, raw in zip(names, read_ranges(reader, ranges, memory), strict=True):
                yield cast_bits(raw, entry_dtype(entries[name]), draft.plans[name].dtype)

        def reported(buffers: Iterator[Encoded]) -> Iterator[Encoded]:
            plans = iter(draft.plans.items())
            for encoded in buffers:
                yield encoded
                names = islice(plans, len(encoded.sizes))
                for (name, plan), size in zip(names, encoded.sizes, strict=True):
                    nbytes = plan.nelem * plan.dtype.itemsize
                    reports[name] = TensorReport(
                        name, plan.dtype.name, plan.shape, plan.codec.name, nbytes, size
                    )
                    progress(name, entries[name].nbytes)

        def needed(name: str) -> int:
            # Of a delta also the base, and the other buffer.
            return entries[name].nbytes * (3 if draft.plans[name].needs_base else 1)

        jobs = encode_jobs(draft.plans, elements, needed, backend, bases_of(draft, old, chosen))
        with (
            new_file(target, *_kept(source, reader)) as file,
            in_order(jobs, thread_count(threads)) as buffers,
        ):
            write_container(file, draft, reported(buffers))
    for name, plain in draft.plain.items():
        dtype = BY_SAFETENSORS[plain.dtype].name if plain.dtype in BY_SAFETENSORS else plain.dtype
        nbytes = plain.nbytes
        reports[name] = TensorReport(name, dtype, plain.shape, PLAIN, nbytes, nbytes)
        progress(name, entries[name].nbytes)
    return [reports[name] for name in draft.names]


@contextmanager
def _old_tensors(base: Any, chain_limit: int) -> Iterator[FileTensors | None]:
    """The tensors of `base`; None without it, or if there are too many files of deltas in a row."""
    check_chain_limit(chain_limit)
    if base is None:
        yield None
        return
    with file_tensors(base, DEFAULT_MAX_NBYTES) as old:
        yield old if old.deltas < chain_limit else None


def _drafted(
    reader: Reader,
    directory: Directory,
    codec: Codec,
    cast: DType | None,
    old: FileTensors | None = None,
) -> Draft:
    """What the compressed form of a plain file holds, against `old` if given."""
    draft = Draft(metadata=compressed_metadata(directory.metadata, None if cast else directory))
    delta = make_codec("delta")
    known = {} if old is None else {name: old.kind(name) for name in old.names}
    for e in directory.entries:
        what = _planned(reader, directory, e, codec, cast)
        if isinstance(what, Plan) and known.get(e.name) == (what.dtype, what.shape):
            what = make_plan(delta.spec, what.dtype, what.shape, None)
        draft.add(e.name, what)
    if old is not None:
        draft.base = BaseNote(os.path.basename(old.label), old.deltas + 1)
    return draft


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


def check_plain(path: Any) -> None:
    """Raise what `compress_file` would raise for the header of this file."""
    with open_plain(path):
        pass


def deltas_in_a_row(path: Any) -> int:
    """Files of deltas in a row, a safetensors file the last of them; 0 without deltas."""
    with file_tensors(path, DEFAULT_MAX_NBYTES) as tensors:
        return tensors.deltas


def base_files(path: Any) -> list[Path]:
    """The files that deltas of a safetensors file are against, each followed by its own base.

    Raises what reading the headers of all of them raises.
    """
    with file_tensors(path, DEFAULT_MAX_NBYTES) as tensors:
        return tensors.base_files


def check_compressed(path: Any, base: Any = None) -> list[Path]:
    """As `base_files`; raises what `decompress_file` would raise for the headers."""
    with ExitStack() as files:
        reader = files.enter_context(reading(path))
        return _compressed_tensors(files, reader, path, DEFAULT_MAX_NBYTES, base).base_files


@dataclass(frozen=True)
class Forecast:
    """What converting a file will do. Sizes in bytes."""

    names: tuple[str, ...]
    #: What a Progress is told in all.
    nbytes: int
    #: The tensors after a cast.
    raw_nbytes: int
    #: The result has no fewer.
    least_nbytes: int
    #: The target is there, and is what converting would write.
    done: bool


def forecast_compress(
    source: Any, target: Any, codec: str | Codec = "zipccl", *, cast: DType | None = None
) -> Forecast:
    """What `compress_file` will do, from the headers of both files.

    The target counts as done if it has the source's time of last change, header and plans, and the
    same tensors where that time is a whole second, as archives and some file systems keep it.
    Raises what `compress_file` raises for the header of `source`.
    """
    with open_plain(source) as (reader, directory):
        draft = _drafted(reader, directory, as_codec(codec), cast)
    plain = sum(p.nbytes for p in draft.plain.values())
    return Forecast(
        directory.names,
        directory.data_nbytes,
        plain + sum(p.nelem * p.dtype.itemsize for p in draft.plans.values()),
        plain + sum(p.dynamic_offset for p in draft.plans.values()),
        _same_time(source, target)
        and _holds(target, draft, None if cast else directory)
        and (_exact_time(source) or _same_tensors(source, target, cast)),
    )


def _same_time(source: Any, target: Any) -> bool:
    """True if there is a file at `target` that was last changed when `source` was."""
    same = os.stat(source).st_mtime_ns
    return os.path.isfile(target) and os.stat(target).st_mtime_ns == same


def _exact_time(source: Any) -> bool:
    """True unless the time of last change is a whole second, which other files have too."""
    return os.stat(source).st_mtime_ns % 10**9 != 0


def _same_tensors(source: Any, target: Any, cast: DType | None = None) -> bool:
    """True if two files of the same names hold the same tensors, after a cast of the first."""
    with ExitStack() as files:
        try:
            x, y = (files.enter_context(file_tensors(f, 1 << 63)) for f in (source, target))
            for name in x.names:
                dtype, bits = x.kind(name)[0], x.bits(name)
                if isinstance(dtype, DType) and cast_dtype(dtype, cast) is not dtype:
                    bits = cast_bits(bits.view(np.uint8), dtype, cast_dtype(dtype, cast))
                if not np.array_equal(bits, y.bits(name)):
                    return False
        except FormatError:
            return False
    return True


def _holds(target: Any, draft: Draft, source: Directory | None) -> bool:
    """True for a compressed file of this draft, made from a file with this header."""
    try:
        with reading(target) as reader:
            contents = Contents(reader)
            heads = contents.heads(1 << 63)
    except FormatError:
        return False
    own = contents.directory.metadata
    source_bytes = contents.source.json_bytes if contents.source is not None else None
    plans = {name: _identity(head.plan) for name, head in heads.items() if head is not None}
    plain = {n: contents.entry(n) for n, head in heads.items() if head is None}
    return (
        own[VERSION_KEY] == draft.metadata[VERSION_KEY]
        and users_metadata(own) == users_metadata(draft.metadata)
        and source_bytes == (source.json_bytes if source is not None else None)
        and contents.names() == draft.names
        and plans == {name: _identity(plan) for name, plan in draft.plans.items()}
        and {n: (e.dtype, e.shape) for n, e in plain.items()}
        == {n: (p.dtype, p.shape) for n, p in draft.plain.items()}
    )


def _identity(plan: Plan) -> tuple[Any, ...]:
    """All that a plan and that of the packed buffer have in common."""
    return plan.codec, plan.dtype, plan.shape, plan.chunks, plan.checksum


def forecast_decompress(
    source: Any, target: Any, *, max_nbytes: int = DEFAULT_MAX_NBYTES
) -> Forecast:
    """What `decompress_file` will do, from the headers of both files.

    The target counts as done if it has the source's time of last change, and the header and the
    size of the file that `source` was made from, and the same tensors where that time is a whole
    second. Raises what `decompress_file` raises except for payloads.
    """
    with reading(source) as reader:
        contents = Contents(reader)
        heads = contents.heads(max_nbytes)
        head = _restored_head(contents, heads)
    nbytes = sum(contents.tensor_nbytes(name, h) for name, h in heads.items())
    done = _same_time(source, target) and os.stat(target).st_size == len(head) + nbytes
    if done:
        with reading(target) as reader:
            done = reader.read(0, len(head)).tobytes() == head
        done = done and (_exact_time(source) or _same_tensors(source, target))
    return Forecast(tuple(contents.names()), nbytes, nbytes, len(head) + nbytes, done)


def obstacle(target: Any) -> str | None:
    """Why `target` must not be overwritten; None if tightwire compressed it, or it is empty."""
    if not os.path.exists(target):
        return None
    if not os.path.isfile(target):
        return "exists and is not a regular file"
    if not os.stat(target).st_size:
        return None
    try:
        if VERSION_KEY not in read_header(target).metadata:
            return "exists and holds an uncompressed model"
        inspect_file(target)
    except FormatError:
        return "exists and is not a file that tightwire compressed"
    return None


def _kept(source: Any, reader: Reader) -> tuple[int | None, int | None]:
    """What a file made from `source` has of it: permissions, and nanoseconds of the last change.

    Those of the file that is open: meanwhile another may have taken its name.
    """
    if not is_path(source) or not isinstance(reader, PathReader):
        return None, None
    status = os.fstat(reader.fd)
    return stat.S_IMODE(status.st_mode), status.st_mtime_ns


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
    base: Any = None,
) -> None:
    """Restore the safetensors file that `source` was made from, byte for byte.

    A file made from arrays in memory becomes a plain safetensors file with the same tensors. Every
    tensor is checked; on any error `target` is left as it was. `target` gets the permissions and
    the time of the last change of `source`.

    The files that deltas are against are looked for in the folder of `source`; the first of them is
    `base` if that is given. Raises FormatError or OSError, or ValueError for a `base` that is not
    needed, or missing where `source` is a file object.
    """
    with ExitStack() as files:
        reader = files.enter_context(reading(source))
        tensors = _compressed_tensors(files, reader, source, max_nbytes, base)
        contents, heads = tensors.contents, tensors.heads
        head = _restored_head(contents, heads)
        jobs = _decode_jobs(tensors, len(head))
        with (
            new_file(target, *_kept(source, reader)) as out,
            in_order(jobs, thread_count(threads)) as found,
        ):
            out.write(head)
            for names, data in found:
                out.write(data.data)
                for name in names:
                    progress(name, contents.tensor_nbytes(name, heads[name]))


class _Compressed(FileTensors):
    """`FileTensors` of a compressed file."""

    contents: Contents


def _compressed_tensors(
    files: ExitStack, reader: Reader, source: Any, max_nbytes: int, base: Any = None
) -> _Compressed:
    """The tensors of a compressed file, its bases opened."""
    tensors = _Compressed(reader, max_nbytes, Contents(reader))
    add_base(files, tensors, source, max_nbytes, base)
    return tensors


def _decode_jobs(tensors: _Compressed, start: int) -> list[Job[tuple[list[str], Bytes]]]:
    """Jobs that give names of tensors and their bytes in a restored file, from `start` on."""
    contents, heads, backend = tensors.contents, tensors.heads, tensors.backend

    def nbytes(name: str) -> int:
        return contents.tensor_nbytes(name, heads[name])

    def job(names: list[str], begin: int) -> Job[tuple[list[str], Bytes]]:
        entries = [contents.entry(name) for name in names]
        total = sum(map(nbytes, names))

        def work(memory: Memory, threads: int) -> tuple[list[str], Bytes]:
            # Aligned for any element, and in its page no less far than the file.
            out = memory.take(total, begin + -begin % 8)
            at = 0
            for name, data in zip(names, contents.read(entries, memory), strict=True):
                part = out[at : at + nbytes(name)]
                against = tensors.base_bits(name, threads)
                with naming(f"tensor {name!r}"):
                    contents.decode_into(name, data, heads[name], part, threads, backend, against)
                at += part.size
            return names, out

        return Job(total + sum(e.nbytes for e in entries), work)

    jobs = []
    for names in grouped(_restored_names(contents), nbytes):
        jobs.append(job(names, start))
        start += sum(map(nbytes, names))
    return jobs


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


def verify_file(
    path: Any,
    *,
    max_nbytes: int = DEFAULT_MAX_NBYTES,
    progress: Progress = no_progress,
    base: Any = None,
) -> int:
    """Check every tensor of a compressed file as decode() would: how many there are.

    `base` as in `decompress_file`. Raises FormatError.
    """
    with ExitStack() as files:
        reader = files.enter_context(reading(path))
        return verify_tensors(_compressed_tensors(files, reader, path, max_nbytes, base), progress)


def verify_contents(contents: Contents, max_nbytes: int, progress: Progress = no_progress) -> int:
    """As `verify_file`, of a file that is open."""
    return verify_tensors(_Compressed(contents.reader, max_nbytes, contents), progress)


def verify_tensors(tensors: _Compressed, progress: Progress) -> int:
    """As `verify_file`."""
    contents, heads, backend = tensors.contents, tensors.heads, tensors.backend

    def check(name: str, data: Bytes, memory: Memory, threads: int) -> str:
        head = heads[name]
        if head is None:
            contents.check_plain(name, data)
        else:
            decoded = memory.take(engine.chunk_nbytes(head.plan))
            against = tensors.base_bits(name, threads)
            engine.verify_chunks(parsed_of(head, data), threads, backend, decoded, against)
        return name

    def nbytes(name: str) -> int:
        head = heads[name]
        return 0 if head is None else engine.chunk_nbytes(head.plan)

    with in_order(contents.jobs(check, nbytes), cpu_count()) as groups:
        for name in chain.from_iterable(groups):
            progress(name, contents.tensor_nbytes(name, heads[name]))
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
        stored = [n for n in contents.names() if n not in contents.tied]
        return contents, {n: _info(contents, n) for n in (stored if name is None else [name])}


def _info(contents: Contents, name: str) -> Info | PlainInfo:
    head = contents.head(name, 1 << 63)
    if head is not None:
        return info_of(head)
    dtype, shape = kind_of(contents, name, None)
    label = dtype.name if isinstance(dtype, DType) else dtype
    return PlainInfo(label, shape, contents.entry(name).nbytes)


@dataclass(frozen=True)
class Difference:
    """How one tensor differs between two files; `n_elements` counts where types agree.

    `nbytes` is then the size of the tensor, and `delta_nbytes` what `compress_file` would store of
    the second given the first.
    """

    name: str
    what: str
    n_elements: int | None = None
    delta_nbytes: int | None = None
    nbytes: int | None = None


class Comparison(NamedTuple):
    """How tensors differ from others, and what `compress_file` would store of all of the second.

    `delta_nbytes` are the bytes of these tensors given the first, `nbytes` those that they have.
    """

    differences: list[Difference]
    delta_nbytes: int
    nbytes: int


def diff_files(
    a: Any,
    b: Any,
    progress: Progress = no_progress,
    *,
    max_nbytes: int = DEFAULT_MAX_NBYTES,
) -> list[Difference]:
    """How the tensors of two safetensors files, each compressed or not, differ bit by bit."""
    return compare_files(a, b, progress, max_nbytes=max_nbytes).differences


def compare_files(
    a: Any,
    b: Any,
    progress: Progress = no_progress,
    *,
    max_nbytes: int = DEFAULT_MAX_NBYTES,
) -> Comparison:
    """As `diff_files`, and what the second takes given the first."""
    with file_tensors(a, max_nbytes) as first, file_tensors(b, max_nbytes) as second:
        return compared(first, second, progress)


def compared(left: Tensors, right: Tensors, progress: Progress) -> Comparison:
    """How these tensors differ bit by bit."""
    a, b = left.label, right.label
    in_a, in_b = dict.fromkeys(left.names), dict.fromkeys(right.names)
    found = [Difference(name, f"only in {a}") for name in in_a if name not in in_b]
    found += [Difference(name, f"only in {b}") for name in in_b if name not in in_a]
    total = nbytes = 0
    for name in [*filter(in_b.__contains__, in_a), *(n for n in in_b if n not in in_a)]:
        kind_b, y = right.kind(name), right.bits(name)
        kind_a = left.kind(name) if name in in_a else None
        x = left.bits(name) if kind_a == kind_b else None
        cost = _stored_nbytes(*kind_b, x, y)
        total += cost
        nbytes += y.nbytes
        if x is not None:
            differing = int(np.count_nonzero(x != y))
            if differing:
                what = f"{differing} of {x.size} elements differ"
                found.append(Difference(name, what, differing, cost, y.nbytes))
            progress(name, x.nbytes)
        elif kind_a is not None:
            found.append(Difference(name, f"{kind_text(*kind_a)} and {kind_text(*kind_b)}"))
    return Comparison(found, total, nbytes)


def _stored_nbytes(dtype: DType | str, shape: tuple[int, ...], x: Bits | None, y: Bits) -> int:
    """Bytes that `compress_file` stores of `y`, against `x` if given."""
    if not isinstance(dtype, DType) or stored_plain(dtype, shape):
        return y.nbytes
    whole = make_plan(make_codec("zipccl").spec, dtype, shape, None)
    plan = whole if x is None else make_plan(make_codec("delta").spec, dtype, shape, None)
    given = Against(x, whole) if x is not None and plan.needs_base else None
    out = np.empty(plan.nbytes, np.uint8)
    return encode_shorter(plan, given, y, out, cpu_count(), backend_for_once([plan]))[1]


__all__ = [
    "Difference",
    "TensorReport",
    "compress_file",
    "decompress_file",
    "diff_files",
    "inspect_file",
    "verify_file",
]
