"""thc.md."""

import math
from typing import NamedTuple

from .common import Dtype, Header, Section, ceil_div, check, lossy_sections, u32
from .floats import f32, float_of_bits, limited, rotate, stored
from .philox import philox

ID = 9

# thc.md, "Parameters" and "Layout"


class Thc(NamedTuple):
    """What the parameters say; `size` is that of a payload element in bytes."""

    size: int
    tensor: bool

    def used(self, chunk_nelem: int, nelem: int) -> list[tuple[int, int]]:
        """Where in a static part sums, number of ranks, seed and norms begin and end."""
        count_at = 1024 * self.size * ceil_div(chunk_nelem, 1024)
        sums = 1024 * self.size * ceil_div(nelem, 1024)
        scales_at = count_at + 128
        norms = scales_at + 16
        return [
            (0, sums),
            (count_at, count_at + self.size),
            (scales_at, scales_at + 12),
            (norms, norms + 4 * (1 if self.tensor else ceil_div(nelem, 1024))),
        ]


def parameters(params: bytes, dtype: Dtype) -> Thc:
    """Refuse parameters that no encoder writes."""
    check(len(params) == 8, "bad_header", f"thc has 8 parameter bytes, not {len(params)}")
    bits, norm, *zeros = params
    check(bits in (8, 16) and norm <= 1 and not any(zeros), "bad_header", "parameters")
    return Thc(bits // 8, norm == 1)


def sections(thc: Thc, dtype: Dtype, chunk_nelem: int) -> list[Section]:
    """The section table, where thc takes the dtype and number of elements."""
    *_, (scales_at, _), (_, end) = thc.used(chunk_nelem, chunk_nelem)
    return lossy_sections("thc", dtype, chunk_nelem, 2**37, {1: scales_at, 4: end - scales_at})


def used(h: Header, nelem: int) -> list[tuple[int, int]]:
    """Where the bytes in use begin and end in a static part."""
    thc: Thc = h.params
    return thc.used(h.chunk_nelem, nelem)


# thc.md, "Decoding"


def decode(h: Header, nelem: int, static: bytes, dynamic: bytes) -> bytes:
    """Decode a chunk; static padding has been checked."""
    thc: Thc = h.params
    _, count, (seed_at, _), (norms_at, norms_end) = used(h, nelem)
    ranks = int.from_bytes(static[slice(*count)], "little")
    check(1 <= ranks <= (8, 2184)[thc.size - 1], "bad_payload", f"a sum of {ranks} ranks")
    key, step = [u32(static, seed_at), u32(static, seed_at + 4)], u32(static, seed_at + 8)
    for at in range(norms_at, norms_end, 4):
        word = u32(static, at)
        good = word in (0, 0x7FC00000) or 2.0**-90 <= float_of_bits(word) < math.inf
        check(good, "bad_payload", f"norm {word:08x}")

    out = bytearray()
    for b in range(ceil_div(nelem, 1024)):
        size, at = thc.size, 1024 * thc.size * b
        sums = [
            int.from_bytes(static[at + size * i : at + size * (i + 1)], "little")
            for i in range(1024)
        ]
        word = u32(static, norms_at + (0 if thc.tensor else 4 * b))
        kept = min(1024, nelem - 1024 * b)
        if word in (0, 0x7FC00000):
            check(not any(sums), "bad_payload", "sums of a block without a norm")
            out += stored(float_of_bits(word), h.dtype) * kept
            continue
        check(max(sums) <= 30 * ranks, "bad_payload", f"a sum {max(sums)} of {ranks} ranks")
        v = [float(c - 15 * ranks) for c in sums]
        rotate(v)
        scale = f32(float_of_bits(word) / float_of_bits(0x435EDA01))
        signs: list[int] = []
        for g in range(8 * b, 8 * b + 8):
            signs += philox([g % 2**32, g // 2**32 + 2**29, step, 0], key)
        for i in range(kept):
            value = -v[i] if signs[i // 32] >> i % 32 & 1 else v[i]
            out += limited(f32(value * scale), h.dtype)
    return bytes(out)
