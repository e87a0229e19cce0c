"""delta: what changed against a tensor that both sides have. specs/delta.md.

Few elements of a trained tensor change in a step, small ones more often than large ones and by more
units in the last place. So positions are coded as gaps among elements of like exponent, and changes
as differences of ordered bits whose size the exponent tells. This module holds layout, constants
and the NumPy reference.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from ..formats.checksum import MASK64
from ..formats.codec_ids import CODEC_IDS
from ..formats.dtypes import DTYPES, DType
from ..formats.header import SECTION_KINDS, Section, align
from .common.base import Bits, Bytes, Chunk, ChunkDecoded, ChunkResult, CodecSpec, Key, Layout
from .common.params import choice
from .common.sections import Array, sections_of

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool]

LOG_TILE = 15
TILE = 1 << LOG_TILE
#: An element is of class j if its exponent is below j of these, counted from the tile's center.
LIMITS = (1, -1, -3, -5)
#: Elements of a tile whose exponents give its center: one in so many.
SAMPLED = 64
#: The largest quotient of a change.
MAX_QUOTIENT = 15
#: Twice the bits that a change costs whose bit length is 0, 1, 2 or 3 above what the scale allows.
EXCESS = (2, 5, 11, 23)
#: The stored numbers of the forms. 2 is none: a published buffer with it is to be refused.
FORMS = {"difference": 0, "overwrite": 1, "adaptive": 3}
#: The first bits of a tile of planes, as a number of two bits.
PLANES_HEAD = 3
#: A plane is a bitmap if its shorter list has more than so many eighths of the elements.
BITMAP_EIGHTHS = 3
#: Bytes of the index before the tiles' offsets: the digests of base and result.
DIGESTS_NBYTES = 16
#: Of digest keys: what a word's number is multiplied by, then shifts and factors that mix its bits.
KEY_STEP = 0x9E3779B1
MIX = (16, 0x7FEB352D, 15, 0x846CA68B, 16)
#: Bytes of work memory of a tile on a GPU.
TILE_SCRATCH = 16640

#: Bytes of which a digest is found at a time.
_AT_ONCE = 1 << 17

ENDS_EARLY = "a tile ends early"
RESULT_PROBLEM = "the result has not the digest that it should have"
OFFSETS_PROBLEM = "offsets of tiles that do not rise from 0 to the end, or a tile too long"


class Kind(NamedTuple):
    """What the format needs to know of a dtype.

    `width` is the bits of an element, `exponent` and `mantissa` those of its fields, `scale_bits`
    the bits of a tile's scale, `classes` the number of classes.
    """

    width: int
    exponent: int
    mantissa: int
    scale_bits: int
    classes: int
    signed: bool


@functools.cache
def kind_of(dtype: DType) -> Kind:
    """The `Kind` of a dtype."""
    width, is_float = 8 * dtype.itemsize, dtype.is_float
    exponent = dtype.exponent if is_float else 0
    largest = (1 << exponent) - 1 + width
    classes = len(LIMITS) + 1 if is_float else 1
    signed = dtype.name.startswith("int")
    return Kind(width, exponent, dtype.mantissa, largest.bit_length(), classes, signed)


def tile_count(nelem: int) -> int:
    """Tiles of a chunk of `nelem` elements."""
    return -(-nelem // TILE)


def sums_scratch(chunks: int) -> int:
    """Bytes of work memory for sums of chunks on a GPU."""
    return align(32 * chunks)


def plain_words(nelem: int, itemsize: int) -> int:
    """Words of a tile whose values are stored as they are."""
    return 1 + -(-nelem * itemsize // 4)


@dataclass(frozen=True)
class Delta(CodecSpec):
    """delta: lossless, what changed against a base that both sides have.

    Encoding and decoding need ``base``, an array of the tensor's shape and dtype. Takes floats,
    float8 too, integers and bool, of up to 8 bytes. Buffers have the digests of base and result: a
    wrong base is refused, with the reason ``"base_mismatch"``. No statistics.

    Size: 5.5 to 8.7 bits for each changed element of bfloat16 weights under Adam, for 10 % to 0.5 %
    of them changed: 0.5 % of the bytes where 1 % changed. A chunk that does not shrink is stored
    raw.

    Source: gaps are Golomb-Rice codes (Rice and Plaunt, 1971). That base and changes of weights are
    coded together is an addition.

    Args:
        form: ``"adaptive"``, the default: ``"difference"``, or for each 32768 elements of which
            much has changed, if that takes less, the bits that differ, one place of the bits after
            the other. Half of the signs of bfloat16 flipped take .07 of the bytes, a product by 2
            .15. ``"difference"``: changes are differences to the base, and are coded given its
            exponents. ``"overwrite"``: new values, for receivers that may apply a buffer twice;
            two of them fold into one without the base.

    Raises:
        TypeError: If the form is not a string.
        ValueError: If it is unknown.
    """

    form: str = choice(0, tuple(FORMS), default="adaptive", number=FORMS.__getitem__)

    name: ClassVar[str] = "delta"
    id: ClassVar[int] = CODEC_IDS["delta"][0]
    dtypes: ClassVar[tuple[str, ...]] = tuple(
        d.name for d in DTYPES if d.itemsize <= 8 and not d.name.startswith("complex")
    )
    fixed_params: ClassVar[dict[int, int]] = {1: LOG_TILE}
    raw_fallback: ClassVar[bool] = True
    needs_base: ClassVar[bool] = True

    def arrays(self, dtype: DType, nelem: int) -> tuple[Array, ...]:
        """Digests of base and result, and where each tile starts."""
        return Array("index", 64, 2), Array("index", 32, tile_count(nelem))

    def layout(self, dtype: DType, nelem: int) -> Layout:
        """Index and dynamic changes of a chunk of `nelem` elements."""
        index = sections_of(self.arrays(dtype, nelem))
        bound = max(0, nelem * dtype.itemsize - index[0].nbytes)
        changes = Section(SECTION_KINDS["changes"], align(bound), dynamic=True)
        return Layout((*index, changes), bound)

    def scratch_nbytes(self, dtype: DType, nelem: int, chunks: int) -> int:
        """Sums of each chunk; what is known of each tile."""
        return sums_scratch(chunks) + TILE_SCRATCH * max(tile_count(nelem), 1) * chunks

    def max_chunk_nelem(self, dtype: DType) -> int:
        """Offsets are uint32, in words."""
        return (1 << 32) - 1 if dtype.itemsize <= 4 else (1 << 31) - 1


SPEC = Delta


class Index(NamedTuple):
    """The static part of a chunk: digests of base and result, and the tiles' offsets in words."""

    digests: npt.NDArray[np.uint64]
    offsets: npt.NDArray[np.uint32]


def index_of(chunk: Chunk) -> Index:
    """See `Index`; views of the chunk."""
    digests, offsets = Delta().static_arrays(chunk)
    return Index(digests.view("<u8"), offsets.view("<u4"))


def digest_keys(first: int, n: int) -> npt.NDArray[np.uint32]:
    """Keys of the words from number `first` on of a chunk's elements.

    Those of checksums rise in equal steps, so that sums of a few are also those of others.
    """
    keys = np.arange(first + 1, first + 1 + n, dtype=np.uint64).astype(np.uint32)
    keys *= np.uint32(KEY_STEP)
    keys ^= keys >> np.uint32(MIX[0])
    keys *= np.uint32(MIX[1])
    keys ^= keys >> np.uint32(MIX[2])
    keys *= np.uint32(MIX[3])
    keys ^= keys >> np.uint32(MIX[4])
    return keys


def digest_of(data: Bytes, first_word: int = 0) -> int:
    """The digest of bytes (1-D) that start with word number `first_word` of a chunk's elements."""
    total = 0
    for at in range(0, data.size, _AT_ONCE):
        part = data[at : at + _AT_ONCE]
        words = np.zeros(-(-part.size // 4), "<u4")
        words.view(np.uint8)[: part.size] = part
        keys = digest_keys(first_word + at // 4, words.size)
        total += int((words.astype(np.uint64) * keys).sum(dtype=np.uint64))
    return total & MASK64


def fits(spec: Delta, chunk: Chunk, digest: int) -> bool:
    """Whether a base of this digest is one that the chunk was encoded against.

    To overwrite, the result will do as well.
    """
    base, result = index_of(chunk).digests.tolist()
    return digest == base or (spec.form == "overwrite" and digest == result)


def ordered(bits: Bits, dtype: DType) -> Bits:
    """Elements as unsigned integers of their order: neighbours differ by one."""
    kind = kind_of(dtype)
    top = bits.dtype.type(1 << (kind.width - 1))
    if kind.exponent:
        return np.where(bits & top, ~bits, bits | top)
    return bits ^ top if kind.signed else bits


def unordered(values: Bits, dtype: DType) -> Bits:
    """Inverse of `ordered`."""
    kind = kind_of(dtype)
    top = values.dtype.type(1 << (kind.width - 1))
    if kind.exponent:
        return np.where(values & top, values ^ top, ~values)
    return values ^ top if kind.signed else values


def exponents_of(bits: Bits, dtype: DType) -> Ints:
    """Biased exponents; 0 of what has none."""
    kind = kind_of(dtype)
    if not kind.exponent:
        return np.zeros(bits.size, np.int64)
    field = (bits >> bits.dtype.type(kind.mantissa)) & bits.dtype.type((1 << kind.exponent) - 1)
    found: Ints = field.astype(np.int64)
    return found


def center_of(exponents: Ints) -> int:
    """The center of a tile: the mean of the exponents in its sample that are not 0."""
    sample = exponents[::SAMPLED]
    count = int(np.count_nonzero(sample))
    return int(sample.sum()) // count if count else 0


def scale_of(exponents: Ints, lengths: Ints, kind: Kind) -> int:
    """The scale of a tile, from exponent and bit length (of its size minus 1) of each change.

    The one for which the changes take the fewest bits, by the estimate of specs/delta.md.
    """
    e, many = np.unique(exponents, return_counts=True)
    large = lengths > 0
    above = (exponents + lengths)[large]
    most = min(int(above.max()) + 1, (1 << kind.exponent) - 1 + kind.width) if above.size else 0
    exception = 2 * (LOG_TILE + kind.width)
    costs_above = np.array([0, *EXCESS, exception])
    best = found = -1
    for scale in range(int(e[0]), max(most, int(e[0])) + 1):
        cost = 2 * int((many * np.clip(scale - e, 0, kind.width + 1)).sum())
        cost += exception * int((exponents[large] >= scale).sum())
        cost += int(costs_above[np.clip(above - scale + 1, 0, len(EXCESS) + 1)].sum())
        if best < 0 or cost < best:
            best, found = cost, scale
    return found


class Writer:
    """Bits of a tile, each word from its lowest bit on."""

    def __init__(self) -> None:
        self._parts: list[Bytes] = []

    def fields(self, values: Bits | Ints, nbits: int | Ints) -> None:
        """The low `nbits` bits of each value, at most 64."""
        each = np.broadcast_to(np.asarray(nbits, np.int64), values.shape)
        ends = each.cumsum()
        at = np.arange(int(ends[-1]) if ends.size else 0) - np.repeat(ends - each, each)
        bits = np.repeat(values.astype(np.uint64), each) >> at.astype(np.uint64)
        self._parts.append((bits & np.uint64(1)).astype(np.uint8))

    def number(self, value: int, nbits: int) -> None:
        """One value."""
        self.fields(np.array([value], np.uint64), nbits)

    def gamma(self, value: int) -> None:
        """Elias' gamma code of a value above 0: its bit length in zeros, then its bits."""
        below = value.bit_length() - 1
        self.number(1 << below, below + 1)
        self.number(value, below)

    def unary(self, values: Ints) -> None:
        """As many zeros as each value says, and a one."""
        bits = np.zeros(int(values.sum()) + values.size, np.uint8)
        bits[(values + 1).cumsum() - 1] = 1
        self._parts.append(bits)

    def done(self) -> Bytes:
        """The words as bytes."""
        packed = np.packbits(np.concatenate(self._parts), bitorder="little")
        return np.pad(packed, (0, -packed.size % 4))


class BadTileError(Exception):
    """What is wrong with a tile."""


class Reader:
    """Reads what `Writer` has written. Raises `BadTileError` where the bits are used up."""

    def __init__(self, data: Bytes) -> None:
        self._bits = np.unpackbits(data, bitorder="little")
        self._at = 0

    def _take(self, nbits: int) -> Bytes:
        if nbits > self._bits.size - self._at:
            raise BadTileError(ENDS_EARLY)
        self._at += nbits
        return self._bits[self._at - nbits : self._at]

    def fields(self, count: int, nbits: int | Ints) -> npt.NDArray[np.uint64]:
        """`count` numbers of `nbits` bits each."""
        each = np.broadcast_to(np.asarray(nbits, np.int64), (count,))
        ends = each.cumsum()
        bits = self._take(int(ends[-1]) if count else 0).astype(np.uint64)
        at = np.arange(bits.size) - np.repeat(ends - each, each)
        found = np.zeros(count, np.uint64)
        np.bitwise_or.at(found, np.repeat(np.arange(count), each), bits << at.astype(np.uint64))
        return found

    def number(self, nbits: int) -> int:
        """One number."""
        return int(self.fields(1, nbits)[0])

    def gamma(self) -> int:
        """The inverse of `Writer.gamma`, of values up to TILE + 1."""
        below = int(self.unary(1)[0])
        if below > LOG_TILE:
            raise BadTileError("a count is too large")
        return 1 << below | self.number(below)

    def unary(self, count: int) -> Ints:
        """`count` numbers, the inverse of `Writer.unary`."""
        ones = np.flatnonzero(self._bits[self._at :])[:count]
        if ones.size < count:
            raise BadTileError(ENDS_EARLY)
        self._at += int(ones[-1]) + 1 if count else 0
        found: Ints = np.diff(ones, prepend=-1) - 1
        return found

    def values(self, nbytes: int) -> Bytes:
        """Bytes from the next word on."""
        self._take(-self._at % 32)
        return np.packbits(self._take(8 * nbytes), bitorder="little")

    def end(self) -> None:
        """Raise `BadTileError` unless less than a word is left, and zeros."""
        rest = self._bits[self._at :]
        if rest.size >= 32 or rest.any():
            raise BadTileError("a tile goes on behind its end")


def rice_bits(count: int, listed: int) -> int:
    """Low bits of the gaps between `listed` of `count` elements."""
    return (count // listed).bit_length() - 1


def classes_of(exponents: Ints, center: int, kind: Kind) -> Ints:
    """The class of each element."""
    classes = np.zeros(exponents.size, np.int64)
    if kind.classes > 1:
        for limit in LIMITS:
            classes += exponents < center + limit
    return classes


def encode_tile(spec: Delta, dtype: DType, base: Bits, bits: Bits) -> Bytes:
    """The words of a tile; none if nothing has changed."""
    changed = base != bits
    if not changed.any():
        return np.empty(0, np.uint8)
    if spec.form == "overwrite":
        coded = encode_new(dtype, bits, changed)
    else:
        coded = _encode_differences(dtype, base, bits, changed)
    plain = plain_tile(bits)
    if spec.form == "adaptive":
        planes = _encode_planes(base, bits)
        coded = planes if planes.size < coded.size else coded
    return coded if coded.size <= plain.size else plain


def plain_tile(bits: Bits) -> Bytes:
    """The words of a tile whose elements are stored as they are."""
    words = np.zeros(4 * plain_words(bits.size, bits.itemsize), np.uint8)
    words[0] = 1
    words[4 : 4 + bits.nbytes] = bits.view(np.uint8)
    return words


def encode_new(dtype: DType, bits: Bits, changed: Flags) -> Bytes:
    """The words of a tile in the form overwrite, of the elements that have changed."""
    out = Writer()
    out.number(0, 1)
    out.gamma(int(changed.sum()) + 1)
    gaps = _gaps([changed])
    _write_low(out, gaps)
    _write_quotients(out, gaps)
    out.fields(bits[changed], 8 * dtype.itemsize)
    return out.done()


def _encode_differences(dtype: DType, base: Bits, bits: Bits, changed: Flags) -> Bytes:
    kind = kind_of(dtype)
    exponents = exponents_of(base, dtype)
    old, new = ordered(base[changed], dtype), ordered(bits[changed], dtype)
    negative = new < old
    sizes = (np.where(negative, old - new, new - old) - old.dtype.type(1)).astype(np.uint64)
    e, lengths = exponents[changed], bit_lengths(sizes)
    center, scale = center_of(exponents), scale_of(e, lengths, kind)
    hot = e < scale
    low = np.where(hot, np.minimum(scale - 1 - e, kind.width), 0)
    # NumPy does not shift by 64 bits.
    quotients = sizes >> np.minimum(low, 63).astype(np.uint64)
    quotients[low == kind.width] = 0
    exceptions = np.where(hot, quotients > MAX_QUOTIENT, sizes > 0)
    classes = classes_of(exponents, center, kind)
    flags = [changed[classes == j] for j in range(kind.classes)]
    gaps = _gaps(flags)

    out = Writer()
    out.number(0, 1)
    out.number(center, kind.exponent)
    out.number(scale, kind.scale_bits)
    for of_class in flags:
        out.gamma(int(of_class.sum()) + 1)
    out.gamma(int(exceptions.sum()) + 1)
    _write_low(out, gaps)
    out.fields(negative, 1)
    _write_quotients(out, gaps)
    out.unary(np.where(exceptions, 0, quotients)[hot].astype(np.int64))
    out.fields(np.where(exceptions, 0, sizes)[hot], low[hot])
    for j in np.flatnonzero(exceptions).tolist():
        out.number(j, LOG_TILE)
        out.number(int(sizes[j]), kind.width)
    return out.done()


def is_bitmap(count: int, listed: int) -> bool:
    """Whether a plane of `count` elements, of which `listed` would be listed, is a bitmap."""
    return 8 * listed > BITMAP_EIGHTHS * count


def _planes_of(differing: Bits) -> list[Flags]:
    """Which elements have each of the bits, from the lowest on."""
    one = differing.dtype.type
    return [(differing >> one(k) & one(1)) > 0 for k in range(8 * differing.itemsize)]


def _encode_planes(base: Bits, bits: Bits) -> Bytes:
    """The words of a tile of planes."""
    planes = _planes_of(base ^ bits)
    there = [plane for plane in planes if plane.any()]
    out = Writer()
    out.number(PLANES_HEAD, 2)
    out.fields(np.array([plane.any() for plane in planes]), 1)
    out.fields(np.array([plane.sum() - 1 for plane in there]), LOG_TILE)
    for plane in there:
        gaps = _gaps([plane])
        if is_bitmap(plane.size, gaps[0][0].size):
            out.fields(plane, 1)
        else:
            _write_low(out, gaps)
            _write_quotients(out, gaps)
    return out.done()


def bit_lengths(values: Bits) -> Ints:
    """The bit length of each value."""
    found = np.zeros(values.size, np.int64)
    rest = values.astype(np.uint64)
    while rest.any():
        found += rest > 0
        rest >>= np.uint64(1)
    return found


def _gaps(flags: list[Flags]) -> list[tuple[Ints, int]]:
    """The gaps of each class, between elements that have changed or have not, and their low bits.

    What is listed is the smaller part of the class.
    """
    found = []
    for of_class in flags:
        listed = np.flatnonzero(of_class if 2 * of_class.sum() <= of_class.size else ~of_class)
        low = rice_bits(of_class.size, listed.size) if listed.size else 0
        found.append((np.diff(listed, prepend=-1) - 1, low))
    return found


def _write_low(out: Writer, gaps: list[tuple[Ints, int]]) -> None:
    for of_class, low in gaps:
        out.fields(of_class, low)


def _write_quotients(out: Writer, gaps: list[tuple[Ints, int]]) -> None:
    for of_class, low in gaps:
        out.unary(of_class >> low)


def decode_tile(spec: Delta, dtype: DType, base: Bits, words: Bytes) -> Bits:
    """The elements of a tile. Raises `BadTileError`."""
    if not words.size:
        return base
    bits: Bits
    source = Reader(words)
    if source.number(1):
        second = source.number(1)
        if second and spec.form == "adaptive":
            bits = _decode_planes(source, base)
        elif second or source.number(30):
            raise BadTileError("the first word of a plain tile")
        else:
            bits = source.values(base.nbytes).view(base.dtype)
    elif spec.form == "overwrite":
        changed, new = read_new(source, dtype, base.size)
        bits = base.copy()
        bits[changed] = new
    else:
        bits = _decode_differences(source, dtype, base)
    source.end()
    return bits


def read_new(source: Reader, dtype: DType, nelem: int) -> tuple[Flags, Bits]:
    """Which elements of a tile in the form overwrite have changed, and their bits."""
    places = _Places([nelem], [source.gamma() - 1])
    places.read_low(source)
    (changed,) = places.read_flags(source)
    return changed, source.fields(places.changes, 8 * dtype.itemsize).astype(dtype.bits)


def _decode_planes(source: Reader, base: Bits) -> Bits:
    """The elements of a tile of planes, after its first two bits."""
    one = base.dtype.type
    numbers = np.flatnonzero(source.fields(8 * base.itemsize, 1)).tolist()
    counts = [int(n) + 1 for n in source.fields(len(numbers), LOG_TILE)]
    if not counts:
        raise BadTileError("no planes")
    bits = base.copy()
    for k, count in zip(numbers, counts, strict=True):
        places = _Places([base.size], [count])
        if is_bitmap(base.size, min(count, base.size - count)):
            plane = source.fields(base.size, 1) > 0
            if plane.sum() != count:
                raise BadTileError("a plane has another number of ones")
        else:
            places.read_low(source)
            (plane,) = places.read_flags(source)
        bits[plane] ^= one(1 << k)
    return bits


def _decode_differences(source: Reader, dtype: DType, base: Bits) -> Bits:
    kind = kind_of(dtype)
    exponents = exponents_of(base, dtype)
    center, scale = source.number(kind.exponent), source.number(kind.scale_bits)
    counts = [source.gamma() - 1 for _ in range(kind.classes)]
    n_exceptions = source.gamma() - 1
    classes = classes_of(exponents, center, kind)
    members = [classes == j for j in range(kind.classes)]
    places = _Places([int(m.sum()) for m in members], counts)
    places.read_low(source)
    negative = source.fields(places.changes, 1) > 0
    changed = np.zeros(base.size, bool)
    for member, of_class in zip(members, places.read_flags(source), strict=True):
        changed[member] = of_class

    e = exponents[changed]
    hot = e < scale
    low = np.minimum(scale - 1 - e[hot], kind.width)
    quotients = source.unary(low.size)
    if (quotients > np.minimum(MAX_QUOTIENT, (1 << np.minimum(kind.width - low, 4)) - 1)).any():
        raise BadTileError("a change is too large")
    sizes = np.zeros(e.size, np.uint64)
    sizes[hot] = quotients.astype(np.uint64) << np.minimum(low, 63).astype(np.uint64)
    sizes[hot] |= source.fields(low.size, low)
    last = -1
    for _ in range(n_exceptions):
        j = source.number(LOG_TILE)
        if not last < j < e.size:
            raise BadTileError("exceptions that are not in order")
        sizes[j], last = source.number(kind.width), j

    old = ordered(base[changed], dtype).astype(np.uint64)
    most = np.where(negative, old, np.uint64((1 << kind.width) - 1) - old)
    # A size is one less than the difference.
    if (sizes >= most).any():
        raise BadTileError("a change goes beyond the dtype")
    one = np.uint64(1)
    new = np.where(negative, old - sizes - one, old + sizes + one).astype(base.dtype)
    bits = base.copy()
    bits[changed] = unordered(new, dtype)
    return bits


class _Places:
    """Reads where the changes are, of classes of so many elements and so many changes.

    Raises `BadTileError`.
    """

    def __init__(self, sizes: list[int], counts: list[int]) -> None:
        pairs = list(zip(sizes, counts, strict=True))
        if any(count > size for size, count in pairs) or not any(counts):
            raise BadTileError("more changes than elements, or none")
        self.changes = sum(counts)
        self._sizes = sizes
        self._lists_changes = [2 * count <= size for size, count in pairs]
        self._listed = [min(count, size - count) for size, count in pairs]
        self._low = [rice_bits(s, n) if n else 0 for s, n in zip(sizes, self._listed, strict=True)]
        self._low_parts: list[Ints] = []

    def read_low(self, source: Reader) -> None:
        """Low bits of the gaps of all classes."""
        for listed, low in zip(self._listed, self._low, strict=True):
            self._low_parts.append(source.fields(listed, low).astype(np.int64))

    def read_flags(self, source: Reader) -> list[Flags]:
        """Quotients of the gaps; which elements of each class have changed."""
        flags = []
        for size, changes, low, part in zip(
            self._sizes, self._lists_changes, self._low, self._low_parts, strict=True
        ):
            gaps = source.unary(part.size) << low | part
            at = (gaps + 1).cumsum() - 1
            if at.size and at[-1] >= size:
                raise BadTileError("a gap goes beyond the end")
            of_class = np.full(size, not changes)
            of_class[at] = changes
            flags.append(of_class)
        return flags


def encode_chunk(
    spec: Delta,
    chunk: Chunk,
    bits: Bits,
    *,
    base: Bits,
    stats: npt.NDArray[np.int64] | None = None,
    key: Key | None = None,
    threads: int = 1,
) -> ChunkResult:
    """Encode the chunk's elements `bits` (1-D), given those of the base, into its parts."""
    index = index_of(chunk)
    index.digests[:] = digest_of(base.view(np.uint8)), digest_of(bits.view(np.uint8))
    used = 0
    for number, start in enumerate(range(0, bits.size, TILE)):
        tile = slice(start, start + TILE)
        words = encode_tile(spec, chunk.dtype, base[tile], bits[tile])
        index.offsets[number] = used // 4
        slot = chunk.dynamic[used : used + words.size]
        slot[:] = words[: slot.size]
        used += words.size
    return ChunkResult(used)


def base_fits(spec: Delta, chunk: Chunk, base: Bits, threads: int = 1) -> bool:
    """Whether the chunk can be decoded against this base (1-D, the chunk's elements)."""
    return fits(spec, chunk, digest_of(base.view(np.uint8)))


def ends_of(chunk: Chunk, start: int, stop: int) -> Ints | None:
    """Where the tiles that hold elements `start` to `stop` start, and the last ends: bytes.

    None if offsets do not rise, or are not within the dynamic part, or if one of these tiles has
    more words than it would have plain. So what a tile may take is checked before it is read.
    """
    nbytes = chunk.dynamic.size
    if nbytes % 4 or (nbytes and not chunk.nelem):
        return None
    ends = np.append(index_of(chunk).offsets, nbytes // 4).astype(np.int64)
    here = ends[start // TILE : -(-stop // TILE) + 1]
    words, first = np.diff(here), start // TILE
    most = np.full(words.size, plain_words(TILE, chunk.dtype.itemsize))
    if words.size:
        last = min(chunk.nelem - (first + words.size - 1) * TILE, TILE)
        most[-1] = plain_words(last, chunk.dtype.itemsize)
    bad = ((words < 0) | (words > most)).any() or (here > nbytes // 4).any()
    return None if bad or (start < TILE and ends[0] and chunk.nelem) else 4 * here


def _tiles(
    spec: Delta, chunk: Chunk, base: Bits, start: int, stop: int
) -> Iterator[tuple[int, Bits]]:
    """Number of the first element, and elements, of the tiles that hold `start` to `stop`."""
    ends = ends_of(chunk, start, stop)
    if ends is None:
        raise BadTileError(OFFSETS_PROBLEM)
    first = start // TILE * TILE
    for at, lo, hi in zip(range(first, stop, TILE), ends, ends[1:], strict=False):
        yield at, decode_tile(spec, chunk.dtype, base[at : at + TILE], chunk.dynamic[lo:hi])


def decode_chunk(
    spec: Delta,
    chunk: Chunk,
    out: Bits,
    start: int = 0,
    *,
    base: Bits,
    threads: int = 1,
) -> ChunkDecoded:
    """Decode elements `start` to `start + out.size` of the chunk into `out` (1-D).

    `base` has all of the chunk's elements. It may be the memory of `out`.
    """
    stop = start + out.size
    digest = 0
    try:
        for at, bits in _tiles(spec, chunk, base, start, stop):
            digest += digest_of(bits.view(np.uint8), at * chunk.dtype.itemsize // 4)
            lo, hi = max(start, at), min(stop, at + TILE)
            out[lo - start : hi - start] = bits[lo - at : hi - at]
    except BadTileError as problem:
        return ChunkDecoded(str(problem))
    return ChunkDecoded(_result_problem(chunk, out.size, digest))


class Prepared(NamedTuple):
    """A chunk that has been checked, to be written over its base.

    `fits` tells whether the base is the right one, `problem` what is wrong with the payload if it
    is. `write` writes the chunk's elements to the memory of the base.
    """

    fits: bool
    problem: str | None
    write: Callable[[Bits], object]


def prepare(spec: Delta, chunk: Chunk, base: Bits, threads: int = 1) -> Prepared:
    """See `Prepared`; nothing is written."""
    digest, problem = 0, None
    try:
        for at, bits in _tiles(spec, chunk, base, 0, chunk.nelem):
            digest += digest_of(bits.view(np.uint8), at * chunk.dtype.itemsize // 4)
    except BadTileError as bad:
        problem = str(bad)
    else:
        problem = _result_problem(chunk, chunk.nelem, digest)
    return Prepared(
        base_fits(spec, chunk, base),
        problem,
        lambda out: decode_chunk(spec, chunk, out, base=base),
    )


def _result_problem(chunk: Chunk, nelem: int, digest: int) -> str | None:
    """What is wrong with the digest of a result that has all of the chunk's elements."""
    wrong = nelem == chunk.nelem and digest & MASK64 != int(index_of(chunk).digests[1])
    return RESULT_PROBLEM if wrong else None
