"""Buffers in a row in memory, each of which is a message: views of them, made once."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...buffer import Buffer
from ...codecs.common.base import Plan
from ...formats.dtypes import BY_NAME
from ...formats.header import ALIGN, RECORD, align
from . import tensors

_INT64 = BY_NAME["int64"]
_WORD = _INT64.itemsize
#: Two messages may differ by the longer one over this if a gather moves them.
_UNEVEN = 16
#: Where a record says how many dynamic bytes there are.
_NEED = RECORD.fields["dynamic_nbytes"][1] // _WORD  # type: ignore[index]


def alike(nbytes: int, other: int) -> bool:
    """Whether a gather may take two messages, the shorter as long as the longer."""
    shorter, longer = sorted((nbytes, other))
    return shorter > 0 and _UNEVEN * (longer - shorter) <= longer


def spare_of(plan: Plan, prefix: bool, source: int | None) -> tuple[int, int]:
    """Bytes before and behind messages between two ranks, where a gather may move them.

    Args:
        plan: Of the message.
        prefix: As in `MessageViews`.
        source: The rank it comes from, with the other's; None: it is sent.
    """
    bound = plan.nbytes + prefix * ALIGN
    longest = align(bound * _UNEVEN // (_UNEVEN - 1))
    if source is None:
        return 0, longest - bound
    return (longest, longest - bound) if source else (0, 2 * longest - bound)


class MessageViews:
    """One buffer of one chunk for each rank, or from each, as they lie in memory.

    Messages of no elements are not encoded, and have no bytes.

    Args:
        plans: Plans of the buffers.
        memory: uint8, of at least `nbytes_of(plans, prefix)` bytes and the `spare` ones.
        prefix: Whether ALIGN bytes come before each buffer, the first word of which is free.
        spare: Bytes before the messages and behind them, see `spare_of`.

    Attributes:
        data: The buffers, uint8, by rank.
        some: Ranks whose messages have elements.
        raw: Bytes of elements by rank.
        nbytes: Bytes of messages without dynamic parts by rank.
    """

    def __init__(
        self, plans: Sequence[Plan], memory: Any, prefix: bool, spare: tuple[int, int] = (0, 0)
    ) -> None:
        self.plans, self.memory = plans, memory
        self._prefix = ALIGN if prefix else 0
        self.some = [i for i, plan in enumerate(plans) if plan.nelem]
        self.raw = [plan.nelem * plan.dtype.itemsize for plan in plans]
        self.nbytes = [self._prefix + plan.dynamic_offset if plan.nelem else 0 for plan in plans]
        self.data, self._starts, at = [], [], spare[0]
        for plan in plans:
            at += self._prefix
            self._starts.append(at)
            self.data.append(memory[at : at + plan.nbytes])
            at += plan.nbytes
        self.words = tensors.view(memory[:at], _INT64)
        self._buffers: list[Buffer] = []
        #: The last capacities, and what there was with them.
        self._upto: tuple[Sequence[int], list[list[Any]]] = (), []

    @staticmethod
    def nbytes_of(plans: Sequence[Plan], prefix: bool) -> int:
        """Bytes of memory that the messages take."""
        return sum(plan.nbytes for plan in plans) + prefix * ALIGN * len(plans)

    @functools.cached_property
    @tensors.kept
    def places(self) -> Any:
        """Numbers of words, on the device: the first of each prefix, of messages with elements.

        Without prefixes twice those that say what a dynamic part needs, of all messages; where
        there is none, any word.
        """
        if self._prefix:
            found = [(self._starts[i] - self._prefix) // _WORD for i in self.some]
        else:
            rows = zip(self.plans, self._starts, strict=True)
            needs = [(at + plan.header.nbytes) // _WORD + _NEED for plan, at in rows]
            found = [place for place in needs for _ in range(2)]
        return tensors.on_device(np.array(found, np.int64), tensors.device_of(self.memory))

    def upto(self, capacities: Sequence[int]) -> list[list[Any]]:
        """The messages with so many bytes of their dynamic parts, for ``all_to_all_v``."""
        if self._upto[0] != capacities:
            found: list[list[Any]] = [[] for _ in self.plans]
            for i in self.some:
                found[i] = [self.longer(i, self.nbytes[i] + capacities[i])]
            self._upto = capacities, found
        return self._upto[1]

    def longer(self, i: int, nbytes: int) -> Any:
        """Message i with what lies behind it, so many bytes."""
        begin = self._starts[i] - self._prefix
        return self.memory[begin : begin + nbytes]

    def both(self, i: int, nbytes: int) -> Any:
        """Memory for messages of two ranks, of so many bytes each: that of rank i is message i."""
        begin = self._starts[i] - self._prefix - i * nbytes
        return self.memory[begin : begin + 2 * nbytes]

    @tensors.kept
    def buffers(self, words: Any) -> list[Buffer]:
        """The buffers; what decoding on a GPU finds goes to `words`, int64, (ranks,) or longer."""
        if not self._buffers:
            rows = zip(self.plans, self.data, strict=True)
            self._buffers = [Buffer.wrap(plan, data) for plan, data in rows]
            tensors.report(self._buffers, words)
        return self._buffers
