"""Sections as they are declared by arrays: sizes, places, what is in use and what is behind it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest

import tightwire as tw
from support import BASE_PARAMS, CODEC_PARAMS
from tightwire.codecs.common.base import Chunk, CodecSpec, Gap, Tail
from tightwire.codecs.common.sections import Array
from tightwire.formats.dtypes import BY_NAME, DType
from tightwire.planning import spec_class

FLOAT32 = BY_NAME["float32"]


@dataclass(frozen=True)
class Toy(CodecSpec):
    """Codes of 4 bits and a count; a head, and two arrays in a section; all of a section."""

    dtypes: ClassVar[tuple[str, ...]] = ("float32", "uint8")
    weighed_by_frame: ClassVar[tuple[int, ...]] = (1,)

    def arrays(self, dtype: DType, nelem: int) -> tuple[Array, ...]:
        blocks = -(-nelem // 10)
        return (
            Array("payload", 4, nelem),
            Array("payload", 16, 1, at=-8),
            Array("scales", 32, 1),
            Array("scales", 16, blocks, at=16),
            Array("scales", 8, blocks),
            Array("index", 8, blocks, fills=True),
        )


TOY = Toy()
SECTIONS = TOY.layout(FLOAT32, 1000).sections


def test_layout() -> None:
    # 500 + 8 bytes; 16 + 200 + 100; 100
    assert [(s.name, s.nbytes) for s in SECTIONS] == [
        ("payload", 512),
        ("scales", 384),
        ("index", 128),
    ]


def test_used_ranges_of_a_shorter_chunk() -> None:
    used = TOY.static_used(FLOAT32, 33, SECTIONS)
    assert used == ((0, 17), (504, 506), (512, 516), (528, 540), (896, 1024))
    assert TOY.static_used(FLOAT32, 0, SECTIONS)[3] == (528, 528)


def test_gaps() -> None:
    assert TOY.gaps(FLOAT32, 33, SECTIONS) == (
        Gap(17, 20, 504),  # whole words are weighed by the decoder
        Gap(506, 504, 512),  # all of the second range by the frame
        Gap(516, 516, 528),
        Gap(540, 540, 896),
        Gap(1024, 1024, 1024),
    )


def test_tail() -> None:
    assert TOY.tail(33) == Tail(16, 0xF0)
    assert TOY.tail(34) == Tail()


def test_arrays_are_views() -> None:
    static = np.zeros(1024, np.uint8)
    chunk = Chunk(FLOAT32, 33, SECTIONS, static, static[:0])
    for i, array in enumerate(TOY.static_arrays(chunk)):
        array += i + 1
    expected = np.zeros(1024, np.uint8)
    for i, (start, stop) in enumerate(
        ((0, 17), (504, 506), (512, 516), (528, 536), (536, 540), (896, 1024))
    ):
        expected[start:stop] = i + 1
    assert static.tolist() == expected.tolist()


def test_a_chunk_that_does_not_shrink_is_not_accepted() -> None:
    assert TOY.accepts(FLOAT32, 1000)
    assert not TOY.accepts(FLOAT32, 96)  # 384 bytes, as raw
    assert TOY.accepts(FLOAT32, 97)
    assert not TOY.accepts(BY_NAME["uint8"], 1000)  # does not shrink
    assert not TOY.accepts(BY_NAME["float16"], 1000)


@pytest.mark.parametrize("name", tw.list_codecs())
def test_used_ranges_of_codecs_lie_in_their_sections(name: str) -> None:
    """Of whole chunks and of shorter ones, in order, without overlap."""
    for params in (CODEC_PARAMS | BASE_PARAMS)[name]:
        for dtype in map(BY_NAME.get, spec_class(name).dtypes):
            assert dtype is not None
            for whole in (1, 100, 5000, 70001):
                spec = spec_class(name)(**params).bind((7, whole))
                if not spec.accepts(dtype, whole) and name != "raw":
                    continue
                sections = [s for s in spec.layout(dtype, whole).sections if not s.dynamic]
                ends = np.cumsum([s.nbytes for s in sections]).tolist()
                for nelem in (whole, whole // 2, 1, 0):
                    used = spec.static_used(dtype, nelem, tuple(sections))
                    flat = [at for place in used for at in place]
                    assert flat[0] == 0
                    assert flat == sorted(flat)
                    assert flat[-1] <= ends[-1]
                    for start, stop in used:
                        assert not any(start < end < stop for end in ends)
