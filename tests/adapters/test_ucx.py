"""The collectives over UCX, between processes on one machine: this file is also what they run."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from ranks import check_collectives
from tightwire.adapters.rendezvous import meet
from tightwire.adapters.ucx import Ucx
from tightwire.arrays import Target
from transports import (
    BOUND,
    PATIENCE,
    check_communicator,
    check_sizes,
    check_survivors,
    check_transport,
    free_port,
    launch,
    survive,
)


def every_collective(join: Callable[..., Ucx]) -> Any:
    transport = join()
    for library in ("numpy", "torch"):
        check_transport(transport, Target(library), adds=False)
    if transport.rank == 0:
        transport.send(np.zeros(9, np.uint8), 1)
    elif transport.rank == 1:
        with pytest.raises(ConnectionError, match="rank 0 .* sent too much"):
            transport.recv(np.empty(8, np.uint8), 0)
    return check_communicator(transport, ("torch", "numpy"))


def one_rank(join: Callable[..., Ucx]) -> Any:
    transport = join()
    check_transport(transport, Target("numpy"), adds=False)
    check_collectives(transport, "torch", "bfloat16", "first")
    return "done"


def silent(join: Callable[..., Ucx]) -> Any:
    transport = join(PATIENCE)
    assert transport.timeout == PATIENCE
    x = torch.ones(100_000, dtype=torch.bfloat16)
    return survive(transport, x, lambda: time.sleep(100))


def killed(join: Callable[..., Ucx]) -> Any:
    x = np.ones(100_000, np.float32)
    return survive(join(), x, lambda: os.kill(os.getpid(), signal.SIGKILL))


def closed(join: Callable[..., Ucx]) -> Any:
    """The last rank ends as programs do, and nobody has an error of it."""
    transport = join()
    transport.all_reduce(np.ones(3))
    transport.barrier()
    transport.close()
    return "done"


def absent(join: Callable[..., Ucx]) -> Any:
    """The last rank never joins."""
    rank, world_size = int(sys.argv[2]), int(sys.argv[3])
    if rank == world_size - 1:
        time.sleep(100)
    start = time.monotonic()
    with pytest.raises(OSError) as caught:
        join(PATIENCE)
    return [str(caught.value), time.monotonic() - start]


def run(task: str, world_size: int) -> list[Any]:
    return launch(__file__, task, world_size, str(free_port()))


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_collective(world_size: int) -> None:
    for sizes in run("every_collective", world_size):
        check_sizes(sizes)


def test_one_rank() -> None:
    assert run("one_rank", 1) == ["done"]


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_silent_rank_is_named(world_size: int) -> None:
    found = run("silent", world_size)
    check_survivors(found, ("TimeoutError",))
    # Others than the last may be late too: they have given up already.
    assert any(f"{world_size - 1}]" in message for *_, message, _ in found)


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_killed_rank_is_an_error(world_size: int) -> None:
    found = run("killed", world_size)
    check_survivors(found, ("ConnectionError",))
    assert any(f"rank {world_size - 1} is gone" in message for *_, message, _ in found)


def test_ranks_leave_in_peace() -> None:
    assert run("closed", 3) == ["done", "done"]


def test_an_absent_rank_keeps_nobody() -> None:
    for message, took in run("absent", 3):
        assert re.search(r"ranks \[2\] did not come|rank 0 .* has left", message)
        assert took < BOUND


def meeting(*hellos: tuple[int, int], timeout: float = 5.0) -> list[Any]:
    """What the ranks of a meeting get or raise, in threads; a hello is rank and world size."""
    address = ("127.0.0.1", free_port())

    def come(rank: int, world_size: int) -> Any:
        try:
            return meet(rank, world_size, address, bytes([rank] * rank), timeout)
        except (OSError, RuntimeError) as error:
            return error

    with ThreadPoolExecutor(len(hellos)) as pool:
        return list(pool.map(lambda hello: come(*hello), hellos))


def test_ranks_meet() -> None:
    assert meeting((2, 3), (0, 3), (1, 3)) == [[b"", b"\1", b"\2\2"]] * 3
    assert meeting((0, 1)) == [[b""]]
    assert all(isinstance(error, TimeoutError) for error in meeting((1, 2), timeout=0.2))
    (error,) = meeting((0, 3), timeout=0.2)
    assert "ranks [1, 2] did not come" in str(error)
    zero, one = meeting((0, 2), (1, 3))
    assert "rank 1 of 3 came" in str(zero)
    assert isinstance(one, ConnectionError)
    errors = meeting((0, 3), (1, 3), (1, 3))
    assert "rank 1 of 3 came to [0, 1] of 3" in str(errors[0])
    assert all(isinstance(error, ConnectionError) for error in errors[1:])
    with pytest.raises(ValueError, match="rank is 3; allowed: 0 to 2"):
        meet(3, 3, ("127.0.0.1", 1), b"")


def main(task: str, rank: str, world_size: str, port: str) -> None:
    """Run the task, which joins the group; print what it returns."""
    torch.set_num_threads(1)

    def join(timeout: float = BOUND) -> Ucx:
        return Ucx(int(rank), int(world_size), ("127.0.0.1", int(port)), timeout)

    sys.stdout.write(json.dumps(globals()[task](join)))
    sys.stdout.flush()
    # Silent, killed and absent ranks leave a group in pieces.
    if task != "closed":
        os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
