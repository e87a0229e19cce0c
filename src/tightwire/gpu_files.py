"""Compressed files straight to a GPU: their bytes cross the bus, and are decoded there.

The host reads headers and records, and says where everything lies; kernels decode many tensors at
a time and check every payload before a tensor is handed out.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import torch

from . import engine
from .arrays import Target
from .buffer import Buffer
from .codec import Codec, decode
from .codecs.base import Bytes, Plan
from .codecs.device import STATUS_TOP, problem
from .codecs.zipccl import Zipccl
from .codecs.zipccl_batch_triton import RAW_AS, ROW, Batch
from .device import _DTYPES, _TORCH, DEVICE_ALIGN, _export, _kernels_for, _place, _scope, moved
from .files import Contents, Draft, naming
from .formats.checksum import F_DYNAMIC, F_FLAGS, F_NELEM, identity_term
from .formats.container import Entry
from .formats.dtypes import DType
from .formats.errors import FormatError
from .formats.header import ALIGN, CHECKSUM, RAW, RECORD, Header, align
from .pinned import Transfer, Writer
from .storage import PathReader

#: Bytes of the file that are decoded at a time, if no tensor alone has more.
WINDOW_NBYTES = 128 << 20
#: Bytes of a buffer that are read to plan it; more where header and records are longer.
HEAD_NBYTES = 512


def load_file(contents: Contents, target: Target, max_nbytes: int) -> dict[str, Any]:
    """The tensors of a file by all names on the GPU of `target`; see `load`."""
    place = _place(target.library, target.device, "like")
    with _scope(place, target.library):
        found = load(contents, place, max_nbytes)
        tensors = {
            name: _export(x, _DTYPES[x.dtype], target) if x.dtype in _DTYPES else x
            for name, x in found.items()
        }
    return tensors | {alias: tensors[name] for alias, name in contents.tied.items()}


def load(
    contents: Contents,
    device: torch.device,
    max_nbytes: int,
    given: Mapping[str, torch.Tensor] | None = None,
) -> dict[str, torch.Tensor]:
    """The tensors of a file of the system on `device`, by name, in the order of their data.

    A buffer's tensor goes where `given` says: contiguous memory on `device`, of its dtype and
    shape. Works in the order of the current stream, and waits for it. Raises FormatError for
    damage, OSError, and torch.OutOfMemoryError, which name file and tensor.
    """
    given = given or {}
    assert isinstance(contents.reader, PathReader)
    path, fd = Path(contents.reader.name), contents.reader.fd
    data_at, entries = contents.directory.data_at, _buffer_entries(contents)
    windows = list(_windows(entries))
    ranges = [(data_at + entries[i].begin, data_at + entries[j - 1].end) for i, j in windows]
    with Transfer(path, fd, ranges, device) as transfer:
        plans, groups = _read_heads(path, fd, contents, max_nbytes)
        results = [
            given[e.name] if e.name in given else _allocated(path, e.name, plan, device)
            for e, plan in zip(entries, plans, strict=True)
        ]
        batches, alone = _batches(entries, windows, groups, results, device)
        for number, ((first, _), staging) in enumerate(zip(windows, transfer, strict=True)):
            for batch in batches:
                batch.decode(number, staging)
            for i in alone[number]:
                at = entries[i].begin - entries[first].begin
                nbytes = entries[i].end - entries[i].begin
                with _naming(path, entries[i].name):
                    decode(staging[at : at + nbytes], out=results[i])
        for batch in batches:
            batch.settle(path, entries)
    found = {e.name: result for e, result in zip(entries, results, strict=True)}
    for entry in contents.directory.entries[len(entries) :]:
        with naming(str(path)):
            contents.head(entry.name, max_nbytes)
            found[entry.name] = contents.tensor(entry.name, None, "torch", 1).to(device)
    return found


def _buffer_entries(contents: Contents) -> list[Entry]:
    """The entries of buffers, which lie in front of plain tensors."""
    return [e for e in contents.directory.entries if not contents.is_plain(e)]


def _windows(entries: Sequence[Entry]) -> Iterator[tuple[int, int]]:
    """First and past-the-last of entries that have at most WINDOW_NBYTES, or of one with more."""
    first = 0
    for i, entry in enumerate(entries):
        if i > first and entry.end - entries[first].begin > WINDOW_NBYTES:
            yield first, i
            first = i
    if entries:
        yield first, len(entries)


def _naming(path: Path, name: str) -> AbstractContextManager[None]:
    return naming(f"{path}: tensor {name!r}")


def _allocated(path: Path, name: str, plan: Plan, device: torch.device) -> torch.Tensor:
    try:
        return torch.empty(plan.shape, dtype=_TORCH[plan.dtype], device=device)
    except torch.OutOfMemoryError as error:
        size = plan.nelem * plan.dtype.itemsize
        message = f"{path}: no memory on {device} for tensor {name!r}, {size} bytes"
        raise torch.OutOfMemoryError(message) from error


@dataclass(frozen=True)
class _Group:
    """Sound buffers of one plan: their numbers in the file, (m,), and records, (m, chunks)."""

    plan: Plan
    numbers: npt.NDArray[np.int64]
    records: npt.NDArray[Any]


def _read_heads(
    path: Path, fd: int, contents: Contents, max_nbytes: int
) -> tuple[list[Plan], list[_Group]]:
    """Plans of all buffers, checked as `Contents.parse` does, and groups of the usual ones.

    Buffers of one plan are checked together: a file may have many thousands.
    """
    data_at, entries = contents.directory.data_at, _buffer_entries(contents)
    plans: list[Plan] = []
    members: dict[bytes, list[tuple[int, bytes]]] = {}
    known: dict[bytes, tuple[Header, Plan]] = {}
    for i, entry in enumerate(entries):
        start, nbytes = data_at + entry.begin, entry.end - entry.begin
        data = os.pread(fd, min(HEAD_NBYTES, nbytes), start)
        header = data[: int.from_bytes(data[8:12], "little")]
        usual = header in known
        if not usual:
            # The first of its kind is checked by itself, as are those that this cannot read.
            with _naming(path, entry.name):
                head = engine.parse_head(_reader(path, fd, start, nbytes), nbytes, max_nbytes)
            usual = not head.header.required & ~CHECKSUM and len(header) == head.header.nbytes
            known[header] = head.header, head.plan
        planned, plan = known[header]
        with _naming(path, entry.name):
            contents.check_head(entry.name, planned, plan)
        if not usual:
            del known[header]
            plans.append(plan)
            continue
        if len(data) < plan.static_offset:
            data = os.pread(fd, plan.static_offset, start)
        plans.append(plan)
        members.setdefault(header, []).append((i, data[len(header) : plan.static_offset]))
    groups = []
    for header, found in members.items():
        plan = known[header][1]
        numbers = np.array([i for i, _ in found])
        sizes = np.array([entries[i].end - entries[i].begin for i, _ in found])
        if all(len(data) == plan.static_offset - len(header) for _, data in found):
            joined = np.frombuffer(b"".join(data for _, data in found), np.uint8)
            tops = joined.reshape(len(found), -1)
            group = _Group(plan, numbers, _records(plan, tops))
            if _sound(group, tops, sizes):
                groups.append(group)
                continue
        for i in numbers.tolist():
            start, nbytes = data_at + entries[i].begin, entries[i].end - entries[i].begin
            with _naming(path, entries[i].name):
                engine.parse_head(_reader(path, fd, start, nbytes), nbytes, max_nbytes)
    return plans, groups


def _reader(path: Path, fd: int, start: int, nbytes: int) -> Any:
    def read(n: int) -> Bytes:
        n = min(n, nbytes)
        data = os.pread(fd, n, start)
        if len(data) < n:
            raise FormatError("truncated", f"{path} became shorter while it was read")
        return np.frombuffer(data, np.uint8)

    return read


def _records(plan: Plan, data: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
    """Records, shape (m, chunks), of what lies between headers and static parts."""
    end = RECORD.itemsize * plan.chunks
    return np.ascontiguousarray(data[:, :end]).view(RECORD)


def _sound(group: _Group, data: npt.NDArray[np.uint8], sizes: npt.NDArray[np.int64]) -> bool:
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


class _Owned:
    """A batch of all windows, and which tensor each of its rows is of."""

    def __init__(
        self,
        dtype: DType,
        rows: npt.NDArray[Any],
        owners: npt.NDArray[np.int64],
        windows: Sequence[tuple[int, int]],
        device: torch.device,
    ) -> None:
        order = np.argsort(owners, kind="stable")
        self._owners = owners[order]
        self._spans = [np.searchsorted(self._owners, window).tolist() for window in windows]
        self._batch = Batch(dtype, rows[order], device)

    def decode(self, number: int, staging: torch.Tensor) -> None:
        """Launch what decodes window `number`."""
        first, stop = self._spans[number]
        if first < stop:
            self._batch.decode(first, stop, staging)

    def settle(self, path: Path, entries: Sequence[Entry]) -> None:
        """Raise FormatError for the first damage that kernels found. Waits for the device."""
        code = int(self._batch.status.item())
        error = problem(code)
        if error is not None:
            row = (STATUS_TOP.value - code) >> 8 & 0xFFFFFFFF
            name = entries[int(self._owners[row])].name
            raise FormatError(error.reason, f"{path}: tensor {name!r}: found on the device")


def _batches(
    entries: Sequence[Entry],
    windows: Sequence[tuple[int, int]],
    groups: Sequence[_Group],
    results: Sequence[torch.Tensor],
    device: torch.device,
) -> tuple[list[_Owned], list[list[int]]]:
    """What is decoded together, and for each window the numbers of tensors that are not."""
    bases = np.zeros(len(entries), np.int64)
    for first, stop in windows:
        bases[first:stop] = entries[first].begin
    places = np.array([e.begin for e in entries], np.int64) - bases
    outs = np.array([result.data_ptr() for result in results], np.int64)
    parts: dict[DType, list[tuple[npt.NDArray[Any], npt.NDArray[np.int64]]]] = {}
    together = np.zeros(len(entries), bool)
    for group in groups:
        kind = _kind(group.plan)
        step = group.plan.chunk_nelem * group.plan.dtype.itemsize
        if kind is None or (group.plan.chunks > 1 and step % DEVICE_ALIGN):
            continue
        chosen = outs[group.numbers] % DEVICE_ALIGN == 0
        numbers = group.numbers[chosen]
        together[numbers] = True
        rows = _rows(group.plan, kind, group.records[chosen], places[numbers], outs[numbers])
        parts.setdefault(kind, []).append((rows, np.repeat(numbers, group.plan.chunks)))
    batches = [
        _Owned(
            kind,
            np.concatenate([r for r, _ in found]),
            np.concatenate([o for _, o in found]),
            windows,
            device,
        )
        for kind, found in parts.items()
    ]
    alone = [[i for i in range(*window) if not together[i]] for window in windows]
    return batches, alone


def _kind(plan: Plan) -> DType | None:
    """The element type by whose kernels a batch decodes buffers of a plan, None if none does."""
    if plan.codec.name == "raw":
        return RAW_AS[min(plan.dtype.itemsize, 4)]
    if plan.codec.name == "zipccl" and _kernels_for("zipccl", plan.dtype, False) is not None:
        return plan.dtype
    return None


def _rows(
    plan: Plan,
    kind: DType,
    records: npt.NDArray[Any],
    places: npt.NDArray[np.int64],
    outs: npt.NDArray[np.int64],
) -> npt.NDArray[Any]:
    """Rows (`ROW`), shape (m * chunks,), of m buffers of one plan."""
    spec = plan.codec
    fixed = -1
    if isinstance(spec, Zipccl) and spec.window != "tile":
        fixed = spec.window if isinstance(spec.window, int) else -2
    ranges = np.array([plan.chunk_range(i) for i in range(plan.chunks)], np.int64)
    sizes = ranges[:, 1] - ranges[:, 0]
    used = records["dynamic_nbytes"].astype(np.int64)
    padded = -(-used // ALIGN) * ALIGN
    always_raw = 0 if isinstance(spec, Zipccl) else RAW
    identity = identity_term(spec.id, spec.version, plan.dtype.id, 0)
    both = records["flags"] | records["ordinal"].astype(np.uint64) << np.uint64(32)
    fields = (
        np.uint64(identity)
        + sizes.astype(np.uint64) * np.uint64(F_NELEM)
        + used.astype(np.uint64) * np.uint64(F_DYNAMIC)
        + both * np.uint64(F_FLAGS)
    )
    rows = np.zeros(used.shape, ROW)
    number = np.arange(plan.chunks)
    rows["static"] = places[:, None] + plan.static_offset + number * plan.static_stride
    rows["dynamic"] = places[:, None] + plan.dynamic_offset + padded.cumsum(1) - padded
    rows["dynamic_nbytes"] = used
    rows["out"] = outs[:, None] + ranges[:, 0] * plan.dtype.itemsize
    rows["nelem"] = sizes * (plan.dtype.itemsize // kind.itemsize)
    rows["static_nbytes"] = plan.static_stride
    rows["index_at"] = plan.layout.sections[0].nbytes
    rows["flags"] = records["flags"].astype(np.int64) | always_raw | 2 * plan.checksum
    rows["words"] = (records["checksum"] - fields).view(np.int64)
    rows["fixed"] = fixed
    return rows.reshape(-1)


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
    begin = place = entries[-1].end if entries else 0
    plans = [buffer.plan for _, buffer in buffers]
    memories = [_memory(buffer) for _, buffer in buffers]
    # One copy to the host for the records of all, one to the device for all headers.
    tops = [m[p.header.nbytes : p.static_offset] for p, m in zip(plans, memories, strict=True)]
    top = torch.cat(tops).cpu().numpy()
    packed = [np.frombuffer(replace(p.header, dynamic_stride=0).pack(), np.uint8) for p in plans]
    headers = torch.from_numpy(np.concatenate(packed)).to(memories[0].device)
    zeros = torch.zeros(ALIGN, dtype=torch.uint8, device=headers.device)
    pieces: list[torch.Tensor] = []
    for (name, _), plan, memory, header in zip(
        buffers, plans, memories, headers.split([h.size for h in packed]), strict=True
    ):
        records = top[: RECORD.itemsize * plan.chunks].view(RECORD)
        top = top[plan.static_offset - plan.header.nbytes :]
        pieces += [header, memory[plan.header.nbytes : plan.dynamic_offset]]
        start = place
        place += plan.dynamic_offset
        for i, used in enumerate(records["dynamic_nbytes"].tolist()):
            slot = plan.dynamic_offset + i * plan.dynamic_stride
            pieces += [memory[slot : slot + used], zeros[: -used % ALIGN]]
            place += align(used)
        entries.append(Entry(name, "U8", (place - start,), start, place))
    writer.write(torch.cat(pieces), at + begin)


def _memory(buffer: Buffer) -> torch.Tensor:
    """The bytes of a buffer on the device of its tensor; one that the host encoded is moved."""
    if buffer._memory is None:
        buffer = moved(buffer, None)
        assert buffer._memory is not None
    return buffer._memory.data
