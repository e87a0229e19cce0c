"""What the header and the codecs share: README.md, "Conventions", and the tables of buffer.md."""

from typing import Any, NamedTuple


class FormatError(Exception):
    """A buffer was refused, with one of the reasons of errors.md."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


def check(passed: bool, reason: str, detail: str) -> None:
    """Refuse the buffer for this reason unless the check passed."""
    if not passed:
        raise FormatError(reason, detail)


# README.md, "Conventions"


def align(n: int) -> int:
    """Round up to a multiple of 128."""
    return -(-n // 128) * 128


def ceil_div(a: int, b: int) -> int:
    """Divide and round up."""
    return -(-a // b)


def u16(data: bytes, offset: int) -> int:
    """Two bytes as a number."""
    return int.from_bytes(data[offset : offset + 2], "little")


def u32(data: bytes, offset: int) -> int:
    """Four bytes as a number."""
    return int.from_bytes(data[offset : offset + 4], "little")


# buffer.md, "Header"


class Dtype(NamedTuple):
    """A row of the table of dtypes; without exponent bits, exponent and mantissa are 0."""

    name: str
    nbytes: int
    exponent: int = 0
    mantissa: int = 0


DTYPES = {
    1: Dtype("bool", 1),
    2: Dtype("uint8", 1),
    3: Dtype("int8", 1),
    4: Dtype("uint16", 2),
    5: Dtype("int16", 2),
    6: Dtype("uint32", 4),
    7: Dtype("int32", 4),
    8: Dtype("uint64", 8),
    9: Dtype("int64", 8),
    16: Dtype("float16", 2, 5, 10),
    17: Dtype("bfloat16", 2, 8, 7),
    18: Dtype("float32", 4, 8, 23),
    19: Dtype("float64", 8, 11, 52),
    20: Dtype("float8_e4m3fn", 1, 4, 3),
    21: Dtype("float8_e5m2", 1, 5, 2),
    22: Dtype("float8_e4m3fnuz", 1, 4, 3),
    23: Dtype("float8_e5m2fnuz", 1, 5, 2),
    24: Dtype("float8_e8m0fnu", 1),
    32: Dtype("complex64", 8),
    33: Dtype("complex128", 16),
}


class Section(NamedTuple):
    """An entry of the section table; size is in units of 128 bytes."""

    kind: int
    dynamic: int
    size: int


class Header(NamedTuple):
    """What a header says, and what follows from it; `params` are as the codec reads them."""

    nbytes: int
    codec: int
    version: int
    dtype_id: int
    features: int
    chunks: int
    stride: int
    shape: tuple[int, ...]
    nelem: int
    sections: list[Section]
    params: Any

    @property
    def dtype(self) -> Dtype:
        """The element type."""
        return DTYPES[self.dtype_id]

    @property
    def chunk_nelem(self) -> int:
        """Elements of a whole chunk."""
        return ceil_div(self.nelem, self.chunks)

    @property
    def static_stride(self) -> int:
        """Bytes of a static part."""
        return 128 * sum(s.size for s in self.sections if not s.dynamic)

    @property
    def has_fallback(self) -> bool:
        """Whether chunks may be stored raw, which only a codec with a dynamic part offers."""
        return any(s.dynamic for s in self.sections)

    @property
    def records_end(self) -> int:
        """S, where the static parts start."""
        return align(self.nbytes + 32 * self.chunks)

    @property
    def static_end(self) -> int:
        """D, where the dynamic parts start."""
        return self.records_end + self.chunks * self.static_stride

    def share(self, chunk: int) -> int:
        """The number of elements in a chunk."""
        return max(0, min(self.chunk_nelem, self.nelem - chunk * self.chunk_nelem))


# The pages of lossy codecs, "Layout"


def lossy_sections(
    codec: str, dtype: Dtype, chunk_nelem: int, most: int, sizes: dict[int, int], gains: bool = True
) -> list[Section]:
    """Static sections of these bytes by their kind, where the codec takes chunks of at most `most`.

    With `gains` the chunk must become shorter.
    """
    taken = dtype.name in ("float16", "bfloat16", "float32")
    check(taken, "bad_header", f"{codec} does not take {dtype.name}")
    check(chunk_nelem <= most, "bad_header", f"{chunk_nelem} elements in a chunk of {codec}")
    shorter = sum(map(align, sizes.values())) < align(chunk_nelem * dtype.nbytes)
    check(shorter or not gains, "bad_header", f"{codec} gains nothing for this size")
    return [Section(kind, 0, align(nbytes) // 128) for kind, nbytes in sizes.items()]


def spans(whole: list[int], own: list[int]) -> list[tuple[int, int]]:
    """Where sections begin that have `whole` bytes in a whole chunk, and where `own` bytes end."""
    starts = [sum(map(align, whole[:i])) for i in range(len(whole))]
    return [(at, at + nbytes) for at, nbytes in zip(starts, own, strict=True)]
