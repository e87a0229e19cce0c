"""Calls that are under way can be seen from other threads, by a signal, and in errors."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest

import tightwire as tw
from tightwire.adapters.collectives import running
from tightwire.adapters.collectives.calls import Call
from tightwire.adapters.collectives.prepared import PreparedCalls
from tightwire.adapters.collectives.running import dump_calls, dump_on_signal, running_calls
from tightwire.adapters.transports.threads import ThreadTransport, run_ranks

X = np.ones(1000, np.float32)
#: Stages of an all-gather that wait for other ranks.
WAITING = ("sizes", "static")


def of(name: str) -> list[running.RunningCall]:
    """Calls of the communicators called so."""
    return [call for call in running_calls() if call.name == name]


def test_a_call_is_seen_while_it_waits_and_not_afterwards() -> None:
    seen: list[running.RunningCall] = []
    text = io.StringIO()

    def task(transport: ThreadTransport) -> None:
        with tw.Communicator(transport, name="weights") as comm:
            comm.all_reduce(X)
            if comm.rank == 1:
                deadline = time.monotonic() + 20
                # The stage in which rank 0 waits for this rank.
                while not any(c.sequence == 1 and c.stage in WAITING for c in of("weights")):
                    assert time.monotonic() < deadline
                time.sleep(0.01)
                seen.extend(c for c in of("weights") if c.rank == 0)
                dump_calls(text)
            comm.all_gather(X)

    run_ranks(2, task)
    (call,) = seen
    assert (call.collective, call.sequence, call.text) == (
        "all_gather",
        1,
        "float32 (1000,) all_gather",
    )
    assert call.stage in WAITING
    assert call.algorithm == "all-gather, sizes first, zipccl"
    assert call.seconds >= call.stage_seconds >= 0.01
    assert call.thread
    line = r"weights: rank 0, all_gather #1 float32 \(1000,\) all_gather, stage '"
    assert re.search(line, text.getvalue())
    assert of("weights") == []


def test_a_failed_call_is_forgotten() -> None:
    def task(transport: ThreadTransport) -> None:
        comm = tw.Communicator(transport, name="failing")
        if comm.rank == 0:
            with pytest.raises(tw.CollectiveError):
                comm.all_gather(X)

    run_ranks(2, task, timeout=0.5)
    assert of("failing") == []


def test_an_error_names_what_other_communicators_wait_for() -> None:
    messages: list[str] = []

    def task(transport: ThreadTransport) -> None:
        comm = tw.Communicator(transport, name="gradients")
        other = Call(0, "all_reduce", 7, "", "weights")
        if comm.rank == 0:
            with (
                running.noted(other),
                other.stage("static"),
                pytest.raises(tw.CollectiveError) as failed,
            ):
                comm.all_gather(X)
            messages.append(str(failed.value))

    run_ranks(2, task, timeout=0.5)
    (message,) = messages
    assert "; here also: weights: rank 0, all_reduce #7" in message
    assert "stage 'static' for" in message
    assert "gradients" not in message


@pytest.mark.parametrize("name", ["", "gradients"])
def test_an_error_names_other_calls_of_the_same_name(name: str) -> None:
    """Those that wait: a call whose work is under way is in no stage."""
    mine, other, queued = (Call(0, "all_reduce", k, "", name) for k in (6, 7, 8))
    with (
        running.noted(mine),
        running.noted(other),
        running.noted(queued),
        other.stage("exchange"),
        pytest.raises(tw.CollectiveError) as failed,
        mine.stage("static"),
    ):
        raise OSError("late")
    assert "late; here also: " in str(failed.value)
    assert "all_reduce #7" in str(failed.value)
    assert "#8" not in str(failed.value)
    assert str(failed.value).count("#6") == 1


def test_names_are_strings() -> None:
    def task(transport: ThreadTransport) -> None:
        with pytest.raises(TypeError, match="name is 3; allowed: a string"):
            tw.Communicator(transport, name=3)  # type: ignore[arg-type]

    run_ranks(1, task)


PROGRAM = """
import ctypes
from tightwire.adapters.collectives import running
from tightwire.adapters.collectives.calls import Call
running.dump_on_signal()
try:
    running.dump_on_signal()
except ValueError as error:
    print(error, flush=True)
call = Call(3, "all_gather", 5, "", "weights")
with running.noted(call), call.stage("static"):
    print("ready", flush=True)
    # A mutex that is locked twice: it runs no Python code, like a network that hangs.
    mutex, lock = ctypes.create_string_buffer(64), ctypes.CDLL(None).pthread_mutex_lock
    lock(mutex)
    lock(mutex)
"""


def test_a_signal_dumps_while_the_main_thread_hangs() -> None:
    command = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            assert "has a handler" in process.stdout.readline()
            assert process.stdout.readline() == "ready\n"
            for _ in range(2):
                process.send_signal(signal.SIGUSR1)
                lines = [process.stderr.readline() for _ in range(2)]
                assert lines[0] == f"tightwire, process {process.pid}: 1 calls\n"
                assert lines[1].startswith("weights: rank 3, all_gather #5")
        finally:
            process.kill()


FORKS = """
import ctypes, os, sys
from tightwire.adapters.collectives import running
from tightwire.adapters.collectives.calls import Call
running.dump_on_signal()
call = Call(3, "all_gather", 5, "", "weights")
with running.noted(call), call.stage("static"):
    child = os.fork()
    if child:
        os.waitpid(child, 0)
    else:
        print(os.getpid(), len(os.listdir("/proc/self/task")), flush=True)
        sys.stdin.readline()
        own = Call(4, "all_reduce", 0, "", "gradients")
        with running.noted(own), own.stage("sizes"):
            print("ready", flush=True)
            mutex, lock = ctypes.create_string_buffer(64), ctypes.CDLL(None).pthread_mutex_lock
            lock(mutex)
            lock(mutex)
"""


@pytest.mark.slow
@pytest.mark.parametrize("early", [False, True])
def test_a_forked_child_answers_its_own_signals(early: bool) -> None:
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen([sys.executable, "-c", FORKS], text=True, **pipes) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        child = 0
        try:
            child, threads = map(int, process.stdout.readline().split())
            # It may fork in turn: no thread before it is needed.
            assert threads == 1
            if early:
                os.kill(child, signal.SIGUSR1)
                line = process.stderr.readline()
                assert line == f"tightwire, process {child}: 0 calls\n"
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.stdout.readline() == "ready\n"
            calls = {child: "gradients: rank 4", process.pid: "weights: rank 3"}
            for pid, call in calls.items():
                os.kill(pid, signal.SIGUSR1)
                lines = [process.stderr.readline() for _ in range(2)]
                assert lines[0] == f"tightwire, process {pid}: 1 calls\n"
                assert lines[1].startswith(call)
        finally:
            process.kill()
            if child:
                os.kill(child, signal.SIGKILL)


def test_a_signal_is_refused_outside_of_the_main_thread() -> None:
    caught: list[Any] = []

    def other() -> None:
        try:
            dump_on_signal(signal.SIGUSR2)
        except ValueError as error:
            caught.append(error)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert len(caught) == 1
    assert signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL


@pytest.mark.parametrize("trace", [0, 5])
def test_profilers_see_stages_where_calls_are_traced(
    trace: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    pushed: list[str] = []
    popped: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", pushed.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: popped.append(1))

    def prepared(transport: Any) -> None:
        calls = PreparedCalls(transport, trace=trace)
        x, out = np.ones(3000, np.float32), np.empty(6000, np.float32)
        gather = calls.all_gather(x)
        gather(x, out).wait()
        with calls.begin("test", "").stage("ours"):
            pass

    def communicator(transport: Any) -> None:
        comm = tw.Communicator(transport, trace=trace, algorithm="compressed")
        comm.all_gather(np.ones(3000, np.float32))

    for task in (prepared, communicator):
        pushed.clear()
        popped.clear()
        run_ranks(2, task)
        assert len(pushed) == len(popped)
        assert ("tightwire.all_gather.encode" in pushed) == bool(trace)
        assert bool(pushed) == bool(trace)
