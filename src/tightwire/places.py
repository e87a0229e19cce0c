"""Where the chunks of a plan are in its buffers."""

from __future__ import annotations

import functools
from typing import NamedTuple

from .codecs.common.base import CodecSpec, Plan
from .formats.dtypes import DType
from .formats.header import Section

#: Chunks from which on arrays of records are faster than records.
MANY_CHUNKS = 64


@functools.lru_cache(maxsize=4096)
def static_gaps(
    spec: CodecSpec, dtype: DType, nelem: int, sections: tuple[Section, ...], raw: bool
) -> tuple[tuple[int, int], ...]:
    """Byte ranges of a chunk's static part that must be zero."""
    size = sum(s.nbytes for s in sections if not s.dynamic)
    if raw:
        used: tuple[tuple[int, int], ...] = ((0, min(nelem * dtype.itemsize, size)),)
    else:
        used = spec.static_used(dtype, nelem, sections)
    starts = [0, *(hi for _, hi in used)]
    stops = [*(lo for lo, _ in used), size]
    return tuple((lo, hi) for lo, hi in zip(starts, stops, strict=True) if lo < hi)


class Place(NamedTuple):
    """Where a chunk is in buffers of a plan, and what is known of it beforehand."""

    elements: slice
    nelem: int
    static: slice
    #: Its slot, in buffers that have slots.
    slot: slice
    #: Byte ranges of the static part that must be zero.
    gaps: tuple[tuple[int, int], ...]
    raw_dynamic: int
    identity_term: int


def place_of(plan: Plan, i: int) -> Place:
    """The `Place` of chunk `i`, made once."""
    found: Place | None = plan.places.get(i)
    if found is None:
        lo, hi = plan.chunk_range(i)
        slot_at = plan.dynamic_offset + i * plan.dynamic_stride
        found = Place(
            slice(lo, hi),
            hi - lo,
            plan.static_range(i),
            slice(slot_at, slot_at + plan.dynamic_stride),
            static_gaps(plan.codec, plan.dtype, hi - lo, plan.layout.sections, False),
            plan.raw_dynamic(i),
            plan.identity_term(i),
        )
        if i < MANY_CHUNKS:
            plan.places[i] = found
    return found
