"""Compressed files straight to a GPU: their bytes cross the bus, and are decoded there.

The host reads headers and records, and says where everything lies; kernels decode many tensors at
a time and check every payload before a tensor is handed out.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from . import engine
from .arrays import ArrayInfo, Target
from .buffer import Buffer
from .codec import Codec
from .codecs.common.base import Plan
from .codecs.common.frame_triton import problem
from .codecs.zipccl_batch_triton import decode_places
from .contents import Contents, naming
from .decoding import decode
from .files import Draft
from .formats.container import Entry
from .formats.dtypes import DType
from .formats.errors import FormatError
from .formats.header import ALIGN, CHECKSUM, RAW, RECORD, Header
from .gpu_arrays import _DTYPES, _TORCH, DEVICE_ALIGN, _export, _place, _scope, _values
from .gpu_together import dtype_of_batch, pack_together
from .pinned import Range, Transfer, Writer
from .storage import PathReader, Reader

#: Bytes of the file that are decoded at a time, if no tensor alone has more.
WINDOW_NBYTES = 128 << 20
#: Bytes of a buffer that are read to plan it; more where header and records are longer.
HEAD_NBYTES = 512


@dataclass(frozen=True)
class Part:
    """Some of the buffers of a file, in the order of their data."""

    contents: Contents
    entries: Sequence[Entry]


class Queue:
    """Buffers of files in the order in which they come to a GPU, window by window.

    In a window they lie behind one another, whatever is between them in the files.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = parts
        self.entries = [entry for part in parts for entry in part.entries]
        sizes = np.array([e.end - e.begin for e in self.entries], np.int64)
        self.windows = list(_windows(sizes))
        starts = sizes.cumsum() - sizes
        firsts, stops = np.array(self.windows, np.int64).reshape(-1, 2).T
        #: Where buffers lie in their windows, (n,).
        self.places = starts - np.repeat(starts[firsts], stops - firsts)
        #: Numbers of the first buffers of parts, (parts + 1,).
        self.bases = np.cumsum([0] + [len(part.entries) for part in parts])

    def ranges(self) -> list[list[Range]]:
        """What windows consist of."""
        return [self._ranges(first, stop) for first, stop in self.windows]

    def _ranges(self, first: int, stop: int) -> list[Range]:
        found: list[Range] = []
        for part, base in zip(self.parts, self.bases.tolist(), strict=False):
            reader, at = part.contents.reader, part.contents.directory.data_at
            start = end = -1
            for entry in part.entries[max(first - base, 0) : max(stop - base, 0)]:
                if entry.begin != end:
                    if start < end:
                        found.append(Range(reader, at + start, at + end))
                    start = entry.begin
                end = entry.end
            if start < end:
                found.append(Range(reader, at + start, at + end))
        return found

    def naming(self, number: int) -> AbstractContextManager[None]:
        """Says in errors which file and tensor they are about."""
        part = self.parts[int(np.searchsorted(self.bases, number, "right")) - 1]
        return _naming(part.contents, self.entries[number].name)


def load_files(
    sources: Sequence[Contents], target: Target, max_nbytes: int
) -> list[dict[str, Any]]:
    """For each file its tensors by all names on the GPU of `target`; see `load`."""
    place = _place(target.library, target.device, "like")
    with _scope(place, target.library), _freeing():
        loaded = [_exported(found, target) for found in load(sources, place, max_nbytes)]
    for contents, tensors in zip(sources, loaded, strict=True):
        tensors.update({alias: tensors[name] for alias, name in contents.tied.items()})
    return loaded


def _exported(found: Mapping[str, torch.Tensor], target: Target) -> dict[str, Any]:
    return {
        name: _export(x, _DTYPES[x.dtype], target) if x.dtype in _DTYPES else x
        for name, x in found.items()
    }


def load(
    sources: Sequence[Contents], device: torch.device, max_nbytes: int
) -> list[dict[str, torch.Tensor]]:
    """For each file its tensors on `device`, by name, in the order of their data.

    Works in the order of the current stream, and waits for it. Raises FormatError for damage,
    OSError, and torch.OutOfMemoryError, which name file and tensor.
    """
    parts = [Part(contents, buffer_entries(contents)) for contents in sources]
    queue = Queue(parts)
    results: list[torch.Tensor] = []
    loaded: list[dict[str, torch.Tensor]] = []
    with _freeing(results, loaded):
        with _transfer(queue, device) as transfer:
            heads = [read_heads(part, max_nbytes) for part in parts]
            plans = [plan for head in heads for plan in head.plans]
            _allocate(queue, plans, device, results)
            _decode(queue, heads, transfer, results, np.ones(len(results), bool), device)
        for part, base in zip(parts, queue.bases.tolist(), strict=False):
            names = [entry.name for entry in part.entries]
            loaded.append(dict(zip(names, results[base:], strict=False)))
            loaded[-1].update(_plain(part.contents, device, max_nbytes))
    return loaded


def _plain(contents: Contents, device: torch.device, max_nbytes: int) -> dict[str, torch.Tensor]:
    """The tensors that a file holds as they are."""
    found = {}
    path = contents.reader.name
    for entry in contents.directory.entries:
        if contents.is_plain(entry):
            with naming(path), _naming_memory(f"{path}: tensor {entry.name!r}"):
                contents.head(entry.name, max_nbytes)
                found[entry.name] = contents.tensor(entry.name, None, "torch", 1).to(device)
    return found


def place_of(info: ArrayInfo) -> Any:
    """The device whose kernels decode to such an array, None if none does."""
    return _place(info.library, info.device, None)


def load_into(
    heads: Sequence[Heads],
    outs: Sequence[tuple[Any, ArrayInfo]],
    library: str,
    device: torch.device,
) -> None:
    """Decode the buffers of `heads` to as many arrays of `library` of the same shapes on `device`.

    Straight into contiguous arrays of the buffers' dtypes; others get copies, one at a time.
    Order, waiting and errors are those of `load`.
    """
    plans = [plan for head in heads for plan in head.plans]
    queue = Queue([head.part for head in heads])
    with _scope(device, library):
        tensors = [_values(x, info) for x, info in outs]
        straight = [
            _TORCH[plan.dtype] == x.dtype and x.is_contiguous()
            for plan, x in zip(plans, tensors, strict=True)
        ]
        with _freeing(), _transfer(queue, device) as transfer:
            _decode(queue, heads, transfer, tensors, np.array(straight, bool), device)


def buffer_entries(contents: Contents) -> list[Entry]:
    """The entries of buffers, which lie in front of plain tensors."""
    return [e for e in contents.directory.entries if not contents.is_plain(e)]


@contextmanager
def _freeing(*results: list[Any]) -> Iterator[None]:
    """Let go of results after an error, which may live long: its frames hold tensors."""
    outer = sys.exc_info()[1]
    try:
        yield
    except BaseException as error:
        for found in results:
            found.clear()
        inner: BaseException | None = error
        while inner is not None and inner is not outer:
            traceback.clear_frames(inner.__traceback__)
            inner = inner.__context__
        raise


@contextmanager
def _transfer(queue: Queue, device: torch.device) -> Iterator[Transfer]:
    try:
        with Transfer(queue.ranges(), device) as transfer:
            yield transfer
    except torch.OutOfMemoryError as error:
        paths = [part.contents.reader.name for part in queue.parts]
        if any(path in str(error) for path in paths):
            raise
        where = ", ".join(paths[:3])
        raise torch.OutOfMemoryError(f"{where}: no memory on {device}: {error}") from error


def _decode(
    queue: Queue,
    heads: Sequence[Heads],
    transfer: Transfer,
    outs: Sequence[torch.Tensor],
    straight: npt.NDArray[np.bool_],
    device: torch.device,
) -> None:
    groups, alone = _grouped(queue, heads, outs, straight, device)
    for number, staging in enumerate(transfer):
        for group in groups:
            group.decode(queue, number, staging, outs)
        for i in alone[number]:
            at, entry = int(queue.places[i]), queue.entries[i]
            source = staging[at : at + entry.end - entry.begin]
            with queue.naming(i):
                if straight[i]:
                    decode(source, out=outs[i])
                else:
                    outs[i].copy_(decode(source, like=outs[i]))
    for group in groups:
        group.settle(queue)


def _windows(sizes: npt.NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """First and past-the-last of buffers that have at most WINDOW_NBYTES, or of one with more."""
    ends = sizes.cumsum()
    first = 0
    while first < len(sizes):
        before = int(ends[first] - sizes[first])
        stop = max(int(np.searchsorted(ends, before + WINDOW_NBYTES, "right")), first + 1)
        yield first, stop
        first = stop


@contextmanager
def _naming(contents: Contents, name: str) -> Iterator[None]:
    """Say in errors which file and tensor they are about."""
    what = f"{contents.reader.name}: tensor {name!r}"
    with naming(what), _naming_memory(what):
        yield


@contextmanager
def _naming_memory(what: str) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise torch.OutOfMemoryError(f"{what}: {error}") from error


def _allocate(
    queue: Queue, plans: Sequence[Plan], device: torch.device, results: list[torch.Tensor]
) -> None:
    """Append a tensor for each plan. Each has memory of its own: torch.save writes all of it."""
    first: dict[int, torch.Tensor] = {}
    for plan in plans:
        try:
            model = first.get(id(plan))
            if model is None:
                x = torch.empty(plan.shape, dtype=_TORCH[plan.dtype], device=device)
                first[id(plan)] = x
            else:
                # Half the time of torch.empty: many small tensors take tens of milliseconds.
                x = torch.empty_like(model)
            results.append(x)
        except torch.OutOfMemoryError as error:
            size = plan.nelem * plan.dtype.itemsize
            with queue.naming(len(results)):
                message = f"no memory on {device} for {size} bytes"
                raise torch.OutOfMemoryError(message) from error


@dataclass(frozen=True)
class _Alike:
    """Sound buffers of one plan: their numbers in the part, (m,), and records, (m, chunks)."""

    plan: Plan
    numbers: npt.NDArray[np.int64]
    records: npt.NDArray[Any]


@dataclass(frozen=True)
class Heads:
    """Plans of the buffers of a part, payloads not checked, and groups of the usual ones."""

    part: Part
    plans: list[Plan]
    groups: list[_Alike]


def read_heads(part: Part, max_nbytes: int) -> Heads:
    """Read and check headers and records as `Contents.head` does.

    Buffers of one plan are checked together: a file may have many thousands.
    """
    contents, reader = part.contents, part.contents.reader
    data_at = contents.directory.data_at
    plans: list[Plan] = []
    members: dict[bytes, _Members] = {}
    header, found, entry = b"", None, None
    try:
        for i, entry in enumerate(part.entries):
            start, nbytes = data_at + entry.begin, entry.end - entry.begin
            data = _first_bytes(reader, start, HEAD_NBYTES if nbytes > HEAD_NBYTES else nbytes)
            if found is None or not data.startswith(header):
                header = data[: int.from_bytes(data[8:12], "little")]
                found = members.get(header)
            if found is None:
                # The first of its kind is checked by itself, as are those that this cannot read.
                head = _parse_head(reader, start, nbytes, max_nbytes)
                contents.check_head(entry.name, head.header, head.plan)
                if head.header.required & ~CHECKSUM or len(header) != head.header.nbytes:
                    plans.append(head.plan)
                    continue
                found = members[header] = _Members(head.header, head.plan, [], [])
            elif contents.source is not None:
                contents.check_head(entry.name, found.header, found.plan)
            plans.append(found.plan)
            if len(data) < found.plan.static_offset <= nbytes:
                data = _first_bytes(reader, start, found.plan.static_offset)
            found.numbers.append(i)
            found.data.append(data)
        groups = []
        for found in members.values():
            group = _sound_group(found, part.entries)
            if group is not None:
                groups.append(group)
                continue
            for i in found.numbers:
                entry = part.entries[i]
                nbytes = entry.end - entry.begin
                _parse_head(reader, data_at + entry.begin, nbytes, max_nbytes)
    except FormatError as error:
        assert entry is not None
        where = f"{reader.name}: tensor {entry.name!r}"
        raise FormatError(error.reason, f"{where}: {error.detail}") from None
    return Heads(part, plans, groups)


class _Members(NamedTuple):
    """Buffers of one header: their numbers in the part and first bytes."""

    header: Header
    plan: Plan
    numbers: list[int]
    data: list[bytes]


def _first_bytes(reader: Reader, start: int, nbytes: int) -> bytes:
    if isinstance(reader, PathReader):
        try:
            # A third of the time of `read`, which is asked again after an error.
            data = os.pread(reader.fd, nbytes, start)
            if len(data) == nbytes:
                return data
        except OSError:
            pass
    return reader.read(start, nbytes).tobytes()


def _parse_head(reader: Reader, start: int, nbytes: int, max_nbytes: int) -> engine.Head:
    return engine.parse_head(lambda n: reader.read(start, min(n, nbytes)), nbytes, max_nbytes)


def _sound_group(found: _Members, entries: Sequence[Entry]) -> _Alike | None:
    """The group of buffers of one header if all of them are sound."""
    plan, first = found.plan, found.header.nbytes
    least = min(map(len, found.data))
    if least < plan.static_offset or least < max(map(len, found.data)):
        return None
    joined = np.frombuffer(b"".join(found.data), np.uint8).reshape(len(found.data), -1)
    tops = joined[:, first : plan.static_offset]
    sizes = np.array([entries[i].end - entries[i].begin for i in found.numbers])
    group = _Alike(plan, np.array(found.numbers), _records(plan, tops))
    return group if _sound(group, tops, sizes) else None


def _records(plan: Plan, data: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
    """Records, shape (m, chunks), of what lies between headers and static parts."""
    end = RECORD.itemsize * plan.chunks
    return np.ascontiguousarray(data[:, :end]).view(RECORD)


def _sound(group: _Alike, data: npt.NDArray[np.uint8], sizes: npt.NDArray[np.int64]) -> bool:
    """True if all records, the padding behind them and the sizes of packed buffers are right."""
    plan, records = group.plan, group.records
    used = records["dynamic_nbytes"]
    raw_dynamic = np.array([plan.raw_dynamic(i) for i in range(plan.chunks)], np.uint64)
    bound = raw_dynamic
    if not plan.codec.raw_fallback:
        bound = np.full(plan.chunks, plan.layout.dynamic_bound, np.uint64)
    flags = records["flags"]
    if (used > bound).any() or (flags > (RAW if plan.codec.raw_fallback else 0)).any():
        return False
    packed = plan.dynamic_offset + (-(-used.astype(np.int64) // ALIGN) * ALIGN).sum(1)
    return bool(
        (packed == sizes).all()
        and not data[:, RECORD.itemsize * plan.chunks :].any()
        and (used == raw_dynamic)[flags == RAW].all()
        and (records["ordinal"] == np.arange(plan.chunks)).all()
        and (plan.codec.uses_info or not records["info"].any())
        and (plan.checksum or not records["checksum"].any())
    )


class _Group(NamedTuple):
    """Buffers that are decoded together, in order.

    Attributes:
        dtype: By whose kernels.
        numbers: Of the buffers, (m,).
        plans: Of the buffers.
        starts: Where their chunks' dynamic parts start in them, (chunks of all,).
        used: Bytes of those, (chunks of all,).
        firsts: Numbers of the first chunks, (m + 1,).
        statuses: Status words on the device, int64, (m,).
    """

    dtype: DType
    numbers: npt.NDArray[np.int64]
    plans: list[Plan]
    starts: npt.NDArray[np.int64]
    used: npt.NDArray[np.int64]
    firsts: npt.NDArray[np.int64]
    statuses: torch.Tensor

    def decode(self, queue: Queue, number: int, staging: torch.Tensor, outs: Sequence[Any]) -> None:
        """Launch what decodes window `number`."""
        first, stop = np.searchsorted(self.numbers, queue.windows[number]).tolist()
        if first == stop:
            return
        numbers = self.numbers[first:stop]
        chunks = slice(*self.firsts[[first, stop]].tolist())
        decode_places(
            self.dtype,
            self.plans[first:stop],
            staging.data_ptr() + queue.places[numbers],
            [outs[i] for i in numbers.tolist()],
            self.statuses.data_ptr() + 8 * np.arange(first, stop),
            packed=(self.starts[chunks], self.used[chunks]),
        )

    def settle(self, queue: Queue) -> None:
        """Raise FormatError for the first buffer in which kernels found damage. Waits for the
        device.
        """
        words = self.statuses.cpu().numpy()
        for i in np.flatnonzero(words)[:1].tolist():
            error = problem(int(words[i]))
            assert error is not None
            with queue.naming(int(self.numbers[i])):
                raise FormatError(error.reason, "found on the device")


def _grouped(
    queue: Queue,
    heads: Sequence[Heads],
    outs: Sequence[torch.Tensor],
    straight: npt.NDArray[np.bool_],
    device: torch.device,
) -> tuple[list[_Group], list[list[int]]]:
    """What is decoded together, and for each window the numbers of buffers that are not."""
    pointers = np.array([x.data_ptr() for x in outs], np.int64)
    possible = straight & (pointers % DEVICE_ALIGN == 0)
    parts: dict[DType, list[tuple[_Alike, npt.NDArray[np.bool_], npt.NDArray[np.int64]]]] = {}
    together = np.zeros(len(outs), bool)
    for head, base in zip(heads, queue.bases, strict=False):
        for alike in head.groups:
            kind = dtype_of_batch(alike.plan)
            if kind is not None:
                chosen = possible[base + alike.numbers]
                numbers = base + alike.numbers[chosen]
                together[numbers] = True
                parts.setdefault(kind, []).append((alike, chosen, numbers))
    groups = [_group(kind, found, device) for kind, found in parts.items()]
    others = np.flatnonzero(~together)
    cuts = [np.searchsorted(others, window).tolist() for window in queue.windows]
    return groups, [others[first:stop].tolist() for first, stop in cuts]


def _group(
    kind: DType,
    found: list[tuple[_Alike, npt.NDArray[np.bool_], npt.NDArray[np.int64]]],
    device: torch.device,
) -> _Group:
    """A group of some buffers of each of `found`, which are `chosen` and have these numbers."""
    plans, starts, used, sizes = [], [], [], []
    for alike, chosen, numbers in found:
        plan, some = alike.plan, alike.records["dynamic_nbytes"][chosen].astype(np.int64)
        padded = -(-some // ALIGN) * ALIGN
        plans += [plan] * len(numbers)
        starts.append((plan.dynamic_offset + padded.cumsum(1) - padded).reshape(-1))
        used.append(some.reshape(-1))
        sizes.append(np.full(len(numbers), plan.chunks))
    numbers = np.concatenate([numbers for _, _, numbers in found])
    order = np.argsort(numbers)
    of_chunks = np.argsort(np.repeat(numbers, np.concatenate(sizes)), kind="stable")
    return _Group(
        kind,
        numbers[order],
        [plans[i] for i in order.tolist()],
        np.concatenate(starts)[of_chunks],
        np.concatenate(used)[of_chunks],
        np.concatenate([[0], np.concatenate(sizes)[order].cumsum()]),
        torch.zeros(len(numbers), dtype=torch.int64, device=device),
    )


def write_container(
    file: BinaryIO, draft: Draft, tensors: Mapping[str, torch.Tensor], codec: Codec
) -> None:
    """As `files.write_container`: encode `tensors`, all on one GPU, there."""
    data_at = draft.data_at
    device = next(iter(tensors.values())).device
    with _scope(device, "torch"), Writer(file.fileno(), device) as writer:
        entries = save(writer, tensors, codec, data_at)
    draft.finish(file, {e.name: e.nbytes for e in entries}, data_at)


def save(writer: Writer, tensors: Mapping[str, torch.Tensor], codec: Codec, at: int) -> list[Entry]:
    """Encode tensors on their GPU and write the packed buffers from offset `at` on: their entries.

    Some tensors are encoded while those before them go to the file.
    """
    entries: list[Entry] = []
    encoded: list[tuple[str, Buffer]] = []
    for names in _by_size(tensors):
        following = [(name, codec.encode(tensors[name], chunks=None)) for name in names]
        _write(writer, encoded, at, entries)
        encoded = following
    _write(writer, encoded, at, entries)
    return entries


def _by_size(tensors: Mapping[str, torch.Tensor]) -> Iterator[list[str]]:
    """Names of neighbours of together at most WINDOW_NBYTES, or of one tensor that has more."""
    names: list[str] = []
    nbytes = 0
    for name, x in tensors.items():
        if names and nbytes + x.nbytes > WINDOW_NBYTES:
            yield names
            names, nbytes = [], 0
        names.append(name)
        nbytes += x.nbytes
    if names:
        yield names


def _write(
    writer: Writer, buffers: Sequence[tuple[str, Buffer]], at: int, entries: list[Entry]
) -> None:
    """Pack buffers behind one another on the device, hand them to the writer, note their places."""
    if not buffers:
        return
    begin = start = entries[-1].end if entries else 0
    data, sizes = pack_together([buffer for _, buffer in buffers])
    for (name, _), size in zip(buffers, sizes, strict=True):
        entries.append(Entry(name, "U8", (size,), start, start + size))
        start += size
    writer.write(data, at + begin)
