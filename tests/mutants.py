"""What tests of damaged files and directories do to JSON."""

from __future__ import annotations

from typing import Any

import numpy as np

Rng = np.random.Generator
NUMBERS = [-1, 0, 1, 127, 128, 256, 1 << 31, 1 << 60, 1 << 63, 1 << 64, 10**400, 0.5, 1e999, -0.0]
ODD: list[Any] = [*NUMBERS, None, True, "", "U8", "BF16", "\ud800", "0", [], {}, [[]], [0, 128]]
NAMES = [
    "",
    "x",
    "__metadata__",
    "tightwire",
    "0",
    "1",
    "shape",
    "\udfff",
    "tensor",
    "dict",
    "tuple",
]


def _any_key(rng: Rng, parent: Any) -> Any:
    keys = list(parent) if isinstance(parent, dict) else range(len(parent))
    return keys[int(rng.integers(len(keys)))]


def edit_value(rng: Rng, root: Any) -> None:
    """One value inside a JSON value is another, gone, renamed, or there twice."""
    parent, key = root, _any_key(rng, root)
    while isinstance(parent[key], (dict, list)) and parent[key] and rng.random() < 0.8:
        parent = parent[key]
        key = _any_key(rng, parent)
    what = rng.integers(5)
    if what == 0 and isinstance(parent, dict):
        parent[str(rng.choice(NAMES))] = parent.pop(key)
    elif what == 1:
        del parent[key]
    elif what == 2 and isinstance(parent[key], int):
        parent[key] += int(rng.choice([-128, -1, 1, 128, 1 << 62]))
    elif what == 3 and isinstance(parent, list):
        parent.append(parent[key])
    else:
        parent[key] = ODD[int(rng.integers(len(ODD)))]
