"""An encoder of specs/nvfp4.md in plain arithmetic, and wrong readings of it that vectors catch."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import tightwire as tw

SPECS = Path(__file__).resolve().parents[2] / "specs"
F4 = np.float32
LARGEST = F4(np.finfo(F4).max)
C = F4(float.fromhex("0x1.555556p-3"))
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E4M3 = np.array(
    [m * 2.0**-9 if t == 0 else (8 + m) * 2.0 ** (t - 10) for t, m in np.ndindex(16, 8)]
)
E4M3 = E4M3[:127]
VECTORS = sorted(p.stem for p in (SPECS / "vectors" / "nvfp4").glob("*.input"))

#: Of each wrong reading: what it does otherwise than `encode`.
READINGS: dict[str, dict[str, Any]] = {
    "scale_ties": {"scale_ties_away": True},
    "code_ties": {"code_ties_away": True},
    "g_by_6": {"scale": lambda a, g: a * (g / F4(6))},
    "ag_times_c": {"scale": lambda a, g: (a * g) * C},
    "ag_by_6": {"scale": lambda a, g: (a * g) / F4(6)},
    "a_by_6": {"scale": lambda a, g: (a / F4(6)) * g},
    "x_by_quotient": {"element": lambda x, s, g: x / (s / g)},
    "g_by_s": {"element": lambda x, s, g: x * (g / s)},
}


def nearest(value: float, table: npt.NDArray[np.float64], ties_away: bool) -> int:
    """The code of the nearest value, at a tie the even one or, by mistake, the larger one."""
    distance = np.abs(table - value)
    low, *high = np.flatnonzero(distance == distance.min()).tolist()
    return high[0] if high and (ties_away or low % 2) else int(low)


def product(x: F4, s: F4, g: F4) -> F4:
    return x * (min(F4(1) / (s / g), LARGEST) if s else LARGEST)


def encode(
    x: npt.NDArray[np.float32],
    scale: Callable[[F4, F4], F4] = lambda a, g: a * (g * C),
    element: Callable[[F4, F4, F4], F4] = product,
    scale_ties_away: bool = False,
    code_ties_away: bool = False,
) -> tuple[F4, list[int], list[int]]:
    """The tensor scale, the codes and the scale codes of a tensor."""
    finite = np.abs(x[np.isfinite(x)])
    largest = finite.max() if finite.size else F4(0)
    g = min(F4(2688) / largest, LARGEST) if largest else F4(1)
    codes, scales = [], []
    for block in np.split(x, range(16, x.size, 16)):
        if not np.isfinite(block).all():
            scales.append(127)
            codes += [0] * block.size
            continue
        wanted = min(scale(np.abs(block).max(), g), F4(448))
        scales.append(nearest(float(wanted), E4M3, scale_ties_away))
        s = F4(E4M3[scales[-1]])
        for v in block:
            y = element(v, s, g) if s else product(v, s, g)
            magnitude = min(abs(float(y)), 6.0)
            codes.append(nearest(magnitude, E2M1, code_ties_away) | 8 * int(np.signbit(v)))
    return g, codes, scales


def matches(name: str, **reading: Any) -> bool:
    """Whether an encoder gives the static parts of a vector's buffer."""
    path = SPECS / "vectors" / "nvfp4" / name
    data = path.with_suffix(".tw").read_bytes()
    header = tw.inspect(data).header
    x = np.frombuffer(path.with_suffix(".input").read_bytes(), header.dtype.numpy).astype(F4)
    with np.errstate(all="ignore"):
        g, codes, scales = encode(x, **reading)
    padded = np.array([*codes, *[0] * (len(codes) % 2)], np.uint8)
    payload = (padded[0::2] | padded[1::2] << 4).tobytes()
    words = np.array([g], "<f4").tobytes() + bytes(12) + bytes(scales)
    static = payload.ljust(header.sections[0].nbytes, b"\0") + words
    return data[128:] == static.ljust(len(data) - 128, b"\0")


@pytest.mark.parametrize("name", [n for n in VECTORS if "chunks" not in n])
def test_the_page_gives_the_vector(name: str) -> None:
    assert matches(name)


@pytest.mark.parametrize("name", READINGS)
def test_a_vector_catches_a_wrong_reading(name: str) -> None:
    others = {other for other in READINGS if other != name}
    assert not matches(f"float32_{name}", **READINGS[name])
    caught = {other for other in others if not matches(f"float32_{name}", **READINGS[other])}
    assert caught <= ({"code_ties"} if name == "g_by_s" else set())
    with (SPECS / "tables" / "nvfp4.tsv").open() as table:
        rows = {row["name"]: row for row in csv.DictReader(table, delimiter="\t")}
    assert rows[f"float32_{name}"]["alone"]
