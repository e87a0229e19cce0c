"""Canonical Huffman coding of planes of bytes, order 0. specs/huffman.md, "Blocks".

A symbol stands for a unit of 1, 2 or 8 bytes of a plane. Codes have at most 12 bits; a unit that
has none is an escape, and its bytes follow as they are. A block is the plane of a tile, cut into
runs that are decoded apart from each other. This module has the NumPy reference of tables and
blocks, for every codec that codes bytes.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .base import Bytes

Ints = npt.NDArray[np.int64]

#: Bits of the longest code.
LIMIT = 12
#: Bytes of a plane in a run, and runs of a whole tile.
RUN, RUNS = 1024, 32
TILE = RUN * RUNS
#: The symbol behind the 256 of units.
ESCAPE = 256
#: Values of bytes that symbols of units of several bytes distinguish.
CLASSES = {1: 0, 2: 16, 8: 2}
#: Bytes of a table: 16 values, 257 lengths of 4 bits, zeros.
TABLE_NBYTES = 152
#: Work memory of a plane of a group on a GPU, in bytes.
WORK_NBYTES = (4 << LIMIT) + 2048
#: What a block is: its bytes, one value, or runs with sizes of 1 or 2 bytes.
STORED, CONSTANT, NARROW, WIDE = range(4)
#: Planes of more bytes are sampled: 32 bytes of each 256.
SAMPLED = 1 << 16
#: Weights of all units add up to 2^WEIGHT_BITS; those of 2^-RARE of them and less have no code.
WEIGHT_BITS, RARE = 40, 15
#: Weights of symbols are counted in 2^-(WEIGHT_BITS - SCALE) of all.
SCALE = 20
#: Of 32 bits at least one is saved, or the plane is not coded.
SAVED = 32
#: Where each value is at least 2^-COMMON of all, no other one is expected: there is no escape.
COMMON = 6


class Table(NamedTuple):
    """What a plane is coded with.

    Attributes:
        values: The bytes of classes, uint8, shape (16,); zeros behind them.
        lengths: Bits of the codes of 256 symbols and the escape, uint8, shape (257,); 0: none.
    """

    values: Bytes
    lengths: Bytes


@functools.cache
def _sampled() -> npt.NDArray[np.bool]:
    i = np.arange(1 << 17)
    block = i >> 8
    found: npt.NDArray[np.bool] = i >> 5 & 7 == (block ^ block >> 3 ^ block >> 6) & 7
    return found


def counts_of(plane: Bytes) -> Ints:
    """How often each value is in a plane of bytes, or in the sample of a long one: int64, (256,).

    The sample has a fixed part of each 256 bytes. `plane` has at most 2^18 bytes.
    """
    if plane.size > SAMPLED:
        # The pattern repeats after 2^17 bytes.
        mask = np.resize(_sampled(), plane.size)
        plane = plane[mask]
    return np.bincount(plane, minlength=256).astype(np.int64)


def weights_of(counts: Ints, unit: int) -> tuple[Bytes, Ints]:
    """(values of classes, weights of the 256 symbols and the escape) for units of `unit` bytes.

    Bytes count as independent of each other. A symbol of weight 0 gets no code, nor does the escape
    where no other values are expected.
    """
    values = np.zeros(16, np.uint8)
    classes = CLASSES[unit]
    total = int(counts.sum())
    seen = counts[counts > 0]
    all_common = seen.size > 1 and int(seen.min()) << COMMON >= total
    if classes:
        order = np.argsort(-counts, kind="stable")[:classes]
        kept = order[counts[order] > 0]
        values[: kept.size] = kept
        counts = np.append(counts[kept], np.zeros(classes - kept.size, np.int64))
    symbols = np.arange(256)
    weights = np.full(256, 1 << WEIGHT_BITS, np.int64)
    shift = 8 // unit
    for _ in range(unit):
        weights = weights * counts[symbols & counts.size - 1] // total
        symbols >>= shift
    weights[weights < 1 << WEIGHT_BITS - RARE] = 0
    escape = (1 << WEIGHT_BITS) - int(weights.sum())
    least = 0 if all_common else 1
    return values, np.append(weights >> SCALE, max(escape >> SCALE, least))


def lengths_of(weights: Ints) -> Bytes:
    """Lengths of a complete code of at most 12 bits; 0 where the weight, at most 2^20, is 0.

    A length is the least l with weight * 2^l at least s, for the least s with which the codes fit;
    what then is left over shortens codes, shorter ones first, of one length those of larger
    weights, of one weight those of lower symbols.
    """
    used = weights > 0
    order = np.argsort(-weights, kind="stable")

    def lengths_for(s: int) -> Ints:
        lengths = np.ones(weights.size, np.int64)
        for k in range(1, LIMIT):
            lengths += weights << k < s
        return lengths

    def left(lengths: Ints) -> int:
        return (1 << LIMIT) - int((1 << LIMIT >> lengths)[used].sum())

    low, high = 1, 1 << 32
    while low < high:
        middle = (low + high) // 2
        if left(lengths_for(middle)) >= 0:
            high = middle
        else:
            low = middle + 1
    lengths = lengths_for(low)
    rest = left(lengths)
    while rest > 0:
        for length in range(2, LIMIT + 1):
            found = order[used[order] & (lengths[order] == length)][: rest >> LIMIT - length]
            lengths[found] -= 1
            rest -= found.size << LIMIT - length
    return np.where(used, lengths, 0).astype(np.uint8)


def table_of(counts: Ints, unit: int) -> Table | None:
    """The table for bytes with these counts; None if coding them saves too little."""
    values, weights = weights_of(counts, unit)
    if not weights[:ESCAPE].any():
        return None
    lengths = lengths_of(weights)
    bits = int((weights * lengths).sum()) + 8 * unit * int(weights[ESCAPE])
    if bits * SAVED > int(weights.sum()) * 8 * unit * (SAVED - 1):
        return None
    return Table(values, lengths)


def pack_table(table: Table) -> Bytes:
    """The bytes of a table, uint8, shape (152,)."""
    data = np.zeros(TABLE_NBYTES, np.uint8)
    data[:16] = table.values
    data[16:144] = table.lengths[:ESCAPE:2] | table.lengths[1:ESCAPE:2] << 4
    data[144] = table.lengths[ESCAPE]
    return data


def unpack_table(data: Bytes) -> Table | None:
    """Inverse of `pack_table`; None unless the code is complete and the rest is zero."""
    lengths = np.zeros(ESCAPE + 1, np.uint8)
    lengths[:ESCAPE:2], lengths[1:ESCAPE:2] = data[16:144] & 15, data[16:144] >> 4
    lengths[ESCAPE] = data[144]
    used = lengths[lengths > 0].astype(np.int64)
    bad = data[145:].any() or lengths.max() > LIMIT
    if bad or int((1 << LIMIT >> used).sum()) != 1 << LIMIT:
        return None
    return Table(data[:16].copy(), lengths)


@functools.cache
def reversed_bits() -> Ints:
    """Numbers of 12 bits with their bits in reverse order, int64, shape (4096,)."""
    i = np.arange(1 << LIMIT)
    found = np.zeros_like(i)
    for k in range(LIMIT):
        found |= (i >> k & 1) << LIMIT - 1 - k
    return found


def _order(table: Table) -> npt.NDArray[np.intp]:
    """Symbols that have codes, in the order of those."""
    order = np.argsort(table.lengths, kind="stable")
    return order[table.lengths[order] > 0]


def codes_of(table: Table) -> Ints:
    """The codes of symbols, to be written from the lowest bit on, int64, shape (257,)."""
    order = _order(table)
    widths = 1 << LIMIT >> table.lengths[order].astype(np.int64)
    codes = np.zeros(ESCAPE + 1, np.int64)
    codes[order] = reversed_bits()[np.cumsum(widths) - widths]
    return codes


def symbols_by_bits(table: Table) -> Ints:
    """The symbol whose code the 12 bits are, or begin with, int64, shape (4096,)."""
    order = _order(table)
    found = np.repeat(order, 1 << LIMIT >> table.lengths[order].astype(np.int64))
    return found[reversed_bits()]


def _classes_by_value(table: Table, unit: int) -> Ints:
    """The class of each byte, -1 if it has none."""
    found = np.full(256, -1, np.int64)
    if unit == 1:
        return np.arange(256)
    # Of equal values the first counts: unused ones are zeros.
    for k in reversed(range(CLASSES[unit])):
        found[table.values[k]] = k
    return found


def encode_block(table: Table, unit: int, plane: Bytes) -> Bytes:
    """The block of a tile's plane, uint8: 1 to 32768 bytes of it."""
    n = plane.size
    if (plane == plane[0]).all():
        return _head(CONSTANT, int(plane[0]), 0)
    padded = np.append(plane, np.full(-n % unit, plane[-1], np.uint8)).reshape(-1, unit)
    shifts = 8 // unit * np.arange(unit)
    classes = _classes_by_value(table, unit)[padded]
    symbols = np.where((classes < 0).any(axis=1), ESCAPE, (classes << shifts).sum(axis=1))
    symbols = np.where(table.lengths[symbols] == 0, ESCAPE, symbols)
    lengths = table.lengths[symbols].astype(np.int64)
    escaped = symbols == ESCAPE
    sizes = lengths + 8 * unit * escaped
    starts = np.cumsum(sizes) - sizes
    runs = np.add.reduceat(sizes, np.arange(0, sizes.size, RUN // unit))
    narrow = int(runs.max() - runs.min()) < 256
    base = int(runs.min()) if narrow else 0
    directory = (runs - base).astype("<u1" if narrow else "<u2").view(np.uint8)
    words = np.zeros(-(-int(sizes.sum()) // 32) + 2, np.uint64)
    _put(words, starts, codes_of(table)[symbols])
    if escaped.any() and not table.lengths[ESCAPE]:
        return _stored(plane)
    for k in range(unit):
        _put(words, (starts + lengths + 8 * k)[escaped], padded[escaped, k].astype(np.int64))
    coded = words[:-2].astype("<u4").view(np.uint8)
    if _padded(directory.size) + coded.size >= _padded(n):
        return _stored(plane)
    gap = np.zeros(-directory.size % 4, np.uint8)
    return np.concatenate((_head(NARROW if narrow else WIDE, 0, base), directory, gap, coded))


def _stored(plane: Bytes) -> Bytes:
    return np.concatenate((_head(STORED, 0, 0), plane, np.zeros(-plane.size % 4, np.uint8)))


def _padded(n: int) -> int:
    return -(-n // 4) * 4


def _head(mode: int, value: int, base: int) -> Bytes:
    return np.array([mode | value << 8 | base << 16], "<u4").view(np.uint8)


def _put(words: npt.NDArray[np.uint64], at: Ints, values: Ints) -> None:
    """Put `values` of up to 32 bits at bits `at` of words, of which 32 bits are used."""
    shifted = values.astype(np.uint64) << (at & 31).astype(np.uint64)
    np.bitwise_or.at(words, at >> 5, shifted & np.uint64(0xFFFFFFFF))
    np.bitwise_or.at(words, (at >> 5) + 1, shifted >> np.uint64(32))


def decode_block(table: Table, unit: int, data: Bytes, out: Bytes) -> int | None:
    """Decode a tile's plane of `out.size` bytes from the start of `data`.

    Returns:
        Bytes of the block, or None if it is not one.
    """
    n = out.size
    if data.size < 4:
        return None
    head = int(data[:4].view("<u4")[0])
    mode, value, base = head & 255, head >> 8 & 255, head >> 16
    if mode > WIDE or (value and mode != CONSTANT) or (base and mode != NARROW):
        return None
    if mode == CONSTANT:
        out[:] = value
        return 4
    if mode == STORED:
        end = 4 + _padded(n)
        if data.size < end or data[4 + n : end].any():
            return None
        out[:] = data[4 : 4 + n]
        return end
    runs, width = -(-n // RUN), 1 if mode == NARROW else 2
    at = 4 + _padded(runs * width)
    if data.size < at or data[4 + runs * width : at].any():
        return None
    sizes = data[4 : 4 + runs * width].view(f"<u{width}").astype(np.int64) + base
    ends = np.cumsum(sizes)
    bits = int(ends[-1])
    end = at + 4 * -(-bits // 32)
    if data.size < end:
        return None
    coded = np.append(data[at:end], np.zeros(16, np.uint8))
    if bits % 32 and int(coded[: end - at][-4:].view("<u4")[0]) >> bits % 32:
        return None
    if not _decode_runs(table, unit, coded, ends - sizes, ends, out):
        return None
    return end


def _decode_runs(table: Table, unit: int, coded: Bytes, at: Ints, ends: Ints, out: Bytes) -> bool:
    """Decode runs side by side; False unless each ends where the next one starts."""
    symbols, lengths = symbols_by_bits(table), table.lengths.astype(np.int64)
    units = np.full(at.size, RUN // unit)
    units[-1] = -(-(out.size - (at.size - 1) * RUN) // unit)
    padded = np.zeros((at.size, RUN // unit, unit), np.uint8)
    shifts = 8 // unit * np.arange(unit)
    at = at.copy()
    for k in range(int(units.max())):
        # Where a run is damaged its bits end, and zeros follow.
        begin = np.minimum(at, ends)
        found = symbols[_bits_at(coded, begin)]
        live = k < units
        at += np.where(live, lengths[found], 0)
        escaped = live & (found == ESCAPE)
        if unit == 1:
            padded[:, k, 0] = found
        else:
            classes = found[:, None] >> shifts & CLASSES[unit] - 1
            padded[:, k] = table.values[classes]
        for j in range(unit if escaped.any() else 0):
            raw = _bits_at(coded, np.minimum(at, ends)) & 255
            padded[:, k, j] = np.where(escaped, raw, padded[:, k, j])
            at += np.where(escaped, 8, 0)
    out[:] = padded.reshape(-1)[: out.size]
    return bool((at == ends).all())


def _bits_at(coded: Bytes, at: Ints) -> Ints:
    """12 bits at each of the bit positions `at`."""
    byte = at >> 3
    window = coded[byte].astype(np.int64) | coded[byte + 1].astype(np.int64) << 8
    window |= coded[byte + 2].astype(np.int64) << 16
    found: Ints = window >> (at & 7) & (1 << LIMIT) - 1
    return found
