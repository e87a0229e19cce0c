"""What works of prepared calls are judged by: what decoding found, messages needed, who came."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ... import arrays
from ..errors import CollectiveError
from . import tensors
from .calls import Call, TraceRecord
from .messages import Capacity
from .prepared_exchange import Slot

if TYPE_CHECKING:
    from .prepared import PreparedCalls
    from .prepared_work import Work


class Judged:
    """The judgement of a prepared collective's works."""

    collective = ""
    _calls: PreparedCalls
    _rank: int
    _slots: list[Slot]
    #: By exchange and part what is learnt; None where messages fit any data.
    _capacities: list[Capacity | None]
    #: Whether a message may not fit.
    _learns: bool
    #: Buffers that one exchange receives.
    _width: int

    def _collect(self, slot: Slot) -> None:
        """Put together what the words say beside what decoding found."""
        self._note_needs(slot)
        late_words = [e.messages.late for e in slot.exchanges if e.messages.late is not None]
        if slot.words is not None and late_words:
            _join(late_words, slot.words[slot.late_at :])

    def _note_needs(self, slot: Slot) -> None:
        """What messages needed: on the host now, on a GPU in the words that are copied."""
        if not self._learns:
            return
        if slot.words is None:
            slot.set_needs([int(arrays.host_array(word)[0]) for word in slot.need_words])
        else:
            _join(slot.need_words, slot.words[slot.needs_at : slot.late_at])

    def _judge(self, work: Work, timeout: float | None) -> None:
        """Wait for a work, have it made again if a message did not fit, raise what is wrong."""
        slot, call, report = work._slot, work._call, work._report
        assert slot is not None
        if report is not None:
            with self._failing(), call.stage("wait"):
                words = report.values() if report.done() else self._arrived(report, timeout)
                self._check_late(slot, words)
            if not self._learns and not slot.found and not words.any():
                return
            self._read(slot, words)
        lacks = self._lacks(slot)
        damaged = self._damage(slot, call, lacks and not work.certain)
        if lacks and work.certain and damaged is None:
            damaged = call.failure("encode", "a message did not fit, though it had fitted before")
        if damaged is not None:
            if self._learns or self._calls.route.reads_sizes:
                # Perhaps the others have learnt other capacities from it, or make it once more.
                self._calls.broken = self._calls.broken or str(damaged)
            raise damaged
        work.needs = list(slot.needs)
        if lacks:
            with self._failing():
                assert work._again is not None
                work._again(bool(slot.found))
            work.repeated = True

    def _arrived(self, report: tensors.PendingHostCopy, timeout: float | None) -> Any:
        """What a report says, when the device has got so far."""
        seconds = self._calls.transport.timeout if timeout is None else timeout
        presence = self._calls.presence
        return report.wait(seconds, presence and presence.left)

    def _damage(self, slot: Slot, call: Call, lacks: bool) -> CollectiveError | None:
        """What is wrong with messages; if one of the call `lacks` capacity, other than that."""
        if slot.misled:
            return call.failure("decode", "what messages needed was damaged on the way")
        for _, source, error in slot.found:
            if error.reason != "dynamic_overflow" or not lacks:
                found = call.failure("decode", f"{error} (from rank {source})")
                found.__cause__ = error
                return found
        return None

    def _lacks(self, slot: Slot) -> bool:
        """Whether a message did not fit."""
        rows = zip(slot.needs, slot.capacities, self._capacities, strict=False)
        return any(known is not None and need > most for need, most, known in rows)

    def _remember(self, call: Call, error: CollectiveError | None) -> None:
        """Keep a call's record, where there is a trace."""
        records = self._calls.records
        if records.maxlen:
            late = error is not None and error.stage == "wait"
            seconds = {} if late else call.device_seconds()
            text = None if error is None else str(error)
            records.append(TraceRecord(*call.record(text), device_seconds=seconds))

    def _check_late(self, slot: Slot, words: Any) -> None:
        """Raise TimeoutError if a rank did not come to a barrier."""
        for late in words[slot.late_at :].tolist():
            if late:
                raise TimeoutError(f"rank {late - 1} did not come in time")

    def check(self, timeout: float | None = None) -> None:
        """Raise what calls that a CUDA graph holds have found so far. Waits for the device.

        Args:
            timeout: Seconds. None: the transport's.

        Raises:
            CollectiveError: If a rank was late or gone, or bytes were damaged.
        """
        for slot in self._slots:
            if not slot.captured:
                continue
            call = Call(self._rank, self.collective, self._calls.number, "", self._calls.name)
            with self._failing(), call.stage("wait"):
                # Behind the replays that are queued on this stream.
                words = self._arrived(tensors.PendingHostCopy(slot.words), timeout)
                self._check_late(slot, words)
            slot.found.clear()
            self._read(slot, words)
            # A replay makes nothing once more.
            damaged = self._damage(slot, call, lacks=False)
            if damaged is not None:
                raise damaged

    def _read(self, slot: Slot, words: Any) -> None:
        """What the words on a GPU say."""
        from ...codecs.common.frame_triton import problem

        if self._learns:
            slot.set_needs(words[slot.needs_at : slot.late_at].tolist())
        statuses = words[: slot.needs_at]
        if not statuses.any():
            return
        for k in np.flatnonzero(statuses).tolist():
            error = problem(int(words[k]))
            if error is not None:
                at, number = divmod(k, self._width)
                slot.found.append((at, slot.exchanges[at].sender(number), error))
        with self._calls.ordered(slot.phase):
            slot.words[: slot.needs_at] = 0

    def _failing(self) -> Failing:
        return Failing(self._calls)


class Failing:
    """Errors of a call that has begun leave ranks out of step: no later call is made."""

    __slots__ = ("_calls",)

    def __init__(self, calls: PreparedCalls) -> None:
        self._calls = calls

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if error is not None:
            self._calls.fail(error)


def _join(words: list[Any], out: Any) -> None:
    import torch

    torch.cat(words, out=out)
