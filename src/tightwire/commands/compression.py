"""compress and decompress."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click

from .. import convert
from ..codec import Codec, codec
from .command import (
    Done,
    cast_dtype,
    cast_option,
    command,
    each,
    force_option,
    input_files,
    json_option,
    output_option,
    threads_option,
)
from .failures import COMPRESSED, PLAIN, about, writing
from .output import count_text, progress_bar, say, size_text
from .targets import check_sources, check_targets, targets_of


@command
@input_files
@output_option
@click.option("--codec", "codec_name", default="zipccl", help="Name of the codec.")
@click.option("--window", help="zipccl's window: tile, sigma, histogram, or a first exponent.")
@cast_option
@force_option
@threads_option
@json_option
def compress(
    files: Sequence[Path],
    output: Path | None,
    codec_name: str,
    window: str | None,
    cast: str | None,
    force: bool,
    threads: int | None,
    as_json: bool,
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
@input_files
@output_option
@force_option
@threads_option
@json_option
def decompress(
    files: Sequence[Path],
    output: Path | None,
    force: bool,
    threads: int | None,
    as_json: bool,
) -> int:
    """Restore the files that were compressed.

    Every FILE is an input, and every tensor is checked. Without -o the result lies beside FILE,
    with .safetensors for .tw.safetensors.

    All inputs and outputs are checked before anything is written. An uncompressed model that is
    there already is never overwritten, not even with --force: remove it yourself.
    """
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
        raise click.BadParameter(
            f"{source} does not end in .tw.safetensors: name its output file with -o"
        )
    return f"{stem}.safetensors"
