"""Random words: known answers, and the same words from every backend."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tightwire as tw
from tightwire.codecs.common.philox import KeyNumbers, key_numbers, philox4x32, random_words

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from tightwire.codecs.common import philox_triton  # noqa: E402

#: Counter, key and words of philox4x32-10 in the test vectors of the authors' library, Random123.
KNOWN = (
    (
        "00000000 00000000 00000000 00000000",
        "00000000 00000000",
        "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    ),
    (
        "ffffffff ffffffff ffffffff ffffffff",
        "ffffffff ffffffff",
        "408f276d 41c83b0e a20bc7c6 6d5451fd",
    ),
    (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
)
KEYS = (
    KeyNumbers(0, 0, 0),
    KeyNumbers(0x299F31D0A4093822, 0x13198A2E, 0x03707344),
    KeyNumbers((1 << 64) - 1, (1 << 32) - 1, (1 << 32) - 1),
)
#: Group numbers that need both of their words, and small ones.
FIRSTS = (0, 5, 1 << 34, (1 << 63) - 64)


def numbers(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_known_answers(counter: str, key: str, words: str) -> None:
    c0, c1, c2, c3 = (np.array([c], np.uint32) for c in numbers(counter))
    k0, k1 = numbers(key)
    assert philox4x32((c0, c1, c2, c3), (k0, k1)).tolist() == [numbers(words)]


def test_where_numbers_go() -> None:
    counter, key, words = (numbers(text) for text in KNOWN[2])
    found = KeyNumbers(key[1] << 32 | key[0], counter[2], counter[3])
    group = (counter[1] & (1 << 29) - 1) << 32 | counter[0]
    assert random_words(found, 4 * group, 4, stream=counter[1] >> 29).tolist() == words


def test_words_do_not_depend_on_the_range() -> None:
    whole = random_words(KEYS[1], 0, 200)
    for first, n in ((0, 1), (3, 9), (8, 4), (13, 187), (200, 0)):
        assert random_words(KEYS[1], first, n).tolist() == whole[first : first + n].tolist()


def test_streams_keys_and_steps_differ() -> None:
    keys = [KeyNumbers(s, t, r) for s in (0, 1, 1 << 32) for t in (0, 1) for r in (0, 1)]
    drawn = [tuple(random_words(k, 0, 4, stream).tolist()) for k in keys for stream in range(8)]
    assert len(set(drawn)) == len(keys) * 8


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("first", FIRSTS)
def test_numba(key: KeyNumbers, first: int) -> None:
    numba = pytest.importorskip("numba")
    from tightwire.codecs.common.philox_cpu import fill_words

    @numba.njit  # type: ignore[untyped-decorator]
    def fill(*args: Any) -> None:
        fill_words(*args)

    first -= first % 4
    for stream in (0, 7):
        out = np.full(63, 0xA5A5A5A5, np.uint32)
        fill(out, *map(np.uint64, key), np.uint64(stream), np.uint64(first))
        assert out.tolist() == random_words(key, first, 63, stream).tolist()


@triton.jit(do_not_specialize=["seed", "step", "rank", "group"])  # type: ignore[untyped-decorator]
def draw_kernel(
    out_ptr: Any,
    seed: tl.uint64,
    step: tl.uint64,
    rank: tl.uint64,
    group: tl.int64,
    STREAM: tl.constexpr,
) -> None:
    i = tl.arange(0, 16)
    words = philox_triton.philox4(seed, step, rank, STREAM, group + i)
    for k in tl.static_range(4):
        tl.store(out_ptr + 4 * i + k, words[k].to(tl.int64))


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("first", FIRSTS)
def test_triton(key: KeyNumbers, first: int) -> None:
    place = "cuda" if torch.cuda.is_available() else "cpu"
    for stream in (0, 7):
        out = torch.zeros(64, dtype=torch.int64, device=place)
        draw_kernel[(1,)](out, *key, first // 4, STREAM=stream)
        expected = random_words(key, first // 4 * 4, 64, stream)
        assert out.tolist() == expected.tolist()


def test_numbers_of_a_key() -> None:
    assert key_numbers(tw.Key(3)) == (3, 0, 0)
    arrays = tw.Key(np.array([5]), np.uint32(6), 7)
    assert key_numbers(arrays) == (5, 6, 7)


@pytest.mark.parametrize(
    ("key", "error"),
    [
        (None, ValueError),
        (tw.Key(-1), ValueError),
        (tw.Key(1 << 64), ValueError),
        (tw.Key(0, 1 << 32), ValueError),
        (tw.Key(0, 0, -1), ValueError),
        (tw.Key(1.5), TypeError),
        (tw.Key("1"), TypeError),
        (tw.Key(0, np.zeros(2, np.int64)), TypeError),
        (tw.Key(0, 0, None), TypeError),  # type: ignore[arg-type]
    ],
)
def test_bad_keys_are_refused(key: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"allowed|needs"):
        key_numbers(key)
