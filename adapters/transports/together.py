"""An exception on one rank fails the calls of all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from ..errors import described
from . import aborting
from .torch_dist import TorchDist, backend_of, store_of


@contextmanager
def fail_together() -> Iterator[None]:
    """Have an exception of the block reach the other ranks at once, and not after the timeout.

    What the block raises ends this rank's part in all collectives: its connections over gloo are
    closed, those of the process groups of ``torch.distributed`` and those that tightwire has made.
    Calls of the other ranks that wait for it then fail. Errors of tightwire's calls name the rank
    and what it raised; PyTorch's own get a note that does, if those ranks are in such a block too.
    The exception itself is raised on. A block that raises nothing costs nothing.

    Calls after that fail on this rank too, for good: end the process, or let it set up its groups
    anew. So do not put a block around errors that all ranks meet alike and go on from.

    Over NCCL and on MPI, UCX and threads nothing is closed. There ranks that wait for a prepared
    call on a GPU hear it within a tenth of a second; all others at the timeout.

    Raises:
        BaseException: What the block raises.

    Example:
        >>> import tightwire as tw
        >>> with tw.fail_together():
        ...     pass  # forward, loss.backward()
    """
    try:
        yield
    except BaseException as error:
        first = _abort_all(described(error))
        if first and first not in str(error):
            error.add_note(first)
        raise


def _abort_all(why: str) -> str:
    """Give up in all groups of this process. What another rank said that gave up before."""
    cpu = torch.device("cpu")
    groups = [
        (group, store_of(group), group.rank(), group.size())
        for group in dist.distributed_c10d._world.pg_map
        if cpu in group._device_types and backend_of(group, cpu).name() == "gloo"
    ]
    transports = list(TorchDist.open)
    said: list[str] = []

    def tell() -> None:
        for _, store, rank, _ in groups:
            said.append(aborting.tell(store, rank, why))
        for transport in transports:
            transport.tell(why)

    # Who hears of it by one group is not to say so first in another.
    aborting.patiently(tell)
    for transport in transports:
        transport.cut()
    for group, _, rank, size in groups:
        aborting.cut(group, rank, size)
    return next(filter(None, said), "")
