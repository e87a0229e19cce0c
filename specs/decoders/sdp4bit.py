"""sdp4bit.md."""

import math
from typing import NamedTuple

from .common import Dtype, Header, Section, align, ceil_div, check, lossy_sections, u32
from .floats import f32, float_of_bits, limited, rotate, stored

ID = 6

# sdp4bit.md, "Parameters"


class Sdp4bit(NamedTuple):
    """What the parameters say."""

    bits: int
    group: int
    rotate: int


def parameters(params: bytes, dtype: Dtype) -> Sdp4bit:
    """Refuse parameters that no encoder writes."""
    check(len(params) == 8, "bad_header", f"sdp4bit has 8 bytes of parameters, not {len(params)}")
    bits, log_group, rotation, rounding = params[:4]
    check(bits in (4, 8), "bad_header", f"codes of {bits} bits")
    check(5 <= log_group <= 12, "bad_header", f"group size 2^{log_group}")
    valid = rotation <= 3 and rounding <= 1
    check(valid, "bad_header", f"rotate {rotation}, rounding {rounding}")
    check(not any(params[4:]), "bad_header", "nonzero end of the parameters")
    return Sdp4bit(bits, 2**log_group, rotation)


# sdp4bit.md, "Layout"


def sections(sdp: Sdp4bit, dtype: Dtype, chunk_nelem: int) -> list[Section]:
    """The section table, where sdp4bit takes the dtype and number of elements."""
    sizes = {1: ceil_div(sdp.bits * chunk_nelem, 8), 4: 4 * ceil_div(chunk_nelem, sdp.group)}
    gains = sdp.rotate not in (1, 2)
    return lossy_sections("sdp4bit", dtype, chunk_nelem, 2**39 - 128, sizes, gains)


def used(h: Header, nelem: int) -> list[tuple[int, int]]:
    """Where the bytes in use begin and end in a static part."""
    sdp: Sdp4bit = h.params
    scales = align(ceil_div(sdp.bits * h.chunk_nelem, 8))
    return [
        (0, ceil_div(sdp.bits * nelem, 8)),
        (scales, scales + 4 * ceil_div(nelem, sdp.group)),
    ]


# sdp4bit.md, "Decoding"


def code_at(sdp: Sdp4bit, static: bytes, i: int) -> int:
    """Code i of a chunk."""
    code = static[i] if sdp.bits == 8 else static[i // 2] >> 4 * (i % 2) & 15
    sign = 2 ** (sdp.bits - 1)
    check(code != sign, "bad_payload", f"code {-sign}")
    return code - 2 * sign if code > sign else code


def decode(h: Header, nelem: int, static: bytes, dynamic: bytes) -> bytes:
    """Decode a chunk; static padding has been checked."""
    sdp: Sdp4bit = h.params
    _, (scales_at, _) = used(h, nelem)
    if sdp.bits == 4 and nelem % 2:
        check(static[nelem // 2] < 16, "bad_payload", "half a byte behind the last code")
    out = bytearray()
    for first in range(0, nelem, sdp.group):
        last = min(first + sdp.group, nelem)
        w = [float(code_at(sdp, static, i)) for i in range(first, last)]
        scale = u32(static, scales_at + first // sdp.group * 4)
        if scale == 0x7FC00000:
            check(not any(w), "bad_payload", "codes of a lost group")
            out += stored(math.nan, h.dtype) * len(w)
            continue
        check(0 < scale < 0x7F800000, "bad_payload", f"scale {scale:08x}")
        s = float_of_bits(scale)
        check(2.0**-107 <= s <= 2.0**126, "bad_payload", f"scale {s}")
        if sdp.rotate & 2:
            for at in range(0, len(w), 32):
                run = w[at : at + 32]
                if len(run) == 32:
                    rotate(run)
                else:
                    run = [8 * value for value in run]
                w[at : at + 32] = run
        for value in w:
            out += limited(f32(value * s), h.dtype)
    return bytes(out)
