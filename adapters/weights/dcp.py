"""Compressed checkpoints of torch.distributed.checkpoint (DCP): ``Writer``, ``Reader``.

A rank writes its tensors as compressed safetensors files, one for each device that they are on.
``tightwire verify`` and ``tightwire.open`` read these; DCP's ``.metadata`` says what is where, so
that a checkpoint loads into any sharding::

    import torch.distributed.checkpoint as dcp

    dcp.save(state, storage_writer=tw.dcp.Writer("step_1000"))
    dcp.load(state, storage_reader=tw.dcp.Reader("step_1000"))

``dcp.async_save`` takes the writer, too.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

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

from ...arguments import thread_count
from ...codec import Codec, as_codec
from ...contents import Contents, naming
from ...engine import DEFAULT_MAX_NBYTES
from ...files import save_file
from ...formats.dtypes import BY_SAFETENSORS
from ...formats.errors import FormatError, integer
from ...lazy import File
from ...loading import fill
from ...model_index import SUFFIX
from ...shards import opened
from ...storage import atomic_file, reading

#: What DCP's own reader says that it lacks, when it is given a compressed checkpoint.
_EXTENSION = "tightwire"


class Writer(FileSystemWriter):  # type: ignore[misc]
    """Writes a checkpoint whose tensors are compressed without loss, for ``dcp.save``.

    Every rank writes files with names of their own, and ``.metadata``, which replaces an earlier
    one in one step, names them. Whatever fails before that leaves an earlier checkpoint of the
    directory whole. Files that only the earlier one named are removed last.

    Args:
        path: The directory, made if it is not there.
        codec: A lossless codec or its name.
        threads: Most threads that encode on the host. None: every processor.
        overwrite: Whether a checkpoint in ``path`` may be replaced.
        cache_staged_state_dict: As in ``torch.distributed.checkpoint.FileSystemWriter``.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If a value is out of range, or the codec is lossy or needs a base.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        codec: str | Codec = "zipccl",
        *,
        threads: int | None = None,
        overwrite: bool = True,
        cache_staged_state_dict: bool = False,
    ) -> None:
        super().__init__(path, overwrite=overwrite, cache_staged_state_dict=cache_staged_state_dict)
        self._codec = as_codec(codec)
        if not self._codec.lossless:
            raise ValueError(f"codec {self._codec.name!r} is lossy; allowed: lossless codecs")
        if self._codec.needs_base:
            raise ValueError(f"codec {self._codec.name!r} needs a base, which checkpoints have not")
        thread_count(threads)
        self._threads = threads

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write what ``plan`` gives this rank; DCP calls it.

        Args:
            plan: The items that this rank writes.
            planner: Where their tensors are asked for.

        Returns:
            A future, done, of what was written.

        Raises:
            OSError: If a file cannot be written.
            TypeError: If safetensors has no name for the dtype of a tensor.
        """
        results = []
        for number, group in enumerate(_by_device(plan.items, planner)):
            name = f"{plan.storage_data.prefix}{self.save_id[:8]}_{number}{SUFFIX}"
            path = Path(self.path) / name
            tensors = {_name(item.index): tensor for item, tensor in group}
            save_file(tensors, path, self._codec, threads=self._threads)
            with reading(path) as reader:
                contents = Contents(reader)
            for item, _ in group:
                entry = contents.entry(_name(item.index))
                stored = filesystem._StorageInfo(name, entry.begin, entry.nbytes, [_EXTENSION])
                results.append(WriteResult(item.index, entry.nbytes, stored))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write ``.metadata``, then remove the files of the checkpoint that it replaces.

        Args:
            metadata: What DCP knows of the state.
            results: What each rank wrote.

        Raises:
            OSError: If a file cannot be written or removed.
        """
        stored = {result.index: result.storage_data for of_rank in results for result in of_rank}
        metadata.version = getattr(filesystem, "CURRENT_DCP_VERSION", None)
        metadata.storage_data = stored
        metadata.storage_meta = self.storage_meta()
        path = self._get_metadata_path(None if self.use_collectives else self.rank)
        earlier = _files_of(path)
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


def _name(index: MetadataIndex) -> str:
    """The name of a piece of a tensor in a file: ``weight``, or ``weight@512,0`` with its offset.

    ``@`` in names of tensors is doubled, so that no two pieces have the same name.
    """
    name = str(index.fqn).replace("@", "@@")
    if not index.offset or not any(index.offset):
        return name
    return f"{name}@{','.join(map(str, index.offset))}"


def _files_of(path: os.PathLike[str]) -> set[str]:
    """Names of the compressed files of a checkpoint, by its metadata, if there is one."""
    try:
        data = Path(path).read_bytes()
    except FileNotFoundError:
        return set()
    stored: Mapping[Any, Any] = pickle.loads(data).storage_data or {}
    return {
        info.relative_path
        for info in stored.values()
        if _is_ours(info) and Path(info.relative_path).name == info.relative_path
    }


def _is_ours(info: Any) -> bool:
    return _EXTENSION in (info.transform_descriptors or ())


class Reader(FileSystemReader):  # type: ignore[misc]
    """Reads checkpoints of ``Writer`` and of DCP's own writer, for ``dcp.load``.

    Stored tensors that are wanted whole are decoded straight into the tensors of the state, on
    GPUs in one pipeline; of others the rows that are needed are decoded.

    Args:
        path: The directory.
        threads: Most threads that decode on the host. None: every processor.
        max_nbytes: Most bytes that one stored tensor may have. The default is 64 GiB.
        verify: Whether tensors of which rows are needed are checked whole, checksums included.
            Those that are wanted whole always are.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If a value is out of range.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        threads: int | None = None,
        max_nbytes: int = DEFAULT_MAX_NBYTES,
        verify: bool = False,
    ) -> None:
        super().__init__(path)
        thread_count(threads)
        self._threads = threads
        self._verify = bool(verify)
        self._max_nbytes = integer("max_nbytes", max_nbytes, least=0)

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
        self._shapes = {
            MetadataIndex(name, piece.offsets): tuple(piece.sizes)
            for name, tensor in metadata.state_dict_metadata.items()
            if isinstance(tensor, TensorStorageMetadata)
            for piece in tensor.chunks
        }

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what ``plan`` asks for; DCP calls it.

        Args:
            plan: The pieces that this rank needs.
            planner: Where their tensors are asked for.

        Returns:
            A future that is done.

        Raises:
            FormatError: If a file is damaged, or has another tensor than ``.metadata`` says. The
                tensors of the state are then undefined.
            OSError: If a file cannot be read.
        """
        files: dict[str, list[ReadItem]] = {}
        others = []
        for item in plan.items:
            info = self.storage_data[item.storage_index]
            if _is_ours(info):
                files.setdefault(info.relative_path, []).append(item)
            else:
                others.append(item)
        if others:
            super().read_data(LoadPlan(others, plan.storage_data, plan.planner_data), planner)
        for name, items in files.items():
            self._read_file(Path(self.path) / name, items, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _entry_name(self, index: MetadataIndex) -> str:
        return _name(index)

    def _read_file(self, path: Path, items: list[ReadItem], planner: LoadPlanner) -> None:
        """Fill the tensors that `items`, all of one file, are for."""
        whole: list[dict[str, torch.Tensor]] = []
        rows: list[tuple[str, ReadItem, torch.Tensor]] = []
        filled: list[tuple[ReadItem, torch.Tensor]] = []
        with reading(path) as reader, torch.no_grad():
            with naming(reader.name):
                contents = Contents(reader)
            for item in items:
                name = self._entry_name(item.storage_index)
                if name not in contents:
                    raise FormatError("bad_container", f"{path}: tensor {name!r} is missing")
                if item.type == LoadItemType.BYTE_IO:
                    with naming(reader.name):
                        head = contents.head(name, self._max_nbytes)
                        data = contents.tensor(name, head, "numpy", 1)
                    planner.load_bytes(item, io.BytesIO(data.tobytes()))
                    continue
                target = planner.resolve_tensor(item).detach()
                filled.append((item, target))
                shape = self._shape(contents, name)
                if shape != self._shapes[item.storage_index]:
                    found = f"{path}: tensor {name!r} has shape {list(shape)}"
                    asked = list(self._shapes[item.storage_index])
                    raise FormatError("bad_container", f"{found}; .metadata says {asked}")
                if not any(item.storage_offsets) and tuple(item.lengths) == shape:
                    _first_without(whole, name)[name] = target
                else:
                    rows.append((name, item, target))
            for targets in whole:
                fill([contents], targets, "state", self._max_nbytes, self._threads)
            self._read_rows(path, rows)
        for item, target in filled:
            planner.commit_tensor(item, target)

    def _shape(self, contents: Contents, name: str) -> tuple[int, ...]:
        """The shape of a stored tensor, by its own header."""
        with naming(contents.reader.name):
            head = contents.head(name, self._max_nbytes)
        return contents.entry(name).shape if head is None else head.plan.shape

    def _read_rows(self, path: Path, rows: list[tuple[str, ReadItem, torch.Tensor]]) -> None:
        """Copy parts of stored tensors, of which the rows that are needed are decoded."""
        by_device: dict[torch.device, list[tuple[str, ReadItem, torch.Tensor]]] = {}
        for row in rows:
            by_device.setdefault(row[2].device, []).append(row)
        for device, group in by_device.items():
            like = "torch" if device.type == "cpu" else group[0][2]
            with (
                File(path, like=like, max_nbytes=self._max_nbytes, verify=self._verify) as file,
                naming(str(path)),
            ):
                for name, item, target in group:
                    target.copy_(file[name][_slices(item)])


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
    """Reads compressed models with Hugging Face's names into a sharded state, for ``dcp.load``.

    Such a model is a directory of ``tightwire.save`` or of ``tightwire compress``. Every rank
    decodes the rows that it needs.

    Args:
        path: The directory, or one compressed safetensors file.
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
            FormatError: If a file is damaged or not compressed.
            FileNotFoundError: If a file is missing.
            OSError: If a file cannot be read.
        """
        tensors: dict[str, Any] = {}
        stored: dict[MetadataIndex, Any] = {}
        with opened(self.path) as files:
            for contents in files:
                path = os.path.abspath(contents.reader.name)
                for name in contents.names():
                    entry = contents.entry(name)
                    head = contents.head(name, self._max_nbytes)
                    shape = torch.Size(self._shape(contents, name))
                    dtype = BY_SAFETENSORS[entry.dtype] if head is None else head.plan.dtype
                    zeros = torch.Size([0] * len(shape))
                    tensors[name] = TensorStorageMetadata(
                        TensorProperties(dtype=getattr(torch, dtype.name)),
                        shape,
                        [ChunkStorageMetadata(zeros, shape)],
                    )
                    stored[MetadataIndex(name, zeros)] = filesystem._StorageInfo(
                        path, entry.begin, entry.nbytes, [_EXTENSION]
                    )
        metadata = Metadata(tensors, storage_data=stored)
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata

    def _entry_name(self, index: MetadataIndex) -> str:
        return str(index.fqn)
