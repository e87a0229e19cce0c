"""Counter-based random words for stochastic rounding: Philox4x32-10. specs/philox.md.

After Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011), section
3.3. A word depends on seed, step, rank, stream and its index alone: not on threads, launches or
backends. `philox_cpu` and `philox_triton` give the same words.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .base import Key

Words = npt.NDArray[np.uint32]

ROUNDS = 10
#: Multipliers of a round, and what is added to the key behind it.
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
WEYL = 0x9E3779B9, 0xBB67AE85
#: Streams 0 to 7 are independent of one another.
STREAM_SHIFT = 29
MASK32 = (1 << 32) - 1
#: Least value of a key's numbers, and bits that hold the largest.
_RANGES = {"seed": (0, 64), "step": (0, 32), "rank": (0, 32), "world": (1, 32)}


class KeyNumbers(NamedTuple):
    """A key as plain integers: seed below 2^64, step and rank below 2^32."""

    seed: int
    step: int
    rank: int


def key_numbers(key: Key | None) -> KeyNumbers:
    """The integers of `key`, those of one-element arrays read.

    Raises ValueError if the key is missing or a number is out of range, TypeError if a number is
    not an integer.
    """
    if key is None:
        raise ValueError("key is None; stochastic rounding needs key=tightwire.Key(seed, step)")
    return KeyNumbers(number("seed", key.seed), number("step", key.step), number("rank", key.rank))


def check_key(key: Any, max_world: int | None = None) -> None:
    """Raise TypeError if `key` is not a Key, TypeError or ValueError for invalid numbers in it.

    `max_world` is the largest world that a codec takes, None that of all keys. Device arrays are
    not read. None, a missing key, passes.
    """
    if key is None:
        return
    if not isinstance(key, Key):
        raise TypeError(f"key is {key!r}; allowed: tightwire.Key(seed, step, rank, world) or None")
    for name in ("seed", "step"):
        value = getattr(key, name)
        if not hasattr(value, "__dlpack__") or isinstance(value, (np.ndarray, np.generic)):
            number(name, value)
    number("rank", key.rank)
    number("world", key.world, max_world)


def number(name: str, value: Any, most: int | None = None) -> int:
    """A number of a key as an int, that of a one-element array (not of rank and world) read.

    Raises TypeError if it is not an integer, ValueError if it is out of range or above `most`.
    """
    least, bits = _RANGES[name]
    if type(value) is int and most is None and least <= value < 1 << bits:
        return value
    arrays = name in ("seed", "step")
    try:
        found = value.item() if arrays and hasattr(value, "item") else value
        if isinstance(found, bool) or (hasattr(found, "shape") and found.shape != ()):
            raise TypeError
        found = operator.index(found)
    except (TypeError, ValueError, RuntimeError):
        allowed = "an integer or an array of one integer" if arrays else "an integer"
        raise TypeError(f"{name} of the key is {value!r}; allowed: {allowed}") from None
    limit, told = (1 << bits, f"2**{bits} - 1") if most is None else (most + 1, str(most))
    if not least <= found < limit:
        raise ValueError(f"{name} of the key is {found}; allowed: {least} to {told}")
    return found


def philox4x32(counter: tuple[Words, Words, Words, Words], key: tuple[int, int]) -> Words:
    """Philox4x32-10 of four counter words (uint32, one shape) and two key words; shape (..., 4)."""
    c0, c1, c2, c3 = (c.astype(np.uint64) for c in counter)
    k0, k1 = key
    low, half = np.uint64(MASK32), np.uint64(32)
    for _ in range(ROUNDS):
        p0, p1 = c0 * np.uint64(MULTIPLIERS[0]), c2 * np.uint64(MULTIPLIERS[1])
        c0, c2 = p1 >> half ^ c1 ^ np.uint64(k0), p0 >> half ^ c3 ^ np.uint64(k1)
        c1, c3 = p1 & low, p0 & low
        k0, k1 = (k0 + WEYL[0]) & MASK32, (k1 + WEYL[1]) & MASK32
    return np.stack([c0, c1, c2, c3], axis=-1).astype(np.uint32)


def random_words(key: KeyNumbers, first: int, n: int, stream: int = 0) -> Words:
    """Words number `first` to `first + n` of a stream, uint32, shape (n,); indices below 2^63."""
    groups = np.arange(first // 4, -(-(first + n) // 4), dtype=np.uint64)
    high = groups >> np.uint64(32) | np.uint64(stream << STREAM_SHIFT)
    step, rank = (np.full(groups.shape, number, np.uint32) for number in (key.step, key.rank))
    counter = (groups & np.uint64(MASK32)).astype(np.uint32), high.astype(np.uint32), step, rank
    words = philox4x32(counter, (key.seed & MASK32, key.seed >> 32))
    return words.reshape(-1)[first % 4 :][:n]
