# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment"
"""Tiles of planes of delta on the CPU.

A plane is flags of elements, as in delta_bits_cpu.py: vector instructions take 64 of them out of
elements, or flip a bit of the elements that have one.
"""

from __future__ import annotations

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

from .common.compile_cache import part
from .delta import BITMAP_EIGHTHS, LOG_TILE, PLANES_HEAD
from .delta_bits_cpu import (
    BLOCK,
    BLOCKS,
    I8,
    ONE,
    U8,
    ZERO,
    append,
    gap_low_bits,
    get,
    list_positions,
    load_block,
    low_mask,
    popcount,
    put,
    put_low,
    put_quotients,
    read_ranks,
    splat,
)

#: What may be wrong with a tile: codes or their end, a gap, the number of planes or of their ones.
_ENDS, _GAP, _ONES = range(1, 4)


@intrinsic
def _plane_of(typingctx, a, b, at, bit):
    """In which of 64 elements from `at` on two arrays differ in a bit: a bit each."""

    def codegen(context, builder, signature, args):
        x, vector = load_block(context, builder, signature.args[0], args[0], args[2])
        y, _ = load_block(context, builder, signature.args[1], args[1], args[2])
        there = builder.and_(builder.xor(x, y), splat(builder, args[3], vector))
        found = builder.icmp_unsigned("!=", there, ir.Constant(vector, None))
        return builder.bitcast(found, ir.IntType(64))

    return types.uint64(a, b, types.int64, a.dtype), codegen


@intrinsic
def _flip(typingctx, a, at, flags, bit):
    """Flip a bit of those of 64 elements from `at` on that have a flag."""

    def codegen(context, builder, signature, args):
        from numba.np.arrayobj import make_array

        kind = signature.args[0]
        x, vector = load_block(context, builder, kind, args[0], args[1])
        mask = builder.bitcast(args[2], ir.VectorType(ir.IntType(1), BLOCK))
        zeros = ir.Constant(vector, None)
        bits = builder.select(mask, splat(builder, args[3], vector), zeros)
        data = make_array(kind)(context, builder, args[0]).data
        pointer = builder.bitcast(builder.gep(data, [args[1]]), vector.as_pointer())
        builder.store(builder.xor(x, bits), pointer, align=kind.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(a, types.int64, types.uint64, a.dtype), codegen


@part(nogil=True)
def _is_bitmap(n, listed):
    """See `delta.is_bitmap`."""
    return 8 * listed > BITMAP_EIGHTHS * n


@part(nogil=True)
def least_of_planes(n, m, width, flips, flipped):
    """Bits that planes take at least, by how many bits the `m` changes of a tile flip, and which.

    With up to half of the elements changed no plane has more ones than there are changes, so that
    no gap has fewer low bits than if all of them were in one plane.
    """
    least = 2 + width + LOG_TILE * I8(popcount(flipped))
    return least + flips * (gap_low_bits(n, m) + 1) if 2 * m <= n else least


@part(nogil=True)
def _take_planes(base, x, flipped, space):
    """Take the planes of a tile apart; how many bits they take at least, with what is before.

    Only bits in `flipped` differ.
    """
    n, bit = x.size, x.dtype.type
    blocks = n // BLOCK
    least = I8(2 + 8 * x.itemsize)
    for k in range(8 * x.itemsize):
        space.ones[k] = 0
        if flipped >> U8(k) & ONE == ZERO:
            continue
        flags, ones = space.flags[k * BLOCKS :], ZERO
        one = bit(ONE << U8(k))
        for b in range(blocks):
            found = _plane_of(base, x, b * BLOCK, one)
            flags[b] = found
            ones += popcount(found)
        last = ZERO
        for i in range(blocks * BLOCK, n):
            last |= (U8(base[i] ^ x[i]) >> U8(k) & ONE) << U8(i & 63)
        if blocks * BLOCK < n:
            flags[blocks] = last
            ones += popcount(last)
        count = I8(ones)
        space.ones[k] = count
        listed = count if 2 * count <= n else n - count
        least += LOG_TILE
        if _is_bitmap(n, listed):
            least += n
        else:
            least += listed * (gap_low_bits(n, listed) + 1)
    return least


@part(apart=True, nogil=True)
def encode_planes(base, x, flipped, space, most):
    """A tile of planes to `space.planes`, if it has up to `most` bits; how many, else -1.

    Only bits in `flipped` differ.
    """
    n, width, words = x.size, I8(8 * x.itemsize), space.planes
    if _take_planes(base, x, flipped, space) > most:
        return I8(-1)
    words[0] = 0
    to = put(words, I8(0), U8(PLANES_HEAD), I8(2))
    for k in range(width):
        to = put(words, to, U8(space.ones[k] != 0), I8(1))
    for k in range(width):
        if space.ones[k]:
            to = put(words, to, U8(space.ones[k] - 1), I8(LOG_TILE))
    for k in range(width):
        flags, count = space.flags[k * BLOCKS :], space.ones[k]
        listed = count if 2 * count <= n else n - count
        if _is_bitmap(n, listed):
            to = append(words, to, flags, n)
        elif listed:
            if listed != count:
                for b in range((n + BLOCK - 1) // BLOCK):
                    flags[b] = ~flags[b]
                if n & 63:
                    flags[n >> 6] &= low_mask(n & 63)
            list_positions(flags, n, listed, space.list)
            space.sizes[0], space.listed[0] = n, listed
            to = put_quotients(words, put_low(words, to, I8(1), space), I8(1), space)
        if to > most:
            return I8(-1)
    return to


@part(nogil=True)
def _flip_plane(new, n, bit, flags, flip):
    """Flip a bit of elements that have a flag, or with `flip`, which is 0 or all ones, have not."""
    one = new.dtype.type(bit)
    blocks = n // BLOCK
    for b in range(blocks):
        _flip(new, b * BLOCK, flags[b] ^ flip, one)
    for i in range(blocks * BLOCK, n):
        if (flags[blocks] ^ flip) >> U8(i & 63) & ONE:
            new[i] ^= one


@part(apart=True, nogil=True)
def read_planes(new, n, nbits, space):
    """Read a tile of planes; what is wrong with it, 0 if nothing.

    `new` has the elements of the base, which become those of the tile.
    """
    width, words, ranks = I8(8 * new.itemsize), space.words, space.ranks
    at = 2 + width
    if at > nbits:
        return I8(_ENDS)
    there = get(words, I8(2), width)
    to = at + LOG_TILE * I8(popcount(there))
    if there == ZERO:
        return I8(_ONES)
    if to > nbits:
        return I8(_ENDS)
    for k in range(width):
        bit = ONE << U8(k)
        if there & bit == ZERO:
            continue
        count = I8(get(words, at, I8(LOG_TILE))) + 1
        at += LOG_TILE
        if count > n:
            return I8(_ONES)
        listed = count if 2 * count <= n else n - count
        flip = ZERO
        if _is_bitmap(n, listed):
            if to + n > nbits:
                return I8(_ENDS)
            ones = ZERO
            for b in range((n + BLOCK - 1) // BLOCK):
                left = n - b * BLOCK
                ranks[b] = get(words, to + b * BLOCK, left if left < BLOCK else I8(BLOCK))
                ones += popcount(ranks[b])
            if I8(ones) != count:
                return I8(_ONES)
            to += n
        else:
            low_at = to
            to += listed * gap_low_bits(n, listed)
            if to > nbits:
                return I8(_ENDS)
            to = read_ranks(to, nbits, low_at, listed, n, space)
            if to < 0:
                return I8(_ENDS) if to == -1 else I8(_GAP)
            flip = ZERO - U8(listed != count)
        _flip_plane(new, n, bit, ranks, flip)
    if nbits - to >= 32 or get(words, to, nbits - to) != ZERO:
        return I8(_ENDS)
    return I8(0)
