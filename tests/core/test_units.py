"""Quantities of the command line."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tightwire.units import parse_size, parse_speed, parse_time


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("4096", 4096),
        ("0", 0),
        ("7B", 7),
        ("1.5kB", 1500),
        ("2KB", 2000),
        ("256MiB", 256 << 20),
        (" .5 GiB ", 1 << 29),
        ("3TB", 3 * 10**12),
        ("1PiB", 1 << 50),
        ("1e3B", 1000),
    ],
)
def test_sizes(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    ("text", "speed"),
    [
        ("25GB/s", 25e9),
        ("200Gb/s", 25e9),
        ("200Gbit/s", 25e9),
        ("200Gbps", 25e9),
        ("25GBps", 25e9),
        ("1GiB/s", 2.0**30),
        ("1Gib/s", 2.0**27),
        ("12.5 MB/s", 12.5e6),
        ("8b/s", 1.0),
        ("2TB/s", 2e12),
    ],
)
def test_speeds(text: str, speed: float) -> None:
    assert parse_speed(text) == speed


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("5us", 5e-6), ("5µs", 5e-6), ("5μs", 5e-6), ("0.2ms", 2e-4), ("1s", 1.0), ("30 ns", 3e-8)],
)
def test_times(text: str, seconds: float) -> None:
    assert parse_time(text) == seconds


@given(st.integers(0, 10**12), st.integers(0, 3))
def test_sizes_are_exact(number: int, places: int) -> None:
    nbytes = Fraction(number, 10**places) * 1000
    text = f"{number // 10**places}.{number % 10**places:0{places}d}kB" if places else f"{number}kB"
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "x", "MiB", "1 2B", "-1B", "1..5B", "0x10B", "inf", "1B/s"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a size|has the unit"):
        parse_size(text)


@pytest.mark.parametrize("text", ["1mB", "1Gb", "1kiB", "1.5B", "1e-3kiB", ".1B"])
def test_no_units_of_sizes(text: str) -> None:
    with pytest.raises(ValueError, match=r"allowed: B, kB|whole number"):
        parse_size(text)


@pytest.mark.parametrize("text", ["", "25", "25GB", "25G/s", "25 GB/us", "0B/s", "/s", "1s"])
def test_no_speeds(text: str) -> None:
    with pytest.raises(ValueError, match=r"speed|allowed"):
        parse_speed(text)


@pytest.mark.parametrize("text", ["", "5", "5US", "5 m", "-5us", "5us 3ns"])
def test_no_times(text: str) -> None:
    with pytest.raises(ValueError, match=r"time|allowed"):
        parse_time(text)
