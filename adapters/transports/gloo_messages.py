"""Messages over gloo, one by one: no collective of a group takes those of another tag."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


def swap(
    group: Any, rank: int, outs: Sequence[Sequence[Any]], xs: Sequence[Sequence[Any]], tag: int
) -> list[Any]:
    """Begin to send arrays to each rank, and to receive theirs.

    Args:
        group: The gloo group.
        rank: Number of this rank, which copies what it has for itself.
        outs: By rank, the arrays to fill.
        xs: By rank, the arrays to send.
        tag: What tells these messages from others.

    Returns:
        The works to wait for.

    Raises:
        RuntimeError: If a peer is gone.
    """
    works = []
    for peer, (receives, sends) in enumerate(zip(outs, xs, strict=True)):
        if peer == rank:
            for out, x in zip(receives, sends, strict=True):
                tensor_of(out).copy_(tensor_of(x))
            continue
        for move, arrays in ((group.recv, receives), (group.send, sends)):
            works += [move([tensor_of(x)], peer, tag) for x in arrays if x.shape[0]]
    return works


def tensor_of(x: Any) -> Any:
    """An array as a tensor, of the same memory unless it cannot be written to.

    Args:
        x: An array of NumPy, or a tensor.

    Returns:
        The tensor.
    """
    if not isinstance(x, np.ndarray):
        return x
    # PyTorch warns about memory that it may not write to.
    return torch.from_numpy(x if x.flags.writeable else x.copy())
