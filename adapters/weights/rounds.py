"""Rounds of weight transfer: what ranks say to each other, before and after the tensors travel."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from ... import arrays
from ...codecs.common.base import Bytes
from ...formats.container import MAX_VERSION
from ...formats.errors import FormatError
from ...formats.header import align
from ..collectives import tensors
from ..collectives.agreement import gather_plain
from ..errors import CollectiveError
from ..transports.base import Transport
from .announcement import DIGEST_NBYTES, MAX_NBYTES, Announced, Stream

#: How errors name a round.
NAME = "weight transfer"
#: What `Status.version` and `Status.asked` are where there is no number.
NONE = -1
#: What the first word of a message is that does not come.
_GIVEN_UP = -1
#: The first bytes of a status: another number means another protocol.
_MAGIC = b"twpub\0\0\2"
_STATUS = struct.Struct(f"<8sBqqq{DIGEST_NBYTES}s{DIGEST_NBYTES}s{DIGEST_NBYTES}s")
#: The stage that ends a round.
_LAST = "verify"
#: Bytes of what a rank says went wrong.
_VERDICT = 512
_NEXT = "Nothing has been written, and the next round may follow"
_AFTER = (
    "nothing has been written. Make a new transport of the ranks that are left, and publish and "
    "subscribe again"
)


class Status(NamedTuple):
    """What a rank says at the start of a round.

    `version` is what it has, `state` the digest of its tensors (of a publisher those that it
    offers). The others are a publisher's: the number it asks for, the digest of the base that it
    has kept, and bytes and digest of its announcement.
    """

    publishes: bool
    version: int
    state: bytes
    asked: int = NONE
    nbytes: int = 0
    base: bytes = bytes(DIGEST_NBYTES)
    text: bytes = bytes(DIGEST_NBYTES)

    def pack(self) -> Bytes:
        """Its bytes, as many for all."""
        numbers = self.publishes, self.version, self.asked, self.nbytes
        data = _STATUS.pack(_MAGIC, *numbers, self.state, self.base, self.text)
        return np.frombuffer(data, np.uint8)

    @classmethod
    def unpack(cls, data: bytes) -> Status | None:
        """That of bytes; None for those of another protocol."""
        magic, publishes, version, asked, nbytes, state, base, text = _STATUS.unpack(data)
        if magic != _MAGIC:
            return None
        return cls(bool(publishes), version, state, asked, nbytes, base, text)


class Meeting(NamedTuple):
    """What follows from all ranks' statuses, the same on all of them.

    `needs` has for each rank what it lacks, None for nothing; `streams` is what travels.
    """

    root: int
    version: int
    publisher: Status
    needs: tuple[Stream | None, ...]

    @property
    def streams(self) -> list[Stream]:
        """What any rank needs."""
        kinds: tuple[Stream, ...] = ("delta", "whole")
        return [stream for stream in kinds if stream in self.needs]


class Group:
    """The ranks of a transport, of which one publishes in each round.

    Every method raises CollectiveError. After failures of the transport so does every later call.
    """

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self._round = NONE
        self._broken = ""
        #: Whether ranks are between a meeting and the end of its round.
        self._under_way = False

    def meet(self, mine: Status) -> Meeting:
        """Start a round."""
        if self._broken:
            raise self._failure("meet", f"an earlier round failed: {self._broken}; {_AFTER}")
        if self._under_way:
            raise self._failure("meet", f"an earlier round was interrupted here; {_AFTER}")
        self._round += 1
        with self._moving("meet"):
            rows = gather_plain(self.transport, mine.pack())
        found = [Status.unpack(row.tobytes()) for row in rows]
        others = [rank for rank, status in enumerate(found) if status is None]
        if others:
            raise self._failure(
                "meet", f"ranks {others} make another call, or have another tightwire; {_AFTER}"
            )
        statuses = [status for status in found if status is not None]
        roots = [rank for rank, status in enumerate(statuses) if status.publishes]
        if len(roots) != 1:
            who = f"ranks {roots} publish" if roots else "no rank publishes"
            raise self._refusal(f"{who}; needed: one that sends, while all others receive")
        root = roots[0]
        publisher = statuses[root]
        newest = max(status.version for status in statuses)
        version = newest + 1 if publisher.asked == NONE else publisher.asked
        if version > MAX_VERSION:
            raise self._refusal(f"version {version} is sent; allowed: at most {MAX_VERSION}")
        if version <= newest:
            who = f"ranks {[r for r, s in enumerate(statuses) if s.version >= version]}"
            detail = f"version {version} is sent, and {who} have {newest} already"
            raise self._refusal(f"{detail}; allowed: version=None or a later one")
        if not 0 < publisher.nbytes <= MAX_NBYTES:
            detail = f"an announcement of {publisher.nbytes} bytes; allowed: 1 to {MAX_NBYTES}"
            raise self._refusal(detail)
        needs = tuple(
            None if rank == root else _need(status, publisher)
            for rank, status in enumerate(statuses)
        )
        meeting = Meeting(root, version, publisher, needs)
        self._under_way = bool(meeting.streams)
        return meeting

    def agree(self, stage: str, problem: BaseException | None = None) -> None:
        """Raise on all ranks what any has found wrong."""
        text = b"" if problem is None else f"{type(problem).__name__}: {problem}".encode()
        mine = np.frombuffer(text[:_VERDICT].ljust(_VERDICT, b"\0"), np.uint8)
        with self._moving(stage):
            rows = gather_plain(self.transport, mine)
        self._under_way = stage != _LAST
        said = [row.tobytes().rstrip(b"\0").decode(errors="replace") for row in rows]
        groups = {
            text: [r for r, other in enumerate(said) if other == text] for text in said if text
        }
        if groups:
            parts = [f"ranks {ranks}: {text}" for text, ranks in groups.items()]
            self._under_way = False
            raise self._failure(stage, f"{'; '.join(parts)}. {_NEXT}") from problem

    def spread(self, stage: str, data: Any, nbytes: int, root: int) -> Any:
        """Bytes of the root, which alone gives them, as an array of the transport."""
        if data is not None:
            x = self._placed(data)
        with self._moving(stage):
            if data is None:
                # The others wait for the rank that has no memory for it.
                x = self.transport.empty(nbytes)
            if nbytes:
                self.transport.broadcast(x, root)
        return x

    @property
    def device(self) -> Any:
        """Where the transport has its arrays; None: they are NumPy's."""
        return tensors.device_of(self.transport.empty(0))

    def _placed(self, data: Any) -> Any:
        """Bytes where the transport has its arrays."""
        return placed(data, self.device)

    def send(self, message: Message) -> None:
        """Send a message; its bytes are on the host, or where the transport has its arrays."""
        me = self.transport.rank
        pairs = zip(message.sizes, message.against, strict=True)
        words = np.array([size << 1 | against for size, against in pairs], np.int64)
        # What may fail comes before the words, behind which the others wait for the bytes.
        head, data = self._placed(words.view(np.uint8)), self._placed(message.data)
        with self._moving("send"):
            self.transport.broadcast(head, me)
            if data.shape[0]:
                self.transport.broadcast(data, me)

    def give_up(self, count: int) -> None:
        """Say that the next message, of `count` tensors, and those after it do not come."""
        self.spread(
            "send", np.full(count, _GIVEN_UP).view(np.uint8), 8 * count, self.transport.rank
        )

    def receive(self, bucket: Sequence[Announced], root: int) -> Message | None:
        """The next message; None if the publisher has given up."""
        count = len(bucket)
        raw = arrays.host_array(self.spread("receive", None, 8 * count, root))
        words = raw.view(np.int64).tolist()
        if words[0] == _GIVEN_UP:
            return None
        sizes = [word >> 1 for word in words]
        for tensor, size in zip(bucket, sizes, strict=True):
            if not tensor.fits(size):
                detail = f"tensor {tensor.names[0]!r} of {tensor.nbytes} bytes comes in {size}"
                self._broken = detail
                error = FormatError("limit_exceeded", detail)
                raise self._failure("receive", f"{error}; {_AFTER}") from error
        data = self.spread("receive", None, sum(map(align, sizes)), root)
        return Message(sizes, [bool(word & 1) for word in words], data)

    @contextmanager
    def _moving(self, stage: str) -> Iterator[None]:
        """Make a CollectiveError of what the transport raises, or a lack of memory."""
        try:
            yield
        except Exception as error:
            self._broken = str(error) or type(error).__name__
            raise self._failure(stage, f"{self._broken}; {_AFTER}") from error

    def _refusal(self, detail: str) -> CollectiveError:
        """What all ranks raise alike at the start of a round."""
        return self._failure("meet", f"{detail}. {_NEXT}")

    def _failure(self, stage: str, detail: str) -> CollectiveError:
        return CollectiveError(self.transport.rank, NAME, self._round, stage, detail)


class Message(NamedTuple):
    """Some tensors: bytes of each, whether it is against the base, and all of them in an array."""

    sizes: list[int]
    against: list[bool]
    data: Any

    def pieces(self) -> Iterator[tuple[bool, Any]]:
        """Whether each is against the base, and its bytes, at a multiple of 128 in the message."""
        at = 0
        for size, against in zip(self.sizes, self.against, strict=True):
            yield against, self.data[at : at + size]
            at += align(size)


def placed(data: Any, device: Any) -> Any:
    """Bytes as a tensor on `device`, or for None as an array of NumPy."""
    if device is None or not tensors.is_torch(data):
        return tensors.on_device(arrays.host_array(data), device)
    return data.to(device)


def _need(status: Status, publisher: Status) -> Stream | None:
    if status.state == publisher.state:
        return None
    return "delta" if status.state == publisher.base else "whole"
