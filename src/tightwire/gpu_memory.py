"""Memory of buffers on a GPU, and what decoding them has found."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .arrays import Target
from .codecs.common.base import Bytes, Plan
from .engine import Head, check_plan, parse_head
from .formats.dtypes import BY_NAME
from .formats.header import ALIGN, RECORD
from .gpu_arrays import _download, _export, _scope, _upload, unrelated

_UINT8, _INT64 = BY_NAME["uint8"], BY_NAME["int64"]
_status_lock = threading.Lock()

Words = npt.NDArray[np.int64]


class Memory:
    """A buffer's bytes in device memory, and what decoding them found wrong.

    Args:
        whole: uint8, shape (n,): those bytes and more, or what those of a batch lie in.
        start, stop: Where they are in it; None: to its end.
        foreign: The memory is JAX's, which does not know what reads it.
        assembled: The chunks are of several encoders.
    """

    __slots__ = ("_data", "_leases", "_status", "assembled", "foreign", "start", "stop", "whole")

    def __init__(
        self,
        whole: torch.Tensor,
        start: int = 0,
        stop: int | None = None,
        foreign: bool = False,
        assembled: bool = False,
    ) -> None:
        self.whole = whole
        self.start = start
        self.stop = stop
        self.assembled = assembled
        self.foreign = foreign
        self._data = whole if stop is None else None
        #: The status word, or of which words it is one: they, its number, and its address.
        self._status: torch.Tensor | tuple[torch.Tensor, int, int] | None = None
        self._leases: Sequence[_Lease] = ()

    @property
    def data(self) -> torch.Tensor:
        """The bytes, uint8, shape (n,), n >= plan.nbytes."""
        if self._data is None:
            # Threads that come first at the same time make views of the same bytes.
            with unrelated():
                self._data = self.whole[self.start : self.stop]
        return self._data

    @property
    def nbytes(self) -> int:
        """Number of the bytes."""
        return self.whole.numel() if self.stop is None else self.stop - self.start

    @property
    def status(self) -> torch.Tensor:
        """The status word of decoding, int64, shape (1,); 0 while nothing is wrong.

        Buffers that share a `Memory` share it.
        """
        found = self._status
        if found is None:
            with _status_lock:
                if self._status is None:
                    # It outlives this call, and is cleared outside of inference mode.
                    with torch.inference_mode(False):
                        self._status = _new_status(self.whole.device)
                found = self._status
        if type(found) is tuple:
            words, number, _ = found
            with unrelated():
                found = self._status = words[number : number + 1]
        return found

    @staticmethod
    def addresses(memories: Sequence[Memory]) -> Words:
        """Where the bytes are, shape (n,)."""
        wholes = [memory.whole for memory in memories]
        # Asked anew at every call: whoever has a view of the memory can have it moved.
        distinct = dict(zip(map(id, wholes), wholes, strict=True))
        begins = {key: whole.data_ptr() for key, whole in distinct.items()}
        found: Words = np.array([memory.start for memory in memories], np.int64)
        return found + np.fromiter(map(begins.__getitem__, map(id, wholes)), np.int64, found.size)

    @staticmethod
    def status_addresses(memories: Sequence[Memory]) -> Words:
        """Where the status words are, shape (n,), of memories of one device.

        Those that have none yet are given one each, by one fill.
        """
        lacking = [memory for memory in memories if memory._status is None]
        if lacking:
            with torch.inference_mode(False):
                words = torch.zeros(len(lacking), dtype=torch.int64, device=lacking[0].whole.device)
            begin = words.data_ptr()
            with _status_lock:
                for number, memory in enumerate(lacking):
                    if memory._status is None:
                        memory._status = words, number, begin + 8 * number
        found = [memory._status for memory in memories]
        places = [s[2] if type(s) is tuple else s.data_ptr() for s in found]  # type: ignore[union-attr]
        return np.array(places, np.int64)

    def report_to(self, word: torch.Tensor) -> None:
        """Have `word`, int64, shape (1,), zero so far, for status word; buffers may share it."""
        self._status = word

    def check(self, target: Target) -> None:
        """Raise FormatError for damage found so far."""
        if self._status is not None:
            with _scope(self.whole.device, target.library):
                _settle(self.status)

    def lease(self, tensor: torch.Tensor) -> None:
        """Keep `tensor`, which is in JAX's memory, until what is queued now has read it."""
        kept = [lease for lease in self._leases if not lease.event.query()]
        self._leases = [*kept, _Lease(tensor)]

    def array(self, target: Target, start: int, stop: int) -> Any:
        """Bytes `start` to `stop` in `target`'s library, in the same memory."""
        with _scope(self.whole.device, target.library):
            return _export(self.data[start:stop], _UINT8, target)

    def sizes(self, target: Target, plan: Plan) -> Any:
        """Dynamic bytes of every chunk, int64, shape (chunks,), in `target`'s library."""
        start = plan.header.nbytes
        records = self.data[start : start + RECORD.itemsize * plan.chunks].view(torch.int64)
        sizes = records.view(plan.chunks, -1)[:, 1]
        with _scope(self.whole.device, target.library):
            if target.library == "jax":
                import jax

                # XLA asks for arrays at multiples of 16 bytes.
                return jax.dlpack.from_dlpack(sizes.clone())
            return _export(sizes, _INT64, target)

    def head(self, target: Target, plan: Plan) -> Head:
        """Header and records. Raises FormatError."""
        self.check(target)
        with _scope(self.whole.device, target.library):
            return _checked_head(self.data[: plan.nbytes], plan)

    def read(self, target: Target, start: int, stop: int) -> Bytes:
        """Bytes `start` to `stop` on the host. Raises FormatError for damage found so far."""
        self.check(target)
        with _scope(self.whole.device, target.library):
            return _download(self.data[start:stop])

    def packed(self, target: Target, plan: Plan) -> Any:
        """The canonical bytes in `target`'s library. Raises FormatError."""
        self.check(target)
        with _scope(self.whole.device, target.library):
            return _export(_packed(self.data[: plan.nbytes], plan), _UINT8, target)

    def packed_on_host(self, target: Target, plan: Plan) -> Bytes:
        """The canonical bytes in host memory. Raises FormatError."""
        self.check(target)
        with _scope(self.whole.device, target.library):
            return _download(_packed(self.data[: plan.nbytes], plan))


class Views(Sequence[torch.Tensor]):
    """The bytes of memories of one device, or their status words, and where they are.

    Args:
        memories: The memories.
        addresses: Where they are, shape (n,), as `Memory.addresses` or `Memory.status_addresses`.
        name: Of `data` and `status` which they are. Views are made when they are asked for.
    """

    def __init__(self, memories: Sequence[Memory], addresses: Words, name: str) -> None:
        self.addresses = addresses
        self._memories = memories
        self._name = name

    def __len__(self) -> int:
        return len(self._memories)

    def __getitem__(self, i: Any) -> Any:
        return getattr(self._memories[i], self._name)


class _Lease:
    """Keeps memory that its owner would reuse without a look at the stream that reads it."""

    __slots__ = ("event", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.event = torch.cuda.Event()
        self.event.record()

    def __del__(self) -> None:
        self.event.synchronize()


def _new_status(device: torch.device) -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int64, device=device)


def _settle(status: torch.Tensor) -> None:
    """Raise FormatError for what `status` says, and clear it. Waits for the device."""
    found = int(status.item())
    if found:
        from .codecs.common.frame_triton import problem

        status.zero_()
        error = problem(found)
        if error is not None:
            raise error


def match_header(plan: Plan, data: torch.Tensor, status: torch.Tensor) -> None:
    """Compare the header of a buffer with the plan's, on the device."""
    from .codecs.common.frame_triton import frame_of

    frame_of(plan).check_header(data, status)


def take_sound(result: torch.Tensor, decoded: torch.Tensor, memory: Memory | None) -> None:
    """Copy to `result` what was decoded, if that was sound; without `memory` it is known to be."""
    new, old = (x.reshape(-1).view(torch.uint8) for x in (decoded, result))
    old.copy_(new if memory is None else torch.where(memory.status == 0, new, old))


def _read_head(data: torch.Tensor, max_nbytes: int) -> Head:
    return parse_head(lambda nbytes: _download(data[:nbytes]), data.numel(), max_nbytes)


def _checked_head(data: torch.Tensor, plan: Plan) -> Head:
    head = _read_head(data, 1 << 63)
    check_plan(head, plan)
    return head


def _packed(data: torch.Tensor, plan: Plan) -> torch.Tensor:
    head = _checked_head(data, plan)
    zeros = torch.zeros(ALIGN, dtype=torch.uint8, device=data.device)
    header = _upload(head.packed_header, data.device)
    pieces = [header, data[header.numel() : plan.dynamic_offset]]
    for record, at in zip(head.records, head.dynamic_at, strict=True):
        pieces.append(data[at : at + record.dynamic_nbytes])
        pieces.append(zeros[: -record.dynamic_nbytes % ALIGN])
    return torch.cat(pieces)
