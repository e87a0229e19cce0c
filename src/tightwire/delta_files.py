"""The files of a delta directory: which there are, and which lead from one version to another."""

from __future__ import annotations

import errno
import fcntl
import heapq
import os
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from .contents import Contents, advising, naming, read_header
from .file_tensors import FileTensors, Tensors
from .formats.container import MAX_VERSION, BaseNote, StateNote, base_note, state_note
from .formats.errors import FormatError, integer
from .model_index import SUFFIX
from .storage import PathLike, is_path, reading, refuse_link

_NAME = re.compile(rf"weight_v(\d{{6,18}})(?:\.from_v(\d{{6,18}}))?{re.escape(SUFFIX)}", re.ASCII)
#: What a process that writes to the directory has locked.
_LOCK = ".tightwire.lock"
#: What to do about a damaged file.
_ADVICE = "Needed: a copy of the file, or a version stored whole: save_delta(new, None, directory)"


class DeltaFile(NamedTuple):
    """A file of a delta directory. Without `base_version` it has its version whole."""

    path: Path
    version: int
    base_version: int | None
    nbytes: int

    def note(self) -> StateNote:
        """What it says of itself. Raises FormatError, also if its name says something else."""
        with advising(_ADVICE), naming(str(self.path)):
            directory = read_header(self.path)
            return self.check(state_note(directory))

    def check(self, note: StateNote) -> StateNote:
        """`note`, if it goes with the name of the file. Raises FormatError."""
        if (note.version, note.base_version) != (self.version, self.base_version):
            detail = f"it has version {note.version} against {note.base_version}, not what its "
            raise FormatError("bad_container", f"{detail}name says: it was renamed")
        return note

    def base_note(self) -> BaseNote | None:
        """What it says of the file that its deltas are against."""
        with naming(str(self.path)):
            return base_note(read_header(self.path))


def file_name(version: int, base_version: int | None = None) -> str:
    """The name of a file."""
    middle = "" if base_version is None else f".from_v{base_version:06}"
    return f"weight_v{version:06}{middle}{SUFFIX}"


def delta_files(folder: PathLike) -> list[DeltaFile]:
    """The files in a directory, the newest version first. Raises OSError."""
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            match = _NAME.fullmatch(entry.name)
            if match is None or not entry.is_file():
                continue
            version, base = int(match[1]), None if match[2] is None else int(match[2])
            if entry.name == file_name(version, base) and (base is None or base < version):
                path = Path(folder) / entry.name
                found.append(DeltaFile(path, version, base, entry.stat().st_size))
    return sorted(found, key=lambda f: (f.version, f.base_version is None, f.base_version or 0))[
        ::-1
    ]


def newest_version(directory: PathLike) -> int | None:
    """The newest version; None if there is none, or no directory. Raises OSError."""
    try:
        files = delta_files(directory)
    except FileNotFoundError:
        return None
    return files[0].version if files else None


def folder_of(directory: PathLike) -> Path:
    """The path of a directory. Raises TypeError for anything else."""
    if not is_path(directory):
        raise TypeError(f"directory is {directory!r}; allowed: a path")
    return Path(directory)


def check_version(version: int) -> int:
    """`version`, a number that a version may have. Raises TypeError or ValueError."""
    number = integer("version", version, least=0)
    if number > MAX_VERSION:
        raise ValueError(f"version is {version}; allowed: at most {MAX_VERSION}")
    return number


def versions_text(files: Collection[DeltaFile]) -> str:
    """The versions that there are, in words."""
    known = sorted({file.version for file in files})
    if not known:
        return "it holds none"
    return f"it holds {known[0]}" + (f" to {known[-1]}" if len(known) > 1 else "")


def route(files: Sequence[DeltaFile], target: int, since: int | None) -> list[DeltaFile] | None:
    """The files that make version `target` of `since`, or from nothing, in the fewest bytes.

    They are to be read in this order. None if they do not.
    """
    steps: dict[int | None, list[DeltaFile]] = {}
    for file in files:
        steps.setdefault(file.base_version, []).append(file)
    # Of each version so far the bytes, the number of files and the last of them.
    waiting: list[tuple[int, int, int | None]] = [(0, 0, since)]
    best: dict[int | None, tuple[int, DeltaFile | None]] = {since: (0, None)}
    while waiting:
        nbytes, hops, version = heapq.heappop(waiting)
        if version == target:
            break
        for file in steps.get(version, []):
            total = nbytes + file.nbytes
            if file.version not in best or total < best[file.version][0]:
                best[file.version] = total, file
                heapq.heappush(waiting, (total, hops + 1, file.version))
    if target not in best:
        return None
    found: list[DeltaFile] = []
    last = best[target][1]
    while last is not None:
        found.append(last)
        last = best[last.base_version][1] if last.base_version != since else None
    return found[::-1]


class VersionTensors(FileTensors):
    """The tensors of a version, and what its file says of them."""

    note: StateNote


def open_route(
    stack: ExitStack, files: Sequence[DeltaFile], base: Tensors | None, max_nbytes: int
) -> list[VersionTensors]:
    """The tensors of files of a route, each against those before, the first against `base`.

    Raises FormatError, also if a file does not go with the one before, and OSError.
    """
    found: list[VersionTensors] = []
    for file in files:
        reader = stack.enter_context(reading(file.path))
        with advising(_ADVICE), naming(reader.name):
            contents = Contents(reader)
            note = file.check(state_note(contents.directory))
            if note.digests.keys() != set(contents.names()):
                raise FormatError("bad_container", "it has digests of other tensors than it holds")
            if found and note.base_digests != found[-1].note.digests:
                detail = f"it was made against another version {note.base_version} than the one in "
                raise FormatError("base_mismatch", f"{detail}{found[-1].label}")
        tensors = VersionTensors(reader, max_nbytes, contents)
        tensors.note, tensors.base = note, found[-1] if found else base
        found.append(tensors)
    return found


@contextmanager
def writing_to(folder: PathLike) -> Iterator[None]:
    """The right to write to a directory, which one process at a time has.

    Raises BlockingIOError if another one has it, and OSError.
    """
    lock = Path(folder) / _LOCK
    refuse_link(lock)
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(lock, flags, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            message = "another process writes to this delta directory: try again when it is done"
            raise BlockingIOError(errno.EAGAIN, message, os.fsdecode(folder)) from None
        yield
    finally:
        os.close(descriptor)
