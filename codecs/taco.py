"""taco: rescaled blocks, rotated by a Walsh-Hadamard transform, in 8 bits a value. specs/taco.md.

After TACO, sections 4.2 and 4.3 and algorithm 1: each block is brought to a common energy
(equations 6 and 7), rotated (equation 8), divided by its own largest magnitude and rounded to FP8
(equations 9 and 10). Float operations are single precision, each rounded to nearest, in the page's
order. This module holds layout, constants and the NumPy reference.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from ..formats.codec_ids import CODEC_IDS
from ..formats.dtypes import DType
from ..formats.header import align
from .common.base import Bits, Bytes, Chunk, ChunkDecoded, ChunkResult, CodecSpec, Key, Layout
from .common.hadamard import Floats, rotate
from .common.minifloat import WIDENED, narrow_clipped
from .common.params import choice, log2
from .common.philox import Words, key_numbers, random_words
from .common.sections import Array

FORMATS = ("e4m3", "e5m2", "int8")
TRANSFORMS = ("ash", "hadamard", "none")
SCALES = ("dual", "merged")
ROUNDINGS = ("nearest", "stochastic")
BLOCKS = (32, 64, 128, 256, 512)

#: Target energy, epsilon and limits of the rescaling factor alpha (equations 6 and 7).
TAU = 448.0
EPSILON = 1e-6
ALPHA_MIN, ALPHA_MAX = 1e-3, 1e3
#: alpha of "hadamard": sums of 512 values stay finite.
HADAMARD_ALPHA = 2.0**-9
#: Least magnitude that a block is scaled by: nothing on the way is subnormal.
FLOOR = 2.0**-60

#: Bits of the NaN that both scales of a lost block have, and of float32 limits of scales.
NAN_SCALE = 0x7FC00000


def _bits(value: float) -> int:
    return int(np.float32(value).view(np.uint32))


ALPHA_BITS = _bits(2.0**-10), _bits(2.0**10)
SCALE_BITS = _bits(2.0**-86), _bits(2.0**126)
MERGED_BITS = _bits(2.0**-96), _bits(2.0**126)

_BATCH_NELEM = 1 << 18


class Format(NamedTuple):
    """A code's largest value, and of floats the mantissa bits and the exponent bias."""

    largest: float
    mantissa: int
    bias: int

    @property
    def bad(self) -> int:
        """Least code without its sign that no encoder writes; of int8 only -128 is one."""
        return {3: 0x7F, 2: 0x7C, 0: 0x80}[self.mantissa]


FORMAT_OF = {"e4m3": Format(448.0, 3, 7), "e5m2": Format(57344.0, 2, 15), "int8": Format(127, 0, 0)}


def norm(spec: Taco) -> float:
    """1 / sqrt(block) as a float32, or 1 where nothing is rotated."""
    return float(np.float32(spec.block**-0.5)) if spec.transform != "none" else 1.0


@dataclass(frozen=True)
class Taco(CodecSpec):
    """taco: blocks rescaled to a common energy, rotated, and rounded to 8 bits with two scales.

    Lossy, made for activations and gradients of tensor parallelism. Takes float16, bfloat16 and
    float32.

    Size: 8 bits per element and 64 (``"dual"``) or 32 bits (``"merged"``) per block: 8.25 bits with
    the defaults.

    Source: TACO, sections 4.2 and 4.3, algorithm 1, equations 6 to 10.

    Args:
        format: Element type: ``"e4m3"``, ``"e5m2"`` or ``"int8"``.
        block: Elements of a block: 32, 64, 128, 256 or 512.
        transform: ``"ash"`` rescales each block and then rotates it by a Walsh-Hadamard transform.
            ``"hadamard"`` only rotates. ``"none"`` does neither.
        scales: ``"dual"`` stores both scales of the paper, ``"merged"`` their quotient, which
            decodes to the same values.
        rounding: ``"nearest"``, or ``"stochastic"``, which needs a ``key`` to encode.

    Raises:
        TypeError: If a parameter has a wrong type.
        ValueError: If a value is not in the list.
    """

    format: str = choice(0, FORMATS)
    block: int = choice(1, BLOCKS, default=256, number=log2)
    transform: str = choice(2, TRANSFORMS)
    scales: str = choice(3, SCALES)
    rounding: str = choice(4, ROUNDINGS)

    name: ClassVar[str] = "taco"
    id: ClassVar[int] = CODEC_IDS["taco"][0]
    lossless: ClassVar[bool] = False
    dtypes: ClassVar[tuple[str, ...]] = WIDENED
    #: The last block is whole.
    max_nelem: ClassVar[int] = (1 << 39) - 512

    def arrays(self, dtype: DType, nelem: int) -> tuple[Array, ...]:
        """Codes, and one or two float32 scales per block."""
        return (
            Array("payload", 8, self.payload_nbytes(nelem)),
            Array("scales", 8 * self.scale_nbytes, self.blocks(nelem)),
        )

    @property
    def draws(self) -> bool:
        """Whether encoding needs a key."""
        return self.rounding == "stochastic"

    @property
    def scale_nbytes(self) -> int:
        """Bytes of scales for a block."""
        return 8 if self.scales == "dual" else 4

    def blocks(self, nelem: int) -> int:
        """Blocks of a chunk of `nelem` elements."""
        return -(-nelem // self.block)

    def payload_nbytes(self, nelem: int) -> int:
        """Bytes of codes of a chunk; when blocks are rotated the last one is padded."""
        return nelem if self.transform == "none" else self.blocks(nelem) * self.block

    def layout(self, dtype: DType, nelem: int) -> Layout:
        """Of whole blocks, also where the codes of the last one are not stored."""
        payload, scales = super().layout(dtype, nelem).sections
        return Layout((replace(payload, nbytes=align(self.blocks(nelem) * self.block)), scales))

    @property
    def weighed_unit(self) -> int:  # type: ignore[override]
        """A block: its codes have eight bits."""
        return self.block


SPEC = Taco


def encode_chunk(
    spec: Taco,
    chunk: Chunk,
    bits: Bits,
    *,
    stats: npt.NDArray[Any] | None = None,
    key: Key | None = None,
    threads: int = 1,
) -> ChunkResult:
    """Encode the chunk's elements `bits` (1-D) into its static part."""
    numbers = key_numbers(key) if spec.rounding == "stochastic" else None
    f, size = FORMAT_OF[spec.format], spec.block
    used = spec.payload_nbytes(bits.size)
    codes, scales = static_views(spec, chunk)
    batch = _BATCH_NELEM // size
    for first in range(0, scales.shape[0], batch):
        at = first * size
        x, lost = _blocks(bits[at : at + batch * size], chunk.dtype, size)
        alpha = _alpha(spec, x)
        t = x * alpha[:, None]
        if spec.transform != "none":
            rotate(t)
        k = np.float32(norm(spec))
        z = np.maximum(np.abs(t).max(axis=1) * k, np.float32(FLOOR))
        s = z / np.float32(f.largest)
        v = t * (k / s)[:, None]
        v = np.clip(v, np.float32(-f.largest), np.float32(f.largest)).reshape(-1)
        words = None
        if numbers is not None:
            start = chunk.number * chunk.sections[0].nbytes + at
            words = random_words(numbers, start, v.size)
        codes[at : min(at + v.size, used)] = round_to_code(v, f, words)[: used - at]
        here = scales[first : first + batch]
        if spec.scales == "dual":
            here[:, 0], here[:, 1] = alpha.view(np.uint32), s.view(np.uint32)
        else:
            here[:, 0] = (s / alpha).view(np.uint32)
        here[lost] = NAN_SCALE
    return ChunkResult(0)


def decode_chunk(
    spec: Taco, chunk: Chunk, out: Bits, start: int = 0, *, threads: int = 1
) -> ChunkDecoded:
    """Decode elements `start` to `start + out.size` of the chunk into `out` (1-D).

    Only the blocks that hold those elements are looked at.
    """
    f, size = FORMAT_OF[spec.format], spec.block
    codes, scales = static_views(spec, chunk)
    used, stop = spec.payload_nbytes(chunk.nelem), start + out.size
    batch = _BATCH_NELEM // size
    problem = None
    for first in range(start // size, -(-stop // size), batch):
        last = min(first + batch, -(-stop // size))
        here = codes[first * size : min(last * size, used)]
        padded = np.zeros((last - first, size), np.uint8)
        padded.reshape(-1)[: here.size] = here
        merged, lost, wrong = _scales(spec, scales[first:last])
        if wrong or bad_codes(padded, f) or padded[lost].any():
            problem = f"a scale or a code of blocks {first}..{last - 1}"
        w = values_of(spec.format)[padded]
        if spec.transform != "none":
            rotate(w)
        with np.errstate(over="ignore"):
            w *= (merged * np.float32(norm(spec)))[:, None]
        found = narrow_clipped(w, chunk.dtype)
        found[lost] = ((1 << chunk.dtype.exponent + 1) - 1) << chunk.dtype.mantissa - 1
        lo, hi = max(start - first * size, 0), min(stop - first * size, found.size)
        at = first * size + lo - start
        out[at : at + hi - lo] = found.reshape(-1)[lo:hi]
    return ChunkDecoded(problem)


def static_views(spec: Taco, chunk: Chunk) -> tuple[Bytes, Words]:
    """The chunk's codes (uint8) and the bits of its scales, shape (blocks, 1 or 2)."""
    scales = spec.static_arrays(chunk)[1].view("<u4")
    codes = chunk.static[: chunk.sections[0].nbytes]
    return codes, scales.reshape(spec.blocks(chunk.nelem), spec.scale_nbytes // 4)


def _blocks(bits: Bits, dtype: DType, size: int) -> tuple[Floats, npt.NDArray[np.bool]]:
    """Values of whole blocks, shape (blocks, size), and which hold a NaN or an infinity.

    The last block is filled up with zeros, and of a lost block all values are zero.
    """
    padded = np.zeros(-(-bits.size // size) * size, dtype.bits)
    padded[: bits.size] = bits
    padded = padded.reshape(-1, size)
    top = dtype.bits.type(((1 << dtype.exponent) - 1) << dtype.mantissa)
    lost = ((padded & top) == top).any(axis=1)
    padded[lost] = 0
    if dtype.name == "bfloat16":
        return (padded.astype(np.uint32) << 16).view(np.float32), lost
    return padded.view(dtype.numpy).astype(np.float32), lost


def _alpha(spec: Taco, x: Floats) -> Floats:
    """The rescaling factor of each block of `x`."""
    if spec.transform != "ash":
        chosen = HADAMARD_ALPHA if spec.transform == "hadamard" else 1.0
        return np.full(x.shape[0], chosen, np.float32)
    with np.errstate(over="ignore"):
        sums = x * x
        while sums.shape[1] > 1:
            sums = sums[:, 0::2] + sums[:, 1::2]
    sigma = np.sqrt(sums[:, 0] * np.float32(1 / spec.block) + np.float32(EPSILON))
    alpha = np.float32(TAU) / sigma
    limited: Floats = np.clip(alpha, np.float32(ALPHA_MIN), np.float32(ALPHA_MAX))
    return limited


def round_to_code(v: Floats, f: Format, words: Words | None) -> Bytes:
    """Codes of `v`, |v| at most `f.largest`: to nearest, ties to even, or by random words."""
    if f.mantissa == 0:
        if words is None:
            shifted: Bytes = (v + np.float32(1.5 * 2**23)).view(np.uint32).astype(np.uint8)
            return shifted
        steps = ((v + np.float32(128)) * np.float32(1 << 16)).astype(np.uint32)
        whole = (steps + (words >> np.uint32(16))) >> np.uint32(16)
        return (whole - np.uint32(128)).astype(np.uint8)
    shift = np.uint32(23 - f.mantissa)
    least = np.float32(2.0 ** (1 - f.bias))
    magnitude = np.abs(v)
    small = magnitude < least
    base = np.uint32((127 - f.bias) << f.mantissa)
    if words is None:
        m = magnitude.view(np.uint32)
        half = np.uint32((1 << int(shift) - 1) - 1)
        normal = ((m + half + (m >> shift & np.uint32(1))) >> shift) - base
        anchor = np.float32(2.0 ** (24 - f.bias - f.mantissa))
        code = np.where(
            small, (magnitude + anchor).view(np.uint32) - anchor.view(np.uint32), normal
        )
    else:
        m = np.where(small, magnitude + least, magnitude).view(np.uint32)
        code = (m + (words >> np.uint32(32 - int(shift)))) >> shift
        code -= np.where(small, base + np.uint32(1 << f.mantissa), base)
    signed: Bytes = (code | v.view(np.uint32) >> np.uint32(24) & np.uint32(0x80)).astype(np.uint8)
    return signed


@functools.cache
def values_of(name: str) -> Floats:
    """The value of each of the 256 codes of a format; 0 where a code has none."""
    f = FORMAT_OF[name]
    codes = np.arange(256)
    if f.mantissa == 0:
        return codes.astype(np.uint8).view(np.int8).astype(np.float32)
    exponents, mantissas = (codes & 127) >> f.mantissa, codes & (1 << f.mantissa) - 1
    hidden = (exponents > 0) << f.mantissa
    power = np.maximum(exponents, 1) - f.bias - f.mantissa
    values = np.ldexp((hidden + mantissas).astype(np.float32), power)
    values[(codes & 127) >= f.bad] = 0
    signed: Floats = np.where(codes < 128, values, -values).astype(np.float32)
    return signed


def bad_codes(codes: Bytes, f: Format) -> bool:
    """True if there is a NaN or an infinity, or of int8 a -128, among the codes."""
    if f.mantissa == 0:
        return bool((codes == f.bad).any())
    return bool(((codes & 127) >= f.bad).any())


def _scales(spec: Taco, words: Words) -> tuple[Floats, npt.NDArray[np.bool], bool]:
    """Merged scales, which blocks are lost, and whether a scale is none that an encoder writes."""
    lost = words[:, -1] == NAN_SCALE
    kept = np.where(lost[:, None], np.uint32(_bits(1.0)), words)
    merged = np.ascontiguousarray(kept[:, -1])
    wrong = False
    if spec.scales == "dual":
        wrong = bool((words[lost] != NAN_SCALE).any())
        alpha = np.ascontiguousarray(kept[:, 0])
        good = _within(alpha, ALPHA_BITS) & _within(merged, SCALE_BITS)
        wrong |= not good.all()
        alpha, merged = (np.where(good, a, np.uint32(_bits(1.0))) for a in (alpha, merged))
        with np.errstate(over="ignore"):
            merged = (merged.view(np.float32) / alpha.view(np.float32)).view(np.uint32)
    good = _within(merged, MERGED_BITS)
    merged = np.where(good, merged, np.uint32(_bits(1.0)))
    return merged.view(np.float32), lost, wrong or not good.all()


def _within(words: Words, limits: tuple[int, int]) -> npt.NDArray[np.bool]:
    inside: npt.NDArray[np.bool] = (words >= limits[0]) & (words <= limits[1])
    return inside
