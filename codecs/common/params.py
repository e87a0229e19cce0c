"""Parameters of codecs, declared once: what is allowed, and where the header has them.

A field of a codec's class is declared by `choice`, `integer` or `fraction`. From this follow the
checks of its value and the parameter bytes of the header; bytes of no parameter are zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

import numpy as np

_KEY = "param"


class Param(Protocol):
    """How one parameter is checked and stored: `nbytes` bytes at `at`, little-endian, unsigned."""

    @property
    def at(self) -> int:
        """Offset in the parameter bytes."""

    @property
    def nbytes(self) -> int:
        """Bytes of the stored number."""

    def checked(self, name: str, value: Any) -> Any:
        """The value of parameter `name`. Raises TypeError or ValueError if it is not allowed."""

    def number(self, value: Any) -> int:
        """The stored number of a checked value."""

    def value(self, number: int) -> Any:
        """The value of a stored number. Raises ValueError if it has none."""


@dataclass(frozen=True)
class _Choice:
    at: int
    numbers: Mapping[Any, int]
    nbytes: int = 1

    def checked(self, name: str, value: Any) -> Any:
        check_choice(name, value, tuple(self.numbers))
        return value

    def number(self, value: Any) -> int:
        return self.numbers[value]

    def value(self, number: int) -> Any:
        for value, stored in self.numbers.items():
            if stored == number:
                return value
        raise ValueError(f"{number} stands for none of {list(self.numbers)}")


@dataclass(frozen=True)
class _Integer:
    at: int
    nbytes: int
    least: int
    most: int
    default: int

    def checked(self, name: str, value: Any) -> Any:
        least = min(self.least, self.default)
        allowed = f"{name} is {value!r}; allowed: int, {least} to {self.most}"
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(allowed)
        if not least <= value <= self.most:
            raise ValueError(allowed)
        return value

    def number(self, value: Any) -> int:
        return int(value)

    def value(self, number: int) -> Any:
        if number < self.least:
            raise ValueError(f"{number} is below {self.least}")
        return number


@dataclass(frozen=True)
class _Fraction:
    at: int
    nbytes: int
    per: int
    least: int
    most: int

    def checked(self, name: str, value: Any) -> Any:
        # Ranks compare parameters as text: a number of NumPy becomes Python's.
        value = value.item() if isinstance(value, (np.integer, np.floating)) else value
        least, most = self.least / self.per, self.most / self.per
        allowed = f"{name} is {value!r}; allowed: {least:g} to {most:g} in steps of 1/{self.per}"
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(allowed)
        if not least <= value <= most or self.number(value) / self.per != value:
            raise ValueError(allowed)
        return value

    def number(self, value: Any) -> int:
        number: int = round(value * self.per)
        return number

    def value(self, number: int) -> Any:
        return number / self.per


def log2(value: int) -> int:
    """The exponent of a power of two, as which `choice` may store it."""
    return value.bit_length() - 1


def choice(
    at: int,
    values: Sequence[Any],
    *,
    default: Any = None,
    number: Callable[[Any], int] | None = None,
) -> Any:
    """A field of a codec's class with one of a few values, stored in one byte.

    Args:
        at: Offset of the byte in the parameter bytes.
        values: What is allowed: strings, integers or booleans.
        default: The default; the first value if it is None.
        number: Gives the stored number of a value, such as ``log2`` or ``int``; by default a
            value's place in ``values`` is stored.

    Returns:
        The field of a dataclass.
    """
    numbers = {v: i if number is None else number(v) for i, v in enumerate(values)}
    return _declared(_Choice(at, numbers), values[0] if default is None else default)


def integer(at: int, nbytes: int, *, least: int, most: int, default: int) -> Any:
    """A field of a codec's class that is an integer, stored as it is.

    Args:
        at: Offset in the parameter bytes.
        nbytes: Bytes of the stored number.
        least: The least stored number.
        most: The largest.
        default: The default. One below ``least`` is allowed and never stored: the codec's
            ``bind`` replaces it.

    Returns:
        The field of a dataclass.
    """
    return _declared(_Integer(at, nbytes, least, most, default), default)


def fraction(at: int, nbytes: int, *, per: int, least: int, most: int, default: float) -> Any:
    """A field of a codec's class that is a multiple of ``1 / per``, stored as the factor.

    Args:
        at: Offset in the parameter bytes.
        nbytes: Bytes of the stored number.
        per: Number of steps from 0 to 1.
        least: The least stored number.
        most: The largest stored number.
        default: The default value.

    Returns:
        The field of a dataclass.
    """
    return _declared(_Fraction(at, nbytes, per, least, most), default)


def _declared(param: Param, default: Any) -> Any:
    return field(default=default, metadata={_KEY: param})


def declared(cls: type[Any]) -> dict[str, Param]:
    """The declared parameters of a codec's class, by name."""
    return {f.name: f.metadata[_KEY] for f in fields(cls) if _KEY in f.metadata}


def params_nbytes(cls: type[Any]) -> int:
    """Parameter bytes of the header: a multiple of 8."""
    return -(-max((p.at + p.nbytes for p in declared(cls).values()), default=0) // 8) * 8


def check_choice(name: str, value: object, allowed: tuple[str | int, ...]) -> None:
    """Raise TypeError if a parameter has another type than those allowed, or ValueError."""
    kind = type(allowed[0])
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        error: type[Exception] = TypeError
    elif value not in allowed:
        error = ValueError
    else:
        return
    listed = ", ".join(map(repr, allowed))
    raise error(f"{name} is {value!r}; allowed: {kind.__name__}, one of {listed}")
