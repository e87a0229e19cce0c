"""Collectives of nodes: as they are within a node, compressed between nodes.

The ranks of M nodes of N ranks each are a grid. A `NodeCommunicator` is given a communicator for
each of its dimensions, and makes every collective of theirs, so that what a node has to say to
another one crosses its NIC once, encoded.
"""

from __future__ import annotations

import hashlib
import math
import operator
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import numpy as np

from ... import arrays
from ...codec import Codec
from ...codecs.common.base import Bytes
from ...formats.dtypes import DType
from ..errors import CollectiveError
from . import tensors
from .arguments import equal_splits, peer_of, rows_of, splits_of
from .auto_scale import Scaling
from .calls import Call, TraceRecord, newest
from .chunk_views import split
from .communicator import Communicator
from .node_steps import Levels, Steps, compared_splits, in_whole, record
from .point_to_point import exchange
from .session import Topology
from .sums import OPS, Op, divided, wire_dtype
from .tensors import as_input, as_output, as_result

#: Most calls of a level in a call of the whole.
_STEPS = 3


class NodeCommunicator:
    """Collectives of the ranks of several nodes, each with as many ranks.

    It has the methods of a ``Communicator`` and can be used in its place. With N ranks in each of M
    nodes, rank l of node m is rank ``m * N + l`` of the whole. All calls are made of calls of the
    two communicators:

    - ``all_gather``: between nodes, each rank with those of its number, then within.
    - ``all_to_all``: within a node, to the rank that has the receiver's number; then between.
    - ``reduce_scatter``: sums of a node, in float32 (float64 of float64), then sums of those.
    - ``all_reduce``: the same of a share for each rank of a node, then an all-gather within.
    - ``broadcast``: within the root's node, then each rank its share between, then within.
    - ``send`` and ``recv``: within a node, or between ranks of one number.

    So a node receives every byte from another node once: encoded once for all of its ranks, or, of
    a sum, added up before. What ``topology`` says is how sums are made between nodes.

    **Exactness.** All ranks get the same bits. Sums are made within nodes first, and between them
    then: where the network does not sum, in the order of ranks, and then of nodes. What travels
    between nodes has the dtype of the tensor (or ``wire``): of narrower floats than float32 the sum
    of a node is rounded to it, and the result once more; integers and float32 are not rounded in
    between. A lossy codec that takes no more bytes for float32 gets the sums of nodes in float32,
    so that only the result is rounded. Communicators within nodes that have a lossy codec encode
    the terms of sums by it, and send everything else as it is.

    **Failure.** What fails after anything was sent makes this rank refuse later calls, unless it
    was the last step and that communicator can be used on. Errors number ranks as the whole does,
    and name the level, and the node or number.

    Source: SDP4Bit (NeurIPS 2024), two-level gradient quantization, is a case of it, with 8 bits
    within and 4 bits between; DynamiQ, section 2.1, on sums between nodes.

    Args:
        within: A communicator of the ranks of this node, for this object alone. Usually it has
            ``algorithm="native"``.
        between: A communicator of the ranks with this rank's number in all nodes, in the same order
            of nodes for each number, for this object alone.

    Raises:
        CollectiveError: If the communicators do not make a grid, nodes have different numbers of
            ranks, or ranks of a node other codecs between nodes.
        TypeError: If an argument is not a ``Communicator``.

    Example:
        >>> import numpy as np
        >>> import tightwire as tw
        >>> from tightwire.adapters.transports.threads import run_grid
        >>> def task(within, between):
        ...     local = tw.Communicator(within, algorithm="native")
        ...     with tw.NodeCommunicator(local, tw.Communicator(between)) as comm:
        ...         return comm.all_reduce(np.full(4, comm.rank + 1, np.float32))
        >>> run_grid(2, 3, task)[0]
        array([21., 21., 21., 21.], dtype=float32)
    """

    def __init__(self, within: Communicator, between: Communicator) -> None:
        """Made by all ranks together, which compare their places."""
        for name, comm in (("within", within), ("between", between)):
            if not isinstance(comm, Communicator):
                raise TypeError(f"{name} is a {type(comm).__name__}; allowed: a Communicator")
        self.within = within
        self.between = between
        self._locals, self._nodes = within.world_size, between.world_size
        self._size = self._locals * self._nodes
        self._rank = between.rank * self._locals + within.rank
        self._levels = Levels(within, between)
        self._sequence = 0
        self._broken: str | None = None
        self._records: deque[TraceRecord] = deque(maxlen=between.session.records.maxlen)
        self._check_grid()
        # Groups of a level are not to draw the same numbers.
        inner, outer = within.session, between.session
        inner.seed = (inner.seed + (2 * outer.rank + 1 << 32)) % 2**64
        outer.seed = (outer.seed + (2 * inner.rank + 2 << 32)) % 2**64

    @property
    def rank(self) -> int:
        """Number of this rank among those of all nodes, from 0."""
        return self._rank

    @property
    def world_size(self) -> int:
        """Number of ranks of all nodes."""
        return self._size

    @property
    def name(self) -> str:
        """The name of the communicator between nodes."""
        return self.between.name

    @property
    def codec(self) -> Codec:
        """The codec between nodes."""
        return self.between.codec

    @property
    def scaling(self) -> Scaling | None:
        """That of the communicator between nodes."""
        return self.between.scaling

    @property
    def topology(self) -> Topology:
        """How sums are made between nodes that do not name a topology."""
        return self.between.topology

    def trace(self, last: int | None = None) -> list[TraceRecord]:
        """Records of the last calls, oldest first, with those that failed.

        ``raw_bytes`` and ``wire_bytes`` are those to other nodes. ``within.trace()`` and
        ``between.trace()`` have the steps.

        Args:
            last: Number of records. None: all that are remembered.
        """
        return newest(self._records, last)

    def check(self) -> None:
        """Raise what decoding on a GPU has found so far. Waits for the device.

        Raises:
            CollectiveError: If received data are damaged.
        """
        self.within.check()
        self.between.check()

    def refusal(self, collective: str, sequence: int | None = None) -> CollectiveError | None:
        """The error that later calls will raise.

        Args:
            collective: Name of the later call.
            sequence: Its number. None: the next one.

        Returns:
            The error, or None if the communicator can be used.
        """
        number = self._sequence if sequence is None else sequence
        if self._broken is not None:
            why = f"an earlier call has failed: {self._broken}"
            return CollectiveError(self._rank, collective, number, "start", why)
        for comm in (self.within, self.between):
            refusal = comm.refusal(collective, number)
            if refusal is not None:
                return self._error(refusal, collective, number, comm)
        return None

    def close(self) -> None:
        """Close both communicators. Closing again does nothing."""
        self.within.close()
        self.between.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """`close()`."""
        self.close()

    def slow_ranks(self, calls: int = 100) -> list[tuple[int, float]]:
        """Find which ranks the others wait for, as ``Communicator.slow_ranks`` does.

        Args:
            calls: How many of the last steps of each level to take into account.

        Returns:
            Pairs of a rank of the whole and the seconds that the others of its node and of its
            number waited for it, the slowest first.

        Raises:
            CollectiveError: If the exchange fails.
        """
        behind = sum(dict(c.slow_ranks(calls))[c.rank] for c in (self.within, self.between))
        waits = self.gather_plain(np.array([behind]).view(np.uint8)).view(np.float64)[:, 0]
        order = np.argsort(-waits, kind="stable")
        return [(int(rank), float(waits[rank])) for rank in order]

    def all_gather(self, x: Any, out: Any = None) -> Any:
        """Gather the tensors of all ranks along the first dimension.

        Args:
            x: As in ``Communicator.all_gather``.
            out: As there.

        Returns:
            As there.

        Raises:
            CollectiveError: If anything goes wrong after data were sent.
            TypeError: If ``x`` or ``out`` is not an array that the transport moves.
            ValueError: If ``out`` does not fit.
        """
        x, info, target = as_input(x)
        shape = (self._size * info.shape[0], *info.shape[1:]) if info.shape else (self._size,)
        into = as_output(out, info, shape, target)
        with self.call("all_gather") as steps:
            gathered = steps.at(self.between).all_gather(x.reshape(-1))
            whole = self._spread(steps, gathered)
        result = tensors.empty(shape, info.dtype, x) if into is None else into
        tensors.put(result.reshape(-1), whole)
        return as_result(result, info.dtype, target) if out is None else out

    def all_to_all(
        self,
        x: Any,
        out: Any = None,
        *,
        send_splits: Sequence[int] | None = None,
        receive_splits: Sequence[int] | None = None,
    ) -> Any:
        """Send share j of a tensor to rank j, and receive share i of the result from rank i.

        Args:
            x: As in ``Communicator.all_to_all``.
            out: As there.
            send_splits: As there, on all ranks or on none. All ranks exchange theirs first, and the
                host waits for them.
            receive_splits: As there. They are compared with what the others send.

        Returns:
            As there.

        Raises:
            CollectiveError: On all ranks, naming those whose splits differ; they can go on then.
                Also if anything goes wrong after data were sent.
            TypeError: If ``x`` or ``out`` is not an array that the transport moves.
            ValueError: If rows cannot be divided equally, splits do not add up, or ``out`` does not
                fit.
        """
        x, info, target = as_input(x)
        rows, row = rows_of(info)
        if (send_splits is None) != (receive_splits is None):
            raise ValueError("one of send_splits and receive_splits is given; needed: both or none")
        if send_splits is None or receive_splits is None:
            outward = inward = equal_splits(rows, self._size)
        else:
            outward = splits_of("send_splits", send_splits, self._size)
            inward = splits_of("receive_splits", receive_splits, self._size)
            if sum(outward) != rows:
                raise ValueError(f"send_splits add up to {sum(outward)}; x has {rows} rows")
        shape = (sum(inward), *row)
        into = as_output(out, info, shape, target)
        result = tensors.empty(shape, info.dtype, x) if into is None else into
        with self.call("all_to_all") as steps:
            if send_splits is None:
                there = _turned(x, self._nodes, self._locals)
                here = _turned(self._plain(steps, "all_to_all", there), self._locals, self._nodes)
                found = steps.at(self.between, last=True).all_to_all(here)
                if not self.codec.lossless:
                    # What stays in the node is as it was.
                    node = self.between.rank
                    kept = here.reshape(self._nodes, -1)[node]
                    tensors.put(found.reshape(self._nodes, -1)[node], kept)
            else:
                found = self._swap(steps, x.reshape(rows, *row), outward, inward)
        tensors.put(result.reshape(-1), found.reshape(-1))
        return as_result(result, info.dtype, target) if out is None else out

    def reduce_scatter(
        self,
        x: Any,
        out: Any = None,
        *,
        wire: str | None = None,
        decoded: Any = None,
        topology: Topology | None = None,
    ) -> Any:
        """Sum the tensors of all ranks, and keep this rank's share.

        Args:
            x: As in ``Communicator.reduce_scatter``.
            out: As there.
            wire: As there, within nodes and between them.
            decoded: As there. What a node loses of its sum counts for the rank that has encoded
                it: the difference to ``x`` is what this rank has to make good, of its own tensor
                and of its node's.
            topology: How sums of nodes are added.

        Returns:
            As there.

        Raises:
            CollectiveError: If anything goes wrong after data were sent.
            TypeError: If an array has a wrong type or dtype.
            ValueError: If rows cannot be divided equally, an array does not fit, or ``topology``,
                ``wire`` or ``decoded`` is not allowed with the codec.
        """
        by = self._topology(topology)
        x, info, target = as_input(x)
        wide = tensors.sum_dtype(info.dtype)
        rows, row = rows_of(info)
        shape = (equal_splits(rows, self._size)[0], *row)
        is_wide = out is not None and arrays.describe(out).dtype == wide
        into = as_output(out, info._replace(dtype=wide) if is_wide else info, shape, target)
        kept = as_output(decoded, info, info.shape, target, "decoded")
        if kept is not None and by != "two-shot":
            raise ValueError(f"decoded is given, topology is {by!r}; allowed: 'two-shot'")
        wire_dtype(wire, info.dtype, self._size)
        terms = _turned(x, self._nodes, self._locals)
        arrived: Any = None if kept is None else tensors.empty(terms.shape, info.dtype, x)
        total = tensors.empty((self._nodes * math.prod(shape),), wide, x)
        share = tensors.empty((math.prod(shape),), wide, x)
        sent = self._wire(wire, info.dtype, share.shape[0])
        told = None if kept is None else tensors.empty(total.shape, wide, x)
        with self.call("reduce_scatter") as steps:
            steps.at(self.within).reduce_scatter(terms, total, wire=wire, decoded=arrived)
            steps.at(self.between, last=True).reduce_scatter(
                total, share, wire=sent, decoded=told, topology=by
            )
        if kept is not None:
            # What the node has lost of its sums of these shares is this rank's.
            own = arrived.reshape(self._locals, -1)[self.within.rank]
            told = tensors.elementwise(operator.sub, total, told)
            tensors.put(own, tensors.elementwise(operator.sub, tensors.cast(own, wide), told))
            tensors.put(kept.reshape(-1), _turned(arrived, self._locals, self._nodes))
        if into is None:
            result = tensors.cast(share, info.dtype).reshape(shape)
            return as_result(result, info.dtype, target)
        tensors.put(into.reshape(-1), share)
        return out

    def all_reduce(
        self,
        x: Any,
        out: Any = None,
        *,
        wire: str | None = None,
        op: Op = "sum",
        topology: Topology | None = None,
    ) -> Any:
        """Sum the tensors of all ranks, of any shape; all ranks get the same bits.

        Args:
            x: As in ``Communicator.all_reduce``.
            out: As there.
            wire: As there, within nodes and between them.
            op: ``"sum"``, or ``"mean"`` for floats: the sum of a node is divided by its ranks
                before it travels.
            topology: How sums of nodes are added.

        Returns:
            As there.

        Raises:
            CollectiveError: If anything goes wrong after data were sent.
            TypeError: If an array has a wrong type, or its dtype has no mean.
            ValueError: If ``out`` does not fit, or ``op``, ``topology`` or ``wire`` is not allowed.
        """
        if op not in OPS:
            raise ValueError(f"op is {op!r}; allowed: {OPS}")
        by = self._topology(topology)
        x, info, target = as_input(x)
        wide = tensors.sum_dtype(info.dtype)
        if op == "mean" and not wide.is_float:
            raise TypeError(f"x is {info.dtype.name}; allowed for a mean: floats")
        into = as_output(out, info, info.shape, target)
        wire_dtype(wire, info.dtype, self._size)
        terms = self._padded(x)
        n, each = math.prod(info.shape), terms.shape[0] // self._locals
        total = tensors.empty((each,), wide, x)
        sent = self._wire(wire, info.dtype, -(-each // self._nodes))
        with self.call("all_reduce") as steps:
            steps.at(self.within).reduce_scatter(terms, total, wire=wire)
            total = divided(total, op, self._locals)
            steps.at(self.between).all_reduce(total, total, wire=sent, op=op, topology=by)
            whole = self._plain(steps, "all_gather", tensors.cast(total, info.dtype), last=True)
        result = tensors.empty(info.shape, info.dtype, x) if into is None else into
        tensors.put(result.reshape(-1), whole[:n])
        return as_result(result, info.dtype, target) if out is None else out

    def broadcast(self, x: Any, root: int = 0) -> Any:
        """Overwrite ``x`` on all ranks with that of one rank.

        Args:
            x: As in ``Communicator.broadcast``.
            root: The rank of the whole whose ``x`` is sent.

        Returns:
            ``x``.

        Raises:
            CollectiveError: If anything goes wrong after data were sent.
            TypeError: If ``x`` is not an array that the transport moves.
            ValueError: If ``x`` is read-only, or there is no such rank.
        """
        node, number = divmod(peer_of("root", root, self._size), self._locals)
        values, info, target = as_input(x)
        into = as_output(x, info, info.shape, target, "x").reshape(-1)
        data = self._padded(values, copy=True)
        mine = data.reshape(self._locals, -1)[self.within.rank]
        with self.call("broadcast") as steps:
            if self.between.rank == node:
                steps.at(self.within).broadcast(tensors.as_bytes(data), number)
            steps.at(self.between).broadcast(mine, node)
            whole = self._plain(steps, "all_gather", mine, last=True)
        tensors.put(into, whole[: into.shape[0]])
        return x

    def send(self, x: Any, to: int) -> None:
        """Send a tensor to another rank of this node, or to the one of this number in another.

        Args:
            x: As in ``Communicator.send``.
            to: Number of the other rank in the whole.

        Raises:
            CollectiveError: If anything goes wrong after data were sent.
            TypeError: If ``x`` is not an array that the transport moves.
            ValueError: If there is no such rank, or neither its node nor its number is this rank's.
        """
        comm, peer = self._peer("to", to)
        with self.call("send", message=True) as steps:
            steps.at(comm, last=True).send(x, peer)

    def recv(self, out: Any, source: int) -> Any:
        """Receive the tensor that another rank sends to this rank, as ``send`` says.

        Args:
            out: As in ``Communicator.recv``.
            source: Number of the other rank in the whole.

        Returns:
            ``out``.

        Raises:
            CollectiveError: If anything goes wrong, such as another shape or dtype.
            TypeError: If ``out`` is not an array that the transport moves.
            ValueError: As in ``send``, or if ``out`` is read-only.
        """
        comm, peer = self._peer("source", source)
        with self.call("recv", message=True) as steps:
            return steps.at(comm, last=True).recv(out, peer)

    def sendrecv(self, x: Any, to: int, out: Any, source: int) -> Any:
        """Send a tensor to one rank, and receive that of another, or of the same one.

        Args:
            x: The tensor to send.
            to: As in ``send``.
            out: As in ``recv``.
            source: As in ``recv``.

        Returns:
            ``out``.

        Raises:
            CollectiveError: If anything goes wrong after data were sent.
            TypeError: If ``x`` or ``out`` is not an array that the transport moves.
            ValueError: As in ``send``, or if ``out`` is read-only or may overlap ``x``.
        """
        self._peer("to", to)
        self._peer("source", source)
        return exchange(self, x, to, out, source)

    # For the hooks of this package: calls of their own, and sums and gathers within a node alone.

    def gather_plain(self, mine: Bytes) -> Bytes:
        """Gather a few bytes of all ranks, of the same number each, on the host.

        Args:
            mine: Bytes of this rank, shape ``(n,)``.

        Returns:
            Those of all ranks, shape ``(world_size, n)``.

        Raises:
            RuntimeError: If they were damaged, or the network fails.
        """
        column = self._levels.gathered(self.between, mine)
        table = self._levels.gathered(self.within, column.reshape(-1))
        shares = table.reshape(self._locals, self._nodes, mine.size)
        return np.ascontiguousarray(shares.swapaxes(0, 1)).reshape(self._size, mine.size)

    def sum_of_node(self, x: Any, total: Any) -> None:
        """Sum ``x`` over this node, and keep what ranks of this number own.

        Args:
            x: Shape ``(world_size * n,)``, a share for each rank of the whole.
            total: Filled with shape ``(nodes * n,)``, as wide as sums are made: a share for the
                rank of this number in each node.

        Raises:
            CollectiveError: If anything goes wrong after data were sent.
        """
        with self.call("sum_of_node") as steps:
            terms = _turned(x, self._nodes, self._locals)
            steps.at(self.within, last=True).reduce_scatter(terms, total)

    def spread_in_node(self, x: Any) -> Any:
        """Gather within this node what its ranks have of the ranks of their numbers.

        Args:
            x: Shape ``(nodes * n,)``, a share from the rank of this number in each node.

        Returns:
            Shape ``(world_size * n,)``, a share from each rank of the whole.

        Raises:
            CollectiveError: If anything goes wrong after data were sent.
        """
        with self.call("spread_in_node") as steps:
            return self._spread(steps, x)

    def _spread(self, steps: Steps, x: Any) -> Any:
        """`spread_in_node`, as the last step of a call."""
        whole = self._plain(steps, "all_gather", x, last=True)
        return _turned(whole, self._locals, self._nodes)

    def _plain(
        self, steps: Steps, collective: str, x: Any, *, last: bool = False, **splits: Any
    ) -> Any:
        """A collective of rows of `x` within the node, in which a lossy codec has no part."""
        method = getattr(steps.at(self.within, last=last), collective)
        if self.within.codec.lossless:
            return method(x, **splits)
        dtype, row = tensors.dtype_of(x), tuple(x.shape[1:])
        nbytes = math.prod(row) * dtype.itemsize
        found = method(tensors.as_bytes(x).reshape(x.shape[0], nbytes), **splits)
        return tensors.view(found, dtype).reshape(found.shape[0], *row)

    def _swap(self, steps: Steps, x: Any, outward: Sequence[int], inward: Sequence[int]) -> Any:
        """An all-to-all of unequal shares, rows of `x`."""
        nodes, ranks, me = self._nodes, self._locals, self.within.rank
        splits = np.array([outward, inward], np.int64).reshape(-1)
        mine = steps.at(self.between).all_gather(tensors.on_device(splits, tensors.device_of(x)))
        told = np.array(self._plain(steps, "all_gather", mine).tolist(), np.int64)
        sends = compared_splits(steps, told.reshape(ranks, nodes, 2, self._size))
        # What the ranks of this node send, by node and number of the receiver.
        first = self.between.rank * ranks
        table = sends[first : first + ranks].reshape(ranks, nodes, ranks)
        parts = split(x, outward)
        by_number = [parts[m * ranks + n] for n in range(ranks) for m in range(nodes)]
        here = table[:, :, me]
        received = self._plain(
            steps,
            "all_to_all",
            _joined(by_number, x),
            send_splits=table[me].sum(0).tolist(),
            receive_splits=here.sum(1).tolist(),
        )
        parts = split(received, here.reshape(-1).tolist())
        by_node = [parts[n * nodes + m] for m in range(nodes) for n in range(ranks)]
        sent = _joined(by_node, x)
        leaving = here.sum(0).tolist()
        coming = np.array(inward).reshape(nodes, ranks).sum(1).tolist()
        found = steps.at(self.between, last=True).all_to_all(
            sent, send_splits=leaving, receive_splits=coming
        )
        if not self.codec.lossless:
            node = self.between.rank
            tensors.put(split(found, coming)[node], split(sent, leaving)[node])
        return found

    def _padded(self, x: Any, *, copy: bool = False) -> Any:
        """`x` flat, with zeros behind it where it has no equal share for each rank of a node."""
        n = math.prod(x.shape)
        padding = -n % self._locals
        if not padding and not copy:
            return tensors.contiguous(x).reshape(-1)
        found = tensors.empty((n + padding,), tensors.dtype_of(x), x)
        tensors.put(found[:n], x.reshape(-1))
        tensors.fill(found[n:], 0)
        return found

    def _wire(self, wire: str | None, dtype: DType, nelem: int) -> str | None:
        """What sums of nodes travel as, `nelem` of them encoded together; None: as they are."""
        wide = tensors.sum_dtype(dtype)
        if wire is not None or wide == dtype:
            return wire
        plan = self.between.session.memory.plan
        if not self.codec.lossless and plan(wide, nelem).nbytes <= plan(dtype, nelem).nbytes:
            return None
        return dtype.name

    def _topology(self, topology: Topology | None) -> Topology:
        """The topology of sums between nodes, which their codec allows."""
        if topology is not None:
            self.between.check_topology(topology)
        return topology or self.topology

    def _peer(self, name: str, peer: int) -> tuple[Communicator, int]:
        """The communicator with another rank, and its number there."""
        peer = peer_of(name, peer, self._size, self._rank)
        node, number = divmod(peer, self._locals)
        if node == self.between.rank:
            return self.within, number
        if number == self.within.rank:
            return self.between, node
        here = f"rank {self._rank} is number {self.within.rank} of node {self.between.rank}"
        raise ValueError(
            f"{name} is {peer}, number {number} of node {node}; {here}; allowed: its node or number"
        )

    @contextmanager
    def call(self, collective: str, *, message: bool = False) -> Iterator[Steps]:
        """Number a call, keep its record, and remember a failure that leaves ranks out of step.

        Args:
            collective: Its name.
            message: Only two ranks take part.

        Yields:
            What the call says its steps to.

        Raises:
            CollectiveError: If an earlier failure has left ranks out of step.
        """
        sequence = self._sequence
        refusal = self.refusal(collective)
        if refusal is not None:
            raise refusal
        # Messages concern two ranks only, which count them.
        self._sequence += not message
        steps = Steps(self._rank, collective, sequence)
        levels = self.within, self.between
        counts = [comm.session.counts["group"] for comm in levels]
        error: str | None = None
        try:
            yield steps
        except BaseException as caught:
            told = caught
            if isinstance(caught, CollectiveError) and caught is not steps.error and steps.comm:
                told = self._error(caught, collective, sequence, steps.comm)
            error = str(told)
            refused = steps.taken < 2 and isinstance(caught, TypeError | ValueError)
            in_step = steps.last and steps.comm is not None and steps.comm.refusal("") is None
            if not (refused or in_step):
                self._broken = error
            if told is not caught:
                raise told from caught
            raise
        finally:
            near, far = (
                [r for r in comm.trace(last=_STEPS) if message or r.sequence >= count]
                for comm, count in zip(levels, counts, strict=True)
            )
            if message:
                near, far = (
                    found[-1:] * (steps.comm is comm)
                    for found, comm in zip((near, far), levels, strict=True)
                )
            self._records.append(record(collective, sequence, near, far, error))

    def _error(
        self, error: CollectiveError, collective: str, sequence: int, comm: Communicator
    ) -> CollectiveError:
        """`error` of a level, as one of the whole."""
        told = in_whole(error.detail, self._levels.numbers(comm))
        detail = f"{self._levels.name(comm)}: {error.collective} #{error.sequence}: {told}"
        return CollectiveError(self._rank, collective, sequence, error.stage, detail)

    def _check_grid(self) -> None:
        """Raise CollectiveError if the ranks of all nodes are not a grid.

        What one node sees the others are told, so that none of them waits for it.
        """
        inner, outer = self.within.session, self.between.session
        call = Call(self._rank, "NodeCommunicator", 0, "", self.name)
        codec = f"{outer.codec.spec!r}, {outer.topology}"
        digest = int.from_bytes(hashlib.blake2b(codec.encode(), digest_size=7).digest(), "little")
        problem = ""
        with call.stage("agree"):
            mine = np.array([outer.rank, outer.size, digest])
            rows = self._levels.words(self.within, mine)
            if (rows[:, :2] != mine[:2]).any():
                places = [tuple(row) for row in rows[:, :2].tolist()]
                problem = (
                    f"the ranks of this node have rank and world size {places} between nodes; "
                    "allowed: equal ones"
                )
            elif (rows != mine).any():
                others = np.flatnonzero(rows[:, 2] != digest).tolist()
                problem = f"numbers {others} of this node have another codec between nodes: {codec}"
            mine = np.array([inner.rank, inner.size, bool(problem)])
            rows = self._levels.words(self.between, mine)
            if (rows[:, :2] != mine[:2]).any():
                places = [tuple(row) for row in rows[:, :2].tolist()]
                problem = problem or (
                    f"the ranks of number {inner.rank} have rank and world size {places} in their "
                    "nodes; allowed: equal ones"
                )
            nodes = np.flatnonzero(rows[:, 2]).tolist()
            if nodes and not problem:
                problem = f"the ranks of nodes {nodes} do not fit: see their errors"
            known = self._levels.words(self.within, np.array([bool(problem)]))[:, 0]
        if known.any():
            others = np.flatnonzero(known).tolist()
            problem = problem or f"numbers {others} of this node do not fit: see their errors"
            detail = f"number {inner.rank} of {inner.size} in node {outer.rank} of {outer.size}: "
            raise call.failure("agree", detail + problem)


#: What hooks take.
AnyCommunicator = Communicator | NodeCommunicator


def _turned(x: Any, rows: int, columns: int) -> Any:
    """The shares of `x`, which lie row by row, column by column: flat, contiguous."""
    grid = x.reshape(rows, columns, math.prod(x.shape) // (rows * columns))
    return tensors.contiguous(grid.swapaxes(0, 1)).reshape(-1)


def _joined(parts: Sequence[Any], like: Any) -> Any:
    """Rows of all `parts`, like those of `like`, one behind the other."""
    rows = sum(part.shape[0] for part in parts)
    found = tensors.empty((rows, *like.shape[1:]), tensors.dtype_of(like), like)
    for into, part in zip(split(found, [part.shape[0] for part in parts]), parts, strict=True):
        tensors.put(into, part)
    return found
