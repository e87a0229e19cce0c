"""A decoder of tightwire buffers, written from the pages in this folder alone.

It shows what the pages mean, one section of code per section of a page, and is slow. Run it as
`python specs/decoder.py IN OUT`.
"""

import math
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class FormatError(Exception):
    """A buffer was refused, with one of the reasons of errors.md."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


def check(passed: bool, reason: str, detail: str) -> None:
    """Refuse the buffer for this reason unless the check passed."""
    if not passed:
        raise FormatError(reason, detail)


# README.md, "Conventions"


def align(n: int) -> int:
    """Round up to a multiple of 128."""
    return -(-n // 128) * 128


def ceil_div(a: int, b: int) -> int:
    """Divide and round up."""
    return -(-a // b)


def u16(data: bytes, offset: int) -> int:
    """Two bytes as a number."""
    return int.from_bytes(data[offset : offset + 2], "little")


def u32(data: bytes, offset: int) -> int:
    """Four bytes as a number."""
    return int.from_bytes(data[offset : offset + 4], "little")


# buffer.md, "Header"

CHECKSUM, ASSEMBLED = 1, 2
KINDS = {1: "payload", 2: "tiles", 3: "index", 4: "scales", 64: "escapes", 65: "tail"}


class Dtype(NamedTuple):
    """A row of the table of dtypes; without exponent bits, exponent and mantissa are 0."""

    name: str
    nbytes: int
    exponent: int = 0
    mantissa: int = 0


DTYPES = {
    1: Dtype("bool", 1),
    2: Dtype("uint8", 1),
    3: Dtype("int8", 1),
    4: Dtype("uint16", 2),
    5: Dtype("int16", 2),
    6: Dtype("uint32", 4),
    7: Dtype("int32", 4),
    8: Dtype("uint64", 8),
    9: Dtype("int64", 8),
    16: Dtype("float16", 2, 5, 10),
    17: Dtype("bfloat16", 2, 8, 7),
    18: Dtype("float32", 4, 8, 23),
    19: Dtype("float64", 8, 11, 52),
    20: Dtype("float8_e4m3fn", 1, 4, 3),
    21: Dtype("float8_e5m2", 1, 5, 2),
    22: Dtype("float8_e4m3fnuz", 1, 4, 3),
    23: Dtype("float8_e5m2fnuz", 1, 5, 2),
    24: Dtype("float8_e8m0fnu", 1),
    32: Dtype("complex64", 8),
    33: Dtype("complex128", 16),
}


class Section(NamedTuple):
    """An entry of the section table; size is in units of 128 bytes."""

    kind: int
    dynamic: int
    size: int


class Header(NamedTuple):
    """What a header says, and what follows from it."""

    nbytes: int
    codec: int
    version: int
    dtype_id: int
    features: int
    chunks: int
    stride: int
    shape: tuple[int, ...]
    nelem: int
    static_stride: int
    params: bytes

    @property
    def dtype(self) -> Dtype:
        """The element type."""
        return DTYPES[self.dtype_id]

    @property
    def chunk_nelem(self) -> int:
        """Elements of a whole chunk."""
        return ceil_div(self.nelem, self.chunks)

    @property
    def records_end(self) -> int:
        """S, where the static parts start."""
        return align(self.nbytes + 32 * self.chunks)

    @property
    def static_end(self) -> int:
        """D, where the dynamic parts start."""
        return self.records_end + self.chunks * self.static_stride

    def share(self, chunk: int) -> int:
        """The number of elements in a chunk."""
        return max(0, min(self.chunk_nelem, self.nelem - chunk * self.chunk_nelem))


def crc_entry(n: int) -> int:
    """What one byte does to a CRC32C."""
    for _ in range(8):
        n = n >> 1 ^ (0x82F63B78 if n & 1 else 0)
    return n


CRC_TABLE = [crc_entry(n) for n in range(256)]


def crc32c(data: bytes) -> int:
    """CRC32C (Castagnoli)."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ CRC_TABLE[(crc ^ byte) & 255]
    return crc ^ 0xFFFFFFFF


# buffer.md, "Result records" and "Raw fallback"

RAW, OVERFLOW = 1, 2


class Record(NamedTuple):
    """The result record of a chunk."""

    checksum: int
    dynamic: int
    flags: int
    ordinal: int
    info: int


def raw_dynamic(header: Header, nelem: int) -> int:
    """Dynamic bytes of a chunk of this many elements stored raw."""
    return max(0, nelem * header.dtype.nbytes - header.static_stride)


# buffer.md, "Checksum"


def weighted_sum(data: bytes, first: int) -> int:
    """Sum of the words, the first of which has number `first`, each times its k."""
    words = struct.unpack(f"<{ceil_div(len(data), 4)}I", data + bytes(-len(data) % 4))
    return sum(
        ((0x3C6EF372 * i + 1) & 0xFFFFFFFF) * word for i, word in enumerate(words, first) if word
    )


def chunk_checksum(h: Header, nelem: int, record: Record, static: bytes, dynamic: bytes) -> int:
    """The checksum that the record of a chunk must give."""
    identity = h.codec + (h.version << 16) + (h.dtype_id << 24)
    total = weighted_sum(static, 0) + weighted_sum(dynamic, h.static_stride // 4)
    total += 0xA0761D6478BD642F
    total += 0xD6E8FEB86659FD93 * identity
    total += 0x9E3779B97F4A7C15 * nelem
    total += 0xC2B2AE3D27D4EB4F * record.dynamic
    total += 0x165667B19E3779F9 * (record.flags + (record.ordinal << 32))
    total += 0xE7037ED1A0B428DB * record.info
    return total & 0xFFFFFFFFFFFFFFFF


# raw.md


def raw_sections(dtype: Dtype, chunk_nelem: int) -> list[Section]:
    """raw.md, "Layout"."""
    return [Section(1, 0, align(chunk_nelem * dtype.nbytes) // 128)]


# zipccl.md, "Parameters"


def zipccl_parameters(params: bytes, dtype: Dtype) -> None:
    """Refuse parameters that no encoder writes."""
    check(len(params) == 8, "bad_header", f"zipccl has 8 bytes of parameters, not {len(params)}")
    how, log_tile, base, zero = struct.unpack("<BBHI", params)
    check(how <= 3, "bad_header", f"unknown way {how} to choose windows")
    check(log_tile == 12, "bad_header", f"tile size 2^{log_tile}")
    highest = 2**dtype.exponent - 7 if how == 3 else 0
    check(base <= highest, "bad_header", f"explicit base {base} above {highest}")
    check(zero == 0, "bad_header", "nonzero end of the parameters")


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


def zipccl_sections(dtype: Dtype, chunk_nelem: int) -> list[Section]:
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


def zipccl_decode(h: Header, nelem: int, static: bytes, dynamic: bytes) -> bytes:
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
    index = align(blocks_nbytes(dtype, h.chunk_nelem))
    offsets = [u32(static, index + 4 * t) for t in range(tiles)]
    windows = [u16(static, index + 4 * tiles + 2 * t) for t in range(tiles)]
    ends = [*offsets[1:], len(escapes)]
    check(offsets[:1] in ([], [0]), "bad_payload", "first offset is not 0")
    check(max(offsets, default=0) <= len(escapes), "bad_payload", "offset behind the escapes")
    check(all(a <= b for a, b in zip(offsets, ends, strict=False)), "bad_payload", "offset falls")

    how, _, explicit = struct.unpack_from("<BBH", h.params)
    one = how == 0 or len(set(windows)) <= 1
    check(one, "bad_payload", "windows differ in a tensor with one window")
    if how != 0 and windows:
        check(windows[0] < 32768, "bad_payload", "zero mode in a tensor with one window")
        check(how != 3 or windows[0] == explicit, "bad_payload", "not the explicit window")

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


# mx.md, "Elements"


class Element(NamedTuple):
    """A row of the table of elements; codes without sign from `infinity` and `nan` on are such."""

    name: str
    bits: int
    mantissa: int
    bias: int
    infinity: int = 256
    nan: int = 256

    def value(self, code: int) -> float:
        """What a code stands for."""
        negative, magnitude = divmod(code, 2 ** (self.bits - 1))
        if self.name == "int8":
            return (magnitude - 128 * negative) / 64
        field, fraction = divmod(magnitude, 2**self.mantissa)
        significand = fraction + (2**self.mantissa if field else 0)
        value = significand * 2.0 ** (max(field, 1) - self.bias - self.mantissa)
        if magnitude >= self.infinity:
            value = math.inf
        if magnitude >= self.nan:
            value = math.nan
        return -value if negative else value


MX_ELEMENTS = [
    Element("e4m3", 8, 3, 7, nan=0x7F),
    Element("e5m2", 8, 2, 15, infinity=0x7C, nan=0x7D),
    Element("e3m2", 6, 2, 3),
    Element("e2m3", 6, 3, 1),
    Element("e2m1", 4, 1, 1),
    Element("int8", 8, 6, 1),
]


def unpack_codes(payload: bytes, bits: int, nelem: int) -> list[int]:
    """The codes of a stream of bits, whose last byte ends with zeros."""
    stream = int.from_bytes(payload[: ceil_div(bits * nelem, 8)], "little")
    check(stream >> bits * nelem == 0, "bad_payload", "bits behind the last code")
    return [stream >> bits * i & 2**bits - 1 for i in range(nelem)]


def float_bits(value: float, dtype: Dtype) -> int:
    """The bits of the nearest value of a dtype, ties to even; NaN is quiet and positive."""
    bias = 2 ** (dtype.exponent - 1) - 1
    infinity = (2**dtype.exponent - 1) << dtype.mantissa
    if math.isnan(value):
        return infinity + 2 ** (dtype.mantissa - 1)
    magnitude = infinity
    if math.isfinite(value):
        exponent = max(math.frexp(value)[1] - 1, 1 - bias) if value else 1 - bias
        steps = round(math.ldexp(abs(value), dtype.mantissa - exponent))
        magnitude = min(((exponent + bias - 1) << dtype.mantissa) + steps, infinity)
    sign = math.copysign(1.0, value) < 0
    return magnitude + (sign << 8 * dtype.nbytes - 1)


# mx.md, "Parameters", "Layout" and "Decoding"


def mx_element(params: bytes) -> Element:
    """The element type, of parameters that an encoder writes."""
    check(len(params) == 8, "bad_header", f"mx has 8 bytes of parameters, not {len(params)}")
    check(params[0] <= 5 and params[1] <= 2, "bad_header", "unknown element or scale rule")
    check(params[2:] == b"\5\0\0\0\0\0", "bad_header", "block size or end of the parameters")
    return MX_ELEMENTS[params[0]]


def mx_sections(element: Element, dtype: Dtype, chunk_nelem: int) -> list[Section]:
    """The section table, where mx takes the dtype and number of elements."""
    taken = dtype.name in ("float16", "bfloat16", "float32")
    check(taken, "bad_header", f"mx does not take {dtype.name}")
    check(chunk_nelem <= 2**39 - 128, "bad_header", f"{chunk_nelem} elements in an mx chunk")
    payload = align(ceil_div(element.bits * chunk_nelem, 8))
    scales = align(ceil_div(chunk_nelem, 32))
    raw = align(chunk_nelem * dtype.nbytes)
    check(payload + scales < raw, "bad_header", "mx gains nothing for this size")
    return [Section(1, 0, payload // 128), Section(4, 0, scales // 128)]


def mx_decode(h: Header, nelem: int, static: bytes) -> bytes:
    """Decode a chunk."""
    element = mx_element(h.params)
    scales = align(ceil_div(element.bits * h.chunk_nelem, 8))
    out = bytearray()
    for i, code in enumerate(unpack_codes(static, element.bits, nelem)):
        s = static[scales + i // 32]
        value = element.value(code) * 2.0 ** (s - 127) if s < 255 else math.nan
        out += float_bits(value, h.dtype).to_bytes(h.dtype.nbytes, "little")
    return bytes(out)


# nvfp4.md, "Layout" and "Decoding"


def nvfp4_sections(dtype: Dtype, chunk_nelem: int) -> list[Section]:
    """The section table, where nvfp4 takes the dtype and number of elements."""
    taken = dtype.name in ("float16", "bfloat16", "float32")
    check(taken, "bad_header", f"nvfp4 does not take {dtype.name}")
    check(chunk_nelem <= 2**39 - 128, "bad_header", f"{chunk_nelem} elements in an nvfp4 chunk")
    payload, scales = align(ceil_div(chunk_nelem, 2)), align(16 + ceil_div(chunk_nelem, 16))
    raw = align(chunk_nelem * dtype.nbytes)
    check(payload + scales < raw, "bad_header", "nvfp4 gains nothing for this size")
    return [Section(1, 0, payload // 128), Section(4, 0, scales // 128)]


def float32(value: float) -> float:
    """The nearest float32. A quotient or product of two may be rounded to double before."""
    bits = float_bits(value, DTYPES[18])
    rounded: float = struct.unpack("<f", bits.to_bytes(4, "little"))[0]
    return rounded


def nvfp4_decode(h: Header, nelem: int, static: bytes) -> bytes:
    """Decode a chunk."""
    element, e4m3 = MX_ELEMENTS[4], MX_ELEMENTS[0]
    scales = align(ceil_div(h.chunk_nelem, 2))
    g: float = struct.unpack_from("<f", static, scales)[0]
    check(0 < g < math.inf, "bad_payload", f"tensor scale {g}")
    out = bytearray()
    for i, code in enumerate(unpack_codes(static, 4, nelem)):
        step = float32(e4m3.value(static[scales + 16 + i // 16]) / g)
        value = float32(element.value(code) * step)
        out += float_bits(value, h.dtype).to_bytes(h.dtype.nbytes, "little")
    return bytes(out)


# taco.md, "Parameters"


class Taco(NamedTuple):
    """What the parameters say."""

    code: int
    block: int
    transform: int
    words: int


def taco_parameters(params: bytes) -> Taco:
    """Refuse parameters that no encoder writes."""
    check(len(params) == 8, "bad_header", f"taco has 8 bytes of parameters, not {len(params)}")
    code, log_block, transform, scales, rounding = params[:5]
    check(code <= 2, "bad_header", f"format {code}")
    check(5 <= log_block <= 9, "bad_header", f"block size 2^{log_block}")
    check(transform <= 2, "bad_header", f"transform {transform}")
    check(scales <= 1 and rounding <= 1, "bad_header", f"scales {scales}, rounding {rounding}")
    check(not any(params[5:]), "bad_header", "nonzero end of the parameters")
    return Taco(code, 2**log_block, transform, 2 - scales)


# taco.md, "Layout"


def taco_sections(taco: Taco, dtype_id: int, chunk_nelem: int) -> list[Section]:
    """The section table, where taco takes the dtype and number of elements."""
    check(dtype_id in (16, 17, 18), "bad_header", f"taco does not take {DTYPES[dtype_id].name}")
    check(chunk_nelem <= 2**39 - 512, "bad_header", f"{chunk_nelem} elements in a taco chunk")
    blocks = ceil_div(chunk_nelem, taco.block)
    payload, scales = align(blocks * taco.block), align(4 * taco.words * blocks)
    raw = align(chunk_nelem * DTYPES[dtype_id].nbytes)
    check(payload + scales < raw, "bad_header", "taco gains nothing for this size")
    return [Section(1, 0, payload // 128), Section(4, 0, scales // 128)]


def taco_used(taco: Taco, chunk_nelem: int, nelem: int) -> tuple[int, int, int]:
    """Bytes of codes, where the scales start and where they end."""
    blocks = ceil_div(nelem, taco.block)
    scales_at = align(ceil_div(chunk_nelem, taco.block) * taco.block)
    codes = nelem if taco.transform == 2 else blocks * taco.block
    return codes, scales_at, scales_at + 4 * taco.words * blocks


# taco.md, "Arithmetic" and "Layout": one float64 operation on float32 numbers, then f32().


def f32(x: float) -> float:
    """Round to single precision."""
    try:
        return float(struct.unpack("<f", struct.pack("<f", x))[0])
    except OverflowError:
        return float("inf") if x > 0 else float("-inf")


def float_of_bits(bits: int) -> float:
    """The float32 of these bits."""
    return float(struct.unpack("<f", bits.to_bytes(4, "little"))[0])


def rotate(v: list[float]) -> None:
    """The transform of a block in place."""
    h = 1
    while h < len(v):
        for i in range(len(v)):
            if i // h % 2 == 0:
                v[i], v[i + h] = f32(v[i] + v[i + h]), f32(v[i] - v[i + h])
        h *= 2


def taco_value(byte: int, code: int) -> float:
    """The value of a code."""
    if code == 2:
        check(byte != 128, "bad_payload", "code -128")
        return float(byte - 256 if byte > 128 else byte)
    mantissa_bits, bias, largest = ((3, 7, 0x7E), (2, 15, 0x7B))[code]
    check(byte & 127 <= largest, "bad_payload", f"code {byte:02x}")
    exponent, mantissa = divmod(byte & 127, 2**mantissa_bits)
    significand = mantissa + (2**mantissa_bits if exponent else 0)
    value = significand * 2.0 ** (max(exponent, 1) - bias - mantissa_bits)
    return -value if byte >= 128 else value


# taco.md, "Decoding"


def taco_scale(words: list[int]) -> float | None:
    """The merged scale of a block, None if the block is lost."""
    lost = [w == 0x7FC00000 for w in words]
    check(all(lost) or not any(lost), "bad_payload", "half a lost block")
    if all(lost):
        return None
    for w in words:
        check(0 < w < 0x7F800000, "bad_payload", f"scale {w:08x}")
    values = [float_of_bits(w) for w in words]
    m = values[-1]
    if len(values) == 2:
        check(2.0**-10 <= values[0] <= 2.0**10, "bad_payload", f"alpha {values[0]}")
        check(2.0**-86 <= m <= 2.0**126, "bad_payload", f"s {m}")
        m = f32(m / values[0])
    check(2.0**-96 <= m <= 2.0**126, "bad_payload", f"s / alpha {m}")
    return m


def taco_bits(y: float, dtype: Dtype) -> bytes:
    """A number limited and rounded to a dtype."""
    if dtype.exponent == 5:
        return struct.pack("<e", max(-65504.0, min(65504.0, y)))
    largest = 2.0**128 - 2.0 ** (127 - dtype.mantissa)
    bits = u32(struct.pack("<f", max(-largest, min(largest, y))), 0)
    if dtype.nbytes == 4:
        return bits.to_bytes(4, "little")
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).to_bytes(2, "little")


def taco_decode(h: Header, nelem: int, static: bytes) -> bytes:
    """Decode a chunk; static padding has been checked."""
    taco = taco_parameters(h.params)
    _, scales_at, _ = taco_used(taco, h.chunk_nelem, nelem)
    k = f32(taco.block**-0.5) if taco.transform < 2 else 1.0
    out = bytearray()
    for b in range(ceil_div(nelem, taco.block)):
        words = [u32(static, scales_at + 4 * (taco.words * b + i)) for i in range(taco.words)]
        m = taco_scale(words)
        codes = static[b * taco.block : (b + 1) * taco.block]
        count = min(taco.block, nelem - b * taco.block)
        if m is None:
            check(not any(codes), "bad_payload", "codes of a lost block")
            nan = {16: 0x7E00, 17: 0x7FC0, 18: 0x7FC00000}[h.dtype_id]
            out += nan.to_bytes(h.dtype.nbytes, "little") * count
            continue
        w = [taco_value(code, taco.code) for code in codes]
        if taco.transform < 2:
            rotate(w)
        c = f32(m * k)
        for value in w[:count]:
            out += taco_bits(f32(value * c), h.dtype)
    return bytes(out)


# sdp4bit.md, "Parameters"


class Sdp4bit(NamedTuple):
    """What the parameters say."""

    bits: int
    group: int
    rotate: int


def sdp4bit_parameters(params: bytes) -> Sdp4bit:
    """Refuse parameters that no encoder writes."""
    check(len(params) == 8, "bad_header", f"sdp4bit has 8 bytes of parameters, not {len(params)}")
    bits, log_group, rotation, rounding = params[:4]
    check(bits in (4, 8), "bad_header", f"codes of {bits} bits")
    check(5 <= log_group <= 12, "bad_header", f"group size 2^{log_group}")
    valid = rotation <= 3 and rounding <= 1
    check(valid, "bad_header", f"rotate {rotation}, rounding {rounding}")
    check(not any(params[4:]), "bad_header", "nonzero end of the parameters")
    return Sdp4bit(bits, 2**log_group, rotation)


# sdp4bit.md, "Layout"


def sdp4bit_sections(sdp: Sdp4bit, dtype_id: int, chunk_nelem: int) -> list[Section]:
    """The section table, where sdp4bit takes the dtype and number of elements."""
    name, nbytes = DTYPES[dtype_id][:2]
    check(dtype_id in (16, 17, 18), "bad_header", f"sdp4bit does not take {name}")
    check(chunk_nelem <= 2**39 - 128, "bad_header", f"{chunk_nelem} elements in an sdp4bit chunk")
    payload = align(ceil_div(sdp.bits * chunk_nelem, 8))
    scales = align(4 * ceil_div(chunk_nelem, sdp.group))
    gains = payload + scales < align(chunk_nelem * nbytes)
    check(gains or sdp.rotate in (1, 2), "bad_header", "sdp4bit gains nothing for this size")
    return [Section(1, 0, payload // 128), Section(4, 0, scales // 128)]


# sdp4bit.md, "Decoding"


def sdp4bit_code(sdp: Sdp4bit, static: bytes, i: int) -> int:
    """Code i of a chunk."""
    code = static[i] if sdp.bits == 8 else static[i // 2] >> 4 * (i % 2) & 15
    sign = 2 ** (sdp.bits - 1)
    check(code != sign, "bad_payload", f"code {-sign}")
    return code - 2 * sign if code > sign else code


def sdp4bit_decode(h: Header, nelem: int, static: bytes) -> bytes:
    """Decode a chunk; static padding has been checked."""
    sdp = sdp4bit_parameters(h.params)
    scales_at = align(ceil_div(sdp.bits * h.chunk_nelem, 8))
    if sdp.bits == 4 and nelem % 2:
        check(static[nelem // 2] < 16, "bad_payload", "half a byte behind the last code")
    out = bytearray()
    for first in range(0, nelem, sdp.group):
        last = min(first + sdp.group, nelem)
        w = [float(sdp4bit_code(sdp, static, i)) for i in range(first, last)]
        scale = u32(static, scales_at + first // sdp.group * 4)
        if scale == 0x7FC00000:
            check(not any(w), "bad_payload", "codes of a lost group")
            nan = {16: 0x7E00, 17: 0x7FC0, 18: 0x7FC00000}[h.dtype_id]
            out += nan.to_bytes(h.dtype.nbytes, "little") * len(w)
            continue
        check(0 < scale < 0x7F800000, "bad_payload", f"scale {scale:08x}")
        s = float_of_bits(scale)
        check(2.0**-107 <= s <= 2.0**126, "bad_payload", f"scale {s}")
        if sdp.rotate & 2:
            for at in range(0, len(w), 32):
                run = w[at : at + 32]
                if len(run) == 32:
                    rotate(run)
                else:
                    run = [8 * value for value in run]
                w[at : at + 32] = run
        for value in w:
            out += taco_bits(f32(value * s), h.dtype)
    return bytes(out)


# tahquant.md, "Parameters" and "Layout"


class Tahquant(NamedTuple):
    """What the parameters say."""

    forward: bool
    hidden: int

    @property
    def tile(self) -> int:
        """Elements of a tile."""
        return 64 if self.forward else 32

    @property
    def planes(self) -> int:
        """Planes of all tiles."""
        return 3 if self.forward else 6

    @property
    def token_tiles(self) -> int:
        """G."""
        return ceil_div(self.hidden, self.tile)

    def tiles(self, nelem: int) -> int:
        """N."""
        return self.token_tiles * (nelem // self.hidden) + ceil_div(nelem % self.hidden, self.tile)

    def narrow(self, nelem: int) -> int:
        """K."""
        return nelem // self.hidden // 5 if self.forward and self.hidden <= 2**24 else 0

    def used(self, nelem: int) -> list[int]:
        """Bytes in use in payload, scales and index."""
        words = self.planes * self.tiles(nelem)
        if not self.forward:
            return [4 * words, 4 * self.tiles(nelem), 0]
        words += self.tiles(nelem) - self.token_tiles * self.narrow(nelem)
        tokens = ceil_div(nelem, self.hidden)
        return [8 * words, 5 * self.tiles(nelem), ceil_div(tokens, 8)]


def tahquant_parameters(params: bytes) -> Tahquant:
    """Refuse parameters that no encoder writes."""
    check(len(params) == 16, "bad_header", f"tahquant has 16 parameter bytes, not {len(params)}")
    check(params[0] <= 1 and not any(params[1:8]), "bad_header", "direction")
    hidden = int.from_bytes(params[8:], "little")
    check(1 <= hidden < 2**63, "bad_header", f"tokens of {hidden} elements")
    return Tahquant(params[0] == 0, hidden)


def tahquant_sections(tahquant: Tahquant, dtype_id: int, chunk_nelem: int) -> list[Section]:
    """The section table, where tahquant takes the dtype and number of elements."""
    check(dtype_id in (16, 17, 18), "bad_header", f"tahquant does not take dtype {dtype_id}")
    check(chunk_nelem <= 2**36, "bad_header", f"{chunk_nelem} elements in a tahquant chunk")
    sizes = [align(n) for n in tahquant.used(chunk_nelem)]
    raw = align(chunk_nelem * DTYPES[dtype_id].nbytes)
    check(sum(sizes) < raw, "bad_header", "tahquant gains nothing for this size")
    return [Section(kind, 0, n // 128) for kind, n in zip((1, 4, 3), sizes, strict=True)]


def tahquant_starts(tahquant: Tahquant, chunk_nelem: int) -> tuple[int, int, int]:
    """Where the sections of a static part start."""
    payload, scales, _ = (align(n) for n in tahquant.used(chunk_nelem))
    return 0, payload, payload + scales


# tahquant.md, "Decoding" and "Checks"


def float16(bits: int) -> float:
    """The value of a float16."""
    return float(struct.unpack("<e", bits.to_bytes(2, "little"))[0])


def tahquant_index(tahquant: Tahquant, nelem: int, index: bytes) -> list[bool]:
    """Which tokens are narrow."""
    narrow = [bool(index[i // 8] >> i % 8 & 1) for i in range(8 * len(index))]
    whole = nelem // tahquant.hidden
    good = not any(narrow[whole:]) and sum(narrow) == tahquant.narrow(nelem)
    check(not tahquant.forward or good, "bad_payload", "the index")
    return narrow if tahquant.forward else [False] * ceil_div(nelem, tahquant.hidden)


def tahquant_decode(h: Header, nelem: int, static: bytes) -> bytes:
    """Decode a chunk; static padding has been checked."""
    tahquant = tahquant_parameters(h.params)
    size, tiles, words = tahquant.tile, tahquant.tiles(nelem), tahquant.tile // 8
    _, scales, index = tahquant_starts(tahquant, h.chunk_nelem)
    narrow = tahquant_index(tahquant, nelem, static[index : index + tahquant.used(nelem)[2]])

    def plane_word(i: int) -> int:
        return int.from_bytes(static[words * i : words * (i + 1)], "little")

    out = bytearray()
    slot = tahquant.planes * tiles
    for t in range(tiles):
        token, within = divmod(t, tahquant.token_tiles)
        codes = [0] * size
        bits = [plane_word(p * tiles + t) for p in range(tahquant.planes)]
        if tahquant.forward and not narrow[token]:
            bits.append(plane_word(slot))
            slot += 1
        for p, word in enumerate(bits):
            codes = [code | (word >> i & 1) << p for i, code in enumerate(codes)]
        pivot = static[scales + 4 * tiles + t] if tahquant.forward else 0
        check(pivot == 0 or pivot // 64 == 2, "bad_payload", f"pivot {pivot}")
        left = min(tahquant.hidden, nelem - token * tahquant.hidden) - within * size
        scale = u32(static, scales + 4 * t)
        if scale == 0x7E007E00:
            nan = {16: 0x7E00, 17: 0x7FC0, 18: 0x7FC00000}[h.dtype_id]
            out += nan.to_bytes(h.dtype.nbytes, "little") * min(size, left)
            continue
        check(scale & 0x7C00 != 0x7C00 and scale >> 16 < 0x7C00, "bad_payload", f"{scale:08x}")
        m, s = float16(scale & 0xFFFF), float16(scale >> 16)
        y = [f32(m + code * s) for code in codes]
        if pivot:
            rotate(y)
            y = [f32(v / 8) for v in y]
            y[0], y[pivot & 63] = y[pivot & 63], y[0]
        for v in y[:left]:
            out += taco_bits(v, h.dtype)
    return bytes(out)


# dynamiq.md, "Parameters" and "Layout"


class Dynamiq(NamedTuple):
    """What the parameters say."""

    budget: int
    group: int
    size: int
    widths: int
    grid: int
    wide: bool
    mean: bool

    @property
    def groups(self) -> int:
        """K."""
        return self.size // self.group

    @property
    def side(self) -> int:
        """m, with the bits of a mean."""
        return (16 * self.groups + 4 if self.wide else 8 * self.groups + 20) + 16 * self.mean

    def units(self, nelem: int) -> int:
        """U."""
        n = ceil_div(nelem, self.size)
        return min(n * (self.budget * self.size - 16 * self.side) // (16 * self.size), 8 * n)

    def used(self, nelem: int) -> list[int]:
        """Bytes in use in payload, scales and index."""
        n = ceil_div(nelem, self.size)
        scales = 2 * self.groups if self.wide else self.groups + 2
        return [self.units(nelem) * self.size // 8, (scales + 2 * self.mean) * n, ceil_div(n, 2)]


def dynamiq_parameters(params: bytes) -> Dynamiq:
    """Refuse parameters that no encoder writes."""
    check(len(params) == 8, "bad_header", f"dynamiq has 8 bytes of parameters, not {len(params)}")
    budget, group, size, widths, grid, scales, rounding, mean = params
    check(48 <= budget <= 128, "bad_header", f"budget of {budget} / 16 bits")
    check(3 <= group <= 6 and 7 <= size <= 10, "bad_header", "size of groups or super-groups")
    choices = max(widths, grid, scales, rounding)
    check(choices <= 2 and mean <= 1, "bad_header", f"choices {params[3:].hex()}")
    found = Dynamiq(budget, 2**group, 2**size, widths, grid, scales == 2, mean == 1)
    room = budget * found.size - 16 * found.side >= 32 * found.size
    check(room, "bad_header", "the budget has no room for widths of 2")
    return found


def dynamiq_sections(dynamiq: Dynamiq, dtype_id: int, chunk_nelem: int) -> list[Section]:
    """The section table, where dynamiq takes the dtype and number of elements."""
    check(dtype_id in (16, 17, 18), "bad_header", f"dynamiq does not take dtype {dtype_id}")
    check(chunk_nelem <= 2**39 - 1024, "bad_header", f"{chunk_nelem} elements in a dynamiq chunk")
    sizes = [align(n) for n in dynamiq.used(chunk_nelem)]
    raw = align(chunk_nelem * DTYPES[dtype_id].nbytes)
    check(sum(sizes) < raw, "bad_header", "dynamiq gains nothing for this size")
    return [Section(kind, 0, n // 128) for kind, n in zip((1, 4, 3), sizes, strict=True)]


def dynamiq_starts(dynamiq: Dynamiq, chunk_nelem: int) -> tuple[int, int, int]:
    """Where the sections of a static part start."""
    payload, scales, _ = (align(n) for n in dynamiq.used(chunk_nelem))
    return 0, payload, payload + scales


# dynamiq.md, "Arithmetic", "Decoding" and "Checks"

GROWTH = [1, 1.5, 1.1875, 1.078125, 1.03515625, 1.015625, 1.0078125]


def dynamiq_grid(grid: int, width: int) -> list[float]:
    """The values of all codes of a width."""
    growth = 1.0 if grid == 2 else GROWTH[width - 2]
    shift = 0.5 if grid == 0 else 0.0
    a = [0.0]
    while len(a) < 2 ** (width - 1):
        a.append(a[-1] * growth + 1.0)
    half = [f32((value + shift) / (a[-1] + shift)) for value in a]
    return [-value for value in reversed(half)] + half


def dynamiq_widths(dynamiq: Dynamiq, nelem: int, index: bytes) -> list[int]:
    """The widths of the super-groups."""
    n = ceil_div(nelem, dynamiq.size)
    halves = [half for byte in index for half in (byte % 16, byte // 16)]
    widths = halves[:n]
    units = dynamiq.units(nelem)
    allowed = [set(range(2, 9)), {2, 4, 8}, {units // max(n, 1)}][dynamiq.widths]
    check(set(widths) <= allowed and sum(widths) <= units, "bad_payload", "widths")
    check(not any(halves[n:]), "bad_payload", "half a byte behind the last width")
    return widths


def dynamiq_scale(word: int) -> float:
    """The value of a scale word that is not that of a lost super-group."""
    value = float_of_bits(word << 16)
    good = word == 0 or (word <= 0x7F7F and value >= 2.0**-100)
    check(good, "bad_payload", f"scale {word:04x}")
    return value


def dynamiq_decode(h: Header, nelem: int, static: bytes) -> bytes:
    """Decode a chunk; static padding has been checked."""
    dynamiq = dynamiq_parameters(h.params)
    size, groups, n = dynamiq.size, dynamiq.groups, ceil_div(nelem, dynamiq.size)
    payload, _, half_bytes = dynamiq.used(nelem)
    _, scales, index = dynamiq_starts(dynamiq, h.chunk_nelem)
    widths = dynamiq_widths(dynamiq, nelem, static[index : index + half_bytes])
    means = scales + 2 * n * (groups if dynamiq.wide else 1)
    fractions = means + 2 * n * dynamiq.mean
    check(not any(static[sum(widths) * size // 8 : payload]), "bad_payload", "rows without a use")
    rows, row = [0] * n, 0
    for j in sorted(range(n), key=lambda j: widths[j]):
        rows[j] = row
        row += widths[j]
    out = bytearray()
    for j, width in enumerate(widths):
        count = groups if dynamiq.wide else 1
        words = [u16(static, scales + 2 * (j * count + i)) for i in range(count)]
        mean = u16(static, means + 2 * j) if dynamiq.mean else 0
        check(mean & 0x7F80 != 0x7F80, "bad_payload", f"mean {mean:04x}")
        elements = min(size, nelem - j * size)
        if all(word == 0x7FC0 for word in words):
            nan = {16: 0x7E00, 17: 0x7FC0, 18: 0x7FC00000}[h.dtype_id]
            out += nan.to_bytes(h.dtype.nbytes, "little") * elements
            continue
        steps = [dynamiq_scale(word) for word in words]
        if not dynamiq.wide:
            unit = f32(steps[0] / 255)
            steps = [f32(static[fractions + j * groups + i] * unit) for i in range(groups)]
        grid, b = dynamiq_grid(dynamiq.grid, width), float_of_bits(mean << 16)
        for i in range(elements):
            k, column = divmod(i, size // 8)
            planes = [static[(rows[j] + p) * size // 8 + column] >> k & 1 for p in range(width)]
            code = sum(bit << p for p, bit in enumerate(planes))
            out += taco_bits(f32(f32(grid[code] * steps[i // dynamiq.group]) + b), h.dtype)
    return bytes(out)


# philox.md


def philox(counter: list[int], key: list[int]) -> list[int]:
    """The four words of a counter."""
    c, (k0, k1) = counter, key
    for _ in range(10):
        p, q = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [q >> 32 ^ c[1] ^ k0, q & 0xFFFFFFFF, p >> 32 ^ c[3] ^ k1, p & 0xFFFFFFFF]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c


# thc.md, "Parameters" and "Layout"


class Thc(NamedTuple):
    """What the parameters say; `size` is that of a payload element in bytes."""

    size: int
    tensor: bool

    def used(self, chunk_nelem: int, nelem: int) -> list[tuple[int, int]]:
        """Where in a static part sums, number of ranks, seed and norms begin and end."""
        count_at = 1024 * self.size * ceil_div(chunk_nelem, 1024)
        sums = 1024 * self.size * ceil_div(nelem, 1024)
        scales_at = count_at + 128
        norms = scales_at + 16
        return [
            (0, sums),
            (count_at, count_at + self.size),
            (scales_at, scales_at + 12),
            (norms, norms + 4 * (1 if self.tensor else ceil_div(nelem, 1024))),
        ]


def thc_parameters(params: bytes) -> Thc:
    """Refuse parameters that no encoder writes."""
    check(len(params) == 8, "bad_header", f"thc has 8 parameter bytes, not {len(params)}")
    bits, norm, *zeros = params
    check(bits in (8, 16) and norm <= 1 and not any(zeros), "bad_header", "parameters")
    return Thc(bits // 8, norm == 1)


def thc_sections(thc: Thc, dtype_id: int, chunk_nelem: int) -> list[Section]:
    """The section table, where thc takes the dtype and number of elements."""
    check(dtype_id in (16, 17, 18), "bad_header", f"thc does not take dtype {dtype_id}")
    check(chunk_nelem <= 2**37, "bad_header", f"{chunk_nelem} elements in a thc chunk")
    *_, (scales_at, _), (_, end) = thc.used(chunk_nelem, chunk_nelem)
    scales = align(end - scales_at)
    raw = align(chunk_nelem * DTYPES[dtype_id].nbytes)
    check(scales_at + scales < raw, "bad_header", "thc gains nothing for this size")
    return [Section(1, 0, scales_at // 128), Section(4, 0, scales // 128)]


# thc.md, "Decoding"


def thc_decode(h: Header, nelem: int, static: bytes) -> bytes:
    """Decode a chunk; static padding has been checked."""
    thc = thc_parameters(h.params)
    _, count, (seed_at, _), (norms_at, norms_end) = thc.used(h.chunk_nelem, nelem)
    ranks = int.from_bytes(static[slice(*count)], "little")
    check(1 <= ranks <= (8, 2184)[thc.size - 1], "bad_payload", f"a sum of {ranks} ranks")
    key, step = [u32(static, seed_at), u32(static, seed_at + 4)], u32(static, seed_at + 8)
    for at in range(norms_at, norms_end, 4):
        word = u32(static, at)
        good = word in (0, 0x7FC00000) or 2.0**-90 <= float_of_bits(word) < float("inf")
        check(good, "bad_payload", f"norm {word:08x}")

    out = bytearray()
    for b in range(ceil_div(nelem, 1024)):
        size, at = thc.size, 1024 * thc.size * b
        sums = [
            int.from_bytes(static[at + size * i : at + size * (i + 1)], "little")
            for i in range(1024)
        ]
        word = u32(static, norms_at + (0 if thc.tensor else 4 * b))
        kept = min(1024, nelem - 1024 * b)
        if word in (0, 0x7FC00000):
            check(not any(sums), "bad_payload", "sums of a block without a norm")
            out += (
                float_bits(float_of_bits(word), h.dtype).to_bytes(h.dtype.nbytes, "little") * kept
            )
            continue
        check(max(sums) <= 30 * ranks, "bad_payload", f"a sum {max(sums)} of {ranks} ranks")
        v = [float(c - 15 * ranks) for c in sums]
        rotate(v)
        scale = f32(float_of_bits(word) / float_of_bits(0x435EDA01))
        signs: list[int] = []
        for g in range(8 * b, 8 * b + 8):
            signs += philox([g % 2**32, g // 2**32 + 2**29, step, 0], key)
        for i in range(kept):
            value = -v[i] if signs[i // 32] >> i % 32 & 1 else v[i]
            out += taco_bits(f32(value * scale), h.dtype)
    return bytes(out)


# omnireduce.md, "Parameters" and "Layout"


class Omnireduce(NamedTuple):
    """What the parameters say; `values` is a dtype."""

    steps: int
    block: int
    values: Dtype

    def slots(self, chunk_nelem: int) -> int:
        """K."""
        blocks = ceil_div(chunk_nelem, self.block)
        return min(max(blocks * self.steps // (128 * self.values.nbytes), 1), blocks)

    def payload(self, chunk_nelem: int) -> int:
        """Bytes of the section with the payload elements."""
        return self.slots(chunk_nelem) * self.block * self.values.nbytes


def omnireduce_parameters(params: bytes) -> Omnireduce:
    """Refuse parameters that no encoder writes."""
    check(len(params) == 8, "bad_header", f"omnireduce has 8 parameter bytes, not {len(params)}")
    steps, log_block, values, zero = struct.unpack("<HBBI", params)
    check(1 <= steps <= 512, "bad_header", f"budget {steps}")
    check(6 <= log_block <= 12, "bad_header", f"blocks of 2^{log_block}")
    check(values <= 2 and zero == 0, "bad_header", "parameters")
    return Omnireduce(steps, 2**log_block, DTYPES[16 + values])


def omnireduce_sections(omni: Omnireduce, dtype_id: int, chunk_nelem: int) -> list[Section]:
    """The section table, where omnireduce takes the dtype and number of elements."""
    check(dtype_id in (16, 17, 18), "bad_header", f"omnireduce does not take dtype {dtype_id}")
    check(chunk_nelem <= 2**36, "bad_header", f"{chunk_nelem} elements in an omnireduce chunk")
    payload = omni.payload(chunk_nelem)
    index = align(ceil_div(ceil_div(chunk_nelem, omni.block), 8))
    raw = align(chunk_nelem * DTYPES[dtype_id].nbytes)
    check(payload + index < raw, "bad_header", "omnireduce gains nothing for this size")
    return [Section(1, 0, payload // 128), Section(3, 0, index // 128)]


# omnireduce.md, "Decoding"


def omnireduce_decode(h: Header, nelem: int, static: bytes) -> bytes:
    """Decode a chunk; static padding has been checked."""
    omni = omnireduce_parameters(h.params)
    size, payload = omni.values.nbytes, omni.payload(h.chunk_nelem)
    blocks = ceil_div(nelem, omni.block)
    index = int.from_bytes(static[payload : payload + ceil_div(blocks, 8)], "little")
    kept = [b for b in range(index.bit_length()) if index >> b & 1]
    check(index >> blocks == 0, "bad_payload", "bits of the index behind the last block")
    check(len(kept) <= omni.slots(h.chunk_nelem), "bad_payload", "blocks without a slot")
    out = bytearray(nelem * h.dtype.nbytes)
    at = 0
    for b in kept:
        for i in range(b * omni.block, min((b + 1) * omni.block, nelem)):
            value_bytes = static[at : at + size]
            if omni.values != h.dtype:
                wide = b"\0\0" + value_bytes if omni.values.name == "bfloat16" else value_bytes
                value = struct.unpack("<e" if omni.values.name == "float16" else "<f", wide)[0]
                value_bytes = float_bits(value, h.dtype).to_bytes(h.dtype.nbytes, "little")
            out[h.dtype.nbytes * i : h.dtype.nbytes * (i + 1)] = value_bytes
            at += size
    check(not any(static[at:payload]), "bad_payload", "a payload element that no element has")
    return bytes(out)


# lhc.md, "Parameters" and "Layout"


class Lhc(NamedTuple):
    """What the parameters say; `dtype` is that of the buckets."""

    steps: int
    dtype: int
    published: bool

    def rows(self, chunk_nelem: int) -> int:
        """R."""
        return ceil_div(1000 * ceil_div(chunk_nelem, 1024), self.steps)


def lhc_parameters(params: bytes, dtype_id: int) -> Lhc:
    """Refuse parameters that no encoder writes."""
    check(len(params) == 8, "bad_header", f"lhc has 8 parameter bytes, not {len(params)}")
    steps, dtype, mapping, zero = struct.unpack("<IBBH", params)
    check(1001 <= steps <= 1000000, "bad_header", f"ratio {steps}")
    check(dtype <= 3 and mapping <= 1 and zero == 0, "bad_header", "parameters")
    return Lhc(steps, (dtype_id, 16, 17, 18)[dtype], mapping == 1)


def lhc_sections(lhc: Lhc, dtype_id: int, chunk_nelem: int) -> list[Section]:
    """The section table, where lhc takes the dtype and number of elements."""
    check(dtype_id in (16, 17, 18), "bad_header", f"lhc does not take dtype {dtype_id}")
    check(chunk_nelem <= 2**36, "bad_header", f"{chunk_nelem} elements in an lhc chunk")
    sketch = 1024 * lhc.rows(chunk_nelem) * DTYPES[lhc.dtype].nbytes
    index = align(ceil_div(chunk_nelem, 8))
    raw = align(chunk_nelem * DTYPES[dtype_id].nbytes)
    check(sketch + index < raw, "bad_header", "lhc gains nothing for this size")
    return [Section(1, 0, sketch // 128), Section(3, 0, index // 128)]


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


def lhc_span(lhc: Lhc, q: int, rows: int) -> list[list[tuple[int, int, float]]]:
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
        offsets = [lhc_offsets(h) for h in hashed]
    signs = [[-1.0 if x >> 31 else 1.0 for x in h] for h in hashed]
    return [list(zip(*three, strict=True)) for three in zip(to, offsets, signs, strict=True)]


def lhc_offsets(h: list[int]) -> list[int]:
    """Three that differ."""
    o = [x % 256 for x in h]
    while o[1] == o[0]:
        o[1] = (o[1] + 1) % 256
    while o[2] in o[:2]:
        o[2] = (o[2] + 1) % 256
    return o


# lhc.md, "Peeling" and "Decoding"


def lhc_peel(buckets_of: dict[int, list[int]]) -> dict[int, int]:
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


def lhc_decode(h: Header, nelem: int, static: bytes) -> bytes:
    """Decode a chunk; static padding has been checked."""
    lhc = lhc_parameters(h.params, h.dtype_id)
    rows, size = lhc.rows(h.chunk_nelem), DTYPES[lhc.dtype].nbytes
    n_buckets = 1024 * rows
    sketch = [static[size * c : size * (c + 1)] for c in range(n_buckets)]
    index = int.from_bytes(static[size * n_buckets :][: ceil_div(nelem, 8)], "little")
    check(index >> nelem == 0, "bad_payload", "bits of the index behind the last element")

    spans = ceil_div(nelem, n_buckets)
    blocks = [block for q in range(spans) for block in lhc_span(lhc, q, rows)]
    buckets_of = {
        i: [256 * r + (i + o) % 256 for r, o, _ in blocks[i // 256]]
        for i, bit in enumerate(reversed(bin(index)[2:]))
        if bit == "1"
    }
    own = lhc_peel(buckets_of)
    used = set(own.values())
    used.update(c for i, buckets in buckets_of.items() if i not in own for c in buckets)
    unused = (any(sketch[c]) for c in range(n_buckets) if c not in used)
    check(not any(unused), "bad_payload", "a bucket that no element has")

    out = bytearray(nelem * h.dtype.nbytes)
    for i, buckets in buckets_of.items():
        if i in own and lhc.dtype == h.dtype_id:
            value = sketch[own[i]]
        elif i in own:
            value = lhc_rounded(lhc_value(lhc, sketch[own[i]]), h)
        else:
            signs = [sign for _, _, sign in blocks[i // 256]]
            three = [s * lhc_value(lhc, sketch[c]) for s, c in zip(signs, buckets, strict=True)]
            median = sorted(three, key=lambda v: (v, math.copysign(1.0, v)))[1]
            value = lhc_rounded(math.nan if any(map(math.isnan, three)) else median, h)
        out[h.dtype.nbytes * i : h.dtype.nbytes * (i + 1)] = value
    return bytes(out)


def lhc_value(lhc: Lhc, bucket: bytes) -> float:
    """The value of a bucket."""
    if lhc.dtype == 17:
        bucket = b"\0\0" + bucket
    return float(struct.unpack("<e" if lhc.dtype == 16 else "<f", bucket)[0])


def lhc_rounded(value: float, h: Header) -> bytes:
    """A value in the tensor's dtype."""
    return float_bits(value, h.dtype).to_bytes(h.dtype.nbytes, "little")


# buffer.md, "Reading"


def read_header(data: bytes, max_nbytes: int) -> Header:
    """Steps 1 to 10."""
    check(len(data) >= 4, "truncated", "no magic")  # 1
    check(data[:4] == b"\x9eTWB", "bad_magic", f"the bytes start with {data[:4].hex(' ')}")
    check(len(data) >= 32, "truncated", "no header")

    check(data[4] == 1, "unsupported_version", f"format {data[4]}.{data[5]}")  # 2

    nbytes = u32(data, 8)  # 3
    check(nbytes <= 2**20, "header_too_large", f"{nbytes} bytes")
    check(nbytes >= 32 and nbytes % 8 == 0, "bad_header", f"{nbytes} bytes of header")
    check(len(data) >= nbytes, "truncated", "the header ends early")

    crc = crc32c(data[:28] + data[32:nbytes])  # 4
    check(crc == u32(data, 28), "checksum_mismatch", f"CRC32C of the header is {crc:08x}")

    required = u16(data, 16)  # 5
    check(required & ~(CHECKSUM | ASSEMBLED) == 0, "unknown_feature", f"bits {required:#x}")
    codec = u16(data, 6)
    check(1 <= codec <= 11, "unknown_codec", f"codec {codec}")

    version, dtype_id, ndim, nsections = data[12:16]  # 6
    chunks, stride = u32(data, 20), 128 * u32(data, 24)
    check(dtype_id in DTYPES, "bad_header", f"unknown dtype {dtype_id}")
    check(ndim <= 32, "bad_header", f"{ndim} dimensions")
    check(1 <= chunks <= 65536, "bad_header", f"{chunks} chunks")
    params = 32 + 8 * ndim + 8 * nsections
    check(params <= nbytes, "bad_header", "no room for shape and section table")

    dtype = DTYPES[dtype_id]  # 7
    shape = struct.unpack_from(f"<{ndim}Q", data, 32)
    nonzero, nelem = dtype.nbytes, 1
    for dim in shape:
        nonzero *= dim or 1
        nelem *= dim
    check(nonzero < 2**63, "limit_exceeded", f"shape {shape}")

    table = []  # 8
    for i in range(nsections):
        kind, dynamic, zero, size = struct.unpack_from("<BBHI", data, 32 + 8 * ndim + 8 * i)
        check(kind in KINDS, "bad_header", f"unknown section kind {kind}")
        check(dynamic <= 1, "bad_header", f"dynamic byte {dynamic}")
        check(zero == 0, "bad_header", "nonzero reserved field in the section table")
        table.append(Section(kind, dynamic, size))

    check(version == 1, "unsupported_version", f"version {version} of codec {codec}")  # 9
    chunk_nelem = ceil_div(nelem, chunks)
    if codec == 1:
        check(params == nbytes, "bad_header", "raw has no parameters")
        expected = raw_sections(dtype, chunk_nelem)
    elif codec == 4:
        check(params == nbytes, "bad_header", "nvfp4 has no parameters")
        expected = nvfp4_sections(dtype, chunk_nelem)
    elif codec == 3:
        expected = mx_sections(mx_element(data[params:nbytes]), dtype, chunk_nelem)
    elif codec == 5:
        expected = taco_sections(taco_parameters(data[params:nbytes]), dtype_id, chunk_nelem)
    elif codec == 6:
        expected = sdp4bit_sections(sdp4bit_parameters(data[params:nbytes]), dtype_id, chunk_nelem)
    elif codec == 7:
        tahquant = tahquant_parameters(data[params:nbytes])
        expected = tahquant_sections(tahquant, dtype_id, chunk_nelem)
    elif codec == 8:
        dynamiq = dynamiq_parameters(data[params:nbytes])
        expected = dynamiq_sections(dynamiq, dtype_id, chunk_nelem)
    elif codec == 9:
        expected = thc_sections(thc_parameters(data[params:nbytes]), dtype_id, chunk_nelem)
    elif codec == 10:
        omni = omnireduce_parameters(data[params:nbytes])
        expected = omnireduce_sections(omni, dtype_id, chunk_nelem)
    elif codec == 11:
        lhc = lhc_parameters(data[params:nbytes], dtype_id)
        expected = lhc_sections(lhc, dtype_id, chunk_nelem)
    else:
        zipccl_parameters(data[params:nbytes], dtype)
        expected = zipccl_sections(dtype, chunk_nelem)
    check(table == expected, "bad_header", "section table")
    slot = 128 * sum(s.size for s in table if s.dynamic)
    check(stride <= slot, "bad_header", f"slots of {stride} bytes, at most {slot}")

    static_stride = 128 * sum(s.size for s in table if not s.dynamic)  # 10
    codec_params = data[params:nbytes]
    h = Header(
        nbytes,
        codec,
        version,
        dtype_id,
        required,
        chunks,
        stride,
        shape,
        nelem,
        static_stride,
        codec_params,
    )
    check(nelem * dtype.nbytes <= max_nbytes, "limit_exceeded", f"{nelem * dtype.nbytes} bytes")
    check(len(data) >= h.static_end, "truncated", "records or static parts end early")
    return h


def read_records(data: bytes, h: Header) -> list[Record]:
    """Steps 11 to 14."""
    places = range(h.nbytes, h.nbytes + 32 * h.chunks, 32)
    records = [Record(*struct.unpack_from("<QQIIQ", data, place)) for place in places]

    for r in records:  # 11
        check(r.flags & ~(RAW | OVERFLOW) == 0, "bad_record", f"flags {r.flags:#x}")
    for r in records:
        check(not r.flags & OVERFLOW, "dynamic_overflow", f"{r.dynamic} bytes needed")
    for i, r in enumerate(records):
        check(bool(h.features & CHECKSUM) or r.checksum == 0, "bad_record", "a checksum")
        check(r.info == 0, "bad_record", f"info {r.info}")
        check(bool(h.features & ASSEMBLED) or r.ordinal == i, "bad_record", f"ordinal {r.ordinal}")

    for i, r in enumerate(records):  # 12
        stored_raw = r.flags & RAW
        bound = raw_dynamic(h, h.share(i)) if h.codec == 2 else 0
        check(not stored_raw or h.codec == 2, "bad_record", "raw flag without fallback")
        check(r.dynamic <= bound, "bad_record", f"{r.dynamic} dynamic bytes, at most {bound}")
        check(not stored_raw or r.dynamic == bound, "bad_record", "dynamic bytes of a raw chunk")
        check(not h.stride or r.dynamic <= h.stride, "bad_record", "more than the slot")

    slots = [h.stride or align(r.dynamic) for r in records]  # 13
    end = h.static_end + sum(slots)
    check(len(data) >= end, "truncated", "dynamic parts end early")
    check(len(data) == end, "trailing_bytes", f"{len(data) - end} bytes")

    padding = data[h.nbytes + 32 * h.chunks : h.records_end]  # 14
    check(not any(padding), "reserved_not_zero", "behind the records")
    return records


def static_padding(h: Header, nelem: int, stored_raw: bool, static: bytes) -> bytes:
    """The padding of a static part."""
    if h.codec == 1 or stored_raw:
        return static[nelem * h.dtype.nbytes :]
    if h.codec == 3:
        scales = align(ceil_div(mx_element(h.params).bits * h.chunk_nelem, 8))
        used = ceil_div(mx_element(h.params).bits * nelem, 8)
        return static[used:scales] + static[scales + ceil_div(nelem, 32) :]
    if h.codec == 4:
        scales = align(ceil_div(h.chunk_nelem, 2))
        head = static[ceil_div(nelem, 2) : scales] + static[scales + 4 : scales + 16]
        return head + static[scales + 16 + ceil_div(nelem, 16) :]
    if h.codec == 5:
        codes, scales, end = taco_used(taco_parameters(h.params), h.chunk_nelem, nelem)
        return static[codes:scales] + static[end:]
    if h.codec == 6:
        sdp = sdp4bit_parameters(h.params)
        scales = align(ceil_div(sdp.bits * h.chunk_nelem, 8))
        end = scales + 4 * ceil_div(nelem, sdp.group)
        return static[ceil_div(sdp.bits * nelem, 8) : scales] + static[end:]
    if h.codec in (7, 8):
        if h.codec == 7:
            tahquant = tahquant_parameters(h.params)
            starts, used = tahquant_starts(tahquant, h.chunk_nelem), tahquant.used(nelem)
        else:
            dynamiq = dynamiq_parameters(h.params)
            starts, used = dynamiq_starts(dynamiq, h.chunk_nelem), dynamiq.used(nelem)
        ends = [at + n for at, n in zip(starts, used, strict=True)]
        gaps = zip(ends, (*starts[1:], len(static)), strict=True)
        return b"".join(static[lo:hi] for lo, hi in gaps)
    if h.codec == 9:
        used = thc_parameters(h.params).used(h.chunk_nelem, nelem)
        ends, starts = [end for _, end in used], [at for at, _ in used[1:]]
        gaps = zip(ends, (*starts, len(static)), strict=True)
        return b"".join(static[lo:hi] for lo, hi in gaps)
    if h.codec == 10:
        omni = omnireduce_parameters(h.params)
        return static[omni.payload(h.chunk_nelem) + ceil_div(ceil_div(nelem, omni.block), 8) :]
    if h.codec == 11:
        lhc = lhc_parameters(h.params, h.dtype_id)
        sketch = 1024 * lhc.rows(h.chunk_nelem) * DTYPES[lhc.dtype].nbytes
        return static[sketch + ceil_div(nelem, 8) :]
    index = align(blocks_nbytes(h.dtype, h.chunk_nelem))
    index_end = index + 6 * ceil_div(nelem, TILE)
    return static[blocks_nbytes(h.dtype, nelem) : index] + static[index_end:]


def decode(data: bytes, max_nbytes: int = 64 << 30) -> tuple[str, tuple[int, ...], bytes]:
    """Decode a buffer to its dtype's name, its shape and the tensor's bytes in C order."""
    h = read_header(data, max_nbytes)
    records = read_records(data, h)
    out = bytearray()
    place = h.static_end
    for i, r in enumerate(records):  # 15
        nelem = h.share(i)
        start = h.records_end + i * h.static_stride
        static = data[start : start + h.static_stride]
        dynamic = data[place : place + r.dynamic]
        place += h.stride or align(r.dynamic)

        if h.features & CHECKSUM:
            expected = chunk_checksum(h, nelem, r, static, dynamic)
            check(r.checksum == expected, "checksum_mismatch", f"chunk {i}")
        stored_raw = bool(r.flags & RAW)
        padding = static_padding(h, nelem, stored_raw, static)
        check(not any(padding), "reserved_not_zero", f"static part of chunk {i}")
        if not h.stride:
            padding = data[place - align(r.dynamic) + r.dynamic : place]
            check(not any(padding), "reserved_not_zero", f"behind dynamic part of chunk {i}")

        if h.codec == 1 or stored_raw:
            out += (static + dynamic)[: nelem * h.dtype.nbytes]
        elif h.codec == 4:
            out += nvfp4_decode(h, nelem, static)
        elif h.codec == 3:
            out += mx_decode(h, nelem, static)
        elif h.codec == 5:
            out += taco_decode(h, nelem, static)
        elif h.codec == 6:
            out += sdp4bit_decode(h, nelem, static)
        elif h.codec == 7:
            out += tahquant_decode(h, nelem, static)
        elif h.codec == 8:
            out += dynamiq_decode(h, nelem, static)
        elif h.codec == 9:
            out += thc_decode(h, nelem, static)
        elif h.codec == 10:
            out += omnireduce_decode(h, nelem, static)
        elif h.codec == 11:
            out += lhc_decode(h, nelem, static)
        else:
            out += zipccl_decode(h, nelem, static, dynamic)
    return h.dtype.name, h.shape, bytes(out)


def main() -> int:
    """Decode the file IN to the file OUT."""
    if len(sys.argv) != 3:
        sys.stderr.write("usage: decoder.py IN OUT\n")
        return 2
    try:
        out = decode(Path(sys.argv[1]).read_bytes())[2]
    except FormatError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    Path(sys.argv[2]).write_bytes(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
