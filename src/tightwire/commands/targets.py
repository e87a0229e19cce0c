"""Where results go, and what is never overwritten."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from .. import convert
from .failures import SYSTEM, Failure, about, misuse
from .output import STANDARD

PNG_MAGIC = b"\x89PNG\r\n\x1a\n"


def targets_of(
    sources: Sequence[Path], output: Path | None, name_of: Callable[[Path], str]
) -> dict[Path, Path]:
    """Where the result of each source goes. Refuses two that would go to one place.

    Of a single directory, `output` is its result itself, there or not.
    """
    alone = len(sources) == 1 and sources[0].is_dir()
    into_folder = output is not None and output.is_dir() and not alone
    if output is not None and len(sources) > 1 and not into_folder:
        raise Failure(SYSTEM, "os_error", f"{output}: no such folder; create it first")
    targets: dict[Path, Path] = {}
    taken: dict[str, Path] = {}
    for source in sources:
        if output is None:
            named = _named(source)
            target = named.with_name(name_of(named))
        else:
            target = output / name_of(_named(source)) if into_folder else output
        other = taken.setdefault(os.path.realpath(target), source)
        if other is not source:
            raise misuse(f"{target}: {other} and {source} would both be written there")
        targets[source] = target
    return targets


def _named(source: Path) -> Path:
    """`source` by a path that ends in its name, which "." and ".." do not."""
    named = source if source.name not in ("", "..") else Path(os.path.abspath(source))
    if not named.name:
        raise misuse(f"{source}: name a file or a directory")
    return named


def check_sources(
    sources: Sequence[Path], output: Path | None, needed: str, check: Callable[[Path], object]
) -> None:
    """Refuse, before any work is done, sources that `check` refuses."""
    for source in sources:
        if len(sources) > 1 and output is None and not source.exists():
            hint = "every argument is an input, -o names the output"
            raise Failure(SYSTEM, "os_error", f"{source}: No such file or directory; {hint}")
        if source.is_dir():
            continue
        with about(source, needed):
            check(source)


def check_base(option: str, files: Sequence[Path], base: Path) -> None:
    """Refuse a base of several files, or of a directory."""
    if len(files) != 1 or files[0].is_dir() or base.is_dir():
        raise misuse(f"{option} is for one FILE and one file that it is against")
    if base == STANDARD:
        raise misuse(f"{option} is -; name a file")


def check_targets(targets: Mapping[Path, Path], force: bool, bases: Collection[Path] = ()) -> None:
    """Refuse, before any work is done, targets that cannot or should not be written.

    `bases` are the files that deltas of the sources, or of the results, are against.
    """
    taken = {}
    for what, paths in (("a file that deltas are against", bases), ("an input itself", targets)):
        for status in (path.stat() for path in paths if path != STANDARD):
            taken[status.st_dev, status.st_ino] = what
    for target in targets.values():
        if not target.parent.is_dir():
            raise Failure(SYSTEM, "os_error", f"{target.parent}: no such folder; create it first")
        # A symbolic link to nothing is something too: it may be meant for a disk not mounted now.
        if not os.path.lexists(target):
            continue
        if target.exists():
            found = target.stat()
            if use := taken.get((found.st_dev, found.st_ino)):
                raise misuse(f"{target}: is {use}; name another output with -o")
        with about(target):
            obstacle = convert.obstacle(target)
        if obstacle is not None:
            advice = "remove it yourself or name another output with -o"
            raise Failure(SYSTEM, "os_error", f"{target}: {obstacle}; {advice}")
        if not force:
            raise Failure(SYSTEM, "os_error", f"{target}: exists; --force overwrites it")


def check_plot(source: Path | None, plot: Path) -> None:
    """Find out before the work that a plot cannot be drawn; nothing but a PNG is overwritten."""
    if not plot.parent.is_dir():
        raise Failure(SYSTEM, "os_error", f"{plot.parent}: no such folder; create it first")
    if plot.is_dir():
        raise Failure(SYSTEM, "os_error", f"{plot}: is a folder; name a file")
    if source is not None and _same(source, plot):
        raise misuse(f"{plot}: is FILE itself; name another plot")
    if os.path.lexists(plot) and not _is_png(plot):
        raise Failure(
            SYSTEM, "os_error", f"{plot}: exists and is not a PNG file; name another plot"
        )
    import matplotlib.figure  # noqa: F401


def _is_png(path: Path) -> bool:
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        return file.read(len(PNG_MAGIC)) == PNG_MAGIC


def _same(a: Path, b: Path) -> bool:
    return a.exists() and b.exists() and a.samefile(b)
