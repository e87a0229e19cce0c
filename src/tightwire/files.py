"""Compressed safetensors files (specs/container.md): written atomically, read lazily."""

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
from .arguments import thread_count
from .codec import Codec, as_codec
from .codecs.common.base import Bits, Bytes, Plan
from .contents import Contents, decode_all, naming_call
from .engine import DEFAULT_MAX_NBYTES
from .file_tensors import Tensors
from .formats.container import (
    BASE_KEY,
    BITS,
    LIST,
    LIST_KEY,
    PLAIN_KEY,
    PLAIN_NBYTES,
    TIED_KEY,
    TREE_KEY,
    BaseNote,
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
    refuse_directory,
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
    #: What the file says of its base, if a plan needs one when it is finished.
    base: BaseNote | None = None

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
        found = dict(self.metadata)
        if self.base is not None and any(plan.needs_base for plan in self.plans.values()):
            found[BASE_KEY] = self.base.text
        if checksums:
            found[PLAIN_KEY] = "".join(checksums)
        return found

    def finish(self, file: BinaryIO, sizes: Mapping[str, int], data_at: int) -> None:
        """Write the plain tensors and the header of a file whose buffers are written.

        Buffers of these `sizes` follow one another from `data_at` on, in the order of `plans`.
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
    """Packed buffers that follow one another: the size of each, and the bytes of all."""

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


#: A delta larger than this part of the tensor is compared with the whole form: 1 / _TRIED.
_TRIED = 50


class Against(NamedTuple):
    """The elements that a tensor is coded against, and its plan without them."""

    base: Bits
    plan: Plan


def bases_of(
    draft: Draft, old: Tensors | None, codec: Codec
) -> Callable[[str, int], Against | None]:
    """What gives, by name and a number of threads, what a tensor of `draft` is coded against.

    That is the tensor of `old` of the same name; by `codec` it is stored whole.
    """

    def against(name: str, threads: int) -> Against | None:
        plan = draft.plans[name]
        if old is None or not plan.needs_base:
            return None
        whole = make_plan(codec.spec, plan.dtype, plan.shape, None)
        return Against(old.bits(name, threads), whole)

    return against


def encode_shorter(
    plan: Plan,
    given: Against | None,
    bits: Bits,
    out: Bytes,
    threads: int,
    backend: str | None = None,
) -> tuple[Plan, int]:
    """Encode into `out` by `plan`, against the base that is given, or whole if that is shorter.

    A delta of a fiftieth of the tensor or less is taken without a look at the whole form: that is
    seldom shorter, and the usual delta is not to take longer. Gives the plan that was taken and the
    number of packed bytes.
    """
    base = None if given is None else given.base
    size = engine.encode_packed(plan, bits, out, threads, backend, base)
    # The whole form has at least what precedes its dynamic bytes.
    if given is not None and _TRIED * size > bits.nbytes and given.plan.dynamic_offset < size:
        whole = np.empty(given.plan.nbytes, np.uint8)
        n = engine.encode_packed(given.plan, bits, whole, threads, backend)
        if n < size:
            out[:n] = whole[:n]
            return given.plan, n
    return plan, size


def encode_jobs(
    plans: dict[str, Plan],
    elements: Callable[[Sequence[str], Memory], Iterable[Bits]],
    nbytes: Callable[[str], int],
    backend: str | None = None,
    against: Callable[[str, int], Against | None] = lambda name, threads: None,
) -> list[Job[Encoded]]:
    """Jobs that encode the tensors of `plans`, in order.

    `elements` gives the bits of named tensors, each in `nbytes` bytes of the job's memory. With
    `against` a tensor is coded by the plan that takes fewer bytes, which is then in `plans`.
    """

    def job(names: list[str]) -> Job[Encoded]:
        packed_nbytes = sum(plans[name].nbytes for name in names)

        def work(memory: Memory, threads: int) -> Encoded:
            data = memory.take(packed_nbytes)
            at = 0
            sizes = []
            for name, bits in zip(names, elements(names, memory), strict=True):
                plan = plans[name]
                part = data[at : at + plan.nbytes]
                given = against(name, threads)
                plans[name], size = encode_shorter(plan, given, bits, part, threads, backend)
                sizes.append(size)
                at += size
            return Encoded(sizes, data[:at])

        return Job(packed_nbytes + sum(map(nbytes, names)), work)

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

    All processors encode, with about 128 MiB of work memory or that of the four largest tensors.
    PyTorch tensors of one GPU are encoded there, about 128 MiB at a time, while packed bytes are
    copied to the host and written by threads.

    A file at a path appears atomically: readers see the old file or the new one. To a URL, or to a
    file object other than ``io.BytesIO`` and files of the system, nothing is written before all
    tensors are encoded.

    Args:
        tensors: Names to arrays, or nested dicts, lists and tuples of arrays, strings, numbers,
            bytes and None, such as the ``state_dict()`` of an optimizer; ``load_file`` returns the
            same. Names that share memory (tied weights) are stored once. An open ``File`` is
            loaded; its nesting, tied names and (unless ``metadata`` is given) metadata are kept.
        path: A path, a URL for fsspec, or a binary file object, which is written from its present
            position on.
        codec: A codec or its name.
        metadata: Text to text, stored in the header.
        threads: Most threads; None: every processor.

    Raises:
        TypeError: If an argument has a wrong type, or safetensors has no name for a dtype.
        ValueError: If a name, a key of the metadata or the nesting is not allowed.
        OSError: If the file cannot be written.

    Example:
        >>> import numpy as np
        >>> import tightwire as tw
        >>> weights = {"a": np.ones((2, 3), np.float32), "b": np.arange(4)}
        >>> tw.save_file(weights, "weights.tw.safetensors")
        >>> tw.load_file("weights.tw.safetensors")["b"]
        array([0, 1, 2, 3])
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
            if not arrays.is_array(x):
                raise TypeError(
                    f"{type(x).__name__} cannot be stored. Allowed: arrays of NumPy, PyTorch, CuPy "
                    "and JAX, dicts, lists, tuples, text, bytes, numbers but complex ones, "
                    "booleans and None"
                )
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
    chosen: Codec, plans: dict[str, Plan], tensors: Mapping[str, Any]
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
    """Encode many arrays into one message, which ``loads`` reads.

    The message has the bytes of the file that ``save_file`` writes.

    Args:
        tensors: As in ``save_file``.
        codec: A codec or its name.
        threads: Most threads; None: every processor.

    Returns:
        The message.

    Raises:
        TypeError: If an argument has a wrong type, or safetensors has no name for a dtype.
        ValueError: If a name or the nesting is not allowed.

    Example:
        >>> import numpy as np
        >>> import tightwire as tw
        >>> message = tw.dumps({"a": np.ones(2, np.float32), "step": 7})
        >>> tw.loads(message)
        {'a': array([1., 1.], dtype=float32), 'step': 7}
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
    """Decode a message of ``dumps``.

    Everything is checked. The contents of a compressed file are such a message too.

    Args:
        data: Bytes-like or a uint8 array.
        like: An array or a library's name, which says where the arrays go.
        max_nbytes: Most bytes that all arrays together may have. The default is 64 GiB.
        threads: Most threads; None: every processor.

    Returns:
        The arrays in the dict or list that ``dumps`` was given.

    Raises:
        FormatError: If the bytes are not such a message, or the arrays have more than
            ``max_nbytes`` bytes.
        TypeError: If ``data`` or ``like`` has a wrong type.
        ValueError: If ``like`` is not a known library.
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
    """Read every tensor of a compressed safetensors file.

    Everything is checked. To a GPU the compressed bytes are copied, and decoded and checked there,
    in the order of the current stream; reading, copies and kernels overlap.

    Args:
        path: A path, a URL for fsspec, a binary file object (read from its present position to its
            end), bytes-like, or a uint8 array.
        like: An array or a library's name, which says where the tensors go; None is NumPy.
        out: Arrays to fill, by all names of the tensors (for nested states the names that
            ``tightwire.open`` has): NumPy, PyTorch and CuPy, each on its own device. Contiguous
            arrays of the file's dtype are decoded into without a copy; others are converted as by
            ``Tensor.copy_``, one tensor at a time. Autograd sees writes as with
            ``tightwire.decode``. Where two tensors of the file have one memory in ``out``, one of
            them wins.
        max_nbytes: Most bytes that one tensor may have. The default is 64 GiB.
        threads: Most threads; None: every processor.

    Returns:
        Names to arrays, or the nested dicts and lists that ``save_file`` was given. Tied names have
        one array.

    Raises:
        FormatError: If the file is damaged, not compressed, or has a tensor of more than
            ``max_nbytes`` bytes. The contents of ``out`` are then undefined.
        OSError: If the file cannot be read, or is a directory.
        torch.OutOfMemoryError: If a GPU has too little memory.
        TypeError: If a value of ``out`` is not an array that can be written to.
        ValueError: If ``out`` lacks a name, has an unknown one, or an array of another shape.
            Names, shapes and headers are checked before anything is written.
    """
    # It needs this module.
    from .loading import load_files

    refuse_directory(path)
    with reading(path) as reader:
        contents = Contents(reader)
        tensors = load_files([contents], like, out, max_nbytes, threads)
        return contents.shaped(tensors) if out is None else tensors
