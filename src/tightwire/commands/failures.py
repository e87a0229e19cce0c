"""Errors as users of the command see them: an exit code and one line."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..formats.errors import FormatError

DIFFERENT, USAGE, BAD_BYTES, SYSTEM, UNSUPPORTED = 1, 2, 3, 4, 5
INTERRUPTED, BROKEN_PIPE = 128 + signal.SIGINT, 128 + signal.SIGPIPE
EXIT_CODES = {
    0: "done, and all is well",
    DIFFERENT: "results differ (diff, bench, demo, conformance); doctor found a fault",
    USAGE: "wrong usage of the command line (with --json, may be told as text)",
    BAD_BYTES: "the bytes are not a valid file or buffer",
    SYSTEM: "an error of the system: no such file, disk full, the output exists",
    UNSUPPORTED: "not supported: an element type, a missing package",
    INTERRUPTED: "interrupted by Ctrl-C; 143 if terminated (128 + number of the signal)",
    BROKEN_PIPE: "the reader of the output is gone, as in | head",
}

PLAIN = "needed: a complete safetensors file, not compressed"
COMPRESSED = "needed: a complete file made by tightwire, no newer than this version"
EITHER = "needed: complete safetensors files, if compressed no newer than this version"
ANY = "needed: a complete safetensors file or buffer, if compressed no newer than this version"

#: Instead of these, where a file is sound and the one that its deltas are against is another.
BASE = "needed: --base with what the deltas were made against"

#: Which extra brings a package.
_EXTRAS = {"rich": "cli", "matplotlib": "plot", "zstandard": "demo", "numba": "cpu"}

EXPECTED = (OSError, MemoryError, TypeError, ValueError)


class Failure(Exception):
    """An error as the user sees it: exit code, reason, one line, and more for --json."""

    def __init__(
        self, code: int, reason: str, message: str, details: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.details = dict(details or {})
        self.document = {"reason": reason, "message": printable(message)}


def misuse(message: str) -> Failure:
    """Arguments that do not fit each other, or what they name."""
    return Failure(USAGE, "usage", message)


def printable(text: str) -> str:
    """`text` on one line, without anything that a terminal would obey."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def failure_of(error: Exception, path: object = None, needed: str = "") -> Failure:
    """`error`, about the file `path`, as the user sees it."""
    prefix = "" if path is None else f"{path}: "
    if isinstance(error, Failure):
        return error
    if isinstance(error, FormatError):
        if error.reason == "base_mismatch":
            # Other commands have no such option.
            needed = BASE if needed == COMPRESSED else ""
        advice = f" ({needed})" if needed else ""
        # The detail may name the file, as the one that deltas are against.
        named = "" if error.detail.startswith(prefix) else prefix
        message = f"{error.reason}: {named}{error.detail}{advice}"
        return Failure(BAD_BYTES, error.reason, message)
    if isinstance(error, ModuleNotFoundError):
        name = (error.name or str(error)).partition(".")[0]
        install = (
            f"pip install 'tightwire[{_EXTRAS[name]}]'"
            if name in _EXTRAS
            else (f"pip install {name}")
        )
        return Failure(UNSUPPORTED, "not_installed", f"{name} is not installed: {install}")
    if isinstance(error, MemoryError):
        return Failure(SYSTEM, "os_error", f"{prefix}out of memory {error}".strip())
    if isinstance(error, OSError):
        if error.strerror is None:
            return Failure(SYSTEM, "os_error", str(error))
        named = prefix if error.filename is None else f"{os.fsdecode(error.filename)}: "
        return Failure(SYSTEM, "os_error", f"{named}{error.strerror}")
    return Failure(UNSUPPORTED, "unsupported", f"{prefix}{error}")


@contextmanager
def about(path: object, needed: str = "") -> Iterator[None]:
    """Errors inside become a Failure that names `path` and says what was needed."""
    try:
        yield
    except EXPECTED as error:
        raise failure_of(error, path, needed) from error


@contextmanager
def asking(path: object = None) -> Iterator[None]:
    """A ValueError inside, other than for bad bytes, is about what the user asked for."""
    try:
        yield
    except FormatError:
        raise
    except ValueError as error:
        prefix = "" if path is None else f"{path}: "
        raise misuse(f"{prefix}{error}") from error


@contextmanager
def writing(source: Path | None, target: Path) -> Iterator[None]:
    """Errors of the disk name the target, not the temporary file next to it."""
    try:
        yield
    except OSError as error:
        if error.strerror is None or (source is not None and error.filename == str(source)):
            raise
        message = f"{target}: {error.strerror}; nothing was written there"
        raise Failure(SYSTEM, "os_error", message) from error
