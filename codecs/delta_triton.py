# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment,misc"
"""delta on a GPU: a program for each tile, which goes over it in pieces. specs/delta.md.

Encoding: one launch compares, one lists what has changed and writes what it takes to work memory,
one adds up how many words tiles have, one moves them to where they belong. Decoding:
one launch reads, one checks records, checksums and digests of bases, one decodes. In the memory of
the base nothing is written before all is checked, so tiles are decoded twice there.
"""

from __future__ import annotations

import functools

import triton
import triton.language as tl

from ..formats.dtypes import DType
from .common.base import Plan
from .common.dynamic_triton import Parts, add_sums, claims, items, load_raw, share
from .common.frame_triton import (
    BASE_CHUNK,
    CHUNK,
    CHUNK_PAYLOAD,
    LATE,
    check_header,
    check_record,
    check_whole,
    chunk_kind,
    frame_of,
    gaps_of,
    padding_of,
    report,
    static_of,
    touched,
)
from .common.launch_triton import Variant, kernel, options
from .common.minifloat_triton import aligned_for
from .delta import MAX_QUOTIENT, Delta, kind_of, sums_scratch, tile_count
from .delta_encode_triton import measure_kernel, pack_kernel, place_kernel, scan_kernel
from .delta_words_triton import (
    COUNTS,
    DIGESTS,
    FAR,
    LOG_TILE,
    MOST_WORDS,
    PIECE,
    PLACES,
    SUMS,
    TILE,
    Launch,
    exponents_of,
    get_bits,
    info_at,
    log16,
    low_bits,
    low_of,
    members_of,
    ordered,
    terms_of,
    unordered,
)

_MAX_QUOTIENT = tl.constexpr(MAX_QUOTIENT)


@triton.jit
def _pick(v, k, LANES: tl.constexpr):
    """Number `k` of a vector."""
    return tl.sum(tl.where(tl.arange(0, LANES) == k, v, 0), 0)


@kernel
def _read_kernel(
    src_ptr,
    from_ptr,
    scratch_ptr,
    starts_ptr,
    nelem: tl.int64,
    chunk_nelem: tl.int64,
    tiles: tl.int32,
    first_tile: tl.int64,
    head: tl.int32,
    static_at: tl.int64,
    static_stride: tl.int64,
    dynamic_at: tl.int64,
    dynamic_stride: tl.int64,
    slot: tl.int64,
    L: tl.constexpr,
):
    """A tile's share of the digest of a chunk's base, and of the checksum terms."""
    pid = tl.program_id(0).to(tl.int64) + first_tile
    chunk, tile = pid // tiles, pid % tiles
    begin = tile * TILE
    n = tl.maximum(tl.minimum(chunk_nelem, nelem - chunk * chunk_nelem), 0)
    m = tl.maximum(tl.minimum(n - begin, TILE), 0).to(tl.int32)
    sums = scratch_ptr.to(tl.pointer_type(tl.int64)) + chunk * SUMS
    base = items(from_ptr, L.item) + (chunk * chunk_nelem + begin)
    terms = tl.zeros([512], tl.uint64)
    for at in range(0, m, 512):
        i = at + tl.arange(0, 512)
        v = tl.load(base + i, mask=i < m, other=0).to(tl.uint32)
        terms += tl.where(i < m, terms_of(v, begin + i, L.item), 0)
    total = tl.sum(terms, 0)
    tl.atomic_add(sums + 1, total.to(tl.int64, bitcast=True), sem="relaxed")
    if L.sums:
        record_ptr = src_ptr.to(tl.pointer_type(tl.int64)) + head + chunk * 4
        stride = static_stride * 128
        nbytes, _ = claims(record_ptr, n, stride, slot, L.item)
        static_ptr = src_ptr + (static_at + chunk * static_stride) * 128
        dynamic_ptr = src_ptr + (dynamic_at + chunk * dynamic_stride) * 128
        if L.packed:
            dynamic_ptr = src_ptr + tl.load(starts_ptr + chunk)
        total = share(static_ptr, stride, stride * 0, tile, tiles)
        total += share(dynamic_ptr, nbytes, stride // 4, tile, tiles)
        tl.atomic_add(sums, total.to(tl.int64, bitcast=True), sem="relaxed")


@kernel
def _check_kernel(
    src_ptr,
    plan_ptr,
    scratch_ptr,
    status_ptr,
    starts_ptr,
    first_chunk: tl.int64,
    first_whole: tl.int64,
    end_whole: tl.int64,
    planned: tl.int32,
    slot: tl.int64,
    L: tl.constexpr,
):
    """A chunk's record and the digest of its base; of those checked whole padding and checksum;
    once, the header.
    """
    chunk = first_chunk + tl.program_id(0).to(tl.int64)
    if (planned != 0) & (chunk == first_chunk):
        check_header(src_ptr, plan_ptr, status_ptr)
    n, kind_ptr = chunk_kind(plan_ptr, chunk)
    static_ptr = static_of(src_ptr, plan_ptr, chunk)
    stride = tl.load(plan_ptr + 5)
    raw_dynamic = tl.maximum(n * L.item - stride, 0)
    most = tl.minimum(raw_dynamic, slot)
    record = check_record(src_ptr, plan_ptr, status_ptr, chunk, planned, most, raw_dynamic)
    sums = scratch_ptr.to(tl.pointer_type(tl.int64)) + chunk * SUMS
    raw = (tl.load(record + 2) & 1) != 0
    if (chunk >= first_whole) & (chunk < end_whole):
        if raw:
            _, padding = padding_of(static_ptr, tl.minimum(n * L.item, stride), stride)
        else:
            _, padding = gaps_of(static_ptr, kind_ptr)
        if L.packed:
            claimed = tl.load(record + 1)
            used = tl.where((claimed < 0) | (claimed > most), 0, claimed)
            dynamic_ptr = src_ptr + tl.load(starts_ptr + chunk)
            _, behind = padding_of(dynamic_ptr, used, (used + 127) // 128 * 128)
            padding |= behind
        total = tl.load(sums).to(tl.uint64, bitcast=True)
        check_whole(plan_ptr, status_ptr, record, chunk, n, padding, total, L.sums)
    if raw == 0:
        digests = static_ptr.to(tl.pointer_type(tl.int64))
        found = tl.load(sums + 1)
        fits = found == tl.load(digests)
        if L.overwrite:
            fits = fits | (found == tl.load(digests + 1))
        if fits == 0:
            report(status_ptr, CHUNK + (chunk << 8) + BASE_CHUNK)


@kernel
def _result_kernel(
    src_ptr,
    scratch_ptr,
    status_ptr,
    first_chunk: tl.int64,
    head: tl.int32,
    static_at: tl.int64,
    static_stride: tl.int64,
):
    """Compare the digest of a chunk's result."""
    chunk = first_chunk + tl.program_id(0).to(tl.int64)
    record_ptr = src_ptr.to(tl.pointer_type(tl.int64)) + head + chunk * 4
    if (tl.load(record_ptr + 2) & 1) == 0:
        static_ptr = src_ptr + (static_at + chunk * static_stride) * 128
        sums = scratch_ptr.to(tl.pointer_type(tl.int64)) + chunk * SUMS
        if tl.load(sums + 2) != tl.load(static_ptr.to(tl.pointer_type(tl.int64)) + 1):
            report(status_ptr, LATE + (chunk << 8) + CHUNK_PAYLOAD)


@triton.jit
def _unary(words, count, at, end, wanted, L: tl.constexpr):
    """Where the unary code number `wanted` ends, from bit `at` on; `end` + 1 if it is not there."""
    found = at * 0
    while (found < wanted) & (at < end):
        i = at + tl.arange(0, PIECE)
        one = get_bits(words, count, i, i * 0 + 1).to(tl.int32, bitcast=True)
        one = tl.where(i < end, one, 0)
        rank = found + tl.cumsum(one, 0)
        last = tl.max(tl.where((one != 0) & (rank <= wanted), i, -1), 0)
        found += tl.sum(one, 0)
        at = tl.where(found >= wanted, last + 1, at + PIECE)
    return tl.where(found >= wanted, at, end + 1)


@triton.jit
def _find_places(words, count, at, end, low_at, low, listed, size, begin, bits):
    """Set the bits, from number `begin` on, of the listed elements of a class of `size`.

    Gives where the unary codes from bit `at` on end, and whether a gap goes beyond the end or a
    code is not there.
    """
    found, passed = at * 0, (at * 0).to(tl.int64)
    start, bad = at, at < 0
    while (found < listed) & (at < end):
        i = at + tl.arange(0, PIECE)
        one = get_bits(words, count, i, i * 0 + 1).to(tl.int32, bitcast=True)
        one = tl.where(i < end, one, 0)
        rank = found + tl.cumsum(one, 0)
        use = (one != 0) & (rank <= listed)
        k = rank - 1
        part = get_bits(words, count, low_at + k * low, i * 0 + low).to(tl.int32, bitcast=True)
        part = tl.where(use, part, 0)
        sums = passed + tl.cumsum(part.to(tl.int64), 0)
        # What quotients and low bits come to, and the elements before.
        to = ((i - start - k).to(tl.int64) << low.to(tl.int64)) + sums + k
        bad = bad | (tl.max((use & (to >= size)).to(tl.int32), 0) > 0)
        n = (begin + to).to(tl.int32)
        mark = (i * 0 + 1) << (n & 31)
        tl.atomic_or(bits + (n >> 5), mark, mask=use & (to < size), sem="relaxed")
        passed += tl.sum(part.to(tl.int64), 0)
        last = tl.max(tl.where(use, i, -1), 0)
        found += tl.sum(one, 0)
        at = tl.where(found >= listed, last + 1, at + PIECE)
    return at, bad | (found < listed)


@triton.jit
def _changed_at(base, i, m, center, bits, before, starts, lists, L: tl.constexpr):
    """(elements, whether they have changed, members counted) of a piece."""
    LANES: tl.constexpr = L.lanes
    inside = i < m
    v = tl.load(base + i, mask=inside, other=0).to(tl.uint32)
    members = members_of(exponents_of(v, L), center, inside, L)
    if L.overwrite:
        members = tl.where(tl.arange(0, LANES)[:, None] == 0, inside.to(tl.int32)[None, :], 0)
    n = (starts + before)[:, None] + tl.cumsum(members, 1) - members
    word = tl.load(bits + (n >> 5), mask=members != 0, other=0)
    listed = (word >> (n & 31)) & 1
    changed = tl.sum(tl.where((members != 0) & (listed == lists[:, None]), 1, 0), 0)
    return v, changed, before + tl.sum(members, 1)


@triton.jit
def _decode_tile(
    base,
    out,
    words,
    count,
    m,
    info,
    begin,
    lo,
    hi,
    L: tl.constexpr,
    STORE: tl.constexpr,
):
    """Decode a coded tile; (checksum terms of the result, whether it is bad).

    STORE: elements `lo` to `hi` of the tile are stored at `out`, which points to its first one.
    """
    LANES: tl.constexpr = L.lanes
    WIDTH: tl.constexpr = 8 * L.item
    c = tl.arange(0, LANES)
    end = count * 32
    bits, places = info + COUNTS, info + PLACES
    for at in range(0, TILE // 32, 512):
        tl.store(bits + at + tl.arange(0, 512), tl.zeros([512], tl.int32))
    tl.debug_barrier()
    head = m * 0 + 1
    center, scale, exceptions = m * 0, m * 0, m * 0
    if not L.overwrite:
        center = get_bits(words, count, head, m * 0 + L.exponent).to(tl.int32, bitcast=True)
        head += L.exponent
        scale = get_bits(words, count, head, m * 0 + L.scale_bits).to(tl.int32, bitcast=True)
        head += L.scale_bits
    changes = tl.zeros([LANES], tl.int32)
    bad = m < 0
    CODED: tl.constexpr = 1 if L.overwrite else L.classes
    for which in tl.static_range(CODED):
        value, head, odd = _gamma(words, count, head)
        changes = tl.where(c == which, value - 1, changes)
        bad = bad | odd
    if not L.overwrite:
        value, head, odd = _gamma(words, count, head)
        exceptions = value - 1
        bad = bad | odd
    sizes = tl.zeros([LANES], tl.int32)
    for at in range(0, m, PIECE):
        i = at + tl.arange(0, PIECE)
        v = tl.load(base + i, mask=i < m, other=0).to(tl.uint32)
        members = members_of(exponents_of(v, L), center, i < m, L)
        if L.overwrite:
            members = tl.where(c[:, None] == 0, (i < m).to(tl.int32)[None, :], 0)
        sizes += tl.sum(members, 1)
    total = tl.sum(changes, 0)
    bad = bad | (tl.max((changes > sizes).to(tl.int32), 0) > 0) | (total == 0)
    terms = tl.zeros([PIECE], tl.uint64)
    lists = (2 * changes <= sizes).to(tl.int32)
    listed = tl.minimum(changes, sizes - changes)
    low = low_bits(sizes, listed)
    starts = tl.cumsum(sizes, 0) - sizes
    fields = listed * low
    low_at = head + tl.cumsum(fields, 0) - fields
    sign_at = head + tl.sum(fields, 0)
    gap_at = sign_at
    if not L.overwrite:
        gap_at += total
    value_at, exception_at, quotient_at = gap_at, gap_at, gap_at
    if bad == 0:
        for j in range(CODED):
            # fmt: off
            gap_at, wrong = _find_places(
                words, count, gap_at, end, _pick(low_at, j, LANES), _pick(low, j, LANES),
                _pick(listed, j, LANES), _pick(sizes, j, LANES), _pick(starts, j, LANES), bits,
            )
            # fmt: on
            bad = bad | wrong
        tl.debug_barrier()
        value_at, exception_at, quotient_at = gap_at, gap_at, gap_at
        if L.overwrite:
            exception_at += total * WIDTH
        else:
            hots, low_total = m * 0, m * 0
            before = tl.zeros([LANES], tl.int32)
            for at in range(0, m, PIECE):
                i = at + tl.arange(0, PIECE)
                # fmt: off
                v, changed, before = _changed_at(
                    base, i, m, center, bits, before, starts, lists, L
                )
                # fmt: on
                hot, n = low_of(exponents_of(v, L), scale, WIDTH)
                hots += tl.sum(hot * changed, 0)
                low_total += tl.sum(n * changed, 0)
            value_at = _unary(words, count, gap_at, end, hots, L)
            exception_at = value_at + low_total
        last = exception_at
        if not L.overwrite:
            last += exceptions * (LOG_TILE + WIDTH)
        # Less than a word is left, and zeros.
        bad = bad | (last > end) | (end - last >= 32)
        rest = get_bits(words, count, last, tl.maximum(tl.minimum(end - last, 32), 0))
        bad = bad | (rest != 0) | (exceptions > total)
    if bad == 0:
        before = tl.zeros([LANES], tl.int32)
        done, number, earlier = m * 0, m * 0, m * 0 - 1
        for at in range(0, m, PIECE):
            i = at + tl.arange(0, PIECE)
            v, changed, before = _changed_at(base, i, m, center, bits, before, starts, lists, L)
            k = done + tl.cumsum(changed, 0) - changed
            use = changed != 0
            if L.overwrite:
                y = tl.where(use, get_bits(words, count, value_at + k * WIDTH, changed * WIDTH), v)
            else:
                e = exponents_of(v, L)
                hot, n = low_of(e, scale, WIDTH)
                hot, n = hot * changed, n * changed
                hots = tl.sum(hot, 0)
                h = tl.cumsum(hot, 0) - hot
                # Places of this piece's codes, each behind the one before.
                tl.debug_barrier()
                seen, window = m * 0, quotient_at
                while (seen < hots) & (window < end):
                    j = window + tl.arange(0, PIECE)
                    one = get_bits(words, count, j, j * 0 + 1).to(tl.int32, bitcast=True)
                    rank = seen + tl.cumsum(one, 0) - 1
                    tl.store(places + rank, j, mask=(one != 0) & (rank < hots))
                    seen += tl.sum(one, 0)
                    window += PIECE
                tl.debug_barrier()
                here = tl.load(places + h, mask=hot != 0, other=0)
                ahead = tl.load(places + h - 1, mask=(hot != 0) & (h > 0), other=0)
                ahead = tl.where(h > 0, ahead, quotient_at - 1)
                quotient = tl.where(hot != 0, here - ahead - 1, 0)
                if hots > 0:
                    quotient_at = tl.max(tl.where(hot != 0, here, 0), 0) + 1
                most = (hot * 0 + 1 << tl.minimum(WIDTH - n, 4)) - 1
                bad = bad | (tl.max(((quotient > most) & (hot != 0)).to(tl.int32), 0) > 0)
                quotient = tl.minimum(quotient, most)
                part = get_bits(words, count, value_at + tl.cumsum(n, 0) - n, n)
                value_at += tl.sum(n, 0)
                wide = (quotient.to(tl.uint64) << n.to(tl.uint64)) | part.to(tl.uint64)
                size = (wide & ((1 << WIDTH) - 1)).to(tl.uint32)
                done_here = done + tl.sum(changed, 0)
                ahead_of = _exception(words, count, exception_at, number, exceptions, WIDTH)
                while (number < exceptions) & (ahead_of < done_here):
                    bad = bad | (ahead_of <= earlier)
                    where = exception_at + number * (LOG_TILE + WIDTH) + LOG_TILE
                    given = get_bits(words, count, where, m * 0 + WIDTH)
                    size = tl.where(use & (k == ahead_of), given, size)
                    earlier = ahead_of
                    number += 1
                    ahead_of = _exception(words, count, exception_at, number, exceptions, WIDTH)
                old = ordered(v, L)
                negative = get_bits(words, count, sign_at + k, changed) != 0
                left = tl.where(negative, old, ((1 << WIDTH) - 1) - old)
                bad = bad | (tl.max((use & (size >= left)).to(tl.int32), 0) > 0)
                new = tl.where(negative, old - size - 1, old + size + 1)
                y = tl.where(use, unordered(new & ((1 << WIDTH) - 1), L), v)
            done += tl.sum(changed, 0)
            terms += tl.where(i < m, terms_of(y, begin + i, L.item), 0)
            if STORE:
                mask = (i >= lo) & (i < hi)
                tl.store(out + i, y.to(out.dtype.element_ty), mask=mask)
        bad = bad | (number < exceptions)
    return tl.sum(terms, 0), bad


@triton.jit
def _exception(words, count, at, number, exceptions, WIDTH: tl.constexpr):
    """Which change exception `number` is of; behind the last one none that there is."""
    here = at + number * (LOG_TILE + WIDTH)
    found = get_bits(words, count, here, number * 0 + LOG_TILE).to(tl.int32, bitcast=True)
    return tl.where(number < exceptions, found, FAR)


@triton.jit
def _gamma(words, count, at):
    """(number, where it ends, whether it is bad): Elias' gamma code from bit `at` on."""
    ahead = get_bits(words, count, at, at * 0 + 16).to(tl.int32, bitcast=True)
    below = log16(ahead & (0 - ahead)) - 1
    bad = ahead == 0
    below = tl.maximum(below, 0)
    rest = get_bits(words, count, at + below + 1, below).to(tl.int32, bitcast=True)
    return (at * 0 + 1 << below) | rest, at + 2 * below + 1, bad


@triton.jit
def _copy_terms(source, out, m, begin, lo, hi, ITEM: tl.constexpr, STORE: tl.constexpr):
    """Copy elements `lo` to `hi` of a tile; the checksum terms of all."""
    terms = tl.zeros([512], tl.uint64)
    for at in range(0, m, 512):
        i = at + tl.arange(0, 512)
        v = tl.load(source + i, mask=i < m, other=0)
        terms += tl.where(i < m, terms_of(v.to(tl.uint32), begin + i, ITEM), 0)
        if STORE:
            tl.store(out + i, v, mask=(i >= lo) & (i < hi))
    return tl.sum(terms, 0)


@kernel
def _decode_kernel(
    src_ptr,
    from_ptr,
    out_ptr,
    scratch_ptr,
    status_ptr,
    starts_ptr,
    start: tl.int64,
    stop: tl.int64,
    nelem: tl.int64,
    chunk_nelem: tl.int64,
    tiles: tl.int32,
    first_tile: tl.int64,
    sums_words: tl.int64,
    head: tl.int32,
    static_at: tl.int64,
    static_stride: tl.int64,
    dynamic_at: tl.int64,
    dynamic_stride: tl.int64,
    slot: tl.int64,
    L: tl.constexpr,
):
    """Decode a tile, if nothing has been found wrong so far.

    Elements `start` to `stop` go to `out_ptr` if they are wanted, terms of the result's digest are
    summed up.
    """
    STORE: tl.constexpr = L.store
    pid = tl.program_id(0).to(tl.int64) + first_tile
    chunk, tile = pid // tiles, pid % tiles
    begin = tile * TILE
    n = tl.maximum(tl.minimum(chunk_nelem, nelem - chunk * chunk_nelem), 0)
    m = tl.maximum(tl.minimum(n - begin, TILE), 0).to(tl.int32)
    if (m > 0) & (tl.load(status_ptr) == 0):
        first = chunk * chunk_nelem + begin
        lo = tl.minimum(tl.maximum(start - first, 0), m).to(tl.int32)
        hi = tl.minimum(tl.maximum(stop - first, 0), m).to(tl.int32)
        base = items(from_ptr, L.item) + first
        out = items(out_ptr, L.item) + (first - start)
        record_ptr = src_ptr.to(tl.pointer_type(tl.int64)) + head + chunk * 4
        stride = static_stride * 128
        nbytes, raw = claims(record_ptr, n, stride, slot, L.item)
        static_ptr = src_ptr + (static_at + chunk * static_stride) * 128
        dynamic_ptr = src_ptr + (dynamic_at + chunk * dynamic_stride) * 128
        if L.packed:
            dynamic_ptr = src_ptr + tl.load(starts_ptr + chunk)
        terms = tl.zeros([], tl.uint64)
        if raw:
            # fmt: off
            load_raw(
                static_ptr, dynamic_ptr, stride, nbytes, n, begin, m, out, lo, hi, L.item, STORE
            )
            # fmt: on
        else:
            offsets = (static_ptr + DIGESTS).to(tl.pointer_type(tl.uint32)) + tile
            at = tl.load(offsets).to(tl.int64)
            more = begin + TILE < n
            behind = tl.load(offsets + 1, mask=more, other=0).to(tl.int64)
            behind = tl.where(more, behind, nbytes // 4)
            bad = (at > behind) | (behind > nbytes // 4) | ((tile == 0) & (at != 0))
            bad = bad | (nbytes % 4 != 0) | (behind - at > MOST_WORDS)
            if bad == 0:
                words = dynamic_ptr.to(tl.pointer_type(tl.uint32)) + at
                count = (behind - at).to(tl.int32)
                of_plain = 1 + (m * L.item + 3) // 4
                if count == 0:
                    terms = _copy_terms(base, out, m, begin, lo, hi, L.item, STORE)
                elif (tl.load(words) & 1) != 0:
                    bad = (tl.load(words) != 1) | (count != of_plain)
                    if bad == 0:
                        used = m * L.item % 4
                        last = tl.load(words + count - 1)
                        bad = (used != 0) & ((last >> (8 * used).to(tl.uint32)) != 0)
                        source = items(words + 1, L.item)
                        terms = _copy_terms(source, out, m, begin, lo, hi, L.item, STORE)
                else:
                    info = info_at(scratch_ptr, sums_words, chunk, tile, tiles)
                    # fmt: off
                    terms, bad = _decode_tile(
                        base, out, words, count, m, info, begin, lo, hi, L, STORE
                    )
                    # fmt: on
            if bad:
                report(status_ptr, LATE + (chunk << 8) + CHUNK_PAYLOAD)
        sums = scratch_ptr.to(tl.pointer_type(tl.int64)) + chunk * SUMS
        tl.atomic_add(sums + 2, terms.to(tl.int64, bitcast=True), sem="relaxed")


@functools.cache
def launch_of(spec: Delta, dtype: DType, **values: bool) -> Launch:
    """The `Launch` of a codec and dtype, with more `values`."""
    kind = kind_of(dtype)
    overwrite = spec.form == "overwrite"
    classes = 1 if overwrite else kind.classes
    lanes = 1 if classes == 1 else 8
    form = kind.width // 8, kind.exponent, kind.mantissa, kind.scale_bits, classes, lanes
    return Launch(*form, kind.signed, overwrite, **values)


@functools.cache
def _variant(
    which, spec: Delta, dtype: DType, warps: int = 4, maxnreg: int | None = None, **values: bool
) -> Variant:
    return Variant(which, options(warps, maxnreg), L=launch_of(spec, dtype, **values))


_RESULT = Variant(_result_kernel, options(1))
_PLACE = Variant(place_kernel, options(16))


class _Launches:
    """What kernels are told about a plan."""

    def __init__(self, plan: Plan) -> None:
        self.tiles = max(tile_count(plan.chunk_nelem), 1)
        self.sums_nbytes = sums_scratch(plan.chunks)
        self.sums_words = self.sums_nbytes // 4
        self.parts = Parts.of(plan)
        self.places = self.parts.places
        self.sizes = *self.parts.sizes, self.tiles


def _launches(plan: Plan) -> _Launches:
    found = plan.__dict__.get("_delta_launches")
    if found is None:
        found = plan.__dict__["_delta_launches"] = _Launches(plan)
    return found


def supports(dtype: DType) -> bool:
    """Elements of 8 bytes are coded on the host."""
    return dtype.itemsize <= 4


def encode(plan: Plan, x, out, scratch, stats=None, key=None, *, base) -> None:
    """Encode the elements of `x` against those of `base`; see `tightwire.gpu` for the contract."""
    spec, dtype, g = plan.codec, plan.dtype, _launches(plan)
    frame_of(plan).begin(out, scratch[: g.sums_nbytes])
    if not plan.nelem:
        return
    programs = g.tiles * plan.chunks
    aligned = aligned_for(plan, x) and aligned_for(plan, base)
    # Fewer registers are more tiles at a time, which wait for memory.
    for which, warps, most in ((scan_kernel, 4, 80), (measure_kernel, 1, None)):
        variant = _variant(which, spec, dtype, warps, most, aligned=aligned)
        variant.launch(programs, (x, base, scratch), *g.sizes, g.sums_words)
    _PLACE.launch(plan.chunks, (scratch,), *g.sizes, g.sums_words)
    pack = _variant(pack_kernel, spec, dtype, sums=plan.checksum, aligned=aligned)
    pack.launch(programs, (x, base, out, scratch), *g.sizes, g.sums_words, *g.places)
    if plan.checksum:
        add_sums(plan, g.parts, out, g.tiles)


def decode(
    plan: Plan,
    src,
    out,
    scratch,
    status,
    *,
    base,
    start: int = 0,
    stop: int | None = None,
    check: bool = True,
    dynamic_starts=None,
    store: bool = True,
    planned: bool = True,
    in_place: bool = False,
) -> None:
    """Decode elements `start` to `stop` into `out`; see `tightwire.gpu` for the contract.

    `in_place`: `out` is the memory of `base`, all of it.
    """
    spec, dtype, g = plan.codec, plan.dtype, _launches(plan)
    stop = plan.nelem if stop is None else stop
    packed = dynamic_starts is not None
    starts = dynamic_starts if packed else status
    slot = plan.raw_dynamic(0) if packed else plan.dynamic_stride
    sums = check and plan.checksum
    scratch[: g.sums_nbytes].zero_()
    begin, end, first_whole, end_whole = touched(plan, start, stop)
    chosen = {"packed": packed, "sums": sums}
    # The digest is that of all of a chunk's base.
    first, programs = begin * g.tiles, (end - begin) * g.tiles
    read = _variant(_read_kernel, spec, dtype, **chosen)
    read.launch(programs, (src, base, scratch, starts), *g.sizes, first, *g.places, slot)
    table = frame_of(plan).table(src.device)
    _variant(_check_kernel, spec, dtype, **chosen).launch(
        end - begin,
        (src, table, scratch, status, starts),
        begin,
        first_whole,
        end_whole if check else first_whole,
        int(planned),
        slot,
    )

    def place(i: int) -> int:
        size = plan.chunk_nelem
        return i // size * g.tiles + i % size // int(TILE.value)

    def tiles(stored: bool) -> None:
        variant = _variant(_decode_kernel, spec, dtype, store=stored, packed=packed)
        target = out if stored else src
        tensors = src, base, target, scratch, status, starts
        numbers = start, stop, *g.sizes, place(start), g.sums_words, *g.places, slot
        variant.launch(place(stop - 1) + 1 - place(start), tensors, *numbers)

    if start < stop:
        tiles(store and not in_place)
    if first_whole < end_whole:
        numbers = first_whole, *g.places[:3]
        _RESULT.launch(end_whole - first_whole, (src, scratch, status), *numbers)
    if store and in_place and start < stop:
        tiles(True)
