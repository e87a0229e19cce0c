"""The bytes of a collective: buffers whose chunks go to or come from one rank each."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ..buffer import Buffer
from ..codecs.base import Plan
from ..formats.dtypes import BY_NAME
from ..formats.header import ASSEMBLED, RECORD
from . import tensors

_INT64 = BY_NAME["int64"]
_UINT8 = BY_NAME["uint8"]

#: Words of a card: digest of the call and the next word, the sender's ratio, the chunk's record.
CARD_WORDS = 2 + RECORD.itemsize // 8
CARD_NBYTES = 8 * CARD_WORDS
_ODD = 0x9E3779B97F4A7C15
_SIZE = 2 + RECORD.fields["dynamic_nbytes"][1] // 8  # type: ignore[index]


class Share(NamedTuple):
    """The chunk of one rank: uint8 views, `slot` with room for its dynamic part."""

    static: Any
    slot: Any
    raw_nbytes: int


class Shares:
    """The chunks of one or more buffers, which lie one behind the other in `room`."""

    def __init__(self, plans: Sequence[Plan], room: Any) -> None:
        self.plans = plans
        self.data: list[Any] = []
        self.shares: list[Share] = []
        at = 0
        for plan in plans:
            data = room[at : at + plan.nbytes]
            at += plan.nbytes
            self.data.append(data)
            for i in range(plan.chunks):
                slot = plan.dynamic_offset + i * plan.dynamic_stride
                lo, hi = plan.chunk_range(i)
                share = Share(
                    data[plan.static_range(i)],
                    data[slot : slot + plan.dynamic_stride],
                    (hi - lo) * plan.dtype.itemsize,
                )
                self.shares.append(share)

    @property
    def statics(self) -> Any:
        """All static parts as one array, None if they do not lie side by side."""
        if len(self.plans) > 1:
            return None
        return self.data[0][self.plans[0].static_offset : self.plans[0].dynamic_offset]

    def cards(self, digests: Sequence[int], ratio: int) -> Any:
        """The card of every share, int64, shape (shares, CARD_WORDS)."""
        like = self.data[0]
        cards = tensors.empty((len(self.shares), CARD_WORDS), _INT64, like)
        seals = [sealed(digest, ratio) for digest in digests]
        if len(set(seals)) == 1:
            # A fill takes the number along: a GPU is not waited for.
            cards[:, 0] = seals[0]
        else:
            cards[:, 0] = tensors.on_device(np.array(seals, np.int64), tensors.device_of(like))
        cards[:, 1] = ratio
        for at, records in self._records():
            cards[at : at + records.shape[0], 2:] = records
        return cards

    def buffers(self, cards: Any) -> list[Buffer]:
        """The buffers that were received: their records come with the cards."""
        for plan, data in zip(self.plans, self.data, strict=True):
            data[: plan.static_offset] = _head(plan, tensors.device_of(data))
        for at, records in self._records():
            records[...] = cards[at : at + records.shape[0], 2:]
        return [
            Buffer.wrap(plan, data, assembled=True)
            for plan, data in zip(self.plans, self.data, strict=True)
        ]

    def _records(self) -> list[tuple[int, Any]]:
        """Of every buffer its first share and its records, int64, shape (chunks, 4)."""
        found, at = [], 0
        for plan, data in zip(self.plans, self.data, strict=True):
            start = plan.header.nbytes
            raw = data[start : start + RECORD.itemsize * plan.chunks]
            found.append((at, tensors.view(raw, _INT64).reshape(plan.chunks, -1)))
            at += plan.chunks
        return found


def sealed(digest: int, ratio: int) -> int:
    """The first word of a card, which covers the second."""
    word = (digest + ratio * _ODD) % 2**64
    return word - (word >> 63 << 64)


def sizes_on(cards: Any) -> list[int]:
    """Dynamic bytes by the cards, which are on the host. They may be anything."""
    sizes: list[int] = cards[:, _SIZE].tolist()
    return sizes


def pieces(shares: Shares, sizes: Sequence[int]) -> list[list[Any]]:
    """What travels of each share besides its static part: its dynamic bytes."""
    return [[share.slot[:size]] for share, size in zip(shares.shares, sizes, strict=True)]


def split(x: Any, plans: Sequence[Plan]) -> list[Any]:
    """`x` in consecutive parts of the plans' rows."""
    if len(plans) == 1:
        return [x]
    parts, at = [], 0
    for plan in plans:
        parts.append(x[at : at + plan.shape[0]])
        at += plan.shape[0]
    return parts


@functools.lru_cache(maxsize=256)
def _head(plan: Plan, device: Any) -> Any:
    """All before the static parts, in NumPy or on PyTorch's `device`; the records are zero.

    The chunks were encoded elsewhere, under any number.
    """
    header = replace(plan.header, required=plan.header.required | ASSEMBLED)
    head = np.zeros(plan.static_offset, np.uint8)
    head[: plan.header.nbytes] = np.frombuffer(header.pack(), np.uint8)
    return tensors.on_device(head, device)
