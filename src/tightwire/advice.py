"""What `tightwire advise` computes: a verdict of the cost model, and its plot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .adapters.cost import MAX_PIECES, Choice, Model
from .bench import save_figure
from .files import PathLike

#: Message sizes that a plot shows, bytes.
PLOTTED = 1 << 10, 1 << 34


@dataclass(frozen=True)
class Advice:
    """Seconds of the three paths for one message, and what to do.

    `pipelined_s` is the best time in 2, 4, ... pieces, None if no more than one is allowed;
    `crossover_nbytes` is the message from which on compressing pays, None if it never does.
    """

    native_s: float
    compressed_s: float
    pipelined_s: float | None
    pipelined_pieces: int | None
    choice: Choice
    crossover_nbytes: int | None

    @property
    def speedup(self) -> float:
        """Native time over that of the choice; 1.0 where there is nothing to move."""
        return self.native_s / self.choice.seconds if self.choice.seconds else 1.0


def advise(model: Model, nbytes: int, ratio: float, max_pieces: int = MAX_PIECES) -> Advice:
    """The verdict on messages of `nbytes` bytes per rank. Raises ValueError."""
    pieces = [1 << i for i in range(1, max_pieces.bit_length())]
    times = [(model.pipelined(nbytes, ratio, n), n) for n in pieces]
    seconds, best = min(times) if times else (None, None)
    return Advice(
        model.native.seconds(nbytes),
        model.compressed(nbytes, ratio),
        seconds,
        best,
        model.choose(nbytes, ratio, max_pieces),
        model.crossover(ratio, max_pieces),
    )


def plot_speedups(
    model: Model, ratio: float, max_pieces: int, nbytes: int, title: str, path: PathLike
) -> None:
    """Draw native time over that of each path against message size. Needs matplotlib."""
    from matplotlib.figure import Figure

    sizes = np.geomspace(*PLOTTED, 200)
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes: Any = figure.subplots()
    found = [advise(model, int(n), ratio, max_pieces) for n in sizes]
    native = np.array([a.native_s for a in found])
    axes.axhline(1, color="black", linewidth=0.8, label="native")
    axes.plot(sizes, native / [a.compressed_s for a in found], label="compressed")
    if max_pieces > 1:
        axes.plot(sizes, native / [a.pipelined_s for a in found], label="pipelined")
    axes.plot(sizes, [a.speedup for a in found], "k:", label="advised")
    axes.axvline(nbytes, color="tab:gray", linewidth=0.8, linestyle="--", label="this message")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("bytes of one rank's input")
    axes.set_ylabel("native time / time")
    axes.set_ylim(bottom=0)
    axes.set_title(title)
    axes.legend()
    save_figure(figure, path)
