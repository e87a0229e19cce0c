"""Compressed safetensors files (specs/container.md): written whole or not at all, read lazily."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from . import arrays, engine, tree
from .codec import Codec, as_codec, thread_count
from .codecs.base import Bits, Bytes, Plan
from .contents import Contents, decode_all, naming_call
from .engine import DEFAULT_MAX_NBYTES
from .formats.container import (
    BITS,
    LIST,
    LIST_KEY,
    PLAIN_KEY,
    PLAIN_NBYTES,
    TIED_KEY,
    TREE_KEY,
    Entry,
    check_names,
    check_size,
    compressed_metadata,
    crc32c,
    directory_bytes,
    tied_text,
)
from .formats.dtypes import DType
from .formats.errors import FormatError, integer
from .lazy import File, LazyTensor
from .pipeline import Job, Memory, grouped, in_order
from .planning import device_files, make_plan
from .storage import (
    MemoryReader,
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
    for encoded in buffers:
        file.write(encoded.data.data)
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
    the same memory (tied weights) are stored once. An open `File` is loaded for it: nested states,
    tied names and, unless `metadata` is given, its metadata stay.

    `path` is a path, a URL for fsspec, or a binary file object, which is written from its present
    position on. Nothing is uploaded, and to file objects but BytesIO and files of the system
    nothing is written, before all tensors are encoded.

    All threads encode, in some 128 MiB of memory or that of four of the largest tensors. PyTorch's
    tensors of one GPU are encoded there, some 128 MiB at a time, while packed bytes cross the bus
    and are written by threads. At a path the file appears whole or not at all. Raises TypeError or
    ValueError for a bad call, OSError if the disk fails.
    """
    chosen = as_codec(codec)
    # The target is opened first: lazy tensors may move the position of one file object.
    with _naming_path(path), new_file(path) as file:
        draft, found = drafted(tensors, chosen, metadata)
        buffered = {name: found[name] for name in draft.plans}
        gpu_files = device_files() if is_path(path) and _on_one_gpu(buffered) else None
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
    if isinstance(tensors, File):
        metadata = tensors.metadata if metadata is None else metadata
        tensors.check_open()
        contents = tensors.contents
        tensors = contents.shaped(decode_all(contents, tensors.like, tensors.max_nbytes))
    draft = Draft(metadata=compressed_metadata(dict(metadata or {})))
    named, text = _named(tensors)
    loaded: dict[Any, Any] = {}
    found = {
        name: _loaded(x, loaded) if isinstance(x, LazyTensor) else x for name, x in named.items()
    }
    check_names(found)
    first: dict[Any, str] = {}
    tied: dict[str, str] = {}
    for name, x in found.items():
        with naming_call(f"tensors[{name!r}]"):
            what = _planned(chosen, x)
            memory = arrays.memory_of(x)
        if memory is not None and memory in first:
            tied[name] = first[memory]
            continue
        if memory is not None:
            first[memory] = name
        draft.add(name, what)
    if isinstance(tensors, list) and text is None:
        if tied:
            text = tree.flatten(tensors)[1]
        else:
            draft.metadata[LIST_KEY] = LIST
    if tied:
        draft.metadata[TIED_KEY] = tied_text(tied)
    if text is not None:
        draft.metadata[TREE_KEY] = text
    return draft, found


def _loaded(x: LazyTensor, loaded: dict[Any, Any]) -> Any:
    """The tensor `x`, loaded once under all of its names."""
    key = id(x.file), x.stored_name
    if key not in loaded:
        loaded[key] = x.load()
    return loaded[key]


def _named(tensors: Any) -> tuple[dict[str, Any], str | None]:
    """Arrays by name, and the tree around them unless they are a list or names to arrays."""
    if isinstance(tensors, Mapping):
        if all(type(name) is str and tree.is_array(x) for name, x in tensors.items()):
            return dict(tensors), None
    elif isinstance(tensors, list):
        if all(map(tree.is_array, tensors)):
            return {str(i): x for i, x in enumerate(tensors)}, None
    elif not isinstance(tensors, tuple):
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
            with naming_call(f"tensors[{name!r}]"):
                chosen.require_key(tensors[name], None)
                bits = arrays.host_bits(tensors[name], plans[name].dtype)
            yield bits

    return encode_jobs(plans, elements, lambda name: 0)


def _buffers_in_turn(chosen: Codec, tensors: Mapping[str, Any], count: int) -> Iterator[Encoded]:
    """For arrays on GPUs: each thread has a stream of its own, and theirs is the caller's."""
    for name, x in tensors.items():
        with naming_call(f"tensors[{name!r}]"):
            data = chosen.encode(x, chunks=None, threads=count).parsed().pack()
        yield Encoded([data.size], data)


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


def load_file(
    path: Any,
    *,
    like: Any = None,
    out: Mapping[str, Any] | None = None,
    max_nbytes: int = DEFAULT_MAX_NBYTES,
    threads: int | None = None,
) -> Any:
    """Every tensor of a compressed safetensors file, checked, by name.

    If `save_file` was given nested dicts or lists, the same nesting comes back. Tied names give one
    array. `path` is a path, a URL for
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
