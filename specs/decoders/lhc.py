"""lhc.md."""

import math
import struct
from typing import NamedTuple

from .common import DTYPES, Dtype, Header, Section, ceil_div, check, lossy_sections
from .floats import stored

ID = 11

# lhc.md, "Parameters" and "Layout"


class Lhc(NamedTuple):
    """What the parameters say; `dtype` is that of the buckets."""

    steps: int
    dtype: Dtype
    published: bool

    def rows(self, chunk_nelem: int) -> int:
        """R."""
        return ceil_div(1000 * ceil_div(chunk_nelem, 1024), self.steps)

    def sketch(self, chunk_nelem: int) -> int:
        """Bytes of the section with the buckets."""
        return 1024 * self.rows(chunk_nelem) * self.dtype.nbytes


def parameters(params: bytes, dtype: Dtype) -> Lhc:
    """Refuse parameters that no encoder writes."""
    check(len(params) == 8, "bad_header", f"lhc has 8 parameter bytes, not {len(params)}")
    steps, sketch, mapping, zero = struct.unpack("<IBBH", params)
    check(1001 <= steps <= 1000000, "bad_header", f"ratio {steps}")
    check(sketch <= 3 and mapping <= 1 and zero == 0, "bad_header", "parameters")
    return Lhc(steps, DTYPES[15 + sketch] if sketch else dtype, mapping == 1)


def sections(lhc: Lhc, dtype: Dtype, chunk_nelem: int) -> list[Section]:
    """The section table, where lhc takes the dtype and number of elements."""
    sizes = {1: lhc.sketch(chunk_nelem), 3: ceil_div(chunk_nelem, 8)}
    return lossy_sections("lhc", dtype, chunk_nelem, 2**36, sizes)


def used(h: Header, nelem: int) -> list[tuple[int, int]]:
    """Where the bytes in use begin and end in a static part."""
    sketch = h.params.sketch(h.chunk_nelem)
    return [(0, sketch), (sketch, sketch + ceil_div(nelem, 8))]


# lhc.md, "Mapping"


def murmur3(key: int, seed: int) -> int:
    """MurmurHash3_x86_32 of a u32."""

    def rotl(x: int, by: int) -> int:
        return (x << by | x >> 32 - by) & 0xFFFFFFFF

    k = rotl(key * 0xCC9E2D51 & 0xFFFFFFFF, 15) * 0x1B873593 & 0xFFFFFFFF
    h = (rotl(seed ^ k, 13) * 5 + 0xE6546B64 & 0xFFFFFFFF) ^ 4
    h = (h ^ h >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    h = (h ^ h >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return h ^ h >> 16


def blocks_of_span(lhc: Lhc, q: int, rows: int) -> list[list[tuple[int, int, float]]]:
    """Block of buckets, offset and sign for each hash, of each block of span q."""
    span = range(4 * rows * q, 4 * rows * (q + 1))
    if lhc.published:
        hashed = [[murmur3(b // 4, seed) for seed in range(3)] for b in span]
        to = [[4 * (x % rows) + b % 4 for x in h] for b, h in zip(span, hashed, strict=True)]
        offsets = [[0, 0, 0] for _ in span]
    else:
        hashed = [[murmur3(b, seed) for seed in range(3)] for b in span]
        to = [[0, 0, 0] for _ in span]
        for j in range(3):
            keys = [h[j] % 2**31 for h in hashed]
            for place, i in enumerate(sorted(range(4 * rows), key=keys.__getitem__)):
                to[i][j] = place
        offsets = [offsets_of(h) for h in hashed]
    signs = [[-1.0 if x >> 31 else 1.0 for x in h] for h in hashed]
    return [list(zip(*three, strict=True)) for three in zip(to, offsets, signs, strict=True)]


def offsets_of(h: list[int]) -> list[int]:
    """Three that differ."""
    o = [x % 256 for x in h]
    while o[1] == o[0]:
        o[1] = (o[1] + 1) % 256
    while o[2] in o[:2]:
        o[2] = (o[2] + 1) % 256
    return o


# lhc.md, "Peeling" and "Decoding"


def peel(buckets_of: dict[int, list[int]]) -> dict[int, int]:
    """The own bucket of every element that is peeled."""
    own: dict[int, int] = {}
    counts: dict[int, int] = {}
    for buckets in buckets_of.values():
        for c in buckets:
            counts[c] = counts.get(c, 0) + 1
    while True:
        peeled = {}
        for i, buckets in buckets_of.items():
            alone = [c for c in buckets if counts[c] == 1]
            if i not in own and alone:
                peeled[i] = alone[0]
        if not peeled:
            return own
        own |= peeled
        for i in peeled:
            for c in buckets_of[i]:
                counts[c] -= 1


def decode(h: Header, nelem: int, static: bytes, dynamic: bytes) -> bytes:
    """Decode a chunk; static padding has been checked."""
    lhc: Lhc = h.params
    rows, size = lhc.rows(h.chunk_nelem), lhc.dtype.nbytes
    n_buckets = 1024 * rows
    sketch = [static[size * c : size * (c + 1)] for c in range(n_buckets)]
    _, span = used(h, nelem)
    index = int.from_bytes(static[slice(*span)], "little")
    check(index >> nelem == 0, "bad_payload", "bits of the index behind the last element")

    spans = ceil_div(nelem, n_buckets)
    blocks = [block for q in range(spans) for block in blocks_of_span(lhc, q, rows)]
    buckets_of = {
        i: [256 * r + (i + o) % 256 for r, o, _ in blocks[i // 256]]
        for i, bit in enumerate(reversed(bin(index)[2:]))
        if bit == "1"
    }
    own = peel(buckets_of)
    taken = set(own.values())
    taken.update(c for i, buckets in buckets_of.items() if i not in own for c in buckets)
    unused = (any(sketch[c]) for c in range(n_buckets) if c not in taken)
    check(not any(unused), "bad_payload", "a bucket that no element has")

    out = bytearray(nelem * h.dtype.nbytes)
    for i, buckets in buckets_of.items():
        if i in own and lhc.dtype == h.dtype:
            value = sketch[own[i]]
        elif i in own:
            value = stored(bucket_value(lhc, sketch[own[i]]), h.dtype)
        else:
            signs = [sign for _, _, sign in blocks[i // 256]]
            three = [s * bucket_value(lhc, sketch[c]) for s, c in zip(signs, buckets, strict=True)]
            median = sorted(three, key=lambda v: (v, math.copysign(1.0, v)))[1]
            estimate = math.nan if any(map(math.isnan, three)) else median
            value = stored(estimate, h.dtype)
        out[h.dtype.nbytes * i : h.dtype.nbytes * (i + 1)] = value
    return bytes(out)


def bucket_value(lhc: Lhc, bucket: bytes) -> float:
    """The value of a bucket."""
    if lhc.dtype.name == "bfloat16":
        bucket = b"\0\0" + bucket
    return float(struct.unpack("<e" if lhc.dtype.name == "float16" else "<f", bucket)[0])
