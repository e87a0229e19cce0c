"""compress and decompress."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from .. import convert
from ..codec import Codec, codec
from .command import CastTo, Done, Force, Inputs, Json, Output, Threads, cast_dtype, command, each
from .failures import COMPRESSED, PLAIN, about, writing
from .output import count_text, progress_bar, say, size_text
from .standard import convert_piped, is_piped
from .targets import check_sources, check_targets, targets_of


@command
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

    A single FILE can be -, standard input; its result goes to standard output, as with -o -.
    """
    chosen = _codec(codec_name, window)
    if not chosen.lossless:
        raise ValueError(f"{codec_name} is lossy, and decompress promises the file that was")
    if is_piped(files, output):
        into = partial(convert.compress_file, codec=chosen, cast=cast_dtype(cast), threads=threads)
        return convert_piped(files, output, PLAIN, into, force=force, as_json=as_json)
    targets = targets_of(files, output, _compressed_name)
    check_sources(files, output, PLAIN, convert.check_plain)
    check_targets(targets, force)

    def work(source: Path) -> Done:
        target = targets[source]
        with (
            about(source, PLAIN),
            writing(source, target),
            progress_bar("compress", source) as progress,
        ):
            reports = convert.compress_file(
                source, target, chosen, cast=cast_dtype(cast), threads=threads, progress=progress
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
        sizes = f"{size_text(before)} -> {size_text(after)}, ratio {after / before:.4f}"
        return document, lambda: say(f"{target}: {count_text(len(reports))}, {sizes}")

    return each(files, work, as_json)


def _compressed_name(source: Path) -> str:
    return source.name.removesuffix(".safetensors") + ".tw.safetensors"


def _codec(name: str, window: str | None) -> Codec:
    if window is None:
        return codec(name)
    if name != "zipccl":
        raise ValueError(f"--window is a parameter of zipccl, not of {name}")
    return codec(name, window=int(window) if window.isdecimal() else window)


@command
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

    A single FILE can be -, standard input; its result goes to standard output, as with -o -.
    """
    if is_piped(files, output):
        into = partial(convert.decompress_file, threads=threads)
        return convert_piped(files, output, COMPRESSED, into, force=force, as_json=as_json)
    targets = targets_of(files, output, _restored_name)
    check_sources(files, output, COMPRESSED, convert.inspect_file)
    check_targets(targets, force)

    def work(source: Path) -> Done:
        target = targets[source]
        with (
            about(source, COMPRESSED),
            writing(source, target),
            progress_bar("decompress", source) as progress,
        ):
            convert.decompress_file(source, target, threads=threads, progress=progress)
        before, after = source.stat().st_size, target.stat().st_size
        document = {"target": target, "source_nbytes": before, "target_nbytes": after}
        return document, lambda: say(f"{target}: {size_text(before)} -> {size_text(after)}")

    return each(files, work, as_json)


def _restored_name(source: Path) -> str:
    stem = source.name.removesuffix(".tw.safetensors")
    if stem == source.name:
        raise typer.BadParameter(
            f"{source} does not end in .tw.safetensors: name its output file with -o"
        )
    return f"{stem}.safetensors"
