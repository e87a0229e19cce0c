"""Compressed checkpoints of torch.distributed.checkpoint (DCP): ``Writer``, ``Reader``.

A rank writes its tensors as compressed safetensors files, one for each device that they are on.
``tightwire verify`` and ``tightwire.open`` read these; DCP's ``.metadata`` says what is where, so
that a checkpoint loads into any sharding::

    import torch.distributed.checkpoint as dcp

    dcp.save(state, storage_writer=tw.dcp.Writer("step_1000"))
    dcp.load(state, storage_reader=tw.dcp.Reader("step_1000"))

``dcp.async_save`` takes the writer, too. With ``base`` a checkpoint holds what changed since an
earlier one::

    dcp.save(state, storage_writer=tw.dcp.Writer("step_1010", base="step_1000"))
"""

from __future__ import annotations

import io
import itertools
import math
import os
import pickle
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, filesystem
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ... import arrays
from ...arguments import thread_count
from ...codec import Codec, as_lossless
from ...codec import codec as make_codec
from ...contents import Contents, advising, naming
from ...decoding import decode
from ...delta_directory import CHAIN_LIMIT
from ...engine import DEFAULT_MAX_NBYTES, Head, Parsed
from ...file_tensors import check_chain_limit
from ...files import save_file
from ...formats.dtypes import BY_SAFETENSORS
from ...formats.errors import FormatError, integer
from ...formats.header import MAX_NBYTES
from ...loading import fill
from ...model_index import SUFFIX
from ...shards import PlainFile, opened_any, shard_of_any
from ...state_files import write_state
from ...state_tensors import ArrayState
from ...storage import PathLike, atomic_file, is_path, is_url, reading
from .dcp_pieces import (
    DELTA,
    EXTENSION,
    BaseName,
    Checkpoint,
    EarlierTensors,
    OpenFiles,
    entry_name,
    files_of,
    is_ours,
    set_base,
    telling,
)

#: What to do about a damaged checkpoint.
_NEEDED = "Needed: a copy of the checkpoint, or another one, loaded into all of the state"


class Writer(FileSystemWriter):  # type: ignore[misc]
    """Writes a checkpoint whose tensors are compressed without loss, for ``dcp.save``.

    Every rank writes files with names of their own, and ``.metadata``, which replaces an earlier
    one in one step, names them. Whatever fails before that leaves an earlier checkpoint of the
    directory whole. Files that only the earlier one named are removed last.

    With ``base`` each piece of a tensor that the earlier checkpoint has too, with the same offset,
    shape and dtype, is coded by codec ``delta`` against it, on the host, where that takes fewer
    bytes. After a change of the sharding most pieces are stored whole.

    Args:
        path: The directory, made if it is not there.
        codec: A lossless codec or its name.
        base: The directory of an earlier checkpoint of a ``Writer``, which loading then needs.
            None: all tensors are stored whole.
        chain_limit: Most checkpoints with deltas in a row, 1 to 256; after so many ``base`` is not
            used.
        threads: Most threads that encode on the host. None: as many as processors, of which each
            rank of the host has its share where ``torchrun`` has started them.
        overwrite: Whether a checkpoint in ``path`` may be replaced.
        cache_staged_state_dict: As in ``torch.distributed.checkpoint.FileSystemWriter``.

    Raises:
        FormatError: If ``.metadata`` of ``base``, or what it says of its own base, is not valid.
        OSError: If ``base`` cannot be read.
        TypeError: If an argument has a wrong type.
        ValueError: If a value is out of range, the codec is lossy or needs a base, ``path`` is
            ``base`` or one that it needs, ``base`` has no compressed tensor, or one of them is a
            URL.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        codec: str | Codec = "zipccl",
        *,
        base: str | os.PathLike[str] | None = None,
        chain_limit: int = CHAIN_LIMIT,
        threads: int | None = None,
        overwrite: bool = True,
        cache_staged_state_dict: bool = False,
    ) -> None:
        _check_local("path", path)
        super().__init__(path, overwrite=overwrite, cache_staged_state_dict=cache_staged_state_dict)
        self._codec = as_lossless(codec)
        self._threads = thread_count(threads)
        if threads is None:
            # torchrun says how many ranks the host has: all of them encode at once.
            ranks = max(int(os.environ.get("LOCAL_WORLD_SIZE") or 1), 1)
            self._threads = min(self._threads, max((os.cpu_count() or 1) // ranks, 1))
        check_chain_limit(chain_limit)
        self._base: Checkpoint | None = None
        self._base_name: BaseName | None = None
        #: The base and what it needs: saves must not replace them.
        self._needed: list[Path] = []
        if base is not None:
            _check_local("base", base)
            found = Reader(base, threads=threads).checkpoint()
            stored = (found.metadata.storage_data or {}).values()
            if stored and not any(map(is_ours, stored)):
                needed = "allowed: a checkpoint of tightwire.dcp.Writer"
                raise ValueError(
                    f"base is {os.fspath(base)!r}, with no compressed tensor; {needed}"
                )
            self._needed = found.folders()
            self._check_apart(path)
            deltas = 0 if found.note is None else found.note.deltas
            if deltas < chain_limit:
                self._base = found
                self._base_name = BaseName(found.path.resolve().name, deltas + 1)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Start a save; DCP calls it.

        Args:
            checkpoint_id: Another directory than ``path``, from now on.

        Raises:
            TypeError: If it is not a path.
            ValueError: If it is a URL, or the base, or needed by it.
        """
        if checkpoint_id:
            _check_local("checkpoint_id", checkpoint_id)
            self._check_apart(checkpoint_id)
        super().reset(checkpoint_id)

    def _check_apart(self, path: str | os.PathLike[str]) -> None:
        """Refuse to replace the base, or a checkpoint that it needs."""
        if Path(path).resolve() in self._needed:
            raise ValueError(
                f"path is {os.fspath(path)!r}, which is the base or which its deltas are against: "
                "neither would be left. Allowed: another path, or base=None"
            )

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write what ``plan`` gives this rank; DCP calls it.

        Args:
            plan: The items that this rank writes.
            planner: Where their tensors are asked for.

        Returns:
            A future, done, of what was written.

        Raises:
            FormatError: If a file of the base is damaged.
            OSError: If a file cannot be written, or one of the base cannot be read.
            TypeError: If safetensors has no name for the dtype of a tensor.
        """
        results = []
        for number, group in enumerate(_by_device(plan.items, planner)):
            name = f"{plan.storage_data.prefix}{self.save_id[:8]}_{number}{SUFFIX}"
            path = Path(self.path) / name
            tensors = {entry_name(item.index): tensor for item, tensor in group}
            if self._base is None:
                save_file(tensors, path, self._codec, threads=self._threads)
            else:
                advice = "Needed: another base, or base=None, which stores all whole"
                with advising(advice), self._base:
                    self._write_against(EarlierTensors(self._base), tensors, path)
            with reading(path) as reader:
                contents = Contents(reader)
                for item, _ in group:
                    entry = contents.entry(entry_name(item.index))
                    kinds = [EXTENSION]
                    if self._base is not None:
                        head = contents.head(entry.name, MAX_NBYTES)
                        kinds += [DELTA] if head is not None and head.plan.needs_base else []
                    stored = filesystem._StorageInfo(name, entry.begin, entry.nbytes, kinds)
                    results.append(WriteResult(item.index, entry.nbytes, stored))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def _write_against(self, old: EarlierTensors, tensors: dict[str, Any], path: Path) -> None:
        """Write a file of tensors, those that the base has too as what changed."""
        state, delta = ArrayState(tensors), make_codec("delta")
        write_state(path, state, self._codec, {}, delta, old, threads=self._threads)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write ``.metadata``, then remove the files of the checkpoint that it replaces.

        Args:
            metadata: What DCP knows of the state.
            results: What each rank wrote.

        Raises:
            OSError: If a file cannot be written, or an earlier one not be removed: then the new
                checkpoint is in place.
        """
        stored = {result.index: result.storage_data for of_rank in results for result in of_rank}
        metadata.version = getattr(filesystem, "CURRENT_DCP_VERSION", None)
        metadata.storage_data = stored
        metadata.storage_meta = self.storage_meta()
        has_deltas = any(DELTA in info.transform_descriptors for info in stored.values())
        if self._base_name is not None and has_deltas:
            set_base(metadata, self._base_name)
        path = self._get_metadata_path(None if self.use_collectives else self.rank)
        earlier = files_of(path)
        with atomic_file(path) as file:
            pickle.dump(metadata, file)
        for name in earlier - {info.relative_path for info in stored.values()}:
            (Path(self.path) / name).unlink(missing_ok=True)


def _by_device(
    items: Iterable[WriteItem], planner: SavePlanner
) -> list[list[tuple[WriteItem, Any]]]:
    """Items with their tensors, those of one device together; bytes are tensors of the host."""
    groups: dict[torch.device, list[tuple[WriteItem, Any]]] = {}
    for item in items:
        data = planner.resolve_data(item)
        if item.type == WriteItemType.BYTE_IO:
            if not isinstance(data, io.BytesIO):
                raise TypeError(f"{item.index.fqn}: Expected io.BytesIO, got {type(data).__name__}")
            data = torch.from_numpy(np.frombuffer(data.getvalue(), np.uint8).copy())
        groups.setdefault(data.device, []).append((item, data.detach()))
    return list(groups.values())


class Reader(FileSystemReader):  # type: ignore[misc]
    """Reads checkpoints of ``Writer`` and of DCP's own writer, for ``dcp.load``.

    Stored tensors that are wanted whole are decoded straight into the tensors of the state, on
    GPUs in one pipeline. Of others all packed bytes are read and checked, and the rows that are
    needed are copied. Where a tensor was coded against an earlier checkpoint, the earlier one is
    loaded first and then brought up to date: one tensor after the other, each with all of its rows.

    Args:
        path: The directory.
        base: The directory of the checkpoint that deltas are against, or several: then that of
            the one which this is against, and so on. None, and of those that are not named: the
            one next to the later one with the name that ``Writer`` noted.
        threads: Most threads that decode on the host. None: every processor.
        max_nbytes: Most bytes that one stored tensor may have. The default is 64 GiB.
        verify: Whether a stored tensor of which rows are needed is decoded and checked whole,
            checksums included, before they are taken. False decodes these rows alone, and damage
            may pass. Tensors that are wanted whole are always checked.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If a value is out of range, or a path is a URL.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        base: PathLike | Sequence[PathLike] | None = None,
        threads: int | None = None,
        max_nbytes: int = DEFAULT_MAX_NBYTES,
        verify: bool = True,
    ) -> None:
        _check_local("path", path)
        super().__init__(path)
        if base is None or isinstance(base, (str, os.PathLike)):
            base = [] if base is None else [base]
        self._bases = list(base)
        for found in self._bases:
            _check_local("base", found)
        thread_count(threads)
        self._threads = threads
        self._verify = bool(verify)
        self._max_nbytes = integer("max_nbytes", max_nbytes, least=0)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Start a load; DCP calls it.

        Args:
            checkpoint_id: Another directory than ``path``, from now on.

        Raises:
            TypeError: If it is not a path.
            ValueError: If it is a URL.
        """
        if checkpoint_id:
            _check_local("checkpoint_id", checkpoint_id)
        super().reset(checkpoint_id)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Take what ``.metadata`` says; DCP calls it.

        Args:
            metadata: What ``read_metadata`` of some rank returned.
            is_coordinator: Whether this rank leads.
            args: As DCP passes them.
            kwargs: As DCP passes them.

        Raises:
            AssertionError: If ``metadata`` does not say where the tensors are.
        """
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)
        self._checkpoint = self._of(metadata)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read ``.metadata``; DCP calls it.

        Args:
            args: As DCP passes them.
            kwargs: As DCP passes them.

        Returns:
            What it says.

        Raises:
            FormatError: If it is damaged.
            OSError: If it cannot be read.
        """
        try:
            return super().read_metadata(*args, **kwargs)
        except FileNotFoundError as error:
            detail = f"{error.strerror}: the save did not end, or it is another directory"
            raise FileNotFoundError(error.errno, detail, str(error.filename)) from error
        except OSError:
            raise
        except Exception as error:
            # A damaged pickle may raise anything.
            detail = f"{self.path}: .metadata is damaged: {type(error).__name__}: {error}"
            raise FormatError("bad_container", f"{detail}. {_NEEDED}") from error

    def checkpoint(self) -> Checkpoint:
        """The compressed files of the checkpoint, not open.

        Returns:
            What ``Writer`` reads its base from.

        Raises:
            FormatError: If ``.metadata``, or what it says of its base, is not valid.
            OSError: If ``.metadata`` cannot be read.
        """
        return self._of(self.read_metadata())

    def _of(self, metadata: Metadata) -> Checkpoint:
        return Checkpoint(
            self._folder(), metadata, self._find_base, self._max_nbytes, self._threads
        )

    def _folder(self) -> Path:
        """Where the files are that ``.metadata`` names."""
        return Path(self.path)

    def _find_base(self, name: str) -> Checkpoint:
        """The checkpoint called `name` that deltas are against."""
        path, *others = self._bases or [Path(self.path).resolve().parent / name]
        try:
            reader = Reader(path, base=others, threads=self._threads, max_nbytes=self._max_nbytes)
            return reader.checkpoint()
        except FileNotFoundError as error:
            detail = f"no such checkpoint; {self.path} has deltas against it. Needed: base"
            raise FileNotFoundError(error.errno, detail, str(path)) from error

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what ``plan`` asks for; DCP calls it.

        Args:
            plan: The pieces that this rank needs.
            planner: Where their tensors are asked for.

        Returns:
            A future that is done.

        Raises:
            FormatError: If a file is damaged, has another tensor than ``.metadata`` says, or was
                coded against another checkpoint than the base. It says whether tensors of the
                state may have been written: some may then have new values and others old ones.
            OSError: If a file cannot be read; it says the same.
        """
        files: dict[str, list[ReadItem]] = {}
        others = []
        for item in plan.items:
            info = self.storage_data[item.storage_index]
            if is_ours(info):
                files.setdefault(info.relative_path, []).append(item)
            else:
                others.append(item)
        with self._checkpoint, ExitStack() as stack, torch.no_grad():
            untouched = "This rank has written nothing"
            with telling(untouched), advising(f"{untouched}. {_NEEDED}"):
                self._checkpoint.open_files(item.storage_index for item in plan.items)
                opened = self._open_others(stack, others)
            touched = f"Tensors of this rank may have been written. {_NEEDED}"
            with telling(touched), advising(touched):
                if others:
                    self._read_others(opened, LoadPlan(others), planner)
                for name, items in files.items():
                    self._read_file(name, items, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _open_others(self, stack: ExitStack, items: list[ReadItem]) -> dict[str, Any]:
        """The files that `items` are in, which are not compressed, open.

        Raises FormatError or OSError.
        """
        files: dict[str, Any] = {}
        for item in items:
            info = self.storage_data[item.storage_index]
            path = str(self._folder() / info.relative_path)
            if path not in files:
                files[path] = stack.enter_context(self.fs.create_stream(path, "rb"))
            if os.fstat(files[path].fileno()).st_size < info.offset + info.length:
                raise FormatError("truncated", f"{path} is shorter than .metadata says")
        return files

    def _read_others(self, files: dict[str, Any], plan: LoadPlan, planner: LoadPlanner) -> None:
        """Fill the tensors that `plan` names, which are in `files`."""
        system: Any = self.fs
        self.fs: Any = OpenFiles(files)
        try:
            super().read_data(plan, planner)
        finally:
            self.fs = system

    def _entry_name(self, index: MetadataIndex) -> str:
        return entry_name(index)

    def _read_file(self, file: str, items: list[ReadItem], planner: LoadPlanner) -> None:
        """Fill the tensors that `items`, all of one file, are for."""
        path, contents = self._checkpoint.path / file, self._checkpoint.contents(file)
        whole: list[dict[str, torch.Tensor]] = []
        rows: list[_Rows] = []
        filled: list[tuple[ReadItem, torch.Tensor]] = []
        for item in items:
            name = self._entry_name(item.storage_index)
            if name not in contents:
                raise FormatError("bad_container", f"{path}: tensor {name!r} is missing")
            with naming(contents.reader.name):
                head = contents.head(name, self._max_nbytes)
                if item.type == LoadItemType.BYTE_IO:
                    data = contents.tensor(name, head, "numpy", 1)
                    planner.load_bytes(item, io.BytesIO(data.tobytes()))
                    continue
            target = planner.resolve_tensor(item).detach()
            filled.append((item, target))
            shape = _shape(contents, name, head)
            if shape != self._checkpoint.shapes[item.storage_index]:
                found = f"{path}: tensor {name!r} has shape {list(shape)}"
                asked = list(self._checkpoint.shapes[item.storage_index])
                raise FormatError("bad_container", f"{found}; .metadata says {asked}")
            is_whole = not any(item.storage_offsets) and tuple(item.lengths) == shape
            if head is not None and head.plan.needs_base:
                self._update(item, getattr(torch, head.plan.dtype.name), shape, is_whole, target)
            elif is_whole:
                _first_without(whole, name)[name] = target
            else:
                rows.append(_Rows(name, head, item, target))
        for targets in whole:
            fill([contents], targets, "state", self._max_nbytes, self._threads)
        with naming(contents.reader.name):
            self._read_rows(contents, rows)
        for item, target in filled:
            planner.commit_tensor(item, target)

    def _update(
        self,
        item: ReadItem,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        is_whole: bool,
        target: torch.Tensor,
    ) -> None:
        """Fill a tensor from one that was coded against a base, in its own memory if it fits."""
        if is_whole and target.is_contiguous() and target.dtype == dtype:
            self._checkpoint.fill(item.storage_index, target)
            return
        piece = torch.empty(shape, dtype=dtype, device=target.device)
        self._checkpoint.fill(item.storage_index, piece)
        target.copy_(piece[_slices(item)])

    def _read_rows(self, contents: Contents, rows: list[_Rows]) -> None:
        """Copy parts of stored tensors. Raises FormatError or OSError."""
        by_tensor = itertools.groupby(rows, lambda row: (row.name, row.target.device))
        for (name, device), (first, *others) in by_tensor:
            head, group = first.head, (first, *others)
            like = "torch" if device.type == "cpu" else torch.empty(0, device=device)
            if self._verify or head is None or not head.plan.shape:
                whole = contents.tensor(name, head, like, thread_count(self._threads))
                for row in group:
                    _copy_part(whole, row.item, row.target)
                continue
            parsed = contents.parsed(name, head)
            with naming(f"tensor {name!r}"):
                for row in group:
                    _copy(self._decoded(parsed, row.item, like), row.target)

    def _decoded(self, parsed: Parsed, item: ReadItem, like: Any) -> torch.Tensor:
        """A part of a stored tensor, of which the rows are decoded that it is in."""
        first, count = item.storage_offsets[0], item.lengths[0]
        others = parsed.plan.shape[1:]
        start, stop = (row * math.prod(others) for row in (first, first + count))
        flat = decode(parsed, like=like, start=start, stop=stop, threads=self._threads)
        found: torch.Tensor = flat.reshape(count, *others)[(slice(None), *_slices(item)[1:])]
        return found


class _Rows(NamedTuple):
    """A part of a stored tensor, and where it goes. `head` is that of the whole tensor."""

    name: str
    head: Head | None
    item: ReadItem
    target: torch.Tensor


def _check_local(what: str, path: Any) -> None:
    """Refuse URLs, and what is not a path."""
    if is_url(path):
        raise ValueError(f"{what} is {path!r}; allowed: paths of this machine, no URLs")
    if not is_path(path):
        raise TypeError(f"{what} is a {type(path).__name__}; allowed: a path")


def _shape(contents: Contents | PlainFile, name: str, head: Head | None) -> tuple[int, ...]:
    """The shape of a stored tensor, by its own header; PyTorch counts pairs of 4-bit floats."""
    if head is not None:
        return head.plan.shape
    entry = contents.entry(name)
    pairs = entry.dtype == "F4" and entry.shape and entry.shape[-1] % 2 == 0
    return (*entry.shape[:-1], entry.shape[-1] // 2) if pairs else entry.shape


def _dtype(contents: Contents | PlainFile, name: str, head: Head | None) -> torch.dtype:
    """PyTorch's dtype of a stored tensor. Raises FormatError if it has none."""
    stored = contents.entry(name)
    known = BY_SAFETENSORS.get(stored.dtype) if head is None else head.plan.dtype
    label = (
        "float4_e2m1fn_x2" if known is None and stored.dtype == "F4" else getattr(known, "name", "")
    )
    found = getattr(torch, label, None)
    if found is None:
        detail = f"tensor {name!r} has the dtype {stored.dtype}, which this PyTorch has not"
        raise FormatError("bad_container", f"{contents.reader.name}: {detail}")
    return found


def _slices(item: ReadItem) -> tuple[slice, ...]:
    ends = (at + length for at, length in zip(item.storage_offsets, item.lengths, strict=True))
    return tuple(slice(at, end) for at, end in zip(item.storage_offsets, ends, strict=True))


def _first_without(rounds: list[dict[str, torch.Tensor]], name: str) -> dict[str, torch.Tensor]:
    """The first of `rounds` that lacks the name, a new one if all have it."""
    for targets in rounds:
        if name not in targets:
            return targets
    rounds.append({})
    return rounds[-1]


class HuggingFaceReader(Reader):
    """Reads models with Hugging Face's names into a sharded state, for ``dcp.load``.

    Such a model is a directory of ``tightwire.save`` or of ``tightwire compress``, or one of plain
    safetensors files, or of both kinds by its index; one that holds both kinds and has no index is
    refused. Every rank reads the compressed tensors that it needs rows of, as ``Reader`` does. Of
    plain files, which have no checksums, it reads the rows alone.

    Args:
        path: The directory, or one safetensors file.
        threads: As in ``Reader``.
        max_nbytes: As in ``Reader``.
        verify: As in ``Reader``.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If a value is out of range.
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the headers of all files; DCP calls it.

        Args:
            args: Nothing.
            kwargs: What DCP passes; not used.

        Returns:
            Shapes and dtypes of all tensors, and where they are.

        Raises:
            FormatError: If a file is damaged, or a directory without an index holds compressed
                files and plain ones.
            FileNotFoundError: If a file is missing.
            OSError: If a file cannot be read.
        """
        tensors: dict[str, Any] = {}
        stored: dict[MetadataIndex, Any] = {}
        with opened_any(self.path) as files:
            for contents in files:
                path = os.path.relpath(contents.reader.name, self._folder())
                kinds = [] if isinstance(contents, PlainFile) else [EXTENSION]
                for name in contents.names():
                    entry = contents.entry(name)
                    head = contents.head(name, self._max_nbytes)
                    shape = torch.Size(_shape(contents, name, head))
                    dtype = _dtype(contents, name, head)
                    zeros = torch.Size([0] * len(shape))
                    tensors[name] = TensorStorageMetadata(
                        TensorProperties(dtype=dtype),
                        shape,
                        [ChunkStorageMetadata(zeros, shape)],
                    )
                    stored[MetadataIndex(name, zeros)] = filesystem._StorageInfo(
                        path, entry.begin, entry.nbytes, kinds
                    )
        metadata = Metadata(tensors, storage_data=stored)
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata

    def _folder(self) -> Path:
        path = Path(self.path)
        return path if path.is_dir() else path.parent

    def _entry_name(self, index: MetadataIndex) -> str:
        return str(index.fqn)

    def _open_others(self, stack: ExitStack, items: list[ReadItem]) -> dict[str, Any]:
        """Open the files, and see that the tensors are still there. Raises as `read_data`."""
        files: dict[str, PlainFile] = {}
        for item in items:
            relative = self.storage_data[item.storage_index].relative_path
            path = self._folder() / relative
            if relative not in files:
                opened = shard_of_any(stack.enter_context(reading(path)))
                if not isinstance(opened, PlainFile):
                    raise FormatError("bad_container", f"{path}: changed while it was read")
                files[relative] = opened
            file, name = files[relative], str(item.storage_index.fqn)
            if name not in file or (
                _shape(file, name, None) != self._checkpoint.shapes[item.storage_index]
            ):
                raise FormatError("bad_container", f"{path}: {name!r} changed while it was read")
        return files

    def _read_others(self, files: dict[str, Any], plan: LoadPlan, planner: LoadPlanner) -> None:
        for item in plan.items:
            target = planner.resolve_tensor(item).detach()
            file = files[self.storage_data[item.storage_index].relative_path]
            _copy(_plain_piece(file, item), target)
            planner.commit_tensor(item, target)


def _plain_piece(file: PlainFile, item: ReadItem) -> torch.Tensor:
    """A part of a tensor of a plain file, of which the rows that are needed are read."""
    name = str(item.storage_index.fqn)
    shape, dtype = _shape(file, name, None), _dtype(file, name, None)
    first, count = (item.storage_offsets[0], item.lengths[0]) if shape else (0, 1)
    row_nbytes = file.entry(name).nbytes // (shape[0] if shape and shape[0] else 1)
    data = torch.from_numpy(file.read(name, first * row_nbytes, count * row_nbytes))
    if not shape:
        return data.view(dtype).reshape(())
    return data.view(dtype).reshape(count, *shape[1:])[(slice(None), *_slices(item)[1:])]


def _copy_part(whole: torch.Tensor, item: ReadItem, target: torch.Tensor) -> None:
    """Copy a part of a tensor; PyTorch takes parts of the bytes of 4-bit floats alone."""
    _copy((whole.view(torch.uint8) if arrays.is_float4(target) else whole)[_slices(item)], target)


def _copy(piece: torch.Tensor, target: torch.Tensor) -> None:
    """Copy elements; PyTorch copies bytes of 4-bit floats alone."""
    if arrays.is_float4(target):
        piece, target = piece.view(torch.uint8), target.view(torch.uint8)
    target.copy_(piece)
