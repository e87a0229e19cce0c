# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment,misc"
"""Encoding of blocks of codecs/common/huffman.py on a GPU.

Elements are read by fours, neighbours by neighbouring threads. What their bytes are coded by is
looked up there, two units to a piece of up to 56 bits. Pieces pass through shared memory to lanes,
of which each writes a run.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import huffman
from .huffman_tables_triton import (
    CLASS_STEP,
    CODE,
    COUNTS_AT,
    ENCODER,
    ENCODING,
    ENTRIES,
    ENTRIES_AT,
    ESCAPED_UNIT,
    FLAG_AT,
    LENGTH_AT,
    MISSING,
    SIZE_AT,
    TABLE_AT,
    TABLE_NBYTES,
    byte_of,
    count,
    fetch,
    load_words,
    look_up,
    put,
    put_pair,
    table_memory,
    wide,
    words_at,
)
from .huffman_triton import CONSTANT, NARROW, RUN, RUNS, STORED, TILE, WIDE, padded
from .minifloat_triton import by_ptx

_SAMPLED = tl.constexpr(huffman.SAMPLED)
_WORK_NBYTES = tl.constexpr(huffman.WORK_NBYTES)
#: In a plane's work memory, of the tiles of its group: sizes of runs, heads and bytes of blocks.
_SIZES_AT, _HEADS_AT, _NBYTES_AT = tl.constexpr(4096), tl.constexpr(5120), tl.constexpr(5152)
#: Tiles are multiples of so many bytes.
_STEP = tl.constexpr(8)
_QUADS = tl.constexpr(RUN.value // 4)
#: Fours of elements whose bytes are counted at a time.
_COUNTED = tl.constexpr(512)
#: Fours of elements of each run that are coded at a time, of whole tiles and of others or 8 bytes.
_AT_ONCE, _FEWER = tl.constexpr(8), tl.constexpr(4)
#: Bytes of shared memory: entries, then up to 16 pieces of each run.
PACKING = tl.constexpr("7424")
#: `_append` of what is in shared memory by PTX, in one piece as in huffman_decode_triton.py.
#: $0 to $2: the state, a word, its bits and where it will be; $3 to $5: the state before; $6 where
#: the piece is, $7 the words.
_APPEND = tl.constexpr(
    """{
    .reg .b32 low, high, after, first, second, third;
    .reg .b64 to;
    .reg .pred one, two;
    ld.shared.v2.b32 {low, high}, [$6];
    shr.u32 after, high, 24;
    add.u32 after, after, $4;
    and.b32 high, high, 0xFFFFFF;
    shl.b32 first, low, $4;
    or.b32 first, first, $3;
    shf.l.wrap.b32 second, low, high, $4;
    shf.l.wrap.b32 third, high, 0, $4;
    setp.gt.u32 one, after, 31;
    setp.gt.u32 two, after, 63;
    mul.wide.s32 to, $5, 4;
    add.s64 to, to, $7;
    @one st.global.b32 [to], first;
    @two st.global.b32 [to+4], second;
    selp.b32 first, second, first, one;
    selp.b32 $0, third, first, two;
    and.b32 $1, after, 31;
    shr.u32 second, after, 5;
    add.s32 $2, $5, second;
    }"""
)


@triton.jit
def _permuted(a, b, selector, PTX: tl.constexpr):
    """Four of the bytes of two words, by four bits of `selector` each."""
    if PTX:
        return by_ptx("prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", (a, b, selector))
    else:
        both = a.to(tl.uint64) | (b.to(tl.uint64) << 32)
        found = a * 0
        for j in tl.static_range(4):
            at = ((found * 0 + selector) >> (4 * j)) & 7
            found |= (((both >> (8 * at).to(tl.uint64)) & 255) << (8 * j)).to(tl.uint32)
        return found


@triton.jit
def _upper(low, high, n, PTX: tl.constexpr):
    """The upper of two words that are shifted to the left by `n` < 32 bits."""
    if PTX:
        return by_ptx("shf.l.wrap.b32 $0, $1, $2, $3;", "=r,r,r,r", (low, high, n))
    else:
        both = low.to(tl.uint64) | (high.to(tl.uint64) << 32)
        return ((both << n.to(tl.uint64)) >> 32).to(tl.uint32)


@triton.jit
def _quad_at(at, ITEM: tl.constexpr):
    """The 4 * ITEM bytes at addresses, words, by PTX."""
    # fmt: off
    if ITEM == 1:
        return (tl.inline_asm_elementwise(
            "ld.global.b32 $0, [$1];", "=r,l", (at,), dtype=tl.uint32, is_pure=False, pack=1,
        ),)
    elif ITEM == 2:
        return tl.inline_asm_elementwise(
            "ld.global.v2.b32 {$0, $1}, [$2];", "=r,=r,l", (at,),
            dtype=(tl.uint32, tl.uint32), is_pure=False, pack=1,
        )
    else:
        found = tl.inline_asm_elementwise(
            "ld.global.v4.b32 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,l", (at,),
            dtype=(tl.uint32, tl.uint32, tl.uint32, tl.uint32), is_pure=False, pack=1,
        )
        if ITEM == 8:
            found = found + _quad_at(at + 16, 4)
        return found
    # fmt: on


@triton.jit
def _whole_quads(x, quad, ITEM: tl.constexpr, PTX: tl.constexpr):
    """Elements 4 * `quad` and the next three, ITEM words."""
    if PTX:
        return _quad_at(x.to(tl.int64) + quad * (4 * ITEM), ITEM)
    else:
        source = x.to(tl.pointer_type(tl.uint32))
        found = ()
        for j in tl.static_range(ITEM):
            found = found + (tl.load(source + (quad * ITEM + j)),)
        return found


@triton.jit
def _partial_quads(x, quad, m, ITEM: tl.constexpr):
    """As `_whole_quads`, with the last of `m` elements in place of those behind it."""
    e = ()
    for j in tl.static_range(4):
        e = e + (tl.load(x + tl.minimum(4 * quad + j, m - 1)),)
    if ITEM == 1:
        a, b, c, d = e
        low = a.to(tl.uint32) | (b.to(tl.uint32) << 8)
        return (low | (c.to(tl.uint32) << 16) | (d.to(tl.uint32) << 24),)
    elif ITEM == 2:
        a, b, c, d = e
        low = a.to(tl.uint32) | (b.to(tl.uint32) << 16)
        return low, c.to(tl.uint32) | (d.to(tl.uint32) << 16)
    elif ITEM == 4:
        return e
    else:
        found = ()
        for j in tl.static_range(4):
            v = wide(e[j], ITEM)
            found = found + ((v & 0xFFFFFFFF).to(tl.uint32), (v >> 32).to(tl.uint32))
        return found


@triton.jit
def _load_quads(x, quad, m, FULL: tl.constexpr, L: tl.constexpr):
    """Elements 4 * `quad` and the next three of a tile of `m`, rotated: words, one for each byte
    of an element. All elements are there if FULL.
    """
    ITEM: tl.constexpr = L.item
    if FULL:
        w = _whole_quads(x, quad, ITEM, L.ptx)
    else:
        w = _partial_quads(x, quad, m, ITEM)
    if L.rotated:
        found = ()
        for j in tl.static_range(ITEM):
            if ITEM == 2:
                v = ((w[j] << 1) & 0xFFFEFFFE) | ((w[j] >> 15) & 0x00010001)
            elif ITEM == 4:
                v = (w[j] << 1) | (w[j] >> 31)
            else:
                v = (w[j] << 1) | (w[j ^ 1] >> 31)
            found = found + (v,)
        w = found
    return w


@triton.jit
def _plane_of(words, k, ITEM: tl.constexpr, PTX: tl.constexpr):
    """Byte `k` of each of the elements that `_load_quads` gave, a word."""
    if ITEM == 1:
        return words[0]
    elif ITEM == 2:
        return _permuted(words[0], words[1], 0x6420 + k * 0x1111, PTX)
    elif ITEM == 4:
        low = _permuted(words[0], words[1], 0x0040 + k * 0x11, PTX)
        high = _permuted(words[2], words[3], 0x0040 + k * 0x11, PTX)
        return _permuted(low, high, 0x5410, PTX)
    else:
        half = ()
        for j in tl.static_range(4):
            half = half + (tl.where(k < 4, words[2 * j], words[2 * j + 1]),)
        return _plane_of(half, k & 3, 4, PTX)


@triton.jit
def count_bytes(x, tile, m, of_group, work_ptr, memory, FULL: tl.constexpr, L: tl.constexpr):
    """Count the bytes of each plane of tile number `tile` of a group of `of_group` elements, or of
    its part of the sample, into work memory from `work_ptr` on.
    """
    ITEM: tl.constexpr = L.item
    sampled = of_group > _SAMPLED
    n = tl.where(sampled, TILE // 32, (m + 3) // 4)
    i = tl.arange(0, _COUNTED)
    v = tl.arange(0, 256)
    counts = ()
    for k in tl.static_range(ITEM):
        counts = counts + (tl.zeros([256], tl.int32),)
        if L.ptx:
            put(memory, k * 256 + v, v * 0)
    if L.ptx:
        tl.debug_barrier()
    for at in range(0, n, _COUNTED):
        block = tile * (TILE // 256) + ((at + i) >> 3)
        part = (block ^ (block >> 3) ^ (block >> 6)) & 7
        of_sample = ((at + i) >> 3) * 64 + part * 8 + (i & 7)
        quad = tl.where(sampled, of_sample, at + i)
        words = _load_quads(x, quad, m, FULL, L)
        for j in tl.static_range(4 * ITEM):
            byte = ((words[j // 4] >> (j % 4 * 8)) & 255).to(tl.int32)
            use = (at + i < n) & (4 * quad + j // ITEM < m)
            if L.ptx:
                count(memory, j % ITEM * 256 + byte, use.to(tl.int32))
            else:
                # What is not used counts as zero.
                byte = tl.where(use, byte, 0)
                others = _COUNTED - tl.sum(use.to(tl.int32), 0)
                more = tl.histogram(byte, 256) - tl.where(v == 0, others, 0)
                new = ()
                for k in tl.static_range(ITEM):
                    new = new + (counts[k] + (more if k == j % ITEM else 0),)
                counts = new
    if L.ptx:
        tl.debug_barrier()
    for k in tl.static_range(ITEM):
        found = look_up(memory, k * 256 + v, L.ptx) if L.ptx else counts[k]
        tl.store(words_at(work_ptr + k * _WORK_NBYTES, COUNTS_AT) + tile * 256 + v, found)


@triton.jit
def _byte_words(word, j: tl.constexpr):
    """Byte `j` of words, times 4."""
    if j == 0:
        return ((word << 2) & 0x3FC).to(tl.int32)
    else:
        return ((word >> (8 * j - 2)) & 0x3FC).to(tl.int32)


@triton.jit
def _entries_of(word, more, table, UNIT: tl.constexpr, PTX: tl.constexpr):
    """The entries of the units that the bytes of a word are; of 8 bytes, `more` has the others."""
    if UNIT == 1:
        a, b = (
            fetch(table, _byte_words(word, 0), False, PTX),
            fetch(table, _byte_words(word, 1), False, PTX),
        )
        c, d = (
            fetch(table, _byte_words(word, 2), False, PTX),
            fetch(table, _byte_words(word, 3), False, PTX),
        )
        return a, b, c, d
    elif UNIT == 2:
        c = ()
        for j in tl.static_range(4):
            c = c + (fetch(table, _byte_words(word, j), True, PTX),)
        first = fetch(table, c[0] + CLASS_STEP * c[1], False, PTX)
        return first, fetch(table, c[2] + CLASS_STEP * c[3], False, PTX)
    else:
        symbol = word.to(tl.int32) * 0
        for j in tl.static_range(4):
            symbol += fetch(table, _byte_words(word, j), True, PTX) << j
            symbol += fetch(table, _byte_words(more, j), True, PTX) << (4 + j)
        # Where a byte has no class the symbol is beyond those of units.
        return (fetch(table, tl.minimum(symbol, 4 * 256), False, PTX),)


@triton.jit
def _live(entries, element, m, UNIT: tl.constexpr, FULL: tl.constexpr):
    """Entries of units from number `element` on, of no bits where they are behind the end."""
    if FULL:
        return entries
    else:
        found = ()
        for j in tl.static_range(len(entries)):
            found = found + (tl.where(element + j * UNIT < m, entries[j], 0),)
        return found


@triton.jit
def _measure_block(
    x, m, table, k, UNIT: tl.constexpr, FULL: tl.constexpr, COLUMNS: tl.constexpr, L: tl.constexpr
):
    """(sizes of runs in bits, head of the block of plane `k` of a tile, its bytes)."""
    ITEM: tl.constexpr = L.item
    # Quads of a unit.
    PER: tl.constexpr = 2 if UNIT == 8 else 1
    first = byte_of(tl.load(x), k, ITEM, L.rotated)
    all_first = first.to(tl.uint32) * 0x01010101
    column = tl.arange(0, COLUMNS)[None, :]
    run = tl.arange(0, RUNS)
    sizes = tl.zeros([RUNS, COLUMNS], tl.int32)
    met = tl.zeros([RUNS, COLUMNS], tl.int32)
    other = tl.zeros([RUNS, COLUMNS], tl.uint32)
    for at in range(0, (tl.minimum(m, RUN) + 4 * PER - 1) // (4 * PER), COLUMNS):
        quad = run[:, None] * _QUADS + (at + column) * PER
        word = _plane_of(_load_quads(x, quad, m, FULL, L), k, ITEM, L.ptx)
        other |= word ^ all_first
        more = word
        if UNIT == 8:
            more = _plane_of(_load_quads(x, quad + 1, m, FULL, L), k, ITEM, L.ptx)
            other |= more ^ all_first
        entries = _live(_entries_of(word, more, table, UNIT, L.ptx), 4 * quad, m, UNIT, FULL)
        for j in tl.static_range(len(entries)):
            sizes += entries[j] >> SIZE_AT
            met |= entries[j]
    sizes = tl.sum(sizes, 1)
    runs = (m + (RUN - 1)) // RUN
    mine = run < runs
    most = tl.max(tl.where(mine, sizes, 0), 0)
    least = tl.min(tl.where(mine, sizes, 1 << 30), 0)
    narrow = most - least < 256
    listed = padded(runs * tl.where(narrow, 1, 2), 4)
    nbytes = listed + (tl.sum(sizes, 0) + 31) // 32 * 4
    stored = padded(m, 4)
    missing = tl.max(tl.max(met & MISSING, 1), 0) > 0
    is_stored = (nbytes >= stored) | missing
    head = tl.where(narrow, NARROW | (least << 16), WIDE)
    head = tl.where(is_stored, STORED, head)
    nbytes = tl.where(is_stored, stored, nbytes)
    is_constant = tl.max(tl.max((other != 0).to(tl.int32), 1), 0) == 0
    head = tl.where(is_constant, CONSTANT | (first << 8), head)
    return sizes, head, tl.where(is_constant, 0, nbytes) + 4


@triton.jit
def _measure_plane(
    x, m, plane_ptr, memory, t, k, UNIT: tl.constexpr, FULL: tl.constexpr, COLUMNS: tl.constexpr,
    L: tl.constexpr,
):  # fmt: skip
    """Find what the block of a plane is, of tile `t` of its group; gives its bytes."""
    table = load_words(words_at(plane_ptr, ENTRIES_AT), memory, ENCODER, L.ptx)
    sizes, head, nbytes = _measure_block(x, m, table, k, UNIT, FULL, COLUMNS, L)
    tl.store(words_at(plane_ptr, _SIZES_AT) + t * RUNS + tl.arange(0, RUNS), sizes)
    tl.store(words_at(plane_ptr, _HEADS_AT) + t, head)
    tl.store(words_at(plane_ptr, _NBYTES_AT) + t, nbytes)
    return nbytes


@triton.jit
def measure_tile(x, m, work_ptr, t, FULL: tl.constexpr, COLUMNS: tl.constexpr, L: tl.constexpr):
    """Bytes of tile `t` of a group."""
    ITEM: tl.constexpr = L.item
    memory = table_memory(ENCODING, L.ptx)
    total = m * 0
    for k in range(ITEM):
        plane_ptr = work_ptr + k * _WORK_NBYTES
        if tl.load(words_at(plane_ptr, FLAG_AT)) != 0:
            total += tl.where(t == 0, TABLE_NBYTES, 0)
            if L.cut >= ITEM:
                total += _measure_plane(x, m, plane_ptr, memory, t, k, L.low, FULL, COLUMNS, L)
            else:
                if k < L.cut:
                    total += _measure_plane(x, m, plane_ptr, memory, t, k, L.low, FULL, COLUMNS, L)
                else:
                    total += _measure_plane(x, m, plane_ptr, memory, t, k, L.high, FULL, COLUMNS, L)
        else:
            total += padded(m, _STEP)
    return total


@triton.jit
def _bits_of(entry, raw, of_escape):
    """The code of a unit of up to 2 bytes, `raw`, and these behind an escape's."""
    escaped = tl.where((entry & ESCAPED_UNIT) != 0, raw << of_escape, 0)
    return (entry & CODE).to(tl.uint32) | escaped


@triton.jit
def _two(a, b, raw_a, raw_b, of_escape, PTX: tl.constexpr):
    """A piece: two units, bits from the lowest on, their number in the upper word's upper byte."""
    first, second = _bits_of(a, raw_a, of_escape), _bits_of(b, raw_b, of_escape)
    size = (a >> SIZE_AT).to(tl.uint32)
    high = _upper(second, second * 0, size, PTX)
    return first | (second << size), high | ((size + (b >> SIZE_AT).to(tl.uint32)) << 24)


@triton.jit
def _pieces_of(word, more, entries, of_escape, UNIT: tl.constexpr, PTX: tl.constexpr):
    """The two pieces of four units of 1 byte or one of 8, or the piece of two units of 2 bytes."""
    if UNIT == 1:
        a, b, c, d = entries
        first = _two(a, b, word & 255, (word >> 8) & 255, of_escape, PTX)
        return first, _two(c, d, (word >> 16) & 255, word >> 24, of_escape, PTX)
    elif UNIT == 2:
        a, b = entries
        return (_two(a, b, word & 0xFFFF, word >> 16, of_escape, PTX),)
    else:
        entry = entries[0]
        escaped = (entry & ESCAPED_UNIT) != 0
        raw, length = tl.where(escaped, word, 0), (entry >> LENGTH_AT) & 15
        low = (entry & CODE).to(tl.uint32) | (raw << of_escape)
        size = tl.where(escaped, 32, 0).to(tl.uint32)
        high = _upper(raw, raw * 0, raw * 0 + of_escape, PTX)
        first = low, high | ((length.to(tl.uint32) + size) << 24)
        return first, (tl.where(escaped, more, 0), size << 24)


@triton.jit
def _append(s, piece, out):
    """Append pieces to the words of lanes: what is not stored yet, its bits, where it will be."""
    word, n, at = s
    low, high = piece
    after = n + (high >> 24)
    high = high & 0xFFFFFF
    word |= low << n
    second, third = _upper(low, high, n, False), _upper(high, high * 0, n, False)
    tl.store(out + at, word.to(tl.int32, bitcast=True), mask=after >= 32)
    tl.store(out + (at + 1), second.to(tl.int32, bitcast=True), mask=after >= 64)
    word = tl.where(after >= 64, third, tl.where(after >= 32, second, word))
    return word, after & 31, at + (after >> 5).to(tl.int32)


@triton.jit
def _columns(v):
    """What lanes have, of 2, 4, 8 or 16 columns, one by one."""
    N: tl.constexpr = v.shape[1]
    even, odd = tl.split(tl.reshape(v, [RUNS, N // 2, 2]))
    if N == 2:
        return tl.reshape(even, [RUNS]), tl.reshape(odd, [RUNS])
    else:
        a, b = _columns(even), _columns(odd)
        found = ()
        for j in tl.static_range(N // 2):
            found = found + (a[j], b[j])
        return found


@triton.jit
def _append_all(s, pieces, out, memory, N: tl.constexpr, PTX: tl.constexpr):
    """Append N pieces, or N pairs, of each run to its lane's words."""
    PAIRS: tl.constexpr = len(pieces)
    # 8 bytes more keep lanes out of each other's banks.
    NBYTES: tl.constexpr = 8 * N * PAIRS + 8
    if PTX:
        i = tl.arange(0, RUNS * N)
        here = memory + (i // N) * NBYTES + (i % N) * (8 * PAIRS)
        tl.debug_barrier()
        for j in tl.static_range(PAIRS):
            put_pair(here + 8 * j, pieces[j][0], pieces[j][1])
        tl.debug_barrier()
        lane = memory + tl.arange(0, RUNS) * NBYTES
        for j in tl.static_range(N * PAIRS):
            s = tl.inline_asm_elementwise(
                _APPEND,
                "=&r,=&r,=&r,r,r,r,r,l",
                (s[0], s[1], s[2], lane + 8 * j, out.to(tl.int64)),
                dtype=(tl.uint32, tl.uint32, tl.int32),
                is_pure=False,
                pack=1,
            )
    else:
        columns = ()
        for j in tl.static_range(PAIRS):
            low = _columns(tl.reshape(pieces[j][0], [RUNS, N]))
            columns = columns + ((low, _columns(tl.reshape(pieces[j][1], [RUNS, N]))),)
        for i in tl.static_range(N):
            for j in tl.static_range(PAIRS):
                s = _append(s, (columns[j][0][i], columns[j][1][i]), out)
    return s


@triton.jit
def _append_units(
    s, x, quad, m, k, table, memory, of_escape, out, N: tl.constexpr, FULL: tl.constexpr,
    L: tl.constexpr,
):  # fmt: skip
    """Append N units of 8 bytes of each run, from elements 4 * `quad` on, to its lane's words."""
    ITEM: tl.constexpr = L.item
    word = _plane_of(_load_quads(x, quad, m, FULL, L), k, ITEM, L.ptx)
    more = _plane_of(_load_quads(x, quad + 1, m, FULL, L), k, ITEM, L.ptx)
    entries = _live(_entries_of(word, more, table, 8, L.ptx), 4 * quad, m, 8, FULL)
    return _append_all(
        s, _pieces_of(word, more, entries, of_escape, 8, L.ptx), out, memory, N, L.ptx
    )


@triton.jit
def _copy_planes(
    words, quad, m, out_ptr, places, copied, coded, FULL: tl.constexpr, L: tl.constexpr
):
    """Write bytes of elements that are stored as they are, and zeros behind them."""
    ITEM: tl.constexpr = L.item
    for k in tl.static_range(ITEM):
        if ((copied >> k) & 1) != 0:
            word = _plane_of(words, k, ITEM, L.ptx).to(tl.int32, bitcast=True)
            to = (out_ptr + places[k]).to(tl.pointer_type(tl.int32)) + quad
            if FULL:
                tl.store(to, word)
            else:
                n = m - 4 * quad
                some = (1 << (8 * tl.minimum(tl.maximum(n, 0), 3))) - 1
                word = tl.where(n >= 4, word, word & some)
                end = tl.where(((coded >> k) & 1) != 0, padded(m, 4), padded(m, 8))
                tl.store(to, word, mask=4 * quad < end)


@triton.jit
def _write_planes(
    x, m, out_ptr, places, copied, coded, k, is_coded, table, memory, of_escape, out, sizes,
    UNIT: tl.constexpr, FULL: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """Write the planes `copied` of a tile, and if `is_coded` the runs of plane `k`, from the words
    `out` on.
    """
    N: tl.constexpr = _AT_ONCE if FULL and L.item < 8 else _FEWER
    i = tl.arange(0, RUNS * N)
    runs = (m + (RUN - 1)) // RUN
    start = tl.cumsum(sizes, 0) - sizes
    s = tl.zeros([RUNS], tl.uint32), (start & 31).to(tl.uint32), start >> 5
    for at in range(0, padded(tl.minimum(m, RUN), 8) // 4, N):
        quad = i // N * _QUADS + (at + i % N)
        words = _load_quads(x, quad, m, FULL, L)
        _copy_planes(words, quad, m, out_ptr, places, copied, coded, FULL, L)
        if is_coded:
            if UNIT == 8:
                HALF: tl.constexpr = N // 2
                j = tl.arange(0, RUNS * HALF)
                s = _append_units(
                    s, x, j // HALF * _QUADS + (at + 2 * (j % HALF)), m, k, table, memory,
                    of_escape, out, HALF, FULL, L,
                )  # fmt: skip
            else:
                word = _plane_of(words, k, L.item, L.ptx)
                entries = _live(
                    _entries_of(word, word, table, UNIT, L.ptx), 4 * quad, m, UNIT, FULL
                )
                pieces = _pieces_of(word, word, entries, of_escape, UNIT, L.ptx)
                s = _append_all(s, pieces, out, memory, N, L.ptx)
    # A run ends in a word in which the next one may start, which then has stored its bits there.
    # Only the last run can be so short that it ends in the word in which it starts.
    word, n, at = s
    run = tl.arange(0, RUNS)
    word = word.to(tl.int32, bitcast=True)
    last = tl.where(is_coded, runs, 0) - 1
    tl.store(out + at, word, mask=(n != 0) & (run == last))
    tl.debug_barrier()
    rest = (n != 0) & (run < last)
    tl.store(out + at, word | tl.load(out + at, mask=rest, other=0), mask=rest)


@triton.jit
def _pick(values, k, N: tl.constexpr):
    """Number `k` of N values."""
    found = values[0]
    for j in tl.static_range(1, N):
        found = tl.where(k == j, values[j], found)
    return found


@triton.jit
def _write_plane(
    x, m, t, plane_ptr, out_ptr, places, copied, coded, k, is_coded, memory,
    UNIT: tl.constexpr, FULL: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """Write the planes `copied`, and if `is_coded` the runs of the block of plane `k` and their
    sizes.
    """
    run = tl.arange(0, RUNS)
    runs = (m + (RUN - 1)) // RUN
    entries = words_at(plane_ptr, ENTRIES_AT)
    sizes = run * 0
    of_escape = m * 0
    block_ptr = out_ptr + _pick(places, k, L.item) // 4 * 4
    listed = m * 0
    if is_coded:
        load_words(entries, memory, ENCODER, L.ptx)
        of_escape = (tl.load(entries + (ENTRIES - 1)) >> LENGTH_AT) & 15
        sizes = tl.load(words_at(plane_ptr, _SIZES_AT) + t * RUNS + run)
        head = tl.load(words_at(plane_ptr, _HEADS_AT) + t)
        narrow = (head & 255) == NARROW
        listed = padded(runs * tl.where(narrow, 1, 2), 4)
        size = tl.where(run < runs, sizes - tl.where(narrow, (head >> 16) & 0xFFFF, 0), 0)
        if narrow:
            tl.store(block_ptr + 4 + run, size.to(tl.uint8), mask=run < listed)
        else:
            pairs = (block_ptr + 4).to(tl.pointer_type(tl.uint16))
            tl.store(pairs + run, size.to(tl.uint16), mask=2 * run < listed)
    out = (block_ptr + 4 + listed).to(tl.pointer_type(tl.int32))
    table = memory if L.ptx else entries
    _write_planes(
        x, m, out_ptr, places, copied, coded, k, is_coded, table, memory + 4 * ENCODER,
        of_escape.to(tl.uint32), out, sizes, UNIT, FULL, L,
    )  # fmt: skip


@triton.jit(noinline=True)
def write_tile(x, m, t, work_ptr, out_ptr, coded_ptr, memory, FULL: tl.constexpr, L: tl.constexpr):
    """Write tile `t` of a group; of the first one also the tables, and which planes are coded."""
    ITEM: tl.constexpr = L.item
    coded = m * 0
    for k in range(ITEM):
        coded |= (tl.load(words_at(work_ptr + k * _WORK_NBYTES, FLAG_AT)) != 0).to(tl.int32) << k
    at = m * 0
    if t == 0:
        tl.store(coded_ptr, coded.to(tl.uint8))
        for k in range(ITEM):
            if ((coded >> k) & 1) != 0:
                c = tl.arange(0, 256)
                table_ptr = work_ptr + k * _WORK_NBYTES + TABLE_AT
                table = tl.load(table_ptr + c, mask=c < TABLE_NBYTES, other=0)
                tl.store(out_ptr + at + c, table, mask=c < TABLE_NBYTES)
                at += TABLE_NBYTES
    # Stored planes, then blocks; those that are stored too are copied along.
    places = ()
    for k in tl.static_range(ITEM):
        places = places + (at,)
        at += tl.where(((coded >> k) & 1) != 0, 0, padded(m, _STEP))
    copied = coded ^ ((1 << ITEM) - 1)
    runs = m * 0
    found = ()
    for k in tl.static_range(ITEM):
        place = places[k] + 0 * at
        if ((coded >> k) & 1) != 0:
            plane_ptr = work_ptr + k * _WORK_NBYTES
            head = tl.load(words_at(plane_ptr, _HEADS_AT) + t)
            tl.store((out_ptr + at // 4 * 4).to(tl.pointer_type(tl.int32)), head)
            is_stored = (head & 255) == STORED
            copied |= tl.where(is_stored, 1 << k, 0)
            runs |= tl.where((head & 255) >= NARROW, 1 << k, 0)
            place = at + tl.where(is_stored, 4, 0)
            at += tl.load(words_at(plane_ptr, _NBYTES_AT) + t)
        found = found + (place,)
    if at % _STEP != 0:
        tl.store((out_ptr + at // 4 * 4).to(tl.pointer_type(tl.int32)), 0)
    for k in range(ITEM):
        is_coded = ((runs >> k) & 1) != 0
        if is_coded | ((k == ITEM - 1) & (copied != 0)):
            plane_ptr = work_ptr + k * _WORK_NBYTES
            # fmt: off
            if L.cut >= ITEM:
                _write_plane(
                    x, m, t, plane_ptr, out_ptr, found, copied, coded, k, is_coded, memory,
                    L.low, FULL, L,
                )
            else:
                if k < L.cut:
                    _write_plane(
                        x, m, t, plane_ptr, out_ptr, found, copied, coded, k, is_coded, memory,
                        L.low, FULL, L,
                    )
                else:
                    _write_plane(
                        x, m, t, plane_ptr, out_ptr, found, copied, coded, k, is_coded, memory,
                        L.high, FULL, L,
                    )
            # fmt: on
            copied = copied * 0
