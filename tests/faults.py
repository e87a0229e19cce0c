"""Faults of the system, in processes that tests start: killed at a step, no room in a file."""

from __future__ import annotations

import io
import os
import resource
import signal
from collections.abc import Callable
from typing import Any

#: Calls of `os` that change what is in a folder. `open` counts where it makes a file.
CALLS = ("open", "mkdir", "fchmod", "fsync", "replace", "rename", "unlink", "rmdir")


def kill() -> None:
    """End this process at once."""
    os.kill(os.getpid(), signal.SIGKILL)


def at_call(name: str, after: bool) -> None:
    """Have this process killed before or after a call of `os`."""
    call: Callable[..., Any] = getattr(os, name)

    def killed(*args: Any, **options: Any) -> None:
        if after:
            call(*args, **options)
        kill()

    setattr(os, name, killed)


def limited(nbytes: int, action: Any) -> None:
    """Have no file of this process grow beyond `nbytes`.

    With the action SIG_DFL the system then ends it, with SIG_IGN a write is short and the next one
    fails with EFBIG.
    """
    signal.signal(signal.SIGXFSZ, action)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, most))


def unlimited() -> None:
    """Take the limit away."""
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))


class Steps:
    """Notes each step by which this process changes files from now on, and is killed in one.

    That is before a call of `CALLS`, and in the middle of a write. Without `victim` it lives.
    """

    def __init__(self, victim: int | None = None) -> None:
        self.names: list[str] = []
        self._victim = victim
        for name in CALLS:
            setattr(os, name, self._counted(name, getattr(os, name)))
        fdopen = os.fdopen

        def opened(descriptor: int, mode: str = "r", *args: Any, **options: Any) -> Any:
            if mode != "wb":
                return fdopen(descriptor, mode, *args, **options)
            return io.BufferedWriter(_Written(descriptor, self))

        setattr(os, "fdopen", opened)  # noqa: B010

    def _counted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            if name != "open" or args[1] & os.O_CREAT:
                self.step(name, lambda: None)
            # What is synced outlasts the machine, not only this process.
            return None if name == "fsync" else call(*args, **options)

        return counted

    def step(self, name: str, half: Callable[[], Any]) -> None:
        """Note a step; the victim does half of it."""
        if len(self.names) == self._victim:
            half()
            kill()
        self.names.append(name)


class _Written(io.FileIO):
    """A file whose writes are steps."""

    def __init__(self, descriptor: int, steps: Steps) -> None:
        super().__init__(descriptor, "wb")
        self._steps = steps

    def write(self, data: Any, /) -> int:
        view = memoryview(data).cast("B")
        self._steps.step("write", lambda: super(_Written, self).write(view[: len(view) // 2]))
        return super().write(view)
