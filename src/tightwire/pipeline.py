"""Work on the tensors of a file by several threads, results in the order of the file.

Each job reads, codes and checks a few consecutive tensors in memory that is used again for later
ones. The caller writes the results, so reading, coding and writing overlap.
"""

from __future__ import annotations

import mmap
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

from .codecs.common.base import Bytes
from .storage import MemoryReader, Reader

if TYPE_CHECKING:
    from concurrent.futures import Future

T = TypeVar("T")
Item = TypeVar("Item")

#: Memory of all jobs together, unless one needs more by itself.
BUDGET_NBYTES = 128 << 20
#: Tensors share a job up to so many bytes.
GROUP_NBYTES = 4 << 20
#: Small results share blocks of this size.
SHARED_NBYTES = 4 << 20
_BLOCK_NBYTES = 2 << 20
_LINE_NBYTES = 64


class Memory:
    """Memory of one job, taken from blocks that earlier jobs are through with."""

    def __init__(self, blocks: _Blocks) -> None:
        self._blocks = blocks
        self._taken: list[Bytes] = []
        self._rest = np.empty(0, np.uint8)

    def take(self, nbytes: int, at: int = 0) -> Bytes:
        """`nbytes` bytes with any contents, for what lies at `at` in a file.

        Valid until the job's result has been used. The address is `at` modulo the size of a page:
        the kernel copies between a file and memory that is a few bytes further on in its page
        several times slower (https://sourceware.org/bugzilla/show_bug.cgi?id=30994).
        """
        start = (at - self._rest.ctypes.data) % mmap.PAGESIZE
        if start + nbytes > self._rest.size:
            start = at % mmap.PAGESIZE
            self._rest = self._blocks.take(start + nbytes)
            self._taken.append(self._rest)
        found = self._rest[start : start + nbytes]
        self._rest = self._rest[start + nbytes :]
        return found

    def give_back(self) -> None:
        """Let other jobs have the memory."""
        self._blocks.give(self._taken)
        self._taken, self._rest = [], self._rest[:0]


class _Blocks:
    """Blocks of memory in use and free."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[Bytes] = []
        self._nbytes = 0

    def take(self, nbytes: int) -> Bytes:
        """The smallest free block that is large enough, or a new one."""
        with self._lock:
            for i, block in enumerate(self._free):
                if block.size >= nbytes:
                    return self._free.pop(i)
            size = -(-max(nbytes, 1) // _BLOCK_NBYTES) * _BLOCK_NBYTES
            while self._free and self._nbytes + size > BUDGET_NBYTES:
                self._nbytes -= self._free.pop(0).size
            self._nbytes += size
        return _new_block(size)

    def give(self, blocks: list[Bytes]) -> None:
        """These blocks are free."""
        with self._lock:
            self._free = sorted(self._free + blocks, key=len)


class Shared(threading.local):
    """Memory for small results, many in one block: a block of its own for each is slower.

    A block lives as long as one of the results in it.
    """

    def __init__(self) -> None:
        self._rest = np.empty(0, np.uint8)

    def empty(self, nbytes: int) -> Bytes:
        """Memory for one result, aligned to a cache line."""
        size = -(-nbytes // _LINE_NBYTES) * _LINE_NBYTES
        if size > self._rest.size:
            if size > SHARED_NBYTES // 2:
                return np.empty(nbytes, np.uint8)
            self._rest = _new_block(SHARED_NBYTES, huge=True)
        found = self._rest[:nbytes]
        self._rest = self._rest[size:]
        return found


def _new_block(nbytes: int, huge: bool = False) -> Bytes:
    """Memory from the system, which gets it back when the last view is gone.

    The allocator may keep for itself what a thread returns to it. `huge` asks for huge pages: they
    are quicker to get, unless the system has to drop cached files for them.
    """
    if not hasattr(mmap, "MAP_ANONYMOUS"):
        return np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
    block = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if huge and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):
            block.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(block, np.uint8)


@dataclass(frozen=True)
class Job(Generic[T]):
    """Work that takes `nbytes` bytes of memory; `work` is given it and a number of threads."""

    nbytes: int
    work: Callable[[Memory, int], T]


def read_ranges(
    reader: Reader, ranges: Sequence[tuple[int, int]], memory: Memory
) -> Iterator[Bytes]:
    """Ranges of a file, those that follow one another in one read; views of bytes in memory."""
    if isinstance(reader, MemoryReader):
        for start, stop in ranges:
            yield reader.read(start, stop - start)
        return
    for run in _runs(ranges):
        begin, end = run[0][0], run[-1][1]
        # Aligned for any element, and no further on in its page than the file is.
        block = memory.take(end - begin, begin - begin % 8)
        reader.read_into(begin, block)
        for start, stop in run:
            yield block[start - begin : stop - begin]


def _runs(ranges: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """The ranges, those that follow one another together."""
    runs: list[list[tuple[int, int]]] = []
    for start, stop in ranges:
        if runs and runs[-1][-1][1] == start:
            runs[-1].append((start, stop))
        else:
            runs.append([(start, stop)])
    return runs


def grouped(
    items: Iterable[Item], nbytes: Callable[[Item], int], most: int = GROUP_NBYTES
) -> Iterator[list[Item]]:
    """Consecutive items in lists of up to `most` bytes, or of one larger item."""
    group: list[Item] = []
    total = 0
    for item in items:
        size = nbytes(item)
        if group and total + size > most:
            yield group
            group, total = [], 0
        group.append(item)
        total += size
    if group:
        yield group


def in_order(jobs: Sequence[Job[T]], threads: int) -> closing[Generator[T, None, None]]:
    """A context manager with the results of `jobs`, in their order, by `threads` threads.

    A result, with the memory of its job, is valid until the next one is asked for. Memory of all
    jobs under way is at most `BUDGET_NBYTES`, or that of two jobs. The first error in the order of
    the jobs is raised. No job runs any more when the context ends.
    """
    return closing(_results(jobs, threads))


def _results(jobs: Sequence[Job[T]], threads: int) -> Generator[T, None, None]:
    blocks = _Blocks()
    if threads == 1 or len(jobs) == 1:
        for job in jobs:
            memory = Memory(blocks)
            yield job.work(memory, threads)
            memory.give_back()
        return
    # Imported at first use: it brings logging, and importing the library is to be quick.
    from concurrent.futures import ThreadPoolExecutor

    def share(job: Job[T]) -> int:
        # Where memory does not let all threads have a job of their own, some work on one job.
        return min(-(-threads * job.nbytes // BUDGET_NBYTES), threads) or 1

    waiting = deque(jobs)
    running: deque[tuple[Job[T], Memory, Future[T]]] = deque()
    used = 0
    with ThreadPoolExecutor(threads, thread_name_prefix="tightwire-file") as executor:
        try:
            while waiting or running:
                while waiting and len(running) <= 2 * threads:
                    job = waiting[0]
                    if len(running) > 1 and used + job.nbytes > BUDGET_NBYTES:
                        break
                    waiting.popleft()
                    used += job.nbytes
                    memory = Memory(blocks)
                    running.append((job, memory, executor.submit(job.work, memory, share(job))))
                job, memory, future = running.popleft()
                yield future.result()
                memory.give_back()
                used -= job.nbytes
        finally:
            for _, _, future in running:
                future.cancel()


__all__ = ["Job", "Memory", "Shared", "grouped", "in_order", "read_ranges"]
