# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment"
"""Tables and blocks of codecs/common/huffman.py with Numba, for kernels of codecs.

An encoder looks up two bytes at a time, whatever the unit; an entry of a decoder's table stands for
all codes that 12 bits hold, and four runs are decoded side by side. So one function does for units
of 1 and of 2 bytes. Bits are read and written 8 bytes at a time, at any address.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from .arrays_cpu import view_as
from .compile_cache import part
from .huffman import (
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
from .memory_cpu import copy_bytes, fill_bytes, item, leading_zeros, load2, load8, store4, store8

U1, U2, U4, U8, I8 = np.uint8, np.uint16, np.uint32, np.uint64, np.int64
_CODES = 1 << LIMIT
#: Flag of a decoder's entry for an escape.
_ESCAPED = 1 << 24
#: An encoder's entry: bits of the code's length, below the code, and the flag of an escape.
_LENGTH_BITS = 6
_LENGTH = (1 << _LENGTH_BITS) - 1
_NO_CODE = 1 << 31
#: Entries of an encoder by symbol, and by two bytes.
_SYMBOLS, _PAIRS = ESCAPE + 1, 1 << 16
#: Entries of several codes between two loads, and bytes that they write at most.
_STEPS = 4
_AT_ONCE = 4 * _STEPS
#: Bytes of codes of a tile at most, and what is written behind them.
BITS_NBYTES = TILE * (LIMIT + 8) // 8 + 64
#: Bytes of what `encoding_of` and `decoding_of` fill.
ENCODING_NBYTES = 4 * _PAIRS + 4 * (_SYMBOLS + 3) + 8 * 16
DECODING_NBYTES = 10 * _CODES + 8 * 16
#: Bytes of work memory of `find_table`.
FINDING_NBYTES = 8 * 770 + 4 * 258


# Tables


@part(nogil=True)
def less(a, b):
    """The lesser of two numbers."""
    return a if a < b else b


@part(nogil=True)
def sampled_at(i):
    """Where in the 256 bytes from number `i` on, a multiple of it, those of a sample start."""
    block = i >> 8
    return ((block ^ block >> 3 ^ block >> 6) & 7) << 5


@part(nogil=True)
def _length_for(w, s):
    """The least length l, from 1 to `LIMIT`, with `w * 2^l` at least `s`."""
    length = leading_zeros(U8(w)) - leading_zeros(U8(s - 1))
    length = length if length > 0 else 0
    if w << length < s:
        length += 1
    return 1 if length < 1 else less(length, LIMIT)


@part(nogil=True)
def _left(weights, used, n, s):
    """What lengths for `s` leave of 2^LIMIT; negative if they do not fit. `n` symbols are used."""
    left = I8(_CODES)
    for i in range(n):
        left -= I8(_CODES) >> _length_for(I8(weights[used[i]]), s)
    return left


@part(nogil=True)
def _lengths_of(weights, order, lengths):
    """See `huffman.lengths_of`. `order` is work memory; `lengths` become those of symbols."""
    n = 0
    for i in range(ESCAPE + 1):
        lengths[i] = 0
        if weights[i] > 0:
            order[n] = i
            n += 1
    # With 2^21 any code fits: weights add up to 2^20 + 1 at most.
    low, high = I8(1), I8(1) << 21
    while low < high:
        middle = (low + high) // 2
        if _left(weights, order, n, middle) >= 0:
            high = middle
        else:
            low = middle + 1
    rest = _left(weights, order, n, low)
    for i in range(n):
        lengths[order[i]] = _length_for(I8(weights[order[i]]), low)
    # Larger weights have shorter codes, so that few are out of order.
    n = 0
    for length in range(1, LIMIT + 1):
        first = n
        for i in range(ESCAPE + 1):
            if lengths[i] == length:
                at = n
                while at > first and weights[order[at - 1]] < weights[i]:
                    order[at] = order[at - 1]
                    at -= 1
                order[at] = i
                n += 1
    while rest > 0:
        for length in range(2, LIMIT + 1):
            cost = I8(1) << (LIMIT - length)
            if rest >= cost:
                for i in range(n):
                    if rest >= cost and lengths[order[i]] == length:
                        lengths[order[i]] = length - 1
                        rest -= cost


@part(nogil=True, rare=True)
def _classes_of(counts, n_classes, values, found):
    """Counts of classes from those of values; fills the list of values."""
    for k in range(n_classes):
        best = 0
        for v in range(256):
            if counts[v] > counts[best]:
                best = v
        found[k] = counts[best]
        if counts[best] > 0:
            values[k] = best
            counts[best] = 0


@part(nogil=True, rare=True)
def find_table(space, counts, table, unit):
    """Write the table for `counts` (int64, shape (256,), changed) to `table` (152 bytes).

    False if coding saves too little. `space`: FINDING_NBYTES of work memory.
    """
    ints = view_as(space, np.int64)
    kept, lengths, order = ints[:256], ints[256:513], ints[513:770]
    weights = view_as(space[8 * 770 :], np.uint32)
    total, seen, least = I8(0), 0, I8(1) << 62
    for v in range(256):
        n = counts[v]
        total += n
        if n > 0:
            seen += 1
            least = least if least < n else n
    all_common = seen > 1 and least << COMMON >= total
    fill_bytes(table, 0, TABLE_NBYTES, U1(0))
    shift, n_values = I8(8), 256
    if unit > 1:
        shift, n_values = (I8(4), 16) if unit == 2 else (I8(1), 2)
        _classes_of(counts, n_values, table, kept)
    else:
        # No code takes fewer bits than the entropy.
        entropy = 0.0
        for v in range(256):
            n = counts[v]
            kept[v] = n
            if n > 0:
                entropy += n * np.log2(total / n)
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


@part(nogil=True, apart=True)
def _pair_codes(codes, pairs):
    """Entries of two bytes from those of one."""
    for high in range(256):
        second = codes[high]
        code, length = U4(second & U4(~_LENGTH & ~_NO_CODE)), U4(second & U4(_LENGTH))
        flag = U4(second & U4(_NO_CODE))
        row = pairs[high << 8 : (high + 1) << 8]
        for low in range(256):
            first = codes[low]
            entry = U4(first + U4(length + U4(code << U4(first & U4(_LENGTH)))))
            row[low] = U4(entry | flag)


@part(nogil=True, rare=True)
def encoding_of(table, space, unit):
    """Fill `space` (ENCODING_NBYTES): entries by two bytes, if units have no more; by symbol.

    An entry is `_LENGTH_BITS` of length and the code, and `_NO_CODE` where a unit escapes.
    """
    pairs = view_as(space[: 4 * _PAIRS], np.uint32)
    codes = view_as(space[4 * _PAIRS : 4 * (_PAIRS + _SYMBOLS)], np.uint32)
    starts = view_as(space[4 * (_PAIRS + _SYMBOLS + 3) :], np.int64)
    _starts_of(table, starts)
    for symbol in range(_SYMBOLS):
        length = _length_in(table, symbol)
        codes[symbol] = 0
        if length > 0:
            codes[symbol] = U4(_reversed(starts[length]) << _LENGTH_BITS | length)
            starts[length] += I8(_CODES) >> length
    escape = U4(codes[ESCAPE] | U4(_NO_CODE))
    if unit == 2:
        for i in range(_PAIRS):
            pairs[i] = escape
    for symbol in range(256):
        if codes[symbol] == 0:
            codes[symbol] = escape
        elif unit == 2:
            pairs[I8(table[symbol & 15]) | I8(table[symbol >> 4]) << 8] = codes[symbol]
    codes[ESCAPE] = escape
    if unit == 1:
        _pair_codes(codes, pairs)
    if unit == 8:
        # What `_mask_symbol` takes.
        other = I8(table[0] ^ table[1])
        starts[0], starts[1], starts[2] = I8(table[0]), other, 0
        while other > 0 and other >> starts[2] & 1 == 0:
            starts[2] += 1


@part(nogil=True)
def decoding_of(table, space, unit):
    """Fill `space` (DECODING_NBYTES) by the next 12 bits: the first code, what several stand for.

    The entry of the first code is the symbol, or 2 bytes, + 2^16 length, and `_ESCAPED` of the
    escape. The other arrays have up to 4 bytes, and bits + 2^8 number of bytes, 0 for an escape. Of
    units of 8 bytes they have the bytes by symbol.
    """
    entries = view_as(space[: 4 * _CODES], np.uint32)
    several = view_as(space[4 * _CODES : 8 * _CODES], np.uint32)
    infos = view_as(space[8 * _CODES : 10 * _CODES], np.uint16)
    starts = view_as(space[10 * _CODES :], np.int64)
    _starts_of(table, starts)
    least = I8(LIMIT)
    for symbol in range(_SYMBOLS):
        length = _length_in(table, symbol)
        if length > 0:
            if symbol == ESCAPE:
                entry = I8(_ESCAPED)
            elif unit == 2:
                entry = I8(table[symbol & 15]) | I8(table[symbol >> 4]) << 8
            else:
                entry = I8(symbol)
            least = least if least < length else length
            code, step = _reversed(starts[length]), I8(1) << length
            starts[length] += I8(_CODES) >> length
            while code < _CODES:
                entries[code] = U4(entry | length << 16)
                code += step
    if unit == 8:
        spread = view_as(several, np.uint64)
        for symbol in range(256):
            word = U8(0)
            for j in range(8):
                word |= U8(table[symbol >> j & 1]) << U8(8 * j)
            spread[symbol] = word
        return
    for bits in range(_CODES):
        entry = entries[bits]
        length = U4(entry >> U4(16))
        several[bits] = entry & U4(0xFFFF)
        infos[bits] = U2(length | U4(unit << 8)) if length <= U4(LIMIT) else U2(0)
    most = 4 // unit if least * 4 < LIMIT * unit else LIMIT // least
    for _ in range(1, most):
        for bits in range(_CODES):
            info = U4(infos[bits])
            taken, n = U4(info & U4(63)), U4(info >> U4(8))
            entry = item(entries, I8(U4(bits) >> taken))
            # Of the escape it is more than is left.
            length = U4(entry >> U4(16))
            fits = length <= U4(U4(LIMIT) - taken)
            found = U4(entry & U4(0xFFFF)) if fits else U4(0)
            several[bits] |= U4(found << U4(n << U4(3)))
            infos[bits] = U2(info + (U4(length + U4(unit << 8)) if fits else U4(0)))


# Blocks


@part(nogil=True, apart=True)
def _is_constant(plane, n):
    """Whether the first `n` bytes are alike."""
    value = plane[0]
    if plane[n - 1] != value or plane[n // 2] != value:
        return False
    other = U1(0)
    for i in range(n):
        other |= U1(plane[i] ^ value)
    return other == 0


@part(nogil=True, rare=True)
def _write_head(out, at, mode, value, base):
    store4(out, at, U4(mode | value << 8 | base << 16))
    return at + 4


@part(nogil=True, rare=True)
def _write_stored(plane, n, out, at):
    """A stored block; gives its end."""
    at = _write_head(out, at, STORED, 0, 0)
    end = at + ((n + 3) & ~3)
    copy_bytes(out, at, plane, 0, n)
    fill_bytes(out, at + n, end - at - n, U1(0))
    return end


@part(nogil=True, forceinline=True)
def _flush(coded, to, word, n):
    """Write whole bytes of the `n` bits of `word`: (bytes so far, bits behind them, how many)."""
    store8(coded, to, word)
    return to + (n >> 3), word >> U8(n & ~7), n & 7


@part(nogil=True, forceinline=True)
def _two(first, second):
    """(codes, bits) of two entries."""
    low, high = U8(first) >> U8(_LENGTH_BITS), U8(second) >> U8(_LENGTH_BITS)
    return low | high << U8(first & U4(_LENGTH)), I8(U4(first + second) & U4(_LENGTH))


@part(nogil=True)
def _mask_symbol(key, plane, i):
    """The symbol of 8 bytes that have the classes of two values, else `ESCAPE`."""
    ones = U8(0x0101010101010101)
    word = load8(plane, i) ^ U8(key[0]) * ones
    bits = word >> U8(key[2]) & ones
    if bits * U8(key[1]) != word:
        return I8(ESCAPE)
    return I8(bits * U8(0x0102040810204080) >> U8(56))


@part(nogil=True, rare=True)
def _encode_few(encoding, unit, plane, i, end, coded, to, word, n):
    """Append the units from byte `i` to `end`; as `_flush`, but -1 if an escape has no code."""
    pairs = view_as(encoding, np.uint32)
    codes = pairs[_PAIRS:]
    key = view_as(encoding[4 * (_PAIRS + _SYMBOLS + 3) :], np.int64)
    while i < end:
        if unit == 1:
            entry = codes[plane[i]]
        elif unit == 2:
            entry = pairs[I8(load2(plane, i))]
        else:
            entry = codes[_mask_symbol(key, plane, i)]
        length = I8(entry & U4(_LENGTH))
        if length == 0:
            return I8(-1), word, n
        word |= U8(entry & U4(_NO_CODE - 1)) >> U8(_LENGTH_BITS) << U8(n)
        n += length
        if entry & U4(_NO_CODE):
            for j in range(unit):
                to, word, n = _flush(coded, to, word, n)
                word |= U8(plane[i + j]) << U8(n)
                n += 8
        to, word, n = _flush(coded, to, word, n)
        i += unit
    return to, word, n


@cache
def encode_block_by(is_mask):
    """What encodes a tile's plane, of units of 8 bytes if `is_mask`, else of less."""

    @part(nogil=True)
    def encode_block(encoding, sizes, coded, unit, plane, m, out, at):
        """Encode the first `m` bytes of `plane`, which go on up to a unit's end; gives the end.

        `encoding` is filled by `encoding_of`; `sizes` (int64, one for each run) and `coded`
        (BITS_NBYTES) are work memory. At `out` there is memory for a stored block.
        """
        if _is_constant(plane, m):
            return _write_head(out, at, CONSTANT, I8(plane[0]), I8(0))
        entries = view_as(encoding, np.uint32)
        if is_mask:
            entries = entries[_PAIRS:]
            key = view_as(encoding[4 * (_PAIRS + _SYMBOLS + 3) :], np.int64)
        runs = (m + RUN - 1) // RUN
        to, word, n = I8(0), U8(0), I8(0)
        least, most = I8(1) << 32, I8(0)
        for r in range(runs):
            before = 8 * to + n
            i = r * RUN
            stop = less(i + RUN, m)
            while i < stop:
                # Small, so that all of it is in registers.
                while i + 8 <= stop:
                    if is_mask:
                        e0 = item(entries, _mask_symbol(key, plane, i))
                        if e0 & U4(_NO_CODE):
                            break
                        word |= U8(e0) >> U8(_LENGTH_BITS) << U8(n)
                        n += I8(e0 & U4(_LENGTH))
                    else:
                        e0 = item(entries, I8(load2(plane, i)))
                        e1 = item(entries, I8(load2(plane, i + 2)))
                        e2 = item(entries, I8(load2(plane, i + 4)))
                        e3 = item(entries, I8(load2(plane, i + 6)))
                        if (e0 | e1 | e2 | e3) & U4(_NO_CODE):
                            break
                        low, n_low = _two(e0, e1)
                        high, n_high = _two(e2, e3)
                        word |= low << U8(n)
                        n += n_low
                        if unit == 1:
                            to, word, n = _flush(coded, to, word, n)
                        word |= high << U8(n)
                        n += n_high
                    to, word, n = _flush(coded, to, word, n)
                    i += 8
                if i < stop:
                    end = less(i + 8, stop)
                    to, word, n = _encode_few(encoding, unit, plane, i, end, coded, to, word, n)
                    if to < 0:
                        return _write_stored(plane, m, out, at)
                    i = end
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
        fill_bytes(out, at, listed, U1(0))
        for r in range(runs):
            if narrow:
                out[at + r] = sizes[r] - base
            else:
                out[at + 2 * r] = sizes[r] & 255
                out[at + 2 * r + 1] = sizes[r] >> 8
        at += listed
        copy_bytes(out, at, coded, 0, nbytes)
        return at + nbytes

    return encode_block


@part(nogil=True, forceinline=True)
def _word_at(data, last, at):
    """At least 57 bits from bit `at` on; behind the end any."""
    byte = at >> 3
    byte = byte if byte < last else last
    return load8(data, byte) >> U8(at & 7)


@part(nogil=True, forceinline=True)
def _word_from(data, at):
    """At least 56 bits from bit `at` on; the highest bit is set, for `leading_zeros`."""
    return load8(data, at >> 3) >> U8(at & 7) | U8(1 << 63)


@part(nogil=True, rare=True)
def _decode_few(decoding, unit, data, at, out, i, stop):
    """Decode units one by one up to byte `stop` of `out`; gives the bit behind them."""
    entries = view_as(decoding, np.uint32)
    spread = view_as(decoding[4 * _CODES :], np.uint64)
    last = data.size - 8
    while i < stop:
        entry = entries[I8(_word_at(data, last, at) & U8(_CODES - 1))]
        at += I8(entry >> U4(16)) & 15
        if unit == 8:
            store8(out, i, spread[I8(entry & U4(255))])
        else:
            out[i] = U1(entry)
            if unit == 2:
                out[i + 1] = U1(entry >> U4(8))
        if entry & U4(_ESCAPED):
            for j in range(unit):
                out[i + j] = U1(_word_at(data, last, at))
                at += 8
        i += unit
    return at


@part(nogil=True, forceinline=True)
def _step(several, infos, word, out, i):
    """Write what codes of `word` stand for: (bits behind them, byte of `out`, entry)."""
    bits = I8(word & U8(_CODES - 1))
    info = U8(item(infos, bits))
    store4(out, i, item(several, bits))
    return word >> (info & U8(63)), i + I8(info >> U8(8)), info


@part(nogil=True, rare=True)
def _decode_rest(decoding, unit, data, at, out, i, stop):
    """Decode units up to byte `stop` of `out`; gives the bit behind them."""
    several = view_as(decoding[4 * _CODES :], np.uint32)
    infos = view_as(decoding[8 * _CODES :], np.uint16)
    while i + 4 <= stop:
        _, i, info = _step(several, infos, _word_at(data, data.size - 8, at), out, i)
        at += I8(info & U8(63))
        if info == U8(0):
            at = _decode_few(decoding, unit, data, at, out, i, i + unit)
            i += unit
    return _decode_few(decoding, unit, data, at, out, i, stop)


@part(nogil=True)
def _decode_masks(decoding, data, at, out, i, stop):
    """As `_decode_rest`, of units of 8 bytes."""
    entries = view_as(decoding, np.uint32)
    spread = view_as(decoding[4 * _CODES :], np.uint64)
    while i + 32 <= stop:
        word = _word_at(data, data.size - 8, at)
        taken, found = U8(0), U4(0)
        for j in range(4):
            entry = item(entries, I8(word & U8(_CODES - 1)))
            n = U8(entry >> U4(16)) & U8(15)
            word >>= n
            taken += n
            found |= entry
            store8(out, i + 8 * j, item(spread, I8(entry & U4(255))))
        if found & U4(_ESCAPED):
            at = _decode_few(decoding, 8, data, at, out, i, i + 32)
        else:
            at += I8(taken)
        i += 32
    return _decode_few(decoding, 8, data, at, out, i, stop)


@cache
def decode_block_by(is_mask):
    """What decodes a tile's plane, of units of 8 bytes if `is_mask`, else of less."""

    @part(nogil=True)
    def decode_block(decoding, ends, unit, data, at, stop, out, m):
        """Decode a block that starts at byte `at` of `data` to the first `m` bytes of `out`.

        Gives its end, which is at most `stop`, or -1 if it is none. `decoding` is filled by
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
            fill_bytes(out, 0, m, U1(value))
            return at
        if mode == STORED:
            end = at + (m + 3) // 4 * 4
            if end > stop:
                return I8(-1)
            copy_bytes(out, 0, data, at, m)
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
        wrong = I8(0)
        if not is_mask:
            last = data.size - 8
            several = view_as(decoding[4 * _CODES :], np.uint32)
            infos = view_as(decoding[8 * _CODES :], np.uint16)
            ea = eb = ec = ed = U8(0)
            for r in range(0, runs - 3, 4):
                a, b, c, d = ends[r], ends[r + 1], ends[r + 2], ends[r + 3]
                i = r * RUN
                j, k, n = i + RUN, i + 2 * RUN, i + 3 * RUN
                stop_i, stop_j, stop_k = j, k, n
                stop_n = less(n + RUN, m)
                while True:
                    # Rounds in which no run goes beyond its end, or that of the data.
                    rounds = less(less(stop_i - i, stop_j - j), less(stop_k - k, stop_n - n))
                    furthest = -less(less(-a, -b), less(-c, -d))
                    rounds = less(rounds // _AT_ONCE, (last - (furthest >> 3)) >> 3)
                    if rounds <= 0:
                        break
                    # Small, so that most of it is in registers.
                    stuck = False
                    while rounds > 0 and not stuck:
                        wa, wb = _word_from(data, a), _word_from(data, b)
                        wc, wd = _word_from(data, c), _word_from(data, d)
                        for _ in range(_STEPS):
                            wa, i, ea = _step(several, infos, wa, out, i)
                            wb, j, eb = _step(several, infos, wb, out, j)
                            wc, k, ec = _step(several, infos, wc, out, k)
                            wd, n, ed = _step(several, infos, wd, out, n)
                        a, b, c, d = (
                            a + leading_zeros(wa),
                            b + leading_zeros(wb),
                            c + leading_zeros(wc),
                            d + leading_zeros(wd),
                        )
                        stuck = less(less(ea, eb), less(ec, ed)) == U8(0)
                        rounds -= 1
                    if stuck:
                        if ea == U8(0):
                            a = _decode_few(decoding, unit, data, a, out, i, i + unit)
                            i += unit
                        if eb == U8(0):
                            b = _decode_few(decoding, unit, data, b, out, j, j + unit)
                            j += unit
                        if ec == U8(0):
                            c = _decode_few(decoding, unit, data, c, out, k, k + unit)
                            k += unit
                        if ed == U8(0):
                            d = _decode_few(decoding, unit, data, d, out, n, n + unit)
                            n += unit
                a = _decode_rest(decoding, unit, data, a, out, i, stop_i)
                b = _decode_rest(decoding, unit, data, b, out, j, stop_j)
                c = _decode_rest(decoding, unit, data, c, out, k, stop_k)
                d = _decode_rest(decoding, unit, data, d, out, n, stop_n)
                wrong |= (a ^ ends[RUNS + r]) | (b ^ ends[RUNS + r + 1])
                wrong |= (c ^ ends[RUNS + r + 2]) | (d ^ ends[RUNS + r + 3])
        for r in range(0 if is_mask else runs // 4 * 4, runs):
            i = r * RUN
            stop_i = less(i + RUN, m)
            if is_mask:
                a = _decode_masks(decoding, data, ends[r], out, i, stop_i)
            else:
                a = _decode_rest(decoding, unit, data, ends[r], out, i, stop_i)
            wrong |= a ^ ends[RUNS + r]
        if wrong != 0:
            return I8(-1)
        return end

    return decode_block
