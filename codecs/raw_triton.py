# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment,misc"
"""raw on a GPU: one pass that copies and sums, 16 bytes a thread. specs/raw.md.

Elements are copied as they are. Where they are added to others they are floats, as of any codec.
"""

from __future__ import annotations

import functools

import triton
import triton.language as tl

from .common.base import Plan
from .common.driver_triton import Driver, Tiling, functions, many_functions
from .common.frame_triton import weigh, weigh_bytes
from .common.runs_triton import element_words, in_rows, lanes, load_words, word_values
from .common.tiles_triton import Format, elements_left, no_scale, unpack_tile

_RUN = 16
#: Bytes of a tile that is copied.
_NBYTES = 1 << 14
#: Units that are copied at once where that is not a whole tile.
_FEW = tl.constexpr(1024)


@triton.jit
def _units(ptr, UNIT: tl.constexpr):
    """A pointer to bytes as one to units of 1, 2 or 4 bytes."""
    if UNIT == 1:
        return ptr
    elif UNIT == 2:
        return ptr.to(tl.pointer_type(tl.uint16))
    else:
        return ptr.to(tl.pointer_type(tl.uint32))


@triton.jit
def _copy_units(
    source,
    target,
    first,
    k,
    n,
    lo,
    hi,
    L: tl.constexpr,
    N: tl.constexpr,
    UNIT: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Copy N units of UNIT bytes from number `k` of a tile on, of which `n` are there and those
    from `lo` to `hi` are wanted; gives their checksum terms, shape [N]. `first` is the number of
    the tile's first in its chunk.
    """
    i = k + tl.arange(0, N)
    inside, wanted = None, None
    if MASKED:
        inside, wanted = i < n, (i >= lo) & (i < hi)
    v = tl.load(_units(source, UNIT) + i, mask=inside)
    if L.store:
        tl.store(_units(target, UNIT) + i, v, mask=wanted)
    if UNIT == 4:
        terms = weigh(v, first + i)
    else:
        terms = weigh_bytes(v, (first + i) * UNIT)
    if MASKED:
        terms = tl.where(inside, terms, 0)
    return terms


@triton.jit
def _copy_some(source, target, first, n, lo, hi, L: tl.constexpr, UNIT: tl.constexpr):
    """`_copy` of a partial tile, or of one that starts anywhere, little by little: registers are
    few.
    """
    COUNT: tl.constexpr = L.rows * L.run * L.item // UNIT
    terms = tl.zeros([_FEW], tl.uint64)
    for k in range(0, COUNT, _FEW):
        terms += _copy_units(source, target, first, k, n, lo, hi, L, _FEW, UNIT, True)
    return tl.sum(terms, 0)


@triton.jit
def _copy(source, target, t, lo, hi, L: tl.constexpr, MASKED: tl.constexpr):
    """Copy elements `lo` to `hi` of a tile, whose first is at `source` and `target`, pointers to
    bytes; gives the checksum terms of all of them.
    """
    TILE: tl.constexpr = L.rows * L.run
    # Larger elements are several units.
    UNIT: tl.constexpr = L.item if L.item < 4 else 4
    WORDS: tl.constexpr = TILE * L.item // 4
    left = elements_left(t, L)
    words = t.tile * WORDS
    if MASKED:
        PER: tl.constexpr = 4 // UNIT
        EACH: tl.constexpr = L.item // UNIT
        whole = (left == TILE) & (lo <= 0) & (hi >= TILE)
        whole = whole & ((source.to(tl.int64) | target.to(tl.int64)) % 4 == 0)
        if (UNIT < 4) & whole:
            total = _copy_some(source, target, words, left // PER, lo, left // PER, L, 4)
        else:
            n, lo, hi = left * EACH, lo * EACH, hi * EACH
            total = _copy_some(source, target, words * PER, n, lo, hi, L, UNIT)
    else:
        terms = _copy_units(source, target, words, 0, left, lo, hi, L, WORDS, 4, False)
        total = tl.sum(terms, 0)
    return total


@triton.jit
def _terms(words, t, L: tl.constexpr):
    """Checksum terms of the words of a tile's runs."""
    COUNT: tl.constexpr = len(words)
    at = (t.tile * L.rows + lanes(L.rows)) * COUNT
    ROWS: tl.constexpr = L.rows
    terms = tl.zeros([ROWS], tl.uint64)
    for k in tl.static_range(len(words)):
        terms += weigh(words[k], at + k)
    return terms


@triton.jit
def _pack(v, t, s, draw, stats_ptr, F: tl.constexpr, L: tl.constexpr, MASKED: tl.constexpr):
    """Store a tile's elements: those at `v`, or values of a sum."""
    begin = t.tile * (L.rows * L.run)
    target = t.static_ptr + begin * L.item
    if L.add or L.summed:
        words = element_words(v, None, L.exponent, L.item, L.cvt, False)
        COUNT: tl.constexpr = len(words)
        i = lanes(L.rows)[:, None] * COUNT + tl.arange(0, COUNT)[None, :]
        use = None
        if MASKED:
            # Behind the last element values are 0, and so is the padding.
            use = i * 4 < elements_left(t, L) * L.item
        tl.store(target.to(tl.pointer_type(tl.uint32)) + i, in_rows(words), mask=use)
        total = _terms(words, t, L)
    else:
        left = elements_left(t, L)
        source = v + (t.first + begin) * L.item
        total = _copy(source, target, t, left * 0, left, L, MASKED)
    return total


@triton.jit
def _load(t, F: tl.constexpr, L: tl.constexpr, MASKED: tl.constexpr):
    """Words of a tile's runs, 0 behind the end."""
    left = elements_left(t, L)
    source = t.static_ptr + t.tile * (L.rows * L.run * L.item)
    here = None
    if MASKED:
        here = lanes(L.rows) * L.run < left
    loaded = load_words(source, here, L.rows, L.item, L.run)
    words = loaded
    if MASKED:
        words = ()
        PER: tl.constexpr = 4 // L.item
        for k in tl.static_range(len(loaded)):
            # Elements of the word.
            some = left - lanes(L.rows) * L.run - k * PER
            word = tl.where(some > 0, loaded[k], 0)
            if PER == 2:
                word = tl.where(some == 1, word & 0xFFFF, word)
            words = words + (word,)
    return words


@triton.jit
def _unpack(t, lo, hi, F: tl.constexpr, L: tl.constexpr, MASKED: tl.constexpr):
    """Values of a tile's elements. None is wrong."""
    if L.loaded:
        words = t.loaded
    else:
        words = _load(t, F, L, MASKED)
    return word_values(words, L.exponent, L.item), t.tile, _terms(words, t, L)


@triton.jit
def _unpack_tile(
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
    """As `unpack_tile`; elements that are not added are copied."""
    if L.x_item > 0:
        total = unpack_tile(t, plain, status_ptr, out_ptr, to, lo, hi, F, L, UNPACK, MASKED)
    else:
        begin = t.tile * (L.rows * L.run)
        lo = tl.maximum(lo - begin, 0).to(tl.int32)
        hi = tl.minimum(tl.maximum(hi - begin, 0), L.rows * L.run).to(tl.int32)
        source, target = t.static_ptr + begin * L.item, out_ptr + (to + begin) * L.item
        total = _copy(source, target, t, lo, hi, L, MASKED)
    return total


@functools.cache
def _driver(item: int) -> Driver:
    """The kernels for elements of so many bytes."""
    form = Format(run=_RUN, limited=False, pairs=False, checked=False, loads=True, exact=True)
    copies = Tiling(_NBYTES // (_RUN * item), 8)
    adding = Tiling(256, 8)
    return Driver(
        _pack,
        _unpack,
        no_scale,
        form,
        (copies, copies, adding),
        tile=_unpack_tile,
        adding=adding,
        load=_load,
        summing=Tiling(128, 4, registers=112, together=4),
    )


def driver_of(plan: Plan) -> Driver:
    """The kernels of a plan."""
    return _driver(plan.dtype.itemsize)


encode, decode_add_encode, decode = functions(driver_of)
encode_many, decode_many, sum, encode_sum = many_functions(driver_of)
