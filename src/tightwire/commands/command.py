"""What all commands have: how they are declared, their options, work on several files."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from ..formats.dtypes import DType, dtype_named
from .failures import EXIT_CODES, EXPECTED, INTERRUPTED, Failure, failure_of
from .output import complain, print_json

#: Help and errors are text as it is, without frames and colours.
PLAIN_TEXT: dict[str, Any] = {"rich_markup_mode": None, "pretty_exceptions_enable": False}
EPILOG = "\b\nExit codes:\n" + "\n".join(f"{c:5}  {text}" for c, text in EXIT_CODES.items())


def _path(text: str) -> Path:
    """A path; an empty text, as of a variable that is not set, is none."""
    if not text:
        raise typer.BadParameter("an empty path; name a file or a directory")
    return Path(text)


class Cast(StrEnum):
    """Types that --cast knows."""

    bfloat16 = "bfloat16"


Input = Annotated[Path, typer.Argument(metavar="FILE", show_default=False)]
Inputs = Annotated[
    list[Path],
    typer.Argument(metavar="FILE|DIR", show_default=False, parser=_path),
]
Output = Annotated[
    Path | None,
    typer.Option(
        "-o",
        "--output",
        metavar="PATH",
        help="Where the result goes: a file, or a folder that is there; of several, a folder. "
        "Of one DIR, the directory that it becomes.",
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Overwrite a file that tightwire compressed.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
CastTo = Annotated[
    Cast | None,
    typer.Option("--cast", help="First round float32 and float64 tensors to this type."),
]
Threads = Annotated[
    int | None,
    typer.Option("--threads", min=1, help="Threads; as many as processors if not given."),
]


def cast_dtype(cast: Cast | None) -> DType | None:
    """The type that --cast names, None without it."""
    return None if cast is None else dtype_named(cast.value)


def command(function: Callable[..., int | None]) -> typer.Typer:
    """An application of one command, whose parameter `as_json` says how errors are told.

    `function` returns its exit code; None is 0.
    """

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            code = function(*args, **kwargs)
        except KeyboardInterrupt:
            print("tightwire: interrupted", file=sys.stderr)
            code = INTERRUPTED
        except (Failure, ModuleNotFoundError, *EXPECTED) as error:
            failure = failure_of(error)
            if kwargs["as_json"]:
                print_json({"error": failure.document})
            else:
                complain(failure)
            code = failure.code
        raise typer.Exit(code or 0)

    app = typer.Typer(add_completion=False, **PLAIN_TEXT)
    app.command(function.__name__, epilog=EPILOG)(run)
    return app


#: What a command did with one file: its JSON document, and what shows it as text.
Done = tuple[dict[str, Any], Callable[[], None]]


def each(files: Sequence[Path], work: Callable[[Path], Done], as_json: bool) -> int:
    """Work on every file, whatever becomes of the others; the first Failure gives the exit code."""
    documents, failures = attempts(files, work, as_json)
    if as_json:
        first = {"error": failures[0].document} if failures else {}
        print_json({"files": documents} | first)
    return failures[0].code if failures else 0


def attempts(
    files: Sequence[Path], work: Callable[[Path], Done], as_json: bool
) -> tuple[list[dict[str, Any]], list[Failure]]:
    """Work on every file: a JSON document of each, and what failed. Shown at once as text."""
    documents: list[dict[str, Any]] = []
    failures: list[Failure] = []
    for path in files:
        try:
            document, show = work(path)
        except Failure as failure:
            failures.append(failure)
            error = {"path": path, "ok": False, "error": failure.document}
            documents.append(error | failure.details)
            if not as_json:
                complain(failure)
            continue
        documents.append({"path": path, "ok": True, "error": None} | document)
        if not as_json:
            show()
    return documents, failures
