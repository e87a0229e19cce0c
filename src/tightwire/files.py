"""Compressed safetensors files (specs/container.md): written whole or not at all, read lazily."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from types import ModuleType, TracebackType
from typing import Any, BinaryIO, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

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
    check_size,
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
from .formats.header import MAX_NBYTES, Header
from .inspection import PLAIN
from .pipeline import Job, Memory, Shared, Writer, grouped, in_order, read_ranges
from .planning import device_files, make_plan
from .storage import (
    MappedReader,
    MemoryReader,
    Reader,
    is_path,
    new_file,
    open_reader,
    reading,
)
from .units import size_text

#: Iteration over the rows of a tensor decodes so many bytes at a time.
_BLOCK_NBYTES = 1 << 22

T = TypeVar("T")

#: Buffers up to this size are decoded in a single call: time in Python would show.
_SMALL_NBYTES = 1 << 20


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
        """One tensor more. FormatError for a plain one of a shape that readers refuse."""
        self.names.append(name)
        if isinstance(what, Plain):
            check_size(Entry(name, what.dtype, what.shape, 0, what.nbytes))
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


class Encoded(NamedTuple):
    """Packed buffers that lie behind one another: the size of each, and the bytes of all."""

    sizes: list[int]
    data: Bytes


def write_container(file: BinaryIO, draft: Draft, buffers: Iterable[Encoded]) -> None:
    """Write one buffer per plan, in order, as they come; plain tensors and header go in last."""
    data_at = draft.data_at
    file.seek(data_at)
    sizes: list[int] = []
    writer = Writer(file)
    for encoded in buffers:
        writer.write(encoded.data)
        sizes += encoded.sizes
    draft.finish(file, dict(zip(draft.plans, sizes, strict=True)), data_at)


def encode_jobs(
    plans: Mapping[str, Plan],
    elements: Callable[[Sequence[str], Memory], Iterable[Bits]],
    nbytes: Callable[[str], int],
    backend: str | None = None,
) -> list[Job[Encoded]]:
    """Jobs that encode the tensors of `plans`, in order.

    `elements` gives the bits of named tensors, each in `nbytes` bytes of the job's memory.
    """

    def job(names: list[str]) -> Job[Encoded]:
        room = sum(plans[name].nbytes for name in names)

        def work(memory: Memory, threads: int) -> Encoded:
            data = memory.take(room)
            at = 0
            sizes = []
            for name, bits in zip(names, elements(names, memory), strict=True):
                plan = plans[name]
                part = data[at : at + plan.nbytes]
                sizes.append(engine.encode_packed(plan, bits, part, threads, backend))
                at += sizes[-1]
            return Encoded(sizes, data[:at])

        return Job(room + sum(map(nbytes, names)), work)

    return [job(names) for names in grouped(plans, lambda name: plans[name].nbytes)]


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
    the same memory (tied weights) are stored once. An open `File` is loaded for it.

    `path` is a path, a URL for fsspec, or a binary file object, which is written from its present
    position on. Nothing is uploaded, and to file objects but BytesIO and files of the system
    nothing is written, before all tensors are encoded.

    Tensors are encoded and written one by one: beside the caller's arrays, memory holds one
    encoded tensor. PyTorch's tensors of one GPU are encoded there, some 128 MiB at a time, while
    packed bytes cross the bus and are written by threads. At a path the file appears whole or not
    at all. Raises TypeError or ValueError for a bad call, OSError if the disk fails.
    """
    chosen = as_codec(codec)
    draft, found = drafted(tensors, chosen, metadata)
    buffered = {name: found[name] for name in draft.plans}
    gpu_files = device_files() if is_path(path) and _on_one_gpu(buffered) else None
    with _naming_path(path), new_file(path) as file:
        if isinstance(gpu_files, ModuleType):
            gpu_files.write_container(file, draft, buffered, chosen)
        else:
            count = thread_count(threads)
            if any(map(arrays.on_gpu, buffered.values())):
                write_container(file, draft, _buffers_in_turn(chosen, buffered, count))
            else:
                with in_order(_host_buffers(chosen, draft.plans, buffered), count) as buffers:
                    write_container(file, draft, buffers)


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
    named, text = _named(tensors)
    found = {name: x.load() if isinstance(x, LazyTensor) else x for name, x in named.items()}
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


def _host_buffers(
    chosen: Codec, plans: Mapping[str, Plan], tensors: Mapping[str, Any]
) -> list[Job[Encoded]]:
    def elements(names: Sequence[str], memory: Memory) -> Iterator[Bits]:
        for name in names:
            with _naming_call(name):
                chosen.require_key(tensors[name], None)
                bits = arrays.host_bits(tensors[name], plans[name].dtype)
            yield bits

    return encode_jobs(plans, elements, lambda name: 0)


def _buffers_in_turn(chosen: Codec, tensors: Mapping[str, Any], count: int) -> Iterator[Encoded]:
    """For arrays on GPUs: each thread has a stream of its own, and theirs is the caller's."""
    for name, x in tensors.items():
        with _naming_call(name):
            data = chosen.encode(x, chunks=None, threads=count).parsed().pack()
        yield Encoded([data.size], data)


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
    return contents.shaped(decode_all(contents, like, max_nbytes, threads))


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Say in a FormatError what it is about."""
    try:
        yield
    except FormatError as error:
        raise FormatError(error.reason, f"{what}: {error.detail}") from None


def parsed_of(head: Head, data: Bytes) -> Parsed:
    """The buffer in `data`, whose head was checked."""
    if data.ctypes.data % 8:
        data = data.copy()
    return Parsed(head.header, head.plan, head.records, head.dynamic_at, head.nbytes, data)


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
                self.check_plain_entry(entry, max_nbytes)
                return None
            start = self.directory.data_at + entry.begin
            head = engine.parse_head(
                lambda n: self.reader.read(start, min(n, entry.nbytes)), entry.nbytes, max_nbytes
            )
            self.check_head(entry.name, head.header, head.plan)
        return head

    def check_plain_entry(self, entry: Entry, max_nbytes: int) -> None:
        """Refuse a plain tensor that is too large, or another than the source header says."""
        if entry.nbytes > max_nbytes:
            detail = f"{entry.nbytes} bytes, max_nbytes is {max_nbytes}"
            raise FormatError("limit_exceeded", detail)
        self._check_source(entry.name, entry.dtype, entry.shape)

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
        return parsed_of(head, self.buffer(name))

    def jobs(
        self,
        use: Callable[[str, Bytes, Memory, int], T],
        nbytes: Callable[[str], int] = lambda name: 0,
    ) -> list[Job[list[T]]]:
        """Jobs that give what `use` makes of name and bytes of each stored tensor, in order.

        `use` is also given memory, of which it takes `nbytes` bytes for a tensor, and a number of
        threads. Its FormatErrors say which tensor they are about.
        """

        def job(entries: list[Entry]) -> Job[list[T]]:
            def work(memory: Memory, threads: int) -> list[T]:
                found = []
                for e, data in zip(entries, self.read(entries, memory), strict=True):
                    with naming(f"tensor {e.name!r}"):
                        found.append(use(e.name, data, memory, threads))
                return found

            return Job(sum(e.nbytes + nbytes(e.name) for e in entries), work)

        return [job(entries) for entries in grouped(self.directory.entries, lambda e: e.nbytes)]

    def read(self, entries: Sequence[Entry], memory: Memory) -> Iterator[Bytes]:
        """The bytes of stored tensors."""
        at = self.directory.data_at
        return read_ranges(self.reader, [(at + e.begin, at + e.end) for e in entries], memory)

    def parse(self, name: str, data: Bytes, max_nbytes: int) -> Parsed:
        """The buffer of one tensor from its bytes, checked but for its payload."""
        parsed = engine.parse(data, max_nbytes)
        self.check_head(name, parsed.header, parsed.plan)
        return parsed

    def tensor_of(
        self,
        name: str,
        data: Bytes,
        target: arrays.Target,
        max_nbytes: int,
        threads: int,
        empty: Callable[[int], Bytes],
    ) -> Any:
        """As `tensor`, on the host, from the bytes of its entry.

        `empty` gives so many bytes for the elements of a small one.
        """
        if self.is_plain(self.entry(name)):
            return self.plain_tensor(name, data, target, max_nbytes)
        small = None
        if data.size <= _SMALL_NBYTES:
            small = engine.decode_small(data, max_nbytes, empty)
        if small is not None:
            plan, bits = small
            self._check_source(name, plan.dtype.safetensors, plan.shape)
            return arrays.from_bits(bits, plan.dtype, plan.shape, target)
        parsed = self.parse(name, data, max_nbytes)
        plan = parsed.plan
        bits = np.empty(plan.nelem * plan.dtype.itemsize, np.uint8).view(plan.dtype.bits)
        engine.decode_range(parsed, bits, 0, threads=threads)
        return arrays.from_bits(bits, plan.dtype, plan.shape, target)

    def decode_into(
        self,
        name: str,
        data: Bytes,
        head: Head | None,
        out: Bytes,
        threads: int,
        backend: str | None = None,
    ) -> None:
        """Put the elements of a tensor into `out`, from the bytes of its entry, checked."""
        if head is None:
            out[:] = self.check_plain(name, data)
            return
        dtype = head.plan.dtype
        aligned = out.ctypes.data % dtype.itemsize == 0
        target = out if aligned else np.empty_like(out)
        bits = target.view(dtype.bits)
        engine.decode_range(parsed_of(head, data), bits, 0, threads=threads, backend=backend)
        if not aligned:
            out[:] = target

    def plain(self, name: str) -> Bytes:
        """The bytes of a plain tensor, checked."""
        return self.check_plain(name, self.buffer(name))

    def check_plain(self, name: str, data: Bytes) -> Bytes:
        """`data`, the bytes of a plain tensor, if their checksum is right."""
        if crc32c(data.data) != self._checksums[self.entry(name).name]:
            raise FormatError("checksum_mismatch", "plain data")
        return data

    def tensor_nbytes(self, name: str, head: Head | None) -> int:
        """Bytes of a decoded tensor."""
        if head is None:
            return self.entry(name).nbytes
        return head.plan.nelem * head.plan.dtype.itemsize

    def bits(self, name: str, head: Head | None, threads: int, backend: str | None = None) -> Bits:
        """The elements of one tensor, checked: bits of shape (n,); bytes for those below 8 bits."""
        if head is None:
            dtype = BY_SAFETENSORS.get(self.entry(name).dtype, BY_NAME["uint8"])
            with naming(f"tensor {name!r}"):
                return arrays.aligned_bytes(self.plain(name), dtype.itemsize).view(dtype.bits)
        plan = head.plan
        bits = np.empty(plan.nelem * plan.dtype.itemsize, np.uint8).view(plan.dtype.bits)
        with naming(f"tensor {name!r}"):
            parsed = self.parsed(name, head)
            engine.decode_range(parsed, bits, 0, threads=threads, backend=backend)
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
        if head is None:
            with naming(f"tensor {name!r}"):
                return self.plain_tensor(name, self.buffer(name), target, MAX_NBYTES)
        bits = self.bits(name, head, threads)
        return arrays.from_bits(bits, head.plan.dtype, head.plan.shape, target)

    def plain_tensor(self, name: str, data: Bytes, target: arrays.Target, max_nbytes: int) -> Any:
        """A plain tensor, checked, from the bytes of its entry."""
        entry = self.entry(name)
        self.check_plain_entry(entry, max_nbytes)
        # What was read may be a view of the caller's bytes, or memory that is used again.
        bits = self.check_plain(name, data).copy()
        if entry.dtype not in BY_SAFETENSORS:
            return arrays.from_packed(bits, entry.dtype, entry.shape, target)
        dtype = BY_SAFETENSORS[entry.dtype]
        return arrays.from_bits(bits.view(dtype.bits), dtype, entry.shape, target)


def decode_all(
    contents: Contents, like: Any, max_nbytes: int, threads: int | None = None
) -> dict[str, Any]:
    """The tensors, by all names, in the library of `like`."""
    count = thread_count(threads)
    max_nbytes = integer("max_nbytes", max_nbytes, least=0)
    target = arrays.target_of(like)
    tensors = {}
    if target.device is not None:
        for name, head in contents.heads(max_nbytes).items():
            tensors[name] = contents.tensor(name, head, like, count)
    else:
        empty = Shared().empty

        def decoded(name: str, data: Bytes, memory: Memory, share: int) -> tuple[str, Any]:
            return name, contents.tensor_of(name, data, target, max_nbytes, share, empty)

        try:
            with in_order(contents.jobs(decoded), count) as groups:
                tensors = dict(chain.from_iterable(groups))
        except FormatError:
            # Of a bad head all readers tell before they tell of a bad payload.
            contents.heads(max_nbytes)
            raise
    return tensors | {alias: tensors[name] for alias, name in contents.tied.items()}


class LazyTensor:
    """A tensor in an open file, decoded when it is asked for.

    `f["a"][10:20]` decodes these rows (first dimension) and no others; any other index decodes all.
    Rows may lie in chunks that are needed in part: what of these is checked says specs/buffer.md,
    "Partial decoding", and their checksum is not part of it unless the file was opened with
    `verify=True`. Header, records and chunks that are needed whole are always checked.

    `np.asarray(f["a"])` and `torch.as_tensor(f["a"])` decode it whole. NumPy has no DLPack for
    bfloat16 and fp8: for `torch.as_tensor` of those open the file with `like="torch"`.

    Rows of a file that is neither local nor in memory need all packed bytes of the tensor: they are
    read once, and kept as long as this object is.
    """

    __slots__ = ("_file", "_head", "_parsed", "name")

    def __init__(self, name: str, file: File, head: Head | None) -> None:
        self.name = name
        self._file = file
        self._head = head
        self._parsed: Parsed | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the decoded tensor."""
        return self._entry.shape if self._head is None else self._head.plan.shape

    @property
    def dtype(self) -> str:
        """Name of its element type; of elements of less than a byte, safetensors' name."""
        if self._head is not None:
            return self._head.plan.dtype.name
        name = self._entry.dtype
        return BY_SAFETENSORS[name].name if name in BY_SAFETENSORS else name

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the decoded tensor."""
        return self._file.contents.tensor_nbytes(self.name, self._head)

    @property
    def packed_nbytes(self) -> int:
        """Bytes that it takes in the file."""
        return self._entry.nbytes

    @property
    def codec(self) -> str:
        """Name of its codec, "plain" for a tensor that is stored as it is."""
        return PLAIN if self._head is None else self._head.plan.codec.name

    @property
    def _entry(self) -> Entry:
        return self._file.contents.entry(self.name)

    def load(self, like: Any = None, threads: int | None = None) -> Any:
        """The whole tensor, checked, in the library and on the device of `like`.

        `like` is an array or a library's name; None is what the file was opened with. Raises
        FormatError, OSError, ValueError after the file was closed.
        """
        chosen = self._file.like if like is None else like
        return self._file.contents.tensor(self.name, self._head, chosen, thread_count(threads))

    def numpy(self) -> npt.NDArray[Any]:
        """The whole tensor, checked, as a NumPy array."""
        array: npt.NDArray[Any] = self.load("numpy")
        return array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        """The whole tensor as a NumPy array: a copy, so that `copy` False raises ValueError."""
        if copy is False:
            raise ValueError("a LazyTensor is decoded into a copy. Allowed: copy=None or True")
        array = self.numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    def __jax_array__(self) -> Any:
        return self.load("jax")

    def __dlpack__(self, **kwargs: Any) -> Any:
        try:
            return self.load().__dlpack__(**kwargs)
        except BufferError as error:
            raise BufferError(f"{self!r}: {error} Open the file with like='torch'") from None

    def __dlpack_device__(self) -> tuple[int, int]:
        if arrays.target_of(self._file.like).device is None:
            return arrays.DLPACK_CPU, 0
        # No rows are on the same device as all of them.
        some = self[:0] if self.shape else self.load()
        kind, index = some.__dlpack_device__()
        return kind, index

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a 0-d tensor has no len()")
        return self.shape[0]

    def __bool__(self) -> bool:
        raise TypeError("a LazyTensor is neither true nor false. Allowed: 'is not None', load()")

    def __iter__(self) -> Iterator[Any]:
        """The rows, decoded some MiB at a time."""
        n_rows = len(self)
        if self._head is None:
            return iter(self.load())
        step = max(1, _BLOCK_NBYTES * n_rows // max(self.nbytes, 1))
        return (row for at in range(0, n_rows, step) for row in self[at : at + step])

    def __getitem__(self, index: Any) -> Any:
        rest = index if isinstance(index, tuple) else (index,)
        if self._head is None or not self.shape or not rest:
            return self.load()[index]
        first = rest[0]
        if first is Ellipsis or first is None:
            return self.load()[index]
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
            return self.load()[index]
        return self._rows(self._head, lo, hi)[(inner, *rest[1:])]

    def _rows(self, head: Head, lo: int, hi: int) -> Any:
        row = math.prod(self.shape[1:])
        file = self._file
        file.check_open()
        if self._parsed is None:
            self._parsed = file.contents.parsed(self.name, head)
        with naming(f"tensor {self.name!r}"):
            flat = decode(
                self._parsed,
                like=file.like,
                start=lo * row,
                stop=hi * row,
                verify=file.verifies or None,
            )
        return flat.reshape((hi - lo, *self.shape[1:]))

    def __reduce__(self) -> Any:
        raise TypeError("a LazyTensor belongs to an open file: pickle what its load() gives")

    def __repr__(self) -> str:
        sizes = f"{size_text(self.nbytes)} in {size_text(self.packed_nbytes)}"
        what = f"{self.dtype}{list(self.shape)}, {self.codec}"
        return f"<tightwire.LazyTensor {self.name!r}: {what}, {sizes}>"


class File(Mapping[str, LazyTensor]):
    """A compressed safetensors file, open for reading: a mapping from names to `LazyTensor`.

    A context manager. Opening it checks the container's header, `f[name]` the header and records
    of that tensor, and decoding what it says of itself; `verify()` checks everything. Names stay
    known after `close`, while tensors raise ValueError.

    Local files are mapped into memory: another process that cuts the file off while it is open
    ends this one (SIGBUS). Files that are replaced, as `save_file` does, are safe. Of URLs and file
    objects ranges are read, one per tensor.
    """

    def __init__(
        self,
        path: Any,
        *,
        like: Any = "numpy",
        max_nbytes: int = DEFAULT_MAX_NBYTES,
        verify: bool = False,
    ) -> None:
        self.like = like
        self.max_nbytes = integer("max_nbytes", max_nbytes, least=0)
        #: True if rows are taken from chunks that were checked whole.
        self.verifies = bool(verify)
        reader = MappedReader(path) if is_path(path) else open_reader(path)
        self.name = reader.name
        try:
            #: The container's header, and what readers of tensors work on.
            self.contents = Contents(reader)
        except BaseException:
            reader.close()
            raise
        self._names = dict.fromkeys(self.contents.names())
        self._closed = False

    @property
    def metadata(self) -> dict[str, str]:
        """The file's metadata without tightwire's own entries."""
        return users_metadata(self.contents.directory.metadata)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    #: Two files are equal if they are one object.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __getitem__(self, name: str) -> LazyTensor:
        contents = self._holding(name)
        head = contents.head(name, self.max_nbytes)
        return LazyTensor(name, self, head)

    def buffer(self, name: str) -> Bytes:
        """The packed buffer of one tensor, or the bytes of one stored plain: uint8, shape (n,).

        A view where the file is mapped or in memory.
        """
        return self._holding(name).buffer(name)

    def _holding(self, name: str) -> Contents:
        """The contents, if they hold a tensor of that name; else KeyError."""
        if name not in self:
            raise KeyError(f"{name!r} is not in {self.name}")
        self.check_open()
        return self.contents

    def check_open(self) -> None:
        """Raise ValueError if the file was closed."""
        if self._closed:
            raise ValueError(f"{self.name} is closed")

    def verify(self) -> None:
        """Check every byte of every tensor, as loading them would. Raises FormatError, OSError."""
        from .convert import verify_contents

        self.check_open()
        verify_contents(self.contents, self.max_nbytes)

    def close(self) -> None:
        """Let go of the file; arrays and buffers handed out stay valid."""
        self.contents.reader.close()
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

    def __reduce__(self) -> Any:
        raise TypeError("an open File cannot be pickled: open it again where it is needed")

    def __repr__(self) -> str:
        n = len(self)
        what = "closed" if self._closed else f"{n} tensor{'' if n == 1 else 's'}"
        if not self._closed:
            source = self.contents.source
            raw = "" if source is None else f"{size_text(source.data_nbytes)} in "
            what += f", {raw}{size_text(self.contents.reader.nbytes)}"
        return f"<tightwire.File {self.name!r}: {what}>"


def read_header(path: Any) -> Directory:
    """The header of a safetensors file, compressed or not. Raises FormatError or OSError."""
    with reading(path) as reader:
        return directory_of(reader.read, reader.nbytes)


def open_file(
    path: Any,
    *,
    like: Any = "numpy",
    max_nbytes: int = DEFAULT_MAX_NBYTES,
    verify: bool = False,
) -> File:
    """Open a compressed safetensors file lazily (`tightwire.open`).

    `path` is what `load_file` takes: a path, a URL for fsspec, a binary file object or bytes.
    `like`, an array or a library's name, says which library decoded tensors belong to. With
    `verify` every chunk that a row comes from is checked whole, checksum included, at the price of
    decoding it whole. `max_nbytes` bounds each tensor.

    Raises FormatError if it is none, OSError if it cannot be read.
    """
    return File(path, like=like, max_nbytes=max_nbytes, verify=verify)


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
    fsspec, a binary file object, read from its present position to its end, bytes-like or a uint8
    array.

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
    # It needs this module.
    from .loading import load_files

    with reading(path) as reader:
        contents = Contents(reader)
        tensors = load_files([contents], like, out, max_nbytes, threads)
        return contents.shaped(tensors) if out is None else tensors
