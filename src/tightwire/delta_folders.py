"""Deltas in the layout that slime, patched SGLang and ModelExpress read: ``save`` and ``apply``.

A version is a folder ``weight_v000042`` with safetensors files in which a tensor's bytes, uint8
under its own name, are what changed, compressed. The layout is in specs/delta_directory.md. Use it
to talk to these programs; for anything else ``tightwire.save_delta`` takes fewer bytes and knows a
wrong base whatever changed.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import io
import json
import os
import re
import shutil
import zlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .arguments import thread_count
from .buffer import parsed_source
from .codec import codec as make_codec
from .codecs.common.base import Bytes
from .contents import advising, naming, naming_call
from .decoding import decode
from .delta_apply import Change, Update
from .delta_files import check_version, folder_of, writing_to
from .engine import DEFAULT_MAX_NBYTES
from .formats.container import Directory, Entry, directory_bytes, directory_of
from .formats.dtypes import DType
from .formats.errors import FormatError, integer
from .model_index import read_index
from .patches import check_writable, patch_of, writing
from .pipeline import Job, Memory, in_order
from .state_tensors import (
    ArrayState,
    State,
    bytes_of,
    memory_key,
    nbytes_of,
    opened_state,
    opened_target,
)
from .storage import PathLike, Reader, atomic_file, is_temporary, reading, sync_folder

ENCODINGS = ("xor", "overwrite")
COMPRESSIONS = ("zstd", "tightwire")
CHECKSUMS = ("adler32", "xxh3-128", "blake3")
INDEX = "model.safetensors.index.json"
#: What to do about a damaged file.
_ADVICE = "Needed: a copy of the version's folder, or a later version that is whole"
_FOLDER = re.compile(r"weight_v(\d{6,18})", re.ASCII)
#: Positions of the encoding overwrite are uint32, in bytes.
_MAX_OVERWRITE = 1 << 32


def save(
    new: Any,
    base: Any,
    directory: PathLike,
    *,
    version: int,
    base_version: int | None = None,
    encoding: str = "xor",
    compression: str = "zstd",
    checksum: str = "adler32",
    threads: int | None = None,
) -> Path:
    """Write what changed between two states as a folder that these programs read.

    The folder appears under its name at once. Tensors that did not change are left out.

    Args:
        new: As in ``tightwire.save_delta``; names, dtypes and shapes are those of ``base``.
        base: The state that receivers have, in one of these forms.
        directory: Where the folder goes; it is created if it does not exist.
        version: The number of the new version.
        base_version: That of ``base``. None: the one before.
        encoding: ``"xor"``, which applies exactly once, or ``"overwrite"``.
        compression: ``"zstd"``, which needs the package zstandard, or, for ``"xor"`` alone,
            ``"tightwire"``, of about 6/10 of the size, for receivers that know ``decompressor``.
        checksum: ``"adler32"``, or ``"xxh3-128"`` and ``"blake3"``, which need the packages xxhash
            and blake3. ModelExpress reads ``"xor"`` and ``"adler32"``.
        threads: Most threads; None: every processor.

    Returns:
        The path of the folder.

    Raises:
        BlockingIOError: If another process writes to the directory.
        FileExistsError: If the version is there.
        FormatError: If a file that is read is damaged.
        ModuleNotFoundError: If a package is missing.
        OSError: If a file cannot be read or written.
        TypeError: If an argument has a wrong type.
        ValueError: If names, dtypes or shapes differ, or a value is not allowed.
    """
    number = check_version(version)
    old_number = number - 1 if base_version is None else check_version(base_version)
    if not 0 <= old_number < number:
        raise ValueError(f"version is {number} against {old_number}; allowed: an earlier one")
    _allowed("encoding", encoding, ENCODINGS)
    _allowed("compression", compression, COMPRESSIONS)
    hasher(checksum)
    if compression == "zstd":
        _zstandard()
    elif encoding != "xor":
        raise ValueError("encoding is 'overwrite'; allowed with it: compression='zstd'")
    count, folder = thread_count(threads), folder_of(directory)
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"weight_v{number:06}"
    with ExitStack() as stack:
        stack.enter_context(writing_to(folder))
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, "exists: a version is written once", str(target))
        _remove_leftovers(folder)
        state = stack.enter_context(opened_state(new, "new", DEFAULT_MAX_NBYTES))
        old = stack.enter_context(opened_state(base, "base", DEFAULT_MAX_NBYTES))
        _check_same(state, old)

        def job(name: str) -> Job[tuple[str, Bytes | None, str]]:
            def work(memory: Memory, threads: int) -> tuple[str, Bytes | None, str]:
                before, now = bytes_of(old, name), bytes_of(state, name)
                if encoding == "xor":
                    changes = before ^ now
                    packed = changes if changes.any() else None
                else:
                    packed = _overwrite(before, now)
                if packed is None:
                    return name, None, ""
                packed = _compressed(packed, compression, _itemsize(state, name))
                return name, packed, _sum(checksum, now)

            return Job(3 * nbytes_of(state, name), work)

        first: dict[Any, str] = {}
        names = [n for n in state.names if first.setdefault(memory_key(state, n), n) == n]
        with in_order([job(name) for name in names], count) as results:
            found = {name: (packed, text) for name, packed, text in results if packed is not None}
        for name in state.names:
            stored = first[memory_key(state, name)]
            if stored in found:
                found[name] = found[stored]
        metadata = {
            "version": f"{number:06}",
            "base_version": f"{old_number:06}",
            "delta_encoding": encoding,
            "compression_format": compression,
            "checksum_format": checksum,
        }
        _write_folder(folder, target, found, metadata)
    return target


def apply(
    target: Any,
    directory: PathLike,
    *,
    since: int,
    version: int | None = None,
    max_nbytes: int = DEFAULT_MAX_NBYTES,
    threads: int | None = None,
) -> int:
    """Bring tensors in memory from one version to a later one with the folders of a directory.

    Folders are read back from the later version: each one's base, until that is ``since``. A whole
    model needs none.

    Everything is read and checked before the first element is written, so that an error changes
    nothing. The layout has checksums of the tensors that changed, and of no others: a wrong base is
    known by these alone.

    Args:
        target: As in ``tightwire.apply_delta``; its names, dtypes and shapes stay.
        directory: Where the folders are. Folders without ``delta_encoding`` are whole models.
        since: The version that ``target`` is.
        version: The version to come to. None: the newest.
        max_nbytes: Most bytes that one tensor may have. The default is 64 GiB.
        threads: Most threads; None: every processor.

    Returns:
        The version that the tensors have now.

    Raises:
        FormatError: If a file is damaged; with the reason ``"base_mismatch"`` if the result has
            another checksum, or a folder's numbers do not go with its name.
        ModuleNotFoundError: If a package is missing.
        OSError: If a file cannot be read.
        TypeError: If ``target`` is none of these, or cannot be written to.
        ValueError: If a version is missing, no folders lead from ``since`` to the later one, or
            names do not match.
    """
    max_nbytes, since = integer("max_nbytes", max_nbytes, least=0), check_version(since)
    count, folder = thread_count(threads), folder_of(directory)
    with ExitStack() as stack:
        state = stack.enter_context(opened_target(target, max_nbytes))
        goal = _newest(folder, since) if version is None else check_version(version)
        if since > goal:
            raise ValueError(
                f"since is {since}, after version {goal}: deltas lead to later versions"
            )
        steps = _opened_steps(stack, folder, since, goal, state, max_nbytes)
        change = Change({}, {}, [])
        groups: dict[Any, list[str]] = {}
        for name in state.names:
            groups.setdefault(memory_key(state, name), []).append(name)

        def job(names: list[str]) -> Job[Bytes | None]:
            def work(memory: Memory, threads: int) -> Bytes | None:
                return _after(state, steps, names)

            return Job(3 * nbytes_of(state, names[0]), work)

        touched = [
            names for names in groups.values() if any(s.has(n) for s in steps for n in names)
        ]
        with writing(list(state.arrays.values())):
            for names in touched:
                check_writable(state.arrays[names[0]], f"target[{names[0]!r}]")
        with in_order([job(names) for names in touched], count) as results:
            for names, found in zip(touched, results, strict=True):
                name = names[0]
                old = state.bits(name)
                patch = None if found is None else patch_of(old, found.view(old.dtype))
                if patch is not None:
                    change.patches[name] = state.arrays[name], state.kind(name)[0], patch
    Update(goal, since, change, target).write()
    return goal


def decompressor(data: Any, *, max_nbytes: int = DEFAULT_MAX_NBYTES) -> io.BytesIO:
    """Open what ``save`` compresses as ``"tightwire"``; for tables of decompressors in receivers.

    ModelExpress: ``modelexpress_rl.inference.receiver._DECOMPRESSORS["tightwire"] = decompressor``.

    Args:
        data: The compressed bytes of a tensor.
        max_nbytes: Most bytes that the tensor may have. The default is 64 GiB.

    Returns:
        A file object with the XOR of the tensor's new and old bytes.

    Raises:
        FormatError: If they are damaged.
    """
    plan = parsed_source(data, max_nbytes).plan
    base = np.zeros(plan.shape, plan.dtype.numpy) if plan.needs_base else None
    decoded = decode(data, base=base, like="numpy", max_nbytes=max_nbytes)
    return io.BytesIO(decoded.tobytes())


class _Adler32:
    def __init__(self) -> None:
        self._value = 1

    def update(self, data: Any) -> None:
        self._value = zlib.adler32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


def hasher(name: str) -> Any:
    """A new checksum of that name, as those of hashlib. Raises ValueError, ModuleNotFoundError."""
    _allowed("checksum", name, CHECKSUMS)
    if name == "adler32":
        return _Adler32()
    package, kind = ("xxhash", "xxh3_128") if name == "xxh3-128" else ("blake3", "blake3")
    return getattr(_package(package), kind)()


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        text = f"this form of deltas needs {name}: pip install {name}"
        raise ModuleNotFoundError(text, name=name) from error


def _sum(name: str, data: Bytes) -> str:
    found = hasher(name)
    found.update(data.data)
    return str(found.hexdigest())


def _allowed(what: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{what} is {value!r}; allowed: {', '.join(allowed)}")


def _zstandard() -> Any:
    return _package("zstandard")


def _check_same(state: State, old: State) -> None:
    """Refuse states of other names, dtypes and shapes, which the layout cannot tell of."""
    for name in [*state.names, *old.names]:
        held = name in state.names and name in old.names
        if not held or state.kind(name) != old.kind(name):
            raise ValueError(
                f"{name!r} is new, gone or of another dtype or shape. Allowed: states that differ "
                "in values; publish others whole"
            )


def _itemsize(state: State, name: str) -> int:
    dtype = state.kind(name)[0]
    return dtype.itemsize if isinstance(dtype, DType) and dtype.itemsize <= 8 else 1


def _overwrite(before: Bytes, now: Bytes) -> Bytes | None:
    """Count, positions and values of the bytes that changed; None if none did."""
    if now.size > _MAX_OVERWRITE:
        raise ValueError("overwrite has positions of 32 bits. Allowed: encoding='xor'")
    places = np.flatnonzero(before != now).astype("<u4")
    if not places.size:
        return None
    head = np.array([places.size], "<u4")
    return np.concatenate([head.view(np.uint8), places.view(np.uint8), now[places]])


def _compressed(data: Bytes, compression: str, itemsize: int) -> Bytes:
    if compression == "zstd":
        return np.frombuffer(_zstandard().ZstdCompressor(level=1).compress(data), np.uint8)
    # What changed against nothing: places are coded as gaps, and values by their size.
    words = data.view(f"u{itemsize}")
    packed = make_codec("delta").encode(words, base=np.zeros_like(words))
    return np.frombuffer(bytes(packed), np.uint8)


def _remove_leftovers(folder: Path) -> None:
    """Remove what killed processes left: while this one may write, nobody else does."""
    for path in list(folder.iterdir()):
        named = is_temporary(path.name) and _FOLDER.match(path.name, 1)
        if named and path.is_dir() and not path.is_symlink():
            # Those of other users stay.
            with contextlib.suppress(PermissionError):
                shutil.rmtree(path)


def _write_folder(
    folder: Path,
    target: Path,
    found: Mapping[str, tuple[Bytes, str]],
    metadata: Mapping[str, str],
) -> None:
    """Write a version's files to a folder with another name, which then takes its own."""
    temporary = folder / f".{target.name}.{os.urandom(8).hex()}.tmp"
    temporary.mkdir()
    try:
        shard = "model-00000-of-00001.safetensors"
        entries, at = [], 0
        for name, (packed, _) in found.items():
            entries.append(Entry(name, "U8", (packed.size,), at, at + packed.size))
            at += packed.size
        if found:
            with atomic_file(temporary / shard) as file:
                file.write(directory_bytes(entries, {n: text for n, (_, text) in found.items()}))
                for packed, _ in found.values():
                    file.write(packed.data)
        index = {"metadata": dict(metadata), "weight_map": dict.fromkeys(found, shard)}
        with atomic_file(temporary / INDEX) as file:
            file.write(json.dumps(index).encode())
        os.rename(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync_folder(folder)


class _Delta(NamedTuple):
    """What a version's folder has of a tensor, and how it is coded."""

    reader: Reader
    at: int
    nbytes: int
    checksum: str


class _Step:
    """A version in a folder: deltas, or a whole model."""

    def __init__(self, label: str, metadata: Mapping[str, Any]) -> None:
        self.label = label
        self.base_version = int(metadata["base_version"])
        self.encoding = metadata["delta_encoding"]
        self.compression = metadata["compression_format"]
        self.checksum = metadata["checksum_format"]
        self.deltas: dict[str, _Delta] = {}

    def has(self, name: str) -> bool:
        """True if the tensor changes."""
        return name in self.deltas

    def after(self, name: str, before: Bytes) -> Bytes:
        """The tensor's bytes, checked, from those before."""
        delta = self.deltas[name]
        data = delta.reader.read(delta.at, delta.nbytes)
        if self.compression == "tightwire":
            now = self._changed(before, decompressor(data, max_nbytes=before.size))
        else:
            zstandard = _zstandard()
            try:
                now = self._changed(before, zstandard.ZstdDecompressor().stream_reader(data))
            except zstandard.ZstdError as error:
                raise FormatError("bad_container", f"{name!r} is damaged: {error}") from None
        if _sum(self.checksum, now) != delta.checksum:
            detail = (
                f"tensor {name!r} would have another checksum: the tensors are not the version "
                "before, or have this one already"
            )
            raise FormatError("base_mismatch", detail)
        return now

    def _changed(self, before: Bytes, source: Any) -> Bytes:
        if self.encoding == "xor":
            now = before ^ self._read(source, before.size)
            self._check_end(source)
            return now
        count = int(self._read(source, 4).view("<u4")[0])
        if count > before.size:
            raise FormatError("bad_container", f"{count} changes of {before.size} bytes")
        places = self._read(source, 4 * count).view("<u4")
        if count and int(places.max()) >= before.size:
            raise FormatError("bad_container", "a change behind the end of the tensor")
        now = before.copy()
        now[places] = self._read(source, count)
        self._check_end(source)
        return now

    def _check_end(self, source: Any) -> None:
        if source.read(1):
            raise FormatError("bad_container", "the delta goes on behind its end")

    def _read(self, source: Any, nbytes: int) -> Bytes:
        """The next bytes of a decompressor, which may give fewer at a time."""
        pieces, missing = [], nbytes
        while missing and (piece := source.read(missing)):
            pieces.append(piece)
            missing -= len(piece)
        if missing:
            raise FormatError("bad_container", f"the delta is {missing} bytes too short")
        return np.frombuffer(b"".join(pieces), np.uint8)


class _Whole:
    """A version that is a model of its own."""

    def __init__(self, state: State) -> None:
        self.label = state.label
        self._state = state

    def has(self, name: str) -> bool:
        """True: every tensor is there."""
        return True

    def after(self, name: str, before: Bytes) -> Bytes:
        """The tensor's bytes."""
        return bytes_of(self._state, name)


def _after(state: ArrayState, steps: Sequence[_Step | _Whole], names: list[str]) -> Bytes | None:
    """The bytes of a tensor, which has these names, after all steps."""
    data, changed = bytes_of(state, names[0]), False
    for step in steps:
        of_step = [name for name in names if step.has(name)]
        if not of_step:
            continue
        with naming(step.label):
            found = [step.after(name, data) for name in of_step]
            if any(not np.array_equal(found[0], other) for other in found[1:]):
                raise FormatError("bad_container", f"{of_step} are one tensor, and differ")
        data, changed = found[0], True
    return data if changed else None


def _newest(folder: Path, least: int) -> int:
    """The newest version of a directory; `least` if there is none."""
    matches = map(_FOLDER.fullmatch, os.listdir(folder))
    return max((int(match[1]) for match in matches if match), default=least)


def _opened_steps(
    stack: ExitStack, folder: Path, since: int, goal: int, state: ArrayState, max_nbytes: int
) -> list[_Step | _Whole]:
    """What leads from one version to another, first things first. Raises FormatError, ValueError.

    These are the folder of the goal, that of its base, and so on.
    """
    steps: list[_Step | _Whole] = []
    version = goal
    while version > since:
        step = _opened_step(stack, folder, version, state, max_nbytes)
        steps.append(step)
        if isinstance(step, _Whole):
            return steps[::-1]
        version = step.base_version
    if version < since:
        raise ValueError(
            f"no deltas lead from version {since} to {goal} in {folder}: {steps[-1].label} is "
            f"against {version}"
        )
    return steps[::-1]


def _opened_step(
    stack: ExitStack, folder: Path, version: int, state: ArrayState, max_nbytes: int
) -> _Step | _Whole:
    """A version's folder, its headers checked against the tensors. Raises FormatError, ValueError.

    The first is for damage, the other for a version that is missing.
    """
    root = folder / f"weight_v{version:06}"
    if not root.exists():
        raise ValueError(f"{folder} has no version {version}: publish it whole, or load a later")
    with advising(_ADVICE):
        index = read_index(root / INDEX) if (root / INDEX).exists() else None
    metadata = {} if index is None else json.loads(index.text).get("metadata")
    if index is None or not isinstance(metadata, dict) or "delta_encoding" not in metadata:
        found = stack.enter_context(opened_state(root, "version", max_nbytes))
        with naming_call(str(root) if index is not None else f"{root}, without {INDEX},"):
            _check_same(found, state)
        return _Whole(found)
    with naming(str(root)):
        _check_metadata(metadata, version)
        step = _Step(str(root), metadata)
        directories: dict[str, tuple[Reader, Directory, dict[str, Entry]]] = {}
        for name, file in index.weight_map.items():
            if file not in directories:
                reader = stack.enter_context(reading(root / file))
                with advising(_ADVICE), naming(file):
                    directory = directory_of(reader.read, reader.nbytes)
                directories[file] = reader, directory, {e.name: e for e in directory.entries}
            reader, directory, entries = directories[file]
            entry, text = entries.get(name), directory.metadata.get(name)
            if entry is None or not entry.is_buffer or text is None:
                raise FormatError("bad_container", f"{file} has no delta of {name!r}")
            if name not in state.arrays:
                raise ValueError(f"{root} changes {name!r}, which target has not")
            step.deltas[name] = _Delta(reader, directory.data_at + entry.begin, entry.nbytes, text)
    return step


def _check_metadata(metadata: Mapping[str, Any], version: int) -> None:
    """Refuse deltas of another version than the folder's, or against no earlier one.

    Raises FormatError.
    """
    numbers = []
    for key in ("version", "base_version"):
        value = metadata.get(key)
        if not isinstance(value, str) or not re.fullmatch("[0-9]{1,18}", value):
            raise FormatError("bad_container", f"{key} is {value!r:.40}, not a number as text")
        numbers.append(int(value))
    if numbers[0] != version:
        raise FormatError("base_mismatch", f"version is {numbers[0]}; needed here: {version:06}")
    if numbers[1] >= version:
        raise FormatError("base_mismatch", f"base_version is {numbers[1]}; needed: an earlier one")
    for key, allowed in (
        ("delta_encoding", ENCODINGS),
        ("compression_format", COMPRESSIONS),
        ("checksum_format", CHECKSUMS),
    ):
        if metadata.get(key) not in allowed:
            found = f"{key} is {metadata.get(key)!r:.40}; known: {', '.join(allowed)}"
            raise FormatError("bad_container", found)
