"""The one exception for bytes that are not a valid tightwire buffer or file."""

from __future__ import annotations

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
    "bad_payload",
    "bad_container",
)


class FormatError(ValueError):
    """Raised for bytes that break the format; `reason` is one of `REASONS` (specs/errors.md)."""

    def __init__(self, reason: str, detail: str) -> None:
        if reason not in REASONS:
            raise AssertionError(f"{reason!r} is not a documented reason")
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}"
