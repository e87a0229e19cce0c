"""mx.md."""

import math
from typing import NamedTuple

from .common import Dtype, Header, Section, align, ceil_div, check, lossy_sections
from .floats import stored

ID = 3

# mx.md, "Elements"


class Element(NamedTuple):
    """A row of the table of elements; codes without sign from `infinity` and `nan` on are such."""

    name: str
    bits: int
    mantissa: int
    bias: int
    infinity: int = 256
    nan: int = 256

    def value(self, code: int) -> float:
        """What a code stands for."""
        negative, magnitude = divmod(code, 1 << self.bits - 1)
        if self.name == "int8":
            return (magnitude - 128 * negative) / 64
        field, fraction = divmod(magnitude, 2**self.mantissa)
        significand = fraction + (2**self.mantissa if field else 0)
        value = math.ldexp(significand, max(field, 1) - self.bias - self.mantissa)
        if magnitude >= self.infinity:
            value = math.inf
        if magnitude >= self.nan:
            value = math.nan
        return -value if negative else value


ELEMENTS = [
    Element("e4m3", 8, 3, 7, nan=0x7F),
    Element("e5m2", 8, 2, 15, infinity=0x7C, nan=0x7D),
    Element("e3m2", 6, 2, 3),
    Element("e2m3", 6, 3, 1),
    Element("e2m1", 4, 1, 1),
    Element("int8", 8, 6, 1),
]


def unpack_codes(payload: bytes, bits: int, nelem: int) -> list[int]:
    """The codes of a stream of bits, whose last byte ends with zeros."""
    stream = int.from_bytes(payload[: ceil_div(bits * nelem, 8)], "little")
    check(stream >> bits * nelem == 0, "bad_payload", "bits behind the last code")
    return [stream >> bits * i & 2**bits - 1 for i in range(nelem)]


# mx.md, "Parameters", "Layout" and "Decoding"


def parameters(params: bytes, dtype: Dtype) -> Element:
    """The element type, of parameters that an encoder writes."""
    check(len(params) == 8, "bad_header", f"mx has 8 bytes of parameters, not {len(params)}")
    check(params[0] <= 5 and params[1] <= 2, "bad_header", "unknown element or scale rule")
    check(params[2:] == b"\5\0\0\0\0\0", "bad_header", "block size or end of the parameters")
    return ELEMENTS[params[0]]


def sections(element: Element, dtype: Dtype, chunk_nelem: int) -> list[Section]:
    """The section table, where mx takes the dtype and number of elements."""
    sizes = {1: ceil_div(element.bits * chunk_nelem, 8), 4: ceil_div(chunk_nelem, 32)}
    return lossy_sections("mx", dtype, chunk_nelem, 2**39 - 128, sizes)


def used(h: Header, nelem: int) -> list[tuple[int, int]]:
    """Where the bytes in use begin and end in a static part."""
    bits = h.params.bits
    scales = align(ceil_div(bits * h.chunk_nelem, 8))
    return [(0, ceil_div(bits * nelem, 8)), (scales, scales + ceil_div(nelem, 32))]


def decode(h: Header, nelem: int, static: bytes, dynamic: bytes) -> bytes:
    """Decode a chunk."""
    element: Element = h.params
    _, (scales, _) = used(h, nelem)
    out = bytearray()
    for i, code in enumerate(unpack_codes(static, element.bits, nelem)):
        s = static[scales + i // 32]
        value = math.ldexp(element.value(code), s - 127) if s < 255 else math.nan
        out += stored(value, h.dtype)
    return bytes(out)
