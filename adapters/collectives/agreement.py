"""What all ranks must have in common before data move."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ... import arrays
from ...codecs.common.base import Bytes
from ..transports.base import Transport
from . import tensors
from .calls import Call

_CHECKSUM_NBYTES = 8


def gather_plain(
    transport: Transport, mine: Bytes, gather: Callable[[Any, Any], None] | None = None
) -> Bytes:
    """`mine` of all ranks, shape (world_size, mine.size), through the transport's arrays.

    A checksum goes with it; RuntimeError if one does not fit. `gather` is the transport's
    `all_gather`, or another of its methods.
    """
    ranks = transport.world_size
    sent = with_checksum(mine)
    x = transport.empty(sent.size)
    out = transport.empty(ranks * sent.size)
    x[:] = tensors.on_device(sent, tensors.device_of(x))
    (gather or transport.all_gather)(out, x)
    return opened(arrays.host_array(out).reshape(ranks, sent.size), range(ranks))


def gather_apart(transport: Transport, mine: Bytes) -> Bytes:
    """As `gather_plain`, where a rank may make another call of the same transport."""
    return gather_plain(transport, mine, transport.all_gather_apart)


def with_checksum(data: Bytes) -> Bytes:
    """`data`, of one dimension, with a checksum behind it."""
    return np.concatenate([data, _checksum(data)])


def opened(received: Bytes, ranks: Sequence[int]) -> Bytes:
    """The rows of `received` without their checksums; RuntimeError if one does not fit.

    `ranks` are those that have sent them.
    """
    found: Bytes = np.ascontiguousarray(received[:, :-_CHECKSUM_NBYTES])
    sums = received[:, -_CHECKSUM_NBYTES:]
    rows = zip(ranks, found, sums, strict=True)
    damaged = [rank for rank, row, checksum in rows if (_checksum(row) != checksum).any()]
    if damaged:
        raise RuntimeError(f"data from ranks {damaged} were damaged in transit")
    return found


def agree(call: Call, gather: Callable[[Bytes], Bytes], facts: str) -> None:
    """Raise CollectiveError, on all ranks, if they have other `facts`.

    `gather` is `gather_plain` of these ranks.
    """
    texts = gather_texts(gather, facts)
    groups = {text: [r for r, t in enumerate(texts) if t == text] for text in texts}
    if len(groups) > 1:
        found = "; ".join(f"ranks {ranks}: {text}" for text, ranks in groups.items())
        raise call.failure("agree", f"ranks differ: {found}")


def gather_texts(gather: Callable[[Bytes], Bytes], text: str) -> list[str]:
    """The texts of all ranks, without spaces at their ends; `gather` as in `agree`."""
    mine = text.encode()
    length = np.array([len(mine)], np.int64).view(np.uint8)
    longest = int(gather(length).view(np.int64).max())
    padded = np.frombuffer(bytearray(mine.ljust(longest)), np.uint8)
    return [row.tobytes().decode().rstrip() for row in gather(padded)]


def _checksum(data: Bytes) -> Bytes:
    return np.frombuffer(
        hashlib.blake2b(data.tobytes(), digest_size=_CHECKSUM_NBYTES).digest(), np.uint8
    )
