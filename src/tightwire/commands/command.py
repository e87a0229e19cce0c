"""What all commands have: how they are declared, their options, work on several files."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from ..formats.dtypes import DType, dtype_named
from .failures import EXPECTED, INTERRUPTED, Failure, failure_of
from .output import complain, print_json

Function = TypeVar("Function", bound=Callable[..., Any])


def epilog(*examples: str) -> str:
    """What stands below the options: examples, one a line, as click shows them unwrapped."""
    return "\b\nExamples:\n" + "\n".join(f"  {example}" for example in examples)


class _FilePath(click.Path):
    """A path; an empty text, as of a variable that is not set, is none."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("an empty path; name a file or a directory", param, ctx)
        if value != "-" and Path(value) == Path("-"):  # ./- is a file.
            value = os.path.abspath(value)
        return super().convert(value, param, ctx)


_PATH = _FilePath(path_type=Path)
input_files = click.argument("files", metavar="FILE|DIR...", type=_PATH, nargs=-1, required=True)
output_option = click.option(
    "-o",
    "--output",
    type=_PATH,
    help="Where the result goes: a file, or a folder that is there; of several, a folder. "
    "Of one DIR, the directory that it becomes.",
)
force_option = click.option(
    "--force", is_flag=True, help="Overwrite a file that tightwire compressed."
)
json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON document and nothing else."
)
cast_option = click.option(
    "--cast",
    type=click.Choice(["bfloat16"]),
    help="First round float32 and float64 tensors to this type.",
)
threads_option = click.option(
    "--threads",
    type=click.IntRange(min=1),
    help="Threads; as many as processors if not given.",
)


def cast_dtype(cast: str | None) -> DType | None:
    """The type that --cast names, None without it."""
    return None if cast is None else dtype_named(cast)


def input_file(
    name: str = "path", metavar: str = "FILE", required: bool = True
) -> Callable[[Function], Function]:
    """An argument that is a path."""
    return click.argument(name, metavar=metavar, type=_PATH, required=required)


def path_option(
    name: str, text: str, default: Path | None = None
) -> Callable[[Function], Function]:
    """An option whose value is a path."""
    return click.option(name, type=_PATH, default=default, help=text)


def command(*examples: str) -> Callable[[Callable[..., int | None]], click.Command]:
    """Declares a command, whose parameter `as_json` says how errors are told.

    The function returns its exit code; None is 0. `examples` are command lines for its help.
    """

    def declare(function: Callable[..., int | None]) -> click.Command:
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
            click.get_current_context().exit(code or 0)

        settings = {"show_default": True}
        named = click.command(
            function.__name__, epilog=epilog(*examples), context_settings=settings
        )
        return named(run)

    return declare


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
