"""Quantities on the command line: 25GB/s, 200Gb/s, 256MiB, 5us."""

from __future__ import annotations

import re
from decimal import Decimal

_PREFIXES = {"": 1, "K": 1000}
_PREFIXES |= {letter: 1000**power for power, letter in enumerate("kMGTP", 1)}
_PREFIXES |= {f"{letter}i": 1024**power for power, letter in enumerate("KMGTP", 1)}
_BYTES = {f"{prefix}B": n for prefix, n in _PREFIXES.items()}
_BITS = {f"{prefix}{bit}": n for prefix, n in _PREFIXES.items() for bit in ("b", "bit")}
_SECONDS = {"s": "1", "ms": "1e-3", "us": "1e-6", "µs": "1e-6", "μs": "1e-6", "ns": "1e-9"}

_NUMBER = re.compile(r"\s*(\d+\.?\d*(?:[eE][+-]?\d{1,2})?|\.\d+)\s*(\S*)\s*")


def parse_size(text: str) -> int:
    """Bytes of a size such as 256MiB, 1.5GB or 4096. Raises ValueError."""
    number, unit = _split(text, "a size such as 256MiB, 1.5GB or 4096")
    factor = _BYTES.get(unit or "B")
    if factor is None:
        raise ValueError(f"{text!r} has the unit {unit!r}; allowed: B, kB to PB, KiB to PiB")
    nbytes = number * factor
    if nbytes != nbytes.to_integral_value():
        raise ValueError(f"{text!r} is not a whole number of bytes")
    return int(nbytes)


def parse_speed(text: str) -> float:
    """Bytes per second of a speed such as 25GB/s, 23GiB/s or 200Gb/s (bits). Raises ValueError."""
    number, unit = _split(text, "a speed such as 25GB/s or 200Gb/s")
    amount = unit.removesuffix("/s") if unit.endswith("/s") else unit.removesuffix("ps")
    if amount == unit:
        raise ValueError(f"{text!r} is not a speed: put /s behind it, as in 25GB/s or 200Gb/s")
    if amount in _BYTES:
        speed = number * _BYTES[amount]
    elif amount in _BITS:
        speed = number * _BITS[amount] / 8
    else:
        allowed = "B (bytes) or b (bits), alone or after k to P, Ki to Pi; /s"
        raise ValueError(f"{text!r} has the unit {unit!r}; allowed: {allowed}")
    if not speed:
        raise ValueError(f"{text!r}: a speed is above 0")
    return float(speed)


def parse_time(text: str) -> float:
    """Seconds of a time such as 5us, 0.2ms or 1s. Raises ValueError."""
    number, unit = _split(text, "a time such as 5us or 0.2ms")
    if unit not in _SECONDS:
        raise ValueError(f"{text!r} has the unit {unit!r}; allowed: s, ms, us, ns")
    return float(number * Decimal(_SECONDS[unit]))


def _split(text: str, what: str) -> tuple[Decimal, str]:
    match = _NUMBER.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not {what}")
    return Decimal(match[1]), match[2]


def size_text(nbytes: int) -> str:
    """A size for people, as in 1.5 MB."""
    if nbytes < 1000:
        return f"{nbytes} B"
    power = min((len(str(nbytes)) - 1) // 3, 4)
    return f"{nbytes / 1000**power:.1f} {('kB', 'MB', 'GB', 'TB')[power - 1]}"
