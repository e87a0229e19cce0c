# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""zipccl on the CPU with Numba: the bytes of codecs/zipccl.py at memory speed.

Loops run over flat arrays with a constant tile width and L1-sized scratch, and every operand is
cast to its unsigned type: that is the form LLVM vectorises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit, types
from numba.extending import intrinsic, overload

from ..formats.checksum import MASK64
from ..formats.checksum_cpu import sum_bytes, sum_words
from ..numba_cache import cached
from .base import Bits, Bytes, Chunk, ChunkDecoded, ChunkResult, Key, Plan
from .threads import run, spans
from .zipccl import (
    CANDIDATES,
    COLUMN_STEP,
    COLUMNS,
    ROWS,
    TILE,
    WINDOW,
    ZERO_MODE,
    Zipccl,
    entries_fit,
    fields_of,
    static_views,
    tile_count,
    tiles_nbytes,
)

U1, U2, U4, U8 = np.uint8, np.uint16, np.uint32, np.uint64
I8 = np.int64
_SAMPLED = TILE // 8
_WORDS = COLUMNS // 8
_BASE_MASK = ZERO_MODE - 1
_PROBLEMS = (
    None,
    "escape offsets or windows out of range",
    "escape count of a tile",
    "an escaped exponent",
    "padding elements of the last tile",
)


@intrinsic
def _ctz(typingctx, x):
    """Number of trailing zero bits; 64 for zero."""

    def codegen(context, builder, signature, args):
        return builder.cttz(args[0], context.get_constant(types.boolean, False))

    return types.uint64(types.uint64), codegen


@intrinsic
def _popcount(typingctx, x):
    """Number of set bits."""

    def codegen(context, builder, signature, args):
        return builder.ctpop(args[0])

    return types.uint64(types.uint64), codegen


def _split(x, e, top, block, mantissa):
    """Exponents of a tile to `e`, sign and mantissa to the streams in `block` and to `top`."""


def _join(e, top, block, x, mantissa):
    """Inverse of `_split`."""


# A shift by a variable amount is done in 64-bit lanes, so each width of mantissa gets its own loop.


def _split1_by(m):
    @njit(nogil=True)
    def split1(x, e, top):
        for i in range(TILE):
            v = x[i]
            e[i] = U1(U1(v & U1(127)) >> U1(m))
            top[i] = U1(U1(U1(v >> U1(7)) << U1(m)) | U1(v & U1((1 << m) - 1)))

    return split1


def _join1_by(m):
    @njit(nogil=True)
    def join1(e, top, x):
        for i in range(TILE):
            s = top[i]
            low = U1(U1(e[i] << U1(m)) | U1(s & U1((1 << m) - 1)))
            x[i] = U1(U1(U1(s >> U1(m)) << U1(7)) | low)

    return join1


_split_e4m3, _split_e5m2 = _split1_by(3), _split1_by(2)
_join_e4m3, _join_e5m2 = _join1_by(3), _join1_by(2)


@njit(nogil=True)
def _split_bf16(x, e, block):
    for i in range(TILE):
        v = x[i]
        e[i] = U1(v >> U2(7))
        block[i] = U1(U2(U2(v >> U2(15)) << U2(7)) | U2(v & U2(127)))


@njit(nogil=True)
def _join_bf16(e, block, x):
    for i in range(TILE):
        s = U2(block[i])
        x[i] = U2(U2(U2(s >> U2(7)) << U2(15)) | U2(U2(U2(e[i]) << U2(7)) | U2(s & U2(127))))


@njit(nogil=True)
def _split_f16(x, e, top, block):
    for i in range(TILE):
        v = x[i]
        e[i] = U1(U2(v >> U2(10)) & U2(31))
        block[i] = U1(v)
        top[i] = U1(U2(U2(v >> U2(15)) << U2(2)) | U2(U2(v >> U2(8)) & U2(3)))


@njit(nogil=True)
def _join_f16(e, top, block, x):
    for i in range(TILE):
        s = U2(top[i])
        high = U2(U2(U2(s >> U2(2)) << U2(15)) | U2(U2(s & U2(3)) << U2(8)))
        x[i] = U2(high | U2(U2(U2(e[i]) << U2(10)) | U2(block[i])))


@overload(_split)
def _split_of(x, e, top, block, mantissa):
    if x.dtype == types.uint8:

        def split(x, e, top, block, mantissa):
            if mantissa == 3:
                _split_e4m3(x, e, top)
            else:
                _split_e5m2(x, e, top)

    elif x.dtype == types.uint16:

        def split(x, e, top, block, mantissa):
            if mantissa == 7:
                _split_bf16(x, e, block)
            else:
                _split_f16(x, e, top, block)

    elif x.dtype == types.uint32:

        def split(x, e, top, block, mantissa):
            low16 = block[: 2 * TILE].view(np.uint16)
            high8 = block[2 * TILE : 3 * TILE]
            for i in range(TILE):
                v = x[i]
                e[i] = U1(v >> U4(23))
                low16[i] = U2(v)
                high8[i] = U1(U4(U4(v >> U4(31)) << U4(7)) | U4(U4(v >> U4(16)) & U4(127)))

    else:

        def split(x, e, top, block, mantissa):
            low32 = block[: 4 * TILE].view(np.uint32)
            mid16 = block[4 * TILE : 6 * TILE].view(np.uint16)
            for i in range(TILE):
                v = x[i]
                e[i] = U2(U8(v >> U8(52)) & U8(2047))
                low32[i] = U4(v)
                mid16[i] = U2(v >> U8(32))
                top[i] = U1(U8(U8(v >> U8(63)) << U8(4)) | U8(U8(v >> U8(48)) & U8(15)))

    return split


@overload(_join)
def _join_of(e, top, block, x, mantissa):
    if x.dtype == types.uint8:

        def join(e, top, block, x, mantissa):
            if mantissa == 3:
                _join_e4m3(e, top, x)
            else:
                _join_e5m2(e, top, x)

    elif x.dtype == types.uint16:

        def join(e, top, block, x, mantissa):
            if mantissa == 7:
                _join_bf16(e, block, x)
            else:
                _join_f16(e, top, block, x)

    elif x.dtype == types.uint32:

        def join(e, top, block, x, mantissa):
            low16 = block[: 2 * TILE].view(np.uint16)
            high8 = block[2 * TILE : 3 * TILE]
            for i in range(TILE):
                s = U4(high8[i])
                high = U4(U4(U4(s >> U4(7)) << U4(31)) | U4(U4(s & U4(127)) << U4(16)))
                x[i] = U4(high | U4(U4(U4(e[i]) << U4(23)) | U4(low16[i])))

    else:

        def join(e, top, block, x, mantissa):
            low32 = block[: 4 * TILE].view(np.uint32)
            mid16 = block[4 * TILE : 6 * TILE].view(np.uint16)
            for i in range(TILE):
                s = U8(top[i])
                high = U8(U8(U8(s >> U8(4)) << U8(63)) | U8(U8(s & U8(15)) << U8(48)))
                high = U8(high | U8(U8(e[i]) << U8(52)))
                x[i] = U8(high | U8(U8(U8(mid16[i]) << U8(32)) | U8(low32[i])))

    return join


@njit(nogil=True)
def _count_window(sample, n, b, top, lanes, highs):
    """How many of a sample are in the window at `b`, are `b`, are below `top`; the largest below.

    Whole blocks of 512 go through 64 lanes, eight elements each.
    """
    one = sample.dtype.type
    inside = I8(0)
    lowest = I8(0)
    below = I8(0)
    highest = one(0)
    blocks = n // _SAMPLED
    for k in range(blocks):
        block = sample[k * _SAMPLED : (k + 1) * _SAMPLED]
        for w in range(64):
            c0 = U1(0)
            c1 = U1(0)
            c2 = U1(0)
            h = one(0)
            for r in range(8):
                v = block[r * 64 + w]
                d = one(v - b)
                c0 += U1(d < one(WINDOW))
                c1 += U1(d == one(0))
                c2 += U1(v < top)
                h = max(h, v if v < top else one(0))
            lanes[w] = c0
            lanes[64 + w] = c1
            lanes[128 + w] = c2
            highs[w] = h
        for w in range(64):
            inside += I8(lanes[w])
            lowest += I8(lanes[64 + w])
            below += I8(lanes[128 + w])
            highest = max(highest, highs[w])
    for i in range(blocks * _SAMPLED, n):
        v = sample[i]
        d = one(v - b)
        inside += I8(d < one(WINDOW))
        lowest += I8(d == one(0))
        below += I8(v < top)
        highest = max(highest, v if v < top else one(0))
    return inside, lowest, below, I8(highest)


@njit(nogil=True)
def _tile_window(sample, n, lanes, highs):
    """Index entry of a tile; see zipccl.tile_window. Stops where no lower window can do better."""
    one = sample.dtype.type
    top = I8(0)
    for i in range(n):
        top = max(top, I8(sample[i]))
    zeros = _count_window(sample, n, one(0), one(0), lanes, highs)[1]
    best = I8(-1)
    entry = I8(0)
    for _ in range(CANDIDATES):
        base = max(top - (WINDOW - 1), I8(0))
        coded, lowest, below, following = _count_window(
            sample, n, one(base), one(top), lanes, highs
        )
        gain = zeros - lowest if base > 0 else I8(0)
        if gain > 0:
            coded += gain
        if coded > best:
            best = coded
            entry = base | (ZERO_MODE if gain > 0 else 0)
        if below <= best:
            break
        top = following
    return entry


@njit(nogil=True)
def _pack_codes(e, base, zero_mode, planes, escaped):
    """Three code planes of a tile and its escape flags, one byte per column each.

    `base` must come in the type of `e`: cast here, it would make LLVM work in 64-bit lanes.
    """
    one = e.dtype.type
    base1 = U1(base)
    seven = one(WINDOW)
    if not zero_mode:
        for w in range(COLUMNS):
            p0 = U1(0)
            p1 = U1(0)
            p2 = U1(0)
            f = U1(0)
            for r in range(ROWS):
                row = U1(r)
                m = U1(min(one(e[r * COLUMNS + w] - base), seven))
                c = U1(m + base1)
                p0 |= U1(U1(c & U1(1)) << row)
                p1 |= U1(U1(U1(c >> U1(1)) & U1(1)) << row)
                p2 |= U1(U1(U1(c >> U1(2)) & U1(1)) << row)
                f |= U1(U1(m == U1(7)) << row)
            planes[w] = p0
            planes[COLUMNS + w] = p1
            planes[2 * COLUMNS + w] = p2
            escaped[w] = f
    else:
        for w in range(COLUMNS):
            p0 = U1(0)
            p1 = U1(0)
            p2 = U1(0)
            f = U1(0)
            for r in range(ROWS):
                row = U1(r)
                v = e[r * COLUMNS + w]
                m = U1(min(one(v - base), seven))
                m = U1(7) if m == U1(0) else m
                m = U1(0) if v == one(0) else m
                c = U1(m + base1)
                p0 |= U1(U1(c & U1(1)) << row)
                p1 |= U1(U1(U1(c >> U1(1)) & U1(1)) << row)
                p2 |= U1(U1(U1(c >> U1(2)) & U1(1)) << row)
                f |= U1(U1(m == U1(7)) << row)
            planes[w] = p0
            planes[COLUMNS + w] = p1
            planes[2 * COLUMNS + w] = p2
            escaped[w] = f


@njit(nogil=True)
def _unpack_codes(planes, base, zero_mode, e, escaped):
    """Exponents of the coded elements of a tile, and its escape flags; `base` as above."""
    one = e.dtype.type
    base1 = U1(base)
    for w in range(COLUMNS):
        p0 = planes[w]
        p1 = planes[COLUMNS + w]
        p2 = planes[2 * COLUMNS + w]
        f = U1(0)
        for r in range(ROWS):
            row = U1(r)
            low = U1(U1(U1(p0 >> row) & U1(1)) | U1(U1(U1(p1 >> row) & U1(1)) << U1(1)))
            c = U1(low | U1(U1(U1(p2 >> row) & U1(1)) << U1(2)))
            m = U1(U1(c - base1) & U1(7))
            e[r * COLUMNS + w] = one(base + one(m))
            f |= U1(U1(m == U1(7)) << row)
        escaped[w] = f
    if zero_mode:
        for i in range(TILE):
            e[i] = one(0) if e[i] == base else e[i]


def _pack_top_by(extra):
    @njit(nogil=True)
    def pack_top(top, planes):
        for k in range(extra):
            for w in range(COLUMNS):
                p = U1(0)
                for r in range(ROWS):
                    p |= U1(U1(U1(top[r * COLUMNS + w] >> U1(k)) & U1(1)) << U1(r))
                planes[k * COLUMNS + w] = p

    return pack_top


def _unpack_top_by(extra):
    @njit(nogil=True)
    def unpack_top(planes, top):
        for w in range(COLUMNS):
            for r in range(ROWS):
                v = U1(0)
                for k in range(extra):
                    v |= U1(U1(U1(planes[k * COLUMNS + w] >> U1(r)) & U1(1)) << U1(k))
                top[r * COLUMNS + w] = v

    return unpack_top


_pack_top3, _pack_top4, _pack_top5 = _pack_top_by(3), _pack_top_by(4), _pack_top_by(5)
_unpack_top3, _unpack_top4, _unpack_top5 = _unpack_top_by(3), _unpack_top_by(4), _unpack_top_by(5)


@njit(nogil=True)
def _pack_top(top, extra, planes):
    """Bits 0 to `extra - 1` of `top` as planes."""
    if extra == 3:
        _pack_top3(top, planes)
    elif extra == 4:
        _pack_top4(top, planes)
    elif extra == 5:
        _pack_top5(top, planes)


@njit(nogil=True)
def _unpack_top(planes, extra, top):
    """Inverse of `_pack_top`."""
    if extra == 3:
        _unpack_top3(planes, top)
    elif extra == 4:
        _unpack_top4(planes, top)
    elif extra == 5:
        _unpack_top5(planes, top)


@njit(nogil=True)
def _gather(e, flags, escapes, at):
    """Append the flagged exponents, column by column; returns the count past which all lie."""
    if at + TILE <= escapes.size:
        for k in range(_WORDS):
            bits = flags[k]
            # Three steps without a branch cover almost every word of eight columns.
            for _ in range(3):
                t = _ctz(bits)
                escapes[at] = e[I8(t & U8(7)) * COLUMNS + k * 8 + I8(t >> U8(3))]
                at += I8(bits != U8(0))
                bits &= bits - U8(1)
            while bits != U8(0):
                t = _ctz(bits)
                escapes[at] = e[I8(t & U8(7)) * COLUMNS + k * 8 + I8(t >> U8(3))]
                at += 1
                bits &= bits - U8(1)
    elif at >= escapes.size:
        for k in range(_WORDS):
            at += I8(_popcount(flags[k]))
    else:
        for k in range(_WORDS):
            bits = flags[k]
            while bits != U8(0):
                t = _ctz(bits)
                if at < escapes.size:
                    escapes[at] = e[I8(t & U8(7)) * COLUMNS + k * 8 + I8(t >> U8(3))]
                at += 1
                bits &= bits - U8(1)
    return at


@njit(nogil=True)
def _scatter(e, flags, escapes, begin, end):
    """Put escapes `begin` to `end` back where the flags are; their number is that of the flags."""
    if begin == end:
        return
    at = begin
    last = end - 1
    for k in range(_WORDS):
        bits = flags[k]
        for _ in range(3):
            t = _ctz(bits)
            i = I8(t & U8(7)) * COLUMNS + k * 8 + I8(t >> U8(3))
            v = escapes[min(at, last)]
            e[i] = v if bits != U8(0) else e[i]
            at += I8(bits != U8(0))
            bits &= bits - U8(1)
        while bits != U8(0):
            t = _ctz(bits)
            e[I8(t & U8(7)) * COLUMNS + k * 8 + I8(t >> U8(3))] = escapes[at]
            at += 1
            bits &= bits - U8(1)


@njit(nogil=True)
def _escapes_are_outside(escapes, begin, end, entry, exponent_bits):
    one = escapes.dtype.type
    zero_mode = entry >= ZERO_MODE
    base = one(entry & _BASE_MASK)
    first = one(base + one(1)) if zero_mode else base
    length = one(WINDOW - 1) if zero_mode else one(WINDOW)
    largest = one((1 << exponent_bits) - 1)
    bad = U1(0)
    for i in range(begin, end):
        v = escapes[i]
        bad |= U1(one(v - first) < length) | U1(v > largest)
    if zero_mode:
        for i in range(begin, end):
            bad |= U1(escapes[i] == one(0))
    return bad == U1(0)


@njit(nogil=True)
def _narrow(block, wide, columns, streams_nbytes, planes):
    """Copy a tile of `columns` columns out of a full-width block; see `_widen`."""
    at = 0
    source = 0
    for width in (4, 2, 1):
        if streams_nbytes & width:
            for r in range(ROWS):
                for i in range(columns * width):
                    block[at + i] = wide[source + r * COLUMNS * width + i]
                at += columns * width
            source += TILE * width
    for k in range(planes):
        for i in range(columns):
            block[at + i] = wide[source + k * COLUMNS + i]
        at += columns


@njit(nogil=True)
def _widen(block, wide, columns, streams_nbytes, planes):
    """Copy a tile of `columns` columns into a full-width block."""
    at = 0
    target = 0
    for width in (4, 2, 1):
        if streams_nbytes & width:
            for r in range(ROWS):
                for i in range(columns * width):
                    wide[target + r * COLUMNS * width + i] = block[at + i]
                at += columns * width
            target += TILE * width
    for k in range(planes):
        for i in range(columns):
            wide[target + k * COLUMNS + i] = block[at + i]
        at += columns


@njit(nogil=True)
def _columns_of(nelem):
    step = ROWS * COLUMN_STEP
    return (nelem % TILE + step - 1) // step * COLUMN_STEP


@cached(nogil=True)
def _encode_span(x, first, last, tiles, offsets, entries, escapes, mantissa, extra, fixed):
    """Encode tiles `first` to `last` of the chunk `x`; offsets count from the span's first escape.

    `fixed` is the index entry of all tiles, or -1. Returns the number of escapes, which may exceed
    the room in `escapes`, and the keyed sum of the tile blocks.
    """
    streams = (1 + mantissa) // 8
    planes = 3 + extra
    nbytes = TILE * streams + planes * COLUMNS
    codes_at = TILE * streams
    e = np.empty(TILE + 64, escapes.dtype)
    sample = np.empty(TILE, escapes.dtype)
    e_words, sample_words = e.view(np.uint64), sample.view(np.uint64)
    group = 2 * e.itemsize
    lanes = np.empty(192, np.uint8)
    highs = np.empty(64, escapes.dtype)
    top = np.empty(TILE, np.uint8)
    escaped = np.empty(COLUMNS, np.uint8)
    flags = escaped.view(np.uint64)
    words = tiles[: tiles.size // 4 * 4].view(np.uint32)
    full = x.size // TILE
    count = 0
    total = U8(0)
    for t in range(first, min(last, full)):
        block = tiles[t * nbytes : (t + 1) * nbytes]
        _split(x[t * TILE : (t + 1) * TILE], e, top, block, mantissa)
        if fixed >= 0:
            entry = fixed
        else:
            for k in range(TILE // 128):
                for i in range(group):
                    sample_words[k * group + i] = e_words[(8 * k + k % 8) * group + i]
            entry = _tile_window(sample, _SAMPLED, lanes, highs)
        _pack_codes(
            e, e.dtype.type(entry & _BASE_MASK), entry >= ZERO_MODE, block[codes_at:], escaped
        )
        _pack_top(top, extra, block[codes_at + 3 * COLUMNS :])
        offsets[t] = U4(count)
        entries[t] = U2(entry)
        count = _gather(e, flags, escapes, count)
        total += sum_words(words[t * nbytes // 4 : (t + 1) * nbytes // 4], t * nbytes // 4)
    if last > full:
        n = x.size - full * TILE
        columns = _columns_of(n)
        xs = np.zeros(TILE, x.dtype)
        for i in range(n):
            xs[i // columns * COLUMNS + i % columns] = x[full * TILE + i]
        wide = np.empty(nbytes, np.uint8)
        _split(xs, e, top, wide, mantissa)
        if fixed >= 0:
            entry = fixed
        else:
            for i in range(n):
                sample[i] = e[i // columns * COLUMNS + i % columns]
            entry = _tile_window(sample, n, lanes, highs)
        padding = e.dtype.type((entry & _BASE_MASK) + WINDOW - 1)
        for r in range(ROWS):
            for w in range(COLUMNS):
                if w >= columns or r * columns + w >= n:
                    e[r * COLUMNS + w] = padding
        _pack_codes(
            e, e.dtype.type(entry & _BASE_MASK), entry >= ZERO_MODE, wide[codes_at:], escaped
        )
        _pack_top(top, extra, wide[codes_at + 3 * COLUMNS :])
        offsets[full] = U4(count)
        entries[full] = U2(entry)
        count = _gather(e, flags, escapes, count)
        at = full * nbytes
        end = at + columns * (ROWS * streams + planes)
        _narrow(tiles[at:end], wide, columns, streams, planes)
        total += sum_words(words[at // 4 : end // 4], at // 4)
    return count, total


@cached(nogil=True)
def _decode_span(
    tiles, offsets, entries, escapes, x, nelem, first, last, mantissa, exponent, extra, with_sum
):
    """Decode tiles `first` to `last` of a chunk of `nelem` elements to the start of `x`.

    Returns an index into `_PROBLEMS` and the keyed sum of the tile blocks. Nothing outside the
    arrays is touched, whatever the bytes say.
    """
    streams = (1 + mantissa) // 8
    planes = 3 + extra
    nbytes = TILE * streams + planes * COLUMNS
    codes_at = TILE * streams
    e = np.empty(TILE + 64, escapes.dtype)
    top = np.empty(TILE, np.uint8)
    escaped = np.empty(COLUMNS, np.uint8)
    flags = escaped.view(np.uint64)
    wide = np.empty(nbytes, np.uint8)
    xs = np.empty(TILE, x.dtype)
    words = tiles[: tiles.size // 4 * 4].view(np.uint32)
    full = nelem // TILE
    total = U8(0)
    problem = 0
    for t in range(first, last):
        at = t * nbytes
        columns = COLUMNS if t < full else _columns_of(nelem)
        end = at + columns * (ROWS * streams + planes)
        if with_sum:
            total += sum_words(words[at // 4 : end // 4], at // 4)
        entry = I8(entries[t])
        base = entry & _BASE_MASK
        begin_escapes = I8(offsets[t])
        end_escapes = I8(offsets[t + 1]) if t + 1 < offsets.size else escapes.size
        if (
            (t == 0 and begin_escapes != 0)
            or begin_escapes > end_escapes
            or end_escapes > escapes.size
            or base + WINDOW > 1 << exponent
            or entry == ZERO_MODE
        ):
            problem = 1
            continue
        if t < full:
            _unpack_codes(
                tiles[at + codes_at : end], e.dtype.type(base), entry >= ZERO_MODE, e, escaped
            )
        else:
            _widen(tiles[at:end], wide, columns, streams, planes)
            _unpack_codes(wide[codes_at:], e.dtype.type(base), entry >= ZERO_MODE, e, escaped)
            escaped[columns:] = U1(0)
        found = U8(0)
        for k in range(_WORDS):
            found += _popcount(flags[k])
        if I8(found) != end_escapes - begin_escapes:
            problem = 2
            continue
        if not _escapes_are_outside(escapes, begin_escapes, end_escapes, entry, exponent):
            problem = 3
            continue
        _scatter(e, flags, escapes, begin_escapes, end_escapes)
        if t < full:
            _unpack_top(tiles[at + codes_at + 3 * COLUMNS : end], extra, top)
            to = (t - first) * TILE
            _join(e, top, tiles[at:end], x[to : to + TILE], mantissa)
        else:
            _unpack_top(wide[codes_at + 3 * COLUMNS :], extra, top)
            _join(e, top, wide, xs, mantissa)
            n = nelem - full * TILE
            to = (full - first) * TILE
            for i in range(n):
                x[to + i] = xs[i // columns * COLUMNS + i % columns]
            padding = x.dtype.type(base + WINDOW - 1) << x.dtype.type(mantissa)
            for i in range(n, ROWS * columns):
                if xs[i // columns * COLUMNS + i % columns] != padding:
                    problem = 4
    return problem, total


@cached(nogil=True)
def _decode_buffer(data, x, escapes, places, gaps, dynamic_nbytes, mantissa, exponent, extra):
    """Decode the packed buffer of one chunk, `data`, to `x`. `escapes` says their type.

    Returns False if the payload is bad or one of the `gaps` is not zero, and the keyed sum.
    """
    static_at, dynamic_at, used, index_at, n_tiles = places
    found = U1(0)
    for k in range(gaps.shape[0]):
        for i in range(gaps[k, 0], gaps[k, 1]):
            found |= data[i]
    for i in range(dynamic_at + dynamic_nbytes, data.size):
        found |= data[i]
    static = data[static_at:dynamic_at]
    dynamic = data[dynamic_at : dynamic_at + dynamic_nbytes]
    entries_at = index_at + 4 * n_tiles
    problem, total = _decode_span(
        static,
        static[index_at:entries_at].view(np.uint32),
        static[entries_at : entries_at + 2 * n_tiles].view(np.uint16),
        dynamic.view(escapes.dtype),
        x,
        x.size,
        0,
        n_tiles,
        mantissa,
        exponent,
        extra,
        True,
    )
    total += sum_bytes(static[used:], used // 4) + sum_bytes(dynamic, static.size // 4)
    return problem == 0 and found == U1(0), total


def _read_only(array: Bits) -> Bits:
    """A read-only view: so that each kernel is compiled for one kind of array."""
    view = array.view()
    view.flags.writeable = False
    return view


def encode_chunk(
    spec: Zipccl,
    chunk: Chunk,
    bits: Bits,
    *,
    stats: npt.NDArray[Any] | None = None,
    key: Key | None = None,
    threads: int = 1,
) -> ChunkResult:
    """See `zipccl.encode_chunk`."""
    f = fields_of(chunk.dtype)
    tiles, offsets, entries = static_views(chunk)
    slot = chunk.dynamic[: chunk.dynamic.size // f.width * f.width].view(f.escape_dtype)
    fixed = -1 if stats is None else int(stats[0])
    x = _read_only(bits)
    cuts = spans(offsets.size, bits.nbytes, threads)
    rooms = [slot] + [
        np.empty(min(slot.size, (last - first) * TILE) + TILE, f.escape_dtype)
        for first, last in cuts[1:]
    ]
    args = (f.mantissa, f.extra, fixed)

    def task(first: int, last: int, room: Bits) -> Any:
        return _encode_span(x, first, last, tiles, offsets, entries, room, *args)

    results = run(task, [(*cut, room) for cut, room in zip(cuts, rooms, strict=True)])
    count = 0
    words_sum = 0
    for (first, last), room, (found, part) in zip(cuts, rooms, results, strict=True):
        words_sum += int(part)
        if count > 0:
            offsets[first:last] += np.uint32(count)
        if room is not slot and count + found <= slot.size:
            slot[count : count + found] = room[:found]
        count += found
    if count > slot.size:
        return ChunkResult(count * f.width)
    used = tiles_nbytes(f, chunk.nelem)
    words_sum += int(sum_bytes(chunk.static[used:], used // 4))
    dynamic = chunk.dynamic[: count * f.width]
    words_sum += int(sum_bytes(dynamic, chunk.static.size // 4))
    return ChunkResult(count * f.width, words_sum & MASK64)


def decode_chunk(
    spec: Zipccl, chunk: Chunk, out: Bits, start: int = 0, *, threads: int = 1
) -> ChunkDecoded:
    """See `zipccl.decode_chunk`. The sum is there when the whole chunk was decoded."""
    f = fields_of(chunk.dtype)
    if chunk.nelem == 0 or chunk.dynamic.size % f.width:
        size = chunk.dynamic.size
        return ChunkDecoded(f"{size} bytes of escapes of {f.width} bytes each" if size else None)
    static = _read_only(chunk.static)
    dynamic = _read_only(chunk.dynamic)
    tiles, offsets, entries = static_views(chunk._replace(static=static))
    escapes = dynamic.view(f.escape_dtype)
    whole = out.size == chunk.nelem
    first, last = start // TILE, -(-(start + out.size) // TILE)
    n_covered = min(last * TILE, chunk.nelem) - first * TILE
    x = out if n_covered == out.size else np.empty(n_covered, chunk.dtype.bits)
    cuts = spans(last - first, x.nbytes, threads)
    args = (f.mantissa, f.exponent, f.extra, whole)

    def task(lo: int, hi: int) -> Any:
        return _decode_span(
            tiles,
            offsets,
            entries,
            escapes,
            x[lo * TILE :],
            chunk.nelem,
            first + lo,
            first + hi,
            *args,
        )

    results = run(task, cuts)
    problem = next((_PROBLEMS[p] for p, _ in results if p), None)
    if problem is None and not entries_fit(spec, entries, slice(first, last)):
        problem = "windows that differ in a tensor with one window"
    if x is not out:
        out[:] = x[start - first * TILE :][: out.size]
    if not whole:
        return ChunkDecoded(problem)
    words_sum = sum(int(part) for _, part in results)
    used = tiles_nbytes(f, chunk.nelem)
    words_sum += int(sum_bytes(static[used:], used // 4))
    words_sum += int(sum_bytes(dynamic, static.size // 4))
    return ChunkDecoded(problem, words_sum & MASK64)


def buffer_decoder(plan: Plan, gaps: Bits) -> Callable[[Bytes, Bits, int], int | None] | None:
    """What decodes packed buffers of `plan`, one chunk not stored raw, in one call, or None.

    It takes buffer, elements to write (1-D) and size of the dynamic part, and gives the keyed sum
    of the chunk; None if the payload is bad. `gaps`, shape (n, 2), are bytes that have to be zero.
    """
    spec = plan.codec
    if not isinstance(spec, Zipccl) or spec.window != "tile" or plan.chunks != 1 or not plan.nelem:
        return None
    f = fields_of(plan.dtype)
    escapes = np.empty(0, f.escape_dtype)
    places = (
        plan.static_offset,
        plan.dynamic_offset,
        tiles_nbytes(f, plan.nelem),
        plan.layout.sections[0].nbytes,
        tile_count(plan.nelem),
    )
    fields = f.mantissa, f.exponent, f.extra

    def decode(data: Bytes, out: Bits, dynamic_nbytes: int) -> int | None:
        if dynamic_nbytes % f.width:
            return None
        good, total = _decode_buffer(
            _read_only(data), out, escapes, places, gaps, dynamic_nbytes, *fields
        )
        return int(total) if good else None

    return decode
