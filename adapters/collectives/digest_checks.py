"""Digests of what travels without checksums, compared by ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...formats.dtypes import BY_NAME
from . import tensors
from .calls import Call
from .digests import content_digest, content_digests
from .session import Session

_INT64 = BY_NAME["int64"]


class _PendingDigests(NamedTuple):
    """Pending digests of all ranks, copied to the host, shape (ranks, n), and their check.

    `check` gives the ranks whose results are damaged.
    """

    arriving: tensors.PendingHostCopy
    check: Callable[[Any], list[int]]

    def settle(self, call: Call, timeout: float) -> None:
        """Raise if results are damaged."""
        with call.stage("digest"):
            found = self.check(self.arriving.wait(timeout))
        if found:
            raise call.failure("digest", f"ranks {found} got other bytes than were sent")


class DigestChecks:
    """Compares digests of a session's ranks, with ``verify="digest"``."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._transport = session.transport
        self._size = session.size

    def check_gathered(self, call: Call, x: Any, whole: Any) -> None:
        """Have all ranks raise if the shares of `whole` are not the `x` of all ranks."""
        if not self._session.digests:
            return
        with call.stage("digest"):
            own = content_digest(x)
            shares = content_digest(content_digests(whole, [math.prod(x.shape)] * self._size))

        def check(found: Any) -> list[int]:
            wanted = content_digest(np.ascontiguousarray(found[:, 0]))
            return _numbers(found[:, 1] != wanted)

        self.agree(call, [own, shares], check)

    def check_swapped(
        self, call: Call, x: Any, sends: Sequence[int], whole: Any, receives: Sequence[int]
    ) -> None:
        """Have all ranks raise if elements of `x` for a rank are not those of its `whole`."""
        if not self._session.digests:
            return
        with call.stage("digest"):
            mine, found = content_digests(x, sends), content_digests(whole, receives)
            told = tensors.empty((self._size,), _INT64, found)
            self._transport.all_to_all(tensors.as_bytes(told), tensors.as_bytes(mine))
            strange = (told != found).any().reshape(1)
        call.wire_bytes += 8 * (self._size - 1)
        self.agree(call, [strange], lambda found: _numbers(found[:, 0] != 0))

    def check_broadcast(self, call: Call, before: Any, x: Any, root: int) -> None:
        """Have all ranks raise if the `x` of one is not what it was `before` on rank `root`.

        `before` is a digest.
        """
        with call.stage("digest"):
            words = [before, content_digest(x)]

        def check(found: Any) -> list[int]:
            return _numbers(found[:, 1] != found[root, 0])

        self.agree(call, words, check)

    def agree(self, call: Call, words: Sequence[Any], check: Callable[[Any], list[int]]) -> None:
        """Gather `words`, int64, shape (1,) each, and raise for ranks that `check` finds in them.

        On a GPU the host does not wait for that: the error comes with the call's verdict.
        """
        mine = tensors.empty((len(words),), _INT64, words[0])
        for i, word in enumerate(words):
            tensors.put(mine[i : i + 1], word)
        everyone = tensors.empty((self._size * len(words),), _INT64, mine)
        with call.stage("digest"):
            self._transport.all_gather(tensors.as_bytes(everyone), tensors.as_bytes(mine))
        call.wire_bytes += 8 * len(words) * (self._size - 1)
        self.check_late(call, everyone.reshape(self._size, -1), check)

    def check_late(self, call: Call, words: Any, check: Callable[[Any], list[int]]) -> None:
        """Have `check` look at `words`: now if they are on the host, else with the call's verdict.

        On a GPU it is never now: all ranks are to come to the end of the call.
        """
        late = _PendingDigests(tensors.PendingHostCopy(words), check)
        if tensors.is_cuda(words) or not late.arriving.done():
            call.late.append(late)
        else:
            late.settle(call, self._transport.timeout)


def _numbers(marked: Any) -> list[int]:
    """Of the marked entries or rows."""
    return np.flatnonzero(marked).tolist()
