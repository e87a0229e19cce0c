"""What a publisher says of a version before its tensors travel, and the messages they travel in."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from ...file_tensors import Kind
from ...formats.container import BITS, PLAIN_NBYTES, check_names
from ...formats.dtypes import BY_NAME, DType
from ...formats.errors import FormatError
from ...formats.header import MAX_RANK
from ...pipeline import grouped
from ...state_tensors import State, memory_key

#: What a rank needs: differences from the base, or everything.
Stream = Literal["delta", "whole"]
#: Most bytes of an announcement: a million tensors.
MAX_NBYTES = 1 << 28
#: Messages of differences, which are short, have the tensors of so many messages of whole ones.
DELTA_BUCKETS = 2
#: Bytes of the digest of a state.
DIGEST_NBYTES = 16
#: A buffer has at most so many bytes more than its tensor, and one for each so many of them.
_HEAD_NBYTES, _SHARE = 4096, 64
_DIGEST = re.compile("[0-9a-f]{16}", re.ASCII)
#: What a tensor has in the text, in this order.
_FIELDS = ("names", "dtype", "shape", "digest", "before")


class Announced(NamedTuple):
    """One tensor: all its names, its digest, and that of the base's tensor of the same kind.

    `before` is None unless the base has it by all its names, of one digest: a tensor that is not
    sent, or is sent as what changed, is known by each of them.
    """

    names: tuple[str, ...]
    dtype: DType | str
    shape: tuple[int, ...]
    digest: str
    before: str | None

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        bits = 8 * self.dtype.itemsize if isinstance(self.dtype, DType) else BITS[self.dtype]
        return math.prod(self.shape) * bits // 8

    @property
    def is_plain(self) -> bool:
        """Whether it travels as it is: no codec makes it smaller."""
        return not isinstance(self.dtype, DType) or self.nbytes <= PLAIN_NBYTES

    def fits(self, nbytes: int) -> bool:
        """Whether so many bytes of a message may be this tensor."""
        if self.is_plain:
            return nbytes == self.nbytes
        return 0 < nbytes <= self.nbytes + self.nbytes // _SHARE + _HEAD_NBYTES


class Announcement:
    """The tensors of a version, and how many bytes of them share a message if they are whole.

    It is `Tensors` without elements: names, kinds, and which names are one tensor.
    """

    label = "the version"

    def __init__(self, tensors: Sequence[Announced], bucket_nbytes: int) -> None:
        self.tensors = tuple(tensors)
        self.bucket_nbytes = bucket_nbytes
        self._by_name = {name: tensor for tensor in self.tensors for name in tensor.names}

    @classmethod
    def of(
        cls,
        state: State,
        digests: Mapping[str, str],
        base: State | None,
        base_digests: Mapping[str, str],
        bucket_nbytes: int,
    ) -> Announcement:
        """That of a state, whose receivers may have a base."""
        names: dict[Any, list[str]] = {}
        for name in state.names:
            names.setdefault(memory_key(state, name), []).append(name)
        known = {} if base is None else {name: base.kind(name) for name in base.names}
        tensors = []
        for tied in names.values():
            kind = state.kind(tied[0])
            old = {base_digests[name] if known.get(name) == kind else None for name in tied}
            before = old.pop() if len(old) == 1 else None
            tensors.append(Announced(tuple(tied), *kind, digests[tied[0]], before))
        return cls(tensors, bucket_nbytes)

    @property
    def names(self) -> list[str]:
        """See `Tensors`."""
        return list(self._by_name)

    def kind(self, name: str) -> Kind:
        """See `Tensors`."""
        found = self._by_name[name]
        return found.dtype, found.shape

    def memory(self, name: str) -> Hashable:
        """What is equal for names of one tensor."""
        return self._by_name[name].names

    def bits(self, name: str, threads: int | None = None) -> Any:
        """There are none."""
        raise NotImplementedError("an announcement has no elements")

    @property
    def digests(self) -> dict[str, str]:
        """The digest of every tensor by name."""
        return {name: tensor.digest for name, tensor in self._by_name.items()}

    def messages(self, streams: Sequence[Stream]) -> Iterator[tuple[Stream, list[Announced]]]:
        """The tensors of each message, in the order in which they travel."""
        for stream in streams:
            sent = [t for t in self.tensors if stream == "whole" or t.before != t.digest]
            most = self.bucket_nbytes * (DELTA_BUCKETS if stream == "delta" else 1)
            for bucket in grouped(sent, lambda t: t.nbytes, most):
                yield stream, bucket

    def pack(self) -> bytes:
        """The bytes that travel: JSON."""
        rows = [
            [t.names, t.dtype.name if isinstance(t.dtype, DType) else t.dtype, *t[2:]]
            for t in self.tensors
        ]
        found = {"bucket_nbytes": self.bucket_nbytes, "tensors": rows}
        return json.dumps(found, ensure_ascii=False, separators=(",", ":")).encode()

    @classmethod
    def parse(cls, data: bytes, max_nbytes: int) -> Announcement:
        """That of `data`, from anybody. Raises FormatError."""
        try:
            found = json.loads(data.decode())
        except (ValueError, RecursionError) as error:
            raise _bad(f"it is not JSON: {error}") from None
        if not isinstance(found, dict) or found.keys() != {"bucket_nbytes", "tensors"}:
            raise _bad("it is not an object of bucket_nbytes and tensors")
        bucket_nbytes, rows = found["bucket_nbytes"], found["tensors"]
        if type(bucket_nbytes) is not int or bucket_nbytes < 1:
            raise _bad(f"bucket_nbytes is {bucket_nbytes!r:.40}")
        if not isinstance(rows, list):
            raise _bad("tensors is not a list")
        seen: set[str] = set()
        tensors = []
        for row in rows:
            tensor = _announced(row)
            if not seen.isdisjoint(tensor.names) or len(set(tensor.names)) < len(tensor.names):
                raise _bad(f"tensor {tensor.names[0]!r:.64} has a name twice")
            seen.update(tensor.names)
            if tensor.nbytes > max_nbytes:
                detail = f"tensor {tensor.names[0]!r:.64} has {tensor.nbytes} bytes; "
                raise FormatError("limit_exceeded", f"{detail}max_nbytes is {max_nbytes}")
            tensors.append(tensor)
        return cls(tensors, bucket_nbytes)


def state_digest(state: State | Announcement, digests: Mapping[str, str]) -> bytes:
    """Digest of all names, kinds and elements, `DIGEST_NBYTES` bytes."""
    lines = []
    for name in sorted(state.names):
        dtype, shape = state.kind(name)
        label = dtype.name if isinstance(dtype, DType) else dtype
        lines.append(json.dumps([name, label, list(shape), digests[name]]))
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=DIGEST_NBYTES).digest()


def _announced(row: Any) -> Announced:
    """One checked tensor of the text."""
    if not isinstance(row, list) or len(row) != len(_FIELDS):
        raise _bad(f"a tensor is {row!r:.64}; needed: {', '.join(_FIELDS)}")
    names, label, shape, digest, before = row
    if not isinstance(names, list) or not names:
        raise _bad(f"names are {names!r:.64}")
    try:
        check_names(names)
    except ValueError as error:
        raise _bad(str(error)) from None
    what = f"tensor {names[0]!r:.64}"
    dtype = BY_NAME.get(label, label) if isinstance(label, str) else None
    if not isinstance(dtype, DType) and dtype != "F4":
        raise _bad(f"{what} has the dtype {label!r:.40}")
    if not isinstance(shape, list) or len(shape) > MAX_RANK or not all(map(_is_size, shape)):
        raise _bad(f"{what} has the shape {shape!r:.64}")
    if dtype == "F4" and (not shape or shape[-1] % 2):
        raise _bad(f"{what} has the shape {shape!r:.64}, no pairs of 4-bit floats")
    if not _is_digest(digest) or not (before is None or _is_digest(before)):
        raise _bad(f"{what} has the digests {digest!r:.40} and {before!r:.40}")
    return Announced(tuple(names), dtype, tuple(shape), digest, before)


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None


def _bad(detail: str) -> FormatError:
    return FormatError("bad_container", f"the announcement of a version: {detail}")
