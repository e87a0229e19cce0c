"""Ways of rows to the ranks of their experts and back: at once, or through the ranks of nodes.

Of nodes a row goes to the rank of the sender's number in the other node first, encoded, and from
there to its expert's rank, as it is. A token that goes to several experts of a node goes there
once, with a number for each of its copies.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ...arrays import ArrayInfo, describe
from ...planning import device_many
from ..collectives import running, tensors
from ..collectives.agreement import agree
from ..collectives.calls import Call
from ..collectives.node_steps import Steps
from ..collectives.nodes import NodeCommunicator
from ..collectives.row_exchange import (
    ANOTHER_CALL,
    NAME,
    Counts,
    RowExchange,
    faults_told,
    other_calls,
)
from ..transports.peer import PeerMemory
from .hooks import Channel


class Order(NamedTuple):
    """A permutation of rows: row i is taken from `index[i]`, and `inverse` undoes it."""

    index: Any
    inverse: Any

    @classmethod
    def of_blocks(cls, places: Any, sizes: Any, rows: int) -> Order:
        """The permutation of `rows` rows in blocks of `sizes` that puts these in their `places`."""
        of_rows = torch.repeat_interleave(places, sizes, output_size=rows)
        index = of_rows.argsort(stable=True)
        inverse = torch.empty_like(index)
        inverse[index] = torch.arange(rows, device=index.device)
        return cls(index, inverse)


class Blocks(NamedTuple):
    """Blocks of rows, one behind the other, in two orders: as they arrive, and by expert.

    Attributes:
        sizes: Rows of each as they arrive.
        by_expert: Rows of each by expert.
        places: The place by expert of each as they arrive.
        own: Numbers of those that arrive from this rank itself.
    """

    sizes: list[int]
    by_expert: list[int]
    places: list[int]
    own: range

    def ordered(self, x: Any) -> Any:
        """`x`, rows as they arrive, by expert."""
        found = list(x.split_with_sizes(self.sizes))
        for place, piece in zip(self.places, tuple(found), strict=True):
            found[place] = piece
        return torch.cat(found)

    def undone(self, x: Any) -> Any:
        """`x`, rows by expert, as they arrive."""
        pieces = x.split_with_sizes(self.by_expert)
        return torch.cat([pieces[place] for place in self.places])

    def put(self, x: Any, by_expert: Any, *, own: bool, back: bool = False) -> None:
        """Copy `x`, rows as they arrive, to their places in `by_expert`; `back`: from there.

        These are the rows of this rank itself alone, or those of all others.
        """
        before, behind = range(self.own.start), range(self.own.stop, len(self.sizes))
        numbers = [*self.own] if own else [*before, *behind]
        places = by_expert.split_with_sizes(self.by_expert)
        pieces = x.split_with_sizes([self.sizes[k] for k in numbers])
        rows = [(p, places[self.places[k]]) for p, k in zip(pieces, numbers, strict=True)]
        rows = [pair for pair in rows if pair[0].shape[0]]
        if rows:
            source, to = zip(*rows, strict=True)
            torch._foreach_copy_(*((source, to) if back else (to, source)))


class Copies(NamedTuple):
    """Rows that are to go to several experts each.

    Attributes:
        choices: Numbers of experts, int64, shape (rows, top_k).
        index: Copies by expert, shape (rows * top_k,): copy `row * top_k + which` is of that
            choice.
        words: What ranks tell each other, int64, shape (2, experts + 3), of which the second row is
            free: how many copies are for experts before number 0, 1, and so on to `experts`, how
            many there are, and the sum of their weights, as float64, or what is finite if it is.
        of_rows: The row of each copy, by expert; None: not known yet.
        inverse: The place of each copy; None: not known yet.
    """

    choices: Any
    index: Any
    words: Any
    of_rows: Any = None
    inverse: Any = None

    @classmethod
    def of(cls, choices: Any, weights: Any, numbers: Any) -> Copies:
        """The copies for experts, of which `numbers` are -1 and so on, and the largest int64."""
        ranked, index = choices.reshape(-1).sort(stable=True)
        words = numbers.new_empty(2, numbers.shape[0] + 1)
        torch.searchsorted(ranked, numbers, right=True, out=words[0, :-1])
        weights = weights.detach()
        if weights.dtype == torch.float64:
            # Others cannot add up to infinity.
            weights = weights * 0
        torch.sum(weights, (0, 1), dtype=torch.float64, out=words.view(torch.float64)[0, -1])
        return cls(choices, index, words)

    @property
    def rows(self) -> Any:
        """The row of each copy, by expert."""
        if self.of_rows is not None:
            return self.of_rows
        top_k = self.choices.shape[1]
        return self.index if top_k == 1 else self.index // top_k

    @property
    def counts(self) -> Any:
        """Copies for each expert, shape (experts,)."""
        return self.words[0, :-2].diff()

    @property
    def fault(self) -> Any:
        """Bits of what is wrong, shape (1,), as `faults_of`."""
        words, last = self.words[0], self.words.shape[1] - 1
        begin, end, every, weight = (words[k : k + 1] for k in (0, last - 2, last - 1, last))
        strange = (begin != 0) | (end != every)
        infinite = ~torch.isfinite(weight.view(torch.float64))
        return strange.long() + 2 * infinite.long()


def faults_of(words: npt.NDArray[np.int64]) -> list[int]:
    """Bits of what is wrong with `Copies` of which `words` tell, shape (ranks, words)."""
    # Of a few ranks NumPy would take longer, and the network waits for this.
    begins, ends, copies = (words[:, k].tolist() for k in (0, -3, -2))
    weights = words[:, -1].view(np.float64).tolist()
    return [
        (begin != 0 or end != every) + 2 * (not math.isfinite(weight))
        for begin, end, every, weight in zip(begins, ends, copies, weights, strict=True)
    ]


def has_kernels(x: Any) -> bool:
    """Whether Triton's kernels run where `x` is."""
    return bool(x.is_cuda) and isinstance(device_many(), ModuleType)


def kernels_for(choices: Any, weights: Any, experts: int) -> Any:
    """The module of kernels that order such copies, or None."""
    if not has_kernels(choices):
        return None
    from ...codecs.common import order_triton

    return order_triton if order_triton.takes(choices, weights, experts) else None


class Passing(NamedTuple):
    """What passes through a rank of a node, between the others of its number and its own node.

    Attributes:
        leaving: Copies for each node.
        coming: Copies from each node.
        inward: Of those that have come, the copies for each rank of this node.
        order: The same by rank, of those by node.
        first_row: Of each copy that has come, by node, its node's first row: shape (copies,).
        distinct: Rows of this rank for each node, node by node: each row once for a node.
        places: The place of each copy, by expert, among these of its node, int32.
        distinct_leaving: Numbers of such rows for each node.
        distinct_coming: Numbers of such rows from each node.
        single: No rank of this number sends rows to several experts: copies travel as rows.
    """

    leaving: list[int]
    coming: list[int]
    inward: list[int]
    order: Order
    first_row: Any
    distinct: Any
    places: Any
    distinct_leaving: list[int]
    distinct_coming: list[int]
    single: bool


class Splits(NamedTuple):
    """How many rows go which way, known on the ranks that have exchanged their numbers.

    Attributes:
        sends: Rows for each rank.
        receives: Rows from each rank.
        table: Rows from each rank, in the order in which they arrive, for each expert of this
            rank: int64, shape (ranks, experts).
        grid: Nodes and the ranks of each, None without nodes.
        blocks: Those that arrive, None if they arrive by expert.
        pairs: Rows from each rank to each, shape (ranks, ranks); None with nodes.
        passing: What passes through this rank, None without nodes.
        local: Of the rows that arrive, those from each rank of this node; empty without nodes.
    """

    sends: list[int]
    receives: list[int]
    table: Any
    blocks: Blocks | None = None
    pairs: Any = None
    grid: tuple[int, int] | None = None
    passing: Any = None
    local: Sequence[int] = ()


class Rows:
    """Exchanges of rows between ranks, each of which has as many experts.

    Args:
        channel: Where calls are made.
        experts: Those of all ranks.
        faults: As in `RowExchange`.
        peers: As there.

    Raises:
        CollectiveError: As `RowExchange`.
    """

    grid: tuple[int, int] | None = None

    def __init__(
        self,
        channel: Channel,
        experts: int,
        faults: Sequence[str],
        peers: PeerMemory | None = None,
    ) -> None:
        self._channel = channel
        self._rows = RowExchange(channel.comm, experts, faults, peers)
        self._kept: dict[tuple[str, torch.device], Any] = {}
        self._rank, self._experts = channel.comm.rank, experts

    def copies(self, choices: Any, weights: Any) -> Copies:
        """The copies of rows that are to go to the experts `choices`, with these weights."""
        kernels = kernels_for(choices, weights, self._experts)
        if kernels is not None:
            with torch.cuda.device_of(choices):
                found = kernels.ordered(choices, weights.detach(), self._experts)
            return Copies(choices, found.index, found.words, found.rows, found.inverse)
        numbers = self._kept.get(("experts", choices.device))
        if numbers is None:
            host = np.arange(-1, self._experts + 1)
            host[-1] = np.iinfo(np.int64).max
            numbers = tensors.kept(tensors.on_device)(host, choices.device)
            self._kept["experts", choices.device] = numbers
        return Copies.of(choices, weights, numbers)

    def spread(self, x: Any, copies: Copies, know: Callable[[Splits], None]) -> tuple[Any, Splits]:
        """Send the copies of rows of `x`; returns those that arrive, by expert, and how many go.

        `know` is called with these numbers when rows are in flight.
        """
        info, stream = describe(x), tensors.current_stream(x)
        made: list[Any] = []
        found: list[Any] = []

        def gather() -> None:
            with tensors.on_stream(stream):
                made.append(x.index_select(0, copies.rows))

        def call() -> None:
            pairs, table = self._rows.routed(info, copies.words, faults_of, gather)
            self._channel.count()
            sends, receives = pairs[self._rank].tolist(), pairs[:, self._rank].tolist()
            blocks = _blocks(table, tuple(range(len(sends))), self._rank)
            splits = Splits(sends, receives, table, blocks, pairs)
            with tensors.on_stream(stream):
                moving, finish = self._laid(made[0], splits, False, lambda: know(splits), stream)
            tensors.follow(stream)
            moving()
            found.extend((finish, splits))

        # While the host changes streams the network is idle, so all of it changes once.
        self._channel.run_here(x, call)
        finish, splits = found
        return finish(), splits

    def inverse(self, copies: Copies) -> Any:
        """The place of each copy."""
        if copies.inverse is not None:
            return copies.inverse
        index = copies.index
        return torch.empty_like(index).scatter_(
            0, index, self.numbers(index.shape[0], index.device)
        )

    def numbers(self, count: int, device: torch.device) -> Any:
        """Numbers from 0 to `count` - 1, int64."""
        known = self._kept.get(("numbers", device))
        if known is None or known.shape[0] < count:
            most = 1 << max(count - 1, 1).bit_length()
            known = tensors.kept(torch.arange)(most, device=device)
            self._kept["numbers", device] = known
        return known[:count]

    def move(self, x: Any, splits: Splits, *, back: bool = False) -> Any:
        """Send copies, by expert; returns those that arrive, by expert. `back`: the other way."""
        moving, finish = self._laid(x, splits, back, None, tensors.current_stream(x))
        self._channel.run_here(x, moving)
        return finish()

    def _laid(
        self,
        x: Any,
        splits: Splits,
        back: bool,
        meanwhile: Callable[[], None] | None,
        stream: Any,
    ) -> tuple[Callable[[], None], Callable[[], Any]]:
        """What moves copies, on the stream of the channel, and what then returns those of `move`.

        `meanwhile` and `stream` are as `RowExchange.move` takes them.
        """
        leave, come, blocks = splits.sends, splits.receives, splits.blocks
        if back:
            leave, come = come, leave
        elsewhere = x.shape[1:]
        options: dict[str, Any] = {"meanwhile": meanwhile, "stream": stream}
        options["purpose"] = "back" if back else "there"
        options["pairs"] = splits.pairs.T if back else splits.pairs
        move = functools.partial(self._rows.move, **options)
        out = x.new_empty((sum(come), *elsewhere))
        if blocks is None or not self._rows.own_apart:
            finish: Callable[[], Any] = lambda: out  # noqa: E731
            if blocks is not None and back:
                x = blocks.undone(x)
            elif blocks is not None:
                finish = functools.partial(blocks.ordered, out)
            return functools.partial(move, x, out, leave, come), finish
        # What a rank has for itself is copied while the others' rows are in flight.
        rank, own_rows = self._rank, leave[self._rank]
        alone = [0 if i == rank else n for i, n in enumerate(splits.receives)]
        begin = sum(splits.sends[:rank])
        others = x.new_empty((sum(alone), *elsewhere))
        copies, by_expert = (out, x) if back else (x, out)
        own = copies[begin : begin + own_rows]
        move = functools.partial(
            move, own=functools.partial(blocks.put, own, by_expert, own=True, back=back)
        )
        if back:
            blocks.put(others, x, own=False, back=True)
            return functools.partial(move, others, out, alone, come), lambda: out

        def ordered() -> Any:
            blocks.put(others, out, own=False)
            return out

        return functools.partial(move, x, others, leave, alone), ordered


class NodeRows(Rows):
    """The same of the ranks of nodes: what goes to another node crosses its NIC encoded."""

    def __init__(self, channel: Channel, experts: int, faults: Sequence[str]) -> None:
        comm: NodeCommunicator = channel.comm
        self._channel, self._comm, self._faults = channel, comm, faults
        self._kept, self._rank, self._experts = {}, comm.rank, experts
        call = Call(comm.rank, "RowExchange", 0, "", comm.name)
        with running.noted(call), call.stage("agree"):
            agree(call, comm.gather_plain, f"{experts} bins of rows")
        nodes, ranks = comm.between.world_size, comm.within.world_size
        self.grid = nodes, ranks
        self._each = experts // (nodes * ranks)
        # To a node also whether rows go to several experts, and the number of distinct rows;
        # within it for each node also its fault.
        self._far = RowExchange(comm.between, nodes * (2 + ranks * self._each), None)
        self._near = RowExchange(comm.within, ranks * nodes * (1 + self._each), None)

    def _splits(self, x: Any, copies: Copies) -> Splits:
        """Tell all ranks of `copies` of rows like those of `x`."""
        info, device = describe(x), x.device
        nodes, ranks, each = *self._shape, self._each
        # Numbers of no expert are told of as a fault.
        node_of = (copies.choices // (ranks * each)).clamp(0, nodes - 1)
        all_nodes = torch.arange(nodes, device=device)
        goes = (node_of.unsqueeze(-1) == all_nodes).any(1)
        several = goes.new_full((nodes, 1), copies.choices.shape[1] > 1)
        words = torch.cat([several, goes.sum(0).unsqueeze(1), copies.counts.view(nodes, -1)], 1)
        fault = copies.fault
        far, near = _made(self._channel, lambda: self._told(info, words.reshape(-1), fault), x)

        distinct_leaving, distinct_coming = far.sent[:, 1].tolist(), far.table[:, 1].tolist()
        upto = goes.T.reshape(-1).cumsum(0)
        wanted = torch.arange(1, sum(distinct_leaving) + 1, device=device)
        distinct = torch.searchsorted(upto, wanted) % max(goes.shape[0], 1)
        place = (goes.cumsum(0) - 1).view(-1)
        node_of_copy = node_of.view(-1).index_select(0, copies.index)
        places = place.index_select(0, copies.rows * nodes + node_of_copy).int()

        sent = far.sent[:, 2:].reshape(nodes, ranks, each)
        through = far.table[:, 2:].reshape(nodes, ranks, each)
        sizes = far.on_device[:, 2:].reshape(-1)
        blocks = torch.arange(sizes.shape[0], device=device).view(ranks, nodes, each)
        coming = through.sum((1, 2)).tolist()
        first_of_node = far.on_device[:, 1].cumsum(0) - far.on_device[:, 1]
        per_node = far.on_device[:, 2:].sum(1)
        passing = Passing(
            leaving=sent.sum((1, 2)).tolist(),
            coming=coming,
            inward=through.sum((0, 2)).tolist(),
            order=Order.of_blocks(blocks.swapaxes(0, 1).reshape(-1), sizes, sum(coming)),
            first_row=torch.repeat_interleave(first_of_node, per_node, output_size=sum(coming)),
            distinct=distinct,
            places=places,
            distinct_leaving=distinct_leaving,
            distinct_coming=distinct_coming,
            single=not far.table[:, 0].any(),
        )
        table = near.table.reshape(ranks, nodes, 1 + each)[:, :, 1:]
        arrival = tuple(m * ranks + n for n in range(ranks) for m in range(nodes))
        by_rank = table.reshape(-1, each)
        return Splits(
            sends=sent.sum(2).reshape(-1).tolist(),
            receives=table.sum(2).T.reshape(-1).tolist(),
            table=by_rank,
            blocks=_blocks(by_rank, arrival, self._rank),
            grid=self.grid,
            passing=passing,
            local=table.sum((1, 2)).tolist(),
        )

    def spread(self, x: Any, copies: Copies, know: Callable[[Splits], None]) -> tuple[Any, Splits]:
        """As `Rows.spread`."""
        splits = self._splits(x, copies)
        know(splits)
        way: Passing = splits.passing
        if way.single:
            return self.move(x.index_select(0, copies.rows), splits), splits
        rows = x.index_select(0, way.distinct)
        out = x.new_empty((sum(splits.receives), *x.shape[1:]))

        def call() -> None:
            with self._comm.call("all_to_all") as steps:
                steps.at(self._comm.between)
                places = way.places.new_empty(sum(way.coming))
                self._far.move(way.places, places, way.leaving, way.coming, plain=True)
                came = x.new_empty((sum(way.distinct_coming), *x.shape[1:]))
                there = way.distinct_leaving, way.distinct_coming
                self._far.move(rows, came, *there, purpose="rows")
                # Nothing guards what goes as it is: damage must not read other memory.
                index = (places + way.first_row).clamp_(0, max(came.shape[0] - 1, 0))
                index = index.index_select(0, way.order.index)
                self._inward(steps, came.index_select(0, index), out, splits)

        self._channel.run_here(out, call)
        return (out if splits.blocks is None else splits.blocks.ordered(out)), splits

    def move(self, x: Any, splits: Splits, *, back: bool = False) -> Any:
        """As `Rows.move`."""
        way, blocks = splits.passing, splits.blocks
        x = blocks.undone(x) if back and blocks is not None else x
        out = x.new_empty((sum(splits.sends if back else splits.receives), *x.shape[1:]))

        def forth() -> None:
            with self._comm.call("all_to_all") as steps:
                here = x.new_empty((sum(way.coming), *x.shape[1:]))
                steps.at(self._comm.between)
                self._far.move(x, here, way.leaving, way.coming, purpose="there")
                self._inward(steps, here.index_select(0, way.order.index), out, splits)

        def home() -> None:
            with self._comm.call("all_to_all") as steps:
                here = x.new_empty((sum(way.coming), *x.shape[1:]))
                steps.at(self._comm.within)
                self._near.move(x, here, splits.local, way.inward, plain=True)
                steps.at(self._comm.between, last=True)
                here = here.index_select(0, way.order.inverse)
                self._far.move(here, out, way.coming, way.leaving, purpose="back")

        self._channel.run_here(out, home if back else forth)
        return out if back or blocks is None else blocks.ordered(out)

    def _inward(self, steps: Steps, x: Any, out: Any, splits: Splits) -> None:
        """Send copies that have come, by rank, to these ranks of this node."""
        steps.at(self._comm.within, last=True)
        self._near.move(x, out, splits.passing.inward, splits.local, plain=True)

    def _told(self, info: ArrayInfo, words: Any, fault: Any) -> tuple[Counts, Counts]:
        """What the other nodes tell this rank, and what its own ranks were told and tell it."""
        nodes, ranks, each = *self._shape, self._each
        with self._comm.call(NAME) as steps:
            steps.at(self._comm.between)
            far = self._far.counts(info, words, fault)
            table = far.on_device[:, 2:].reshape(nodes, ranks, each).swapaxes(0, 1)
            faults = torch.tensor(far.faults, device=table.device).view(1, nodes, 1)
            told = torch.cat([faults.expand(ranks, nodes, 1), table], 2)
            steps.at(self._comm.within, last=True)
            near = self._near.counts(info, told.reshape(-1), torch.zeros_like(fault))
            self._check(steps, near, info._replace(shape=info.shape[1:]))
        return far, near

    def _check(self, steps: Steps, near: Counts, row: ArrayInfo) -> None:
        """Raise what any rank has told of, on all ranks."""
        nodes, ranks = self._shape
        told = near.table.reshape(ranks, nodes, -1)[:, :, 0]
        found = {m * ranks + n: int(told[n, m]) for n in range(ranks) for m in range(nodes)}
        for number, fault in enumerate(near.faults):
            if fault == ANOTHER_CALL:
                # Nor is known what others have told it.
                found |= {m * ranks + number: 0 for m in range(nodes)}
                found[self._comm.between.rank * ranks + number] = ANOTHER_CALL
        if ANOTHER_CALL in found.values():
            steps.last = False
            raise steps.failure("counts", other_calls(found, self._comm.name, row))
        if any(found.values()):
            raise steps.failure("counts", faults_told(found, self._comm.name, self._faults))

    @property
    def _shape(self) -> tuple[int, int]:
        return self._comm.between.world_size, self._comm.within.world_size


def rows_of(
    channel: Channel, experts: int, faults: Sequence[str], peers: PeerMemory | None = None
) -> Rows:
    """Exchanges of rows by the communicator of `channel`; ValueError for `peers` with nodes."""
    if not isinstance(channel.comm, NodeCommunicator):
        return Rows(channel, experts, faults, peers)
    if peers is not None:
        raise ValueError("peers are given, the communicator is of nodes; allowed: one of them")
    return NodeRows(channel, experts, faults)


def _made(channel: Channel, call: Any, like: Any) -> Any:
    """What `call()` returns, made on the stream of `channel`, behind what has made `like`."""
    found: list[Any] = []
    channel.run_here(like, lambda: found.append(call()))
    return found[0]


def _blocks(table: npt.NDArray[np.int64], arrival: tuple[int, ...], rank: int) -> Blocks | None:
    """The blocks of rows for each expert from ranks in the order of their `arrival`."""
    ranks, each = table.shape
    if ranks == 1 or (each == 1 and all(a < b for a, b in itertools.pairwise(arrival))):
        return None
    places, own = _places(arrival, each, rank)
    sizes = table.reshape(-1).tolist()
    wanted = [0] * len(sizes)
    for place, size in zip(places, sizes, strict=True):
        wanted[place] = size
    return Blocks(sizes, wanted, places, own)


@functools.lru_cache(maxsize=64)
def _places(arrival: tuple[int, ...], each: int, rank: int) -> tuple[list[int], range]:
    """The places by expert of blocks as they arrive, and the numbers of this rank's own."""
    places = [k * len(arrival) + source for source in arrival for k in range(each)]
    first = arrival.index(rank) * each
    return places, range(first, first + each)
