"""Bytes of files to GPU memory and back, through pinned memory that threads read and write.

Files, the bus and what the caller does on the GPU overlap; copies have a stream of their own. The
pinned memory is made once, at most POOL_NBYTES of it, and shared by all threads of the process.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, NamedTuple

import torch

from .codecs.common.threads import cpu_count
from .storage import Reader

SLOT_NBYTES = 16 << 20
#: Of pinned memory, for all that the process loads and saves at a time.
POOL_NBYTES = 256 << 20
MAX_WORKERS = 16
#: Windows that have memory on the GPU at a time: one is decoded while others arrive.
STAGES = 3
PAGE = 4096


class Range(NamedTuple):
    """Bytes `start` to `stop` of a file."""

    reader: Reader
    start: int
    stop: int


class Piece(NamedTuple):
    """Bytes `at` to `at + nbytes` of a file, for byte `to` of window number `window`."""

    window: int
    reader: Reader
    at: int
    nbytes: int
    to: int


class Slot:
    """SLOT_NBYTES of pinned memory, and the event after which it may be written again."""

    __slots__ = ("array", "busy", "tensor")

    def __init__(self, pinned: bool) -> None:
        self.tensor = torch.empty(SLOT_NBYTES, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        self.array = self.tensor.numpy()
        self.busy: Any = None


class Pool:
    """Slots that threads take and give back; none is made before it is needed."""

    def __init__(self, pinned: bool, most: int = POOL_NBYTES // SLOT_NBYTES) -> None:
        self._pinned = pinned
        self._most = most
        self._made = 0
        self._free: list[Slot] = []
        self._returned = threading.Condition()

    def take(self) -> Slot:
        """A slot whose last copy is over; waits for one if all are taken."""
        with self._returned:
            while not self._free and self._made == self._most:
                self._returned.wait()
            slot = self._free.pop() if self._free else None
            if slot is None:
                self._made += 1
        try:
            if slot is None:
                return Slot(self._pinned)
            if slot.busy is not None:
                slot.busy.synchronize()
            return slot
        except BaseException:
            with self._returned:
                self._made -= 1
                self._returned.notify()
            raise

    def give(self, slot: Slot) -> None:
        """Take back what `take` gave."""
        with self._returned:
            self._free.append(slot)
            self._returned.notify()


_pools: dict[bool, Pool] = {}
_pools_lock = threading.Lock()
_parents: list[dict[bool, Pool]] = []


def pool(pinned: bool) -> Pool:
    """The process's slots."""
    with _pools_lock:
        return _pools.setdefault(pinned, Pool(pinned))


def _forget_pools() -> None:
    """A forked child has none of its parent's pinned memory, and cannot use its GPU.

    Nor can it free the memory: PyTorch would record events on the GPU for that, and end the child.
    """
    global _pools, _pools_lock
    _parents.append(_pools)
    _pools, _pools_lock = {}, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pools)


def pieces_of(windows: Sequence[Sequence[Range]]) -> list[Piece]:
    """Ranges of windows, cut where their files have multiples of SLOT_NBYTES."""
    pieces = []
    for number, ranges in enumerate(windows):
        to = 0
        for reader, at, stop in ranges:
            while at < stop:
                end = min(stop, (at // SLOT_NBYTES + 1) * SLOT_NBYTES)
                pieces.append(Piece(number, reader, at, end - at, to))
                to += end - at
                at = end
    return pieces


class Transfer:
    """Windows copied to `device`, in order: each, ranges of files behind one another.

    A context manager. Iterate over it: each step gives a window's bytes, uint8, in memory that
    is valid in the order of the current stream until the next step. Raises OSError and
    FormatError("truncated") as reading goes; nothing of it runs any more when the block ends.
    """

    def __init__(self, windows: Sequence[Sequence[Range]], device: torch.device) -> None:
        self._device = device
        self._sizes = [sum(r.stop - r.start for r in ranges) for ranges in windows]
        self._pieces = pieces_of(windows)
        self._missing = [0] * len(windows)
        for piece in self._pieces:
            self._missing[piece.window] += 1
        self._copied: list[Any] = [None] * len(windows)
        self._next = 0
        self._granted = 0
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._staging: list[torch.Tensor] = []
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._slots = pool(device.type == "cuda")
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Transfer:
        most = min(MAX_WORKERS, max(2, cpu_count()), len(self._pieces))
        self._threads = [
            threading.Thread(target=self._work, name="tightwire-read", daemon=True)
            for _ in range(most)
        ]
        try:
            for thread in self._threads:
                thread.start()
        except BaseException as error:
            # Those that run would keep their slots for ever.
            self._threads = [thread for thread in self._threads if thread.ident is not None]
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._changed:
            self._next = len(self._pieces)
            self._error = self._error or error or RuntimeError("the transfer has ended")
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        if self._stream is not None:
            # The staging memory goes back to the allocator, which does not know this stream.
            self._stream.synchronize()
        if error is not None:
            # The error may live long, and its frames hold views of this memory.
            for memory in self._staging:
                memory.untyped_storage().resize_(0)

    def __iter__(self) -> Iterator[torch.Tensor]:
        largest = max(self._sizes, default=0)
        for _ in self._sizes[:STAGES]:
            # Threads write to it, which are not in the inference mode of the caller.
            with torch.inference_mode(False):
                memory = torch.empty(largest, dtype=torch.uint8, device=self._device)
            self._staging.append(memory)
            self._grant()
        for number, size in enumerate(self._sizes):
            with self._changed:
                while self._missing[number] and self._error is None:
                    self._changed.wait()
                if self._missing[number]:
                    assert self._error is not None
                    raise self._error
            if self._copied[number] is not None:
                torch.cuda.current_stream(self._device).wait_event(self._copied[number])
            yield self._staging[number % STAGES][:size]
            if number + STAGES < len(self._sizes):
                self._grant()

    def _grant(self) -> None:
        """Let copies to one window more begin, behind what the current stream does now."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with self._changed:
            self._granted += 1
            self._changed.notify_all()

    def _work(self) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            while self._move():
                pass
        except BaseException as error:
            with self._changed:
                self._error = self._error or error
                self._next = len(self._pieces)
                self._changed.notify_all()

    def _move(self) -> bool:
        """Bring the next piece; False if none is left.

        The slot is taken first: so the oldest pieces always have slots, and windows are granted.
        """
        slot = self._slots.take()
        try:
            with self._changed:
                if self._next == len(self._pieces):
                    return False
                piece = self._pieces[self._next]
                self._next += 1
            piece.reader.read_into(piece.at, slot.array[: piece.nbytes])
            with self._changed:
                while self._granted <= piece.window and self._error is None:
                    self._changed.wait()
                if self._error is not None:
                    return False
            self._copy(slot, piece)
        finally:
            self._slots.give(slot)
        return True

    def _copy(self, slot: Slot, piece: Piece) -> None:
        staging = self._staging[piece.window % STAGES]
        target, source = staging[piece.to : piece.to + piece.nbytes], slot.tensor[: piece.nbytes]
        if self._stream is None:
            target.copy_(source)
        else:
            with torch.cuda.stream(self._stream):
                target.copy_(source, non_blocking=True)
                slot.busy = torch.cuda.Event()
                slot.busy.record(self._stream)
        with self._changed:
            self._missing[piece.window] -= 1
            if not self._missing[piece.window]:
                if self._stream is not None:
                    # Copies of later windows may be in front of it: they are few.
                    event = torch.cuda.Event()
                    event.record(self._stream)
                    self._copied[piece.window] = event
                self._changed.notify_all()


class Writer:
    """Bytes on `device` written to a file, each batch of them at its place.

    A context manager; when the block ends without an error everything is in the file. Raises
    OSError, at the latest then.
    """

    def __init__(self, fd: int, device: torch.device) -> None:
        self._fd = fd
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._slots = pool(device.type == "cuda")
        self._executor = ThreadPoolExecutor(
            min(MAX_WORKERS, max(2, cpu_count())), thread_name_prefix="tightwire-write"
        )
        self._batches: list[list[Future[None]]] = []

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._executor.shutdown(wait=True, cancel_futures=error is not None)
        if error is None:
            self._settle(0)

    def write(self, data: torch.Tensor, at: int) -> None:
        """Write `data`, uint8, shape (n,), made on the current stream, at offset `at`.

        Waits until earlier data, except the last batch, is in the file, and then lets go of it.
        """
        self._settle(1)
        ready = None
        if self._stream is not None:
            ready = torch.cuda.Event()
            ready.record(torch.cuda.current_stream(self._device))
        starts = range(0, data.numel(), SLOT_NBYTES)
        self._batches.append([self._executor.submit(self._put, data, at, n, ready) for n in starts])

    def _settle(self, most: int) -> None:
        while len(self._batches) > most:
            for future in self._batches.pop(0):
                future.result()

    def _put(self, data: torch.Tensor, at: int, start: int, ready: Any) -> None:
        source = data[start : start + SLOT_NBYTES]
        slot = self._slots.take()
        try:
            if self._stream is None:
                slot.tensor[: source.numel()].copy_(source)
            else:
                with torch.cuda.stream(self._stream):
                    self._stream.wait_event(ready)
                    slot.tensor[: source.numel()].copy_(source, non_blocking=True)
                    slot.busy = torch.cuda.Event()
                    slot.busy.record(self._stream)
                slot.busy.synchronize()
            view = slot.array[: source.numel()].data
            done = 0
            while done < len(view):
                n = os.pwrite(self._fd, view[done:], at + start + done)
                if n == 0:
                    raise OSError(errno.EIO, "the system wrote no bytes")
                done += n
        finally:
            self._slots.give(slot)
