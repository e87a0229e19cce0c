"""verify, inspect and diff: they read files and write none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import numpy as np

from .. import convert, engine, inspection
from ..arguments import base_of_buffer
from ..codecs.common.threads import cpu_count
from ..contents import Contents, read_header
from ..decoding import decode
from ..formats.container import VERSION_KEY, BaseNote, Directory, base_note, users_metadata
from ..formats.header import MAGIC
from ..inspection import Part
from ..planning import backend_for_once
from ..storage import reading
from . import directories
from .command import Done, command, each, input_file, input_files, json_option, path_option
from .failures import ANY, COMPRESSED, DIFFERENT, EITHER, about, asking, misuse
from .output import (
    STANDARD,
    count_text,
    dicts,
    print_json,
    print_parts,
    print_table,
    progress_bar,
    say,
    shape_text,
    size_text,
)
from .standard import path_or_bytes, standard_input
from .targets import check_base

AnyInfo = inspection.Info | inspection.PlainInfo


def _buffer_bytes(source: Any) -> np.ndarray[Any, np.dtype[np.uint8]] | None:
    """The bytes of a file that holds one bare buffer, None for any other file."""
    if isinstance(source, np.ndarray):
        return source if source[: len(MAGIC)].tobytes() == MAGIC else None
    with reading(source) as reader:  # Refuses a pipe, for which open() would wait.
        if reader.read(0, min(len(MAGIC), reader.nbytes)).tobytes() != MAGIC:
            return None
    return np.asarray(np.memmap(source, np.uint8, "r"))


@command(
    "tightwire verify model.tw.safetensors",
    "tightwire verify model-directory.tw",
    "tightwire verify weights.tw --json",
    "tightwire verify step2.tw.safetensors --base old.safetensors",
)
@input_files
@path_option("--base", "What deltas are against: a file if not next to FILE, a bare buffer.")
@json_option
def verify(files: Sequence[Path], base: Path | None, as_json: bool) -> int:
    """Check every byte of compressed files and directories.

    FILE may also be a bare buffer, or - for standard input. Header, checksums, padding and payload
    are checked as decompress does, and nothing is written. All files are checked; the exit code is
    that of the first bad one.

    Deltas are decoded against their base. Of a bare buffer that is the bare buffer which --base
    names; without it only the checksum is checked.
    """
    if base is not None:
        check_base("--base", files, base)

    def work(path: Path) -> Done:
        if path.is_dir():
            return directories.verify(path, as_json)
        with about(path, COMPRESSED):
            n, decoded = _verify(path, base)
        more = "" if decoded else "; not decoded, as its base is not given (--base)"
        document = {"tensors": n, "decoded": decoded}
        return document, lambda: say(f"{path}: ok, {count_text(n)}{more}")

    return each(files, work, as_json)


def _verify(path: Path, base: Path | None) -> tuple[int, bool]:
    """Check one file: how many tensors it holds, and whether their payload was decoded."""
    source = path_or_bytes(path)
    data = _buffer_bytes(source)
    if data is not None:
        return 1, _verify_buffer(path, engine.parse(data), base)
    with progress_bar("verify", path) as progress:
        return convert.verify_file(source, progress=progress, base=base), True


def _verify_buffer(path: Path, parsed: engine.Parsed, base: Path | None) -> bool:
    """Check a bare buffer; False if it is a delta, and checked by its checksum alone."""
    plan = parsed.plan
    against = None
    if base is not None:
        # Deltas of small tensors are stored by raw.
        if not plan.needs_base and plan.codec.name != "raw":
            raise ValueError("is not a delta. Allowed: no --base")
        with about(base):
            data = _buffer_bytes(base)
            if data is None:
                raise misuse(f"{base}: is not a bare buffer, and FILE is one")
            against = base_of_buffer(plan, decode(data))
    elif plan.needs_base and not plan.checksum:
        detail = "is a delta without a checksum: it is checked by decoding. Needed: --base"
        raise misuse(f"{path}: {detail}")
    engine.verify_chunks(parsed, cpu_count(), backend_for_once([plan]), base=against)
    return against is not None or not plan.needs_base


@command(
    "tightwire inspect model.tw.safetensors",
    "tightwire inspect model.tw.safetensors --tensor w",
    "tightwire inspect model.safetensors --estimate",
    "tightwire inspect model-directory --json",
)
@input_files
@click.option("--tensor", help="Show one tensor, its sections and its chunks.")
@click.option(
    "--estimate", is_flag=True, help="Compress samples of a plain file: what it would save."
)
@json_option
def inspect(files: Sequence[Path], tensor: str | None, estimate: bool, as_json: bool) -> int:
    """Show what a file holds and where its bytes go.

    FILE is a safetensors file, compressed or not, or a bare buffer; - is standard input. Of DIR
    each safetensors file is shown; --tensor looks in all of them. Only headers are read and nothing
    is decoded; --estimate reads 1 MiB of the tensors of a plain file.
    """

    def work(path: Path) -> Done:
        if path.is_dir():
            done = directories.inspect(path, tensor, _opened, estimate)
        else:
            with about(path, ANY), asking(path):
                done = _inspect(path, tensor, estimate)
        return done[0], lambda: _shown_under(path if len(files) > 1 else None, done[1])

    return each(files, work, as_json)


def _shown_under(path: Path | None, show: Callable[[], None]) -> None:
    if path is not None:
        say(f"{path}:")
    show()


def _inspect(path: Path, tensor: str | None, estimate: bool) -> Done:
    source = path_or_bytes(path)
    data = _buffer_bytes(source)
    if data is not None:
        if tensor is not None:
            raise ValueError("a bare buffer holds one tensor without a name: drop --tensor")
        return _buffer_done(None, inspection.inspect(data))
    return _opened(source, tensor, estimate)


def _opened(source: Any, tensor: str | None, estimate: bool) -> Done:
    """What `inspect` says of a safetensors file, or of one tensor in it."""
    directory = read_header(source)
    if VERSION_KEY in directory.metadata:
        contents, infos = convert.inspect_file(source, tensor)
        if tensor is not None:
            return _buffer_done(tensor, infos[tensor])
        return _compressed_done(contents, infos)
    plain = inspection.plain_tensors(directory)
    if tensor is not None:
        if tensor not in plain:
            raise ValueError(f"no tensor {tensor!r}; 'inspect FILE' lists the names")
        return _buffer_done(tensor, plain[tensor])
    with reading(source) as reader:
        estimated = inspection.estimate(reader, directory) if estimate else None
        return _plain_done(reader.nbytes, directory, plain, estimated)


def _sizes(nbytes: int, infos: Mapping[str, AnyInfo], parts: Sequence[Part]) -> dict[str, Any]:
    raw = sum(info.raw_nbytes for info in infos.values())
    packed = sum(info.packed_nbytes for info in infos.values())
    return {
        "nbytes": nbytes,
        "raw_nbytes": raw,
        "packed_nbytes": packed,
        "ratio": packed / raw if raw else 1.0,
        "parts": [part._asdict() for part in parts],
        "tensors": [{"name": n} | info.as_dict() for n, info in infos.items()],
    }


def _compressed_done(contents: Contents, infos: Mapping[str, AnyInfo]) -> Done:
    exact = contents.source is not None
    nbytes = contents.reader.nbytes
    parts = inspection.file_parts(nbytes, contents.directory.data_at, infos.values())
    base = base_note(contents.directory)
    document = {
        "compressed": True,
        "restores_source_file": exact,
        "base": base and base._asdict(),
        "metadata": users_metadata(contents.directory.metadata),
        **_sizes(nbytes, infos, parts),
    }

    def show() -> None:
        rows = [_row(name, info) for name, info in infos.items()]
        raw, packed = size_text(document["raw_nbytes"]), size_text(document["packed_nbytes"])
        total = ["total", "", "", "", raw, packed, f"{document['ratio']:.4f}", ""]
        print_table(_COLUMNS, [*rows, total], last=1)
        say("")
        print_parts(parts)
        say("", f"{count_text(len(infos))} in {size_text(nbytes)}; {_restores(exact, base)}")

    return document, show


def _restores(exact: bool, base: BaseNote | None) -> str:
    """What a compressed file gives back, and what that takes."""
    found = "the file gives its source back byte for byte"
    if not exact:
        found = "the file keeps no source header"
    if base is None:
        return found
    row = "" if base.deltas == 1 else f", {base.deltas} files of deltas in a row"
    return f"{found}, given {base.file}, which it holds deltas against{row}"


_PLAIN_COLUMNS = ("<tensor", "<dtype", "shape", "bytes", "share")


def _plain_done(
    nbytes: int,
    directory: Directory,
    infos: Mapping[str, inspection.PlainInfo],
    estimated: inspection.Estimate | None,
) -> Done:
    parts = inspection.file_parts(nbytes, directory.data_at, infos.values())
    document = {
        "compressed": False,
        "restores_source_file": None,
        "metadata": dict(directory.metadata),
        "estimate": None if estimated is None else asdict(estimated),
        **_sizes(nbytes, infos, parts),
    }

    def show() -> None:
        raw = document["raw_nbytes"]
        rows = [
            [n, i.dtype, shape_text(i.shape), size_text(i.nbytes), _share(i.nbytes, raw)]
            for n, i in infos.items()
        ]
        total = ["total", "", "", size_text(raw), _share(raw, raw)]
        print_table(_PLAIN_COLUMNS, [*rows, total], last=1)
        say("")
        print_parts(parts)
        say("", f"{count_text(len(infos))} in {size_text(nbytes)}; the file is not compressed")
        if estimated is None:
            say("--estimate says what compressing it would save")
        elif estimated.samples:
            say(
                f"{estimated.codec} would make about {estimated.ratio:.0%} of it: estimated from "
                f"{estimated.samples} samples, {size_text(estimated.sample_nbytes)}"
            )
        else:
            say(f"{estimated.codec} would save nothing: there are no float elements")

    return document, show


def _share(nbytes: int, total: int) -> str:
    return f"{nbytes / total if total else 0:.1%}"


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
    print_table(_COLUMNS, [_row("(buffer)" if name is None else name, info)])
    if isinstance(info, inspection.PlainInfo):
        return
    fields = info.as_dict()
    say("")
    print_parts(info.parts())
    if info.header.chunks > 1:
        say("")
        _show_chunks(info)
    dynamic = sum(info.dynamic_nbytes)
    checksum = "with" if fields["checksum"] else "without"
    say(
        "",
        f"format {fields['format']}, {fields['codec']} version {fields['codec_version']}, "
        f"{checksum} payload checksum",
        f"{info.nbytes:,} bytes: {info.static_nbytes:,} static, {dynamic:,} dynamic",
    )


#: Of more chunks than these together the first and the last ones are shown.
_FIRST_CHUNKS, _LAST_CHUNKS = 8, 4
_CHUNK_COLUMNS = ("<chunk", "elements", "static at", "bytes", "dynamic at", "bytes", "<")


def _show_chunks(info: inspection.Info) -> None:
    hidden = range(_FIRST_CHUNKS, info.header.chunks - _LAST_CHUNKS)
    rows = []
    for i, part in enumerate(info.chunk_parts()):
        if i in hidden:
            if i == hidden[0]:
                rows.append([f"... {len(hidden)} more", "", "", "", "", "", ""])
            continue
        rows.append([str(i), *(f"{n:,}" for n in part[:-1]), "raw" if part.raw else ""])
    print_table(_CHUNK_COLUMNS, rows)


@command(
    "tightwire diff model.safetensors model.tw.safetensors",
    "tightwire diff model-directory model-directory.tw",
    "tightwire compress - < model.safetensors | tightwire diff - model.safetensors",
)
@input_file("a", "A")
@input_file("b", "B")
@json_option
def diff(a: Path, b: Path, as_json: bool) -> int:
    """Compare the tensors of two models bit by bit.

    A and B are safetensors files or directories of models, compressed or not. Tensors are compared
    by name, also where they are in different shards. One of A and B can be - for standard input.
    For tensors that differ, and for B as a whole, it says what would be stored by compress
    --delta-from A.
    """
    if a == b == STANDARD:
        raise misuse("A and B are both -. Allowed: one of them, as there is one standard input")
    if STANDARD not in (a, b) and (a.is_dir() or b.is_dir()):
        found = directories.diff(a, b)
    else:
        with about(None, EITHER), progress_bar("diff", a) as progress:
            x, y = (standard_input() if path == STANDARD else path for path in (a, b))
            found = convert.compare_files(x, y, progress)
    differences = found.differences
    if as_json:
        print_json(
            {
                "a": a,
                "b": b,
                "identical": not differences,
                "differences": dicts(differences),
                "delta_nbytes": found.delta_nbytes,
                "nbytes": found.nbytes,
            }
        )
    elif differences:
        for difference in differences:
            say(f"{difference.name}: {difference.what}{_cost(difference)}")
        if found.nbytes:
            sizes = f"{size_text(found.delta_nbytes)} of {size_text(found.nbytes)}"
            ratio = found.delta_nbytes / found.nbytes
            say(f"{b} against {a} (compress --delta-from): {sizes}, ratio {ratio:.4f}")
    else:
        say("identical tensors")
    return DIFFERENT if differences else 0


def _cost(difference: convert.Difference) -> str:
    """What a tensor would take, as text."""
    cost, nbytes = difference.delta_nbytes, difference.nbytes
    if cost is None or nbytes is None:
        return ""
    return f"; takes {size_text(cost)} of {size_text(nbytes)}"
