"""Ways of rows to the ranks of their experts and back: at once, or through the ranks of nodes.

Of nodes a row goes to the rank of the sender's number in the other node first, encoded, and from
there to its expert's rank, as it is. A token that goes to several experts of a node goes there
once, with a number for each of its copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ...arrays import ArrayInfo, describe
from ..collectives import running
from ..collectives.agreement import agree
from ..collectives.calls import Call
from ..collectives.nodes import NodeCommunicator, Steps
from ..collectives.row_exchange import (
    ANOTHER_CALL,
    NAME,
    Counts,
    RowExchange,
    faults_told,
    other_calls,
)
from .hooks import Channel


class Order(NamedTuple):
    """A permutation of rows: row i is taken from `index[i]`, and `inverse` undoes it."""

    index: Any
    inverse: Any

    @classmethod
    def of(cls, index: Any) -> Order:
        """The permutation `index`, int64, shape (rows,)."""
        inverse = torch.empty_like(index)
        inverse[index] = torch.arange(index.shape[0], device=index.device)
        return cls(index, inverse)

    @classmethod
    def of_blocks(cls, places: Any, sizes: Any, rows: int) -> Order:
        """The permutation of `rows` rows in blocks of `sizes` that puts these in their `places`."""
        of_rows = torch.repeat_interleave(places, sizes, output_size=rows)
        return cls.of(of_rows.argsort(stable=True))


class Copies(NamedTuple):
    """Rows that are to go to several experts each.

    Attributes:
        choices: Numbers of experts, int64, shape (rows, top_k).
        order: Copies by expert; copy `row * top_k + which` is of that choice.
        counts: Copies for each expert, shape (experts,).
        strange: Whether there are numbers of no expert, shape (1,).
    """

    choices: Any
    order: Order
    counts: Any
    strange: Any

    @classmethod
    def of(cls, choices: Any, experts: int) -> Copies:
        """The copies for so many `experts`."""
        ranked, index = choices.reshape(-1).sort(stable=True)
        bounds = torch.searchsorted(ranked, torch.arange(experts + 1, device=choices.device))
        strange = (bounds[:1] != 0) | (bounds[-1:] != ranked.shape[0])
        return cls(choices, Order.of(index), bounds.diff(), strange)

    @property
    def rows(self) -> Any:
        """The row of each copy, by expert."""
        return self.order.index // self.choices.shape[1]


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


class Splits(NamedTuple):
    """How many rows go which way, known on the ranks that have exchanged their numbers.

    Attributes:
        sends: Rows for each rank.
        receives: Rows from each rank.
        arrival: Ranks in the order in which rows arrive.
        table: In this order rows for each expert of this rank: int64, shape (ranks, experts).
        on_device: The same on the device of the rows.
        grid: Nodes and the ranks of each, None without nodes.
        passing: What passes through this rank, None without nodes.
        local: Of the rows that arrive, those from each rank of this node; empty without nodes.
    """

    sends: list[int]
    receives: list[int]
    arrival: Sequence[int]
    table: Any
    on_device: Any
    grid: tuple[int, int] | None = None
    passing: Any = None
    local: Sequence[int] = ()


class Rows:
    """Exchanges of rows between ranks, each of which has as many experts.

    Args:
        channel: Where calls are made.
        experts: Those of all ranks.
        faults: As in `RowExchange`.

    Raises:
        CollectiveError: As `RowExchange`.
    """

    grid: tuple[int, int] | None = None

    def __init__(self, channel: Channel, experts: int, faults: Sequence[str]) -> None:
        self._channel = channel
        self._rows = RowExchange(channel.comm, experts, faults)
        self._places: dict[torch.device, Any] = {}

    def splits(self, x: Any, copies: Copies, fault: Any) -> Splits:
        """Tell all ranks the numbers of `copies` of rows like those of `x`, and what is wrong."""
        info = describe(x.detach())
        found = _made(self._channel, lambda: self._rows.counts(info, copies.counts, fault), fault)
        sends, receives = found.sent.sum(1).tolist(), found.table.sum(1).tolist()
        return Splits(sends, receives, range(len(sends)), found.table, found.on_device)

    def by_expert(self, splits: Splits) -> Order | None:
        """The order by expert, and of one by rank, of rows that arrive; None if they are in it."""
        ranks, each = splits.table.shape
        arrival = list(splits.arrival)
        if ranks == 1 or (each == 1 and arrival == sorted(arrival)):
            return None
        device = splits.on_device.device
        if device not in self._places:
            # Only once: a copy from the host would have it wait for the rows that are in flight.
            places = np.add.outer(arrival, np.arange(each) * ranks).reshape(-1)
            self._places[device] = torch.from_numpy(places).to(device)
        sizes, rows = splits.on_device.reshape(-1), int(splits.table.sum())
        return Order.of_blocks(self._places[device], sizes, rows)

    def spread(self, x: Any, copies: Copies, splits: Splits) -> Any:
        """Send the copies of rows of `x`; returns those that arrive."""
        return self.move(x.index_select(0, copies.rows), splits)

    def move(self, x: Any, splits: Splits, *, back: bool = False) -> Any:
        """Send copies, by expert; returns those that arrive. `back`: the other way."""
        leave, come = splits.sends, splits.receives
        if back:
            leave, come = come, leave
        out = x.new_empty((sum(come), *x.shape[1:]))
        self._channel.run(out, lambda: self._rows.move(x, out, leave, come)).wait()
        return out


class NodeRows(Rows):
    """The same of the ranks of nodes: what goes to another node crosses its NIC encoded."""

    def __init__(self, channel: Channel, experts: int, faults: Sequence[str]) -> None:
        comm: NodeCommunicator = channel.comm
        self._channel, self._comm, self._faults = channel, comm, faults
        self._places = {}
        call = Call(comm.rank, "RowExchange", 0, "", comm.name)
        with running.noted(call), call.stage("agree"):
            agree(call, comm.gather_plain, f"{experts} bins of rows")
        nodes, ranks = comm.between.world_size, comm.within.world_size
        self.grid = nodes, ranks
        self._each = experts // (nodes * ranks)
        # To a node also the number of distinct rows; within it for each node also its fault.
        self._far = RowExchange(comm.between, nodes * (1 + ranks * self._each), None)
        self._near = RowExchange(comm.within, ranks * nodes * (1 + self._each), None)

    def splits(self, x: Any, copies: Copies, fault: Any) -> Splits:
        """As `Rows.splits`."""
        info, device = describe(x.detach()), copies.counts.device
        nodes, ranks, each = *self._shape, self._each
        # Numbers of no expert are told of as a fault.
        node_of = (copies.choices // (ranks * each)).clamp(0, nodes - 1)
        all_nodes = torch.arange(nodes, device=device)
        goes = (node_of.unsqueeze(-1) == all_nodes).any(1)
        words = torch.cat([goes.sum(0).unsqueeze(1), copies.counts.view(nodes, -1)], 1)
        far, near = _made(
            self._channel, lambda: self._told(info, words.reshape(-1), fault), copies.counts
        )

        distinct_leaving, distinct_coming = far.sent[:, 0].tolist(), far.table[:, 0].tolist()
        upto = goes.T.reshape(-1).cumsum(0)
        wanted = torch.arange(1, sum(distinct_leaving) + 1, device=device)
        distinct = torch.searchsorted(upto, wanted) % max(goes.shape[0], 1)
        place = (goes.cumsum(0) - 1).view(-1)
        node_of_copy = node_of.view(-1).index_select(0, copies.order.index)
        places = place.index_select(0, copies.rows * nodes + node_of_copy).int()

        sent = far.sent[:, 1:].reshape(nodes, ranks, each)
        through = far.table[:, 1:].reshape(nodes, ranks, each)
        sizes = far.on_device[:, 1:].reshape(-1)
        blocks = torch.arange(sizes.shape[0], device=device).view(ranks, nodes, each)
        coming = through.sum((1, 2)).tolist()
        first_of_node = far.on_device[:, 0].cumsum(0) - far.on_device[:, 0]
        per_node = far.on_device[:, 1:].sum(1)
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
        )
        table = near.table.reshape(ranks, nodes, 1 + each)[:, :, 1:]
        return Splits(
            sends=sent.sum(2).reshape(-1).tolist(),
            receives=table.sum(2).T.reshape(-1).tolist(),
            arrival=np.arange(nodes * ranks).reshape(nodes, ranks).T.reshape(-1).tolist(),
            table=table.reshape(-1, each),
            on_device=near.on_device.reshape(ranks, nodes, 1 + each)[:, :, 1:].reshape(-1, each),
            grid=self.grid,
            passing=passing,
            local=table.sum((1, 2)).tolist(),
        )

    def spread(self, x: Any, copies: Copies, splits: Splits) -> Any:
        """As `Rows.spread`."""
        if copies.choices.shape[1] == 1:
            return super().spread(x, copies, splits)
        way: Passing = splits.passing
        rows = x.index_select(0, way.distinct)
        out = x.new_empty((sum(splits.receives), *x.shape[1:]))

        def call() -> None:
            with self._comm.call("all_to_all") as steps:
                steps.at(self._comm.between)
                places = way.places.new_empty(sum(way.coming))
                self._far.move(way.places, places, way.leaving, way.coming, plain=True)
                came = x.new_empty((sum(way.distinct_coming), *x.shape[1:]))
                self._far.move(rows, came, way.distinct_leaving, way.distinct_coming)
                # Nothing guards what goes as it is: damage must not read other memory.
                index = (places + way.first_row).clamp_(0, max(came.shape[0] - 1, 0))
                index = index.index_select(0, way.order.index)
                self._inward(steps, came.index_select(0, index), out, splits)

        self._channel.run(out, call).wait()
        return out

    def move(self, x: Any, splits: Splits, *, back: bool = False) -> Any:
        """As `Rows.move`."""
        way: Passing = splits.passing
        out = x.new_empty((sum(splits.sends if back else splits.receives), *x.shape[1:]))

        def forth() -> None:
            with self._comm.call("all_to_all") as steps:
                here = x.new_empty((sum(way.coming), *x.shape[1:]))
                steps.at(self._comm.between)
                self._far.move(x, here, way.leaving, way.coming)
                self._inward(steps, here.index_select(0, way.order.index), out, splits)

        def home() -> None:
            with self._comm.call("all_to_all") as steps:
                here = x.new_empty((sum(way.coming), *x.shape[1:]))
                steps.at(self._comm.within)
                self._near.move(x, here, splits.local, way.inward, plain=True)
                steps.at(self._comm.between, last=True)
                here = here.index_select(0, way.order.inverse)
                self._far.move(here, out, way.coming, way.leaving)

        self._channel.run(out, home if back else forth).wait()
        return out

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
            table = far.on_device[:, 1:].reshape(nodes, ranks, each).swapaxes(0, 1)
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


def rows_of(channel: Channel, experts: int, faults: Sequence[str]) -> Rows:
    """Exchanges of rows by the communicator of `channel`."""
    kind = NodeRows if isinstance(channel.comm, NodeCommunicator) else Rows
    return kind(channel, experts, faults)


def _made(channel: Channel, call: Any, like: Any) -> Any:
    """What `call()` returns, made on the stream of `channel`, behind what has made `like`."""
    found: list[Any] = []
    channel.run(like, lambda: found.append(call())).wait()
    return found[0]
