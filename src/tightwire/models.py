"""Models in directories with Hugging Face's names: ``tightwire.load`` and ``tightwire.save``."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from . import convert
from .codec import Codec, as_codec
from .engine import DEFAULT_MAX_NBYTES
from .files import Draft, drafted, load_file, save_file
from .formats.container import TIED_KEY, TREE_KEY
from .formats.errors import FormatError, integer
from .loading import load_files
from .model_index import PLAIN_SUFFIX, SUFFIX, index_bytes, read_index
from .shards import opened
from .storage import PathLike, atomic_file, is_path


def load(
    path: Any,
    *,
    like: Any = None,
    out: Mapping[str, Any] | None = None,
    max_nbytes: int = DEFAULT_MAX_NBYTES,
    threads: int | None = None,
) -> Any:
    """Read every tensor of a compressed model.

    Everything is checked. Of a directory the shards that its index names are loaded; without an
    index, the compressed safetensors files in it that form one model. Sub-folders are not read:
    name the one that holds the model. All shards go to a GPU in one pipeline.

    Args:
        path: A directory, or what ``load_file`` takes.
        like: As in ``load_file``.
        out: As in ``load_file``.
        max_nbytes: As in ``load_file``.
        threads: As in ``load_file``.

    Returns:
        Names to arrays.

    Raises:
        FormatError: If a shard is damaged or not compressed, or a tensor is in two shards.
        FileNotFoundError: If a shard is missing.
        OSError: If a file cannot be read.
        torch.OutOfMemoryError: If a GPU has too little memory.
        TypeError: As ``load_file``.
        ValueError: As ``load_file``.
    """
    if not is_path(path) or not os.path.isdir(path):
        return load_file(path, like=like, out=out, max_nbytes=max_nbytes, threads=threads)
    with opened(path) as files:
        return load_files(files, like, out, max_nbytes, threads)


def save(
    tensors: Mapping[str, Any],
    directory: PathLike,
    codec: str | Codec = "zipccl",
    *,
    max_shard_nbytes: int = 5 * 10**9,
    metadata: Mapping[str, str] | None = None,
    threads: int | None = None,
    overwrite: bool = False,
) -> None:
    """Write the tensors of a model as a directory that ``load`` reads, with Hugging Face's names.

    The files are one ``model.tw.safetensors``, or ``model-00001-of-00002.tw.safetensors`` and so
    on, and the index ``model.safetensors.index.json``, which is written last. A tensor is never
    split; tied tensors are stored once, and the index has the first of their names. Other files of
    the directory, such as a configuration, are left alone.

    Args:
        tensors: Names to arrays.
        directory: A path; it is created if it does not exist.
        codec: A codec or its name.
        max_shard_nbytes: Most bytes of uncompressed tensors in a shard.
        metadata: Text to text, stored in every shard. None is ``{"format": "pt"}``, as transformers
            writes it.
        threads: Most threads; None: every processor.
        overwrite: Whether a compressed model that is there is replaced.

    Raises:
        FileExistsError: If there is a model and ``overwrite`` is False, a model that is not
            compressed, or a file in place of the directory.
        OSError: If a file cannot be written.
        TypeError: If an argument has a wrong type.
        ValueError: If a value is not an array, or a name is not allowed.
    """
    chosen = as_codec(codec)
    limit = integer("max_shard_nbytes", max_shard_nbytes, least=1)
    if not isinstance(tensors, Mapping):
        kind = type(tensors).__name__
        raise TypeError(f"tensors is a {kind}; allowed: names to arrays")
    metadata = {"format": "pt"} if metadata is None else metadata
    draft, found = drafted(tensors, chosen, metadata)
    if TREE_KEY in draft.metadata:
        raise ValueError("tensors has nested or plain values; allowed: arrays. save_file takes all")
    if not is_path(directory):
        raise TypeError(f"directory is {directory!r}; allowed: a path. save_file takes URLs")
    folder = Path(directory)
    if folder.exists() and not folder.is_dir():
        text = "is not a directory: save writes a directory, save_file a file"
        raise FileExistsError(errno.EEXIST, text, str(folder))
    old = _old_model(folder, overwrite)
    shards = _named_shards(_sharded(draft, limit))
    folder.mkdir(parents=True, exist_ok=True)
    index = folder / "model.safetensors.index.json"
    if len(shards) > 1 and any(path.name in shards for path in old):
        # Without an index, shards are not taken for a model while they are replaced one by one.
        index.unlink(missing_ok=True)
    for shard, names in shards.items():
        part = {name: found[name] for name in (*names, *_aliases(draft, names))}
        save_file(part, folder / shard, chosen, metadata=metadata, threads=threads)
    weight_map = {name: shard for shard, names in shards.items() for name in names}
    total = sum(_nbytes(draft, name) for name in draft.names)
    with atomic_file(index) as file:
        file.write(index_bytes(weight_map, total, own=len(shards) == 1))
    for path in old:
        if path.name not in shards:
            path.unlink()


def _sharded(draft: Draft, limit: int) -> list[list[str]]:
    """Names of the stored tensors in shards of at most `limit` bytes, or one tensor."""
    shards: list[list[str]] = [[]]
    left = limit
    for name in draft.names:
        nbytes = _nbytes(draft, name)
        if nbytes > left and shards[-1]:
            shards.append([])
            left = limit
        shards[-1].append(name)
        left -= nbytes
    return shards


def _nbytes(draft: Draft, name: str) -> int:
    """Bytes of a tensor as it was given."""
    if name in draft.plain:
        return draft.plain[name].nbytes
    plan = draft.plans[name]
    return plan.nelem * plan.dtype.itemsize


def _aliases(draft: Draft, names: Iterable[str]) -> list[str]:
    """Other names of these tensors."""
    stored = set(names)
    tied = json.loads(draft.metadata.get(TIED_KEY, "{}"))
    return [alias for alias, name in tied.items() if name in stored]


def _named_shards(shards: list[list[str]]) -> dict[str, list[str]]:
    if len(shards) == 1:
        return {f"model{SUFFIX}": shards[0]}
    n = len(shards)
    return {f"model-{i:05}-of-{n:05}{SUFFIX}": names for i, names in enumerate(shards, 1)}


def _old_model(folder: Path, overwrite: bool) -> list[Path]:
    """The shards that `save` may replace. Raises FileExistsError for what it may not."""
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    index = folder / "model.safetensors.index.json"
    found = [folder / name for name in names if name.endswith(PLAIN_SUFFIX)]
    for path in [*found, *([index] if index.exists() else [])]:
        if not overwrite:
            text = "exists: the directory holds a model; overwrite=True replaces a compressed one"
            raise FileExistsError(errno.EEXIST, text, str(path))
        problem = convert.obstacle(path) if path != index else _index_obstacle(index)
        if problem is not None:
            raise FileExistsError(errno.EEXIST, f"{problem}; remove it yourself", str(path))
    stem = re.compile(r"model(-\d{5,}-of-\d{5,})?", re.DOTALL)
    return [path for path in found if stem.fullmatch(path.name.removesuffix(SUFFIX))]


def _index_obstacle(index: Path) -> str | None:
    """Why an index must not be overwritten; None if all that it names is compressed."""
    try:
        problems = [convert.obstacle(shard) for shard in read_index(index).shards]
    except (FormatError, FileNotFoundError, IsADirectoryError):
        return "exists and is not the index of a compressed model"
    if any(problem is not None for problem in problems):
        return "exists and names shards that are not compressed"
    return None
