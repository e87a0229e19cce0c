# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment,misc"
"""What the GPU kernels of delta share: elements, classes, bits of tiles, work memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from . import delta
from .common.dynamic_triton import items

LOG_TILE, TILE = tl.constexpr(delta.LOG_TILE), tl.constexpr(delta.TILE)
DIGESTS = tl.constexpr(delta.DIGESTS_NBYTES)
_KEY_STEP = tl.constexpr(delta.KEY_STEP)
_SHIFT0, _FACTOR0, _SHIFT1, _FACTOR1, _SHIFT2 = (tl.constexpr(n) for n in delta.MIX)
#: Elements of a piece.
PIECE = tl.constexpr(256)
#: Words of work memory of a tile.
WORDS = tl.constexpr(delta.TILE_SCRATCH // 4)
#: Words of 8 bytes of work memory of a chunk: checksum, digest of the base, digest of the result
#: or, to decode, what changes add to that of the base.
SUMS = tl.constexpr(4)
FAR = tl.constexpr(1 << 30)
#: Bits of a class in a number that counts members of all classes, and those bits set.
FIELD, MASK = tl.constexpr(12), tl.constexpr(4095)


@dataclass(frozen=True)
class Launch:
    """What the kernels know of a call; see `delta.Kind`.

    `lanes` is the number of classes as shapes need it. `overwrite` is the form, `store`: decoded
    elements are wanted, `sums`: so are checksum terms. `known`: what changed was looked for before.
    `packed`: dynamic parts are where they are said to start. `aligned`: elements of chunks are at
    multiples of 16 bytes. `over`: the tensor is the base's memory. `adaptive`: the form, to decode
    or measure.
    """

    item: int
    exponent: int
    mantissa: int
    scale_bits: int
    classes: int
    lanes: int
    signed: bool
    overwrite: bool
    store: bool = True
    sums: bool = False
    known: bool = False
    packed: bool = False
    aligned: bool = False
    over: bool = False
    adaptive: bool = False

    @property
    def listed(self) -> int:
        """Changes of a tile that are listed for the kernel that writes it."""
        return 896 if self.item <= 2 else 512


@triton.jit
def keys_of(i):
    """Digest keys of words number `i` of a chunk, uint32."""
    key = (i + 1) * _KEY_STEP
    key = (key ^ (key >> _SHIFT0)) * _FACTOR0
    key = (key ^ (key >> _SHIFT1)) * _FACTOR1
    return key ^ (key >> _SHIFT2)


@triton.jit
def terms_of(v, i, ITEM: tl.constexpr):
    """Terms of the digest of elements `i` of a chunk, uint32."""
    at = (i * ITEM).to(tl.int64)
    key = keys_of((at >> 2).to(tl.uint32))
    word = v.to(tl.uint32)
    if ITEM < 4:
        word = word << ((at & 3).to(tl.uint32) * 8)
    return word.to(tl.uint64) * key.to(tl.uint64)


@triton.jit
def exponents_of(v, L: tl.constexpr):
    """Biased exponents, int32; 0 of what has none."""
    found = v.to(tl.int32, bitcast=True) * 0
    if L.exponent > 0:
        found = ((v >> L.mantissa) & ((1 << L.exponent) - 1)).to(tl.int32, bitcast=True)
    return found


@triton.jit
def ordered(v, L: tl.constexpr):
    """See `delta.ordered`; uint32."""
    WIDTH: tl.constexpr = 8 * L.item
    TOP: tl.constexpr = 1 << (WIDTH - 1)
    ALL: tl.constexpr = (1 << WIDTH) - 1
    top = (v * 0 + TOP).to(tl.uint32)
    found = v
    if L.exponent > 0:
        found = tl.where((v & top) != 0, (v ^ 0xFFFFFFFF) & ALL, v | top)
    elif L.signed:
        found = v ^ top
    return found.to(tl.uint32)


@triton.jit
def unordered(v, L: tl.constexpr):
    """Inverse of `ordered`."""
    WIDTH: tl.constexpr = 8 * L.item
    TOP: tl.constexpr = 1 << (WIDTH - 1)
    ALL: tl.constexpr = (1 << WIDTH) - 1
    top = (v * 0 + TOP).to(tl.uint32)
    found = v
    if L.exponent > 0:
        found = tl.where((v & top) != 0, v ^ top, (v ^ 0xFFFFFFFF) & ALL)
    elif L.signed:
        found = v ^ top
    return found.to(tl.uint32)


@triton.jit
def log16(v):
    """The bit length of numbers below 2^16, int32."""
    bits = v.to(tl.float32).to(tl.int32, bitcast=True)
    return tl.where(v > 0, (bits >> 23) - 126, 0)


@triton.jit
def length_of(v):
    """The bit length of uint32 numbers, int32."""
    high = (v >> 16).to(tl.int32, bitcast=True)
    low = (v & 0xFFFF).to(tl.int32, bitcast=True)
    return tl.where(high > 0, 16 + log16(high), log16(low))


@triton.jit
def class_of(e, center, L: tl.constexpr):
    """The classes of elements by their exponents, int32; see `delta.classes_of`."""
    found = e * 0
    if L.classes > 1:
        # `delta.LIMITS` fall by 2 from 1 on.
        found = tl.minimum(tl.maximum((center + 2 - e) >> 1, 0), L.classes - 1)
    return found


@triton.jit
def low_bits(sizes, listed):
    """Low bits of the gaps of classes; see `delta.rice_bits`."""
    return tl.where(listed > 0, log16(sizes // tl.maximum(listed, 1)) - 1, 0)


@triton.jit
def low_of(e, scale, WIDTH: tl.constexpr):
    """(whether changes are hot, low bits of their sizes), int32."""
    hot = (e < scale).to(tl.int32)
    return hot, tl.minimum(scale - 1 - e, WIDTH) * hot


@triton.jit
def get_bits(words, count, at, n):
    """`n` bits, at most 32, from bit `at` on, of `count` words; behind them are zeros."""
    k = at >> 5
    low = tl.load(words + k, mask=(k >= 0) & (k < count), other=0).to(tl.uint64)
    high = tl.load(words + k + 1, mask=(k + 1 >= 0) & (k + 1 < count), other=0).to(tl.uint64)
    both = (low | (high << 32)) >> (at & 31).to(tl.uint64)
    return (both & ((low * 0 + 1 << n.to(tl.uint64)) - 1)).to(tl.uint32)


class Tile(NamedTuple):
    """A tile of a tensor; a class, as programs pass it on as one.

    Attributes:
        chunk: Number of its chunk.
        tile: Number in that.
        first, begin: Number of its first element in the tensor, and in the chunk.
        n, m: Elements of the chunk, and of the tile.
        info: Its work memory, int32.
        sums: The chunk's, int64.
    """

    chunk: Any
    tile: Any
    first: Any
    begin: Any
    n: Any
    m: Any
    info: Any
    sums: Any


@triton.jit
def tile_at(chunk, tile, number, row, nelem, chunk_nelem, scratch_ptr, sums_words):
    """A tile, which has the work memory of tile `number`, and its chunk that of chunk `row`."""
    begin = tile.to(tl.int64) * TILE
    n = tl.maximum(tl.minimum(chunk_nelem, nelem - chunk * chunk_nelem), 0)
    m = tl.maximum(tl.minimum(n - begin, TILE), 0).to(tl.int32)
    info = scratch_ptr.to(tl.pointer_type(tl.int32)) + sums_words + number * WORDS
    sums = scratch_ptr.to(tl.pointer_type(tl.int64)) + row * SUMS
    return Tile(chunk, tile, chunk * chunk_nelem + begin, begin, n, m, info, sums)


@triton.jit
def tile_of(pid, nelem, chunk_nelem, tiles, scratch_ptr, sums_words):
    """Tile number `pid` of a tensor whose chunks have `tiles` of them."""
    chunk, tile, number = (pid // tiles).to(tl.int64), pid % tiles, pid.to(tl.int64)
    return tile_at(chunk, tile, number, chunk, nelem, chunk_nelem, scratch_ptr, sums_words)


@triton.jit
def elements_at(ptr, first, L: tl.constexpr):
    """Elements of a tensor from number `first` on."""
    if L.aligned:
        # A hint would be lost.
        first = first // 16 * 16
    return items(ptr, L.item) + first
