"""States of weights and ranks that transfer them, for tests of weight transfer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from tightwire.adapters.transports.threads import ThreadTransport, run_ranks
from tightwire.formats.dtypes import BY_NAME, DType

State = dict[str, Any]
N = 5003
#: In seconds: of transports whose ranks are all there, on a busy machine that compiles.
PATIENCE = 120.0
#: Dtypes of the tests that are quick: coded, stored raw, and without bits to code.
SOME = tuple(BY_NAME[name] for name in ("bfloat16", "uint8", "int64", "complex128", "bool"))


def first_state(nelem: int = 1501, dtypes: tuple[DType, ...] = SOME) -> State:
    rng = np.random.default_rng(0)
    embed = rng.normal(0, 0.02, N).astype(ml_dtypes.bfloat16)
    state = {
        "embed": embed,
        "head": embed,
        "v": rng.normal(0, 0.02, (77, 53)).astype(np.float32),
        "tiny": np.ones(3, np.float32),
        "scale": np.array(0.5, np.float32),
        "none": np.empty((0, 4), np.float16),
    }
    for dtype in dtypes:
        bits = rng.integers(0, 2, nelem * dtype.itemsize, dtype=np.uint8)
        state[dtype.name] = bits.view(dtype.numpy)
    return state


def step(state: State, seed: int) -> None:
    """A step of training, in place: some elements of some tensors change."""
    rng = np.random.default_rng(seed)
    state["embed"].view(np.int16)[rng.integers(0, N, N // 100)] += 1
    state["v"][seed % 77, 5] = np.nan
    state["tiny"][seed % 3] += 1
    for name in BY_NAME.keys() & state.keys():
        state[name].view(np.uint8)[seed % 7 :: 997] ^= 1


def copied(state: State) -> State:
    made = {id(x): x.copy() for x in state.values()}
    return {name: made[id(x)] for name, x in state.items()}


def blank(state: State) -> State:
    made = {id(x): np.full_like(x, 1) for x in state.values()}
    return {name: made[id(x)] for name, x in state.items()}


def raw(x: Any) -> tuple[str, tuple[int, ...], bytes]:
    return str(x.dtype), x.shape, x.tobytes()


def same(a: State, b: State) -> bool:
    return a.keys() == b.keys() and all(raw(a[name]) == raw(b[name]) for name in a)


def ranks(count: int, task: Callable[[ThreadTransport], Any], timeout: float = PATIENCE) -> Any:
    """What each rank returns, or the error that it raises."""

    def caught(transport: ThreadTransport) -> Any:
        try:
            return task(transport)
        except Exception as error:
            transport.close()
            return error

    return run_ranks(count, caught, timeout)


def versions(count: int, nelem: int = 1501, dtypes: tuple[DType, ...] = SOME) -> list[State]:
    states = [first_state(nelem, dtypes)]
    for seed in range(1, count):
        states.append(copied(states[-1]))
        step(states[-1], seed)
    return states
