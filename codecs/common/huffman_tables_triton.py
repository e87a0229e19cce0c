# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment,misc"
"""Tables of codecs/common/huffman.py on a GPU, and where kernels look them up.

Every symbol costs a look-up that waits for the one before, so they are in shared memory. Triton has
no addresses there: PTX declares the memory, and reads and writes it. Elsewhere they are in work
memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import huffman
from .minifloat_triton import by_ptx

TABLE_NBYTES = tl.constexpr(huffman.TABLE_NBYTES)
#: Entries of a decoder, and behind them symbols in the order of their codes, and one more.
_CODES, SORTED = tl.constexpr(1 << huffman.LIMIT), tl.constexpr(272)
_LIMIT, _ESCAPE = tl.constexpr(huffman.LIMIT), tl.constexpr(huffman.ESCAPE)
_WHOLE = tl.constexpr(1 << huffman.WEIGHT_BITS)
_LEAST = tl.constexpr(1 << huffman.WEIGHT_BITS - huffman.RARE)
_SCALE, _SAVED = tl.constexpr(huffman.SCALE), tl.constexpr(huffman.SAVED)
_COMMON = tl.constexpr(huffman.COMMON)
#: Of a decoder's entry, behind what it stands for: the flag of the escape; the bits that it takes.
IS_ESCAPE, TAKES_AT = tl.constexpr(1 << 26), tl.constexpr(27)
#: Work memory of a plane of a group, in bytes: whether it is coded, its table, an encoder's entries
#: by symbol and classes by value.
FLAG_AT, TABLE_AT, ENTRIES_AT = tl.constexpr(0), tl.constexpr(128), tl.constexpr(512)
#: Bytes of shared memory of an encoder.
ENCODING = tl.constexpr("3072")
#: Words of an encoder's entries; of these and the classes of values behind them.
ENTRIES, ENCODER = tl.constexpr(512), tl.constexpr(768)
#: Of an encoder's entry: the code, its length, flags of an escape and of one without a code, and
#: all bits of the unit.
CODE, LENGTH_AT, SIZE_AT = (
    tl.constexpr((1 << huffman.LIMIT) - 1),
    tl.constexpr(12),
    tl.constexpr(24),
)
ESCAPED_UNIT, MISSING = tl.constexpr(1 << 16), tl.constexpr(1 << 17)
#: The entry of units of classes c0 and c1 is c0 + CLASS_STEP * c1, where a value without a class
#: has class 16: likely ones are in banks of their own.
CLASS_STEP = tl.constexpr(26)
#: Where in a plane's work memory the counts of tiles are while no table is there, 1 KiB each.
COUNTS_AT = tl.constexpr(8192)


@triton.jit
def words_at(ptr, at):
    """The 32-bit words from byte `at` on."""
    return (ptr + at).to(tl.pointer_type(tl.int32))


@triton.jit
def table_memory(NBYTES: tl.constexpr, PTX: tl.constexpr):
    """The address of shared memory for a table of so many bytes, such as "512".

    A program that has more than 48 KiB in all, with what Triton takes, does not start.
    """
    if PTX:
        return tl.inline_asm_elementwise(
            "{ .shared .align 64 .b8 codes[" + NBYTES + "]; mov.u32 $0, codes; }",
            "=r,r",
            (tl.program_id(0),),
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        return 0


@triton.jit
def look_up(table, at, PTX: tl.constexpr):
    """The words number `at` of a table, int32."""
    if PTX:
        return tl.inline_asm_elementwise(
            "ld.shared.b32 $0, [$1];",
            "=r,r",
            (table + at * 4,),
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        return tl.load(table + at)


@triton.jit
def fetch(table, at, CLASSES: tl.constexpr, PTX: tl.constexpr):
    """The words at bytes `at` of an encoder's entries or, behind these, CLASSES, int32."""
    if PTX:
        return tl.inline_asm_elementwise(
            "ld.shared.b32 $0, [$1+2048];" if CLASSES else "ld.shared.b32 $0, [$1];",
            "=r,r",
            (table + at,),
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        return tl.load(table + ((ENTRIES if CLASSES else 0) + at // 4))


@triton.jit
def put_pair(at, first, second):
    """Write pairs of words to addresses of shared memory."""
    tl.inline_asm_elementwise(
        "st.shared.v2.b32 [$1], {$2, $3}; mov.u32 $0, $2;",
        "=r,r,r,r",
        (at, first, second),
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def count(table, at, n):
    """Add to words of shared memory."""
    tl.inline_asm_elementwise(
        "red.shared.add.u32 [$1], $2; mov.u32 $0, $2;",
        "=r,r,r",
        (table + at * 4, n),
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def put(table, at, value):
    """Write words of shared memory."""
    tl.inline_asm_elementwise(
        "st.shared.b32 [$1], $2; mov.u32 $0, $2;",
        "=r,r,r",
        (table + at * 4, value),
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def reversed_bits(x, PTX: tl.constexpr):
    """12 bits in reverse order, int32."""
    if PTX:
        found = by_ptx("brev.b32 $0, $1;", "=r,r", (x.to(tl.uint32, bitcast=True),))
        return (found >> 20).to(tl.int32, bitcast=True)
    else:
        x = ((x & 0x555) << 1) | ((x >> 1) & 0x555)
        x = ((x & 0x333) << 2) | ((x >> 2) & 0x333)
        return ((x & 0xF) << 8) | (x & 0xF0) | (x >> 8)


@triton.jit
def wide(v, ITEM: tl.constexpr):
    """Elements, or bytes of some, as uint32, of 8 bytes as uint64."""
    if ITEM == 8:
        return v.to(tl.uint64)
    else:
        return v.to(tl.uint32)


@triton.jit
def byte_of(v, k, ITEM: tl.constexpr, ROTATED: tl.constexpr):
    """Byte `k` of elements, which are rotated to the left first if ROTATED, int32."""
    w = wide(v, ITEM)
    if ROTATED:
        w = (w << 1) | (w >> (8 * ITEM - 1))
    return ((w >> (k * 8)) & 255).to(tl.int32)


@triton.jit
def _share(w, counts, total):
    """`w * counts // total`, int64."""
    w *= counts
    if (total & (total - 1)) == 0:
        # As of most groups; a division of 64 bits takes a hundred instructions.
        w = w >> (_order_of(total) - _order_of(total * 0 + 1)).to(tl.int64)
    else:
        w = w // total
    return w


@triton.jit
def _order_of(v):
    """The exponents of numbers below 2^24."""
    return v.to(tl.float32).to(tl.int32, bitcast=True) >> 23


@triton.jit
def _weights_of(counts, work_ptr, UNIT: tl.constexpr):
    """(classes of values, 16 or 256 if none; their 16 values; weights of symbols; that of the
    escape), of counts, int32.

    See `huffman.weights_of`.
    """
    v = tl.arange(0, 256)
    c = tl.arange(0, 16)
    total = tl.sum(counts, 0)
    seen = tl.sum((counts > 0).to(tl.int32), 0)
    least = tl.min(tl.where(counts > 0, counts, 1 << 24), 0)
    all_common = (seen > 1) & ((least << _COMMON) >= total)
    ranks = v
    values = c * 0
    whole = tl.zeros([256], tl.int64) + _WHOLE
    if UNIT == 1:
        w = _share(whole, counts.to(tl.int64), total)
    else:
        CLASSES: tl.constexpr = 16 if UNIT == 2 else 2
        ranks = v * 0 + (16 if UNIT == 2 else 256)
        kept = c * 0
        order = tl.where(counts > 0, counts * 256 + (255 - v), 0)
        for k in range(CLASSES):
            top = tl.max(order, 0)
            if top > 0:
                ranks = tl.where(order == top, k, ranks)
                order = tl.where(order == top, 0, order)
                values = tl.where(c == k, 255 - (top & 255), values)
                kept = tl.where(c == k, top >> 8, kept)
        memory = words_at(work_ptr, ENTRIES_AT)
        tl.store(memory + c, kept)
        tl.debug_barrier()
        w = whole
        for j in tl.static_range(UNIT):
            f = tl.load(memory + ((v >> (j * (8 // UNIT))) & (CLASSES - 1)))
            w = _share(w, f.to(tl.int64), total)
        tl.debug_barrier()
    w = tl.where(w < _LEAST, 0, w)
    rest = (_WHOLE - tl.sum(w, 0)) >> _SCALE
    rest = tl.maximum(rest, tl.where(all_common, 0, 1)).to(tl.int32)
    return ranks, values, (w >> _SCALE).to(tl.int32), rest


@triton.jit
def _scale_of(weights):
    """Numbers that are ordered as weights are, of which twice as much is 2^23 more."""
    return weights.to(tl.float32).to(tl.int32, bitcast=True)


@triton.jit
def _length_for(scale, s):
    """The least length with weight * 2^length at least that of `s`, 1 to 12."""
    return tl.minimum(tl.maximum((s - scale + ((1 << 23) - 1)) >> 23, 1), _LIMIT)


@triton.jit
def _width(length):
    """How many of 2^12 a code of a length takes; 0 for no code."""
    return tl.where(length > 0, _CODES >> length, 0)


@triton.jit
def _taken(lengths, of_escape):
    """How many of 2^12 all codes take."""
    return tl.sum(_width(lengths), 0) + _width(of_escape)


@triton.jit
def _lengths_of(weights, escape):
    """(lengths of symbols, that of the escape); see `huffman.lengths_of`."""
    used = weights > 0
    scale, scale_of_escape = _scale_of(weights), _scale_of(escape)
    low = escape * 0 + 1
    # With 2^21 any code fits: weights add up to 2^20 + 1 at most.
    high = low << 21
    while low < high:
        middle = (low + high) // 2
        s = _scale_of(middle)
        taken = tl.sum(tl.where(used, _CODES >> _length_for(scale, s), 0), 0)
        taken += tl.where(escape > 0, _CODES >> _length_for(scale_of_escape, s), 0)
        low = tl.where(taken <= _CODES, low, middle + 1)
        high = tl.where(taken <= _CODES, middle, high)
    s = _scale_of(low)
    lengths = tl.where(used, _length_for(scale, s), 0)
    of_escape = tl.where(escape > 0, _length_for(scale_of_escape, s), 0)
    rest = _CODES - _taken(lengths, of_escape)
    # Different numbers, by weight, of one weight by symbol.
    order = weights * 512 + (511 - tl.arange(0, 256))
    order_of_escape = escape * 512 + (511 - _ESCAPE)
    while rest > 0:
        length = rest * 0 + 2
        while (rest > 0) & (length <= _LIMIT):
            cost = _CODES >> length
            here = tl.where(lengths == length, order, 0)
            escape_here = tl.where(of_escape == length, order_of_escape, 0)
            n = tl.sum((here > 0).to(tl.int32), 0) + (escape_here > 0).to(tl.int32)
            most = tl.minimum(rest // cost, n)
            if most > 0:
                # The least of the `most` largest is found by halves.
                least = rest * 0 + 1
                if most < n:
                    least = tl.maximum(tl.max(here, 0), escape_here)
                    if most > 1:
                        above = least
                        least = rest * 0 + 1
                        while n != most:
                            middle = least + (above - least) // 2
                            n = tl.sum((here >= middle).to(tl.int32), 0)
                            n += (escape_here >= middle).to(tl.int32)
                            least = tl.where(n >= most, middle, least)
                            above = tl.where(n >= most, above, middle)
                lengths -= (here >= least).to(tl.int32)
                of_escape -= (escape_here >= least).to(tl.int32)
                rest -= most * cost
            length += 1
    return lengths, of_escape


@triton.jit
def _per_length(packed, PACKED_FROM: tl.constexpr, length):
    """What 10 bits of a word say of a length; a word has six, from number PACKED_FROM on."""
    found = packed >> ((length - PACKED_FROM) * 10).to(tl.int64)
    return (found & 1023).to(tl.int32)


@triton.jit
def _codes_of(lengths, of_escape):
    """Codes by length, and of one length by symbol: the 12 bits, first one highest, with which they
    start, and their places in the order. Those of symbols, then those of the escape.
    """
    # Two words count codes of all lengths.
    low, high = (lengths > 0) & (lengths <= 6), lengths > 6
    one = lengths.to(tl.int64) * 0 + 1
    in_low = tl.where(low, one << (tl.where(low, lengths - 1, 0) * 10).to(tl.int64), 0)
    in_high = tl.where(high, one << (tl.where(high, lengths - 7, 0) * 10).to(tl.int64), 0)
    of_low = _per_length(tl.cumsum(in_low, 0), 1, tl.where(low, lengths, 1))
    of_high = _per_length(tl.cumsum(in_high, 0), 7, tl.where(high, lengths, 7))
    within = tl.where(high, of_high, of_low) - 1
    all_low, all_high = tl.sum(in_low, 0), tl.sum(in_high, 0)
    starts, places = lengths * 0, lengths * 0
    start_of_escape, place_of_escape = of_escape * 0, of_escape * 0
    start, place = of_escape * 0, of_escape * 0
    for length in tl.static_range(1, _LIMIT + 1):
        n = (
            _per_length(all_low, 1, of_escape * 0 + length)
            if length <= 6
            else _per_length(all_high, 7, of_escape * 0 + length)
        )
        here = lengths == length
        starts = tl.where(here, start + within * (_CODES >> length), starts)
        places = tl.where(here, place + within, places)
        mine = of_escape == length
        start_of_escape = tl.where(mine, start + n * (_CODES >> length), start_of_escape)
        place_of_escape = tl.where(mine, place + n, place_of_escape)
        n += mine.to(tl.int32)
        start += n * (_CODES >> length)
        place += n
    return starts, places, start_of_escape, place_of_escape


@triton.jit
def find_table(counts, work_ptr, UNIT: tl.constexpr, PTX: tl.constexpr):
    """Write a plane's table and an encoder's entries to work memory, if coding saves enough."""
    ranks, values, weights, escape = _weights_of(counts, work_ptr, UNIT)
    coded = tl.max(weights, 0) > 0
    if coded:
        lengths, of_escape = _lengths_of(weights, escape)
        all_weights = tl.sum(weights, 0).to(tl.int64) + escape
        bits = tl.sum(weights * lengths, 0).to(tl.int64)
        bits += escape.to(tl.int64) * (of_escape + 8 * UNIT)
        coded = bits * _SAVED <= all_weights * (8 * UNIT * (_SAVED - 1))
        if coded:
            starts, _, start_of_escape, _ = _codes_of(lengths, of_escape)
            escape_entry = reversed_bits(start_of_escape, PTX) | (of_escape << LENGTH_AT)
            escape_entry |= ESCAPED_UNIT | ((of_escape + 8 * UNIT) << SIZE_AT)
            # An escape without a code is an entry of no bits.
            escape_entry = tl.where(of_escape > 0, escape_entry, ESCAPED_UNIT | MISSING)
            entry = reversed_bits(starts, PTX) | (lengths << LENGTH_AT) | (lengths << SIZE_AT)
            s = tl.arange(0, 256)
            at = (s & 15) + CLASS_STEP * (s >> 4) if UNIT == 2 else s
            entries = words_at(work_ptr, ENTRIES_AT)
            tl.store(entries + s, s * 0 + escape_entry)
            tl.store(entries + 256 + s, s * 0 + escape_entry)
            tl.debug_barrier()
            tl.store(entries + at, entry, mask=lengths > 0)
            tl.store(entries + ENTRIES + s, 4 * ranks)
            table_ptr = work_ptr + TABLE_AT
            tl.store(table_ptr + tl.arange(0, 16), values.to(tl.uint8))
            low, high = tl.split(tl.reshape(lengths, [128, 2]))
            tl.store(table_ptr + 16 + tl.arange(0, 128), (low | (high << 4)).to(tl.uint8))
            e = tl.arange(0, 8)
            tl.store(table_ptr + 144 + e, tl.where(e == 0, of_escape, 0).to(tl.uint8))
    tl.store(words_at(work_ptr, FLAG_AT), coded.to(tl.int32))


@triton.jit
def load_words(source, table, COUNT: tl.constexpr, PTX: tl.constexpr):
    """COUNT words of work memory, a multiple of 256, where `look_up` takes them from."""
    if PTX:
        tl.debug_barrier()
        for at in range(0, COUNT, 256):
            i = at + tl.arange(0, 256)
            put(table, i, tl.load(source + i))
        tl.debug_barrier()
        return table
    else:
        return source


@triton.jit
def put_words(table, at, value, PTX: tl.constexpr):
    """Write the words number `at` of a table."""
    if PTX:
        put(table, at, value)
    else:
        tl.store(table + at, value)


@triton.jit
def check_table(table_ptr):
    """(lengths of symbols, that of the escape, whether a table is wrong)."""
    s = tl.arange(0, 256)
    half = tl.load(table_ptr + 16 + (s >> 1)).to(tl.int32)
    lengths = (half >> ((s & 1) * 4)) & 15
    of_escape = tl.load(table_ptr + 144).to(tl.int32)
    behind = tl.load(table_ptr + 145 + s, mask=s < 7, other=0).to(tl.int32)
    bad = (tl.max(tl.where(behind > 0, 255, lengths), 0) > _LIMIT) | (of_escape > _LIMIT)
    lengths, of_escape = tl.minimum(lengths, _LIMIT), tl.minimum(of_escape, _LIMIT)
    return lengths, of_escape, bad | (_taken(lengths, of_escape) != _CODES)


@triton.jit
def fill_table(table_ptr, table, UNIT: tl.constexpr, PTX: tl.constexpr):
    """Make a decoder's entries, by the next 12 bits, of a table that is right.

    An entry is the symbol, or 2 bytes, and the bits that it takes. That of an escape has the bits
    of its code, and 2, instead, and takes those of its bytes too unless these are 8.
    """
    lengths, of_escape, _ = check_table(table_ptr)
    s = tl.arange(0, 256)
    # Two words count codes of all lengths.
    low, high = (lengths > 0) & (lengths <= 6), lengths > 6
    one = lengths.to(tl.int64) * 0 + 1
    in_low = tl.where(low, one << (tl.where(low, lengths - 1, 0) * 10).to(tl.int64), 0)
    in_high = tl.where(high, one << (tl.where(high, lengths - 7, 0) * 10).to(tl.int64), 0)
    of_low = _per_length(tl.cumsum(in_low, 0), 1, tl.where(low, lengths, 1))
    of_high = _per_length(tl.cumsum(in_high, 0), 7, tl.where(high, lengths, 7))
    place = tl.where(high, of_high, of_low) - 1
    all_low, all_high = tl.sum(in_low, 0), tl.sum(in_high, 0)
    # Of each length the first 12 bits with which a code starts, and how many codes are shorter.
    firsts, shorter = (), ()
    first, before = of_escape * 0, of_escape * 0
    place_of_escape = of_escape * 0
    for length in tl.static_range(1, _LIMIT + 1):
        firsts, shorter = firsts + (first,), shorter + (before,)
        n = (
            _per_length(all_low, 1, of_escape * 0 + length)
            if length <= 6
            else _per_length(all_high, 7, of_escape * 0 + length)
        )
        place = tl.where(lengths == length, place + before, place)
        mine = of_escape == length
        place_of_escape = tl.where(mine, before + n, place_of_escape)
        n += mine.to(tl.int32)
        first += n << (_LIMIT - length)
        before += n
    entry = s
    if UNIT == 2:
        entry = tl.load(table_ptr + (s & 15)).to(tl.int32)
        entry |= tl.load(table_ptr + (s >> 4)).to(tl.int32) << 8
    entry |= lengths << TAKES_AT
    # Other warps may still look up what was there before.
    tl.debug_barrier()
    # Symbols in the order of their codes; those without codes are behind all others.
    put_words(table, _CODES + tl.where(lengths > 0, place, SORTED - 1), entry, PTX)
    raw = 0 if UNIT == 8 else 8 * UNIT
    entry = (of_escape + 2) | IS_ESCAPE | ((of_escape + raw) << TAKES_AT)
    of_escape = _CODES + tl.where(of_escape > 0, place_of_escape, SORTED - 1)
    put_words(table, s * 0 + of_escape, s * 0 + entry, PTX)
    tl.debug_barrier()
    for begin in range(0, _CODES, 1024):
        x = begin + tl.arange(0, 1024)
        bits = reversed_bits(x, PTX)
        at = bits >> (_LIMIT - 1)
        for length in tl.static_range(2, _LIMIT + 1):
            here = shorter[length - 1] + ((bits - firsts[length - 1]) >> (_LIMIT - length))
            at = tl.where(bits >= firsts[length - 1], here, at)
        put_words(table, x, look_up(table, _CODES + at, PTX), PTX)
    tl.debug_barrier()
