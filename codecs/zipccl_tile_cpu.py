# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""What zipccl's kernels on the CPU do with one tile: split, find a window, pack, and back.

Loops run over flat arrays with a constant tile width and L1-sized scratch, and every operand is
cast to its unsigned type: that is the form LLVM vectorises.
"""

from __future__ import annotations

import numpy as np
from numba import types
from numba.extending import intrinsic

from .common.arrays_cpu import view_as
from .common.compile_cache import part
from .zipccl import (
    CANDIDATES,
    COLUMN_STEP,
    COLUMNS,
    ROWS,
    TILE,
    WINDOW,
    ZERO_MODE,
)

U1, U2, U4, U8 = np.uint8, np.uint16, np.uint32, np.uint64
I8 = np.int64
_SAMPLED = TILE // 8
_WORDS = COLUMNS // 8
_BASE_MASK = ZERO_MODE - 1


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


split_e4m3, split_e5m2 = _split1_by(3), _split1_by(2)
join_e4m3, join_e5m2 = _join1_by(3), _join1_by(2)


@part(nogil=True)
def split_bf16(x, e, block):
    """Exponents of a tile of bfloat16; sign and mantissa go to its block."""
    for i in range(TILE):
        v = x[i]
        e[i] = U1(v >> U2(7))
        block[i] = U1(U2(U2(v >> U2(15)) << U2(7)) | U2(v & U2(127)))


@part(nogil=True)
def join_bf16(e, block, x):
    """The opposite of `split_bf16`."""
    for i in range(TILE):
        s = U2(block[i])
        x[i] = U2(U2(U2(s >> U2(7)) << U2(15)) | U2(U2(U2(e[i]) << U2(7)) | U2(s & U2(127))))


@part(nogil=True)
def split_f16(x, e, top, block):
    """Exponents of a tile of float16, bits that planes take, and the bytes of its block."""
    for i in range(TILE):
        v = x[i]
        e[i] = U1(U2(v >> U2(10)) & U2(31))
        block[i] = U1(v)
        top[i] = U1(U2(U2(v >> U2(15)) << U2(2)) | U2(U2(v >> U2(8)) & U2(3)))


@part(nogil=True)
def join_f16(e, top, block, x):
    """The opposite of `split_f16`."""
    for i in range(TILE):
        s = U2(top[i])
        high = U2(U2(U2(s >> U2(2)) << U2(15)) | U2(U2(s & U2(3)) << U2(8)))
        x[i] = U2(high | U2(U2(U2(e[i]) << U2(10)) | U2(block[i])))


@part(nogil=True)
def split_f32(x, e, block):
    """Exponents of a tile of float32; sign and mantissa go to its block."""
    low16 = view_as(block[: 2 * TILE], np.uint16)
    high8 = block[2 * TILE : 3 * TILE]
    for i in range(TILE):
        v = x[i]
        e[i] = U1(v >> U4(23))
        low16[i] = U2(v)
        high8[i] = U1(U4(U4(v >> U4(31)) << U4(7)) | U4(U4(v >> U4(16)) & U4(127)))


@part(nogil=True)
def join_f32(e, block, x):
    """The opposite of `split_f32`."""
    low16 = view_as(block[: 2 * TILE], np.uint16)
    high8 = block[2 * TILE : 3 * TILE]
    for i in range(TILE):
        s = U4(high8[i])
        high = U4(U4(U4(s >> U4(7)) << U4(31)) | U4(U4(s & U4(127)) << U4(16)))
        x[i] = U4(high | U4(U4(U4(e[i]) << U4(23)) | U4(low16[i])))


@part(nogil=True)
def split_f64(x, e, top, block):
    """Exponents of a tile of float64, bits that planes take, and the bytes of its block."""
    low32 = view_as(block[: 4 * TILE], np.uint32)
    mid16 = view_as(block[4 * TILE : 6 * TILE], np.uint16)
    for i in range(TILE):
        v = x[i]
        e[i] = U2(U8(v >> U8(52)) & U8(2047))
        low32[i] = U4(v)
        mid16[i] = U2(v >> U8(32))
        top[i] = U1(U8(U8(v >> U8(63)) << U8(4)) | U8(U8(v >> U8(48)) & U8(15)))


@part(nogil=True)
def join_f64(e, top, block, x):
    """The opposite of `split_f64`."""
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
def tile_window(sample, n, lanes, highs):
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
def pack_codes(e, base, planes, escaped):
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
def swap_zeros(e, base, plain):
    """The exponents that give a tile in zero mode the codes it has: 0 is `base`, `base` outside."""
    one = e.dtype.type
    outside = one(base + one(WINDOW))
    for i in range(TILE):
        v = e[i]
        v = outside if v == base else v
        plain[i] = base if e[i] == one(0) else v


@part(nogil=True)
def unpack_codes(planes, base, zero_mode, e, escaped):
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
def pack_top(top, extra, planes):
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
        """Inverse of `pack_top`."""
        for w in range(COLUMNS):
            for r in range(ROWS):
                v = U1(0)
                for k in range(extra):
                    v |= U1(U1(U1(planes[k * COLUMNS + w] >> U1(r)) & U1(1)) << U1(k))
                top[r * COLUMNS + w] = v

    return unpack_top


unpack_top3, unpack_top4, unpack_top5 = _unpack_top_by(3), _unpack_top_by(4), _unpack_top_by(5)


@part(nogil=True)
def gather_escapes(e, flags, escapes, at):
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
def count_flags(flags):
    """How many exponents of a tile are flagged."""
    found = U8(0)
    for k in range(_WORDS):
        found += _popcount(flags[k])
    return I8(found)


@part(nogil=True)
def scatter_escapes(e, flags, escapes, begin, end):
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
def escapes_are_outside(escapes, begin, end, entry, exponent_bits):
    """Whether no exponent among escapes `begin` to `end` has a code in the window of `entry`."""
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
def narrow_block(block, wide, columns, streams_nbytes, planes):
    """Copy a tile of `columns` columns out of a full-width block; see `widen_block`."""
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
def widen_block(block, wide, columns, streams_nbytes, planes):
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
def spread_tile(x, at, columns, tile):
    """The elements of `x` from `at` on to a tile of `columns` columns, full width; others are 0."""
    for i in range(TILE):
        tile[i] = 0
    for i in range(x.size - at):
        tile[i // columns * COLUMNS + i % columns] = x[at + i]


@part(nogil=True, error_model="numpy", rare=True)
def collect_tile(tile, n, columns, out):
    """The first `n` elements of a tile, inverse of `spread_tile`."""
    for i in range(n):
        out[i] = tile[i // columns * COLUMNS + i % columns]


@part(nogil=True, error_model="numpy", rare=True)
def collect_padded_tile(tile, columns, padding, out):
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
def pad_tile(e, n, columns, padding):
    """Write `padding` behind the `n` elements of a tile of `columns` columns."""
    for r in range(ROWS):
        for w in range(COLUMNS):
            if w >= columns or r * columns + w >= n:
                e[r * COLUMNS + w] = padding


@part(nogil=True, rare=True)
def append_escapes(escapes, count, new, n):
    """The first `n` of `new` behind the first `count` of `escapes`, as many as there is place."""
    for i in range(n):
        if count + i < escapes.size:
            escapes[count + i] = new[i]


@part(nogil=True, rare=True)
def any_bits(data, start, stop):
    """Bits set in any of the bytes `start` to `stop`."""
    found = U1(0)
    for i in range(start, stop):
        found |= data[i]
    return found


@part(nogil=True, error_model="numpy")
def columns_of(nelem):
    """Columns of the last tile of `nelem` elements."""
    step = ROWS * COLUMN_STEP
    return (nelem % TILE + step - 1) // step * COLUMN_STEP
