"""nvfp4.md."""

import math
import struct

from .common import Dtype, Header, Section, align, ceil_div, check, lossy_sections
from .floats import f32, stored
from .mx import ELEMENTS, unpack_codes

ID = 4

# nvfp4.md, "Layout" and "Decoding"


def parameters(params: bytes, dtype: Dtype) -> None:
    """There are none."""
    check(not params, "bad_header", "nvfp4 has no parameters")


def sections(params: None, dtype: Dtype, chunk_nelem: int) -> list[Section]:
    """The section table, where nvfp4 takes the dtype and number of elements."""
    sizes = {1: ceil_div(chunk_nelem, 2), 4: 16 + ceil_div(chunk_nelem, 16)}
    return lossy_sections("nvfp4", dtype, chunk_nelem, 2**39 - 128, sizes)


def used(h: Header, nelem: int) -> list[tuple[int, int]]:
    """Where the bytes in use begin and end in a static part."""
    scale = align(ceil_div(h.chunk_nelem, 2))
    scales = scale + 16
    return [
        (0, ceil_div(nelem, 2)),
        (scale, scale + 4),
        (scales, scales + ceil_div(nelem, 16)),
    ]


def decode(h: Header, nelem: int, static: bytes, dynamic: bytes) -> bytes:
    """Decode a chunk."""
    element, e4m3 = ELEMENTS[4], ELEMENTS[0]
    _, (scale, _), (scales, _) = used(h, nelem)
    g: float = struct.unpack_from("<f", static, scale)[0]
    check(0 < g < math.inf, "bad_payload", f"tensor scale {g}")
    out = bytearray()
    for i, code in enumerate(unpack_codes(static, 4, nelem)):
        step = f32(e4m3.value(static[scales + i // 16]) / g)
        value = f32(element.value(code) * step)
        out += stored(value, h.dtype)
    return bytes(out)
