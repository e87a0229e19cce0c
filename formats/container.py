"""The safetensors container that compressed files use (specs/container.md)."""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import FormatError
from .header import ALIGN, MAX_RANK

VERSION_KEY = "tightwire"
SOURCE_KEY = "tightwire.source"
VERSION = "1"
MAX_JSON = 100_000_000

#: Bits per element of every dtype name that safetensors knows.
_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8}
_BITS |= {"F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16}
_BITS |= {"F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "C64": 64, "F64": 64}
_BITS |= {"I64": 64, "U64": 64}


@dataclass(frozen=True)
class Entry:
    """One tensor of a safetensors file; `begin` and `end` count from the start of the data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Directory:
    """A safetensors header: tensors in order of their data, metadata, and the header's bytes."""

    entries: tuple[Entry, ...]
    metadata: Mapping[str, str]
    json_bytes: bytes

    @property
    def data_at(self) -> int:
        """Where the data starts in the file."""
        return 8 + len(self.json_bytes)

    def span(self, entry: Entry) -> slice:
        """Where in the file the data of `entry` lies."""
        return slice(self.data_at + entry.begin, self.data_at + entry.end)

    @property
    def data_nbytes(self) -> int:
        """Bytes of data behind the header."""
        return self.entries[-1].end if self.entries else 0


def _bad(detail: str) -> FormatError:
    return FormatError("bad_container", detail)


def read_directory(data: memoryview) -> Directory:
    """Read and check a whole safetensors file's header. Raises FormatError("bad_container")."""
    if len(data) < 8:
        raise _bad(f"{len(data)} bytes are no safetensors file")
    length = int.from_bytes(data[:8], "little")
    if length > MAX_JSON or length > len(data) - 8:
        raise _bad(f"no safetensors file, or cut off: header of {length} bytes in {len(data)}")
    directory = parse_directory(bytes(data[8 : 8 + length]))
    if directory.data_at + directory.data_nbytes != len(data):
        expected = directory.data_at + directory.data_nbytes
        raise _bad(f"the file has {len(data)} bytes, its header describes {expected}")
    return directory


def parse_directory(json_bytes: bytes) -> Directory:
    """Read and check a safetensors header's JSON."""
    try:
        fields = json.loads(json_bytes.decode(), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise _bad(f"the safetensors header is no JSON: {error}") from None
    if not isinstance(fields, dict):
        raise _bad("the safetensors header is no JSON object")
    try:
        for name in fields:
            name.encode()
    except UnicodeEncodeError:
        raise _bad("a tensor name is no valid Unicode") from None
    metadata = fields.pop("__metadata__", {})
    if not _is_text_map(metadata):
        raise _bad("__metadata__ is no map from text to text")
    entries = sorted(
        (_entry(name, f) for name, f in fields.items()), key=lambda e: (e.begin, e.end)
    )
    at = 0
    for entry in entries:
        if entry.begin != at:
            raise _bad(f"data of {entry.name!r} starts at {entry.begin}, not {at}")
        at = entry.end
    return Directory(tuple(entries), metadata, json_bytes)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a name occurs twice")
    return fields


def _is_text_map(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(v, str) for v in value.values())


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _entry(name: str, fields: Any) -> Entry:
    if not isinstance(fields, dict) or set(fields) != {"dtype", "shape", "data_offsets"}:
        raise _bad(f"entry of {name!r} is not dtype, shape and data_offsets")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise _bad(f"dtype {dtype!r} of {name!r} is not known")
    for value in (shape, offsets):
        if not isinstance(value, list) or not all(map(_is_size, value)):
            raise _bad(f"shape or data_offsets of {name!r} are no list of sizes")
    if len(shape) > MAX_RANK:
        raise _bad(f"{name!r} has {len(shape)} dimensions, at most {MAX_RANK}")
    if len(offsets) != 2 or 8 * (offsets[1] - offsets[0]) != math.prod(shape) * _BITS[dtype]:
        raise _bad(f"data_offsets of {name!r} do not fit its shape")
    return Entry(name, dtype, tuple(shape), *offsets)


def directory_bytes(
    entries: Sequence[Entry], metadata: Mapping[str, str], room: int | None = None
) -> bytes:
    """A file's first bytes: length, JSON, spaces up to a multiple of 128 or up to `room`."""
    fields: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    for e in entries:
        fields[e.name] = {
            "dtype": e.dtype,
            "shape": list(e.shape),
            "data_offsets": [e.begin, e.end],
        }
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    size = room if room is not None else -(-(8 + len(text)) // ALIGN) * ALIGN
    return (size - 8).to_bytes(8, "little") + text.ljust(size - 8)


def compressed_metadata(
    metadata: Mapping[str, str], source: Directory | None = None
) -> dict[str, str]:
    """Metadata of a compressed file: the original's, the version, the source header if given."""
    fields = {k: v for k, v in metadata.items() if k not in (VERSION_KEY, SOURCE_KEY)}
    if source is not None:
        limit = _source_limit(source.entries, fields)
        if len(source.json_bytes) > limit:
            found = len(source.json_bytes)
            raise ValueError(
                f"the source's header has {found} bytes, mostly padding; at most {limit}"
            )
        fields[SOURCE_KEY] = base64.b64encode(zlib.compress(source.json_bytes, 9)).decode()
    fields[VERSION_KEY] = VERSION
    return fields


def _source_limit(entries: Sequence[Entry], metadata: Mapping[str, str]) -> int:
    """Most bytes of source header: a small file must not make its reader unpack a large one."""
    names = sum(len(e.name) + 64 for e in entries)
    texts = sum(len(k) + len(v) for k, v in metadata.items() if k != SOURCE_KEY)
    return (1 << 20) + 16 * (names + texts)


def check_compressed(directory: Directory) -> None:
    """Raise FormatError("bad_container") unless the file is one of tightwire's."""
    version = directory.metadata.get(VERSION_KEY)
    if version is None:
        raise _bad("a safetensors file, but not a compressed one: no 'tightwire' in its metadata")
    if version != VERSION:
        raise _bad(f"container version {version!r}; this reads {VERSION!r}: upgrade tightwire")
    for e in directory.entries:
        if e.dtype != "U8" or len(e.shape) != 1:
            raise _bad(f"{e.name!r} is {e.dtype}{list(e.shape)}, not one-dimensional U8")


def source_directory(directory: Directory) -> Directory | None:
    """The source file's header kept in a compressed file, None if it was not made from a file."""
    text = directory.metadata.get(SOURCE_KEY)
    if text is None:
        return None
    decompressor = zlib.decompressobj()
    try:
        data = decompressor.decompress(
            base64.b64decode(text, validate=True),
            _source_limit(directory.entries, directory.metadata),
        )
    except (ValueError, zlib.error) as error:
        raise _bad(f"the source header is damaged: {error}") from None
    if not decompressor.eof or decompressor.unused_data:
        raise _bad("the source header is damaged or too large")
    source = parse_directory(data)
    if [e.name for e in source.entries] != [e.name for e in directory.entries]:
        raise _bad("the source header names other tensors than the file")
    return source
