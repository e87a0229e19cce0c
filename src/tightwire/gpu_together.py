"""Several buffers of one GPU with few waits: what the host has to know of all comes by one copy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from .arguments import check_base, check_base_of_buffer, check_decoded
from .arrays import ArrayInfo, Target, describe, host_array
from .buffer import Buffer
from .codec import Codec
from .codecs.common.base import Bytes, Plan
from .codecs.common.batch_triton import addresses
from .codecs.common.frame_triton import Words, problem
from .codecs.delta import DIGESTS_NBYTES
from .codecs.delta_batch_triton import Goal, Rows
from .codecs.delta_digest_triton import digests_of
from .codecs.zipccl_batch_triton import RAW_AS, decode_places
from .decoding import decode
from .engine import MAX_CACHED_HEADER, Head, parse_head
from .formats.dtypes import DType
from .formats.errors import FormatError
from .formats.header import ALIGN, ASSEMBLED, MAX_NBYTES, RAW, RECORD, align
from .gpu import _kernels, _kernels_for, _launch, _Source, to_device
from .gpu_arrays import _as_torch, _base_on, _download, _output, _place, _scope, _upload
from .gpu_many import memories_of
from .gpu_memory import Memory
from .planning import make_plan

#: The result records of a buffer, shape (chunks,).
Records = npt.NDArray[Any]


class Packed(NamedTuple):
    """Bytes of several tensors, each from a multiple of 128 on, and how many each has."""

    data: torch.Tensor
    sizes: list[int]


def digests(xs: Sequence[Any]) -> list[int]:
    """Digests of the elements of arrays in device memory, as specs/delta.md says."""
    groups: dict[Target, list[int]] = {}
    for number, x in enumerate(xs):
        info = describe(x)
        groups.setdefault(Target(info.library, info.device), []).append(number)
    found = [0] * len(xs)
    for target, numbers in groups.items():
        place = _place(target.library, target.device, "x")
        with _scope(place, target.library):
            values = digests_of([_as_torch(xs[i], describe(xs[i])) for i in numbers])
        for i, value in zip(numbers, values, strict=True):
            found[i] = value
    return found


class Coded(NamedTuple):
    """A buffer in device memory, uint8, shape (n,), the base that it is against, if there is one,
    and the array to decode it to.
    """

    data: torch.Tensor
    base: Any
    out: Any


def place_of(x: Any) -> torch.device | None:
    """Where kernels for an array run; None for the host."""
    info = describe(x)
    found: torch.device | None = _place(info.library, info.device, None)
    return found


def bytes_at(data: Any, place: torch.device | None) -> torch.Tensor:
    """Bytes of any library, uint8, shape (n,), in memory of a device, or None: where they are."""
    if not isinstance(data, torch.Tensor):
        data = torch.from_numpy(host_array(data))
    found: torch.Tensor = data if place is None else data.to(place)
    return found


def read_together(pieces: Sequence[torch.Tensor]) -> list[Bytes]:
    """Bytes of one device, uint8, shape (n,) each, on the host."""
    if not pieces:
        return []
    data = _download(torch.cat(list(pieces)))
    return np.split(data, list(accumulate(piece.shape[0] for piece in pieces))[:-1])


def memory_of(buffer: Buffer) -> torch.Tensor:
    """The bytes of a buffer on the device of its tensor; one that the host encoded is moved."""
    if buffer._memory is None:
        buffer = to_device(buffer, None)
        assert buffer._memory is not None
    return buffer._memory.data


def _records(buffers: Sequence[Buffer], memories: Sequence[torch.Tensor]) -> list[Records]:
    """The result records of buffers of one device, whose bytes are `memories`."""
    pieces = []
    for buffer, memory in zip(buffers, memories, strict=True):
        start = buffer.plan.header.nbytes
        pieces.append(memory[start : start + RECORD.itemsize * buffer.plan.chunks])
    return [piece.view(RECORD) for piece in read_together(pieces)]


def records_of(buffers: Sequence[Buffer]) -> list[Records]:
    """The result records of buffers of one device. The host waits once."""
    return _records(buffers, list(map(memory_of, buffers)))


def packed_nbytes(buffer: Buffer, records: Records) -> int:
    """Bytes of the packed form of a buffer."""
    return buffer.plan.dynamic_offset + sum(map(align, records["dynamic_nbytes"].tolist()))


def pack_together(
    items: Sequence[Buffer | torch.Tensor], known: Mapping[int, Records] = MappingProxyType({})
) -> Packed:
    """Buffers of one device packed, and bytes as they are, in new memory in this order.

    `known` has the records of some, by number. No buffer has overflowed: those of a plan without
    `dynamic_capacity` cannot.
    """
    tensors = [memory_of(item) if isinstance(item, Buffer) else item for item in items]
    device = tensors[0].device
    coded = [(i, x) for i, x in enumerate(items) if isinstance(x, Buffer)]
    others = [(i, x) for i, x in coded if i not in known]
    found = _records([x for _, x in others], [tensors[i] for i, _ in others])
    records = {**known, **dict(zip([i for i, _ in others], found, strict=True))}
    packed = [_packed_header(x.plan) for _, x in coded]
    joined = _upload(np.frombuffer(b"".join(packed), np.uint8), device)
    headers = iter(joined.split(list(map(len, packed))))
    zeros = torch.zeros(ALIGN, dtype=torch.uint8, device=device)
    pieces: list[torch.Tensor] = []
    sizes = []
    for number, (item, tensor) in enumerate(zip(items, tensors, strict=True)):
        size = 0
        if isinstance(item, Buffer):
            plan = item.plan
            pieces += [next(headers), tensor[plan.header.nbytes : plan.dynamic_offset]]
            size = plan.dynamic_offset
            for i, used in enumerate(records[number]["dynamic_nbytes"].tolist()):
                slot = plan.dynamic_offset + i * plan.dynamic_stride
                pieces += [tensor[slot : slot + used], zeros[: -used % ALIGN]]
                size += align(used)
        else:
            size = tensor.shape[0]
            pieces += [tensor, zeros[: -size % ALIGN]]
        sizes.append(size)
    return Packed(torch.cat(pieces), sizes)


def _packed_header(plan: Plan) -> bytes:
    """The header of the packed form of a plan's buffers."""
    found: bytes | None = plan.__dict__.get("_packed_header")
    if found is None:
        found = plan.__dict__["_packed_header"] = replace(plan.header, dynamic_stride=0).pack()
    return found


def encode_against(
    codec: Codec, xs: Sequence[Any], bases: Sequence[Any], most: float = 1.0
) -> list[Buffer]:
    """Encode arrays of one device against bases there, each as `codec.encode(x, base=base,
    chunks=None)` does; those of a dtype are coded in a few launches.

    A buffer of these, if it is one chunk, has memory for a dynamic part of `most` of its tensor's
    bytes; one that needs more has overflowed.
    """
    found: list[Any] = [None] * len(xs)
    planned: dict[Any, Plan] = {}
    alike: dict[Any, list[tuple[int, Plan, ArrayInfo]]] = {}
    for i, x in enumerate(xs):
        info = describe(x)
        plan = planned.get(info[2:])
        if plan is None:
            plan = make_plan(codec.spec, info.dtype, info.shape, None)
            if most < 1 and plan.chunks == 1:
                room = int(most * plan.chunk_nelem * info.dtype.itemsize)
                plan = make_plan(codec.spec, info.dtype, info.shape, None, room)
            planned[info[2:]] = plan
        if plan.codec.name == "delta" and _kernels(plan, False, True) is not None:
            alike.setdefault(info[:3], []).append((i, plan, info))
        else:
            found[i] = codec.encode(x, base=bases[i], chunks=None)
    for (library, device, _), some in alike.items():
        place, target = _place(library, device, "xs"), Target(library, device)
        plans = [plan for _, plan, _ in some]
        with _scope(place, library), torch.no_grad():
            news, olds = [], []
            for i, plan, info in some:
                known = check_base(codec.spec, plan, bases[i])
                assert known is not None
                news.append(_as_torch(xs[i], info).contiguous())
                olds.append(_base_on(bases[i], known, place, True))
            memories = memories_of(plans, None, place)
            Rows(plans, Memory.addresses(memories), news, olds).encode()
        for (i, plan, _), memory in zip(some, memories, strict=True):
            found[i] = Buffer(plan, None, target, memory)
    return found


class Together:
    """Buffers of one device, which are checked and decoded in a few launches, with few waits.

    Arrays are of one library and device, and the buffers lie there. An array may be the base of its
    buffer, and overlaps nothing else. A FormatError has the number of its buffer.
    """

    def __init__(self, coded: Sequence[Coded], max_nbytes: int = MAX_NBYTES) -> None:
        """Read headers and records, and check them. Raises FormatError."""
        info = describe(coded[0].out)
        place = _place(info.library, info.device, "out")
        self._place, self._library = place, info.library
        self._outs: list[torch.Tensor] = []
        self._bases: list[Any] = []
        with _scope(place, info.library):
            self._data = [one.data for one in coded]
            firsts = read_together([data[:MAX_CACHED_HEADER] for data in self._data])
            self._heads = _heads(self._data, firsts, max_nbytes)
            for one, head in zip(coded, self._heads, strict=True):
                plan, base = head.plan, None
                known = check_base_of_buffer(plan, one.base)
                if known is not None:
                    base = _base_on(one.base, known, place, True)
                out = _output(one.out, describe(one.out), plan.dtype, plan.shape, "out", place)
                self._bases.append(base)
                self._outs.append(out)
        #: Of which buffers a batch writes what has changed over the base.
        self._over = [False] * len(coded)
        self._groups = self._grouped()
        #: Digests of results that buffers have themselves.
        self._digests = [
            _digest_in(head, first) if over else None
            for head, first, over in zip(self._heads, firsts, self._over, strict=True)
        ]
        self._checked = False
        self._rows: dict[tuple[int, ...], Rows] = {}
        with _scope(place, info.library):
            #: Status words of all.
            self._words = torch.zeros(len(coded), dtype=torch.int64, device=place)

    def digests(self) -> list[int]:
        """Check all of the buffers: the digests of what they hold, as specs/delta.md says.

        What changes an array is checked without it; all else is decoded, to memory of its own.
        """
        goals: list[Goal | None] = ["out" if d is None else "check" for d in self._digests]
        with _scope(self._place, self._library):
            outs = [
                torch.empty_like(x) if goal == "out" else x
                for x, goal in zip(self._outs, goals, strict=True)
            ]
            self._words.zero_()
            self._launch(outs, goals)
            self.settle()
            self._checked = True
            made = iter(digests_of([x for x, g in zip(outs, goals, strict=True) if g == "out"]))
        return [next(made) if known is None else known for known in self._digests]

    def write(self) -> None:
        """Decode to the arrays. One whose base has changed since is not written."""
        self.start()
        self.settle()

    def start(self) -> None:
        """As `write`, but damage is found by `settle`."""
        with _scope(self._place, self._library):
            self._words.zero_()
            if not self._checked:
                self._launch(self._outs, ["check" if over else None for over in self._over])
            goals: list[Goal | None] = ["base" if over else "out" for over in self._over]
            self._launch(self._outs, goals)

    def settle(self) -> None:
        """Wait for the device. Raises FormatError for the first buffer that it found damaged."""
        with _scope(self._place, self._library):
            for number, word in enumerate(self._words.cpu().tolist()):
                error = problem(word) if word else None
                if error is not None:
                    raise _numbered(error, number)

    def _grouped(self) -> dict[Any, list[int]]:
        """Numbers of the buffers that are decoded together, by what they have in common; by None
        those that take a call each.
        """
        groups: dict[Any, list[int]] = {}
        for i, (head, data, base) in enumerate(
            zip(self._heads, self._data, self._bases, strict=True)
        ):
            plan = head.plan
            key: Any = None
            packed = not (head.header.dynamic_stride or head.header.required & ASSEMBLED)
            if packed and data.data_ptr() % ALIGN == 0 and plan.nelem:
                if plan.codec.name == "delta" and _kernels(plan, False, True) is not None:
                    key = plan.codec, plan.dtype, plan.checksum
                    self._over[i] = base.data_ptr() == self._outs[i].data_ptr()
                else:
                    key = dtype_of_batch(plan)
            groups.setdefault(key, []).append(i)
        return groups

    def _launch(self, outs: Sequence[torch.Tensor], goals: Sequence[Goal | None]) -> None:
        """Decode to `outs`, as `goals` say; None: not."""
        words = self._words.data_ptr() + 8 * np.arange(len(outs))
        for key, numbers in self._groups.items():
            if key is None:
                for i in numbers:
                    if goals[i] is not None:
                        self._decode(i, outs[i])
                continue
            for goal in ("out", "check", "base"):
                some = [i for i in numbers if goals[i] == goal]
                if not some:
                    continue
                if isinstance(key, DType):
                    heads = [self._heads[i] for i in some]
                    plans, data = [head.plan for head in heads], self._addresses(some)
                    targets, packed = [outs[i] for i in some], _dynamic_of(heads)
                    decode_places(key, plans, data, targets, words[some], packed=packed)
                else:
                    self._rows_of(some, outs, words, goal).decode(goal)

    def _rows_of(
        self, some: list[int], outs: Sequence[torch.Tensor], words: Words, goal: Goal
    ) -> Rows:
        """The table of some buffers; that of those that are written over their bases is kept."""
        key = tuple(some)
        if goal != "out" and key in self._rows:
            return self._rows[key]
        heads = [self._heads[i] for i in some]
        made = Rows(
            [head.plan for head in heads],
            self._addresses(some),
            [outs[i] for i in some],
            [self._bases[i] for i in some],
            words[some],
            packed=_dynamic_of(heads),
        )
        if goal != "out":
            self._rows[key] = made
        return made

    def _addresses(self, some: list[int]) -> Words:
        """Where some buffers start."""
        return addresses([self._data[i] for i in some])

    def _decode(self, i: int, out: torch.Tensor) -> None:
        """Decode a buffer that no batch takes."""
        head, data, base = self._heads[i], self._data[i], self._bases[i]
        plan = head.plan
        kernels = _kernels(plan, False, base is not None)
        try:
            if kernels is None or head.header.required & ASSEMBLED:
                decode(data, base=base, out=out, verify=True)
                return
            starts = None
            if not head.header.dynamic_stride and plan.layout.dynamic_bound:
                starts = _upload(np.array(head.dynamic_at, np.int64), data.device)
            check_decoded(data, out, base=base)
            source = _Source(kernels, plan, data, starts)
            against = base if plan.needs_base else None
            _launch(
                source, out, 0, plan.nelem, True, None, base=against, status=self._words[i : i + 1]
            )
        except FormatError as error:
            raise _numbered(error, i) from None


def dtype_of_batch(plan: Plan) -> DType | None:
    """By the kernels of which element type `decode_places` takes buffers of a plan, if at all."""
    if plan.codec.name == "raw":
        return RAW_AS[min(plan.dtype.itemsize, 4)]
    if plan.codec.name == "zipccl" and _kernels_for("zipccl", plan.dtype, False) is not None:
        return plan.dtype
    return None


def _heads(data: Sequence[torch.Tensor], firsts: Sequence[Bytes], max_nbytes: int) -> list[Head]:
    """Headers and records of buffers, whose first bytes are `firsts`, checked."""
    heads = []
    for number, (piece, found) in enumerate(zip(data, firsts, strict=True)):
        # Sizes of bytes from elsewhere may be any.
        first = found if found.ctypes.data % 8 == 0 else found.copy()

        def read(nbytes: int, piece: torch.Tensor = piece, first: Bytes = first) -> Bytes:
            there = first.size >= min(nbytes, piece.shape[0])
            return first if there else _download(piece[:nbytes])

        try:
            heads.append(parse_head(read, piece.shape[0], max_nbytes))
        except FormatError as error:
            raise _numbered(error, number) from None
    return heads


def _digest_in(head: Head, first: Bytes) -> int | None:
    """The digest of the result that a delta has, in its first bytes; None if it is not there."""
    at = head.plan.static_offset
    raw = any(record.flags & RAW for record in head.records)
    if raw or head.plan.chunks != 1 or first.size < at + DIGESTS_NBYTES:
        return None
    return int.from_bytes(first[at + 8 : at + 16].tobytes(), "little")


def _dynamic_of(heads: Sequence[Head]) -> tuple[Words, Words]:
    """Where dynamic parts start in packed buffers, and their bytes, of all chunks."""
    starts = np.array([at for head in heads for at in head.dynamic_at], np.int64)
    return starts, np.array([r.dynamic_nbytes for h in heads for r in h.records], np.int64)


def _numbered(error: FormatError, number: int) -> FormatError:
    return FormatError(error.reason, error.detail, number)
