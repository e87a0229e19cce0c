"""The collectives over NCCL, one process for each GPU: this file is also what they run."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

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

pytestmark = pytest.mark.multi_gpu


def run(task: str, world_size: int) -> list[Any]:
    torch = pytest.importorskip("torch")
    pytest.importorskip("cupy")
    if torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} GPUs; found: {torch.cuda.device_count()}")
    return launch(__file__, task, world_size, str(free_port()), warnings="default")


def every_collective(join: Callable[..., Any]) -> list[list[int]]:
    """All checks, with tensors on a stream of their own; CuPy arrays in the transport alone."""
    import cupy
    import torch

    from tightwire.arrays import Target

    transport = join()
    check_transport(transport, Target("cupy", cupy.cuda.Device()), ops=("sum", "max"))
    device = torch.device("cuda", torch.cuda.current_device())
    with torch.cuda.stream(torch.cuda.Stream()):
        check_transport(transport, Target("torch", device), ops=("sum", "max"))
        with pytest.raises(NotImplementedError, match="NCCL has no 'or'"):
            transport.all_reduce(torch.zeros(3, dtype=torch.int64, device=device), "or")
        return check_communicator(transport, ("torch",), device)


def two_ranks(join: Callable[..., Any]) -> Any:
    """The checks; then the last rank is silent."""
    import torch

    sizes = every_collective(join)
    x = torch.ones(100_000, dtype=torch.bfloat16, device="cuda")
    error = survive(join(PATIENCE + 5), x, lambda: time.sleep(100))
    return {"sizes": sizes, "error": error}


def killed(join: Callable[..., Any]) -> Any:
    """The last rank is killed."""
    import torch

    x = torch.ones(100_000, dtype=torch.bfloat16, device="cuda")
    return survive(join(PATIENCE + 5), x, lambda: os.kill(os.getpid(), signal.SIGKILL))


def test_every_collective_and_a_silent_rank() -> None:
    (found,) = run("two_ranks", 2)
    check_sizes(found["sizes"])
    check_survivors([found["error"]], ("TimeoutError",))


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_killed_rank_is_an_error(world_size: int) -> None:
    check_survivors(run("killed", world_size), ("TimeoutError", "NcclError", "RuntimeError"))


def test_every_collective_of_four() -> None:
    for sizes in run("every_collective", 4):
        check_sizes(sizes)


def test_an_absent_rank_keeps_nobody() -> None:
    (took,) = run("absent", 2)
    assert took < BOUND


def absent(join: Callable[..., Any]) -> float:
    """The last rank does not join."""
    if int(sys.argv[2]) == 1:
        time.sleep(100)
    from tightwire.adapters.transports.nccl import Nccl

    start = time.monotonic()
    with pytest.raises(TimeoutError, match="not all of 2 ranks took part"):
        Nccl(Nccl.unique_id(), 0, 2, PATIENCE)
    return time.monotonic() - start


def main(task: str, rank: str, world_size: str, port: str) -> None:
    """Run the task, which joins the group; print what it returns."""
    import torch

    from tightwire.adapters.transports.nccl import Nccl
    from tightwire.adapters.transports.rendezvous import meet

    me, n = int(rank), int(world_size)
    torch.cuda.set_device(me)

    def join(timeout: float = BOUND) -> Any:
        mine = Nccl.unique_id() if me == 0 else b""
        found = meet(me, n, ("127.0.0.1", int(port)), mine)
        return Nccl(found[0], me, n, timeout)

    sys.stdout.write(json.dumps(globals()[task](join)))
    sys.stdout.flush()
    # Silent and killed ranks leave a group in pieces.
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
