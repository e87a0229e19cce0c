"""verify, inspect and diff: they read files and write none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

from .. import convert, engine, inspection
from ..codecs.threads import cpu_count
from ..contents import Contents
from ..formats.container import users_metadata
from ..formats.header import MAGIC
from ..planning import backend_for_once
from ..storage import reading
from . import directories
from .command import Done, command, each, input_file, input_files, json_option
from .failures import COMPRESSED, DIFFERENT, EITHER, about
from .output import (
    STANDARD,
    count_text,
    dicts,
    print_json,
    print_table,
    progress_bar,
    say,
    shape_text,
    size_text,
)
from .standard import path_or_bytes, standard_input

AnyInfo = inspection.Info | inspection.PlainInfo


def _buffer_bytes(source: Any) -> np.ndarray[Any, np.dtype[np.uint8]] | None:
    """The bytes of a file that holds one bare buffer, None for any other file."""
    if isinstance(source, np.ndarray):
        return source if source[: len(MAGIC)].tobytes() == MAGIC else None
    with reading(source) as reader:  # Refuses a pipe, for which open() would wait.
        if reader.read(0, min(len(MAGIC), reader.nbytes)).tobytes() != MAGIC:
            return None
    return np.asarray(np.memmap(source, np.uint8, "r"))


@command
@input_files
@json_option
def verify(files: Sequence[Path], as_json: bool) -> int:
    """Check every byte of compressed files, of directories of them, or of bare buffers.

    Header, checksums, padding and payload, as decompress would, without writing anything. All files
    are checked; the exit code is that of the first one that is bad. - is standard input.
    """

    def work(path: Path) -> Done:
        if path.is_dir():
            return directories.verify(path, as_json)
        with about(path, COMPRESSED):
            n = _verify(path)
        return {"tensors": n}, lambda: say(f"{path}: ok, {count_text(n)}")

    return each(files, work, as_json)


def _verify(path: Path) -> int:
    """Check one file; returns how many tensors it holds."""
    source = path_or_bytes(path)
    data = _buffer_bytes(source)
    if data is not None:
        parsed = engine.parse(data)
        engine.verify_chunks(parsed, cpu_count(), backend_for_once([parsed.plan]))
        return 1
    with progress_bar("verify", path) as progress:
        return convert.verify_file(source, progress=progress)


@command
@input_files
@click.option("--tensor", help="Show one tensor and its sections.")
@json_option
def inspect(files: Sequence[Path], tensor: str | None, as_json: bool) -> int:
    """Show the tensors of compressed files.

    FILE may also be a bare buffer, or - for standard input. Of DIR each shard is shown; --tensor
    looks in all of them. Only headers are read, nothing is decoded.
    """

    def work(path: Path) -> Done:
        if path.is_dir():
            done = directories.inspect(path, tensor, _file_done, _buffer_done)
        else:
            with about(path, COMPRESSED):
                done = _inspect(path, tensor)
        return done[0], lambda: _shown_under(path if len(files) > 1 else None, done[1])

    return each(files, work, as_json)


def _shown_under(path: Path | None, show: Callable[[], None]) -> None:
    if path is not None:
        say(f"{path}:")
    show()


def _inspect(path: Path, tensor: str | None) -> Done:
    source = path_or_bytes(path)
    data = _buffer_bytes(source)
    if data is not None:
        if tensor is not None:
            raise ValueError("a bare buffer holds one tensor without a name: drop --tensor")
        return _buffer_done(None, inspection.inspect(data))
    contents, infos = convert.inspect_file(source, tensor)
    if tensor is not None:
        return _buffer_done(tensor, infos[tensor])
    return _file_done(contents, infos)


def _file_done(contents: Contents, infos: Mapping[str, AnyInfo]) -> Done:
    raw = sum(info.raw_nbytes for info in infos.values())
    packed = sum(info.packed_nbytes for info in infos.values())
    ratio = packed / raw if raw else 1.0
    exact = contents.source is not None
    document = {
        "nbytes": contents.reader.nbytes,
        "raw_nbytes": raw,
        "packed_nbytes": packed,
        "ratio": ratio,
        "restores_source_file": exact,
        "metadata": users_metadata(contents.directory.metadata),
        "tensors": [{"name": n} | info.as_dict() for n, info in infos.items()],
    }

    def show() -> None:
        rows = [_row(name, info) for name, info in infos.items()]
        total = ["total", "", "", "", size_text(raw), size_text(packed), f"{ratio:.4f}", ""]
        print_table(_COLUMNS, [*rows, total], last=1)
        restores = "gives its source back byte for byte" if exact else "keeps no source header"
        say(f"{count_text(len(infos))} in {size_text(contents.reader.nbytes)}; the file {restores}")

    return document, show


_COLUMNS = ("<tensor", "<dtype", "shape", "<codec", "raw", "packed", "ratio", "chunks")


def _row(name: str, info: AnyInfo) -> list[str]:
    sizes = [size_text(info.raw_nbytes), size_text(info.packed_nbytes), f"{info.ratio:.4f}"]
    if isinstance(info, inspection.PlainInfo):
        return [name, info.dtype, shape_text(info.shape), inspection.PLAIN, *sizes, ""]
    header = info.header
    n_raw = len(info.raw_chunks)
    chunks = f"{header.chunks}, {n_raw} raw" if n_raw else str(header.chunks)
    return [name, header.dtype.name, shape_text(header.shape), header.codec, *sizes, chunks]


def _buffer_done(name: str | None, info: AnyInfo) -> Done:
    return {"tensor": name} | info.as_dict(), lambda: _show_buffer(name, info)


def _show_buffer(name: str | None, info: AnyInfo) -> None:
    fields = info.as_dict()
    print_table(_COLUMNS, [_row("(buffer)" if name is None else name, info)])
    if isinstance(info, inspection.PlainInfo):
        return
    sections = [
        [s.name, "dynamic, at most" if s.dynamic else "static", f"{s.nbytes:,}"]
        for s in info.header.sections
    ]
    say("")
    print_table(("<section", "<part", "bytes per chunk"), sections)
    dynamic = sum(info.dynamic_nbytes)
    checksum = "with" if fields["checksum"] else "without"
    say(
        "",
        f"format {fields['format']}, {fields['codec']} version {fields['codec_version']}, "
        f"{checksum} payload checksum",
        f"{info.nbytes:,} bytes: {info.static_nbytes:,} static, {dynamic:,} dynamic",
    )


@command
@input_file("a", "A")
@input_file("b", "B")
@json_option
def diff(a: Path, b: Path, as_json: bool) -> int:
    """Compare the tensors of two files or directories bit by bit.

    Each is a safetensors file or the directory of a model, compressed or not. Tensors are compared
    by name, however they are spread over shards. One of them can be - for standard input.
    """
    if a == b == STANDARD:
        raise ValueError("A and B are both -, and there is one standard input")
    if STANDARD not in (a, b) and (a.is_dir() or b.is_dir()):
        found = directories.diff(a, b)
    else:
        with about(None, EITHER), progress_bar("diff", a) as progress:
            x, y = (standard_input() if path == STANDARD else path for path in (a, b))
            found = convert.diff_files(x, y, progress)
    if as_json:
        print_json({"a": a, "b": b, "identical": not found, "differences": dicts(found)})
    elif found:
        for difference in found:
            say(f"{difference.name}: {difference.what}")
    else:
        say("identical tensors")
    return DIFFERENT if found else 0
