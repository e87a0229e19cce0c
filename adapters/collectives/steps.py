"""The steps that algorithms are made of: chunks are swapped and gathered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ...buffer import Buffer
from ...formats.dtypes import DType
from . import tensors
from .calls import Call
from .chunk_views import DESCRIPTOR_NBYTES, ChunkViews, Share, pieces, sizes_on
from .coding import Coding
from .comparisons import Comparisons
from .digest_checks import DigestChecks
from .session import Session


class PendingExchange(NamedTuple):
    """Chunks whose descriptors and static parts were sent; their dynamic parts were not."""

    send: ChunkViews
    receive: ChunkViews
    #: None if there are no dynamic parts: then all is there.
    arriving: tensors.PendingHostCopy | None
    digests: Sequence[int]


class Steps:
    """A session with what encodes, compares and exchanges for it."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.memory = session.memory
        self.coding = Coding(session)
        self.comparisons = Comparisons(session)
        self.digest_checks = DigestChecks(session)
        self._transport = session.transport
        self._rank, self._size = session.rank, session.size

    def begin_swap(
        self,
        call: Call,
        send: ChunkViews,
        receive: ChunkViews,
        there: Sequence[int],
        here: Sequence[int],
    ) -> PendingExchange:
        """Send share j of `send` to rank j, without its dynamic part.

        Where no buffer has one, that is a single step in which nobody waits. `there`
        are the digests of the shares that go, `here` of those that come.
        """
        if self.session.fixed:
            send.write_descriptors(there, self._told(call, send))
            # Descriptors and static parts in one step.
            if call.nbytes:
                self.comparisons.compare_new(call, send.memory, there, here)
            with call.stage("exchange"):
                self._transport.all_to_all_v(receive.parcels, send.parcels)
            self.comparisons.compare_late(call, receive, here)
            return PendingExchange(send, receive, None, here)
        both = receive.paired(send)
        send.write_descriptors(there, self._told(call, send))
        digests = [*here, *there]
        arriving: tensors.PendingHostCopy | None = None
        if not self.session.sizes_first and call.nbytes:
            self.comparisons.compare_new(call, send.memory, there, here)
        for first in (self.session.sizes_first, not self.session.sizes_first):
            if first:
                with call.stage("sizes"):
                    self._transport.all_to_all(receive.descriptor_bytes, send.descriptor_bytes)
                    arriving = receive.arriving(both)
                    self.comparisons.compare_first(call, send.memory, arriving, digests)
                continue
            with call.stage("static"):
                if receive.statics is None or send.statics is None:
                    outs = [[share.static] for share in receive.shares]
                    self._transport.all_to_all_v(outs, [[share.static] for share in send.shares])
                else:
                    self._transport.all_to_all(receive.statics, send.statics)
        assert arriving is not None
        return PendingExchange(send, receive, arriving, digests)

    def end_swap(self, call: Call, began: PendingExchange) -> list[Buffer]:
        """The buffers of `began.receive`, filled."""
        send, receive, me = began.send, began.receive, self._rank
        if began.arriving is None:
            outgoing = [0] * self._size
        else:
            with call.stage("sizes"):
                descriptors = self.comparisons.compared(call, began.arriving, began.digests)
                incoming = self.sizes(call, descriptors[: self._size], receive)
                outgoing = sizes_on(descriptors[self._size :])
            with call.stage("dynamic"):
                self._transport.all_to_all_v(pieces(receive, incoming), pieces(send, outgoing))
        buffers = receive.buffers(self.memory.status_words(receive.memory))
        own = send.shares[me]
        raw = send.raw_nbytes - own.raw_nbytes
        wire = DESCRIPTOR_NBYTES * (self._size - 1) + send.static_nbytes - int(own.static.shape[0])
        self._account(call, send.plans[0].dtype, raw, wire + sum(outgoing) - outgoing[me])
        return buffers

    def begin_gather(
        self, call: Call, send: ChunkViews, digest: int, name: str, note: str = ""
    ) -> PendingExchange:
        """Gather the one share of `send`, without its dynamic part; `note` explains errors."""
        (plan,) = send.plans
        whole = self.memory.plan(plan.dtype, self._size * plan.nelem, self._size)
        receive = self.memory.receive(name, [whole], send.memory)
        send.write_descriptors([digest], self._told(call, send))
        digests = [digest] * self._size
        mine = send.descriptor_bytes, send.shares[0].static
        if self.session.fixed:
            # By the network's own all-gather: a rank's part leaves a node once.
            if call.nbytes:
                self.comparisons.compare_new(call, send.memory, digests, digests)
            with call.stage("exchange", note):
                self._transport.all_gather(receive.descriptor_bytes, mine[0])
                self._transport.all_gather(receive.statics, mine[1])
            self.comparisons.compare_late(call, receive, digests, note=note)
            return PendingExchange(send, receive, None, digests)
        arriving: tensors.PendingHostCopy | None = None
        if not self.session.sizes_first and call.nbytes:
            self.comparisons.compare_new(call, send.memory, digests, digests)
        for first in (self.session.sizes_first, not self.session.sizes_first):
            if first:
                with call.stage("sizes"):
                    self._transport.all_gather(receive.descriptor_bytes, mine[0])
                    arriving = receive.arriving(receive.descriptors)
                    self.comparisons.compare_first(call, send.memory, arriving, digests)
            else:
                with call.stage("static"):
                    self._transport.all_gather(receive.statics, mine[1])
        assert arriving is not None
        return PendingExchange(send, receive, arriving, digests)

    def end_gather(self, call: Call, began: PendingExchange) -> Buffer:
        """The whole buffer, filled."""
        own = began.send.shares[0]
        if began.arriving is None:
            sizes = [0] * self._size
            buffer = began.receive.buffers(self.memory.status_words(began.receive.memory))[0]
        else:
            with call.stage("sizes"):
                descriptors = self.comparisons.compared(call, began.arriving, began.digests)
                sizes = self.sizes(call, descriptors, began.receive)
            buffer = self.gather_dynamic(call, own, began.receive, sizes)
        others = self._size - 1
        wire = DESCRIPTOR_NBYTES + int(own.static.shape[0]) + sizes[self._rank]
        self._account(call, began.send.plans[0].dtype, others * own.raw_nbytes, others * wire)
        return buffer

    def gather_dynamic(
        self, call: Call, own: Share, whole: ChunkViews, sizes: Sequence[int]
    ) -> Buffer:
        """Send the dynamic part of `own` to all ranks; the whole buffer."""
        with call.stage("dynamic"):
            # They differ in size, so this is no all-gather.
            mine = own.slot[: sizes[self._rank]]
            self._transport.all_to_all_v(pieces(whole, sizes), [[mine]] * self._size)
            return whole.buffers(self.memory.status_words(whole.memory))[0]

    def sizes(
        self,
        call: Call,
        descriptors: Any,
        shares: ChunkViews,
        source: int | None = None,
    ) -> list[int]:
        """Dynamic bytes by the descriptors, which are on the host. Raises if they do not fit."""
        sizes = sizes_on(descriptors)
        for i, (size, share) in enumerate(zip(sizes, shares.shares, strict=True)):
            if not 0 <= size <= share.slot.shape[0]:
                sender, most = i if source is None else source, share.slot.shape[0]
                detail = f"rank {sender} claims {size} dynamic bytes, at most {most}"
                raise call.failure("sizes", detail)
        if source is None and call.nbytes:
            self.session.paths.learn(shares.plans[0].dtype, call.nbytes, descriptors[:, 1])
        if source is None and call.splits is not None:
            self.session.paths.learn_splits(call.splits[0], descriptors[:, 1])
        return sizes

    def scatter(
        self, call: Call, root: int, parts: Sequence[Sequence[Any]], into: Sequence[Any]
    ) -> None:
        """The arrays `parts[j]` of rank `root` fill the arrays `into` of every other rank j."""
        outs: list[Sequence[Any]] = [[] for _ in range(self._size)]
        xs = list(outs)
        if self._rank == root:
            xs = [part if peer != root else [] for peer, part in enumerate(parts)]
            call.wire_bytes += sum(piece.shape[0] for part in xs for piece in part)
        else:
            outs[root] = into
        self._transport.all_to_all_v(outs, xs)

    def _account(self, call: Call, dtype: DType, raw: int, wire: int) -> None:
        call.raw_bytes += raw
        call.wire_bytes += wire
        if raw and call.nbytes:
            self.session.paths.went(call.collective, dtype, call.nbytes, wire / raw)

    def _told(self, call: Call, send: ChunkViews) -> int:
        """What descriptors tell the other ranks: a ratio, or the bytes of an unequal input."""
        if call.splits is not None:
            return call.splits[1]
        dtype = send.plans[0].dtype
        return self.session.paths.ratio(call.collective, dtype, call.nbytes) if call.nbytes else 0
