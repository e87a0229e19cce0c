# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""lhc on the CPU: the peeling of codecs/lhc.py with Numba; the rest is NumPy's."""

from __future__ import annotations

from functools import partial

import numpy as np

from .common.base import Bits, Bytes, Chunk, ChunkResult
from .common.compile_cache import cached
from .common.driver_cpu import Decoder, Encoder, Given, decode_by, encode_by
from .lhc import (
    BLOCK,
    CELL_PROBLEM,
    HASHES,
    INDEX_PROBLEM,
    LANES,
    Lhc,
    Mapping,
    Peeling,
    Words,
    add_up,
    agreed_index,
    check_lacking,
    decode_elements,
    index_ends,
    mapping_of,
    number_dtype,
    occupied,
    part_of,
    put_own,
    rest_is_zero,
    static_views,
)


@cached(nogil=True, error_model="numpy")
def _peel(elements, blocks, offsets, counts, members, own, queue, peeled):
    """Fill `own`; the number of rounds.

    A cell is known by how many elements are in it and the XOR of their places in `elements`. It
    enters `queue` once, when one is left; `peeled` has space for every element.
    """
    for i in range(elements.size):
        b = elements[i] // BLOCK
        for j in range(HASHES):
            c = blocks[b, j] * BLOCK + (elements[i] + offsets[b, j]) % BLOCK
            counts[c] += 1
            members[c] ^= i
        own[i] = -1
    last = 0
    for c in range(counts.size):
        if counts[c] == 1:
            queue[last] = c
            last += 1
    first, done, rounds = 0, 0, 0
    while True:
        gone = done
        for k in range(first, last):
            if counts[queue[k]] == 1:
                i = members[queue[k]]
                if own[i] < 0:
                    b = elements[i] // BLOCK
                    for j in range(HASHES):
                        c = blocks[b, j] * BLOCK + (elements[i] + offsets[b, j]) % BLOCK
                        if counts[c] == 1:
                            own[i] = c
                            break
                    peeled[done] = i
                    done += 1
        if done == gone:
            return rounds
        rounds += 1
        first = last
        for k in range(gone, done):
            i = peeled[k]
            b = elements[i] // BLOCK
            for j in range(HASHES):
                c = blocks[b, j] * BLOCK + (elements[i] + offsets[b, j]) % BLOCK
                counts[c] -= 1
                members[c] ^= i
                if counts[c] == 1:
                    queue[last] = c
                    last += 1


def peel(index: Bytes, nelem: int, mapping: Mapping, n_cells: int) -> Peeling:
    """See `lhc.peel`."""
    kind = number_dtype(nelem, n_cells)
    elements = np.flatnonzero(np.unpackbits(index, count=nelem, bitorder="little")).astype(kind)
    own = np.empty(elements.size, kind)
    rounds = _peel(
        elements,
        mapping.blocks,
        mapping.offsets,
        np.zeros(n_cells, kind),
        np.zeros(n_cells, kind),
        own,
        np.empty(n_cells, kind),
        np.empty(elements.size, kind),
    )
    return Peeling(elements, own, rounds)


def encoder(spec: Lhc, chunk: Chunk, given: Given) -> Encoder | None:
    """What encodes a chunk. Without statistics it has to see which elements are zero."""
    if given.stats is not None:
        here = agreed_index(chunk, given.stats)
    elif given.bits is not None:
        here = occupied(given.bits, chunk.dtype)
    else:
        return None
    cells, index = static_views(spec, chunk)
    index[:] = np.packbits(here, bitorder="little")
    cells[:] = 0
    mapping = mapping_of(spec, chunk.nelem, cells.size // LANES)
    found = peel(index, chunk.nelem, mapping, cells.size)
    kind = spec.cell_dtype(chunk.dtype)

    def encode(x: Bits, start: int) -> tuple[int, Words]:
        stop = start + x.size
        lacking = int(np.count_nonzero(occupied(x, chunk.dtype) > here[start:stop]))
        part = part_of(found, start, stop)
        return lacking, put_own(part, x, start, chunk.dtype, cells, kind)

    def finish(results: list[tuple[int, Words]]) -> ChunkResult:
        check_lacking(sum(lacking for lacking, _ in results))
        add_up(found, mapping, np.concatenate([words for _, words in results]), cells, kind)
        return ChunkResult(0)

    return Encoder(lambda start, stop: encode, LANES, finish)


def decoder(spec: Lhc, chunk: Chunk, start: int, stop: int, summed: bool = False) -> Decoder:
    """What decodes elements `start` to `stop` of a chunk, all of which is peeled here."""
    cells, index = static_views(spec, chunk)
    mapping = mapping_of(spec, chunk.nelem, cells.size // LANES)
    problem = None if index_ends(index, chunk.nelem) else INDEX_PROBLEM
    found = peel(index, chunk.nelem, mapping, cells.size)
    if problem is None and not rest_is_zero(found, mapping, cells):
        problem = CELL_PROBLEM
    decode = partial(decode_elements, spec, chunk.dtype, found, mapping, cells)
    return Decoder(decode, LANES, problem=problem)


encode_chunk = encode_by(encoder)
decode_chunk = decode_by(decoder)
