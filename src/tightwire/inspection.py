"""Looking at a buffer without decoding it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from . import engine
from .arguments import base_of_buffer, device_for
from .buffer import parsed_source
from .codecs.common.threads import cpu_count
from .formats.container import Directory
from .formats.dtypes import BY_SAFETENSORS
from .formats.header import CHECKSUM, MAJOR, RAW, RECORD, Header, align
from .planning import integer
from .storage import Reader


class Part(NamedTuple):
    """A part of a buffer or a file and its bytes, those of all chunks or tensors together.

    `kind` is "header", "static", "dynamic", "plain" or "padding".
    """

    name: str
    kind: str
    nbytes: int


class ChunkPart(NamedTuple):
    """Where one chunk lies in a buffer, in bytes, and how many elements it holds."""

    elements: int
    static_at: int
    static_nbytes: int
    dynamic_at: int
    dynamic_nbytes: int
    raw: bool


@dataclass(frozen=True)
class Info:
    """The layout of a buffer, from its header and records. Sizes are in bytes.

    Attributes:
        header: The parsed header.
        nbytes: Size of the bytes or buffer that was inspected, slack included.
        packed_nbytes: Size of the packed form, without slack.
        raw_nbytes: Size of the decoded tensor.
        static_nbytes: Static parts of all chunks.
        dynamic_nbytes: Used dynamic bytes of each chunk.
        raw_chunks: Numbers of the chunks that are stored raw.
    """

    header: Header
    nbytes: int
    packed_nbytes: int
    raw_nbytes: int
    static_nbytes: int
    dynamic_nbytes: tuple[int, ...]
    raw_chunks: tuple[int, ...]

    @property
    def ratio(self) -> float:
        """Packed size over raw size; 1.0 for an empty tensor."""
        return self.packed_nbytes / self.raw_nbytes if self.raw_nbytes else 1.0

    def as_dict(self) -> dict[str, Any]:
        """All fields as plain values, ready for JSON, with ``ratio`` added."""
        header = self.header
        return {
            "format": f"{MAJOR}.{header.minor}",
            "codec": header.codec,
            "codec_version": header.codec_version,
            "params": header.params.hex(),
            "dtype": header.dtype.name,
            "shape": list(header.shape),
            "chunks": header.chunks,
            "checksum": bool(header.required & CHECKSUM),
            "dynamic_stride": header.dynamic_stride,
            "sections": [
                {"name": s.name, "nbytes": s.nbytes, "dynamic": s.dynamic} for s in header.sections
            ],
            "nbytes": self.nbytes,
            "packed_nbytes": self.packed_nbytes,
            "raw_nbytes": self.raw_nbytes,
            "static_nbytes": self.static_nbytes,
            "dynamic_nbytes": list(self.dynamic_nbytes),
            "raw_chunks": list(self.raw_chunks),
            "ratio": self.ratio,
            "parts": [part._asdict() for part in self.parts()],
        }

    def parts(self) -> list[Part]:
        """What the buffer consists of; their sizes add up to ``nbytes``.

        A raw chunk holds elements as they are, in its static and then in its dynamic part.
        """
        header = self.header
        n_raw, raw = len(self.raw_chunks), set(self.raw_chunks)
        records = RECORD.itemsize * header.chunks
        head = header.nbytes + records
        parts = [
            Part("header", "header", header.nbytes),
            Part("records", "header", records),
            Part("header padding", "padding", align(head) - head),
        ]
        static = [s for s in header.sections if not s.dynamic]
        parts += [Part(s.name, "static", s.nbytes * (header.chunks - n_raw)) for s in static]
        dynamic = " + ".join(s.name for s in header.sections if s.dynamic)
        coded = sum(n for i, n in enumerate(self.dynamic_nbytes) if i not in raw)
        if n_raw:
            nbytes = n_raw * sum(s.nbytes for s in static)
            parts.append(Part("raw elements", "static", nbytes))
        if dynamic:
            parts.append(Part(dynamic, "dynamic", coded))
        if n_raw:
            nbytes = sum(self.dynamic_nbytes[i] for i in raw)
            parts.append(Part("raw elements", "dynamic", nbytes))
        rest = self.nbytes - sum(part.nbytes for part in parts)
        name = "slack" if header.dynamic_stride else "dynamic padding"
        return [*parts, Part(name, "padding", rest)]

    def chunk_parts(self) -> Iterator[ChunkPart]:
        """Where each chunk lies, in order; nothing is read."""
        header = self.header
        static = self.static_nbytes // header.chunks
        static_at = align(header.nbytes + RECORD.itemsize * header.chunks)
        dynamic_at = static_at + self.static_nbytes
        per_chunk = -(-header.nelem // header.chunks)
        left, raw = header.nelem, set(self.raw_chunks)
        for i, nbytes in enumerate(self.dynamic_nbytes):
            elements = min(per_chunk, left)
            yield ChunkPart(elements, static_at, static, dynamic_at, nbytes, i in raw)
            left -= elements
            static_at += static
            dynamic_at += header.dynamic_stride or align(nbytes)


#: What stands for the codec of a tensor that a file holds as it is.
PLAIN = "plain"


@dataclass(frozen=True)
class PlainInfo:
    """A tensor that a file holds as it is, not as a buffer: dtype's name, shape and bytes."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int

    @property
    def raw_nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.nbytes

    @property
    def packed_nbytes(self) -> int:
        """The same."""
        return self.nbytes

    @property
    def ratio(self) -> float:
        """Nothing is saved."""
        return 1.0

    def as_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {
            "codec": PLAIN,
            "dtype": self.dtype,
            "shape": list(self.shape),
            "nbytes": self.nbytes,
            "raw_nbytes": self.nbytes,
            "packed_nbytes": self.nbytes,
            "ratio": 1.0,
        }


def plain_tensors(directory: Directory) -> dict[str, PlainInfo]:
    """The tensors of a plain safetensors file by name, in the order of its header."""
    entries = {entry.name: entry for entry in directory.entries}
    infos = {}
    for name in directory.names:
        entry = entries[name]
        known = BY_SAFETENSORS.get(entry.dtype)
        dtype = entry.dtype if known is None else known.name
        infos[name] = PlainInfo(dtype, entry.shape, entry.nbytes)
    return infos


def file_parts(nbytes: int, header_nbytes: int, infos: Iterable[Info | PlainInfo]) -> list[Part]:
    """What a file of `nbytes` bytes with these tensors consists of, by the parts of its buffers."""
    sizes: dict[tuple[str, str], int] = {("file header", "header"): header_nbytes}
    for info in infos:
        if isinstance(info, PlainInfo):
            parts = [Part(info.dtype, "plain", info.nbytes)]
        else:
            parts = info.parts()
        for name, kind, size in parts:
            key = (f"buffer {name}s" if name == "header" else name, kind)
            if kind == "padding":
                key = ("padding", kind)
            sizes[key] = sizes.get(key, 0) + size
    padding = ("padding", "padding")
    rest = nbytes - sum(sizes.values()) + sizes.pop(padding, 0)
    listed = [Part(*key, size) for key, size in sizes.items()]
    return [*listed, Part(*padding, rest)] if rest else listed


#: What `estimate` reads of a file: this many pieces of so many bytes.
SAMPLES = 16
SAMPLE_NBYTES = 64 << 10


@dataclass(frozen=True)
class Estimate:
    """What compressing a plain file would probably give: `ratio` is packed over raw size.

    It comes from `samples` pieces of the float tensors, of `sample_nbytes` bytes in all, which were
    compressed with `codec`; other tensors count as they are.
    """

    codec: str
    ratio: float
    samples: int
    sample_nbytes: int


def estimate(reader: Reader, directory: Directory) -> Estimate:
    """Compress pieces of a plain file with zipccl, evenly spread over its float tensors."""
    from .codec import codec

    zipccl = codec("zipccl")
    floats = []
    for entry in directory.entries:
        dtype = BY_SAFETENSORS.get(entry.dtype)
        if dtype is not None and dtype.name in zipccl.dtypes and entry.nbytes:
            floats.append((entry, dtype))
    total = sum(entry.nbytes for entry, _ in floats)
    # Of each tensor the pieces whose middle, of all SAMPLES of them, lies in it; one if small.
    packed, seen, n, done, before = 0.0, 0, 0, 0, 0
    for entry, dtype in floats:
        before += entry.nbytes
        wanted = round(SAMPLES * before / total) - done
        done += wanted
        size = min(SAMPLE_NBYTES, entry.nbytes) // dtype.itemsize * dtype.itemsize
        for i in range(min(wanted, max(1, entry.nbytes // SAMPLE_NBYTES))):
            at = int((entry.nbytes - size) * (i + 0.5) / wanted) // dtype.itemsize * dtype.itemsize
            data = reader.read(directory.data_at + entry.begin + at, size)
            buffer = zipccl.encode(data.view(dtype.numpy), backend="ref")
            info = inspect(buffer.packed())
            # A header for each piece would count what one for each tensor is.
            packed += info.static_nbytes + sum(info.dynamic_nbytes)
            seen += size
            n += 1
    whole = sum(entry.nbytes for entry in directory.entries)
    coded = total * packed / seen if seen else total
    ratio = (whole - total + coded) / whole if whole else 1.0
    return Estimate(zipccl.name, ratio, n, seen)


def inspect(src: Any) -> Info:
    """Read header, sizes and records of a buffer; the payload is not read.

    Args:
        src: A ``Buffer``, a bytes-like object, or a uint8 array of any library.

    Returns:
        The layout.

    Raises:
        FormatError: If header or records are not valid.
        TypeError: If ``src`` is neither of these.

    Example:
        >>> import numpy as np
        >>> import tightwire as tw
        >>> info = tw.inspect(tw.encode(np.zeros(1000, np.float32), "raw"))
        >>> info.header.codec, info.raw_nbytes
        ('raw', 4000)
    """
    gpu = device_for(None, src)
    return info_of(parsed_source(src, 1 << 63) if gpu is None else gpu.head(src))


def info_of(head: engine.Head) -> Info:
    """What the head of a buffer says."""
    plan = head.plan
    return Info(
        header=head.header,
        nbytes=head.nbytes,
        packed_nbytes=head.packed_nbytes,
        raw_nbytes=plan.nelem * plan.dtype.itemsize,
        static_nbytes=plan.static_stride * plan.chunks,
        dynamic_nbytes=tuple(r.dynamic_nbytes for r in head.records),
        raw_chunks=tuple(i for i, r in enumerate(head.records) if r.flags & RAW),
    )


def verify(src: Any, *, base: Any = None, max_nbytes: int | None = None) -> None:
    """Check all that ``decode`` checks, with one chunk in memory at a time.

    Args:
        src: A ``Buffer``, a bytes-like object, or a uint8 array of any library.
        base: As in ``decode``. Without it of a buffer that needs one header, records, checksums and
            padding are checked, and not what was changed.
        max_nbytes: As in ``decode``.

    Raises:
        FormatError: At the first thing that is wrong; ``reason`` names it.
        TypeError: If ``src`` is neither of these.
        ValueError: If ``base`` does not fit.
    """
    if max_nbytes is not None:
        max_nbytes = integer("max_nbytes", max_nbytes, least=0)
    gpu = device_for(None, src)
    if gpu is not None and base is None and gpu.verify(src, max_nbytes) is not NotImplemented:
        return
    parsed = parsed_source(src, max_nbytes)
    against = None if base is None else base_of_buffer(parsed.plan, base)
    engine.verify_chunks(parsed, threads=cpu_count(), base=against)
