"""The safetensors container that compressed files use (specs/container.md)."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

from .errors import FormatError
from .header import ALIGN, MAGIC, MAX_RANK

#: tightwire's own metadata keys: this one, and all that begin with it and a dot.
VERSION_KEY = "tightwire"
SOURCE_KEY = "tightwire.source"
LIST_KEY = "tightwire.list"
DIGEST_KEY = "tightwire.digest"
PLAIN_KEY = "tightwire.plain"
TIED_KEY = "tightwire.tied"
TREE_KEY = "tightwire.tree"
BASE_KEY = "tightwire.base"
STATE_KEY = "tightwire.state"
OWN_KEYS = (
    VERSION_KEY,
    SOURCE_KEY,
    LIST_KEY,
    DIGEST_KEY,
    PLAIN_KEY,
    TIED_KEY,
    TREE_KEY,
    BASE_KEY,
    STATE_KEY,
)
#: Most files of deltas in a row.
MAX_DELTAS = 256
#: The largest number of a version in a delta directory.
MAX_VERSION = 10**18 - 1
VERSION = "2"
#: The version before: no digest, every tensor a buffer.
FIRST_VERSION = "1"
LIST = "1"
METADATA = "__metadata__"
#: What stands for the digest while it is computed.
NO_DIGEST = "0" * 64
#: Hexadecimal digits of a plain tensor's CRC32C.
CRC_DIGITS = 8
MAX_JSON = 100_000_000
#: Most characters of a tensor's entry, and most entries of the metadata and of the tied names: a
#: header takes memory in proportion to its size.
MAX_ENTRY = 4096
MAX_METADATA = 1 << 16
#: Most characters of the texts that a JSON parser reads: it makes up to 25 times as many bytes.
MAX_TREE = 1 << 22
#: Most members of an index of shards, and characters of one that is not its weight_map.
MAX_INDEX_MEMBERS = 64
MAX_INDEX_VALUE = 1 << 20
#: Tensors of at most so many bytes are stored plain: a buffer would be no smaller.
PLAIN_NBYTES = 1024
_CRC_STEP = 1 << 18

#: Bits per element of every dtype name that safetensors knows.
BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8}
BITS |= {"F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16}
BITS |= {"F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "C64": 64, "F64": 64}
BITS |= {"I64": 64, "U64": 64}


class Entry(NamedTuple):
    """One tensor of a safetensors file; `begin` and `end` count from the start of the data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return self.end - self.begin

    @property
    def is_buffer(self) -> bool:
        """True for the form of an encoded tensor, False for a tensor stored plain."""
        return self.dtype == "U8" and len(self.shape) == 1


@dataclass(frozen=True)
class Directory:
    """A safetensors header: tensors in order of their data, metadata, and the header's bytes.

    `names` has the order of the header's members.
    """

    entries: tuple[Entry, ...]
    metadata: Mapping[str, str]
    json_bytes: bytes
    names: tuple[str, ...]

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
    """As `directory_of`, of a file whose bytes are all here."""
    return directory_of(lambda start, nbytes: data[start : start + nbytes], len(data))


def directory_of(read: Callable[[int, int], Any], nbytes: int) -> Directory:
    """Read and check the header of a safetensors file of `nbytes` bytes.

    `read(start, n)` gives n of its bytes. Raises FormatError("bad_container").
    """
    if nbytes < 8:
        raise _bad(f"not a safetensors file: {nbytes} bytes")
    start = bytes(read(0, 8))
    if start.startswith(MAGIC):
        raise _bad("this is one buffer, not a file or a message of dumps: decode reads it")
    length = int.from_bytes(start, "little")
    if length > MAX_JSON or length > nbytes - 8:
        raise _bad(f"not a safetensors file, or cut off: header of {length} bytes in {nbytes}")
    directory = parse_directory(bytes(read(8, length)))
    if directory.data_at + directory.data_nbytes != nbytes:
        expected = directory.data_at + directory.data_nbytes
        raise _bad(f"the file has {nbytes} bytes, its header describes {expected}")
    return directory


def parse_directory(json_bytes: bytes) -> Directory:
    """Read and check a safetensors header's JSON. Raises FormatError("bad_container")."""
    try:
        fields = _read_object(json_bytes.decode())
        metadata = fields.pop(METADATA, {})
        names = tuple(fields)
        entries = sorted(fields.values(), key=attrgetter("begin", "end"))
        at = 0
        for entry in entries:
            if entry.begin != at:
                raise ValueError(f"data of {entry.name!r} starts at {entry.begin}, not {at}")
            at = entry.end
    except (ValueError, RecursionError) as error:
        raise _bad(f"bad safetensors header: {error}") from None
    return Directory(tuple(entries), metadata, json_bytes, names)


#: Tokens with the white space around them; the first is also an empty object as a whole.
_OPEN, _COLON, _NEXT, _END = (
    re.compile(rf"[ \t\n\r]*{token}[ \t\n\r]*")
    for token in (r"\{[ \t\n\r]*(\}?)", ":", "([,}])", r"\Z")
)
#: Reads the value of a member from a text: name, text, position; returns the value and its end.
_ReadValue = Callable[[str, str, int], tuple[Any, int]]
#: Reads members of an object from a position on, but not its last one; returns where it stopped.
_Skip = Callable[[str, int, dict[str, Any]], int]

_SIZE = "(?:0|[1-9][0-9]{0,17})"
#: Dtypes with shapes that are kept while a header is read.
_MAX_KINDS = 1024
#: An entry as safetensors and tightwire write it, and the comma before the next one.
_USUAL = re.compile(
    r'"([^"\\\x00-\x1f]*)":\{"dtype":"(\w{1,16}'
    rf'","shape":\[(?:{_SIZE}(?:,{_SIZE}){{0,{MAX_RANK - 1}}})?)\],'
    rf'"data_offsets":\[({_SIZE}),({_SIZE})\]\}},',
    re.ASCII,
)


def _read_object(text: str) -> dict[str, Any]:
    """Entries by name, and the metadata. Nothing but these is ever built, whatever the text is."""
    fields, at = _members(text, 0, _member, MAX_JSON, _usual_entries)
    _token(_END, text, at)
    return fields


def _members(
    text: str, at: int, read: _ReadValue, limit: int, skip: _Skip | None = None
) -> tuple[dict[str, Any], int]:
    """The members, at most `limit`, of the JSON object at `at`, and its end.

    `skip` reads members by itself where it can.
    """
    members: dict[str, Any] = {}
    token = _token(_OPEN, text, at)
    last = token[1]
    while last != "}":
        at = token.end() if skip is None else skip(text, token.end(), members)
        name, at = _text(text, at)
        if name in members:
            raise ValueError(f"{name!r} occurs twice")
        if len(members) == limit:
            raise ValueError(f"an object has more than {limit} members")
        members[name], at = read(name, text, _token(_COLON, text, at).end())
        token = _token(_NEXT, text, at)
        last = token[1]
    return members, token.end()


def read_index_object(text: str) -> dict[str, Any]:
    """The members of an index of shards; `weight_map` has a text for each name.

    What other members may hold is bounded, so that memory is in proportion to the text. Raises
    ValueError, or RecursionError.
    """

    def member(name: str, text: str, at: int) -> tuple[Any, int]:
        if name == "weight_map":
            return _members(text, at, lambda key, text, at: _text(text, at), MAX_JSON)
        value, nchars = _JSON.raw_decode(text[at : at + MAX_INDEX_VALUE])
        return value, at + nchars

    fields, at = _members(text, 0, member, MAX_INDEX_MEMBERS)
    _token(_END, text, at)
    return fields


def _usual_entries(text: str, at: int, members: dict[str, Entry]) -> int:
    """Read sound entries in the usual form, several times as fast as `_member` does.

    It stops at the first member that is not one, which `_member` reads or refuses.
    """
    kinds: dict[str, tuple[str, tuple[int, ...], int]] = {}
    while (found := _USUAL.match(text, at)) is not None:
        name, kind, first, last = found.groups()
        known = kinds.get(kind)
        if known is None:
            dtype, _, sizes = kind.partition('","shape":[')
            if dtype not in BITS:
                break
            shape = tuple(map(int, sizes.split(","))) if sizes else ()
            known = dtype, shape, math.prod(shape) * BITS[dtype]
            if len(kinds) < _MAX_KINDS:
                kinds[kind] = known
        dtype, shape, nbits = known
        begin, end = int(first), int(last)
        if 8 * (end - begin) != nbits or name in members or name == METADATA:
            break
        members[name] = Entry(name, dtype, shape, begin, end)
        at = found.end()
    return at


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
            raise ValueError(f"{value!r} has a lone surrogate, not valid in Unicode text") from None


def _member(name: str, text: str, at: int) -> tuple[Any, int]:
    """A member of the header: the metadata, or the entry of a tensor."""
    if name == METADATA:
        return _members(text, at, lambda key, text, at: _text(text, at), MAX_METADATA)
    end = text.find("}", at, at + MAX_ENTRY) + 1
    if not end:
        raise ValueError(f"the entry of {name!r} does not end within {MAX_ENTRY} characters")
    return _entry(name, _JSON.raw_decode(text[at:end])[0]), end


def unique_members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The members of a JSON object; ValueError if a name occurs twice."""
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a field occurs twice")
    return fields


_JSON = json.JSONDecoder(object_pairs_hook=unique_members)


def check_size(entry: Entry) -> None:
    """Raise FormatError("bad_container") for a plain tensor of a shape that no array has.

    The rule is that of buffers, for all dimensions but zeros.
    """
    if math.prod(n or 1 for n in entry.shape) * BITS[entry.dtype] >= 1 << 66:
        raise _bad(f"{entry.name!r} is too large apart from its zeros: shape {list(entry.shape)}")


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _entry(name: str, fields: Any) -> Entry:
    if not isinstance(fields, dict) or fields.keys() != _FIELDS:
        raise ValueError(f"entry of {name!r} is not dtype, shape and data_offsets")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise ValueError(f"dtype {dtype!r} of {name!r} is not known")
    for value in (shape, offsets):
        if not isinstance(value, list) or not all(map(_is_size, value)):
            raise ValueError(f"shape or data_offsets of {name!r} are not lists of sizes")
    if len(shape) > MAX_RANK:
        raise ValueError(f"{name!r} has {len(shape)} dimensions, at most {MAX_RANK}")
    if len(offsets) != 2 or 8 * (offsets[1] - offsets[0]) != math.prod(shape) * BITS[dtype]:
        raise ValueError(f"data_offsets of {name!r} do not fit its shape")
    return Entry(name, dtype, tuple(shape), *offsets)


_FIELDS = {"dtype", "shape", "data_offsets"}


def directory_bytes(
    entries: Sequence[Entry], metadata: Mapping[str, str], nbytes: int | None = None
) -> bytes:
    """A file's first bytes: length, JSON, spaces up to a multiple of 128 or up to `nbytes`.

    A digest in `metadata` is replaced by the right one. Raises ValueError for a header that no
    reader takes.
    """
    fields: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    for e in entries:
        fields[e.name] = {
            "dtype": e.dtype,
            "shape": list(e.shape),
            "data_offsets": [e.begin, e.end],
        }
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    size = nbytes if nbytes is not None else -(-(8 + len(text)) // ALIGN) * ALIGN
    if size - 8 > MAX_JSON:
        raise ValueError(f"the header would have {size - 8} bytes; allowed: {MAX_JSON}")
    text = text.ljust(size - 8)
    if DIGEST_KEY in metadata:
        text = text.replace(_digest_member(NO_DIGEST), _digest_member(_digest(text)), 1)
    return (size - 8).to_bytes(8, "little") + text


def _digest_member(value: str) -> bytes:
    """What the digest looks like in a header; within a text its quotes would be escaped."""
    return f'"{DIGEST_KEY}":"{value}"'.encode()


def _digest(json_bytes: bytes) -> str:
    """SHA-256 of a header in which the digest is `NO_DIGEST`."""
    return hashlib.sha256(json_bytes).hexdigest()


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
    limit = MAX_METADATA - len(OWN_KEYS)
    if len(metadata) > limit:
        raise ValueError(f"{len(metadata)} metadata entries; allowed: {limit}")
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
    """Metadata of a compressed file: the original's, and the source header if given.

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
    return fields | {VERSION_KEY: VERSION, DIGEST_KEY: NO_DIGEST}


def _source_limit(entries: Sequence[Entry], metadata: Mapping[str, str]) -> int:
    """Most bytes of source header: a small file must not make its reader unpack a large one."""
    names = sum(len(e.name) + 64 for e in entries)
    texts = sum(len(k) + len(v) for k, v in metadata.items() if k != SOURCE_KEY)
    return min((1 << 20) + 16 * (names + texts), MAX_JSON)


def check_compressed(directory: Directory) -> None:
    """Raise FormatError("bad_container") unless the file is one of tightwire's."""
    metadata = directory.metadata
    version = metadata.get(VERSION_KEY)
    if version is None:
        raise _bad(
            "a safetensors file, but not a compressed one: no 'tightwire' in its metadata. Run "
            "'tightwire compress' on it first, or load it with safetensors"
        )
    if version == VERSION:
        _check_digest(directory)
        _check_plain(directory)
        _check_order(metadata)
    elif version == FIRST_VERSION:
        for e in directory.entries:
            if not e.is_buffer:
                raise _bad(f"{e.name!r} is {e.dtype}{list(e.shape)}, not one-dimensional U8")
    else:
        raise _bad(f"container version {version!r}; this reads up to {VERSION!r}: upgrade")
    if LIST_KEY in metadata:
        if metadata[LIST_KEY] != LIST:
            raise _bad(f"{LIST_KEY} is {metadata[LIST_KEY]!r}, not {LIST!r}")
        _check_list(directory, version)


def _check_digest(directory: Directory) -> None:
    value = directory.metadata.get(DIGEST_KEY, "")
    member = _digest_member(value)
    if re.fullmatch("[0-9a-f]{64}", value) is None or directory.json_bytes.count(member) != 1:
        raise _bad(f"{DIGEST_KEY} is {value[:64]!r}, not written as 64 hexadecimal digits")
    if _digest(directory.json_bytes.replace(member, _digest_member(NO_DIGEST))) != value:
        raise _bad("the header is damaged: its digest is another one")


def _check_plain(directory: Directory) -> None:
    """Plain tensors lie behind the buffers, and each has a checksum."""
    plain = [e for e in directory.entries if not e.is_buffer]
    text = directory.metadata.get(PLAIN_KEY, "")
    if len(text) != CRC_DIGITS * len(plain) or re.fullmatch("[0-9a-f]*", text) is None:
        raise _bad(f"{PLAIN_KEY} is not {CRC_DIGITS} hexadecimal digits for each plain tensor")
    behind = directory.entries[len(directory.entries) - len(plain) :]
    if any(e.is_buffer for e in behind):
        raise _bad("a buffer lies behind plain tensors")
    for e in plain:
        check_size(e)


def _check_order(metadata: Mapping[str, str]) -> None:
    """No two keys say which tensors there are and in which order; a tree may name tied ones."""
    found = [key for key in (SOURCE_KEY, LIST_KEY, TIED_KEY, TREE_KEY) if key in metadata]
    if len(found) > 1 and found != [TIED_KEY, TREE_KEY]:
        raise _bad(f"{found[0]} together with {found[1]}")


def crc32c(data: memoryview) -> int:
    """CRC32C of bytes."""
    import google_crc32c

    value = 0
    for at in range(0, len(data), _CRC_STEP):
        # It takes nothing but bytes.
        value = google_crc32c.extend(value, bytes(data[at : at + _CRC_STEP]))
    return value


def plain_checksums(directory: Directory) -> dict[str, int]:
    """CRC32C of the data of every plain tensor, by name."""
    plain = [e.name for e in directory.entries if not e.is_buffer]
    text = directory.metadata.get(PLAIN_KEY, "")
    digits = [text[i : i + CRC_DIGITS] for i in range(0, len(text), CRC_DIGITS)]
    return dict(zip(plain, (int(d, 16) for d in digits), strict=True)) if plain else {}


def _check_list(directory: Directory, version: str) -> None:
    names = [e.name for e in directory.entries]
    if version == VERSION:
        names = list(directory.names)
    if names != [str(i) for i in range(len(names))]:
        raise _bad("the tensors of a list are not named 0, 1, ... in their order")


def tied_names(directory: Directory) -> dict[str, str]:
    """Other names of tensors: of each the name that it is stored under."""
    if directory.metadata.get(VERSION_KEY) != VERSION or TIED_KEY not in directory.metadata:
        return {}
    names = set(directory.names)
    tied: dict[str, str] = {}
    try:
        text = directory.metadata[TIED_KEY]
        tied, at = _members(text, 0, lambda key, text, at: _text(text, at), MAX_METADATA)
        _token(_END, text, at)
    except (ValueError, RecursionError) as error:
        raise _bad(f"bad {TIED_KEY}: {error}") from None
    for alias, name in tied.items():
        if alias in names or alias == METADATA or name not in names:
            raise _bad(f"{TIED_KEY} ties {alias!r} to {name!r}")
    return tied


def tied_text(tied: Mapping[str, str]) -> str:
    """What `tied_names` reads. ValueError for more names than it takes."""
    if len(tied) > MAX_METADATA:
        raise ValueError(f"{len(tied)} names of tied tensors; allowed: {MAX_METADATA}")
    return json.dumps(dict(tied), separators=(",", ":"), ensure_ascii=False)


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
    if directory.metadata[VERSION_KEY] == VERSION:
        # Plain tensors lie behind the others.
        same = set(source.names) == set(directory.names)
    else:
        same = [e.name for e in source.entries] == [e.name for e in directory.entries]
    if not same:
        raise _bad("the source header names other tensors than the file")
    if any(map(is_own, source.metadata)):
        raise _bad("the source header has metadata of tightwire's own")
    return source


class BaseNote(NamedTuple):
    """What a file of deltas says of the file that they are against: its name, without folders.

    `deltas` is the number of files of deltas in a row, this one included.
    """

    file: str
    deltas: int

    @property
    def text(self) -> str:
        """The value in the metadata."""
        return json.dumps(self._asdict(), ensure_ascii=False, separators=(",", ":"))


def base_note(directory: Directory) -> BaseNote | None:
    """See `BaseNote`; None of files without deltas. Raises FormatError."""
    text = directory.metadata.get(BASE_KEY)
    if text is None:
        return None
    try:
        found = json.loads(text)
        note = BaseNote(**found)
    except (ValueError, TypeError, RecursionError):
        raise _bad(f"{BASE_KEY} is {text[:64]!r}, no object of file and deltas") from None
    name, deltas = note
    if type(name) is not str or name in ("", ".", "..") or any(c in name for c in "/\\\0"):
        raise _bad(f"{BASE_KEY} names {name!r:.64}, not a file without its folder")
    if type(deltas) is not int or not 1 <= deltas <= MAX_DELTAS:
        raise _bad(f"{BASE_KEY} counts {deltas!r:.64} files; allowed: 1 to {MAX_DELTAS}")
    return note


class StateNote(NamedTuple):
    """What a file of a delta directory says of its tensors: which version they are.

    `tensors` has for each name two digests, of the version that the file is against and of its own;
    None where there is no such tensor. Without `base_version` all of the former are None.
    """

    version: int
    base_version: int | None
    tensors: Mapping[str, tuple[str | None, str | None]]

    @property
    def text(self) -> str:
        """The value in the metadata."""
        return json.dumps(self._asdict(), ensure_ascii=False, separators=(",", ":"))

    @property
    def digests(self) -> dict[str, str]:
        """Of the tensors of this version, by name."""
        return {name: new for name, (_, new) in self.tensors.items() if new is not None}

    @property
    def base_digests(self) -> dict[str, str]:
        """Of the tensors of the version that the file is against."""
        return {name: old for name, (old, _) in self.tensors.items() if old is not None}


def state_note(directory: Directory) -> StateNote:
    """See `StateNote`. Raises FormatError, also for files without one."""
    text = directory.metadata.get(STATE_KEY)
    if text is None:
        raise _bad(f"no {STATE_KEY}: not a file of a delta directory")
    try:
        note = StateNote(**_JSON.decode(text))
    except (ValueError, TypeError, RecursionError) as error:
        raise _bad(f"{STATE_KEY} is not an object of versions and tensors: {error}") from None
    version, base_version, tensors = note
    if not _is_version(version) or not (base_version is None or _is_version(base_version)):
        raise _bad(f"{STATE_KEY} has versions {version!r:.40} and {base_version!r:.40}")
    if base_version is not None and base_version >= version:
        raise _bad(f"{STATE_KEY}: version {version} against {base_version}, which is not earlier")
    if not isinstance(tensors, dict):
        raise _bad(f"{STATE_KEY} has no tensors")
    for name, pair in tensors.items():
        if not isinstance(pair, list) or len(pair) != 2 or not all(map(_is_state_digest, pair)):
            raise _bad(f"{STATE_KEY} has no two digests of {name!r:.64}")
        if base_version is None and pair[0] is not None:
            raise _bad(f"{STATE_KEY} has a digest of a base, and no base_version")
    return note


def _is_version(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_VERSION


def _is_state_digest(value: Any) -> bool:
    return value is None or (
        isinstance(value, str) and re.fullmatch("[0-9a-f]{16}", value) is not None
    )
