"""What `tightwire advise` computes: a verdict of the cost model, and its plot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ...storage import PathLike, save_figure
from .cost import MAX_PIECES, Choice, Model

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
        return _speedup(self.choice)


def advise(model: Model, nbytes: int, ratio: float, max_pieces: int = MAX_PIECES) -> Advice:
    """The verdict on messages of `nbytes` bytes per rank. Raises ValueError."""
    seconds, pieces = _pipelined(model, nbytes, ratio, max_pieces)
    return Advice(
        model.native.seconds(nbytes),
        model.compressed(nbytes, ratio),
        seconds,
        pieces,
        model.choose(nbytes, ratio, max_pieces),
        model.crossover(ratio, max_pieces),
    )


def _pipelined(
    model: Model, nbytes: int, ratio: float, max_pieces: int
) -> tuple[float, int] | tuple[None, None]:
    pieces = [1 << i for i in range(1, max_pieces.bit_length())]
    return min(((model.pipelined(nbytes, ratio, n), n) for n in pieces), default=(None, None))


def _speedup(choice: Choice) -> float:
    return choice.native_seconds / choice.seconds if choice.seconds else 1.0


def plot_speedups(
    model: Model, ratio: float, max_pieces: int, nbytes: int, title: str, path: PathLike
) -> None:
    """Draw native time over that of each path against message size. Needs matplotlib."""
    from matplotlib.figure import Figure

    sizes = [int(n) for n in np.geomspace(*PLOTTED, 200)]
    native = np.array([model.native.seconds(n) for n in sizes])
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes: Any = figure.subplots()
    axes.axhline(1, color="black", linewidth=0.8, label="native")
    axes.plot(sizes, native / [model.compressed(n, ratio) for n in sizes], label="compressed")
    if max_pieces > 1:
        pipelined = [_pipelined(model, n, ratio, max_pieces)[0] for n in sizes]
        axes.plot(sizes, native / pipelined, label="pipelined")
    choices = [model.choose(n, ratio, max_pieces) for n in sizes]
    axes.plot(sizes, [_speedup(choice) for choice in choices], "k:", label="advised")
    axes.axvline(nbytes, color="tab:gray", linewidth=0.8, linestyle="--", label="this message")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("bytes of one rank's input")
    axes.set_ylabel("native time / time")
    axes.set_ylim(bottom=0)
    axes.set_title(title)
    axes.legend()
    save_figure(figure, path)
