"""The command line as a whole, and its process: signals, and an output that nobody reads."""

from __future__ import annotations

import importlib
import io
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from .. import __version__
from .command import EPILOG, PLAIN_TEXT
from .failures import BROKEN_PIPE, SYSTEM
from .output import OutputError, say

#: The module of each command.
_MODULES = {
    "compress": "compression",
    "decompress": "compression",
    "verify": "reading",
    "inspect": "reading",
    "diff": "reading",
    "bench": "measure",
    "advise": "advise",
    "conformance": "measure",
    "demo": "measure",
}


class _Commands(Mapping[str, Any]):
    """The commands by name; a module is imported when one of its commands is asked for."""

    def __getitem__(self, name: str) -> Any:
        module = importlib.import_module(f"{__package__}.{_MODULES[name]}")
        return typer.main.get_command(getattr(module, name))

    def __iter__(self) -> Iterator[str]:
        return iter(_MODULES)

    def __len__(self) -> int:
        return len(_MODULES)


class _Group(TyperGroup):
    def __init__(self, **attrs: Any) -> None:
        super().__init__(**attrs)
        self.commands = _Commands()  # type: ignore[assignment]


app = typer.Typer(
    cls=_Group,
    name="tightwire",
    help="Compressed tensors: lossless safetensors files, smaller.",
    epilog=EPILOG,
    add_completion=False,
    no_args_is_help=True,
    **PLAIN_TEXT,
)


def _version(wanted: bool) -> None:
    if wanted:
        say(f"tightwire {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    pass


def _stop(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


@contextmanager
def _stoppable() -> Iterator[None]:
    """Signals that end a process clean up first, as Ctrl-C does, unless the caller ignores them."""
    numbers = [signal.SIGTERM, signal.SIGHUP]
    numbers = [n for n in numbers if signal.getsignal(n) is signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, _stop)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def main() -> None:
    """Run the command line of this process; ends with SystemExit."""
    # Names hold any character; one that the output's encoding lacks is escaped.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    with _stoppable():
        try:
            app(prog_name="tightwire")
        except OutputError as error:
            sys.exit(_output_failed(error.__cause__))
        except OSError as error:  # typer's own output: --help
            sys.exit(_output_failed(error))


def _output_failed(error: BaseException | None) -> int:
    # What is still buffered would fail once more when the interpreter exits.
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):
        return BROKEN_PIPE
    reason = getattr(error, "strerror", None) or error
    print(f"tightwire: cannot write the output: {reason}", file=sys.stderr)
    return SYSTEM
