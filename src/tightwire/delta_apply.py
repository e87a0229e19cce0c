"""What delta directories hold is read: ``apply_delta``, ``prepare_delta`` and ``load_delta``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from . import arrays
from .arguments import thread_count
from .codecs.common.base import Bits
from .delta_files import (
    DeltaFile,
    VersionTensors,
    check_version,
    delta_files,
    folder_of,
    open_route,
    route,
    versions_text,
)
from .engine import DEFAULT_MAX_NBYTES
from .file_tensors import Tensors, kind_text
from .formats.container import StateNote
from .formats.dtypes import DType
from .formats.errors import FormatError, integer
from .overlaps import check_overlaps, overlapping
from .patches import Patch, check_writable, patch_of, write_patch, writing
from .pipeline import Job, Memory, in_order
from .state_tensors import (
    ArrayState,
    FilesState,
    State,
    differing,
    digest,
    digests_of,
    is_module,
    memory_key,
    nbytes_of,
    opened_target,
)
from .storage import PathLike


def apply_delta(
    target: Any,
    directory: PathLike,
    *,
    version: int | None = None,
    since: int | None = None,
    whole: bool = False,
    max_nbytes: int = DEFAULT_MAX_NBYTES,
    threads: int | None = None,
) -> int:
    """Bring tensors in memory from the version that they are to the newest of a delta directory.

    Which version they are is told by their digests. Everything is read, decoded and checked before
    the first element is written, so that an error changes nothing. Tensors that have that version
    already are left alone.

    Args:
        target: Names to arrays of NumPy, PyTorch or CuPy, which are written in place, or a
            ``torch.nn.Module``. Of a dict, entries are added, removed and replaced where the
            version has other names, dtypes or shapes.
        directory: The delta directory.
        version: The version to come to. None: the newest.
        since: The version that ``target`` is said to be: an error if it is another one, such as
            after a delta was applied twice. None: any that the directory knows.
        whole: Whether tensors that no deltas lead on from are overwritten with a version that is
            stored whole, and the deltas from there.
        max_nbytes: Most bytes that one tensor may have. The default is 64 GiB.
        threads: Most threads; None: every processor.

    Returns:
        The version that the tensors have now.

    Raises:
        FormatError: If a file is damaged; with the reason ``"base_mismatch"`` if the tensors are
            not the version that they should be.
        OSError: If a file cannot be read.
        TypeError: If ``target`` is none of these, or cannot be written to.
        ValueError: If there is no such version, no deltas lead to it, or names, dtypes or shapes of
            a module do not match.
    """
    update = prepare_delta(
        target,
        directory,
        version=version,
        since=since,
        whole=whole,
        max_nbytes=max_nbytes,
        threads=threads,
    )
    update.write()
    return update.version


def prepare_delta(
    target: Any,
    directory: PathLike,
    *,
    version: int | None = None,
    since: int | None = None,
    whole: bool = False,
    max_nbytes: int = DEFAULT_MAX_NBYTES,
    threads: int | None = None,
) -> Update:
    """Do what ``apply_delta`` does up to the first write: read, decode and check.

    Meanwhile others may read the tensors: they only have to pause for ``Update.write``.

    Args:
        target: As in ``apply_delta``. It must not change before ``Update.write``.
        directory: As in ``apply_delta``.
        version: As in ``apply_delta``.
        since: As in ``apply_delta``.
        whole: As in ``apply_delta``.
        max_nbytes: As in ``apply_delta``.
        threads: As in ``apply_delta``.

    Returns:
        What is left to be written.

    Raises:
        FormatError: As ``apply_delta``.
        OSError: As ``apply_delta``.
        TypeError: As ``apply_delta``.
        ValueError: As ``apply_delta``.
    """
    max_nbytes = integer("max_nbytes", max_nbytes, least=0)
    count = thread_count(threads)
    with ExitStack() as stack:
        state = stack.enter_context(opened_target(target, max_nbytes))
        folder = folder_of(directory)
        files = delta_files(folder)
        goal = goal_of(folder, files, version)
        digests = digests_of(state, count)
        damaged: dict[Path, FormatError] = {}
        found = _version_of(files, digests, since, goal, damaged)
        # They are done without where others lead on.
        damage = next(iter(damaged.values()), None)
        files = [file for file in files if file.path not in damaged]
        if found is None and not whole:
            raise damage or _unknown_version(folder, files, digests, since)
        if found == goal:
            return Update(goal, found, Change({}, {}, []), target)
        path = None if found is None or found > goal else route(files, goal, found)
        base: State | None = state if path is not None else None
        if path is None:
            if not whole:
                assert found is not None
                raise damage or ValueError(_no_route(folder, found, goal))
            found, path = None, route(files, goal, None)
            if path is None:
                raise damage or ValueError(f"{folder}: no version up to {goal} is stored whole")
        chain = open_route(stack, path, base, max_nbytes)
        if base is not None and chain[0].note.base_digests != digests:
            raise _unknown_version(folder, files, digests, found)
        check_fit(target, state, chain[-1])
        return Update(goal, found, _change(state, digests, chain, count), target)


class Change(NamedTuple):
    """What is to be written: patches with their arrays, new entries, and names that vanish.

    `decodings` write to the other arrays that change: buffers on a GPU are decoded over them.
    """

    patches: dict[str, tuple[Any, DType | str, Patch]]
    entries: dict[str, Any]
    vanished: list[str]
    decodings: Sequence[Decoding] = ()


class Decoding(NamedTuple):
    """A write that is left to be done, to arrays by name, and the bytes of memory that it holds."""

    arrays: Mapping[str, Any]
    nbytes: int
    write: Callable[[], None]


class Update:
    """Checked values of a version that are left to be written.

    ``prepare_delta`` and ``Subscriber.receive`` make it.

    Args:
        version: The version that the tensors will have.
        since: The version that they have; None if they are overwritten whatever they are.
        change: What is to be written.
        target: The dict that gets and loses entries.

    Attributes:
        names: Tensors that will change, appear or vanish.
        nbytes: Bytes of memory that this holds.
        written: Whether ``write`` has returned.
    """

    def __init__(self, version: int, since: int | None, change: Change, target: Any) -> None:
        self.version = version
        self.since = since
        written = [*change.patches, *chain.from_iterable(d.arrays for d in change.decodings)]
        self.names = [*written, *change.entries, *change.vanished]
        self.nbytes = sum(patch.nbytes for _, _, patch in change.patches.values())
        self.nbytes += sum(decoding.nbytes for decoding in change.decodings)
        self.written = False
        self._change: Change | None = change
        self._target = target

    def write(self) -> None:
        """Write them.

        Raises:
            FormatError: If tensors on a GPU have changed since, to which differences are added.
            ValueError: If that was done before, or ``drop`` was called.
        """
        if self._change is None:
            done = "written" if self.written else "dropped"
            raise ValueError(f"these values have been {done}: prepare or receive the next ones")
        change, self._change = self._change, None
        arrays_written = [x for x, _, _ in change.patches.values()]
        for decoding in change.decodings:
            arrays_written += decoding.arrays.values()
        with writing(arrays_written):
            for decoding in change.decodings:
                decoding.write()
            for x, dtype, patch in change.patches.values():
                write_patch(x, dtype, patch)
        for name in change.vanished:
            del self._target[name]
        for name, x in change.entries.items():
            self._target[name] = x
        self.written = True

    def drop(self) -> None:
        """Free the memory; nothing will be written."""
        self._change = None


def load_delta(
    directory: PathLike,
    *,
    version: int | None = None,
    like: Any = "numpy",
    max_nbytes: int = DEFAULT_MAX_NBYTES,
    threads: int | None = None,
) -> dict[str, Any]:
    """Load a version of a delta directory: one that is stored whole, and the deltas from there.

    Args:
        directory: The delta directory.
        version: Its number. None: the newest.
        like: An array or a library's name, which says where the tensors go.
        max_nbytes: Most bytes that one tensor may have. The default is 64 GiB.
        threads: Most threads; None: every processor.

    Returns:
        Names to arrays. Tied names have one array.

    Raises:
        FormatError: If a file is damaged.
        OSError: If a file cannot be read.
        TypeError: If an argument has a wrong type.
        ValueError: If there is no such version, or none before it is stored whole.
    """
    tensors: dict[str, Any] = {}
    goal = arrays.target_of(like)
    max_nbytes = integer("max_nbytes", max_nbytes, least=0)
    count = thread_count(threads)
    with version_opened(directory, version, max_nbytes) as (state, note):
        made: dict[Any, Any] = {}
        for name in state.names:
            memory = state.memory(name)
            if memory not in made:
                bits = _checked_bits(state, note, name, count)
                made[memory] = array_of(bits, *state.kind(name), goal)
            tensors[name] = made[memory]
    return tensors


@contextmanager
def version_opened(
    directory: PathLike, version: int | None, max_nbytes: int
) -> Iterator[tuple[State, StateNote]]:
    """A version of a directory, made from one that is stored whole."""
    folder = folder_of(directory)
    files = delta_files(folder)
    goal = goal_of(folder, files, version)
    path = route(files, goal, None)
    if path is None:
        raise ValueError(f"{folder}: no version up to {goal} is stored whole")
    with ExitStack() as stack:
        chain = open_route(stack, path, None, max_nbytes)
        yield FilesState(chain[-1].label, chain[-1:]), chain[-1].note


def goal_of(folder: Path, files: list[DeltaFile], version: int | None) -> int:
    """The version that is asked for."""
    if version is None:
        if not files:
            raise ValueError(f"{folder} holds no versions: save_delta writes them")
        return files[0].version
    number = check_version(version)
    if all(file.version != number for file in files):
        raise ValueError(f"{folder} has no version {number}: {versions_text(files)}")
    return number


def _version_of(
    files: list[DeltaFile],
    digests: Mapping[str, str],
    since: int | None,
    goal: int,
    damaged: dict[Path, FormatError],
) -> int | None:
    """The version that tensors of these digests are; None if unknown.

    Of several it is the last one that is not after `goal`, or else the first one after it. Files
    whose headers are found damaged come to `damaged`.
    """
    notes: dict[Path, StateNote] = {}
    pairs = [(v, file) for file in files for v in (file.version, file.base_version)]
    known = [(v, file) for v, file in pairs if v is not None and since in (None, v)]
    for version, file in sorted(known, key=lambda pair: (pair[0] > goal, abs(goal - pair[0]))):
        if file.path in damaged:
            continue
        try:
            note = notes[file.path] = notes.get(file.path) or file.note()
        except FormatError as error:
            damaged[file.path] = error
            continue
        if digests == (note.digests if version == file.version else note.base_digests):
            return version
    return None


def _unknown_version(
    folder: Path, files: list[DeltaFile], digests: Mapping[str, str], since: int | None
) -> FormatError:
    newest = files[0].version
    found = None if since is None else _version_of(files, digests, None, newest, {})
    advice = "whole=True overwrites them, if a version is stored whole"
    if found is not None:
        detail = f"the tensors are version {found} of {folder} and not {since}; leave out since"
    elif since is not None:
        detail = f"the tensors are not version {since} of {folder}; {advice}"
    else:
        names = differing(files[0].note().digests, digests)
        detail = f"{folder} lacks the version that the tensors are: of {newest} {names}; "
        detail += advice
    return FormatError("base_mismatch", detail)


def _no_route(folder: Path, found: int, goal: int) -> str:
    if found > goal:
        where = f"the tensors are version {found} of {folder}, which is after {goal}"
    else:
        where = f"no deltas lead from version {found} to {goal} in {folder}"
    return f"{where}; whole=True overwrites them with a version that is stored whole"


def check_fit(target: Any, state: ArrayState, new: Tensors) -> None:
    """Refuse names, dtypes and shapes that a target cannot take."""
    if not is_module(target):
        old, wanted = set(state.names), set(new.names)
        same = old == wanted and all(state.kind(n) == new.kind(n) for n in old)
        if not same and not isinstance(target, MutableMapping):
            raise TypeError("target cannot be changed, and the version has other names or shapes")
        return
    kind = type(target).__name__
    known = set(new.names)
    for name in [*state.names, *(n for n in new.names if n not in state.arrays)]:
        if name not in state.arrays or name not in known:
            where = "the version" if name in known else kind
            raise ValueError(f"{name!r} is only in {where}: names of a module must match")
        if state.kind(name) != new.kind(name):
            found, needed = kind_text(*state.kind(name)), kind_text(*new.kind(name))
            raise ValueError(f"{name!r} of {kind} is {found}, that of the version {needed}")


def changes(
    state: ArrayState, digests: Mapping[str, str], new: Tensors, wanted: Mapping[str, str]
) -> tuple[list[str], list[str], list[str]]:
    """Names that become new entries, names of arrays that are written to, names that vanish.

    Digests are those of the state, and `wanted` those of `new`. Of names that share memory one is
    written to. Raises TypeError or ValueError for arrays that cannot be.
    """
    entries, changed = [], []
    held: dict[Any, str] = {}
    for name in new.names:
        if name not in state.arrays or state.kind(name) != new.kind(name):
            entries.append(name)
            continue
        other = held.setdefault(memory_key(state, name), name)
        if wanted[other] != wanted[name]:
            raise ValueError(f"{other!r} and {name!r} share memory, and the version has two values")
        if other == name and digests[name] != wanted[name]:
            changed.append(name)
    with writing(list(state.arrays.values())):
        for name in changed:
            check_writable(state.arrays[name], f"target[{name!r}]")
    return entries, changed, [name for name in state.names if name not in wanted]


def _change(
    state: ArrayState,
    digests: Mapping[str, str],
    chain: Sequence[VersionTensors],
    threads: int,
) -> Change:
    """Decode and check the last version of a chain; what of it is new."""
    last, note = FilesState(chain[-1].label, chain[-1:]), chain[-1].note
    entries, changed, vanished = changes(state, digests, last, note.digests)
    change = Change({}, {}, vanished)
    place = place_of(state)
    made: dict[Any, Any] = {}
    for name in entries:
        memory = last.memory(name)
        if memory not in made:
            bits = _checked_bits(last, note, name, threads)
            made[memory] = array_of(bits, *last.kind(name), place)
        change.entries[name] = made[memory]

    def job(name: str) -> Job[tuple[str, Patch | None]]:
        def work(memory: Memory, threads: int) -> tuple[str, Patch | None]:
            bits = _checked_bits(last, note, name, threads)
            return name, patch_of(state.bits(name, threads), bits)

        return Job(3 * nbytes_of(state, name), work)

    with in_order([job(name) for name in changed], threads) as results:
        for name, patch in results:
            if patch is not None:
                change.patches[name] = state.arrays[name], state.kind(name)[0], patch
    kept = {name: value for name, value in note.digests.items() if name not in change.entries}
    check_overlaps(state, overlapping(state), change.patches, kept)
    return change


def _checked_bits(state: State, note: StateNote, name: str, threads: int) -> Bits:
    """The elements of a tensor, which have the digest that the file says."""
    bits: Bits = state.bits(name, threads)
    if digest(bits) != note.digests[name]:
        detail = f"{state.label}: tensor {name!r} has not the digest that the file gives"
        raise FormatError("bad_container", detail)
    return bits


def place_of(state: ArrayState) -> arrays.Target:
    """Where new arrays beside these go."""
    for x in state.arrays.values():
        return arrays.target_of(x.view(sys.modules["torch"].uint8) if arrays.is_float4(x) else x)
    return arrays.Target()


def array_of(bits: Bits, dtype: DType | str, shape: tuple[int, ...], target: arrays.Target) -> Any:
    """An array of any element type that a file may have."""
    if not isinstance(dtype, DType):
        return arrays.from_packed(bits.view(np.uint8), dtype, shape, target)
    return arrays.from_bits(bits, dtype, shape, target)
