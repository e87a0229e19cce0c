"""What all ranks of a process group attempt together: it succeeds on all of them, or on none."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..errors import described
from .peer import PeerMemoryError
from .torch_groups import disagreement, store_of, timeout_of

_T = TypeVar("_T")


def attempt(group: Any, device: torch.device, call: Callable[[], _T]) -> _T:
    """What a call returns that all ranks make. They compare by the store how it went.

    Args:
        group: The process group.
        device: The device of this rank.
        call: Makes something of this rank. If it waits for the others, then no longer than the
            timeout of the store.

    Returns:
        What the call returns.

    Raises:
        PeerMemoryError: On all ranks, if the call raised on one, or a rank does not come within the
            timeouts of store and group. It says what was raised, and by which ranks.
    """
    given = dist.group.WORLD if group is None else group
    store, rank = store_of(given), given.rank()
    # The same on all ranks whatever else each of them has made: a rank counts its own.
    number = store.add(f"attempts/{rank}", 1) - 1
    made: list[_T] = []
    problem = ""
    try:
        made.append(call())
    except PeerMemoryError as error:
        problem = str(error)
    except Exception as error:
        problem = described(error)
    # The others may wait within the call for a rank that has failed there.
    patience = store.timeout + timedelta(seconds=timeout_of(given, device))
    own = dist.PrefixStore(f"attempt {number}", store)
    told = disagreement(own, rank, given.size(), problem or "no problem", patience)
    if told or problem:
        raise PeerMemoryError(told or problem)
    return made[0]
