"""The calls that are under way in this process: which stage each is in, and since when.

A call is noted when it begins and forgotten when it ends, whatever thread makes it. A prepared call
on a GPU ends when its work has been waited for, or is dropped: the host knows no sooner that it is
over. Reading takes no lock that a call holds, so that it works while all calls hang.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from .calls import Call

#: By identity. Single operations of a dict are atomic; nothing here takes two that belong together.
_running: dict[int, Call] = {}


@dataclass(frozen=True)
class RunningCall:
    """A call that has not ended.

    Attributes:
        name: The ``name`` of its communicator.
        rank: This rank in its group.
        collective: Name of the collective.
        sequence: Number of the call.
        algorithm: As in ``TraceRecord``; ``""`` before it is chosen.
        text: Dtype and shape.
        stage: The stage that it is in; ``""`` between stages, and of a prepared call on a GPU that
            has been queued and that nobody waits for yet.
        seconds: Since the call began.
        stage_seconds: Since the stage began.
        thread: Name of the thread that made the call.
    """

    name: str
    rank: int
    collective: str
    sequence: int
    algorithm: str
    text: str
    stage: str
    seconds: float
    stage_seconds: float
    thread: str

    def __str__(self) -> str:
        name = f"{self.name}: " if self.name else ""
        stage = f"stage {self.stage!r} for {self.stage_seconds:.1f} s" if self.stage else "no stage"
        return (
            f"{name}rank {self.rank}, {self.collective} #{self.sequence} {self.text}, {stage}, "
            f"{self.seconds:.1f} s in all, thread {self.thread}"
        )


def begin(call: Call) -> None:
    """Note a call."""
    if _silent:
        _listen()
    _running[id(call)] = call


def end(call: Call) -> None:
    """Forget a call."""
    _running.pop(id(call), None)


@contextmanager
def noted(call: Call) -> Iterator[None]:
    """Note a call while the context lasts."""
    begin(call)
    try:
        yield
    finally:
        end(call)


def running_calls() -> list[RunningCall]:
    """The calls of this process that have not ended, the oldest first.

    Any thread may ask, at any time: it waits for nothing. Calls of a ``Communicator`` end when they
    return, also on a GPU, which may still be at work. So do prepared calls on the host. On a GPU a
    prepared call ends when its work has been waited for, or is dropped: until then it is listed,
    also if the GPU is done with it.
    """
    return [_told(call) for call in sorted(_running.values(), key=lambda call: call.since)]


def _told(call: Call) -> RunningCall:
    now = time.perf_counter()
    return RunningCall(
        call.name,
        call.rank,
        call.collective,
        call.sequence,
        call.algorithm,
        call.text,
        call.stage_name,
        now - call.since,
        now - call.stage_since,
        call.thread,
    )


def others(call: Call) -> str:
    """What other calls wait for, in a stage, for the error of `call`; ``""`` if there are none."""
    waiting = [str(_told(c)) for c in list(_running.values()) if c is not call and c.stage_name]
    return f"; here also: {'; '.join(waiting)}" if waiting else ""


def dump_calls(file: IO[str]) -> None:
    """Write a line for every call of ``running_calls()`` to ``file``, and one that says how many.

    Args:
        file: An open text file, such as ``sys.stderr``.
    """
    calls = running_calls()
    lines = [f"tightwire, process {os.getpid()}: {len(calls)} calls", *map(str, calls)]
    file.write("\n".join(lines) + "\n")
    file.flush()


def dump_on_signal(number: int = signal.SIGUSR1, file: IO[str] | None = None) -> None:
    """Have ``dump_calls`` write to ``file`` whenever this process gets a signal.

    A thread of its own writes: it works while the main thread waits for a network and runs no
    Python code. Call it once, in the main thread.

    In a forked child it holds as well: a signal to the child has the child write, its own calls.
    There the thread starts with the child's first call, or the first signal that its main thread
    runs Python code for: a child that needs none stays without, and can fork in turn.

    Args:
        number: Number of the signal, as of ``kill -USR1``.
        file: An open text file. None: ``sys.stderr`` as it is when the signal comes.

    Raises:
        ValueError: Outside of the main thread, if the signal has a handler, or if the process has a
            wake-up file descriptor for signals already, as while asyncio runs in the main thread.
    """
    global _dumper
    if signal.getsignal(number) not in (signal.SIG_DFL, signal.SIG_IGN):
        raise ValueError(f"signal {number} has a handler. Allowed: a signal without one")
    # Signals reach a descriptor only if Python handles them.
    signal.signal(number, _listen)
    try:
        _dumper = _Dumper(number, file)
    except ValueError:
        signal.signal(number, signal.SIG_DFL)
        raise
    _silent.append(_dumper)
    _listen()


class _Dumper:
    """What has calls be written in this process when a signal comes.

    Args:
        number: As in ``dump_on_signal``.
        file: As there.

    Raises:
        ValueError: If there is a wake-up file descriptor already.
    """

    def __init__(self, number: int, file: IO[str] | None) -> None:
        self._number, self._file = number, file
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        if before != -1:
            signal.set_wakeup_fd(before)
            self._close()
            raise ValueError("this process has a wake-up file descriptor for signals already")

    def _close(self) -> None:
        self._reader.close()
        self._writer.close()

    def listen(self) -> None:
        """Write when signals come, for good."""
        while numbers := self._reader.recv(64):
            if self._number in numbers:
                dump_calls(sys.stderr if self._file is None else self._file)

    def in_child(self) -> _Dumper | None:
        """Its like in a forked child; None if signals have gone to another descriptor."""
        own = self._writer.fileno()
        before = signal.set_wakeup_fd(-1)
        # What is written to these, the parent reads.
        self._close()
        if before == own:
            return _Dumper(self._number, self._file)
        signal.set_wakeup_fd(before)
        return None


#: Of this process, if `dump_on_signal` has been called.
_dumper: _Dumper | None = None
#: The same, as long as no thread listens.
_silent: list[_Dumper] = []


def _listen(*_: object) -> None:
    """Start the thread that listens, if there is none; also the handler of the signal."""
    # Popping is atomic. No call fails because there cannot be one thread more. A handler may have
    # interrupted `threading`, whose locks it must not wait for.
    with contextlib.suppress(IndexError, RuntimeError):
        _thread.start_new_thread(_silent.pop().listen, ())


def _in_child() -> None:
    """Have a forked child answer its own signals. The threads of other calls are not there."""
    global _dumper
    _running.clear()
    _silent.clear()
    if _dumper is not None:
        _dumper = _dumper.in_child()
    if _dumper is not None:
        _silent.append(_dumper)


os.register_at_fork(after_in_child=_in_child)
