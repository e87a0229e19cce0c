"""raw.md."""

from .common import Dtype, Header, Section, align, check

ID = 1


def parameters(params: bytes, dtype: Dtype) -> None:
    """There are none."""
    check(not params, "bad_header", "raw has no parameters")


def sections(params: None, dtype: Dtype, chunk_nelem: int) -> list[Section]:
    """raw.md, "Layout"."""
    return [Section(1, 0, align(chunk_nelem * dtype.nbytes) // 128)]


def used(h: Header, nelem: int) -> list[tuple[int, int]]:
    """Where the bytes in use begin and end in a static part."""
    return [(0, nelem * h.dtype.nbytes)]


def decode(h: Header, nelem: int, static: bytes, dynamic: bytes) -> bytes:
    """raw.md, "Decoding", and of other codecs a chunk that is stored raw."""
    return (static + dynamic)[: nelem * h.dtype.nbytes]
