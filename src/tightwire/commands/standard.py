"""`-`: standard input in place of a FILE, standard output in place of a result."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .command import Done, each
from .failures import SYSTEM, Failure, about, misuse, writing
from .output import STANDARD, OutputError, say, size_text
from .targets import check_targets


def is_piped(files: Sequence[Path], output: Path | None) -> bool:
    """True if `-` is among the arguments."""
    return STANDARD in files or output == STANDARD


def standard_input() -> Any:
    """Standard input as a binary file. Raises Failure if it is a terminal or closed."""
    if sys.stdin is None:
        raise Failure(SYSTEM, "os_error", "standard input is closed")
    if sys.stdin.isatty():
        advice = "redirect it with < or |, or name a FILE"
        raise misuse(f"standard input is a terminal: {advice}")
    return sys.stdin.buffer


def path_or_bytes(path: Path) -> Any:
    """`path`, or of `-` all bytes of standard input: uint8, shape (n,)."""
    return np.frombuffer(standard_input().read(), np.uint8) if path == STANDARD else path


def convert_piped(
    files: Sequence[Path],
    output: Path | None,
    needed: str,
    convert: Callable[[Any, Any], object],
    *,
    force: bool,
    as_json: bool,
    bases: Collection[Path] = (),
) -> int:
    """Convert one file from standard input or to standard output, its default here.

    `convert` takes a source and a target: paths or binary files. To standard output goes nothing
    but the whole result. `bases` as in `check_targets`.
    """
    if len(files) != 1:
        raise misuse("with - there can be one FILE only")
    target = STANDARD if output is None else output
    if target == STANDARD:
        _check_standard_output(as_json)
    elif target.is_dir():
        raise Failure(SYSTEM, "os_error", f"{target}: is a folder; name a file")
    else:
        check_targets({files[0]: target}, force, bases)

    def work(path: Path) -> Done:
        source = standard_input() if path == STANDARD else path
        with about("standard input" if path == STANDARD else path, needed):
            if target == STANDARD:
                _send(path, source, convert)
                return {}, lambda: None
            with writing(path, target):
                convert(source, target)
        nbytes = target.stat().st_size
        return {"target": target, "target_nbytes": nbytes}, lambda: say(
            f"{target}: {size_text(nbytes)}"
        )

    return each(files, work, as_json)


def _check_standard_output(as_json: bool) -> None:
    if sys.stdout is None:
        raise Failure(SYSTEM, "os_error", "standard output is closed")
    if as_json:
        problem = "--json and the result would both go to standard output"
    elif sys.stdout.isatty():
        problem = "standard output is a terminal"
    else:
        return
    raise misuse(f"{problem}: name a file with -o")


def _send(path: Path, source: Any, convert: Callable[[Any, Any], object]) -> None:
    """Convert into a temporary file, and copy that to standard output. Raises OutputError.

    `source` is `path`, or standard input where that is `-`.
    """
    import shutil
    import tempfile

    with tempfile.TemporaryFile() as file:
        with writing(path, Path(tempfile.gettempdir())):
            convert(source, file)
        file.seek(0)
        try:
            shutil.copyfileobj(file, sys.stdout.buffer, 1 << 20)
            sys.stdout.buffer.flush()
        except OSError as error:
            raise OutputError from error
