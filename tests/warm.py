"""Programs in processes that are forked from one that has imported PyTorch: seconds less of each.

Each process of pytest has such a parent, from the first program on. It has one thread, and runs
nothing itself.
"""

from __future__ import annotations

import atexit
import faulthandler
import functools
import importlib
import importlib.util
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, cast

#: PyTorch asks for names of addresses, which can take seconds where no server knows them.
NO_NAMES = {"RES_OPTIONS": "attempts:0"}
#: What programs import, and wrappers of models when they are used.
IMPORTS = (
    "numba",
    "torch",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor",
    "tightwire.adapters.training.ddp",
    "tightwire.adapters.training.fsdp",
)


class Request(NamedTuple):
    """A program to run.

    Attributes:
        script: Its path.
        words: Its arguments.
        env: All of its environment.
        path: What is in front of ``sys.path``, behind the script's folder.
        folder: Its working directory.
        out: The file of what it prints.
        err: The file of its messages.
        ranks: How many processes run it, as those of torchrun; 0: one, without ranks.
        action: What warnings do, as ``-W`` takes it.
        seconds: After these it is killed.
    """

    script: str
    words: list[str]
    env: dict[str, str]
    path: list[str]
    folder: str
    out: str
    err: str
    ranks: int
    action: str
    seconds: float


class Forked:
    """A process that was forked from this one, used as one that `subprocess` started."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.code: int | None = None

    def poll(self) -> int | None:
        """Its exit code, below 0 for a signal, or None while it runs."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code

    def kill(self) -> None:
        """End it, and wait until it has ended."""
        if self.code is None:
            os.kill(self.pid, signal.SIGKILL)
            self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def run(
    script: str | os.PathLike[str],
    words: Sequence[str] = (),
    *,
    env: Mapping[str, str] | None = None,
    folder: str | os.PathLike[str] = ".",
    ranks: int = 0,
    action: str = "default",
    seconds: float = 240,
) -> subprocess.CompletedProcess[str]:
    """Run a program, as `subprocess.run` with what it prints captured as text.

    Raises:
        TimeoutError: If it has not ended after so many seconds; it was killed then.
    """
    with tempfile.TemporaryDirectory() as place:
        out, err = (str(Path(place) / name) for name in ("out", "err"))
        request = Request(
            str(Path(script).resolve()),
            list(words),
            dict(os.environ | NO_NAMES | {"OMP_NUM_THREADS": "1"} | dict(env or {})),
            [str(Path(__file__).parent), *filter(None, sys.path)],
            str(Path(folder).resolve()),
            out,
            err,
            ranks,
            action,
            seconds,
        )
        code = _ask(_parent(), request)
        texts = [Path(name).read_text(errors="replace") for name in (out, err)]
    return subprocess.CompletedProcess([request.script, *request.words], code, *texts)


def _ask(parent: Connection, request: Request) -> int:
    """The exit code of a program."""
    parent.send(request)
    pid = parent.recv()
    if not parent.poll(request.seconds):
        os.killpg(pid, signal.SIGKILL)
        parent.recv()
        raise TimeoutError(f"{request.script} has not ended within {request.seconds:g} s")
    code: int = parent.recv()
    return code


@functools.cache
def _parent() -> Connection:
    """The process that others are forked from, which ends with this one."""
    ours, theirs = Pipe()
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    process = subprocess.Popen(
        [sys.executable, __file__, str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        env=os.environ | NO_NAMES | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
    )
    theirs.close()

    @atexit.register
    def end() -> None:
        ours.close()
        process.wait()

    return ours


def serve(connection: Connection) -> Request | None:
    """Fork a process for each request, which returns with it; None in the parent, at its end."""
    for name in IMPORTS:
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            importlib.import_module(name)
    one_thread()
    while True:
        try:
            request: Request = connection.recv()
        except (EOFError, ConnectionResetError):
            return None
        pid = os.fork()
        if not pid:
            connection.close()
            os.setpgid(0, 0)
            return request
        connection.send(pid)
        connection.send(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def become(request: Request) -> None:
    """Run the program of a request in this process, or in one for each rank."""
    for name, number in ((request.out, 1), (request.err, 2)):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), number)
    # Lines of ranks stay whole, also if the environment asks for no buffers.
    for stream in cast(Any, (sys.stdout, sys.stderr)):
        stream.reconfigure(line_buffering=True, write_through=False)
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.env)
    if request.ranks:
        _fork_ranks(request.ranks, request.seconds)
    sys.argv[:] = [request.script, *request.words]
    sys.path[:] = [str(Path(request.script).parent), *dict.fromkeys((*request.path, *sys.path))]
    warnings.simplefilter(request.action)  # type: ignore[arg-type]
    faulthandler.enable()
    runpy.run_path(request.script, run_name="__main__")


def _fork_ranks(number: int, seconds: float) -> None:
    """Fork a process for each rank, where this returns; the one that forks ends with them.

    It has the store, as torchrun's agent has.
    """
    import torch.distributed as dist

    host = "127.0.0.1"
    with socket.socket() as found:
        found.bind((host, 0))
        port = found.getsockname()[1]
    common = {"WORLD_SIZE": number, "LOCAL_WORLD_SIZE": number, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in common.items()}
    os.environ |= {"MASTER_ADDR": host, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    processes = []
    for rank in range(number):
        pid = os.fork()
        if not pid:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            return
        processes.append(Forked(pid))
    # Its thread would be missing in processes that are forked later.
    store = dist.TCPStore(host, port, is_master=True, wait_for_workers=False)
    codes = watch(processes, seconds)
    for process in processes:
        process.kill()
    del store
    os._exit(next((1 if code is None else code % 256 for code in codes if code != 0), 0))


def watch(processes: Sequence[Any], seconds: float) -> list[int | None]:
    """Exit codes of processes once all have ended, one has failed, or time is up."""
    deadline = time.monotonic() + seconds
    while any(process.poll() is None for process in processes):
        failed = any(process.poll() for process in processes)
        if failed or time.monotonic() > deadline:
            # The others may be about to fail, and say more of it.
            time.sleep(1)
            break
        time.sleep(0.05)
    return [process.poll() for process in processes]


def one_thread() -> None:
    """Wait until this process has one thread: those forked from it would lack the others."""
    # Threads that have been joined are still about to end.
    until = time.monotonic() + 10
    while (threads := len(os.listdir("/proc/self/task"))) > 1 and time.monotonic() < until:
        time.sleep(0.01)
    assert threads == 1, f"{threads} threads: forked processes would lack some"


if __name__ == "__main__":
    # Requests are pickled as of the module that pytest imports.
    import warm

    if (asked := warm.serve(Connection(int(sys.argv[1])))) is not None:
        warm.become(asked)
