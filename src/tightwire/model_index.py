"""The index of a model's shards, `model.safetensors.index.json`, and the names in it."""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from .formats.container import MAX_JSON, read_index_object
from .formats.errors import FormatError
from .storage import reading

PLAIN_SUFFIX = ".safetensors"
SUFFIX = ".tw.safetensors"
#: In the metadata of an index that the source of a compressed directory did not have.
OWN_KEY, OWN_VALUE = "tightwire", "made by tightwire"

_INDEX = re.compile(r".+\.safetensors\.index(\.[^.]+)?\.json", re.DOTALL)
#: A string of a JSON text without its quotes, and the colon behind it if it is a name.
_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"(\s*:)?', re.DOTALL)


@dataclass(frozen=True)
class Index:
    """The index of a model's shards: of every tensor the file that holds it."""

    path: Path
    text: str
    weight_map: Mapping[str, str]
    #: True if tightwire wrote it for a model that had none.
    own: bool

    @property
    def shards(self) -> list[Path]:
        """The files, in the order in which they are first named."""
        return [self.path.parent / name for name in dict.fromkeys(self.weight_map.values())]


def is_index(path: Path) -> bool:
    """True for the name of an index, with or without a variant such as fp16."""
    return _INDEX.fullmatch(path.name) is not None


def read_index(path: Path) -> Index:
    """An index, checked; its shards exist.

    Raises FormatError("bad_container"), or FileNotFoundError with the name of a missing shard.
    """
    try:
        with reading(path) as reader:
            if reader.nbytes > MAX_JSON:
                raise ValueError(f"more than {MAX_JSON} bytes")
            text = reader.read(0, reader.nbytes).tobytes().decode()
        fields = read_index_object(text)
        if "weight_map" not in fields:
            raise ValueError("no weight_map")
        weight_map = fields["weight_map"]
        for name in dict.fromkeys(map(_shard_name, weight_map.values())):
            if not (path.parent / name).is_file():
                raise FileNotFoundError(
                    errno.ENOENT, f"no such file, but {path.name} names it", str(path.parent / name)
                )
    except (ValueError, RecursionError) as error:
        raise FormatError("bad_container", f"{path} is not an index of shards: {error}") from None
    metadata = fields.get("metadata")
    own = isinstance(metadata, dict) and metadata.get(OWN_KEY) == OWN_VALUE
    return Index(path, text, weight_map, own)


def _shard_name(name: str) -> str:
    """The name of a shard in an index, checked: a plain relative path."""
    path = PurePosixPath(name)
    plain = not path.is_absolute() and ".." not in path.parts and "\\" not in name
    if not plain or "\0" in name or not name.endswith(PLAIN_SUFFIX):
        raise ValueError(f"shard {name!r}; allowed: paths of safetensors files in this directory")
    return name


def index_bytes(weight_map: Mapping[str, str], total_nbytes: int, own: bool) -> bytes:
    """The text of a new index, as Hugging Face writes them."""
    metadata: dict[str, Any] = {"total_size": total_nbytes} | ({OWN_KEY: OWN_VALUE} if own else {})
    fields = {"metadata": metadata, "weight_map": weight_map}
    return (json.dumps(fields, indent=2, sort_keys=True) + "\n").encode()


def with_suffix(text: str, names: Iterable[str], old: str, new: str) -> str:
    """A JSON text with `new` for `old` at the end of all values that are one of `names`."""
    allowed = set(names)

    def replaced(match: re.Match[str]) -> str:
        value, colon = match.groups()
        if colon is not None or not value.endswith(old):
            return match[0]
        name = json.loads(f'"{value}"', strict=False) if "\\" in value else value
        return f'"{value.removesuffix(old)}{new}"' if name in allowed else match[0]

    return _STRING.sub(replaced, text)


def compressed_index(index: Index) -> bytes:
    """The index over compressed shards. ValueError if it could not be restored."""
    names = {name: compressed_name(name) for name in index.weight_map.values()}
    text = with_suffix(index.text, names, PLAIN_SUFFIX, SUFFIX)
    expected = {tensor: names[shard] for tensor, shard in index.weight_map.items()}
    back = with_suffix(text, names.values(), SUFFIX, PLAIN_SUFFIX)
    if index.own or read_index_object(text)["weight_map"] != expected or back != index.text:
        raise ValueError(
            f"{index.path}: decompress could not restore it; allowed: names of shards written "
            "without escapes, and no index or shard that tightwire made"
        )
    return text.encode()


def restored_index(index: Index) -> bytes:
    """The index that a compressed one was made from."""
    names = {name for name in index.weight_map.values() if name.endswith(SUFFIX)}
    return with_suffix(index.text, names, SUFFIX, PLAIN_SUFFIX).encode()


def compressed_name(name: str) -> str:
    """The name of a file's compressed form."""
    return name.removesuffix(PLAIN_SUFFIX) + SUFFIX


def restored_name(name: str) -> str:
    """The name of the file that a compressed one was made from."""
    return name.removesuffix(SUFFIX) + PLAIN_SUFFIX if name.endswith(SUFFIX) else name
