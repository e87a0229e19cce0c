# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment,misc"
"""Slots: what a thread has of a tile in codecs that store codes by planes of 8 rows.

A slot is 8 rows of 8 neighbouring elements; its rows are APART elements apart, and APART // 8 slots
lie side by side. Elements are tuples of columns, shape [SLOTS, 4]: two for each row, with the first
and the second elements of its pairs; words have both elements of a pair.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .frame_triton import accumulator, add_to
from .minifloat_triton import MAGNITUDE, as_bits, by_ptx, elements_at, halves
from .runs_triton import rounded_pair, word_values


@triton.jit
def _starts(SLOTS: tl.constexpr, APART: tl.constexpr, SIZE: tl.constexpr):
    """Where a tile's slots start, shape [SLOTS, 1], in units of which a row of a slot has SIZE."""
    LANES: tl.constexpr = APART // 8
    slot = tl.arange(0, SLOTS)
    return (slot // LANES * (LANES * 8 * SIZE) + slot % LANES * SIZE)[:, None]


@triton.jit
def row_at(k, SLOTS: tl.constexpr, APART: tl.constexpr):
    """Elements of a tile that row `k` of its slots has, int32, shape [SLOTS, 8]."""
    return _starts(SLOTS, APART, 8) + (k * APART + tl.arange(0, 8))[None, :]


@triton.jit
def column_at(k: tl.constexpr, SLOTS: tl.constexpr, APART: tl.constexpr):
    """Elements of a tile that column `k` has, int32, shape [SLOTS, 4]."""
    return _starts(SLOTS, APART, 8) + (k // 2 * APART + k % 2 + 2 * tl.arange(0, 4))[None, :]


@triton.jit
def to_pairs(row, SLOTS: tl.constexpr):
    """The two columns of a row, shape [SLOTS, 8]."""
    return tl.split(tl.reshape(row, [SLOTS, 4, 2]))


@triton.jit
def to_row(a, b, SLOTS: tl.constexpr):
    """Inverse of `to_pairs`."""
    return tl.reshape(tl.join(a, b), [SLOTS, 8])


@triton.jit
def _pairs_of(low, high, SLOTS: tl.constexpr):
    """`to_pairs` of a row in halves, shape [SLOTS, 4]."""
    a, b = tl.split(tl.reshape(low, [SLOTS, 2, 2]))
    c, d = tl.split(tl.reshape(high, [SLOTS, 2, 2]))
    even = tl.reshape(tl.permute(tl.join(a, c), [0, 2, 1]), [SLOTS, 4])
    return even, tl.reshape(tl.permute(tl.join(b, d), [0, 2, 1]), [SLOTS, 4])


@triton.jit
def load_slots(
    x,
    first,
    left,
    COUNT: tl.constexpr,
    L: tl.constexpr,
    WORDS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The float32 columns of COUNT rows from row `first` on, or with WORDS, which elements of 16
    bits alone have, their words.

    `x` points to the bytes of the tile, elements of `L.x_item` bytes. MASKED: those from number
    `left` on are 0, and others may lie anywhere.
    """
    columns = ()
    for k in tl.static_range(COUNT):
        if (L.x_item == 2) and (not MASKED):
            i = (
                _starts(L.rows, L.apart, 4)
                + ((first + k) * (L.apart // 2) + tl.arange(0, 4))[None, :]
            )
            words = (tl.load(x.to(tl.pointer_type(tl.uint32)) + i),)
        elif L.x_item == 4:
            # Of a whole row two threads would load 16 bytes each, and exchange them.
            at = _starts(L.rows, L.apart, 8) + ((first + k) * L.apart + tl.arange(0, 4))[None, :]
            ptr = elements_at(x, 4) + at
            if MASKED:
                low = tl.load(ptr, mask=at < left, other=0)
                high = tl.load(ptr + 4, mask=at + 4 < left, other=0)
            else:
                low, high = tl.load(ptr), tl.load(ptr + 4)
            words = _pairs_of(low, high, L.rows)
        else:
            at = row_at(first + k, L.rows, L.apart)
            if MASKED:
                row = tl.load(elements_at(x, L.x_item) + at, mask=at < left, other=0)
            else:
                row = tl.load(elements_at(x, L.x_item) + at)
            words = to_pairs(row, L.rows)
            if L.x_item == 2:
                words = (words[0].to(tl.uint32) | (words[1].to(tl.uint32) << 16),)
        columns = columns + (words if WORDS else word_values(words, L.exponent, L.x_item))
    return columns


@triton.jit
def _larger(a, b):
    """The larger of each half of words."""
    return by_ptx("max.u16x2 $0, $1, $2;", "=r,r,r", (a, b))


@triton.jit
def top_of_words(words, EXP: tl.constexpr):
    """Bits of the largest magnitude of a slot's elements, int32, shape [SLOTS], from 8 rows of
    words of two elements, whose bits have the order of the numbers.
    """
    top = words[0] & 0x7FFF7FFF
    for k in tl.static_range(1, 8):
        top = _larger(top, words[k] & 0x7FFF7FFF)
    a, b = halves(tl.reduce(top, 1, _larger), EXP)
    return tl.maximum(as_bits(a) & MAGNITUDE, as_bits(b) & MAGNITUDE)


@triton.jit
def slots_before(v, left, SLOTS: tl.constexpr, APART: tl.constexpr):
    """Columns, or words, with 0 for the elements from number `left` of the tile on."""
    kept = ()
    for k in tl.static_range(len(v)):
        if len(v) == 8:
            low = tl.where(column_at(2 * k, SLOTS, APART) < left, 0xFFFF, 0)
            high = tl.where(column_at(2 * k + 1, SLOTS, APART) < left, 0xFFFF, 0)
            kept = kept + (v[k] & (low | (high << 16)).to(tl.uint32, bitcast=True),)
        else:
            kept = kept + (tl.where(column_at(k, SLOTS, APART) < left, v[k], 0.0),)
    return kept


@triton.jit
def store_slots(
    out,
    words,
    lo,
    hi,
    SLOTS: tl.constexpr,
    APART: tl.constexpr,
    ITEM: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Store words of columns, of two elements or of one, at `out`, a pointer to bytes.

    MASKED: elements number `lo` to `hi` of the tile, which may lie anywhere.
    """
    for k in tl.static_range(8):
        if (ITEM == 2) and (not MASKED):
            i = _starts(SLOTS, APART, 4) + (k * (APART // 2) + tl.arange(0, 4))[None, :]
            tl.store(out.to(tl.pointer_type(tl.uint32)) + i, words[k])
        else:
            at = row_at(k, SLOTS, APART)
            if ITEM == 2:
                row = to_row(words[k].to(tl.uint16), (words[k] >> 16).to(tl.uint16), SLOTS)
            else:
                row = to_row(words[2 * k], words[2 * k + 1], SLOTS)
            if MASKED:
                tl.store(elements_at(out, ITEM) + at, row, mask=(at >= lo) & (at < hi))
            else:
                tl.store(elements_at(out, ITEM) + at, row)


@triton.jit
def add_slots(
    out,
    y,
    lo,
    hi,
    SLOTS: tl.constexpr,
    APART: tl.constexpr,
    EXP: tl.constexpr,
    ITEM: tl.constexpr,
    ADD: tl.constexpr,
    CVT: tl.constexpr,
    LIMIT: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add columns, rounded to the dtype as by `rounded_pair`, to elements of ADD bytes; see
    `store_slots`.
    """
    for k in tl.static_range(8):
        a, b = rounded_pair(y[2 * k], y[2 * k + 1], EXP, ITEM, LIMIT, CVT)
        at = row_at(k, SLOTS, APART)
        use = None
        if MASKED:
            use = (at >= lo) & (at < hi)
        add_to(accumulator(out, EXP, ADD) + at, to_row(a, b, SLOTS), use, EXP, ADD)
