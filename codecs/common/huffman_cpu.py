# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment"
"""Tables and blocks of codecs/common/huffman.py with Numba, for kernels of codecs.

Bits are read and written 8 bytes at a time, at any address. An entry of the decoder's table stands
for all codes that 11 bits hold, and four runs are decoded side by side.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numba import types
from numba.extending import intrinsic

from .arrays_cpu import view_as
from .compile_cache import part
from .huffman import (
    CLASSES,
    COMMON,
    CONSTANT,
    ESCAPE,
    LIMIT,
    NARROW,
    RARE,
    RUN,
    RUNS,
    SAVED,
    SCALE,
    STORED,
    TABLE_NBYTES,
    TILE,
    WEIGHT_BITS,
    WIDE,
)

U1, U2, U4, U8, I8 = np.uint8, np.uint16, np.uint32, np.uint64, np.int64
_CODES = 1 << LIMIT
#: Flag of an entry for an escape.
_ESCAPED = 1 << 24
#: Entries of an encoder: symbols, then what has no class.
_ENTRIES = 768
#: Bits, and entries, of a decoder's table of several codes.
_SEVERAL_BITS = 11
_SEVERAL = 1 << _SEVERAL_BITS
#: Bytes that five entries of several codes write at most.
_AT_ONCE = 20
#: Bytes of codes of a tile at most, and what is written behind them.
BITS_NBYTES = TILE * (LIMIT + 8) // 8 + 64
#: Bytes of what `encoding_of` and `decoding_of` fill.
ENCODING_NBYTES = 4 * _ENTRIES + 2 * 512 + 8 * 16
DECODING_NBYTES = 4 * _CODES + 8 * _SEVERAL + 8 * 16
#: Bytes of work memory of `find_table`.
FINDING_NBYTES = 8 * 770 + 4 * 258


def _pointer(context, builder, signature, array, at, kind):
    """A pointer to a number of a type, at byte `at` of an array."""
    from numba.np.arrayobj import make_array

    data = make_array(signature.args[0])(context, builder, array).data
    return builder.bitcast(builder.gep(data, [at]), context.get_value_type(kind).as_pointer())


@intrinsic
def load8(typingctx, array, at):
    """The 8 bytes from byte `at` on, uint64. Nothing is checked."""

    def codegen(context, builder, signature, args):
        pointer = _pointer(context, builder, signature, args[0], args[1], types.uint64)
        return builder.load(pointer, align=1)

    return types.uint64(array, types.int64), codegen


@intrinsic
def store8(typingctx, array, at, value):
    """Write 8 bytes from byte `at` on. Nothing is checked."""

    def codegen(context, builder, signature, args):
        pointer = _pointer(context, builder, signature, args[0], args[1], types.uint64)
        builder.store(args[2], pointer, align=1)
        return context.get_dummy_value()

    return types.void(array, types.int64, types.uint64), codegen


@intrinsic
def store4(typingctx, array, at, value):
    """Write 4 bytes from byte `at` on. Nothing is checked."""

    def codegen(context, builder, signature, args):
        pointer = _pointer(context, builder, signature, args[0], args[1], types.uint32)
        builder.store(args[2], pointer, align=1)
        return context.get_dummy_value()

    return types.void(array, types.int64, types.uint32), codegen


@intrinsic
def item(typingctx, array, at):
    """The item number `at` of an array. Unlike `array[at]`, nothing is added to a negative one."""

    def codegen(context, builder, signature, args):
        from numba.np.arrayobj import make_array

        data = make_array(signature.args[0])(context, builder, args[0]).data
        return builder.load(builder.gep(data, [args[1]]))

    return array.dtype(array, types.int64), codegen


@intrinsic
def prefetch(typingctx, array, at):
    """Have the processor fetch the item number `at`, which is read soon."""

    def codegen(context, builder, signature, args):
        from numba.core.cgutils import ir
        from numba.np.arrayobj import make_array

        data = make_array(signature.args[0])(context, builder, args[0]).data
        pointer = builder.bitcast(builder.gep(data, [args[1]]), ir.IntType(8).as_pointer())
        kinds = [pointer.type, *[ir.IntType(32)] * 3]
        call = builder.module.declare_intrinsic(
            "llvm.prefetch", [pointer.type], ir.FunctionType(ir.VoidType(), kinds)
        )
        # To read, into all caches, data.
        builder.call(call, [pointer, *(ir.Constant(ir.IntType(32), n) for n in (0, 3, 1))])
        return context.get_dummy_value()

    return types.void(array, types.int64), codegen


# Tables


@part(nogil=True)
def is_sampled(i):
    """Whether the 32 bytes from number `i` on, a multiple of 32, are in a long plane's sample."""
    block = i >> 8
    return i >> 5 & 7 == (block ^ block >> 3 ^ block >> 6) & 7


@part(nogil=True)
def _left(weights, s):
    """What lengths for `s` leave of 2^LIMIT; negative if they do not fit."""
    taken = U4(0)
    for i in range(ESCAPE + 1):
        w = weights[i]
        length = U4(1)
        for k in range(1, LIMIT):
            length += U4(U4(w << U4(k)) < s)
        taken += U4(U4(_CODES) >> length) if w > U4(0) else U4(0)
    return I8(_CODES) - I8(taken)


@part(nogil=True)
def _lengths_of(weights, order, lengths):
    """See `huffman.lengths_of`. `order` is work memory; `lengths` become those of symbols."""
    # With 2^21 any code fits: weights add up to 2^20 + 1 at most.
    low, high = I8(1), I8(1) << 21
    while low < high:
        middle = (low + high) // 2
        if _left(weights, U4(middle)) >= 0:
            high = middle
        else:
            low = middle + 1
    rest = _left(weights, U4(low))
    n = 0
    for i in range(ESCAPE + 1):
        w = weights[i]
        lengths[i] = 0
        if w > 0:
            length = 1
            for k in range(1, LIMIT):
                length += I8(I8(w) << k < low)
            lengths[i] = length
            at = n
            while at > 0 and weights[order[at - 1]] < w:
                order[at] = order[at - 1]
                at -= 1
            order[at] = i
            n += 1
    while rest > 0:
        for length in range(2, LIMIT + 1):
            cost = I8(1) << (LIMIT - length)
            for i in range(n):
                if rest >= cost and lengths[order[i]] == length:
                    lengths[order[i]] = length - 1
                    rest -= cost


def _classes_of_by(unit):
    """Counts of classes from those of values; fills the list of values."""
    n_classes = CLASSES[unit]

    @part(nogil=True, rare=True)
    def classes_of(counts, values, found):
        for k in range(16):
            values[k] = 0
        for k in range(n_classes):
            best = 0
            for v in range(256):
                if counts[v] > counts[best]:
                    best = v
            found[k] = counts[best]
            if counts[best] > 0:
                values[k] = best
                counts[best] = 0

    return classes_of


@cache
def find_table_by(unit):
    """What finds the table of a plane in units of `unit` bytes."""
    classes = CLASSES[unit]
    n_values, shift = (classes, 8 // unit) if classes else (256, 8)
    classes_of = _classes_of_by(unit)

    @part(nogil=True, rare=True)
    def find_table(space, counts, table):
        """Write the table for `counts` (int64, shape (256,), changed) to `table` (152 bytes).

        False if coding saves too little. `space`: FINDING_NBYTES of work memory.
        """
        ints = view_as(space, np.int64)
        kept, lengths, order = ints[:256], ints[256:513], ints[513:770]
        weights = view_as(space[8 * 770 :], np.uint32)
        total, seen, least = I8(0), 0, I8(1) << 62
        for v in range(256):
            total += counts[v]
            if counts[v] > 0:
                seen += 1
                least = least if least < counts[v] else counts[v]
        all_common = seen > 1 and least << COMMON >= total
        for i in range(TABLE_NBYTES):
            table[i] = 0
        if classes:
            classes_of(counts, table[:16], kept)
        else:
            for v in range(256):
                kept[v] = counts[v]
        if not classes:
            # No code takes fewer bits than the entropy.
            entropy = 0.0
            for v in range(256):
                if kept[v] > 0:
                    entropy += kept[v] * np.log2(total / kept[v])
            if entropy * SAVED > total * (8.0 * SAVED - 7.9):
                return False
        rest = I8(1) << WEIGHT_BITS
        any_code = False
        for symbol in range(256):
            w, s = I8(1) << WEIGHT_BITS, symbol
            for _ in range(unit):
                w = w * kept[s & (n_values - 1)] // total
                s >>= shift
            if w < I8(1) << (WEIGHT_BITS - RARE):
                w = I8(0)
            rest -= w
            weights[symbol] = w >> SCALE
            any_code = any_code or w > 0
        rest >>= SCALE
        weights[ESCAPE] = 1 if rest < 1 and not all_common else rest
        if not any_code:
            return False
        _lengths_of(weights, order, lengths)
        bits, most = 8 * unit * I8(weights[ESCAPE]), I8(0)
        for i in range(ESCAPE + 1):
            bits += I8(weights[i]) * lengths[i]
            most += I8(weights[i])
        if bits * SAVED > most * 8 * unit * (SAVED - 1):
            return False
        for i in range(128):
            table[16 + i] = lengths[2 * i] | lengths[2 * i + 1] << 4
        table[144] = lengths[ESCAPE]
        return True

    return find_table


@part(nogil=True)
def _length_in(table, symbol):
    """Length of a symbol's code in a table's bytes."""
    if symbol == ESCAPE:
        return I8(table[144])
    return I8(table[16 + (symbol >> 1)] >> U1(4 * (symbol & 1))) & 15


@part(nogil=True)
def _reversed(x):
    """12 bits in reverse order."""
    x = (x & 0x555) << 1 | x >> 1 & 0x555
    x = (x & 0x333) << 2 | x >> 2 & 0x333
    return (x & 0xF) << 8 | x & 0xF0 | x >> 8


@part(nogil=True)
def _starts_of(table, starts):
    """For each length the 12 bits with which its codes start, in `starts` (int64, (16,))."""
    for length in range(16):
        starts[length] = 0
    for symbol in range(ESCAPE + 1):
        starts[_length_in(table, symbol)] += 1
    at = I8(0)
    for length in range(1, LIMIT + 1):
        n = starts[length]
        starts[length] = at
        at += n << (LIMIT - length)


@part(nogil=True, rare=True)
def is_good(table):
    """Whether a table's code is complete, and its end zero."""
    left = I8(_CODES)
    for symbol in range(ESCAPE + 1):
        length = _length_in(table, symbol)
        if length > LIMIT:
            return False
        if length > 0:
            left -= I8(_CODES) >> length
    for i in range(145, TABLE_NBYTES):
        if table[i] != 0:
            return False
    return left == 0


@cache
def encoding_of_by(unit):
    """What makes an encoder's entries of a table."""
    classes = CLASSES[unit]

    @part(nogil=True, rare=True)
    def encoding_of(table, space):
        """Fill `space` (ENCODING_NBYTES): entries by symbol, then classes by value.

        An entry is code + 2^16 length, and `_ESCAPED` where a unit escapes. Where a class is not
        there, it is `ESCAPE`.
        """
        entries = view_as(space[: 4 * _ENTRIES], np.uint32)
        values = view_as(space[4 * _ENTRIES : 4 * _ENTRIES + 1024], np.uint16)
        starts = view_as(space[4 * _ENTRIES + 1024 :], np.int64)
        _starts_of(table, starts)
        for symbol in range(ESCAPE + 1):
            length = _length_in(table, symbol)
            entries[symbol] = 0
            if length > 0:
                entries[symbol] = U4(_reversed(starts[length]) | length << 16)
                starts[length] += I8(_CODES) >> length
        escape = U4(entries[ESCAPE] | U4(_ESCAPED))
        for symbol in range(_ENTRIES):
            if symbol >= ESCAPE or entries[symbol] == 0:
                entries[symbol] = escape
        if classes:
            for v in range(512):
                values[v] = ESCAPE
            for c in range(classes):
                k = classes - 1 - c
                values[I8(table[k])] = k
                values[256 + I8(table[k])] = k << 4

    return encoding_of


@cache
def decoding_of_by(unit):
    """What makes a decoder's entries of a table."""

    @part(nogil=True)
    def decoding_of(table, space):
        """Fill `space` (DECODING_NBYTES): entries by the next 12 bits; then, of units of 8 bytes,
        the bytes by symbol, and of others, by the next 11 bits, what several codes stand for.

        An entry is the symbol, or 2 bytes, + 2^16 length, and `_ESCAPED` of the escape; one of
        several codes is bits + 2^8 number of bytes + 2^32 up to 4 bytes, or 0 for what takes more.
        """
        entries = view_as(space[: 4 * _CODES], np.uint32)
        several = view_as(space[4 * _CODES : 4 * _CODES + 8 * _SEVERAL], np.uint64)
        starts = view_as(space[4 * _CODES + 8 * _SEVERAL :], np.int64)
        _starts_of(table, starts)
        for symbol in range(ESCAPE + 1):
            length = _length_in(table, symbol)
            if length > 0:
                if symbol == ESCAPE:
                    entry = I8(_ESCAPED)
                elif unit == 2:
                    entry = I8(table[symbol & 15]) | I8(table[symbol >> 4]) << 8
                else:
                    entry = I8(symbol)
                code, step = _reversed(starts[length]), I8(1) << length
                starts[length] += I8(_CODES) >> length
                while code < _CODES:
                    entries[code] = U4(entry | length << 16)
                    code += step
        if unit == 8:
            for symbol in range(256):
                word = U8(0)
                for j in range(8):
                    word |= U8(table[symbol >> j & 1]) << U8(8 * j)
                several[symbol] = word
        else:
            for bits in range(_SEVERAL):
                rest, left, n, word = I8(bits), I8(_SEVERAL_BITS), I8(0), U8(0)
                while n < 4:
                    entry = item(entries, rest)
                    length = I8(entry >> U4(16)) & 15
                    if length > left or entry & U4(_ESCAPED):
                        break
                    word |= U8(entry & U4(0xFFFF)) << U8(8 * n)
                    n += unit
                    left -= length
                    rest >>= length
                several[bits] = U8(_SEVERAL_BITS - left) | U8(n) << U8(8) | word << U8(32)

    return decoding_of


# Blocks


@part(nogil=True)
def _is_constant(plane, n):
    """Whether the first `n` bytes are alike."""
    value = plane[0]
    if plane[n - 1] != value or plane[n // 2] != value:
        return False
    other = U1(0)
    for i in range(n):
        other |= U1(plane[i] ^ value)
    return other == 0


@part(nogil=True)
def _write_head(out, at, mode, value, base):
    store4(out, at, U4(mode | value << 8 | base << 16))
    return at + 4


@part(nogil=True)
def _write_stored(plane, n, out, at):
    """A stored block; gives its end."""
    at = _write_head(out, at, STORED, 0, 0)
    for i in range(n):
        out[at + i] = plane[i]
    end = at + (n + 3) // 4 * 4
    for i in range(at + n, end):
        out[i] = 0
    return end


@cache
def encode_block_by(unit):
    """What encodes a tile's plane in units of `unit` bytes."""

    @part(nogil=True)
    def entry_at(entries, values, plane, i):
        if unit == 1:
            return item(entries, I8(item(plane, i)))
        if unit == 2:
            low = item(values, I8(item(plane, i)))
            return item(entries, I8(low) + I8(item(values, 256 + I8(item(plane, i + 1)))))
        symbol = I8(0)
        known = True
        for j in range(8):
            c = I8(item(values, I8(item(plane, i + j))))
            known = known and c < ESCAPE
            symbol |= c << j
        return item(entries, symbol if known else I8(ESCAPE))

    @part(nogil=True, rare=True)
    def encode_one(entry, plane, i, coded, to, word, n):
        """Append a unit; gives (bytes, bits behind them, how many)."""
        word |= U8(entry & U4(0xFFFF)) << U8(n)
        n += I8(entry >> U4(16)) & 15
        if entry & U4(_ESCAPED):
            for j in range(unit):
                store8(coded, to, word)
                to += n >> 3
                word >>= U8(n & ~7)
                n &= 7
                word |= U8(plane[i + j]) << U8(n)
                n += 8
        store8(coded, to, word)
        return to + (n >> 3), word >> U8(n & ~7), n & 7

    @part(nogil=True)
    def encode_block(space, sizes, coded, plane, m, out, at):
        """Encode the first `m` bytes of `plane`, which go on up to a unit's end; gives the end.

        `space` is filled by `encoding_of`; `sizes` (int64, one for each run) and `coded`
        (BITS_NBYTES) are work memory. At `out` there is memory for a stored block.
        """
        if _is_constant(plane, m):
            return _write_head(out, at, CONSTANT, I8(plane[0]), I8(0))
        entries = view_as(space[: 4 * _ENTRIES], np.uint32)
        values = view_as(space[4 * _ENTRIES :], np.uint16)
        if entries[ESCAPE] == U4(_ESCAPED):
            # An escape without a code.
            found = U4(0)
            for i in range(0, m, unit):
                found |= entry_at(entries, values, plane, i)
            if found & U4(_ESCAPED):
                return _write_stored(plane, m, out, at)
        runs = (m + RUN - 1) // RUN
        to, word, n = I8(0), U8(0), I8(0)
        least, most = I8(1) << 32, I8(0)
        for r in range(runs):
            before = 8 * to + n
            i = r * RUN
            stop = min(i + RUN, m)
            while i + 4 * unit <= stop:
                e0 = entry_at(entries, values, plane, i)
                e1 = entry_at(entries, values, plane, i + unit)
                e2 = entry_at(entries, values, plane, i + 2 * unit)
                e3 = entry_at(entries, values, plane, i + 3 * unit)
                if (e0 | e1 | e2 | e3) & U4(_ESCAPED):
                    to, word, n = encode_one(e0, plane, i, coded, to, word, n)
                    to, word, n = encode_one(e1, plane, i + unit, coded, to, word, n)
                    to, word, n = encode_one(e2, plane, i + 2 * unit, coded, to, word, n)
                    to, word, n = encode_one(e3, plane, i + 3 * unit, coded, to, word, n)
                else:
                    n0, n2 = e0 >> U4(16), e2 >> U4(16)
                    n01, n23 = n0 + (e1 >> U4(16)), n2 + (e3 >> U4(16))
                    low = U8(e0 & U4(0xFFFF)) | U8(e1 & U4(0xFFFF)) << U8(n0)
                    high = U8(e2 & U4(0xFFFF)) | U8(e3 & U4(0xFFFF)) << U8(n2)
                    word |= (low | high << U8(n01)) << U8(n)
                    n += I8(n01 + n23)
                    store8(coded, to, word)
                    to += n >> 3
                    word >>= U8(n & ~7)
                    n &= 7
                i += 4 * unit
            while i < stop:
                entry = entry_at(entries, values, plane, i)
                to, word, n = encode_one(entry, plane, i, coded, to, word, n)
                i += unit
            size = 8 * to + n - before
            sizes[r] = size
            least = least if least < size else size
            most = most if most > size else size
        store8(coded, to, word)
        nbytes = (8 * to + n + 31) // 32 * 4
        narrow = most - least < 256
        listed = (runs * (1 if narrow else 2) + 3) // 4 * 4
        if listed + nbytes >= (m + 3) // 4 * 4:
            return _write_stored(plane, m, out, at)
        base = least if narrow else I8(0)
        at = _write_head(out, at, NARROW if narrow else WIDE, 0, base)
        for i in range(listed):
            out[at + i] = 0
        for r in range(runs):
            if narrow:
                out[at + r] = sizes[r] - base
            else:
                out[at + 2 * r] = sizes[r] & 255
                out[at + 2 * r + 1] = sizes[r] >> 8
        at += listed
        for i in range(nbytes):
            out[at + i] = coded[i]
        return at + nbytes

    return encode_block


@cache
def decode_block_by(unit):
    """What decodes a tile's plane in units of `unit` bytes."""

    @part(nogil=True, forceinline=True)
    def word_at(data, last, at):
        """At least 57 bits from bit `at` on; behind the end any."""
        byte = at >> 3
        byte = byte if byte < last else last
        return load8(data, byte) >> U8(at & 7)

    @part(nogil=True, rare=True)
    def decode_few(entries, spread, data, last, at, out, i, count):
        """Decode `count` units one by one to `out[i]` and on; gives the bit behind them."""
        for k in range(count):
            entry = entries[I8(word_at(data, last, at) & U8(_CODES - 1))]
            at += I8(entry >> U4(16)) & 15
            to = i + k * unit
            if entry & U4(_ESCAPED):
                for j in range(unit):
                    out[to + j] = U1(word_at(data, last, at))
                    at += 8
            elif unit == 1:
                out[to] = U1(entry)
            elif unit == 2:
                out[to] = U1(entry)
                out[to + 1] = U1(entry >> U4(8))
            else:
                store8(out, to, item(spread, I8(entry & U4(255))))
        return at

    @part(nogil=True, forceinline=True)
    def decode_four(entries, spread, data, last, at, out, i):
        """As `decode_few`, of four units."""
        word = word_at(data, last, at)
        e0 = item(entries, I8(word & U8(_CODES - 1)))
        n = U8(e0 >> U4(16)) & U8(15)
        word >>= n
        e1 = item(entries, I8(word & U8(_CODES - 1)))
        n1 = U8(e1 >> U4(16)) & U8(15)
        word >>= n1
        e2 = item(entries, I8(word & U8(_CODES - 1)))
        n2 = U8(e2 >> U4(16)) & U8(15)
        word >>= n2
        e3 = item(entries, I8(word & U8(_CODES - 1)))
        n3 = U8(e3 >> U4(16)) & U8(15)
        if (e0 | e1 | e2 | e3) & U4(_ESCAPED):
            return decode_few(entries, spread, data, last, at, out, i, 4)
        if unit == 1:
            low = U4(e0 & U4(255)) | U4(U4(e1 & U4(255)) << U4(8))
            high = U4(e2 & U4(255)) | U4(U4(e3 & U4(255)) << U4(8))
            store4(out, i, U4(low | U4(high << U4(16))))
        elif unit == 2:
            low = U4(e0 & U4(0xFFFF)) | U4(U4(e1 & U4(0xFFFF)) << U4(16))
            high = U4(e2 & U4(0xFFFF)) | U4(U4(e3 & U4(0xFFFF)) << U4(16))
            store8(out, i, U8(low) | U8(high) << U8(32))
        else:
            store8(out, i, item(spread, I8(e0 & U4(255))))
            store8(out, i + 8, item(spread, I8(e1 & U4(255))))
            store8(out, i + 16, item(spread, I8(e2 & U4(255))))
            store8(out, i + 24, item(spread, I8(e3 & U4(255))))
        return at + I8(n + n1 + n2 + n3)

    @part(nogil=True, forceinline=True)
    def step(several, word, out, i, taken):
        """Write what an entry of several codes stands for: (word, byte, entries so far, entry)."""
        entry = item(several, I8(word & U8(_SEVERAL - 1)))
        store4(out, i, U4(entry >> U8(32)))
        return word >> (entry & U8(63)), i + (I8(entry >> U8(8)) & 7), taken + entry, entry

    @part(nogil=True, forceinline=True)
    def step_on(entries, several, data, last, at, out, i, taken, entry):
        """(bit, byte) after five entries, or behind one more unit if the last one has no codes."""
        # Five numbers of bits add up to less than 64.
        at += I8(taken & U8(63))
        if entry == U8(0):
            at = decode_few(entries, several, data, last, at, out, i, 1)
            i += unit
        return at, i

    @part(nogil=True, rare=True)
    def decode_rest(entries, several, data, last, at, out, i, stop):
        """Decode units up to byte `stop` of `out`; gives the bit behind them."""
        if unit < 8:
            while i + _AT_ONCE <= stop:
                word, taken, entry = word_at(data, last, at), U8(0), U8(0)
                for _ in range(5):
                    word, i, taken, entry = step(several, word, out, i, taken)
                at, i = step_on(entries, several, data, last, at, out, i, taken, entry)
        while i + 4 * unit <= stop:
            at = decode_four(entries, several, data, last, at, out, i)
            i += 4 * unit
        left = (stop - i + unit - 1) // unit
        return decode_few(entries, several, data, last, at, out, i, left)

    @part(nogil=True)
    def decode_block(space, ends, data, at, stop, out, m):
        """Decode a block that starts at byte `at` of `data` to the first `m` bytes of `out`.

        Gives its end, which is at most `stop`, or -1 if it is none. `space` is filled by
        `decoding_of`; `ends` (int64, 2 for each run) is work memory. 8 bytes follow at `stop`, and
        `out` goes on for 32 bytes behind m.
        """
        if at + 4 > stop:
            return I8(-1)
        head = I8(load8(data, at) & U8(0xFFFFFFFF))
        mode, value, base = head & 255, head >> 8 & 255, head >> 16
        bad = mode > WIDE or (value != 0 and mode != CONSTANT) or (base != 0 and mode != NARROW)
        at += 4
        if bad:
            return I8(-1)
        if mode == CONSTANT:
            for i in range(m):
                out[i] = value
            return at
        if mode == STORED:
            end = at + (m + 3) // 4 * 4
            if end > stop:
                return I8(-1)
            for i in range(m):
                out[i] = data[at + i]
            rest = U1(0)
            for i in range(at + m, end):
                rest |= data[i]
            return end if rest == 0 else I8(-1)
        runs = (m + RUN - 1) // RUN
        width = 1 if mode == NARROW else 2
        begin = at + (runs * width + 3) // 4 * 4
        if begin > stop:
            return I8(-1)
        bit = 8 * begin
        for r in range(runs):
            size = I8(data[at + r * width])
            if width == 2:
                size |= I8(data[at + 2 * r + 1]) << 8
            ends[r] = bit
            bit += size + base
            ends[RUNS + r] = bit
        rest = U1(0)
        for i in range(at + runs * width, begin):
            rest |= data[i]
        end = begin + (bit - 8 * begin + 31) // 32 * 4
        if end > stop or rest != 0:
            return I8(-1)
        if bit < 8 * end and load8(data, end - 8) >> U8(64 - (8 * end - bit)) != 0:
            return I8(-1)
        entries = view_as(space[: 4 * _CODES], np.uint32)
        several = view_as(space[4 * _CODES :], np.uint64)
        wrong = I8(0)
        for r in range(0, runs - 3, 4):
            a, b, c, d = ends[r], ends[r + 1], ends[r + 2], ends[r + 3]
            i = r * RUN
            j, k, n = i + RUN, i + 2 * RUN, i + 3 * RUN
            stops = min(i + RUN, m), min(j + RUN, m), min(k + RUN, m), min(n + RUN, m)
            if unit < 8:
                # Runs take about as long each, so that few bytes are left of any at the end.
                while (
                    i + _AT_ONCE <= stops[0]
                    and j + _AT_ONCE <= stops[1]
                    and k + _AT_ONCE <= stops[2]
                    and n + _AT_ONCE <= stops[3]
                ):
                    wa, wb = word_at(data, stop, a), word_at(data, stop, b)
                    wc, wd = word_at(data, stop, c), word_at(data, stop, d)
                    ta = tb = tc = td = ea = eb = ec = ed = U8(0)
                    for _ in range(5):
                        wa, i, ta, ea = step(several, wa, out, i, ta)
                        wb, j, tb, eb = step(several, wb, out, j, tb)
                        wc, k, tc, ec = step(several, wc, out, k, tc)
                        wd, n, td, ed = step(several, wd, out, n, td)
                    a, i = step_on(entries, several, data, stop, a, out, i, ta, ea)
                    b, j = step_on(entries, several, data, stop, b, out, j, tb, eb)
                    c, k = step_on(entries, several, data, stop, c, out, k, tc, ec)
                    d, n = step_on(entries, several, data, stop, d, out, n, td, ed)
            a = decode_rest(entries, several, data, stop, a, out, i, stops[0])
            b = decode_rest(entries, several, data, stop, b, out, j, stops[1])
            c = decode_rest(entries, several, data, stop, c, out, k, stops[2])
            d = decode_rest(entries, several, data, stop, d, out, n, stops[3])
            wrong |= (a ^ ends[RUNS + r]) | (b ^ ends[RUNS + r + 1])
            wrong |= (c ^ ends[RUNS + r + 2]) | (d ^ ends[RUNS + r + 3])
        for r in range(runs // 4 * 4, runs):
            a = decode_rest(
                entries, several, data, stop, ends[r], out, r * RUN, min(r * RUN + RUN, m)
            )
            wrong |= a ^ ends[RUNS + r]
        if wrong != 0:
            return I8(-1)
        return end

    return decode_block
