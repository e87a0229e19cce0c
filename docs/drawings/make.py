"""The drawings of the documentation, from the real layout: `python docs/drawings/make.py`.

A test checks that the files here are what this program writes.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

import ml_dtypes
import numpy as np

import tightwire as tw
from tightwire.codecs.zipccl import COLUMNS, ROWS, fields_of
from tightwire.formats.dtypes import BY_NAME
from tightwire.formats.header import RECORD, SECTION_KINDS

HERE = Path(__file__).resolve().parent
#: All drawings are this wide, so that their text is readable on a telephone.
WIDTH = 440
#: The 48 bytes that say what a chunk on the wire is: two words and its result record.
DESCRIPTOR = 16 + RECORD.itemsize

STYLE = """
text { font: 14px system-ui, sans-serif; fill: #1f2328; }
.small { font-size: 12.5px; fill: #59636e; }
.bold { font-weight: 600; }
.middle { text-anchor: middle; }
.end { text-anchor: end; }
.page { fill: #ffffff; }
.line { stroke: #59636e; fill: none; stroke-width: 1.2; }
.head { fill: #59636e; }
.grey { fill: #e6e8eb; stroke: #8b949e; }
.blue { fill: #d3e5ff; stroke: #3b82d0; }
.green { fill: #d0f0d9; stroke: #36a05a; }
.orange { fill: #ffe2c2; stroke: #d07a25; }
.none { fill: none; stroke: #8b949e; }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3; }
.small { fill: #a8b1bb; }
.page { fill: #131416; }
.line { stroke: #a8b1bb; }
.head { fill: #a8b1bb; }
.grey { fill: #2d333b; stroke: #6e7681; }
.blue { fill: #12355c; stroke: #4b8fd8; }
.green { fill: #143d23; stroke: #3fa35f; }
.orange { fill: #54300c; stroke: #d0853b; }
}
"""


class Drawing:
    """Shapes and text, put together as one SVG file."""

    def __init__(self, title: str, height: int) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
            f'width="{WIDTH}" height="{height}" role="img">',
            f"<title>{escape(title)}</title>",
            f"<style>{STYLE}</style>",
            f'<rect class="page" width="{WIDTH}" height="{height}" rx="6"/>',
        ]

    def text(self, x: float, y: float, words: str, style: str = "") -> None:
        """Words with their baseline at `y`."""
        self.parts.append(f'<text x="{x:g}" y="{y:g}" class="{style}">{escape(words)}</text>')

    def box(
        self, x: float, y: float, width: float, height: float, style: str, words: str = ""
    ) -> None:
        """A rectangle with words in its middle."""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" class="{style}"/>'
        )
        if words:
            self.text(x + width / 2, y + height / 2 + 4.5, words, "middle")

    def line(self, *points: tuple[float, float]) -> None:
        """A line through the points."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self.parts.append(f'<polyline class="line" points="{path}"/>')

    def arrow(self, x: float, y: float, to_x: float, to_y: float) -> None:
        """A straight arrow, across or down."""
        self.line((x, y), (to_x, to_y))
        if y == to_y:
            back = 7 if x > to_x else -7
            corners = f"{to_x},{y} {to_x + back},{y - 4} {to_x + back},{y + 4}"
        else:
            corners = f"{x},{to_y} {x - 4},{to_y - 7} {x + 4},{to_y - 7}"
        self.parts.append(f'<polygon class="head" points="{corners}"/>')

    def bracket(self, x: float, top: float, bottom: float, *words: str) -> None:
        """A bracket on the right of something, and what it says of it."""
        self.line((x, top), (x + 6, top), (x + 6, bottom), (x, bottom))
        first = (top + bottom) / 2 + 4 - 7.5 * (len(words) - 1)
        for i, line in enumerate(words):
            self.text(x + 12, first + 15 * i, line, "small")

    def svg(self) -> str:
        """The file."""
        return "\n".join([*self.parts, "</svg>", ""])


def example() -> tw.Buffer:
    """The buffer of the drawings: a million bfloat16 numbers in four chunks."""
    x = np.random.default_rng(0).normal(0, 0.02, 1_000_000).astype(ml_dtypes.bfloat16)
    return tw.encode(x, "zipccl", chunks=4, backend="ref")


def buffer_drawing(buf: tw.Buffer) -> str:
    """The bytes of a packed buffer, from the first to the last."""
    packed = bytes(buf)
    info = tw.inspect(packed)
    plan = buf.plan
    raw = info.raw_nbytes
    kinds = {number: name for name, number in SECTION_KINDS.items()}
    sections = [s for s in plan.layout.sections if not s.dynamic]
    title = f"A zipccl buffer of {plan.nelem:,} bfloat16 numbers in {plan.chunks} chunks"
    d = Drawing(title, 500)
    d.text(14, 24, f"{plan.nelem:,} bfloat16 numbers in {plan.chunks} chunks, packed", "bold")
    d.text(74, 46, "byte", "small end")
    left, width, right = 82, 206, 294
    y = 54.0

    def row(at: int | str, height: float, style: str, words: str) -> None:
        nonlocal y
        d.text(left - 8, y + 12, f"{at:,}" if isinstance(at, int) else at, "small end")
        d.box(left, y, width, height, style, words)
        y += height

    row(0, 30, "grey", f"header: {plan.header.nbytes} bytes")
    records = RECORD.itemsize * plan.chunks
    row(plan.header.nbytes, 30, "grey", f"records: {plan.chunks} x {RECORD.itemsize} bytes")
    row(plan.header.nbytes + records, 18, "none", "")
    d.text(left + width / 2, y - 5, "zeros up to a multiple of 128", "small middle")
    d.bracket(right, 55, 83, "dtype, shape, codec")
    d.bracket(right, 86, 112, "checksums, sizes")
    top = y
    first, second = sections
    row(plan.static_range(0).start, 44, "blue", f"{kinds[first.kind]}: {first.nbytes:,} bytes")
    row(plan.static_range(0).start + first.nbytes, 24, "blue", f"index: {second.nbytes} bytes")
    assert kinds[second.kind] == "index"
    for i in range(1, plan.chunks):
        row(plan.static_range(i).start, 36, "blue", f"static part of chunk {i}")
    d.bracket(right, top + 1, top + 67, "static part of", f"chunk 0: {plan.static_stride:,}")
    d.bracket(right, top + 70, y - 1, "each as long: sizes", "follow from the plan")
    top = y
    at = plan.dynamic_offset
    for i, used in enumerate(info.dynamic_nbytes):
        row(at, 30, "orange", f"dynamic part {i}: {used:,} bytes")
        at += -(-used // 128) * 128
    d.bracket(right, top + 1, y - 1, "escapes: the sizes", "depend on the data")
    d.text(left - 8, y + 12, f"{at:,}", "small end")
    assert at == info.nbytes == len(packed)
    d.text(left, y + 28, f"{at:,} of {raw:,} bytes: {at / raw:.1%}", "bold")
    d.text(left, y + 44, "Heights are not to scale.", "small")
    return d.svg()


def tile_drawing() -> str:
    """One number, the 8 x 512 tile, and the planes of its codes."""
    f = fields_of(BY_NAME["bfloat16"])
    d = Drawing(f"The {ROWS} x {COLUMNS} tile of zipccl and its planes", 560)
    d.text(14, 24, "1. One bfloat16 number", "bold")
    bit = 25.5
    left = 16.0
    d.box(left, 36, bit, 26, "green", "s")
    d.box(left + bit, 36, bit * f.exponent, 26, "orange", f"exponent: {f.exponent} bits")
    d.box(left + bit * 9, 36, bit * f.mantissa, 26, "green", f"mantissa: {f.mantissa} bits")
    d.arrow(left + bit * 5, 62, left + bit * 5, 84)
    d.arrow(left + bit * 12.5, 62, left + bit * 12.5, 84)
    d.box(left + bit, 86, bit * f.exponent, 26, "blue", "code: its low 3 bits")
    d.box(left + bit * 9, 86, bit * f.mantissa, 26, "green", "sign + mantissa: 8 bits")
    d.text(left, 130, "An exponent outside the tile's window of seven is an escape:", "small")
    d.text(left, 145, "the code says so, and the exponent goes to the dynamic part.", "small")

    d.text(
        14, 178, f"2. A tile: {ROWS} rows x {COLUMNS} columns = {ROWS * COLUMNS} numbers", "bold"
    )
    cell, gap, top = 38.0, 34.0, 206.0
    columns = ["0", "1", "2", "3", None, str(COLUMNS - 3), str(COLUMNS - 2), str(COLUMNS - 1)]
    x, places = 56.0, {}
    for column in columns:
        if column is None:
            d.text(x + gap / 2, top + 84, "...", "middle")
            x += gap
            continue
        places[column] = x
        d.text(x + cell / 2, top - 6, column, "small middle")
        for r in range(ROWS):
            number = r * COLUMNS + int(column)
            style = "blue" if column == "2" else "grey"
            d.box(x, top + 20 * r, cell, 20, style)
            d.text(x + cell / 2, top + 20 * r + 14, str(number), "small middle")
        x += cell
    for r in range(ROWS):
        d.text(48, top + 20 * r + 14, f"row {r}", "small end")

    d.text(14, 400, "3. Byte 2 of a plane: a bit of each code in column 2", "bold")
    d.line((places["2"] + cell / 2, top + 160), (places["2"] + cell / 2, 384))
    for r in range(ROWS):
        d.box(16 + 51 * r, 412, 51, 24, "blue", f"row {ROWS - 1 - r}")
        d.text(16 + 51 * r + 25.5, 450, f"bit {ROWS - 1 - r}", "small middle")

    block = f.block_nbytes(COLUMNS)
    stream = ROWS * COLUMNS * sum(f.streams)
    d.text(14, 484, f"4. The tile's block: {block:,} of {2 * ROWS * COLUMNS:,} bytes", "bold")
    d.box(16, 496, 180, 30, "green", f"stream: {stream:,} bytes")
    assert block == stream + f.planes * COLUMNS
    for plane in range(f.planes):
        d.box(196 + 76 * plane, 496, 76, 30, "blue", f"plane {plane}")
    d.text(16, 544, f"A plane is {COLUMNS} bytes: one bit of the code of every number.", "small")
    return d.svg()


def wire_drawing(buf: tw.Buffer) -> str:
    """What one rank sends another in a collective."""
    plan = buf.plan
    stride = plan.static_stride
    d = Drawing("Static and dynamic parts on the wire in an all-to-all", 490)
    d.text(14, 24, "All-to-all: rank 0 sends chunk 2 to rank 2", "bold")
    d.text(77, 50, "buffer of rank 0:", "small middle")
    d.text(77, 65, "a chunk for each rank", "small middle")
    d.text(363, 50, "buffer of rank 2:", "small middle")
    d.text(363, 65, "a chunk from each rank", "small middle")
    left, right, width, high, top = 12.0, 298.0, 130.0, 32.0, 74.0
    mine, theirs = 2, 0
    parts = top + 54
    for x, chosen, word in ((left, mine, "for"), (right, theirs, "from")):
        d.box(x, top, width, 54, "grey", "records")
        for i in range(plan.chunks):
            name = f"{word} rank {i}"
            static, dynamic = ("blue", "orange") if i == chosen else ("none", "none")
            d.box(x, parts + high * i, width, high, static, f"static {name}")
            d.box(x, parts + high * (plan.chunks + i), width, high, dynamic, f"dyn. {name}")

    def travels(y_from: float, y_to: float, what: str, size: str) -> None:
        bend = 158.0
        d.line((left + width, y_from), (bend, y_from), (bend, y_to))
        d.arrow(bend, y_to, right, y_to)
        d.text(164, y_to - 7, what, "bold")
        d.text(164, y_to + 15, size, "small")

    travels(top + 27, top + 27, "1. descriptor", f"{DESCRIPTOR} bytes")
    static = parts + high / 2
    travels(static + high * mine, static + high * theirs, "2. static part", f"{stride:,} bytes")
    dynamic = static + high * plan.chunks
    size = f"{int(buf.sizes[mine]):,} bytes"
    travels(dynamic + high * mine, dynamic + high * theirs, "3. dynamic part", size)
    y = parts + high * 2 * plan.chunks
    d.text(12, y + 26, "1 says which call this is, and how long 3 will be.")
    d.text(12, y + 46, "2 has a size that both ranks know from the plan.")
    d.text(12, y + 66, "3 has only the bytes that this chunk needs.")
    d.text(12, y + 86, "All arrive where they are decoded, without a copy.")
    return d.svg()


def architecture_drawing() -> str:
    """The layers of the library, and which imports which."""
    d = Drawing("The layers of tightwire: adapters, core, codecs, formats", 424)
    layers = [
        (
            "adapters",
            "green",
            "Communicator, transports, DDP, FSDP2,",
            "tensor parallel, Hugging Face",
        ),
        (
            "src/tightwire",
            "blue",
            "encode, decode, Buffer, files, command line:",
            "headers, records, checksums, raw fallback",
        ),
        (
            "codecs",
            "orange",
            "x.py: parameters, layout, NumPy reference",
            "x_cpu.py: Numba    x_triton.py: GPU",
        ),
        (
            "formats",
            "grey",
            "header, sections, checksum, dtypes,",
            "codec ids, the safetensors container",
        ),
    ]
    y = 16.0
    for i, (name, style, *lines) in enumerate(layers):
        d.box(16, y, 300, 74, style)
        d.text(28, y + 22, name, "bold")
        for j, line in enumerate(lines):
            d.text(28, y + 43 + 17 * j, line, "small")
        if i < len(layers) - 1:
            d.arrow(166, y + 74, 166, y + 104)
            d.text(176, y + 93, "imports", "small")
        y += 104
    d.box(332, 16 + 208, 94, 122, "none")
    for j, line in enumerate(("specs", "a page for", "each codec:", "it defines", "the bytes")):
        d.text(344, 246 + 22 * j, line, "small" if j else "bold")
    return d.svg()


def drawings() -> dict[str, str]:
    """Every drawing by the name of its file."""
    buf = example()
    return {
        "buffer.svg": buffer_drawing(buf),
        "tile.svg": tile_drawing(),
        "wire.svg": wire_drawing(buf),
        "architecture.svg": architecture_drawing(),
    }


if __name__ == "__main__":
    for name, svg in drawings().items():
        (HERE / name).write_text(svg)
