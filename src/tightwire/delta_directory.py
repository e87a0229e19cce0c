"""Delta directories: versions of weights, each as a file of what changed since the one before.

``save_delta`` adds a version, ``apply_delta`` brings tensors in memory up to one. A version appears
atomically, and all is checked before tensors are written. The layout is in
specs/delta_directory.md.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from .arguments import thread_count
from .codec import Codec, as_lossless
from .codec import codec as make_codec
from .delta_apply import goal_of, version_opened
from .delta_files import (
    DeltaFile,
    check_version,
    delta_files,
    file_name,
    folder_of,
    writing_to,
)
from .engine import DEFAULT_MAX_NBYTES
from .file_tensors import check_chain_limit
from .formats.container import (
    MAX_DELTAS,
    STATE_KEY,
    BaseNote,
    StateNote,
)
from .formats.errors import FormatError, integer
from .state_files import write_state
from .state_tensors import State, differing, digests_of, opened_state
from .storage import PathLike, is_path

#: Files of deltas in a row, before one has a version whole.
CHAIN_LIMIT = 16


def save_delta(
    new: Any,
    base: Any,
    directory: PathLike,
    *,
    version: int | None = None,
    form: str = "adaptive",
    codec: str | Codec = "zipccl",
    chain_limit: int = CHAIN_LIMIT,
    threads: int | None = None,
) -> int:
    """Add a version of weights to a delta directory, as what changed since the newest one there.

    The file of a version appears under its name at once: readers see all of it or nothing, and
    whatever fails before leaves the directory as it was. Tensors that are new or have another dtype
    or shape are stored whole. After ``chain_limit`` versions in a row that are stored as deltas,
    the version is also stored whole, in a second file.

    A save that is repeated with the same tensors changes nothing, whatever ``base`` is of those
    below, or writes the second file if that is still missing. Where the newest version is these
    tensors and is only there as a delta, ``base=None`` stores it whole as well. One process at a
    time may write to a directory.

    Args:
        new: Names to arrays, a ``torch.nn.Module``, or the path of a safetensors file or of a
            model's directory, compressed or not. Names that share memory (tied weights) are stored
            once. Tensors must not change during the call.
        base: The newest version that the directory has, in one of these forms, or the directory
            itself. In a directory without versions it is the one that receivers have, and is not
            stored. None: the new version is stored whole, and deltas can follow.
        directory: A path; it is created if it does not exist.
        version: The number of the new version, also of one that has the same tensors as the one
            before. None: the one after the newest, if tensors have changed; in a directory without
            versions 1, or 0 if ``base`` is None.
        form: That of codec ``delta``: ``"adaptive"``, ``"difference"``, or ``"overwrite"``, which
            takes more bytes and whose buffers ``tightwire.fold`` folds without a base.
        codec: A lossless codec or its name, for tensors that are stored whole.
        chain_limit: Most deltas in a row, 1 to 256.
        threads: Most threads; None: every processor.

    Returns:
        The number of the version.

    Raises:
        BlockingIOError: If another process writes to the directory.
        FormatError: If a file that is read is damaged.
        OSError: If a file cannot be read or written.
        TypeError: If an argument has a wrong type.
        ValueError: If ``base`` is not the newest version there, or a value is not allowed.

    Example:
        >>> import numpy as np
        >>> import tightwire as tw
        >>> old = {"w": np.zeros(10_000, np.float32)}
        >>> new = {"w": old["w"].copy()}
        >>> new["w"][::100] = 1e-3
        >>> tw.save_delta(old, None, "versions"), tw.save_delta(new, old, "versions")
        (0, 1)
        >>> tw.apply_delta(old, "versions")
        1
        >>> bool((old["w"] == new["w"]).all())
        True
    """
    chosen = as_lossless(codec)
    delta = make_codec("delta", form=form)
    check_chain_limit(chain_limit)
    count = thread_count(threads)
    number = None if version is None else check_version(version)
    folder = folder_of(directory)
    with ExitStack() as stack:
        # What cannot be opened leaves no folder.
        state = stack.enter_context(_opened(new, "new"))
        old = None if base is None else stack.enter_context(_opened(base, "base"))
        folder.mkdir(parents=True, exist_ok=True)
        stack.enter_context(writing_to(folder))
        files = delta_files(folder)
        newest = files[0] if files else None
        digests = digests_of(state, count)
        may_repeat = newest is not None and number in (None, newest.version)
        if old is None:
            repeats = may_repeat and _is_newest(files, digests)
            number = files[0].version if repeats else _next_number(folder, files, number, 0)
            whole = DeltaFile(folder, number, None, 0)
            if not repeats or files[0].base_version is not None:
                _write_version(folder, whole, state, digests, chosen, threads=count)
            return number
        old_digests = digests_of(old, count)
        if newest is not None:
            note = newest.note()
            if may_repeat and _repeated(files, digests, old_digests):
                # A save that was killed may have left the second file to be written.
                if _base_note(files, newest.version).deltas > chain_limit:
                    whole = DeltaFile(folder, newest.version, None, 0)
                    _write_version(folder, whole, state, digests, chosen, threads=count)
                return newest.version
            if note.digests != old_digests:
                raise ValueError(_not_newest(folder, newest, note, old_digests))
        number = _next_number(folder, files, number, 1)
        base_version = number - 1 if newest is None else newest.version
        chain = _base_note(files, base_version)
        if chain.deltas > MAX_DELTAS:
            raise ValueError(f"{MAX_DELTAS} deltas in a row in {folder}. Needed: base=None")
        target = DeltaFile(folder, number, base_version, 0)
        _write_version(
            folder, target, state, digests, chosen, delta, old, old_digests, chain, threads=count
        )
        if chain.deltas >= chain_limit:
            whole = DeltaFile(folder, number, None, 0)
            _write_version(folder, whole, state, digests, chosen, threads=count)
    return number


def fold_deltas(
    directory: PathLike,
    first: int,
    last: int | None = None,
    *,
    form: str = "adaptive",
    codec: str | Codec = "zipccl",
    threads: int | None = None,
) -> Path:
    """Add a file that leads from one version of a delta directory to a later one in one step.

    Receivers that lag read it in place of the files between. Both versions must be there whole, or
    as deltas from one that is. A file that leads there already is left alone.

    Args:
        directory: The delta directory.
        first: The version that it is against.
        last: The version that it makes. None: the newest.
        form: As in ``save_delta``.
        codec: As in ``save_delta``.
        threads: As in ``save_delta``.

    Returns:
        The path of the file.

    Raises:
        BlockingIOError: If another process writes to the directory.
        FormatError: If a file is damaged.
        OSError: If a file cannot be read or written.
        TypeError: If an argument has a wrong type.
        ValueError: If a version is not there, or ``first`` is not before ``last``.
    """
    chosen, delta, count = as_lossless(codec), make_codec("delta", form=form), thread_count(threads)
    folder, first = folder_of(directory), check_version(first)
    with ExitStack() as stack:
        # A folder without versions gets no file of a lock.
        goal_of(folder, delta_files(folder), last)
        stack.enter_context(writing_to(folder))
        files = delta_files(folder)
        goal = goal_of(folder, files, last)
        if first >= goal:
            raise ValueError(f"first is {first}, last {goal}; allowed: an earlier version")
        target = DeltaFile(folder, goal, first, 0)
        for file in files:
            if file[1:3] == target[1:3]:
                return file.path
        old, old_note = stack.enter_context(version_opened(folder, first, DEFAULT_MAX_NBYTES))
        new, note = stack.enter_context(version_opened(folder, goal, DEFAULT_MAX_NBYTES))
        return _write_version(
            folder,
            target,
            new,
            note.digests,
            chosen,
            delta,
            old,
            old_note.digests,
            _base_note(files, first),
            threads=count,
        )


def prune_deltas(directory: PathLike, *, keep: int = CHAIN_LIMIT) -> list[Path]:
    """Remove files of old versions from a delta directory.

    Kept are the last version that is stored whole and is at least ``keep`` versions old, and all
    that follows it. So each of the last ``keep`` versions can still be loaded and be led on from.
    Without such a version nothing is removed.

    Args:
        directory: The delta directory.
        keep: How many versions before the newest a receiver may be.

    Returns:
        The files that were removed.

    Raises:
        BlockingIOError: If another process writes to the directory.
        OSError: If a file cannot be removed.
        TypeError: If an argument has a wrong type.
        ValueError: If ``keep`` is negative.
    """
    keep = integer("keep", keep, least=0)
    folder = folder_of(directory)
    removed: list[Path] = []
    if not delta_files(folder):
        return removed
    with writing_to(folder):
        files = delta_files(folder)
        versions = sorted({file.version for file in files})
        oldest = versions[max(0, len(versions) - 1 - keep)] if versions else 0
        whole = [f.version for f in files if f.base_version is None and f.version <= oldest]
        start = max(whole, default=0)
        # The oldest first: what is left after a crash is still a directory of versions.
        for file in files[::-1]:
            kept = file.version > start and (
                file.base_version is None or file.base_version >= start
            )
            if whole and not kept and (file.version, file.base_version) != (start, None):
                file.path.unlink(missing_ok=True)
                removed.append(file.path)
    return removed


@contextmanager
def _opened(source: Any, what: str) -> Iterator[State]:
    """As `opened_state`; a delta directory is its newest version."""
    if is_path(source) and os.path.isdir(source) and delta_files(source):
        with version_opened(source, None, DEFAULT_MAX_NBYTES) as (state, _):
            yield state
        return
    with opened_state(source, what, DEFAULT_MAX_NBYTES) as state:
        yield state


def _next_number(folder: Path, files: list[DeltaFile], number: int | None, first: int) -> int:
    newest = files[0].version if files else None
    if number is None:
        return check_version(first if newest is None else newest + 1)
    if newest is not None and number <= newest:
        raise ValueError(f"version is {number}, and {folder} has {newest}; allowed: a later one")
    if number < first:
        raise ValueError(
            f"version is {number}; allowed: at least {first}, as base is the one before"
        )
    return number


def _repeated(files: list[DeltaFile], new: Mapping[str, str], old: Mapping[str, str]) -> bool:
    """True if the newest version is these tensors, and the base is it or one that leads to it."""
    newest = [file.note() for file in files if file.version == files[0].version]
    bases = [new, *(note.base_digests for note in newest)]
    return newest[0].digests == new and old in bases


def _is_newest(files: list[DeltaFile], new: Mapping[str, str]) -> bool:
    """True if the newest version is these tensors; not if its file is damaged."""
    try:
        return files[0].note().digests == new
    except FormatError:
        return False


def _not_newest(
    folder: Path, newest: DeltaFile, note: StateNote, digests: Mapping[str, str]
) -> str:
    return (
        f"base is not version {newest.version}, the newest in {folder}: "
        f"{differing(note.digests, digests)}. Allowed: the tensors of that version, or base=None, "
        "which stores the new ones whole"
    )


def _base_note(files: Iterable[DeltaFile], base_version: int) -> BaseNote:
    """What a file of deltas against that version says of its base."""
    best = BaseNote(file_name(base_version), 1)
    of_base = [file for file in files if file.version == base_version]
    if of_base and all(file.base_version is not None for file in of_base):
        notes = {file.path.name: file.base_note() for file in of_base}
        counts = {name: 0 if note is None else note.deltas for name, note in notes.items()}
        name = min(counts, key=lambda n: counts[n])
        best = BaseNote(name, counts[name] + 1)
    return best


def _write_version(
    folder: Path,
    target: DeltaFile,
    state: State,
    digests: Mapping[str, str],
    codec: Codec,
    delta: Codec | None = None,
    old: State | None = None,
    old_digests: Mapping[str, str] | None = None,
    chain: BaseNote | None = None,
    *,
    threads: int = 1,
) -> Path:
    """Write the file of a version, against `old` if that is given: its path."""
    before = old_digests or {}
    names = [*state.names, *(name for name in before if name not in digests)]
    pairs = {name: (before.get(name), digests.get(name)) for name in names}
    metadata = {STATE_KEY: StateNote(target.version, target.base_version, pairs).text}
    path = folder / file_name(target.version, target.base_version)
    write_state(path, state, codec, metadata, delta, old, chain, threads=threads)
    return path
