"""What makers share: valid buffers, and invalid ones with one thing changed.

The module of a codec has `valid()`, vectors of buffers to read, and `invalid()`, buffers to refuse
by the name of the vector.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import tightwire as tw
from tightwire import homomorphic
from tightwire.formats.checksum import MASK64, identity_term, record_term, words_sum
from tightwire.formats.dtypes import BY_NAME
from tightwire.formats.header import (
    ALIGN,
    CHECKSUM,
    RAW,
    RECORD,
    Header,
    align,
    parse_header,
)

from .data import Array

#: Name, buffer, decoded tensor and, of lossy codecs, the tensor that was encoded.
Vector = tuple[str, bytes, bytes]
LossyVector = tuple[str, bytes, bytes, bytes]
Vectors = Iterator[LossyVector | Vector]
#: Buffer and reason by the name of the vector, and the base of codecs that need one.
Invalid = dict[str, tuple[bytes, str] | tuple[bytes, str, bytes]]
#: Parameter bytes to change, by the name of the vector: an offset and new bytes.
Pokes = Mapping[str, tuple[int, bytes]]

#: The key of every vector that was rounded at random.
KEY = tw.Key(0x0123456789ABCDEF, step=7, rank=3)


# Valid vectors


def encoded(x: Array, codec: str, window: str | int = "tile", **options: Any) -> tw.Buffer:
    """A fresh buffer of the reference backend, of raw or zipccl."""
    params = {} if codec == "raw" else {"window": window}
    return tw.codec(codec, **params).encode(x, backend="ref", **options)


def lossless(name: str, x: Array, codec: str, **options: Any) -> Vector:
    """A packed vector of raw or zipccl: its tensor is the input."""
    buffer = encoded(x, codec, **options)
    check_codec(buffer, codec, name)
    return f"{codec}/{name}", bytes(buffer), x.tobytes()


def lossy(name: str, x: Array, codec: tw.Codec, **options: Any) -> LossyVector:
    """A packed vector of a lossy codec: its tensor is what decoding gives."""
    buffer = codec.encode(x, backend="ref", **options)
    check_codec(buffer, codec.name, name)
    return *decoded(f"{codec.name}/{name}", bytes(buffer)), x.tobytes()


def check_codec(buffer: tw.Buffer, codec: str, name: str) -> None:
    """The encoder must have used the codec that the vector is for."""
    if buffer.header.codec != codec:
        raise AssertionError(f"{name} was stored by {buffer.header.codec}")


def decoded(name: str, data: bytes) -> Vector:
    """A vector that no encoder writes."""
    return name, data, tw.decode(data, backend="ref").tobytes()


def coder(codec: str, *parameters: str) -> Callable[..., LossyVector]:
    """As `lossy`, of a name without dtype, a tensor and options; `parameters` are the codec's."""

    def coded(name: str, x: Array, **options: Any) -> LossyVector:
        params = {k: options.pop(k) for k in parameters if k in options}
        options = {"key": KEY} | options
        return lossy(f"{x.dtype.name}_{name}", x, tw.codec(codec, **params), **options)

    return coded


def summed(name: str, codec: tw.Codec, xs: list[Array], **options: Any) -> Vector:
    """The sum of the buffers of ranks 0, 1, ..., which no encoder writes."""
    combine: Any = np.bitwise_or if codec.reduce_op == "or" else np.maximum
    stats = combine.reduce([codec.measure(x) for x in xs])
    keys = [KEY._replace(rank=rank) for rank in range(len(xs))]
    pairs = zip(xs, keys, strict=True)
    parts = [codec.encode(x, stats=stats, key=k, backend="ref", **options) for x, k in pairs]
    total = homomorphic.add(*parts)
    return decoded(f"{codec.name}/{xs[0].dtype.name}_{name}_sum", bytes(total))


# Invalid vectors: header CRC32C and checksums are those of the changed buffer.


@dataclass
class Parts:
    """A buffer taken apart. `join` puts the parts together, however wrong they are."""

    header: Header
    records: Array
    static: list[bytearray]
    dynamic: list[bytearray]

    @classmethod
    def of(cls, buffer: tw.Buffer) -> Parts:
        """The parts of the packed form."""
        data = bytes(buffer)
        header = parse_header(memoryview(data))
        records = np.frombuffer(data, RECORD, header.chunks, header.nbytes).copy()
        chunks = range(header.chunks)
        static = [bytearray(buffer.static(i)) for i in chunks]
        return cls(header, records, static, [bytearray(buffer.dynamic(i)) for i in chunks])

    def join(self) -> bytes:
        """The buffer; record fields other than sizes and checksums are taken as they are."""
        h = self.header
        chunk_nelem = -(-h.nelem // h.chunks)
        for i, record in enumerate(self.records):
            nelem = max(0, min(chunk_nelem, h.nelem - i * chunk_nelem))
            static, dynamic = (np.frombuffer(p[i], np.uint8) for p in (self.static, self.dynamic))
            total = words_sum(static) + words_sum(dynamic, static.size // 4)
            total += identity_term(h.codec_id, h.codec_version, h.dtype.id, nelem)
            flags, ordinal, info = (int(record[k]) for k in ("flags", "ordinal", "info"))
            total += record_term(dynamic.size, flags, ordinal, info)
            record["checksum"] = total & MASK64 if h.required & CHECKSUM else 0
            record["dynamic_nbytes"] = dynamic.size
        head = h.pack() + self.records.tobytes()
        out = bytearray(head.ljust(align(len(head)), b"\0") + b"".join(self.static))
        for part in self.dynamic:
            slot = h.dynamic_stride or align(len(part))
            out += part.ljust(slot, b"\0")[:slot]
        return bytes(out)


def poked(data: bytes, at: int, new: bytes) -> bytes:
    """`data` with other bytes at offset `at`."""
    return data[:at] + new + data[at + len(new) :]


def changed(parts: Parts, **fields: Any) -> bytes:
    """The buffer with other header fields."""
    parts.header = replace(parts.header, **fields)
    return parts.join()


def sectioned(parts: Parts, *order: int, **fields: Any) -> bytes:
    """The buffer with the sections of these numbers, with other fields."""
    return changed(
        parts, sections=tuple(replace(parts.header.sections[i], **fields) for i in order)
    )


def edited(make: Callable[[], Parts], edit: Callable[[Parts], object]) -> bytes:
    """The buffer after `edit` changed its parts."""
    parts = make()
    edit(parts)
    return parts.join()


def record(parts: Parts, chunk: int, field: str, value: int) -> None:
    """Set a field of a chunk's record."""
    parts.records[field][chunk] = value


def grow(parts: Parts, chunk: int, nbytes: int) -> None:
    """Give a chunk this many dynamic bytes."""
    parts.dynamic[chunk] = parts.dynamic[chunk][:nbytes].ljust(nbytes, b"\0")


def put(parts: Parts, chunk: int, at: int, new: bytes) -> None:
    """Change bytes of a chunk's static part."""
    parts.static[chunk][at : at + len(new)] = new


def with_bytes(make: Callable[..., Parts], chunk: int, at: int, new: bytes, **params: Any) -> bytes:
    """The buffer of `make(**params)` with other bytes in a chunk's static part."""
    return edited(lambda: make(**params), lambda parts: put(parts, chunk, at, new))


def refused(reason: str, vectors: dict[str, bytes]) -> Invalid:
    """Vectors that are refused for the same reason."""
    return {name: (data, reason) for name, data in vectors.items()}


def with_params(make: Callable[[], Parts], wrong: Pokes) -> Invalid:
    """Buffers with parameters that no encoder writes: these, none, and of another length.

    Where there are none any are wrong.
    """
    params = make().header.params
    changes = {name: poked(params, at, new) for name, (at, new) in wrong.items()}
    if params:
        other = params + bytes(8) if len(params) == 8 else params[:8]
        changes |= {"no_parameters": b"", f"{len(other)}_byte_parameters": other}
    else:
        changes["parameters"] = bytes(8)
    return refused("bad_header", {name: changed(make(), params=p) for name, p in changes.items()})


def headers(make: Callable[[], Parts], wrong: Pokes, small: int = 0, grown: int = 0) -> Invalid:
    """Headers and records that are wrong for all lossy codecs, `wrong` parameters among them.

    Of `small` elements the codec makes no shorter chunk; `grown` is a chunk with dynamic bytes.
    """
    *first, before, last = range(len(make().header.sections))
    kind = {3: "index", 4: "scales"}[make().header.sections[last].kind]
    found = {
        "of_float64": changed(make(), dtype=BY_NAME["float64"]),
        "sections_swapped": sectioned(make(), *first, last, before),
        f"no_{kind}_section": sectioned(make(), *first, before),
        "dynamic_stride": changed(make(), dynamic_stride=ALIGN),
    }
    if small:
        found["gains_nothing"] = changed(make(), shape=(small,))
    records = {
        "raw_flag": edited(make, lambda p: record(p, 0, "flags", RAW)),
        "dynamic_bytes": edited(make, lambda p: grow(p, grown, 1)),
    }
    version = {"version_2": changed(make(), codec_version=2)}
    return (
        with_params(make, wrong)
        | refused("bad_header", found)
        | refused("bad_record", records)
        | refused("unsupported_version", version)
    )


def named(codec: str, *found: Invalid) -> Invalid:
    """All of `found`, the codec in front of their names."""
    return {f"{codec}_{name}": pair for part in found for name, pair in part.items()}
