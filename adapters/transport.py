"""What the collectives need of a network: to move uint8 arrays between ranks.

Behind the protocol stand the steps that several transports share.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import numpy as np

from ..arrays import describe, library_of, on_gpu, writable_bits
from ..codecs.float_mode import default_floats

#: How `Transport.all_reduce` combines.
Op = Literal["sum", "max", "or"]

_REDUCE = {"sum": np.add, "max": np.maximum, "or": np.bitwise_or}


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
        """Combine `x`, of any shape, of all ranks in place: float32, float64, int32 or int64.

        The result is bit-identical on all ranks. "or" is bitwise, of integers only. Raises
        NotImplementedError if the network cannot combine so.
        """

    def reduce_scatter(self, out: Any, x: Any) -> None:
        """Fill `out`, shape (n,), with share `rank` of the sum of all ranks' `x`.

        `x` has shape (world_size * n,); both have one of the dtypes of `all_reduce`, and do not
        overlap. Terms are added in that dtype, in the network's own order. Raises
        NotImplementedError if the network has no sum, as here.
        """
        name = type(self).__name__
        raise NotImplementedError(f"{name} has no reduce_scatter")

    def barrier(self) -> None:
        """Return when all ranks have called it."""

    def close(self) -> None:
        """Let go of what the transport has made for itself, if anything; no call comes after."""
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


def all_reduce_by_gather(transport: Transport, x: Any, op: Op) -> None:
    """`Transport.all_reduce` on the host for networks that cannot add, in the order of ranks."""
    info = describe(x)
    values = writable_bits(x, info.dtype, info.shape, "x").view(info.dtype.numpy)
    gathered = np.empty((transport.world_size, values.size), values.dtype)
    transport.all_gather(gathered.reshape(-1).view(np.uint8), values.view(np.uint8))
    with default_floats():
        values[...] = functools.reduce(_REDUCE[op], gathered)
