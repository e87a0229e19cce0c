"""Delta directories with a damaged file: versions before it and after it are still reached."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tightwire as tw
from tightwire.delta_files import file_name

State = dict[str, Any]


def copied(state: State) -> State:
    return {name: x.copy() for name, x in state.items()}


def same(a: State, b: State) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def test_a_damaged_file_is_done_without(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    states: list[State] = [
        {"w": rng.normal(0, 0.02, 5000).astype(np.float32), "b": np.zeros(3, np.int64)}
    ]
    tw.save_delta(states[0], None, tmp_path)
    for i in range(3):
        states.append(copied(states[-1]))
        states[-1]["w"][i::50] += np.float32(1e-3)
        tw.save_delta(states[-1], states[-2], tmp_path)
    path = tmp_path / file_name(2, 1)
    size = path.stat().st_size // 2
    path.write_bytes(path.read_bytes()[:size])
    damage = rf"{file_name(2, 1)}: the file has {size} bytes"

    tensors = copied(states[0])
    options: list[dict[str, Any]] = [{}, {"version": 2}, {"since": 0}, {"whole": True}]
    for given in options:
        with pytest.raises(tw.FormatError, match=damage):
            tw.apply_delta(tensors, tmp_path, **given)
        assert same(tensors, states[0])
    assert tw.apply_delta(tensors, tmp_path, version=1) == 1
    assert same(tensors, states[1])
    tensors = copied(states[2])
    assert tw.apply_delta(tensors, tmp_path) == 3
    assert same(tensors, states[3])

    tw.save_delta(states[3], None, tmp_path)
    tensors = copied(states[0])
    with pytest.raises(tw.FormatError, match=damage):
        tw.apply_delta(tensors, tmp_path)
    assert tw.apply_delta(tensors, tmp_path, whole=True) == 3
    assert same(tensors, states[3])
    # A worker that follows the directory does so by itself.
    tensors = copied(states[0])
    assert tw.subscribe(tensors, tmp_path, timeout=0).update() == 3
    assert same(tensors, states[3])
