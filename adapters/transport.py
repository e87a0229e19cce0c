"""What the collectives need of a network: to move uint8 arrays between ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

#: How `Transport.all_reduce` combines.
Op = Literal["sum", "max", "or"]


class Transport(Protocol):
    """A fixed group of ranks that move bytes. Nothing here knows of codecs.

    An array is uint8, shape (n,), contiguous, of a library and in memory that the transport says it
    takes. It may be a view into a larger one: nothing is staged. Every rank makes the same calls in
    the same order. A call returns when its outputs may be read and its inputs overwritten, on a GPU
    by work that is queued behind it on the current stream.

    Every method raises RuntimeError or OSError (TimeoutError is one) if a peer is gone, does not
    come within `timeout`, or moves another number of bytes, as far as the network can tell. What
    outputs then hold is undefined, and so is every later call.
    """

    @property
    def rank(self) -> int:
        """This rank's number in the group, from 0."""

    @property
    def world_size(self) -> int:
        """Number of ranks, at least 1."""

    @property
    def timeout(self) -> float:
        """Seconds after which a call gives up waiting for a peer."""

    def empty(self, nbytes: int) -> Any:
        """A new array of shape (nbytes,), of the kind that this transport moves."""

    def all_gather(self, out: Any, x: Any) -> None:
        """Fill `out`, shape (world_size * n,), with `x`, shape (n,), of rank 0, 1, ...

        n is the same on all ranks. `out` and `x` do not overlap.
        """

    def all_to_all(self, out: Any, x: Any) -> None:
        """Send equal share j of `x` to rank j; share i of `out` comes from rank i.

        Both have shape (world_size * n,), n is the same on all ranks, and they do not overlap.
        """

    def all_to_all_v(self, outs: Sequence[Sequence[Any]], xs: Sequence[Sequence[Any]]) -> None:
        """Send the arrays `xs[j]` to rank j; rank i fills the arrays `outs[i]`.

        Both sides know every size: piece k for rank j is as long here as piece k of `outs[rank]`
        there. Sizes may differ, and be 0. `outs` and `xs` have world_size entries.
        """

    def send(self, x: Any, to: int) -> None:
        """Send `x` to another rank, which calls `recv` with an array of that size."""

    def recv(self, out: Any, source: int) -> None:
        """Fill `out` with what rank `source` sends."""

    def all_reduce(self, x: Any, op: Op = "sum") -> None:
        """Combine the small int64 or float64 array `x` of all ranks in place, any shape.

        The result is bit-identical on all ranks. "or" is bitwise, of int64 only.
        """

    def barrier(self) -> None:
        """Return when all ranks have called it."""
