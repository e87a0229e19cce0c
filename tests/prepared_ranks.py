"""Prepared calls on threads as ranks: what their tests share."""

from __future__ import annotations

import unittest.mock
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from tightwire.adapters.collectives import prepared_sums
from tightwire.adapters.collectives.prepared import PreparedCalls
from tightwire.adapters.collectives.prepared_work import Work
from tightwire.adapters.transports.peer import connect_threads
from tightwire.adapters.transports.threads import ThreadTransport, run_ranks

ROUTES = ("network", "peers")
DTYPE = ml_dtypes.bfloat16
#: Of pieces in tests: tensors of 5,000 elements have three.
PIECE_NBYTES = 3 << 10


def run(
    world: int,
    route: str,
    task: Callable[[PreparedCalls], Any],
    timeout: float = 20,
    *,
    pieces: bool = False,
    **options: Any,
) -> list[Any]:
    """`task` on every rank of a group of threads; with `pieces` small sums are made in some."""
    memory = connect_threads(world, timeout)

    def one(transport: ThreadTransport) -> Any:
        peers = memory[transport.rank] if route == "peers" else None
        return task(PreparedCalls(transport, peers=peers, **options))

    least = PIECE_NBYTES if pieces else prepared_sums.PIECE_NBYTES
    with unittest.mock.patch.object(prepared_sums, "PIECE_NBYTES", least):
        return run_ranks(world, one, timeout)


def tensor(rank: int, n: int, call: int = 0, dtype: Any = DTYPE, wild: bool = False) -> Any:
    """What a rank has in a call; `wild` values do not compress."""
    rng = np.random.default_rng([rank, n, call])
    if wild:
        return rng.integers(0, 1 << 15, n).astype(np.uint16).view(np.int16).view(dtype)
    return rng.normal(0, 0.02, n).astype(np.float32).astype(dtype)


def same(x: Any, y: Any) -> bool:
    return bool(x.dtype == y.dtype and x.tobytes() == y.tobytes())


CASES = (
    "all_gather",
    "all_to_all",
    "reduce_scatter",
    "one-shot",
    "one-shot, pieces",
    "two-shot",
    "two-shot, pieces",
    "broadcast",
)


def prepare(calls: PreparedCalls, case: str, like: Any) -> Any:
    if "shot" in case:
        return calls.all_reduce(like, algorithm=case.partition(",")[0])
    if case == "broadcast":
        spread = calls.broadcast(like, root=0)

        def call(x: Any, out: Any) -> Work:
            out[...] = x if calls.rank == 0 else np.nan
            return spread(out)

        call.prepared = spread  # type: ignore[attr-defined]
        return call
    return getattr(calls, case)(like)


def result(case: str, n: int, world: int) -> Any:
    """Memory for the result of a tensor of n elements."""
    size = {"all_gather": world * n, "reduce_scatter": n // world}.get(case, n)
    return np.full(size, np.nan, DTYPE)


def damage(call: Any, at: int, bit: int) -> None:
    """Have a bit change of what the next call of a prepared collective gets from rank 0."""
    prepared = getattr(call, "prepared", call)
    slot = prepared._slots[prepared._calls.phase]
    messages = slot.exchanges[0].messages
    move = messages.exchange

    def damaging(*message: Any) -> None:
        messages.exchange = move
        move(*message)
        messages.received[0][at] ^= bit

    messages.exchange = damaging
