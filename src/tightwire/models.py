"""Models in directories as on Hugging Face: `tightwire.load` and `tightwire.save`."""

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
from .files import Contents, Draft, drafted, load_file, naming, read_header, save_file
from .formats.container import LIST_KEY, TIED_KEY, TREE_KEY, VERSION_KEY, directory_of
from .formats.errors import FormatError, integer
from .model_index import (
    PLAIN_SUFFIX,
    SUFFIX,
    Index,
    index_bytes,
    is_index,
    read_index,
    restored_name,
)
from .storage import PathLike, atomic_file, is_path, reading

#: Files of models that need no index, without suffix; where there are several, the first counts.
STEMS = ("model", "diffusion_pytorch_model")
_NUMBERED = re.compile(r"(.+)-\d{5,}-of-(\d{5,})", re.DOTALL)


def model_shards(folder: Path) -> list[Path]:
    """The safetensors files of the model in a folder, compressed or not.

    Those that its index names; without one model.safetensors, diffusion_pytorch_model.safetensors,
    or else all that there are: compressed ones if any. Raises FormatError for a bad index,
    FileNotFoundError for a shard that is missing and for a folder without a model.
    """
    index = _model_index(folder)
    return index.shards if index is not None else _unindexed_shards(folder)


def _model_index(folder: Path) -> Index | None:
    """The index of the model in a folder; of several, that of the first of `STEMS`."""
    found = sorted(path.name for path in folder.iterdir() if is_index(path))
    ranked = [name for stem in STEMS if (name := f"{stem}.safetensors.index.json") in found]
    return read_index(folder / (ranked or found)[0]) if found else None


def _unindexed_shards(folder: Path) -> list[Path]:
    names = sorted(n for n in os.listdir(folder) if n.endswith(PLAIN_SUFFIX))
    names = [name for name in names if (folder / name).is_file()]
    names = [name for name in names if name.endswith(SUFFIX)] or names
    by_stem = {restored_name(name).removesuffix(PLAIN_SUFFIX): name for name in names}
    for stem in STEMS:
        if stem in by_stem:
            return [folder / by_stem[stem]]
    if not names:
        raise FileNotFoundError(
            errno.ENOENT,
            "holds no *.safetensors; of a pipeline, name the sub-folder of one model",
            str(folder),
        )
    return [folder / name for name in names]


def _check_complete(shards: list[Path]) -> None:
    """Raise FileNotFoundError for numbered shards without their index, which is written last."""
    for shard in shards:
        numbered = _NUMBERED.fullmatch(restored_name(shard.name).removesuffix(PLAIN_SUFFIX))
        if numbered is not None and int(numbered[2]) > 1:
            index = shard.with_name(f"{numbered[1]}.safetensors.index.json")
            raise FileNotFoundError(
                errno.ENOENT, "no such file: its shards are not complete without it", str(index)
            )


def tensor_names(shard: Path) -> list[str]:
    """Names of the tensors of a file that is compressed or not."""
    with naming(str(shard)), reading(shard) as reader:
        directory = directory_of(reader.read, reader.nbytes)
        compressed = VERSION_KEY in directory.metadata
        return Contents(reader).names() if compressed else list(directory.names)


def check_holds(index: Index, names: Mapping[Path, Iterable[str]]) -> None:
    """Raise FormatError if a tensor is not in the shard that the index says."""
    held = {shard: set(found) for shard, found in names.items()}
    for tensor, name in index.weight_map.items():
        if tensor not in held[index.path.parent / name]:
            raise FormatError("bad_container", f"{index.path}: {tensor!r} is not in {name}")


def loadable_shards(folder: Path) -> list[Path]:
    """The shards of the compressed model in a folder, each tensor in one of them.

    From headers alone. Raises FormatError, FileNotFoundError and ValueError as `load` does.
    """
    index = _model_index(folder)
    shards = index.shards if index is not None else _unindexed_shards(folder)
    if index is None:
        _check_complete(shards)
    names = {shard: _loadable_names(shard) for shard in shards}
    _check_once(names)
    if index is not None:
        check_holds(index, names)
    return shards


def load(
    path: Any,
    *,
    like: Any = "numpy",
    max_nbytes: int = DEFAULT_MAX_NBYTES,
    threads: int | None = None,
) -> Any:
    """Every tensor of a compressed model, checked, by name.

    `path` is a directory, or what `load_file` takes. Of a directory, the shards that its index
    names are loaded, without one those that `model_shards` says; sub-folders are not: name the
    one that holds the model. `like`, `max_nbytes` and `threads` are those of `load_file`.

    Raises FormatError, also for shards that are not compressed, FileNotFoundError for a shard that
    is missing, ValueError for a tensor that is in two shards, and what `load_file` raises.
    """
    if not is_path(path) or not os.path.isdir(path):
        return load_file(path, like=like, max_nbytes=max_nbytes, threads=threads)
    tensors: dict[str, Any] = {}
    for shard in loadable_shards(Path(path)):
        with naming(str(shard)):
            tensors |= load_file(shard, like=like, max_nbytes=max_nbytes, threads=threads)
    return tensors


def _loadable_names(shard: Path) -> list[str]:
    """Names of the tensors of a compressed shard."""
    with naming(str(shard)):
        metadata = read_header(shard).metadata
        if VERSION_KEY not in metadata:
            detail = "not compressed: run 'tightwire compress' on the directory first"
            raise FormatError("bad_container", f"{detail}, or load it with safetensors")
        if TREE_KEY in metadata or LIST_KEY in metadata:
            raise FormatError("bad_container", "not names to tensors: load it with load_file")
    return tensor_names(shard)


def _check_once(names: Mapping[Path, Iterable[str]]) -> None:
    """Raise ValueError for a tensor that is in two shards."""
    homes: dict[str, Path] = {}
    for shard, found in names.items():
        for name in found:
            if name in homes:
                raise ValueError(f"tensor {name!r} is in {homes[name]} and in {shard}")
            homes[name] = shard


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
    """Write a model's tensors as a directory that `load` reads, with Hugging Face's names.

    One `model.tw.safetensors`, or `model-00001-of-00002.tw.safetensors` and so on where the tensors
    have more than `max_shard_nbytes` bytes, and the index `model.safetensors.index.json`, which is
    written last. A tensor is never split; tied tensors are stored once, and the index has the
    first of their names. `metadata` goes into every shard; None is {"format": "pt"}, as
    transformers writes it. Other files, such as a configuration, are left alone.

    `overwrite` replaces a compressed model. Raises FileExistsError if there is a model and
    `overwrite` is False, or one that is not compressed; TypeError or ValueError for a bad call.
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
    folder = Path(directory)
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
    room = limit
    for name in draft.names:
        nbytes = _nbytes(draft, name)
        if nbytes > room and shards[-1]:
            shards.append([])
            room = limit
        shards[-1].append(name)
        room -= nbytes
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
        problem = convert.obstacle(path) if path != index else None
        if problem is not None:
            raise FileExistsError(errno.EEXIST, f"{problem}; remove it yourself", str(path))
    stem = re.compile(r"model(-\d{5,}-of-\d{5,})?", re.DOTALL)
    return [path for path in found if stem.fullmatch(path.name.removesuffix(SUFFIX))]
