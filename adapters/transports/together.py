"""An exception on one rank fails the calls of all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ..errors import described
from . import aborting
from .torch_dist import TorchDist
from .torch_groups import backend_of, failures_of


@contextmanager
def fail_together() -> Iterator[None]:
    """Have an exception of the block reach the other ranks at once, and not after the timeout.

    What the block raises ends this rank's part in all collectives: its connections over gloo are
    closed, those of the process groups of ``torch.distributed`` and those that tightwire has made.
    Calls of the other ranks that wait for it then fail. Errors of tightwire's calls name the rank
    and what it raised; PyTorch's own get a note that does, if those ranks are in such a block too.
    The exception itself is raised on; if telling the others fails, a note of it says what did.
    ``SystemExit`` without a code or with 0, and ``GeneratorExit``, end nothing: they are not taken
    for failures. The first block after a group is made asks its store once; others that raise
    nothing cost nothing.

    Put blocks on all ranks of a group or on none. Else a later group of the same name, by the same
    store, may hear the reason of this one.

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
    # What fails here fails once more, and is told, if the block raises.
    for group in _attempt([], _groups) or []:
        _attempt([], failures_of, group)
    try:
        yield
    except BaseException as error:
        if _is_failure(error):
            why = described(error)
            for note in _abort_all(why):
                if note not in why:
                    error.add_note(note)
        raise


def _is_failure(error: BaseException) -> bool:
    if isinstance(error, SystemExit):
        return error.code is not None and error.code != 0
    return not isinstance(error, GeneratorExit)


def _groups() -> list[Any]:
    """The gloo groups of this process."""
    cpu = torch.device("cpu")
    return [
        group
        for group in list(dist.distributed_c10d._world.pg_map)
        if cpu in group._device_types and backend_of(group, cpu).name() == "gloo"
    ]


def _abort_all(why: str) -> list[str]:
    """Give up in all groups of this process.

    Returns:
        What another rank said that gave up before, and what failed here, if anything.
    """
    problems: list[str] = []
    groups = _attempt(problems, _groups) or []
    transports = _attempt(problems, lambda: list(TorchDist.live)) or []
    said: list[str] = []

    def tell(group: Any) -> None:
        said.append(failures_of(group).tell(why))

    asks = [partial(tell, group) for group in groups]
    for transport in transports:
        asks += _attempt(problems, transport.tellings, why) or []
    # Who hears of it by one group is not to say so first in another.
    problems += _attempt(problems, aborting.patiently, *asks) or []
    for transport in transports:
        _attempt(problems, transport.cut)
    for group in groups:
        _attempt(problems, lambda g: aborting.cut(g, g.rank(), g.size()), group)
    notes = [text for text in said if text][:1]
    if problems:
        what = "; ".join(dict.fromkeys(problems))
        notes.append(f"fail_together: other ranks may wait until the timeout: {what}")
    return notes


def _attempt(problems: list[str], call: Callable[..., Any], *args: Any) -> Any:
    """What a call returns. If it raises, None, and `problems` says what."""
    try:
        return call(*args)
    except Exception as error:
        problems.append(described(error))
        return None
