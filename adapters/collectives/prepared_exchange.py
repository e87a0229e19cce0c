"""The exchanges of prepared calls: what they move, their messages, and memory of a call."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np

from ... import arrays
from ...buffer import Buffer
from ...formats.dtypes import BY_NAME, DType
from ...formats.errors import FormatError
from . import tensors
from .messages import Layout, Messages
from .recorded import Recording

if TYPE_CHECKING:
    from .prepared_work import Work

#: Where a share begins and ends, in elements.
Bounds: TypeAlias = tuple[int, int]

INT64 = BY_NAME["int64"]
#: Shares begin at multiples of this many elements.
_UNIT = 128


class Part(NamedTuple):
    """One tensor of a prepared call, which has one or a list.

    Attributes:
        dtype: Its dtype.
        nelem: Its number of elements.
    """

    dtype: DType
    nelem: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.nelem * self.dtype.itemsize


class Shares(NamedTuple):
    """What an exchange moves of one part.

    Attributes:
        counts: Elements by rank: of the messages to each if they are swapped, else of those that
            are received.
        dtype: What they travel as.
    """

    counts: list[int]
    dtype: DType


class Exchanged(NamedTuple):
    """What one exchange of a call moves.

    Attributes:
        kind: ``"gathered"``: each rank's message goes to all; ``"swapped"``: each rank has one for
            each; ``"spread"``: a root has as many as there are ranks, which all get.
        parts: What there is of each part.
        root: The root of messages that are spread.
        piece: Exchanges of one kind that run side by side have different ones, and memory of their
            own.
    """

    kind: Literal["gathered", "swapped", "spread"]
    parts: list[Shares]
    root: int = 0
    piece: int = 0


class Given(NamedTuple):
    """A tensor that is encoded, the number of its message, and which part it is of."""

    x: Any
    number: int
    part: int = 0


class Exchange:
    """One exchange of messages of a call, and what is read and written at each call.

    Attributes:
        what: What it moves.
        layouts: Of the messages to each rank if they are swapped, else of those that are received.
        messages: Their memory.
        buffers: Those that are received, message by message; None if one has no elements.
        needs: Words that say what buffers needed, and of which part each is.
        checks: The complements of these words, where messages begin with what they needed.
    """

    def __init__(
        self, what: Exchanged, layouts: list[Layout], messages: Messages, rank: int, ranks: int
    ) -> None:
        self.what, self.layouts, self.messages = what, layouts, messages
        if messages.cut is not None:
            messages.cut.layouts = layouts
        self._rank, self._ranks = rank, ranks
        own = [layouts[rank]] * ranks if what.kind == "swapped" else layouts
        self.buffers = [
            Buffer.wrap(plan, data[start:]) if plan.nelem else None
            for layout, data in zip(own, messages.received, strict=True)
            for plan, start in zip(layout.plans, layout.starts, strict=True)
        ]
        received = [tensors.view(m, INT64) for m in messages.received]
        parts, prefix = range(len(what.parts)), layouts[0].starts[0]
        self.checks: list[Any] = []
        self._tells: _Tells | None = None
        if prefix:
            self._tells = _Tells(messages.memory, layouts, rank)
            self.needs = [(part, _word(words, part)) for words in received for part in parts]
            self.checks = [_word(words, len(parts) + part) for words in received for part in parts]
        else:
            self.needs = [
                (part, _word(words, layout.record(part)))
                for words, layout in zip(received, own, strict=True)
                for part in parts
                if layout.plans[part].nelem
            ]

    def layout(self, number: int) -> Layout:
        """The layout of message `number` of this rank."""
        return self.layouts[self._rank if self.what.kind == "gathered" else number]

    def memory(self, number: int, part: int, message: Any = None) -> Any:
        """Where a part is encoded as message `number`, or in `message` if that is given."""
        layout = self.layout(number)
        start = layout.starts[part]
        whole = self.messages.sent[number] if message is None else message
        return whole[start : start + layout.plans[part].nbytes]

    def sender(self, number: int) -> int:
        """The rank that has sent the received buffer `number`."""
        spread = self.what.kind == "spread"
        return self.what.root if spread else number // len(self.what.parts)

    def sends(self, by_network: bool) -> int:
        """How many messages this rank sends, or others read of it."""
        others, is_root = self._ranks - 1, self._rank == self.what.root
        if self.what.kind != "spread":
            return others
        if not by_network:
            return self._ranks * others if is_root else 0
        # Every rank gives its share, which the root has sent it, to all.
        return 2 * others if is_root else others

    def tell_needs(self) -> None:
        """Tell every rank what the messages to all of them needed, if it is learnt."""
        if self._tells is not None:
            self._tells()


class NoMessages:
    """What is an ``Exchange`` to a slot of a call that one launch makes.

    Attributes:
        messages: No messages.
        buffers: None.
        needs: None.
        checks: None.
    """

    def __init__(self) -> None:
        self.messages = Messages([], [], _nothing)
        self.buffers: list[Any] = []
        self.needs: list[Any] = []
        self.checks: list[Any] = []

    def sender(self, number: int) -> int:
        """The rank that word `number` of a slot tells of."""
        return number


class Slot:
    """What one prepared collective has for its calls of one phase."""

    def __init__(self, phase: int) -> None:
        self.phase = phase
        #: Empty while it has no memory.
        self.exchanges: list[Any] = []
        #: By exchange and part, bytes of the largest dynamic part of a message.
        self.capacities: list[int] = []
        #: On a GPU what decoding found, what messages needed, who did not come.
        self.words: Any = None
        self.needs_at = self.late_at = 0
        self.scratch: Any = None
        self.work: Work | None = None
        #: Held while a work of it is judged: one slot has few locks, and many works.
        self.waiting = threading.RLock()
        #: A CUDA graph of the user's has it.
        self.captured = False
        #: Calls of certain memory.
        self.recordings: dict[Hashable, Recording] = {}
        #: What decoding has found on the host: the exchange, the sender, the error.
        self.found: list[tuple[int, int, FormatError]] = []
        #: By exchange and part, the most dynamic bytes that a message needed.
        self.needs: list[int] = []
        #: Words that say so, and their complements.
        self.need_words: list[Any] = []
        #: Whether what messages needed was damaged on the way.
        self.misled = False
        self.pending: tensors.PendingHostCopy | None = None

    @property
    def shares(self) -> bool:
        """Whether its messages have the memory that all calls share."""
        return all(exchange.messages.current for exchange in self.exchanges)

    def release(self) -> None:
        """Give up memory, if nothing that was queued needs it."""
        if not self.captured and (self.work is None or self.work.judged):
            self.exchanges = []
            self.need_words = []
            self.recordings.clear()

    def set_needs(self, said: Sequence[int]) -> None:
        """Keep the most of each exchange and part; `said` is what ``need_words`` say."""
        self.needs = []
        at = 0
        for exchange in self.exchanges:
            needs = said[at : at + len(exchange.needs)]
            at += len(needs)
            checks = said[at : at + len(exchange.checks)]
            at += len(checks)
            if any(need != ~check for need, check in zip(needs, checks, strict=False)):
                self.misled = True
            most = [0] * len(exchange.what.parts)
            for (part, _), need in zip(exchange.needs, needs, strict=True):
                most[part] = max(most[part], need)
            self.needs += most


def part_of(x: Any) -> Part:
    """What is prepared for an array."""
    info = arrays.describe(x)
    return Part(info.dtype, math.prod(info.shape))


def shares_of(x: Any, bounds: Sequence[Bounds]) -> list[Any]:
    """The elements of `x` from bound to bound."""
    return [x[start:stop] for start, stop in bounds]


def bounds_of(nelem: int, ranks: int, first: int = 0) -> list[Bounds]:
    """Where the shares of the ranks begin and end; only the last ones are shorter.

    `first` is where the first share begins.
    """
    each = -(-nelem // (ranks * _UNIT)) * _UNIT
    return list(itertools.pairwise(first + min(nelem, i * each) for i in range(ranks + 1)))


def equal_bounds(nelem: int, ranks: int) -> list[Bounds]:
    """Where the equal shares of the ranks begin and end; ValueError if there are none."""
    if nelem % ranks:
        raise ValueError(
            f"like has {nelem} elements; needed: a multiple of {ranks}, one share for each rank"
        )
    each = nelem // ranks
    return [(i * each, (i + 1) * each) for i in range(ranks)]


def lengths(bounds: Sequence[Bounds]) -> list[int]:
    """Elements from bound to bound."""
    return [stop - start for start, stop in bounds]


def need_apart(outs: Sequence[Any], xs: Sequence[Any], own: Sequence[Any] = ()) -> None:
    """Raise ValueError if results lie over inputs.

    Args:
        outs: The results, one for each input.
        xs: The inputs.
        own: Where each input may lie in its result.
    """
    for i, x in enumerate(xs):
        for j, out in enumerate(outs):
            if tensors.overlap(x, out):
                if not own:
                    raise ValueError("out overlaps x; needed: memory of its own")
                alike = i == j and own[i].nbytes == x.nbytes
                if not (alike and tensors.same_memory(own[i], x)):
                    raise ValueError(
                        "x lies in out, but not where its own values come; allowed: that, or other "
                        "memory"
                    )


def _nothing() -> None:
    """Nothing is exchanged."""


def _word(words: Any, at: int) -> Any:
    return words[at : at + 1]


class _Tells:
    """Writes at the start of each message what all of a rank's messages needed, by part.

    The complements follow, by which damage of these words is known: a rank that took other numbers
    than the others would make other calls than they do. The number of operations is the same for
    any number of ranks.
    """

    def __init__(self, memory: Any, layouts: Sequence[Layout], rank: int) -> None:
        self._words = tensors.view(memory, INT64)
        ranks, parts = len(layouts), len(layouts[0].plans)
        each = layouts[0].nbytes // INT64.itemsize
        self._told = self._words.reshape(ranks, each)[:, : 2 * parts].reshape(ranks, 2, parts)
        # A rank encodes nothing for itself. Where nobody gets anything, zero is told.
        sent = [
            [j for j in range(ranks) if j != rank and layouts[j].plans[part].nelem]
            for part in range(parts)
        ]
        records = [
            [to * each + layouts[to].record(part) for to in itertools.islice(ring, ranks)]
            for part, ring in enumerate(itertools.cycle(own or [rank]) for own in sent)
        ]
        device = tensors.device_of(memory)
        self._records = tensors.on_device(np.array(records, np.int64), device)
        self._mask = tensors.on_device(np.array([[0], [-1]], np.int64), device)
        used = np.array([bool(own) for own in sent], np.int64)
        self._used = None if used.all() else tensors.on_device(used, device)

    def __call__(self) -> None:
        found = self._words[self._records]
        if tensors.is_torch(found):
            import torch

            most = found.amax(1) if self._used is None else found.amax(1) * self._used
            torch.bitwise_xor(most, self._mask.expand_as(self._told), out=self._told)
        else:
            most = found.max(1) if self._used is None else found.max(1) * self._used
            np.bitwise_xor(most, self._mask, out=self._told)
