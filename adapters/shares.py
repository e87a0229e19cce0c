"""The bytes of a collective: buffers whose chunks have one sender and one receiver each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..buffer import Buffer
from ..codecs.common.base import Plan
from ..formats.dtypes import BY_NAME
from ..formats.header import ASSEMBLED, RECORD
from . import tensors

_INT64 = BY_NAME["int64"]

#: Words of a chunk descriptor: digest of call and next word, the sender's ratio, the chunk's
#: result record.
CARD_WORDS = 2 + RECORD.itemsize // 8
CARD_NBYTES = 8 * CARD_WORDS
_ODD = 0x9E3779B97F4A7C15
_SIZE = 2 + RECORD.fields["dynamic_nbytes"][1] // 8  # type: ignore[index]
#: Bytes of text in a descriptor without a record: what the sender calls.
_TEXT_NBYTES = RECORD.itemsize


class Share(NamedTuple):
    """The chunk of one rank: uint8 views, `slot` for its dynamic part."""

    static: Any
    slot: Any
    raw_nbytes: int


class Shares:
    """The chunks of one or more consecutive buffers in `memory`.

    Made once for memory and its plans, used by many calls: on a GPU every view costs host time.
    """

    def __init__(self, plans: Sequence[Plan], memory: Any) -> None:
        self.plans = plans
        self.memory = memory
        self.data: list[Any] = []
        self.shares: list[Share] = []
        #: Of every buffer its first share, and its records, int64, shape (chunks, 4).
        self._records: list[tuple[int, Any]] = []
        at = 0
        for plan in plans:
            data = memory[at : at + plan.nbytes]
            at += plan.nbytes
            self.data.append(data)
            start = plan.header.nbytes
            raw = data[start : start + RECORD.itemsize * plan.chunks]
            records = tensors.view(raw, _INT64).reshape(plan.chunks, -1)
            self._records.append((len(self.shares), records))
            for i in range(plan.chunks):
                slot = plan.dynamic_offset + i * plan.dynamic_stride
                lo, hi = plan.chunk_range(i)
                share = Share(
                    data[plan.static_range(i)],
                    data[slot : slot + plan.dynamic_stride],
                    (hi - lo) * plan.dtype.itemsize,
                )
                self.shares.append(share)
        #: All static parts as one array, None if they do not lie side by side.
        self.statics: Any = None
        if len(plans) == 1:
            self.statics = self.data[0][plans[0].static_offset : plans[0].dynamic_offset]
        self.static_nbytes = sum(int(share.static.shape[0]) for share in self.shares)
        self.raw_nbytes = sum(share.raw_nbytes for share in self.shares)
        self._partner: tuple[Shares, Any] | None = None
        self._arriving: tensors.OnTheWay | None = None
        #: Memory on the host for cards that nobody waits for.
        self.spare: list[tensors.OnTheWay] = []
        self._buffers: list[Buffer] = []
        self._hold(tensors.empty((len(self.shares), CARD_WORDS), _INT64, memory))

    def _hold(self, cards: Any) -> None:
        #: Cards of these shares, int64, shape (shares, CARD_WORDS), and the same as bytes.
        self.cards = cards
        self.card_bytes = tensors.as_bytes(cards)
        self._seals, self._ratios = cards[:, 0], cards[:, 1]
        self._in_cards = [(cards[at : at + r.shape[0], 2:], r) for at, r in self._records]
        self._ratio: int | None = None
        self._parcels: list[list[Any]] = []

    @property
    @tensors.kept
    def parcels(self) -> list[list[Any]]:
        """Descriptor and static part of each share: all that travels without dynamic parts."""
        if not self._parcels:
            cards = self.card_bytes
            self._parcels = [
                [cards[i * CARD_NBYTES : (i + 1) * CARD_NBYTES], share.static]
                for i, share in enumerate(self.shares)
            ]
        return self._parcels

    @tensors.kept
    def paired(self, other: Shares) -> Any:
        """Descriptors of these shares and of `other` as one array, copied to the host at once."""
        pair = self._partner
        if pair is None or pair[0] is not other or other._partner is not pair:
            n = len(self.shares)
            both = tensors.empty((n + len(other.shares), CARD_WORDS), _INT64, self.memory)
            self._hold(both[:n])
            other._hold(both[n:])
            self._arriving = None
            pair = self._partner = other._partner = other, both
        return pair[1]

    def arriving(self, cards: Any) -> tensors.OnTheWay:
        """The pending copy of `cards` to the host; that of the call before is over."""
        self._arriving = tensors.OnTheWay(cards, self._arriving)
        return self._arriving

    @tensors.kept
    def arriving_late(self) -> tensors.OnTheWay:
        """A copy of `cards` to the host that may still be pending when the next call has begun."""
        return tensors.OnTheWay(self.cards, self.spare.pop() if self.spare else None)

    def write_cards(self, digests: Sequence[int], ratio: int) -> Any:
        """Fill `cards` for what has been encoded here, and return it."""
        seals = [sealed(digest, ratio) for digest in digests]
        if len(set(seals)) == 1:
            # A fill takes the number along: a GPU is not waited for.
            tensors.fill(self._seals, seals[0])
        else:
            host = np.array(seals, np.int64)
            tensors.put(self._seals, tensors.on_device(host, tensors.device_of(self.cards)))
        if self._ratio != ratio:
            tensors.fill(self._ratios, ratio)
            self._ratio = ratio
        for in_card, record in self._in_cards:
            tensors.put(in_card, record)
        return self.cards

    def write_headers(self) -> None:
        """Write the headers before chunks are received here: the memory held other data."""
        for plan, data in zip(self.plans, self.data, strict=True):
            data[: plan.static_offset] = _head(plan, tensors.device_of(data))

    @tensors.kept
    def buffers(self, words: Any) -> list[Buffer]:
        """The buffers that were received: their records are in the descriptors.

        What decoding on a GPU finds goes to `words`, int64, shape (buffers,) or longer.
        """
        for in_card, record in self._in_cards:
            tensors.put(record, in_card)
        if not self._buffers:
            self._buffers = [
                Buffer.wrap(plan, data, assembled=True)
                for plan, data in zip(self.plans, self.data, strict=True)
            ]
            for k, buffer in enumerate(self._buffers):
                if buffer._memory is not None:
                    buffer._memory.report_to(words[k : k + 1])
        return self._buffers


def sealed(digest: int, ratio: int) -> int:
    """The first word of a descriptor, which covers the second."""
    word = (digest + ratio * _ODD) % 2**64
    return word - (word >> 63 << 64)


def plain_descriptor(text: str) -> npt.NDArray[np.int64]:
    """A descriptor of what is not encoded, with `text`, no seal: int64, shape (1, CARD_WORDS)."""
    data = text.encode()[:_TEXT_NBYTES].ljust(_TEXT_NBYTES, b"\0")
    start = bytes(CARD_NBYTES - _TEXT_NBYTES)
    return np.frombuffer(bytearray(start + data), np.int64).reshape(1, CARD_WORDS)


def seal(descriptor: Any, digest: int, word: Any = None) -> None:
    """Write the first words of `descriptor`, shape (1, CARD_WORDS), int64: the seal covers `word`.

    `word`, shape (1,), is on the device of `descriptor`, and 0 if it is None. Nothing waits for it.
    """
    tensors.fill(descriptor[0, :1], sealed(digest, 0))
    if word is not None:
        tensors.put(descriptor[0, 1:2], word)
        with np.errstate(over="ignore"):
            descriptor[0, :1] += word * (_ODD - 2**64)


def text_on(descriptor: npt.NDArray[np.int64]) -> str:
    """The text of a descriptor, shape (CARD_WORDS,), which may be anything; "" if it has none."""
    data = descriptor.view(np.uint8)[CARD_NBYTES - _TEXT_NBYTES :].tobytes().rstrip(b"\0")
    text = data.decode("ascii", "replace")
    return text if text.split(" ")[0] in BY_NAME and text.isprintable() else ""


def sizes_on(cards: Any) -> list[int]:
    """Dynamic bytes by the descriptors, which are on the host. They may be anything."""
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


def _head(plan: Plan, device: Any) -> Any:
    """All before the static parts, in NumPy or on PyTorch's `device`; the records are zero.

    The chunks were encoded elsewhere, under any number.
    """
    header = replace(plan.header, required=plan.header.required | ASSEMBLED)
    head = np.zeros(plan.static_offset, np.uint8)
    head[: plan.header.nbytes] = np.frombuffer(header.pack(), np.uint8)
    return tensors.on_device(head, device)
