"""The one check of memory: what a call writes overlaps nothing else that it writes or reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from . import arrays
from .buffer import Buffer
from .engine import Parsed

#: Starts and ends of memory: pairs, or an array of shape (n, 2).
Spans = Sequence[tuple[int, int]] | npt.NDArray[np.int64]

#: So many are compared in pairs, in less time than NumPy takes to begin.
_FEW = 8


def span_of(x: Any, nbytes: int | None = None) -> tuple[int, int]:
    """Start and end of the memory that an array, a Buffer or bytes lie in, or their first bytes.

    It is the caller's memory, so `x` is what was passed and no copy of it. (0, 0): nothing in
    memory, such as None or a list.
    """
    if x is None:
        return 0, 0
    if isinstance(x, Buffer):
        nbytes = x.plan.nbytes if nbytes is None else nbytes
        x = x._host if x._memory is None else x._memory.data
    elif isinstance(x, Parsed):
        x = x.data
    start, stop = arrays.span_of(x)
    return start, stop if nbytes is None else min(stop, start + nbytes)


def spans_of(values: Iterable[Any]) -> list[tuple[int, int]]:
    """`span_of` each."""
    return list(map(span_of, values))


def check_apart(written: Mapping[str, Spans], read: Mapping[str, Spans]) -> None:
    """Raise ValueError if memory that is written overlaps other, read or written.

    Both are starts and ends, by name, with braces where a message is to say which.
    """
    groups = [*written.values(), *read.values()]
    sizes = list(map(len, groups))
    most = sum(sizes[: len(written)])
    pair = (_pair_of_few if sum(sizes) <= _FEW else _pair_of_many)(groups, most)
    if pair is not None:
        # What is written comes first; of two such the later.
        first, second = sorted(pair, reverse=max(pair) < most)
        names = [*written, *read]
        texts = [name.format(i) for name, n in zip(names, sizes, strict=True) for i in range(n)]
        raise ValueError(f"{texts[first]} overlaps {texts[second]}")


def _pair_of_few(groups: Sequence[Spans], most: int) -> tuple[int, int] | None:
    """Numbers of two spans that overlap, of which one is among the first `most`; else None."""
    spans = [span for group in groups for span in group]
    for i in range(most):
        start, stop = spans[i]
        # Empty ones overlap nothing.
        for j in range(i + 1, len(spans)) if start < stop else ():
            other, end = spans[j]
            if start < end and other < stop and other < end:
                return i, j
    return None


def _pair_of_many(groups: Sequence[Spans], most: int) -> tuple[int, int] | None:
    """As `_pair_of_few`, in order of where they start."""
    spans = np.concatenate([np.reshape(np.asarray(group, np.int64), (-1, 2)) for group in groups])
    order = np.lexsort((spans[:, 1], spans[:, 0]))
    order = order[spans[order, 0] < spans[order, 1]]
    starts, ends = spans[order].T
    is_written = order < most
    # Of what starts no later the furthest end: of all, and of what is written.
    others = [np.maximum.accumulate(kind)[:-1] for kind in (ends, np.where(is_written, ends, 0))]
    found = np.flatnonzero(starts[1:] < np.where(is_written[1:], *others))
    if not found.size:
        return None
    this = int(found[0]) + 1
    before = ends[:this] if is_written[this] else np.where(is_written[:this], ends[:this], 0)
    return int(order[this]), int(order[before.argmax()])
