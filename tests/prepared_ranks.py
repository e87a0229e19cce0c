"""Prepared calls on threads as ranks: what their tests share."""

from __future__ import annotations

import os
import signal
import threading
import unittest.mock
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from tightwire.adapters.collectives import prepared_sums
from tightwire.adapters.collectives.prepared import PreparedCalls, Sizes
from tightwire.adapters.collectives.prepared_work import Work
from tightwire.adapters.transports.peer import connect_threads
from tightwire.adapters.transports.threads import ThreadTransport, run_ranks

ROUTES = ("network", "peers", "exact")
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
        sizes: Sizes = "exact" if route == "exact" else "learnt"
        return task(PreparedCalls(transport, peers=peers, sizes=sizes, **options))

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


def wanted(case: str, parts: list[Any], rank: int) -> Any:
    """The result of a rank without compression; `parts` are what the ranks have."""
    n = parts[0].size // len(parts)
    mine = slice(rank * n, (rank + 1) * n)
    if case == "all_gather":
        return np.concatenate(parts)
    if case == "all_to_all":
        return np.concatenate([part[mine] for part in parts])
    if case == "broadcast":
        return parts[0]
    total = parts[0].astype(np.float32)
    for part in parts[1:]:
        total = total + part.astype(np.float32)
    total = total.astype(parts[0].dtype)
    return total[mine] if case == "reduce_scatter" else total


def check_prepared(transport: Any) -> None:
    """Every prepared collective of a group, between real processes, also of what does not fit."""
    world, rank = transport.world_size, transport.rank
    n = 3000 * world
    calls = PreparedCalls(transport)
    with unittest.mock.patch.object(prepared_sums, "PIECE_NBYTES", PIECE_NBYTES):
        prepared = {case: prepare(calls, case, tensor(0, n)) for case in CASES}
    again = 0
    for k in range(4):
        parts = [tensor(r, n, k) for r in range(world)]
        if k == 2:
            powers = 2.0 ** np.random.default_rng(k).uniform(-90, 90, n)
            parts[0] = powers.astype(DTYPE)
        for case, call in prepared.items():
            out = result(case, n, world)
            work = call(parts[rank].copy(), out)
            work.wait()
            again += work.repeated
            assert same(out, wanted(case, parts, rank)), (case, k)
    assert again or world == 1


def check_tensors(transport: Any, device: Any, codec: str) -> int:
    """Every prepared collective of PyTorch's tensors, of one and of lists.

    Calls come back to the same memory, as those do that are recorded on a GPU. Returns how many
    were made again, as their data did not fit.
    """
    import torch
    import torch.distributed as dist

    world, rank = transport.world_size, transport.rank
    sizes, again = (4099 * world, 77 * world), 0

    def given(n: int, k: int) -> Any:
        x = tensor(rank, n, k, np.float32)
        if k == 2 and rank == 0:
            x = 2.0 ** np.random.default_rng([n, k]).uniform(-90, 90, n)
        return torch.from_numpy(x.astype(np.float32)).to(device).bfloat16()

    def of_all(x: Any) -> list[Any]:
        found = [torch.empty_like(x) for _ in range(world)]
        dist.all_gather(found, x)
        return found

    def near(x: Any, y: Any) -> bool:
        if codec != "zipccl":
            error = (x.double() - y.double()).square().sum() / y.double().square().sum()
            return bool(error < 0.05)
        return bool(torch.equal(x.view(torch.int16), y.view(torch.int16)))

    calls = PreparedCalls(transport, codec)
    for listed in (False, True):
        used = sizes if listed else sizes[:1]
        for case in CASES:
            if "pieces" in case:
                continue
            xs = [given(n, 0) for n in used]
            call = prepare(calls, case, xs if listed else xs[0])
            call = getattr(call, "prepared", call)
            scale = {"all_gather": world, "reduce_scatter": 1 / world}.get(case, 1)
            outs = [
                torch.empty(round(n * scale), dtype=x.dtype, device=device)
                for n, x in zip(used, xs, strict=True)
            ]
            for k in range(5):
                wanted = []
                for n, x, out in zip(used, xs, outs, strict=True):
                    x.copy_(given(n, k))
                    parts = of_all(x)
                    wanted.append(_of_tensors(case, parts, rank))
                    out.fill_(float("nan"))
                    if case == "broadcast":
                        out.copy_(x if rank == 0 else out)
                arguments = [outs] if case == "broadcast" else [xs, outs]
                work = call(*(arguments if listed else [each[0] for each in arguments]))
                work.wait()
                again += work.repeated
                for out, value in zip(outs, wanted, strict=True):
                    assert near(out, value), (codec, case, listed, k)
                    if case == "all_gather" or "shot" in case:
                        assert all(torch.equal(out, other) for other in of_all(out)), (case, k)
    return again


def _of_tensors(case: str, parts: list[Any], rank: int) -> Any:
    """As ``wanted``, of PyTorch's tensors."""
    import torch

    shares = [part.chunk(len(parts))[rank] for part in parts]
    if case == "all_gather":
        return torch.cat(parts)
    if case == "all_to_all":
        return torch.cat(shares)
    if case == "broadcast":
        return parts[0]
    terms = shares if case == "reduce_scatter" else parts
    total = terms[0].float()
    for term in terms[1:]:
        total = total + term.float()
    return total.bfloat16()


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


class UserError(Exception):
    """What no library raises."""


def strike(fault: str) -> None:
    """What befalls this process."""
    if fault == "raises":
        raise UserError("out of luck")
    os.kill(os.getpid(), {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}[fault])


def strike_soon(fault: str) -> None:
    """The same while this process waits; what its handler raises comes up when the wait ends."""
    if fault == "raises":
        signal.signal(signal.SIGALRM, lambda *_: strike(fault))
        signal.setitimer(signal.ITIMER_REAL, 0.2)
    else:
        threading.Timer(0.2, strike, [fault]).start()


def befall(call: Any, stage: str, fault: str) -> None:
    """Have a fault come at a stage of the next call."""
    encode, exchange = call._encode, call._exchange

    def encodes(*arguments: Any) -> None:
        if stage == "before encode":
            strike(fault)
        encode(*arguments)

    def exchanges(*arguments: Any, **options: Any) -> Callable[[], None]:
        if stage == "before network":
            strike(fault)
        if stage == "while waiting":
            strike_soon(fault)
        arrived: Callable[[], None] = exchange(*arguments, **options)
        if stage == "before decode":
            strike(fault)
        return arrived

    call._encode, call._exchange = encodes, exchanges
