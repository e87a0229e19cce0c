"""The checksum's promises, and that its two implementations agree."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tightwire.codecs.common import checksum_cpu
from tightwire.formats import checksum


def by_definition(data: bytes, first_word: int) -> int:
    data += bytes(-len(data) % 4)
    total = 0
    for i in range(len(data) // 4):
        key = (0x3C6EF372 * (first_word + i) + 1) % (1 << 32)
        total += key * int.from_bytes(data[4 * i : 4 * i + 4], "little")
    return total % (1 << 64)


@given(st.binary(max_size=70), st.sampled_from([0, 1, 32, 1 << 31, (1 << 32) + 3, 1 << 40]))
def test_implementations_follow_the_definition(data: bytes, first_word: int) -> None:
    array = np.frombuffer(data, np.uint8)
    expected = by_definition(data, first_word)
    assert checksum.words_sum(array, first_word) == expected
    assert checksum_cpu.words_sum(array, first_word) == expected


@pytest.mark.parametrize("n", [4 * (1 << 15) - 4, 4 * (1 << 15), 4 * (1 << 15) + 3, 1_000_001])
def test_long_data_and_sums_of_parts(n: int) -> None:
    data = np.random.default_rng(n).integers(0, 256, n, dtype=np.uint8)
    whole = checksum.words_sum(data)
    assert checksum_cpu.words_sum(data) == whole
    cut = n // 8 * 4
    parts = checksum.words_sum(data[:cut]) + checksum.words_sum(data[cut:], cut // 4)
    assert parts % (1 << 64) == whole


@given(
    st.integers(0, (1 << 31) - 1),
    st.integers(0, (1 << 31) - 1),
    st.integers(0, (1 << 32) - 1),
    st.integers(0, (1 << 32) - 1),
)
def test_one_word_or_two_words_that_trade_places_are_always_caught(
    i: int, j: int, a: int, b: int
) -> None:
    def key(i: int) -> int:
        return (checksum.KEY_STEP * i + 1) % (1 << 32)

    if a != b:
        assert (a - b) * key(i) % (1 << 64) != 0
        if i != j:
            assert (a - b) * (key(i) - key(j)) % (1 << 64) != 0


def test_keys_are_odd_and_differ() -> None:
    i = np.arange(1 << 20, dtype=np.uint64)
    keys = (i * checksum.KEY_STEP + 1) % (1 << 32)
    assert (keys % 2 == 1).all()
    assert np.unique(keys).size == keys.size
    # Odd half: i -> step / 2 * i is a bijection modulo 2**31.
    assert checksum.KEY_STEP // 2 % 2 == 1


def test_every_field_of_a_record_and_of_the_identity_counts() -> None:
    base = checksum.record_term(5, 0, 0, 0), checksum.identity_term(2, 1, 17, 100)
    changed = {(6, 0, 0, 0), (5, 1, 0, 0), (5, 0, 1, 0), (5, 0, 0, 1)}
    assert len({base[0], *(checksum.record_term(*c) for c in changed)}) == 5
    others = {(1, 1, 17, 100), (2, 2, 17, 100), (2, 1, 16, 100), (2, 1, 17, 101)}
    assert len({base[1], *(checksum.identity_term(*o) for o in others)}) == 5
