"""Entry point of the command line, and its process: signals, and an output that nobody reads.

What takes long to import, as click and NumPy do, is imported only once it is needed.
"""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from . import __version__
from .commands.failures import BROKEN_PIPE, SYSTEM, UNSUPPORTED
from .commands.output import OutputError, say
from .commands.welcome import welcome


def main() -> None:
    """Run `tightwire` with the arguments of this process; ends with SystemExit."""
    if sys.stderr is None:  # Closed. print(file=None) would write to standard output.
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    # Names hold any character; one that the output's encoding lacks is escaped.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    with _stoppable():
        try:
            sys.exit(_shortcut() if sys.argv[1:] in ([], ["--version"]) else _run())
        except OutputError as error:
            sys.exit(_output_failed(error.__cause__))
        except OSError as error:  # click's own output: --help
            sys.exit(_output_failed(error))


def _shortcut() -> int:
    """`tightwire` alone and `tightwire --version`, without the time that click takes to import."""
    if sys.argv[1:]:
        say(f"tightwire {__version__}")
    else:
        welcome()
    return 0


def _run() -> int:
    """Run a command; without the [cli] extra, say in one line how to get it."""
    # No command calls NumPy's BLAS, and starting its threads would take longer than most commands.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        from .commands.app import app
    except ModuleNotFoundError as error:
        if error.name != "click":
            raise
        return _without(error.name)
    app(prog_name="tightwire")
    return 0


def _without(name: str) -> int:
    sys.stderr.write(f"tightwire: {name} is not installed: pip install 'tightwire[cli]'\n")
    return UNSUPPORTED


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


def _output_failed(error: BaseException | None) -> int:
    # What is still buffered would fail once more when the interpreter exits.
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):
        return BROKEN_PIPE
    reason = getattr(error, "strerror", None) or error
    print(f"tightwire: cannot write the output: {reason}", file=sys.stderr)
    return SYSTEM


if __name__ == "__main__":
    main()
