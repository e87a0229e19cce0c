"""Looking at a buffer without decoding it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from . import engine
from .buffer import parsed_source
from .codec import device_for
from .codecs.threads import cpu_count
from .formats.header import CHECKSUM, MAJOR, RAW, Header
from .planning import integer


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
        }


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


def verify(src: Any, *, max_nbytes: int | None = None) -> None:
    """Check all that ``decode`` checks, with one chunk in memory at a time.

    Args:
        src: A ``Buffer``, a bytes-like object, or a uint8 array of any library.
        max_nbytes: As in ``decode``.

    Raises:
        FormatError: At the first thing that is wrong; ``reason`` names it.
        TypeError: If ``src`` is neither of these.
    """
    if max_nbytes is not None:
        max_nbytes = integer("max_nbytes", max_nbytes, least=0)
    gpu = device_for(None, src)
    if gpu is not None and gpu.verify(src, max_nbytes) is not NotImplemented:
        return
    engine.verify_chunks(parsed_source(src, max_nbytes), threads=cpu_count())
