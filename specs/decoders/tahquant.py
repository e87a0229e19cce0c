"""tahquant.md."""

import math
import struct
from typing import NamedTuple

from .common import Dtype, Header, Section, ceil_div, check, lossy_sections, spans, u32
from .floats import f32, limited, rotate, stored

ID = 7

# tahquant.md, "Parameters" and "Layout"


class Tahquant(NamedTuple):
    """What the parameters say."""

    forward: bool
    hidden: int

    @property
    def tile(self) -> int:
        """Elements of a tile."""
        return 64 if self.forward else 32

    @property
    def planes(self) -> int:
        """Planes of all tiles."""
        return 3 if self.forward else 6

    @property
    def token_tiles(self) -> int:
        """G."""
        return ceil_div(self.hidden, self.tile)

    def tiles(self, nelem: int) -> int:
        """N."""
        return self.token_tiles * (nelem // self.hidden) + ceil_div(nelem % self.hidden, self.tile)

    def narrow(self, nelem: int) -> int:
        """K."""
        return nelem // self.hidden // 5 if self.forward and self.hidden <= 2**24 else 0

    def used(self, nelem: int) -> list[int]:
        """Bytes in use in payload, scales and index."""
        words = self.planes * self.tiles(nelem)
        if not self.forward:
            return [4 * words, 4 * self.tiles(nelem), 0]
        words += self.tiles(nelem) - self.token_tiles * self.narrow(nelem)
        tokens = ceil_div(nelem, self.hidden)
        return [8 * words, 5 * self.tiles(nelem), ceil_div(tokens, 8)]


def parameters(params: bytes, dtype: Dtype) -> Tahquant:
    """Refuse parameters that no encoder writes."""
    check(len(params) == 16, "bad_header", f"tahquant has 16 parameter bytes, not {len(params)}")
    check(params[0] <= 1 and not any(params[1:8]), "bad_header", "direction")
    hidden = int.from_bytes(params[8:], "little")
    check(1 <= hidden < 2**63, "bad_header", f"tokens of {hidden} elements")
    return Tahquant(params[0] == 0, hidden)


def sections(tahquant: Tahquant, dtype: Dtype, chunk_nelem: int) -> list[Section]:
    """The section table, where tahquant takes the dtype and number of elements."""
    sizes = dict(zip((1, 4, 3), tahquant.used(chunk_nelem), strict=True))
    return lossy_sections("tahquant", dtype, chunk_nelem, 2**36, sizes)


def used(h: Header, nelem: int) -> list[tuple[int, int]]:
    """Where the bytes in use begin and end in a static part."""
    return spans(h.params.used(h.chunk_nelem), h.params.used(nelem))


# tahquant.md, "Decoding" and "Checks"


def float16(bits: int) -> float:
    """The value of a float16."""
    return float(struct.unpack("<e", bits.to_bytes(2, "little"))[0])


def narrow_tokens(tahquant: Tahquant, nelem: int, index: bytes) -> list[bool]:
    """Which tokens are narrow."""
    narrow = [bool(index[i // 8] >> i % 8 & 1) for i in range(8 * len(index))]
    whole = nelem // tahquant.hidden
    good = not any(narrow[whole:]) and sum(narrow) == tahquant.narrow(nelem)
    check(not tahquant.forward or good, "bad_payload", "the index")
    return narrow if tahquant.forward else [False] * ceil_div(nelem, tahquant.hidden)


def decode(h: Header, nelem: int, static: bytes, dynamic: bytes) -> bytes:
    """Decode a chunk; static padding has been checked."""
    tahquant: Tahquant = h.params
    size, tiles, words = tahquant.tile, tahquant.tiles(nelem), tahquant.tile // 8
    _, (scales, _), index = used(h, nelem)
    narrow = narrow_tokens(tahquant, nelem, static[slice(*index)])

    def plane_word(i: int) -> int:
        return int.from_bytes(static[words * i : words * (i + 1)], "little")

    out = bytearray()
    slot = tahquant.planes * tiles
    for t in range(tiles):
        token, within = divmod(t, tahquant.token_tiles)
        codes = [0] * size
        bits = [plane_word(p * tiles + t) for p in range(tahquant.planes)]
        if tahquant.forward and not narrow[token]:
            bits.append(plane_word(slot))
            slot += 1
        for p, word in enumerate(bits):
            codes = [code | (word >> i & 1) << p for i, code in enumerate(codes)]
        pivot = static[scales + 4 * tiles + t] if tahquant.forward else 0
        check(pivot == 0 or pivot // 64 == 2, "bad_payload", f"pivot {pivot}")
        left = min(tahquant.hidden, nelem - token * tahquant.hidden) - within * size
        scale = u32(static, scales + 4 * t)
        if scale == 0x7E007E00:
            out += stored(math.nan, h.dtype) * min(size, left)
            continue
        check(scale & 0x7C00 != 0x7C00 and scale >> 16 < 0x7C00, "bad_payload", f"{scale:08x}")
        m, s = float16(scale & 0xFFFF), float16(scale >> 16)
        y = [f32(m + code * s) for code in codes]
        if pivot:
            rotate(y)
            y = [f32(v / 8) for v in y]
            y[0], y[pivot & 63] = y[pivot & 63], y[0]
        for v in y[:left]:
            out += limited(v, h.dtype)
    return bytes(out)
