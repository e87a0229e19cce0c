"""Static sections of a chunk, declared once as arrays of items of so many bits.

From the arrays of a chunk of n elements follow the sizes of the sections, where each array lies,
and which bytes are in use. A shorter chunk has fewer items at the same places.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ...formats.header import SECTION_KINDS, Section, align


class Array(NamedTuple):
    """Items one behind the other in a static section, as the page of a codec lists them.

    Attributes:
        section: Name of the section's kind, such as ``"payload"``.
        bits: Bits of an item.
        items: Number of items.
        at: Offset in the section in bytes, from its end if negative. None: right behind the array
            before it in the same section, which is then in one used range with it.
        fills: Whether the array has all of its section in every chunk, whatever its size.
    """

    section: str
    bits: int
    items: int
    at: int | None = None
    fills: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes in use."""
        return -(-self.bits * self.items // 8)


def sections_of(arrays: Sequence[Array]) -> tuple[Section, ...]:
    """The sections that hold the arrays of a whole chunk, in the order of their first arrays."""
    sizes: dict[str, tuple[int, int]] = {}
    for array in arrays:
        end, from_end = sizes.get(array.section, (0, 0))
        if array.at is None:
            end += array.nbytes
        elif array.at >= 0:
            end = max(end, array.at + array.nbytes)
        else:
            from_end = max(from_end, -array.at)
        sizes[array.section] = end, from_end
    return tuple(Section(SECTION_KINDS[name], align(sum(size))) for name, size in sizes.items())


def places_of(arrays: Sequence[Array], sections: Sequence[Section]) -> tuple[tuple[int, int], ...]:
    """The bytes of each array in the static part of a chunk: (start, stop)."""
    starts, at = {}, 0
    for section in sections:
        if not section.dynamic:
            starts[section.name] = at, at + section.nbytes
            at += section.nbytes
    places: list[tuple[int, int]] = []
    for i, array in enumerate(arrays):
        start, end = starts[array.section]
        if array.at is not None:
            start = array.at + (start if array.at >= 0 else end)
        elif i and arrays[i - 1].section == array.section:
            start = places[-1][1]
        places.append((start, end if array.fills else start + array.nbytes))
    return tuple(places)


def used_of(arrays: Sequence[Array], sections: Sequence[Section]) -> tuple[tuple[int, int], ...]:
    """The used ranges of a chunk's static part: places of arrays, those that touch as one."""
    used: list[tuple[int, int]] = []
    last = ""
    for array, (start, stop) in zip(arrays, places_of(arrays, sections), strict=True):
        if array.at is None and array.section == last:
            start = used.pop()[0]
        used.append((start, stop))
        last = array.section
    return tuple(used)
