"""sdp4bit: groups of 8-bit or 4-bit integers with one scale, rotated if wanted. specs/sdp4bit.md.

After SDP4Bit: weight differences in 4 bits, gradients rotated by a 32-point Hadamard transform in 8
bits inside a node and, still rotated, in 4 bits between nodes. Float operations are single
precision, each rounded to nearest, in the page's order. This module holds layout, constants and
the NumPy reference.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from ..formats.codec_ids import CODEC_IDS
from ..formats.dtypes import DType
from .common.base import Bits, Bytes, Chunk, ChunkDecoded, ChunkResult, CodecSpec, Key
from .common.hadamard import Floats, rotate
from .common.minifloat import INFINITY, NAN, WIDENED, largest_number, narrow, widen
from .common.params import choice, log2
from .common.philox import Words, key_numbers, random_words
from .common.sections import Array

BITS = (8, 4)
GROUPS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
#: In the order of their numbers on the page: bit 0 is that of the encoder, bit 1 the decoder's.
ROTATE = ("none", "encode", "decode", "both")
ROUNDINGS = ("nearest", "stochastic")
#: Elements of a run, which are rotated together.
RUN = 32

#: Factors of a rotation's whole runs and short run, and of the short run on the way back.
RUN_FACTOR, SHORT_FACTOR, SHORT_BACK = 2.0**-5, 2.0**-3, 2.0**3
#: Groups of magnitudes below this become zeros: nothing that counts is subnormal.
FLOOR = 2.0**-100
#: The scale word of a lost group.
NAN_SCALE = NAN
#: Least and largest scale, as float32 bits.
SCALE_BITS = (127 - 107) << 23, (127 + 126) << 23

PROBLEM = "a scale or a code of a group"
_BATCH_NELEM = 1 << 18


@dataclass(frozen=True)
class Sdp4bit(CodecSpec):
    """sdp4bit: groups of 8-bit or 4-bit integers with one scale, rotated if requested.

    Lossy, made for weight differences (4 bits) and gradients of sharded training (8 bits within a
    node, 4 between nodes). Takes float16, bfloat16 and float32.

    Size: ``bits`` bits per element and 32 bits per group: 4.25 bits with the defaults.

    Source: SDP4Bit (Jia et al., NeurIPS 2024): quantization of weight differences, and two-level
    gradient quantization smoothed by a Hadamard transform.

    Args:
        bits: Bits of a code, 8 or 4.
        group: Elements that share a float32 scale: 32, 64, ... or 4096.
        rotate: ``"both"`` rotates runs of 32 elements by a Hadamard transform before encoding, and
            back after decoding; ``"none"`` does neither. With ``"encode"`` the decoded tensor is
            still rotated, and with ``"decode"`` the tensor to encode is already, so that sums can
            be made in between. These two refuse dtypes that are not coded.
        rounding: ``"nearest"``, or ``"stochastic"``, which needs a ``key`` to encode.

    Raises:
        TypeError: If a parameter has a wrong type.
        ValueError: If a value is not in the list, or ``rotate`` does not go with the dtype.
    """

    bits: int = choice(0, BITS, default=4, number=int)
    group: int = choice(1, GROUPS, default=128, number=log2)
    rotate: str = choice(2, ROTATE, default="both")
    rounding: str = choice(3, ROUNDINGS)

    name: ClassVar[str] = "sdp4bit"
    id: ClassVar[int] = CODEC_IDS["sdp4bit"][0]
    lossless: ClassVar[bool] = False
    dtypes: ClassVar[tuple[str, ...]] = WIDENED

    def arrays(self, dtype: DType, nelem: int) -> tuple[Array, ...]:
        """Packed codes, and a float32 scale per group."""
        return Array("payload", self.bits, nelem), Array("scales", 32, self.groups(nelem))

    @property
    def largest(self) -> int:
        """The largest code."""
        return (1 << self.bits - 1) - 1

    @property
    def rotates(self) -> bool:
        """True if the encoder rotates."""
        return self.rotate in ("encode", "both")

    @property
    def rotates_back(self) -> bool:
        """True if the decoder rotates back."""
        return self.rotate in ("decode", "both")

    @property
    def round_trips(self) -> bool:
        """False with rotate="encode" and "decode"."""
        return self.rotates == self.rotates_back

    @property
    def draws(self) -> bool:
        """Whether encoding needs a key."""
        return self.rounding == "stochastic"

    def fuses(self, source: CodecSpec) -> bool:
        """True for buffers of sdp4bit, whatever their parameters."""
        return isinstance(source, Sdp4bit)

    def groups(self, nelem: int) -> int:
        """Groups of a chunk of `nelem` elements."""
        return -(-nelem // self.group)

    def payload_nbytes(self, nelem: int) -> int:
        """Bytes of `nelem` codes."""
        return -(-nelem * self.bits // 8)

    def accepts(self, dtype: DType, nelem: int) -> bool:
        """True for dtypes it codes where the chunk gets smaller.

        With rotate="encode" or "decode" every size is coded, as raw would not rotate, and a dtype
        that is not coded is a ValueError.
        """
        if self.round_trips:
            return super().accepts(dtype, nelem)
        if dtype.name not in self.dtypes:
            allowed = ", ".join(self.dtypes)
            raise ValueError(
                f"rotate={self.rotate!r} with {dtype.name}, which would be stored raw; "
                f"allowed: {allowed}"
            )
        return True


SPEC = Sdp4bit


def encode_chunk(
    spec: Sdp4bit,
    chunk: Chunk,
    bits: Bits,
    *,
    stats: npt.NDArray[Any] | None = None,
    key: Key | None = None,
    threads: int = 1,
) -> ChunkResult:
    """Encode the chunk's elements `bits` (1-D) into its static part."""
    numbers = key_numbers(key) if spec.rounding == "stochastic" else None
    payload, scales = static_views(spec, chunk)
    largest, size = np.float32(spec.largest), spec.group
    batch = _BATCH_NELEM // size
    for first in range(0, scales.size, batch):
        at = first * size
        n = min(batch * size, bits.size - at)
        x = np.zeros(-(-n // size) * size, np.float32)
        x.view(np.uint32)[:n] = widen(bits[at : at + n], chunk.dtype)
        wild = (x.view(np.uint32) & np.uint32(0x7FFFFFFF)) >= INFINITY
        x[wild] = 0
        if spec.rotates:
            whole = n // RUN * RUN
            x[:whole] *= np.float32(RUN_FACTOR)
            rotate(x[:whole].reshape(-1, RUN))
            x[whole:n] *= np.float32(SHORT_FACTOR)
        groups = x.reshape(-1, size)
        a = np.abs(groups).max(axis=1)
        a[a < np.float32(FLOOR)] = largest
        v: Floats = np.clip(groups * (largest / a)[:, None], -largest, largest)
        lost = wild.reshape(-1, size).any(axis=1)
        scales[first : first + a.size] = np.where(lost, NAN_SCALE, (a / largest).view(np.uint32))
        v[lost] = 0
        words = None
        if numbers is not None:
            words = random_words(numbers, word_index(spec, chunk) + at, n)
        codes = round_to_code(v.reshape(-1)[:n], spec.largest, words)
        start = spec.payload_nbytes(at)
        payload[start : start + spec.payload_nbytes(n)] = _pack(codes, spec.bits)
    return ChunkResult(0)


def decode_chunk(
    spec: Sdp4bit, chunk: Chunk, out: Bits, start: int = 0, *, threads: int = 1
) -> ChunkDecoded:
    """Decode elements `start` to `start + out.size` of the chunk into `out` (1-D).

    Only the groups that hold those elements are looked at.
    """
    payload, scales = static_views(spec, chunk)
    size, stop = spec.group, start + out.size
    batch = _BATCH_NELEM // size
    wrong = False
    for first in range(start // size, -(-stop // size), batch):
        last = min(first + batch, -(-stop // size))
        at, n = first * size, min(last * size, chunk.nelem) - first * size
        codes = _unpack(payload[spec.payload_nbytes(at) :], spec.bits, n)
        words = np.asarray(scales[first:last], np.uint32)
        lost = words == NAN_SCALE
        good = (words >= SCALE_BITS[0]) & (words <= SCALE_BITS[1])
        groups = np.zeros((last - first, size), np.float32)
        w = groups.reshape(-1)
        w[:n] = codes
        wrong |= not (good | lost).all() or bool(groups[lost].any())
        wrong |= bool((codes < -spec.largest).any())
        if spec.rotates_back:
            whole = n // RUN * RUN
            rotate(w[:whole].reshape(-1, RUN))
            w[whole:n] *= np.float32(SHORT_BACK)
        with np.errstate(over="ignore"):
            groups *= np.where(good, words, np.uint32(0)).view(np.float32)[:, None]
        limit = np.float32(largest_number(chunk.dtype))
        limited = np.clip(w[:n], -limit, limit).view(np.uint32)
        limited = np.where(np.repeat(lost, size)[:n], np.uint32(NAN), limited)
        found = narrow(limited, chunk.dtype)
        lo, hi = max(start - at, 0), min(stop - at, n)
        out[at + lo - start : at + hi - start] = found[lo:hi]
    return ChunkDecoded(PROBLEM if wrong else None)


def static_views(spec: Sdp4bit, chunk: Chunk) -> tuple[Bytes, Words]:
    """The chunk's packed codes (uint8) and the bits of its scales, shape (groups,)."""
    payload, scales = spec.static_arrays(chunk)
    return payload, scales.view("<u4")


def word_index(spec: Sdp4bit, chunk: Chunk) -> int:
    """Index of the chunk's first random word."""
    return chunk.number * chunk.sections[0].nbytes * 8 // spec.bits


def round_to_code(v: Floats, largest: int, words: Words | None) -> npt.NDArray[np.int8]:
    """Codes of `v`, |v| at most `largest`: to nearest, ties to even, or by random words."""
    if words is None:
        codes: npt.NDArray[np.int8] = np.rint(v).astype(np.int8)
        return codes
    offset = largest + 1
    steps = ((v + np.float32(offset)) * np.float32(1 << 16)).astype(np.uint32)
    whole = (steps + (words >> np.uint32(16))) >> np.uint32(16)
    return (whole.astype(np.int16) - offset).astype(np.int8)


def _pack(codes: npt.NDArray[np.int8], bits: int) -> Bytes:
    if bits == 8:
        return codes.view(np.uint8)
    halves = np.zeros(-(-codes.size // 2) * 2, np.uint8)
    halves[: codes.size] = codes.view(np.uint8) & 15
    packed: Bytes = halves[0::2] | halves[1::2] << np.uint8(4)
    return packed


def _unpack(payload: Bytes, bits: int, n: int) -> npt.NDArray[np.int8]:
    if bits == 8:
        return payload[:n].view(np.int8)
    pairs = payload[: -(-n // 2)]
    halves = np.stack([pairs << np.uint8(4), pairs & np.uint8(240)], axis=1)
    codes: npt.NDArray[np.int8] = (halves.reshape(-1)[:n].view(np.int8) >> 4).astype(np.int8)
    return codes
