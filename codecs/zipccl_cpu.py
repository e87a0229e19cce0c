# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""zipccl on the CPU with Numba: the bytes of codecs/zipccl.py at memory speed.

Loops run over flat arrays with a constant tile width and L1-sized scratch, and every operand is
cast to its unsigned type: that is the form LLVM vectorises.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic

from ..formats.checksum import MASK64
from ..formats.dtypes import BY_NAME
from .common.arrays_cpu import as_read_only, read_only, view_as, with_scratch
from .common.base import Bits, Bytes, Chunk, ChunkResult, Plan
from .common.checksum_cpu import add_words, sum_part
from .common.compile_cache import cached, part
from .common.driver_cpu import (
    Decoder,
    Encoder,
    Given,
    by_tiles,
    decode_add_encode_by,
    decode_by,
    encode_by,
)
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
    "padding of the buffer",
)
#: What `decode_span` sums: nothing, tiles, or tiles and all else.
_NOTHING, _TILES, _ALL = range(3)
_NO_GAPS = np.empty((0, 2), np.int64)


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


# A shift by a variable amount is done in 64-bit lanes, so each width of mantissa gets its own loop.


def _split1_by(m):
    @part(nogil=True)
    def split1(x, e, top):
        for i in range(TILE):
            v = x[i]
            e[i] = U1(U1(v & U1(127)) >> U1(m))
            top[i] = U1(U1(U1(v >> U1(7)) << U1(m)) | U1(v & U1((1 << m) - 1)))

    return split1


def _join1_by(m):
    @part(nogil=True)
    def join1(e, top, x):
        for i in range(TILE):
            s = top[i]
            low = U1(U1(e[i] << U1(m)) | U1(s & U1((1 << m) - 1)))
            x[i] = U1(U1(U1(s >> U1(m)) << U1(7)) | low)

    return join1


_split_e4m3, _split_e5m2 = _split1_by(3), _split1_by(2)
_join_e4m3, _join_e5m2 = _join1_by(3), _join1_by(2)


@part(nogil=True)
def _split_bf16(x, e, block):
    for i in range(TILE):
        v = x[i]
        e[i] = U1(v >> U2(7))
        block[i] = U1(U2(U2(v >> U2(15)) << U2(7)) | U2(v & U2(127)))


@part(nogil=True)
def _join_bf16(e, block, x):
    for i in range(TILE):
        s = U2(block[i])
        x[i] = U2(U2(U2(s >> U2(7)) << U2(15)) | U2(U2(U2(e[i]) << U2(7)) | U2(s & U2(127))))


@part(nogil=True)
def _split_f16(x, e, top, block):
    for i in range(TILE):
        v = x[i]
        e[i] = U1(U2(v >> U2(10)) & U2(31))
        block[i] = U1(v)
        top[i] = U1(U2(U2(v >> U2(15)) << U2(2)) | U2(U2(v >> U2(8)) & U2(3)))


@part(nogil=True)
def _join_f16(e, top, block, x):
    for i in range(TILE):
        s = U2(top[i])
        high = U2(U2(U2(s >> U2(2)) << U2(15)) | U2(U2(s & U2(3)) << U2(8)))
        x[i] = U2(high | U2(U2(U2(e[i]) << U2(10)) | U2(block[i])))


@part(nogil=True)
def _split_f32(x, e, block):
    low16 = view_as(block[: 2 * TILE], np.uint16)
    high8 = block[2 * TILE : 3 * TILE]
    for i in range(TILE):
        v = x[i]
        e[i] = U1(v >> U4(23))
        low16[i] = U2(v)
        high8[i] = U1(U4(U4(v >> U4(31)) << U4(7)) | U4(U4(v >> U4(16)) & U4(127)))


@part(nogil=True)
def _join_f32(e, block, x):
    low16 = view_as(block[: 2 * TILE], np.uint16)
    high8 = block[2 * TILE : 3 * TILE]
    for i in range(TILE):
        s = U4(high8[i])
        high = U4(U4(U4(s >> U4(7)) << U4(31)) | U4(U4(s & U4(127)) << U4(16)))
        x[i] = U4(high | U4(U4(U4(e[i]) << U4(23)) | U4(low16[i])))


@part(nogil=True)
def _split_f64(x, e, top, block):
    low32 = view_as(block[: 4 * TILE], np.uint32)
    mid16 = view_as(block[4 * TILE : 6 * TILE], np.uint16)
    for i in range(TILE):
        v = x[i]
        e[i] = U2(U8(v >> U8(52)) & U8(2047))
        low32[i] = U4(v)
        mid16[i] = U2(v >> U8(32))
        top[i] = U1(U8(U8(v >> U8(63)) << U8(4)) | U8(U8(v >> U8(48)) & U8(15)))


@part(nogil=True)
def _join_f64(e, top, block, x):
    low32 = view_as(block[: 4 * TILE], np.uint32)
    mid16 = view_as(block[4 * TILE : 6 * TILE], np.uint16)
    for i in range(TILE):
        s = U8(top[i])
        high = U8(U8(U8(s >> U8(4)) << U8(63)) | U8(U8(s & U8(15)) << U8(48)))
        high = U8(high | U8(U8(e[i]) << U8(52)))
        x[i] = U8(high | U8(U8(U8(mid16[i]) << U8(32)) | U8(low32[i])))


@part(nogil=True)
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
                v = v if v < top else one(0)
                h = v if v > h else h
            lanes[w] = c0
            lanes[64 + w] = c1
            lanes[128 + w] = c2
            highs[w] = h
        for w in range(64):
            inside += I8(lanes[w])
            lowest += I8(lanes[64 + w])
            below += I8(lanes[128 + w])
            h = highs[w]
            highest = h if h > highest else highest
    for i in range(blocks * _SAMPLED, n):
        v = sample[i]
        d = one(v - b)
        inside += I8(d < one(WINDOW))
        lowest += I8(d == one(0))
        below += I8(v < top)
        v = v if v < top else one(0)
        highest = v if v > highest else highest
    return inside, lowest, below, I8(highest)


@part(nogil=True)
def _tile_window(sample, n, lanes, highs):
    """Index entry of a tile; see zipccl.tile_window. Stops where no lower window can do better."""
    one = sample.dtype.type
    highest = one(0)
    for i in range(n):
        v = sample[i]
        highest = v if v > highest else highest
    # The first count is of zeros: one call, as each is compiled anew.
    base, top = I8(0), I8(0)
    zeros, best, entry = I8(0), I8(-1), I8(0)
    for k in range(CANDIDATES + 1):
        coded, lowest, below, following = _count_window(
            sample, n, one(base), one(top), lanes, highs
        )
        if k == 0:
            zeros = lowest
            top = I8(highest)
        else:
            gain = zeros - lowest if base > 0 else I8(0)
            if gain > 0:
                coded += gain
            if coded > best:
                best = coded
                entry = base | (ZERO_MODE if gain > 0 else 0)
            if below <= best:
                break
            top = following
        base = top - (WINDOW - 1)
        base = base if base > 0 else I8(0)
    return entry


@part(nogil=True)
def _pack_codes(e, base, planes, escaped):
    """Three code planes of a tile and its escape flags, one byte per column each.

    `base` must come in the type of `e`: cast here, it would make LLVM work in 64-bit lanes.
    """
    one = e.dtype.type
    base1 = U1(base)
    seven = one(WINDOW)
    for w in range(COLUMNS):
        p0 = U1(0)
        p1 = U1(0)
        p2 = U1(0)
        f = U1(0)
        for r in range(ROWS):
            row = U1(r)
            d = one(e[r * COLUMNS + w] - base)
            m = U1(d if d < seven else seven)
            c = U1(m + base1)
            p0 |= U1(U1(c & U1(1)) << row)
            p1 |= U1(U1(U1(c >> U1(1)) & U1(1)) << row)
            p2 |= U1(U1(U1(c >> U1(2)) & U1(1)) << row)
            f |= U1(U1(m == U1(7)) << row)
        planes[w] = p0
        planes[COLUMNS + w] = p1
        planes[2 * COLUMNS + w] = p2
        escaped[w] = f


@part(nogil=True)
def _swap_zeros(e, base, plain):
    """The exponents that give a tile in zero mode the codes it has: 0 is `base`, `base` outside."""
    one = e.dtype.type
    outside = one(base + one(WINDOW))
    for i in range(TILE):
        v = e[i]
        v = outside if v == base else v
        plain[i] = base if e[i] == one(0) else v


@part(nogil=True)
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


@part(nogil=True)
def _pack_top(top, extra, planes):
    """Bits 0 to `extra - 1` of `top` as planes."""
    for k in range(extra):
        for w in range(COLUMNS):
            p = U1(0)
            for r in range(ROWS):
                p |= U1(U1(U1(top[r * COLUMNS + w] >> U1(k)) & U1(1)) << U1(r))
            planes[k * COLUMNS + w] = p


def _unpack_top_by(extra):
    @part(nogil=True)
    def unpack_top(planes, top):
        """Inverse of `_pack_top`."""
        for w in range(COLUMNS):
            for r in range(ROWS):
                v = U1(0)
                for k in range(extra):
                    v |= U1(U1(U1(planes[k * COLUMNS + w] >> U1(r)) & U1(1)) << U1(k))
                top[r * COLUMNS + w] = v

    return unpack_top


_unpack_top3, _unpack_top4, _unpack_top5 = _unpack_top_by(3), _unpack_top_by(4), _unpack_top_by(5)


@part(nogil=True)
def _gather(e, flags, escapes, at):
    """Write the flagged exponents from `at` on, column by column; returns where they end.

    There must be place for a whole tile.
    """
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
    return at


@part(nogil=True)
def _count(flags):
    """How many exponents of a tile are flagged."""
    found = U8(0)
    for k in range(_WORDS):
        found += _popcount(flags[k])
    return I8(found)


@part(nogil=True)
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
            v = escapes[at if at < last else last]
            e[i] = v if bits != U8(0) else e[i]
            at += I8(bits != U8(0))
            bits &= bits - U8(1)
        while bits != U8(0):
            t = _ctz(bits)
            e[I8(t & U8(7)) * COLUMNS + k * 8 + I8(t >> U8(3))] = escapes[at]
            at += 1
            bits &= bits - U8(1)


@part(nogil=True)
def _escapes_are_outside(escapes, begin, end, entry, exponent_bits):
    one = escapes.dtype.type
    zero_mode = entry >= ZERO_MODE
    base = one(entry & _BASE_MASK)
    first = one(base + one(1)) if zero_mode else base
    length = one(WINDOW - 1) if zero_mode else one(WINDOW)
    largest = one((1 << exponent_bits) - 1)
    zeros = U1(zero_mode)
    bad = U1(0)
    for i in range(begin, end):
        v = escapes[i]
        bad |= U1(one(v - first) < length) | U1(v > largest) | U1(U1(v == one(0)) & zeros)
    return bad == U1(0)


@part(nogil=True, rare=True)
def _narrow(block, wide, columns, streams_nbytes, planes):
    """Copy a tile of `columns` columns out of a full-width block; see `_widen`."""
    at = 0
    source = 0
    # Streams of 4, 2 and 1 bytes, then the planes.
    for k in range(4):
        width = 4 >> k if k < 3 else 1
        rows = planes if k == 3 else (ROWS if streams_nbytes & width else 0)
        for r in range(rows):
            for i in range(columns * width):
                block[at + i] = wide[source + r * COLUMNS * width + i]
            at += columns * width
        source += rows * COLUMNS * width


@part(nogil=True, rare=True)
def _widen(block, wide, columns, streams_nbytes, planes):
    """Copy a tile of `columns` columns into a full-width block."""
    at = 0
    target = 0
    for k in range(4):
        width = 4 >> k if k < 3 else 1
        rows = planes if k == 3 else (ROWS if streams_nbytes & width else 0)
        for r in range(rows):
            for i in range(columns * width):
                wide[target + r * COLUMNS * width + i] = block[at + i]
            at += columns * width
        target += rows * COLUMNS * width


@part(nogil=True, error_model="numpy", rare=True)
def _spread(x, at, columns, tile):
    """The elements of `x` from `at` on to a tile of `columns` columns, full width; others are 0."""
    for i in range(TILE):
        tile[i] = 0
    for i in range(x.size - at):
        tile[i // columns * COLUMNS + i % columns] = x[at + i]


@part(nogil=True, error_model="numpy", rare=True)
def _collect(tile, n, columns, out):
    """The first `n` elements of a tile, inverse of `_spread`."""
    for i in range(n):
        out[i] = tile[i // columns * COLUMNS + i % columns]


@part(nogil=True, error_model="numpy", rare=True)
def _collect_padded(tile, columns, padding, out):
    """The elements of a tile to `out`; whether the others are `padding`."""
    good = True
    for i in range(ROWS * columns):
        v = tile[i // columns * COLUMNS + i % columns]
        if i < out.size:
            out[i] = v
        elif v != padding:
            good = False
    return good


@part(nogil=True, rare=True)
def _pad(e, n, columns, padding):
    """Write `padding` behind the `n` elements of a tile of `columns` columns."""
    for r in range(ROWS):
        for w in range(COLUMNS):
            if w >= columns or r * columns + w >= n:
                e[r * COLUMNS + w] = padding


@part(nogil=True, rare=True)
def _append(escapes, count, new, n):
    """The first `n` of `new` behind the first `count` of `escapes`, as many as there is place."""
    for i in range(n):
        if count + i < escapes.size:
            escapes[count + i] = new[i]


@part(nogil=True, rare=True)
def _any(data, start, stop):
    """Bits set in any of the bytes `start` to `stop`."""
    found = U1(0)
    for i in range(start, stop):
        found |= data[i]
    return found


@part(nogil=True, error_model="numpy")
def _columns_of(nelem):
    step = ROWS * COLUMN_STEP
    return (nelem % TILE + step - 1) // step * COLUMN_STEP


# One kernel for each way and dtype: branches on the numbers that a factory is called with are
# decided before anything is compiled. Each helper is called at one place, as LLVM compiles it anew
# at each.


@functools.cache
def _encoder(mantissa, extra, width):
    streams = (1 + mantissa) // 8
    planes = 3 + extra
    codes_at = TILE * streams
    nbytes = codes_at + planes * COLUMNS
    group = 2 * width
    # Scratch: exponents, a sample of them, two arrays of counts, bits for planes, escape flags, and
    # elements and block of the last tile.
    sample_at = (TILE + 64) * width
    highs_at = sample_at + (TILE + 64) * width
    lanes_at = highs_at + 64 * width
    top_at = lanes_at + 192
    escaped_at = top_at + TILE
    xs_at = escaped_at + COLUMNS
    wide_at = xs_at + TILE * 8

    @cached(nogil=True, error_model="numpy")
    def encode_span(space, static, index_at, nelem, fixed, x, start, escapes, count, used):
        """Encode `x`, elements `start` and on, behind the first `count` escapes.

        `fixed` is the index entry of all tiles, or -1. Returns the number of escapes, which may be
        more than there is place for in `escapes`, and the keyed sum of the tile blocks. If `used`,
        the size of all tile blocks, is given, not -1, it is that of all that was written.
        """
        e = space[:sample_at]
        sample = space[sample_at:highs_at]
        highs = space[highs_at:lanes_at]
        e_words, sample_words = view_as(e, np.uint64), view_as(sample, np.uint64)
        if width == 2:
            e, sample = view_as(e, np.uint16), view_as(sample, np.uint16)
            highs = view_as(highs, np.uint16)
        lanes = space[lanes_at:top_at]
        top = space[top_at:escaped_at]
        escaped = space[escaped_at:xs_at]
        flags = view_as(escaped, np.uint64)
        xs = view_as(space[xs_at:wide_at], x.dtype)
        wide = space[wide_at:]
        n_tiles = (nelem + TILE - 1) // TILE
        entries_at = index_at + 4 * n_tiles
        offsets = view_as(static[index_at:entries_at], np.uint32)
        entries = view_as(static[entries_at : entries_at + 2 * n_tiles], np.uint16)
        words = view_as(read_only(static), np.uint32)
        one = e.dtype.type
        full = nelem // TILE
        total = U8(0)
        for source_at in range(0, x.size, TILE):
            t = (start + source_at) // TILE
            at = t * nbytes
            if t < full:
                n = TILE
                columns = COLUMNS
                source = x[source_at : source_at + TILE]
                block = static[at : at + nbytes]
            else:
                n = x.size - source_at
                columns = _columns_of(n)
                _spread(x, source_at, columns, xs)
                source = read_only(xs)
                block = wide
            if mantissa == 2:
                _split_e5m2(source, e, top)
            elif mantissa == 3:
                _split_e4m3(source, e, top)
            elif mantissa == 7:
                _split_bf16(source, e, block)
            elif mantissa == 10:
                _split_f16(source, e, top, block)
            elif mantissa == 23:
                _split_f32(source, e, block)
            else:
                _split_f64(source, e, top, block)
            if fixed >= 0:
                entry = fixed
            else:
                sampled = n
                if t < full:
                    sampled = _SAMPLED
                    for k in range(TILE // 128):
                        to, begin = k * group, (8 * k + k % 8) * group
                        for i in range(group):
                            sample_words[to + i] = e_words[begin + i]
                else:
                    _collect(e, n, columns, sample)
                entry = _tile_window(sample, sampled, lanes, highs)
            base = one(entry & _BASE_MASK)
            if t == full:
                _pad(e, n, columns, one(base + one(WINDOW - 1)))
            plain = e
            if entry >= ZERO_MODE:
                _swap_zeros(e, base, sample)
                plain = sample
            _pack_codes(plain, base, block[codes_at:], escaped)
            if extra != 0:
                _pack_top(top, extra, block[codes_at + 3 * COLUMNS :])
            offsets[t] = U4(count)
            entries[t] = U2(entry)
            if count >= escapes.size:
                count += _count(flags)
            else:
                fits = count + TILE <= escapes.size
                end = _gather(e, flags, escapes if fits else sample, count if fits else I8(0))
                if fits:
                    count = end
                else:
                    _append(escapes, count, sample, end)
                    count += end
            end = at + columns * (ROWS * streams + planes)
            if t == full:
                _narrow(static[at:end], wide, columns, streams, planes)
            total = add_words(total, words[at // 4 : end // 4], at // 4)
        if used >= 0 and count <= escapes.size:
            coded = view_as(escapes[:count], np.uint8)
            for k in range(2):
                rest = read_only(static[used:] if k == 0 else coded)
                total = sum_part(total, rest, used // 4 if k == 0 else static.size // 4)
        return count, total

    return with_scratch(encode_span, wide_at + nbytes)


@functools.cache
def _decoder(exponent, mantissa, extra, width):
    streams = (1 + mantissa) // 8
    planes = 3 + extra
    codes_at = TILE * streams
    nbytes = codes_at + planes * COLUMNS
    top_at = (TILE + 64) * width
    escaped_at = top_at + TILE
    xs_at = escaped_at + COLUMNS
    wide_at = xs_at + TILE * 8

    @cached(nogil=True, error_model="numpy")
    def decode_span(
        space, static_in, dynamic_in, x, places, gaps, dynamic_nbytes, nelem, first, last, sums
    ):
        """Decode tiles `first` to `last` of a chunk of `nelem` elements to the start of `x`.

        `places` are start and size of the static part in `static_in`, start of the dynamic part in
        `dynamic_in`, size of the tile blocks, start of the index, and number of tiles. `gaps` are
        ranges of `static_in` that have to be zero, as is what lies behind the dynamic part.

        Returns an index into `_PROBLEMS` and the keyed sum of what `sums` says. Nothing outside the
        arrays is touched, whatever the bytes say.
        """
        static_at, static_nbytes, dynamic_at, used, index_at, n_tiles = places
        end = dynamic_at + dynamic_nbytes
        found = U1(0)
        for k in range(gaps.shape[0] + 1):
            behind = k == gaps.shape[0]
            data = dynamic_in if behind else static_in
            found |= _any(data, end if behind else gaps[k, 0], data.size if behind else gaps[k, 1])
        static = static_in[static_at : static_at + static_nbytes]
        dynamic = dynamic_in[dynamic_at:end]
        entries_at = index_at + 4 * n_tiles
        offsets = view_as(static[index_at:entries_at], np.uint32)
        entries = view_as(static[entries_at : entries_at + 2 * n_tiles], np.uint16)
        e = space[:top_at]
        escapes = dynamic
        if width == 2:
            e, escapes = view_as(e, np.uint16), view_as(escapes, np.uint16)
        top = space[top_at:escaped_at]
        escaped = space[escaped_at:xs_at]
        flags = view_as(escaped, np.uint64)
        xs = view_as(space[xs_at:wide_at], x.dtype)
        wide = space[wide_at:]
        words = view_as(static, np.uint32)
        one = e.dtype.type
        full = nelem // TILE
        total = U8(0)
        problem = 5 if found != U1(0) else 0
        for t in range(first, last):
            at = t * nbytes
            columns = COLUMNS if t < full else _columns_of(nelem)
            end = at + columns * (ROWS * streams + planes)
            if sums != _NOTHING:
                total = add_words(total, words[at // 4 : end // 4], at // 4)
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
            block = static[at:end]
            to = (t - first) * TILE
            target = xs
            if t < full:
                target = x[to : to + TILE]
            else:
                _widen(block, wide, columns, streams, planes)
                block = read_only(wide)
            _unpack_codes(block[codes_at:], one(base), entry >= ZERO_MODE, e, escaped)
            for i in range(columns, COLUMNS):
                escaped[i] = 0
            if _count(flags) != end_escapes - begin_escapes:
                problem = 2
                continue
            if not _escapes_are_outside(escapes, begin_escapes, end_escapes, entry, exponent):
                problem = 3
                continue
            _scatter(e, flags, escapes, begin_escapes, end_escapes)
            if extra == 3:
                _unpack_top3(block[codes_at + 3 * COLUMNS :], top)
            elif extra == 4:
                _unpack_top4(block[codes_at + 3 * COLUMNS :], top)
            elif extra == 5:
                _unpack_top5(block[codes_at + 3 * COLUMNS :], top)
            if mantissa == 2:
                _join_e5m2(e, top, target)
            elif mantissa == 3:
                _join_e4m3(e, top, target)
            elif mantissa == 7:
                _join_bf16(e, block, target)
            elif mantissa == 10:
                _join_f16(e, top, block, target)
            elif mantissa == 23:
                _join_f32(e, block, target)
            else:
                _join_f64(e, top, block, target)
            if t == full:
                n = nelem - full * TILE
                padding = x.dtype.type(base + WINDOW - 1) << x.dtype.type(mantissa)
                if not _collect_padded(xs, columns, padding, x[to : to + n]):
                    problem = 4
        if sums == _ALL:
            for k in range(2):
                rest = static[used:] if k == 0 else dynamic
                total = sum_part(total, rest, used // 4 if k == 0 else static.size // 4)
        return problem, total

    return with_scratch(decode_span, wide_at + nbytes)


def cache_folder() -> str | None:
    """Where Numba keeps these kernels; None if no folder can be written."""
    f = fields_of(BY_NAME["bfloat16"])
    cache = _encoder(f.mantissa, f.extra, f.width).__wrapped__._cache
    return getattr(cache, "_cache_path", None)


class _Span:
    """Tiles that are encoded piece by piece, one after the other, and their escapes.

    `encode_span` has all arguments that do not change. `used` is as there for the last piece.
    """

    def __init__(
        self, encode_span: Callable[..., Any], start: int, stop: int, escapes: Bits, used: int
    ) -> None:
        self._encode_span, self._used = encode_span, used
        self.start, self.stop, self.escapes = start, stop, escapes
        self.count, self.total = 0, 0

    def encode(self, x: Bits, at: int) -> None:
        """See `Encoder`."""
        used = self._used if at + x.size == self.stop else -1
        self.count, total = self._encode_span(x, at, self.escapes, self.count, used)
        self.total += int(total)


def encoder(spec: Zipccl, chunk: Chunk, given: Given) -> Encoder:
    """What encodes a chunk. Escapes of spans but the first are copied behind those before them."""
    f, nelem = fields_of(chunk.dtype), chunk.nelem
    slot = chunk.dynamic[: chunk.dynamic.size // f.width * f.width].view(f.escape_dtype)
    fixed = -1 if given.stats is None else int(given.stats[0])
    index_at, used = chunk.sections[0].nbytes, tiles_nbytes(f, nelem)
    kernel = _encoder(f.mantissa, f.extra, f.width)
    encode_span = functools.partial(kernel, chunk.static, index_at, nelem, fixed)
    made: list[_Span] = []

    def span(start: int, stop: int) -> Callable[[Bits, int], None]:
        escapes = slot
        if start > 0:
            escapes = np.empty(min(slot.size, stop - start) + TILE, f.escape_dtype)
        whole = stop - start == nelem
        made.append(_Span(encode_span, start, stop, escapes, used if whole else -1))
        return made[-1].encode

    def finish(results: list[None]) -> ChunkResult:
        if len(made) == 1:
            count = made[0].count
            known = made[0].total & MASK64 if count <= slot.size else None
            return ChunkResult(count * f.width, known)
        offsets = static_views(chunk)[1]
        count, total = 0, 0
        for one in made:
            total += one.total
            if count > 0:
                offsets[one.start // TILE : -(-one.stop // TILE)] += np.uint32(count)
            if one.escapes is not slot and count + one.count <= slot.size:
                slot[count : count + one.count] = one.escapes[: one.count]
            count += one.count
        if count > slot.size:
            return ChunkResult(count * f.width)
        # No more tiles: what is behind them is summed.
        nothing = as_read_only(np.empty(0, chunk.dtype.bits))
        total += int(encode_span(nothing, 0, slot, count, used)[1])
        return ChunkResult(count * f.width, total & MASK64)

    return Encoder(span, TILE, finish)


def _nothing(out: Bits, start: int) -> None:
    pass


def decoder(spec: Zipccl, chunk: Chunk, start: int, stop: int, summed: bool = False) -> Decoder:
    """What decodes elements `start` to `stop` of a chunk."""
    f, nelem = fields_of(chunk.dtype), chunk.nelem
    if nelem == 0 or chunk.dynamic.size % f.width:
        size = chunk.dynamic.size
        problem = f"{size} bytes of escapes of {f.width} bytes each" if size else None
        return Decoder(_nothing, problem=problem)
    here = slice(start // TILE, -(-stop // TILE))
    problem = None
    if not entries_fit(spec, static_views(chunk)[2], here):
        problem = "windows that differ in a tensor with one window"
    decode_span = _decoder(f.exponent, f.mantissa, f.extra, f.width)
    static, dynamic = as_read_only(chunk.static), as_read_only(chunk.dynamic)
    used = tiles_nbytes(f, nelem)
    places = (0, static.size, 0, used, chunk.sections[0].nbytes, tile_count(nelem))
    totals: list[int] = []

    def decode_some(out: Bits, first: int, last: int, sums: int) -> int:
        fixed = places, _NO_GAPS, dynamic.size, nelem
        found, total = decode_span(static, dynamic, out, *fixed, first, last, sums)
        totals.append(int(total))
        return int(found)

    def decode(out: Bits, at: int) -> int:
        sums = (_ALL if out.size == nelem else _TILES) if summed else _NOTHING
        return decode_some(out, at // TILE, -(-(at + out.size) // TILE), sums)

    def words_sum() -> int:
        if len(totals) > 1:
            # No more tiles: what is behind them is summed.
            decode_some(np.empty(0, chunk.dtype.bits), 0, 0, _ALL)
        return sum(totals) & MASK64

    decode_any = by_tiles(decode, TILE, nelem)
    return Decoder(decode_any, TILE, _PROBLEMS, problem, words_sum if summed else None)


encode_chunk = encode_by(encoder)
decode_chunk = decode_by(decoder)
decode_add_encode_chunk = decode_add_encode_by(decoder, encoder)


def buffer_decoder(plan: Plan, gaps: Bits) -> Callable[[Bytes, Bits, int], int | None] | None:
    """What decodes packed buffers of `plan`, one chunk not stored raw, in one call, or None.

    It takes buffer, elements to write (1-D) and size of the dynamic part, and gives the keyed sum
    of the chunk; None if the payload is bad. `gaps`, shape (n, 2), are bytes that have to be zero.
    """
    spec = plan.codec
    if not isinstance(spec, Zipccl) or spec.window != "tile" or plan.chunks != 1 or not plan.nelem:
        return None
    f = fields_of(plan.dtype)
    decode_span = _decoder(f.exponent, f.mantissa, f.extra, f.width)
    nelem, n_tiles = plan.nelem, tile_count(plan.nelem)
    places = (
        plan.static_offset,
        plan.dynamic_offset - plan.static_offset,
        plan.dynamic_offset,
        tiles_nbytes(f, nelem),
        plan.layout.sections[0].nbytes,
        n_tiles,
    )

    def decode(data: Bytes, out: Bits, dynamic_nbytes: int) -> int | None:
        if dynamic_nbytes % f.width:
            return None
        data = as_read_only(data)
        problem, total = decode_span(
            data, data, out, places, gaps, dynamic_nbytes, nelem, 0, n_tiles, _ALL
        )
        return int(total) if problem == 0 else None

    return decode
