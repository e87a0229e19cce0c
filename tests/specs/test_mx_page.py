"""An encoder of specs/mx.md in integers: the page alone gives the vectors' bytes."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import tightwire as tw

VECTORS = Path(__file__).resolve().parents[2] / "specs" / "vectors" / "mx"
NAMES = sorted(p.stem for p in VECTORS.glob("*.input"))
INFINITY, CEIL, AGREED = 0x7F800000, 1, 2


class Element(NamedTuple):
    """A row of the page's table."""

    bits: int
    mantissa: int
    bias: int
    emax: int
    largest: Fraction
    top: int


ELEMENTS = (
    Element(8, 3, 7, 8, Fraction(448), 0x7E),
    Element(8, 2, 15, 15, Fraction(57344), 0x7B),
    Element(6, 2, 3, 4, Fraction(28), 0x1F),
    Element(6, 3, 1, 2, Fraction(15, 2), 0x1F),
    Element(4, 1, 1, 2, Fraction(6), 7),
    Element(8, 6, 1, 0, Fraction(127, 64), 0x7F),
)


def normalised(word: int) -> tuple[int, int]:
    """F and w of a float32 that is not zero, without its sign."""
    field, w = word >> 23, word & 0x7FFFFF
    if field:
        return field, w | 1 << 23
    shift = 24 - w.bit_length()
    return 1 - shift, w << shift


def scale(words: list[int], e: Element, rule: int) -> int:
    """ "Scale bytes" of a block."""
    largest = max(w & 0x7FFFFFFF for w in words)
    if largest > INFINITY:
        return 255
    if largest == INFINITY:
        return 255 - e.emax
    if largest == 0:
        return 0
    field, w = normalised(largest)
    above = rule != 0 and Fraction(w, 1 << 23) > e.largest / 2**e.emax
    return min(max(field - 127 - e.emax + above, -127), 127) + 127


def code(word: int, s: int, e: Element) -> int:
    """ "Codes" of an element."""
    sign, magnitude = word >> 31, word & 0x7FFFFFFF
    if s == 255:
        return 0
    found = 0
    if magnitude == INFINITY:
        found = e.top
    elif magnitude:
        field, w = normalised(magnitude)
        k = field - s + e.bias - 1
        d = min(23 - e.mantissa - min(k, 0), 25)
        rounded = (w + 2 ** (d - 1) - 1 + (w >> d) % 2) // 2**d
        found = min(max(k, 0) * 2**e.mantissa + rounded, e.top)
    if e.mantissa == 6:
        return -found % 256 if sign else found
    return found | sign << e.bits - 1


def given(stats: list[int], first: int, words: list[int], e: Element) -> int:
    """ "Scale bytes that are given" of a block that starts with element `first` of the tensor."""
    s = stats[first // 32]
    if first % 32 and first // 32 + 1 < len(stats):
        s = max(s, stats[first // 32 + 1])
    special = any(w & 0x7FFFFFFF >= INFINITY for w in words)
    return scale(words, e, CEIL) if special and s != 255 else s


def statics(x: Any, header: tw.Header, stats: list[int] | None = None) -> bytes:
    """The static parts of all chunks."""
    e, rule = ELEMENTS[header.params[0]], header.params[1]
    words = x.reshape(-1).astype(np.float32).view(np.uint32).tolist()
    size = -(-len(words) // header.chunks)
    out = b""
    for start in range(0, size * header.chunks, size):
        codes, scales = 0, b""
        for at in range(start, min(start + size, len(words)), 32):
            block = words[at : min(at + 32, start + size)]
            s = scale(block, e, rule) if stats is None else given(stats, at, block, e)
            scales += bytes([s])
            for i, word in enumerate(block, at - start):
                codes |= code(word, s, e) << e.bits * i
        payload, room = (s.nbytes for s in header.sections)
        out += codes.to_bytes(payload, "little") + scales.ljust(room, b"\0")
    return out


@pytest.mark.parametrize("name", NAMES)
def test_the_page_gives_the_vector(name: str) -> None:
    data = (VECTORS / f"{name}.tw").read_bytes()
    header = tw.inspect(data).header
    x = np.frombuffer((VECTORS / f"{name}.input").read_bytes(), header.dtype.numpy)
    assert data.endswith(statics(x, header))


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("chunks", [3, 7])
def test_the_page_gives_what_given_statistics_give(chunks: int, backend: str) -> None:
    x = np.ldexp(np.random.default_rng(chunks).standard_normal(1001), np.arange(1001) % 40)
    x = x.astype(np.float32)
    x[[70, 900]] = np.nan, np.inf
    codec = tw.codec("mx", element="e3m2", scale_rule="agreed")
    words = x.view(np.uint32).tolist()
    stats = [scale(words[i : i + 32], ELEMENTS[2], CEIL) for i in range(0, 1001, 32)]
    assert codec.measure(x).tolist() == stats
    buffer = codec.encode(x, chunks=chunks, stats=np.array(stats, np.uint8), backend=backend)
    assert bytes(buffer).endswith(statics(x, buffer.header, stats))
