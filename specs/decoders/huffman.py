"""huffman.md."""

from collections.abc import Iterator
from typing import NamedTuple

from .common import Dtype, Header, Section, align, ceil_div, check, u16, u32

ID = 12
TILE, GROUP, RUN = 32768, 8 * 32768, 1024


def pad(n: int, k: int) -> int:
    """The next multiple of k."""
    return ceil_div(n, k) * k


def parameters(params: bytes, dtype: Dtype) -> None:
    """There are none."""
    check(not params, "bad_header", "huffman has no parameters")


# huffman.md, "Layout"


def sections(params: None, dtype: Dtype, chunk_nelem: int) -> list[Section]:
    """The section table, where huffman takes the dtype and number of elements."""
    check(not dtype.name.startswith("complex"), "bad_header", f"huffman of {dtype.name}")
    check(chunk_nelem < 2**31, "bad_header", f"{chunk_nelem} elements in a huffman chunk")
    raw = chunk_nelem * dtype.nbytes
    index = align(4 * ceil_div(chunk_nelem, TILE) + ceil_div(chunk_nelem, GROUP))
    check(index < align(raw), "bad_header", "huffman gains nothing for this size")
    return [Section(3, 0, index // 128), Section(1, 1, align(max(0, raw - index)) // 128)]


def used(h: Header, nelem: int) -> list[tuple[int, int]]:
    """Where the bytes in use begin and end in a static part."""
    return [(0, 4 * ceil_div(nelem, TILE) + ceil_div(nelem, GROUP))]


def units_of(dtype: Dtype) -> list[int]:
    """Bytes of the units of each plane."""
    if dtype.name == "bool":
        return [8]
    if dtype.exponent >= 8:
        return [1] * (dtype.nbytes - 1) + [2]
    return [1 if k < 2 else 2 for k in range(dtype.nbytes)]


class Reader:
    """Bytes one behind the other, up to an end."""

    def __init__(self, data: bytes, at: int, end: int) -> None:
        self.data, self.at, self.end = data, at, end

    def take(self, n: int) -> bytes:
        """The next n bytes."""
        check(self.at + n <= self.end, "bad_payload", "data end early")
        self.at += n
        return self.data[self.at - n : self.at]

    def zeros(self, n: int) -> None:
        """The next n bytes, which are zeros."""
        check(not any(self.take(n)), "bad_payload", "bytes that are not zero")


# huffman.md, "Tables"


class Table(NamedTuple):
    """Values of classes, and by the 12 bits that are next the symbol and length of the code."""

    values: bytes
    codes: list[tuple[int, int]]


def read_table(reader: Reader) -> Table:
    """A table of 152 bytes."""
    values = reader.take(16)
    lengths = [half for byte in reader.take(128) for half in (byte & 15, byte >> 4)]
    lengths += reader.take(1)
    reader.zeros(7)
    check(max(lengths) <= 12, "bad_payload", "a code of more than 12 bits")
    check(sum(2 ** (12 - n) for n in lengths if n) == 4096, "bad_payload", "incomplete code")
    codes = [(0, 0)] * 4096
    code = length = 0
    for n, symbol in sorted((n, symbol) for symbol, n in enumerate(lengths) if n):
        code <<= n - length
        length = n
        bits = int(f"{code:0{n}b}"[::-1], 2)
        codes[bits :: 1 << n] = [(symbol, n)] * (4096 >> n)
        code += 1
    return Table(values, codes)


# huffman.md, "Blocks"


def unit_bytes(table: Table, unit: int, symbol: int) -> bytes:
    """The bytes that a symbol stands for."""
    if unit == 1:
        return bytes([symbol])
    if unit == 2:
        return bytes([table.values[symbol % 16], table.values[symbol // 16]])
    return bytes(table.values[symbol >> j & 1] for j in range(8))


def run_bytes(table: Table, unit: int, bits: int, size: int, n: int) -> bytes:
    """The n bytes of a run, from its `size` bits."""
    out = bytearray()
    while len(out) < n:
        symbol, length = table.codes[bits & 4095]
        bits >>= length
        size -= length
        if symbol < 256:
            out += unit_bytes(table, unit, symbol)
        else:
            out += (bits & (1 << 8 * unit) - 1).to_bytes(unit, "little")
            bits >>= 8 * unit
            size -= 8 * unit
        check(size >= 0, "bad_payload", "a run is too short")
    check(size == 0, "bad_payload", "a run is too long")
    return bytes(out[:n])


def read_block(reader: Reader, table: Table, unit: int, m: int) -> bytes:
    """The m bytes of a plane."""
    head = u32(reader.take(4), 0)
    mode, value, base = head & 255, head >> 8 & 255, head >> 16
    check(mode <= 3, "bad_payload", f"mode {mode}")
    check(value == 0 or mode == 1, "bad_payload", "a value in another mode")
    check(base == 0 or mode == 2, "bad_payload", "a base in another mode")
    if mode == 0:
        plane = reader.take(m)
        reader.zeros(-m % 4)
        return plane
    if mode == 1:
        return bytes([value]) * m
    runs = ceil_div(m, RUN)
    stored = reader.take(runs * (mode - 1))
    sizes = [base + (stored[r] if mode == 2 else u16(stored, 2 * r)) for r in range(runs)]
    reader.zeros(-len(stored) % 4)
    bits = int.from_bytes(reader.take(4 * ceil_div(sum(sizes), 32)), "little")
    plane = b""
    for r, size in enumerate(sizes):
        run = bits & (1 << size) - 1
        plane += run_bytes(table, unit, run, size, min(RUN, m - r * RUN))
        bits >>= size
    check(bits == 0, "bad_payload", "bits behind the last run")
    return plane


# huffman.md, "Decoding"


def read_tile(reader: Reader, tables: dict[int, Table], dtype: Dtype, m: int) -> Iterator[int]:
    """The bits of a tile's elements."""
    units = units_of(dtype)
    planes = [b""] * len(units)
    for k in range(len(units)):
        if k not in tables:
            planes[k] = reader.take(m)
            reader.zeros(-m % 8)
    begin = reader.at
    for k, table in sorted(tables.items()):
        planes[k] = read_block(reader, table, units[k], m)
    reader.zeros(-(reader.at - begin) % 8)
    check(reader.at == reader.end, "bad_payload", "a tile ends too early")
    top = 8 * dtype.nbytes - 1
    for element in zip(*planes, strict=True):
        bits = int.from_bytes(bytes(element), "little")
        yield bits >> 1 | (bits & 1) << top if dtype.exponent >= 8 else bits


def decode(h: Header, nelem: int, static: bytes, dynamic: bytes) -> bytes:
    """Decode a chunk that is not stored raw; static padding has been checked."""
    dtype = h.dtype
    if nelem == 0:
        check(not dynamic, "bad_payload", "payload in an empty chunk")
        return b""
    size = len(dynamic)
    check(size % 8 == 0 and size >= 8, "bad_payload", f"{size} bytes of payload")
    check(not any(dynamic[-8:]), "bad_payload", "the end is not zero")
    tiles = ceil_div(nelem, TILE)
    offsets = [8 * u32(static, 4 * t) for t in range(tiles)] + [size - 8]
    coded = static[4 * tiles :]
    check(offsets[0] == 0, "bad_payload", "first offset is not 0")
    check(offsets == sorted(offsets), "bad_payload", "offset falls")
    out = bytearray()
    tables: dict[int, Table] = {}
    for t in range(tiles):
        reader = Reader(dynamic, offsets[t], size - 8)
        if t % 8 == 0:
            mask = coded[t // 8]
            check(mask < 1 << dtype.nbytes, "bad_payload", "planes that there are not")
            tables = {k: read_table(reader) for k in range(dtype.nbytes) if mask >> k & 1}
        reader.end = offsets[t + 1]
        for bits in read_tile(reader, tables, dtype, min(TILE, nelem - t * TILE)):
            out += bits.to_bytes(dtype.nbytes, "little")
    return bytes(out)
