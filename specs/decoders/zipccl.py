"""zipccl.md."""

import struct
from collections.abc import Iterator
from typing import NamedTuple

from .common import Dtype, Header, Section, align, ceil_div, check, u16, u32

ID = 2

# zipccl.md, "Parameters"


class Choice(NamedTuple):
    """How windows are chosen, and the base of an explicit one."""

    how: int
    base: int


def parameters(params: bytes, dtype: Dtype) -> Choice:
    """Refuse parameters that no encoder writes."""
    check(len(params) == 8, "bad_header", f"zipccl has 8 bytes of parameters, not {len(params)}")
    how, log_tile, base, zero = struct.unpack("<BBHI", params)
    check(how <= 3, "bad_header", f"unknown way {how} to choose windows")
    check(log_tile == 12, "bad_header", f"tile size 2^{log_tile}")
    highest = 2**dtype.exponent - 7 if how == 3 else 0
    check(base <= highest, "bad_header", f"explicit base {base} above {highest}")
    check(zero == 0, "bad_header", "nonzero end of the parameters")
    return Choice(how, base)


# zipccl.md, "Tiles"

TILE = 4096


def streams_and_planes(dtype: Dtype) -> tuple[list[int], int]:
    """Bytes per element of each stream, and X."""
    rest_bits = dtype.mantissa + 1
    stream_bytes = rest_bits // 8
    return [n for n in (4, 2, 1) if stream_bytes & n], rest_bits % 8


def columns(m: int) -> int:
    """W of a tile of m elements."""
    return 16 * ceil_div(m, 128)


def blocks_nbytes(dtype: Dtype, nelem: int) -> int:
    """Bytes of all tile blocks of a chunk."""
    streams, extra = streams_and_planes(dtype)
    width = nelem // TILE * 512 + columns(nelem % TILE)
    return width * (8 * sum(streams) + 3 + extra)


# zipccl.md, "Layout"


def sections(choice: Choice, dtype: Dtype, chunk_nelem: int) -> list[Section]:
    """The section table, where zipccl takes the dtype and number of elements."""
    check(dtype.exponent > 0, "bad_header", f"zipccl does not take {dtype.name}")
    check(chunk_nelem < 2**32, "bad_header", f"{chunk_nelem} elements in a zipccl chunk")
    raw = chunk_nelem * dtype.nbytes
    tiles = align(blocks_nbytes(dtype, chunk_nelem))
    index = align(6 * ceil_div(chunk_nelem, TILE))
    check(tiles + index < align(raw), "bad_header", "zipccl gains nothing for this size")
    escapes = align(max(0, raw - tiles - index))
    return [
        Section(2, 0, tiles // 128),
        Section(3, 0, index // 128),
        Section(64, 1, escapes // 128),
    ]


def used(h: Header, nelem: int) -> list[tuple[int, int]]:
    """Where the bytes in use begin and end in a static part."""
    index = align(blocks_nbytes(h.dtype, h.chunk_nelem))
    return [(0, blocks_nbytes(h.dtype, nelem)), (index, index + 6 * ceil_div(nelem, TILE))]


# zipccl.md, "Decoding"


class Window(NamedTuple):
    """The window of a tile."""

    base: int
    zero_mode: bool

    def codes(self, exponent: int) -> bool:
        """Whether an encoder codes this exponent, so that it is no escape."""
        if self.zero_mode:
            return exponent == 0 or self.base < exponent <= self.base + 6
        return self.base <= exponent <= self.base + 6


def unpack_tile(block: bytes, dtype: Dtype, width: int) -> tuple[list[int], list[int]]:
    """The codes and rests of a tile block, padding included, in element order."""
    streams, extra = streams_and_planes(dtype)
    count = 8 * width
    codes, rests = [0] * count, [0] * count
    offset = shift = 0
    for nbytes in streams:
        for i in range(count):
            value = int.from_bytes(block[offset : offset + nbytes], "little")
            rests[i] |= value << shift
            offset += nbytes
        shift += 8 * nbytes
    planes = [(codes, bit) for bit in range(3)] + [(rests, shift + bit) for bit in range(extra)]
    for values, bit in planes:
        for row in range(8):
            for column in range(width):
                values[row * width + column] |= (block[offset + column] >> row & 1) << bit
        offset += width
    return codes, rests


def decode_tile(
    block: bytes, dtype: Dtype, nelem: int, window: Window, escapes: list[int]
) -> Iterator[int]:
    """The bits of a tile's elements."""
    base, zero_mode = window
    width = columns(nelem)
    codes, rests = unpack_tile(block, dtype, width)
    distances = [(code - base) % 8 for code in codes]
    exponents = [0 if d == 0 and zero_mode else base + d for d in distances]

    by_column = (row * width + column for column in range(width) for row in range(8))
    escaped = [i for i in by_column if distances[i] == 7]
    check(len(escaped) == len(escapes), "bad_payload", "codes and index disagree about escapes")
    for i, exponent in zip(escaped, escapes, strict=True):
        check(exponent < 2**dtype.exponent, "bad_payload", f"escaped exponent {exponent}")
        check(not window.codes(exponent), "bad_payload", f"needless escape of {exponent}")
        exponents[i] = exponent

    for i in range(nelem, 8 * width):
        check(distances[i] == 6 and rests[i] == 0, "bad_payload", "padding element")
    for i in range(nelem):
        sign, mantissa = divmod(rests[i], 2**dtype.mantissa)
        yield ((sign << dtype.exponent) + exponents[i] << dtype.mantissa) + mantissa


def decode(h: Header, nelem: int, static: bytes, dynamic: bytes) -> bytes:
    """Decode a chunk that is not stored raw; static padding has been checked."""
    dtype = h.dtype
    escape_nbytes = 2 if dtype.exponent > 8 else 1
    check(len(dynamic) % escape_nbytes == 0, "bad_payload", "half an escape")
    escapes = [
        int.from_bytes(dynamic[i : i + escape_nbytes], "little")
        for i in range(0, len(dynamic), escape_nbytes)
    ]

    tiles = ceil_div(nelem, TILE)
    check(tiles > 0 or not escapes, "bad_payload", "escapes in an empty chunk")
    _, (index, _) = used(h, nelem)
    offsets = [u32(static, index + 4 * t) for t in range(tiles)]
    windows = [u16(static, index + 4 * tiles + 2 * t) for t in range(tiles)]
    ends = [*offsets[1:], len(escapes)]
    check(offsets[:1] in ([], [0]), "bad_payload", "first offset is not 0")
    check(max(offsets, default=0) <= len(escapes), "bad_payload", "offset behind the escapes")
    check(all(a <= b for a, b in zip(offsets, ends, strict=False)), "bad_payload", "offset falls")

    choice: Choice = h.params
    one = choice.how == 0 or len(set(windows)) <= 1
    check(one, "bad_payload", "windows differ in a tensor with one window")
    if choice.how != 0 and windows:
        check(windows[0] < 32768, "bad_payload", "zero mode in a tensor with one window")
        good = choice.how != 3 or windows[0] == choice.base
        check(good, "bad_payload", "not the explicit window")

    out = bytearray()
    for t in range(tiles):
        window = Window(windows[t] % 32768, windows[t] >= 32768)
        check(window.base <= 2**dtype.exponent - 7, "bad_payload", f"window base {window.base}")
        check(not window.zero_mode or window.base > 0, "bad_payload", "zero mode with base 0")
        m = min(TILE, nelem - t * TILE)
        block = static[blocks_nbytes(dtype, t * TILE) : blocks_nbytes(dtype, t * TILE + m)]
        for bits in decode_tile(block, dtype, m, window, escapes[offsets[t] : ends[t]]):
            out += bits.to_bytes(dtype.nbytes, "little")
    return bytes(out)
