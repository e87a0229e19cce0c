# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment,misc"
"""The kernels of codecs that code tile by tile: encode, decode, and sums of both.

A format is two device functions, and what they have to know:

- PACK(v, t, s, draw, stats_ptr, F, L, MASKED) encodes a tile, and returns the checksum terms of the
  words that it wrote;
- UNPACK(t, lo, hi, F, L, MASKED) returns (float32 values, which threads found a code that is wrong
  among elements `lo` to `hi` of the chunk, checksum terms);
- SCALE(stats_ptr, static_ptr, at, F, CHOOSE) returns (a number that all tiles of a chunk share,
  whether the fast forms of the other two may be taken with it).

Values are columns: a tuple of `run` tensors, each with one value of every thread's run of
neighbouring elements. Where the device converts pairs of 16-bit floats, PACK gets those of a whole
tile as columns of words of two elements if the format takes them (`pairs`). F is the format, a
frozen dataclass of whatever the functions need; L is a `Launch`; `t` and `s` are `Tile`s.
Everything else is here: geometry, masks, selections, checksums, reports, sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from .frame_triton import CHUNK, CHUNK_PAYLOAD, place_of
from .launch_triton import kernel
from .philox_triton import KEY_ON_DEVICE, NO_KEY
from .runs_triton import (
    add_elements,
    element_words,
    lanes,
    load_elements,
    load_words,
    report_any,
    rounded_pair,
    store_elements,
    store_runs,
    sum_pairs,
    sum_runs,
    word_values,
)

_KEY_ON_DEVICE = tl.constexpr(KEY_ON_DEVICE)
#: Where scales come from that are not chosen.
OF_STATS, OF_SOURCE = 1, 2


class Tile(NamedTuple):
    """A tile of a chunk of a buffer.

    Attributes:
        chunk: Number of the chunk.
        tile: Number of the tile in the chunk.
        n: Elements of the chunk.
        first: Number of the chunk's first element in the tensor.
        nelem: Elements of the tensor.
        static_ptr: The chunk's static part.
        at: Where the second section starts in it, in units of 128 bytes.
        scale: What SCALE returned.
    """

    chunk: Any
    tile: Any
    n: Any
    first: Any
    nelem: Any
    static_ptr: Any
    at: Any
    scale: Any


@dataclass(frozen=True)
class Launch:
    """What the kernels know of a call.

    Attributes:
        rows: Runs of a tile.
        run: Elements of a run.
        exponent: Bits of the exponent of the plan's dtype.
        item: Bytes of its elements.
        x_item: Bytes of the elements that are read or added to; 0: decoded ones are stored.
        aligned: Chunks start at multiples of 16 bytes there.
        add: Encode the sum with a buffer.
        given: Scales are OF_STATS, or OF_SOURCE: of the buffer that is added; 0: they are chosen.
        random: Where the key is.
        sums: Sum up checksum terms.
        store: Decoded elements are wanted.
        out_item: Bytes of the elements that a sum is stored as: 4 is float32; 0: it is encoded.
        scaled: A sum is multiplied by a number.
        staged: See `Tiling`.
        ptx: PTX may be used.
        cvt: The device converts small floats, and has packed integers.
    """

    rows: int
    run: int
    exponent: int
    item: int
    x_item: int
    aligned: bool
    add: bool = False
    given: int = 0
    random: int = NO_KEY
    sums: bool = False
    store: bool = True
    out_item: int = 0
    scaled: bool = False
    staged: bool = False
    ptx: bool = False
    cvt: bool = False


@dataclass(frozen=True)
class Format:
    """The part of a format that the driver knows; formats add their own.

    Attributes:
        run: Elements of a thread's run.
        limited: Decoded values are brought into the dtype's finite range.
        pairs: PACK takes words of two elements.
        checked: There are codes that are wrong.
    """

    run: int
    limited: bool
    pairs: bool
    checked: bool


@triton.jit
def no_scale(stats_ptr, static_ptr, at, F: tl.constexpr, CHOOSE: tl.constexpr):
    """SCALE of formats without one."""
    return 1.0, True


@triton.jit
def _load(x_ptr, t, L: tl.constexpr, WORDS: tl.constexpr, MASKED: tl.constexpr):
    """Values of a tile's elements, 0 from the chunk's end on; or WORDS of them."""
    begin = t.tile * (L.rows * L.run)
    if MASKED:
        i = begin + lanes(L.rows)[:, None] * L.run + tl.arange(0, L.run)[None, :]
        return load_elements(x_ptr, t.first + i, i < t.n, L.rows, L.exponent, L.x_item, L.run)
    else:
        words = load_words(x_ptr + (t.first + begin) * L.x_item, None, L.rows, L.x_item, L.run)
        if WORDS:
            return words
        else:
            return word_values(words, L.exponent, L.x_item)


@triton.jit
def _encode_tile(
    x_ptr,
    t,
    s,
    draw,
    stats_ptr,
    status_ptr,
    F: tl.constexpr,
    G: tl.constexpr,
    L: tl.constexpr,
    PACK: tl.constexpr,
    UNPACK: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Encode a tile, or its sum with that of a buffer; gives the checksum terms of both."""
    PAIRS: tl.constexpr = L.cvt and (L.x_item == 2) and (MASKED == 0)
    WORDS: tl.constexpr = PAIRS and (L.add or F.pairs)
    v = _load(x_ptr, t, L, WORDS, MASKED)
    added = tl.zeros([], tl.uint64)
    if L.add:
        y, wrong, added = UNPACK(s, t.n * 0, t.n, G, L, MASKED)
        if G.checked:
            report_any(status_ptr, CHUNK + (t.chunk << 8) + CHUNK_PAYLOAD, wrong)
        if WORDS:
            v = sum_pairs(y, v, L.exponent, G.limited)
        else:
            v = sum_runs(y, v, L.exponent, L.item, L.cvt, G.limited)
        if MASKED:
            used = ()
            RUN: tl.constexpr = L.run
            for k in tl.static_range(RUN):
                inside = (t.tile * L.rows + lanes(L.rows)) * L.run + k < t.n
                used = used + (tl.where(inside, v[k], 0.0),)
            v = used
    if WORDS and (not F.pairs):
        v = word_values(v, L.exponent, 2)
    total = PACK(v, t, s, draw, stats_ptr, F, L, MASKED)
    return total, added


@kernel
def encode_kernel(
    x_ptr,
    out_ptr,
    record_ptr,
    src_ptr,
    sums_ptr,
    status_ptr,
    key_ptr,
    stats_ptr,
    nelem: tl.int64,
    chunk_nelem: tl.int64,
    tiles: tl.int32,
    stride: tl.int64,
    at: tl.int64,
    source_stride: tl.int64,
    source_at: tl.int64,
    seed: tl.uint64,
    step: tl.uint64,
    rank: tl.uint64,
    F: tl.constexpr,
    G: tl.constexpr,
    L: tl.constexpr,
    PACK: tl.constexpr,
    UNPACK: tl.constexpr,
    SCALE: tl.constexpr,
):
    """Encode one tile of one chunk, or its sum with that of a buffer of format G.

    `out_ptr` and `src_ptr` are the first static parts, `record_ptr` is the first record.
    """
    pid = tl.program_id(0)
    chunk = (pid // tiles).to(tl.int64)
    tile = (pid % tiles).to(tl.int64)
    first = chunk * chunk_nelem
    if L.aligned:
        first = tl.multiple_of(first, 16)
    n = tl.maximum(tl.minimum(chunk_nelem, nelem - first), 0)
    if L.random == _KEY_ON_DEVICE:
        seed = tl.load(key_ptr).to(tl.uint64, bitcast=True)
        step = tl.load(key_ptr + 1).to(tl.uint64, bitcast=True)
    draw = (seed, step, rank)
    static_ptr = out_ptr + chunk * stride * 128
    scale, plain = SCALE(stats_ptr, static_ptr, at, F, True)
    t = Tile(chunk, tile, n, first, nelem, static_ptr, at, scale)
    s = t
    if L.add:
        source_ptr = src_ptr + chunk * source_stride * 128
        scale, usual = SCALE(stats_ptr, source_ptr, source_at, G, False)
        plain = plain & usual
        s = Tile(chunk, tile, n, first, nelem, source_ptr, source_at, scale)
    plain = plain & L.aligned & ((tile + 1) * (L.rows * L.run) <= n)
    # fmt: off
    if plain:
        total, added = _encode_tile(
            x_ptr, t, s, draw, stats_ptr, status_ptr, F, G, L, PACK, UNPACK, False
        )
    else:
        total, added = _encode_tile(
            x_ptr, t, s, draw, stats_ptr, status_ptr, F, G, L, PACK, UNPACK, True
        )
    # fmt: on
    if L.sums:
        record = record_ptr.to(tl.pointer_type(tl.int64)) + chunk * 4
        tl.atomic_add(record, total.to(tl.int64, bitcast=True), sem="relaxed")
        if L.add:
            tl.atomic_add(sums_ptr + chunk, added.to(tl.int64, bitcast=True), sem="relaxed")


@triton.jit
def _decode_tile(
    t,
    status_ptr,
    out_ptr,
    to,
    lo,
    hi,
    F: tl.constexpr,
    L: tl.constexpr,
    UNPACK: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Decode a tile; element i of the chunk goes to `to + i` if it is in [lo, hi). Gives the
    checksum terms.
    """
    y, wrong, total = UNPACK(t, lo, hi, F, L, MASKED)
    if F.checked:
        report_any(status_ptr, CHUNK + (t.chunk << 8) + CHUNK_PAYLOAD, wrong)
    if L.store:
        begin = t.tile * (L.rows * L.run)
        i = begin + lanes(L.rows)[:, None] * L.run + tl.arange(0, L.run)[None, :]
        use = None
        if MASKED:
            use = (i >= lo) & (i < hi)
        if L.x_item > 0:
            add_elements(out_ptr, to + i, y, use, L.exponent, L.item, L.x_item, L.cvt, F.limited)
        else:
            words = element_words(y, None, L.exponent, L.item, L.cvt, F.limited)
            if MASKED:
                store_elements(out_ptr, to + i, words, use, L.rows, L.item)
            else:
                store_runs(out_ptr + (to + begin) * L.item, words, L.rows, L.staged)
    return total


@kernel
def decode_kernel(
    src_ptr,
    out_ptr,
    sums_ptr,
    status_ptr,
    start: tl.int64,
    stop: tl.int64,
    first_chunk: tl.int64,
    nelem: tl.int64,
    chunk_nelem: tl.int64,
    tiles: tl.int32,
    stride: tl.int64,
    at: tl.int64,
    F: tl.constexpr,
    L: tl.constexpr,
    UNPACK: tl.constexpr,
    SCALE: tl.constexpr,
):
    """Elements `start` to `stop` of the tensor as far as they lie in one tile of one chunk.

    `src_ptr` is the first static part.
    """
    pid = tl.program_id(0)
    chunk = (first_chunk + pid // tiles).to(tl.int64)
    tile = (pid % tiles).to(tl.int64)
    first = chunk * chunk_nelem
    n = tl.maximum(tl.minimum(chunk_nelem, nelem - first), 0)
    static_ptr = src_ptr + chunk * stride * 128
    scale, plain = SCALE(static_ptr, static_ptr, at, F, False)
    t = Tile(chunk, tile, n, first, nelem, static_ptr, at, scale)
    to = first - start
    if L.aligned:
        to = tl.multiple_of(to, 16)
    lo = tl.maximum(start - first, 0)
    hi = tl.minimum(stop - first, n)
    begin = tile * (L.rows * L.run)
    plain = plain & L.aligned & (begin >= lo) & (begin + L.rows * L.run <= hi)
    if plain:
        total = _decode_tile(t, status_ptr, out_ptr, to, lo, hi, F, L, UNPACK, False)
    else:
        total = _decode_tile(t, status_ptr, out_ptr, to, lo, hi, F, L, UNPACK, True)
    if L.sums:
        tl.atomic_add(sums_ptr + chunk, total.to(tl.int64, bitcast=True), sem="relaxed")


@triton.jit
def _add_terms(
    v,
    sources_ptr,
    first,
    last,
    t,
    static_at,
    stride,
    stats_ptr,
    F: tl.constexpr,
    L: tl.constexpr,
    UNPACK: tl.constexpr,
    SCALE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add buffers number `first` to `last` - 1 to columns of values."""
    COUNT: tl.constexpr = L.run
    for number in range(first, last):
        src_ptr, sums_ptr, status_ptr = place_of(sources_ptr, number)
        static_ptr = src_ptr + (static_at + t.chunk * stride) * 128
        scale, usual = SCALE(stats_ptr, static_ptr, t.at, F, False)
        s = Tile(t.chunk, t.tile, t.n, t.first, t.nelem, static_ptr, t.at, scale)
        if MASKED:
            y, wrong, terms = UNPACK(s, t.n * 0, t.n, F, L, True)
        else:
            if usual:
                y, wrong, terms = UNPACK(s, t.n * 0, t.n, F, L, False)
            else:
                y, wrong, terms = UNPACK(s, t.n * 0, t.n, F, L, True)
        if F.checked:
            report_any(status_ptr, CHUNK + (t.chunk << 8) + CHUNK_PAYLOAD, wrong)
        total = ()
        for k in tl.static_range(0, COUNT, 2):
            a, b = rounded_pair(y[k], y[k + 1], L.exponent, L.item, F.limited, L.cvt)
            total = total + (v[k] + a, v[k + 1] + b)
        v = total
        if L.sums:
            tl.atomic_add(sums_ptr + t.chunk, terms.to(tl.int64, bitcast=True), sem="relaxed")
    return v


@triton.jit
def _sum_tile(
    x_ptr,
    out_ptr,
    sources_ptr,
    t,
    s,
    static_at,
    stride,
    count,
    place,
    factor,
    draw,
    stats_ptr,
    F: tl.constexpr,
    L: tl.constexpr,
    PACK: tl.constexpr,
    UNPACK: tl.constexpr,
    SCALE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Sum up a tile, and store it, or encode it; gives the checksum terms."""
    COUNT: tl.constexpr = L.run
    ROWS: tl.constexpr = L.rows
    v = ()
    for _ in tl.static_range(COUNT):
        # Nothing changes when it is added to a negative zero.
        v = v + (tl.full([ROWS], -0.0, tl.float32),)
    # fmt: off
    v = _add_terms(
        v, sources_ptr, place * 0, place, t, static_at, stride, stats_ptr, F, L, UNPACK, SCALE,
        MASKED,
    )
    if L.x_item > 0:
        local = _load(x_ptr, t, L, False, MASKED)
        total = ()
        for k in tl.static_range(COUNT):
            total = total + (v[k] + local[k],)
        v = total
    v = _add_terms(
        v, sources_ptr, place, count, t, static_at, stride, stats_ptr, F, L, UNPACK, SCALE, MASKED,
    )
    # fmt: on
    if L.scaled:
        scaled = ()
        for k in tl.static_range(COUNT):
            scaled = scaled + (v[k] * factor,)
        v = scaled
    terms = tl.zeros([], tl.uint64)
    if L.out_item > 0:
        begin = t.tile * (L.rows * L.run)
        words = element_words(v, None, L.exponent, L.out_item, L.cvt, False)
        if MASKED:
            i = begin + lanes(L.rows)[:, None] * L.run + tl.arange(0, L.run)[None, :]
            store_elements(out_ptr, t.first + i, words, i < t.n, L.rows, L.out_item)
        else:
            store_runs(out_ptr + (t.first + begin) * L.out_item, words, L.rows, L.staged)
    else:
        WORDS: tl.constexpr = F.pairs and L.cvt and (L.item == 2) and (MASKED == 0)
        if WORDS:
            v = element_words(v, None, L.exponent, L.item, L.cvt, False)
        else:
            rounded = ()
            for k in tl.static_range(0, COUNT, 2):
                a, b = rounded_pair(v[k], v[k + 1], L.exponent, L.item, False, L.cvt)
                if MASKED:
                    at = (t.tile * L.rows + lanes(L.rows)) * L.run + k
                    a, b = tl.where(at < t.n, a, 0.0), tl.where(at + 1 < t.n, b, 0.0)
                rounded = rounded + (a, b)
            v = rounded
        terms = PACK(v, t, s, draw, stats_ptr, F, L, MASKED)
    return terms


@kernel
def sum_kernel(
    x_ptr,
    out_ptr,
    record_ptr,
    sources_ptr,
    key_ptr,
    stats_ptr,
    nelem: tl.int64,
    chunk_nelem: tl.int64,
    tiles: tl.int32,
    static_at: tl.int64,
    stride: tl.int64,
    at: tl.int64,
    count: tl.int32,
    place: tl.int32,
    factor: tl.float32,
    seed: tl.uint64,
    step: tl.uint64,
    rank: tl.uint64,
    F: tl.constexpr,
    L: tl.constexpr,
    PACK: tl.constexpr,
    UNPACK: tl.constexpr,
    SCALE: tl.constexpr,
):
    """The sum of one tile of `count` buffers of a plan, and before number `place` of a tensor.

    See codecs/common/sums.py. It is stored at `out_ptr`, or encoded: then that is the first static
    part, and `record_ptr` is the first record.
    """
    pid = tl.program_id(0)
    chunk = (pid // tiles).to(tl.int64)
    tile = (pid % tiles).to(tl.int64)
    first = chunk * chunk_nelem
    if L.aligned:
        first = tl.multiple_of(first, 16)
    n = tl.maximum(tl.minimum(chunk_nelem, nelem - first), 0)
    if L.random == _KEY_ON_DEVICE:
        seed = tl.load(key_ptr).to(tl.uint64, bitcast=True)
        step = tl.load(key_ptr + 1).to(tl.uint64, bitcast=True)
    draw = (seed, step, rank)
    src_ptr, _, _ = place_of(sources_ptr, 0)
    source_ptr = src_ptr + (static_at + chunk * stride) * 128
    plain = L.aligned & ((tile + 1) * (L.rows * L.run) <= n)
    static_ptr = source_ptr
    scale = 1.0
    if L.out_item == 0:
        static_ptr = out_ptr + chunk * stride * 128
        scale, usual = SCALE(stats_ptr, static_ptr, at, F, True)
        plain = plain & usual
    t = Tile(chunk, tile, n, first, nelem, static_ptr, at, scale)
    s = Tile(chunk, tile, n, first, nelem, source_ptr, at, scale)
    # fmt: off
    if plain:
        terms = _sum_tile(
            x_ptr, out_ptr, sources_ptr, t, s, static_at, stride, count, place, factor, draw,
            stats_ptr, F, L, PACK, UNPACK, SCALE, False,
        )
    else:
        terms = _sum_tile(
            x_ptr, out_ptr, sources_ptr, t, s, static_at, stride, count, place, factor, draw,
            stats_ptr, F, L, PACK, UNPACK, SCALE, True,
        )
    # fmt: on
    if L.sums and (L.out_item == 0):
        record = record_ptr.to(tl.pointer_type(tl.int64)) + chunk * 4
        tl.atomic_add(record, terms.to(tl.int64, bitcast=True), sem="relaxed")
