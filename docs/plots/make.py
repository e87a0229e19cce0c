"""Draw the plots of docs/choosing-a-codec.md from recorded results.

    python docs/plots/make.py

Writes SVG files beside this file. Greys and colours are chosen to be read on light and on dark
pages; the background is clear.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib.figure import Figure

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parents[1] / "benchmarks" / "results"
GREY = "#7d7d7d"
BITS = "bits of an element, scales included"


class Family(NamedTuple):
    """How the points of one codec look."""

    color: str
    marker: str


FAMILIES = {
    "mx": Family("#2f87d8", "o"),
    "nvfp4": Family("#3fa34d", "s"),
    "taco": Family("#d9742b", "^"),
    "sdp4bit": Family("#a06cd5", "D"),
    "tahquant": Family("#d64f7f", "v"),
    "dynamiq": Family("#1f9e9e", "P"),
}
#: The parameters of a point, as its label says them: method in error.json -> label.
SHOWN = {
    "mx e4m3": "e4m3",
    "mx int8": "int8",
    "mx e3m2": "e3m2",
    "mx e2m3": "e2m3",
    "mx e2m1": "e2m1",
    "nvfp4": "",
    "taco ash e4m3": "e4m3",
    "taco hadamard int8": "int8",
    "sdp4bit int8": "8 bits",
    "sdp4bit int4": "4 bits",
    "tahquant": "forward",
    "tahquant backward": "backward",
    "dynamiq 5 bits": "5 bits",
}
#: Which way from its point a label goes, in points; to the right and up if not listed.
OFFSETS = {
    "mx e4m3": (6, 5),
    "mx e2m1": (-31, -3),
    "mx e3m2": (6, 4),
    "mx int8": (6, 3),
    "taco ash e4m3": (6, -9),
    "taco hadamard int8": (6, -9),
    "sdp4bit int8": (-36, -3),
    "sdp4bit int4": (-36, -3),
    "tahquant": (6, 4),
}
PANELS = {"long-tailed": "values with long tails", "block-local": "neighbours of like size"}
#: Codecs with a line of their own: the labels of their rows in dynamiq.json.
SUMS = {
    "dynamiq": [f"dynamiq any, {bits} bits" for bits in ("3", "4", "5", "5.5", "6", "7", "8")],
    "mx": ["MXFP4", "MXFP6", "MXFP8"],
}


def main() -> None:
    """Write all plots."""
    mpl.rcParams.update(
        {
            "axes.edgecolor": GREY,
            "axes.labelcolor": GREY,
            "axes.titlecolor": GREY,
            "font.size": 9,
            "legend.labelcolor": GREY,
            "svg.hashsalt": "tightwire",
            "text.color": GREY,
            "xtick.color": GREY,
            "ytick.color": GREY,
        }
    )
    save(one_encoding(read("error.json")), "error.svg")
    save(sums(read("dynamiq.json")), "sums.svg")


def read(name: str) -> Any:
    """The recorded results in `name`."""
    return json.loads((RESULTS / name).read_text())


def save(figure: Figure, name: str) -> None:
    """Write `figure` as SVG, the same bytes each time."""
    figure.savefig(HERE / name, transparent=True, metadata={"Date": None})


def one_encoding(results: Any) -> Figure:
    """Error of one encoding against bits of an element, a panel for each kind of data."""
    figure = Figure(figsize=(5.4, 7.8), layout="constrained")
    panels = figure.subplots(len(PANELS), 1, sharex=True, sharey=True)
    for axes, (data, title) in zip(panels, PANELS.items(), strict=True):
        for method, label in SHOWN.items():
            row = results["codecs"][data][method]
            family = FAMILIES[method.split()[0]]
            at = row["bits"], row["vnmse"]
            axes.plot(*at, family.marker, color=family.color, markersize=7)
            axes.annotate(
                label,
                at,
                OFFSETS.get(method, (6, 4)),
                textcoords="offset points",
                color=family.color,
                fontsize=8,
            )
        frame(axes, title)
        axes.set_ylabel("vNMSE of one encoding")
    panels[-1].set_xlabel(BITS)
    legend(panels[0])
    return figure


def sums(results: Any) -> Figure:
    """Error of a sum over 8 ranks against bits of an element, for gradients of a GPT."""
    rows = {r["label"]: r for r in results["rows"].values() if r["table"] == "schemes"}
    figure = Figure(figsize=(5.4, 4.2), layout="constrained")
    axes = figure.subplots()
    for name, labels in SUMS.items():
        family = FAMILIES[name]
        bits = [rows[x]["bits"] for x in labels]
        errors = [fmean(rows[x]["vnmse"]["GPT"]) for x in labels]
        axes.plot(bits, errors, f"{family.marker}-", color=family.color, label=name)
    frame(axes, "sum of 8 ranks' gradients by ring")
    axes.set_xlabel(BITS)
    axes.set_ylabel("vNMSE of the sum")
    axes.legend(frameon=False)
    return figure


def frame(axes: Any, title: str) -> None:
    """What all plots have in common."""
    axes.set_yscale("log")
    axes.set_xlim(2.5, 9.3)
    axes.set_title(title, fontsize=10)
    axes.grid(color=GREY, alpha=0.25, linewidth=0.6)


def legend(axes: Any) -> None:
    """A legend of all codecs, whatever is drawn in `axes`."""
    for name, family in FAMILIES.items():
        axes.plot([], [], family.marker, color=family.color, label=name)
    axes.legend(frameon=False, loc="upper right")


if __name__ == "__main__":
    main()
