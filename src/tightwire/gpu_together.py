"""Several buffers of one GPU with few waits: what the host has to know of all comes by one copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from .arguments import check_base_of_buffer
from .arrays import Target, describe, host_array
from .buffer import Buffer
from .codecs.common.base import Bytes
from .codecs.common.frame_triton import problem
from .codecs.delta_digest_triton import digests_of
from .decoding import decode
from .engine import MAX_CACHED_HEADER, Head, parse_head
from .formats.errors import FormatError
from .formats.header import ALIGN, ASSEMBLED, MAX_NBYTES, RECORD, align
from .gpu import _kernels, _launch, _Source, to_device
from .gpu_arrays import _as_torch, _base_on, _download, _output, _place, _scope, _upload


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


def _records(buffers: Sequence[Buffer], memories: Sequence[torch.Tensor]) -> list[npt.NDArray[Any]]:
    """The result records of buffers of one device, whose bytes are `memories`."""
    pieces = []
    for buffer, memory in zip(buffers, memories, strict=True):
        start = buffer.plan.header.nbytes
        pieces.append(memory[start : start + RECORD.itemsize * buffer.plan.chunks])
    return [piece.view(RECORD) for piece in read_together(pieces)]


def packed_sizes(buffers: Sequence[Buffer]) -> list[int]:
    """Bytes of the packed forms of buffers of one device."""
    records = _records(buffers, list(map(memory_of, buffers)))
    return [
        buffer.plan.dynamic_offset + sum(map(align, found["dynamic_nbytes"].tolist()))
        for buffer, found in zip(buffers, records, strict=True)
    ]


def pack_together(items: Sequence[Buffer | torch.Tensor]) -> Packed:
    """Buffers of one device packed, and bytes as they are, in new memory in this order.

    No buffer has overflowed: those of a plan without `dynamic_capacity` cannot.
    """
    tensors = [memory_of(item) if isinstance(item, Buffer) else item for item in items]
    device = tensors[0].device
    coded = [(x, m) for x, m in zip(items, tensors, strict=True) if isinstance(x, Buffer)]
    buffers, memories = [x for x, _ in coded], [memory for _, memory in coded]
    packed = [replace(buffer.header, dynamic_stride=0).pack() for buffer in buffers]
    records = iter(_records(buffers, memories))
    joined = _upload(np.frombuffer(b"".join(packed), np.uint8), device)
    headers = iter(joined.split(list(map(len, packed))))
    zeros = torch.zeros(ALIGN, dtype=torch.uint8, device=device)
    pieces: list[torch.Tensor] = []
    sizes = []
    for item, tensor in zip(items, tensors, strict=True):
        size = 0
        if isinstance(item, Buffer):
            plan = item.plan
            pieces += [next(headers), tensor[plan.header.nbytes : plan.dynamic_offset]]
            size = plan.dynamic_offset
            for i, used in enumerate(next(records)["dynamic_nbytes"].tolist()):
                slot = plan.dynamic_offset + i * plan.dynamic_stride
                pieces += [tensor[slot : slot + used], zeros[: -used % ALIGN]]
                size += align(used)
        else:
            size = tensor.shape[0]
            pieces += [tensor, zeros[: -size % ALIGN]]
        sizes.append(size)
    return Packed(torch.cat(pieces), sizes)


def decode_together(coded: Sequence[Coded], max_nbytes: int = MAX_NBYTES) -> None:
    """Decode buffers, checked whole, as `decode` with `verify=True` does for each.

    Arrays are of one library and device, and the buffers lie on that device. FormatError has the
    number of its buffer. Nothing is decoded if a header or record is bad.
    """
    if not coded:
        return
    info = describe(coded[0].out)
    place = _place(info.library, info.device, "out")
    with _scope(place, info.library):
        heads = _heads(coded, max_nbytes)
        starts = _starts(heads, place)
        statuses = torch.zeros(len(coded), dtype=torch.int64, device=place)
        for number, status in enumerate(statuses.split(1)):
            try:
                _decode(coded[number], heads[number], starts[number], status)
            except FormatError as error:
                raise _numbered(error, number) from None
        for number, found in enumerate(statuses.cpu().tolist()):
            error_found = problem(found) if found else None
            if error_found is not None:
                raise _numbered(error_found, number)


def _decode(coded: Coded, head: Head, starts: torch.Tensor, status: torch.Tensor) -> None:
    """Decode a buffer whose dynamic parts are at `starts`; see `_launch` for `status`."""
    plan, place = head.plan, status.device
    kernels = _kernels(plan, False, coded.base is not None)
    if kernels is None or head.header.required & ASSEMBLED:
        decode(coded.data, base=coded.base, out=coded.out, verify=True)
        return
    against, base_info = None, check_base_of_buffer(plan, coded.base)
    if base_info is not None and plan.needs_base:
        against = _base_on(coded.base, base_info, place, True)
    out = _output(coded.out, describe(coded.out), plan.dtype, plan.shape, "out", place)
    packed = not head.header.dynamic_stride and plan.layout.dynamic_bound
    source = _Source(kernels, plan, coded.data, starts if packed else None)
    _launch(source, out, 0, plan.nelem, True, None, base=against, status=status)


def _heads(coded: Sequence[Coded], max_nbytes: int) -> list[Head]:
    """Headers and records, checked."""
    heads = []
    firsts = read_together([piece.data[:MAX_CACHED_HEADER] for piece in coded])
    for number, (piece, found) in enumerate(zip(coded, firsts, strict=True)):
        # Sizes of bytes from elsewhere may be any.
        first = found if found.ctypes.data % 8 == 0 else found.copy()

        def read(nbytes: int, data: torch.Tensor = piece.data, first: Bytes = first) -> Bytes:
            there = first.size >= min(nbytes, data.shape[0])
            return first if there else _download(data[:nbytes])

        try:
            heads.append(parse_head(read, piece.data.shape[0], max_nbytes))
        except FormatError as error:
            raise _numbered(error, number) from None
    return heads


def _starts(heads: Sequence[Head], place: torch.device) -> tuple[torch.Tensor, ...]:
    """Where the dynamic parts of each buffer start, int64, in the device's memory."""
    found = np.array([at for head in heads for at in head.dynamic_at], np.int64)
    starts: tuple[torch.Tensor, ...] = _upload(found, place).split(
        [len(head.dynamic_at) for head in heads]
    )
    return starts


def _numbered(error: FormatError, number: int) -> FormatError:
    return FormatError(error.reason, error.detail, number)
