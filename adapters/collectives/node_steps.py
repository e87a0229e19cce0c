"""What the calls of a `NodeCommunicator` are made of: steps, their record, and what errors say."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ...codecs.common.base import Bytes
from ..errors import CollectiveError
from .calls import TraceRecord
from .communicator import Communicator

#: How errors name ranks.
_RANKS = re.compile(r"\b(ranks?) (\[\d[\d, ]*\]|\d+)")
#: What follows is in other numbers: what a rank has said, and calls of other groups.
_QUOTES = re.compile(r" gave up: |; here also: ")
#: Most pairs of ranks that an error names.
_MOST = 8


class Steps:
    """The steps of one call: which communicator makes the last one that was begun."""

    def __init__(self, rank: int, collective: str, sequence: int) -> None:
        self._place = rank, collective, sequence
        #: What `failure` has made.
        self.error: CollectiveError | None = None
        self.comm: Communicator | None = None
        self.taken = 0
        #: Nothing is left to do after it.
        self.last = False

    def at(self, comm: Communicator, *, last: bool = False) -> Communicator:
        """`comm`, for the next step."""
        self.comm, self.last = comm, last
        self.taken += 1
        return comm

    def failure(self, stage: str, detail: str) -> CollectiveError:
        """The error of the call at a stage, for all ranks and not of a level."""
        self.error = CollectiveError(*self._place, stage, detail)
        return self.error


def record(
    collective: str,
    sequence: int,
    near: Sequence[TraceRecord],
    far: Sequence[TraceRecord],
    error: str | None,
) -> TraceRecord:
    """The record of a call of whose steps these are within the node and between nodes."""
    seconds: dict[str, float] = {}
    for record in near:
        seconds["within"] = seconds.get("within", 0.0) + sum(record.seconds.values())
    for record in far:
        for stage, spent in record.seconds.items():
            seconds[stage] = seconds.get(stage, 0.0) + spent
    inner, outer = ([r.algorithm for r in records][-1:] for records in (near, far))
    return TraceRecord(
        collective,
        sequence,
        f"within nodes: {(inner or ['nothing'])[0]}; between: {(outer or ['nothing'])[0]}",
        "; ".join(record.reason for record in far[-1:]),
        sum(record.raw_bytes for record in far),
        sum(record.wire_bytes for record in far),
        seconds,
        error,
    )


def in_whole(text: str, numbers: Sequence[int]) -> str:
    """The text of an error of a level, whose ranks have these numbers in the whole, with those."""
    found = _QUOTES.search(text)
    end = len(text) if found is None else found.start()

    def named(match: re.Match[str]) -> str:
        ranks = re.findall(r"\d+", match[2])
        told = ", ".join(str(numbers[int(r)]) if int(r) < len(numbers) else r for r in ranks)
        return f"{match[1]} [{told}]" if match[2][0] == "[" else f"{match[1]} {told}"

    return _RANKS.sub(named, text[:end]) + text[end:]


def compared_splits(steps: Steps, told: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The rows from each rank to each; raises, on all ranks, if splits of two of them differ.

    All can go on then. `told` is what ranks send and what they expect: shape (ranks of a node,
    nodes, 2, ranks).
    """
    ranks = told.shape[-1]
    sends, receives = told.transpose(2, 1, 0, 3).reshape(2, ranks, ranks)
    pairs = np.argwhere(sends != receives.T).tolist()
    if pairs:
        found = [
            f"rank {i} sends {sends[i, j]} rows to rank {j}, which expects {receives[j, i]}"
            for i, j in pairs[:_MOST]
        ]
        if len(pairs) > _MOST:
            found.append(f"{len(pairs) - _MOST} more pairs")
        # No rows have been sent.
        steps.last = True
        raise steps.failure("splits", f"splits differ: {'; '.join(found)}")
    return sends


class Levels:
    """The communicators of a node and between nodes, as errors name them.

    Args:
        within: That of the ranks of this node.
        between: That of the ranks with this rank's number in all nodes.
    """

    def __init__(self, within: Communicator, between: Communicator) -> None:
        self._node, self._number = between.rank, within.rank
        self._ranks, self._size = within.world_size, within.world_size * between.world_size
        self._between = between

    def name(self, comm: Communicator) -> str:
        """How errors name a level."""
        where = f"within node {self._node}"
        if comm is self._between:
            where = f"between nodes, ranks of number {self._number}"
        return f"{where} of {comm.name}" if comm.name else where

    def numbers(self, comm: Communicator) -> range:
        """The numbers in the whole that ranks of a level have."""
        if comm is self._between:
            return range(self._number, self._size, self._ranks)
        return range(self._node * self._ranks, (self._node + 1) * self._ranks)

    def gathered(self, comm: Communicator, mine: Bytes) -> Bytes:
        """`mine` of the ranks of a level, a row for each; RuntimeError names it and them."""
        try:
            return comm.session.gather_plain(mine)
        except RuntimeError as error:
            told = in_whole(str(error), self.numbers(comm))
            raise RuntimeError(f"{self.name(comm)}: {told}") from error

    def words(self, comm: Communicator, words: Any) -> Any:
        """The same of int64."""
        return self.gathered(comm, words.astype(np.int64).view(np.uint8)).view(np.int64)
