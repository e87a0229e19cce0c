"""What the collectives need of a network: to move uint8 arrays between ranks.

Several transports share the steps below the protocol.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import numpy as np

from ...arrays import describe, library_of, on_gpu, writable_bits
from ...codecs.common.float_mode import default_floats

#: How `Transport.all_reduce` combines.
Op = Literal["sum", "max", "or"]

#: Bytes that a rank passes on at a time.
_SEGMENT = 1 << 20

_REDUCE = {"sum": np.add, "max": np.maximum, "or": np.bitwise_or}


class Transport(Protocol):
    """A fixed group of ranks that move bytes: the interface of all transports.

    An array is uint8, shape ``(n,)``, contiguous, of a library and in memory that the transport
    supports. It may be a view into a larger one: nothing is staged. Every rank makes the same calls
    in the same order. A call returns when its outputs may be read and its inputs overwritten, on a
    GPU by work that is queued after it on the current stream.

    Every method raises RuntimeError or OSError (TimeoutError is one) if a peer is gone, does not
    respond within ``timeout``, or moves another number of bytes, as far as the network can tell.
    Outputs are then undefined, and so is every later call.

    Attributes:
        plain_dtypes: Dtypes of tensors that ``all_gather``, ``all_to_all``, ``all_reduce`` and
            ``reduce_scatter`` also take as they are, of any shape.
        capturable: Whether a CUDA graph can hold calls that only queue work, also if only some
            ranks capture them.

    Raises:
        RuntimeError: See above.
        OSError: See above.
    """

    plain_dtypes: frozenset[Any] = frozenset()
    capturable: bool = False

    @property
    def rank(self) -> int:
        """Number of this rank in the group, from 0."""

    @property
    def world_size(self) -> int:
        """Number of ranks, at least 1."""

    @property
    def timeout(self) -> float:
        """Seconds after which a call gives up waiting for a peer."""

    def presence(self) -> Any:
        """Have the other ranks know when this one leaves; all ranks call it.

        Returns:
            A ``Presence``; None where ranks cannot know.

        Raises:
            RuntimeError: If what the ranks have met by does not answer.
        """
        return None

    def abort(self, why: str) -> None:
        """Make no more calls, and have those of the other ranks fail at once and say why.

        Here they are told nothing, and fail within their timeout.

        Args:
            why: What errors of the other ranks say.
        """
        return

    def empty(self, nbytes: int) -> Any:
        """Allocate an array of the kind that this transport moves.

        Args:
            nbytes: Number of bytes.

        Returns:
            uint8, shape ``(nbytes,)``.
        """

    @property
    def pairs_gather(self) -> bool:
        """Whether two ranks swap large messages faster by an all-gather of both."""
        return False

    @property
    def gathers_in_place(self) -> bool:
        """Whether ``x`` of an all-gather may be this rank's share of ``out``."""
        return False

    def all_gather(self, out: Any, x: Any) -> None:
        """Gather the arrays of all ranks.

        Args:
            out: Shape ``(world_size * n,)``, filled with the arrays of rank 0, 1, ...; it does not
                overlap ``x``, or with ``gathers_in_place`` ``x`` is this rank's share of it.
            x: Shape ``(n,)``, of the same n on all ranks.

        Raises:
            RuntimeError: If the call fails.
            OSError: If the call fails.
        """

    def all_gather_apart(self, out: Any, x: Any) -> None:
        """As ``all_gather``; where it can, what a peer sends by another call is not taken for it.

        Here it cannot, and is an ``all_gather``.

        Args:
            out: As there.
            x: As there.

        Raises:
            RuntimeError: If the call fails.
            OSError: If the call fails.
        """
        self.all_gather(out, x)

    def all_to_all(self, out: Any, x: Any) -> None:
        """Send equal share j of ``x`` to rank j; share i of ``out`` comes from rank i.

        Args:
            out: Shape ``(world_size * n,)``; it does not overlap ``x``.
            x: Shape ``(world_size * n,)``, of the same n on all ranks.

        Raises:
            RuntimeError: If the call fails.
            OSError: If the call fails.
        """

    def all_to_all_v(self, outs: Sequence[Sequence[Any]], xs: Sequence[Sequence[Any]]) -> None:
        """Send several arrays to each rank, of sizes that both sides know.

        Piece k for rank j is as long here as piece k of ``outs[rank]`` there. Sizes may differ, and
        be 0.

        Args:
            outs: ``outs[i]`` are the arrays to fill from rank i; ``world_size`` entries.
            xs: ``xs[j]`` are the arrays to send to rank j; ``world_size`` entries.

        Raises:
            RuntimeError: If the call fails.
            OSError: If the call fails.
        """

    def send(self, x: Any, to: int) -> None:
        """Send an array to another rank, which calls ``recv`` with an array of that size.

        Args:
            x: The array.
            to: The other rank.

        Raises:
            RuntimeError: If the call fails.
            OSError: If the call fails.
        """

    def recv(self, out: Any, source: int) -> None:
        """Fill an array with what another rank sends.

        Args:
            out: The array.
            source: The other rank.

        Raises:
            RuntimeError: If the call fails.
            OSError: If the call fails.
        """

    def all_reduce(self, x: Any, op: Op = "sum") -> None:
        """Combine the arrays of all ranks in place; the result is bit-identical on all ranks.

        Args:
            x: float32, float64, int32 or int64, of any shape.
            op: ``"sum"``, ``"max"`` or ``"or"`` (bitwise, of integers).

        Raises:
            NotImplementedError: If the network cannot combine so.
            RuntimeError: If the call fails.
            OSError: If the call fails.
        """

    def reduce_scatter(self, out: Any, x: Any) -> None:
        """Fill ``out`` with this rank's share of the sum of all ranks' ``x``.

        Terms are added in their dtype, in the network's own order.

        Args:
            out: Shape ``(n,)``, of a dtype of ``all_reduce``; it does not overlap ``x``.
            x: Shape ``(world_size * n,)``, of the same dtype.

        Raises:
            NotImplementedError: If the network has no sum, as here.
            RuntimeError: If the call fails.
            OSError: If the call fails.
        """
        name = type(self).__name__
        raise NotImplementedError(f"{name} has no reduce_scatter")

    def broadcast(self, x: Any, root: int) -> None:
        """Fill ``x`` of every rank with that of one.

        Here in segments down a chain of ranks, or down a tree where that takes fewer steps: a rank
        passes a segment on while it receives the next.

        Args:
            x: Shape ``(n,)``, of the same n on all ranks.
            root: The rank whose array it is.

        Raises:
            RuntimeError: If the call fails.
            OSError: If the call fails.
        """
        broadcast_in_segments(self, x, root)

    def barrier(self) -> None:
        """Return when all ranks have called it.

        Raises:
            RuntimeError: If the call fails.
            OSError: If the call fails.
        """

    def close(self) -> None:
        """Free what the transport has made for itself. No call may follow."""
        return


def wait_until(done: Callable[[], bool], timeout: float) -> bool:
    """True as soon as `done()` is true, False if it is not for `timeout` seconds.

    Busy at first, then asleep for a thirtieth of the time that has passed, at most 1 ms.
    """
    start = time.monotonic()
    while not done():
        waited = time.monotonic() - start
        if waited > timeout:
            return False
        time.sleep(0 if waited < 1e-3 else min(1e-3, waited / 30))
    return True


def finish_queued_work(x: Any) -> None:
    """Wait for the current stream if `x` is on a GPU: networks know of no streams."""
    if on_gpu(x):
        library = library_of(x)
        cuda = sys.modules[library].cuda
        stream = cuda.current_stream(x.device) if library == "torch" else cuda.get_current_stream()
        stream.synchronize()


def shares(x: Any, world_size: int) -> list[list[Any]]:
    """The equal shares of `x`, shape (world_size * n,), each as the only array of a list."""
    n = x.shape[0] // world_size
    return [[x[i * n : (i + 1) * n]] for i in range(world_size)]


def broadcast_in_segments(transport: Transport, x: Any, root: int) -> None:
    """`Transport.broadcast` by `Transport.all_to_all_v`, which all ranks call equally often."""
    size, nbytes = transport.world_size, x.shape[0]
    count = -(-nbytes // _SEGMENT)
    ways = _ways(size, count)
    # Places in the tree, whose root has place 0. Those of a chain have one child each.
    place = (transport.rank - root) % size
    below = range(ways * place + 1, min(ways * (place + 1), size - 1) + 1)
    children = [(child + root) % size for child in below]
    parent = None if place == 0 else ((place - 1) // ways + root) % size
    depth = _depth(place, ways)
    if size == 1 or not count:
        return

    def piece(number: int) -> list[Any]:
        here = 0 <= number < count
        return [x[number * _SEGMENT : (number + 1) * _SEGMENT]] if here else []

    for step in range(count + _depth(size - 1, ways) - 1):
        received, sent = piece(step - depth + 1), piece(step - depth)
        transport.all_to_all_v(
            [received if rank == parent else [] for rank in range(size)],
            [sent if rank in children else [] for rank in range(size)],
        )


def _ways(size: int, count: int) -> int:
    """Children of a rank: 1, or 2 where `count` segments come to all ranks sooner.

    A rank with two sends each segment twice.
    """
    chain = count + size - 2
    tree = 2 * (count + _depth(size - 1, 2) - 1)
    return 1 if chain <= tree else 2


def _depth(place: int, ways: int) -> int:
    """How many times a segment is sent until a place has it."""
    depth = 0
    while place:
        place = (place - 1) // ways
        depth += 1
    return depth


def all_reduce_by_gather(transport: Transport, x: Any, op: Op) -> None:
    """`Transport.all_reduce` on the host for networks that cannot add, in the order of ranks."""
    info = describe(x)
    values = writable_bits(x, info.dtype, info.shape, "x").view(info.dtype.numpy)
    gathered = np.empty((transport.world_size, values.size), values.dtype)
    transport.all_gather(gathered.reshape(-1).view(np.uint8), values.view(np.uint8))
    with default_floats():
        values[...] = functools.reduce(_REDUCE[op], gathered)
