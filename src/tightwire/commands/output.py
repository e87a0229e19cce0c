"""What commands print: lines, JSON, tables, and a bar on standard error."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..units import size_text as size_text
from .failures import Failure, printable

if TYPE_CHECKING:
    from ..convert import Progress
    from ..inspection import Part

WIDTH = 100
#: A narrow terminal folds the first column of a table down to this, and leaves the others alone.
FIRST_WIDTH = 12
#: Columns of the bars of a table of parts, and how few there may be: else there are no bars.
BAR_WIDTH, LEAST_BAR_WIDTH = 50, 10
#: The path that stands for standard input or output.
STANDARD = Path("-")


class OutputError(Exception):
    """Standard output cannot be written; no OSError, so that no file is blamed for it."""


def print_text(text: str) -> None:
    """Print a line at once. Raises OutputError."""
    try:
        print(text, flush=True)
    except OSError as error:
        raise OutputError from error


def say(*lines: str) -> None:
    """Print lines without anything that a terminal would obey."""
    for line in lines:
        print_text(printable(line))


def complain(failure: Failure) -> None:
    """Say on standard error what failed."""
    print(f"tightwire: {failure.document['message']}", file=sys.stderr)


def print_json(document: dict[str, Any]) -> None:
    """Print one JSON document."""
    print_text(json.dumps(document, indent=2, default=str))


def _is_terminal() -> bool:
    return sys.stdout is not None and sys.stdout.isatty()


def _is_unicode() -> bool:
    return (getattr(sys.stdout, "encoding", None) or "").lower().startswith("utf")


def width() -> int:
    """Columns of the terminal, at most WIDTH; WIDTH if standard output is none."""
    import shutil

    return min(shutil.get_terminal_size((WIDTH, 24)).columns, WIDTH) if _is_terminal() else WIDTH


def print_parts(parts: Sequence[Part]) -> None:
    """A table of parts with their share of the whole, and bars to scale, one behind the other."""
    total = sum(part.nbytes for part in parts)
    rows = [
        [part.name, part.kind, f"{part.nbytes:,}", f"{part.nbytes / total if total else 0:.1%}"]
        for part in parts
    ]
    columns = ["<part", "<kind", "bytes", "share"]
    used = sum(
        max(len(printable(text)) for text in column) + 1
        for column in zip(columns, *rows, strict=True)
    )
    free = min(width() - used, BAR_WIDTH)
    if total and free >= LEAST_BAR_WIDTH:
        columns.append("<")
        at = 0
        for row, part in zip(rows, parts, strict=True):
            row.append(_bar(at / total, (at + part.nbytes) / total, free))
            at += part.nbytes
    print_table(columns, rows)


def _bar(start: float, stop: float, columns: int) -> str:
    """A bar from `start` to `stop`, shares of `columns`; what is there at all has one column."""
    if start == stop:
        return ""
    first = min(round(start * columns), columns - 1)
    n = max(round(stop * columns) - first, 1)
    return " " * first + ("\u2588" if _is_unicode() else "#") * n


def print_table(columns: Sequence[str], rows: Iterable[Iterable[str]], last: int = 0) -> None:
    """A table with right-aligned columns; those whose name starts with "<" are left-aligned.

    The first column folds where the terminal is narrow; where that is not enough, lines become
    longer than the terminal rather than lose columns. The `last` rows stand under a line.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    titles = [Text(column.removeprefix("<")) for column in columns]
    cells = [[Text(printable(cell)) for cell in row] for row in rows]
    widths = [max(cell.cell_len for cell in column) for column in zip(titles, *cells, strict=True)]
    widths[0] = min(widths[0], FIRST_WIDTH)
    lines = box.SIMPLE_HEAD if _is_unicode() else box.ASCII
    table = Table(box=lines, show_edge=False, pad_edge=False, padding=0)
    for i, (column, title) in enumerate(zip(columns, titles, strict=True)):
        table.add_column(
            title,
            justify="left" if column.startswith("<") else "right",
            overflow="fold",
            no_wrap=i > 0,
            min_width=widths[i],
        )
    for i, row in enumerate(cells):
        table.add_row(*row, end_section=i == len(cells) - 1 - last)
    # Printed by ourselves: rich ends the process, with 1, when nobody reads the output.
    text = io.StringIO()
    console = Console(file=text, force_terminal=_is_terminal(), highlight=False)
    console.width = max(width(), sum(widths) + len(widths) - 1)
    console.print(table)
    print_text(text.getvalue().rstrip("\n"))


@contextmanager
def progress_bar(what: str, path: Path, passes: int = 1) -> Iterator[Progress]:
    """A bar over the bytes of a file's tensors, if standard error is a terminal.

    Of standard input, whose header is not known yet, there is none.
    """
    if path == STANDARD or not sys.stderr.isatty():
        yield lambda name, nbytes: None
        return
    from ..contents import read_header

    sizes = {e.name: e.nbytes for e in read_header(path).entries}
    with byte_bar(what, lambda: passes * sum(sizes.values())) as advance:
        yield lambda name, nbytes: advance(sizes.get(name, 0))


@contextmanager
def byte_bar(what: str, total: Callable[[], int]) -> Iterator[Callable[[int], None]]:
    """A bar over `total()` bytes, if standard error is a terminal; it is told of bytes done."""
    if not sys.stderr.isatty():
        yield lambda nbytes: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = TextColumn(what), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total())
        yield lambda nbytes: bar.advance(task, nbytes)


@contextmanager
def step_bar(total: float, animated: bool = True) -> Iterator[Callable[[str, float], None]]:
    """A bar over `total` steps, if standard error is a terminal.

    It is told what is done now, and how many steps have been done since it was last told. If it is
    not `animated`, it is drawn only then, and takes no time from what is done.
    """
    if not sys.stderr.isatty():
        yield lambda what, n: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    text = TextColumn("{task.description}", markup=False)
    columns = text, BarColumn(), TaskProgressColumn(), TimeElapsedColumn()
    console = Console(stderr=True)
    with Bar(*columns, console=console, transient=True, auto_refresh=animated) as bar:
        task = bar.add_task("", total=total)

        def update(what: str, n: float) -> None:
            bar.update(task, description=what, advance=n, refresh=True)

        yield update


def count_text(n: int) -> str:
    """A number of tensors."""
    return f"{n} tensor" if n == 1 else f"{n} tensors"


def shape_text(shape: Iterable[int]) -> str:
    """A shape, as in 2x3."""
    return "x".join(map(str, shape)) or "scalar"


def dicts(items: Iterable[Any]) -> list[dict[str, Any]]:
    """Dataclasses as JSON takes them."""
    return [asdict(item) for item in items]
