"""tahquant: activations in 3 or 4 bits by token entropy, gradients in 6. specs/tahquant.md.

After TahQuant: tiles with a float16 range each, the fifth of the tokens with the least entropy in 3
bits, an outlier moved to slot 0 and spread by a Hadamard transform. Float operations are single
precision, each rounded to nearest, in the page's order. This module holds layout, constants and the
NumPy reference.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from ..formats.codec_ids import CODEC_IDS
from ..formats.dtypes import DType
from ..formats.header import align
from .common.base import Bits, Bytes, Chunk, ChunkDecoded, ChunkResult, CodecSpec, Key
from .common.hadamard import rotate
from .common.minifloat import WIDENED, narrow_clipped, widen
from .common.params import choice, integer
from .common.sections import Array

Words = npt.NDArray[np.uint32]
Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]

DIRECTIONS = ("forward", "backward")
MAX_HIDDEN = (1 << 63) - 1
#: One token in NARROW_SHARE is narrow, where tokens have no more elements than this.
NARROW_SHARE = 5
MAX_RANKED = 1 << 24
#: Coefficients of log2 between powers of two, in units of 2^-16.
LOG = 28710, 15512, 5263
#: Bits of the least magnitude, as float32, that loses a tile; and a lost tile's word.
TOO_LARGE = 0x49800000
NAN_WORD = 0x7E007E00
PIVOT = 128
#: Added to a number below 2^22, leaves it rounded in the low bits of the sum.
ANCHOR = 1.5 * 2.0**23
INDEX_PROBLEM = "the index names the wrong number of tokens"
TILE_PROBLEM = "a scale or a pivot of a tile"

_BATCH_TILES = 1 << 12


@dataclass(frozen=True)
class Tahquant(CodecSpec):
    """tahquant: activations in 3 or 4 bits by token entropy, their gradients in 6 bits.

    Lossy, made for links between pipeline stages. Takes float16, bfloat16 and float32. Values of
    2^20 or more make their tile NaN.

    Size: forward 4 bits per element, 3 in a fifth of the tokens, and 40 bits per tile of 64: 4.43
    bits. Backward 6 bits and 32 bits per tile of 32: 7 bits.

    Source: TAH-QUANT: Effective Activation Quantization in Pipeline Parallelism over Slow Network
    (2025).

    Args:
        direction: ``"forward"`` for activations, ``"backward"`` for their gradients.
        hidden: Elements of a token, 1 to 2^63 - 1; 0 takes the tensor's last dimension.

    Raises:
        TypeError: If a parameter has a wrong type.
        ValueError: If a value is not allowed.
    """

    direction: str = choice(0, DIRECTIONS)
    hidden: int = integer(8, 8, least=1, most=MAX_HIDDEN, default=0)

    name: ClassVar[str] = "tahquant"
    id: ClassVar[int] = CODEC_IDS["tahquant"][0]
    lossless: ClassVar[bool] = False
    dtypes: ClassVar[tuple[str, ...]] = WIDENED
    max_nelem: ClassVar[int] = 1 << 36
    #: The index.
    weighed_by_frame: ClassVar[tuple[int, ...]] = (2,)
    caution: ClassVar[str] = "values from 2^20 on make their tile NaN"

    def arrays(self, dtype: DType, nelem: int) -> tuple[Array, ...]:
        """Planes, and that of wide tokens; scale words and pivots; a bit per token."""
        tiles = self.tiles(nelem)
        return (
            Array("payload", self.tile, self.planes * tiles),
            Array("payload", self.tile, self.wide_tiles(nelem)),
            Array("scales", 32, tiles),
            Array("scales", 8 * self.forward, tiles),
            Array("index", 1 * self.forward, -(-nelem // self.hidden)),
        )

    @property
    def forward(self) -> bool:
        """Whether tokens have widths, and tiles pivots."""
        return self.direction == "forward"

    @property
    def tile(self) -> int:
        """Elements of a tile."""
        return 64 if self.forward else 32

    @property
    def planes(self) -> int:
        """Bit planes that all tiles have."""
        return 3 if self.forward else 6

    @property
    def token_tiles(self) -> int:
        """Tiles of a whole token."""
        return -(-self.hidden // self.tile)

    def tiles(self, nelem: int) -> int:
        """Tiles of a chunk of `nelem` elements."""
        whole, rest = divmod(nelem, self.hidden)
        return self.token_tiles * whole + -(-rest // self.tile)

    def narrow_tokens(self, nelem: int) -> int:
        """Tokens of a chunk that are coded in 3 bits."""
        if not self.forward or self.hidden > MAX_RANKED:
            return 0
        return nelem // self.hidden // NARROW_SHARE

    def wide_tiles(self, nelem: int) -> int:
        """Tiles of a chunk in the plane of wide tokens."""
        if not self.forward:
            return 0
        return self.tiles(nelem) - self.token_tiles * self.narrow_tokens(nelem)

    def bind(self, shape: tuple[int, ...]) -> Tahquant:
        """The codec that knows the size of a token."""
        if self.hidden:
            return self
        return replace(self, hidden=max(shape[-1], 1) if shape else 1)

    def scratch_nbytes(self, dtype: DType, nelem: int, chunks: int) -> int:
        """Of the GPU backend: a sum of each chunk, a table, three int32 numbers of each token."""
        tokens = -(-nelem // self.hidden) if self.narrow_tokens(nelem) else 0
        return align(8 * chunks) + align(128 + 12 * chunks * tokens)


SPEC = Tahquant


def encode_chunk(
    spec: Tahquant,
    chunk: Chunk,
    bits: Bits,
    *,
    stats: npt.NDArray[Any] | None = None,
    key: Key | None = None,
    threads: int = 1,
) -> ChunkResult:
    """Encode the chunk's elements `bits` (1-D) into its static part."""
    v = static_views(spec, chunk)
    narrow = narrow_tokens(spec, bits, chunk.dtype)
    if spec.forward:
        v.narrow[:] = np.packbits(narrow, bitorder="little")
    slots = slots_of(spec, narrow)
    for first in range(0, v.words.size, _BATCH_TILES):
        tiles = np.arange(first, min(first + _BATCH_TILES, v.words.size))
        at, inside = _elements(spec, bits.size, tiles)
        x = widen(np.where(inside, bits[at], chunk.dtype.bits.type(0)), chunk.dtype)
        is_narrow = narrow[tiles // spec.token_tiles]
        most = np.where(is_narrow, 7, (1 << spec.planes + spec.forward) - 1)
        codes, v.words[tiles], pivots = _encode_tiles(spec, x, most.astype(np.float32))
        for p in range(spec.planes):
            v.planes[p, tiles] = _pack(codes, p)
        if spec.forward:
            v.pivots[tiles] = pivots
            v.wide[_slot(spec, slots, tiles[~is_narrow])] = _pack(codes[~is_narrow], 3)
    return ChunkResult(0)


def decode_chunk(
    spec: Tahquant, chunk: Chunk, out: Bits, start: int = 0, *, threads: int = 1
) -> ChunkDecoded:
    """Decode elements `start` to `start + out.size` of the chunk into `out` (1-D).

    Only the index and the tiles that hold those elements are looked at.
    """
    v = static_views(spec, chunk)
    narrow = index_of(spec, chunk)
    if narrow is None:
        return ChunkDecoded(INDEX_PROBLEM)
    slots = slots_of(spec, narrow)
    problem = None
    stop = start + out.size
    first, last = tile_range(spec, start, stop)
    for at_tile in range(first, last, _BATCH_TILES):
        tiles = np.arange(at_tile, min(at_tile + _BATCH_TILES, last))
        words, pivots = v.words[tiles], v.pivots[tiles] if spec.forward else None
        if bad_tiles(words, pivots):
            problem = TILE_PROBLEM
        codes = np.zeros((tiles.size, spec.tile), np.uint32)
        for p in range(spec.planes):
            codes |= _unpack(v.planes[p, tiles]) << p
        if spec.forward:
            wide = ~narrow[tiles // spec.token_tiles]
            codes[wide] |= _unpack(v.wide[_slot(spec, slots, tiles[wide])]) << 3
        found = narrow_clipped(_decode_tiles(words, pivots, codes), chunk.dtype)
        found[words == NAN_WORD] = ((1 << chunk.dtype.exponent + 1) - 1) << chunk.dtype.mantissa - 1
        at, inside = _elements(spec, chunk.nelem, tiles)
        inside &= (at >= start) & (at < stop)
        out[at[inside] - start] = found[inside]
    return ChunkDecoded(problem)


class Views(NamedTuple):
    """A chunk's static part: with N tiles in words of w bytes, and W tiles of wide tokens."""

    #: Shape (planes, N, w), and of the plane of wide tokens (W, w).
    planes: Bytes
    wide: Bytes
    #: Shape (N,); of the backward direction there are no pivots.
    words: Words
    pivots: Bytes
    narrow: Bytes


def static_views(spec: Tahquant, chunk: Chunk) -> Views:
    """See `Views`."""
    n, nbytes = spec.tiles(chunk.nelem), spec.tile // 8
    planes, wide, words, pivots, narrow = spec.static_arrays(chunk)
    planes = planes.reshape(spec.planes, n, nbytes)
    return Views(planes, wide.reshape(-1, nbytes), words.view("<u4"), pivots, narrow)


def narrow_tokens(spec: Tahquant, bits: Bits, dtype: DType) -> npt.NDArray[np.bool]:
    """Which of a chunk's tokens are coded in 3 bits, bool, shape (tokens,)."""
    narrow = np.zeros(-(-bits.size // spec.hidden), bool)
    count = spec.narrow_tokens(bits.size)
    if count:
        whole = bits.size // spec.hidden
        rows = bits[: whole * spec.hidden].reshape(whole, spec.hidden)
        entropies = np.array([_entropy(widen(row, dtype)) for row in rows])
        narrow[np.argsort(entropies, kind="stable")[:count]] = True
    return narrow


def _entropy(words: Words) -> int:
    """Entropy of a token's magnitudes, in bits times 2^12."""
    fields = words >> np.uint32(23) & np.uint32(0xFF)
    fractions = np.where(fields == 255, np.uint32(0), words & np.uint32(0x7FFFFF))
    significands = fractions | (fields > 0).astype(np.uint32) << np.uint32(23)
    fields = np.maximum(fields, 1)
    q = significands >> np.uint32(8) >> np.minimum(fields.max() - fields, 31)
    total = int(q.sum(dtype=np.int64))
    if total == 0:
        return 0
    weighted = int((q.astype(np.int64) * _log2(q)).sum())
    return max(int(_log2(np.array([total]))[0]) - weighted // total, 0)


def _log2(numbers: npt.NDArray[Any]) -> Ints:
    """log2 in units of 2^-12; of 0 something finite."""
    a, b, c = LOG
    words = numbers.astype(np.float32).view(np.uint32).astype(np.int64)
    f = words >> 7 & 0xFFFF
    h = a - ((b - (c * f >> 16)) * f >> 16)
    found: Ints = ((words >> 23) - 127 << 16) + f + ((f * (65536 - f) >> 16) * h >> 16) >> 4
    return found


def slots_of(spec: Tahquant, narrow: npt.NDArray[np.bool]) -> Ints:
    """Of each token, how many tiles of narrow tokens are before it."""
    before = np.cumsum(narrow, dtype=np.int64) - narrow
    return before * spec.token_tiles


def _slot(spec: Tahquant, slots: Ints, tiles: Ints) -> Ints:
    """Where tiles of wide tokens are in their plane."""
    return tiles - slots[tiles // spec.token_tiles]


def index_of(spec: Tahquant, chunk: Chunk) -> npt.NDArray[np.bool] | None:
    """Which tokens of the chunk are narrow, or None if they are the wrong number."""
    tokens = -(-chunk.nelem // spec.hidden)
    if not spec.forward:
        return np.zeros(tokens, bool)
    found = np.unpackbits(static_views(spec, chunk).narrow, bitorder="little")
    whole = chunk.nelem // spec.hidden
    if found[whole:].any() or np.count_nonzero(found) != spec.narrow_tokens(chunk.nelem):
        return None
    return found[:tokens].astype(bool)


def tile_range(spec: Tahquant, start: int, stop: int) -> tuple[int, int]:
    """First and past-the-last tile of a chunk's elements `start` to `stop`."""
    if start >= stop:
        return 0, 0
    tokens, rests = zip(divmod(start, spec.hidden), divmod(stop - 1, spec.hidden), strict=True)
    first, last = (
        spec.token_tiles * t + r // spec.tile for t, r in zip(tokens, rests, strict=True)
    )
    return first, last + 1


def bad_tiles(words: Words, pivots: Bytes | None) -> bool:
    """True if there is a word or a pivot byte that no encoder writes."""
    finite = ((words & 0x7C00) != 0x7C00) & (words >> np.uint32(16) < 0x7C00)
    wrong = not (finite | (words == NAN_WORD)).all()
    if pivots is not None:
        wrong |= bool(((pivots != 0) & (pivots >> 6 != PIVOT >> 6)).any())
    return wrong


def _elements(spec: Tahquant, nelem: int, tiles: Ints) -> tuple[Ints, npt.NDArray[np.bool]]:
    """Elements of the tiles, shape (tiles, tile), 0 where the tile is filled up, and where not."""
    within = tiles % spec.token_tiles * spec.tile
    columns = within[:, None] + np.arange(spec.tile)
    at = (tiles // spec.token_tiles * spec.hidden)[:, None] + columns
    inside = (columns < spec.hidden) & (at < nelem)
    return np.where(inside, at, 0), inside


def _encode_tiles(spec: Tahquant, words: Words, most: Floats) -> tuple[Words, Words, Bytes]:
    """Codes, scale words and pivots of tiles, given as float32 bits, with codes up to `most`."""
    magnitudes = words & np.uint32(0x7FFFFFFF)
    lost = magnitudes.max(axis=1) >= TOO_LARGE
    x = np.where(lost[:, None], np.uint32(0), words).view(np.float32)
    pivots = np.zeros(lost.size, np.uint8)
    if spec.forward:
        rows, at = np.arange(lost.size), magnitudes.argmax(axis=1)
        top = np.abs(x[rows, at])
        others = np.abs(x)
        others[rows, at] = 0
        spread = (top > 0) & (top >= 2 * others.max(axis=1))
        pivots[spread] = PIVOT + at[spread]
        x[spread] = _rotated(_swapped(x[spread], at[spread]))
    low = x.min(axis=1) + np.float32(0)
    with np.errstate(over="ignore"):
        least = low.astype(np.float16)
        least[np.isinf(least)], lost = 0, lost | np.isinf(least)
        m = least.astype(np.float32)
        span = x.max(axis=1) - m
        step = (np.where(span > 0, span, np.float32(0)) / most).astype(np.float16)
        step[np.isinf(step)], lost = 0, lost | np.isinf(step)
    s = step.astype(np.float32)
    r = np.where(s > 0, np.float32(1) / np.where(s > 0, s, np.float32(1)), np.float32(0))
    v = np.clip((x - m[:, None]) * r[:, None], np.float32(0), most[:, None])
    codes = (v + np.float32(ANCHOR)).view(np.uint32) & np.uint32(0xFF)
    codes[lost], pivots[lost] = 0, 0
    both = least.view(np.uint16) | step.view(np.uint16).astype(np.uint32) << np.uint32(16)
    return codes, np.where(lost, np.uint32(NAN_WORD), both), pivots


def _decode_tiles(words: Words, pivots: Bytes | None, codes: Words) -> Floats:
    """Values of tiles, those of lost ones without meaning."""
    words = np.where(((words & 0x7C00) == 0x7C00) | (words >> 16 >= 0x7C00), 0, words)
    halves = words.astype("<u4").view("<f2").reshape(-1, 2).astype(np.float32)
    y = halves[:, :1] + codes.astype(np.float32) * halves[:, 1:]
    if pivots is not None:
        spread = pivots != 0
        y[spread] = _swapped(_rotated(y[spread]), pivots[spread] & 63)
    return y


def _rotated(x: Floats) -> Floats:
    """The transform of each row."""
    rotate(x)
    return x * np.float32(0.125)


def _swapped(x: Floats, at: npt.NDArray[Any]) -> Floats:
    """Rows whose first value and that at `at` traded places."""
    rows, swapped = np.arange(at.size), x.copy()
    swapped[rows, 0], swapped[rows, at] = x[rows, at], x[rows, 0]
    return swapped


def _pack(codes: Words, plane: int) -> Bytes:
    """Bit `plane` of the codes of each row."""
    bits = codes >> np.uint32(plane) & np.uint32(1)
    return np.packbits(bits.astype(np.uint8), axis=1, bitorder="little")


def _unpack(words: Bytes) -> Words:
    """Inverse of `_pack`: codes that are 0 or 1."""
    return np.unpackbits(words, axis=1, bitorder="little").astype(np.uint32)
