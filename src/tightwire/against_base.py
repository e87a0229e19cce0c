"""Decoding of buffers that need a base: what the engine does for codecs with `needs_base`.

Nothing is written before checksums, padding and digests of the base have been checked; nor, where
the result is written over the base, before everything has been.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from .codecs.common.base import Bits
from .engine import Parsed, check_chunk, load_raw, raise_problem
from .formats.errors import FormatError
from .formats.header import RAW
from .planning import backend_module


def read(
    parsed: Parsed,
    chunks: Sequence[int],
    out: Bits,
    start: int,
    base: Bits,
    verify: bool | None,
    threads: int,
    backend: str | None,
) -> None:
    """As `engine.read_range`, of the chunks that hold the selection.

    The base is checked whatever `verify` says. `out` may be all of `base`.
    """
    plan = parsed.plan
    module = backend_module(plan.codec.name, backend)
    stop = start + out.size
    whole = {i for i in chunks if _within(parsed, i, start, stop)}
    in_place = np.may_share_memory(out, base)
    summed = chunks if verify else whole if verify is None else ()
    prepared = chunks if in_place else [i for i in chunks if verify and i not in whole]
    found = _checked(parsed, chunks, summed, prepared, base, threads, backend)
    for i in chunks:
        lo, hi = plan.chunk_range(i)
        first = max(start, lo)
        last = max(min(stop, hi), first)
        target = out[first - start : last - start]
        if parsed.records[i].flags & RAW:
            load_raw(parsed.chunk(i), target.view(np.uint8), (first - lo) * plan.dtype.itemsize)
        elif in_place:
            found[i].write(target)
        else:
            decoded = module.decode_chunk(
                plan.codec,
                parsed.chunk(i),
                target,
                first - lo,
                base=base[lo:hi],
                threads=threads,
            )
            raise_problem(i, decoded.problem)


def prepare(parsed: Parsed, base: Bits, threads: int) -> Callable[[Bits], None]:
    """Check a whole buffer against its base; what then writes the result over that base.

    Raises FormatError. Where little has changed the write touches only that.
    """
    plan = parsed.plan
    chunks = range(plan.chunks)
    found = _checked(parsed, chunks, chunks, chunks, base, threads, None)

    def write(out: Bits) -> None:
        for i in chunks:
            lo, hi = plan.chunk_range(i)
            if i in found:
                found[i].write(out[lo:hi])
            else:
                load_raw(parsed.chunk(i), out[lo:hi].view(np.uint8), 0)

    return write


def verify(parsed: Parsed, base: Bits, threads: int, backend: str | None) -> None:
    """Check every chunk whole. Raises FormatError."""
    chunks = parsed.distinct(range(parsed.plan.chunks))
    _checked(parsed, chunks, chunks, chunks, base, threads, backend)


def _within(parsed: Parsed, i: int, start: int, stop: int) -> bool:
    lo, hi = parsed.plan.chunk_range(i)
    return start <= lo and hi <= stop


def _checked(
    parsed: Parsed,
    chunks: Sequence[int],
    summed: Collection[int],
    prepared: Collection[int],
    base: Bits,
    threads: int,
    backend: str | None,
) -> dict[int, Any]:
    """Check the base of chunks, checksum and padding of those `summed`, all of those `prepared`.

    Gives what `prepare` of the codec's module gives, by the chunk's number.
    """
    plan = parsed.plan
    module = backend_module(plan.codec.name, backend)
    summed, prepared = set(summed), set(prepared)
    found = {}
    for i in chunks:
        if i in summed:
            check_chunk(parsed, i, module)
        if parsed.records[i].flags & RAW:
            continue
        lo, hi = plan.chunk_range(i)
        given = plan.codec, parsed.chunk(i), base[lo:hi], threads
        if i in prepared:
            found[i] = module.prepare(*given)
        if not (found[i].fits if i in found else module.base_fits(*given)):
            raise FormatError("base_mismatch", f"chunk {i} was encoded against another base")
    for i, chunk in found.items():
        raise_problem(i, chunk.problem)
    return found
