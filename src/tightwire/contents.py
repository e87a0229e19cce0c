"""What a compressed safetensors file holds, read and checked (specs/container.md, "Reading")."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, TypeVar

import numpy as np

from . import arrays, engine, tree
from .arguments import thread_count
from .codecs.common.base import Bits, Bytes, Plan
from .decoding import decode
from .engine import Head, Parsed
from .formats.container import (
    LIST_KEY,
    TREE_KEY,
    VERSION,
    VERSION_KEY,
    Directory,
    Entry,
    check_compressed,
    crc32c,
    directory_of,
    plain_checksums,
    source_directory,
    tied_names,
)
from .formats.dtypes import BY_NAME, BY_SAFETENSORS
from .formats.errors import FormatError, integer
from .formats.header import MAX_NBYTES, Header
from .pipeline import Job, Memory, Shared, grouped, in_order, read_ranges
from .storage import (
    Reader,
    reading,
)

T = TypeVar("T")

#: Buffers up to this size are decoded in a single call: time in Python would show.
_SMALL_NBYTES = 1 << 20


def read_header(path: Any) -> Directory:
    """The header of a safetensors file, compressed or not. Raises FormatError or OSError."""
    with reading(path) as reader:
        return directory_of(reader.read, reader.nbytes)


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Say in a FormatError what it is about."""
    try:
        yield
    except FormatError as error:
        raise FormatError(error.reason, f"{what}: {error.detail}") from None


@contextmanager
def advising(advice: str) -> Iterator[None]:
    """Say in a FormatError what helps."""
    try:
        yield
    except FormatError as error:
        raise FormatError(error.reason, f"{error.detail}. {advice}") from None


@contextmanager
def naming_call(what: str) -> Iterator[None]:
    """Say in the error of a bad call what it is about; FormatError stays as it is."""
    try:
        yield
    except FormatError:
        raise
    except TypeError as error:
        raise TypeError(f"{what}: {error}") from error
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from error


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
        """The head of a tensor's buffer, its payload not checked; None if the tensor is plain."""
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
        """The buffer of one tensor from its bytes, checked except for its payload."""
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
        base: Bits | None = None,
    ) -> None:
        """Put the elements of a tensor into `out`, from the bytes of its entry, checked.

        `base` are those of the tensor that it was coded against, if there is one.
        """
        if head is None:
            out[:] = self.check_plain(name, data)
            return
        dtype = head.plan.dtype
        aligned = out.ctypes.data % dtype.itemsize == 0
        target = out if aligned else np.empty_like(out)
        bits = target.view(dtype.bits)
        parsed = parsed_of(head, data)
        engine.decode_range(parsed, bits, 0, threads=threads, backend=backend, base=base)
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

    def bits(
        self,
        name: str,
        head: Head | None,
        threads: int,
        backend: str | None = None,
        base: Bits | None = None,
    ) -> Bits:
        """The elements of one tensor, checked: bits of shape (n,); bytes for those below 8 bits.

        `base` are those of the tensor that it was coded against, if there is one.
        """
        if head is None:
            dtype = BY_SAFETENSORS.get(self.entry(name).dtype, BY_NAME["uint8"])
            with naming(f"tensor {name!r}"):
                return arrays.aligned_bytes(self.plain(name), dtype.itemsize).view(dtype.bits)
        plan = head.plan
        bits = np.empty(plan.nelem * plan.dtype.itemsize, np.uint8).view(plan.dtype.bits)
        with naming(f"tensor {name!r}"):
            parsed = self.parsed(name, head)
            engine.decode_range(parsed, bits, 0, threads=threads, backend=backend, base=base)
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
