"""compress and decompress."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import click

from .. import convert
from .. import directories as model_directories
from ..codec import Codec, codec
from ..formats.container import MAX_DELTAS
from ..model_index import SUFFIX, compressed_name, restored_name
from . import directories
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
    path_option,
    threads_option,
)
from .failures import COMPRESSED, EITHER, PLAIN, about, asking, misuse, writing
from .output import count_text, progress_bar, say, size_text
from .standard import convert_piped, is_piped
from .targets import check_base, check_sources, check_targets, targets_of

#: What --codec knows, the lossless ones; tests compare them with those there are.
CODECS = ("zipccl", "huffman", "raw")


@command(
    "tightwire compress model.safetensors",
    "tightwire compress model.safetensors -o small.safetensors --force",
    "tightwire compress model-directory",
    "tightwire compress step2.safetensors --delta-from step1.tw.safetensors",
    "tightwire compress - < model.safetensors > small.safetensors",
)
@input_files
@output_option
@click.option(
    "--codec", "codec_name", type=click.Choice(CODECS), default="zipccl", help="Lossless codec."
)
@click.option("--window", help="zipccl's window: tile, sigma, histogram, or a first exponent.")
@path_option("--delta-from", "Code what changed against this file, compressed or not.")
@click.option(
    "--chain-limit",
    type=click.IntRange(1, MAX_DELTAS),
    default=convert.CHAIN_LIMIT,
    help="Most files of deltas in a row; the next one is compressed whole.",
)
@cast_option
@force_option
@threads_option
@json_option
def compress(
    files: Sequence[Path],
    output: Path | None,
    codec_name: str,
    window: str | None,
    delta_from: Path | None,
    chain_limit: int,
    cast: str | None,
    force: bool,
    threads: int | None,
    as_json: bool,
) -> int:
    """Compress safetensors files and directories of models.

    Every FILE is an input. The result is a safetensors file too; without -o it is next to FILE,
    with .tw.safetensors for .safetensors. Without --cast, decompress gives FILE back byte for byte.

    Of DIR all safetensors files are compressed, in sub-folders too. The index of shards is adapted,
    and all remaining files are copied (.git and .cache are not). The result is the directory that
    -o names, or DIR.tw. After a kill, run the command again: it goes on where it was.

    With --delta-from OLD, a tensor that OLD has too is coded as what changed since. To decompress,
    OLD is needed: in the folder of the result under its name, or named by --base. OLD may be such a
    file of deltas itself.

    All inputs and outputs are checked before anything is written. --force overwrites only what
    tightwire compressed: to replace an uncompressed model or another file, remove it yourself.

    A single FILE can be -, standard input; its result goes to standard output, as with -o -.
    """
    chosen = _codec(codec_name, window)
    bases = _checked_base("--delta-from", files, delta_from)
    in_a_row = 0 if delta_from is None else convert.deltas_in_a_row(delta_from)
    if is_piped(files, output):
        into = partial(
            convert.compress_file,
            codec=chosen,
            cast=cast_dtype(cast),
            threads=threads,
            base=delta_from,
            chain_limit=chain_limit,
        )
        return convert_piped(files, output, PLAIN, into, force=force, as_json=as_json, bases=bases)
    check_sources(files, output, PLAIN, convert.check_plain)
    targets = targets_of(files, output, _compressed_name)
    prepare = partial(
        model_directories.prepare_compress,
        codec=chosen,
        cast=cast_dtype(cast),
        threads=threads,
        force=force,
    )
    works = directories.prepared(targets, prepare, PLAIN)
    check_targets(directories.without(targets, works), force, bases)

    def work(source: Path) -> Done:
        if source in works:
            return directories.run("compress", works[source], PLAIN)
        target = targets[source]
        with (
            about(source, PLAIN),
            writing(source, target),
            progress_bar("compress", source) as progress,
        ):
            reports = convert.compress_file(
                source,
                target,
                chosen,
                cast=cast_dtype(cast),
                threads=threads,
                progress=progress,
                base=delta_from,
                chain_limit=chain_limit,
            )
        before, after = source.stat().st_size, target.stat().st_size
        deltas = sum(report.codec == "delta" for report in reports)
        document = {
            "target": target,
            "source_nbytes": before,
            "target_nbytes": after,
            "ratio": after / before,
            "cast": cast,
            "deltas": deltas,
            "tensors": [asdict(r) | {"ratio": r.ratio} for r in reports],
        }
        sizes = f"{size_text(before)} -> {size_text(after)}, ratio {after / before:.4f}"
        counts = count_text(len(reports))
        if delta_from is not None and in_a_row >= chain_limit:
            why = f"{delta_from} is number {in_a_row} of files of deltas in a row"
            counts += f", all whole as {why} (--chain-limit {chain_limit})"
        elif delta_from is not None:
            counts += f", {deltas} of them as deltas against {delta_from}"
        return document, lambda: say(f"{target}: {counts}, {sizes}")

    return each(files, work, as_json)


def _checked_base(option: str, files: Sequence[Path], base: Path | None) -> list[Path]:
    """`base` and the files that it is against itself, if it is given; see `check_base`."""
    if base is None:
        return []
    check_base(option, files, base)
    with about(base, EITHER):
        return [base, *convert.base_files(base)]


def _compressed_name(source: Path) -> str:
    return f"{source.name}.tw" if source.is_dir() else compressed_name(source.name)


def _codec(name: str, window: str | None) -> Codec:
    if window is None:
        return codec(name)
    if name != "zipccl":
        raise misuse(f"--window is a parameter of zipccl; --codec is {name}")
    with asking():
        return codec(name, window=int(window) if window.isdecimal() else window)


@command(
    "tightwire decompress model.tw.safetensors -o back.safetensors",
    "tightwire decompress model-directory.tw -o back-directory",
    "tightwire decompress step2.tw.safetensors --base old.safetensors -o back.safetensors",
    "tightwire decompress - < model.tw.safetensors > back.safetensors",
)
@input_files
@output_option
@path_option("--base", "The file that deltas are against, if it is not next to FILE.")
@force_option
@threads_option
@json_option
def decompress(
    files: Sequence[Path],
    output: Path | None,
    base: Path | None,
    force: bool,
    threads: int | None,
    as_json: bool,
) -> int:
    """Restore the files and directories that were compressed.

    Every FILE is an input, and every tensor is checked. Without -o the result is next to FILE,
    with .safetensors for .tw.safetensors. Of DIR.tw the result is the directory that -o names, or
    DIR. After a kill, run the command again: it goes on where it was.

    A FILE of deltas needs the file that it is against, which may be such a file too: each is next
    to the one before, under the name that this one knows. A wrong one is refused.

    All inputs and outputs are checked before anything is written. An uncompressed model that is
    there already is never overwritten, not even with --force: remove it yourself.

    A single FILE can be -, standard input; its result goes to standard output, as with -o -.
    """
    bases = _checked_base("--base", files, base)
    if is_piped(files, output):
        into = partial(convert.decompress_file, threads=threads, base=base)
        return convert_piped(
            files, output, COMPRESSED, into, force=force, as_json=as_json, bases=bases
        )

    def check(source: Path) -> None:
        bases.extend(convert.check_compressed(source, base))

    check_sources(files, output, COMPRESSED, check)
    targets = targets_of(files, output, _restored_name)
    prepare = partial(model_directories.prepare_decompress, threads=threads, force=force)
    works = directories.prepared(targets, prepare, COMPRESSED)
    check_targets(directories.without(targets, works), force, bases)

    def work(source: Path) -> Done:
        if source in works:
            return directories.run("decompress", works[source], COMPRESSED)
        target = targets[source]
        with (
            about(source, COMPRESSED),
            writing(source, target),
            progress_bar("decompress", source) as progress,
        ):
            convert.decompress_file(source, target, threads=threads, progress=progress, base=base)
        before, after = source.stat().st_size, target.stat().st_size
        document = {"target": target, "source_nbytes": before, "target_nbytes": after}
        return document, lambda: say(f"{target}: {size_text(before)} -> {size_text(after)}")

    return each(files, work, as_json)


def _restored_name(source: Path) -> str:
    suffix, what = (".tw", "directory") if source.is_dir() else (SUFFIX, "file")
    if not source.name.endswith(suffix) or source.name == suffix:
        raise click.BadParameter(
            f"{source} does not end in {suffix}: name its output {what} with -o"
        )
    return source.name.removesuffix(".tw") if source.is_dir() else restored_name(source.name)
