"""Messages from one rank to another, encoded or as they are."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ...arrays import ArrayInfo
from ...formats.dtypes import BY_NAME
from . import tensors
from .calls import Call
from .chunk_views import DESCRIPTOR_NBYTES, DESCRIPTOR_WORDS, ChunkViews
from .comparisons import PendingDescriptors
from .cost import Choice
from .digests import content_digest
from .measuring import measure_messages
from .native import sent_plain
from .path_selection import BUDGET, NATIVE_AGAIN, Measured
from .steps import Steps

_INT64 = BY_NAME["int64"]


class PointToPoint:
    """Sends and receives messages."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._session = steps.session
        self._memory = steps.memory
        self._coding = steps.coding
        self._comparisons = steps.comparisons
        self._digest_checks = steps.digest_checks
        self._transport = steps.session.transport
        self._rank = steps.session.rank
        #: Seconds left for measurements of what this rank sends.
        self.measuring_left = BUDGET

    def send(self, x: Any, info: ArrayInfo, to: int) -> None:
        """Send `x` to rank `to`."""
        key = f"from {self._rank} to {to}"
        choice = self._choose(x, info, key, to, sends=True)
        with self._session.call("send", "message", info, choice, pair=key) as call:
            # No encoding of a collective has these numbers.
            call.encodings = -1 - to
            if choice.algorithm == "native":
                self._send_native(call, x, to, call.digest(info, info.shape))
                return
            plan = self._memory.plan(info.dtype, math.prod(info.shape))
            shares = self._coding.encode(call, [x.reshape(-1)], [plan])
            digests = [call.digest(info, info.shape)]
            descriptors = shares.write_descriptors(digests, 0)
            sizes = [0]
            with call.stage("sizes"):
                self._transport.send(shares.descriptor_bytes, to)
                if not self._session.fixed:
                    arrived = self._comparisons.compared(
                        call, shares.arriving(descriptors), digests, self._rank
                    )
                    sizes = self._steps.sizes(call, arrived, shares, self._rank)
            self._message(call, shares, sizes[0], to, self._transport.send)
            self._learn(key, info, call)

    def receive(self, into: Any, info: ArrayInfo, source: int) -> None:
        """Receive `into` from rank `source`."""
        key = f"from {source} to {self._rank}"
        choice = self._choose(into, info, key, source, sends=False)
        with self._session.call("recv", "message", info, choice, pair=key) as call:
            if choice.algorithm == "native":
                self._receive_native(call, into, source, call.digest(info, info.shape))
                return
            plan = self._memory.plan(info.dtype, math.prod(info.shape))
            shares = self._memory.receive("receive", [plan], into)
            sizes, digests = [0], [call.digest(info, info.shape)]
            with call.stage("sizes"):
                self._transport.recv(shares.descriptor_bytes, source)
                if not self._session.fixed:
                    arrived = self._comparisons.compared(
                        call, shares.arriving(shares.descriptors), digests, source
                    )
                    sizes = self._steps.sizes(call, arrived, shares, source)
            if self._session.fixed:
                self._comparisons.compare_late(call, shares, digests, source)
            self._message(call, shares, sizes[0], source, self._transport.recv)
            self._learn(key, info, call)
            buffers = shares.buffers(self._memory.status_words(shares.memory))
            call.exchanged = True
            self._coding.decode(call, buffers[0], into.reshape(-1), source)

    def _choose(self, x: Any, info: ArrayInfo, key: str, peer: int, *, sends: bool) -> Choice:
        """The path of a message to or from `peer`; the first large one is timed by both ranks."""
        if self._session.broken is not None:
            # Not worth a measurement: the call is about to be refused.
            return NATIVE_AGAIN

        def measure() -> Measured:
            return measure_messages(self, self._session, x, info, peer, sends=sends)

        return self._session.paths.choose_message(x, info, key, measure)

    def _learn(self, key: str, info: ArrayInfo, call: Call) -> None:
        """Have later messages follow how far this one was compressed, on both ranks."""
        if call.raw_bytes:
            ratio = call.wire_bytes / call.raw_bytes
            self._session.paths.learn_message(key, info.dtype, call.raw_bytes, ratio)

    def _message(
        self,
        call: Call,
        shares: ChunkViews,
        size: int,
        peer: int,
        move: Callable[[Any, int], None],
    ) -> None:
        """Send or receive the payload of one buffer: static and dynamic part are neighbours."""
        (plan,), (data,) = shares.plans, shares.data
        payload = data[plan.static_offset : plan.dynamic_offset + size]
        with call.stage("payload"):
            if payload.shape[0]:
                move(payload, peer)
        call.raw_bytes += shares.shares[0].raw_nbytes
        call.wire_bytes += DESCRIPTOR_NBYTES + int(payload.shape[0])

    def _send_native(self, call: Call, x: Any, to: int, name: int) -> None:
        """A descriptor of the call, then the bytes of `x`."""
        x = tensors.contiguous(x)
        word = content_digest(x) if self._session.digests else None
        descriptor = self._comparisons.descriptor(call, name, x, word)
        with call.stage("sizes"):
            self._transport.send(tensors.as_bytes(descriptor), to)
        self._move_native(call, tensors.as_bytes(x), to, self._transport.send)

    def _receive_native(self, call: Call, into: Any, source: int, name: int) -> None:
        """What `_send_native` sends; on the host nothing of another shape or dtype arrives."""
        descriptor = tensors.empty((1, DESCRIPTOR_WORDS), _INT64, into)
        with call.stage("sizes"):
            self._transport.recv(tensors.as_bytes(descriptor), source)
            spare = self._comparisons.spare
            arriving = tensors.PendingHostCopy(descriptor, spare.pop() if spare else None)
            self._comparisons.check_late(call, PendingDescriptors(arriving, [name], source, spare))
        self._move_native(call, tensors.as_bytes(into), source, self._transport.recv)
        if self._session.digests:
            strange = content_digest(into) != descriptor[0, 1:2]
            word, rank = tensors.cast(strange, _INT64).reshape(1, 1), self._rank
            self._digest_checks.check_late(call, word, lambda found: [rank] * int(found[0, 0]))

    def _move_native(
        self, call: Call, payload: Any, peer: int, move: Callable[[Any, int], None]
    ) -> None:
        with call.stage("native"):
            if payload.shape[0]:
                move(payload, peer)
        sent_plain(call, int(payload.shape[0]))
        call.wire_bytes += DESCRIPTOR_NBYTES


def exchange(comm: Any, x: Any, to: int, out: Any, source: int) -> Any:
    """`Communicator.sendrecv` by `send` and `recv` of `comm`, of ranks that it has checked."""
    if tensors.overlap(tensors.as_input(x)[0], tensors.as_input(out)[0]):
        raise ValueError("out may overlap x; allowed: memory of its own")
    if to > comm.rank:
        comm.send(x, to)
        return comm.recv(out, source)
    comm.recv(out, source)
    comm.send(x, to)
    return out
