"""Every reader of compressed files, and what it makes of one."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import tightwire as tw
from tightwire import convert, file_tensors, tree
from tightwire.contents import read_header
from tightwire.formats.container import (
    LIST_KEY,
    TIED_KEY,
    TREE_KEY,
    VERSION,
    VERSION_KEY,
    Entry,
)
from tightwire.formats.dtypes import BY_SAFETENSORS
from tightwire.formats.errors import REASONS

MAX_NBYTES = 1 << 24
#: A tensor's dtype, shape and bytes.
Value = tuple[str, tuple[int, ...], bytes]
Tensors = dict[str, Value]


def value(x: Any) -> Value:
    return x.dtype.name, x.shape, x.tobytes()


def _load_file(path: Path) -> Tensors:
    return _by_name(tw.load_file(path, max_nbytes=MAX_NBYTES))


def _loads(path: Path) -> Tensors:
    return _by_name(tw.loads(path.read_bytes(), max_nbytes=MAX_NBYTES))


class _Pipe(io.BytesIO):
    """A stream that cannot seek."""

    def seekable(self) -> bool:
        return False

    def seek(self, *_: Any) -> int:
        raise io.UnsupportedOperation("seek")

    def tell(self) -> int:
        raise io.UnsupportedOperation("tell")


class _Short(io.FileIO):
    """An unbuffered file whose reads are short."""

    def read(self, size: int | None = -1, /) -> bytes:
        assert size is not None
        return super().read(min(size, 1009)) or b""


def _pipe(path: Path) -> Tensors:
    return _by_name(tw.load_file(_Pipe(path.read_bytes()), max_nbytes=MAX_NBYTES))


def _short_reads(path: Path) -> Tensors:
    with _Short(path) as file:
        return _by_name(tw.load_file(file, max_nbytes=MAX_NBYTES))


def _behind_others(path: Path) -> Tensors:
    """A file that starts at an odd place of another one."""
    stream = io.BytesIO(b"before!" + path.read_bytes())
    stream.seek(7)
    return _by_name(tw.load_file(stream, max_nbytes=MAX_NBYTES))


def _url(path: Path) -> Tensors:
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.pipe_file("/mutant", path.read_bytes())
    return _by_name(tw.load_file("memory://mutant", max_nbytes=MAX_NBYTES))


def _by_name(tensors: Any) -> Tensors:
    """The arrays by name; of lists and nested dicts by their paths."""
    if isinstance(tensors, dict) and all(map(tree.is_array, tensors.values())):
        return {name: value(x) for name, x in tensors.items()}
    if isinstance(tensors, list) and all(map(tree.is_array, tensors)):
        return {str(i): value(x) for i, x in enumerate(tensors)}
    return {name: value(x) for name, x in tree.flatten([tensors])[0].items()}


def _stored(entry: Entry, data: bytes) -> Value:
    """A tensor of a plain file, as NumPy has it: elements of less than a byte are bytes."""
    if entry.dtype not in BY_SAFETENSORS:
        return "uint8", (entry.nbytes,), data
    return BY_SAFETENSORS[entry.dtype].name, entry.shape, data


def _decompress(path: Path) -> Tensors:
    target = path.with_name("restored")
    try:
        convert.decompress_file(path, target, max_nbytes=MAX_NBYTES)
        with convert.open_plain(target) as (reader, directory):
            return {
                e.name: _stored(e, file_tensors.read_entry(reader, directory, e).tobytes())
                for e in directory.entries
            }
    finally:
        target.unlink(missing_ok=True)


def _verify(path: Path) -> None:
    convert.verify_file(path, max_nbytes=MAX_NBYTES)


def _diff(path: Path) -> None:
    if VERSION_KEY not in read_header(path).metadata:
        # Of plain files, which diff takes too, there is nothing to compare with the others.
        tw.open(path)
    assert convert.diff_files(path, path, max_nbytes=MAX_NBYTES) == []


#: Readers that check whole files; those that give no tensors give None.
WHOLE: dict[str, Callable[[Path], Tensors | None]] = {
    "load_file": _load_file,
    "loads": _loads,
    "decompress": _decompress,
    "verify": _verify,
    "diff": _diff,
    "pipe": _pipe,
    "short reads": _short_reads,
    "behind others": _behind_others,
}
if importlib.util.find_spec("fsspec") is not None:
    WHOLE["url"] = _url


def reason(reader: Callable[[Path], object], path: Path) -> str | None:
    """Why a reader refuses a file; None if it does not."""
    try:
        reader(path)
    except tw.FormatError as error:
        assert error.reason in REASONS
        return error.reason
    return None


def by_tensor(path: Path) -> None:
    """Read what is in a file tensor by tensor, and some rows of each."""
    with tw.open(path, max_nbytes=MAX_NBYTES) as file:
        for name in file:
            lazy = file[name]
            lazy.load()
            if lazy.shape and np.prod(lazy.shape) < MAX_NBYTES:
                assert lazy[-1:].nbytes <= lazy[:].nbytes


def agreed(path: Path) -> str | Tensors:
    """What all readers make of a file: the reason of their refusal, or the tensors."""
    reasons = {name: reason(reader, path) for name, reader in WHOLE.items()}
    assert len(set(reasons.values())) == 1, reasons
    found = reasons["verify"]
    # inspect sees no payload, and has no limit.
    shown = reason(convert.inspect_file, path)
    assert shown in (None, found) or found == "limit_exceeded", (shown, found)
    assert (reason(by_tensor, path) is None) == (found is None)
    if found is not None:
        return found
    tensors = _load_file(path)
    for reader in (_loads, _pipe, _short_reads, _behind_others):
        assert tensors == reader(path)
    restored = _decompress(path)
    metadata = read_header(path).metadata
    if metadata[VERSION_KEY] == VERSION and {LIST_KEY, TIED_KEY, TREE_KEY} & metadata.keys():
        # A plain file has other names, each memory once, and all that a tree leaves out.
        assert set(tensors.values()) <= set(restored.values())
    elif LIST_KEY in metadata:
        assert list(tensors.values()) == list(restored.values())
    else:
        assert tensors == restored
    return tensors
