"""taco.md."""

import math
from typing import NamedTuple

from .common import Dtype, Header, Section, align, ceil_div, check, lossy_sections, u32
from .floats import f32, float_of_bits, limited, rotate, stored
from .mx import ELEMENTS

ID = 5

# taco.md, "Parameters"


class Taco(NamedTuple):
    """What the parameters say."""

    code: int
    block: int
    transform: int
    words: int


def parameters(params: bytes, dtype: Dtype) -> Taco:
    """Refuse parameters that no encoder writes."""
    check(len(params) == 8, "bad_header", f"taco has 8 bytes of parameters, not {len(params)}")
    code, log_block, transform, scales, rounding = params[:5]
    check(code <= 2, "bad_header", f"format {code}")
    check(5 <= log_block <= 9, "bad_header", f"block size 2^{log_block}")
    check(transform <= 2, "bad_header", f"transform {transform}")
    check(scales <= 1 and rounding <= 1, "bad_header", f"scales {scales}, rounding {rounding}")
    check(not any(params[5:]), "bad_header", "nonzero end of the parameters")
    return Taco(code, 2**log_block, transform, 2 - scales)


# taco.md, "Layout"


def sections(taco: Taco, dtype: Dtype, chunk_nelem: int) -> list[Section]:
    """The section table, where taco takes the dtype and number of elements."""
    blocks = ceil_div(chunk_nelem, taco.block)
    sizes = {1: blocks * taco.block, 4: 4 * taco.words * blocks}
    return lossy_sections("taco", dtype, chunk_nelem, 2**39 - 512, sizes)


def used(h: Header, nelem: int) -> list[tuple[int, int]]:
    """Where the bytes in use begin and end in a static part."""
    taco: Taco = h.params
    blocks = ceil_div(nelem, taco.block)
    scales = align(ceil_div(h.chunk_nelem, taco.block) * taco.block)
    codes = nelem if taco.transform == 2 else blocks * taco.block
    return [(0, codes), (scales, scales + 4 * taco.words * blocks)]


# taco.md, "Decoding"


def code_value(byte: int, code: int) -> float:
    """The value of a code."""
    if code == 2:
        check(byte != 128, "bad_payload", "code -128")
        return float(byte - 256 if byte > 128 else byte)
    element = ELEMENTS[code]
    check(byte & 127 < min(element.infinity, element.nan), "bad_payload", f"code {byte:02x}")
    return element.value(byte)


def merged_scale(words: list[int]) -> float | None:
    """The merged scale of a block, None if the block is lost."""
    lost = [w == 0x7FC00000 for w in words]
    check(all(lost) or not any(lost), "bad_payload", "half a lost block")
    if all(lost):
        return None
    for w in words:
        check(0 < w < 0x7F800000, "bad_payload", f"scale {w:08x}")
    values = [float_of_bits(w) for w in words]
    m = values[-1]
    if len(values) == 2:
        check(2.0**-10 <= values[0] <= 2.0**10, "bad_payload", f"alpha {values[0]}")
        check(2.0**-86 <= m <= 2.0**126, "bad_payload", f"s {m}")
        m = f32(m / values[0])
    check(2.0**-96 <= m <= 2.0**126, "bad_payload", f"s / alpha {m}")
    return m


def decode(h: Header, nelem: int, static: bytes, dynamic: bytes) -> bytes:
    """Decode a chunk; static padding has been checked."""
    taco: Taco = h.params
    _, (scales_at, _) = used(h, nelem)
    k = f32(taco.block**-0.5) if taco.transform < 2 else 1.0
    out = bytearray()
    for b in range(ceil_div(nelem, taco.block)):
        words = [u32(static, scales_at + 4 * (taco.words * b + i)) for i in range(taco.words)]
        m = merged_scale(words)
        codes = static[b * taco.block : (b + 1) * taco.block]
        count = min(taco.block, nelem - b * taco.block)
        if m is None:
            check(not any(codes), "bad_payload", "codes of a lost block")
            out += stored(math.nan, h.dtype) * count
            continue
        w = [code_value(code, taco.code) for code in codes]
        if taco.transform < 2:
            rotate(w)
        c = f32(m * k)
        for value in w[:count]:
            out += limited(f32(value * c), h.dtype)
    return bytes(out)
