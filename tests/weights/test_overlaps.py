"""Targets whose arrays overlap in memory, such as views of one tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tightwire as tw
from tightwire.adapters.errors import CollectiveError
from tightwire.adapters.transports.threads import run_ranks
from tightwire.overlaps import overlapping
from tightwire.state_tensors import ArrayState

torch = pytest.importorskip("torch")


def views(x: Any) -> dict[str, Any]:
    """A fused weight, its parts, and it in another shape."""
    return {"qkv": x, "q": x[:100], "k": x[100:200], "flat": x.reshape(-1), "t": x[50:150].T}


def made(library: str, seed: int) -> Any:
    x = np.random.default_rng(seed).normal(0, 0.02, (300, 40)).astype(np.float32)
    return x if library == "numpy" else torch.from_numpy(x).bfloat16()


def equal(a: Any, b: Any) -> bool:
    return bool((a == b).all())


def copy(x: Any) -> Any:
    return x.copy() if isinstance(x, np.ndarray) else x.clone()


@pytest.mark.parametrize("library", ["torch", "numpy"])
@pytest.mark.parametrize("form", ["adaptive", "difference", "overwrite"])
@pytest.mark.parametrize("hold", [None, "buffers"])
def test_views_of_a_tensor_follow(library: str, form: str, hold: Any) -> None:
    """Differences are not added to an element once for each view of it."""

    def task(transport: Any) -> list[Any]:
        x = made(library, transport.rank)
        seen = []
        publisher = tw.publish(views(x), transport, form=form) if transport.rank == 0 else None
        subscriber = tw.subscribe(views(x), transport, hold=hold) if transport.rank else None
        for i in range(3):
            if publisher is not None:
                x[i::50] *= 1.5
                publisher.send()
            elif subscriber is not None:
                subscriber.update()
            seen.append(copy(x))
        return seen

    sent, received = run_ranks(2, task)
    assert not equal(sent[0], sent[1])
    assert all(map(equal, sent, received))


@pytest.mark.parametrize("hold", [None, "buffers"])
@pytest.mark.parametrize("changed", ["q", "qkv"])
def test_two_values_for_one_element_are_refused(tmp_path: Path, changed: str, hold: Any) -> None:
    x = made("torch", 0)
    old = {name: y.clone() for name, y in views(x).items()}
    new = old | {changed: old[changed] * 2}
    kept = x.clone()
    tw.save_delta(old, None, tmp_path)
    tw.save_delta(new, old, tmp_path)
    with pytest.raises(ValueError, match=r"shares memory with others of .*two values there"):
        tw.apply_delta(views(x), tmp_path)
    assert equal(x, kept)

    def task(transport: Any) -> Any:
        y = x.clone()
        with pytest.raises(CollectiveError, match=r"ranks \[1\]: ValueError: .*two values there"):
            if transport.rank == 0:
                tw.publish(new, transport).send()
            else:
                tw.subscribe(views(y), transport, hold=hold).update()
        return y

    assert equal(run_ranks(2, task)[1], kept)


def test_which_arrays_overlap() -> None:
    x, y = np.zeros((10, 10)), torch.zeros(10, 10)
    state = {"x": x, "tied": x, "end": x[9:], "back": x[4::-1], "y0": y[:5], "y1": y[5:]}
    state |= {"empty": x[:0], "zero": np.zeros(())}
    assert sorted(map(sorted, overlapping(ArrayState(state)))) == [["back", "end", "x"]]
    assert overlapping(ArrayState({"y": y, "c": y[:, 3], "z": torch.zeros(3)})) == [["y", "c"]]
