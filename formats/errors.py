"""The one exception for bytes that are not a valid tightwire buffer or file, and a check."""

from __future__ import annotations

import operator
from typing import Any

#: Every reason a decoder may give, in the order of specs/errors.md.
REASONS = (
    "truncated",
    "bad_magic",
    "unsupported_version",
    "header_too_large",
    "bad_header",
    "checksum_mismatch",
    "unknown_feature",
    "unknown_codec",
    "limit_exceeded",
    "bad_record",
    "dynamic_overflow",
    "trailing_bytes",
    "reserved_not_zero",
    "base_mismatch",
    "bad_payload",
    "bad_container",
)


class FormatError(ValueError):
    """Raised for bytes that break the format. A ``ValueError``.

    ``reason``, ``detail`` and ``number`` are attributes of the exception.

    Args:
        reason: One of the documented reasons (specs/errors.md), such as ``"checksum_mismatch"``.
        detail: What was found, for people.
        number: Place of the damaged buffer in a list of several, else None.

    Raises:
        AssertionError: If ``reason`` is not documented.

    Example:
        >>> import tightwire as tw
        >>> try:
        ...     tw.decode(b"something else, of sixty-four bytes or more".ljust(64))
        ... except tw.FormatError as error:
        ...     print(error.reason)
        bad_magic
    """

    def __init__(self, reason: str, detail: str, number: int | None = None) -> None:
        if reason not in REASONS:
            raise AssertionError(f"{reason!r} is not a documented reason")
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail
        self.number = number

    def of_buffer(self, number: int) -> FormatError:
        """The same error, of a buffer in a list.

        Args:
            number: Its place in the list.

        Returns:
            The error, whose detail starts with the buffer's number.
        """
        return FormatError(self.reason, f"buffer {number}: {self.detail}", number)

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}"


def integer(name: str, value: Any, least: int | None = None) -> int:
    """``value``, which was passed for ``name``, as an int.

    Raises TypeError if it is not an integer, ValueError if it is below ``least``.
    """
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r}; allowed: an integer") from None
    if least is not None and number < least:
        raise ValueError(f"{name} is {number}; allowed: at least {least}")
    return number
