"""Messages of rows: a buffer for each rank, sent as it lies in memory, in as few calls as can be.

Both sides know how many rows a message has, and so how long its buffer may be at most. A dynamic
part is sent up to a capacity that the two sides have learnt from their earlier messages, in the
call that sends the rest; what it needs is told before, and read by the host while bytes are in
flight. What exceeds the capacity follows in a call of its own, which other ranks have no part in.
So bits are always right, and no call of the network waits for the host, but the first of a kind.

Two ranks gather both messages if these are about as long, where the transport is faster so. No
message lies in place: behind it is what exceeds its capacity.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...arrays import ArrayInfo
from ...formats.dtypes import BY_NAME, DType
from ...formats.header import align
from . import tensors
from .calls import Call
from .message_views import MessageViews, alike, spare_of
from .steps import Steps

_INT64 = BY_NAME["int64"]
#: Of the first messages the dynamic part has this share of the elements' bytes.
_FIRST = 1 / 32
#: Messages that are remembered, and spare capacity as a share of the most that one needed.
_REMEMBERED, _SPARE = 16, 0.25
#: What is said of ranks whose digest is another.
OTHER_CALL = "make another call, or their data were damaged"
#: Bytes by which a rank is told what a message needs.
_TOLD = 2 * _INT64.itemsize


class Learnt:
    """What dynamic parts of the messages from a rank to another need, as both of them know it."""

    def __init__(self) -> None:
        self._shares: deque[float] = deque(maxlen=_REMEMBERED)
        self._most = _FIRST

    def capacity(self, bound: int, raw_nbytes: int) -> int:
        """Bytes for the dynamic part of a message of elements of so many, at most `bound`."""
        return min(bound, align(int(raw_nbytes * self._most)))

    def learn(self, need: int, raw_nbytes: int) -> None:
        """Note what a message has needed."""
        self._shares.append(need / raw_nbytes)
        self._most = max(self._shares) * (1 + _SPARE)


class Needs:
    """What messages need, as ranks tell each other: int64, shape (2, ranks, 2), and views of it.

    A need, and the same with the digest, by which damage and other calls are known.

    Args:
        ranks: How many there are.
        like: Any tensor on the device.
    """

    @tensors.kept
    def __init__(self, ranks: int, like: Any) -> None:
        #: What ranks have told this one, and what it tells them.
        self.both = tensors.empty((2, ranks, 2), _INT64, like)
        self._mine = self.both[1]
        self._flat = self._mine.view(-1)
        self.theirs, self.mine = tensors.as_bytes(self.both[0]), tensors.as_bytes(self._mine)
        self.on_host = not tensors.is_cuda(like)
        with_digest = np.array([0, 1], np.int64)
        self._mask = tensors.on_device(with_digest, tensors.device_of(like))
        self._mark: Any = None
        self._pending: tensors.PendingHostCopy | None = None

    def fill(self, send: MessageViews, digest: int) -> None:
        """Take this rank's from what is encoded."""
        import torch

        torch.index_select(send.words, 0, send.places, out=self._flat)
        self._mine.add_(self._mask, alpha=digest)

    def mark(self) -> None:
        """Note that all are told when what is queued now on the current stream is over."""
        import torch

        if self._mark is None:
            self._mark = torch.cuda.Event()
        self._mark.record()

    def arriving(self, stream: Any = None) -> tensors.PendingHostCopy:
        """A copy to the host on a stream, behind the last `mark`.

        None: on the current one, behind all that is queued there.
        """
        with tensors.on_stream(stream):
            if stream is not None:
                self._mark.wait()
            self._pending = tensors.PendingHostCopy(self.both, self._pending)
        return self._pending


class PendingDigests(NamedTuple):
    """Digests of messages, in flight to the host: see ``Late``."""

    arriving: tensors.PendingHostCopy
    senders: Sequence[int]
    digest: int
    #: Takes `arriving` back when it is over.
    spare: list[tensors.PendingHostCopy]

    def settle(self, call: Call, timeout: float) -> None:
        """Raise if one is of another call."""
        told = self.arriving.wait(timeout).tolist()
        strange = [i for i, word in zip(self.senders, told, strict=True) if word != self.digest]
        if strange:
            raise call.failure("sizes", f"ranks {strange} {OTHER_CALL}; here: {call.text}")
        self.spare.append(self.arriving)


class RowMessages:
    """Exchanges of parts of an array between ranks that know how many rows each of them has.

    Args:
        steps: Those of a session. Tensors are PyTorch's.
    """

    def __init__(self, steps: Steps) -> None:
        self._session, self._memory, self._coding = steps.session, steps.memory, steps.coding
        self._comparisons = steps.comparisons
        self._transport = steps.session.transport
        self._rank, self._size = steps.session.rank, steps.session.size
        pair = self._size == 2 and self._transport.pairs_gather
        #: The other rank, where a gather moves what is alike.
        self._peer = 1 - self._rank if pair else None
        #: By purpose, dtype and rank, of messages to it and from it.
        self._learnt: dict[tuple[str, DType, int, bool], Learnt] = {}
        #: Purposes, dtypes and shapes of rows of which there have been messages.
        self._known: set[tuple[str, DType, tuple[int, ...]]] = set()
        self._needs: dict[Any, Needs] = {}
        self._spare: list[tensors.PendingHostCopy] = []

    def exchange(
        self,
        call: Call,
        parts: Sequence[Any],
        outs: Sequence[Any],
        info: ArrayInfo,
        purpose: str,
        meanwhile: Callable[[], None],
        stream: Any = None,
    ) -> None:
        """Send `parts[j]`, 1-D, to rank j, and fill `outs[i]` with what rank i sends.

        Those of this rank itself are empty. `purpose` is what messages are alike in that need as
        much, `meanwhile` is called when they are in flight. On `stream` runs what does not wait for
        them; None: the current one.
        """
        prefix = self._session.fixed
        send = self._views("send", parts, info.dtype, prefix)
        receive = self._views("receive", outs, info.dtype, prefix)
        self._coding.encode_to(call, parts, send.plans, send.data)
        digest = call.digest(info, info.shape[1:]) >> 1
        if prefix:
            self._exchange_fixed(call, send, receive, digest, meanwhile)
        else:
            row = info.shape[1:]
            self._exchange_learnt(call, send, receive, digest, purpose, row, meanwhile, stream)
        call.raw_bytes += sum(send.raw)
        call.exchanged = True
        self._coding.decode_many(
            call, receive.buffers(self._memory.status_words(receive.memory)), outs
        )

    def _views(self, name: str, parts: Sequence[Any], dtype: DType, prefix: bool) -> MessageViews:
        plans = [self._memory.plan(dtype, part.shape[0]) for part in parts]
        spare = 0, 0
        if self._peer is not None:
            source = self._peer if name == "receive" else None
            spare = spare_of(plans[self._peer], prefix, source)
        return self._memory.messages(name, plans, parts[0], prefix, spare)

    def _move(
        self,
        call: Call,
        send: MessageViews,
        receive: MessageViews,
        sent: Sequence[int],
        came: Sequence[int],
    ) -> None:
        """Move messages with so many bytes of their dynamic parts, as both sides know."""
        peer = self._peer
        with call.stage("exchange"):
            if peer is not None:
                there, here = send.nbytes[peer] + sent[peer], receive.nbytes[peer] + came[peer]
                if alike(there, here):
                    longer = max(there, here)
                    both = receive.both(peer, longer)
                    self._transport.all_gather(both, send.longer(peer, longer))
                    call.wire_bytes += longer
                    return
            self._transport.all_to_all_v(receive.upto(came), send.upto(sent))
        call.wire_bytes += sum(send.nbytes) + sum(sent)

    def _exchange_fixed(
        self,
        call: Call,
        send: MessageViews,
        receive: MessageViews,
        digest: int,
        meanwhile: Callable[[], None],
    ) -> None:
        """Messages without dynamic parts: nobody waits."""
        with call.stage("exchange"):
            if send.some:
                send.words.index_fill_(0, send.places, digest)
        nothing = [0] * self._size
        self._move(call, send, receive, nothing, nothing)
        meanwhile()
        if not receive.some:
            return
        with call.stage("sizes"):
            arriving = self._arriving_late(receive.words.index_select(0, receive.places))
            late = PendingDigests(arriving, receive.some, digest, self._spare)
            self._comparisons.check_late(call, late)

    @tensors.kept
    def _arriving_late(self, words: Any) -> tensors.PendingHostCopy:
        return tensors.PendingHostCopy(words, self._spare.pop() if self._spare else None)

    def _exchange_learnt(
        self,
        call: Call,
        send: MessageViews,
        receive: MessageViews,
        digest: int,
        purpose: str,
        row: tuple[int, ...],
        meanwhile: Callable[[], None],
        stream: Any,
    ) -> None:
        """Messages with dynamic parts, up to what has been learnt; then what exceeds that."""
        words, pending = self._needs_on(receive.memory), None
        # Over gloo more bytes than are expected end a process. The host would wait for a GPU, and
        # does so before the first messages of a kind.
        kind = purpose, receive.plans[0].dtype, row
        early = words.on_host or kind not in self._known
        with call.stage("sizes"):
            words.fill(send, digest)
            self._transport.all_to_all(words.theirs, words.mine)
            if early or stream is None:
                pending = words.arriving()
            else:
                words.mark()
        sent = self._capacities(send, purpose, True)
        came = self._capacities(receive, purpose, False)
        told = self._told(call, receive, pending, digest) if early and pending else None
        self._known.add(kind)
        self._move(call, send, receive, sent, came)
        if pending is None:
            # Messages do not wait until the host has queued this.
            pending = words.arriving(stream)
        meanwhile()
        if told is None:
            told = self._told(call, receive, pending, digest)
        came_needs, needs = told
        outs = self._behind(receive, came, came_needs, purpose, False)
        xs = self._behind(send, sent, needs, purpose, True)
        call.wire_bytes += _TOLD * (self._size - 1)
        call.wire_bytes += sum(piece.shape[0] for pieces in xs for piece in pieces)
        if any(outs) or any(xs):
            with call.stage("dynamic"):
                self._transport.all_to_all_v(outs, xs)

    def _told(
        self, call: Call, receive: MessageViews, arriving: tensors.PendingHostCopy, digest: int
    ) -> tuple[list[int], list[int]]:
        """Dynamic bytes of messages from each rank, and to it."""
        with call.stage("sizes"):
            told = np.array(arriving.wait(self._transport.timeout))
        wrong = (told[0, :, 1] - told[0, :, 0] != digest).tolist()
        strange = [i for i in receive.some if wrong[i]]
        if strange:
            raise call.failure("sizes", f"ranks {strange} {OTHER_CALL}; here: {call.text}")
        came, needs = told[:, :, 0].tolist()
        for i in receive.some:
            most = receive.plans[i].dynamic_stride
            if not 0 <= came[i] <= most:
                detail = f"rank {i} claims {came[i]} dynamic bytes, at most {most}"
                raise call.failure("sizes", detail)
        return came, needs

    def _capacities(self, views: MessageViews, purpose: str, leaves: bool) -> list[int]:
        """Bytes of the dynamic part of each message that are sent with the rest."""
        found = [0] * self._size
        for i in views.some:
            plan = views.plans[i]
            if plan.dynamic_stride:
                learnt = self._learnt_of(purpose, plan.dtype, i, leaves)
                found[i] = learnt.capacity(plan.dynamic_stride, views.raw[i])
        return found

    def _behind(
        self,
        views: MessageViews,
        capacities: Sequence[int],
        needs: Sequence[int],
        purpose: str,
        leaves: bool,
    ) -> list[list[Any]]:
        """What messages need beyond their capacities, which learn it."""
        found: list[list[Any]] = [[] for _ in range(self._size)]
        for i in views.some:
            plan, need = views.plans[i], needs[i]
            if not plan.dynamic_stride:
                continue
            self._learnt_of(purpose, plan.dtype, i, leaves).learn(need, views.raw[i])
            if need > capacities[i]:
                begin = plan.dynamic_offset + capacities[i]
                end = plan.dynamic_offset + min(plan.dynamic_stride, align(need))
                found[i] = [views.data[i][begin:end]]
        return found

    def _learnt_of(self, purpose: str, dtype: DType, rank: int, leaves: bool) -> Learnt:
        key = purpose, dtype, rank, leaves
        found = self._learnt.get(key)
        if found is None:
            found = self._learnt[key] = Learnt()
        return found

    def _needs_on(self, like: Any) -> Needs:
        """Those on the device of `like`."""
        device = tensors.device_of(like)
        found = self._needs.get(device)
        if found is None:
            found = self._needs[device] = Needs(self._size, like)
        return found
