"""The state of a running collective, and its outcome: errors and trace records."""

from __future__ import annotations

import hashlib
import itertools
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, TypeVar

from ...arrays import ArrayInfo
from ...codecs.common.base import Key
from ...formats.dtypes import DType
from ...formats.errors import FormatError
from ..errors import CollectiveError
from . import running
from .tensors import PendingHostCopy

T = TypeVar("T")

#: What the seeds of a call's encodings differ by: odd, so that none of 2^64 comes twice.
_GOLDEN = 0x9E3779B97F4A7C15


def rounding_key(seed: int, sequence: int, encoding: int, rank: int, world: int) -> Key:
    """The key of codecs that round at random, for one encoding of a call.

    The step is the number of the call. The encodings of a call, numbered from 0, have seeds of
    their own: in an all-reduce the rounding of a sum is independent of the rounding of its terms.
    """
    return Key((seed + encoding * _GOLDEN) % 2**64, sequence % 2**32, rank, world)


def newest(records: deque[T], last: int | None) -> list[T]:
    """The last records, oldest first; all if `last` is None.

    Hooks ask for one after each call, of which there are many.
    """
    most = None if last is None else max(last, 0)
    return list(itertools.islice(reversed(records), most))[::-1]


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
        device_seconds: Seconds of a GPU by stage, of prepared calls whose trace is on.
    """

    collective: str
    sequence: int
    algorithm: str
    reason: str
    raw_bytes: int
    wire_bytes: int
    seconds: dict[str, float]
    error: str | None
    device_seconds: dict[str, float] = field(default_factory=dict)


class Late(Protocol):
    """What other ranks have sent for a check that nobody waits for."""

    @property
    def arriving(self) -> PendingHostCopy:
        """What is checked: a pending copy to the host."""

    def settle(self, call: Call, timeout: float) -> None:
        """Check it, and raise CollectiveError if it is not as it must be.

        Waits for it up to `timeout` seconds.
        """


class Call:
    """One call under way: its name and number, and what the trace will say of it."""

    def __init__(self, rank: int, collective: str, sequence: int, key: str, name: str = "") -> None:
        #: Of the communicator.
        self.name = name
        self.rank = rank
        self.collective = collective
        self.sequence = sequence
        self.algorithm = ""
        self.reason = ""
        self.raw_bytes = 0
        self.wire_bytes = 0
        self.seconds: dict[str, float] = {}
        #: Whether its record is kept: then profilers see its stages, too.
        self.traced = False
        #: Events on a GPU around stages, where these are timed there.
        self.events: list[tuple[str, Any, Any]] | None = None
        #: Dtype, shape and collective, as errors of other ranks name them.
        self.text = ""
        #: What calls are alike in that move as many bytes in the same way.
        self.kind: tuple[object, ...] = ()
        #: Of the input, 0 where other ranks do not know it.
        self.nbytes = 0
        #: Of an unequal all-to-all: the dtype, and the bytes of this rank's input.
        self.splits: tuple[DType, int] | None = None
        #: How many encodings there have been.
        self.encodings = 0
        #: Descriptors and digests that have not been compared yet.
        self.late: list[Late] = []
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
        #: The stage that it is in, and since when: other threads may ask.
        self.stage_name = ""
        self.since = self.stage_since = time.perf_counter()
        self.thread = threading.current_thread().name
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

    def device_seconds(self) -> dict[str, float]:
        """Seconds of the GPU by stage; all has been done there."""
        found: dict[str, float] = {}
        for name, start, stop in self.events or ():
            found[name] = found.get(name, 0.0) + start.elapsed_time(stop) / 1e3
        return found

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

    __slots__ = ("_call", "_event", "_name", "_note", "_nvtx", "_start")

    def __init__(self, call: Call, name: str, note: str) -> None:
        self._call, self._name, self._note = call, name, note

    def __enter__(self) -> None:
        # Ranges that profilers show, where PyTorch uses a GPU.
        self._nvtx = None
        torch: Any = sys.modules.get("torch") if self._call.traced else None
        if torch is not None and torch.cuda.is_initialized():
            self._nvtx = torch.cuda.nvtx
            self._nvtx.range_push(f"tightwire.{self._call.collective}.{self._name}")
        if self._call.events is not None:
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()
        self._start = self._call.stage_since = time.perf_counter()
        self._call.stage_name = self._name

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._call.stage_since = time.perf_counter()
        spent = self._call.stage_since - self._start
        self._call.stage_name = ""
        if self._call.events is not None:
            torch: Any = sys.modules["torch"]
            end = torch.cuda.Event(enable_timing=True)
            end.record()
            self._call.events.append((self._name, self._event, end))
        if self._nvtx is not None:
            self._nvtx.range_pop()
        seconds = self._call.seconds
        seconds[self._name] = seconds.get(self._name, 0.0) + spent
        if isinstance(error, (FormatError, RuntimeError, OSError)) and not isinstance(
            error, CollectiveError
        ):
            detail = f"{error}{self._note}"
            if not isinstance(error, FormatError):
                detail += running.others(self._call)
            raise self._call.failure(self._name, detail) from error
