"""delta.md."""

import itertools
from collections.abc import Iterator

from .common import Dtype, Header, Section, align, ceil_div, check, u32

ID = 13
#: The bytes of a chunk are decoded against those of a base.
NEEDS_BASE = True

# delta.md, "Parameters"

DIFFERENCE, OVERWRITE, ADAPTIVE = 0, 1, 3


def parameters(params: bytes, dtype: Dtype) -> int:
    """The form; parameters that no encoder writes are refused."""
    check(len(params) == 8, "bad_header", f"delta has 8 bytes of parameters, not {len(params)}")
    check(params[0] in (DIFFERENCE, OVERWRITE, ADAPTIVE), "bad_header", f"form {params[0]}")
    check(params[1] == 15, "bad_header", f"tile size 2^{params[1]}")
    check(not any(params[2:]), "bad_header", "nonzero end of the parameters")
    return params[0]


# delta.md, "Layout"

TILE = 32768


def sections(form: int, dtype: Dtype, chunk_nelem: int) -> list[Section]:
    """The section table, where delta takes the dtype and number of elements."""
    check("complex" not in dtype.name, "bad_header", f"delta does not take {dtype.name}")
    most = 2**32 - 1 if dtype.nbytes < 8 else 2**31 - 1
    check(chunk_nelem <= most, "bad_header", f"{chunk_nelem} elements in a delta chunk")
    raw = chunk_nelem * dtype.nbytes
    index = align(16 + 4 * ceil_div(chunk_nelem, TILE))
    check(index < align(raw), "bad_header", "delta gains nothing for this size")
    return [Section(3, 0, index // 128), Section(67, 1, align(max(0, raw - index)) // 128)]


def used(h: Header, nelem: int) -> list[tuple[int, int]]:
    """Where the bytes in use begin and end in a static part."""
    return [(0, 16 + 4 * ceil_div(nelem, TILE))]


def key(i: int) -> int:
    """What word i of a chunk's elements is multiplied by."""
    v = (i + 1) * 0x9E3779B1 % 2**32
    v = (v ^ v >> 16) * 0x7FEB352D % 2**32
    v = (v ^ v >> 15) * 0x846CA68B % 2**32
    return v ^ v >> 16


def digest(data: bytes) -> bytes:
    """The digest of a chunk's elements, as it stands in the index."""
    data += bytes(-len(data) % 4)
    total = sum(key(i) * u32(data, 4 * i) for i in range(len(data) // 4))
    return (total % 2**64).to_bytes(8, "little")


# delta.md, "Values"


def ordered(v: int, h: Header) -> int:
    """Elements in their order."""
    width = 8 * h.dtype.nbytes
    top = 1 << (width - 1)
    if h.dtype.exponent:
        return 2 * top - 1 - v if v & top else v + top
    return v ^ top if h.dtype.name.startswith("int") else v


def unordered(o: int, h: Header) -> int:
    """The element of that number."""
    width = 8 * h.dtype.nbytes
    top = 1 << (width - 1)
    if h.dtype.exponent:
        return o - top if o & top else 2 * top - 1 - o
    return o ^ top if h.dtype.name.startswith("int") else o


class Bits:
    """The bits of a tile."""

    def __init__(self, words: bytes) -> None:
        self.value = int.from_bytes(words, "little")
        self.size = 8 * len(words)
        self.at = 0

    def number(self, nbits: int) -> int:
        """bits(nbits)."""
        check(self.at + nbits <= self.size, "bad_payload", "a tile ends early")
        self.at += nbits
        return self.value >> (self.at - nbits) & ((1 << nbits) - 1)

    def unary(self) -> int:
        """Zeros before a one."""
        zeros = 0
        while not self.number(1):
            zeros += 1
        return zeros

    def gamma(self) -> int:
        """A number above 0."""
        below = self.unary()
        check(below <= 15, "bad_payload", "a count is too large")
        return (1 << below) + self.number(below)

    def end(self) -> None:
        """Less than a word is left, all zeros."""
        left = self.size - self.at
        check(left < 32, "bad_payload", "words are left over")
        check(self.number(left) == 0, "bad_payload", "bits are left over")


class Flags:
    """Which of some elements have changed: `gaps`."""

    def __init__(self, elements: int, changes: int) -> None:
        check(changes <= elements, "bad_payload", f"{changes} changes in {elements} elements")
        self.elements = elements
        self.lists_changes = 2 * changes <= elements
        self.listed = changes if self.lists_changes else elements - changes
        self.k = (elements // self.listed).bit_length() - 1 if self.listed else 0
        self.low: list[int] = []

    def read_low(self, bits: Bits) -> None:
        """Low bits of the gaps."""
        self.low = [bits.number(self.k) for _ in range(self.listed)]

    def read(self, bits: Bits) -> list[bool]:
        """Quotients of the gaps; the flags."""
        flags = [not self.lists_changes] * self.elements
        at = -1
        for low in self.low:
            at += 1 + (bits.unary() << self.k) + low
            check(at < self.elements, "bad_payload", "a gap goes beyond the end")
            flags[at] = self.lists_changes
        return flags


# delta.md, "Decoding"


def check_base(h: Header, static: bytes, base: bytes) -> None:
    """Refuse a base that is not the one that the chunk was encoded against."""
    allowed = [static[:8], static[8:16]] if h.params == OVERWRITE else [static[:8]]
    check(digest(base) in allowed, "base_mismatch", "the base has another digest")


def tile_words(size: int, nelem: int, static: bytes, dynamic: bytes) -> Iterator[bytes]:
    """The words of each tile, of elements of `size` bytes."""
    check(len(dynamic) % 4 == 0, "bad_payload", "half a word")
    tiles = ceil_div(nelem, TILE)
    offsets = [4 * u32(static, 16 + 4 * i) for i in range(tiles)] + [len(dynamic)]
    check(not tiles or offsets[0] == 0, "bad_payload", "first offset")
    for number, (at, end) in enumerate(itertools.pairwise(offsets)):
        check(at <= end <= len(dynamic), "bad_payload", "offsets fall")
        plain = 4 + 4 * ceil_div(min(TILE, nelem - number * TILE) * size, 4)
        check(end - at <= plain, "bad_payload", "a tile is longer than plain")
    for at, end in itertools.pairwise(offsets):
        yield dynamic[at:end]


def decode_tile(h: Header, old: list[int], words: bytes) -> list[int]:
    """The elements of a tile."""
    if not words:
        return old
    size = h.dtype.nbytes
    bits = Bits(words)
    if bits.number(1):
        if bits.number(1):
            check(h.params == ADAPTIVE, "bad_payload", "planes")
            new = decode_planes(h, old, bits)
        else:
            check(bits.number(30) == 0, "bad_payload", "the first word of a plain tile")
            new = [bits.number(8 * size) for _ in old]
    elif h.params == OVERWRITE:
        changes = bits.gamma() - 1
        check(changes > 0, "bad_payload", "no changes")
        places = Flags(len(old), changes)
        places.read_low(bits)
        new = [
            bits.number(8 * size) if changed else v
            for v, changed in zip(old, places.read(bits), strict=True)
        ]
    else:
        new = decode_differences(h, old, bits)
    bits.end()
    return new


def decode_planes(h: Header, old: list[int], bits: Bits) -> list[int]:
    """The elements of a tile of planes."""
    there = [k for k in range(8 * h.dtype.nbytes) if bits.number(1)]
    check(len(there) > 0, "bad_payload", "no planes")
    counts = [bits.number(15) + 1 for _ in there]
    new = list(old)
    for k, ones in zip(there, counts, strict=True):
        places = Flags(len(old), ones)
        if 8 * places.listed > 3 * len(old):
            flags = [bits.number(1) == 1 for _ in old]
            check(sum(flags) == ones, "bad_payload", "a bitmap with another number of ones")
        else:
            places.read_low(bits)
            flags = places.read(bits)
        new = [v ^ flag << k for v, flag in zip(new, flags, strict=True)]
    return new


def decode_differences(h: Header, old: list[int], bits: Bits) -> list[int]:
    """The elements of a tile in the form difference."""
    width, e_bits = 8 * h.dtype.nbytes, h.dtype.exponent
    center = bits.number(e_bits)
    scale = bits.number((2**e_bits - 1 + width).bit_length())
    limits = [center + 1, center - 1, center - 3, center - 5] if e_bits else []
    counts = [bits.gamma() - 1 for _ in range(len(limits) + 1)]
    n_exceptions = bits.gamma() - 1
    check(sum(counts) > 0, "bad_payload", "no changes")

    exponents = [v >> h.dtype.mantissa & (2**e_bits - 1) if e_bits else 0 for v in old]
    members: list[list[int]] = [[] for _ in counts]
    for i, e in enumerate(exponents):
        members[sum(e < limit for limit in limits)].append(i)
    classes = [Flags(len(m), n) for m, n in zip(members, counts, strict=True)]
    for one in classes:
        one.read_low(bits)
    signs = [bits.number(1) for _ in range(sum(counts))]
    changed = sorted(
        i
        for one, m in zip(classes, members, strict=True)
        for i, flag in zip(m, one.read(bits), strict=True)
        if flag
    )

    hot = {
        j: min(scale - 1 - exponents[i], width)
        for j, i in enumerate(changed)
        if exponents[i] < scale
    }
    sizes = [0] * len(changed)
    for j, low in hot.items():
        quotient = bits.unary()
        check(quotient <= 15 and quotient < 2 ** (width - low), "bad_payload", "a size")
        sizes[j] = quotient << low
    for j, low in hot.items():
        sizes[j] += bits.number(low)
    last = -1
    for _ in range(n_exceptions):
        j = bits.number(15)
        check(last < j < len(changed), "bad_payload", "an exception")
        sizes[j], last = bits.number(width), j

    new = list(old)
    for i, sign, size in zip(changed, signs, sizes, strict=True):
        value = ordered(old[i], h) + (-size - 1 if sign else size + 1)
        check(0 <= value < 2**width, "bad_payload", "a change goes beyond the dtype")
        new[i] = unordered(value, h)
    return new


def decode(h: Header, nelem: int, static: bytes, dynamic: bytes, base: bytes) -> bytes:
    """The bytes of a chunk."""
    size = h.dtype.nbytes
    old = [int.from_bytes(base[i : i + size], "little") for i in range(0, len(base), size)]
    out = bytearray()
    for number, words in enumerate(tile_words(size, nelem, static, dynamic)):
        for v in decode_tile(h, old[number * TILE : (number + 1) * TILE], words):
            out += v.to_bytes(size, "little")
    check(digest(bytes(out)) == static[8:16], "bad_payload", "the digest of the result")
    return bytes(out)
