# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""lhc on the CPU: the peeling of codecs/lhc.py with Numba; the rest is NumPy's."""

from __future__ import annotations

from functools import partial

import numpy as np

from . import lhc
from .common.base import Bytes
from .common.compile_cache import cached
from .lhc import BLOCK, HASHES, Mapping, Peeling, number_dtype


@cached(nogil=True, error_model="numpy")
def _peel(elements, blocks, offsets, counts, members, own, queue, peeled):
    """Fill `own`; the number of rounds.

    A cell is known by how many elements are in it and the XOR of their places in `elements`. It
    enters `queue` once, when one is left; `peeled` has room for every element.
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


encode_chunk = partial(lhc.encode_chunk, peeler=peel)
decode_chunk = partial(lhc.decode_chunk, peeler=peel)
