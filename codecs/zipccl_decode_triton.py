# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment,misc"
"""Decoding of zipccl on a GPU: tiles, and what is checked of chunks."""

from __future__ import annotations

import triton
import triton.language as tl

from .common.frame_triton import (
    CHUNK,
    CHUNK_PAYLOAD,
    accumulator,
    add_to,
    check_record,
    check_whole,
    chunk_kind,
    float_of,
    gaps_of,
    key_of,
    padding_of,
    report,
    store_element,
    weigh,
    weigh_bytes,
)
from .common.launch_triton import options
from .common.runs_triton import transpose_bits
from .zipccl import TILE
from .zipccl_words_triton import (
    ALL_RAW,
    ANY_TILE,
    HIGH,
    LANES,
    LOW7,
    ONES,
    WIDTH,
    columns_of,
    elements,
    items,
    lanes,
    load_if,
    one_by_one,
    popc,
    terms_of,
    terms_of_pairs,
    weigh_items,
)

_TILE = tl.constexpr(TILE)


@triton.jit
def index_of(static_ptr, index_at, tile, tiles, dynamic_nbytes, fixed, EXP: tl.constexpr):
    """What the index at byte `index_at` says of a tile of a chunk that has `tiles`.

    (window, first and past-the-last escape, whether that cannot be, checksum terms.) `fixed`: the
    base, -1 if any, -2 if all are alike.
    """
    offsets = (static_ptr + index_at).to(tl.pointer_type(tl.uint32)) + tile
    entry_at = (index_at + 4 * tiles) // 2 + tile
    entry_ptr = static_ptr.to(tl.pointer_type(tl.uint16)) + entry_at
    entry = tl.load(entry_ptr).to(tl.int32)
    offset = tl.load(offsets)
    begin = offset.to(tl.int64)
    end = tl.load(offsets + 1, mask=(tile + 1) < tiles, other=0).to(tl.int64)
    end = tl.where(tile + 1 == tiles, dynamic_nbytes, end)
    base = entry & 32767
    bad = (begin > end) | (end > dynamic_nbytes) | ((tile == 0) & (begin != 0))
    bad = bad | (base > (1 << EXP) - 7) | (entry == 32768)
    if fixed != -1:
        alike = tl.load(entry_ptr - tile).to(tl.int32)
        alike = tl.where(fixed >= 0, fixed, alike & 32767)
        bad = bad | (entry != alike)
    terms = weigh(offset, index_at // 4 + tile) + weigh_bytes(entry, entry_at * 2)
    return entry, begin, end, bad, terms


@triton.jit
def _exponents_of_row(planes, r: tl.constexpr, offset, b7, b8, L: tl.constexpr):
    """Exponents of row `r` by the code alone: base + (code - base) mod 8, a byte each."""
    if L.turned:
        code = (planes[r] >> L.mantissa) & 0x07070707
    else:
        code = (planes[0] >> r) & ONES
        code |= ((planes[1] >> r) & ONES) << 1
        code |= ((planes[2] >> r) & ONES) << 2
    return (b7 + ((code + offset) & 0x07070707)) ^ b8


@triton.jit
def _clear_base(e, b4):
    """Zero where a byte is the base's."""
    d = e ^ b4
    other = ((((d & LOW7) + LOW7) | d) >> 7) & ONES
    return e & (other * 255)


@triton.jit
def decode_rows(
    block_ptr,
    valid,
    entry,
    escapes_ptr,
    begin,
    end,
    capacity,
    word,
    FULL: tl.constexpr,
    L: tl.constexpr,
):
    """Decode one tile: (rows for `row_of`, whether its payload is wrong, checksum terms).

    FULL: a whole tile. Escapes are read at `begin` + i while that is below `capacity`.
    """
    ITEM: tl.constexpr = L.item
    EXTRA: tl.constexpr = (1 + L.mantissa) % 8
    lane = lanes()
    zero_mode = entry >= 32768
    base = (entry & 32767).to(tl.uint32)
    b4 = base * ONES
    if FULL:
        W: tl.constexpr = WIDTH
        inside = None
    else:
        W = columns_of(valid)
        inside = 4 * lane < W
    row_words = W // 4
    block32 = block_ptr.to(tl.pointer_type(tl.uint32))
    block64 = block_ptr.to(tl.pointer_type(tl.uint64))
    BYTES: tl.constexpr = 4 if ITEM == 4 else 0
    at = BYTES * W
    total = tl.zeros([LANES], tl.uint64)
    ss = ()
    lows = ()
    for r in tl.static_range(8):
        k = r * row_words + lane
        low = tl.zeros([LANES], tl.uint64)
        s = tl.zeros([LANES], tl.uint32)
        if ITEM == 4:
            low = load_if(block64 + k, inside)
        if ITEM >= 2:
            s = load_if(block32 + at + k, inside)
        ss = ss + (s,)
        lows = lows + (low,)
    if ITEM >= 2:
        at += 2 * W
    planes = ()
    f = tl.zeros([LANES], tl.uint32) - 1
    free = (base + 7) & 7
    for k in tl.static_range(3 + EXTRA):
        plane = load_if(block32 + at + k * row_words + lane, inside)
        if k < 3:
            f = f & (plane ^ (((free >> k) & 1) - 1))
        planes = planes + (plane,)
    if not FULL:
        f = tl.where(inside, f, 0)
    if L.sums:
        key = key_of(word + lane)
        key2 = key_of(word + 2 * lane)
        for r in tl.static_range(8):
            if ITEM == 4:
                total += terms_of_pairs(lows[r], key2, 2 * r * row_words, None)
            if ITEM >= 2:
                total += terms_of(ss[r], key, BYTES * W + r * row_words, None)
        for k in tl.static_range(3 + EXTRA):
            total += terms_of(planes[k], key, at + k * row_words, None)
    block_terms = tl.sum(total, 0)
    if L.turned:
        # As elements have them, with 0 for the other bits of the exponent.
        MAN: tl.constexpr = L.mantissa
        bits = ()
        for k in tl.static_range(MAN):
            bits = bits + (planes[3 + k],)
        bits = bits + (planes[0], planes[1], planes[2])
        for _ in tl.static_range(4 - MAN):
            bits = bits + (tl.zeros([LANES], tl.uint32),)
        planes = transpose_bits(bits + (planes[2 + EXTRA],), 3)
    offset = ((8 - (base & 7)) & 7) * ONES
    b7 = b4 & LOW7
    b8 = b4 & HIGH
    e0 = _exponents_of_row(planes, 0, offset, b7, b8, L)
    e1 = _exponents_of_row(planes, 1, offset, b7, b8, L)
    e2 = _exponents_of_row(planes, 2, offset, b7, b8, L)
    e3 = _exponents_of_row(planes, 3, offset, b7, b8, L)
    e4 = _exponents_of_row(planes, 4, offset, b7, b8, L)
    e5 = _exponents_of_row(planes, 5, offset, b7, b8, L)
    e6 = _exponents_of_row(planes, 6, offset, b7, b8, L)
    e7 = _exponents_of_row(planes, 7, offset, b7, b8, L)
    lowest = base
    as_zero = tl.where(zero_mode, 0, 0xFFFFFFFF).to(tl.uint32)
    if zero_mode:
        # Code base stands for 0; nothing is coded as the base itself.
        lowest = base + 1
        e0 = _clear_base(e0, b4)
        e1 = _clear_base(e1, b4)
        e2 = _clear_base(e2, b4)
        e3 = _clear_base(e3, b4)
        e4 = _clear_base(e4, b4)
        e5 = _clear_base(e5, b4)
        e6 = _clear_base(e6, b4)
        e7 = _clear_base(e7, b4)
    n = popc(f, L.ptx).to(tl.int32)
    count = tl.sum(n, 0)
    pos = tl.cumsum(n, 0) - n
    found_ptr = escapes_ptr + begin
    readable = tl.minimum(tl.maximum(capacity - begin, 0), 4096).to(tl.int32)
    coded = base + 7 - lowest
    wrong = tl.zeros([LANES], tl.int32)
    left = tl.max(n, 0)
    while left > 0:
        bit = popc((f & (0 - f)) - 1, L.ptx)
        on = (f != 0) & (pos < readable)
        found = tl.load(found_ptr + pos, mask=on, other=0).to(tl.uint32)
        odd = ((found - lowest) < coded) | (found == as_zero)
        if L.exponent < 8:
            odd = odd | (found >= (1 << L.exponent))
        wrong |= (on & odd).to(tl.int32)
        patch = tl.where(on, (found ^ ((base + 7) & 255)) << (bit & 24), 0)
        row = bit & 7
        e0 ^= tl.where(row == 0, patch, 0)
        e1 ^= tl.where(row == 1, patch, 0)
        e2 ^= tl.where(row == 2, patch, 0)
        e3 ^= tl.where(row == 3, patch, 0)
        e4 ^= tl.where(row == 4, patch, 0)
        e5 ^= tl.where(row == 5, patch, 0)
        e6 ^= tl.where(row == 6, patch, 0)
        e7 ^= tl.where(row == 7, patch, 0)
        pos += 1
        f = f & (f - 1)
        left -= 1
    bad = (count != end - begin) | (tl.max(wrong, 0) > 0)
    return ((e0, e1, e2, e3, e4, e5, e6, e7), ss, planes, lows), bad, block_terms


@triton.jit
def row_of(rows, r: tl.constexpr, L: tl.constexpr):
    """Row `r` of what `decode_rows` gives, as `elements` has it."""
    es, ss, planes, lows = rows
    if L.turned:
        SAME: tl.constexpr = (128 + (1 << L.mantissa) - 1) * ONES
        v = (es[r] << L.mantissa) | (planes[r] & SAME)
        return v, v, v, v
    else:
        EXTRA: tl.constexpr = (1 + L.mantissa) % 8
        x = tl.zeros([LANES], tl.uint32)
        for k in tl.static_range(EXTRA):
            x |= ((planes[3 + k] >> r) & ONES) << k
        return elements(es[r], ss[r], x, lows[r], L)


@triton.jit
def padding_is_wrong(i, cols, valid, vs, entry, L: tl.constexpr):
    """Whether one of the elements from `i` on, one to a word, is no padding where it should be."""
    bad = entry < 0
    for c in tl.static_range(4):
        pad = (4 * lanes() < cols) & (i + c >= valid)
        wrong = pad & (vs[c] != (((entry & 32767) + 6) << L.mantissa).to(tl.uint32))
        bad = bad | (tl.max(wrong.to(tl.int32), 0) > 0)
    return bad


@triton.jit
def store_tile(rows, out_ptr, out_at, lo, hi, valid, entry, FULL: tl.constexpr, L: tl.constexpr):
    """Elements `lo` to `hi` of a decoded tile to `out_ptr` from element `out_at` on.

    FULL: all of a whole tile, to an aligned place. Gives whether its padding is wrong.
    """
    bad = entry < 0
    for r in tl.static_range(8):
        v0, v1, v2, v3 = row_of(rows, r, L)
        if FULL:
            if L.store:
                store_row(out_ptr, out_at + r * WIDTH, v0, v1, v2, v3, L.exponent, L.item, L.add)
        else:
            cols = columns_of(valid)
            i = r * cols + 4 * lanes()
            vs = one_by_one(v0, v1, v2, v3, L)
            bad = bad | padding_is_wrong(i, cols, valid, vs, entry, L)
            if L.store:
                for c in tl.static_range(4):
                    use = (4 * lanes() < cols) & (i + c >= lo) & (i + c < hi)
                    to = out_at + (i + c - lo)
                    store_element(out_ptr, to, vs[c], use, L.exponent, L.item, L.add)
    return bad


@triton.jit
def store_row(
    out_ptr, at, v0, v1, v2, v3, EXP: tl.constexpr, ITEM: tl.constexpr, ADD: tl.constexpr
):
    """Store or add 512 elements from element `at` on, as `elements` gives them."""
    if ADD == 0:
        if ITEM == 1:
            tl.store(out_ptr.to(tl.pointer_type(tl.uint32)) + at // 4 + lanes(), v0)
        elif ITEM == 2:
            v = v0.to(tl.uint64) | (v1.to(tl.uint64) << 32)
            tl.store(out_ptr.to(tl.pointer_type(tl.uint64)) + at // 4 + lanes(), v)
        else:
            v01 = v0.to(tl.uint64) | (v1.to(tl.uint64) << 32)
            v23 = v2.to(tl.uint64) | (v3.to(tl.uint64) << 32)
            tl.store(
                out_ptr.to(tl.pointer_type(tl.uint64))
                + tl.multiple_of(at // 2, 2)
                + tl.arange(0, 2 * LANES),
                tl.reshape(tl.join(v01, v23), [2 * LANES]),
            )
    else:
        if ITEM == 2:
            v2 = v1 & 0xFFFF
            v3 = v1 >> 16
            v1 = v0 >> 16
            v0 = v0 & 0xFFFF
        value = tl.join(
            tl.join(float_of(v0, EXP, ITEM), float_of(v2, EXP, ITEM)),
            tl.join(float_of(v1, EXP, ITEM), float_of(v3, EXP, ITEM)),
        )
        acc = accumulator(out_ptr, EXP, ADD) + at + tl.arange(0, WIDTH)
        add_to(acc, tl.reshape(value, [WIDTH]), None, EXP, ADD)


@triton.jit
def dynamic_share(dynamic_ptr, nbytes, static_stride, part, parts):
    """Checksum terms of this tile's equal share of the dynamic words."""
    words = (nbytes + 3) // 4
    share = (words + parts - 1) // parts
    at = part.to(tl.int64) * share
    n = tl.minimum(share, words - at).to(tl.int32)
    last = tl.minimum(words - 1 - at, 1 << 30).to(tl.int32)
    # Bytes of the last word behind the used ones count as zeros.
    unused = (8 * (4 * words - nbytes)).to(tl.uint32)
    w = dynamic_ptr.to(tl.pointer_type(tl.uint32)) + at
    key = key_of(static_stride // 4 + at + tl.arange(0, 32))
    total = tl.zeros([32], tl.uint64)
    done = 0
    while done < n:
        i = done + tl.arange(0, 32)
        v = tl.load(w + i, mask=i < n, other=0)
        v = tl.where(i == last, (v << unused) >> unused, v)
        total += terms_of(v, key, done, None)
        done += 32
    return tl.sum(total, 0)


@triton.jit
def decode_raw(
    static_ptr,
    dynamic_ptr,
    stride,
    begin,
    valid,
    lo,
    hi,
    out_ptr,
    out_at,
    missing,
    L: tl.constexpr,
):
    """A tile of a chunk that is stored raw; `missing` dynamic bytes at its end are not there."""
    s = items(static_ptr, L.item)
    y = items(dynamic_ptr, L.item)
    cut = stride // L.item
    readable = tl.where(missing == 0, valid, 0)
    total = tl.zeros([256], tl.uint64)
    for at in range(0, valid, 256):
        k = at + tl.arange(0, 256)
        i = begin + k
        v = tl.load(s + i, mask=(k < valid) & (i < cut), other=0)
        v |= tl.load(y + (i - cut), mask=(k < readable) & (i >= cut), other=0)
        if L.store:
            use = (k >= lo) & (k < hi)
            to = out_at + (k - lo)
            store_element(out_ptr, to, v.to(tl.uint32), use, L.exponent, L.item, L.add)
        if L.sums:
            total += tl.where(k < valid, weigh_items(v, i, L.item), 0)
    return tl.sum(total, 0)


@triton.jit
def claims(p, ITEM: tl.constexpr):
    """What a chunk's record says: (dynamic bytes, whether it is raw, dynamic bytes if it is).

    Of more than there may be it is 0.
    """
    claimed = tl.load(p.record_ptr + 1)
    both = tl.load(p.record_ptr + 2)
    flags = (both & 0xFFFFFFFF).to(tl.int32)
    raw_dynamic = tl.maximum(p.n * ITEM - p.stride, 0)
    # A number beyond 2^63 is negative here, and out of bounds as well.
    out_of_bounds = (claimed > tl.minimum(raw_dynamic, p.slot_nbytes)) | (claimed < 0)
    is_raw = ((flags & 1) != 0) | (p.fixed == ALL_RAW)
    return tl.where(out_of_bounds, 0, claimed), is_raw, raw_dynamic


@triton.jit
def decode_one(p, tile, lo, hi, out_ptr, out_at, status_ptr, FULL: tl.constexpr, L: tl.constexpr):
    """Elements `lo` to `hi` of a tile of a chunk, to element `out_at` on. Gives checksum terms.

    FULL: all of a whole tile, to an aligned address.
    """
    dynamic_nbytes, is_raw, raw_dynamic = claims(p, L.item)
    begin_tile = tile.to(tl.int64) * _TILE
    valid = tl.minimum(p.n - begin_tile, _TILE).to(tl.int32)
    total = tl.zeros([], tl.uint64)
    # fmt: off
    if is_raw:
        total = decode_raw(
            p.static_ptr, p.dynamic_ptr, p.stride, begin_tile, valid, lo, hi, out_ptr, out_at,
            raw_dynamic - dynamic_nbytes, L,
        )
    else:
        tiles = ((p.n + _TILE - 1) // _TILE).to(tl.int32)
        entry, begin, end, bad, of_index = index_of(
            p.static_ptr, p.index_at, tile, tiles, dynamic_nbytes, p.fixed, L.exponent
        )
        rows, wrong, total = decode_rows(
            p.static_ptr + tile.to(tl.int64) * L.block, valid, entry, p.dynamic_ptr, begin, end,
            dynamic_nbytes, tile * (L.block // 4), FULL, L,
        )
        # fmt: on
        bad = bad | wrong | store_tile(rows, out_ptr, out_at, lo, hi, valid, entry, FULL, L)
        if bad:
            report(status_ptr, CHUNK + (p.chunk.to(tl.int64) << 8) + CHUNK_PAYLOAD)
        if L.sums:
            total += of_index
            total += dynamic_share(p.dynamic_ptr, dynamic_nbytes, p.stride, tile, tiles)
    return total


@triton.jit
def check_one(
    p, nbytes, src_ptr, plan_ptr, sums_ptr, groups, status_ptr, whole, planned, packed, summed
):
    """Check a chunk of the buffer at `src_ptr`: its record; if it was decoded `whole` its padding,
    and if it is `summed` its checksum, of terms at `sums_ptr`.

    It has `nbytes` bytes of elements. Of chunk 0 `planned` means the header too.
    """
    n, kind_ptr = chunk_kind(plan_ptr, p.chunk)
    raw_dynamic = tl.maximum(nbytes - p.stride, 0)
    most = tl.minimum(raw_dynamic, p.slot_nbytes)
    record = check_record(src_ptr, plan_ptr, status_ptr, p.chunk, planned, most, raw_dynamic)
    if whole:
        if ((tl.load(record + 2) & 1) != 0) | (p.fixed == ALL_RAW):
            total, padding = padding_of(p.static_ptr, tl.minimum(nbytes, p.stride), p.stride)
        else:
            total, padding = gaps_of(p.static_ptr, kind_ptr)
        if packed:
            claimed = tl.load(record + 1)
            used = tl.where((claimed < 0) | (claimed > most), 0, claimed)
            _, behind = padding_of(p.dynamic_ptr, used, (used + 127) // 128 * 128)
            padding |= behind
        if summed:
            sums = tl.zeros([256], tl.uint64)
            for g in range(0, groups, 256):
                i = g + tl.arange(0, 256)
                t = tl.load(sums_ptr + i, mask=i < groups, other=0)
                sums += t.to(tl.uint64, bitcast=True)
            total += tl.sum(sums, 0)
        check_whole(plan_ptr, status_ptr, record, p.chunk, n, padding, total, summed)


def decode_options(itemsize: int, mode: int) -> dict[str, int | bool]:
    """Launch options of the decode kernel."""
    if mode:
        return ANY_TILE
    return options(4) if itemsize == 4 else options(1, maxnreg=120)
