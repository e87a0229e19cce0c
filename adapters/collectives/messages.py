"""Messages of prepared calls: buffers at fixed places, which ranks exchange or read where they lie.

A *route* moves them. ``NetworkRoute`` has the transport send one contiguous piece for each rank.
``PeerRoute`` moves nothing: each rank reads its peers' memory.

Over a network a message has a size that all ranks know beforehand (specs/buffer.md, fixed-rate
buffers). What the dynamic part needs is learnt from earlier messages: see ``Capacity``.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

from ...codecs.common.base import Plan
from ...formats.header import align
from ...prepared import peer_sum
from ..transports.base import Transport
from ..transports.peer import PeerMemory, Region
from . import tensors

#: Which memory a call takes, and which of its exchanges that run side by side.
Phase: TypeAlias = tuple[int, int]
#: Place of the dynamic bytes in a record, in units of eight bytes.
_DYNAMIC_NBYTES = 1
#: Of the first messages the dynamic part has this share of the tensor's bytes.
_FIRST_SHARE = 1 / 10
#: Messages after which a capacity may shrink for the first time, and the most for later times:
#: each time it takes twice as many, as new memory is recorded anew.
_PATIENCE, _MOST_PATIENCE = 16, 1 << 12
#: Memory is made in multiples of this, and of its size in so many bits less one.
_LEAST, _STEPS = 1 << 12, 3
#: Most bytes of a rank's memory for sums in one launch. Other sums share memory with each other.
_SUMS_NBYTES = 1 << 30
#: Spare capacity, as a share of what is needed: the least, and the most, for needs that vary.
_LEAST_SPARE, _MOST_SPARE = 1 / 32, 1 / 8
#: What may lie idle before a capacity shrinks, in shares that it has to spare.
_IDLE = 3


class _Range(NamedTuple):
    """What messages needed, at least and at most."""

    least: int
    most: int

    def __or__(self, other: _Range) -> _Range:
        return _Range(min(self.least, other.least), max(self.most, other.most))

    @property
    def spare(self) -> float:
        """What to have to spare: as much as the needs have been apart."""
        return min(max(1 - self.least / max(self.most, 1), _LEAST_SPARE), _MOST_SPARE)


class Capacity:
    """Bytes of the dynamic slot of messages of one call, from what earlier ones needed.

    Where needs vary there is more to spare. Equal needs, learnt in the same order, make equal
    capacities on all ranks.

    Args:
        bound: Bytes that are enough for any data.
        raw_nbytes: Bytes of a message's elements.
    """

    def __init__(self, bound: int, raw_nbytes: int) -> None:
        self._bound = bound
        #: Capacities are multiples of this, so that there are few plans.
        self._unit = align(max(1, bound // 512))
        self.nbytes = self._rounded(raw_nbytes * _FIRST_SHARE)
        #: What the last message needed.
        self._last = 0
        #: Least and most of the last messages, and of those before; how many the last ones are.
        self._range, self._earlier = _Range(bound, 0), _Range(0, 0)
        self._count, self._patience = 0, _PATIENCE

    def learn(self, need: int) -> None:
        """Note the most bytes that a message of one call needed.

        Args:
            need: Bytes; more than the capacity if the data did not fit.
        """
        # The next one may need as much more than this one as this one did than the last.
        rise, self._last = need - self._last, need
        self._range = last = self._range | _Range(need, need)
        self._count += 1
        expected = max(last.most * (1 + _LEAST_SPARE), need + min(rise, need * _MOST_SPARE))
        if self._rounded(expected) > self.nbytes:
            self.nbytes = self._renewed(last | self._earlier)
            self._forget()
        elif self._count >= self._patience:
            if self._rounded(last.most * (1 + last.spare)) * (1 + _IDLE * last.spare) < self.nbytes:
                self._patience = min(2 * self._patience, _MOST_PATIENCE)
                self.nbytes = self._renewed(last)
            self._forget()

    def refit(self) -> None:
        """Have as much to spare as a new capacity would have."""
        self.nbytes = max(self.nbytes, self._renewed(self._range | self._earlier))

    def _renewed(self, needs: _Range) -> int:
        # A new capacity costs new memory: it is one that holds for a while.
        return self._rounded(needs.most * (1 + 2 * needs.spare))

    def _forget(self) -> None:
        self._earlier, self._range, self._count = self._range, _Range(self._bound, 0), 0

    def _rounded(self, nbytes: float) -> int:
        return min(self._bound, max(1, math.ceil(nbytes / self._unit)) * self._unit)


class Layout(NamedTuple):
    """Where a message has what.

    Attributes:
        plans: Of its buffers, one for each part.
        starts: Where these begin.
        nbytes: Of the whole message, also if its buffers take less.
    """

    plans: tuple[Plan, ...]
    starts: tuple[int, ...]
    nbytes: int

    @classmethod
    def of(cls, plans: Sequence[Plan], prefix: int) -> Layout:
        """Buffers one behind the other, after so many bytes."""
        ends = list(itertools.accumulate((plan.nbytes for plan in plans), initial=prefix))
        return cls(tuple(plans), tuple(ends[:-1]), ends[-1])

    @property
    def certain_nbytes(self) -> int:
        """Bytes that are read whatever the data: everything except the dynamic parts."""
        return sum(plan.dynamic_offset for plan in self.plans)

    def record(self, part: int) -> int:
        """Where a buffer's record has its dynamic bytes, in units of eight bytes."""
        return (self.starts[part] + self.plans[part].header.nbytes) // 8 + _DYNAMIC_NBYTES


class Cut:
    """What an exchange has to know that sends no more than messages need.

    Attributes:
        layouts: Of the messages, as in ``Exchange``.
        moved: Bytes that the last exchange sent to others; None: as many as messages have.
    """

    def __init__(self) -> None:
        self.layouts: Sequence[Layout] = ()
        self.moved: int | None = None


class Messages:
    """Memory for the messages of one call.

    Attributes:
        sent: Messages of this rank: one, or one for each rank.
        received: The message of every rank for this one; of a root all that it has spread.
    """

    def __init__(
        self,
        sent: list[Any],
        received: list[Any],
        exchange: Callable[..., None],
        *,
        late: Any = None,
        memory: Any = None,
        moves: bool = False,
        blocks: Sequence[Block] = (),
    ) -> None:
        self.sent = sent
        #: The memory that the rows of ``sent`` are, where they lie side by side.
        self.memory = memory
        self.received = received
        #: A word on a GPU that says which rank did not come; see ``Region.late``.
        self.late = late
        #: Has ``received`` show what all ranks have sent; the outputs of earlier exchanges of
        #: the same messages must have been read.
        self.exchange = exchange
        #: What the memory is part of, where it may be replaced.
        self._blocks = blocks
        #: What exchanges that leave bytes out have to know; None: they leave none out.
        self.cut: Cut | None = None
        #: Whether ``exchange`` may be given other memory that has this rank's one message.
        self.moves = moves

    @property
    def current(self) -> bool:
        """Whether calls still share the memory; False when one has needed more."""
        return all(block.current for block in self._blocks)


class Route(Protocol):
    """How messages get from rank to rank."""

    @property
    def learns(self) -> bool:
        """Whether messages have the size that is needed, and not that of the worst data."""

    @property
    def by_network(self) -> bool:
        """Whether messages are sent, and not read where they lie."""

    @property
    def reads_sizes(self) -> bool:
        """Whether the host waits for what messages need, and sends no more."""

    @property
    def name(self) -> str:
        """For the trace."""

    def gathered(self, nbytes: int, like: Any, phase: Phase) -> Messages:
        """Memory for a message that every rank sends to all. All ranks call it alike.

        Calls of one `phase` share memory: each is queued to follow the one before, and there are at
        least two phases.
        """

    def swapped(self, nbytes: int, like: Any, phase: Phase) -> Messages:
        """Memory for a message from every rank to every rank; see ``gathered``."""

    def spread(self, nbytes: int, like: Any, phase: Phase, root: int) -> Messages:
        """Memory for messages of rank `root` to all, as many as ranks; see ``gathered``."""

    def peer_sum(self, plan: Plan, like: Any) -> Any:
        """What fills a tensor with the sum of all ranks' in one launch, see ``peer_sums_triton``.

        It gets its memory by ``begin_sum``. None: nothing does. It is the same on all ranks.
        """

    def begin_sum(self, found: Any) -> None:
        """Give what ``peer_sum`` has found its memory, once. All ranks call it alike."""

    def trim(self) -> None:
        """Have calls share as much memory as those need that are still made, if it can change."""


class Block:
    """Memory that calls share.

    Args:
        memory: The memory.
    """

    def __init__(self, memory: Any) -> None:
        self.memory = memory
        #: False when larger memory has taken its place.
        self.current = True


class NetworkRoute:
    """Messages that a transport moves, by one call for all of them."""

    learns = True
    by_network = True
    reads_sizes = False
    name = "network"

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        #: By device, phase and purpose, as large as the largest call needs it. Kept only while a
        #: prepared call uses it.
        self._blocks: weakref.WeakValueDictionary[Hashable, Block] = weakref.WeakValueDictionary()

    def gathered(self, nbytes: int, like: Any, phase: Phase) -> Messages:
        """See ``Route``."""
        rank, ranks = self._transport.rank, self._transport.world_size
        received, every = self._part(ranks * nbytes, like, phase, "gathered")
        rows, blocks = _rows(received, nbytes), [every]
        mine = rows[rank]
        if not self._transport.gathers_in_place:
            mine, own = self._part(nbytes, like, phase, "mine")
            blocks.append(own)

        def exchange(message: Any = mine) -> None:
            self._transport.all_gather(received, message)

        return Messages([mine], rows, exchange, moves=True, blocks=blocks)

    def swapped(self, nbytes: int, like: Any, phase: Phase) -> Messages:
        """See ``Route``."""
        me, ranks = self._transport.rank, self._transport.world_size
        sent, to = self._part(ranks * nbytes, like, phase, "to")
        mine = _rows(sent, nbytes)
        if ranks == 2 and self._transport.pairs_gather:
            both, of = self._part(2 * nbytes, like, phase, "both")

            def gather() -> None:
                self._transport.all_gather(both, mine[1 - me])

            return Messages(mine, _rows(both, nbytes), gather, memory=sent, blocks=(to, of))
        received, of = self._part((ranks - 1) * nbytes, like, phase, "from")
        others = iter(_rows(received, nbytes))
        # What a rank has for itself stays where it is.
        every = [mine[me] if i == me else next(others) for i in range(ranks)]
        xs, outs = ([[] if i == me else [r] for i, r in enumerate(rows)] for rows in (mine, every))

        def exchange() -> None:
            self._transport.all_to_all_v(outs, xs)

        return Messages(mine, every, exchange, memory=sent, blocks=(to, of))

    def spread(self, nbytes: int, like: Any, phase: Phase, root: int) -> Messages:
        """See ``Route``. Each rank gets one message from the root, and all gather them."""
        rank, ranks = self._transport.rank, self._transport.world_size
        sent, to = self._part(ranks * nbytes, like, phase, "to")
        received, of = self._part(ranks * nbytes, like, phase, "from")
        rows = _rows(sent, nbytes)
        # The root's own share needs no network.
        is_root = rank == root
        xs = [[row] if is_root and peer != root else [] for peer, row in enumerate(rows)]
        outs = [[rows[rank]] if peer == root and not is_root else [] for peer in range(ranks)]

        def exchange() -> None:
            self._transport.all_to_all_v(outs, xs)
            self._transport.all_gather(received, rows[rank])

        return Messages(rows, _rows(received, nbytes), exchange, blocks=(to, of))

    def peer_sum(self, plan: Plan, like: Any) -> Any:
        """See ``Route``."""
        return None

    def begin_sum(self, found: Any) -> None:
        """See ``Route``."""

    def trim(self) -> None:
        """See ``Route``."""
        for block in self._blocks.values():
            block.current = False
        self._blocks.clear()

    def _part(self, nbytes: int, like: Any, phase: Phase, purpose: str) -> tuple[Any, Block]:
        """So many bytes, and what they are part of."""
        block = self._block(nbytes, like, phase, purpose)
        return block.memory[:nbytes], block

    def _block(self, nbytes: int, like: Any, phase: Phase, purpose: str) -> Block:
        """What there is of at least so many bytes; calls that have less take it up later."""
        key = tensors.device_of(like), phase, purpose
        found = self._blocks.get(key)
        if found is None or found.memory.shape[0] < nbytes:
            if found is not None:
                found.current = False
            found = self._blocks[key] = Block(zeros(tensors.rounded(nbytes, _STEPS, _LEAST), like))
        return found


class PeerRoute:
    """Messages that lie where all ranks read them.

    A rank may write to messages again when all have come to the next barrier but one.
    """

    learns = False
    by_network = False
    reads_sizes = False
    name = "peer memory"

    def __init__(self, memory: PeerMemory) -> None:
        self._peers = memory
        #: By what shares them. Kept: ranks make them together, whatever each has dropped.
        self._regions: dict[Hashable, Region] = {}
        #: By what they sum. Each has memory of its own.
        self._sums: dict[Hashable, Any] = {}

    def gathered(self, nbytes: int, like: Any, phase: Phase) -> Messages:
        """See ``Route``."""
        region = self._region(nbytes, phase, "gathered")
        received = [part[:nbytes] for part in region.parts]
        mine = received[self._peers.rank]
        return Messages([mine], received, region.barrier, late=region.late())

    def swapped(self, nbytes: int, like: Any, phase: Phase) -> Messages:
        """See ``Route``."""
        rank, region = self._peers.rank, self._every(nbytes, phase)
        received = [part[rank * nbytes : (rank + 1) * nbytes] for part in region.parts]
        rows = self._sent(region, rank, nbytes)
        return Messages(rows, received, region.barrier, late=region.late())

    def spread(self, nbytes: int, like: Any, phase: Phase, root: int) -> Messages:
        """See ``Route``."""
        region = self._every(nbytes, phase)
        mine, received = (self._sent(region, r, nbytes) for r in (self._peers.rank, root))
        return Messages(mine, received, region.barrier, late=region.late())

    def peer_sum(self, plan: Plan, like: Any) -> Any:
        """See ``Route``."""
        if not (tensors.is_torch(like) and tensors.is_cuda(like)):
            return None
        key = plan.codec, plan.dtype.name, plan.nelem, plan.checksum, like.device
        found = self._sums.get(key)
        if found is None:
            found = peer_sum(plan, like, self._peers.world_size, self._peers.rank)
            taken = sum(known.nbytes for known in self._sums.values())
            if found is None or taken + found.nbytes > _SUMS_NBYTES:
                return None
            self._sums[key] = found
        return found

    def begin_sum(self, found: Any) -> None:
        """See ``Route``."""
        if not found.has_memory:
            region = self._regions["sum", id(found)] = self._peers.region(found.nbytes)
            found.begin(region.parts, region.late(), self._peers.timeout)

    def trim(self) -> None:
        """See ``Route``; ranks make and drop such memory together, so it stays."""

    def _every(self, nbytes: int, phase: Phase) -> Region:
        """Memory for messages to all ranks."""
        return self._region(self._peers.world_size * nbytes, phase, "to")

    def _region(self, nbytes: int, phase: Phase, purpose: str) -> Region:
        """What calls share that need about so many bytes."""
        key = tensors.rounded(nbytes, _STEPS, _LEAST), phase, purpose
        if key not in self._regions:
            self._regions[key] = self._peers.region(key[0])
        return self._regions[key]

    def _sent(self, region: Region, rank: int, nbytes: int) -> list[Any]:
        """The messages of a rank to all."""
        return _rows(region.parts[rank][: self._peers.world_size * nbytes], nbytes)


def zeros(nbytes: int, like: Any) -> Any:
    """Memory for messages: the bytes between their parts are sent, too.

    Args:
        nbytes: Bytes.
        like: An array of the library and device.
    """
    memory = tensors.empty_bytes(nbytes, like)
    memory[:] = 0
    return memory


def _rows(memory: Any, nbytes: int) -> list[Any]:
    return [memory[at : at + nbytes] for at in range(0, memory.shape[0], nbytes)]
