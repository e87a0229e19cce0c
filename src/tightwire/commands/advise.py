"""advise: whether compressing a collective pays."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .. import units
from ..formats.dtypes import dtype_named
from .command import Function, command, json_option, path_option
from .failures import writing
from .output import print_json, print_table, say, size_text
from .targets import check_plot

if TYPE_CHECKING:
    from ..adapters.collectives.cost import Collective, Device, Line

#: What --collective and --device know; tests compare them with adapters.cost.
COLLECTIVES = ("all_gather", "all_to_all", "reduce_scatter", "all_reduce", "broadcast", "send")
DEVICES = ("h200", "cpu")
#: What --codec knows.
CODECS = ("zipccl", "huffman", "delta")
#: GB/s of encode and of decode by huffman on one thread of a CPU, N(0, 0.02):
#: benchmarks/results/lossless.md.
HUFFMAN_CPU = {
    "bfloat16": (2.09, 3.02),
    "float16": (1.87, 1.94),
    "float32": (1.77, 4.12),
    "float8_e4m3fn": (1.05, 0.93),
}
#: The same of 256 MiB on one H200, and microseconds of 2 MiB of bfloat16, both without checksums:
#: benchmarks/results/entropy_gpu.md.
HUFFMAN_H200 = {
    "bfloat16": (360, 531),
    "float16": (270, 420),
    "float32": (355, 635),
    "float8_e4m3fn": (202, 371),
    "float8_e5m2": (231, 391),
}
HUFFMAN_H200_US = (48.3, 129.4)
#: What the speeds of a codec on --device were recorded on.
_RECORDED = {
    ("zipccl", "h200"): "one NVIDIA H200",
    ("zipccl", "cpu"): "one thread of an AMD EPYC CPU",
    ("huffman", "h200"): "one NVIDIA H200",
    ("huffman", "cpu"): "one thread of a CPU",
}


def _quantity(
    name: str, parse: Callable[[str], Any], what: str, **more: Any
) -> Callable[[Function], Function]:
    """An option that a parser of units.py reads; what it refuses is wrong usage."""

    def parsed(context: click.Context, parameter: click.Parameter, text: str | None) -> Any:
        try:
            return None if text is None else parse(text)
        except ValueError as error:
            raise click.BadParameter(str(error)) from error

    metavar = parse.__name__.removeprefix("parse_").upper()
    return click.option(name, callback=parsed, metavar=metavar, help=what, **more)


@command(
    "tightwire advise --link 25GB/s --message 256MiB --world 8",
    "tightwire advise --link 10Gb/s --message 64MiB --world 4 --collective all_reduce",
    "tightwire advise --link 25GB/s --message 256MiB --simulate --json",
)
@_quantity(
    "--link",
    units.parse_speed,
    "Speed of a rank's link in one direction: 25GB/s, or 200Gb/s in bits.",
    required=True,
)
@_quantity("--message", units.parse_size, "Bytes of one rank's input: 256MiB.", required=True)
@click.option(
    "--world",
    type=click.IntRange(2, 100_000),
    multiple=True,
    help="Number of ranks; repeatable with --simulate.",
)
@click.option("--dtype", default="bfloat16", help="Element type.")
@click.option(
    "--collective",
    type=click.Choice(COLLECTIVES),
    default="all_gather",
    help="What the ranks do.",
)
@_quantity("--latency", units.parse_time, "Time of an empty message.", default="5us")
@_quantity(
    "--gap",
    units.parse_time,
    "Time from one message of a rank to its next; the latency if not given.",
)
@click.option(
    "--device",
    type=click.Choice(DEVICES),
    help="Where the codec's speed was recorded; h200 if not given.",
)
@click.option(
    "--codec",
    "codec_name",
    type=click.Choice(CODECS),
    help="What is sent; zipccl if not given. delta needs --encode, --decode and --ratio.",
)
@_quantity(
    "--encode",
    units.parse_speed,
    "Speed of the codec in tensor bytes, with --decode instead of --device.",
)
@_quantity("--decode", units.parse_speed, "See --encode.")
@_quantity(
    "--startup",
    units.parse_time,
    "Time of encoding or decoding nothing, with --encode; 0 if not given.",
)
@click.option(
    "--ratio",
    type=click.FloatRange(0.001, 10),
    help="Packed over raw bytes; what the codec makes of weights if not given.",
)
@click.option(
    "--pieces", type=click.IntRange(1, 1024), default=16, help="Most pieces of a pipeline."
)
@click.option(
    "--simulate",
    is_flag=True,
    help="Compare algorithms of all_reduce, all_gather or all_to_all instead, on 8 to "
    "100000 ranks if --world is not given.",
)
@click.option(
    "--error",
    type=click.FloatRange(0, 1),
    default=0.0,
    help="With --simulate: vNMSE of one encoding by a lossy codec of fixed rate.",
)
@click.option(
    "--sum-dtype",
    help="With --simulate: type that sums are rounded to; float32 if not given.",
)
@click.option(
    "--node",
    type=click.IntRange(min=1),
    help="With --node-link: ranks of one node; 8 if not given.",
)
@_quantity(
    "--node-link",
    units.parse_speed,
    "Speed inside a node: between nodes alone it is that of --link. With --simulate it adds the "
    "algorithm of nodes.",
)
@_quantity(
    "--node-latency",
    units.parse_time,
    "With --node-link: time of an empty message inside a node; 1us if not given.",
)
@path_option("--plot", "Draw a PNG: speedup over message size.")
@json_option
def advise(
    link: float,
    message: int,
    world: Sequence[int],
    dtype: str,
    collective: Collective,
    latency: float,
    gap: float | None,
    device: Device | None,
    codec_name: str | None,
    encode: float | None,
    decode: float | None,
    startup: float | None,
    ratio: float | None,
    pieces: int,
    simulate: bool,
    error: float,
    sum_dtype: str | None,
    node: int | None,
    node_link: float | None,
    node_latency: float | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Say whether compressing a collective is worth it.

    It uses the cost model that collectives choose by: a latency and a speed for link and codec. It
    compares the native call, the compressed one, and a pipeline, where one piece is encoded while
    another is sent. --encode, --decode and --ratio describe any codec; without them it is --codec,
    with the speeds recorded on --device.
    """
    from ..adapters.collectives import advice
    from ..adapters.collectives.cost import Line, Link, Model, Node

    kind = dtype_named(dtype)
    if not message:
        raise click.BadParameter("--message is 0 bytes. Allowed: 1 byte or more")
    if (encode is None) != (decode is None):
        raise click.BadParameter("--encode and --decode: give both or none of them")
    if encode is not None and decode is not None:
        if device is not None:
            raise click.BadParameter("--device and --encode: give one of them")
        lines = Line(startup or 0.0, 1 / encode), Line(startup or 0.0, 1 / decode)
        speeds = f"encode {encode / 1e9:.4g} GB/s, decode {decode / 1e9:.4g} GB/s"
        codec, assumed = codec_name, f"{codec_name or 'as given'}, {speeds}"
    else:
        if startup is not None:
            raise click.BadParameter("--startup needs --encode and --decode")
        device, codec = device or "h200", codec_name or "zipccl"
        lines = _recorded_lines(codec, device, kind.name)
        assumed = f"{codec}, speed recorded on {_RECORDED[codec, device]}"
    if ratio is None:
        ratio = _ratio(codec_name or "zipccl", kind.name)
    network = Link(latency, 1 / link, gap)
    nodes = None
    if node_link is not None:
        nodes = Node(node or 8, Link(1e-6 if node_latency is None else node_latency, 1 / node_link))
    elif node is not None or node_latency is not None:
        raise click.BadParameter("--node and --node-latency need --node-link")
    document: dict[str, Any] = {
        "codec": codec,
        "device": device,
        "collective": collective,
        "message_nbytes": message,
        "dtype": kind.name,
        "ratio": ratio,
        "link": asdict(network),
        "node": nodes and asdict(nodes),
        "encode": asdict(lines[0]),
        "decode": asdict(lines[1]),
    }
    if simulate:
        if plot is not None:
            raise click.BadParameter("--plot and --simulate: give one of them")
        sums = sum_dtype or "float32"
        _simulate(document, world, network, lines, error, sums, nodes, None if as_json else assumed)
        return
    if error or sum_dtype is not None:
        raise click.BadParameter("--error and --sum-dtype need --simulate")
    if len(world) != 1:
        raise click.BadParameter(
            f"--world is given {len(world)} times. Needed: once, or any number with --simulate"
        )
    if nodes is not None and world[0] % nodes.size:
        raise click.BadParameter(
            f"--world is {world[0]}. Allowed: multiples of --node, {nodes.size}"
        )
    if plot is not None:
        check_plot(None, plot)
    model = Model.of(collective, world[0], network, *lines, node=nodes)
    found = advice.advise(model, message, ratio, pieces)
    ranks = f"{world[0]} ranks" + ("" if nodes is None else f" in nodes of {nodes.size}")
    title = f"{collective} of {kind.name}, {ranks}, ratio {ratio:.3f}"
    if plot is not None:
        with writing(None, plot):
            advice.plot_speedups(model, ratio, pieces, message, title, plot)
    if as_json:
        fields = asdict(found)
        fields |= fields.pop("choice")
        del fields["native_seconds"]
        print_json(
            document | {"world": world[0]} | fields | {"speedup": found.speedup, "plot": plot}
        )
        return
    say(f"codec: {assumed}")
    _show_advice(title, message, found)
    if plot is not None:
        say(f"plot: {plot}")


def _recorded_lines(codec_name: str, device: Device, dtype: str) -> tuple[Line, Line]:
    """Times of encoding and decoding one tensor."""
    from ..adapters.collectives.cost import Line, codec_lines, fit

    if codec_name == "zipccl":
        return codec_lines(device, dtype)
    if (codec_name, device) not in _RECORDED:
        raise click.BadParameter(
            f"no speed of {codec_name} on {device} is recorded. Needed: --encode and --decode"
        )
    on_gpu = device == "h200"
    recorded = HUFFMAN_H200 if on_gpu else HUFFMAN_CPU
    if dtype not in recorded:
        raise click.BadParameter(
            f"no speed of huffman for {dtype} is recorded; there are {', '.join(recorded)}. "
            "Needed: --encode and --decode"
        )
    encode, decode = (1e-9 / gbps for gbps in recorded[dtype])
    if not on_gpu:
        return Line(0.0, encode), Line(0.0, decode)
    small, large = 2 << 20, 256 << 20
    starts = [(small, 1e-6 * us) for us in HUFFMAN_H200_US]
    return fit([starts[0], (large, large * encode)]), fit([starts[1], (large, large * decode)])


def _ratio(codec_name: str, dtype: str) -> float:
    """Packed over raw bytes of weights."""
    from ..adapters.collectives.cost import ENTROPY_RATIOS, expected_ratio

    if codec_name == "delta":
        raise click.BadParameter("--codec delta needs --ratio, as diff or bench gives it")
    known = dtype.replace("fnuz", "fn") in ENTROPY_RATIOS
    if codec_name == "huffman" and not known:
        raise click.BadParameter(
            f"what huffman makes of {dtype} depends on the data. Needed: --ratio, as bench gives it"
        )
    return expected_ratio(codec_name, dtype)


def _show_advice(title: str, nbytes: int, found: Any) -> None:
    from ..adapters.collectives.cost import duration

    times = [("native", found.native_s), ("compressed", found.compressed_s)]
    if found.pipelined_s is not None:
        times.append((f"pipelined, {found.pipelined_pieces} pieces", found.pipelined_s))
    rows = [[name, duration(s), f"{found.native_s / s:.3f}" if s else "-"] for name, s in times]
    say(f"{title}, {size_text(nbytes)} each")
    print_table(("<algorithm", "time", "speedup"), rows)
    say(f"advice: {found.choice.algorithm}: {found.choice.reason}")
    at = found.crossover_nbytes
    say("compressing never pays" if at is None else f"compressing pays from {size_text(at)} on")


def _simulate(
    document: dict[str, Any],
    worlds: Sequence[int],
    link: Any,
    lines: tuple[Any, Any],
    error: float,
    sum_dtype: str,
    node: Any,
    assumed: str | None,
) -> None:
    """Print the table, as JSON if `assumed`, the words for the codec, is None."""
    from ..adapters.collectives.cost import duration
    from ..adapters.collectives.simulate import (
        ALGORITHMS,
        WORLDS,
        Coding,
        rounding_error,
        table,
    )

    collective, ratio = document["collective"], document["ratio"]
    if collective not in ALGORITHMS:
        allowed = ", ".join(ALGORITHMS)
        raise click.BadParameter(
            f"--collective is {collective}. Allowed with --simulate: {allowed}"
        )
    sums = dtype_named(sum_dtype)
    if not sums.is_float:
        raise click.BadParameter(f"--sum-dtype is {sums.name}. Allowed: floats, as bfloat16")
    # Where sizes depend on the data, chunk descriptors, static and dynamic parts are sent in turn.
    codec = Coding(ratio, *lines, error=error, rounds=1 if error else 3)
    rows = table(
        collective,
        document["message_nbytes"],
        link,
        codec,
        worlds or WORLDS,
        rounding=rounding_error(sums.mantissa + 1),
        node=node,
    )
    if assumed is None:
        # JSON has no infinity.
        shown = [
            row._asdict()
            | {
                name: {k: v if math.isfinite(v) else None for k, v in asdict(result).items()}
                for name, result in (("native", row.native), ("compressed", row.compressed))
            }
            for row in rows
        ]
        more = {"error": error, "sum_dtype": sums.name}
        print_json(document | more | {"rows": shown})
        return
    say(
        f"codec: {assumed}",
        f"{collective} of {size_text(document['message_nbytes'])} of {document['dtype']} per rank, "
        f"ratio {ratio:.3f}, vNMSE of an encoding {error:g}, sums in {sums.name}",
    )
    columns = ("<algorithm", "ranks", "native", "compressed", "speedup", "sent", "compressed")
    print_table(
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
                size_text(round(row.native.wire_bytes)),
                size_text(round(row.compressed.wire_bytes)),
                f"{row.native.vnmse:.2g}",
                f"{row.compressed.vnmse:.2g}",
            ]
            for row in rows
        ],
    )
