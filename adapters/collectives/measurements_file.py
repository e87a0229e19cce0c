"""The file of ``KeptMeasurements``: a thread writes it, so that no call waits for that."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ...storage import atomic_file

#: Version of the file.
_FORMAT = 1
#: Seconds in which measurements are collected before they are written.
_PAUSE = 0.2
#: Seconds that the thread waits for another process that writes the file, and ``finish`` for all.
_PATIENCE, _MOMENT = 10.0, 1.0

#: Measurements by what they are of, the text of the rank that has them, and their key.
Found = dict[str, dict[str, dict[str, Any]]]
#: Text of the group and of the rank, the key, and what was measured.
_Entry = tuple[str, str, str, Any]


class MeasurementsFile:
    """A file of measurements, and what this process has not written to it yet.

    What is added is soon written by a thread. If that fails, a RuntimeWarning says so, once, and it
    is tried again with what is added next, and by ``finish``. A program waits for its threads
    before it ends.

    Args:
        path: The file, absolute and without links.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        #: Of the two that follow.
        self._guard = threading.Lock()
        self._waiting: list[_Entry] = []
        self._thread: threading.Thread | None = None
        self._warned = False

    def read(self) -> Found:
        """What is in the file, and what is still to be written.

        Raises:
            OSError: If it cannot be read, or its folder is missing.
            ImportError: If the package filelock is missing.
        """
        # A missing package is to be an error of the start.
        _lock(self._path)
        waiting = list(self._waiting)
        try:
            found = self._read()
        except ValueError as error:
            warnings.warn(
                f"{str(self._path)!r} is damaged or no file of measurements ({error}); it is "
                "measured anew, and replaced",
                RuntimeWarning,
                stacklevel=3,
            )
            found = {}
        return _with(found, waiting)

    def add(self, group: str, rank: int, key: str, found: Any) -> None:
        """Have a measurement be written. Waits for nothing.

        Args:
            group: What it is of.
            rank: The rank that has it.
            key: Says what was measured.
            found: Numbers, in lists and dicts.
        """
        with self._guard:
            self._waiting.append((group, str(rank), key, found))
            self._start()

    def finish(self) -> None:
        """Wait a moment until all is written; what failed before is tried again."""
        with self._guard:
            if self._waiting:
                self._start()
            thread = self._thread
        if thread is not None and thread.is_alive():
            thread.join(_MOMENT)

    def _start(self) -> None:
        """Have a thread write, if none does."""
        # That of a process that was forked is not alive here.
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="tightwire measurements")
            # A process may have as many threads as it can: then the next one writes.
            with contextlib.suppress(RuntimeError):
                self._thread.start()

    def _run(self) -> None:
        """Write until nothing waits, or that fails."""
        problem: OSError | None = None
        while True:
            time.sleep(_PAUSE)
            count = len(self._waiting)
            try:
                self._write(self._waiting[:count])
            except OSError as error:
                problem, count = error, 0
            with self._guard:
                del self._waiting[:count]
                if not self._waiting or problem is not None:
                    self._thread = None
                    break
        if problem is not None and not self._warned:
            self._warned = True
            warnings.warn(
                f"measurements are not kept in {str(self._path)!r} ({type(problem).__name__}: "
                f"{problem}); the next program measures anew",
                RuntimeWarning,
                stacklevel=2,
            )

    def _write(self, entries: Iterable[_Entry]) -> None:
        with _lock(self._path):
            whole: Found = {}
            # Other programs write to it, too.
            with contextlib.suppress(ValueError):
                whole = self._read()
            with atomic_file(self._path) as file:
                file.write(packed(_with(whole, entries)))

    def _read(self) -> Found:
        """What is in the file; ValueError if it is damaged."""
        try:
            return _unpacked(self._path.read_bytes())
        except FileNotFoundError:
            if not self._path.parent.is_dir():
                raise
            return {}


#: By path: threads that are ranks share one.
_files: dict[Path, MeasurementsFile] = {}


def measurements_file(path: str | os.PathLike[str]) -> MeasurementsFile:
    """The file of this path; the same one for all links to it.

    Args:
        path: The path.

    Raises:
        TypeError: If it is not text.
        ValueError: If no file can have it.
    """
    place = Path(absolute(path))
    return _files.setdefault(place, MeasurementsFile(place))


def absolute(path: str | os.PathLike[str]) -> str:
    """A path without links, which means the same file whatever the working directory is later.

    Args:
        path: The path.

    Raises:
        ValueError: If no file can have it.
    """
    if not os.fspath(path):
        raise ValueError("measurements is ''; allowed: the path of a file, or None")
    return os.path.realpath(path)


def packed(found: Any) -> bytes:
    """The bytes of a file.

    Args:
        found: What it has.
    """
    body = json.dumps(found, indent=1).encode()
    return _head(body) + b"\n" + body


def _unpacked(data: bytes) -> Found:
    """What a file has; ValueError if it is damaged."""
    head, _, body = data.partition(b"\n")
    if head != _head(body):
        raise ValueError(f"no measurements of version {_FORMAT}, or a wrong checksum")
    found: Found = json.loads(body)
    # Groups, their ranks, and what each has.
    level: list[Any] = [found]
    for _ in range(3):
        if not all(isinstance(one, dict) for one in level):
            raise ValueError("no measurements of groups and ranks")
        level = [inner for one in level for inner in one.values()]
    return found


def _with(found: Found, entries: Iterable[_Entry]) -> Found:
    """`found`, and what is to be added."""
    for group, rank, key, value in entries:
        found.setdefault(group, {}).setdefault(rank, {})[key] = value
    return found


def _lock(path: Path) -> Any:
    """A lock among the processes that write to a file."""
    from filelock import FileLock

    return FileLock(path.with_name(f"{path.name}.lock"), timeout=_PATIENCE)


def _head(body: bytes) -> bytes:
    digest = hashlib.blake2b(body, digest_size=16).hexdigest()
    return f"tightwire measurements {_FORMAT} {digest}".encode()
