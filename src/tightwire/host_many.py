"""Batches of tensors in host memory: small ones whole on a thread, large ones cut for all."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy.typing as npt

from .codecs.common import threads as threading
from .codecs.common.base import Bits, Bytes, Key, Plan
from .codecs.common.float_mode import default_floats
from .engine import Parsed, decode_here, encode_here
from .formats.errors import FormatError
from .planning import backend_module

E = TypeVar("E", bound=Exception)


class Encoding(NamedTuple):
    """A tensor to encode: its plan, its elements (1-D), memory of the buffer, statistics."""

    plan: Plan
    bits: Bits
    out: Bytes
    stats: npt.NDArray[Any] | None


@default_floats()
def encode_all(
    items: Sequence[Encoding], key: Key | None, threads: int, backend: str | None, name: str
) -> None:
    """Encode tensors as `engine.encode_into` does.

    The first error is raised after the others have been encoded, with a note which of `name` it is
    of.
    """
    for codec in {item.plan.codec.name for item in items}:
        backend_module(codec, backend)

    def encode(i: int, threads: int) -> None:
        plan, bits, out, stats = items[i]
        encode_here(plan, bits, out, stats, key, threads, backend)

    sizes = [item.bits.nbytes for item in items]
    for i, error in enumerate(_each(encode, sizes, threads, Exception)):
        if error is not None:
            error.add_note(f"The error is of {name}[{i}]")
            raise error


@default_floats()
def decode_all(
    items: Sequence[tuple[Parsed, Bits]], threads: int, backend: str | None
) -> list[FormatError | None]:
    """Decode buffers to elements (1-D), each as `engine.decode_range` does.

    For each what is wrong with it, or None.
    """

    def decode(i: int, threads: int) -> None:
        parsed, out = items[i]
        decode_here(parsed, out, 0, None, threads, backend)

    return _each(decode, [out.nbytes for _, out in items], threads, FormatError)


def _each(
    call: Callable[[int, int], None],
    sizes: Sequence[int],
    threads: int,
    caught: type[E],
) -> list[E | None]:
    """`call(i, threads)` for tensors `i`, of `sizes` bytes; for each what it raised of `caught`.

    A tensor with more than a thread's share of all bytes gets all threads, one after the other. The
    threads then take the others from a queue, the largest first.
    """
    failed: list[E | None] = [None] * len(sizes)

    def task(i: int, threads: int) -> None:
        try:
            call(i, threads)
        except caught as error:
            failed[i] = error

    share = max(sum(sizes) // threads, 2 * threading.MIN_SPAN_NBYTES - 1)
    queue: deque[int] = deque()
    rest = 0
    for i in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True):
        if threads > 1 and sizes[i] > share:
            task(i, threads)
        else:
            queue.append(i)
            rest += sizes[i]

    def work() -> None:
        while queue:
            try:
                i = queue.popleft()
            except IndexError:
                return
            task(i, 1)

    workers = len(threading.spans(len(queue), rest, threads))
    threading.run(work, [()] * workers)
    return failed
