"""Which files of a directory hold a model, and which tensors they hold."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from .codecs.common.base import Bytes
from .contents import Contents, naming
from .formats.container import LIST_KEY, TREE_KEY, VERSION_KEY, Entry, directory_of
from .formats.errors import FormatError
from .model_index import PLAIN_SUFFIX, SUFFIX, Index, is_index, read_index, restored_name
from .storage import PathLike, Reader, is_path, reading

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
    """The index of the model in a folder; of several, that of the first of `STEMS`.

    One that names nothing says nothing of the model: it counts as none.
    """
    found = sorted(path.name for path in folder.iterdir() if is_index(path))
    ranked = [name for stem in STEMS if (name := f"{stem}.safetensors.index.json") in found]
    index = read_index(folder / (ranked or found)[0]) if found else None
    return index if index is not None and index.weight_map else None


def _safetensors_names(folder: Path) -> list[str]:
    """Names of the safetensors files in a folder, compressed or not."""
    names = sorted(n for n in os.listdir(folder) if n.endswith(PLAIN_SUFFIX))
    return [name for name in names if (folder / name).is_file()]


def _check_one_kind(folder: Path) -> None:
    """Raise FormatError for a folder without an index that holds files of both kinds."""
    names = _safetensors_names(folder)
    if _model_index(folder) is None and len({name.endswith(SUFFIX) for name in names}) > 1:
        plain = next(name for name in names if not name.endswith(SUFFIX))
        packed = next(name for name in names if name.endswith(SUFFIX))
        detail = f"{folder} holds {packed} and {plain}, and no index says which are the model"
        needed = "an index, the path of one file, or a directory with files of one kind"
        raise FormatError("bad_container", f"{detail}. Needed: {needed}")


def _unindexed_shards(folder: Path) -> list[Path]:
    names = _safetensors_names(folder)
    names = [name for name in names if name.endswith(SUFFIX)] or names
    by_stem = {restored_name(name).removesuffix(PLAIN_SUFFIX): name for name in names}
    for stem in STEMS:
        if stem in by_stem:
            return [folder / by_stem[stem]]
    if not names:
        raise FileNotFoundError(
            errno.ENOENT,
            "holds no *.safetensors; for a pipeline, name the sub-folder of one model",
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


class PlainFile:
    """A safetensors file that is not compressed, its header checked, as `Contents` is one that is.

    Raises FormatError and OSError.
    """

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self._directory = directory_of(reader.read, reader.nbytes)
        self._entries = {e.name: e for e in self._directory.entries}

    def names(self) -> list[str]:
        """Names of the tensors, as their writer ordered them."""
        return list(self._directory.names)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def entry(self, name: str) -> Entry:
        """The entry of a tensor. KeyError for another name."""
        return self._entries[name]

    def head(self, name: str, max_nbytes: int) -> None:
        """None, as of plain tensors of `Contents`; refuses one that is too large."""
        if (nbytes := self._entries[name].nbytes) > max_nbytes:
            detail = f"tensor {name!r}: {nbytes} bytes, max_nbytes is {max_nbytes}"
            raise FormatError("limit_exceeded", detail)

    def read(self, name: str, start: int, nbytes: int) -> Bytes:
        """A range of the bytes of a tensor."""
        return self.reader.read(self._directory.data_at + self._entries[name].begin + start, nbytes)


_File = TypeVar("_File", Contents, Contents | PlainFile)


@contextmanager
def opened(path: Any) -> Iterator[list[Contents]]:
    """The compressed files of a model, which together hold each name once, headers checked.

    `path` is a directory or what `load_file` takes. Raises FormatError, also for files that are not
    compressed and for a name that two files have, FileNotFoundError for a shard that is missing.
    """
    if not is_path(path) or not os.path.isdir(path):
        with reading(path) as reader:
            with naming(reader.name):
                contents = Contents(reader)
            yield [contents]
        return
    with _opened(Path(path), _shard) as files:
        yield files


@contextmanager
def opened_any(path: PathLike) -> Iterator[list[Contents | PlainFile]]:
    """As `opened`, of a path; files that are not compressed as well.

    Raises FormatError too for a directory without an index that holds files of both kinds.
    """
    if os.path.isdir(path):
        _check_one_kind(Path(path))
        with _opened(Path(path), shard_of_any) as files:
            yield files
        return
    with reading(path) as reader:
        yield [shard_of_any(reader)]


@contextmanager
def _opened(folder: Path, shard_of: Callable[[Reader], _File]) -> Iterator[list[_File]]:
    """What `shard_of` makes of each file of a model in a directory."""
    index = _model_index(folder)
    shards = index.shards if index is not None else _unindexed_shards(folder)
    if index is None:
        _check_complete(shards)
    with ExitStack() as stack:
        files = {shard: shard_of(stack.enter_context(reading(shard))) for shard in shards}
        holders: dict[str, Path] = {}
        for shard, contents in files.items():
            for name in contents.names():
                if name in holders:
                    detail = f"tensor {name!r} is in {holders[name]} and in {shard}"
                    raise FormatError("bad_container", detail)
                holders[name] = shard
        if index is not None:
            check_holds(index, {shard: contents.names() for shard, contents in files.items()})
        yield list(files.values())


def _shard(reader: Reader) -> Contents:
    found = shard_of_any(reader)
    if isinstance(found, PlainFile):
        detail = "not compressed: run 'tightwire compress' on the directory first"
        raise FormatError("bad_container", f"{reader.name}: {detail}, or load it with safetensors")
    return found


def shard_of_any(reader: Reader) -> Contents | PlainFile:
    """A file of names to tensors, compressed or not. Raises FormatError or OSError."""
    with naming(reader.name):
        metadata = directory_of(reader.read, reader.nbytes).metadata
        if VERSION_KEY not in metadata:
            return PlainFile(reader)
        if TREE_KEY in metadata or LIST_KEY in metadata:
            raise FormatError("bad_container", "not names to tensors: load it with load_file")
        return Contents(reader)
