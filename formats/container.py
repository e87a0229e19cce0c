"""The safetensors container that compressed files use (specs/container.md)."""

from __future__ import annotations

import base64
import json
import math
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import FormatError
from .header import ALIGN, MAX_RANK

#: tightwire's own metadata keys: this one, and all that begin with it and a dot.
VERSION_KEY = "tightwire"
SOURCE_KEY = "tightwire.source"
LIST_KEY = "tightwire.list"
VERSION = "1"
LIST = "1"
METADATA = "__metadata__"
MAX_JSON = 100_000_000
#: Most characters of a tensor's entry, and most entries of the metadata: a header takes memory in
#: proportion to its size.
MAX_ENTRY = 4096
MAX_METADATA = 1 << 16

#: Bits per element of every dtype name that safetensors knows.
_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8}
_BITS |= {"F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16}
_BITS |= {"F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "C64": 64, "F64": 64}
_BITS |= {"I64": 64, "U64": 64}


@dataclass(frozen=True, slots=True)
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
        raise _bad(f"not a safetensors file: {len(data)} bytes")
    length = int.from_bytes(data[:8], "little")
    if length > MAX_JSON or length > len(data) - 8:
        raise _bad(f"not a safetensors file, or cut off: header of {length} bytes in {len(data)}")
    directory = parse_directory(bytes(data[8 : 8 + length]))
    if directory.data_at + directory.data_nbytes != len(data):
        expected = directory.data_at + directory.data_nbytes
        raise _bad(f"the file has {len(data)} bytes, its header describes {expected}")
    return directory


def parse_directory(json_bytes: bytes) -> Directory:
    """Read and check a safetensors header's JSON. Raises FormatError("bad_container")."""
    try:
        fields = _read_object(json_bytes.decode())
        metadata = fields.pop(METADATA, {})
        entries = sorted(fields.values(), key=lambda e: (e.begin, e.end))
        at = 0
        for entry in entries:
            if entry.begin != at:
                raise ValueError(f"data of {entry.name!r} starts at {entry.begin}, not {at}")
            at = entry.end
    except (ValueError, RecursionError) as error:
        raise _bad(f"bad safetensors header: {error}") from None
    return Directory(tuple(entries), metadata, json_bytes)


#: Tokens with the white space around them; the first is also an empty object as a whole.
_OPEN, _COLON, _NEXT, _END = (
    re.compile(rf"[ \t\n\r]*{token}[ \t\n\r]*")
    for token in (r"\{[ \t\n\r]*(\}?)", ":", "([,}])", r"\Z")
)
#: Reads the value of a member from a text: name, text, position; returns the value and its end.
_ReadValue = Callable[[str, str, int], tuple[Any, int]]


def _read_object(text: str) -> dict[str, Any]:
    """Entries by name, and the metadata. Nothing but these is ever built, whatever the text is."""
    fields, at = _members(text, 0, _member, MAX_JSON)
    _token(_END, text, at)
    return fields


def _members(text: str, at: int, read: _ReadValue, limit: int) -> tuple[dict[str, Any], int]:
    """The members, at most `limit`, of the JSON object at `at`, and its end."""
    members: dict[str, Any] = {}
    token = _token(_OPEN, text, at)
    last = token[1]
    while last != "}":
        name, at = _text(text, token.end())
        if name in members:
            raise ValueError(f"{name!r} occurs twice")
        if len(members) == limit:
            raise ValueError(f"an object has more than {limit} members")
        members[name], at = read(name, text, _token(_COLON, text, at).end())
        token = _token(_NEXT, text, at)
        last = token[1]
    return members, token.end()


def _token(pattern: re.Pattern[str], text: str, at: int) -> re.Match[str]:
    found = pattern.match(text, at)
    if found is None:
        raise ValueError(f"malformed JSON at character {at}")
    return found


def _text(text: str, at: int) -> tuple[str, int]:
    """The JSON string at `at`, and its end."""
    if not text.startswith('"', at):
        raise ValueError(f"expected a text at character {at}")
    value, end = _JSON.raw_decode(text, at)
    check_text(value)
    return value, end


def check_text(value: str) -> None:
    """Raise ValueError for a text that UTF-8 cannot hold."""
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{value!r} has a lone surrogate, which is no Unicode text") from None


def _member(name: str, text: str, at: int) -> tuple[Any, int]:
    """A member of the header: the metadata, or the entry of a tensor."""
    if name == METADATA:
        return _members(text, at, lambda key, text, at: _text(text, at), MAX_METADATA)
    end = text.find("}", at, at + MAX_ENTRY) + 1
    if not end:
        raise ValueError(f"the entry of {name!r} does not end within {MAX_ENTRY} characters")
    return _entry(name, _JSON.raw_decode(text[at:end])[0]), end


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a field occurs twice")
    return fields


_JSON = json.JSONDecoder(object_pairs_hook=_unique)


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _entry(name: str, fields: Any) -> Entry:
    if not isinstance(fields, dict) or fields.keys() != _FIELDS:
        raise ValueError(f"entry of {name!r} is not dtype, shape and data_offsets")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise ValueError(f"dtype {dtype!r} of {name!r} is not known")
    for value in (shape, offsets):
        if not isinstance(value, list) or not all(map(_is_size, value)):
            raise ValueError(f"shape or data_offsets of {name!r} are not lists of sizes")
    if len(shape) > MAX_RANK:
        raise ValueError(f"{name!r} has {len(shape)} dimensions, at most {MAX_RANK}")
    if len(offsets) != 2 or 8 * (offsets[1] - offsets[0]) != math.prod(shape) * _BITS[dtype]:
        raise ValueError(f"data_offsets of {name!r} do not fit its shape")
    return Entry(name, dtype, tuple(shape), *offsets)


_FIELDS = {"dtype", "shape", "data_offsets"}


def directory_bytes(
    entries: Sequence[Entry], metadata: Mapping[str, str], room: int | None = None
) -> bytes:
    """A file's first bytes: length, JSON, spaces up to a multiple of 128 or up to `room`.

    Raises ValueError for a header that no reader takes.
    """
    fields: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    for e in entries:
        fields[e.name] = {
            "dtype": e.dtype,
            "shape": list(e.shape),
            "data_offsets": [e.begin, e.end],
        }
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    size = room if room is not None else -(-(8 + len(text)) // ALIGN) * ALIGN
    if size - 8 > MAX_JSON:
        raise ValueError(f"the header would have {size - 8} bytes; allowed: {MAX_JSON}")
    return (size - 8).to_bytes(8, "little") + text.ljust(size - 8)


def is_own(key: str) -> bool:
    """True for the metadata keys that are tightwire's own."""
    return key == VERSION_KEY or key.startswith(f"{VERSION_KEY}.")


def users_metadata(metadata: Mapping[str, str]) -> dict[str, str]:
    """Metadata without tightwire's own."""
    return {k: v for k, v in metadata.items() if not is_own(k)}


def check_names(names: Iterable[Any]) -> None:
    """Raise ValueError for what cannot be the name of a tensor."""
    for name in names:
        if not isinstance(name, str) or name == METADATA:
            raise ValueError(f"tensor name {name!r}; allowed: any text but {METADATA!r}")
        check_text(name)


def check_metadata(metadata: Mapping[Any, Any]) -> None:
    """Raise TypeError or ValueError for what a user cannot store as metadata."""
    if len(metadata) > MAX_METADATA - 2:
        raise ValueError(f"{len(metadata)} metadata entries; allowed: {MAX_METADATA - 2}")
    for key, value in metadata.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise TypeError(f"metadata {key!r}: {value!r}; allowed: text to text")
        if is_own(key):
            raise ValueError(f"metadata {key!r} is tightwire's own; allowed: other keys")
        check_text(key)
        check_text(value)


def compressed_metadata(
    metadata: Mapping[str, str], source: Directory | None = None
) -> dict[str, str]:
    """Metadata of a compressed file: the original's, the version, the source header if given.

    Raises TypeError or ValueError for metadata that a user cannot store.
    """
    check_metadata(metadata)
    fields = dict(metadata)
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
    return min((1 << 20) + 16 * (names + texts), MAX_JSON)


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
    if LIST_KEY in directory.metadata:
        if directory.metadata[LIST_KEY] != LIST:
            raise _bad(f"{LIST_KEY} is {directory.metadata[LIST_KEY]!r}, not {LIST!r}")
        if any(e.name != str(i) for i, e in enumerate(directory.entries)):
            raise _bad("the tensors of a list are not named 0, 1, ... in the order of their data")


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
    if any(map(is_own, source.metadata)):
        raise _bad("the source header has metadata of tightwire's own")
    return source
