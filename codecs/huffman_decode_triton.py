# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment,misc"
"""How a group of tiles of huffman is decoded on a GPU. specs/huffman.md.

`L` is the `Launch` of huffman_triton.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common.huffman import WORK_NBYTES
from .common.huffman_decode_triton import (
    EDGE_WORDS,
    LANES,
    TILES,
    WORDS,
    any_between,
    any_of_tile,
    close_runs,
    interleaved,
    next_words,
    of_lanes,
    of_tiles,
    one_of_tile,
    open_block,
    open_runs,
)
from .common.huffman_tables_triton import (
    TABLE_NBYTES,
    check_table,
    fill_table,
    wide,
    words_at,
)
from .common.huffman_triton import CONSTANT, NARROW, RUN, RUNS, STORED, TILE, padded
from .huffman import STEP

_STEP = tl.constexpr(STEP)
#: Work memory of a plane of a group, in bytes: a decoder's entries, if not in shared memory.
_PLANE_NBYTES = tl.constexpr(WORK_NBYTES)
#: Tiles have fewer bytes.
_LARGE = tl.constexpr(1 << 20)


@triton.jit
def _placed(byte, k, L: tl.constexpr):
    """What byte `k` of a rotated element is in the element."""
    v = wide(byte, L.item) << (k * 8)
    if L.rotated:
        v = (v >> 1) | ((v & 1) << (8 * L.item - 1))
    return v


@triton.jit
def _fours_of(p0, p1, p2, p3, W: tl.constexpr, L: tl.constexpr):
    """Words of a byte each of four planes."""
    a, b = interleaved(p0, p1, L.ptx)
    c, d = interleaved(p2, p3, L.ptx)
    first, second = (a & 0xFFFF) | (c << 16), (a >> 16) | (c & 0xFFFF0000)
    third, fourth = (b & 0xFFFF) | (d << 16), (b >> 16) | (d & 0xFFFF0000)
    v = tl.join(tl.join(first, third), tl.join(second, fourth))
    return tl.reshape(v, [TILES, RUNS, 4 * W])


@triton.jit
def _elements_of(p, fixed, W: tl.constexpr, L: tl.constexpr):
    """Elements as words, of words of each plane, and of what their other bits are in each tile."""
    ITEM: tl.constexpr = L.item
    fixed = fixed[:, None, None]
    if ITEM == 1:
        v = p[0]
        if L.rotated:
            v = ((v >> 1) & 0x7F7F7F7F) | ((v << 7) & 0x80808080)
        return v | (fixed * 0x01010101)
    elif ITEM == 2:
        a, b = interleaved(p[0], p[1], L.ptx)
        v = tl.reshape(tl.join(a, b), [TILES, RUNS, 2 * W])
        if L.rotated:
            v = ((v >> 1) & 0x7FFF7FFF) | ((v << 15) & 0x80008000)
        return v | (fixed * 0x00010001)
    else:
        low = _fours_of(p[0], p[1], p[2], p[3], W, L)
        if ITEM == 4:
            if L.rotated:
                low = (low >> 1) | (low << 31)
            return low | fixed
        else:
            high = _fours_of(p[4], p[5], p[6], p[7], W, L)
            if L.rotated:
                low, high = (low >> 1) | (high << 31), (high >> 1) | (low << 31)
            low |= (fixed & 0xFFFFFFFF).to(tl.uint32)
            high |= (fixed >> 32).to(tl.uint32)
            return tl.reshape(tl.join(low, high), [TILES, RUNS, 8 * W])


@triton.jit
def _put(v, out, begin, rows, lo, hi, done, W: tl.constexpr, EDGE: tl.constexpr, L: tl.constexpr):
    """Write the words `v` of elements number `begin` and on of lanes' runs.

    Runs `rows` of a group are written, with EDGE those of their elements from `lo` to `hi`; what is
    in memory from another plane stays if that is `done`.
    """
    ITEM: tl.constexpr = L.item
    COUNT: tl.constexpr = W * ITEM
    t, run = tl.arange(0, TILES)[:, None, None], tl.arange(0, RUNS)[None, :, None]
    if EDGE:
        PER: tl.constexpr = 4 // ITEM if ITEM < 4 else 1
        if ITEM == 8:
            low, high = tl.split(tl.reshape(v, [TILES, RUNS, COUNT // 2, 2]))
            v = low.to(tl.uint64) | (high.to(tl.uint64) << 32)
        elif ITEM < 4:
            shifts = (tl.arange(0, PER) * (8 * ITEM))[None, None, None, :]
            v = tl.reshape(v[:, :, :, None] >> shifts, [TILES, RUNS, COUNT * PER])
        i = t * TILE + run * RUN + (tl.arange(0, 4 * W) + begin)[None, None, :]
        use = rows[:, :, None] & (i >= lo) & (i < hi)
        if done:
            v |= tl.load(out + i, mask=use, other=0).to(v.dtype)
        tl.store(out + i, v.to(out.dtype.element_ty), mask=use)
    else:
        words = out.to(tl.pointer_type(tl.uint32)) + begin // 4 * ITEM
        i = t * (TILE // 4 * ITEM) + run * (RUN // 4 * ITEM) + tl.arange(0, COUNT)[None, None, :]
        use = rows[:, :, None]
        if done:
            v |= tl.load(words + i, mask=use, other=0)
        tl.store(words + i, v, mask=use)


@triton.jit
def _words_at(ptr, begin, m, use, W: tl.constexpr, EDGE: tl.constexpr):
    """The words of a stored plane from byte `begin` of runs on, zeros where not in `use`, and with
    EDGE behind the `m` bytes of a tile. Behind runs their first words are taken.
    """
    at, c = tl.arange(0, RUNS) * RUN, tl.arange(0, W)
    words = ptr.to(tl.pointer_type(tl.uint32))[:, None, None]
    there = use[:, :, None]
    if EDGE:
        place = at[:, None] + (4 * c + begin)[None, :]
        there = there & (place[None, :, :] < m[:, None, None])
        there = there & (4 * c + begin < RUN)[None, None, :]
    # No line of them is needed again: lines of codes are to stay.
    return tl.load(
        words + (begin % RUN // 4 + at[:, None] // 4 + c[None, :])[None, :, :],
        mask=there,
        other=0,
        cache_modifier=".cg",
    )


@triton.jit
def _others_of(tile, plane, coded, done, L: tl.constexpr):
    """(where the planes but number `plane` are, and of which rows they are read) of each: of such
    as are coded or, with a plane before, `done`, of none.
    """
    stored_ptr, m, rows, _, _, _ = tile
    found = ()
    nbytes = padded(m, _STEP)
    at = nbytes * 0
    for j in tl.static_range(L.item - 1):
        # Plane j, or behind number `plane` the one after it.
        behind = at + (1 - ((coded >> j) & 1)) * nbytes
        k = tl.where(plane <= j, j + 1, j)
        here = ((coded >> k) & 1) + done == 0
        use = rows & (tl.arange(0, RUNS)[None, :] >= tl.where(here, 0, RUNS))
        found = found + ((stored_ptr + tl.where(plane <= j, behind, at), use),)
        at = behind
    return found


@triton.jit
def _others_at(others, nbytes, begin, W: tl.constexpr, EDGE: tl.constexpr):
    """Their words from byte `begin` of runs on, zeros of those that are not read."""
    found = ()
    for j in tl.static_range(len(others)):
        source, use = others[j]
        found = found + (_words_at(source, begin, nbytes, use, W, EDGE),)
    return found


@triton.jit
def _decode_planes(
    tile, out, plane, source, s, ring, words, last, use, fixed, done, coded, table, table_ptr,
    MODE: tl.constexpr, UNIT: tl.constexpr, EDGE: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """Put plane number `plane` into elements, and if none is `done` those that are not coded.

    Where `use` says that a tile's are of that MODE, the bytes are runs of codes, or stored from
    `source` on; else they are zero. `fixed` is what other planes are. Gives the state behind runs.
    """
    _, m, rows, lo, hi, stop = tile
    ITEM: tl.constexpr = L.item
    # Wider elements change lanes in more shared memory, of which rings leave little.
    LESS: tl.constexpr = 2 if ITEM == 8 else 1
    W: tl.constexpr = (EDGE_WORDS if EDGE else WORDS) // LESS
    run = tl.arange(0, LANES) % RUNS
    count = tl.minimum(tl.maximum(of_lanes(m) - run * RUN, 0), RUN)
    if L.store:
        nbytes = padded(m, _STEP)
        places = _others_of(tile, plane, coded, done, L)
        others = _others_at(places, nbytes, stop * 0, W, EDGE)
    for number in range(0, stop, 4 * W):
        # What the interpreter counts with is no tensor.
        begin = stop * 0 + number
        if MODE == STORED:
            found = _words_at(source, begin, m, of_tiles(use), W, EDGE)
        else:
            found, s = next_words(
                s, ring, words, last, begin, count, use, table, table_ptr, W, UNIT, EDGE, L.ptx
            )
        if L.store:
            # Loaded long before they are needed. That this is behind look-ups also lets Triton keep
            # words where they are loaded, and move those that are decoded there.
            following = _others_at(places, nbytes, begin + 4 * W, W, EDGE)
            merged = (tl.where(plane == 0, found, others[0]) if ITEM > 1 else found,)
            for k in tl.static_range(1, ITEM):
                v = tl.where(plane == k, found, others[k - 1])
                if k < ITEM - 1:
                    v = tl.where(plane > k, others[k], v)
                merged = merged + (v,)
            _put(_elements_of(merged, fixed, W, L), out, begin, rows, lo, hi, done, W, EDGE, L)
            others = following
    return s


@triton.jit
def _decode_runs(
    tile, out, k, data, size, bit, bits, use, fixed, done, coded, memory, table_ptr,
    plane_ptr, UNIT: tl.constexpr, EDGE: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """Decode runs, where `use`, of plane `k`; whether they do not end where they should."""
    table = memory
    if not L.ptx:
        table = words_at(plane_ptr, 0)
    # Behind it threads see what others have written of the plane before.
    fill_table(table_ptr, table, UNIT, L.ptx)
    s, ring, words, last = open_runs(data, bit, size, use, memory, UNIT, L.ptx)
    first = s[3]
    # fmt: off
    s = _decode_planes(
        tile, out, k, 0, s, ring, words, last, use, fixed, done, coded, table, table_ptr,
        NARROW, UNIT, EDGE, L,
    )
    # fmt: on
    close_runs(ring, L.ptx)
    return any_of_tile(use & (s[3] - first != bits))


@triton.jit
def _any(found):
    """Whether a lane, or tile, has found something."""
    return tl.max(found.to(tl.int32), 0) > 0


@triton.jit
def _decode_tiles(
    dynamic_ptr, data_at, at, size, n, lo, hi, coded, tables_ptr, work_ptr, out, good, memory,
    EDGE: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """Decode elements `lo` to `hi` of a group of `n`, of the tiles that are `good`.

    These have `size` bytes from `data_at` of the payload on, of which the first `at` are tables.
    Gives the tiles that are good after all.
    """
    ITEM: tl.constexpr = L.item
    run = tl.arange(0, LANES) % RUNS
    first = tl.arange(0, LANES) // RUNS * TILE
    m = tl.minimum(tl.maximum(n - first, 0), TILE)
    data = dynamic_ptr + data_at // _STEP * _STEP
    stored_at = one_of_tile(data_at + at)
    for k in range(ITEM):
        if ((coded >> k) & 1) == 0:
            end = at + padded(m, _STEP)
            good = good & (end <= size)
            good = good & (any_between(data, at + m, end, good) == 0)
            at = end
    first += run * RUN
    rows = (first < hi) & (first + RUN > lo)
    of_tile = tl.minimum(tl.maximum(n - tl.arange(0, TILES) * TILE, 0), TILE)
    fixed = wide(of_tile * 0, ITEM)
    n_coded, done = coded * 0, coded * 0
    for k in range(ITEM + 1):
        stored_ptr = dynamic_ptr + stored_at // _STEP * _STEP
        is_coded = ((coded >> k) & 1) != 0
        if is_coded:
            table_ptr = tables_ptr + n_coded * TABLE_NBYTES
            n_coded += 1
            _, _, bad = check_table(table_ptr)
            good = good & (m * 0 + bad == 0)
            mode, value, bit, ends, end, bad = open_block(data, at, size, m, good)
            good = good & (bad == 0)
            value = tl.where(good & (mode == CONSTANT), value, 0)
            fixed |= _placed(one_of_tile(value), k, L)
            use = good & (mode >= NARROW) & (run * RUN < m)
            source_at = one_of_tile(data_at + at + 4)
            stored = good & (mode == STORED)
            at = end
            if _any(use):
                bits = ends - bit
                plane_ptr = work_ptr + k * _PLANE_NBYTES
                plane = coded * 0 + k
                tile = stored_ptr, of_tile, of_tiles(rows & good), lo, hi, tl.minimum(n, RUN)
                # fmt: off
                if L.cut >= ITEM:
                    bad = _decode_runs(
                        tile, out, plane, data, size, bit, bits, use, fixed, done, coded,
                        memory, table_ptr, plane_ptr, L.low, EDGE, L,
                    )
                else:
                    if k < L.cut:
                        bad = _decode_runs(
                            tile, out, plane, data, size, bit, bits, use, fixed, done, coded,
                            memory, table_ptr, plane_ptr, L.low, EDGE, L,
                        )
                    else:
                        bad = _decode_runs(
                            tile, out, plane, data, size, bit, bits, use, fixed, done, coded,
                            memory, table_ptr, plane_ptr, L.high, EDGE, L,
                        )
                # fmt: on
                good = good & (bad == 0)
                fixed = fixed * 0
                done = done * 0 + 1
        else:
            # At the end planes that are not coded may be left, the first of them with the others.
            left = (k == ITEM) & ((done == 0) | _any(fixed != 0))
            source_at = stored_at
            stored = good & (first * 0 + left != 0) & (first * 0 + (coded & 1) + done == 0)
        left = (k == ITEM) & ((done == 0) | _any(fixed != 0))
        if L.store:
            if _any(stored) | left:
                tile = stored_ptr, of_tile, of_tiles(rows & good), lo, hi, tl.minimum(n, RUN)
                source = dynamic_ptr + source_at // 4 * 4
                plane = (1 - left.to(tl.int32)) * k
                s = (run, run, run, run, run)
                tl.debug_barrier()
                # fmt: off
                _decode_planes(
                    tile, out, plane, source, s, 0, 0, 0, stored, fixed, done, coded, 0, 0,
                    STORED, 1, EDGE, L,
                )
                # fmt: on
                fixed = fixed * 0
                done = done * 0 + 1
    good = good & (padded(at, _STEP) == size)
    return good & (any_between(data, at, size, good) == 0)


@triton.jit(noinline=True)
def decode_group(
    static_ptr, dynamic_ptr, of_chunk, nbytes, group, n, lo, hi, work_ptr, out, memory,
    EDGE: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """Decode elements `lo` to `hi` of a group of `n`, from a chunk with so many tiles and bytes of
    payload; whether what they are read from is wrong.
    """
    limit = nbytes - _STEP
    offsets = static_ptr.to(tl.pointer_type(tl.uint32)) + group * TILES
    coded = tl.load(static_ptr + 4 * of_chunk + group).to(tl.int32)
    tables = coded * 0
    for k in range(L.item):
        tables += ((coded >> k) & 1) * TABLE_NBYTES
    tables_at = tl.load(offsets).to(tl.int64) * _STEP
    right = (nbytes % _STEP == 0) & (tables_at + tables <= limit) & ((coded >> L.item) == 0)
    bad = right == 0
    if right:
        guard = tl.load((dynamic_ptr + limit).to(tl.pointer_type(tl.int64)))
        # Tiles, as every lane of theirs knows them.
        t = tl.arange(0, LANES) // RUNS
        m = tl.minimum(tl.maximum(n - t * TILE, 0), TILE)
        used = (t * TILE < hi) & (t * TILE + m > lo)
        at = tl.load(offsets + t, mask=used, other=0).to(tl.int64) * _STEP
        more = group * TILES + t + 1 < of_chunk
        end = tl.load(offsets + (t + 1), mask=used & more, other=0).to(tl.int64) * _STEP
        end = tl.where(more, end, limit)
        wrong = (at > end) | (end > limit) | (end - at > _LARGE) | (guard + at != at)
        wrong = wrong | ((group + t == 0) & (at != 0))
        size = tl.where(used & (wrong == 0), end - at, 0).to(tl.int32)
        data_at = tl.where(used & (wrong == 0), at, 0)
        behind = tl.where(t == 0, tables, 0)
        good = used & (wrong == 0) & (behind <= size)
        # fmt: off
        good = _decode_tiles(
            dynamic_ptr, data_at, behind, size, n, lo, hi, coded, dynamic_ptr + tables_at,
            work_ptr, out, good, memory, EDGE, L,
        )
        # fmt: on
        bad = _any(used & (good == 0))
    return bad
