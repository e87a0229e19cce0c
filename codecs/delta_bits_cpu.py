# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment"
"""Parts of delta's kernels: bits of codes, flags of elements, and memory for one tile.

Flags of elements are bits, 64 elements in a word. Vector instructions make them; all that comes
after looks at words, and at elements that have changed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

from ..formats.dtypes import DType
from .common.arrays_cpu import read_only, view_as
from .common.compile_cache import part
from .common.memory_cpu import item, load8, store8
from .delta import KEY_STEP, LIMITS, MAX_QUOTIENT, MIX, TILE, kind_of

U2, U4, U8, I8 = np.uint16, np.uint32, np.uint64, np.int64
#: Conversions take time to compile.
ZERO, ONE = U8(0), U8(1)
_STEP = np.uint32(KEY_STEP)
_SHIFT0, _FACTOR0, _SHIFT1, _FACTOR1, _SHIFT2 = map(np.uint32, MIX)
BLOCK = 64
BLOCKS = TILE // BLOCK
#: Of a tile with one change in so many elements the digest is taken, not that of its changes.
DENSE = 16
#: Words whose digest is found at a time.
WORDS = 32
#: Blocks and the end.
STARTS = BLOCKS + 1
CLASSES = len(LIMITS) + 1
#: More changes in so many elements: their numbers are found 8 flags at a time.
_MANY = 32
#: Number of the set bit of a byte before which k are set: at 8 * byte + k.
_IN_BYTE = np.array(
    [
        ([i for i in range(8) if byte >> i & 1] + 8 * [0])[k]
        for byte in range(256)
        for k in range(8)
    ],
    np.uint8,
)
#: More exponents, and scales, than any dtype has.
SCALES = (1 << 11) + 128


def load_block(context, builder, array_type, array, at, lanes=BLOCK):
    """Elements of an array as a vector of `lanes`, and its type."""
    from numba.np.arrayobj import make_array

    data = make_array(array_type)(context, builder, array).data
    element = context.get_value_type(array_type.dtype)
    vector = ir.VectorType(element, lanes)
    pointer = builder.bitcast(builder.gep(data, [at]), vector.as_pointer())
    loaded = builder.load(pointer)
    loaded.align = array_type.dtype.bitwidth // 8
    return loaded, vector


def splat(builder, value, vector):
    """A vector of one value."""
    first = builder.insert_element(
        ir.Constant(vector, ir.Undefined), value, ir.Constant(ir.IntType(32), 0)
    )
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), vector.count), None)
    return builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), zeros)


@intrinsic
def differ(typingctx, a, b, at):
    """Which of 64 elements from `at` on differ in two arrays: a bit each."""

    def codegen(context, builder, signature, args):
        x, _ = load_block(context, builder, signature.args[0], args[0], args[2])
        y, _ = load_block(context, builder, signature.args[1], args[1], args[2])
        found = builder.icmp_unsigned("!=", x, y)
        return builder.bitcast(found, ir.IntType(64))

    return types.uint64(a, b, types.int64), codegen


@intrinsic
def below(typingctx, a, at, mask, shift, limit):
    """Which of 64 exponents from `at` on are below `limit`, 0 to 255 or 2047: a bit each.

    The exponents are the bits of `mask`, shifted right. They are compared as signed bytes where
    they have 8 bits: that takes the fewest instructions.
    """

    def codegen(context, builder, signature, args):
        x, vector = load_block(context, builder, signature.args[0], args[0], args[1])
        field = builder.and_(x, splat(builder, args[2], vector))
        field = builder.lshr(field, splat(builder, args[3], vector))
        limit = args[4]
        width = signature.args[0].dtype.bitwidth
        if 8 < width < 64:
            byte = ir.IntType(8)
            field = builder.trunc(field, ir.VectorType(byte, BLOCK))
            limit = builder.trunc(limit, byte)
        if width < 64:
            sign = ir.Constant(ir.IntType(8), 128)
            limit = builder.xor(limit, sign)
            field = builder.xor(field, splat(builder, sign, field.type))
        found = builder.icmp_signed("<", field, splat(builder, limit, field.type))
        return builder.bitcast(found, ir.IntType(64))

    return types.uint64(a, types.int64, a.dtype, a.dtype, a.dtype), codegen


@intrinsic
def copy(typingctx, to, to_at, source, at, nbytes):
    """Copy bytes from item `at` of an array to item `to_at` of another."""

    def codegen(context, builder, signature, args):
        from numba.core import cgutils
        from numba.np.arrayobj import make_array

        pointers = []
        for i in (0, 2):
            data = make_array(signature.args[i])(context, builder, args[i]).data
            byte = ir.IntType(8).as_pointer()
            pointers.append(builder.bitcast(builder.gep(data, [args[i + 1]]), byte))
        cgutils.raw_memmove(builder, *pointers, args[4], 1)
        return context.get_dummy_value()

    return types.void(to, types.int64, source, types.int64, types.int64), codegen


@intrinsic
def _clz(typingctx, x):
    """Number of leading zero bits; 64 for zero."""

    def codegen(context, builder, signature, args):
        return builder.ctlz(args[0], context.get_constant(types.boolean, False))

    return types.uint64(types.uint64), codegen


@intrinsic
def ctz(typingctx, x):
    """Number of trailing zero bits; 64 for zero."""

    def codegen(context, builder, signature, args):
        return builder.cttz(args[0], context.get_constant(types.boolean, False))

    return types.uint64(types.uint64), codegen


@intrinsic
def popcount(typingctx, x):
    """Number of set bits."""

    def codegen(context, builder, signature, args):
        return builder.ctpop(args[0])

    return types.uint64(types.uint64), codegen


@part(nogil=True)
def select(word, k):
    """Number of the set bit of `word` before which `k` are set; there is one.

    Source: Vigna, Broadword implementation of rank/select queries, 2008.
    """
    ones = U8(0x0101010101010101)
    s = word - (word >> ONE & U8(0x5555555555555555))
    s = (s & U8(0x3333333333333333)) + (s >> U8(2) & U8(0x3333333333333333))
    # Set bits up to and with each byte.
    s = (s + (s >> U8(4)) & U8(0x0F0F0F0F0F0F0F0F)) * ones
    high = U8(0x8080808080808080)
    at = U8(8) * popcount((k * ones | high) - s & high)
    k -= s << U8(8) >> at & U8(255)
    return I8(at) + I8(_IN_BYTE[I8(U8(8) * (word >> at & U8(255)) + k)])


def _deposit(bits, mask):
    found = ZERO
    bits &= low_mask(popcount(mask))
    while bits:
        found |= ONE << U8(select(mask, ctz(bits)))
        bits &= bits - ONE
    return found


def _extract(bits, mask):
    found = ZERO
    bits &= mask
    while bits:
        found |= ONE << popcount(mask & ((bits & (ZERO - bits)) - ONE))
        bits &= bits - ONE
    return found


def _function(builder, kind, name):
    """A function of LLVM."""
    from numba.core import cgutils

    return cgutils.get_or_insert_function(builder.module, kind, name)


def _of_two_words(name, slow):
    """The code of an instruction of BMI2, or of `slow` where that is as fast."""

    def codegen(context, builder, signature, args):
        _, cpu, features = context.codegen().magic_tuple()
        if "+bmi2" not in features or cpu in ("znver1", "znver2"):
            return context.compile_internal(builder, slow, signature, args)
        word = ir.IntType(64)
        kind = ir.FunctionType(word, [word, word])
        return builder.call(_function(builder, kind, f"llvm.x86.bmi.{name}.64"), args)

    return types.uint64(types.uint64, types.uint64), codegen


@intrinsic
def deposit(typingctx, bits, mask):
    """The lowest bits of `bits` at the places of the bits of `mask`."""
    return _of_two_words("pdep", _deposit)


@intrinsic
def extract(typingctx, bits, mask):
    """The bits of `bits` at the places of those of `mask`, side by side from the lowest on."""
    return _of_two_words("pext", _extract)


@intrinsic
def _list_byte(typingctx, byte, first, table, out, at):
    """`first` and the numbers of the set bits of a byte to `out` from `at` on; writes eight."""

    def codegen(context, builder, signature, args):
        row = builder.shl(args[0], ir.Constant(ir.IntType(64), 3))
        numbers, _ = load_block(context, builder, signature.args[2], args[2], row, 8)
        number = ir.VectorType(ir.IntType(16), 8)
        found = builder.add(builder.zext(numbers, number), splat(builder, args[1], number))
        from numba.np.arrayobj import make_array

        data = make_array(signature.args[3])(context, builder, args[3]).data
        pointer = builder.bitcast(builder.gep(data, [args[4]]), number.as_pointer())
        builder.store(found, pointer, align=2)
        return context.get_dummy_value()

    return types.void(types.int64, types.uint16, table, out, types.int64), codegen


@part(nogil=True)
def bit_length(x):
    """Bit length of a number; 0 of 0."""
    return 64 - I8(_clz(x))


@part(nogil=True)
def low_mask(nbits):
    """So many low bits."""
    return (ONE << U8(nbits)) - ONE if nbits < 64 else ~ZERO


@part(nogil=True)
def put(words, at, value, nbits):
    """Write a number of up to 64 bits; where the next one goes.

    The rest of its word, from `at` on, is 0 before and after. A word behind it is written to.
    """
    w, shift = at >> 6, U8(at & 63)
    words[w] |= value << shift
    # No branch: one in eight would go the other way.
    words[w + 1] = value >> ONE >> (U8(63) - shift)
    return at + nbits


@part(nogil=True)
def put_short(data, at, value, nbits, held):
    """As `put`, of up to 32 bits, to the bytes of the words; the next one goes to `at + nbits`.

    Bits of the byte at `at` are `held` before and after: nothing is read.
    """
    shift = at & 7
    held |= value << U8(shift)
    store8(data, at >> 3, held)
    return held >> U8(shift + nbits & ~7)


@part(nogil=True)
def held_at(words, at):
    """What `put_short` starts from."""
    return words[at >> 6] >> U8(at & 56)


@part(nogil=True)
def end_words(words, at):
    """Make the rest of a word 0 after calls of `put_short`."""
    words[at >> 6] &= low_mask(at & 63)


@part(apart=True, nogil=True)
def append(words, at, source, nbits):
    """Write the first bits of the words `source`, as `put` does."""
    for i in range(nbits >> 6):
        put(words, at + 64 * i, source[i], I8(64))
    left = nbits & 63
    put(words, at + nbits - left, source[nbits >> 6] & low_mask(left), left)
    return at + nbits


@part(nogil=True)
def set_hot(scale, width, kind, hot):
    """Of each exponent 128 and how many low bits a size has, if it is hot; else 0."""
    for e in range(1 << kind[1]):
        low = scale - 1 - e
        low = low if low < width else width
        hot[e] = low + 128 if low >= 0 else 0


@part(nogil=True)
def get(words, at, nbits):
    """Read a number of up to 64 bits; a word more than it needs has to be there."""
    w, shift = at >> 6, U8(at & 63)
    value = words[w] >> shift | words[w + 1] << ONE << (U8(63) - shift)
    return value & low_mask(nbits)


@part(nogil=True)
def get_short(data, at, mask):
    """As `get`, of the bytes of the words: the bits of `mask`, at most 57."""
    return load8(data, at >> 3) >> U8(at & 7) & mask


@part(nogil=True)
def next_one(words, at, end):
    """Number of the first set bit from `at` on; `end` or more if there is none before."""
    w = at >> 6
    value = words[w] >> U8(at & 63)
    if value:
        return at + I8(ctz(value))
    w += 1
    while w << 6 < end:
        if words[w]:
            return (w << 6) + I8(ctz(words[w]))
        w += 1
    return end


@part(nogil=True)
def exponent_of(v, kind):
    """Biased exponent of an element; 0 of what has none."""
    return I8(U8(v) >> U8(kind[2])) & ((1 << kind[1]) - 1)


@part(nogil=True)
def set_limits(center, kind, limits):
    """Where classes end: clipped to the exponents, so that none or all are below."""
    for c in range(CLASSES - 1):
        limit = center + LIMITS[c]
        limits[c] = limit if limit > 0 else 0


@part(nogil=True)
def _sort_block(x, at, there, k, masks, limits, space):
    """As `sort_classes`, of the elements `there` of block number `k`, from `at` on in `x`."""
    b0 = below(x, at, masks[0], masks[1], limits[0]) | masks[2]
    b1 = below(x, at, masks[0], masks[1], limits[1])
    b2 = below(x, at, masks[0], masks[1], limits[2])
    b3 = below(x, at, masks[0], masks[1], limits[3])
    of_classes = ~b0 & there, b0 & ~b1 & there, b1 & ~b2 & there, b2 & ~b3 & there, b3 & there
    for c in range(CLASSES):
        space.classes[U8(c * BLOCKS + k)] = of_classes[c]
        before = space.before[U8(c * STARTS + k)]
        space.before[U8(c * STARTS + k + 1)] = before + U2(popcount(of_classes[c]))


@part(nogil=True)
def sort_classes(x, n, kind, space):
    """Which of a tile's elements `x` are of each class, and how many before a block.

    `space.sizes` gets how many elements each class has.
    """
    one = x.dtype.type
    limits = space.limits
    largest = (1 << kind[1]) - 1
    # Of the first limit alone all exponents may be below.
    all0 = ZERO - U8(limits[0] > largest)
    masks = one(U8(largest) << U8(kind[2])), one(kind[2]), all0
    first = limits[0] if limits[0] <= largest else 0
    below_these = one(first), one(limits[1]), one(limits[2]), one(limits[3])
    for c in range(CLASSES):
        space.before[c * STARTS] = 0
    blocks = n // BLOCK
    for k in range(blocks):
        _sort_block(x, k * BLOCK, ~ZERO, k, masks, below_these, space)
    left = n - blocks * BLOCK
    if left:
        copy(space.block, 0, x, n - left, left * x.itemsize)
        there = low_mask(left)
        _sort_block(read_only(space.block), I8(0), there, blocks, masks, below_these, space)
        blocks += 1
    for c in range(CLASSES):
        space.sizes[c] = space.before[c * STARTS + blocks]


@part(nogil=True)
def one_class(n, space):
    """As `sort_classes`, where there is one class."""
    blocks = -(-n // BLOCK)
    for k in range(blocks):
        left = n - k * BLOCK
        space.classes[k] = low_mask(left if left < BLOCK else BLOCK)
        space.before[k] = k * BLOCK
    space.before[blocks] = n
    space.sizes[0] = n


@part(nogil=True)
def order_masks(kind):
    """What `ordered_bits` needs of a dtype: bits that flip always, and those with the sign."""
    top = ONE << U8(kind[0] - 1)
    return top if kind[1] or kind[5] else ZERO, top - ONE if kind[1] else ZERO


@part(nogil=True)
def ordered_bits(v, width, masks):
    """Bits of an element as a number of its order; of a number its bits are `unordered_bits`.

    As in all that looks at one change after the other there is no branch on what is at random.
    """
    return v ^ (masks[0] | (ZERO - (v >> U8(width - 1))) & masks[1])


@part(nogil=True)
def unordered_bits(v, width, masks):
    """The inverse of `ordered_bits`."""
    return v ^ (masks[0] | ((v >> U8(width - 1)) - ONE) & masks[1])


@part(nogil=True)
def digest_key(number):
    """The key of the word number `number` (uint32) of a chunk's elements."""
    key = U4(U4(number + U4(1)) * _STEP)
    key = U4(U4(key ^ U4(key >> _SHIFT0)) * _FACTOR0)
    key = U4(U4(key ^ U4(key >> _SHIFT1)) * _FACTOR1)
    return U4(key ^ U4(key >> _SHIFT2))


@part(nogil=True)
def digest_gain(old, new, i, itemsize):
    """What the digest of a chunk gains where element `i` becomes `new` instead of `old`."""
    at = U8(i) * U8(itemsize)
    number = U4(at >> U8(2))
    key = U8(digest_key(number))
    if itemsize < 8:
        return key * ((new - old) << (U8(8) * (at & U8(3))))
    following = U8(digest_key(U4(number + U4(1))))
    low = U8(0xFFFFFFFF)
    return key * ((new & low) - (old & low)) + following * ((new >> U8(32)) - (old >> U8(32)))


@part(apart=True, nogil=True)
def list_positions(flags, n, m, positions):
    """The numbers of the `m` set bits of `n`. There is place for eight more."""
    at = I8(0)
    if m * _MANY > n:
        data = view_as(flags, np.uint8)
        for k in range((n + 7) >> 3):
            byte = I8(item(data, k))
            _list_byte(byte, U2(8 * k), _IN_BYTE, positions, at)
            at += I8(popcount(U8(byte)))
        return
    for k in range((n + BLOCK - 1) // BLOCK):
        bits = flags[k]
        # Two steps without a branch cover most blocks.
        for _ in range(2):
            positions[at] = k * BLOCK + I8(ctz(bits))
            at += I8(bits != ZERO)
            bits &= bits - ONE
        while bits:
            positions[at] = k * BLOCK + I8(ctz(bits))
            at += 1
            bits &= bits - ONE


@part(nogil=True, error_model="numpy")
def gap_low_bits(size, listed):
    """Low bits of the gaps between `listed` of `size` elements."""
    return bit_length(U8(size // listed)) - 1 if listed else 0


@part(nogil=True)
def put_low(words, to, n_classes, space):
    """Write the low bits of all gaps; where the next code goes."""
    listed = space.list
    data = view_as(words, np.uint8)
    held = held_at(words, to)
    first = 0
    for c in range(n_classes):
        stop = first + space.listed[c]
        low = gap_low_bits(space.sizes[c], space.listed[c])
        mask, last = low_mask(low), -1
        for j in range(first, stop):
            rank = I8(item(listed, j))
            held = put_short(data, to, U8(rank - last - 1) & mask, low, held)
            last = rank
            to += low
        first = stop
    end_words(words, to)
    return to


@part(nogil=True)
def put_quotients(words, to, n_classes, space):
    """Write the quotients of all gaps; where the next code goes."""
    listed = space.list
    first = 0
    for c in range(n_classes):
        size, stop = space.sizes[c], first + space.listed[c]
        low = gap_low_bits(size, space.listed[c])
        most = stop - first + (size >> low) if stop > first else 0
        for i in range((to >> 6) + 1, (to + most >> 6) + 2):
            words[i] = 0
        block, last = to >> 6, -1
        here = words[block]
        for j in range(first, stop):
            rank = I8(item(listed, j))
            to += rank - last - 1 >> low
            last = rank
            here = (here if to >> 6 == block else ZERO) | ONE << U8(to & 63)
            block = to >> 6
            words[U8(block)] = here
            to += 1
        first = stop
    return to


@part(nogil=True)
def read_ranks(at, end, low_at, listed, size, space):
    """Set a flag of `space.ranks` for each listed element of a class that has `size`.

    Quotients of gaps start at `at`, low bits at `low_at`. Returns where quotients end; -1 early,
    -2 a bad gap.
    """
    words, ranks = space.words, space.ranks
    data = view_as(words, np.uint8)
    for i in range((size >> 6) + 2):
        ranks[i] = 0
    if listed == 0:
        return at
    low = gap_low_bits(size, listed)
    mask = low_mask(low)
    w = at >> 6
    bits = words[w] & (~ZERO << U8(at & 63))
    j, lows, one = 0, 0, 0
    block, here = -1, ZERO
    while True:
        stop = j + I8(popcount(bits))
        stop = stop if stop < listed else listed
        while j < stop:
            one = (w << 6) + I8(ctz(bits))
            bits &= bits - ONE
            lows += I8(get_short(data, low_at, mask))
            low_at += low
            # Between quotients, all that is not a one is a zero of one of them.
            rank = (one - at - j << low) + lows + j
            if rank >= size:
                return -2
            here = (here if rank >> 6 == block else ZERO) | ONE << U8(rank & 63)
            block = rank >> 6
            ranks[U8(block)] = here
            j += 1
        if j == listed:
            return one + 1
        w += 1
        if w << 6 >= end:
            return -1
        bits = words[w]


class Space(NamedTuple):
    """Memory of the kernels for one tile."""

    #: Bits of elements that have changed, and of those of each class; how many before a block.
    changed: Any
    classes: Any
    before: Any
    #: Flags of the elements of a class, side by side.
    ranks: Any
    #: Of each class: its limit, elements, changes, and how many are listed.
    limits: Any
    sizes: Any
    counts: Any
    listed: Any
    #: Elements of classes that are listed, one class behind the other.
    list: Any
    #: Of each change: its place, exponent, size; of hot ones: quotient. Numbers of exceptions.
    positions: Any
    exponents: Any
    changes: Any
    quotients: Any
    exceptions: Any
    #: Bits of changes, and words of quotients and low bits.
    negative: Any
    unary: Any
    lows: Any
    #: How many changes have an exponent, and a sum of exponent and bit length.
    hist: Any
    words: Any
    block: Any
    #: Elements with their new bits.
    tile: Any
    #: See `set_hot`.
    hot: Any
    #: Words at the end of a tile, fewer than a block of them.
    last_words: Any
    #: Where low bits of gaps start, and how many changes a tile has.
    places: Any
    #: To encode planes: bits of elements for each of them, how many, and words.
    flags: Any
    ones: Any
    planes: Any


def space_for(dtype: DType) -> Space:
    """New memory; what is not written to takes none."""
    return Space(
        np.empty(BLOCKS, np.uint64),
        np.empty(CLASSES * BLOCKS, np.uint64),
        np.empty(CLASSES * STARTS, np.uint16),
        np.empty(BLOCKS + 2, np.uint64),
        np.empty(CLASSES, np.int64),
        np.empty(CLASSES, np.int64),
        np.empty(CLASSES, np.int64),
        np.empty(CLASSES, np.int64),
        np.empty(TILE + 8, np.uint16),
        np.empty(TILE + 8, np.uint16),
        np.empty(TILE, np.uint16),
        np.empty(TILE, dtype.bits),
        np.empty(TILE, np.uint8),
        np.empty(TILE, np.uint16),
        np.empty(BLOCKS + 1, np.uint64),
        np.empty(TILE * (MAX_QUOTIENT + 1) // 64 + 2, np.uint64),
        np.empty(TILE * dtype.itemsize // 8 + 2, np.uint64),
        np.zeros(2 * SCALES, np.uint32),
        np.empty(words_of(dtype.itemsize) + TILE * dtype.itemsize // 8 + 8, np.uint64),
        np.zeros(BLOCK, dtype.bits),
        np.empty(TILE, dtype.bits),
        np.empty(1 << 11, np.uint8),
        np.empty(WORDS, np.uint32),
        np.empty(2, np.int64),
        np.empty(8 * dtype.itemsize * BLOCKS + 1, np.uint64),
        np.empty(8 * dtype.itemsize, np.int64),
        # As many as a plain tile has, and another plane.
        np.empty(TILE * dtype.itemsize // 8 + 2 * BLOCKS + 8, np.uint64),
    )


def words_of(itemsize: int) -> int:
    """More words than a tile whose elements have all changed, each by an exception, takes.

    Behind them there is memory for a low part of each: the decoder reads before it can check.
    """
    return TILE * (16 * itemsize + 40) // 64


@intrinsic
def _digest_of_block(typingctx, words, at, first):
    """The keyed sum of `WORDS` words from `at` on, of which the first has the number `first`."""

    def codegen(context, builder, signature, args):
        x, vector = load_block(context, builder, signature.args[0], args[0], args[1], WORDS)
        word, pair = vector.element, ir.VectorType(ir.IntType(64), WORDS // 2)

        def each(number):
            return ir.Constant(vector, [ir.Constant(word, int(number))] * WORDS)

        numbers = ir.Constant(vector, [ir.Constant(word, i + 1) for i in range(WORDS)])
        key = builder.mul(builder.add(splat(builder, args[2], vector), numbers), each(_STEP))
        for shift, factor in ((_SHIFT0, _FACTOR0), (_SHIFT1, _FACTOR1)):
            key = builder.mul(builder.xor(key, builder.lshr(key, each(shift))), each(factor))
        key = builder.xor(key, builder.lshr(key, each(_SHIFT2)))
        # Halves of 64 bits are multiplied without unpacking.
        x, key = builder.bitcast(x, pair), builder.bitcast(key, pair)
        half = ir.Constant(pair, [ir.Constant(pair.element, 32)] * (WORDS // 2))
        low = ir.Constant(pair, [ir.Constant(pair.element, 0xFFFFFFFF)] * (WORDS // 2))
        even = builder.mul(builder.and_(x, low), builder.and_(key, low))
        odd = builder.mul(builder.lshr(x, half), builder.lshr(key, half))
        kind = ir.FunctionType(pair.element, [pair])
        name = f"llvm.vector.reduce.add.v{WORDS // 2}i64"
        add = _function(builder, kind, name)
        return builder.call(add, [builder.add(even, odd)])

    return types.uint64(words, types.int64, types.uint32), codegen


@part(rare=True, nogil=True)
def _digest_of_rest(x, first, block):
    """As `add_digest` to 0, of what is behind the last whole block of words."""
    data, last = view_as(x, np.uint8), view_as(block, np.uint8)
    whole = data.size // (4 * WORDS) * (4 * WORDS)
    if whole == data.size:
        return ZERO
    for i in range(4 * WORDS):
        last[i] = data[whole + i] if whole + i < data.size else 0
    return _digest_of_block(block, 0, U4(first + U4(whole >> 2)))


@part(nogil=True)
def add_digest(total, x, first_byte, block):
    """`total` and the keyed sum of elements from byte `first_byte` on, a multiple of 4."""
    words = view_as(x, np.uint32)
    first = U4(first_byte >> 2)
    for i in range(0, words.size // WORDS * WORDS, WORDS):
        total += _digest_of_block(words, i, U4(first + U4(i)))
    return total + _digest_of_rest(x, first, block)


@part(nogil=True)
def digests_of(x, y, first_byte, block):
    """As `add_digest` to 0, of two arrays that differ much."""
    old, new = view_as(x, np.uint32), view_as(y, np.uint32)
    first = U4(first_byte >> 2)
    before, after = _digest_of_rest(x, first, block), _digest_of_rest(y, first, block)
    for i in range(0, old.size // WORDS * WORDS, WORDS):
        before += _digest_of_block(old, i, U4(first + U4(i)))
        after += _digest_of_block(new, i, U4(first + U4(i)))
    return before, after


def kind_numbers(dtype: DType) -> tuple[int, ...]:
    """The fields of `delta.Kind`, as kernels get them."""
    return tuple(map(int, kind_of(dtype)))
