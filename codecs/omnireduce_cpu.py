# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""omnireduce on the CPU: conversions with Numba; choosing and copying blocks is NumPy's."""

from __future__ import annotations

import numpy as np

from ..formats.dtypes import DType
from .common.arrays_cpu import view_as, with_scratch
from .common.base import Bits, Chunk
from .common.compile_cache import cached
from .common.driver_cpu import Decoder, Encoder, Given, decode_by, encode_by
from .common.minifloat_cpu import LANES, kind_of, narrow, widen
from .omnireduce import Omnireduce, choose, decode_blocks, encode_blocks, kept_blocks


@cached(nogil=True)
def _convert(space, x, kind, out, out_kind):
    """Elements of one dtype as those of another."""
    words = view_as(space[: 4 * LANES], np.uint32)
    floats = view_as(space[4 * LANES : 8 * LANES], np.float32)
    part = view_as(space[8 * LANES : 12 * LANES], x.dtype)
    found = view_as(space[12 * LANES :], out.dtype)
    for at in range(0, x.size, LANES):
        n = x.size - at if x.size - at < LANES else LANES
        for i in range(LANES):
            part[i] = x[at + i] if i < n else 0
        widen(part, kind, words, floats)
        narrow(words, out_kind, found)
        for i in range(n):
            out[at + i] = found[i]


_convert_with = with_scratch(_convert, 16 * LANES)


def converted(bits: Bits, source: DType, target: DType) -> Bits:
    """See `omnireduce.converted`."""
    if source == target:
        return bits
    flat = np.ascontiguousarray(bits).reshape(-1)
    flat.flags.writeable = False
    out = np.empty(flat.size, target.bits)
    _convert_with(flat, kind_of(source), out, kind_of(target))
    return out.reshape(bits.shape)


def encoder(spec: Omnireduce, chunk: Chunk, given: Given) -> Encoder:
    """What encodes a chunk."""
    kept = choose(spec, chunk, given.stats)

    def encode(x: Bits, start: int) -> None:
        encode_blocks(spec, chunk, kept, x, start, converted)

    return Encoder(lambda start, stop: encode, spec.block)


def decoder(spec: Omnireduce, chunk: Chunk, start: int, stop: int, summed: bool = False) -> Decoder:
    """What decodes elements `start` to `stop` of a chunk."""
    kept, problem = kept_blocks(spec, chunk)

    def decode(out: Bits, at: int) -> None:
        decode_blocks(spec, chunk, kept, out, at, converted)

    return Decoder(decode, spec.block, problem=problem)


encode_chunk = encode_by(encoder)
decode_chunk = decode_by(decoder)
