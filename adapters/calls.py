"""The state of a running collective, and its outcome: errors and trace records."""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple

from ..arrays import ArrayInfo
from ..codecs.common.base import Key
from ..formats.errors import FormatError
from .tensors import OnTheWay

#: What the seeds of a call's encodings differ by: odd, so that none of 2^64 comes twice.
_GOLDEN = 0x9E3779B97F4A7C15


def rounding_key(seed: int, sequence: int, encoding: int, rank: int, world: int) -> Key:
    """The key of codecs that round at random, for one encoding of a call.

    The step is the number of the call. The encodings of a call, numbered from 0, have seeds of
    their own: in an all-reduce the rounding of a sum is independent of the rounding of its terms.
    """
    return Key((seed + encoding * _GOLDEN) % 2**64, sequence % 2**32, rank, world)


class CollectiveError(RuntimeError):
    """A collective failed on this rank. ``__cause__`` is what the transport or the decoder raised.

    If the ranks are still in step (all data had been exchanged, only decoding failed), the
    communicator can be used on; else it refuses every later call.

    Args:
        rank: This rank.
        collective: Name of the collective.
        sequence: Number of the call among the collectives of the group; for messages, among those
            of the pair of ranks.
        stage: The stage of the call that failed, such as ``"agree"`` or ``"decode"``.
        detail: What went wrong. In sums over hops it names the hop, counted from 0, and its sender,
            or the gather of the sums after the last hop.

    Raises:
        RuntimeError: Never here; it is the base class.
    """

    def __init__(self, rank: int, collective: str, sequence: int, stage: str, detail: str) -> None:
        super().__init__(rank, collective, sequence, stage, detail)
        self.rank = rank
        self.collective = collective
        self.sequence = sequence
        self.stage = stage
        self.detail = detail

    def __str__(self) -> str:
        call = f"{self.collective} #{self.sequence}"
        return f"rank {self.rank}: {call} failed in stage {self.stage!r}: {self.detail}"


@dataclass(frozen=True)
class TraceRecord:
    """What one call did on this rank, as ``Communicator.trace`` returns it.

    Attributes:
        collective: Name of the collective.
        sequence: Number of the call.
        algorithm: ``"compressed"``, ``"pipelined"``, ``"native"``, or how a sum was made.
        reason: Why that algorithm was taken, and in sums over hops the codec's remark on the
            statistics that ranks agreed on.
        raw_bytes: Bytes to other ranks (of ``recv``: from the other rank) without compression, in
            the dtype that ``wire=`` names. An all-gather counts its part once for every other rank.
        wire_bytes: Bytes that were sent to other ranks (of ``recv``: received).
        seconds: Seconds of the host by stage. On a GPU stages that wait for nothing only queue
            work, and stages of pieces overlap. The first stage that exchanges anything waits for
            the slowest rank: on the host that is ``"sizes"``, else ``"static"``, ``"exchange"``
            (both at once, where buffers have no dynamic part) or ``"native"``.
        error: The error, or None.
    """

    collective: str
    sequence: int
    algorithm: str
    reason: str
    raw_bytes: int
    wire_bytes: int
    seconds: dict[str, float]
    error: str | None


class LateCards(NamedTuple):
    """Pending chunk descriptors, copied to the host, all from rank `source` if it is given."""

    arriving: OnTheWay
    digests: Sequence[int]
    source: int | None
    #: Takes `arriving` back when it is over.
    spare: list[OnTheWay]
    #: Explains an error.
    note: str = ""


class LateDigests(NamedTuple):
    """Pending digests of all ranks, copied to the host, shape (ranks, n), and their check.

    `check` gives the ranks whose results are damaged.
    """

    arriving: OnTheWay
    check: Callable[[Any], list[int]]


class Call:
    """One call under way: its name and number, and what the trace will say of it."""

    def __init__(self, rank: int, collective: str, sequence: int, key: str) -> None:
        self.rank = rank
        self.collective = collective
        self.sequence = sequence
        self.algorithm = ""
        self.reason = ""
        self.raw_bytes = 0
        self.wire_bytes = 0
        self.seconds: dict[str, float] = {}
        #: Dtype, shape and collective, as errors of other ranks name them.
        self.text = ""
        #: What calls are alike in that move as many bytes in the same way.
        self.kind: tuple[object, ...] = ()
        #: Of the input, 0 where it is no common knowledge.
        self.nbytes = 0
        #: How many encodings there have been.
        self.encodings = 0
        #: Descriptors and digests that have not been compared yet.
        self.late: list[LateCards | LateDigests] = []
        #: All ranks are known to make this call.
        self.compared = False
        #: What errors are told with that decoding on a GPU finds, by the number of its word.
        self.unchecked: dict[int, str] = {}
        #: Where these words are: any array of that device.
        self.place: Any = None
        #: Raises if ranks turn out to have agreed on other statistics.
        self.verdict: Callable[[], None] | None = None
        #: Nothing is left to exchange: a failure from now on is this rank's own.
        self.exchanged = False
        self._key = key

    def stage(self, name: str, note: str = "") -> _Stage:
        """Time what happens inside, and name the stage in its errors; `note` explains them."""
        return _Stage(self, name, note)

    def failure(self, stage: str, detail: str) -> CollectiveError:
        """The error of this call at a stage."""
        return CollectiveError(self.rank, self.collective, self.sequence, stage, detail)

    def digest(self, info: ArrayInfo, shape: tuple[int, ...], part: int = 0) -> int:
        """63 bits that both sides of a share must agree on: this call, dtype, shape and piece."""
        what = f"{self._key} {self.sequence} {info.dtype.name} {shape} {part}"
        found = hashlib.blake2b(what.encode(), digest_size=8).digest()
        return int.from_bytes(found, "little") >> 1

    def digest_of(self, data: bytes, info: ArrayInfo) -> int:
        """63 bits that ranks agree on if they have the same `data`, in the same call."""
        word = hashlib.blake2b(data, digest_size=8).digest()
        return self.digest(info, (int.from_bytes(word, "little"), *info.shape))

    def record(
        self, error: str | None
    ) -> tuple[str, int, str, str, int, int, dict[str, float], str | None]:
        """The fields of its TraceRecord."""
        return (
            self.collective,
            self.sequence,
            self.algorithm,
            self.reason,
            self.raw_bytes,
            self.wire_bytes,
            self.seconds,
            error,
        )


class _Stage:
    """A context manager, and no generator: a call has half a dozen of them."""

    __slots__ = ("_call", "_name", "_note", "_nvtx", "_start")

    def __init__(self, call: Call, name: str, note: str) -> None:
        self._call, self._name, self._note = call, name, note

    def __enter__(self) -> None:
        torch: Any = sys.modules.get("torch")
        # Ranges that profilers show, where PyTorch uses a GPU.
        self._nvtx = None
        if torch is not None and torch.cuda.is_initialized():
            self._nvtx = torch.cuda.nvtx
            self._nvtx.range_push(f"tightwire.{self._call.collective}.{self._name}")
        self._start = time.perf_counter()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        spent = time.perf_counter() - self._start
        if self._nvtx is not None:
            self._nvtx.range_pop()
        seconds = self._call.seconds
        seconds[self._name] = seconds.get(self._name, 0.0) + spent
        if isinstance(error, (FormatError, RuntimeError, OSError)) and not isinstance(
            error, CollectiveError
        ):
            raise self._call.failure(self._name, f"{error}{self._note}") from error
