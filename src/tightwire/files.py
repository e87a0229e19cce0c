"""Compressed safetensors files (specs/container.md): written whole or not at all, read lazily."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, BinaryIO

import numpy as np

from . import arrays, engine, tree
from .codec import Codec, as_codec, decode, thread_count
from .codecs.base import Bits, Bytes, Plan
from .engine import DEFAULT_MAX_NBYTES, Head, Parsed
from .formats.container import (
    BITS,
    LIST,
    LIST_KEY,
    PLAIN_KEY,
    PLAIN_NBYTES,
    TIED_KEY,
    TREE_KEY,
    VERSION,
    VERSION_KEY,
    Directory,
    Entry,
    check_compressed,
    check_names,
    compressed_metadata,
    crc32c,
    directory_bytes,
    directory_of,
    plain_checksums,
    source_directory,
    tied_names,
    tied_text,
    users_metadata,
)
from .formats.dtypes import BY_NAME, BY_SAFETENSORS, DType
from .formats.errors import FormatError, integer
from .formats.header import Header
from .planning import device_files, make_plan
from .storage import (
    MappedReader,
    MemoryReader,
    PathLike,
    Reader,
    is_path,
    new_file,
    reading,
)


@dataclass(frozen=True)
class Plain:
    """A tensor that is stored as it is: its safetensors dtype and shape, and its bytes."""

    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], Bytes]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * BITS[self.dtype] // 8


def stored_plain(dtype: DType, shape: tuple[int, ...]) -> bool:
    """True for tensors that are no larger as they are than as a buffer.

    One-dimensional uint8 would look like a buffer, and complex128 has no name in safetensors.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    as_buffer = dtype.safetensors is None or (dtype.safetensors == "U8" and len(shape) == 1)
    return nbytes <= PLAIN_NBYTES and not as_buffer


@dataclass
class Draft:
    """What a compressed file is going to hold. Every name is in `plans` or in `plain`."""

    #: All names, in the order that readers give them.
    names: list[str] = field(default_factory=list)
    plans: dict[str, Plan] = field(default_factory=dict)
    plain: dict[str, Plain] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, what: Plan | Plain) -> None:
        """One tensor more."""
        self.names.append(name)
        if isinstance(what, Plain):
            self.plain[name] = what
        else:
            self.plans[name] = what

    @property
    def data_at(self) -> int:
        """Where the data of the file can start, whatever the sizes of the buffers."""
        largest = sum(plan.nbytes for plan in self.plans.values())
        largest += sum(plain.nbytes for plain in self.plain.values())
        widest = [Entry(name, "U8", (largest,), largest, largest) for name in self.plans]
        widest += [
            Entry(name, plain.dtype, plain.shape, largest, largest)
            for name, plain in self.plain.items()
        ]
        return len(directory_bytes(widest, self._metadata(["0" * 8] * len(self.plain))))

    def _metadata(self, checksums: Sequence[str]) -> dict[str, str]:
        return self.metadata | ({PLAIN_KEY: "".join(checksums)} if checksums else {})

    def finish(self, file: BinaryIO, sizes: Mapping[str, int], data_at: int) -> None:
        """Write the plain tensors and the header of a file whose buffers are written.

        Buffers of these `sizes` lie behind one another from `data_at` on, in the order of `plans`.
        """
        entries = {}
        at = 0
        for name in self.plans:
            entries[name] = Entry(name, "U8", (sizes[name],), at, at + sizes[name])
            at += sizes[name]
        file.seek(data_at + at)
        checksums = []
        for name, plain in sorted(self.plain.items(), key=lambda item: -BITS[item[1].dtype]):
            data = plain.read()
            file.write(data.data)
            checksums.append(f"{crc32c(data.data):08x}")
            entries[name] = Entry(name, plain.dtype, plain.shape, at, at + data.size)
            at += data.size
        head = directory_bytes(
            [entries[name] for name in self.names], self._metadata(checksums), data_at
        )
        file.seek(0)
        file.write(head)
        file.seek(data_at + at)


def write_container(file: BinaryIO, draft: Draft, buffers: Iterator[Parsed]) -> None:
    """Write one buffer per plan, in order, as each comes; plain tensors and header go in last.

    No buffer is held while the next one is made.
    """
    data_at = draft.data_at
    file.seek(data_at)
    sizes = {name: _write_pieces(file, next(buffers)) for name in draft.plans}
    if next(buffers, None) is not None:
        raise ValueError("more buffers than plans")
    draft.finish(file, sizes, data_at)


def _write_pieces(file: BinaryIO, parsed: Parsed) -> int:
    return sum(file.write(piece.data) for piece in parsed.pieces())


def save_file(
    tensors: Mapping[str, Any] | Sequence[Any],
    path: Any,
    codec: str | Codec = "zipccl",
    *,
    metadata: Mapping[str, str] | None = None,
    threads: int | None = None,
) -> None:
    """Write arrays of any library as a compressed safetensors file.

    `tensors` is names to arrays, or nested dicts, lists and tuples of arrays, text, numbers, bytes
    and None, as state_dicts of optimizers are: `load_file` gives the same back. Names of one and
    the same memory (tied weights) are stored once. `path` is a path, a URL for fsspec or a binary
    file object.

    Tensors are encoded and written one by one: beside the caller's arrays, memory holds one
    encoded tensor. PyTorch's tensors of one GPU are encoded there, some 128 MiB at a time, while
    packed bytes cross the bus and are written by threads. The file appears whole or not at all.
    Raises TypeError or ValueError for a bad call, OSError if the disk fails.
    """
    chosen = as_codec(codec)
    draft, found = drafted(tensors, chosen, metadata)
    buffered = {name: found[name] for name in draft.plans}
    gpu_files = device_files() if is_path(path) and _on_one_gpu(buffered) else None
    with _naming_path(path), new_file(path) as file:
        if isinstance(gpu_files, ModuleType):
            gpu_files.write_container(file, draft, buffered, chosen)
        else:
            write_container(file, draft, _buffers(chosen, buffered, threads))


@contextmanager
def _naming_path(path: Any) -> Iterator[None]:
    """Say in the error of a write, which names none, which file it is about."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None and is_path(path):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def _on_one_gpu(tensors: Mapping[str, Any]) -> bool:
    """True for tensors of PyTorch, one or more, all on the same GPU."""
    if not tensors or not all(arrays.on_gpu(x) for x in tensors.values()):
        return False
    first, *others = (arrays.target_of(x) for x in tensors.values())
    return first.library == "torch" and all(other == first for other in others)


def drafted(
    tensors: Any, chosen: Codec, metadata: Mapping[str, str] | None = None
) -> tuple[Draft, dict[str, Any]]:
    """What a file of these tensors holds, and the arrays by name, each memory once.

    Raises TypeError or ValueError.
    """
    draft = Draft(metadata=compressed_metadata(dict(metadata or {})))
    found, text = _named(tensors)
    check_names(found)
    first: dict[Any, str] = {}
    tied: dict[str, str] = {}
    for name, x in found.items():
        with _naming_call(name):
            what = _planned(chosen, x)
            memory = arrays.memory_of(x)
        if memory is not None and memory in first:
            tied[name] = first[memory]
            continue
        if memory is not None:
            first[memory] = name
        draft.add(name, what)
    if isinstance(tensors, (list, tuple)) and text is None:
        if tied:
            text = tree.flatten(tensors)[1]
        else:
            draft.metadata[LIST_KEY] = LIST
    if tied:
        draft.metadata[TIED_KEY] = tied_text(tied)
    if text is not None:
        draft.metadata[TREE_KEY] = text
    return draft, found


def _named(tensors: Any) -> tuple[dict[str, Any], str | None]:
    """Arrays by name, and the tree around them unless they are a list or names to arrays."""
    if isinstance(tensors, Mapping):
        if all(type(name) is str and tree.is_array(x) for name, x in tensors.items()):
            return dict(tensors), None
    elif isinstance(tensors, (list, tuple)):
        if all(map(tree.is_array, tensors)):
            return {str(i): x for i, x in enumerate(tensors)}, None
    else:
        kind = type(tensors).__name__
        raise TypeError(f"tensors is a {kind}; allowed: names to arrays, or a list of arrays")
    return tree.flatten(tensors)


def _planned(chosen: Codec, x: Any) -> Plan | Plain:
    if arrays.is_float4(x):
        shape = (*x.shape[:-1], 2 * x.shape[-1])
        return Plain("F4", shape, partial(arrays.float4_bytes, x))
    info = arrays.describe(x)
    if stored_plain(info.dtype, info.shape):
        name = info.dtype.safetensors or ""
        return Plain(name, info.shape, lambda: arrays.host_bits(x, info.dtype).view(np.uint8))
    return make_plan(chosen.spec, info.dtype, info.shape, None)


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

    `tensors` is what `save_file` takes, and the bytes are those of the file that it writes.
    Raises TypeError or ValueError for a bad call.
    """
    message = io.BytesIO()
    save_file(tensors, message, codec, threads=threads)
    return message.getvalue()


def loads(
    data: Any,
    *,
    like: Any = "numpy",
    max_nbytes: int = DEFAULT_MAX_NBYTES,
    threads: int | None = None,
) -> Any:
    """The arrays of a message by `dumps`, checked, in the dict or list that it was given.

    `data` is bytes-like or a uint8 array; the contents of a compressed file will do. `like`, an
    array or a library's name, says which library the arrays belong to. Raises FormatError for
    bytes that are no such message, or whose arrays need more than `max_nbytes` bytes together.
    """
    max_nbytes = integer("max_nbytes", max_nbytes, least=0)
    try:
        reader = MemoryReader(arrays.bytes_view(data))
    except TypeError as error:
        raise TypeError(f"Expected the bytes of a message: {error}") from error
    contents = Contents(reader)
    heads = contents.heads(max_nbytes)
    total = sum(contents.tensor_nbytes(name, head) for name, head in heads.items())
    if total > max_nbytes:
        raise FormatError("limit_exceeded", f"{total} bytes, max_nbytes is {max_nbytes}")
    return contents.shaped(decode_all(contents, heads, like, threads))


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Say in a FormatError what it is about."""
    try:
        yield
    except FormatError as error:
        raise FormatError(error.reason, f"{what}: {error.detail}") from None


class Contents:
    """A compressed file or message, its header checked.

    Every reader goes through here, so that all give the same reason for the same bytes
    (specs/container.md, "Reading"). Raises FormatError, and OSError as reading does.
    """

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.directory = directory_of(reader.read, reader.nbytes)
        check_compressed(self.directory)
        #: Header of the file that this one was made from, None if there was none.
        self.source = source_directory(self.directory)
        #: Other names of tensors, and the names that these are stored under.
        self.tied = tied_names(self.directory)
        self._checksums = plain_checksums(self.directory)
        self._entries = {e.name: e for e in self.directory.entries}
        self._sources = {} if self.source is None else {e.name: e for e in self.source.entries}
        metadata = self.directory.metadata
        text = metadata.get(TREE_KEY) if metadata[VERSION_KEY] == VERSION else None
        self._tree = None if text is None else tree.read_tree(text, {*self._entries, *self.tied})
        self._has_tree = text is not None

    def names(self) -> list[str]:
        """Names of the tensors, as their writer ordered them, then other names of tied ones."""
        if self.source is not None:
            return [e.name for e in self.source.entries]
        if self.directory.metadata[VERSION_KEY] != VERSION:
            return list(self._entries)
        return [*self.directory.names, *self.tied]

    def __contains__(self, name: object) -> bool:
        return name in self._entries or name in self.tied

    def entry(self, name: str) -> Entry:
        """The entry of a tensor by any of its names. KeyError for another name."""
        return self._entries[self.tied.get(name, name)]

    def shaped(self, tensors: Mapping[str, Any]) -> Any:
        """`tensors`, by all names, in the dict, list or tree that was saved."""
        if self._has_tree:
            return tree.build(self._tree, tensors)
        if LIST_KEY in self.directory.metadata:
            return [tensors[name] for name in self.names()]
        return {name: tensors[name] for name in self.names()}

    def buffer(self, name: str) -> Bytes:
        """The bytes of one tensor, as they are in the file. KeyError for another name."""
        entry = self.entry(name)
        return self.reader.read(self.directory.data_at + entry.begin, entry.nbytes)

    def head(self, name: str, max_nbytes: int) -> Head | None:
        """One tensor checked but for its payload: the head of its buffer, None if it is plain."""
        entry = self.entry(name)
        with naming(f"tensor {name!r}"):
            if self.is_plain(entry):
                if entry.nbytes > max_nbytes:
                    detail = f"{entry.nbytes} bytes, max_nbytes is {max_nbytes}"
                    raise FormatError("limit_exceeded", detail)
                self._check_source(name, entry.dtype, entry.shape)
                return None
            start = self.directory.data_at + entry.begin
            head = engine.parse_head(
                lambda n: self.reader.read(start, min(n, entry.nbytes)), entry.nbytes, max_nbytes
            )
            self.check_head(entry.name, head.header, head.plan)
        return head

    def is_plain(self, entry: Entry) -> bool:
        """True for a tensor that is stored as it is."""
        return entry.name in self._checksums

    def check_head(self, name: str, header: Header, plan: Plan) -> None:
        """Refuse a buffer that is not packed, or another tensor than the source header says."""
        if header.dynamic_stride:
            raise FormatError("bad_container", "the buffer is not packed")
        self._check_source(name, plan.dtype.safetensors, plan.shape)

    def _check_source(self, name: str, dtype: str | None, shape: tuple[int, ...]) -> None:
        if self.source is not None:
            source = self._sources[name]
            if (source.dtype, source.shape) != (dtype, shape):
                found = f"{dtype}{list(shape)}"
                wanted = f"{source.dtype}{list(source.shape)}"
                raise FormatError("bad_container", f"{found}; the source header says {wanted}")

    def heads(self, max_nbytes: int) -> dict[str, Head | None]:
        """What `head` gives for every stored tensor, in the order of their data.

        So a bad one is found before anything is decoded.
        """
        max_nbytes = integer("max_nbytes", max_nbytes, least=0)
        return {e.name: self.head(e.name, max_nbytes) for e in self.directory.entries}

    def parsed(self, name: str, head: Head) -> Parsed:
        """One tensor's buffer whose head was checked, read."""
        data = self.buffer(name)
        if data.__array_interface__["data"][0] % 8:
            data = data.copy()
        return Parsed(head.header, head.plan, head.records, head.dynamic_at, head.nbytes, data)

    def plain(self, name: str) -> Bytes:
        """The bytes of a plain tensor, checked."""
        data = self.buffer(name)
        if crc32c(data.data) != self._checksums[self.entry(name).name]:
            raise FormatError("checksum_mismatch", "plain data")
        return data

    def tensor_nbytes(self, name: str, head: Head | None) -> int:
        """Bytes of a decoded tensor."""
        if head is None:
            return self.entry(name).nbytes
        return head.plan.nelem * head.plan.dtype.itemsize

    def bits(self, name: str, head: Head | None, threads: int) -> Bits:
        """The elements of one tensor, checked: bits of shape (n,); bytes for those below 8 bits."""
        if head is None:
            dtype = BY_SAFETENSORS.get(self.entry(name).dtype, BY_NAME["uint8"])
            with naming(f"tensor {name!r}"):
                return arrays.aligned_bytes(self.plain(name), dtype.itemsize).view(dtype.bits)
        plan = head.plan
        bits = np.empty(plan.nelem * plan.dtype.itemsize, np.uint8).view(plan.dtype.bits)
        with naming(f"tensor {name!r}"):
            engine.decode_range(self.parsed(name, head), bits, 0, threads=threads)
        return bits

    def tensor(self, name: str, head: Head | None, like: Any, threads: int) -> Any:
        """One tensor, checked, as an array of the library and on the device of `like`.

        Elements of less than a byte, packed, come as one-dimensional uint8; in PyTorch F4 is
        torch.float4_e2m1fn_x2.
        """
        target = arrays.target_of(like)
        if head is not None and target.device is not None:
            # Compressed bytes cross the bus.
            with naming(f"tensor {name!r}"):
                return decode(self.parsed(name, head), like=like, threads=threads)
        bits = self.bits(name, head, threads)
        if head is not None:
            return arrays.from_bits(bits, head.plan.dtype, head.plan.shape, target)
        entry = self.entry(name)
        # What was read may be a view of the caller's bytes, or read-only.
        bits = bits.copy()
        if entry.dtype not in BY_SAFETENSORS:
            return arrays.from_packed(bits, entry.dtype, entry.shape, target)
        return arrays.from_bits(bits, BY_SAFETENSORS[entry.dtype], entry.shape, target)


def decode_all(
    contents: Contents, heads: Mapping[str, Head | None], like: Any, threads: int | None = None
) -> dict[str, Any]:
    """The tensors whose heads were checked, by all names, in the library of `like`."""
    count = thread_count(threads)
    tensors = {name: contents.tensor(name, head, like, count) for name, head in heads.items()}
    return tensors | {alias: tensors[name] for alias, name in contents.tied.items()}


@dataclass(frozen=True)
class LazyTensor:
    """A tensor in an open file. Indexing decodes only the rows (first dimension) that it needs."""

    name: str
    contents: Contents
    head: Head | None
    like: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the decoded tensor."""
        return self.contents.entry(self.name).shape if self.head is None else self.head.plan.shape

    @property
    def dtype(self) -> str:
        """Name of its element type; of elements of less than a byte, safetensors' name."""
        if self.head is not None:
            return self.head.plan.dtype.name
        name = self.contents.entry(self.name).dtype
        return BY_SAFETENSORS[name].name if name in BY_SAFETENSORS else name

    def numpy(self) -> Any:
        """The whole tensor, checked, as a NumPy array."""
        return self.contents.tensor(self.name, self.head, "numpy", thread_count(None))

    def __getitem__(self, index: Any) -> Any:
        rest = index if isinstance(index, tuple) else (index,)
        if self.head is None or not self.shape or not rest:
            return self._whole()[index]
        first = rest[0]
        if first is Ellipsis or first is None:
            return self._whole()[index]
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
        with naming(f"tensor {self.name!r}"):
            parsed = self.contents.parsed(self.name, self.head)
            flat = decode(parsed, like=self.like, start=lo * row, stop=hi * row)
        return flat.reshape((hi - lo, *self.shape[1:]))[(inner, *rest[1:])]

    def _whole(self) -> Any:
        return self.contents.tensor(self.name, self.head, self.like, thread_count(None))


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
        self._contents = Contents(MappedReader(path))
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
        return LazyTensor(name, contents, contents.head(name, self.max_nbytes), self.like)

    def get(self, name: str, *, like: Any = None, threads: int | None = None) -> Any:
        """One whole tensor, checked, in the library and on the device of `like`."""
        chosen = self.like if like is None else like
        contents = self._holding(name)
        head = contents.head(name, self.max_nbytes)
        return contents.tensor(name, head, chosen, thread_count(threads))

    def close(self) -> None:
        """Let go of the file; buffers handed out stay valid."""
        self._contents.reader.close()
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


def read_header(path: Any) -> Directory:
    """The header of a safetensors file, compressed or not. Raises FormatError or OSError."""
    with reading(path) as reader:
        return directory_of(reader.read, reader.nbytes)


def open_file(path: PathLike, *, like: Any = "numpy", max_nbytes: int = DEFAULT_MAX_NBYTES) -> File:
    """Open a compressed safetensors file lazily (`tightwire.open`).

    `like`, an array or a library's name, says which library decoded tensors belong to.
    Raises FormatError if it is none, OSError if it cannot be read.
    """
    return File(path, like=like, max_nbytes=max_nbytes)


def load_file(
    path: Any,
    *,
    like: Any = None,
    out: Mapping[str, Any] | None = None,
    max_nbytes: int = DEFAULT_MAX_NBYTES,
    threads: int | None = None,
) -> Any:
    """Every tensor of a compressed safetensors file, checked, by name.

    Of nested dicts and lists that `save_file` was given, those. `path` is a path, a URL for
    fsspec, a binary file object, read from its present position to its end, or bytes.

    `like`, an array or a library's name, says where they go; None is NumPy. To a GPU the compressed
    bytes cross the bus, and are decoded and checked there, in the order of the current stream;
    reading, copies and kernels overlap. `max_nbytes` bounds each tensor. Raises FormatError,
    OSError, and torch.OutOfMemoryError where a GPU has too little memory.

    `out`, by all names of the tensors (of nested states, the names that `tightwire.open` gives),
    has arrays to fill, of NumPy, PyTorch and CuPy, each on its own device; the result is a dict of
    them. Contiguous arrays of the file's dtype are decoded straight into; others get a copy, with
    the conversion of `Tensor.copy_`, one tensor at a time. Names, shapes and headers are checked
    before anything is written: ValueError if `out` lacks a name, has one more or another shape,
    TypeError for what is no array to write to. After a later error the contents are undefined. To
    autograd `out` is as that of `tightwire.decode`. Where two tensors of the file go to one memory,
    one of them is there in the end.
    """
    if out is not None and like is not None:
        raise ValueError("like and out are given; allowed: one of them")
    like = "numpy" if like is None else like
    target = arrays.target_of(like)
    with reading(path) as reader:
        contents = Contents(reader)
        if out is not None:
            from .loading import load_out

            return load_out(contents, out, max_nbytes, threads)
        gpu_files = None
        if target.device is not None:
            gpu_files = device_files()
        if isinstance(gpu_files, ModuleType):
            (tensors,) = gpu_files.load_files([contents], target, max_nbytes)
        else:
            tensors = decode_all(contents, contents.heads(max_nbytes), like, threads)
        return contents.shaped(tensors)
