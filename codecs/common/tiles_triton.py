# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment,misc"
"""The kernels of codecs that code tile by tile: encode and decode. Sums: sums_triton.

A format is two device functions, and what they have to know:

- PACK(v, t, s, draw, stats_ptr, F, L, MASKED) encodes a tile, and returns the checksum terms of the
  words that it wrote;
- UNPACK(t, lo, hi, F, L, MASKED) returns (float32 values, which threads found a code that is wrong
  among elements `lo` to `hi` of the chunk, checksum terms);
- LOAD(t, F, L, MASKED), which a format may have, returns all that UNPACK loads, as a tuple: sums
  load several tiles before they decode one;
- SCALE(stats_ptr, static_ptr, at, F, CHOOSE) returns (what all tiles of a chunk share, a number or
  a pointer; whether the fast forms of the other two may be taken with it).

Values are columns: a tuple of `run` tensors, each with one value of every thread's run of
neighbouring elements. Where the device converts pairs of 16-bit floats, PACK gets those of a whole
tile as columns of words of two elements if the format takes them (`pairs`). F is the format, a
frozen dataclass of whatever the functions need; L is a `Launch`; `t` and `s` are `Tile`s.
Everything else is here: geometry, masks, selections, checksums, reports. Terms are a number, or
numbers of threads, which are added up here.

A format may have a step before the launch, `Driver.prepare`. What it leaves is at SCALE's
`stats_ptr`, and what it leaves of a chunk at the `work` of its `Tile`. The functions of a format
that takes long to compile are there once for all tiles, as MASKED (`Format.once`). A format of
slots (`Format.apart`) is one of those, and has columns of slots_triton.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import triton
import triton.language as tl

from .frame_triton import CHUNK, CHUNK_PAYLOAD, float_of
from .launch_triton import kernel
from .philox_triton import KEY_ON_DEVICE, NO_KEY
from .runs_triton import (
    add_elements,
    column_bits,
    element_words,
    lanes,
    load_elements,
    load_words,
    report_any,
    store_columns,
    store_elements,
    store_runs,
    sum_pairs,
    sum_runs,
    word_values,
)
from .slots_triton import add_slots, load_slots, slots_before, store_slots

_KEY_ON_DEVICE = tl.constexpr(KEY_ON_DEVICE)
#: What runs may have of elements: columns are halved, and loaded by 16 bytes.
RUNS = (8, 16, 32, 64)
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
        record_ptr: The chunk's record, where one is written.
        number: Number of the buffer: of those of a sum; 1 of one that is added to what is encoded.
        work: What `prepare` left of the chunk: int64 words.
        loaded: What LOAD gave, where it runs; see `Launch`.
    """

    chunk: Any
    tile: Any
    n: Any
    first: Any
    nelem: Any
    static_ptr: Any
    at: Any
    scale: Any
    record_ptr: Any
    number: Any
    work: Any
    loaded: Any


@dataclass(frozen=True)
class Launch:
    """What the kernels know of a call.

    Attributes:
        rows: Runs of a tile.
        run: Elements of a run.
        apart, once: See `Format`; `once` of formats of slots too.
        exponent: Bits of the exponent of the plan's dtype.
        item: Bytes of its elements.
        x_item: Bytes of the elements that are read or added to; 0: decoded ones are stored.
        aligned: Chunks start at multiples of 16 bytes there.
        add: Encode the sum with a buffer.
        summed: Values are sums of several buffers.
        given: Scales are OF_STATS, or OF_SOURCE: of the buffer that is added; 0: they are chosen.
        random: Where the key is.
        sums: Sum up checksum terms.
        store: Decoded elements are wanted.
        out_item: Bytes of the elements that a sum is stored as: 4 is float32; 0: it is encoded.
        scaled: A sum is multiplied by a number.
        staged, together: See `Tiling`.
        loaded: UNPACK finds at `Tile.loaded` what it would load.
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
    apart: int = 0
    summed: bool = False
    once: bool = False
    together: int = 1
    loaded: bool = False

    def __post_init__(self) -> None:
        if self.run not in RUNS:
            raise ValueError(f"run is {self.run}; allowed: {', '.join(map(str, RUNS))}")

    @property
    def columns(self) -> int:
        """Columns of float32 values."""
        return 16 if self.apart else self.run


@dataclass(frozen=True)
class Format:
    """The part of a format that the driver knows; formats add their own.

    Attributes:
        run: Elements of a thread's run.
        limited: Decoded values are brought into the dtype's finite range.
        pairs: PACK takes words of two elements.
        checked: There are codes that are wrong.
        padded: Chunks have rows of elements that are filled up to whole runs, each by itself. What
            SCALE returns is then a pointer to int64: the elements and the runs of a row, and 1
            where nothing lies between the elements of neighbouring runs.
        apart: Elements from a row of a slot to the next; 0: there are runs, not slots.
        loads: PACK loads the elements of a tile by itself where nothing is added to them: instead
            of values it gets a pointer to the tensor's first.
        once: Whole tiles have no forms of PACK and UNPACK of their own.
        exact: Decoded values are those of elements: they need no rounding to be added.
        shared, words, word_nelem: `prepare` leaves `shared` words, and then of each chunk `words`
            and one for every `word_nelem` of its elements; all in all an even number.
    """

    run: int
    limited: bool
    pairs: bool
    checked: bool
    padded: bool = field(default=False, kw_only=True)
    apart: int = field(default=0, kw_only=True)
    loads: bool = field(default=False, kw_only=True)
    once: bool = field(default=False, kw_only=True)
    exact: bool = field(default=False, kw_only=True)
    shared: int = field(default=0, kw_only=True)
    words: int = field(default=0, kw_only=True)
    word_nelem: int = field(default=1, kw_only=True)


@triton.jit
def no_load(t, F: tl.constexpr, L: tl.constexpr, MASKED: tl.constexpr):
    """LOAD of formats without one."""
    return (t.tile,)


@triton.jit
def no_scale(stats_ptr, static_ptr, at, F: tl.constexpr, CHOOSE: tl.constexpr):
    """SCALE of formats without one."""
    return 1.0, True


@triton.jit
def work_at(number, chunk_nelem, SHARED: tl.constexpr, WORDS: tl.constexpr, NELEM: tl.constexpr):
    """Where the words are that `prepare` leaves of chunk `number` of all; see `Format`."""
    words = WORDS + (chunk_nelem + (NELEM - 1)) // NELEM
    return SHARED + number * (words + words % 2)


@triton.jit
def work_of(work_ptr, number, chunk, chunks, chunk_nelem, F: tl.constexpr):
    """What `prepare` left of a chunk of buffer `number` of those at `work_ptr`."""
    if F.words == 0:
        return work_ptr
    else:
        number = number * chunks + chunk
        return work_ptr + work_at(number, chunk_nelem, F.shared, F.words, F.word_nelem)


@triton.jit
def elements_left(t, L: tl.constexpr):
    """Elements of a tile before the chunk's end, int32."""
    here = t.n - t.tile * (L.rows * L.run)
    return tl.maximum(tl.minimum(here, L.rows * L.run), 0).to(tl.int32)


@triton.jit
def tile_at(static_ptr, chunk, tile, nelem, chunk_nelem, stride, at, ALIGNED: tl.constexpr):
    """A tile of a tensor in chunks, by its numbers; `static_ptr` is the first static part."""
    first = chunk * chunk_nelem
    if ALIGNED:
        first = tl.multiple_of(first, 16)
    n = tl.maximum(tl.minimum(chunk_nelem, nelem - first), 0)
    static_ptr += chunk * stride * 128
    return Tile(chunk, tile, n, first, nelem, static_ptr, at, 1.0, static_ptr, 0, static_ptr, 0)


@triton.jit
def with_scale(t, scale):
    """A tile with what SCALE returned."""
    # fmt: off
    return Tile(
        t.chunk, t.tile, t.n, t.first, t.nelem, t.static_ptr, t.at, scale, t.record_ptr, t.number,
        t.work, t.loaded,
    )
    # fmt: on


@triton.jit
def recorded(t, record_ptr):
    """A tile with the place of its chunk's record, a pointer to bytes."""
    record_ptr = record_ptr.to(tl.pointer_type(tl.int64))
    # fmt: off
    return Tile(
        t.chunk, t.tile, t.n, t.first, t.nelem, t.static_ptr, t.at, t.scale, record_ptr, t.number,
        t.work, t.loaded,
    )
    # fmt: on


@triton.jit
def numbered(t, number, work_ptr, chunks, chunk_nelem, F: tl.constexpr):
    """A tile of buffer `number` of those whose `chunks` chunks `prepare` left words of."""
    work = work_of(work_ptr, number, t.chunk, chunks, chunk_nelem, F)
    # fmt: off
    return Tile(
        t.chunk, t.tile, t.n, t.first, t.nelem, t.static_ptr, t.at, t.scale, t.record_ptr, number,
        work, t.loaded,
    )
    # fmt: on


@triton.jit
def draw_of(key_ptr, seed, step, rank, L: tl.constexpr):
    """The key of a launch: (seed, step, rank)."""
    if L.random == _KEY_ON_DEVICE:
        seed = tl.load(key_ptr).to(tl.uint64, bitcast=True)
        step = tl.load(key_ptr + 1).to(tl.uint64, bitcast=True)
    return seed, step, rank


@triton.jit
def count_before(end, begin, SIZE: tl.constexpr):
    """How many of SIZE elements from `begin` on are before `end`, int32."""
    return tl.minimum(tl.maximum(end - begin, 0), SIZE).to(tl.int32)


@triton.jit
def place_runs(t, F: tl.constexpr, L: tl.constexpr):
    """Where in the chunk the elements of a tile's runs begin, and behind which there are none."""
    run = t.tile * L.rows + lanes(L.rows)
    if F.padded:
        size, runs = tl.load(t.scale), tl.load(t.scale + 1)
        row = run // runs
        begin = row * size + (run - row * runs) * L.run
        return begin, tl.minimum((row + 1) * size, t.n)
    else:
        return run * L.run, t.n


@triton.jit
def is_dense(scale, F: tl.constexpr):
    """Whether the elements of a tile are neighbours."""
    if F.padded:
        return tl.load(scale + 2) != 0
    else:
        return True


@triton.jit
def load_tile(
    x_ptr,
    t,
    plain,
    F: tl.constexpr,
    L: tl.constexpr,
    WORDS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Values of a tile's elements, 0 where there are none; or WORDS of two of them."""
    begin = t.tile * (L.rows * L.run)
    x = x_ptr + (t.first + begin) * L.x_item
    if L.apart > 0:
        left = elements_left(t, L)
        if plain:
            v = load_slots(x, 0, left, 8, L, WORDS, False)
        else:
            v = load_slots(x, 0, left, 8, L, WORDS, True)
    elif MASKED == 0:
        v = _load_whole(x, L, WORDS)
    elif L.once:
        if plain:
            v = _load_whole(x, L, WORDS)
        else:
            v = _load_elements(x_ptr, t, F, L, WORDS)
    else:
        v = _load_elements(x_ptr, t, F, L, WORDS)
    return v


@triton.jit
def _load_whole(x, L: tl.constexpr, WORDS: tl.constexpr):
    """`load_tile` of whole runs from `x` on, a multiple of 16."""
    words = load_words(x, None, L.rows, L.x_item, L.run)
    if WORDS:
        return words
    else:
        return word_values(words, L.exponent, L.x_item)


@triton.jit
def _load_elements(x_ptr, t, F: tl.constexpr, L: tl.constexpr, WORDS: tl.constexpr):
    """`load_tile` of elements anywhere."""
    RUN: tl.constexpr = L.run
    if F.padded:
        at, end = place_runs(t, F, L)
        bits = column_bits(x_ptr, t.first + at, end - at, L.x_item, RUN)
    else:
        x = x_ptr + (t.first + t.tile * (L.rows * RUN)) * L.x_item
        i = lanes(L.rows)[:, None] * RUN + tl.arange(0, RUN)[None, :]
        bits = load_elements(x, i, i < elements_left(t, L), L.rows, L.x_item, RUN)
    columns = ()
    if WORDS:
        for k in tl.static_range(0, RUN, 2):
            columns = columns + (bits[k] | (bits[k + 1] << 16),)
    else:
        for k in tl.static_range(RUN):
            columns = columns + (float_of(bits[k], L.exponent, L.x_item),)
    return columns


@triton.jit
def only_inside(v, t, F: tl.constexpr, L: tl.constexpr):
    """Values, or words, of a tile's elements, 0 where there are none."""
    used = ()
    RUN: tl.constexpr = L.run
    if F.padded:
        begin, end = place_runs(t, F, L)
    else:
        begin, end = lanes(L.rows) * RUN, elements_left(t, L)
    if len(v) == RUN:
        for k in tl.static_range(RUN):
            used = used + (tl.where(begin + k < end, v[k], 0.0),)
    else:
        for k in tl.static_range(RUN // 2):
            low = tl.where(begin + 2 * k < end, v[k], 0)
            used = used + (tl.where(begin + 2 * k + 1 < end, low, low & 0xFFFF),)
    return used


@triton.jit
def terms_of(terms):
    """Checksum terms as a number."""
    if len(terms.shape) > 0:
        terms = tl.sum(terms, 0)
    return terms


@triton.jit
def _coded_tile(
    x_ptr,
    t,
    s,
    plain,
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
    SLOTS: tl.constexpr = L.apart > 0
    PAIRS: tl.constexpr = L.cvt and (L.x_item == 2) and (MASKED == 0 or L.once)
    WORDS: tl.constexpr = PAIRS and (L.add or F.pairs)
    ITSELF: tl.constexpr = F.loads and (not L.add)
    if ITSELF:
        v = x_ptr
    elif MASKED == 0 or SLOTS:
        v = load_tile(x_ptr, t, plain, F, L, WORDS, MASKED)
    added = tl.zeros([], tl.uint64)
    if L.add:
        y, wrong, added = UNPACK(s, t.n * 0, t.n, G, L, MASKED)
        if G.checked:
            report_any(status_ptr, CHUNK + (t.chunk << 8) + CHUNK_PAYLOAD, wrong)
    if MASKED and (not SLOTS) and (not ITSELF):
        # Not before: both take many registers.
        v = load_tile(x_ptr, t, plain, F, L, WORDS, True)
    if L.add:
        if WORDS:
            v = sum_pairs(y, v, L.exponent, G.limited)
        else:
            v = sum_runs(y, v, L.exponent, L.item, L.cvt, G.limited)
        if L.once:
            if plain:
                used = v
            elif SLOTS:
                used = slots_before(v, elements_left(t, L), L.rows, L.apart)
            else:
                used = only_inside(v, t, F, L)
            v = used
        elif MASKED:
            v = only_inside(v, t, F, L)
    if WORDS and (not F.pairs) and (not ITSELF):
        v = word_values(v, L.exponent, 2)
    total = PACK(v, t, s, draw, stats_ptr, F, L, MASKED)
    return terms_of(total), terms_of(added)


@triton.jit
def encode_tile(
    x_ptr,
    t,
    s,
    status_ptr,
    draw,
    stats_ptr,
    aligned,
    F: tl.constexpr,
    G: tl.constexpr,
    L: tl.constexpr,
    PACK: tl.constexpr,
    UNPACK: tl.constexpr,
    SCALE: tl.constexpr,
):
    """Encode tile `t`, or its sum with `s` of a buffer of format G; gives checksum terms of both.

    Whole tiles are loaded by 16 bytes if they are `aligned`.
    """
    scale, plain = SCALE(stats_ptr, t.static_ptr, t.at, F, True)
    t = with_scale(t, scale)
    if L.add:
        scale, usual = SCALE(stats_ptr, s.static_ptr, s.at, G, False)
        plain = plain & usual
        s = with_scale(s, scale)
    else:
        s = t
    plain = plain & is_dense(t.scale, F) & L.aligned & aligned
    plain = plain & ((t.tile + 1) * (L.rows * L.run) <= t.n)
    # fmt: off
    if L.once:
        total, added = _coded_tile(
            x_ptr, t, s, plain, draw, stats_ptr, status_ptr, F, G, L, PACK, UNPACK, True
        )
    elif plain:
        total, added = _coded_tile(
            x_ptr, t, s, plain, draw, stats_ptr, status_ptr, F, G, L, PACK, UNPACK, False
        )
    else:
        total, added = _coded_tile(
            x_ptr, t, s, plain, draw, stats_ptr, status_ptr, F, G, L, PACK, UNPACK, True
        )
    # fmt: on
    return total, added


@triton.jit
def add_terms(words_ptr, total):
    """Add checksum terms up at a record's first word, or a buffer's."""
    words_ptr = words_ptr.to(tl.pointer_type(tl.int64))
    tl.atomic_add(words_ptr, total.to(tl.int64, bitcast=True), sem="relaxed")


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

    `out_ptr` and `src_ptr` are the first static parts, `record_ptr` is the first record. What
    `prepare` left is at `stats_ptr`: of `out_ptr`, then of `src_ptr`.
    """
    pid = tl.program_id(0)
    chunk = (pid // tiles).to(tl.int64)
    tile = (pid % tiles).to(tl.int64)
    t = tile_at(out_ptr, chunk, tile, nelem, chunk_nelem, stride, at, L.aligned)
    t = recorded(t, record_ptr + chunk * 32)
    chunks = tl.num_programs(0) // tiles
    t = numbered(t, 0, stats_ptr, chunks, chunk_nelem, F)
    s = t
    if L.add:
        s = tile_at(src_ptr, chunk, tile, nelem, chunk_nelem, source_stride, source_at, L.aligned)
        s = numbered(s, 1, stats_ptr, chunks, chunk_nelem, G)
    draw = draw_of(key_ptr, seed, step, rank, L)
    # fmt: off
    total, added = encode_tile(
        x_ptr, t, s, status_ptr, draw, stats_ptr, True, F, G, L, PACK, UNPACK, SCALE
    )
    # fmt: on
    if L.sums:
        add_terms(record_ptr + chunk * 32, total)
        if L.add:
            add_terms(sums_ptr + chunk, added)


@triton.jit
def _store(
    out_ptr,
    to,
    y,
    t,
    lo,
    hi,
    ITEM: tl.constexpr,
    ADD: tl.constexpr,
    LIMIT: tl.constexpr,
    F: tl.constexpr,
    L: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Store words of elements of ITEM bytes, or ADD values to such, rounded to the plan's dtype; of
    slots, store values.

    Element i of the chunk goes to `to + i`, with MASKED if it is in [lo, hi).
    """
    begin = t.tile * (L.rows * L.run)
    # fmt: off
    if L.apart > 0:
        out = out_ptr + (to + begin) * ITEM
        lo = tl.maximum(lo - begin, 0).to(tl.int32)
        hi = tl.minimum(tl.maximum(hi - begin, 0), L.rows * L.run).to(tl.int32)
        if ADD:
            add_slots(
                out, y, lo, hi, L.rows, L.apart, L.exponent, L.item, ITEM, L.cvt, LIMIT, MASKED
            )
        else:
            # Here, not before: it takes fewer registers.
            words = element_words(y, None, L.exponent, ITEM, L.cvt, LIMIT)
            store_slots(out, words, lo, hi, L.rows, L.apart, ITEM, MASKED)
    elif F.padded and MASKED:
        at, end = place_runs(t, F, L)
        hi = tl.minimum(hi, end) - at
        if ADD:
            # Column by column it would take few registers, and minutes to compile.
            k = tl.arange(0, L.run)[None, :]
            use = (k >= (lo - at)[:, None]) & (k < hi[:, None])
            i = (to + at)[:, None] + k
            add_elements(out_ptr, i, y, use, L.exponent, L.item, ITEM, L.cvt, LIMIT)
        else:
            store_columns(out_ptr, to + at, lo - at, hi, y, ITEM)
    else:
        i = begin + lanes(L.rows)[:, None] * L.run + tl.arange(0, L.run)[None, :]
        use = None
        if MASKED:
            use = (i >= lo) & (i < hi)
        if ADD:
            add_elements(out_ptr, to + i, y, use, L.exponent, L.item, ITEM, L.cvt, LIMIT)
        elif MASKED:
            store_elements(out_ptr, to + i, y, use, L.rows, ITEM)
        else:
            store_runs(out_ptr + (to + begin) * ITEM, y, L.rows, L.staged)
    # fmt: on


@triton.jit
def store_tile(
    out_ptr,
    to,
    y,
    t,
    plain,
    lo,
    hi,
    ITEM: tl.constexpr,
    ADD: tl.constexpr,
    LIMIT: tl.constexpr,
    F: tl.constexpr,
    L: tl.constexpr,
    MASKED: tl.constexpr,
):
    """`_store` of columns of values; of formats with one form by whether the tile is `plain`."""
    if (not ADD) and (L.apart == 0):
        y = element_words(y, None, L.exponent, ITEM, L.cvt, LIMIT)
    if L.once:
        if plain:
            _store(out_ptr, to, y, t, lo, hi, ITEM, ADD, LIMIT, F, L, False)
        else:
            _store(out_ptr, to, y, t, lo, hi, ITEM, ADD, LIMIT, F, L, True)
    else:
        _store(out_ptr, to, y, t, lo, hi, ITEM, ADD, LIMIT, F, L, MASKED)


@triton.jit
def unpack_tile(
    t,
    plain,
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
        ADD: tl.constexpr = L.x_item > 0
        ITEM: tl.constexpr = L.x_item if ADD else L.item
        store_tile(out_ptr, to, y, t, plain, lo, hi, ITEM, ADD, F.limited, F, L, MASKED)
    return terms_of(total)


@triton.jit
def decode_tile(
    t,
    out_ptr,
    status_ptr,
    start,
    stop,
    stats_ptr,
    aligned,
    F: tl.constexpr,
    L: tl.constexpr,
    UNPACK: tl.constexpr,
    SCALE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Decode what lies in tile `t` of elements `start` to `stop` of the tensor; gives its checksum
    terms. Whole tiles are stored by 16 bytes if they are `aligned`.
    """
    scale, plain = SCALE(stats_ptr, t.static_ptr, t.at, F, False)
    t = with_scale(t, scale)
    to = t.first - start
    if L.aligned:
        to = tl.multiple_of(to, 16)
    lo = tl.maximum(start - t.first, 0)
    hi = tl.minimum(stop - t.first, t.n)
    begin = t.tile * (L.rows * L.run)
    plain = plain & is_dense(scale, F) & L.aligned & aligned
    plain = plain & (begin >= lo) & (begin + L.rows * L.run <= hi)
    if L.once:
        total = TILE(t, plain, status_ptr, out_ptr, to, lo, hi, F, L, UNPACK, True)
    elif plain:
        total = TILE(t, plain, status_ptr, out_ptr, to, lo, hi, F, L, UNPACK, False)
    else:
        total = TILE(t, plain, status_ptr, out_ptr, to, lo, hi, F, L, UNPACK, True)
    return total


@kernel
def decode_kernel(
    src_ptr,
    out_ptr,
    sums_ptr,
    status_ptr,
    stats_ptr,
    start: tl.int64,
    stop: tl.int64,
    first_chunk: tl.int64,
    first_tile: tl.int32,
    nelem: tl.int64,
    chunk_nelem: tl.int64,
    tiles: tl.int32,
    stride: tl.int64,
    at: tl.int64,
    F: tl.constexpr,
    L: tl.constexpr,
    UNPACK: tl.constexpr,
    SCALE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Elements `start` to `stop` of the tensor as far as they lie in one tile of one chunk.

    `src_ptr` is the first static part, the first program's is tile `first_tile` of `first_chunk`.
    """
    pid = first_tile + tl.program_id(0)
    chunk = (first_chunk + pid // tiles).to(tl.int64)
    tile = (pid % tiles).to(tl.int64)
    t = tile_at(src_ptr, chunk, tile, nelem, chunk_nelem, stride, at, False)
    t = numbered(t, 0, stats_ptr, 0, chunk_nelem, F)
    # fmt: off
    total = decode_tile(
        t, out_ptr, status_ptr, start, stop, stats_ptr, True, F, L, UNPACK, SCALE, TILE
    )
    # fmt: on
    if L.sums:
        add_terms(sums_ptr + chunk, total)
