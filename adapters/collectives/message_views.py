"""Buffers in a row in memory, each of which is a message: views of them, made once."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...buffer import Buffer
from ...codecs.common.base import Plan
from ...formats.dtypes import BY_NAME
from ...formats.header import ALIGN, RECORD
from . import tensors

_INT64 = BY_NAME["int64"]
_WORD = _INT64.itemsize
#: Where a record says how many dynamic bytes there are.
_NEED = RECORD.fields["dynamic_nbytes"][1] // _WORD  # type: ignore[index]


class MessageViews:
    """One buffer of one chunk for each rank, or from each, as they lie in memory.

    Messages of no elements are not encoded, and have no bytes.

    Args:
        plans: Plans of the buffers.
        memory: uint8, of at least `nbytes_of(plans, prefix)` bytes.
        prefix: Whether ALIGN bytes come before each buffer, the first word of which is free.

    Attributes:
        data: The buffers, uint8, by rank.
        some: Ranks whose messages have elements.
        raw: Bytes of elements by rank.
        nbytes: Bytes of messages without dynamic parts by rank.
    """

    def __init__(self, plans: Sequence[Plan], memory: Any, prefix: bool) -> None:
        self.plans, self.memory = plans, memory
        self._prefix = ALIGN if prefix else 0
        self.some = [i for i, plan in enumerate(plans) if plan.nelem]
        self.raw = [plan.nelem * plan.dtype.itemsize for plan in plans]
        self.nbytes = [self._prefix + plan.dynamic_offset if plan.nelem else 0 for plan in plans]
        self.data, self._starts, at = [], [], 0
        for plan in plans:
            at += self._prefix
            self._starts.append(at)
            self.data.append(memory[at : at + plan.nbytes])
            at += plan.nbytes
        self.words = tensors.view(memory[:at], _INT64)
        self._buffers: list[Buffer] = []

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

    @functools.cached_property
    def whole(self) -> list[list[Any]]:
        """The messages, as ``Transport.all_to_all_v`` takes them."""
        return self.upto([0] * len(self.plans))

    def upto(self, capacities: Sequence[int]) -> list[list[Any]]:
        """The messages with so many bytes of their dynamic parts."""
        found: list[list[Any]] = [[] for _ in self.plans]
        for i in self.some:
            begin = self._starts[i] - self._prefix
            found[i] = [self.memory[begin : begin + self.nbytes[i] + capacities[i]]]
        return found

    @tensors.kept
    def buffers(self, words: Any) -> list[Buffer]:
        """The buffers; what decoding on a GPU finds goes to `words`, int64, (ranks,) or longer."""
        if not self._buffers:
            rows = zip(self.plans, self.data, strict=True)
            self._buffers = [Buffer.wrap(plan, data) for plan, data in rows]
            tensors.report(self._buffers, words)
        return self._buffers
