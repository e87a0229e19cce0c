# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment,misc"
"""delta on a GPU: the base of what is decoded, what chunks claim, and writing over the base."""

from __future__ import annotations

import triton
import triton.language as tl

from .common.dynamic_triton import items, load_raw, share
from .common.frame_triton import (
    BASE_CHUNK,
    CHUNK,
    CHUNK_PAYLOAD,
    LATE,
    check_record,
    check_whole,
    chunk_kind,
    gaps_of,
    padding_of,
    report,
    static_of,
)
from .delta_decode_triton import (
    GROUP,
    LISTED,
    MASKS,
    PLAIN,
    RAW,
    copy,
    fields_of,
    list_of,
    load_words,
    shift_of,
    words_of,
)
from .delta_words_triton import TILE, elements_at, keys_of


@triton.jit
def _weigh(base, masks, m, first_word, center, L: tl.constexpr, FULL: tl.constexpr):
    """Terms of the digest of a tile of the base. At `masks` are stored how many elements of each
    group are in each class.
    """
    WORDS: tl.constexpr = 8 * L.item
    ROWS: tl.constexpr = 128 // L.item
    PER: tl.constexpr = 4 // L.item
    terms = tl.zeros([ROWS, WORDS], tl.uint64)
    for at in range(0, TILE if FULL else m, ROWS * GROUP):
        group = at // GROUP + tl.arange(0, ROWS)
        k = group[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
        word = load_words(base, k, m, L, FULL)
        terms += word.to(tl.uint64) * keys_of(first_word + k.to(tl.uint32)).to(tl.uint64)
        if L.classes > 1:
            ones = tl.zeros([ROWS, WORDS], tl.int32)
            fields = fields_of(word, center, L)
            for h in tl.static_range(PER):
                one = (k * 0 + 1) << shift_of(fields, h, center, L)
                ones += one if FULL else tl.where(k * PER + h < m, one, 0)
            counts = tl.sum(ones, 1)
            if FULL:
                tl.store(masks + group, counts)
            else:
                tl.store(masks + group, counts, mask=group * GROUP < m)
    return tl.sum(tl.sum(terms, 1), 0)


@triton.jit
def read_one(t, p, from_ptr, L: tl.constexpr):
    """A tile's share of the digest of a chunk's base, and of the checksum terms; the classes of its
    groups.
    """
    if t.m > 0:
        center = t.m * 0
        if L.classes > 1:
            if p.raw == 0:
                words, count, _ = words_of(p, t, L)
                word = tl.load(words, mask=count > 0, other=0).to(tl.int32, bitcast=True)
                center = (word >> 1) & ((1 << L.exponent) - 1)
        base = elements_at(from_ptr, t.first, L)
        first_word = (t.begin // 4 * L.item).to(tl.uint32)
        if t.m == TILE:
            total = _weigh(base, t.info + MASKS, t.m, first_word, center, L, True)
        else:
            total = _weigh(base, t.info + MASKS, t.m, first_word, center, L, False)
        tl.atomic_add(t.sums + 1, total.to(tl.int64, bitcast=True), sem="relaxed")
    if L.sums:
        tiles = tl.maximum((t.n + TILE - 1) // TILE, 1)
        total = share(p.static_ptr, p.stride, p.stride * 0, t.tile, tiles)
        total += share(p.dynamic_ptr, p.nbytes, p.stride // 4, t.tile, tiles)
        tl.atomic_add(t.sums, total.to(tl.int64, bitcast=True), sem="relaxed")


@triton.jit
def check_one(
    src_ptr, plan_ptr, status_ptr, chunk, sums, dynamic_ptr, whole, planned, slot, L: tl.constexpr
):
    """A chunk's record and the digest of its base; of one checked `whole` padding and checksum.

    `dynamic_ptr` is where its dynamic part is in a packed buffer.
    """
    n, kind_ptr = chunk_kind(plan_ptr, chunk)
    static_ptr = static_of(src_ptr, plan_ptr, chunk)
    stride = tl.load(plan_ptr + 5)
    raw_dynamic = tl.maximum(n * L.item - stride, 0)
    most = tl.minimum(raw_dynamic, slot)
    record = check_record(src_ptr, plan_ptr, status_ptr, chunk, planned, most, raw_dynamic)
    raw = (tl.load(record + 2) & 1) != 0
    if whole:
        if raw:
            _, padding = padding_of(static_ptr, tl.minimum(n * L.item, stride), stride)
        else:
            _, padding = gaps_of(static_ptr, kind_ptr)
        if L.packed:
            claimed = tl.load(record + 1)
            used = tl.where((claimed < 0) | (claimed > most), 0, claimed)
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


@triton.jit
def result_one(record_ptr, static_ptr, sums, chunk, status_ptr):
    """Compare the digest of a chunk's result."""
    if (tl.load(record_ptr + 2) & 1) == 0:
        # That of the base, and what changes add.
        found = tl.load(sums + 1) + tl.load(sums + 2)
        if found != tl.load(static_ptr.to(tl.pointer_type(tl.int64)) + 1):
            report(status_ptr, LATE + (chunk << 8) + CHUNK_PAYLOAD)


@triton.jit
def write_one(t, p, out_ptr, status_ptr, L: tl.constexpr):
    """Write over a tile of the base, if nothing was found wrong, what is listed, or all of it."""
    if (t.m > 0) & (tl.load(status_ptr) == 0):
        out = items(out_ptr, L.item) + t.first
        kind = tl.load(t.info)
        if kind == LISTED:
            numbers, values = list_of(t.info, L)
            count = tl.load(t.info + 1)
            for at in range(0, count, 512):
                k = at + tl.arange(0, 512)
                i = tl.load(numbers + k, mask=k < count, other=0).to(tl.int32)
                tl.store(out + i, tl.load(values + k, mask=k < count, other=0), mask=k < count)
        elif kind == RAW:
            # fmt: off
            load_raw(
                p.static_ptr, p.dynamic_ptr, p.stride, p.nbytes, t.n, t.begin, t.m, out, t.m * 0,
                t.m, L.item, True,
            )
            # fmt: on
        elif kind == PLAIN:
            words, _, _ = words_of(p, t, L)
            copy(items(words + 1, L.item), out, t.m, t.m * 0, t.m, L, False)
