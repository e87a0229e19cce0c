"""Whether all ranks make the same call: descriptors tell it, and are compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ...arrays import ArrayInfo
from ...formats.dtypes import BY_NAME
from . import tensors
from .calls import Call, Late
from .chunk_views import (
    DESCRIPTOR_NBYTES,
    DESCRIPTOR_WORDS,
    ChunkViews,
    plain_descriptor,
    seal,
    sealed,
    text_on,
)
from .session import Session

_INT64 = BY_NAME["int64"]
_OTHER_CALL = "make another call, or one with another dtype or shape"
#: Shapes whose first call has been compared.
_MOST = 4096


class PendingDescriptors(NamedTuple):
    """Pending chunk descriptors, copied to the host, all from rank `source` if it is given."""

    arriving: tensors.PendingHostCopy
    digests: Sequence[int]
    source: int | None
    #: Takes `arriving` back when it is over.
    spare: list[tensors.PendingHostCopy]
    #: Explains an error.
    note: str = ""

    def settle(self, call: Call, timeout: float) -> None:
        """Raise if one is of another call."""
        compared(call, self.arriving, self.digests, timeout, self.source, self.note)
        self.spare.append(self.arriving)


def compared(
    call: Call,
    arriving: tensors.PendingHostCopy,
    digests: Sequence[int],
    timeout: float,
    source: int | None = None,
    note: str = "",
    stage: str = "sizes",
    what: str = _OTHER_CALL,
) -> Any:
    """Descriptors on the host, (shares, DESCRIPTOR_WORDS); raises if one is of another call.

    They are those of all ranks, or all from rank `source`. Of other things that ranks must agree on
    `what` says what those do that differ.
    """
    host = arriving.wait(timeout)
    seals, said = host[:, 0].tolist(), host[:, 1].tolist()
    strange = [i for i, digest in enumerate(digests) if seals[i] != sealed(digest, said[i])]
    if strange:
        told = {i if source is None else source: text_on(host[i]) for i in strange}
        parts = []
        if call.splits is not None and told.pop(call.rank, None) is not None:
            parts.append(f"rank {call.rank} sends itself another number of rows than it expects")
        if told:
            splits = "" if call.splits is None else ", or splits that do not fit"
            parts.append(f"ranks {list(told)} {what}{splits}{note}")
        if what == _OTHER_CALL:
            parts += [f"rank {rank}: {text}" for rank, text in told.items() if text]
            parts.append(f"here: {call.text}")
        detail = "; ".join(parts)
        raise call.failure(stage, detail)
    call.compared = True
    return host


class Comparisons:
    """Compares descriptors of a session's ranks, before data move or once they have."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._transport = session.transport
        self._rank, self._size = session.rank, session.size
        #: Descriptors of native calls by text and device.
        self._texts: dict[tuple[str, Any], Any] = {}
        #: Memory on the host for descriptors that come late.
        self.spare: list[tensors.PendingHostCopy] = []
        self._known: set[tuple[object, ...]] = set()

    def compare(
        self,
        call: Call,
        like: Any,
        there: Sequence[int],
        here: Sequence[int],
        stage: str = "sizes",
        what: str = _OTHER_CALL,
    ) -> None:
        """Raise if another rank makes another call: `there` are digests for them, `here` theirs.

        `stage` and `what` are those of `compared`.
        """
        like = tensors.empty((1,), _INT64, like)
        mine = tensors.empty((self._size, DESCRIPTOR_WORDS), _INT64, like)
        received = tensors.empty(mine.shape, _INT64, like)
        with call.stage(stage):
            said = 0 if call.splits is None else call.splits[1]
            alike = self.descriptor(call, there[0], like)
            if call.collective == "all_gather":
                # As its descriptors do: ranks that take other paths are to meet here.
                self._transport.all_gather(tensors.as_bytes(received), tensors.as_bytes(alike))
            else:
                tensors.put(mine, alike)
                words = [(sealed(digest, said), said) for digest in there]
                host = np.array(words, np.int64)
                tensors.put(mine[:, :2], tensors.on_device(host, tensors.device_of(like)))
                self._transport.all_to_all(tensors.as_bytes(received), tensors.as_bytes(mine))
            arrived = tensors.PendingHostCopy(received)
            host = self.compared(call, arrived, here, stage=stage, what=what)
            if call.splits is not None:
                self._session.paths.learn_splits(call.splits[0], host[:, 1])
        call.wire_bytes += DESCRIPTOR_NBYTES * (self._size - 1)

    def compare_new(self, call: Call, like: Any, there: Sequence[int], here: Sequence[int]) -> None:
        """Compare before a call moves data that has compared nothing yet.

        On the host that is every call: gloo ends a process that gets more bytes than it expects,
        and other networks leave what does not come as it was. On a GPU, which the host would wait
        for, it is the first call of a kind; all ranks know the shape, so that it is the first on
        each of them.
        """
        if not self._is_known(call, like):
            self.compare(call, like, there, here)
            self._know(call)

    def compare_first(
        self, call: Call, like: Any, arriving: tensors.PendingHostCopy, digests: Sequence[int]
    ) -> None:
        """As `compare_new`, by descriptors that were sent before data.

        What has arrived by chance does not count: a rank that raises must not leave the others with
        an exchange that it does not join.
        """
        if not self._is_known(call, like):
            self.compared(call, arriving, digests)
            self._know(call)

    def _is_known(self, call: Call, like: Any) -> bool:
        """Whether a call needs no comparison before its data move."""
        known = self._size == 1 or (tensors.is_cuda(like) and call.kind in self._known)
        return known or call.compared

    def _know(self, call: Call) -> None:
        if len(self._known) >= _MOST:
            self._known.clear()
        self._known.add(call.kind)

    def compare_shape(self, call: Call, like: Any, info: ArrayInfo, *more: int) -> None:
        """`compare_new` where all ranks have one shape, and one root if `more` says which."""
        digests = [call.digest(info, (*more, *info.shape))] * self._size
        self.compare_new(call, like, digests, digests)

    def compare_late(
        self,
        call: Call,
        shares: ChunkViews,
        digests: Sequence[int],
        source: int | None = None,
        note: str = "",
    ) -> None:
        """Have the descriptors compared: now if they are on the host, else with the call's verdict.

        For descriptors that have no other use. They are those of all ranks, or all from rank
        `source`.
        """
        with call.stage("sizes"):
            arriving = shares.arriving_late()
            late = PendingDescriptors(arriving, digests, source, shares.spare, note)
            self.check_late(call, late)

    def check_late(self, call: Call, late: Late) -> None:
        """Settle `late`: now if it is on the host, or has to be, else with the call's verdict.

        What a GPU has sent by chance already is settled then, too, as on the other ranks.
        """
        if self._session.verify or late.arriving.on_host:
            late.settle(call, self._transport.timeout)
        else:
            call.late.append(late)

    def descriptor(self, call: Call, digest: int, like: Any, word: Any = None) -> Any:
        """A descriptor that tells this call and `word`: int64, shape (1, DESCRIPTOR_WORDS)."""
        key = call.text, tensors.device_of(like)
        kept = self._texts.get(key)
        if kept is None:
            if len(self._texts) >= _MOST:
                self._texts.clear()
            kept = tensors.on_device(plain_descriptor(call.text), tensors.device_of(like))
            self._texts[key] = kept
        descriptor = tensors.copied(kept)
        seal(descriptor, digest, word)
        return descriptor

    def compared(
        self,
        call: Call,
        arriving: tensors.PendingHostCopy,
        digests: Sequence[int],
        source: int | None = None,
        stage: str = "sizes",
        what: str = _OTHER_CALL,
    ) -> Any:
        """As the function, within the timeout of the transport."""
        timeout = self._transport.timeout
        return compared(call, arriving, digests, timeout, source, stage=stage, what=what)
