"""dynamiq: a width for every super-group, under a budget of bits an element. specs/dynamiq.md.

After DynamiQ (sections 3.1 to 3.3): widths follow from the energies of super-groups, which ranks
may sum before; groups have scales of 8 bits under one of their super-group; codes stand for values
of a non-uniform grid and are rounded at random, so that the errors of ranks cancel. Widths travel
in the buffer. Float operations are single precision, each rounded to nearest, in the page's order.
This module holds layout, constants and the NumPy reference.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from ..formats.codec_ids import CODEC_IDS
from ..formats.dtypes import DType
from ..formats.header import align
from .common.base import (
    Bits,
    Bytes,
    Chunk,
    ChunkDecoded,
    ChunkResult,
    CodecSpec,
    Key,
    ReduceOp,
    check_vector,
)
from .common.hadamard import Floats
from .common.minifloat import INFINITY, NAN, WIDENED, largest_number, narrow, widen
from .common.params import choice, fraction, log2
from .common.philox import KeyNumbers, key_numbers, number, random_words
from .common.sections import Array

Ints = npt.NDArray[np.int64]
Halves = npt.NDArray[np.uint16]
Flags = npt.NDArray[np.bool]

GROUPS = (8, 16, 32, 64)
SUPER_GROUPS = (128, 256, 512, 1024)
#: In the order of their numbers on the page.
WIDTHS = ("any", "pow2", "fixed")
GRIDS = ("balanced", "signed", "uniform")
SCALES = ("up", "stochastic", "wide")
ROUNDINGS = ("correlated", "stochastic", "nearest")
MIN_WIDTH, MAX_WIDTH = 2, 8
#: A budget counts in steps of 1 / BUDGET_STEPS bits.
BUDGET_STEPS = 16

#: Of each width the quotient of neighbouring steps of grids that are not uniform.
GROWTH = {2: 1.0, 3: 1.5, 4: 1.1875, 5: 1.078125, 6: 1.03515625, 7: 1.015625, 8: 1.0078125}
#: (width, what it costs, what it gains a unit of energy) of the steps up from 2 bits; the gains
#: are by how much less error the balanced grid was measured to have.
ANY_STEPS = ((3, 1, 0.4), (4, 1, 0.045), (5, 1, 0.01), (6, 1, 0.0024), (7, 1, 6e-4), (8, 1, 1.5e-4))
#: The paper's: T24 = 17/512 T48.
POW2_STEPS = ((4, 2, 15 / 2**9), (8, 4, 255 / 2**18))

#: Super-groups whose largest magnitude is below this become zeros: nothing that counts is
#: subnormal. The same of means; and of energies, which then count as 0.
FLOOR = 2.0**-100
#: Super-groups with a magnitude from here on keep their mean, whose sum might overflow.
CENTER_LIMIT = 2.0**110
#: The word of a lost super-group, and the largest finite one.
NAN_SCALE = 0x7FC0
MAX_SCALE_WORD = 0x7F7F
FLOOR_WORD = (127 - 100) << 7
MAX_WORLD = 1 << 16
#: Streams of random words: a rank's own for codes, that of all ranks, a rank's own for scales.
CODE_STREAM, SHARED_STREAM, SCALE_STREAM = 0, 1, 2
INDEX_PROBLEM = "the widths in the index"
PAYLOAD_PROBLEM = "a scale or a mean, or bytes behind the last code"

#: The GPU backend finds widths by blocks of super-groups, digit by digit of 31 bits, the first the
#: largest; of a chunk it has so many numbers: a sum for each value of a digit, and a few. It leaves
#: its tables, WORK_HEAD numbers of a chunk, and one of each of its super-groups.
BLOCK = 1 << 11
DIGITS = (7, 8, 8, 8)
STATE = sum(1 << bits for bits in DIGITS) + 16
WORK_HEAD = 8
TABLES = 1072

_BATCH_NELEM = 1 << 18
#: Energies that differ by less have widths that differ by one step at most: the least quotient of
#: neighbouring gains.
FLAT = 4


@dataclass(frozen=True)
class Dynamiq(CodecSpec):
    """dynamiq: a width for every super-group of elements, under a budget of bits per element.

    Lossy, made for sums over several hops. Takes float16, bfloat16 and float32. ``stats`` are the
    energies of the tensor's super-groups, float32, shape ``(super_groups,)``, which ranks may sum;
    the widths follow from them. Energies below 2^-100 count as 0, and those above the largest
    float32 as that: scale a tensor whose values are all below about 1e-16 or reach 1e18.
    ``decode_add_encode`` in one pass and without ``stats`` keeps the widths of its source.

    Size: ``bits`` bits per element, scales and widths included.

    Source: DynamiQ, sections 3.1 to 3.3 and appendix A. The widths "any" and the grid "balanced"
    are additions.

    Args:
        bits: Budget of bits per element, 3 to 8 in steps of 1/16.
        group: Elements that share a scale: 8, 16, 32 or 64.
        super_group: Elements that share a width: 128, 256, 512 or 1024.
        widths: ``"any"``: integers from 2 to 8. ``"pow2"``: 2, 4 or 8, by the thresholds of the
            paper. ``"fixed"``: all the same.
        grid: Values of the codes. ``"balanced"`` has no zero and ``"signed"``, of the paper, has
            two; both have finer steps near zero. ``"uniform"`` is signed with equal steps.
        scales: Scales of groups: 8 bits, rounded ``"up"`` or ``"stochastic"``, under a scale of the
            super-group; or ``"wide"``, 16 bits without one.
        rounding: ``"correlated"`` with the other ranks that the ``key`` counts (section 3.3),
            ``"stochastic"``, or ``"nearest"``. To encode a ``key`` is needed, except with
            ``"nearest"`` and scales that are not ``"stochastic"``.
        center: Whether super-groups are coded about their means.

    Raises:
        TypeError: If a parameter has a wrong type.
        ValueError: If a value is not allowed, or ``bits`` is too small for the scales.
    """

    bits: float = fraction(
        0, 1, per=BUDGET_STEPS, least=3 * BUDGET_STEPS, most=8 * BUDGET_STEPS, default=5
    )
    group: int = choice(1, GROUPS, default=16, number=log2)
    super_group: int = choice(2, SUPER_GROUPS, default=256, number=log2)
    widths: str = choice(3, WIDTHS)
    grid: str = choice(4, GRIDS)
    scales: str = choice(5, SCALES)
    rounding: str = choice(6, ROUNDINGS)
    center: bool = choice(7, (True, False), default=False, number=int)

    name: ClassVar[str] = "dynamiq"
    id: ClassVar[int] = CODEC_IDS["dynamiq"][0]
    lossless: ClassVar[bool] = False
    reduce_op: ClassVar[ReduceOp | None] = "sum"
    sums_keep_stats: ClassVar[bool] = True
    dtypes: ClassVar[tuple[str, ...]] = WIDENED
    measures_in_encode: ClassVar[bool] = True
    adds_float32: ClassVar[bool] = True
    max_world: ClassVar[int | None] = MAX_WORLD
    #: The last super-group is whole.
    max_nelem: ClassVar[int] = (1 << 39) - 1024

    def __post_init__(self) -> None:
        """Raise TypeError or ValueError for an invalid parameter or a budget that cannot be met."""
        super().__post_init__()
        if self.units(self.super_group) < MIN_WIDTH:
            least = MIN_WIDTH + self._side_bits / self.super_group
            raise ValueError(
                f"bits is {self.bits}; with groups of {self.group} and super-groups of "
                f"{self.super_group} the least is {least}"
            )

    def arrays(self, dtype: DType, nelem: int) -> tuple[Array, ...]:
        """Planes; scale words, mean words and scale bytes; widths. Of the planes the most."""
        n, wide = self.super_groups(nelem), self.scales == "wide"
        return (
            Array("payload", self.super_group, self.units(nelem)),
            Array("scales", 16, self.groups * n if wide else n),
            Array("scales", 16 * self.center, n),
            Array("scales", 0 if wide else 8, self.groups * n),
            Array("index", 4, n),
        )

    @property
    def groups(self) -> int:
        """Groups of a super-group."""
        return self.super_group // self.group

    @property
    def _side_bits(self) -> int:
        """Bits of a super-group without its codes."""
        scales = 16 * self.groups if self.scales == "wide" else 8 * self.groups + 16
        return scales + 4 + 16 * self.center

    @property
    def draws(self) -> bool:
        """Whether encoding needs a key."""
        return self.rounding != "nearest" or self.scales == "stochastic"

    def super_groups(self, nelem: int) -> int:
        """Super-groups of a chunk of `nelem` elements."""
        return -(-nelem // self.super_group)

    def units(self, nelem: int) -> int:
        """The most that the widths of a chunk's super-groups may sum up to."""
        n = self.super_groups(nelem)
        return min(n * self.budget // (BUDGET_STEPS * self.super_group), MAX_WIDTH * n)

    @property
    def budget(self) -> int:
        """Bits that the codes of a super-group may take, in 1 / BUDGET_STEPS."""
        return int(self.bits * BUDGET_STEPS) * self.super_group - BUDGET_STEPS * self._side_bits

    def scratch_nbytes(self, dtype: DType, nelem: int, chunks: int) -> int:
        """Of the GPU backend: see `workspace`."""
        return sum(workspace(self, nelem, chunks))

    def measure(self, bits: Bits, dtype: DType) -> Floats | None:
        """Energies of the tensor's super-groups, float32, shape (super-groups,).

        The sum of squares, about the mean with `center`. What ranks measured may be added up.
        """
        if dtype.name not in self.dtypes:
            return None
        energies = np.empty(self.super_groups(bits.size), np.float32)
        batch = _BATCH_NELEM // self.super_group
        for first in range(0, energies.size, batch):
            at = first * self.super_group
            x, _, _ = _load(self, bits[at : at + batch * self.super_group], dtype)
            with np.errstate(over="ignore"):
                sums = _tree_sum(x * x)
            energies[first : first + batch] = np.minimum(sums, np.finfo(np.float32).max)
        return energies

    def check_stats(self, stats: npt.NDArray[Any], dtype: DType) -> None:
        """Stats are energies: float32, 1-D, none of them negative or not finite."""
        check_vector(stats, np.float32, "one of each super-group")
        if not (np.isfinite(stats) & (stats >= 0)).all():
            raise ValueError("stats are negative or not finite; allowed: energies")

    @property
    def stats_nelem(self) -> int:
        """Those of a super-group."""
        return self.super_group

    def remark(self, stats: npt.NDArray[Any]) -> str | None:
        """Says so if widths gain nothing, as energies are too much alike, or too small to count."""
        if self.widths == "fixed" or not stats.size:
            return None
        sampled = stats[:: -(-stats.size // self.remark_nelem)]
        if sampled.max() < FLOOR:
            return "energies are all below 2^-100: widths are the least"
        low, high = np.quantile(sampled, (0.05, 0.95))
        if high >= FLAT * low:
            return None
        pow2 = "widths 'any' have less error"
        what = pow2 if self.widths == "pow2" else "their widths are equal or neighbours"
        return f"energies are flat, nine of ten within a factor of {FLAT}: {what}"


SPEC = Dynamiq


def workspace(spec: Dynamiq, nelem: int, chunks: int, buffers: int = 1) -> tuple[int, ...]:
    """Bytes of the parts of the GPU backend's workspace, for `chunks` chunks of `nelem` elements.

    A sum per chunk; the tensor's energies; sums by digit of chunks; 8 numbers of each block; what
    is left, of chunks that are encoded, and of those of the `buffers` that are decoded.
    """
    groups = spec.super_groups(nelem)
    blocks = max(1, -(-groups // BLOCK))
    energies, counts = 4 * groups * chunks, 8 * 8 * blocks * chunks * (1 + buffers)
    work = 8 * (TABLES + (1 + buffers) * (WORK_HEAD + groups + groups % 2) * chunks)
    parts = 8 * chunks, energies, 8 * STATE * chunks, counts, work
    return tuple(map(align, parts))


def encode_chunk(
    spec: Dynamiq,
    chunk: Chunk,
    bits: Bits,
    *,
    stats: npt.NDArray[Any] | None = None,
    key: Key | None = None,
    threads: int = 1,
    kept: Chunk | None = None,
) -> ChunkResult:
    """Encode the chunk's elements `bits` (1-D) into its static part.

    Widths are those of `kept`, whose index is right, or else chosen.
    """
    widths = None if kept is None else widths_of(spec, kept)
    if widths is None:
        widths = choose_widths(spec, chunk_energies(spec, chunk, stats), spec.units(chunk.nelem))
    _encode(spec, chunk, bits, widths, rounding_of(spec, key))
    return ChunkResult(0)


def decode_chunk(
    spec: Dynamiq, chunk: Chunk, out: Bits, start: int = 0, *, threads: int = 1
) -> ChunkDecoded:
    """Decode elements `start` to `start + out.size` of the chunk into `out` (1-D).

    Only the index and the super-groups that hold those elements are looked at; with the last
    element also what is behind the codes.
    """
    widths = widths_of(spec, chunk)
    if widths is None:
        return ChunkDecoded(INDEX_PROBLEM)
    v, size, stop = static_views(spec, chunk), spec.super_group, start + out.size
    wrong = stop == chunk.nelem and bool(v.planes[widths.sum() :].any())
    rows = first_rows(widths)
    batch = _BATCH_NELEM // size
    for first in range(start // size, -(-stop // size), batch):
        here = slice(first, min(first + batch, -(-stop // size)))
        wrong |= bad_words(spec, v, here)
        y = np.empty((here.stop - first, size), np.float32)
        for w in np.unique(widths[here]).tolist():
            at = np.flatnonzero(widths[here] == w)
            codes = _gather(v.planes, rows[first + at], w)
            y[at] = _decode_codes(spec, v, first + at, codes, w)
        limit = np.float32(largest_number(chunk.dtype))
        limited = np.clip(y, -limit, limit).view(np.uint32)
        lost = (v.words[here] == NAN_SCALE).any(axis=1)
        limited[lost] = NAN
        found = narrow(limited, chunk.dtype).reshape(-1)
        at_elem = first * size
        lo, hi = max(start - at_elem, 0), min(stop - at_elem, found.size)
        out[at_elem + lo - start : at_elem + hi - start] = found[lo:hi]
    return ChunkDecoded(PAYLOAD_PROBLEM if wrong else None)


class Rounding(NamedTuple):
    """How codes are rounded: to nearest, or at random in one of `strata` equal parts of [0, 1).

    Ranks 2 i and 2 i + 1, by `ring_rank`, are in parts opposite to each other.
    """

    numbers: KeyNumbers | None
    random: bool = False
    strata: int = 1
    ring_rank: int = 0


def rounding_of(spec: Dynamiq, key: Key | None) -> Rounding:
    """What `key` means to this codec. ValueError if it is needed and missing, or out of range."""
    if not spec.draws:
        return Rounding(None)
    numbers = key_numbers(key)
    how, strata, ring_rank = shares_of(spec, key)
    return Rounding(numbers, how != ROUNDINGS.index("nearest"), strata, ring_rank)


def shares_of(spec: Dynamiq, key: Key | None) -> tuple[int, int, int]:
    """(number of the rounding, `strata`, `ring_rank`) of a key whose seed and step are not read.

    Raises TypeError or ValueError for an invalid world. A key that is needed and missing passes.
    """
    how = ROUNDINGS.index(spec.rounding)
    if not spec.draws or key is None:
        return how, 1, 0
    rank, world = number("rank", key.rank), number("world", key.world, MAX_WORLD)
    if spec.rounding != "correlated" or world == 1:
        return how if spec.rounding == "nearest" else ROUNDINGS.index("stochastic"), 1, 0
    return how, world + world % 2, rank % world


class Views(NamedTuple):
    """A chunk's static part: of N super-groups with K groups each."""

    #: Rows of super_group / 8 bytes, as many as there are units.
    planes: Bytes
    #: Scales that are words, shape (N, 1), or with wide ones (N, K).
    words: Halves
    #: Words of the means, shape (N,), or (0,).
    means: Halves
    #: Scales of groups, shape (N, K), or with wide ones (N, 0).
    fractions: Bytes
    #: The widths, two in a byte.
    nibbles: Bytes


def static_views(spec: Dynamiq, chunk: Chunk) -> Views:
    """See `Views`."""
    n, wide = spec.super_groups(chunk.nelem), spec.scales == "wide"
    planes, words, means, fractions, nibbles = spec.static_arrays(chunk)
    return Views(
        planes.reshape(-1, spec.super_group // 8),
        words.view("<u2").reshape(n, spec.groups if wide else 1),
        means.view("<u2"),
        fractions.reshape(n, 0 if wide else spec.groups),
        nibbles,
    )


def chunk_energies(spec: Dynamiq, chunk: Chunk, stats: npt.NDArray[Any] | None) -> Floats:
    """Energies of a chunk's super-groups, of those of the tensor's.

    A super-group that lies on two of the tensor's takes the larger. ValueError for a wrong number.
    """
    size, last = spec.super_group, spec.super_groups(math.prod(chunk.shape)) - 1
    if stats is None or stats.shape != (last + 1,):
        found = None if stats is None else stats.shape
        raise ValueError(f"stats have shape {found}; allowed: ({last + 1},) for {chunk.shape}")
    at = chunk.first // size + np.arange(spec.super_groups(chunk.nelem))
    energies: Floats = stats[at]
    if chunk.first % size:
        energies = np.maximum(energies, stats[np.minimum(at + 1, last)])
    return np.where(energies < np.float32(FLOOR), np.float32(0), energies)


def choose_widths(spec: Dynamiq, energies: Floats, units: int) -> Ints:
    """Widths of super-groups that sum up to at most `units`, by their energies.

    Paper section 3.2: the steps up that gain most for a bit are taken as long as they fit.
    """
    n = energies.size
    if spec.widths == "fixed":
        return np.full(n, units // max(n, 1), np.int64)
    steps = ANY_STEPS if spec.widths == "any" else POW2_STEPS
    found = np.full(n, MIN_WIDTH, np.int64)
    left = units - MIN_WIDTH * n
    gains = [energies * np.float32(gain) for _, _, gain in steps]
    costs = [cost for _, cost, _ in steps]

    def spent(bound: Any) -> int:
        pairs = zip(gains, costs, strict=True)
        return sum(cost * int(np.count_nonzero(g > bound)) for g, cost in pairs)

    # The least bound above which all steps fit; positive floats have the order of their bits.
    low, high = -1, INFINITY
    while high - low > 1:
        middle = (low + high) // 2
        fits = spent(np.uint32(middle).view(np.float32)) <= left
        low, high = (low, middle) if fits else (middle, high)
    bound = np.uint32(high).view(np.float32)
    before, extra, cost_of = MIN_WIDTH, np.zeros(n, np.int64), np.zeros(n, np.int64)
    for (width, cost, _), gain in zip(steps, gains, strict=True):
        found[gain > bound] = width
        if bound > 0:
            extra[gain == bound], cost_of[gain == bound] = width - before, cost
        before = width
    left -= spent(bound)
    extra[np.cumsum(cost_of) > left] = 0
    return found + extra


def widths_of(spec: Dynamiq, chunk: Chunk) -> Ints | None:
    """Widths in a chunk's index, or None if no encoder chooses such ones."""
    nibbles, n = static_views(spec, chunk).nibbles, spec.super_groups(chunk.nelem)
    found = np.stack([nibbles & 15, nibbles >> 4], axis=1).reshape(-1).astype(np.int64)
    widths = found[:n]
    good = not found[n:].any() and int(widths.sum()) <= spec.units(chunk.nelem)
    if spec.widths == "fixed":
        good = good and bool((widths == spec.units(chunk.nelem) // max(n, 1)).all())
    elif spec.widths == "pow2":
        good = good and bool(np.isin(widths, (2, 4, 8)).all())
    else:
        good = good and bool(((widths >= MIN_WIDTH) & (widths <= MAX_WIDTH)).all())
    return widths if good else None


def store_widths(v: Views, widths: Ints) -> None:
    """Write the index, and zeros behind the planes."""
    padded = np.zeros(-(-widths.size // 2) * 2, np.uint8)
    padded[: widths.size] = widths
    v.nibbles[:] = padded[0::2] | padded[1::2] << 4
    v.planes[widths.sum() :] = 0


def first_rows(widths: Ints) -> Ints:
    """Row of the payload where each super-group starts: they are stored in the order of widths."""
    order = np.argsort(widths, kind="stable")
    rows = np.empty(widths.size, np.int64)
    rows[order] = np.cumsum(widths[order]) - widths[order]
    return rows


def bad_words(spec: Dynamiq, v: Views, here: slice) -> bool:
    """True if super-groups have a scale or a mean that no encoder writes."""
    words = v.words[here].astype(np.int64)
    finite = (words == 0) | ((words >= FLOOR_WORD) & (words <= MAX_SCALE_WORD))
    lost = (words == NAN_SCALE).all(axis=1)
    means = v.means[here] if spec.center else v.means
    return not (finite.all(axis=1) | lost).all() or bool(((means & 0x7F80) == 0x7F80).any())


@functools.cache
def grid_of(grid: str, width: int) -> tuple[Floats, Floats]:
    """Values of all codes, from -1 to 1, and of each the inverse of the step up from it, or 0."""
    growth = 1.0 if grid == "uniform" else GROWTH[width]
    sums = [0.0]
    for _ in range((1 << width - 1) - 1):
        sums.append(sums[-1] * growth + 1.0)
    shifted = np.array(sums) + (0.5 if grid == "balanced" else 0.0)
    half = (shifted / shifted[-1]).astype(np.float32)
    values = np.concatenate([-half[::-1], half])
    inverse = np.append(_inverse(np.diff(values)), np.float32(0))
    values.flags.writeable = inverse.flags.writeable = False
    return values, inverse


def _tree_sum(x: Floats) -> Floats:
    """Sums of the rows of `x`, shape (rows, 2^k), in the page's order."""
    while x.shape[1] > 1:
        half = x.shape[1] // 2
        x = x[:, :half] + x[:, half:]
    return x[:, 0]


def _load(spec: Dynamiq, bits: Bits, dtype: DType) -> tuple[Floats, Flags, Halves]:
    """Values of super-groups about their means, which are lost, and the means' words.

    The last super-group is filled up with zeros; of a lost one all is zero.
    """
    size = spec.super_group
    padded = np.zeros(-(-bits.size // size) * size, np.float32)
    padded.view(np.uint32)[: bits.size] = widen(bits, dtype)
    x: Floats = padded.reshape(-1, size)
    magnitudes = x.view(np.uint32) & np.uint32(0x7FFFFFFF)
    lost: Flags = magnitudes.max(axis=1) >= INFINITY
    x[lost] = 0
    means = np.zeros(lost.size, np.uint16)
    if spec.center and bits.size:
        counts = np.full(lost.size, size, np.float32)
        counts[-1] = bits.size - size * (lost.size - 1)
        with np.errstate(over="ignore", invalid="ignore"):
            mean = _tree_sum(x) / counts
        bad = (np.abs(x).max(axis=1) >= CENTER_LIMIT) | (np.abs(mean) < np.float32(FLOOR))
        mean[bad] = 0
        word = mean.view(np.uint32)
        means = ((word + np.uint32(0x7FFF) + (word >> 16 & 1)) >> 16).astype(np.uint16)
        x = x - _of_words(means)[:, None]
        x.reshape(-1)[bits.size :] = 0
    return x, lost, means


def _of_words(words: Halves) -> Floats:
    """Values of bfloat16 bits."""
    return (words.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _words_up(x: Floats) -> Halves:
    """Bits of the least bfloat16 that is not below `x`, at most the largest finite one."""
    words = (x.view(np.uint32) + np.uint32(0xFFFF)) >> np.uint32(16)
    words = np.where(x < np.float32(FLOOR), np.uint32(0), words)
    limited: Halves = np.minimum(words, MAX_SCALE_WORD).astype(np.uint16)
    return limited


def _encode(
    spec: Dynamiq,
    chunk: Chunk,
    bits: Bits,
    widths: Ints,
    rounding: Rounding,
) -> None:
    v, size = static_views(spec, chunk), spec.super_group
    store_widths(v, widths)
    rows = first_rows(widths)
    batch = _BATCH_NELEM // size
    for first in range(0, widths.size, batch):
        here = slice(first, min(first + batch, widths.size))
        at = first * size
        x, lost, means = _load(spec, bits[at : at + batch * size], chunk.dtype)
        inverse = _store_scales(spec, v, here, x, rounding, chunk.first // spec.group)
        v.words[here][lost] = NAN_SCALE
        if spec.center:
            v.means[here] = means
        scaled = (x.reshape(-1, spec.group) * inverse.reshape(-1, 1)).reshape(x.shape)
        scaled = np.clip(scaled, np.float32(-1), np.float32(1))
        empty = np.repeat(inverse.reshape(len(x), -1) == 0, spec.group, axis=1)
        place, drawn = _limits(rounding, chunk.first + at, chunk.first // size + first, x.shape)
        for w in np.unique(widths[here]).tolist():
            chosen = np.flatnonzero(widths[here] == w)
            values, steps = grid_of(spec.grid, w)
            below = np.searchsorted(values, scaled[chosen], side="right") - 1
            part = (scaled[chosen] - values[below]) * steps[below]
            up = part * np.float32(rounding.strata) - place[chosen] > drawn[chosen]
            codes = np.where(empty[chosen], 0, below + up).astype(np.uint8)
            _scatter(v.planes, rows[first + chosen], codes, w)


def _store_scales(
    spec: Dynamiq, v: Views, here: slice, x: Floats, rounding: Rounding, first_group: int
) -> Floats:
    """Store scales of super-groups; the inverses that their values are multiplied by, by group."""
    largest = np.abs(x).reshape(-1, spec.groups, spec.group).max(axis=2)
    if spec.scales == "wide":
        words = _words_up(largest)
        v.words[here] = words
        return _inverse(_of_words(words))
    words = _words_up(largest.max(axis=1))
    v.words[here, 0] = words
    step = _of_words(words)[:, None] / np.float32(255)
    quotient = largest * _inverse(step)
    if spec.scales == "up":
        fractions = np.minimum(np.ceil(quotient), np.float32(255))
        scale = fractions * step
    else:
        assert rounding.numbers is not None
        at = first_group + here.start * spec.groups
        drawn = random_words(rounding.numbers, at, largest.size, SCALE_STREAM).reshape(
            largest.shape
        )
        steps = (np.minimum(quotient, np.float32(255)) * np.float32(1 << 16)).astype(np.uint32)
        fractions = ((steps + (drawn >> np.uint32(16))) >> np.uint32(16)).astype(np.float32)
        scale = np.where((step > 0) & (largest >= np.float32(FLOOR)), largest, np.float32(0))
    v.fractions[here] = fractions.astype(np.uint8)
    return _inverse(scale)


def _inverse(x: Floats) -> Floats:
    """1 / x, or 0 of 0."""
    return np.divide(np.float32(1), x, out=np.zeros_like(x), where=x > 0)


def _limits(
    rounding: Rounding, first: int, first_group: int, shape: tuple[int, int]
) -> tuple[Floats, Floats]:
    """Of each element the number of its stratum, and what is drawn in it.

    `first` and `first_group` are the numbers of the first element and of its super-group.
    """
    n = shape[0] * shape[1]
    if not rounding.random:
        return np.zeros(shape, np.float32), np.full(shape, 0.5, np.float32)
    assert rounding.numbers is not None
    own = _halves(rounding.numbers, first, n, CODE_STREAM)
    drawn = (own.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-16)
    place = np.zeros(n // 8, np.int64)
    if rounding.strata > 1:
        numbers, at = rounding.numbers._replace(rank=0), first_group * shape[1] // 8
        shared = _halves(numbers, at, n // 8, SHARED_STREAM)
        # From columns of 8 halves to rows.
        shared = shared.reshape(shape[0], -1, 8).transpose(0, 2, 1).reshape(-1)
        shift = shared.astype(np.int64) * rounding.strata >> 16
        place = (rounding.ring_rank // 2 + (shift >> 1)) % (rounding.strata // 2)
        other = (shift ^ rounding.ring_rank) & 1 == 1
        place[other] = rounding.strata - 1 - place[other]
    return np.repeat(place.astype(np.float32), 8).reshape(shape), drawn.reshape(shape)


def _halves(numbers: KeyNumbers, first: int, n: int, stream: int) -> Halves:
    """Halves number `first` to `first + n` of a stream's words, the low one of each first."""
    words = random_words(numbers, first // 2, n // 2 + 1, stream)
    halves: Halves = words.astype("<u4").view("<u2")[first % 2 :][:n]
    return halves


def _decode_codes(spec: Dynamiq, v: Views, at: Ints, codes: Bytes, width: int) -> Floats:
    """Values of codes of super-groups `at`, shape (super-groups, size)."""
    words = np.where(v.words[at] <= MAX_SCALE_WORD, v.words[at], np.uint16(0))
    scale = _of_words(words)
    if spec.scales != "wide":
        scale = v.fractions[at].astype(np.float32) * (scale / np.float32(255))
    values = grid_of(spec.grid, width)[0][codes]
    y: Floats = (values.reshape(-1, spec.group) * scale.reshape(-1, 1)).reshape(codes.shape)
    means = _of_words(v.means[at])[:, None] if spec.center else np.float32(0)
    with np.errstate(over="ignore", invalid="ignore"):
        return y + means


def _scatter(planes: Bytes, rows: Ints, codes: Bytes, width: int) -> None:
    """Store codes as planes, 8 rows of elements deep."""
    blocks = codes.reshape(rows.size, 8, -1)
    for p in range(width):
        bits = np.packbits(blocks >> p & 1, axis=1, bitorder="little")
        planes[rows + p] = bits[:, 0]


def _gather(planes: Bytes, rows: Ints, width: int) -> Bytes:
    """Inverse of `_scatter`."""
    codes = np.zeros((rows.size, 8, planes.shape[1]), np.uint8)
    for p in range(width):
        codes |= np.unpackbits(planes[rows + p][:, None], axis=1, bitorder="little") << p
    return codes.reshape(rows.size, -1)
